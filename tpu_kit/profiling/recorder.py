"""Records a window of steps in a replica: the host's phases, the profiler's trace, counters, and reads of the device.

`record` runs in every replica. It trains as `sft.fine_tune` does, without checkpoints and results, and marks where a
phase of a step begins. A mark is an annotation in the trace, so that phases and device have one clock.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tpu_kit.config.loader import TrainConfig
from tpu_kit.data.batching import PackedDataset
from tpu_kit.distributed.runtime import Runtime
from tpu_kit.profiling.timeline import MODULE, PHASES, PREFIX
from tpu_kit.recipes import sft
from tpu_kit.storage import atomic

WARM_UP = 5
"""Steps before the window: two compile, one is searched for reads, one ends what was queued, one is timed."""
AFTER = 10
"""Steps after the window, as a profiler's server starts and ends late, and a CPU's steps are timed without it."""
SHORT = 4
"""Every other of the timed steps takes rows of this fraction of the length."""
_STARTS = 1.0  # seconds in which a profiler's server starts on a free machine; on a busy one it took more than 1.4
LEAST_BYTES = 2**30
"""Free disk that a trace may take."""


@dataclass
class Recording:
    """What one replica recorded.

    Attributes:
        rank: of the replica.
        device_type: as `Runtime.device_type`.
        fill: share of the packed rows that holds tokens.
        packed: the same, if the examples are packed; where they are, in rows of twice the length.
        longest: tokens of the longest example.
        phases: seconds of each phase over the window, without the profiler.
        steps: number of steps of the window.
        first_seconds: time of the first step, which compiles.
        seconds: of a step without the profiler, on a CPU; 0 elsewhere.
        short_seconds: the same of rows cut to a `SHORT`th; 0 elsewhere.
        peak_bytes: of the device; None where it is not counted.
        limit_bytes: of the device; None likewise.
        counts: growth of `Runtime.counters` over the window.
        causes: why programs were compiled in it.
        reads: lines of code that read the device in a step, with the function.
    """

    rank: int
    device_type: str
    fill: float = 1.0
    packed: float = 1.0
    longest: int = 0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    steps: int = 0
    first_seconds: float = 0.0
    seconds: float = 0.0
    short_seconds: float = 0.0
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)


def window(steps: int) -> int:
    """Number of steps of a run that traces `steps`."""
    return WARM_UP + steps + math.ceil(steps / 4) + AFTER


def record(config: TrainConfig) -> None:
    """Runs the loop with a trace; each replica writes recording-RANK.json into its output folder, rank 0 the trace.

    Args:
        config: the run, whose updates are those of `window`.
    """
    assert config.optim.max_steps is not None
    steps = (config.optim.max_steps - WARM_UP - AFTER) * 4 // 5
    with sft.trainer(config) as (loop, agreement, _):
        recorder = _Recorder(loop.rt, config.output_path, steps, lambda: loop.state.report)
        rows, found = loop.prepared.train, recorder.found
        found.fill, found.longest = rows.fill(), int(rows.documents.lengths.max())
        found.packed = PackedDataset(rows.documents, rows.length * (2 if config.data.packing else 1)).fill()
        loop.checkpoints, loop.prepared = None, replace(loop.prepared, eval=None)
        loop.mark = recorder.mark
        loop.rt.place_batch = recorder.placing(loop.rt.place_batch)  # type: ignore[method-assign]  # of this run alone
        if not loop.rt.is_xla:
            _name_modules(loop.model, recorder)
        try:
            loop.run(agreement)
        finally:
            recorder.close()
            loop.peaks.end()


def _name_modules(model: torch.nn.Module, recorder: _Recorder) -> None:
    """Adds the path of their module to the operations of the forward pass in the trace."""
    opened: list[Any] = []

    def enter(path: str, *_: Any) -> None:
        if recorder.is_tracing:
            opened.append(torch.profiler.record_function(MODULE + path))
            opened[-1].__enter__()

    def leave(*_: Any) -> None:
        if opened:
            opened.pop().__exit__(None, None, None)

    for path, module in model.named_modules():
        module.register_forward_pre_hook(partial(enter, path.removeprefix("base_model.model.")))  # PEFT's wrappers
        module.register_forward_hook(leave, always_call=True)


class _Recorder:
    """Follows the marks of one replica's loop; see `record`."""

    def __init__(self, rt: Runtime, folder: Path, steps: int, result: Callable[[], torch.Tensor]) -> None:
        self.rt, self.folder, self.steps, self._result = rt, folder, steps, result
        self._last: torch.Tensor | None = None
        self.found = Recording(rt.rank, rt.device_type)
        self._annotation: Any = None
        self._stack = contextlib.ExitStack()
        self._phase, self._since, self._begun = "", time.perf_counter(), 0.0
        self._before: dict[str, int] = {}
        self._shapes: list[Mapping[str, str]] = []
        self._inputs: list[Mapping[str, str]] = []  # of the step before
        self._compiles = 0
        self._timed: dict[bool, list[float]] = {False: [], True: []}  # by whether the rows are short
        self._is_short = False
        self._session = (_XlaSession if rt.is_xla else _TorchSession)(rt, folder) if rt.rank == 0 else None

    @property
    def is_tracing(self) -> bool:
        """Whether this replica's trace is running."""
        return self._session is not None and self._session.is_running

    def mark(self, phase: str, step: int) -> None:
        """Ends the phase before, and begins this one."""
        now, first, last = time.perf_counter(), WARM_UP + 1, WARM_UP + self.steps
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self._phase and first <= step - (phase == "input") <= last:
            self.found.phases[self._phase] += now - self._since
        if phase == "input":
            self._between_steps(step, now)
        self._phase, self._since = phase, time.perf_counter()
        if self._session is not None and self._session.is_running:
            self._annotation = self._session.annotate(PREFIX + phase, step)
        if phase == "host" and step >= WARM_UP - 1 and self.rt.device_type != "cpu":
            self._follow_device()

    def _follow_device(self) -> None:
        """Waits for the step before, so that the host is one step ahead: a queue would hide how long a step takes."""
        now = self._result()
        self.rt.to_host([now if self._last is None else self._last])
        self._last = now

    def _between_steps(self, step: int, now: float) -> None:
        done = step - 1
        if done == 1:
            self.found.first_seconds = now - self._begun
        if done > WARM_UP + self.steps and self.rt.device_type == "cpu":
            self._timed[self._is_short].append(now - self._begun)
            self._is_short = step % 2 == 0
        if done > 0:
            self._explain(done)
        if step == WARM_UP - 2:
            self._stack.enter_context(_Reads(self.rt, self.found.reads))
        if step == WARM_UP - 1:
            self._stack.close()
        if step == WARM_UP + 1:
            self._before = self.rt.counters()
            if self._session is not None:
                self._session.begin(self.steps, now - self._begun)
        if done == WARM_UP + self.steps:
            counts = self.rt.counters().items()
            self.found.counts = {name: count - self._before.get(name, 0) for name, count in counts}
            self.found.steps = self.steps
            if self._session is not None:
                self._session.end()
        self._begun = time.perf_counter()

    def placing(self, place: Any) -> Any:
        """Wraps `Runtime.place_batch` to note the shapes that a step's program takes."""

        def noted(batches: list[dict[str, torch.Tensor]]) -> Any:
            self._shapes += [{name: f"{tuple(one.shape)} {one.dtype}" for name, one in b.items()} for b in batches]
            return place([_shortened(one) for one in batches] if self._is_short else batches)

        return noted

    def _explain(self, step: int) -> None:
        """Notes why the program of a step was compiled anew, by comparing its inputs with those of the step before."""
        before, now = self._inputs, self._shapes
        self._inputs, self._shapes = now, []
        compiles = self.rt.counters().get("compiles", 0)
        grown, self._compiles = compiles - self._compiles, compiles
        if grown and WARM_UP < step <= WARM_UP + self.steps and len(self.found.causes) < 5:
            changes = [
                f"{name} was {old.get(name)} and is {shape}"
                for old, new in zip(before, now, strict=False)
                for name, shape in new.items()
                if old.get(name) != shape
            ]
            if len(before) != len(now):
                changes = [f"it takes {len(now) - 1} batches, and {len(before) - 1} before"]
            why = "; ".join(changes) or (
                "its inputs have the shapes of the step before, so a number of Python that changes by step, such as a "
                "size or the end of a slice, is a constant of the program"
            )
            self.found.causes.append(f"step {step} compiled {grown}: {why}")

    def close(self) -> None:
        """Ends the trace, and writes the recording."""
        self._stack.close()
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        if self._session is not None:
            self._session.close()
        self.found.peak_bytes, self.found.limit_bytes = self.rt.memory()
        self.found.seconds, self.found.short_seconds = (median(one or [0.0]) for one in self._timed.values())
        text = json.dumps(asdict(self.found))
        with full_disk(self.folder):
            atomic.write_text(self.folder / f"recording-{self.found.rank}.json", text)


