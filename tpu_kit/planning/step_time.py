"""How long a step takes: its floating point operations and its HBM traffic, against what the chip can do of each.

Nothing here was timed on a TPU. The counts agree with the compiler's (tests/planning/test_planner.py); the efficiencies
are assumptions with a name, to rank settings and to know the order of magnitude. Where the compiler was asked, its own
counts take the place of these.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from tpu_kit.config.loader import BatchPlan, TrainConfig
from tpu_kit.hardware.chips import Chip
from tpu_kit.models.architecture import Shape
from tpu_kit.planning.activation_memory import rematerialized
from tpu_kit.planning.tensor_shapes import trained_count

MXU_EFFICIENCY = 0.6
"""Share of the peak FLOP/s that matrix products reach: an assumption; published trainings of dense models on TPU report
40 to 65 % of the peak for a whole step."""
HBM_EFFICIENCY = 0.8
"""Share of the peak bandwidth that streaming reaches: an assumption."""
ICI_EFFICIENCY = 0.7
"""Share of the interconnect's bandwidth that an all-reduce reaches: an assumption."""
TRAFFIC = 25.0
"""HBM traffic of a layer's activations in a step, over the bytes that go in and out of its linear layers once: they are
gone through in the forward pass, again, and backward, with norms, rotary angles, adapters and casts between. What the
compiler counts: 24.5 (Qwen2.5-0.5B, 16 x 1024), 27.5 (Llama-3.1-8B, 2 x 2048), 30.1 (Gemma 2 2B), 31.6 (Phi-3 mini),
19.9 (Qwen2.5-1.5B), 20.5 (Qwen3-0.6B, adapters on two targets), 26.1 (Qwen2.5-0.5B with remat=none)."""
SCORES_TRAFFIC = 22.0
"""The same of sdpa's scores, over one array of (B, n, S, S): 22 (Qwen2.5-0.5B, 4 x 1024)."""
UPDATE_TRAFFIC = 15.0
"""Passes over the trained parameters in fp32 at the update and for their gradients: 14.9 (Llama-3.2-1B, all weights),
12.9 (Gemma 3 1B, all weights)."""
WEIGHT_BYTES: Mapping[str, float] = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 0.5}
"""Of a base weight as it is read: in int8 it becomes bf16 on its way to the product, and all the traffic of four layers
of Qwen2.5-0.5B at 128 tokens falls by 4.7 bytes a weight."""
HOST_SECONDS = 0.004
"""Of a step on the host that the device waits for: an assumption."""


