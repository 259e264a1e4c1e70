"""Derives the temporaries of a training step on a TPU: which tensors are alive at each moment, and their bytes.

Letters: T = B S tokens (batch size, length) in a pass, H hidden size, V vocabulary, L layers, P trained parameters.
What one layer needs is traced from the model itself (`meta_model`); gradients, copies and saved inputs are counted.
The lifetimes were read from libtpu 0.0.21; tests/recorded_memory.json has the compiler's figures, to which the
constants are fitted. On a mesh the temporaries are those of one device, with its rows.

The compiler reports more temporaries than a step needs, and the planner decides by the reported figure whether a step
fits, so this module predicts that. Let "heap" be the most bytes that are alive at one moment, and "seen" the most that
the compiler counts as alive. It does not count a buffer that a loop receives and changes (saved inputs of layers,
gradients) before the iteration that writes it, nor after the loop. It reports heap + fragmentation = 2 heap - seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tpu_kit.config.loader import TrainConfig, batch_arithmetic
from tpu_kit.config.mesh import Mesh
from tpu_kit.model.families.input_work import inputs_of
from tpu_kit.model.loop.loop_structure import ALONE
from tpu_kit.model.shape import Alive, Experts, Layer, Shape, most
from tpu_kit.model.shape_cache import shape_of
from tpu_kit.model.sharding.sharding_rules import Tensor
from tpu_kit.planning.memory.argument_memory import (
    LANES,
    is_matrix,
    item_bytes,
    model_tensors,
    padded,
    shards,
)
from tpu_kit.xla.splash_blocks import WHOLE, block_tokens, is_fused, query_block

if TYPE_CHECKING:
    from tpu_kit.training.objectives import Frozen, Objective

MORE_WORK, MOST_MORE = 0.3, 2**28
"""Bytes in HBM beyond each traced byte of a layer, and the most of them: a layer of 32,768 tokens takes no more."""
UNPACKED = {"int8": 0.7, "int4": 1.5}
"""Bytes for each weight of a layer that is cut out of a stack and converted."""
GATHERED = {"int8": 1.0, "int4": 2.75, "bf16": 2.5, "fp32": 5.0}
"""As much on a mesh, where the weights of a layer, and some of the next one, are gathered over fsdp."""
FEW_CHUNKS = 2
"""Chunks of a loss up to which the gradient of a sharded output layer is not accumulated in a loop."""
CHUNK_STATES, TOKENS_OF_CHUNK = 3, 64
"""Arrays in fp32 of the states between the chunks of linear attention, beyond those in the trace."""
VECTOR_MEMORY = 80 * 2**20
"""Bytes that the chip's vector memory, 128 MiB of v5e and v6e, holds instead of HBM."""


def objective_beside(config: TrainConfig) -> Objective | None:
    """Returns the objective, which says what it adds; None for the plain loss, so that a plan need not load torch."""
    if config.plain_loss:
        return None
    from tpu_kit.training.objectives import objective_of

    return objective_of(config)


