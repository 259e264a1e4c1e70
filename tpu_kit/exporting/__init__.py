"""A tuned model in the formats of other programs, compared with the model that was tuned.

Offers `export.export`.
Must not know training.
"""
