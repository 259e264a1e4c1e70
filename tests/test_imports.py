"""Who may import whom, and what an import may load."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tpu_kit.testing import REPOSITORY, run_python

PACKAGE = REPOSITORY / "tpu_kit"
FILES = {path.stem: path for path in sorted(PACKAGE.glob("*.py"))}

# Where the XLA stack may be imported, inside functions alone: so a machine without it can import every module, and a
# notebook's kernel never holds the TPU that the launched processes need.
XLA_STACK = ("torch_xla", "jax", "jaxlib", "libtpu")
XLA_MODULES = {
    "aot", "attention", "model", "programs", "rehearsal", "replica", "runtime", "scan", "splash", "tracing",
}  # fmt: skip

# What these modules may import of ours, at any depth. The others are free, without cycles.
MAY_IMPORT = {
    "chips": set(),
    "fields": set(),
    "contradictions": {"fields"},
    "foreign": set(),
    "parameters": {"contradictions", "fields", "foreign"},
    "plain_yaml": set(),
    "config": {"fields", "foreign", "parameters", "plain_yaml"},
    "runtime": {"config", "machine", "rehearsal"},
    "rehearsal": {"config", "runtime"},
    "metadata": set(),
    "storage": set(),
    "lease": {"storage"},
    "preemption": {"metadata"},
    "launch": {"config", "host", "machine", "preemption", "runtime", "supervisor"},
    "symptoms": set(),
    "supervisor": {"host", "machine", "preemption", "rehearsal", "replica", "runtime", "symptoms"},
    "replica": {"preemption", "rehearsal", "runtime"},
    "compatibility": set(),
    "machine": {"chips", "compatibility", "config"},
    "cells": {"fields"},
    "displays": {"machine"},
    "packages": {"compatibility", "machine"},
    "install": {"cells", "compatibility", "displays", "fields", "machine", "packages"},
    "host": {"chips", "config", "machine"},
    "doctor": {"chips", "config", "host", "launch", "machine", "runtime"},
}

# Modules that answer before torch is loaded, or without it.
LIGHT = ("config", "chips", "doctor", "install", "notebook", "launch", "__main__")


@dataclass(frozen=True)
class Import:
    name: str  # dotted: "tpu_kit.config", "torch_xla.core"
    where: str  # "module", "function" or "typing"
    line: int

    @property
    def ours(self) -> str | None:
        """The module of ours that is imported, "__init__" for the package itself, None for another package."""
        root, _, rest = self.name.partition(".")
        return (rest.partition(".")[0] or "__init__") if root == "tpu_kit" else None


def find_imports(source: str, modules: frozenset[str] = frozenset(FILES)) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, where: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            where = "function"
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, "typing")
            for child in node.orelse:
                visit(child, where)
            return
        elif isinstance(node, ast.Import):
            found.extend(Import(alias.name, where, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["tpu_kit" if node.level else None, node.module]))
            if base == "tpu_kit":  # `from tpu_kit import config, train`: modules, or names of the package
                names = [f"tpu_kit.{alias.name}" if alias.name in modules else base for alias in node.names]
                found.extend(Import(name, where, node.lineno) for name in names)
            else:
                found.append(Import(base, where, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, where)

    visit(ast.parse(source), "module")
    return found


IMPORTS = {name: find_imports(path.read_text()) for name, path in FILES.items()}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch_xla.core as core", [Import("torch_xla.core", "module", 1)]),
        ("class A:\n  import jax", [Import("jax", "module", 2)]),
        ("try:\n  import jax\nexcept ImportError: pass", [Import("jax", "module", 2)]),
        ("def f():\n  from torch_xla import runtime", [Import("torch_xla", "function", 2)]),
        ("from . import config", [Import("tpu_kit.config", "module", 1)]),
        ("from .config import load_config", [Import("tpu_kit.config", "module", 1)]),
        ("from tpu_kit import config, train", [Import("tpu_kit.config", "module", 1), Import("tpu_kit", "module", 1)]),
        ("if TYPE_CHECKING:\n  import torch\nelse:\n  import jax",
         [Import("torch", "typing", 2), Import("jax", "module", 4)]),
    ],
)  # fmt: skip
def test_find_imports(source: str, expected: list[Import]) -> None:
    assert find_imports(source, frozenset({"config"})) == expected


def test_module_level_imports_form_no_cycle() -> None:
    graph = {
        name: sorted({i.ours for i in imports if i.ours and i.where == "module"}) for name, imports in IMPORTS.items()
    }
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "a cycle: " + " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for imported in graph.get(name, []):
                walk(imported, (*path, name))
            done.add(name)

    for name in graph:
        walk(name, ())


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_may_import(name: str) -> None:
    if name not in FILES:
        pytest.skip(f"there is no {name}.py")
    wrong = [(i.line, i.ours) for i in IMPORTS[name] if i.ours and i.where != "typing"]
    wrong = [(line, ours) for line, ours in wrong if ours not in MAY_IMPORT[name]]
    assert not wrong, f"{name}.py imports {wrong}"


@pytest.mark.parametrize("name", sorted(FILES))
def test_xla_stack_only_inside_functions_of_its_modules(name: str) -> None:
    for found in IMPORTS[name]:
        if found.name.split(".")[0] in XLA_STACK and found.where != "typing":
            assert found.where == "function", f"{name}.py:{found.line} imports {found.name} at module level"
            assert name in XLA_MODULES, f"{name}.py:{found.line}: {found.name} belongs in {sorted(XLA_MODULES)}"


def test_package_is_lazy_and_helpers_stay_out() -> None:
    assert not [i for i in IMPORTS["__init__"] if i.ours and i.where == "module"], "tpu_kit/__init__.py must be lazy"
    users = [name for name, imports in IMPORTS.items() if any(i.ours == "testing" for i in imports)]
    assert not users, f"tpu_kit.testing is for tests, not for {users}"
    assert "utils" not in FILES, "name a module after what it does"


def import_all(names: list[str], forbidden: str) -> str:
    """Source that imports our modules one by one and names the first to load a forbidden package."""
    return (
        f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
        f"    assert {forbidden!r} not in sys.modules, f'importing {{name}} loads {forbidden}'\n"
    )


MODULES = ["tpu_kit", *(f"tpu_kit.{name}" for name in FILES if name != "__init__")]


def test_light_modules_do_not_load_torch() -> None:
    names = ["tpu_kit", *(f"tpu_kit.{name}" for name in LIGHT if name in FILES)]
    run_python(import_all(names, "torch"))


def test_no_module_loads_torch_xla() -> None:
    run_python(import_all(MODULES, "torch_xla"))


def test_every_module_imports_without_the_xla_stack() -> None:
    blocked = f"import sys\nsys.modules |= dict.fromkeys({XLA_STACK})\n"
    run_python(blocked + f"import importlib\nfor name in {MODULES}: importlib.import_module(name)")


@pytest.mark.slow
def test_light_modules_in_a_fresh_environment(tmp_path: Path) -> None:
    """Nothing but OmegaConf and Python: what a laptop needs to read a config or ask the doctor."""
    run_python(["-m", "venv", str(tmp_path / "env")])
    python = tmp_path / "env" / "bin" / "python"
    pins = (REPOSITORY / "requirements-gpu.txt").read_text().splitlines()
    (omegaconf,) = [pin for pin in pins if pin.startswith("omegaconf")]
    run_python(["-m", "pip", "install", "--quiet", omegaconf], executable=python)
    light = ["tpu_kit", *(f"tpu_kit.{name}" for name in LIGHT if name in FILES)]
    code = import_all(light, "torch") + "from tpu_kit.config import load_config\nprint(load_config().to_yaml())"
    printed = run_python(code, executable=python).stdout
    assert "batch_size:" in printed
    assert sys.prefix not in run_python("import sys; print(sys.path)", executable=python).stdout
