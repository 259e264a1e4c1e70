"""Decoder layers as a loop: the arguments of a layer, the tensors that it saves, and its compiled program.

Offers `layer_scan.stack` and `activation_checkpointing`.
Must not distinguish families of layers.
"""
