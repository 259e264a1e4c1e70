"""Trains the embedded model on this machine: the small run of `verify`, and runs that check the README's claims.

Runs write to a temporary folder. A failed claim does not stop the next checks; the result is text for an issue.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpu_kit.config.fields import hide_secrets
from tpu_kit.config.loader import LaunchConfig, TrainConfig, load_config
from tpu_kit.distributed import detection
from tpu_kit.machine.checks import MARKS, Check, Machine, Status
from tpu_kit.machine.compatibility import PACKAGES, TESTED, installed_version

_LEAST_CORRECT = 0.8  # share of correct answers after training; 0.89 to 0.93 on the processors that were tried
_ROWS = 16  # rows per update, as in `make train`
_STEPS = 8  # updates of the resumed run, which first stops after half of them
CHECKPOINT_STEP, _SMALL_STEPS = 4, 8
"""Updates of the small run before its checkpoint, and in total."""
_QUESTION = "Tom has 12 apples and gives 5 of them to Mia. How many apples does Tom have now?"
_SMALL = {
    "split": "train[:1000]", "max_length": 128, "batch_size": 2, "warmup_steps": 1, "logging_steps": 1,
    "save_steps": CHECKPOINT_STEP, "eval_rows": 0, "eval_steps": None, "generate_rows": 0, "r": 8,
}  # fmt: skip


def small_run(config: TrainConfig) -> dict[str, Any]:
    """Trains the embedded model on the devices of `config.launch`, resumes the run, and samples from the adapter.

    The run is in a temporary folder, which is removed at the end.

    Returns:
        A dictionary with the keys

        - first_loss, last_loss: training losses of the first and the last update, in nats per token;
        - updates: number of the last update of the second training;
        - size: bytes of the checkpoint; 0 if it is damaged, or not from the last step of the first training;
        - resumed: step from which the second training continued, None if it started anew;
        - tokens: number of tokens of the reply.
    """
    from tpu_kit.generation.answers import Sampling, generate
    from tpu_kit.recipes.sft import train
    from tpu_kit.training.checkpoint import manager
    from tpu_kit.training.metrics import read_metrics

    with tempfile.TemporaryDirectory(prefix="tpu_kit-") as folder:
        small = load_config("embedded-cot", {**_SMALL, "output_dir": folder, "max_steps": CHECKPOINT_STEP})
        small = replace(small, launch=config.launch)
        longer = replace(small, optim=replace(small.optim, max_steps=_SMALL_STEPS))
        train(small)
        checkpoints, damaged = manager.list_checkpoints(small.checkpoints_place, verify=True)
        whole = not damaged and checkpoints and checkpoints[-1].step == CHECKPOINT_STEP
        result = train(longer)
        metrics = read_metrics(folder)
        prompt = [{"role": "user", "content": _QUESTION}]
        (reply,) = generate(longer, [prompt], Sampling(max_new_tokens=32), adapter_dir=result.adapter_dir)
    return {
        "first_loss": metrics[0]["loss"], "last_loss": metrics[-1]["loss"], "updates": result.step,
        "size": checkpoints[-1].size if whole else 0, "resumed": metrics[-1]["resumed_from"],
        "tokens": len(reply.tokens),
    }  # fmt: skip


@dataclass(frozen=True)
class Claims:
    """The README's claims and the runs that check them.

    Attributes:
        launch: the devices.
        folder: folder of the runs.
        questions: number of held-out questions that the base and the tuned model answer.
        settings: settings of the main run that override the shipped embedded-cot and the devices' batch.
    """

    launch: LaunchConfig
    folder: Path
    questions: int = 100
    settings: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> Iterator[tuple[str, Callable[[], tuple[bool | None, str]]]]:
        """Yields pairs of a claim, as text, and the function that checks it; runs nothing itself.

        Call the functions in this order: the first trains the main run, which later functions read. A function returns
        whether the claim holds (None if this machine cannot check it) and a text.
        """
        yield "make train: most held-out questions are answered correctly after 80 updates", self._learns
        yield "between logs the host reads nothing from the device", self._reads_nothing
        yield "2 compiled programs, and 1 for evaluation", self._compiles_little
        yield "a run that was ended and started again continues bit for bit", self._resumes
        yield "an export is read in a new process and gives the tuned model's logits", self._exports

    def _config(self, name: str, **settings: Any) -> TrainConfig:
        """Configures embedded-cot with `settings`, in the subfolder `name`."""
        values = {"output_dir": str(self.folder / name), "generate_rows": 0, **settings}
        return replace(load_config("embedded-cot", values), launch=self.launch)

    def _train(self, name: str, **settings: Any) -> Any:
        """Trains the run of `_config`; returns its `TrainResult`."""
        from tpu_kit.recipes.sft import train

        return train(self._config(name, **settings))

    def _learns(self) -> tuple[bool, str]:
        """Trains the main run; returns whether `_LEAST_CORRECT` or more of its answers are right, and the figures."""
        replicas = detection.detect(self.launch).num_replicas or Machine().tpu_devices()
        asked = {"batch_size": max(1, _ROWS // replicas), "generate_rows": self.questions, "eval_rows": self.questions}
        asked |= self.settings
        metrics = self._train("main", **asked).metrics
        before, after = (round(metrics[f"accuracy_{when}"] * self.questions) for when in ("before", "after"))
        text = f"{before} of {self.questions} before, {after} after; held-out loss {metrics['eval_loss']:.4f}; "
        return after >= _LEAST_CORRECT * self.questions, f"{text}{metrics['train_seconds']:.0f} s to train"

    def _records(self) -> list[dict[str, Any]]:
        """Returns the main run's training records."""
        from tpu_kit.training.metrics import read_metrics

        return [record for record in read_metrics(self.folder / "main") if record["kind"] == "train"]

    def _reads_nothing(self) -> tuple[bool | None, str]:
        """Returns whether updates of the main run read nothing from the device and ran nothing on the host.

        The first item is None off XLA; the second is a text with the figures.
        """
        records = self._records()
        if "host_syncs_per_step" not in records[-1]:
            return None, "counted only on XLA"
        most = {name: max(record[f"{name}_per_step"] for record in records) for name in ("host_syncs", "fallbacks")}
        speed = sorted(record["tokens_per_second"] for record in records)[len(records) // 2]
        return not any(most.values()), f"at most {most['host_syncs']:g} reads per update; {speed:,.0f} tokens/s"

    def _compiles_little(self) -> tuple[bool | None, str]:
        """Returns whether the main run compiled 3 programs at most, None without a compiler, and a text."""
        last = self._records()[-1]
        if not last.get("compiles"):
            return None, "nothing is compiled here"
        return last["compiles"] <= 3, f"{last['compiles']} programs"

    def _resumes(self) -> tuple[bool, str]:
        """Trains a run at once and in two halves; returns whether the adapters have equal bytes, and a text."""
        common = {"schedule": "constant", "warmup_steps": 0, "eval_rows": 0, "eval_steps": None, "logging_steps": 2,
                  "save_steps": _STEPS // 2, "split": "train[:400]"}  # fmt: skip
        self._train("whole", max_steps=_STEPS, **common)
        self._train("again", max_steps=_STEPS // 2, **common)
        result = self._train("again", max_steps=_STEPS, **common)
        adapters = [(self.folder / name / "adapter" / "adapter_model.safetensors").read_bytes()
                    for name in ("whole", "again")]  # fmt: skip
        same = adapters[0] == adapters[1]
        told = "equal" if same else "different"
        return same and result.step == _STEPS, f"{told} adapters after {_STEPS} updates, one stopped at {_STEPS // 2}"

    def _exports(self) -> tuple[bool, str]:
        """Exports the main run as merged; returns whether the export was checked, and the checks' results."""
        from tpu_kit.exporting.export import export

        done = export(self.folder / "main", "merged")
        return bool(done.checks), "; ".join(map(str, done.checks))


def check_claims(
    config: TrainConfig, announce: Callable[[str], None] = lambda name: None, **options: Any
) -> Iterator[Check]:
    """Checks the claims on the devices of `config.launch`; yields a `Check` per claim, whose name is the claim.

    The status is "failure" if the claim does not hold or its check raises, and "skipped" if this machine cannot check
    the claim. `announce` is called with a claim before its check; `options` are `questions` and `settings` of `Claims`.
    The runs print nothing.
    """
    with tempfile.TemporaryDirectory(prefix="tpu_kit-") as folder:
        for text, check in Claims(config.launch, Path(folder), **options).run():
            announce(text)
            output, start = io.StringIO(), time.monotonic()
            status: Status = "failure"
            try:
                with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                    held, found = check()
                status = "skipped" if held is None else "ok" if held else "failure"
            except Exception as error:  # any error: the next claims must still be checked
                found = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            yield Check(text, status, f"{found} ({time.monotonic() - start:.0f} s)")


def paste(config: TrainConfig, verified: Sequence[Check], claims: Sequence[Check]) -> str:
    """Returns the results of `verify` and the claims as a code block for an issue, without secrets and home folder.

    Before the results, it has the number of claims that hold, the devices of `config.launch`, and the versions.
    """
    backend = detection.detect(config.launch)
    versions = {name: installed_version(name) for name in ("tpu_kit", *PACKAGES, *TESTED)}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    held = sum(check.status == "ok" for check in claims)
    tried = sum(check.status != "skipped" for check in claims)
    lines = [
        f"tpu_kit verify --report: {held} of {tried} claims of the README hold here",
        f"{backend}; {os.cpu_count()} cores; {platform.system()}, Python {platform.python_version()}",
        packages,
        "",
        *(f"{MARKS[check.status]} {check.name}: {' '.join(check.found.split())}" for check in (*verified, *claims)),
    ]
    return hide_secrets("\n".join(["```", *lines, "```"])).replace(str(Path.home()), "~")
