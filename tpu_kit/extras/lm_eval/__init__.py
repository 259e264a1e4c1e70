"""Runs the tasks of lm-evaluation-harness on the kit's generator.

Offers `harness.harness_model`.
Must not need lm-eval to be installed before it is called.
"""
