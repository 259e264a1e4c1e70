"""Runs the layers of a decoder as loops over stacked weights, and recomputes each layer in the backward pass.

An unrolled program has the operations of all layers: it compiles for minutes, and needs memory for several layers. A
loop has the operations of one layer, forward and backward. The weights are stacked, (G, ...) for G iterations, on the
host before the model moves to its device, because stacking within the step would copy them. Saved files have no stacks.

`stack` replaces the model's list of layers by `ScannedLayers`; embedding, masks, rotary angles and the final norm stay
the model's own code. When the decoder iterates over its layers, placeholders record the arguments of each call, and the
last one runs the loops. This works for families whose decoder computes nothing between layers and whose layers repeat
in blocks of one (Llama, Qwen, Mistral, Phi) or several (Gemma 2: a local and a global layer; Gemma 3: five local layers
and a global one).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_kit.config.loader import OptimConfig
from tpu_kit.distributed.mesh import active_mesh
from tpu_kit.models import activation_checkpointing, architecture, attention, partition, sharding_rules
from tpu_kit.models.activation_checkpointing import SeededDropout, autocast_now, chunk_mlp, is_tiled, mix
from tpu_kit.xla.scan import Body, Tensors, after, scan, slice_at


def tensors_of(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by name, without the seeds of dropout."""
    seeds = {f"{name}.seed" for name, part in layer.named_modules() if isinstance(part, SeededDropout)}
    found: dict[str, torch.Tensor] = dict(layer.named_parameters())
    return found | {name: tensor for name, tensor in layer.named_buffers() if name not in seeds}


class CannotScanError(ValueError):
    """The layers of a model cannot run as a loop; the text says why."""


@dataclass(frozen=True)
class Call:
    """The arguments with which a decoder calls a layer, without the hidden states."""

    tensors: Tensors
    others: tuple[Any, ...]  # the other arguments, with None in place of tensors
    is_tensor: tuple[bool, ...]
    spec: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Separates tensors from other arguments."""
        leaves, spec = tree_flatten((args, kwargs))
        others = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        is_tensor = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        return cls([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], others, is_tensor, spec)

    def key(self) -> Any:
        """Returns a key that is equal for calls with the same tensors and equal other arguments."""
        return [id(tensor) for tensor in self.tensors], self.others, self.spec

    def with_tensors(self, tensors: Tensors) -> Any:
        """Returns the arguments (args, kwargs) with other tensors."""
        rest = iter(tensors)
        return tree_unflatten(
            [next(rest) if here else other for other, here in zip(self.others, self.is_tensor, strict=True)], self.spec
        )


class ScannedLayers(torch.nn.Module):
    """Replaces a decoder's list of layers; see `stack`.

    Attributes:
        kept_after: numbers of layers, from 1 on, each the last of a run.
        kept: the states after them, of the last forward pass, until `causal_lm.kept_states` takes them.
    """

    def __init__(self, runs: list[Run], kept_after: Sequence[int] = ()) -> None:
        super().__init__()
        self.kept_after = tuple(kept_after)
        self.kept: dict[int, torch.Tensor] = {}
        self.runs, self.in_order = torch.nn.ModuleList(runs), runs
        self.count = sum(run.count for run in runs)
        self.unrolled = False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: slice) -> list[Callable[..., torch.Tensor]]:
        assert isinstance(index, slice) and range(self.count)[index] == range(self.count), (
            f"layers {index} of {self.count}: they run all or none"
        )
        return list(self)

    def __iter__(self) -> Iterator[Callable[..., torch.Tensor]]:
        """Iterates over placeholders that record their calls; the last one runs the layers. See also `unrolled`."""
        if self.unrolled:
            return iter([partial(self._run_one, run, place) for run in self.in_order for place in range(run.count)])
        calls: list[Call] = []
        first: list[torch.Tensor] = []

        def visit(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            first.append(hidden)
            if hidden is not first[0]:
                raise CannotScanError("its decoder changes the hidden states between two layers")
            calls.append(Call.of(args, kwargs))
            return hidden if len(calls) < self.count else self._run(hidden, calls)

        return iter([visit] * self.count)

    def _run(self, hidden: torch.Tensor, calls: list[Call]) -> torch.Tensor:
        start = 0
        for run in self.in_order:
            hidden = run(hidden, calls[start : start + run.count])
            start += run.count
            if start in self.kept_after:
                self.kept[start] = hidden
        return hidden

    def _run_one(self, run: Run, place: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs layer `place` of a run with its slices of the stacks."""
        turn, offset = divmod(place, run.period)
        layer = run.layers[offset]
        number = sum(one.count for one in self.in_order[: self.in_order.index(run)]) + place
        for part in layer.modules():
            if hasattr(part, "layer_idx"):  # by which the key/value cache knows the layer
                part.layer_idx = number  # type: ignore[assignment]  # of transformers
        tensors = {name: tensor[turn] for name, tensor in tensors_of(layer).items()}
        return torch.func.functional_call(layer, tensors, (hidden, *args), kwargs, tie_weights=False)

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

    def forward(self, hidden: torch.Tensor, calls: list[Call]) -> torch.Tensor:
        """Returns the hidden states after all layers; `calls` has the arguments of each."""
        for index, call in enumerate(calls):
            assert call.key() == calls[index % self.period].key(), "layers of one run are called alike"
        calls = calls[: self.period]
        constants = list({id(tensor): tensor for call in calls for tensor in call.tensors}.values())
        block = _Block(self.layers, calls, constants, self.keeps)
        constants = [tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor for tensor in constants]
        inputs = [tensor for layer in self.layers for tensor in tensors_of(layer).values()]
        if self.draws and self.training:
            turns = torch.arange(self.turns, device=hidden.device, dtype=torch.int32)
            inputs.append(mix(_draw(hidden.device) + turns * 0x61C88647))
        if torch.is_grad_enabled():
            output: torch.Tensor = _Scanned.apply(block, len(constants), hidden, *constants, *inputs)
            return output
        carry, _ = block.loop(lambda carry, slices: (block.forward(carry, slices)[0], []), [hidden, *constants], inputs)
        return carry[0]


