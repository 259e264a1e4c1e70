"""Decoder layers as one loop: what a layer is called with, which of its tensors are kept, and its compiled program.

Offers `layer_scan.stack` and `activation_checkpointing`.
Must not know one family of layers from another.
"""
