"""Reads a recorded trace, and splits the time of a step into parts.

torch_xla's profiler writes XPlane, which jaxlib's `ProfileData` reads; torch.profiler writes Chrome's JSON.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpu_kit.distributed.child_process import run_child

PHASES = ("input", "step", "dispatch", "host")
"""The host's phases in the order of a step: wait for the batch, send it and trace, start the program, log."""
PREFIX = "tpu_kit/"
"""Prefix of the phases' names in a trace."""
BUCKETS = ("device compute", "exposed collectives", "input wait", "host tracing", "host code", "unexplained")
_BUCKET = {
    "input": "input wait", "step": "host tracing", "dispatch": "host tracing", "host": "host code",
    "collective": "exposed collectives",
}  # fmt: skip
_COLLECTIVE = re.compile(r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|nccl|c10d::|gloo:")
_PRODUCT = re.compile(
    r"(?i)\bdot|convolution|gemm|(::|: |add|\bb?)mm|linear|matmul|attention|splash|flash|nvjet|cutlass|fmha|sdpa"
)
_COPY = re.compile(r"copy|transpose|::to\b|memcpy|Memcpy|dynamic-slice|dynamic-update")
_NO_WORK = re.compile(r"(while|call|conditional|tuple|parameter|get-tuple-element|bitcast)(\.(\d+|clone))*( = |$)")

Span = tuple[float, float]


@dataclass(frozen=True)
class Event:
    """An operation of a device, or a phase of the host.

    Attributes:
        name: of the operation or phase.
        kind: "phase", or the kind of work as `compile_check.Operation.kind`.
        start: seconds since the start of the trace.
        end: seconds since the start of the trace.
        device: name of the device; empty for the host.
        source: file and line, or the scope in the model; empty if the trace has none.
        step: number of the step, from 1, for phases; 0 for operations.
    """

    name: str
    kind: str
    start: float
    end: float
    device: str = ""
    source: str = ""
    step: int = 0


@dataclass(frozen=True)
class Trace:
    """The complete steps of a trace.

    Attributes:
        steps: number of steps.
        events: of these steps, by start; an event may begin before the window or end after it.
        window: start of the first step and end of the last, in seconds.
    """

    steps: int
    events: Sequence[Event]
    window: Span

    def split(self) -> dict[str, float]:
        """Returns the seconds of a step by the names of `BUCKETS`, as the mean over steps and devices; some may be 0.

        While a device computes, the time counts as "device compute". While it only communicates, the time counts as
        "exposed collectives". The rest counts by the phase of the host: "input wait", "host tracing" or "host code".
        Time outside of all phases is "unexplained".
        """
        devices = sorted({one.device for one in self.events if one.device}) or [""]
        spent = np.zeros(len(BUCKETS))
        for device in devices:
            mine = [one for one in self.events if one.device in ("", device)]
            times = np.clip([(one.start, one.end) for one in mine], *self.window)
            edges = np.unique([*times.ravel(), *self.window])
            owner = np.full(len(edges) - 1, BUCKETS.index("unexplained"))
            buckets = [
                BUCKETS.index(_BUCKET.get(one.name if one.kind == "phase" else one.kind, BUCKETS[0])) for one in mine
            ]
            spans = sorted(zip(buckets, *np.searchsorted(edges, times).T, strict=True), reverse=True)
            for bucket, first, last in spans:  # computing hides communication, and both hide the host
                owner[first:last] = bucket
            spent += np.bincount(owner, np.diff(edges), len(BUCKETS)) / len(devices) / self.steps
        return dict(zip(BUCKETS, spent.tolist(), strict=True))

    def first(self) -> Span:
        """Returns start and end of the first step, in seconds since the start of the trace."""
        phases = [one for one in self.events if one.kind == "phase"]
        return phases[0].start, next(one.end for one in phases if one.name == PHASES[-1])


def read_trace(folder: Path, steps: int) -> Trace:
    """Reads the first complete steps of the trace that `recorder.record` wrote to a folder or its subfolders.

    The result has at most `steps` steps, and at least one. A step is complete if its first and last phase were traced.
    The last *.xplane.pb by path is read, or trace.json if there is none.

    Raises:
        ValueError: the trace is missing, cut short or of another version, or has no complete step.
    """
    planes, plain = sorted(folder.rglob("*.xplane.pb")), folder / "trace.json"
    if not planes and not plain.is_file():
        raise ValueError(f"there is no trace in {folder}: profile the run again")
    path = planes[-1] if planes else plain
    try:
        events = _in_child(path) if planes else list(_chrome(path))
    except (ValueError, KeyError, TypeError, OSError) as error:
        size = path.stat().st_size
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}): the trace is cut short ({size:,} bytes; was the disk "
            "full?) or of another version of the profiler: profile the run again"
        ) from error
    events.sort(key=lambda one: one.start)
    phases = [one for one in events if one.kind == "phase"]
    ended = {one.step for one in phases if one.name == "host"}
    whole = sorted({one.step for one in phases if one.name == "input"} & ended)[:steps]
    if not whole:
        raise ValueError(
            f"the trace in {folder} has no whole step of the {steps} asked for: the run ended, or the profiler started "
            "too late; profile it again with more steps="
        )
    inside = [one for one in phases if whole[0] <= one.step <= whole[-1]]
    window = (inside[0].start, max(one.end for one in inside))
    inside_window = [one for one in events if one.end > window[0] and one.start < window[1]]
    return Trace(len(whole), inside_window, window)


