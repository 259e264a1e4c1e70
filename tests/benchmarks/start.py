"""Measures the time from the command to the first update.

    python -m tests.benchmarks.start [--rounds 5] [--against FOLDER] [--json]

Each round starts `python -m tpu_kit train` and waits until its log has the first update. `--against` names the root of
another checkout; the two alternate, so that other work on the machine affects both equally. The processor time includes
all processes of the run until then. It depends less on other work than the wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.child_processes import REPOSITORY, child_environment
from tpu_kit.distributed.child_process import processor_times

RUNS = {
    "embedded on the CPU": ["device_type=cpu", "num_replicas=1"],
    "two replicas on XLA:CPU": ["device_type=xla-cpu", "num_replicas=2"],
}
EACH = ["embedded-cot", "max_steps=100000", "warmup_steps=0", "logging_steps=1", "eval_rows=8", "generate_rows=0",
        "eval_steps=null", "save_steps=100000"]  # fmt: skip


def measure(root: Path, settings: list[str], limit: float = 300.0) -> tuple[float, float]:
    """Returns the seconds until the first update, and the processor seconds of all processes until then."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "run", "metrics.jsonl")
        command = [sys.executable, "-m", "tpu_kit", "train", *EACH, *settings, f"output_dir={log.parent}"]
        env = child_environment({"PYTHONPATH": str(root), "PJRT_DEVICE": None})
        began = time.monotonic()
        with subprocess.Popen(
            command, cwd=folder, env=env, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            try:
                while not (log.is_file() and b'"kind": "train"' in log.read_bytes()):
                    assert process.poll() is None, process.stderr and process.stderr.read().decode()
                    assert time.monotonic() - began < limit, "no update"
                    time.sleep(0.01)
                return time.monotonic() - began, sum(processor_times(process.pid).values())
            finally:
                for pid in processor_times(process.pid):  # replicas have a session of their own
                    os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    roots = {"here": REPOSITORY} | ({"against": args.against.resolve()} if args.against else {})
    found = {}
    for name, settings in RUNS.items():
        rounds = [{root: measure(path, settings) for root, path in roots.items()} for _ in range(args.rounds)]
        for root in roots:
            wall, spent = (statistics.median(each) for each in zip(*(one[root] for one in rounds), strict=True))
            found[f"{name}, {root}"] = {"seconds": round(wall, 2), "processor_seconds": round(spent, 2)}
    if args.json:
        print(json.dumps(found))
    else:
        for name, values in found.items():
            print(f"{name:40} {values['seconds']:6.2f} s, {values['processor_seconds']:6.2f} s of the processor")


if __name__ == "__main__":
    main()
