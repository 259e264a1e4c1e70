"""Which PJRT plugin torch_tpu loads in this environment, and which families of models it trains; light."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

NAME = "torch-tpu"
"""The value of `launch.device_type`."""

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "phi3")
"""Values of `model_type` in a model's configuration with which `make test-torch-tpu` trains."""

ELSEWHERE = "use launch.device_type=tpu in an environment with torch_xla (requirements-tpu.txt)"

_LIBTPU = "libtpu.so"


def other_plugin(environ: Mapping[str, str] | None = None) -> str:
    """The path in TPU_LIBRARY_PATH of a PJRT plugin that is not libtpu; empty if torch_tpu would load libtpu.

    The tests name a plugin for the CPU, so that programs run without a TPU. Kernels for a TPU do not run there.
    """
    path = (os.environ if environ is None else environ).get("TPU_LIBRARY_PATH", "")
    return "" if Path(path).name in ("", _LIBTPU) else path


def check_command(command: str, device_type: str) -> None:
    """Raises ValueError if a command does not run on the backend yet."""
    if device_type == NAME:
        raise ValueError(
            f"{command} does not run on launch.device_type={NAME} yet; train, evaluate and generate do, and "
            "`profile chip=v5e` tells the time of a step by the TPU compiler's cost model"
        )


def check_family(model_type: str, device_type: str) -> None:
    """Raises ValueError if the backend was not tested with a family of models."""
    if device_type == NAME and model_type not in FAMILIES:
        raise ValueError(f"launch.device_type={NAME} trains {', '.join(FAMILIES)} alone: {ELSEWHERE}")
