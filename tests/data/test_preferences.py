"""Rows with a chosen and a rejected reply, in the forms of data sets and other trainers, become units of packed
rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.given_rows import prepare_rows
from tests.support.tiny_tokenizer import tiny_tokenizer
from tpu_kit.config.loader import DataConfig
from tpu_kit.config.named_values import check_roles
from tpu_kit.data.pairs import PairLayout
from tpu_kit.data.prepare import Prepared

SHARED, APART = PairLayout(True), PairLayout(False)
Q, GOOD, BAD = "What is 2 + 3?", "It is 5.", "It is 6."
USER, GOOD_TURN, BAD_TURN = (
    {"role": role, "content": text} for role, text in (("user", Q), ("assistant", GOOD), ("assistant", BAD))
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def prepared_of(rows: list[Any], layout: PairLayout | None = SHARED, **settings: Any) -> Prepared:
    config = DataConfig(**{"format": "preference", "max_length": 128, "eval_rows": 0} | settings)
    return prepare_rows(config, tiny_tokenizer(), rows, pairs=layout)


def texts_of(prepared: Prepared, number: int = 0) -> tuple[str, str, str]:
    """The texts of the prompt and of both replies of a unit."""
    ids, mask = prepared.train.document(number)
    tokenizer = prepared.encoder.tokenizer
    prefix, chosen, _ = prepared.train.documents.pairs[number].tolist()
    sides = slice(prefix, prefix + chosen), slice(prefix + chosen, len(ids))
    begin = int(np.argmax(mask[sides[0]]))
    prompt = tokenizer.decode([*ids[:prefix], *ids[sides[0]][:begin]])
    return prompt, *(tokenizer.decode(ids[side][mask[side]]) for side in sides)


CHAT = [
    pytest.param({"prompt": [USER], "chosen": [GOOD_TURN], "rejected": [BAD_TURN]}, id="TRL, messages"),
    pytest.param({"chosen": [USER, GOOD_TURN], "rejected": [USER, BAD_TURN]}, id="TRL, whole chats"),
    pytest.param({"prompt": Q, "chosen": [USER, GOOD_TURN], "rejected": [USER, BAD_TURN]}, id="UltraFeedback"),
    pytest.param({"prompt": Q, "chosen": [GOOD_TURN], "rejected": [BAD_TURN]}, id="a prompt as text, replies as turns"),
    pytest.param({"messages": [USER], "chosen": GOOD, "rejected": BAD}, id="messages and two texts"),
    pytest.param({"messages": [USER], "chosen": GOOD_TURN, "rejected": BAD_TURN}, id="messages and two turns"),
    pytest.param({"question": Q, "chosen": GOOD, "rejected": BAD}, id="Orca, without a system turn"),
    pytest.param({"question": Q, "chosen_response": GOOD, "rejected_response": BAD}, id="chosen_response"),
    pytest.param({"instruction": Q, "input": "", "chosen": GOOD, "rejected": BAD}, id="LLaMA-Factory, alpaca"),
    pytest.param(
        {"conversations": [{"from": "human", "value": Q}], "chosen": {"from": "gpt", "value": GOOD},
         "rejected": {"from": "gpt", "value": BAD}}, id="LLaMA-Factory, sharegpt"),
    pytest.param({"chosen": json.dumps([USER, GOOD_TURN]), "rejected": json.dumps([USER, BAD_TURN])}, id="JSON text"),
]  # fmt: skip


@pytest.mark.parametrize("row", CHAT)
def test_forms_of_chats_make_the_same_unit(row: dict[str, Any]) -> None:
    prepared = prepared_of([row])
    wanted = prepared_of([{"prompt": [USER], "chosen": [GOOD_TURN], "rejected": [BAD_TURN]}])
    assert np.array_equal(prepared.train.documents.input_ids, wanted.train.documents.input_ids)
    assert np.array_equal(prepared.train.documents.pairs, wanted.train.documents.pairs)
    prompt, chosen, rejected = texts_of(prepared)
    assert Q in prompt and GOOD not in prompt and chosen.startswith(GOOD) and rejected.startswith(BAD)
    assert np.array_equal(prepared.questions.trained, wanted.questions.trained)


def test_a_system_turn_and_earlier_turns_belong_to_the_prompt() -> None:
    row = {"system": "Be brief.", "history": [["Hi", "Hello"]], "question": Q, "chosen": GOOD, "rejected": BAD}
    prompt, chosen, _ = texts_of(prepared_of([row]))
    assert all(text in prompt for text in ("Be brief.", "Hi", "Hello", Q)) and chosen.startswith(GOOD)
    config = prepared_of([{"question": Q, "chosen": GOOD, "rejected": BAD}], system_prompt="Be kind.")
    assert "Be kind." in texts_of(config)[0]


@pytest.mark.parametrize("eval_rows", [0, None])
def test_fine_tuning_needs_a_reply_that_is_not_labelled_as_bad(eval_rows: int | None) -> None:
    rows = [{"prompt": [USER], "completion": [BAD_TURN], "label": False}] * 3
    with pytest.raises(ValueError, match=r"all replies are labelled as bad, .*; dpo with losses=\[kto\] learns"):
        prepared_of(rows, None, format="unpaired", eval_rows=eval_rows)


def test_a_labelled_reply_that_repeats_its_prompt_is_read_without_it() -> None:
    rows = [{"prompt": [USER], "completion": [*before, GOOD_TURN], "label": True} for before in ([], [USER])]
    rows += [{"prompt": [USER], "completion": [BAD_TURN], "label": False}]
    prepared = prepared_of(rows, APART, format="unpaired")
    first, second = (texts_of(prepared, number)[:2] for number in (0, 1))  # the third text is another row's
    assert first == second and Q in first[0] and first[1].startswith(GOOD)


CALLING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("other", [2, 7])
def test_turns_with_other_calls_are_not_a_common_prompt(other: int) -> None:
    """Both chats have the same texts. The rejected one's own call was lost, and the chosen one's took its place."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CALLING
    row: dict[str, Any] = {}
    for name, number, last in (("chosen", 2, GOOD_TURN), ("rejected", other, BAD_TURN)):
        calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": number}}}]
        asked = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
        row[name] = [USER, asked, {"role": "tool", "content": "5"}, last]
    config = DataConfig(format="preference", max_length=512, eval_rows=0)
    if other != 2:
        with pytest.raises(ValueError, match=r"the chosen reply has several turns, .*; give a single turn"):
            prepare_rows(config, tokenizer, [row], pairs=SHARED)
        return
    prompt, chosen, rejected = texts_of(prepare_rows(config, tokenizer, [row], pairs=SHARED))
    assert '{"a": 2}' in prompt and chosen.startswith(GOOD) and rejected.startswith(BAD)


