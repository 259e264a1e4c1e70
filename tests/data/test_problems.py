"""The eighteen most frequent problems of PyTorch on TPU, from the table in notebooks/README.md.

Most are provoked in the tests of the module that handles them. This module has the others, and checks the table.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from packaging.requirements import Requirement

from tests.support import problem_functions
from tests.support.child_processes import PYTHONPATH, REPOSITORY, child_environment
from tpu_kit.config.loader import ConfigError, load_config
from tpu_kit.distributed.launch import LaunchError, advice, launch
from tpu_kit.machine.checks import Machine, check_packages
from tpu_kit.machine.compatibility import PAIRINGS, TESTED, is_tested
from tpu_kit.training.metrics import RecompileMonitor

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
README = (REPOSITORY / "notebooks" / "README.md").read_text()
PROBLEMS = 18


@cache
def functions_of(file: str) -> set[str]:
    (path,) = (REPOSITORY / "tests").rglob(file)
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def section(title: str) -> str:
    """The text of notebooks/README.md under a heading."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,3}} |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found, f"notebooks/README.md has no heading {title!r}"
    return found[2]


def rows_of(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_every_problem_of_the_table_has_its_test() -> None:
    rows = rows_of("Troubleshooting")
    assert [row[0] for row in rows[:PROBLEMS]] == [str(number) for number in range(1, PROBLEMS + 1)]
    for row in rows:
        named = re.findall(r"`(?:(test_\w+)\.)?(test_\w+)`", row[-1])
        assert named, f"no test is named: {row}"
        for file, test in named:
            assert test in functions_of(f"{file or 'test_problems'}.py"), f"there is no {file}.{test}"


def test_messages_of_the_table_are_those_of_the_code() -> None:
    files = [path for kind in ("*.py", "*.toml") for path in sorted((REPOSITORY / "tpu_kit").rglob(kind))]
    code = "".join(path.read_text() for path in files)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # literals that go on in the next line
    for row in rows_of("Troubleshooting"):
        for quoted in re.findall(r"\"([^\"]+)\"", row[1]):
            for part in re.split(r"\s*\.\.\.\s*", quoted):
                assert part.replace("`", "") in code.replace("`", ""), f"nothing in tpu_kit says {part!r}"


# ----------------------------------------------------------------------------------------------- problems provoked here


@needs_xla
def test_mistakes_on_the_device_are_met_with_advice(tmp_path: Path, quick_xla: None) -> None:
    config = load_config(None, [f"output_dir={tmp_path}/out", "device_type=xla-cpu", "num_replicas=1"])
    found: dict[str, Any] = launch(problem_functions.provoke, config)
    assert "module 'torch' has no attribute 'xla'" in found["checkpointing"]
    assert "call torch_xla.utils.checkpoint.checkpoint" in advice(found["checkpointing"])
    assert "fused=True" in found["fused"]
    assert "XLA has no fused optimizer" in advice(found["fused"])
    assert "move it to the CPU first" in advice(found["saving"])
    assert len(found["slow"]) == 2 and not found["quick"]
    assert "4 programs were compiled in the last 2 steps" in found["slow"][0]
    assert "the host reads or computes 1 values of each step" in found["slow"][1]
    assert found["resumed"] == found["fresh"] > 0  # after a resume, the device holds no tensor twice


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "ImportError: libtorch.so: undefined symbol: _ZN5torch4lazy",
            "do not match: `python -m tpu_kit doctor` names both",
        ),
        ("RuntimeError: Runtime is already initialized. Do not use the XLA device before", "restart the kernel"),
        ("RuntimeError: Cannot replicate if number of devices (1) is different from 8", "restart the kernel"),
        ("ABORTED: The TPU is already in use by process with pid 321", "names its PID"),
        ("open(/dev/accel0): Operation not permitted", "names its PID"),
        ("Failed to get TPU metadata (tpu-env) from instance metadata", "asks Google Cloud's metadata server"),
        (
            "HTTPConnectionPool(host='metadata.google.internal', port=80): Max retries",
            "without a TPU use device_type=xla-cpu",
        ),
        ("ValueError: the number of rows is odd", ""),
    ],
)
def test_advice_by_the_text_of_an_error(text: str, expected: str) -> None:
    assert expected in advice(text) and bool(advice(text)) == bool(expected)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("load_in_4bit=true", "bitsandbytes runs only on CUDA; use model.base_dtype=int4 or int8"),
        ("bnb_4bit_quant_type=nf4", "bitsandbytes runs only on CUDA; use model.base_dtype=int4 or int8"),
        ("base_dtype=nf4", "bitsandbytes runs only on CUDA; use model.base_dtype=int4 or int8"),
        ("base_dtype=float16", "a TPU has no float16; use model.base_dtype=bf16"),
        ("attn_implementation=flash_attention_2", "model.attention=auto uses splash on a TPU and sdpa elsewhere"),
        ("model.attention=flash_attention_2", "model.attention=auto uses splash on a TPU and sdpa elsewhere"),
        ("optim=paged_adamw_8bit", "use optim.optimizer=adamw, or with lora.r=0 adafactor"),
        ("optimizer=paged_adamw_32bit", "use optim.optimizer=adamw, or with lora.r=0 adafactor"),
        ("optim=adamw_torch_fused", "XLA has no fused AdamW; optim.optimizer=adamw is compiled into the step"),
        ("optimizer=adamw_torch_fused", "XLA has no fused AdamW; optim.optimizer=adamw is compiled into the step"),
        ("use_liger_kernel=true", "Liger's kernels run only on CUDA"),
        ("fsdp=full_shard", "it runs only on CUDA"),
    ],
)
def test_tools_of_cuda_alone_are_refused_with_what_works(given: str, told: str) -> None:
    name = given.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        load_config(None, given)
    assert told in str(caught.value) and name.rpartition(".")[2] in str(caught.value)
    if "." not in name:
        with pytest.raises(ConfigError) as caught:
            load_config(parameters=dict([given.split("=")]))  # from a notebook
        assert told in str(caught.value)


