"""Judges replies by the rules of `verifiers` in child processes with limits on time and memory.

    Judges (any process)                            python -m tpu_kit.generation.evaluation.judging
    a line of JSON: some replies, rows and rules -> judges them, with 5 s of processor time per reply and 1 GiB
                                                 <- a line of JSON for each verdict

A model may write an expression such as 9^9^9^9, and code that computes it may run forever or use all memory without
reaching a Python exception. The kernel then kills the process, the reply is not judged, and another process continues
with the next replies. The processes import neither torch nor torch_xla, start in 0.1 s, and end with their parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from tpu_kit.config.loader import DataConfig
from tpu_kit.distributed.child_process import end_name, end_with_parent
from tpu_kit.distributed.replica import cpu_simulation, main_thread
from tpu_kit.distributed.replica.main_thread import CallEnded
from tpu_kit.generation.evaluation.verifiers import Verdict, Verifier, judge

Reply = tuple[Mapping[str, Any], str, str]
"""A row, the text of a reply with its reasoning, and the rule that judges it."""

SECONDS = 5  # limit of processor time for a reply
_WAITING = 60.0  # limit of wall-clock time for a reply, in seconds
_MEMORY = 2**30  # limit of address space in bytes; importing math-verify takes 60 MiB, reasoning-gym 300
_PROCESSES = 4  # limit of processes
_TOGETHER = 16  # limit of replies in a line
_PATIENCE = 0.5  # seconds per busy process after which another process is started
_LOOK = 0.2  # seconds between two checks of the time limits


def judge_all(
    replies: Sequence[tuple[Mapping[str, Any], str]],
    config: DataConfig,
    verifier: str | Verifier,
    stop: Callable[[], bool] = lambda: False,
) -> list[Verdict]:
    """Returns a verdict per reply, in order; a rule runs in child processes, a function in the main thread.

    A function has no limits. A rule has 5 s of processor time and 1 GiB for a reply. If a rule exceeds a limit, or a
    rule or function raises an exception, the verdict has the error.

    Args:
        replies: pairs of a row and a reply's text, as for `judge`.
        config: the data section.
        verifier: from `verifier_named`.
        stop: called several times a second; if it returns True, judging ends with CallEnded.
    """
    if callable(verifier):
        with cpu_simulation.unhurried():
            return main_thread.call(lambda: [judge(row, text, config, verifier) for row, text in replies], stop)
    with Judges(config) as judges, cpu_simulation.unhurried():
        return judges.judge([(row, text, verifier) for row, text in replies], stop)


class Judges:
    """Child processes that judge replies, started on demand and kept until `close`; use it from one thread only.

    Args:
        config: the data section.
    """

    def __init__(self, config: DataConfig) -> None:
        self._settings = {"data": asdict(config), "seconds": SECONDS}
        self._children: list[_Child] = []
        self._most = min(_PROCESSES, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)

    def __enter__(self) -> Judges:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the processes."""
        for child in self._children:
            child.end()
        self._children = []

    def judge(self, replies: Sequence[Reply], stop: Callable[[], bool] = lambda: False) -> list[Verdict]:
        """Returns a verdict for every reply, in order; if a reply cannot be judged, its verdict has the reason.

        Args:
            replies: (row, text of the reply with its reasoning, rule) for every reply.
            stop: called at least 5 times a second; if it returns True, judging ends, and the processes are killed.

        Raises:
            CallEnded: `stop` returned True.
        """
        try:
            verdicts = dict(self._judged(replies, stop))
        except BaseException:  # later output of the processes would belong to these replies
            self.close()
            raise
        return [verdicts[number] for number in range(len(replies))]

    def _judged(self, replies: Sequence[Reply], stop: Callable[[], bool]) -> Iterator[tuple[int, Verdict]]:
        """Yields (number of the reply, verdict) in the order of the verdicts."""
        numbers, started = range(len(replies)), time.monotonic()
        size = min(_TOGETHER, max(1, -(-len(replies) // self._most)))
        waiting = deque([*numbers[first : first + size]] for first in numbers[::size])
        with selectors.DefaultSelector() as selector:
            while waiting or selector.get_map():
                slow = time.monotonic() - started > _PATIENCE * len(selector.get_map())
                if waiting and (child := self._free(anew=slow)):
                    child.ask(self._settings, waiting.popleft(), replies)
                    selector.register(child.answers, selectors.EVENT_READ, child)
                    continue
                ready = [key.data for key, _ in selector.select(_LOOK)]
                for child in [key.data for key in selector.get_map().values()]:
                    if child in ready:
                        yield from child.read()
                    child.end_if_late()
                    if child.asked and not child.ended:
                        continue
                    selector.unregister(child.answers)
                    if child.ended:
                        self._children.remove(child)
                        blamed, rest = child.buried()
                        yield from blamed
                        waiting.extendleft([rest] if rest else [])
                if stop():
                    raise CallEnded("stop")

    def _free(self, anew: bool) -> _Child | None:
        """Returns an idle process; else a new process if none runs, or if `anew` and below the limit; else None."""
        self._children = [child for child in self._children if child.asked or child.is_alive()]
        free = [child for child in self._children if not child.asked]
        if not free and (anew or not self._children) and len(self._children) < self._most:
            free = [_Child()]
            self._children += free
        return free[0] if free else None


class _Child:
    """A child process that judges replies."""

    def __init__(self) -> None:
        path = [str(Path(__file__).parents[3]), *filter(None, sys.path)]
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # their threads use address space
        self._errors = TemporaryFile()  # noqa: SIM115 - `end` closes it
        # In its own session, so that Ctrl-C in a terminal reaches only the parent.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tpu_kit.generation.evaluation.judging"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
            env=os.environ | alone | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path))},
        )  # fmt: skip
        assert self._process.stdout is not None
        self.answers: IO[bytes] = self._process.stdout
        self.asked: deque[int] = deque()  # numbers of the replies sent to it and not yet judged
        self.ended = self._late = False
        self._since, self._rest = 0.0, b""

    def is_alive(self) -> bool:
        """Whether it still runs; it ends with the thread that started it."""
        return self._process.poll() is None

    def ask(self, settings: Mapping[str, Any], numbers: Sequence[int], replies: Sequence[Reply]) -> None:
        """Sends the settings and the replies `numbers`, now in `asked`; if the process has ended, nothing is sent."""
        self.asked.extend(numbers)
        self._since = time.monotonic()
        asked = {**settings, "replies": [replies[number] for number in numbers]}
        line = json.dumps(asked, default=_plain, skipkeys=True)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which `read` detects
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def read(self) -> Iterator[tuple[int, Verdict]]:
        """Waits for output, and yields (number of the reply, verdict) for its verdicts; at its end, sets `ended`."""
        text = os.read(self.answers.fileno(), 65536)
        self.ended = not text
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            self._since = time.monotonic()
            yield self.asked.popleft(), Verdict(**json.loads(line))

    def end_if_late(self) -> None:
        """Kills the process if it has sent nothing for `_WAITING` seconds."""
        if not self._late and time.monotonic() - self._since > _WAITING:
            self._late = True
            self._process.kill()

    def end(self) -> None:
        """Kills the process and closes its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self.answers, self._errors):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def buried(self) -> tuple[list[tuple[int, Verdict]], list[int]]:
        """Returns [(number, verdict)] for the reply that ended the process, or [], and the numbers still to judge.

        Call it once, after `ended` is set; it closes the pipes.
        """
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-4096:].decode(errors="replace").strip().rpartition("\n")[2]
        self.end()
        if status == 0:  # it exited by itself, between two replies
            return [], [*self.asked]
        why = f"ended its process by {end_name(status)}{said and f' ({said})'}"
        if self._late:
            why = f"was not finished after {_WAITING:g} s"
        elif status == -signal.SIGPROF:
            why = f"takes more than {SECONDS:g} s of processor time"
        return [(self.asked.popleft(), Verdict(None, f"the judgement {why}"))], [*self.asked]


def _plain(value: Any) -> str | None:
    """Converts a value that JSON does not support: bytes, such as images, to None, others to text."""
    return None if isinstance(value, bytes | bytearray | memoryview) else str(value)


def main() -> None:
    """Judges the replies from stdin until it is closed; limits its own memory.

    A line of stdin is JSON: "data" (the fields of `DataConfig`), "seconds" (of processor time for a reply) and
    "replies" (a list of `Reply`). Stdout gets a line of JSON for every reply, the fields of its `Verdict`.
    """
    import resource  # not on Windows

    end_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # not on Linux; the kernel then kills this process first if memory is short
        Path("/proc/self/oom_score_adj").write_text("1000")
    logging.disable()  # math-verify warns about every expression
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # antlr prints to stdout
    # Not in the main thread, where math-verify would set its own limit of wall-clock time.
    thread = threading.Thread(target=_serve, args=(answers,))
    thread.start()
    thread.join()


def _serve(answers: IO[str]) -> None:
    """Judges the requests on stdin, and writes each verdict to `answers` as JSON; ends early if memory was short."""
    for line in sys.stdin:
        ask = json.loads(line)
        data = DataConfig(**ask["data"])
        for row, text, rule in ask["replies"]:
            signal.setitimer(signal.ITIMER_PROF, ask["seconds"])  # its signal kills the process
            verdict = judge(row, text, data, rule)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if verdict.error.startswith("MemoryError"):
                verdict = Verdict(None, f"the judgement takes more than {_MEMORY >> 20} MiB")
            print(json.dumps(asdict(verdict)), file=answers, flush=True)
            if verdict.error.startswith("the judgement"):
                return  # caches may hold the memory


if __name__ == "__main__":
    main()
