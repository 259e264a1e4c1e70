"""The command line: `python -m tpu_kit COMMAND [files] [--flags] [key=value ...]`.

Each command is a `@command` function. argparse reads files and flags. A `key=value` sets a field of the command's own
dataclasses, or else a parameter of the run's configuration. A command imports its modules when it runs, so help and
error messages do not load torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_origin

import tpu_kit
from tpu_kit.config.fields import closest, knob, knobs_of
from tpu_kit.config.loader import ConfigError, describe, explain, read_value
from tpu_kit.distributed.output import safe_output
from tpu_kit.exporting.options import ExportOptions
from tpu_kit.generation.requests import AnsweringModel, Prompts, Question
from tpu_kit.generation.sampling import Sampling, SearchOptions
from tpu_kit.machine.storage.run_folder import AUTO, read_command
from tpu_kit.pods.engines import ENGINES

OK, FAILED, BAD_USAGE, PREEMPTED = 0, 1, 2, 75  # 75 is EX_TEMPFAIL of sysexits.h: try again


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    with safe_output():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    texts = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if not texts[0].startswith("-") and texts[0] not in COMMANDS:
        near = closest(texts[0], COMMANDS)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"{texts[0]}: no such command; {advice}", file=sys.stderr)
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
        print(f"ended by {killed}" if killed else f"ended by sys.exit({end.code!r}) of its code", file=sys.stderr)
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

        ours = isinstance(error, OSError) and error.args[1:] != (os.strerror(error.errno or 0),)  # with a remedy
        if args is None or not (ours or isinstance(error, ValueError | LaunchError | HostError)):
            raise
        print(error, file=sys.stderr)  # the text has the traceback of a failed replica
        return PREEMPTED if isinstance(error, HostError) and error.again else FAILED


# ------------------------------------------------------------------------------------------------------------- parsing


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError with the correct form."""
        raise ConfigError([f"{message}; write {' '.join(self.format_usage().split()[1:])}"])


_OPTIONS: Any = {"formatter_class": partial(argparse.RawDescriptionHelpFormatter, width=120), "allow_abbrev": False}
_PARSER = Parser(prog="python -m tpu_kit", **_OPTIONS)
_PARSER.add_argument("--version", action="version", version=f"tpu_kit {tpu_kit.__version__}")
_COMMANDS = _PARSER.add_subparsers(title="commands", metavar="COMMAND", required=True)
COMMANDS: Mapping[str, Parser] = _COMMANDS.choices
"""The parser of each command."""

Run = Callable[[argparse.Namespace], int]


def command(
    details: str, arguments: Mapping[str, Mapping[str, Any]], own: Sequence[type] = (), others: bool = True
) -> Callable[[Run], Run]:
    """Registers a function as a command of its name, with its docstring as the summary.

    Args:
        details: what --help adds, such as exit codes.
        arguments: files and flags, as `add_argument` takes them.
        own: the dataclasses of its own `key=value`.
        others: whether it takes other `key=value`: parameters of a run or of a notebook.
    """

    def add(run: Run) -> Run:
        name, parts = run.__name__, [details]
        if texts := [str(parameter) for kind in own for parameter in knobs_of(kind).values()]:
            parts.append("\n".join(["Its own key=value:", *texts]))
        if name == "train":
            note = "(without their section where no other has the name, as in batch_size=2)"
            parts.append(f"Parameters {note}:\n{explain()}")
        elif others:
            parts.append("The other parameters are those of `train`; its --help lists them.")
        about, epilog = run.__doc__, "\n\n".join(parts)
        parser = _COMMANDS.add_parser(name, help=about, description=about, epilog=epilog, **_OPTIONS)
        for argument, options in arguments.items():
            parser.add_argument(argument, **options)
        parser.set_defaults(function=run)
        if own or others:
            parser.usage = " ".join([*parser.format_usage().split()[1:], "[key=value ...]"])
        _KEYS[name] = own, others
        return run

    return add


_KEYS: dict[str, tuple[Sequence[type], bool]] = {}  # command -> its dataclasses, and whether it takes other keys


def parse(texts: Sequence[str]) -> argparse.Namespace:
    """Reads a command and its arguments.

    Returns:
        The files and flags; `function`, of the command; `config`, if the command takes a configuration, and the
        `adapter` that answers; `options`, an instance of each of its dataclasses; `settings`, the other `key=value`.

    Raises:
        ConfigError: flags or values are wrong, a file is missing, or there are too many files.
        SystemExit: after --help or --version.
    """
    name, *texts = texts
    kinds, others = _KEYS.get(name, ((), False))
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
        raise ConfigError([f"{files}: one configuration file at most; the others are key=value"])
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
            args.config, args.adapter = read_command(args.config, args.settings, named, answers=answers)
        except ConfigError:
            raise
        except ValueError as error:  # a run or an adapter that is not there
            raise ConfigError([str(error)]) from error
    return args


