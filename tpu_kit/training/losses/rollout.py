"""Rollouts: completions sampled from the weights being trained, and judged by rewards or by a teacher.

    sample -> judge -> exchange -> advantages -> documents

Every function but the last returns a `Rollout` with more fields set. A rollout depends on weights, seed and its number,
not on the number of replicas: a replica samples and judges a part of the prompts, then all exchange the results.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, Literal, Protocol, TypeVar

import torch

from tpu_kit.config.schema import DataConfig
from tpu_kit.data.prepare import Tasks
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.evaluation.rewards import Attempt, Judgement
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.prompts import Completion, opened
from tpu_kit.generation.sampling import Sampling
from tpu_kit.training.losses.policy_gradient import Sampled

_EPSILON = 1e-4  # added to the standard deviation, as in TRL
_FLAT = 1e-6  # rewards of a group count as equal up to this standard deviation, as a share of the largest reward
Stop = Callable[[], bool]
T = TypeVar("T")


class Judge(Protocol):
    """Judges completions; `rewards.Rewards` is one."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the rewards; empty if the loss judges tokens and completions have no reward."""

    @property
    def functions(self) -> Sequence[str]:
        """The names of the user's functions, a part of `names`."""

    def __call__(self, attempts: Sequence[Attempt], step: int, total_steps: int, stop: Stop) -> Judgement:
        """Judges this replica's completions; raises CallEnded if `stop` becomes true, ValueError if it fails."""


class TeacherJudge:
    """Gives every completion the reward 0: the teacher judges tokens in the update, see `losses.distillation`."""

    names: Sequence[str] = ()
    functions: Sequence[str] = ()

    def __call__(self, attempts: Sequence[Attempt], step: int, total_steps: int, stop: Stop) -> Judgement:
        """See `Judge`."""
        return Judgement([0.0] * len(attempts), {})


@dataclass(frozen=True)
class Rollout:
    """Completions of some prompts.

    Attributes:
        step: the first update that learns from the rollout.
        prompts: numbers of the P prompts among the tasks.
        count: completions per prompt, G.
        completions: by (index into `prompts`, number of the sample), sorted; before `exchange` this replica's, then
            all.
        judgement: the judgement of the completions, in their order.
        failure: why judging failed; empty if it succeeded.
        advantages: (P, G) fp32.
        sampling_seconds: seconds that this replica sampled.
        judging_seconds: seconds that this replica judged.
    """

    step: int
    prompts: Sequence[int]
    count: int
    completions: Mapping[tuple[int, int], Completion]
    judgement: Judgement = field(default_factory=lambda: Judgement([], {}))
    failure: str = ""
    advantages: torch.Tensor | None = None
    sampling_seconds: float = 0.0
    judging_seconds: float = 0.0

    @property
    def rewards(self) -> torch.Tensor:
        """The rewards after `exchange`, (P, G) fp32; NaN for completions that were not judged."""
        return torch.tensor(self.judgement.total, dtype=torch.float32).view(len(self.prompts), self.count)


def sample(
    generator: Generator, tasks: Tasks, step: int, prompts: Sequence[int], count: int, sampling: Sampling, stop: Stop
) -> Rollout:
    """Samples this replica's part of `count` completions for the tasks `prompts`; incomplete if `stop` turns true."""
    start, ids = time.monotonic(), [tasks.rows.prompt_ids[number] for number in prompts]
    completions = generator.share(ids, sampling, count, stop=stop)
    ordered = {key: completions[key] for key in sorted(completions)}
    return Rollout(step, prompts, count, ordered, sampling_seconds=time.monotonic() - start)


