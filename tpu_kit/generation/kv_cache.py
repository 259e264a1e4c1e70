"""The key/value cache of generation, and attention over it, for any model of transformers.

The keys and values of a layer are two tensors (B, key-value heads, slots, head size); see `Buffers`. A slot holds one
token. Row i has a prompt of n_i tokens, padded on the right to the width P of the batch: key j < n_i is in slot j, and
the mask hides the other slots up to P. Step t writes the keys of all rows into slot P + t, at position n_i + t. So all
rows write to the same slot, and the mask is a function of n, P and t, which are inputs of the program: one decode
program serves all lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Held:
    """The cache of a finished batch, which replaces the prefill of a batch that continues its replies.

    Attributes:
        cache: keys and values; nothing else may have used the buffers since.
        rows: tokens of each row, prompt and reply.
        lengths: n, the number of keys of each prompt.
        width: P.
    """

    cache: Buffers
    rows: list[list[int]]
    lengths: list[int]
    width: int

    def find(self, prompts: Sequence[list[int]]) -> list[int] | None:
        """Returns the row that equals each prompt; None if a prompt equals no row."""
        places = {tuple(row): place for place, row in enumerate(self.rows)}
        found = [places.get(tuple(prompt)) for prompt in prompts]
        return None if None in found else [place for place in found if place is not None]

    def source(self, places: Sequence[int], count: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the places of the keys of all but the last token of some rows, for `gathered`.

        Returns:
            (count,) int64, the rows, padded with the first; (count, slots) int64, the source of each slot.
        """
        rows = [*places, *[places[0]] * (count - len(places))]
        lengths = torch.tensor([self.lengths[row] for row in rows])[:, None]
        slot = torch.arange(slots)[None]
        taken = torch.where(slot < lengths, slot, self.width + slot - lengths)
        return torch.tensor(rows), taken.clamp(
            max=self.cache.slots - 1
        )  # the mask hides the slots after the row's keys


