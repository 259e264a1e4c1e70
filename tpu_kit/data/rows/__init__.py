"""Reads rows of any source as conversations: files, columns, values, turns.

Offers `sources.load_rows` and `schemas`, which reads the conversation of a row.
Must not know a tokenizer.
"""
