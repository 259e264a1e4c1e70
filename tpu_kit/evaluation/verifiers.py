"""Verifies whether an answer is correct, and whether its reasoning is well-formed.

`tracking.verifier` names the rule, or a function of the user's: `verifier="my_rules:is_right"`, with

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
from typing import Any

from tpu_kit.assets import embedded
from tpu_kit.config.choices import VERIFIERS
from tpu_kit.config.loader import ConfigError, DataConfig, parameters
from tpu_kit.data.columns import last_boxed

_STATED = re.compile(r"\banswer(?: is:?|:)\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!]?\s*(?:\n|$)|[.!]\s")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d*|\.\d+|\d+)"
_CURRENCY = r"[$€£¥]"
_MANTISSA = rf"(?P<digits>{_DIGITS})(?:e(?P<e>[-+]?\d+)|\*10\^(?P<ten>[-+]?\d+))?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?P<before>{_CURRENCY}?)(?P<inner>[-+]?)"
    rf"(?:(?:(?P<whole>\d+) )?(?P<above>{_DIGITS})/(?P<under>[-+]?{_DIGITS})|10\^(?P<power>[-+]?\d+)|{_MANTISSA})"
    rf" ?(?P<after>{_CURRENCY}|%|°|)",
    re.IGNORECASE,
)
_MOST_DIGITS = 400  # largest exponent that is evaluated
_EXPECTED_LETTER = re.compile(r"\(?([A-Z])\)?\.?")
_CHOSEN_LETTER = re.compile(r"(?:(?:option|choice)\s+)?\(?([A-Za-z])(?:[).:](?:\s|$)|$)", re.IGNORECASE)

# Replacements of LaTeX and special signs by plain text; fonts and spaces are dropped.
_TIDY = [
    (re.compile(r"\N{MINUS SIGN}"), "-"),
    (re.compile(r"\\(?:left|right|displaystyle|big|Big)\b|\\[!]"), ""),
    (re.compile(r"\\[,;: ]|~|\\q?quad\b"), " "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([$%&#])"), r"\1"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ\b)|\\degree\b"), "°"),
    (re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(frac|sqrt)\s*(\d)"), r"\\\1{\2}"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\d)"), r"\1{\2}"),
    (re.compile(rf"(\d)\s*\\frac\s*\{{\s*({_DIGITS})\s*\}}\s*\{{\s*({_DIGITS})\s*\}}"), r"\1 \2/\3"),
    (re.compile(rf"(?<![A-Za-z}}])\\frac\s*\{{\s*([-+]?{_DIGITS})\s*\}}\s*\{{\s*([-+]?{_DIGITS})\s*\}}"), r"\1/\2"),
    (re.compile(r"\s*(?:\\times|\\cdot|\N{MULTIPLICATION SIGN}|(?<=\d) x (?=10\^))\s*"), "*"),
    (re.compile(r"\^\s*\{\s*([-+]?\d+)\s*\}"), r"^\1"),
]
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
# A word with a root, a power or another command is one expression; its parts are not numbers of their own.
_INLINE = re.compile(r"\$([^$\s]+)\$")
_AREA = re.compile(r"\b([cdkm]?m|ft|in|yd|units?|inches|feet|yards|meters)\^[23]\b")
_EXPRESSION = r"\S{0,99}(?:\\[A-Za-z]|\^)\S*"
_LAST_NUMBER = re.compile(
    rf"{_NUMBER.pattern.replace('(?P<', '(?P<_')}(?![\d^\\}}]|[xyzn]\b)|{_EXPRESSION}", re.IGNORECASE
)

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


def verifier_named(name: str | Verifier) -> str | Verifier:
    """Resolves a verifier for `judge`: a rule keeps its name, and "module:function" is imported.

    The rules compare the final part of the reply, see `verify`: "auto" is `verify`; "exact" compares the text without
    surrounding white space; "numeric" the last number, unless an expression such as a root follows it; "choice" the
    letter; "math" expressions, with the package math-verify, without units; "regex:PATTERN" the first group of the last
    match (or the whole match), as auto; "reasoning_gym" calls that package's `score_answer` for the row's data set.

    Raises:
        ValueError: there is no such rule, module or function, or the pattern is invalid.
    """
    if callable(name):
        return name
    parameters()["tracking.verifier"].read(name)
    package = _PACKAGES.get(name)
    if package and importlib.util.find_spec(package.replace("-", "_")) is None:
        raise ConfigError([f"tracking.verifier={name} needs the package {package}: pip install {package}"])
    if name in VERIFIERS or name.startswith("regex:"):
        return name
    try:
        return imported(name)
    except ValueError as error:
        raise ConfigError([f"tracking.verifier={name}: {error}"]) from error


def imported(name: str) -> Callable[..., Any]:
    """Returns the function that "module:function" names.

    Raises:
        ValueError: it cannot be imported, or is not a function.
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"it cannot be imported ({error}); name a function as module:function") from error
    if not callable(found):
        raise ValueError(f"it is a {type(found).__name__}, not a function")
    there: Callable[..., Any] = found
    return there


