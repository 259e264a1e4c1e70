from __future__ import annotations

import gzip
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import memory, objectives, tpu_peer, tpu_step
from tests.planning.test_step_estimate import STEP
from tests.support.child_processes import REPOSITORY, run_python
from tpu_kit.planning.compiler.compile_check import Compiled


@pytest.mark.slow
def test_the_step_benchmark_runs_and_its_exact_goals_are_met():
    done = run_python(["-m", "tests.benchmarks.step", "--smoke", "--json"], cwd=REPOSITORY, timeout=540)
    report = json.loads(done.stdout)
    theirs, mine = report["pairs"][0]
    assert report["peer"].startswith("SFTTrainer of trl ")
    assert theirs["executions"] > mine["executions"] == 1
    assert mine["cpu_seconds"] > 0 and len(report["ratios"]) == 1
    # A single pair with fast compiles says nothing about time.
    exact = {goal: met for goal, met in report["goals"].items() if "time" not in goal}
    assert exact and all(exact.values()), exact


@pytest.mark.slow
def test_the_benchmark_of_images_runs():
    done = run_python(["-m", "tests.benchmarks.images", "--images", "300", "--decoded", "40", "--json"], cwd=REPOSITORY)
    report = json.loads(done.stdout)
    assert report["images"] == 300 and 40 <= report["decoded"] < 100
    assert 0 < report["again"] < report["first"] and report["seconds"] > 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
def test_the_memory_benchmark_runs_and_the_levers_together_need_least():
    done = run_python(["-m", "tests.benchmarks.memory", "--smoke", "--json"], cwd=REPOSITORY, timeout=540)
    report = json.loads(done.stdout)
    rows = report["rows"]
    assert report["goals"] == {}  # goals are for the whole model
    alone, together = rows["scan, splash"], rows["all: scan, splash, chunks, tiles"]
    assert together["total_bytes"] < alone["total_bytes"] / 2
    assert 0 < together["hbm_bytes"] < 1.2 * together["bytes_accessed"]  # at low effort everything is in HBM
    # The kernels' lower bound: two passes forward, one backward.
    assert together["flops"] > 2 * (2 * 4 + 10) * 4 * 1024**2 * 896


def _compiled(total: float, flops: float, seconds: float) -> Compiled:
    return Compiled(
        topology="v5e:1x1", fits=True,
        limit_bytes=2**34, argument_bytes=2**30, temporary_bytes=2**29, total_bytes=int(total * 2**30), flops=flops,
        bytes_accessed=110e9, hbm_bytes=21.5e9, trace_seconds=1.0,
        compile_seconds=seconds, libtpu="0.0.21", program="",
    )  # fmt: skip


def test_the_table_of_estimated_steps_has_a_row_for_each_kind_of_work():
    one, other = (
        replace(_compiled(1.5, 12e12, 40.0), estimated=parts)
        for parts in ({"base products": 0.05, "loss": 0.02}, {"base products": 0.04, "adapters": 0.01})
    )
    lines = tpu_step.table({"a": one, "b": other}).splitlines()
    assert lines[0] == "| | a | b |" and "| estimated ms | 70.00 | 50.00 |" in lines
    assert lines[-2:] == ["| of it loss | 20.00 | 0.00 |", "| of it adapters | 0.00 | 10.00 |"]
    assert all(tpu_step.configuration(model).lora.r == 16 for model in tpu_step.MODELS)
    broken = replace(_compiled(20.0, 0.0, 9.0), fits=False, flops=None, hbm_bytes=None)
    lines = tpu_step.table({"a": one, "b": broken}).splitlines()
    assert "| TFLOP | 12.00 | - |" in lines and "| estimated ms | 70.00 | - |" in lines
    told = tpu_step.comparison(one, {"x": broken, "y": replace(one, estimated={"loss": 0.14}, total_bytes=3 * 2**30)})
    assert told == "Against y: 0.50 of the time, 0.50 of the memory."
    assert tpu_step.comparison(one, {"x": broken}) == "Tunix does not fit."


def test_a_decoded_token_is_a_sixteenth_of_the_program():
    block = replace(_compiled(1.5, 16e12, 40.0), estimated={"loss": 0.016})
    token = tpu_step.of_a_token(block)
    assert (token.flops, token.estimated, token.total_bytes) == (1e12, {"loss": 0.001}, block.total_bytes)
    assert tpu_step.configuration("qwen2.5-0.5b", tpu_step.SAMPLING).on_policy


