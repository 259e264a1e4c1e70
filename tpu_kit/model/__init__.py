"""A causal language model as the kit trains it: weights, LoRA, attention kernels, layer scan, quantization.

Offers `trainable.load_model` and `shape_cache.read_shape`; its folders change how layers are computed.
Must not know batches, losses or optimizers.
"""
