"""Spending more tokens on a question: self-consistency, and tree of thoughts.

    from tpu_kit.search import SearchOptions, search
    found = search(generator, tokenizer, "Tom has 12 apples and gives 5 away. How many are left?", SearchOptions())
    print(found)

Self-consistency (Wang et al., arXiv:2203.11171) draws several answers and takes the one most of them agree on. Tree of
thoughts (Yao et al., arXiv:2305.10601) proposes several next steps of the reasoning, scores them, and goes on from the
most promising. A step is a line of the reasoning. Those of a level are generated as one batch, all from one prefill for
each step they go on from, in the programs that the generator has compiled already.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tpu_kit.completions import Completion, Prompt
from tpu_kit.config import DataConfig
from tpu_kit.generator import Generator
from tpu_kit.sampling import Sampling
from tpu_kit.thoughts import SearchResult, Stopped, Thought

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
        max_tokens: budget of generated tokens, the answers included; never exceeded.
        max_nodes: budget of steps.
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
        ValueError: a chain does not fit the generator, or the scoring function gives no finite number.
    """
    return _Search(generator, tokenizer, question, options or SearchOptions(), data or DataConfig()).run()


class _Search:
    def __init__(self, generator: Generator, tokenizer: Any, question: str, options: SearchOptions, data: DataConfig):
        self._generator, self._tokenizer, self._options, self._data = generator, tokenizer, options, data
        self.root = Thought(question, tokens=tuple(self._opened(question)))
        self.tokens = self.nodes = self._level = 0
        self._ended: list[Thought] = []

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
            each = self._options.thoughts_per_step * self._options.thought_tokens
            able = [
                max(0, self._options.max_tokens - self.tokens - reserved) // each,
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
        replies = self._generate([list(node.tokens) for node in nodes], sampling, self._options.thoughts_per_step)
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

    def _generate(self, prompts: list[list[int]], sampling: Sampling, n: int = 1) -> list[Completion]:
        """The generator gives a single prompt a batch, and so programs, of its own: here it goes as two alike."""
        alone = len(prompts) == 1 and self._options.beam > 1
        return self._generator.generate(prompts * (2 if alone else 1), sampling, n)[: len(prompts) * n]

    def _goes_on(self, reply: Completion) -> bool:
        """Whether a step ended with its line, or for want of tokens, and not with the turn."""
        return reply.finish_reason == "length" or "\n" in self._tokenizer.decode(list(reply.tokens[-1:]))

    def _scores(self, children: Sequence[Thought]) -> list[float]:
        how = self._options.score
        if how == "logprob":
            return [child.logprob / child.length for child in children]
        if how == "self-evaluation":
            asked = [self._judged(child) for child in children for _ in range(2)]
            said = self._generator.score(asked, ["yes", "no"] * len(children))
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
        return SearchResult(best.answer, best, self.root, self.tokens, self.nodes, stopped)


@dataclass(frozen=True)
class Vote:
    """What the samples of one prompt agree on.

    Attributes:
        answer: the one with the most votes; of equals the one whose samples are likelier together. None if no sample
            came to an answer.
        votes: answer to number of samples.
        samples: all of them.
    """

    answer: str | None
    votes: Mapping[str, int]
    samples: tuple[Completion, ...]


def self_consistency(
    generator: Generator,
    prompts: Sequence[Prompt],
    n: int = 5,
    sampling: Sampling | None = None,
    key: Callable[[str], str] = str.strip,
) -> list[Vote]:
    """Draws n answers to each prompt and lets them vote.

    Args:
        generator: with room for `sampling`.
        prompts: as for `Generator.generate`.
        n: samples of each.
        sampling: how; with a temperature above 0.
        key: what of an answer counts, such as its number; an empty one has no vote.

    Raises:
        ValueError: the sampling is greedy, or n is less than 1.
    """
    sampling = sampling or Sampling(temperature=0.7)
    if n < 1 or not sampling.temperature > 0:
        raise ValueError(f"self-consistency: n={n} must be 1 or more, and temperature={sampling.temperature} above 0")
    replies = generator.generate(prompts, sampling, n)
    found = []
    for start in range(0, len(replies), n):
        votes: dict[str, int] = defaultdict(int)
        weight: dict[str, float] = defaultdict(float)
        for reply in replies[start : start + n]:
            if answer := key(reply.answer):
                votes[answer] += 1
                weight[answer] += math.exp(reply.logprob)
        best = max(votes, key=lambda answer: (votes[answer], weight[answer]), default=None)
        found.append(Vote(best, dict(votes), tuple(replies[start : start + n])))
    return found
