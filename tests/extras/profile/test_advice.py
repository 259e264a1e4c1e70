"""Each advice for a step with its cause, and no advice for a healthy step.

test_profile.py provokes the causes that a CPU can show in real runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tpu_kit.config.loader import load_config
from tpu_kit.extras.profile.recorder import Recording
from tpu_kit.extras.profile.report import Profile
from tpu_kit.extras.profile.timeline import BUCKETS, PHASES

Change = Callable[[Profile], Profile]
HEALTHY = Profile(
    config=load_config(None, ["batch_size=4"]), device="tpu", replicas=2, costs=(),
    split=dict.fromkeys(BUCKETS, 0.0) | {"device compute": 0.1, "host tracing": 0.001},
    recordings=tuple(
        Recording(rank, "tpu", fill=0.95, phases=dict.fromkeys(PHASES, 0.1), steps=10,
                  counts={"compiles": 0, "fallbacks": 0})
        for rank in range(2)
    ),
)  # fmt: skip


def part(name: str, seconds: float) -> Change:
    return lambda p: replace(p, split={**p.split, name: seconds})


def setting(*values: str) -> Change:
    return lambda p: replace(p, config=load_config(None, ["batch_size=4", *values]))


def recorded(**values: Any) -> Change:
    """The first replica with other figures."""
    return lambda p: replace(p, recordings=(replace(p.recordings[0], **values), *p.recordings[1:]))


CASES: dict[str, tuple[str, list[Change], str]] = {
    "input": ("input wait", [part("input wait", 0.03)], "free processor cores"),
    "files": (
        "input wait", [setting("distill.teacher=embedded", "distill.files=gs://a/b"), part("input wait", 0.03)],
        "distill.files=FOLDER",
    ),
    "tracing": ("host tracing", [part("host tracing", 0.05)], "optim.batch_size=8 or more"),
    "rows of an update": (
        "host tracing", [setting("global_batch_size=16"), part("host tracing", 0.05)],
        "optim.batch_size=8 optim.global_batch_size=null",
    ),
    "unrolled": ("host tracing", [setting("scan_layers=off"), part("host tracing", 0.05)], "optim.scan_layers=on"),
    "logging": ("host code", [part("host code", 0.02)], "tracking.logging_steps=100"),
    "replicas": ("exposed collectives", [part("exposed collectives", 0.03)], "optim.gradient_accumulation=2"),
    "mesh": ("exposed collectives", [setting("mesh=fsdp=2"), part("exposed collectives", 0.03)], "optim.batch_size=8"),
    "compiles": ("recompilation", [recorded(counts={"compiles": 3})], "keep the shapes"),
    "unpacked": ("recompilation", [setting("packing=false"), recorded(counts={"compiles": 3})], "data.packing=true"),
    "reads": ("host reads", [recorded(counts={"fallbacks": 20})], "compute them on the device"),
    "padding": ("padding", [setting("packing=false"), recorded(fill=0.3)], "data.packing=true"),
    "long examples": ("padding", [recorded(fill=0.6)], "data.max_length="),
    "slow replica": ("slow replica", [recorded(phases=dict.fromkeys(PHASES, 0.4))], "tpu_kit verify"),
}  # fmt: skip


def test_a_healthy_step_has_no_advice() -> None:
    assert HEALTHY.advice == []


@pytest.mark.parametrize("name", CASES)
def test_a_rule_finds_its_cause(name: str) -> None:
    rule, changes, expected = CASES[name]
    step = HEALTHY
    for change in changes:
        step = change(step)
    (advice,) = step.advice
    assert advice.rule == rule and expected in advice.change and advice.gain > 0
    assert str(advice).startswith(f"{advice.change}: {advice.figure} (at most +")


def test_the_largest_gain_comes_first_and_is_that_of_the_empty_part() -> None:
    step = part("input wait", 0.02)(part("host code", 0.05)(HEALTHY))
    first, second = step.advice
    assert (first.rule, second.rule) == ("host code", "input wait")
    assert first.gain == pytest.approx(step.seconds / (step.seconds - 0.05) - 1)
    assert replace(HEALTHY, recordings=()).advice == [], "of a predicted profile too"
