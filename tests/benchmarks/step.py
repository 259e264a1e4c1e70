"""Compares our training step with TRL's SFTTrainer (stock) on XLA:CPU: `python -m tests.benchmarks.step`.

Both train the same model (Qwen2, random weights, bf16, LoRA on all linear layers) on the same rows of equal length, in
the same order, with AdamW. Averaging, packing and evaluation are off in the comparison, because stock cannot run them
on XLA. Stock cannot recompute layers there either, so ours keeps the results of matrix products (remat=outputs).
Further rows show ours with everything on. Every run is a fresh process, and the two alternate, so that other work on
the machine affects both equally. Times are processor times, because wall times depend more on other work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.step_children import WARM_UP, Measured, ours
from tests.support.child_processes import QUICK_XLA_FLAGS, REPOSITORY, child_environment, run_python
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.distributed.launch import launch

GOAL = 0.64
ROWS, BATCH, LENGTH = 64, 4, 128
MODEL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": LENGTH, "tie_word_embeddings": False,
}  # fmt: skip
EVERYTHING = {
    "optim.ema_decay": 0.99, "optim.eval_steps": 5, "optim.warmup_steps": 3,
    "data.packing": True, "data.eval_rows": 8, "tracking.tensorboard": False,
}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """All measurements.

    Attributes:
        peer: The peer and its versions.
        pairs: (stock, ours) of each turn.
        others: Further runs by name.
    """

    peer: str
    pairs: list[tuple[Measured, Measured]]
    others: dict[str, Measured]

    def ratios(self) -> list[float]:
        """Our processor time over stock's, for each pair."""
        return [mine.cpu_seconds / theirs.cpu_seconds for theirs, mine in self.pairs]

    def goals(self) -> dict[str, bool]:
        """Whether each goal is met."""
        mine = [run for _, run in self.pairs] + [run for name, run in self.others.items() if name.startswith("ours")]
        same = [abs(a.loss - b.loss) < 0.02 * a.loss for a, b in self.pairs]  # their adapters differ in random numbers
        return {
            "the same task: mean losses within 2 %": all(same),
            f"processor time, ours / stock, median <= {GOAL:.2f}": median(self.ratios()) <= GOAL,
            "1 execution per optimizer step": all(run.executions == 1 for run in mine),
            "0 host syncs and 0 device reads per step": all(run.host_syncs == run.device_reads == 0 for run in mine),
            "1 training program": all(run.programs[1] == 1 for run in mine),
            "1 evaluation program where there is one": all(
                run.programs[2] == ("everything" in name) for name, run in self.others.items() if "ours" in name
            ),
            "no program compiled in the last step, which logs and saves": all(run.programs[3] == 0 for run in mine),
            "at most 3 set-up programs": all(run.programs[0] <= 3 for run in mine),
        }

    def __str__(self) -> str:
        named = {"stock": self.pairs[0][0], "ours": self.pairs[0][1], **self.others}
        seconds = {"stock": [a.cpu_seconds for a, _ in self.pairs], "ours": [b.cpu_seconds for _, b in self.pairs]}
        lines = [
            f"stock is {self.peer}",
            f"{MODEL['num_hidden_layers']} layers, {MODEL['hidden_size']} wide, {BATCH} x {LENGTH} tokens a pass.",
            "Counts: of one replica, in steady steps that neither log nor evaluate.",
            "CPU seconds: of all replicas, evaluations included, logging not.",
            "",
            f"{'':<28}{'programs compiled':^26}{'per optimizer step':>40}  {'CPU seconds per step':^24}{'mean':>8}",
            " " * 28
            + "".join(f"{word:>6}" for word in ("set-up", "train", "eval", "end"))
            + "".join(f"{word:>14}" for word in ("executions", "host syncs", "device reads"))
            + "".join(f"{word:>8}" for word in ("min", "median", "max", "loss")),
        ]
        for name, run in named.items():
            times = seconds.get(name, [run.cpu_seconds])
            counts = (run.executions, run.host_syncs, run.device_reads)
            lines.append(
                f"{name:<28}"
                + "".join(f"{count:>6}" for count in run.programs)
                + "".join(f"{count:>14g}" for count in counts)
                + "".join(f"{value:>8.3f}" for value in (min(times), median(times), max(times), run.loss))
            )
        ratios = self.ratios()
        lines += [
            "",
            f"ours / stock over {len(ratios)} alternating pair(s): min {min(ratios):.3f}, median {median(ratios):.3f}, "
            f"max {max(ratios):.3f}",
            *(f"{'met     ' if met else 'NOT MET '}{goal}" for goal, met in self.goals().items()),
        ]
        return "\n".join(lines)


