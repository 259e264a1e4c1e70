"""Fills the cache of the hub's client (refs, snapshots, blobs) with models, as a download would."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from huggingface_hub import constants


def put_in_cache(cache: Path, name: str, source: Path, commit: str) -> None:
    """Adds the files of a folder as a commit; the branch main then points to it."""
    repository = cache / f"models--{name.replace('/', '--')}"
    for folder in ("refs", "blobs", f"snapshots/{commit}"):
        (repository / folder).mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    for path in source.iterdir():
        content = path.read_bytes()
        blob = hashlib.sha256(content).hexdigest()
        (repository / "blobs" / blob).write_bytes(content)
        (repository / "snapshots" / commit / path.name).symlink_to(f"../../blobs/{blob}")


def use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `cache` the hub's cache folder for this process and its children."""
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
