"""Runs the layers of a decoder as loops over stacked weights, and recomputes layers in the backward pass.

An unrolled program has the operations of all layers: it compiles for minutes, and needs memory for several layers. A
loop has the operations of a single block of layers, forward and backward. Weights are stacked, (G, ...) for G
iterations, on the host before the model moves to its device, because stacking within the step would copy them. Saved
files have no stacks.

`stack` replaces the model's list of layers by `ScannedLayers`; embedding, masks, rotary angles and the final norm keep
the model's own code. When the decoder iterates over its layers, placeholders record the arguments of the calls, and the
last placeholder runs the layers. Blocks of equal layers become loops, equal neighbours in a block become an inner loop,
and all other layers are runs of a single iteration. An argument that all layers share is a constant of the loop; if it
differs between layers, it is stacked. Tensors that a layer leaves in a mapping for later layers (Gemma 4 shares keys
and values) are outputs of its run and constants of later runs.

The forward loop saves the input of every layer. With optim.remat=blocks, an iteration has several layers, and the loop
saves the input of every iteration; the backward pass first recomputes the inputs of the iteration's layers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tpu_kit.config.loader import OptimConfig
from tpu_kit.model.loop import activation_checkpointing, layer_inputs
from tpu_kit.model.loop.activation_checkpointing import autocast_now, cast_once, chunk_mlp, mix, seeds_of, tensors_of
from tpu_kit.model.loop.layer_calls import (
    Call,
    CannotScanError,
    Inputs,
    Placeholders,
    as_number,
    decoder_layers,
    equal_layers,
    hidden_states_of,
    kept_after,
)
from tpu_kit.model.loop.layer_inputs import LayerCache
from tpu_kit.model.loop.loop_structure import Loop, check_blocks, in_blocks, loops, stacks
from tpu_kit.model.sharding import partition
from tpu_kit.xla.scan import PROGRAM_DEVICES, Tensors, Tree, after, scan, slice_at


class ScannedLayers(Placeholders):
    """Replaces a decoder's list of layers; see `stack`. `str` describes its loops.

    Attributes:
        kept_after: numbers of layers, counted from 1, at the ends of runs.
        kept: states after these layers in the last forward pass outside of generation, until `kept_states` takes them.
    """

    def __init__(
        self,
        layers: torch.nn.ModuleList,
        runs: list[Run],
        loops: Sequence[Loop],
        kept_after: Sequence[int],
        pairs: bool,
    ) -> None:
        super().__init__(layers, pairs)
        self._places = {f"{path}.": [f"{layer}." for layer in held] for path, held in stacks(loops)}
        self.kept_after = tuple(kept_after)
        self.kept: dict[int, torch.Tensor] = {}
        self.runs, self.in_order = torch.nn.ModuleList(runs), runs

    def __str__(self) -> str:
        loops = [f"{run.turns} x {run.text}" for run in self.in_order if run.turns > 1]
        single = sum(run.turns == 1 for run in self.in_order)
        parts = [f"{' and '.join(loops)} in {'loops' if len(loops) > 1 else 'a loop'}"] if loops else []
        return ", ".join(parts + ([f"{single} one by one"] if single else []))

    def _visit(self, hidden: torch.Tensor, calls: list[Call]) -> torch.Tensor:
        """Runs all layers in the call of the last layer; other calls return `hidden`."""
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
        """Returns prefix of a stack's names -> prefixes of its layers' names: {"runs.0.layers.0.": ["0.", "1."]}."""
        return self._places

    def parts(self) -> dict[str, list[torch.Tensor]]:
        """Returns {name of a stacked tensor in this list: its layers' CPU tensors, in order}; {} without a mesh."""
        return {
            f"runs.{number}.layers.{stack}.{name}": held
            for number, run in enumerate(self.in_order)
            for stack, named in enumerate(run.parts)
            for name, held in named.items()
        }


class Run(torch.nn.Module):
    """A block of `period` layers that repeats `turns` times; equal neighbours in the block share a stack of weights.

    Attributes:
        layers: a layer per stack, with weights (turns x equal neighbours, ...).
        offsets: per stack, the indices of its layers in the block.
        turns: number of iterations.
        period: number of layers of a block.
        count: number of layers, turns x period.
        keeps: whether the results of products and attention are saved (optim.remat=outputs).
        parts: per stack, the CPU tensors from which `to_mesh` makes it, by name.
        sparse: whether only the input of an iteration is saved, instead of the inputs of all layers.
    """

    def __init__(
        self, layers: torch.nn.ModuleList, neighbours: Sequence[int], turns: int, keeps: bool = False,
        parts: Sequence[Mapping[str, list[torch.Tensor]]] = (), sparse: bool = False,
    ) -> None:  # fmt: skip
        """Takes layers with stacked weights and seeded dropouts, and the numbers of neighbours in their stacks."""
        super().__init__()
        ends = list(itertools.accumulate(neighbours))
        self.offsets = [range(end - count, end) for count, end in zip(neighbours, ends, strict=True)]
        self.turns, self.period, self.keeps, self.count = turns, ends[-1], keeps, turns * ends[-1]
        self.text = f"({' + '.join(map(str, neighbours))})" if self.period > len(layers) else str(self.period)
        self.layers, self.parts, self.sparse = layers, parts, sparse

    def forward(
        self, hidden: torch.Tensor, calls: list[Call], shared: Mapping[Any, Any]
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Returns the states (B, S, H) after all layers, and {key: tensor} left in the mapping. Updates a cache.

        `hidden` has the states before the layers. `calls` has the arguments of all `count` layers, in order, and the
        cache. `shared` has the tensors, by key, that earlier runs left in the mapping.
        """
        block = _Block(self, calls, shared)
        if torch.is_grad_enabled():
            tensors, block.given = tree_flatten((block.constants, block.named))
            hidden, *leaves = _Scanned.apply(block, hidden, *tensors)
            return hidden, tree_unflatten(leaves, block.written)
        state = block.cache.begin() if block.cache else []
        (hidden, _, state), left = block.loop(block.forward_alone, (hidden, block.constants, state), block.named)
        if block.cache:
            block.cache.update_all(state)
        return hidden, tree_map(lambda stack: stack[0], left)


_SEED = -1  # key of the seeds of a layer's dropouts, beside the indices of arguments


def _draw(device: torch.device) -> torch.Tensor:  # by the device's generator, so steps and replicas differ
    """Draws a seed, () int32."""
    return torch.randint(0, 2**31 - 1, (), device=device, dtype=torch.int32)


class _Block:
    """The bodies of the forward and backward loops: functions of a carry and slices.

    The forward carry has the hidden states, the constants, and the tensors of the cache. The backward carry has the
    gradient of the hidden states, the constants, and the summed gradients of constants.

    Args:
        run: the run of layers.
        calls: the arguments of the run's layers in all iterations.
        shared: tensors that earlier layers left in the mapping.

    Attributes:
        named: per stack, its tensors: weights by name, and stacked arguments by index in the call.
        constants: all other tensors that the layers get.
        cache: cache of generation, or None.
        summed: indices of constants that need a gradient, which is summed over the layers.
        given: structure of (constants, named).
        written: structure of the tensors that layers leave in the mapping, known after a forward pass.
    """

    def __init__(self, run: Run, calls: list[Call], shared: Mapping[Any, Any]) -> None:
        self.layers, self.keeps, self.turns, self.cache = run.layers, run.keeps, run.turns, calls[0].cache
        self.sparse = run.sparse
        self.parts = range(len(run.layers))  # the layers of this loop
        self.count = [len(offsets) for offsets in run.offsets]  # per stack: equal neighbours in a block
        self.stacked = [run.turns * count for count in self.count]  # per stack: layers
        self.given: Any = None
        self.written: Any = None
        self.named: list[dict[Any, torch.Tensor]] = [tensors_of(layer) for layer in run.layers]
        self.seeds = [seeds_of(layer) for layer in run.layers]
        self.calls = [calls[offsets[0]] for offsets in run.offsets]
        drawn = _draw(next(run.parameters()).device) if run.training and any(self.seeds) else None
        for named, first, offsets, seeds in zip(self.named, self.calls, run.offsets, self.seeds, strict=True):
            turns = [calls[turn + offset] for turn in range(0, run.count, run.period) for offset in offsets]
            assert all(call.key() == first.key() for call in turns), "equal layers have equal calls"
            for place in range(len(first.tensors)):
                each = [call.tensors[place] for call in turns]
                if any(tensor is not each[0] for tensor in each):
                    named[place] = torch.stack([as_number(tensor) for tensor in each])
            if drawn is not None and seeds:
                every = torch.arange(len(turns), device=drawn.device, dtype=torch.int32)
                named[_SEED] = mix(drawn + every * 0x61C88647)
        left, self.shared_spec = tree_flatten(dict(shared))
        common = [tensor for call, named in zip(self.calls, self.named, strict=True)
                  for place, tensor in enumerate(call.tensors) if place not in named]  # fmt: skip
        constants = list({id(tensor): tensor for tensor in (*common, *left)}.values())
        places = {id(tensor): place for place, tensor in enumerate(constants)}
        self.places = [[places.get(id(tensor), -1) for tensor in call.tensors] for call in self.calls]
        self.shared = [places[id(tensor)] for tensor in left]
        self.constants = [as_number(tensor) for tensor in constants]
        self.summed = [place for place, tensor in enumerate(constants) if tensor.requires_grad]
        self.trained = [[name for name, tensor in named.items() if tensor.requires_grad] for named in self.named]
        self.cast = [cast_once(layer) for layer in run.layers]

    def loop(
        self, body: Callable[..., tuple[Tree, Tree]], carry: Tree, named: list[dict[Any, torch.Tensor]],
        saved: Tree = (), first: torch.Tensor | None = None,
    ) -> tuple[Tree, Tree]:  # fmt: skip
        """Runs `scan` over stacks, or backward over stacks and outputs of the forward loop; returns carry, outputs.

        On a mesh, an iteration also gathers the weights of the next iteration's first products and passes them on in
        the carry. In their own iteration, no earlier product would hide their collectives.

        Args:
            body: body of an iteration, such as `forward` or `backward`.
            carry: initial carry.
            named: per layer, its stacks.
            saved: for a backward loop, the outputs of the forward loop.
            first: for an inner loop, its first index in the stacks.
        """
        reverse, inner, groups = bool(saved), first is not None, self._gathered_early(named[0])
        nested = [inner or self.count[part] > 1 for part in self.parts]
        if not (groups or any(nested) or self.cache):
            return scan(body, carry, (*saved, named), reverse=reverse)
        if saved and not inner and not self.sparse:  # an inner loop returns stacks of stacks
            flat = [[tree_map(lambda stack: stack.flatten(0, 1), one) if loop else one
                     for one, loop in zip(each, nested, strict=True)] for each in saved[:2]]  # fmt: skip
            saved = (*flat, saved[2])
        stacks, structure = tree_flatten((*saved, named))
        places_of = {id(stack): place for place, stack in enumerate(stacks)}
        early = [places_of[id(named[0][name])] for group in groups for name in group]
        # The carry holds entire stacks if inner loops read them, or if an iteration gathers slices for the next.
        stacked = named if self.sparse else zip(*saved[:2], named, strict=True)
        whole = [each for each, loop in zip(stacked, nested, strict=True) if loop]
        held = sorted({*early, *(places_of[id(stack)] for stack in tree_leaves(whole))})
        last = self.layers[self.parts[-1]] if self.count[self.parts[-1]] == 1 else None  # None: an inner loop

        def gather(passed: Tensors, place: torch.Tensor, before: Tensors) -> list[torch.Tensor]:
            found = dict(zip(held, passed, strict=True))
            parts = iter(after(before, [slice_at(found[one], place) for one in early]))
            return [partition.gather_alike(group[0], [next(parts) for _ in group]) for group in groups]

        def turn(state: Tree, given: Tree) -> tuple[Tree, Tree]:
            (now, ready, passed), (others, place, following) = state, given
            rest = iter(others)
            own = {one: slice_at(stack, place) if inner else stack for one, stack in zip(held, passed, strict=True)}
            own |= dict(zip(early, (weight for group in ready for weight in group), strict=True))
            slices = [own[one] if one in own else next(rest) for one in range(len(stacks))]
            with partition.last_product(last, now[0]) as before:
                now, outputs = body(now, tree_unflatten(slices, structure), place)
            return (now, gather(passed, following, before) if groups else [], passed), outputs

        places = torch.arange(self.turns, device=carry[0].device)
        following = (places + (-1 if reverse else 1)).clamp(0, self.turns - 1)
        if first is not None:
            places, following = places + first, following + first
        passed = [stacks[one] for one in held]
        scanned = [stack for one, stack in enumerate(stacks) if one not in held]
        ready = gather(passed, places[-1 if reverse else 0], []) if groups else []
        (carry, _, _), outputs = scan(turn, (carry, ready, passed), (scanned, places, following), reverse=reverse)
        return carry, outputs

    def _gathered_early(self, stacks: dict[Any, torch.Tensor]) -> list[list[str]]:
        """Returns groups of the first layer's weights to gather an iteration early; empty before an inner loop."""
        if self.turns == 1 or self.count[self.parts[0]] > 1 or next(iter(stacks.values())).device.type != "xla":
            return []
        slices = {name: stack[0] for name, stack in stacks.items() if isinstance(name, str)}
        return partition.gathered_early(slices, alone=len(self.parts) == 1)

    def _neighbours(self, part: int) -> _Block:
        """Returns the inner loop over the equal neighbours in a stack."""
        block = copy.copy(self)
        block.parts, block.turns, block.count = range(part, part + 1), self.count[part], [1] * len(self.count)
        return block

    def forward(
        self, carry: Tree, slices: Tree, place: torch.Tensor | None = None, *, alone: bool = False
    ) -> tuple[Tree, Tree]:
        """Returns the carry after the block, and (states before layers, their saved results, tensors in the mapping).

        The only item of `slices` is the slices of `named`. `place` is the iteration's index, which inner loops and a
        cache need. With `alone`, inner loops have no outputs.
        """
        (hidden, constants, state), (named,) = carry, slices
        before, results = [], []
        left: dict[Any, Any] = {}
        for part, tensors in zip(self.parts, named, strict=True):
            if self.count[part] > 1:
                assert place is not None, "a loop with inner loops has an index"
                block = self._neighbours(part)
                (hidden, _, state), outputs = block.loop(
                    block.forward_alone if alone else block.forward, (hidden, constants, state), [tensors],
                    first=place * self.count[part],
                )  # fmt: skip
                (first,), (found,), _ = outputs if not alone else ([hidden], [[]], {})
                before.append(first)
            else:
                before.append(hidden)
                cache = self.cache.of_layer(state, place, self.stacked[part]) if self.cache else None
                with activation_checkpointing.recording(self.keeps) as found:
                    hidden, written = self._layer(part, hidden, constants, tensors, cache)
                state = cache.end() if cache else []
                left |= written
            results.append(found)
        return (hidden, constants, state), (before, results, left)

    def forward_alone(self, carry: Tree, slices: Tree, place: torch.Tensor | None = None) -> tuple[Tree, Tree]:
        """Like `forward`, but the only output is the tensors left in the mapping."""
        carry, (_, _, left) = self.forward(carry, slices, place, alone=True)
        return carry, left

    def forward_sparse(self, carry: Tree, slices: Tree, place: torch.Tensor | None = None) -> tuple[Tree, Tree]:
        """Like `forward`, but outputs only the states before the block, and the tensors left in the mapping."""
        hidden = carry[0]
        carry, left = self.forward_alone(carry, slices, place)
        return carry, (hidden, left)

    def backward_sparse(self, carry: Tree, slices: Tree, place: torch.Tensor | None = None) -> tuple[Tree, Tree]:
        """Like `backward`, from the output of `forward_sparse`; recomputes all layers but the last a second time.

        `slices`: states before the block, gradients of the tensors left in the mapping, and the layers' tensors.
        """
        (hidden, left, named), constants = slices, carry[1]
        before: list[torch.Tensor] = []
        for part, tensors in zip(self.parts, named, strict=True):
            last = part == self.parts[-1]
            if self.count[part] > 1:
                assert place is not None, "a loop with inner loops has an index"
                block = self._neighbours(part)
                block.turns -= last
                (hidden, _, _), ((first,), _, _) = block.loop(
                    block.forward, (hidden, constants, []), [tensors], first=place * self.count[part]
                )
                before.append(torch.cat([first, hidden[None]]) if last else first)
            else:
                before.append(hidden)
                if not last:
                    hidden, _ = self._layer(part, hidden, constants, tensors)
        return self.backward(carry, (before, [[] for _ in self.parts], left, named), place)

    def backward(self, carry: Tree, slices: Tree, place: torch.Tensor | None = None) -> tuple[Tree, Tree]:
        """Returns the carry with the gradient before the block and sums for constants, and name -> gradient per layer.

        `slices`: states before layers, their saved results, gradients of the tensors left in the mapping, and the
        layers' tensors. `place`: see `forward`. A layer is recomputed after the backward pass of the next layer.
        Otherwise, XLA might recompute all layers of the block at once, and merge the recomputation of a run of a single
        iteration with its forward pass.
        """
        before, results, left, named = slices
        gradients: list[dict[Any, torch.Tensor]] = []
        done = [carry[0]] if self.turns == 1 else []
        for part, hidden, kept, tensors in reversed(list(zip(self.parts, before, results, named, strict=True))):
            if self.count[part] > 1:
                assert place is not None, "a loop with inner loops has an index"
                block = self._neighbours(part)
                carry, (found,) = block.loop(
                    block.backward, carry, [tensors], ([hidden], [kept], {}), place * self.count[part]
                )
            else:
                hidden, *kept = after(done, [hidden, *kept])
                carry, found = self._layer_backward(part, carry, tree_leaves(left), hidden, kept, tensors)
            gradients.insert(0, found)
            done = [carry[0], *found.values()]
        return carry, gradients

    def _layer_backward(
        self, part: int, carry: Tree, upstream: Tensors, hidden: torch.Tensor, results: Tensors,
        tensors: dict[str | int, torch.Tensor],
    ) -> tuple[Tree, dict[Any, torch.Tensor]]:  # fmt: skip
        """Like `backward` for the layer of stack `part`, from its input `hidden`, its saved results and its tensors.

        `upstream`: gradients of the tensors that it leaves in the mapping. Returns the carry, and name -> gradient.
        """
        gradient, constants, sums = carry
        with torch.enable_grad(), activation_checkpointing.recording(self.keeps, results):
            hidden = hidden.detach().requires_grad_()
            trained = {name: self._leaf(part, name, tensors[name]) for name in self.trained[part]}
            shared = {place: constants[place].detach().requires_grad_() for place in self.summed}
            given = [shared.get(place, constant) for place, constant in enumerate(constants)]
            output, written = self._layer(part, hidden, given, {**tensors, **trained})
            gradient, *found = torch.autograd.grad(
                [output, *tree_leaves(written)], [hidden, *trained.values(), *shared.values()],
                [gradient, *upstream], allow_unused=True, materialize_grads=True,
            )  # fmt: skip
        sums = [total + one for total, one in zip(sums, found[len(trained) :], strict=True)]
        return (gradient, constants, sums), dict(zip(trained, found, strict=False))

    def _leaf(self, index: int, name: str | int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an autograd leaf of a trained tensor; with autocast, the weights of `cast_once` in its dtype.

        The gradient of such a weight is computed in bf16. The loop stacks it in bf16, in half the memory; `_Scanned`
        converts it to fp32 after the loop.
        """
        kind = tensor.device.type
        if name in self.cast[index] and torch.is_autocast_enabled(kind):
            tensor = tensor.to(torch.get_autocast_dtype(kind))
        return tensor.detach().requires_grad_()

    def _layer(
        self,
        index: int,
        hidden: torch.Tensor,
        constants: Tensors,
        given: dict[str | int, torch.Tensor],
        cache: LayerCache | None = None,
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Returns the states after the layer of stack `index`, and the tensors that it wrote into the mapping, by key.

        `given`: the layer's slice of `named`. Raises CannotScanError if it changes the dtype or shape of the states.
        """
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
        weights |= {name: given[_SEED] for name in self.seeds[index] if _SEED in given}
        weights, hidden = partition.gather_layer(weights, hidden.shape[-1], product), partition.by_rows(hidden)
        args, kwargs, inputs = call.arguments(arguments, mapping, cache)
        with layer_inputs.bound(inputs):
            output = hidden_states_of(
                torch.func.functional_call(self.layers[index], weights, (hidden, *args), kwargs, tie_weights=False)
            )
        if output.dtype != hidden.dtype or output.shape != hidden.shape:
            raise CannotScanError(f"a layer turns {hidden.dtype} into {output.dtype}, or changes the shape")
        written = {key: value for key, value in (mapping or {}).items() if value is not before.get(key)}
        assert not written or self.turns == 1, "a layer that writes into a mapping cannot be in a loop"
        return partition.by_rows(output), written


class _Scanned(torch.autograd.Function):
    """Loops over the blocks of a run, saves the outputs of `_Block.forward`, and loops backward."""

    @staticmethod
    def forward(ctx: Any, block: _Block, hidden: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        constants, named = tree_unflatten(tensors, block.given)
        ctx.block, ctx.autocast = block, autocast_now(hidden.device.type)
        body = block.forward_sparse if block.sparse else block.forward
        carry, (*saved, left) = block.loop(body, (hidden, constants, []), named)
        leaves, ctx.structure = tree_flatten((constants, named, saved))
        ctx.save_for_backward(*leaves)
        written, block.written = tree_flatten(left)
        return carry[0], *(stack[0] for stack in written)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor, *left: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        block, tensors = ctx.block, ctx.saved_tensors
        constants, named, saved = tree_unflatten(tensors, ctx.structure)
        sums = [torch.zeros_like(constants[place], dtype=torch.float32) for place in block.summed]
        stacks = tree_unflatten([tensor[None] for tensor in left], block.written)
        with torch.autocast(**ctx.autocast):
            body = block.backward_sparse if block.sparse else block.backward
            (gradient, _, sums), found = block.loop(body, (upstream, constants, sums), named, (*saved, stacks))
        summed = dict(zip(block.summed, sums, strict=True))
        turned = [summed.get(place) for place in range(len(constants))]
        turned += [gradients.get(name) for own, gradients in zip(named, found, strict=True) for name in own]
        pairs = zip(turned, tensors, strict=False)
        return None, gradient, *(None if one is None else one.reshape(own.shape).to(own.dtype) for one, own in pairs)


def scan_layers(
    decoder: Any, optim: OptimConfig, device_type: str, inputs: Inputs | None = None
) -> ScannedLayers | None:
    """Makes a decoder run its layers as loops, in place, if the device or the settings need loops.

    Loops are made on XLA unless remat=none, and on all devices with remat=blocks, with scan_layers=on, or after
    `keep_after`.

    Args:
        decoder: see `stack`.
        optim: gives scan_layers, remat and mlp_tile (ignored with remat=outputs). scan_layers=off treats all layers as
            different, in loops of a single iteration. A loop recomputes, even with remat=none.
        device_type: "tpu", "torch-tpu" and "xla-cpu" run on XLA, other types do not.
        inputs: arguments of an encoder; None for a decoder.

    Returns:
        The new list of layers; None if the layers do not change.

    Raises:
        ValueError: the layers cannot run as a loop, or from `check_blocks`.
    """
    looped = device_type in PROGRAM_DEVICES and optim.remat != "none"
    keeps, blocks = optim.remat == "outputs", optim.remat == "blocks"
    if not (looped or blocks) and optim.scan_layers != "on" and not kept_after(decoder):
        return None
    try:
        return stack(decoder, None if keeps else optim.mlp_tile, keeps, optim.scan_layers == "off", inputs, blocks)
    except CannotScanError as error:
        raise ValueError(
            f"{type(decoder).__name__} cannot run its layers as a loop, which XLA needs: {error}; train it with "
            "launch.device_type=cuda or cpu"
        ) from error


def stack(
    decoder: Any, tile: int | None = None, keeps: bool = False, apart: bool = False, inputs: Inputs | None = None,
    blocks: bool = False,
) -> ScannedLayers:  # fmt: skip
    """Makes a decoder run its layers as loops, in place, and stacks weights on the host (on a mesh, `to_mesh` does).

    Args:
        decoder: a transformers decoder with the kit's attention and adapters, before its move to a device; may be on
            the meta device.
        tile: tokens of a tile of an MLP (a layer's `mlp` without experts), per device; None for all tokens.
        keeps: save the results of products and attention (optim.remat=outputs).
        apart: treat all layers as different, so that every run has a single iteration.
        inputs: arguments of an encoder; None for a decoder.
        blocks: save only the inputs of blocks of layers (optim.remat=blocks).

    Returns:
        The new list of layers.

    Raises:
        CannotScanError: layers share weights, or from `decoder_layers` or `equal_layers`; the decoder is unchanged.
        ValueError: from `check_blocks`.
    """
    name, layers = decoder_layers(decoder)
    numbers = [id(tensor) for layer in layers for tensor in layer.parameters()]
    if len(set(numbers)) < len(numbers):
        raise CannotScanError("its layers share weights")
    cuts = kept_after(decoder)  # a run ends there, so that its states can be kept
    parts = [sum(cut <= place for cut in cuts) for place in range(len(layers))]
    equal, pairs = equal_layers(decoder, name, layers, range(len(layers)) if apart else parts, inputs)
    found = loops(equal)
    if blocks:
        check_blocks(found)
        found = in_blocks(found)
    runs = [_run(list(layers[one.start : one.start + one.period * one.turns]), one, keeps, blocks) for one in found]
    scanned = ScannedLayers(layers, runs, found, cuts, pairs).train(decoder.training)
    if tile is not None:
        for layer in (layer for run in runs for layer in run.layers):
            mlp = getattr(layer, "mlp", None)
            if mlp is not None and type(mlp).__name__.endswith("MLP") and not hasattr(mlp, "experts"):
                chunk_mlp(mlp, tile)
    setattr(decoder, name, scanned)
    return scanned


def _run(layers: list[torch.nn.Module], loop: Loop, keeps: bool, sparse: bool) -> Run:
    """Makes a run of the loop's `layers`; stacks the weights of equal layers in the first; for the flags see `Run`."""
    _, turns, neighbours = loop
    blocks = [layers[start : start + len(layers) // turns] for start in range(0, len(layers), len(layers) // turns)]
    ends = itertools.accumulate(neighbours)
    alike = [[layer for block in blocks for layer in block[end - count : end]]
             for count, end in zip(neighbours, ends, strict=True)]  # fmt: skip
    parts = [partition.stack_layers(first, others, list(tensors_of(first))) for first, *others in alike]
    firsts = torch.nn.ModuleList(first for first, *_ in alike)
    activation_checkpointing.seed_dropouts(firsts)
    if keeps:
        activation_checkpointing.keep_products(firsts)
    return Run(firsts, neighbours, turns, keeps, parts, sparse and loop.period > 1)
