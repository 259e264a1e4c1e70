"""Runs a function on all devices: launch, replicas, collectives, preemption, and the CPU simulation of a TPU host.

Offers `launch.launch(fn, config)` and, in a replica, `runtime.current()`.
Must not know models, data or training.
"""
