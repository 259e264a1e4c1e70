"""Loops in XLA programs, and functions that are traced once and then called as a single operation.

On XLA (torch_xla or TorchTPU), `scan` is a while loop of the program; elsewhere it is a Python loop. `Traced` keeps the
trace of a function, because torch_xla traces a function again in every call. For 16 decode steps of a 30-layer model,
tracing takes longer than the steps.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.torch_tpu import loop, program, slices
from tpu_kit.xla.traced_program import has_kernels, placeholder, refusing

Tensors = list[torch.Tensor]
Tree = Any
"""Tensors in nested lists, tuples and dictionaries."""
Body = Callable[[Tree, Tree], tuple[Tree, Tree]]
_FlatBody = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
PROGRAM_DEVICES = ("tpu", "torch-tpu", "xla-cpu")
"""Values of `launch.device_type` for which a step is an XLA program with its layers as loops."""

_tracing = threading.Lock()  # XLA:CPU replicas are threads


def scan(body: Body, carry: Tree, inputs: Tree, *, reverse: bool = False, unrolled: bool = False) -> tuple[Tree, Tree]:
    """Runs `body` for each slice of `inputs` along their first dimension, without autograd.

    On XLA it is a loop of the program: the body is traced once, with tensors that have no values. The carry must
    contain all tensors that the body needs, because the loop would recompute other tensors in every iteration. On other
    devices it is a Python loop.

    Args:
        body: takes the carry and the slices of an iteration; returns the next carry, with equal structure, shapes and
            dtypes, and the outputs of the iteration.
        carry: the initial carry; booleans are not supported.
        inputs: a tree of one or more tensors (N, ...).
        reverse: whether to go from the last slice to the first; outputs keep the order of the inputs.
        unrolled: whether to call the body N times on XLA, too, for small N; the iterations run one after another. The
            compiler copies the carry of a loop, such as the three matrices of an MLP; an unrolled loop copies nothing.

    Returns:
        The final carry, and the outputs stacked to (N, ...).
    """
    (start, carried), (stacks, given) = tree_flatten(carry), tree_flatten(inputs)
    made: Any = None

    def flat(state: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
        nonlocal made
        after, outputs = body(tree_unflatten(state, carried), tree_unflatten(slices, given))
        leaves, made = tree_flatten(outputs)
        return tree_leaves(after), leaves

    kind: Any = _scan_unrolled
    if stacks[0].shape[0] > 1 and not unrolled:
        kind = _scan_on_xla if stacks[0].device.type == "xla" else loop.scan if program.is_traced(stacks[0]) else kind
    end, outputs = kind(flat, start, stacks, reverse)
    return tree_unflatten(end, carried), tree_unflatten(outputs, made)


def _scan_unrolled(body: _FlatBody, carry: Tensors, inputs: Tensors, reverse: bool) -> tuple[Tensors, Tensors]:
    outputs: list[Tensors] = []
    done: Tensors = []
    turns = range(inputs[0].shape[0])
    for turn in reversed(turns) if reverse else turns:
        before = carry
        carry, output = body(carry, after(done, [tensor[turn] for tensor in inputs]))
        outputs.append(output)
        done = [*output, *(new for new, old in zip(carry, before, strict=True) if new is not old)]
    if reverse:
        outputs.reverse()
    return carry, [torch.stack(column) for column in zip(*outputs, strict=True)]


_loops: dict[Any, tuple[Any, list[int]]] = {}  # compiled loops by the trace of their body


def _scan_on_xla(body: _FlatBody, carry: Tensors, inputs: Tensors, reverse: bool) -> tuple[Tensors, Tensors]:
    """Traces the body, and lowers it unless there is a loop with an equal trace.

    torch_xla's own scan lowers the body in every step, and its public function also traces it with AOTAutograd. Traces
    are compared by the hash that torch_xla uses to find the compiled program of a graph.
    """
    import torch_xla
    from torch_xla.experimental.scan import _scan_impl_flat

    xla: Any = torch_xla._XLAC
    turns, device, end = inputs[0].shape[0], inputs[0].device, len(carry)
    fakes = [placeholder(tensor.shape, tensor.dtype) for tensor in carry]
    fakes += [placeholder(tensor.shape[1:], tensor.dtype) for tensor in inputs]
    given = [fake * 1 for fake in fakes]  # XLA removes the product
    state, outputs = body(given[:end], given[end:])
    traced = [*state, *outputs]
    numbers, read = xla._get_tensors_xla_device_data_node(traced)
    if xla._get_seed_info_id() in numbers:  # for random numbers, torch_xla's scan has a seed for every iteration
        return _scan_impl_flat(body, carry, inputs, reverse=reverse)
    unfilled = [_unfilled((turns, *output.shape), output.dtype, [*carry, *inputs][0]) for output in outputs]
    # The hash does not contain which of the body's tensors a parameter is, nor which outputs are the same tensor.
    first: dict[int, int] = {}
    names = [*map(xla._xla_get_tensor_id, fakes), *numbers, *map(xla._xla_get_tensor_id, traced)]
    alike = tuple(first.setdefault(name, place) for place, name in enumerate(names))
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in (*carry, *inputs, *unfilled))
    key = xla._get_graph_hash(traced), alike, shapes, reverse
    if key not in _loops:
        computation, order, held = _lowered("FnComputation", fakes, traced, read)
        loop = _loop("scan", computation, order, [carry, inputs, unfilled, held], turns, end, reverse)
        _loops[key] = loop, [list(map(id, read)).index(id(tensor)) for tensor in held]
    loop, places = _loops[key]
    everything = [torch.tensor(0, device=device), *carry, *inputs, *unfilled, *(read[place] for place in places)]
    found = xla._xla_user_computation("xla::scan", everything, loop)
    return found[1 : 1 + end], found[1 + len(fakes) : 1 + len(fakes) + len(outputs)]


def _unfilled(shape: tuple[int, ...], dtype: torch.dtype, given: torch.Tensor) -> torch.Tensor:
    """Returns a stack for a loop's outputs: zeros, or on a TPU uninitialised memory, allocated once `given` exists."""
    if not has_kernels() or active_mesh().size > 1:  # XLA:CPU lacks the call, and a mesh would not shard its result
        return torch.zeros(shape, device=given.device, dtype=dtype)
    import torch_xla

    # Marked as having a side effect: otherwise the compiler merges equal calls and copies the result.
    return torch_xla._XLAC._xla_custom_call([given], "AllocateBuffer", [shape], [dtype], True, "", 1, {})[0]


