"""Searching: the tree that grows, the budgets that bound it, the votes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tpu_kit.completions import Completion
from tpu_kit.config import load_config
from tpu_kit.generator import Generator
from tpu_kit.pretrained import load_base, load_tokenizer
from tpu_kit.runtime import Runtime
from tpu_kit.sampling import Sampling
from tpu_kit.search import SearchOptions, search, self_consistency
from tpu_kit.testing import run_python
from tpu_kit.thoughts import Thought

QUESTION = "Tom has 3 pens. Tom buys 4 and then loses 2. How many pens does Tom have now?"
SMALL = {"max_thoughts": 2, "thought_tokens": 6, "answer_tokens": 4, "max_tokens": 120, "temperature": 1.0}


class Counted(Generator):
    """The real generator, which notes how many prompts and samples each call was for, and all tokens."""

    calls: list[tuple[int, int]]
    tokens: int

    def generate(
        self, prompts: Sequence[Any], sampling: Sampling | None = None, n: int = 1, truncate: bool = False
    ) -> list[Completion]:
        found = super().generate(prompts, sampling, n, truncate)
        self.calls.append((len(prompts), n))
        self.tokens += sum(len(reply.tokens) for reply in found)
        return found


@pytest.fixture(scope="module")
def parts() -> tuple[Counted, Any]:
    """The embedded model and its tokenizer, on the CPU."""
    config = load_config(None, {"model.name": "embedded", "base_dtype": "fp32"}).model
    model, tokenizer = load_base(config, torch.float32).eval(), load_tokenizer(config)
    runtime = Runtime("cpu", 0, 1, torch.device("cpu"))
    return Counted(model, tokenizer, runtime, max_prompt=256, max_new_tokens=16, block=4), tokenizer


@pytest.fixture
def generator(parts: tuple[Counted, Any]) -> Counted:
    parts[0].calls, parts[0].tokens = [], 0
    return parts[0]


@pytest.fixture
def tokenizer(parts: tuple[Counted, Any]) -> Any:
    return parts[1]


def every(node: Thought) -> list[Thought]:
    return [found for child in node.children for found in (child, *every(child))]


@pytest.mark.parametrize("strategy", ["beam", "best-first"])
def test_the_tree(generator: Counted, tokenizer: Any, strategy: Any) -> None:
    options = SearchOptions(strategy=strategy, **SMALL)  # type: ignore[arg-type]
    found = search(generator, tokenizer, QUESTION, options)
    assert generator.tokens >= found.tokens <= options.max_tokens
    nodes = every(found.root)
    assert len(nodes) == found.nodes >= 2
    assert {node.depth for node in nodes} <= {1, 2}
    assert found.best in nodes
    assert found.best.answer == found.answer
    assert all(len(node.children) <= options.thoughts_per_step for node in [found.root, *nodes])
    assert all(len({child.text for child in node.children}) == len(node.children) for node in nodes)
    assert {prompts for prompts, _ in generator.calls} == {options.beam}  # one shape for every level
    assert {n for _, n in generator.calls[:-1]} == {options.thoughts_per_step}
    drawn = str(found)
    assert drawn.startswith(QUESTION)
    assert drawn.count("*") >= found.best.depth
    assert found._repr_html_().count("<li") == found.nodes
    again = search(generator, tokenizer, QUESTION, options)
    assert str(again) == drawn


def test_a_users_score_decides_and_sees_the_steps(generator: Counted, tokenizer: Any) -> None:
    seen = []

    def longest(question: str, steps: Sequence[str]) -> float:
        seen.append((question, tuple(steps)))
        return float(sum(map(len, steps)))

    found = search(generator, tokenizer, QUESTION, SearchOptions(score=longest, **SMALL))  # type: ignore[arg-type]
    ended = [node for node in every(found.root) if node.answer is not None]
    assert found.best.score == max(node.score for node in ended)
    assert {question for question, _ in seen} == {QUESTION}
    assert tuple(found.best.steps) in {steps for _, steps in seen}
    with pytest.raises(ValueError, match="scoring function gave nan; it must give a finite number"):
        search(generator, tokenizer, QUESTION, SearchOptions(score=lambda *_: float("nan"), **SMALL))  # type: ignore[arg-type]


def test_self_evaluation_is_a_probability(generator: Counted, tokenizer: Any) -> None:
    found = search(generator, tokenizer, QUESTION, SearchOptions(score="self-evaluation", **SMALL))  # type: ignore[arg-type]
    assert all(0 <= node.score <= 1 for node in every(found.root))


def test_budgets_end_the_search(generator: Counted, tokenizer: Any) -> None:
    few = {**SMALL, "max_thoughts": 5}
    found = search(generator, tokenizer, QUESTION, SearchOptions(**{**few, "max_tokens": 30}))  # type: ignore[arg-type]
    assert (found.stopped, found.root.children[0].depth) == ("tokens", 1)
    assert found.tokens <= 30
    assert found.answer == found.best.answer
    found = search(generator, tokenizer, QUESTION, SearchOptions(**{**few, "max_nodes": 5}))  # type: ignore[arg-type]
    assert found.nodes <= 5
    assert found.stopped == "nodes"


def test_memory_efficient_changes_what_is_kept_and_nothing_else(generator: Counted, tokenizer: Any) -> None:
    lean = search(generator, tokenizer, QUESTION, SearchOptions(**SMALL))  # type: ignore[arg-type]
    full = search(generator, tokenizer, QUESTION, SearchOptions(memory_efficient=False, **SMALL))  # type: ignore[arg-type]
    assert str(lean) == str(full)
    assert all(node.tokens for node in every(full.root))
    assert any(not node.tokens for node in every(lean.root))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_thoughts": 0}, "max_thoughts=0 must be 1 or more"),
        ({"strategy": "widest"}, "strategy=widest must be beam or best-first"),
        ({"score": "votes"}, "score=votes must be logprob, self-evaluation or a function"),
        ({"temperature": 0.0}, "temperature above 0"),
        ({"max_tokens": 50}, "max_tokens=50 is less than one level may take: 112"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SearchOptions(**options)


def test_votes(generator: Counted, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chats: list[Any] = [[{"role": "user", "content": QUESTION}], "1 + 1 ="]
    sampling = Sampling(8, temperature=0.7, seed=3)
    first, second = self_consistency(generator, chats, 5, sampling)
    assert generator.calls == [(2, 5)]
    assert len(first.samples) == len(second.samples) == 5
    assert sum(first.votes.values()) <= 5
    assert first.answer is None or first.votes[first.answer] == max(first.votes.values())

    def reply(answer: str, logprob: float) -> Completion:
        return Completion(answer, None, answer, (1,), "stop", logprob)

    said = [reply("7 ", -3.0), reply("8", -1.0), reply("7", -3.0), reply("8", -2.0), reply("", -0.1)]
    monkeypatch.setattr(generator, "generate", lambda *_: said)
    (vote,) = self_consistency(generator, ["?"], 5)
    assert (vote.answer, dict(vote.votes)) == ("8", {"7": 2, "8": 2})  # of equals the likelier
    for n, temperature in ((0, 0.7), (3, 0.0)):
        with pytest.raises(ValueError, match=f"n={n} must be 1 or more, and temperature={temperature} above 0"):
            self_consistency(generator, ["?"], n, Sampling(temperature=temperature))


def test_a_search_compiles_nothing_that_an_earlier_one_did_not() -> None:
    """Two searches on XLA:CPU, with other questions, seeds and trees: the second finds all programs made."""
    code = f"""
