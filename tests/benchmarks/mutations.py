"""Counts how many seeded errors in the package its quick tests detect.

`python -m tests.benchmarks.mutations` draws lines of the package at random, so a room's share is its size. In each line
it changes an expression: an operator, a number, a condition, a returned value, or a removed call. Then it runs the
quick tests that import the module, `-x`, in a copy of the tree. Undetected mutations are printed with their lines: they
are gaps in the tests, or lines without effect.

Messages, displays, assertions and TPU-only branches are not drawn, because no test here can detect them.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.child_processes import REPOSITORY
from tests.test_tpu_branches import asks_for_a_tpu

NUMBER, SEED = 60, 0
TIME_LIMIT = 900.0  # seconds of tests per mutation; a timeout counts as detected
PACKAGE = "tpu_kit"
DISPLAYS = re.compile(r"report|print|show|warn|plot|table|text|describe|advice|message|help|progress|html|title", re.I)
OPERATORS: dict[type[ast.AST], str] = {
    ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.And: "or", ast.Or: "and", ast.Add: "-", ast.Sub: "+",
    ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "%", ast.Mod: "//",
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """A changed expression.

    Attributes:
        path: The module, relative to the repository.
        line: The line number, from 1.
        start: The expression's byte offset in the module.
        end: The byte offset of its end.
        text: The replacement.
    """

    path: Path
    line: int
    start: int
    end: int
    text: str


def _mutated(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yields expressions of the node and their replacements."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator = OPERATORS[type(node.ops[0])]
        yield node, f"({ast.unparse(node.left)} {operator} {ast.unparse(node.comparators[0])})"
    elif isinstance(node, ast.BoolOp):
        yield node, f"({f' {OPERATORS[type(node.op)]} '.join(f'({ast.unparse(value)})' for value in node.values)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield node, f"(({ast.unparse(node.left)}) {OPERATORS[type(node.op)]} ({ast.unparse(node.right)}))"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, repr(node.value + 1)
    elif isinstance(node, ast.Return | ast.Expr) and not isinstance(node.value, ast.Constant | None):
        yield node.value, "None"
    elif isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.BoolOp):
        yield node.test, f"(not ({ast.unparse(node.test)}))"


def _left_out(node: ast.AST) -> bool:
    """Whether the node is excluded: messages, displays, annotations, and TPU-only code."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments | ast.ImportFrom | ast.Import):
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":  # zip's `strict` is an assertion
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return bool(DISPLAYS.search(node.name))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _left_out(node.value)
    if isinstance(node, ast.Call):
        return bool(DISPLAYS.search(ast.unparse(node.func)))
    if isinstance(node, ast.If | ast.IfExp):
        return any(asks_for_a_tpu(part) for part in ast.walk(node.test) if isinstance(part, ast.Compare | ast.Call))
    return isinstance(node, ast.ClassDef) and "device_type = 'tpu'" in map(ast.unparse, node.body)


def find_mutations(path: Path) -> list[Mutation]:
    """Returns all mutations of a module of the repository."""
    source = (REPOSITORY / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutations = []

    def visit(node: ast.AST, inside: bool) -> None:
        if _left_out(node):
            return
        if inside:
            for part, text in _mutated(node):
                start = starts[part.lineno - 1] + part.col_offset
                end = starts[part.end_lineno - 1] + part.end_col_offset
                mutations.append(Mutation(path, part.lineno, start, end, text))
        inside |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name, child in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for one in child if isinstance(child, list) else [child]:
                    if isinstance(one, ast.AST):
                        visit(one, inside)

    visit(ast.parse(source), inside=False)
    return mutations


def draw(number: int, seed: int, rooms: list[str]) -> list[Mutation]:
    """Draws different lines that can be mutated, and one mutation for each line."""
    lines: dict[tuple[Path, int], list[Mutation]] = {}
    for path in sorted((REPOSITORY / PACKAGE).rglob("*.py")):
        if not DISPLAYS.search(path.stem) and (not rooms or path.parent.name in rooms):
            for mutation in find_mutations(path.relative_to(REPOSITORY)):
                lines.setdefault((mutation.path, mutation.line), []).append(mutation)
    random_ = random.Random(seed)
    return [random_.choice(lines[key]) for key in random_.sample(sorted(lines), min(number, len(lines)))]


def tests_of(path: Path) -> list[str]:
    """Returns the test files that import a module, with its room's tests first.

    If there are fewer than three, the tests of the modules that import it are appended.
    """
    files = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    direct = _importers(path, files)
    others = []
    if len(direct) < 3:
        modules = _importers(path, sorted((REPOSITORY / PACKAGE).rglob("*.py")))
        others = [file for module in modules for file in _importers(module.relative_to(REPOSITORY), files)]
    room = path.parent.name
    direct += [file for file in files if file.parent.name == room and file not in direct]
    direct.sort(key=lambda file: (path.stem not in file.stem, file.parent.name != room))
    return list(dict.fromkeys(str(file.relative_to(REPOSITORY)) for file in direct + others))


def _importers(path: Path, files: list[Path]) -> list[Path]:
    package, stem = re.escape(".".join(path.parent.parts)), path.stem
    imports = re.compile(rf"(from|import) {package}\.{stem}\b|from {package} import [^\n]*\b{stem}\b")
    return [file for file in files if imports.search(file.read_text())]


def is_noticed(mutation: Mutation, tree: Path) -> bool:
    """Runs the tests of the mutated module in a copy of the repository; returns whether a test fails or hangs."""
    file = tree / mutation.path
    source = file.read_bytes()
    file.write_bytes(source[: mutation.start] + mutation.text.encode() + source[mutation.end :])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *tests_of(mutation.path)], cwd=tree, timeout=TIME_LIMIT, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return done.returncode not in (0, 5)  # 5: no test was collected
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_bytes(source)


def main() -> int:
    """Prints each mutation and whether it was detected, then each room's share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=NUMBER)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--rooms", nargs="+", default=[], help="draw from these rooms alone")
    options = parser.parse_args()
    drawn, noticed = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        shutil.copytree(REPOSITORY, tree, ignore=shutil.ignore_patterns(".venv*", ".git", "runs", "__pycache__"))
        for mutation in draw(options.number, options.seed, options.rooms):
            room = mutation.path.parent.name
            before = (tree / mutation.path).read_bytes()[mutation.start : mutation.end].decode()
            seen = is_noticed(mutation, tree)
            drawn[room] += 1
            noticed[room] += seen
            print(f"{'noticed' if seen else 'MISSED '} {mutation.path}:{mutation.line}: "
                  f"{' '.join(before.split())[:60]}  ->  {mutation.text[:60]}", flush=True)  # fmt: skip
    print("\n".join(f"{room:14} {noticed[room]} of {drawn[room]}" for room in sorted(drawn)))
    print(f"{'all':14} {noticed.total()} of {drawn.total()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
