"""Checks the machine for a run, in order; each row has the result and the exact command that fixes it.

    python -m tpu_kit doctor [--json] [config.yaml] [key=value ...]

This process initialises no device: `machine` and `host` read files. The checks that need a device run last, in the
processes of a launch, as a training run does. Each row is printed at once.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, TextIO

from tpu_kit.config.loader import TrainConfig
from tpu_kit.hardware import chips, host, machine
from tpu_kit.hardware.chips import GIB
from tpu_kit.hardware.machine import Check, Machine

_LAUNCH_SECONDS = 240.0
# Width of the matrices, products in one program, and timed executions of it: a tenth of a second or more on a TPU, so
# that starting a program (about a millisecond) does not count.
_MATMUL = {"tpu": (8192, 16, 5), "cuda": (8192, 16, 5)}
_MATMUL_CPU = (256, 4, 5)
_SLOW_SHARE = 0.4  # of the peak; a matmul of this size should reach 70 % or more


def diagnose(config: TrainConfig | None = None, at: Machine | None = None) -> Iterator[Check]:
    """Checks the machine for a run of this config; yields the rows one by one, the quick ones first.

    Args:
        config: the run; the default one by default.
        at: the machine; this one by default.
    """
    from tpu_kit.distributed import runtime

    config, at = config or TrainConfig(), at or Machine()
    tpus, asked, failed, replicas = at.tpus(), config.launch.device_type, False, None
    for check in (
        machine.check_python(at),
        machine.check_packages(at, asked == "tpu" or (asked == "auto" and bool(tpus))),
        machine.check_process(at),
        machine.check_tpu(at, asked == "tpu"),
        machine.check_metadata(at),
        machine.check_holder(at),
        machine.check_settings(at),
    ):
        failed = failed or check.status == "failure"
        yield check
    try:
        backend = runtime.detect(config.launch, at)
    except (ValueError, ImportError, OSError) as error:  # to count GPUs it loads torch, which may be broken
        failed = True
        yield Check("Device type", "failure", " ".join(str(error).split()), "device_type=auto, without num_replicas")
    else:
        replicas = backend.num_replicas
        yield Check("Device type", "ok", str(backend))
    replicas = replicas or at.tpu_devices() or 1
    yield host.check_memory(at, config, replicas)
    yield host.check_disk(at, config)
    yield host.check_files(config)
    yield host.check_hub(at, config)
    yield host.check_wandb(at, config)
    if failed:
        yield Check("Replicas run", "skipped", "not tried: mend the failures above first")
    else:
        yield from check_device(at, config, replicas)


def probe(config: TrainConfig) -> dict[str, Any]:
    """Runs in each replica an all-reduce, and repeatedly a program of bf16 matmuls.

    Returns:
        Plain values: device_type, device (CUDA's name), replicas, total (the sum of rank + 1 over the replicas), flops
        (FLOP/s of this replica), width and executions of the matmul, compiles and fallbacks (programs compiled, and
        operations run on the host, while it was repeated), used and limit (bytes of device memory, None if the backend
        does not tell), host_bytes (peak of this process), cores (of each replica: sum, flops, used).
    """
    import torch

    from tpu_kit.distributed import runtime

    rt = runtime.current()
    # Made on the host: on the device it could become a constant, and each replica would have another program.
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
        rt.to_host([head])  # waits
        return x

    x = run(run(weight, 1), 1)  # which compiles
    before, start = rt.counters(), time.perf_counter()
    run(x, executions)
    seconds, after = time.perf_counter() - start, rt.counters()
    used, limit = rt.memory()
    flops = 2 * width**3 * products * executions / seconds
    cores = torch.zeros(3, rt.world_size)
    cores[:, rt.rank] = torch.tensor([summed, flops, float(used or 0)])
    cores = cores.to(rt.local_device)
    rt.all_reduce([cores])
    rt.sync()
    return {
        "device_type": rt.device_type,
        "device": torch.cuda.get_device_name() if rt.device_type == "cuda" else None,
        "replicas": rt.world_size,
        "total": summed,
        "flops": flops,
        "width": width,
        "executions": executions,
        # Off XLA there are no counters, and nothing is compiled.
        **{name: after.get(name, 0) - before.get(name, 0) for name in ("compiles", "fallbacks")},
        "used": used,
        "limit": limit,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "cores": rt.to_host([cores])[0].T.tolist(),
    }


def check_device(at: Machine, config: TrainConfig, replicas: int, seconds: float = _LAUNCH_SECONDS) -> Iterator[Check]:
    """Launches `probe` as a training run, and judges its measurements.

    Args:
        at: the machine, whose chip has the peak to compare with.
        config: its `launch` section chooses the device and the replicas.
        replicas: the least number of replicas; more are right if the TPU has several hosts.
        seconds: time limit of the launch.
    """
    from tpu_kit.distributed.launch import LaunchError, launch

    name, start = "Replicas run", time.monotonic()
    config = replace(config, launch=replace(config.launch, hang_timeout=min(config.launch.hang_timeout, seconds / 2)))
    retry = "python -m tpu_kit doctor device_type=xla-cpu num_replicas=2 tells whether it is the software or the TPU"
    try:
        with captured(io.StringIO()):
            measured = launch(probe, config, seconds)
    except (LaunchError, ValueError) as error:
        yield Check(name, "failure", brief(error), retry)
        return
    text = f"{measured['replicas']} on {measured['device_type']}, started and done in {time.monotonic() - start:.0f} s"
    if measured["replicas"] < replicas:
        preset = [variable for variable in ("CPU_NUM_DEVICES", *machine.PER_PROCESS) if variable in at.environ]
        fix = machine.unset(preset) if preset else retry
        yield Check(name, "failure", f"{text}, but there should be {replicas}", fix)
    else:
        yield Check(name, "ok", f"{text}; rank 0's process took {measured['host_bytes'] / GIB:.1f} GiB of host memory")
    yield from judge(measured, next(iter(at.tpus()), None))


@contextlib.contextmanager
def captured(output: TextIO) -> Iterator[None]:
    """Sends what this process prints into `output`."""
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield


def brief(error: Exception) -> str:
    """Returns the first line of an error's text, and its last line that names an error, or else its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    named = [line for line in lines[1:] if re.match(r"[\w.]+(Error|Exception)\b|Fatal Python error", line)]
    return " ".join([lines[0], *(named or lines[1:])[-1:]])[:400]


def judge(measured: Mapping[str, Any], tpu: str | None) -> Iterator[Check]:
    """Turns the measurements of `probe` into rows; `tpu` is the name of the machine's chip."""
    replicas = measured["replicas"]
    expected = replicas * (replicas + 1) / 2
    peak = _peak(measured["device"] or tpu) if measured["device_type"] in ("cuda", "tpu") else None
    limit = measured["limit"]
    cores = tuple(
        {"core": rank, "all-reduce": total, "TFLOP/s": flops / 1e12}
        | ({"of the peak": f"{flops / peak:.0%}"} if peak else {})
        | ({"GiB in use": used / GIB, "GiB in all": limit / GIB} if limit else {})
        for rank, (total, flops, used) in enumerate(measured["cores"])
    )
    total = f"sum of 1..{replicas} is {measured['total']:g}"
    if measured["total"] == expected:
        yield Check("All-reduce", "ok", total, cores=cores)
    else:
        text = f"{total}, not {expected:g}: the replicas do not see each other"
        yield Check("All-reduce", "failure", text, machine.unset(machine.PER_PROCESS), cores)

    repeats = f"{measured['executions']} repeats of one shape"
    if measured["compiles"] or measured["fallbacks"]:
        text = f"{measured['compiles']} compiles and {measured['fallbacks']} operations on the host in {repeats}"
        yield Check("Compiles", "failure", text, machine.unset(["XLA_USE_EAGER_DEBUG_MODE", "PT_XLA_DEBUG"]))
    else:
        yield Check("Compiles", "ok", f"none in {repeats}, nothing run on the host")

    text = f"{measured['flops'] / 1e12:.3g} TFLOP/s a replica (bf16, {measured['width']} wide)"
    if peak is None:
        yield Check("Matmul speed", "ok", f"{text}; no peak is known to compare with")
    else:
        share = measured["flops"] / peak
        slow = "python -m tpu_kit doctor again with nothing else running; if it stays, another machine"
        text += f", {share:.0%} of the peak of {peak / 1e12:.0f}"
        fast = share >= _SLOW_SHARE
        yield Check("Matmul speed", "ok" if fast else "warning", text, "" if fast else slow)

    if limit is None:
        yield Check("Device memory", "skipped", f"{measured['device_type']} has the host's")
    else:
        used = measured["used"] / GIB
        yield Check("Device memory", "ok", f"{limit / GIB:.2f} GiB, {used:.2f} of them in use by the test")


def _peak(device: str | None) -> float | None:
    """Peak bf16 FLOP/s of one replica's device, which may be a part of a chip."""
    try:
        chip = chips.chip(device or "")
    except ValueError:
        return None
    return chip.bf16_flops and chip.bf16_flops / chip.devices_per_chip


def report(config: TrainConfig, as_json: bool = False) -> int:
    """Prints the rows one by one, or all of them as a list of JSON objects.

    Returns:
        0, or 1 if there is a failure.
    """
    checks = []
    for check in diagnose(config):
        checks.append(check)
        if not as_json:
            print(check, flush=True)
    if as_json:
        print(json.dumps([asdict(check) for check in checks], ensure_ascii=False, indent=1))
    return int(any(check.status == "failure" for check in checks))
