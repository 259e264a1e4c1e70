"""Placeholders for a decoder's list of layers: record the layers' calls, find equal layers, and name their stacks.

To find equal layers, the decoder runs once on a row of two tokens with placeholders in its list of layers. The
placeholders record the arguments of the calls. Layers are equal if both their calls and their modules match.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_kit.model import attention
from tpu_kit.model.loop import layer_inputs
from tpu_kit.model.loop.activation_checkpointing import tensors_of
from tpu_kit.model.loop.layer_inputs import LayerCache, Visibility
from tpu_kit.xla.scan import Tensors

_TENSOR, _MAPPING, _CACHE = object(), object(), object()  # marks in place of such arguments


class CannotScanError(ValueError):
    """The layers of a model cannot run as a loop; the text says why."""


@dataclass(frozen=True)
class Call:
    """A decoder's arguments of a layer, without the hidden states, and the kit's `LayerInputs`.

    Attributes:
        tensors: the tensors among the arguments.
        others: the other arguments, with marks in place of tensors, the mapping and the cache.
        spec: structure of the arguments.
        mapping: mapping in which layers leave tensors for later layers, or None.
        cache: cache of generation; None outside of generation.
    """

    tensors: Tensors
    others: tuple[Any, ...]
    spec: Any
    mapping: MutableMapping[Any, Any] | None
    cache: LayerCache | None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Makes a call of a layer's arguments and the currently bound inputs; CannotScanError for several mappings."""
        leaves, spec = tree_flatten((args, kwargs, layer_inputs.current()), is_leaf=_is_shared)
        mappings = {id(leaf): leaf for leaf in leaves if _is_shared(leaf)}
        if len(mappings) > 1:
            raise CannotScanError("its layers share several mappings")
        others = (
            _TENSOR if isinstance(leaf, torch.Tensor) else _MAPPING if id(leaf) in mappings
            else _CACHE if isinstance(leaf, LayerCache) else leaf for leaf in leaves
        )  # fmt: skip
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        cache = next((leaf for leaf in leaves if isinstance(leaf, LayerCache)), None)
        return cls(tensors, tuple(others), spec, next(iter(mappings.values()), None), cache)

    def key(self) -> Any:
        """Returns a key that is equal for calls that only differ in the values of tensors."""
        return [(tensor.shape, tensor.dtype) for tensor in self.tensors], self.others, self.spec

    def arguments(
        self, tensors: Tensors, mapping: MutableMapping[Any, Any] | None, cache: LayerCache | None = None
    ) -> Any:
        """Returns (args, kwargs, `LayerInputs`) of the call with other tensors, another mapping and another cache."""
        rest = iter(tensors)
        leaves = [next(rest) if one is _TENSOR else mapping if one is _MAPPING else cache if one is _CACHE else one
                  for one in self.others]  # fmt: skip
        return tree_unflatten(leaves, self.spec)


def _is_shared(argument: object) -> bool:
    """Returns whether layers may write into an argument: an empty dict, or a mapping of another class."""
    return isinstance(argument, MutableMapping) and not (type(argument) is dict and argument)


def _is_whole(hidden: torch.Tensor, before: torch.Tensor) -> bool:
    """Returns whether hidden states are the previous layer's output, or a view of the whole output.

    XLA tensors do not expose their storage; there, `equal_layers` has already checked this.
    """
    if hidden.shape != before.shape or hidden is before or hidden.device.type == "xla":
        return hidden.shape == before.shape
    return hidden.untyped_storage()._cdata == before.untyped_storage()._cdata


