"""The training step (forward, loss, backward, one all-reduce, clipping, update, average) and the evaluation step.

On XLA each is one program, in which the host reads nothing. Numbers that change between steps are its inputs: a tensor
holds learning rate and step, and the optimizer counts on the device. The planner compiles these functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch

from tpu_kit.config.loader import OptimConfig, TrainConfig
from tpu_kit.distributed.mesh import current_mesh
from tpu_kit.distributed.runtime import Runtime
from tpu_kit.models import causal_lm as models
from tpu_kit.models.layer_scan import scan_layers
from tpu_kit.training.objectives import Objective
from tpu_kit.training.state import TrainState, of_group, restore
from tpu_kit.xla.scan import after

_LOSS_DECAY = 0.9  # of the running mean of the loss: about ten updates


def prepare_model(
    model: torch.nn.Module,
    config: TrainConfig,
    rt: Runtime,
    saved: dict[str, torch.Tensor] | None = None,
    extra_sums: int = 0,
) -> TrainState:
    """Prepares a loaded model in place for `train_step` (attention, layer loop, remat, device) and creates its state.

    Args:
        model: as `causal_lm.load_model` returns it.
        config: the run.
        rt: the replica.
        saved: tensors of `TrainState.to_host` to continue from.
        extra_sums: number of extra sums of the objective.
    """
    if saved:
        restore(model, saved)
    unrolled = models.prepare_layers(model, config, rt.device_type)
    if unrolled and rt.rank == 0:
        print(f"layers           unrolled: {unrolled}", flush=True)
    if current_mesh() is not None and config.optim.remat == "none":
        print("layers           recomputed: on a mesh optim.remat=none is optim.remat=full", flush=True)
    if (teacher := getattr(model, "teacher", None)) is not None:
        models.use_attention(teacher, config.model.attention, rt.device_type)
        scan_layers(teacher.get_decoder(), replace(config.optim, remat="full"), rt.device_type)
    models.to_device(model, rt.local_device)
    if rt.device_type == "cuda" and config.launch.torch_compile and unrolled is not None:
        for layer in model.get_decoder().layers:  # type: ignore[operator]  # they are alike, so it compiles once
            layer.compile(dynamic=False)
    return TrainState(model, rt.local_device, config.optim, saved, extra_sums)


def train_step(
    model: torch.nn.Module,
    state: TrainState,
    batches: Sequence[Mapping[str, torch.Tensor]],
    control: torch.Tensor,
    objective: Objective,
    optim: OptimConfig,
    runtime: Runtime,
) -> None:
    """Makes one update from `batches`, one for each pass of gradient accumulation; changes model and state in place.

    The summed gradients are divided by the objective's weight over all replicas and passes, so the update does not
    depend on how rows are split over them. If the loss or the gradient norm is not finite, or the loss has risen by
    more than `max_loss_rise`, all replicas skip the update and change only the counters. Matrices alone decay.

    Args:
        model: the replica's model, in training mode.
        state: its state.
        batches: tensors as the objective takes them.
        control: (3,) fp32: learning rate; 0.0 to begin a new window of sums, else 1.0; number of the step.
        objective: the loss.
        optim: weight decay, clipping and limit of the loss.
        runtime: the replica.
    """
    totals = torch.zeros(2 + len(objective.extra), device=control.device)
    for number, batch in enumerate(batches):
        if number:
            # Without this order XLA may start a pass before the previous one ends, and keep the activations of both.
            done = [parameter.grad for parameter in state.parameters.values() if parameter.grad is not None]
            batch = dict(zip(batch, after(done, list(batch.values())), strict=True))
        found = objective(model, batch)
        found.loss.backward()
        totals = totals + torch.stack([found.loss.detach(), found.weight, *found.extra])
    with torch.no_grad():
        gradients = [
            state.pinned(group, group.join(_take_gradients(state.parameters, group.slots))) for group in state.groups
        ]
        runtime.all_reduce([*gradients, totals])
        _update(state, gradients, totals, control, optim)


def _take_gradients(parameters: Mapping[str, torch.nn.Parameter], names: Iterable[str]) -> dict[str, torch.Tensor]:
    found = {}
    for name in names:
        gradient, parameters[name].grad = parameters[name].grad, None
        # A parameter that the rows did not use (a branch not taken) has no gradient.
        found[name] = torch.zeros_like(parameters[name]) if gradient is None else gradient
    return found


def _update(
    state: TrainState, gradients: list[torch.Tensor], totals: torch.Tensor, control: torch.Tensor, optim: OptimConfig
) -> None:
    rate, window_open, step = control.unbind()
    tokens = torch.where(totals[1] > 0, totals[1], torch.ones_like(totals[1]))
    norm = torch.sqrt(reduce(torch.add, [(gradient / tokens).square().sum() for gradient in gradients]))
    loss = totals[0] / tokens
    good = torch.isfinite(norm) & torch.isfinite(loss)
    if optim.max_loss_rise is not None:
        good = good & ((state.applied == 0) | (loss <= state.usual + optim.max_loss_rise))
    scale = torch.ones_like(norm)
    if optim.max_grad_norm:
        scale = (optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)

    applied = state.applied + good
    decay = torch.where(good, rate * optim.weight_decay, torch.zeros_like(rate))
    for number, (group, gradient) in enumerate(zip(state.groups, gradients, strict=True)):
        moments = of_group(state.moments, number)
        direction, news = state.optimizer.direction(gradient / tokens * scale, moments, applied, optim, group)
        changes = group.split(torch.where(good, rate * direction, torch.zeros_like(direction)))
        for name, slot in group.slots.items():
            parameter = state.parameters[name]
            decayed = parameter * (1.0 - decay) if optim.weight_decay and slot.matrix else parameter
            parameter.copy_(state.pinned(group, decayed - changes[name]))
        for name, moment in moments.items():
            moment.copy_(state.pinned(group, torch.where(good, news[name], moment)))
    usual = torch.where(state.applied == 0, loss, torch.lerp(loss, state.usual, _LOSS_DECAY))
    state.usual.copy_(torch.where(good, usual, state.usual))
    state.streak.copy_(torch.where(good, torch.zeros_like(rate), state.streak + 1))
    state.applied.copy_(applied)
    if state.average is not None:
        for number, group in enumerate(state.groups):
            state.average[number].lerp_(group.join(state.parameters).detach(), good * (1.0 - optim.ema_decay))

    sums = state.window * window_open
    bad = torch.where((sums[4] == 0) & ~good, step, sums[4])
    zero = torch.zeros_like(norm)
    added = [torch.where(good, value, zero) for value in (totals[0], totals[1], norm)]
    extra = [total + torch.where(good, value, zero) for total, value in zip(sums[5:], totals[2:], strict=True)]
    state.window.copy_(torch.stack([*(sums[:3] + torch.stack(added)).unbind(), sums[3] + ~good, bad, *extra]))
    state.report = torch.cat([state.window, torch.stack([state.usual, state.streak])])


def eval_step(
    model: torch.nn.Module,
    batch: Mapping[str, torch.Tensor],
    sums: torch.Tensor,
    objective: Objective,
    runtime: Runtime,
) -> None:
    """Adds the loss and the weight of one batch of each replica to `sums`, (2,) fp32, in place."""
    with torch.no_grad():
        totals = torch.stack(objective(model, batch)[:2])
        runtime.all_reduce([totals])
        sums.add_(totals)
