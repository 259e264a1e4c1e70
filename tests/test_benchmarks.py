from __future__ import annotations

import importlib.util
import json

import pytest

from tpu_kit.testing import REPOSITORY, run_python


@pytest.mark.slow
def test_the_step_benchmark_runs_and_its_exact_goals_are_met():
    done = run_python(["-m", "tests.benchmarks.step", "--smoke", "--json"], cwd=REPOSITORY, timeout=540)
    report = json.loads(done.stdout)
    theirs, mine = report["pairs"][0]
    assert report["peer"].startswith("SFTTrainer of trl ")
    assert theirs["executions"] > mine["executions"] == 1
    assert mine["cpu_seconds"] > 0 and len(report["ratios"]) == 1
    # A single pair with quick compiles says nothing about time.
    exact = {goal: met for goal, met in report["goals"].items() if "time" not in goal}
    assert exact and all(exact.values()), exact


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
def test_the_memory_benchmark_runs_and_the_levers_together_need_least():
    done = run_python(["-m", "tests.benchmarks.memory", "--smoke", "--json"], cwd=REPOSITORY, timeout=540)
    rows = json.loads(done.stdout)["rows"]
    alone, together = rows["scan, splash"], rows["all: scan, splash, chunks, tiles"]
    assert together["total_bytes"] < alone["total_bytes"] / 2
    assert together["largest_buffers"] and together["loop_trips"]
