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
from collections.abc import Callable, Iterator
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


class LayerInputs(NamedTuple):
    """The inputs of the layers.

    Attributes:
        segment_ids: (B, S) integers, the number of the document of each token; 0 = padding. None for plain rows.
        prefix_ids: (B, S) integers, as in `attention.documents`; None if no documents share a prefix.
        cache: of generation; None outside of it.
        device_type: "tpu", "xla-cpu", "cuda" or "cpu"; the cached attention chooses its kernels by it.
        ahead: (B, S) integers, as in `attention.documents`; None if tokens see earlier ones alone.
        most_ahead: the largest number that `ahead` may have.
    """

    segment_ids: torch.Tensor | None = None
    prefix_ids: torch.Tensor | None = None
    cache: LayerCache | None = None
    device_type: str = "cpu"
    ahead: torch.Tensor | None = None
    most_ahead: int = 0


class _Thread(threading.local):
    def __init__(self) -> None:  # runs in each thread; torch.compile takes a class attribute for a constant
        self.inputs = LayerInputs()


_thread = _Thread()


def current() -> LayerInputs:
    """Returns the inputs that are bound in this thread; outside of `bound` all are None."""
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
