"""Is an answer correct, and is its reasoning well-formed?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from tpu_kit import embedded
from tpu_kit.config import DataConfig

_STATED = re.compile(r"\banswer(?: is:?|:)\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!]?\s*(?:\n|$)|[.!]\s")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_UNIT = re.compile(r"\s*\\?[$€£%]\s*")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+|\d+/\d+)")
_EXPECTED_LETTER = re.compile(r"\(?([A-Z])\)?\.?")
_CHOSEN_LETTER = re.compile(r"\(?([A-Za-z])(?:[).:](?:\s|$)|$)")


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
    wanted, given = _final(str(expected)), _final(said)
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
