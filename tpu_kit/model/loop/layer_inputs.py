"""Inputs of the kit's attention and linear attention that bypass transformers' forward pass.

transformers passes unknown keyword arguments down to its layers. The kit does not use this, because any name may become
an argument of a model, like `cache` in transformers 5.24. Instead, `bound` sets the inputs of the current thread while
a model or a layer runs.

Inputs are per thread, because the replicas of XLA:CPU are threads, and because autograd recomputes layers in its own
threads. Code that runs a layer again must bind its inputs again. torch.compile can read thread-local values, but not
context variables.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tpu_kit.xla.scan import Tensors

PREFIX_COLUMNS = {"prefix_ids": (1, torch.int32)}  # of batches with shared prefixes: numbers per token, and dtype


class LayerCache:
    """State of layers in generation, such as keys and values; the base class of `generation.kv_cache.Cache`.

    Attributes:
        lengths: (B,) lengths of the prompts of a prefill, which are padded at the end; None in a decode step.
        time_limits: minimum and maximum of the time step in Mamba 2 layers; None without limits.
    """

    lengths: torch.Tensor | None = None
    time_limits: tuple[float, float] | None = None
    begin: Callable[[], Tensors]
    of_layer: Callable[[Tensors, torch.Tensor | None, int], LayerCache]
    end: Callable[[], Tensors]
    update_all: Callable[[Tensors], None]


class Visibility(NamedTuple):
    """The tokens of a row that a token sees, given by (B, S) integers.

    Attributes:
        segment_ids: number of the token's document; 0 = padding. None for plain rows.
        prefix_ids: for documents that share a prefix. A token of prefix n has n > 0, a token of a later document that
            also sees prefix n has -n, and other tokens have 0. None if no documents share a prefix.
        ahead: number of later tokens that a token sees in layers with a window; None if tokens see only earlier tokens.
        most_ahead: maximum of `ahead`.
        everywhere: whether tokens look ahead in all layers instead of only in layers with a window.
    """

    segment_ids: torch.Tensor | None = None
    prefix_ids: torch.Tensor | None = None
    ahead: torch.Tensor | None = None
    most_ahead: int = 0
    everywhere: bool = False

    @classmethod
    def of(cls, batch: Mapping[str, torch.Tensor], **seen: Any) -> Visibility:
        """Makes a visibility from a batch and attributes `seen`; without segment_ids, every row is one document."""
        segment_ids = batch["segment_ids"] if "segment_ids" in batch else torch.ones_like(batch["input_ids"])
        return cls(segment_ids, batch.get("prefix_ids"), **seen)

    def mask(self, looks_ahead: bool = False) -> torch.Tensor:
        """Returns the boolean mask (B, 1, S, S), true if the query (third axis) sees the key (last axis).

        A token sees itself, earlier tokens of its document, and the document's prefix. Padding (segment 0) sees
        padding, because the softmax of a fully masked row is NaN.

        Args:
            looks_ahead: whether the mask is for layers with a window, where `ahead` applies. It has no window.
        """
        assert self.segment_ids is not None, "plain rows have no mask"
        return self.mask_of(self, torch.arange(self.segment_ids.shape[1], device=self.segment_ids.device), looks_ahead)

    def mask_of(self, queries: Visibility, places: torch.Tensor, looks_ahead: bool = False) -> torch.Tensor:
        """Returns the rows of `mask` for Q tokens: boolean (B, 1, Q, S), true if seen; plain rows have no mask.

        Args:
            queries: visibility of the Q tokens, (B, Q).
            places: (Q,) positions of these tokens in the row.
            looks_ahead: whether `ahead` applies, as in layers with a window; with `everywhere`, it always does.
        """
        assert self.segment_ids is not None and queries.segment_ids is not None, "plain rows have no mask"
        index = torch.arange(self.segment_ids.shape[1], device=self.segment_ids.device)
        seen = queries.segment_ids[:, None, :, None] == self.segment_ids[:, None, None, :]
        if self.prefix_ids is not None and queries.prefix_ids is not None:
            key = self.prefix_ids[:, None, None, :]
            seen = seen | ((key > 0) & (key == -queries.prefix_ids[:, None, :, None]))
        if queries.ahead is not None and (looks_ahead or self.everywhere):
            return seen & ((places + queries.ahead)[:, None, :, None] >= index)
        return seen & (places[:, None] >= index[None, :])

    def kernel_ids(self, window: int | None) -> list[torch.Tensor]:
        """Returns a kernel's tensors: segment ids, then prefix ids or `ahead` if set. Prefixes allow no window."""
        assert self.prefix_ids is None or (window is None and self.ahead is None), "see `attention.sees_all`"
        return [each for each in (self.segment_ids, self.prefix_ids, self.ahead) if each is not None]

    @classmethod
    def of_kernel(cls, segment_ids: torch.Tensor, more: torch.Tensor | None, most_ahead: int) -> Visibility:
        """Makes a visibility from `kernel_ids`; `more`, its second tensor or None, is `ahead` if `most_ahead` > 0."""
        return cls(segment_ids, None, more, most_ahead) if most_ahead else cls(segment_ids, more)


PLAIN = Visibility()  # rows of one document


class LayerInputs(NamedTuple):
    """The inputs of the layers.

    Attributes:
        visibility: visibility of the rows.
        cache: cache of generation; None outside of generation.
        device_type: a `launch.device_type` such as "tpu"; the cached attention chooses its kernels by it.
        additions: (B, S, H) tensors that are added to the outputs of the first layers; empty without images.
    """

    visibility: Visibility = PLAIN
    cache: LayerCache | None = None
    device_type: str = "cpu"
    additions: tuple[torch.Tensor, ...] = ()


class _Thread(threading.local):
    """Holds the inputs bound in a thread, initially `LayerInputs()`."""

    def __init__(self) -> None:  # runs per thread; torch.compile treats a class attribute as constant
        self.inputs = LayerInputs()


_thread = _Thread()


def current() -> LayerInputs:
    """Returns the inputs that are bound in this thread, by default `LayerInputs()`."""
    return _thread.inputs


@contextlib.contextmanager
def bound(inputs: LayerInputs) -> Iterator[None]:
    """Returns a context that sets the inputs of this thread, and restores the previous inputs at its end."""
    before, _thread.inputs = _thread.inputs, inputs
    try:
        yield
    finally:
        _thread.inputs = before


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs `function`, at any time and in any thread, with the inputs that are bound now."""
    inputs = current()

    def run(*args: Any, **kwargs: Any) -> Any:
        with bound(inputs):
            return function(*args, **kwargs)

    return run
