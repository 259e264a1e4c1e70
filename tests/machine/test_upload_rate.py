"""The rate of uploads that predictions take: the last long one of this machine."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from tpu_kit.machine.upload_rate import ASSUMED, keep_rate, upload_rate


def test_the_last_long_upload_tells_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert upload_rate() == (ASSUMED, "assumed")
    keep_rate(10**9, 20.0)
    keep_rate(1000, 1.0)
    keep_rate(10**10, 0.3)  # it was there already
    assert upload_rate() == (5e7, f"measured on this machine, {datetime.now(UTC):%Y-%m-%d}")
    (tmp_path / "tpu_kit" / "upload.json").write_text("{")
    assert upload_rate() == (ASSUMED, "assumed")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    keep_rate(10**9, 20.0)
