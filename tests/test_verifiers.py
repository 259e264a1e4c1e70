"""Which answers are correct, and which reasoning is well-formed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tpu_kit.config import DataConfig
from tpu_kit.verifiers import Verdict, judge, verifier_named, verify, well_formed

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


@pytest.mark.parametrize(
    ("rule", "expected", "text", "correct"),
    [
        ("auto", "18", "<think>a</think>The answer is 18.", True),
        ("exact", "New York", "<think>a</think> New York\n", True),
        ("exact", "New York", "new york", False),
        ("exact", "18", "The answer is 18", False),
        ("numeric", "18", "<think>19</think>That makes 18 apples.", True),
        ("numeric", "1000", "20 x 50 = $1,000.00", True),
        ("numeric", "-5", "so \N{MINUS SIGN}5 degrees", True),
        ("numeric", "0.5", "1/2 of it", True),
        ("numeric", "18", "18 and then 19", False),
        ("numeric", "18", "none", False),
        ("choice", "B", "(b) Paris", True),
        ("choice", "(B)", "C", False),
        (r"regex:= (\d+)", "18", "9 * 2 = 18, or 20 - 2 = 18 apples", True),
        (r"regex:= (\d+)", "18", "9 * 2 = 18, but 9 + 9 = 19", False),
        (r"regex:[A-D]\b", "(C)", "I choose C", True),
        ("regex:never", "18", "18", False),
        ("exact", "18", "<think>18", False),  # still thinking
        ("numeric", None, "18", None),
        ("choice", " ", "B", None),
    ],
)
def test_rules_by_name(rule: str, expected: Any, text: str, correct: bool | None) -> None:
    assert judge({"answer": expected}, text, OTHER, verifier_named(rule)) == Verdict(correct)


def test_what_a_verifier_raises_is_told() -> None:
    assert judge({"answer": "many"}, "18", OTHER, "numeric") == Verdict(
        None, "ValueError: the row's answer 'many' is no number"
    )
    assert "'many' is no letter of a choice" in judge({"answer": "many"}, "B", OTHER, "choice").error

    def broken(row: Mapping[str, Any], answer: str) -> bool:
        return bool(row["target"] in answer)

    assert judge({"answer": "1"}, "1", OTHER, broken) == Verdict(None, "KeyError: 'target'")
    assert judge({"answer": "1", "target": "x"}, "<think>y</think>x 1", OTHER, broken) == Verdict(True)
    found = judge({"answer": "1"}, "1", OTHER, lambda row, answer: "yes")
    assert found == Verdict(None, "TypeError: it gave 'yes'; it must give True, False, a share of 1, or None")


@pytest.mark.parametrize(("given", "correct"), [(1.0, True), (0.99, False), (1, True), (0, False), (None, None)])
def test_a_share_counts_only_if_it_is_all(given: float | None, correct: bool | None) -> None:
    assert judge({}, "18", OTHER, lambda row, answer: given) == Verdict(correct)


def test_a_users_function_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules_of_a_test.py").write_text(
        "def even(row, answer):\n    return int(answer) % 2 == 0\nkind = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rule = verifier_named("my_rules_of_a_test:even")
    assert callable(rule)
    verdicts = [judge({}, f"<think>a</think>{text}", OTHER, rule).correct for text in ("4", "5", "four")]
    assert verdicts == [True, False, None]
    for name, text in (
        ("my_rules_of_a_test:odd", "tracking.verifier=my_rules_of_a_test:odd: it cannot be imported"),
        ("my_rules_of_a_test:kind", "it is a int, not a function"),
        ("no_such_module_of_a_test:f", "it cannot be imported"),
        ("exakt", "there is no such rule; use auto, exact, numeric, choice, reasoning_gym, regex:PATTERN or module:"),
        ("regex:(", "tracking.verifier=regex:(: the pattern cannot be read: "),
    ):
        with pytest.raises(ValueError) as error:
            verifier_named(name)
        assert text in str(error.value)


def test_reasoning_gym_is_asked_for_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "reasoning_gym" else real(name, *a)
    )
    with pytest.raises(ValueError, match="needs the package reasoning-gym: pip install reasoning-gym"):
        verifier_named("reasoning_gym")


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs the package reasoning-gym")
def test_reasoning_gym_scores_the_answer_alone() -> None:
    import reasoning_gym

    row = reasoning_gym.create_dataset("leg_counting", size=1, seed=1)[0]
    answer, rule = row["answer"], verifier_named("reasoning_gym")
    for text, correct in ((f"<think>a</think>The answer is {answer}.", True), (f"about {answer} legs", False)):
        assert judge(row, text, OTHER, rule) == Verdict(correct)
    assert "no metadata.source_dataset" in judge({"answer": "1"}, "1", OTHER, rule).error
    assert "reasoning_gym" in sys.modules
