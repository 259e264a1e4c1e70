"""Translates other trainers' names of preference losses to `preference.losses` and `preference.loss_weights`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from tpu_kit.config.fields import show
from tpu_kit.config.sections.preference import LOSSES, REFUSED

if TYPE_CHECKING:
    from tpu_kit.config.files.other_trainers import Translation

METHODS = ("dpo", "ipo", "simpo", "orpo", "kto")
"""The values of axolotl's `rl` for preference losses; kto trains on replies with a label, the others on pairs."""


def is_pair_loss(value: Any) -> bool:
    """Returns whether a value of `loss_type`, a name or a list, has a name in `LOSSES` or `REFUSED`."""
    return bool({str(name) for name in _listed(value)} & {*LOSSES, *REFUSED})


def name_losses(values: dict[str, Any], case: Collection[str], result: Translation) -> None:
    """Translates the preference losses of another trainer, and the weight of the likelihood beside them.

    The keys depend on the trainer, such as loss_type, loss_weights and rpo_alpha for TRL. If the likelihood's weight
    (its default, if absent) is not 0, the losses also have sft with this weight.

    Args:
        values: the file's values by dotted name; the function removes the keys that it translates.
        case: words of the trainer's name, such as "axolotl" or "CPO", and the cases of other_trainers.toml that hold.
        result: receives `preference.losses`, `preference.loss_weights` (if there are weights), and a note. It receives
            a problem if the likelihood's weight is no number, or if it is not 0 and the loss is kto. A loss of
            CPOTrainer is a problem, too, unless it is simpo or alphapo.
    """
    said = dict[str, Any]()

    def take(key: str, absent: Any = None) -> Any:
        value = values.pop(key, None)
        if value is None:
            return absent
        said[key] = value
        return value

    weights, likelihood, usual, why = None, "rpo_alpha", 0.0, ""
    if "axolotl" in case:
        method = take("rl")
        names = _listed(take("dpo_loss_type", "sigmoid")) if method == "dpo" else [method]
        weights = take("dpo_loss_weights")
        if method == "simpo":
            likelihood, usual = "cpo_alpha", 1.0
    elif "LLaMA-Factory" in case:
        names, likelihood = ["kto"] if "labels" in case else [take("pref_loss", "sigmoid")], "pref_ftx"
        if names == ["orpo"]:
            why = "its likelihood includes the prompt, as in TRL"
    elif "CPO" in case:
        names, likelihood, usual = [take("loss_type", "sigmoid")], "cpo_alpha", 1.0
        if names == ["alphapo"]:  # alphapo turns that weight off
            names, usual = ["simpo"], 0.0
            values.pop("cpo_alpha", None)
        if names != ["simpo"]:
            text = "of CPOTrainer has no reference, but here it has; set loss_type=simpo, or losses=[orpo]"
            result.problems.append(f"loss_type: {show(names[0])} {text}")
            values.pop("cpo_alpha", None)
            return
    else:
        names, weights = _listed(take("loss_type", ["kto"] if "KTO" in case else [])), take("loss_weights")
        if not names and "rpo_alpha" in values:
            names = ["sigmoid"]
    if usual and values.get(likelihood) is None:
        why = f"{likelihood} is absent, and its default is {usual:g}: sft keeps the chosen replies likely"
    weight = take(likelihood, usual)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        result.problems.append(f"{likelihood}: {show(weight)} is not a number")
    elif weight and names == ["kto"]:
        result.problems.append(f"{likelihood}: {show(weight)} has no counterpart with kto; set it to 0")
    elif weight:
        weights = [*(weights if isinstance(weights, list) else [1.0] * len(names)), weight]
        names = [*names, "sft"]
        if likelihood == "pref_ftx":
            why = "sft averages over all tokens of the chosen replies here, but first within every reply there"
    made = {"preference.losses": names or None, "preference.loss_weights": weights}
    made = {name: value for name, value in made.items() if value is not None}
    result.values |= made
    if made:
        told = ", ".join(f"{name}={show(value)}" for name, value in made.items())
        keys = ", ".join(f"{key}={show(value)}" for key, value in said.items())
        result.notes.append(f"{keys or 'the default loss'} -> {told}" + (f": {why}" if why else ""))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
