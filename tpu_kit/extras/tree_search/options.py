"""Options of the tree search; loads no torch, so that the command line reads them quickly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tpu_kit.config.fields import check_knobs, knob
from tpu_kit.config.named_values import imported

Scorer = Callable[[str, Sequence[str]], float]
"""A user's scoring function of the question and the steps so far; higher is better."""


@dataclass(frozen=True)
class SearchOptions:
    """Options of the tree search.

    Raises:
        ValueError: a value is out of range.
    """

    max_thoughts: int = knob(
        5, "Maximum steps of a chain; then the reasoning is closed, and the model answers.", at_least=1
    )
    thoughts_per_step: int = knob(3, "Proposals for every next step.", at_least=1)
    beam: int = knob(2, "Chains to keep at every level (beam), or to extend at a time (best-first).", at_least=1)
    strategy: Literal["beam", "best-first"] = knob(
        "beam", "beam: extend the best chains of the last level; best-first: the best chains of the whole tree."
    )
    score: Literal["logprob", "self-evaluation"] | Scorer = knob(  # noqa: RUF009  `knob` makes a field
        "logprob",
        "logprob (mean log-probability of the chain's tokens), self-evaluation (the model's probability of yes when "
        "asked whether the steps are right), or a function, also as module:function.",
    )
    max_tokens: int = knob(1024, "Budget of generated tokens, answers and self-evaluation included; never exceeded.")
    thought_tokens: int = knob(32, "Maximum tokens of a step.", at_least=1)
    answer_tokens: int = knob(16, "Maximum tokens of an answer.", at_least=1)
    temperature: float = knob(0.7, "Temperature of the proposals; at 0 all would be equal.", above=0, below=1e4)
    seed: int = knob(0, "Seed of the proposals.", at_least=0)

    def __post_init__(self) -> None:
        problems = check_knobs(self)
        if isinstance(self.score, str) and ":" in self.score:
            try:
                object.__setattr__(self, "score", imported(self.score))
            except ValueError as error:
                problems.append(f"score={self.score}: {error}")
        least = self.thoughts_per_step * self.thought_tokens + self.answer_tokens
        if self.max_tokens < least:
            problems.append(f"max_tokens={self.max_tokens} is less than one level may take: {least}")
        if problems:
            raise ValueError("search: " + "; ".join(problems))
