"""Checks whether this machine can start a run; each row has a result and the exact command that fixes a problem.

    python -m tpu_kit doctor [--json] [config.yaml] [key=value ...]

It initialises no device and starts no process: `machine.checks` and `host` read files. `verify` runs the devices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from tpu_kit.config.loader import TrainConfig, as_trained
from tpu_kit.machine import capacity, host
from tpu_kit.machine import checks as machine
from tpu_kit.machine.checks import Check, Machine


def diagnose(config: TrainConfig | None = None, at: Machine | None = None) -> Iterator[Check]:
    """Yields the results of checks of `at` (None: this machine) for a run (None: the defaults), quick checks first.

    They are of Python, packages, this process, TPU, device type, GPUs if there are any, memory, disk, the run's files,
    the hub, W&B and, for `grpo`, rollouts. Requests go to the hub and, on a machine with TPU chips, to the metadata
    server.
    """
    from tpu_kit.distributed import detection
    from tpu_kit.training.losses.rollout_programs import check_rollouts

    config, at = as_trained(config or TrainConfig()), at or Machine()
    asked, replicas, used = config.launch.device_type, None, "cpu"
    yield machine.check_python(at)
    on_tpu = asked == "tpu" or (asked == "auto" and bool(at.tpu_signs()))
    yield machine.check_packages(at, on_tpu, asked == "torch-tpu")
    yield machine.check_process(at)
    yield machine.check_tpu(at, asked in ("tpu", "torch-tpu"))
    yield machine.check_metadata(at)
    yield machine.check_holder(at)
    yield machine.check_settings(at)
    try:
        backend = detection.detect(config.launch, at)
    except (ValueError, ImportError, OSError) as error:  # `detect` loads torch to count GPUs; torch may be broken
        fix = "" if asked == "auto" else "device_type=auto, without num_replicas"
        yield Check("Device type", "failure", " ".join(str(error).split()), fix)
    else:
        replicas, used = backend.num_replicas, backend.device_type
        yield Check("Device type", "ok", str(backend))
    if at.gpus():
        wanted = asked == "cuda" or (asked == "auto" and used in ("cuda", "cpu"))
        yield machine.check_gpu(at, wanted, detection.gpu_count() if wanted else 0)
    yield capacity.check_memory(at, config, replicas or at.tpu_devices() or 1)
    yield capacity.check_disk(at, config)
    yield host.check_files(config)
    yield host.check_hub(at, config)
    yield host.check_wandb(at, config)
    yield from check_rollouts(at, config, (replicas or at.tpu_devices() or 1) if at.tpus() else None)


def print_findings(config: TrainConfig, as_json: bool = False) -> int:
    """Prints the results of `diagnose` as they arrive, or all as a JSON list; returns 1 if any is a failure, else 0."""
    checks = []
    for check in diagnose(config):
        checks.append(check)
        if not as_json:
            print(check, flush=True)
    if as_json:
        print(json.dumps([asdict(check) for check in checks], ensure_ascii=False, indent=1))
    return int(any(check.status == "failure" for check in checks))