def test_an_upgrade_of_the_hugging_face_stack_is_told() -> None:
    pins = [Requirement(line.split("#")[0]) for line in requirement_lines() if line.split("#")[0].strip()]
    pinned = {one.name: next(iter(one.specifier)).version for one in pins if one.name in TESTED}
    assert set(pinned) == set(TESTED) and all(is_tested(name, version) for name, version in pinned.items())
    have = {**PAIRINGS[0].versions((3, 11)), **pinned}
    assert check_packages(Machine(version=have.get), False).status == "ok"
    moved = check_packages(Machine(version={**have, "transformers": "5.31.0"}.get), False)
    assert moved.status == "warning"
    assert "transformers 5.31.0, tested with 5.15 to 5.24: its releases have broken TPU before" in moved.found
    assert moved.fix.startswith('pip install "transformers==5.24.*", then restart the kernel')


def requirement_lines() -> list[str]:
    return (REPOSITORY / "requirements-tpu.txt").read_text().splitlines()


def test_slowness_is_told_once_and_a_first_evaluation_is_none() -> None:
    watch = RecompileMonitor()
    told = []
    for step, compiles in enumerate((3, 4, 5, 5, 6, 7, 8, 9, 10)):
        told.append(len(list(watch.notice({"compiles": compiles - (step != 3)}, {"compiles": compiles}, 10))))
    assert told == [0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert not list(watch.notice({}, {}, 10))  # off XLA nothing is counted


@pytest.mark.slow
@needs_xla
def test_what_makes_training_slow_is_told_while_it_trains(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = load_config("embedded-cot", [
        f"output_dir={tmp_path}/out", "device_type=xla-cpu", "num_replicas=1", "max_steps=10", "warmup_steps=1",
        "logging_steps=2", "eval_rows=0", "generate_rows=0", "eval_steps=null", "max_length=64", "batch_size=1",
    ])  # fmt: skip
    launch(problem_functions.slowed, config)
    told = capfd.readouterr().err
    assert told.count("programs were compiled in the last 2 steps") == 1
    assert told.count("values of each step (.item(), print, a condition on a tensor") == 1


@pytest.mark.slow
@needs_xla
def test_a_function_that_fails_on_xla_ends_with_advice(tmp_path: Path) -> None:
    config = load_config(None, [f"output_dir={tmp_path}/out", "device_type=xla-cpu", "num_replicas=1"])
    with pytest.raises(
        LaunchError, match=r"(?s)has no attribute 'xla'.*-> torch.utils.checkpoint does not work on XLA"
    ):
        launch(problem_functions.checkpointed, config)


# ---------------------------------------------------------------------------------- bad input, in the notebook's cells

TRAIN = REPOSITORY / "notebooks" / "4-train-cot-sft.ipynb"
SMALL = {"device_type": "cpu", "max_steps": 8, "warmup_steps": 1, "batch_size": 2, "max_length": 96, "eval_rows": 4,
         "eval_steps": 8, "save_steps": 2, "logging_steps": 2, "generate_rows": 0}  # fmt: skip


def cell_with(text: str) -> str:
    cells = [cell for cell in nbformat.read(TRAIN, as_version=4).cells if cell.cell_type == "code"]
    (found,) = [cell.source for cell in cells if text in cell.source]
    return str(found)


@pytest.mark.slow
def test_what_a_cell_says_of_bad_input(tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"a": "1 + 1", "b": "2"}\n' * 20)
    (tmp_path / "broken.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n{"question": \n')
    (tmp_path / "taken").write_text("")
    manager = KernelManager(kernel_name="python3")
    environment = child_environment({"PYTHONPATH": PYTHONPATH, "PJRT_DEVICE": None, "OMP_NUM_THREADS": "1"})
    manager.start_kernel(cwd=str(tmp_path), env=environment)
    client = manager.client()
    client.start_channels()

    def run(cell: str) -> str:
        reply = client.execute_interactive(cell, timeout=300, output_hook=lambda message: None)["content"]
        return str(reply.get("evalue", ""))

    def error(last: str, **parameters: Any) -> str:
        """Returns the cell's output, after all cells before it ran with these parameters."""
        lines = [f"{name} = {value!r}" for name, value in {**SMALL, **parameters}.items()]
        assert not run("\n".join([cell_with("# Parameters"), *lines]))
        for cell in ("from tpu_kit import", "cells.config(", "show_data("):
            if (said := run(cell_with(cell))) or cell == last:
                return said
        return run(cell_with(last))

    try:
        client.wait_for_ready(timeout=60)
        assert "there is no such file" in error("show_data(", source="nowhere.jsonl", format="auto")
        assert "they fit no format; the data has a, b" in error("show_data(", source="odd.jsonl", format="auto")
        assert "broken.jsonl" in error("show_data(", source="broken.jsonl", format="auto")
        assert "did you mean optim.batch_size?" in error("cells.config(", bach_size=2)
        assert "'many' is not a whole number" in error("cells.config(", max_steps="many")
        said = error("cells.live", output_dir="taken/run")
        assert said.startswith(
            "output_dir=taken/run cannot be written to (Not a directory): set output_dir to a folder"
        )
        assert not error("cells.live")  # and the same kernel trains after the mistakes are corrected
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.slow
def test_a_full_disk_is_told_in_the_cell(tmp_path: Path) -> None:
    runs, unshare = tmp_path / "runs", shutil.which("unshare")
    runs.mkdir()
    if unshare is None or subprocess.run([unshare, "-rm", "mount", "-t", "tmpfs", "none", runs]).returncode:
        pytest.skip("needs mount namespaces")
    given = " ".join(f"-p {name} {value}" for name, value in SMALL.items())
    # One checkpoint of 2.5 MB fits, a second does not.
    script = f"""
        mount -t tmpfs -o size=4m none runs
        {sys.executable} -m papermill {TRAIN} out.ipynb --no-progress-bar {given}; echo status $?
        {sys.executable} -m tpu_kit checkpoints runs/notebook-4 --verify
        mount -o remount,size=40m runs
        {sys.executable} -m papermill {TRAIN} again.ipynb --no-progress-bar {given}; echo status $?
    """
    environment = child_environment({"PYTHONPATH": PYTHONPATH, "PJRT_DEVICE": None, "OMP_NUM_THREADS": "1"})
    done = subprocess.run(
        [unshare, "-rm", "sh", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert re.findall(r"status (\d)", done.stdout) == ["1", "0"], done.stdout + done.stderr
    cells = [cell for cell in nbformat.read(tmp_path / "out.ipynb", as_version=4).cells if cell.cell_type == "code"]
    (said,) = [out.evalue for cell in cells for out in cell.outputs if out.output_type == "error"]
    assert "No space left on device: the checkpoint of step 4 could not be written" in said
    assert "set output_dir to another disk" in said and said.endswith("The checkpoint of step 2 stays good")
    assert "damaged" not in done.stdout
    shown = str(nbformat.read(tmp_path / "again.ipynb", as_version=4))
    assert "from step 2," in shown  # nothing else is lost
