"""The checks of `verify`, with a failure of each check.

tests/integration/test_notebooks.py runs them without failures.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support import verify_functions
from tests.support.child_processes import QUICK_XLA_FLAGS, run_python
from tpu_kit.cli import main
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.distributed import detection
from tpu_kit.distributed.launch import LaunchError
from tpu_kit.distributed.replica import runtime
from tpu_kit.machine import calibration, chips
from tpu_kit.machine.checks import Machine
from tpu_kit.model import attention
from tpu_kit.model.loop.layer_inputs import Visibility
from tpu_kit.notebook import smoke_test, verify
from tpu_kit.notebook.verify import MEMORY_RATIOS, TIME_RATIOS, Record, compare
from tpu_kit.recipes.sft import train

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
TOKEN = "canary-of-the-hub-4711"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and replicas that compile quickly."""
    for name, value in {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XLA_FLAGS": QUICK_XLA_FLAGS}.items():
        monkeypatch.setenv(name, value)
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def first_contact(home: Path, device: str = "xla-cpu", limit: float | None = None) -> verify._Checks:
    """The checks on one replica; with a chip's name, measurements are compared with that chip."""
    kind = "xla-cpu" if device not in ("cpu", "tpu") else device
    config = load_config(None, [f"device_type={kind}", "num_replicas=1"])
    known = calibration.begin(device, home / "report.json")
    found = verify._Checks(config, detection.detect(config.launch), known, lambda text: None)
    found._limit = limit or found._limit
    return found


def brief(records: Iterator[Record]) -> list[tuple[str, str]]:
    return [(record.name, record.status) for record in records]


# ------------------------------------------------------------------------------------------------ all of them at once


FIGURES: dict[str, Any] = {
    "lost_sum": {
        "cores": [{"core": core, "all-reduce": core + 1.0, "TFLOP/s": 0.001} for core in range(2)],
        "compiles": 0,
        "fallbacks": 0,
    },
    "wrong_gradient": {"segments": {"output": 0.003, "query": 0.1, "key": 0.1, "value": 0.1}},
    "wrong_loop": {"loss": 7.1, "host_loss": 6.5, "grad_norm": 1.0, "host_grad_norm": 1.0},
    "wrong_tokens": {"tokens": 96, "equal": 95, "gap": 5.0},
}
"""What the functions of `verify_functions` return; the slow tests let two replicas compute it."""


def quick_launch(function: Any, config: TrainConfig, seconds: float) -> Any:
    if function is verify_functions.no_steps:
        raise LaunchError(f"rank 0: no_steps: RESOURCE_EXHAUSTED: the token is {TOKEN}, in {Path.home()}")
    figures = FIGURES[function.__name__]
    return figures | ({"loss": 6.5} if config.optim.scan_layers == "off" else {})


@pytest.fixture(scope="module", params=["quick", pytest.param("replicas", marks=pytest.mark.slow)])
def failed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, str]]:
    """The folder, exit code and output of the command if nothing works."""
    folder = tmp_path_factory.mktemp("verify")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "quick":
            patch.setattr(verify, "launch", quick_launch)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("XLA_FLAGS", QUICK_XLA_FLAGS)
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no lock file, for which tests of the compiler look
        patch.delenv("PJRT_DEVICE", raising=False)
        patch.setattr(verify.smoke_test, "measure_cores", verify_functions.lost_sum)
        patch.setattr(verify.smoke_test, "compare_kernel", verify_functions.wrong_gradient)
        patch.setattr(verify.smoke_test, "compare_step", verify_functions.wrong_loop)
        patch.setattr(verify.smoke_test, "compare_tokens", verify_functions.wrong_tokens)
        patch.setattr(verify.smoke_test, "measure_step", verify_functions.no_steps)
        patch.setattr(verify, "small_run", verify_functions.lost_checkpoint)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            status = main(["verify", "device_type=xla-cpu", "num_replicas=2", f"report={folder}/verify-report.json"])
    yield folder, status, printed.getvalue()


