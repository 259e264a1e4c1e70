"""What to do about errors of torch_xla and libtpu that say nothing of their cause, by their text."""

from __future__ import annotations

import re

_KNOWN = (
    (
        r"module 'torch' has no attribute 'xla'",
        "torch.utils.checkpoint does not know XLA: set optim.remat=full, or in a function of your own call "
        "torch_xla.utils.checkpoint.checkpoint, without which XLA would keep what it should compute again",
    ),
    (
        r"undefined symbol|cannot import name '_XLAC'|No module named '_XLAC'",
        "torch and torch_xla do not pair: `python -m tpu_kit doctor` names the versions and the line that mends them",
    ),
    (
        r"Runtime is already initialized|Cannot replicate if number of devices",
        "the device was touched before the launch: do not call torch_xla.device() in a cell, and restart the kernel",
    ),
    (
        r"(libtpu|TPU)[^\n]{0,40} already in use|resource busy|/dev/(accel|vfio)[^\n]{0,60}(not permitted|denied)",
        "another process holds the TPU, or it is not this user's: `python -m tpu_kit doctor` names its PID and the fix",
    ),
    (
        r"`?fused=True`? requires|FusedAdam",
        "XLA has no fused optimizer: use fused=False, or leave the optimizer to optim.optimizer=adamw",
    ),
    (
        r"metadata\.google\.internal|169\.254\.169\.254|Failed to get TPU metadata",
        "torch_xla asks Google Cloud what TPU this is, and nobody answers: `python -m tpu_kit doctor` prints the "
        "variables that tell it, or use device_type=xla-cpu where there is no TPU",
    ),
    (
        r"attempted to access the data pointer on an invalid python storage",
        "a tensor of the device cannot be saved as it is: move it to the CPU first, as train does with the adapter",
    ),
)


def advice(text: str) -> str:
    """What to do about an error or traceback; one line for each cause it names, empty where none is known."""
    return "\n".join(f"-> {what}" for pattern, what in _KNOWN if re.search(pattern, text, re.IGNORECASE))
