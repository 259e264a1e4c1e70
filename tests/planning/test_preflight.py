"""`train`'s decisions before the launch, mainly the batch of `auto`, and its messages about memory."""

from __future__ import annotations

import importlib.util
import os
import time
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest

from tests.machine.test_checks import V5E, fake
from tests.planning.test_planner import compiled
from tests.support.compiler_models import LLAMA_8B, QWEN2_500M, TINY, write_config
from tpu_kit.cli import main
from tpu_kit.config.loader import ConfigError, TrainConfig, batch_arithmetic, load_config
from tpu_kit.config.schema import LEAST_UPDATES
from tpu_kit.distributed import detection
from tpu_kit.distributed.detection import detect
from tpu_kit.distributed.hosts import Hosts
from tpu_kit.machine.checks import Machine
from tpu_kit.machine.slices import find_slice
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.planning import preflight
from tpu_kit.planning.compiler import compile_check
from tpu_kit.planning.compiler.compile_check import Compiled
from tpu_kit.planning.oom_recovery import suggestion
from tpu_kit.planning.planner import MOST_UNTIMED_ROWS, best_setting
from tpu_kit.planning.preflight import check_before_launch
from tpu_kit.planning.run_on_slice import Setting

GIB = 2**30
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_config(tmp_path / "qwen", QWEN2_500M)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "gpu_count", lambda: 0)
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES"):
        monkeypatch.delenv(name, raising=False)


PACKAGES = {"torch": "2.9.0", "torch_xla": "2.9.0"}


def run(model: Path | str, *settings: str) -> TrainConfig:
    return load_config(None, [f"model.name={model}", "max_steps=10", *settings])


def host(root: Path, gib: float) -> Machine:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemAvailable: {int(gib * 2**20)} kB\n")
    return Machine(root=root, environ={}, version=PACKAGES.get)


def test_a_mesh_is_shown_and_its_bad_settings_are_refused(small: Path, tmp_path: Path) -> None:
    at = fake(tmp_path / "root", *[V5E] * 8)
    text = str(check_before_launch(run(small, "device_type=tpu", "mesh=data=2,fsdp=4", "batch_size=2"), at=at))
    assert "launch.mesh=data=2,fsdp=4: rows divided by 8; devices [[0, 1, 2, 3], [4, 5, 6, 7]] by data, fsdp" in text
    assert "GiB by formula\n" in text and "15.75 GiB for each of 8 on v5litepod-8" in text
    # Qwen2.5-0.5B has 14 heads and 2 key-value heads.
    with pytest.raises(ConfigError) as error:
        check_before_launch(run(small, "device_type=tpu", "mesh=fsdp=2,model=4", "batch_size=auto"), at=at)
    assert len(error.value.problems) == 2
    for part in ("14 attention heads do not divide by model=4", "2 key-value heads"):
        assert part in str(error.value)


def test_remat_is_chosen_on_a_tpu_for_the_updates_of_the_run(small: Path, tmp_path: Path) -> None:
    at, settings = fake(tmp_path / "tpu", V5E), ("device_type=tpu", "batch_size=4", "epochs=50")
    short, long = (
        check_before_launch(load_config(None, [f"model.name={small}", *settings]), at=at, rows=rows)
        for rows in (400, 40_000)
    )
    assert (short.config.optim.remat, long.config.optim.remat) == ("full", "none")
    assert "optim.remat=auto is none: the fastest that leaves 8% of 15.75 GiB, by formula" in str(long)
    assert long.fits and long.time and short.time and long.time.seconds < 0.85 * short.time.seconds
    assert check_before_launch(run(small, *settings[:2], "remat=outputs"), at=at).config.optim.remat == "outputs"
    large = check_before_launch(run(small, "device_type=tpu", "batch_size=512"), at=at)
    assert large.config.optim.remat == "blocks"
    assert "optim.remat=auto is blocks: the setting with the least memory" in str(large)


def test_off_a_tpu_remat_is_full_unless_it_is_set(small: Path, tmp_path: Path) -> None:
    at = host(tmp_path / "cpu", 64)
    for remat, chosen in (("auto", "full"), ("none", "none"), ("outputs", "outputs")):
        for device_type in ("cpu", "xla-cpu"):
            found = check_before_launch(run(small, f"remat={remat}", f"device_type={device_type}"), at=at)
            assert found.config.optim.remat == chosen and "optim.remat=auto" not in str(found)


