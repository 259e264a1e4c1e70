"""Is an answer correct, and is its reasoning well-formed?

`tracking.verifier` names the rule, or a function of the user's: `verifier="my_rules:is_right"`, with

    def is_right(row, answer):          # in my_rules.py
        return row["target"] in answer  # or a share, of which only 1 counts; None does not judge the row
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tpu_kit import embedded
from tpu_kit.config import ConfigError, DataConfig

_STATED = re.compile(r"\banswer(?: is:?|:)\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!]?\s*(?:\n|$)|[.!]\s")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_UNIT = re.compile(r"\s*\\?[$€£%]\s*")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+|\d+/\d+)")
_EXPECTED_LETTER = re.compile(r"\(?([A-Z])\)?\.?")
_CHOSEN_LETTER = re.compile(r"\(?([A-Za-z])(?:[).:](?:\s|$)|$)")
_LAST_NUMBER = re.compile(r"[-+]?[$€£]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+/\d+|\d*\.\d+|\d+)")

Verifier = Callable[[Mapping[str, Any], str], Any]
"""Of a row, and what the reply says after its reasoning: whether that is right, a share of 1, or None to not judge."""


@dataclass(frozen=True)
class Verdict:
    """What became of one reply.

    Attributes:
        correct: None where it was not judged.
        error: what the verifier raised; empty if nothing.
    """

    correct: bool | None
    error: str = ""


def verifier_named(name: str | Verifier) -> str | Verifier:
    """What `judge` takes, for what a user names: a rule stays its name, and "module:function" is imported.

    The rules: "auto" (`verify`); "exact", the same text but for white space around it; "numeric", the last number of
    what counts; "choice", the letter; "regex:PATTERN", what the last match's first group (or all of it) holds, compared
    as in auto; "reasoning_gym", that package's `score_answer` for the row's data set. Each compares the part of the
    reply that counts: see `verify`.

    Raises:
        ConfigError: there is no such rule, module or function, or the pattern is none.
    """
    if name == "reasoning_gym" and importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError([f"tracking.verifier={name} needs the package reasoning-gym: pip install reasoning-gym"])
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
    number (without currency signs, percent signs and commas between thousands; 1/2 is 0.5), the same letter of a choice
    ("(B)", "B", "b) Paris"), or the same text but for case, white space, emphasis and closing punctuation. Units in
    words are not dropped: "18 apples" is not "18". A reply still reasoning when it ended is wrong.

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
    numbers = _LAST_NUMBER.findall(_final(said).replace("\N{MINUS SIGN}", "-"))
    return bool(numbers) and _number(numbers[-1]) == wanted


def _choice(row: Mapping[str, Any], said: str) -> bool:
    letter = _EXPECTED_LETTER.fullmatch(_final(str(row["answer"])))
    if letter is None:
        raise ValueError(f"the row's answer {str(row['answer'])[:60]!r} is no letter of a choice")
    chosen = _CHOSEN_LETTER.match(_final(said))
    return chosen is not None and chosen[1].upper() == letter[1]


def _reasoning_gym(row: Mapping[str, Any], said: str) -> float:
    """Its score gives part of the credit to an answer in other words, so what counts is taken out first."""
    import reasoning_gym

    metadata = row.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    if "source_dataset" not in metadata:
        raise ValueError("the row has no metadata.source_dataset, which names its data set in reasoning-gym")
    score = reasoning_gym.get_score_answer_fn(metadata["source_dataset"])
    return float(score(answer=_final(said), entry={**row, "metadata": metadata}))


_RULES: Mapping[str, Verifier] = {
    "exact": _exact,
    "numeric": _numeric,
    "choice": _choice,
    "reasoning_gym": _reasoning_gym,
}


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
        return _number(given) == number
    if letter := _EXPECTED_LETTER.fullmatch(wanted):
        chosen = _CHOSEN_LETTER.match(given)
        return chosen is not None and chosen[1].upper() == letter[1]
    return _plain(given) == _plain(wanted)


def _final(text: str) -> str:
    text = text.replace("**", "").strip()
    if "####" in text:
        text = text.rpartition("####")[2]
    elif boxes := _BOXED.findall(text):
        text = boxes[-1]
    elif stated := list(_STATED.finditer(text)):
        text = _SENTENCE_END.split(text[stated[-1].end() :], maxsplit=1)[0]
    return text.strip()


def _number(text: str) -> Fraction | None:
    text = _UNIT.sub("", text.rstrip(". ").replace("\N{MINUS SIGN}", "-"))
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    try:
        return Fraction(text) if _NUMBER.fullmatch(text) else None
    except (ValueError, ZeroDivisionError):  # thousands of digits, x/0
        return None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" *_`\"'").rstrip(".!?,;: ").rstrip(" *_`\"'")


def well_formed(text: str, config: DataConfig) -> bool:
    """Say whether a reply is one block of reasoning in its tags, not empty, and then an answer."""
    before, opened, rest = text.strip().partition(config.think_open)
    reasoning, closed, said = rest.partition(config.think_close)
    once = config.think_open not in rest and config.think_close not in said
    return bool(opened and closed and once and not before and reasoning.strip() and said.strip())
