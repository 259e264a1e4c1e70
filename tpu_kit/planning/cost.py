"""Estimates the work of a step and its time.

The times of matrix products and of the HBM traffic between them are added, because a TPU overlaps little of them.
Counts and efficiencies were fitted to the TPU compiler's cost model of v5e (`compiler.step_estimate`); nothing was
timed on a TPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tpu_kit.config.loader import BatchPlan, TrainConfig
from tpu_kit.config.mesh import Mesh
from tpu_kit.distributed.detection import seen_on
from tpu_kit.machine.chips import Chip
from tpu_kit.machine.slices import TargetSlice
from tpu_kit.model.families.input_work import inputs_of
from tpu_kit.model.shape import Layer, Linear, Shape
from tpu_kit.model.shape_cache import shape_of
from tpu_kit.model.sharding.sharding_rules import is_column, spec_of
from tpu_kit.planning.memory.activation_memory import objective_beside
from tpu_kit.planning.memory.argument_memory import LANES, item_bytes, model_tensors, trained_count
from tpu_kit.planning.program_peaks import cache_bytes
from tpu_kit.training.losses.rollout_programs import WHOLE_ROWS, rollout_of, update_plan
from tpu_kit.xla.splash_blocks import LARGEST_BLOCK, is_fused

if TYPE_CHECKING:
    from tpu_kit.model.families.input_work import InputWork
    from tpu_kit.planning.compiler.compile_check import Compiled

MXU_EFFICIENCY = 0.93
"""Share of the peak FLOP/s that matrix products reach in the compiler's cost model."""
HBM_EFFICIENCY = 0.8
"""Share of the peak HBM bandwidth that streaming reaches: an assumption."""
ICI_EFFICIENCY = 0.7
"""Share of the interconnect's bandwidth that an all-reduce reaches: an assumption."""
DCN_EFFICIENCY = 0.7
"""Share of the data center network's bandwidth that an all-reduce between slices reaches: an assumption."""
GATHERS = 2
"""All-gathers of a layer's weights per pass on a mesh: one forward, one backward."""
SYNCHRONOUS_GATHERS = 0.1
"""Share of the gathered weights that the compiler does not overlap with computation: 0.004 to 0.46."""
MODEL_REDUCES = 10
"""All-reduces of a layer's activations over the model axis per pass: forward, recomputation and backward."""
STATES_TRAFFIC, TILES_TRAFFIC = 9.2, 15.0
"""HBM traffic of norms, residuals and casts per layer and step, over the bytes of the hidden states (T, H); and the
additional traffic of a tiled MLP, which slices and concatenates its tiles."""
HEADS_TRAFFIC, PARTS_TRAFFIC = 54.0, 7.6
"""HBM traffic of rotary embeddings and kernel layouts, over the bytes of queries, keys and values with padded heads.
The second is added per block of keys after the first, because the kernel writes a query gradient per block."""
SPILLED_TRAFFIC, ON_CHIP = 63.0, 2**25
"""Additional traffic of hidden states and heads, times the share of an array that does not fit into `ON_CHIP` bytes."""
ADDED_TRAFFIC = 3.8
"""HBM traffic of linear layers with a separate product for the adapter, over their inputs and outputs."""
LEAST_TRAFFIC = 1.15e8
"""Bytes whose transfer takes as long as a layer's small operations in a step, for any number of tokens."""
KEPT_TRAFFIC = 4.0
"""HBM traffic over the bytes that remat=outputs keeps: writing and reading the stacks, and clearing them on a mesh."""
INT4_TRAFFIC = 46.0
"""Bytes whose transfer takes as long as converting an int4 weight in a pass; fitted to compiled 8B and 14B steps."""
LOSS_TRAFFIC = 2.0
"""HBM traffic of the loss, over the bytes of the fp32 logits."""
ROWS_TRAFFIC = 6.0
"""HBM traffic of the chosen experts' rows and a vision tower's patches, over the inputs and outputs of their linear
layers: an assumption."""
SCORES_TRAFFIC = 22.0
"""HBM traffic of sdpa's scores, over the bytes of one (B, n, S, S) array."""
STATE_TRAFFIC = 10.0
"""HBM bytes per step, token and element of a layer's state; fitted to one step of Qwen3.5-4B."""
UPDATE_TRAFFIC = 15.0
"""Passes over the trained fp32 parameters for gradients and update; the compiler counts 13 to 15."""
WEIGHT_BYTES: Mapping[str, float] = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 0.5}
"""Bytes read per base weight: int8 is converted to bf16 within the product."""
HOST_SECONDS = 0.004
"""Host time per step during which the device waits: an assumption."""
GATHERED_TRAFFIC = 3.0
"""HBM traffic over the bytes of gathered weights, without the products' reads: they are written and copied."""
LOGITS_TRAFFIC = 10.0
"""Passes over the fp32 logits (B, V) of a decode step, for sampling."""
LOOP_TRAFFIC = 2.0
"""Factor on a decode step's reads of weights and cache if layers run as a loop, which prefetches nothing; fitted to
compiled 0.5B and 1B models."""
COPY_TRAFFIC = 5.0
"""HBM traffic of copying the prompts' KV cache for the samples, over the bytes of the copies."""


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind in a step on one device.

    Attributes:
        kind: operation, such as "all-gather"; the formula adds the tensors, such as "all-gather of weights".
        count: number of operations.
        moved: bytes that a device sends in one direction. In a ring of g devices, it is (g - 1) / g of an all-gather's
            result or a reduce-scatter's operand, and twice that for an all-reduce.
        synchronous: the part of `moved` that does not overlap with computation.
        over_dcn: whether slices exchange them over the data center network.
        bytes: size of the results, from the compiler; 0 by formula.
    """

    kind: str
    count: int
    moved: float
    synchronous: float
    over_dcn: bool = False
    bytes: int = 0


@dataclass(frozen=True)
class Work:
    """The work of a step on one device: FLOPs, HBM bytes and collectives.

    `narrow` lists (width, FLOPs) of products that may be narrower than the matrix unit: adapters with the rank as
    width, attention with the head size.
    """

    flops: float
    traffic: float
    collectives: tuple[Collective, ...] = ()
    narrow: tuple[tuple[int, float], ...] = ()

    def __add__(self, more: Work) -> Work:
        return Work(
            self.flops + more.flops, self.traffic + more.traffic, (*self.collectives, *more.collectives),
            (*self.narrow, *more.narrow),
        )  # fmt: skip

    def repeated(self, times: float) -> Work:
        """Returns the work of `times` runs; collectives keep their `count` and `bytes`."""
        moved = [replace(one, moved=times * one.moved, synchronous=times * one.synchronous) for one in self.collectives]
        narrow = tuple((width, times * flops) for width, flops in self.narrow)
        return Work(times * self.flops, times * self.traffic, tuple(moved), narrow)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause.

    `compute` is the time of matrix products and `memory` of the traffic between them; from the compiler's cost model,
    `compute` is both. `all_reduce` is the time of collectives that do not overlap with computation, `rollout` an
    update's share of a rollout, `measured` the factor that `verify` measured on this machine.
    """

    compute: float
    memory: float
    all_reduce: float
    host: float = HOST_SECONDS
    measured: float | None = None
    rollout: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole step with its share of a rollout, times `measured` if that is known."""
        return self.predicted * (self.measured or 1.0)

    @property
    def predicted(self) -> float:
        """The whole step, without `measured`."""
        return self.device + self.all_reduce + self.host + self.rollout

    @property
    def device(self) -> float:
        """The device's time in an update without collectives and rollout."""
        return self.compute + self.memory


