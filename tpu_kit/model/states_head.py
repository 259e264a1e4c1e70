"""A trained head that changes the last hidden states before the output layer, saved beside the adapter.

NAME.json has its class and sizes, NAME.safetensors its weights. The head may be nonlinear, so it cannot be merged into
the weights of the model.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from tpu_kit.config.registry import absence

_CLASS = "tpu_kit_head"  # key of the class in NAME.json
_ATTRIBUTE = "objective"  # attribute of a decoder; the same name as in a run's model, so the same sharding rules apply


class StatesHead(torch.nn.Module, abc.ABC):
    """A head on the last hidden states; `Objective.attach` sets it as `model.objective`.

    Attributes:
        name: name of the files, and of the head in messages.
        settings: arguments of the constructor, including `hidden_size`.
    """

    name: ClassVar[str]
    settings: dict[str, Any]

    @abc.abstractmethod
    def correct(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the changed states, with the shape (..., H) and dtype of `hidden`."""

    def files(self, trained: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Returns (tensors of NAME.safetensors, dict of NAME.json); `trained`: "objective.PARAMETER" -> CPU tensor."""
        weights = {name: trained[f"objective.{name}"].contiguous() for name, _ in self.named_parameters()}
        return weights, {_CLASS: f"{type(self).__module__}:{type(self).__qualname__}", **self.settings}


def find_head(folder: Path) -> str | None:
    """Returns the `StatesHead.name` of the head in a folder of trained weights; None without a head."""
    key = f'"{_CLASS}"'.encode()
    return next((path.stem for path in folder.glob("*.json") if key in path.read_bytes()), None)


def title(name: str) -> str:
    """Returns the title of a head in messages, "my-name head", from its `StatesHead.name`, "my_name"."""
    return f"{name.replace('_', '-')} head"


def file_names(name: str) -> tuple[str, str]:
    """Returns the names of a head's two files: NAME.json, NAME.safetensors."""
    return f"{name}.json", f"{name}.safetensors"


def attach(decoder: torch.nn.Module, folder: Path, hidden_size: int, objective: str) -> None:
    """Makes a decoder apply the head in a folder to its states; does nothing if the folder has no head.

    Args:
        decoder: decoder of transformers, which returns `last_hidden_state`; gets a submodule and a forward hook.
        folder: folder of the trained weights.
        hidden_size: hidden size of the model.
        objective: `optim.objective`. Its module is the only code outside of the kit that may be imported.

    Raises:
        ValueError: a file of the head is missing or damaged, or the hidden sizes differ. The head's class is neither in
            the kit nor in the module of `objective`, or cannot be imported.
    """
    name = find_head(folder)
    if name is None:
        return
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    settings_file, weights_file = file_names(name)
    here = f"the {title(name)} in {folder}"
    try:
        settings = json.loads((folder / settings_file).read_text())
        module, _, class_name = (place := settings.pop(_CLASS)).partition(":")
        if absent := absence(place):
            raise ImportError(f"its code is {absent}")
        if not module.startswith("tpu_kit.") and module != objective.partition(":")[0]:
            raise ValueError(f"its class is in the module {module}, which only optim.objective={module}:... imports")
        kind = getattr(importlib.import_module(module), class_name)
        if not issubclass(kind, StatesHead):
            raise TypeError(f"{module}:{class_name} is not a StatesHead")
        head = kind(**settings)
        head.load_state_dict(load_file(folder / weights_file))
        size = settings["hidden_size"]
    except (
        ImportError, AttributeError, OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError,
    ) as error:  # fmt: skip
        raise ValueError(
            f"{here} cannot be read ({type(error).__name__}: {str(error).splitlines()[0]}). Give the folder that "
            f"training wrote, or delete {settings_file} and {weights_file} to use the adapter without it"
        ) from error
    if size != hidden_size:
        raise ValueError(
            f"{here} is for a hidden size of {size}, and the model has {hidden_size}: set "
            "model.name to the base model of that run"
        )
    decoder.add_module(_ATTRIBUTE, head)
    decoder.register_forward_hook(_correct)


def _correct(decoder: torch.nn.Module, inputs: Any, output: Any) -> Any:
    """Is the decoder's forward hook: applies the decoder's own head, also in a copy, to `output`, in place."""
    output.last_hidden_state = getattr(decoder, _ATTRIBUTE).correct(output.last_hidden_state)
    return output


@contextlib.contextmanager
def without_head(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder of links to the trained weights without the head; without a head, the folder itself."""
    name = find_head(folder)
    if name is None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="tpu_kit-") as links:
        for path in folder.iterdir():
            if path.name not in file_names(name):
                os.symlink(path.absolute(), Path(links, path.name))
        yield Path(links)
