"""Several sources in one run: their shares of an epoch, their order, and refusals."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.child_processes import REPOSITORY
from tests.support.tiny_tokenizer import tiny_tokenizer
from tpu_kit.config.loader import load_config
from tpu_kit.data import tokenizing
from tpu_kit.data.batching import Update, rows_of
from tpu_kit.data.prepare import Prepared, prepare


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sums, texts and chats; two chats ask questions of the sums."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    write("a.jsonl", sums(40))
    write("b.jsonl", sums(60, 100, "It is one more. "))
    write("t.jsonl", [{"text": f"Two and {i} make {i + 2}. " * (i % 3 + 1)} for i in range(30)])
    asked = [f"What is {i} + 1?" for i in (3, 4)] + [f"Who are you, {i}?" for i in range(18)]
    write("c.jsonl", [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"I, {i}."}]}
                      for i, text in enumerate(asked)])  # fmt: skip
    return tmp_path


def sums(count: int, start: int = 0, why: str = "One more. ") -> list[dict[str, Any]]:
    return [
        {"question": f"What is {i} + 1?", "reasoning": why * (i % 5 + 1), "answer": str(i + 1), "level": (i * 7) % 10}
        for i in range(start, start + count)
    ]


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def made(source: Any, tokenizer: Any = None, **settings: Any) -> Prepared:
    values = {"source": source, "max_length": 128, "eval_rows": 0} | settings
    return prepare(load_config(None, values).data, tokenizer or tiny_tokenizer())


def times(prepared: Prepared) -> Counter[str]:
    """The number of times that an epoch has each row, by the row's name."""
    data = prepared.train
    return Counter(prepared.place(row) for packed in range(len(data)) for row in data.source_rows(packed))


def of_source(prepared: Prepared, name: str) -> list[int]:
    return [count for row, count in times(prepared).items() if row.endswith(f" of {name}")]


@pytest.mark.parametrize("settings", [{}, {"eval_rows": 9}, {"packing": False}], ids=str)
def test_equal_weights_are_the_concatenation(settings: dict[str, Any]) -> None:
    write("both.jsonl", [*sums(40), *sums(60, 100, "It is one more. ")])
    whole = made("both.jsonl", **settings)
    for source in (["a.jsonl", "b.jsonl"], [{"source": "a.jsonl", "weight": 1}, {"source": "b.jsonl", "repeat": 1}]):
        mix = made(source, **settings)
        assert mix.fingerprint == whole.fingerprint and mix.eval_rows == whole.eval_rows
        assert (mix.report.tokens, mix.report.rows_used) == (whole.report.tokens, whole.report.rows_used)
        for ours, other in zip(*(one.train.tensors(np.arange(len(whole.train))).values() for one in (mix, whole)),
                               strict=True):  # fmt: skip
            assert (ours == other).all()
    assert made(["a.jsonl"]).fingerprint == made("a.jsonl").fingerprint and made(["a.jsonl"]).mix is None


def test_weights_repeat_rows_or_keep_a_share(folder: Path) -> None:
    mix = made([{"source": "a.jsonl", "weight": 2.5}, {"source": "b.jsonl", "weight": 0.25}, "t.jsonl"])
    assert sorted(of_source(mix, "a")) == [2] * 20 + [3] * 20
    assert of_source(mix, "b") == [1] * 15 and of_source(mix, "t") == [1] * 30
    sources = {one.name: (one.rows_read, one.rows_used, one.times) for one in mix.report.sources}
    assert sources == {"a": (40, 40, 2.5), "b": (60, 15, 0.25), "t": (30, 30, 1.0)}
    one, other = (made([{"source": "b.jsonl", "weight": 0.25}, "a.jsonl"], seed=seed) for seed in (0, 1))
    assert times(one) != times(other), "the share is drawn by the seed"
    assert times(one) == times(made([{"source": "b.jsonl", "weight": 0.25}, "a.jsonl"]))
    assert mix.report.tokens == sum(mix.report.lengths), "each document once"
    epoch = int(mix.train.row_tokens.sum())
    assert epoch == sum(one.tokens for one in mix.report.sources) > mix.report.tokens


@pytest.mark.parametrize(
    ("shares", "others"), [([0.3], ["b.jsonl"]), ([0.8], ["b.jsonl"]), ([0.25, 0.75], []), ([0.02], ["a.jsonl"])]
)
def test_shares_of_tokens_are_met_within_one_row(shares: list[float], others: list[str]) -> None:
    names = ["t.jsonl", "c.jsonl"][: len(shares)]
    mix = made([*({"source": name, "tokens": share} for name, share in zip(names, shares, strict=True)), *others])
    total = sum(one.tokens for one in mix.report.sources)
    longest = max(mix.report.lengths)
    for share, one in zip(shares, mix.report.sources, strict=False):
        assert abs(one.tokens - share * total) <= longest, one
    if not others:
        assert [one.times for one in mix.report.sources if one.times == 1], "one of them is trained whole"


