"""The command `profile`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from tpu_kit.config.commands import CONFIG, OK, command
from tpu_kit.config.fields import knob


@dataclass
class _Window:
    steps: int = knob(20, "Steps to trace.", at_least=1, at_most=200)
    chip: str | None = knob(None, "An absent TPU, such as v5e: profile the compiled program instead of running it.")


@command(
    "It runs the step without evaluations, trackers and checkpoints, and writes the trace and profile.png to\n"
    "OUTPUT_DIR/profile. Open a TPU's trace in XProf (pip install xprof), a CPU's or GPU's trace in Perfetto.\n\n"
    "Exit codes: 0 the report is printed, 1 error, 2 bad arguments.",
    CONFIG,
    (_Window,),
)
def profile(args: argparse.Namespace) -> int:
    """Measure or predict where the time of a step goes, and advise changes."""
    from tpu_kit.extras.profile.profile import profile as run

    (options,) = args.options
    print(run(args.config, options.steps, options.chip))
    return OK
