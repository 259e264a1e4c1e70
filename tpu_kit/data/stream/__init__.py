"""Text without end, for continued pre-training.

Offers: an ordered list of shards (`shards`), their documents, packed (`packed_shards`), what a run is told of them
before (`opening`), and a process that makes them ahead of the training (`feeder`). Must not know: models and training.
"""
