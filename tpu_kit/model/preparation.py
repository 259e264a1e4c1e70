"""Prepares a loaded model for a device: sets attention, and makes layers loops or recomputes their activations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tpu_kit.model import attention
from tpu_kit.model.base_model import base_model
from tpu_kit.model.families import registry as families
from tpu_kit.model.loop import activation_checkpointing
from tpu_kit.model.loop.layer_calls import decoder_layers
from tpu_kit.model.loop.layer_scan import ScannedLayers, scan_layers
from tpu_kit.torch_tpu.environment import check_family

if TYPE_CHECKING:
    from tpu_kit.config.loader import TrainConfig


def use_attention(model: torch.nn.Module, choice: str, device_type: str) -> str:
    """Sets the model's attention for a device and `model.attention`; returns the registered name, as `choose` does."""
    implementation = attention.choose(choice, device_type)
    families.set_attention(base_model(model), implementation)
    return implementation


def prepare_layers(model: torch.nn.Module, config: TrainConfig, device_type: str) -> ScannedLayers | None:
    """Sets a model's attention, and makes the layers of its decoder and tower loops, as configured.

    Without loops in the decoder, its layers recompute their activations or, with remat=none, fuse LoRA's products
    except on cuda.

    Args:
        model: from `load_model`; changed in place, before its move to the device.
        config: the run.
        device_type: "tpu", "torch-tpu", "xla-cpu", "cuda" or "cpu".

    Returns:
        The loops, now the decoder's list of layers; None if it has no loops.

    Raises:
        ValueError: the device cannot run or train the model: from `scan_layers`, `families.check_trained`,
            `attention.choose` or `environment.check_family`.
    """
    check_family(base_model(model).config.model_type, device_type)
    families.check_trained(model, device_type)
    use_attention(model, config.model.attention, device_type)
    optim, decoder = config.optim, base_model(model).get_decoder()
    scanned = scan_layers(decoder, optim, device_type)
    families.loop_layers(base_model(model), optim, device_type)
    if scanned is None and optim.remat != "none":
        enable_remat(model, optim.remat == "outputs")
    elif scanned is None and device_type != "cuda":  # in a checkpoint, hooks of parameters are not called
        activation_checkpointing.fuse_lora(model, device_type)
    return scanned


def prepare_frozen(model: torch.nn.Module, config: TrainConfig, device_type: str) -> None:
    """Sets a frozen model's attention, and makes its decoder layers loops (remat=full) where the device runs loops."""
    use_attention(model, config.model.attention, device_type)
    scan_layers(base_model(model).get_decoder(), replace(config.optim, remat="full"), device_type)


def enable_remat(model: torch.nn.Module, keeps: bool = False) -> None:
    """Makes a model's decoder layers, which are not loops, recompute their activations in the backward pass.

    With `keeps`, the layers save the results of matrix products and attention; see `activation_checkpointing`.
    """
    base = base_model(model)
    activation_checkpointing.recompute(decoder_layers(base.get_decoder())[1], keeps)
    base.enable_input_require_grads()  # so that the first layer compiles to the same code as the others
