"""Correct answers and well-formed reasoning."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpu_kit.config.loader import DataConfig, load_config
from tpu_kit.config.named_values import VERIFIERS, imported
from tpu_kit.generation.evaluation.verifiers import Verdict, judge, verifier_named, well_formed

OTHER = DataConfig(source="rows.jsonl")


@pytest.mark.parametrize(
    ("expected", "text", "correct"),
    [
        ("18", "<think>\n9 * 2 = 18\n</think>\n18.", True),
        ("18", "<think>\n18\n</think>\n19", False),
        ("18", "<think>\n18", False),  # still thinking
        ("18", "<think>a</think>b<think>18", False),
        ("18", "two times nine\n</think>\n18", True),  # the prompt had opened the reasoning
        ("1", "1e999999999", False),  # it is not computed
        ("7", "9" * 5000, False),
        ("72", "#### 71 is a guess\nThe answer is 72.", True),
        ("71", "#### 71 is a guess\nThe answer is 72.", False),
        ("so 48 + 24 = 72\n#### 72", "72", True),
        ("5", "x = 5", True),
        ("A", "A: no. The right option is C", False),
        ("30", "12:30", False),
        ("3:30", "27:30", False),  # a duration
        ("0:30", "24:30", True),
        ("5", "The answer is not 5.", False),
        (18, "18", True),
        (18.0, "18", True),
        (None, "18", None),
        (" ", "18", None),
    ],
)
def test_verify(expected: Any, text: str, correct: bool | None) -> None:
    assert judge({"answer": expected}, text, OTHER).correct is correct


def test_a_row_without_an_answer_is_not_judged() -> None:
    assert judge({"messages": []}, "18", OTHER).correct is None


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
        ("numeric", "30", "12:30", False),
        ("numeric", "-5", "-$5", True),
        ("numeric", "2", "y = 2x", False),
        ("numeric", "2", r"it is $\sqrt{2}$", False),
        ("choice", "B", "(b) Paris", True),
        ("choice", "(B)", "C", False),
        ("choice", r"\text{B}", "(b) Paris", True),
        ("choice", "A", "A: no. The right option is C", False),
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
        None, "ValueError: the row's answer 'many' is not a number"
    )
    assert "'many' is not a letter of a choice" in judge({"answer": "many"}, "B", OTHER, "choice").error

    def broken(row: Mapping[str, Any], answer: str) -> bool:
        return bool(row["target"] in answer)

    assert judge({"answer": "1"}, "1", OTHER, broken) == Verdict(None, "KeyError: 'target'")
    assert judge({"answer": "1", "target": "x"}, "<think>y</think>x 1", OTHER, broken) == Verdict(True)
    found = judge({"answer": "1"}, "1", OTHER, lambda row, answer: "yes")
    assert found == Verdict(None, "TypeError: it returned 'yes'; return True, False, a number up to 1, or None")


@pytest.mark.parametrize(
    ("given", "correct"),
    [(1.0, True), (0.99, False), (1, True), (0, False), (None, None), (np.True_, True), (np.float32(0), False)],
)
def test_a_share_counts_only_if_it_is_all(given: Any, correct: bool | None) -> None:
    assert judge({}, "18", OTHER, lambda row, answer: given) == Verdict(correct)


@pytest.mark.parametrize("given", [math.nan, 100, "1"])
def test_what_is_no_score_is_not_a_wrong_answer(given: Any) -> None:
    found = judge({}, "18", OTHER, lambda row, answer: given)
    assert found.correct is None and f"it returned {given!r}; return True" in found.error


def test_a_users_function_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules_of_a_test.py").write_text(
        "def even(row, answer):\n    return int(answer) % 2 == 0\nkind = 3\n"
    )
    (tmp_path / "my_script_of_a_test.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    rule = verifier_named("my_rules_of_a_test:even")
    assert callable(rule)
    verdicts = [judge({}, f"<think>a</think>{text}", OTHER, rule).correct for text in ("4", "5", "four")]
    assert verdicts == [True, False, None]
    for name, text in (
        ("my_rules_of_a_test:odd", "tracking.verifier=my_rules_of_a_test:odd: it cannot be imported"),
        ("my_rules_of_a_test:kind", "it is a int, not a function"),
        ("no_such_module_of_a_test:f", "it cannot be imported"),
        ("my_script_of_a_test:f", "it cannot be imported (SystemExit: 0); name a function as module:function"),
        (
            "exakt",
            "'exakt' names no rule; use auto, exact, numeric, choice, math, reasoning_gym, regex:PATTERN or module:",
        ),
        ("regex:(", "tracking.verifier: 'regex:(' has a pattern that cannot be read ("),
    ):
        with pytest.raises(ValueError) as error:
            verifier_named(name)
        assert text in str(error.value)


def _last_word(row: Any, answer: str) -> bool:
    return answer.split()[-1] == row["answer"]


def test_a_new_rule_is_a_line_and_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(callable(imported(rule)) for rule in VERIFIERS.values())
    monkeypatch.setitem(VERIFIERS, "last_word", f"{__name__}:_last_word")
    config = load_config(None, ["tracking.verifier=last_word"])
    rule = verifier_named(config.tracking.verifier)
    assert judge({"answer": "five"}, "It is five", config.data, rule) == Verdict(True)
    assert judge({"answer": "five"}, "five it is", config.data, rule) == Verdict(False)


def test_a_package_is_asked_for_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "reasoning_gym" else real(name, *a)
    )
    with pytest.raises(ValueError, match=r"reasoning_gym needs the package reasoning-gym: pip install reasoning-gym"):
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


ANSWERS = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text().splitlines()]


def test_auto_agrees_with_a_reader() -> None:
    """Compares with labels of people: whether a reader of a reply takes its final answer for the expected one.

    Replies of SmolLM2-135M-Instruct to 35 questions in 5 forms (temperature 0.4), and replies written by hand.
    """
    assert len(ANSWERS) >= 1000 and len({row["text"] for row in ANSWERS if row["by"] != "hand"}) >= 100
    labels = Counter(row["correct"] for row in ANSWERS)
    wrong = [(row, judge({"answer": row["expected"]}, row["text"], OTHER)) for row in ANSWERS]
    wrong = [(row, verdict) for row, verdict in wrong if verdict != Verdict(row["correct"])]
    counts = Counter(row["correct"] for row, _ in wrong)
    assert counts[False] <= 0.01 * labels[False] and counts[True] <= 0.03 * labels[True], wrong


@pytest.mark.parametrize(
    ("expected", "text", "correct"),
    [
        ("3", r"\boxed{3}, that is \boxed{4", False),  # cut off: an earlier box does not count
        ("3", r"\boxed{3}, that is \boxed{}", False),
        ("3", "<answer>3</answer> or <answer>4", False),
        ("Rome", "<reasoning>Is it Oslo?</reasoning><answer>\nRome\n</answer>", True),
        ("Oslo", "<reasoning>The answer is Oslo.</reasoning>", False),
        ("7", r"\boxed{6, 7}", False),
        ("7", "6 or 7", False),
        ("7", r"\boxed{x > 7}", False),
        ("7", r"\boxed{7!}", False),
        ("7", r"\boxed{\pm 7}", False),
        ("80%", r"\boxed{0.8}", True),
        ("0.8", r"\boxed{80\%}", True),
        ("0.8", r"\boxed{8\%}", False),
        ("6 m", r"\boxed{6\text{ meters}}", True),
        ("6 m", r"\boxed{6\text{ cm}}", False),
        ("k - 3", r"\boxed{-3 + k}", True),
        ("oak, elm, ash", r"\boxed{\text{ash, oak, elm}}", True),
        ("4, 4, 5", r"\boxed{4, 5, 5}", False),
        (r"2 \pm \sqrt{3}", r"\boxed{2 - \sqrt{3}, 2 + \sqrt{3}}", True),
        ("x = 9", r"\boxed{9}", True),
        ("x = 9", r"\boxed{y = 9}", False),
        (r"\frac{1}{7^{40}}", r"\boxed{\frac{1}{7^{41}}}", False),
        ("0.00000003", r"\boxed{0.00000004}", False),
        ("112_3", r"\boxed{112}", False),
        ("8:15", "The bus leaves at 8:15.", True),
        ("8:15 pm", "<answer>20:15</answer>", True),
        ("3 May 2021", "<answer>2021-05-03</answer>", True),
        ("D", "The answer is (D) Oslo, not (A) Rome.", True),
        ("6", r"\boxed{5}. Wait, it should be 6.", True),
        ("6", "Answer: We add the 2 apples to the 4 pears on the table. So she has 6 fruits.", True),
        ("Rome", "Answer: Rome. It has been the capital of Italy for more than a hundred years.", True),
    ],
)
def test_the_whole_of_a_marked_statement_counts(expected: str, text: str, correct: bool) -> None:
    assert judge({"answer": expected}, text, OTHER) == Verdict(correct)


@pytest.mark.parametrize(
    ("expected", "text", "correct"),
    [
        ("12", "12 is not the answer.", False),
        ("12", "12 is wrong.", False),
        ("12", "The number 12 is incorrect.", False),
        ("12", "12 is too small.", False),
        ("12", "12 can't be right.", False),
        ("12", "12 does not work.", False),
        ("12", "It cannot be 12.", False),
        ("12", "Unlike 12", False),
        ("12", "Is it 12? No, that is wrong.", False),
        ("12", r"\boxed{12}? No, that is wrong.", False),
        ("12", r"\boxed{12}. But that is not correct.", False),
        ("12", "The answer is 12. No, that is wrong.", False),
        ("B", "Option B is not correct", False),
        ("B", "Anything except B.", False),
        ("B", "B is ruled out, and A is wrong.", False),
        ("Oslo", "Anything but Oslo.", False),
        ("Oslo", "Oslo isn't the right answer.", False),
        ("9", "12 is too large, so the answer is 9.", True),
        ("9", r"\boxed{12}? No, that is wrong. \boxed{9}", True),
        ("12", r"\boxed{12}. This is not correct for n = 2, but for n = 1.", True),
        ("12", r"\boxed{12}. It is not wrong.", True),
        ("C", "A and B are wrong, so C.", True),
        ("C", "Both A and B are too small. So I choose C.", True),
        ("9", r"\boxed{12}. That is wrong. It should be 9.", True),
        ("the ant", "The answer is the ant. It is too small.", True),
        ("B", "The answer is B because A and C are wrong.", True),
        ("the box is too small", "Answer: The box is too small, as one sees.", True),
        ("Oslo", "All but Oslo.", False),
        ("12", r"\boxed{12}. But that is too small.", False),
        ("no", "No. It is wrong.", True),
        ("false", "The statement is false.", True),
        ("wrong", "It is wrong.", True),
        ("not correct", "It is not correct.", True),
    ],
)
def test_a_denied_value_is_not_stated(expected: str, text: str, correct: bool) -> None:
    assert judge({"answer": expected}, text, OTHER) == Verdict(correct)


@pytest.mark.parametrize(
    ("expected", "text", "correct"),
    [
        ("8", "The answer is at least 8.", False),
        ("8", "The answer is under 8.", False),
        ("8", "The answer is a maximum of 8.", False),
        ("8", "The answer is no more than $8$.", False),
        ("8", "<answer>at most 8</answer>", False),
        ("8", "<answer>8 at most</answer>", False),
        ("8", "The answer is 8 apples at most.", False),
        ("8", r"\boxed{\text{at least } 8}", False),
        ("8", r"\boxed{\text{up to } 8}", False),
        ("8", "8²", False),
        ("8", "8½", False),
        ("8", "½ of 8", False),
        ("8", "The answer is twice 8.", False),
        ("8", "The answer is 8 dozen.", False),
        ("8", r"\boxed{8 \text{ dozen}}", False),
        ("8", r"\boxed{8 \mod 10}", False),
        ("at least 8", "at least 8", True),
        ("8", "The maximum is 8.", True),
        ("8", "The answer is 8 or so.", True),
        ("8.5", "8½", True),
        ("64", "8²", True),
        ("96", "The answer is 8 dozen.", True),
        ("30", "There are 60 seats, and half of 60 is 30 seats.", True),
        ("8", r"\boxed{-(-8)}", True),
        ("70000", "The profit was 70 thousand dollars.", True),
        ("540", "He runs 540 meters a week (3 sprints, 3 times).", True),
        (r"11,\! 111,\! 100", r"\boxed{11111100}", True),
    ],
)
def test_a_bound_or_a_changed_number_is_another_number(expected: str, text: str, correct: bool) -> None:
    assert judge({"answer": expected}, text, OTHER) == Verdict(correct)


@pytest.mark.parametrize(
    ("expected", "text", "correct"),
    [
        ("C", "Vitamin C", False),
        ("B", "Hepatitis B.", False),
        ("A", "Grade A", False),
        ("C", "C. Vitamin B", True),
        ("C", "Therefore C", True),
        ("C", "Only C", True),
        ("C", "Options C", True),
        ("C", "Mark C.", True),
        ("C", "Definitely C.", True),
        ("C", "So the correct answer is option c", True),
        ("no", "No, wait, yes.", False),
        ("yes", "Yes, no, maybe.", False),
        ("yes", "Yes, no doubt.", True),
        ("yes", "Yes, true.", True),
        ("yes", "Yes. Is it red? No.", True),
        ("United States", "The answer is the United States.", True),
        ("hello world", "<answer>Hello, world!</answer>", True),
    ],
)
def test_names_and_contradictions_of_words(expected: str, text: str, correct: bool) -> None:
    assert judge({"answer": expected}, text, OTHER) == Verdict(correct)


@pytest.mark.parametrize(
    ("answer", "text", "verdict"),
    [
        (["Paris", "Lutetia"], "It is Lutetia.", Verdict(True)),
        (["Paris", "Lutetia"], "London", Verdict(False)),
        (["18", 18.5, None], "The answer is 18.5.", Verdict(True)),
        ([], "18", Verdict(None)),
        ([" ", None], "18", Verdict(None)),
    ],
)
def test_each_answer_of_a_list_is_right(answer: Any, text: str, verdict: Verdict) -> None:
    assert judge({"answer": answer}, text, OTHER) == verdict


def test_a_list_of_answers_with_each_rule() -> None:
    assert judge({"answer": ["a", "b"]}, "b", OTHER, "exact") == Verdict(True)
    assert judge({"answer": ["7", "9"]}, "2 + 7 = 9", OTHER, "regex:= (.*)") == Verdict(True)
    assert judge({"answer": ["many", "5"]}, "5", OTHER, "numeric") == Verdict(True)
    assert "'many' is not a number" in judge({"answer": ["many", "5"]}, "6", OTHER, "numeric").error
    assert "the row's answer is an object; name its field" in judge({"answer": {"value": 18}}, "18", OTHER).error


@pytest.mark.parametrize("expected", ["18", r"\frac{\sqrt{2}}{2}", "1, 2", "12:30"])
@pytest.mark.parametrize(
    "part",
    [
        " ", "1 ", "1,111", "A ", "12 May ", "x=1,", "answer is ", "answer: ", "is the answer ", "#### 5\n", "$1", "**",
        r"\text{a", r"\boxed{", r"\boxed{1} ", r"\[", r"\frac", "<answer>", "</reasoning>", "Wait, it is 5. ", "not a ",
        "That is wrong. ", "7 is ", "A and ", "Plan A ", "1 (", "1 (two 3 ", "no, ", "7. That is ", "cannot be the ",
        "7 at least ", "½",
    ],
)  # fmt: skip
def test_the_time_for_a_long_reply_is_linear_in_its_length(part: str, expected: str) -> None:
    judge({"answer": r"\sqrt{2}"}, r"\boxed{x}", OTHER)  # imports math-verify
    begin = time.process_time()
    assert judge({"answer": expected}, part * (30_000 // len(part)) + "x", OTHER).correct is False
    assert time.process_time() - begin < 1


def test_plain_text_is_not_read_as_a_formula() -> None:
    text = "We add the two numbers, 12 and 30, and take a third of it (as before). " * 40 + "So the area is 14 m."
    judge({"answer": r"\sqrt{2}"}, r"\boxed{x}", OTHER)
    begin = time.process_time()
    for _ in range(10):
        assert judge({"answer": r"\frac{\sqrt{3}}{2}"}, text, OTHER) == Verdict(False)
    assert (time.process_time() - begin) / 10 < 0.05


@pytest.mark.parametrize(
    "formula",
    ["9^{9^{9^{9}}}", "$10^{10^{10}}$", "9**9**9", "(10^{9})!", "((9!)!)!", "100000!", r"\sqrt{9^{9^9}}", "2^{1000000}",
     r"9^{9 \cdot 10^9}", r"\left(9^{9}\right)^{9^{9}}"],
)  # fmt: skip
def test_giant_numbers_are_not_worked_out(formula: str) -> None:
    judge({"answer": r"\sqrt{2}"}, r"\boxed{x}", OTHER)
    begin = time.process_time()
    for other in ("5", "5!", r"\sqrt{5}"):
        assert judge({"answer": other}, rf"\boxed{{{formula}}}", OTHER) == Verdict(False)
        assert judge({"answer": formula}, rf"\boxed{{{other}}}", OTHER) == Verdict(False)
    assert judge({"answer": formula}, rf"\boxed{{{formula}}}", OTHER) == Verdict(True)
    assert time.process_time() - begin < 1


def test_a_judge_loads_neither_torch_nor_math_verify_before_a_formula() -> None:
    code = (
        "import sys; from tpu_kit.config.loader import DataConfig;"
        "from tpu_kit.generation.evaluation.verifiers import judge;"
        "assert judge({'answer': '18'}, '18', DataConfig()).correct;"
        "print(*sorted({'torch', 'torch_xla', 'transformers', 'numpy', 'sympy', 'math_verify'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"reward_funcs": ["accuracy", "format"]},
         "'accuracy' is a reward of open-r1; use math, or auto; 'format' is a reward of open-r1; use think_format"),
        ({"reward_funcs": ["auto", "tag_count"]}, "'tag_count' is a reward of open-r1; use think_format, or"),
        ({"reward_funcs": ["never"]}, "'never' names no rule; use think_format, length, auto, exact"),
        ({"verifier": "accuracy"}, "tracking.verifier: 'accuracy' is a reward of open-r1; use math"),
    ],
)  # fmt: skip
def test_names_of_other_rewards_are_refused_as_they_are_read(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        load_config(None, settings)
    load_config(None, {"reward_funcs": ["auto", "think_format", "length", "regex:(.*)", "my_rules:f"]})


@pytest.mark.parametrize("threaded", [False, True])
def test_math_verify_compares_expressions(threaded: bool) -> None:
    """Also in a thread, such as a replica on XLA:CPU, where signal handlers cannot be set."""
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
