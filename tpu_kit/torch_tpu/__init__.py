"""Calls of torch_tpu (TorchTPU), many of them private, behind a few functions; experimental.

Offers the device, programs of traced functions, loops and JAX kernels in them. Must not know what they compute.
Without torch_tpu every module can be imported.
"""
