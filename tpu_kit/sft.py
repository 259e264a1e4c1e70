"""train(config): supervised fine-tuning, the one loop for every backend.

`train` runs in the calling process and starts `fine_tune` in every replica. On XLA a step is one program: the loop
sends its batch, traces it, cuts, and goes on; it reads the device only where it logs, evaluates or saves.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tpu_kit import chips, runtime
from tpu_kit import model as models
from tpu_kit.adapter import adapter_settings, adapter_tensors, save_adapter
from tpu_kit.checkpoint import Checkpoints
from tpu_kit.config import BatchPlan, TrainConfig, batch_arithmetic
from tpu_kit.data import Prepared, prepare
from tpu_kit.launch import launch
from tpu_kit.machine import Machine
from tpu_kit.manifest import Checkpoint
from tpu_kit.packing import eval_batches, permutation, prefetch
from tpu_kit.resume import check_resume, find_checkpoint, versions
from tpu_kit.runtime import Runtime
from tpu_kit.schedule import Update, learning_rate, updates
from tpu_kit.step import WINDOW, TrainState, eval_step, restore, train_step
from tpu_kit.tracking import Tracker, check_tracking, model_flops_per_token

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        status: "finished"; "stopped" (early, by a rule of the configuration); "preempted": run it again to go on.
        step: updates done.
        metrics: loss (of the last window), eval_loss, and what was measured beside them; see `fine_tune`.
        adapter_dir: the trained weights: an adapter as PEFT loads it, or a whole model where lora.r=0.
        checkpoint_dir: the newest checkpoint; None where none was written.
        output_dir: the run's folder.
    """

    status: Literal["finished", "preempted", "stopped"]
    step: int
    metrics: dict[str, float]
    adapter_dir: str
    checkpoint_dir: str | None
    output_dir: str

    def __str__(self) -> str:
        lines = [f"{self.status} at step {self.step}; adapter in {self.adapter_dir}"]
        return "\n".join([*lines, *(f"  {name:<18}{value:.6g}" for name, value in self.metrics.items())])


def train(config: TrainConfig) -> TrainResult:
    """Fine-tunes as `config` says, on all its devices, and returns when the result is on disk.

    With `tracking.generate_rows` the base and the tuned model also answer held-out rows, and eval.json says how well.

    Raises:
        ValueError: the configuration, the data or the machine do not allow the run.
        LaunchError: a replica failed.
    """
    check_tracking(config)
    folder = _output_folder(config)
    (folder / "config.yaml").write_text(config.to_yaml())
    result = launch(fine_tune, config)
    assert result is not None, "rank 0 returns it"
    if config.tracking.generate_rows and result.status != "preempted":
        result = replace(result, metrics={**result.metrics, **_answer(config, result)})
    return result


def _output_folder(config: TrainConfig) -> Path:
    folder = config.output_path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"output_dir={folder} cannot be written to ({error.strerror}): set output_dir to a folder that can"
        ) from error
    return folder


def _answer(config: TrainConfig, result: TrainResult) -> dict[str, float]:
    """Lets the base and the tuned model answer the same held-out rows; prints, writes and returns the accuracies."""
    from tpu_kit import evaluate

    tokenizer = models.load_tokenizer(config.model)
    prepared = prepare(config.data, tokenizer)
    count = config.tracking.generate_rows
    rows, prompts = prepared.eval_rows[:count], prepared.eval_prompts[:count]
    base = evaluate.evaluate(config, rows, prompts)
    tuned = evaluate.evaluate(config, rows, prompts, result.adapter_dir)
    comparison = evaluate.compare(base, tuned)
    (Path(result.output_dir) / "eval.json").write_text(json.dumps(comparison.to_dict(), indent=2))
    print(comparison, flush=True)
    return {"accuracy_before": base.accuracy.share, "accuracy_after": tuned.accuracy.share}


# ------------------------------------------------------------------------------------------------------- in a replica

_shared: list[tuple[Prepared, torch.nn.Module, Any]] = []
_shared_lock = threading.Lock()


def _load(config: TrainConfig, rt: Runtime) -> tuple[Prepared, torch.nn.Module, Any]:
    """Data, model and tokenizer; made once where replicas are threads of one process, which ends with the launch."""
    if rt.device_type != "xla-cpu":
        return _make(config)
    with _shared_lock:
        if not _shared:
            _shared.append(_make(config))
    prepared, model, tokenizer = _shared[0]
    # A thread takes a copy: moved to its device, the model itself would be gone for the others.
    return prepared, copy.deepcopy(model), tokenizer


