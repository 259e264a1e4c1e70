"""Bytes per chip by formula, from the model's config.json alone: no weights, no compiler, no torch, under a second.

    from tpu_kit.memory import estimate
    print(estimate(config))

What a step needs is arguments (weights, state, batch) + temporaries + code; donated state is written in place, so it
counts once. Temporaries are those of the moment when most are alive. Three moments compete:

* "loss": the saved layer inputs, and the logits of one chunk.
* "backward": the saved layer inputs, the gradients so far, and one layer computed again.
* "update": the gradients in their own shapes, and all of them once more as the flat vector that is reduced.

Letters: T = B S tokens in a pass, H hidden size, I intermediate size, V vocabulary, L layers, n and m query and
key-value heads of size d (padded: D), P trained parameters, c bytes of the compute dtype. What is said to be alive was
read off the buffers that `compiler.compile_step` lists (libtpu 0.0.21); tests/recorded_memory.json has its answers.

Tiles: an array lies in HBM in tiles of 8 rows of 128 for every dtype (bf16 as T(8,128)(2,1), int8 as T(8,128)(4,1):
rows are interleaved within a tile), fewer rows where the array has fewer; a vector in tiles of 1024. So a head of 64
takes 128 where a kernel wants it innermost. Of arguments, the compiler picks the order of axes that pads least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tpu_kit.config import TrainConfig, batch_arithmetic
from tpu_kit.shapes import Shape, read_shape, trained_tensors, weight_tensors

GIB = 2**30
LANES, ROWS, VECTOR = 128, 8, 1024
BYTES: Mapping[str, float] = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 0.5}

LOOP_SAVED = 2
"""How often the compiler counts the stack of saved layer inputs of a loop.

It is in memory once, but reported as temporaries twice, as what the forward loop starts from and what it ends with: of
Qwen2.5-0.5B, 4 rows of 1024, chunks of 512, the addresses in the compiler's own dump end at 348 MiB, and 525 are
reported, 168 being the stack; with 4 layers in place of 24 it is 299 less, of which 280 are twice the inputs of 20. A
step is said to fit by the reported figure, so that is predicted; the true peak is lower by one stack."""
FLAT_HEAP = 1.05
"""The heap of an unrolled program over the buffers alive at its peak, for the holes between buffers of different sizes
and lifetimes: 1.05 and 1.06 (4 layers of Qwen2.5-0.5B, remat=none with splash, full with sdpa)."""
BLOCK_HIDDEN = 4
"""Arrays of (T, H) alive for each layer of a block beyond the first: 5 (Gemma 2's blocks of two), 3.6 (Gemma 3's of
six): their layers' inputs and what the compiler begins of the next layer before the last is done."""
LOOP_CODE = 26 * 2**20
"""Code of a program of loops for each layer in it (one, or those of a block) and each pass: 20 to 31 MiB on v5e, v5p,
v6e, 23 for each of 2 or 4 passes, 35 for each of Gemma 2's two layers; 7 MiB for a model of 0.8 M parameters."""
SMALLEST_CODE = 7 * 2**20
"""Code beside the layers' of an unrolled program; and of a program of loops of next to nothing."""
FLAT_CODE = {"full": 22 * 2**20, "none": 14 * 2**20}
"""Code of each unrolled layer: 22 MiB with remat=full (Qwen2.5-0.5B, 4 and 24 layers), 14 with none (the same, 4)."""


