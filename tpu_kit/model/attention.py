"""Attention within the documents of a packed row, registered in transformers' `AttentionInterface`.

"tpu_kit" is scaled-dot-product attention with a block-diagonal causal mask, for any device. "tpu_kit_splash" is in
`splash_attention`.

No implementation reads a tensor on the host: masks are computed from `segment_ids` on the device. `bound` makes the
mask and binds the layers' other inputs. With only `position_ids`, transformers would read them on the host to find
packed documents.

In rows of more than `splash_blocks.WHOLE` tokens, "tpu_kit" computes one block of queries at a time and recomputes it
in the backward pass, so no (S, S) mask or scores exist. A GPU does not need this: PyTorch's kernels store no scores.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tpu_kit.config.mesh import BATCH
from tpu_kit.model.loop import activation_checkpointing, layer_inputs
from tpu_kit.model.loop.layer_inputs import PLAIN, LayerInputs, Visibility
from tpu_kit.xla.sharding import PER_TOKEN, constrain, spec_of_keys, token_shards, training_spec
from tpu_kit.xla.splash_blocks import query_block
from tpu_kit.xla.traced_program import is_lowering_for_tpu, kernels_on, runs_kernels

SDPA = "tpu_kit"
SPLASH = "tpu_kit_splash"

_IGNORED = {
    "position_ids",  # already applied by the rotary embedding
    "use_cache", "output_attentions", "output_hidden_states", "output_router_logits",  # options of the decoder
    "num_items_in_batch",  # for the loss
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",  # documents, redundant to segment_ids
    "deterministic",  # for CUDA kernels
}  # fmt: skip
"""Arguments that models of transformers 5.15 to 5.24 pass to attention, without effect on its result."""


def connect(model: torch.nn.Module, frozen: bool) -> None:
    """Registers "tpu_kit" in transformers, whatever the arguments; see `families.registry`."""
    register()


def register() -> None:
    """Registers "tpu_kit" in transformers; a second call does nothing."""
    register_function(SDPA, sdpa_attention)


def register_function(name: str, function: Callable[..., Any]) -> None:
    """Registers an attention function in transformers by `name`, in place of an earlier function of that name.

    transformers calls `function(module, query, key, value, mask, **options)`, which returns (output, None). A call also
    gets the keyword `visibility`, the `Visibility` that is bound in the thread. If transformers makes the mask, it is
    boolean and never None.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, functools.partial(_with_visibility, function))
    # Without a mask function, transformers silently drops a padding mask.
    AttentionMaskInterface.register(name, _mask_without_host_read)


def choose(attention: str, device_type: str) -> str:
    """Selects the registered implementation for a device.

    Args:
        attention: "splash", "sdpa" or "auto". "auto" chooses splash on a TPU, and on all devices while this process
            lowers a program for TPU (`traced_program.lowering_for_tpu`); otherwise it chooses sdpa.
        device_type: "tpu", "torch-tpu", "xla-cpu", "cuda" or "cpu". A TPU is "tpu", or "torch-tpu" without the tests'
            plugin for the CPU.

    Returns:
        The registered name: "tpu_kit_splash" for splash, "tpu_kit" for sdpa.

    Raises:
        ValueError: `attention` is unknown, or it is "splash" and neither the device nor the lowered program is for TPU.
    """
    has_kernel = kernels_on(device_type) or is_lowering_for_tpu()
    if attention == "auto":
        return SPLASH if has_kernel else SDPA
    if attention == "sdpa":
        return SDPA
    if attention != "splash":
        raise ValueError(f"attention is {attention!r}: use auto, splash or sdpa")
    if not has_kernel:
        raise ValueError(
            f"attention=splash is a TPU kernel and this device is {device_type}: use attention=auto, which selects "
            "splash on a TPU and sdpa elsewhere"
        )
    return SPLASH


