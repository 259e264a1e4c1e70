"""What other programs call a parameter, and what works here in the place of tools that exist for CUDA alone."""

from __future__ import annotations

import re

NAMES = {
    "dataset": "data.source",
    "device": "launch.device_type",
    "gradient_accumulation_steps": "optim.gradient_accumulation",
    "gradient_checkpointing": "optim.remat",
    "lr": "optim.learning_rate",
    "lr_scheduler_type": "optim.schedule",
    "max_seq_length": "data.max_length",
    "model_name_or_path": "model.name",
    "num_train_epochs": "optim.epochs",
    "per_device_train_batch_size": "optim.batch_size",
    "rank": "lora.r",
    "report_to": "tracking.wandb",
    "save_total_limit": "checkpoint.keep",
}
"""Their name -> ours."""

_BITSANDBYTES = "bitsandbytes runs on CUDA alone"
_ATTENTION = "the flash-attn package runs on CUDA alone; leave model.attention=auto: splash on TPU, sdpa elsewhere"
_OPTIMIZER = f"{_BITSANDBYTES}; use optim.optimizer=adamw8bit, which runs everywhere"
_FUSED = "XLA has no fused AdamW; optim.optimizer=adamw is compiled into the step"
_HALF = "a TPU has no float16; use model.base_dtype=bf16, which needs no loss scaling"

# A parameter's name, the value's text, and what to tell: a pair matches where both patterns match whole.
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


def instead(name: str, value: object) -> str:
    """What to use in the place of a tool that exists for CUDA alone; empty where none was asked for.

    Args:
        name: of the parameter, with or without its section.
        value: what was asked for.
    """
    leaf, text = name.rpartition(".")[2].lower(), str(value).lower()
    for names, values, advice in _TOOLS:
        if re.fullmatch(names, leaf) and re.fullmatch(values, text):
            return advice
    return ""
