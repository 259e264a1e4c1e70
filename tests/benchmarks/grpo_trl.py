"""Compares the processor time of a grpo update on the CPU with TRL's GRPOTrainer: same model, prompts and rewards.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.grpo_trl FOLDER [--rounds 3] [--updates 4]

Replies have the same limit. The start is trained for 90 updates and merged. Each round runs three fresh processes that
make some updates: TRL, the kit with all rows, and the kit without rows of zero advantage. A process's first update is
its warm-up and is excluded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, TOKENS = 16, 8, 80


def merged(folder: Path) -> Path:
    """Trains a start and merges it into a whole model."""
    from tpu_kit.config.loader import load_config
    from tpu_kit.exporting.export import export
    from tpu_kit.recipes.sft import train

    run = {"max_steps": 90, "base_dtype": "fp32", "eval_rows": 16, "generate_rows": 0, "eval_steps": None}
    place = {"device_type": "cpu", "num_replicas": 1, "output_dir": str(folder / "start")}
    result = train(load_config("embedded-cot", run | place))
    return Path(export(result.output_dir, "merged").folder)


def of_kit(model: str, updates: int, drop: bool, folder: str) -> list[float]:
    """Returns the kit's processor seconds per update."""
    from tpu_kit.config.loader import load_config
    from tpu_kit.recipes.grpo import grpo

    clock: list[float] = []

    def reward(completions: Any, answer: list[str]) -> list[float]:
        clock.append(time.process_time())
        return judged([each[0]["content"] for each in completions], answer)

    config = load_config("embedded-grpo", {
        "name": model, "device_type": "cpu", "num_replicas": 1, "max_steps": updates, "warmup_steps": 1, "eval_rows": 0,
        "eval_generate_rows": 0, "eval_steps": None, "save_steps": 10**6, "drop_zero_advantage": drop, "remat": "none",
        "output_dir": folder, "logging_steps": 1, "resume": "never",
    })  # fmt: skip
    grpo(config, reward_funcs=[reward])
    return [after - before for before, after in itertools.pairwise(clock)]


def of_trl(model: str, updates: int, folder: str) -> list[float]:
    """Returns TRL's processor seconds per update."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from tpu_kit.assets.embedded import cot_rows

    clock: list[float] = []

    def reward(completions: Any, answer: list[str], **_: Any) -> list[float]:
        clock.append(time.process_time())
        return judged([each[0]["content"] for each in completions], answer)

    rows = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
            for row in cot_rows("train", 1000, seed=0)]  # fmt: skip
    settings = GRPOConfig(
        output_dir=folder, max_steps=updates, per_device_train_batch_size=PROMPTS * SAMPLES, num_generations=SAMPLES,
        max_completion_length=TOKENS, temperature=1.0, top_p=1.0, top_k=0, loss_type="dapo", epsilon_high=0.28,
        learning_rate=6e-4, lr_scheduler_type="constant", max_grad_norm=1.0, beta=0.0, use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        dataloader_pin_memory=False, optim="adamw_torch",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), reward_funcs=reward, args=settings,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    ).train()  # fmt: skip
    return [after - before for before, after in itertools.pairwise(clock)]


def judged(texts: list[str], answers: list[str]) -> list[float]:
    """Returns 1 for each text that ends in its row's answer, else 0."""
    return [
        float(text.strip().rpartition("\n")[2].strip() == str(answer))
        for text, answer in zip(texts, answers, strict=True)
    ]


def main() -> None:
    """Measures all rounds, and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        model, way = options.child.split("@")
        folder = str(options.folder / way)
        calls = {"trl": lambda: of_trl(model, options.updates + 2, folder),
                 "kit": lambda: of_kit(model, options.updates + 2, False, folder),
                 "kit-dropping": lambda: of_kit(model, options.updates + 2, True, folder)}  # fmt: skip
        print("SECONDS", json.dumps(calls[way]()[1:]))
        return
    model = merged(options.folder)
    seconds: dict[str, list[float]] = {"trl": [], "kit": [], "kit-dropping": []}
    for number in range(options.rounds):
        for way, each in seconds.items():
            arguments = [
                sys.executable,
                "-m",
                "tests.benchmarks.grpo_trl",
                str(options.folder),
                "--updates",
                str(options.updates),
            ]
            done = subprocess.run(
                [*arguments, "--child", f"{model}@{way}"], capture_output=True, text=True, check=False
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("SECONDS")]
            assert lines, done.stderr[-3000:]
            each += json.loads(lines[0].partition(" ")[2])
            print(f"RESULT round {number + 1} {way}: {lines[0]}", flush=True)
    medians = {way: statistics.median(each) for way, each in seconds.items()}
    shares = ", ".join(f"{way} {value:.2f} s ({value / medians['trl']:.2f} of TRL)" for way, value in medians.items())
    print(f"RESULT processor seconds of an update, medians: {shares}")


if __name__ == "__main__":
    main()
