"""A share with its interval, and whether two shares of the same rows differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution, for intervals of 95 %


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
