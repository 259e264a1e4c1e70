"""Functions of tensors that XLA runs as one program each, traced once and called from then on.

torch_xla traces a function anew each time it runs, which for 16 decode steps of a 30-layer model takes longer than the
steps themselves. Here the trace is made once, with placeholders, kept as an XLA computation, and every later call adds
it to the graph as a single operation. The weights are inputs of it by reference: a model that is trained further is
used as it is at each call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]
_tracing = threading.Lock()  # replicas of XLA:CPU are threads
_write: Any = None


class Traced:
    """A function on an XLA device as one computation.

    Args:
        name: of the computation.
        fn: gets the tensors and returns new ones; it must not change them in place. With `steps`, it gets the carried
            tensors first and returns these, changed, and then what to stack.
        example: tensors of the shapes and dtypes it will be called with.
        weights: what `fn` uses besides, such as a model's parameters and buffers.
        steps: run `fn` this many times in a loop on the device; None runs it once.
        carried: how many of the tensors go from step to step; the others are the same in each.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Tensors],
        example: Tensors,
        weights: Iterable[torch.Tensor],
        steps: int | None = None,
        carried: int = 0,
    ) -> None:
        import torch_xla
        import torch_xla.core.xla_builder as xb

        self._name = f"tpu_kit::{name}"
        with torch.no_grad(), _tracing:
            fakes = [xb.create_placeholder_tensor(tensor.shape, tensor.dtype) for tensor in example]
            # A product with 1, which XLA removes: what is returned unchanged must not be an input itself.
            outputs = list(fn(*(fake * 1 for fake in fakes)))
            context: Any = torch_xla._XLAC.lowering.LoweringContext(name)
            context.set_name_string(name)
            context.build(outputs)
            body = xb.computation_from_module_proto(name, context.hlo())
            # Parameter of the body -> what to pass: one of the tensors, by its place, or a tensor held here.
            places = {context.tensor_parameter_id(fake): place for place, fake in enumerate(fakes)}
            places.pop(-1, None)  # not used
            mapping = context.device_parameter_id_tensor_mapping()
            held = {number: tensor for number, tensor in mapping.items() if number not in places}
            for weight in weights:  # the tensor itself, not the value that it had now
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
        """Adds the computation to the graph; with `steps` it returns the carried tensors, then the stacked ones."""
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
    """A while loop of `steps` calls of `body`: parameters are the counter, the inputs, and what the loop fills."""
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


def write_slot(buffer: torch.Tensor, new: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """`buffer` with `new` written from index `slot` of axis 2 on, which XLA does in place.

    torch_xla lowers `index_copy` to a scatter, for which the TPU has no such way.

    Args:
        buffer: (B, heads, S, D).
        new: (B, heads, n, D), of the same dtype.
        slot: (1,) int64.
    """
    global _write
    if _write is None:
        import torch_xla.core.xla_builder as xb
        import torch_xla.core.xla_op_registry as registry

        def lower(buffer: Any, new: Any, slot: Any) -> Any:
            zero = xb.Op.scalar(slot.builder(), 0, dtype=xb.Type.S64)
            return buffer.dynamic_update_slice(new, [zero, zero, slot.reshape(()), zero])

        _write = registry.register("tpu_kit_write_slot", lower)
    found: torch.Tensor = _write(buffer, new, slot)
    return found


def replace_contents(buffers: Sequence[torch.Tensor], found: list[torch.Tensor]) -> None:
    """Gives buffers new contents, for which XLA then takes their memory.

    What was found must not be alive when the graph is cut: it would be a result of its own, and the cache there twice.
    """
    for buffer, new in zip(buffers, found, strict=True):
        buffer.copy_(new)
    found.clear()
