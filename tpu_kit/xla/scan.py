"""Loops in a program of XLA, and functions that are traced once and then called as one operation.

On XLA, `scan` is a while loop of the program; elsewhere it is a Python loop. `Traced` keeps the trace of a function:
torch_xla traces a function anew in each call, which for 16 decode steps of a 30-layer model takes longer than the
steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch

from tpu_kit.xla.program import refusing

Tensors = list[torch.Tensor]
Body = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
_tracing = threading.Lock()  # replicas of XLA:CPU are threads


def scan(body: Body, carry: Tensors, inputs: Tensors, *, reverse: bool = False) -> tuple[Tensors, Tensors]:
    """Runs `body` for each slice of `inputs`, without autograd.

    On XLA the body is traced once, with tensors without values. The carry must contain all tensors that it needs: the
    loop would repeat the computation of other tensors in every turn.

    Args:
        body: takes the carry and the slices of one turn, and returns the next carry, of equal shapes and dtypes, and
            the outputs of the turn.
        carry: at the start; no booleans, which the loop does not support.
        inputs: (N, ...) each, one or more.
        reverse: from the last slice to the first; outputs are in the order of the inputs.

    Returns:
        The last carry, and the outputs stacked, (N, ...) each.
    """
    turns = inputs[0].shape[0]
    if inputs[0].device.type == "xla" and turns > 1:
        # The public `scan` traces the body through AOTAutograd in every step, for a backward pass that is not needed.
        from torch_xla.experimental.scan import _scan_impl_flat

        return _scan_impl_flat(body, carry, inputs, reverse=reverse)
    outputs = []
    for turn in reversed(range(turns)) if reverse else range(turns):
        carry, output = body(carry, [tensor[turn] for tensor in inputs])
        outputs.append(output)
    if reverse:
        outputs.reverse()
    return carry, [torch.stack(column) for column in zip(*outputs, strict=True)]


def in_turn(body: Body, carry: Tensors, inputs: Tensors) -> tuple[Tensors, Tensors]:
    """Runs `scan` unrolled, for a few turns; on XLA each turn begins after the previous one has ended.

    The compiler copies the carry of a loop, such as the three matrices of an MLP; unrolled it copies nothing.
    """
    outputs: list[Tensors] = []
    done: Tensors = []
    for turn in range(inputs[0].shape[0]):
        before = carry
        carry, output = body(carry, after(done, [tensor[turn] for tensor in inputs]))
        outputs.append(output)
        done = [*output, *(new for new, old in zip(carry, before, strict=True) if new is not old)]
    return carry, [torch.stack(column) for column in zip(*outputs, strict=True)]


def after(done: Tensors, tensors: Tensors) -> Tensors:
    """Returns the tensors, which on XLA then depend on all of `done`; other devices compute in order anyway."""
    if not done or tensors[0].device.type != "xla":
        return tensors
    import torch_xla.core.xla_model as xm

    later = [tensor.clone() for tensor in tensors]
    xm.optimization_barrier_([*done, *later])
    return later


@cache
def _taken() -> Any:
    """Returns an operation that reads a slice of a tensor, which torch_xla's indexing cannot do."""
    import torch_xla.core.xla_builder as xb
    import torch_xla.core.xla_op_registry as registry

    def take(tensor: Any, place: Any) -> Any:
        zero = xb.Op.scalar(place.builder(), 0, dtype=xb.Type.S64)
        return tensor.dynamic_slice([place, *[zero] * (tensor.shape().rank - 1)], [1, *tensor.shape().sizes[1:]])

    return registry.register("tpu_kit_take_part", take)


