"""Facts that hold without a model: chips, slices, package versions, this computer, and its files.

Offers `chips.chip`, `slices.find_slice`, `checks.Machine`, `host`, the checks made before a launch, and `storage`.
Must not import torch, touch a device, or know what a model needs.
"""
