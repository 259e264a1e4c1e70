"""Synchronises the hosts of a run before they start, and shares their state until the run ends.

Each host writes a document to a store on host 0 (torch's TCPStore) every `_BEAT` seconds, and reads the documents of
the other hosts. A document has the keys:

- token: random, new in each start of the run; begun: whether the first `agree` has ended,
- today: the date on which this host came,
- beat: a counter; a host whose counter does not change for `LOST` seconds is lost,
- facts: values that must be equal on all hosts, such as the configuration,
- stop, reached: the reason why the run must end, and the largest step that this host had started when it read a reason,
- active: a counter of the times at which a replica was seen to compute,
- work: the processor time of this host in seconds, while another host waits for its facts,
- hung: the stacks of this host's replicas, once nothing has happened for `launch.hang_timeout`,
- over: how this host's run has ended.

A host writes only its own document, so the order of writes does not matter. A thread talks to the store, because a call
may never return if the network is cut.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from tpu_kit.distributed.child_process import processor_times
from tpu_kit.distributed.hosts import ONE, Hosts

LOST = 20.0
_BEAT = 0.25
_FAREWELL = 10.0  # seconds for which host 0 keeps the store open for hosts that have not read its end
_SEEN = 90.0  # seconds until a host sees a file of another host; NFS caches a folder's entries for 60 s
_TOLD = 5.0  # seconds in which the hosts send their stacks
_WAITS = re.compile(r'File "[^"]*torch/distributed/[^"]*", line \d+,? in')  # a stack that waits in a collective


class HostError(RuntimeError):
    """Another host of the run failed, hangs or is lost.

    Attributes:
        again: whether the run may succeed if it is started again.
    """

    def __init__(self, message: str, again: bool) -> None:
        super().__init__(message)
        self.again = again


class Meeting:
    """Connects this host to the other hosts of a run; as a context manager, it sends them an error of its block.

    With several hosts it works only in its block. For a single host it uses neither store nor thread.

    Args:
        hosts: the hosts of the run.
        patience: seconds in which all hosts must come.
        hang_timeout: seconds without processor time after which an awaited host counts as hung; below 110 it is 110.
    """

    def __init__(self, hosts: Hosts = ONE, patience: float = 0.0, hang_timeout: float = 0.0) -> None:
        self.hosts, self._patience = hosts, patience
        self._hang_timeout = max(hang_timeout, _SEEN + LOST)  # `check_shared` idles for _SEEN seconds
        self._mine: dict[str, Any] = {
            "token": secrets.token_hex(8), "today": date.today().isoformat(), "beat": 0, "begun": False, "facts": {},
            "stop": None, "reached": None, "active": 0, "work": 0, "hung": None, "over": None,
        }  # fmt: skip
        self._lock = threading.Lock()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._documents: dict[int, dict[str, Any]] = {}
        self._moved: dict[int, float] = {}  # when a host's beat was last seen to change
        self.others_active = 0.0  # when a replica of another host was last seen to compute, seconds, monotonic
        self._answered = time.monotonic()
        self._gone = self._busy = ""
        self._came = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="tpu_kit hosts", daemon=True)

    def __enter__(self) -> Meeting:
        if self.hosts.count > 1:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        text, again, relayed = None if error is None else str(error) or type(error).__name__, False, False
        if isinstance(error, HostError):
            again, relayed = error.again, True
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            text, again = "a signal has ended it", True
        self._tell(over={"error": text, "again": again, "relayed": relayed})
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_FAREWELL + 2)

    # ------------------------------------------------------------------------------------------------ the agreement

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Waits until all hosts have sent their values of these facts, and checks that they are equal.

        For a single host it returns at once.

        Args:
            facts: JSON values by name. All hosts must call it with the same names; a name in a later call must be new,
                because values are kept.

        Raises:
            ValueError: two hosts have different values; the text has both.
            HostError: hosts have not come within `patience` at the first call, or hang at a later call; or as `check`.
        """
        facts, work, moved = json.loads(json.dumps(facts)), dict[int, int](), time.monotonic()
        self._tell(facts={**self._mine["facts"], **facts})
        first, others = not self._mine["begun"], [i for i in range(self.hosts.count) if i != self.hosts.index]
        while True:
            self._compare(facts)
            self.check()
            missing = [i for i in others if not facts.keys() <= self._documents.get(i, {"facts": {}})["facts"].keys()]
            if not missing:
                self._tell(begun=True)
                return
            if first and time.monotonic() - self._came > self._patience:
                raise self._missing(missing)
            if not first and (now := {i: self._documents[i]["work"] for i in missing}) != work:
                work, moved = now, time.monotonic()
            if not first and time.monotonic() - moved > self._hang_timeout:
                why = f"hangs: it has used no processor time for {self._hang_timeout:g} s while the others wait for it"
                raise HostError("; ".join(f"{self.hosts.name(i)}, {why}" for i in missing), True)
            time.sleep(0.05)

    @property
    def _all(self) -> dict[int, dict[str, Any]]:
        """The documents by host, as far as they have been read; always with this host's own."""
        return dict(sorted((self._documents | {self.hosts.index: self._mine}).items()))

    @property
    def today(self) -> str:
        """ISO date on which host 0 came, known after the first `agree`; on other hosts KeyError before."""
        return str(self._all[0]["today"])

    def check_shared(self, folder: Path) -> None:
        """Checks that all hosts share the output folder: host 0 writes a file that the others look for, up to 90 s.

        All hosts must call it, once, after their first `agree`. `folder` must exist on host 0, which removes the file
        afterwards.

        Raises:
            ValueError: this host does not see the file.
            HostError: another host does not see the file; or as `check`.
        """
        mark = folder / f".host-0-{self._all[0]['token']}"
        try:
            if self.hosts.index == 0:
                mark.touch()
            until = time.monotonic() + _SEEN
            while not mark.exists():
                self.check()
                if time.monotonic() > until:
                    raise ValueError(
                        f"output_dir={folder} of {self.hosts.name(self.hosts.index)}, lacks a file that host 0 wrote "
                        f"there {_SEEN:g} s ago: set output_dir to an object store (gs://bucket/run), or to a folder "
                        "that all hosts share"
                    )
                time.sleep(0.5)
            self.agree({"shares the output folder": True})
        finally:
            if self.hosts.index == 0:
                mark.unlink(missing_ok=True)

    def check(self) -> None:
        """Raises HostError if another host has failed or is silent for `LOST` (20) s, or host 0 has closed the store.

        After the end of host 0 it raises only for hosts that failed. Before another host has come, it does nothing.
        """
        now, name = time.monotonic(), self.hosts.name
        for index, document in sorted(self._documents.items()):
            over = document["over"]
            if over and over["error"] and index != self.hosts.index:
                text = over["error"] if over["relayed"] else f"{name(index)}, failed: {over['error']}"
                raise HostError(text, over["again"])
        if not self._documents or self._documents.get(0, {}).get("over"):
            return  # the run is over, and so is its store
        if self._gone:
            raise HostError(f"{name(0)}, is gone: its store has closed the connection ({self._gone})", True)
        if now - self._answered > LOST:
            if self.hosts.index:
                raise HostError(f"{name(0)}, has not answered for {LOST:g} s", True)
            return  # host 0 has the store itself: it was asleep
        lost = [i for i, at in self._moved.items() if now - at > LOST and not self._documents[i]["over"]]
        if lost:
            raise HostError("; ".join(f"{name(i)}, has given no sign of life for {LOST:g} s" for i in lost), True)

    def cause(self, error: Exception) -> Exception:
        """Waits up to 22 s until `check` finds a failure, and returns its HostError; without a failure returns `error`.

        `error` is this host's error, such as a broken connection, which a failure of another host may have caused.
        """
        until = time.monotonic() + LOST + 2
        while time.monotonic() < until:
            try:
                self.check()
            except HostError as found:
                return found
            time.sleep(0.1)
        return error

    def active(self) -> float:
        """Records that a replica of this host computes; returns the monotonic time in seconds."""
        self._mine["active"] += 1
        return time.monotonic()

    def hang(self, stacks: Mapping[str, str]) -> HostError:
        """Sends this host's stacks, waits up to 5 s for the other hosts' stacks, and returns an error about the hang.

        The error names the hosts that sent no stacks, and the hosts with a stack in no collective, with these stacks.
        If there are none, because all wait in collectives, it names all hosts.

        Args:
            stacks: a text by process, whose key has its replicas, such as "rank 0" or "ranks 0, 1". The text is "" for
                a process that does not run, which counts as a stack in no collective.
        """
        self._tell(hung=dict(stacks))
        until = time.monotonic() + _TOLD
        while time.monotonic() < until and len(self.hung) < self.hosts.count:
            time.sleep(0.1)
        told = self.hung
        guilty = {
            index: {rank: text for rank, text in told.get(index, {}).items() if not _WAITS.search(text)}
            for index in range(self.hosts.count)
        }
        hangs = [index for index in guilty if guilty[index] or index not in told] or list(guilty)
        texts = []
        for index in hangs:
            shown = guilty[index] or told.get(index, {})
            lines = [f"{rank}:\n{text or '(no stack: the process does not run)'}" for rank, text in shown.items()]
            begin = f"{self.hosts.name(index)}, hangs, and the others wait for it"
            texts += [begin, *(lines or ["(it does not answer)"])]
        return HostError("\n".join(texts), True)

    @property
    def hung(self) -> dict[int, dict[str, str]]:
        """The stacks that hosts have sent, by host, then by replica (such as "rank 0")."""
        return {i: document["hung"] for i, document in self._all.items() if document["hung"] is not None}

    # ----------------------------------------------------------------------------------------------- the early end

    def ask_stop(self, reason: str) -> None:
        """Tells all hosts that the run must end; with several hosts adds this host's name to the reason."""
        where = f" on {self.hosts.name(self.hosts.index)}" if self.hosts.count > 1 else ""
        self._tell(stop=f"{reason}{where}")

    def stop_asked(self) -> str | None:
        """Returns the reason of the first host, by number, that has asked to end the run; None if no host has."""
        return next((document["stop"] for document in self._all.values() if document["stop"]), None)

    def last_step(self, started: int) -> int | None:
        """Returns at once the largest step that a host has sent; None until all hosts have sent a step or ended.

        The first call sends `started`, the largest step that this host has started; later calls ignore it.
        """
        if self._mine["reached"] is None:
            self._tell(reached=started)
        # A host that has ended counts only if it has sent a step.
        reached = [one["reached"] for one in self._all.values() if one["reached"] is not None or not one["over"]]
        return None if None in reached else max(reached)

    # -------------------------------------------------------------------------------------------------- the thread

    def _tell(self, **changes: Any) -> None:
        """Changes keys of this host's document and has it sent."""
        with self._lock:
            self._mine |= changes
        self._wake.set()

    def _serve(self) -> None:
        """Runs in the thread: joins the store, exchanges documents until the block ends; keeps an error in `_gone`.

        An error of joining goes to `_busy`, and it tries again.
        """
        store = None
        while store is None and not self._closing.is_set():
            store = self._join()
        if store is None:
            return
        try:
            while True:
                ending = self._closing.is_set()
                self._round(store)
                if ending:
                    break
                self._wake.wait(_BEAT)
                self._wake.clear()
            until = time.monotonic() + _FAREWELL
            while self.hosts.index == 0 and time.monotonic() < until and not self._all_over():
                time.sleep(_BEAT)
                self._round(store)
        except Exception as error:  # torch raises several classes of errors if the store is gone
            self._gone = str(error).partition("\n")[0]

    def _join(self) -> Any:
        """Makes the store (host 0) or connects to it, and returns it.

        Returns None after an error, or if the store belongs to an earlier run, with the reason in `_busy`.
        """
        from torch.distributed import TCPStore

        mine, (host, port) = str(self.hosts.index), self.hosts.address
        try:
            if self.hosts.index == 0:
                return TCPStore(host, port, None, True, wait_for_workers=False)
            socket.create_connection((host, port), 5).close()  # TCPStore prints a stack for every failed attempt
            store = TCPStore(host, port, None, False, timedelta(seconds=5), wait_for_workers=False)
            while not store.check(["0"]) and not self._closing.wait(_BEAT):
                pass
            first = json.loads(store.get("0"))
            # The store belongs to a run that has begun without this process, or is over: wait for this run's store.
            if not (first["begun"] or (first["over"] and store.check([mine]))):
                return store
            self._busy = f"a run is in progress with another process as {self.hosts.name(self.hosts.index)}"
        except Exception as error:
            self._busy = str(error).partition("\n")[0]
        self._closing.wait(_BEAT)
        return None

    def _round(self, store: Any) -> None:
        """Sends this host's document to the store and reads the other hosts' documents."""
        awaited = any(one["facts"].keys() - self._mine["facts"].keys() for one in self._documents.values())
        with self._lock:
            self._mine["beat"] += 1
            if awaited:
                self._mine["work"] = int(_processor_time(os.getpid()) - time.thread_time())
            text = json.dumps(self._mine)
        store.set(str(self.hosts.index), text)
        there = [
            i for i in range(self.hosts.count) if i != self.hosts.index and (i in self._moved or store.check([str(i)]))
        ]
        texts = store.multi_get([str(i) for i in there]) if there else []
        self._answered = now = time.monotonic()
        documents = {i: json.loads(one) for i, one in zip(there, texts, strict=True)}
        for i, document in documents.items():
            before = self._documents.get(i)
            if before is None or before["beat"] != document["beat"]:
                self._moved[i] = now
            if before is None or before["active"] != document["active"]:
                self.others_active = now
        self._documents = documents

    def _all_over(self) -> bool:
        """Whether no other host still has to read this host's end; hosts may come late, within `patience`."""
        now, others = time.monotonic(), self._documents.items()
        if len(others) < self.hosts.count - 1 and now - self._came < self._patience:
            return False
        return all(document["over"] or now - self._moved[i] > LOST for i, document in others)

    # -------------------------------------------------------------------------------------------------- the errors

    def _compare(self, facts: Mapping[str, Any]) -> None:
        """Raises ValueError if hosts have sent different values of a key of `facts`."""
        name = self.hosts.name
        problems = []
        for key in facts:
            values = {i: one["facts"][key] for i, one in self._all.items() if key in one["facts"]}
            first = next(iter(values))
            other = next((i for i, value in values.items() if value != values[first]), None)
            if other is not None:
                problems.append(f"{key}: {values[first]!r} on {name(first)}; {values[other]!r} on {name(other)}")
        if problems:
            raise ValueError("the hosts differ in\n  " + "\n  ".join(problems) + "\nMake them equal, and start again")

    def _missing(self, missing: list[int]) -> HostError:
        """Returns the error to raise for hosts that have not come; names only host 0 if that cannot be reached."""
        if not self._documents and self.hosts.index:
            why = f" ({self.hosts.coordinator}: {self._busy})" if self._busy else f" ({self.hosts.coordinator})"
            missing, end = [0], why
        else:
            end = f" ({self._busy})" if self._busy else ""
        texts = [f"{self.hosts.name(i)}, has not come within {self._patience:g} s" for i in missing]
        return HostError(
            "; ".join(texts) + f"{end}. Start all {self.hosts.count} hosts, and let host 0 take connections on port "
            f"{self.hosts.address[1]}; {self.hosts.source} name the hosts", True
        )  # fmt: skip


def _processor_time(pid: int) -> float:
    """Returns the processor time of a process and its descendants together, in seconds."""
    return sum(processor_times(pid).values())
