"""Spending more tokens on a question: tree of thoughts (Yao et al., arXiv:2305.10601).

    from tpu_kit.search import SearchOptions, think
    found = think(config, "Tom has 12 apples and gives 5 away. How many are left?", adapter_dir="runs/my-run/adapter")
    print(found)

It proposes several next steps of the reasoning, scores them, and goes on from the most promising. A step is a line of
the reasoning. Those of a level are generated as one batch, in the programs that the generator has compiled already.
What they have in common is read once: the next level takes its keys and values out of the last one's cache, on the
device. (Where best-first goes back to steps of an earlier level, and for the answers, chains are read anew.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tpu_kit import runtime
from tpu_kit.answering import adapter_at_hand, generator_for, load_here
from tpu_kit.completions import Completion, Prompt
from tpu_kit.config import DataConfig, TrainConfig
from tpu_kit.generator import Generator
from tpu_kit.launch import launch
from tpu_kit.sampling import Sampling
from tpu_kit.thoughts import SearchResult, Stopped, Thought
from tpu_kit.votes import Vote, self_consistency

__all__ = ["Scorer", "SearchOptions", "SearchResult", "Thought", "Vote", "search", "self_consistency", "think"]

_FRAME = 64  # tokens around a chain
_VERDICTS = ("yes", "no")

Scorer = Callable[[str, Sequence[str]], float]
"""A user's function of the question and the steps so far; the higher the better."""


@dataclass(frozen=True)
class SearchOptions:
    """How a tree of thoughts grows.

    Attributes:
        max_thoughts: the most steps of a chain; then the reasoning is closed and the answer asked for.
        thoughts_per_step: proposals for each next step.
        beam: chains that are kept at each level, or followed at a time.
        strategy: "beam" goes on from the best of each level, "best-first" from the best of the whole tree.
        score: "logprob" (mean log-probability of the chain's tokens), "self-evaluation" (how likely the model finds
            "yes" when asked whether the steps are right), or a function.
        max_tokens: budget of generated tokens, the answers and what self-evaluation says included; never exceeded.
        max_nodes: budget of steps.
        max_memory_mib: budget of keys and values in MiB (1024 x 1024 bytes), by `Generator.cache_bytes`; a level that
            takes more is generated in parts. None = the generator's own bounds.
        thought_tokens: the most tokens of a step.
        answer_tokens: the most tokens of an answer.
        temperature: of the proposals.
        seed: of the proposals.
        memory_efficient: forget the tokens of steps that are not gone on from; their texts stay in the tree.

    Raises:
        ValueError: a value is out of range.
    """

    max_thoughts: int = 5
    thoughts_per_step: int = 3
    beam: int = 2
    strategy: Literal["beam", "best-first"] = "beam"
    score: Literal["logprob", "self-evaluation"] | Scorer = "logprob"
    max_tokens: int = 1024
    max_nodes: int = 64
    max_memory_mib: float | None = None
    thought_tokens: int = 32
    answer_tokens: int = 16
    temperature: float = 0.7
    seed: int = 0
    memory_efficient: bool = True

    def __post_init__(self) -> None:
        counts = ("max_thoughts", "thoughts_per_step", "beam", "max_tokens", "max_nodes", "thought_tokens")
        wrong = [f"{name}={getattr(self, name)} must be 1 or more" for name in counts if getattr(self, name) < 1]
        if self.strategy not in ("beam", "best-first"):
            wrong.append(f"strategy={self.strategy} must be beam or best-first")
        if not callable(self.score) and self.score not in ("logprob", "self-evaluation"):
            wrong.append(f"score={self.score} must be logprob, self-evaluation or a function")
        if self.max_memory_mib is not None and not self.max_memory_mib > 0:
            wrong.append(f"max_memory_mib={self.max_memory_mib} must be above 0")
        if self.answer_tokens < 1 or not self.temperature > 0:
            wrong.append("answer_tokens must be 1 or more and temperature above 0, or all proposals would be the same")
        least = self.thoughts_per_step * self.thought_tokens + self.answer_tokens
        if self.max_tokens < least:
            wrong.append(f"max_tokens={self.max_tokens} is less than one level may take: {least}")
        if wrong:
            raise ValueError("search: " + "; ".join(wrong))


def search(
    generator: Generator,
    tokenizer: Any,
    question: str,
    options: SearchOptions | None = None,
    data: DataConfig | None = None,
) -> SearchResult:
    """Answers a question by a tree of thoughts.

    Args:
        generator: its `max_prompt` must hold the question and the longest chain, its `batch_size` is best beam x
            thoughts_per_step, its `max_new_tokens` the larger of thought_tokens and answer_tokens.
        tokenizer: the generator's.
        question: as a user asks it; rendered by the chat template, if there is one.
        options: how the tree grows.
        data: the tags of the reasoning and the system prompt, as in training.

    Raises:
        ValueError: a chain does not fit the generator, the budgets allow no level, or the scoring function gives no
            finite number.
    """
    return _Search(generator, tokenizer, question, options or SearchOptions(), data or DataConfig()).run()