@dataclass(frozen=True)
class Work:
    """What a step does on one device: FLOPs, bytes moved in HBM, bytes that the all-reduce gives."""

    flops: float
    traffic: float
    reduced: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause: the larger of `compute` and `memory` counts, the others come on top.

    `measured` is the factor that `verify` found on this machine; None where it was not measured.
    """

    compute: float
    memory: float
    all_reduce: float
    host: float = HOST_SECONDS
    measured: float | None = None

    @property
    def seconds(self) -> float:
        """In all, as measured where it was."""
        return self.predicted * (self.measured or 1.0)

    @property
    def predicted(self) -> float:
        """In all, by roofline."""
        return max(self.compute, self.memory) + self.all_reduce + self.host


def work(config: TrainConfig, shape: Shape, plan: BatchPlan) -> Work:
    """The work of one update on one device.

    A matrix product of N weights takes 2 N FLOPs a token, its gradient to the input as many, to the weight as many
    where that is trained. remat=full adds the forward pass of the layers once more, but for the last product of the
    MLP, whose result nothing needs unless a norm follows (then a tiled MLP is even computed twice: for that norm, and
    tile by tile for its own gradient). remat=outputs adds of it the first product of each adapter, and attention as far
    as that keeps nothing: flash all of it, sdpa its scores. Attention takes 4 S n d a token forward, and 2.5 times
    that backward (five products for two); a kernel leaves out the half that the causal mask hides.
    """
    tokens, length, lora = plan.batch_size * config.data.max_length, config.data.max_length, config.lora
    compute = 4 if config.model.base_dtype == "fp32" else 2
    weights = sum(linear.inputs * linear.outputs for linear in shape.linears)
    remat, attention = rematerialized(config, shape), config.model.attention
    again = 1 if remat == "full" else 0
    last = shape.linears[-1].inputs * shape.linears[-1].outputs
    linear = weights * (2 + again + (0 if lora.r else 1))
    if not shape.norm_follows:
        linear -= again * last
    elif (config.optim.mlp_tile or tokens) < tokens and config.optim.scan_layers != "off":
        linear += again * sum(one.inputs * one.outputs for one in shape.linears if one.path.startswith("mlp"))
    adapters = trained_count(shape, lora) / shape.layers * (3 + again) if lora.r else 0.0
    if remat == "outputs":
        adapters += sum(one.inputs * lora.r * count for one, count in shape.adapted(lora)) / shape.layers
    seen = 1.0 if attention == "sdpa" else 0.5
    repeated = {"sdpa": 0.5, "flash": 1.0}.get(attention, 0.0) if remat == "outputs" else again
    scores = 2 * length * shape.heads * shape.head_dim * (3.5 + repeated) * seen
    head = shape.vocabulary * shape.hidden
    flops = 2 * tokens * (shape.layers * (linear + adapters + scores) + head * (2 if lora.r else 3))

    ends = sum(linear.inputs + linear.outputs for linear in shape.linears)
    chunks = -(-tokens // min(config.optim.loss_chunk, tokens))
    read = weights * (2 + again) * WEIGHT_BYTES[config.model.base_dtype]
    traffic = shape.layers * (TRAFFIC * ends * tokens * compute + read) + 2 * chunks * head * compute
    passes = plan.gradient_accumulation
    if config.model.attention == "sdpa":
        traffic += SCORES_TRAFFIC * shape.layers * tokens * length * shape.heads * compute
    update = UPDATE_TRAFFIC * 4.0 * trained_count(shape, lora)
    return Work(passes * flops, passes * traffic + update, 4.0 * trained_count(shape, lora))


def step_time(done: Work, chip: Chip, num_replicas: int, measured: float | None = None) -> StepTime:
    """The seconds that some work takes on a chip's devices.

    The all-reduce is a ring's: 2 (R - 1) / R of the bytes, over half of the interconnect (it counts both directions).
    Products of fp32 run at the bf16 peak, as the compiler turns what they take into bf16.

    Raises:
        ValueError: the chip's speed is not known.
    """
    if chip.bf16_flops is None:
        raise ValueError(f"how fast a {chip.name} is in bf16 is not known; choose another chip")
    peak = chip.bf16_flops / chip.devices_per_chip
    bandwidth = chip.hbm_bandwidth / chip.devices_per_chip
    ring = 2 * (num_replicas - 1) / num_replicas * done.reduced
    link = (chip.ici_bandwidth or 100e9) / 2 * ICI_EFFICIENCY
    return StepTime(
        compute=done.flops / (peak * MXU_EFFICIENCY),
        memory=done.traffic / (bandwidth * HBM_EFFICIENCY),
        all_reduce=ring / link,
        measured=measured,
    )


def host_rate() -> float:
    """FLOP/s of a matrix product in fp32 on this CPU, measured now in a tenth of a second; training reaches less."""
    import torch

    factor = torch.ones(512, 512)
    factor @ factor
    count, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < 0.1:
        factor @ factor
        count += 1
    return count * 2 * 512**3 / seconds


def factors() -> Mapping[str, float]:
    """The assumptions, by name."""
    return {
        "MXU_EFFICIENCY": MXU_EFFICIENCY, "HBM_EFFICIENCY": HBM_EFFICIENCY, "ICI_EFFICIENCY": ICI_EFFICIENCY,
        "HOST_SECONDS": HOST_SECONDS,
    }  # fmt: skip
