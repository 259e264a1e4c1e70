"""Verifiers run in processes that can be ended: an answer that hangs is not judged, the others are, no process
stays."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.child_processes import child_environment
from tpu_kit.config.loader import load_config
from tpu_kit.distributed.replica.main_thread import CallEnded
from tpu_kit.generation.evaluation import judging
from tpu_kit.generation.evaluation.judging import Judges, judge_all
from tpu_kit.generation.evaluation.verifiers import Verdict

DATA = load_config(None, {}).data
ENDLESS = (r"regex:(.+)+\x00", "x" * 60)  # 2^60 ways to split the text
POWER = r"so \boxed{9^{9^{9^{9}}}}"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "SECONDS", 0.4)


def children() -> list[int]:
    """The judging child processes of this process."""
    found = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    return [int(pid) for pid in found if b"generation.evaluation.judging" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.usefixtures("quick")
def test_a_reply_whose_judgement_does_not_end_is_not_judged():
    rule, text = ENDLESS
    row = {"answer": "4", "image": b"\xff", "day": datetime.date(2026, 1, 2), "none": None, "deep": {"a": [1]}, 3: 4}
    replies = [
        (row, "4", "auto"),
        (row, text, rule),
        (row, "5", "auto"),
        (row, text, rule),
        (row, "is 4", r"regex:(\d)"),
    ]
    with Judges(DATA) as judges:
        assert not children(), "none before there is work"
        verdicts = judges.judge(replies * 2)
        assert len(children()) <= 4
    told = Verdict(None, "the judgement takes more than 0.4 s of processor time")
    assert verdicts == [Verdict(True), told, Verdict(False), told, Verdict(True)] * 2
    assert not children()


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("4", POWER), ("$10^{10^{10}}$", POWER), ("$10^{10^{10}}$", r"\boxed{9^{9^{9}}}")])
def test_giant_powers_end(pair: tuple[str, str]):
    start = time.process_time()
    verdicts = judge_all([({"answer": pair[0]}, pair[1]), ({"answer": "4"}, "4")], DATA, "auto")
    assert verdicts[0].correct is not True and verdicts[1] == Verdict(True) and time.process_time() - start < 2


def test_a_judgement_that_takes_all_memory_is_not_judged():
    greedy = ({"answer": "4"}, "a" * 2**24, "regex:(?:(a)|b)*?c")
    with Judges(DATA) as judges:
        first, second = judges.judge([greedy, ({"answer": "4"}, "4", "auto")])
    assert first == Verdict(None, "the judgement takes more than 1024 MiB") and second == Verdict(True)


def test_a_process_that_is_ended_meanwhile_costs_one_judgement(monkeypatch: pytest.MonkeyPatch):
    ask = judging._Child.ask

    def asked(child: Any, *given: Any) -> None:
        ask(child, *given)
        child._process.kill()
        monkeypatch.undo()

    monkeypatch.setattr(judging._Child, "ask", asked)
    verdicts = judge_all([({"answer": "4"}, "4")] * 3, DATA, "auto")
    told = "the judgement ended its process by SIGKILL"
    assert verdicts == [Verdict(None, told), Verdict(True), Verdict(True)]


@pytest.mark.usefixtures("quick")
def test_a_stop_ends_it_and_a_process_that_is_gone_is_replaced():
    rule, text = ENDLESS
    with Judges(DATA) as judges:
        start, stopped = time.monotonic(), iter([False, False, True])
        with pytest.raises(CallEnded):
            judges.judge([({"answer": "4"}, text, rule)] * 1000, lambda: next(stopped))
        assert time.monotonic() - start < 20 and not children()
        threading.Thread(target=lambda: judges.judge([({"answer": "4"}, "4", "auto")])).start()
        time.sleep(0.3)  # its processes end with that thread
        assert judges.judge([({"answer": "4"}, "4", "auto")]) == [Verdict(True)]


PARENT = """
import sys
from tpu_kit.config.loader import load_config
from tpu_kit.generation.evaluation.judging import Judges
judges = Judges(load_config(None, {}).data)
judges.judge([({"answer": "4"}, "4", "auto")])
print(judges._children[0]._process.pid, flush=True)
judges.judge([({"answer": "4"}, "x" * 60, r"regex:(.+)+\\x00")] * 1000)
"""


def test_no_process_outlives_a_killed_parent():
    """Also while it computes in C with the GIL; only the parent handles Ctrl-C."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=child_environment(), stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert os.getsid(pid) == pid
    time.sleep(0.5)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 3
    while Path(f"/proc/{pid}/stat").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_functions_of_users_judge_here():
    threads: list[Any] = []

    def mine(row: Any, answer: str) -> bool:
        threads.append(threading.current_thread())
        return answer == row["target"]

    verdicts = judge_all([({"target": "a"}, "<think>b</think>a"), ({"target": "b"}, "a")], DATA, mine)
    assert verdicts == [Verdict(True), Verdict(False)] and threads == [threading.main_thread()] * 2
