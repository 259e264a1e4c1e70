"""Checks README.md and the rooms' READMEs: a test runs each command; named settings, modules, files and links exist.

Commands that need a TPU, install something or take minutes are marked as such.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.child_processes import REPOSITORY
from tpu_kit.cli import COMMANDS
from tpu_kit.config.fields import knobs_of
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.config.schema import parameters
from tpu_kit.exporting.options import ExportOptions
from tpu_kit.generation.requests import Prompts
from tpu_kit.generation.sampling import Sampling
from tpu_kit.recipes.result import TrainResult

MAIN = REPOSITORY / "README.md"
ROOMS = [
    *(REPOSITORY / folder / "README.md" for folder in ("notebooks", "tests")),
    *sorted((REPOSITORY / "tpu_kit").rglob("README.md")),
]
TEXTS = {path: path.read_text() for path in (MAIN, *ROOMS)}

# The beginning of a command -> the test that runs it, or "network" if it installs or fetches. Commands for a TPU are
# the same commands, under headings that say so.
RUN_BY = {
    "make train": "test_notebooks.test_all_run_in_order_and_leave_html",  # its notebook, by the same command
    "make distill": "test_notebooks.test_a_student_learns_from_a_teacher",  # its notebook, by the same command
    "make images": "test_notebooks.test_questions_about_pictures_are_answered",  # its notebook, by the same command
    "make dpo": "test_notebooks.test_a_model_learns_from_preferences",  # its notebook, by the same command
    "python -m tpu_kit dpo": "test_dpo.test_the_command_shows_the_pairs_before_the_launch",
    "make grpo": "test_notebooks.test_a_model_learns_from_rewards",  # its notebook, by the same command
    "make train-real": "network",
    "make notebooks": "test_notebooks.test_all_run_in_order_and_leave_html",
    "make test": "test_packaging.test_continuous_integration_runs_the_one_command",
    "make test-image": "network",
    "make test-newest": "network",
    "make test-torch-tpu": "network",
    "make test-slow": "network",
    "make test-vllm": "network",
    "python3 -m venv": "network",
    "~/vllm/bin/pip install": "network",
    "python -m vllm": "test_vllm.test_what_is_served_over_http_solves_what_the_model_solves",
    "make release": "network",
    "make install": "network",
    "git clone": "network",
    "git lfs": "network",
    "hf auth login": "network",
    "export": "test_several_hosts.test_two_hosts_stop_together_and_one_goes_on_alike",
    "%pip install": "network",
    "pip install": "network",
    "python -m papermill": "test_template.test_the_five_lines_of_the_readme_train_on_rows_of_ones_own",
    "python -m tpu_kit profile": "test_profile.test_the_command_prints_the_report",
    "python -m pytest": "by hand",  # like this test
    "python -m tests.benchmarks": "by hand",  # benchmarks take minutes; their figures are in the text
    "python -m tests.benchmarks.step": "test_benchmarks.test_the_step_benchmark_runs_and_its_exact_goals_are_met",
    "python -m tpu_kit checkpoints": "test_manager.test_list",
    "python -m tpu_kit distill": "test_distill.test_the_command",
    "python -m tpu_kit doctor": "test_doctor.test_plain_cpu_prints_rows",
    "python -m tpu_kit evaluate": "test_evaluate.test_the_command",
    "python -m tpu_kit export": "test_export.test_the_command",
    "python -m tpu_kit generate": "test_answers.test_the_command_answers",
    "python -m tpu_kit grpo": "test_grpo.test_the_command",
    "python -m tpu_kit notebooks": "test_notebooks.test_all_run_in_order_and_leave_html",
    "python -m tpu_kit notebooks --copy": "test_notebook_copies.test_missing_notebooks_are_written",
    "python -m tpu_kit plan": "test_planner.test_the_report",
    "python -m tpu_kit pod": "test_pods.test_the_page_shows_what_the_commands_print",
    "python -m tpu_kit search": "test_search.test_the_command",
    "python -m tpu_kit verify": "test_verify.test_what_fails_is_told_and_stops_nothing",
    "python -m tpu_kit train": "test_end_to_end.test_the_shipped_configuration_trains",
}


def blocks(text: str, kind: str = r"\w*") -> list[str]:
    """Returns the fenced blocks of a language, or all of them."""
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """Returns the text without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def block_with(word: str) -> str:
    """Returns the only yaml block of all texts that contains `word`."""
    (found,) = [block for text in TEXTS.values() for block in blocks(text, "yaml") if word in block]
    return found


