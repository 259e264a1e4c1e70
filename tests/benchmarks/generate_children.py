"""The functions whose processes `tests.benchmarks.generate` measures: our generator, and transformers' `generate`."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LENGTH, NEW = 50, (37, 61, 83, 20)  # prompt lengths: cold and warm, new
COUNTED = ("compiles", "executions", "device_reads")


def say(what: str) -> None:
    """Prints progress with the time."""
    print(f"[{time.strftime('%H:%M:%S')}] {what}", file=sys.stderr, flush=True)


def load(folder: str) -> tuple[Any, Any]:
    """Loads the model in fp32, and its tokenizer."""
    import torch

    from tpu_kit.config.loader import ModelConfig
    from tpu_kit.model.weights.loading import load_base
    from tpu_kit.model.weights.source import load_tokenizer

    config = ModelConfig(name=folder, base_dtype="fp32")
    return load_base(config, torch.float32).eval(), load_tokenizer(config)


def runtime_of(device: str) -> Any:
    """Makes the runtime of this process's only replica."""
    import torch

    from tpu_kit.distributed.replica.backends import CpuRuntime, SimulatedRuntime

    if device == "cpu":
        return CpuRuntime(0, 1, torch.device("cpu"))
    import torch_xla

    return SimulatedRuntime(0, 1, torch_xla.device())


def random_prompts(lengths: list[int], vocabulary: int) -> list[list[int]]:
    """Draws random token ids, the same in every process."""
    import torch

    source = torch.Generator().manual_seed(0)
    return [torch.randint(5, vocabulary, (length,), generator=source).tolist() for length in lengths]


def endless(generator: Any) -> Any:
    """Removes all end tokens of a generator."""
    generator.codec.stops = set()
    return generator


def counts(folder: str, size: int, count: int, new: int, dump: str) -> dict[str, dict[str, float]]:
    """Counts XLA's work for `count` prompts of 5 to 400 tokens, then for a quarter as many; and the cache's aliases.

    Args:
        folder: The model.
        size: The batch size.
        count: The number of prompts.
        new: Tokens per reply.
        dump: The folder to which XLA's flags write the programs.
    """
    import torch

    from tpu_kit.config.loader import DataConfig
    from tpu_kit.generation.generator import Generator
    from tpu_kit.generation.sampling import Sampling
    from tpu_kit.model import causal_lm as models

    model, tokenizer = load(folder)
    rt = runtime_of("xla-cpu")
    models.to_device(model, rt.local_device)
    source = torch.Generator().manual_seed(0)
    found: dict[str, dict[str, float]] = {}
    generator = endless(
        Generator(model, tokenizer, rt, data=DataConfig(), max_prompt=400, max_new_tokens=new, batch_size=size)
    )
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
        found[turn] = {**change, "reads_per_16_steps": reads, "seconds": seconds}
    (cache,) = {tuple(tensor.shape) for tensor in generator._decoder._prompt_cache.tensors}
    found["cache"] = aliases(Path(dump), ",".join(map(str, cache)))
    return found


def aliases(dump: Path, shape: str) -> dict[str, float]:
    """Counts the cache tensors of XLA's programs: their inputs, their outputs, and the pairs written in place.

    Args:
        dump: A folder with the programs, written by `--xla_dump_to`.
        shape: The shape of a layer's cache, such as "1,3,464,64".
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
    """Splits a program's parameters or results at the commas outside brackets of any kind."""
    parts, depth, begun = [], 0, 0
    for place, character in enumerate(text):
        depth += {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(text[begun:place])
            begun = place + 1
    return [*parts, text[begun:]]


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError after `seconds` (0: never), or when running native code then returns to Python."""

    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def speed(
    folder: str, device: str, size: int, cache: str, new: int, pairs: int, fresh: int, limit: float
) -> dict[str, dict[str, Any]]:
    """Returns by phase each contestant's tokens per second in each turn, and the compiles, executions and reads.

    PyTorch uses one thread: if other programs share the processors, several threads wait for one another.
    """
    import torch

    from tpu_kit.config.loader import DataConfig
    from tpu_kit.generation.generator import Generator
    from tpu_kit.generation.model_loading import arrange_for_few_rows
    from tpu_kit.generation.sampling import Sampling
    from tpu_kit.model import causal_lm as models

    torch.set_num_threads(1)
    model, tokenizer = load(folder)
    rt = runtime_of(device)
    models.to_device(model, rt.local_device)
    mine = (
        model if rt.is_xla else arrange_for_few_rows(copy.deepcopy(model))
    )  # as `tpu_kit.generation.answers` loads it
    longest = max(LENGTH, *NEW)
    generator = endless(
        Generator(
            mine,
            tokenizer,
            rt,
            data=DataConfig(),
            max_prompt=longest,
            max_new_tokens=new,
            batch_size=size,
            block=min(16, new),
        )
    )
    # A token that no reply contains, since replies are compared. Without an end token, stock on XLA reads only the last
    # token.
    unheard = len(tokenizer) - 1

    def sync_each_token(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rt.sync()
        return scores

    def stock(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts).to(rt.local_device)
        options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": unheard}
        if cache == "static":
            options |= {"cache_implementation": "static", "disable_compile": True}
        if cache == "synced":
            options["logits_processor"] = [sync_each_token]
        mask = torch.ones_like(ids)
        replies = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **options)  # type: ignore[operator]
        return replies[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    def ours(prompts: list[list[int]]) -> list[list[int]]:
        return [list(reply.tokens) for reply in generator.generate(prompts, Sampling(new))]

    contestants: dict[str, Callable[[list[list[int]]], list[list[int]]]] = {"ours": ours, "stock": stock}
    names = [*contestants]
    phases = {"cold": [LENGTH], **({"new": [*NEW[:fresh]]} if rt.is_xla and fresh else {}), "warm": [LENGTH] * pairs}
    found: dict[str, dict[str, Any]] = {}
    for phase, lengths in phases.items():
        found[phase] = {name: [] for name in names} | {"late": [], "processor": {name: [] for name in names}}
        found[phase] |= {counted: dict.fromkeys(names, 0) for counted in COUNTED}
        for length in lengths:
            prompts = random_prompts([length] * size, len(tokenizer) - 1)
            replies = {}
            for name, run in [*contestants.items()]:
                before, start, used = rt.counters(), time.perf_counter(), time.process_time()
                try:
                    with within(limit if name == "stock" else 0):
                        replies[name] = run(prompts)
                except TimeoutError:
                    found[phase]["late"].append(name)
                    del contestants[name]
                seconds, used = time.perf_counter() - start, time.process_time() - used
                found[phase][name].append(size * new / seconds)
                found[phase]["processor"][name].append(used)
                change = {each: rt.counters().get(each, 0) - before.get(each, 0) for each in COUNTED}
                for each, count in change.items():
                    found[phase][each][name] += count
                told = [f"{seconds:.2f} s, {used:.2f} of work", *(f"{n} {each}" for each, n in change.items() if n)]
                told += [] if name in contestants else ["did not end, and is left out"]
                say(f"{device} {size} {cache}, {phase}, {length} tokens, {name}: {', '.join(told)}")
            assert all(tokens == replies["ours"] for tokens in replies.values()), "not the same tokens"
    return found


if __name__ == "__main__":
    function, arguments = json.loads(sys.argv[1])
    print(json.dumps({"counts": counts, "speed": speed}[function](*arguments)))
