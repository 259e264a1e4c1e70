"""A model that is to answer, base or tuned: loaded with its adapter checked, and the tokens that end its answers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tpu_kit.columns import Layout
from tpu_kit.config import DataConfig, ModelConfig
from tpu_kit.encoder import Encoder, default_stop
from tpu_kit.kvcache import causal
from tpu_kit.pretrained import load_base
from tpu_kit.quantized import load_frozen

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

_FP32_UP_TO = 1_000_000_000  # parameters: 4 GB in fp32, which CPUs compute faster than bf16
_SHOWN_DIFFERENCES = 5


def load_for_generation(
    config: ModelConfig, adapter_dir: str | Path | None = None, device: torch.device | str = "cpu"
) -> torch.nn.Module:
    """Load a fresh copy of the model, in evaluation mode and with transformers' own attention.

    Args:
        config: the base model. Its weights are rounded to `base_dtype`, int8 and int4 included, as in training; on
            the CPU models of up to 1e9 parameters then compute in fp32, which is faster there.
        adapter_dir: what training wrote: a PEFT adapter, or a whole model where lora.r = 0, which is then loaded in
            place of the base. None for the base alone.
        device: the CPU or a CUDA device.

    Raises:
        ValueError: the model cannot be read, or the adapter is missing, half-written or of another model.
    """
    folder, on_cpu = None if adapter_dir is None else Path(adapter_dir), torch.device(device).type == "cpu"
    whole = folder is not None and (folder / "config.json").is_file() and not (folder / ADAPTER_FILES[0]).is_file()
    saved = None if folder is None or whole else _read_adapter(folder)  # first, as the base may take minutes to load
    if whole:
        config = replace(config, name=str(folder), revision=None, gguf_file=None)
    full = config.base_dtype == "fp32" or (whole and on_cpu)
    model: torch.nn.Module = load_base(config, torch.float32) if full else load_frozen(config)
    if folder is not None and saved is not None:
        # Before any change of dtype: an initialisation that changed the base (PiSSA) is repeated here to the bit.
        model = _with_adapter(model, folder, *saved, config.name)
    if on_cpu and sum(p.numel() for p in model.parameters()) <= _FP32_UP_TO:
        model = model.float()
    return model.to(device).eval()


def arrange_for_few_rows(model: torch.nn.Module) -> torch.nn.Module:
    """Lay out a model's weights in the CPU's memory as a decode step reads them fastest; their values stay.

    Where a layer has more outputs than inputs, a product with one or two rows takes two thirds of the time if the
    weights of an input lie side by side, and one with more rows no longer than before (MKL, fp32, AMD EPYC). Not for
    the head, which takes 1.2 times as long with 4 rows or more, and not for a model that is saved.
    """
    head = causal(model).get_output_embeddings()
    for part in model.modules():
        if not isinstance(part, torch.nn.Linear) or part is head or part.weight.dtype != torch.float32:
            continue
        if part.out_features > part.in_features:
            part.weight.data = part.weight.data.t().contiguous().t()
    return model


def _read_adapter(folder: Path) -> tuple[Any, dict[str, list[int]]]:
    """Return an adapter's settings, and name -> shape of its tensors from the head of their file."""
    from peft import PeftConfig
    from safetensors import SafetensorError, safe_open

    if not folder.is_dir():
        raise ValueError(f"there is no adapter folder {folder}; give the one that training wrote")
    if absent := [name for name in ADAPTER_FILES if not (folder / name).is_file()]:
        raise ValueError(
            f"the adapter folder {folder} has no {' and no '.join(absent)}: its writing was interrupted, or it is "
            "another folder. Give the one that training wrote, or train again"
        )
    try:
        settings = PeftConfig.from_pretrained(str(folder))
        if settings.peft_type is None:
            raise ValueError("it has no peft_type")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{folder / ADAPTER_FILES[0]} cannot be read ({_first_line(error)}); give an earlier or a complete folder"
        ) from error
    try:
        with safe_open(folder / ADAPTER_FILES[1], framework="pt") as file:
            return settings, {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"the adapter's file {folder / ADAPTER_FILES[1]} is damaged or half-written ({error}); give an earlier one"
        ) from error


def _with_adapter(
    model: torch.nn.Module, folder: Path, settings: Any, saved: dict[str, list[int]], name: str
) -> torch.nn.Module:
    from peft import PeftModel, get_peft_model_state_dict

    refusal = f"the adapter in {folder} was trained on another base model than {name}"
    advice = f"set model.name to its own base (it says {settings.base_model_name_or_path})"
    try:
        # What does not fit is passed over here, PEFT's pages of warnings too, and told below.
        with warnings.catch_warnings():
            for known in ("Some weights of .* were not initialized", "Found missing adapter keys"):
                warnings.filterwarnings("ignore", known)
            adapted = PeftModel.from_pretrained(
                model, str(folder), config=settings, torch_device="cpu", ignore_mismatched_sizes=True
            )
    except (ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"{refusal}: {_first_line(error)}; {advice}") from error
    wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    has = {key: list(value.shape) for key, value in (adapted.state_dict() | wanted).items()}
    differences = [f"{key} is not in the file" for key in wanted if key not in saved]
    differences += [f"{key} is not in the model" for key in saved if key not in has]
    differences += [
        f"{key} is {shape} in the file and {has[key]} in the model"
        for key, shape in saved.items()
        if key in has and has[key] != shape
    ]
    if differences:
        more = len(differences) - _SHOWN_DIFFERENCES
        shown = "; ".join(differences[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(f"{refusal}: {shown}; {advice}")
    return adapted


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def stop_ids(causal: Any, tokenizer: Any) -> set[int]:
    """Return the ids that end an answer.

    The chat template counts because many base models come with an instruct model's template: the training then teaches
    an end-of-turn token that neither the generation config nor the tokenizer knows as the end. A tokenizer without one
    counts as if it had the template that training gives it: the base model is asked in it, too.
    """
    named = causal.generation_config.eos_token_id
    ids = {*named} if isinstance(named, list) else {named}
    ids.add(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        stop: str | None = Encoder(tokenizer, Layout("messages", {}, ()), DataConfig()).stop
    else:
        stop = default_stop(tokenizer)
    if stop:
        ids.add(tokenizer.convert_tokens_to_ids(stop))
    return ids - {None}
