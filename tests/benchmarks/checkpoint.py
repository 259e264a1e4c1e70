"""Measures the cost of a checkpoint for a training loop, saved in the background and saved while the loop waits.

    python -m tests.benchmarks.checkpoint

A loop on the CPU trains a 20 MB LoRA adapter with AdamW, in blocks of a few steps that last longer than writing a
checkpoint. Before each block the loop saves nothing, saves in the background, or saves and waits. The three modes take
turns, so that other work on the machine disturbs all of them equally. The cost of a save is a block's time minus the
time of the same turn's block without a save. It includes the copy of the tensors and the slowdown of the steps during
the write. The loop uses one core, because the host of an accelerator leaves the other cores to the writer.

A preemption notice comes at a random moment of a step. The time until the checkpoint is durable has the rest of the
step, and copying, writing, flushing and naming the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tpu_kit.machine.storage.object_store import is_url, join
from tpu_kit.training.checkpoint.manager import CheckpointManager

INTERVAL = 50  # steps between saves, for the share of step time
MOST_SHARE, MOST_NOTICE = 0.01, 5.0
NOTICES = 10
MODES = ("no save", "background", "waiting")
MODEL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 256,
}  # fmt: skip
RANK, BATCH, LENGTH = 288, 2, 128  # gives an adapter of 20 MB


@dataclass(frozen=True)
class Report:
    """All measurements, in seconds.

    Attributes:
        adapter_bytes: The size of the adapter's tensors.
        checkpoint_bytes: The size of the checkpoint: the adapter, its trained tensors, and AdamW's two moments.
        steps: Steps per block.
        blocks: By mode, each turn's time of a block.
        calls: By mode, the time that each `save` (and `wait`) blocked the loop.
        notices: The time from each notice until its checkpoint was durable.
        outlasted: Blocks that ended before the write did, so that their cost is not fully measured.
    """

    adapter_bytes: int
    checkpoint_bytes: int
    steps: int
    blocks: dict[str, list[float]]
    calls: dict[str, list[float]]
    notices: list[float]
    outlasted: int

    def step(self) -> float:
        """Median time of a step without a save."""
        return median(self.blocks["no save"]) / self.steps

    def lost(self, mode: str) -> list[float]:
        """The time lost to the save, for each turn."""
        return [with_save - none for none, with_save in zip(self.blocks["no save"], self.blocks[mode], strict=True)]

    def share(self, mode: str) -> float:
        """The time lost to saves as a share of the step time, with a save every INTERVAL steps."""
        return median(self.lost(mode)) / (INTERVAL * self.step())

    def goals(self) -> dict[str, bool]:
        """Whether each goal is met."""
        return {
            f"<= {MOST_SHARE:.0%} of step time, in the background, a save every {INTERVAL} steps": (
                self.share("background") <= MOST_SHARE
            ),
            f"<= {MOST_NOTICE:g} s from notice to durable, each time": max(self.notices) <= MOST_NOTICE,
        }

    def __str__(self) -> str:
        turns = len(self.blocks["no save"])
        lines = [
            f"adapter {self.adapter_bytes / 1e6:.1f} MB, checkpoint {self.checkpoint_bytes / 1e6:.1f} MB; "
            f"{turns} turns of {self.steps} steps; a step takes {self.step():.3f} s; the writing outlasted "
            f"{self.outlasted} blocks",
            "",
            f"{'seconds':<12}{'held up by the call':^26}{'step time lost per save':^28}{f'share at {INTERVAL}':>12}",
            " " * 12 + "".join(f"{word:>9}" for word in ("min", "median", "max") * 2),
        ]
        for mode in MODES[1:]:
            lost, calls = self.lost(mode), self.calls[mode]
            values = [value for times in (calls, lost) for value in (min(times), median(times), max(times))]
            lines.append(f"{mode:<12}" + "".join(f"{value:>9.3f}" for value in values) + f"{self.share(mode):>13.2%}")
        ratios = [a / b for a, b in zip(self.calls["background"], self.calls["waiting"], strict=True)]
        whole = median(self.lost("background")) / median(self.lost("waiting"))
        notices = self.notices
        lines += [
            "",
            f"background / waiting: call, min {min(ratios):.3f}, median {median(ratios):.3f}, max {max(ratios):.3f}; "
            f"step time lost, of the medians {whole:.3f}",
            f"notice to durable: min {min(notices):.2f} s, median {median(notices):.2f} s, max {max(notices):.2f} s",
            "",
            *(f"{'met     ' if met else 'NOT MET '}{goal}" for goal, met in self.goals().items()),
        ]
        return "\n".join(lines)


class Training:
    """A loop that trains an adapter on random tokens, with the tensors to save."""

    def __init__(self) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(0)
        torch.set_num_threads(1)
        settings = LoraConfig(r=RANK, target_modules="all-linear")
        self.model = get_peft_model(Qwen2ForCausalLM(Qwen2Config(**MODEL)), settings)
        self.trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=1e-4)
        self.ids = torch.randint(MODEL["vocab_size"], (BATCH, LENGTH))
        self.steps = 0

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def save(self, store: CheckpointManager) -> None:
        """Copies the tensors to the host, as a loop on an accelerator does, and starts the save."""
        state = {name: self.optimizer.state[value] for name, value in self.trained.items()}
        parameters = {name: value.detach().clone() for name, value in self.trained.items()}
        moments = {
            f"{name}.{key}": value[key].clone() for name, value in state.items() for key in ("exp_avg", "exp_avg_sq")
        }
        store.save(self.steps, {"adapter_model": parameters, "training": moments}, {"state": {}}, {})

    def notice(self, store: CheckpointManager, delay: float) -> float:
        """Steps until a notice comes after `delay` seconds, then saves; returns the seconds from notice to durable."""
        came: list[float] = []
        timer = threading.Timer(delay, lambda: came.append(time.perf_counter()))
        timer.start()
        while not came:
            self.step()
        self.save(store)
        store.wait()
        return time.perf_counter() - came[0]


def measure(place: Path | str, turns: int, steps: int) -> Report:
    """Runs all turns in this process.

    Args:
        place: The folder or URL for the checkpoints.
        turns: Blocks of each mode; the first NOTICES turns end with a notice.
        steps: Steps per block.
    """
    training = Training()
    blocks: dict[str, list[float]] = {mode: [] for mode in MODES}
    calls: dict[str, list[float]] = {mode: [] for mode in MODES[1:]}
    notices, outlasted = [], 0
    with CheckpointManager(join(place, "checkpoints"), keep=2) as store:
        for _ in range(3):
            training.step()
        for turn in range(turns):
            for mode in MODES[turn % 3 :] + MODES[: turn % 3]:
                start = time.perf_counter()
                if mode != "no save":
                    training.save(store)
                    if mode == "waiting":
                        store.wait()
                    calls[mode].append(time.perf_counter() - start)
                for _ in range(steps):
                    training.step()
                blocks[mode].append(time.perf_counter() - start)
                end = time.perf_counter()
                store.wait()
                outlasted += time.perf_counter() - end > 0.01
            if turn < NOTICES:
                notices.append(training.notice(store, delay=random.random() * blocks["no save"][-1] / steps))
        size = store.complete()[-1].size
    adapter = sum(value.numel() * value.element_size() for value in training.trained.values())
    return Report(adapter, size, steps, blocks, calls, notices, outlasted)


def main() -> None:
    """Parses the arguments, measures and prints."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("--place", help="a folder, or a URL in an object store (default: a temporary folder)")
    parser.add_argument("--turns", type=int, default=40, help="blocks of each mode (default 40)")
    parser.add_argument("--steps", type=int, default=2, help="steps of a block (default 2)")
    parser.add_argument("--smoke", action="store_true", help="two short turns: does it work?")
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    arguments = parser.parse_args()
    turns, steps = (2, 2) if arguments.smoke else (arguments.turns, arguments.steps)
    with tempfile.TemporaryDirectory() as temporary:
        place: Any = arguments.place or temporary
        report = measure(place if is_url(place) else Path(place), turns, steps)
    if arguments.json:
        print(json.dumps({**asdict(report), "goals": report.goals()}))
    else:
        print(report)


if __name__ == "__main__":
    main()
