"""Compares results of the same runs between an older commit and this tree.

`python -m tests.benchmarks.differential COMMIT` trains twenty small runs from a worktree of COMMIT and from this tree,
in separate processes, on the CPU, on XLA:CPU replicas and on meshes. It compares exit codes, names of written files,
losses of updates, and greedy answers before and after training. It also compares the trained tensors of the first
checkpoint, of the last checkpoint and of the result.

On the CPU everything must be equal bit for bit. On XLA:CPU a changed program may round differently: losses may differ
by 1e-6 relative, and tensors of the first checkpoint by 1e-5 of their norm; answers must be equal. Only the command
line and a run's files are used, so the two trees may name everything inside differently.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.child_processes import REPOSITORY, child_environment

LOSS_TOLERANCE, TENSOR_TOLERANCE = 1e-6, 1e-5  # for runs on XLA:CPU; 0 on the CPU
SHORT = (
    "max_steps=30 warmup_steps=3 save_steps=5 checkpoint.keep=10 eval_rows=8 eval_steps=15 logging_steps=1 "
    "generate_rows=4 generate_tokens=16 max_length=128 batch_size=2 hang_timeout=300"
)


def _chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


ROWS = {
    "chats.jsonl": [{"messages": _chat(f"Double {n}!", f"{n + n}")} for n in range(40)],
    "pairs.jsonl": [{"prompt": f"Double {n}: ", "completion": f"{n + n}"} for n in range(40)],
    "texts.jsonl": [{"text": f"{n} plus {n} is {n + n}, and {n} times {n} is {n * n}."} for n in range(40)],
}

RUNS: dict[str, str] = {
    "cpu": "device_type=cpu",
    "cpu-full": "device_type=cpu lora.r=0 learning_rate=1e-3",
    "cpu-dora": "device_type=cpu lora.dora=true remat=full",
    "cpu-rslora": "device_type=cpu lora.rslora=true lora.init=gaussian lora.dropout=0.1 remat=outputs",
    "cpu-adafactor": "device_type=cpu optimizer=adafactor gradient_accumulation=2 weight_decay=0.1",
    "cpu-unpacked": "device_type=cpu packing=false schedule=linear label_smoothing=0.1 ema_decay=0.9",
    "cpu-growth": "device_type=cpu batch_growth_factor=2 batch_growth_steps=10 batch_growth_lr=sqrt loss_on=all",
    "cpu-early-stop": "device_type=cpu eval_steps=2 early_stop_patience=1 learning_rate=0.5",
    "cpu-messages": "device_type=cpu data.source=chats.jsonl",
    "cpu-completions": "device_type=cpu data.source=pairs.jsonl base_dtype=int8",
    "cpu-text": "device_type=cpu data.source=texts.jsonl generate_rows=0 base_dtype=int4 quant_group=64",
    "cpu-error-correction": "device_type=cpu optim.objective=error-correction",
    "cpu-teacher": "device_type=cpu distill.teacher=embedded labels_weight=0.5",
    "xla": "device_type=xla-cpu num_replicas=2 base_dtype=fp32",
    "xla-full": "device_type=xla-cpu num_replicas=2 base_dtype=fp32 lora.r=0 learning_rate=1e-3 remat=full",
    "xla-int8": "device_type=xla-cpu num_replicas=2 scan_layers=off base_dtype=int8 ema_decay=0.9 "
    "gradient_accumulation=2",
    "xla-loop": "device_type=xla-cpu num_replicas=2 scan_layers=on remat=full lora.dropout=0.1",
    "fsdp": "device_type=xla-cpu mesh=fsdp=2 remat=full",
    "fsdp-full": "device_type=xla-cpu mesh=fsdp=2 base_dtype=fp32 remat=full lora.r=0 learning_rate=1e-3 "
    "optimizer=adafactor",
    "data-fsdp": "device_type=xla-cpu mesh=data=2,fsdp=2 remat=full base_dtype=int8",
}


@dataclass
class Outcome:
    """The results of a run.

    Attributes:
        exit_code: The process's exit code.
        files: File names, relative to the run's folder.
        losses: By kind and step, the loss of each update and evaluation; None if it was not finite.
        tensors: By checkpoint and name: the first and the last step, and the result, "adapter".
        answers: Greedy answers of the base and the tuned model.
        output: The end of the process's output.
    """

    exit_code: int
    files: set[str] = field(default_factory=set)
    losses: dict[str, float | None] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)
    output: str = ""


def run(tree: Path, name: str, folder: Path) -> Outcome:
    """Trains a named run with the package of `tree`; `folder` is the working folder."""
    folder.mkdir(parents=True)
    for file, rows in ROWS.items():
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = child_environment({"PYTHONPATH": str(tree), "PJRT_DEVICE": None, "OMP_NUM_THREADS": "1"})
    command = [sys.executable, "-m", "tpu_kit", "train", "embedded-cot", "run_name=run"]
    settings = dict(part.split("=", 1) for part in f"{SHORT} {RUNS[name]}".split())  # its own settings win
    done = subprocess.run(
        [*command, *(f"{key}={value}" for key, value in settings.items())],
        cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return read(folder / "runs" / "run", done.returncode, done.stdout)


def read(folder: Path, exit_code: int, output: str) -> Outcome:
    """Reads the files that a run wrote."""
    outcome = Outcome(exit_code, output="\n".join(output.splitlines()[-15:]))
    outcome.files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    metrics = folder / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        record = json.loads(line)
        outcome.losses[f"{record['kind']} {record['step']}"] = record["loss"]
    steps = sorted(folder.glob("checkpoints/step-*"))
    for step in dict.fromkeys([*steps[:1], *steps[-1:], folder / "adapter"]):
        for file in sorted(step.glob("*model*.safetensors")):
            for key, tensor in load_file(file).items():
                outcome.tensors[f"{step.name} {key}"] = tensor
    evaluation = folder / "eval.json"
    if evaluation.exists():
        samples = json.loads(evaluation.read_text())["samples"]
        outcome.answers = [sample[model]["answer"] for sample in samples for model in ("base", "tuned")]
    return outcome


def differences(old: Outcome, new: Outcome, exact: bool) -> Iterator[str]:
    """Yields a line for each difference beyond the tolerance."""
    if old.exit_code != new.exit_code:
        yield f"exit code {old.exit_code} -> {new.exit_code}:\n{new.output}"
    elif old.exit_code:
        yield f"exit code {old.exit_code} in both:\n{new.output}"
    if old.files != new.files:
        yield f"files gone: {sorted(old.files - new.files)}, files added: {sorted(new.files - old.files)}"
    if old.losses.keys() != new.losses.keys():
        yield f"losses of other steps: {sorted(old.losses.keys() ^ new.losses.keys())}"
    for key in sorted(old.losses.keys() & new.losses.keys(), key=lambda key: int(key.split()[1])):
        before, after = old.losses[key], new.losses[key]
        if before != after and (None in (before, after) or abs(after / before - 1) > (0 if exact else LOSS_TOLERANCE)):
            yield f"loss of {key}: {before} -> {after}"
            break
    if old.tensors.keys() != new.tensors.keys():
        yield f"trained tensors: {sorted(old.tensors.keys() ^ new.tensors.keys())[:4]} are in one tree alone"
    first = min((key.split()[0] for key in old.tensors if key.startswith("step-")), default="none")
    for key in sorted(old.tensors.keys() & new.tensors.keys()):
        before, after = old.tensors[key].double(), new.tensors[key].double()
        if exact and not torch.equal(before, after):
            yield f"{key} differs"
        elif key.startswith(first) and torch.dist(before, after) > TENSOR_TOLERANCE * before.norm():
            yield f"{key} differs by {torch.dist(before, after) / before.norm():.1e} of its norm"
    if old.answers != new.answers:
        changed = [pair for pair in zip(old.answers, new.answers, strict=False) if pair[0] != pair[1]]
        yield f"{len(old.answers)} and {len(new.answers)} answers, {len(changed)} differ: {changed[:1]}"


def main() -> int:
    """Prints a line per run; returns 1 if any run differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--only", nargs="+", choices=RUNS, metavar="RUN", help=f"some of: {', '.join(RUNS)}")
    parser.add_argument("--keep", type=Path, help="a folder in which the results of COMMIT are kept for the next time")
    options = parser.parse_args()
    count = 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), options.commit], check=True)
        try:
            for name in options.only or RUNS:
                reference = (options.keep or Path(scratch)) / options.commit / name
                if not (reference / "done").exists():
                    shutil.rmtree(reference, ignore_errors=True)
                    outcome = run(tree, name, reference)
                    (reference / "done").write_text(json.dumps([outcome.exit_code, outcome.output]))
                old = read(reference / "runs" / "run", *json.loads((reference / "done").read_text()))
                new = run(REPOSITORY, name, Path(scratch) / "new" / name)
                lines = list(differences(old, new, exact=name.startswith("cpu")))
                final = list(old.losses.values())[-1:]
                print(f"{name}: {'differs' if lines else 'equal'}; {len(old.losses)} losses, the last {final}, "
                      f"{len(old.tensors)} tensors, {len(old.answers)} answers", flush=True)  # fmt: skip
                for line in lines[:5]:
                    print(f"  {line}", flush=True)
                count += bool(lines)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
