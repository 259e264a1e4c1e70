from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.child_processes import run_python
from tpu_kit.config.loader import load_config
from tpu_kit.diagnostics.doctor import check_device, judge
from tpu_kit.distributed import launch
from tpu_kit.hardware.machine import MARKS, Check, Machine

HAS_XLA = Machine().version("torch_xla") is not None
MEASURED: dict[str, Any] = {
    "device_type": "tpu", "device": None, "replicas": 4, "total": 10.0, "flops": 150e12, "width": 8192, "executions": 5,
    "compiles": 0, "fallbacks": 0, "used": 2**28, "limit": 2**34, "host_bytes": 2**30,
    "cores": [[10.0, 150e12, 2.0**28]] * 4,
}  # fmt: skip


def judged(tpu: str | None = "v5e", **changes: Any) -> dict[str, Check]:
    return {check.name: check for check in judge(MEASURED | changes, tpu)}


def test_judge() -> None:
    checks = judged()
    assert {check.status for check in checks.values()} == {"ok"}
    assert checks["All-reduce"].found == "sum of 1..4 is 10"
    assert checks["Compiles"].found == "none in 5 repeats of one shape, nothing run on the host"
    assert checks["Matmul speed"].found == "150 TFLOP/s a replica (bf16, 8192 wide), 76% of the peak of 197"
    assert checks["Device memory"].found == "16.00 GiB, 0.25 of them in use by the test"


def test_judge_failures() -> None:
    checks = judged(total=1.0, compiles=3, fallbacks=2, flops=20e12)
    assert checks["All-reduce"].status == "failure"
    assert checks["All-reduce"].found == "sum of 1..4 is 1, not 10: the replicas do not see each other"
    assert checks["All-reduce"].fix.startswith("unset CLOUD_TPU_TASK_ID TPU_CHIPS_PER_PROCESS_BOUNDS")
    assert checks["Compiles"].status == "failure"
    assert checks["Compiles"].found == "3 compiles and 2 operations on the host in 5 repeats of one shape"
    assert checks["Compiles"].fix == "unset XLA_USE_EAGER_DEBUG_MODE PT_XLA_DEBUG"
    assert checks["Matmul speed"].status == "warning"
    assert (
        "10% of the peak of 197" in checks["Matmul speed"].found
        and "nothing else running" in checks["Matmul speed"].fix
    )


@pytest.mark.parametrize(
    ("changes", "tpu", "text"),
    [
        ({"flops": 580e12}, "v7x", "50% of the peak of 1154"),  # a v7x chip is two devices
        ({"device_type": "cuda", "device": "NVIDIA H200", "flops": 600e12}, None, "61% of the peak of 989"),
        ({"device_type": "cuda", "device": "NVIDIA Nonesuch"}, None, "no peak is known"),
        ({"device_type": "cuda", "device": "Tesla T4"}, None, "no peak is known"),
        ({"device_type": "xla-cpu"}, "v5e", "no peak is known"),
    ],
)
def test_peak_is_of_one_device(changes: dict[str, Any], tpu: str | None, text: str) -> None:
    check = judged(tpu, **changes)["Matmul speed"]
    assert check.status == "ok" and text in check.found


def test_a_data_file_that_is_not_there_is_an_error_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    command = ["-m", "tpu_kit", "doctor", "data.source=row.jsonl", "device_type=tpu"]  # without a TPU no replica starts
    printed = run_python(command, cwd=tmp_path, env={"PJRT_DEVICE": None}, expect=1).stdout
    assert "✗ Files              data.source=row.jsonl: there is no such file or folder\n" in printed
    assert "-> data.source=rows.jsonl" in printed and "HF_HUB_OFFLINE=1 if" not in printed


def test_device_memory_unknown() -> None:
    check = judged(device_type="xla-cpu", used=None, limit=None)["Device memory"]
    assert check == Check("Device memory", "skipped", "xla-cpu has the host's")


def test_table() -> None:
    rows = [Check("TPU", "ok", "4 x v5e"), Check("Chip in use", "warning", "held by PID 7: python", "kill 7")]
    assert "\n".join(map(str, rows)) == (
        "✓ TPU                4 x v5e\n! Chip in use        held by PID 7: python\n                     -> kill 7"
    )
    assert list(MARKS.values()) == ["✓", "!", "✗", "–"]  # noqa: RUF001  a dash is meant