def _in_child(path: Path) -> list[Event]:
    """Reads XPlane in another process, which jaxlib aborts if the file is damaged; ValueError: it did."""
    done = run_child(["-m", "tpu_kit.extras.profile.timeline", str(path)], os.environ | {"JAX_PLATFORMS": "cpu"})
    if done.status:
        raise ValueError(f"{done.how}: {done.last_lines(1)}")
    return [Event(*row) for row in json.loads(done.output)]


def _xplane(path: Path) -> Iterator[Event]:
    """Yields a trace's phases and operations (on a CPU, XLA's), unsorted; a damaged file aborts the whole process."""
    from jax.profiler import ProfileData

    for plane in ProfileData.from_file(str(path)).planes:
        on_tpu = plane.name.startswith("/device:")
        for line in plane.lines:
            if on_tpu and line.name not in ("XLA Ops", "Async XLA Ops"):
                continue
            for one in line.events:
                stats = dict(one.stats)
                span = (one.start_ns / 1e9, (one.start_ns + one.duration_ns) / 1e9)
                if one.name.startswith(PREFIX):
                    name, _, _ = one.name.removeprefix(PREFIX).partition("#")
                    yield Event(name, "phase", *span, step=int(stats["step"]))
                elif (on_tpu or "hlo_op" in stats) and not _NO_WORK.match(name := one.name.lstrip("%")):
                    device = plane.name if on_tpu else f"/device:{stats.get('device_ordinal', 'CPU')}"
                    source = str(stats.get("tf_op") or stats.get("source") or "")
                    yield Event(name.partition(" = ")[0], _kind(name), *span, device, source)


def _chrome(path: Path) -> Iterator[Event]:
    """Yields the phases and operations in a file of Chrome's JSON; without a GPU, PyTorch's outermost operations."""
    rows = json.loads(path.read_bytes())["traceEvents"]
    on_gpu = any(row.get("cat") == "kernel" for row in rows)
    work = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
    ends: dict[Any, float] = defaultdict(float)
    steps: dict[str, int] = defaultdict(int)
    for row in sorted(rows, key=lambda row: (row.get("ts", 0.0), -row.get("dur", 0.0))):
        kind, name, thread = row.get("cat"), row.get("name", ""), row.get("tid")
        start = float(row.get("ts", 0.0)) / 1e6
        end = start + float(row.get("dur", 0.0)) / 1e6
        if kind == "user_annotation" and name.startswith(PREFIX):
            phase = name.removeprefix(PREFIX)
            steps[phase] += 1
            yield Event(phase, "phase", start, end, step=steps[phase])
        elif kind in work and end > ends[thread]:  # without the operations that an operation calls
            ends[thread] = end
            name = name.removeprefix("autograd::engine::evaluate_function: ")
            yield Event(name, _kind(name), start, end, f"/device:{row.get('args', {}).get('device', 'CPU')}")


def _kind(name: str) -> str:
    """Returns an operation's kind of work, from its name: collective, matrix product, copy or elementwise."""
    if _COLLECTIVE.search(name):
        return "collective"
    if name.startswith("triton_"):  # a kernel of torch.compile, named after its fused operations, such as _to_copy
        return "matrix product" if name.startswith("triton_tem_") else "elementwise"
    if _PRODUCT.search(name):
        return "matrix product"
    return "copy" if _COPY.search(name) else "elementwise"


if __name__ == "__main__":
    print(json.dumps([astuple(event) for event in _xplane(Path(sys.argv[1]))]))
