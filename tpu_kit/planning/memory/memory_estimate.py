"""Estimates the memory of a training step from the model's config.json, without weights, compiler or torch.

A step needs arguments (weights, state, batch) + temporaries + code; donated state is written in place, so it counts
once. `activation_memory` derives the temporaries, this module the arguments and the code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_kit.config.loader import TrainConfig
from tpu_kit.config.mesh import Mesh
from tpu_kit.model.loop.loop_structure import FEW_TILES, check_blocks
from tpu_kit.model.shape import Shape, check_groups, most
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.model.weights.source import check_positions
from tpu_kit.planning.memory.activation_memory import PeakActivationModel
from tpu_kit.planning.memory.argument_memory import frozen_bytes, is_matrix, padded
from tpu_kit.planning.program_peaks import ProgramPeak, cache_bytes
from tpu_kit.training.losses.rollout_programs import rollout_of, update_plan

LOOP_CODE = 26 * 2**20
"""Code of a looped program per layer in the loop body and per pass; compiled programs have 20 to 31 MiB."""
TILE_CODE = 10 * 2**20
"""Code of each MLP tile after the second, if tiles are unrolled; if a norm follows, some is computed twice."""
INT4_CODE = 14 * 2**20
"""Additional code of each layer in a loop that unpacks int4 weights."""
SMALLEST_CODE = 7 * 2**20
"""Code of an unrolled program without its layers, and of a looped program of a tiny model."""
FLAT_CODE = 22 * 2**20
"""Code of each unrolled layer."""
LEAST_CODE, LAYER_CODE = 4 * 2**20, 5 * 2**19
"""Code of a prefill or decode program, and of each layer in its loops."""
LOGITS = 3
"""Arrays of (B, V) in fp32 while tokens are sampled."""


@dataclass(frozen=True)
class Memory:
    """The memory of a step on one device.

    Attributes:
        parts: bytes at the peak by name: base_weights, adapters, optimizer, ema, batch, objective, objective_saved,
            layer_inputs, saved_activations, mask, gradients, weight_copies, layer, loss_chunk, all_reduce, update,
            heap, code; in a run that samples, also caches, gradient_buffer and logits. Non-text inputs, and the weights
            and states of other models, have their own names.
        argument_bytes: weights, state, batch and all other buffers that exist before or after the program.
        temporary_bytes: buffers that exist only during the program.
        code_bytes: all programs.
        moment: the moment of the peak: "start", "forward", "loss", "backward", "update" or a non-text input's name; of
            several programs, the program with its moment, such as "accumulate, backward" or "decode".
        trained: number of trained parameters.
        programs: the "step", or all programs of a run that samples; the largest peak determines the figures above.
    """

    parts: Mapping[str, int]
    argument_bytes: int
    temporary_bytes: int
    code_bytes: int
    moment: str
    trained: int
    programs: tuple[ProgramPeak, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of the device at the peak."""
        return self.argument_bytes + self.temporary_bytes + self.code_bytes


def estimate(
    config: TrainConfig, *, num_replicas: int = 1, shape: Shape | None = None, mesh: Mesh | None = None
) -> Memory:
    """Estimates the memory of one device of a TPU during a training step, or a rollout if the run samples.

    Args:
        config: the run; its model is read by `shape_cache.read_shape`.
        num_replicas: data-parallel replicas, which hold all weights and state; ignored with a mesh.
        shape: the model's shape; None reads it.
        mesh: the mesh that shards the model; None for replicas.

    Raises:
        ValueError: as `shape_cache.read_shape`, `batch_arithmetic` and, with optim.remat=blocks, `check_blocks`; rows
            are longer than the model's positions; or int4 groups do not divide the inputs of a linear layer.
    """
    shape = shape or read_shape(config.model)
    check_positions(config.data.max_length, shape.positions)
    if config.lora.r and config.model.base_dtype == "int4":
        check_groups(shape.widths, config.model.quant_group)
    if config.optim.remat == "blocks":
        check_blocks(shape.loops)
    kind = _Rounds if rollout_of(config, 1) else _Step
    return kind(config, shape, num_replicas, mesh).memory()


