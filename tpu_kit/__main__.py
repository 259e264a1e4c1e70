"""`python -m tpu_kit COMMAND [config.yaml] [key=value ...]`: one entry of COMMANDS per command."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tpu_kit
from tpu_kit.config import ConfigError, describe, explain, load_config
from tpu_kit.fields import closest

OK, FAILED, BAD_CONFIG, PREEMPTED = 0, 1, 2, 75  # 75 is EX_TEMPFAIL of sysexits.h: run it again


@dataclass(frozen=True)
class Command:
    """What `python -m tpu_kit` can do.

    Attributes:
        run: takes the arguments after the command's name and returns the exit code.
        arguments: the rest of the usage line.
        summary: one sentence for the overview.
        details: what `--help` adds; called only then.
    """

    run: Callable[[Sequence[str]], int]
    arguments: str
    summary: str
    details: Callable[[], str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # torch-tpu would open the TPU when torch is imported
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        return OK
    if name == "--version":
        print(f"tpu_kit {tpu_kit.__version__}")
        return OK
    if name not in COMMANDS:
        near = closest(name, COMMANDS)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"{name}: no such command; {advice}", file=sys.stderr)
        return BAD_CONFIG
    command = COMMANDS[name]
    if "-h" in rest or "--help" in rest:
        usage = f"python -m tpu_kit {name} {command.arguments}".rstrip()
        print(f"{usage}\n\n{command.summary}\n\n{command.details()}")
        return OK
    try:
        return command.run(rest)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_CONFIG


def overview() -> str:
    """The text of `python -m tpu_kit --help`."""
    lines = [f"  {name:<11}  {command.summary}" for name, command in COMMANDS.items()]
    usage = "python -m tpu_kit COMMAND [config.yaml] [key=value ...]\npython -m tpu_kit COMMAND --help\n"
    return "\n".join([usage, *lines, "", "  --version", "  --help"])


def train(arguments: Sequence[str]) -> int:
    """Fine-tune; the exit code says how it ended."""
    paths = [argument for argument in arguments if "=" not in argument and not argument.startswith("-")]
    if len(paths) > 1:
        raise ConfigError([f"{', '.join(paths)}: one configuration file at most; the others are key=value"])
    others = [argument for argument in arguments if argument not in [*paths, "--exact"]]
    config = load_config(paths[0] if paths else None, others)
    print(describe(config), flush=True)

    # Only now: these load torch, which takes seconds, and a bad configuration should be told at once.
    from tpu_kit.launch import LaunchError
    from tpu_kit.sft import train as run

    try:
        result = run(config, exact="--exact" in arguments)
    except ConfigError:
        raise
    except (LaunchError, ValueError) as error:
        print(error, file=sys.stderr)  # a replica's failure holds its own traceback; ours would say nothing more
        return FAILED
    print(result)
    return PREEMPTED if result.status == "preempted" else OK


def doctor(arguments: Sequence[str]) -> int:
    """Check the environment."""
    from tpu_kit.doctor import main as run

    return run(list(arguments))


def checkpoints(arguments: Sequence[str]) -> int:
    """List the checkpoints of a run."""
    from tpu_kit.manifest import main as run

    return run(list(arguments))


def evaluate(arguments: Sequence[str]) -> int:
    """Compare base and tuned model."""
    from tpu_kit.evaluate import main as run

    return run(list(arguments))


def _evaluate_details() -> str:
    from tpu_kit.evaluate import explain as parameters

    return (
        "The held-out rows are those of `train`; those that the training data ask too are left out. generate_rows=200\n"
        "bounds them, generate_tokens the length of an answer, verifier says what judges it.\n\n"
        "Exit codes: 0 done, 1 error, 2 bad arguments.\n\n"
        f"Parameters, besides those of `train`:\n{parameters()}"
    )


def search(arguments: Sequence[str]) -> int:
    """Answer a question by a tree of thoughts."""
    from tpu_kit.searches import main as run

    return run(list(arguments))


def _search_details() -> str:
    from tpu_kit.searches import explain as parameters

    return f"Exit codes: 0 done, 1 error, 2 bad arguments.\n\nParameters, besides those of `train`:\n{parameters()}"


def export(arguments: Sequence[str]) -> int:
    """Write a tuned model for another program."""
    from tpu_kit.export import main as run

    return run(list(arguments))


def generate(arguments: Sequence[str]) -> int:
    """Complete prompts."""
    from tpu_kit.generate import main as run

    return run(list(arguments))


def plan(arguments: Sequence[str]) -> int:
    """Say what fits, how long it takes and what it costs."""
    from tpu_kit.plans import main as run

    return run(list(arguments))


def notebooks(arguments: Sequence[str]) -> int:
    """Run notebooks as a batch job."""
    from tpu_kit.headless import main as run

    return run(list(arguments))


def _notebooks_details() -> str:
    from tpu_kit.headless import DETAILS

    return DETAILS


def sweep(arguments: Sequence[str]) -> int:
    """Run a notebook with many parameter sets."""
    from tpu_kit.sweep import main as run

    return run(list(arguments))


def _sweep_details() -> str:
    from tpu_kit.sweep import DETAILS

    return DETAILS


def _plan_details() -> str:
    from tpu_kit.plans import USAGE

    return USAGE


def _generate_details() -> str:
    from tpu_kit.generate import explain as parameters

    return f"Exit codes: 0 done, 1 error, 2 bad arguments.\n\nParameters, besides those of `train`:\n{parameters()}"


COMMANDS = {
    "checkpoints": Command(
        checkpoints,
        "OUTPUT_DIR | gs://bucket/run [--verify] [--json]",
        "List a run's checkpoints: steps, sizes, age, validity, metrics.",
        lambda: "Exit codes: 0 all are good, 1 one is damaged, 2 bad arguments. --verify reads and checks every file.",
    ),
    "doctor": Command(
        doctor,
        "[config.yaml | name of a shipped one] [key=value ...] [--json]",
        "Check this machine for a run, each finding with its fix.",
        lambda: (
            "Exit codes: 0 nothing stands in the way of the run, 1 something does, 2 bad configuration.\n\n"
            "The configuration is that of `train`, whose --help lists the parameters; --json prints a list of objects."
        ),
    ),
    "evaluate": Command(
        evaluate,
        "[config.yaml | name of a shipped one] adapter=runs/my-run/adapter [key=value ...] [--json]",
        "Compare the base and the tuned model on held-out rows.",
        _evaluate_details,
    ),
    "export": Command(
        export,
        "RUN_DIR [format=merged] [out=...] [dtype=bf16] [base=owner/name] [push=owner/name] [--json]",
        "Write a tuned model for PEFT, transformers, vLLM, llama.cpp or Ollama, and check it.",
        lambda: (
            "format   adapter, merged, vllm, gguf-f16, gguf-bf16, gguf-q8_0 or gguf-lora\n"
            "out      the folder; RUN_DIR/export/FORMAT by default; an earlier export there is replaced\n"
            "dtype    of merged weights: bf16, f16 or fp32\n"
            "base     the base model's name on the hub, where it was trained from a folder\n"
            "push     a repository on the hub to send it to, with the token in HF_TOKEN\n\n"
            "Exit codes: 0 written and checked, 1 refused, or not the tuned model, 2 bad arguments."
        ),
    ),
    "generate": Command(
        generate,
        '[config.yaml | name of a shipped one] prompt="..." [key=value ...] [--json]',
        "Answer prompts with a base or tuned model.",
        _generate_details,
    ),
    "notebooks": Command(
        notebooks,
        "FILE.ipynb ... [out=runs/notebooks] [name=value ...]",
        "Run notebooks one after the other, into executed notebooks and HTML.",
        _notebooks_details,
    ),
    "plan": Command(
        plan,
        "[config.yaml | name of a shipped one] [key=value ...] [--chip v5e[,v6e,...]] [--exact] [--json]",
        "Say before a run which settings fit a TPU, how long it takes and what it costs.",
        _plan_details,
    ),
    "search": Command(
        search,
        '[config.yaml | name of a shipped one] prompt="..." [max_thoughts=5] [key=value ...] [--json]',
        "Answer a question by a tree of thoughts, and print the tree.",
        _search_details,
    ),
    "sweep": Command(
        sweep,
        "notebook.ipynb sweep.yaml",
        "Run a notebook with many parameter sets, one after the other.",
        _sweep_details,
    ),
    "train": Command(
        train,
        "[config.yaml | name of a shipped one] [key=value ...] [--exact]",
        "Fine-tune a model.",
        lambda: (
            "Exit codes: 0 finished, 1 error, 2 bad configuration, 75 preempted (the same command goes on).\n"
            "--exact asks the TPU compiler before the launch whether the batch fits.\n\n"
            f"Parameters (without their section where no other has the name, as in batch_size=2):\n{explain()}"
        ),
    ),
}

if __name__ == "__main__":
    sys.exit(main())
