"""The state of training: parameters, optimizer moments, the average of the parameters and the sums for the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tpu_kit.config.loader import OptimConfig
from tpu_kit.config.mesh import Spec
from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.model import causal_lm as models
from tpu_kit.model.base_model import embedding_paths
from tpu_kit.model.loop.layer_calls import restacked, stacked_names, unstacked
from tpu_kit.model.sharding import partition
from tpu_kit.model.sharding.sharding_rules import Embedding
from tpu_kit.training.checkpoint.manifest import Checkpoint, Select
from tpu_kit.training.optimizer import OPTIMIZERS, relative_rates

if TYPE_CHECKING:
    from tpu_kit.xla.scan import Traced

SCALARS = ("applied", "report")


class UpdateSums(NamedTuple):
    """Sums over the updates since `Control.window_open` was 0: fp32 scalars on the device, numbers on the host.

    Attributes:
        loss: sum of the loss over applied updates.
        weight: sum of the objective's weights over applied updates, such as the number of tokens with loss.
        grad_norm: sum of the gradient norms before clipping, over applied updates.
        skipped: number of skipped updates.
        first_skipped: step of the first skipped update, 0 if there is none.
        usual: running mean of the loss per token over the whole run, to detect an exploding loss.
        streak: number of consecutive skipped updates until now.
        extra: the extra sums of the objective, over applied updates.
    """

    loss: Any
    weight: Any
    grad_norm: Any
    skipped: Any
    first_skipped: Any
    usual: Any
    streak: Any
    extra: tuple[Any, ...] = ()

    def pack(self) -> torch.Tensor:
        """Packs the sums into one tensor, (7 + N,) with N extra sums."""
        return torch.stack([*self[:-1], *self.extra])

    @classmethod
    def unpack(cls, values: Sequence[Any]) -> UpdateSums:
        """Inverts `pack`: takes the tensor's elements, as scalar tensors or numbers."""
        count = len(cls._fields) - 1
        return cls(*values[:count])._replace(extra=tuple(values[count:]))


