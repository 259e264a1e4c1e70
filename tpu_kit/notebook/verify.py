"""Compares a device's results with the CPU's, measures its speed and memory, and runs a small training.

Checks are launches with a time limit: a failure, a hang or a crash does not stop the other checks. The results go to a
report, which the user can attach to an issue, and to this machine's calibration, which `plan` and `train` use.
"""

from __future__ import annotations

import contextlib
import io
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tpu_kit.config.fields import hide_secrets
from tpu_kit.config.loader import TrainConfig, batch_arithmetic, load_config
from tpu_kit.distributed import detection
from tpu_kit.distributed.launch import launch
from tpu_kit.machine import calibration, chips
from tpu_kit.machine.calibration import Calibration
from tpu_kit.machine.checks import Check, Machine, Status, verdict
from tpu_kit.machine.chips import Chip
from tpu_kit.machine.compatibility import PACKAGES, TESTED, installed_version
from tpu_kit.machine.storage import atomic
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.notebook import smoke_test
from tpu_kit.notebook.claims import CHECKPOINT_STEP, check_claims, paste, small_run
from tpu_kit.planning.compiler.compile_check import compile_step
from tpu_kit.planning.cost import step_time, timed, work
from tpu_kit.torch_tpu.environment import check_command

REPORT = "verify-report.json"
TPU_SECONDS, SECONDS = 600.0, 300.0
"""Time limits of a launch in seconds, on a TPU and on other devices."""
# The measured runs on a chip, and on a CPU.
_SHAPES: tuple[dict[str, Any], ...] = (
    {"model.name": "Qwen/Qwen2.5-0.5B-Instruct", "max_length": 1024, "batch_size": 4},
    {"model.name": "HuggingFaceTB/SmolLM2-135M-Instruct", "max_length": 512, "batch_size": 16},
)
_SMALL: tuple[dict[str, Any], ...] = ({"model.name": "embedded", "max_length": 128, "batch_size": 2},)
KERNEL_TOLERANCE = 0.02
"""Norm of the difference over the norm of the result; rounding to bf16 gives 0.003 (measured on XLA:CPU)."""
LOSS_TOLERANCE = 0.01
NORM_TOLERANCE = 0.05
"""Relative differences of loss and gradient norm; both sides multiply in bf16."""
GAP_TOLERANCE = 0.1
"""Difference of two logits: rounding may swap tokens that are closer."""
MEMORY_RATIOS = (0.5, 1.25)
TIME_RATIOS = (0.5, 4.0)
"""Bounds of measured over predicted; plans do not use a ratio outside."""


def _brief(error: Exception) -> str:
    """Returns an error's first line and its last line that names an error, or else its last line; 400 characters."""
    lines = [line.strip() for line in hide_secrets(str(error)).splitlines() if line.strip()] or [type(error).__name__]
    named = [line for line in lines[1:] if re.match(r"[\w.]+(Error|Exception)\b|Fatal Python error", line)]
    return " ".join([lines[0], *(named or lines[1:])[-1:]])[:400]


class NotMeasured(Exception):
    """Raised by a check that does not apply to this device; the text says why."""


@dataclass(frozen=True)
class Record(Check):
    """A check of `verify`, with details for the report.

    Attributes:
        figures: results or measurements.
        tolerance: bounds of the figures.
        seconds: duration of the check.
        error: whole text of an error; empty if there is none.
    """

    figures: Mapping[str, Any] = field(default_factory=dict)
    tolerance: str = ""
    seconds: float = 0.0
    error: str = ""


