"""The training step: forward, loss, backward, one all-reduce, clipping, update, average; and the evaluation step.

On XLA each is one program. Nothing in it is read on the host, no number that changes is a constant of the program
(learning rate and step come in a tensor, the optimizer counts on the device), and its shapes are those
of the batch. The same functions train on every backend and are compiled by the planner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from tpu_kit import model as models
from tpu_kit.config import OptimConfig, TrainConfig
from tpu_kit.loss import chunked_nll, shift_labels
from tpu_kit.optimizer import OPTIMIZERS, Moments
from tpu_kit.runtime import Runtime
from tpu_kit.stacking import scan_layers, stacked_names

# What `TrainState.window` sums up between two readings.
WINDOW = ("loss_sum", "tokens", "grad_norm_sum", "skipped", "first_skipped_step")
_USUAL = 0.9  # decay of the running mean of the loss: some ten updates


class TrainState:
    """What a run changes, besides the parameters: the optimizer's moments, the average, and sums for the log.

    The moments are flat vectors, in the order of `parameters`: a step over hundreds of adapter matrices is then a few
    operations to trace, and the gradients are one tensor to reduce.

    Attributes:
        parameters: the trained parameters by name, fp32.
        stacked: the names of those that are stacks of layers' parameters; see `layers.stack`.
        moments: what the optimizer remembers; see `optimizer.Optimizer`.
        average: (P,) exponential moving average of the parameters, P being the number of trained values, or None.
        applied: () number of updates that were applied (a skipped one does not count).
        usual: () a running mean of the loss per token, which tells an exploding one.
        streak: () updates skipped since the last one that was applied.
        window: (5,) sums since `keep` was 0; see `WINDOW`.
        report: (7,) window, usual and streak once more, for the host: the next step makes another one instead of
            replacing this, so that it can be read while that step runs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        optim: OptimConfig,
        saved: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Starts anew, or from what `to_host` returned; the model's own parameters are set by `restore` before."""
        self.parameters = models.trainable_parameters(model)
        wrong = [name for name, parameter in self.parameters.items() if parameter.dtype != torch.float32]
        assert not wrong, f"trained in other than fp32: {wrong[:3]}"
        self.stacked = stacked_names(model)
        # A stack of vectors has two axes and is no matrix.
        self.shapes = [
            _lay(parameter).shape if parameter.ndim - (name in self.stacked) > 1 else torch.Size([parameter.numel()])
            for name, parameter in self.parameters.items()
        ]
        # Zeros made on the host: those made on XLA are constants of the first program, which then is another one.
        moments = OPTIMIZERS[optim.optimizer].start(self.shapes)
        zeros = {name: torch.zeros(()) for name in ("applied", "usual", "streak")}
        zeros["window"] = torch.zeros(len(WINDOW))
        start = {**moments, **zeros} if saved is None else saved
        self.moments: Moments = {name: start[name].to(device) for name in moments}
        self.applied, self.usual, self.streak, self.window = (start[name].to(device) for name in zeros)
        self.report = self.window
        self.average = None
        if optim.ema_decay:
            now = self.flat(parameter.detach() for parameter in self.parameters.values())
            self.average = start["average"].to(device) if "average" in start else now

    def to_host(self, runtime: Runtime) -> dict[str, torch.Tensor]:
        """Everything as CPU tensors: "parameters", flat, the moments, and the attributes of this class."""
        named = self.moments | {name: getattr(self, name) for name in ("applied", "usual", "streak", "window")}
        if self.average is not None:
            named["average"] = self.average
        (*values,) = runtime.to_host([*named.values(), *self.parameters.values()])
        return {
            "stacked": torch.tensor(len(self.stacked)),
            **dict(zip(named, values[: len(named)], strict=True)),
            "parameters": self.flat(iter(values[len(named) :])),
        }

    def flat(self, tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        """One fp32 vector of tensors in the order of the parameters."""
        return torch.cat([_lay(tensor).reshape(-1) for tensor in tensors])

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of such a vector, by name and in the parameters' shapes."""
        return dict(zip(self.parameters, _split(flat, self.parameters.values()), strict=True))

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
    """Gives a model on the CPU the parameters that `TrainState.to_host` returned.

    Raises:
        ValueError: its layers are stacked and those of the checkpoint's model were not, or the other way round.
    """
    parameters = models.trainable_parameters(model).values()
    before, now = (int(saved["stacked"]) if "stacked" in saved else 0), len(stacked_names(model))
    if before != now:
        raise ValueError(
            f"the checkpoint was made with optim.scan_layers={'on' if before else 'off'}, and this run has it "
            f"{'on' if now else 'off'}: the order of the weights is another one. Set it to what it was"
        )
    with torch.no_grad():
        for parameter, part in zip(parameters, _split(saved["parameters"], parameters), strict=True):
            parameter.copy_(part)


def _lay(tensor: torch.Tensor) -> torch.Tensor:
    """How a matrix lies in a flat vector: the other way round if its rows are short and its columns long.

    Between a vector and (8192, 16) a TPU goes by way of rows of 128, eight times the memory; (16, 8192) is a copy.
    """
    return tensor.mT if tensor.ndim > 1 and tensor.shape[-1] < 128 <= tensor.shape[-2] else tensor


def _split(flat: torch.Tensor, parameters: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a flat vector, each in its parameter's shape."""
    parts = flat.split([parameter.numel() for parameter in parameters])
    turned = [_lay(parameter) for parameter in parameters]
    return [
        part.view(shape.shape) if shape is parameter else part.view(shape.shape).mT
        for part, shape, parameter in zip(parts, turned, parameters, strict=True)
    ]


def place(
    model: torch.nn.Module, config: TrainConfig, rt: Runtime, saved: dict[str, torch.Tensor] | None = None
) -> TrainState:
    """Makes a loaded model ready for `train_step`: attention, rematerialization, its device, and the state beside it.

    On CUDA each decoder layer is compiled by torch.compile: they are alike, so one compilation serves them all.

    Args:
        model: as `model.load_model` returns it; changed in place.
        config: the run.
        rt: the replica.
        saved: what `TrainState.to_host` returned, to go on from it.
    """
    models.use_attention(model, config.model.attention, rt.device_type)
    if config.tracking.eval_generate_rows:
        unrolled: str | None = "tracking.eval_generate_rows generates with them" if rt.device_type == "tpu" else ""
    else:
        unrolled = scan_layers(model.get_decoder(), config.optim, rt.device_type)  # type: ignore[operator]
    if unrolled and rt.rank == 0:
        print(f"layers           unrolled: {unrolled}", flush=True)
    if unrolled is not None and config.optim.remat == "full":
        models.enable_remat(model, rt.device_type)
    if saved:
        restore(model, saved)
    models.to_device(model, rt.local_device)
    if rt.device_type == "cuda" and config.launch.torch_compile and unrolled is not None:
        for layer in model.get_decoder().layers:  # type: ignore[operator]
            layer.compile(dynamic=False)
    return TrainState(model, rt.local_device, config.optim, saved)


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
    depend on how rows are split over them. An update whose loss or gradient norm is not finite, or whose loss has risen
    by more than `max_loss_rise`, changes nothing but the counters, on all replicas alike. Weight decay applies to
    matrices, decoupled from the gradient (Loshchilov and Hutter, arXiv:1711.05101).

    Args:
        model: the replica's model, in training mode.
        state: its state.
        batches: tensors as `token_loss` takes them.
        control: (3,) fp32: learning rate; 0.0 to begin a new window, else 1.0; the step's number.
        optim: optimizer, decay, clipping, what counts as exploding.
        runtime: the replica.
    """
    totals = torch.zeros(2, device=control.device)
    for number, batch in enumerate(batches):
        if number:
            # Otherwise XLA may begin a pass before the one before it has ended, and keep the activations of both.
            done = [parameter.grad for parameter in state.parameters.values() if parameter.grad is not None]
            batch = runtime.after(done, batch)
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
    loss = totals[0] / totals[1].clamp(min=1)
    good = torch.isfinite(norm) & torch.isfinite(loss)
    if optim.max_loss_rise is not None:
        good = good & ((state.applied == 0) | (loss <= state.usual + optim.max_loss_rise))
    if optim.max_grad_norm:
        gradient = gradient * (optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)

    applied = state.applied + good
    direction, moments = OPTIMIZERS[optim.optimizer].direction(gradient, state.moments, applied, optim, state.shapes)
    change = torch.where(good, rate * direction, torch.zeros_like(direction))
    decay = torch.where(good, rate * optim.weight_decay, torch.zeros_like(rate))
    for name, part in state.split(change).items():
        parameter = state.parameters[name]
        if optim.weight_decay and parameter.ndim - (name in state.stacked) > 1:
            parameter.mul_(1.0 - decay)
        parameter.sub_(part)
    for name, moment in state.moments.items():
        moment.copy_(torch.where(good, moments[name], moment))
    usual = torch.where(state.applied == 0, loss, torch.lerp(loss, state.usual, _USUAL))
    state.usual.copy_(torch.where(good, usual, state.usual))
    state.streak.copy_(torch.where(good, torch.zeros_like(rate), state.streak + 1))
    state.applied.copy_(applied)
    if state.average is not None:
        now = state.flat(parameter.detach() for parameter in state.parameters.values())
        state.average.lerp_(now, good * (1.0 - optim.ema_decay))

    sums = state.window * keep
    bad = torch.where((sums[4] == 0) & ~good, step, sums[4])
    zero = torch.zeros_like(norm)
    news = [torch.where(good, value, zero) for value in (totals[0], totals[1], norm)]
    state.window.copy_(torch.stack([*(sums[:3] + torch.stack(news)).unbind(), sums[3] + ~good, bad]))
    state.report = torch.cat([state.window, torch.stack([state.usual, state.streak])])


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
