"""Layers with a state along the row: the gated delta rule, Mamba 2 and short convolutions, within packed documents.

transformers uses operations that XLA lacks, and lets a document see the previous document. The kit loops over chunks of
the row, forward and backward, with static shapes, and `segment_ids` separate the documents. Qwen3.5, Qwen3-Next, LFM2,
Granite 4 hybrids, Bamba, Falcon H1 and Nemotron-H have such layers.

Decays between tokens of two documents are 0, and a chunk's initial state applies only to tokens of the document that
spans the chunk's border. The backward loop recomputes every chunk from its initial state, so a layer's backward pass
holds a single chunk and the states between chunks, (N, B, H, K, V) in fp32. The layers call global functions of their
modules; `connect` replaces these by functions that read the documents and the cache of `layer_inputs`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from tpu_kit.model.loop import layer_inputs
from tpu_kit.model.loop.activation_checkpointing import recomputed_scan
from tpu_kit.xla.scan import Tensors, Tree

CHUNK = 64
"""Tokens of a chunk, a power of 2."""
_EPSILON = 1e-6  # in the norm of queries and keys, as in transformers
Step = Callable[..., tuple[torch.Tensor, torch.Tensor]]
sizes_of_states: ContextVar[list[tuple[int, int, int]] | None] = ContextVar("sizes_of_states", default=None)
"""If set, a list that collects the sizes (H, K, V) of every computed state."""


# --------------------------------------------------------------------------------------------------------------- chunks


def delta_step(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    segment: torch.Tensor,
    before: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the gated delta rule (arXiv 2412.06464) for a chunk of C tokens, C a power of 2.

    Normalizes query and key first, and scales the query by 1 / sqrt(K). Computes in fp32.

    Args:
        state: (B, H, K, V) fp32, before the chunk; only tokens of the document `before` read it.
        query: (B, C, h, K); a head is shared by H / h consecutive heads of the values.
        key: (B, C, h, K).
        value: (B, C, H, V).
        decay: (B, C, H) logs, at most 0.
        beta: (B, C, H), between 0 and 1.
        segment: (B, C) int32, the document of every token.
        before: (B,) int32, the document of the token before the chunk.

    Returns:
        The state (B, H, K, V) after the chunk, of the last token's document; and the output (B, C, H, V); both fp32.
    """
    heads = value.shape[2]
    query, key, value = (_by_head(one, heads) for one in (query, key, value))
    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    weight = beta.float().transpose(1, 2)[..., None]  # (B, H, C, 1)
    total = decay.float().transpose(1, 2).cumsum(-1)
    pairs, inherits, to_end, stays = _decays(total, total[..., :, None] - total[..., None, :], segment, before)
    written = key * weight
    inverse = unit_lower_inverse(((written @ key.transpose(-1, -2)) * pairs).tril(-1))
    new = inverse @ (value * weight - (written * inherits) @ state)
    output = (query * inherits) @ state + ((query @ key.transpose(-1, -2)) * pairs) @ new
    return state * stays + (key * to_end).transpose(-1, -2) @ new, output.transpose(1, 2)


