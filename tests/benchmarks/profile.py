"""Measures the cost of profiling for steps outside its window, on the CPU with the embedded model.

    python -m tests.benchmarks.profile [rounds=5] [key=value ...]

Each round trains the same steps with the recorder and without it. The result is the ratio of the medians of the steps
after the window, in processor time, which other processes do not change. The limit is 1.05.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from statistics import median

from tests.support.profile_functions import step_seconds
from tpu_kit.config.loader import load_config
from tpu_kit.distributed.launch import launch
from tpu_kit.extras.profile.recorder import window

STEPS, AFTER_WINDOW = 16, 6


def main(arguments: list[str]) -> None:
    """Prints the ratio."""
    rounds = int(next((text.partition("=")[2] for text in arguments if text.startswith("rounds=")), "5"))
    others = [text for text in arguments if not text.startswith("rounds=")]
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            load_config("embedded-cot", [
                "device_type=cpu", "num_replicas=1", "generate_rows=0", "save_steps=10000", "max_length=128",
                f"output_dir={folder}/{name}", f"max_steps={window(STEPS)}", f"run_name={name}", *others,
            ])
            for name in ("plain", "recorded")
        ]  # fmt: skip
        found = launch(partial(step_seconds, runs, rounds), runs[0])
    plain, recorded_too = (median(one for turn in turns for one in turn[-AFTER_WINDOW:]) for turns in found)
    print(
        f"{1000 * plain:.1f} ms of processor time without, {1000 * recorded_too:.1f} with: {recorded_too / plain:.3f}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
