"""The training step: forward, loss, backward, one all-reduce, clipping, update, average; and the evaluation step.

On XLA each is one program. Nothing in it is read on the host, no number that changes is a constant of the program
(learning rate and step come in a tensor, the optimizer counts on the device), and its shapes are those
of the batch. The same functions train on every backend and are compiled by the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce

import torch

from tpu_kit.config.loader import OptimConfig, TrainConfig
from tpu_kit.distributed.runtime import Runtime
from tpu_kit.models import causal_lm as models
from tpu_kit.models.layer_scan import restacked, scan_layers, stacked_names, unstacked
from tpu_kit.training.loss import chunked_nll, shift_labels
from tpu_kit.training.optimizer import OPTIMIZERS, Group, Moments, group
from tpu_kit.xla.scan import after

# What `TrainState.window` sums up between two readings.
WINDOW = ("loss_sum", "tokens", "grad_norm_sum", "skipped", "first_skipped_step")
_USUAL = 0.9  # decay of the running mean of the loss: some ten updates


class TrainState:
    """What a run changes, besides the parameters: the optimizer's moments, the average, and sums for the log.

    Moments, gradients and the average are one tensor for each group of parameters (`optimizer.Group`). On the host, and
    in a checkpoint, there is one for each parameter of each layer, so that neither stacks nor groups matter there.

    Attributes:
        parameters: the trained parameters by name, fp32.
        stacks: of those that are stacks of layers' parameters, the names of the slices; see `layer_scan.stacked_names`.
        optimizer: of `optimizer.OPTIMIZERS`.
        groups: the parameters as they are updated.
        moments: what the optimizer remembers, by name and number of the group; see `optimizer.Optimizer`.
        seeds: by number of the group, of an optimizer that draws; see `optimizer.Slot.seeds`. It never changes.
        average: exponential moving average of the parameters, by number of the group, or None.
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
        self.stacks = stacked_names(model)
        self.optimizer = OPTIMIZERS[optim.optimizer]
        self.groups = group(self.parameters, self.stacks, self.optimizer.block)
        # Zeros made on the host: those made on XLA are constants of the first program, which then is another one.
        zeros = {name: torch.zeros(()) for name in ("applied", "usual", "streak")}
        zeros["window"] = torch.zeros(len(WINDOW))
        stored = None if saved is None else sections(saved)
        self.moments: Moments = {
            f"{name}.{number}": moment.to(device)
            for number, one in enumerate(self.groups)
            for name, moment in self._start(one, stored).items()
        }
        coded = enumerate(self.groups) if self.optimizer.block > 1 else ()
        self.seeds = {str(number): one.seeds().to(device) for number, one in coded}
        start = zeros if saved is None else saved
        self.applied, self.usual, self.streak, self.window = (start[name].to(device) for name in zeros)
        self.report = self.window
        self.average = None
        if optim.ema_decay:
            now: Mapping[str, torch.Tensor] = self.parameters
            if stored is not None and "average" in stored:
                now = {name: restacked(self.stacks, stored["average"], name) for name in self.parameters}
            parts = [one.join(now).detach().to(device, copy=True) for one in self.groups]
            self.average = dict(enumerate(parts))

    def _start(self, one: Group, stored: Mapping[str, Mapping[str, torch.Tensor]] | None) -> Moments:
        """A group's moments on the host: zeros, or those of a checkpoint."""
        if stored is None:
            return self.optimizer.start(one)
        own = {
            name: {kind: restacked(self.stacks, stored[f"moments/{kind}"], name) for kind in self.optimizer.parts(slot)}
            for name, slot in one.slots.items()
        }
        return self.optimizer.join(own, one)

    def to_host(self, runtime: Runtime) -> dict[str, torch.Tensor]:
        """Everything as CPU tensors.

        Returns:
            "parameters/NAME", "average/NAME" where there is one, and "moments/KIND/NAME" for each parameter of each
            layer, by the name that it has where layers are not stacked, in its own shape (KIND and its shape are of
            `Optimizer.parts`); and the other attributes.
        """
        scalars = {name: getattr(self, name) for name in ("applied", "usual", "streak", "window")}
        average = [] if self.average is None else list(self.average.values())
        sent = [*scalars.values(), *self.moments.values(), *average, *self.parameters.values()]
        values = iter(runtime.to_host(sent))
        found, moments = dict(zip(scalars, values, strict=False)), dict(zip(self.moments, values, strict=False))
        stored = {"average": self.named([next(values) for _ in average])} if average else {}
        stored["parameters"] = dict(zip(self.parameters, values, strict=True))
        for number, one in enumerate(self.groups):
            for name, kinds in self.optimizer.split(_of_group(moments, number), one).items():
                for kind, tensor in kinds.items():
                    stored.setdefault(f"moments/{kind}", {})[name] = tensor
        for section, named in stored.items():
            found |= {f"{section}/{name}": tensor for name, tensor in unstacked(self.stacks, named).items()}
        return found

    def named(self, joined: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parts of one tensor for each group, by name and in the parameters' shapes."""
        return {
            name: part for one, each in zip(self.groups, joined, strict=True) for name, part in one.split(each).items()
        }

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Lets the model use the average in place of the parameters. Swaps references; nothing is computed."""
        if self.average is None:
            yield
            return
        current = {name: parameter.data for name, parameter in self.parameters.items()}
        for name, part in self.named(self.average.values()).items():
            self.parameters[name].data = part
        try:
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = current[name]


def sections(saved: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """What `TrainState.to_host` returned, or a checkpoint has, by section ("parameters", "moments/first") and name."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in saved.items():
        section, _, name = key.rpartition("/")
        found.setdefault(section, {})[name] = tensor
    return found


def restore(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Gives a model on the CPU the parameters that `TrainState.to_host` returned, its layers stacked or not.

    Raises:
        ValueError: they are not those of this model.
    """
    parameters, stacks, there = models.trainable_parameters(model), stacked_names(model), sections(saved)["parameters"]
    wanted = {name: one.shape for name, one in unstacked(stacks, parameters).items()}
    found = {name: one.shape for name, one in there.items()}
    if differ := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        shapes = [tuple(one[differ[0]]) if differ[0] in one else "none" for one in (found, wanted)]
        raise ValueError(
            f"the checkpoint's weights are not those of this model: {len(differ)} of {len(wanted)} differ, such as "
            f"{differ[0]}: {shapes[0]} there, {shapes[1]} now. Use the model and the versions of transformers and peft "
            "that it was trained with (state.json in the checkpoint names these)"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(restacked(stacks, there, name))


def _of_group(moments: Moments, number: int) -> Moments:
    return {name.partition(".")[0]: moment for name, moment in moments.items() if name.endswith(f".{number}")}


def place(
    model: torch.nn.Module, config: TrainConfig, rt: Runtime, saved: dict[str, torch.Tensor] | None = None
) -> TrainState:
    """Makes a loaded model ready for `train_step`: attention, rematerialization, its device, and the state beside it.

    On CUDA each decoder layer is compiled by torch.compile: they are alike, so one compilation serves them all.

    Args:
        model: as `causal_lm.load_model` returns it; changed in place.
        config: the run.
        rt: the replica.
        saved: what `TrainState.to_host` returned, to go on from it.
    """
    models.use_attention(model, config.model.attention, rt.device_type)
    keeps = config.optim.remat == "outputs"
    if config.tracking.eval_generate_rows:
        loops = rt.device_type == "tpu" or (keeps and rt.is_xla)
        unrolled: str | None = "tracking.eval_generate_rows generates with them" if loops else ""
    else:
        unrolled = scan_layers(model.get_decoder(), config.optim, rt.device_type)  # type: ignore[operator]
    if unrolled is not None and keeps and rt.is_xla:
        unrolled = f"{unrolled or 'optim.scan_layers=off'}; without a loop remat=outputs is remat=full"
    if unrolled and rt.rank == 0:
        print(f"layers           unrolled: {unrolled}", flush=True)
    if unrolled is not None and config.optim.remat != "none":
        models.enable_remat(model, rt.device_type, keeps)
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
        model: as `causal_lm.load_model` returns it, on the batch's device.
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
            batch = dict(zip(batch, after(done, list(batch.values())), strict=True))
        loss, tokens = token_loss(model, batch, optim, smooth=True)
        loss.backward()
        totals = totals + torch.stack([loss.detach(), tokens])
    with torch.no_grad():
        found = _gradients(state.parameters)
        gradients = [one.join(found) for one in state.groups]
        runtime.reduce_gradients(gradients, totals)
        _update(state, gradients, totals, control, optim)


def _gradients(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in parameters.items():
        # A parameter that the rows did not use (a branch not taken) has none.
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
    return found


def _update(
    state: TrainState, gradients: list[torch.Tensor], totals: torch.Tensor, control: torch.Tensor, optim: OptimConfig
) -> None:
    rate, keep, step = control.unbind()
    gradients = [gradient / totals[1].clamp(min=1) for gradient in gradients]
    norm = torch.sqrt(reduce(torch.add, [(gradient * gradient).sum() for gradient in gradients]))
    loss = totals[0] / totals[1].clamp(min=1)
    good = torch.isfinite(norm) & torch.isfinite(loss)
    if optim.max_loss_rise is not None:
        good = good & ((state.applied == 0) | (loss <= state.usual + optim.max_loss_rise))
    if optim.max_grad_norm:
        scale = (optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = [gradient * scale for gradient in gradients]

    applied = state.applied + good
    for number, (one, gradient) in enumerate(zip(state.groups, gradients, strict=True)):
        moments = _of_group(state.moments, number)
        seeds = state.seeds.get(str(number))
        direction, news = state.optimizer.direction(gradient, moments, applied, optim, one, seeds)
        change = torch.where(good, rate * direction, torch.zeros_like(direction))
        decay = torch.where(good, rate * optim.weight_decay, torch.zeros_like(rate))
        for name, part in one.split(change).items():
            parameter = state.parameters[name]
            if optim.weight_decay and parameter.ndim - (name in state.stacks) > 1:
                parameter.mul_(1.0 - decay)
            parameter.sub_(part)
        for name, moment in moments.items():
            moment.copy_(torch.where(good, news[name], moment))
    usual = torch.where(state.applied == 0, loss, torch.lerp(loss, state.usual, _USUAL))
    state.usual.copy_(torch.where(good, usual, state.usual))
    state.streak.copy_(torch.where(good, torch.zeros_like(rate), state.streak + 1))
    state.applied.copy_(applied)
    if state.average is not None:
        for number, one in enumerate(state.groups):
            state.average[number].lerp_(one.join(state.parameters).detach(), good * (1.0 - optim.ema_decay))

    sums = state.window * keep
    bad = torch.where((sums[4] == 0) & ~good, step, sums[4])
    zero = torch.zeros_like(norm)
    added = [torch.where(good, value, zero) for value in (totals[0], totals[1], norm)]
    state.window.copy_(torch.stack([*(sums[:3] + torch.stack(added)).unbind(), sums[3] + ~good, bad]))
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
