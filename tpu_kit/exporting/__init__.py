"""Exports of a tuned model in the formats of other programs, compared with the tuned model, and the Hugging Face hub.

Offers `export.export`, `publish` and `checkpoint_uploads` for runs.
Must not know the training loop.
"""
