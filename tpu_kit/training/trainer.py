"""The loop of one replica: batches, steps, readings, evaluations, checkpoints, and how it ends.

On XLA a step is one program: the loop sends its batch, traces it, cuts, and goes on. It reads the device only where it
logs, evaluates or saves, and a log is read while the next step runs.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch

from tpu_kit.checkpointing.manager import CheckpointManager
from tpu_kit.checkpointing.manifest import Checkpoint
from tpu_kit.config.loader import BatchPlan, TrainConfig
from tpu_kit.data.batching import Update, deal, learning_rate, prefetch, rows_of, updates
from tpu_kit.data.prepare import Prepared
from tpu_kit.distributed.preemption import PreemptionGuard
from tpu_kit.distributed.runtime import Runtime
from tpu_kit.hardware.host import chip_name, chips_of
from tpu_kit.models.layer_scan import unstacked
from tpu_kit.training.adapter_io import adapter_settings, adapter_tensors
from tpu_kit.training.held_out import held_out_accuracy, held_out_loss
from tpu_kit.training.memory_monitor import MemoryMonitor
from tpu_kit.training.metrics import RecompileMonitor, Tracker, best_evaluation, model_flops_per_token
from tpu_kit.training.objectives import Objective
from tpu_kit.training.resume import versions
from tpu_kit.training.state import TrainState, sections
from tpu_kit.training.step import train_step

Tensors = dict[str, torch.Tensor]
Status = Literal["finished", "stopped", "preempted"]
_DIVERGED = 10  # updates skipped one after the other, after which training is not going to recover


@dataclass(frozen=True)
class _Reading:
    """A log that is due: what the host knows of it, and what the device is still to tell."""

    window: list[Update]
    report: torch.Tensor
    rate: float
    before: dict[str, int]
    now: dict[str, int]
    tokens: int
    sent: float  # seconds: when its last step was


class Trainer:
    """What one replica does between set-up and the end, and what it remembers between steps.

    A context manager, for the trackers of rank 0.

    Attributes:
        step: updates done.
        metrics: the newest loss, nats per loss token.
        skipped: updates that were skipped.
        best: the weights of the best evaluation, on the CPU, by their names where layers are not stacked; None where
            only the last ones count.
        peaks: the memory that was measured.
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
        checkpoints: CheckpointManager | None,
        predicted_bytes: int | None = None,
    ) -> None:
        self.config, self.rt, self.model = config, rt, model
        self.objective, self.state = objective, state
        self.prepared, self.plan, self.checkpoints = prepared, plan, checkpoints
        self.peaks = MemoryMonitor(config, rt, predicted_bytes)
        self.total = sum(1 for _ in self._updates())
        self.step, self.skipped = 0, 0
        self.metrics: dict[str, float] = {}
        self.best: Tensors | None = None
        self._logged = 0  # the step of the last log
        self._rows, self._tokens = 0, 0  # taken so far; the tokens without padding
        self._seconds = 0.0  # of `run`, in earlier launches
        self._started = time.monotonic()
        self._evaluations: list[dict[str, Any]] = []  # as `Tracker.log_eval` returns them
        self._due: _Reading | None = None
        self._saved, self._saved_at = 0, time.monotonic()  # the step of the last checkpoint
        self._postponed, self._slowness = False, RecompileMonitor()
        self._history: list[dict[str, Any]] | None = None
        self._tracker: Tracker | None = None

    def __enter__(self) -> Trainer:
        if self.rt.rank == 0:
            self._tracker = Tracker(
                self.config,
                self.config.output_path,
                self.step,
                self._history,
                resume_tokens=self._tokens,
                total_steps=self.total,
                flops_per_token=model_flops_per_token(self.model, self.config.data.max_length),
                chip_name=chip_name(self.rt.device_type),
                num_chips=chips_of(self.rt.device_type, self.rt.world_size),
            )
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._tracker is not None:
            self._tracker.close(failed=error is not None)

    def resume(self, found: Checkpoint, saved: Tensors) -> None:
        """Goes on from a checkpoint whose tensors the state has already.

        Raises:
            ValueError: the updates before it had other rows, so that rows would be left out or repeated.
        """
        state = found.document("state")
        rows = sum(update.rows for update in islice(self._updates(), found.step))
        # An earlier tpu_kit kept the tokens alone, with padding.
        before = state["rows"] if "rows" in state else state["tokens"] // self.config.data.max_length
        if found.step <= self.total and rows != before:
            raise ValueError(
                f"{found.path} is of another run: its {found.step} updates took {before:,} rows, and those of this "
                f"configuration take {rows:,}. As the batch grows (optim.batch_growth_factor), rows per pass x "
                "replicas must stay what they were: set optim.batch_size and launch.num_replicas back"
            )
        self.step = self._saved = found.step
        self._logged, self._rows, self._tokens = state["logged"], rows, state["tokens"]
        self._seconds = state.get("train_seconds", 0.0)  # an earlier tpu_kit did not keep it
        self.skipped = state["skipped"]
        logged = {name: value for name, value in state["metrics"].items() if name == "loss"}
        self.metrics = {name: math.nan if value is None else value for name, value in logged.items()}
        self._history = found.document("history")
        self._evaluations = [record for record in self._history or () if record["kind"] == "eval"]
        self.best = sections(saved).get("best")
        chooses = self.config.optim.eval_steps is not None and self.rt.rank == 0
        if self.best is None and chooses and self._best_step == found.step:
            self.best = self._trained()  # evaluated at what was the end, by a run that kept no best weights

    def run(self, agreement: PreemptionGuard) -> Status:
        """Makes the updates that are left; the steps between two logs only trace and send.

        Args:
            agreement: asked before each step; where it says no, the run saves and ends as preempted.

        Returns:
            How it ended: "stopped" at once where the run that is resumed was stopped early.
        """
        if self.stopped:
            return "stopped"
        config, rt, optim = self.config, self.rt, self.config.optim
        self.model.train()
        window = list(islice(self._updates(), self._logged, self.step))
        keep, before, self._started = float(bool(window)), rt.counters(), time.monotonic()
        status: Status = "finished"
        for update, tokens, tensors in prefetch(self._batches()):
            if not agreement.should_run(update.step):
                status = "preempted"
                break
            step = self.step = update.step
            rate = learning_rate(step, self.total, optim, update.passes / self.plan.gradient_accumulation)
            *batches, control = rt.place_batch([*tensors, {"control": torch.tensor([rate, keep, float(step)])}])
            seed_dropout(rt, config, step)
            train_step(self.model, self.state, batches, control["control"], self.objective, optim, rt)
            rt.sync()
            keep = 1.0
            window.append(update)
            self._rows, self._tokens = self._rows + update.rows, self._tokens + tokens
            if self._tracker is not None:
                self._tracker.tick(step)
            self._log()  # of a step before, while this one runs
            if step % config.tracking.logging_steps == 0 or step == self.total:
                now = rt.counters()
                self._due = _Reading(window, self.state.report, rate, before, now, self._tokens, time.monotonic())
                keep, before, window = 0.0, now, []
            evaluates, saves = self._evaluates(step), self._saves(step)
            if evaluates or saves:
                agreement.pause()
                self._log()
                with self._tracker.untimed() if self._tracker else contextlib.nullcontext():
                    if evaluates:
                        self._evaluate(step)
                        status = "stopped" if self.stopped else status
                    if saves or self._is_kept:
                        self._save()
                before = before if window else rt.counters()
            if self.checkpoints is not None:
                self.checkpoints.poll()
            if status == "stopped":
                break
        agreement.pause()
        self._log()
        if status == "preempted" and self._saved < self.step:
            self._save()
        if self._saved < self.step:
            self._seconds = self._train_seconds()
        return status

    def _train_seconds(self) -> float:
        """Seconds of `run` until now, those of the launches before included."""
        return self._seconds + time.monotonic() - self._started

    def _updates(self) -> Iterator[Update]:
        return updates(len(self.prepared.train), self.plan, self.config.optim)

    def _batches(self) -> Iterator[tuple[Update, int, list[Tensors]]]:
        """Every update, its tokens on all replicas without padding, this replica's tensors; made ahead by a thread."""
        rows = self.prepared.train
        for update in islice(self._updates(), self.step, None):
            taken = rows_of(update, len(rows), self.config.data)
            mine = deal(taken, update, self.plan, self.rt.data_rank)
            yield update, int(rows.row_tokens[taken].sum()), [rows.tensors(part) for part in mine]

    # ----------------------------------------------------------------------------------------------------------- logs

    def _log(self) -> None:
        """Reads the sums of the log that is due, if one is.

        Raises:
            ValueError: updates were skipped, and `on_nan` says to stop then, or there were too many in a row.
        """
        if self._due is None:
            return
        due, self._due, asked = self._due, None, time.monotonic()
        (report,) = self.rt.to_host([due.report])
        ahead = asked - due.sent - (time.monotonic() - asked)  # sending a later step took longer than this one ran
        loss, weight, norm, skipped, bad, *sums, usual, streak = report.tolist()
        steps, good, last = len(due.window), len(due.window) - int(skipped), due.window[-1]
        self._logged = last.step
        self.skipped += int(skipped)
        self.metrics["loss"] = loss / weight if weight else math.nan
        extra = {
            name: one / weight if weight else math.nan for name, one in zip(self.objective.extra, sums, strict=True)
        }
        rates: dict[str, Any] = {
            f"{name}_per_step": (due.now[name] - due.before[name]) / steps
            for name in ("host_syncs", "fallbacks")
            if name in due.now
        }
        self.peaks.note()
        if self._tracker is not None:
            used, limit = self.rt.memory()
            self._tracker.log(
                last.step,
                loss=self.metrics["loss"],
                grad_norm=norm / good if good else float("nan"),
                lr=due.rate,
                tokens=due.tokens,
                compiles=due.now.get("compiles", 0),
                epoch=last.epoch + (last.first_row + last.rows) / len(self.prepared.train),
                device_bytes=used,
                device_limit_bytes=limit,
                ahead=max(0.0, ahead),
                skipped=skipped,
                rows_per_update=last.rows,
                **extra,
                **rates,
                **self.peaks.read(),
            )
        if self.rt.rank == 0:
            for text in self._slowness.notice(due.before, due.now, steps):
                print(f"warning: {text}", file=sys.stderr, flush=True)
        if skipped:
            self._judge(due.window, int(skipped), int(bad), usual, streak)

    def _judge(self, window: list[Update], skipped: int, bad: int, usual: float, streak: float) -> None:
        """Warns of skipped updates, or ends the training because of them."""
        optim = self.config.optim
        update = next(update for update in window if update.step == bad)
        data = self.prepared.train
        packed = rows_of(update, len(data), self.config.data)
        rows = sorted({row for number in packed for row in data.source_rows(number)})
        rise = optim.max_loss_rise and f" or explodes (more than {optim.max_loss_rise:g} above the usual {usual:.4g})"
        text = (
            f"{skipped} of {len(window)} updates had a loss or gradient that is not finite{rise or ''}, the first at "
            f"step {bad} with the rows {_some(rows)} of {self.config.data.source}"
        )
        if optim.on_nan == "stop":
            raise ValueError(f"{text}. Look at these rows, lower optim.learning_rate, or set optim.on_nan=skip")
        if streak >= _DIVERGED:
            begun = window[-1].step - int(streak) + 1
            if self.checkpoints is not None:  # what the update before it has left is what exploded
                self.checkpoints.withdraw(begun - 1)
            raise ValueError(
                f"training has diverged: {text}, and the last {streak:.0f} updates, from step {begun} on, were all "
                "skipped. Look at these rows, or start anew with a lower optim.learning_rate: another output_dir, or "
                "checkpoint.resume=never (which moves the old checkpoints aside)"
            )
        if self.rt.rank == 0:
            print(f"warning: {text}; they were skipped", file=sys.stderr, flush=True)

    # ---------------------------------------------------------------------------------------------------- evaluations

    def _evaluates(self, step: int) -> bool:
        if self.prepared.eval is None:
            return False
        every = self.config.optim.eval_steps
        return step == self.total or (every is not None and step % every == 0)

    def _evaluate(self, step: int) -> None:
        """Measures the loss of the held-out rows; keeps the best weights."""
        about = (self.model, self.state, self.prepared)
        loss = held_out_loss(*about, self.plan.batch_size, self.objective, self.rt)
        accuracy = None
        if self.config.tracking.eval_generate_rows:
            accuracy = held_out_accuracy(*about, self.config, self.rt)
        if self._tracker is not None:
            self._tracker.log_eval(step, loss=loss, accuracy=accuracy)
        finite = {n: v for n, v in (("loss", loss), ("accuracy", accuracy)) if v is not None and math.isfinite(v)}
        self._evaluations.append({"kind": "eval", "step": step, "loss": None, "accuracy": None, **finite})
        keeps_best = self.config.optim.eval_steps is not None or self.best is not None
        if self._best_step == step and keeps_best and self.rt.rank == 0:
            self.best = self._trained()

    @property
    def _best_step(self) -> int:
        """The step of the best evaluation; 0 where there is none."""
        best = best_evaluation(self._evaluations)
        return best["step"] if best else 0

    @property
    def _worse(self) -> int:
        """Evaluations since the best one."""
        return sum(one["step"] > self._best_step for one in self._evaluations)

    @property
    def stopped(self) -> bool:
        """Whether `optim.early_stop_patience` ends the run here; a function of the evaluations, which are saved."""
        patience = self.config.optim.early_stop_patience
        return patience is not None and self._worse >= patience

    def why_stopped(self) -> str:
        """What `stopped` found."""
        best = best_evaluation(self._evaluations)
        than = f"better than that of step {best['step']} ({best['loss']:.6g})" if best else "a number"
        return f"none of the last {self._worse} evaluations was {than}"

    def weights(self) -> tuple[Tensors, dict[str, float]]:
        """The weights to keep, on the CPU, and the metrics that belong to them; for rank 0."""
        newest = self._evaluations[-1] if self._evaluations else None
        evaluation = newest if self.best is None else best_evaluation(self._evaluations)
        metrics = {**self.metrics, **_figures(evaluation), "train_seconds": self._seconds}
        if evaluation is not None:
            metrics["eval_step"] = float(evaluation["step"])
        metrics["skipped_updates"] = float(self.skipped)
        return (self._trained() if self.best is None else self.best), metrics

    def _trained(self) -> Tensors:
        """The weights as they are now, on the CPU, layer by layer: the average where there is one."""
        if self.state.average is not None:
            named = self.state.named(self.rt.to_host(list(self.state.average.values())))
        else:
            values = self.rt.to_host(list(self.state.parameters.values()))
            named = dict(zip(self.state.parameters, values, strict=True))
        return unstacked(self.state.stacks, named)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def _saves(self, step: int) -> bool:
        minutes = self.config.checkpoint.save_minutes
        return (
            step % self.config.checkpoint.save_steps == 0
            or step == self.total
            or self._postponed
            or (minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes)
        )

    @property
    def _is_kept(self) -> bool:
        """Whether this step is saved whenever checkpoints are: it is the best by evaluation, or an early stop."""
        return self._best_step == self.step or self.stopped

    def _save(self) -> None:
        """Starts to write a checkpoint; the loop pays for the copy from the device alone."""
        if self.checkpoints is None:
            return
        assert self._tracker is not None
        tensors = self.state.to_host(self.rt)
        self._postponed = bool(tensors["streak"]) and not self._is_kept
        if self._postponed:  # the weights may be what makes the loss explode: wait for an update that is applied
            return
        self._seconds, self._started = self._train_seconds(), time.monotonic()
        self._saved, self._saved_at = self.step, self._started
        stored = sections(tensors)
        tensors |= {f"best/{name}": tensor for name, tensor in (self.best or {}).items()}
        files = {"training": tensors}
        state = {
            "logged": self._logged, "rows": self._rows, "tokens": self._tokens, "skipped": self.skipped,
            "train_seconds": self._seconds,
            "metrics": {name: value if math.isfinite(value) else None for name, value in self.metrics.items()},
            "fingerprint": self.prepared.fingerprint, "global_batch_size": self.plan.global_batch_size,
            "versions": versions(),
        }  # fmt: skip
        documents: dict[str, Any] = {"state": state, "config": self.config.to_dict(), "history": self._tracker.history}
        if hasattr(self.model, "peft_config"):
            files["adapter_model"] = adapter_tensors(self.model, stored.get("average", stored["parameters"]))
            documents["adapter_config"] = adapter_settings(self.model, self.config)
        evaluated = next((one for one in self._evaluations if one["step"] == self.step), None)
        metrics = {**self.metrics, **_figures(evaluated)}
        self.checkpoints.save(self.step, files, documents, metrics, best=self._best_step == self.step)


def _figures(evaluation: dict[str, Any] | None) -> dict[str, float]:
    """What an evaluation measured, by the names of `TrainResult.metrics`."""
    if evaluation is None:
        return {}
    loss, accuracy = evaluation["loss"], evaluation["accuracy"]
    found = {"eval_loss": math.nan if loss is None else loss}
    return found if accuracy is None else {**found, "eval_accuracy": accuracy}


def seed_dropout(rt: Runtime, config: TrainConfig, step: int) -> None:
    """Gives dropout its random numbers: a function of seed, rank and step alone, so a resumed run draws the same."""
    if config.lora.dropout:
        rt.seed(int(np.random.SeedSequence([config.optim.seed, rt.rank, step]).generate_state(1)[0]))


def _some(rows: list[int], most: int = 20) -> str:
    shown = ", ".join(map(str, rows[:most]))
    return shown if len(rows) <= most else f"{shown} and {len(rows) - most} more"
