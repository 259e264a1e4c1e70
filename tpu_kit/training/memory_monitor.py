"""Memory as it was measured while training, of every device and of the host, beside what was predicted.

Each replica writes its figures into a small file when it logs, and rank 0 reads them all: no device has to wait for
that, and no other replica.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys

from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed.runtime import Runtime
from tpu_kit.hardware.chips import GIB
from tpu_kit.storage import atomic

WARN = 0.05
"""Difference between measured and predicted peak that is warned of."""


class MemoryMonitor:
    """What one replica notes of its memory; rank 0 also reads what the others noted.

    Args:
        config: the run.
        rt: the replica's runtime.
        predicted: bytes of a device by formula; None where nothing was predicted.
    """

    def __init__(self, config: TrainConfig, rt: Runtime, predicted: int | None = None) -> None:
        self._rt = rt
        self._folder = config.output_path / ".memory"
        self._warned = False
        self.predicted = predicted
        self._folder.mkdir(parents=True, exist_ok=True)
        # What an earlier launch left: each replica its own, as another one may have noted something already.
        (self._folder / f"{rt.rank}.json").unlink(missing_ok=True)

    def note(self) -> None:
        """Writes down the highest figures so far."""
        figures = {"pid": os.getpid(), "host": _host_peak(), "device": self._rt.memory()[0]}
        atomic.write_text(self._folder / f"{self._rt.rank}.json", json.dumps(figures))

    def read(self) -> dict[str, float]:
        """For the log: host_peak_bytes, and where devices count, their peaks, the spread, and the prediction.

        device_peak_bytes is the largest of them, device_peak_difference its share above the prediction (negative below
        it), device_imbalance the share that the smallest is below the largest.
        """
        paths = [self._folder / f"{rank}.json" for rank in range(self._rt.world_size)]
        noted = {rank: json.loads(path.read_text()) for rank, path in enumerate(paths) if path.is_file()}
        # Replicas may be threads of one process.
        host = {one["pid"]: one["host"] for one in noted.values()}
        values: dict[str, float] = {"host_peak_bytes": sum(host.values())}
        devices = {rank: noted[rank]["device"] for rank in sorted(noted) if noted[rank]["device"] is not None}
        if not devices:
            return values
        most = max(devices.values())
        values |= {f"device_{rank}_peak_bytes": size for rank, size in devices.items()}
        values |= {"device_peak_bytes": most, "device_imbalance": 1 - min(devices.values()) / most if most else 0.0}
        if self.predicted:
            values |= {"predicted_peak_bytes": self.predicted, "device_peak_difference": most / self.predicted - 1}
            self._warn(values)
        return values

    def end(self) -> dict[str, float]:
        """The last figures of all replicas; all come here, and rank 0 prints and returns them."""
        self.note()
        self._rt.barrier()
        if self._rt.rank:
            return {}
        values = self.read()
        shutil.rmtree(self._folder, ignore_errors=True)
        print(describe(values), flush=True)
        return values

    def _warn(self, values: dict[str, float]) -> None:
        # The formula is a TPU's: of a GPU it is no news that it is off.
        if self._warned or self._rt.device_type != "tpu" or abs(values["device_peak_difference"]) <= WARN:
            return
        self._warned = True
        print(f"warning: more than {WARN:.0%} off the prediction: {describe(values)}", file=sys.stderr, flush=True)


def describe(values: dict[str, float]) -> str:
    """The figures of `MemoryMonitor.read` as text."""
    host = f"host memory      {values['host_peak_bytes'] / GIB:.2f} GiB at most"
    if "device_peak_bytes" not in values:
        return host
    text = f"device memory    {values['device_peak_bytes'] / GIB:.2f} GiB at most"
    if "predicted_peak_bytes" in values:
        predicted = values["predicted_peak_bytes"] / GIB
        text += f", {values['device_peak_difference']:+.1%} against the {predicted:.2f} predicted"
    return f"{text}; the least of a device is {values['device_imbalance']:.1%} lower\n{host}"


def _host_peak() -> int:
    """The most resident memory of this process so far, bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
