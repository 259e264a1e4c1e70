"""Stores the rate of the last large upload from this machine to the hub in the user's cache, to predict the next."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tpu_kit.machine.chips import MIB

ASSUMED = 10e6
"""Bytes per second assumed before the first measurement: a slow data centre, or a fast home connection."""
_MOST = 1e9  # bytes per second; a faster "upload" sent nothing, because the hub had the files already
_LEAST = 16 * MIB  # smallest upload that is measured: a smaller upload takes mostly the time of its requests


class Rate(NamedTuple):
    """An upload rate and the source of the figure, as text."""

    bytes_per_second: float
    source: str


def keep_rate(size: int, seconds: float) -> None:
    """Stores the rate of an upload of `size` bytes in `seconds`; ignores an unwritable cache.

    Stores nothing for less than 16 MiB, or above 1e9 bytes per second: the hub then had the files already.
    """
    if size < _LEAST or size > _MOST * seconds:
        return
    with suppress(OSError):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"bytes_per_second": size / seconds, "made": f"{datetime.now(UTC):%Y-%m-%d}"}))
        part.replace(path)


def upload_rate() -> Rate:
    """Returns the stored rate of this machine, or `ASSUMED` if there is none or it cannot be read.

    Its `source` is "measured on this machine, DATE" or "assumed".
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        saved = json.loads(_path().read_text())
        if (rate := float(saved["bytes_per_second"])) > 0:
            return Rate(rate, f"measured on this machine, {saved['made']}")
    return Rate(ASSUMED, "assumed")


def _path() -> Path:
    """Returns the path of the file with the rate in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "tpu_kit" / "upload.json"
