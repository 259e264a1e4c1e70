"""Tables and bar charts of plans in notebook 3."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tpu_kit.config.loader import load_config
from tpu_kit.notebook import cells
from tpu_kit.notebook.displays import runs as displays
from tpu_kit.planning.planner import Plan, plan
from tpu_kit.planning.report import next_parameters, pick, plan_row, why

QWEN = ["model.name=Qwen/Qwen2.5-0.5B-Instruct", "global_batch_size=64", "max_steps=1000"]
LLAMA = ["model.name=meta-llama/Llama-3.1-8B-Instruct", "global_batch_size=8", "max_steps=1000"]


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return plan(load_config(None, QWEN), ["v5e", "v5litepod-8", "v6e"])


@pytest.fixture(scope="module")
def sharded() -> Plan:
    (found,) = plan(load_config(None, ["model.name=Qwen/Qwen3-32B", "mesh=fsdp=8", *QWEN[1:]]), ["v5litepod-8"])
    return found


def test_the_tables(plans: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    cells.show_table([plan_row(one) for one in plans])
    cells.show_memory(plans[0])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "slice" and [line.split()[0] for line in lines[1:4]] == [
        "v5litepod-1", "v5litepod-8", "v6e-1"
    ]  # fmt: skip
    assert lines[-1].startswith("a device of v5litepod-1 has  15.748  100.0%") and lines[-2].startswith("peak ")


@pytest.mark.parametrize("mesh", [False, True])
def test_the_bars_are_the_settings(plans: list[Plan], sharded: Plan, mesh: bool) -> None:
    one = sharded if mesh else plans[0]
    axes = displays._bars(one).axes[0]
    fitting = {setting.peak_bytes / 2**30 for setting in one.settings if setting.peak_bytes <= one.where.limit}
    widths = [bar.get_width() for bar in axes.patches]
    assert len(widths) <= 12 and len(fitting & set(widths)) >= 2
    labels = [text.get_text() for text in axes.texts]
    assert len([label for label in labels if label.endswith(": the pick")]) == 1
    # The pick is the plan's, and left of the line that keeps the reserve free.
    assert f"{one.peak_bytes / 2**30:.1f} GiB, " in next(label for label in labels if label.endswith("pick"))


@pytest.mark.parametrize("lengths", [(30, 41, 40), (8192, 12), (1,), (9000, 5000)])
def test_bars_of_lengths_can_be_seen(lengths: tuple[int, ...]) -> None:
    axes = cells._lengths(SimpleNamespace(lengths=lengths, fill=1.0, sources=()), 8192, "rows 3% full").axes[0]  # type: ignore[arg-type]
    low, high = axes.get_xlim()
    bars = [bar for bar in axes.patches if bar.get_height()]
    assert sum(bar.get_height() for bar in bars) == len(lengths)
    assert all(bar.get_width() > (high - low) / 60 for bar in bars) and axes.get_title() == "rows 3% full"


def test_the_pick_is_the_cheapest_and_goes_on_in_the_next_notebook(plans: list[Plan]) -> None:
    best = pick(plans)
    assert best.run is not None and best.run.on_demand == min(one.run.on_demand for one in plans)
    text = why(plans)
    assert text.startswith(f"{best.where.name}: ") and "The cheapest that fits: " in text
    assert "the longest context of one row is 32,768 tokens" in text
    given: dict[str, object] = {}
    exec(next_parameters(best), {}, given)
    again = load_config(None, parameters=given)
    assert again.optim.batch_size == best.config.optim.batch_size and again.optim.global_batch_size == 64


def test_when_nothing_fits() -> None:
    (found,) = plan(load_config(None, LLAMA), ["v5e"])
    assert not found.fits
    text = why([found])
    axes = displays._bars(found).axes[0]
    assert text.startswith("The run fits no slice; nearest is v5litepod-1.") and "the unchanged run fits v6e-1" in text
    assert any(label.get_text().endswith(": the nearest") for label in axes.texts)
