"""Exports in vLLM, which needs an environment of its own: how it serves them, and the comparison with the tuned model.

Offers `check.check_in_vllm`; `child` is the program of the process that runs vLLM.
Must not know how the files were written.
"""
