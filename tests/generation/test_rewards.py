"""Reward functions are called as in TRL, and verifiers by name."""

from __future__ import annotations

import asyncio
import math
import sys
from typing import Any

import pytest

from tpu_kit.config.loader import load_config
from tpu_kit.config.named_values import REWARDS, imported
from tpu_kit.generation.evaluation.rewards import Attempt, Rewards, length

CONFIG = load_config(None, {"max_completion_length": 20})
CHAT = [{"role": "user", "content": "2 + 2?"}]


def attempts(chat: bool = True) -> list[Attempt]:
    texts = ["<think>\n2 + 2\n</think>\n4", "5", "the answer is 4"]
    rows = [{"question": "2 + 2?", "answer": "4", "level": number} for number in range(3)]
    return [
        Attempt(row, CHAT if chat else "2 + 2?", text, [7] * length)
        for row, text, length in zip(rows, texts, (16, 18, 20), strict=True)
    ]


def judged(*functions: Any, chat: bool = True, **settings: Any) -> Any:
    config = load_config(None, {"max_completion_length": 20} | settings)
    with Rewards(config, functions) as rewards:
        return rewards(attempts(chat), 3, 10)


def test_functions_get_the_arguments_of_trl():
    seen = {}

    def everything(prompts, completions, completion_ids, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, ids=completion_ids)
        kwargs["log_metric"]("seen", 2)
        return [1, None, 0.5]

    def one_column(completions, level):
        return [float(number) for number in level]

    async def later(completions, **kwargs):
        await asyncio.sleep(0)
        return [len(each[0]["content"]) for each in completions]

    found = judged(everything, one_column, later)
    assert seen["prompts"] == [CHAT] * 3 and seen["ids"] == [[7] * 16, [7] * 18, [7] * 20]
    assert seen["completions"][1] == [{"role": "assistant", "content": "5"}]
    assert seen["answer"] == ["4"] * 3 and seen["level"] == [0, 1, 2] and seen["question"] == ["2 + 2?"] * 3
    assert seen["trainer_state"].global_step == 3 and seen["trainer_state"].max_steps == 10
    assert "_attempts" not in seen and found.logged == {"seen": [2.0]}
    assert found.parts["one_column"] == [0, 1, 2] and found.parts["later"][1:] == [1, 15]
    assert math.isnan(found.parts["everything"][1])
    assert found.total == [1 + 0 + found.parts["later"][0], 1 + 1, 0.5 + 2 + 15]
    judged(lambda completions: [float(isinstance(each, str)) for each in completions], chat=False)


def test_verifiers_and_built_in_rewards_have_names():
    found = judged("auto", "think_format", "length", r"regex:is (\d)", **{"reward_weights": [1, 0.5, 2, 0]})
    assert list(found.parts) == ["auto", "think_format", "length", r"regex:is (\d)"]
    assert found.parts["auto"] == [1, 0, 1] and found.parts["think_format"] == [1, 0, 0]
    assert found.parts["length"] == [0, -0.5, -1] and found.parts[r"regex:is (\d)"] == [0, 0, 1]
    assert found.total == [1.5, -1.0, -1.0]


def test_the_penalty_of_length_is_that_of_trl():
    from trl.rewards import get_soft_overlong_punishment

    theirs = get_soft_overlong_punishment(20, 4)
    ids = [[0] * count for count in range(1, 21)]
    ours = length([Attempt({}, "", "", tokens) for tokens in ids], CONFIG)
    assert ours == pytest.approx(theirs(completion_ids=ids))


def _short(attempts, config):
    return [float(len(each.text) < config.rl.max_completion_length) for each in attempts]


def test_a_new_reward_is_a_line_and_a_function(monkeypatch):
    assert all(callable(imported(reward)) for reward in REWARDS.values())
    monkeypatch.setitem(REWARDS, "short", f"{__name__}:_short")
    config = load_config(None, ["rl.reward_funcs=[short]", "rl.max_completion_length=8"])
    with Rewards(config) as rewards:
        assert rewards([Attempt({}, "", text, []) for text in ("4", "12 words")]).parts == {"short": [1, 0]}


def test_none_of_all_functions_is_no_judgement():
    found = judged(lambda completions: [None, 1, None], lambda completions: [None, None, 2])
    assert math.isnan(found.total[0]) and found.total[1:] == [1, 2]
    assert list(found.parts) == ["<lambda>", "<lambda>#2"]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda completions, level: [1 / (2 - number) for number in level],
         r"reward <lambda> failed \(test_rewards.py, line \d+\) for .*'level': 2.*: ZeroDivisionError: division by"),
        (lambda completions: [1.0], r"failed for 3 completions together.*returned 1 rewards for 3 completions; return"),
        (lambda completions: [1.0, 2.0, math.inf][-len(completions) :], "infinite reward"),
        (lambda completions: sys.exit(0), "SystemExit: 0"),
        (lambda completions: ["good"] * len(completions), "could not convert string to float: 'good'"),
    ],
)  # fmt: skip
def test_an_error_names_the_function_and_the_row(function, text):
    with pytest.raises(ValueError, match=text):
        judged(function)


@pytest.mark.parametrize("function", [lambda completions, absent: [], lambda absent, /, completions: []])
def test_arguments_that_no_row_has_are_refused_before_the_run(function):
    rewards = Rewards(load_config(None, {}), [function, "think_format", lambda level, other=1, **rest: []])
    told = (
        r"<lambda> needs absent, which is not passed by name; it gets level, prompts, completion_ids, compl.*: rename"
    )
    with pytest.raises(ValueError, match=told):
        rewards.check([{"prompt": "2 + 2?", "level": 1}])
    Rewards(load_config(None, {}), ["length", "auto", lambda level, **rest: []]).check([{"level": 1}])


def test_names_that_are_no_reward_are_refused():
    with pytest.raises(ValueError, match=r"rl.reward_funcs: 'never' names no rule"):
        judged("never")
    with pytest.raises(ValueError, match=r"rl.reward_funcs=no_module:f: it cannot be imported"):
        judged("no_module:f")
    with pytest.raises(ValueError, match=r"rl.reward_weights: all are 0, so nothing would be learned"):
        judged("auto", reward_weights=[0])
    with pytest.raises(ValueError, match="2 weights for 1 rewards; give a weight for every entry"):
        judged("auto", reward_funcs=["auto", "length"], reward_weights=[1, 2])