def test_a_program_of_tunix_is_compiled_once_and_read_by_our_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("jaxlib.xla_client")
    asked = list[dict[str, Any]]()
    names = ("argument", "output", "alias", "temp", "generated_code")
    stats = {f"{name}_size_in_bytes": 2**number for number, name in enumerate(names)}
    says = {"trace_seconds": 1.0, "compile_seconds": 2.0}

    def compiles(request: dict[str, Any], figures: Path, text: Path) -> None:
        asked.append(request)
        if request["remat"] == "NONE":
            used = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.00G of 15.75G hbm."
            figures.write_text(json.dumps(says | {"out_of_memory": used}))
            return
        text.write_bytes(gzip.compress(STEP.encode()))
        figures.write_text(json.dumps(says | {"stats": stats, "accessed_once": 1e9}))

    monkeypatch.setattr(tpu_peer, "FOLDER", tmp_path)
    monkeypatch.setattr(tpu_peer, "_compile", compiles)
    config = tpu_step.configuration("qwen2.5-0.5b")
    for remat in ("DECODER", "NONE", "DECODER"):
        found = tpu_peer.compile_peer("qwen2.5-0.5b", config, tpu_step.CHIP, "step", (4, 1024), remat)
        assert found.fits == (remat == "DECODER") and found.compile_seconds == 2.0
        assert found.total_bytes == (1 + 2 - 4 + 8 + 16 if found.fits else 17 * 2**30)
        assert (found.estimated.get("attention kernel", 0) > 0) == found.fits
    assert [one["remat"] for one in asked] == ["DECODER", "NONE"]
    assert {(one["preset"], one["rank"], one["int8"]) for one in asked} == {("qwen2p5_0p5b", 16, False)}


def test_the_memory_benchmark_says_which_goals_are_met_and_what_binds():
    rows = {
        memory.PLAIN_ROW: _compiled(3.2, 12e12, 300.0), memory.BEST_ROW: _compiled(1.55, 12.1e12, 40.0),
    }  # fmt: skip
    report = memory.Report(24, rows, {memory.PLAIN_ROW: (30, 1), memory.BEST_ROW: (130, 1)})
    assert [met for met, _ in report.goals().values()] == [False, True, False, True]
    text = str(report)
    assert "NOT MET 1.5 GiB in all: 1.550, of which 1.000 are arguments and 0.500 temporaries" in text
    assert "met     100 GB of HBM traffic a step: 21.5; accessed, on-chip too: 110.0" in text


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")
def test_the_generation_benchmark_runs_and_its_exact_goals_are_met():
    done = run_python(["-m", "tests.benchmarks.generate", "--smoke", "--json"], cwd=REPOSITORY, timeout=880)
    report = json.loads(done.stdout)
    for cache in ("dynamic", "static"):
        new = report["speed"][f"xla-cpu 1 {cache}"]["new"]["compiles"]
        assert new["ours"] == 0 < new["stock"]
    # Few tokens, one turn and fast compiles say nothing about time; the second turn of ten prompts may have a new
    # width.
    exact = {goal: met for goal, met in report["goals"].items() if "time" not in goal}
    exact.pop("batch 8: at most 6 programs for 10 prompts, then none")
    assert len(exact) == 5 and all(exact.values()), exact


@pytest.mark.slow
def test_the_checkpoint_benchmark_runs():
    done = run_python(["-m", "tests.benchmarks.checkpoint", "--smoke", "--json"], cwd=REPOSITORY, timeout=300)
    report = json.loads(done.stdout)
    assert report["adapter_bytes"] > 15e6 and report["checkpoint_bytes"] > 2 * report["adapter_bytes"]
    assert (
        {len(times) for times in report["blocks"].values()} == {2} == {len(times) for times in report["calls"].values()}
    )
    assert report["notices"] and set(report["goals"].values()) <= {True, False}


@pytest.mark.slow
def test_the_objectives_benchmark_runs(tmp_path: Path):
    done = run_python(["-m", "tests.benchmarks.objectives", str(tmp_path), "--smoke", "--json"], timeout=540)
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) == {f"{after} - {before}" for pairs in objectives.PAIRS.values() for before, after in pairs}
    assert len(json.loads((tmp_path / "rows-8.json").read_text())["with head"]) == 8
    assert json.loads((tmp_path / "samples-8.json").read_text())["seconds"]["few: on-policy"] > 0


def test_the_objectives_benchmark_says_what_is_shown():
    before = {"fine-tuning": [True] * 40 + [False] * 60, "without head": [True, False]}
    more = (1, 2, 3, 4, 5)  # correct answers out of 100
    results = {
        seed: before | {"distillation": [True] * (40 + count) + [False] * (60 - count), "with head": [seed < 2, True]}
        for seed, count in enumerate(more)
    }
    found = objectives.report(results, "rows")
    gain = found["distillation - fine-tuning"]
    assert gain["gain"] == pytest.approx(0.03) and gain["low"] == pytest.approx(0.03 - 2.776 * 0.01581139 / 5**0.5)
    assert gain["verdict"] == "a gain" and gain["lines"][2] == "| 0 | 40.0% | 41.0% | +1.0% |"
    assert found["with head - without head"]["verdict"] == "no gain shown"
