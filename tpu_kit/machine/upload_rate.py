"""Keeps the rate of the last long upload from this machine to the hub in the user's cache, for predictions."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tpu_kit.machine.chips import MIB

ASSUMED = 10e6
"""Bytes per second that are assumed before an upload was measured: a slow data centre, or a fast home."""
_MOST = 1e9  # bytes per second: what is faster was there already, and was not uploaded
_LEAST = 16 * MIB  # of an upload that tells the rate: below, the requests take most of the time


class Rate(NamedTuple):
    """Bytes per second, and where the figure is from."""

    bytes_per_second: float
    source: str


def keep_rate(size: int, seconds: float) -> None:
    """Keeps the rate of an upload of so many bytes, if it tells one; a cache that cannot be written is left."""
    if size < _LEAST or size > _MOST * seconds:
        return
    with suppress(OSError):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"bytes_per_second": size / seconds, "made": f"{datetime.now(UTC):%Y-%m-%d}"}))
        part.replace(path)


def upload_rate() -> Rate:
    """Returns the measured rate, or the assumed one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        saved = json.loads(_path().read_text())
        if (rate := float(saved["bytes_per_second"])) > 0:
            return Rate(rate, f"measured on this machine, {saved['made']}")
    return Rate(ASSUMED, "assumed")


def _path() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "tpu_kit" / "upload.json"
