"""The key/value cache of generation, and attention over it, for any model of transformers.

A layer has two buffers, keys and values, (B, key-value heads, slots, size); see `Cache` for layers that run as a loop.
A slot holds one token. Row i has a prompt of n_i tokens, padded on the right to the width P of the batch: key j < n_i
is in slot j, and the mask hides the other slots up to P. Step t writes the keys of all rows into slot P + t, at
position n_i + t. So all rows write to the same slot, and the mask is a function of n, P and t, which are inputs of the
program: one decode program serves all lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tpu_kit.config.mesh import Spec
from tpu_kit.generation.decode_sharding import heads_spec
from tpu_kit.models import attention
from tpu_kit.models.layer_calls import LayerCache
from tpu_kit.xla.scan import Tensors, slice_at, write_slot
from tpu_kit.xla.sharding import constrain

CACHED = "tpu_kit_cached"


class Step(NamedTuple):
    """Where a decode step writes, and what it sees.

    Attributes:
        lengths: (B,) int64, n: the number of keys of each prompt.
        width: (1,) int64, P.
        step: (1,) int64, t.
    """

    lengths: torch.Tensor
    width: torch.Tensor
    step: torch.Tensor

    @property
    def slot(self) -> torch.Tensor:
        """The slot, (1,), of the new token."""
        return self.width + self.step


class Cache(LayerCache):
    """Replaces transformers' cache in a prefill or a decode step, and makes the mask over its slots.

    Attributes:
        stacks: the keys and the values of a layer, (G, B, heads, slots, size) each, by number of the layer. G layers
            that are the turns of a loop have the number of the first one; for other layers G is 1.
        step: None for a prefill, which writes from slot 0 on.
        shapes: (G, heads, size) of the keys and the values of each layer that ran without stacks.
    """

    def __init__(self, stacks: dict[int, Tensors], step: Step | None = None) -> None:
        """Takes the stacks, which are replaced in the dictionary, or none to record their shapes."""
        self.stacks, self.step = stacks, step
        self.shapes: dict[int, list[tuple[int, int, int]]] = {}
        self._place: torch.Tensor | None = None  # of the present turn in the stacks, () int64
        self._turns = 1
        self._masks: dict[int | None, torch.Tensor] = {}

    @property
    def tensors(self) -> Tensors:
        """All stacks."""
        return [stack for pair in self.stacks.values() for stack in pair]

    @property
    def rows_and_slots(self) -> tuple[int, int]:
        """Rows of the batch, and length of the cache."""
        _, rows, _, slots, _ = self.tensors[0].shape
        return rows, slots

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """Stores keys and values and returns those to attend to; called by the layers of transformers."""
        if not self.stacks:
            self.shapes[layer] = [(self._turns, new.shape[1], new.shape[3]) for new in (key, value)]
            return key, value
        zero = torch.zeros(1, dtype=torch.int64, device=key.device)
        place, slot = zero[0] if self._place is None else self._place, self.step.slot if self.step else zero
        pair = [write_slot(stack, new.to(stack.dtype), place, slot)
                for stack, new in zip(self.stacks[layer], (key, value), strict=True)]  # fmt: skip
        self.stacks[layer] = pair
        return [slice_at(stack, place) for stack in pair] if self.step else (key, value)

    def mask(self, window: int | None) -> torch.Tensor:
        """Returns the mask (B, 1, 1, slots) of the new token of a decode step, boolean. Cached by window."""
        if window not in self._masks:
            assert self.step is not None, "a prefill is causal"
            lengths, width, step = self.step.lengths[:, None], self.step.width, self.step.step
            slot = torch.arange(self.rows_and_slots[1], device=lengths.device)[None]
            seen = (slot < lengths) | ((slot >= width) & (slot <= width + step))
            if window is not None:
                position = torch.where(slot < width, slot, lengths + slot - width)
                seen = seen & (lengths + step - position < window)
            self._masks[window] = seen[:, None, None, :]
        return self._masks[window]

    def begin(self) -> Tensors:
        """See `LayerCache`; the carry is the turn, the decode step and all stacks."""
        if not self.stacks:
            return []
        return [torch.zeros((), dtype=torch.int64, device=self.tensors[0].device), *(self.step or ()), *self.tensors]

    def turn(self, carried: Tensors, turns: int) -> Cache:
        """See `LayerCache`."""
        mine = self.of(carried, Step(*carried[1:4]) if carried and self.step else None)
        mine.shapes, mine._turns = self.shapes, turns
        mine._place = carried[0] if carried else None
        return mine

    def end(self) -> Tensors:
        """See `LayerCache`."""
        return [] if self._place is None else [self._place + 1, *(self.step or ()), *self.tensors]

    def update_all(self, carried: Sequence[torch.Tensor]) -> None:
        """See `LayerCache`; the stacks are the last of the tensors, or all of them."""
        rest = iter(carried[len(carried) - 2 * len(self.stacks) :])
        self.stacks.update({layer: [next(rest), next(rest)] for layer in self.stacks})

    def of(self, tensors: Sequence[torch.Tensor], step: Step | None = None) -> Cache:
        """Returns a cache with other stacks, as for `update_all`."""
        other = Cache(dict(self.stacks), step)
        other.update_all(tensors)
        return other


def stack_spec(shape: Sequence[int]) -> Spec:
    """Returns the sharding of a stack of keys or values, (G, B, heads, slots, size)."""
    return (None, *heads_spec(shape[1:]))


def cached_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cache: Cache | None = None,
    device_type: str = "cpu",
    s_aux: torch.Tensor | None = None,
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
        s_aux: (heads,) sinks.
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
    if cache is None or cache.step is None:
        # Padding follows the prompt, so a causal mask hides it.
        ones = torch.ones(batch, query.shape[2], dtype=torch.int32, device=query.device)
        attend: Any = attention.sdpa_attention
        if device_type == "tpu":
            attend = functools.partial(attention.splash_attention, spec=spec, trains=False)
        options = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        result: tuple[torch.Tensor, None] = attend(module, query, key, value, None, segment_ids=ones, **options)
        return result
    # The query heads of a key head become query positions, which avoids repeating the cache for each query head.
    grouped = query.to(value.dtype).reshape(batch, key.shape[1], heads // key.shape[1], size)
    if softcap is None and s_aux is None and device_type in ("cpu", "cuda"):
        mask = cache.mask(sliding_window)
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        return output.reshape(batch, 1, heads, -1), None
    # On XLA the function above scales the whole cache instead of the query, and `matmul` joins rows and heads to one
    # dimension, for which a mesh would gather a cache sharded by heads.
    scores = torch.einsum("bhgd,bhsd->bhgs", grouped * (size**-0.5 if scaling is None else scaling), key)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~cache.mask(sliding_window), torch.finfo(scores.dtype).min)
    sinks = None if s_aux is None else s_aux.view(*scores.shape[1:3], 1)
    weights = attention.weights_of(scores, sinks).to(value.dtype)
    return torch.einsum("bhgs,bhsd->bhgd", weights, value).reshape(batch, 1, heads, -1), None
