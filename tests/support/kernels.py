"""Fixtures with real Jupyter kernels: of this environment's IPython, and of the older IPython in Colab's image."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from tests.support.child_processes import PYTHONPATH, child_environment, run_python
from tests.support.image import FOLDER, read

_OLDER = ("ipython", "ipykernel", "jupyter-client", "traitlets")


def make_overlay(folder: Path, python: str | Path = sys.executable) -> Path:
    """Makes an environment that inherits another's packages, its own first on the path; returns its interpreter."""
    venv.create(folder, symlinks=True)
    (own,) = folder.glob("lib/python*/site-packages")
    code = "import sys; print(*[path for path in sys.path if path.endswith('site-packages')], sep='\\n')"
    (own / "beneath.pth").write_text(run_python(code, executable=python).stdout)
    return folder / "bin" / "python"


@pytest.fixture(scope="session", params=["here", pytest.param("colab-tpu", marks=pytest.mark.slow)])
def kernel_python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter whose kernel runs the cells: this process's, or a copy with the image's IPython and ipykernel."""
    if request.param == "here":
        return Path(sys.executable)
    python = make_overlay(tmp_path_factory.mktemp("overlay"))
    versions = read(request.param)[1]
    wanted = [f"{name}=={versions[name]}" for name in _OLDER]
    install = ["-m", "pip", "install", "--quiet", "-c", str(FOLDER / f"{request.param}.txt"), *wanted]
    run_python(install, executable=python, timeout=900)
    return python


def write_kernel(folder: Path, python: Path) -> Path:
    """Writes the kernel spec "python3" for an interpreter; returns the folder for JUPYTER_PATH."""
    about = folder / "jupyter" / "kernels" / "python3" / "kernel.json"
    about.parent.mkdir(parents=True, exist_ok=True)
    command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    about.write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    return folder / "jupyter"


def set_environment(patch: pytest.MonkeyPatch, folder: Path, python: Path) -> None:
    """Sets the environment that kernels inherit: the package is importable, and the machine's settings are gone."""
    clean = child_environment({"PYTHONPATH": PYTHONPATH, "JUPYTER_PATH": str(write_kernel(folder, python))})
    for name in set(os.environ) - set(clean):
        patch.delenv(name)
    for name, value in clean.items():
        patch.setenv(name, value)


@pytest.fixture
def kernel_env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel_python: Path) -> None:
    """The environment in which a test starts kernels of its own."""
    set_environment(monkeypatch, tmp_path, kernel_python)


@contextlib.contextmanager
def started(folder: Path) -> Iterator[tuple[KernelManager, Any]]:
    """Starts a kernel in a folder; yields its manager and client."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(folder))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.fixture(scope="session")
def _kernel(kernel_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("kernel")
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch, folder, kernel_python)
        running = started(folder)
        _, client = running.__enter__()
    yield client
    running.__exit__(None, None, None)


@pytest.fixture
def kernel(_kernel: Any) -> Any:
    """The client of a kernel shared by tests, with the cells and names of earlier tests removed."""
    assert not run_cell(_kernel, "In[:] = [''] * len(In)")[1]
    assert not run_cell(_kernel, "%reset -f")[1]
    return _kernel


def run_cell(client: Any, source: str, timeout: float = 60) -> tuple[str, str]:
    """Runs a cell as a frontend does; returns its printed text and its error."""
    text: list[str] = []

    def collect(message: dict[str, Any]) -> None:
        text.append(message["content"].get("text", ""))

    reply = client.execute_interactive(source, timeout=timeout, output_hook=collect)["content"]
    return "".join(text), reply.get("evalue", "")
