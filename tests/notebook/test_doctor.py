from __future__ import annotations

import json
from pathlib import Path

from tests.support.child_processes import run_python
from tpu_kit.machine.checks import MARKS, Check


def test_a_data_file_that_is_not_there_is_an_error_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    command = ["-m", "tpu_kit", "doctor", "data.source=row.jsonl", "device_type=tpu"]  # without a TPU no replica starts
    printed = run_python(command, cwd=tmp_path, env={"PJRT_DEVICE": None}, expect=1).stdout
    assert "✗ Files              data.source=row.jsonl: there is no such file or folder\n" in printed
    assert "-> data.source=rows.jsonl" in printed and "HF_HUB_OFFLINE=1 if" not in printed


def test_table() -> None:
    rows = [Check("TPU", "ok", "4 x v5e"), Check("Chip in use", "warning", "held by PID 7: python", "kill 7")]
    assert "\n".join(map(str, rows)) == (
        "✓ TPU                4 x v5e\n! Chip in use        held by PID 7: python\n                     -> kill 7"
    )
    assert list(MARKS.values()) == ["✓", "!", "✗", "–"]  # noqa: RUF001  a dash is meant


def run_doctor(
    *arguments: str, tmp_path: Path, expect: int = 0, env: dict[str, str | None] | None = None
) -> list[Check]:
    extra = {"HOME": str(tmp_path)} | (env or {})
    done = run_python(["-m", "tpu_kit", "doctor", "--json", *arguments], env=extra, cwd=tmp_path, expect=expect)
    return [Check(**row) for row in json.loads(done.stdout)]


def test_plain_cpu_prints_rows(tmp_path: Path) -> None:
    done = run_python(
        ["-m", "tpu_kit", "doctor", "device_type=cpu"],
        env={"HOME": str(tmp_path)},
        cwd=tmp_path,
    )
    rows = done.stdout.splitlines()
    assert rows[0].startswith("✓ Python")
    assert any(row.startswith("✓ Device type        device_type=cpu, 1 replica(s): as configured") for row in rows)


def test_failure_ends_with_status_1(tmp_path: Path) -> None:
    checks = {c.name: c for c in run_doctor("device_type=tpu", tmp_path=tmp_path, expect=1)}
    assert checks["TPU"].status == "failure"


def test_it_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from tpu_kit.notebook.doctor import diagnose\n"
        "from tpu_kit.config.loader import load_config\n"
        "list(diagnose(load_config(None, ['device_type=xla-cpu'])))\n"
        "assert 'torch' not in sys.modules and 'torch_xla' not in sys.modules"
    )
    run_python(code, env={"HOME": str(tmp_path)})
