"""Mixtures of experts: the function "tpu_kit" in transformers' registry of experts functions.

On XLA, it computes experts in tiles of rows sorted by expert (see `xla.grouped`). Elsewhere it calls transformers' own
function. Router, shared experts and gates keep the model's code.

`prepare` brings frozen experts to the prepared layout: weights (E, O, I), gates before ups, and widths above 128 padded
to multiples of 128. Prepared weights may be integers in the layout of `quantization` with a leading dimension E. Their
scales are buffers with the suffix "_scale"; int4 has padded groups (`shape.scale_groups`).
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.model.shape import scale_groups, tile_rows
from tpu_kit.model.weights import trained_embeddings
from tpu_kit.xla import grouped, traced_program
from tpu_kit.xla.grouped import TileLayout, Tiles
from tpu_kit.xla.sharding import in_place

NAME = "tpu_kit"
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of weights; an experts module has two of them."""
_LANES = 128


def modules_of(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (path, module) of the experts of a model: modules with transformers' `use_experts_implementation`."""
    for name, part in model.named_modules():
        if hasattr(part, "is_concatenated") and hasattr(part, "_apply_gate"):
            yield name, part


def connect(model: Any, frozen: bool) -> None:
    """Makes a model compute its experts by `experts_forward`, and its routers without autocast.

    Args:
        model: transformers model, changed in place; a model without experts does not change.
        frozen: True: the experts are not trained, and get the layout of `prepare`. False: they keep the layout of
            files.

    Raises:
        ValueError: the router draws random numbers (router_jitter_noise is not 0).
    """
    found = list(modules_of(model))
    if not found:
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    for part in model.modules():
        if type(part).__name__.lower().endswith("router") and not hasattr(type(part), "precise"):
            part.__class__ = _precise(type(part))  # type: ignore[arg-type]  # a class is hashable
    for _, part in found:
        if frozen:
            prepare(part)
        part.config._experts_implementation_internal = NAME
        if getattr(part.config, "router_jitter_noise", None):
            raise ValueError(
                f"router_jitter_noise={part.config.router_jitter_noise}: a recomputed layer would draw other noise; "
                "set it to 0 in the model's config.json"
            )


def check_trained(model: torch.nn.Module, device_type: str) -> None:
    """Raises ValueError on "tpu" and "xla-cpu" if weights or biases of experts (not their adapters) are trained."""
    if device_type in ("tpu", "xla-cpu") and any(
        weight.requires_grad for _, part in modules_of(model) for weight in part.parameters()
    ):
        raise ValueError(
            "lora.r=0 trains all weights, but on XLA the weights of experts are frozen: set lora.r=16, or train on "
            "launch.device_type=cuda or cpu"
        )


@cache
def _precise(kind: Any) -> Any:
    """Returns a subclass of a router class, cached, that runs without autocast, because many routers need fp32."""

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = hidden_states.device.type
        with contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            return kind.forward(self, hidden_states, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "precise": True})


def routers_of(model: torch.nn.Module) -> set[str]:
    """Returns the paths of linear layers that select or weight experts: routers and gates of shared experts.

    Their names end in "gate", or the class of their parent in "Router". They get neither quantization nor adapters. A
    model without experts has none.
    """
    if not any(True for _ in modules_of(model)):
        return set()
    modules = dict(model.named_modules())
    owners = {name: type(modules[name.rpartition(".")[0]]).__name__ for name in modules if name}
    return {
        name for name, owner in owners.items()
        if isinstance(modules[name], torch.nn.Linear) and (name.endswith("gate") or owner.lower().endswith("router"))
    }  # fmt: skip


