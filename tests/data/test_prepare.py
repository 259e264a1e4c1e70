"""From rows to packed batches, with all refusals on the way."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from tests.support.embedded_answers import is_correct
from tests.support.given_rows import examples_of, prepare_rows
from tests.support.real_rows import split_rows
from tests.support.tiny_tokenizer import CHATML, tiny_tokenizer
from tpu_kit.assets.embedded import model_dir
from tpu_kit.config.loader import DataConfig
from tpu_kit.data import tokenizing
from tpu_kit.data.batching import eval_batches, permutation
from tpu_kit.data.chat.chat_encoding import decoded_example
from tpu_kit.data.prepare import Prepared, prepare

ROWS = [
    {"question": f"What is {i} + 1?", "reasoning": "It is one more. " * (i % 7 + 1), "answer": i + 1} for i in range(60)
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def run(rows: Any = None, tokenizer: Any = None, **settings: Any) -> Prepared:
    config = DataConfig(**({"max_length": 256, "eval_rows": 0} | settings))
    return prepare_rows(config, tokenizer or tiny_tokenizer(), ROWS if rows is None else rows)


def documents(prepared: Prepared) -> list[list[int]]:
    return [prepared.train.document(i)[0].tolist() for i in range(len(prepared.train.documents))]


def test_prepare_and_report() -> None:
    made = run()
    report = made.report
    assert (report.rows_read, report.documents, report.held_out, report.truncated) == (60, 60, 0, 0)
    assert report.tokens == sum(report.lengths) == sum(len(ids) for ids in documents(made))
    assert 0 < report.loss_tokens < report.tokens and report.packed_rows == len(made.train) < 60
    assert report.fill == made.train.fill() > 0.9
    assert made.eval is None and made.eval_rows == [] and made.eval_report is None
    text = str(report)
    assert "60 read, 60 used" in text and "cot (question=question, reasoning=reasoning, answer=answer)" in text
    spans = decoded_example(made.encoder.tokenizer, made.example(3))
    assert spans[1] == ("<think>\n" + ROWS[3]["reasoning"] + "\n</think>\n4<|im_end|>", True)


@pytest.mark.parametrize(("rows", "given", "held"), [(60, None, 6), (5, None, 1), (60, 20, 20), (60, 0, 0)])
def test_a_tenth_of_the_questions_is_held_out_unless_it_is_said(rows: int, given: int | None, held: int) -> None:
    made = run(ROWS[:rows], eval_rows=given)
    assert (len(made.eval_rows), made.report.rows_used) == (held, rows - held)


def test_no_more_than_64_rows_are_held_out_by_default() -> None:
    made = run([{"text": f"text {i}"} for i in range(900)], eval_rows=None)
    assert (len(made.eval_rows), made.report.rows_used) == (64, 836)


def test_labels_of_batches_are_the_replies_alone() -> None:
    made = run()
    tokenizer = made.encoder.tokenizer
    for number, batch in enumerate(eval_batches(made.train, 0, 1, 2)):
        for place, (labels, segments) in enumerate(zip(batch["labels"], batch["segment_ids"], strict=True)):
            packed = 2 * number + place
            rows = made.train.source_rows(packed) if packed < len(made.train) else []
            for segment, row in enumerate(rows, start=1):
                learnt = labels[(segments == segment) & (labels != -100)]
                expected = f"<think>\n{ROWS[row]['reasoning']}\n</think>\n{ROWS[row]['answer']}<|im_end|>"
                assert tokenizer.decode(learnt) == expected


def test_the_same_again_and_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run()
    assert len(list((cache / "tpu_kit").glob("*.arrow"))) == 1

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(tokenizing, "_tokenize_rows", fails)
    second = run()
    assert second.fingerprint == first.fingerprint and documents(second) == documents(first)
    assert run(packing=False).fingerprint != first.fingerprint  # packed differently, but not tokenised again


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_on": "all"},
        {"think_open": "[think]"},
        {"system_prompt": "Think."},
        {"max_length": 64},
        {"format": "prompt_completion", "columns": {"prompt": "question", "completion": "reasoning"}},
        {"tokenizer": tiny_tokenizer("{{ '\n' }}" + CHATML)},
        {"tokenizer": tiny_tokenizer(special=("<|im_end|>", "<|im_start|>"))},
        {"rows": ROWS[:59]},
        {"rows": [*ROWS[:59], ROWS[59] | {"answer": 7}]},
    ],
)
def test_whatever_changes_the_tokens_is_not_read_from_the_cache(settings: dict[str, Any], cache: Path) -> None:
    assert run(**settings).fingerprint != run().fingerprint
    assert len(list((cache / "tpu_kit").glob("*.arrow"))) == 2


def test_several_processes_give_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone = run()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "other")
    assert run(num_proc=2).fingerprint == alone.fingerprint


def test_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    processes = [tokenizing._processes(rows, None) for rows in (100, 10_000, 30_000, 1_000_000)]
    assert processes == [None, None, 3, 8]
    assert tokenizing._processes(100, 4) == 4 and tokenizing._processes(3, 4) is None


def test_held_out_rows() -> None:
    rows = [*ROWS, ROWS[5] | {"question": "what  is 5 + 1?"}, ROWS[7]]  # the same questions, in other words
    made = run(rows, eval_rows=20)
    held = {row["question"].casefold() for row in made.eval_rows}
    trained = {rows[i]["question"].casefold() for i in made.train.documents.source_rows}
    assert len(made.eval_rows) == len(held) == len(made.eval_prompts) == 20 and made.eval is not None
    assert not {" ".join(q.split()) for q in held} & {" ".join(q.split()) for q in trained}
    assert made.report.held_out == 62 - made.report.documents >= 20
    assert made.eval_report is not None and made.eval_report.documents == 20
    again = run(rows[::-1], eval_rows=20)
    assert {" ".join(row["question"].casefold().split()) for row in again.eval_rows} == {
        " ".join(q.split()) for q in held
    }
    assert (
        made.eval_prompts[0] == f"<|im_start|>user\n{made.eval_rows[0]['question']}<|im_end|>\n<|im_start|>assistant\n"
    )
    numbers = [int(row["answer"]) for row in made.eval_rows]
    assert len({number < 30 for number in numbers[:8]}) == 2, "the first are a sample, though the source is sorted"
    assert {row["question"] for row in run(rows, eval_rows=20, seed=1).eval_rows} != held
    assert run(rows, eval_rows=0.33).eval_rows == made.eval_rows, "a share of 60 questions, rounded up"


def chat(*said: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]}


def test_chats_that_begin_alike_are_different_questions() -> None:
    rows = [chat(f"Hello {i % 4}", "Hi!", f"What is {i}?", f"{i}.") for i in range(100)]
    made = run([*rows, *rows[:30]], eval_rows=None)
    assert (made.report.rows_read, made.report.held_out - made.report.repeated) == (130, 10)
    again = sum(row["messages"] in [r["messages"] for r in rows[:30]] for row in made.eval_rows)
    assert made.report.repeated == again > 0 and made.report.rows_used == 120 - again
    more = f"; {again} more {'is' if again == 1 else 'are'} neither trained nor evaluated, because another held-out row"
    assert f"held out         10, a tenth of the 100 different questions{more} asks the same question\n" in str(made)


def test_a_chat_that_a_longer_one_begins_with_is_not_held_out() -> None:
    """The longer chat is trained on its reply."""
    talks = [[f"Hello {i}", "Hi!", f"What is {i}?", f"{i}.", "Sure?", "Yes."] for i in range(12)]
    rows = [chat(*talk[:end]) for talk in talks for end in (2, 4, 6)]
    made = run(rows, eval_rows=8)
    assert len(made.eval_rows) == 8 and all(len(row["messages"]) == 6 for row in made.eval_rows)
    other = run(DatasetDict(train=Dataset.from_list(rows[:3]), test=Dataset.from_list(rows)), eval_split="test")
    assert other.eval_report is not None and other.eval_report.seen_in_training == 3
    talk = DatasetDict(train=Dataset.from_list(rows[2:3]), test=Dataset.from_list(rows))
    other = run(talk, eval_split="test")
    assert other.eval_report is not None and other.eval_report.seen_in_training == 3


def test_evaluation_rows_have_the_names_of_their_roles() -> None:
    rows = [{"problem": f"{i}?", "rationale": "r", "target": i} for i in range(9)]
    (row,) = run(rows, eval_rows=1).eval_rows
    assert row["question"] == row["problem"] and row["answer"] == str(row["target"]) and row["reasoning"] == "r"
    (row,) = run([{"question": f"{i}?", "answer": f"so\n#### {i}"} for i in range(9)], eval_rows=1).eval_rows
    assert (row["reasoning"], row["answer"] + "?") == ("so", row["question"])


def test_questions_of_another_evaluation_source_that_were_trained_on_are_dropped(tmp_path: Path) -> None:
    path = str(tmp_path / "held.jsonl")
    Dataset.from_list([*ROWS[:10], {"question": "New?", "reasoning": "r", "answer": 1}]).to_json(path)
    made = run(eval_source=path)
    assert [row["question"] for row in made.eval_rows] == ["New?"]
    assert made.eval_report is not None
    assert (made.eval_report.rows_read, made.eval_report.seen_in_training) == (11, 10)
    assert made.report.held_out == 0
    Dataset.from_list(ROWS[:10]).to_json(path)
    with pytest.raises(ValueError, match=r"every question of the evaluation rows .* is in the training rows too"):
        run(eval_source=path)


def test_splits_of_a_dataset_dict() -> None:
    data = DatasetDict(train=Dataset.from_list(ROWS[:50]), test=Dataset.from_list(ROWS[50:]))
    made = run(data, eval_split="test")
    assert (made.report.rows_read, len(made.eval_rows)) == (50, 10)
    with pytest.raises(ValueError, match="there is no split 'dev'; the data has train, test"):
        run(data, split="dev")


def test_embedded_fills_98_percent() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    made = prepare(DataConfig(split="train[:1000]"), tokenizer)
    assert made.report.fill >= 0.98
    assert len(made.eval_rows) == 64 and made.eval_report is not None and made.eval_report.seen_in_training == 0
    ((ids, mask),) = examples_of(made.encoder, made.eval_rows[0])
    assert is_correct(made.eval_rows[0], tokenizer.decode([i for i, loss in zip(ids, mask, strict=True) if loss]))


@pytest.mark.parametrize("too_long", ["truncate", "drop", "error"])
def test_rows_that_are_too_long(too_long: str) -> None:
    settings = {"too_long": too_long, "max_length": 100}
    lengths = run().report.lengths
    long = [i for i, n in enumerate(lengths) if n > 100]
    assert 0 < len(long) < 60
    if too_long == "error":
        worst = max(lengths)
        text = f"{len(long)} rows have more than data.max_length=100 tokens, the longest is row {lengths.index(worst)}"
        with pytest.raises(ValueError, match=text):
            run(**settings)
        return
    report = run(**settings).report
    kept = 60 if too_long == "truncate" else 60 - len(long)
    assert (report.truncated, report.dropped_too_long) == ((len(long), 0) if kept == 60 else (0, len(long)))
    assert report.documents == kept and (max(report.lengths) > 100) == (too_long == "truncate")


BOOKS = [{"text": "one two three " * 40 * i} for i in range(1, 5)]


def test_plain_text_is_cut_into_documents_of_max_length() -> None:
    tokenizer = tiny_tokenizer()
    whole = [tokenizer(row["text"])["input_ids"] + [tokenizer.eos_token_id] for row in BOOKS]
    length = len(whole[0]) - 1  # so that a cut leaves one token
    assert run(BOOKS, tokenizer, max_length=length, shuffle=False).report.documents == 4  # its tokens are in the cache
    made = run(BOOKS, tokenizer, max_length=length, too_long="split", shuffle=False)
    for row, tokens in enumerate(whole):
        parts = [made.train.document(i) for i in np.flatnonzero(made.train.documents.source_rows == row)]
        assert [token for ids, _ in parts for token in ids.tolist()] == tokens
        assert all(2 <= len(ids) <= length and not mask[0] and mask[1:].all() for ids, mask in parts)
    report = made.report
    assert (report.rows_used, report.tokens, report.all_tokens) == (4, sum(map(len, whole)), sum(map(len, whole)))
    assert f"4 read, 4 used as {report.documents} documents of data.max_length tokens at most\n" in str(report)
    assert "lost" not in str(report) and len(run(BOOKS, tokenizer, too_long="split", eval_rows=1).eval_rows) == 1
    with pytest.raises(ValueError, match=r"split cuts plain text \(format text\), and .* has the format cot: the rest"):
        run(too_long="split")


@pytest.mark.parametrize("too_long", ["truncate", "drop"])
def test_the_share_of_lost_tokens_is_told(too_long: str) -> None:
    made = run(BOOKS, too_long=too_long, max_length=500)
    read, lost = made.report.all_tokens, made.report.all_tokens - made.report.tokens
    assert lost > 0.1 * read and f": {lost:,} of {read:,} tokens lost ({lost / read:.1%}). WARNING: raise " in str(made)
    assert "raise data.max_length, or set data.too_long=split, which trains all tokens\n" in str(made)
    made = run(max_length=100)
    assert "tokens lost" in str(made) and "WARNING: raise data.max_length\n" in str(made)


def test_truncation_that_leaves_no_loss_drops_and_counts() -> None:
    rows = [*ROWS, {"question": "Why? " * 200, "reasoning": "r", "answer": 0}]
    made = run(rows)
    assert (made.report.dropped_no_loss, made.report.documents, made.report.truncated) == (1, 60, 0)
    assert 60 not in made.train.documents.source_rows
    with pytest.raises(
        ValueError, match=r"no loss tokens left: data.max_length=256 is too short for all 1 rows; the short"
    ):
        run(rows[60:])


def test_bad_rows_are_all_counted_and_named() -> None:
    rows = [{"question": f"q{i}", "reasoning": "r", "answer": "" if i % 2 else "a"} for i in range(20)]
    text = (
        r"10 of 20 rows cannot be used: row 1: column 'answer' is empty \(also row 3, row 5, row 7, row 9\); and 5 more"
    )
    with pytest.raises(ValueError, match=text):
        run(rows)


def with_bad_rows() -> list[dict[str, Any]]:
    """20 good rows, and bad ones before, between and behind them."""
    good = [row | {"answer": str(row["answer"])} for row in ROWS[:20]]
    empty = {"question": "q", "reasoning": "r", "answer": " "}
    return [empty, *good[:5], {**empty, "question": None}, *good[5:], empty]


def test_bad_rows_are_skipped_counted_and_shown() -> None:
    rows = with_bad_rows()
    with pytest.raises(ValueError, match=r"3 of 23 rows .*or skip them with data.on_bad_row=skip"):
        run(rows)
    made = run(rows, on_bad_row="skip")
    report = made.report
    assert (report.rows_read, report.documents, report.skipped, report.held_out) == (23, 20, 3, 0)
    assert report.skipped_rows[1] == "row 6: column 'question' is empty" and len(report.skipped_rows) == 3
    assert "23 read, 20 used" in str(report)
    assert "3 skipped (data.on_bad_row): row 0: column 'answer' is empty; row 6: " in str(report)
    # The remaining rows keep their numbers, and equal those prepared alone.
    assert made.train.documents.source_rows.tolist() == [i for i in range(23) if i not in (0, 6, 22)]
    alone = run([row for i, row in enumerate(rows) if i not in (0, 6, 22)])
    assert documents(made) == documents(alone) and "bad rows  " not in str(alone.report)
    assert made.fingerprint == alone.fingerprint != run(ROWS[:19]).fingerprint


def test_bad_rows_are_no_questions_to_hold_out() -> None:
    rows = with_bad_rows()
    made = run(rows, on_bad_row="skip", eval_rows=15)
    assert len(made.eval_rows) == 15 and all(row["answer"].strip() for row in made.eval_rows)
    assert made.eval_report is not None and (made.report.skipped, made.eval_report.skipped) == (3, 0)
    assert made.report.held_out == 15 and str(made).count("3 skipped") == 1
    assert made.report.documents == 5
    with pytest.raises(ValueError, match="there are 20 different questions"):
        run(rows, on_bad_row="skip", eval_rows=20)
    both = DatasetDict(train=Dataset.from_list(ROWS[20:40]), test=Dataset.from_list(rows))
    held = run(both.map(lambda row: {"answer": str(row["answer"])}), eval_split="test", on_bad_row="skip")
    assert held.eval_report is not None and held.eval_report.documents == 20
    assert (held.eval_report.skipped, held.eval_report.seen_in_training, held.report.skipped) == (3, 0, 0)


def test_no_more_than_half_of_the_rows_are_skipped() -> None:
    empty = {"question": "q", "reasoning": "r", "answer": ""}
    good = [row | {"answer": "a"} for row in ROWS[:4]]
    assert run([*good, *[empty] * 4], on_bad_row="skip").report.skipped == 4
    text = r"5 of 9 rows cannot be used: row 4: .*data.on_bad_row=skip skips at most half of the rows"
    with pytest.raises(ValueError, match=text):
        run([*good, *[empty] * 5], on_bad_row="skip")


def test_skipped_rows_of_files_keep_the_numbers_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(GOOD + "null\n\n" + GOOD + '{"question": "q"}\n' + GOOD)
    config = DataConfig(source=str(path), eval_rows=0, on_bad_row="skip")
    made = prepare(config, tiny_tokenizer())
    assert made.train.documents.source_rows.tolist() == [0, 2, 4]
    assert made.report.skipped_rows == (
        "rows.jsonl, line 2: a row must be an object, not null",
        "rows.jsonl, line 5: column 'answer' is empty",
    )
    sliced = prepare(DataConfig(source=str(path), split="train[2:]", eval_rows=0, on_bad_row="skip"), tiny_tokenizer())
    assert sliced.report.skipped_rows == ("rows.jsonl, line 5: column 'answer' is empty",)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="the data set given has no rows"):
        run([])
    with pytest.raises(
        ValueError, match=r"data.eval_rows=60 leaves nothing to train on: there are 60 different questions"
    ):
        run(eval_rows=60)
    with pytest.raises(ValueError, match=r"eval_rows=null leaves .* all rows ask the same question. Give others, .* 0"):
        run(ROWS[:1], eval_rows=None)
    with pytest.raises(ValueError, match=r"data.system_prompt needs chats"):
        run([{"text": "t"}], system_prompt="s")
    with pytest.raises(ValueError, match="missing columns"):
        run([{"a": 1}])


def test_text_needs_no_chat_template() -> None:
    made = run([{"text": "one two three"}, {"text": "four"}], tiny_tokenizer(None))
    assert made.encoder.tokenizer.chat_template is None and made.report.documents == 2
    with pytest.warns(UserWarning, match="no chat template"):
        run(tokenizer=tiny_tokenizer(None))


def test_order_of_the_replicas_names_source_rows() -> None:
    made = run(packing=False)
    assert "held" not in str(made), "none is held out"
    seen = [i for row in permutation(len(made.train), 0, 0) for i in made.train.source_rows(row)]
    assert sorted(seen) == list(range(60)) and not np.array_equal(seen, sorted(seen))


GOOD = '{"question": "What is 2 + 3?", "answer": "5"}\n'


@pytest.mark.parametrize(
    ("rows", "settings", "text"),
    [
        ('{"a": 1}\n', {}, r"missing columns: they fit no format; the data has a\. Name them"),
        (GOOD + '{"question": "q", "answer": true}\n', {}, r"line 2: column 'answer' holds true, a truth value"),
        (GOOD + "{bad}\n", {}, r"rows.jsonl, line 2, column 2: not valid JSON"),
        (GOOD, {"max_length": 8}, r"no loss tokens left: data.max_length=8 is too short for all 1 rows"),
        (GOOD, {"max_length": 1 << 20}, r"data.max_length=1048576 is longer than the \d+ positions of the model"),
        (GOOD, {"batch_size": 2}, r"data set smaller than one global batch: it has 1 packed rows, and an update takes"),
    ],
)  # fmt: skip
def test_bad_input_reaches_who_calls_train(
    rows: str, settings: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpu_kit import load_config, train

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "rows.jsonl").write_text(rows)
    config = load_config(
        None,
        {"source": str(tmp_path / "rows.jsonl"), "output_dir": str(tmp_path / "run"), "eval_rows": 0, "max_steps": 1,
         "device_type": "cpu", "num_replicas": 1, "batch_size": 1, "max_length": 128, **settings},
    )  # fmt: skip
    with pytest.raises(ValueError, match=text):
        train(config)
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("lm_eval", "reasoning_gym")), reason="needs their packages"
)
def test_rationales_fill_98_percent() -> None:
    """The rows of `make train-real`, with the embedded tokenizer."""
    from transformers import AutoTokenizer

    made = prepare_rows(DataConfig(), AutoTokenizer.from_pretrained(model_dir()), split_rows()["train"])
    assert made.report.fill >= 0.98
    assert made.report.documents > 1500
