"""Training recipes that a user starts; each is one short module.

Offers `sft.train`.
Must not be imported by the folders that it uses.
"""