def test_questions_are_held_out_over_all_sources() -> None:
    mix = made(["a.jsonl", "c.jsonl", "b.jsonl"], eval_rows=60)
    held = {str(asked[-1]["content"]) for asked in mix.eval_asked}
    names = [mix.eval_source(row) for row in range(len(mix.eval_rows))]
    assert {*names} == {"a", "b", "c"} and len(mix.eval_rows) == 60
    decode = mix.encoder.tokenizer.decode
    trained = " ".join(decode(mix.train.document(i)[0]) for i in range(len(mix.train.documents)))
    assert not [text for text in held if f"{text}<|im_end|>" in trained]
    both = [row for row in range(40) if (text := f"What is {row} + 1?") in held and row in (3, 4) and text]
    assert both, "one of the two that both ask is held out"
    for row in mix.eval_rows[:5]:  # each row is read by the columns of its own source
        assert row.get("answer")
    for name, rows in mix.eval_parts().items():
        found = {mix.eval_mix.names[int(mix.eval_mix.of(row))] for one in rows for row in mix.eval.source_rows(one)}
        assert found == {name}
    lighter = made(["a.jsonl", {"source": "c.jsonl", "weight": 3}, {"source": "b.jsonl", "weight": 0.5}], eval_rows=60)
    assert lighter.eval_prompts == mix.eval_prompts, "another mix is measured by the same questions"


def test_another_mix_is_not_tokenised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made(["a.jsonl", "b.jsonl"])

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(tokenizing, "_tokenize_rows", fails)
    assert made([{"source": "b.jsonl", "weight": 2}, "a.jsonl"]).report.rows_used == 100
    assert made("a.jsonl").report.rows_used == 40


def test_each_source_has_settings_of_its_own() -> None:
    write("odd.jsonl", [{"frage": f"{i}?", "antwort": "yes"} for i in range(9)])
    mix = made([
        {"source": "odd.jsonl", "columns": {"question": "frage", "answer": "antwort"}, "system_prompt": "Be brief.",
         "loss_on": "all", "name": "odd one"},
        {"source": "a.jsonl", "split": "train[:5]"}, {"source": "a.jsonl", "split": "train[5:]", "format": "cot"},
    ])  # fmt: skip
    texts = [mix.encoder.tokenizer.decode(mix.train.document(i)[0]) for i in range(49)]
    assert texts[0].startswith("<|im_start|>system\nBe brief.<|im_end|>") and texts[9].startswith("<|im_start|>user")
    assert mix.train.document(0)[1][1:].all() and not mix.train.document(9)[1][1:].all()
    assert [one.name for one in mix.report.sources] == ["odd one", "a", "a#2"]
    text = str(mix)
    assert "source           odd one: cot (question=frage, answer=antwort)" in text
    assert "mix              source   rows      times  tokens  of all" in text and "a#2      35 of 35" in text


def test_the_mix_of_the_readme_is_read(folder: Path) -> None:
    text = (REPOSITORY / "tpu_kit/data/README.md").read_text()
    (block,) = re.findall(r"```yaml\n(data:.*?)```", text, re.DOTALL)
    (folder / "run.yaml").write_text(block)
    data = load_config("run.yaml").data
    assert [one.weight for one in data.mix] == [2.5, 0.1, None] and data.mix[2].tokens == 0.3
    assert data.source_names == ("chats", "gsm8k:main", "books")
    assert [one.format for one in data.by_source] == ["auto", "auto", "text"]


def test_rows_follow_the_order_of_their_sources() -> None:
    def epoch(source: Any, number: int = 0, **settings: Any) -> list[list[str]]:
        mix = made(source, **settings)
        config = load_config(None, {"source": source, "max_length": 128} | settings).data
        rows = rows_of(Update(1, number, 0, 1, len(mix.train)), len(mix.train), config, mix.train.grouping)
        assert sorted(rows) == list(range(len(mix.train)))
        return [[mix.place(row).partition(" of ")[2] for row in mix.train.source_rows(packed)] for packed in rows]

    sources = ["b.jsonl", "a.jsonl", "t.jsonl"]
    assert any(len({*row}) > 1 for row in epoch(sources)), "a row has examples of several sources"
    assert all(len({*row}) == 1 for row in epoch(sources, pack_apart=True))
    names = [row[0] for row in epoch(sources, order="sequence")]
    assert names == sorted(names, key=["b", "a", "t"].index)
    turns = [row[0] for row in epoch(sources, order="round_robin", packing=False)]
    assert turns[:90] == ["b", "a", "t"] * 30 and turns[90:] == ["b", "a"] * 10 + ["b"] * 20
    first, second = (made(sources, order="sequence") for _ in range(2))
    assert first.fingerprint == second.fingerprint != made(sources, pack_apart=True).fingerprint
    assert epoch(sources, 0, order="sequence", packing=False) == epoch(sources, 1, order="sequence", packing=False)


