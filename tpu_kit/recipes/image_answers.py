"""Exact answers of a model to packed rows, without generation: whether each token of an answer is the likeliest one.

Greedy decoding writes exactly such answers: a reply whose every token is the likeliest after those before it is the
reply that the model gives. So one forward pass of packed rows, with their pictures, counts the right answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from tpu_kit.config.loader import TrainConfig
from tpu_kit.data.batching import IGNORED, PackedDataset
from tpu_kit.data.prepare import Prepared
from tpu_kit.generation.evaluation.accuracy import Accuracy
from tpu_kit.generation.model_loading import load_for_generation
from tpu_kit.model import attention
from tpu_kit.model import causal_lm as models
from tpu_kit.model.base_model import base_model
from tpu_kit.model.families import registry as families


def answers_with_images(
    config: TrainConfig, adapter: str | Path, prepared: Prepared, most: int | None = None
) -> dict[str, Accuracy]:
    """Counts the exact answers to the held-out rows of a run, on this computer's CPU.

    Args:
        config: the run.
        adapter: its result.
        prepared: its rows, with held-out ones.
        most: documents that are answered at most; None for all.

    Returns:
        Those of the base model, of the tuned one, and of the tuned one with black pictures, by these names.
    """
    assert prepared.eval is not None
    found, device = dict[str, Accuracy](), torch.device("cpu")
    for name, folder, black in (("base", None, False), ("tuned", adapter, False), ("tuned, black", adapter, True)):
        model = load_for_generation(config.model, folder)
        families.set_attention(base_model(model), attention.SDPA)
        model._tpu_kit_compute_dtype = torch.float32  # type: ignore[assignment]  # mypy expects a tensor or a module
        right = right_answers(model, prepared.eval, device, black=black, most=most)
        found[name] = Accuracy.of(int(right.sum()), len(right))
    return found


def right_answers(
    model: torch.nn.Module, dataset: PackedDataset, device: torch.device, rows: int = 8, black: bool = False,
    most: int | None = None,
) -> np.ndarray:  # fmt: skip
    """Returns for each document of the first rows that carries loss whether the model answers it exactly, booleans.

    Args:
        model: in evaluation mode, with the kit's attention.
        dataset: packed documents whose answers carry loss.
        device: of the model.
        rows: of a batch.
        black: in place of the pictures, black ones of the same sizes.
        most: documents that are answered, at least one row of them; None for all.
    """
    found = list[bool]()
    for start in range(0, len(dataset), rows):
        if most is not None and len(found) >= most:
            break
        numbers = np.arange(start, min(start + rows, len(dataset)))
        batch = dataset.tensors(numbers)
        if black:
            batch["pixels"].zero_()
        wrong = _wrong(model, {name: one.to(device) for name, one in batch.items()}).cpu().numpy()
        segments, answers = batch["segment_ids"].numpy(), (batch["labels"] != IGNORED).numpy()
        for row, number in enumerate(numbers):
            for segment in range(1, 1 + len(dataset.documents_of(int(number)))):
                here = segments[row] == segment
                if answers[row][here].any():  # else its pictures cannot be decoded
                    found.append(not wrong[row][here].any())
    return np.array(found[:most])


def _wrong(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns where a token with loss is not the likeliest, (B, S) booleans."""
    with torch.no_grad():
        likeliest = models.logits(model, batch).argmax(-1)
    before = torch.nn.functional.pad(likeliest[:, :-1], (1, 0))
    labels = batch["labels"]
    return (labels != IGNORED) & (before != labels)
