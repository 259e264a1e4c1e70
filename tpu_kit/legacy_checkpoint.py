"""Reads checkpoints of format 2, whose tensors were vectors of many parameters, as those of today's format.

All that is known of that format is here, and depends on nothing that may change: in which order the parameters lay,
how a matrix lay, which parameters shared a vector of moments, and how these were coded.

- parameters, average, best: one vector each, of all trained parameters in the model's order.
- stacked: how many of them were stacks of layers' parameters, (G, ...); 0 where layers were not scanned.
- first.0, second.1, ...: a moment, by the number of the group. The first group was a vector of the parameters of less
  than 2**24 numbers, if there were any; then each larger one was a group by itself, in its own shape.
- applied, usual, streak, window: as today.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

_ALONE = 2**24
_SCALARS = ("applied", "usual", "streak", "window")
_LONGEST = 12  # layers in a block that repeats


@dataclass(frozen=True)
class _Parameter:
    """One that was trained.

    Attributes:
        names: those of the layers' parameters that were stacked in it; else its own.
        shape: (G, ...) of a stack.
        stacked: whether it was one.
    """

    names: list[str]
    shape: tuple[int, ...]
    stacked: bool

    @property
    def matrix(self) -> bool:
        return len(self.shape) - self.stacked > 1

    @property
    def turned(self) -> bool:
        """Whether it lay the other way round in a vector."""
        return len(self.shape) > 1 and self.shape[-1] < 128 <= self.shape[-2]

    def laid(self) -> tuple[int, ...]:
        """How it lay in a vector."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.turned else self.shape

    def take(self, part: torch.Tensor) -> torch.Tensor:
        """What lay in a vector, in the parameter's shape."""
        return part.view(self.laid()).mT if self.turned else part.view(self.shape)

    def layers(self, tensor: torch.Tensor) -> Tensors:
        """Its tensor, or one whose first axis is its own, by the names of the layers' parameters."""
        return dict(zip(self.names, tensor.unbind() if self.stacked else [tensor], strict=True))


def convert(saved: Mapping[str, torch.Tensor], model: Any, optimizer: str) -> Tensors:
    """The tensors of a checkpoint of format 2 as `TrainState.to_host` has them.

    The moments of adamw8bit are decoded: moments/first and moments/second are fp32, as those of adamw.

    Args:
        saved: those of training.safetensors.
        model: the model that was trained, its layers not stacked.
        optimizer: of the run.

    Raises:
        ValueError: they are of another model.
    """
    count = int(saved["stacked"]) if "stacked" in saved else 0
    parameters = list(_stacked(model) if count else _parameters(model.named_parameters()))
    sizes = [prod(one.shape) for one in parameters]
    if sum(sizes) != len(saved["parameters"]) or sum(one.stacked for one in parameters) != count:
        raise ValueError(
            f"the checkpoint's weights are not those of this model: it has {len(saved['parameters']):,} numbers in "
            f"{count} stacks of layers, and the model {sum(sizes):,} in {sum(one.stacked for one in parameters)}. Use "
            "the model and the version of transformers that it was trained with (state.json in the checkpoint names it)"
        )
    found: Tensors = {name: saved[name] for name in _SCALARS}
    for section in ("parameters", "average", "best"):
        if section in saved:
            for one, part in zip(parameters, saved[section].split(sizes), strict=True):
                found |= {f"{section}/{name}": tensor for name, tensor in one.layers(one.take(part)).items()}
    small = [one for one in parameters if prod(one.shape) < _ALONE]
    groups = ([small] if small else []) + [[one] for one in parameters if prod(one.shape) >= _ALONE]
    for number, group in enumerate(groups):
        alone = prod(group[0].shape) >= _ALONE
        moments = {name.partition(".")[0]: part for name, part in saved.items() if name.endswith(f".{number}")}
        read = _adafactor if optimizer == "adafactor" else _adam
        for one, kinds in zip(group, read(moments, group, alone), strict=True):
            for kind, tensor in kinds.items():
                found |= {f"moments/{kind}/{name}": part for name, part in one.layers(tensor).items()}
    return found


