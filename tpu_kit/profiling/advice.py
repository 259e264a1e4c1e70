"""Rules that tell what to change in a run, each from a figure of its profile, with the gain that the planner predicts.

A rule is a function of `RULES` that returns an advice or None. The gain is in tokens per second. It follows from the
profile's own step: `cost` scales the time of the device with the work of the changed run, and a bucket that the change
removes counts as empty.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tpu_kit.config.loader import TrainConfig, batch_arithmetic
from tpu_kit.hardware.chips import GIB
from tpu_kit.planning import cost
from tpu_kit.planning.memory_estimate import reserve
from tpu_kit.planning.preflight import estimate_in

if TYPE_CHECKING:
    from tpu_kit.profiling.profile import Profile

LEAST_GAIN = 0.05
"""A change of the configuration is advised from this predicted gain on."""
_INPUT, _TRACING, _HOST, _EXPOSED, _FULL, _UNEVEN, _FILL = 0.05, 0.1, 0.05, 0.1, 0.95, 0.15, 0.85
_EAGER = 0.35
"""The share of host tracing off XLA, where it also holds what the profiler itself takes for each operation."""


@dataclass(frozen=True)
class Advice:
    """One change.

    Attributes:
        rule: name of the rule.
        figure: the figure that it rests on.
        change: the parameter and its value, as on the command line, or what to do.
        gain: predicted growth of tokens per second, 0.1 for 10 %; None where nothing predicts it.
    """

    rule: str
    figure: str
    change: str
    gain: float | None

    def __str__(self) -> str:
        gain = "not predicted" if self.gain is None else f"{self.gain:+.0%} tokens/s predicted"
        return f"{self.change}: {self.figure} ({gain})"


Found = tuple[str, str, float | None] | None
"""Figure, change and gain."""


def advise(p: Profile) -> list[Advice]:
    """Applies all rules; the largest gain comes first, and advice without a predicted gain before the others.

    Of rules with the same change the first is kept.
    """
    found = [Advice(rule.__name__, *one) for rule in reversed(RULES) if (one := rule(p))]
    if "optim.global_batch_size" in p.config.sources:
        rows = ("optim.batch_size=", "optim.gradient_accumulation=")
        free = " optim.global_batch_size=null"
        found = [replace(one, change=one.change + free * one.change.startswith(rows)) for one in found]
    unique = {one.change: one for one in found}.values()
    return sorted(unique, key=lambda one: -(one.gain if one.gain is not None else 1e9))


def settled(config: TrainConfig, replicas: int) -> TrainConfig:
    """Returns the run with its batch as rows and passes, so that rules can change each of them."""
    batch = batch_arithmetic(config, replicas)
    optim = replace(config.optim, batch_size=batch.batch_size, gradient_accumulation=batch.gradient_accumulation)
    return replace(config, optim=replace(optim, global_batch_size=None))


def changed(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """Returns the run with other values of parameters such as "optim.remat"."""
    for name, value in changes.items():
        section, _, leaf = name.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{leaf: value})})
    return config


def gain(p: Profile, config: TrainConfig, removed: Collection[str] = ()) -> float | None:
    """Predicts the growth of tokens per second of a changed run.

    Args:
        p: the profile of the run as it is.
        config: the changed run.
        removed: buckets that the change empties.
    """
    if p.shape is None or p.room is None:
        return None
    new, busy = dict(p.split), p.split["device compute"]
    calls, size = pass_work(p, config)
    if p.room.where is not None:
        before, after = (cost.predict_time(p.room.seen(one), p.shape, p.room.where) for one in (p.config, config))
        new["device compute"] *= max(after.compute, after.memory) / max(before.compute, before.memory)
        new["exposed collectives"] *= after.all_reduce / before.all_reduce if before.all_reduce else 1.0
    else:
        new["device compute"] *= p.update + (1 - p.update) * (p.per_call * calls + (1 - p.per_call) * size)
    calls = p.update + (1 - p.update) * calls
    if _on_xla(p):  # a step is traced while the device runs the one before
        host = (p.first.phases["step"] + p.first.phases["dispatch"]) / max(1, p.first.steps)
        later = max(0.0, calls * host - new["device compute"]) - max(0.0, host - busy)
        new["host tracing"] = max(0.0, new["host tracing"] + later)
    else:
        new["host tracing"] *= calls
    new |= dict.fromkeys(removed, 0.0)
    tokens = batch_arithmetic(config, p.replicas).tokens_per_update / p.batch.tokens_per_update
    return tokens * p.seconds / sum(new.values()) - 1


def pass_work(p: Profile, config: TrainConfig) -> tuple[float, float]:
    """The operations of a changed run's passes, and their work on a device of unknown speed, each over the present one.

    Products take the time of their FLOPs, at this CPU's rates for the types, and all else that of its bytes, in the
    shares of the trace. Recomputation repeats all else as often as products.
    """
    assert p.shape is not None
    room, dtype, found = p.room, p.config.model.base_dtype, []
    for one in (p.config, config, changed(config, {"optim.remat": p.config.optim.remat})):
        same = changed(room.seen(one) if room else one, {"model.base_dtype": dtype})
        done = cost.work(same, p.shape, batch_arithmetic(one, p.replicas))
        found.append((done.flops, done.traffic - cost.UPDATE_TRAFFIC * done.reduced))
    (flops, moved), (new_flops, new_moved), (kept, _) = found
    again, other = new_flops / kept, config.model.base_dtype
    passes = batch_arithmetic(config, p.replicas).gradient_accumulation / p.batch.gradient_accumulation
    slower = 1.0 if other == dtype else cost.host_rate(dtype) / cost.host_rate(other)
    return passes * again, p.products * slower * new_flops / flops + (1 - p.products) * again * new_moved / moved


def _fits(p: Profile, config: TrainConfig) -> bool:
    if p.shape is None or p.room is None:
        return False
    free = max(reserve(config), p.room.free)
    return estimate_in(config, p.shape, p.room).total_bytes <= p.room.limit * (1 - free)


def _better(
    p: Profile, figure: str, changes: Iterable[Mapping[str, Any]], least: float = LEAST_GAIN, times: float = 1.0
) -> Found:
    """The first of these changes that fits and has nine tenths of the largest gain, which also has a factor."""
    tried = [(gain(p, one), names) for names in changes if _fits(p, one := changed(p.config, names))]
    gains = [(grown, names) for won, names in tried if won is not None and (grown := (1 + won) * times - 1) >= least]
    best = next((one for one in gains if one[0] >= 0.9 * max(won for won, _ in gains)), None)
    return (
        (figure, " ".join(f"{name}={str(value).lower()}" for name, value in best[1].items()), best[0]) if best else None
    )


def _larger_batches(p: Profile) -> Iterator[Mapping[str, Any]]:
    return ({"optim.batch_size": p.batch.batch_size << power} for power in range(1, 7))


def _large(p: Profile, bucket: str, least: float) -> str:
    """The figure of a part that takes more than this share of a step; else nothing."""
    if p.share(bucket) <= least:
        return ""
    return f"{bucket} takes {p.share(bucket):.0%} of a step ({1000 * p.split[bucket]:.1f} of {1000 * p.seconds:.1f} ms)"


def input_wait(p: Profile) -> Found:
    """The device waits for batches."""
    if not (figure := _large(p, "input wait", _INPUT)):
        return None
    change = "give this host more free processor cores: batches are made by one thread of each replica"
    if p.config.distill.files is not None:
        change = "distill.files=FOLDER on a local disk"
    return figure, change, gain(p, p.config, ["input wait"])


def host_tracing(p: Profile) -> Found:
    """The device waits for Python: for the trace of the step on XLA, for the next operation elsewhere."""
    if not (figure := _large(p, "host tracing", _TRACING if _on_xla(p) else _EAGER)):
        return None
    if _on_xla(p) and p.config.optim.scan_layers == "off" and p.config.optim.remat != "none":
        return figure, "optim.scan_layers=on", gain(p, p.config, ["host tracing"])
    return _better(p, figure, _larger_batches(p))


def host_code(p: Profile) -> Found:
    """The device waits while the host logs."""
    if not (figure := _large(p, "host code", _HOST)):
        return None
    more = max(10, 10 * p.config.tracking.logging_steps)
    return figure, f"tracking.logging_steps={more}", gain(p, p.config, ["host code"])


def recompilation(p: Profile) -> Found:
    """Programs are compiled in the steady state."""
    if not (count := p.first.counts.get("compiles", 0)):
        return None
    change = "keep the inputs of the step as they are; pass what changes by step as a tensor"
    if not p.config.data.packing:
        change = "data.packing=true"
    elif p.config.optim.batch_growth_steps is not None:
        change = "optim.batch_growth_steps=null"
    figure = f"{count} programs were compiled in {p.first.steps} steps of the steady state: {'; '.join(p.first.causes)}"
    return figure, change, gain(p, p.config, ["host tracing"])


def host_reads(p: Profile) -> Found:
    """The host reads the device, or computes for it, in every step."""
    first = p.first
    if (count := first.counts.get("fallbacks", 0) / max(1, first.steps)) < 1:
        return None
    lines = "; ".join(first.reads) or "in the backward pass, or in code that was not seen"
    figure = f"the host reads or computes {count:.0f} values of each step: {lines}"
    return figure, "remove these reads, or compute on the device", gain(p, p.config, ["host tracing"])


def preparation(p: Profile) -> Found:
    """Tokenizing by one process takes long."""
    cores = os.cpu_count() or 1
    if p.prepare_seconds < 60 or p.config.data.num_proc is not None or cores == 1:
        return None
    return f"preparing the data took {p.prepare_seconds:.0f} s before the first step", f"data.num_proc={cores}", None


def exposed_collectives(p: Profile) -> Found:
    """The device waits for its links."""
    if not (figure := _large(p, "exposed collectives", _EXPOSED)):
        return None
    if p.config.launch.mesh is not None:
        return _better(p, figure, _larger_batches(p), 0.0)
    more = ({"optim.gradient_accumulation": times * p.batch.gradient_accumulation} for times in (2, 4))
    return _better(p, figure, more, 0.0)


def needless_sharding(p: Profile) -> Found:
    """The model is sharded although each device has room for all of it."""
    if p.room is None or (where := p.room.where) is None or where.mesh is None or p.shape is None:
        return None
    if where.mesh.fsdp * where.mesh.model == 1:
        return None
    config = changed(p.config, {"launch.mesh": None})
    whole = replace(where, mesh=None, replicas=where.devices)
    if not _fits(replace(p, room=replace(p.room, where=whole, replicas=where.devices)), config):
        return None
    before, after = cost.predict_time(p.config, p.shape, where), cost.predict_time(config, p.shape, whole)
    rows = batch_arithmetic(config, where.devices).tokens_per_update / p.batch.tokens_per_update
    won = rows * before.seconds / after.seconds - 1
    figure = f"the mesh {where.mesh} moves weights, and each device has room for the whole model"
    return (figure, "launch.mesh=null", won) if won >= 0.01 else None


def slow_replica(p: Profile) -> Found:
    """One replica takes longer than the others, which wait for it."""
    times = {one.rank: one.phases["step"] / one.steps for one in p.recordings if one.steps}
    if len(times) < 2 or (least := min(times.values())) <= 0:
        return None
    rank = max(times, key=lambda one: times[one])
    uneven = times[rank] / least - 1
    if uneven <= _UNEVEN or times[rank] - least < 0.05 * p.seconds:
        return None
    figure = f"replica {rank} takes {1000 * times[rank]:.1f} ms to send and trace a step, another {1000 * least:.1f}"
    won = p.seconds / (p.seconds - times[rank] + least) - 1
    return figure, "python -m tpu_kit doctor: it measures each core; end what else runs on this host", won


def memory_imbalance(p: Profile) -> Found:
    """Devices hold different amounts."""
    peaks = {one.rank: one.peak_bytes for one in p.recordings if one.peak_bytes}
    if not peaks or (most := max(peaks.values())) * (1 - _UNEVEN) <= min(peaks.values()):
        return None
    rank = max(peaks, key=lambda one: peaks[one])
    figure = f"device {rank} holds {most / GIB:.2f} GiB at its peak, another {min(peaks.values()) / GIB:.2f}"
    return figure, "launch.mesh=auto, without mesh_rules that keep a tensor on one device", None


def free_memory(p: Profile) -> Found:
    """A larger batch fits, and is faster."""
    if p.chip is None or p.batch.gradient_accumulation > 1:
        return None
    figure = f"{p.batch.batch_size} rows of a pass take {_peak(p) / GIB:.2f} of {_limit(p) / GIB:.2f} GiB"
    return _better(p, figure, _larger_batches(p))


def accumulation(p: Profile) -> Found:
    """Fewer passes of more rows fit, and are faster."""
    passes, rows = p.batch.gradient_accumulation, p.batch.batch_size
    if passes == 1 or passes % 2 or p.chip is None:
        return None
    change = {"optim.batch_size": 2 * rows, "optim.gradient_accumulation": passes // 2}
    return _better(p, f"an update takes {passes} passes of {rows} rows, and {2 * rows} rows fit", [change], 0.02)


def cheaper_remat(p: Profile) -> Found:
    """There is room to recompute less."""
    optim = p.config.optim
    if optim.remat == "none" or (p.room and p.room.where and p.room.where.mesh):
        return None
    values = ["outputs"] * (optim.remat == "full" and _on_xla(p)) + ["none"] * (optim.scan_layers != "on")
    figure = f"remat={optim.remat} computes layers again, and {(_limit(p) - _peak(p)) / GIB:.2f} GiB are free"
    return _better(p, figure, [{"optim.remat": value} for value in values])


def memory_pressure(p: Profile) -> Found:
    """The next larger row may not fit."""
    if not _limit(p) or _peak(p) <= _FULL * _limit(p):
        return None
    figure = f"the peak is {_peak(p) / GIB:.2f} of {_limit(p) / GIB:.2f} GiB"
    rows = max(1, p.batch.batch_size // 2)
    name, value = ("optim.remat", "full") if p.config.optim.remat != "full" else ("optim.batch_size", rows)
    return figure, f"{name}={value}", gain(p, changed(p.config, {name: value}))


def _peak(p: Profile) -> int:
    formula = p.compiled.total_bytes if p.compiled else sum(p.memory.values())
    return max((one.peak_bytes or 0 for one in p.recordings), default=0) or formula


def _limit(p: Profile) -> int:
    return max((one.limit_bytes or 0 for one in p.recordings), default=0) or (p.room.limit if p.room else 0)


def padding(p: Profile) -> Found:
    """Rows are not full."""
    worst = min(p.recordings, key=lambda one: one.fill, default=p.first)
    if worst.fill >= _FILL:
        return None
    figure = f"{worst.fill:.0%} of the rows hold tokens; the rest is padding, which costs as much"
    change = {"data.max_length": 2 * p.config.data.max_length} if p.config.data.packing else {"data.packing": True}
    return _better(p, figure, [change], times=worst.packed / worst.fill)


def long_rows(p: Profile) -> Found:
    """Attention computes all pairs of tokens of a row that is much longer than any example."""
    longest, length = p.first.longest, p.config.data.max_length
    shorter = max(128, -(-longest // 128) * 128)
    if not longest or 2 * shorter > length or _attention(p) != "sdpa":
        return None
    change = {"data.max_length": shorter, "optim.batch_size": p.batch.batch_size * (length // shorter)}
    return _better(p, f"rows have {length} tokens, and the longest example {longest}", [change])


def dense_attention(p: Profile) -> Found:
    """Attention keeps all scores although the chip has a kernel."""
    if p.chip is None or p.chip.accelerator_prefix is None or _attention(p) != "sdpa":
        return None
    figure = f"attention=sdpa keeps the scores of {p.config.data.max_length} tokens"
    return _better(p, figure, [{"model.attention": "splash"}])


def fp32_weights(p: Profile) -> Found:
    """Frozen weights are read in 4 bytes."""
    if p.config.model.base_dtype != "fp32" or p.chip is None:
        return None
    return _better(p, "base_dtype=fp32 reads 4 bytes of each weight and activation", [{"model.base_dtype": "bf16"}])


def loss_chunks(p: Profile) -> Found:
    """The head is read for each of many small chunks."""
    chunk, tokens = p.config.optim.loss_chunk, p.batch.batch_size * p.config.data.max_length
    if p.chip is None or chunk >= tokens:
        return None
    figure = f"the head's weights are read for each of {-(-tokens // chunk)} chunks of {chunk} tokens"
    return _better(p, figure, [{"optim.loss_chunk": min(tokens, chunk << power)} for power in (1, 2, 3)])


def frequent_checkpoints(p: Profile) -> Found:
    """A checkpoint takes longer than the steps between two of them."""
    every, total = p.config.checkpoint.save_steps, p.config.optim.max_steps
    if p.shape is None or p.room is None or (total is not None and total <= every):
        return None
    trained = estimate_in(p.config, p.shape, p.room).trained
    save, between = cost.SAVE_SECONDS + 12 * trained / cost.SAVE_BYTES_PER_SECOND, every * p.seconds
    if save <= between:
        return None
    steps = max(1, round(cost.young_interval(save, cost.SPOT_HOURS_BETWEEN_INTERRUPTIONS * 3600) / p.seconds))
    figure = f"a checkpoint takes about {save:.1f} s, and there is one each {between:.1f} s"
    return figure, f"checkpoint.save_steps={steps}", save / between - 1


def _on_xla(p: Profile) -> bool:
    return p.room is None or p.room.device_type in ("tpu", "xla-cpu")


def _attention(p: Profile) -> str:
    return (p.room.seen(p.config) if p.room else p.config).model.attention


RULES: tuple[Callable[[Profile], Found], ...] = (
    input_wait, host_tracing, host_code, recompilation, host_reads, preparation, exposed_collectives,
    needless_sharding, slow_replica, memory_imbalance, free_memory, accumulation, cheaper_remat, memory_pressure,
    padding, long_rows, dense_attention, fp32_weights, loss_chunks, frequent_checkpoints,
)  # fmt: skip
