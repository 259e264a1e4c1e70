"""The planner: which settings it finds and picks, what it says where nothing fits, its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.formula import table
from tests.compiler_models import LLAMA_8B, QWEN2_500M, TINY, write_config
from tests.test_memory import ANSWERS, configuration, name_of
from tpu_kit import compiler
from tpu_kit.__main__ import main
from tpu_kit.advice import RESERVE, largest
from tpu_kit.compiled import Compiled
from tpu_kit.compiler import CompilerUnavailable
from tpu_kit.config import TrainConfig, batch_arithmetic, load_config
from tpu_kit.planner import choose_batch, plan
from tpu_kit.roofline import step_time, work
from tpu_kit.shapes import read_shape
from tpu_kit.slices import find_slice
from tpu_kit.timeplan import time_plan, young_interval

KEYS = {
    "chip", "chips", "replicas", "global_batch_size", "fits", "peak_bytes", "limit_bytes", "parts", "source",
    "batch_size", "gradient_accumulation", "remat", "step_seconds", "tokens_per_second", "run_hours", "cost",
}  # fmt: skip
EXACT = {"argument_bytes", "temporary_bytes", "output_bytes", "aliased_bytes", "code_bytes", "flops", "bytes_accessed",
         "compile_seconds", "collectives", "largest_buffers"}  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_config(tmp_path / "qwen", QWEN2_500M)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return write_config(tmp_path / "llama", LLAMA_8B)


def run(model: Path, *settings: str) -> TrainConfig:
    return load_config(None, [f"model.name={model}", *settings])


# ------------------------------------------------------------------------------------------------------------ the pick


def test_what_was_given_is_kept(small: Path) -> None:
    (found,) = plan(run(small, "batch_size=4", "remat=full"))
    assert (found.where.name, found.where.replicas, len(found.settings)) == ("v5litepod-1", 1, 1)
    assert (found.config.optim.batch_size, found.config.optim.remat, found.fits) == (4, "full", True)


def test_of_what_fits_the_fastest_is_picked(small: Path) -> None:
    (found,) = plan(run(small, "global_batch_size=64", "num_replicas=8"))
    batch = batch_arithmetic(found.config, 8)
    assert batch.global_batch_size == 64
    assert batch.batch_size * batch.gradient_accumulation == 8
    limit = found.where.limit * (1 - RESERVE)
    assert found.peak_bytes <= limit
    assert all(one.time.seconds >= found.time.seconds / 1.03 for one in found.settings if one.peak <= limit)


def test_the_batch_that_auto_stands_for(small: Path, large: Path) -> None:
    rows = choose_batch(run(small, "batch_size=auto", "remat=full"), "v5e", 8)
    fits = plan(run(small, f"batch_size={rows}", "remat=full", "num_replicas=8"))[0]
    assert fits.fits and rows >= 16
    most = fits.advice.largest_batch if fits.advice else 0
    assert plan(run(small, f"batch_size={most}", "remat=full"))[0].fits
    assert not plan(run(small, f"batch_size={most + 1}", "remat=full"))[0].fits
    assert choose_batch(run(small, "batch_size=auto", "global_batch_size=24"), "v5e", 8) in (1, 3)
    with pytest.raises(ValueError, match=r"not one row fits v5litepod-1: .*GiB"):
        choose_batch(run(large, "batch_size=auto", "lora.r=0"), "v5e", 1)


def test_what_to_change_when_nothing_fits(large: Path) -> None:
    (found,) = plan(run(large, "batch_size=8", "remat=full", "max_length=2048"))
    assert not found.fits
    assert found.advice is not None
    peaks = [knob.peak_bytes for knob in found.advice.knobs]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] < found.peak_bytes
    assert [knob.change.partition("=")[0] for knob in found.advice.knobs][:2] == ["optim.mlp_tile", "optim.batch_size"]
    assert found.advice.smallest_slice is not None
    assert plan(run(large, "batch_size=8", "remat=full", "max_length=2048"), [found.advice.smallest_slice])[0].fits


def test_how_far_one_can_go(small: Path) -> None:
    advice = plan(run(small, "batch_size=16", "remat=full"))[0].advice
    assert advice is not None and advice.largest_rank is not None
    for key, most, step in (("max_length", advice.longest_sequence, 128), ("lora.r", advice.largest_rank, 1)):
        assert plan(run(small, "batch_size=16", "remat=full", f"{key}={most}"))[0].fits
        assert not plan(run(small, "batch_size=16", "remat=full", f"{key}={most + step}"))[0].fits


def test_old_chips_are_planned_without_kernels(small: Path) -> None:
    (found,) = plan(run(small), ["v3-8"])
    assert found.config.model.attention == "sdpa"
    assert "planned with model.attention=sdpa: the attention kernels do not compile for v3" in found.note


def test_largest() -> None:
    for most in (1, 7, 100):
        for bound in range(most + 1):
            assert largest(lambda n, bound=bound: n <= bound, most) == bound  # type: ignore[misc]


def test_the_published_table(tmp_path: Path) -> None:
    printed = table(tmp_path).splitlines()
    assert len(printed) == len(ANSWERS) + 4
    assert printed[-1].startswith(f"{len(ANSWERS)} configurations: median error ")


# ---------------------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("answer", [one for one in ANSWERS if one["layers"] > 4], ids=name_of)
def test_work_is_what_the_compiler_counts(answer: dict[str, Any], tmp_path: Path) -> None:
    config = configuration(answer, tmp_path)
    done = work(config, read_shape(config.model), batch_arithmetic(config, answer["replicas"]))
    # Splash attention reports no FLOPs to the compiler: of a small model with long rows they are a third.
    assert 0.8 < done.flops / answer["flops"] < 1.5
    assert 0.8 < done.traffic / answer["bytes_accessed"] < 1.25


def test_the_checkpoint_interval_is_young_s() -> None:
    assert young_interval(2.0, 3600.0) == 120.0
    chip = find_slice("v5e-8", None).chip
    found = time_plan(chip, 8, "v5litepod-8", 1.0, 36000, 0.0)
    assert found.run_hours == 10.0
    assert found.on_demand == pytest.approx(10 * 8 * 1.20)
    assert found.spot_hours is not None and 10 < found.spot_hours < 11
    assert found.sessions["Kaggle"].startswith("2 sessions of 9 h on Kaggle, over 1 week of 20 h")
    assert time_plan(chip, 8, "v5litepod-8", 1.0, None, 0.0).run_hours is None


def test_more_chips_and_faster_ones_take_less_time(small: Path) -> None:
    config = run(small, "global_batch_size=64", "max_steps=100")
    one, eight, trillium = plan(config, ["v5e", "v5e-8", "v6e-8"])
    assert one.time.seconds > 5 * eight.time.seconds > 5 * trillium.time.seconds
    shape, batch = read_shape(config.model), batch_arithmetic(eight.config, 8)
    done = work(eight.config, shape, batch)
    assert step_time(done, eight.where.chip, 1).all_reduce == 0.0
    assert step_time(done, eight.where.chip, 8).all_reduce > 0.0


# --------------------------------------------------------------------------------------------------------- the compiler


def compiled(total: int, **changes: Any) -> Compiled:
    values: dict[str, Any] = {
        "chip": "v5e", "topology": "v5e:1x1", "num_replicas": 1, "batch_size": 4, "gradient_accumulation": 1,
        "effort": "full", "fits": total <= 16909238272, "limit_bytes": 16909238272, "argument_bytes": total - 3,
        "output_bytes": 2, "aliased_bytes": 1, "temporary_bytes": 1, "code_bytes": 1, "total_bytes": total,
        "flops": 1e13, "bytes_accessed": 1e11, "loop_trips": {}, "trace_seconds": 1.0, "trace_host_bytes": 1,
        "compile_seconds": 1.0, "libtpu": "0.0.21", "program": "x",
    }  # fmt: skip
    return Compiled(**values | changes)


def test_the_pick_is_verified(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compile_step(config: TrainConfig, chip: str, **options: Any) -> Compiled:
        asked.append((config.optim.batch_size, options["effort"]))
        assert isinstance(config.optim.batch_size, int)
        return compiled(config.optim.batch_size * 2**30)

    monkeypatch.setattr(compiler, "compile_step", compile_step)
    (found,) = plan(run(small, "batch_size=auto", "remat=full"), exact=True)
    assert found.config.optim.batch_size == 8
    assert (found.source, found.fits, found.peak_bytes) == ("compiler", True, 8 * 2**30)
    assert (asked[0], asked[-1]) == ((16, "full"), (8, "full"))
    assert len(asked) <= 6
    assert found.to_dict().keys() >= KEYS | EXACT


def test_without_the_compiler_the_formula_answers(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Compiled:
        raise CompilerUnavailable("the TPU compiler needs libtpu, not installed here: pip install it")

    monkeypatch.setattr(compiler, "compile_step", refuse)
    assert main(["plan", f"model.name={small}", "--exact", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)[0]["source"] == "formula"
    assert "v5litepod-1: by formula, as the compiler cannot be asked: the TPU compiler needs libtpu" in printed.err


def test_an_unknown_family_is_left_to_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_config(tmp_path / "m", TINY, model_type="olmo")
    monkeypatch.setattr(compiler, "compile_step", lambda *_, **__: compiled(2**30))
    (found,) = plan(run(model, "batch_size=4"), exact=True)
    assert found.fits and found.to_dict()["peak_bytes"] == 2**30
    with pytest.raises(ValueError, match="the formula knows llama"):
        plan(run(model))


# ---------------------------------------------------------------------------------------------------------- the command


def test_json_is_all_that_is_printed(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"model.name={small}", "max_steps=1000", "--chip", "v5e,v6e", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first.keys() >= KEYS and not first.keys() & EXACT
    assert (first["chip"], first["chips"], first["replicas"], second["chip"]) == ("v5e", 1, 1, "v6e")
    assert sum(first["parts"].values()) == first["peak_bytes"] <= first["limit_bytes"] == 16909238272
    assert first["global_batch_size"] == first["batch_size"] * first["gradient_accumulation"] == 4
    assert first["cost"]["spot"] < first["cost"]["on_demand"]
    assert first["tokens_per_second"] == pytest.approx(4096 / first["step_seconds"])


def test_the_report(small: Path, large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"model.name={small}", "max_steps=1000", "--chip=v5e-8", "global_batch_size=64"]) == 0
    printed = capsys.readouterr().out
    for text in ("v5litepod-8", "base_weights", "sqrt(2 x", "sessions" if "sessions" in printed else "session",
                 "MXU_EFFICIENCY 0.6", "the largest batch_size that fits is"):  # fmt: skip
        assert text in printed
    assert main(["plan", f"model.name={large}", "batch_size=8"]) == 0
    printed = capsys.readouterr().out
    assert "in the order of least harm" in printed and "as it is it fits" in printed
    assert "Hours need optim.max_steps" in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--chip", "v5"], "unknown chip 'v5': did you mean v5"),
        (["--chip", "h100"], "h100 is a GPU, and plans are made for TPUs: v2, "),
        (["--chip", "v5e:3x5"], "there is no topology v5e:3x5: did you mean"),
        (["--chip", "v5e-7"], "there is no v5e-7: the number counts chips. Nearest: "),
        (["--chip"], "--chip: name at least one chip after it"),
        (["--fast"], "--fast: no such option; there are --chip, --exact, --json"),
        (["a.yaml", "b.yaml"], "a.yaml, b.yaml: one configuration file at most"),
        (["batch_size=-1"], "optim.batch_size"),
        (["batch_size=1000000000"], "optim.batch_size=1000000000 x data.max_length=1024: a pass of 2**31 tokens"),
        (["global_batch_size=9", "num_replicas=8", "batch_size=auto"], "cannot be split over 8 replicas; use 8 or 16"),
        (["num_replicas=100000"], "launch.num_replicas=100000: the largest slice of v5e has 256 devices"),
        (["max_length=65536"], "data.max_length=65536 is longer than the 32768 positions"),
        (["model.name=./nowhere"], "there is no such folder"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"model.name={small}", *arguments]) == 2
    printed = capsys.readouterr()
    assert text in printed.err
    assert not printed.out


def test_a_slice_by_any_name() -> None:
    for name, replicas, expected in (
        ("v5e", None, ("v5litepod-1", 1, 1, "v5e:1x1")), ("v5e", 3, ("v5litepod-4", 4, 3, "v5e:2x2")),
        ("v5p", None, ("v5p-8", 4, 4, "v5p:2x2x1")), ("v4-32", None, ("v4-32", 16, 16, "v4:2x2x4")),
        ("v2", None, ("v2-8", 4, 8, "v2:2x2")), ("v6e:2x4", None, ("v6e-8", 8, 8, "v6e:2x4")),
    ):  # fmt: skip
        found = find_slice(name, replicas)
        assert (found.name, found.chips, found.replicas, found.topology) == expected
    assert find_slice("v7x", None).limit > 90 * 2**30