def _make(config: TrainConfig) -> tuple[Prepared, torch.nn.Module, Any]:
    tokenizer = models.load_tokenizer(config.model)
    model = models.load_model(config.model, config.lora, seed=config.optim.seed)
    models.check_vocabulary(model, tokenizer)
    text = models.text_config(model)
    prepared = prepare(
        config.data,
        tokenizer,
        model_positions=getattr(text, "max_position_embeddings", None),
        vocab_size=text.vocab_size,
    )
    return prepared, model, tokenizer


def fine_tune(config: TrainConfig) -> TrainResult | None:
    """Trains in one replica; rank 0 returns the result.

    Its metrics: loss and eval_loss (nats per loss token), train_seconds, skipped_updates, and on XLA compiles (programs
    that this process compiled).
    """
    rt = runtime.current()
    optim = config.optim
    prepared, model, tokenizer = _load(config, rt)
    plan = batch_arithmetic(config, rt.world_size)
    total = sum(1 for _ in updates(len(prepared.train), plan, optim))
    folder = config.output_path / "checkpoints"
    if rt.rank == 0:
        print(prepared.report)
        print(f"model            {models.count_parameters(model)}")
        print(f"batch            {plan}; {total} updates", flush=True)

    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(folder, config.checkpoint.keep)) if rt.rank == 0 else None
        found = find_checkpoint(config, checkpoints)
        rt.barrier()  # rank 0 has set damaged ones aside
        found = found if checkpoints else find_checkpoint(config, None)
        saved = found.tensors("training") if found else None
        if found and saved:
            check_resume(found, config, plan.global_batch_size, prepared.fingerprint, quiet=rt.rank != 0)
            restore(model, saved)

        models.use_attention(model, config.model.attention, rt.device_type)
        if optim.remat == "full":
            models.enable_remat(model, rt.device_type)
        models.to_device(model, rt.local_device)
        state = TrainState(model, rt.local_device, optim.ema_decay > 0, saved)
        rt.sync()
        rt.barrier()

        run = _Run(config, rt, model, state, prepared, plan, total, checkpoints)
        if found and saved:
            run.resume(found, saved)
        stack.enter_context(run)
        status = run.loop()
        return run.finish(status, tokenizer) if rt.rank == 0 else None


