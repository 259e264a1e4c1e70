"""Private interfaces of torch_xla and JAX: loops, traced functions, kernels, the TPU compiler, compiled programs.

Offers `scan.scan`, `scan.Traced`, `program` (the compiler), `hlo` (costs, loops) and `hlo_memory` (large buffers).
Must not know models, data or training.
"""