@needs_xla
def test_what_fails_is_told_and_stops_nothing(failed: tuple[Path, int, str]) -> None:
    folder, status, said = failed
    report = json.loads((folder / "verify-report.json").read_text())
    checks = {check["name"]: check for check in report["checks"]}
    assert [(name, check["passed"]) for name, check in checks.items()] == [
        ("Cores", False), ("Splash kernel", False), ("Step, scanned", False),
        ("Step, unrolled", True), ("Tokens", False), ("Memory", False), ("Step time", False), ("Small run", False),
    ]  # fmt: skip
    assert status == 1
    assert "✗ Cores " in said and "! Splash kernel " in said, "attention has a fallback, a sum has none"
    for name, check in checks.items():
        assert f" {name} " in said and (f"{name}: 300 s at most for each launch" in said or name == "Small run")
        assert check["passed"] or (check["found"] and check["next_action"].endswith("verify-report.json to an issue"))
    assert checks["Cores"]["found"].startswith("sum of 1..2 on each of 2: core 0 has 1")
    assert checks["Splash kernel"]["figures"]["segments"]["output"] < 0.01
    assert "differs from plain attention in 3 of 4: query, segments: 0.1" in checks["Splash kernel"]["found"]
    scanned, unrolled = (checks[f"Step, {layers}"]["figures"] for layers in ("scanned", "unrolled"))
    assert abs(scanned["loss"] / scanned["host_loss"] - 1) > 0.01 > abs(unrolled["loss"] / unrolled["host_loss"] - 1)
    assert checks["Tokens"]["figures"]["gap"] > 1
    assert "it went on from step 0 to 8" in checks["Small run"]["found"] and "damaged" not in said
    assert "RESOURCE_EXHAUSTED" in checks["Memory"]["found"] and "no_steps" in checks["Memory"]["error"]


@needs_xla
def test_the_report_has_versions_and_no_secret(failed: tuple[Path, int, str]) -> None:
    folder, _, _ = failed
    text = (folder / "verify-report.json").read_text()
    report = json.loads(text)
    assert report["device"] == "xla-cpu" and report["versions"]["torch_xla"] == Machine().version("torch_xla")
    assert {"name", "passed", "found", "figures", "tolerance", "seconds", "error", "next_action"} == {
        key for check in report["checks"] for key in check
    }
    assert "the token is ***" in text and TOKEN not in text
    assert str(Path.home()) not in text


