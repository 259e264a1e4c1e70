"""Answers of a model, and how they are judged: decoder, key/value cache, sampling; `evaluation`.

Offers `answers.generate` and `generator.Generator`; `reference_check` compares with transformers.
Must not know training.
"""
