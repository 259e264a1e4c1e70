"""JAX functions, such as Pallas kernels, as operations of TorchTPU."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch


def call(function: functools.partial[Any], tensors: Sequence[torch.Tensor], outputs: int) -> list[torch.Tensor]:
    """Runs a JAX function on tensors of TorchTPU's device and returns its results, one tensor per array.

    Args:
        function: a module's function, with its static settings as the only bound argument; returns a tuple of arrays.
        tensors: its arguments.
        outputs: number of its results.
    """
    found = _operation(function.func, function.args, len(tensors), outputs)(*tensors)
    return [found] if outputs == 1 else list(found)


@functools.cache
def _operation(function: Callable[..., Any], settings: tuple[Any, ...], inputs: int, outputs: int) -> Any:
    """Registers `function(*settings, *arrays)` as an operation of `inputs` tensors, and returns it.

    The operation returns a tensor, or a tuple for several `outputs`. TorchTPU reads these numbers from its signature.
    """
    import jax

    def run(*arrays: Any) -> Any:
        found = function(*settings, *arrays)
        return found[0] if outputs == 1 else tuple(found)

    kind, array = inspect.Parameter.POSITIONAL_OR_KEYWORD, jax.Array
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # which inspect reads
        [inspect.Parameter(f"input{number}", kind, annotation=array) for number in range(inputs)],
        return_annotation=array if outputs == 1 else tuple[(array,) * outputs],  # type: ignore[misc]  # made here
    )
    run.__name__ = f"{function.__name__.strip('_')}_{_operation.cache_info().misses}"
    return torch.tpu.pallas.jax_op(f"tpu_kit::{run.__name__}", run)  # type: ignore[attr-defined]  # torch_tpu adds it
