"""Wraps calls of torch_tpu (TorchTPU), many of them private; experimental.

Offers the device, programs of traced functions, loops and JAX kernels. Must not know models, data or training.
Every module can be imported without torch_tpu.
"""
