"""Self-consistency: several answers to a prompt vote (Wang et al., arXiv:2203.11171)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tpu_kit.completions import Completion, Prompt
from tpu_kit.generator import Generator
from tpu_kit.sampling import Sampling


@dataclass(frozen=True)
class Vote:
    """What the samples of one prompt agree on.

    Attributes:
        answer: the one with the most votes; of equals the one whose samples are likelier together. None if no sample
            came to an answer.
        votes: answer to number of samples.
        samples: all of them.
    """

    answer: str | None
    votes: Mapping[str, int]
    samples: tuple[Completion, ...]


def self_consistency(
    generator: Generator,
    prompts: Sequence[Prompt],
    n: int = 5,
    sampling: Sampling | None = None,
    key: Callable[[str], str] = str.strip,
) -> list[Vote]:
    """Draws n answers to each prompt and lets them vote.

    Args:
        generator: with room for `sampling`.
        prompts: as for `Generator.generate`.
        n: samples of each.
        sampling: how; with a temperature above 0.
        key: what of an answer counts, such as its number; an empty one has no vote.

    Raises:
        ValueError: the sampling is greedy, or n is less than 1.
    """
    sampling = sampling or Sampling(temperature=0.7)
    if n < 1 or not sampling.temperature > 0:
        raise ValueError(f"self-consistency: n={n} must be 1 or more, and temperature={sampling.temperature} above 0")
    replies = generator.generate(prompts, sampling, n)
    return [vote(replies[start : start + n], key) for start in range(0, len(replies), n)]


def vote(samples: Sequence[Completion], key: Callable[[str], str] = str.strip) -> Vote:
    """Lets samples of one prompt vote; the arguments are those of `self_consistency`."""
    votes: dict[str, int] = defaultdict(int)
    weight: dict[str, float] = defaultdict(float)
    for sample in samples:
        if answer := key(sample.answer):
            votes[answer] += 1
            weight[answer] += math.exp(sample.logprob)
    best = max(votes, key=lambda answer: (votes[answer], weight[answer]), default=None)
    return Vote(best, dict(votes), tuple(samples))
