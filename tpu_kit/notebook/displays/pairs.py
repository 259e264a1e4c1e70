"""Displays for the notebook of `dpo`: a pair, a run's rewards, and the gains in log-probability of a pair's tokens."""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from typing import Any

from tpu_kit.data.pairs import Unit
from tpu_kit.data.prepare import Prepared
from tpu_kit.generation.evaluation.accuracy import Accuracy
from tpu_kit.notebook.cells import TEXT_STYLE, show_example
from tpu_kit.notebook.kernel import new_figure, picture, show
from tpu_kit.training.losses.pair_updates import PAIR_FILE
from tpu_kit.training.metrics import read_metrics
from tpu_kit.training.outcome import BEFORE_TRAINING


def show_pair(prepared: Prepared, number: int = 0) -> None:
    """Shows training pair `number` (from 0) of `dpo`, not kto: the prompt, then both replies, compared text marked."""
    assert prepared.encoder is not None and prepared.train.documents.pairs is not None
    ids, mask = prepared.train.document(number)
    unit, decode = Unit(*prepared.train.documents.pairs[number].tolist()), prepared.encoder.tokenizer.decode
    ends = unit.prefix, unit.prefix + unit.chosen, len(ids)
    spans = [(decode(ids[: ends[0]]), False)]
    for name, begin, end in (("chosen", ends[0], ends[1]), ("rejected", ends[1], ends[2])):
        compared = begin + int(mask[begin:end].argmax())
        prompt = decode(ids[begin:compared]) if name == "chosen" else ""
        spans += [(f"{prompt}\n--- {name}:\n", False), (decode(ids[compared:end]), True)]
    show_example(spans)


def show_rewards(output_dir: str | Path, held_out: int) -> None:
    """Plots, by step, a run's rewards and its shares of pairs whose chosen reply has the larger reward.

    Plain text has only the last share of held-out pairs, empty without an evaluation after the start.

    Args:
        output_dir: the run's folder.
        held_out: number of held-out pairs that the run evaluated, for the 95 % interval of their share.
    """
    every = [record for record in read_metrics(output_dir) if "rewards/margins" in record]
    train, evaluated = (
        [one for one in every if one["kind"] in kinds] for kinds in (("train",), (BEFORE_TRAINING, "eval"))
    )
    figure, (rewards, shares) = new_figure(9, 3, columns=2)
    for name in ("chosen", "rejected"):
        rewards.plot(_steps(train), [one[f"rewards/{name}"] for one in train], marker=".", label=name)
        rewards.plot(_steps(evaluated), [one[f"rewards/{name}"] for one in evaluated], "o--", label=f"{name}, held out")
    rewards.set(xlabel="step", ylabel="reward")
    rewards.legend()
    shares.plot(
        _steps(train), [one.get("rewards/accuracies", math.nan) for one in train], marker=".", label="training pairs"
    )
    text = ""
    if after := [one for one in evaluated if one["step"] and "rewards/accuracies" in one]:
        found = [Accuracy.of(round(one["rewards/accuracies"] * held_out), held_out) for one in after]
        shares.plot(_steps(after), [one.share for one in found], "o--", label="held-out pairs")
        shares.fill_between(_steps(after), [one.low for one in found], [one.high for one in found], alpha=0.2)
        text = f"held-out pairs with the larger reward for the chosen reply: {found[-1]} at step {after[-1]['step']}"
    shares.set(xlabel="step", ylabel="share of right pairs", ylim=(0, 1))
    shares.legend()
    show(picture(figure, text))


def _steps(records: list[dict[str, Any]]) -> list[int]:
    return [one["step"] for one in records]


def show_gains(output_dir: str | Path) -> None:
    """Shows the run's first held-out pair token by token, with the gain in log-probability since the start of training.

    Green tokens have become likelier, red tokens less likely; darker tokens have changed more. Plain text has the gain
    in nats after each token. For a run without such a pair, prints the reason.
    """
    if not (file := Path(output_dir) / PAIR_FILE).exists():
        print(
            f"no {PAIR_FILE} in {output_dir}: it is written when held-out pairs are evaluated, and needs the tokens "
            "of a reference from the start, which simpo, orpo, kto and reference=step do not keep"
        )
        return
    pair = json.loads(file.read_text())
    print(f"step {pair['step']}: {pair['prompt']}")
    most = max(abs(gain) for name in ("chosen", "rejected") for gain in pair[name]["gained"]) or 1.0
    marked, plain = "", ""
    for name in ("chosen", "rejected"):
        reply = pair[name]
        head = f"{name}, reward {reply['reward']:+.3f}"
        tokens = list(zip(reply["tokens"], reply["gained"], strict=True))
        spans = (
            f"<span title='{gain:+.3f}' style='background:rgba({'45,106,79' if gain > 0 else '157,2,8'},"
            f"{0.6 * abs(gain) / most:.2f});border-right:1px solid #8888'>{html.escape(token)}</span>"
            for token, gain in tokens
        )
        marked += f"<p><b>{head}</b>\n{''.join(spans)}</p>"
        plain += f"{head}\n{'|'.join(f'{token}({gain:+.2f})' for token, gain in tokens)}\n\n"
    show({"text/html": f"<div style='{TEXT_STYLE}'>{marked}</div>", "text/plain": plain})