def verify(
    config: TrainConfig, report: str | Path = REPORT, announce: Callable[[str], None] = lambda name: None
) -> Iterator[Record]:
    """Checks this machine's devices; yields a `Record` after each check. A failure does not stop the next checks.

    Their names are Cores, Splash kernel, "Step, scanned", Tokens, Memory, Step time and Small run. "Step, unrolled"
    follows if scanned layers fail, and replaces them off XLA. Checks that are not for this device are skipped. A failed
    check is a warning for the kernel, scanned layers, memory and step time, because the kit then does without them.
    Without a device, or with a report that cannot be written, yields only one failure, "Verify" or "Report".

    Args:
        config: its `launch` section chooses the device.
        report: file of the report. Report and calibration are written after each check, so that a crash loses nothing.
        announce: called before a check, with a text of its name and the limit of its launches in seconds.
    """
    path, at = Path(report).absolute(), Machine()
    records: list[Record] = []
    try:
        backend = detection.detect(config.launch, at)
        check_command("verify", backend.device_type)
    except (ValueError, ImportError, OSError) as error:
        yield Record("Verify", "failure", str(error), "python -m tpu_kit doctor")
        return
    room = detection.device_memory_budget(config, at)
    measured = calibration.begin(room.chip.name if room else backend.device_type, path)
    try:
        _write_report(path, backend, measured, records)
    except OSError as error:
        found = f"{path} cannot be written to ({error.strerror})"
        yield Record("Report", "failure", found, "report=/another/folder/report.json")
        return
    checks = _Checks(config, backend, measured, announce)
    for record in checks.run():
        records.append(record)
        checks.measured.save()
        _write_report(path, backend, checks.measured, records)
        yield record


