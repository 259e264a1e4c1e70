"""A decoder's layers as loops over stacked weights, each layer computed again in the backward pass.

Unrolled, a program has every layer's operations: it compiles for minutes, and the compiler keeps alive what it likes.
As a loop it has one layer's, forward and backward, and memory for one layer's work. The weights are stacked on the host
beforehand, (G, ...) for G turns; stacked within the step they would be copied there.

`stack` puts `ScannedLayers` in the place of the model's list of layers and leaves all else to the model's own code:
embedding, masks, rotary angles, the final norm. When the decoder goes through its layers, the stand-ins note what each
would be called with, and the last of them runs the loops. So any family works whose decoder does nothing between layers
and whose layers repeat, in blocks of one (Llama, Qwen, Mistral, Phi) or several (Gemma 2: a local and a global one;
Gemma 3: five and one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_kit import remat
from tpu_kit.dropout import SeededDropout, mix
from tpu_kit.scan import Tensors, after, scan
from tpu_kit.tiles import autocast_now, is_tiled


def tensors_of(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, without the seeds of dropout."""
    seeds = {f"{name}.seed" for name, part in layer.named_modules() if isinstance(part, SeededDropout)}
    found: dict[str, torch.Tensor] = dict(layer.named_parameters())
    return found | {name: tensor for name, tensor in layer.named_buffers() if name not in seeds}


class CannotScanError(ValueError):
    """Why a model's layers cannot run as a loop."""


@dataclass(frozen=True)
class Call:
    """What a decoder calls a layer with, besides the hidden states."""

    tensors: Tensors
    others: tuple[Any, ...]  # arguments that are no tensors, None in the place of those that are
    there: tuple[bool, ...]  # where the tensors are
    spec: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Takes arguments apart."""
        leaves, spec = tree_flatten((args, kwargs))
        there = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        others = tuple(None if is_tensor else leaf for leaf, is_tensor in zip(leaves, there, strict=True))
        return cls([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], others, there, spec)

    def key(self) -> Any:
        """Equal for calls with the very same tensors and equal other arguments."""
        return [id(tensor) for tensor in self.tensors], self.others, self.spec

    def withtensors_of(self, tensors: Tensors) -> Any:
        """The arguments (args, kwargs) with these tensors in the place of its own."""
        rest = iter(tensors)
        leaves = [next(rest) if there else other for other, there in zip(self.others, self.there, strict=True)]
        return tree_unflatten(leaves, self.spec)


class _Visitors:
    """What the decoder iterates over in place of its layers: notes the calls, then hands them over."""

    def __init__(self, count: int, run: Callable[[torch.Tensor, list[Call]], torch.Tensor]) -> None:
        self.count, self.run = count, run

    def __iter__(self) -> Iterator[Callable[..., torch.Tensor]]:
        calls: list[Call] = []
        first: list[torch.Tensor] = []

        def visit(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            first.append(hidden)
            if hidden is not first[0]:
                raise CannotScanError("its decoder changes the hidden states between two layers")
            calls.append(Call.of(args, kwargs))
            return hidden if len(calls) < self.count else self.run(hidden, calls)

        return iter([visit] * self.count)


class ScannedLayers(torch.nn.Module):
    """Stands in for a decoder's list of layers; see `stack`."""

    def __init__(self, runs: list[Run]) -> None:
        super().__init__()
        self.runs, self.in_order = torch.nn.ModuleList(runs), runs
        self.count = sum(run.period * run.turns for run in runs)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: slice) -> _Visitors:
        assert isinstance(index, slice) and range(self.count)[index] == range(self.count), (
            f"layers {index} of {self.count}: they run all or none"
        )
        return _Visitors(self.count, self._run)

    def __iter__(self) -> Iterator[Callable[..., torch.Tensor]]:
        return iter(self[:])

    def _run(self, hidden: torch.Tensor, calls: list[Call]) -> torch.Tensor:
        start = 0
        for run in self.in_order:
            count = run.period * run.turns
            hidden = run(hidden, calls[start : start + count])
            start += count
        return hidden

    def places(self) -> dict[str, list[str]]:
        """For the beginning of each stack's name, those of its slices in a list of layers, relative to this module."""
        found, start = {}, 0
        for number, run in enumerate(self.in_order):
            end = start + run.period * run.turns
            for offset in range(run.period):
                names = [f"{place}." for place in range(start + offset, end, run.period)]
                found[f"runs.{number}.layers.{offset}."] = names
            start = end
        return found


