"""Exports of a tuned model in the formats of other programs, compared with the tuned model.

Offers `export.export`; `hub` pushes exports and checkpoints.
Must not know training.
"""
