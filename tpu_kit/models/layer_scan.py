"""Stacking the weights of a decoder's layers, so that they run as loops (`layers`); and taking stacks apart again.

It happens on the host before the model's move to its device. Saved files know layers only, never stacks.

A decoder's layers as loops over stacked weights, each layer computed again in the backward pass.

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

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_kit.config.loader import OptimConfig
from tpu_kit.models import activation_checkpointing, architecture, attention, partition
from tpu_kit.models.activation_checkpointing import SeededDropout, mix
from tpu_kit.models.chunked_mlp import autocast_now, chunk_mlp, is_tiled
from tpu_kit.xla.scan import Tensors, after, scan


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
            with activation_checkpointing.recording(self.keeps) as found:
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
            with torch.enable_grad(), activation_checkpointing.replaying(results, self.keeps):
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
        kind = hidden.device.type
        product = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        tensors, hidden = partition.gather_layer(tensors, product), partition.by_rows(hidden)
        output = torch.func.functional_call(self.layers[index], tensors, (hidden, *args), kwargs, tie_weights=False)
        if not isinstance(output, torch.Tensor):
            raise CannotScanError("its layers return more than the hidden states")
        if output.dtype != hidden.dtype or output.shape != hidden.shape:
            raise CannotScanError(f"a layer turns {hidden.dtype} into {output.dtype}")
        return partition.by_rows(output)


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


FAMILIES = tuple(name for name, family in architecture.FAMILIES.items() if family.scans)
"""model_type of the families whose loop the tests compare with the unrolled layers."""


def scan_layers(decoder: Any, optim: OptimConfig, device_type: str) -> str | None:
    """Makes a decoder run its layers as loops where `optim.scan_layers` wants it: "auto" does on TPU.

    Args:
        decoder: as `stack` takes it.
        optim: scan_layers, remat and mlp_tile.
        device_type: what the model is to run on.

    Returns:
        None if they are loops now; else why they are not, "" where nothing had spoken for it.

    Raises:
        ValueError: they were to be, and cannot.
    """
    keeps = optim.remat == "outputs"  # on XLA a loop alone can
    loops = device_type == "tpu" or (keeps and device_type == "xla-cpu")
    if optim.scan_layers == "off" or (optim.scan_layers == "auto" and not loops):
        return ""
    if optim.scan_layers == "auto":
        if optim.remat == "none":
            return f"optim.remat={optim.remat} keeps what a loop would compute again"
        if (family := decoder.config.model_type) not in FAMILIES:
            return f"{family} is not among {', '.join(FAMILIES)}; optim.scan_layers=on tries it"
    try:
        stack(decoder, None if keeps else optim.mlp_tile, keeps)
    except CannotScanError as error:
        if optim.scan_layers == "auto":
            return str(error)
        raise ValueError(
            f"optim.scan_layers=on, but {type(decoder).__name__} cannot: {error}; set it to off"
        ) from error
    return None


def stack(decoder: Any, tile: int | None = None, keeps: bool = False) -> ScannedLayers:
    """Makes a decoder run its layers as loops, in place; the layers' weights are stacked on the host, name by name.

    Args:
        decoder: a transformers decoder with the segment-aware attention, before its move to a device, with adapters if
            there are to be any. On the meta device nothing is computed.
        tile: tokens that go through an MLP at a time; None for all.
        keeps: whether results of products and attention are kept (`remat`); the MLP's are, so tiles would save nothing.

    Returns:
        What is now `decoder.layers`.

    Raises:
        CannotScanError: its layers cannot run as a loop; the decoder is as it was.
    """
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise CannotScanError(f"{type(decoder).__name__} has no list of layers")
    numbers = [id(tensor) for layer in layers for tensor in layer.parameters()]
    if len(set(numbers)) < len(numbers):
        raise CannotScanError("its layers share weights")
    calls = _calls(decoder, len(layers))
    keys = [(_signature(layer), call.key()) for layer, call in zip(layers, calls, strict=True)]
    runs, start = [], 0
    for period, turns in architecture.spans(keys):
        ends = range(start, start + period * turns, period)
        runs.append(_run([list(layers[end : end + period]) for end in ends], keeps))
        start += period * turns
    scanned = ScannedLayers(runs).train(decoder.training)
    if tile is not None:
        for layer in (layer for run in runs for layer in run.layers):
            mlp = getattr(layer, "mlp", None)
            if mlp is not None and type(mlp).__name__.endswith("MLP"):
                chunk_mlp(mlp, tile)
    decoder.layers = scanned
    return scanned


def _calls(decoder: Any, count: int) -> list[Call]:
    """What the decoder calls each of its layers with, seen on a row of two tokens."""
    found: list[Call] = []

    def note(hidden: torch.Tensor, calls: list[Call]) -> torch.Tensor:
        found.extend(calls)
        return hidden

    layers, config = decoder.layers, decoder.config
    decoder._modules["layers"] = _Probe(count, note)
    ones = torch.ones(1, 2, dtype=torch.int64, device=next(decoder.parameters()).device)
    try:
        with torch.no_grad():
            masks = attention.inputs(config._attn_implementation, ones)
            decoder(input_ids=ones, position_ids=ones, use_cache=False, **masks)
    finally:
        decoder._modules["layers"] = layers
    if len(found) != count:
        raise CannotScanError("its decoder does not go through its layers one by one")
    return found


class _Probe(ScannedLayers):
    """Stand-ins for layers that only note how they are called."""

    def __init__(self, count: int, note: Callable[[torch.Tensor, list[Call]], torch.Tensor]) -> None:
        super().__init__([])
        self.count, self.note = count, note

    def _run(self, hidden: torch.Tensor, calls: list[Call]) -> torch.Tensor:
        return self.note(hidden, calls)


def _signature(layer: torch.nn.Module) -> Any:
    """Equal for layers that compute the same with other weights."""
    modules = [
        (name, type(part), {key: value for key, value in vars(part).items() if key != "layer_idx" and _plain(value)})
        for name, part in layer.named_modules()
    ]
    tensors = {n: (t.shape, t.dtype, t.device, t.requires_grad) for n, t in tensors_of(layer).items()}
    return modules, tensors


def _plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_plain(part) for pair in value.items() for part in pair)
    return value is None or isinstance(value, (bool, int, float, str))


def _run(blocks: list[list[torch.nn.Module]], keeps: bool) -> Run:
    """Makes a run of equal blocks; those after the first are emptied as their weights are stacked."""
    for offset, layer in enumerate(blocks[0]):
        _stack_into(layer, [block[offset] for block in blocks[1:]])
    _seed_dropouts(torch.nn.ModuleList(blocks[0]))
    if keeps:
        activation_checkpointing.keep_products(torch.nn.ModuleList(blocks[0]))
    return Run(blocks[0], len(blocks), keeps)


def _stack_into(layer: torch.nn.Module, others: list[torch.nn.Module]) -> None:
    """Replaces each tensor of a layer by the stack of all layers', (G, ...); the others lose theirs.

    One by one, and each is let go as it is copied: the host never holds a stack and all that it is made of.
    """
    for name in list(tensors_of(layer)):
        owner, _, leaf = name.rpartition(".")
        modules = [each.get_submodule(owner) for each in (layer, *others)]
        first = getattr(layer.get_submodule(owner), leaf)
        stacked = torch.empty((len(modules), *first.shape), dtype=first.dtype, device=first.device)
        for place, module in enumerate(modules):
            stacked[place] = getattr(module, leaf).detach()
            setattr(module, leaf, None)
        _give_back()
        if isinstance(first, torch.nn.Parameter):
            stacked = torch.nn.Parameter(stacked, requires_grad=first.requires_grad)
        setattr(modules[0], leaf, stacked)


def _give_back() -> None:
    """Gives freed memory back to the system: glibc keeps that of pieces below 32 MiB, which all layers together are."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def _seed_dropouts(layers: torch.nn.ModuleList) -> None:
    """Puts `SeededDropout` in the place of each dropout that draws."""
    found = [(name, part) for name, part in layers.named_modules() if isinstance(part, torch.nn.Dropout) and part.p > 0]
    for site, (name, part) in enumerate(found):
        owner, _, leaf = name.rpartition(".")
        setattr(layers.get_submodule(owner), leaf, SeededDropout(part.p, site))


