"""The trained weights as files that stock PEFT, or transformers, loads: an adapter, or a whole model for lora.r=0.

Everything is made of CPU tensors: PEFT's and transformers' own savers cannot read a tensor that lives on XLA.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tpu_kit.config.loader import TrainConfig
from tpu_kit.models.layer_scan import per_layer
from tpu_kit.storage import atomic


def adapter_tensors(model: Any, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of adapter_model.safetensors, under PEFT's names.

    PiSSA and OLoRA take their start B0 A0 out of the base weights; the original base needs B A - B0 A0, which is an
    adapter of twice the rank: [B, -B0] [A; A0]. PEFT's `path_initial_model_for_weight_conversion` does the same.

    Args:
        model: the `PeftModel`.
        trained: CPU tensors by the names of `causal_lm.trainable_parameters`; stacks of layers are taken apart.
    """
    from peft import get_peft_model_state_dict

    # PEFT goes through the model's own modules, so the names of stacks come first.
    tensors = per_layer(model, get_peft_model_state_dict(model, dict(trained)))
    for name, start in getattr(model, "_tpu_kit_start", {}).items():
        name = name.replace(".default", "")
        if "lora_A" in name:
            tensors[name] = torch.cat([tensors[name], start], dim=0)
        elif "lora_B" in name:
            tensors[name] = torch.cat([tensors[name], -start], dim=1)
    return {name: value.contiguous() for name, value in tensors.items()}


def adapter_settings(model: Any, config: TrainConfig) -> dict[str, Any]:
    """The contents of adapter_config.json."""
    settings = {**model.peft_config["default"].to_dict(), "inference_mode": True}
    settings["base_model_name_or_path"] = _base_name(config)
    if hasattr(model, "_tpu_kit_start"):  # twice the rank at the same scale; the base is left as it is
        settings["lora_alpha"] *= math.sqrt(2) if settings["use_rslora"] else 2
        settings |= {"r": 2 * settings["r"], "init_lora_weights": True}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}


def _base_name(config: TrainConfig) -> str:
    """What PEFT loads the base model from."""
    if config.model.name == "embedded":
        from tpu_kit.assets.embedded import model_dir

        return str(model_dir())
    return config.model.name


def save_adapter(
    folder: Path, model: torch.nn.Module, trained: Mapping[str, torch.Tensor], config: TrainConfig, tokenizer: Any
) -> None:
    """Writes the folder anew, so that it is never half of two runs.

    Args:
        folder: `<output_dir>/adapter`.
        model: the replica's model, on any device; only its names and settings are used.
        trained: CPU tensors by the names of `causal_lm.trainable_parameters`.
        config: the run.
        tokenizer: saved beside the weights, with its chat template.
    """
    from safetensors.torch import save_file

    with atomic.replacing(folder) as part:
        part.mkdir(parents=True)
        if hasattr(model, "peft_config"):
            save_file(adapter_tensors(model, trained), part / "adapter_model.safetensors", metadata={"format": "pt"})
            settings = json.dumps(adapter_settings(model, config), indent=2, sort_keys=True)
            (part / "adapter_config.json").write_text(settings)
        else:
            whole: Any = model
            whole.config.save_pretrained(part)
            if whole.generation_config is not None:
                whole.generation_config.save_pretrained(part)
            named = {name: value.contiguous() for name, value in per_layer(model, trained).items()}
            save_file(named, part / "model.safetensors", metadata={"format": "pt"})
        for path in part.glob("*.safetensors"):
            path.chmod(0o644)  # safetensors lets none but the owner read
        tokenizer.save_pretrained(part)
