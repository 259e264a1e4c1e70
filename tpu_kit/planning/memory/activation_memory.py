"""Derives the temporaries of a training step on a TPU: the tensors alive at each moment, and their bytes.

Letters: T = B S tokens (batch size, length) in a pass, H hidden size, V vocabulary, L layers, P trained parameters, c
bytes of the compute dtype. The tensors of a layer are traced from the model (`meta_model`); gradients, copies and saved
inputs are counted. Lifetimes were read from programs of libtpu 0.0.21. The constants are fitted to the compiler's
figures in tests/recorded_memory.json. On a mesh, the temporaries are for one device and its rows.

The compiler reports more temporaries than a step needs, and the planner decides by the reported figure, so this module
predicts that figure. Let "heap" be the most bytes alive at one moment, and "seen" the most bytes that the compiler
counts as alive. It does not count a buffer that a loop receives and changes (saved inputs of layers, gradients) before
the iteration that writes it, nor after the loop. It reports heap + fragmentation = 2 heap - seen.
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
from tpu_kit.model.shape import Alive, Experts, Layer, Shape
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
"""Additional bytes in HBM for each traced byte of a layer, and their upper limit outside of an MLP's tile, read at
32,768 tokens."""
UNPACKED = {"int8": 0.7, "int4": 1.5}
"""Bytes for each weight of a layer that is sliced from a stack and converted."""
GATHERED = {"int8": 1.0, "int4": 2.75, "bf16": 2.5, "fp32": 5.0}
"""The same on a mesh, for weights of a layer, and some of the next layer, that are gathered over fsdp."""
FEW_CHUNKS = 2
"""Most chunks of a loss for which the gradient of a sharded output layer is not accumulated in a loop."""
CHUNK_STATES, TOKENS_OF_CHUNK = 3, 64
"""fp32 arrays of the states between chunks of linear attention that the trace lacks; tokens of a chunk."""
VECTOR_MEMORY = 80 * 2**20
"""Bytes that lie in the chip's vector memory (128 MiB on v5e and v6e) instead of HBM."""


def objective_beside(config: TrainConfig) -> Objective | None:
    """Returns the objective, which states its cost; None for the plain loss, so that a plan need not load torch.

    Raises ValueError as `objective_of`.
    """
    if config.plain_loss:
        return None
    from tpu_kit.training.objectives import objective_of

    return objective_of(config)


@dataclass(frozen=True)
class Moment:
    """The bytes alive at one moment, by part; `carried` are bytes of these that loops receive or fill (not "seen")."""

    name: str
    parts: dict[str, float]
    carried: float

    @property
    def heap(self) -> float:
        """Bytes of all parts together."""
        return sum(self.parts.values())


