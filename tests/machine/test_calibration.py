"""Measurements of this machine are kept and used by `plan` and before training; nothing runs on a device here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.machine.test_checks import V5E, fake
from tests.support.compiler_models import QWEN2_500M, write_config
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.distributed import detection
from tpu_kit.machine import calibration
from tpu_kit.machine.calibration import Calibration
from tpu_kit.planning.planner import plan
from tpu_kit.planning.preflight import check_before_launch
from tpu_kit.planning.report import format_plans

GIB = 2**30


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A run on a machine with one v5e and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(detection, "gpu_count", lambda: 0)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    model = write_config(tmp_path / "qwen", QWEN2_500M)
    return load_config(None, [f"model.name={model}", "max_steps=10", "batch_size=4", "device_type=tpu"])


def measured(tmp_path: Path, **found: object) -> Calibration:
    known = replace(calibration.begin("v5e", tmp_path / "verify-report.json"), **found)  # type: ignore[arg-type]
    known.save()
    return known


def test_plan_uses_what_was_measured_and_says_so(config: TrainConfig, tmp_path: Path) -> None:
    (before,) = plan(config)
    assert "Time is estimated and was not measured; assumed" in format_plans(config, [before], details=True)
    known = measured(tmp_path, memory=1.25, time=1.5)
    (after,) = plan(config)
    assert after.time and before.time and after.time.seconds == pytest.approx(1.5 * before.time.seconds)
    assert after.run and before.run and after.run.run_hours == pytest.approx(1.5 * (before.run.run_hours or 0))
    assert after.where.limit == int(before.where.limit / 1.25), "each byte by the compiler's count takes 1.25"
    assert after.advice and before.advice and after.advice.largest_batch < before.advice.largest_batch
    assert str(known) in after.note and "memory 1.25 of the compiler's figure, step time 1.50 of the" in after.note
    text, peak = format_plans(config, [after], details=True), after.peak_bytes / GIB
    assert f"peak {peak:.2f} GiB predicted, {1.25 * peak:.2f} as measured on this machine, of 15.75" in text
    assert f"step {before.time.seconds:.3f} s predicted, {after.time.seconds:.3f} as measured on this machine" in text
    assert "Time is estimated, scaled by measurements of this machine for v5litepod-1" in text
    (other,) = plan(config, ["v6e"])
    assert other.note == "" and other.time and other.time.measured is None, "another chip was not measured"


def test_less_memory_than_the_compiler_says_makes_no_room(config: TrainConfig, tmp_path: Path) -> None:
    (before,) = plan(config)
    measured(tmp_path, memory=0.8)
    (after,) = plan(config)
    assert after.where.limit == before.where.limit
    assert f"{0.8 * after.peak_bytes / GIB:.2f} as measured on this machine" in format_plans(
        config, [after], details=True
    )


def test_before_a_training_the_outlook_says_it(config: TrainConfig, tmp_path: Path) -> None:
    at = fake(tmp_path / "root", V5E)
    assert "estimated, not measured" in str(check_before_launch(config, at=at))
    measured(tmp_path, memory=0.9, time=2.0)
    found = check_before_launch(config, at=at)
    assert found.time and found.setting
    assert f"as measured on this machine ({found.time.predicted:.3f} s estimated)" in str(found)
    assert f"GiB by formula, {0.9 * found.setting.peak_bytes / GIB:.2f} GiB as measured on this machine" in str(found)


@pytest.mark.parametrize(("splash", "pick"), [("", "auto"), ("too far off", "sdpa")])
def test_a_kernel_that_failed_is_not_taken(splash: str, pick: str, config: TrainConfig, tmp_path: Path) -> None:
    measured(tmp_path, splash=splash)
    found, (planned,) = check_before_launch(config, at=fake(tmp_path / "root", V5E)), plan(config)
    assert (found.config.model.attention, planned.config.model.attention) == (pick, pick)
    for text in (str(found), planned.note):
        assert ("WARNING: attention=auto is " + pick in text) == (pick != "auto")
        assert ("splash failed on this machine (too far off)" in text) == (pick != "auto")
    asked = replace(config, model=replace(config.model, attention="splash"))
    assert plan(asked)[0].config.model.attention == "splash", "as asked for"


def test_a_loop_that_failed_is_not_taken(config: TrainConfig, tmp_path: Path) -> None:
    at = fake(tmp_path / "root", V5E)
    before = check_before_launch(config, at=at)
    known = measured(tmp_path, scan="loss 7.1 (CPU: 6.5)")
    found = check_before_launch(config, at=at)
    assert found.config.optim.scan_layers == "off"
    assert found.setting and before.setting and found.setting.peak_bytes != before.setting.peak_bytes
    assert "WARNING: layers are unrolled: their loop failed on this machine (loss 7.1 (CPU: 6.5))" in str(found)
    assert f"see {known.report}, and run `python -m tpu_kit verify` again" in str(found)


@pytest.mark.parametrize("name", ["torch_xla", "libtpu", "tpu_kit's code"])
def test_what_other_versions_measured_is_ignored_with_a_line(name: str, config: TrainConfig, tmp_path: Path) -> None:
    now = calibration.begin("v5e", tmp_path).versions
    measured(tmp_path, memory=1.25, time=1.5, splash="no", versions={**now, name: "0.1"})
    (found,) = plan(config)
    assert found.time and found.time.measured is None and found.config.model.attention == "auto"
    assert (
        f"are ignored, because they were made with {name} 0.1 (now {now[name]}): run `python -m tpu_kit verify` again"
        in found.note
    )


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"device": "v5e", "colour": 1})])
def test_a_file_that_cannot_be_read_is_ignored_with_a_line(text: str, config: TrainConfig, tmp_path: Path) -> None:
    path = tmp_path / "cache/tpu_kit/calibration/v5e.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (found,) = plan(config)
    assert f"{path} is ignored, because it cannot be read (" in found.note


def test_a_cache_that_cannot_be_written_to_is_no_error(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file")
    measured(tmp_path, time=1.5)
    assert "only the report has the measurements" in capsys.readouterr().out
    assert calibration.load("v5e").time is None
