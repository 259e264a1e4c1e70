"""The embedded model, the shapes of known models, and the word problems that the kit trains on without a download.

Offers `embedded` (the model, its tokenizer and its rows). What makes these files lies beside them.
Must not know any other room.
"""
