"""Private interfaces of torch_xla and JAX: loops, traced functions, kernels, the TPU compiler, compiled programs.

Offers `scan.scan`, `scan.Traced`, `traced_program`, `compiler` and `hlo` (what it says).
Must not know models, data or training.
"""
