"""Answers a question with a tree of thoughts, which generates more tokens than a single reply.

    from tpu_kit import SearchOptions, think
    result = think(config, "Tom has 12 apples and gives 5 away. How many are left?", adapter_dir="runs/my-run/adapter")
    print(result)

Tree of thoughts (Yao et al., arXiv:2305.10601) proposes several next steps of the reasoning, scores them, and continues
from the best steps. A step is a line of the reasoning. The steps of a level are generated as a batch.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed.replica import main_thread, runtime
from tpu_kit.extras.tree_search.options import SearchOptions
from tpu_kit.generation.answers import generator_for, launch_with_adapter, on_one_replica
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.model_loading import load_here
from tpu_kit.generation.prompts import Completion, Prompt
from tpu_kit.generation.sampling import Sampling

Stopped = Literal["done", "tokens"]

_FRAME = 64  # tokens around a chain
_VERDICTS = ("yes", "no")


@dataclass(eq=False)  # parents and children refer to each other
class Thought:
    """A step of the reasoning, or the root of the tree.

    Attributes:
        text: the text of the step; for the root, the question.
        score: the score of the chain that ends with this step, higher is better; 0 for the root.
        depth: number of steps in the chain; 0 for the root.
        done: whether the reasoning ended with this step.
        answer: the answer of the chain; None if the model has not generated it.
        children: the proposals for the next step.
        parent: the step before; None for the root.
        tokens: ids of the prompt and the chain, with sum `logprob` in nats and number `length` for the chain.
    """

    text: str
    score: float = 0.0
    depth: int = 0
    done: bool = False
    answer: str | None = None
    children: list[Thought] = field(default_factory=list)
    parent: Thought | None = field(default=None, repr=False)
    tokens: tuple[int, ...] = field(default=(), repr=False)
    logprob: float = field(default=0.0, repr=False)
    length: int = field(default=0, repr=False)

    @property
    def chain(self) -> list[Thought]:
        """The thoughts from the root to this thought."""
        return [*(self.parent.chain if self.parent else []), self]

    @property
    def steps(self) -> list[str]:
        """The texts of the chain, without the question."""
        return [step.text for step in self.chain[1:]]


@dataclass(frozen=True, repr=False)
class SearchResult:
    """The result of a search.

    Attributes:
        answer: the answer of the best chain.
        best: the last step of the best chain.
        root: the root of the tree.
        tokens: number of generated tokens, including answers and self-evaluation.
        nodes: number of steps in the tree.
        stopped: "done", or "tokens" if the token budget was exhausted.
    """

    answer: str
    best: Thought
    root: Thought
    tokens: int
    nodes: int
    stopped: Stopped

    def to_dict(self) -> dict[str, Any]:
        """Returns "answer", "tokens", "nodes", "stopped" and "tree" for JSON.

        "tree" is the root, whose text is the question. The root and every step have "text", "score", "chosen" (whether
        it is in the best chain), "answer" (or None) and "steps", the list of next steps.
        """
        path = {id(step) for step in self.best.chain}

        def plain(node: Thought) -> dict[str, Any]:
            about = {"text": node.text, "score": node.score, "chosen": id(node) in path, "answer": node.answer}
            return {**about, "steps": [plain(child) for child in node.children]}

        figures = {"tokens": self.tokens, "nodes": self.nodes, "stopped": self.stopped}
        return {"answer": self.answer, **figures, "tree": plain(self.root)}

    def __repr__(self) -> str:
        path = {id(step) for step in self.best.chain}
        lines = [self.root.text]

        def draw(node: Thought, indent: str) -> None:
            for child in node.children:
                last = child is node.children[-1]
                mark = "*" if id(child) in path else " "
                lines.append(f"{indent}{'└' if last else '├'}{mark}{child.score:8.3f}  {_line(child)}")
                draw(child, indent + ("  " if last else "│ "))

        draw(self.root, "")
        return "\n".join([*lines, f"answer: {self.answer} ({self.nodes} steps, {self.tokens} tokens, {self.stopped})"])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _line(node: Thought) -> str:
    """Returns the text of a step on one line, with its answer if there is one."""
    return " ".join(node.text.split()) + (f"  = {node.answer}" if node.answer is not None else "")


def search(generator: Generator, question: str, options: SearchOptions | None = None) -> SearchResult:
    """Answers a question by a tree of thoughts.

    Args:
        generator: its `max_prompt` must hold the question and the longest chain, and its `max_new_tokens` the larger of
            thought_tokens and answer_tokens; the best `batch_size` is beam x thoughts_per_step.
        question: the user's text; the chat template renders it, if there is one.
        options: options of the search; None: the defaults.

    Raises:
        ValueError: a chain does not fit the generator, the token budget is below one level, or the scoring function
            fails or returns no finite number.
    """
    return _Search(generator, question, options or SearchOptions()).run()


def think(
    config: TrainConfig,
    question: str,
    options: SearchOptions | None = None,
    *,
    adapter_dir: str | Path | None = None,
    chat: bool | None = None,
) -> SearchResult:
    """Loads a model on one device, or its mesh, and answers a question by a tree of thoughts.

    Args:
        config: as in `answers.generate`; one replica runs, or the mesh.
        question: the user's text.
        options: options of the search; None: the defaults.
        adapter_dir: as in `answers.generate`.
        chat: whether a chat template renders the question, with True the base model's if the adapter has none; None: if
            the adapter's tokenizer has a template.

    Raises:
        ValueError: as in `search` and `answers.generate`; or `model.images` is true.
        LaunchError: the replica failed.
    """
    if config.model.images:
        raise ValueError("model.images=true: search asks about text alone; set model.images=false")
    arguments = {"question": question, "options": options or SearchOptions(), "chat": chat}
    return launch_with_adapter(_think_here, think, on_one_replica(config), adapter_dir, **arguments)


def _think_here(
    config: TrainConfig, adapter: Path | None, question: str, options: SearchOptions, chat: bool | None
) -> SearchResult:
    """Loads the model in the replica and searches; `chat` as in `think`: False asks without a chat template."""
    asked: Prompt = [{"role": "user", "content": question}]
    model, tokenizer = load_here(config, adapter, runtime.current(), chat, [] if chat is False else [asked])
    if chat is False:
        tokenizer.chat_template = None
    most = max(options.thought_tokens, options.answer_tokens)
    # The longest chain, with room for the template of the question, the tags and the question of self-evaluation.
    room = options.max_thoughts * options.thought_tokens + _FRAME
    rows = options.beam * options.thoughts_per_step
    generator = generator_for(model, tokenizer, config, [asked], most, rows, room)
    return search(generator, question, options)


class _Search:
    """A search; `tokens` and `nodes` count as in `SearchResult`. Raises ValueError if the budget is too small."""

    def __init__(self, generator: Generator, question: str, options: SearchOptions) -> None:
        self._generator, self._options, codec = generator, options, generator.codec
        self._tokenizer, self._data, self._ids = codec.tokenizer, codec.data, codec.plain
        self.root = Thought(question, tokens=tuple(self._opened(question)))
        self.tokens = self.nodes = self._level = 0
        self._ended: list[Thought] = []
        self._judging = sum(len(self._ids(word)) for word in _VERDICTS) if options.score == "self-evaluation" else 0
        # The maximum tokens to extend a chain by a step.
        self._each = options.thoughts_per_step * (options.thought_tokens + self._judging)
        if options.max_tokens < self._each + options.answer_tokens:
            raise ValueError(
                f"search: max_tokens={options.max_tokens} is less than one level may take: "
                f"{self._each + options.answer_tokens}"
            )

    def _opened(self, question: str) -> list[int]:
        """Returns the tokens of the prompt up to the first step: the question, and the tag that opens reasoning."""
        codec, opening = self._generator.codec, f"{self._data.think_open}\n"
        if not self._tokenizer.chat_template:
            return self._ids(f"{question}\n{opening}")
        prompt = codec.encode([{"role": "user", "content": question}])
        return prompt if codec.opens_reasoning(prompt) else [*prompt, *self._ids(opening)]

    def run(self) -> SearchResult:
        """Extends the tree until the best chains have ended or the budget is spent, and answers; errors as `search`."""
        stopped: Stopped = "done"
        frontier = [self.root]
        while frontier:
            chosen = sorted(frontier, key=lambda node: -node.score)[: self._options.beam]
            # At the end, every chain of the beam may need an answer.
            reserved = self._options.answer_tokens * self._options.beam
            able = max(0, self._options.max_tokens - self.tokens - reserved) // self._each
            chosen = chosen[: able or self.root in chosen]  # __init__ has checked the budget for one level
            if not chosen:
                stopped = "tokens"
                break
            children = self._expand(chosen)
            self._ended += [child for child in children if child.done or child.depth == self._options.max_thoughts]
            open_ = [child for child in children if child not in self._ended]
            others = [] if self._options.strategy == "beam" else [node for node in frontier if node not in chosen]
            frontier = sorted([*open_, *others], key=lambda node: -node.score)
            if self._options.strategy == "beam":
                frontier = frontier[: self._options.beam]
            if len(self._ended) >= self._options.beam and not self._hopeful(frontier):
                break
        return self._answer(frontier, stopped)

    def _hopeful(self, frontier: Sequence[Thought]) -> bool:
        """Returns whether an open chain scores higher than the worst of the best ended chains."""
        best = sorted((node.score for node in self._ended), reverse=True)[: self._options.beam]
        return any(node.score > best[-1] for node in frontier)

    def _expand(self, nodes: Sequence[Thought]) -> list[Thought]:
        """Adds proposals for the next steps to all nodes, as a batch; returns them, scored, without duplicates."""
        sampling = Sampling(
            self._options.thought_tokens, self._options.temperature, stop=("\n",), seed=self._options.seed + self._level
        )
        self._level += 1
        replies = self._generate([list(node.tokens) for node in nodes], sampling, self._options.thoughts_per_step)
        children = []
        for index, reply in enumerate(replies):
            node = nodes[index // self._options.thoughts_per_step]
            self.tokens += len(reply.tokens)
            text = reply.text.strip()
            if any(text == sibling.text for sibling in node.children):
                continue  # a duplicate proposal
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
        """Generates replies; duplicates a single prompt, so that the generator compiles no further batch shape."""
        alone = len(prompts) == 1 and self._options.beam > 1
        return self._generator.generate(prompts * (2 if alone else 1), sampling, n)[: len(prompts) * n]

    def _goes_on(self, reply: Completion) -> bool:
        """Returns whether a step ended at a line break or at its token limit, not at the end of the turn."""
        return reply.finish_reason == "length" or "\n" in self._tokenizer.decode(list(reply.tokens[-1:]))

    def _scores(self, children: Sequence[Thought]) -> list[float]:
        """Returns the scores of the chains that end with `children`, higher is better.

        Raises ValueError if the user's function fails or returns no finite number.
        """
        how = self._options.score
        if how == "logprob":
            return [child.logprob / child.length for child in children]
        if how == "self-evaluation":
            asked = [self._generator.codec.encode(self._judged(child)) for child in children]
            pairs = [(prompt, self._ids(word)) for prompt in asked for word in _VERDICTS]
            ratings = self._generator.rate([[*prompt, *verdict] for prompt, verdict in pairs])
            self.tokens += self._judging * len(children)
            sums = [sum(ratings[row].logprobs[-len(verdict) :]) for row, (_, verdict) in enumerate(pairs)]
            return [1 / (1 + math.exp(min(700.0, no - yes))) for yes, no in zip(sums[::2], sums[1::2], strict=True)]
        assert callable(how)
        try:
            question, chains = self.root.text, [child.steps for child in children]
            scores = main_thread.call(lambda: [float(how(question, steps)) for steps in chains])
        except Exception as error:  # a user's function may raise anything
            text = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"search: the scoring function, called with the question and the steps, failed: {text}"
            ) from error
        if wrong := [value for value in scores if not math.isfinite(value)]:
            raise ValueError(f"search: the scoring function returned {wrong[0]}; it must return a finite number")
        return scores

    def _judged(self, child: Thought) -> Prompt:
        """Returns the prompt that asks whether the steps of a chain are right."""
        steps = "\n".join(child.steps)
        asked = f"{self.root.text}\n\n{steps}\n\nAre these steps right so far? Answer yes or no."
        return [{"role": "user", "content": asked}] if self._tokenizer.chat_template else f"{asked} Answer: "

    def _closing(self, node: Thought) -> list[int]:
        """Returns the tokens that close a chain's reasoning; empty if it is closed."""
        if self._data.think_close in node.text:
            return []
        within = "\n" not in self._tokenizer.decode(list(node.tokens[-1:]))
        return self._ids("\n" * within + f"{self._data.think_close}\n")

    def _answer(self, frontier: Sequence[Thought], stopped: Stopped) -> SearchResult:
        """Generates the answers of the best ended chains, or else of the best open chains; returns the result."""
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
