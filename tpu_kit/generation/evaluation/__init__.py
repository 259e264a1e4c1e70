"""Measures the quality of answers: verifiers, rewards, accuracy on held-out rows, comparison of models.

Offers `evaluate.evaluate` and `evaluate.compare`.
Must not know training.
"""
