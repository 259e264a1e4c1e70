"""Tree search: growth of the tree, its budgets, and votes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.child_processes import run_python
from tpu_kit.cli import main
from tpu_kit.config.loader import load_config
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.extras.tree_search.search import SearchOptions, SearchResult, Thought, search, think
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.prompts import Completion
from tpu_kit.generation.sampling import Sampling
from tpu_kit.machine.checks import Machine
from tpu_kit.model.weights.loading import load_base
from tpu_kit.model.weights.source import load_tokenizer

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
QUESTION = "Tom has 3 pens. Tom buys 4 and then loses 2. How many pens does Tom have now?"
SMALL: dict[str, Any] = {
    "max_thoughts": 2,
    "thought_tokens": 6,
    "answer_tokens": 4,
    "max_tokens": 120,
    "temperature": 1.0,
}


class Counted(Generator):
    """The real generator, which notes the prompts and samples of each call, and counts the tokens."""

    calls: list[tuple[int, int]]
    tokens: int

    def generate(  # type: ignore[override]  # fewer parameters than the generator
        self, prompts: Sequence[Any], sampling: Sampling | None = None, n: int = 1
    ) -> list[Completion]:
        found = super().generate(prompts, sampling, n)
        self.calls.append((len(prompts), n))
        self.tokens += sum(len(reply.tokens) for reply in found)
        return found


@pytest.fixture(scope="module")
def embedded() -> Counted:
    config = load_config(None, {"model.name": "embedded", "base_dtype": "fp32"}).model
    model, tokenizer = load_base(config, torch.float32).eval(), load_tokenizer(config)
    runtime = CpuRuntime(0, 1, torch.device("cpu"))
    return Counted(
        model, tokenizer, runtime, max_prompt=256, max_new_tokens=16, batch_size=12, block=4, data=load_config().data
    )


@pytest.fixture
def generator(embedded: Counted) -> Counted:
    embedded.calls, embedded.tokens = [], 0
    return embedded


def every(node: Thought) -> list[Thought]:
    return [found for child in node.children for found in (child, *every(child))]


@pytest.mark.parametrize("strategy", ["beam", "best-first"])
def test_the_tree(generator: Counted, strategy: Any) -> None:
    options = SearchOptions(strategy=strategy, **SMALL)
    found = search(generator, QUESTION, options)
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
    again = search(generator, QUESTION, options)
    assert str(again) == drawn


def test_best_first_goes_back_to_an_earlier_level(generator: Counted) -> None:
    """To the most promising step of the whole tree; beam search only compares the newest level."""

    def shallow(question: str, steps: Sequence[str]) -> float:
        return -float(len(steps)) - 1e-3 * sum(map(len, steps))

    common: dict[str, Any] = {**SMALL, "score": shallow, "beam": 1, "max_thoughts": 3, "max_tokens": 200}
    best = search(generator, QUESTION, SearchOptions(strategy="best-first", **common))
    beam = search(generator, QUESTION, SearchOptions(**common))
    opened = [sum(bool(child.children) for child in found.root.children) for found in (best, beam)]
    assert opened[0] > opened[1] == 1
    first = max(best.root.children, key=lambda child: child.score)
    assert first.children or first.done  # the most promising came first


def test_a_users_score_decides_and_sees_the_steps(generator: Counted) -> None:
    seen = []

    def longest(question: str, steps: Sequence[str]) -> float:
        seen.append((question, tuple(steps)))
        return float(sum(map(len, steps)))

    found = search(generator, QUESTION, SearchOptions(score=longest, **SMALL))
    ended = [node for node in every(found.root) if node.answer is not None]
    assert found.best.score == max(node.score for node in ended)
    assert {question for question, _ in seen} == {QUESTION}
    assert tuple(found.best.steps) in {steps for _, steps in seen}
    with pytest.raises(ValueError, match="scoring function returned nan; it must return a finite number"):
        search(generator, QUESTION, SearchOptions(score=lambda *_: float("nan"), **SMALL))
    with pytest.raises(
        ValueError, match=r"function, called with the question and the steps, failed: TypeError: .*1 pos"
    ):
        search(generator, QUESTION, SearchOptions(score=lambda question: 0.0, **SMALL))


def test_self_evaluation_is_a_probability(generator: Counted) -> None:
    found = search(generator, QUESTION, SearchOptions(score="self-evaluation", **SMALL))
    assert all(0 <= node.score <= 1 for node in every(found.root))
    judged = sum(len(generator.codec.plain(word)) for word in ("yes", "no"))
    # Each step was judged; a level with one chain generates two equal chains, which count once.
    assert found.tokens <= generator.tokens + judged * found.nodes
    tight: dict[str, Any] = {**SMALL, "score": "self-evaluation", "max_tokens": 60}
    assert search(generator, QUESTION, SearchOptions(**tight)).tokens <= 60
    with pytest.raises(ValueError, match=rf"max_tokens=22 is less than one level may take: {22 + 3 * judged}"):
        search(generator, QUESTION, SearchOptions(**{**tight, "max_tokens": 22}))


def test_budgets_end_the_search(generator: Counted) -> None:
    few: dict[str, Any] = {**SMALL, "max_thoughts": 5}
    found = search(generator, QUESTION, SearchOptions(**{**few, "max_tokens": 30}))
    assert (found.stopped, found.root.children[0].depth) == ("tokens", 1)
    assert found.tokens <= 30
    assert found.answer == found.best.answer


def test_the_drawn_tree_is_escaped_and_needs_nothing_else() -> None:
    root = Thought("1 < 2 & <script>alert(1)</script>?")
    step = Thought("<b>so</b>\n'x'", score=-0.5, depth=1, done=True, answer="<i>7</i>", parent=root)
    root.children = [step, Thought("other", score=-0.7, depth=1, parent=root)]
    found = SearchResult("<i>7</i>", step, root, 9, 2, "done")
    drawn = found._repr_html_()
    assert set(re.findall(r"</?([a-z]+)", drawn)) == {"pre"}
    assert "&lt;script&gt;" in drawn and "&lt;i&gt;7" in drawn
    assert str(found).splitlines() == [
        "1 < 2 & <script>alert(1)</script>?",
        "├*  -0.500  <b>so</b> 'x'  = <i>7</i>",
        "└   -0.700  other",
        "answer: <i>7</i> (2 steps, 9 tokens, done)",
    ]
    plain = json.loads(json.dumps(found.to_dict()))
    assert [(one["text"], one["chosen"]) for one in plain["tree"]["steps"]] == [
        ("<b>so</b>\n'x'", True),
        ("other", False),
    ]


def test_think_loads_the_model_itself(generator: Counted) -> None:
    config = load_config(None, {"base_dtype": "fp32", "device_type": "cpu"})
    options = SearchOptions(**SMALL)
    assert str(think(config, QUESTION, options)) == str(search(generator, QUESTION, options))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["search", "device_type=cpu", "base_dtype=fp32", f"prompt={QUESTION}", "max_thoughts=2",
             "thoughts_per_step=2", "thought_tokens=6", "answer_tokens=4"]  # fmt: skip
    assert main([*asked, f"out={tmp_path / 'tree.html'}"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(QUESTION) and "answer: " in printed
    assert QUESTION in (tmp_path / "tree.html").read_text()
    assert main([*asked, "--json", "score=tests.extras.tree_search.test_search:shortest"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tree"]["text"] == QUESTION and found["stopped"] == "done"
    assert main([*asked, "adapter=gone"]) == 1
    assert "there is no adapter folder" in capsys.readouterr().err
    for wrong, text in (
        ("max_thoughts=0", "max_thoughts: 0 is out of range; give a number at least 1"),
        ("max_thoughts=few", "max_thoughts: 'few' is not a whole number; the default is 5"),
        ("score=votes", "self-evaluation\" or a function; the default is 'logprob'"),
        (f"out={tmp_path / 'none' / 'tree.html'}", "make it, or name another"),
        (
            "score=tests.extras.tree_search.test_search:longest",
            "score=tests.extras.tree_search.test_search:longest: it cannot be imported",
        ),
        ("prompt=", "prompt: '' is empty"),
        ("max_thougts=2", "max_thougts: no such parameter"),
    ):
        assert main([*asked, wrong]) == 2
        assert text in capsys.readouterr().err


def shortest(question: str, steps: Sequence[str]) -> float:
    return -float(sum(map(len, steps)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_thoughts": 0}, "max_thoughts: 0 is out of range; give a number at least 1"),
        ({"strategy": "widest"}, 'strategy: \'widest\' is not "beam" or "best-first"'),
        ({"score": "votes"}, 'score: \'votes\' is not "logprob", "self-evaluation" or a function'),
        ({"temperature": 0.0}, "temperature: 0.0 is out of range; give a number above 0"),
        ({"max_tokens": 50}, "max_tokens=50 is less than one level may take: 112"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SearchOptions(**options)


@pytest.mark.slow
@needs_xla
def test_a_search_compiles_nothing_that_an_earlier_one_did_not() -> None:
    """Searches on XLA:CPU with other questions, seeds and trees: only the first compiles programs."""
    code = f"""