def mamba_step(
    state: torch.Tensor,
    given: torch.Tensor,
    key: torch.Tensor,
    query: torch.Tensor,
    decay: torch.Tensor,
    segment: torch.Tensor,
    before: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes Mamba 2 (arXiv 2405.21060) for a chunk, without normalizing and scaling; for the rest see `delta_step`.

    In Mamba's terms, `given` is x * dt (B, C, H, P), `key` is B and `query` C (B, C, G, N), and `decay` is A * dt
    (B, C, H). A group is shared by H / G consecutive heads. The state is (B, H, N, P), the output (B, C, H, P).
    """
    given, key, query = (_by_head(one, given.shape[2]) for one in (given, key, query))
    decay = decay.float().transpose(1, 2)
    place = torch.arange(decay.shape[-1], device=decay.device)
    # Decays are large, so differences of their cumulative sums would lose digits.
    between = torch.where(place[:, None] > place[None, :], decay[..., None], 0.0).cumsum(-2)
    pairs, inherits, to_end, stays = _decays(decay.cumsum(-1), between, segment, before)
    output = (query * inherits) @ state + ((query @ key.transpose(-1, -2)) * pairs) @ given
    return state * stays + (key * to_end).transpose(-1, -2) @ given, output.transpose(1, 2)


def _by_head(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Converts (B, C, h, D) to (B, heads, C, D) in fp32, and repeats every head heads / h times."""
    tensor = tensor.float().transpose(1, 2)
    batch, have, length, width = tensor.shape
    if have == heads:
        return tensor
    return tensor[:, :, None].expand(batch, have, heads // have, length, width).reshape(batch, heads, length, width)


def _unit(tensor: torch.Tensor) -> torch.Tensor:
    """Divides vectors (..., D) by their Euclidean norm."""
    return tensor * torch.rsqrt((tensor * tensor).sum(-1, keepdim=True) + _EPSILON)


def _decays(
    total: torch.Tensor, between: torch.Tensor, segment: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Returns the decays of a chunk, which are 0 between documents.

    Args:
        total: (B, H, C), log decay summed up to and including a token.
        between: (B, H, C, C), log decay summed from after the token of the last axis to the token of the axis before.
        segment: see `delta_step`.
        before: see `delta_step`.

    Returns:
        Four decays: between tokens (B, H, C, C), of the initial state at a token (B, H, C, 1), of a token at the end
        (B, H, C, 1), and over the chunk (B, H, 1, 1).
    """
    place, last = torch.arange(segment.shape[1], device=segment.device), segment[:, -1:]
    seen = (segment[:, :, None] == segment[:, None, :]) & (place[:, None] >= place[None, :])
    # Masks before the exponential, which would overflow above the diagonal and have NaN gradients.
    pairs = torch.where(seen[:, None], between, float("-inf")).exp()
    inherits = torch.where((segment == before[:, None])[:, None], total.exp(), 0.0)
    stays = torch.where((before[:, None] == last)[:, None], total[..., -1:].exp(), 0.0)
    return pairs, inherits[..., None], pairs[..., -1, :, None], stays[..., None]


def unit_lower_inverse(strict: torch.Tensor) -> torch.Tensor:
    """Returns the inverse of I + strict, for strictly lower triangular (..., C, C); C is a power of 2.

    Let X be the inverse of the diagonal blocks of size m, and L the entries between neighbouring blocks. Then X - X L X
    is the inverse of the blocks of size 2m. A product of powers of the matrix takes as many products, but for equal
    keys (a repeated token) its terms cancel, and it loses all digits.
    """
    return _Inverse.apply(strict)


class _Inverse(torch.autograd.Function):
    """`unit_lower_inverse`, which saves only its result."""

    @staticmethod
    def forward(ctx: Any, strict: torch.Tensor) -> torch.Tensor:
        size = strict.shape[-1]
        place = torch.arange(size, device=strict.device)
        # The highest bit in which row and column differ is the size of the blocks in which they are neighbours.
        differ = place[:, None] ^ place[None, :]
        found, block = torch.eye(size, dtype=strict.dtype, device=strict.device), 1
        while block < size:
            between = torch.where((differ >= block) & (differ < 2 * block), strict, 0.0)
            found = found - (between if block == 1 else found @ between @ found)
            block *= 2
        ctx.save_for_backward(found)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ upstream @ turned).tril(-1)


def _over_chunks(
    step: Step, sizes: tuple[int, int, int], dtype: torch.dtype, tensors: Tensors, segment_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs (B, S, H, V) in `dtype` and the last state (B, H, K, V) in fp32 of a loop over chunks.

    The first state is 0. `step` is `delta_step` or `mamba_step`, `sizes` are (H, K, V), `tensors` (B, S, ...) are the
    inputs of `step` between state and `segment`; `segment_ids` is (B, S). Appends `sizes` to `sizes_of_states`, if set.
    """
    batch, length = segment_ids.shape
    if (recorded := sizes_of_states.get()) is not None:
        recorded.append(sizes)
    padding = -length % CHUNK

    def chunks(tensor: torch.Tensor) -> torch.Tensor:
        tensor = F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, padding)) if padding else tensor
        return tensor.unflatten(1, (-1, CHUNK)).transpose(0, 1)

    segments = chunks(segment_ids.to(torch.int32))
    before = torch.cat([segments[:1, :, 0], segments[:, :, -1]])[:-1]  # XLA has no empty slices
    state = torch.zeros(batch, *sizes, device=segment_ids.device)

    def body(carry: Tree, _: Tree, slices: Tree) -> tuple[Tree, Tree]:
        after, output = step(*carry, *slices)
        return [after], output.to(dtype)

    # The meta device has no autocast.
    in_fp32 = contextlib.nullcontext() if state.is_meta else torch.autocast(state.device.type, enabled=False)
    with in_fp32:
        output, last = recomputed_scan(body, [state], {}, [*map(chunks, tensors), segments, before])
    return output.transpose(0, 1).flatten(1, 2)[:, :length], last


# ----------------------------------------------------------------------------------------------------------------- rows


class _Conv(torch.autograd.Function):
    """The convolution of `_conv`; saves only its inputs. Gradients are shifted products too, which XLA fuses."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None,
        segment_ids: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.activation = activation
        ctx.save_for_backward(hidden, weight, bias, segment_ids)
        return _activated(_convolved(hidden, weight, bias, segment_ids), activation).to(hidden.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, segment_ids = ctx.saved_tensors
        with torch.enable_grad():
            before = _convolved(hidden, weight, bias, segment_ids).detach().requires_grad_()
            (given,) = torch.autograd.grad(_activated(before, ctx.activation), before, upstream.float())
        given = given.to(hidden.dtype)  # otherwise XLA stores it in fp32, and reads it per tap
        taps = range(min(weight.shape[1], hidden.shape[2]))
        factors = weight.float().flip(1)
        first = sum(_shifted(given, -back, segment_ids).float() * factors[:, back, None] for back in taps)
        second = third = None
        if ctx.needs_input_grad[1]:
            each = [(_shifted(hidden, back, segment_ids).float() * given).sum((0, 2)) for back in taps]
            missing = [torch.zeros_like(each[0])] * (weight.shape[1] - len(taps))
            second = torch.stack([*each, *missing], 1).flip(1).to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            third = given.float().sum((0, 2)).to(bias.dtype)
        return first.to(hidden.dtype), second, third, None, None


def _convolved(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, segment_ids: torch.Tensor | None
) -> torch.Tensor:
    """Returns the convolution of `_conv` before its activation, in fp32; without segment ids, a row is a document."""
    factors = weight.float().flip(1)
    found = hidden.float() * factors[:, :1]
    for back in range(1, min(weight.shape[1], hidden.shape[2])):
        found = found + _shifted(hidden, back, segment_ids).float() * factors[:, back, None]
    return found if bias is None else found + bias.float()[:, None]


def _shifted(tensor: torch.Tensor, back: int, segment_ids: torch.Tensor | None) -> torch.Tensor:
    """Returns the values of (B, D, S) `back` tokens earlier (later if negative); 0 outside of the document or row."""
    sides, kept = (max(back, 0), max(-back, 0)), slice(max(-back, 0), tensor.shape[2] - max(back, 0))
    if back == 0:
        return tensor
    moved = F.pad(tensor[..., kept], sides)
    if segment_ids is None:
        return moved
    same = F.pad(segment_ids[:, kept], sides, value=-1) == segment_ids
    return torch.where(same[:, None], moved, 0.0)


def _activated(tensor: torch.Tensor, name: str | None) -> torch.Tensor:
    """Applies transformers' activation function `name`; None applies none."""
    from transformers.activations import ACT2FN

    return tensor if name is None else ACT2FN[name](tensor)


# ------------------------------------------------------------------------------ replacements of transformers' functions


def connect(model: torch.nn.Module, frozen: bool = True) -> None:
    """Makes the layers of a transformers model call the functions of this module; a second call does nothing.

    Replaces global functions of the modules that define the layers, so other models of the family get them too. These
    are functions for chunks of the gated delta rule, for Mamba 2, and for convolutions. In a call without segment ids
    and without the kit's cache, transformers' own function runs, except on XLA. `frozen` has no effect.
    """
    for module in map(sys.modules.__getitem__, {type(part).__module__ for part in model.modules()}):
        for name, function in _FUNCTIONS.items():
            own = vars(module).get(name)
            if own is not None and not hasattr(own, "_tpu_kit_replaces"):
                replaced = functools.partial(function, own)
                replaced._tpu_kit_replaces = own  # type: ignore[attr-defined]  # a partial takes attributes
                setattr(module, name, replaced)


def _documents(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Returns segment ids (B, S) for a call with (B, S, ...), and in a prefill the mask (B, S) of tokens, else None.

    Returns None instead of the pair if transformers' own function must run: not on XLA, and neither segment ids nor a
    cache are bound. In a prefill, a row is one document, and the padding at its end must not change the state.
    """
    inputs = layer_inputs.current()
    segment_ids, cache = inputs.visibility.segment_ids, inputs.cache
    if segment_ids is None and cache is None and tensor.device.type != "xla":
        return None
    batch, length = tensor.shape[:2]
    if segment_ids is None:
        segment_ids = torch.zeros(batch, length, dtype=torch.int32, device=tensor.device)
    if cache is None or cache.lengths is None:
        return segment_ids, None
    return segment_ids, torch.arange(length, device=tensor.device) < cache.lengths[:, None]


def _delta(
    own: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    **options: Any,
) -> Any:  # fmt: skip
    """Returns outputs in the dtype of `value`, and the last state, of the gated delta rule over rows.

    For the shapes see `delta_step`, with S tokens for C and `g` for `decay`. Raises ValueError for an initial state or
    unnormalized keys. If `_documents` returns None, returns the result of transformers' function `own` instead.
    """
    documents = _documents(value)
    if documents is None:
        return own(query, key, value, g=g, beta=beta, **options)
    if options.get("initial_state") is not None or not options.get("use_qk_l2norm_in_kernel"):
        raise ValueError("the model continues a state or does not normalize queries and keys: the kit supports neither")
    segments, counts = documents
    if counts is not None:
        g, beta = g * counts[..., None], beta * counts[..., None]
    sizes = value.shape[2], key.shape[3], value.shape[3]
    return _over_chunks(delta_step, sizes, value.dtype, [query, key, value, g, beta], segments)


def _mamba2(
    own: Any, hidden: torch.Tensor, dt: torch.Tensor, rates: torch.Tensor, key: torch.Tensor, query: torch.Tensor,
    **options: Any,
) -> Any:  # fmt: skip
    """Computes Mamba 2 for x (B, S, H, P), dt (B, S, H), A (H,), B and C (B, S, G, N), in this order.

    Returns outputs like x in fp32; with return_final_states, (outputs, state (B, H, P, N)). Other options are dt_bias,
    dt_softplus, dt_limit and D. Raises ValueError for an initial state or a gate z. If `_documents` returns None,
    returns the result of transformers' function `own` instead.
    """
    documents = _documents(hidden)
    if documents is None:
        return own(hidden, dt, rates, key, query, **options)
    if options.get("initial_states") is not None or options.get("z") is not None:
        raise ValueError("the model continues a state, or gates within the scan: the kit supports neither")
    segments, counts = documents
    if (bias := options.get("dt_bias")) is not None:
        dt = dt + bias.to(dt.dtype)
    dt = F.softplus(dt) if options.get("dt_softplus") else dt
    dt = dt.clamp(*options.get("dt_limit", (0.0, float("inf"))))
    dt = dt if counts is None else dt * counts[..., None]
    sizes, dt = (hidden.shape[2], key.shape[3], hidden.shape[3]), dt.float()
    tensors = [hidden.float() * dt[..., None], key, query, rates.float() * dt]
    output, state = _over_chunks(mamba_step, sizes, torch.float32, tensors, segments)
    if (skip := options.get("D")) is not None:
        output = output + skip[:, None] * hidden.float()
    return (output, state.transpose(2, 3)) if options.get("return_final_states") else output


def _mamba2_step(
    own: Any, *tensors: torch.Tensor, dt_bias: torch.Tensor | None = None, dt_softplus: bool = False, **options: Any
) -> Any:
    """Calls transformers' decode step `own` with dt clamped to the cache's `time_limits`, if set, as in a prefill."""
    cache = layer_inputs.current().cache
    if cache is not None and cache.time_limits is not None:
        state, hidden, dt, *rest = tensors
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*cache.time_limits)
        tensors, dt_bias, dt_softplus = (state, hidden, dt, *rest), None, False
    return own(*tensors, dt_bias=dt_bias, dt_softplus=dt_softplus, **options)


def _conv(
    own: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Computes a depthwise causal convolution within the bound documents, as shifted products in fp32.

    Args:
        own: transformers' function; runs instead in a call without segment ids, except on XLA.
        hidden: (B, D, S).
        weight: (D, taps); the last tap multiplies the token itself.
        bias: (D,), or None.
        activation: transformers' name of the activation after the convolution; None for no activation.
        **options: options of transformers' function.

    Returns:
        The result (B, D, S) in the dtype of `hidden`.
    """
    segment_ids = layer_inputs.current().visibility.segment_ids
    if segment_ids is None and hidden.device.type != "xla":
        result: torch.Tensor = own(hidden, weight, bias, activation=activation, **options)
    else:
        result = _Conv.apply(hidden, weight, bias, activation, segment_ids)
    return result


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta, "mamba2_chunk_scan": _mamba2, "causal_conv1d_fn": _conv,
    "mamba2_selective_state_update": _mamba2_step,
}  # fmt: skip
