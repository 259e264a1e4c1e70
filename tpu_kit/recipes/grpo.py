"""Reinforcement learning with verifiable rewards (GRPO and its variants): the run of `sft.train` on its own samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset, DatasetDict

from tpu_kit.config.loader import TrainConfig, of_rewards
from tpu_kit.recipes import sft
from tpu_kit.recipes.result import TrainResult


def configured(config: TrainConfig) -> TrainConfig:
    """Returns the run as `grpo` trains it."""
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
        config: the run; its section `rl`.
        dataset: as in `sft.train`; rows need a prompt, and what the rewards read.
        reward_funcs: a name or a function, or several, in place of `rl.reward_funcs`; see
            `generation.evaluation.rewards`. Where replicas are processes, functions of a notebook or a script are
            copied to them, see `distributed.sending`.
        exact: as in `sft.train`.

    Raises:
        ValueError: a reward fails or cannot be called, or as in `sft.train`.
    """
    if isinstance(reward_funcs, str) or callable(reward_funcs):
        reward_funcs = [reward_funcs]
    return sft.train(configured(config), dataset, exact=exact, reward_funcs=reward_funcs)
