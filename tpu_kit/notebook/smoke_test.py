"""Compares a device with the CPU and measures it: the functions that `verify` launches on the devices.

XLA:CPU runs the same code, with the splash kernel in Pallas' interpreter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from tpu_kit.config.loader import TrainConfig, batch_arithmetic
from tpu_kit.distributed.replica import runtime
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.model_loading import load_here
from tpu_kit.generation.sampling import Sampling
from tpu_kit.machine.chips import GIB
from tpu_kit.model import attention, splash_attention, trainable
from tpu_kit.model.meta_model import empty_model
from tpu_kit.training.objectives import SupervisedObjective
from tpu_kit.training.state import UpdateSums
from tpu_kit.training.step import Control, prepare_model, train_step
from tpu_kit.xla.pallas import SplashSettings

LENGTH = 2048
"""Tokens per row for the kernels: a usual length, and more than one block of the kernel."""
ROWS = 2
"""Rows per replica in the compared step."""
NEW_TOKENS = 24
# Width of the matrices, products per program, and timed executions: at least a tenth of a second on a TPU, so that the
# start of a program (about a millisecond) is negligible.
_MATMUL = {"tpu": (8192, 16, 5), "cuda": (8192, 16, 5)}
_MATMUL_CPU = (256, 4, 5)
WARM_UP, TIMED = 3, 10
"""Numbers of untimed and of timed steps."""
PROMPTS = (
    "Tom has 12 apples and gives 5 of them to Mia. How many apples does Tom have now?",
    "Leo has 3 trays of 6 coins. Leo gives away 17.",
    "3 boxes of 6 so",
    "Mia has 4 bags",
)


class Case(NamedTuple):
    """A case of attention: query heads, key-value heads (`pairs`), head size; segments in a row; window, soft cap."""

    heads: int
    pairs: int
    head_dim: int
    segments: bool = False
    window: int | None = None
    softcap: float | None = None


CASES = {
    "head size 64": Case(2, 2, 64),
    "head size 128": Case(2, 2, 128),
    "head size 256": Case(2, 2, 256),
    "grouped heads": Case(6, 2, 64),
    "segments": Case(4, 2, 128, segments=True),
    "window": Case(4, 2, 64, segments=True, window=300),
    "soft cap": Case(2, 1, 128, segments=True, softcap=2.0),
    "window and soft cap": Case(2, 1, 256, segments=True, window=300, softcap=2.0),
}
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def measure_cores(config: TrainConfig) -> dict[str, Any]:
    """Runs an all-reduce in all replicas, then repeatedly a program of bf16 matmuls; `config` has no effect.

    Returns:
        A dictionary, on every rank, with the keys

        - cores: a list by rank of dictionaries: core (the rank), all-reduce (the sum of every rank + 1), TFLOP/s and,
          if the device reports memory, GiB in use, the peak;
        - compiles, fallbacks: programs compiled and operations run on the host while the program was repeated.
    """
    rt = runtime.current()
    # Made on the host: on the device the value could become a constant, and replicas would have different programs.
    total = torch.tensor([rt.rank + 1.0]).to(rt.local_device)
    rt.all_reduce([total])
    rt.sync()
    summed = rt.to_host([total])[0].item()

    width, products, executions = _MATMUL.get(rt.device_type, _MATMUL_CPU)
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(256, width, generator=generator).repeat(width // 256, 1) / math.sqrt(width)
    weight = block.bfloat16().to(rt.local_device)

    def run(x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            for _ in range(products):
                x = x @ weight
            rt.sync()
        head = x[:1, :1].clone()
        rt.sync()
        rt.to_host([head])  # waits for the device
        return x

    x = run(run(weight, 1), 1)  # compiles
    before, start = rt.counters(), time.perf_counter()
    run(x, executions)
    seconds, after = time.perf_counter() - start, rt.counters()
    used, _ = rt.memory()
    cores = torch.zeros(3, rt.world_size)
    teraflops = 2 * width**3 * products * executions / seconds / 1e12
    cores[:, rt.rank] = torch.tensor([summed, teraflops, (used or 0) / GIB])
    cores = cores.to(rt.local_device)
    rt.all_reduce([cores])
    rt.sync()
    names = ("all-reduce", "TFLOP/s", *(["GiB in use"] if used is not None else []))
    rows = [dict(zip(names, core, strict=False)) for core in rt.to_host([cores])[0].T.tolist()]
    # Without XLA nothing is compiled, and there are no counters.
    counts = {name: after.get(name, 0) - before.get(name, 0) for name in ("compiles", "fallbacks")}
    return {"cores": [{"core": rank, **row} for rank, row in enumerate(rows)], **counts}


def compare_kernel(config: TrainConfig) -> dict[str, dict[str, float]]:
    """Compares the splash kernel in bf16 with plain attention in fp32 on the host; `config` has no effect.

    Returns:
        {case: {part: difference}} for the names in `CASES`. The parts are "output" and the gradients "query", "key" and
        "value". A difference is the norm of ours minus the expected result, over the norm of the expected result.
    """
    rt, differences = runtime.current(), {}
    for name, case in CASES.items():
        print(f"splash, {name}", flush=True)  # the report shows it if the process dies
        generator = torch.Generator().manual_seed(0)
        shapes = [(1, count, LENGTH, case.head_dim) for count in (case.heads, case.pairs, case.pairs, case.heads)]
        states = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
        segments = torch.ones(1, LENGTH, dtype=torch.int32)
        if case.segments:
            segments[:, LENGTH // 3 :], segments[:, -7:] = 2, 0
        ours = _differentiate(partial(_splash, case, rt), states, segments, rt, torch.bfloat16)
        expected = _differentiate(partial(_plain, case), states, segments, _host(), torch.float32)
        parts = zip(("output", "query", "key", "value"), ours, expected, strict=True)
        differences[name] = {part: float((a.float() - b).norm() / b.norm()) for part, a, b in parts}
    return differences


def _plain(
    case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: torch.Tensor
) -> torch.Tensor:
    """Returns plain attention's output, (rows, heads, tokens, head size), as `_splash`."""
    options: dict[str, Any] = {"sliding_window": case.window, "softcap": case.softcap}
    options["visibility"] = attention.Visibility(segments)
    return attention.sdpa_attention(torch.nn.Module(), query, key, value, None, **options)[0].transpose(1, 2)