def prepare(folder: Path) -> None:
    """Writes the model, its tokenizer and the rows; each row is longer than `LENGTH` and gets truncated."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from tpu_kit.assets import embedded

    tokenizer = AutoTokenizer.from_pretrained(embedded.model_dir())
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**MODEL)).to(torch.bfloat16).save_pretrained(folder)
    problems = iter(embedded.cot_rows("train", 20 * ROWS))
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(ROWS):
            text = ""
            while len(tokenizer(text)["input_ids"]) <= LENGTH:
                text += "{question} {reasoning} {answer}\n".format(**next(problems))
            file.write(json.dumps({"text": text}) + "\n")


def settings(folder: Path, steps: int, changes: Mapping[str, Any]) -> TrainConfig:
    """The configuration of both sides, with changes."""
    return load_config(
        {
            "model.name": str(folder), "lora.r": 8, "lora.alpha": 16.0,
            "data.source": str(folder / "rows.jsonl"), "data.format": "text", "data.max_length": LENGTH,
            "data.packing": False, "data.shuffle": False, "data.eval_rows": 0, "data.loss_on": "all",
            "optim.batch_size": BATCH, "optim.max_steps": steps, "optim.remat": "outputs", "optim.schedule": "linear",
            "launch.device_type": "xla-cpu", "launch.num_replicas": 1, "tracking.logging_steps": steps,
            "checkpoint.resume": "never", "checkpoint.save_steps": steps, "output_dir": str(folder / "run"),
            **changes,
        }
    )  # fmt: skip


def run_ours(config: TrainConfig) -> Measured:
    """Runs ours once in a fresh process, started by `launch`."""
    config.output_path.mkdir(parents=True, exist_ok=True)
    text = StringIO()
    try:
        with redirect_stdout(text), redirect_stderr(text):
            return launch(ours, config)
    except BaseException:
        print(text.getvalue(), file=sys.stderr)
        raise


def run_stock(config: TrainConfig) -> Measured:
    """Runs SFTTrainer once in a fresh process."""
    flags = os.environ.get("XLA_FLAGS")
    command = ["-m", "tests.benchmarks.step_children", json.dumps(config.to_dict())]
    done = run_python(command, env={"XLA_FLAGS": flags, "USE_TORCH_XLA": "1"}, timeout=1800)
    values = json.loads(done.stdout.splitlines()[-1])
    return Measured(**{**values, "programs": tuple(values["programs"])})


def measure(pairs: int, steps: int, smoke: bool) -> Report:
    """Runs all processes one after the other.

    Args:
        pairs: Turns of stock and ours.
        steps: Measured steps per run.
        smoke: Fast compiles and only one further run, to show that the benchmark works; its times mean nothing.
    """
    inherited = child_environment({"XLA_FLAGS": QUICK_XLA_FLAGS if smoke else None, "PYTHONPATH": str(REPOSITORY)})
    os.environ.clear()
    os.environ.update(inherited)
    total = WARM_UP + 1 + steps
    others = {
        f"ours, everything, {replicas} x acc. {passes}": {
            **EVERYTHING, "launch.num_replicas": replicas, "optim.gradient_accumulation": passes
        }
        for replicas, passes in ([(1, 1)] if smoke else [(1, 1), (1, 2), (4, 1), (4, 2)])
    }  # fmt: skip
    if not smoke:
        others["ours, acc. 2"] = {"optim.gradient_accumulation": 2}
        others["stock, acc. 2"] = {"optim.gradient_accumulation": 2}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        turns = []
        for turn in range(pairs):
            config = settings(folder, total, {})
            turns.append((run_stock(config), run_ours(config)))
            _progress(f"pair {turn + 1} of {pairs}: {turns[-1][0].cpu_seconds:.3f}, {turns[-1][1].cpu_seconds:.3f}")
        measured = {}
        for other, changes in others.items():
            run = run_stock if other.startswith("stock") else run_ours
            measured[other] = run(settings(folder, total, changes))
            _progress(f"{other}: {measured[other].cpu_seconds:.3f}")
    peer = "SFTTrainer of " + ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers", "torch_xla"))
    return Report(peer, turns, measured)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Parses the arguments, measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.step", description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="alternating runs of stock and ours (default 5)")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each run (default 15)")
    parser.add_argument("--smoke", action="store_true", help="one short pair: does it work?")
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    arguments = parser.parse_args()
    pairs, steps = (1, 6) if arguments.smoke else (arguments.pairs, arguments.steps)
    report = measure(pairs, steps, arguments.smoke)
    if arguments.json:
        print(json.dumps({**asdict(report), "ratios": report.ratios(), "goals": report.goals()}))
    else:
        print(report)


if __name__ == "__main__":
    main()