def judge(row: Mapping[str, Any], text: str, config: DataConfig, verifier: str | Verifier = "auto") -> Verdict:
    """Judges whether a reply is right; an error of the verifier becomes part of the verdict.

    Args:
        row: with the expected "answer", or with the columns that the user's function reads.
        text: the reply, with its reasoning. A reply that ends within its reasoning is wrong.
        config: the data section.
        verifier: of `verifier_named`.
    """
    try:
        if verifier == "auto":
            return Verdict(verify(row, text, config))
        said = text.rpartition(config.think_close)[2]
        if config.think_open in said:
            return Verdict(False)
        if callable(verifier):
            found = verifier(row, said.strip())
        elif row.get("answer") is None or not str(row["answer"]).strip():
            return Verdict(None)
        elif verifier.startswith("regex:"):
            found = _matches(verifier.removeprefix("regex:"), str(row["answer"]), said)
        else:
            found = _RULES[verifier](row, said)
        if found is not None and not isinstance(found, (bool, int, float)):
            raise TypeError(f"it returned {found!r}; return True, False, a number up to 1, or None")
        return Verdict(None if found is None else float(found) == 1.0)
    except Exception as error:  # a user's function may raise anything; the other rows are still judged
        return Verdict(None, f"{type(error).__name__}: {error}".strip())


def verify(row: Mapping[str, Any], text: str, config: DataConfig) -> bool | None:
    r"""Judges whether a reply ends in the row's answer.

    Embedded rows have their own rule, `embedded.is_correct`. Otherwise the final part of the reply is the text after
    the last `think_close` (the whole text without reasoning), and within it the text after the last "####", in the last
    \boxed{}, or after the last "answer is" or "answer:". It is correct if it is the same number, the same letter of a
    choice ("(B)", "B", "b) Paris", "Option B"), or the same text apart from case, white space, emphasis, closing
    punctuation and LaTeX's fonts and spaces.

    A number is decimal, with commas between thousands, a fraction (1/2, 1 1/2, \frac{1}{2}) or a power of ten (1.5e3,
    1.5 \times 10^{3}); 1/2 is 0.5. Signs of currencies, percent and degrees are ignored, unless both texts have
    different ones. Units in words are not ignored: "18 apples" is not "18". Roots and other expressions are compared as
    text. A reply that ends within its reasoning is wrong.

    Args:
        row: a row with the expected "answer".
        text: the reply.
        config: the data section: the tags, and whether the rows are the embedded ones.

    Returns:
        None if the row has no answer to compare with.
    """
    expected = row.get("answer")
    if expected is None or not str(expected).strip():
        return None
    if (config.eval_source or config.source) == "embedded":
        return embedded.is_correct({"answer": str(expected)}, text, config.think_open, config.think_close)
    said = text.rpartition(config.think_close)[2]
    if config.think_open in said:
        return False
    return _same(_final(str(expected)), _final(said))


def _numeric(row: Mapping[str, Any], said: str) -> bool:
    wanted = _number(_final(str(row["answer"])))
    if wanted is None:
        raise ValueError(f"the row's answer {str(row['answer'])[:60]!r} is no number")
    final = _final(said)
    given = _number(final)
    if given is None:
        found = [match[0] for match in _LAST_NUMBER.finditer(_AREA.sub(r"\1", _tidy(_INLINE.sub(r"\1", final))))]
        given = _number(found[-1]) if found else None
    return given is not None and _equal(wanted, given)


def _choice(row: Mapping[str, Any], said: str) -> bool:
    wanted = _final(str(row["answer"]))
    if not _EXPECTED_LETTER.fullmatch(_tidy(wanted)):
        raise ValueError(f"the row's answer {str(row['answer'])[:60]!r} is no letter of a choice")
    return _same(wanted, _final(said))


def _reasoning_gym(row: Mapping[str, Any], said: str) -> float:
    """Scores the final part alone: the package gives partial credit for an answer within other words."""
    import reasoning_gym

    metadata = row.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    if "source_dataset" not in metadata:
        raise ValueError("the row has no metadata.source_dataset, which names its data set in reasoning-gym")
    score = reasoning_gym.get_score_answer_fn(metadata["source_dataset"])
    return float(score(answer=_final(said), entry={**row, "metadata": metadata}))


