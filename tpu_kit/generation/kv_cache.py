"""The key/value cache of generation, and attention over it, for any model of transformers.

Every prompt lies at the beginning of its row: key j of row i, j < n_i, is in slot j, and the slots up to P, the width
of the batch, hold padding that nobody sees. Step t puts the key of every row into the same slot P + t, at position
n_i + t. So one number says where all rows write, no row has nothing to see, and the mask follows from n, P and t,
which are inputs of the program: one decode program serves every length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tpu_kit.models import attention

CACHED = "tpu_kit_cached"


class Buffers(NamedTuple):
    """Keys and values of each layer, (B, key-value heads, slots, head size) each."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def slots(self) -> int:
        """The length of the cache."""
        return self.keys[0].shape[2]


@dataclass(frozen=True)
class Held:
    """The cache of a finished batch, so that a batch that continues its replies needs no prefill.

    Attributes:
        cache: the keys and values; nothing else may have used the buffers since.
        rows: the tokens of each row, prompt and reply.
        lengths: n of each row, the number of its prompt's keys.
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
        """Where the keys of all but the last token of these rows are.

        Returns:
            (count,) int64, the rows, padded with the first; (count, slots) int64, for each slot the one to take.
        """
        rows = [*places, *[places[0]] * (count - len(places))]
        lengths = torch.tensor([self.lengths[row] for row in rows])[:, None]
        slot = torch.arange(slots)[None]
        taken = torch.where(slot < lengths, slot, self.width + slot - lengths)
        return torch.tensor(rows), taken.clamp(max=self.cache.slots - 1)  # beyond the row's keys nobody looks


def gathered(buffers: Buffers, rows: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values (B, heads, S, D) of each layer: slot `source[b, s]` of row `rows[b]`."""
    _, heads, slots, size = buffers.keys[0].shape
    head = torch.arange(heads, device=rows.device)
    index = (((rows[:, None] * heads + head) * slots)[:, :, None] + source[:, None]).flatten()
    shape = (len(rows), heads, source.shape[1], size)
    both = [*buffers.keys, *buffers.values]
    return [buffer.reshape(-1, size).index_select(0, index).reshape(shape) for buffer in both]


class Recorder:
    """Takes the place of transformers' cache in the prefill: keeps the keys and values of the prompt.

    Args:
        lengths: (B,) int64, n, where the last column holds the token after each prompt, at position n; None if every
            row is a prompt, padded at the end or not.
        width: P, the columns before that one.
    """

    def __init__(self, lengths: torch.Tensor | None = None, width: int = 0) -> None:
        self.found = Buffers([], [])
        self._lengths, self._width = lengths, width

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """What a layer of transformers calls; it attends to what is returned."""
        assert layer == len(self.found.keys), "layers come in order"
        self.found.keys.append(key)
        self.found.values.append(value)
        return key, value

    def mask(self, window: int | None) -> torch.Tensor | None:
        """(B, 1, P + 1, P + 1) booleans: who sees whom; None where that is causal by column."""
        if self._lengths is None:
            return None
        lengths, column = self._lengths[:, None], torch.arange(self._width + 1, device=self._lengths.device)[None]
        last = column == self._width
        position = torch.where(last, lengths, column)
        real = (column < lengths) | last
        # Padding sees itself, so that no row of the softmax is empty.
        seen = (column[:, :, None] >= column[:, None, :]) & (real[:, None, :] | ~real[:, :, None])
        if window is not None:
            seen = seen & (position[:, :, None] - position[:, None, :] < window)
        return seen[:, None]


