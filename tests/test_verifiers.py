"""Which answers are correct, and which reasoning is well-formed."""

from __future__ import annotations

from typing import Any

import pytest

from tpu_kit.config import DataConfig
from tpu_kit.verifiers import verify, well_formed

OTHER = DataConfig(source="rows.jsonl")


@pytest.mark.parametrize(
    ("expected", "text", "correct"),
    [
        ("18", "18", True),
        ("18", "<think>\n9 * 2 = 18\n</think>\n18.", True),
        ("18", "<think>\n18\n</think>\n19", False),
        ("18", "<think>\n18", False),  # still thinking
        ("18", "<think>a</think>b<think>18", False),
        ("18", "two times nine\n</think>\n18", True),  # the prompt had opened the reasoning
        ("1,000", "$1000.00", True),
        ("1000", "1,000", True),
        ("1000", "1,00", False),
        ("-5", "\N{MINUS SIGN}5", True),
        ("-5", "-$5", True),
        ("50%", "50 %.", True),
        ("0.5", "1/2", True),
        ("0.1", ".10", True),
        ("1", "1/0", False),
        ("18", "18 apples", False),
        ("12", "1 2", False),
        ("1", "1e0", False),  # so that 1e999999999 is not worked out
        ("7", "9" * 5000, False),
        ("72", "48 / 2 = 24\n48 + 24 = 72\n#### 72", True),
        ("so 48 + 24 = 72\n#### 72", "72", True),
        ("72", r"It is \boxed{72}.", True),
        ("72", "Therefore the answer is 72. Good luck!", True),
        ("7.5", "**Answer:** 7.5", True),
        ("72", "Is the answer is 71? No: the answer is 72.\n", True),
        ("72", "The answer is 71.", False),
        ("(B)", "B", True),
        ("(B)", "(b)", True),
        ("B", "(B) Paris", True),
        ("B", "b) Paris", True),
        ("(B)", "The answer is (B).", True),
        ("(B)", "Because", False),
        ("(B)", "(C)", False),
        ("A", "A man", False),
        ("Yes", "yes.", True),
        ("Yes", "no", False),
        ("New  York", '"new york"', True),
        ("New York", "York", False),
        (18, "18", True),
        (18.0, "18", True),
        (None, "18", None),
        (" ", "18", None),
    ],
)
def test_verify(expected: Any, text: str, correct: bool | None) -> None:
    assert verify({"answer": expected}, text, OTHER) is correct


def test_a_row_without_an_answer_is_not_judged() -> None:
    assert verify({"messages": []}, "18", OTHER) is None


def test_embedded_rows_are_judged_by_their_own_rule() -> None:
    text = "The answer is 18."
    assert verify({"answer": "18"}, text, DataConfig()) is False
    assert verify({"answer": "18"}, text, DataConfig(eval_source="rows.jsonl")) is True
    assert verify({"answer": "18"}, text, DataConfig(source="rows.jsonl", eval_source="embedded")) is False
    assert (
        verify({"answer": "18"}, "<t>\n9 * 2 = 18\n</t>\n18", DataConfig(think_open="<t>", think_close="</t>")) is True
    )


@pytest.mark.parametrize(
    ("text", "well"),
    [
        ("<think>\na\n</think>\n18", True),
        (" <think>a</think>18\n", True),
        ("18", False),
        ("<think>\na\n</think>\n", False),
        ("<think>\n\n</think>\n18", False),
        ("<think>a", False),
        ("a</think>18", False),
        ("First: <think>a</think>18", False),
        ("<think>a</think><think>b</think>18", False),
        ("<think>a</think>18</think>", False),
    ],
)
def test_well_formed(text: str, well: bool) -> None:
    assert well_formed(text, OTHER) is well
