"""Distillation: runs `sft.train` with the loss of `training.losses.distillation`."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset, DatasetDict

from tpu_kit.config.loader import ConfigError, ModelConfig, TrainConfig
from tpu_kit.machine.storage import atomic
from tpu_kit.model.loop.layer_calls import decoder_layers
from tpu_kit.model.weights.loading import load_base
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.recipes import sft
from tpu_kit.recipes.result import TrainResult


def configured(config: TrainConfig) -> TrainConfig:
    """Returns the configuration that `distill` trains, unchanged; raises ConfigError if distill.teacher is None."""
    if config.distill.teacher is None:
        raise ConfigError(["distill.teacher: null names no teacher; set it to a hub id or a folder"])
    return config


def distill(config: TrainConfig, dataset: Dataset | DatasetDict | None = None, *, exact: bool = False) -> TrainResult:
    """Trains a model with `config.distill.teacher`; arguments and result are as in `sft.train`.

    Raises:
        ConfigError: there is no teacher.
        ValueError: the teacher does not fit the model; its files are damaged or from another run; or as `sft.train`.
    """
    return sft.train(configured(config), dataset, exact=exact)


def derive_student(model: ModelConfig, folder: str | Path, layers: int) -> Path:
    """Writes a student, in bf16 with its tokenizer, to a folder: the model with `layers` evenly spaced layers.

    They span the first to the last layer (a single layer: the first), as in DistilBERT (Sanh et al., arXiv:1910.01108).
    An existing folder is replaced. Returns the folder's path. Train the student with `lora.r=0`.

    Raises:
        ValueError: `layers` is not between 1 and the model's layers - 1; or as `load_base`.
    """
    base = load_base(model, torch.bfloat16)
    decoder = base.get_decoder()
    name, whole = decoder_layers(decoder)
    count = len(whole)
    if not 1 <= layers < count:
        raise ValueError(f"layers={layers}: model.name={model.name} has {count}; choose from 1 to {count - 1}")
    numbers = [round(number * (count - 1) / max(1, layers - 1)) for number in range(layers)]
    setattr(decoder, name, torch.nn.ModuleList([whole[number] for number in numbers]))
    text = base.config.get_text_config()
    text.num_hidden_layers = layers
    for key, value in [*vars(text).items()]:
        if isinstance(value, list) and len(value) == count:  # an entry for each layer, such as layer_types
            setattr(text, key, [value[number] for number in numbers])
    with atomic.replacing(Path(folder)) as part:
        base.save_pretrained(part)
        load_tokenizer(model).save_pretrained(part)
    return Path(folder)
