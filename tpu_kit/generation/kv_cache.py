"""The key/value cache of generation, and attention over it, for any model of transformers.

A layer has two buffers, keys and values, (B, key-value heads, slots, size). See `Cache` for layers that run as a loop
and for layers with a recurrent state. On XLA, narrow heads of a loop lie side by side (`heads_beside`).
A slot holds one token. The prompt of row i has n_i tokens and is padded on the right to the batch's width P. Key
j < n_i is in slot j; the mask hides slots n_i to P - 1. Step t writes the keys of all rows to slot P + t, which has
position n_i + t. The mask depends only on the inputs n, P and t, so one decode program serves all lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from tpu_kit.config.mesh import Spec
from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.model import attention, splash_attention
from tpu_kit.model.loop import layer_inputs
from tpu_kit.model.loop.layer_inputs import LayerCache
from tpu_kit.model.sharding.sharding_rules import cache_spec
from tpu_kit.xla.scan import Tensors, slice_at
from tpu_kit.xla.sharding import constrain
from tpu_kit.xla.slot_writes import write_slot
from tpu_kit.xla.traced_program import kernels_on

CACHED = "tpu_kit_cached"


class Step(NamedTuple):
    """The inputs of a decode step that determine its slot and its mask; see the module's docstring.

    Attributes:
        lengths: (B,) int64, n: the number of keys of each prompt.
        width: (1,) int64, P: the width of the prompts.
        step: (1,) int64, t: the number of the step, from 0.
    """

    lengths: torch.Tensor
    width: torch.Tensor
    step: torch.Tensor

    @property
    def slot(self) -> torch.Tensor:
        """The slot (1,) of the new token."""
        return self.width + self.step


class Prompts(NamedTuple):
    """The inputs of a prefill: lengths (B,) int64, the number of tokens of each prompt before its padding."""

    lengths: torch.Tensor


class Buffer(NamedTuple):
    """The shape (turns, B, heads, slots, width) of a stack, (G, ...) in `Cache.stacks`; slots None: one per token."""

    turns: int
    heads: int
    slots: int | None
    width: int
    dtype: torch.dtype | None = None  # None: the model's


class Cache(LayerCache):
    """Replaces transformers' cache in a prefill or a decode step, and makes the mask over its slots.

    Layers with a recurrent state (`model.families.linear_attention`) have two other buffers: "state", (B, heads, K, V)
    fp32, and "tail", (B, 1, taps - 1, D), the last inputs of the convolution.

    Attributes:
        stacks: buffers (G, B, heads, slots, size) by (layer number, name); names are "keys", "values", "state" and
            "tail". The G layers of a loop share one buffer under the first layer's number; other layers have G = 1.
        step: the inputs of a decode step; None for a prefill, which writes from slot 0 on.
        lengths: (B,) lengths of the prompts of a prefill; None for a decode step.
        buffers: shapes that layers need, recorded while they run without stacks.
    """

    def __init__(self, stacks: dict[tuple[int, str], torch.Tensor], where: Step | Prompts | None = None) -> None:
        """Makes a cache over `stacks`, which it replaces in the dictionary; if empty, it records the needed shapes."""
        self.stacks, self._where = stacks, where
        self.step = where if isinstance(where, Step) else None
        self.lengths = where.lengths if isinstance(where, Prompts) else None
        self.buffers: dict[tuple[int, str], Buffer] = {}
        self._place: torch.Tensor | None = None  # index of the current layer in its stack, () int64
        self._count = 1  # number of layers in its stack
        self._masks: dict[int | None, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}  # states given to layers, which may change them in place

    @property
    def tensors(self) -> Tensors:
        """The stacks as a list, in the order of `stacks`."""
        return list(self.stacks.values())

    @property
    def rows_and_slots(self) -> tuple[int, int]:
        """Rows of the batch, and slots of the cache, 0 without keys."""
        keys = next((stack for (_, name), stack in self.stacks.items() if name == "keys"), None)
        return self.tensors[0].shape[1], 0 if keys is None else keys.shape[3]

    def _write(self, layer: int, name: str, new: torch.Tensor, slot: torch.Tensor | None = None) -> torch.Tensor:
        """Writes (B, heads, n, size) to a buffer from `slot` (1,) on; returns the buffer, (B, heads, slots, size).

        A `slot` of None is slot 0.
        """
        stack, zero = self.stacks[layer, name], torch.zeros(1, dtype=torch.int64, device=new.device)
        place = zero[0] if self._place is None else self._place
        stack = write_slot(stack, new.to(stack.dtype), place, zero if slot is None else slot)
        self.stacks[layer, name] = stack
        return slice_at(stack, place)

    def _read(self, layer: int, name: str) -> torch.Tensor:
        """Returns the buffer (B, heads, slots, size) of the current layer."""
        stack = self.stacks[layer, name]
        return slice_at(stack, torch.zeros((), dtype=torch.int64, device=stack.device) if self._place is None
                        else self._place)  # fmt: skip

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """Stores a layer's keys and values, (B, heads, n, D), or if `stacks` is empty, records their shapes.

        The layers call it. `layer` is the layer's number, in a loop the first layer's; other arguments are ignored.
        Returns the keys and values to attend to. In a prefill, or without stacks, they are the given tensors. In a
        decode step they are the whole buffers, (B, heads, slots, D), in a loop on XLA with `heads_beside` side by side.
        """
        count = heads_beside(key, value) if self._count > 1 else 1
        new = {"keys": side_by_side(key, count), "values": side_by_side(value, count)}
        if not self.stacks:
            for name, one in new.items():
                self.buffers[layer, name] = Buffer(self._count, one.shape[1], None, one.shape[3])
            return key, value
        slot = self.step.slot if self.step else None
        pair = [self._write(layer, name, one, slot) for name, one in new.items()]
        return pair if self.step else (key, value)

    def get_conv_state(self, layer: int, state_idx: int = 0) -> None:
        """Returns None, so that layers always convolve the inputs that `update_conv_state` returns."""

    def update_conv_state(self, new: torch.Tensor, layer: int, conv_kernel_size: int) -> torch.Tensor:
        """Stores the last inputs of a convolution; returns its inputs (B, D, n), which end in `new` (B, D, S).

        In a prefill they are `new` itself. In a decode step, the conv_kernel_size - 1 earlier inputs come before `new`.
        If `stacks` is empty, it records the shape and returns `new`.
        """
        past, rows = conv_kernel_size - 1, new.transpose(1, 2)[:, None]
        if not self.stacks:
            self.buffers[layer, "tail"] = Buffer(self._count, 1, past, new.shape[1])
            return new
        if self.step:
            rows = torch.cat([self._read(layer, "tail").to(new.dtype), rows], 2)
            self._write(layer, "tail", rows[:, :, 1:])
            return rows[:, 0].transpose(1, 2)
        assert self.lengths is not None, "a prefill has the lengths of its prompts"
        places = self.lengths[:, None] + torch.arange(past, device=new.device)
        places = places[:, None, :, None].expand(-1, -1, -1, new.shape[1])
        self._write(layer, "tail", F.pad(rows, (0, 0, past, 0)).gather(2, places))
        return new

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """Returns a copy of a layer's state, (B, heads, K, V) fp32, which `store_states` writes; None in a prefill."""
        if self.step is None:
            return None
        self._states[layer] = self._read(layer, "state").clone()
        return self._states[layer]

    def update_recurrent_state(self, state: torch.Tensor, layer_idx: int) -> None:
        """Takes a layer's new state; raises ValueError if it is not 4-D. Mamba 2 changes the old state in place."""
        if state.ndim != 4:
            raise ValueError(f"its state has {state.ndim} dimensions, not the 4 of (rows, heads, K, V)")
        self._states[layer_idx] = state

    def store_states(self) -> None:
        """Writes recurrent states to `stacks`, after the layers have run; if `stacks` is empty, records the shapes."""
        for layer, state in self._states.items():
            if self.stacks:
                self._write(layer, "state", state)
            else:
                _, heads, keys, values = state.shape
                self.buffers[layer, "state"] = Buffer(self._count, heads, keys, values, torch.float32)
        self._states.clear()

    def mask(self, window: int | None) -> torch.Tensor:
        """Returns the boolean mask (B, 1, 1, slots) of a decode step, on the device, true for keys that are seen.

        `window` is the number of keys that a query sees, its own included; None: all keys of its row so far.
        """
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
        """Returns the initial carry of a loop over layers: step or lengths, then all stacks; empty without stacks."""
        return [*(self._where or ()), *self.tensors] if self.stacks else []

    def of_layer(self, carried: Tensors, place: torch.Tensor | None, count: int) -> Cache:
        """Returns the cache of one layer within a loop.

        Args:
            carried: the loop's carry.
            place: the layer's index in its stack, () int64.
            count: the number of layers in the stack.
        """
        where = self._where
        mine = self.of(carried, type(where)(*carried[: len(where)]) if where else None)
        mine.buffers, mine._place, mine._count = self.buffers, place if carried else None, count
        return mine

    def end(self) -> Tensors:
        """Returns the loop's carry after the layer of this cache."""
        self.store_states()
        return self.begin()

    def update_all(self, carried: Sequence[torch.Tensor]) -> None:
        """Takes over the stacks from the final carry of a loop, whose last tensors they are."""
        self.stacks.update(zip(self.stacks, carried[len(carried) - len(self.stacks) :], strict=True))

    def of(self, tensors: Sequence[torch.Tensor], where: Step | Prompts | None = None) -> Cache:
        """Returns a cache with the same names of stacks and other tensors, which are the last of `tensors`."""
        other = Cache(dict(self.stacks), where)
        other.time_limits = self.time_limits
        other.update_all(tensors)
        return other