def test_minutes_of_rounding_are_told(tmp_path: Path) -> None:
    model, at = write_config(tmp_path / "llama", LLAMA_8B), fake(tmp_path / "root", V5E)
    text = str(check_before_launch(run(model, "device_type=tpu", "base_dtype=int4", "batch_size=1"), at=at))
    assert "model.base_dtype=int4: the first start quantizes the weights in 3 minutes on one core; " in text
    assert "quantizes" not in str(check_before_launch(run(model, "device_type=tpu", "base_dtype=int8"), at=at))


# -------------------------------------------------------------------------------------------------------- the batch


def test_auto_on_a_tpu_is_the_planner_s_choice(small: Path, tmp_path: Path) -> None:
    at = fake(tmp_path / "root", *[V5E] * 8)
    config = run(small, "batch_size=auto", "global_batch_size=64", "device_type=tpu")
    found = check_before_launch(config, at=at)
    assert found.config.optim.batch_size == best_setting(config, find_slice("v5e", 8)).config.optim.batch_size
    plan = batch_arithmetic(found.config, 8)
    assert plan.global_batch_size == 64 and plan.batch_size * plan.gradient_accumulation == 8
    assert found.room is not None and (found.room.name, found.room.replicas) == ("v5litepod-8", 8)
    assert found.fits and found.time is not None
    text = str(found)
    for part in ("base_weights 0.92", "GiB by formula\n", "of 15.75 GiB, by formula", "tokens/s estimated, not ",
                 "15.75 GiB for each of 8 on v5litepod-8", f"auto is {plan.batch_size}: the fastest"):  # fmt: skip
        assert part in text


def test_on_several_hosts_a_mesh_is_chosen(small: Path, tmp_path: Path) -> None:
    """Data parallel if a device holds the model; several slices are planned together."""
    at = fake(tmp_path / "root", *[V5E] * 4)
    for count, slices, name in ((4, 1, "v5litepod-16"), (8, 2, "2xv5litepod-16")):
        hosts = Hosts(0, tuple(map(str, range(count))), "0:29477", slices=slices)
        config = run(small, "device_type=tpu", "batch_size=1")
        found = check_before_launch(config, at=at, backend=detect(config.launch, at, hosts))
        assert found.config.launch.mesh == f"data={4 * count}" and found.room is not None
        assert (found.room.name, found.room.replicas) == (name, 4 * count)
        assert f"so mesh=data={4 * count}, which holds it in" in str(found)


def test_auto_of_a_small_data_set_leaves_updates_to_make(tmp_path: Path) -> None:
    at = fake(tmp_path / "root", *[V5E] * 8)
    found = check_before_launch(load_config("embedded-cot", ["batch_size=auto", "device_type=tpu"]), at=at, rows=1139)
    rows = batch_arithmetic(found.config, 8).global_batch_size
    assert rows * LEAST_UPDATES <= 1139 and rows >= 8


def test_auto_on_a_cpu_is_small_and_fits_half_of_the_memory(small: Path, tmp_path: Path) -> None:
    at = host(tmp_path / "root", 64)
    found = check_before_launch(run(small, "batch_size=auto", "device_type=cpu"), at=at)
    assert found.config.optim.batch_size == MOST_UNTIMED_ROWS and found.room is not None
    assert found.room.limit == pytest.approx(62.5 * GIB) and found.time is None
    assert "auto is 8: the largest that leaves 50% of 62.50 GiB, at most 8" in str(found)
    four = check_before_launch(
        run(small, "batch_size=auto", "device_type=xla-cpu", "num_replicas=4", "global_batch_size=24"), at=at
    )
    assert four.room is not None and four.room.limit == pytest.approx(62.5 / 4 * GIB)
    assert 6 % four.config.optim.batch_size == 0  # type: ignore[operator]
    with pytest.raises(ConfigError, match="10 is no multiple of"):
        check_before_launch(
            run(small, "batch_size=auto", "device_type=xla-cpu", "num_replicas=4", "global_batch_size=10"), at=at
        )
    at = host(tmp_path / "tight", 2.5)
    with pytest.raises(ValueError, match=r"row of data.max_length=1024 fits 1.00 GiB for each of 1 replicas on"):
        check_before_launch(run(small, "batch_size=auto", "device_type=cpu"), at=at)


