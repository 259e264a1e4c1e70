"""Reads an adapter from a run or PEFT, and adds it to its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tpu_kit.config.fields import hide_secrets
from tpu_kit.machine.storage.run_folder import unfinished
from tpu_kit.model.families import experts
from tpu_kit.model.weights.loading import brief

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

_SHOWN_DIFFERENCES = 5


def is_whole(folder: Path) -> bool:
    """Returns whether a folder has a whole model (config.json), as with lora.r=0, instead of an adapter."""
    return (folder / "config.json").is_file() and not (folder / ADAPTER_FILES[0]).is_file()


def _adapter_near(folder: Path) -> str:
    """Advises which folder to give instead of a folder without an adapter: the run's adapter or newest checkpoint."""
    if (folder / "adapter").is_dir():
        return f"give {folder / 'adapter'}"
    run = folder if (folder / "checkpoints").is_dir() else folder.parent
    return unfinished(run) if (run / "checkpoints").is_dir() else "give the folder that training wrote"


def read_adapter(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns an adapter's `PeftConfig`, and its CPU tensors by their names in the file.

    Raises ValueError if the folder or a file of `ADAPTER_FILES` is missing or damaged; the text advises a folder.
    """
    from peft import PeftConfig
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not folder.is_dir():
        raise ValueError(f"there is no adapter folder {folder}; {_adapter_near(folder)}")
    if absent := [name for name in ADAPTER_FILES if not (folder / name).is_file()]:
        raise ValueError(
            f"the adapter folder {folder} has no {' and no '.join(absent)}: its writing was interrupted, or it is not "
            f"an adapter; {_adapter_near(folder)}"
        )
    try:
        settings = PeftConfig.from_pretrained(str(folder), inference_mode=True)
        if settings.peft_type is None:
            raise ValueError("it has no peft_type")
        return settings, load_file(folder / ADAPTER_FILES[1])
    except (ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ValueError(
            f"the adapter in {folder} is damaged or half-written ({type(error).__name__}: {brief(error)}); give an "
            "earlier or a complete folder"
        ) from error


def attach_adapter(
    model: torch.nn.Module, folder: Path, settings: Any, tensors: dict[str, torch.Tensor], name: str
) -> torch.nn.Module:
    """Adds an adapter to its base model, in place, under the name "default", and returns the `PeftModel`.

    Args:
        model: the base model.
        folder: folder of the adapter, for messages.
        settings: settings from `read_adapter`.
        tensors: weights from `read_adapter`.
        name: `model.name` of the base model, for messages.

    Raises:
        ValueError: the adapter belongs to another model: PEFT refuses it, or a tensor is missing, surplus or of another
            shape.
    """
    from peft import set_peft_model_state_dict

    refusal = f"the adapter in {folder} was trained on another base model than {name}"
    advice = f"set model.name to its own base (it names {settings.base_model_name_or_path})"
    try:
        adapted = experts.with_adapters(model, settings)
        result = set_peft_model_state_dict(adapted, tensors)
    except (ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(hide_secrets(str(error)).split())[:400]
        raise ValueError(f"{refusal}: {type(error).__name__}: {reason}; {advice}") from error
    params = {name for name, _ in adapted.named_parameters()}  # lists tied rows under a single name
    absent = [key for key in result.missing_keys if ".default" in key and key in params]
    differences = [f"{key} is not in the file" for key in absent]
    differences += [f"{key} is not in the model" for key in result.unexpected_keys]
    if differences := [text.replace(".default", "") for text in differences]:  # the adapter's name
        more = len(differences) - _SHOWN_DIFFERENCES
        shown = "; ".join(differences[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(f"{refusal}: {shown}; {advice}")
    return adapted
