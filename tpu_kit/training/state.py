"""What a run changes: trained parameters, the optimizer's moments, the average and the sums for the log.

On the device they are one tensor for each group of parameters; in a checkpoint one for each parameter of each layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from tpu_kit.config.loader import OptimConfig
from tpu_kit.config.mesh import Spec
from tpu_kit.distributed.runtime import Runtime
from tpu_kit.models import causal_lm as models
from tpu_kit.models import partition
from tpu_kit.models.layer_scan import restacked, stacked_names, stacked_prefixes, unstacked
from tpu_kit.training.optimizer import OPTIMIZERS, Group, Moments, group

# What `TrainState.window` sums up between two readings.
WINDOW = ("loss_sum", "tokens", "grad_norm_sum", "skipped", "first_skipped_step")


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
        window: (5 + N,) sums since `keep` was 0: those of `WINDOW`, then the N extra sums of the objective.
        report: (7 + N,) usual, streak and window once more, for the host: the next step makes another one instead of
            replacing this, so that it can be read while that step runs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        optim: OptimConfig,
        saved: Mapping[str, torch.Tensor] | None = None,
        extra_sums: int = 0,
    ) -> None:
        """Starts anew, or from what `to_host` returned; the model's own parameters are set by `restore` before.

        Args:
            model: the model, with its trained parameters in fp32.
            device: where the state lies.
            optim: the optimizer, and whether there is an average.
            saved: what `to_host` returned.
            extra_sums: how many extra sums the objective has.
        """
        self.parameters = models.trainable_parameters(model)
        wrong = [name for name, parameter in self.parameters.items() if parameter.dtype != torch.float32]
        assert not wrong, f"trained in other than fp32: {wrong[:3]}"
        self.stacks, self.tied = stacked_names(model), partition.is_tied(model)
        self.optimizer = OPTIMIZERS[optim.optimizer]
        self.groups = group(self.parameters, self.stacks, self.optimizer.block)
        # Zeros made on the host: those made on XLA are constants of the first program, which then is another one.
        zeros = {name: torch.zeros(()) for name in ("applied", "usual", "streak")}
        zeros["window"] = torch.zeros(len(WINDOW) + extra_sums)
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
            for name, kinds in self.optimizer.split(of_group(moments, number), one).items():
                for kind, tensor in kinds.items():
                    stored.setdefault(f"moments/{kind}", {})[name] = tensor
        for section, named in stored.items():
            found |= {f"{section}/{name}": tensor for name, tensor in unstacked(self.stacks, named).items()}
        return found

    def specs(self, model: torch.nn.Module) -> dict[str, Spec]:
        """How the model's tensors and this state's lie on a mesh: by name in the model, or "moments.first.0"."""
        stacks = tuple(stacked_prefixes(model))
        found = {
            name: partition.spec_of(name, tensor, name.startswith(stacks), self.tied)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        for number, one in enumerate(self.groups):
            if one.alone:
                (name,) = one.slots
                spec, shape = found[name], self.parameters[name].shape
                beside = {f"moments.{key}.{number}": moment for key, moment in of_group(self.moments, number).items()}
                if self.average is not None:
                    beside[f"average.{number}"] = self.average[number]
                found |= {key: spec for key, tensor in beside.items() if tensor.shape == shape}
        return found

    def sharded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Shards a gradient or a new value as its parameter is; without a mesh it returns the tensor."""
        return partition.like(name, tensor, name in self.stacks, self.tied)

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


def of_group(moments: Moments, number: int) -> Moments:
    """The moments of one group, by name without the group's number."""
    return {name.partition(".")[0]: moment for name, moment in moments.items() if name.endswith(f".{number}")}
