"""Functions as programs: traced by `make_fx`, with their backward passes, and compiled by TorchTPU.

TorchTPU runs each operation as a program of its own unless a graph is compiled. Its compiler for graphs is private, and
alone takes the numbers of donated inputs; `torch.compile` takes the same graph without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_kit.torch_tpu import loop
from tpu_kit.torch_tpu.environment import ELSEWHERE
from tpu_kit.torch_tpu.process_group import check_all_reduces

Tensors = list[torch.Tensor]


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor of TorchTPU's device belongs to a function that is being traced."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return tensor.device.type == "tpu" and get_proxy_mode() is not None


def trace(fn: Callable[..., Sequence[torch.Tensor]], example: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Traces a function of tensors, which may use autograd, with tensors without values.

    Args:
        fn: takes tensors and returns new ones; it may not change its arguments.
        example: tensors of the shapes, dtypes and devices of the calls.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch_tpu._internal.compile import _backend

    tables: dict[Any, Any] = dict(_backend._TPU_DECOMPOSITIONS)
    return make_fx(fn, tracing_mode="fake", decomposition_table=tables)(*example)


class Program:
    """A function of tensors, traced and compiled when it is made, for tensors of the shapes of an example.

    Args:
        name: shown in profiles.
        fn: see `trace`.
        example: see `trace`.
        donated: how many of the arguments, the first, may be overwritten by results; they have no values after a call.
        replicas: that run the program together, which sums over them once if there are several.

    Raises:
        ValueError: it does not; see `process_group.check_all_reduces`.
    """

    def __init__(
        self, name: str, fn: Callable[..., Sequence[torch.Tensor]], example: Sequence[torch.Tensor], donated: int = 0,
        replicas: int = 1,
    ) -> None:  # fmt: skip
        self._run = _compiled(trace(fn, example), example, donated, name, replicas)

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        """Runs the program."""
        return list(self._run(*tensors))


class Programs:
    """Functions of trees of tensors, each a program for each structure and shapes of its arguments.

    Several `replicas` run each of them together; see `Program`.
    """

    def __init__(self, replicas: int = 1) -> None:
        self._replicas = replicas
        self._programs: dict[Any, Program] = {}
        self._results: dict[Any, Any] = {}  # structures of what the functions return

    def run(self, name: str, fn: Callable[..., Any], donated: int, *trees: Any) -> Any:
        """Runs a function; a later one of the same name must compute the same. For `donated` see `Program`."""
        leaves, given = tree_flatten(trees)
        key = name, given, tuple((tensor.shape, tensor.dtype) for tensor in leaves)
        if key not in self._programs:

            def flat(*tensors: torch.Tensor) -> Tensors:
                found, self._results[key] = tree_flatten(fn(*tree_unflatten(list(tensors), given)))
                return found

            self._programs[key] = Program(name, flat, leaves, donated, self._replicas)
        return tree_unflatten(self._programs[key](*leaves), self._results[key])


class ModelProgram:
    """A function that computes with a model, as a program whose inputs are also the present tensors of the model.

    Args:
        name: shown in profiles.
        fn: takes tensors and returns others. With `steps` it takes the carried tensors first, and returns their new
            values and then the tensors to stack.
        example: tensors of the shapes and dtypes of the calls.
        model: its parameters and buffers may change between calls, its shapes not.
        steps: number of turns of a loop over `fn`; None runs it once.
        carried: number of tensors that each step passes to the next, and a call overwrites; the others are constant.
    """

    def __init__(
        self, name: str, fn: Callable[..., Sequence[torch.Tensor]], example: Sequence[torch.Tensor],
        model: torch.nn.Module, steps: int | None = None, carried: int = 0,
    ) -> None:  # fmt: skip
        self._model, count = model, len(example)
        tensors = tensors_of(model)

        def run(given: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Tensors:
            with computing_with(model, dict(zip(tensors, weights, strict=True))):
                return [tensor.clone() for tensor in fn(*(tensor.clone() for tensor in given))]

        def turn(state: Tensors, _: Tensors, held: Tensors) -> tuple[Tensors, Tensors]:
            found = run([*state, *held[: count - carried]], held[count - carried :])
            return found[:carried], found[carried:]

        def flat(*inputs: torch.Tensor) -> Tensors:
            if steps is None:
                return run(inputs[:count], inputs[count:])
            turns = torch.arange(steps, device=inputs[0].device)
            state, outputs = loop.scan(turn, list(inputs[:carried]), [turns], constants=list(inputs[carried:]))
            return [*state, *outputs]

        self._program = Program(name, flat, [*example, *tensors.values()], carried)

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        """Runs the program; with `steps` returns the carried tensors, then the stacked ones."""
        return self._program(*tensors, *tensors_of(self._model).values())


def trace_with(
    model: torch.nn.Module, fn: Callable[..., Sequence[torch.Tensor]], example: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    """Traces a function that computes with a model, as `trace`; its further arguments are `tensors_of` the model."""
    tensors, count = tensors_of(model), len(example)

    def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        with computing_with(model, dict(zip(tensors, inputs[count:], strict=True))):
            return fn(*inputs[:count])

    return trace(run, [*example, *tensors.values()])


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a model by name, a tied one once."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@contextmanager
def computing_with(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Lets a model compute with other tensors than its own, by name."""
    from torch.nn.utils.stateless import _reparametrize_module

    with _reparametrize_module(model, dict(tensors), tie_weights=True):
        yield


def _compiled(
    graph: torch.fx.GraphModule, example: Sequence[torch.Tensor], donated: int, name: str, replicas: int
) -> Any:
    """Compiles a graph; without donation where the private compiler does not take it: the old values stay beside."""
    try:
        from torch_tpu._internal.compile.compiler import StaticCompiler

        done = StaticCompiler(debug=True if replicas > 1 else None)(  # with its text
            graph, list(example), True, donated_inputs=list(range(donated)), module_name=name
        )
    except (ImportError, TypeError) as error:
        if replicas > 1:
            unread = f"the program of this torch_tpu cannot be read ({error}), so its all-reduce is not checked"
            raise ValueError(f"launch.num_replicas={replicas}: {unread}; set it to 1, or {ELSEWHERE}") from error
        return torch.compile(graph, backend="tpu", fullgraph=True)
    if replicas > 1:
        check_all_reduces(done.mlir_text, replicas)
    return done
