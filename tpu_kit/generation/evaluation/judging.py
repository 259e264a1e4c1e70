"""Judges replies by the rules of `verifiers` in processes that can be ended.

    Judges (any process)                            python -m tpu_kit.generation.evaluation.judging
    a line of JSON: some replies, rows and rules -> judges them, each within 5 s of processor time and 1 GiB
                                                 <- a line of JSON for each verdict

An expression such as 9^9^9^9 is text of a model, and computing with it may take for ever, or all memory, in code that
no exception ends. The kernel ends the process instead: its reply is not judged, another process judges the next ones.
The processes import neither torch nor torch_xla, start in 0.1 s with the first reply, and end with their parent.
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

SECONDS = 5  # of processor time in which a reply is judged
_WAITING = 60.0  # seconds in which it is judged, whatever takes the time
_MEMORY = 2**30  # bytes of address space; importing math-verify takes 60 MiB, reasoning-gym 300
_PROCESSES = 4  # at most
_TOGETHER = 16  # replies of a line at most
_PATIENCE = 0.5  # seconds of judging after which there is another process
_LOOK = 0.2  # seconds between two looks at the clock


def judge_all(
    replies: Sequence[tuple[Mapping[str, Any], str]],
    config: DataConfig,
    verifier: str | Verifier,
    stop: Callable[[], bool] = lambda: False,
) -> list[Verdict]:
    """Judges replies: by a rule in other processes, by a user's function in the main thread, without a limit.

    Args:
        replies: row and text of each, as `judge` takes them.
        config: the data section.
        verifier: of `verifier_named`.
        stop: as in `Judges.judge`.
    """
    if callable(verifier):
        with cpu_simulation.unhurried():
            return main_thread.call(lambda: [judge(row, text, config, verifier) for row, text in replies], stop)
    with Judges(config) as judges, cpu_simulation.unhurried():
        return judges.judge([(row, text, verifier) for row, text in replies], stop)


class Judges:
    """Processes that judge replies, started when there is work and kept until `close`; of one thread.

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
        """Ends the processes."""
        for child in self._children:
            child.end()
        self._children = []

    def judge(self, replies: Sequence[Reply], stop: Callable[[], bool] = lambda: False) -> list[Verdict]:
        """Judges replies; a verdict says why one was not judged.

        Args:
            replies: what to judge.
            stop: asked 5 times a second; once it returns True, the rest is not judged.

        Raises:
            CallEnded: by `stop`.
        """
        try:
            verdicts = dict(self._judged(replies, stop))
        except BaseException:  # what the processes still say belongs to these replies
            self.close()
            raise
        return [verdicts[number] for number in range(len(replies))]

    def _judged(self, replies: Sequence[Reply], stop: Callable[[], bool]) -> Iterator[tuple[int, Verdict]]:
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
        """Returns a process that has nothing to do, perhaps a new one; None if all are at work."""
        self._children = [child for child in self._children if child.asked or child.is_alive()]
        free = [child for child in self._children if not child.asked]
        if not free and (anew or not self._children) and len(self._children) < self._most:
            free = [_Child()]
            self._children += free
        return free[0] if free else None


class _Child:
    """A process that judges."""

    def __init__(self) -> None:
        path = [str(Path(__file__).parents[3]), *filter(None, sys.path)]
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # each thread of theirs takes address space
        self._errors = TemporaryFile()  # noqa: SIM115 - `end` closes it
        # A session of its own: Ctrl-C in a terminal is the parent's business.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tpu_kit.generation.evaluation.judging"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
            env=os.environ | alone | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path))},
        )  # fmt: skip
        assert self._process.stdout is not None
        self.answers: IO[bytes] = self._process.stdout
        self.asked: deque[int] = deque()  # the numbers of the replies that it judges
        self.ended = self._late = False
        self._since, self._rest = 0.0, b""

    def is_alive(self) -> bool:
        """Whether it can be asked; its starting thread may have ended, and it with that."""
        return self._process.poll() is None

    def ask(self, settings: Mapping[str, Any], numbers: Sequence[int], replies: Sequence[Reply]) -> None:
        """Sends it some replies."""
        self.asked.extend(numbers)
        self._since = time.monotonic()
        asked = {**settings, "replies": [replies[number] for number in numbers]}
        line = json.dumps(asked, default=_plain, skipkeys=True)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `read` finds that
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def read(self) -> Iterator[tuple[int, Verdict]]:
        """Yields the verdicts that have come."""
        text = os.read(self.answers.fileno(), 65536)
        self.ended = not text
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            self._since = time.monotonic()
            yield self.asked.popleft(), Verdict(**json.loads(line))

    def end_if_late(self) -> None:
        """Ends it if it has said nothing for too long."""
        if not self._late and time.monotonic() - self._since > _WAITING:
            self._late = True
            self._process.kill()

    def end(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self.answers, self._errors):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def buried(self) -> tuple[list[tuple[int, Verdict]], list[int]]:
        """Returns the verdict of the reply for which it has ended, and the numbers of those that are left."""
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-4096:].decode(errors="replace").strip().rpartition("\n")[2]
        self.end()
        if status == 0:  # of its own accord, between two replies
            return [], [*self.asked]
        why = f"ended its process by {end_name(status)}{said and f' ({said})'}"
        if self._late:
            why = f"was not done after {_WAITING:g} s"
        elif status == -signal.SIGPROF:
            why = f"takes more than {SECONDS:g} s of processor time"
        return [(self.asked.popleft(), Verdict(None, f"the judgement {why}"))], [*self.asked]


def _plain(value: Any) -> str | None:
    """The JSON of what has none: rules read texts, so images and the like are left out."""
    return None if isinstance(value, bytes | bytearray | memoryview) else str(value)


def main() -> None:
    """Judges what stdin asks for, until it ends."""
    import resource  # not on Windows

    end_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # not Linux: if memory becomes short all the same, this process goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    logging.disable()  # math-verify warns of each expression
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # antlr prints to stdout
    # In the main thread math-verify would take a limit of its own, in seconds of a clock, for an answer.
    thread = threading.Thread(target=_serve, args=(answers,))
    thread.start()
    thread.join()


def _serve(answers: IO[str]) -> None:
    for line in sys.stdin:
        ask = json.loads(line)
        data = DataConfig(**ask["data"])
        for row, text, rule in ask["replies"]:
            signal.setitimer(signal.ITIMER_PROF, ask["seconds"])  # whose signal ends the process
            verdict = judge(row, text, data, rule)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if verdict.error.startswith("MemoryError"):
                verdict = Verdict(None, f"the judgement takes more than {_MEMORY >> 20} MiB")
            print(json.dumps(asdict(verdict)), file=answers, flush=True)
            if verdict.error.startswith("the judgement"):
                return  # caches may hold what there is


if __name__ == "__main__":
    main()