def test_a_curriculum_trains_the_smallest_numbers_first() -> None:
    def levels(**settings: Any) -> tuple[list[list[int]], list[int]]:
        values = {"source": ["a.jsonl", "b.jsonl"], "curriculum": "level", "max_length": 128, "eval_rows": 0} | settings
        config = load_config(None, values).data
        data = prepare(config, tiny_tokenizer()).train
        level = [row["level"] for row in [*sums(40), *sums(60, 100)]]
        order = rows_of(Update(1, 0, 0, 1, len(data)), len(data), config, data.grouping)
        return [[level[row] for row in data.source_rows(packed)] for packed in order], order.tolist()

    alone, order = levels(packing=False)
    assert [row[0] for row in alone] == sorted(row[0] for row in alone) and order != sorted(order)
    packed, _ = levels()
    means = [sum(row) / len(row) for row in packed]
    half = len(means) // 2
    assert sum(means[:half]) / half + 2 < sum(means[half:]) / (len(means) - half)
    apart = made(["a.jsonl", "b.jsonl"], curriculum="level", pack_apart=True).train
    assert apart.grouping is not None and len({*apart.grouping.of_rows.tolist()}) > 1
    for row in range(len(apart)):
        assert len({number < 40 for number in apart.source_rows(row)}) == 1
    one = made("a.jsonl", curriculum="level", packing=False)
    assert one.train.grouping is not None and one.fingerprint != made("a.jsonl", packing=False).fingerprint
    with pytest.raises(ValueError, match=r"a.jsonl: data.curriculum=answr: no such column; the data has question, rea"):
        made("a.jsonl", curriculum="answr")
    with pytest.raises(
        ValueError, match=r"b.jsonl: data.curriculum=reasoning: row 0 holds 'It is one more. ', not a number"
    ):
        made("b.jsonl", curriculum="reasoning")


def test_a_split_of_each_source_is_evaluated() -> None:
    """Two parts of one data set share its evaluation split."""
    for name, start in (("one", 0), ("two", 60)):
        Path(name).mkdir()
        write(f"{name}/train.jsonl", sums(40, start))
        write(f"{name}/test.jsonl", sums(12 if name == "one" else 6, 200 + start))
    source = [{"source": "one", "split": "train[:20]"}, {"source": "one", "split": "train[20:]"}, "two"]
    mix = made(source, eval_split="test", eval_rows=None)
    assert [one.rows_used for one in mix.report.sources] == [20, 20, 40]
    assert Counter(mix.eval_source(row) for row in range(len(mix.eval_rows))) == {"one": 12, "two": 6}


def test_all_problems_of_all_sources_are_told_at_once() -> None:
    write("none.jsonl", [])
    write("wrong.jsonl", [{"question": "q", "answer": ""}, {"question": "q", "answer": "a"}])
    sources = ["a.jsonl", "none.jsonl", "lost.jsonl", {"source": "./a.jsonl", "name": "again"}, "wrong.jsonl"]
    with pytest.raises(ValueError, match=r"^4 problems of the sources:") as caught:
        made(sources)
    lines = str(caught.value).split("\n  - ")[1:]
    assert lines[0].startswith("none: data source") and "the file is empty" in lines[0]
    assert lines[1].startswith("lost: data source lost.jsonl: there is no such file")
    assert lines[2] == "again and a have the same rows: keep one, with repeat: 2 to train it twice"
    assert lines[3].startswith("wrong: wrong.jsonl: 1 of 2 rows cannot be used: wrong.jsonl, line 1: column 'answer'")
    refusing = tiny_tokenizer("{% for m in messages %}{% if 'Who' in m.content %}{{ raise_exception('no') }}{% endif %}"
                              "<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
                              "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")  # fmt: skip
    with pytest.raises(ValueError, match=r"^c: c.jsonl: 18 of 20 rows cannot be used: c.jsonl, line 3: .*no"):
        made(["a.jsonl", "c.jsonl"], refusing)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ([{"source": "a.jsonl", "weight": 0.001}, {"source": "b.jsonl", "weight": 0.001}],
         "2 problems of the sources:\n  - a: weight=0.001 leaves none of its 40 rows; set 0.03 or more, or remove it"),
        ([{"source": "t.jsonl", "tokens": 0.0001}, "a.jsonl"],
         r"t: tokens=0.0001 of [\d,]+ tokens are 0, and its shortest row has \d+, so no row meets that; raise it to"),
    ],
)  # fmt: skip
def test_weights_and_shares_that_leave_none(source: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        made(source)


def test_a_source_without_a_row_to_train_is_told() -> None:
    write("long.jsonl", [{"question": "Why? " * 200, "answer": "a"}])
    with pytest.raises(ValueError, match="long: none of its 1 rows is left: they are held out or too long; raise data"):
        made(["a.jsonl", "long.jsonl"], too_long="drop")


def test_prompts_of_a_run_that_samples_are_repeated_by_weight() -> None:
    config = load_config(None, {"source": [{"source": "a.jsonl", "weight": 1.5}, "c.jsonl"], "eval_rows": 0,
                                "max_length": 128}).data  # fmt: skip
    tasks = prepare(config, tiny_tokenizer(), max_prompt=100).tasks
    assert tasks is not None and Counter(Counter(tasks.numbers).values()) == {1: 40, 2: 20}
    assert len(tasks.rows.rows) == 80 and tasks.rows.prompts[0].endswith("assistant\n")
