"""A causal language model as the kit trains it: weights, LoRA, attention kernels, layer scan, quantization.

Offers `causal_lm.load_model`, `shape_cache.read_shape` and the modules that change how layers are computed.
Must not know batches, losses or optimizers.
"""
