"""Attention that keeps packed documents apart, through transformers' `AttentionInterface`.

Three implementations are registered. "tpu_kit" is scaled-dot-product attention with a block-diagonal causal mask, for
any device. "tpu_kit_splash" is the Pallas kernel in `splash`, for TPU. "tpu_kit_pallas" is the flash kernel of
torch_xla, for TPU; where a layer needs what that kernel lacks (a soft cap on the scores, a sliding window shorter than
the row) it takes the first one.

Neither ever reads a tensor on the host: the masks come from `segment_ids` on the device. Call `inputs` to get the
arguments that make a transformers model do so (with position_ids alone it looks for packed documents by reading them).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tpu_kit.models import activation_checkpointing
from tpu_kit.models import splash_attention as splash_attention_module
from tpu_kit.xla import pallas
from tpu_kit.xla.pallas import SplashSettings

SDPA = "tpu_kit"
FLASH = "tpu_kit_pallas"  # with "flash" in the name transformers would look for a CUDA kernel on the hub
SPLASH = "tpu_kit_splash"
KERNELS = {"flash": FLASH, "splash": SPLASH}
"""Of TPU, by the name that `model.attention` has for them."""

_NOT_READ = {
    "position_ids": "the rotary embedding has used them; stock kernels look for packed documents in them",
    "use_cache": "of the decoder",
    "output_attentions": "no weights are returned, as by transformers' own sdpa",
    "output_hidden_states": "of the decoder",
    "output_router_logits": "of the decoder",
    "num_items_in_batch": "of the loss",
    "cu_seq_lens_q": "documents of a packed row, which the segment ids tell",
    "cu_seq_lens_k": "documents of a packed row, which the segment ids tell",
    "max_length_q": "documents of a packed row, which the segment ids tell",
    "max_length_k": "documents of a packed row, which the segment ids tell",
    "seq_idx": "documents of a packed row, which the segment ids tell",
    "deterministic": "of the CUDA kernel's backward pass",
}
"""Arguments that models of transformers 5.15 and 5.23 pass to attention and that change no result here, and why."""

_lowering_for_tpu = False


def register() -> None:
    """Makes the implementations known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(SDPA, sdpa_attention)
    AttentionInterface.register(FLASH, flash_attention)
    AttentionInterface.register(SPLASH, splash_attention)
    # Without a mask function transformers drops a padding mask without a word.
    for name in (SDPA, FLASH, SPLASH):
        AttentionMaskInterface.register(name, _mask_without_host_read)


def choose(attention: str, device_type: str) -> str:
    """Picks the registered implementation for a device.

    Args:
        attention: "auto", "splash", "flash" or "sdpa".
        device_type: "tpu", "xla-cpu", "cuda" or "cpu".

    Returns:
        The registered name.

    Raises:
        ValueError: if a TPU kernel is asked of a device that has no TPU and nothing is being lowered for one.
    """
    has_kernel = device_type == "tpu" or _lowering_for_tpu
    if attention == "auto":
        return SPLASH if has_kernel else SDPA
    if attention == "sdpa":
        return SDPA
    if attention not in KERNELS:
        raise ValueError(f"attention is {attention!r}: use auto, splash, flash or sdpa")
    if not has_kernel:
        raise ValueError(
            f"attention={attention} is a TPU kernel and this device is {device_type}: use attention=auto, which takes "
            "splash on a TPU and sdpa elsewhere"
        )
    return KERNELS[attention]


def inputs(implementation: str, segment_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Makes the keyword arguments that give a transformers model its mask, once for all layers.

    Args:
        implementation: a registered name.
        segment_ids: (B, S) integers, the number of the document of each token; 0 = padding.

    Returns:
        attention_mask and segment_ids. A 4-D attention_mask goes through transformers untouched and unread: the boolean
        block-diagonal mask (B, 1, S, S) for sdpa; a view of the segment ids (B, 1, 1, S) for a kernel, unused there.
    """
    if implementation in KERNELS.values():
        return {"attention_mask": segment_ids[:, None, None, :], "segment_ids": segment_ids}
    return {"attention_mask": block_diagonal_mask(segment_ids), "segment_ids": segment_ids}


def block_diagonal_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """Says which token sees which: those before it in its own document.

    Padding (segment 0) sees padding, so that no row is fully masked: softmax over nothing is NaN.

    Args:
        segment_ids: (B, S) integers.

    Returns:
        (B, 1, S, S) booleans, True where the query (third axis) sees the key (last axis).
    """
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return same & (index[:, None] >= index[None, :])


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
    segment_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with an explicit mask, as transformers calls it.

    Args:
        module: the attention layer.
        query: (B, heads, Q, D).
        key: (B, key-value heads, K, D).
        value: (B, key-value heads, K, D).
        attention_mask: (B, 1, Q, K), boolean or additive, or None for causal within `segment_ids`.
        scaling: factor on the scores, default 1 / sqrt(D).
        dropout: must be 0 while training.
        sliding_window: number of keys a query sees, itself included. Applied only if Q = K: with a cache the slot of a
            key is not its position, and the caller's mask has to hold the window.
        softcap: c in c * tanh(scores / c), before the mask.
        segment_ids: (B, S) documents, read only if there is no mask.
        **kwargs: what else the model passes on.

    Returns:
        (B, Q, heads, D) and None in place of the attention weights.

    Raises:
        ValueError: the model passes an argument that this function does not know.
    """
    refuse_unknown(kwargs)
    _refuse_dropout(module, dropout)
    rows, columns = query.shape[2], key.shape[2]
    query, key = _as_value(query, key, value)
    key, value = _repeat_heads(key, query.shape[1]), _repeat_heads(value, query.shape[1])
    if attention_mask is None and rows == columns:
        if segment_ids is None:
            segment_ids = torch.ones(1, rows, dtype=torch.int32, device=query.device)
        attention_mask = block_diagonal_mask(segment_ids)
    if sliding_window is not None and rows == columns and sliding_window < columns:
        assert attention_mask is not None
        attention_mask = _and_window(attention_mask, sliding_window)
    if softcap is None:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        output = _capped_attention(query, key, value, attention_mask, scaling, softcap)
    return activation_checkpointing.keep(output.transpose(1, 2).contiguous()), None


def _capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value)