class PeakActivationModel:
    """Computes the terms of the peak on one device; `num_replicas` is ignored with a mesh."""

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
        """Returns the trained tensors, with the shapes of their shards on a device."""
        return [pair for pair in self.sharded if pair[0].trained]

    def update_groups(self) -> list[list[tuple[int, ...]]]:
        """Groups the shapes of trained tensors for the update: all small tensors first, then each large tensor alone.

        On a mesh all vectors are together, and each shard of a matrix is alone.
        """
        pairs = [(is_matrix(one) if self.mesh else math.prod(part) >= ALONE, part) for one, part in self.of_trained()]
        small, large = [part for alone, part in pairs if not alone], [[part] for alone, part in pairs if alone]
        return [small, *large] if small else large

    def reported(self, *, update: bool | None = None) -> tuple[Moment, float]:
        """Returns the peak moment, and the bytes that the compiler reports beyond it.

        `update` is None for all moments, True for the update's moment alone, False for all others.
        """
        moments = [one for one in self.moments() if update is None or update == (one.name == "update")]
        peak = max(moments, key=lambda moment: moment.heap)
        if not self.scanned and peak.name != "update":
            return peak, 0.0
        seen = max(moment.heap - moment.carried for moment in moments)
        return peak, peak.heap - seen

    def moments(self) -> Iterator[Moment]:
        """Yields the moments that can be the peak, in order; `Moment.parts` are temporaries only."""
        saved, gradients, head = self.saved(), self.gradients(), self.head_gradient()
        lasting = {"weight_copies": self.copies(), "objective_saved": self.objective_saved(),
                   "layer_inputs": self.made_outside(4 + 2 * self.stream)}  # fmt: skip
        if self.objective and not self.objective.trains_model:
            return (yield from self.forward_moments(lasting))
        lasting["saved_activations"] = saved
        if self.kernel == "sdpa" and self.again and self.length <= WHOLE:
            lasting["mask"] = self.scores()  # a bias with the scores' shape, made once for all layers
        # A loop's result stack is allocated before it; stacks of earlier loops are not "seen".
        yield Moment("start", lasting | {"saved_activations": self.largest_stack()}, 0)
        if self.inputs:
            made = self.inputs.work_bytes(self.rows, self.compute)
            yield Moment(self.inputs.name, {"layer_inputs": lasting["layer_inputs"], self.inputs.name: made}, 0)
        inner = self.inner()
        if inner and not self.sparse:  # the stacks that such a loop saves are copied after it
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
        """Yields the moments of a model that is not trained: its layers and the loss."""
        saved = lasting.pop("objective_saved")
        for kind in self.shape.kinds:
            yield Moment("forward", {**lasting, "layer": self.work(kind.forward, self.tile) + self.weights(kind)}, 0)
        yield Moment("loss", {**lasting, "objective_saved": saved / 2, "loss_chunk": self.loss()}, self.hidden())

    def group_bytes(self, group: Sequence[tuple[int, ...]]) -> int:
        """Returns the bytes of a group's fp32 tensor: a large tensor in its own shape, or one vector of all."""
        return padded(group[0], 4, free=True) if len(group) == 1 else padded((sum(map(math.prod, group)),), 4)

    def hidden(self, count: float = 1) -> float:
        """Returns the bytes of `count` arrays of (T, H) in the compute dtype; fp32 in full fine-tuning."""
        return count * padded((self.tokens, self.shape.hidden), self.stream, free=True)

    def scores(self) -> float:
        """Returns the bytes of sdpa's scores, (B, n, Q, S) in the compute dtype, for a block of Q queries."""
        heads = max(kind.heads for kind in self.shape.kinds)
        return padded((self.rows * heads, query_block(self.length), self.length), self.compute) / self.context

    def saved(self) -> float:
        """Returns the bytes of the saved activations of a pass: the input of every layer, L T H c.

        remat=none saves all tensors that a layer's backward pass reads, remat=outputs also `results`, remat=blocks only
        the inputs of blocks.
        """
        if self.sparse:
            return self.hidden(sum(loop.turns for loop in self.loops))
        return sum(count * self._saved_by(kind) for kind, count in self.shape.counted)

    def largest_stack(self) -> float:
        """Returns the largest part of `saved` that belongs to the layers of a single loop."""
        if self.sparse:
            return self.hidden(max(loop.turns for loop in self.loops))
        saved = [self._saved_by(self.shape.kinds[number]) for number in self.shape.order]
        return max(sum(saved[loop.start : loop.start + loop.turns * loop.period]) for loop in self.loops)

    def inner(self) -> int:
        """Returns the most layers of an inner loop over equal neighbours in a block, with its own stacks; 0 without."""
        counts = (count for loop in self.loops for count in loop.neighbours) if self.scanned else ()
        return max((count for count in counts if count > 1), default=0)

    def _saved_by(self, kind: Layer) -> float:
        """Returns the bytes that the forward pass of one layer saves for the backward pass."""
        if self.again:
            return self.hidden() + (self.results(kind) if self.keeps else 0.0)
        scores = self.kernel == "sdpa" and self.length <= WHOLE  # longer rows recompute them
        return kind.saved * self.tokens * self.compute / 2 + (self.scores() if scores else 0.0)

    def results(self, kind: Layer) -> float:
        """Returns the bytes that remat=outputs keeps of a layer: the results of linear layers and of attention.

        The gradient needs the result of the MLP only if a norm follows. Splash keeps the log-sum-exp, 4 T n.
        """
        last = () if kind.norm_follows else kind.mlp_linears[-1:]
        outputs = [one.outputs for one in kind.linears if one not in last] + [kind.heads * kind.head_dim]
        kept = sum(padded((self.tokens, one), self.compute, free=True) for one in outputs)
        return kept + 4.0 * self.tokens * kind.heads

    def copies(self) -> float:
        """Returns the bytes of copies of stacks that are made before the loop.

        Autocast copies trained weights, 2 P in bf16. The compiler copies fp32 weights to bf16 for a TPU's products.
        On a mesh, AdamW updates an untied embedding in shards of rows instead of columns: parameter, gradient and both
        moments exist twice.
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
        """Returns the bytes of the update of the largest stack of matrices; with AdamW also of its moments."""
        large = [group for group in self.groups if len(group) == 1 and len(group[0]) == 3]
        return max(map(self.group_bytes, large), default=0) * (3.0 if self.config.optim.optimizer == "adamw" else 1.0)

    def gradients(self) -> float:
        """Returns the bytes of the gradients in fp32, 4 P, or of their shards."""
        return 4.0 * sum(math.prod(part) for _, part in self.of_trained())

    def layer_gradients(self) -> float:
        """Returns the bytes of the gradient stacks that the backward loop fills, without embedding and output."""
        stacks = 4.0 * sum(math.prod(part) for one, part in self.of_trained() if self.in_layers(one))
        return stacks + self.made_outside(self.stream)

    def made_outside(self, size: float) -> float:
        """Returns the bytes of arrays (T, N), for the N outputs of linear layers outside the decoder's layers.

        Each layer reads its part. Before the loops exist the result (fp32 for a norm), its sum with an embedding, and
        its parts in stacks; the backward loops fill stacks of gradients. `size` is the bytes for each element.
        """
        return size * self.tokens * sum(one.outputs for one in self.shape.linears_outside)

    def head_gradient(self) -> float:
        """Returns the bytes of the output layer's fp32 gradient, alive from the loss on, if its matrix is trained.

        On a mesh it is a device's shard, accumulated by the loop over chunks of the loss if there are more than
        `FEW_CHUNKS`. An output layer trained beside adapters was not compared with the compiler.
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
        """Returns the trained tensors, with their shards, that PEFT's wrappers of `kinds` add to the output layer."""
        path = self.shape.ends[not self.shape.tied]
        names = [f".{path}.{kind}." for kind in kinds]
        return [pair for pair in self.of_trained() if any(name in pair[0].name for name in names)]

    # ---------------------------------------------------------------------------------------- tensors of one moment

    def loss(self) -> float:
        """Returns the bytes of the loss: logits of a chunk, and hidden states and gradients of all tokens, 3 T H c.

        An adapter of the output layer adds a factor (V, R); trained token rows add a one-hot factor. On a mesh the
        vocabulary is sharded, and a chunk gathers the states of all devices.
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
        """Returns the bytes of another model's logits for a chunk, and of its states that are kept for the loss."""
        shape, size = shape_of(other.model), item_bytes(other.model.base_dtype)
        chunk = min(self.config.optim.loss_chunk, self.tokens)
        # On a mesh, the logits of a vocabulary of another size are sliced into a second array.
        twice = 1 + bool(self.mesh and shape.vocabulary != self.shape.vocabulary)
        states = other.kept * padded((self.tokens, shape.hidden), size, free=True)
        return float(twice * padded((chunk, shape.vocabulary), size) + states)

    def objective_saved(self) -> float:
        """Returns the bytes that the objective saves for the backward pass, without the likelihood of the labels."""
        return float(sum(padded(shape, 4) for shape in self.added.saved)) if self.added else 0.0

    def layer(self, kind: Layer) -> float:
        """Returns the bytes of a recomputed layer in its backward pass, with the inputs of its block's other layers.

        The inputs are sliced from a stack; with remat=blocks they were recomputed. Full fine-tuning adds the MLP's
        gradients before they enter their stacks: in fp32, or on a mesh in bf16 for the reduction.
        """
        mlp = self.whole * (2.0 if self.mesh else 4.0) * sum(one.parameters for one in kind.mlp_linears)
        inputs = max(loop.period for loop in self.loops) if self.sparse else self.block - 1
        more = self.hidden(inputs) + self.weights(kind) + mlp
        more += CHUNK_STATES * 4.0 * kind.state * self.tokens / TOKENS_OF_CHUNK
        if self.kernel == "sdpa":
            return self.work(kind.backward, self.tile) + self.scores() + more
        if not self.keeps and not self.mesh:  # the log-sum-exp, padded to all lanes
            more += padded((self.rows * kind.heads, self.length, LANES), 4)
        work = max(self.work(kind.backward, self.tile), self.at_attention(kind))
        if kind.norm_follows:  # the norm's input and the gradient of its result, in fp32
            work += 2 * 4.0 * self.tokens * self.shape.hidden / self.parts
        # Vector memory holds no part of a working set that fits into it, and is full if the set is twice as large.
        return work - min(VECTOR_MEMORY, max(0.0, work - VECTOR_MEMORY)) + more

    def at_attention(self, kind: Layer) -> float:
        """Returns the bytes of attention's backward pass; the fused kernel writes query gradients per block of keys.

        A shape has no windows, so all layers count as layers without one; with a narrow window the kernel is not fused.
        """
        parts = self.parts * self.context
        query = padded((self.rows * kind.heads, self.length, kind.head_dim), self.compute) / parts
        blocks = self.length // block_tokens(self.length, kind.head_dim)
        fused = is_fused(self.rows, kind.heads / parts, self.length, kind.head_dim, self.compute)
        return self.work(kind.backward, 0) + fused * (blocks - 1) * query

    def work(self, alive: Alive, tile: int) -> float:
        """Returns the bytes of a layer's own tensors; some of them exist for `tile` tokens, one tile of the MLP."""
        scale = self.compute / 2 / self.parts
        outside, within = max(((out * self.tokens, inside * tile) for out, inside in alive), key=sum)
        more = min(MORE_WORK * outside * scale, MOST_MORE) + MORE_WORK * within * scale
        return (outside + within) * scale + more

    def weights(self, kind: Layer) -> float:
        """Returns the bytes of a layer's weights, sliced from their stacks; on a mesh all are gathered over fsdp."""
        size = (GATHERED if self.mesh else UNPACKED).get(self.dtype, 0.0)
        return size * sum(one.parameters for one in kind.linears) / self.parts + sum(map(self.experts, kind.experts))

    def experts(self, mixture: Experts) -> float:
        """Returns the bytes of a mixture of experts in its backward pass: rows, and weights sliced from stacks.

        R rows have inputs and their gradient, 2 R H c, and gates with ups and their gradient, 2 R O c. On a mesh, int4
        weights of all layers of an iteration exist at once, because it begins with their gathers.
        """
        first = mixture.linears[0]
        rows = 2.0 * self.compute * mixture.rows(self.tokens) * (first.inputs + first.outputs)
        int4 = (0.5 + 4 / self.config.model.quant_group) * (self.block if self.mesh else 1)
        return rows + {"int8": 1.0, "int4": int4}.get(self.dtype, self.compute) * mixture.count * mixture.weights
