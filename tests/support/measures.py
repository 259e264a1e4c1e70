"""Measures how much source a change needs: closures, fan-out, feature names outside their files, side channels.

All measures are functions of the source only. tests/test_imports.py has today's figures as limits.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_MUTATING = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault",
    "update",
}  # fmt: skip


_MODELS = ("model", "decoder", "layer", "mlp")
"""The names that the package's functions use for models and their parts."""


class _WithoutAnnotations(ast.NodeTransformer):
    """Removes code that only a type checker uses."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return self.generic_visit(ast.Assign([node.target], node.value, lineno=node.lineno))

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


@dataclass(frozen=True)
class Package:
    """The modules of a package and the imports between them.

    Attributes:
        sources: Dotted name below the package ("training.step") -> source.
        name: The package.
    """

    sources: Mapping[str, str]
    name: str = "tpu_kit"

    @classmethod
    def read(cls, folder: Path) -> Package:
        """Reads all modules of a package's folder; a room's `__init__` is named after the room."""
        sources = {}
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            sources[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path.read_text()
        return cls(sources, folder.name)

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> the modules it imports, within functions too; imports used only in annotations are omitted."""
        return {name: set(self._imported(name)) - {name} for name in self.sources}

    def _imported(self, name: str) -> Iterator[str]:
        tree = _WithoutAnnotations().visit(ast.parse(self.sources[name]))
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    module = alias.name.removeprefix(f"{self.name}.")
                    if (alias.asname or alias.name.split(".")[0]) in used and module in self.sources:
                        yield module
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == self.name:
                base = (node.module or "").removeprefix(self.name).removeprefix(".")
                for alias in node.names:
                    full = ".".join(filter(None, [base, alias.name]))
                    module = full if full in self.sources else base
                    if (alias.asname or alias.name) in used and module in self.sources:
                        yield module

    def closure(self, name: str) -> set[str]:
        """Returns the module and every module of the package that it needs, directly or indirectly."""
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            if (module := waiting.pop()) not in seen:
                seen.add(module)
                waiting += self.imports[module]
        return seen

    def closure_lines(self, name: str) -> int:
        """Returns the lines of a module's closure."""
        return sum(len(self.sources[module].splitlines()) for module in self.closure(name))

    def tentacles(self, identifier: str, owners: tuple[str, ...]) -> list[str]:
        """Returns the modules outside the owners that contain an identifier, also as part of a longer name.

        Args:
            identifier: A feature's identifier, such as "teacher". Docstrings and comments do not count.
            owners: Modules or rooms ("training.losses.distillation", "config") that may contain it.
        """
        return [
            name
            for name, source in self.sources.items()
            if not any(name == owner or name.startswith(f"{owner}.") for owner in owners)
            and any(identifier in name for name in _names(source))
        ]


def _names(source: str) -> Iterator[str]:
    """Yields the identifiers of a source, and strings that are valid identifiers, such as columns of a batch."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.STRING) and token.string.strip("'\"").isidentifier():
            yield token.string.strip("'\"")


def side_channels(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the effects on other code beside arguments and results, as "module: target", by kind.

    Kinds: "state": module-level names that functions rebind or mutate; "patch": assignments to attributes or items of
    imported objects; "model": attributes set on models and their layers.
    """
    found: dict[str, set[str]] = {"state": set(), "patch": set(), "model": set()}
    for name, source in sources.items():
        tree = ast.parse(source)
        top = {target.id for node in tree.body for target in _targets(node) if isinstance(target, ast.Name)}
        imported = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for kind, target in _channels_of(function, top, imported):
                    found[kind].add(f"{name}: {target}")
    return {kind: sorted(targets) for kind, targets in found.items()}


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yields the targets that a statement assigns or deletes."""
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target


def _root(node: ast.expr) -> str:
    """Returns the name at the root of `name.attribute[item]`; empty if there is none."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _channels_of(
    function: ast.FunctionDef | ast.AsyncFunctionDef, top: set[str], imported: set[str]
) -> Iterator[tuple[str, str]]:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    rebound = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
    local = ({argument.arg for argument in arguments} | stored) - rebound
    yield from (("state", name) for name in rebound)
    for node in ast.walk(function):
        changed = [target for target in _targets(node) if not isinstance(target, ast.Name)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATING:
            changed.append(node.func.value)
        for target in changed:
            root = _root(target)
            if root in top and root not in local:
                yield "state", root
            elif root in imported and root not in local and not isinstance(target, ast.Name):
                yield "patch", ast.unparse(target)
            elif isinstance(target, ast.Attribute) and ast.unparse(target.value) in (
                "model",
                "decoder",
                "layer",
                "mlp",
            ):
                yield "model", ast.unparse(target)
