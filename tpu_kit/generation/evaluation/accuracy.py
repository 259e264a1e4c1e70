"""Confidence interval of an accuracy, and a significance test of two models on the same rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution, for 95 % intervals


@dataclass(frozen=True)
class Accuracy:
    """The number of correct answers, with Wilson's 95 % score interval.

    With p = correct / total, n = total and z = 1.96 the interval is

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    (E. B. Wilson, JASA 22, 1927). Unlike p +- z sqrt(p (1 - p) / n), it is also valid for few rows.

    Attributes:
        correct: number of correctly answered rows.
        total: number of judged rows.
        low: lower end of the interval, 0 to 1; 0 without rows.
        high: upper end of the interval, 0 to 1; 1 without rows.
    """

    correct: int
    total: int
    low: float
    high: float

    @classmethod
    def of(cls, correct: int, total: int) -> Accuracy:
        """Computes the interval for `correct` of `total` rows; without rows it is 0 to 1."""
        assert 0 <= correct <= total, (correct, total)
        if not total:
            return cls(0, 0, 0.0, 1.0)
        share, z2 = correct / total, _Z * _Z / total
        middle = share + z2 / 2
        half = _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total))
        # If no answer or every answer is correct, an end is exactly 0 or 1; rounding would miss it by 1e-17.
        low = 0.0 if correct == 0 else (middle - half) / (1 + z2)
        high = 1.0 if correct == total else (middle + half) / (1 + z2)
        return cls(correct, total, low, high)

    @property
    def share(self) -> float:
        """The share of correct answers; NaN without rows."""
        return self.correct / self.total if self.total else math.nan

    def __str__(self) -> str:
        if not self.total:
            return "no row has an answer to compare with"
        return f"{self.correct} of {self.total} = {self.share:.1%} ({self.low:.1%} to {self.high:.1%})"


def mcnemar(only_first: int, only_second: int) -> float:
    """Returns the two-sided p-value of McNemar's exact test of two models on the same rows; 1 if they never differ.

    Only rows that exactly one model answers correctly count. If the models are equally good, either model is correct on
    such a row with probability 1/2: p = min(1, 2 P(X <= min(a, b))) with X ~ Binomial(a + b, 1/2)
    (Q. McNemar, Psychometrika 12, 1947; the exact form as in Fagerland et al., BMC Med. Res. Methodol. 13, 2013).

    Args:
        only_first: a, the rows that only the first model answers correctly.
        only_second: b, the rows that only the second model answers correctly.
    """
    n = only_first + only_second
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(only_first, only_second) + 1)) / 2**n)