class _Checks:
    """Runs the checks in order and collects the calibration.

    Attributes:
        measured: the calibration so far; the next checks do not use a kernel that failed.
    """

    def __init__(
        self, config: TrainConfig, backend: detection.Backend, measured: Calibration, announce: Callable[[str], None]
    ) -> None:
        self.measured, self._backend, self._announce = measured, backend, announce
        self._limit = TPU_SECONDS if backend.device_type == "tpu" else SECONDS
        # Less than the time limit, so that a hang is reported with its stacks.
        hang = min(config.launch.hang_timeout, self._limit / 2)
        self._all = replace(config.launch, device_type=backend.device_type, hang_timeout=hang)
        self._one = replace(self._all, num_replicas=1)
        self._steps_taken: dict[str, dict[str, float | None]] = {}

    def run(self) -> Iterator[Record]:
        """Runs the checks and yields their rows: cores, kernel, step, tokens, memory, step time, small run."""
        yield self._cores()
        yield self._splash()
        yield from self._steps()
        config = self._config(one=True, base_dtype="fp32")
        yield self._check(
            "Tokens", partial(launch, smoke_test.compare_tokens, config, self._limit), _judge_tokens,
            f"a token is the CPU's choice, or within {GAP_TOLERANCE} of its logit",
        )  # fmt: skip
        yield self._measure("Memory", self._memory, MEMORY_RATIOS, "the compiler's figure")
        yield self._measure("Step time", self._time, TIME_RATIOS, "the estimate")
        yield self._check(
            "Small run", partial(small_run, self._config()), _judge_run,
            f"the loss falls, and it goes on from the checkpoint of step {CHECKPOINT_STEP}", limited=False,
        )  # fmt: skip

    def _config(self, one: bool = False, **settings: Any) -> TrainConfig:
        """Configures a run (default: the embedded model) without kernels or loops that failed; `one`: on 1 replica."""
        values = {"model.name": "embedded", "data.source": "embedded", "max_length": 128, **settings}
        config = load_config(None, parameters=values)
        return self.measured.apply(replace(config, launch=self._one if one else self._all))[0]

    def _cores(self) -> Record:
        """Checks all devices by `smoke_test.measure_cores`."""
        devices = self._backend.num_replicas or Machine().tpu_devices()
        judge = partial(_judge_cores, devices=devices, chip=chips.CHIPS.get(self.measured.device))
        run = partial(launch, smoke_test.measure_cores, self._config(), self._limit)
        return self._check("Cores", run, judge, "exact sums, and no compiles while one shape repeats")

    def _splash(self) -> Record:
        """Checks the splash kernel on XLA, elsewhere skips it; sets `measured.splash`."""
        if self._backend.device_type not in ("tpu", "xla-cpu"):
            return Record("Splash kernel", "skipped", f"it is for a TPU, and this is {self._backend.device_type}")
        record = self._check(
            "Splash kernel", partial(launch, smoke_test.compare_kernel, self._config(one=True), self._limit),
            _judge_kernel, f"relative difference at most {KERNEL_TOLERANCE}",
            "attention=auto takes sdpa here from now on",
        )  # fmt: skip
        self.measured = replace(self.measured, splash="" if record.status == "ok" else record.found)
        return record

    def _steps(self) -> Iterator[Record]:
        """Yields checks of a training step: on XLA with scanned layers; if that fails, and elsewhere, unrolled.

        If only unrolled layers pass on XLA, `measured.scan` becomes the text of the failure.
        """
        tolerance = f"loss within {LOSS_TOLERANCE:.0%}, gradient norm within {NORM_TOLERANCE:.0%} of the CPU's"
        on_xla = self._backend.device_type in ("tpu", "xla-cpu")
        for layers, scan in (("scanned", "on"), ("unrolled", "off"))[not on_xla :]:
            action = "layers are unrolled here from now on, if the next check passes" if scan == "on" else ""
            config = self._config(scan_layers=scan)
            run = partial(launch, smoke_test.compare_step, config, self._limit)
            record = self._check(f"Step, {layers}", run, _judge_step, tolerance, action)
            if scan == "on":
                failed = record.found
            elif record.status == "ok" and on_xla:
                self.measured = replace(self.measured, scan=failed)
            yield record
            if record.status == "ok":
                return

    def _shapes(self) -> list[TrainConfig]:
        """Returns the runs to measure: two real models on a TPU or GPU, elsewhere the embedded model."""
        shapes = _SHAPES if self._backend.device_type in ("tpu", "cuda") else _SMALL
        return [self._config(one=True, **shape) for shape in shapes]

    def _step(self, config: TrainConfig) -> dict[str, float | None]:
        """Returns `smoke_test.measure_step` of a run; launches it only once for each model, batch size and length."""
        if (name := _name(config)) not in self._steps_taken:
            self._steps_taken[name] = launch(smoke_test.measure_step, config, self._limit)
        return self._steps_taken[name]

    def _memory(self) -> dict[str, dict[str, float]]:
        """Returns `compare` of the measured and the compiler's peaks of `_shapes`, in bytes, by `_name`.

        Raises NotMeasured if the device or its compiler does not tell them.
        """
        if self._backend.device_type == "cuda":
            raise NotMeasured("not measured: no compiler reports the memory of a GPU's step")
        ratios = {}
        for config in self._shapes():
            measured = self._step(config)["peak_bytes"]
            if measured is None:
                raise NotMeasured(f"not measured: {self._backend.device_type} counts no memory of its programs")
            compiled = compile_step(config, self.measured.device, progress=False, time_limit=self._limit).total_bytes
            ratios[_name(config)] = compare(measured, compiled)
        return ratios

    def _time(self) -> dict[str, dict[str, float]]:
        """Returns `compare` of measured and predicted seconds of `_shapes`[0], by `_name`; or raises NotMeasured."""
        config = self._shapes()[0]
        seconds = self._step(config)["seconds"]
        assert seconds is not None
        chip = chips.CHIPS.get(self.measured.device)
        if chip is None or chip.bf16_flops is None:
            raise NotMeasured(f"{seconds:.3f} s, not compared: no peak of {self.measured.device} is known")
        if self._backend.device_type == "tpu":
            compiled = compile_step(config, chip.name, progress=False, time_limit=self._limit)
            predicted = timed(sum(compiled.estimated.values()), 0.0, (), chip)
        else:
            predicted = step_time(work(config, read_shape(config.model), batch_arithmetic(config, 1)), chip)
        return {_name(config): compare(seconds, predicted.seconds)}

    def _measure(
        self, name: str, run: Callable[[], dict[str, dict[str, float]]], bounds: tuple[float, float], against: str
    ) -> Record:
        """Checks the ratios of measured over predicted; if all are within `bounds`, the largest goes to `measured`.

        Args:
            name: "Memory" or "Step time": the check, and the ratio in `measured` to set, `memory` or `time`.
            run: returns results of `compare` by run; NotMeasured skips the check.
            bounds: smallest and largest ratio that is right.
            against: the predicted figure in words, for the texts.
        """
        tolerance = f"{bounds[0]} to {bounds[1]} times {against}"
        judge, action = partial(_judge_ratios, bounds=bounds, against=against), "predictions are not corrected"
        record = self._check(name, run, judge, tolerance, action)
        if record.status == "ok":
            ratio = max(one["ratio"] for one in record.figures.values())
            self.measured = replace(self.measured, **{"memory" if name == "Memory" else "time": ratio})
        return record

    def _check(
        self, name: str, run: Callable[[], Any], judge: Callable[[Any], Verdict], tolerance: str,
        action: str = "", limited: bool = True,
    ) -> Record:  # fmt: skip
        """Runs a check and judges its figures, or records its error; raises nothing.

        Args:
            name: name of the check.
            run: returns the figures; NotMeasured skips the check. Its output goes to the record of an error.
            judge: decides whether the figures are right, and describes them.
            tolerance: bounds of the figures, for the report.
            action: the kit's reaction to a failed check, which is then a warning; if empty, it is a failure.
            limited: whether the launches of the check have a time limit.
        """
        self._announce(f"{name}: {self._limit:.0f} s at most for each launch" if limited else name)
        output, start, figures = io.StringIO(), time.monotonic(), {}
        failed: Status = "warning" if action else "failure"
        status, error = failed, ""
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                figures = run()
            good, found = judge(figures)
            status = "ok" if good else failed
        except NotMeasured as reason:
            status, found = "skipped", str(reason)
        except Exception as failure:  # any error: the next checks must still run
            error = f"{str(failure) or type(failure).__name__}\n\nIts last output:\n{output.getvalue()[-4000:]}"
            found = _brief(failure)
        advice = "; ".join(filter(None, [action, f"attach {Path(self.measured.report).name} to an issue"]))
        return Record(
            name, status, found[:400], advice if status == failed else "",
            figures=figures, tolerance=tolerance, seconds=round(time.monotonic() - start, 1), error=error,
        )  # fmt: skip