# ------------------------------------------------------------------------------------------------------------- moments


def _adam(moments: Tensors, group: list[_Parameter], alone: bool) -> Iterator[Tensors]:
    if "root_second" in moments:  # adamw8bit
        count = sum(prod(one.shape) for one in group)
        root = _decoded(moments, "root_second")[:count]
        moments = {"first": _decoded(moments, "first")[:count], "second": root * root}
    sizes = [prod(one.shape) for one in group]
    parts = {kind: moment.flatten().split(sizes) for kind, moment in moments.items()}
    for place, one in enumerate(group):
        yield {kind: part[place].view(one.shape) if alone else one.take(part[place]) for kind, part in parts.items()}


def _decoded(moments: Tensors, name: str) -> torch.Tensor:
    """Blocks of 256 values with a scale each, coded as sign and root of the share of the largest, in 127 levels."""
    codes = moments[name].to(torch.float32)
    return (codes * codes.abs() * (moments[f"{name}_scale"] / 127**2)).flatten()


def _adafactor(moments: Tensors, group: list[_Parameter], alone: bool) -> Iterator[Tensors]:
    """The means of a matrix's squares over its columns and over its rows, as it lay; of the others each square."""
    used = dict.fromkeys(moments, 0)

    def take(kind: str, shape: Sequence[int]) -> torch.Tensor:
        start, used[kind] = used[kind], used[kind] + prod(shape)
        return moments[kind][start : used[kind]].view(*shape)

    for one in group:
        if not one.matrix:
            yield {"second": one.take(take("vectors", [prod(one.shape)]))}
            continue
        laid = one.shape if alone else one.laid()
        rows, columns = take("rows", laid[:-1]), take("columns", (*laid[:-2], laid[-1]))
        turned = one.turned and not alone
        yield {"rows": columns, "columns": rows} if turned else {"rows": rows, "columns": columns}


# --------------------------------------------------------------------------------------------------------------- order


def _parameters(named: Iterator[tuple[str, torch.nn.Parameter]]) -> Iterator[_Parameter]:
    return (_Parameter([name], tuple(one.shape), False) for name, one in named if one.requires_grad)


def _stacked(model: Any) -> Iterator[_Parameter]:
    """The trained parameters in their order when layers were stacked: the stacks of each run in place of layers."""
    decoder = model.get_decoder()
    start = next(f"{name}." for name, part in model.named_modules() if part is decoder.layers)
    placed = False
    for name, parameter in model.named_parameters():
        if not name.startswith(start):
            yield from _parameters(iter([(name, parameter)]))
        elif not placed:
            placed = True
            yield from _runs(decoder, start)


def _runs(decoder: Any, start: str) -> Iterator[_Parameter]:
    layers = list(decoder.layers)
    kinds = getattr(decoder.config, "layer_types", None) or [None] * len(layers)
    keys = [
        (kind, [(name, one.shape, one.dtype, one.requires_grad) for name, one in layer.named_parameters()])
        for kind, layer in zip(kinds, layers, strict=True)
    ]
    first = 0
    for period, turns in _spans(keys):
        end = first + period * turns
        for offset in range(first, first + period):
            for name, one in layers[offset].named_parameters():
                if one.requires_grad:
                    names = [f"{start}{place}.{name}" for place in range(offset, end, period)]
                    yield _Parameter(names, (turns, *one.shape), True)
        first = end


def _spans(keys: list[Any]) -> list[tuple[int, int]]:
    """Cuts a list into runs (period, turns) of equal blocks: each as long as can be, of the shortest block."""
    spans, start = [], 0
    while start < len(keys):
        best = (1, 1)
        for period in range(1, min(_LONGEST, len(keys) - start) + 1):
            turns, block = 1, keys[start : start + period]
            while keys[start + turns * period : start + (turns + 1) * period] == block:
                turns += 1
            if turns > 1 and period * turns > best[0] * best[1]:
                best = (period, turns)
        spans.append(best)
        start += best[0] * best[1]
    return spans