# --------------------------------------------------------------------------------------------- names of the parameters


def stacked_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Returns, for each trained parameter that is a stack, the names of its slices in the model without stacks."""
    found = {}
    for path, part in model.named_modules():
        if isinstance(part, ScannedLayers):
            start = f"{path}." if path else ""
            for stack, layers in part.places().items():
                for name, parameter in part.named_parameters():
                    if parameter.requires_grad and name.startswith(stack):
                        found[start + name] = [start + layer + name.removeprefix(stack) for layer in layers]
    return found


def stacked_prefixes(model: torch.nn.Module) -> list[str]:
    """Returns how the names of stacked tensors begin, of trained and of frozen ones."""
    scanned = ((path, part) for path, part in model.named_modules() if isinstance(part, ScannedLayers))
    return [f"{path}.{stack}" if path else stack for path, part in scanned for stack in part.places()]


def unstacked(stacks: Mapping[str, list[str]], named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the names that parameters have without stacks: views of the stacks' slices, and the others.

    Args:
        stacks: as `stacked_names` gives them.
        named: by names of the model's parameters, (G, ...) those of stacks.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        found |= dict(zip(stacks[name], tensor.unbind(), strict=True)) if name in stacks else {name: tensor}
    return found


def restacked(stacks: Mapping[str, list[str]], named: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The tensor of one of the model's parameters, from those that `unstacked` gave."""
    return torch.stack([named[one] for one in stacks[name]]) if name in stacks else named[name]
