"""Measures the gain of distillation over fine-tuning of the same student, and of an error-correction head.

    python -m tests.benchmarks.objectives [FOLDER] [--parts rows,samples] [--smoke] [--json]

The plan was fixed before the first run; `PLAN` has its numbers:

- Teacher: the embedded model with LoRA, as `make train` and notebook 6 tune it, merged. Student: two of the teacher's
  four layers, all weights trained, without the teacher (`fine-tuning`) and with it (`distillation`: forward KL only).
- Samples (on-policy distillation: `distill.on_policy`, reverse KL): the same student and teacher, 500 held-out
  problems. Case "plentiful": 4,000 training problems with rationales; 120 updates of fine-tuning, against 60 of
  fine-tuning and 60 on-policy. Case "few": 200 training problems; 180 updates of fine-tuning, against 60 of fine-tuning
  and 120 on-policy, and against 60 of fine-tuning and 120 of distillation on the rows (off-policy, forward KL). An
  update of fine-tuning or off-policy has 8 packed rows (about 26 replies). An on-policy update has 24 prompts, with one
  completion of at most 80 tokens at temperature 1 for each prompt. The runs after the 60 updates are separate runs that
  start from their weights. All runs have a rate of 2e-3, 10 updates of warm-up and a cosine to 0. The 60 updates are
  run once per seed and case. `PAIRS` has the comparisons. Processor seconds are the process's (one thread), with
  loading and tokenising, without answers.
- Head: the embedded model with LoRA and objective=error-correction; the same run with and without its head.
- Each seed has other training problems, another order of rows, and its own held-out problems, which equal no training
  problem (`cot_rows("eval", ...)`). Both sides of a pair get the same problems. Answers are greedy.
- The gain of a seed is the difference in the share of correct answers. The 95 % interval is Student's, over seeds. A
  gain counts as shown if the lower end is above 0. No choice depends on these results, and no seed is excluded.

Results that FOLDER has are not computed again. Runs use the CPU and plain PyTorch.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tests.support.embedded_answers import is_correct
from tpu_kit.assets.embedded import cot_rows
from tpu_kit.config.loader import ModelConfig, TrainConfig, load_config
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.exporting.export import export
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.model_loading import load_for_generation
from tpu_kit.generation.sampling import Sampling
from tpu_kit.model.states_head import without_head
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.recipes.distillation import derive_student, distill
from tpu_kit.recipes.sft import train

PLAN: dict[str, Any] = {
    "seeds": [0, 1, 2, 3, 4], "problems": 1000, "teacher_updates": 80, "teacher_rows": 16,
    "student_layers": 2, "student_updates": 120, "student_learning_rate": 2e-3, "head_updates": 60, "rows": 8,
    "sampled": {"problems": 500, "prompts": 24, "tokens": 80, "first": 60, "cases": {"plentiful": [4000, 60],
    "few": [200, 120]}},
}  # fmt: skip
SMOKE = PLAN | {
    "seeds": [7, 8], "problems": 8, "teacher_updates": 4, "teacher_rows": 2, "student_updates": 2, "head_updates": 2,
    "rows": 2, "sampled": {"problems": 8, "prompts": 3, "tokens": 16, "first": 2, "cases": {"plentiful": [40, 2],
    "few": [20, 2]}},
}  # fmt: skip
PAIRS = {
    "rows": (("fine-tuning", "distillation"), ("without head", "with head")),
    "samples": (
        ("plentiful: fine-tuning", "plentiful: on-policy"), ("few: fine-tuning", "few: on-policy"),
        ("few: off-policy", "few: on-policy"),
    ),
}  # fmt: skip
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""The 97.5 % quantile of Student's t by degrees of freedom."""


def interval(gains: list[float]) -> tuple[float, float, float]:
    """Returns the mean of the seeds' gains, and its 95 % interval."""
    half = _T[len(gains) - 1] * stdev(gains) / math.sqrt(len(gains))
    return mean(gains), mean(gains) - half, mean(gains) + half


