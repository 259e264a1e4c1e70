"""Measures the processor time of `make train` with and without hub.strategy=checkpoint, against a local hub.

    python -m tests.benchmarks.hub [RUNS]

Prints the medians of five alternating runs and their ratio. The times include all processes, the export and the push.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.child_processes import REPOSITORY, child_environment
from tests.support.hub import NAME, TOKEN, run_hub

NOTEBOOK = REPOSITORY / "notebooks" / "4-train-cot-sft.ipynb"
MADE = ["eval_rows=100", "generate_rows=100", "num_replicas=4"]  # as the Makefile sets them
PUSHED = [f"push_to={NAME}", "strategy=checkpoint", "save_steps=20"]


def seconds(folder: Path, url: str, more: list[str]) -> float:
    """Returns the processor time of a run and all its processes, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    settings = {"HF_TOKEN": TOKEN, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    environment = child_environment({"PYTHONPATH": str(REPOSITORY), "PJRT_DEVICE": "CPU", **settings})
    command = [sys.executable, "-m", "tpu_kit", "notebooks", str(NOTEBOOK), *MADE, *more, f"out={folder}"]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(runs: int = 5) -> None:
    times: dict[str, list[float]] = {"alone": [], "pushed": []}
    with run_hub() as hub:
        hub.roles[TOKEN] = "write"
        for _ in range(runs):
            for name, more in (("alone", ["save_steps=20"]), ("pushed", PUSHED)):
                with tempfile.TemporaryDirectory() as folder:
                    times[name].append(seconds(Path(folder), hub.url, more))
                print(f"{name:8}{times[name][-1]:8.1f} s", flush=True)
        commits = hub.repositories[NAME].messages
    medians = {name: statistics.median(each) for name, each in times.items()}
    print(f"{os.cpu_count()} processors; {len(commits)} commits: {', '.join(commits)}")
    print(f"medians: {medians['alone']:.1f} s alone, {medians['pushed']:.1f} s pushed")
    print(f"ratio {medians['pushed'] / medians['alone']:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