def _and_window(mask: torch.Tensor, window: int) -> torch.Tensor:
    index = torch.arange(mask.shape[-1], device=mask.device)
    near = index[:, None] - index[None, :] < window
    return mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, torch.finfo(mask.dtype).min)


def flash_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    segment_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The Pallas flash kernel, as transformers calls it; arguments and result as in `sdpa_attention`.

    Without `segment_ids` (generation, a plain forward), with a soft cap or with a window shorter than the row it is
    `sdpa_attention`.
    """
    length, head_dim = query.shape[2], query.shape[3]
    windowed = sliding_window is not None and sliding_window < length
    if segment_ids is None or length != key.shape[2] or windowed or softcap is not None:
        mask = None if segment_ids is not None else _own_mask(attention_mask)
        return sdpa_attention(
            module, query, key, value, mask, scaling, dropout, sliding_window, softcap, segment_ids, **kwargs
        )
    refuse_unknown(kwargs)
    _refuse_dropout(module, dropout)
    query, key = _as_value(query, key, value)
    scaling = head_dim**-0.5 if scaling is None else scaling
    heads = query.shape[1]
    padding = padded_length(length) - length
    query, key, value = (
        F.pad(states, (0, 0, 0, padding)) if padding else states
        for states in (query, _repeat_heads(key, heads), _repeat_heads(value, heads))
    )
    segments = F.pad(segment_ids, (0, padding)) if padding else segment_ids
    output = pallas.flash_attention(query, key, value, segments.to(torch.int32), scaling)
    return output[:, :, :length].transpose(1, 2).contiguous(), None


def splash_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    segment_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The Pallas kernel of `splash`, as transformers calls it; arguments and result as in `sdpa_attention`.

    Without `segment_ids` (generation, a plain forward) it is `sdpa_attention`.
    """
    length, head_dim = query.shape[2], query.shape[3]
    if segment_ids is None or length != key.shape[2]:
        mask = None if segment_ids is not None else _own_mask(attention_mask)
        return sdpa_attention(
            module, query, key, value, mask, scaling, dropout, sliding_window, softcap, segment_ids, **kwargs
        )
    refuse_unknown(kwargs)
    _refuse_dropout(module, dropout)
    query, key = _as_value(query, key, value)
    query = query * (head_dim**-0.5 if scaling is None else scaling)
    padding = padded_length(length) - length
    query, key, value = (F.pad(each, (0, 0, 0, padding)) if padding else each for each in (query, key, value))
    segments = F.pad(segment_ids, (0, padding)) if padding else segment_ids
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    settings = SplashSettings(window, softcap)
    output = splash_attention_module.splash_attention(query, key, value, segments.to(torch.int32), settings)
    return output[:, :, :length].transpose(1, 2).contiguous(), None


def padded_length(length: int) -> int:
    """Rounds a row up to what all blocks of the kernel divide: 128, 256, 512 or a multiple of 1024 tokens."""
    return next((block for block in (128, 256, 512) if length <= block), -(-length // 1024) * 1024)


def _as_value(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts to the dtype of the value: under autocast with fp32 weights the rotary embedding makes the others fp32."""
    return query.to(value.dtype), key.to(value.dtype)


def _repeat_heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    batch, have, length, head_dim = states.shape
    if have == heads:
        return states
    repeated = states[:, :, None].expand(batch, have, heads // have, length, head_dim)
    return repeated.reshape(batch, heads, length, head_dim)


def _own_mask(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask of a call without segment ids; not the view of them that `inputs` gives to kernels."""
    if attention_mask is not None and not (attention_mask.is_floating_point() or attention_mask.dtype == torch.bool):
        raise ValueError("the model does not pass its keyword arguments, the segment ids, on to its attention")
    return attention_mask


def refuse_unknown(kwargs: Mapping[str, Any]) -> None:
    """Makes sure that no argument of a model's attention is passed over that would change the result.

    Raises:
        ValueError: there is one; its text names it.
    """
    unknown = [
        f"{name}={value}" if isinstance(value, bool) else name
        for name, value in kwargs.items()
        if value is not None and name not in _NOT_READ and not (name == "is_causal" and value is True)
    ]
    if unknown:
        raise ValueError(
            f"the model passes {', '.join(unknown)} to its attention, and the kit's attention does not implement that"
        )


def _refuse_dropout(module: torch.nn.Module, dropout: float) -> None:
    if dropout and module.training:
        raise ValueError(
            f"the model's config asks for attention_dropout={dropout}: set it to 0 (lora.dropout is separate)"
        )


def _mask_without_host_read(**kwargs: Any) -> torch.Tensor:
    """The boolean mask of transformers, always built: the shortcut that leaves it out reads the padding mask."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(**{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


@contextlib.contextmanager
def lowering_for_tpu() -> Iterator[None]:
    """While open, a process on XLA:CPU traces the flash kernel into a program for the TPU compiler.

    The program cannot run on the CPU.
    """
    global _lowering_for_tpu
    _lowering_for_tpu = True
    try:
        yield
    finally:
        _lowering_for_tpu = False