def _shortened(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cuts what has (rows, tokens) to a `SHORT`th of the tokens."""
    return {name: one[:, : one.shape[1] // SHORT] if one.dim() == 2 else one for name, one in batch.items()}


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Says which folder could not be written to.

    Raises:
        ValueError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the profile cannot be written to {folder} ({error.strerror}): free {LEAST_BYTES >> 20} MiB there, or set "
            "output_dir to another disk"
        ) from error


class _Reads(TorchFunctionMode):
    """Notes the calls after which a counter of reads and fallbacks has grown, with the line of the caller.

    The backward pass runs in another thread, where this sees nothing.
    """

    def __init__(self, rt: Runtime, found: list[str]) -> None:
        super().__init__()
        self._rt, self._found = rt, found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._count()
        result = func(*args, **(kwargs or {}))
        if self._count() > before:
            own = [one for one in traceback.extract_stack()[:-1] if "/torch/" not in one.filename]
            line = f"{'/'.join(Path(own[-1].filename).parts[-3:])}:{own[-1].lineno} {own[-1].line}"
            if line not in self._found:
                self._found.append(line)
        return result

    def _count(self) -> int:
        counts = self._rt.counters()
        return counts.get("fallbacks", 0) + counts.get("device_reads", 0)


class _XlaSession:
    """Traces by torch_xla's profiler: a server in this process, and a request from a thread."""

    def __init__(self, rt: Runtime, folder: Path) -> None:
        import torch_xla.debug.profiler as profiler

        self._profiler, self._folder = profiler, folder
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        self._server = profiler.start_server(self._port)
        self._trace: Future[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._trace is not None and not self._trace.done()

    def annotate(self, name: str, step: int) -> Any:
        """Begins an annotation, without the scope that it opens: none may be open where the graph is cut."""
        annotation = self._profiler.Trace(name, step=step)
        annotation.__enter__()
        del annotation.scope
        return annotation

    def begin(self, steps: int, seconds: float) -> None:
        """Requests a trace of so many steps of the duration of the last one, and waits until it has started."""
        milliseconds = round(1000 * (3 * _STARTS + 1.25 * seconds * steps))
        trace = partial(self._profiler.trace, f"localhost:{self._port}", str(self._folder), milliseconds, 1)
        self._trace = ThreadPoolExecutor(1).submit(trace)
        time.sleep(_STARTS)

    def end(self) -> None:
        """Leaves the request alone: it ends after its duration."""

    def close(self) -> None:
        if self._trace is not None and (error := self._trace.exception()) is not None:
            raise ValueError(f"torch_xla's profiler recorded no trace: {error}") from error


class _TorchSession:
    """Traces by torch.profiler."""

    def __init__(self, rt: Runtime, folder: Path) -> None:
        from torch.profiler import ProfilerActivity

        self._folder = folder
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if rt.device_type == "cuda" else [])]
        self._profile: Any = torch.profiler.profile(activities=kinds, profile_memory=True)
        self.is_running = False

    def annotate(self, name: str, step: int) -> Any:
        annotation = torch.profiler.record_function(name)
        annotation.__enter__()
        return annotation

    def begin(self, steps: int, seconds: float) -> None:
        self._profile.start()
        self.is_running = True

    def close(self) -> None:
        if self.is_running:
            self._profile.stop()
            self.is_running = False
            with full_disk(self._folder):
                self._profile.export_chrome_trace(str(self._folder / "trace.json"))

    end = close
