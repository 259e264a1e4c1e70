"""Answers of a model to held-out rows with their metrics, and the comparison of two models on the same rows."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

from tpu_kit.config import text_tables
from tpu_kit.data.held_out import UNKNOWN
from tpu_kit.generation.evaluation.accuracy import Accuracy, mcnemar

_SHOWN = 3  # samples printed with the table


@dataclass(frozen=True)
class Sample:
    """A model's answer to a row.

    Attributes:
        question: the row's question as text.
        expected: the row's answer; None if it has none.
        answer: the model's reply, with a beginning that is part of the prompt, such as the opening reasoning tag.
        correct: the verifier's verdict; None if it did not judge the row.
        error: the verifier's error, or "".
        source: the name of the row's source in a mix, or "".
    """

    question: str
    expected: str | None
    answer: str
    correct: bool | None
    error: str = ""
    source: str = ""

    @property
    def verdict(self) -> str:
        """The verdict as text: "correct", "wrong", the verifier's error, or "" without a verdict."""
        if self.error:
            return f"not judged, the verifier raised {self.error}"
        return {True: "correct", False: "wrong", None: ""}[self.correct]

    def to_dict(self) -> dict[str, Any]:
        """Returns "answer" and "correct" for JSON, and "error" if there is one."""
        return {"answer": self.answer, "correct": self.correct} | ({"error": self.error} if self.error else {})