class Placeholders(torch.nn.Module):
    """A list of functions in place of a decoder's layers, which records their calls. Only all layers can be iterated.

    A function has its layer's settings, because a decoder may choose arguments by them. It raises CannotScanError if
    its hidden states are not the previous layer's result. Subclasses implement `_visit`.

    Attributes:
        count: number of layers.
        pairs: whether layers return the hidden states as the first item of a pair.
    """

    def __init__(self, layers: Iterable[torch.nn.Module], pairs: bool) -> None:
        super().__init__()
        self._attributes = [{key: value for key, value in vars(layer).items() if _plain(value)} for layer in layers]
        self.count, self.pairs = len(self._attributes), pairs

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: slice) -> list[Callable[..., Any]]:
        assert isinstance(index, slice) and range(self.count)[index] == range(self.count), (
            f"layers {index} of {self.count}: only all layers can run"
        )
        return list(self)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        calls: list[Call] = []
        results: list[torch.Tensor] = []

        def visit(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if results and not _is_whole(hidden, results[-1]):
                raise CannotScanError("its decoder changes the hidden states between two layers")
            calls.append(Call.of(args, kwargs))
            results[:] = [self._visit(hidden, calls)]
            return (results[0], None) if self.pairs else results[0]

        functions = [functools.partial(visit) for _ in range(self.count)]
        for function, attributes in zip(functions, self._attributes, strict=True):
            vars(function).update(attributes)
        return iter(functions)

    def _visit(self, hidden: torch.Tensor, calls: list[Call]) -> torch.Tensor:
        """Returns the result of the layer called last, from its input `hidden` and all `calls` of this pass so far."""
        raise NotImplementedError

    def places(self) -> dict[str, list[str]]:
        """Returns prefix of a stack's names -> prefixes of its layers' names in a plain list of layers."""
        return {}

    def parts(self) -> dict[str, list[torch.Tensor]]:
        """Returns the layers' CPU tensors of stacks that `to_mesh` makes, by the stacked tensor's name in this list."""
        return {}


class _Probe(Placeholders):
    """Records the layers' calls, and the `writers` into a mapping. Only with a mapping, it runs the layers."""

    def __init__(self, layers: torch.nn.ModuleList, pairs: bool) -> None:
        super().__init__(layers, pairs)
        self.given = list(layers)
        self.calls: list[Call] = []
        self.writers: set[int] = set()

    def _visit(self, hidden: torch.Tensor, calls: list[Call]) -> torch.Tensor:
        self.calls, call = calls, calls[-1]
        if call.mapping is None:
            return hidden
        before = dict(call.mapping)
        args, kwargs, _ = call.arguments(call.tensors, call.mapping)  # its inputs are bound
        output = hidden_states_of(self.given[len(calls) - 1](hidden, *args, **kwargs))
        if any(value is not before.get(key) for key, value in call.mapping.items()):
            self.writers.add(len(calls) - 1)
        return output


def decoder_layers(decoder: torch.nn.Module) -> tuple[str, Any]:
    """Returns the name and value of a decoder's list of layers: loops or `KeptLayers`, else the list with most modules.

    Raises:
        CannotScanError: the decoder has no list of layers.
    """
    lists = {name: part for name, part in decoder.named_children()
             if isinstance(part, (torch.nn.ModuleList, Placeholders)) and len(part)}  # fmt: skip
    if not lists:
        raise CannotScanError(f"{type(decoder).__name__} has no list of layers")
    # Qwen3-VL also has a list of projectors, which may have more modules than its loops.
    chosen = {name: part for name, part in lists.items() if isinstance(part, Placeholders | KeptLayers)} or lists
    return max(chosen.items(), key=lambda item: sum("lora_" not in name for name, _ in item[1].named_modules()))


Inputs = Callable[[torch.Tensor], dict[str, Any]]
"""Makes example arguments of an encoder from ones (1, N), one per token."""


def call_once(
    decoder: Any, name: str, layers: Placeholders, implementation: str, tokens: int = 2, inputs: Inputs | None = None
) -> None:
    """Calls a decoder on a row of ones with other layers and attention, without gradients; then restores its own.

    Args:
        decoder: transformers decoder, or encoder of a tower; its errors are raised unchanged.
        name: attribute of its list of layers.
        layers: placeholders that record the calls; the only result.
        implementation: registered attention; an encoder keeps its own attention.
        tokens: number of ones, which are ids and positions.
        inputs: makes the arguments of an encoder from the ones; None for a decoder.
    """
    config, own = decoder.config, (decoder._modules[name], decoder.config._attn_implementation)
    ones = torch.ones(1, tokens, dtype=torch.int64, device=next(decoder.parameters()).device)
    decoder._modules[name], config._attn_implementation = layers, own[1] if inputs else implementation
    try:
        if inputs is not None:
            with torch.no_grad():
                decoder(**inputs(ones))
            return
        with torch.no_grad(), attention.bound(attention.SDPA, Visibility(ones)) as mask:
            decoder(input_ids=ones, position_ids=ones, use_cache=False, attention_mask=mask)
    finally:
        decoder._modules[name], config._attn_implementation = own


def hidden_states_of(output: Any) -> torch.Tensor:
    """Returns the hidden states from a layer's output, which may be a tuple."""
    return output[0] if isinstance(output, tuple) else output


def equal_layers(
    decoder: Any, name: str, layers: torch.nn.ModuleList, parts: Sequence[int], inputs: Inputs | None = None
) -> tuple[list[int], bool]:
    """Finds the layers that can be iterations of the same loop.

    The modules, settings and tensors of equal layers only differ in values. Arguments that several layers share must be
    the same tensor in equal layers; other arguments may differ. A layer that writes into a mapping equals no other.

    Args:
        decoder: see `layer_scan.stack`.
        name: name of the decoder's list of layers.
        layers: the list of layers.
        parts: a number per layer; layers with different numbers are never equal.
        inputs: arguments of an encoder; None for a decoder.

    Returns:
        A number per layer, the same for equal layers; and whether layers return pairs (`Placeholders.pairs`).

    Raises:
        CannotScanError: the decoder skips layers or calls them out of order, changes the states between two layers, or
            passes several mappings. The decoder's own errors are raised unchanged.
    """
    probe, numbered = _Probe(layers, pairs=False), _numbered(layers)
    try:
        call_once(decoder, name, probe, attention.SDPA, inputs=inputs)  # SDPA runs on all devices
    except ValueError as error:  # the decoder may unpack the returned states as a tuple
        probe = _Probe(layers, pairs=True)
        try:
            call_once(decoder, name, probe, attention.SDPA, inputs=inputs)
        except Exception:  # a model's code may raise anything; the first error names the cause
            raise error from None
    if len(probe.calls) != len(layers):
        raise CannotScanError("its decoder does not call its layers in sequence")
    uses = Counter(number for call in probe.calls for number in {id(tensor) for tensor in call.tensors})
    known: list[Any] = []
    found = []
    for place, (layer, call) in enumerate(zip(layers, probe.calls, strict=True)):
        settings = {key: value for key, value in _settings(layer).items() if key not in numbered}
        modules = [(path, type(part)) for path, part in layer.named_modules()]
        tensors = {n: (t.shape, t.dtype, t.device, t.requires_grad) for n, t in tensors_of(layer).items()}
        common = [id(tensor) if uses[id(tensor)] > 1 else None for tensor in call.tensors]
        writer = place if place in probe.writers else None
        key = (parts[place], writer, modules, settings, tensors, call.key(), common)
        if key not in known:
            known.append(key)
        found.append(known.index(key))
    return found, probe.pairs


def _settings(layer: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """Returns (module path, attribute) -> value of the `_plain` attributes of a layer's modules."""
    return {
        (name, key): value for name, part in layer.named_modules() for key, value in vars(part).items() if _plain(value)
    }


def _numbered(layers: torch.nn.ModuleList) -> set[tuple[str, str]]:
    """Returns the settings, (module, attribute), that hold a layer's index, in which equal layers may differ.

    With up to two layers, a switch may look like an index, so only the usual name counts.
    """
    every = [_settings(layer) for layer in layers]
    names = {key for settings in every for key, value in settings.items() if type(value) is int}
    return {
        key for key in names if all(settings.get(key, place) == place for place, settings in enumerate(every))
        and (len(every) > 2 or key[1] == "layer_idx")
    }  # fmt: skip


def _plain(value: object) -> bool:
    """Returns whether a value is None, a number, a text, a dtype, or a list, tuple or dict of these."""
    if isinstance(value, (dict, list, tuple)):
        return all(map(_plain, [*value, *value.values()] if isinstance(value, dict) else value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def as_number(tensor: torch.Tensor) -> torch.Tensor:
    """Converts booleans to uint8, because the carry of a loop cannot have booleans; returns other tensors unchanged."""
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor


class KeptLayers(torch.nn.ModuleList):
    """A decoder's list of layers whose loops keep the states after the layers `kept_after`, counted from 1."""

    def __init__(self, layers: Iterable[torch.nn.Module], kept_after: Sequence[int] = ()) -> None:
        super().__init__(layers)
        self.kept_after = kept_after


def keep_after(decoder: torch.nn.Module, layer: int) -> None:
    """Makes `kept_states` return the states after a layer, counted from 1; call it before layers become loops."""
    name, layers = decoder_layers(decoder)
    setattr(decoder, name, KeptLayers(layers, sorted({*kept_after(decoder), layer})))


def kept_after(decoder: torch.nn.Module) -> Sequence[int]:
    """Returns the layers, sorted, counted from 1, for which `keep_after` was called; () after layers became loops."""
    layers = decoder_layers(decoder)[1]
    return layers.kept_after if isinstance(layers, KeptLayers) else ()


def kept_states(decoder: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Returns {layer, counted from 1: its output} for layers of `keep_after`, from the last pass outside of generation.

    The decoder then forgets these states; {} if they were already taken, or if layers are not loops.
    """
    layers = decoder_layers(decoder)[1]
    found: dict[int, torch.Tensor] = getattr(layers, "kept", {})
    if found:
        layers.kept = {}
    return found


def stacked_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Returns {name of a trained stacked parameter: its slices' names in the model without stacks}; {} without."""
    found = {}
    for path, part in model.named_modules():
        if isinstance(part, Placeholders):
            start = f"{path}." if path else ""
            for stack, layers in part.places().items():
                for name, parameter in part.named_parameters():
                    if parameter.requires_grad and name.startswith(stack):
                        found[start + name] = [start + layer + name.removeprefix(stack) for layer in layers]
    return found


def stacked_prefixes(model: torch.nn.Module) -> list[str]:
    """Returns the prefixes, with a final dot, of the names of stacked tensors, trained or frozen; [] without loops."""
    scanned = ((path, part) for path, part in model.named_modules() if isinstance(part, Placeholders))
    return [f"{path}.{stack}" if path else stack for path, part in scanned for stack in part.places()]


def stacked_parts(model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """Returns the layers' CPU tensors of a model's stacks that `to_mesh` makes, by the stacked tensor's name."""
    scanned = ((path, part) for path, part in model.named_modules() if isinstance(part, Placeholders))
    return {f"{path}.{name}" if path else name: held for path, part in scanned for name, held in part.parts().items()}


def unstacked(stacks: Mapping[str, list[str]], named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Splits stacks (G, ...) of `stacked_names` into views by the slices' names; keeps tensors without a stack."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        found |= dict(zip(stacks[name], tensor.unbind(), strict=True)) if name in stacks else {name: tensor}
    return found


def restacked(stacks: Mapping[str, list[str]], named: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Returns the tensor of the parameter `name` of a model with `stacks`, from a result of `unstacked`."""
    return torch.stack([named[one] for one in stacks[name]]) if name in stacks else named[name]
