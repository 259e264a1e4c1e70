"""Memory, time and cost of a run before it starts: by formula, and by the TPU compiler.

Offers `planner.plan`, `memory_estimate.estimate`, `compile_check.compile_step` and `preflight.check_before_launch`.
Must not touch a device: a compile runs in a child process.
"""