def slice_at(stack: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Returns a slice of a stack, (G, ...), at `place`, an integer on the device."""
    if stack.device.type != "xla":
        return stack[place]
    found: torch.Tensor = _taken()(stack, place)[0]
    return found


class Traced:
    """A function on an XLA device, traced once as a computation.

    Weights are inputs of the computation by reference, so a call uses their present values.

    Args:
        name: of the computation.
        fn: takes tensors and returns new ones; it must not change them in place. With `steps` it takes the carried
            tensors first, and returns their new values and then the tensors to stack.
        example: tensors of the shapes and dtypes of the calls.
        weights: other tensors that `fn` uses, such as a model's parameters and buffers.
        steps: number of turns of a loop over `fn` on the device; None runs it once.
        carried: number of tensors that each step passes to the next; the others are constant.
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
        import torch_xla
        import torch_xla.core.xla_builder as xb

        self._name = f"tpu_kit::{name}"
        with torch.no_grad(), _tracing, refusing():
            fakes = [xb.create_placeholder_tensor(tensor.shape, tensor.dtype) for tensor in example]
            # XLA removes the product with 1. An output must not be an input itself.
            outputs = list(fn(*(fake * 1 for fake in fakes)))
            context: Any = torch_xla._XLAC.lowering.LoweringContext(name)
            context.set_name_string(name)
            context.build(outputs)
            body = xb.computation_from_module_proto(name, context.hlo())
            # For each parameter of the body the place of its tensor: among the example's, then those held here.
            places = {context.tensor_parameter_id(fake): place for place, fake in enumerate(fakes)}
            places.pop(-1, None)  # of unused tensors
            mapping = context.device_parameter_id_tensor_mapping()
            held = {number: tensor for number, tensor in mapping.items() if number not in places}
            for weight in weights:  # the tensor itself, not its value at the trace
                if (number := context.tensor_parameter_id(weight)) in held:
                    held[number] = weight
            self._held = list(held.values())
            places |= {number: len(example) + index for index, number in enumerate(held)}
            self._extra: list[torch.Size] = []
            if steps is None:
                self._order = [places[number] for number in range(len(places))]
                self._computation = body
                return
            self._order = list(range(len(example) + len(held)))
            stacked = outputs[carried:]
            self._extra = [torch.Size((steps, *output.shape)) for output in stacked]
            self._computation = _loop(
                name, body, [places[number] for number in range(len(places))], [*fakes, *self._held], stacked, steps,
                carried,
            )  # fmt: skip
        self._results = (*range(1, 1 + carried), *range(1 + len(self._order), 1 + len(self._order) + len(stacked)))

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Adds the computation to the graph; with `steps` returns the carried tensors, then the stacked ones."""
        import torch_xla

        everything = [*tensors, *self._held]
        inputs = [everything[place] for place in self._order]
        call: Any = torch_xla._XLAC._xla_user_computation
        if not self._extra:
            found: list[torch.Tensor] = call(self._name, inputs, self._computation)
            return found
        device = tensors[0].device
        zeros = [torch.zeros(size, dtype=torch.float32, device=device) for size in self._extra]
        first = torch.zeros((), dtype=torch.int64, device=device)
        found = call(self._name, [first, *inputs, *zeros], self._computation)
        return [found[index] for index in self._results]


def _loop(
    name: str,
    body: Any,
    order: list[int],
    inputs: Tensors,
    stacked: Tensors,
    steps: int,
    carried: int,
) -> Any:
    """Builds a while loop of `steps` calls of `body`; its parameters are the counter, inputs and stacked outputs."""
    import torch_xla.core.xla_builder as xb

    builder = xb.create_builder(name)
    shapes = [xb.Shape.create(xb.Type.S64, ())]
    shapes += [xb.tensor_shape(tensor) for tensor in inputs]
    shapes += [xb.Shape.create(xb.Type.F32, (steps, *tensor.shape)) for tensor in stacked]
    parameters = [xb.mkparam(builder, number, shape) for number, shape in enumerate(shapes)]
    end = 1 + len(inputs)

    def more(count: Any, *_: Any) -> Any:
        return count < xb.Op.scalar(count.builder(), steps, dtype=xb.Type.S64)

    def step(count: Any, *state: Any) -> Any:
        values, filled = list(state[: end - 1]), list(state[end - 1 :])
        result = xb.Op.call(body, [values[place] for place in order])
        values[:carried] = [result.get_tuple_element(index) for index in range(carried)]
        zero = xb.Op.scalar(count.builder(), 0, dtype=xb.Type.S64)
        for index, tensor in enumerate(stacked):
            new = result.get_tuple_element(carried + index).broadcast((1,))
            filled[index] = filled[index].dynamic_update_slice(new, [count, *[zero] * tensor.ndim])
        one = xb.Op.scalar(count.builder(), 1, dtype=xb.Type.S64)
        return (count + one, *values, *filled)

    return xb.Op.mkwhile(parameters, more, step).build(name)


def write_slot(stack: torch.Tensor, new: torch.Tensor, place: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Returns a stack of buffers with `new` written into one of them, from a slot on, in place.

    torch_xla lowers `index_copy` to a scatter, which a TPU cannot do in place.

    Args:
        stack: (G, B, heads, S, D).
        new: (B, heads, n, D), of the same dtype.
        place: of the buffer, () int64.
        slot: (1,) int64.
    """
    if stack.device.type != "xla":
        stack[place].index_copy_(2, slot + torch.arange(new.shape[2], device=new.device), new)
        return stack
    found: torch.Tensor = _slot_writer()(stack, new, place, slot)
    return found


@cache
def _slot_writer() -> Any:
    import torch_xla.core.xla_builder as xb
    import torch_xla.core.xla_op_registry as registry

    def lower(stack: Any, new: Any, place: Any, slot: Any) -> Any:
        zero = xb.Op.scalar(slot.builder(), 0, dtype=xb.Type.S64)
        return stack.dynamic_update_slice(new.broadcast((1,)), [place, zero, zero, slot.reshape(()), zero])

    return registry.register("tpu_kit_write_slot", lower)


def replace_contents(buffers: Sequence[torch.Tensor], found: list[torch.Tensor]) -> None:
    """Copies new contents into buffers, in place on XLA, and clears the list `found`.

    Tensors that are alive when the graph is cut are outputs with memory of their own.
    """
    for buffer, new in zip(buffers, found, strict=True):
        buffer.copy_(new)
    found.clear()
