"""Sentences that are hard to read become no more: see `tests.support.prose`."""

from __future__ import annotations

from tests.support import prose

# Room -> the most sentences of the kinds together. A room that is rewritten lowers its figure.
MOST = {
    ".": 3, "notebooks": 10, "tests": 12, "tpu_kit": 0, "tpu_kit/assets": 2, "tpu_kit/config": 3, "tpu_kit/data": 0,
    "tpu_kit/distributed": 4, "tpu_kit/exporting": 0, "tpu_kit/extras": 0, "tpu_kit/generation": 4,
    "tpu_kit/machine": 0, "tpu_kit/model": 4, "tpu_kit/notebook": 2, "tpu_kit/planning": 10, "tpu_kit/recipes": 0,
    "tpu_kit/torch_tpu": 2, "tpu_kit/training": 3, "tpu_kit/xla": 0,
}  # fmt: skip


def test_hard_sentences_become_no_more() -> None:
    counts = {room: sum(map(len, kinds.values())) for room, kinds in prose.hard_sentences().items()}
    print(counts)
    assert counts.keys() == MOST.keys()
    assert {room: count for room, count in counts.items() if count > MOST[room]} == {}, "python -m tests.support.prose"


def test_the_patterns_find_what_they_are_for() -> None:
    text = "Of the rows some are left.\n\nIt says what that of it is.\n\n## What it is\n\n- the one that each, in turn"
    found = dict.fromkeys(prose.PATTERNS, 0)
    for sentence in prose.sentences(text):
        for kind, pattern in prose.PATTERNS.items():
            found[kind] += len(pattern.findall(sentence))
    assert found == dict.fromkeys(prose.PATTERNS, 1)
    source = '"""A docstring of four words."""\nraise ValueError(f"{x} is wrong, use y")  # a comment\n'
    assert [*prose.texts_of_module(source)] == ["a comment", "A docstring of four words.", "X is wrong, use y"]
    assert [*prose.texts_of_module(source, messages=False)] == ["a comment", "A docstring of four words."]


def test_a_draw_shows_public_functions_without_their_code() -> None:
    drawn = prose.drawn(1)
    assert drawn == prose.drawn(1) != prose.drawn(2) and len({place for place, _ in drawn}) == prose.DRAWN
    for place, text in drawn:
        name = place.rpartition(" ")[2].rpartition(".")[2]
        assert not name.startswith("_") and f"def {name}(" in text