class _Run:
    """The loop of one replica, and what it remembers between steps."""

    def __init__(
        self,
        config: TrainConfig,
        rt: Runtime,
        model: torch.nn.Module,
        state: TrainState,
        prepared: Prepared,
        plan: BatchPlan,
        total: int,
        checkpoints: Checkpoints | None,
    ) -> None:
        self.config, self.rt, self.model, self.state = config, rt, model, state
        self.prepared, self.plan, self.total = prepared, plan, total
        self.checkpoints = checkpoints
        self.step = 0
        self.logged = 0  # the step of the last reading
        self.metrics: dict[str, float] = {}
        self.tokens = 0
        self.best_loss, self.worse = float("inf"), 0  # evaluations since the best one
        self.best: Tensors | None = None
        self.skipped = 0
        self.tracker: Tracker | None = None

    def __enter__(self) -> _Run:
        if self.rt.rank == 0:
            self.tracker = Tracker(
                self.config,
                self.config.output_path,
                self.step or None,
                resume_tokens=self.tokens,
                total_steps=self.total,
                flops_per_token=model_flops_per_token(self.model, self.config.data.max_length),
                chip_name=chip_name(self.rt),
                num_chips=chips_of(self.rt),
            )
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.tracker is not None:
            self.tracker.close(failed=error is not None)

    def resume(self, found: Checkpoint, saved: Tensors) -> None:
        """Goes on from a checkpoint whose tensors the state has already."""
        state = found.document("state")
        self.step, self.logged, self.tokens = found.step, state["logged"], state["tokens"]
        self.best_loss, self.worse, self.skipped = state["best_loss"] or math.inf, state["worse"], state["skipped"]
        self.metrics = {name: math.nan if value is None else value for name, value in state["metrics"].items()}
        if "best" in saved:
            self.best = self.state.split(saved["best"])

    def loop(self) -> Literal["finished", "stopped"]:
        """Runs the updates that are left; the steps between two readings of the device only trace and send."""
        config, rt, optim = self.config, self.rt, self.config.optim
        self.model.train()
        window = deque(islice(self._updates(), self.logged, self.step))
        keep, before = float(bool(window)), rt.counters()
        start = time.monotonic()
        status: Literal["finished", "stopped"] = "finished"
        for update, tensors in prefetch(self._batches()):
            step = self.step = update.step
            rate = learning_rate(step, self.total, optim, update.passes / self.plan.gradient_accumulation)
            *batches, control = rt.send([*tensors, {"control": torch.tensor([rate, keep, float(step)])}])
            _seed(rt, config, step)
            train_step(self.model, self.state, batches, control["control"], optim, rt)
            rt.sync()
            keep = 1.0
            window.append(update)
            if self.tracker is not None:
                self.tracker.tick(step)
            if step % config.tracking.logging_steps == 0 or step == self.total:
                stop = self._log(window, rate, before)
                keep, before, self.logged = 0.0, rt.counters(), step
                window.clear()
                if stop:
                    raise ValueError(stop)
            with self.tracker.untimed() if self.tracker else contextlib.nullcontext():
                if self._evaluates(step) and self._evaluate(step):
                    status = "stopped"
                if step % config.checkpoint.save_steps == 0 or step == self.total or status == "stopped":
                    self._save()
            before = rt.counters() if not window else before
            if status == "stopped":
                break
        self.metrics["train_seconds"] = self.metrics.get("train_seconds", 0.0) + time.monotonic() - start
        return status

    def _updates(self) -> Iterator[Update]:
        return updates(len(self.prepared.train), self.plan, self.config.optim)

    def _batches(self) -> Iterator[tuple[Update, list[Tensors]]]:
        """This replica's tensors of every update; made ahead by a thread."""
        rows, rt = self.prepared.train, self.rt
        for update in islice(self._updates(), self.step, None):
            mine = self._rows(update).reshape(update.passes, rt.world_size, self.plan.batch_size)[:, rt.rank]
            yield update, [rows.tensors(part) for part in mine]

    def _rows(self, update: Update) -> np.ndarray:
        data = self.config.data
        order = permutation(len(self.prepared.train), data.seed, update.epoch, data.shuffle)
        return order[update.first_row : update.first_row + update.rows]

    def _log(self, window: deque[Update], rate: float, before: dict[str, int]) -> str:
        """Reads the window's sums; returns why to stop, or nothing."""
        now = self.rt.counters()  # before the read, which is not a step's
        (sums,) = self.rt.to_host([self.state.window])
        loss, tokens, norm, skipped, bad = dict(zip(WINDOW, sums.tolist(), strict=True)).values()
        steps, good = len(window), len(window) - int(skipped)
        self.tokens += sum(update.rows for update in window) * self.config.data.max_length
        self.skipped += int(skipped)
        self.metrics["loss"] = loss / tokens if tokens else float("nan")
        last = window[-1]
        rates: dict[str, Any] = {
            f"{name}_per_step": (now[name] - before[name]) / steps
            for name in ("host_syncs", "fallbacks")
            if name in now
        }
        if self.tracker is not None:
            self.tracker.log(
                last.step,
                loss=self.metrics["loss"],
                grad_norm=norm / good if good else float("nan"),
                lr=rate,
                tokens=self.tokens,
                compiles=now.get("compiles", 0),
                epoch=last.epoch + (last.first_row + last.rows) / len(self.prepared.train),
                skipped=skipped,
                rows_per_update=last.rows,
                **rates,
            )
        if not skipped:
            return ""
        update = next(update for update in window if update.step == int(bad))
        named = sorted({row for packed in self._rows(update) for row in self.prepared.train.source_rows(packed)})
        text = (
            f"{int(skipped)} of {steps} updates had a loss or gradient that is not finite, the first at step "
            f"{update.step} with the rows {_some(named)} of {self.config.data.source}"
        )
        if self.config.optim.on_nan == "stop":
            return f"{text}. Look at these rows, lower optim.learning_rate, or set optim.on_nan=skip"
        if self.rt.rank == 0:
            print(f"warning: {text}; they were skipped", file=sys.stderr, flush=True)
        return ""

    def _evaluates(self, step: int) -> bool:
        if self.prepared.eval is None:
            return False
        every = self.config.optim.eval_steps
        return step == self.total or (every is not None and step % every == 0)

    def _evaluate(self, step: int) -> bool:
        """Measures the loss of the held-out rows; keeps the best weights; says whether to stop early."""
        assert self.prepared.eval is not None
        sums = self.rt.send([{"sums": torch.zeros(2)}])[0]["sums"]
        self.model.eval()
        for batch in eval_batches(self.prepared.eval, self.rt.rank, self.rt.world_size, self.plan.batch_size):
            # The parts of the average must be gone before the cut: alive, they would be results of the first batch's
            # program and inputs of the next one's, which then is another one.
            with self.state.averaged():
                eval_step(self.model, self.rt.send([batch.tensors])[0], sums, self.config.optim, self.rt)
            self.rt.sync()
        self.model.train()
        total, tokens = self.rt.to_host([sums])[0].tolist()
        loss = total / tokens if tokens else float("nan")
        self.metrics["eval_loss"] = loss
        if self.tracker is not None:
            self.tracker.log_eval(step, loss=loss)
        if loss < self.best_loss:
            self.best_loss, self.worse = loss, 0
            if self.config.optim.eval_steps is not None and self.rt.rank == 0:
                self.best = self._trained()
        else:
            self.worse += 1
        patience = self.config.optim.early_stop_patience
        return patience is not None and self.worse >= patience

    def _trained(self) -> Tensors:
        """The weights to keep, on the CPU: the average where there is one."""
        if self.state.average is not None:
            (flat,) = self.rt.to_host([self.state.average])
            return self.state.split(flat)
        names = list(self.state.parameters)
        return dict(zip(names, self.rt.to_host(list(self.state.parameters.values())), strict=True))

    def _save(self) -> None:
        """Starts to write a checkpoint; the loop pays for the copy from the device alone."""
        if self.checkpoints is None:
            return
        tensors = self.state.to_host(self.rt)
        if self.best is not None:
            tensors["best"] = self.state.flat(iter(self.best.values()))
        files = {"training": tensors}
        state = {
            "logged": self.logged, "tokens": self.tokens, "skipped": self.skipped, "worse": self.worse,
            "best_loss": self.best_loss if math.isfinite(self.best_loss) else None,
            "metrics": {name: value if math.isfinite(value) else None for name, value in self.metrics.items()},
            "fingerprint": self.prepared.fingerprint, "global_batch_size": self.plan.global_batch_size,
            "versions": versions(),
        }  # fmt: skip
        documents: dict[str, Any] = {"state": state, "config": self.config.to_dict()}
        if hasattr(self.model, "peft_config"):
            trained = self.state.split(tensors.get("average", tensors["parameters"]))
            files["adapter_model"] = adapter_tensors(self.model, trained)
            documents["adapter_config"] = adapter_settings(self.model, self.config)
        best = self.metrics.get("eval_loss") == self.best_loss
        self.checkpoints.save(self.step, files, documents, self.metrics, best=best)

    def finish(self, status: Literal["finished", "stopped"], tokenizer: Any) -> TrainResult:
        """Writes the adapter, of the best evaluation where there were several; rank 0 alone."""
        assert self.checkpoints is not None
        self.checkpoints.wait()
        folder = self.config.output_path / "adapter"
        save_adapter(folder, self.model, self.best or self._trained(), self.config, tokenizer)
        metrics = {**self.metrics, "skipped_updates": float(self.skipped)}
        if self.best is not None:
            metrics["eval_loss"] = self.best_loss
        metrics |= {name: float(count) for name, count in self.rt.counters().items() if name == "compiles"}
        newest = self.checkpoints.newest()
        checkpoint = str(newest.path) if newest else None
        return TrainResult(status, self.step, metrics, str(folder), checkpoint, str(self.config.output_path))


def chip_name(rt: Runtime) -> str | None:
    """The chip's name in `chips`; None for a CPU, or a chip that is not known there."""
    if rt.device_type == "tpu":
        return next(iter(Machine().tpus()), None)
    if rt.device_type == "cuda":
        with contextlib.suppress(ValueError):
            return chips.chip(torch.cuda.get_device_name()).name
    return None


def chips_of(rt: Runtime) -> int:
    """Chips that the replicas run on: v2 and v3 have two devices a chip."""
    name = chip_name(rt)
    return max(1, rt.world_size // chips.chip(name).devices_per_chip) if name else rt.world_size


def _seed(rt: Runtime, config: TrainConfig, step: int) -> None:
    """Gives dropout its random numbers: a function of seed, rank and step alone, so a resumed run draws the same."""
    if not config.lora.dropout:
        return
    rt.seed(int(np.random.SeedSequence([config.optim.seed, rt.rank, step]).generate_state(1)[0]))


def _some(rows: list[int], most: int = 20) -> str:
    shown = ", ".join(map(str, rows[:most]))
    return shown if len(rows) <= most else f"{shown} and {len(rows) - most} more"
