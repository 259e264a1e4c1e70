"""The surroundings of every test: no network, no display, and a process that never initialises torch_xla."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import loaded_launch
from tests.support.child_processes import QUICK_XLA_FLAGS, REPOSITORY, run_python
from tests.support.kernels import _kernel, kernel, kernel_env, kernel_python  # noqa: F401  fixtures
from tests.support.object_store import bucket, object_store  # noqa: F401  fixtures

# Before any test module imports the libraries that read them.
os.environ |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline"}
os.environ["USE_TORCH_XLA"] = "0"  # accelerate, imported before the kit, would import torch_xla, which sets PJRT_DEVICE
os.environ["GCE_METADATA_HOST"] = "127.0.0.1:9"  # no metadata server: tests ask no cloud about a preemption
# Here and in children. Models this small gain nothing from a second thread, which still takes processor time. Bytecode
# that one process writes saves compilation in the next process.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# torch 2.8 with triton (Kaggle has none) otherwise starts a process for every import of torch_xla.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
gc.set_threshold(50_000)  # as in child processes: tests/support/startup


@pytest.fixture(autouse=True)
def xla_stays_out_of_this_process(request: pytest.FixtureRequest) -> Iterator[None]:
    # After a runtime is initialised, every later launch in this process fails: stop at the test that did it.
    before = os.environ.get("PJRT_DEVICE")
    yield
    # torch_xla sets it when it is imported, and device_type=auto is then another device for every later test.
    assert os.environ.get("PJRT_DEVICE") == before, "import torch_xla in a child process, with run_python"
    torch_xla = sys.modules.get("torch_xla")
    if torch_xla is not None and torch_xla._XLAC._xla_runtime_is_initialized():
        pytest.exit(f"{request.node.nodeid} initialised torch_xla in the tests' own process: use run_python", 1)


@pytest.fixture(autouse=True)
def the_compiler_answers_only_who_asks() -> Iterator[None]:
    """Runs on a TPU that a test describes do not ask the compiler, which takes a minute."""
    with pytest.MonkeyPatch.context() as patch:  # the fixture `monkeypatch` would end after the check above
        patch.setattr("tpu_kit.planning.preflight.ASKED_SECONDS", 0.0)
        yield


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kit as a wheel, built offline."""
    # Built from a copy, because setuptools leaves its build folders beside the source.
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    shutil.copytree(REPOSITORY / "tpu_kit", source / "tpu_kit", ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(built)]
    run_python(["-m", "pip", "wheel", *options, str(source)])
    (path,) = built.glob("tpu_kit-*.whl")
    return path


@pytest.fixture
def quick_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas start as forks of a process with the libraries loaded; only the launch selects their device."""
    loaded_launch.use(monkeypatch)
    monkeypatch.setenv("XLA_FLAGS", QUICK_XLA_FLAGS)
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES"):
        monkeypatch.delenv(name, raising=False)
