"""Exports a tuned model in other programs' formats, and compares every export with the tuned model.

Offers `export.export`; `hub` pushes exports and checkpoints.
Must not know training.
"""
