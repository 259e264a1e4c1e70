"""Describes the machine, independent of a model: chips, slices, package versions, this computer, and its files.

Offers `chips.chip`, `slices.find_slice`, `checks.Machine`, `host`, the checks made before a launch, and `storage`.
Must not import torch, open a device, or know a model's requirements.
"""
