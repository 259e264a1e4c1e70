"""Wraps private interfaces of torch_xla and JAX: loops, traced functions, kernels, the TPU compiler.

Offers `scan.scan`, `scan.Traced`, `traced_program`, `compiler` and `hlo` (reads compiled programs).
Must not know models, data or training.
"""
