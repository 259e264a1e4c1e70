"""The memory of a training step that is sharded over a mesh: the shard of each tensor, and the temporaries of a device.

Arguments are the shards of the model's tensors by the rules of `models.sharding_rules`, their moments and a shard of
the batch. The temporaries are those of `activation_memory` for the device's rows and its part of the model axis, with
the weights of a layer gathered over fsdp, and gradients in shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tpu_kit.config.loader import LoraConfig, TrainConfig
from tpu_kit.config.mesh import Mesh
from tpu_kit.hardware.chips import Chip
from tpu_kit.models.architecture import Shape
from tpu_kit.models.sharding_rules import FIRST, ROW, Placed, Tensor, place, spec_of
from tpu_kit.planning.activation_memory import (
    PeakActivationModel,
    padded,
    teacher_shape,
)

WIDE = 5
"""Arrays of (tokens, I) of an MLP's backward pass in HBM."""
INT4_MATRICES = (9, 3)
"""Bytes for each weight of the largest matrix of the MLP and of attention, where a layer is gathered in int4."""
MESH_CODE = 10 * 2**20
"""Code of the collectives of a step, beside that of its layers."""


def model_tensors(shape: Shape, config: TrainConfig) -> list[Tensor]:
    """All parameters and buffers of a run's model, under their names in it; norms are numbered."""
    lora, kind = config.lora, config.model.base_dtype if config.lora.r else "fp32"
    size, start = 4 if kind == "fp32" else 2, "base_model.model." if lora.r else ""
    table = (shape.vocabulary, shape.hidden)
    whole = not lora.r
    found = [Tensor(f"{start}model.embed_tokens.weight", table, size, trained=whole)]
    if not shape.tied:
        found.append(Tensor(f"{start}lm_head.weight", table, size, trained=whole))
    if shape.known.head_bias:
        found.append(Tensor(f"{start}lm_head.bias", table[:1], size, trained=whole))
    found += [
        Tensor(f"{start}model.norm{n}.weight", (one,), size, trained=whole) for n, one in enumerate(shape.last_norms)
    ]
    adapted = {linear.path: count / shape.layers for linear, count in shape.adapted(lora)}
    for number, (period, turns) in enumerate(shape.runs()):
        for offset in range(period):
            layer = f"{start}model.layers.runs.{number}.layers.{offset}."

            def add(name: str, sizes: Sequence[int], size: float, trained: bool = whole, share: float = 1) -> None:
                stack = (max(1, round(turns * share)), *sizes)  # noqa: B023  called at once
                packed = name.endswith("weight") and size == 1 and kind == "int4"
                found.append(Tensor(layer + name, stack, size, True, packed, trained))  # noqa: B023  called at once

            for norm, length in enumerate(shape.norms):
                add(f"norm{norm}.weight", (length,), size)
            for one in shape.linears:
                base = f"{one.path}.base_layer" if one.path in adapted else one.path
                if kind == "int8":
                    add(f"{base}.weight", (one.outputs, one.inputs), 1)
                    add(f"{base}.scale", (one.outputs,), 2)
                elif kind == "int4":
                    add(f"{base}.weight", (one.inputs // 2, one.outputs), 1)
                    add(f"{base}.scale", (2, one.inputs // config.model.quant_group, one.outputs), 2)
                else:
                    add(f"{base}.weight", (one.outputs, one.inputs), size)
                if one.bias:
                    add(f"{base}.bias", (one.outputs,), size)
                if share := adapted.get(one.path):
                    add(f"{one.path}.lora_A.default.weight", (lora.r, one.inputs), 4, True, share)
                    add(f"{one.path}.lora_B.default.weight", (one.outputs, lora.r), 4, True, share)
                    if lora.dora:
                        add(f"{one.path}.lora_magnitude_vector.default.weight", (one.outputs,), 4, True, share)
    return found


def table(shape: Shape, config: TrainConfig, mesh: Mesh) -> list[Placed]:
    """The table of a model's tensors on a mesh, largest shard first.

    Raises:
        ValueError: as `sharding_rules.place`.
    """
    return place(mesh, model_tensors(shape, config), shape.tied)


def shards(tensors: Sequence[Tensor], mesh: Mesh, tied: bool) -> list[tuple[int, ...]]:
    """The shapes of a device's shards."""
    specs = (mesh.fitted(spec_of(one, tied, mesh.rules), one.shape) for one in tensors)
    return [mesh.shard_shape(spec, one.shape) for spec, one in zip(specs, tensors, strict=True)]


def per_device(shape: Shape, mesh: Mesh) -> Shape:
    """The model as the products of one device see it: its part of the heads, the MLP's columns and the vocabulary."""
    if mesh.model == 1:
        return shape
    parts = mesh.model
    linears = tuple(
        replace(one, inputs=one.inputs // parts)
        if one.path.rpartition(".")[2] in ROW
        else replace(one, outputs=one.outputs // parts)
        for one in shape.linears
    )
    return replace(
        shape, linears=linears, heads=shape.heads // parts, kv_heads=max(1, shape.kv_heads // parts),
        intermediate=shape.intermediate // parts, vocabulary=-(-shape.vocabulary // parts),
    )  # fmt: skip


class MeshActivationModel(PeakActivationModel):
    """The terms of the peak of one device of a mesh."""

    def __init__(self, config: TrainConfig, shape: Shape, mesh: Mesh, chip: Chip | None = None) -> None:
        optim = replace(config.optim, scan_layers="on")
        super().__init__(replace(config, optim=optim), per_device(shape, mesh), mesh.batch_shards, chip)
        self.mesh, self.tensors = mesh, model_tensors(shape, config)
        self.shards = shards(self.tensors, mesh, shape.tied)
        pairs = [pair for pair in zip(self.tensors, self.shards, strict=True) if pair[0].trained]
        self.matrices = {one.name: part for one, part in pairs if len(one.shape) - one.stacked > 1}
        self.vectors = [part for one, part in pairs if one.name not in self.matrices]
        self.groups = [[part] for part in self.matrices.values()]
        if self.vectors:
            self.groups.insert(0, self.vectors)

    def arguments(self) -> dict[str, int]:
        """The buffers before the step: shards of weights, adapters, moments, average and batch."""
        lora, optim = self.config.lora, self.config.optim
        every = list(zip(self.tensors, self.shards, strict=True))
        state = sum(map(self.group_bytes, self.groups))
        moments = 2 * state if optim.optimizer == "adamw" else self._factored()
        rows = sum(padded((self.rows, self.length), one) for one in (8, 8, 8, 4))
        adapters = sum(padded(part, 4, free=True) for one, part in every if lora.r and one.trained)
        return {
            "base_weights": sum(padded(part, one.size, free=True) for one, part in every) - adapters,
            "adapters": adapters, "optimizer": moments,
            "teacher_weights": self._teacher(), "objective": self.objective_state(),
            "ema": state if optim.ema_decay else 0, "batch": rows * self.passes,
        }  # fmt: skip

    def _teacher(self) -> int:
        """The shards of a teacher's weights."""
        shape, model = teacher_shape(self.config), self.config.teacher
        if shape is None or model is None:
            return 0
        tensors = model_tensors(shape, replace(self.config, model=model, lora=LoraConfig()))
        pairs = zip(tensors, shards(tensors, self.mesh, shape.tied), strict=True)
        return sum(padded(part, one.size, free=True) for one, part in pairs if not one.trained)

    def _factored(self) -> int:
        """Adafactor's numbers of rows and columns, which each device holds whole."""
        found = 0
        for one in self.tensors:
            if one.name in self.matrices:
                found += padded((math.prod(one.shape[:-1]),), 4) + padded((math.prod(one.shape) // one.shape[-2],), 4)
        return found + padded((sum(map(math.prod, self.vectors)),), 4)

    def group_bytes(self, group: Sequence[tuple[int, ...]]) -> int:
        """Bytes of the fp32 tensor in which a group is updated: a matrix's shard, or the vector of all vectors."""
        return padded(group[0], 4, free=True) if len(group) == 1 else padded((sum(map(math.prod, group)),), 4)

    # ------------------------------------------------------------------------------------------ terms in shards

    def gradients(self) -> float:
        """Gradients in fp32, in shards."""
        return 4.0 * (sum(map(math.prod, self.matrices.values())) + sum(map(math.prod, self.vectors)))

    def layer_gradients(self, module: str = "") -> float:
        """The stacks of gradients that the backward loop fills, or those of a module, in shards."""
        return 4.0 * sum(math.prod(part) for name, part in self.matrices.items() if f".layers.0.{module}" in name)

    def head_gradient(self) -> float:
        """The output layer's gradient, in shards, in full fine-tuning."""
        return 4.0 * sum(
            math.prod(part)
            for name, part in self.matrices.items()
            if "lm_head" in name or (self.shape.tied and "embed_tokens" in name)
        )

    def copies(self) -> float:
        """Copies of the trained stacks in bf16, in shards: the compiler casts them before the loop.

        AdamW's update of an embedding that is not tied is computed in shards of rows instead of columns: parameter,
        gradient and both moments exist in both.
        """
        stacks = 2.0 * sum(math.prod(part) for name, part in self.matrices.items() if ".layers." in name)
        if self.shape.tied or self.config.optim.optimizer != "adamw":
            return stacks
        return stacks + 16.0 * sum(math.prod(part) for name, part in self.matrices.items() if "embed_tokens" in name)

    def table(self) -> float:
        """None: each device looks up its columns of the embedding."""
        return 0.0

    def updates(self) -> Iterator[tuple[float, float]]:
        """The moments of the update: bytes of the gradients, and of its results before they are copied."""
        largest = 4.0 * max(map(math.prod, self.matrices.values()), default=0)
        yield self.gradients(), largest * (1.0 if self.config.optim.optimizer == "adafactor" else 3.0)

    def loss(self) -> tuple[float, float]:
        """The loss: logits of one chunk, in parts of the vocabulary, and the hidden states of all tokens of a chunk."""
        chunk, shape, shards = min(self.config.optim.loss_chunk, self.tokens), self.shape, self.mesh.fsdp
        copied = padded((-(-shape.vocabulary // shards), shape.hidden), 2) if self.whole or self.compute == 4 else 0
        gathered = padded((chunk * shards, shape.hidden), self.compute)
        return self.in_hbm(padded((chunk, shape.vocabulary), self.compute)), self.hidden(3) + copied + gathered

    def teacher(self) -> tuple[float, float]:
        """As without a mesh; a teacher's logits of more tokens than the student knows are cut into a second array."""
        (logits, states), shape = super().teacher(), teacher_shape(self.config)
        cut = shape is not None and shape.vocabulary != self.shape.vocabulary
        return logits * (1 + cut), states

    def at_mlp(self) -> tuple[float, float]:
        """The recomputed layer during the backward pass of its MLP: as without a mesh, with gathered weights.

        The MLP's arrays are in HBM, as the vector memory holds the gathered weights. Of all weights there are the
        gradients of the MLP in bf16 before they are reduced.
        """
        _, attention = super().at_mlp()
        layer = self.states(self.at_hand + self.block - 1) + self.slices() + WIDE * self.wide(self.tile)
        return layer + self.whole * 2.0 * self._parameters("mlp"), attention

    def slices(self) -> float:
        """The weights of a layer, gathered over fsdp, and q, k and v of the next one, if they are frozen floats.

        Those of int4 are unpacked to bf16 in halves, with their steps and offsets; see `INT4_MATRICES`.
        """
        dtype = "bf16" if self.whole else self.config.model.base_dtype
        if dtype == "int4":
            largest = [max(one.parameters for one in self.shape.linears if one.path.startswith(part))
                       for part in ("mlp", "self_attn")]  # fmt: skip
            return sum(count * size for count, size in zip(INT4_MATRICES, largest, strict=True))
        early = () if self.whole or dtype == "int8" else [f"self_attn.{one}" for one in FIRST]
        return sum(map(self._parameters, ("", *early))) * {"int8": 1.0, "bf16": 2.0, "fp32": 4.0}[dtype]

    def _parameters(self, module: str) -> float:
        return sum(one.parameters for one in self.shape.linears if one.path.startswith(module))
