"""Stacking the weights of a decoder's layers, so that they run as loops (`layers`); and taking stacks apart again.

It happens on the host before the model's move to its device. Saved files know layers only, never stacks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tpu_kit import attention, remat
from tpu_kit.config import OptimConfig
from tpu_kit.dropout import SeededDropout
from tpu_kit.layers import Call, CannotScanError, Run, ScannedLayers, tensors_of
from tpu_kit.tiles import tile_mlp

_LONGEST = 12  # layers in a block

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text")
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
    for period, turns in _spans(keys):
        ends = range(start, start + period * turns, period)
        runs.append(_run([list(layers[end : end + period]) for end in ends], keeps))
        start += period * turns
    scanned = ScannedLayers(runs).train(decoder.training)
    if tile is not None:
        for layer in (layer for run in runs for layer in run.layers):
            mlp = getattr(layer, "mlp", None)
            if mlp is not None and type(mlp).__name__.endswith("MLP"):
                tile_mlp(mlp, tile)
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


def _run(blocks: list[list[torch.nn.Module]], keeps: bool) -> Run:
    """Makes a run of equal blocks; those after the first are emptied as their weights are stacked."""
    for offset, layer in enumerate(blocks[0]):
        _stack_into(layer, [block[offset] for block in blocks[1:]])
    _seed_dropouts(torch.nn.ModuleList(blocks[0]))
    if keeps:
        remat.keep_products(torch.nn.ModuleList(blocks[0]))
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


def per_layer(model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the names that the model's parameters have, or had before `stack`: a stack becomes its slices.

    Args:
        model: stacked or not.
        named: tensors by names of its parameters, (G, ...) those of stacks. Their ends may be other ones, as in PEFT's
            files.
    """
    places, found = _places(model), {}
    for name, tensor in named.items():
        stack = next((start for start in places if name.startswith(start)), None)
        if stack is None:
            found[name] = tensor
        else:
            names = [start + name.removeprefix(stack) for start in places[stack]]
            found |= dict(zip(names, tensor.unbind(), strict=True))
    return found


def stacked_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Of each of a model's trained parameters that is a stack, the names of its slices; see `per_layer`."""
    found = {}
    for stack, starts in _places(model).items():
        for name, part in model.named_parameters():
            if part.requires_grad and name.startswith(stack):
                found[name] = [start + name.removeprefix(stack) for start in starts]
    return found


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


def _places(model: torch.nn.Module) -> dict[str, list[str]]:
    """For the beginning of each stack's full name those of its slices."""
    found: dict[str, list[str]] = {}
    for path, part in model.named_modules():
        if isinstance(part, ScannedLayers):
            start = f"{path}." if path else ""
            found |= {start + stack: [start + own for own in names] for stack, names in part.places().items()}
    return found
