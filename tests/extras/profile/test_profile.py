"""Profiles of real runs, predictions from a compiled program, and refusals of bad input."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.conftest import world
from tests.support import profile_functions
from tests.support.compiler_models import TINY, write_config
from tpu_kit.cli import main
from tpu_kit.config.loader import ConfigError, TrainConfig, load_config
from tpu_kit.extras.profile import profile as profiling
from tpu_kit.extras.profile.profile import Profile, profile
from tpu_kit.extras.profile.recorder import record
from tpu_kit.extras.profile.timeline import PREFIX, Event, Trace, read_trace
from tpu_kit.machine.checks import Machine
from tpu_kit.planning.compiler.compile_check import Compiled, Operation

__all__ = ["world"]
pytestmark = pytest.mark.usefixtures("quick_xla")
needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
STEPS = 6

HEALTHY: dict[str, Any] = {"batch_size": 16}  # with fewer rows, Python between the operations takes a large share

Run = Callable[..., Profile]


def settings(world: Path, folder: Path, **changes: Any) -> TrainConfig:
    return load_config(None, {
        "model.name": str(world / "model"), "base_dtype": "fp32", "lora.r": 4, "source": str(world / "rows.jsonl"),
        "max_length": 128, "eval_rows": 8, "max_steps": 50, "loss_chunk": 64, "batch_size": 2, "remat": "none",
        "output_dir": str(folder), "device_type": "cpu", "num_replicas": 1, **changes,
    })  # fmt: skip


@pytest.fixture(scope="module")
def run(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Profiles a run with each fault, once per fault."""
    made: dict[str, Profile] = {}

    def get(what: Callable[[TrainConfig], None] = record, **changes: Any) -> Profile:
        key = f"{what.__name__} {changes}"
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(profiling, "record", what)
                made[key] = profile(settings(world, tmp_path_factory.mktemp("run"), **changes), STEPS)
        return made[key]

    return get


def test_the_parts_of_a_step_add_up_to_it(run: Run) -> None:
    found = run()
    assert found.trace is not None and found.trace.steps == STEPS and found.folder is not None
    start, end = found.trace.window
    traced = (end - start) / STEPS
    assert sum(found.trace.split().values()) == pytest.approx(traced, rel=1e-6)
    assert found.seconds == pytest.approx(traced)
    assert found.share("unexplained") < 0.05 and found.split["device compute"] > 0
    assert sum(found.recordings[0].phases.values()) / STEPS == pytest.approx(traced, rel=0.3)
    assert any("Backward" in one.name for one in found.costs), "operations of the backward pass too"


@pytest.mark.parametrize("bucket", ["input wait", "host code", "host tracing", "device compute"])
def test_a_planted_delay_lands_in_its_bucket(run: Run, bucket: str) -> None:
    found = run(profile_functions.slow_everywhere)
    assert found.trace is not None
    rows = json.loads(((found.folder or Path()) / "trace.json").read_text())["traceEvents"]
    name = profile_functions.PLANTED + bucket
    starts = [(row["ts"] / 1e6, row["dur"] / 1e6) for row in rows if row.get("name") == name]
    planted = [(start, start + taken) for start, taken in starts if start > found.trace.window[0]][:STEPS]
    assert len(planted) == STEPS
    for start, end in planted:
        assert end - start >= 0.99 * profile_functions.DELAY
        landed = Trace(1, found.trace.events, (start, end)).split()
        assert landed[bucket] == pytest.approx(end - start, rel=0.1), landed
    assert found.trace.split()[bucket] >= 0.9 * profile_functions.DELAY
    assert {"input wait", "host code"} <= {one.rule for one in found.advice}


@pytest.mark.slow
def test_a_healthy_run_has_no_advice(run: Run) -> None:
    assert run(**HEALTHY).advice == []


def test_the_report_has_tables_a_picture_and_the_trace(run: Run) -> None:
    found = run()
    text, folder = str(found), found.folder or Path()
    assert f"measured over {STEPS} steps" in text and found.device == "this host" and found.replicas == 1
    assert "Time of a step" in text and "Operations that cost most" in text
    assert folder.joinpath("profile.png").read_bytes() == found._repr_png_()
    assert found._repr_png_().startswith(b"\x89PNG")
    assert "traceEvents" in json.loads(folder.joinpath("trace.json").read_text())


def test_overlapping_work_and_collectives_are_counted_once() -> None:
    """By hand: 0..10 of one step; compute 1..4, a collective 3..6 of which 4..6 is exposed."""
    phases = [("input", 0, 1), ("step", 1, 2), ("dispatch", 2, 3), ("host", 3, 9)]
    events = [Event(name, "phase", start, end, step=1) for name, start, end in phases]
    events += [
        Event("dot.1", "matrix product", 1, 3, "a"), Event("fusion", "elementwise", 2, 4, "a"),
        Event("all-reduce.1", "collective", 3, 6, "a"),
    ]  # fmt: skip
    assert Trace(1, events, (0, 10)).split() == {
        "device compute": 3, "exposed collectives": 2, "input wait": 1, "host tracing": 0, "host code": 3,
        "unexplained": 1,
    }  # fmt: skip