@pytest.mark.parametrize("update", ["global_batch_size=100000000", "gradient_accumulation=1000000"])
@pytest.mark.parametrize("device_type", ["cpu", "tpu"])
def test_too_many_passes_are_named_as_the_cause(update: str, device_type: str, small: Path, tmp_path: Path) -> None:
    at = host(tmp_path / "host", 64) if device_type == "cpu" else fake(tmp_path / "root", *[V5E] * 8)
    with pytest.raises(ValueError, match=r"not one row .*in each of (the )?[0-9,]+ passes"):
        check_before_launch(run(small, "batch_size=auto", f"device_type={device_type}", update), at=at)


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA Unknown 9000"])
def test_auto_on_a_gpu_asks_nvidia_smi(name: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "{name}, 143771"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(detection, "gpu_count", lambda: 2)
    at = Machine(
        root=tmp_path / "root",
        environ={"CUDA_VISIBLE_DEVICES": "3,4"},
        version={"torch": "2.9.0", "torch_xla": "2.9.0"}.get,
    )
    found = check_before_launch(run(small, "batch_size=auto", "device_type=cuda"), at=at)
    assert found.room is not None and (found.room.limit, found.room.replicas) == (143771 * 2**20, 2)
    assert (tmp_path / "asked").read_text().endswith("-i 3\n")
    rows = found.config.optim.batch_size
    assert isinstance(rows, int) and rows >= 8
    assert found.setting is not None and found.setting.peak_bytes < found.room.limit * (1 - detection.GPU_FREE)
    assert (found.time is not None) == (name == "NVIDIA H200")


def test_where_memory_is_not_known_auto_is_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    at = Machine(root=tmp_path / "root", environ={}, version=PACKAGES.get)
    with pytest.raises(ValueError, match="how much memory this machine has is not known; give a number, such as"):
        check_before_launch(run(small, "batch_size=auto", "device_type=cpu"), at=at)
    assert str(check_before_launch(run(small, "device_type=cpu"), at=at)) == ""
    unknown = write_config(tmp_path / "other", QWEN2_500M, model_type="none")
    at = host(tmp_path / "known", 8)
    with pytest.raises(ValueError, match=r"batch_size=auto: .*has no family none; .*; give a number, such as"):
        check_before_launch(run(unknown, "batch_size=auto", "device_type=cpu"), at=at)
    assert "memory not known: model.name=" in str(check_before_launch(run(unknown, "device_type=cpu"), at=at))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str, Any]]:
    """Records the compiler's requests: rows, slice and time limit; it answers 2 GiB per row."""
    calls: list[tuple[Any, str, Any]] = []

    def compile_step(config: TrainConfig, chip: str, *, time_limit: float | None, **_: Any) -> Compiled:
        calls.append((config.optim.batch_size, chip, time_limit))
        assert isinstance(config.optim.batch_size, int)
        return compiled(config.optim.batch_size * 2 * GIB)

    monkeypatch.setattr(compile_check, "compile_step", compile_step)
    monkeypatch.setattr(preflight, "check_available", lambda: "0.0.21")
    monkeypatch.setattr(preflight, "ASKED_SECONDS", 60.0)
    return calls


