"""Judges whether an answer is correct, and whether its reasoning is well-formed.

`tracking.verifier` names the rule, or a function of the user's: `verifier="my_rules:is_right"`, with

    def is_right(row, answer):          # in my_rules.py
        return row["target"] in answer  # or a share, of which only 1 counts; None does not judge the row
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
from tpu_kit.config.loader import ConfigError, DataConfig

_STATED = re.compile(r"\banswer(?: is:?|:)\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!]?\s*(?:\n|$)|[.!]\s")
_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d*|\.\d+|\d+)"
_CURRENCY = r"[$€£¥]"
_MANTISSA = rf"(?P<digits>{_DIGITS})(?:e(?P<e>[-+]?\d+)|\*10\^(?P<ten>[-+]?\d+))?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?P<before>{_CURRENCY}?)(?P<inner>[-+]?)"
    rf"(?:(?:(?P<whole>\d+) )?(?P<above>{_DIGITS})/(?P<under>[-+]?{_DIGITS})|10\^(?P<power>[-+]?\d+)|{_MANTISSA})"
    rf" ?(?P<after>{_CURRENCY}|%|°|)",
    re.IGNORECASE,
)
_MOST_DIGITS = 400  # of an exponent's number; a larger one is not worked out
_EXPECTED_LETTER = re.compile(r"\(?([A-Z])\)?\.?")
_CHOSEN_LETTER = re.compile(r"(?:(?:option|choice)\s+)?\(?([A-Za-z])(?:[).:](?:\s|$)|$)", re.IGNORECASE)

# LaTeX, and signs for the same, as plain text: what an expression says of fonts and spaces is dropped.
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
# A word with a root, a power or another command in it is an expression, whose parts are no numbers of their own.
_INLINE = re.compile(r"\$([^$\s]+)\$")
_AREA = re.compile(r"\b([cdkm]?m|ft|in|yd|units?|inches|feet|yards|meters)\^[23]\b")
_EXPRESSION = r"\S{0,99}(?:\\[A-Za-z]|\^)\S*"
_LAST_NUMBER = re.compile(
    rf"{_NUMBER.pattern.replace('(?P<', '(?P<_')}(?![\d^\\}}]|[xyzn]\b)|{_EXPRESSION}", re.IGNORECASE
)

Verifier = Callable[[Mapping[str, Any], str], Any]
"""Of a row, and what the reply says after its reasoning: whether that is right, a share of 1, or None to not judge."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one reply.

    Attributes:
        correct: None where it was not judged.
        error: what the verifier raised; empty if nothing.
    """

    correct: bool | None
    error: str = ""


def verifier_named(name: str | Verifier) -> str | Verifier:
    """Resolves a verifier for `judge`: a rule stays its name, and "module:function" is imported.

    The rules: "auto" (`verify`); "exact", the same text but for white space around it; "numeric", the last number of
    what counts, none if an expression such as a root comes after it; "choice", the letter; "math", equal expressions
    as the package math-verify reads them, without units; "regex:PATTERN", what the last match's first group (or all of
    it) holds, compared as in auto; "reasoning_gym", that package's `score_answer` for the row's data set. Each compares
    the part of the reply that counts: see `verify`.

    Raises:
        ConfigError: there is no such rule, module or function, or the pattern is none.
    """
    package = _PACKAGES.get(name) if isinstance(name, str) else None
    if package and importlib.util.find_spec(package.replace("-", "_")) is None:
        raise ConfigError([f"tracking.verifier={name} needs the package {package}: pip install {package}"])
    if callable(name) or name in _RULES or name == "auto":
        return name
    if name.startswith("regex:"):
        try:
            re.compile(name.removeprefix("regex:"))
        except re.error as error:
            raise ConfigError([f"tracking.verifier={name}: the pattern cannot be read: {error}"]) from error
        return name
    if ":" not in name:
        rules = ", ".join(["auto", *_RULES])
        raise ConfigError(
            [f"tracking.verifier={name}: there is no such rule; use {rules}, regex:PATTERN or module:function"]
        )
    try:
        return imported(name)
    except ValueError as error:
        raise ConfigError([f"tracking.verifier={name}: {error}"]) from error


def imported(name: str) -> Callable[..., Any]:
    """The function that "module:function" names.

    Raises:
        ValueError: it cannot be imported, or is no function.
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
    """Say whether a reply is right; what a verifier raises is told, not raised.

    Args:
        row: with the expected "answer", or with what the user's function needs.
        text: the reply, with its reasoning. One that is still reasoning when it ended is wrong.
        config: the data section.
        verifier: what `verifier_named` returned.
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
            raise TypeError(f"it gave {found!r}; it must give True, False, a share of 1, or None")
        return Verdict(None if found is None else float(found) == 1.0)
    except Exception as error:  # a user's function may raise anything, and the other rows are judged all the same
        return Verdict(None, f"{type(error).__name__}: {error}".strip())


def verify(row: Mapping[str, Any], text: str, config: DataConfig) -> bool | None:
    r"""Say whether a reply ends in the row's answer.

    Embedded rows have a rule of their own, `embedded.is_correct`. Otherwise what counts is the text after the last
    `think_close`, or all of it if there is no reasoning; and of that what stands after the last "####", in the last
    \boxed{}, or after the last "answer is" or "answer:", if there is any of these. It is correct if it is the same
    number, the same letter of a choice ("(B)", "B", "b) Paris", "Option B"), or the same text but for case, white
    space, emphasis, closing punctuation and LaTeX's fonts and spaces.

    A number is decimal, with commas between thousands, a fraction (1/2, 1 1/2, \frac{1}{2}) or a power of ten (1.5e3,
    1.5 \times 10^{3}); 1/2 is 0.5. Signs of currencies, percent and degrees are dropped, unless both texts have one and
    it is another. Units in words are not dropped: "18 apples" is not "18". Roots and other expressions are compared as
    text. A reply still reasoning when it ended is wrong.

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


