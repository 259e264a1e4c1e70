"""Writers of checkpoints that are killed (-9) at any moment: what was durable stays, and what was not is not there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.child_processes import REPOSITORY, run_python
from tests.support.object_store import environment, make_bucket, run_server


def campaign(place: str, *arguments: str) -> dict[str, int]:
    command = ["-m", "tests.support.checkpoint_campaign", place, *arguments]
    kills: dict[str, int] = json.loads(run_python(command, cwd=REPOSITORY, timeout=550).stdout)
    return kills


@pytest.fixture
def folder() -> Iterator[str]:
    # A kill loses nothing that is in the page cache, so memory does as well as a disk, and needs no wait for it.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield name


@pytest.fixture
def place() -> Iterator[str]:
    with run_server() as url, environment(url):  # of its own, and gone with all that the killed ones have left
        yield f"{make_bucket(url)}/checkpoints"


@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_folder_killed_at_random_moments(folder: str, count: int) -> None:
    told = campaign(folder, "random", str(count))
    assert told["kills"] == count and told["steps"] > count / 10


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_folder_killed_at_each_operation(folder: str, every: int, torn: bool) -> None:
    told = campaign(folder, "each", str(every), *["torn"] * torn)
    assert told["operations"] > 40 and told["kills"] >= told["operations"] // every - 1


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_object_store_killed_at_random_moments(place: str, count: int) -> None:
    told = campaign(place, "random", str(count))
    assert told["kills"] == count and told["steps"] > count / 10


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("every", [14, pytest.param(1, marks=pytest.mark.slow)])
def test_object_store_killed_at_each_request(place: str, every: int, torn: bool) -> None:
    told = campaign(place, "each", str(every), *["torn"] * torn)
    assert told["operations"] > 40 and told["kills"] >= told["operations"] // every - 1
