"""The commands that train, query and export a model, and plan a run."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING

from tpu_kit.config.commands import BAD_USAGE, CONFIG, JSON, OK, PREEMPTED, command, switch
from tpu_kit.config.loader import ConfigError, TrainConfig, describe, of_preferences, of_rewards
from tpu_kit.exporting.options import ExportOptions
from tpu_kit.generation.requests import Prompts
from tpu_kit.generation.sampling import Sampling

if TYPE_CHECKING:
    from tpu_kit.recipes.result import TrainResult

_TRAINS = (
    "Exit codes: 0 finished, 1 error, 2 bad configuration, 75 preempted, or another host is lost or hangs (the same "
    "command resumes)."
)
_RUN = CONFIG | {
    "--exact": switch("ask the TPU compiler first whether the batch fits"),
    "--dry-run": switch("print the run plan, and launch nothing"),
    "--json": switch("with --dry-run, print JSON and nothing else"),
}


@command(_TRAINS, _RUN)
def train(args: argparse.Namespace) -> int:
    """Fine-tune a model."""
    return _fine_tune(args, "tpu_kit.recipes.sft")


@command(
    "teacher=FOLDER names the teacher; files=FOLDER stores its logits. on_policy=true trains on completions that the\n"
    f"model samples, in place of the rows' completions.\n\n{_TRAINS}",
    _RUN,
)
def distill(args: argparse.Namespace) -> int:
    """Fine-tune a model that learns from a larger one."""
    return _fine_tune(args, "tpu_kit.recipes.distillation")


@command(
    "reward_funcs=[auto] names the rewards; adapter=FOLDER is the adapter to start from, run_name=NAME the output.\n\n"
    + _TRAINS,
    _RUN,
)
def grpo(args: argparse.Namespace) -> int:
    """Train a model on its own answers, by rewards."""
    return _fine_tune(args, "tpu_kit.recipes.grpo", of_rewards)


@command(
    "source=FILE has rows with a chosen and a rejected reply; losses=[sigmoid] names the losses, pref_beta=0.1 sets\n"
    "how close the model stays to its start; adapter=FOLDER is the adapter to start from, run_name=NAME the output.\n\n"
    + _TRAINS,
    _RUN,
)
def dpo(args: argparse.Namespace) -> int:
    """Train a model on pairs of a better and a worse reply."""
    return _fine_tune(args, "tpu_kit.recipes.preference", of_preferences)


def _fine_tune(
    args: argparse.Namespace, module: str, trained: Callable[[TrainConfig], TrainConfig] | None = None
) -> int:
    """Plans a run, and trains it unless `--dry-run` is given; prints the plan or result; returns `OK` or `PREEMPTED`.

    Args:
        args: the arguments of the command; --json without --dry-run is a ConfigError.
        module: the module of the recipe, with `configured` and a function of the command's name.
        trained: returns the configuration that the recipe trains, printed before training; None: `args.config`.
    """
    if args.json and not args.dry_run:
        raise ConfigError(["--json: add --dry-run, which prints the run plan"])
    if not args.dry_run:
        shown = trained(args.config) if trained else args.config
        print(describe(shown), flush=True)  # before torch is imported, which takes seconds
    recipe = import_module(module)
    if args.dry_run:
        from tpu_kit.recipes.sft import dry_run

        with contextlib.redirect_stdout(sys.stderr):
            plan = dry_run(recipe.configured(args.config), exact=args.exact)
        print(json.dumps(plan.to_dict(), indent=2) if args.json else plan)
        return OK
    result: TrainResult = getattr(recipe, args.function.__name__)(args.config, exact=args.exact)
    print(result)
    return PREEMPTED if result.status == "preempted" else OK


@command(
    "batch_size and remat are chosen unless they are set. A model may be a folder with only a config.json. A run that\n"
    "sets a parameter of rl is planned as `grpo` trains it.\n\n"
    "Exit codes: 0 the plans are printed (also for runs that do not fit), 2 bad arguments.",
    {
        **CONFIG,
        "--chip": {
            "metavar": "NAME,...",
            "help": "chips (v5e), slices (v5litepod-8) or topologies (v5e:2x4), or kaggle, colab; v5e by default",
        },
        "--exact": switch("ask the real TPU compiler; some minutes for each chip"),
        "--details": switch("also print memory by part, settings, limits and assumptions"),
        "--models": switch("list the models that need no network; with --chip, the largest models that train there"),
        **JSON,
    },
)
def plan(args: argparse.Namespace) -> int:
    """Find the settings that fit a TPU, their duration and their cost."""
    from tpu_kit.machine.checks import Machine
    from tpu_kit.machine.slices import ON_GPU
    from tpu_kit.model.weights.source import known_models
    from tpu_kit.planning.planner import plan as find
    from tpu_kit.planning.report import format_plans, largest

    if not args.chip and (args.config.launch.device_type == "cuda" or Machine().gpus()):
        print(f"Planned for a v5e, because --chip names no TPU. {ON_GPU}.", file=sys.stderr)
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
        print(format_plans(args.config, plans, [*filter(None, [args.file]), *args.settings], args.details))
    return OK


@command(
    "Without a prompt, on a terminal, it starts a chat: /exit or Ctrl-D ends it.\n\n"
    "Exit codes: 0 done, 1 error, 2 bad arguments.",
    CONFIG | JSON,
    (Prompts, Sampling),
)
def generate(args: argparse.Namespace) -> int:
    """Answer prompts with a base or tuned model."""
    from tpu_kit.generation import answers as generation

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


@command(
    "Exit codes: 0 written and checked, 1 refused or different from the tuned model, 2 bad arguments.",
    {"run": {"metavar": "RUN_DIR", "help": "the output of training: a folder, or gs://bucket/run"}, **JSON},
    (ExportOptions,),
    others=False,
)
def export(args: argparse.Namespace) -> int:
    """Write a tuned model for PEFT, transformers, vLLM, llama.cpp or Ollama, and check it."""
    from tpu_kit.exporting.export import export_all

    done = export_all(args.run, args.options[0])
    values = [asdict(exported) for exported in done]
    print(json.dumps(values[0] if len(values) == 1 else values, indent=1) if args.json else "\n".join(map(str, done)))
    return OK


@command(
    "Exit codes: 0 all are good, 1 a checkpoint is damaged, 2 bad arguments.",
    {
        "run": {"metavar": "OUTPUT_DIR", "help": "a folder, or gs://bucket/run"},
        "--verify": switch("read and check every file"),
        **JSON,
    },
    others=False,
)
def checkpoints(args: argparse.Namespace) -> int:
    """List a run's checkpoints: steps, sizes, age, validity, metrics."""
    from tpu_kit.training.checkpoint.manager import print_checkpoints

    return print_checkpoints(args.run, args.verify, args.json)
