"""The embedded models and their problems, the shapes of known models, and the notebooks, all without a download.

Offers `embedded` (the model, its tokenizer and its rows). `tests/support/make_embedded.py` trains the model.
Must not import any other folder of tpu_kit.
"""
