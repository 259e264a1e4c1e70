"""Writes, on each host of a mesh, the part of a checkpoint that the host holds: the shards of its devices.

Each host writes a file of tensors, such as training-3.safetensors, and then its receipt, training-3.json, with its size
and digest. Host 0 commits the checkpoint once all receipts are there. They are in a folder of the attempt to save the
step. Its name is known to the hosts of this launch alone, so files of another launch, or of a host that was taken for
lost, are never mixed into a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpu_kit.checkpointing import gcs_store, local_store
from tpu_kit.storage.object_store import is_url

PATIENCE = 1800.0
"""Seconds after which a part counts as lost. The loss of its host ends the run much sooner."""
_PAUSE = 0.5  # seconds between two looks for receipts


class BackgroundWriter:
    """Runs one write at a time in a thread. A context manager: on exit the last write has ended."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def poll(self) -> None:
        """Raises the error of the last write, if it has ended in one; never waits."""
        if self._error is not None:
            self.wait()

    def wait(self) -> None:
        """Waits until the last write is durable; raises, once, its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits as `wait`."""
        self.wait()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if kind is None:
                raise
            print(failure, file=sys.stderr, flush=True)  # the error of the body tells more

    def _start(self, write: Callable[[], None]) -> None:
        def run() -> None:
            try:
                write()
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()


@dataclass(frozen=True)
class Attempt:
    """An attempt of all hosts to save a step.

    Attributes:
        name: 12 hexadecimal digits.
        hosts: how many parts there are.
        broken: whether this host's own part could not be written.
    """

    name: str
    hosts: int
    broken: Callable[[], bool]

    def receipts(self, read: Callable[[], Mapping[str, bytes]]) -> dict[str, dict[str, Any]]:
        """Waits for all receipts; returns size and digest of each part by the name of its file.

        Args:
            read: the receipts that are there, by the name of the file.

        Raises:
            OSError: a part was not written.
        """
        until, wanted = time.monotonic() + PATIENCE, {f"training-{host}.json" for host in range(self.hosts)}
        while missing := sorted(wanted - (found := read()).keys()):
            if self.broken() or time.monotonic() > until:
                why = "could not be written" if self.broken() else f"have not come within {PATIENCE:g} s"
                raise OSError(f"{', '.join(missing)} {why}: each host writes its part of a checkpoint")
            time.sleep(_PAUSE)
        return {name.replace(".json", ".safetensors"): json.loads(found[name]) for name in sorted(wanted)}


class HostParts(BackgroundWriter):
    """Writes this host's parts in the background.

    Args:
        place: `<output_dir>/checkpoints`, a folder that all hosts share or a URL in an object store.
        host: number of this host.
        hosts: number of hosts.
        token: the same number on all hosts of a launch, and another one in each launch.
        make_room: called before each part with the step and the bytes of the part; returns once the place has room for
            the parts of all hosts.
    """

    def __init__(
        self, place: Path | str, host: int, hosts: int, token: int, make_room: Callable[[int, int], None]
    ) -> None:
        super().__init__()
        self._make_room = make_room
        self._place, self._host, self._hosts, self._token, self._saves = place, host, hosts, token, 0

    def __enter__(self) -> HostParts:
        return self

    def save(self, step: int, tensors: Mapping[str, torch.Tensor]) -> Attempt:
        """Starts to write this host's part of a step, after the previous one; all hosts save the same steps.

        Args:
            step: updates done.
            tensors: CPU tensors, which must not change any more.

        Returns:
            The attempt, which `CheckpointManager.save` commits on host 0.

        Raises:
            OSError: the previous part could not be written.
        """
        self.wait()
        self._make_room(step, sum(tensor.nbytes for tensor in tensors.values()))
        self._saves += 1
        text = f"{self._token} {step} {self._saves}"
        name, part = hashlib.blake2b(text.encode(), digest_size=6).hexdigest(), f"training-{self._host}"
        if is_url(self._place):
            self._start(lambda: gcs_store.write_part(str(self._place), step, name, part, tensors))
        else:
            self._start(lambda: local_store.write_part(Path(self._place), step, name, part, tensors))
        return Attempt(name, self._hosts, lambda: self._error is not None)