@pytest.mark.parametrize("columns", [("question", "context"), ("question", "passage"), ("instruction", "input")])
def test_a_question_is_asked_with_its_context_as_in_fine_tuning(columns: tuple[str, str]) -> None:
    """A passage comes before the question about it, and an instruction before its input, for both recipes."""
    row = dict(zip(columns, (Q, "Ann counts."), strict=True))
    pair = prepared_of([row | {"chosen": GOOD, "rejected": BAD}])
    alone = prepare_rows(DataConfig(max_length=128, eval_rows=0), tiny_tokenizer(), [row | {"output": GOOD}])
    ids, mask = alone.train.document(0)
    assert texts_of(pair)[0] == alone.encoder.tokenizer.decode(ids[: mask.argmax()])


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, ("The sky is", " blue.", " green.")),
        ({"chosen": "Human: Hi\n\nAssistant: Hello", "rejected": "Human: Hi\n\nAssistant: Help!"},
         ("Human: Hi\n\nAssistant:", " Hello", " Help!")),
        ({"chosen": "Blue", "rejected": "Green"}, ("", "Blue", "Green")),
    ],
)  # fmt: skip
def test_plain_text_is_not_rendered(row: dict[str, Any], wanted: tuple[str, str, str]) -> None:
    prepared = prepared_of([row])
    assert prepared.encoder.layout.turns_by == "none"
    eos = prepared.encoder.tokenizer.eos_token
    found = tuple(text.replace(eos, "") for text in texts_of(prepared))
    # Without a prompt no token predicts the first token.
    assert found == (wanted if wanted[0] else ("B", "lue", "reen"))


def test_columns_of_a_batch() -> None:
    """Each reply is a segment that sees the prompt; its loss equals the loss of prompt and reply alone."""
    rows = [
        {"question": Q, "chosen": GOOD, "rejected": BAD},
        {"question": "Say no.", "chosen": "No.", "rejected": "Yes!"},
    ]
    shared, apart = (prepared_of(rows, layout) for layout in (SHARED, APART))
    for prepared in (shared, apart):
        prepared.train.further.reference = np.array([[-1.0, -2.0], [-3.0, -4.0]], dtype=np.float32)
        batch = prepared.train.tensors(np.array([0, -1]))
        assert not any(batch[name][1].any() for name in ("pairs", "sign", "reference", "token_share", "segment_ids"))
        for pair in (1, 2):
            here = (batch["pairs"][0] == pair).numpy()
            number = int(prepared.train.documents_of(0)[pair - 1])
            sign, reference = batch["sign"][0].numpy(), batch["reference"][0].numpy()
            _, mask = prepared.train.document(number)
            assert (sign[here] != 0).sum() == mask.sum()
            wanted = [-1.0, -2.0] if number == 0 else [-3.0, -4.0]
            assert reference[here & (sign > 0)].sum() == wanted[0] and reference[here & (sign < 0)].sum() == wanted[1]
            assert (batch["token_share"][0].numpy()[here] > 0).sum() == (sign[here] > 0).sum()
    one, two = shared.train.tensors(np.array([0])), apart.train.tensors(np.array([0]))
    assert "prefix_ids" in one and "prefix_ids" not in two
    assert int((one["segment_ids"] > 0).sum()) < int((two["segment_ids"] > 0).sum())
    for name in ("sign", "token_share"):
        assert torch.equal(one[name][one[name] != 0], two[name][two[name] != 0])
    assert torch.equal(one["position_ids"][one["sign"] != 0], two["position_ids"][two["sign"] != 0])