def test_fewer_replicas_than_there_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    one = MEASURED | {"device_type": "cpu", "replicas": 1, "total": 1.0, "cores": [[1.0, 1e9, 0.0]]}
    monkeypatch.setattr(launch, "launch", lambda *_: one)
    machine = Machine(environ={"CPU_NUM_DEVICES": "1"})
    rows = list(check_device(machine, load_config(None, ["device_type=cpu"]), 2))
    assert rows[0].status == "failure" and "1 on cpu" in rows[0].found
    assert rows[0].found.endswith(", but there should be 2") and rows[0].fix == "unset CPU_NUM_DEVICES"
    assert rows[1] == Check("All-reduce", "ok", "sum of 1..1 is 1")


def test_error_of_a_launch(tmp_path: Path) -> None:
    # Memory that this machine has not: launch refuses, and the row says why.
    config = load_config(None, ["device_type=xla-cpu", "num_replicas=2", "model.name=some/model-9000B"])
    if not HAS_XLA:
        pytest.skip("torch_xla is not installed")
    (check,) = check_device(Machine(), config, 2)
    assert check.status == "failure" and check.found.startswith("not enough host memory to start 2 replicas"), check


def run_doctor(
    *arguments: str, tmp_path: Path, expect: int = 0, env: dict[str, str | None] | None = None
) -> list[Check]:
    extra = {"HOME": str(tmp_path)} | (env or {})
    done = run_python(["-m", "tpu_kit", "doctor", "--json", *arguments], env=extra, cwd=tmp_path, expect=expect)
    return [Check(**row) for row in json.loads(done.stdout)]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_XLA, reason="torch_xla is not installed")
def test_two_replicas_on_xla_cpu(tmp_path: Path) -> None:
    checks = {check.name: check for check in run_doctor("device_type=xla-cpu", "num_replicas=2", tmp_path=tmp_path)}
    assert list(checks)[:2] == ["Python", "Packages"]
    assert list(checks)[-5:] == ["Replicas run", "All-reduce", "Compiles", "Matmul speed", "Device memory"]
    assert checks["Replicas run"].found.startswith("2 on xla-cpu, started and done in ")
    assert checks["All-reduce"] == Check("All-reduce", "ok", "sum of 1..2 is 3")
    assert [(core["core"], core["all-reduce"]) for core in checks["All-reduce"].cores] == [(0, 3), (1, 3)]
    assert all(core["TFLOP/s"] for core in checks["All-reduce"].cores)
    assert checks["Compiles"].found == "none in 5 repeats of one shape, nothing run on the host"
    assert checks["Matmul speed"].status == "ok" and "TFLOP/s a replica" in checks["Matmul speed"].found
    assert checks["Device memory"].status == "skipped"


def test_plain_cpu_prints_rows(tmp_path: Path) -> None:
    done = run_python(
        ["-m", "tpu_kit", "doctor", "device_type=cpu"],
        env={"HOME": str(tmp_path)},
        cwd=tmp_path,
    )
    rows = done.stdout.splitlines()
    assert rows[0].startswith("✓ Python") and any(
        row.startswith("✓ All-reduce         sum of 1..1 is 1") for row in rows
    )


def test_failure_ends_with_status_1_and_tries_no_device(tmp_path: Path) -> None:
    checks = {c.name: c for c in run_doctor("device_type=tpu", tmp_path=tmp_path, expect=1)}
    assert checks["TPU"].status == "failure"
    assert checks["Replicas run"] == Check("Replicas run", "skipped", "not tried: mend the failures above first")


def test_diagnose_stays_out_of_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from tpu_kit.diagnostics.doctor import diagnose\n"
        "from tpu_kit.config.loader import load_config\n"
        "for check in diagnose(load_config(None, ['device_type=xla-cpu'])):\n"
        "    if check.name == 'W&B': break\n"
        "assert 'torch' not in sys.modules and 'torch_xla' not in sys.modules"
    )
    run_python(code, env={"HOME": str(tmp_path)})
