"""Records a window of steps in a replica: the host's phases, the profiler's trace, and counters.

`record` runs in every replica. It trains like `replica.fine_tune`, without checkpoints and results, and marks the start
of every phase of a step. Marks are annotations in the trace, so phases and device operations share a clock.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tpu_kit.config.loader import TrainConfig
from tpu_kit.data.prepare import MappedData
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.extras.profile.timeline import PHASES, PREFIX
from tpu_kit.machine.storage import atomic
from tpu_kit.recipes.replica import trainer
from tpu_kit.recipes.run_plan import RunPlan

WARM_UP = 5
"""Steps before the window: they compile and empty the queue; the last step is timed."""
AFTER = 10
"""Steps after the window, because the profiler's server starts and ends late."""
_STARTS = 1.0  # seconds for the profiler's server to start on an idle machine; a busy machine took more than 1.4


@dataclass
class Recording:
    """The recording of a replica.

    Attributes:
        rank: number of the replica, from 0.
        device_type: as `Runtime.device_type`.
        fill: share of token positions in the rows that are not padding.
        phases: total seconds by phase over the window, measured on the host without the profiler.
        steps: number of steps in the window; 0 if the run ended before.
        first_seconds: duration of the first step, which compiles.
        peak_bytes: peak memory of the device; None if the device does not count it.
        counts: growth of `Runtime.counters` over the window.
    """

    rank: int
    device_type: str
    fill: float = 1.0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    steps: int = 0
    first_seconds: float = 0.0
    peak_bytes: int | None = None
    counts: dict[str, int] = field(default_factory=dict)


def window(steps: int) -> int:
    """Returns the number of steps of a run that traces `steps` steps, with steps before and after them."""
    return WARM_UP + steps + math.ceil(steps / 4) + AFTER


def record(config: TrainConfig, plan: RunPlan | None = None, data: MappedData | None = None) -> None:
    """Runs `optim.max_steps` updates in this replica, without checkpoints and evaluations, and traces middle steps.

    Every replica writes recording-RANK.json, a `Recording`, to the output folder. Rank 0 also writes config.yaml and
    the trace: trace.json, or on XLA a file *.xplane.pb in a subfolder. A run that ends early leaves `steps` 0.

    Args:
        config: the run; its `optim.max_steps` must be `window(N)`, which traces N steps.
        plan: the plan of the launching process; None plans here.
        data: the data that this process prepared; None prepares it here.

    Raises:
        ValueError: as in `replica.fine_tune`, or torch_xla's profiler recorded no trace.
    """
    assert config.optim.max_steps is not None
    steps = (config.optim.max_steps - WARM_UP - AFTER) * 4 // 5
    with trainer(config, plan, data) as (loop, agreement):
        recorder = _Recorder(loop.rt, config.output_path, steps, lambda: loop.state.report)
        recorder.recording.fill = loop.prepared.train.fill()
        loop.checkpoints, loop.prepared = None, replace(loop.prepared, eval=None)
        loop.mark = recorder.mark
        try:
            loop.run(agreement)
        finally:
            recorder.close()


