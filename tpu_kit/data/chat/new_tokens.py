"""Finds the tokens that somebody added to a tokenizer, and whose embeddings no training has changed since."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tpu_kit.config.loader import ModelConfig
from tpu_kit.data.batching import Documents
from tpu_kit.model.weights.source import locate

_BLOCKS, _BLOCK = 256, 8  # rows of the embeddings that are compared with: blocks, rows of a block
_NEAR = 0.1  # distance to the mean, or length, of a new row, as a share of that of other rows
_ALIKE = 0.05  # share of the other rows that may look as if drawn at random, so that the spread of a row tells anything


def new_tokens(model: ModelConfig, text: Any, tokenizer: Any, used: np.ndarray) -> tuple[str, ...]:
    """Returns the texts of new tokens among those that rows use.

    A row of the embeddings is new if it is still what libraries begin with: the mean of all rows (transformers,
    Unsloth), zeros, or numbers drawn with the model's initializer_range. A row that was copied from a trained one
    cannot be told, nor any row of a model whose weights are not in safetensors files on this machine.

    Args:
        model: the base model.
        text: its configuration for text, as of transformers; None if it cannot be read.
        tokenizer: its tokenizer.
        used: token ids of the rows, in any shape.
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
    """Returns how often each token id occurs in documents, or does so with loss, int64 (the largest id + 1,)."""
    counts = np.zeros(0, dtype=np.int64)
    for _, tokens in documents.runs():
        ids = documents.input_ids[tokens]
        found = np.bincount(ids[documents.loss_mask[tokens]] if with_loss else ids, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return counts


def _rows(model: ModelConfig, size: int, numbers: list[int]) -> torch.Tensor | None:
    """Reads rows of the input embeddings: (numbers, width), float32; None without safetensors files of the model."""
    from safetensors import SafetensorError, safe_open

    folder = _folder(model)
    try:
        for path in sorted(folder.glob("model*.safetensors")) if folder else ():
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    part = file.get_slice(name) if "embed" in name or "wte" in name else None
                    if part is not None and part.get_shape()[0] == size and len(part.get_shape()) == 2:
                        return torch.cat([part[number : number + 1] for number in numbers]).float()
    except (OSError, SafetensorError):  # loading the model says what is wrong
        pass
    return None


def _folder(model: ModelConfig) -> Path | None:
    """Returns the folder of a model on this machine; None if it has to be fetched."""
    name = locate(model)
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, "config.json", revision=model.revision)
    return Path(path).parent if isinstance(path, str) else None