def _is_pair(text: str) -> bool:
    """Returns whether a text is `key=value`, and no flag or path such as runs/learning_rate=0.1."""
    key, equals, _ = text.partition("=")
    return bool(equals) and "/" not in key and not key.startswith("-")


def _read_own(kinds: Sequence[type], pairs: Sequence[str], problems: list[str]) -> tuple[list[Any], list[str]]:
    """Returns an instance of each dataclass, and the pairs that set none of their fields; adds to `problems`."""
    made, names = [], set[str]()
    for kind in kinds:
        fields, values = knobs_of(kind), dict[str, Any]()
        names |= fields.keys()
        for name, _, text in (pair.partition("=") for pair in pairs if pair.partition("=")[0] in fields):
            field = fields[name]
            try:
                if get_origin(field.hint) is tuple:  # an item for each time that it is set
                    values[name] = field.read((*values.get(name, ()), text))
                else:
                    values[name] = field.read(text if field.text_only else read_value(name, text))
            except ValueError as error:
                problems += error.problems if isinstance(error, ConfigError) else [str(error)]
        try:
            made.append(kind(**values))
        except ValueError as error:
            problems.append(str(error))
    return made, [pair for pair in pairs if pair.partition("=")[0] not in names]


# ------------------------------------------------------------------------------------------------------------ commands


def _switch(text: str) -> Mapping[str, Any]:
    return {"action": "store_true", "help": text}


_FILE = "a file, the name of a shipped configuration, or the folder of a run, also in gs://"
_CONFIG = {"config": {"nargs": "?", "metavar": "config.yaml", "help": _FILE}}
_JSON = {"--json": _switch("print JSON, and nothing else")}


@command(
    "Exit codes: 0 all are good, 1 one is damaged, 2 bad arguments.",
    {
        "run": {"metavar": "OUTPUT_DIR", "help": "a folder, or gs://bucket/run"},
        "--verify": _switch("read and check every file"),
        **_JSON,
    },
    others=False,
)
def checkpoints(args: argparse.Namespace) -> int:
    """List a run's checkpoints: steps, sizes, age, validity, metrics."""
    from tpu_kit.training.checkpoint.manager import report

    return report(args.run, args.verify, args.json)


_TRAINS = (
    "Exit codes: 0 finished, 1 error, 2 bad configuration, 75 preempted, or another host is lost or hangs (the same "
    "command resumes)."
)
_EXACT = {"--exact": _switch("ask the TPU compiler first whether the batch fits")}


@command(
    "teacher=FOLDER names the teacher; files=FOLDER keeps its logits. on_policy=true trains on completions that the\n"
    f"model samples, in place of those of the rows.\n\n{_TRAINS}",
    _CONFIG | _EXACT,
)
def distill(args: argparse.Namespace) -> int:
    """Fine-tune a model that learns from a larger one."""
    return _fine_tune(args, "tpu_kit.recipes.distillation")


@command(
    "reward_funcs=[auto] names what judges; adapter=FOLDER is where training starts, run_name=NAME where it writes.\n\n"
    + _TRAINS,
    _CONFIG | _EXACT,
)
def grpo(args: argparse.Namespace) -> int:
    """Train a model on its own answers, by rewards."""
    return _fine_tune(args, "tpu_kit.recipes.grpo")


def _fine_tune(args: argparse.Namespace, recipe: str) -> int:
    print(describe(args.config), flush=True)
    result = getattr(importlib.import_module(recipe), args.function.__name__)(args.config, exact=args.exact)
    print(result)
    return PREEMPTED if result.status == "preempted" else OK


@command("Exit codes: 0 the run can start, 1 it cannot, 2 bad configuration.", _CONFIG | _JSON)
def doctor(args: argparse.Namespace) -> int:
    """Check this machine for a run, each finding with its fix."""
    from tpu_kit.notebook.doctor import report

    return report(args.config, args.json)


