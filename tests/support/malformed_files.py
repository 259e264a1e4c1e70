"""Malformed and unusual data files, with the expected results: an error text, or the rows that are read.

As a program it prepares the named files as `train` does, in separate processes, and prints a line of JSON per file:
`python tests/support/malformed_files.py FOLDER [NAME ...]`.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS = 60  # the time limit of a file


@dataclass(frozen=True)
class Case:
    """A file or folder.

    Attributes:
        name: The file, a pattern of several files, or the folder; its extension selects the kit's reader.
        content: The file's bytes, or a function that creates it at a path.
        refused: A regular expression that the error's text must match; None if the file must be read.
        texts: The documents, as `prompt|completion`; compared only if the file is read.
        settings: Settings of the data section besides the source.
        skipped: The number of rows skipped if the file is read.
        unprivileged: Whether a user without read permission reads it.
    """

    name: str
    content: bytes | Callable[[Path], None]
    refused: str | None = None
    texts: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0
    unprivileged: bool = False


CASES: dict[str, Case] = {}
SKIP = {"on_bad_row": "skip"}
Q = {"question": "q", "answer": "a"}
GOOD = '{"question": "q", "answer": "a"}\n'
ONE = ("q|a",)
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def refuse(title: str, name: str, content: str | bytes | Callable[[Path], None], text: str, **settings: Any) -> None:
    made = content.encode() if isinstance(content, str) else content
    _add(title, Case(name, made, text, settings=settings, unprivileged=content is unreadable))


def read(title: str, name: str, content: str | bytes | Callable[[Path], None], *texts: str, **settings: Any) -> None:
    skipped = settings.pop("skipped", 0)
    made = content.encode() if isinstance(content, str) else content
    _add(title, Case(name, made, None, texts or ONE, settings, skipped))


def _add(title: str, case: Case) -> None:
    assert title not in CASES, title
    CASES[title] = case


def rows(*values: Any) -> str:
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)


def answers(*values: Any) -> str:
    return rows(*({"question": "q", "answer": value} for value in values))


def chat(*messages: Any) -> str:
    return rows({"messages": list(messages)})


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + closing * depth


def parquet(**columns: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    stream = io.BytesIO()
    pq.write_table(pa.table(columns), stream)
    return stream.getvalue()


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def several(**files: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        for name, content in files.items():
            (path.parent / name.replace("_", ".")).write_text(content)

    return make


def folder(**files: str | bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        for name, content in files.items():
            (path / name.replace("_", ".")).write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def unreadable(path: Path) -> None:
    path.write_text(GOOD)
    path.chmod(0)


def _saved(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        from datasets import Dataset

        Dataset.from_list([Q] * 50).save_to_disk(path)
        damage(path)

    return make


def _cut(path: Path, share: float = 0.5) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def _garble(content: bytes, start: float, end: float) -> bytes:
    first, last = int(len(content) * start), int(len(content) * end)
    return content[:first] + bytes(255 - byte for byte in content[first:last]) + content[last:]


# --------------------------------------------------------------------------------------------- the file as a whole

for _name in ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.ndjson"):
    refuse(f"empty {_name}", _name, b"", "the file is empty")
for _name in ("a.jsonl", "a.json"):
    refuse(f"only blank lines {_name}", _name, "\n \n\n", "it has no rows")
    refuse(f"only a BOM {_name}", _name, b"\xef\xbb\xbf", "it has no rows")
    refuse(f"NUL bytes {_name}", _name, b"\0" * 100, "line 1.*NUL")
    refuse(f"binary {_name}", _name, bytes(range(256)) * 4, r"line \d+.*(not UTF-8|NUL)")
    for _code in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        refuse(f"{_code} {_name}", _name, GOOD.encode(_code), "line 1.*(not UTF-8|NUL)")
    read(f"BOM {_name}", _name, "\ufeff" + GOOD)
    refuse(f"HTML {_name}", _name, "<!DOCTYPE html><html>404</html>", "line 1, column 1: not valid JSON")
refuse("a Git LFS pointer", "a.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull")
refuse("a Git LFS pointer as parquet", "a.parquet", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
       "a.parquet: this is a Git LFS pointer, not the file: run `git lfs pull`")  # fmt: skip
refuse("only a BOM a.csv", "a.csv", b"\xef\xbb\xbf", "no rows|no column")
refuse("only blank lines a.csv", "a.csv", "\n\n\n", "no rows|no column")
refuse("NUL bytes a.csv", "a.csv", b"question,answer\nq,\0\0\n", "line 2.*NUL")
refuse("binary a.csv", "a.csv", bytes(range(256)) * 4, r"line \d+.*(not UTF-8|NUL)")
for _code in ("utf-16", "utf-16-le", "utf-32"):
    refuse(f"{_code} a.csv", "a.csv", "question,answer\nq,a\n".encode(_code), "line 1.*(not UTF-8|NUL)")
refuse("latin-1 a.jsonl", "a.jsonl", GOOD.encode() + '{"question": "é", "answer": "a"}'.encode("latin-1"),
       "line 2: not UTF-8")  # fmt: skip
refuse("latin-1 a.json", "a.json", '[{"question": "é", "answer": "a"}]'.encode("latin-1"), "line 1: not UTF-8")
refuse("latin-1 a.csv", "a.csv", "question,answer\né,a\n".encode("latin-1"), "line 2: not UTF-8")
refuse("latin-1 at the end of many lines", "a.jsonl", GOOD.encode() * 5000 + b'{"question": "\xe9", "answer": "a"}',
       "line 5001: not UTF-8")  # fmt: skip
refuse("a character cut in two", "a.jsonl", '{"question": "q", "answer": "é'.encode()[:-1], "line 1: not UTF-8")
refuse("an unknown ending", "a.xml", GOOD, "the name must end in")
refuse("a zip", "a.jsonl.zip", GOOD, "the name must end in")
refuse("no such file", "a.jsonl", lambda path: None, "there is no such file")
refuse("a pattern without files", "*.jsonl", lambda path: None, "there is no such file")
refuse("a link to itself", "a.jsonl", link("a.jsonl"), "a.jsonl: (no access|there is no such file)")
refuse("a link to nothing", "a.jsonl", link("nowhere"), "there is no such file")
refuse("a link to a folder", "a.jsonl", link("."), "a.jsonl.*folder")
refuse("a folder with a file's name", "a.jsonl", lambda path: path.mkdir(), "a.jsonl.*folder")
refuse("a folder named as parquet", "a.parquet", lambda path: path.mkdir(), "a.parquet.*folder")
refuse("a pipe", "a.jsonl", lambda path: os.mkfifo(path), "a.jsonl.*not a regular file")
refuse("a file that may not be read", "a.jsonl", unreadable, "a.jsonl.*(no access|cannot be read).*[Pp]ermission")
refuse("a folder without data", "folder", folder(), "folder: .*")
refuse("a folder with a README", "folder", folder(README_md="# Rows"), "folder")
read("a folder of files", "folder", folder(a_jsonl=GOOD, b_jsonl=GOOD), "q|a", "q|a")
refuse("a saved data set cut off", "folder",
       _saved(lambda path: _cut(path / "data-00000-of-00001.arrow")), "folder: .*cannot be read")  # fmt: skip
refuse("a saved data set of zeros", "folder",
       _saved(lambda path: (path / "data-00000-of-00001.arrow").write_bytes(b"\0" * 5000) and None),
       "folder: .*cannot be read")  # fmt: skip
refuse("a saved data set without its state", "folder", _saved(lambda path: (path / "state.json").unlink()),
       "folder: .*cannot be read")  # fmt: skip
refuse("a saved data set with a broken state", "folder",
       _saved(lambda path: (path / "state.json").write_text("{") and None), "folder.*")  # fmt: skip

# ------------------------------------------------------------------------------------------------------ compression

read("gzip", "a.jsonl.gz", gzip.compress(GOOD.encode()))
read("gzip in two parts", "a.jsonl.gz", gzip.compress(GOOD.encode()) * 2, "q|a", "q|a")
read("bzip2", "a.jsonl.bz2", bz2.compress(GOOD.encode()))
read("xz", "a.jsonl.xz", lzma.compress(GOOD.encode()))
read("gzip of CSV", "a.csv.gz", gzip.compress(b"question,answer\nq,a\n"))
for _kind, _packed in {
    "gz": gzip.compress((GOOD * 999).encode()), "bz2": bz2.compress((GOOD * 999).encode()),
    "xz": lzma.compress((GOOD * 999).encode()),
}.items():  # fmt: skip
    refuse(f"{_kind} cut off", f"a.jsonl.{_kind}", _packed[: len(_packed) * 2 // 3], f"a.jsonl.{_kind}: cannot be read")
    refuse(f"{_kind} garbled", f"a.jsonl.{_kind}", _garble(_packed, 0.3, 0.6), f"a.jsonl.{_kind}.*")
    refuse(f"{_kind} that is text", f"a.jsonl.{_kind}", GOOD, f"a.jsonl.{_kind}: cannot be read")
    refuse(f"{_kind} of CSV cut off", f"a.csv.{_kind}", _packed[: len(_packed) * 2 // 3], f"a.csv.{_kind}: .*")
    refuse(f"{_kind} without its name", "a.jsonl", _packed, "a.jsonl, line 1.*(not UTF-8|NUL)")
refuse("gzip of nothing", "a.jsonl.gz", gzip.compress(b""), "no rows")
refuse("gzip with garbage behind it", "a.jsonl.gz", gzip.compress(GOOD.encode()) + b"garbage", "a.jsonl.gz: .*")
refuse("zst that is text", "a.jsonl.zst", GOOD, "a.jsonl.zst")

# ------------------------------------------------------------------------------------------------------- JSON Lines

refuse("null lines", "a.jsonl", "null\n" * 3, "line 1: a row must be an object, not null")
refuse("many null lines", "a.jsonl", "null\n" * 100_000, "line 1: a row must be an object, not null")
refuse("one null line", "a.jsonl", GOOD + "null\n" + GOOD, "line 2: a row must be an object, not null.*on_bad_row=skip")
refuse("a null line after many", "a.jsonl", GOOD * 20_000 + "null\n", "line 20001: a row must be an object, not null")
refuse("null lines first", "a.jsonl", "null\n" * 10 + GOOD * 100, "10 of 110 rows.*line 1: a row must be an object")
refuse("an array on each line", "a.jsonl", "[1]\n[1]\n", r"line 1: a row must be .* not \[1\] \(also a.jsonl, line 2\)")
refuse("null rows in an array", "a.json", f"[null, {GOOD}]", "row 0: a row must be an object, not null")
refuse("an array of nulls", "a.json", "[null, null]", "row 0: a row must be an object, not null")
refuse("null", "a.json", "null", "a row must be an object, not null")
for _title, _line in {"a number": "7", "a text": '"text"', "a list": "[1, 2]", "true": "true"}.items():
    refuse(f"{_title} as first row", "a.jsonl", f"{_line}\n{GOOD}", "a.jsonl, (line 1|line 2)")
    refuse(f"{_title} as second row", "a.jsonl", f"{GOOD}{_line}\n", "line 2: a row must be an object, not")
refuse("an array of texts", "a.json", '["one", "two"]', 'row 0: a row must be an object, not "one"')
refuse("an array of arrays", "a.json", '[["q", "a"]]', "row 0: a row must be an object, not .*q")
refuse("an empty array", "a.json", "[]", "no rows")
refuse("an empty array in an object", "a.json", '{"data": []}', "missing columns")
refuse("empty objects", "a.jsonl", "{}\n{}\n", "missing columns.*the data has none")
refuse("one empty object", "a.jsonl", GOOD + "{}\n", "line 2: column 'question' is empty")
read("an array as JSON Lines", "a.jsonl", json.dumps([Q, Q], indent=1), "q|a", "q|a")
read("JSON Lines as JSON", "a.json", GOOD * 2, "q|a", "q|a")
refuse("rows in an object", "a.json", json.dumps({"version": 1, "data": [Q]}), "missing columns.*has version, data")
refuse(
    "rows by their name",
    "a.json",
    json.dumps({str(i): Q for i in range(2000)}),
    "a.json: missing columns.*has 0, 1, 2,",
)
refuse(
    "objects one after another over lines", "a.json", json.dumps(Q, indent=1) * 2, "line 1, column 2: not valid JSON"
)
refuse("Python's quotes", "a.jsonl", "{'question': 'q', 'answer': 'a'}\n", "line 1, column 2: not valid JSON")
refuse("a trailing comma", "a.jsonl", '{"question": "q", "answer": "a",}\n', "line 1, column 33: not valid JSON")
refuse("a line cut off", "a.jsonl", GOOD + '{"question": "q", "ans', "line 2, column 19: not valid JSON")
refuse("a first line cut off", "a.jsonl", '{"question": "q", "ans\n' + GOOD, "line 1, column 19: not valid JSON")
refuse("an array cut off", "a.json", f"[{GOOD},{GOOD}", "a.json, line 3, column 1: not valid JSON")
refuse("two objects in a line", "a.jsonl", GOOD + GOOD.strip() + GOOD, "line 2, column 33: not valid JSON: Extra data")
refuse(
    "a line break in a text",
    "a.jsonl",
    GOOD + '{"question": "q\nq", "answer": "a"}\n',
    "2 of 3 rows.*line 2, column 14: not valid JSON",
)
refuse("comments", "a.jsonl", "// rows\n" + GOOD, "line 1, column 1: not valid JSON")
refuse("CSV as JSON Lines", "a.jsonl", "question,answer\nq,a\n", "line 1, column 1: not valid JSON")
refuse("YAML", "a.jsonl", "question: q\nanswer: a\n", "line 1, column 1: not valid JSON")
refuse(
    "a key twice",
    "a.jsonl",
    '{"question": "q", "answer": "a", "answer": "b"}\n',
    "line 1: the key 'answer' occurs twice",
)
refuse(
    "a key twice, later",
    "a.jsonl",
    GOOD + '{"question": "q", "answer": "a", "answer": "b"}\n',
    "line 2: the key 'answer'",
)
refuse("a key twice in a message", "a.jsonl", '{"messages": [{"role": "user", "role": "assistant", "content": "q"}]}\n',
       "line 1: the key 'role' occurs twice")  # fmt: skip
refuse(
    "a key twice in an array",
    "a.json",
    '[{"question": "q", "answer": "a", "answer": "b"}]',
    "the key 'answer' occurs twice",
)
refuse(
    "keys that differ in case",
    "a.jsonl",
    '{"question": "q", "answer": "a", "Answer": "b"}\n',
    "answer.*Answer.*data.columns",
)
read("keys that differ in case, named", "a.jsonl", '{"question": "q", "answer": "a", "Answer": "b"}\n', "q|b",
     columns={"question": "question", "answer": "Answer"})  # fmt: skip
for _title, _depth in {"deep": 2000, "very deep": 200_000}.items():
    refuse(f"{_title} lists", "a.jsonl", GOOD + f'{{"question": "q", "answer": {nested(_depth)}}}\n', "line 2: nested")
    refuse(f"{_title} lists in an array", "a.json", f'[{{"question": "q", "answer": {nested(_depth)}}}]', "nested")
    _object = '{"a":' * _depth + "1" + "}" * _depth
    refuse(f"{_title} objects", "a.jsonl", f'{{"question": "q", "answer": {_object}}}\n{GOOD}', "line 1: nested")
refuse("a deep row alone", "a.jsonl", nested(2000) + "\n", "a.jsonl.*(nested|a row must be an object)")
read("a deep unused column", "a.jsonl", f'{{"question": "q", "answer": "a", "x": {nested(500)}}}\n')
read("brackets in a text", "a.jsonl", answers("[" * 3000), "q|" + "[" * 3000)
refuse("half a surrogate pair", "a.jsonl", GOOD + '{"question": "\\ud83d", "answer": "a"}\n', "line 2.*surrogate")
refuse("half a surrogate pair in a message", "a.jsonl", '{"messages": [{"role": "user", "content": "\\udc00"}]}\n',
       "line 1.*surrogate")  # fmt: skip
refuse(
    "half a surrogate pair in a key", "a.jsonl", '{"question": "q", "answer": "a", "\\ud800": 1}\n', "line 1.*surrogate"
)
read("a whole surrogate pair", "a.jsonl", '{"question": "\\ud83d\\ude00", "answer": "a"}\n', "\U0001f600|a")
read("unusual line ends within", "a.jsonl", answers("a\u2028b\u0085c"), "q|a\u2028b\u0085c")
read("Windows and Mac line ends", "a.jsonl", GOOD.replace("\n", "\r\n") + GOOD.replace("\n", "\r") + GOOD, *ONE * 3)
read("blank lines between", "a.jsonl", "\n" + GOOD + "\n  \n" + GOOD + "\n\n", "q|a", "q|a")
read("a line of megabytes", "a.jsonl", answers("x") + rows(Q | {"other": "y" * 15_000_000}) + GOOD, "q|x", *ONE * 2)
read("many rows", "a.jsonl", answers(*(["x"] * 2500)), *["q|x"] * 2500)
read("a NUL character in a text", "a.jsonl", answers("a\0b"), "q|a\0b")

# --------------------------------------------------------------------------------------------------- cells of JSON

refuse("NaN", "a.jsonl", GOOD + '{"question": "q", "answer": NaN}\n', "line 2: column 'answer' is empty")
refuse("Infinity", "a.jsonl", '{"question": "q", "answer": -Infinity}\n', "answer without values")
refuse(
    "a number over all floats", "a.jsonl", '{"question": "q", "answer": 1e999}\n', "line 1: column 'answer' holds inf"
)
read("huge numbers in a column that is not used", "a.jsonl", rows(Q | {"x": [1e300, 2**63 - 1, 0.1]}))
read("huge whole numbers in a list", "a.jsonl", GOOD + rows(Q | {"x": [2**80]}), *ONE * 2)
read("NaN in a column that is not used", "a.jsonl", '{"question": "q", "answer": "a", "score": NaN}\n' + GOOD, *ONE * 2)
refuse(
    "NaN in a message",
    "a.jsonl",
    '{"messages": [{"role": "user", "content": NaN}]}\n',
    "line 1: message 0 of .* has no content",
)
read("whole numbers", "a.jsonl", answers(7, -3, 0), "q|7", "q|-3", "q|0")
read("numbers with a point", "a.jsonl", answers(7.5, 3.0, 0.1), "q|7.5", "q|3", "q|0.1")
read("whole numbers and others", "a.jsonl", answers(7, 2.5, 2**53 + 1), "q|7", "q|2.5", f"q|{2**53 + 1}")
read("texts and numbers", "a.jsonl", answers("007", 7, 1.5, "1.50"), "q|007", "q|7", "q|1.5", "q|1.50")
read("a huge whole number", "a.jsonl", answers(2**100, 1), f"q|{2**100}", "q|1")
read("a whole number of 2,000 digits", "a.jsonl", f'{{"question": "q", "answer": {"9" * 2000}}}\n', "q|" + "9" * 2000)
read("texts that look like dates", "a.jsonl", answers("2024-01-01", "2024-01-01T00:00:00Z"), "q|2024-01-01",
     "q|2024-01-01T00:00:00Z")  # fmt: skip
read("texts that look like JSON", "a.jsonl", answers("[1, 2]", "null", "true", '{"a": 1}'), "q|[1, 2]", "q|null",
     "q|true", 'q|{"a": 1}')  # fmt: skip
for _title, _value in {
    "null": None, "empty text": "", "white space": " \n\t", "no-break space": "\u00a0",
}.items():  # fmt: skip
    refuse(f"{_title} for text", "a.jsonl", GOOD + answers(_value), "line 2: column 'answer' is empty.*on_bad_row=skip")
for _title, _value in {"a list": ["a"], "an object": {"a": 1}, "true": True, "an empty list": []}.items():
    refuse(f"{_title} for text", "a.jsonl", GOOD + answers(_value), "line 2: column 'answer' holds")
    refuse(f"{_title} for all texts", "a.jsonl", answers(_value, _value), "2 of 2 rows.*line 1: column 'answer' holds")
    refuse(
        f"{_title} for text after many", "a.jsonl", GOOD * 20_000 + answers(_value), "line 20001: column 'answer' holds"
    )
refuse("only nulls for text", "a.jsonl", answers(None, None), "missing columns.*answer without values")
refuse("null questions", "a.jsonl", rows({"question": None, "answer": "a"}, Q), "line 1: column 'question' is empty")
refuse("no answers in some rows", "a.jsonl", GOOD + rows({"question": "q"}), "line 2: column 'answer' is empty")
refuse("no answers at all", "a.jsonl", rows({"question": "q"}), "missing columns")
refuse("unknown columns", "a.jsonl", rows({"foo": 1, "bar": 2}), "missing columns.*foo, bar")
refuse("a null prompt first", "a.jsonl", rows({"prompt": None, "completion": "c"}, {"prompt": "p", "completion": "c"}),
       "line 1: ")  # fmt: skip
read("prompts of both kinds", "a.jsonl",
     rows({"prompt": "p", "completion": "c"}, {"prompt": CHAT[:1], "completion": CHAT[1:]}), "|c", "q|a")  # fmt: skip
refuse("a text that is a list", "a.jsonl", rows({"text": ["one", "two"]}), "line 1: column 'text' holds a list")
refuse("columns that differ between files", "*.jsonl", several(a_jsonl=GOOD, b_jsonl=rows({"prompt": 1})),
       "question could be question or prompt")  # fmt: skip
refuse("a broken second file", "*.jsonl", several(a_jsonl=GOOD, b_jsonl="{bad"), "b.jsonl, line 1, column 2")
refuse("an empty second file", "*.jsonl", several(a_jsonl=GOOD, b_jsonl=""), "b.jsonl: the file is empty")
refuse("a bad row in the second file", "*.jsonl", several(a_jsonl=GOOD * 3, b_jsonl=GOOD + answers("")),
       "b.jsonl, line 2: column 'answer' is empty")  # fmt: skip

# --------------------------------------------------------------------------------------------------------- messages

read("a chat", "a.jsonl", chat(*CHAT))
_A = {"role": "assistant", "content": "a"}
for _title, _messages in {
    "no messages": [], "messages of null": [None], "messages of text": ["hi"], "no role": [{"content": "q"}, _A],
    "a null role": [{"role": None, "content": "q"}, _A], "a number as role": [{"role": 5, "content": "q"}, _A],
    "a list as role": [{"role": ["user"], "content": "q"}, _A], "no content": [{"role": "user"}, _A],
    "null content": [CHAT[0], {"role": "assistant", "content": None}], "no assistant": CHAT[:1],
    "a number as content": [{"role": "user", "content": 5}, _A], "an object as content": [
        {"role": "user", "content": {"a": 1}}, _A], "a list of numbers as content": [
        {"role": "user", "content": [1]}, _A],
    "an image": [{"role": "user", "content": [{"type": "image"}]}, _A], "an empty message": [{}, _A],
    "an empty answer": [CHAT[0], {"role": "assistant", "content": " "}],
    "a list as ShareGPT's role": [{"from": ["human"], "value": "q"}, {"from": "gpt", "value": "a"}],
    "a list in a list": [[CHAT[0]], _A],
}.items():  # fmt: skip
    refuse(f"{_title} (chat)", "a.jsonl", chat(*CHAT) + chat(*_messages), "1 of 2 rows cannot .*: a.jsonl, line 2: ")
for _title, _value in {"null": None, "text": "hi", "a number": 7, "an object": {"role": "user"}, "true": True}.items():
    refuse(f"{_title} for messages", "a.jsonl", chat(*CHAT) + rows({"messages": _value}), "1 of 2 rows.*line 2: ")
refuse("tools that are no list", "a.jsonl", chat(*CHAT) + rows({"messages": CHAT, "tools": 7}), "1 of 2 rows.*line 2: ")
refuse("tool calls that are no list", "a.jsonl",
       chat(*CHAT) + chat(CHAT[0], {"role": "assistant", "tool_calls": 5}), "1 of 2 rows.*line 2: ")  # fmt: skip

# -------------------------------------------------------------------------------------------------------------- CSV

H = "question,answer\n"
read("CSV", "a.csv", H + "q,a\n")
read("CSV with a BOM and Windows line ends", "a.csv", "\ufeff" + (H + "q,a\n").replace("\n", "\r\n"))
read("CSV without a last line end", "a.csv", H + "q,a")
read("CSV with blank lines", "a.csv", H + "\nq,a\n\n", "q|a")
read("CSV with a line break in a cell", "a.csv", H + 'q,"one\ntwo"\n', "q|one\ntwo")
read("CSV of words that others read as nothing", "a.csv", H + "NA,null\nNaN,None\n", "NA|null", "NaN|None")
read("CSV of figures", "a.csv", H + "007,1.50\n1e5,0x1F\n", "007|1.50", "1e5|0x1F")
read(
    "CSV with a huge cell",
    "a.csv",
    H + "q,a\n" + "q" * 300_000 + ",a\n",
    "q|a",
    "q" * 300_000 + "|a",
    max_length=400_000,
)
read("TSV", "a.tsv", "question\tanswer\nq,\ta\n", "q,|a")
refuse("CSV with a longer row", "a.csv", H + "q,a\nq,a,b\n", "a.csv, line 3: 3 cells.*header.*2.*on_bad_row=skip")
refuse("CSV with a longer first row", "a.csv", H + "q,a,b\nq,a\n", "a.csv, line 2: 3 cells")
refuse("CSV with a shorter row", "a.csv", H + "q,a\nq\n", "a.csv, line 3: 1 cell")
refuse("CSV with a shorter row, the rest not used", "a.csv", "question,answer,id\nq,a,1\nq,a\n", "line 3: 2 cells")
refuse("CSV with an empty cell", "a.csv", H + "q,a\nq,\n", "line 3: column 'answer' is empty")
refuse("CSV with a quote that is not closed", "a.csv", H + 'q,"a\nq,a\n', "a.csv, line 2: .*quote")
refuse("CSV with text after a quote", "a.csv", H + 'q,"a"b\n', "a.csv, line 2: .*")
refuse("CSV with a column twice", "a.csv", "question,answer,answer\nq,a,b\n", "column answer occurs twice")
refuse(
    "CSV with columns that differ in case", "a.csv", "question,answer,Answer\nq,a,b\n", "answer.*Answer.*data.columns"
)
refuse("CSV without rows", "a.csv", H, "no rows")
refuse("CSV without a header", "a.csv", "1,2\n3,4\n", "missing columns.*1, 2")
refuse("CSV of semicolons", "a.csv", "question;answer\nq;a\n", "missing columns.*question;answer.*separated by commas")
refuse("CSV with an empty header", "a.csv", ",\nq,a\n", "a.csv.*(no name|missing columns)")
read("CSV with an index column", "a.csv", ",question,answer\n0,q,a\n")
refuse("JSON Lines as CSV", "a.csv", GOOD * 2, "a.csv")
refuse("TSV as CSV", "a.csv", "question\tanswer\nq\ta\n", "missing columns")
refuse(
    "CSV files whose columns differ",
    "*.csv",
    several(a_csv=H + "q,a\n", b_csv="question,text\nq,a\n"),
    "b.csv, line 2: column 'answer' is empty",
)
read(
    "CSV files whose columns have another order",
    "*.csv",
    several(a_csv=H + "q,a\n", b_csv="answer,question\nb,p\n"),
    "q|a",
    "p|b",
)
refuse("CSV of messages that are no JSON", "a.csv", "messages\nhello\n", "line 2: column 'messages' is not valid JSON")
refuse("CSV of messages nested deep", "a.csv", f'messages\n"{nested(200_000)}"\n', "line 2: ")

# ---------------------------------------------------------------------------------------------------------- Parquet

_P = parquet(question=["q"] * 500, answer=["a"] * 500)
read("Parquet", "a.parquet", parquet(question=["q"], answer=["a"]))
read("Parquet of numbers", "a.parquet", parquet(question=["q"], answer=[7]), "q|7")
refuse("Parquet cut off", "a.parquet", _P[: len(_P) // 2], "a.parquet: cannot be read")
refuse("Parquet without its end", "a.parquet", _P[:-4], "a.parquet: cannot be read")
read("Parquet without its beginning", "a.parquet", b"\0\0\0\0" + _P[4:], *ONE * 500)
refuse("Parquet with garbled pages", "a.parquet", _garble(_P, 0.02, 0.3), "a.parquet")
refuse("Parquet with a garbled footer", "a.parquet", _garble(_P, 0.6, 0.9), "a.parquet: cannot be read")
refuse("Parquet without rows", "a.parquet", parquet(question=[], answer=[]), "no rows")
refuse("Parquet without columns", "a.parquet", parquet(), "a.parquet.*no (rows|columns)|missing columns")
refuse("JSON Lines as Parquet", "a.parquet", GOOD, "a.parquet: cannot be read")
refuse("Parquet as JSON Lines", "a.jsonl", _P, r"a.jsonl, line \d+.*(not UTF-8|NUL)")
refuse("Parquet as CSV", "a.csv", _P, r"a.csv, line \d+.*(not UTF-8|NUL)")
refuse(
    "Parquet of nulls", "a.parquet", parquet(question=["q", "q"], answer=["a", None]), "row 1: column 'answer' is empty"
)
refuse("Parquet of lists", "a.parquet", parquet(question=["q"], answer=[["a"]]), "row 0: column 'answer' holds a list")
refuse("Parquet of bytes", "a.parquet", parquet(question=["q"], answer=[b"\xff\xfe"]), "row 0: column 'answer' holds")


def _dates() -> bytes:
    import datetime

    return parquet(question=["q"], answer=[datetime.date(2024, 1, 1)])


refuse("Parquet of dates", "a.parquet", _dates(), "row 0: column 'answer' holds a date")


def _twice() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    stream = io.BytesIO()
    table = pa.Table.from_arrays([pa.array(["q"]), pa.array(["a"]), pa.array(["b"])], ["question", "answer", "answer"])
    pq.write_table(table, stream)
    return stream.getvalue()


def _not_text() -> bytes:
    import pyarrow as pa

    return parquet(question=["q"], answer=pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]))  # fmt: skip


refuse("Parquet with a column twice", "a.parquet", _twice(), "a.parquet.*answer")
refuse("Parquet of texts that are not UTF-8", "a.parquet", _not_text(), "a.parquet.*UTF-?8")

# -------------------------------------------------------------------------------------------------------- bad rows

read("a null line, skipped", "a.jsonl", GOOD + "null\n" + GOOD, *ONE * 2, skipped=1, **SKIP)
read("an empty cell, skipped", "a.jsonl", GOOD + answers("") + GOOD, *ONE * 2, skipped=1, **SKIP)
read("an empty cell of CSV, skipped", "a.csv", H + "q,\nq,a\n", skipped=1, **SKIP)
read("a shorter row of CSV, skipped", "a.csv", H + "q\nq,a\n", skipped=1, **SKIP)
read("a null of Parquet, skipped", "a.parquet", parquet(question=["q"] * 3, answer=["a", None, "b"]), "q|a", "q|b",
     skipped=1, **SKIP)  # fmt: skip
read("a deep row, skipped", "a.jsonl", GOOD + nested(2000) + "\n" + GOOD, *ONE * 2, skipped=1, **SKIP)
read("a line cut off, skipped", "a.jsonl", GOOD + '{"question": "q", "ans', skipped=1, **SKIP)
read("a first line cut off, skipped", "a.jsonl", '{"question": "q", "ans\n' + GOOD, skipped=1, **SKIP)
read("a chat without an answer, skipped", "a.jsonl", chat(*CHAT) * 2 + chat(CHAT[0]), *ONE * 2, skipped=1, **SKIP)
refuse("most rows skipped", "a.jsonl", GOOD + "null\n" + answers("", ""), "3 of 4 rows.*more than half", **SKIP)
refuse("all rows skipped", "a.jsonl", answers("", ""), "missing columns.*answer without values", **SKIP)
refuse("a quote that is not closed, skipped", "a.csv", H + 'q,a\nq,a\nq,"a\nq,a\n', "a.csv, line 4: .*quote", **SKIP)
refuse("not UTF-8, skipped", "a.jsonl", GOOD.encode() * 3 + b'{"question": "\xe9"}', "line 4: not UTF-8", **SKIP)


# -------------------------------------------------------------------------------------------------------- the runner


def make(case: Case, place: Path) -> str:
    """Makes a case's files in a new folder; returns the data source."""
    place.mkdir(parents=True)
    path = place / case.name
    if isinstance(case.content, bytes):
        path.write_bytes(case.content)
    else:
        case.content(path)
    return str(path)


