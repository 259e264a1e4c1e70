"""Loads a base or tuned model and its tokenizer for generation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tpu_kit.config.loader import ModelConfig, TrainConfig
from tpu_kit.data.chat.chat_template import ensure_chat_template
from tpu_kit.distributed.replica import runtime
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.prompts import Prompt, is_chat
from tpu_kit.generation.reference_check import check_generation
from tpu_kit.model import causal_lm as models
from tpu_kit.model import states_head
from tpu_kit.model.base_model import matrix_of
from tpu_kit.model.families import registry as families
from tpu_kit.model.weights.loading import load_base, load_frozen, read_config
from tpu_kit.model.weights.saved_adapter import attach_adapter, is_whole, read_adapter
from tpu_kit.model.weights.source import load_tokenizer

_FP32_UP_TO = 1_000_000_000  # parameters (4 GB in fp32); CPUs compute fp32 faster than bf16


def load_here(
    config: TrainConfig, adapter: Path | None, rt: Runtime, chat: bool | None = None, prompts: Sequence[Prompt] = ()
) -> tuple[torch.nn.Module, Any]:
    """Loads the model and its tokenizer; returns (model on the replica's device, tokenizer).

    The tokenizer is the adapter's, or else the base model's. An adapter that was trained on plain text has no chat
    template.

    Args:
        config: the base model and the objective.
        adapter: the local folder of an adapter; None for the base model.
        rt: the replica's runtime.
        chat: True: a tokenizer without a template gets the base model's, or ChatML if that has none. False and None
            change nothing.
        prompts: the prompts to ask. If they have a chat, and the tokenizer has no template, rank 0 tells on stderr that
            they are asked as plain text.

    Raises:
        ValueError: as in `load_for_generation` and `check_generation`.
    """
    model, tokenizer = runtime.load_once(rt, lambda: _read(config, adapter, rt))
    if chat and not tokenizer.chat_template:
        base = load_tokenizer(config.model)
        ensure_chat_template(base)
        tokenizer.chat_template = base.chat_template
    elif not tokenizer.chat_template and rt.rank == 0 and any(map(is_chat, prompts)):
        text = "as plain text: the tokenizer of the adapter or base model has no chat template, as after training on"
        print(f"asked            {text} plain text (chat=true uses the base model's)", file=sys.stderr, flush=True)
    return models.to_device(model, rt.local_device), tokenizer


def _read(config: TrainConfig, adapter: Path | None, rt: Runtime) -> tuple[torch.nn.Module, Any]:
    """Checks and reads the model, on a CUDA device or the CPU, prepared for the kind of device; and its tokenizer."""
    if settings := read_config(config.model):  # before the weights are read
        check_generation(settings, config.model.trust_remote_code, config.model.images)
    device = "cuda" if rt.device_type == "cuda" else "cpu"
    model = load_for_generation(config.model, adapter, device, config.optim.objective)
    whole = models.base_model(model).config  # a whole model has its own configuration
    check_generation(whole, config.model.trust_remote_code, config.model.images)
    if rt.device_type == "tpu" and config.model.base_dtype != "fp32":
        models.cast(model, torch.bfloat16)  # small models were loaded in fp32 for CPUs
    if rt.device_type in ("tpu", "xla-cpu"):
        families.connect(models.base_model(model), frozen=True)
    if rt.device_type == "cpu":
        arrange_for_few_rows(model)
    return model, load_tokenizer(config.model, adapter)


def load_for_generation(
    config: ModelConfig,
    adapter_dir: str | Path | None = None,
    device: torch.device | str = "cpu",
    objective: str = "supervised",
) -> torch.nn.Module:
    """Loads a new copy of the model, in evaluation mode and with transformers' own attention.

    Args:
        config: the base model. Its weights are rounded to `base_dtype`, int8 and int4 included, as in training. On the
            CPU, models of up to 1e9 parameters then compute in fp32, which is faster there.
        adapter_dir: the local folder of a run's result, such as runs/NAME/adapter, not the run's folder. It has a PEFT
            adapter, or a whole model (lora.r = 0), which replaces the base, on the CPU without rounding. A head of the
            run's objective in it corrects hidden states. None for the base model.
        device: the CPU or a CUDA device.
        objective: the run's `optim.objective` if it is user-defined; for other objectives the folder names it.

    Raises:
        ValueError: the model cannot be read, or the adapter is missing, incomplete or of another model.
    """
    folder, on_cpu = None if adapter_dir is None else Path(adapter_dir), torch.device(device).type == "cpu"
    whole = folder is not None and is_whole(folder)
    saved = None if folder is None or whole else read_adapter(folder)  # first, as loading the base may take minutes
    if whole:
        config = replace(config, name=str(folder), revision=None, gguf_file=None)
    full = config.base_dtype == "fp32" or (whole and on_cpu)
    model: torch.nn.Module = load_base(config, torch.float32) if full else load_frozen(config)
    families.connect(model, frozen=False)
    if folder is not None and saved is not None:
        model = attach_adapter(model, folder, *saved, config.name)
    saved_in = folder or Path(config.name)  # a whole model may also have a head
    decoder, size = models.base_model(model).get_decoder(), models.text_config(model).hidden_size
    states_head.attach(decoder, saved_in, size, objective)
    if on_cpu and sum(p.numel() for p in model.parameters()) <= _FP32_UP_TO:
        models.cast(model, torch.float32)
    return model.to(device).eval()


def arrange_for_few_rows(model: torch.nn.Module) -> torch.nn.Module:
    """Transposes fp32 weights in the CPU's memory for faster decode steps, with equal values; returns the same model.

    It changes the linear layers with more outputs than inputs. If the weights of an input are adjacent, they take two
    thirds of the time for one or two rows, and the same time for more rows (MKL, fp32, AMD EPYC). The output head is
    left as it is, because it would take 1.2 times as long for 4 rows or more. Do not save the model afterwards.
    """
    head = matrix_of(models.base_model(model).get_output_embeddings())
    for part in model.modules():
        if not isinstance(part, torch.nn.Linear) or part is head or part.weight.dtype != torch.float32:
            continue
        if part.out_features > part.in_features:
            part.weight.data = part.weight.data.t().contiguous().t()
    return model
