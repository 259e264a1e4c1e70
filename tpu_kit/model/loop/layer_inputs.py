"""What the kit's attention and linear attention read in a forward pass of transformers, besides its own arguments.

transformers hands keyword arguments that it does not know down to its layers. The kit passes none of its own that way:
any name may become an argument of the models themselves, as `cache` did in transformers 5.24. Instead `bound` sets the
inputs of the present thread while a model or one of its layers runs.

Each thread has its own, because the replicas of XLA:CPU are threads, and because autograd recomputes layers in threads
of its own: whoever runs a layer again binds its inputs again. torch.compile reads a thread's local values, but not
those of a context variable.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tpu_kit.xla.scan import Tensors


class LayerCache:
    """What layers get and change in generation, such as keys and values: the base of `generation.kv_cache.Cache`.

    Attributes:
        lengths: (B,) of the prompts of a prefill, which are padded at the end; None in a decode step.
        time_limits: the least and the largest time step of Mamba 2's layers, if they have any.
    """

    lengths: torch.Tensor | None = None
    time_limits: tuple[float, float] | None = None
    begin: Callable[[], Tensors]
    of_layer: Callable[[Tensors, torch.Tensor | None, int], LayerCache]
    end: Callable[[], Tensors]
    update_all: Callable[[Tensors], None]


class Visibility(NamedTuple):
    """Which tokens of rows each token sees, by (B, S) integers.

    Attributes:
        segment_ids: the number of the document of each token; 0 = padding. None for plain rows.
        prefix_ids: for documents that share a prefix: n > 0 at the tokens of prefix n, -n at those of the documents
            after it that see it, too, 0 elsewhere. None if no documents share a prefix.
        ahead: how many of the tokens after it each token sees in the layers with a window; None if tokens see earlier
            ones alone.
        most_ahead: the largest number that `ahead` may have.
        everywhere: whether tokens look ahead in all layers, not in those with a window alone.
    """

    segment_ids: torch.Tensor | None = None
    prefix_ids: torch.Tensor | None = None
    ahead: torch.Tensor | None = None
    most_ahead: int = 0
    everywhere: bool = False

    @classmethod
    def of(cls, batch: Mapping[str, torch.Tensor], **seen: Any) -> Visibility:
        """Makes it of a batch's columns and other attributes; without segment_ids every row is one document."""
        segment_ids = batch["segment_ids"] if "segment_ids" in batch else torch.ones_like(batch["input_ids"])
        return cls(segment_ids, batch.get("prefix_ids"), **seen)

    def mask(self, looks_ahead: bool = False) -> torch.Tensor:
        """Makes the mask, (B, 1, S, S) booleans, True where the query (third axis) sees the key (last axis).

        `looks_ahead` says that the layer has a window, which is not in the mask.

        Each token sees itself, earlier tokens of its document, and the document's prefix; padding (segment 0) sees
        padding, because the softmax of a fully masked row is NaN.
        """
        assert self.segment_ids is not None, "plain rows have no mask"
        return self.mask_of(self, torch.arange(self.segment_ids.shape[1], device=self.segment_ids.device), looks_ahead)

    def mask_of(self, queries: Visibility, places: torch.Tensor, looks_ahead: bool = False) -> torch.Tensor:
        """Makes the rows of `mask` for Q tokens, (B, 1, Q, S), by their own integers and places (Q,) in the row."""
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
        """Returns the tensors that a kernel takes: the segment ids, and prefix ids or `ahead` if there are any."""
        assert self.prefix_ids is None or (window is None and self.ahead is None), "see `attention.sees_all`"
        return [each for each in (self.segment_ids, self.prefix_ids, self.ahead) if each is not None]

    @classmethod
    def of_kernel(cls, segment_ids: torch.Tensor, more: torch.Tensor | None, most_ahead: int) -> Visibility:
        """Makes it of the result of `kernel_ids`, whose second tensor may lack."""
        return cls(segment_ids, None, more, most_ahead) if most_ahead else cls(segment_ids, more)


PLAIN = Visibility()  # rows of one document


class LayerInputs(NamedTuple):
    """The inputs of the layers.

    Attributes:
        visibility: of the rows.
        cache: of generation; None outside of it.
        device_type: "tpu", "xla-cpu", "cuda" or "cpu"; the cached attention chooses its kernels by it.
        additions: (B, S, H) tensors for the results of the first layers; empty without images.
    """

    visibility: Visibility = PLAIN
    cache: LayerCache | None = None
    device_type: str = "cpu"
    additions: tuple[torch.Tensor, ...] = ()


class _Thread(threading.local):
    def __init__(self) -> None:  # runs in each thread; torch.compile takes a class attribute for a constant
        self.inputs = LayerInputs()


_thread = _Thread()


def current() -> LayerInputs:
    """Returns the inputs that are bound in this thread; outside of `bound` there are none."""
    return _thread.inputs


@contextlib.contextmanager
def bound(inputs: LayerInputs) -> Iterator[None]:
    """Sets the inputs of this thread while it is open."""
    before, _thread.inputs = _thread.inputs, inputs
    try:
        yield
    finally:
        _thread.inputs = before


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs with the inputs bound now, whenever and in whichever thread it is called."""
    inputs = current()

    def run(*args: Any, **kwargs: Any) -> Any:
        with bound(inputs):
            return function(*args, **kwargs)

    return run