def configuration(folder: Path, updates: int, plan: dict[str, Any], **settings: Any) -> TrainConfig:
    """The configuration of a run on the CPU."""
    given = {
        "output_dir": str(folder), "max_steps": updates, "warmup_steps": min(10, updates // 2), "device_type": "cpu",
        "num_replicas": 1, "batch_size": plan["rows"], "generate_rows": 0, "eval_rows": 16, "eval_steps": None,
        "save_steps": 10**6, "base_dtype": "fp32",
    }  # fmt: skip
    return load_config("embedded-cot", given | settings)


def correct(config: TrainConfig, adapter: Path, count: int, seed: int) -> list[bool]:
    """Returns for each held-out problem of a seed whether the model solves it."""
    model, tokenizer = load_for_generation(config.model, adapter), load_tokenizer(config.model, adapter)
    generator = Generator(
        model,
        tokenizer,
        CpuRuntime(0, 1, next(model.parameters()).device),
        data=config.data,
        max_new_tokens=80,
        batch_size=100,
    )
    rows = cot_rows("eval", count, seed=1000 + seed)
    replies = generator.generate([[{"role": "user", "content": row["question"]}] for row in rows], Sampling(80))
    return [is_correct(row, reply.text) for row, reply in zip(rows, replies, strict=True)]


def teacher_and_student(folder: Path, plan: dict[str, Any]) -> tuple[str, str]:
    """Returns the folders of teacher and student, made once."""
    run, merged, student = folder / "teacher", folder / "teacher/export/merged", folder / "student"
    if not merged.is_dir():
        train(configuration(run, plan["teacher_updates"], plan, batch_size=plan["teacher_rows"]))
        export(run, "merged")
    if not student.is_dir():
        derive_student(ModelConfig(name=str(merged)), student, plan["student_layers"])
    return str(merged), str(student)


def measure_rows(folder: Path, plan: dict[str, Any], seed: int) -> dict[str, Any]:
    """Returns the answers of a seed's four models."""
    teacher, student = teacher_and_student(folder, plan)
    count, runs = plan["problems"], folder / f"seed-{seed}"
    learns = {"lora.r": 0, "learning_rate": plan["student_learning_rate"], "model.name": student, "seed": seed}
    found = {}
    for name, more in (("fine-tuning", {}), ("distillation", {"distill.teacher": teacher, "teacher_dtype": "fp32"})):
        config = configuration(runs / name, plan["student_updates"], plan, **learns, **more)
        (distill if more else train)(config)
        found[name] = correct(config, runs / name / "adapter", count, seed)
    config = configuration(runs / "head", plan["head_updates"], plan, objective="error-correction", seed=seed)
    train(config)
    with without_head(runs / "head/adapter") as plain:
        found["without head"] = correct(config, plain, count, seed)
    found["with head"] = correct(config, runs / "head/adapter", count, seed)
    return found


def measure_samples(folder: Path, plan: dict[str, Any], seed: int) -> dict[str, Any]:
    """Returns the answers of a seed's models in both cases, and the processor seconds of their runs."""
    teacher, student = teacher_and_student(folder, plan)
    sampled, found, seconds = plan["sampled"], dict[str, Any](), dict[str, float]()
    of_teacher = {"distill.teacher": teacher, "teacher_dtype": "fp32"}
    on_policy = of_teacher | {
        "on_policy": True, "divergence": "reverse", "prompts_per_update": sampled["prompts"],
        "max_completion_length": sampled["tokens"],
    }  # fmt: skip
    for case, (problems, more) in sampled["cases"].items():
        runs = folder / f"seed-{seed}-{case}"

        def run(name: str, updates: int, start: str, settings: dict[str, Any], of: Path, rows: int) -> float:
            learns = {"lora.r": 0, "learning_rate": plan["student_learning_rate"], "model.name": start, "seed": seed}
            config = configuration(of / name, updates, plan, **learns, **settings, **{"data.split": f"train[:{rows}]"})
            begin = time.process_time()
            (distill if settings else train)(config)
            return time.process_time() - begin

        spent = run("first", sampled["first"], student, {}, runs, problems)
        kinds = {"on-policy": on_policy} | ({"off-policy": of_teacher} if case == "few" else {})
        each = {"fine-tuning": run("fine-tuning", sampled["first"] + more, student, {}, runs, problems)}
        each |= {
            name: spent + run(name, more, str(runs / "first/adapter"), settings, runs, problems)
            for name, settings in kinds.items()
        }
        config = configuration(runs / "answers", 1, plan, **{"model.name": student})
        found |= {
            f"{case}: {name}": correct(config, runs / name / "adapter", sampled["problems"], seed) for name in each
        }
        seconds |= {f"{case}: {name}": value for name, value in each.items()}
    return found | {"seconds": seconds}


def report(results: dict[int, dict[str, Any]], part: str) -> dict[str, Any]:
    """Returns by comparison the gain, its interval and the lines of its table."""
    found: dict[str, Any] = {}
    for before, after in PAIRS[part]:
        shares = {name: [mean(one[name]) for one in results.values()] for name in (before, after)}
        gains = [b - a for a, b in zip(shares[before], shares[after], strict=True)]
        middle, low, high = interval(gains)
        lines = [f"| seed | {before} | {after} | gain |", "|---|---:|---:|---:|"]
        for seed, a, b, gain in zip(results, shares[before], shares[after], gains, strict=True):
            lines.append(f"| {seed} | {a:.1%} | {b:.1%} | {gain:+.1%} |")
        verdict = "a gain" if low > 0 else "no gain shown"
        lines.append(f"\n{after}: {middle:+.1%} ({low:+.1%} to {high:+.1%}): {verdict}")
        if spent := [one["seconds"] for one in results.values() if "seconds" in one]:
            spans = (f"{name} {mean(one[name] for one in spent):.0f}" for name in (before, after))
            lines.append(f"processor seconds, means: {', '.join(spans)}")
        found[f"{after} - {before}"] = {
            "gain": middle, "low": low, "high": high, "verdict": verdict, "lines": lines
        }  # fmt: skip
    return found


MEASURES: dict[str, Callable[[Path, dict[str, Any], int], dict[str, Any]]] = {
    "rows": measure_rows, "samples": measure_samples,
}  # fmt: skip


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", default="runs/objectives", type=Path)
    parser.add_argument("--parts", default=",".join(PAIRS), help="of the plan: rows, samples")
    parser.add_argument("--smoke", action="store_true", help="a few updates and problems, which show nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    plan, found = SMOKE if options.smoke else PLAN, dict[str, Any]()
    for part in options.parts.split(","):
        results = {}
        for seed in plan["seeds"]:
            kept = options.folder / f"{part}-{seed}.json"
            if not kept.is_file():
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(MEASURES[part](options.folder.absolute(), plan, seed)))
            results[seed] = json.loads(kept.read_text())
        found |= report(results, part)
    print(json.dumps(found) if options.json else "\n\n".join("\n".join(one["lines"]) for one in found.values()))


if __name__ == "__main__":
    main()
