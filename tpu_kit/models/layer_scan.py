"""Runs the layers of a decoder as loops over stacked weights, and recomputes each layer in the backward pass.

An unrolled program has the operations of all layers: it compiles for minutes, and needs memory for several layers. A
loop has the operations of one block of layers, forward and backward. The weights are stacked, (G, ...) for G turns, on
the host before the model moves to its device, because stacking within the step would copy them. Saved files have no
stacks.

`stack` replaces the model's list of layers by `ScannedLayers`; embedding, masks, rotary angles and the final norm stay
the model's own code. When the decoder iterates over its layers, placeholders record the arguments of each call, and the
last one runs the layers. Blocks of equal layers become loops, and the other layers are runs of one turn. A tensor that
several layers get is a constant of the loop; a tensor that only one layer gets is stacked. Tensors that a layer leaves
in a mapping for later layers (Gemma 4 shares keys and values) are outputs of its run and constants of the later runs.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_kit.config.loader import OptimConfig
from tpu_kit.distributed.mesh import active_mesh
from tpu_kit.models import activation_checkpointing, architecture, partition
from tpu_kit.models.activation_checkpointing import SeededDropout, autocast_now, chunk_mlp, is_tiled, mix
from tpu_kit.models.layer_calls import (
    Call,
    CannotScanError,
    LayerCache,
    Placeholders,
    equal_layers,
    hidden_states_of,
    layers_of,
    tensors_of,
)
from tpu_kit.xla.scan import Body, Tensors, after, scan, slice_at


class ScannedLayers(Placeholders):
    """Replaces a decoder's list of layers; see `stack`. As text it tells which layers are loops.

    Attributes:
        kept_after: numbers of layers, from 1 on, each the last of a run.
        kept: the states after them, of the last forward pass outside of generation, until `kept_states` takes them.
    """

    def __init__(self, runs: list[Run], kept_after: Sequence[int], pairs: bool) -> None:
        super().__init__(sum(run.count for run in runs), pairs)
        self.kept_after = tuple(kept_after)
        self.kept: dict[int, torch.Tensor] = {}
        self.runs, self.in_order = torch.nn.ModuleList(runs), runs

    def __str__(self) -> str:
        loops = [f"{run.turns} x {run.period}" for run in self.in_order if run.turns > 1]
        single = sum(run.turns == 1 for run in self.in_order)
        parts = [f"{' and '.join(loops)} in {'loops' if len(loops) > 1 else 'a loop'}"] if loops else []
        return ", ".join(parts + ([f"{single} one by one"] if single else []))

    def _visit(self, hidden: torch.Tensor, calls: list[Call]) -> torch.Tensor:
        if len(calls) < self.count:
            return hidden
        start = 0
        shared: dict[Any, Any] = {}
        for run in self.in_order:
            hidden, written = run(hidden, calls[start : start + run.count], shared)
            shared |= written
            start += run.count
            if start in self.kept_after and calls[0].cache is None:
                self.kept[start] = hidden
        return hidden

    def places(self) -> dict[str, list[str]]:
        """Returns, for the prefix of each stack's name, the prefixes of its slices' names in a list of layers."""
        found, start = {}, 0
        for number, run in enumerate(self.in_order):
            end = start + run.count
            for offset in range(run.period):
                names = [f"{place}." for place in range(start + offset, end, run.period)]
                found[f"runs.{number}.layers.{offset}."] = names
            start = end
        return found


class Run(torch.nn.Module):
    """A block of `period` layers that repeats `turns` times, with weights (turns, ...)."""

    def __init__(self, layers: list[torch.nn.Module], turns: int, keeps: bool = False) -> None:
        """Takes the layers of one block, with stacked weights and seeded dropouts; `keeps` as in `stack`."""
        super().__init__()
        self.turns, self.period, self.keeps, self.count = turns, len(layers), keeps, turns * len(layers)
        self.layers = torch.nn.ModuleList(layers)
        self.draws = any(isinstance(part, SeededDropout) for part in self.modules())

    def forward(
        self, hidden: torch.Tensor, calls: list[Call], shared: Mapping[Any, Any]
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Returns the hidden states after all layers, and what they left in the mapping; for `calls` see `_Block`."""
        block = _Block(self, calls, shared)
        inputs = [tensor for named in block.named for tensor in named.values()]
        if self.draws and self.training:
            turns = torch.arange(self.turns, device=hidden.device, dtype=torch.int32)
            inputs.append(mix(_draw(hidden.device) + turns * 0x61C88647))
        if torch.is_grad_enabled():
            hidden, *written = _Scanned.apply(block, hidden, *block.constants, *inputs)
        else:
            state = block.cache.begin() if block.cache else []
            carry, outputs = block.loop(block.forward_alone, [hidden, *block.constants, *state], inputs)
            hidden, written = carry[0], [tensor[0] for tensor in outputs]
            if block.cache:
                block.cache.update_all(carry[1 + len(block.constants) :])
        return hidden, tree_unflatten(written, block.written) if written else {}