class Run(torch.nn.Module):
    """Layers that repeat: `turns` times a block of `period` layers, whose weights are (turns, ...) each."""

    def __init__(self, layers: list[torch.nn.Module], turns: int, keeps: bool = False) -> None:
        """Takes the layers of one block, their weights stacked, their dropouts seeded; `keeps` is of `remat`."""
        super().__init__()
        self.turns, self.period, self.keeps = turns, len(layers), keeps
        self.layers = torch.nn.ModuleList(layers)
        self.draws = any(isinstance(part, SeededDropout) for part in self.modules())

    def forward(self, hidden: torch.Tensor, calls: list[Call]) -> torch.Tensor:
        """The hidden states after all its layers; `calls` are what the decoder calls each with."""
        for index, call in enumerate(calls):
            assert call.key() == calls[index % self.period].key(), "layers of one run are called alike"
        calls = calls[: self.period]
        constants = list({id(tensor): tensor for call in calls for tensor in call.tensors}.values())
        block = _Block(self.layers, calls, constants, self.keeps)
        constants = [tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor for tensor in constants]
        inputs = [tensor for layer in self.layers for tensor in tensors_of(layer).values()]
        if self.draws and self.training:
            inputs.append(
                mix(
                    _draw(hidden.device)
                    + torch.arange(self.turns, device=hidden.device, dtype=torch.int32) * 0x61C88647
                )
            )
        if torch.is_grad_enabled():
            output: torch.Tensor = _Scanned.apply(block, len(constants), hidden, *constants, *inputs)
            return output
        carry, _ = scan(lambda carry, slices: (block.forward(carry, slices)[0], []), [hidden, *constants], inputs)
        return carry[0]


def _draw(device: torch.device) -> torch.Tensor:
    """One number of the device's generator a pass: it goes on from step to step, and differs between replicas."""
    return torch.randint(0, 2**31 - 1, (), device=device, dtype=torch.int32)


