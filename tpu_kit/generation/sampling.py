"""Sampling options; the import loads no torch, so that the command line reads them quickly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tpu_kit.config.fields import check_knobs, knob

if TYPE_CHECKING:
    import torch

Kind = Literal["greedy", "plain", "filtered"]


@dataclass(frozen=True)
class Sampling:
    """Options for choosing tokens and ending a reply.

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: int = knob(256, "Maximum length of a reply in tokens, its end token included.", at_least=1)
    temperature: float = knob(
        0.0, "0 takes the likeliest token; larger values divide the logits, and a token is drawn.",
        at_least=0, below=1e4,
    )  # fmt: skip
    top_k: int | None = knob(
        None, "Draw from this many likeliest tokens; 0 = all, null = the model's generation_config, or else all.",
        at_least=0,
    )  # fmt: skip
    top_p: float | None = knob(
        None, "Then from the fewest likeliest tokens whose probabilities sum to it; 1 = all, null as for top_k.",
        above=0, at_most=1,
    )  # fmt: skip
    min_p: float | None = knob(
        None, "Then from tokens with at least this share of the largest probability; 0 = all, null as for top_k.",
        at_least=0, at_most=1,
    )  # fmt: skip
    # Keskar et al., arXiv:1909.05858.
    repetition_penalty: float | None = knob(
        None, "Divides positive logits of tokens that occurred in prompt or reply, and multiplies negative logits; 1 = "
        "none, null as for top_k.",
        above=0, below=1e4,
    )  # fmt: skip
    seed: int = knob(0, "Seed of the random draws.", at_least=0)
    stop: tuple[str, ...] = knob((), "A reply ends before the first of these texts.")
    model_defaults: bool = knob(
        True, "Apply the model's generation_config, as transformers does: to the options above that are null, and "
        "others such as no_repeat_ngram_size and min_new_tokens.",
    )  # fmt: skip
    stop_in_reasoning: bool = knob(True, "Whether the texts of stop also end a reply within its reasoning.")
    tempered_logprobs: bool = knob(
        False, "Return log-probabilities at this temperature instead of the model's own (temperature 1)."
    )

    def __post_init__(self) -> None:
        if problems := check_knobs(self):
            raise ValueError("sampling: " + "; ".join(problems))

    @property
    def kind(self) -> Kind:
        """The variant of `decoder.choose`: "greedy", "plain" (all tokens) or "filtered" (top_k, top_p, min_p)."""
        if self.temperature == 0:
            return "greedy"
        return "filtered" if self.top_k or self.min_p or self.top_p not in (None, 1) else "plain"

    @property
    def penalises(self) -> bool:
        """Whether there is a repetition penalty."""
        return self.repetition_penalty not in (None, 1)

    def knobs(self, vocabulary: int) -> torch.Tensor:
        """Returns (6,) fp32 on the CPU for `decoder.choose`; None becomes the neutral value.

        They are temperature (1 if greedy), top_k (`vocabulary` for all tokens), top_p, min_p, repetition penalty, and
        the temperature of the log-probabilities: 1, or `temperature` with `tempered_logprobs`.
        """
        import torch

        top_k, temperature = self.top_k or vocabulary, self.temperature or 1.0
        own = temperature if self.tempered_logprobs else 1.0
        return torch.tensor([temperature, top_k, self.top_p or 1, self.min_p or 0, self.repetition_penalty or 1, own])

    def uniforms(self, steps: int, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Draws random numbers in [0, 1), (steps, rows) fp32 on the CPU; zeros if greedy.

        A row is (prompt number, sample number). It has its own generator, seeded with `seed` and these numbers, so a
        sample depends neither on the batch nor on the number of replicas.
        """
        import numpy as np
        import torch

        if self.kind == "greedy":
            return torch.zeros(steps, len(rows))
        streams = (np.random.default_rng((self.seed, *row)) for row in rows)
        return torch.from_numpy(np.stack([stream.random(steps, dtype=np.float32) for stream in streams], axis=1))
