"""What the kit computes in place of transformers' functions, by family of layers: a new family is one line here.

A family's module offers `connect(model, frozen)`, which makes the layers of a model of transformers call its functions;
again, it does nothing. It may offer `check_trained(model, device_type)`, which raises ValueError if the model's trained
weights are not trained on the device; `own_attention(model)`, the attention of the model's parts that keep theirs;
`loop_layers(model, optim, device_type)`, which makes further layers loops; and, for the columns of a batch in `INPUTS`,
`decoder_inputs(model, batch)`. Only a model that needs a family imports its module.
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
        module: of the kit, which computes it.
        functions: names in transformers' module of a model that has such layers, one or more; none for all models.
        towers: the types of models that have such layers if their configuration has a "vision_config".
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
        towers=("gemma3", "gemma4", "gemma4_unified", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "smolvlm", "idefics3"),
    ),
)

INPUTS = {"image_index": "tpu_kit.model.families.vision"}
"""A column of a batch -> the module that makes what the decoder gets in place of the token ids."""


def _modules_for(model: torch.nn.Module) -> Iterator[Any]:
    """Yields the modules of the families that a model has."""
    defining = {type(part).__module__ for part in model.modules()} & sys.modules.keys()
    there = {name for module in defining for name in vars(sys.modules[module])}
    config: Any = getattr(model, "config", None)
    tower = config.model_type if getattr(config, "vision_config", None) is not None else None
    for family in FAMILIES:
        everywhere = not family.functions and not family.towers
        if everywhere or there.intersection(family.functions) or tower in family.towers:
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
    _call(model, "check_trained", device_type)


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Sets the attention of a model of transformers by its registered name; a tower keeps its own."""
    parts = {name: own for found in _call(model, "own_attention") for name, own in found.items()}
    named = {"": implementation, "text_config": implementation, **parts} if parts else implementation
    model.set_attn_implementation(named)


def loop_layers(model: torch.nn.Module, optim: OptimConfig, device_type: str) -> None:
    """Makes the layers that families of a model have beside its decoder loops, where the decoder's are."""
    _call(model, "loop_layers", optim, device_type)


def _call(model: torch.nn.Module, function: str, *arguments: Any) -> list[Any]:
    """Calls a function of the modules that have it; returns their results."""
    modules = [module for module in _modules_for(model) if hasattr(module, function)]
    return [getattr(module, function)(model, *arguments) for module in modules]


def decoder_inputs(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Any], tuple[torch.Tensor, ...]]:
    """Returns the arguments of a decoder for a batch, arguments of `Visibility`, and the additions of its layers.

    Args:
        model: of transformers, without PEFT's wrapper.
        batch: as `causal_lm.hidden_states` takes it.
    """
    for column, module in INPUTS.items():
        if column in batch:
            found: tuple[dict[str, torch.Tensor], dict[str, Any], tuple[torch.Tensor, ...]]
            found = importlib.import_module(module).decoder_inputs(model, batch)
            return found
    return {"input_ids": batch["input_ids"]}, {}, ()
