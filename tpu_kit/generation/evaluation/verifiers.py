"""Verifies whether an answer is correct, and whether its reasoning is well-formed.

`tracking.verifier` names a rule, or a user's function, as in `verifier="my_rules:is_right"`:

    def is_right(row, answer):          # in my_rules.py
        return row["target"] in answer  # or a number, of which only 1 is correct; None skips the row
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tpu_kit.config.fields import show
from tpu_kit.config.loader import ConfigError, DataConfig
from tpu_kit.config.named_values import VERIFIERS, check_verifier, imported
from tpu_kit.generation.evaluation.equality import same, same_formula, same_letter, same_number
from tpu_kit.generation.evaluation.statements import Statement, statement_of

Verifier = Callable[[Mapping[str, Any], str], Any]
"""Takes a row and a reply's text after its reasoning; returns whether it is correct, a score, or None to skip."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of a reply.

    Attributes:
        correct: whether the reply is correct; None if not judged: no answer in the row, None of a function, an error.
        error: the text of the verifier's error, or "".
    """

    correct: bool | None
    error: str = ""


def verifier_named(name: str, parameter: str = "tracking.verifier") -> str | Verifier:
    """Resolves a verifier for `judge`: returns the name of a rule unchanged, or the function of "module:function".

    `parameter` is the name in error messages.

    "auto" compares the answers that row and reply state (`statement_of`), by the kind of the row's answer (`equality`).
    "numeric", "choice" and "math" compare only numbers, letters or formulas. "exact" compares texts without surrounding
    white space. "regex:PATTERN" compares the first group of the last match, or the whole match, like "auto".
    "reasoning_gym" calls the package's `score_answer` for the row's data set.

    Raises:
        ValueError: the rule, module or function does not exist, a package is missing, or the pattern is invalid.
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
    """Judges whether a reply is correct, not the form of its reasoning; an exception of the verifier is the `error`.

    Args:
        row: a row. A rule compares with its "answer", the expected answer or a list of accepted answers. Without an
            answer, the verdict's `correct` is None. A function may read any column.
        text: the reply, with its reasoning. A reply that ends within its reasoning is wrong.
        config: the data section, with the reasoning tags.
        verifier: from `verifier_named`. A function gets the row and the text after the reasoning. It may return True,
            False, a number, or None. For None, the verdict's `correct` is None. The number 1 is correct, a smaller
            number is wrong, and a larger number or a text is an error.
    """
    answer = text.rpartition(config.think_close)[2]
    try:
        if not callable(verifier) and not _expected(row):
            return Verdict(None)
        if config.think_open in answer:
            return Verdict(False)
        score = verifier(row, answer.strip()) if callable(verifier) else _rule(verifier)(row, answer)
        if score is None:
            return Verdict(None)
        if isinstance(score, str) or not float(score) <= 1:  # also not a number
            raise TypeError(f"it returned {score!r}; return True, False, a number up to 1, or None")
        return Verdict(float(score) == 1.0)
    except (Exception, SystemExit) as error:  # a user's function may raise anything; other rows are still judged
        return Verdict(None, f"{type(error).__name__}: {error}".strip())


def _expected(row: Mapping[str, Any]) -> list[str]:
    """Returns the non-empty accepted answers of a row as stripped texts; raises TypeError if "answer" is an object."""
    answer = row.get("answer")
    if isinstance(answer, Mapping):
        raise TypeError("the row's answer is an object; name its field, as in columns={answer: COLUMN.FIELD}")
    answers = answer if isinstance(answer, (list, tuple)) else [answer]
    return [text for each in answers if each is not None and (text := str(each).strip())]


def _rule(name: str) -> Verifier:
    """Returns the function of a rule, given by its name or as regex:PATTERN."""
    if name.startswith("regex:"):
        return partial(_stated, same, "text", read=partial(_match, name.removeprefix("regex:")))
    return imported(VERIFIERS[name])


def _stated(
    comparison: Callable[[str, Statement], bool | None],
    kind: str,
    row: Mapping[str, Any],
    answer: str,
    read: Callable[[str], Statement | None] = statement_of,
) -> bool:
    """Returns whether the answer that `read` finds in a reply equals an accepted answer by `comparison`; else False.

    Raises ValueError if none equals and an accepted answer is not of the `kind`, for which `comparison` returns None.
    """
    statement = read(answer)
    if statement is None or not statement.text.strip():
        return False
    failures: list[ValueError] = []
    for text in _expected(row):
        stated = statement_of(text)
        wanted = text if stated is None else stated.text
        try:
            if (result := comparison(wanted, statement)) is None:
                raise ValueError(f"the row's answer {wanted[:60]!r} is not a {kind}")
            if result:
                return True
        except ValueError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return False


# The rules of `named_values.VERIFIERS`. To add a rule, add a line there and a function here or in another module.
auto = partial(_stated, same, "text")
numeric = partial(_stated, same_number, "number")
choice = partial(_stated, same_letter, "letter of a choice")
math = partial(_stated, partial(same_formula, required=True), "formula")


def exact(row: Mapping[str, Any], answer: str) -> bool:
    """Returns whether a reply, without surrounding white space, equals an accepted answer."""
    return answer.strip() in _expected(row)


def _match(pattern: str, answer: str) -> Statement | None:
    """Returns the first group of the last match, or the whole match, as a marked statement; None without a match."""
    matches = list(re.finditer(pattern, answer))
    if not matches:
        return None
    return Statement((matches[-1][1] if matches[-1].re.groups else matches[-1][0]) or "", True)


def reasoning_gym(row: Mapping[str, Any], answer: str) -> float:
    """Returns reasoning-gym's score of the answer that a reply states (`statement_of`), 1 if it is correct.

    The package would give only partial credit for an answer within other words. Raises ValueError if the row's
    "metadata", a mapping or JSON text, has no source_dataset.
    """
    import reasoning_gym as package

    metadata = row.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    if "source_dataset" not in metadata:
        raise ValueError("the row has no metadata.source_dataset to name its data set in reasoning-gym")
    score = package.get_score_answer_fn(metadata["source_dataset"])
    statement = statement_of(answer)
    return float(score(answer=statement.text if statement else None, entry={**row, "metadata": metadata}))


def well_formed(text: str, config: DataConfig) -> bool:
    """Returns whether a reply is one non-empty block of reasoning in its tags, followed by an answer."""
    before, opened, rest = text.strip().partition(config.think_open)
    reasoning, closed, answer = rest.partition(config.think_close)
    once = config.think_open not in rest and config.think_close not in answer
    return bool(opened and closed and once and not before and reasoning.strip() and answer.strip())
