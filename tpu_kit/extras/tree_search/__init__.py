"""Answers a question by a tree of thoughts.

Offers `search.think`, `search.search` and `options.SearchOptions`; the command `search`.
Must not sample tokens: the generator does.
"""