@dataclass(frozen=True)
class Moment:
    """The bytes alive at one moment, by part; of them `carried` that a loop receives or fills, and so are not seen."""

    name: str
    parts: dict[str, float]
    carried: float

    @property
    def heap(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


class PeakActivationModel:
    """The terms of the peak, one method each; `num_replicas` is the number of shards of the batch."""

    def __init__(self, config: TrainConfig, shape: Shape, num_replicas: int, mesh: Mesh | None = None) -> None:
        if mesh:
            config, num_replicas = replace(config, optim=replace(config.optim, scan_layers="on")), mesh.batch_shards
        plan = batch_arithmetic(config, num_replicas)
        self.config, self.shape, self.mesh = config, shape, mesh
        self.batches, self.parts, self.context = num_replicas, mesh.model if mesh else 1, mesh.context if mesh else 1
        self.passes, self.rows, self.length = plan.gradient_accumulation, plan.batch_size, config.data.max_length
        self.tokens = self.rows * self.length // self.context
        self.whole = not config.lora.r
        self.dtype = "bf16" if self.whole else config.model.base_dtype
        self.compute = 4 if config.model.base_dtype == "fp32" else 2
        self.stream = 4 if self.whole else self.compute
        optim = config.optim
        self.again, self.keeps = optim.remat != "none", optim.remat == "outputs"
        self.scanned = self.again and optim.scan_layers != "off"
        self.sparse = optim.remat == "blocks"
        self.loops = shape.blocks if self.sparse else shape.loops
        self.kernel = "splash" if config.model.attention == "auto" else config.model.attention
        tiles = self.scanned and not self.keeps
        self.tile = min(optim.mlp_tile or self.tokens, self.tokens) if tiles else self.tokens
        self.tiles = -(-self.tokens // self.tile)
        self.tiled = self.tiles > 1
        self.block = max(len(loop.neighbours) for loop in self.loops) if self.scanned else 1
        self.tensors = model_tensors(shape, config, scanned=self.scanned)
        self.sharded = list(zip(self.tensors, shards(self.tensors, mesh, shape.embedding), strict=True))
        self.trained = sum(math.prod(one.shape) for one in self.tensors if one.trained)
        self.groups = self.update_groups()
        self.objective = objective_beside(config)
        self.inputs = inputs_of(config)
        self.added = self.objective.cost(self.tokens, shape.hidden) if self.objective else None
        self.others = self.added.frozen if self.added else ()

    def of_trained(self) -> list[tuple[Tensor, tuple[int, ...]]]:
        """The trained tensors, and the parts of them that a device has."""
        return [pair for pair in self.sharded if pair[0].trained]

    def update_groups(self) -> list[list[tuple[int, ...]]]:
        """Groups the trained tensors as they are updated: the small ones together, each large one alone.

        On a mesh all vectors are together, and the shard of each matrix is alone.
        """
        pairs = [(is_matrix(one) if self.mesh else math.prod(part) >= ALONE, part) for one, part in self.of_trained()]
        small, large = [part for alone, part in pairs if not alone], [[part] for alone, part in pairs if alone]
        return [small, *large] if small else large

    def reported(self, *, update: bool | None = None) -> tuple[Moment, float]:
        """The moment of the peak, and the bytes reported beyond it; of one of two programs, whether of the `update`."""
        moments = [one for one in self.moments() if update is None or update == (one.name == "update")]
        peak = max(moments, key=lambda moment: moment.heap)
        if not self.scanned and peak.name != "update":
            return peak, 0.0
        seen = max(moment.heap - moment.carried for moment in moments)
        return peak, peak.heap - seen

    def moments(self) -> Iterator[Moment]:
        """The moments that can be the peak."""
        saved, gradients, head = self.saved(), self.gradients(), self.head_gradient()
        lasting = {"weight_copies": self.copies(), "objective_saved": self.objective_saved(),
                   "layer_inputs": self.made_outside(4 + 2 * self.stream)}  # fmt: skip
        if self.objective and not self.objective.trains_model:
            return (yield from self.forward_moments(lasting))
        lasting["saved_activations"] = saved
        if self.kernel == "sdpa" and self.again and self.length <= WHOLE:
            lasting["mask"] = self.scores()  # a bias of the scores' shape, made once for all layers
        yield Moment("start", lasting, 0)  # the stack that the first loop fills is allocated before it
        if self.inputs:
            made = self.inputs.work_bytes(self.rows, self.compute)
            yield Moment(self.inputs.name, {"layer_inputs": lasting["layer_inputs"], self.inputs.name: made}, 0)
        inner = self.inner()
        if inner and not self.sparse:  # what such a loop saves is copied when it has ended
            stacks = saved + inner * max(map(self._saved_by, self.shape.kinds))
            layer = max(self.work(kind.forward, self.tile) for kind in self.shape.kinds)
            yield Moment("forward", lasting | {"saved_activations": stacks, "layer": layer}, stacks)
        before = gradients if self.passes > 1 else 0.0
        parts = {"loss_chunk": self.loss() + head, "gradients": before}
        parts |= {other.name: self.frozen(other) for other in self.others}
        yield Moment("loss", lasting | parts, saved + self.hidden() + head + before)
        filled = self.layer_gradients() * (1 + inner / self.shape.layers) + head
        carried = saved + self.hidden(1 + self.tiled) + filled + before
        for kind in self.shape.kinds:
            yield Moment("backward", {**lasting, "layer": self.layer(kind), "gradients": filled + before}, carried)
        done = {**lasting, "layer": self.hidden(), "gradients": filled + before}
        yield Moment("backward", done, saved + head + before)
        flat = sum(self.group_bytes(group) for group in self.groups if len(group) > 1)
        unseen = self.scanned * (self.layer_gradients() + (0.0 if self.shape.tied else head))
        parts = {"gradients": gradients, "all_reduce": flat, "update": self.update()}
        yield Moment("update", parts, min(gradients, unseen))

    def forward_moments(self, lasting: dict[str, float]) -> Iterator[Moment]:
        """The moments of a model that is not trained: those of its layers and the loss."""
        saved = lasting.pop("objective_saved")
        for kind in self.shape.kinds:
            yield Moment("forward", {**lasting, "layer": self.work(kind.forward, self.tile) + self.weights(kind)}, 0)
        yield Moment("loss", {**lasting, "objective_saved": saved / 2, "loss_chunk": self.loss()}, self.hidden())

    def group_bytes(self, group: Sequence[tuple[int, ...]]) -> int:
        """Bytes of the fp32 tensor in which a group is updated: a large one in its own shape, or a vector of all."""
        return padded(group[0], 4, free=True) if len(group) == 1 else padded((sum(map(math.prod, group)),), 4)

    def hidden(self, count: float = 1) -> float:
        """`count` arrays of (T, H): in the compute dtype, or in fp32 in full fine-tuning."""
        return count * padded((self.tokens, self.shape.hidden), self.stream, free=True)

    def scores(self) -> float:
        """The largest array of sdpa's scores, (B, n, Q, S) in the compute dtype, for the Q queries of a block."""
        heads = max(kind.heads for kind in self.shape.kinds)
        return padded((self.rows * heads, query_block(self.length), self.length), self.compute) / self.context

    def saved(self) -> float:
        """Saved activations of one pass: the input of every layer, L T H c (`layer_scan`, or torch_xla's checkpoint).

        With remat=none they are all that the backward pass of a layer reads, with remat=blocks the inputs of blocks.
        """
        if self.sparse:
            return self.hidden(sum(loop.turns for loop in self.loops))
        return sum(count * self._saved_by(kind) for kind, count in self.shape.counted)

    def inner(self) -> int:
        """The most layers of a loop over equal neighbours in a block, which has own stacks of inputs and gradients."""
        counts = (count for loop in self.loops for count in loop.neighbours) if self.scanned else ()
        return max((count for count in counts if count > 1), default=0)

    def _saved_by(self, kind: Layer) -> float:
        if self.again:
            return self.hidden() + (self.results(kind) if self.keeps else 0.0)
        scores = self.kernel == "sdpa" and self.length <= WHOLE  # of a longer row they are computed again
        return kind.saved * self.tokens * self.compute / 2 + (self.scores() if scores else 0.0)

    def results(self, kind: Layer) -> float:
        """The results of a layer that remat=outputs keeps: of its linear layers, T times their outputs, and attention.

        The gradient needs the result of the MLP only if a norm follows. Splash keeps the log of sums, 4 T n.
        """
        last = () if kind.norm_follows else kind.mlp_linears[-1:]
        outputs = [one.outputs for one in kind.linears if one not in last] + [kind.heads * kind.head_dim]
        kept = sum(padded((self.tokens, one), self.compute, free=True) for one in outputs)
        return kept + 4.0 * self.tokens * kind.heads

    def copies(self) -> float:
        """Copies of stacks that are made before the loop.

        Autocast copies trained weights, 2 P in bf16. The compiler copies fp32 weights, as a TPU's products take bf16.
        On a mesh, AdamW's update of an embedding that is not tied is computed in shards of rows instead of columns:
        parameter, gradient and both moments exist in both.
        """
        table = 0.0
        if self.mesh and not self.shape.tied and self.config.optim.optimizer == "adamw":
            table = 16.0 * sum(math.prod(part) for one, part in self.of_trained() if "embed_tokens" in one.name)
        every, looked_up = self.whole or self.compute == 4, f".{self.shape.ends[0]}."
        stacks = 2.0 * sum(
            math.prod(part) for one, part in self.sharded
            if (every and self.in_layers(one))
            or (one.trained and not self.whole and (self.shape.tied or looked_up not in one.name))
        )  # fmt: skip
        return stacks * (self.scanned or not every) + table

    def in_layers(self, tensor: Tensor) -> bool:
        """Whether a tensor belongs to the list of layers."""
        return f"{self.shape.layers_path}." in tensor.name

    def update(self) -> float:
        """The results of the largest stack, which are copied into the arguments, with AdamW also both moments."""
        large = [group for group in self.groups if len(group) == 1 and len(group[0]) == 3]
        return max(map(self.group_bytes, large), default=0) * (3.0 if self.config.optim.optimizer == "adamw" else 1.0)

    def gradients(self) -> float:
        """Gradients in fp32, 4 P, or their shards."""
        return 4.0 * sum(math.prod(part) for _, part in self.of_trained())

    def layer_gradients(self) -> float:
        """The stacks of gradients that the backward loop fills: without embedding and output."""
        stacks = 4.0 * sum(math.prod(part) for one, part in self.of_trained() if self.in_layers(one))
        return stacks + self.made_outside(self.stream)

    def made_outside(self, size: float) -> float:
        """Arrays of (T, N) for the N outputs of the linear layers in no layer, of which each layer reads its part.

        Before the loops there are the result, in fp32 for a norm, the sum with a table's rows, and its parts in stacks;
        the backward loops fill stacks of gradients.
        """
        return size * self.tokens * sum(one.outputs for one in self.shape.linears_outside)

    def head_gradient(self) -> float:
        """The output layer's gradient in fp32, alive from the loss on, where it is trained whole.

        On a mesh it is a device's shard, which the loop over the chunks of the loss accumulates, but for one or two; of
        an output layer that is trained beside adapters it was not compared.
        """
        if not (self.whole or self.of_head("modules_to_save")):
            return 0.0
        if self.mesh is None:
            return padded((self.shape.vocabulary, self.shape.hidden), 4, free=True)
        path, chunks = (
            self.shape.ends[not self.shape.tied],
            self.tokens / min(self.config.optim.loss_chunk, self.tokens),
        )
        looped = self.whole and chunks > FEW_CHUNKS
        return looped * 4.0 * sum(math.prod(part) for one, part in self.of_trained() if path in one.name)

    def of_head(self, *kinds: str) -> list[tuple[Tensor, tuple[int, ...]]]:
        """The trained tensors, and their parts, that PEFT's wrappers of these kinds add to the output layer."""
        path = self.shape.ends[not self.shape.tied]
        names = [f".{path}.{kind}." for kind in kinds]
        return [pair for pair in self.of_trained() if any(name in pair[0].name for name in names)]

    # ---------------------------------------------------------------------------------------- tensors of one moment

    def loss(self) -> float:
        """The loss: logits of one chunk in the compute dtype, and the hidden states and gradients of all, 3 T H c.

        An adapter of the output layer adds a factor (V, R), of trained rows with a one for each token. On a mesh the
        vocabulary is in parts, and a chunk has the states of all devices.
        """
        chunk, shape = min(self.config.optim.loss_chunk, self.tokens), self.shape
        gathered = padded((chunk * self.mesh.weight_shards, shape.hidden), self.stream) if self.mesh else 0
        logits = padded((chunk, -(-shape.vocabulary // self.parts)), self.compute)
        rows = [part[0] for _, part in self.of_head("token_adapter")]
        adapters = [part for one, part in self.of_trained() if f".{shape.ends[1]}.lora_B." in one.name]
        factors = [(shape.vocabulary // self.parts, count) for count in rows] + adapters
        low = sum(padded(sizes, self.compute, free=True) for sizes in factors)
        return self.hidden(3) + gathered + low + (logits if logits > VECTOR_MEMORY else 0)

    def frozen(self, other: Frozen) -> float:
        """The logits of one chunk of another model, and its states that are kept for the loss."""
        shape, size = shape_of(other.model), item_bytes(other.model.base_dtype)
        chunk = min(self.config.optim.loss_chunk, self.tokens)
        # On a mesh, logits of more tokens than the model knows are cut into a second array.
        twice = 1 + bool(self.mesh and shape.vocabulary != self.shape.vocabulary)
        states = other.kept * padded((self.tokens, shape.hidden), size, free=True)
        return float(twice * padded((chunk, shape.vocabulary), size) + states)

    def objective_saved(self) -> float:
        """What the objective saves for the backward pass, beside the likelihood of the labels."""
        return float(sum(padded(shape, 4) for shape in self.added.saved)) if self.added else 0.0

    def layer(self, kind: Layer) -> float:
        """A recomputed layer during its backward pass, with the input of each layer of its block, cut out of a stack.

        With remat=blocks these inputs were recomputed, also of equal neighbours.
        Full fine-tuning adds the MLP's gradients, before they go into their stacks: in fp32, or in bf16 to be reduced.
        """
        mlp = self.whole * (2.0 if self.mesh else 4.0) * sum(one.parameters for one in kind.mlp_linears)
        inputs = max(loop.period for loop in self.loops) if self.sparse else self.block - 1
        more = self.hidden(inputs) + self.weights(kind) + mlp
        more += CHUNK_STATES * 4.0 * kind.state * self.tokens / TOKENS_OF_CHUNK
        if self.kernel == "sdpa":
            return self.work(kind.backward, self.tile) + self.scores() + more
        if not self.keeps and not self.mesh:  # the log of sums, over all lanes
            more += padded((self.rows * kind.heads, self.length, LANES), 4)
        work = max(self.work(kind.backward, self.tile), self.at_attention(kind))
        if kind.norm_follows:  # its input and the gradient of its result, in fp32
            work += 2 * 4.0 * self.tokens * self.shape.hidden / self.parts
        # Of a working set that would fit into vector memory nothing was seen to lie there; of twice as much, the half.
        return work - min(VECTOR_MEMORY, max(0.0, work - VECTOR_MEMORY)) + more

    def at_attention(self, kind: Layer) -> float:
        """The backward pass of attention, where the fused kernel makes gradients of the queries for blocks of keys.

        It counts as that of layers without windows, which a shape does not have: one with a narrow window is unfused.
        """
        parts = self.parts * self.context
        query = padded((self.rows * kind.heads, self.length, kind.head_dim), self.compute) / parts
        blocks = self.length // block_tokens(self.length, kind.head_dim)
        fused = is_fused(self.rows, kind.heads / parts, self.length, kind.head_dim, self.compute)
        return self.work(kind.backward, 0) + fused * (blocks - 1) * query

    def work(self, alive: Alive, tile: int) -> float:
        """Bytes of a layer's own tensors, some of them for one tile of the MLP."""
        traced = most(alive, self.tokens, tile) * self.compute / 2 / self.parts
        return traced + min(MORE_WORK * traced, MOST_MORE)

    def weights(self, kind: Layer) -> float:
        """The weights of a layer that are cut out of their stacks; on a mesh all, gathered over fsdp."""
        size = (GATHERED if self.mesh else UNPACKED).get(self.dtype, 0.0)
        return size * sum(one.parameters for one in kind.linears) / self.parts + sum(map(self.experts, kind.experts))

    def experts(self, mixture: Experts) -> float:
        """The rows of a mixture of experts in its backward pass, and the stored weights that are cut out of stacks.

        Of the R rows there are inputs and their gradient, 2 R H c, and gates with ups and their gradient, 2 R O c. On a
        mesh the weights in int4 are those of all layers of a turn, which begins with their gathers.
        """
        first = mixture.linears[0]
        rows = 2.0 * self.compute * mixture.rows(self.tokens) * (first.inputs + first.outputs)
        int4 = (0.5 + 4 / self.config.model.quant_group) * (self.block if self.mesh else 1)
        return rows + {"int8": 1.0, "int4": int4}.get(self.dtype, self.compute) * mixture.count * mixture.weights
