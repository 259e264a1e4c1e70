"""Streams text for continued pre-training.

Offers an ordered list of shards (`shards`), their packed documents (`packed_shards`), a report before the run
(`opening`), and a process that makes shards ahead of the training (`feeder`). Must not know models and training.
"""
