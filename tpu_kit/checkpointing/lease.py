"""The right to write to a folder of an object store, for one process at a time.

An object store has no locks that die with their holder. Here the holder owns the object writer-<number>.json of the
largest number, and rewrites it every BEAT_SECONDS. Whoever wants the folder creates the next number, which one alone
can (create-only), if the holder has released it, or is a dead process of the same machine, or if its object does not
change for LEASE_SECONDS: no clocks of two machines are compared. Numbers are never used twice.

Its limits: a holder that is frozen for LEASE_SECONDS and wakes up between its check and the commit that follows can
still commit one checkpoint. That one is whole, since all files have names of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tpu_kit.storage.object_store import ObjectFolder

LEASE_SECONDS, BEAT_SECONDS = 60.0, 15.0
_NAME = re.compile(r"writer-(\d{8})\.json")


def holder_name() -> str:
    """This process, as others are told of it."""
    return f"process {os.getpid()} on {socket.gethostname()}"


class Lease:
    """Holds the folder from construction to `close`, and keeps saying so from a thread.

    Raises:
        ValueError: another process holds it; its host and PID are named.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: ObjectFolder) -> None:
        self.folder = folder
        self._content = {"holder": holder_name(), **_identity(), "beat": 0, "released": False}
        self._stop = threading.Event()
        older = self._numbers()
        if older:
            self._wait_for(older[-1])
        self._name = _name(older[-1] + 1 if older else 0)
        try:
            folder.create(self._name, self._text())
        except FileExistsError as error:
            raise self._refused(json.loads(folder.read(self._name))) from error
        try:
            self.check()
            folder.remove(map(_name, older))
        except BaseException:
            with contextlib.suppress(OSError):
                self._write(released=True)
            raise
        self._thread = threading.Thread(target=self._beat, daemon=True, name="tpu_kit-lease")
        self._thread.start()

    def check(self) -> None:
        """Makes sure that the folder is still held; raises ValueError if another process has taken it."""
        numbers = self._numbers()
        newest = _name(numbers[-1]) if numbers else self._name  # the next beat writes a deleted one again
        if newest != self._name:
            raise self._refused(json.loads(self.folder.read(newest)))

    def close(self) -> None:
        """Gives the folder free."""
        self._stop.set()
        self._thread.join(BEAT_SECONDS)
        with contextlib.suppress(OSError):  # then the next one has to wait, which is no reason to fail
            self._write(released=True)

    def _numbers(self) -> list[int]:
        return sorted(int(match[1]) for name in self.folder.list() if (match := _NAME.fullmatch(name)))

    def _text(self) -> bytes:
        return json.dumps(self._content).encode()

    def _write(self, **changes: Any) -> None:
        self._content |= changes
        self.folder.write(self._name, self._text())

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # the next one may get through; `check` is what counts
                self._write(beat=self._content["beat"] + 1)

    def _wait_for(self, number: int) -> None:
        """Returns when nobody holds the folder; raises ValueError when somebody is seen to."""
        first = self._read(number)
        alive = _alive(first)
        if first.get("released") or alive is False:
            return
        if alive:
            raise self._refused(first)
        text = (
            f"{first.get('holder')} was writing to {self.folder.url}: waiting {LEASE_SECONDS:g} s to see if it still is"
        )
        print(text, file=sys.stderr, flush=True)
        end = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < end:
            time.sleep(min(1.0, LEASE_SECONDS / 10))
            now = self._read(number)
            if now.get("released"):
                return
            if now != first:
                raise self._refused(now)

    def _read(self, number: int) -> dict[str, Any]:
        try:
            found = json.loads(self.folder.read(_name(number)))
        except FileNotFoundError:  # another process has taken it over, and will be seen to have
            return {"released": True}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _refused(self, other: dict[str, Any]) -> ValueError:
        holder = other.get("holder", "another process")
        return ValueError(
            f"{self.folder.url} is being written to by {holder}: end that one first, or set another output_dir"
        )


def _name(number: int) -> str:
    return f"writer-{number:08d}.json"


def _identity() -> dict[str, Any]:
    """What tells this process from all others; the machine's part is empty where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        machine = ""
    return {"machine": machine, "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: int) -> str | None:
    """When a process of this machine began, in ticks; None if there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _alive(other: dict[str, Any]) -> bool | None:
    """Whether a holder runs; None if this machine cannot know."""
    machine = _identity()["machine"]
    if not machine or other.get("machine") != machine or not isinstance(other.get("pid"), int):
        return None
    return _started(other["pid"]) == other.get("started")
