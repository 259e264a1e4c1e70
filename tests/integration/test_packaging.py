"""What is installed: the pins agree, all of them are used, and the wheel carries the data files."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.child_processes import REPOSITORY, run_python
from tpu_kit.machine.compatibility import PACKAGES, PAIRINGS

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

# Used without an import of ours: what peft stands on, the TPU's driver and compiler, what runs the notebooks and their
# kernel, and the writer behind torch.utils.tensorboard.
USED_WITHOUT_IMPORT = {"accelerate", "papermill", "ipykernel", "tensorboard", "libtpu"}


def read_requirements(name: str) -> dict[str, Requirement]:
    lines = [line.split("#")[0].strip() for line in (REPOSITORY / name).read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line]
    here = [one for one in requirements if one.marker is None or one.marker.evaluate()]
    return {canonicalize_name(requirement.name): requirement for requirement in here}


TPU, GPU = read_requirements("requirements-tpu.txt"), read_requirements("requirements-gpu.txt")


def test_the_pairing_is_pinned() -> None:
    python = sys.version_info[:2]
    pairing = {canonicalize_name(name): f"=={pin}" for name, pin in PAIRINGS[0].versions(python).items()}
    assert {name: str(TPU[name].specifier) for name in pairing} == pairing
    extra = [Requirement(text) for text in PROJECT["optional-dependencies"]["tpu"]]
    here = {canonicalize_name(one.name): one for one in extra if one.marker is None or one.marker.evaluate()}
    assert {name: str(one.specifier) for name, one in here.items()} == pairing


def test_requirements_are_pinned_and_agree() -> None:
    for requirement in [*TPU.values(), *(value for name, value in GPU.items() if name != "torch")]:
        assert re.fullmatch(r"==[0-9.]+", str(requirement.specifier)), f"{requirement} is not pinned"
    paired = {canonicalize_name(name) for name in PACKAGES}
    shared = {name: str(value) for name, value in TPU.items() if name not in paired}
    assert shared == {name: str(value) for name, value in GPU.items() if name != "torch"}


def test_extras_are_pinned_in_the_requirements() -> None:
    for extra in ("trackers", "notebooks", "gcs"):
        for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
            (pin,) = TPU[canonicalize_name(requirement.name)].specifier
            assert pin.version in requirement.specifier, f"{requirement} excludes the tested {pin.version}"


def test_package_ranges_contain_the_pins() -> None:
    for requirement in map(Requirement, PROJECT["dependencies"]):
        (pin,) = TPU[canonicalize_name(requirement.name)].specifier
        assert pin.version in requirement.specifier, f"{requirement} excludes the tested {pin.version}"
        assert canonicalize_name(requirement.name) in GPU


def distributions_imported(folder: Path) -> set[str]:
    """The distributions that provide what the code of the package imports, at any depth."""
    providers = importlib.metadata.packages_distributions()
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for root in {name.split(".")[0] for name in names} - set(sys.stdlib_module_names):
                found |= {canonicalize_name(name) for name in providers.get(root, [root])}
    return found - {"tpu-kit"}


def test_nothing_is_installed_that_nothing_uses() -> None:
    unused = set(TPU) - distributions_imported(REPOSITORY / "tpu_kit") - USED_WITHOUT_IMPORT
    assert not unused, f"nothing in tpu_kit imports {sorted(unused)}"
    ranged = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert ranged <= distributions_imported(REPOSITORY / "tpu_kit")


def test_wheel_contains_all_of_the_package(wheel: Path) -> None:
    package = REPOSITORY / "tpu_kit"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files = [path for path in files if path.name != "README.md"]  # they link to files of the repository
    expected = {path.relative_to(REPOSITORY).as_posix() for path in files}
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert expected <= packed, f"left out of the wheel: {sorted(expected - packed)}"
    assert "tpu_kit/py.typed" in expected
    assert any(name.startswith("tpu_kit/assets/") for name in expected)
    assert any(name.startswith("tpu_kit/configs/") for name in expected)
    assert any(name.endswith("licenses/LICENSE") for name in packed)


def test_the_console_script_is_the_command(wheel: Path, tmp_path: Path) -> None:
    run_python(["-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(tmp_path), str(wheel)])
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    script = [str(tmp_path / "bin" / "tpu_kit"), "train", "nothing.yaml"]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nothing.yaml: no such configuration file" in done.stderr


@pytest.mark.skipif(not Path(sys.executable).with_name("ruff").exists(), reason="needs ruff: pip install -e .[dev]")
def test_hooks_before_a_commit_run_what_is_here() -> None:
    (group,) = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    assert {hook["id"] for hook in group["hooks"]} == {"ruff-check", "ruff-format", "notebooks"}
    for hook in group["hooks"]:
        program, *arguments = hook["entry"].split()
        assert program.startswith(".venv/bin/") and (Path(sys.executable).parent / Path(program).name).exists()
        assert all((REPOSITORY / one).is_file() for one in arguments if one.startswith("tests/"))
        assert "jupyter" in hook.get("types_or", []) or re.match(hook["files"], "notebooks/4-train-cot-sft.ipynb")


def test_continuous_integration_runs_the_one_command() -> None:
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)
    assert "run: .ci/run" in (REPOSITORY / ".github" / "workflows" / "ci.yml").read_text()
