"""Rollouts: completions sampled from the weights being trained, and judged by rewards or by a teacher.

A rollout is a function of the weights, the seed and its number, whatever the number of replicas: each samples and
judges a part of the prompts, all exchange the results, and all pack them alike. A teacher judges in the update itself,
by `distillation.DistillationObjective`.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import islice
from textwrap import shorten
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from tpu_kit.config.loader import BatchPlan, TrainConfig
from tpu_kit.data.batching import PackedDataset, Update, eval_batches, rows_of, updates
from tpu_kit.data.prepare import Prepared
from tpu_kit.distributed.hosts import Hosts
from tpu_kit.distributed.preemption import PreemptionGuard
from tpu_kit.distributed.replica.main_thread import CallEnded
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.evaluation.rewards import Attempt, Judgement, Rewards
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.prompts import Completion, opened
from tpu_kit.generation.sampling import Sampling
from tpu_kit.machine.storage import atomic
from tpu_kit.model import attention
from tpu_kit.training.losses.policy import GAP, PolicyObjective, Sampled, pack
from tpu_kit.training.metrics import apart_from
from tpu_kit.training.objectives import Objective
from tpu_kit.training.updates import NextUpdateError, Tensors, Updates

T = TypeVar("T")
_EPSILON = 1e-4  # added to the standard deviation, as TRL does
GROUP_FILE = "group.json"  # in a run's folder: a group of completions of the last rollout, with their rewards
_SHOWN = 300  # characters of a prompt and a completion in a warning
_UNJUDGED = 10  # consecutive rollouts without a reward, after which there will be none
_FLAT = 1e-6  # a standard deviation, as a share of the largest reward, up to which the rewards of a group are equal


def advantages_of(rewards: torch.Tensor, scale: Literal["group", "batch", "none"]) -> torch.Tensor:
    """Computes the advantages of completions.

    Args:
        rewards: (P, G) fp32, of G completions of each prompt; NaN where none was judged.
        scale: divide by the standard deviation (of n - 1) of the group or of all rewards, or do not divide.

    Returns:
        (P, G) fp32: reward - mean of the group, scaled; 0 for a completion that was not judged, and where a group has
        fewer than two.
    """
    centred = rewards - torch.nanmean(rewards, -1, keepdim=True)
    # Rounding would give a group of equal rewards advantages of 1e-4.
    centred = torch.where(_are_equal(rewards), 0.0, centred)
    if scale != "none":
        centred = centred / (deviation(rewards if scale == "group" else rewards.reshape(1, -1)) + _EPSILON)
    return torch.nan_to_num(centred)


def deviation(rewards: torch.Tensor) -> torch.Tensor:
    """Computes the standard deviation of each row without its NaN, (P, 1); NaN for a row of fewer than two numbers."""
    judged = ~torch.isnan(rewards)
    count = judged.sum(-1, keepdim=True)
    square = torch.nan_to_num(rewards - torch.nanmean(rewards, -1, keepdim=True)).square().sum(-1, keepdim=True)
    return torch.where(count > 1, (square / (count - 1).clamp(min=1)).sqrt(), torch.nan)


def _are_equal(rewards: torch.Tensor) -> torch.Tensor:
    """Returns whether the rewards of each row are equal but for rounding, (P, 1), also where fewer than two are."""
    largest = torch.nan_to_num(rewards).abs().amax(-1, keepdim=True)
    return torch.nan_to_num(deviation(rewards)) <= _FLAT * largest


def updates_of(prompts: int, config: TrainConfig) -> Iterator[Update]:
    """Yields the updates of a run that samples, by the number of its prompts; raises ValueError if they are too few."""
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


def planned_updates(rows: int, batch: BatchPlan, config: TrainConfig) -> Iterator[Update]:
    """Yields the updates of a run, by its packed rows, or by its prompts if it samples."""
    return updates_of(rows, config) if config.on_policy else updates(rows, batch, config.optim)


def check_rollouts(
    config: TrainConfig, rows: Sequence[Mapping[str, Any]], reward_funcs: Sequence[Any] | None, hosts: Hosts
) -> None:
    """Raises ValueError if the rewards of a run are not there, or none can judge its rows, or it has several hosts."""
    name = "distill.on_policy" if config.distill.on_policy else "grpo"
    if hosts.count > 1:
        raise ValueError(f"{name} on {hosts.count} hosts: completions are exchanged within one host; use one host")
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
) -> Iterator[Updates]:
    """Yields where a replica's batches come from: packed rows, or rollouts, whose rewards it opens and closes."""
    if not config.on_policy:
        yield Updates(config, prepared, plan, rt)
        return
    with contextlib.nullcontext() if config.distill.on_policy else Rewards(config, reward_funcs) as rewards:
        yield Rollouts(config, prepared, plan, rt, model, objective, rewards)


