"""Starts a stream's feeder process as a fork of a process that has loaded the libraries."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable

from tests.support.child_processes import fork_loaded
from tpu_kit.data.stream import feeder


def start(payload: bytes) -> tuple[int, Callable[[], int]]:
    """Replaces `feeder._start`."""
    process = fork_loaded(_feed, payload)

    def ended() -> int:
        process.join()
        return int(process.exitcode or 0)

    assert process.pid is not None
    return process.pid, ended


def _feed(payload: bytes) -> None:
    os.setsid()
    feeder.feed_by_processes(*pickle.loads(payload))
