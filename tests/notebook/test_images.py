"""The kit on the images of notebook services: its version bounds admit their packages, and it runs there."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.child_processes import REPOSITORY
from tests.support.image import IMAGES, installed, moved, read
from tpu_kit.machine.compatibility import find_pairing, is_tested
from tpu_kit.notebook.install import Site, decide

each_image = pytest.mark.parametrize("image", IMAGES)
DEPENDENCIES = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
ABSENT = {
    "colab-tpu": {"math-verify", "peft"},
    "kaggle-tpu": {"cloudpickle", "datasets", "math-verify", "peft"},
}


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
    # Where the image takes the newest version at its build.
    newest = {"transformers": "5.23.0", "matplotlib": "3.11.2", "pyyaml": "6.0.4"}
    versions = {name: version or newest.get(name, "1.0") for name, version in listed.items()}
    major, minor = map(int, python.split("."))
    decision = decide(Site(image, "8 x v5e", "Linux x86_64", (major, minor), versions))
    assert decision.kind == "tpu" and decision.command
    assert {Requirement(line).name for line in decision.add} == ABSENT[image]
    assert len(decision.keep) == len(versions)


COLAB_FREEZE = """
accelerate==1.14.0
jax==0.7.2
libtpu==0.0.21.1
torch @ https://download.pytorch.org/whl/cpu/torch-2.9.0%2Bcpu-cp313-cp313-manylinux_2_28_x86_64.whl
torch-xla @ https://storage.googleapis.com/wheels/tpuvm/torch_xla-2.9.0-cp313-cp313-manylinux_2_28_x86_64.whl
transformers==5.15.0
"""
KAGGLE_BUILD = """
BASE_IMAGE=python:3.12
TORCH_VERSION=2.8.0
TORCHVISION_VERSION=0.23.0
    uv pip install --system --force-reinstall libtpu==0.0.17 && \\
"""


def test_an_image_that_moved_is_noticed() -> None:
    """Excerpts of the files of `tests.support.image.SOURCES`, as they were when tests/images was written."""
    assert moved("colab-tpu", [COLAB_FREEZE, "Ubuntu 22.04.5 LTS\nPython 3.13.15\n"]) == []
    newer = COLAB_FREEZE.replace("torch-2.9.0", "torch-2.11.0").replace("5.15.0", "5.16.0")
    assert moved("colab-tpu", [newer, "Python 3.14.1\n"]) == [
        "colab-tpu: python 3.13 -> 3.14",
        "colab-tpu: torch 2.9.0 -> 2.11.0",
        "colab-tpu: transformers 5.15.0 -> 5.16.0",
    ]
    assert moved("kaggle-tpu", [KAGGLE_BUILD]) == []
    newer = KAGGLE_BUILD.replace("2.8.0", "2.9.0").replace("python:3.12", "python:3.13")
    assert moved("kaggle-tpu", [newer]) == [
        "kaggle-tpu: python 3.12 -> 3.13", "kaggle-tpu: torch 2.8.0 -> 2.9.0", "kaggle-tpu: torch-xla 2.8.0 -> 2.9.0",
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="written another way now"):
        moved("kaggle-tpu", ["nothing"])


@pytest.mark.slow
@pytest.mark.timeout(7200)
@each_image
def test_notebooks_and_quick_tests_run_there(image: str) -> None:
    subprocess.run(["make", "test-image", f"IMAGE={image}"], cwd=Path(REPOSITORY), check=True)


def test_the_packages_of_an_environment_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install leaves an egg-info in the repository's folder, from which `make test-image` is started."""
    (tmp_path / "lying_about.egg-info").mkdir()
    (tmp_path / "lying_about.egg-info" / "PKG-INFO").write_text(
        "Metadata-Version: 2.1\nName: lying-about\nVersion: 1\n"
    )
    monkeypatch.chdir(tmp_path)
    found = installed(Path(sys.executable))
    assert "pytest" in found and "lying-about" not in found
