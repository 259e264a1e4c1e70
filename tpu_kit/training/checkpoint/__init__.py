"""Checkpoints that survive preemption, in a folder or an object store.

Offers `manager.CheckpointManager` (the writer) and `manager.list_checkpoints` (readers); `manifest` is the format.
Must not know the meaning of the tensors.
"""
