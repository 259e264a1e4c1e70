"""The key/value cache of generation, and attention over it, for any model of transformers.

The keys and values of a layer are two tensors (B, key-value heads, slots, head size); see `Buffers`. A slot holds one
token. Row i has a prompt of n_i tokens, padded on the right to the width P of the batch: key j < n_i is in slot j, and
the mask hides the other slots up to P. Step t writes the keys of all rows into slot P + t, at position n_i + t. So all
rows write to the same slot, and the mask is a function of n, P and t, which are inputs of the program: one decode
program serves all lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tpu_kit.models import attention
from tpu_kit.models.decode_sharding import heads_spec
from tpu_kit.xla.sharding import constrain

CACHED = "tpu_kit_cached"


class Buffers(NamedTuple):
    """Keys and values of each layer, (B, key-value heads, slots, head size) each."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def slots(self) -> int:
        """Length of the cache."""
        return self.keys[0].shape[2]


class Recorder:
    """Replaces transformers' cache in the prefill, and records the keys and values of the prompts."""

    def __init__(self) -> None:
        self.buffers = Buffers([], [])

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """Stores keys and values and returns those to attend to; called by the layers of transformers."""
        assert layer == len(self.buffers.keys), "layers come in order"
        self.buffers.keys.append(key)
        self.buffers.values.append(value)
        return key, value


class Slots:
    """Replaces transformers' cache in a decode step, and makes the mask over its slots.

    Args:
        buffers: the cache; its lists get the results of `write`.
        lengths: (B,) int64, n: the number of keys of each prompt.
        width: (1,) int64, P.
        step: (1,) int64, t.
        write: returns a buffer with new keys (B, heads, 1, D) in a slot (1,).
    """

    def __init__(
        self,
        buffers: Buffers,
        lengths: torch.Tensor,
        width: torch.Tensor,
        step: torch.Tensor,
        write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self.buffers, self._lengths, self._width, self._step = buffers, lengths[:, None], width, step
        self._write = write
        self._masks: dict[int | None, torch.Tensor] = {}

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """Stores keys and values and returns those to attend to; called by the layers of transformers."""
        for buffers, new in zip(self.buffers, (key, value), strict=True):
            buffers[layer] = self._write(buffers[layer], new.to(buffers[layer].dtype), self._width + self._step)
        return self.buffers.keys[layer], self.buffers.values[layer]

    def mask(self, window: int | None) -> torch.Tensor:
        """Returns the mask (B, 1, 1, slots) of the new token, boolean. Cached by window."""
        if window not in self._masks:
            slot = torch.arange(self.buffers.slots, device=self._lengths.device)[None]
            seen = (slot < self._lengths) | ((slot >= self._width) & (slot <= self._width + self._step))
            if window is not None:
                position = torch.where(slot < self._width, slot, self._lengths + slot - self._width)
                seen = seen & (self._lengths + self._step - position < window)
            self._masks[window] = seen[:, None, None, :]
        return self._masks[window]


def cache_shape(config: Any, slots: int) -> tuple[int, int, int]:
    """Returns (key-value heads, slots, head size) of one row in one layer, from a model's text configuration."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, slots, size


def cache_bytes_per_token(config: Any, element_bytes: int) -> int:
    """Returns the bytes of keys and values of one token of one row, in all layers."""
    heads, _, size = cache_shape(config, 1)
    return int(2 * config.num_hidden_layers * heads * size * element_bytes)


def cached_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cache: Recorder | Slots | None = None,
    device_type: str = "cpu",
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention of a prefill or of one decode step (Q = 1); called by transformers.

    Args:
        module: the attention layer.
        query: (B, heads, Q, D).
        key: (B, key-value heads, K, D).
        value: (B, key-value heads, K, D).
        attention_mask: None; transformers makes none for this function.
        scaling: factor on the scores, default 1 / sqrt(D).
        sliding_window: number of keys a query sees, itself included.
        softcap: c in c * tanh(scores / c).
        cache: of a decode step or a prefill; None for plain causal attention.
        device_type: of the model; on a TPU the prefill uses the splash kernel.
        **kwargs: other arguments of the model; dropout is ignored in evaluation mode.

    Returns:
        (B, Q, heads, D) and None in place of the attention weights.

    Raises:
        ValueError: the model passes an unknown argument, or a mask of its own.
    """
    attention.refuse_unknown({name: value for name, value in kwargs.items() if name != "dropout"})
    if attention_mask is not None:
        raise ValueError("the model makes an attention mask of its own, and the key/value cache does not apply it")
    if cache is None and query.shape[2] != key.shape[2]:
        raise ValueError("the model does not pass its keyword arguments, the key/value cache, on to its attention")
    batch, heads, _, size = query.shape
    spec = heads_spec(key.shape)
    query, key, value = (constrain(each, spec) for each in (query, key, value))
    if not isinstance(cache, Slots):
        # Padding follows the prompt, so a causal mask hides it.
        ones = torch.ones(batch, query.shape[2], dtype=torch.int32, device=query.device)
        attend: Any = attention.sdpa_attention
        if device_type == "tpu":
            attend = functools.partial(attention.splash_attention, spec=spec, trains=False)
        options = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "segment_ids": ones}
        result: tuple[torch.Tensor, None] = attend(module, query, key, value, None, **options)
        return result
    # The query heads of a key head become query positions, which avoids repeating the cache for each query head.
    grouped = query.to(value.dtype).reshape(batch, key.shape[1], heads // key.shape[1], size)
    if softcap is None and device_type in ("cpu", "cuda"):
        mask = cache.mask(sliding_window)
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        return output.reshape(batch, 1, heads, -1), None
    # On XLA the function above scales the whole cache instead of the query, and `matmul` joins rows and heads to one
    # dimension, for which a mesh would gather a cache sharded by heads.
    scores = torch.einsum("bhgd,bhsd->bhgs", grouped * (size**-0.5 if scaling is None else scaling), key)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~cache.mask(sliding_window), torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.einsum("bhgs,bhsd->bhgd", weights, value).reshape(batch, 1, heads, -1), None