class _Block:
    """One turn of a loop, forward and backward: functions of a carry (states or gradient, constants) and of slices."""

    def __init__(self, layers: torch.nn.ModuleList, calls: list[Call], constants: Tensors, keeps: bool) -> None:
        places = {id(tensor): place for place, tensor in enumerate(constants)}
        self.layers, self.calls, self.keeps = layers, calls, keeps
        self.kept: list[int] = []  # results that each layer keeps, known after a forward pass
        self.places = [[places[id(tensor)] for tensor in call.tensors] for call in calls]
        self.names = [list(tensors_of(layer)) for layer in layers]
        self.trained = [[n for n, tensor in tensors_of(layer).items() if tensor.requires_grad] for layer in layers]
        self.seeds = [[name for name, part in layer.named_modules() if isinstance(part, SeededDropout)]
                      for layer in layers]  # fmt: skip
        self.cast = [_cast_once(layer) for layer in layers]

    def forward(self, carry: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
        """The hidden states after the block; those before each of its layers, and what these keep."""
        hidden, before, kept = carry[0], [], []
        for index, tensors in enumerate(self._by_layer(slices)):
            before.append(hidden)
            with remat.recording(self.keeps) as found:
                hidden = self._layer(index, hidden, carry[1:], tensors)
            kept.append(found)
        self.kept = [len(found) for found in kept]
        return [hidden, *carry[1:]], [*before, *(tensor for found in kept for tensor in found)]

    def backward(self, carry: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
        """The gradient before the block, and those of the trained tensors; each layer is computed again.

        But not before the one after it is done: nothing else keeps XLA from having all of a block's at a time.
        """
        gradient, count, rest = carry[0], len(self.layers), iter(slices)
        before, gradients = [next(rest) for _ in self.layers], [[]] * count  # type: ignore[var-annotated]
        kept = [[next(rest) for _ in range(number)] for number in self.kept]
        done: Tensors = []
        for index, tensors in reversed(list(enumerate(self._by_layer(list(rest))))):
            given, *results = after(done, [before[index], *kept[index]])
            with torch.enable_grad(), remat.replaying(results, self.keeps):
                hidden = given.detach().requires_grad_()
                trained = {name: self._leaf(index, name, tensors[name]) for name in self.trained[index]}
                output = self._layer(index, hidden, carry[1:], {**tensors, **trained})
                gradient, *found = torch.autograd.grad(
                    output, [hidden, *trained.values()], gradient, allow_unused=True, materialize_grads=True
                )
            gradients[index] = found
            done = [gradient, *found]
        return [gradient, *carry[1:]], [part for found in gradients for part in found]

    def _leaf(self, index: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A trained tensor to differentiate by.

        Autocast has an adapter's gradient computed in its own dtype and then turned into fp32: here the loop keeps it
        as it is computed, in half the memory for all layers, and it is turned after the loop.
        """
        kind = tensor.device.type
        if name in self.cast[index] and torch.is_autocast_enabled(kind):
            tensor = tensor.to(torch.get_autocast_dtype(kind))
        return tensor.detach().requires_grad_()

    def _by_layer(self, slices: Tensors) -> list[dict[str, torch.Tensor]]:
        """The slices by layer and name; the last one seeds all dropouts, each by its own site."""
        rest = iter(slices)
        found = [{name: next(rest) for name in names} for names in self.names]
        for seed in rest:
            for tensors, modules in zip(found, self.seeds, strict=True):
                tensors |= {f"{module}.seed": seed for module in modules}
        return found

    def _layer(
        self, index: int, hidden: torch.Tensor, constants: Tensors, tensors: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        given = [constants[place] for place in self.places[index]]
        given = [tensor.bool() if own.dtype == torch.bool else tensor  # a loop's carry knows no booleans
                 for tensor, own in zip(given, self.calls[index].tensors, strict=True)]  # fmt: skip
        args, kwargs = self.calls[index].withtensors_of(given)
        output = torch.func.functional_call(self.layers[index], tensors, (hidden, *args), kwargs, tie_weights=False)
        if not isinstance(output, torch.Tensor):
            raise CannotScanError("its layers return more than the hidden states")
        if output.dtype != hidden.dtype or output.shape != hidden.shape:
            raise CannotScanError(f"a layer turns {hidden.dtype} into {output.dtype}")
        return output


def _cast_once(layer: torch.nn.Module) -> set[str]:
    """The matrices of adapters that autocast turns into its dtype, for one product: DoRA has two, and tiles add up."""
    sums = [f"{name}." for name, part in layer.named_modules() if is_tiled(part)]
    if any("lora_magnitude" in name for name, _ in layer.named_parameters()):
        return set()
    return {
        f"{name}.weight"
        for name, part in layer.named_modules()
        if type(part) is torch.nn.Linear and "lora_" in name and not name.startswith(tuple(sums))
    }


class _Scanned(torch.autograd.Function):
    """The loop over a run's blocks; keeps what `_Block.forward` gives, and loops back from the last to the first."""

    @staticmethod
    def forward(ctx: Any, block: _Block, constants: int, hidden: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.block, ctx.constants, ctx.autocast = block, constants, autocast_now(hidden.device.type)
        ctx.given = len(tensors)
        carry, kept = scan(block.forward, [hidden, *tensors[:constants]], list(tensors[constants:]))
        ctx.save_for_backward(*tensors, *kept)
        ctx.trained = [tensor.requires_grad for tensor in tensors]
        return carry[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        constants, inputs, kept = saved[: ctx.constants], saved[ctx.constants : ctx.given], saved[ctx.given :]
        with torch.autocast(**ctx.autocast):
            carry, found = scan(ctx.block.backward, [upstream, *constants], [*kept, *inputs], reverse=True)
        gradients = iter(found)
        turned = (
            next(gradients).to(own.dtype) if own_is_trained else None
            for own, own_is_trained in zip(saved, ctx.trained, strict=False)
        )
        return (None, None, carry[0], *turned)
