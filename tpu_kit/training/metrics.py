"""Metrics of a run: JSONL always, Weights & Biases and TensorBoard on request, and a progress bar.

`RecompileMonitor` warns about recompilation and host reads; `peak_memory` measures memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tpu_kit.config.fields import ConfigError
from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed.progress import open_bar
from tpu_kit.machine import chips
from tpu_kit.machine.checks import Machine
from tpu_kit.machine.host import check_wandb
from tpu_kit.machine.storage import atomic
from tpu_kit.training.outcome import BEFORE_TRAINING, describe_start

if TYPE_CHECKING:
    from tpu_kit.distributed.replica.runtime import Runtime
    from tpu_kit.generation.evaluation.comparison import Comparison

METRICS_FILE = "metrics.jsonl"
_WANDB_ID = "wandb_run_id"  # file in the run's folder, for `log_result`; a resumed run takes the id from the checkpoint
_WINDOWS = 3  # consecutive logs with a cause before its warning: first evaluations compile, and checkpoints read


class RecompileMonitor:
    """Warns about recompilation and about host reads, from the counters at every log."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def notice(self, before: Mapping[str, int], now: Mapping[str, int], steps: int) -> Iterator[str]:
        """Yields the warnings to print after a log of `steps` steps, from `Runtime.counters` before and after them.

        The causes are compiled programs, and at least one "fallbacks" per step. A cause must be there in three logs in
        a row; further logs in this row do not warn again.
        """
        compiles, reads = (now.get(name, 0) - before.get(name, 0) for name in ("compiles", "fallbacks"))
        if self._again("compiles", compiles > 0):
            yield (
                f"{compiles} programs were compiled in the last {steps} steps, and some in each log before: "
                "shapes or slices change from step to step, and every change compiles a program, for minutes on a TPU. "
                "Keep data.packing=true; in a model's code pass values that change by step as tensors"
            )
        if self._again("fallbacks", reads >= steps):
            yield (
                f"the host reads or computes {reads / steps:.0f} values of each step (.item(), print, a condition on "
                "a tensor, or an operation that XLA lacks), and the device waits for every value. Remove them from the "
                "model's code or function; the kit itself reads the device only every tracking.logging_steps"
            )

    def _again(self, cause: str, there: bool) -> bool:
        """Counts a cause's logs in a row; returns True at the third."""
        self._seen[cause] = self._seen.get(cause, 0) + 1 if there else 0
        return self._seen[cause] == _WINDOWS


def peak_memory(rt: Runtime, predicted: int | None = None) -> dict[str, float]:
    """Measures the peak memory of this process and of its device.

    Returns:
        host_peak_bytes; if the device counts memory, also device_peak_bytes and, with the `predicted` bytes of a
        device, predicted_peak_bytes and device_peak_difference (measured / predicted - 1).
    """
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    values, device = {"host_peak_bytes": float(host)}, rt.memory()[0]
    if device is not None:
        values["device_peak_bytes"] = device
        if predicted:
            values |= {"predicted_peak_bytes": predicted, "device_peak_difference": device / predicted - 1}
    return values


def check_tracking(config: TrainConfig, at: Machine | None = None) -> None:
    """Raises ConfigError if a tracker that is on lacks its package, or W&B its key, on the machine `at`.

    None is this machine. Only tracking.wandb=online needs a key. The error has all problems.
    """
    at, tracking, problems = at or Machine(), config.tracking, []
    if tracking.wandb != "off" and at.version("wandb") is None:
        problems.append(f"tracking.wandb={tracking.wandb} needs a package: pip install wandb, or wandb=off.")
    if check_wandb(at, config).status == "failure":
        problems.append("tracking.wandb=online, and no W&B key was found: set WANDB_API_KEY, or wandb=offline.")
    if tracking.tensorboard and at.version("tensorboard") is None:
        problems.append("tracking.tensorboard=true needs a package: pip install tensorboard, or tensorboard=false.")
    if problems:
        raise ConfigError(problems)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the records of a metrics.jsonl, given its path or its folder, in order; an empty list without a file.

    Lines that are not JSON are skipped, such as a last line that a killed process left incomplete.
    """
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def best_evaluation(records: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the record of kind "eval" with the lowest loss or, without any loss, with the highest accuracy.

    The earliest of equal losses wins, and the latest of equal accuracies, which are frequent with few rows: later
    weights have learned more. Returns None if no evaluation has a finite number.
    """
    records = [record for record in records if record["kind"] == "eval"]
    measured = [record for record in records if record["loss"] is not None]
    if measured:
        return min(measured, key=lambda record: record["loss"])
    answered = [record for record in records if record["accuracy"] is not None]
    return max(answered, key=lambda record: (record["accuracy"], record["step"]), default=None)


