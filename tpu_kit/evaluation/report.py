"""Results of an evaluation and of a comparison: accuracy with its interval, a paired test, tables and JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from textwrap import indent
from typing import Any

_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution, for intervals of 95 %
_SHOWN = 3  # samples in the table


@dataclass(frozen=True)
class Accuracy:
    """How many answers are correct, with the 95 % interval of Wilson's score.

    With p = correct / total, n = total and z = 1.96 the interval is

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    (E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22, 1927). It stays inside
    0 to 1 and is honest for few rows, where the usual p +- z sqrt(p (1 - p) / n) is not.

    Attributes:
        correct: rows answered correctly.
        total: rows that have an answer to compare with.
        low: lower end of the interval, a share; 0 without rows.
        high: upper end; 1 without rows.
    """

    correct: int
    total: int
    low: float
    high: float

    @classmethod
    def of(cls, correct: int, total: int) -> Accuracy:
        """Compute the interval."""
        assert 0 <= correct <= total, (correct, total)
        if not total:
            return cls(0, 0, 0.0, 1.0)
        share, z2 = correct / total, _Z * _Z / total
        middle = share + z2 / 2
        half = _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total))
        # The two ends are exact where every or no answer is correct; rounding may miss them by 1e-17.
        low = 0.0 if correct == 0 else (middle - half) / (1 + z2)
        high = 1.0 if correct == total else (middle + half) / (1 + z2)
        return cls(correct, total, low, high)

    @property
    def share(self) -> float:
        """Correct answers as a share of all; not a number without rows."""
        return self.correct / self.total if self.total else math.nan

    def __str__(self) -> str:
        if not self.total:
            return "no row has an answer to compare with"
        return f"{self.correct} of {self.total} = {self.share:.1%} ({self.low:.1%} to {self.high:.1%})"


def mcnemar(only_first: int, only_second: int) -> float:
    """Give the two-sided p-value of McNemar's exact test.

    The rows that both models get right, or both wrong, say nothing of which is better. If neither is, each of the
    others falls to either with probability 1/2, so p = min(1, 2 P(X <= min(a, b))) with X ~ Binomial(a + b, 1/2)
    (Q. McNemar, Psychometrika 12, 1947; the exact form as in Fagerland et al., BMC Med. Res. Methodol. 13, 2013).

    Args:
        only_first: a, the rows that only the first model answers correctly.
        only_second: b, those that only the second does.
    """
    n = only_first + only_second
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(only_first, only_second) + 1)) / 2**n)


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
