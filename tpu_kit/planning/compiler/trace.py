"""Traces the training step without weights: the program that a replica on a TPU would compile.

The model is built from its config.json on PyTorch's "meta" device and prepared by training's own functions. Then
torch_xla placeholders, which have a shape and no bytes, replace all tensors, and `step.train_step` runs once. It needs
its own process with PJRT_DEVICE=CPU and XLA_ALWAYS_ALLREDUCE=1: see `compile_check`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # transformers' models import it, which fails under `torch.device` in torch 2.8

from tpu_kit.config.loader import TrainConfig, batch_arithmetic
from tpu_kit.config.mesh import BATCH, Spec, resolve_mesh
from tpu_kit.distributed.replica.backends import TpuRuntime
from tpu_kit.distributed.replica.mesh import use_mesh
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.decoder import BLOCK, Batch, Decoder
from tpu_kit.generation.kv_cache import stack_spec
from tpu_kit.generation.sampling import Sampling
from tpu_kit.model import attention, trainable
from tpu_kit.model import causal_lm as models
from tpu_kit.model.families.input_work import inputs_of
from tpu_kit.model.meta_model import empty_model
from tpu_kit.training.losses.rollout_programs import rollout_of
from tpu_kit.training.objectives import Objective, objective_of
from tpu_kit.training.state import TrainState
from tpu_kit.training.step import SplitStep, prepare_model, train_step
from tpu_kit.xla import traced_program
from tpu_kit.xla.traced_program import Program, is_input, lower, name_operations, placeholder, tensor_number

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def trace_step(config: TrainConfig, num_replicas: int, part: str = "step") -> Program:
    """Traces an update of one of `num_replicas` replicas, or of a mesh of that many devices; computes nothing.

    Args:
        config: the run.
        num_replicas: number of replicas, or of devices of the mesh.
        part: the whole "step"; or "accumulate" or "apply", the two programs of `SplitStep`.

    Raises:
        ValueError: as `empty_model`; or the adapters do not fit the model.
    """
    with _mesh_of(config, num_replicas) as (replicas, shards):
        plan = batch_arithmetic(config, replicas * shards)
        model, state, objective = prepared(config, TpuRuntime(0, replicas, torch.device("meta")))
        replica = _TracedReplica(0, replicas, traced_program.device())
        inputs = fill(model, state)
        name_operations(model)
        split = SplitStep(model, state, objective, config.optim, replica) if part != "step" else None
        tensors = batch_tensors(config, objective, model, plan.batch_size * shards)
        batches = [
            {name: placeholder(shape, dtype) for name, (shape, dtype) in tensors.items()}
            for _ in range(plan.gradient_accumulation)
        ]
        control = placeholder((3,), torch.float32)
        inputs |= {"control": control, **(split.tensors() if split else {})}
        specs = _specs(model, state)
        specs |= {f"batch.{name}": (BATCH, *[None] * (len(shape) - 1)) for name, (shape, _) in tensors.items()}
        before = [(tensor, tensor_number(tensor)) for tensor in _kept(state, split)]
        names = {tensor_number(tensor): name for name, tensor in inputs.items()}
        names |= {tensor_number(tensor): f"batch.{name}" for batch in batches for name, tensor in batch.items()}
        with traced_program.lowering_for_tpu():
            if split is None:
                train_step(model, state, batches, control, objective, config.optim, replica)
            elif part == "accumulate":
                split.accumulate(batches[0])
            else:
                split.apply(control)
            # As in torch_xla's `mark_step`: a tensor changed in place donates its old buffer to the new value.
            unchanged = {number for tensor, number in before if is_input(tensor, number)}
            replaced = {number for _, number in before} - unchanged
            outputs = [tensor for tensor in _kept(state, split) if tensor_number(tensor) not in unchanged]
            return lower(outputs, replaced, names, specs)


@contextlib.contextmanager
def _mesh_of(config: TrainConfig, num_devices: int) -> Iterator[tuple[int, int]]:
    """Activates the run's mesh in this process; yields the numbers of replicas and of batch shards per replica."""
    if config.launch.mesh is None:
        yield num_devices, 1
        return
    mesh = resolve_mesh(config.launch.mesh, num_devices, config.launch.mesh_rules)
    with use_mesh(mesh):
        yield 1, mesh.batch_shards


def prepared(config: TrainConfig, replica: Runtime) -> tuple[PreTrainedModel, TrainState, Objective]:
    """Builds (model, state, objective) as training does, on "meta", for the runtime `replica`, with adapters.

    Raises ValueError as `empty_model`, or if the adapters do not fit the model.
    """
    with torch.device("meta"):
        model = trainable.adapt(empty_model(config), config.lora, config.model.base_dtype).train()
        objective = objective_of(config)
        objective.attach(model, lambda one: empty_model(replace(config, model=one)))
        with traced_program.lowering_for_tpu():
            return model, prepare_model(model, config, replica, extra_sums=len(objective.extra)), objective


