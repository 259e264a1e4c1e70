"""Rewards for the tests of `grpo`, which replicas in other processes import."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tpu_kit.training.checkpoint.local_store import FolderStore


def even(completions: list[Any], **kwargs: Any) -> list[float]:
    """The share of even digits; it differs between the samples of any model."""
    texts = [each[0]["content"] for each in completions]
    return [sum(letter in "02468" for letter in text) / max(1, len(text)) for text in texts]


def equal(completions: list[Any]) -> list[float]:
    return [0.5] * len(completions)


def random(completions: list[Any], trainer_state: Any) -> list[float]:
    """Random rewards, without information: the control."""
    return np.random.default_rng(trainer_state.global_step).integers(0, 2, len(completions)).astype(float).tolist()


def even_then_stop(completions: list[Any], trainer_state: Any, **kwargs: Any) -> list[float]:
    """Preempts the run once, while it judges the completions of the third update."""
    if trainer_state.global_step == 3 and "TPU_KIT_TEST_STOP" in os.environ:
        del os.environ["TPU_KIT_TEST_STOP"]
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # the process's main thread may be asleep
        time.sleep(1)  # on a busy machine two short updates may end before the calling process reads the signal
    return even(completions)


def only_at_first(completions: list[Any], trainer_state: Any, **kwargs: Any) -> list[float | None]:
    return [None] * len(completions) if trainer_state.global_step > 1 else [*even(completions)]


def fails_later(completions: list[Any], question: list[str], trainer_state: Any) -> list[float]:
    """Fails at the third update, in the first process that makes the file TPU_KIT_TEST_STOP."""
    if trainer_state.global_step == 3 and (place := os.environ.get("TPU_KIT_TEST_STOP")):
        write = FolderStore.write
        wait = float(os.environ["TPU_KIT_TEST_WRITE"])
        FolderStore.write = lambda *given: time.sleep(wait) or write(*given)
        with suppress(FileExistsError), open(place, "x") as file:
            file.write(str(os.getpid()))
        if Path(place).read_text() == str(os.getpid()):
            raise KeyError("no such judge")
    return even(completions)


def even_and_logged(completions: list[Any], log_metric: Any) -> list[float]:
    """Logs its rewards, so that the logged mean over all replicas is the mean reward."""
    for each in (rewards := even(completions)):
        log_metric("seen", each)
    return rewards


def silent(completions: list[Any], **kwargs: Any) -> list[float]:
    """Catches its error for each completion and returns 0."""
    rewards = []
    for each in completions:
        try:
            rewards.append(float(each["content"]))  # it is a list
        except Exception:
            rewards.append(0.0)
    return rewards


def waits_once(completions: list[Any], trainer_state: Any) -> list[float]:
    """Waits at the second update if TPU_KIT_TEST_STOP names a file, which it creates."""
    if trainer_state.global_step == 2 and (place := os.environ.get("TPU_KIT_TEST_STOP")):
        Path(place).touch()
        try:
            time.sleep(1000)
        except Exception:
            return [0.0] * len(completions)
    return even(completions)
