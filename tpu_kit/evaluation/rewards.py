"""Rewards of sampled completions: functions with the signature of TRL's, and verifiers by name.

    def shorter(completions, target, **kwargs):      # in my_rewards.py; `target` is a column of the data
        return [1.0 - len(text) / 1000 for text in completions]

A function gets `prompts`, `completions`, `completion_ids`, each column of the rows, `trainer_state` (global_step,
max_steps) and `log_metric(name, value)`, those of them that it names, or all if it has `**kwargs`. Completions are
lists of messages where the prompts are, else texts. It returns a number, or None for no judgement, for each.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from traceback import extract_tb
from types import SimpleNamespace
from typing import Any, NamedTuple

from tpu_kit.config.choices import VERIFIERS
from tpu_kit.config.loader import ConfigError, TrainConfig
from tpu_kit.evaluation.verifiers import judge, verifier_named, well_formed

RewardFunction = Callable[..., Any]
_SHARED = ("trainer_state", "log_metric")  # the arguments that are not lists of one for each completion
_OWN = "_attempts"  # the argument of the kit's own functions
_LONG = 0.2  # share of max_completion_length at its end in which `length` falls to -1 (DAPO, arXiv:2503.14476)


class Attempt(NamedTuple):
    """A completion to judge.

    Attributes:
        row: of the data, with the columns that functions get.
        prompt: text, or a list of messages.
        text: of the completion, with the tag that the prompt opens.
        tokens: ids of the completion.
    """

    row: Mapping[str, Any]
    prompt: Any
    text: str
    tokens: Sequence[int]


@dataclass
class Judgement:
    """Rewards of completions; NaN where there is none.

    Attributes:
        total: the weighted sums.
        parts: the rewards of each function, without weight.
        logged: the numbers that functions logged, by name.
    """

    total: list[float]
    parts: dict[str, list[float]]
    logged: dict[str, list[float]] = field(default_factory=dict)


class Rewards:
    """The rewards of a run.

    Args:
        config: `rl.reward_funcs` and `rl.reward_weights`.
        functions: in place of `rl.reward_funcs`: names and functions.

    Raises:
        ValueError: a name is none, or there is not a weight for each.
    """

    def __init__(self, config: TrainConfig, functions: Sequence[str | RewardFunction] | None = None) -> None:
        self._config = config
        rewards = list(functions or config.rl.reward_funcs)
        self._weights = list(config.rl.reward_weights or [1.0] * len(rewards))
        if len(self._weights) != len(rewards):
            counts = f"rl.reward_weights has {len(self._weights)} weights for {len(rewards)} rewards"
            raise ValueError(f"{counts}; give one for each of rl.reward_funcs, or remove it")
        if not any(self._weights):
            raise ValueError("rl.reward_weights: all are 0, so nothing would be learned; give one another weight")
        self._functions: dict[str, RewardFunction] = {}
        for reward in rewards:
            name = reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)
            count = sum(other.partition("#")[0] == name for other in self._functions)
            self._functions[f"{name}#{count + 1}" if count else name] = self._resolved(reward)

    @property
    def names(self) -> list[str]:
        """The names of the functions, in order."""
        return list(self._functions)

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if a function needs an argument that it does not get, or each an answer that no row has."""
        given = [*self._arguments([Attempt(rows[0], "", "", [])]), *_SHARED]
        offered = ", ".join(name for name in given if name != _OWN)
        for name, function in self._functions.items():
            for each in inspect.signature(function).parameters.values():
                needed = each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
                if each.kind is each.POSITIONAL_ONLY or (needed and each.name not in given):
                    raise ValueError(
                        f"the reward {name} needs {each.name}, which it does not get by name; it gets {offered}: "
                        "rename the argument, or give it a default"
                    )
        compare = all(name in VERIFIERS or name.startswith("regex:") for name in self._functions)
        if compare and not any(row.get("answer") for row in rows):
            raise ConfigError(
                ["rl.reward_funcs: no row has an answer to compare with; name its column, as in "
                 "data.columns={answer: solution}, or a function that judges without one"]
            )  # fmt: skip

    def __call__(self, attempts: Sequence[Attempt], step: int = 0, total_steps: int | None = None) -> Judgement:
        """Judges completions, each function in a thread of its own.

        Raises:
            ValueError: a function fails, or returns something else than a number or None for each completion.
        """
        logged: dict[str, list[float]] = defaultdict(list)
        given = self._arguments(attempts) | {
            "trainer_state": SimpleNamespace(global_step=step, max_steps=total_steps),
            "log_metric": lambda name, value: logged[name].append(float(value)),
        }
        with ThreadPoolExecutor(len(self._functions), thread_name_prefix="reward") as threads:
            pending = {
                name: threads.submit(self._judged, name, function, attempts, given)
                for name, function in self._functions.items()
            }
            parts = {name: each.result() for name, each in pending.items()}
        total = []
        for rewards in zip(*parts.values(), strict=True):
            judged = [w * r for w, r in zip(self._weights, rewards, strict=True) if not math.isnan(r)]
            total.append(sum(judged) if judged else math.nan)
        return Judgement(total, parts, dict(logged))

    def _resolved(self, reward: str | RewardFunction) -> RewardFunction:
        if not isinstance(reward, str):
            return reward
        data = self._config.data
        if reward == "think_format":
            return lambda _attempts: [float(well_formed(each.text, data)) for each in _attempts]
        if reward == "length":
            return self._within_length
        rule = verifier_named(reward, "rl.reward_funcs")
        if callable(rule):
            return rule
        return lambda _attempts: [judge(each.row, each.text, data, rule).correct for each in _attempts]

    def _within_length(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        """DAPO's penalty: 0, falling to -1 in the last part of max_completion_length."""
        most = self._config.rl.max_completion_length
        allowed = most - round(_LONG * most)
        return [min(0.0, (allowed - len(ids)) / max(1, most - allowed)) for ids in completion_ids]

    @staticmethod
    def _arguments(attempts: Sequence[Attempt]) -> dict[str, Any]:
        rows, prompts, texts, tokens = (list(values) for values in zip(*attempts, strict=True))
        chats = not isinstance(prompts[0], str)
        columns = {name: [row.get(name) for row in rows] for name in rows[0] if name != "prompt"}
        return columns | {
            "prompts": prompts, "completion_ids": [list(ids) for ids in tokens], _OWN: attempts,
            "completions": [[{"role": "assistant", "content": text}] if chats else text for text in texts],
        }  # fmt: skip

    def _judged(
        self, name: str, function: RewardFunction, attempts: Sequence[Attempt], given: Mapping[str, Any]
    ) -> list[float]:
        wanted = inspect.signature(function).parameters
        every = any(each.kind is each.VAR_KEYWORD for each in wanted.values())
        given = {key: value for key, value in given.items() if key in wanted or (every and key != _OWN)}
        try:
            return _called(function, given, len(attempts))
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise ValueError(f"the reward {name} {self._blame(function, given, len(attempts), error)}") from error

    @staticmethod
    def _blame(function: RewardFunction, given: Mapping[str, Any], count: int, error: BaseException) -> str:
        """Finds the completion that a function fails for, by calling it for each alone."""
        hidden = {*_SHARED, "completion_ids", _OWN}
        for number in range(count):
            alone = {name: value if name in _SHARED else value[number : number + 1] for name, value in given.items()}
            try:
                _called(function, alone, 1)
            except (Exception, SystemExit) as again:
                shown = {name: value[0] for name, value in alone.items() if name not in hidden}
                frames = extract_tb(again.__traceback__)
                own = max((index for index, frame in enumerate(frames) if frame.filename == __file__), default=0)
                where = "".join(f" ({Path(at.filename).name}, line {at.lineno})" for at in frames[own + 1 : own + 2])
                row = shorten(str(shown), 300, placeholder=" ...")
                return f"failed{where} for {row}: {type(again).__name__}: {again}"
        return f"failed for {count} completions together, and for none alone: {type(error).__name__}: {error}"


def _called(function: RewardFunction, given: Mapping[str, Any], count: int) -> list[float]:
    values = function(**given)
    if inspect.isawaitable(values):

        async def result() -> Any:
            return await values

        values = asyncio.run(result())
    values = [math.nan if value is None else float(value) for value in values]
    if len(values) != count:
        raise ValueError(f"it returned {len(values)} rewards for {count} completions; return one, or None, for each")
    if any(map(math.isinf, values)):
        raise ValueError("it returned an infinite reward; return finite numbers, or None")
    return values
