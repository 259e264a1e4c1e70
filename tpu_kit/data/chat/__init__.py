"""Encodes conversations as token ids with a mask of the tokens that carry loss.

Offers `chat_encoding`, and `chat_documents`, which renders every reply with loss after its prompt at inference.
Must not know where the rows come from.
"""
