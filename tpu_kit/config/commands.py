"""Declares commands of `python -m tpu_kit`, and the arguments that several commands share.

    @command("Exit codes: 0 the run can start, 1 it cannot, 2 bad configuration.", CONFIG | JSON)
    def doctor(args: argparse.Namespace) -> int:
        '''Check this machine for a run, each finding with its fix.'''

`config.registry.COMMANDS` lists the commands. Their modules import no torch, so that help and usage errors are fast;
a command's function has the other imports.
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
        run: takes the result of `cli.parse`, and returns the exit code.
        details: text that --help shows after the summary, such as exit codes.
        arguments: files and flags: the keyword arguments of `add_argument` by the argument's name, such as "--json".
        own: dataclasses whose `knob` fields the command takes as `key=value`.
        others: whether it also takes the parameters of a run or of a notebook as `key=value`.
    """

    run: Run
    details: str
    arguments: Mapping[str, Mapping[str, Any]]
    own: Sequence[type] = ()
    others: bool = True

    @property
    def summary(self) -> str:
        """The docstring of `run`, empty if it has none; --help shows it."""
        return self.run.__doc__ or ""


def command(
    details: str, arguments: Mapping[str, Mapping[str, Any]], own: Sequence[type] = (), others: bool = True
) -> Callable[[Run], Command]:
    """Returns a decorator that makes a function a `Command` with these attributes and the docstring as summary."""
    return lambda run: Command(run, details, arguments, own, others)


def switch(text: str) -> Mapping[str, Any]:
    """Returns the `add_argument` arguments of a flag with the help `text`."""
    return {"action": "store_true", "help": text}


_FILE = "a file, the name of a shipped configuration, or the folder of a run, also in gs://"
CONFIG: dict[str, Mapping[str, Any]] = {"config": {"nargs": "?", "metavar": "config.yaml", "help": _FILE}}
JSON: dict[str, Mapping[str, Any]] = {"--json": switch("print JSON, and nothing else")}