@contextlib.contextmanager
def unrolled(model: torch.nn.Module) -> Iterator[None]:
    """Lets the layers of a model run one after the other, without a loop, while it is open.

    Generation needs it: each layer has keys and values of its own. The slices of the stacks may be copied.
    """
    stacks = [part for part in model.modules() if isinstance(part, ScannedLayers)]
    for part in stacks:
        part.unrolled = True
    try:
        yield
    finally:
        for part in stacks:
            part.unrolled = False


def _draw(device: torch.device) -> torch.Tensor:
    """Draws a number from the device's generator, so that masks differ between steps and between replicas."""
    return torch.randint(0, 2**31 - 1, (), device=device, dtype=torch.int32)


class _Block:
    """The bodies of the forward and backward loops: functions of a carry (states or gradient, constants) and slices."""

    def __init__(self, layers: torch.nn.ModuleList, calls: list[Call], constants: Tensors, keeps: bool) -> None:
        places = {id(tensor): place for place, tensor in enumerate(constants)}
        self.layers, self.calls, self.keeps = layers, calls, keeps
        self.kept: list[int] = []  # number of results that each layer saves, known after a forward pass
        self.places = [[places[id(tensor)] for tensor in call.tensors] for call in calls]
        self.names = [list(tensors_of(layer)) for layer in layers]
        self.trained = [[n for n, tensor in tensors_of(layer).items() if tensor.requires_grad] for layer in layers]
        self.seeds = [[name for name, part in layer.named_modules() if isinstance(part, SeededDropout)]
                      for layer in layers]  # fmt: skip
        self.cast = [_cast_once(layer) for layer in layers]

    def loop(
        self, body: Body, carry: Tensors, inputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor] | None = None
    ) -> tuple[Tensors, Tensors]:
        """Runs `scan` over the layers' tensors, or backward over what the forward loop kept and the layers' tensors.

        On a mesh each turn also gathers the weights of the first products of the next turn, which the carry passes on.
        In their own turn no earlier product would hide their collectives.
        """
        reverse, kept, turns = kept is not None, list(kept or ()), inputs[0].shape[0]
        slices = {name: tensor[0] for name, tensor in zip(self.names[0], inputs, strict=False)}
        groups = partition.gathered_early(slices) if inputs[0].device.type == "xla" and turns > 1 else []
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

        layer = self.layers[-1]
        products = [part for name, part in layer.named_modules() if name.rpartition(".")[2] in sharding_rules.ROW]
        with (products or [layer])[-1].register_forward_pre_hook(collect):
            yield found

    def forward(self, carry: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
        """Returns the hidden states after the block; outputs those before each layer, and the saved results."""
        hidden, before, kept = carry[0], [], []
        for index, tensors in enumerate(self._by_layer(slices)):
            before.append(hidden)
            with activation_checkpointing.recording(self.keeps) as found:
                hidden = self._layer(index, hidden, carry[1:], tensors)
            kept.append(found)
        self.kept = [len(found) for found in kept]
        return [hidden, *carry[1:]], [*before, *(tensor for found in kept for tensor in found)]

    def backward(self, carry: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
        """Returns the gradient before the block; outputs those of the trained tensors.

        It recomputes each layer after the backward pass of the next layer has ended. Otherwise XLA might recompute all
        layers of the block at once.
        """
        gradient, count, rest = carry[0], len(self.layers), iter(slices)
        before, gradients = [next(rest) for _ in self.layers], [[]] * count  # type: ignore[var-annotated]  # lists of tensors
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
        """Makes a leaf of a trained tensor.

        With autocast the gradient of an adapter is computed in bf16. The loop stacks it in bf16, in half the memory,
        and `_Scanned` converts it to fp32 after the loop.
        """
        kind = tensor.device.type
        if name in self.cast[index] and torch.is_autocast_enabled(kind):
            tensor = tensor.to(torch.get_autocast_dtype(kind))
        return tensor.detach().requires_grad_()

    def _by_layer(self, slices: Tensors) -> list[dict[str, torch.Tensor]]:
        """Returns the slices by layer and name; the last slice, if there is one more, seeds all dropouts."""
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
        given = [tensor.bool() if own.dtype == torch.bool else tensor  # a carry has no booleans
                 for tensor, own in zip(given, self.calls[index].tensors, strict=True)]  # fmt: skip
        kind = hidden.device.type
        product = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        tensors, hidden = partition.gather_layer(tensors, product), partition.by_rows(hidden)
        args, kwargs = self.calls[index].with_tensors(given)
        with activation_checkpointing.refusing_writes([*args, *kwargs.values()]):
            output = torch.func.functional_call(self.layers[index], tensors, (hidden, *args), kwargs, tie_weights=False)
        if not isinstance(output, torch.Tensor):
            raise CannotScanError("its layers return more than the hidden states")
        if output.dtype != hidden.dtype or output.shape != hidden.shape:
            raise CannotScanError(f"a layer turns {hidden.dtype} into {output.dtype}")
        return partition.by_rows(output)


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
    def forward(ctx: Any, block: _Block, constants: int, hidden: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.block, ctx.constants, ctx.autocast = block, constants, autocast_now(hidden.device.type)
        ctx.given = len(tensors)
        carry, kept = block.loop(block.forward, [hidden, *tensors[:constants]], list(tensors[constants:]))
        ctx.save_for_backward(*tensors, *kept)
        ctx.trained = [tensor.requires_grad for tensor in tensors]
        return carry[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        constants, inputs, kept = saved[: ctx.constants], saved[ctx.constants : ctx.given], saved[ctx.given :]
        with torch.autocast(**ctx.autocast):
            carry, found = ctx.block.loop(ctx.block.backward, [upstream, *constants], inputs, kept)
        gradients = iter(found)
        turned = (
            next(gradients).to(own.dtype) if own_is_trained else None
            for own, own_is_trained in zip(saved, ctx.trained, strict=False)
        )
        return (None, None, carry[0], *turned)


FAMILIES = tuple(name for name, family in architecture.FAMILIES.items() if family.scans)
"""model_type of the families for which tests compare the loop with unrolled layers."""


def scan_layers(decoder: Any, optim: OptimConfig, device_type: str) -> str | None:
    """Makes a decoder run its layers as loops, depending on `optim.scan_layers`; "auto" does on TPU and on a mesh.

    Args:
        decoder: see `stack`.
        optim: scan_layers, remat and mlp_tile.
        device_type: of the run.

    Returns:
        None if the layers are loops now; else the reason, "" if a loop was not requested.

    Raises:
        ValueError: optim.scan_layers=on, or there is a mesh, and the layers cannot run as a loop.
    """
    keeps = optim.remat == "outputs"  # on XLA only in a loop
    loops = device_type == "tpu" or (keeps and device_type == "xla-cpu")
    # On a mesh the loop shards the weights of each layer; and states are kept between loops.
    wanted = "on" if active_mesh().size > 1 or hasattr(decoder, "kept_after") else optim.scan_layers
    if wanted == "off" or (wanted == "auto" and not loops):
        return ""
    if wanted == "auto":
        if optim.remat == "none":
            return f"optim.remat={optim.remat} keeps what a loop would compute again"
        if (family := decoder.config.model_type) not in FAMILIES:
            return f"{family} is not among {', '.join(FAMILIES)}; optim.scan_layers=on tries it"
    try:
        stack(decoder, None if keeps else optim.mlp_tile, keeps)
    except CannotScanError as error:
        if wanted == "auto":
            return str(error)
        asked, fix = ("optim.scan_layers=on", "set it to off")
        if active_mesh().size > 1:
            asked, fix = ("launch.mesh needs layers that run as a loop", "remove launch.mesh")
        elif hasattr(decoder, "kept_after"):
            asked, fix = ("distill.layers needs layers that run as a loop", "remove distill.layers")
        raise ValueError(f"{asked}, but {type(decoder).__name__} cannot: {error}; {fix}") from error
    return None


def stack(decoder: Any, tile: int | None = None, keeps: bool = False) -> ScannedLayers:
    """Makes a decoder run its layers as loops, in place, and stacks their weights on the host.

    Args:
        decoder: a transformers decoder with the kit's attention and its adapters, before its move to a device; also on
            the meta device.
        tile: tokens of a tile of an MLP; None for all tokens.
        keeps: save the results of products and attention (optim.remat=outputs).

    Returns:
        The new `decoder.layers`.

    Raises:
        CannotScanError: its layers cannot run as a loop; the decoder is unchanged.
    """
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise CannotScanError(f"{type(decoder).__name__} has no list of layers")
    numbers = [id(tensor) for layer in layers for tensor in layer.parameters()]
    if len(set(numbers)) < len(numbers):
        raise CannotScanError("its layers share weights")
    calls = _calls(decoder, len(layers))
    cuts = getattr(decoder, "kept_after", ())  # a run ends there, so that its states can be kept
    parts = [sum(cut <= place for cut in cuts) for place in range(len(layers))]
    keys = [(part, _signature(one), call.key()) for part, one, call in zip(parts, layers, calls, strict=True)]
    runs, start = [], 0
    for period, turns in architecture.spans(keys):
        ends = range(start, start + period * turns, period)
        runs.append(_run([list(layers[end : end + period]) for end in ends], keeps))
        start += period * turns
    scanned = ScannedLayers(runs, cuts).train(decoder.training)
    if tile is not None:
        for layer in (layer for run in runs for layer in run.layers):
            mlp = getattr(layer, "mlp", None)
            if mlp is not None and type(mlp).__name__.endswith("MLP"):
                chunk_mlp(mlp, tile)
    decoder.layers = scanned
    return scanned


def _calls(decoder: Any, count: int) -> list[Call]:
    """Records the arguments with which the decoder calls each layer, on a row of two tokens."""
    layers, config = decoder.layers, decoder.config
    decoder._modules["layers"] = probe = _Probe(count)
    ones = torch.ones(1, 2, dtype=torch.int64, device=next(decoder.parameters()).device)
    try:
        with torch.no_grad():
            masks = attention.inputs(config._attn_implementation, ones)
            decoder(input_ids=ones, position_ids=ones, use_cache=False, **masks)
    finally:
        decoder._modules["layers"] = layers
    if len(probe.calls) != count:
        raise CannotScanError("its decoder does not go through its layers one by one")
    return probe.calls


class _Probe(ScannedLayers):
    """Placeholders for layers that only record their calls."""

    def __init__(self, count: int) -> None:
        super().__init__([])
        self.count = count
        self.calls: list[Call] = []

    def _run(self, hidden: torch.Tensor, calls: list[Call]) -> torch.Tensor:
        self.calls += calls
        return hidden


def _signature(layer: torch.nn.Module) -> Any:
    """Returns a key that is equal for layers that differ only in the values of their weights."""
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
    """Splits stacks into views of their slices, under the names that the parameters have without stacks.

    Args:
        stacks: as `stacked_names` returns them.
        named: tensors by names of the model's parameters, (G, ...) for stacks.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        found |= dict(zip(stacks[name], tensor.unbind(), strict=True)) if name in stacks else {name: tensor}
    return found


def restacked(stacks: Mapping[str, list[str]], named: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Makes the tensor of one of the model's parameters from the result of `unstacked`."""
    return torch.stack([named[one] for one in stacks[name]]) if name in stacks else named[name]