def _splash(
    case: Case, rt: Runtime, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: torch.Tensor
) -> torch.Tensor:
    """Returns the kernel's output, called as the model's layers do; in Pallas' interpreter if there is no TPU."""
    settings = SplashSettings(case.window, case.softcap, interpret=rt.device_type != "tpu")
    return splash_attention.splash_kernel(query * case.head_dim**-0.5, key, value, segments, settings)


def _differentiate(
    attend: Attend, states: list[torch.Tensor], segments: torch.Tensor, rt: Runtime, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Returns output and gradients of query, key and value, on the host; computes in `dtype` on the device of `rt`.

    `states` are query, key, value and the gradient of the output.
    """
    query, key, value, upstream = (tensor.to(rt.local_device, dtype) for tensor in states)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = attend(query, key, value, segments.to(rt.local_device))
    results = [output.detach(), *torch.autograd.grad(output, inputs, upstream)]
    rt.sync()
    return rt.to_host(results)


def _host() -> Runtime:
    """Returns the runtime of a single replica on the host's CPU."""
    return CpuRuntime(0, 1, torch.device("cpu"))


# ------------------------------------------------------------------------------------------------------------ training


def compare_step(config: TrainConfig) -> dict[str, float] | None:
    """Takes a training step on all replicas, and the same step on the host with unrolled layers and plain attention.

    The model is of `config`, with random adapters, and has two rows of random tokens per replica.

    Returns:
        On rank 0: loss (nats per token) and grad_norm of the replicas, host_loss and host_grad_norm of the host; None
        on other ranks.
    """
    rt = runtime.current()

    def load() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        model = _model(config)
        return model, _rows(model, config, ROWS * rt.world_size)

    model, whole = runtime.load_once(rt, load)
    loss, norm = _step(model, config, rt, {name: tensor[rt.rank :: rt.world_size] for name, tensor in whole.items()})
    if rt.rank:
        return None
    settings = replace(config.model, attention="sdpa")
    plain = replace(config, model=settings, optim=replace(config.optim, scan_layers="off", remat="none"))
    host_loss, host_norm = _step(_model(plain), plain, _host(), whole)
    return {"loss": loss, "grad_norm": norm, "host_loss": host_loss, "host_grad_norm": host_norm}


def _model(config: TrainConfig) -> torch.nn.Module:
    """Loads a run's model with random adapters, equal in all processes; the B matrices are not zero."""
    model, generator = trainable.load_model(config.model, config.lora), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # if B is zero, the gradient of A is zero
            parameter.data = 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def _step(
    model: torch.nn.Module, config: TrainConfig, rt: Runtime, batch: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Trains a step on a replica's `batch`; returns loss (nats per token) and gradient norm over all replicas."""
    report = UpdateSums.unpack(_stepper(model, config, rt, batch)(1).tolist())
    return report.loss / max(report.weight, 1), report.grad_norm


def _stepper(
    model: torch.nn.Module, config: TrainConfig, rt: Runtime, batch: dict[str, torch.Tensor]
) -> Callable[[int], torch.Tensor]:
    """Moves model and batch to the device; returns a function that trains a number of steps at a rate of 1e-4.

    It returns the last step's report, on the host, for `UpdateSums.unpack`.
    """
    state = prepare_model(model, config, rt)
    sent, rest = rt.to_device([batch, {"control": torch.tensor(Control(1e-4, 1.0, 1.0))}])
    rt.sync()
    rt.barrier()

    def run(steps: int) -> torch.Tensor:
        for _ in range(steps):
            train_step(model, state, [sent], rest["control"], SupervisedObjective(config.optim), config.optim, rt)
            rt.sync()
        return rt.to_host([state.report])[0]

    return run


def _rows(model: Any, config: TrainConfig, count: int) -> dict[str, torch.Tensor]:
    """Returns a batch of `count` rows, (count, data.max_length), of two documents; random tokens, always the same.

    It has input_ids below the size of the model's embedding, labels (the same), position_ids and segment_ids (1, 2).
    """
    vocabulary, length = model.get_input_embeddings().num_embeddings, config.data.max_length
    ids = torch.randint(2, vocabulary, (count, length), generator=torch.Generator().manual_seed(1))
    first = length // 3
    positions = torch.cat([torch.arange(first), torch.arange(length - first)]).repeat(count, 1)
    segments = torch.ones_like(ids)
    segments[:, first:] = 2
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "segment_ids": segments}


def measure_step(config: TrainConfig) -> dict[str, float | None]:
    """Trains a model with random weights for `WARM_UP` + `TIMED` steps on the same optim.batch_size rows per replica.

    Returns:
        A dictionary: seconds, the mean of a timed step; peak_bytes, the peak of device memory, None if it is not
        counted.
    """
    rt = runtime.current()
    model = trainable.adapt(empty_model(config), config.lora, config.model.base_dtype).train()
    run = _stepper(model, config, rt, _rows(model, config, batch_arithmetic(config, rt.world_size).batch_size))
    run(WARM_UP)
    start = time.perf_counter()
    run(TIMED)
    return {"seconds": (time.perf_counter() - start) / TIMED, "peak_bytes": rt.memory()[0]}


# ---------------------------------------------------------------------------------------------------------- generation


def compare_tokens(config: TrainConfig) -> dict[str, float]:
    """Completes the same prompts on the device and the host with greedy decoding.

    Returns:
        A dictionary with the keys

        - tokens: number of tokens that the device generated;
        - equal: number of tokens that the host generated at the same position;
        - gap: largest difference of host logits between the host's choice and the device's token after the same
          prefix. It is 0 if both choose the same tokens, and small if two tokens are nearly equally likely.
    """
    host = _host()
    ours, theirs = (_complete(config, rt) for rt in (runtime.current(), host))
    model, tokenizer = load_here(config, None, host)
    gaps, equal = [0.0], 0
    for text, tokens, expected in zip(PROMPTS, ours, theirs, strict=True):
        prompt = tokenizer(text)["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        gaps.append(float((logits.max(dim=1).values - chosen).max()))
        equal += sum(a == b for a, b in zip(tokens, expected, strict=False))
    return {"tokens": sum(map(len, ours)), "equal": equal, "gap": max(gaps)}


def _complete(config: TrainConfig, rt: Runtime) -> list[list[int]]:
    """Returns the tokens that the model adds greedily to all `PROMPTS`, at most `NEW_TOKENS` per prompt."""
    model, tokenizer = load_here(config, None, rt)
    generator = Generator(
        model, tokenizer, rt, data=config.data, max_prompt=64, max_new_tokens=NEW_TOKENS, batch_size=len(PROMPTS)
    )
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    return [list(reply.tokens) for reply in generator.generate(prompts, Sampling(NEW_TOKENS))]
