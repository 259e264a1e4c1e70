"""Cases that need a real kernel: an interrupted run, and a package replaced under the kernel."""

from __future__ import annotations

import re
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.child_processes import REPOSITORY, run_python
from tests.support.kernels import make_overlay, run_cell, started, write_kernel
from tpu_kit.machine.checks import Machine
from tpu_kit.training.checkpoint.manager import list_checkpoints
from tpu_kit.training.metrics import read_metrics

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
SMALL = {"base_dtype": "fp32", "max_length": 128, "batch_size": 2, "logging_steps": 1, "save_steps": 1000,
         "eval_rows": 2, "generate_rows": 0, "warmup_steps": 0, "output_dir": "run"}  # fmt: skip
RUN = """\
from tpu_kit.notebook import cells as notebook; from tpu_kit.recipes import sft
from tpu_kit.config.loader import load_config
config = load_config("embedded-cot", {values})
with notebook.live(config.output_path, every=0.2):
    result = sft.train(config)
print(result)
"""


def descendants(parent: int) -> dict[int, str]:
    """The processes that descend from one, with their command lines."""
    parents, found = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    family = {parent}
    while more := {one for one, of in parents.items() if of in family} - family:
        family |= more
    for one in family - {parent}:
        try:
            found[one] = Path(f"/proc/{one}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "where",
    [pytest.param({"device_type": "cpu"}, id="cpu"),
     pytest.param({"device_type": "xla-cpu", "num_replicas": 2}, id="xla-cpu", marks=[needs_xla, pytest.mark.slow])],
)  # fmt: skip
@pytest.mark.usefixtures("kernel_env")
def test_an_interrupted_cell_saves_ends_its_processes_and_goes_on(where: dict[str, Any], tmp_path: Path) -> None:
    folder, values = tmp_path / "run", {**SMALL, **where, "max_steps": 5000}
    printed: list[str] = []
    interrupted = False

    def interrupt_when_it_trains(message: dict[str, Any]) -> None:
        nonlocal interrupted
        content = message["content"]
        printed.append(content.get("text", ""))
        if not interrupted and "of 5000 updates" in content.get("data", {}).get("text/plain", ""):
            interrupted = True
            manager.interrupt_kernel()

    with started(tmp_path) as (manager, kernel):
        pid = int(run_cell(kernel, "import os; print(os.getpid())")[0])
        before = descendants(pid)
        reply = kernel.execute_interactive(
            RUN.format(values=values), timeout=240, output_hook=interrupt_when_it_trains
        )["content"]  # fmt: skip
        text = "".join(printed)
        assert reply["status"] == "ok" and interrupted, (reply, text)
        found = re.search(r"stopped at step (\d+) of 5000 \(SIGINT received\)", text)
        assert found and "run this again: the same cell" in text, text
        step = int(found[1])
        (saved,) = list_checkpoints(folder / "checkpoints", verify=True)[0]
        assert saved.step == read_metrics(folder)[-1]["step"] == step
        assert descendants(pid) == before

        text, error = run_cell(kernel, RUN.format(values={**values, "max_steps": step + 2}), timeout=240)
        assert not error and f"from step {step}," in text and f"finished at step {step + 2}" in text, (error, text)
        assert descendants(pid) == before


def write_transformers(folder: Path, version: str) -> str:
    """A wheel with that name that contains only its version."""
    path, about = folder / f"transformers-{version}-py3-none-any.whl", f"transformers-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("transformers.py", f"__version__ = {version!r}")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return str(path)


ENSURE = "from tpu_kit.notebook import install\ninstall.ensure({!r})"


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_env")
def test_a_package_that_is_replaced_under_a_kernel_asks_for_a_new_one(
    tmp_path: Path, kernel_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image with an old transformers: the installing cell, the hint, a restart, the same cell."""
    python = make_overlay(tmp_path / "own", kernel_python)
    old, wheels = tmp_path / "old", tmp_path / "wheels"
    for folder in (old, wheels):
        folder.mkdir()
    run_python(["-m", "pip", "install", "--no-deps", write_transformers(old, "4.57.0")], executable=python)
    newest = re.findall(r"transformers==(\S+)", (REPOSITORY / "requirements-tpu.txt").read_text())[0]
    write_transformers(wheels, newest)
    (wheels / "tpu_kit-0.1.0-py3-none-any.whl").touch()  # a folder of wheels without a wheel of the kit is no source
    write_kernel(tmp_path, python)
    monkeypatch.setenv("PIP_NO_DEPS", "1")
    hint = f"transformers 4.57.0 is loaded, {newest} is installed: pip replaced it under this process"
    with started(tmp_path) as (_, kernel):
        assert run_cell(kernel, "import transformers; print(transformers.__version__)")[0] == "4.57.0\n"
        printed, error = run_cell(kernel, ENSURE.format(str(wheels)))
        assert error == f"Restart the kernel, then run all cells again: {hint}", (printed, error)
        assert f"Replaced: transformers 4.57.0 -> {newest}" in printed
        printed, error = run_cell(kernel, "install.restart()")
        assert not error and f"The kernel must be restarted: {hint}" in printed and "Kernel > Restart" in printed
    with started(tmp_path) as (manager, kernel):
        printed, error = run_cell(kernel, ENSURE.format(str(wheels)))
        assert not error and printed.startswith("tpu_kit is ready: "), (printed, error)
        run_cell(kernel, "import transformers; transformers.__version__ = '1.0'")
        assert not run_cell(kernel, "install.restart(True)")[1]
        deadline = time.monotonic() + 60
        while manager.is_alive():  # the process that started it starts it again, as Jupyter does
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_the_cell_that_installs_silences_tqdms_warning_of_widgets() -> None:
    code = "import warnings, tpu_kit.notebook.install; warnings.warn('IProgress not found. Please update jupyter')"
    assert "IProgress" not in run_python(["-c", code]).stderr