_LANES = 128  # a TPU pads the minor dimension of an array to a multiple of this


def heads_beside(key: torch.Tensor, value: torch.Tensor) -> int:
    """Returns how many heads the cache of a loop stores side by side, so that they fill the lanes of a TPU.

    For narrower stacks the compiler would make slots or rows the minor dimension, and each layer would copy its part.
    The result divides the number of heads. It is 1 on a mesh, which shards the heads, off XLA, and if keys and values
    differ in width.
    """
    if key.device.type not in ("xla", "tpu") or active_mesh().size > 1 or key.shape[3] != value.shape[3]:
        return 1
    most = max(1, _LANES // key.shape[3])
    return next(count for count in range(most, 0, -1) if key.shape[1] % count == 0)


def side_by_side(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Puts `count` adjacent heads side by side: (B, heads, n, D) -> (B, heads / count, n, count * D)."""
    return torch.cat([tensor[:, first::count] for first in range(count)], -1) if count > 1 else tensor


def stack_spec(shape: Sequence[int]) -> Spec:
    """Returns the sharding of a stack, (G, B, heads, slots, size)."""
    return (None, *cache_spec(active_mesh(), shape[1:]))


def cached_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention of a prefill or of one decode step (Q = 1); called by transformers.

    The cache comes from `layer_inputs`; without one, attention is causal. On a TPU a prefill uses the splash kernel.

    Args:
        module: the attention layer.
        query: (B, heads, Q, D).
        key: (B, key-value heads, K, D); in a decode step the result of `Cache.update`, with a slot per key.
        value: (B, key-value heads, K, D), like `key`.
        attention_mask: must be None; transformers makes no mask for this function.
        scaling: factor on the scores, default 1 / sqrt(D).
        sliding_window: number of keys that a query sees, its own included.
        softcap: c in c * tanh(scores / c).
        s_aux: (heads,) attention sinks.
        **kwargs: other arguments of the model; dropout is ignored, as the model is in evaluation mode.

    Returns:
        (B, Q, heads, D), and None in place of the attention weights.

    Raises:
        ValueError: the model passes an unknown argument or its own mask.
    """
    attention.refuse_unknown({name: value for name, value in kwargs.items() if name != "dropout"})
    if attention_mask is not None:
        raise ValueError("the model makes its own attention mask, which the key/value cache does not apply")
    inputs = layer_inputs.current()
    cache, device_type = cast(Cache | None, inputs.cache), inputs.device_type
    batch, heads = query.shape[:2]
    spec = cache_spec(active_mesh(), key.shape)
    query, key, value = (constrain(each, spec) for each in (query, key, value))
    if cache is None or cache.step is None:
        # Padding follows the prompt, so the causal mask hides it.
        ones = torch.ones(batch, query.shape[2], dtype=torch.int32, device=query.device)
        attend: Any = attention.sdpa_attention
        if kernels_on(device_type):
            attend = functools.partial(splash_attention.splash_attention, spec=spec, trains=False)
        options = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        visibility = inputs.visibility._replace(segment_ids=ones)  # image tokens may attend to later tokens
        return attend(module, query, key, value, None, visibility=visibility, **options)
    mask = cache.mask(sliding_window)
    output = _attend_one(query, key, value, mask, scaling, softcap, s_aux, plain=device_type in ("cpu", "cuda"))
    return output.reshape(batch, 1, heads, -1), None


def _attend_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None,
    softcap: float | None, s_aux: torch.Tensor | None, plain: bool,
) -> torch.Tensor:  # fmt: skip
    """Computes attention of a decode step, from query (B, heads, 1, D) and buffers of the cache; `plain`: not on XLA.

    `mask` is from `Cache.mask`; the other arguments are as in `cached_attention`.

    Returns:
        (B, m, query heads per cache head, D) for the m heads of the cache, which may be groups of heads side by side.
    """
    batch, heads, _, size = query.shape
    # The query heads of a key head become query positions, so that the cache is not repeated for every query head.
    beside = key.shape[3] // size
    grouped = query.to(value.dtype).reshape(batch, key.shape[1], heads // key.shape[1], size)
    if beside > 1:  # queries have zeros at the keys of the other heads
        parts = enumerate(grouped.chunk(beside, 2))
        grouped = torch.cat([F.pad(part, (at * size, (beside - 1 - at) * size)) for at, part in parts], 2)
    if softcap is None and s_aux is None and plain:
        return F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    # On XLA the function above scales the whole cache instead of the query. `matmul` flattens rows and heads into one
    # dimension, for which a mesh would gather a cache that is sharded by heads.
    scores = torch.einsum("bhgd,bhsd->bhgs", grouped * (size**-0.5 if scaling is None else scaling), key)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    sinks = None if s_aux is None else s_aux.view(*scores.shape[1:3], 1)
    weights = attention.weights_of(scores, sinks).to(value.dtype)
    output = torch.einsum("bhgs,bhsd->bhgd", weights, value)
    return torch.cat([part.chunk(beside, 3)[at] for at, part in enumerate(output.chunk(beside, 2))], 2)