def test_pairs_without_a_lesson_are_left_out_and_counted() -> None:
    rows = [
        {"question": Q, "chosen": GOOD, "rejected": BAD},
        {"question": "Same?", "chosen": "Yes.", "rejected": "Yes."},
        {"question": "Long?", "chosen": "x" * 40 + "a", "rejected": "x" * 40 + "b"},
        {"question": "y" * 90, "chosen": "Yes.", "rejected": "No."},
    ]
    prepared = prepared_of(rows, max_length=64)
    counts = prepared.report.pairs
    assert (counts.pairs, counts.equal, counts.cut_equal, counts.no_room) == (1, 1, 1, 1), counts
    text = str(prepared.report)
    assert "pairs            1, " in text and "1 have the same reply twice;" in text
    assert (
        "1 have the same reply twice after truncation" in text and "1 have a prompt that fills data.max_length" in text
    )
    with pytest.raises(ValueError, match=r"no pair is left of 1: 1 have the same reply twice, .* give other rows"):
        prepared_of(rows[1:2])


def test_the_longer_reply_is_cut_first() -> None:
    row = {"question": "Q", "chosen": "a" * 100, "rejected": "No."}
    prepared = prepared_of([row], max_length=64)
    assert prepared.train.documents.lengths.tolist() == [64] and prepared.report.truncated == 1
    prompt, chosen, rejected = texts_of(prepared)
    assert rejected.startswith("No.") and set(chosen) == {"a"} and "Q" in prompt


def test_held_out_questions_are_not_trained() -> None:
    rows = [{"question": f"What is {i % 10}?", "chosen": f"{i}.", "rejected": f"not {i}."} for i in range(40)]
    prepared = prepared_of(rows, eval_rows=3)
    assert len(prepared.eval.documents) == 3 and prepared.report.rows_used == 28
    assert not np.isin(prepared.questions.held_out, prepared.questions.trained).any()
    assert prepared.eval.further.scale == pytest.approx(3 / prepared.eval.further._counted.sum())


def test_a_run_without_pairs_uses_the_chosen_replies() -> None:
    prepared = prepared_of([{"question": Q, "chosen": GOOD, "rejected": BAD}], None)
    ids, mask = prepared.train.document(0)
    text = prepared.encoder.tokenizer.decode(ids)
    assert GOOD in text and BAD not in text and mask.any() and prepared.train.further is None
    assert "only the chosen replies are used; dpo compares both" in str(prepared.report)
    alone = prepare_rows(DataConfig(max_length=128, eval_rows=0), tiny_tokenizer(), [{"question": Q, "answer": GOOD}])
    assert alone.train.fingerprint() == prepared.train.fingerprint()


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": Q, "chosen": GOOD, "rejected": ""}, "column 'rejected' has no reply: ''; a pair needs a chosen"),
        ({"prompt": Q, "chosen": [GOOD], "rejected": [BAD, "It is 7."]}, "column 'rejected' holds 2 replies, but"),
        ({"prompt": Q, "chosen": [GOOD_TURN], "rejected": BAD}, "'chosen' and 'rejected' must both be text or"),
        ({"chosen": [GOOD_TURN], "rejected": [BAD_TURN]}, "begin with a reply, and the row has no prompt; name"),
        ({"chosen": [USER, GOOD_TURN], "rejected": [{"role": "user", "content": "Else?"}, BAD_TURN]},
         "the chosen and the rejected chat begin with different turns"),
        ({"messages": "Hi", "chosen": GOOD, "rejected": BAD}, "column 'messages'"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused_by_name(row: dict[str, Any], text: str) -> None:
    filler = {key: [USER] if key == "messages" else value for key, value in row.items()}
    filler |= {} if filler.get("rejected") else {"rejected": BAD}
    with pytest.raises(ValueError, match=text):
        prepared_of([row] if row.get("rejected") else [filler, row])


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (
            {"prompt": Q, "completion": GOOD, "label": True},
            "format preference needs chosen and rejected; .*for losses=.kto",
        ),
        ({"question": Q, "chosen": GOOD}, "format preference needs rejected"),
    ],
)
def test_rows_that_are_no_pairs_are_refused(columns: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        prepared_of([columns])


def test_columns_of_dpo_may_be_named_before_its_format_is_known() -> None:
    """A configuration is read before the command sets the format."""
    check_roles({"question": "q", "completion": "a", "label": "b"}, "auto")
    check_roles({"messages": "m", "chosen": "c", "rejected": "r"}, "auto")
    with pytest.raises(ValueError, match="names completion, messages"):
        check_roles({"messages": "m", "completion": "c"}, "auto")