def texts_of(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Returns what each token adds to the text of the four before it: a tokenizer may strip the space of a first one.

    A character of several tokens belongs to its last one.
    """
    texts = []
    for end in range(1, len(tokens) + 1):
        whole, before = (tokenizer.decode(tokens[max(0, end - 5) : stop]).rstrip("\ufffd") for stop in (end, end - 1))
        texts.append(whole[len(before) :])
    return texts


class Rollouts(Updates):
    """The updates of runs that sample: `rl.num_iterations` of each of `rl.steps_per_generation` parts of a rollout.

    `rewards` judges completions; None where the objective has a teacher.
    """

    splits = True

    def __init__(
        self,
        config: TrainConfig,
        prepared: Prepared,
        plan: BatchPlan,
        rt: Runtime,
        model: torch.nn.Module,
        objective: Objective,
        rewards: Rewards | None,
    ) -> None:
        super().__init__(config, prepared, plan, rt)
        assert prepared.tasks is not None and prepared.encoder is not None
        self._rl, self._model, self._objective = config.rl, model, objective
        self._prepared, self._rewards, self._tasks = prepared, rewards, prepared.tasks
        self._names = rewards.names if rewards else []
        self._share_prompts = rewards is not None and attention.sees_all(model)
        self.rows = len(self._tasks.numbers)
        self._tokenizer = prepared.encoder.tokenizer
        self._told: set[str] = set()  # the warnings that were given
        self._first: tuple[Sequence[int], Sequence[int], float] | None = None  # prompt, completion, reward of the last
        self._zero: list[str] = []  # functions of users whose rewards were all 0 then
        self._unjudged = 0  # the last rollouts without a reward
        self._sampled: list[Sampled] = []  # of the present rollout
        self._packed: list[PackedDataset | None] = []  # of each part of its prompts
        self._old: list[torch.Tensor] = []  # of each part (packed rows, S) log-probabilities before its first update
        self._metrics: dict[int, dict[str, float]] = {}  # by step, until they are logged

    @cached_property
    def generator(self) -> Generator:  # type: ignore[override]  # made when the model is on the device
        """Samples, and answers held-out rows."""
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
        """See `Updates.after`; a rollout is made when its first update is asked for, and abandoned with it."""
        total = sum(1 for _ in self.all())
        for update in islice(self.all(), step, None):
            if (update.step - 1) % self._rl.updates_per_rollout == 0:
                if not self._roll_out(update, total, agreement):
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
        """Returns means over the rollouts of a window."""
        each = [self._metrics.pop(update.step) for update in window if update.step in self._metrics]
        names = dict.fromkeys(name for metrics in each for name in metrics)
        means = {name: [metrics[name] for metrics in each if name in metrics] for name in names}
        return {name: sum(values) / len(values) for name, values in means.items()}

    def warnings(self, means: Mapping[str, float]) -> list[str]:
        """Says once when no reward teaches anything, and when sampler and trainer differ much.

        After the first of several updates of a rollout, sampler and trainer do differ.
        """
        found, gap = {}, means.get("sampler_gap", 0.0)
        if self._rl.updates_per_rollout == 1 and gap > GAP:
            found["gap"] = (
                f"the log-probabilities of sampled tokens differ by {gap:.2g} nats between sampler and trainer "
                f"(sampler_gap, usually below {GAP:g}): the samples are not those of the weights being trained. Set "
                "rl.importance_sampling_correction=sequence_mask, or model.base_dtype=fp32 to see whether rounding is "
                "why"
            )
        if means.get("completions/not_judged") == 1:
            found["unjudged"] = "no reward function judged a completion since the last log, so nothing was learned"
        elif means.get("frac_reward_zero_std") == 1:
            silent = f" {', '.join(self._zero)}: 0 everywhere, the function may fail silently." if self._zero else ""
            found["flat"] = (
                "all completions of a prompt got the same reward, for each prompt since the last log (for "
                f"{means['frac_all_wrong']:.0%} of them none is right), so nothing was learned.{silent} Start from an "
                f"adapter that solves some of the problems (lora.adapter), or take other problems or rewards"
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
        """Describes a completion of the last rollout; empty before the first."""
        if self._first is None:
            return ""
        texts = (self._tokenizer.decode(ids) for ids in self._first[:2])
        prompt, completion = (shorten(text, _SHOWN, placeholder=" ...") for text in texts)
        return f". An example: prompt {prompt!r}, completion {completion!r}, reward {self._first[2]:g}"

    def document(self, step: int) -> dict[str, Any]:
        """See `Updates.document`: the metrics to log, and a rollout that has updates left."""
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

    def _roll_out(self, update: Update, total: int, agreement: PreemptionGuard) -> bool:
        """Samples, judges and packs the completions of an update's prompts; returns False if the update is not to run.

        Replicas that still sample when one of them has asked to run the update finish their part, so all exchange.
        """
        start, rl, each = time.monotonic(), self._rl, self._config.num_generations
        chosen = rows_of(update, self.rows, self._config.data).tolist()
        number = (update.step - 1) // rl.updates_per_rollout
        seed = int(np.random.SeedSequence([self._config.optim.seed, number]).generate_state(1)[0])
        sampling = Sampling(
            rl.max_completion_length, temperature=rl.sampling_temperature, seed=seed, tempered_logprobs=True,
            model_defaults=False,  # as TRL does: the samples are the policy's own, whose likelihood is trained
        )  # fmt: skip
        ids = [self._tasks.rows.prompt_ids[row] for row in chosen]
        completions = self.generator.share(ids, sampling, each, stop=lambda: agreement.stopped_before(update.step))
        sampled = time.monotonic()
        if agreement.stopped_before(update.step):
            return False
        try:
            judgement, error = self._judge(
                chosen, completions, update.step, total, lambda: agreement.stopped_before(update.step)
            )
        except CallEnded:
            return False
        judged = time.monotonic()
        if not agreement.should_run(update.step):
            return False
        answers, logged, errors = self._exchanged(completions, judgement, error)
        replies, *scores = zip(*answers, strict=True)
        rewards, *parts = (torch.tensor(column, dtype=torch.float32) for column in scores)
        rewards = rewards.view(len(chosen), each)
        self._unjudged = self._unjudged + 1 if torch.isnan(rewards).all() else 0
        if self._unjudged and (number == 0 or self._unjudged == _UNJUDGED):
            raise NextUpdateError(
                f"none of rl.reward_funcs={','.join(self._names)} judged any of the {rewards.numel()} completions of "
                f"step {update.step}: a rule needs an answer in the row, and a function must return some numbers"
                f"{''.join(f'; {name}' for name in errors)}"
            )
        self._tell_errors(update.step, errors)
        functions = self._rewards.functions if self._rewards else []
        self._zero = [
            name for name, part in zip(self._names, parts, strict=True) if name in functions and not part.any()
        ]
        self._first = ids[0], replies[0].tokens, float(rewards[0, 0])
        advantages = advantages_of(rewards, rl.scale_rewards).flatten().tolist()
        self._pack([
            Sampled(
                self._tasks.numbers[chosen[place // each]], tuple(ids[place // each]), reply.tokens, reply.logprobs,
                advantages[place], reply.finish_reason == "stop" or not rl.mask_truncated_completions,
            )
            for place, reply in enumerate(replies)
        ])  # fmt: skip
        if self._rt.rank == 0 and self._rewards:
            self._write_group(update.step, rewards)
        metrics = self._sampled_metrics(replies, rewards, parts, sampled - start)
        metrics |= {"reward_seconds": judged - sampled} if self._rewards else {}
        self._metrics[update.step] = metrics | apart_from(metrics, logged)
        return True

    def _sampled_metrics(
        self, replies: Sequence[Any], rewards: torch.Tensor, parts: Sequence[torch.Tensor], seconds: float
    ) -> dict[str, float]:
        """Returns what is logged of the completions of a rollout, which took `seconds` to sample."""
        means = {f"rewards/{name}": float(torch.nanmean(part)) for name, part in zip(self._names, parts, strict=True)}
        measured = means | (self._measured(rewards) if self._rewards else {})
        lengths = torch.tensor([len(reply.tokens) for reply in replies], dtype=torch.float32)
        ended = torch.tensor([reply.finish_reason == "stop" for reply in replies], dtype=torch.float32)
        return {name: value for name, value in measured.items() if not math.isnan(value)} | {
            "completions/mean_length": float(lengths.mean()), "completions/max_length": float(lengths.max()),
            "completions/truncated": 1 - float(ended.mean()), "rollout_seconds": seconds,
            "rollout_tokens_per_second": float(lengths.sum()) / max(1e-9, seconds),
        }  # fmt: skip

    def _write_group(self, step: int, rewards: torch.Tensor) -> None:
        """Writes the completions of the group whose rewards differ most."""
        count = rewards.shape[1]
        group = int(torch.nan_to_num(deviation(rewards)).argmax())
        completions = [
            {"tokens": texts_of(self._tokenizer, each.tokens), "reward": reward, "advantage": each.advantage}
            for each, reward in zip(self._sampled[group * count :][:count], rewards[group].tolist(), strict=True)
        ]
        prompt = self._tokenizer.decode(self._sampled[group * count].prompt)
        text = json.dumps({"step": step, "prompt": prompt, "completions": completions})
        with contextlib.suppress(OSError):  # a full disk: the log says so
            atomic.write_text(self._config.output_path / GROUP_FILE, text)

    def _judge(
        self, chosen: Sequence[int], completions: Mapping[tuple[int, int], Completion], step: int, total: int,
        stop: Callable[[], bool],
    ) -> tuple[Judgement, str]:  # fmt: skip
        """Judges this replica's completions, unless it raises CallEnded by `stop`; without rewards all are equal.

        Returns:
            The rewards, and why they failed: the other replicas wait in the exchange, after which all end alike.
        """
        if self._rewards is None or not completions:
            return Judgement([0.0] * len(completions), {name: [] for name in self._names}), ""
        rows, data = self._tasks.rows, self._config.data
        attempts = [
            Attempt(
                rows.rows[row],
                rows.asked[row],
                opened(rows.prompts[row], data, rows.asked[row]) + completion.text,
                completion.tokens,
            )
            for row, completion in ((chosen[prompt], completions[prompt, n]) for prompt, n in sorted(completions))
        ]
        try:
            return self._rewards(attempts, step, total, stop), ""
        except ValueError as error:
            none = [math.nan] * len(attempts)
            return Judgement(none, dict.fromkeys(self._names, none)), str(error)

    def _exchanged(
        self, completions: Mapping[tuple[int, int], Completion], judgement: Judgement, error: str
    ) -> tuple[list[tuple[Any, ...]], dict[str, float], dict[str, list[str]]]:
        """Exchanges completions and rewards between the replicas.

        Returns:
            Each completion with its reward and that of each function, by prompt; the means of what functions log; and
            `Judgement.errors`.

        Raises:
            NextUpdateError: the rewards of a replica failed.
        """
        rewards = zip(judgement.total, *(judgement.parts[name] for name in self._names), strict=True)
        mine = {key: (asdict(completions[key]), *each) for key, each in zip(sorted(completions), rewards, strict=True)}
        answers, logged = dict[tuple[int, int], tuple[Any, ...]](), defaultdict[str, list[float]](list)
        errors = defaultdict[str, list[str]](list)
        for theirs, values, unjudged, failure in self._exchange((mine, judgement.logged, judgement.errors, error)):
            if failure:
                raise NextUpdateError(failure)
            answers |= theirs
            for name, each in values.items():
                logged[name] += each
            for name, examples in unjudged.items():
                errors[name] += examples
        means = {name: sum(values) / len(values) for name, values in logged.items()}
        return [(Completion(**reply), *scores) for _, (reply, *scores) in sorted(answers.items())], means, errors

    def _tell_errors(self, step: int, errors: Mapping[str, Sequence[str]]) -> None:
        """Says on rank 0 what rules did not judge, the first time that each error occurs."""
        for name, examples in errors.items():
            if self._rt.rank == 0 and name not in self._told:
                text = f"{len(examples)} completions of step {step} were not judged by {name}, such as {examples[0]}"
                print(f"warning: {text}", file=sys.stderr, flush=True)
            self._told.add(name)

    def _exchange(self, mine: T) -> list[T]:
        """Returns what each replica gives, by rank: they are on one host, and share its disk."""
        if self._rt.world_size == 1:
            return [mine]
        files = [self._config.output_path / f"exchanged-{rank}.pt" for rank in range(self._rt.world_size)]
        torch.save(mine, files[self._rt.rank])
        self._rt.barrier()
        values = [torch.load(file, weights_only=True) for file in files]
        self._rt.barrier()
        files[self._rt.rank].unlink()
        return values

    @staticmethod
    def _measured(rewards: torch.Tensor) -> dict[str, float]:
        spread, flat = deviation(rewards), _are_equal(rewards)
        wrong = flat[:, 0] & (torch.nan_to_num(rewards).amax(1) <= 0)
        return {
            "reward": float(torch.nanmean(rewards)), "reward_std": float(torch.nan_to_num(spread).mean()),
            "frac_reward_zero_std": float(flat.float().mean()), "frac_all_wrong": float(wrong.float().mean()),
            "completions/not_judged": float(torch.isnan(rewards).float().mean()),
        }  # fmt: skip

    def _pack(self, sampled: list[Sampled]) -> None:
        """Packs each part of a rollout's completions."""
        self._sampled, self._old = sampled, []
        size = self._rl.prompts_per_update * self._config.num_generations
        parts = (sampled[first : first + size] for first in range(0, len(sampled), size))
        pad_id = self._tokenizer.pad_token_id or 0
        self._packed = [pack(part, self._config, pad_id, self._share_prompts) for part in parts]

    def _part(self, update: Update) -> int:
        return (update.step - 1) % self._rl.steps_per_generation

    def _batches(self, packed: PackedDataset | None) -> list[Tensors]:
        """Returns this replica's part of all packed rows; empty rows fill the last pass."""
        rt, size = self._rt, self._config.optim.batch_size
        assert isinstance(size, int)
        return [] if packed is None else list(eval_batches(packed, rt.data_shards, rt.data_size, size))

    def _old_logprobs(self, packed: PackedDataset | None) -> torch.Tensor:
        """Computes the log-probabilities before the first update of a rollout, (packed rows, S), for the later ones."""
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
        passes = zip(*self._exchange(mine), strict=True)
        return torch.cat([rows for parts in passes for rows in parts])[: len(packed)]

    def _set_old(self, tables: list[torch.Tensor]) -> None:
        self._old = tables
        for packed, table in zip(self._packed, tables, strict=bool(tables)):
            if packed is not None:
                padded = torch.cat([table, torch.zeros_like(table[:1])])  # row -1 is empty
                packed.columns = {**packed.columns, "old_logps": padded.__getitem__}
