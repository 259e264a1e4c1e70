"""Makes programs of functions: traces them with `make_fx`, backward pass included, and compiles them with TorchTPU.

Without a compiled graph, TorchTPU runs every operation as a program. Its graph compiler is private; only that compiler
supports donated inputs. `torch.compile` compiles the same graph without donation.
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
    """Whether a tensor is on TorchTPU's device in a function that is being traced."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return tensor.device.type == "tpu" and get_proxy_mode() is not None


def trace(fn: Callable[..., Sequence[torch.Tensor]], example: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Traces a function of tensors, which may use autograd, with fake tensors; returns the graph, called like `fn`.

    Args:
        fn: takes tensors and returns new tensors; it must not change its arguments.
        example: tensors with the shapes, dtypes and devices of the calls.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch_tpu._internal.compile import _backend

    tables: dict[Any, Any] = dict(_backend._TPU_DECOMPOSITIONS)
    return make_fx(fn, tracing_mode="fake", decomposition_table=tables)(*example)


class Program:
    """A function of tensors that is traced and compiled, on construction, for the shapes of an example.

    Args:
        name: name of the program in profiles.
        fn: see `trace`.
        example: see `trace`.
        donated: number of the first arguments that results may overwrite; they have no values after a call.
        replicas: number of replicas that run the program together; with several, it must sum over them once.

    Raises:
        ValueError: see `process_group.check_all_reduces`.
    """

    def __init__(
        self, name: str, fn: Callable[..., Sequence[torch.Tensor]], example: Sequence[torch.Tensor], donated: int = 0,
        replicas: int = 1,
    ) -> None:  # fmt: skip
        self._run = _compiled(trace(fn, example), example, donated, name, replicas)

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        """Runs the program and returns its results."""
        return list(self._run(*tensors))


class Programs:
    """Runs functions of trees of tensors as programs, compiled once per name, structure and shapes of the arguments.

    For `replicas` see `Program`.
    """

    def __init__(self, replicas: int = 1) -> None:
        self._replicas = replicas
        self._programs: dict[Any, Program] = {}
        self._results: dict[Any, Any] = {}  # structures of the functions' results

    def run(self, name: str, fn: Callable[..., Any], donated: int, *trees: Any) -> Any:
        """Runs `fn(*trees)` as a program and returns its tree; equal names must mean equal functions.

        Raises as `Program`.

        Args:
            name: name of the program. For a known name with the same structure, shapes and dtypes, `fn` is not called.
            fn: takes trees of tensors and returns a tree of new tensors; it must not change its arguments.
            donated: number of the first tensors, counted through all trees, that results may overwrite. They have no
                values afterwards.
            trees: nested lists, tuples and dictionaries of tensors on the device.
        """
        leaves, given = tree_flatten(trees)
        key = name, given, tuple((tensor.shape, tensor.dtype) for tensor in leaves)
        if key not in self._programs:

            def flat(*tensors: torch.Tensor) -> Tensors:
                found, self._results[key] = tree_flatten(fn(*tree_unflatten(list(tensors), given)))
                return found

            self._programs[key] = Program(name, flat, leaves, donated, self._replicas)
        return tree_unflatten(self._programs[key](*leaves), self._results[key])


class ModelProgram:
    """A function that computes with a model, as a program with the model's current tensors as additional inputs.

    Args:
        name: name of the program in profiles.
        fn: takes tensors and returns tensors. With `steps`, it takes the carried tensors first, and returns their new
            values followed by the tensors to stack.
        example: tensors with the shapes and dtypes of the calls.
        model: the model; its parameters and buffers may change between calls, but not their shapes.
        steps: number of iterations of a loop over `fn`; None runs it once.
        carried: number of tensors that a step passes to the next step and a call overwrites; others are constant.
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
        """Runs the program; returns its results, with `steps` the carried tensors, then the stacked tensors."""
        return self._program(*tensors, *tensors_of(self._model).values())


def trace_with(
    model: torch.nn.Module, fn: Callable[..., Sequence[torch.Tensor]], example: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    """Traces `fn`, which uses `model`; the graph takes tensors like `example`, then the values of `tensors_of(model)`.

    The graph has the results of `fn`, see `trace`, and holds no tensor of the model.
    """
    tensors, count = tensors_of(model), len(example)

    def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        with computing_with(model, dict(zip(tensors, inputs[count:], strict=True))):
            return fn(*inputs[:count])

    return trace(run, [*example, *tensors.values()])


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers of a model by name, detached, not copied; tied tensors occur once."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@contextmanager
def computing_with(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Context manager in which a model computes with the given tensors, by name, instead of its own."""
    from torch.nn.utils.stateless import _reparametrize_module

    with _reparametrize_module(model, dict(tensors), tie_weights=True):
        yield


def _compiled(
    graph: torch.fx.GraphModule, example: Sequence[torch.Tensor], donated: int, name: str, replicas: int
) -> Any:
    """Compiles a graph, as `Program` says, and returns a function of its tensors.

    Without the private compiler, `torch.compile` compiles it without donation, and raises ValueError for several
    replicas.
    """
    try:
        from torch_tpu._internal.compile.compiler import StaticCompiler

        done = StaticCompiler(debug=True if replicas > 1 else None)(  # keeps the text
            graph, list(example), True, donated_inputs=list(range(donated)), module_name=name
        )
    except (ImportError, TypeError) as error:
        if replicas > 1:
            unread = f"the program of this torch_tpu cannot be read ({error}), so its all-reduce cannot be checked"
            raise ValueError(f"launch.num_replicas={replicas}: {unread}; set it to 1, or {ELSEWHERE}") from error
        return torch.compile(graph, backend="tpu", fullgraph=True)
    if replicas > 1:
        check_all_reduces(done.mlir_text, replicas)
    return done
