"""The loss and the accuracy of a model on held-out rows while it is trained; all replicas take part."""

from __future__ import annotations

import math

import torch

from tpu_kit.config.loader import TrainConfig
from tpu_kit.data.batching import eval_batches
from tpu_kit.data.prepare import Prepared
from tpu_kit.distributed.runtime import Runtime
from tpu_kit.evaluation.evaluate import count_correct
from tpu_kit.training.objectives import Objective
from tpu_kit.training.state import TrainState
from tpu_kit.training.step import eval_step


def held_out_loss(
    model: torch.nn.Module, state: TrainState, prepared: Prepared, batch_size: int, objective: Objective, rt: Runtime
) -> float:
    """The loss of the held-out rows divided by its weight, of all replicas; of the average where there is one.

    Args:
        model: the replica's; in training mode afterwards.
        state: its state.
        prepared: the data, with held-out rows.
        batch_size: rows of a batch of each replica.
        objective: whose loss it is.
        rt: the replica.
    """
    assert prepared.eval is not None
    sums = rt.place_batch([{"sums": torch.zeros(2)}])[0]["sums"]
    model.eval()
    for batch in eval_batches(prepared.eval, rt.data_rank, rt.data_size, batch_size):
        # The parts of the average must be gone before the cut: alive, they would be results of the first batch's
        # program and inputs of the next one's, which then is another one.
        with state.averaged():
            eval_step(model, rt.place_batch([batch.tensors])[0], sums, objective, rt)
        rt.sync()
    model.train()
    total, weight = rt.to_host([sums])[0].tolist()
    return total / weight if weight else math.nan


def held_out_accuracy(
    model: torch.nn.Module, state: TrainState, prepared: Prepared, config: TrainConfig, rt: Runtime
) -> float:
    """The share of `tracking.eval_generate_rows` held-out rows that are answered correctly.

    The arguments are those of `held_out_loss`; not a number where no row has an answer to compare with.
    """
    count = config.tracking.eval_generate_rows
    model.eval()
    with state.averaged():
        if state.average is not None:
            rt.sync()  # the parts of the average, which the generator's programs take
        tokenizer = prepared.encoder.tokenizer
        found = count_correct(model, tokenizer, config, prepared.eval_rows[:count], prepared.eval_prompts[:count], rt)
    model.train()
    sums = rt.place_batch([{"sums": torch.tensor(found, dtype=torch.float32)}])[0]["sums"]
    rt.all_reduce([sums])
    rt.sync()
    correct, judged = rt.to_host([sums])[0].tolist()
    return correct / judged if judged else math.nan
