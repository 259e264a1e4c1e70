"""Exports of a tuned model in the formats of other programs, compared with the tuned model.

Offers `export.export`.
Must not know training.
"""