@command(
    "The held-out rows are those of the adapter's run, or else those of `train`, without questions that the training\n"
    "data have too. generate_rows=200 limits the rows, generate_tokens the length of an answer; verifier judges it.\n"
    "With an adapter the result is written as eval.json into the run's folder.\n\n"
    "Exit codes: 0 done, 1 error, 2 bad arguments.",
    _CONFIG | _JSON,
    (AnsweringModel,),
)
def evaluate(args: argparse.Namespace) -> int:
    """Compare the base and the tuned model on held-out rows."""
    from tpu_kit.generation.evaluation import evaluate as evaluation

    (options,) = args.options
    if args.adapter:
        comparison = evaluation.evaluate_adapter(args.config, args.adapter, chat=options.chat)
        text, values = str(comparison), comparison.to_dict()
    else:
        prepared = evaluation.held_out(args.config, plain=options.chat is False)
        report = evaluation.evaluate(args.config, prepared)
        seen = prepared.eval_report.seen_in_training if prepared.eval_report else 0
        text = f"base model only\n{report}\n{seen} rows left out, because the training data have their questions"
        values = {"base": report.to_dict(), "seen_in_training": seen}
    print(json.dumps(values, indent=2) if args.json else text)
    return OK


@command(
    "Exit codes: 0 written and checked, 1 refused, or different from the tuned model, 2 bad arguments.",
    {"run": {"metavar": "RUN_DIR", "help": "the output of training: a folder, or gs://bucket/run"}, **_JSON},
    (ExportOptions,),
    others=False,
)
def export(args: argparse.Namespace) -> int:
    """Write a tuned model for PEFT, transformers, vLLM, llama.cpp or Ollama, and check it."""
    from tpu_kit.exporting.export import export as run

    done = run(args.run, **asdict(args.options[0]))
    print(json.dumps(asdict(done), indent=1) if args.json else done)
    return OK


@command(
    "Without a prompt, on a terminal, it is a chat: /exit or Ctrl-D ends it.\n\n"
    "Exit codes: 0 done, 1 error, 2 bad arguments.",
    _CONFIG | _JSON,
    (Prompts, Sampling),
)
def generate(args: argparse.Namespace) -> int:
    """Answer prompts with a base or tuned model."""
    from tpu_kit.generation import service as generation

    request, sampling = args.options
    if not request.asked:
        generation.chat(args.config, sampling, adapter_dir=args.adapter, template=request.chat)
        return OK
    settings = {"adapter_dir": args.adapter, "truncate": request.truncate, "chat": request.chat}
    if len(request.asked) == request.n == 1 and not args.json:
        generation.stream(args.config, request.asked[0], sampling, **settings)
        return OK
    replies = generation.generate(args.config, request.asked, sampling, request.n, batch_size=request.rows, **settings)
    texts = (f"[{row // request.n}.{row % request.n}] {reply.text.strip()}" for row, reply in enumerate(replies))
    print(json.dumps([vars(reply) for reply in replies]) if args.json else "\n\n".join(texts))
    return OK


@dataclass
class _Executed:
    out: str = knob("runs/notebooks", "The folder for executed notebooks and HTML.")


@command(
    "Another name=value is a parameter of each notebook that has it; if none has, of those that configure a run.\n\n"
    "Exit codes: 0 all cells ran, 1 one failed, 2 bad arguments, 75 preempted or told to stop: the same command\n"
    "resumes. A notebook counts as preempted if a cell shows such a result of `train`.",
    {"notebooks": {"nargs": "+", "metavar": "FILE.ipynb"}},
    (_Executed,),
)
def notebooks(args: argparse.Namespace) -> int:
    """Run notebooks one after the other, into executed notebooks and HTML."""
    from tpu_kit.notebook.runner import run

    pairs = (setting.partition("=") for setting in args.settings)
    values = {name: read_value(name, text) for name, _, text in pairs}
    return run([Path(file) for file in args.notebooks], Path(args.options[0].out), values)


@command(
    "batch_size and remat are chosen unless they are set. A folder with only a config.json is a model. A run that\n"
    "sets a parameter of rl is planned as `grpo` trains it.\n\n"
    "Exit codes: 0 the plans are printed (also of runs that do not fit), 2 bad arguments.",
    {
        **_CONFIG,
        "--chip": {
            "metavar": "NAME,...",
            "help": "chips (v5e), slices (v5litepod-8) or topologies (v5e:2x4), or kaggle, colab; v5e by default",
        },
        "--exact": _switch("ask the real TPU compiler; some minutes for each chip"),
        "--details": _switch("print memory by part, settings, limits and assumptions too"),
        "--models": _switch("list the models that need no network; with --chip, the largest that train there"),
        **_JSON,
    },
)  # fmt: skip
def plan(args: argparse.Namespace) -> int:
    """Find the settings that fit a TPU, their duration and their cost."""
    from tpu_kit.machine.checks import Machine
    from tpu_kit.machine.slices import ON_GPU
    from tpu_kit.model.architecture import known_models
    from tpu_kit.planning.planner import plan as find
    from tpu_kit.planning.report import largest, report

    if not args.chip and (args.config.launch.device_type == "cuda" or Machine().gpus()):
        print(f"For a v5e, as --chip names no TPU. {ON_GPU}.", file=sys.stderr)
    names = [name.strip() for name in (args.chip or "v5e").split(",")]
    try:
        if args.models:
            print(largest(names) if args.chip else known_models())
            return OK
        plans = find(args.config, names, args.exact)
    except ValueError as error:
        print(error, file=sys.stderr)
        return BAD_USAGE
    for plan in plans:
        if plan.note:
            print(f"{plan.where.name}: {plan.note}", file=sys.stderr)
    if args.json:
        print(json.dumps([plan.to_dict() for plan in plans], indent=2))
    else:
        print(report(args.config, plans, [*filter(None, [args.file]), *args.settings], args.details))
    return OK


