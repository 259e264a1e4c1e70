"""Computes rewards of sampled completions with functions, called as in TRL, and with verifiers, given by name.

    def shorter(completions, target, **kwargs):      # in my_rewards.py; `target` is a column of the data
        return [1.0 - len(text) / 1000 for text in completions]

The keyword arguments are `prompts`, `completions`, `completion_ids`, the columns of the rows, `trainer_state`
(global_step, max_steps) and `log_metric(name, value)`. A function gets the arguments that it names, or all if it has
`**kwargs`. Completions are lists of messages if the prompts are, else texts. For every completion, the function returns
a number, or None for no judgement. Functions run in the main thread, one after another, and async functions run
concurrently after them; rules run in child processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import shorten
from traceback import extract_tb
from types import SimpleNamespace
from typing import Any, NamedTuple

from tpu_kit.config.loader import ConfigError, TrainConfig
from tpu_kit.config.named_values import REWARDS, imported
from tpu_kit.distributed.preemption import Terminated
from tpu_kit.distributed.replica import cpu_simulation, main_thread
from tpu_kit.distributed.replica.main_thread import CallEnded
from tpu_kit.generation.evaluation.judging import Judges
from tpu_kit.generation.evaluation.verifiers import verifier_named, well_formed

RewardFunction = Callable[..., Any]
Stop = Callable[[], bool]
_SHARED = ("trainer_state", "log_metric")  # the arguments that are not lists with an entry per completion
# Share of launch.hang_timeout: a function is ended before the launch, so that the run saves its updates.
_PATIENCE = 0.8
_SHOWN = 60  # printed characters of a completion that was not judged
_LONG = 0.2  # last share of max_completion_length, in which `length` falls to -1 (DAPO, arXiv:2503.14476)


class Attempt(NamedTuple):
    """A completion to judge.

    Attributes:
        row: the data row, with the columns that functions get.
        prompt: text, or a list of messages.
        text: the completion's text, with the opening reasoning tag if the prompt ends with that.
        tokens: token ids of the completion.
    """

    row: Mapping[str, Any]
    prompt: Any
    text: str
    tokens: Sequence[int]


def think_format(attempts: Sequence[Attempt], config: TrainConfig) -> list[float]:
    """Returns, for each attempt, 1 if it is one block of reasoning in its tags followed by an answer, else 0."""
    return [float(well_formed(each.text, config.data)) for each in attempts]


def length(attempts: Sequence[Attempt], config: TrainConfig) -> list[float]:
    """Returns DAPO's length penalty for each attempt: 0, falling to -1 in the last 20 % of max_completion_length."""
    most = config.rl.max_completion_length
    allowed = most - round(_LONG * most)
    return [min(0.0, (allowed - len(each.tokens)) / max(1, most - allowed)) for each in attempts]


@dataclass
class Judgement:
    """Rewards of completions; NaN for completions that were not judged.

    Attributes:
        total: weighted sums of the rewards of a completion that are not NaN; NaN if all are.
        parts: rewards by name of the reward, in the order of `Rewards.names`, without weights.
        logged: the numbers that functions logged, by name.
        errors: by "RULE (ERROR)", texts with the end and the answer of the completions that were therefore not judged.
    """

    total: list[float]
    parts: dict[str, list[float]]
    logged: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, list[str]] = field(default_factory=dict)