import torch
from tpu_kit.config.loader import DataConfig, load_config
from tpu_kit.generation.generator import Generator
from tpu_kit.model.causal_lm import to_device
from tpu_kit.model.weights.loading import load_base
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.distributed.replica.backends import SimulatedRuntime
from tpu_kit.extras.tree_search.search import SearchOptions, search

config = load_config(None, {{"model.name": "embedded", "base_dtype": "fp32"}}).model
import torch_xla
device = torch_xla.device()
rt = SimulatedRuntime(0, 1, device)
model, tokenizer = to_device(load_base(config, torch.float32).eval(), device), load_tokenizer(config)
generator = Generator(model, tokenizer, rt, data=DataConfig(), max_prompt=128, max_new_tokens=8, batch_size=6, block=8)
counts = []
other = "Ida has 2 bags of 5 nuts. How many nuts does Ida have?"
for seed, question in enumerate(({QUESTION!r}, "1 + 1?", other, {QUESTION!r})):
    before = rt.counters()["compiles"]
    options = SearchOptions(max_thoughts=3, thought_tokens=8, answer_tokens=4, max_tokens=200, seed=seed)
    found = search(generator, question, options)
    counts.append(rt.counters()["compiles"] - before)
print(counts)
"""
    first, *later = json.loads(run_python(code).stdout.splitlines()[-1])
    assert 0 < first <= 12
    assert later == [0, 0, 0]
