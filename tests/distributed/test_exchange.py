"""The exchange of values between replicas: threads, processes, and processes with threads as on a TPU."""

from __future__ import annotations

import functools
import math
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import replica_functions
from tpu_kit.config.loader import load_config
from tpu_kit.distributed.hosts import ONE
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.replica.exchange import ProcessGroup
from tpu_kit.distributed.replica.worker import _connect
from tpu_kit.machine.checks import Machine

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")


@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("device_type", ["cpu", pytest.param("xla-cpu", marks=needs_xla)])
def test_each_replica_gets_what_all_give(device_type: str) -> None:
    """Exact in all bits, also for values of different sizes."""
    settings = {"device_type": device_type, "num_replicas": 2, "name": "embedded"}
    first, second = launch(replica_functions.exchanged, load_config(None, settings))
    for rank, values in enumerate(first):
        assert values["rank"] == rank and len(values["ids"]) == 1 + 1000 * rank
        assert [number.hex() for number in values["numbers"]] == [(0.1 + rank).hex(), (1 / 3).hex()]
        assert math.isnan(values["none"]) and values["text"] == "\u00e9" * rank
    assert second == [0, 1], "the next exchange"


def process(number: int, sent: bytes, answers: Any) -> None:
    """A process of a TPU chip with two replicas, its threads."""
    group: ProcessGroup = pickle.loads(sent)
    found: dict[int, Any] = {}

    def replica(rank: int) -> None:
        found[rank] = [group.exchange(rank, (rank, time), 2, number, 2) for time in range(3)]

    threads = [threading.Thread(target=replica, args=(2 * number + place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.put(found)


def test_processes_with_threads(tmp_path: Path) -> None:
    connect: Callable[[int, int], None] = functools.partial(_connect, "gloo", ONE, str(tmp_path))
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    sent = pickle.dumps(ProcessGroup(connect))
    children = [context.Process(target=process, args=(number, sent, answers)) for number in (0, 1)]
    for child in children:
        child.start()
    found = answers.get(timeout=120) | answers.get(timeout=120)
    for child in children:
        child.join(60)
    assert found.keys() == {0, 1, 2, 3}
    for values in found.values():
        assert values == [[[rank, time] for rank in range(4)] for time in range(3)]
