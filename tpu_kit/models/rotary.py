"""Rotary embeddings whose frequencies transformers changes with the longest position of a batch.

Past a certain length "longrope" (Phi-3) takes its long factors and "dynamic" another base, for all rows of the batch:
a document would depend on its neighbours, and the device would be read in every step. Up to that length the frequencies
are constant: `positions` says where it ends, `fix` and `fixed` keep the frequencies constant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_CONSTANT = "default"


def positions(config: Any) -> int | None:
    """Returns the length up to which the rotary frequencies are constant; None where the model names no limit.

    Args:
        config: the text configuration of a model.
    """
    most: int | None = getattr(config, "max_position_embeddings", None)
    limits = [
        rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for rope in _ropes(config)
        if rope.get("rope_type") == "longrope"
    ]
    return min((limit for limit in (*limits, most) if limit), default=None)


def check_length(config: Any, max_length: int) -> None:
    """Checks that rows of `max_length` tokens leave the rotary frequencies constant.

    Raises:
        ValueError: they do not.
    """
    most, limit = getattr(config, "max_position_embeddings", None), positions(config)
    if most is not None and limit is not None and limit < max_length <= most:
        raise ValueError(
            f"data.max_length={max_length}: {config.model_type} with longrope changes the rotary frequencies of a "
            f"whole batch when one row has more than {limit} tokens, so a document would depend on its neighbours; "
            f"set data.max_length={limit} or less"
        )


def fix(model: torch.nn.Module) -> None:
    """Keeps the rotary frequencies of a model constant from now on, in place."""
    for part in _changing(model):
        kind = part.rope_type
        part.rope_type = dict.fromkeys(kind, _CONSTANT) if isinstance(kind, dict) else _CONSTANT  # type: ignore[assignment]
        for name, frequencies in list(part.named_buffers(recurse=False)):
            if name.endswith("original_inv_freq"):
                setattr(part, name.replace("original_", ""), frequencies.clone())


@contextlib.contextmanager
def fixed(model: torch.nn.Module) -> Iterator[None]:
    """Keeps the rotary frequencies of a model constant while it is open."""
    before = [(part, part.rope_type, dict(part.named_buffers(recurse=False))) for part in _changing(model)]
    fix(model)
    try:
        yield
    finally:
        for part, kind, buffers in before:
            part.rope_type = kind
            for name, buffer in buffers.items():
                setattr(part, name, buffer)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The settings of the rotary embedding, and of those of single types of layers."""
    settings = getattr(config, "rope_parameters", None) or {}
    return [one for one in (settings, *settings.values()) if isinstance(one, dict)]


def _changing(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The rotary embeddings whose frequencies change."""
    found = []
    for part in model.modules():
        kind: Any = getattr(part, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else [kind]
        if any(isinstance(one, str) and ("dynamic" in one or one == "longrope") for one in kinds):
            found.append(part)
    return found
