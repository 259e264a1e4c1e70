"""Users' functions run in the main thread, and a waiting call can be ended."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from tpu_kit.distributed.replica import main_thread
from tpu_kit.distributed.replica.main_thread import CallEnded, call


@pytest.fixture
def serving() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR2)
    main_thread.serve()
    yield
    signal.signal(signal.SIGUSR2, before)


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """The results, or errors, of functions that threads run while the main thread waits."""
    with ThreadPoolExecutor(len(functions)) as threads:
        jobs = [threads.submit(function) for function in functions]
        while not all(job.done() for job in jobs):
            wait(jobs, 0.1)
        return [job.exception() or job.result() for job in jobs]


def alarmed() -> bool:
    """Whether an alarm interrupts a sleep, as in math-verify."""
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(0.1)
    signal.signal(signal.SIGALRM, before)
    return bool(rang) and threading.current_thread() is threading.main_thread()


@pytest.mark.usefixtures("serving")
def test_calls_of_threads_run_in_the_main_thread_one_by_one():
    now: list[int] = []

    def alone(number: int) -> int:
        assert not now, "nested in another call"
        now.append(number)
        time.sleep(0.05)
        assert alarmed()
        now.remove(number)
        return number

    assert in_threads(*(lambda n=n: call(lambda: alone(n)) for n in range(3))) == [0, 1, 2]
    (error,) = in_threads(lambda: call(lambda: 1 / 0))
    assert isinstance(error, ZeroDivisionError)


def test_a_call_of_the_main_thread_runs_there_and_leaves_no_handler():
    before = signal.getsignal(signal.SIGUSR2)
    assert call(alarmed) and signal.getsignal(signal.SIGUSR2) == before
    assert call(threading.current_thread, aside=True) is not threading.main_thread()
    (there,) = in_threads(lambda: call(threading.current_thread))  # nobody serves
    assert there is not threading.main_thread()


def catches_all() -> int:
    for _ in range(2):
        try:
            time.sleep(30)
        except BaseException:  # as `except:` in a user's function
            continue
    return 0


@pytest.mark.parametrize("where", ["main", "thread", "aside"])
@pytest.mark.parametrize("function", [lambda: time.sleep(30), catches_all])
def test_a_call_that_waits_is_ended(where: str, function: Any, request: Any):
    if where == "thread":
        request.getfixturevalue("serving")
    start, aside = time.monotonic(), where == "aside"

    def stopped() -> Any:
        with pytest.raises(CallEnded) as told:
            call(function, lambda: time.monotonic() > start + 0.3, aside=aside)
        return told.value.why

    assert (in_threads(stopped)[0] if where == "thread" else stopped()) == "stop"
    assert time.monotonic() - start < 5


def test_patience_ends_what_waits_and_not_what_computes():
    def computes() -> int:
        until = time.monotonic() + 1.5
        return sum(1 for _ in iter(lambda: time.monotonic() < until, False)) and 7

    assert call(computes, patience=0.5) == 7
    with pytest.raises(CallEnded, match=r"has returned nothing and used no processor time for [01] s"):
        call(lambda: time.sleep(30), patience=0.5)


@pytest.mark.usefixtures("serving")
def test_calls_behind_one_that_hangs_end_with_it():
    """Otherwise the launch, without a heartbeat, would be ended without a checkpoint."""
    ended = in_threads(*(lambda: call(lambda: time.sleep(30), patience=0.6) for _ in range(3)))
    assert [type(error) for error in ended] == [CallEnded] * 3
