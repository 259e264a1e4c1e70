"""Verifies whether an answer is correct, and whether its reasoning is well-formed.

`tracking.verifier` names the rule, or a function: `verifier="my_rules:is_right"`, with

    def is_right(row, answer):          # in my_rules.py
        return row["target"] in answer  # or a number, where only 1 is correct; None skips the row
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from tpu_kit.config.choices import VERIFIERS, check_verifier, imported
from tpu_kit.config.fields import show
from tpu_kit.config.loader import ConfigError, DataConfig
from tpu_kit.data.columns import last_boxed

# Where a reply states its answer, and where that statement ends.
_STATED = re.compile(r"\b(?:answer|option|choice|solution)(?:\s+is\b:?|:)\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!]?\s*(?:\n|$)|[.!]\s")
_LAST_IS = re.compile(r".*(?:\b(?:is|are|equals|but)\b:?|[=:])\s", re.IGNORECASE | re.DOTALL)
# A decimal, 1,234.5, 1.5e3, 1/2 or 1 1/2; not the parts of 12:30, 2x, 2^10 or 1.2.3.
_NUMBER = re.compile(
    r"(?<![\w.,^:/])(?P<sign>(?:(?<![\d)] )[-+])?)[$€£¥]? ?(?P<minus>-?)(?:(?P<whole>\d+) (?=\d+/))?"
    r"(?P<above>(?=\.?\d)(?:\d{1,3}(?:,\d{3})+(?!\d)|\d*)(?:\.\d*)?(?:e[-+]?\d{1,3})?)(?:/(?P<under>\d+))?"
    r"(?![\d/^]|[:.,]\d|e[-+]?\d|[xyzn]\b)",
    re.IGNORECASE,
)
_UNITS = "$€£¥%"
_POWER_OF_TEN = re.compile(r"\s*(?:\\times|\\cdot|\N{MULTIPLICATION SIGN}|(?<= )x)\s*10\^\{?([-+]?\d{1,3})\b\}?")
_MARKUP = re.compile(r"\\(?:text|math)(?:bf|it|rm|)\{([^{}]*)\}|\*\*|\\(?=[$%])|\^\{?\\circ\}?|\\[,!]|\$([^$\\^]*)\$")
_NEGATED = re.compile(r"\bnot (?:an? |the )?\S+", re.IGNORECASE)
_LATEX = re.compile(r"\\|\^|\{,\}|^[(\[][^A-Za-z]*[)\]]$")
_MATH_SECONDS = 5
_LETTER = re.compile(r"\(?([A-Z])[.):]*")
_CHOSEN = re.compile(r"(?:(?<=\s)|^)\(?[A-Z][.):]+(?=\s|$)|\b[A-Z](?=$|[,;]| or | and )")

Verifier = Callable[[Mapping[str, Any], str], Any]
"""Takes a row and the text of a reply after its reasoning; returns whether it is right, a score, or None to skip."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one reply.

    Attributes:
        correct: whether it is right; None if it was not judged.
        error: the error of the verifier; empty without one.
    """

    correct: bool | None
    error: str = ""


def verifier_named(name: str, parameter: str = "tracking.verifier") -> str | Verifier:
    """Resolves a verifier for `judge`: a rule keeps its name, and "module:function" is imported.

    "auto" compares the statements (`_statement`) of row and reply by the kind of the row's answer, see `_same`;
    "numeric", "choice" and "math" are its comparisons of numbers, letters and expressions; "exact" compares the text
    without surrounding white space; "regex:PATTERN" the first group of the last match (or the whole match), as auto;
    "reasoning_gym" calls that package's `score_answer` for the row's data set.

    Raises:
        ValueError: there is no such rule, module or function, or the pattern is invalid.
    """
    try:
        check_verifier(name)
    except ValueError as error:
        raise ConfigError([f"{parameter}: {show(name)} {error}"]) from error
    if name == "reasoning_gym" and importlib.util.find_spec(name) is None:
        raise ConfigError([f"{parameter}={name} needs the package reasoning-gym: pip install reasoning-gym"])
    if name in VERIFIERS or name.startswith("regex:"):
        return name
    try:
        return imported(name)
    except ValueError as error:
        raise ConfigError([f"{parameter}={name}: {error}"]) from error


def judge(row: Mapping[str, Any], text: str, config: DataConfig, verifier: str | Verifier = "auto") -> Verdict:
    """Judges whether a reply is right; an error of the verifier becomes part of the verdict.

    Args:
        row: with the expected "answer", or with the columns that the user's function reads.
        text: the reply, with its reasoning. A reply that ends within its reasoning is wrong.
        config: the data section.
        verifier: of `verifier_named`.
    """
    answer = text.rpartition(config.think_close)[2]
    expected = "" if row.get("answer") is None else str(row["answer"]).strip()
    try:
        if not callable(verifier) and not expected:
            return Verdict(None)
        if config.think_open in answer:
            return Verdict(False)
        if callable(verifier):
            score = verifier(row, answer.strip())
        elif verifier.startswith("regex:"):
            score = _matches(verifier.removeprefix("regex:"), expected, answer)
        else:
            score = _RULES[verifier](row, answer)
        if score is None:
            return Verdict(None)
        if isinstance(score, str) or not float(score) <= 1:  # also not a number
            raise TypeError(f"it returned {score!r}; return True, False, a number up to 1, or None")
        return Verdict(float(score) == 1.0)
    except (Exception, SystemExit) as error:  # a user's function may raise anything; the other rows are still judged
        return Verdict(None, f"{type(error).__name__}: {error}".strip())


def _same(expected: str, statement: str) -> bool:
    """Compares two statements by the kind of the expected one.

    A number is compared with the last number of the statement, whatever its unit; the letter of a choice with the
    letter that the statement names ("(B)", "b) Paris", "Option B"); LaTeX as an expression, with math-verify; another
    text with the statement, its first words ("Yes, because ...") or what follows its last "is", apart from case,
    emphasis and closing punctuation.
    """
    for same in (_same_number, _same_letter, _same_expression):
        if (result := same(expected, statement)) is not None:
            return result
    whole = _words(statement)
    parts = (whole, re.split(r"[,.;:]\s", whole, maxsplit=1)[0])
    texts = (*parts, *(_LAST_IS.sub("", part) for part in parts))
    return _words(expected).replace(" ", "") in {text.replace(" ", "") for text in texts}


def _same_number(expected: str, statement: str) -> bool | None:
    """Compares numbers and the signs of their units; None if the expected text is no number."""
    expected, plain = _plain(expected), _plain(statement)
    if not _NUMBER.fullmatch(expected.strip(f"{_UNITS}°. ")):
        return None
    last_line = statement.rpartition("\n")[2]
    if _LATEX.search(_plain(last_line)):
        return bool(_same_expression(expected, last_line, required=True))
    units = [set(_UNITS) & set(text) for text in (expected, plain)]
    return _number(expected) == _number(plain) and (not all(units) or units[0] == units[1])


def _same_letter(expected: str, statement: str) -> bool | None:
    """Compares letters of a choice; None if the expected text is none. A text that names two letters is wrong."""
    wanted, statement = _LETTER.fullmatch(_plain(expected)), _plain(statement)
    if wanted is None:
        return None
    if alone := re.fullmatch(r"\(?([A-Za-z])[.):]*", statement) or re.match(r"\(?([A-Za-z])[.):]+\s", statement):
        return alone[1].upper() == wanted[1]
    return {letter.strip("().: ") for letter in _CHOSEN.findall(statement)} == {wanted[1]}


def _same_expression(expected: str, statement: str, required: bool = False) -> bool | None:
    """Compares with math-verify, whose time limits are signals of the main thread; None if nothing is LaTeX."""
    if not required and not _LATEX.search(_plain(expected)):
        return None
    import math_verify

    seconds = _MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    statement = statement if "$" in statement or r"\(" in statement else rf"\boxed{{{statement}}}"
    wanted, parsed = (
        math_verify.parse(text, parsing_timeout=seconds) for text in (rf"\boxed{{{expected}}}", statement)
    )
    if not wanted:
        raise ValueError(f"the row's answer {expected[:60]!r} cannot be read by math-verify")
    return bool(math_verify.verify(wanted, parsed, timeout_seconds=seconds))


def _rule(same: Callable[[str, str], bool | None], kind: str) -> Verifier:
    """Makes the verifier of one kind of answers out of its comparison."""

    def verifier(row: Mapping[str, Any], answer: str) -> bool:
        result = same(_statement(str(row["answer"])), _statement(answer))
        if result is None:
            raise ValueError(f"the row's answer {str(row['answer'])[:60]!r} is no {kind}")
        return result

    return verifier


def _reasoning_gym(row: Mapping[str, Any], answer: str) -> float:
    """Scores the final part alone: the package gives partial credit for an answer within other words."""
    import reasoning_gym

    metadata = row.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    if "source_dataset" not in metadata:
        raise ValueError("the row has no metadata.source_dataset, which names its data set in reasoning-gym")
    score = reasoning_gym.get_score_answer_fn(metadata["source_dataset"])
    return float(score(answer=_statement(answer), entry={**row, "metadata": metadata}))


_RULES: Mapping[str, Verifier] = {
    "auto": lambda row, answer: _same(_statement(str(row["answer"])), _statement(answer)),
    "exact": lambda row, answer: answer.strip() == str(row["answer"]).strip(),
    "numeric": _rule(_same_number, "number"),
    "choice": _rule(_same_letter, "letter of a choice"),
    "math": _rule(partial(_same_expression, required=True), "expression"),
    "reasoning_gym": _reasoning_gym,
}


def _matches(pattern: str, expected: str, answer: str) -> bool:
    matches = list(re.finditer(pattern, answer))
    if not matches:
        return False
    statement = (matches[-1][1] if matches[-1].re.groups else matches[-1][0]) or ""
    return _same(_statement(expected), statement)


def _statement(text: str) -> str:
    r"""Returns the part of a text that states its answer; the whole text if no part does.

    It follows "####" on the last line, is in the last \boxed{}, or follows the last "answer is", "option is" or
    "solution is" up to the end of the sentence.
    """
    text = text.strip()
    _, marked, last = text.rpartition("\n")[2].rpartition("####")
    if marked:
        return last.strip()
    if (box := last_boxed(text)) is not None:
        return box
    if stated := list(_STATED.finditer(text)):
        return _SENTENCE_END.split(text[stated[-1].end() :], maxsplit=1)[0].strip()
    return text


def _plain(text: str) -> str:
    """Removes fonts, emphasis and what is negated ("not 5"), and writes powers of ten as 1.5e3."""
    text = _NEGATED.sub("", _MARKUP.sub(r"\1\2", text))
    return _POWER_OF_TEN.sub(r"e\1", text).replace("\N{MINUS SIGN}", "-").strip()


def _number(text: str) -> Fraction | None:
    """Returns the last number of a text, after its last "=" if it has one; None without a number."""
    numbers = list(_NUMBER.finditer(text.rpartition("=")[2]))
    if not numbers:
        return None
    last = numbers[-1]
    try:
        value = Fraction(last["whole"] or 0) + Fraction(last["above"].replace(",", "")) / Fraction(last["under"] or 1)
    except (ValueError, ZeroDivisionError):  # thousands of digits, x/0
        return None
    return -value if "-" in (last["sign"], last["minus"]) else value


def _words(text: str) -> str:
    return " ".join(_plain(text).casefold().split()).strip(" .!?,;:*_`\"'")


def well_formed(text: str, config: DataConfig) -> bool:
    """Returns whether a reply is one block of reasoning in its tags, not empty, and then an answer."""
    before, opened, rest = text.strip().partition(config.think_open)
    reasoning, closed, answer = rest.partition(config.think_close)
    once = config.think_open not in rest and config.think_close not in answer
    return bool(opened and closed and once and not before and reasoning.strip() and answer.strip())
