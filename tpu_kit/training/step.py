"""The training step (forward, loss, backward, one all-reduce, clipping, update, average) and the evaluation step.

On XLA both are single programs, and the host reads nothing in between. Numbers that change between steps are inputs: a
tensor holds learning rate and step, and the optimizer counts on the device. The planner compiles these functions.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from tpu_kit.config.loader import OptimConfig, TrainConfig
from tpu_kit.config.mesh import Spec
from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.model import causal_lm as models
from tpu_kit.model import preparation
from tpu_kit.model.loop.layer_calls import decoder_layers
from tpu_kit.model.loop.loop_structure import ALONE
from tpu_kit.torch_tpu.program import Programs, computing_with, tensors_of
from tpu_kit.training.checkpoint.manifest import Checkpoint
from tpu_kit.training.objectives import Objective, Sums
from tpu_kit.training.optimizer import is_matrix, wide
from tpu_kit.training.state import TrainState, UpdateSums
from tpu_kit.xla.scan import Traced, after
from tpu_kit.xla.sharding import constrain

_LOSS_DECAY = 0.9  # decay of the running mean of the loss: about ten updates


class Control(NamedTuple):
    """The numbers that change from step to step.

    Attributes:
        rate: the learning rate.
        window_open: 0 to restart the `UpdateSums`, 1 to continue them.
        step: number of the step, from 1.
    """

    rate: Any
    window_open: Any
    step: Any


def prepare_model(
    model: torch.nn.Module,
    config: TrainConfig,
    rt: Runtime,
    checkpoint: Checkpoint | None = None,
    extra_sums: int = 0,
) -> TrainState:
    """Prepares a loaded model in place for `train_step` (attention, layer loop, remat, device) and returns its state.

    Prepares `model.teacher` too, if there is one. Rank 0 prints a line about loops over layers. On a GPU, it turns
    torch.compile on or off in this process, by launch.torch_compile.

    Args:
        model: as `trainable.load_model` returns it.
        config: the run.
        rt: the replica.
        checkpoint: the checkpoint to continue from, which also sets the parameters; None creates a new state.
        extra_sums: number of extra sums of the objective, the length of `Objective.extra`.

    Raises:
        ValueError: from `preparation.prepare_layers`, `relative_rates` or `TrainState.load`.
    """

    def place() -> None:
        _place(model, config, rt)

    if checkpoint is not None:
        return TrainState.load(checkpoint, model, place, rt.local_device, config.optim, extra_sums, config.lora.plus)
    place()
    return TrainState(model, rt.local_device, config.optim, extra_sums=extra_sums, plus=config.lora.plus)


def _place(model: torch.nn.Module, config: TrainConfig, rt: Runtime) -> None:
    """Prepares a model's layers, and its teacher's, moves the model to the device, and on a GPU compiles the layers."""
    scanned = preparation.prepare_layers(model, config, rt.device_type)
    if scanned is not None and rt.rank == 0:
        print(f"layers           {scanned}", flush=True)
    if (teacher := getattr(model, "teacher", None)) is not None:
        preparation.prepare_frozen(teacher, config, rt.device_type)
    models.to_device(model, rt.local_device)
    if rt.device_type == "cuda":  # the loss is compiled too
        _set_compiler(config.launch.torch_compile)
    if rt.device_type == "cuda" and scanned is None:
        for layer in decoder_layers(model.get_decoder())[1]:  # type: ignore[operator]  # equal layers, compiled once; mypy takes get_decoder for a tensor
            layer.compile(dynamic=False)


def _set_compiler(compiles: bool) -> None:
    """Turns torch.compile on or off in this process, and silences its warnings about the kit's own choices."""
    import torch._dynamo  # takes a second, so it is imported only here

    torch.compiler.set_stance("default" if compiles else "force_eager")
    # A layer has a program for every shape, with and without gradients; at the default limit of 8 `grpo` runs eagerly.
    torch._dynamo.config.recompile_limit = 64
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # base_dtype=fp32 means full precision
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)  # about remat=outputs' context