class Rewards:
    """Computes the rewards of a run; as a context manager, it ends the child processes of its rules.

    Args:
        config: the run, with `rl.reward_funcs` and `rl.reward_weights`.
        functions: names and functions that replace `rl.reward_funcs`.

    Attributes:
        names: names of the rewards, in order; a repeated name gets #2, #3, ...

    Raises:
        ValueError: a name is unknown, all weights are 0, or the numbers of weights and rewards differ.
    """

    def __init__(self, config: TrainConfig, functions: Sequence[str | RewardFunction] | None = None) -> None:
        self._config = config
        rewards = list(functions or config.rl.reward_funcs)
        self._weights = list(config.rl.reward_weights or [1.0] * len(rewards))
        if len(self._weights) != len(rewards):
            counts = f"rl.reward_weights has {len(self._weights)} weights for {len(rewards)} rewards"
            raise ValueError(f"{counts}; give a weight for every entry of rl.reward_funcs, or remove it")
        if not any(self._weights):
            raise ValueError("rl.reward_weights: all are 0, so nothing would be learned; change a weight")
        self._judges = Judges(config.data)
        # By name of the reward: rules, the kit's own functions, and users' functions.
        self._rules: dict[str, str] = {}
        self._own: dict[str, Callable[[Sequence[Attempt]], list[float]]] = {}
        self._functions: dict[str, RewardFunction] = {}
        self.names: list[str] = []
        for reward in rewards:
            name = reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)
            count = sum(other.partition("#")[0] == name for other in self.names)
            self.names.append(name := f"{name}#{count + 1}" if count else name)
            if isinstance(reward, str) and reward in REWARDS:
                self._own[name] = partial(imported(REWARDS[reward]), config=config)
            else:
                judge = verifier_named(reward, "rl.reward_funcs") if isinstance(reward, str) else reward
                if isinstance(judge, str):
                    self._rules[name] = judge
                else:
                    self._functions[name] = judge

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self._judges.close()

    @property
    def functions(self) -> list[str]:
        """The names of users' functions, given or as module:function, without rules and the kit's own rewards."""
        return list(self._functions)

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Checks that functions can be called with these rows, and that rules have an answer to compare with.

        `rows` are rows of the data, at least one; functions get the columns of the first row.

        Raises:
            ValueError: a function needs an argument that is neither a column nor one of the kit's, or takes it only by
                position. Or all rewards are verifiers' rules, and no row has an "answer".
        """
        given = [*self._arguments([Attempt(rows[0], "", "", [])]), *_SHARED]
        for name, function in self._functions.items():
            for each in inspect.signature(function).parameters.values():
                needed = each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
                if each.kind is each.POSITIONAL_ONLY or (needed and each.name not in given):
                    raise ValueError(
                        f"the reward {name} needs {each.name}, which is not passed by name; it gets "
                        f"{', '.join(given)}: rename the argument, or give it a default"
                    )
        if self.names == [*self._rules] and not any(row.get("answer") for row in rows):
            raise ConfigError(
                ["rl.reward_funcs: no row has an answer to compare with; name its column, as in "
                 "data.columns={answer: solution}, or a function that judges without one"]
            )  # fmt: skip

    def __call__(
        self, attempts: Sequence[Attempt], step: int = 0, total_steps: int | None = None,
        stop: Stop = lambda: False,
    ) -> Judgement:  # fmt: skip
        """Computes the rewards of completions.

        Args:
            attempts: the completions of this replica, at least one; functions get the columns of the first row.
            step: number of the update, `trainer_state.global_step` of functions.
            total_steps: number of updates of the run, `trainer_state.max_steps`.
            stop: called at least 5 times a second; if it returns True, judging ends.

        Raises:
            CallEnded: `stop` returned True.
            ValueError: a function raises an exception, uses no processor time for 0.8 x launch.hang_timeout, or does
                not return a finite number, NaN or None for every completion.
        """
        logged: dict[str, list[float]] = defaultdict(list)
        given = self._arguments(attempts) | {
            "trainer_state": SimpleNamespace(global_step=step, max_steps=total_steps),
            "log_metric": lambda name, value: logged[name].append(float(value)),
        }
        with cpu_simulation.unhurried():
            parts, errors = self._by_rules(attempts, stop) if self._rules else ({}, {})
            parts |= {name: function(attempts) for name, function in self._own.items()}
            parts |= self._by_functions(given, len(attempts), stop)
        parts, total = {name: parts[name] for name in self.names}, []
        for rewards in zip(*parts.values(), strict=True):
            judged = [w * r for w, r in zip(self._weights, rewards, strict=True) if not math.isnan(r)]
            total.append(sum(judged) if judged else math.nan)
        return Judgement(total, parts, dict(logged), errors)

    def _by_rules(self, attempts: Sequence[Attempt], stop: Stop) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
        """Returns rewards by rule (1 correct, 0 wrong, NaN without a verdict), and texts as `Judgement.errors`."""
        replies = [(each.row, each.text, rule) for rule in self._rules.values() for each in attempts]
        verdicts = self._judges.judge(replies, stop)
        parts, errors = dict[str, list[float]](), defaultdict[str, list[str]](list)
        for name, first in zip(self._rules, range(0, len(replies), len(attempts)), strict=True):
            mine = verdicts[first : first + len(attempts)]
            parts[name] = [math.nan if each.correct is None else float(each.correct) for each in mine]
            for attempt, verdict in zip(attempts, mine, strict=True):
                if verdict.error:
                    example = f"{attempt.text[-_SHOWN:]!r} for the answer {str(attempt.row.get('answer'))[:_SHOWN]!r}"
                    errors[f"{name} ({verdict.error})"].append(example)
        return parts, dict(errors)

    def _by_functions(self, given: Mapping[str, Any], count: int, stop: Stop) -> dict[str, list[float]]:
        """Returns the rewards of `count` completions by name of the user's function; NaN for None.

        `given` are the keyword arguments, with lists of `count` entries. Errors are as in `__call__`.
        """
        values, parts = dict[str, Any](), dict[str, list[float]]()
        for name in self._functions:
            with self._named(name, given, count, stop):
                values[name] = self._call(name, given, stop)
        later = {name: value for name, value in values.items() if inspect.isawaitable(value)}
        with self._named(", ".join(later), given, 0, stop):
            values |= zip(later, self._await([*later.values()], stop), strict=True)
        for name, value in values.items():
            with self._named(name, given, count, stop):
                parts[name] = _numbers(value, count)
        return parts

    def _call(self, name: str, given: Mapping[str, Any], stop: Stop) -> Any:
        """Calls a function with the arguments that it accepts; an async function returns an awaitable."""
        wanted = inspect.signature(function := self._functions[name]).parameters
        every = any(each.kind is each.VAR_KEYWORD for each in wanted.values())
        chosen = {key: value for key, value in given.items() if every or key in wanted}
        return main_thread.call(partial(function, **chosen), stop, self._patience)

    def _await(self, values: Sequence[Any], stop: Stop) -> list[Any]:
        """Runs awaitables together, aside, as a notebook's thread has an event loop; returns results or exceptions."""

        async def together() -> list[Any]:
            return await asyncio.gather(*values, return_exceptions=True)

        return main_thread.call(lambda: asyncio.run(together()), stop, self._patience, aside=True) if values else []

    @property
    def _patience(self) -> float:
        """Seconds without processor time after which a call is ended."""
        return _PATIENCE * self._config.launch.hang_timeout

    @contextlib.contextmanager
    def _named(self, name: str, given: Mapping[str, Any], count: int, stop: Stop) -> Iterator[None]:
        """Context manager that raises an error again as ValueError with the function's name and failing completion.

        To find the completion, it calls the function again for the `count` completions in `given`, alone. Terminated
        and an end by `stop` are raised unchanged.
        """
        try:
            yield
        except Terminated:
            raise
        except CallEnded as ended:
            if ended.why == "stop":
                raise
            limit = f"{_PATIENCE:.0%} of launch.hang_timeout={self._config.launch.hang_timeout:g}"
            text = f"a call may wait for {limit}: increase it if the function waits for something slow"
            raise ValueError(f"the reward {name} {ended.why}{_place(ended)}; {text}") from ended
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise ValueError(f"the reward {name} {self._blame(name, given, count, stop, error)}") from error

    def _blame(self, name: str, given: Mapping[str, Any], count: int, stop: Stop, error: BaseException) -> str:
        """Returns a text on the first completion for which a function fails, when called for it alone.

        If it fails for none of the `count` completions in `given` alone, the text is on `error`.
        """
        for number in range(count):
            alone = {key: value if key in _SHARED else value[number : number + 1] for key, value in given.items()}
            try:
                value = self._call(name, alone, stop)
                _numbers(self._await([value], stop)[0] if inspect.isawaitable(value) else value, 1)
            except (Exception, SystemExit) as again:
                shown = {key: value[0] for key, value in alone.items() if key not in {*_SHARED, "completion_ids"}}
                row = shorten(str(shown), 300, placeholder=" ...")
                return f"failed{_place(again)} for {row}: {type(again).__name__}: {again}"
        return f"failed for {count} completions together, but for none alone: {type(error).__name__}: {error}"

    @staticmethod
    def _arguments(attempts: Sequence[Attempt]) -> dict[str, Any]:
        """Returns the keyword arguments that have an entry per completion; `prompts` replaces a column "prompt".

        The columns are the first row's; a row that lacks a column has None.
        """
        rows, prompts, texts, tokens = (list(values) for values in zip(*attempts, strict=True))
        chats = not isinstance(prompts[0], str)
        columns = {name: [row.get(name) for row in rows] for name in rows[0] if name != "prompt"}
        return columns | {
            "prompts": prompts, "completion_ids": [list(ids) for ids in tokens],
            "completions": [[{"role": "assistant", "content": text}] if chats else text for text in texts],
        }  # fmt: skip


def _place(error: BaseException) -> str:
    """Returns " (FILE, line N)" of the user's function that failed or was ended; empty if it was not called."""
    frames, ours = extract_tb(error.__traceback__), (__file__, main_thread.__file__)
    while frames and frames[-1].filename in ours:  # frames of the code that ended the call
        frames.pop()
    own = max((index for index, frame in enumerate(frames) if frame.filename in ours), default=0)
    return "".join(f" ({Path(at.filename).name}, line {at.lineno})" for at in frames[own + 1 : own + 2])


def _numbers(values: Any, count: int) -> list[float]:
    """Returns a function's result as `count` numbers, NaN for None; raises a result that is an exception.

    Raises ValueError for another number of values, or an infinite value.
    """
    if isinstance(values, BaseException):
        raise values
    values = [math.nan if value is None else float(value) for value in values]
    if len(values) != count:
        raise ValueError(f"it returned {len(values)} rewards for {count} completions; return as many numbers or None")
    if any(map(math.isinf, values)):
        raise ValueError("it returned an infinite reward; return finite numbers, or None")
    return values