class TrainState:
    """The state of training on the device.

    A checkpoint does not depend on which layers are stacked: `read_tensors` returns separate tensors for every layer.

    Attributes:
        params: the trained parameters by name, fp32.
        stacks: as `layer_calls.stacked_names` returns them.
        specs: sharding of the parameters on a mesh, by name.
        rates: the learning rate of each parameter, as a multiple of optim.learning_rate.
        optimizer: from `optimizer.OPTIMIZERS`.
        moments: the optimizer's moments, by name of the parameter and kind.
        passes: the traced forward and backward pass by the shapes of a batch; None if every step traces it anew.
        average: exponential moving average of the parameters, by name, or None.
        applied: () number of applied updates, without skipped updates.
        report: (7 + N,) a packed `UpdateSums` with N extra sums of the objective. Every step makes a new tensor, so
            that the host can read the previous tensor while the next step runs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        optim: OptimConfig,
        saved: Mapping[str, torch.Tensor] | None = None,
        extra_sums: int = 0,
        plus: float = 1.0,
    ) -> None:
        """Creates the state of a model on `device`, or with `saved`, from `to_host`, restores all but the parameters.

        The parameters are the model's own, which `restore` sets; `load` does both. `extra_sums` is the number of extra
        sums of the objective, `plus` is `lora.plus`. Raises the errors of `relative_rates`.
        """
        self.params = models.trainable_parameters(model)
        wrong = [name for name, param in self.params.items() if param.dtype != torch.float32]
        assert not wrong, f"trained in other than fp32: {wrong[:3]}"
        self.stacks = stacked_names(model)
        embeddings = embedding_paths(model) if optim.embedding_learning_rate else []
        self.rates = relative_rates(self.params, embeddings, optim, plus)
        embedding = partition.embedding_of(model) if active_mesh().size > 1 else Embedding()
        self.specs = {
            name: partition.spec_of(name, param, embedding, name in self.stacks) for name, param in self.params.items()
        }
        self.optimizer = OPTIMIZERS[optim.optimizer]
        before = sections(saved or {})

        def moved(name: str, section: str, new: torch.Tensor) -> torch.Tensor:
            """Moves the saved tensor of a parameter to the device, or `new` if none was saved."""
            tensor = restacked(self.stacks, before[section], name) if section in before else new
            return partition.move(tensor, device, self.spec(name, new), copy=tensor is not new)

        self.moments = {
            name: {
                kind: moved(name, f"moments/{kind}", zeros)
                for kind, zeros in self.optimizer.start(param.shape, name in self.stacks).items()
            }
            for name, param in self.params.items()
        }
        # Zeros created on XLA would be constants of the first program, and the second step would compile again.
        start = {"applied": torch.zeros(()), "report": torch.zeros(len(UpdateSums._fields) - 1 + extra_sums)}
        start |= before.get("", {})
        self.passes: dict[Any, Traced | None] = {}
        self.applied, self.report = (partition.move(start[name], device) for name in SCALARS)
        self.average = None
        if optim.ema_decay:  # multiplying makes a new buffer; a copy on XLA would share the parameter's
            self.average = {name: moved(name, "average", param.detach() * 1) for name, param in self.params.items()}

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        model: torch.nn.Module,
        place: Callable[[], object],
        device: torch.device,
        optim: OptimConfig,
        extra_sums: int = 0,
        plus: float = 1.0,
    ) -> TrainState:
        """Restores the state of a checkpoint: the model's parameters on the CPU, then the other tensors on the device.

        Args:
            checkpoint: a checkpoint of this run.
            model: as `trainable.load_model` returns it, with its objective attached.
            place: moves the model to the device, and may stack its layers.
            device: this replica's device.
            optim: the run's optimizer settings.
            extra_sums: number of extra sums of the objective.
            plus: `lora.plus`.

        Raises:
            DamagedError: a file of the checkpoint has changed since it was written.
            ValueError: the checkpoint's parameters do not fit the model, or it lacks shards.
        """
        saved = read_tensors(checkpoint)
        restore(model, saved)
        place()
        return cls(model, device, optim, saved, extra_sums, plus)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors of the state on the device, by "SECTION/NAME" (see `to_host`), "applied" and "report".

        They are not copies, and stacks of layers' tensors are not split.
        """
        tensors = {name: getattr(self, name) for name in SCALARS}
        for name, moments in self.moments.items():
            tensors |= {f"moments/{kind}/{name}": moment for kind, moment in moments.items()}
        tensors |= {f"average/{name}": average for name, average in (self.average or {}).items()}
        return tensors | {f"parameters/{name}": param for name, param in self.params.items()}

    def to_host(self, runtime: Runtime) -> dict[str, torch.Tensor]:
        """Copies the state to CPU tensors.

        Returns:
            "parameters/NAME", "moments/KIND/NAME" and, with an average, "average/NAME" for every parameter, unstacked;
            and "applied" and "report".
        """
        tensors = self.tensors()
        values = dict(zip(tensors, runtime.to_host(list(tensors.values())), strict=True))
        return _unstacked(values, self.stacks)

    def part(self, runtime: Runtime) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Copies to the CPU the shards that this host saves; does not split stacks of layers.

        Returns:
            A dict from key to shard, and a layout, which `joined` needs and which can be written as JSON. A key has a
            name from `tensors` and the slice of every axis, such as "parameters/NAME@0:4,8:16".
        """
        tensors = self.tensors()
        shards = {
            f"{name}@{','.join(f'{part.start}:{part.stop}' for part in box)}": piece
            for name, pieces in zip(tensors, runtime.pieces(list(tensors.values())), strict=True)
            for box, piece in pieces
        }
        return shards, {"shapes": {name: list(tensor.shape) for name, tensor in tensors.items()}, "stacks": self.stacks}

    def spec(self, name: str, tensor: torch.Tensor) -> Spec:
        """Returns the sharding of a parameter's tensor on a mesh: the parameter's if the shapes are equal, or none."""
        return self.specs[name] if tensor.shape == self.params[name].shape else (None,) * tensor.ndim

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Makes the model use the average, if there is one, in place of the parameters in the context."""
        current = {name: param.data for name, param in self.params.items()}
        for name, average in (self.average or {}).items():
            self.params[name].data = average
        try:
            yield
        finally:
            for name, param in self.params.items():
                param.data = current[name]