def train_step(
    model: torch.nn.Module,
    state: TrainState,
    batches: Sequence[Mapping[str, torch.Tensor]],
    control: torch.Tensor,
    objective: Objective,
    optim: OptimConfig,
    runtime: Runtime,
) -> None:
    """Makes one update from `batches`, one per gradient accumulation pass; changes model and state in place.

    The summed gradients are divided by the objective's weight over all replicas and passes, so the update does not
    depend on how rows are split over them. If the loss or the gradient norm is not finite, or the mean loss is above
    `UpdateSums.usual` by more than `max_loss_rise`, all replicas skip the update and change only `state.report`. Only
    matrices are decayed. On XLA this only traces; `Runtime.sync` starts the computation.

    Args:
        model: the replica's model, in training mode.
        state: the model's state.
        batches: this replica's tensors on the device, as the objective takes them.
        control: a `Control` as a tensor, (3,) fp32 on the device: learning rate, window_open, number of the step.
        objective: the loss.
        optim: settings of the optimizer, clipping, average and limit of the loss.
        runtime: the replica.
    """
    totals = torch.zeros(2 + len(objective.extra), device=control.device)
    for number, batch in enumerate(batches):
        if number:
            # Otherwise XLA may start a pass before the previous pass ends, and keep the activations of both.
            done = [param.grad for param in state.params.values() if param.grad is not None]
            batch = dict(zip(batch, after(done, list(batch.values())), strict=True))
        totals = totals + _backward(model, state, batch, objective, optim)
    with torch.no_grad():  # a new value must be sharded as its tensor, or the compiler chooses another sharding
        gradients = {name: constrain(_take_gradient(param), state.specs[name]) for name, param in state.params.items()}
        runtime.all_reduce([*gradients.values(), totals])
        _update(state, gradients, totals, control, optim)


def _backward(
    model: torch.nn.Module,
    state: TrainState,
    batch: Mapping[str, torch.Tensor],
    objective: Objective,
    optim: OptimConfig,
) -> torch.Tensor:
    """Adds the gradients of a pass to the parameters' gradients; returns loss, weight and extra sums, (2 + N,)."""
    shapes = tuple((name, tensor.shape) for name, tensor in batch.items())
    if shapes not in state.passes:
        state.passes[shapes] = _traced(model, state, batch, objective) if _is_long(model, batch, optim) else None
    if (traced := state.passes[shapes]) is not None:
        sums_of_pass, *gradients = traced(*batch.values())
        for param, gradient in zip(state.params.values(), gradients, strict=True):
            param.grad = gradient if param.grad is None else param.grad.add_(gradient)
        return sums_of_pass
    sums = objective(model, batch)
    sums.loss.backward()
    return torch.stack([sums.loss.detach(), sums.weight, *sums.extra])


def _is_long(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], optim: OptimConfig) -> bool:
    """Whether a pass has too many operations to be traced in every step: layers outside of a loop, on XLA.

    Tracing 24 such layers takes the host 0.3 s, longer than a TPU computes. False on a mesh, for a user's objective,
    which may read values, and with dropout, which needs new random numbers in every step.
    """
    on_xla = next(iter(batch.values())).device.type == "xla" and active_mesh().size == 1
    if not on_xla or optim.remat != "none" or ":" in optim.objective:
        return False
    return not any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in model.modules())


def _traced(
    model: torch.nn.Module, state: TrainState, batch: Mapping[str, torch.Tensor], objective: Objective
) -> Traced:
    """Traces a pass once. The result takes a batch's tensors, in the order of `batch`.

    It returns the pass's sums, (2 + N,), then the gradients of `state.params`, in order; zeros for unused parameters.
    """

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        with torch.enable_grad():
            sums = objective(model, dict(zip(batch, tensors, strict=True)))
            found = torch.autograd.grad(sums.loss, list(state.params.values()), materialize_grads=True)
        return [torch.stack([sums.loss.detach(), sums.weight, *sums.extra]), *found]

    return Traced("pass", run, list(batch.values()), [*model.parameters(), *model.buffers()])


