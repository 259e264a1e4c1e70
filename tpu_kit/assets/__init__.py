"""The embedded model, its word problems, and the shapes of known models; nothing here needs a download.

Offers `embedded` (the model, its tokenizer and its rows). `make_embedded` makes the model.
Must not know any other room.
"""
