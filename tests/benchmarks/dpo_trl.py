"""Compares the processor time of a dpo update on the CPU with TRL's DPOTrainer: same model, pairs, adapters and loss.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.dpo_trl FOLDER [--rounds 3] [--updates 4]

Both sides use the same number of pairs per update, as many as the kit's rows hold. TRL gets them in one batch, padded
to the longest pair, with precomputed reference log-probabilities, like the kit's. In each round both sides make some
updates in a fresh process; the first two updates are the warm-up and are excluded. It also prints the tokens that each
side computes per pair.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROWS, LENGTH, RANK = 8, 512, 16


def of_kit(updates: int, folder: str) -> dict[str, Any]:
    """Returns the kit's processor seconds per update, the pairs per update and the tokens per pair."""
    from tpu_kit.config.loader import load_config
    from tpu_kit.recipes.preference import configured, dpo
    from tpu_kit.recipes.run_data import prepare_run
    from tpu_kit.training.losses.pair_updates import PairUpdates

    clock: list[float] = []
    after = PairUpdates.after

    def timed(self: Any, *given: Any) -> Any:
        for each in after(self, *given):
            clock.append(time.process_time())
            yield each

    PairUpdates.after = timed  # type: ignore[method-assign]  # timed from outside
    config = configured(load_config("embedded-dpo", {
        "name": str(Path(folder) / "model"), "device_type": "cpu", "num_replicas": 1, "max_steps": updates,
        "eval_rows": 0, "eval_steps": None, "eval_generate_rows": 0, "save_steps": 10**6, "remat": "none",
        "max_length": LENGTH, "batch_size": ROWS, "output_dir": f"{folder}/kit", "logging_steps": 1, "resume": "never",
        "split": "train[:600]", "r": RANK,
    }))  # fmt: skip
    prepared = prepare_run(config)
    dpo(config)
    pairs = round(ROWS * len(prepared.train.documents) / len(prepared.train))
    tokens = ROWS * LENGTH / pairs
    return {"seconds": [b - a for a, b in itertools.pairwise(clock)], "pairs": pairs, "tokens": tokens}


def of_trl(updates: int, folder: str, pairs: int) -> dict[str, Any]:
    """Returns TRL's processor seconds per update and tokens per pair."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    from tpu_kit.assets.embedded import preference_rows

    clock: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # the base has no types
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.append(time.process_time())

    rows = [{"prompt": [{"role": "user", "content": row["question"]}],
             **{name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}}
            for row in preference_rows("train", 600)]  # fmt: skip
    settings = DPOConfig(
        output_dir=f"{folder}/trl", max_steps=updates, per_device_train_batch_size=pairs, max_length=LENGTH,
        learning_rate=6e-4, lr_scheduler_type="constant", max_grad_norm=1.0, use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        dataloader_pin_memory=False, optim="adamw_torch", precompute_ref_log_probs=True,
    )  # fmt: skip
    model = f"{folder}/model"
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), args=settings, callbacks=[Clock()],
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    return {"seconds": [b - a for a, b in itertools.pairwise(clock)], "tokens": batch["input_ids"].numel() / pairs}


def main() -> None:
    """Measures all rounds, and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder, updates = str(options.folder), options.updates + 3
    if options.child:
        way, _, pairs = options.child.partition("@")
        found = of_kit(updates, folder) if way == "kit" else of_trl(updates, folder, int(pairs))
        found["seconds"] = found["seconds"][2:]
        print("FOUND", json.dumps(found | {"kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))
        return
    import torch

    from tpu_kit.config.loader import load_config
    from tpu_kit.model.weights.loading import load_base
    from tpu_kit.model.weights.source import load_tokenizer

    config = load_config("embedded-dpo")
    load_base(config.model, torch.float32).save_pretrained(f"{folder}/model")
    load_tokenizer(config.model).save_pretrained(f"{folder}/model")
    found: dict[str, list[dict[str, Any]]] = {"kit": [], "trl": []}
    for number in range(options.rounds):
        for way, each in found.items():
            child = "kit" if way == "kit" else f"trl@{found['kit'][0]['pairs']}"
            command = [sys.executable, "-m", "tests.benchmarks.dpo_trl", folder, "--updates", str(options.updates)]
            done = subprocess.run([*command, "--child", child], capture_output=True, text=True, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
            assert lines, done.stderr[-3000:]
            each.append(json.loads(lines[0].partition(" ")[2]))
            print(f"RESULT round {number + 1} {way}: {lines[0]}", flush=True)
    seconds = {
        way: statistics.median(itertools.chain(*(one["seconds"] for one in each))) for way, each in found.items()
    }
    memory = {way: statistics.median(one["kib"] for one in each) / 2**20 for way, each in found.items()}
    tokens = {way: each[0]["tokens"] for way, each in found.items()}
    print(f"RESULT an update of {found['kit'][0]['pairs']} pairs: {seconds['kit'] / seconds['trl']:.2f} of TRL's time")
    for way in found:
        print(
            f"RESULT {way}: {seconds[way]:.2f} processor seconds, process of {memory[way]:.2f} GiB, {tokens[way]:.0f} "
            "tokens a pair with padding"
        )


if __name__ == "__main__":
    main()
