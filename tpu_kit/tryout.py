"""Load a tuned model once, and see what it says, how fast, and how it searches.

from tpu_kit.tryout import try_out
tried = try_out(config, "Tom has 12 apples and gives 5 away. How many are left?", adapter_dir)
print(tried.reply.text, tried.tokens_per_second, tried.tree)
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from tpu_kit import runtime
from tpu_kit.answering import adapter_at_hand, generator_for, load_here
from tpu_kit.completions import Completion, Prompt
from tpu_kit.config import TrainConfig
from tpu_kit.launch import launch
from tpu_kit.sampling import Sampling
from tpu_kit.search import SearchOptions, SearchResult, search

_FRAME = 64  # tokens of the template, the tags and the closing around a chain of steps


@dataclass(frozen=True)
class Tried:
    """What came out.

    Attributes:
        reply: the likeliest one.
        tokens_per_second: of a full batch, with nothing left to compile.
        rows: of that batch.
        compiles: programs compiled for the first batch.
        compiles_after: programs compiled for the next one; 0 is right.
        tree: of the search.
    """

    reply: Completion
    tokens_per_second: float
    rows: int
    compiles: int
    compiles_after: int
    tree: SearchResult


def try_out(
    config: TrainConfig,
    question: str,
    adapter_dir: str | Path | None = None,
    options: SearchOptions | None = None,
    rows: int = 8,
) -> Tried:
    """Answers the question, measures the speed on copies of it, and searches for the answer; on one device.

    Args:
        config: the model, where it runs, and in `tracking.generate_tokens` the most tokens of an answer.
        question: as a user asks it.
        adapter_dir: what training wrote; None for the base model.
        options: how the tree of thoughts grows.
        rows: of the batch whose speed is measured.

    Raises:
        ValueError: as in `search`, or what `answering.answer` raises.
        LaunchError: the replica failed.
    """
    one = replace(config, launch=replace(config.launch, num_replicas=1))
    with adapter_at_hand(adapter_dir) as adapter:
        return launch(_Job(question, adapter, options or SearchOptions(), rows), one)


@dataclass
class _Job:
    """What the replica does; sent to it, and called there."""

    question: str
    adapter: str | None
    options: SearchOptions
    rows: int

    def __post_init__(self) -> None:
        self.__qualname__ = "try_out"  # what launch calls it

    def __call__(self, config: TrainConfig) -> Tried:
        rt, options = runtime.current(), self.options
        model, tokenizer = load_here(config, self.adapter, rt)
        limit = config.tracking.generate_tokens
        asked: Prompt = [{"role": "user", "content": self.question}] if tokenizer.chat_template else self.question
        if config.data.system_prompt and not isinstance(asked, str):
            asked = [{"role": "system", "content": config.data.system_prompt}, *asked]
        most = max(limit, options.thought_tokens, options.answer_tokens)
        rows = max(self.rows, options.beam * options.thoughts_per_step)
        room = options.max_thoughts * options.thought_tokens + _FRAME
        generator = generator_for(model, tokenizer, config, [asked], most, rows, room)

        counts, replies, seconds = [rt.counters().get("compiles", 0)], [], 0.0
        for _ in range(2):
            start = time.perf_counter()
            replies = generator.generate([asked] * rows, Sampling(limit))
            seconds = time.perf_counter() - start
            counts.append(rt.counters().get("compiles", 0))
        speed = sum(len(reply.tokens) for reply in replies) / seconds
        tree = search(generator, tokenizer, self.question, options, config.data)
        return Tried(replies[0], speed, rows, counts[1] - counts[0], counts[2] - counts[1], tree)
