"""Each rule on recorded figures of a step that has its cause, and no rule on the step that the planner picks.

tests/profiling/test_profile.py provokes in real runs what a CPU can show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.compiler_models import LLAMA_8B, QWEN2_500M, write_config
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.distributed.runtime import MemoryBudget
from tpu_kit.hardware.chips import GIB
from tpu_kit.models.architecture import read_shape
from tpu_kit.planning.planner import plan
from tpu_kit.profiling.advice import RULES, Advice, advise, changed, gain, settled
from tpu_kit.profiling.profile import Cost, Profile
from tpu_kit.profiling.recorder import Recording
from tpu_kit.profiling.report import energy
from tpu_kit.profiling.timeline import PHASES

Change = Callable[[Profile], Profile]


def planned(config: TrainConfig, chip: str = "v5e") -> Profile:
    """The profile of the planner's own choice, as its formula predicts it, with recordings without a fault."""
    (one,) = plan(config, [chip])
    where, time = one.where, one.time
    assert time is not None
    busy = max(time.compute, time.memory)
    split = {"device compute": busy, "exposed collectives": time.all_reduce, "input wait": 0.0,
             "host tracing": 0.01 * busy, "host code": 0.0, "unexplained": 0.0}  # fmt: skip
    recordings = tuple(
        Recording(rank, "tpu", fill=0.95, longest=900, phases=dict.fromkeys(PHASES, 0.1), steps=10,
                  peak_bytes=int(0.85 * where.limit), limit_bytes=where.limit, counts={"compiles": 0, "fallbacks": 0})
        for rank in range(where.replicas)
    )  # fmt: skip
    room = MemoryBudget(where.name, "tpu", where.replicas, where.limit, 0.0, where)
    return Profile(
        config=settled(one.config, where.replicas), device=where.name, room=room,
        shape=read_shape(one.config.model), replicas=where.replicas, chips=where.chips, split=split, costs=(),
        memory=one.parts, recordings=recordings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    model = write_config(tmp_path_factory.mktemp("model"), QWEN2_500M)
    return planned(load_config(None, [f"model.name={model}", "num_replicas=8", "max_steps=5000", "save_steps=500"]))


def test_the_planners_choice_needs_no_advice(healthy: Profile) -> None:
    assert advise(healthy) == []
    assert "Advice: none; no rule found a loss" in str(healthy)


def part(name: str, share: float) -> Change:
    """The step with a bucket that takes this share of it."""

    def apply(p: Profile) -> Profile:
        rest = sum(seconds for bucket, seconds in p.split.items() if bucket != name)
        return replace(p, split={**p.split, name: rest * share / (1 - share)})

    return apply


def setting(name: str, value: Any, then: Change = lambda p: p) -> Change:
    return lambda p: then(replace(p, config=changed(p.config, {name: value})))


def recorded(**values: Any) -> Change:
    """The first replica with other figures."""
    return lambda p: replace(p, recordings=(replace(p.recordings[0], **values), *p.recordings[1:]))


CAUSES: dict[str, tuple[Change, str]] = {
    "input_wait": (part("input wait", 0.3), "free processor cores"),
    "host_tracing": (setting("optim.scan_layers", "off", part("host tracing", 0.4)), "optim.scan_layers=on"),
    "host_code": (part("host code", 0.2), "tracking.logging_steps=100"),
    "recompilation": (recorded(counts={"compiles": 3}, causes=["step 7 compiled 1: ..."]), "keep the inputs"),
    "host_reads": (recorded(counts={"fallbacks": 20}, reads=["my/model.py:12 x.item()"]), "remove these reads"),
    "preparation": (lambda p: replace(p, prepare_seconds=300.0), "data.num_proc="),
    "exposed_collectives": (part("exposed collectives", 0.3), "optim.gradient_accumulation="),
    "slow_replica": (
        lambda p: recorded(phases=dict.fromkeys(PHASES, 10 * (0.01 + 0.3 * p.seconds)))(p), "tpu_kit doctor",
    ),
    "memory_imbalance": (recorded(peak_bytes=int(5 * GIB)), "launch.mesh=auto"),
    "free_memory": (setting("optim.batch_size", 1), "optim.batch_size="),
    "accumulation": (
        setting("optim.gradient_accumulation", 8, setting("optim.batch_size", 1)), "optim.batch_size=2 optim.gradient",
    ),
    "memory_pressure": (lambda p: recorded(peak_bytes=int(0.99 * p.recordings[0].limit_bytes or 0))(p), "optim."),
    "padding": (setting("data.packing", False, recorded(fill=0.3)), "data.packing=true"),
    "long_rows": (setting("model.attention", "sdpa", recorded(longest=100)), "data.max_length=128 optim.batch_size="),
    "dense_attention": (setting("model.attention", "sdpa"), "model.attention=splash"),
    "fp32_weights": (setting("model.base_dtype", "fp32", setting("optim.batch_size", 1)), "model.base_dtype=bf16"),
    "loss_chunks": (setting("optim.loss_chunk", 16), "optim.loss_chunk="),
    "frequent_checkpoints": (setting("checkpoint.save_steps", 1), "checkpoint.save_steps="),
}  # fmt: skip


@pytest.mark.parametrize("rule", CAUSES)
def test_a_rule_finds_its_cause(rule: str, healthy: Profile) -> None:
    change, expected = CAUSES[rule]
    found = {one.rule: one for one in map(_apply(change(healthy)), RULES) if one is not None}
    assert rule in found, f"only {[*found]}"
    one = found[rule]
    assert expected in one.change and one.figure and one.change
    assert one.gain is None or rule == "memory_pressure" or one.gain >= 0
    assert str(one).startswith(one.change) and ("predicted" in str(one))


def _apply(p: Profile) -> Callable[[Any], Advice | None]:
    return lambda rule: Advice(rule.__name__, *found) if (found := rule(p)) else None


def test_a_model_that_fits_one_device_needs_no_sharding(tmp_path_factory: pytest.TempPathFactory) -> None:
    small, large = (write_config(tmp_path_factory.mktemp("model"), shape) for shape in (QWEN2_500M, LLAMA_8B))
    common = ["mesh=fsdp=8", "max_steps=1000", "save_steps=500"]
    found = advise(planned(load_config(None, [f"model.name={small}", *common]), "v5e:2x4"))
    assert "launch.mesh=null" in [one.change for one in found if one.rule == "needless_sharding"]
    found = advise(planned(load_config(None, [f"model.name={large}", *common]), "v5e:2x4"))
    assert not [one for one in found if one.rule == "needless_sharding"]


def test_a_model_that_computes_more_than_it_reads_gains_by_less_recomputation(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    common = [f"model.name={model}", "num_replicas=4", "max_steps=1000", "save_steps=500", "batch_size=1"]
    found = {one.rule: one for one in advise(planned(load_config(None, [*common, "remat=full"]), "v5p"))}
    assert found["cheaper_remat"].change.startswith("optim.remat=") and (found["cheaper_remat"].gain or 0) > 0.1


def test_every_rule_has_a_cause() -> None:
    names = [rule.__name__ for rule in RULES]
    assert len(names) >= 15 and {*names} == {*CAUSES, "needless_sharding", "cheaper_remat"}


def test_the_largest_gain_comes_first_and_a_change_once(healthy: Profile) -> None:
    wrong = setting("optim.batch_size", 1, part("host tracing", 0.5))(part("input wait", 0.1)(healthy))
    found = advise(wrong)
    gains = [one.gain for one in found if one.gain is not None]
    assert gains == sorted(gains, reverse=True) and len(gains) >= 2
    assert len({one.change for one in found}) == len(found)


def test_the_gain_scales_the_device_and_keeps_the_rest(healthy: Profile) -> None:
    p = replace(healthy, split={**healthy.split, "host tracing": healthy.split["device compute"]})
    assert gain(p, p.config) == pytest.approx(0)
    assert gain(p, p.config, ["host tracing"]) == pytest.approx(p.seconds / (p.seconds - p.split["host tracing"]) - 1)


@pytest.mark.parametrize(("short", "expected"), [(0.1, 2 * 0.1 / 0.1), (0.0, 2 * 0.1 / 0.18)])
def test_on_a_cpu_calls_and_work_scale_apart(healthy: Profile, short: float, expected: float) -> None:
    """By hand: 80 ms of products, 20 ms of Python. If short rows take as long, twice the rows do too."""
    p = replace(
        healthy, room=MemoryBudget("this host", "cpu", 1, 2**40), replicas=1,
        costs=(Cost("mm", "", "matrix product", 1),),
        split={**dict.fromkeys(healthy.split, 0.0), "device compute": 0.08, "host tracing": 0.02},
        recordings=(Recording(0, "cpu", seconds=0.1, short_seconds=short),),
    )  # fmt: skip
    assert p.batch.gradient_accumulation == 1
    assert gain(p, changed(p.config, {"optim.batch_size": 2 * p.batch.batch_size})) == pytest.approx(expected - 1)
    assert gain(p, changed(p.config, {"optim.gradient_accumulation": 2})) == pytest.approx(0)


def test_energy_is_an_estimate_with_its_source(healthy: Profile, tmp_path: Path) -> None:
    assert energy(healthy) == "energy: not estimated; the power of v5e is not published"
    model = write_config(tmp_path, QWEN2_500M)
    p = planned(load_config(None, [f"model.name={model}", "num_replicas=4", "max_steps=10"]), "v4")
    joules = 170 * 4 * p.seconds / p.batch.tokens_per_update * 1e6
    assert f"an estimate: {joules / 3.6e6 * 1.1:.3g} kWh" in energy(p) and "arXiv:2304.01433" in energy(p)
