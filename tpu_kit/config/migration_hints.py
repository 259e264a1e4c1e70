"""Translates parameters of TRL's SFT scripts, axolotl and Unsloth, and names replacements for tools of CUDA."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from tpu_kit.config.fields import show

NAMES = {
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.eps",
    "assistant_only_loss": "data.loss_on",
    "attn_implementation": "model.attention",
    "base_model": "model.name",
    "bf16": "model.base_dtype",
    "completion_only_loss": "data.loss_on",
    "data_seed": "data.seed",
    "dataset": "data.source",
    "dataset_name": "data.source",
    "dataset_num_proc": "data.num_proc",
    "dataset_test_split": "data.eval_split",
    "dataset_text_field": "data.columns.text",
    "dataset_train_split": "data.split",
    "datasets": "data.source",
    "device": "launch.device_type",
    "dtype": "model.base_dtype",
    "gradient_accumulation_steps": "optim.gradient_accumulation",
    "gradient_checkpointing": "optim.remat",
    "label_smoothing_factor": "optim.label_smoothing",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_r": "lora.r",
    "lora_target_modules": "lora.targets",
    "lr": "optim.learning_rate",
    "lr_scheduler": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "max_seq_length": "data.max_length",
    "max_steps": "optim.max_steps",
    "micro_batch_size": "optim.batch_size",
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "model_revision": "model.revision",
    "num_epochs": "optim.epochs",
    "num_train_epochs": "optim.epochs",
    "optim": "optim.optimizer",
    "optimizer": "optim.optimizer",
    "per_device_train_batch_size": "optim.batch_size",
    "random_state": "optim.seed",
    "rank": "lora.r",
    "report_to": "tracking.wandb",
    "resume_from_checkpoint": "checkpoint.resume",
    "sample_packing": "data.packing",
    "save_total_limit": "checkpoint.keep",
    "sequence_len": "data.max_length",
    "target_modules": "lora.targets",
    "torch_dtype": "model.base_dtype",
    "train_on_inputs": "data.loss_on",
    "use_dora": "lora.dora",
    "use_gradient_checkpointing": "optim.remat",
    "use_peft": "lora.r",
    "use_rslora": "lora.rslora",
    "val_set_size": "data.eval_rows",
}
"""Their name -> ours."""

_DEFAULT = object()  # a value that is the default of the kit
_ANSWERS: dict[str, Any] = {"true": "completion", "false": "all"}
_REMAT: dict[str, Any] = {"true": "full", "unsloth": "full", "false": "none"}
_DTYPES: dict[str, Any] = {"bfloat16": "bf16", "torch.bfloat16": "bf16", "float32": "fp32", "auto": _DEFAULT}
_ADAMW: dict[str, Any] = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_torch_xla"), "adamw")
_SCHEDULES: dict[str, Any] = {"constant_with_warmup": "constant"}
_VALUES: dict[str, dict[str, Any]] = {
    "assistant_only_loss": _ANSWERS,
    "attn_implementation": {"eager": "sdpa", "auto": _DEFAULT},
    "bf16": {"true": "bf16", "auto": "bf16", "false": _DEFAULT},
    "completion_only_loss": _ANSWERS,
    "dtype": _DTYPES,
    "gradient_checkpointing": _REMAT,
    "lr_scheduler": _SCHEDULES,
    "lr_scheduler_type": _SCHEDULES,
    "max_steps": {"-1": _DEFAULT},
    "optim": _ADAMW,
    "optimizer": _ADAMW,
    "report_to": {"none": "off", "wandb": "online", "['wandb']": "online", "[]": "off", "['none']": "off"},
    "resume_from_checkpoint": {"true": "must", "false": _DEFAULT},
    "torch_dtype": _DTYPES,
    "train_on_inputs": {"true": "all", "false": "completion"},
    "use_gradient_checkpointing": _REMAT,
    "use_peft": {"true": _DEFAULT, "false": 0},
}
"""Their name -> the text of their value in lower case -> our value; other values stay the same."""

_LEFT_OUT = (
    (r"per_device_eval_batch_size|eval_batch_size", r".*", "evaluation takes batches of optim.batch_size"),
    (r"eval_strategy|evaluation_strategy", r"no|false|steps", "optim.eval_steps sets it"),
    (r"(save|logging)_strategy", r"steps", "checkpoint.save_steps and tracking.logging_steps set it"),
    (r"adapter", r"lora", "lora.r sets it"),
    (r"lora_target_linear", r"true", "lora.targets=all-linear is the default"),
    (
        r"load_best_model_at_end|metric_for_best_model|greater_is_better",
        r".*",
        "the kit keeps the best weights by evaluation",
    ),
    (
        r"tf32|ddp_\w+|dataloader_\w+|remove_unused_columns|gradient_checkpointing_kwargs|group_by_length|disable_tqdm|"
        r"do_(train|eval)|overwrite_output_dir|logging_first_step|logging_dir|log_level|use_cpu|auto_find_batch_size|"
        r"save_safetensors|include_\w+|padding_free|packing_strategy|bf16_full_eval|model_type|tokenizer_type|"
        r"dataset_prepared_path|eval_sample_packing|pad_to_sequence_len|flash_attention",
        r".*",
        "nothing here depends on it",
    ),
)
"""Patterns of their names and values that need no counterpart, and the reason."""

_ADVICE = (
    (r"(eval|evaluation)_strategy|evals_per_epoch", r".*", "set optim.eval_steps, the updates between evaluations"),
    (r"save_strategy|saves_per_epoch", r".*", "set checkpoint.save_steps, the updates between checkpoints"),
    (r"adapter", r".*", "set lora.r; for qlora also model.base_dtype=int4"),
    (r"report_to", r".*", "set tracking.wandb=online or tracking.tensorboard=true; there are no other trackers"),
    (r"resume_from_checkpoint", r".*", "checkpoint.resume=auto resumes from the newest checkpoint in output_dir"),
    (
        r"val_set_size",
        r"0?\.\d*[1-9]\d*",
        "set data.eval_rows to a number of rows; by default it is a tenth",
    ),
    (r"datasets", r".*", "set data.source to one source; a glob such as rows/*.jsonl takes several files"),
    (r"dataset_config(_name)?", r".*", "write it after the name, as in data.source=openai/gsm8k:main"),
    (r"push_to_hub|hub_\w+", r".*", "run `python -m tpu_kit export` after training"),
    (r"neftune_noise_alpha", r".*", "there is no noise on embeddings here; remove it, or see lora.dropout"),
    (r"chat_template(_path)?|eos_token|special_tokens", r".*", "model.name's tokenizer brings it; change it there"),
)
"""Patterns of their names and values that would change a run and have no counterpart, and the advice."""

_BITSANDBYTES = "bitsandbytes runs on CUDA alone"
_ATTENTION = "the flash-attn package runs on CUDA alone; leave model.attention=auto: splash on TPU, sdpa elsewhere"
_OPTIMIZER = f"{_BITSANDBYTES}; use optim.optimizer=adamw8bit, which runs everywhere"
_FUSED = "XLA has no fused AdamW; optim.optimizer=adamw is compiled into the step"
_HALF = "a TPU has no float16; use model.base_dtype=bf16, which needs no loss scaling"

# Patterns of a parameter's whole name and of its value's whole text, and the advice.
_TOOLS = (
    (r"load_in_[48]bit|bnb_\w+|quantization_config", r".*", f"{_BITSANDBYTES}; use model.base_dtype=int4 or int8"),
    (r"base_dtype|dtype|torch_dtype", r"nf4|fp4|[48]bit", f"{_BITSANDBYTES}; use model.base_dtype=int4 or int8"),
    (r"fp16", r".*", _HALF),
    (r"base_dtype|dtype|torch_dtype", r"(torch\.)?(fp16|float16|half)", _HALF),
    (r"(use_)?flash_attn\w*|use_flash_attention\w*", r".*", _ATTENTION),
    (r"attention|attn_implementation", r"(kernels-community/)?flash[_-]?att\w*", _ATTENTION),
    (r"optim|optimizer", r"paged_\w+|\w*bnb\w*|(adamw|lion|ademamix|rmsprop)_8bit|lion_32bit", _OPTIMIZER),
    (r"optim|optimizer", r"\w*fused\w*", _FUSED),
    (
        r"use_liger(_kernel)?",
        r".*",
        "Liger's kernels run on CUDA alone; the loss never has full logits: optim.loss_chunk",
    ),
    (
        r"deepspeed|fsdp\w*",
        r".*",
        "it runs on CUDA alone; a larger model needs model.base_dtype=int8, or a larger chip",
    ),
)


def translate(values: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Translates the parameters of another trainer.

    Args:
        values: of a file; our own and unknown parameters stay as they are.
        known: our names, with and without their sections.

    Returns:
        The values by our names; a note for each translated or ignored value; a problem for each value without a
        counterpart.
    """
    found: dict[str, Any] = {}
    notes, problems = [], []
    for key, value in values.items():
        name, text, choices = NAMES.get(key, ""), str(value).lower(), _VALUES.get(key, {})
        told, advice = f"{key}={show(value)}", "" if text in choices else _matching(_ADVICE, key, text)
        tool, why = "" if text in choices else instead(key, value), _matching(_LEFT_OUT, key, text)
        unset = value is None or text in ("false", "", "[]")
        if (key in known and text not in choices) or (key == "optim" and not isinstance(value, str)):
            found[key] = value
        elif choices.get(text) is _DEFAULT or (unset and (tool or advice)) or (value is None and (name or why)):
            notes.append(f"{told} is ignored: it is the default")
        elif why:
            notes.append(f"{told} is ignored: {why}")
        elif key == "datasets" and isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
            found[name] = value[0].get("path")
            notes.append(f"datasets -> {name}={show(found[name])}")
        elif key == "report_to" and text in ("tensorboard", "['tensorboard']"):
            found["tracking.tensorboard"] = True
            notes.append(f"{told} -> tracking.tensorboard=true")
        elif advice:
            problems.append(f"{key}: {show(value)} has no counterpart here; {advice}")
        elif tool or not name:
            found[key] = value  # `load_config` refuses it with advice
        else:
            ours = choices.get(text, value)
            if name in found and found[name] != ours:
                problems.append(f"{name}: given twice, as {show(found[name])} and as {told}; remove one of them")
            found[name] = ours
            notes.append(f"{told} -> {name}={show(ours)}")
    return found, notes, problems


def instead(name: str, value: object) -> str:
    """Returns the advice for a tool that exists only for CUDA; empty for other values."""
    return _matching(_TOOLS, name.rpartition(".")[2].lower(), str(value).lower())


def _matching(rules: tuple[tuple[str, str, str], ...], name: str, text: str) -> str:
    """Returns the last entry of the rule whose patterns match the whole name and value; empty without a match."""
    for names, values, told in rules:
        if re.fullmatch(names, name) and re.fullmatch(values, text):
            return told
    return ""