def think(
    config: TrainConfig,
    question: str,
    options: SearchOptions | None = None,
    *,
    adapter_dir: str | Path | None = None,
) -> SearchResult:
    """Loads a model on one device, and answers a question by a tree of thoughts.

    Args:
        config: the model, the tags of the reasoning, the system prompt and where it runs; by one replica.
        question: as a user asks it.
        options: how the tree grows.
        adapter_dir: what training wrote; None for the base model.

    Raises:
        ValueError: as in `search`, or what `answer` raises.
        LaunchError: the replica failed.
    """
    one = replace(config, launch=replace(config.launch, num_replicas=1))
    with adapter_at_hand(adapter_dir) as adapter:
        return launch(_Job(question, options or SearchOptions(), adapter), one)


@dataclass
class _Job:
    """What the replica does; sent to it, and called there."""

    question: str
    options: SearchOptions
    adapter: str | None

    def __post_init__(self) -> None:
        self.__qualname__ = "think"  # what launch calls it

    def __call__(self, config: TrainConfig) -> SearchResult:
        model, tokenizer = load_here(config, self.adapter, runtime.current())
        options = self.options
        most = max(options.thought_tokens, options.answer_tokens)
        # The question's template, the tags, and what self-evaluation asks come to the longest chain.
        room = options.max_thoughts * options.thought_tokens + _FRAME
        asked = [{"role": "user", "content": self.question}] if tokenizer.chat_template else self.question
        rows = options.beam * options.thoughts_per_step
        generator = generator_for(model, tokenizer, config, [asked], most, rows, room)
        return search(generator, tokenizer, self.question, options, config.data)


