"""Compares the LoRA step of `train` with TRL's SFTTrainer on an NVIDIA GPU: `python -m tests.benchmarks.cuda`.

Both train a Qwen2.5 shape with random bf16 weights, LoRA r=16 on all linear layers in fp32, AdamW, and rows of 1,024
tokens. remat=full is compared with gradient checkpointing, remat=none with none. TRL gets rows of a single document,
its fastest case, which needs no mask. The kit gets rows packed with documents of about 300 tokens. Both processes hold
the GPU at once and alternate: one makes some updates while the other waits, so that the state of the card affects both
equally. Tokens are positions of rows. MFU counts the FLOPs of `cost.model_flops`, without recomputation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.memory import MODEL
from tests.support.child_processes import REPOSITORY

SHAPES = {
    "0.5B": MODEL,
    "1.5B": MODEL | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                     "num_attention_heads": 12},
}  # fmt: skip
BATCH, LENGTH, RANK, WARM_UP = 8, 1024, 16, 8
SIDES = ("kit", "trl")


class Turns:
    """Times this process's turns, from step to step; the other process waits meanwhile."""

    def __init__(self, folder: Path, side: str, steps: int, turns: int) -> None:
        self._folder, self._side, self._steps, self._turns = folder, side, steps, turns
        self._step, self._start, self.seconds = 0, 0.0, list[float]()

    def begin_step(self) -> None:
        """Counts a step; between turns it waits for this process's next turn."""
        import torch

        self._step += 1
        after = self._step - 1 - WARM_UP
        if after < 0 or after % self._steps:
            return
        torch.cuda.synchronize()
        turn, other = self._folder / "turn", SIDES[1 - SIDES.index(self._side)]
        if after:
            self.seconds.append((time.perf_counter() - self._start) / self._steps)
            turn.write_text(other)
            if len(self.seconds) == self._turns:
                return
        else:
            (self._folder / f"ready-{self._side}").touch()
            _wait(lambda: (self._folder / f"ready-{other}").exists())
        _wait(lambda: turn.read_text() == self._side)
        self._start = time.perf_counter()


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "the other side has ended"
        time.sleep(0.002)


def settings(folder: Path, updates: int, remat: str) -> dict[str, Any]:
    """The settings of the kit's run."""
    return {
        "model.name": str(folder), "lora.r": RANK, "lora.alpha": 32.0, "lora.dropout": 0.0,
        "data.source": str(folder / "packed.jsonl"), "data.format": "text", "data.max_length": LENGTH,
        "data.packing": True, "data.eval_rows": 0, "data.loss_on": "all", "optim.batch_size": BATCH,
        "optim.max_steps": updates, "optim.remat": remat, "tracking.logging_steps": updates,
        "tracking.generate_rows": 0, "checkpoint.resume": "never", "checkpoint.save_steps": updates,
        "launch.device_type": "cuda", "launch.num_replicas": 1, "output_dir": str(folder / "run"),
    }  # fmt: skip


def of_kit(config: Any) -> dict[str, Any]:
    """Runs `fine_tune` in a replica, called by `launch`."""
    import torch

    from tpu_kit.recipes import sft
    from tpu_kit.training import trainer

    folder, step = Path(config.model.name), trainer.train_step
    turns = Turns(folder, "kit", *json.loads((folder / "turns.json").read_text()))

    def metered(*args: Any, **kwargs: Any) -> None:
        turns.begin_step()
        step(*args, **kwargs)

    trainer.train_step = metered
    result = sft.fine_tune(config)
    assert result is not None
    return {"seconds": turns.seconds, "peak": torch.cuda.max_memory_allocated(), "loss": result.metrics["loss"]}