@dataclass(frozen=True)
class Memory:
    """What a step takes of one device's memory.

    Attributes:
        parts: bytes by name, of the moment when most is taken: base_weights, adapters, optimizer, ema, batch,
            saved_activations, mask, gradients, weight_copies, layer, attention, loss_chunk, all_reduce, heap,
            code.
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


def padded(shape: Sequence[int], size: float, *, free: bool = False) -> int:
    """Bytes of an array in HBM, its tiles filled up.

    Args:
        shape: its axes.
        size: bytes of an element.
        free: whether the compiler may lay out the last two axes the other way round, as it may of arguments.
    """
    if not shape:
        return 512
    if len(shape) == 1:
        return math.ceil(-(-shape[0] // VECTOR) * VECTOR * size)

    def lay(rows: int, lanes: int) -> int:
        tile = min(ROWS, 1 << (rows - 1).bit_length())
        return -(-rows // tile) * tile * -(-lanes // LANES) * LANES

    orders = [lay(shape[-2], shape[-1])] + ([lay(shape[-1], shape[-2])] if free else [])
    return math.ceil(math.prod(shape[:-2]) * min(orders) * size)


def estimate(
    config: TrainConfig, *, num_replicas: int = 1, batch_size: int | None = None, shape: Shape | None = None
) -> Memory:
    """The memory of a training step on a TPU.

    Args:
        config: the run; its model is read by `shapes.read_shape`.
        num_replicas: data-parallel replicas; each holds everything.
        batch_size: rows per replica in a pass, in place of `config.optim.batch_size`.
        shape: the model's shape, if it was read before.

    Raises:
        ValueError: as `shapes.read_shape` and `batch_arithmetic`; a sequence longer than the model's positions.
    """
    if batch_size is not None:
        config = replace(config, optim=replace(config.optim, batch_size=batch_size))
    shape = shape or read_shape(config.model)
    if config.data.max_length > shape.positions:
        raise ValueError(
            f"data.max_length={config.data.max_length} is longer than the {shape.positions} positions of the model; "
            f"set it to {shape.positions} or less"
        )
    return _Step(config, shape, num_replicas).memory()


class _Step:
    """The terms of the formula, one method each."""

    def __init__(self, config: TrainConfig, shape: Shape, num_replicas: int) -> None:
        plan = batch_arithmetic(config, num_replicas)
        self.config, self.shape = config, shape
        self.passes, self.rows, self.length = plan.gradient_accumulation, plan.batch_size, config.data.max_length
        self.tokens = self.rows * self.length
        self.compute = BYTES[config.model.base_dtype]
        self.trained_tensors = trained_tensors(shape, config.lora)
        self.trained = sum(math.prod(tensor) for tensor in self.trained_tensors)
        optim, attention = config.optim, config.model.attention
        self.scanned = optim.remat == "full" and (
            optim.scan_layers == "on" or (optim.scan_layers == "auto" and shape.known.scans)
        )
        self.kernel = "splash" if attention == "auto" else attention
        if self.kernel == "flash" and shape.softcap:
            self.kernel = "sdpa"  # what the flash kernel lacks
        self.stream = 4 if not config.lora.r else self.compute
        self.tile = optim.mlp_tile if self.scanned else None

    # ------------------------------------------------------------------------------------------------------ arguments

    def arguments(self) -> dict[str, int]:
        """What is there before the step, and written over by it: weights, adapters, optimizer, average, batches.

        Base weights in bf16 or fp32; with lora.r=0 they are what is trained, in fp32 (`model.load_model`).
        Adapters are fp32, moments and the average flat fp32 vectors of P (`step.TrainState`, `optimizer`): AdamW 8
        bytes a parameter; in 8 bits 2 and two scales of 4 for each 256, which pad to 128 each; Adafactor a number for
        each row and column. A batch is three int64 and one int32 array of (B, S) for each pass.
        """
        lora = self.config.lora
        size = BYTES["fp32"] if not lora.r else BYTES[self.config.model.base_dtype]
        weights = sum(padded(tensor, size, free=True) for tensor in weight_tensors(self.shape))
        adapters = sum(padded(tensor, 4, free=True) for tensor in self.trained_tensors) if lora.r else 0
        rows = sum(padded((self.rows, self.length), one) for one in (8, 8, 8, 4))
        return {
            "base_weights": weights, "adapters": adapters, "optimizer": self._moments(),
            "ema": padded((self.trained,), 4) if self.config.optim.ema_decay else 0, "batch": rows * self.passes,
        }  # fmt: skip

    def _moments(self) -> int:
        kind = self.config.optim.optimizer
        if kind == "adamw":
            return 2 * padded((self.trained,), 4)
        if kind == "adamw8bit":
            blocks = -(-self.trained // 256)
            return 2 * (padded((blocks, 256), 1) + padded((blocks, 1), 4, free=True))
        # Of layers' vectors a stack has two axes, and is no matrix.
        matrices = [one for one in self.trained_tensors if len(one) == 3 or one[0] == self.shape.vocabulary]
        rows = sum(math.prod(one[:-1]) for one in matrices)
        columns = sum(math.prod(one) // one[-2] for one in matrices)
        vectors = self.trained - sum(map(math.prod, matrices))
        return sum(padded((count,), 4) for count in (rows, columns, vectors))

    # ---------------------------------------------------------------------------------------------------- temporaries

    def hidden(self, count: float = 1) -> float:
        """`count` arrays of (T, H): in the compute dtype, or in fp32 where the weights are, as in full fine-tuning."""
        return count * padded((self.tokens, self.shape.hidden), self.stream, free=True)

    def heads(self, count: int, heads: int) -> float:
        """`count` arrays of (B, heads, S, d): a head fills 128 lanes where a kernel takes it, else is dense."""
        size = self.shape.head_dim
        if self.kernel == "sdpa":
            return count * self.tokens * heads * size * self.compute
        return count * padded((self.rows * heads, self.length, size), self.compute)

    def scores(self) -> float:
        """One array of sdpa's scores, (B, n, S, S) in the compute dtype."""
        return padded((self.rows * self.shape.heads, self.length, self.length), self.compute)

    def wide(self, tokens: int) -> float:
        """One array of (tokens, I)."""
        return padded((tokens, self.shape.intermediate), self.compute)

    def gates(self) -> int:
        """Arrays of (T, I) that an MLP's backward pass reads: gate, up and product; without a gate two."""
        return 2 if self.shape.family == "phi" else 3

    def saved(self) -> float:
        """Saved activations: the input of every layer, L T H c (`layers._Scanned`, or torch_xla's checkpoint).

        Of one pass of gradient accumulation: `Runtime.after` keeps the next one from beginning before it has ended.

        With remat=none all that the backward pass of a layer reads: the MLP's `gates`; `kept`; the inputs of its two
        halves, 2 T H c; and normed, as far as adapters read them. What none reads (a product without an adapter on what
        follows; all in full fine-tuning) is computed again where it is used.
        """
        layers = self.shape.layers
        if self.config.optim.remat == "full":
            return layers * self.hidden()
        adapted = [linear.path for linear, _ in self.shape.adapted(self.config.lora)]
        attends, ends = (any(path.startswith(part) for path in adapted) for part in ("self_attn", "mlp"))
        wide = (self.gates() - (self.shape.linears[-1].path not in adapted)) * self.wide(self.tokens)
        return layers * (wide + self.kept() + self.hidden(2 + attends + ends))

    def kept(self) -> float:
        """What attention keeps for its backward pass: queries and output, 2 T n D c, keys and values, 2 T m D c.

        flash also sums and maxima for each lane, 2 T n 128 fp32; sdpa its weights, T S n c, and keys and values
        repeated for every query head.
        """
        if self.kernel == "sdpa":
            return self.heads(4, self.shape.heads) + self.scores()
        found = self.heads(2, self.shape.heads) + self.heads(2, self.shape.kv_heads)
        return found + (2 * self.lanes() if self.kernel == "flash" else 0.0)

    def lanes(self) -> float:
        """One number of each query and head, held for every lane: (B, n, S, 128) fp32."""
        return padded((self.rows * self.shape.heads, self.length, LANES), 4)

    def copies(self) -> float:
        """Copies of stacks in bf16, made before the loop.

        Autocast makes them of what is trained, 2 P; the compiler of fp32 weights, as a TPU's products take bf16.
        """
        if self.config.lora.r and self.compute == 2:
            return 2.0 * self.trained
        return 2.0 * self.shape.layers * self.shape.layer_parameters if self.scanned else 0.0

    def gradients(self) -> float:
        """Gradients in fp32, 4 P: stacks that the backward loop fills. A tied embedding has two at first."""
        whole = not self.config.lora.r and self.shape.tied
        return 4.0 * (self.trained + whole * self.shape.vocabulary * self.shape.hidden)

    def attention(self) -> float:
        """Attention of the layer that is computed again, at its most: the forward kernel, queries and output included.

        splash puts out the log of sums for each lane. flash wants keys and values repeated. sdpa has another array of
        scores beside what it keeps.
        """
        if self.kernel == "sdpa":
            return self.kept() + self.scores()
        if self.kernel == "flash":
            return 2 * self.lanes() + self.heads(4, self.shape.heads)
        return self.lanes() + self.heads(2, self.shape.heads)

    def mlp(self) -> float:
        """The MLP computed again and its backward pass: gate, up, product and two gradients, 5 T I c (ungated 3).

        With remat=none the gradients alone: the others are saved. In a loop over tiles of t tokens 3 t I c.
        """
        if self.tile and self.tile < self.tokens:
            return self.gates() * self.wide(self.tile)
        again = self.gates() if self.config.optim.remat == "full" else 0
        return (again + self.gates() - 1) * self.wide(self.tokens)

    def weight_slices(self) -> float:
        """MLP weights that the loop over tiles carries, cut out of the stack: of every layer in a block."""
        if not self.tile or self.tile >= self.tokens:
            return 0.0
        one = sum(linear.parameters for linear in self.shape.linears if linear.path.startswith("mlp"))
        return one * self.compute * max(period for period, _ in self.shape.runs())

    def loss(self) -> float:
        """The loss: logits of one chunk in the compute dtype; hidden states and gradients as they are cut, 3 T H c.

        Unrolled, 6. In full fine-tuning also the output layer's gradient in fp32; of a weight in fp32 a copy in bf16.
        """
        chunk, shape = min(self.config.optim.loss_chunk, self.tokens), self.shape
        found = padded((chunk, shape.vocabulary), self.compute) + self.hidden(3 if self.scanned else 6)
        head, whole = (shape.vocabulary, shape.hidden), not self.config.lora.r
        return found + whole * padded(head, 4) + (whole or self.compute == 4) * padded(head, 2)

    def moments(self) -> dict[str, dict[str, float]]:
        """What is alive when: bytes by part, by moment."""
        lasting: dict[str, float] = {"saved_activations": self.saved(), "weight_copies": self.copies()}
        if self.kernel == "sdpa" and self.config.optim.remat == "full":
            lasting["mask"] = self.scores()  # as a bias of the scores' shape, made once for all layers
        block = max(period for period, _ in self.shape.runs()) if self.scanned else 1
        extra = self.hidden(BLOCK_HIDDEN * (block - 1)) + self.weight_slices()
        again, kept = self.config.optim.remat == "full", self.kept()
        states = self.hidden(7 if self.scanned else 5)
        at_mlp: dict[str, float] = {"layer": states + self.mlp() + extra, "attention": kept * again}
        at_attention: dict[str, float] = {"layer": extra, "attention": self.attention()}
        if not again:  # what attention keeps is among the saved, and what the MLP did is no longer
            at_attention = {"layer": -self.gates() * self.wide(self.tokens), "attention": self.attention() - kept}
        layer = at_mlp if sum(at_mlp.values()) > sum(at_attention.values()) else at_attention
        found: dict[str, dict[str, float]] = {
            "loss": {**lasting, "loss_chunk": self.loss()},
            "backward": {**lasting, **layer, "gradients": self.gradients()},
        }
        for parts in found.values():
            parts["heap"] = (LOOP_SAVED - 1) * self.saved() if self.scanned else (FLAT_HEAP - 1) * sum(parts.values())
        reduced = padded((self.trained,), 4) * self.flat_vectors()
        return {**found, "update": {"gradients": 4.0 * self.trained, "all_reduce": reduced}}

    def flat_vectors(self) -> int:
        """Such vectors at the update, beside the gradients in their own shapes.

        The one that is reduced and clipped. AdamW's direction is computed where it is used; Adafactor's is made matrix
        by matrix and then laid flat, two more; the average needs the new parameters laid flat, one more. (With the
        gradients 2.0 are reported of Llama-3.2-1B, and 4.8 of SmolLM2-135M with Adafactor and an average.)
        """
        optim = self.config.optim
        return 1 + (2 if optim.optimizer == "adafactor" else 0) + (1 if optim.ema_decay else 0)

    def code(self) -> int:
        """The program's own size; see `LOOP_CODE`."""
        if not self.scanned:
            return SMALLEST_CODE + self.passes * self.shape.layers * FLAT_CODE[self.config.optim.remat]
        if self.shape.layer_parameters < 2**21:
            return SMALLEST_CODE * self.passes
        return LOOP_CODE * sum(period for period, _ in self.shape.runs()) * self.passes

    def memory(self) -> Memory:
        """All of it."""
        arguments = self.arguments()
        moment, alive = max(self.moments().items(), key=lambda found: sum(found[1].values()))
        parts = {**arguments, **{name: math.ceil(size) for name, size in alive.items()}, "code": self.code()}
        temporary = sum(math.ceil(size) for size in alive.values())
        return Memory(parts, sum(arguments.values()), temporary, self.code(), moment, self.trained, self.scanned)