@pytest.mark.slow
@needs_xla
def test_train_falls_back_with_one_loud_line_each(
    failed: tuple[Path, int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, _, _ = failed
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("XLA_FLAGS", QUICK_XLA_FLAGS)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    settings = ["device_type=xla-cpu", "num_replicas=1", "max_steps=1", "warmup_steps=0", "split=train[:40]"]
    settings += ["eval_rows=0", "eval_steps=null", "generate_rows=0", f"output_dir={tmp_path}/run"]
    assert train(load_config("embedded-cot", settings)).status == "finished"
    said = capfd.readouterr().out
    (attention,), (layers,) = ([x for x in said.splitlines() if "WARNING" in x and y in x] for y in ("sdpa", "unroll"))
    assert "attention=auto is sdpa: splash failed on this machine (differs from plain attention" in attention
    assert "layers are unrolled: their loop failed on this machine (loss " in layers
    assert f"see {folder}/verify-report.json" in attention and f"see {folder}/verify-report.json" in layers
    assert "layers           4 one by one" in said


# ------------------------------------------------------------------------------------------------ one by one


@pytest.mark.slow
def test_a_check_that_hangs_is_ended_and_one_that_dies_is_told(home: Path) -> None:
    contact = first_contact(home, "cpu", limit=8)
    (hangs, dies) = (
        contact._check("One", verify.partial(verify.launch, fn, contact._config(), limit), lambda _: (True, ""), "")
        for fn, limit in ((verify_functions.computes_for_ever, 8.0), (verify_functions.dies, 100.0))
    )
    assert (hangs.status, dies.status) == ("failure", "failure")
    assert "not done after the time limit of 8 s" in hangs.found and hangs.seconds < 60
    assert "computes_for_ever" in hangs.error, "the stacks are in the report"
    assert "SIGSEGV" in dies.found or "Segmentation fault" in dies.error
    assert "splash, head size 64" in dies.error, "what it was about"


@pytest.mark.slow
@needs_xla
def test_sdpa_is_taken_where_splash_fails(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify.smoke_test, "compare_kernel", verify_functions.wrong_mask)
    contact = first_contact(home)
    splash = contact._splash()
    assert splash.status == "warning"
    assert splash.found.startswith("differs from plain attention in 4 of 4: output, segments: "), splash.found
    config, (warning,) = contact.measured.apply(load_config())
    assert config.model.attention == "sdpa" and "attention=auto is sdpa: splash failed" in warning


@pytest.mark.slow
@needs_xla
def test_a_step_that_is_wrong_without_the_loop_says_nothing_of_the_loop(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify.smoke_test, "compare_step", verify_functions.wrong_norm)
    contact = first_contact(home)
    assert brief(contact._steps()) == [("Step, scanned", "warning"), ("Step, unrolled", "failure")]
    assert contact.measured.scan == ""


def test_a_step_that_is_wrong_either_way_says_nothing_of_the_loop(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only by its norm; in the slow test next to it, replicas make the step."""
    figures = {"loss": 2.0, "host_loss": 2.0, "grad_norm": 1.2, "host_grad_norm": 1.0}
    monkeypatch.setattr(verify, "launch", lambda *_: figures)
    contact = first_contact(home, "xla-cpu")
    assert brief(contact._steps()) == [("Step, scanned", "warning"), ("Step, unrolled", "failure")]
    assert contact.measured.scan == ""


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_off_xla_the_step_is_checked_as_it_trains(
    device_type: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers one by one, as compiled for a GPU."""
    launched = []
    monkeypatch.setattr(verify, "launch", lambda _, config, *__: launched.append(config.optim.scan_layers))
    monkeypatch.setattr(verify, "_judge_step", lambda _: (True, ""))
    contact = first_contact(home, "cpu")
    contact._backend = replace(contact._backend, device_type=device_type)
    assert (brief(contact._steps()), launched) == ([("Step, unrolled", "ok")], ["off"])


def test_verdicts_of_cores() -> None:
    cores = [{"core": core, "all-reduce": 10.0, "TFLOP/s": 150.0 + core} for core in range(4)]
    figures: dict[str, Any] = {"cores": cores, "compiles": 0, "fallbacks": 0}
    text = "sum of 1..4 on each of 4; the slowest makes 150 TFLOP/s (bf16)"
    assert verify._judge_cores(figures, 4, None) == (True, text)
    assert verify._judge_cores(figures, 4, chips.CHIPS["v5e"]) == (True, f"{text}, 76% of the peak")
    assert verify._judge_cores(figures, 4, chips.CHIPS["v7x"])[1].endswith("13% of the peak"), "a chip is two devices"
    assert "on each of 4: there should be 8 cores;" in verify._judge_cores(figures, 8, None)[1]
    slow = verify._judge_cores(figures | {"compiles": 3, "fallbacks": 2}, 4, None)
    assert not slow[0] and "3 compiles and 2 operations on the host while one shape repeats: unset XLA_USE" in slow[1]


def test_verdicts_of_what_is_no_number_or_nothing() -> None:
    kernel = {"segments": {"output": 0.001, "query": float("nan")}}
    assert verify._judge_kernel(kernel) == (False, "differs from plain attention in 1 of 2: query, segments: nan")
    assert verify._judge_kernel({"segments": {"output": 0.02}})[0]
    step = {"loss": 2.0, "host_loss": 2.0, "grad_norm": 1.0, "host_grad_norm": 1.0}
    assert verify._judge_step(step)[0]
    assert not verify._judge_step(step | {"loss": float("nan")})[0]
    assert not verify._judge_step(step | {"grad_norm": 1.06})[0]
    assert verify._judge_tokens({"tokens": 4, "equal": 3, "gap": 0.1})[0]
    assert not verify._judge_tokens({"tokens": 0, "equal": 0, "gap": 0.0})[0], "nothing was compared"
    assert not verify._judge_tokens({"tokens": 4, "equal": 4, "gap": float("nan")})[0]
    run = {"first_loss": 3.0, "last_loss": 2.5, "size": 8, "resumed": 4, "updates": 8, "tokens": 32}
    assert verify._judge_run(run)[0]
    for wrong in ({"last_loss": float("nan")}, {"last_loss": 3.0}, {"resumed": 0}, {"size": 0}):
        assert not verify._judge_run(run | wrong)[0], wrong


@pytest.fixture
def host() -> Iterator[TrainConfig]:
    """A run of the embedded model, whose replica is this process."""
    runtime.enter(smoke_test._host())
    yield load_config(None, {"model.name": "embedded", "max_length": 16, "batch_size": 1, "device_type": "cpu"})
    runtime.enter(None)


def test_a_kernel_that_sees_another_document_is_found(host: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(case: smoke_test.Case, rt: runtime.Runtime, *states: Any) -> torch.Tensor:
        *inputs, segments = states
        output, _ = attention.sdpa_attention(
            torch.nn.Module(), *inputs, None, visibility=Visibility(torch.ones_like(segments))
        )
        return output.transpose(1, 2)

    monkeypatch.setattr(smoke_test, "_splash", blind)
    monkeypatch.setattr(smoke_test, "LENGTH", 64)
    cases = {name: smoke_test.CASES[name] for name in ("head size 64", "segments", "window", "soft cap")}
    monkeypatch.setattr(smoke_test, "CASES", cases)
    good = {name: verify._judge_kernel({name: parts})[0] for name, parts in smoke_test.compare_kernel(host).items()}
    assert good == {"head size 64": True, "segments": False, "window": False, "soft cap": False}


def test_the_speed_of_a_core_is_that_of_the_products_that_it_ran(
    host: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter((0.0, 2.0))
    monkeypatch.setattr(smoke_test.time, "perf_counter", lambda: next(seconds))
    with FlopCounterMode(display=False) as counted:
        (core,) = smoke_test.measure_cores(host)["cores"]
    executions = smoke_test._MATMUL_CPU[-1]  # and two before, which compile
    timed = counted.get_total_flops() * executions / (executions + 2)
    assert core["TFLOP/s"] == pytest.approx(timed / 2 / 1e12, rel=1e-5)


def test_a_step_is_timed_without_the_first_ones(host: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    now, taken = [0.0], []

    def step(*_: Any) -> None:
        taken.append(100.0 if len(taken) < smoke_test.WARM_UP else 2.0)  # the first ones compile
        now[0] += taken[-1]

    monkeypatch.setattr(smoke_test, "train_step", step)
    monkeypatch.setattr(smoke_test.time, "perf_counter", lambda: now[0])
    assert smoke_test.measure_step(host)["seconds"] == 2.0


@needs_xla
def test_measured_memory_is_compared_and_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:CPU does not report memory: the measured figure is invented, and so is the compiler's, which would be
    slow."""
    contact, asked = first_contact(home, "v5e"), []
    contact._steps_taken["embedded, 2 x 128 tokens"] = {"seconds": 1.0, "peak_bytes": 10 * 2**20}

    def compile_step(config: TrainConfig, chip: str, **options: Any) -> SimpleNamespace:
        asked.append((chip, config.optim.batch_size, options["time_limit"]))
        return SimpleNamespace(total_bytes=9 * 2**20)

    monkeypatch.setattr(verify, "compile_step", compile_step)
    record = contact._measure("Memory", contact._memory, MEMORY_RATIOS, "the compiler's figure")
    assert record.status == "ok" and asked == [("v5e", 2, 300.0)]
    assert contact.measured.memory == pytest.approx(10 / 9)
    assert record.found == "embedded, 2 x 128 tokens: 1.11 of the compiler's figure"


@needs_xla
def test_a_ratio_beyond_belief_is_a_failure_and_not_kept(home: Path) -> None:
    contact = first_contact(home, "v5e")
    for ratio, status in ((4.1, "warning"), (0.4, "warning"), (1.5, "ok")):
        record = contact._measure("Step time", lambda r=ratio: {"a": compare(r, 1.0)}, TIME_RATIOS, "the estimate")  # type: ignore[misc]
        assert (record.status, contact.measured.time) == (status, ratio if status == "ok" else None)
        assert record.found == f"a: {ratio:.2f} of the estimate"
        assert bool(record.fix) == (status != "ok")


@needs_xla
def test_time_is_compared_with_the_roofline_of_a_chip_that_is_known(home: Path) -> None:
    contact, step = first_contact(home), {"seconds": 0.009, "peak_bytes": None}
    contact._steps_taken["embedded, 2 x 128 tokens"] = step
    record = contact._measure("Step time", contact._time, TIME_RATIOS, "the estimate")
    assert (record.status, contact.measured.time) == ("skipped", None)
    assert record.found == "0.009 s, not compared: no peak of xla-cpu is known"
    with pytest.raises(verify.NotMeasured, match="xla-cpu counts no memory"):
        contact._memory()
    contact.measured = calibration.begin("v5e", home / "report.json")
    record = contact._measure("Step time", contact._time, TIME_RATIOS, "the estimate")
    (figures,) = record.figures.values()
    assert 0.004 < figures["predicted"] < 0.005, "of so small a step the host's share is nearly all"
    assert record.status == "ok" and contact.measured.time == 0.009 / figures["predicted"]


@pytest.mark.slow
@pytest.mark.skipif(Machine().version("libtpu") is None, reason="needs libtpu, the TPU compiler")
def test_the_compiler_is_asked_about_the_step_that_is_measured(home: Path) -> None:
    contact = first_contact(home, "v5e")
    contact._steps_taken["embedded, 2 x 128 tokens"] = {"seconds": 1.0, "peak_bytes": 10 * 2**20}
    (figures,) = contact._memory().values()
    assert figures["measured"] == 10 * 2**20 and 2**20 < figures["predicted"] < 100 * 2**20


def test_what_is_measured_on_a_gpu_is_kept_for_its_kind(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program := home / "nvidia-smi").write_text('#!/bin/sh\necho "NVIDIA H100 80GB HBM3, 81559"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(home), prepend=":")
    monkeypatch.setattr(detection, "gpu_count", lambda: 1)

    def run(self: verify._Checks) -> Iterator[Record]:
        self.measured = replace(self.measured, time=2.0)
        yield self._measure("Memory", self._memory, MEMORY_RATIOS, "the compiler's figure")

    monkeypatch.setattr(verify._Checks, "run", run)
    config = load_config(None, ["device_type=cuda"])
    (record,) = verify.verify(config, home / "report.json")
    assert record.found == "not measured: no compiler reports the memory of a GPU's step"
    room = detection.device_memory_budget(config)
    assert room is not None and (room.calibration.device, room.calibration.time) == ("h100", 2.0)


def test_no_device_is_one_failure(home: Path) -> None:
    (record,) = verify.verify(load_config(None, ["device_type=tpu"]), home / "report.json")
    assert (record.name, record.status, record.fix) == ("Verify", "failure", "python -m tpu_kit doctor")
    assert "no TPU" in record.found or "PJRT_DEVICE" in record.found or "needs torch_xla" in record.found


def test_a_report_that_cannot_be_written_is_told_before_anything_runs(home: Path) -> None:
    (record,) = verify.verify(load_config(None, ["device_type=cpu"]), home / "nowhere/report.json")
    assert (record.name, record.status, record.fix) == ("Report", "failure", "report=/another/folder/report.json")
    assert record.found == f"{home}/nowhere/report.json cannot be written to (No such file or directory)"


@pytest.mark.slow
@needs_xla
def test_all_of_it_passes_on_xla_cpu(tmp_path: Path) -> None:
    arguments = ["-m", "tpu_kit", "verify", "device_type=xla-cpu", "num_replicas=2"]
    done = run_python(arguments, cwd=tmp_path, env={"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": None}, timeout=900)
    report = json.loads((tmp_path / "verify-report.json").read_text())
    assert [(check["name"], check["passed"]) for check in report["checks"]] == [
        ("Cores", True), ("Splash kernel", True), ("Step, scanned", True), ("Tokens", True), ("Memory", None),
        ("Step time", None), ("Small run", True),
    ]  # fmt: skip
    assert [core["all-reduce"] for core in report["checks"][0]["figures"]["cores"]] == [3, 3]
    assert len(report["checks"][1]["figures"]) == 8
    assert "; it went on from step 4 to 8; " in done.stdout
    assert "xla-cpu counts no memory" in done.stdout and "no peak of xla-cpu is known" in done.stdout
    assert done.stdout.splitlines()[-1] == f"report: {tmp_path}/verify-report.json"
