"""Reinforcement learning with verifiable rewards (GRPO and variants): runs `sft.train` on the model's samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset, DatasetDict

from tpu_kit.config.loader import TrainConfig, of_rewards
from tpu_kit.recipes import sft
from tpu_kit.recipes.result import TrainResult


def configured(config: TrainConfig) -> TrainConfig:
    """Returns the configuration that `grpo` trains: with optim.objective=policy, see `of_rewards`."""
    return of_rewards(config)


def grpo(
    config: TrainConfig,
    dataset: Dataset | DatasetDict | None = None,
    reward_funcs: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    *,
    exact: bool = False,
) -> TrainResult:
    """Trains a model on completions that it samples, by their rewards.

    Args:
        config: the run; its section `rl` sets the algorithm.
        dataset: as in `sft.train`; rows need a prompt and the columns that the rewards read.
        reward_funcs: a name or function, or a sequence of them, in place of `rl.reward_funcs` (None); see
            `generation.evaluation.rewards`. If replicas are processes, functions of a notebook or script are copied to
            them (`distributed.sending`).
        exact: as in `sft.train`.

    Raises:
        ValueError: a reward fails or cannot be called; or, like other errors, as in `sft.train`.
    """
    if isinstance(reward_funcs, str) or callable(reward_funcs):
        reward_funcs = [reward_funcs]
    return sft.train(configured(config), dataset, exact=exact, reward_funcs=reward_funcs)
