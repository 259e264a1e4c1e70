"""Private interfaces of torch_xla: scan, traced functions, and readers of compiled programs.

Offers `scan.scan`, `traced_function`, `hlo` (costs, loops, collectives) and `hlo_memory` (live buffers).
Must not know what is computed.
"""
