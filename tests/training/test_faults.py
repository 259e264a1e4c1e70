"""Writers of checkpoints are killed (-9) at any moment: committed checkpoints survive, others leave no trace."""

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
    # The page cache survives a kill, so memory serves as well as a disk and is faster.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield name


@pytest.fixture
def place() -> Iterator[str]:
    with run_server() as url, environment(url):  # a separate server; it takes the killed writers' leftovers with it
        yield f"{make_bucket(url)}/checkpoints"


@pytest.mark.slow
def test_folder_killed_at_random_moments(folder: str) -> None:
    told = campaign(folder, "random", "300")
    assert told["kills"] == 300 and told["steps"] > 30


@pytest.mark.parametrize(
    ("every", "torn"), [(11, True), *(pytest.param(1, torn, marks=pytest.mark.slow) for torn in (False, True))]
)
def test_folder_killed_at_each_operation(folder: str, every: int, torn: bool) -> None:
    told = campaign(folder, "each", str(every), *["torn"] * torn)
    assert told["operations"] > 40 and told["kills"] >= told["operations"] // every - 1


@pytest.mark.slow
def test_object_store_killed_at_random_moments(place: str) -> None:
    told = campaign(place, "random", "60")
    assert told["kills"] == 60 and told["steps"] > 6


@pytest.mark.parametrize(
    ("every", "torn"), [(25, False), *(pytest.param(1, torn, marks=pytest.mark.slow) for torn in (False, True))]
)
def test_object_store_killed_at_each_request(place: str, every: int, torn: bool) -> None:
    told = campaign(place, "each", str(every), *["torn"] * torn)
    assert told["operations"] > 40 and told["kills"] >= told["operations"] // every - 1
