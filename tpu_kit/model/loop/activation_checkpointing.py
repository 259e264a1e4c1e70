"""Recomputing activations instead of saving them: saved results, MLPs over tiles, dropout with a repeatable mask.

With optim.remat=outputs, a layer saves the results of matrix products and attention, and recomputes the rest (norms,
rotary angles, activation functions), which costs almost no FLOPs. In a loop over layers, the forward pass records these
results, and the loop outputs them. The backward pass runs the layer again with the saved results in place of the
products. A product's gradient does not need its result, so XLA removes the recomputed product. Layers outside of a loop
use torch's selective checkpointing.

`chunk_mlp` runs an MLP over tiles of tokens, so that its (tokens, intermediate size) activations exist for one tile at
a time. The backward pass recomputes every tile. In a recomputed layer this costs nothing more, because the compiler
removes the unused MLP of the recomputed forward pass.

`SeededDropout` draws its mask from a seed and the position, so that a recomputed layer draws the same mask. A stateful
generator would draw the same mask in every iteration of an XLA loop, or another mask in the backward pass. The mask
costs a few integer operations, fused with the product, and is not saved.

`fuse_lora` fuses the LoRA product with the base product. PEFT adds them in separate operations, which wait for memory
longer than the products take. Without the fusion, an update of the embedded model in fp32 takes 1.2 times as long on
the CPU. By the TPU compiler's cost model, a step of a 0.5B model takes 1.06 times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.model.loop import layer_inputs
from tpu_kit.model.loop.loop_structure import FEW_TILES
from tpu_kit.model.sharding import partition
from tpu_kit.xla.scan import Tensors, Tree, scan
from tpu_kit.xla.sharding import token_shards

_HIGH = 0x7FFFFFFF


class SeededDropout(torch.nn.Module):
    """`torch.nn.Dropout` that draws from its buffer `seed`, () int32, which the caller sets before every call.

    Args:
        p: probability of zero.
        site: number of this dropout in the layer, so that a layer's dropouts draw different masks.
    """

    seed: torch.Tensor

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site
        self.register_buffer("seed", torch.zeros((), dtype=torch.int32), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Zeroes values with probability `p` and scales the others; does nothing in evaluation mode."""
        if not self.training:
            return values
        return _Dropout.apply(values, self.seed, self.p, self.site)


def seed_dropouts(layers: torch.nn.Module) -> None:
    """Replaces the dropouts with p > 0 in layers by `SeededDropout` with sites 0, 1, ..., in place."""
    dropouts = [(name, one) for name, one in layers.named_modules() if isinstance(one, torch.nn.Dropout) and one.p > 0]
    for site, (name, dropout) in enumerate(dropouts):
        owner, _, leaf = name.rpartition(".")
        setattr(layers.get_submodule(owner), leaf, SeededDropout(dropout.p, site))


class _Dropout(torch.autograd.Function):
    """`_masked`; the gradient has the same mask and scale."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seed: torch.Tensor, p: float, site: int) -> torch.Tensor:
        ctx.save_for_backward(seed)
        ctx.p, ctx.site = p, site
        return _masked(values, seed, p, site)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _masked(upstream, ctx.saved_tensors[0], ctx.p, ctx.site), None, None, None


def _masked(values: torch.Tensor, seed: torch.Tensor, p: float, site: int) -> torch.Tensor:
    """Zeroes values where `keep_mask` is false, and divides the others by 1 - p."""
    scale = 1.0 / (1.0 - p)
    kept = keep_mask(values.shape, seed, p, site, values.device)
    return torch.where(kept, values * scale, torch.zeros_like(values))


def keep_mask(shape: torch.Size, seed: torch.Tensor, p: float, site: int, device: torch.device) -> torch.Tensor:
    """Returns a boolean mask of `shape` on `device`, true (keep) with probability 1 - p, equal on all devices.

    `seed` is () int32, `site` the dropout's number in its layer. Equal arguments give an equal mask. Hashes row,
    column, seed and site with the finalizer of Chris Wellons' lowbias32 (public domain).
    """
    columns = torch.arange(shape[-1], device=device, dtype=torch.int32)
    rows = torch.arange(shape.numel() // shape[-1], device=device, dtype=torch.int32)
    # Odd constants prevent seed, site and row from cancelling out. int32 wraps around, on XLA as on a CPU.
    rows = mix(rows * 0x3C6EF373 + mix(seed + (site + 1) * 0x1E3779B1))
    bits = mix(columns + rows[:, None]) & _HIGH
    return (bits >= int(p * (_HIGH + 1))).view(shape)


def mix(values: torch.Tensor) -> torch.Tensor:
    """Maps int32 to int32 bijectively, so that every input bit affects every output bit."""
    values = (values ^ _shift(values, 16)) * 0x7FEB352D
    values = (values ^ _shift(values, 15)) * (0x846CA68B - (1 << 32))
    return values ^ _shift(values, 16)


def _shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts to the right and fills with zeros instead of the sign bit.

    On XLA, `>>` is a division that rounds towards zero, and a shift by a Python number returns int64.
    """
    return torch.bitwise_right_shift(values, torch.full_like(values, bits)) & ((1 << (32 - bits)) - 1)