@dataclass(frozen=True)
class Evaluation:
    """The answers of one model and their metrics.

    Attributes:
        accuracy: accuracy on the judged rows.
        format_adherence: share of answers with one well-formed reasoning block and an answer after it.
        mean_tokens: mean length of an answer in tokens, its last token included.
        unfinished: share of answers that were cut off at `max_new_tokens`.
        max_new_tokens: token limit of an answer.
        samples: the answers to all rows.
        perplexity: exp of the mean loss in nats, over the rows' own tokens with loss in training; None if not measured.
        perplexity_tokens: the number of these tokens.
        rows_reason: whether the rows contain reasoning.
    """

    accuracy: Accuracy
    format_adherence: float
    mean_tokens: float
    unfinished: float
    max_new_tokens: int
    samples: tuple[Sample, ...]
    perplexity: float | None = None
    perplexity_tokens: int = 0
    rows_reason: bool = True

    @property
    def failed(self) -> int:
        """The number of answers on which the verifier raised an error; the accuracy does not count them."""
        return sum(bool(sample.error) for sample in self.samples)

    @property
    def by_source(self) -> dict[str, Accuracy]:
        """The accuracy on the judged rows by name of the source in a mix; {} without a mix."""
        found: dict[str, list[bool]] = {sample.source: [] for sample in self.samples if sample.source}
        for sample in self.samples:
            if sample.source and sample.correct is not None:
                found[sample.source].append(sample.correct)
        return {name: Accuracy.of(sum(correct), len(correct)) for name, correct in found.items()}

    @property
    def reasons(self) -> bool:
        """Whether `format_adherence` is meaningful: rows or answers contain reasoning."""
        return self.rows_reason or self.format_adherence > 0

    def __str__(self) -> str:
        return "\n".join(f"{name:<25}{value}" for name, value in self.figures().items())

    def figures(self) -> dict[str, str]:
        """Returns the metrics as texts, in the order and by the names of the printed table.

        They are "correct (95 % interval)", "correct, SOURCE" for every source of a mix, "well-formed reasoning",
        "tokens per answer", "cut off at N" for the token limit N, "perplexity" and "not judged (error)". The reasoning
        is missing unless `reasons`, and the errors if `failed` is 0. A perplexity that is not measured is "none".
        """
        return {
            "correct (95 % interval)": str(self.accuracy),
            **{f"correct, {name}": str(accuracy) for name, accuracy in self.by_source.items()},
            **({"well-formed reasoning": f"{self.format_adherence:.1%}"} if self.reasons else {}),
            "tokens per answer": f"{self.mean_tokens:.1f}",
            f"cut off at {self.max_new_tokens}": f"{self.unfinished:.1%}",
            "perplexity": "none" if self.perplexity is None else f"{self.perplexity:.4g}",
            **({"not judged (error)": str(self.failed)} if self.failed else {}),
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields without the samples for JSON, with the properties "failed" and "reasons".

        "accuracy" is a dictionary of the fields of `Accuracy` and "share", which is None without judged rows. Only a
        mix has "by_source": a dictionary with "correct" and "total" for every source.
        """
        plain = asdict(self)
        del plain["samples"]
        plain["accuracy"]["share"] = self.accuracy.share if self.accuracy.total else None
        by_source = {name: {"correct": one.correct, "total": one.total} for name, one in self.by_source.items()}
        plain |= {"by_source": by_source} if by_source else {}
        return {**plain, "failed": self.failed, "reasons": self.reasons}


@dataclass(frozen=True)
class Comparison:
    """Base and tuned model on the same rows.

    Attributes:
        base: the base model's answers.
        tuned: the tuned model's answers.
        gained: number of rows that only the tuned model answers correctly.
        lost: number of rows that only the base model answers correctly.
        p_value: `mcnemar`: the probability of a difference at least as large if tuning changed nothing.
        seen_in_training: number of held-out rows left out because the training data contain their questions.
        training_data_known: whether the training questions of the adapter's run are known. If not, `seen_in_training`
            counts questions in the training data of the configuration.
        head: if the objective has a head, the tuned model without it (as base) compared with it; else None.
    """

    base: Evaluation
    tuned: Evaluation
    gained: int
    lost: int
    p_value: float
    seen_in_training: int = 0
    training_data_known: bool = True
    head: Comparison | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON, and "samples"; "without_head" replaces `head` if there is a head.

        "base" and "tuned" are as in `Evaluation.to_dict`. A sample has "question", "expected" and the answers "base"
        and "tuned". An answer has "answer", "correct" and, if the verifier raised an error, "error".
        """
        samples = [
            {"question": base.question, "expected": base.expected, "base": base.to_dict(), "tuned": tuned.to_dict()}
            for base, tuned in zip(self.base.samples, self.tuned.samples, strict=True)
        ]
        counts = {name: value for name, value in vars(self).items() if name not in ("base", "tuned", "head")}
        models = {"base": self.base.to_dict(), "tuned": self.tuned.to_dict()}
        head = {"without_head": self.head.to_dict()} if self.head else {}
        return {**models, **counts, "samples": samples, **head}

    def __str__(self) -> str:
        before, after = self.base.figures(), self.tuned.figures()
        figures = before | after
        rows = [{"": name, "base": before.get(name, "0"), "tuned": after.get(name, "0")} for name in figures]
        lines = [text_tables.to_text(rows)]
        if self.base.accuracy.total:
            lines.append(
                f"{self.gained} rows are correct only with the tuned model, {self.lost} only with the base; "
                f"p = {self.p_value:.2g} (McNemar, exact)"
            )
        if self.head:
            without = self.head.base
            lines.append(
                f"without its head: {without.accuracy}, perplexity {without.figures()['perplexity']}; "
                f"{self.head.gained} rows correct only with it, {self.head.lost} only without; "
                f"p = {self.head.p_value:.2g}"
            )
        lines.append(f"{self.seen_in_training} rows left out, because their questions are in the training data")
        lines += [] if self.training_data_known else [UNKNOWN]
        pairs = list(zip(self.base.samples, self.tuned.samples, strict=True))
        raised = [pair for pair in pairs[_SHOWN:] if pair[0].error or pair[1].error][:_SHOWN]
        for base, tuned in [*pairs[:_SHOWN], *raised]:
            lines += ["", base.question.strip(), f"  expected: {base.expected}"]
            for name, sample in (("base", base), ("tuned", tuned)):
                verdict = f", {sample.verdict}" if sample.verdict else ""
                lines += [f"  {name}{verdict}:", indent(sample.answer.strip(), "    ")]
        return "\n".join(lines)


def compare(
    base: Evaluation, tuned: Evaluation, seen_in_training: int = 0, training_data_known: bool = True
) -> Comparison:
    """Compares two evaluations row by row; a row that is not judged in one of them is neither gained nor lost.

    `seen_in_training` and `training_data_known` are only copied to the result.

    Raises:
        ValueError: the rows, their order or the token limits of answers differ.
    """
    if [(s.question, s.expected) for s in base.samples] != [(s.question, s.expected) for s in tuned.samples]:
        raise ValueError("the two evaluations have different rows; evaluate both on the same rows and prompts")
    if base.max_new_tokens != tuned.max_new_tokens:
        raise ValueError(
            f"one evaluation allowed answers of {base.max_new_tokens} tokens, the other {tuned.max_new_tokens}; "
            "evaluate both with the same tracking.generate_tokens"
        )
    pairs = [(b.correct, t.correct) for b, t in zip(base.samples, tuned.samples, strict=True)]
    gained, lost = pairs.count((False, True)), pairs.count((True, False))
    return Comparison(base, tuned, gained, lost, mcnemar(lost, gained), seen_in_training, training_data_known)


def read_comparison(run: Path) -> dict[str, Any] | None:
    """Returns eval.json (`Comparison.to_dict`) of a run's local folder; None without it, ValueError if damaged."""
    path = run / "eval.json"
    try:
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    except ValueError as error:
        advice = f"delete it, or write it again with evaluate adapter={run / 'adapter'}"
        raise ValueError(f"{path} is damaged ({error}): {advice}") from error
    return found
