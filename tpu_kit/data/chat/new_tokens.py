"""Finds tokens that were added to a tokenizer and whose embeddings were never trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tpu_kit.config.loader import ModelConfig
from tpu_kit.data.batching import Documents
from tpu_kit.model.weights.source import locate

_BLOCKS, _BLOCK = 256, 8  # reference rows of the embeddings: number of blocks, rows per block
_NEAR = 0.1  # largest distance to the mean, or norm, of a new row, relative to the median of the reference rows
_ALIKE = 0.05  # largest share of reference rows that look randomly drawn; with more, a row's spread proves nothing


def new_tokens(model: ModelConfig, text: Any, tokenizer: Any, used: np.ndarray) -> tuple[str, ...]:
    """Returns the texts, by token id, of used tokens that were added to the tokenizer and have untrained embeddings.

    Such an embedding still has the value that a library gave it: the mean of all embeddings (transformers, Unsloth),
    zeros, or numbers drawn with the model's initializer_range. Not detected: embeddings copied from trained ones, and
    models whose weights are not in safetensors files on this machine.

    Args:
        model: the base model.
        text: transformers' text configuration of the model; None if it cannot be read: then no token is found.
        tokenizer: the model's tokenizer.
        used: token ids in the data, in any shape.
    """
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    numbers = np.intersect1d(used, np.fromiter(added, dtype=np.int64)).tolist()
    size = getattr(text, "vocab_size", 0)
    starts = np.unique(np.linspace(0, max(0, size - _BLOCK), _BLOCKS, dtype=np.int64)).tolist()
    known = {number for start in starts for number in range(start, min(start + _BLOCK, size))} - added.keys()
    embeddings = _rows(model, size, [*numbers, *sorted(known)]) if numbers else None
    if embeddings is None:
        return ()
    rows, others = embeddings[: len(numbers)], embeddings[len(numbers) :]
    mean, drawn, width = others.mean(dim=0), getattr(text, "initializer_range", None) or 0.02, others.shape[1]

    def looks_drawn(rows: torch.Tensor) -> torch.Tensor:
        return (rows.std(dim=1) / drawn - 1).abs() < 4 / math.sqrt(2 * width)

    new = (rows - mean).norm(dim=1) < _NEAR * (others - mean).norm(dim=1).median()
    new |= rows.norm(dim=1) < _NEAR * others.norm(dim=1).median()
    if looks_drawn(others).float().mean() < _ALIKE:
        new |= looks_drawn(rows)
    return tuple(added[number] for number, is_new in zip(numbers, new.tolist(), strict=True) if is_new)


def occurrences(documents: Documents, *, with_loss: bool = False) -> np.ndarray:
    """Returns the number of occurrences of every token id in one or more documents: int64 (largest counted id + 1,).

    `with_loss` counts only tokens that carry loss.
    """
    counts = np.zeros(0, dtype=np.int64)
    for _, tokens in documents.runs():
        ids = documents.input_ids[tokens]
        found = np.bincount(ids[documents.loss_mask[tokens]] if with_loss else ids, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return counts


def _rows(model: ModelConfig, size: int, numbers: list[int]) -> torch.Tensor | None:
    """Reads rows `numbers` of the input embeddings, (numbers, width) float32.

    None if this machine has no readable safetensors files, or no embeddings with `size` rows in them.
    """
    from safetensors import SafetensorError, safe_open

    folder = _folder(model)
    try:
        for path in sorted(folder.glob("model*.safetensors")) if folder else ():
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    part = file.get_slice(name) if "embed" in name or "wte" in name else None
                    if part is not None and part.get_shape()[0] == size and len(part.get_shape()) == 2:
                        return torch.cat([part[number : number + 1] for number in numbers]).float()
    except (OSError, SafetensorError):  # loading the model raises the error
        pass
    return None


def _folder(model: ModelConfig) -> Path | None:
    """Returns the local folder of a model, also in the hub's cache; None if the model must be downloaded."""
    name = locate(model)
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, "config.json", revision=model.revision)
    return Path(path).parent if isinstance(path, str) else None
