"""The updates of runs on pairs of replies, and their reference, computed before the first update."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from tpu_kit.config.loader import BatchPlan, TrainConfig
from tpu_kit.data.batching import PackedDataset, Update, eval_batches, prefetch, rows_of
from tpu_kit.data.pairs import PairColumns
from tpu_kit.data.prepare import Prepared
from tpu_kit.distributed.preemption import PreemptionGuard
from tpu_kit.distributed.progress import open_bar
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.prompts import texts_of
from tpu_kit.machine.storage import atomic
from tpu_kit.training.losses.preference import PreferenceObjective
from tpu_kit.training.losses.segment_sums import last_of_segments, running_sum
from tpu_kit.training.objectives import Objective
from tpu_kit.training.update_sources import Tensors, Updates

PAIR_FILE = "pair.json"  # in the run's folder: a pair, with the gain of every token's log-probability since the start
_FALLEN = -1.0  # a warning if the rewards of both replies are below
_MARGIN = 0.1  # margin of the rewards above which the lengths of the replies are examined
_GAP = 0.1  # nats per token that the model may differ from its reference before the first update
_OfBatch = list[list[list[float]]]
"""row -> pair -> the log-probabilities of its chosen and its rejected reply."""


class PairUpdates(Updates):
    """The updates of packed pairs.

    With `preference.reference=start` the reference is the model before the first update, with its initial adapter. The
    log-probabilities of all replies are computed at that time, in the run's own shapes, and saved in every checkpoint:
    two numbers per pair.
    """

    def __init__(
        self, config: TrainConfig, prepared: Prepared, plan: BatchPlan, rt: Runtime, model: torch.nn.Module,
        objective: Objective,
    ) -> None:  # fmt: skip
        super().__init__(config, prepared, plan, rt)
        assert isinstance(objective, PreferenceObjective)
        self._model, self._objective, self._prepared, self._told = model, objective, prepared, set[str]()
        self._compares = config.preference.compares
        self._first: list[float] | None = None  # the reference's log-probabilities of the first held-out row
        self._sets = {"train": prepared.train} | ({"eval": prepared.eval} if prepared.eval is not None else {})
        self.keeps_state = self._compares and config.preference.reference == "start"

    def begin(self, step: int, agreement: PreemptionGuard) -> bool:
        """Computes the reference of a new run with reference=start; returns False if the run has to stop.

        All replicas must call it. It sets `PairColumns.reference` of the training and held-out pairs, and leaves the
        model in eval mode. Just returns True if `step` is not 0, with another reference, or if no loss compares.
        """
        if step or not self.keeps_state:
            return True
        self._model.eval()
        start = time.monotonic()
        found = {name: self._of_replica(rows, agreement) for name, rows in self._sets.items()}
        if not agreement.should_run(step + 1):
            return False
        for name, mine in found.items():
            passes = zip(*self._rt.exchange(mine), strict=True)  # of all replicas, in the order of `eval_batches`
            by_row = chain.from_iterable(chain.from_iterable(passes))
            self._set(name, [pair for row in by_row for pair in row])
        if self._rt.rank == 0:
            pairs, seconds = sum(len(rows.documents) for rows in self._sets.values()), time.monotonic() - start
            print(f"reference        {pairs:,} pairs by the model as it starts, in {seconds:.0f} s", flush=True)
        return True

    def _of_replica(self, rows: PackedDataset, agreement: PreemptionGuard) -> list[_OfBatch]:
        """Returns [chosen, rejected] log-probabilities of pairs by this replica's batches, by row, by pair.

        Stops early, with fewer batches, if the run has to stop. Keeps the first held-out row's in `_first`.
        """
        rt, size, found = self._rt, self._plan.batch_size, list[_OfBatch]()
        batches = prefetch(eval_batches(rows, rt.data_shards, rt.data_size, size))
        shown = open_bar("reference", -(-len(rows) // (size * rt.data_size)), unit="batch")
        with shown if rt.rank == 0 else contextlib.nullcontext() as bar:
            for batch in batches:
                if agreement.stopped_before(1):
                    break
                values = self._logprobs(batch)
                lasts = last_of_segments(batch["pairs"])
                found.append([row[:2, mask].T.tolist() for row, mask in zip(values.unbind(1), lasts, strict=True)])
                if rows is self._prepared.eval and len(found) == 1:
                    self._first = values[2, 0].tolist()
                if bar is not None:
                    bar.update()
        return found

    def _logprobs(self, batch: Tensors) -> torch.Tensor:
        """Computes `PreferenceObjective.logprobs` of a batch; returns a CPU tensor, (3, B, S)."""
        (sent,) = self._rt.to_device([batch])
        values = self._objective.logprobs(self._model, sent)
        self._rt.sync()
        return self._rt.to_host([values])[0]

    def after(self, step: int, agreement: PreemptionGuard) -> Iterator[tuple[Update, int, list[Tensors]]]:
        """Yields every update after a step, its tokens on all replicas, and this replica's batches, as `Updates.after`.

        For kto, before every update all replicas estimate the divergence from the reference over its rows, and set "kl"
        in its batches. If the run has to stop, kto yields the update without batches and ends.
        """
        for update, tokens, batches in super().after(step, agreement):
            if self._config.preference.labelled:
                if not agreement.should_run(update.step):
                    yield update, 0, []
                    return
                self._model.eval()
                divergence = self._divergence(batches)
                self._model.train()
                for batch in batches:
                    batch["kl"].fill_(divergence)
            yield update, tokens, batches

    def evaluating(self) -> None:
        """See `Updates.evaluating`; for kto, computes the divergence over all held-out rows."""
        rows, rt = self._prepared.eval, self._rt
        if self._config.preference.labelled and rows is not None:
            batches = eval_batches(rows, rt.data_shards, rt.data_size, self._plan.batch_size)
            columns_of(rows).kl = self._divergence(batches)

    def _divergence(self, batches: Iterable[Tensors]) -> float:
        """Estimates the divergence, at least 0, from the mismatched replies of all replicas, which must all call it."""
        total, count = 0.0, 0
        for batch in batches:
            values = self._logprobs(batch)[1]
            lasts = last_of_segments(batch["pairs"])
            reference = running_sum(batch["reference"] * (batch["sign"] < 0), batch["pairs"])
            total += float((values - reference)[lasts].double().sum())
            count += int(lasts.sum())
        totals, counts = zip(*self._rt.exchange([total, count]), strict=True)
        return max(0.0, sum(totals) / max(1, sum(counts)))

    def evaluated(self, step: int) -> None:
        """Writes, on rank 0, the first held-out pair to pair.json, with the gain of every token since the start.

        The file has "step", "prompt", "chosen" and "rejected"; a reply has "reward", "tokens" (texts) and "gained", in
        nats by token. A file that cannot be written is skipped. All replicas must call it. Does nothing for kto,
        without reference=start or without held-out rows.
        """
        rows, rt = self._prepared.eval, self._rt
        if rows is None or self._first is None or self._config.preference.labelled:
            return
        batch = next(eval_batches(rows, rt.data_shards, rt.data_size, self._plan.batch_size))
        now = self._logprobs(batch)[2, 0]
        if rt.rank:
            return
        assert self._prepared.encoder is not None
        tokenizer = self._prepared.encoder.tokenizer
        gained = now - torch.tensor(self._first)
        ids, here = batch["input_ids"][0], batch["pairs"][0] == 1
        begin = int(torch.nonzero(batch["sign"][0])[0])
        replies = {}
        for name, sign in (("chosen", 1), ("rejected", -1)):
            places = torch.nonzero(here & (batch["sign"][0].sign() == sign))[:, 0]
            texts = texts_of(tokenizer, ids[places + 1].tolist())
            reward = self._config.preference.pref_beta * float(gained[places].sum())
            replies[name] = {"reward": reward, "tokens": texts, "gained": gained[places].tolist()}
        text = json.dumps({"step": step, "prompt": tokenizer.decode(ids[: begin + 1]), **replies})
        with contextlib.suppress(OSError):  # on a full disk the log reports the error
            atomic.write_text(self._config.output_path / PAIR_FILE, text)

    def _set(self, name: str, pairs: Sequence[Sequence[float]]) -> None:
        """Sets the reference of "train" or "eval" to [chosen, rejected] of its pairs, in the order of packed rows."""
        rows = self._sets[name]
        numbers = np.concatenate([rows.documents_of(row) for row in range(len(rows))])
        table: np.ndarray = np.zeros((len(rows.documents), 2), dtype=np.float32)
        table[numbers] = pairs
        columns_of(rows).reference = table  # a new array: the old may be a file that all replicas map

    def document(self, step: int) -> dict[str, Any]:
        """See `Updates.document`: for "train" and "eval" [chosen, rejected] by pair; "first" by token."""
        tables = {name: columns_of(rows).reference.tolist() for name, rows in self._sets.items()}
        return {**tables, "first": self._first}

    def restore(self, document: Mapping[str, Any]) -> None:
        """See `Updates.restore`."""
        for name, rows in self._sets.items():
            columns_of(rows).reference = np.array(document[name], dtype=np.float32)
        self._first = document["first"]

    def _made(self, step: int) -> Iterator[tuple[Update, int, list[Tensors]]]:
        """Yields the updates of `Updates._made`, with token_share scaled by the whole update's pairs per token."""
        for update, tokens, batches in super()._made(step):
            taken = rows_of(update, self.rows, self._config.data, self._data.grouping)
            share = columns_of(self._data).share(self._data, taken)
            for batch in batches:
                batch["token_share"] *= share
            yield update, tokens, batches

    def warnings(self, means: Mapping[str, float], step: int) -> list[str]:
        """Returns new warnings about a log's means by name, every kind once.

        At step 0: the model differs from its reference. Later: both rewards fall far, or lengths alone make the margin.
        """
        found, rewards = {}, [means.get(f"rewards/{name}", 0.0) for name in ("chosen", "rejected")]
        if step and self._compares and max(rewards) < _FALLEN:
            found["fallen"] = (
                f"the rewards of the chosen and the rejected replies are both far below 0 ({rewards[0]:.2g} and "
                f"{rewards[1]:.2g}), so the model moves away from both. Lower optim.learning_rate, raise "
                "preference.pref_beta, or set losses=[sigmoid,sft], which keeps the chosen replies likely"
            )
        margin, of_token = means.get("rewards/margins", 0.0), means.get("token_margins", math.inf)
        if step and margin > _MARGIN and of_token <= 0:
            found["length"] = (
                f"the margin of the rewards is {margin:.2g}, and {of_token:.2g} if each reward is divided by the "
                "number of tokens of its reply, so it comes from the lengths of the replies alone. Set "
                "losses=[sigmoid_norm], which compares means over tokens, or preference.ld_alpha=0.5; or train on "
                "replies of similar lengths"
            )
        if not step and (gap := means.get("reference_gap", 0.0)) > _GAP:
            found["gap"] = (
                f"the log-probability of a token differs by {gap:.2g} nats between the model before the first update "
                f"and its reference (usually below {_GAP:g}). Set model.base_dtype=fp32 to see if rounding causes this"
            )
        told, self._told = self._told, self._told | found.keys()
        return [text for name, text in found.items() if name not in told]


def columns_of(rows: PackedDataset) -> PairColumns:
    """Returns the `PairColumns` of a data set of pairs, which make its tensors."""
    assert isinstance(rows.further, PairColumns)
    return rows.further
