"""The PJRT plugin that torch_tpu loads, and the model families that it trains; imports neither torch nor torch_tpu."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

NAME = "torch-tpu"
"""The value of `launch.device_type`."""

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "phi3")
"""Values of `model_type` in a model's configuration that `make test-torch-tpu` trains."""

ELSEWHERE = "use launch.device_type=tpu in an environment with torch_xla (requirements-tpu.txt)"

_LIBTPU = "libtpu.so"


def other_plugin(environ: Mapping[str, str] | None = None) -> str:
    """Returns TPU_LIBRARY_PATH if it names a PJRT plugin other than libtpu, else "".

    Tests set a plugin for the CPU, so that programs run without a TPU. TPU kernels do not run there.
    """
    path = (os.environ if environ is None else environ).get("TPU_LIBRARY_PATH", "")
    return "" if Path(path).name in ("", _LIBTPU) else path


def check_command(command: str, device_type: str) -> None:
    """Raises ValueError if `device_type` is torch-tpu: for a `command`, any text, that does not run on it yet."""
    if device_type == NAME:
        raise ValueError(
            f"{command} does not run on launch.device_type={NAME} yet; train, evaluate and generate do, and "
            "`profile chip=v5e` estimates the time of a step with the TPU compiler's cost model"
        )


def check_family(model_type: str, device_type: str) -> None:
    """Raises ValueError if `device_type` is torch-tpu and `model_type` is not in `FAMILIES`."""
    if device_type == NAME and model_type not in FAMILIES:
        raise ValueError(f"launch.device_type={NAME} trains only {', '.join(FAMILIES)}: {ELSEWHERE}")
