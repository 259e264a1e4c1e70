"""The form of a command of `python -m tpu_kit`, and the arguments that several commands share.

    @command("Exit codes: 0 the run can start, 1 it cannot, 2 bad configuration.", CONFIG | JSON)
    def doctor(args: argparse.Namespace) -> int:
        '''Check this machine for a run, each finding with its fix.'''

`config.registry.COMMANDS` has the place of each. Its module loads no torch, so that help and errors of usage come at
once: the function imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OK, FAILED, BAD_USAGE, PREEMPTED = 0, 1, 2, 75
"""Exit codes; 75 is EX_TEMPFAIL of sysexits.h: try again."""

Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        run: takes what `cli.parse` returns, and returns the exit code.
        details: what --help adds to the summary, such as exit codes.
        arguments: files and flags, as `add_argument` takes them.
        own: the dataclasses of its own `key=value`.
        others: whether it takes other `key=value`: parameters of a run or of a notebook.
    """

    run: Run
    details: str
    arguments: Mapping[str, Mapping[str, Any]]
    own: Sequence[type] = ()
    others: bool = True

    @property
    def summary(self) -> str:
        """The docstring of its function."""
        return self.run.__doc__ or ""


def command(
    details: str, arguments: Mapping[str, Mapping[str, Any]], own: Sequence[type] = (), others: bool = True
) -> Callable[[Run], Command]:
    """Makes a function, whose docstring is the summary, a `Command`; the arguments are its attributes."""
    return lambda run: Command(run, details, arguments, own, others)


def switch(text: str) -> Mapping[str, Any]:
    """Returns a flag without a value, with its help."""
    return {"action": "store_true", "help": text}


_FILE = "a file, the name of a shipped configuration, or the folder of a run, also in gs://"
CONFIG: dict[str, Mapping[str, Any]] = {"config": {"nargs": "?", "metavar": "config.yaml", "help": _FILE}}
JSON: dict[str, Mapping[str, Any]] = {"--json": switch("print JSON, and nothing else")}
