"""Two jobs of one run write to one bucket, as on two machines; at each request a seed decides which job continues."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from tpu_kit.machine.storage.object_store import ObjectFolder
from tpu_kit.training.checkpoint import gcs_store
from tpu_kit.training.checkpoint.gcs_store import BucketStore
from tpu_kit.training.checkpoint.host_parts import BackgroundWriter
from tpu_kit.training.checkpoint.manager import CheckpointManager, list_checkpoints

REQUESTS = ("find", "cat_file", "pipe_file", "put_file", "rm_file")
LAST = 12


class Turns:
    """Runs functions in threads, only one thread at a time."""

    def __init__(self, seed: int) -> None:
        self._random, self._changed = random.Random(seed), threading.Condition()
        self._stay = self._random.choice((0, 0.8, 0.95, 0.99))  # chance to continue, so that others pause for long
        self._waiting, self._turn, self._last = set[str](), "", ""
        self._running = 0

    def run(self, **works: Callable[[], None]) -> dict[str, Exception]:
        """Runs functions by name until all have ended; returns their errors by name."""
        errors = {}

        def do(name: str, work: Callable[[], None]) -> None:
            try:
                self.gate()
                work()
            except Exception as error:
                errors[name] = error
            with self._changed:
                self._running -= 1
                self._choose()

        self._running = len(works)
        threads = [threading.Thread(target=do, args=item, name=item[0]) for item in works.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    def gate(self) -> None:
        """Waits until it is this thread's turn."""
        name = threading.current_thread().name
        with self._changed:
            self._waiting.add(name)
            self._choose()
            self._changed.wait_for(lambda: self._turn == name)
            self._turn = ""
            self._waiting.remove(name)

    def _choose(self) -> None:
        if self._waiting and len(self._waiting) == self._running:
            if self._last not in self._waiting or self._random.random() >= self._stay:
                self._last = self._random.choice(sorted(self._waiting))
            self._turn = self._last
            self._changed.notify_all()


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((5,), float(step))}


def campaign(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """Two jobs save different steps to one place, and a third reads; returns how many jobs were ended."""
    place, turns, reached = f"memory://run-{seed}/checkpoints", Turns(seed), 0
    monkeypatch.setattr(BackgroundWriter, "_start", lambda self, write: write())
    monkeypatch.setattr(gcs_store, "_lock_file", lambda _: tmp_path / f"{threading.current_thread().name}.lock")

    def train(every: int) -> None:
        with CheckpointManager(place, keep=1) as store:
            found = store.newest()
            assert not store.rejected
            for step in range((found.step if found else 0) // every * every + every, LAST + 1, every):
                store.save(step, {"x": tensors(step)}, {"state": step}, {}, best=step % 4 == 0)

    def read() -> None:
        nonlocal reached
        for _ in range(8):
            good, damaged = list_checkpoints(place, verify=True)
            assert not damaged, damaged
            now = good[-1].step if good else 0
            assert now >= reached, (now, reached)
            reached = now

    owners, take_over = set(), BucketStore._take_over

    def taken_over(store: BucketStore) -> None:
        take_over(store)
        owners.add(threading.current_thread().name)

    with monkeypatch.context() as patched:
        patched.setattr(BucketStore, "_take_over", taken_over)
        for name in REQUESTS:
            request = getattr(MemoryFileSystem, name)

            def gated(*arguments: Any, request: Any = request, **named: Any) -> Any:
                turns.gate()
                return request(*arguments, **named)

            patched.setattr(MemoryFileSystem, name, gated)
        errors = turns.run(first=lambda: train(2), second=lambda: train(3), reader=read)
    assert errors.keys() <= owners and len(errors) <= 1, errors  # only a job that owned the place may fail
    for error in errors.values():
        assert isinstance(error, ValueError) and "is being written to by process" in str(error), errors
    with CheckpointManager(place, keep=1) as store:  # removes the files of the ended job
        newest = store.newest()
        assert newest is not None and newest.step == LAST and not store.rejected
        complete = store.complete()
    for found in complete:
        assert torch.equal(found.tensors("x")["a"], tensors(found.step)["a"]) and found.document("state") == found.step
    names = {f"{found.folder}/{name}" for found in complete for name in (*found.files, "manifest.json")}
    assert {name for name in ObjectFolder(place).list() if not name.startswith("owner-")} == names
    MemoryFileSystem.store.clear()
    return len(errors)


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 1025), marks=pytest.mark.slow)], ids=len)
def test_two_jobs_harm_no_checkpoint_and_the_later_one_goes_on(
    seeds: range, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = sum(campaign(seed, monkeypatch, tmp_path) for seed in seeds)
    assert ended > len(seeds) // 2, "in most orders a job must take over from the other"