def _draw(device: torch.device) -> torch.Tensor:  # from its generator: masks differ between steps and replicas
    return torch.randint(0, 2**31 - 1, (), device=device, dtype=torch.int32)


class _Block:
    """The bodies of the forward and backward loops: functions of a carry (states or gradient, constants) and slices.

    Args:
        run: its layers.
        calls: the arguments of each of its layers, of all turns.
        shared: what earlier layers left in the mapping.

    Attributes:
        named: for each layer of the block, its stacks: weights by name, and its own arguments by place in its call.
        constants: the other tensors that the layers get.
        cache: of generation, whose tensors the carry ends with.
        summed: the places of the constants that need a gradient, which is a sum over the layers.
    """

    def __init__(self, run: Run, calls: list[Call], shared: Mapping[Any, Any]) -> None:
        self.layers, self.keeps, self.turns, self.calls = run.layers, run.keeps, run.turns, calls[: run.period]
        self.cache = self.calls[0].cache
        self.kept: list[int] = []  # number of results that each layer saves, known after a forward pass
        self.written: Any = None  # structure of what the layers leave in the mapping, likewise
        self.writes = 0  # number of tensors in it
        self.named: list[dict[Any, torch.Tensor]] = [tensors_of(layer) for layer in run.layers]
        for offset, first in enumerate(self.calls):
            turns = calls[offset :: run.period]
            assert all(call.key() == first.key() for call in turns), "layers of one run are called alike"
            for place in range(len(first.tensors)):
                each = [call.tensors[place] for call in turns]
                if any(tensor is not each[0] for tensor in each):
                    self.named[offset][place] = torch.stack([_as_number(tensor) for tensor in each])
        left, self.shared_spec = tree_flatten(dict(shared))
        common = [tensor for call, named in zip(self.calls, self.named, strict=True)
                  for place, tensor in enumerate(call.tensors) if place not in named]  # fmt: skip
        constants = list({id(tensor): tensor for tensor in (*common, *left)}.values())
        places = {id(tensor): place for place, tensor in enumerate(constants)}
        self.places = [[places.get(id(tensor), -1) for tensor in call.tensors] for call in self.calls]
        self.shared = [places[id(tensor)] for tensor in left]
        self.constants = [_as_number(tensor) for tensor in constants]
        self.summed = [place for place, tensor in enumerate(constants) if tensor.requires_grad]
        self.names = [list(named) for named in self.named]
        self.trained = [[name for name, tensor in named.items() if tensor.requires_grad] for named in self.named]
        self.seeds = [[name for name, part in layer.named_modules() if isinstance(part, SeededDropout)]
                      for layer in run.layers]  # fmt: skip
        self.cast = [_cast_once(layer) for layer in run.layers]

    def loop(
        self, body: Body, carry: Tensors, inputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor] | None = None
    ) -> tuple[Tensors, Tensors]:
        """Runs `scan` over the layers' tensors, or backward over what the forward loop kept and the layers' tensors.

        On a mesh each turn also gathers the weights of the first products of the next turn, which the carry passes on.
        In their own turn no earlier product would hide their collectives.
        """
        reverse, kept, turns = kept is not None, list(kept or ()), inputs[0].shape[0]
        slices = {name: tensor[0] for name, tensor in self.named[0].items() if isinstance(name, str)}
        alone, looped = len(self.layers) == 1, inputs[0].device.type == "xla" and turns > 1
        groups = partition.gathered_early(slices, alone) if looped else []
        if not groups:
            return scan(body, carry, [*kept, *inputs], reverse=reverse)
        places = [[self.names[0].index(name) for name in names] for names in groups]
        early = [place for group in places for place in group]
        rest = [tensor for place, tensor in enumerate(inputs) if place not in early]
        ends = len(carry), len(carry) + len(groups)

        def gather(parts: Tensors) -> Tensors:
            following = iter(parts)
            return [partition.gather_alike(names[0], [next(following) for _ in names]) for names in groups]

        def turn(state: Tensors, given: Tensors) -> tuple[Tensors, Tensors]:
            now, ready, stacks = state[: ends[0]], state[ends[0] : ends[1]], state[ends[1] :]
            weights = dict(zip(early, (weight for group in ready for weight in group), strict=True))
            others = iter(given[len(kept) : -1])
            own = [weights[place] if place in weights else next(others) for place in range(len(inputs))]
            with self._last_product(now[0]) as before:
                now, outputs = body(now, [*given[: len(kept)], *own])
            following = gather(after(before, [slice_at(stack, given[-1]) for stack in stacks]))
            return [*now, *following, *stacks], outputs

        stacks = [inputs[place] for place in early]
        first = gather([stack[-1 if reverse else 0] for stack in stacks])
        following = (torch.arange(turns, device=carry[0].device) + (-1 if reverse else 1)).clamp(0, turns - 1)
        carry, outputs = scan(turn, [*carry, *first, *stacks], [*kept, *rest, following], reverse=reverse)
        return carry[: ends[0]], outputs

    @contextlib.contextmanager
    def _last_product(self, hidden: torch.Tensor) -> Iterator[Tensors]:
        """Collects the input of the block's last product, unless an MLP in tiles computes it in a loop of its own.

        What is gathered for the next turn depends on it. Otherwise the compiler gathers at the start of the turn, in
        place of what the turn itself needs.
        """
        found: Tensors = []

        def collect(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            if given[0].shape[:-1] == hidden.shape[:-1]:
                found.append(given[0].detach())

        last = layer = self.layers[-1]
        for name, part in layer.named_modules():
            if "lora_" not in name and getattr(part, "out_features", None) == hidden.shape[-1]:
                last = part
        with last.register_forward_pre_hook(collect):
            yield found

    def forward(self, carry: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
        """Returns the states after the block; outputs those before each layer, the saved results, and what is left."""
        hidden, constants, state = carry[0], carry[1 : 1 + len(self.constants)], carry[1 + len(self.constants) :]
        cache = self.cache.turn(state, self.turns) if self.cache else None
        before, kept = [], []
        left: dict[Any, Any] = {}
        for index, tensors in enumerate(self._by_layer(slices)):
            before.append(hidden)
            with activation_checkpointing.recording(self.keeps) as found:
                hidden, written = self._layer(index, hidden, constants, tensors, cache)
            left |= written
            kept.append(found)
        self.kept = [len(found) for found in kept]
        leaves, self.written = tree_flatten(left)
        self.writes = len(leaves)
        state = cache.end() if cache else []
        return [hidden, *constants, *state], [*before, *(tensor for found in kept for tensor in found), *leaves]

    def forward_alone(self, carry: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
        """As `forward`, without the outputs that only a backward pass needs."""
        carry, outputs = self.forward(carry, slices)
        return carry, outputs[len(outputs) - self.writes :]

    def backward(self, carry: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
        """Returns the gradient before the block, and sums for the constants; outputs the gradients of the slices.

        It recomputes each layer after the backward pass of the next layer has ended. Otherwise XLA might recompute all
        layers of the block at once, and take the recomputation of a run of one turn for its forward pass.
        """
        gradient, constants, sums = carry[0], carry[1 : 1 + len(self.constants)], carry[1 + len(self.constants) :]
        count, rest = len(self.layers), iter(slices)
        before, gradients = [next(rest) for _ in self.layers], [[]] * count  # type: ignore[var-annotated]  # lists of tensors
        kept = [[next(rest) for _ in range(number)] for number in self.kept]
        upstream = [next(rest) for _ in range(self.writes)]
        done = [gradient] if self.turns == 1 else []
        for index, tensors in reversed(list(enumerate(self._by_layer(list(rest))))):
            first, *results = after(done, [before[index], *kept[index]])
            with torch.enable_grad(), activation_checkpointing.recording(self.keeps, results):
                hidden = first.detach().requires_grad_()
                trained = {name: self._leaf(index, name, tensors[name]) for name in self.trained[index]}
                shared = {place: constants[place].detach().requires_grad_() for place in self.summed}
                given = [shared.get(place, constant) for place, constant in enumerate(constants)]
                output, written = self._layer(index, hidden, given, {**tensors, **trained})
                gradient, *found = torch.autograd.grad(
                    [output, *tree_flatten(written)[0]], [hidden, *trained.values(), *shared.values()],
                    [gradient, *upstream], allow_unused=True, materialize_grads=True,
                )  # fmt: skip
            gradients[index] = found[: len(trained)]
            sums = [total + part for total, part in zip(sums, found[len(trained) :], strict=True)]
            done = [gradient, *found]
        return [gradient, *constants, *sums], [part for found in gradients for part in found]

    def _leaf(self, index: int, name: str | int, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a leaf of a trained tensor.

        With autocast the gradient of an adapter is computed in bf16. The loop stacks it in bf16, in half the memory,
        and `_Scanned` converts it to fp32 after the loop.
        """
        kind = tensor.device.type
        if name in self.cast[index] and torch.is_autocast_enabled(kind):
            tensor = tensor.to(torch.get_autocast_dtype(kind))
        return tensor.detach().requires_grad_()

    def _by_layer(self, slices: Tensors) -> list[dict[str | int, torch.Tensor]]:
        """Returns the slices by layer and name; the last slice, if there is one more, seeds all dropouts."""
        rest = iter(slices)
        found = [{name: next(rest) for name in names} for names in self.names]
        for seed in rest:
            for tensors, modules in zip(found, self.seeds, strict=True):
                tensors |= {f"{module}.seed": seed for module in modules}
        return found

    def _layer(
        self,
        index: int,
        hidden: torch.Tensor,
        constants: Tensors,
        given: dict[str | int, torch.Tensor],
        cache: LayerCache | None = None,
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Returns the states after a layer, and what it left in the mapping."""
        call, places = self.calls[index], self.places[index]
        arguments = [given[place] if place in given else constants[common] for place, common in enumerate(places)]
        arguments = [tensor.bool() if own.dtype == torch.bool else tensor
                     for tensor, own in zip(arguments, call.tensors, strict=True)]  # fmt: skip
        mapping = None if call.mapping is None else type(call.mapping)()
        if mapping is not None:
            mapping.update(tree_unflatten([constants[place] for place in self.shared], self.shared_spec))
        before = dict(mapping or {})
        kind = hidden.device.type
        product = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        weights = {name: tensor for name, tensor in given.items() if isinstance(name, str)}
        weights, hidden = partition.gather_layer(weights, hidden.shape[-1], product), partition.by_rows(hidden)
        args, kwargs = call.arguments(arguments, mapping, cache)
        output = hidden_states_of(
            torch.func.functional_call(self.layers[index], weights, (hidden, *args), kwargs, tie_weights=False)
        )
        if output.dtype != hidden.dtype or output.shape != hidden.shape:
            raise CannotScanError(f"a layer turns {hidden.dtype} into {output.dtype}")
        written = {key: value for key, value in (mapping or {}).items() if value is not before.get(key)}
        assert not written or self.turns == 1, "a layer that writes into a mapping is no turn of a loop"
        return partition.by_rows(output), written


def _as_number(tensor: torch.Tensor) -> torch.Tensor:
    """Returns booleans, which the carry of a loop cannot have, as bytes."""
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor


def _cast_once(layer: torch.nn.Module) -> set[str]:
    """Returns the adapters' weights whose gradient is of one bf16 product: not of DoRA, nor summed over tiles."""
    sums = [f"{name}." for name, part in layer.named_modules() if is_tiled(part)]
    if any("lora_magnitude" in name for name, _ in layer.named_parameters()):
        return set()
    return {
        f"{name}.weight"
        for name, part in layer.named_modules()
        if type(part) is torch.nn.Linear and "lora_" in name and not name.startswith(tuple(sums))
    }


class _Scanned(torch.autograd.Function):
    """Loops over the blocks of a run, saves the outputs of `_Block.forward`, and loops backward."""

    @staticmethod
    def forward(ctx: Any, block: _Block, hidden: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(block.constants)
        ctx.block, ctx.given, ctx.autocast = block, len(tensors), autocast_now(hidden.device.type)
        carry, outputs = block.loop(block.forward, [hidden, *tensors[:count]], list(tensors[count:]))
        end = len(outputs) - block.writes
        ctx.save_for_backward(*tensors, *outputs[:end])
        ctx.trained = [tensor.requires_grad for tensor in tensors]
        return carry[0], *(tensor[0] for tensor in outputs[end:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor, *left: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        block, saved = ctx.block, ctx.saved_tensors
        count = len(block.constants)
        constants, inputs, kept = saved[:count], saved[count : ctx.given], saved[ctx.given :]
        sums = [torch.zeros_like(constants[place], dtype=torch.float32) for place in block.summed]
        with torch.autocast(**ctx.autocast):
            carry, found = block.loop(
                block.backward, [upstream, *constants, *sums], inputs, [*kept, *(tensor[None] for tensor in left)]
            )
        gradients = iter([*carry[1 + count :], *found])
        turned = (
            next(gradients).to(own.dtype) if own_is_trained else None
            for own, own_is_trained in zip(saved, ctx.trained, strict=False)
        )
        return (None, carry[0], *turned)


def scan_layers(decoder: Any, optim: OptimConfig, device_type: str) -> ScannedLayers | None:
    """Makes a decoder run its layers as loops, on XLA and wherever states between layers are kept.

    Args:
        decoder: see `stack`.
        optim: scan_layers, remat and mlp_tile. scan_layers=off takes no layers for equal; on asks for loops anywhere.
        device_type: of the run.

    Returns:
        The new list of layers; None if the layers stay as they are.

    Raises:
        ValueError: the layers cannot run as a loop.
    """
    if device_type not in ("tpu", "xla-cpu") and optim.scan_layers != "on" and not hasattr(decoder, "kept_after"):
        return None
    keeps = optim.remat == "outputs"
    try:
        return stack(decoder, None if keeps else optim.mlp_tile, keeps, optim.scan_layers == "off")
    except CannotScanError as error:
        raise ValueError(
            f"{type(decoder).__name__} cannot run its layers as a loop, as XLA does: {error}; train it with "
            "launch.device_type=cuda or cpu"
        ) from error


def stack(decoder: Any, tile: int | None = None, keeps: bool = False, apart: bool = False) -> ScannedLayers:
    """Makes a decoder run its layers as loops, in place, and stacks their weights on the host.

    Args:
        decoder: a transformers decoder with the kit's attention and its adapters, before its move to a device; also on
            the meta device.
        tile: tokens of a tile of an MLP; None for all tokens.
        keeps: save the results of products and attention (optim.remat=outputs).
        apart: take no layers for equal: all are runs of one turn.

    Returns:
        The new list of layers.

    Raises:
        CannotScanError: its layers cannot run as a loop; the decoder is unchanged.
    """
    name, layers = layers_of(decoder)
    numbers = [id(tensor) for layer in layers for tensor in layer.parameters()]
    if len(set(numbers)) < len(numbers):
        raise CannotScanError("its layers share weights")
    cuts = getattr(decoder, "kept_after", ())  # a run ends there, so that its states can be kept
    parts = [sum(cut <= place for cut in cuts) for place in range(len(layers))]
    equal, pairs = equal_layers(decoder, name, layers, range(len(layers)) if apart else parts)
    runs, start = [], 0
    for period, turns in architecture.spans(equal):
        ends = range(start, start + period * turns, period)
        runs.append(_run([list(layers[end : end + period]) for end in ends], keeps))
        start += period * turns
    scanned = ScannedLayers(runs, cuts, pairs).train(decoder.training)
    if tile is not None:
        for layer in (layer for run in runs for layer in run.layers):
            mlp = getattr(layer, "mlp", None)
            if mlp is not None and type(mlp).__name__.endswith("MLP") and not hasattr(mlp, "experts"):
                chunk_mlp(mlp, tile)
    setattr(decoder, name, scanned)
    return scanned


def _run(blocks: list[list[torch.nn.Module]], keeps: bool) -> Run:
    """Makes a run of equal blocks; moves the weights of all blocks into the first."""
    for offset, layer in enumerate(blocks[0]):
        _stack_into(layer, [block[offset] for block in blocks[1:]])
    layers = torch.nn.ModuleList(blocks[0])
    dropouts = [(name, one) for name, one in layers.named_modules() if isinstance(one, torch.nn.Dropout) and one.p > 0]
    for site, (name, dropout) in enumerate(dropouts):
        owner, _, leaf = name.rpartition(".")
        setattr(layers.get_submodule(owner), leaf, SeededDropout(dropout.p, site))
    if keeps:
        activation_checkpointing.keep_products(layers)
    return Run(blocks[0], len(blocks), keeps)


def _stack_into(layer: torch.nn.Module, others: list[torch.nn.Module]) -> None:
    """Replaces each tensor of a layer by the stack, (G, ...), of all layers' tensors, and frees those.

    It frees each tensor after its copy, so that the host never has both the stack and all its parts. For a mesh the
    stack is a tensor on "meta" that names its parts: `partition.to_mesh` copies those to the devices' shards.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    for name in list(tensors_of(layer)):
        owner, _, leaf = name.rpartition(".")
        modules = [each.get_submodule(owner) for each in (layer, *others)]
        first = getattr(layer.get_submodule(owner), leaf)
        later = active_mesh().size > 1 and first.device.type == "cpu"
        device = "meta" if later else first.device
        stacked = torch.empty((len(modules), *first.shape), dtype=first.dtype, device=device)
        parts = []
        for place, module in enumerate(modules):
            part = getattr(module, leaf).detach()
            if later:
                parts.append(part)
            else:
                stacked[place] = part
            del part
            setattr(module, leaf, None)
        if trim is not None:
            trim(0)  # glibc does not return pieces below 32 MiB to the system by itself
        if isinstance(first, torch.nn.Parameter):
            stacked = torch.nn.Parameter(stacked, requires_grad=first.requires_grad)
        if later:
            partition.PARTS[stacked] = parts
        setattr(modules[0], leaf, stacked)


def keep_after(decoder: Any, layer: int) -> None:
    """Makes `kept_states` return the states after a layer (from 1 on); call it before the layers become loops."""
    decoder.kept_after = sorted({*getattr(decoder, "kept_after", ()), layer})


def kept_states(decoder: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Takes the states, (B, S, H), that the last forward pass kept after layers (`keep_after`), by layer."""
    layers = layers_of(decoder)[1]
    found: dict[int, torch.Tensor] = getattr(layers, "kept", {})
    if found:
        layers.kept = {}
    return found


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
    """Splits stacks, (G, ...), of the result of `stacked_names` into views under the names that slices have without."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        found |= dict(zip(stacks[name], tensor.unbind(), strict=True)) if name in stacks else {name: tensor}
    return found


def restacked(stacks: Mapping[str, list[str]], named: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Makes the tensor of one of the model's parameters from the result of `unstacked`."""
    return torch.stack([named[one] for one in stacks[name]]) if name in stacks else named[name]
