"""Conversations as token ids with a mask of the tokens that carry loss.

Offers `chat_encoding`, and `chat_documents`, which gives each reply with loss its own prompt.
Must not know where the rows come from.
"""
