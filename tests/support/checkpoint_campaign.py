"""Kills processes that write checkpoints and prints how often; for tests/training/test_faults.py.

    python -m tests.support.checkpoint_campaign PLACE random COUNT
    python -m tests.support.checkpoint_campaign PLACE each EVERY [torn]

Each writer is a fork of this process, which has loaded torch: a real process that receives a real SIGKILL, at little
cost. It saves an existing step again, then larger steps. `random` kills at random times, repeatedly in the same place.
`each` kills at each EVERY-th operation of two saves, in a fresh copy of a place where the second save deletes older
checkpoints.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support import faults
from tpu_kit.machine.storage.object_store import ObjectFolder, is_url, join
from tpu_kit.training.checkpoint.manager import CheckpointManager, list_checkpoints

KEEP, KEEP_EVERY = 2, 4


def tensors(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"adapter_model": {"a": torch.full((50_000,), float(step))}, "optimizer": {"m": torch.full((300,), step)}}


def save(store: CheckpointManager, step: int) -> None:
    documents = {"state": {"step": step}, "history": list(range(step))}
    store.save(step, tensors(step), documents, {}, best=step % 3 == 0)
    store.wait()


def write(place: Path | str, tell: Callable[[int], None], die_at: int | None, torn: bool) -> None:
    """Saves until the process is killed; with `die_at`, saves at most twice."""
    with CheckpointManager(place, KEEP, KEEP_EVERY) as store:
        newest = store.newest()
        step = newest.step if newest else 0
        tell(step)
        if die_at is not None:
            faults.arm(die_at, torn)
        for _ in range(10**9 if die_at is None else 1):
            for number in (step or 1, step + 1):
                save(store, number)
                tell(number)
            step += 1


def check(place: Path | str, tell: Callable[[int], None]) -> None:
    """Reads every checkpoint, as a concurrent reader and as the next writer; tells the newest step."""
    # `list_checkpoints` only reads; `newest` may also repair the folder.
    good, damaged = list_checkpoints(place, verify=True)
    assert not damaged, damaged
    with CheckpointManager(place, KEEP, KEEP_EVERY) as store:
        found = store.newest()
        assert not store.rejected, store.rejected
        assert (found.step if found else 0) == (good[-1].step if good else 0)
        complete = store.complete()
    if is_url(place):
        objects = ObjectFolder(str(place)).list()
        known = {f"{one.folder}/{name}" for one in complete for name in (*one.files, "manifest.json")}
        left = {name for name in objects if name not in known and not name.startswith("owner-")}
    else:
        left = {path.name for path in Path(place).iterdir() if path.name != ".lock" and path.name[:5] != "step-"}
    assert not left, left
    for one in complete:
        for name, group in tensors(one.step).items():
            read = one.tensors(name)
            assert all(torch.equal(read[key], group[key]) for key in group)
        assert one.document("state") == {"step": one.step}
        assert len(one.document("history")) == one.step
    tell(found.step if found else 0)


def fork(work: Callable[[Callable[[int], None]], None], lives: float | None = None) -> tuple[int, int]:
    """Runs `work` in a fork; returns its wait status and the last number it told (-1: none).

    Args:
        work: Called with a function that tells a number to this process.
        lives: Seconds from the first number until the fork is killed; None lets it end by itself.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:

            def tell(number: int) -> None:
                os.write(writer, b"%9d" % number)

            work(tell)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writer)
    told = b""
    if lives is not None:
        told = os.read(reader, 9)
        time.sleep(lives)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    while block := os.read(reader, 1 << 16):
        told += block
    os.close(reader)
    return status, int(told[-9:] or -1)


def killed(status: int) -> bool:
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a writer has failed: see above"
    return os.WIFSIGNALED(status)


def after(place: Path | str, told: int) -> int:
    """Returns the newest step, after checking that no step reported as saved is lost."""
    status, step = fork(lambda tell: check(place, tell))
    assert status == 0, f"after a writer that had told of step {told}: see above"
    assert told <= step <= told + 1, (told, step)
    return step


def at_random(place: Path | str, count: int) -> dict[str, int]:
    last = 0
    longest = 0.4 if is_url(place) else 0.05
    for _ in range(count):
        status, told = fork(lambda tell: write(place, tell, None, False), lives=random.random() * longest)
        assert killed(status)
        step = after(place, max(told, last))
        last = step
    return {"kills": count, "steps": last}


def at_each(root: Path | str, every: int, torn: bool) -> dict[str, int]:
    seed = join(root, "seed")

    def plant(tell: Callable[[int], None]) -> None:
        with CheckpointManager(seed, KEEP, KEEP_EVERY) as store:
            for step in range(1, 6):  # 3, 4 and 5 stay; saving 6, the best so far, deletes 3
                save(store, step)

    assert fork(plant)[0] == 0
    kills, die_at = 0, 1
    while True:
        place = join(root, f"at-{die_at}")
        assert fork(lambda tell: copy(seed, place))[0] == 0  # noqa: B023  it is called at once
        status, told = fork(lambda tell: write(place, tell, die_at, torn))  # noqa: B023  likewise
        step = after(place, told)
        assert step in (5, 6)
        if not isinstance(place, str):
            shutil.rmtree(place)
        if not killed(status):
            assert step == 6
            return {"kills": kills, "operations": die_at - 1}
        kills, die_at = kills + 1, die_at + every


def copy(seed: Path | str, place: Path | str) -> None:
    if is_url(seed):
        source, target = ObjectFolder(str(seed)), ObjectFolder(str(place))
        for name in source.list():
            if not name.startswith("owner-"):
                source.copy(name, target)
    else:
        shutil.copytree(seed, place)


def main(arguments: list[str]) -> dict[str, int]:
    place: Any = arguments[0] if is_url(arguments[0]) else Path(arguments[0])
    torch.set_num_threads(1)
    if is_url(place):
        import gcsfs.core  # noqa: F401  once, before the forks
    if arguments[1] == "random":
        return at_random(join(place, "random"), int(arguments[2]))
    return at_each(place, int(arguments[2]), "torn" in arguments[3:])


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
