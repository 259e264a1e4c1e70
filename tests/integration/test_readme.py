"""Every command in README.md is run by a test, or needs a TPU or the network; and the settings it names exist."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.child_processes import REPOSITORY
from tpu_kit.cli import COMMANDS
from tpu_kit.config.loader import load_config
from tpu_kit.config.schema import parameters
from tpu_kit.notebook.sweep import read_sweep

README = (REPOSITORY / "README.md").read_text()

# How a command begins -> the test that runs it, or "network" where it installs or fetches. Those that need a TPU are
# the same commands, under headings that say so.
RUN_BY = {
    "make train": "test_notebooks.test_all_run_in_order_and_leave_html",  # its notebook, by the same command
    "make train-real": "network",
    "make notebooks": "test_notebooks.test_all_run_in_order_and_leave_html",
    "make test": "test_packaging.test_continuous_integration_runs_the_one_command",
    "make test-slow": "network",
    "make install": "network",
    "git clone": "network",
    "%pip install": "network",
    "pip install": "network",
    "python -m tests.benchmarks": "by hand",  # a benchmark of minutes, whose figures stand beside it
    "python -m tests.benchmarks.step": "test_benchmarks.test_the_step_benchmark_runs_and_its_exact_goals_are_met",
    "python -m tpu_kit checkpoints": "test_manager.test_list",
    "python -m tpu_kit doctor": "test_doctor.test_plain_cpu_prints_rows",
    "python -m tpu_kit evaluate": "test_evaluate.test_the_command",
    "python -m tpu_kit export": "test_export.test_the_command",
    "python -m tpu_kit generate": "test_service.test_the_command_answers",
    "python -m tpu_kit notebooks": "test_notebooks.test_all_run_in_order_and_leave_html",
    "python -m tpu_kit plan": "test_planner.test_the_report",
    "python -m tpu_kit search": "test_tree_search.test_the_command",
    "python -m tpu_kit sweep": "test_sweep.test_what_was_under_way_goes_on",
    "python -m tpu_kit verify": "test_verify.test_what_fails_is_told_and_stops_nothing",
    "python -m tpu_kit train": "test_end_to_end.test_the_shipped_configuration_trains_on_two_replicas",
}


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Each command of a shell block, of a transcript, and of running text."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    lines += [line[2:] for line in README.splitlines() if line.startswith("$ ")]
    lines += re.findall(r"`((?:make|git|%?pip|python -m) [^`]+)`", README)
    parts = [" ".join(part.split()) for line in lines for part in re.sub(r"\s# .*", "", line).split("&&")]
    return [part.replace(".venv/bin/", "") for part in parts if part and not part.startswith("cd ")]


def test_there_are_commands() -> None:
    assert len(commands()) > 15
    assert {" ".join(one.split()[:4]) for one in commands()} >= {"make train", "python -m tpu_kit sweep"}


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_a_command_is_run_by_a_test_or_needs_what_is_not_here(command: str) -> None:
    starts = [start for start in RUN_BY if re.match(rf"{re.escape(start)}[ .]", f"{command} ")]
    assert starts, f"add to RUN_BY which test runs `{command}`"
    by = RUN_BY[max(starts, key=len)]
    if by == "by hand":
        assert (REPOSITORY / f"{command.split()[2].replace('.', '/')}.py").is_file()
    elif by != "network":
        file, name = by.split(".")
        (path,) = (REPOSITORY / "tests").rglob(f"{file}.py")
        tree = ast.parse(path.read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, by


@pytest.mark.parametrize("target", sorted({one.split()[1] for one in commands() if one.startswith("make ")}))
def test_a_target_of_make_exists(target: str) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", sorted({one for one in commands() if one.startswith("python -m tpu_kit ")}))
def test_what_a_command_is_given_exists(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *given = shlex.split(command)[3:]
    assert name in COMMANDS
    monkeypatch.chdir(tmp_path)
    shortest = next(block for block in blocks("yaml") if "run_name" in block)
    Path("my.yaml").write_text(shortest)
    for one in given:
        key, equals, _ = one.partition("=")
        if one.endswith("my.yaml"):
            assert load_config(one).run_name == "my-run"
        elif equals and name in ("train", "plan", "doctor", "notebooks"):
            load_config("my.yaml", one)
        elif one != "--help" and (equals or one.startswith("--")):
            text = COMMANDS[name].format_help()
            assert re.search(rf"(^|[\s\[]){re.escape(key)}\b", text), f"{name} does not explain {key}"


def test_the_sweep_of_the_readme_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweep.yaml").write_text(next(block for block in blocks("yaml") if "grid:" in block))
    plan = read_sweep(REPOSITORY / "notebooks" / "4-train-cot-sft.ipynb", Path("sweep.yaml"))
    assert len(plan.trials) == 4


def test_settings_named_in_the_text_exist() -> None:
    known = {one.partition("=")[0].strip() for one in re.findall(r"`(\w+ ?= ?[^`]*)`", README)}
    known -= {"dtype", "key", "score", "prompt", "adapter", "format", "fused", "config_file", "nprocs"}
    leaves = {one.leaf for one in parameters().values()}
    strange = {name for name in known if name not in leaves and not name.isupper()}
    assert not strange, strange


def test_files_it_links_to_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (REPOSITORY / target).exists(), target
    picture = REPOSITORY / ".github" / "training.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and os.path.getsize(picture) < 150_000
