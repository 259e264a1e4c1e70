"""Derives the temporaries of a training step on a TPU: which tensors are alive at each moment, and their bytes.

Letters: T = B S tokens (batch size, length) in a pass, H hidden size, I intermediate size, V vocabulary, L layers, n
and m query and key-value heads of size d (padded: D), P trained parameters, c bytes of the compute dtype. The lifetimes
were read from libtpu 0.0.21; tests/recorded_memory.json has the compiler's figures, to which the constants are fitted.

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
from tpu_kit.hardware.chips import Chip
from tpu_kit.models.architecture import ALONE, FEW_TILES, Experts, Layer, Linear, Shape
from tpu_kit.models.sharding_rules import Tensor
from tpu_kit.planning.argument_memory import LANES, is_matrix, model_tensors, padded, shards, teacher_shape

if TYPE_CHECKING:
    from tpu_kit.training.objectives import Objective

VECTOR_MEMORY = 112 * 2**20
"""Bytes of the tiles of the MLP, and of the inputs and outputs of the attention kernels, that are in the chip's vector
memory instead of HBM, if the chip is not given: v5e and v6e have 128 MiB."""
SPLASH_BLOCK = 1024  # tokens; half as many for heads of more than 128
HOLES = 0.012
"""Share of a heap that is unused, between the small stacks of a layer, for each layer of a block."""
STATES, WHOLE_STATES = 6, 10
"""Arrays of (T, H) of a layer in HBM during its backward pass: its input, the output of attention, the states between
its halves, the incoming gradient, and what is normed, rotated or cut into tiles. In full fine-tuning most are in fp32.
Each layer of a block beyond the first adds one: its input, cut out of the stack."""
LEFT_BY_MLP = 2
"""As many of them are no longer there during the backward pass of attention."""
STATES_OF_CHUNKS, TOKENS_OF_CHUNK = 6, 64
"""Arrays in HBM during the backward pass of a layer with a state, of the size of the states between its chunks: these
states, and in fp32 what the layer's convolution and its rule read. Fitted to a step of Qwen3.5-4B."""
LEFT_BY_TILES = 0.5
"""Arrays of (t, I) that each tile of an unrolled MLP but the last leaves in HBM for its adapters' gradients."""


def objective_beside(config: TrainConfig) -> Objective | None:
    """Returns the objective, which says what it adds; None for supervised learning and a teacher's."""
    if config.optim.objective == "supervised":
        return None
    from tpu_kit.training.objectives import objective_of

    return objective_of(config)


def elements(linears: Sequence[Linear]) -> int:
    """Returns the number of elements of linear layers."""
    return sum(one.parameters for one in linears)