def test_with_exact_the_compiler_is_asked_without_a_limit(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def compile_step(config: TrainConfig, chip: str, **options: Any) -> Compiled:
        asked.append((config.optim.batch_size, chip, options["time_limit"]))
        raise compile_check.CompilerUnavailable("no libtpu: pip install it")

    monkeypatch.setattr(compile_check, "compile_step", compile_step)
    at = fake(tmp_path / "root", *[V5E] * 8)
    config = run(small, "batch_size=auto", "device_type=tpu")
    by_formula = check_before_launch(config, at=at).config.optim.batch_size
    assert not asked
    assert check_before_launch(config, exact=True, at=at).config.optim.batch_size == by_formula
    assert asked == [(by_formula, "v5e:2x4", None)]
    given = check_before_launch(run(small, "batch_size=2", "device_type=tpu"), exact=True, at=at)
    assert asked[-1] == (2, "v5e:2x4", None) and "by formula, because the compiler cannot run: no libtpu" in str(given)
    here = check_before_launch(run(small, "device_type=cpu"), exact=True, at=host(tmp_path / "host", 8))
    assert "GiB by formula, which is for TPUs, not for cpu\nmemory limit     " in str(here)
    assert "not by the TPU compiler" in str(here) and len(asked) == 2


def test_the_compiler_is_asked_where_the_formula_alone_does_not_decide(
    asked: list[Any], small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at, auto = fake(tmp_path / "root", V5E), run(small, "batch_size=auto", "device_type=tpu", "remat=full")
    found = check_before_launch(auto, at=at)
    assert asked[0][1:2] == ("v5e:1x1",) and 59 < asked[0][2] <= 60 and len(asked) > 1
    assert found.fits and found.config.optim.batch_size == asked[-1][0] <= 7
    assert "asking the TPU compiler, at most 60 s, because optim.batch_size is auto" in capsys.readouterr().err
    text = str(found)
    for part in (" GiB by compiler\n", ", 1% kept free: fits", "by the compiler, it fits v5e:1x1: "):
        assert part in text
    assert found.setting is not None and found.device_bytes == found.setting.peak_bytes == asked[-1][0] * 2 * GIB
    asked.clear()
    # It is not asked for a continued run, which keeps its rows, nor for a rehearsal.
    began = {"batch_size": 4, "global_batch_size": 4}
    assert check_before_launch(auto, at=at, began=began).config.optim.batch_size == 4
    check_before_launch(run(small, "batch_size=auto", "device_type=xla-cpu"), at=host(tmp_path / "cpu", 64))
    # For a given batch it is asked only near the limit; a run that does not fit is then reported before it starts.
    far = check_before_launch(run(small, "batch_size=8", "device_type=tpu", "remat=full"), at=at)
    assert not asked and "GiB by formula\n" in str(far) and not capsys.readouterr().err
    rows = next(n for n in range(8, 999) if abs(planned_bytes(small, n, at) / (15.75 * GIB) - 1) < 0.1)
    near = check_before_launch(run(small, f"batch_size={rows}", "device_type=tpu", "remat=full"), at=at)
    assert [one[0] for one in asked] == [rows] and near.fits is False
    assert "because the formula is within 12% of the memory" in capsys.readouterr().err
    assert "by the compiler, it does not fit v5e:1x1" in str(near) and suggestion(near).startswith(
        "warning: the run may run"
    )


def planned_bytes(model: Path, rows: int, at: Machine) -> int:
    config = run(model, f"batch_size={rows}", "device_type=tpu", "remat=full")
    return Setting(config, read_shape(config.model), find_slice("v5e", 1)).peak_bytes


def test_on_several_hosts_and_without_the_compiler_the_formula_decides(
    asked: list[Any], small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that only one host gets in time would make different runs."""
    at, config = fake(tmp_path / "root", *[V5E] * 4), run(small, "device_type=tpu", "batch_size=auto")
    hosts = Hosts(0, ("0", "1"), "0:29477")
    assert check_before_launch(config, at=at, backend=detect(config.launch, at, hosts)).fits and not asked
    monkeypatch.setattr(preflight, "check_available", compile_check.check_available)
    monkeypatch.setattr(compile_check, "_NEEDED", ("no_such_package",))
    assert check_before_launch(config, at=at).fits and not asked


@pytest.mark.parametrize("answers", [0, 1])
def test_no_answer_in_time_is_told(
    answers: int, asked: list[Any], small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = compile_check.compile_step

    def late(*given: Any, **options: Any) -> Compiled:
        if len(asked) >= answers:
            raise compile_check.CompileTimeout("not done")
        return answer(*given, **options)

    monkeypatch.setattr(compile_check, "compile_step", late)
    at, config = fake(tmp_path / "root", V5E), run(small, "batch_size=auto", "device_type=tpu", "remat=full")
    found = check_before_launch(config, at=at)
    if not answers:
        assert "by formula, because the compiler did not decide: no answer in 60 s" in str(found)
        assert found.config.optim.batch_size == best_setting(config, find_slice("v5e", 1)).config.optim.batch_size
    else:  # by the formula, corrected by as much as the first was too low
        assert "by the compiler, 1 larger settings do not fit; for this setting: no answer in 60 s" in str(found)
        rows = found.config.optim.batch_size
        assert isinstance(rows, int) and rows < asked[0][0] and 2 * rows < 16


@needs_libtpu
def test_a_compile_that_takes_too_long_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real compiler leaves no process or file behind."""
    monkeypatch.setattr(preflight, "ASKED_SECONDS", 0.5)
    monkeypatch.setattr(compile_check, "CACHE", tmp_path / "cache")
    config = run(write_config(tmp_path / "tiny", TINY), "batch_size=auto", "device_type=tpu", "max_length=512")
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    start, before = time.monotonic(), {*children.read_text().split()}
    found = check_before_launch(config, at=fake(tmp_path / "root", V5E))
    assert "the compiler did not decide: no answer in 0.5 s" in str(found) and time.monotonic() - start < 30
    assert {*children.read_text().split()} <= before and not (tmp_path / "cache").exists()


@pytest.mark.slow
@needs_libtpu
@pytest.mark.timeout(900)
def test_train_asks_the_compiler_by_itself_and_keeps_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a user's command, with the real compiler, on a machine that looks like a TPU's."""
    at = fake(tmp_path / "root", V5E)
    monkeypatch.setattr(detection, "Machine", lambda: at)
    monkeypatch.setattr(preflight, "ASKED_SECONDS", 600.0)  # other work uses these processors
    monkeypatch.setattr(compile_check, "CACHE", tmp_path / "cache")
    locks = set(Path("/tmp").glob("libtpu*"))
    command = ["train", "embedded-cot", "--dry-run", "device_type=tpu", "batch_size=auto", "remat=full",
               f"output_dir={tmp_path}/run", "eval_generate_rows=0"]  # fmt: skip
    told = []
    for _ in range(2):
        assert main(command) == 0
        out, err = capfd.readouterr()
        assert "asking the TPU compiler, at most 600 s, because optim.batch_size is auto" in err
        assert " GiB by compiler" in out and "by the compiler, it fits v5e:1x1: " in out
        told.append(err)
    assert "compiling for v5e:1x1" in told[0] and "compiling for" not in told[1]
    assert set(Path("/tmp").glob("libtpu*")) <= locks, "it would keep a run from the chip"


def test_what_may_not_fit_is_said(tmp_path: Path) -> None:
    large = write_config(tmp_path / "llama", LLAMA_8B)
    found = check_before_launch(run(large, "device_type=tpu"), at=fake(tmp_path / "root", V5E))
    assert found.fits is False and "kept free: MAY NOT FIT" in str(found)


def test_a_default_batch_is_lowered_to_what_the_rows_fill(small: Path, tmp_path: Path) -> None:
    at, two = host(tmp_path / "host", 64), ("device_type=xla-cpu", "num_replicas=2")
    found = check_before_launch(run(small, *two), at=at, rows=5)
    assert found.config.optim.batch_size == 2
    assert "plan             optim.batch_size lowered from 4 to 2: the data has 5 packed rows" in str(found)
    assert check_before_launch(run(small, *two), at=at, rows=8).config.optim.batch_size == 4
    for settings, rows, advice in (
        (["batch_size=4"], 5, "Set optim.batch_size=2, data.packing=false"),
        (["gradient_accumulation=4"], 5, "Set optim.batch_size=1 with optim.gradient_accumulation=2, "),
        ([], 1, "Set launch.num_replicas=1, "),
    ):
        with pytest.raises(ConfigError, match=rf"smaller than one global batch: it has {rows} packed rows, .*{advice}"):
            check_before_launch(run(small, *two, *settings), at=at, rows=rows)


def test_the_speed_of_this_cpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 0.04, 0.08, 0.12))
    monkeypatch.setattr(preflight.time, "perf_counter", lambda: next(clock))
    assert unwrap(preflight._host_rate)() == pytest.approx(2 * 2 * 512**3 / 0.12)
