"""Checks the machine for a run, in order; each row has the result and the exact command that fixes it.

    python -m tpu_kit doctor [--json] [config.yaml] [key=value ...]

It initialises no device and starts no process: `machine` and `host` read files. `verify` runs the devices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from tpu_kit.config.loader import TrainConfig, as_trained
from tpu_kit.machine import checks as machine
from tpu_kit.machine import host
from tpu_kit.machine.checks import Check, Machine


def diagnose(config: TrainConfig | None = None, at: Machine | None = None) -> Iterator[Check]:
    """Checks the machine for a run, by default the default one; yields the rows one by one, the quick ones first."""
    from tpu_kit.distributed.replica import runtime

    config, at = as_trained(config or TrainConfig()), at or Machine()
    asked, replicas, used = config.launch.device_type, None, "cpu"
    yield machine.check_python(at)
    yield machine.check_packages(at, asked == "tpu" or (asked == "auto" and bool(at.tpu_signs())))
    yield machine.check_process(at)
    yield machine.check_tpu(at, asked == "tpu")
    yield machine.check_metadata(at)
    yield machine.check_holder(at)
    yield machine.check_settings(at)
    try:
        backend = runtime.detect(config.launch, at)
    except (ValueError, ImportError, OSError) as error:  # to count GPUs it loads torch, which may be broken
        fix = "" if asked == "auto" else "device_type=auto, without num_replicas"
        yield Check("Device type", "failure", " ".join(str(error).split()), fix)
    else:
        replicas, used = backend.num_replicas, backend.device_type
        yield Check("Device type", "ok", str(backend))
    if at.gpus():
        wanted = asked == "cuda" or (asked == "auto" and used in ("cuda", "cpu"))
        yield machine.check_gpu(at, wanted, runtime.gpu_count() if wanted else 0)
    yield host.check_memory(at, config, replicas or at.tpu_devices() or 1)
    yield host.check_disk(at, config)
    yield host.check_files(config)
    yield host.check_hub(at, config)
    yield host.check_wandb(at, config)
    if config.on_policy:
        yield _check_rollouts(at, config, (replicas or at.tpu_devices() or 1) if at.tpus() else None)


def _check_rollouts(at: Machine, config: TrainConfig, tpu_replicas: int | None) -> Check:
    """Checks what a run that samples needs: one host, rewards that are there, and rows that a TPU computes whole."""
    from tpu_kit.distributed.hosts import find_hosts
    from tpu_kit.generation.evaluation.rewards import Rewards
    from tpu_kit.planning.rollouts import warnings_of

    try:
        judges = "the teacher" if config.distill.on_policy else ", ".join(Rewards(config).names)
        hosts = find_hosts(at).count
    except ValueError as error:
        return Check("Rollouts", "failure", str(error), "rl.reward_funcs=[auto]")
    sizes = f"{config.rl.prompts_per_rollout} prompts x {config.num_generations} completions"
    text = f"{sizes} a rollout, judged by {judges}"
    if hosts > 1:
        return Check(
            "Rollouts", "failure", f"{text}; completions are exchanged within one host, not {hosts}", "one host"
        )
    if tpu_replicas and (notes := warnings_of(config, tpu_replicas)):
        return Check("Rollouts", "warning", text, notes[0])
    return Check("Rollouts", "ok", text)


def report(config: TrainConfig, as_json: bool = False) -> int:
    """Prints the rows one by one, or all as a list of JSON objects; returns 0, or 1 if there is a failure."""
    checks = []
    for check in diagnose(config):
        checks.append(check)
        if not as_json:
            print(check, flush=True)
    if as_json:
        print(json.dumps([asdict(check) for check in checks], ensure_ascii=False, indent=1))
    return int(any(check.status == "failure" for check in checks))