_CHEAP_RATIO = 8  # a product is cheap if its result is this many times wider than its inner size: LoRA's second product


class _Tape(NamedTuple):
    """Results that a forward pass saves (`kept`) or that a recomputation uses (`known`, None in a forward pass)."""

    kept: list[torch.Tensor]
    known: Iterator[torch.Tensor] | None


_tape: ContextVar[_Tape | None] = ContextVar("tape", default=None)


@contextmanager
def recording(wanted: bool, known: Sequence[torch.Tensor] | None = None) -> Iterator[list[torch.Tensor]]:
    """Makes `keep` and `once` record or replay results while the context is open; yields the list of recorded results.

    Args:
        wanted: False: both only pass results through, also within an outer recording, and the list stays empty.
        known: None: both append their results to the list. Otherwise, results of an earlier recording, which both
            return in order, and the list stays empty.
    """
    tape = _Tape([], None if known is None else iter(known))
    token = _tape.set(tape if wanted else None)
    try:
        yield tape.kept
    finally:
        _tape.reset(token)


def is_open() -> bool:
    """Returns whether `recording` is open and wanted, to record or to replay."""
    return _tape.get() is not None


def keep(computed: torch.Tensor) -> torch.Tensor:
    """Records `computed` in an open `recording`, and returns it; without one or in torch.compile, only returns it.

    A `recording` with known results returns the next known result instead; its gradient goes to `computed`.
    """
    # torch.compile cannot read the context variable. It compiles no loops, and only loops record.
    tape = None if torch.compiler.is_compiling() else _tape.get()
    if tape is None:
        return computed
    if tape.known is None:
        tape.kept.append(computed)
        return computed
    return _Known.apply(computed, next(tape.known))


