"""How good answers are: verifiers, accuracy on held-out rows, comparison before and after, lm-evaluation-harness.

Offers `evaluate.evaluate` and `report`.
Must not know training.
"""