def batch_tensors(
    config: TrainConfig, objective: Objective, model: PreTrainedModel, rows: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns the shape and dtype of all tensors of a batch of `rows` rows by name, with images if the run has them."""
    columns = objective.batch_columns(attention.sees_all(model)).items()
    shapes: dict[str, Any] = {name: ((config.data.max_length * width,), dtype) for name, (width, dtype) in columns}
    if (beside := inputs_of(config)) is not None:
        shapes |= beside.columns
    return {name: ((rows, *shape), dtype) for name, (shape, dtype) in shapes.items()}


def _specs(model: PreTrainedModel, state: TrainState) -> dict[str, Spec]:
    """Returns the partition specs of model, state and gradient tensors by name, for `lower`."""
    specs = models.tensor_specs(model)
    for name, moments in state.moments.items():
        specs |= {f"moments.{name}.{kind}": state.spec(name, moment) for kind, moment in moments.items()}
        specs |= {f"{part}.{name}": state.specs[name] for part in ("average", "gradients")}
    return specs


def trace_generation(
    config: TrainConfig, num_devices: int, part: str, *, rows: int, width: int, slots: int, samples: int = 1
) -> Program:
    """Traces a program of generation with sampling, for one device or for a mesh of `num_devices`.

    If the run samples, the model is in training, and its training state is an input, too. Otherwise it is as loaded for
    generation.

    Args:
        config: the run.
        num_devices: devices of the mesh; ignored without a mesh.
        part: "prefill", "samples", which copies a prompt's cache for its samples, or "decode" for `BLOCK` steps.
        rows: rows of the device or the whole mesh, padding included; in "samples", the prompts.
        width: tokens of a padded prompt.
        slots: length of the KV cache in tokens.
        samples: copies of a prompt's cache in "samples"; other programs ignore it.

    Raises:
        ValueError: as `trace_step`.
    """
    with _mesh_of(config, num_devices):
        sampling = Sampling(max(1, slots - width), temperature=0.7, top_p=0.9)
        if rollout_of(config, 1) is not None:
            model, state, _ = prepared(config, TpuRuntime(0, 1, torch.device("meta")))
            specs, sampling = _specs(model, state), replace(sampling, top_p=1.0)
            inputs = fill(model, state)
        else:
            with torch.device("meta"):
                model = trainable.adapt(empty_model(config), config.lora, config.model.base_dtype)
                models.cast(model.eval(), models.compute_dtype(model))
            inputs = fill(model)
            specs = models.tensor_specs(model)
        replica = _TracedReplica(0, 1, traced_program.device())
        decoder = Decoder(model, replica, BLOCK, slots)
        ids, lengths = (
            torch.zeros(rows, width, dtype=torch.int64),
            torch.full((rows,), width),
        )
        batch = Batch(ids, lengths, ids[:, 0])
        with decoder.ready(), traced_program.lowering_for_tpu():
            cache = decoder.prompt_cache(rows)
            buffers = cache.tensors
            names = {f"cache.{number}": tensor for number, tensor in enumerate(buffers)}
            specs |= {name: stack_spec(tensor.shape) for name, tensor in names.items()}
            numbers = {tensor_number(tensor): name for name, tensor in (inputs | names).items()}
            replaced = {tensor_number(tensor) for tensor in buffers}
            if part == "prefill":
                decoder.prefill(batch, 1, BLOCK)
                return lower(buffers, replaced, numbers, specs)
            if part == "samples":
                prompts = torch.arange(rows).repeat_interleave(samples)
                return lower(decoder.copy_prompts(cache, prompts).tensors, set(), numbers, specs)
            uniforms = torch.zeros(sampling.max_new_tokens, rows)
            ended = [False] * rows
            inputs_of_steps = decoder.begin(batch, 1, ended, uniforms, sampling)
            decoder.decode(inputs_of_steps, cache, BLOCK)
            return lower([*replica.read, *inputs_of_steps.carried, *buffers], replaced, numbers, specs)


class _TracedReplica(TpuRuntime):
    """A replica whose tensors are placeholders; it computes nothing."""

    def to_device(self, batches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Returns placeholders on the XLA device with the shapes and dtypes of the batches."""
        return [{k: placeholder(tuple(v.shape), v.dtype) for k, v in batch.items()} for batch in batches]

    def sync(self) -> None:
        """Does nothing: `lower` reads the graph."""

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Keeps the tensors in `read`, in place of earlier tensors, and returns fp32 zeros of their shapes."""
        self.read = list(tensors)  # for `lower`
        return [torch.zeros(tensor.shape) for tensor in tensors]


def fill(model: torch.nn.Module, state: TrainState | None = None) -> dict[str, torch.Tensor]:
    """Replaces all tensors of a model and a state in place by placeholders on the XLA device, returned by name.

    A name is a tensor's path in the model or the state, such as "moments.NAME.KIND". A tensor that occurs twice (a tied
    weight, a parameter that the state also holds) stays a single tensor, and has its first name.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keeps the old tensor, so that its id is not reused
    inputs: dict[str, torch.Tensor] = {}

    def swap(tensor: torch.Tensor, name: str) -> torch.Tensor:
        if id(tensor) not in made:
            new = placeholder(tuple(tensor.shape), tensor.dtype)
            inputs[name] = new
            if isinstance(tensor, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = tensor, new
        return made[id(tensor)][1]

    def swap_all(held: dict[str, Any], start: str = "") -> None:
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                held[name] = swap(value, start + name)
            elif isinstance(value, dict):
                swap_all(value, f"{start}{name}.")

    for path, module in model.named_modules():
        swap_all(module._parameters, f"{path}.")
        swap_all(module._buffers, f"{path}.")
    swap_all(vars(state) if state else {})
    return inputs


def _kept(state: TrainState, split: SplitStep | None) -> list[torch.Tensor]:
    """Returns the tensors that stay alive after a step: the state's and, with `split`, its accumulated gradients."""
    return [*state.tensors().values(), *(split.tensors().values() if split else ())]
