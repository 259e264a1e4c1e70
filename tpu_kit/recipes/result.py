"""The result of a run, for its caller and its user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpu_kit.distributed.preemption import RESULT_TYPE
from tpu_kit.machine.chips import GIB
from tpu_kit.training.trainer import Status


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        status: "finished"; "stopped" by early stopping; "preempted", also by the user: run it again to continue.
        reason: of the early stop or the preemption; empty otherwise.
        step: number of updates done, out of `total_steps`.
        metrics: see `replica.fine_tune`; with tracking.generate_rows also accuracy_before, accuracy_after and, unless
            the rows have no loss, perplexity_before and perplexity_after.
        adapter_dir: folder of the adapter for PEFT, or of the model if lora.r=0; empty after a preemption, and on hosts
            other than host 0.
        checkpoint_dir: folder or URL of the newest checkpoint, None if there is none; on hosts other than host 0, the
            place of all checkpoints.
        output_dir: the run's folder.
        again: `TrainConfig.again`, how to start the run again.
        warning: why the model seems to have learned nothing, by the held-out loss; empty otherwise.
        pushed: URL of the commit on the hub; empty if nothing was pushed.
    """

    status: Status
    reason: str
    step: int
    total_steps: int
    metrics: dict[str, float]
    adapter_dir: str
    checkpoint_dir: str | None
    output_dir: str
    again: str = "run this again"
    warning: str = ""
    pushed: str = ""

    @property
    def ended(self) -> str:
        """`status` for the user: "stopped" if the user stopped the run with Ctrl-C (SIGINT)."""
        return "stopped" if self.reason.startswith("SIGINT") else self.status

    def __str__(self) -> str:
        if self.status == "preempted":
            saved = f"its checkpoint is in {self.checkpoint_dir}" if self.checkpoint_dir else "it has saved nothing yet"
            text = f"{self.ended} at step {self.step} of {self.total_steps} ({self.reason}); {saved}"
            return f"{text}. To go on from there, {self.again}: the same cell, or the same command"
        adapter = self.adapter_dir or "the folder of host 0"
        lines = [f"finished at step {self.step}; adapter in {adapter}"]
        if self.status == "stopped":
            lines = [
                f"stopped early at step {self.step} of {self.total_steps}: {self.reason}; adapter in {adapter}",
                f"  To train on from there, raise optim.early_stop_patience or set it to null, and {self.again}",
            ]
        width = max(map(len, self.metrics), default=0) + 2
        for name, value in self.metrics.items():
            text = f"{value / GIB:.2f} GiB" if name.endswith("_bytes") else f"{value:.6g}"
            lines.append(f"  {name:<{width}}{text}")
        lines += [f"warning: {self.warning}"] if self.warning else []
        return "\n".join(lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Returns the output of a notebook cell, from which `python -m tpu_kit notebooks` reads the status."""
        return {
            "text/plain": str(self),
            RESULT_TYPE: {"status": self.status, "ended": self.ended, "reason": self.reason, "again": self.again},
        }
