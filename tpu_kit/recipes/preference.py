"""Preference tuning (DPO and its family): runs `sft.train` on pairs of a chosen and a rejected reply."""

from __future__ import annotations

from datasets import Dataset, DatasetDict

from tpu_kit.config.loader import TrainConfig, of_preferences
from tpu_kit.recipes import sft
from tpu_kit.recipes.result import TrainResult


def configured(config: TrainConfig) -> TrainConfig:
    """Returns the configuration that `dpo` trains: optim.objective=preference, see `of_preferences`."""
    return of_preferences(config)


def dpo(config: TrainConfig, dataset: Dataset | DatasetDict | None = None, *, exact: bool = False) -> TrainResult:
    """Trains a model on pairs of replies, by the losses of `config.preference`.

    Args:
        config: the run; its section `preference` sets the losses.
        dataset: as in `sft.train`; rows need a chosen and a rejected reply.
        exact: as in `sft.train`.

    Raises:
        ValueError: as in `sft.train`, like other errors.
    """
    return sft.train(configured(config), dataset, exact=exact)
