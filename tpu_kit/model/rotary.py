"""Constant rotary frequencies: a document of a row must not depend on the longest of its neighbours.

transformers changes the rotary frequencies of a whole batch with its longest position: beyond a certain length
"longrope" (Phi-3) uses its long factors and "dynamic" another base. A document would depend on its neighbours, and
the host would read the device in every step. Up to `max_positions` the frequencies are constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def max_positions(config: Any) -> int | None:
    """Returns the length up to which rotary frequencies of a text configuration are constant; None without a limit."""
    settings = getattr(config, "rope_parameters", None) or {}
    ropes = [one for one in (settings, *settings.values()) if isinstance(one, dict)]  # one, or one for each layer type
    limits = [
        rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for rope in ropes
        if rope.get("rope_type") == "longrope"
    ]
    limits.append(getattr(config, "max_position_embeddings", None))
    return min((limit for limit in limits if limit), default=None)


def check_length(config: Any, max_length: int) -> None:
    """Checks that the rotary frequencies are constant in rows of `max_length` tokens.

    Raises:
        ValueError: they are not.
    """
    most, limit = getattr(config, "max_position_embeddings", None), max_positions(config)
    if most is not None and limit is not None and limit < max_length <= most:
        raise ValueError(
            f"data.max_length={max_length}: {config.model_type} with longrope changes the rotary frequencies of a "
            f"whole batch when one row has more than {limit} tokens, so a document would depend on its neighbours; "
            f"set data.max_length={limit} or less"
        )


def fix_rotary(model: torch.nn.Module) -> Callable[[], None]:
    """Makes the rotary frequencies of a model constant, in place; returns a function that undoes it."""
    before: list[tuple[torch.nn.Module, dict[str, Any]]] = []
    for part in model.modules():
        kind: Any = getattr(part, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else [kind]
        if any(isinstance(one, str) and ("dynamic" in one or one == "longrope") for one in kinds):
            buffers = dict(part.named_buffers(recurse=False))
            before.append((part, {"rope_type": kind, **buffers}))
            part.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"  # type: ignore[assignment]  # no tensor
            for name, frequencies in buffers.items():
                if name.endswith("original_inv_freq"):
                    setattr(part, name.replace("original_", ""), frequencies.clone())

    def undo() -> None:
        for part, values in before:
            for name, value in values.items():
                setattr(part, name, value)

    return undo