@command(
    "It starts nothing. The files name the secrets that are set here (HF_TOKEN, WANDB_API_KEY), never their values.\n\n"
    "Exit codes: 0 written, 1 the folder cannot be written, 2 bad arguments.",
    {
        **_CONFIG,
        "--slice": {"required": True, "metavar": "NAME", "help": "the slice, such as v5litepod-64 or v4-32"},
        "--with": {"required": True, "dest": "engine", "choices": list(ENGINES), "help": "what launches the job"},
        "--spot": _switch("ask for Spot capacity, which is cheaper and may be taken away"),
        "--zone": {"metavar": "ZONE", "help": "where; xpk and gcloud need it"},
        "--image": {"metavar": "NAME", "help": "for jobset and xpk another container image"},
        "--out": {"metavar": "FOLDER", "help": "the folder for the files; pods/RUN_NAME/ENGINE by default"},
    },
)
def pod(args: argparse.Namespace) -> int:
    """Write the files and commands that run a configuration on a slice of several hosts."""
    from tpu_kit.pods.report import write
    from tpu_kit.pods.slice_job import check_job

    job = check_job(args.config, args.slice, args.engine, args.zone, args.image, args.spot)
    print(write(job, args.engine, Path(args.out or f"pods/{job.name}/{args.engine}")))
    return OK


@dataclass
class _Window:
    steps: int = knob(20, "Steps to trace.", at_least=1, at_most=200)
    chip: str | None = knob(None, "A TPU that is not here, such as v5e: profile the compiled program instead.")


@command(
    "It runs the step without evaluations, trackers and checkpoints, and writes the trace and profile.png to\n"
    "OUTPUT_DIR/profile. A trace of a TPU opens in XProf (pip install xprof), that of a CPU or GPU in Perfetto.\n\n"
    "Exit codes: 0 the report is printed, 1 error, 2 bad arguments.",
    _CONFIG,
    (_Window,),
)
def profile(args: argparse.Namespace) -> int:
    """Measure or predict where the time of a step goes, and what to change."""
    from tpu_kit.profiling.profile import profile as run

    (options,) = args.options
    print(run(args.config, options.steps, options.chip))
    return OK


@command("Exit codes: 0 done, 1 error, 2 bad arguments.", _CONFIG | _JSON, (Question, SearchOptions))
def search(args: argparse.Namespace) -> int:
    """Answer a question by a tree of thoughts, and print the tree."""
    from tpu_kit.generation.tree_search import think

    question, options = args.options
    tree = think(args.config, question.prompt, options, adapter_dir=args.adapter, chat=question.chat)
    if question.out:
        Path(question.out).write_text(tree._repr_html_())
    print(json.dumps(tree.to_dict(), indent=2) if args.json else tree)
    return OK


@command(_TRAINS, _CONFIG | _EXACT)
def train(args: argparse.Namespace) -> int:
    """Fine-tune a model."""
    return _fine_tune(args, "tpu_kit.recipes.sft")


@dataclass
class _Report:
    report: str = knob("verify-report.json", "The file for the report.")


@command(
    "It needs no download. device_type and num_replicas select the devices; attach the report to an issue about a\n"
    "TPU.\n\nExit codes: 0 every check passed, 1 one did not, 2 bad arguments.",
    _CONFIG | {"--report": _switch("check what the README says of a run too, and print all to paste into an issue")},
    (_Report,),
)
def verify(args: argparse.Namespace) -> int:
    """Compare this machine's devices with the CPU and measure them; plan and train use the results."""
    from tpu_kit.notebook.verify import report

    return report(args.config, args.options[0].report, args.report)
