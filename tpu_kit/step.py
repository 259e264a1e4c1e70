"""The training step: forward, loss, backward, one all-reduce, clipping, AdamW, average; and the evaluation step.

On XLA each is one program. Nothing in it is read on the host, no number that changes is a constant of the program
(learning rate and step come in a tensor, AdamW's bias correction is computed on the device), and its shapes are those
of the batch. The same functions train on every backend and are compiled by the planner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from tpu_kit import model as models
from tpu_kit.config import OptimConfig
from tpu_kit.loss import chunked_nll, shift_labels
from tpu_kit.runtime import Runtime

# What `TrainState.window` sums up between two readings.
WINDOW = ("loss_sum", "tokens", "grad_norm_sum", "skipped", "first_skipped_step")


class TrainState:
    """What a run changes, besides the parameters: AdamW's moments, the average, and sums for the log.

    The moments are one flat fp32 vector each, in the order of `parameters`: a step over hundreds of adapter matrices is
    then a few operations to trace, and the gradients are one tensor to reduce.

    Attributes:
        parameters: the trained parameters by name, fp32.
        first: (P,) AdamW's mean of gradients, P being the number of trained values.
        second: (P,) its mean of squared gradients.
        average: (P,) exponential moving average of the parameters, or None.
        applied: () number of updates that were applied (a skipped one does not count), for the bias correction.
        window: (5,) sums since `keep` was 0; see `WINDOW`.
    """

    def __init__(
        self, model: torch.nn.Module, device: torch.device, ema: bool, saved: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Starts anew, or from what `to_host` returned; the model's own parameters are set by `restore` before."""
        self.parameters = models.trainable_parameters(model)
        wrong = [name for name, parameter in self.parameters.items() if parameter.dtype != torch.float32]
        assert not wrong, f"trained in other than fp32: {wrong[:3]}"
        self.sizes = [parameter.numel() for parameter in self.parameters.values()]
        # Zeros made on the host: those made on XLA are constants of the first program, which then is another one.
        size = sum(self.sizes)
        start = saved or {"first": torch.zeros(size), "second": torch.zeros(size), "applied": torch.zeros(()),
                          "window": torch.zeros(len(WINDOW))}  # fmt: skip
        self.first, self.second, self.applied, self.window = (
            start[name].to(device) for name in ("first", "second", "applied", "window")
        )
        self.average = None
        if ema:
            now = self.flat(parameter.detach() for parameter in self.parameters.values())
            self.average = start["average"].to(device) if "average" in start else now

    def to_host(self, runtime: Runtime) -> dict[str, torch.Tensor]:
        """Everything as CPU tensors: "parameters", flat, and the attributes of this class."""
        named = {name: getattr(self, name) for name in ("first", "second", "applied", "window", "average")}
        named = {name: tensor for name, tensor in named.items() if tensor is not None}
        (*values,) = runtime.to_host([*named.values(), *self.parameters.values()])
        return {
            **dict(zip(named, values[: len(named)], strict=True)),
            "parameters": self.flat(iter(values[len(named) :])),
        }

    def flat(self, tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        """One fp32 vector of tensors in the order of the parameters."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of such a vector, by name and in the parameters' shapes."""
        parts = flat.split(self.sizes)
        return {name: part.view_as(self.parameters[name]) for name, part in zip(self.parameters, parts, strict=True)}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Lets the model use the average in place of the parameters. Swaps references; nothing is computed."""
        if self.average is None:
            yield
            return
        current = {name: parameter.data for name, parameter in self.parameters.items()}
        for name, part in self.split(self.average).items():
            self.parameters[name].data = part
        try:
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = current[name]


def restore(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Gives a model on the CPU the parameters that `TrainState.to_host` returned."""
    parameters = models.trainable_parameters(model)
    parts = saved["parameters"].split([parameter.numel() for parameter in parameters.values()])
    with torch.no_grad():
        for parameter, part in zip(parameters.values(), parts, strict=True):
            parameter.copy_(part.view_as(parameter))


def token_loss(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor], optim: OptimConfig, *, smooth: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fp32 scalars (summed loss in nats, number of tokens with loss) of one batch.

    Args:
        model: as `model.load_model` returns it, on the batch's device.
        batch: input_ids, labels, position_ids and segment_ids, (B, S) each.
        optim: the chunk of the loss, and label smoothing.
        smooth: whether to smooth the labels; evaluation does not.
    """
    hidden = models.hidden_states(model, batch)
    head = models.output_embedding(model)
    labels = shift_labels(batch["labels"], batch["segment_ids"])
    return chunked_nll(
        hidden.flatten(0, 1),
        head.weight,
        labels.flatten(),
        optim.loss_chunk,
        head.softcap,
        optim.label_smoothing if smooth else 0.0,
        head.bias,
        head.scale,
    )


def train_step(
    model: torch.nn.Module,
    state: TrainState,
    batches: Sequence[Mapping[str, torch.Tensor]],
    control: torch.Tensor,
    optim: OptimConfig,
    runtime: Runtime,
) -> None:
    """One update from `batches` (one for each pass of gradient accumulation); changes model and state in place.

    The summed gradients are divided by the number of loss tokens of all replicas and passes, so the update does not
    depend on how rows are split over them. An update whose loss or gradient norm is not finite changes nothing but the
    counters, on all replicas alike. AdamW: Loshchilov and Hutter, arXiv:1711.05101; weight decay applies to matrices.

    Args:
        model: the replica's model, in training mode.
        state: its state.
        batches: tensors as `token_loss` takes them.
        control: (3,) fp32: learning rate; 0.0 to begin a new window, else 1.0; the step's number.
        optim: betas, decay, clipping.
        runtime: the replica.
    """
    totals = torch.zeros(2, device=control.device)
    for batch in batches:
        loss, tokens = token_loss(model, batch, optim, smooth=True)
        loss.backward()
        totals = totals + torch.stack([loss.detach(), tokens])
    with torch.no_grad():
        gradient = state.flat(_gradients(state.parameters))
        runtime.all_reduce([gradient, totals])
        _update(state, gradient, totals, control, optim)


def _gradients(parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    for parameter in parameters.values():
        # A parameter that the rows did not use (a branch not taken) has none.
        yield torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None


def _update(
    state: TrainState, gradient: torch.Tensor, totals: torch.Tensor, control: torch.Tensor, optim: OptimConfig
) -> None:
    rate, keep, step = control.unbind()
    gradient = gradient / totals[1].clamp(min=1)
    norm = torch.sqrt((gradient * gradient).sum())
    finite = torch.isfinite(norm) & torch.isfinite(totals[0])
    if optim.max_grad_norm:
        gradient = gradient * (optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)

    applied = state.applied + finite
    first = optim.beta1 * state.first + (1 - optim.beta1) * gradient
    second = optim.beta2 * state.second + (1 - optim.beta2) * gradient * gradient
    mean = first / _correction(optim.beta1, applied)
    root = torch.sqrt(second / _correction(optim.beta2, applied))
    change = torch.where(finite, rate * mean / (root + optim.eps), torch.zeros_like(mean))
    decay = torch.where(finite, rate * optim.weight_decay, torch.zeros_like(rate))
    for name, part in state.split(change).items():
        parameter = state.parameters[name]
        if optim.weight_decay and parameter.ndim > 1:
            parameter.mul_(1.0 - decay)
        parameter.sub_(part)
    state.first.copy_(torch.where(finite, first, state.first))
    state.second.copy_(torch.where(finite, second, state.second))
    state.applied.copy_(applied)
    if state.average is not None:
        now = state.flat(parameter.detach() for parameter in state.parameters.values())
        state.average.lerp_(now, finite * (1.0 - optim.ema_decay))

    sums = state.window * keep
    bad = torch.where((sums[4] == 0) & ~finite, step, sums[4])
    zero = torch.zeros_like(norm)
    news = [torch.where(finite, value, zero) for value in (totals[0], totals[1], norm)]
    state.window.copy_(torch.stack([*(sums[:3] + torch.stack(news)).unbind(), sums[3] + ~finite, bad]))


def _correction(beta: float, applied: torch.Tensor) -> torch.Tensor:
    """1 - beta ** applied, on the device: computed on the host it would be a constant, and be 1.0 one day."""
    return -torch.expm1(applied * math.log(beta)) if beta else torch.ones_like(applied)


def eval_step(
    model: torch.nn.Module,
    batch: Mapping[str, torch.Tensor],
    sums: torch.Tensor,
    optim: OptimConfig,
    runtime: Runtime,
) -> None:
    """Adds the loss and the loss tokens of one batch of every replica to `sums`, (2,) fp32, in place."""
    with torch.no_grad():
        totals = torch.stack(token_loss(model, batch, optim, smooth=False))
        runtime.all_reduce([totals])
        sums.add_(totals)
