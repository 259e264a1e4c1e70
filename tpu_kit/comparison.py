"""What an evaluation found, and how two of them compare: a table for people, and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from textwrap import indent
from typing import Any

from tpu_kit.accuracy import Accuracy, mcnemar

_SHOWN = 3  # samples in the table


@dataclass(frozen=True)
class Sample:
    """One answer.

    Attributes:
        question: the row's, or the prompt if the row has none.
        expected: the row's answer; None if it has none.
        answer: what the model wrote, with the reasoning's opening tag if the prompt ended in it.
        correct: the verifier's word; None where it did not judge the row.
        error: what the verifier raised; empty if nothing.
    """

    question: str
    expected: str | None
    answer: str
    correct: bool | None
    error: str = ""

    @property
    def verdict(self) -> str:
        """The verifier's word, for a table; empty where there is none."""
        if self.error:
            return f"not judged, the verifier raised {self.error}"
        return {True: "correct", False: "wrong", None: ""}[self.correct]

    def to_dict(self) -> dict[str, Any]:
        """The answer and what was found of it; plain values."""
        return {"answer": self.answer, "correct": self.correct} | ({"error": self.error} if self.error else {})


@dataclass(frozen=True)
class Evaluation:
    """How one model answered.

    Attributes:
        accuracy: of the rows that were judged.
        format_adherence: share of answers that are one well-formed reasoning block and an answer after it.
        mean_tokens: mean length of an answer in tokens, with the token that ends it.
        unfinished: share of answers that were cut off at `max_new_tokens`.
        max_new_tokens: the most tokens of an answer.
        samples: every row.
        perplexity: e to the mean loss, in nats, of the rows' own tokens that carry loss in training; None where no row
            has such tokens.
        perplexity_tokens: how many these are.
    """

    accuracy: Accuracy
    format_adherence: float
    mean_tokens: float
    unfinished: float
    max_new_tokens: int
    samples: tuple[Sample, ...]
    perplexity: float | None = None
    perplexity_tokens: int = 0

    @property
    def failed(self) -> int:
        """Answers on which the verifier raised; they are in no accuracy."""
        return sum(bool(sample.error) for sample in self.samples)

    def __str__(self) -> str:
        return "\n".join(f"{name:<25}{value}" for name, value in self.figures().items())

    def figures(self) -> dict[str, str]:
        """Name and value of each measure, for a table."""
        return {
            "correct (95 % interval)": str(self.accuracy),
            "well-formed reasoning": f"{self.format_adherence:.1%}",
            "tokens per answer": f"{self.mean_tokens:.1f}",
            f"cut off at {self.max_new_tokens}": f"{self.unfinished:.1%}",
            "perplexity": "none" if self.perplexity is None else f"{self.perplexity:.4g}",
            **({"not judged (error)": str(self.failed)} if self.failed else {}),
        }

    def to_dict(self) -> dict[str, Any]:
        """All of it but the samples; plain values."""
        plain = asdict(self)
        del plain["samples"]
        plain["accuracy"]["share"] = self.accuracy.share if self.accuracy.total else None
        return {**plain, "failed": self.failed}


@dataclass(frozen=True)
class Comparison:
    """Base and tuned model on the same rows.

    Attributes:
        base: the base model's answers.
        tuned: the tuned model's.
        gained: rows that only the tuned model answers correctly.
        lost: rows that only the base model does.
        p_value: of `mcnemar`: how likely a difference this large is if tuning changed nothing.
        seen_in_training: held-out rows that were left out because training asks the same.
    """

    base: Evaluation
    tuned: Evaluation
    gained: int
    lost: int
    p_value: float
    seen_in_training: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, such as JSON has."""
        samples = [
            {"question": base.question, "expected": base.expected, "base": base.to_dict(), "tuned": tuned.to_dict()}
            for base, tuned in zip(self.base.samples, self.tuned.samples, strict=True)
        ]
        return {
            "base": self.base.to_dict(),
            "tuned": self.tuned.to_dict(),
            "gained": self.gained,
            "lost": self.lost,
            "p_value": self.p_value,
            "seen_in_training": self.seen_in_training,
            "samples": samples,
        }

    def __str__(self) -> str:
        before, after = self.base.figures(), self.tuned.figures()
        names = [*before, *(name for name in after if name not in before)]
        rows = [("", "base", "tuned"), *((name, before.get(name, "0"), after.get(name, "0")) for name in names)]
        wide = [max(len(row[i]) for row in rows) + 2 for i in range(2)]
        lines = [f"{name:<{wide[0]}}{base:<{wide[1]}}{tuned}" for name, base, tuned in rows]
        if self.base.accuracy.total:
            lines.append(
                f"{self.gained} rows only the tuned model answers correctly, {self.lost} only the base; "
                f"p = {self.p_value:.2g} (McNemar, exact)"
            )
        lines.append(f"{self.seen_in_training} rows left out, because the training data ask the same")
        pairs = list(zip(self.base.samples, self.tuned.samples, strict=True))
        raised = [pair for pair in pairs[_SHOWN:] if pair[0].error or pair[1].error][:_SHOWN]
        for base, tuned in [*pairs[:_SHOWN], *raised]:
            lines += ["", base.question.strip(), f"  expected: {base.expected}"]
            for name, sample in (("base", base), ("tuned", tuned)):
                verdict = f", {sample.verdict}" if sample.verdict else ""
                lines += [f"  {name}{verdict}:", indent(sample.answer.strip(), "    ")]
        return "\n".join(lines)


def compare(base: Evaluation, tuned: Evaluation, seen_in_training: int = 0) -> Comparison:
    """Compare two evaluations row by row; rows that one of them did not judge count for neither.

    Raises:
        ValueError: they are not of the same rows in the same order, or one was allowed longer answers.
    """
    if [(s.question, s.expected) for s in base.samples] != [(s.question, s.expected) for s in tuned.samples]:
        raise ValueError("the two evaluations are not of the same rows; evaluate both on the same rows and prompts")
    if base.max_new_tokens != tuned.max_new_tokens:
        raise ValueError(
            f"one evaluation allowed answers of {base.max_new_tokens} tokens and the other of {tuned.max_new_tokens}; "
            "evaluate both with one tracking.generate_tokens"
        )
    pairs = [(b.correct, t.correct) for b, t in zip(base.samples, tuned.samples, strict=True)]
    gained, lost = pairs.count((False, True)), pairs.count((True, False))
    return Comparison(base, tuned, gained, lost, mcnemar(lost, gained), seen_in_training)
