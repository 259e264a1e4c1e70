"""Tells what to change in a run, each time from a figure of its trace, its recordings or its compiled program.

The gain of an advice is a bound: what the run would win in tokens per second if the part that it names took no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tpu_kit.config.loader import BatchPlan, TrainConfig, batch_arithmetic
from tpu_kit.profiling.recorder import Recording

INPUT, TRACING, HOST, EXPOSED = 0.05, 0.1, 0.05, 0.1
"""Shares of a step above which there is an advice: waiting for the input, tracing, logging, exposed collectives."""
EAGER = 0.35
"""The same for tracing off XLA, which also holds what the profiler itself takes for each operation."""
UNEVEN, FILL = 0.15, 0.85
"""The same for the delay of the slowest replica; and the share of tokens in the rows below which there is an advice."""


@dataclass(frozen=True)
class Advice:
    """One change.

    Attributes:
        rule: the part of a step, or what is wrong.
        figure: the figure that it rests on.
        change: the parameter and its value, as on the command line, or what to do.
        gain: the most by which tokens per second can grow, 0.1 for 10 %.
    """

    rule: str
    figure: str
    change: str
    gain: float

    def __str__(self) -> str:
        return f"{self.change}: {self.figure} (at most {self.gain:+.0%} tokens/s)"


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Where the time of a step goes.

    Attributes:
        config: the run, with a number for every "auto".
        replicas: shards of the batch.
        split: seconds of a step, by `timeline.BUCKETS`.
        recordings: of the replicas; empty if the profile is predicted.
    """

    config: TrainConfig
    replicas: int
    split: Mapping[str, float]
    recordings: tuple[Recording, ...] = ()

    @property
    def batch(self) -> BatchPlan:
        """The batch of an update."""
        return batch_arithmetic(self.config, self.replicas)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.split.values())

    @cached_property
    def advice(self) -> list[Advice]:
        """What to change, the largest gain first."""
        advice = [*_slow_parts(self), *(_of_recordings(self) if self.recordings else ())]
        return sorted(advice, key=lambda one: -one.gain)

    def share(self, bucket: str) -> float:
        """The share of a step in a bucket."""
        return self.split[bucket] / self.seconds

    def gain(self, seconds: float) -> float:
        """The growth of tokens per second if a step were shorter by so many seconds."""
        return self.seconds / (self.seconds - seconds) - 1


def _slow_parts(p: StepTimes) -> Iterator[Advice]:
    """What to change in the parts of a step in which the device does not compute."""
    optim, batch = p.config.optim, p.batch
    fixed = " optim.global_batch_size=null" if "optim.global_batch_size" in p.config.sources else ""
    more_rows = f"optim.batch_size={2 * batch.batch_size}{fixed} or more, if it fits"
    on_xla = not p.recordings or p.recordings[0].device_type in ("tpu", "xla-cpu")
    unrolled = on_xla and optim.scan_layers == "off"
    cores = "give this host more free processor cores: batches are made by one thread of each replica"
    passes = f"optim.gradient_accumulation={2 * batch.gradient_accumulation}{fixed}"
    for bucket, least, change in (
        ("input wait", INPUT, cores if p.config.distill.files is None else "distill.files=FOLDER on a local disk"),
        ("host tracing", TRACING if on_xla else EAGER, "optim.scan_layers=on" if unrolled else more_rows),
        ("host code", HOST, f"tracking.logging_steps={max(10, 10 * p.config.tracking.logging_steps)}"),
        ("exposed collectives", EXPOSED, more_rows if p.config.launch.mesh is not None else passes),
    ):
        if p.share(bucket) > least:
            spent = f"{1000 * p.split[bucket]:.1f} of {1000 * p.seconds:.1f} ms"
            figure = f"{bucket} takes {p.share(bucket):.0%} of a step ({spent})"
            yield Advice(bucket, figure, change, p.gain(p.split[bucket]))


def _of_recordings(p: StepTimes) -> Iterator[Advice]:
    """What to change because of what the replicas counted."""
    first, data = p.recordings[0], p.config.data
    if count := first.counts.get("compiles", 0):
        shapes = "keep the shapes of the step's inputs; pass what changes by step as a tensor"
        change = shapes if data.packing else "data.packing=true"
        figure = f"{count} programs were compiled in {first.steps} steps of the steady state"
        yield Advice("recompilation", figure, change, p.gain(p.split["host tracing"]))
    if (reads := first.counts.get("fallbacks", 0) / first.steps) >= 1:
        figure, change = f"the host reads or computes {reads:.0f} values of each step", "compute them on the device"
        yield Advice("host reads", figure, change, p.gain(p.split["host tracing"]))
    if (fill := min(one.fill for one in p.recordings)) < FILL:
        change = f"data.max_length={2 * data.max_length}" if data.packing else "data.packing=true"
        figure = f"{fill:.0%} of the rows hold tokens; the rest is padding, which costs as much"
        yield Advice("padding", figure, change, 1 / fill - 1)
    times = {one.rank: one.phases["step"] / one.steps for one in p.recordings}
    rank, least = max(times, key=lambda one: times[one]), min(times.values())
    if (later := times[rank] - least) > max(UNEVEN * least, 0.05 * p.seconds):
        figure = (
            f"replica {rank} takes {1000 * times[rank]:.1f} ms to send and trace a step, another {1000 * least:.1f}"
        )
        change = "python -m tpu_kit verify: it measures each core; end what else runs on this host"
        yield Advice("slow replica", figure, change, p.gain(min(later, 0.9 * p.seconds)))