import torch
from tpu_kit.config import load_config
from tpu_kit.generator import Generator
from tpu_kit.model import to_device
from tpu_kit.pretrained import load_base, load_tokenizer
from tpu_kit.runtime import Runtime
from tpu_kit.search import SearchOptions, search

config = load_config(None, {{"model.name": "embedded", "base_dtype": "fp32"}}).model
import torch_xla
device = torch_xla.device()
rt = Runtime("xla-cpu", 0, 1, device)
model, tokenizer = to_device(load_base(config, torch.float32).eval(), device), load_tokenizer(config)
generator = Generator(model, tokenizer, rt, max_prompt=128, max_new_tokens=8, batch_size=6, block=8, widths=[128])
counts = []
for seed, question in enumerate(({QUESTION!r}, "Ida has 2 bags of 5 nuts. How many nuts does Ida have?", "1 + 1?")):
    before = rt.counters()["compiles"]
    options = SearchOptions(max_thoughts=3, thought_tokens=8, answer_tokens=4, max_tokens=200, seed=seed)
    search(generator, tokenizer, question, options)
    counts.append(rt.counters()["compiles"] - before)
print(counts)
"""
    first, second, third = json.loads(run_python(code).stdout.splitlines()[-1])
    assert 0 < first <= 12
    assert (second, third) == (0, 0)