def targets_for_peft(model: Any, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns PEFT's (target_modules, target_parameters), both sorted, for linear layers whose paths end in `names`.

    In models of the families Qwen2-MoE and Mixtral, PEFT mistakes some names for names of experts. The first list has
    the other names. The second list has "parent.name.weight", the end of the path, for every linear layer with a
    mistaken name, such as a layer of shared experts, but not for routers. In other models the first list has all names,
    and the second list is empty.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    kept: set[str] = set()
    for name in names:
        settings = PeftLoraConfig(target_modules=[name])
        with contextlib.suppress(ValueError):  # PEFT requires some names of experts together
            convert_peft_config_for_transformers(settings, model, None)
            kept |= set(settings.target_modules or ())
    left = tuple(f".{name}" for name in set(names) - kept)
    linears = {path for path, part in model.named_modules() if isinstance(part, torch.nn.Linear)} - routers_of(model)
    others = {".".join(path.split(".")[-2:]) for path in linears if left and f".{path}".endswith(left)}
    return sorted(kept), sorted(f"{path}.weight" for path in others)


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Computes the weighted sum of each token's experts; transformers calls it. On "meta", only the shape is right.

    Adapters of prepared experts are included. On XLA, the experts must be prepared and frozen.

    Args:
        self: the experts module.
        hidden_states: (T, H).
        top_k_index: (T, K) integers, the experts of each token.
        top_k_weights: (T, K), factors of the experts' outputs.

    Returns:
        The sums (T, H), in the dtype of `hidden_states`.
    """
    kind = hidden_states.device.type
    if kind == "meta":
        return torch.empty_like(hidden_states)
    if kind != "xla":
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](
            _plain(self, hidden_states), hidden_states, top_k_index, top_k_weights
        )
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_states.dtype
    tiles = tiles_for(top_k_index.numel(), self.num_experts)
    at = grouped.layout(tiles, top_k_index)
    rows = _Gather.apply(hidden_states.to(dtype), at.token, at.row, tiles, True)
    weight = _Gather.apply(top_k_weights.reshape(-1, 1), at.pair, at.row.reshape(-1, 1), tiles, True).float()
    width = hidden_states.shape[1]
    first, last = names_of(self)
    rows = _linear(self, first, torch.nn.functional.pad(rows, (0, self.form.pads[0])), at, tiles)
    rows = self._apply_gate(_Gates(rows) if self.form.parted else rows) if self.has_gate else self.act_fn(rows)
    if getattr(self, "has_post_expert_norm", False):  # transformers 5.15 has no such experts
        rows = self.post_expert_norm(_linear(self, last, rows.to(dtype), at, tiles)).float() * weight
    else:  # weighted before the last product, so the backward pass does not need its result
        rows = _linear(self, last, (rows.float() * weight).to(dtype), at, tiles, weight)
    found: torch.Tensor = _Gather.apply(rows[:, :width].to(dtype), at.row, at.token, tiles, False)
    return found.to(hidden_states.dtype)


def tiles_for(pairs: int, experts: int) -> Tiles:
    """Returns the tiles for `pairs` (token, expert) pairs, counted over all devices, and a number of `experts`.

    A device gets its share of the pairs. But on a mesh with `xla.sharding.in_place`, the tiles are for all pairs, and
    `Tiles.in_place` is the fsdp axis, or 1 if this does not divide `experts`.
    """
    mesh, shards = active_mesh(), 0
    if mesh.size > 1 and in_place.get():
        shards = mesh.fsdp if experts % mesh.fsdp == 0 else 1
    else:
        pairs //= mesh.batch_shards
    rows = tile_rows(pairs, experts)
    return Tiles(experts, rows, in_place=shards, kernel=traced_program.has_kernels())


def _linear(
    self: Any, name: str, rows: torch.Tensor, at: TileLayout, tiles: Tiles, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Maps rows (R, I) to (R, O) by the weight `name`; adds adapters, and biases (times any `weight` (R, 1))."""
    scheme, stored = getattr(self, "scheme", None), [getattr(self, name)]
    if tiles.kernel and scheme is not None:
        tiles = tiles._replace(bits=scheme.bits, group=scheme.group)
        stored.append(getattr(self, f"{name}_scale"))
    if tiles.kernel:
        output: torch.Tensor = _Product.apply(rows, tiles, *at, *stored)
    else:
        floats = stored[0] if scheme is None else _dequantized(self, name, rows.dtype)
        output = torch.bmm(_by_tile(rows, tiles), floats[at.expert.long()].to(rows.dtype).mT).flatten(0, 1)
    # One-hot products select the adapters and biases of experts. So gradients are products too, and the compiler writes
    # no broadcast of biases to memory.
    chosen = (at.expert[:, None] == torch.arange(tiles.experts, device=rows.device)).to(rows.dtype)
    if (low := _low_rank(self, name, rows.dtype)) is not None:
        down, up = ((chosen @ part.flatten(1)).unflatten(1, part.shape[1:]) for part in low)
        output = output + torch.bmm(torch.bmm(_by_tile(rows, tiles), down.mT), up).flatten(0, 1)
    if self.has_bias:
        of_row = chosen[:, None].expand(-1, tiles.rows, -1).flatten(0, 1)
        of_row = of_row if weight is None else of_row * weight.to(output.dtype)
        output = output + of_row @ getattr(self, f"{name}_bias").to(output.dtype)
    return output


def _by_tile(rows: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """Returns rows (R, ...) as (tiles, rows of a tile, ...)."""
    return rows.unflatten(0, (-1, tiles.rows))


class _Gather(torch.autograd.Function):
    """`grouped.rows_of` with `index` if `forwards`, else `sums_of`. The gradient is the other function with `back`."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, index: Any, back: Any, tiles: Tiles, forwards: bool) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.tiles, ctx.forwards = tiles, forwards
        return (grouped.rows_of if forwards else grouped.sums_of)(tiles, tensor, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        function = grouped.sums_of if ctx.forwards else grouped.rows_of
        return function(ctx.tiles, upstream, *ctx.saved_tensors), None, None, None, None


class _Product(torch.autograd.Function):
    """`grouped.product` of rows with frozen weights; `given` has the five tensors of `TileLayout`, weight and scale."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tiles: Tiles, *given: torch.Tensor) -> torch.Tensor:
        ctx.tiles = tiles
        ctx.save_for_backward(*given)
        return grouped.product(tiles, rows, TileLayout(*given[:5]), *given[5:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given, tiles = ctx.saved_tensors, ctx.tiles._replace(back=True)
        rows = grouped.product(tiles, upstream, TileLayout(*given[:5]), *given[5:])
        return rows, *[None] * (1 + len(given))


# ------------------------------------------------------------------------------------------------------ the adapters


def parameters_of(model: torch.nn.Module) -> list[str]:
    """Returns PEFT's `target_parameters` for all experts, such as ["experts.down_proj", "experts.gate_up_proj"]."""
    return sorted({f"{path.rpartition('.')[2]}.{name}" for path, part in modules_of(model) for name in names_of(part)})


def with_adapters(model: Any, settings: Any) -> torch.nn.Module:
    """Returns a `PeftModel` around `model`, changed in place, with fp32 adapters of PEFT's `LoraConfig` `settings`.

    PEFT sees experts with the shapes of their files, so adapters keep PEFT's names and layout. For prepared experts,
    `experts_forward` applies the adapters, because PEFT would add their product to the weights of all experts. Linear
    layers listed as parameters (`targets_for_peft`) get ordinary adapters, which have the same tensors. torch's global
    generator draws the initial values. PEFT's errors are raised unchanged, such as ValueError for absent layers.
    """
    from peft import get_peft_model

    modules, parameters = settings.target_modules, settings.target_parameters
    linears = {name.removesuffix(".weight") for name in parameters or () if name.endswith(".weight")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match any targeted module")
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True` and a tied layer")  # export unties it
        for _, part in list(modules_of(model)) if parameters else ():
            if hasattr(part, "form"):
                stack.enter_context(_as_in_files(part))
        if linears:
            settings.target_modules = {*modules, *linears}
            settings.target_parameters = [name for name in parameters if not name.endswith(".weight")] or None
            stack.callback(setattr, model.config, "model_type", model.config.model_type)
            model.config.model_type = "without names of experts"  # for PEFT
        adapted: torch.nn.Module = get_peft_model(model, settings, autocast_adapter_dtype=True)
    trained_embeddings.connect(adapted)
    if linears:  # otherwise PEFT has replaced all-linear by the names of layers
        settings.target_modules, settings.target_parameters = modules, parameters
    parts: Iterable[Any] = adapted.modules()
    for part in parts:
        if hasattr(part, "parameter_name"):
            part.__class__ = _wrapper(type(part))  # type: ignore[arg-type]  # a class is hashable
            part.get_base_layer().__dict__.setdefault("adapters", {})[part.parameter_name] = part
    return adapted


@contextlib.contextmanager
def _as_in_files(experts: Any) -> Iterator[None]:
    """Returns a context in which prepared experts have parameters with the shapes of their files, without memory."""
    kept = [(held, name, held.pop(name)) for name in names_of(experts)
            for held in (experts._parameters, experts._buffers) if name in held]  # fmt: skip
    turned = experts.is_transposed
    experts.is_transposed = experts.form.turned
    for _, name, weight in kept:
        shape = experts.form.sizes[name]
        empty = torch.zeros((), device=weight.device).expand(shape)
        experts._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
    try:
        yield
    finally:
        experts.is_transposed = turned
        for held, name, weight in kept:
            del experts._parameters[name]
            held[name] = weight.requires_grad_(False)  # like PEFT's change to the empty parameters


@cache
def _wrapper(kind: Any) -> Any:
    """Returns a subclass, cached, of PEFT's `ParamWrapper` that leaves prepared experts to `experts_forward`."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self.get_base_layer(), "form"):
            return self.base_layer(*args, **kwargs)
        return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


def _low_rank(self: Any, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns A (E, r, I) and scaled B (E, r, O) of a weight, in the prepared layout; None without enabled adapter."""
    wrapper = self.__dict__.get("adapters", {}).get(name)
    if wrapper is None or wrapper.disable_adapters:
        return None
    (active,) = wrapper.active_adapters
    down = wrapper.lora_A[active].weight.to(dtype).unflatten(0, (self.num_experts, -1))
    up = wrapper.lora_B[active].weight.to(dtype).unflatten(1, (-1, self.num_experts)).permute(2, 1, 0)
    columns = self.form.pads[name == names_of(self)[1]]
    up = shaped(self, f"{name}_bias", up.flatten(0, 1)).unflatten(0, up.shape[:2])
    return torch.nn.functional.pad(down, (0, columns)), up * wrapper.scaling[active]


# -------------------------------------------------------------------------------------------------- the stored weights


class _Gates:
    """Gates and ups as halves of rows, for model code that reads them interleaved: [..., ::2] and [..., 1::2]."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.halves = rows.chunk(2, dim=-1)

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self.halves[place[-1].start or 0]


def names_of(experts: Any) -> list[str]:
    """Returns the names of an experts module's two weights, in the order of their products."""
    return [name for name in WEIGHTS if hasattr(experts, name)]


def _dequantized(self: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Dequantizes the weight `name` of quantized experts to floats (E, O, I) of `dtype`."""
    stored = zip(getattr(self, name), getattr(self, f"{name}_scale"), strict=True)
    return torch.stack([floats_of(self.scheme, *each, dtype) for each in stored])


def floats_of(scheme: Any, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantizes the result of `quantize`, a single expert's, to floats (O, I) of `dtype`."""
    if scheme.bits == 4:
        scale = scale.unflatten(1, (2, -1))[:, :, : len(weight) // scheme.group].flatten(1, 2)
    return torch.cat(scheme.parts(weight, scale, dtype), 1)


def quantize(scheme: Any, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes one expert's prepared weight (O, I) to (integers, scales), like `Scheme.quantize`.

    In int4, the scales are (2, `shape.scale_groups`, O): zeros follow the groups of each half of the inputs.
    """
    integers, scale = scheme.quantize(weight)
    if scheme.bits == 4:
        more = (scale_groups(weight.shape[1], scheme.group) - scale.shape[1]) // 2
        scale = torch.nn.functional.pad(scale.unflatten(1, (2, -1)), (0, 0, 0, more)).flatten(1, 2)
    return integers, scale


def _plain(self: Any, hidden_states: torch.Tensor) -> Any:
    """Returns a copy of prepared experts for transformers' code: dequantized, adapters merged, hidden size unpadded.

    Dequantized or merged weights have autocast's dtype, else the dtype of `hidden_states`. Other experts: themselves.
    """
    if not hasattr(self, "form"):
        return self
    alike, kind = copy.copy(self), hidden_states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_states.dtype
    floats = {name: getattr(self, name) for name in names_of(self)}
    if hasattr(self, "scheme"):
        floats = {name: _dequantized(self, name, dtype) for name in floats}
    for name in floats:
        if (low := _low_rank(self, name, dtype)) is not None:
            floats[name] = floats[name].to(dtype) + (low[1].mT @ low[0]).to(dtype)
    first, last = floats
    # Instance attributes take precedence over parameters and buffers of the same name.
    alike.__dict__ |= {first: floats[first][..., : hidden_states.shape[1]]}
    alike.__dict__ |= {last: floats[last][:, : hidden_states.shape[1]]}
    if self.has_bias:
        alike.__dict__[f"{last}_bias"] = getattr(self, f"{last}_bias")[:, : hidden_states.shape[1]]
    if self.form.parted:
        apply = self._apply_gate
        alike.__dict__["_apply_gate"] = lambda rows: apply(_Gates(rows))
    return alike


class _Form(NamedTuple):
    """The changes of `shaped` to a module's weights as stored in files.

    Attributes:
        turned: whether files have (E, I, O).
        parted: whether files interleave gates and ups.
        halves: parts of the first product: 2 for gates and ups, 1 for experts without gates.
        pads: numbers of zeros added to the hidden size and to the inner size.
        sizes: shape in files, with E, by name of the weight.
    """

    turned: bool
    parted: bool
    halves: int
    pads: tuple[int, int]
    sizes: dict[str, torch.Size]


def prepare(experts: Any) -> None:
    """Brings frozen weights and biases of experts to the prepared layout, in place; a second call does nothing.

    The layout has weights (E, O, I) and gates before ups. Hidden and inner sizes above 128 are padded with zeros to
    multiples of 128. The TPU compiler takes minutes for a kernel with blocks of 2,880 columns, half a minute for 2,944.
    """
    if hasattr(experts, "form"):
        return
    last = names_of(experts)[1]
    turned, parted = experts.is_transposed, not experts.is_concatenated
    sizes = getattr(experts, last).shape[1:][:: -1 if turned else 1]
    hidden, inner = (-size % _LANES if size > _LANES else 0 for size in sizes)
    shapes = {name: getattr(experts, name).shape for name in names_of(experts)}
    experts.form = _Form(turned, parted, 2 if experts.has_gate else 1, (hidden, inner), shapes)
    if not any((hidden, inner, turned, parted)):
        return
    for name in shaped_names(experts):
        weight = shaped(experts, name, getattr(experts, name).detach())
        setattr(experts, name, torch.nn.Parameter(weight, requires_grad=False))
    experts.is_transposed, experts.is_concatenated = False, True


def shaped_names(experts: Any) -> list[str]:
    """Returns the names of an experts module's two weights and, if it has biases, "NAME_bias"."""
    return [name + end for name in names_of(experts) for end in ("", *["_bias"] * experts.has_bias)]


def shaped(experts: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns weights (E, O, I) or biases (E, O) in the prepared layout, with padding, from `tensor` as in the files.

    E is any number of experts. `experts` is the module after `prepare`; `name` is the name of the weight or bias in it.
    """
    turned, parted, halves, (hidden, inner), _ = experts.form
    is_last = name.removesuffix("_bias") == names_of(experts)[1]
    rows, columns, halves = (hidden, inner, 1) if is_last else (inner, hidden, halves)
    tensor = tensor.mT if turned and tensor.ndim == 3 else tensor
    parts = [tensor[:, half::halves] if parted else each for half, each in enumerate(tensor.chunk(halves, 1))]
    lined = [torch.nn.functional.pad(part, (*[0, columns] * (part.ndim - 2), 0, rows)) for part in parts]
    return lined[0] if halves == 1 else torch.cat(lined, 1)


def replace(experts: Any, scheme: Any) -> None:
    """Prepares experts, and replaces each weight NAME by uninitialized buffers NAME and NAME_scale of a `Scheme`.

    The buffers have the shapes of `quantize` with a leading dimension E, on the weights' device. Biases stay.
    """
    prepare(experts)
    for name in names_of(experts):
        weight = getattr(experts, name)
        stored = scheme.stored(*weight.shape[1:])
        if scheme.bits == 4:
            groups = scale_groups(weight.shape[2], scheme.group)
            stored["scale"] = ((2, groups, weight.shape[1]), stored["scale"][1])
        delattr(experts, name)
        for end, (shape, dtype) in zip(("", "_scale"), stored.values(), strict=True):
            empty = torch.empty((len(weight), *shape), dtype=dtype, device=weight.device)
            experts.register_buffer(name + end, empty)
    experts.scheme = scheme


def count_integers(model: torch.nn.Module) -> int:
    """Returns the number of quantized weights in a model's experts; all layers of a stack count. 0 if not quantized."""
    stored = [(part, getattr(part, name)) for _, part in modules_of(model) if hasattr(part, "scheme")
              for name in names_of(part)]  # fmt: skip
    return sum(weight.numel() * 8 // part.scheme.bits for part, weight in stored)