def _name(config: TrainConfig) -> str:
    """Returns a run's model, batch size and length as text, the name of its figures."""
    rows, length = config.optim.batch_size, config.data.max_length
    return f"{Path(config.model.name).name}, {rows} x {length} tokens"


# ------------------------------------------------------------------------------------------------------------- verdicts

Verdict = tuple[bool, str]  # whether the figures are right, and their description


def _judge_cores(figures: Mapping[str, Any], devices: int, chip: Chip | None) -> Verdict:
    """Returns (whether sums are right, cores at least `devices`, and compiles and fallbacks 0; a text with the speed).

    The text also has the share of the peak of `chip`, unless that is None.
    """
    cores, count = figures["cores"], len(figures["cores"])
    total, slowest = count * (count + 1) / 2, min(core["TFLOP/s"] for core in cores)
    wrong = [f"core {one['core']} has {one['all-reduce']:g}" for one in cores if one["all-reduce"] != total]
    wrong += [f"there should be {devices} cores"] if count < devices else []
    if figures["compiles"] or figures["fallbacks"]:
        repeated = f"{figures['compiles']} compiles and {figures['fallbacks']} operations on the host"
        wrong += [f"{repeated} while one shape repeats: unset XLA_USE_EAGER_DEBUG_MODE and PT_XLA_DEBUG"]
    text = f"sum of 1..{count} on each of {count}" + (f": {', '.join(wrong)}" if wrong else "")
    text += f"; the slowest makes {slowest:.3g} TFLOP/s (bf16)"
    if chip is not None and chip.bf16_flops is not None:
        text += f", {slowest * 1e12 * chip.devices_per_chip / chip.bf16_flops:.0%} of the peak"
    return not wrong, text


def _judge_kernel(figures: Mapping[str, Mapping[str, float]]) -> Verdict:
    """Returns (whether all differences of `compare_kernel` are at most `KERNEL_TOLERANCE`, a description)."""
    differences = {f"{part}, {case}": value for case, parts in figures.items() for part, value in parts.items()}
    wrong = [f"{name}: {value:.3g}" for name, value in differences.items() if not value <= KERNEL_TOLERANCE]  # NaN too
    if wrong:
        return False, f"differs from plain attention in {len(wrong)} of {len(differences)}: {'; '.join(wrong)}"
    return True, f"{len(figures)} shapes, forward and backward: {max(differences.values()):.2g} off at most"


