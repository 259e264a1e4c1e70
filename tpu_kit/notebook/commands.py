"""Defines the commands `doctor`, `verify` and `notebooks`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from tpu_kit.config.commands import CONFIG, JSON, command, switch
from tpu_kit.config.fields import knob
from tpu_kit.config.loader import read_value


@command("Exit codes: 0 the run can start, 1 it cannot, 2 bad configuration.", CONFIG | JSON)
def doctor(args: argparse.Namespace) -> int:
    """Check this machine for a run, each finding with its fix."""
    from tpu_kit.notebook.doctor import print_findings

    return print_findings(args.config, args.json)


@dataclass
class _Report:
    report: str = knob("verify-report.json", "The file for the report.")


@command(
    "It needs no download. device_type and num_replicas select the devices; attach the report to an issue about a\n"
    "TPU.\n\nExit codes: 0 every check passed, 1 one did not, 2 bad arguments.",
    CONFIG | {"--report": switch("also check the README's claims about a run, and print all results for an issue")},
    (_Report,),
)
def verify(args: argparse.Namespace) -> int:
    """Compare this machine's devices with the CPU and measure them; plan and train use the results."""
    from tpu_kit.notebook.verify import print_report

    return print_report(args.config, args.options[0].report, args.report)


@dataclass
class _Executed:
    out: str = knob("runs/notebooks", "The folder for executed notebooks and HTML.")


@command(
    "Another name=value is a parameter of all notebooks that have it; if none has, of all that configure a run.\n\n"
    "Exit codes: 0 all cells ran, 1 a cell failed, 2 bad arguments, 75 preempted or told to stop: the same command\n"
    "resumes. A notebook counts as preempted if a cell shows such a result of `train`.",
    {
        "notebooks": {"nargs": "*", "metavar": "FILE.ipynb"},
        "--copy": {"metavar": "FOLDER", "help": "write the kit's notebooks to a folder; runs nothing"},
    },
    (_Executed,),
)
def notebooks(args: argparse.Namespace) -> int:
    """Run notebooks in order and save executed notebooks and HTML; or copy the kit's notebooks."""
    from tpu_kit.notebook import copies, runner

    if args.copy is not None:
        others = [*args.notebooks, *args.settings, *(["out"] if args.options != [_Executed()] else [])]
        return copies.print_copies(args.copy, others)
    pairs = (setting.partition("=") for setting in args.settings)
    values = {name: read_value(name, text) for name, _, text in pairs}
    return runner.run([Path(file) for file in args.notebooks], Path(args.options[0].out), values)