def judge(rollout: Rollout, tasks: Tasks, data: DataConfig, by: Judge, total_steps: int, stop: Stop) -> Rollout:
    """Returns the rollout with the judgement of this replica's completions by `by`, and the seconds that it took.

    Without completions it does not call the judge. If the judge raises ValueError, its text is in `failure` and all
    rewards are NaN, because the other replicas wait in `exchange`; after `exchange` all replicas end the run. A judged
    text begins with the part of the answer that is in the prompt; see `opened`, which takes `data`. `total_steps`, the
    number of updates of the run, is for the judge.

    Raises:
        CallEnded: `stop` became true.
    """
    start, rows = time.monotonic(), tasks.rows
    attempts = [
        Attempt(
            rows.rows[row], rows.asked[row], opened(rows.prompts[row], data, rows.asked[row]) + completion.text,
            completion.tokens,
        )
        for row, completion in ((rollout.prompts[place], each) for (place, _), each in rollout.completions.items())
    ]  # fmt: skip
    failure, none = "", [math.nan] * len(attempts)
    judgement = Judgement(none, dict.fromkeys(by.names, none))
    if attempts:
        try:
            judgement = by(attempts, rollout.step, total_steps, stop)
        except ValueError as error:
            failure = str(error)
    return replace(rollout, judgement=judgement, failure=failure, judging_seconds=time.monotonic() - start)


def exchange(rollout: Rollout, rt: Runtime) -> Rollout:
    """Returns the rollout with all replicas' completions and judgements, and the first failure; all must call it.

    Completions are sorted by key. The seconds stay this replica's.
    """
    mine = {
        "keys": [*rollout.completions], "completions": [asdict(one) for one in rollout.completions.values()],
        "judgement": asdict(rollout.judgement), "failure": rollout.failure,
    }  # fmt: skip
    shares: list[dict[str, Any]] = rt.exchange(mine)
    judgements = [Judgement(**share["judgement"]) for share in shares]
    keys = [(place, number) for share in shares for place, number in share["keys"]]
    replies = [_completion(reply) for share in shares for reply in share["completions"]]
    order = sorted(range(len(keys)), key=keys.__getitem__)

    def joined(values: Iterable[Sequence[float]]) -> list[float]:
        every = [*chain.from_iterable(values)]
        return [every[number] for number in order]

    return replace(
        rollout,
        completions={keys[number]: replies[number] for number in order},
        judgement=Judgement(
            joined(one.total for one in judgements),
            {name: joined(one.parts[name] for one in judgements) for name in rollout.judgement.parts},
            _merged(one.logged for one in judgements),
            _merged(one.errors for one in judgements),
        ),
        failure=next((share["failure"] for share in shares if share["failure"]), ""),
    )


def _completion(values: Mapping[str, Any]) -> Completion:
    """Inverts `asdict` of an exchanged completion, whose tuples may have become lists."""
    return Completion(**{**values, "tokens": tuple(values["tokens"]), "logprobs": tuple(values["logprobs"])})


def _merged(named: Iterable[Mapping[str, list[T]]]) -> dict[str, list[T]]:
    """Concatenates the lists by name."""
    found = defaultdict[str, list[T]](list)
    for lists in named:
        for name, values in lists.items():
            found[name] += values
    return dict(found)


def advantages(rollout: Rollout, scale: Literal["group", "batch", "none"]) -> Rollout:
    """Adds the advantages of all completions; see `advantages_of`."""
    return replace(rollout, advantages=advantages_of(rollout.rewards, scale))


def documents(rollout: Rollout, tasks: Tasks, mask_truncated: bool) -> list[Sampled]:
    """Returns all completions, in order, to train on; with `mask_truncated`, completions cut off do not learn.

    `rollout` must have `advantages`. `Sampled.row` is the number in `tasks.numbers`.
    """
    assert rollout.advantages is not None, "of `advantages`"
    found = []
    for (place, _), reply, advantage in zip(
        rollout.completions, rollout.completions.values(), rollout.advantages.flatten().tolist(), strict=True
    ):
        row = rollout.prompts[place]
        learns = reply.finish_reason == "stop" or not mask_truncated
        prompt = tuple(tasks.rows.prompt_ids[row])
        found.append(Sampled(tasks.numbers[row], prompt, reply.tokens, reply.logprobs, advantage, learns))
    return found


