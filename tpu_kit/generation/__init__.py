"""Generates answers with a model: decoder, key/value cache, sampling. `evaluation` judges the answers.

Offers `answers.generate` and `generator.Generator`; `reference_check` compares both with transformers.
Must not know training.
"""