class Slots:
    """Takes the place of transformers' cache in a decode step, and says who sees which slot.

    Args:
        buffers: the cache; its lists are changed to what `write` returns.
        lengths: (B,) int64, n: the keys of each prompt.
        width: P, a tensor (1,) int64 or a number.
        step: t, likewise.
        write: puts new keys (B, heads, 1, D) into slot P + t of a buffer and returns it, or its filled part.
        filled: the slots that attention reads, where the host knows: P + t + 1. None = all, the others masked.
        full: the host knows that every prompt fills its P slots.
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
        """What a layer of transformers calls; it attends to what is returned."""
        keys, values = self.buffers
        keys[layer] = self._write(keys[layer], key.to(keys[layer].dtype))
        values[layer] = self._write(values[layer], value.to(values[layer].dtype))
        if self._filled is None:
            return keys[layer], values[layer]
        return keys[layer][:, :, : self._filled], values[layer][:, :, : self._filled]

    def mask(self, window: int | None) -> torch.Tensor | None:
        """(B, 1, 1, slots) booleans: the slots that the new token sees; None if all. One for each window."""
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


def causal(model: torch.nn.Module) -> Any:
    """The model of transformers, without PEFT's wrapper; LoRA layers stay inside it."""
    wrapped: Any = model
    return wrapped.get_base_model() if hasattr(model, "get_base_model") else model


def cache_shape(config: Any, slots: int) -> tuple[int, int, int]:
    """(key-value heads, slots, head size) of one row in one layer, from the text configuration of a model."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, slots, size


def cache_bytes_per_token(config: Any, element_bytes: int) -> int:
    """Bytes of keys and values that one token of one row takes, over all layers."""
    heads, _, size = cache_shape(config, 1)
    return int(2 * config.num_hidden_layers * heads * size * element_bytes)


def register() -> None:
    """Makes "tpu_kit_cached" known to transformers. It has no mask function, so transformers makes and reads none."""
    from transformers import AttentionInterface

    AttentionInterface.register(CACHED, cached_attention)


def cached_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cache: Recorder | Slots | None = None,
    device_type: str = "cpu",
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a prefill or of one decode step, as transformers calls it.

    Args:
        module: the attention layer.
        query: (B, heads, Q, D); Q is 1 in a decode step.
        key: (B, key-value heads, K, D).
        value: (B, key-value heads, K, D).
        attention_mask: None; transformers makes none for this function.
        scaling: factor on the scores, default 1 / sqrt(D).
        dropout: not used; the model is in evaluation mode.
        sliding_window: number of keys a query sees, itself included.
        softcap: c in c * tanh(scores / c).
        cache: of a decode step or a prefill; None means plain causal attention.
        device_type: where it runs; on a TPU the prefill takes the flash kernel.
        **kwargs: what else the model passes on.

    Returns:
        (B, Q, heads, D) and None in place of the attention weights.

    Raises:
        ValueError: the model passes an argument that this function does not know, or a mask of its own.
    """
    attention.refuse_unknown(kwargs)
    if attention_mask is not None:
        raise ValueError("the model makes an attention mask of its own, and the key/value cache does not apply it")
    if cache is None and query.shape[2] != key.shape[2]:
        raise ValueError("the model does not pass its keyword arguments, the key/value cache, on to its attention")
    batch, heads, length, size = query.shape
    mask = None if cache is None else cache.mask(sliding_window)
    if not isinstance(cache, Slots):
        if mask is not None:  # it holds the window
            return attention.sdpa_attention(module, query, key, value, mask, scaling, softcap=softcap)
        if device_type in ("cpu", "cuda") and softcap is None and (sliding_window is None or sliding_window >= length):
            output = F.scaled_dot_product_attention(
                query.to(value.dtype), key.to(value.dtype), value, is_causal=True, scale=scaling, enable_gqa=True
            )
            return output.transpose(1, 2).contiguous(), None
        # Padding comes after the prompt, so causal is enough: no prompt sees it.
        ones = torch.ones(batch, length, dtype=torch.int32, device=query.device)
        attend = attention.flash_attention if device_type == "tpu" else attention.sdpa_attention
        return attend(
            module, query, key, value, None, scaling, sliding_window=sliding_window, softcap=softcap, segment_ids=ones
        )
    # Queries of one key head become its query positions, so that the cache is not repeated for each query head.
    grouped = query.to(value.dtype).reshape(batch, key.shape[1], heads // key.shape[1], size)
    if softcap is None and device_type in ("cpu", "cuda"):
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    else:  # on XLA the function above scales the whole cache, and not the query alone
        scores = torch.matmul(grouped * (size**-0.5 if scaling is None else scaling), key.transpose(2, 3))
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        output = torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype), value)
    return output.reshape(batch, 1, heads, -1), None