def _exact(row: Mapping[str, Any], said: str) -> bool:
    return said.strip() == str(row["answer"]).strip()


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
    """Its score gives part of the credit to an answer in other words, so what counts is taken out first."""
    import reasoning_gym

    metadata = row.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    if "source_dataset" not in metadata:
        raise ValueError("the row has no metadata.source_dataset, which names its data set in reasoning-gym")
    score = reasoning_gym.get_score_answer_fn(metadata["source_dataset"])
    return float(score(answer=_final(said), entry={**row, "metadata": metadata}))


def _math(row: Mapping[str, Any], said: str) -> bool:
    """Its limits of time are signals, which only a process's main thread can take."""
    import math_verify

    seconds = _MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    wanted, given = (
        math_verify.parse(rf"\boxed{{{_final(text)}}}", parsing_timeout=seconds) for text in (str(row["answer"]), said)
    )
    if not wanted:
        raise ValueError(f"the row's answer {str(row['answer'])[:60]!r} cannot be read by math-verify")
    return bool(math_verify.verify(wanted, given, timeout_seconds=seconds))


_RULES: Mapping[str, Verifier] = {
    "exact": _exact,
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
    """Whether two texts are the same number, the same letter of a choice, or the same words."""
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
    box = _last_box(text)
    if "####" in text:
        text = text.rpartition("####")[2]
    elif box is not None:
        text = box
    elif stated := list(_STATED.finditer(text)):
        text = _SENTENCE_END.split(text[stated[-1].end() :], maxsplit=1)[0]
    return text.strip()


def _last_box(text: str) -> str | None:
    r"""What the last \boxed{} holds whose brace is closed."""
    boxes = {box.end() for box in _BOX.finditer(text)}
    last, found = -1, None
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened:
            start = opened.pop()
            if start in boxes and start > last:
                last, found = start, text[start : brace.start()]
    return found


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
    unit: str  # a currency's sign, "%" or "°", or none


def _equal(one: _Number, other: _Number) -> bool:
    """Whether two numbers are the same; a sign that one of them lacks is not compared."""
    return one.value == other.value and (not one.unit or not other.unit or one.unit == other.unit)


def _number(text: str) -> _Number | None:
    """The number that a text is as a whole, if it is one."""
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
    if not re.search(r"(?<!\\)\b[a-z]{2}", text):  # an expression, in which a space says nothing, but between digits
        text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    return text


def well_formed(text: str, config: DataConfig) -> bool:
    """Say whether a reply is one block of reasoning in its tags, not empty, and then an answer."""
    before, opened, rest = text.strip().partition(config.think_open)
    reasoning, closed, said = rest.partition(config.think_close)
    once = config.think_open not in rest and config.think_close not in said
    return bool(opened and closed and once and not before and reasoning.strip() and said.strip())