def _math(row: Mapping[str, Any], said: str) -> bool:
    """Compares expressions; the time limits of math-verify are signals, which need the main thread."""
    import math_verify

    seconds = _MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    wanted, given = (
        math_verify.parse(rf"\boxed{{{_final(text)}}}", parsing_timeout=seconds) for text in (str(row["answer"]), said)
    )
    if not wanted:
        raise ValueError(f"the row's answer {str(row['answer'])[:60]!r} cannot be read by math-verify")
    return bool(math_verify.verify(wanted, given, timeout_seconds=seconds))


_RULES: Mapping[str, Verifier] = {
    "exact": lambda row, said: said.strip() == str(row["answer"]).strip(),
    "numeric": _numeric,
    "choice": _choice,
    "math": _math,
    "reasoning_gym": _reasoning_gym,
}

_PACKAGES = {"math": "math-verify", "reasoning_gym": "reasoning-gym"}
_MATH_SECONDS = 5


def _matches(pattern: str, expected: str, said: str) -> bool:
    found = list(re.finditer(pattern, said))
    if not found:
        return False
    given = (found[-1][1] if found[-1].re.groups else found[-1][0]) or ""
    return _same(_final(expected), given.strip())


def _same(wanted: str, given: str) -> bool:
    """Returns whether two texts are the same number, the same letter of a choice, or the same words."""
    number = _number(wanted)
    if number is not None:
        other = _number(given)
        return other is not None and _equal(number, other)
    wanted, given = _tidy(wanted), _tidy(given)
    if letter := _EXPECTED_LETTER.fullmatch(wanted):
        chosen = _CHOSEN_LETTER.match(given)
        return chosen is not None and chosen[1].upper() == letter[1]
    return _plain(given) == _plain(wanted)


def _final(text: str) -> str:
    text = text.replace("**", "").strip()
    box = last_boxed(text)
    if "####" in text:
        text = text.rpartition("####")[2]
    elif box is not None:
        text = box
    elif stated := list(_STATED.finditer(text)):
        text = _SENTENCE_END.split(text[stated[-1].end() :], maxsplit=1)[0]
    return text.strip()


def _tidy(text: str) -> str:
    text = text.strip().rstrip(". ")
    for opened, closed in _DELIMITERS:
        inner = text[len(opened) : -len(closed)]
        if text.startswith(opened) and text.endswith(closed) and inner and opened not in inner:
            text = inner
    for pattern, plain in _TIDY:
        text = pattern.sub(plain, text)
    return " ".join(text.split())


@dataclass(frozen=True)
class _Number:
    value: Fraction
    unit: str  # the sign of a currency, "%", "°" or empty


def _equal(one: _Number, other: _Number) -> bool:
    """Returns whether two numbers are equal, and their units, if both have one."""
    return one.value == other.value and (not one.unit or not other.unit or one.unit == other.unit)


def _number(text: str) -> _Number | None:
    """Returns the number of a text that is nothing but a number; None for another text."""
    found = _NUMBER.fullmatch(_tidy(text))
    if found is None or (found["before"] and found["after"]) or (found["sign"] and found["inner"]):
        return None

    def part(name: str) -> Fraction:
        return Fraction((found[name] or "0").replace(",", ""))

    try:
        if found["above"]:
            value = part("whole") + part("above") / part("under")
        else:
            exponent = int(found["e"] or found["ten"] or found["power"] or 0)
            if abs(exponent) > _MOST_DIGITS:
                return None
            value = (Fraction(1) if found["power"] else part("digits")) * Fraction(10) ** exponent
    except (ValueError, ZeroDivisionError):  # thousands of digits, x/0
        return None
    return _Number(-value if "-" in (found["sign"], found["inner"]) else value, found["before"] or found["after"])


def _plain(text: str) -> str:
    text = " ".join(text.casefold().split()).strip(" *_`\"'").rstrip(".!?,;: ").rstrip(" *_`\"'")
    if not re.search(r"(?<!\\)\b[a-z]{2}", text):  # an expression, in which only spaces between digits count
        text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    return text


def well_formed(text: str, config: DataConfig) -> bool:
    """Returns whether a reply is one block of reasoning in its tags, not empty, and then an answer."""
    before, opened, rest = text.strip().partition(config.think_open)
    reasoning, closed, said = rest.partition(config.think_close)
    once = config.think_open not in rest and config.think_close not in said
    return bool(opened and closed and once and not before and reasoning.strip() and said.strip())
