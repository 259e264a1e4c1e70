"""Fine-tune language models on Cloud TPU with PyTorch.

    from tpu_kit import load_config, train
    result = train(load_config("embedded-cot", ["max_steps=20"]))

The names here are looked up on first use, so that importing the package loads neither torch nor a device. Everything
else is imported from its module, as in `from tpu_kit.launch import launch`: here, `tpu_kit.launch` is that module.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_kit.config import ConfigError, TrainConfig, batch_arithmetic, describe, load_config
    from tpu_kit.evaluate import evaluate_adapter
    from tpu_kit.search import SearchOptions, think
    from tpu_kit.sft import TrainResult, train

__version__ = "0.1.0"

# accelerate and transformers import torch_xla where it is installed, and torch_xla then sets PJRT_DEVICE: the process
# that launches would look as if its user had chosen a device. Replicas on XLA start with "1".
os.environ.setdefault("USE_TORCH_XLA", "0")

__all__ = [
    "ConfigError",
    "SearchOptions",
    "TrainConfig",
    "TrainResult",
    "__version__",
    "batch_arithmetic",
    "describe",
    "evaluate_adapter",
    "load_config",
    "think",
    "train",
]

_HOMES = {
    "ConfigError": "tpu_kit.config",
    "SearchOptions": "tpu_kit.search",
    "TrainConfig": "tpu_kit.config",
    "TrainResult": "tpu_kit.sft",
    "batch_arithmetic": "tpu_kit.config",
    "describe": "tpu_kit.config",
    "evaluate_adapter": "tpu_kit.evaluate",
    "load_config": "tpu_kit.config",
    "think": "tpu_kit.search",
    "train": "tpu_kit.sft",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