class SplitStep:
    """`train_step` as two programs, `accumulate` per pass and `apply`, so that the number of passes may change.

    It keeps the gradients in `param.grad`. The state must not be passed to `train_step` as well.
    """

    def __init__(
        self, model: torch.nn.Module, state: TrainState, objective: Objective, optim: OptimConfig, runtime: Runtime
    ) -> None:
        self._model, self._state, self._objective, self._optim, self._rt = model, state, objective, optim, runtime
        for name, param in state.params.items():
            (param.grad,) = runtime.put([torch.zeros(param.shape)], state.specs[name])
        (self._totals,) = runtime.put([torch.zeros(2 + len(objective.extra))])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors kept between the two programs, by name: gradients and sums."""
        gradients = {f"gradients.{name}": param.grad for name, param in self._state.params.items()}
        return {name: tensor for name, tensor in gradients.items() if tensor is not None} | {"totals": self._totals}

    def accumulate(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Adds the gradients and sums of one pass, without a collective."""
        self._totals.add_(_backward(self._model, self._state, batch, self._objective, self._optim))

    def apply(self, control: torch.Tensor) -> None:
        """Makes an update, as `train_step` does, from all passes since the last update; sets their sums to 0.

        `control` is as in `train_step`. All replicas must call it.
        """
        state = self._state
        with torch.no_grad():
            buffers = {name: param.grad for name, param in state.params.items() if param.grad is not None}
            gradients = {name: constrain(buffer, state.specs[name]) for name, buffer in buffers.items()}
            self._rt.all_reduce([*gradients.values(), self._totals])
            _update(state, gradients, self._totals, control, self._optim)
            for tensor in (*buffers.values(), self._totals):
                tensor.zero_()


def _take_gradient(param: torch.nn.Parameter) -> torch.Tensor:
    """Returns a parameter's gradient, zeros if it has none, and sets `param.grad` to None."""
    gradient, param.grad = param.grad, None
    # A parameter that no row used (in a branch not taken) has no gradient.
    return torch.zeros_like(param) if gradient is None else gradient