def measured(rollout: Rollout) -> dict[str, float]:
    """Returns the metrics of an exchanged rollout for the log, by name; leaves out metrics of rewards that are NaN.

    They are completions/mean_length, completions/max_length, completions/truncated (a share), rollout_seconds and
    rollout_tokens_per_second (all tokens over this replica's seconds). Unless a teacher is the judge, there are also
    reward_seconds, the means rewards/NAME and reward, and reward_std, the mean of the groups' standard deviations.
    Shares are completions/not_judged, frac_reward_zero_std (groups with equal rewards) and frac_all_wrong (groups with
    equal rewards and no reward above 0).
    """
    names, judgement = [*rollout.judgement.parts], rollout.judgement
    columns = [torch.tensor(judgement.parts[name], dtype=torch.float32) for name in names]
    values = {f"rewards/{name}": float(torch.nanmean(part)) for name, part in zip(names, columns, strict=True)}
    values |= _spread(rollout.rewards) if names else {}
    replies, seconds = rollout.completions.values(), rollout.sampling_seconds
    lengths = torch.tensor([len(reply.tokens) for reply in replies], dtype=torch.float32)
    ended = torch.tensor([reply.finish_reason == "stop" for reply in replies], dtype=torch.float32)
    return {name: value for name, value in values.items() if not math.isnan(value)} | {
        "completions/mean_length": float(lengths.mean()), "completions/max_length": float(lengths.max()),
        "completions/truncated": 1 - float(ended.mean()), "rollout_seconds": seconds,
        "rollout_tokens_per_second": float(lengths.sum()) / max(1e-9, seconds),
    } | ({"reward_seconds": rollout.judging_seconds} if names else {})  # fmt: skip


def _spread(rewards: torch.Tensor) -> dict[str, float]:
    """Returns means of the rewards, and the shares of flat groups, of flat groups without success, and not judged."""
    spread, flat = deviation(rewards), _are_equal(rewards)
    wrong = flat[:, 0] & (torch.nan_to_num(rewards).amax(1) <= 0)
    return {
        "reward": float(torch.nanmean(rewards)), "reward_std": float(torch.nan_to_num(spread).mean()),
        "frac_reward_zero_std": float(flat.float().mean()), "frac_all_wrong": float(wrong.float().mean()),
        "completions/not_judged": float(torch.isnan(rewards).float().mean()),
    }  # fmt: skip


def advantages_of(rewards: torch.Tensor, scale: Literal["group", "batch", "none"]) -> torch.Tensor:
    """Computes the advantages of completions.

    Args:
        rewards: (P, G) fp32, G completions of P prompts; NaN for completions that were not judged.
        scale: divide by the standard deviation (of n - 1) of the group or of all rewards, or do not divide.

    Returns:
        (P, G) fp32: reward - mean of the group, scaled; 0 for completions that were not judged, and for groups with
        equal rewards or fewer than two.
    """
    centred = rewards - torch.nanmean(rewards, -1, keepdim=True)
    # Rounding would give a group of equal rewards advantages of 1e-4.
    centred = torch.where(_are_equal(rewards), 0.0, centred)
    if scale != "none":
        centred = centred / (deviation(rewards if scale == "group" else rewards.reshape(1, -1)) + _EPSILON)
    return torch.nan_to_num(centred)


def deviation(rewards: torch.Tensor) -> torch.Tensor:
    """Computes the rows' standard deviations without NaN, (P, 1); NaN for a row with fewer than two numbers."""
    judged = ~torch.isnan(rewards)
    count = judged.sum(-1, keepdim=True)
    square = torch.nan_to_num(rewards - torch.nanmean(rewards, -1, keepdim=True)).square().sum(-1, keepdim=True)
    return torch.where(count > 1, (square / (count - 1).clamp(min=1)).sqrt(), torch.nan)


def _are_equal(rewards: torch.Tensor) -> torch.Tensor:
    """Returns whether a row's rewards are equal but for rounding, (P, 1) booleans; true for fewer than two rewards."""
    largest = torch.nan_to_num(rewards).abs().amax(-1, keepdim=True)
    return torch.nan_to_num(deviation(rewards)) <= _FLAT * largest
