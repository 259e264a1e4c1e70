"""The formula's time of a step against the recorded answers of the TPU compiler's cost model."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from typing import Any

import pytest

from tests.benchmarks import headline
from tests.benchmarks.step_times import FILE, correlation, setting
from tpu_kit.machine.slices import find_slice
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.planning.compiler.compile_check import Compiled
from tpu_kit.planning.cost import HOST_SECONDS
from tpu_kit.planning.run_on_slice import Setting

ANSWERS: list[dict[str, Any]] = json.loads(FILE.read_text())
MODELS = sorted({one["model"] for one in ANSWERS})


def of_a_token(answers: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Returns the seconds per token by the compiler, and by formula."""
    runs = [(setting(one), sum(one["estimated"].values()) + HOST_SECONDS) for one in answers]
    return (
        [seconds / run.update.tokens_per_update for run, seconds in runs],
        [run.time.seconds / run.update.tokens_per_update for run, _ in runs],
    )


def test_the_formula_is_near_the_cost_model_of_the_compiler() -> None:
    compiler, formula = of_a_token(ANSWERS)
    errors = [abs(one / other - 1) for one, other in zip(formula, compiler, strict=True)]
    assert statistics.median(errors) < 0.05 and max(errors) < 0.2
    assert correlation(compiler, formula) > 0.95


@pytest.mark.parametrize("model", MODELS)
def test_the_setting_that_is_the_fastest_by_formula_is_near_the_fastest_of_the_compiler(model: str) -> None:
    compiler, formula = of_a_token([one for one in ANSWERS if one["model"] == model])
    assert correlation(compiler, formula) > 0.75
    chosen = compiler[formula.index(min(formula))]
    assert chosen <= 1.05 * min(compiler)


def test_speeds_by_formula_are_near_those_that_were_published_of_compiled_steps() -> None:
    """Shipped configurations, also in int4; a dash stands for a speed that was not compiled."""
    rows = headline.PAGE.read_text().partition(headline.HEADER)[2].partition("\n\n")[0].splitlines()
    named = [(cells[1].strip(" `"), cells[7].strip()) for cells in (row.split("|") for row in rows)]
    errors = {}
    for row, speed in named:
        if speed != "-":
            config, where = headline.configuration(row), find_slice(row.split()[0].rpartition("-")[2], 1)
            run = Setting(config, read_shape(config.model), where)
            errors[row] = run.speed / float(speed.replace(",", "")) - 1
    assert any("int4" in row for row in errors) and max(map(abs, errors.values())) < 0.12, errors


def test_a_compiled_step_takes_what_the_cost_model_says() -> None:
    one = ANSWERS[0]
    run = setting(one)
    step = Compiled(
        topology="v5e:1x1", fits=True, limit_bytes=run.where.limit, total_bytes=one["total_bytes"], flops=1e12,
        estimated=one["estimated"], trace_seconds=1.0, compile_seconds=1.0, libtpu="0.0.21", program="x",
    )  # fmt: skip
    assert replace(run, compiled={"step": step}).time.seconds == pytest.approx(
        sum(one["estimated"].values()) + HOST_SECONDS
    )
    assert replace(run, compiled={"step": replace(step, estimated={})}).time == run.time
