"""Exports in vLLM, which needs its own environment: the command that serves them, and the comparison in vLLM.

Offers `check.check_in_vllm`; `child` is the program of the process that runs vLLM.
Must not know how the files were written.
"""
