"""Traces the training step as TorchTPU compiles it, without weights and without a TPU; see `trace`.

It needs its own process in an environment with torch_tpu; `compile_check` starts it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

from tpu_kit.config.loader import TrainConfig, batch_arithmetic
from tpu_kit.distributed.replica.backends import TorchTpuRuntime
from tpu_kit.machine.chips import Topology
from tpu_kit.planning.compiler.trace import batch_tensors, prepared
from tpu_kit.torch_tpu import process_group, without_chip
from tpu_kit.torch_tpu.program import trace
from tpu_kit.training.step import TracedSteps
from tpu_kit.xla.compiler import program_of
from tpu_kit.xla.traced_program import Program, lowering_for_tpu


def trace_step(config: TrainConfig, num_replicas: int, topology: Topology) -> Program:
    """Traces a step like `trace.trace_step`, for replicas on the chips of a topology.

    Raises:
        ValueError: as `meta_model.empty_model`; or the backend does not support the model.
    """
    where = topology.name, topology.chips_per_host_bounds, topology.chip_config_name
    with without_chip.topology_as_device(*where), lowering_for_tpu():
        model, state, objective = prepared(config, TorchTpuRuntime(0, num_replicas, torch.device("meta")))
        if num_replicas > 1:  # not earlier: the group makes a client, and seeds would allocate on it
            process_group.join_alone(num_replicas)
        steps = TracedSteps(
            model, state, objective, config.optim, TorchTpuRuntime(0, num_replicas, torch.device("tpu"))
        )
        plan = batch_arithmetic(config, num_replicas)
        tensors = batch_tensors(config, objective, model, plan.batch_size)
        batches = [
            {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in tensors.items()}
            for _ in range(plan.gradient_accumulation)
        ]
        update, donated, *trees = steps.update(batches, torch.empty(3, device="meta"))
        made, mode = dict[int, Any](), FakeTensorMode(allow_non_fake_inputs=True)

        def fake(tensor: torch.Tensor) -> torch.Tensor:  # a tensor that occurs twice stays a single tensor
            if id(tensor) not in made:
                with mode:
                    made[id(tensor)] = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="tpu"
                    )
            return made[id(tensor)]

        example, structure = tree_flatten(tree_map(fake, trees))
        names = tuple(keystr(path) for path, _ in tree_flatten_with_path(trees)[0])

        def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return tree_flatten(update(*tree_unflatten(list(tensors), structure)))[0]

        text = without_chip.lower(trace(flat, example), example)
    process_group.check_all_reduces(text, num_replicas)
    return program_of(text, tuple(range(donated)), names, sum(tensor.nbytes for tensor in example))
