"""The training step as the TPU compiler sees it, on any machine.

Offers `trace` (the step without weights) and `compile_check` (its memory and time).
Must not open a TPU.
"""
