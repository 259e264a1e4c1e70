"""What the kit computes in place of transformers' functions, by family of layers: a new family is one line here.

A family's module offers `connect(model, frozen)`, which makes the layers of a model of transformers call its functions;
again, it does nothing. It may offer `check_trained(model, device_type)`, which raises ValueError if the model's trained
weights are not trained on the device. Only a model that needs a family imports its module.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Family(NamedTuple):
    """A family of layers.

    Attributes:
        module: of the kit, which computes it.
        functions: names in transformers' module of a model that has such layers, one or more; none for all models.
    """

    module: str
    functions: tuple[str, ...] = ()


FAMILIES = (
    Family("tpu_kit.model.attention"),
    Family("tpu_kit.model.splash_attention"),
    Family(
        "tpu_kit.model.families.linear_attention",
        (
            "torch_chunk_gated_delta_rule",
            "mamba2_chunk_scan",
            "causal_conv1d_fn",
            "mamba2_selective_state_update",
        ),
    ),
    Family("tpu_kit.model.families.experts", ("use_experts_implementation",)),
)


def _modules_for(model: torch.nn.Module) -> Iterator[Any]:
    """Yields the modules of the families that a model has."""
    defining = {type(part).__module__ for part in model.modules()} & sys.modules.keys()
    there = {name for module in defining for name in vars(sys.modules[module])}
    for family in FAMILIES:
        if not family.functions or there.intersection(family.functions):
            yield importlib.import_module(family.module)


def connect(model: torch.nn.Module, frozen: bool) -> None:
    """Lets a model of transformers call the kit's functions.

    Args:
        model: changed in place.
        frozen: whether its own weights are not trained, so that they may be brought to another form.

    Raises:
        ValueError: the kit cannot compute the model's layers.
    """
    for module in _modules_for(model):
        module.connect(model, frozen)


def check_trained(model: torch.nn.Module, device_type: str) -> None:
    """Checks that the trained weights of a model are trained on a device; raises ValueError if they are not."""
    for module in _modules_for(model):
        if hasattr(module, "check_trained"):
            module.check_trained(model, device_type)