def commands(text: str) -> set[str]:
    """Returns the commands in shell blocks, transcripts and running text."""
    lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
    lines += [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    lines += re.findall(r"`((?:make|git|%?pip|python -m) [^`]+)`", prose(text))
    parts = [" ".join(part.split()) for line in lines for part in re.sub(r"\s# .*", "", line).split("&&")]
    return {part.replace(".venv/bin/", "") for part in parts if part and not part.startswith("cd ")}


ALL_COMMANDS = sorted({command for text in TEXTS.values() for command in commands(text)})


def anchors(text: str) -> list[str]:
    """Returns the anchors that GitHub gives the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def broken_links(texts: dict[Path, str]) -> list[str]:
    """Returns the relative links to a missing file, or to a missing heading in `texts`."""
    broken = []
    for path, text in texts.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
            if re.match(r"\w+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.exists() or (anchor and anchor not in anchors(texts.get(target, ""))):
                broken.append(f"{path.relative_to(REPOSITORY)}: {link}")
    return broken


def test_there_are_commands() -> None:
    assert len(commands(TEXTS[MAIN])) > 15
    assert {" ".join(one.split()[:4]) for one in commands(TEXTS[MAIN])} >= {"make train", "python -m tpu_kit train"}
    assert all(commands(TEXTS[path]) for path in ROOMS)


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_a_command_is_run_by_a_test_or_needs_what_is_not_here(command: str) -> None:
    starts = [start for start in RUN_BY if re.match(rf"{re.escape(start)}[ .]", f"{command} ")]
    assert starts, f"add to RUN_BY which test runs `{command}`"
    by = RUN_BY[max(starts, key=len)]
    if command.startswith("python -m tests."):
        assert (REPOSITORY / f"{command.split()[2].replace('.', '/')}.py").is_file()
    if by not in ("network", "by hand"):
        file, name = by.split(".")
        (path,) = (REPOSITORY / "tests").rglob(f"{file}.py")
        tree = ast.parse(path.read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, by


def promises() -> list[tuple[str, str]]:
    """Returns module and name of every test in the table of promises."""
    rows = re.findall(r"^\| .+ \| (\S+: .+) \|$", TEXTS[REPOSITORY / "tests" / "README.md"], re.MULTILINE)
    parts = [part.split(": ") for row in rows for part in row.split("; ")]
    return [(module, name) for module, names in parts for name in names.split(", ")]


def test_each_promise_has_its_test() -> None:
    assert len(promises()) > 80
    for module, name in promises():
        folder, _, file = f"/{module}".rpartition("/")
        source = (REPOSITORY / "tests" / folder.strip("/") / f"test_{file}.py").read_text()
        assert f"\ndef test_{name}(" in source, f"{module}: {name}"


@pytest.mark.parametrize("target", sorted({one.split()[1] for one in ALL_COMMANDS if one.startswith("make ")}))
def test_a_target_of_make_exists(target: str) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [one for one in ALL_COMMANDS if one.startswith("python -m tpu_kit ")])
def test_what_a_command_is_given_exists(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *given = shlex.split(command)[3:]
    assert name in COMMANDS
    assert all((REPOSITORY / one).is_file() for one in given if one.endswith(".ipynb"))
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(block_with("everything is written to"))
    for one in given:
        key, equals, _ = one.partition("=")
        if one.endswith("my.yaml"):
            assert load_config(one).run_name == "my-run"
        elif equals and name in ("train", "plan", "doctor", "notebooks"):
            load_config("my.yaml", [each for each in given if "=" in each])  # single settings may need others
        elif one != "--help" and (equals or one.startswith("--")):
            text = COMMANDS[name].format_help()
            assert re.search(rf"(^|[\s\[]){re.escape(key)}\b", text), f"{name} does not explain {key}"


def test_the_loop_over_train_makes_four_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [block for block in blocks(TEXTS[REPOSITORY / "notebooks" / "README.md"], "python") if "product" in block]
    configs: list[TrainConfig] = []
    ended = TrainResult("finished", "", 80, 80, {"eval_loss": 1.0}, "", None, "")
    monkeypatch.setattr("tpu_kit.train", lambda config: configs.append(config) or ended)
    exec(code, {})
    assert [(one.optim.learning_rate, one.lora.r) for one in configs] == [(1e-3, 4), (1e-3, 16), (5e-3, 4), (5e-3, 16)]
    assert len({one.run_name for one in configs}) == 4


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_settings_and_modules_named_in_the_text_exist(path: Path) -> None:
    known = {one.partition("=")[0].strip() for one in re.findall(r"`(\w+ ?= ?[^`]*)`", prose(TEXTS[path]))}
    known -= {
        "data",
        "fsdp",
        "context",
        "model",
        "dtype",
        "key",
        "score",
        "prompt",
        "adapter",
        "format",
        "fused",
        "config_file",
        "nprocs",
        "kit_source",
    }
    leaves = {one.leaf for one in parameters().values()} | {
        *knobs_of(Sampling),
        *knobs_of(Prompts),
        *knobs_of(ExportOptions),
    }
    strange = {name for name in known if name not in leaves and not name.isupper()}
    assert not strange, strange
    for name in re.findall(r"`(tpu_kit(?:\.\w+)+)`", TEXTS[path]):
        place = REPOSITORY / name.replace(".", "/")
        assert place.is_dir() or place.with_suffix(".py").is_file(), name


def test_a_broken_link_is_found() -> None:
    text = "# A `b`, c-d (e)\n[1](README.md) [2](#a-b-c-d-e) [3](#nothing) [4](none.md) [5](https://none#x)\n"
    assert broken_links({MAIN: text}) == ["README.md: #nothing", "README.md: none.md"]


def test_links_lead_to_files_and_headings() -> None:
    assert not broken_links(TEXTS)
    for path, text in TEXTS.items():
        assert len(anchors(text)) == len(set(anchors(text))), f"two headings of {path} are the same"
    picture = REPOSITORY / ".github" / "training.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and os.path.getsize(picture) < 150_000


def test_the_readme_is_short_and_leads_to_each_room() -> None:
    assert 150 <= len(TEXTS[MAIN].splitlines()) <= 229  # its first screen needs this many
    for path in ROOMS:
        assert f"]({path.relative_to(REPOSITORY).as_posix()}" in TEXTS[MAIN], path


def test_the_number_of_symptoms_is_that_of_the_table() -> None:
    text = (REPOSITORY / "notebooks/README.md").read_text() + "\n\n"
    (table,) = re.findall(r"^\| \| what you see .*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert f"[{len(table.strip().splitlines()) - 2} symptoms]" in TEXTS[MAIN]


def test_the_reward_function_of_the_readme_returns_a_number_per_completion() -> None:
    text = (REPOSITORY / "tpu_kit/training/README.md").read_text()
    (example,) = re.findall(r"  def short\(.*?(?=\n  ```)", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(textwrap.dedent(example), names)
    assert names["short"]([[{"content": "12345"}], [{"content": ""}]]) == [-0.005, 0]


def test_the_tree_has_a_line_for_each_room_and_no_other() -> None:
    (tree,) = [block for block in blocks(TEXTS[MAIN]) if block.startswith("notebooks/ ")]
    folders = {path.name for path in (REPOSITORY / "tpu_kit").iterdir() if path.is_dir()} - {"__pycache__"}
    named = re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)
    assert sorted(named) == sorted(folders)
    for name in re.findall(r"^[\w.-]+", tree, re.MULTILINE):
        assert (REPOSITORY / name).exists(), name
