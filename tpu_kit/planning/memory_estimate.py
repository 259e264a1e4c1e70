"""Bytes per chip by formula, from the model's config.json alone: no weights, no compiler, no torch, under a second.

    from tpu_kit.planning.memory_estimate import estimate
    print(estimate(config))

What a step needs is arguments (weights, state, batch) + temporaries + code; donated state is written in place, so it
counts once. Temporaries are those of the moment when most are alive: at the "start", in the "loss", the "backward" pass
or the "update".

`alive` derives what is alive when, and what the compiler reports of it. Here are what there is before the step, and
code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tpu_kit.config.loader import TrainConfig
from tpu_kit.hardware.chips import GIB, Chip
from tpu_kit.models.architecture import FEW_TILES, Shape, read_shape
from tpu_kit.planning.activation_memory import PeakActivationModel
from tpu_kit.planning.tensor_shapes import BLOCK, blocks, group_bytes, padded, stored_tensors, trained_tensors

LOOP_CODE = 26 * 2**20
"""Code of a program of loops for each layer in it (one, or those of a block) and each pass: 20 to 31 MiB on v5e, v5p,
v6e, 23 for each of 2 or 4 passes, 26 for each of Gemma 2's two layers; 7 MiB for a model of 0.8 M parameters."""
TILE_CODE = 10 * 2**20
"""Code of each tile of an MLP beyond two, where tiles are no loop (`tiles`): 27 to 32 MiB in all for two (Mistral,
Qwen2.5, SmolLM2), 37 to 52 for four (Mistral, Llama, Qwen2.5, SmolLM2). Where a norm follows some of it is computed
twice: with two 32 (Gemma 3) and 43 (Gemma 2) for each layer."""
INT4_CODE = 14 * 2**20
"""Code for each layer in a loop beyond that, where weights are unpacked from int4: 13 (Gemma 3), 16 (Phi-3)."""
UPDATE_CODE = 2.8 * 2**20
"""Code of each tensor's update by 8-bit AdamW, which rounds at random: 2.7 (Qwen2, 7 tensors), 2.9 (SmolLM2, 9)."""
SMALLEST_CODE = 7 * 2**20
"""Code beside the layers' of an unrolled program; and of a program of loops of next to nothing."""
FLAT_CODE = {"full": 22 * 2**20, "none": 16 * 2**20, "whole": 21 * 2**20}
"""Code of each unrolled layer: 22 MiB with remat=full (Qwen2.5-0.5B, 4 and 24 layers), 14 to 17 with none (the same, 4;
SmolLM2-360M, 4 and 12), 21 with none in full fine-tuning (SmolLM2-135M, 4)."""


@dataclass(frozen=True)
class Memory:
    """What a step takes of one device's memory.

    Attributes:
        parts: bytes by name, of the moment when most is taken: base_weights, adapters, optimizer, ema, batch,
            saved_activations, mask, gradients, weight_copies, layer, attention, loss_chunk, all_reduce, update,
            heap, code.
        argument_bytes: what is there before the step.
        temporary_bytes: what comes and goes within it.
        code_bytes: the program.
        moment: "loss", "backward" or "update": when most is taken.
        trained: number of trained parameters.
        scanned: whether layers run as a loop.
    """

    parts: Mapping[str, int]
    argument_bytes: int
    temporary_bytes: int
    code_bytes: int
    moment: str
    trained: int
    scanned: bool

    @property
    def total_bytes(self) -> int:
        """The peak."""
        return self.argument_bytes + self.temporary_bytes + self.code_bytes

    def __str__(self) -> str:
        lines = [f"{name:<18} {size / GIB:8.3f} GiB" for name, size in self.parts.items() if size]
        return "\n".join([*lines, f"{'peak':<18} {self.total_bytes / GIB:8.3f} GiB ({self.moment})"])


def estimate(
    config: TrainConfig,
    *,
    num_replicas: int = 1,
    batch_size: int | None = None,
    shape: Shape | None = None,
    chip: Chip | None = None,
) -> Memory:
    """The memory of a training step on a TPU.

    Args:
        config: the run; its model is read by `architecture.read_shape`.
        num_replicas: data-parallel replicas; each holds everything.
        batch_size: rows per replica in a pass, in place of `config.optim.batch_size`.
        shape: the model's shape, if it was read before.
        chip: the TPU; without one what v5e has of vector memory is reckoned with.

    Raises:
        ValueError: as `architecture.read_shape` and `batch_arithmetic`; a sequence longer than the model's positions.
    """
    if batch_size is not None:
        config = replace(config, optim=replace(config.optim, batch_size=batch_size))
    shape = shape or read_shape(config.model)
    if config.data.max_length > shape.positions:
        raise ValueError(
            f"data.max_length={config.data.max_length} is longer than the {shape.positions} positions of the model; "
            f"set it to {shape.positions} or less"
        )
    return _Step(config, shape, num_replicas, chip).memory()


