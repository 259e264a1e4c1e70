"""The preference section: the losses of `dpo` on pairs of replies, with TRL's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tpu_kit.config.fields import knob

FREE = ("simpo", "orpo", "sft")
"""The losses without a reference model."""
LOSSES = (
    "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop", "sigmoid_norm", *FREE, "kto",
)  # fmt: skip
_SORTED = "sorts the pairs of a batch, so its loss would depend on how rows are divided into passes; use sigmoid"
REFUSED = {
    "aot": _SORTED, "aot_pair": _SORTED, "aot_unpaired": _SORTED,
    "cpo": "is sigmoid without a reference; use simpo or orpo", "kto_pair": "is no loss of TRL any more; use apo_zero",
    "apo_zero_unpaired": "is not here; use kto, which reads the same rows",
}  # fmt: skip
"""Losses of other trainers that the kit lacks -> why, and the alternative."""


def check_losses(names: tuple[str, ...]) -> None:
    """Raises ValueError if there is no name, a name is no loss or given twice, or kto is beside another loss."""
    problems = [f"{name!r} {REFUSED[name]}" for name in names if name in REFUSED]
    problems += [
        f"{name!r} is no loss; use {', '.join(LOSSES)}" for name in names if name not in LOSSES and name not in REFUSED
    ]
    problems += ["names a loss twice; set loss_weights"] * (len({*names}) < len(names))
    problems += ["kto is for rows with one reply and a label, and the other losses are not; remove them"] * (
        "kto" in names and len({*names}) > 1
    )
    if problems or not names:
        raise ValueError("; ".join(problems) or f"names no loss; use {', '.join(LOSSES)}")


@dataclass(frozen=True)
class PreferenceConfig:
    """The losses of `dpo` on pairs of a chosen and a rejected reply; names and formulas are TRL's."""

    losses: tuple[str, ...] = knob(
        ("sigmoid",),
        f"Losses to add up: {', '.join(LOSSES)}. sigmoid is DPO's own; simpo, orpo and sft need no reference model. "
        "kto is for rows with one reply and a label.",
        check=check_losses,
    )
    loss_weights: tuple[float, ...] | None = knob(None, "A weight for each loss; null = 1.")
    pref_beta: float = knob(
        0.1, "TRL's beta: a reward is this times a difference of log-probabilities (simpo: use 2 or more).", above=0
    )
    pref_smoothing: float = knob(
        0.0, "TRL's label_smoothing: assumed share of pairs with swapped labels, for robust, exo_pair and simpo.",
        at_least=0, below=0.5,
    )  # fmt: skip
    simpo_gamma: float = knob(0.5, "Target margin of simpo between the rewards of a pair.", at_least=0)
    discopop_tau: float = knob(0.05, "The temperature of discopop.", above=0)
    desirable_weight: float = knob(1.0, "Weight in kto of replies labelled good.", at_least=0)
    undesirable_weight: float = knob(1.0, "Weight in kto of replies labelled bad.", at_least=0)
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = knob(
        "reverse_kl", "f-divergence that turns likelihood ratios to the reference into scores."
    )
    f_alpha: float = knob(0.5, "The coefficient of alpha_divergence.", above=0)
    ld_alpha: float | None = knob(
        None, "Weight of the longer reply's tokens beyond the length of the shorter reply (LD-DPO); null = 1.",
        at_least=0, at_most=1,
    )  # fmt: skip
    reference: Literal["start", "step"] = knob(
        "start",
        "Reference model. start: the model before the first update, with its adapter, computed once; step: the model "
        "without its adapter, computed in every update.",
    )

    @property
    def weights(self) -> dict[str, float]:
        """Loss -> weight, 1 if loss_weights is null; raises ValueError if the two have different lengths."""
        return dict(zip(self.losses, self.loss_weights or (1.0,) * len(self.losses), strict=True))

    @property
    def labelled(self) -> bool:
        """Whether a row has one reply and a label instead of two replies."""
        return self.losses == ("kto",)

    @property
    def compares(self) -> bool:
        """Whether any loss needs a reference model: all but those in `FREE` do."""
        return not {*self.losses} <= {*FREE}
