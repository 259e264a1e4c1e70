"""Turns rows into packed batches: sources, columns, schemas, chat encoding, tokens, batches.

Offers `prepare.prepare`, which returns the data of a run with its report.
Must not know models or devices.
"""