def _judge_step(figures: Mapping[str, float]) -> Verdict:
    """Returns (whether loss and gradient norm of `compare_step` are near enough to the host's, a description)."""
    loss = abs(figures["loss"] / figures["host_loss"] - 1)
    norm = abs(figures["grad_norm"] / figures["host_grad_norm"] - 1)
    text = "loss {loss:.4f} (CPU: {host_loss:.4f}), gradient norm {grad_norm:.4f} ({host_grad_norm:.4f})"
    return loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE, text.format(**figures)


def _judge_tokens(figures: Mapping[str, float]) -> Verdict:
    """Returns (whether `compare_tokens` has tokens and a gap of at most `GAP_TOLERANCE`, a description)."""
    text = "{equal:.0f} of {tokens:.0f} tokens are the CPU's; {gap:.3f} below its choice at most"
    return figures["tokens"] > 0 and figures["gap"] <= GAP_TOLERANCE, text.format(**figures)


def _judge_run(figures: Mapping[str, Any]) -> Verdict:
    """Returns (whether the loss of `small_run` fell and it resumed from a whole checkpoint, a description)."""
    good = (
        figures["size"] > 0 and figures["resumed"] == CHECKPOINT_STEP and figures["last_loss"] < figures["first_loss"]
    )
    text = (
        "loss {first_loss:.2f} -> {last_loss:.2f}; a checkpoint of {size:,} bytes, each file as its manifest says; it "
        "went on from step {resumed} to {updates}; {tokens} tokens with the adapter"
    )
    return good, text.format(**figures)


def compare(measured: float, predicted: float) -> dict[str, float]:
    """Returns the figures "measured" and "predicted", and their "ratio", measured / predicted."""
    return {"measured": measured, "predicted": predicted, "ratio": measured / predicted}


def _judge_ratios(figures: Mapping[str, Mapping[str, float]], bounds: tuple[float, float], against: str) -> Verdict:
    """Returns (whether the "ratio" of every `compare` result is within the bounds, a description)."""
    text = "; ".join(f"{name}: {one['ratio']:.2f} of {against}" for name, one in figures.items())
    return all(bounds[0] <= one["ratio"] <= bounds[1] for one in figures.values()), text


# -------------------------------------------------------------------------------------------------------------- report


def _write_report(path: Path, backend: detection.Backend, measured: Calibration, records: Sequence[Record]) -> None:
    """Writes the report as JSON to `path`, without secrets and the home folder; raises OSError."""
    names = (*PACKAGES, *TESTED)
    content = {
        "tpu_kit": installed_version("tpu_kit"), "made": measured.made, "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in names}, "device": measured.device,
        "backend": str(backend), "calibration": asdict(measured),
        "checks": [
            {
                "passed": None if one.status == "skipped" else one.status == "ok", "next_action": one.fix,
                **{key: getattr(one, key) for key in ("name", "found", "figures", "tolerance", "seconds", "error")},
            }
            for one in records
        ],
    }  # fmt: skip
    atomic.write_text(path, hide_secrets(json.dumps(content, indent=1)).replace(str(Path.home()), "~"))


def print_report(config: TrainConfig, file: str = REPORT, claims: bool = False) -> int:
    """Runs `verify` and prints its rows and a summary; returns 1 if any row is a failure or a warning, else 0.

    With `claims` it then checks the README's claims about a run, whose failures count too, and prints all results as
    text for an issue; but not if no check could start. `file` is the report.
    """
    records: list[Check] = []

    def announce(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    for record in verify(config, file, announce):
        print(f"{record}  ({record.seconds:.0f} s)", flush=True)
        records.append(record)
    print(f"report: {Path(file).absolute()}")
    if [record.name for record in records] in (["Verify"], ["Report"]):  # no check could start
        return 1
    print(verdict(records, detection.detect(config.launch).device_type))
    if claims:
        checked = [*check_claims(config, announce)]
        print(paste(config, records, checked))
        records += checked
    return int(any(record.status in ("warning", "failure") for record in records))