def gathered(buffers: Buffers, rows: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
    """Gathers keys and values (B, heads, S, D) of each layer from slot `source[b, s]` of row `rows[b]`."""
    _, heads, slots, size = buffers.keys[0].shape
    head = torch.arange(heads, device=rows.device)
    index = (((rows[:, None] * heads + head) * slots)[:, :, None] + source[:, None]).flatten()
    shape = (len(rows), heads, source.shape[1], size)
    both = [*buffers.keys, *buffers.values]
    return [buffer.reshape(-1, size).index_select(0, index).reshape(shape) for buffer in both]


class Recorder:
    """Replaces transformers' cache in the prefill, and records the keys and values of the prompt.

    Args:
        lengths: (B,) int64, n, if the last column has the last token of each prompt, at position n; None if each row is
            a prompt with or without padding at its end.
        width: P, the number of columns before the last.
    """

    def __init__(self, lengths: torch.Tensor | None = None, width: int = 0) -> None:
        self.found = Buffers([], [])
        self._lengths, self._width = lengths, width

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """Stores keys and values and returns those to attend to; called by the layers of transformers."""
        assert layer == len(self.found.keys), "layers come in order"
        self.found.keys.append(key)
        self.found.values.append(value)
        return key, value

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Returns the mask (B, 1, P + 1, P + 1), boolean; None if it is causal by column."""
        if self._lengths is None:
            return None
        lengths, column = self._lengths[:, None], torch.arange(self._width + 1, device=self._lengths.device)[None]
        last = column == self._width
        position = torch.where(last, lengths, column)
        real = (column < lengths) | last
        # Padding sees itself, because the softmax of an empty row is NaN.
        seen = (column[:, :, None] >= column[:, None, :]) & (real[:, None, :] | ~real[:, :, None])
        if window is not None:
            seen = seen & (position[:, :, None] - position[:, None, :] < window)
        return seen[:, None]


class Slots:
    """Replaces transformers' cache in a decode step, and makes the mask over its slots.

    Args:
        buffers: the cache; `write` replaces the entries of its lists.
        lengths: (B,) int64, n: the number of keys of each prompt.
        width: P, a tensor (1,) int64 or a number.
        step: t, likewise.
        write: writes new keys (B, heads, 1, D) into slot P + t of a buffer and returns it.
        filled: P + t + 1, the number of slots to attend to, if the host knows it; None attends to all with a mask.
        full: whether the host knows that every prompt fills its P slots.
    """

    def __init__(
        self,
        buffers: Buffers,
        lengths: torch.Tensor,
        width: Any,
        step: Any,
        write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        filled: int | None = None,
        full: bool = False,
    ) -> None:
        self.buffers, self._lengths, self._width, self._step = buffers, lengths, width, step
        self._write, self._filled, self._full = write, filled, full
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """Stores keys and values and returns those to attend to; called by the layers of transformers."""
        keys, values = self.buffers
        keys[layer] = self._write(keys[layer], key.to(keys[layer].dtype))
        values[layer] = self._write(values[layer], value.to(values[layer].dtype))
        if self._filled is None:
            return keys[layer], values[layer]
        return keys[layer][:, :, : self._filled], values[layer][:, :, : self._filled]

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Returns the mask (B, 1, 1, slots) of the new token, boolean; None if it sees all slots. Cached by window."""
        if self._filled is not None and window is not None and window >= self._filled:
            window = None
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> torch.Tensor | None:
        if self._full and window is None:
            return None
        lengths = self._lengths[:, None]
        slot = torch.arange(self._filled or self.buffers.slots, device=lengths.device)[None]
        written = (slot >= self._width) & (slot <= self._width + self._step)
        seen = (slot < lengths) | written
        if window is not None:
            position = torch.where(slot < self._width, slot, lengths + slot - self._width)
            seen = seen & (lengths + self._step - position < window)
        return seen[:, None, None, :]


def cache_shape(config: Any, slots: int) -> tuple[int, int, int]:
    """Returns (key-value heads, slots, head size) of one row in one layer, from a model's text configuration."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, slots, size


def cache_bytes_per_token(config: Any, element_bytes: int) -> int:
    """Returns the bytes of keys and values of one token of one row, in all layers."""
    heads, _, size = cache_shape(config, 1)
    return int(2 * config.num_hidden_layers * heads * size * element_bytes)


def register() -> None:
    """Registers "tpu_kit_cached" in transformers, without a mask function, so that transformers makes no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(CACHED, cached_attention)


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
    batch, heads, length, size = query.shape
    spec = heads_spec(key.shape)
    query, key, value = (constrain(each, spec) for each in (query, key, value))
    mask = None if cache is None else cache.mask(sliding_window)
    if not isinstance(cache, Slots):
        if mask is not None:  # it includes the window
            return attention.sdpa_attention(module, query, key, value, mask, scaling, softcap=softcap)
        if device_type in ("cpu", "cuda") and softcap is None and (sliding_window is None or sliding_window >= length):
            output = F.scaled_dot_product_attention(
                query.to(value.dtype), key.to(value.dtype), value, is_causal=True, scale=scaling, enable_gqa=True
            )
            return output.transpose(1, 2).contiguous(), None
        # Padding follows the prompt, so a causal mask hides it.
        ones = torch.ones(batch, length, dtype=torch.int32, device=query.device)
        attend = attention.sdpa_attention
        if device_type == "tpu":
            attend = functools.partial(attention.splash_attention, spec=spec, trains=False)
        return attend(
            module,
            query,
            key,
            value,
            None,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            segment_ids=ones,
        )
    # The query heads of a key head become query positions, which avoids repeating the cache for each query head.
    grouped = query.to(value.dtype).reshape(batch, key.shape[1], heads // key.shape[1], size)
    if softcap is None and device_type in ("cpu", "cuda"):
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    else:  # on XLA the function above scales the whole cache instead of the query
        # `matmul` joins rows and heads to one dimension, for which a mesh would gather a cache sharded by heads.
        scaled = grouped * (size**-0.5 if scaling is None else scaling)
        scores = torch.einsum("bhgd,bhsd->bhgs", scaled, key)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        output = torch.einsum("bhgs,bhsd->bhgd", weights, value)
    return output.reshape(batch, 1, heads, -1), None
