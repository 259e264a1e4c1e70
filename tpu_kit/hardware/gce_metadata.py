"""What a Google Cloud virtual machine's metadata server says of the machine's end; silent anywhere else.

Keys below computeMetadata/v1/instance/, the values that end a run, and where cloud.google.com documents them:

- preempted becomes TRUE: a Spot machine is taken back, with 30 s left, or 120 s where the machine was made with such
  a notice (compute/docs/instances/create-use-spot);
- maintenance-event becomes TERMINATE_ON_HOST_MAINTENANCE: 60 s left, with a GPU an hour; MIGRATE_ON_HOST_MAINTENANCE
  ends nothing (compute/docs/metadata/getting-live-migration-notice, compute/docs/gpus/gpu-host-maintenance);
- upcoming-maintenance has a maintenance status that becomes ONGOING, which says that it begins; PENDING is days ahead
  (tpu/docs/view-maintenance-notifications).

TPU VMs, also those of queued resources, are Compute Engine machines and have no key of their own for this.
Maintenance that was announced before the run began does not end it: a run that is started again in the hour before a
GPU machine stops would end at once, again and again.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

_ADDRESS = "169.254.169.254"  # metadata.google.internal, without asking the network for that name
_HEADER, _GOOGLE = "Metadata-Flavor", "Google"
_ENDS = {
    "preempted": r"(TRUE)",
    "maintenance-event": r"(TERMINATE_ON_HOST_MAINTENANCE)",
    "upcoming-maintenance": r'"maintenance_?status"\s*:\s*"(ONGOING)"',
}
_CONNECT = 3.0  # seconds that the server, which is on the same host, gets to answer
_TRIES = 3  # to find it
_HANG = 60  # seconds after which a request that waits for a change is to be answered without one
_PAUSE = 3.0  # seconds until another try where the server is not available, as happens in the middle of maintenance
_FAILURES = (OSError, http.client.HTTPException, ValueError)


class _Answer(NamedTuple):
    status: int
    value: str
    etag: str


class MetadataWatch:
    """Waits for changes in threads of its own, from now until `close`; the caller never waits.

    GCE_METADATA_HOST (host, or host:port), if set, says where the server is, as for Google's own libraries.

    Args:
        give: called, from such a thread, with the reason why the machine ends.
    """

    def __init__(self, give: Callable[[str], None]) -> None:
        self._give = give
        self._host = os.environ.get("GCE_METADATA_HOST") or _ADDRESS
        self._closed = threading.Event()
        self._connections: set[http.client.HTTPConnection] = set()
        self._start(self._find)

    def close(self) -> None:
        """Ends the waiting."""
        self._closed.set()
        for connection in list(self._connections):
            with contextlib.suppress(OSError, AttributeError):  # not connected yet, or no longer
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _start(self, work: Callable[..., None], *arguments: str) -> None:
        threading.Thread(target=work, args=arguments, name="tpu_kit metadata", daemon=True).start()

    def _find(self) -> None:
        for _ in range(_TRIES):
            with contextlib.suppress(*_FAILURES):
                if self._get("preempted") is not None:
                    for key in _ENDS:
                        self._start(self._follow, key)
                return  # also where another server answers: another cloud's, or a router's
            if self._closed.wait(1):
                return

    def _follow(self, key: str) -> None:
        etag = ""  # of the value seen last
        announced: bool | None = None  # whether that value ends the run
        while not self._closed.is_set():
            asked = time.monotonic()
            try:
                answer = self._get(key, etag)
            except _FAILURES:
                answer = None
            if answer is None or answer.status != http.client.OK:  # no value yet, or none for a moment
                self._closed.wait(_PAUSE)
                continue
            found, before = re.search(_ENDS[key], answer.value, re.IGNORECASE), announced
            announced = found is not None
            if found and (before is False or (before is None and key == "preempted")):
                self._give(f"the cloud takes this machine back (instance/{key} says {found[1]})")
                return
            if etag and time.monotonic() - asked < 0.5:  # a server that does not wait for a change
                self._closed.wait(_PAUSE)
            etag = answer.etag or "0"

    def _get(self, key: str, etag: str = "") -> _Answer | None:
        """A key's value, where there is a tag only once it is another one, or after a while; None: not Google's."""
        path = f"/computeMetadata/v1/instance/{key}?alt={'json' if key == 'upcoming-maintenance' else 'text'}"
        if etag:
            path += f"&wait_for_change=true&timeout_sec={_HANG}&last_etag={etag}"
        connection = http.client.HTTPConnection(self._host, timeout=_CONNECT)
        self._connections.add(connection)
        try:
            connection.connect()
            if etag:
                connection.sock.settimeout(_HANG + 10)
            connection.request("GET", path, headers={_HEADER: _GOOGLE})
            answer = connection.getresponse()
            if answer.getheader(_HEADER) != _GOOGLE:
                return None
            text = answer.read(65536).decode(errors="replace")
            return _Answer(answer.status, text, answer.getheader("ETag", ""))
        finally:
            self._connections.discard(connection)
            connection.close()
