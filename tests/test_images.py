"""The kit on the images of notebook services: whether its bounds admit what they carry, and whether it runs there."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.image import IMAGES, read
from tpu_kit.compatibility import find_pairing, is_tested
from tpu_kit.packages import Site, decide
from tpu_kit.testing import REPOSITORY

each_image = pytest.mark.parametrize("image", IMAGES)
DEPENDENCIES = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
ABSENT = {"colab-tpu": {"omegaconf", "peft"}, "kaggle-tpu": {"datasets", "omegaconf", "peft"}}


def test_the_images_are_those_of_the_readme() -> None:
    assert IMAGES == ("colab-tpu", "kaggle-tpu")


@each_image
def test_bounds_admit_what_the_image_carries(image: str) -> None:
    _, versions = read(image)
    for requirement in map(Requirement, DEPENDENCIES):
        have = versions.get(canonicalize_name(requirement.name))
        assert have is None or have in requirement.specifier, f"{requirement} excludes {have} of {image}"
    assert find_pairing(lambda name: versions.get(canonicalize_name(name)))
    assert versions["transformers"] is None or is_tested("transformers", versions["transformers"])


@each_image
def test_installing_there_adds_what_is_missing_and_replaces_nothing(image: str) -> None:
    python, listed = read(image)
    newest = {"transformers": "5.23.0", "matplotlib": "3.11.2"}  # where the image takes the newest of its day
    versions = {name: version or newest.get(name, "1.0") for name, version in listed.items()}
    major, minor = map(int, python.split("."))
    decision = decide(Site(image, "8 x v5e", "Linux x86_64", (major, minor), versions, 100.0))
    assert decision.action == "install" and decision.kind == "tpu"
    assert {Requirement(line).name for line in decision.add} == ABSENT[image]
    assert len(decision.keep) == len(versions)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@each_image
def test_notebooks_and_quick_tests_run_there(image: str) -> None:
    subprocess.run(["make", "test-image", f"IMAGE={image}"], cwd=Path(REPOSITORY), check=True)
