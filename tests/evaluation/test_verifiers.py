"""Which answers are correct, and which reasoning is well-formed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tpu_kit.config.choices import VERIFIERS
from tpu_kit.config.loader import DataConfig
from tpu_kit.evaluation.verifiers import _RULES, Verdict, judge, verifier_named, verify, well_formed

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
        ("1", "1e999999999", False),  # it is not worked out
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
    assert found == Verdict(None, "TypeError: it returned 'yes'; return True, False, a number up to 1, or None")


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
        (
            "exakt",
            "'exakt' names no rule; use auto, exact, numeric, choice, math, reasoning_gym, regex:PATTERN or module:",
        ),
        ("regex:(", "tracking.verifier: 'regex:(' has a pattern that cannot be read ("),
    ):
        with pytest.raises(ValueError) as error:
            verifier_named(name)
        assert text in str(error.value)
    assert {"auto", *_RULES} == set(VERIFIERS)


@pytest.mark.parametrize(("rule", "package"), [("math", "math-verify"), ("reasoning_gym", "reasoning-gym")])
def test_a_package_is_asked_for_if_it_is_missing(rule: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = importlib.util.find_spec
    module = package.replace("-", "_")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == module else real(name, *a))
    with pytest.raises(ValueError, match=f"verifier={rule} needs the package {package}: pip install {package}"):
        verifier_named(rule)


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs the package reasoning-gym")
def test_reasoning_gym_scores_the_answer_alone() -> None:
    import reasoning_gym

    row = reasoning_gym.create_dataset("leg_counting", size=1, seed=1)[0]
    answer, rule = row["answer"], verifier_named("reasoning_gym")
    for text, correct in ((f"<think>a</think>The answer is {answer}.", True), (f"about {answer} legs", False)):
        assert judge(row, text, OTHER, rule) == Verdict(correct)
    assert "no metadata.source_dataset" in judge({"answer": "1"}, "1", OTHER, rule).error
    assert "reasoning_gym" in sys.modules


# What a model writes as an answer: LaTeX, signs of currencies and units, the forms of numbers.
ANSWERS = [
    # braces within the box
    ("3/4", r"\boxed{\frac{3}{4}}", True),
    (r"\frac{3}{4}", "0.75", True),
    (r"\frac{3}{4}", r"\boxed{\dfrac{3}{4}}", True),
    (r"\dfrac34", r"\boxed{\tfrac{3}{4}}", True),
    ("-3/4", r"\boxed{-\frac{3}{4}}", True),
    ("-3/4", r"\boxed{\frac{-3}{4}}", True),
    ("0.75", r"The answer is $\frac{3}{4}$.", True),
    (r"\frac{1}{3}", "0.333", False),
    ("1.5", r"\boxed{1\frac{1}{2}}", True),
    ("1 1/2", "3/2", True),
    (r"\sqrt{2}", r"\boxed{\sqrt{2}}", True),
    (r"\sqrt{2}", r"\boxed{\sqrt2}", True),
    (r"2\sqrt{3}", r"\boxed{2 \sqrt{3}}", True),
    (r"2\sqrt{3}", r"\boxed{3\sqrt{2}}", False),
    ("3", r"\boxed{2\sqrt{3}}", False),
    (r"\frac{\sqrt{3}}{2}", r"\boxed{\dfrac{\sqrt{3}}{2}}", True),
    (r"\pi", r"\boxed{\pi}", True),
    ("Paris", r"\boxed{\text{Paris}}", True),
    ("Paris", r"\boxed{\text{London}}", False),
    ("Paris", r"\boxed{\mathrm{Paris}}", True),
    ("B", r"\boxed{\text{B}}", True),
    ("B", r"\boxed{\textbf{(B)}}", True),
    ("(B)", r"\boxed{\text{(C)}}", False),
    ("B", r"\boxed{B}", True),
    ("B", r"\boxed{\text{B) Paris}}", True),
    (r"\left(3, \frac{\pi}{2}\right)", r"\boxed{(3,\frac{\pi}{2})}", True),
    ("x^2+1", r"\boxed{x^{2} + 1}", True),
    ("5", r"First \boxed{\frac{1}{2}}, then \boxed{5}", True),
    ("7", r"\boxed{7} and so \boxed{\frac{1", True),  # the second box is not closed
    ("4", r"\boxed{\boxed{4}}", True),
    # currencies, percent, units
    ("56", "5 6", False),
    ("5", "$5", True),
    ("$5", "5", True),
    ("$5", r"\$5", True),
    ("$5", "\N{EURO SIGN}5", False),
    ("5", "5 \N{EURO SIGN}", True),
    ("$5", "5%", False),
    ("50", r"\boxed{50\%}", True),
    ("50%", r"\boxed{50\%}", True),
    ("90", r"\boxed{90^\circ}", True),
    ("90", r"\boxed{90^{\circ}}", True),
    ("5", r"\boxed{5\text{ cm}}", False),
    ("5 cm", r"\boxed{5\,\text{cm}}", True),
    # numbers
    ("1500", "1.5e3", True),
    ("1500", "1.5E+3", True),
    ("1.5e3", "1,500", True),
    ("1500", r"\boxed{1.5 \times 10^{3}}", True),
    ("1500", r"$1.5\cdot10^3$", True),
    ("0.0015", r"\boxed{1.5\times 10^{-3}}", True),
    ("1000", r"\boxed{10^{3}}", True),
    ("103", r"\boxed{10^{3}}", False),
    ("1", "1e0", True),
    ("1234", r"\boxed{1,234}", True),
    ("1234", r"\boxed{1{,}234}", True),
    ("1234", r"\boxed{1\,234}", False),
    ("1234567.5", "1,234,567.50", True),
    ("1234", "12,34", False),
    ("-7", r"\boxed{-7}", True),
    ("7", r"\boxed{-7}", False),
    ("-7", "$-7$", True),
    ("-7", "-$7", True),
    ("0.5", "50%", False),
    ("1/2", ".5", True),
    ("2/4", "1/2", True),
    ("0", "-0", True),
    ("3", "1/0", False),
]

NUMERIC = [
    ("0.75", r"\boxed{\frac{3}{4}}", True),
    ("0.75", r"so it is $\frac{3}{4}$ of a cup", True),
    ("2", r"it is $\sqrt{2}$", False),
    ("3", r"\boxed{\sqrt{2 + 3}}", False),
    ("5", r"5 apples, so $3\sqrt{2}$", False),
    ("2", r"\boxed{x^2}", False),
    ("2", "y = 2x", False),
    ("10", r"2x = 10", True),
    ("6", "$5 $6", True),
    ("1500", "about 1.5e3 apples", True),
    ("1500", r"that is 1.5 \times 10^{3} m", True),
    ("5", r"\boxed{5\text{ cm}}", True),
    ("12", r"\boxed{12\text{ cm}^2}", True),
    ("1234", "in all 1,234 of them", True),
    ("-5", "so \N{MINUS SIGN}5 degrees", True),
    ("45", r"It costs $45$.", True),
    ("90", r"the angle is $90^\circ$", True),
    ("3", "1/0, 3", True),
]

BOTH = [
    ("4", r"\boxed{\frac{3}{4}}", False),
    ("2", r"\boxed{\sqrt{2}}", False),
    ("2", r"\boxed{\frac{\sqrt{3}}{2}}", False),
    ("56", "$5 $6", False),
]

CHOICE = [
    ("B", r"\boxed{\text{B}}", True),
    ("B", r"\boxed{\mathbf{(B)}}", True),
    ("B", r"The answer is $\boxed{\text{B}}$.", True),
    ("(B)", "(B)", True),
    ("B.", "B.", True),
    ("B", "**B**", True),
    ("B", "Option B", True),
    ("B", r"\boxed{\text{C}}", False),
    ("B", "Because", False),
    (r"\text{B}", "(b) Paris", True),
]

ALL = [
    (rule, *pair)
    for rule, pairs in (("auto", ANSWERS + BOTH), ("numeric", NUMERIC + BOTH), ("choice", CHOICE))
    for pair in pairs
]


@pytest.mark.parametrize(("rule", "expected", "text", "correct"), ALL)
def test_answers_as_models_write_them(rule: str, expected: str, text: str, correct: bool) -> None:
    assert judge({"answer": expected}, f"<think>a</think>{text}", OTHER, verifier_named(rule)) == Verdict(correct)


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs the package math-verify")
@pytest.mark.parametrize("threaded", [False, True])
def test_math_verify_compares_expressions(threaded: bool) -> None:
    """What the default takes for texts; also in a thread, as replicas of XLA:CPU are, where signals cannot be set."""
    pairs = [
        (r"\frac{1}{\sqrt{2}}", r"\boxed{\frac{\sqrt{2}}{2}}", True),
        ("2", r"\boxed{\sqrt{4}}", True),
        ("x^2+1", r"\boxed{1+x^{2}}", True),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", True),
        ("4", r"\boxed{\frac{3}{4}}", False),
        ("2", r"\boxed{\sqrt{2}}", False),
        ("3/4", "The answer is 0.75.", True),
    ]

    def work() -> list[Verdict]:
        return [judge({"answer": expected}, text, OTHER, verifier_named("math")) for expected, text, _ in pairs]

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(work).result() if threaded else work()
    assert found == [Verdict(correct) for _, _, correct in pairs]