def _lowered(
    name: str, fakes: Tensors, traced: Tensors, read: Iterable[torch.Tensor]
) -> tuple[Any, list[int], Tensors]:
    """Lowers a trace to a computation.

    Args:
        name: name of the computation.
        fakes: the arguments of the traced function, tensors without values.
        traced: its results, none of which is an argument.
        read: other tensors that it may have read.

    Returns:
        The computation; for every parameter, the index of its tensor in the list of `fakes` followed by the other
        tensors read; and these other tensors.
    """
    import torch_xla
    import torch_xla.core.xla_builder as xb

    context: Any = torch_xla._XLAC.lowering.LoweringContext(name)
    context.set_name_string(name)
    context.build(traced)
    places = {context.tensor_parameter_id(fake): place for place, fake in enumerate(fakes)}
    places.pop(-1, None)  # the number of unused tensors
    mapping = context.device_parameter_id_tensor_mapping()
    held = {number: tensor for number, tensor in mapping.items() if number not in places}
    for tensor in read:  # the tensor itself, not its value at the trace
        if (number := context.tensor_parameter_id(tensor)) in held:
            held[number] = tensor
    places |= {number: len(fakes) + index for index, number in enumerate(held)}
    computation = xb.computation_from_module_proto(name, context.hlo())
    return computation, [places[number] for number in range(len(places))], list(held.values())


def _loop(
    name: str, body: Any, order: list[int], groups: Sequence[Tensors], turns: int, carried: int, reverse: bool = False
) -> Any:
    """Builds a while loop over calls of `body`; its parameters are a counter, from 0, and the tensors of the groups.

    Args:
        name: name of the computation.
        body: a computation that takes the state, the slices of the inputs and the held tensors, permuted by `order`,
            and returns the new values of the first `carried` tensors of the state, and the outputs.
        order: for each parameter of `body`, the index of its tensor.
        groups: the state, the inputs (turns, ...), the stacks of the outputs (turns, ...), and the held tensors.
        turns: number of iterations.
        carried: number of tensors of the state that `body` returns.
        reverse: whether to go from the last slice to the first.

    Returns:
        The computation; its results are the final values of its parameters, in their order.
    """
    import torch_xla.core.xla_builder as xb
    from torch_xla.experimental.scan import dynamic_slice, dynamic_update_slice

    builder = xb.create_builder(name)
    shapes = [xb.Shape.create(xb.Type.S64, ()), *(xb.tensor_shape(tensor) for group in groups for tensor in group)]
    parameters = [xb.mkparam(builder, number, shape) for number, shape in enumerate(shapes)]
    ends = list(itertools.accumulate(map(len, groups)))

    def more(count: Any, *_: Any) -> Any:
        return count < xb.Op.scalar(count.builder(), turns, dtype=xb.Type.S64)

    def turn(count: Any, *values: Any) -> Any:
        state, inputs, filled, held = (values[start:end] for start, end in itertools.pairwise([0, *ends]))
        place = xb.Op.scalar(count.builder(), turns - 1, dtype=xb.Type.S64) - count if reverse else count
        given = [*state, *(dynamic_slice(stack, place) for stack in inputs), *held]
        result = xb.Op.call(body, [given[number] for number in order])
        new = [result.get_tuple_element(number) for number in range(carried)]
        stacks = [dynamic_update_slice(stack, result.get_tuple_element(number), place)
                  for number, stack in enumerate(filled, carried)]  # fmt: skip
        one = xb.Op.scalar(count.builder(), 1, dtype=xb.Type.S64)
        return (count + one, *new, *state[carried:], *inputs, *stacks, *held)

    return xb.Op.mkwhile(parameters, more, turn).build(name)


