"""The updates of runs that sample, from rollouts of the weights being trained; see `losses.rollout`."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import islice
from textwrap import shorten
from typing import Any

import numpy as np
import torch

from tpu_kit.config.loader import BatchPlan, TrainConfig
from tpu_kit.data.batching import PackedDataset, Update, eval_batches, rows_of, updates
from tpu_kit.data.prepare import Prepared
from tpu_kit.distributed.hosts import Hosts
from tpu_kit.distributed.preemption import PreemptionGuard
from tpu_kit.distributed.replica.main_thread import CallEnded
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.evaluation.rewards import Rewards
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.prompts import texts_of
from tpu_kit.generation.sampling import Sampling
from tpu_kit.machine.storage import atomic
from tpu_kit.model import attention
from tpu_kit.training.losses.pair_updates import PairUpdates
from tpu_kit.training.losses.policy_gradient import GAP, PolicyObjective, Sampled, pack
from tpu_kit.training.losses.rollout import (
    Judge,
    Rollout,
    TeacherJudge,
    advantages,
    deviation,
    documents,
    exchange,
    judge,
    measured,
    sample,
)
from tpu_kit.training.metrics import apart_from
from tpu_kit.training.objectives import Objective
from tpu_kit.training.streamed_updates import StreamUpdates
from tpu_kit.training.update_sources import NextUpdateError, Tensors, Updates

GROUP_FILE = "group.json"  # in the run's folder: a group of completions of the last rollout, with their rewards
_SHOWN = 300  # most characters of a prompt or a completion in a warning
_UNJUDGED = 10  # consecutive rollouts without any reward after which the run ends


def updates_of(prompts: int, config: TrainConfig) -> Iterator[Update]:
    """Yields the updates of a run that samples from `prompts` prompts; raises ValueError if they are too few.

    It needs `rl.prompts_per_rollout` prompts. `first_row` and `rows` of an update are the prompts of its whole rollout,
    and are equal for all updates that learn from it.
    """
    rl, optim, each = config.rl, config.optim, config.rl.updates_per_rollout
    if prompts < rl.prompts_per_rollout:
        raise ValueError(
            f"rl.prompts_per_update={rl.prompts_per_update} x rl.steps_per_generation={rl.steps_per_generation} is "
            f"more than the {prompts} prompts of the data; lower one of them"
        )
    last = optim.max_steps or math.inf
    rollouts = replace(optim, max_steps=optim.max_steps and -(-optim.max_steps // each))
    for rollout in updates(prompts, BatchPlan(rl.prompts_per_rollout, 1, 1, rl.prompts_per_rollout, 0), rollouts):
        for step in range((rollout.step - 1) * each + 1, rollout.step * each + 1):
            if step <= last:
                yield replace(rollout, step=step)


def planned_updates(rows: float, batch: BatchPlan, config: TrainConfig) -> Iterator[Update]:
    """Yields the updates of a run with `rows` packed rows, or prompts if it samples; raises ValueError if too few."""
    if config.data.streaming:
        rows = math.inf
    return updates_of(int(rows), config) if config.on_policy else updates(rows, batch, config.optim)


def check_rollouts(
    config: TrainConfig, rows: Sequence[Mapping[str, Any]], reward_funcs: Sequence[Any] | None, hosts: Hosts
) -> None:
    """Raises ValueError if a run's rewards do not exist or cannot judge its rows, or the run has several hosts.

    The rewards' errors are from `Rewards` and `Rewards.check`, which takes `rows`, the training rows. `reward_funcs`
    are in place of rl.reward_funcs, if given. With distill.on_policy only the hosts are checked.
    """
    name = "distill.on_policy" if config.distill.on_policy else "grpo"
    if hosts.count > 1:
        raise ValueError(f"{name} on {hosts.count} hosts: sampling is for one host; use one host")
    if not config.distill.on_policy:
        Rewards(config, reward_funcs).check(rows)


@contextlib.contextmanager
def source_of_updates(
    config: TrainConfig,
    prepared: Prepared,
    plan: BatchPlan,
    rt: Runtime,
    model: torch.nn.Module,
    objective: Objective,
    reward_funcs: Sequence[Any] | None,
    total: int,
) -> Iterator[Updates]:
    """Yields the batch source of a run of `total` updates: packed rows, a stream, pairs, or rollouts.

    It is `PairUpdates` for dpo, `Rollouts` for a run that samples, `StreamUpdates` with data.streaming, else `Updates`.
    The end of the context closes the rewards; `reward_funcs` are in place of rl.reward_funcs, if given. Raises
    ValueError as `Rewards`.
    """
    if config.on_pairs:
        yield PairUpdates(config, prepared, plan, rt, model, objective)
        return
    if not config.on_policy:
        yield (Updates if prepared.stream is None else StreamUpdates)(config, prepared, plan, rt)
        return
    if config.distill.on_policy:
        yield Rollouts(config, prepared, plan, rt, model, objective, TeacherJudge(), total)
        return
    with Rewards(config, reward_funcs) as rewards:
        yield Rollouts(config, prepared, plan, rt, model, objective, rewards, total)


class Rollouts(Updates):
    """The updates of runs that sample: `rl.num_iterations` per part of a rollout, of `rl.steps_per_generation` parts.

    `judge` judges the completions; `total` is the number of the run's updates.
    """

    splits = True
    keeps_state = True

    def __init__(
        self,
        config: TrainConfig,
        prepared: Prepared,
        plan: BatchPlan,
        rt: Runtime,
        model: torch.nn.Module,
        objective: Objective,
        judge: Judge,
        total: int,
    ) -> None:
        super().__init__(config, prepared, plan, rt)
        assert prepared.tasks is not None and prepared.encoder is not None
        self._rl, self._model, self._objective, self._total = config.rl, model, objective, total
        self._prepared, self._judge, self._tasks = prepared, judge, prepared.tasks
        self._share_prompts = bool(judge.names) and attention.sees_all(model)
        self.rows = len(self._tasks.numbers)
        self._tokenizer = prepared.encoder.tokenizer
        self._told: set[str] = set()  # kinds of warnings already given
        self._first: tuple[Sequence[int], Sequence[int], float] | None = None  # prompt, completion and reward to show
        self._zero: list[str] = []  # the user's functions whose rewards in the last rollout were all 0
        self._unjudged = 0  # number of consecutive rollouts without any reward
        self._sampled: list[Sampled] = []  # completions of the present rollout
        self._packed: list[PackedDataset | None] = []  # packed rows by part of the rollout
        self._old: list[torch.Tensor] = []  # by part, (packed rows, S) log-probabilities before the first update
        self._metrics: dict[int, dict[str, float]] = {}  # step -> metrics, until they are logged

    @cached_property
    def generator(self) -> Generator:  # type: ignore[override]  # created after the model is on the device
        """The sampler, which also answers held-out rows; made at the first use, when the model is on the device."""
        ids = [
            *self._tasks.rows.prompt_ids,
            *self._prepared.eval_prompt_ids[: self._config.tracking.eval_generate_rows],
        ]
        prompts = -(-self._rl.prompts_per_rollout // self._rt.world_size)
        return Generator(
            self._model, self._tokenizer, self._rt, max_prompt=max(map(len, ids)), data=self._config.data,
            max_new_tokens=self._rl.max_completion_length, batch_size=prompts * self._config.num_generations,
            prefill_rows=prompts,
        )  # fmt: skip

    def all(self) -> Iterator[Update]:
        """See `Updates.all`."""
        return updates_of(self.rows, self._config)

    def after(self, step: int, agreement: PreemptionGuard) -> Iterator[tuple[Update, int, list[Tensors]]]:
        """Yields every update after a step, its tokens on all replicas, and this replica's batches, as `Updates.after`.

        Makes a rollout before the rollout's first update. If that update may not run, abandons the rollout, yields the
        update without batches, and ends. An update whose completions are all left out by `pack` has no batches, too.

        Raises:
            NextUpdateError: a judge has failed; or no completion of the first rollout, or of ten in a row, was judged.
        """
        for update in islice(self.all(), step, None):
            if (update.step - 1) % self._rl.updates_per_rollout == 0:
                if not self._roll_out(update, agreement):
                    yield update, 0, []
                    return
                if "old_logps" in self._objective.columns:
                    self._set_old([self._old_logprobs(packed) for packed in self._packed])
            packed = self._packed[self._part(update)]
            yield update, 0 if packed is None else int(packed.row_tokens.sum()), self._batches(packed)

    def source_rows(self, update: Update) -> list[int]:
        """See `Updates.source_rows`."""
        first, count = self._part(update) * self._rl.prompts_per_update, self._rl.prompts_per_update
        return sorted(self._tasks.numbers[n] for n in rows_of(update, self.rows, self._config.data)[first:][:count])

    def metrics(self, window: Sequence[Update]) -> dict[str, float]:
        """Returns the means of the metrics over the rollouts of a window, and forgets their metrics."""
        each = [self._metrics.pop(update.step) for update in window if update.step in self._metrics]
        names = dict.fromkeys(name for metrics in each for name in metrics)
        means = {name: [metrics[name] for metrics in each if name in metrics] for name in names}
        return {name: sum(values) / len(values) for name, values in means.items()}

    def warnings(self, means: Mapping[str, float], step: int) -> list[str]:
        """Returns new warnings about a log's means by name, every kind once in a run.

        The kinds: nothing was judged; every group has equal rewards; all completions are cut off; the sampler differs.
        With several updates per rollout, sampler and trainer differ after the first, so that is not a warning.
        """
        found, gap = {}, means.get("sampler_gap", 0.0)
        if self._rl.updates_per_rollout == 1 and gap > GAP:
            found["gap"] = (
                f"the log-probabilities of sampled tokens differ by {gap:.2g} nats between sampler and trainer "
                f"(sampler_gap, usually below {GAP:g}): the samples do not follow the weights being trained. Set "
                "rl.importance_sampling_correction=sequence_mask, or model.base_dtype=fp32 to see if rounding causes "
                "this"
            )
        if means.get("completions/not_judged") == 1:
            found["unjudged"] = "no reward function judged a completion since the last log, so nothing was learned"
        elif means.get("frac_reward_zero_std") == 1:
            silent = f" {', '.join(self._zero)}: 0 everywhere, the function may fail silently." if self._zero else ""
            found["flat"] = (
                "the completions of each prompt since the last log got equal rewards (no completion is correct for "
                f"{means['frac_all_wrong']:.0%} of the prompts). Nothing was learned.{silent} Start from an "
                f"adapter that solves some of the problems (lora.adapter), or use other problems or rewards"
                f"{self._example()}"
            )
        if means.get("completions/truncated") == 1:
            effect = ", and have no loss (rl.mask_truncated_completions)" * self._rl.mask_truncated_completions
            found["truncated"] = (
                "all completions since the last log were cut off at rl.max_completion_length="
                f"{self._rl.max_completion_length}{effect}: raise it"
            )
        told, self._told = self._told, self._told | found.keys()
        return [text for name, text in found.items() if name not in told]

    def _example(self) -> str:
        """Returns ". An example: ..." with a prompt, completion and reward of the last rollout; "" if there is none."""
        if self._first is None:
            return ""
        texts = (self._tokenizer.decode(ids) for ids in self._first[:2])
        prompt, completion = (shorten(text, _SHOWN, placeholder=" ...") for text in texts)
        return f". An example: prompt {prompt!r}, completion {completion!r}, reward {self._first[2]:g}"

    def document(self, step: int) -> dict[str, Any]:
        """Returns the JSON state after a step: "metrics" that were not logged, by step.

        For a rollout with updates left, also its completions, "sampled" (fields of `Sampled`), and "old_logps": for
        every part of the rollout log-probabilities by packed row and position, [] if the loss needs none.
        """
        metrics = {str(number): values for number, values in self._metrics.items() if number <= step}
        if step % self._rl.updates_per_rollout == 0:
            return {"metrics": metrics}
        old = [table.tolist() for table in self._old]
        return {"metrics": metrics, "sampled": [asdict(each) for each in self._sampled], "old_logps": old}

    def restore(self, document: Mapping[str, Any]) -> None:
        """See `Updates.restore`."""
        self._metrics = {int(number): values for number, values in document["metrics"].items()}
        if "sampled" in document:
            self._pack([Sampled(**each) for each in document["sampled"]])
            self._set_old([torch.tensor(table, dtype=torch.float32) for table in document["old_logps"]])

    # ------------------------------------------------------------------------------------------------------- rollouts

    def _roll_out(self, update: Update, agreement: PreemptionGuard) -> bool:
        """Samples, judges and packs the completions of an update's prompts; returns False if the update may not run.

        Once a replica has agreed to run the update, the others finish sampling, so that all exchange. Raises
        NextUpdateError as `_refuse`.
        """
        rl, tasks = self._rl, self._tasks

        def stopped() -> bool:
            return agreement.stopped_before(update.step)

        chosen = rows_of(update, self.rows, self._config.data).tolist()
        sampling = self._sampling((update.step - 1) // rl.updates_per_rollout)
        rollout = sample(self.generator, tasks, update.step, chosen, self._config.num_generations, sampling, stopped)
        if stopped():
            return False
        try:
            rollout = judge(rollout, tasks, self._config.data, self._judge, self._total, stopped)
        except CallEnded:
            return False
        if not agreement.should_run(update.step):
            return False
        rollout = exchange(rollout, self._rt)
        self._refuse(rollout)
        self._tell_errors(rollout)
        rollout = advantages(rollout, rl.scale_rewards)
        self._pack(documents(rollout, tasks, rl.mask_truncated_completions))
        self._remember(rollout)
        metrics, logged = measured(rollout), rollout.judgement.logged
        means = {name: sum(values) / len(values) for name, values in logged.items()}
        self._metrics[update.step] = metrics | apart_from(metrics, means)
        return True

    def _sampling(self, number: int) -> Sampling:
        """Returns the sampling parameters of a rollout by its number, from 0, which with optim.seed sets the seed."""
        seed = int(np.random.SeedSequence([self._config.optim.seed, number]).generate_state(1)[0])
        return Sampling(
            self._rl.max_completion_length, temperature=self._rl.sampling_temperature, seed=seed,
            tempered_logprobs=True,
            model_defaults=False,  # as in TRL: samples must follow the policy being trained
        )  # fmt: skip

    def _refuse(self, rollout: Rollout) -> None:
        """Raises NextUpdateError if a judge failed, or if the first rollout or ten in a row had no reward."""
        if rollout.failure:
            raise NextUpdateError(rollout.failure)
        rewards = rollout.rewards
        self._unjudged = self._unjudged + 1 if torch.isnan(rewards).all() else 0
        first = rollout.step <= self._rl.updates_per_rollout
        if self._unjudged and (first or self._unjudged == _UNJUDGED):
            raise NextUpdateError(
                f"none of rl.reward_funcs={','.join(self._judge.names)} judged any of the {rewards.numel()} "
                f"completions of step {rollout.step}: a rule needs an answer in the row, and a function must return "
                f"some numbers{''.join(f'; {name}' for name in rollout.judgement.errors)}"
            )

    def _remember(self, rollout: Rollout) -> None:
        """Keeps an example for warnings and the names of functions that returned only 0; rank 0 writes group.json."""
        first, parts = self._sampled[0], rollout.judgement.parts
        self._first = first.prompt, first.tokens, rollout.judgement.total[0]
        self._zero = [name for name in self._judge.functions if not any(parts[name])]
        if self._rt.rank == 0 and self._judge.names:
            self._write_group(rollout.step, rollout.rewards)

    def _write_group(self, step: int, rewards: torch.Tensor) -> None:
        """Writes group.json, if the disk has room: the completions of the group whose (P, G) `rewards` deviate most."""
        count = rewards.shape[1]
        group = int(torch.nan_to_num(deviation(rewards)).argmax())
        completions = [
            {"tokens": texts_of(self._tokenizer, each.tokens), "reward": reward, "advantage": each.advantage}
            for each, reward in zip(self._sampled[group * count :][:count], rewards[group].tolist(), strict=True)
        ]
        prompt = self._tokenizer.decode(self._sampled[group * count].prompt)
        text = json.dumps({"step": step, "prompt": prompt, "completions": completions})
        with contextlib.suppress(OSError):  # on a full disk the log reports the error
            atomic.write_text(self._config.output_path / GROUP_FILE, text)

    def _tell_errors(self, rollout: Rollout) -> None:
        """Prints, on rank 0, an example of completions that were not judged, once per kind of error."""
        for name, examples in rollout.judgement.errors.items():
            if self._rt.rank == 0 and name not in self._told:
                text = f"{len(examples)} completions of step {rollout.step} were not judged by {name}"
                print(f"warning: {text}, such as {examples[0]}", file=sys.stderr, flush=True)
            self._told.add(name)

    def _pack(self, sampled: list[Sampled]) -> None:
        """Sets the completions of a rollout, packs them part by part, and drops their old log-probabilities."""
        self._sampled, self._old = sampled, []
        size = self._rl.prompts_per_update * self._config.num_generations
        parts = (sampled[first : first + size] for first in range(0, len(sampled), size))
        pad_id = self._tokenizer.pad_token_id or 0
        self._packed = [pack(part, self._config, pad_id, self._share_prompts) for part in parts]

    def _part(self, update: Update) -> int:
        """Returns the index of the part of the rollout from which an update learns."""
        return (update.step - 1) % self._rl.steps_per_generation

    def _batches(self, packed: PackedDataset | None) -> list[Tensors]:
        """Returns this replica's batches of the packed rows; empty rows fill the last pass."""
        rt, size = self._rt, self._config.optim.batch_size
        assert isinstance(size, int)
        return [] if packed is None else list(eval_batches(packed, rt.data_shards, rt.data_size, size))

    def _old_logprobs(self, packed: PackedDataset | None) -> torch.Tensor:
        """Computes the (packed rows, S) log-probabilities before a rollout's first update, for its later updates.

        All replicas must call it, and all get all rows. Returns an empty tensor for None.
        """
        assert isinstance(self._objective, PolicyObjective)
        if packed is None:
            return torch.zeros(0)
        mine = []
        self._model.eval()
        for batch in self._rt.to_device([{**batch, "old_logps": batch["share"]} for batch in self._batches(packed)]):
            logps = self._objective.logprobs(self._model, batch)
            self._rt.sync()
            mine += self._rt.to_host([logps])
        self._model.train()
        passes = zip(*self._rt.exchange([rows.tolist() for rows in mine]), strict=True)
        return torch.cat([torch.tensor(rows) for parts in passes for rows in parts])[: len(packed)]

    def _set_old(self, tables: list[torch.Tensor]) -> None:
        """Sets the tables of `_old_logprobs`, by part, as the column old_logps; an empty list sets none."""
        self._old = tables
        for packed, table in zip(self._packed, tables, strict=bool(tables)):
            if packed is not None:
                padded = torch.cat([table, torch.zeros_like(table[:1])])  # row -1 is empty
                packed.columns = {**packed.columns, "old_logps": padded.__getitem__}