class _Recorder:
    """Records the marks of a replica's training loop; see `record`."""

    def __init__(self, rt: Runtime, folder: Path, steps: int, result: Callable[[], torch.Tensor]) -> None:
        self.rt, self.folder, self.steps, self._result = rt, folder, steps, result
        self._last: torch.Tensor | None = None
        self.recording = Recording(rt.rank, rt.device_type)
        self._annotation: Any = None
        self._phase, self._since, self._begun = "", time.perf_counter(), 0.0
        self._before: dict[str, int] = {}
        self._session = (_XlaSession if rt.is_xla else _TorchSession)(rt, folder) if rt.rank == 0 else None

    def mark(self, phase: str, step: int) -> None:
        """Ends the current phase, and begins `phase`, a name in `PHASES`, of update `step` of the run, from 1.

        "input" may also begin or end the window and its trace. Except on a CPU, "host" waits for the previous step.
        """
        now, first, last = time.perf_counter(), WARM_UP + 1, WARM_UP + self.steps
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self._phase and first <= step - (phase == "input") <= last:
            self.recording.phases[self._phase] += now - self._since
        if phase == "input":
            self._between_steps(step, now)
        self._phase, self._since = phase, time.perf_counter()
        if self._session is not None and self._session.is_running:
            self._annotation = self._session.annotate(PREFIX + phase, step)
        if phase == "host" and step >= WARM_UP - 1 and self.rt.device_type != "cpu":
            self._follow_device()

    def _follow_device(self) -> None:
        """Waits for the previous step, so that the host is only a step ahead: a queue would hide a step's duration."""
        now = self._result()
        self.rt.to_host([now if self._last is None else self._last])
        self._last = now

    def _between_steps(self, step: int, now: float) -> None:
        """Begins the window and the trace if `step` is its first step, and ends them if `step` is the step after it.

        `now` is the start of `step` by `time.perf_counter`.
        """
        done = step - 1
        if done == 1:
            self.recording.first_seconds = now - self._begun
        if step == WARM_UP + 1:
            self._before = self.rt.counters()
            if self._session is not None:
                self._session.begin(self.steps, now - self._begun)
        if done == WARM_UP + self.steps:
            counts = self.rt.counters().items()
            self.recording.counts = {name: count - self._before.get(name, 0) for name, count in counts}
            self.recording.steps = self.steps
            if self._session is not None:
                self._session.end()
        self._begun = time.perf_counter()

    def close(self) -> None:
        """Ends the trace, and writes recording-RANK.json to the folder; ValueError if there is no trace."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        if self._session is not None:
            self._session.close()
        self.recording.peak_bytes, _ = self.rt.memory()
        atomic.write_text(self.folder / f"recording-{self.recording.rank}.json", json.dumps(asdict(self.recording)))


class _XlaSession:
    """Traces with torch_xla's profiler: a server in this process, and a request from a thread."""

    def __init__(self, rt: Runtime, folder: Path) -> None:
        import torch_xla.debug.profiler as profiler

        self._profiler, self._folder = profiler, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._server = profiler.start_server(self._port)
        self._trace: Future[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._trace is not None and not self._trace.done()

    def annotate(self, name: str, step: int) -> Any:
        """Begins an annotation without its scope, because no scope may be open when the graph is cut."""
        annotation = self._profiler.Trace(name, step=step)
        annotation.__enter__()
        del annotation.scope
        return annotation

    def begin(self, steps: int, seconds: float) -> None:
        """Requests a trace of `steps` steps of `seconds` seconds, and waits a second for its start."""
        milliseconds = round(1000 * (3 * _STARTS + 1.25 * seconds * steps))
        trace = partial(self._profiler.trace, f"localhost:{self._port}", str(self._folder), milliseconds, 1)
        self._trace = ThreadPoolExecutor(1).submit(trace)
        time.sleep(_STARTS)

    def end(self) -> None:
        """Does nothing: the request ends after its duration."""

    def close(self) -> None:
        """Waits for the trace; raises ValueError if there is none."""
        if self._trace is not None and (error := self._trace.exception()) is not None:
            raise ValueError(f"torch_xla's profiler recorded no trace: {error}") from error


class _TorchSession:
    """Traces with torch.profiler to trace.json, as `_XlaSession` does with torch_xla's profiler."""

    is_running = False

    def __init__(self, rt: Runtime, folder: Path) -> None:
        from torch.profiler import ProfilerActivity

        self._folder = folder
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if rt.device_type == "cuda" else [])]
        self._profile: Any = torch.profiler.profile(activities=kinds, acc_events=True)  # else it warns of cycles

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
            self._profile.export_chrome_trace(str(self._folder / "trace.json"))

    end = close
