"""The training loop of one replica: batches, steps, logs, evaluations and checkpoints.

The loop sends a batch, traces the step, dispatches it and continues. It reads the device only to log, to evaluate and
to save, and reads the sums for a log while the next step runs.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch

from tpu_kit.config.loader import BatchPlan, TrainConfig
from tpu_kit.config.resuming import ANEW
from tpu_kit.data.batching import Update, eval_batches, learning_rate
from tpu_kit.data.prepare import Prepared
from tpu_kit.distributed.preemption import PreemptionGuard
from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.evaluation.accuracy import Accuracy
from tpu_kit.machine.host import chips_of
from tpu_kit.model import causal_lm as models
from tpu_kit.model.loop.layer_calls import unstacked
from tpu_kit.training.adapter_files import result_files
from tpu_kit.training.checkpoint.manager import CheckpointManager, HostParts
from tpu_kit.training.metrics import Evaluations, RecompileMonitor, Tracker, peak_memory
from tpu_kit.training.objectives import Objective
from tpu_kit.training.outcome import not_learned
from tpu_kit.training.resume import Record, ResumePoint, weights_of
from tpu_kit.training.state import TrainState, UpdateSums, sections
from tpu_kit.training.step import Control, SplitStep, TracedSteps, eval_step, train_step
from tpu_kit.training.update_sources import NextUpdateError, Updates

Tensors = dict[str, torch.Tensor]
Status = Literal["finished", "stopped", "preempted"]
_SHOWN_ROWS = 20
_DIVERGED = 10  # consecutive skipped updates after which training does not recover


@dataclass(frozen=True)
class _PendingLog:
    """A log whose sums the host has not read from the device yet."""

    window: list[Update]
    report: torch.Tensor
    rate: float
    before: dict[str, int]  # `Runtime.counters` before and after the window
    now: dict[str, int]
    tokens: int
    sent: float  # the time when the host had dispatched the last step, seconds


class Trainer:
    """Runs the training loop of one replica. As a context manager, it opens and closes the trackers of rank 0.

    Attributes:
        step: number of updates done.
        metrics: "loss", the newest mean in nats per token with loss, and in reinforcement learning "reward".
        skipped: number of skipped updates.
        evaluations: the evaluations of the held-out rows.
        mark: called with a phase's name and the step when the phase begins; the profiler sets it.
    """

    def __init__(
        self,
        config: TrainConfig,
        rt: Runtime,
        model: torch.nn.Module,
        objective: Objective,
        state: TrainState,
        prepared: Prepared,
        plan: BatchPlan,
        updates: Updates,
        total: int,
        record: Record,
        count_correct: Callable[[], tuple[int, ...]],
        checkpoints: CheckpointManager | None,
        predicted_bytes: int | None = None,
        parts: HostParts | None = None,
        flops_per_token: float | None = None,
    ) -> None:
        """Makes the loop of a loaded run.

        Args:
            config: the run.
            rt: this replica.
            model: the model on the device.
            objective: the loss, attached to the model.
            state: the state of the model's parameters.
            prepared: the data.
            plan: the rows of an update.
            updates: the source of the batches.
            total: number of updates of the run.
            record: the facts about the run that checkpoints record.
            count_correct: answers this replica's part of the held-out rows; returns the number of correct answers and
                the number of rows with an expected answer, then both numbers for every source of a mix. Called only
                with `tracking.eval_generate_rows`.
            checkpoints: the writer of checkpoints, on rank 0 only.
            predicted_bytes: predicted peak memory of a device.
            parts: the writer of this host's part of a checkpoint, if the state is sharded over hosts.
            flops_per_token: for MFU; None if the plan does not know them.
        """
        self.config, self.rt, self.model, self.objective, self.state = config, rt, model, objective, state
        self.prepared, self.plan, self.checkpoints, self.parts = prepared, plan, checkpoints, parts
        self.predicted_bytes, self.updates, self._count_correct = predicted_bytes, updates, count_correct
        self._split = SplitStep(model, state, objective, config.optim, rt) if updates.splits else None
        self._traced = TracedSteps(model, state, objective, config.optim, rt) if rt.traces_steps else None
        self.mark: Callable[[str, int], None] = lambda phase, step: None
        self.total, self.record, self.flops_per_token = total, record, flops_per_token
        self.step, self.skipped = 0, 0
        self.metrics: dict[str, float] = {}
        self._logged = 0  # the step of the last log
        self._rows, self._tokens = 0, 0  # totals of the run; tokens without padding
        self._seconds = 0.0  # in `run` until the last checkpoint, earlier launches included
        self._started = time.monotonic()
        self.evaluations = Evaluations(config.optim.early_stop_patience)
        self._pending: _PendingLog | None = None
        self._saved, self._saved_at = 0, time.monotonic()  # the step of the last checkpoint
        self._postponed, self._slowness = False, RecompileMonitor()
        self._history: list[dict[str, Any]] | None = None
        self._tracker: Tracker | None = None
        self._wandb_id: str | None = None

    def __enter__(self) -> Trainer:
        if self.rt.rank == 0:
            chip_name, num_chips = chips_of(self.rt.device_type, self.rt.num_devices)
            self._tracker = Tracker(
                self.config,
                self.config.output_path,
                self.step,
                self._history,
                resume_tokens=self._tokens,
                total_steps=self.total,
                flops_per_token=self.flops_per_token,
                chip_name=chip_name,
                num_chips=num_chips,
                device_type=self.rt.device_type,
                wandb_id=self._wandb_id,
            )
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._tracker is not None:
            self._tracker.close(failed=error is not None)

    def resume(self, point: ResumePoint) -> None:
        """Takes counters, history, evaluations and the state of `updates` from a checkpoint that fits the run.

        Call it before the context is entered. It does not change `state`, which already has the checkpoint's tensors.
        """
        checkpoint, state = point.checkpoint, point.state
        self.step = self._saved = checkpoint.step
        self._logged, self._rows, self._tokens = state["logged"], state["rows"], state["tokens"]
        self._seconds, self.skipped = state["train_seconds"], state["skipped"]
        self.metrics = {name: math.nan if value is None else value for name, value in state["metrics"].items()}
        if self.updates.keeps_state:
            self.updates.restore(checkpoint.document("updates"))
        self._history, self._wandb_id = checkpoint.document("history"), state.get("wandb_id")
        self.evaluations = Evaluations(self.config.optim.early_stop_patience, self._history or ())

    def run(self, agreement: PreemptionGuard) -> Status:
        """Makes the remaining updates; between two logs the host only traces and dispatches steps.

        Before every step it asks `agreement` whether to stop. After a stop signal it saves and returns "preempted";
        after an early stop, also of an earlier launch, it returns "stopped"; after the last update "finished". The last
        checkpoint may not be durable yet.

        Raises:
            ValueError: training has diverged, an update was skipped with on_nan=stop, or the next update cannot be made
                (after a checkpoint is saved).
            OSError: a checkpoint or a log could not be written.
        """
        if self.evaluations.stopped:
            return "stopped"
        try:
            status = self._make_updates(agreement)
        except NextUpdateError as error:
            self._end_at_step(save=True)
            for writer in filter(None, (self.parts, self.checkpoints)):
                writer.wait()
            self.rt.barrier()  # a replica that ends with an error soon ends the others
            saved = f". The {self.step:,} updates before are saved: the run started again goes on there"
            raise ValueError(f"{error}{saved if self.step else ''}") from error
        self._end_at_step(save=status == "preempted")
        if self._saved < self.step:
            self._seconds = self._train_seconds()
        return status

    def _make_updates(self, agreement: PreemptionGuard) -> Status:
        """Makes the updates of `run`; does not save after a stop signal."""
        rt = self.rt
        status: Status = "finished"
        self._started = time.monotonic()
        if self.step < self.total and not self.updates.begin(self.step, agreement):
            return "preempted"
        if self.step == 0 and self.total and self.prepared.eval is not None and not self.updates.splits:
            self._evaluate_start()
        self.model.train()
        window, before = list(islice(self.updates.all(), self._logged, self.step)), rt.counters()
        self.mark("input", self.step + 1)
        for update, tokens, tensors in self.updates.after(self.step, agreement):
            if not agreement.should_run(update.step):
                status = "preempted"
                break
            step = self.step = update.step
            rate = self._dispatch(update, tensors, window_open=bool(window))
            window.append(update)
            self._rows, self._tokens = self._rows + update.rows, self._tokens + tokens
            if self._tracker is not None:
                self._tracker.tick(step)
            self._log()  # a log of an earlier step, while this step runs
            if step % self.config.tracking.logging_steps == 0 or step == self.total:
                now, sent = rt.counters(), time.monotonic()
                self._pending = _PendingLog(window, self.state.report, rate, before, now, self._tokens, sent)
                before, window = now, []
            evaluates, saves = self._evaluates(step), self._saves(step)
            if evaluates or saves:
                self._log()
                with self._tracker.untimed() if self._tracker else contextlib.nullcontext():
                    if evaluates:
                        self._evaluate(step)
                        status = "stopped" if self.evaluations.stopped else status
                    if saves or self._is_kept:
                        self._save(anyway=self._is_kept or step == self.total)
                before = before if window else rt.counters()
            for writer in filter(None, (self.parts, self.checkpoints)):
                writer.poll()
            if status == "stopped":
                break
            self.mark("input", step + 1)
        return status

    def _end_at_step(self, save: bool) -> None:
        """Writes the pending log and, if `save`, a checkpoint of the present step unless it is saved."""
        self._log()
        if save and self._saved < self.step:
            self._save(anyway=True)

    def _dispatch(self, update: Update, tensors: list[Tensors], window_open: bool) -> float:
        """Sends the batches of an update, one per pass, and dispatches its step; returns the schedule's learning rate.

        Without batches the weights do not change. If not `window_open`, the step restarts the sums for the log.
        """
        rt, optim, step = self.rt, self.config.optim, update.step
        self.mark("step", step)
        rate = learning_rate(step, self.total, optim, update.passes / self.plan.gradient_accumulation)
        # Without a batch the rate is 0: the moments alone must not change the weights.
        control = torch.tensor(Control(rate if tensors else 0.0, float(window_open), float(step)))
        *batches, sent = rt.to_device([*tensors, {"control": control}])
        seed_dropout(rt, self.config, step)
        if self._traced is not None:
            self._traced.train_step(batches, sent["control"])
        elif self._split is None:
            train_step(self.model, self.state, batches, sent["control"], self.objective, optim, rt)
        else:
            for batch in batches:
                self._split.accumulate(batch)
                rt.sync()
            self._split.apply(sent["control"])
        self.mark("dispatch", step)
        rt.sync()
        self.mark("host", step)
        return rate

    def _train_seconds(self) -> float:
        """Returns the seconds in `run` until now, earlier launches included."""
        return self._seconds + time.monotonic() - self._started

    # ----------------------------------------------------------------------------------------------------------- logs

    def _log(self) -> None:
        """Reads the pending log's sums, if any, from the device, writes the log, warns; raises as `_report_skipped`."""
        if self._pending is None:
            return
        pending, self._pending, asked = self._pending, None, time.monotonic()
        report = self._read(pending.report)
        # The time the host took to dispatch the next step, less the time it waited for the device.
        ahead = asked - pending.sent - (time.monotonic() - asked)
        skipped, weight = int(report.skipped), report.weight
        steps, good, last = len(pending.window), len(pending.window) - skipped, pending.window[-1]
        self._logged = last.step
        self.skipped += skipped
        sums = dict(zip(self.objective.extra, report.extra, strict=True))
        self.metrics["loss"] = report.loss / weight if weight else 0.0 if self._split else math.nan
        extra: dict[str, Any] = self.objective.means(sums, weight)
        reads = {f"{name}_per_step": (pending.now[name] - pending.before[name]) / steps
                 for name in ("host_syncs", "fallbacks") if name in pending.now}  # fmt: skip
        reads |= self._rates_of_groups(pending.rate)
        extra |= (measured := self.updates.metrics(pending.window))
        self.metrics |= {name: mean for name, mean in measured.items() if name == "reward"}
        if self._tracker is not None:
            self._tracker.log(
                last.step,
                loss=self.metrics["loss"],
                grad_norm=report.grad_norm / good if good else math.nan,
                lr=pending.rate,
                tokens=pending.tokens,
                compiles=pending.now.get("compiles", 0),
                epoch=self.updates.epoch_after(last),
                ahead=max(0.0, ahead),
                skipped=float(skipped),
                rows_per_update=last.rows,
                extra=extra,
                **reads,
                **peak_memory(self.rt, self.predicted_bytes),
            )
        if self.rt.rank == 0:
            for text in (
                *self._slowness.notice(pending.before, pending.now, steps),
                *self.updates.warnings(extra, last.step),
            ):
                _warn(text)
            if good and not weight and not self._split:
                _warn(
                    f"optim.objective={self.config.optim.objective} had the weight 0 in all updates up to step "
                    f"{last.step} since the last log, so their loss has no mean (nan). Let Sums.weight count the "
                    "tokens that the loss sums, and check which tokens it leaves out"
                )
        if skipped:
            self._report_skipped(pending.window, report)

    def _rates_of_groups(self, rate: float) -> dict[str, float]:
        """Returns "lr_embeddings" and "lr_b", the rates of parameters with an own rate; empty if there are none."""
        optim, plus, found = self.config.optim, self.config.lora.plus, dict[str, float]()
        if optim.embedding_learning_rate and optim.learning_rate:
            found["lr_embeddings"] = rate * optim.embedding_learning_rate / optim.learning_rate
        return found | ({"lr_b": rate * plus} if plus != 1 else {})

    def _read(self, report: torch.Tensor) -> UpdateSums:
        """Reads `TrainState.report` from the device, as numbers."""
        return UpdateSums.unpack(self.rt.to_host([report])[0].tolist())

    def _report_skipped(self, window: list[Update], report: UpdateSums) -> None:
        """Warns on rank 0 of skipped updates in `window`, the updates of a log with the sums `report`.

        Raises ValueError with on_nan=stop; or if the last 10 updates (or all of a shorter run) were skipped, and then
        withdraws the checkpoints from the step before these updates on.
        """
        optim, first = self.config.optim, int(report.first_skipped)
        update = next(update for update in window if update.step == first)
        rows = self.updates.places(update)
        rise = ""
        if optim.max_loss_rise and report.usual:
            rise = f" or explodes (more than {optim.max_loss_rise:g} above the mean {report.usual:.4g})"
        text = (
            f"{report.skipped:.0f} of {len(window)} updates had a loss or gradient that is not finite{rise}, the first "
            f"at step {first} with the rows {', '.join(rows[:_SHOWN_ROWS])}"
            f"{f' and {len(rows) - _SHOWN_ROWS} more' if len(rows) > _SHOWN_ROWS else ''} of "
            f"{', '.join(str(one.source) for one in self.config.data.by_source)}, counted from 0"
        )
        if optim.on_nan == "stop":
            raise ValueError(f"{text}. Look at these rows, lower optim.learning_rate, or set optim.on_nan=skip")
        if report.streak >= min(_DIVERGED, self.total):  # a short run may have no other updates
            begun = window[-1].step - int(report.streak) + 1
            if begun == 1:
                raise ValueError(
                    f"nothing was learned: {text}, and all were skipped from step 1 on. Look at these rows, and at the "
                    "model: its weights or the objective may produce numbers that are not finite"
                )
            if self.checkpoints is not None:  # the weights of this checkpoint made the loss explode
                self.checkpoints.withdraw(begun - 1)
            raise ValueError(
                f"training has diverged: {text}, and the last {report.streak:.0f} updates, from step {begun} on, were "
                f"all skipped. Look at these rows, or start anew with a lower optim.learning_rate: {ANEW}"
            )
        if self.rt.rank == 0:
            _warn(f"{text}; they were skipped")

    # ---------------------------------------------------------------------------------------------------- evaluations

    def _evaluates(self, step: int) -> bool:
        """Whether to evaluate held-out rows, if any, after a step: every `optim.eval_steps`, and after the last.

        eval_steps below 1 is a share of the run. Rollouts evaluate only with tracking.eval_generate_rows.
        """
        every = self.config.optim.eval_steps
        if every is not None and every < 1:
            every = max(1, round(every * self.total))
        if self.updates.splits and not self.config.tracking.eval_generate_rows:  # rollouts have no held-out loss
            return False
        return self.prepared.eval is not None and (step == self.total or (every is not None and step % every == 0))

    def _evaluate_start(self) -> None:
        """Measures and logs the held-out loss before the first update, with the program of later evaluations."""
        with self._tracker.untimed() if self._tracker else contextlib.nullcontext():
            self.model.eval()
            self.updates.evaluating()
            (loss, by_source), objective = self._held_out_loss(), self.config.optim.objective
        if self._tracker is not None:
            vocabulary = models.text_config(self.model).vocab_size if objective == "supervised" else None
            self._tracker.log_start(loss, vocabulary, by_source)
            for text in self.updates.warnings(by_source, 0):
                _warn(text)

    def _evaluate(self, step: int) -> None:
        """Evaluates the weights, or their average; logs the result and adds it to `evaluations`."""
        self.model.eval()
        with self.state.averaged():
            self.updates.evaluating()
            loss, by_source = (math.nan, {}) if self.updates.generator else self._held_out_loss()
            accuracy, others = self._held_out_accuracy() if self.config.tracking.eval_generate_rows else (None, {})
            self.updates.evaluated(step)
        self.model.train()
        share = accuracy.share if accuracy else None
        if self._tracker is not None:
            interval = (accuracy.low, accuracy.high) if accuracy else None
            self._tracker.log_eval(step, loss=loss, accuracy=share, interval=interval, by_source=by_source | others)
        self.evaluations.add(step, loss, share, by_source | others)

    def _held_out_loss(self) -> tuple[float, dict[str, float]]:
        """Returns the held-out loss (NaN without weight), and by name a mix's "loss/NAME" and the objective's means."""
        assert self.prepared.eval is not None
        rt, parts, each = self.rt, self.prepared.eval_parts(), list[torch.Tensor]()
        extra = self.objective.extra if self.objective.measures_held_out else ()
        for rows in parts.values():
            each.append(sums := self._on_device((0.0,) * (2 + len(extra))))
            for batch in eval_batches(self.prepared.eval, rt.data_shards, rt.data_size, self.plan.batch_size, rows):
                (sent,) = rt.to_device([batch])
                if self._traced is not None:
                    self._traced.eval_step(sent, sums)
                else:
                    eval_step(self.model, sent, sums, self.objective, rt)
                rt.sync()
        totals = [one.tolist() for one in rt.to_host(each)]
        every = [sum(column) for column in zip(*totals, strict=True)]
        *losses, mean = (total / count if count else math.nan for total, count, *_ in (*totals, every))
        more = self.objective.means(dict(zip(extra, every[2:], strict=True)), every[1]) if extra else {}
        return mean, {f"loss/{name}": loss for name, loss in zip(parts, losses, strict=True) if name} | more

    def _held_out_accuracy(self) -> tuple[Accuracy, dict[str, float]]:
        """Returns the accuracy on held-out rows with an expected answer, and "accuracy/NAME" of a mix's sources."""
        sums = self._on_device(self._count_correct())
        self.rt.all_reduce([sums])
        self.rt.sync()
        counts = self.rt.to_host([sums])[0].tolist()
        every, *others = (Accuracy.of(int(a), int(b)) for a, b in zip(counts[::2], counts[1::2], strict=True))
        names = self.prepared.eval_mix.names if self.prepared.eval_mix else ()
        return every, {f"accuracy/{name}": one.share for name, one in zip(names, others, strict=True) if one.total}

    def _on_device(self, sums: tuple[float, ...]) -> torch.Tensor:
        """Copies numbers to the device as an fp32 tensor, (N,)."""
        return self.rt.to_device([{"sums": torch.tensor(sums, dtype=torch.float32)}])[0]["sums"]

    def warning(self, final: Mapping[str, float]) -> str:
        """Explains, on rank 0, why the run seems to have learned nothing, from its final metrics; else empty."""
        return not_learned(self._tracker.history, final, self.total) if self._tracker is not None else ""

    def results(self) -> dict[str, float]:
        """Returns the last log's loss, the evaluation of the resulting weights, train_seconds and skipped_updates."""
        measured = {**self.metrics, **self.evaluations.figures(self._chosen_step)}
        return {**measured, "train_seconds": self._seconds, "skipped_updates": float(self.skipped)}

    @property
    def _chosen_step(self) -> int | None:
        """The step of the best evaluation, whose weights are the result; None if the last weights are the result."""
        return (self.evaluations.best_step or None) if self.config.optim.eval_steps is not None else None

    def weights(self) -> Tensors:
        """Returns the resulting weights, or their average, on the CPU by name; raises ValueError as `weights_of`.

        With optim.eval_steps the result is from the step of the best evaluation, if there is one; otherwise it is from
        the last step. An earlier step is read from its checkpoint. Call it on rank 0, after the last checkpoint is
        durable.
        """
        chosen = self._chosen_step or self.step
        if self.parts is not None or chosen != self.step:
            return weights_of(chosen, self.config)
        named = self.state.average or self.state.params
        values = self.rt.to_host(list(named.values()))
        return unstacked(self.state.stacks, dict(zip(named, values, strict=True)))

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def _saves(self, step: int) -> bool:
        """Whether to save after a step, by `checkpoint`'s settings, at the end, or because a save was postponed."""
        every = self.config.checkpoint.save_steps
        return step % every == 0 or step == self.total or self._postponed or self._is_due()

    def _is_due(self) -> bool:
        """Whether `checkpoint.save_minutes`, if set, have passed by rank 0's clock, which decides for all hosts."""
        if (minutes := self.config.checkpoint.save_minutes) is None:
            return False
        due = torch.tensor([float(self.rt.rank == 0 and time.monotonic() - self._saved_at >= 60 * minutes)])
        if self.parts is not None:
            self.rt.all_reduce([due])
        return bool(due)

    @property
    def _is_kept(self) -> bool:
        """Whether to save the present step in any case: it has the best evaluation, or the run stops early."""
        return self.evaluations.best_step == self.step or self.evaluations.stopped

    def _save(self, anyway: bool) -> None:
        """Starts to write a checkpoint; the loop waits only for the copy from the device.

        Args:
            anyway: whether to save even if the last update was skipped; if not, the save waits for an applied update.
        """
        if self.checkpoints is None and self.parts is None:
            return
        tensors = self.state.to_host(self.rt) if self.parts is None else {}
        report = UpdateSums.unpack(tensors["report"].tolist()) if tensors else self._read(self.state.report)
        self._postponed = report.streak > 0 and not anyway
        if self._postponed:  # the weights may make the loss explode: wait for an applied update
            return
        self._seconds, self._started = self._train_seconds(), time.monotonic()
        self._saved, self._saved_at = self.step, self._started
        attempt, files, documents = None, dict[str, Tensors](), dict[str, Any]()
        if self.parts is not None:
            shards, documents["layout"] = self.state.part(self.rt)
            attempt = self.parts.save(self.step, shards)
        if self.checkpoints is None:
            return
        assert self._tracker is not None
        finite = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        state = {
            "logged": self._logged, "rows": self._rows, "tokens": self._tokens, "skipped": self.skipped,
            "train_seconds": self._seconds, "metrics": finite,
            "fingerprint": self.record.fingerprint, "rows_digest": self.record.rows_digest,
            "global_batch_size": self.record.global_batch_size, "shards": self.record.shards,
            "versions": self.record.versions, "wandb_id": self._tracker.wandb_id,
            "turns": self.prepared.encoder and self.prepared.encoder.layout.turns_by,
        }  # fmt: skip
        if attempt is None:
            stored = sections(tensors)
            files, documents = result_files(self.model, stored.get("average", stored["parameters"]), self.config)
            files["training"] = tensors
        documents |= {"updates": self.updates.document(self.step)} if self.updates.keeps_state else {}
        documents |= {"state": state, "config": self.config.to_dict(), "history": self._tracker.history}
        documents |= self.record.identities
        metrics = {**self.metrics, **self.evaluations.figures(self.step)}
        metrics.pop("eval_step", None)
        best = self.evaluations.best_step == self.step
        self.checkpoints.save(self.step, files, documents, metrics, best=best, attempt=attempt)


def seed_dropout(rt: Runtime, config: TrainConfig, step: int) -> None:
    """Seeds the dropout of adapters and of the model for a step, so that a resumed run draws the same numbers."""
    rank = rt.rank if active_mesh().size == 1 else 0  # all processes of a mesh run one program
    rt.seed(int(np.random.SeedSequence([config.optim.seed, rank, step]).generate_state(1)[0]))


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
