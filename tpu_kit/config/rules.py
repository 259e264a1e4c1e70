"""Which parameters of a run contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tpu_kit.config.fields import near_multiples

if TYPE_CHECKING:
    from tpu_kit.config.schema import LoraConfig, OptimConfig, TrainConfig

ROLES = {
    "answer", "completion", "context", "messages", "options", "prompt", "question", "reasoning", "system", "text",
    "tools",
}  # fmt: skip
"""What `data.columns` may name; `columns.NAMES` says by which columns they are recognised."""

_NAMES = (
    "model.name", "model.revision", "model.gguf_file", "model.quant_cache", "data.source", "data.eval_source",
    "data.split", "data.eval_split", "output_dir", "tracking.wandb_project",
)  # fmt: skip


def conflicts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """What the parameters cannot be, taken together: the names involved, and what is wrong with the first of them."""
    model, lora, data, optim = config.model, config.lora, config.data, config.optim

    if config.run_name in (".", "..") or set(config.run_name) & set('/\\:*?"<>|') or not _is_name(config.run_name):
        yield "run_name", "cannot name a folder; use letters, digits, dots and dashes, 200 bytes at most"
    for name in _NAMES:
        if config[name] is not None and not all(_is_name(part) for part in config[name].split("/") if part):
            yield name, "is no name that a file or a folder could have; write one without line breaks or blank ends"
    if config.remote and not re.fullmatch(r"gs://[^/]+(/.*)?", config.remote):
        yield "output_dir", "is neither a folder nor a gs:// address; use one of them, such as gs://bucket/run"

    if model.name == "embedded":
        for leaf in ("revision", "gguf_file"):
            if getattr(model, leaf) is not None:
                yield f"model.{leaf} model.name", "says nothing of the embedded model; remove it or set model.name"
    if model.base_dtype in ("int8", "int4"):
        yield from _integer_contradictions(model.base_dtype, lora)
    if model.base_dtype != "int4" and model.quant_group != type(model)().quant_group:
        yield "model.quant_group model.base_dtype", "is of model.base_dtype=int4; remove it or set that"
    if lora.r == 0:
        for leaf in ("dropout", "targets", "rslora", "dora", "init"):
            if getattr(lora, leaf) != getattr(type(lora)(), leaf):
                yield f"lora.{leaf} lora.r", "needs adapters, and lora.r=0 has none; remove it or set lora.r=16"
    if data.columns and (unknown := sorted(set(data.columns) - ROLES)):
        yield "data.columns", f"names the unknown role {', '.join(unknown)}; the roles are {', '.join(sorted(ROLES))}"
    if data.think_open == data.think_close:
        yield "data.think_close data.think_open", "is data.think_open too; the two must differ"
    if model.attention == "flash" and data.max_length % 128:
        near = near_multiples(data.max_length, 128)
        yield "data.max_length model.attention", f"is no multiple of 128, as model.attention=flash needs; use {near}"
    if config.tracking.wandb_adapter and config.tracking.wandb == "off":
        yield "tracking.wandb_adapter tracking.wandb", "adds to a run on W&B, and tracking.wandb=off; set wandb=online"
    yield from _evaluation_contradictions(config)
    yield from _schedule_contradictions(optim)
    yield from _batch_contradictions(optim)
    if optim.scan_layers == "on" and optim.remat == "none":
        yield "optim.scan_layers optim.remat", "needs optim.remat=full or outputs, but it is none; set one of them"
    if optim.optimizer == "adafactor":
        for leaf in ("beta1", "beta2", "eps"):
            if getattr(optim, leaf) != getattr(type(optim)(), leaf):
                yield f"optim.{leaf} optim.optimizer", "is AdamW's, and optim.optimizer=adafactor has none; remove it"


def _is_name(text: str) -> bool:
    """Whether a file or a folder can have it, and is found again by someone who reads it."""
    return text == text.strip() and text.isprintable() and 0 < len(text.encode()) <= 200


def _integer_contradictions(dtype: str, lora: LoraConfig) -> Iterator[tuple[str, str]]:
    if lora.r == 0:
        advice = "set lora.r=16, or model.base_dtype=bf16"
        yield "model.base_dtype lora.r", f"holds weights that cannot be trained, and lora.r=0 trains all; {advice}"
    if lora.dora:
        yield "lora.dora model.base_dtype", f"reads base weights that model.base_dtype={dtype} has rounded; remove it"
    if lora.init in ("olora", "pissa"):
        text = f"changes base weights that model.base_dtype={dtype} has rounded; use lora.init=default"
        yield "lora.init model.base_dtype", text


def _evaluation_contradictions(config: TrainConfig) -> Iterator[tuple[str, str]]:
    data, optim = config.data, config.optim
    held_out = data.eval_source is None and data.eval_split is None
    rows = "data.eval_rows data.eval_source data.eval_split"
    if data.eval_source is None and data.eval_split == data.split:
        yield "data.eval_split data.split", "is what is trained on; name another split, or null to hold out eval_rows"
    counted = ("optim.eval_steps", "optim.early_stop_patience", "tracking.generate_rows", "tracking.eval_generate_rows")
    for name in counted:
        if held_out and data.eval_rows == 0 and config[name]:
            advice = "remove that, or set data.eval_source or data.eval_split"
            yield f"{name} {rows}", f"needs rows to evaluate on, but data.eval_rows=0; {advice}"
    if config.tracking.eval_generate_rows and optim.scan_layers == "on":
        advice = "but optim.scan_layers=on leaves no single layers; leave that out"
        yield "tracking.eval_generate_rows optim.scan_layers", f"generates with the layers, {advice}"
    if optim.early_stop_patience is not None and optim.eval_steps is None:
        advice = "but optim.eval_steps is null; set optim.eval_steps"
        yield "optim.early_stop_patience optim.eval_steps", f"counts evaluations during training, {advice}"


def _schedule_contradictions(optim: OptimConfig) -> Iterator[tuple[str, str]]:
    if optim.max_steps is None and optim.epochs is None:
        yield (
            "optim.max_steps optim.epochs",
            "and optim.epochs is null too, so that training would never end; set one of them",
        )
    if optim.warmup_steps and optim.warmup_ratio:
        yield (
            "optim.warmup_steps optim.warmup_ratio",
            f"and optim.warmup_ratio={optim.warmup_ratio:g} both set the warm-up; set one of them to 0",
        )
    if optim.max_steps is not None and optim.warmup_steps > optim.max_steps:
        yield (
            "optim.warmup_steps optim.max_steps",
            f"is more than optim.max_steps={optim.max_steps}; lower it or raise optim.max_steps",
        )
    if optim.schedule == "constant" and optim.min_learning_rate_ratio:
        yield (
            "optim.min_learning_rate_ratio optim.schedule",
            "is the end of a decay, but optim.schedule=constant has none; set it to 0 or optim.schedule=cosine",
        )


def _batch_contradictions(optim: OptimConfig) -> Iterator[tuple[str, str]]:
    rows, whole, passes = optim.batch_size, optim.global_batch_size, optim.gradient_accumulation
    if whole is not None and isinstance(rows, int) and whole % (rows * passes):
        # Wrong for any number of replicas; what divides for the number there is, batch_arithmetic says.
        factors = f"optim.batch_size={rows} x optim.gradient_accumulation={passes}"
        yield (
            "optim.global_batch_size optim.batch_size optim.gradient_accumulation",
            f"is no multiple of {factors}; use {near_multiples(whole, rows * passes)}",
        )
    if optim.batch_growth_factor == 1:
        for leaf in ("batch_growth_steps", "batch_growth_max", "batch_growth_lr"):
            if getattr(optim, leaf) not in (None, "none"):
                yield (
                    f"optim.{leaf} optim.batch_growth_factor",
                    "has no effect with optim.batch_growth_factor=1; remove it or set optim.batch_growth_factor=2",
                )
    elif optim.batch_growth_steps is None:
        yield (
            "optim.batch_growth_steps optim.batch_growth_factor",
            f"but optim.batch_growth_factor={optim.batch_growth_factor:g} needs the updates between growths; set it",
        )
    if optim.batch_growth_max is not None and whole is not None and optim.batch_growth_max < whole:
        yield (
            "optim.batch_growth_max optim.global_batch_size",
            f"is less than the optim.global_batch_size={whole} that training starts with; raise it",
        )