def work(config: TrainConfig, shape: Shape, plan: BatchPlan, mesh: Mesh | None = None, slices: int = 1) -> Work:
    """Returns the work of one update on one device.

    Args:
        config: the run.
        shape: the whole model's shape.
        plan: the batch of a replica, or of a batch shard of the mesh.
        mesh: the devices that share the model; None for replicas.
        slices: number of slices that the mesh's data axis spans; ignored without a mesh.
    """
    if mesh is None:
        ring = 2 * 4.0 * trained_count(shape, config) * (plan.num_replicas - 1) / plan.num_replicas
        moved = [exposed("all-reduce of gradients", 1, ring)] if ring else []
        return _work(config, shape, plan) + Work(0.0, 0.0, tuple(moved))
    own = per_device(shape, mesh)
    moved = list(predicted_collectives(config, shape, plan, mesh, slices))
    gathered = sum(one.moved for one in moved if one.kind.startswith("all-gather"))
    elsewhere = UPDATE_TRAFFIC * 4.0 * trained_count(own, config) * (1 - 1 / mesh.weight_shards)
    spread = 0.0
    if config.model.base_dtype == "int4":  # products expand steps and offsets, in the forward and backward pass
        spread = sum(count * one.inputs**2 * one.outputs for kind, count in own.counted for one in kind.linears)
        spread *= plan.gradient_accumulation * (4 + 2 * blocks_share(config, shape)) / config.model.quant_group
    return _work(config, own, plan, mesh.context) + Work(spread, GATHERED_TRAFFIC * gathered - elsewhere, tuple(moved))


