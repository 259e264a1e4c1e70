"""Fine-tune language models on Cloud TPU with PyTorch.

    from tpu_kit import load_config, train
    result = train(load_config("embedded-cot", ["max_steps=20"]))

The public names are imported on first use, so importing the package loads neither torch nor a device. Import all other
names from their modules, as in `from tpu_kit.data.prepare import prepare`.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_kit.config.loader import ConfigError, TrainConfig, batch_arithmetic, describe, load_config
    from tpu_kit.distributed.launch import launch
    from tpu_kit.exporting.export import export
    from tpu_kit.extras.profile.profile import profile
    from tpu_kit.extras.tree_search.options import SearchOptions
    from tpu_kit.extras.tree_search.search import think
    from tpu_kit.generation.answers import generate
    from tpu_kit.generation.evaluation.evaluate import evaluate, evaluate_adapter
    from tpu_kit.planning.planner import plan
    from tpu_kit.recipes.grpo import grpo
    from tpu_kit.recipes.preference import dpo
    from tpu_kit.recipes.result import TrainResult
    from tpu_kit.recipes.sft import train

from tpu_kit.config import registry
from tpu_kit.machine.surroundings import ensure_home, prefer_packages

__version__ = "0.1.0"

# Set before other libraries read them.
ensure_home()
prefer_packages()

# If torch_xla is installed, accelerate and transformers import it, and it sets PJRT_DEVICE as if the user had chosen a
# device. Replicas on XLA start with "1".
os.environ.setdefault("USE_TORCH_XLA", "0")
# Only replicas may open the TPU. If torch-tpu is installed, importing torch would open it.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# Otherwise torch's threads spin while they wait for each other. If other processes used the cores, a step of the
# embedded model on two threads then took 8 to 16 s instead of 0.6 s.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = ["__version__", *registry.installed(registry.NAMES)]


def __getattr__(name: str) -> Any:
    if absent := registry.absence(registry.NAMES.get(name, "")):
        raise AttributeError(f"tpu_kit.{name} is {absent}")
    if name not in registry.NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__[1:])}")
    return registry.load(registry.NAMES[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