def outcome(case: Case, source: str, tokenizer: Any) -> dict[str, Any]:
    """Prepares a case in this process: the error, or the texts of the documents."""
    from tpu_kit.config.loader import load_config
    from tpu_kit.data.prepare import prepare

    settings = {"source": source, "eval_rows": 0, "max_length": 8192, "packing": False} | case.settings
    try:
        made = prepare(load_config(None, {f"data.{name}": value for name, value in settings.items()}).data, tokenizer)
    except ValueError as error:
        return {"refused": str(error)}
    except BaseException as error:
        return {"raised": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-1500:]}
    xla = sys.modules.get("torch_xla")
    assert xla is None or not xla._XLAC._xla_runtime_is_initialized(), "preparing data touches no device"
    texts = []
    for number in range(len(made.train.documents)):
        ids, loss = made.train.document(number)
        words = [tokenizer.decode(ids[part].tolist()) for part in (~loss, loss)]
        prompt = words[0].partition("user\n")[2].partition("<|im_end|>")[0]
        texts.append(f"{prompt}|{words[1].removesuffix('<|im_end|>')}")
    return {"texts": texts, "skipped": getattr(made.report, "skipped", 0), "report": str(made.report)}


def judge(case: Case, found: dict[str, Any]) -> str:
    """Describes the error in an outcome; empty if it is right."""
    import re

    if "refused" in found:
        text = found["refused"]
        if case.refused is None:
            return f"refused: {text}"
        if "Traceback" in text or len(text) > 2500:
            return f"no text for a user: {text}"
        name = case.name.replace("*.", ".")
        if name not in text:
            return f"does not name the file: {text}"
        return "" if re.search(case.refused, text, re.DOTALL) else f"refused with another text: {text}"
    if "texts" not in found:
        return str(found)
    if case.refused is not None:
        return f"passed silently: {str(found)[:600]}"
    if case.settings.get("max_length") is None and tuple(found["texts"]) != case.texts:
        return f"other texts: {str(found['texts'])[:600]}"
    if len(found["texts"]) != len(case.texts) or found["skipped"] != case.skipped:
        return f"{len(found['texts'])} documents, {found['skipped']} skipped"
    return ""


def main(place: Path, names: list[str]) -> None:
    os.environ["HF_DATASETS_CACHE"] = str(place / "cache")
    import datasets

    import tpu_kit.data.prepare  # noqa: F401 - before the forks
    from tests.support.tiny_tokenizer import tiny_tokenizer

    datasets.disable_progress_bars()
    tokenizer = tiny_tokenizer()
    for number, name in enumerate(names):
        case, told = CASES[name], place / f"{number}.json"
        source = make(case, place / str(number))
        pid = os.fork()
        if not pid:
            log = os.open(place / f"{number}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            with told.open("w") as stream:
                if case.unprivileged and os.geteuid() == 0:  # root may read every file
                    os.setuid(65534)
                json.dump(outcome(case, source, tokenizer), stream)
            os._exit(0)
        begun, ended, status = time.monotonic(), 0, 0
        while not ended:
            ended, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.002)
            if not ended and time.monotonic() - begun > SECONDS:
                os.kill(pid, 9)
        found = json.loads(told.read_text()) if status == 0 else {"ended": f"status {status}"}
        print(json.dumps({"name": name, "wrong": judge(case, found)} | found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