def once(count: int, compute: Callable[[], Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    """Returns the `count` results of `compute`, and records them in an open `recording`; without it, only returns them.

    A `recording` with known results returns the next `count` known results, without computing and without gradients.
    """
    tape = _tape.get()
    if tape is None:
        return compute()
    if tape.known is None:
        found = compute()
        tape.kept.extend(found)
        return found
    return [next(tape.known) for _ in range(count)]


class _Known(torch.autograd.Function):
    """Returns `kept`, and passes its gradient to `computed`."""

    @staticmethod
    def forward(ctx: Any, computed: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return kept.view_as(kept)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return upstream, None


def keep_products(layer: torch.nn.Module) -> None:
    """Makes a layer `keep` the results of its linear modules, adapters added, by forward hooks, in place."""
    for child in layer.children():
        if isinstance(child, torch.nn.Linear) or isinstance(getattr(child, "base_layer", None), torch.nn.Linear):
            child.register_forward_hook(_keep_output)
        else:
            keep_products(child)


def _keep_output(module: torch.nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
    """Is the forward hook of `keep_products`."""
    return keep(output)


# -------------------------------------------------------------------------------------------- layers outside of a loop

_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
_ATTENTION = "aten._scaled_dot_product_"  # prefix of attention kernels


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Returns MUST_SAVE for results of attention kernels and expensive products, otherwise PREFER_RECOMPUTE.

    A product is expensive below `_CHEAP_RATIO`. Batched products are not saved: these are the large scores of attention
    without a kernel.
    """
    name = str(operation)
    kept = name.startswith(_ATTENTION)
    if name in _PRODUCTS:
        first, second = args[-2:]
        kept = second.shape[1] < _CHEAP_RATIO * first.shape[1]
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(layers: Sequence[torch.nn.Module], keeps: bool) -> None:
    """Makes every layer's `forward` run through torch's checkpoint, in place; torch.compile compiles it with the layer.

    transformers 5.15 calls the checkpoint in the layer's `__call__` instead, so compiled code would run within the
    contexts of `_policy`, where torch.compile silently does not compile a layer.

    Args:
        layers: layers outside of a loop.
        keeps: True also saves results of attention kernels and matrix products, as with optim.remat=outputs, except
            cheap products such as LoRA's second; False saves only the layers' inputs.
    """
    # The random state is only needed if dropout draws from it.
    draws = any(isinstance(part, torch.nn.Dropout) and part.p > 0 for layer in layers for part in layer.modules())
    function = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=draws)
    if keeps:
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
        function = functools.partial(function, context_fn=contexts)
    _extend(layers, _Recomputed, checkpoint=staticmethod(function))


def _extend(layers: Iterable[torch.nn.Module], mixin: type[torch.nn.Module], **attributes: Any) -> None:
    """Replaces each layer's class, in place, by a subclass with `mixin` and `attributes`; one subclass per class."""
    classes: dict[type, Any] = {}
    for layer in layers:
        kind = type(layer)
        if kind not in classes:
            classes[kind] = type(f"{mixin.__name__.strip('_')}{kind.__name__}", (mixin, kind), attributes)
        layer.__class__ = classes[kind]


class _Recomputed(torch.nn.Module):
    """A layer that runs through `checkpoint`; its recomputation has the same `layer_inputs`."""

    checkpoint: ClassVar[Callable[..., Any]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        function = super().forward
        if not torch.compiler.is_compiling():  # a compiled layer recomputes within its program
            function = layer_inputs.kept(function)
        return self.checkpoint(function, *args, **kwargs)


# ------------------------------------------------------------------------------------------------------ MLP over tiles


def autocast_now(device_type: str) -> dict[str, Any]:
    """Returns keyword arguments with which `torch.autocast` restores its state on a device; disabled for "meta"."""
    if device_type == "meta":  # meta has no autocast
        return {"device_type": "cpu", "enabled": False}
    return {
        "device_type": device_type, "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type), "cache_enabled": False,
    }  # fmt: skip


def chunk_mlp(mlp: torch.nn.Module, tokens: int) -> None:
    """Makes an MLP, (B, S, H) to (B, S, H), run over tiles of at most `tokens` tokens per device, in place.

    Tiles have equal sizes. A single tile runs without a loop, and so does a tower's row (P, H) on a mesh.
    """
    _extend(_lora_layers(mlp), _FusedLora, takes=staticmethod(_in_tile_on_xla))
    _extend([mlp], _Tiled, tile_tokens=tokens)


def cast_once(layer: torch.nn.Module) -> set[str]:
    """Returns the names of a layer's LoRA weights that a loop may cast to the dtype of autocast; empty with DoRA.

    The gradient of such a weight is a single product, no sum over tiles. Call `chunk_mlp` before this function.
    """
    sums = [f"{name}." for name, part in layer.named_modules() if isinstance(part, _Tiled)]
    if any("lora_magnitude" in name for name, _ in layer.named_parameters()):
        return set()
    return {
        f"{name}.weight"
        for name, part in layer.named_modules()
        if type(part) is torch.nn.Linear and "lora_" in name and not name.startswith(tuple(sums))
    }


def tiles_of(tokens: int, most: int) -> int:
    """Returns the smallest number of equal tiles of at most `most` tokens that divides `tokens`."""
    return next(count for count in range(-(-tokens // most), tokens + 1) if tokens % count == 0)


_in_tile: ContextVar[bool] = ContextVar("in_tile", default=False)


class _Tiled(torch.nn.Module):
    """An MLP that runs over tiles of tokens; see `chunk_mlp`."""

    tile_tokens: ClassVar[int]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mesh = active_mesh()
        if mesh.size == 1:
            tokens, width = hidden.numel() // hidden.shape[-1], hidden.shape[-1]
            count = tiles_of(tokens, self.tile_tokens)
        elif hidden.dim() == 2:  # a tower's images in a single row, which the mesh shards
            count = 1
        else:  # a tile has tokens of all rows, so that all devices work on it
            most = max(1, self.tile_tokens * mesh.batch_shards // hidden.shape[0])
            count = tiles_of(hidden.shape[1] // token_shards(), most)
        if count == 1:
            return super().forward(hidden)
        tiles = hidden.reshape(count, tokens // count, width) if mesh.size == 1 else partition.tiles(hidden, count)
        inputs, seeds = [tiles], seeds_of(self)
        if seeds and self.training:
            numbers = torch.arange(count, device=hidden.device, dtype=torch.int32)
            inputs.append(mix(self.get_buffer(seeds[0]) + numbers * 0x61C88647))

        def body(carry: Tree, named: Tree, slices: Tree) -> tuple[Tree, Tree]:
            named = named | {name: seed for seed in slices[1:] for name in seeds}
            token = _in_tile.set(mesh.size == 1)
            try:
                return carry, torch.func.functional_call(self, named, (slices[0],), tie_weights=False)  # a tile
            finally:
                _in_tile.reset(token)

        (output,) = recomputed_scan(body, [], tensors_of(self), inputs, unrolled=count <= FEW_TILES)
        return output.reshape(hidden.shape) if mesh.size == 1 else partition.untiled(output)


def seeds_of(module: torch.nn.Module) -> list[str]:
    """Returns the names of the seed buffers of a module's dropouts."""
    return [f"{name}.seed" for name, part in module.named_modules() if isinstance(part, SeededDropout)]


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns a module's parameters and buffers by name, without the seeds of dropouts."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters())
    return found | {name: tensor for name, tensor in module.named_buffers() if name not in seeds_of(module)}


def recomputed_scan(
    body: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
    carry: Tensors,
    constants: Mapping[str, torch.Tensor],
    inputs: Tensors,
    unrolled: bool = False,
) -> Tensors:
    """Runs `scan` with autograd: saves the carry before every iteration, and the backward loop recomputes iterations.

    Args:
        body: takes the carry, the constants and the slices of an iteration; returns the next carry and one tensor.
        carry: initial floats, which get no gradient; empty if iterations are independent.
        constants: by name; those that require a gradient get the sum of the iterations' gradients.
        inputs: tensors (N, ...); floats get a gradient.
        unrolled: see `scan`.

    Returns:
        The stacked outputs (N, ...), then the tensors of the last carry, without a gradient.
    """
    tensors, structure = tree_flatten((carry, dict(constants), inputs))
    return _RecomputedScan.apply(body, structure, unrolled, *tensors)


class _RecomputedScan(torch.autograd.Function):
    """`recomputed_scan` for flattened tensors; `structure` is their tree (carry, constants, inputs)."""

    @staticmethod
    def forward(ctx: Any, body: Any, structure: Any, unrolled: bool, *tensors: torch.Tensor) -> tuple[Any, ...]:
        def turn(state: Tree, slices: Tree) -> tuple[Tree, Tree]:
            now, fixed = state
            then, output = body(now, fixed, slices)
            return (then, fixed), ([one * 1 for one in now], output)

        carry, constants, inputs = tree_unflatten(tensors, structure)
        (end, _), (before, output) = scan(turn, (carry, constants), inputs, unrolled=unrolled)
        saved, ctx.structure = tree_flatten((before, constants, inputs))
        ctx.body, ctx.unrolled, ctx.autocast = body, unrolled, autocast_now(output.device.type)
        ctx.save_for_backward(*saved)
        ctx.trained = [name for name, tensor in constants.items() if tensor.requires_grad]
        ctx.mark_non_differentiable(*end)
        return output, *end

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        def turn(state: Tree, slices: Tree) -> tuple[Tree, Tree]:
            (later, fixed, sums), (given, now, mine) = state, slices
            with torch.enable_grad():
                now = [one.detach().requires_grad_() for one in now]
                mine = [one.detach().requires_grad_(one.is_floating_point()) for one in mine]
                trained = {name: fixed[name].detach().requires_grad_() for name in ctx.trained}
                then, output = ctx.body(now, fixed | trained, mine)
                leaves = [*now, *(one for one in mine if one.requires_grad), *trained.values()]
                found = torch.autograd.grad([*then, output], leaves, [*later, given])
            end = len(found) - len(trained)
            sums = [total + one for total, one in zip(sums, found[end:], strict=True)]
            return (found[: len(now)], fixed, sums), found[len(now) : end]

        before, constants, inputs = tree_unflatten(ctx.saved_tensors, ctx.structure)  # torch allows a single read
        later = [torch.zeros_like(one[0]) for one in before]
        start = later, constants, [torch.zeros_like(constants[name]) for name in ctx.trained]
        with torch.autocast(**ctx.autocast):
            (_, _, sums), found = scan(
                turn, start, (upstream, before, inputs), reverse=bool(later), unrolled=ctx.unrolled
            )
        summed, gradients = dict(zip(ctx.trained, sums, strict=True)), iter(found)
        of_inputs = (next(gradients) if one.is_floating_point() else None for one in inputs)
        return (None, None, None, *[None] * len(before), *(summed.get(name) for name in constants), *of_inputs)


# ----------------------------------------------------------------------------------------------- LoRA beside its base


def fuse_lora(model: torch.nn.Module, device_type: str) -> None:
    """Makes the LoRA layers of a model on the CPU or XLA fuse their products (`_FusedLora`), in place.

    Not for recomputed layers: selective checkpointing saves the base product, which this changes in place.
    """
    _extend(_lora_layers(model), _FusedLora, takes=staticmethod(_on_the_cpu if device_type == "cpu" else _on_xla))


def _on_the_cpu(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Returns whether all tensors have the same dtype, on the CPU without autocast."""
    same = all(one.dtype == x.dtype for one in weights)
    return x.device.type == "cpu" and same and not torch.is_autocast_enabled("cpu")


def _on_xla(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Returns whether `x` is on an XLA device; ignores `weights`."""
    return x.device.type == "xla"


def _in_tile_on_xla(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Returns whether `x` is a tile of an MLP on XLA, without a mesh; ignores `weights`.

    Elsewhere in a loop over layers, joining matrices makes the compiler copy their stacks: 0.5 GiB for a 0.5B model.
    """
    return x.device.type == "xla" and _in_tile.get()


def _lora_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns a model's LoRA layers whose base is exactly a `torch.nn.Linear`, so not quantized."""
    from peft.tuners.lora import Linear

    layers = (layer for layer in model.modules() if isinstance(layer, Linear))
    return [layer for layer in layers if type(layer.base_layer) is torch.nn.Linear]


class _FusedLora(torch.nn.Module):
    """A LoRA layer that fuses its products by `_LoraProduct`, if `takes(x, weights)` and it has a single plain adapter.

    PEFT computes layers with dropout (in training), DoRA or a bias of B, with a merged or disabled adapter, or with a
    trained base.
    """

    takes: ClassVar[Callable[..., bool]]

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        name = self.active_adapters[0]
        plain = not (args or kwargs or self.disable_adapters or self.merged or self.lora_variant.get(name))
        if plain and len(self.active_adapters) == 1:
            base, a, b = self.base_layer, self.lora_A[name], self.lora_B[name]
            drops = self.training and getattr(self.lora_dropout[name], "p", 0)
            weights = base.weight, a.weight, b.weight
            if not drops and b.bias is None and not base.weight.requires_grad and self.takes(x, weights):
                kind = x.device.type
                dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
                bias = None if base.bias is None else base.bias.to(dtype)
                return _LoraProduct.apply(*(one.to(dtype) for one in (x, *weights)), bias, self.scaling[name])
        result: torch.Tensor = super().forward(x, *args, **kwargs)
        return result


class _LoraProduct(torch.autograd.Function):
    """Computes x W^T + bias + scaling (x A^T) B^T, with gradients for x, A and B."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, a: Any, b: Any, bias: Any, scaling: float) -> torch.Tensor:
        low = torch.nn.functional.linear(x, a) * scaling
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scaling = scaling
        return _sum_of_products(x, low, weight.t(), b.t(), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        of_low = (upstream @ b) * ctx.scaling
        of_x = _sum_of_products(upstream, of_low, weight, a) if ctx.needs_input_grad[0] else None
        of_a, of_b = (one.flatten(0, -2).t() @ other.flatten(0, -2) for one, other in ((of_low, x), (upstream, low)))
        return of_x, None, of_a, of_b, None, None


def _sum_of_products(
    wide: torch.Tensor, low: torch.Tensor, weight: torch.Tensor, other: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes wide @ weight + low @ other + bias; on XLA as a single product if this moves fewer bytes.

    The shapes are (..., I) @ (I, O), (..., r) @ (r, O) and (O,). A TPU writes the joined matrix in every step, but
    saves a second pass over the result. This moves fewer bytes if there are at least as many tokens as rows of the
    matrix.
    """
    if wide.device.type == "cpu":
        rows = wide.flatten(0, -2)
        result = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
        return result.addmm_(low.flatten(0, -2), other).view(*wide.shape[:-1], -1)
    if wide.numel() // wide.shape[-1] < weight.shape[0]:
        result = wide @ weight + low @ other
    else:
        result = torch.cat([wide, low], dim=-1) @ torch.cat([weight, other])
    return result if bias is None else result + bias