def _work(config: TrainConfig, shape: Shape, plan: BatchPlan, context: int = 1) -> Work:
    """Returns the work of one update on a device that computes all products of `shape` for 1 / `context` of the tokens.

    A layer's FLOPs are traced (`Layer.products`). The trace has no adapters, no matrices outside layers, no attention
    kernel and no recomputation. With remat=full, the layers' forward pass is added without the MLP's last product; only
    a norm after it needs that product, and then a tiled MLP is recomputed twice. With remat=blocks, most layers'
    forward pass is added again. Attention takes 4 S n d FLOPs per token forward, 2.5 times that backward (five products
    for two, or seven if not fused); its kernel skips blocks that the causal mask hides.
    """
    length, lora = config.data.max_length, config.lora
    tokens = plan.batch_size * length // context
    dtype, attention = config.model.base_dtype, config.model.attention
    compute = item_bytes(dtype)
    again, twice = int(config.optim.recomputes), blocks_share(config, shape)
    spared = 0  # multiplications of the recomputation that the backward pass does not need
    tiled = (config.optim.mlp_tile or tokens) < tokens and config.optim.scan_layers != "off"
    for kind, count in shape.counted:
        for each in kind.experts:  # rows are weighted before the last product, so no gradient needs its result
            spared += again * count * each.chosen * each.linears[-1].inputs * each.linears[-1].outputs
        if not kind.norm_follows:
            spared += again * count * sum(one.inputs * one.outputs for one in kind.mlp_linears[-1:])
        elif tiled:
            spared -= again * count * sum(one.inputs * one.outputs for one in kind.mlp_linears)
    trained = trained_count(shape, config)
    adapters = _adapters(config, shape) * (3 + again + twice)
    seen = _seen(attention, length)
    attending = {kind.head_dim: 0.0 for kind in shape.kinds}
    for kind, count in shape.counted:
        products = 3.5 + again + twice + (attention != "sdpa" and not _is_fused(kind, tokens / length, length, compute))
        attending[kind.head_dim] += 2.0 * length * count * kind.heads * kind.head_dim * products * seen
    head, states = shape.vocabulary * shape.hidden, sum(count * kind.state for kind, count in shape.counted)
    flops = tokens * shape.flops(1 + again + twice, 1, not lora.r)
    flops += 2 * tokens * (adapters + sum(attending.values()) - spared) + tokens * _outside(config, shape)
    narrow = [(lora.r, adapters), *attending.items()]

    chunks = -(-tokens // min(config.optim.loss_chunk, tokens))
    thirds = 1 + twice / 3  # of forward pass, recomputation and gradients
    traffic = thirds * _between(shape, tokens, compute, length, tiled and again == 1)
    traffic += LOSS_TRAFFIC * 4 * tokens * shape.vocabulary + 2 * chunks * head * compute
    traffic += thirds * ADDED_TRAFFIC * _added(config, shape, tokens) * tokens * compute
    traffic += thirds * STATE_TRAFFIC * states * tokens
    if dtype == "int4":
        traffic += (1 + twice / 2) * INT4_TRAFFIC * shape.linear_weights
    if config.optim.remat == "outputs":
        outputs = sum(count * sum(one.outputs for one in kind.linears) for kind, count in shape.counted)
        traffic += KEPT_TRAFFIC * outputs * tokens * compute
    if config.model.attention == "sdpa":
        heads = sum(count * kind.heads for kind, count in shape.counted)
        traffic += SCORES_TRAFFIC * tokens * length * heads * compute
    done = Work(flops, traffic, narrow=tuple((width, 2 * tokens * each) for width, each in narrow if width))
    if (inputs := inputs_of(config)) is not None:
        done += input_work(config, inputs, plan.batch_size * inputs.room)
    if objective := objective_beside(config):
        added, logits = objective.cost(tokens, shape.hidden), Work(2 * tokens * head, chunks * head * compute)
        forward = _forward(shape, config.model.base_dtype, tokens, length, chunks, seen)
        done = done if objective.trains_model else forward + logits
        done += logits.repeated(added.output_products) + forward.repeated(added.forwards)
        done += Work(6 * tokens * added.params, 0.0)
        for other in added.frozen:
            done += _forward(shape_of(other.model), other.model.base_dtype, tokens, length, chunks, seen)
    return done.repeated(plan.gradient_accumulation) + Work(0.0, UPDATE_TRAFFIC * 4.0 * trained)


def input_work(config: TrainConfig, inputs: InputWork, count: int) -> Work:
    """Returns the work of the features of `count` inputs in a pass, without the text model's work on their tokens."""
    size = item_bytes(config.model.base_dtype)
    return Work(count * inputs.flops(), ROWS_TRAFFIC / 3 * count * inputs.ends() * size + inputs.weights * size)


def predicted_collectives(
    config: TrainConfig, shape: Shape, plan: BatchPlan, mesh: Mesh, slices: int = 1
) -> Iterator[Collective]:
    """Yields the collectives of an update on a mesh: first of weights and gradients, then of activations.

    A layer's tensors are gathered over fsdp in their stored form, trained ones in bf16; remat=blocks gathers most
    layers once more. Each pass reduce-scatters a trained matrix's gradient in bf16 (in an MLP once per tile) and
    all-reduces it over data, within each slice and then between slices. The embedding's rows are exchanged. The loss
    gathers hidden states over fsdp and reduce-scatters their gradient. The model axis all-reduces (T, H) activations.
    Axes of size 1 have none. `plan` is the batch of a batch shard.
    """
    passes, tokens = plan.gradient_accumulation, plan.batch_size * config.data.max_length // mesh.context
    shards = mesh.weight_shards
    tiles = -(-tokens // min(config.optim.mlp_tile or tokens, tokens))
    gathered, scattered, summed, gathers, matrices = 0.0, 0.0, 0.0, 0, 0
    times_gathered = GATHERS + blocks_share(config, shape)
    for tensor in model_tensors(shape, config):
        spec = spec_of(tensor, shape.embedding, mesh)
        axes = [name for entry in spec for name in ((entry,) if isinstance(entry, str) else entry or ())]
        layers = tensor.shape[0] if tensor.stacked else 1
        own = math.prod(tensor.shape) / mesh.shards([name for name in axes if name == "model"])
        size = own * (2 if tensor.trained else tensor.size)
        if "fsdp" in axes and tensor.stacked:
            gathers, gathered = gathers + round(times_gathered * layers), gathered + times_gathered * size
        if tensor.trained:
            times = ("fsdp" in axes) * (tiles if ".mlp." in tensor.name else 1)
            matrices, scattered = matrices + layers * times, scattered + size * times
            summed += size / (shards if "fsdp" in axes else 1)
    if shards > 1:
        moved, ring = passes * gathered * (shards - 1) / shards, passes * scattered * (shards - 1) / shards
        yield Collective("all-gather of weights", passes * gathers, moved, SYNCHRONOUS_GATHERS * moved)
        yield exposed("reduce-scatter of gradients", passes * matrices, ring)
    data = mesh.data // slices
    if data > 1:
        yield exposed("all-reduce of gradients", passes, passes * 2 * summed * (data - 1) / data)
    if slices > 1:  # a slice's devices send equal parts
        sent = passes * 2 * summed / data * (slices - 1) / slices
        yield exposed("all-reduce between slices", passes, sent, over_dcn=True)

    size = item_bytes(config.model.base_dtype)
    states = float(tokens * shape.hidden * size)
    columns = shards * mesh.model
    if columns > 1:
        yield exposed("all-to-all of embeddings", passes, passes * states * (columns - 1) / columns)
    if shards > 1:
        chunks = passes * -(-tokens // config.optim.loss_chunk)
        yield exposed("all-gather of hidden states", chunks, passes * states * (shards - 1))
        yield exposed("reduce-scatter of hidden states", chunks, passes * states * (shards - 1))
    yield from _between_tokens(config, shape, mesh, passes, tokens * size)
    if mesh.model > 1:
        count = passes * shape.layers * MODEL_REDUCES
        yield exposed("all-reduce of activations", count, count * 2 * states * (mesh.model - 1) / mesh.model)


def blocks_share(config: TrainConfig, shape: Shape) -> float:
    """Returns the share of layers that a step recomputes twice: 0 unless optim.remat is "blocks"."""
    return shape.recomputed_twice if config.optim.remat == "blocks" else 0.0


def _between_tokens(config: TrainConfig, shape: Shape, mesh: Mesh, passes: int, tokens: int) -> Iterator[Collective]:
    """Yields the collectives of attention over the context axis in an update; none if its size is 1.

    Queries, keys, values and outputs exchange heads for tokens. If the axis does not divide the key-value heads, keys
    and values are gathered, and their gradients all-reduced. Queries, outputs and their gradients then move to other
    devices and back in two halves, with logs of sums, whose bytes are not counted (see `pallas._balanced`).
    An update has `passes` passes; `tokens` is the bytes of a tensor with one number for each token of a device.
    """
    again = int(config.optim.recomputes) + blocks_share(config, shape)
    others, times = mesh.context - 1, 2 + again
    for kind, count in shape.counted:
        queries, keys = (heads * kind.head_dim * tokens / mesh.model for heads in (kind.heads, kind.kv_heads))
        count *= passes
        if not others:
            continue
        if mesh.exchanges(kind.kv_heads):
            moved = count * times * 2 * (queries + keys) * others / mesh.context
            yield exposed("all-to-all of heads", round(4 * count * times), moved)
            continue
        yield exposed("all-gather of keys", round(2 * count * times), count * times * 2 * keys * others)
        yield exposed("all-reduce of keys' gradients", 2 * count, count * 4 * keys * others)
        yield exposed("exchange of queries", round(count * (12 + 6 * again)), count * (6 + again) * queries)


def exposed(kind: str, count: int, moved: float, *, over_dcn: bool = False) -> Collective:
    """Returns `count` collectives in a step that together send `moved` bytes and do not overlap with computation."""
    return Collective(kind, count, moved, moved, over_dcn)


def link_seconds(collectives: Iterable[Collective], chip: Chip, *, synchronous: bool = False) -> float:
    """Returns the seconds of all collectives, or of their `synchronous` part, on a device's links in one direction."""
    links, network = (chip.ici_bandwidth or 100e9) / 2 * ICI_EFFICIENCY, (chip.dcn_bandwidth or 3e9) * DCN_EFFICIENCY
    return chip.devices_per_chip * sum(
        (one.synchronous if synchronous else one.moved) / (network if one.over_dcn else links) for one in collectives
    )


def per_device(shape: Shape, mesh: Mesh) -> Shape:
    """Returns the shape of one device's products: the model axis alone divides heads, linear layers, vocabulary."""
    parts = mesh.model
    if parts == 1:
        return shape

    def part(one: Linear) -> Linear:
        side = "outputs" if is_column(one.path, one.outputs, one.inputs, shape.hidden) else "inputs"
        return replace(one, **{side: getattr(one, side) // parts})

    kinds = tuple(
        replace(kind, linears=tuple(map(part, kind.linears)), heads=kind.heads // parts,
                kv_heads=max(1, kind.kv_heads // parts), products=tuple(flops / parts for flops in kind.products))
        for kind in shape.kinds
    )  # fmt: skip
    return replace(shape, kinds=kinds, vocabulary=-(-shape.vocabulary // parts))


def _forward(shape: Shape, dtype: str, tokens: int, length: int, chunks: int, seen: float) -> Work:
    """Returns the work of a forward pass, with the output layer in `chunks` chunks (0: without); `seen` as `_seen`."""
    head, compute = shape.vocabulary * shape.hidden, item_bytes(dtype)
    flops = tokens * shape.flops(1, 0, 0) + 2 * tokens * (_scores(shape, length) * seen + head * bool(chunks))
    traffic = _between(shape, tokens, compute, length) / 3 + shape.linear_weights * WEIGHT_BYTES[dtype]
    return Work(flops, traffic + chunks * head * compute)


def model_flops(config: TrainConfig, shape: Shape) -> float:
    """Returns the FLOPs per token of training, forward and backward, by MFU's convention.

    A product takes 2 FLOPs per weight and token forward, 2 for its input's gradient and, if the weight is trained, 2
    for the weight's gradient (Kaplan et al. 2020, section 2.1). Attention takes 4 * layers * width * length forward and
    twice that backward, over the whole row (Chowdhery et al. 2022, PaLM, appendix B). Recomputation, padding and
    experts that a token is not sent to do not count. A quantized weight counts as one weight.
    """
    frozen = int(config.lora.r > 0)  # a frozen weight has no gradient
    padding = sum(count * each.chosen * each.padding for kind, count in shape.counted for each in kind.experts)
    layers = shape.flops(3, 0, -frozen) - 2 * (3 - frozen) * padding
    scores = _scores(shape, config.data.max_length)
    return layers + _outside(config, shape) + 6 * (_adapters(config, shape) + scores)


def _outside(config: TrainConfig, shape: Shape) -> float:
    """Returns the FLOPs per token of products outside layers, which are not traced, forward and backward."""
    lora, last = config.lora, f".{shape.ends[1]}"
    full = not lora.r or any(shape.tied or last.endswith(f".{name}") for name in lora.full or ())
    others = sum(one.inputs * one.outputs for one in shape.linears_outside)
    return 2.0 * (shape.vocabulary * shape.hidden * (2 + full) + others * (2 + (not lora.r)))


def _adapters(config: TrainConfig, shape: Shape) -> float:
    """Returns the elements of the adapters' matrices that a token is multiplied with, without looked-up tables."""
    shares = {f".{each.path}.": each.chosen / each.count for kind in shape.kinds for each in kind.experts}
    return sum(
        math.prod(one.shape) * next((share for path, share in shares.items() if path in one.name), 1.0)
        for one in model_tensors(shape, config)
        if one.trained and "lora_" in one.name and "lora_embedding_A" not in one.name
    )


def _scores(shape: Shape, length: int) -> float:
    """Returns a token's multiplications in all layers' scores and their products with the values: 2 S n d a layer."""
    return 2.0 * length * sum(count * kind.heads * kind.head_dim for kind, count in shape.counted)


def _key_blocks(length: int) -> int:
    """Returns the number of blocks of keys of the attention kernel for a row of `length` tokens."""
    return -(-length // LARGEST_BLOCK)


def _is_fused(kind: Layer, rows: float, length: int, size: int) -> bool:
    """Whether attention's backward pass is one kernel, for `rows` rows in a pass; as if no layer had a window."""
    return is_fused(rows, kind.heads, length, kind.head_dim, size)


def _seen(attention: str, length: int) -> float:
    """Returns the share of the scores that attention computes: the kernel skips blocks after the diagonal."""
    return 1.0 if attention == "sdpa" else (1 + 1 / _key_blocks(length)) / 2


def _between(shape: Shape, tokens: int, size: int, length: int, tiled: bool = False) -> float:
    """Returns the HBM bytes between all layers' products in one pass: forward, recomputation and backward.

    The pass has `tokens` tokens in rows of `length`, and values of `size` bytes. `tiled` adds the traffic of a tiled
    MLP.
    """
    moved = 0.0
    for kind, count in shape.counted:
        states = tokens * shape.hidden * size
        moved += count * LEAST_TRAFFIC + count * states * (
            STATES_TRAFFIC + tiled * TILES_TRAFFIC + SPILLED_TRAFFIC * _spilled(states)
        )
        head = -(-kind.head_dim // LANES) * LANES * tokens * size
        parts = (_key_blocks(length) - 1) * _is_fused(kind, tokens / length, length, size)
        passes = HEADS_TRAFFIC + PARTS_TRAFFIC * parts + SPILLED_TRAFFIC * _spilled(kind.heads * head)
        moved += count * (kind.heads + 2 * kind.kv_heads) * head * passes
        for each in kind.experts:
            rows = each.chosen * sum(one.inputs + one.outputs for one in each.linears)
            moved += ROWS_TRAFFIC * count * rows * tokens * size
    return moved


def _spilled(size: float) -> float:
    """Returns the share of an array of `size` bytes beyond `ON_CHIP`; 0 for an empty array."""
    return max(0.0, 1 - ON_CHIP / size) if size else 0.0


def _added(config: TrainConfig, shape: Shape, tokens: int) -> float:
    """Returns a token's elements in inputs and outputs of linear layers whose adapter is a separate product.

    `activation_checkpointing` joins base and adapter in the tiles of an MLP, and everywhere with remat=none. `tokens`,
    the tokens of a pass, tell whether the MLP has tiles.
    """
    lora, optim = config.lora, config.optim
    joins = config.model.base_dtype in ("bf16", "fp32") and not (lora.dora or lora.dropout or config.launch.mesh)
    if not lora.r or (joins and optim.remat == "none"):
        return 0.0
    in_tiles = joins and optim.recomputes and (optim.mlp_tile or tokens) < tokens
    return 1.0 * sum(
        count * (one.inputs + one.outputs)
        for kind, count in shape.counted
        for one in (kind.attention_linears if in_tiles else kind.linears)
    )


def step_time(done: Work, chip: Chip, measured: float | None = None) -> StepTime:
    """Estimates the seconds of some work on a device of a chip.

    Args:
        done: the work.
        chip: the chip.
        measured: time on this machine over the estimate, kept as a factor in the result; None if not known.

    Raises:
        ValueError: the chip's speed is not known.
    """
    if chip.bf16_flops is None:
        raise ValueError(f"how fast a {chip.name} is in bf16 is not known; choose another chip")
    peak = chip.bf16_flops / chip.devices_per_chip
    bandwidth = chip.hbm_bandwidth / chip.devices_per_chip
    idle = sum(flops * max(0.0, (chip.matrix_unit or 0) / width - 1) for width, flops in done.narrow)
    compute, memory = (done.flops / MXU_EFFICIENCY + idle) / peak, done.traffic / (bandwidth * HBM_EFFICIENCY)
    return timed(compute, memory, done.collectives, chip, measured)


def timed(
    compute: float, memory: float, collectives: Iterable[Collective], chip: Chip, measured: float | None = None
) -> StepTime:
    """Returns a step of `compute` + `memory` seconds, with the time of its collectives that these do not hide."""
    moved = list(collectives)
    exposed = link_seconds(moved, chip, synchronous=True)
    exposed += max(0.0, link_seconds(moved, chip) - exposed - compute - memory)
    return StepTime(compute=compute, memory=memory, all_reduce=exposed, measured=measured)


def predict_time(
    config: TrainConfig, shape: Shape, where: TargetSlice, compiled: Mapping[str, Compiled] | None = None
) -> StepTime:
    """Estimates the seconds of a step on a slice, and of an update's share of a rollout with the longest completions.

    `compiled` has the compiler's figures by program, whose cost model gives the times; without it, or if a program does
    not fit, the formula does. Raises ValueError if the chip's speed is not known.
    """
    config = seen_on(where.device_type, config)
    update, rollout = predicted_work(config, shape, where)
    passes = update_plan(config, where.replicas).gradient_accumulation
    chip, measured = where.chip, where.calibration.time
    time = step_time(update, chip, measured)
    each = {name: step_time(done, chip).predicted for name, done in rollout.items()}
    if compiled and all(one.estimated for one in compiled.values()):
        device, moved = 0.0, list[Collective]()
        for name, one in compiled.items():
            seconds, done = sum(one.estimated.values()), one.generation_work()
            if name in rollout:
                each[name] = timed(seconds, 0.0, done.collectives, chip).predicted
                continue
            runs = passes if name == "accumulate" else 1
            device += runs * seconds
            moved += Work(0.0, 0.0, one.collectives).repeated(runs).collectives
        time = timed(device, 0.0, moved if where.mesh else update.collectives, chip, measured)
    if (sizes := rollout_of(config, 1 if where.mesh else where.replicas)) is None:
        return time
    blocks = {"decode": -(-sizes.tokens // sizes.block)}
    seconds = sum(blocks.get(name, 1) * one for name, one in each.items())
    return replace(time, host=HOST_SECONDS * (passes + 1), rollout=seconds / sizes.updates)


def predicted_work(config: TrainConfig, shape: Shape, where: TargetSlice) -> tuple[Work, dict[str, Work]]:
    """Returns the work of an update on one device, and by program the work of a rollout with the widest prompts.

    They are "prefill", "samples", "decode" (a block of steps) and, to score samples before updates, "before"; none in a
    run that does not sample. A decode step reads the weights, all slots of the cache, and the logits several times. On
    a mesh a device multiplies with its part of the weights, and gathers the products' inputs and the logits.
    """
    plan = update_plan(config, where.replicas)
    update = work(config, shape, plan, where.mesh, where.slices)
    if (rollout := rollout_of(config, 1 if where.mesh else where.replicas)) is None:
        return update, {}
    mesh = where.mesh or Mesh()
    parts, size = mesh.weight_shards * mesh.model, item_bytes(config.model.base_dtype)
    rows, width = -(-rollout.prompts // mesh.data), rollout.widths[-1]
    seen = _seen(config.model.attention, width)
    read = _forward(shape, config.model.base_dtype, rows * width, width, 0, seen)
    rows = -(-rollout.samples // mesh.data)
    head, whole = shape.vocabulary * shape.hidden, -(-rows // WHOLE_ROWS) * WHOLE_ROWS
    trained = trained_count(shape, config) if config.lora.r else 0
    products = shape.flops(0, 0, 1)  # with weights: a token's state takes few
    cache = cache_bytes(config, shape, rollout.samples, rollout.slots, where.mesh)
    flops = whole * (products + 2 * (head + trained + _scores(shape, rollout.slots))) / parts
    weights = sum(kind.weights(whole) * number for kind, number in shape.counted)
    looped = where.mesh or (config.optim.remat != "none" and config.optim.scan_layers != "off")
    layers = (weights * WEIGHT_BYTES[config.model.base_dtype] + 4 * trained) / parts + cache
    traffic = (LOOP_TRAFFIC if looped else 1.0) * layers + head * size / parts
    traffic += LOGITS_TRAFFIC * 4 * rows * shape.vocabulary
    block, moved = rollout.block, list[Collective]()
    if parts > 1:
        each = sum(
            number * (2 * shape.hidden + kind.heads * kind.head_dim + kind.intermediate)
            for kind, number in shape.counted
        )
        sent = block * rows * size * (each + shape.vocabulary) * (parts - 1) / parts
        moved.append(exposed("all-gather of activations", block * (4 * shape.layers + 1), sent))
    found = {
        "prefill": read.repeated(1 / parts),
        "samples": Work(0.0, COPY_TRAFFIC * cache * rollout.copies),
        "decode": Work(block * flops, block * traffic, tuple(moved)),
    }
    if rollout.scored:
        tokens = plan.batch_size * config.data.max_length // mesh.context
        chunks = -(-tokens // config.optim.loss_chunk)
        length = config.data.max_length
        before = _forward(shape, config.model.base_dtype, tokens, length, chunks, _seen(config.model.attention, length))
        found["before"] = before.repeated(plan.gradient_accumulation / mesh.model)
    return update, found


def factors() -> Mapping[str, float]:
    """Returns the assumptions by name."""
    return {
        "MXU_EFFICIENCY": MXU_EFFICIENCY, "HBM_EFFICIENCY": HBM_EFFICIENCY, "ICI_EFFICIENCY": ICI_EFFICIENCY,
        "DCN_EFFICIENCY": DCN_EFFICIENCY, "HOST_SECONDS": HOST_SECONDS,
    }  # fmt: skip
