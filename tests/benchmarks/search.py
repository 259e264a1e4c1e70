"""Is a search worth its tokens? Greedy, self-consistency and tree of thoughts on the embedded problems.

    python -m tests.benchmarks.search RUN_DIR [questions=60] [budget=256]

RUN_DIR holds an adapter of the embedded model. Self-consistency and the tree get the same budget of generated tokens
for each question; a greedy answer takes what it takes. On the CPU, with plain PyTorch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

from tpu_kit.answers import load_for_generation
from tpu_kit.config import load_config
from tpu_kit.embedded import cot_rows, is_correct
from tpu_kit.evaluate import Accuracy, mcnemar
from tpu_kit.generator import Generator
from tpu_kit.runtime import Runtime
from tpu_kit.sampling import Sampling
from tpu_kit.search import SearchOptions, search, self_consistency

LONGEST = 80  # tokens of an answer with its steps


def main(arguments: list[str]) -> None:
    given = dict(text.split("=") for text in arguments[1:])
    count, budget = int(given.get("questions", 60)), int(given.get("budget", 256))
    config = load_config(None, {"model.name": "embedded", "base_dtype": "fp32"})
    adapter = Path(arguments[0]) / "adapter"
    model, tokenizer = load_for_generation(config.model, adapter), AutoTokenizer.from_pretrained(adapter)
    runtime = Runtime("cpu", 0, 1, next(model.parameters()).device)
    generator = Generator(model, tokenizer, runtime, max_prompt=400, max_new_tokens=LONGEST, batch_size=32)
    rows = cot_rows("eval", count, seed=77)
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]

    def greedy() -> list[tuple[str, int]]:
        replies = generator.generate(chats, Sampling(LONGEST))
        return [(reply.text, len(reply.tokens)) for reply in replies]

    def votes() -> list[tuple[str, int]]:
        mean = sum(tokens for _, tokens in results["greedy"][1]) / count
        samples = max(1, round(budget / mean))
        found = self_consistency(generator, chats, samples, Sampling(LONGEST, temperature=0.7))
        return [(vote.answer or "", sum(len(reply.tokens) for reply in vote.samples)) for vote in found]

    def tree(score: str) -> Callable[[], list[tuple[str, int]]]:
        options = SearchOptions(score=score, max_tokens=budget, thought_tokens=24, answer_tokens=8)  # type: ignore[arg-type]

        def answer() -> list[tuple[str, int]]:
            found = [search(generator, tokenizer, row["question"], options) for row in rows]
            print(found[0])
            return [(one.answer, one.tokens) for one in found]

        return answer

    results: dict[str, tuple[list[bool], list[tuple[str, int]]]] = {}
    ways = {"greedy": greedy, "self-consistency": votes, "tree, log-probability": tree("logprob"),
            "tree, self-evaluation": tree("self-evaluation")}  # fmt: skip
    for name, way in ways.items():
        start = time.monotonic()
        said = way()
        right = [is_correct(row, text) for row, (text, _) in zip(rows, said, strict=True)]
        results[name] = right, said
        first = results["greedy"][0]
        gained, lost = (sum(a > b for a, b in zip(*pair, strict=True)) for pair in ((right, first), (first, right)))
        print(f"{name:<24}{Accuracy.of(sum(right), count)}   {sum(t for _, t in said) / count:.0f} tokens a question, "
              f"{time.monotonic() - start:.0f} s; against greedy +{gained} -{lost}, p = {mcnemar(gained, lost):.2g}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
