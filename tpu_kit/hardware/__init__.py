"""Facts about chips, slices, package versions and this machine, each with its source.

Offers `chips.chip`, `slices.find_slice`, `machine.Machine` and `host`, the checks made before a launch.
Must not import torch or touch a device.
"""
