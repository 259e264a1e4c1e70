"""The command line: `python -m tpu_kit COMMAND [files] [--flags] [key=value ...]`.

`config.registry` lists the commands. argparse reads files and flags. A `key=value` sets a field of the command's own
dataclasses, or else a parameter of the run's configuration.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, get_origin

import tpu_kit
from tpu_kit.config import registry
from tpu_kit.config.commands import BAD_USAGE, FAILED, OK, PREEMPTED, Command
from tpu_kit.config.fields import closest, knobs_of
from tpu_kit.config.loader import ConfigError, explain, read_value
from tpu_kit.distributed.output import safe_output
from tpu_kit.generation.requests import AnsweringModel
from tpu_kit.machine.storage.run_config import AUTO, read_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command in `arguments` (None: `sys.argv`; none: --help) and returns its exit code.

    Errors with advice are printed on stderr, and give 2 for a ConfigError, else 1 or, if a later start may help, 75.
    Signals give 128 + number. All other errors are raised.
    """
    with safe_output():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    texts = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if not texts[0].startswith("-") and texts[0] not in COMMANDS:
        near = closest(texts[0], COMMANDS)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        absent = registry.absence(registry.COMMANDS.get(texts[0], ""))
        print(f"{texts[0]}: {absent or f'no such command; {advice}'}", file=sys.stderr)
        return BAD_USAGE
    args = None
    try:
        args = parse(texts)
        return args.function(args)
    except SystemExit as end:
        if args is None:  # --help or --version
            return OK
        from tpu_kit.distributed.preemption import STOPS, stop_name

        killed = stop_name(end)
        print(f"ended by {killed}" if killed else f"ended by sys.exit({end.code!r}) in the code", file=sys.stderr)
        return next((128 + number for number in STOPS if number.name == killed), FAILED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_USAGE
    except (ValueError, RuntimeError, OSError) as error:
        from tpu_kit.distributed.launch import LaunchError
        from tpu_kit.distributed.meeting import HostError

        ours = isinstance(error, OSError) and error.args[1:] != (os.strerror(error.errno or 0),)  # with advice
        if args is None or not (ours or isinstance(error, ValueError | LaunchError | HostError)):
            raise
        print(error, file=sys.stderr)  # the message has the traceback of a failed replica
        return PREEMPTED if isinstance(error, HostError) and error.again else FAILED


# ------------------------------------------------------------------------------------------------------------- parsing


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError with the message and the usage; never returns."""
        raise ConfigError([f"{message}; write {' '.join(self.format_usage().split()[1:])}"])


_OPTIONS: Any = {"formatter_class": partial(argparse.RawDescriptionHelpFormatter, width=120), "allow_abbrev": False}
_INSTALLED: Mapping[str, Command] = {
    name: registry.load(place) for name, place in registry.installed(registry.COMMANDS).items()
}
_PARSER = Parser(prog="python -m tpu_kit", **_OPTIONS)
_PARSER.add_argument("--version", action="version", version=f"tpu_kit {tpu_kit.__version__}")
_PARSERS = _PARSER.add_subparsers(title="commands", metavar="COMMAND", required=True)
COMMANDS: Mapping[str, Parser] = _PARSERS.choices
"""Command -> its parser, for the commands in this installation."""


def _add_parser(name: str, command: Command) -> None:
    """Adds the parser of a command, with its help, to `COMMANDS`."""
    parts = [command.details]
    if texts := [str(parameter) for kind in command.own for parameter in knobs_of(kind).values()]:
        parts.append("\n".join(["Its own key=value:", *texts]))
    if name == "train":
        note = "(the section may be omitted if the name is unique, as in batch_size=2)"
        parts.append(f"Parameters {note}:\n{explain()}")
    elif command.others:
        parts.append("It also takes the parameters of `train`; its --help lists them.")
    about, epilog = command.summary, "\n\n".join(parts)
    parser = _PARSERS.add_parser(name, help=about, description=about, epilog=epilog, **_OPTIONS)
    for argument, options in command.arguments.items():
        parser.add_argument(argument, **options)
    parser.set_defaults(function=command.run)
    if command.own or command.others:
        parser.usage = " ".join([*parser.format_usage().split()[1:], "[key=value ...]"])


for _name, _command in _INSTALLED.items():
    _add_parser(_name, _command)


def parse(texts: Sequence[str]) -> argparse.Namespace:
    """Reads the command line: a command, which is the first text, its arguments, its configuration and its adapter.

    Returns:
        A namespace with the files and flags; `function`, which runs the command; `options`, an instance of every
        dataclass of the command; and `settings`, the `key=value` texts whose keys are no fields of these dataclasses.
        If the command takes a configuration, it also has

        - file: the argument, None if not given;
        - config: the TrainConfig of `file` with `settings`. Without `file` it is based on the config.yaml of the run
          that the option `adapter` names, or else on the defaults.
        - adapter: the text of the option `adapter`, unchecked, if it is given. Otherwise the folder (Path) or URL of
          the adapter in the run `file`. None means the base model. It is None for adapter=null, and without this
          option if `file` is not given, is no run, or has no adapter.

    Raises:
        ConfigError: a command, flag, key or value is wrong, there are too many files, `file` or its run does not exist,
            or as `load_config`.
        SystemExit: after --help or --version, which are printed.
    """
    name, *texts = texts
    kinds, others = (command.own, command.others) if (command := _INSTALLED.get(name)) else ((), False)
    pairs = [text for text in texts if (kinds or others) and _is_pair(text)]
    words = [text for text in texts if text not in pairs]
    args, more = _PARSER.parse_known_args([name, "--help"] if {"-h", "--help"} & {*words} else [name, *words])
    parser, problems = COMMANDS[name], list[str]()
    if flags := [text for text in more if text.startswith("-")]:
        known = ", ".join(option for action in parser._actions for option in action.option_strings)
        twins = {"--slice": "--chip", "--chip": "--slice"}
        told = []
        for flag in flags:
            twin = twins.get(flag.partition("=")[0], "")
            hint = f"did you mean {twin}? There" if twin and twin in known else "there"
            told.append(f"{flag}: no such option; {hint} are {known}; a parameter is key=value")
        raise ConfigError(told)
    if more and "config" in args:
        files = ", ".join([args.config, *more])
        raise ConfigError([f"{files}: one configuration file at most; write parameters as key=value"])
    if more:
        parser.error(f"{', '.join(more)}: not expected")
    args.options, args.settings = _read_own(kinds, pairs, problems)
    if args.settings and not others:
        keys = ", ".join(key for kind in kinds for key in knobs_of(kind))
        problems += [f"{text.partition('=')[0]}: no such option; there are {keys}" for text in args.settings]
    if problems:
        raise ConfigError(problems)
    if "config" in args:
        args.file = args.config
        named = next((each.adapter for each in args.options if isinstance(each, AnsweringModel)), AUTO)
        answers = any(issubclass(kind, AnsweringModel) for kind in kinds)
        try:
            args.config, args.adapter = read_command(args.config, args.settings, named, answers=answers, command=name)
        except ConfigError:
            raise
        except ValueError as error:  # the run or the adapter does not exist
            raise ConfigError([str(error)]) from error
    return args


def _is_pair(text: str) -> bool:
    """Returns whether a text is `key=value`, not a flag or a path such as runs/learning_rate=0.1."""
    key, equals, _ = text.partition("=")
    return bool(equals) and "/" not in key and not key.startswith("-")


def _read_own(kinds: Sequence[type], pairs: Sequence[str], problems: list[str]) -> tuple[list[Any], list[str]]:
    """Returns instances of the dataclasses, in order, and the `key=value` texts of `pairs` that set no field of them.

    Appends a text for each bad value to `problems`; then the instances must not be used.
    """
    made, names = [], set[str]()
    for kind in kinds:
        fields, values = knobs_of(kind), dict[str, Any]()
        names |= fields.keys()
        for name, _, text in (pair.partition("=") for pair in pairs if pair.partition("=")[0] in fields):
            field = fields[name]
            try:
                if get_origin(field.hint) is tuple:  # each occurrence adds an item
                    values[name] = field.read((*values.get(name, ()), text))
                elif field.is_text(text):
                    values[name] = field.read(None if text in ("null", "None") else text)
                else:
                    values[name] = field.read(read_value(name, text))
            except ValueError as error:
                problems += error.problems if isinstance(error, ConfigError) else [str(error)]
        try:
            made.append(kind(**values))
        except ValueError as error:
            problems.append(str(error))
    return made, [pair for pair in pairs if pair.partition("=")[0] not in names]
