"""Compares greedy decoding, self-consistency and tree of thoughts by tokens, on the embedded problems.

    python -m tests.benchmarks.search RUN_DIR [questions=100] [budget=256] [--json]

RUN_DIR holds an adapter of the embedded model. No method generates more than `budget` tokens per question, including
the tokens of self-evaluation. Self-consistency votes with as many whole samples as fit into the budget. For each tree
it also votes with as many as fit into the tree's tokens for that question, at least one. A greedy answer does not use
the whole budget, because more tokens would not change it. Runs use the CPU and plain PyTorch.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.embedded_answers import is_correct
from tpu_kit.assets.embedded import cot_rows
from tpu_kit.config.loader import load_config
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.extras.tree_search.search import SearchOptions, search
from tpu_kit.generation.evaluation.accuracy import Accuracy, mcnemar
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.model_loading import load_for_generation
from tpu_kit.generation.prompts import Completion
from tpu_kit.generation.sampling import Sampling
from tpu_kit.model.weights.source import load_tokenizer

LONGEST = 80  # tokens of an answer with its steps
SHORTEST = 24  # the shortest answers with steps have about this many tokens; it limits the number of samples
TREES: dict[str, dict[str, Any]] = {
    "tree, log-probability": {"score": "logprob"},
    "tree, log-probability, best-first": {"score": "logprob", "strategy": "best-first"},
    "tree, self-evaluation": {"score": "self-evaluation"},
}

Said = list[tuple[str, int]]
"""For each question, the answer and its number of tokens."""


def within(samples: Sequence[Completion], budget: int) -> tuple[str, int]:
    """The majority answer of the samples that fit into a token budget, at least one sample, and their tokens."""
    chosen, tokens = [samples[0]], len(samples[0].tokens)
    for sample in samples[1:]:
        if tokens + len(sample.tokens) > budget:
            break
        chosen.append(sample)
        tokens += len(sample.tokens)
    weights: dict[str, tuple[int, float]] = {}  # among equally frequent answers the more likely wins
    for sample in chosen:
        if said := sample.answer.strip():
            votes, share = weights.get(said, (0, 0.0))
            weights[said] = votes + 1, share + math.exp(sample.logprob)
    return max(weights, key=lambda said: weights[said], default=""), tokens


def measure(run_dir: Path, count: int, budget: int) -> dict[str, Any]:
    config = load_config(None, {"model.name": "embedded", "base_dtype": "fp32"})
    adapter = run_dir / "adapter"
    model, tokenizer = load_for_generation(config.model, adapter), load_tokenizer(config.model, adapter)
    runtime = CpuRuntime(0, 1, next(model.parameters()).device)
    generator = Generator(
        model, tokenizer, runtime, data=config.data, max_prompt=400, max_new_tokens=LONGEST, batch_size=32
    )
    rows = cot_rows("eval", count, seed=77)
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    results: dict[str, tuple[Said, float]] = {}

    start = time.monotonic()
    replies = generator.generate(chats, Sampling(LONGEST))
    results["greedy"] = [(reply.text, len(reply.tokens)) for reply in replies], time.monotonic() - start
    start, most = time.monotonic(), -(-budget // SHORTEST)
    drawn = generator.generate(chats, Sampling(LONGEST, temperature=0.7), most)
    samples = [drawn[place : place + most] for place in range(0, len(drawn), most)]
    results["self-consistency"] = [within(own, budget) for own in samples], time.monotonic() - start
    for name, options in TREES.items():
        start = time.monotonic()
        chosen = SearchOptions(max_tokens=budget, thought_tokens=24, answer_tokens=8, **options)
        found = [search(generator, row["question"], chosen) for row in rows]
        assert all(one.tokens <= budget for one in found)
        results[name] = [(one.answer, one.tokens) for one in found], time.monotonic() - start
        same = [within(own, one.tokens) for own, one in zip(samples, found, strict=True)]
        results[f"self-consistency, as many as the {name}"] = same, 0.0
    return {"questions": count, "budget": budget, "ways": _judged(rows, results)}


def _judged(rows: list[dict[str, str]], results: dict[str, tuple[Said, float]]) -> list[dict[str, Any]]:
    right = {
        name: [is_correct(row, text) for row, (text, _) in zip(rows, said, strict=True)]
        for name, (said, _) in results.items()
    }
    table = []
    for name, (said, seconds) in results.items():
        found = Accuracy.of(sum(right[name]), len(rows))
        one: dict[str, Any] = {"way": name, "correct": found.correct, "low": found.low, "high": found.high,
               "tokens": sum(tokens for _, tokens in said) / len(said), "seconds": seconds}  # fmt: skip
        for other in ("greedy", f"self-consistency, as many as the {name}"):
            if other in right and other != name:
                gained, lost = (sum(a > b for a, b in zip(*pair, strict=True))
                                for pair in ((right[name], right[other]), (right[other], right[name])))  # fmt: skip
                one[f"against {other.split(',')[0]}"] = {"gained": gained, "lost": lost, "p": mcnemar(gained, lost)}
        table.append(one)
    return table


def main(arguments: list[str]) -> None:
    given = dict(text.split("=") for text in arguments[1:] if "=" in text)
    found = measure(Path(arguments[0]), int(given.get("questions", 100)), int(given.get("budget", 256)))
    if "--json" in arguments:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['questions']} questions, at most {found['budget']} generated tokens per question")
    for one in found["ways"]:
        accuracy = Accuracy(one["correct"], found["questions"], one["low"], one["high"])
        against = "".join(
            f"; {name} +{versus['gained']} -{versus['lost']}, p = {versus['p']:.2g}"
            for name, versus in one.items() if name.startswith("against")
        )  # fmt: skip
        print(f"{one['way']:<58}{accuracy}   {one['tokens']:.0f} tokens, {one['seconds']:.0f} s{against}")


if __name__ == "__main__":
    main(sys.argv[1:])