class Evaluations:
    """The evaluations of a run, which select the best weights and the early stop.

    Args:
        patience: `optim.early_stop_patience`.
        records: records of an earlier launch, as `Tracker.log_eval` returns them; other kinds are ignored.
    """

    def __init__(self, patience: int | None, records: Iterable[dict[str, Any]] = ()) -> None:
        self._patience = patience
        self._records = [record for record in records if record["kind"] == "eval"]

    def add(
        self, step: int, loss: float, accuracy: float | None, by_source: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Adds an evaluation, with the values of `Tracker.log_eval`; a value that is not finite becomes None."""
        measured = {"loss": loss, "accuracy": math.nan if accuracy is None else accuracy, **by_source}
        finite = {name: value if math.isfinite(value) else None for name, value in measured.items()}
        self._records.append({"kind": "eval", "step": step, **finite})

    @property
    def best_step(self) -> int:
        """The step of the best evaluation; 0 if there is none."""
        return (best_evaluation(self._records) or {"step": 0})["step"]

    @property
    def stopped(self) -> bool:
        """Whether the run stops early: the last `patience` evaluations were not better; False without patience."""
        return self._patience is not None and self._since_best >= self._patience

    @property
    def reason(self) -> str:
        """The reason for an early stop, such as "none of the last 2 evaluations was better than step 3 (0.5)"."""
        best = best_evaluation(self._records)
        measured = best and (best["accuracy"] if best["loss"] is None else best["loss"])
        than = f"better than step {best['step']} ({measured:.6g})" if best else "a number"
        return f"none of the last {self._since_best} evaluations was {than}"

    @property
    def _since_best(self) -> int:
        """Number of evaluations since the first with the same loss and accuracy as the best."""
        best = best_evaluation(self._records) or {"loss": None, "accuracy": None, "step": 0}
        same = (record["step"] for record in self._records
                if (record["loss"], record["accuracy"]) == (best["loss"], best["accuracy"]))  # fmt: skip
        first = next(same, 0)  # an equal evaluation is no progress
        return sum(record["step"] > first for record in self._records)

    def figures(self, step: int | None = None) -> dict[str, float]:
        """Returns eval_loss, eval_accuracy and eval_step of a step, by default of the newest evaluation.

        A mix also has eval_loss/NAME and eval_accuracy/NAME for every source; an objective's means with a slash in
        their names, such as rewards/chosen, follow as eval_rewards/chosen. Numbers that were not measured are left out,
        but if loss and accuracy were not measured, eval_loss is NaN. Empty if there is no such evaluation.
        """
        record = next((record for record in reversed(self._records) if step in (None, record["step"])), None)
        if record is None:
            return {}
        loss, accuracy = record["loss"], record["accuracy"]
        figures = {"eval_step": float(record["step"])}
        if loss is not None or accuracy is None:
            figures = {"eval_loss": math.nan if loss is None else loss, **figures}
        figures |= {} if accuracy is None else {"eval_accuracy": accuracy}
        by_source = {name: value for name, value in record.items() if "/" in name and value is not None}
        return figures | {f"eval_{name}": value for name, value in by_source.items()}


class Tracker:
    """Writes the metrics of a run and shows the progress bar on stderr; only rank 0 makes a tracker.

    Every record of `<output_dir>/metrics.jsonl` has `kind` ("start", "train" or "eval") and `step`. A value that is not
    finite is null, and `nonfinite` has its text, as in ``{"loss": null, "nonfinite": {"loss": "nan"}}``. If the file
    cannot be written, OSError has the next action.

    Args:
        config: the run.
        output_dir: folder of the run; created if missing.
        resume_step: number of updates made by earlier launches.
        history: the records until `resume_step`, which replace the file's records. None starts a new file, and renames
            an existing file to metrics.previous.jsonl.
        resume_tokens: tokens trained on until `resume_step`, without padding.
        total_steps: the last step of the run, for the bar and the ETA.
        flops_per_token: for MFU.
        chip_name: a name for `chips.chip`, for MFU.
        num_chips: number of chips of the run on all hosts.
        device_type: the name in the records if `chip_name` is None.
        wandb_id: id of the W&B run that a resumed run continues.
        clock: monotonic clock, seconds.

    Attributes:
        history: all records until now.
        wandb_id: id of the W&B run; None without W&B.
    """

    def __init__(
        self,
        config: TrainConfig,
        output_dir: str | os.PathLike[str],
        resume_step: int = 0,
        history: list[dict[str, Any]] | None = None,
        *,
        resume_tokens: int = 0,
        total_steps: int | None = None,
        flops_per_token: float | None = None,
        chip_name: str | None = None,
        num_chips: int = 1,
        device_type: str = "cpu",
        wandb_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dir = Path(output_dir)
        self._dir.mkdir(parents=True, exist_ok=True)
        peak = chips.chip(chip_name).bf16_flops if chip_name else None
        # Model FLOP/s of one token per second, as a share of the chips' peak.
        self._utilization = flops_per_token / (num_chips * peak) if flops_per_token and peak else None
        self._num_chips, self._total_steps, self._clock = num_chips, total_steps, clock
        self._device = f"{num_chips} x {chip_name or device_type}"
        self._is_likelihood = config.optim.objective == "supervised" and config.teacher is None
        self.history = self._begin(history)
        self._seconds_before = float(self.history[-1]["seconds"]) if self.history else 0.0
        self._start = self._window_start = clock()
        self._resumed_from, self._window_step, self._window_tokens = resume_step or None, resume_step, resume_tokens
        self._untimed, self._first_window = 0.0, True
        self._steady_steps, self._steady_seconds = 0, 0.0

        self._file = (self._dir / METRICS_FILE).open("a")
        purge = resume_step + 1 if history is not None else None
        self._tensorboard = _open_tensorboard(self._dir, purge) if config.tracking.tensorboard else None
        self._wandb, self.wandb_id = None, wandb_id
        if config.tracking.wandb != "off":
            self.wandb_id = wandb_id or uuid.uuid4().hex[:8]
            (self._dir / _WANDB_ID).write_text(self.wandb_id)
            self._wandb = _open_wandb(config, self._dir)
        self._bar = open_bar(config.run_name, total_steps, resume_step)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(failed=error is not None)

    def tick(self, step: int) -> None:
        """Moves the bar to `step`, without reading the device."""
        self._bar.update(step - self._bar.n)

    def log(
        self, step: int, *, loss: float, tokens: int, ahead: float = 0.0, extra: Mapping[str, float] = {},
        **values: float | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Writes one training record and returns it.

        Rates are over the window since the previous record; the first window includes compilation.

        Args:
            step: number of updates done.
            loss: mean over the window, nats per token with loss.
            tokens: tokens trained on by all replicas since the start of the run, without padding.
            ahead: seconds that the host already spent on later steps, which count for the next record.
            extra: numbers of the objective and the rewards, whose names the user may choose; see `apart_from`.
            values: further numbers of the record; `lr` must be among them.

        Returns:
            The record: kind, step, seconds, loss, perplexity, tokens, tokens_per_second, tokens_per_second_per_chip,
            mfu, step_seconds, eta_seconds, total_steps, resumed_from, device, `values` and `extra`.
        """
        now, steps = self._clock() - ahead, step - self._window_step
        assert steps > 0, f"step {step} was logged after step {self._window_step}"
        seconds = max(now - self._window_start - self._untimed, 1e-9)
        rate = (tokens - self._window_tokens) / seconds
        if not self._first_window:
            self._steady_steps += steps
            self._steady_seconds += seconds
        # The first window includes compilation: the ETA uses it only until the next window ends.
        step_seconds = self._steady_seconds / self._steady_steps if self._steady_steps else seconds / steps
        eta = None if self._total_steps is None else (self._total_steps - step) * step_seconds
        self._window_start, self._window_step, self._window_tokens = now, step, tokens
        self._untimed, self._first_window = 0.0, False
        record: dict[str, Any] = {
            "loss": loss,
            "perplexity": self._perplexity(loss),
            "tokens": tokens,
            "tokens_per_second": rate,
            "tokens_per_second_per_chip": rate / self._num_chips,
            "mfu": None if self._utilization is None else rate * self._utilization,
            "step_seconds": seconds / steps,
            "eta_seconds": eta,
            "total_steps": self._total_steps,
            "resumed_from": self._resumed_from,
            "device": self._device,
            **values,
        }
        self._bar.set_postfix_str(f"loss {loss:.4f}, lr {values['lr']:.2e}, {rate:,.0f} tok/s", refresh=False)
        self.tick(step)
        record |= apart_from({*record, "kind", "step", "seconds", "nonfinite"}, extra)
        return self._write("train", step, record)

    def log_start(
        self, loss: float, vocabulary: int | None, by_source: Mapping[str, float] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Writes the record of the held-out loss before the first update, prints it and returns it.

        Args:
            loss: loss of the held-out rows, nats per token.
            vocabulary: number of tokens in the model's vocabulary; None if the loss is not a likelihood of tokens.
            by_source: for a mix, "loss/NAME" -> loss.
        """
        self._bar.write(describe_start(loss, vocabulary), file=sys.stdout)
        sys.stdout.flush()
        uniform = math.log(vocabulary) if vocabulary else None
        return self._write(BEFORE_TRAINING, 0, {"loss": loss, "uniform": uniform, **by_source})

    def log_eval(
        self,
        step: int,
        *,
        loss: float,
        accuracy: float | None = None,
        interval: tuple[float, float] | None = None,
        by_source: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Writes one evaluation record and returns it.

        Args:
            step: number of updates done.
            loss: loss of the held-out rows, nats per token; NaN if it was not computed.
            accuracy: the share of correct answers, 0 to 1.
            interval: the ends of the accuracy's confidence interval.
            by_source: for a mix, "loss/NAME" and "accuracy/NAME" -> value; and other means of the objective.
        """
        ends = dict(zip(("accuracy_low", "accuracy_high"), interval or (), strict=False))
        values = {"loss": loss, "perplexity": self._perplexity(loss), "accuracy": accuracy, **ends, **by_source}
        return self._write("eval", step, values)

    def _perplexity(self, loss: float) -> float | None:
        """Returns e ** loss if the loss is a log-likelihood, else None."""
        if not self._is_likelihood:
            return None
        return math.inf if loss > 709 else math.exp(loss)  # above 709 a double overflows

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Excludes the time inside the context (evaluation, checkpoint) from the training rates and the ETA."""
        start = self._clock()
        yield
        self._untimed += self._clock() - start

    def close(self, failed: bool = False) -> None:
        """Closes all trackers, and marks the W&B run as failed if `failed`. A second call does nothing."""
        if self._file.closed:
            return
        self._bar.close()
        with contextlib.suppress(OSError):  # a record could not be written, and `_room` reported it
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            with _optional(f"W&B could not be closed ({{}}); {METRICS_FILE} has all records"):
                self._wandb.finish(exit_code=int(failed))

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Adds a record to the history, the file and the trackers; returns it. Raises OSError as `_room`."""
        values = {**values, "seconds": self._seconds_before + self._clock() - self._start}
        nonfinite = {k: str(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
        record = {"kind": kind, "step": step, **values, **dict.fromkeys(nonfinite)}
        record |= {"nonfinite": nonfinite} if nonfinite else {}
        self.history.append(record)
        with self._room():
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        measured = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        if self._tensorboard is not None:
            for name, value in measured.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log({**measured, "step": step})
        return record

    def _begin(self, history: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """Prepares metrics.jsonl as the class says; returns the records so far."""
        path = self._dir / METRICS_FILE
        if history is None:
            if path.exists():
                path.replace(self._dir / "metrics.previous.jsonl")
            return []
        with self._room():
            atomic.write_text(path, "".join(json.dumps(record) + "\n" for record in history))
        return list(history)

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """Adds the next action to the error if the log cannot be written, as on a full disk."""
        try:
            yield
        except OSError as error:
            text = f"{error.strerror}: {self._dir / METRICS_FILE} could not be written"
            advice = "Make room there or set output_dir to another disk, and run it again: its last checkpoint is good"
            raise OSError(error.errno, f"{text}. {advice}") from error


def apart_from(ours: Container[str], own: Mapping[str, float]) -> dict[str, float]:
    """Returns the user's numbers `own`; a name that the kit uses itself (in `ours`) becomes "own/NAME"."""
    return {f"own/{name}" if name in ours else name: value for name, value in own.items()}


def _open_tensorboard(folder: Path, purge_step: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)


def _open_wandb(config: TrainConfig, folder: Path) -> Any:
    """Starts the W&B run whose id is in the folder's file, or online continues it; returns it. Raises W&B's errors."""
    import wandb

    # In W&B, WANDB_MODE=offline overrides online.
    mode = os.environ.get("WANDB_MODE", "online") if config.tracking.wandb == "online" else "offline"
    run = wandb.init(
        project=config.tracking.wandb_project,
        name=config.run_name,
        id=(folder / _WANDB_ID).read_text(),
        resume="allow" if mode == "online" else None,
        mode=mode,  # type: ignore[arg-type]  # a Literal in W&B's stubs; the environment variable may hold any text
        dir=folder,
        config=config.to_dict(),
        # W&B would otherwise wrap stderr, which the launch streams to the parent process.
        settings=wandb.Settings(console="off"),
    )
    # W&B's own step only increases; ours decreases when a run resumes from an earlier checkpoint.
    run.define_metric("*", step_metric="step")
    return run


_COLUMNS = ("question", "expected", "base", "base correct", "tuned", "tuned correct")


def log_result(
    config: TrainConfig, step: int, metrics: Mapping[str, float], compared: Comparison | None, adapter_dir: str
) -> None:
    """Sends the result of a run to TensorBoard and W&B, if they are on; errors of W&B are only printed.

    The result has the finite metrics as "result/NAME" and, if `compared` is given, the answers of both models. With
    tracking.wandb_adapter W&B also gets the folder `adapter_dir`.
    """
    figures = {f"result/{name}": value for name, value in metrics.items() if math.isfinite(value)}
    samples = zip(compared.base.samples, compared.tuned.samples, strict=True) if compared else ()
    cells = [(base.question, base.expected, base.answer, base.correct, tuned.answer, tuned.correct)
             for base, tuned in samples]  # fmt: skip
    rows = [["" if cell is None else str(cell) for cell in row] for row in cells]
    if config.tracking.tensorboard:
        with contextlib.closing(_open_tensorboard(config.output_path, None)) as board:
            if rows:
                safe = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
                lines = [_COLUMNS, ("---",) * len(_COLUMNS), *safe]
                board.add_text("answers", "\n".join(map("|".join, lines)), step)
            parameters = config.flat_values().items()
            values = {name: value if isinstance(value, int | float) else str(value) for name, value in parameters}
            board.add_hparams(values, figures, run_name=".", global_step=step)
    if config.tracking.wandb != "off":
        import wandb

        unsent = "W&B did not accept the result ({}); eval.json and the adapter are in the run's folder"
        with _optional(unsent), _open_wandb(config, config.output_path) as run:
            answers = {"answers": wandb.Table(columns=list(_COLUMNS), data=rows)} if rows else {}
            run.log({**figures, **answers, "step": step})
            if config.tracking.wandb_adapter:
                artifact = wandb.Artifact(f"adapter-{run.id}", type="model", metadata=dict(metrics))
                artifact.add_dir(adapter_dir)
                run.log_artifact(artifact)


@contextlib.contextmanager
def _optional(warning: str) -> Iterator[None]:
    """Prints an error inside the context as `warning`, with the error in place of {}, on stderr; goes on after it."""
    try:
        yield
    except Exception as error:
        text = warning.format(f"{type(error).__name__}: {error}")
        print(f"warning: {text}", file=sys.stderr, flush=True)