def _unstacked(values: Mapping[str, torch.Tensor], stacks: Mapping[str, list[str]]) -> dict[str, torch.Tensor]:
    """Converts CPU copies of `TrainState.tensors`, or of some sections, to the tensors of `TrainState.to_host`."""
    return {
        f"{section}/{name}" if section else name: tensor
        for section, named in sections(values).items()
        for name, tensor in unstacked(stacks, named).items()
    }


def read_tensors(checkpoint: Checkpoint, select: Select | None = None) -> dict[str, torch.Tensor]:
    """Reads training.safetensors, or the parts of several hosts, as the tensors of `TrainState.to_host`.

    `select` must choose whole sections, by the start of a name such as "average/"; None reads all. Raises DamagedError
    as `Checkpoint.tensors`, and ValueError as `joined`.
    """
    if parts := [name.removesuffix(".safetensors") for name in checkpoint.files if name.startswith("training-")]:
        layout = checkpoint.document("layout")
        layout["shapes"] = {name: shape for name, shape in layout["shapes"].items() if select is None or select(name)}
        return joined((checkpoint.tensors(part, select) for part in parts), layout)
    return checkpoint.tensors("training", select)


def joined(parts: Iterable[Mapping[str, torch.Tensor]], layout: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Joins the shards of all hosts to the tensors of `TrainState.to_host`; raises ValueError if shards are missing.

    `TrainState.part` returns shards and a layout: `parts` has the shards of every host, `layout` is any host's layout.
    """
    shapes, whole, filled = layout["shapes"], dict[str, torch.Tensor](), Counter[str]()
    for part in parts:
        for key, piece in part.items():
            name, _, text = key.rpartition("@")
            box = tuple(slice(*map(int, span.split(":"))) for span in text.split(",") if span)
            if name not in whole:
                whole[name] = torch.empty(shapes[name], dtype=piece.dtype)
            whole[name][box] = piece
            filled[name] += piece.numel()
    if lacking := [name for name, shape in shapes.items() if filled[name] != prod(shape)]:
        raise ValueError(f"the parts of the checkpoint lack shards of {len(lacking)} tensors, such as {lacking[0]}")
    return _unstacked(whole, layout["stacks"])


def sections(saved: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Groups the tensors of `TrainState.to_host`: section -> name -> tensor.

    Sections are "parameters", "moments/KIND", "average", and "" for "applied" and "report".
    """
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in saved.items():
        section, _, name = key.rpartition("/")
        groups.setdefault(section, {})[name] = tensor
    return groups


def restore(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Sets the parameters of a model on the CPU from `TrainState.to_host`; raises ValueError if they do not fit."""
    advice = (
        "Use the model of the run, and the versions of transformers and peft that state.json in the checkpoint names"
    )
    set_parameters(model, sections(saved)["parameters"], "the checkpoint", advice)


def set_parameters(model: torch.nn.Module, there: Mapping[str, torch.Tensor], source: str, advice: str) -> None:
    """Sets the parameters of a model on the CPU to tensors of unstacked layers; the model's layers may be stacked.

    Args:
        model: the model with its adapters and its objective.
        there: one tensor per trained parameter, by name.
        source: the origin of the tensors, for the error.
        advice: the next action, for the error.

    Raises:
        ValueError: names or shapes differ from the model's.
    """
    params, stacks = models.trainable_parameters(model), stacked_names(model)
    ours, theirs = (
        {name: tuple(tensor.shape) for name, tensor in named.items()} for named in (unstacked(stacks, params), there)
    )
    if differ := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        raise ValueError(
            f"{source} does not fit this model: {len(differ)} of {len(ours)} tensors differ, such as {differ[0]}: "
            f"{theirs.get(differ[0], 'none')} there, {ours.get(differ[0], 'none')} now. {advice}"
        )
    with torch.no_grad():
        for name, param in params.items():
            if active_mesh().size == 1:
                param.copy_(restacked(stacks, there, name))
            else:  # the parameter may be mapped from a bf16 file
                param.data = restacked(stacks, there, name)