def largest(linears: Sequence[Linear]) -> int:
    """Returns the number of elements of the largest of linear layers, 0 without one."""
    return max((one.parameters for one in linears), default=0)


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
    """The terms of the peak, one method each.

    `shape` is that of the model as one device's products see it, `whole_shape` on a mesh that of the whole model, and
    `num_replicas` the number of shards of the batch.
    """

    def __init__(
        self, config: TrainConfig, shape: Shape, num_replicas: int, chip: Chip | None = None, mesh: Mesh | None = None,
        whole_shape: Shape | None = None,
    ) -> None:  # fmt: skip
        plan = batch_arithmetic(config, num_replicas)
        self.config, self.shape, self.mesh = config, shape, mesh
        self.batches = num_replicas
        self.passes, self.rows, self.length = plan.gradient_accumulation, plan.batch_size, config.data.max_length
        self.tokens = self.rows * self.length
        self.whole = not config.lora.r
        self.compute = 4 if config.model.base_dtype == "fp32" else 2
        self.stream = 4 if self.whole else self.compute
        self.at_hand = WHOLE_STATES if self.whole else STATES
        optim, attention = config.optim, config.model.attention
        self.again, self.keeps = optim.remat != "none", optim.remat == "outputs"
        self.scanned = self.again and optim.scan_layers != "off"
        self.kernel = "splash" if attention == "auto" else attention
        self.on_chip = (chip.vector_memory_bytes if chip else None) or VECTOR_MEMORY
        if self.kernel == "sdpa":
            self.on_chip = 0
        tiles = self.scanned and not self.keeps
        self.tile = min(optim.mlp_tile or self.tokens, self.tokens) if tiles else self.tokens
        self.tiles = -(-self.tokens // self.tile)
        self.tiled = self.tiles > 1
        self.block = max(map(len, shape.blocks)) if self.scanned else 1
        self.tensors = model_tensors(whole_shape or shape, config, scanned=self.scanned)
        parts = shards(self.tensors, mesh, (whole_shape or shape).embedding)
        self.sharded = list(zip(self.tensors, parts, strict=True))
        self.trained = sum(math.prod(one.shape) for one in self.tensors if one.trained)
        self.groups = self.update_groups()
        self.objective = objective_beside(config)
        self.added = self.objective.cost(self.tokens, shape.hidden) if self.objective else None

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
        most = max(moments, key=lambda moment: moment.heap)
        if not self.scanned and most.name != "update":
            return most, 0.0
        seen = max(moment.heap - moment.carried for moment in moments)
        return most, (1 + HOLES * self.block) * most.heap - seen

    def moments(self) -> Iterator[Moment]:
        """The moments that can be the peak."""
        saved, gradients, head = self.saved(), self.gradients(), self.head_gradient()
        lasting = {"weight_copies": self.copies(), "objective_saved": self.objective_saved(),
                   "layer_inputs": self.made_outside(4 + 2 * self.stream)}  # fmt: skip
        if self.objective and not self.objective.trains_model:
            return (yield from self.forward_moments(lasting))
        lasting["saved_activations"] = saved
        kinds = self.shape.kinds
        if self.kernel == "sdpa" and self.again:
            lasting["mask"] = max(map(self.scores, kinds))  # a bias of the scores' shape, made once for all layers
        if self.scanned:  # the stack that the first loop fills is allocated before it
            table = self.in_hbm(self.table())  # of bf16 it is read before
            both = {"saved_activations": max(saved, table)} if self.stream == 2 else {"layer": table}
            yield Moment("start", lasting | both, 0)
        if inner := self.inner():  # what such a loop saves is copied when it has ended
            stacks = saved + inner * max(map(self._saved_by, kinds))
            layer = max(self.states(3) + self.wide(self.tile, kind) for kind in kinds)
            yield Moment("forward", lasting | {"saved_activations": stacks, "layer": layer}, stacks)
        before = gradients if self.passes > 1 else 0.0
        chunk, rest = self.loss()
        # The many stacks of a block lie between others: no chunk fits there before they are filled.
        below = self.layer_gradients() if self.block > 1 and not self.whole else before
        logits, states = self.teacher()
        parts = {**lasting, "loss_chunk": chunk + rest + head, "teacher": logits + states, "gradients": below}
        yield Moment("loss", parts, saved + self.hidden() + head + below)
        parts = {**parts, "loss_chunk": rest + head, "teacher": states}  # the first moment keeps its own
        yield Moment("loss", parts, saved + self.hidden() + below)
        filled = self.layer_gradients() * (1 + self.inner() / self.shape.layers) + head
        carried = saved + self.hidden(1 + self.tiled) + filled + before
        for kind in kinds:
            for (layer, attention), read in (
                (self.at_mlp(kind), self.read_at_once(kind)),
                (self.at_attention(kind), 0.0),
            ):
                parts = {**lasting, "layer": layer, "attention": attention, "gradients": filled + before}
                yield Moment("backward", parts, carried + read)
        yield Moment("backward", parts | {"layer": self.hidden(), "attention": 0.0}, saved + head + before)
        flat = sum(self.group_bytes(group) for group in self.groups if len(group) > 1)
        unseen = self.scanned * (self.layer_gradients() + (0.0 if self.shape.tied else head))
        for left, given in self.updates():
            parts = {"weight_copies": self.tables(), "gradients": left, "all_reduce": flat, "update": given}
            yield Moment("update", parts, min(left, unseen))

    def forward_moments(self, lasting: dict[str, float]) -> Iterator[Moment]:
        """The moments of a model that is not trained: attention's, with its inputs in two layouts, and the loss."""
        saved, chunk = lasting.pop("objective_saved"), sum(self.loss())
        for kind in self.shape.kinds:
            attention = self.heads(2, kind) + self.pairs(2, kind)
            layer = self.states(3) + self.slices(kind)
            yield Moment("forward", {**lasting, "layer": layer, "attention": attention}, 0)
        yield Moment("loss", {**lasting, "objective_saved": saved / 2, "loss_chunk": chunk}, self.hidden())

    def group_bytes(self, group: Sequence[tuple[int, ...]]) -> int:
        """Bytes of the fp32 tensor in which a group is updated: a large one in its own shape, or a vector of all."""
        return padded(group[0], 4, free=True) if len(group) == 1 else padded((sum(map(math.prod, group)),), 4)

    def hidden(self, count: float = 1) -> float:
        """`count` arrays of (T, H): in the compute dtype, or in fp32 in full fine-tuning."""
        return count * padded((self.tokens, self.shape.hidden), self.stream, free=True)

    def states(self, count: float) -> float:
        """`count` arrays of (T, H) in the compute dtype: a layer's work has few fp32 arrays at a time."""
        return count * padded((self.tokens, self.shape.hidden), self.compute, free=True)

    def heads(self, count: float, kind: Layer) -> float:
        """`count` arrays of (B, n, S, d): a head is padded to 128 lanes for a kernel, else dense."""
        return count * self._heads(kind.heads, kind.head_dim)

    def pairs(self, count: float, kind: Layer) -> float:
        """`count` arrays of (B, m, S, d), as `heads`."""
        return count * self._heads(kind.kv_heads, kind.head_dim)

    def _heads(self, heads: int, size: int) -> float:
        if self.kernel == "sdpa":
            return self.tokens * heads * size * self.compute
        return padded((self.rows * heads, self.length, size), self.compute)

    def scores(self, kind: Layer) -> float:
        """One array of sdpa's scores, (B, n, S, S) in the compute dtype."""
        return padded((self.rows * kind.heads, self.length, self.length), self.compute)

    def wide(self, tokens: int, kind: Layer) -> float:
        """One array of (tokens, I)."""
        return padded((tokens, kind.intermediate), self.compute)

    def saved(self) -> float:
        """Saved activations of one pass: the input of every layer, L T H c (`layer_scan`, or torch_xla's checkpoint).

        With remat=none they are all that the backward pass of a layer reads: the MLP's `gates`, `kept`, the output of
        attention, both halves' inputs.
        """
        return sum(count * self._saved_by(kind) for kind, count in self.shape.counted)

    def inner(self) -> int:
        """The most layers of a loop over equal neighbours in a block, which has own stacks of inputs and gradients."""
        return max((count for block in self.shape.blocks for count in block if count > 1 and self.scanned), default=0)

    def _saved_by(self, kind: Layer) -> float:
        if self.again:
            return self.hidden() + (self.results(kind) if self.keeps else 0.0)
        wide = kind.gates * self.wide(self.tokens, kind)
        return wide + self.kept(kind) + self.hidden(4) + (self.output(kind) if self.kernel != "sdpa" else 0.0)

    def results(self, kind: Layer) -> float:
        """The results of a layer that remat=outputs keeps: of its linear layers, T times their outputs, and attention.

        The gradient needs the result of the MLP only if a norm follows. Splash keeps the log of sums, 4 T n.
        """
        last = () if kind.norm_follows else kind.mlp_linears[-1:]
        saved = sum(
            float(padded((self.tokens, one.outputs), self.compute, free=True))
            for one in kind.linears if one not in last
        ) + self.output(kind)  # fmt: skip
        return saved + (padded((self.rows * kind.heads, self.length), 4) if self.kernel == "splash" else 0.0)

    def output(self, kind: Layer) -> float:
        """The output of attention, T n d c: its heads side by side, as the input of the next product."""
        return padded((self.tokens, kind.heads * kind.head_dim), self.compute, free=True)

    def kept(self, kind: Layer) -> float:
        """Tensors that attention keeps for its backward: queries and output, 2 T n D c, keys and values, 2 T m D c.

        sdpa keeps its weights, T S n c, and keys and values repeated for every query head.
        """
        if self.kernel == "sdpa":
            return self.heads(4, kind) + self.scores(kind)
        return self.heads(2, kind) + self.pairs(2, kind)

    def copies(self) -> float:
        """Copies of stacks that are made before the loop.

        Autocast copies trained weights, 2 P in bf16. The compiler copies fp32 weights, as a TPU's products take bf16,
        and stacks whose axes are exchanged as arguments because that pads less (`padded`; H = 576 of SmolLM2). The
        copied embedding stays until the last pass has read it, in full fine-tuning until it is updated.

        On a mesh, AdamW's update of an embedding that is not tied is computed in shards of rows instead of columns:
        parameter, gradient and both moments exist in both.
        """
        table = self.table() if self.passes > 1 or self.whole else 0.0
        if self.mesh and not self.shape.tied and self.config.optim.optimizer == "adamw":
            table += 16.0 * sum(math.prod(part) for one, part in self.of_trained() if "embed_tokens" in one.name)
        every = self.whole or self.compute == 4
        stacks = 2.0 * sum(
            math.prod(part) for one, part in self.sharded
            if (every and self.in_layers(one)) or (one.trained and not self.whole)
        )  # fmt: skip
        return stacks * (self.scanned or not every) + table + (0.0 if every else self.relaid())

    def in_layers(self, tensor: Tensor) -> bool:
        """Whether a tensor belongs to the list of layers."""
        return f"{self.shape.layers_path}." in tensor.name

    def relaid(self) -> float:
        """Stacks of a frozen model that a loop over tiles needs in a layout with padding, unlike arguments, in bf16.

        None on a mesh: the weights are gathered in the layout of the products.
        """
        model, found = self.config.model, 0.0
        for one, layers in [(one, count) for kind, count in self.shape.counted for one in kind.linears]:
            stack = (layers, one.outputs, one.inputs)
            before, now = padded(stack, 2, free=True), padded(stack, 2) if self.tiles > FEW_TILES else 0
            if model.base_dtype == "int4":
                groups = one.inputs // model.quant_group  # steps and offsets; the other order is the loop's
                before, now = (padded((layers, *two, one.outputs), 2) for two in ((groups, 2), (2, groups)))
            found += now if before < now else 0
        return found * (self.scanned and not self.mesh)

    def table(self) -> float:
        """The embedding in another layout than as an argument, for the lookup; on a mesh each has its columns alone."""
        one, size = (self.shape.vocabulary, self.shape.hidden), 4 if self.whole else self.compute
        return padded(one, size) if not self.mesh and padded(one, size, free=True) < padded(one, size) else 0.0

    def tables(self) -> float:
        """Copies for the embedding's update: AdamW's moments and the average; and its gradient's padding."""
        table, optim = self.whole * self.table(), self.config.optim
        more = table - padded((self.shape.vocabulary, self.shape.hidden), 4, free=True) if table else 0.0
        return table * (1 + 2 * (optim.optimizer == "adamw") + bool(optim.ema_decay)) + more

    def updates(self) -> Iterator[tuple[float, float]]:
        """The moments of the update: bytes of the remaining gradients, and of the results of the largest stack.

        They are copied into the arguments, with AdamW also both moments; an embedding is updated in place.
        """
        large, optimizer = [group for group in self.groups if len(group) == 1], self.config.optim.optimizer
        largest = max((self.group_bytes(group) for group in large if len(group[0]) == 3), default=0)
        yield self.gradients(), largest * (3.0 if optimizer == "adamw" else 1.0)

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
        """The output layer's gradient in fp32, alive from the loss on, in full fine-tuning.

        If the embedding is copied to another layout (`table`) and is the output layer too, it uses the argument's. On a
        mesh it is in shards, and small.
        """
        if self.mesh or not self.whole or (self.shape.tied and self.table()):
            return 0.0
        return float(padded((self.shape.vocabulary, self.shape.hidden), 4, free=True))

    # ---------------------------------------------------------------------------------------- tensors of one moment

    def loss(self) -> tuple[float, float]:
        """The loss: logits of one chunk in the compute dtype; and the tensors of all chunks.

        The latter are hidden states and gradients, 3 T H c (unrolled, 2: the others are in the vector memory), and a
        bf16 copy of an output layer in fp32. On a mesh the vocabulary is in parts, and a chunk has the states of all.
        """
        chunk, shape = min(self.config.optim.loss_chunk, self.tokens), self.shape
        fsdp = self.mesh.fsdp if self.mesh else 1
        copied = padded((-(-shape.vocabulary // fsdp), shape.hidden), 2) if self.whole or self.compute == 4 else 0
        gathered = padded((chunk * fsdp, shape.hidden), self.stream) if self.mesh else 0
        logits = self.in_hbm(padded((chunk, shape.vocabulary), self.compute))
        return logits, self.hidden(3 if self.scanned else 2) + copied + gathered

    def teacher(self) -> tuple[float, float]:
        """A teacher's logits of one chunk; and its states that are kept for the loss: the last, and those compared.

        On a mesh, logits of more tokens than the student knows are cut into a second array.
        """
        shape, chunk = teacher_shape(self.config), min(self.config.optim.loss_chunk, self.tokens)
        if shape is None:
            return 0.0, 0.0
        kept = 1 + len(self.config.distill.pairs) + bool(self.config.distill.embeddings_weight)
        size = 4 if self.config.distill.teacher_dtype == "fp32" else 2
        logits = self.in_hbm(padded((chunk, shape.vocabulary), size))
        logits *= 1 + bool(self.mesh and shape.vocabulary != self.shape.vocabulary)
        return logits, float(kept * padded((self.tokens, shape.hidden), size, free=True))

    def objective_saved(self) -> float:
        """What the objective saves for the backward pass, beside the likelihood of the labels."""
        return float(sum(padded(shape, 4) for shape in self.added.saved)) if self.added else 0.0

    def at_mlp(self, kind: Layer) -> tuple[float, float]:
        """The recomputed layer during the backward pass of its MLP: (layer, attention).

        For the arrays of (T, H) see `STATES`. The MLP has gate, up, product and two gradients, 5 T I c (ungated 3), one
        of them in the vector memory; in a loop over tiles of t tokens, the part of 5 t I c that does not fit there, and
        the loop's weights. Attention has what it keeps, and its log sums over 128 lanes, unless they were saved. Full
        fine-tuning adds the MLP's gradients in fp32, before they go into their stacks.
        """
        arrays = 2 * kind.gates - 1
        wide = self.spilt(arrays * self.wide(self.tile, kind)) if self.tiled else self.untiled(kind)
        if 1 < self.tiles <= FEW_TILES and not self.whole:
            wide = max(wide, LEFT_BY_TILES * (self.tiles - 1) * self.wide(self.tile, kind))
        layer = self.states(self.at_hand + self.block - 1) + self.slices(kind) + wide + self.experts(kind)
        layer += self.whole * 4.0 * elements(kind.mlp_linears)
        sums = 0.0
        if self.kernel == "splash" and not self.keeps:
            sums = padded((self.rows * kind.heads, self.length, LANES), 4)
        return layer, self.kept(kind) + sums + self.normed(kind) + self.chunk_states(kind)

    def read_at_once(self, kind: Layer) -> float:
        """What the compiler does not see beside the results that are made of it at once: only on a mesh."""
        return 0.0

    def untiled(self, kind: Layer) -> float:
        """The arrays of an MLP that is not tiled: 2 `gates`, of which two lie in the vector memory beside a third."""
        wide, held = self.wide(self.tokens, kind), 2
        if wide and self.scanned and not self.keeps:
            held = max(0, min(2, int(self.on_chip // wide) - 1))
        return (2 * kind.gates - held) * wide

    def experts(self, kind: Layer) -> float:
        """The rows of a mixture of experts in its backward pass, and the weights that are cut out of their stacks.

        Of the R rows there are inputs and their gradient, 2 R H c, and gates with ups and their gradient, 2 R O c.
        """
        wide = sum(one.rows(self.tokens) * (one.linears[0].inputs + one.linears[0].outputs) for one in kind.experts)
        return 2.0 * wide * self.compute + sum(map(self.expert_weights, kind.experts))

    def expert_weights(self, mixture: Experts) -> float:
        """Bytes of the weights of a layer's experts, as stored."""
        dtype = "bf16" if self.whole else self.config.model.base_dtype
        return mixture.count * mixture.weights * {"int8": 1.0, "int4": 0.5}.get(dtype, self.compute)

    def at_attention(self, kind: Layer) -> tuple[float, float]:
        """The recomputed layer during the backward pass of its attention: (layer, attention).

        A kernel has queries, output and its gradient, keys and values and theirs, and the gradient of queries, of which
        splash makes one for each block of keys, S / 1024 T n D c, and adds them. Then the gradients of queries and keys
        are rotated back, beside that of the values: of both there are the halves that are negated, each padded like a
        head, and two results. sdpa has another array of scores beside what it keeps.
        """
        extra = self.hidden(self.block - 1) + self.slices(replace(kind, mlp="", linears=kind.attention_linears))
        if self.kernel == "sdpa":
            return extra, self.kept(kind) + self.scores(kind)
        half = replace(kind, head_dim=kind.head_dim // 2)
        rotated = self.spilt(self.heads(3, kind) + self.pairs(4, kind) + self.heads(2, half) + self.pairs(2, half))
        block = SPLASH_BLOCK >> (-(-kind.head_dim // LANES) - 1).bit_length()
        blocks = max(1, self.length // block)
        given = self.spilt(self.heads(3, kind) + self.pairs(4, kind)) + self.heads(blocks, kind)
        most = max(rotated, given + self.chunk_states(kind))
        return self.states(self.at_hand - LEFT_BY_MLP) + extra, most + self.normed(kind)

    def chunk_states(self, kind: Layer) -> float:
        """What a layer with a state keeps for its backward pass; see `STATES_OF_CHUNKS`."""
        return STATES_OF_CHUNKS * 4.0 * kind.state * self.tokens / TOKENS_OF_CHUNK

    def normed(self, kind: Layer) -> float:
        """Queries and keys in fp32, which norms of heads read."""
        return 4.0 * self.tokens * (kind.heads + kind.kv_heads) * kind.head_dim if kind.norms_heads else 0.0

    def slices(self, kind: Layer) -> float:
        """Weights cut out of their stacks: the MLP's, as stored, for a loop over tiles, or if a norm reads them twice.

        int8 becomes bf16 in the product, but attention's weights are cut out before. int4 is unpacked before: at a time
        both halves of a matrix of the MLP in fp32, one also in bf16, and as much of attention.
        """
        dtype = "bf16" if self.whole else self.config.model.base_dtype
        size = {"int8": 1, "int4": 0.5}.get(dtype, self.compute)
        mlp, others = kind.mlp_linears, kind.attention_linears
        found = elements(mlp) * size if self.tiles > FEW_TILES or (self.tiled and kind.norm_follows) else 0.0
        if dtype == "int4":
            return found + 4.0 * (largest(mlp) + largest(others)) + largest(mlp)
        return found + (elements(others) if dtype == "int8" else 0.0)

    def spilt(self, size: float) -> float:
        """The part of several arrays that does not fit into the vector memory."""
        return max(0.0, size - self.on_chip)

    def in_hbm(self, size: float) -> float:
        """One array that does not fit into the vector memory as a whole; else 0."""
        return size if size > self.on_chip else 0.0