class _Step:
    """Estimates arguments, temporaries and code of a run with one program."""

    def __init__(self, config: TrainConfig, shape: Shape, num_replicas: int, mesh: Mesh | None) -> None:
        self.config, self.shape, self.mesh, self.replicas = config, shape, mesh, num_replicas
        self.alive = PeakActivationModel(config, shape, num_replicas, mesh)

    def arguments(self) -> dict[str, int]:
        """Returns the bytes of the step's inputs on one device: weights, adapters, optimizer, average and batches.

        Moments and the average are fp32, in the layout of the parameter groups. AdamW has 8 bytes a parameter,
        Adafactor one number per row and column. Each pass has three int64 arrays and one int32 array of (B, S).
        """
        alive, config = self.alive, self.config
        every = sum(padded(part, one.size, free=True) for one, part in alive.sharded)
        adapters = sum(padded(part, one.size, free=True) for one, part in alive.of_trained()) if config.lora.r else 0
        state = sum(map(alive.group_bytes, alive.groups))
        columns = [(1, 8), (1, 8), (1, 8), (1, 4)]
        more = alive.inputs.columns.values() if alive.inputs else ()
        if alive.objective:
            columns += [(width, dtype.itemsize) for width, dtype in alive.objective.columns.values()]
        rows = sum(padded((alive.rows, alive.length * width), size) for width, size in columns)
        rows += sum(padded((alive.rows, *shape), dtype.itemsize, free=True) for shape, dtype in more)
        return {
            "base_weights": every - adapters,
            **{f"{one.name}_weights": frozen_bytes(one.model, config, self.mesh) for one in alive.others},
            "adapters": adapters,
            "optimizer": 2 * state if config.optim.optimizer == "adamw" else self._factored(),
            "ema": state if config.optim.ema_decay else 0,
            "batch": rows * alive.passes,
            # Each parameter takes at most 12 bytes with AdamW.
            "objective": 12 * alive.added.params if alive.added else 0,
        }  # fmt: skip

    def _factored(self) -> int:
        """Returns the bytes of Adafactor's row and column statistics, which are replicated on a mesh."""
        pairs = self.alive.of_trained()
        matrices = [one.shape for one, _ in pairs if is_matrix(one)]
        sizes = [count for shape in matrices for count in (math.prod(shape[:-1]), math.prod(shape) // shape[-2])]
        sizes.append(sum(math.prod(part) for one, part in pairs if not is_matrix(one)))
        return sum(padded((count,), 4) for count in sizes)

    def code(self) -> int:
        """Returns the bytes of the step's program; see `LOOP_CODE`."""
        passes, layers = self.alive.passes, self.shape.layers
        if not self.alive.scanned:
            return SMALLEST_CODE + passes * layers * FLAT_CODE
        if max(kind.parameters for kind in self.shape.kinds) < 2**21:
            return SMALLEST_CODE * passes
        twice = self.alive.tiled and any(kind.norm_follows for kind in self.shape.kinds)
        tiles = self.alive.tiles + twice  # the first products are computed twice
        more = max(0, tiles - 2) if self.alive.tiles <= FEW_TILES else 0
        layer = LOOP_CODE + TILE_CODE * more + INT4_CODE * (self.config.model.base_dtype == "int4")
        return layer * self.shape.program_layers * passes

    def memory(self) -> Memory:
        """Returns the estimate for the program with the largest peak."""
        programs = tuple(self.programs())
        codes = sum(one.code for one in programs)
        most = max(programs, key=lambda one: one.total - one.code)
        held = {**most.beside, **most.arguments, **({"sample_cache": most.results} if most.results else {})}
        parts, temporaries = {**held, **most.temporaries, "code": codes}, sum(most.temporaries.values())
        moment = ", ".join(filter(None, [most.name if len(programs) > 1 else "", most.moment]))
        return Memory(parts, sum(held.values()), temporaries, codes, moment, self.alive.trained, programs)

    def programs(self) -> Iterator[ProgramPeak]:
        """Yields the only program, "step"."""
        moment, beyond = self.alive.reported()
        temporaries = {name: math.ceil(size) for name, size in {**moment.parts, "heap": beyond}.items()}
        yield ProgramPeak("step", self.arguments(), 0, temporaries, self.code(), {}, moment.name)


class _Rounds(_Step):
    """Estimates a run that samples: the programs of a rollout and of an update, with all other allocated buffers."""

    def programs(self) -> Iterator[ProgramPeak]:
        """Yields "prefill", "samples" (if prompts have several samples), "decode", "accumulate" and "apply".

        The samples' cache exists from "samples" to the last "decode".
        """
        config, mesh = self.config, self.mesh
        rollout = rollout_of(config, 1 if mesh else self.replicas)
        assert rollout is not None, "a run with rounds samples"
        prompts, samples = (
            cache_bytes(config, self.shape, rows, rollout.slots, mesh) for rows in (rollout.prompts, rollout.samples)
        )
        lasting = self.arguments()
        batch = lasting.pop("batch")
        lasting = {name: size for name, size in lasting.items() if size}
        gradients = sum(padded(part, 4, free=True) for _, part in self.alive.of_trained())  # shaped like the parameters
        lasting |= {"gradient_buffer": gradients, "prompt_cache": prompts}
        model, cache = ("base_weights", "adapters"), "sample_cache" if rollout.copies else "prompt_cache"
        trained = ("adapters",) if config.lora.r else ("base_weights",)
        state = ("optimizer", "ema", "gradient_buffer")

        def made(name: str, reads: Sequence[str], temporaries: Mapping[str, float], code: int, **more: Any) -> Any:
            there = lasting | more.pop("also", {})
            arguments = {part: size for part, size in there.items() if part in reads}
            beside = {part: size for part, size in there.items() if part not in reads}
            sizes = {part: math.ceil(size) for part, size in temporaries.items() if size}
            return ProgramPeak(name, arguments, more.pop("results", 0), sizes, code, beside, **more)

        layers = self.shape.program_layers if self.alive.scanned else self.shape.layers
        cached, code = {cache: samples}, LEAST_CODE + LAYER_CODE * layers
        yield made("prefill", (*model, "prompt_cache"), self.prefill(rollout.prompts, rollout.widths[-1]), code)
        if rollout.copies:
            yield made("samples", ("prompt_cache",), {"cache_copy": prompts}, 0, results=samples)
        yield made("decode", (*model, cache), self.decode(rollout.samples), code, also=cached)
        moment, beyond = self.alive.reported(update=False)
        passes = update_plan(config, self.alive.batches).gradient_accumulation
        others = [f"{one.name}_weights" for one in self.alive.others]
        reads, sent = (*model, *others, "gradient_buffer", "batch"), {"batch": batch * passes}
        parts = {**moment.parts, "heap": beyond}
        yield made("accumulate", reads, parts, self.code(), also=sent, moment=moment.name)
        moment, beyond = self.alive.reported(update=True)
        parts = {**moment.parts, "gradients": 0.0, "heap": max(0.0, beyond - moment.parts["gradients"])}
        if mesh is None and self.replicas > 1:  # copies before and after the all-reduce
            parts["all_reduce"] += 2.0 * sum(padded(part, 4) for _, part in self.alive.of_trained())
        yield made("apply", (*trained, *state), parts, SMALLEST_CODE, also=sent)

    def prefill(self, rows: int, width: int) -> dict[str, float]:
        """Returns a prefill's temporaries in bytes by name; the whole mesh has `rows` prompts of `width` tokens."""
        mesh, optim = self.mesh or Mesh(), self.config.optim
        tokens = -(-rows // mesh.data) * width
        tile = min(optim.mlp_tile or tokens, tokens)
        layer = max(most(kind.forward, tokens, tile) for kind in self.shape.kinds) * self.alive.compute / 2
        return {"weight_copies": self.alive.copies(), "layer": layer / mesh.weight_shards}

    def decode(self, rows: int) -> dict[str, float]:
        """Returns the temporaries of decode steps in bytes by name, without the cache; `rows` are of the whole mesh."""
        mesh, shape = self.mesh or Mesh(), self.shape
        return {
            "weight_copies": self.alive.copies(),
            "logits": LOGITS * 4.0 * -(-rows // mesh.data) * shape.vocabulary,
        }  # fmt: skip