def of_trl(folder: Path, updates: int, remat: str) -> dict[str, Any]:
    """Runs `SFTTrainer` in this process."""
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from tpu_kit.config.loader import load_config
    from tpu_kit.model.shape_cache import read_shape
    from tpu_kit.planning.cost import model_flops

    turns = Turns(folder, "trl", *json.loads((folder / "turns.json").read_text()))

    class Callback(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.begin_step()

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=load_dataset("json", data_files=str(folder / "whole.jsonl"), split="train"),
        peft_config=LoraConfig(r=RANK, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"),
        args=SFTConfig(
            output_dir=str(folder / "trl"), max_steps=updates, per_device_train_batch_size=BATCH, max_length=LENGTH,
            learning_rate=2e-4, bf16=True, gradient_checkpointing=remat == "full", logging_steps=updates,
            save_strategy="no", report_to=[], disable_tqdm=True, dataloader_drop_last=True,
        ),
        callbacks=[Callback()],
    )  # fmt: skip
    config = load_config(None, settings(folder, updates, remat))
    flops = model_flops(config, read_shape(config.model))
    trainer.train()
    loss = float(trainer.state.log_history[0]["loss"])
    return {"seconds": turns.seconds, "peak": torch.cuda.max_memory_allocated(), "loss": loss, "flops": flops}


def prepare(folder: Path, shape: str) -> None:
    """Writes the model, its tokenizer and both files of rows."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from tpu_kit.assets import embedded

    tokenizer = AutoTokenizer.from_pretrained(embedded.model_dir())
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPES[shape])).to(torch.bfloat16)
    model.save_pretrained(folder)
    problems = ["{question} {reasoning} {answer}".format(**row) for row in embedded.cot_rows("train", 3000)]
    each = len(tokenizer(" ".join(problems[:200]))["input_ids"]) / 200
    for name, tokens, rows in (("whole", 1.3 * LENGTH, 128), ("packed", 300, 512)):
        count = int(tokens / each) + 1
        texts = [" ".join(problems[(7 * row + n) % 3000] for n in range(count)) for row in range(rows)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def measure(shape: str, remat: str, turns: int, steps: int) -> dict[str, Any]:
    """Measures both sides for a shape and remat."""
    updates = WARM_UP + turns * steps + 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, shape)
        (folder / "turns.json").write_text(json.dumps([steps, turns]))
        (folder / "turn").write_text(SIDES[0])
        command = [sys.executable, "-m", "tests.benchmarks.cuda", "--folder", name, str(updates), remat]
        running = [
            subprocess.Popen([*command, "--side", side], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
            for side in SIDES
        ]
        found = {}
        for side, process in zip(SIDES, running, strict=True):
            out, _ = process.communicate(timeout=500)
            found[side] = json.loads(out.splitlines()[-1])
    return found


def report(shape: str, remat: str, found: dict[str, Any]) -> str:
    """Formats the result lines of a setting."""
    import torch

    from tpu_kit.machine import chips

    peak = chips.chip(torch.cuda.get_device_name()).bf16_flops
    lines = []
    for side in SIDES:
        one, middle = found[side], median(found[side]["seconds"])
        rate = BATCH * LENGTH / middle
        mfu = rate * found["trl"]["flops"] / (peak or float("nan"))
        lines.append(
            f"RESULT {shape} remat={remat} {side}: {middle:.4f} s ({min(one['seconds']):.4f} to "
            f"{max(one['seconds']):.4f}, {len(one['seconds'])} turns), {rate:,.0f} tokens/s, MFU {mfu:.1%}, "
            f"{one['peak'] / 2**30:.2f} GiB, loss {one['loss']:.3f}"
        )
    ratio = median(a / b for a, b in zip(found["kit"]["seconds"], found["trl"]["seconds"], strict=True))
    return "\n".join([*lines, f"RESULT {shape} remat={remat} kit / TRL: {ratio:.3f}"])


def main() -> None:
    """Parses the arguments, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.5B"])
    parser.add_argument("--remat", nargs="+", choices=["full", "none"], default=["full", "none"])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12, help="updates of a turn")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "trl":
        folder, updates, remat = options.folder
        print(json.dumps(of_trl(Path(folder), int(updates), remat)))
    elif options.side == "kit":
        from tests.benchmarks import cuda
        from tpu_kit.config.loader import load_config
        from tpu_kit.distributed.launch import launch

        folder, updates, remat = options.folder
        config = load_config(settings(Path(folder), int(updates), remat))
        config.output_path.mkdir(parents=True, exist_ok=True)
        print("\n" + json.dumps(launch(cuda.of_kit, config)))  # replicas cannot import __main__
    else:
        for shape in options.shapes:
            for remat in options.remat:
                print(report(shape, remat, measure(shape, remat, options.turns, options.steps)), flush=True)


if __name__ == "__main__":
    main()
