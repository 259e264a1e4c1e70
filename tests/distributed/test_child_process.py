"""Python in its own process."""

from __future__ import annotations

import os
import time

import pytest

from tests.support.child_processes import child_environment
from tpu_kit.distributed.child_process import run_child


def test_what_a_child_is_given_and_says() -> None:
    code = (
        "import os, sys, tpu_kit; print(input()); print('two', flush=True); print(os.environ['X'], file=sys.stderr); "
        "sys.exit(3)"
    )
    lines: list[str] = []
    done = run_child(["-c", code], {"X": "said", "PATH": os.environ["PATH"]}, given="one\n", on_line=lines.append)
    assert (done.status, done.how, done.output, done.errors) == (3, "status 3", "one\ntwo\n", "said\n")
    assert lines == ["one", "two"] and done.last_lines(1) == "said"
    killed = run_child(["-c", "import os; print('a\\n'); print('b', flush=True); os.kill(os.getpid(), 9)"], os.environ)
    assert killed.how == "SIGKILL" and killed.last_lines(5) == "a\nb"
    assert run_child(["-c", "pass"], os.environ).last_lines(1) == "it wrote nothing"


def test_what_takes_too_long_is_killed_with_all_that_it_started() -> None:
    """So are processes that a child leaves running."""
    forks = "import os, time\nif os.fork() == 0: time.sleep(60)\nprint(os.getpid(), flush=True)\n"
    heard: list[str] = []
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer in 2 s"):
        run_child(["-c", f"{forks}time.sleep(60)"], child_environment(), seconds=2, on_line=heard.append)
    run_child(["-c", forks], child_environment(), on_line=heard.append)
    assert time.monotonic() - start < 30 and len(heard) == 2
    for leader in heard:
        with pytest.raises(ProcessLookupError):
            for _ in range(100):  # init reaps them a moment later
                os.killpg(int(leader), 0)
                time.sleep(0.05)