class _Search:
    def __init__(self, generator: Generator, tokenizer: Any, question: str, options: SearchOptions, data: DataConfig):
        self._generator, self._tokenizer, self._options, self._data = generator, tokenizer, options, data
        self.root = Thought(question, tokens=tuple(self._opened(question)))
        self.tokens = self.nodes = self._level = 0
        self._read = generator.read
        self._ended: list[Thought] = []
        self._judging = sum(len(self._ids(word)) for word in _VERDICTS) if options.score == "self-evaluation" else 0
        # What a step that is gone on from takes at most, and the answers in the end.
        self._each = options.thoughts_per_step * (options.thought_tokens + self._judging)
        if options.max_tokens < self._each + options.answer_tokens:
            raise ValueError(
                f"search: max_tokens={options.max_tokens} is less than one level may take: "
                f"{self._each + options.answer_tokens}"
            )
        self._together = self._fitting()

    def _fitting(self) -> int:
        """How many steps can be gone on from at a time."""
        options, mib = self._options, self._options.max_memory_mib
        if mib is None:
            return options.beam
        sizes = range(options.beam, 0, -1)
        takes = {size: self._generator.cache_bytes(size, options.thoughts_per_step) / 2**20 for size in sizes}
        found = next((size for size in sizes if takes[size] <= mib), 0)
        if not found:
            raise ValueError(
                f"search: max_memory_mib={mib:g} is less than the {takes[1]:.1f} MiB of keys and values that "
                f"{options.thoughts_per_step} proposals for one step take; raise it, or lower thoughts_per_step"
            )
        return found

    def _opened(self, question: str) -> list[int]:
        """The prompt up to the first step."""
        if not self._tokenizer.chat_template:
            return self._ids(f"{question}\n{self._data.think_open}\n")
        system = [{"role": "system", "content": self._data.system_prompt}] if self._data.system_prompt else []
        chat = [*system, {"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        opened = text.rstrip().endswith(self._data.think_open)
        return self._ids(text if opened else f"{text}{self._data.think_open}\n")

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def run(self) -> SearchResult:
        stopped: Stopped = "done"
        frontier = [self.root]
        while frontier:
            chosen = sorted(frontier, key=lambda node: -node.score)[: self._options.beam]
            # Each chain that is gone on from may need its answer asked for in the end.
            reserved = self._options.answer_tokens * self._options.beam
            able = [
                max(0, self._options.max_tokens - self.tokens - reserved) // self._each,
                max(0, self._options.max_nodes - self.nodes) // self._options.thoughts_per_step,
            ]
            if self.root in chosen and not able[0]:
                able[0] = 1  # SearchOptions has made sure of it
            chosen = chosen[: min(able)]
            if not chosen:
                stopped = "tokens" if able[0] <= able[1] else "nodes"
                break
            children = self._expand(chosen)
            self._ended += [child for child in children if child.done or child.depth == self._options.max_thoughts]
            open_ = [child for child in children if child not in self._ended]
            kept = open_ if self._options.strategy == "beam" else [*open_, *(n for n in frontier if n not in chosen)]
            frontier = sorted(kept, key=lambda node: -node.score)
            if self._options.strategy == "beam":
                frontier = frontier[: self._options.beam]
            if self._options.memory_efficient:
                self._forget(frontier)
            if len(self._ended) >= self._options.beam and not self._hopeful(frontier):
                break
        return self._answer(frontier, stopped)

    def _hopeful(self, frontier: Sequence[Thought]) -> bool:
        """Whether an open chain is better than the worst of the ended ones that are kept."""
        kept = sorted((node.score for node in self._ended), reverse=True)[: self._options.beam]
        return any(node.score > kept[-1] for node in frontier)

    def _expand(self, nodes: Sequence[Thought]) -> list[Thought]:
        """Proposes the next steps of all nodes as one batch, and scores them."""
        sampling = Sampling(
            self._options.thought_tokens, self._options.temperature, stop=("\n",), seed=self._options.seed + self._level
        )
        self._level += 1
        replies: list[Completion] = []
        for start in range(0, len(nodes), self._together):
            part = [list(node.tokens) for node in nodes[start : start + self._together]]
            drawn = replace(sampling, seed=sampling.seed + start)
            replies += self._generate(part, drawn, self._options.thoughts_per_step, hold=True)
        children = []
        for place, reply in enumerate(replies):
            node = nodes[place // self._options.thoughts_per_step]
            self.tokens += len(reply.tokens)
            text = reply.text.strip()
            if any(text == sibling.text for sibling in node.children):
                continue  # a second time the same proposal
            child = Thought(
                text, depth=node.depth + 1, parent=node, tokens=(*node.tokens, *reply.tokens),
                logprob=node.logprob + reply.logprob, length=node.length + len(reply.tokens),
                done=self._data.think_close in reply.text or not self._goes_on(reply),
            )  # fmt: skip
            node.children.append(child)
            children.append(child)
        self.nodes += len(children)
        for child, score in zip(children, self._scores(children), strict=True):
            child.score = score
        return children

    def _generate(
        self, prompts: list[list[int]], sampling: Sampling, n: int = 1, hold: bool = False
    ) -> list[Completion]:
        """The generator gives a single prompt a batch, and so programs, of its own: here it goes as two alike."""
        alone = len(prompts) == 1 and self._together > 1
        return self._generator.generate(prompts * (2 if alone else 1), sampling, n, hold=hold)[: len(prompts) * n]

    def _goes_on(self, reply: Completion) -> bool:
        """Whether a step ended with its line, or for want of tokens, and not with the turn."""
        return reply.finish_reason == "length" or "\n" in self._tokenizer.decode(list(reply.tokens[-1:]))

    def _scores(self, children: Sequence[Thought]) -> list[float]:
        how = self._options.score
        if how == "logprob":
            return [child.logprob / child.length for child in children]
        if how == "self-evaluation":
            asked = [self._judged(child) for child in children for _ in _VERDICTS]
            said = self._generator.score(asked, _VERDICTS * len(children))
            self.tokens += self._judging * len(children)
            pairs = [(said[2 * place][0], said[2 * place + 1][0]) for place in range(len(children))]
            return [1 / (1 + math.exp(min(700.0, no - yes))) for yes, no in pairs]
        assert callable(how)
        found = [float(how(self.root.text, child.steps)) for child in children]
        if wrong := [value for value in found if not math.isfinite(value)]:
            raise ValueError(f"search: the scoring function gave {wrong[0]}; it must give a finite number")
        return found

    def _judged(self, child: Thought) -> Prompt:
        steps = "\n".join(child.steps)
        asked = f"{self.root.text}\n\n{steps}\n\nAre these steps right so far? Answer yes or no."
        return [{"role": "user", "content": asked}] if self._tokenizer.chat_template else f"{asked} Answer: "

    def _closing(self, node: Thought) -> list[int]:
        """What closes a chain's reasoning, if it is open."""
        if self._data.think_close in node.text:
            return []
        within = "\n" not in self._tokenizer.decode(list(node.tokens[-1:]))
        return self._ids("\n" * within + f"{self._data.think_close}\n")

    def _forget(self, frontier: Sequence[Thought]) -> None:
        """Drops the tokens of chains that cannot be the answer."""
        kept = sorted(self._ended, key=lambda node: -node.score)[: self._options.beam]
        needed = {id(node) for node in [*frontier, *kept]}
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            waiting += node.children
            if id(node) not in needed:
                node.tokens = ()

    def _answer(self, frontier: Sequence[Thought], stopped: Stopped) -> SearchResult:
        """Asks the best chains for their answers, as one batch."""
        chains = sorted(self._ended or frontier, key=lambda node: -node.score)[: self._options.beam]
        room = max(1, (self._options.max_tokens - self.tokens) // self._options.answer_tokens)
        chains = chains[:room]
        prompts = [[*node.tokens, *self._closing(node)] for node in chains]
        replies = self._generate(prompts, Sampling(self._options.answer_tokens))
        for node, reply in zip(chains, replies, strict=True):
            self.tokens += len(reply.tokens)
            node.answer = reply.text.strip()
        best = chains[0]
        assert best.answer is not None
        read = self._generator.read - self._read
        return SearchResult(best.answer, best, self.root, self.tokens, self.nodes, stopped, read)