def test_the_command_prints_the_report(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pushed = {"model_id": "ann/tuned", "checkpoint.source": "hf://ann/tuned"}  # a profile does not
    (tmp_path / "my.yaml").write_text(settings(world, tmp_path / "run", **pushed).to_yaml())
    assert main(["profile", str(tmp_path / "my.yaml"), "steps=2"]) == 0
    printed = capsys.readouterr().out
    assert "measured over 2 steps" in printed and "Advice" in printed


# ----------------------------------------------------------------------------------------------------------- bad input


def test_bad_traces_are_told_in_a_line(run: Run, tmp_path: Path) -> None:
    good = (run().folder or Path()) / "trace.json"
    with pytest.raises(ValueError, match=f"there is no trace in {tmp_path}: profile the run again"):
        read_trace(tmp_path, 3)
    text = good.read_text()
    (tmp_path / "trace.json").write_text(text[: len(text) // 2])
    with pytest.raises(
        ValueError, match=r"trace.json cannot be read .* the trace is cut short \([\d,]+ bytes; was the"
    ):
        read_trace(tmp_path, 3)
    (tmp_path / "trace.json").write_text(json.dumps({"events": []}))
    with pytest.raises(ValueError, match="or of another version of the profiler: profile the run again"):
        read_trace(tmp_path, 3)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "matrix product"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_kernel0_0", "matrix product"),
        ("triton_red_fused__log_softmax__to_copy_add_arange_eq_exp_mul_ne_prepare_softmax_online_sum_0", "elementwise"),
        ("triton_poi_fused_addmm_copy_3", "elementwise"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collective"),
    ],
)
def test_kernels_of_a_gpu_are_of_the_kind_that_they_are(name: str, kind: str, tmp_path: Path) -> None:
    phases = [("input", 0, 1), ("step", 1, 8), ("dispatch", 8, 9), ("host", 9, 10)]
    rows: list[dict[str, Any]] = [
        {"cat": "user_annotation", "name": f"{PREFIX}{phase}", "ts": start, "dur": end - start, "tid": 1}
        for phase, start, end in phases
    ]
    rows.append({"cat": "kernel", "name": name, "ts": 3, "dur": 2, "tid": 7, "args": {"device": 0}})
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": rows}))
    (event,) = [one for one in read_trace(tmp_path, 1).events if one.device]
    assert (event.name, event.kind, event.device) == (name, kind, "/device:0")


def test_a_run_that_is_over_before_the_window(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "record", profile_functions.stops)
    with pytest.raises(ValueError, match="the run ended before the 3 traced steps, which begin after step 5"):
        profile(settings(world, tmp_path), 3)


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="steps=0: must be 1 to 200"):
        profile(load_config(), 0)
    assert main(["profile", "embedded-cot", "steps=201"]) == 2
    assert "steps" in capsys.readouterr().err
    assert main(["profile", "embedded-cot", "chip=v9"]) == 1
    assert "v9" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ XLA, compiler


@needs_xla
@pytest.mark.slow
def test_on_xla_the_devices_time_is_in_the_trace(run: Run) -> None:
    found = run(device_type="xla-cpu", num_replicas=2, remat="outputs")
    assert found.trace is not None and found.trace.steps >= 2
    assert found.share("unexplained") < 0.05 and found.split["exposed collectives"] > 0
    assert len(found.recordings) == 2 and found.recordings[0].counts["compiles"] == 0
    assert found.recordings[0].counts["fallbacks"] == 0
    assert {"collective", "phase"} < {one.kind for one in found.trace.events}
    (path,) = (found.folder or Path()).rglob("*.xplane.pb")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="the trace is cut short"):
        read_trace(found.folder or Path(), 3)


@needs_xla
@pytest.mark.slow
def test_a_slow_replica_is_named(run: Run) -> None:
    found = run(profile_functions.slow_rank, device_type="xla-cpu", num_replicas=2, remat="outputs")
    (advice,) = [one for one in found.advice if one.rule == "slow replica"]
    assert advice.figure.startswith("replica 1 takes") and "verify" in advice.change


@needs_xla
@pytest.mark.slow
def test_on_xla_compiles_are_told(run: Run) -> None:
    compiled = run(profile_functions.recompiles, device_type="xla-cpu", num_replicas=1, remat="outputs")
    assert compiled.recordings[0].counts["compiles"] >= STEPS
    assert "recompilation" in [one.rule for one in compiled.advice]


def test_a_predicted_profile_has_the_times_of_the_cost_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"base products": 0.2, "other": 0.07}
    operations = (
        Operation("model/mm", "a.py:1", "matrix product", 1e12, 1e9, 0.2), Operation("", "", "copy", 0.0, 1e9, 0.05),
    )  # fmt: skip
    step = Compiled(
        topology="v5e:1x1", fits=True, limit_bytes=2**34, total_bytes=2**30, flops=1e12, hbm_bytes=2e9, estimated=spent,
        operations=operations, trace_seconds=1.0, compile_seconds=1.0, libtpu="0.0.21", program="x",
    )  # fmt: skip
    monkeypatch.setattr(profiling, "compile_step", lambda *_, **__: step)
    model = write_config(tmp_path / "tiny", TINY)
    found = profile(load_config(None, [f"model.name={model}", "max_length=256", "batch_size=4"]), chip="v5e")
    assert found.split["device compute"] == pytest.approx(0.27)
    assert [one.seconds for one in found.costs] == [0.2, 0.05]
    assert "times are from the TPU compiler's cost model, not measured" in str(found)


@needs_libtpu
@pytest.mark.slow
def test_the_profile_of_a_tpu_that_is_not_here(tmp_path: Path) -> None:
    model = write_config(tmp_path / "tiny", TINY)
    config = load_config(None, [f"model.name={model}", "max_length=256", "batch_size=4", "loss_chunk=256"])
    found = profile(config, chip="v5e")
    compiled = found.compiled
    assert compiled is not None and compiled.flops and compiled.hbm_bytes
    assert sum(one.bytes for one in compiled.operations) == pytest.approx(compiled.hbm_bytes, rel=0.01)
    assert sum(one.flops for one in compiled.operations) == pytest.approx(compiled.flops, rel=0.1)
    text = str(found)
    assert "predicted from the compiled program, not measured" in text and "layers-0/mlp" in text
    assert "Layers that cost most" in text and "the step fits v5e:1x1" in text
