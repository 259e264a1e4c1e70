"""Training recipes that a user starts; each is one short module.

Offers `sft.train` and the commands around a run.
Must not be imported by the folders that it uses.
"""