def after(done: Tensors, tensors: Tensors) -> Tensors:
    """Returns copies of `tensors` that an XLA program computes after all of `done`.

    On other devices, which compute in order anyway, or with an empty `done`, it returns `tensors` itself.
    """
    if done and program.is_traced(tensors[0]):
        return loop.after(done, tensors)
    if not done or tensors[0].device.type != "xla":
        return tensors
    import torch_xla.core.xla_model as xm

    later = [tensor.clone() for tensor in tensors]
    xm.optimization_barrier_([*done, *later])
    return later


@cache
def _taken() -> Any:
    """Returns an operation (stack, place) that reads a slice (1, ...) at an index on the device; torch_xla has none."""
    import torch_xla.core.xla_builder as xb
    import torch_xla.core.xla_op_registry as registry

    def take(tensor: Any, place: Any) -> Any:
        zero = xb.Op.scalar(place.builder(), 0, dtype=xb.Type.S64)
        return tensor.dynamic_slice([place, *[zero] * (tensor.shape().rank - 1)], [1, *tensor.shape().sizes[1:]])

    return registry.register("tpu_kit_take_part", take)


def slice_at(stack: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Returns the slice (...) of a stack (G, ...) at `place`, an integer tensor () on the stack's device."""
    if program.is_traced(stack):
        return slices.take(stack, place)
    if stack.device.type != "xla":
        return stack[place]
    return _taken()(stack, place)[0]


class Traced:
    """A function on an XLA device that is traced once as a computation.

    Weights are inputs of the computation by reference, so a call uses their current values.

    Args:
        name: name of the computation.
        fn: takes tensors and returns new tensors; it must not change them in place. With `steps`, it takes the carried
            tensors first, and returns their new values followed by the tensors to stack.
        example: tensors with the shapes and dtypes of the calls.
        weights: other tensors that `fn` uses, such as a model's parameters and buffers.
        steps: number of iterations of a loop over `fn` on the device; None runs it once.
        carried: number of tensors that a step passes to the next step; the other tensors are constant.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Sequence[torch.Tensor]],
        example: Sequence[torch.Tensor],
        weights: Iterable[torch.Tensor],
        steps: int | None = None,
        carried: int = 0,
    ) -> None:
        self._name = f"tpu_kit::{name}"
        with torch.no_grad(), _tracing, refusing():
            fakes = [placeholder(tensor.shape, tensor.dtype) for tensor in example]
            # An output must not itself be an input; XLA removes the product.
            outputs = list(fn(*(fake * 1 for fake in fakes)))
            self._computation, self._order, self._held = _lowered(name, fakes, outputs, weights)
            self._loops, self._carried, self._stacks = (
                steps is not None,
                carried,
                list[tuple[torch.Size, torch.dtype]](),
            )
            if steps is not None:
                stacks = [placeholder((steps, *output.shape), output.dtype) for output in outputs[carried:]]
                groups = [fakes, [], stacks, self._held]
                self._computation = _loop(name, self._computation, self._order, groups, steps, carried)
                self._stacks = [(stack.shape, stack.dtype) for stack in stacks]

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Adds a call to the graph; returns its results, with `steps` the carried tensors, then the stacked tensors."""
        import torch_xla

        call: Any = torch_xla._XLAC._xla_user_computation
        if not self._loops:
            given = [*tensors, *self._held]
            return call(self._name, [given[place] for place in self._order], self._computation)
        device, end = tensors[0].device, 1 + len(tensors)
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in self._stacks]
        count = torch.zeros((), dtype=torch.int64, device=device)
        found = call(self._name, [count, *tensors, *zeros, *self._held], self._computation)
        return found[1 : 1 + self._carried] + found[end : end + len(zeros)]


def replace_contents(buffers: Sequence[torch.Tensor], found: list[torch.Tensor]) -> None:
    """Copies each tensor of `found` into the buffer at its place in `buffers`; then clears the list `found`.

    On TorchTPU it copies nothing: the tensors become the buffers' data. It clears the list because, on torch_xla,
    tensors that are alive when the graph is cut would be outputs with their own memory; keep no other references.
    """
    for buffer, new in zip(buffers, found, strict=True):
        if buffer.device.type == "tpu":  # tensors are not lazy, and a copy would be a separate program
            buffer.data = new
        else:
            buffer.copy_(new)
    found.clear()
