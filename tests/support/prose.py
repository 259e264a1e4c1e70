"""Counts hard-to-read sentences by room and kind: `python -m tests.support.prose [--show ROOM]`.

`--draw SEED` prints 20 functions without their code, for readers who explain them from their docstrings alone.
"""

import ast
import io
import json
import random
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = 35
"""A sentence with more words is long; guides to technical English recommend 15 to 20."""
PATTERNS = {
    "begins with Of": re.compile(r"^Of\b"),
    "relative what": re.compile(r"\bwhat\b(?!.*\?$)", re.IGNORECASE),
    "that of": re.compile(r"\b(?:that|those) of\b"),
    "pronoun one": re.compile(
        r"\b(?:the|this|that|another|an?|each|every|which|its own) one\b(?! of)|\bone (?:that|which|whose|is|has|was)\b"
    ),
    "pronoun each": re.compile(
        r"\beach(?: (?:is|are|has|was|of|with|in|by|its|as|for|a|an|the|from|to|at|on)\b|[,.;:)]|$)"
    ),
}
KINDS = (*PATTERNS, "long")
DRAWN, LEAST_LINES = 20, 5
"""Number of functions in a draw, and the fewest lines of code of such a function."""


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of `text`: paragraphs and list items split at sentence ends, without code and headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^#+ .*$", "", text, flags=re.MULTILINE)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) )|\n(?=\s*\w+: )|(?<=:)\n|(?<=\S) \| ", text):
        flat = " ".join(part.split())
        for sentence in re.split(r"(?<=[.!?])[\"')]*\s+(?=[A-Z`\"'(])", flat):
            if len(sentence.split()) > 2:
                yield sentence.strip("-*| ")


def texts_of_module(source: str, *, messages: bool = True) -> Iterator[str]:
    """Yields the comments and docstrings of a Python file and, if `messages`, its other string literals.

    Adjacent comment lines form one text; a comment after code is a separate text. An expression in an f-string counts
    as one word.
    """
    lines: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = token.line.lstrip().startswith("#")
            if lines and not (alone and token.start[0] == last + 1):
                yield "\n".join(lines)
                lines = []
            lines.append(token.string.lstrip("# "))
            last = token.start[0] if alone else -1
    yield "\n".join(lines)
    inside, tree = set(), ast.parse(source)
    if not messages:
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        yield from filter(None, docstrings)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside.update(id(value) for value in node.values)
            words = "".join(str(value.value) if isinstance(value, ast.Constant) else "X" for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            words = node.value
        else:
            continue
        if len(words.split()) > 3:
            yield words


def texts_of(path: Path) -> Iterator[str]:
    """Yields the prose of a Python file, a notebook's Markdown and code cells, or a Markdown file.

    Other string literals of tests are skipped: they are inputs and expected messages.
    """
    if path.suffix == ".ipynb":
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                yield source
            else:
                yield from texts_of_module(re.sub(r"^(\s*)[%!]", r"\1pass  # ", source, flags=re.MULTILINE))
    elif path.suffix == ".py":
        yield from texts_of_module(path.read_text(), messages=path.is_relative_to(ROOT / "tpu_kit"))
    else:
        yield path.read_text()


def hard_sentences() -> dict[str, dict[str, list[str]]]:
    """Returns room -> kind -> sentences. A room is a folder of `tpu_kit`, `tpu_kit`, `notebooks`, `tests` or `.`."""
    by_room: dict[str, dict[str, list[str]]] = {}
    files = [*ROOT.glob("*.md"), *ROOT.glob("notebooks/*.ipynb")]
    for folder in (ROOT / "tpu_kit", ROOT / "tests"):
        files += [*folder.rglob("*.py"), *folder.rglob("*.md")]
    for path in sorted(files):
        parts = path.relative_to(ROOT).parts
        room = "/".join(parts[:2]) if parts[0] == "tpu_kit" and len(parts) > 2 else parts[0] if len(parts) > 1 else "."
        found = by_room.setdefault(room, {kind: [] for kind in KINDS})
        for text in texts_of(path):
            for sentence in sentences(text):
                for kind, pattern in PATTERNS.items():
                    found[kind] += [sentence] * len(pattern.findall(sentence))
                if len(sentence.split()) > LONGEST:
                    found["long"].append(sentence)
    return by_room


def drawn(seed: int) -> list[tuple[str, str]]:
    """Draws `DRAWN` public functions of tpu_kit, and of its public classes, with at least `LEAST_LINES` lines of code.

    Returns:
        For each function its place, as "FILE:LINE NAME", and the docstrings of its module and class, its signature and
        its docstring.
    """
    found = list[tuple[str, str]]()
    for path in sorted((ROOT / "tpu_kit").rglob("*.py")):
        tree = ast.parse(path.read_text())
        module = (ast.get_docstring(tree) or "").partition("\n\n")[0]
        for owner in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")):
            about = f"class {owner.name}: {ast.get_docstring(owner) or ''}\n" if isinstance(owner, ast.ClassDef) else ""
            for node in owner.body:
                text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
                if not isinstance(node, ast.FunctionDef) or not text or node.name.startswith("_"):
                    continue
                if (node.end_lineno or 0) - (node.body[0].end_lineno or 0) < LEAST_LINES:
                    continue
                signature = f"def {node.name}({ast.unparse(node.args)}) -> {node.returns and ast.unparse(node.returns)}"
                name = f"{owner.name}.{node.name}" if isinstance(owner, ast.ClassDef) else node.name
                place = f"{path.relative_to(ROOT)}:{node.lineno} {name}"
                found.append((place, f"module: {module}\n{about}{signature}\n{text}"))
    return random.Random(seed).sample(found, DRAWN)


def main() -> None:
    """Prints the counts as a table; with `--show ROOM` the sentences of a room, with `--draw SEED` functions."""
    if sys.argv[1:2] == ["--draw"]:
        for number, (place, text) in enumerate(drawn(int(sys.argv[2])), 1):
            print(f"{number}. {place}\n{text}\n")
        return
    by_room = hard_sentences()
    if sys.argv[1:2] == ["--show"]:
        for kind, found in by_room[sys.argv[2]].items():
            print(f"\n{kind}: {len(found)}", *found, sep="\n  ")
        return
    total: Counter[str] = Counter()
    print("| room |", " | ".join(KINDS), "|")
    print("|---|" + "---:|" * len(KINDS))
    for room, found in by_room.items():
        counts = {kind: len(found[kind]) for kind in KINDS}
        total.update(counts)
        print(f"| {room} |", " | ".join(str(count) for count in counts.values()), "|")
    print("| all |", " | ".join(str(total[kind]) for kind in KINDS), "|")


if __name__ == "__main__":
    main()
