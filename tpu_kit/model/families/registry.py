"""Families of layers whose transformers functions the kit replaces. A new family is one line here.

A family's module offers `connect(model, frozen)`: the model's layers then call the module's functions; a second call
does nothing. These functions are optional: `check_trained(model, device_type)` raises ValueError if the device cannot
train the model's trained weights. `own_attention(model)` returns {name of a sub-configuration: its own attention}.
`loop_layers(model, optim, device_type)` makes further layers loops. `decoder_inputs(model, batch)` handles the columns
of a batch in `INPUTS`. Only a model that needs a family imports its module.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tpu_kit.config.loader import OptimConfig


class Family(NamedTuple):
    """A family of layers.

    Attributes:
        module: the kit's module for these layers.
        functions: names in a model's transformers module, any of which shows that the model has such layers.
        towers: model types that have such layers if they have a "vision_config". No functions or towers: all models.
    """

    module: str
    functions: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()


FAMILIES = (
    Family("tpu_kit.model.attention"),
    Family("tpu_kit.model.splash_attention"),
    Family("tpu_kit.model.rotary", ("apply_rotary_pos_emb",)),
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
    Family(
        "tpu_kit.model.families.vision",
        towers=(
            "gemma3", "gemma4", "gemma4_unified", "idefics3", "lfm2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "smolvlm",
        ),
    ),
)  # fmt: skip

INPUTS = {"image_index": "tpu_kit.model.families.vision"}
"""Column of a batch -> module that computes the decoder's inputs in place of the token ids."""


def _modules_for(model: torch.nn.Module) -> Iterator[Any]:
    """Imports and yields the kit's modules of a model's families, in the order of `FAMILIES`."""
    defining = {type(part).__module__ for part in model.modules()} & sys.modules.keys()
    there = {name for module in defining for name in vars(sys.modules[module])}
    config: Any = getattr(model, "config", None)
    tower = config.model_type if getattr(config, "vision_config", None) is not None else None
    for family in FAMILIES:
        everywhere = not family.functions and not family.towers
        if everywhere or there.intersection(family.functions) or tower in family.towers:
            yield importlib.import_module(family.module)


def connect(model: torch.nn.Module, frozen: bool) -> None:
    """Makes a transformers model call the kit's functions.

    Args:
        model: changed in place.
        frozen: whether the model's own weights are frozen, so that their layout may change.

    Raises:
        ValueError: the kit cannot compute the model's layers.
    """
    for module in _modules_for(model):
        module.connect(model, frozen)


def check_trained(model: torch.nn.Module, device_type: str) -> None:
    """Raises ValueError if a device cannot train the trained weights of a model."""
    _call(model, "check_trained", device_type)


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Sets the attention of a transformers model by its registered name; a tower keeps its own attention."""
    parts = {name: own for found in _call(model, "own_attention") for name, own in found.items()}
    named = {"": implementation, "text_config": implementation, **parts} if parts else implementation
    model.set_attn_implementation(named)


def loop_layers(model: torch.nn.Module, optim: OptimConfig, device_type: str) -> None:
    """Turns layers outside of the decoder (towers) into loops, in place, on devices where decoder layers are loops."""
    _call(model, "loop_layers", optim, device_type)


def _call(model: torch.nn.Module, function: str, *arguments: Any) -> list[Any]:
    """Calls `function(model, *arguments)` of the model's family modules that have it; returns the list of results."""
    modules = [module for module in _modules_for(model) if hasattr(module, function)]
    return [getattr(module, function)(model, *arguments) for module in modules]


def decoder_inputs(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Any], tuple[torch.Tensor, ...]]:
    """Returns a decoder's keyword arguments for a batch, `Visibility`'s keyword arguments, and `LayerInputs.additions`.

    If the batch has a column in `INPUTS`, such as image_index, the column's module computes these three values. Without
    such a column, they are {"input_ids": batch["input_ids"]}, {} and ().

    Args:
        model: transformers model without PEFT's wrapper.
        batch: see `causal_lm.hidden_states`.
    """
    for column, module in INPUTS.items():
        if column in batch:
            found: tuple[dict[str, torch.Tensor], dict[str, Any], tuple[torch.Tensor, ...]]
            found = importlib.import_module(module).decoder_inputs(model, batch)
            return found
    return {"input_ids": batch["input_ids"]}, {}, ()
