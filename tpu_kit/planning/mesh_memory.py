"""The memory of a training step that is sharded over a mesh: the shard of each tensor, and the temporaries of a device.

The temporaries are those of `activation_memory` for the device's rows and its part of the model axis, with the weights
of a layer gathered over fsdp, and gradients in shards.
"""

from __future__ import annotations

from dataclasses import replace

from tpu_kit.config.loader import TrainConfig
from tpu_kit.config.mesh import Mesh
from tpu_kit.hardware.chips import Chip
from tpu_kit.models.architecture import FEW_TILES, Experts, Layer, Linear, Shape, scale_groups
from tpu_kit.models.sharding_rules import FIRST, is_column
from tpu_kit.planning.activation_memory import PeakActivationModel, elements, largest

WIDE = 4
"""Arrays of (t, I) in HBM while a loop over tiles of t tokens runs the backward pass of an MLP."""
INT4_MATRICES = (9, 3)
"""Bytes for each weight of the largest matrix of the MLP and of attention, where a layer is gathered in int4."""


def per_device(shape: Shape, mesh: Mesh) -> Shape:
    """The model as the products of one device see it: its part of the heads, the MLP's columns and the vocabulary."""
    parts = mesh.model
    if parts == 1:
        return shape

    def part(one: Linear) -> Linear:
        side = "outputs" if is_column(one.path, one.outputs, one.inputs, shape.hidden) else "inputs"
        return replace(one, **{side: getattr(one, side) // parts})

    kinds = tuple(
        replace(kind, linears=tuple(map(part, kind.linears)), heads=kind.heads // parts,
                kv_heads=max(1, kind.kv_heads // parts))
        for kind in shape.kinds
    )  # fmt: skip
    return replace(shape, kinds=kinds, vocabulary=-(-shape.vocabulary // parts))


class MeshActivationModel(PeakActivationModel):
    """The terms of the peak of one device of a mesh."""

    def __init__(self, config: TrainConfig, shape: Shape, mesh: Mesh, chip: Chip | None = None) -> None:
        looped = replace(config, optim=replace(config.optim, scan_layers="on"))
        super().__init__(looped, per_device(shape, mesh), mesh.batch_shards, chip, mesh, shape)

    def at_mlp(self, kind: Layer) -> tuple[float, float]:
        """The recomputed layer during the backward pass of its MLP: as without a mesh, with gathered weights.

        Attention's output is in two layouts, and the sums of its kernel are dense. Of all weights there are the
        gradients of the MLP in bf16 before they are reduced.
        """
        layer = self.states(self.at_hand + self.block - 1) + self.slices(kind) + self.wides(kind) + self.experts(kind)
        attention = self.kept(kind) + self.output(kind) + self.normed(kind) + self.chunk_states(kind)
        return layer + self.whole * 2.0 * elements(kind.mlp_linears), attention

    def wides(self, kind: Layer) -> float:
        """The MLP's arrays in HBM: its gates, the gradient of their product, and what is made of them at once.

        These are four, and two in a pass of one row. Two lie in the vector memory where they fit; of an MLP without
        tiles, whose gathered weights are there, one that fits it alone. A loop over tiles keeps `WIDE`.
        """
        wide = self.wide(self.tile, kind)
        if not wide or self.tiles > FEW_TILES:
            return WIDE * wide
        held, made = min(2, self.on_chip // wide), 2 * kind.gates + 1
        if not self.tiled:
            held, made = held % 2, made - 2 * (self.rows == 1)
        return (made - held) * wide

    def read_at_once(self, kind: Layer) -> float:
        """The gates of an MLP without tiles, if each is a product of its own, and the gradient of their product."""
        own = len(kind.mlp_linears) == kind.gates and not self.tiled and self.rows > 1
        return own * kind.gates * self.wide(self.tokens, kind)

    def expert_weights(self, mixture: Experts) -> float:
        """As without a mesh; in int4 with scales, and of all layers of a turn, which begins with their gathers."""
        group, weights = self.config.model.quant_group, super().expert_weights(mixture)
        if self.whole or self.config.model.base_dtype != "int4":
            return weights
        scales = sum(scale_groups(one.inputs, group) * one.outputs for one in mixture.linears)
        return self.block * (weights + 4.0 * mixture.count * scales)

    def slices(self, kind: Layer) -> float:
        """The weights of a layer, gathered over fsdp, and q, k and v of the next one, if they are frozen floats.

        Those of int4 are unpacked to bf16 in halves, with their steps and offsets; see `INT4_MATRICES`. Without tiles,
        the weights of the MLP's last product, and q, k and v, are there no more.
        """
        dtype = "bf16" if self.whole else self.config.model.base_dtype
        if dtype == "int4":
            sizes = largest(kind.mlp_linears), largest(kind.attention_linears)
            return sum(count * size for count, size in zip(INT4_MATRICES, sizes, strict=True))
        linears = elements(kind.linears)
        if not self.tiled:
            linears -= elements(kind.mlp_linears[-1:])
        elif not self.whole and dtype != "int8":
            linears += elements([one for one in kind.linears if one.path.rpartition(".")[2] in FIRST])
        return linears * {"int8": 1.0, "bf16": 2.0, "fp32": 4.0}[dtype]