def _norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Computes the norm of all gradients; small gradients are concatenated, so that few operations are traced."""
    small, parts = list[torch.Tensor](), list[torch.Tensor]()
    for gradient in gradients:
        together = gradient.numel() < ALONE and active_mesh().size == 1  # on a mesh, concatenation would gather shards
        (small if together else parts).append(gradient)
    if small:
        parts.insert(0, torch.cat([wide(gradient).reshape(-1) for gradient in small]))
    return torch.sqrt(reduce(torch.add, [part.square().sum() for part in parts]))


def _update(
    state: TrainState,
    gradients: Mapping[str, torch.Tensor],
    totals: torch.Tensor,
    control: torch.Tensor,
    optim: OptimConfig,
) -> None:
    """Ends `train_step` with the gradients and sums (2 + N,) of all replicas; divides `gradients` in place."""
    rate, window_open, step = Control(*control.unbind())
    sums, before = Sums(totals[0], totals[1], totals[2:].unbind()), UpdateSums.unpack(state.report.unbind())
    tokens = torch.where(sums.weight > 0, sums.weight, torch.ones_like(rate))
    torch._foreach_div_(list(gradients.values()), tokens)  # in place: outside XLA this avoids a copy of all gradients
    norm = _norm(gradients.values())
    loss = sums.loss / tokens
    good = torch.isfinite(norm) & torch.isfinite(loss)
    if optim.max_loss_rise is not None:
        good = good & ((state.applied == 0) | (loss <= before.usual + optim.max_loss_rise))
    scale = torch.ones_like(norm)
    if optim.max_grad_norm:
        scale = (optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)

    applied = state.applied + good
    share = good * (1.0 - optim.ema_decay)  # weight of the new parameters in the average
    direction_of = state.optimizer.direction(applied, optim)
    for names in _groups(state):
        params: list[torch.Tensor] = [state.params[name] for name in names]
        kinds = {kind: [state.moments[name][kind] for name in names] for kind in state.moments[names[0]]}
        stacked, relative = names[0] in state.stacks or len(names) > 1, state.rates[names[0]]
        own_rate = rate if relative == 1.0 else rate * relative
        param, gradient = _stack(params), _stack([gradients[name] for name in names])
        moments = {kind: _stack(each) for kind, each in kinds.items()}
        direction, new_moments = direction_of(gradient * scale, moments, stacked)
        decays = optim.weight_decay and is_matrix(param.shape, stacked)
        decayed = param * (1.0 - own_rate * optim.weight_decay) if decays else param
        _write(params, torch.where(good, decayed - own_rate * direction, param), state.specs[names[0]])
        for kind, each in kinds.items():
            new = torch.where(good, new_moments[kind], moments[kind])
            _write(each, new, state.spec(names[0], each[0]))
        if state.average is not None:
            for name in names:
                state.average[name].lerp_(state.params[name].detach(), share)
    zero, first = torch.zeros_like(norm), before.first_skipped * window_open
    usual = torch.where(state.applied == 0, loss, torch.lerp(loss, before.usual, _LOSS_DECAY))
    state.applied.copy_(applied)

    def summed(total: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return total * window_open + torch.where(good, value, zero)

    state.report = UpdateSums(
        loss=summed(before.loss, sums.loss),
        weight=summed(before.weight, sums.weight),
        grad_norm=summed(before.grad_norm, norm),
        skipped=before.skipped * window_open + ~good,
        first_skipped=torch.where((first == 0) & ~good, step, first),
        usual=torch.where(good, usual, before.usual),
        streak=torch.where(good, zero, before.streak + 1),
        extra=tuple(map(summed, before.extra, sums.extra)),
    ).pack()


def _groups(state: TrainState) -> Iterable[list[str]]:
    """Yields lists of the names of parameters that are updated as one stack: small parameters of equal shape and rate.

    Otherwise the device would wait until the host has traced hundreds of updates. Other parameters, and all on a mesh,
    are in lists of their own.
    """
    groups: dict[Any, list[str]] = {}
    for name, param in state.params.items():
        alone = active_mesh().size > 1 or name in state.stacks
        groups.setdefault(name if alone else (param.shape, state.rates[name]), []).append(name)
    for names in groups.values():
        size = max(1, ALONE // state.params[names[0]].numel())
        yield from (names[start : start + size] for start in range(0, len(names), size))


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Stacks tensors; returns a single tensor as it is, without a new axis."""
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0]


def _write(tensors: list[torch.Tensor], value: torch.Tensor, spec: Spec) -> None:
    """Copies a value with the shape of `_stack(tensors)` into the tensors."""
    torch._foreach_copy_(tensors, [constrain(each, spec) for each in (value.unbind() if len(tensors) > 1 else [value])])


def eval_step(
    model: torch.nn.Module,
    batch: Mapping[str, torch.Tensor],
    sums: torch.Tensor,
    objective: Objective,
    runtime: Runtime,
) -> None:
    """Adds the sums of all replicas' batches to `sums`, (2 + N,) fp32, in place: loss, weight, first N `extra` sums.

    `batch` has this replica's tensors, as the objective takes them; `batch` and `sums` are on the device.
    """
    with torch.no_grad():
        loss, weight, extra = objective(model, batch)
        totals = torch.stack([loss, weight, *extra][: len(sums)])
        runtime.all_reduce([totals])
        sums.add_(totals)


