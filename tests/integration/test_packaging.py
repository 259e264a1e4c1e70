"""The installation: pins agree, all of them are used, and the wheel contains the data files."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tpu_kit
from tests.support.child_processes import REPOSITORY, child_environment, run_python
from tpu_kit.machine import torch_tpu
from tpu_kit.machine.compatibility import PACKAGES, PAIRINGS

TRAINING = REPOSITORY / "notebooks" / "4-train-cot-sft.ipynb"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

# Used without an import: a dependency of peft, the TPU's driver and compiler, the runner and kernel of notebooks, and
# the writer behind torch.utils.tensorboard.
USED_WITHOUT_IMPORT = {"accelerate", "papermill", "ipykernel", "tensorboard", "libtpu"}


def read_requirements(name: str) -> dict[str, Requirement]:
    lines = [line.split("#")[0].strip() for line in (REPOSITORY / name).read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line]
    here = [one for one in requirements if one.marker is None or one.marker.evaluate()]
    return {canonicalize_name(requirement.name): requirement for requirement in here}


TPU, GPU = read_requirements("requirements-tpu.txt"), read_requirements("requirements-gpu.txt")
TORCH_TPU = read_requirements("requirements-torch-tpu.txt")


def test_the_pairing_is_pinned() -> None:
    python = sys.version_info[:2]
    pairing = {canonicalize_name(name): f"=={pin}" for name, pin in PAIRINGS[0].versions(python).items()}
    assert {name: str(TPU[name].specifier) for name in pairing} == pairing
    extra = [Requirement(text) for text in PROJECT["optional-dependencies"]["tpu"]]
    here = {canonicalize_name(one.name): one for one in extra if one.marker is None or one.marker.evaluate()}
    assert {name: str(one.specifier) for name, one in here.items()} == pairing


def test_torch_tpu_is_pinned() -> None:
    tested = {canonicalize_name(name): f"=={pin}" for name, pin in torch_tpu.TESTED.items()}
    assert {name: str(TORCH_TPU[name].specifier) for name in tested} == tested
    extra = map(Requirement, PROJECT["optional-dependencies"]["torch-tpu"])
    assert {canonicalize_name(one.name): str(one.specifier) for one in extra} == tested
    backends = {canonicalize_name(name) for name in (*PACKAGES, *tested)}
    ours, theirs = ({name: str(one) for name, one in of.items() if name not in backends} for of in (TPU, TORCH_TPU))
    assert ours == theirs


def test_requirements_are_pinned_and_agree() -> None:
    for requirement in [*TPU.values(), *TORCH_TPU.values(), *(value for name, value in GPU.items() if name != "torch")]:
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
    """Returns the distributions that the package's code imports, at any depth."""
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
    notebooks = {f"tpu_kit/assets/notebooks/{path.name}" for path in (REPOSITORY / "notebooks").glob("*.ipynb")}
    assert {name for name in packed if name.endswith(".ipynb")} == notebooks
    assert not [name for name in packed if name.startswith("tests/") or "README" in name]
    assert any(name.startswith("tpu_kit/configs/") for name in expected)
    assert any(name.endswith("licenses/LICENSE") for name in packed)


def test_the_console_script_is_the_command(wheel: Path, tmp_path: Path) -> None:
    run_python(["-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(tmp_path), str(wheel)])
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    script = [str(tmp_path / "bin" / "tpu_kit"), "train", "nothing.yaml"]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nothing.yaml: no such configuration file" in done.stderr


def test_the_wheel_has_the_version_of_the_package(wheel: Path) -> None:
    about = f"tpu_kit-{tpu_kit.__version__}.dist-info/METADATA"
    assert f"\nVersion: {tpu_kit.__version__}\n" in zipfile.ZipFile(wheel).read(about).decode()


# Runs the cell as a kernel of Colab or Kaggle does, with all packages but the kit installed: first with an index
# without the kit, then with an index that has it.
_INSTALL_BY_NAME = """
import os, sys
from IPython.core.interactiveshell import InteractiveShell

sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
site, *addresses = sys.argv[1:]
sys.path.insert(0, site)
cell, shell = sys.stdin.read(), InteractiveShell.instance()
shell.run_cell("kit_source = 'index'")
for os.environ["PIP_INDEX_URL"] in addresses:
    print("raised", repr(shell.run_cell(cell).error_in_exec))
import tpu_kit
print(tpu_kit.__file__)
"""


def test_a_notebook_installs_the_kit_by_its_name(wheel: Path, tmp_path: Path) -> None:
    cell = [cell.source for cell in nbformat.read(TRAINING, 4).cells if cell.cell_type == "code"][1]
    pages, site = tmp_path / "index" / "tpu-kit", tmp_path / "site"
    pages.mkdir(parents=True)
    shutil.copy(wheel, pages)
    (pages / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    settings = {"PIP_TARGET": str(site), "PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": ""}
    others = {"PIP_FIND_LINKS": None, "PIP_EXTRA_INDEX_URL": None}
    addresses = [(tmp_path / name).as_uri() for name in ("none", "index")]
    done = subprocess.run(
        [sys.executable, "-c", _INSTALL_BY_NAME, str(site), *addresses], input=cell, text=True, capture_output=True,
        env=child_environment(settings | others), cwd=tmp_path,
    )  # fmt: skip
    first, second = re.findall("^raised (.*)$", done.stdout, re.MULTILINE)
    assert "No matching distribution found for tpu_kit" in done.stdout
    assert first.startswith("AssertionError('the lines above say why not; ") and second == "None", done.stdout
    assert done.stdout.splitlines()[-1] == str(site / "tpu_kit" / "__init__.py"), done.stderr


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


def test_a_release_is_published_by_its_workflow_alone_and_by_no_secret() -> None:
    folder = REPOSITORY / ".github" / "workflows"
    text = (folder / "release.yml").read_text()
    release = yaml.load(text, yaml.BaseLoader)  # YAML 1.1 reads "on" as true
    assert release["on"] == {"push": {"tags": ["v*"]}} and release["permissions"] == {"contents": "read"}
    jobs = release["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    assert "workflow_call" in yaml.load((folder / "ci.yml").read_text(), yaml.BaseLoader)["on"]
    assert jobs["build"]["env"]["TAG"] == "${{ github.ref_name }}"
    assert "make release" in [step.get("run") for step in jobs["build"]["steps"]]
    publish = jobs["publish"]
    assert publish["needs"] == ["test", "build"] and publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "release" and "secrets." not in text and "id-token" not in str(jobs["build"])
    used = [step["uses"] for job in jobs.values() for step in job.get("steps", []) if "uses" in step]
    assert used[-1].startswith("pypa/gh-action-pypi-publish@") and len(used) == 5
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", one) for one in used), "pinned by commit"
