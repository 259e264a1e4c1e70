"""The registry finds all extras, and an installation without an extra lacks only that extra."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path

import pytest

import tpu_kit
from tests.support.child_processes import REPOSITORY, run_python
from tpu_kit.config import registry
from tpu_kit.config.commands import Command

EXTRAS = sorted(path.parent.name for path in (REPOSITORY / "tpu_kit" / "extras").glob("*/__init__.py"))
KINDS = {"command": registry.COMMANDS, "objective": registry.OBJECTIVES, "name": registry.NAMES}
PLACES = [(kind, name, place) for kind, places in KINDS.items() for name, place in places.items()]

# A user's calls of each extra; {asked} are the commands, objectives and public names of one extra.
LOOK = """
import contextlib, io, json
import tpu_kit
from tpu_kit.cli import main

def told(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()

asked = {asked}
found = dict(overview=told("--help")[1], train=told("train", "--help"), public=tpu_kit.__all__)
found["command"] = {{name: told(name, "embedded-cot") for name in asked["command"]}}
found["objective"] = {{name: told("doctor", f"objective={{name}}") for name in asked["objective"]}}
found["name"] = {{name: hasattr(tpu_kit, name) for name in asked["name"]}}
print(json.dumps(found))
"""
TRAIN = """
from tpu_kit import load_config, train

settings = ["device_type=cpu", "num_replicas=1", "max_steps=2", "warmup_steps=0", "generate_rows=2", "eval_rows=2"]
result = train(load_config("embedded-cot", [*settings, "generate_tokens=4", "split=train[:64]"]))
assert (result.status, result.step) == ("finished", 2), result
"""


def offered(extra: str) -> dict[str, list[str]]:
    """The commands, objectives and public names of an extra."""
    folder = f"tpu_kit.extras.{extra}."
    return {kind: [name for name, place in of.items() if place.startswith(folder)] for kind, of in KINDS.items()}


@pytest.mark.parametrize(("kind", "name", "place"), PLACES, ids=[f"{kind}-{name}" for kind, name, _ in PLACES])
def test_what_the_registry_names_is_there(kind: str, name: str, place: str) -> None:
    module, _, attribute = place.partition(":")
    target = getattr(importlib.import_module(module), attribute)
    if kind == "command":
        assert isinstance(target, Command) and target.run.__name__ == name and target.summary.endswith(".")
    elif kind == "objective":
        assert isinstance(target, type)
    else:
        assert getattr(tpu_kit, name) is target


def test_the_registry_names_every_command() -> None:
    for path in (REPOSITORY / "tpu_kit").rglob("command*.py"):
        module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        commands = [name for name, value in vars(importlib.import_module(module)).items() if isinstance(value, Command)]
        assert {f"{module}:{name}" for name in commands} <= set(registry.COMMANDS.values())


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_installation_without_an_extra(extra: str) -> None:
    asked = offered(extra)
    environment = {"TESTS_HIDE": f"tpu_kit.extras.{extra}"}
    found = json.loads(run_python(LOOK.format(asked=asked), env=environment).stdout)
    absent = f"not in this installation, which lacks tpu_kit.extras.{extra}; install the whole package to have it"
    listed = re.findall(r"^    ([a-z]+)\b", found["overview"], re.MULTILINE)
    assert listed == [name for name in registry.COMMANDS if name not in asked["command"]]
    for name in asked["command"]:
        assert found["command"][name] == [2, "", f"{name}: {absent}\n"]
    for name in asked["objective"]:
        assert found["objective"][name][0] == 2
        assert found["objective"][name][2].endswith(f"\n  - optim.objective: '{name}' is {absent}\n")
        assert f"{name}," not in found["train"][1]
    assert found["train"][0] == 0 and "optim.objective" in found["train"][1]
    assert not any(found["name"].values())
    assert {*found["public"]} == {*tpu_kit.__all__} - {*asked["name"]}


def test_a_run_without_any_extra(tmp_path: Path) -> None:
    """Two updates and answers of both models: no room imports an extra, in this process or in a replica's."""
    hidden = " ".join(f"tpu_kit.extras.{extra}" for extra in EXTRAS)
    run_python(TRAIN, env={"TESTS_HIDE": hidden}, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_a_package_whose_folder_was_deleted(extra: str, tmp_path: Path) -> None:
    package = shutil.copytree(
        REPOSITORY / "tpu_kit", tmp_path / "tpu_kit", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.rmtree(package / "extras" / extra)
    environment = {"PYTHONPATH": str(tmp_path)}
    found = json.loads(run_python(LOOK.format(asked=offered(extra)), env=environment, cwd=tmp_path).stdout)
    assert all(found["command"][name][0] == 2 for name in offered(extra)["command"])
    run_python(TRAIN, env=environment, cwd=tmp_path)
    assert (tmp_path / "runs").is_dir()