def check_dropouts(model: torch.nn.Module) -> None:
    """Raises ValueError for dropout outside of a layer loop: a trace would keep its masks; loops seed their dropout."""
    drawn = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Dropout) and part.p > 0]
    if drawn:
        raise ValueError(
            f"{drawn[0]} is dropout outside of a loop over layers: set optim.remat=full, which makes layers a loop, or "
            "set the dropout to 0 in the model's config.json"
        )


class TracedSteps:
    """`train_step` and `eval_step` as compiled programs on a device that otherwise runs single operations (TorchTPU).

    A trace takes all tensors that are read as inputs and returns the changed tensors as results. Every structure and
    shape of batches has its own program. The old state is donated. Construction raises the error of `check_dropouts`.
    """

    def __init__(
        self, model: torch.nn.Module, state: TrainState, objective: Objective, optim: OptimConfig, rt: Runtime
    ) -> None:
        self._model, self._state, self._objective, self._optim, self._rt = model, state, objective, optim, rt
        check_dropouts(model)
        self._programs = Programs(rt.world_size)
        self._frozen = {name: tensor for name, tensor in tensors_of(model).items() if name not in state.params}

    def train_step(self, batches: Sequence[Mapping[str, torch.Tensor]], control: torch.Tensor) -> None:
        """Makes an update as the function `train_step`; the state's old tensors lose their values, except `report`."""
        new, state = self._programs.run("update", *self.update(batches, control)), self._state
        for name, param in state.params.items():
            param.data = new["params"][name]
        state.moments, state.applied, state.report = new["moments"], new["applied"], new["report"]
        state.average = new["average"] or None

    def update(
        self, batches: Sequence[Mapping[str, torch.Tensor]], control: torch.Tensor
    ) -> tuple[Callable[..., Any], int, Any, Any, Any, torch.Tensor]:
        """Returns the arguments of `Programs.run` after the name: a pure update, a count, and four trees of tensors.

        The trees are changed, frozen, batches and control; the update takes them and returns the new values of changed.
        Changed has "params", "moments", "average" ({} without), "applied" and "report"; frozen has the model's other
        tensors by name. The count is the number of first tensors to donate: all in changed but `report`.
        """
        state = self._state

        def update(changed: Any, frozen: Any, batches: Any, control: torch.Tensor) -> Any:
            twin = copy.copy(state)
            twin.params = {name: one.detach().clone().requires_grad_() for name, one in changed["params"].items()}
            twin.moments = {name: {kind: one.clone() for kind, one in kinds.items()}
                            for name, kinds in changed["moments"].items()}  # fmt: skip
            twin.average = {name: one.clone() for name, one in changed["average"].items()} or None
            twin.applied, twin.report, twin.passes = changed["applied"].clone(), changed["report"].clone(), {}
            with computing_with(self._model, {**twin.params, **frozen}):
                train_step(self._model, twin, batches, control, self._objective, self._optim, self._rt)
            return self._changed(twin)

        changed = self._changed(state)
        donated = len(tree_leaves(changed)) - 1  # all but the last, the sums for the log
        return update, donated, changed, self._frozen, [dict(batch) for batch in batches], control

    def eval_step(self, batch: Mapping[str, torch.Tensor], sums: torch.Tensor) -> None:
        """Adds the sums of all replicas' batches to `sums` in place, as the function `eval_step`."""

        def evaluate(params: Any, frozen: Any, batch: Any, sums: torch.Tensor) -> Any:
            total = sums.clone()
            with computing_with(self._model, {**params, **frozen}):
                eval_step(self._model, batch, total, self._objective, self._rt)
            return total

        params = {name: param.detach() for name, param in self._state.params.items()}
        sums.data = self._programs.run("evaluation", evaluate, 0, params, self._frozen, dict(batch), sums)

    @staticmethod
    def _changed(state: TrainState) -> dict[str, Any]:
        """Returns the tensors that an update changes, by attribute; `report` is the last."""
        return {
            "params": {name: param.detach() for name, param in state.params.items()}, "moments": state.moments,
            "average": state.average or {}, "applied": state.applied, "report": state.report,
        }  # fmt: skip