class _Step:
    """Arguments, temporaries and code."""

    def __init__(self, config: TrainConfig, shape: Shape, num_replicas: int, chip: Chip | None) -> None:
        self.config, self.shape = config, shape
        self.alive = PeakActivationModel(config, shape, num_replicas, chip)
        self.trained_tensors = trained_tensors(shape, config.lora)
        self.trained = self.alive.trained

    # ------------------------------------------------------------------------------------------------------ arguments

    def arguments(self) -> dict[str, int]:
        """What is there before the step, and written over by it: weights, adapters, optimizer, average, batches.

        Base weights as `tensor_shapes.stored_tensors`; with lora.r=0 they are trained, in fp32.
        Adapters are fp32, moments and the average too, as the groups of parameters lie (see `optimizer`): AdamW 8
        bytes a parameter; in 8 bits 2, and for each block of 256 in a row two scales and a seed of 4; Adafactor a
        number for each row and column. A batch is three int64 and one int32 array of (B, S) for each pass.
        """
        lora = self.config.lora
        weights = sum(padded(tensor, size, free=True) for tensor, size in stored_tensors(self.shape, self.config))
        adapters = sum(padded(tensor, 4, free=True) for tensor in self.trained_tensors) if lora.r else 0
        rows = sum(padded((self.alive.rows, self.alive.length), one) for one in (8, 8, 8, 4))
        return {
            "base_weights": weights, "adapters": adapters, "optimizer": self._moments(),
            "ema": sum(map(self.alive.group_bytes, self.alive.groups)) if self.config.optim.ema_decay else 0,
            "batch": rows * self.alive.passes,
        }  # fmt: skip

    def _moments(self) -> int:
        kind, groups = self.config.optim.optimizer, self.alive.groups
        if kind == "adamw":
            return 2 * sum(map(group_bytes, groups))
        found = 0
        for group in groups:
            if kind == "adamw8bit":
                count = sum(blocks(tensor, BLOCK) for tensor in group)
                found += 2 * (padded((count, BLOCK), 1) + padded((count, 1), 4, free=True)) + padded((count,), 4)
                continue
            # Of layers' vectors a stack has two axes, and is no matrix.
            matrices = [one for one in group if len(one) == 3 or one[0] == self.shape.vocabulary]
            rows = sum(math.prod(one[:-1]) for one in matrices)
            columns = sum(math.prod(one) // one[-2] for one in matrices)
            vectors = sum(map(math.prod, group)) - sum(map(math.prod, matrices))
            found += sum(padded((count,), 4) for count in (rows, columns, vectors))
        return found

    def code(self) -> int:
        """The program's own size; see `LOOP_CODE`."""
        passes, layers = self.alive.passes, self.shape.layers
        if not self.alive.scanned:
            kind = "full" if self.alive.again else "whole" if self.alive.whole else "none"
            return SMALLEST_CODE + passes * layers * FLAT_CODE[kind]
        if self.shape.layer_parameters < 2**21:
            return SMALLEST_CODE * passes
        tiles = self.alive.tiles + (self.alive.tiled and self.shape.norm_follows)  # the first products twice
        more = max(0, tiles - 2) if self.alive.tiles <= FEW_TILES else 0
        layer = LOOP_CODE + TILE_CODE * more + INT4_CODE * (self.config.model.base_dtype == "int4")
        update = UPDATE_CODE * len(self.alive.groups) if self.config.optim.optimizer == "adamw8bit" else 0
        return layer * sum(period for period, _ in self.shape.runs()) * passes + int(update)

    def memory(self) -> Memory:
        """All of it."""
        arguments = self.arguments()
        moment, beyond = self.alive.reported()
        temporaries = {name: math.ceil(size) for name, size in {**moment.parts, "heap": beyond}.items()}
        parts = {**arguments, **temporaries, "code": self.code()}
        total = sum(temporaries.values())
        return Memory(parts, sum(arguments.values()), total, self.code(), moment.name, self.trained, self.alive.scanned)