def _with_visibility(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Calls an attention function with the bound `Visibility`, which transformers does not pass; returns its result."""
    visibility = layer_inputs.current().visibility
    if token_shards() == 1:
        found: tuple[torch.Tensor, None] = function(*args, visibility=visibility, **kwargs)
        return found
    module, *states, mask = args
    # Without PER_TOKEN, the compiler exchanges before the rotary embedding, and exchanges gradients once per product.
    spec = training_spec(states[1].shape[1])
    specs = spec, spec_of_keys(spec), spec_of_keys(spec)
    states = [constrain(constrain(each, PER_TOKEN), one) for each, one in zip(states, specs, strict=True)]
    output, _ = function(module, *states, mask, visibility=visibility, **kwargs)
    output = constrain(output, (BATCH, spec[2], spec[1], None))
    return constrain(output, (BATCH, "context", "model", None)), None


@contextlib.contextmanager
def bound(implementation: str, visibility: Visibility, additions: tuple[torch.Tensor, ...] = ()) -> Iterator[Any]:
    """Makes layers separate the documents of packed rows while the context is open; yields the model's attention_mask.

    Binds `LayerInputs` in this thread. The caller passes the mask to the model; transformers passes a 4-D mask to all
    layers without changing or reading it. For "tpu_kit_splash", and for rows of more than 4,096 tokens except on cuda
    and meta, the mask is a view (B, 1, 1, S) of the segment ids, which attention does not read. Otherwise it is the
    boolean mask (B, 1, S, S) of `Visibility.mask`, true for visible keys. If tokens look ahead, it is a dict of two
    such masks, "full_attention" and "sliding_attention", the second with `looks_ahead`.

    Args:
        implementation: a registered name.
        visibility: visibility of the rows, with segment ids.
        additions: (B, S, H) tensors that the first layers add to their outputs; see `LayerInputs`.
    """
    assert visibility.segment_ids is not None, "packed rows have segment ids"
    maskless = implementation == SPLASH or _in_blocks(visibility.segment_ids.shape[1], visibility.segment_ids.device)
    mask: Any = visibility.segment_ids[:, None, None, :] if maskless else visibility.mask()
    if visibility.ahead is not None and not maskless:
        mask = {"full_attention": mask, "sliding_attention": visibility.mask(looks_ahead=True)}
    with layer_inputs.bound(LayerInputs(visibility, additions=additions)):
        yield mask


def sees_all(model: torch.nn.Module) -> bool:
    """Returns whether all tokens see all earlier tokens at any distance, so that documents may share a prefix.

    False with windows, which count a row's tokens, and with states or convolutions, which read preceding tokens.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]  # of transformers
    kinds = getattr(config, "layer_types", None) or ([] if getattr(config, "sliding_window", None) is None else ["?"])
    return {*kinds} <= {"full_attention"} and not any(isinstance(one, torch.nn.Conv1d) for one in model.modules())


def sdpa_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    visibility: Visibility = PLAIN,
    s_aux: torch.Tensor | None = None,
    causal: bool = True,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention with an explicit mask; transformers calls it.

    Args:
        module: the attention layer.
        query: (B, heads, Q, D).
        key: (B, key-value heads, K, D).
        value: (B, key-value heads, K, D).
        attention_mask: (B, 1, Q, K), boolean (true: visible) or additive. If it is None, or the view from `bound`, the
            mask of `visibility` is used for Q = K; for other Q, a query sees all keys.
        scaling: factor on the scores, default 1 / sqrt(D).
        dropout: must be 0 while training; ignored in evaluation mode.
        sliding_window: number of keys a query sees, including its own. Applied only if Q = K: with a cache, the slot of
            a key is not its position, so the caller's mask must contain the window.
        softcap: c in c * tanh(scores / c), before the mask.
        visibility: used only without a mask. Without segment ids, a row is one document.
        s_aux: (heads,) sinks: the scores of an additional key with value zero.
        causal: False lets a token see all tokens of its segment; used only without a mask.
        **kwargs: other arguments of the model.

    Returns:
        The output (B, Q, heads, D) in the dtype of `value`, and None in place of the attention weights.

    Raises:
        ValueError: from `refuse_unknown` for `kwargs`, or from `refuse_dropout`.
    """
    refuse_unknown(kwargs)
    refuse_dropout(module, dropout)
    rows, columns = query.shape[2], key.shape[2]
    query, key = as_value(query, key, value)
    attend = functools.partial(_attend, scaling=scaling, softcap=softcap)
    of_visibility = attention_mask is None or attention_mask.shape[2] < rows
    if of_visibility and rows == columns and visibility.segment_ids is None:
        ones = torch.ones(query.shape[0], rows, dtype=torch.int32, device=query.device)
        visibility = visibility._replace(segment_ids=ones)
    if of_visibility and rows == columns and _in_blocks(rows, query.device):
        output = _attention_in_blocks(attend, query, key, value, s_aux, visibility, sliding_window, causal)
        return activation_checkpointing.keep(output.transpose(1, 2).contiguous()), None
    if attention_mask is None and rows == columns:
        segment_ids = visibility.segment_ids
        assert segment_ids is not None
        if causal:
            attention_mask = visibility.mask(sliding_window is not None)
        else:
            attention_mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    if sliding_window is not None and rows == columns and sliding_window < columns:
        assert attention_mask is not None
        attention_mask = _and_window(attention_mask, sliding_window)
    output = attend(query, key, value, attention_mask, s_aux)
    return activation_checkpointing.keep(output.transpose(1, 2).contiguous()), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Computes attention (B, heads, Q, D) by PyTorch's function; with softcap or sinks, by `_attention_of_scores`.

    The arguments are as in `sdpa_attention`; without a mask, a query sees all keys.
    """
    key, value = _repeat_heads(key, query.shape[1]), _repeat_heads(value, query.shape[1])
    # TorchTPU compiles the function to a kernel, which its CPU plugin cannot run.
    has_function = query.device.type != "tpu" or runs_kernels(query)
    if softcap is None and sinks is None and has_function:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return _attention_of_scores(query, key, value, mask, scaling, softcap, sinks)


def _in_blocks(length: int, device: torch.device) -> bool:
    """Returns whether attention without a kernel is computed in blocks of queries: long rows, not on cuda or meta."""
    return query_block(length) < length and device.type not in ("cuda", "meta")


def _attention_in_blocks(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    visibility: Visibility,
    window: int | None,
    causal: bool,
) -> torch.Tensor:
    """Computes attention like `sdpa_attention`, one block of queries at a time; returns (B, heads, S, D).

    `attend(query, key, value, mask, sinks)` computes a block; `visibility` has segment ids. The gradients of keys and
    values are accumulated over the blocks in fp32.
    """
    length, dtype = query.shape[2], value.dtype
    block = query_block(length)
    count = -(-length // block)
    # Copies of the last token fill the last block, because the softmax of a query without visible keys is undefined.
    places = torch.arange(count * block, device=query.device).clamp(max=length - 1)
    rows = {name: one for name, one in visibility._asdict().items() if isinstance(one, torch.Tensor)}
    wide = torch.promote_types(dtype, torch.float32)
    constants = {"key": key.to(wide), "value": value.to(wide)} | rows
    constants |= {} if sinks is None else {"sinks": sinks}
    blocks = query.index_select(2, places).unflatten(2, (count, block)).movedim(2, 0)
    inputs = [blocks, places.view(count, block)]
    inputs += [one.index_select(1, places).unflatten(1, (count, block)).movedim(1, 0) for one in rows.values()]

    def body(carry: Any, fixed: Any, slices: Any) -> tuple[Any, torch.Tensor]:
        of_block, here, *integers = slices
        every = visibility._replace(**{name: fixed[name] for name in rows})
        mine = visibility._replace(**dict(zip(rows, integers, strict=True)))
        if causal:
            mask = every.mask_of(mine, here, window is not None)
        else:
            mask = integers[0][:, None, :, None] == fixed["segment_ids"][:, None, None, :]
        if window is not None and window < length:
            mask = mask & (here[:, None] - torch.arange(length, device=here.device) < window)
        found = attend(of_block, fixed["key"].to(dtype), fixed["value"].to(dtype), mask, fixed.get("sinks"))
        return carry, found

    (output,) = activation_checkpointing.recomputed_scan(body, [], constants, inputs)
    return output.movedim(0, 2).flatten(2, 3)[:, :, :length]


def _attention_of_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Computes attention (B, heads, Q, D) like `_attend`, with explicit scores; keys have as many heads as queries."""
    scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = weights_of(scores, None if sinks is None else sinks[:, None, None])
    return torch.matmul(weights.to(value.dtype), value)


def weights_of(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Returns the fp32 softmax (..., K) of scores; sinks, broadcast to (..., 1), are an additional, dropped column."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    column = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores.float(), column], -1), -1)[..., :-1]


def _and_window(mask: torch.Tensor, window: int) -> torch.Tensor:
    """Restricts a boolean or additive mask (..., S, S): a query does not see keys `window` or more tokens earlier."""
    index = torch.arange(mask.shape[-1], device=mask.device)
    near = index[:, None] - index[None, :] < window
    return mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, torch.finfo(mask.dtype).min)


def as_value(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts query and key to the value's dtype: with autocast and fp32 weights, the rotary embedding returns fp32."""
    return query.to(value.dtype), key.to(value.dtype)


def _repeat_heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeats each head of (B, h, S, D) heads / h times in a row: (B, heads, S, D)."""
    batch, have, length, head_dim = states.shape
    if have == heads:
        return states
    repeated = states[:, :, None].expand(batch, have, heads // have, length, head_dim)
    return repeated.reshape(batch, heads, length, head_dim)


def refuse_unknown(kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments of a model's attention that may change its result and are not implemented here.

    `kwargs` maps names to values; the text names all refused arguments. None passes for every name. True passes for
    is_causal, and any value for names in `_IGNORED`, such as position_ids.
    """
    unknown = [
        f"{name}={value}" if isinstance(value, bool) else name
        for name, value in kwargs.items()
        if value is not None and name not in _IGNORED and not (name == "is_causal" and value is True)
    ]
    if unknown:
        raise ValueError(
            f"the model passes {', '.join(unknown)} to its attention, and the kit's attention does not implement that"
        )


def refuse_dropout(module: torch.nn.Module, dropout: float) -> None:
    """Raises ValueError if dropout of attention weights is not 0 and the attention layer `module` is in training."""
    if dropout and module.training:
        names = [name for name in vars(getattr(module, "config", module)) if re.match("att.*drop", name)]
        name = names[0] if names else "attention_dropout"
        raise ValueError(
            f"the model's config asks for {name}={dropout}: set it to 0 in its config.json (lora.dropout is separate)"
        )


def _mask_without_host_read(**kwargs: Any) -> torch.Tensor:
    """Always makes transformers' boolean mask, because the check whether it can be omitted reads the device."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(**{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
