"""generate(config, prompts): load a model in every replica, and let it complete prompts.

    from tpu_kit.generate import Sampling, generate
    replies = generate(config, [[{"role": "user", "content": "What is 2 + 3?"}]], Sampling(max_new_tokens=64))

The prompts are dealt over the replicas, and what comes out does not depend on how many there are. Where a model is
loaded already, use `Generator`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tpu_kit import runtime
from tpu_kit.answering import Ask, adapter_at_hand, answer, generator_for, load_here
from tpu_kit.completions import Completion, Prompt, to_json
from tpu_kit.config import ConfigError, TrainConfig, load_config
from tpu_kit.generator import Generator
from tpu_kit.launch import LaunchError, launch
from tpu_kit.sampling import Sampling

__all__ = ["Completion", "Generator", "Prompt", "Sampling", "generate", "stream"]


def generate(
    config: TrainConfig,
    prompts: Sequence[Prompt],
    sampling: Sampling | None = None,
    n: int = 1,
    *,
    adapter_dir: str | Path | None = None,
    batch_size: int = 8,
    truncate: bool = False,
) -> list[Completion]:
    """Loads the model in every replica of `config.launch`, and deals the prompts over them.

    Args:
        config: the model, the tags of the reasoning, the system prompt and where it runs.
        prompts: texts, chats (lists of messages) or lists of token ids.
        sampling: how; greedy by default.
        n: samples of each prompt.
        adapter_dir: what training wrote, a folder or gs://bucket/run/adapter; None for the base model.
        batch_size: the most rows of a batch in each replica.
        truncate: leave out the beginning of a prompt that is too long.

    Returns:
        n completions for each prompt, those of a prompt one after the other; the same for any number of replicas.

    Raises:
        ValueError: as in `Generator`; or the model cannot be read, or the adapter is missing, half-written or of
            another model.
        LaunchError: a replica failed.
    """
    ask = Ask(list(prompts), sampling or Sampling(), n, truncate)
    return answer(config, [ask], adapter_dir=adapter_dir, batch_size=batch_size).completions[0]


def stream(
    config: TrainConfig,
    prompt: Prompt,
    sampling: Sampling | None = None,
    *,
    adapter_dir: str | Path | None = None,
    truncate: bool = False,
) -> None:
    """Prints the completion of one prompt as it comes, in a notebook or a terminal; by one replica.

    The arguments and errors are those of `generate`.
    """
    one = replace(config, launch=replace(config.launch, num_replicas=1))
    with adapter_at_hand(adapter_dir) as adapter:
        launch(_Stream(prompt, sampling or Sampling(), adapter, truncate), one)


@dataclass
class _Stream:
    """What the replica does; sent to it, and called there."""

    prompt: Prompt
    sampling: Sampling
    adapter: str | None
    truncate: bool

    def __post_init__(self) -> None:
        self.__qualname__ = "stream"  # what launch calls it

    def __call__(self, config: TrainConfig) -> None:
        model, tokenizer = load_here(config, self.adapter, runtime.current())
        most = self.sampling.max_new_tokens
        generator = generator_for(model, tokenizer, config, [self.prompt], most, batch_size=1)
        for piece in generator.stream(self.prompt, self.sampling, self.truncate):
            print(piece, end="", flush=True)
        print(flush=True)


# --------------------------------------------------------------------------------------------------- the command line

_OWN = {
    "prompt": "The question; may be given several times.",
    "prompts": "A file with more: a text in each line, or .jsonl with a prompt or messages.",
    "adapter": "The folder that training wrote, also in gs://; without it the base model answers.",
    "chat": "Whether prompts go through the chat template (true), or are taken as they stand (false).",
    "n": "Samples of each prompt.",
    "rows": "The most rows of a batch in each replica.",
    "truncate": "Leave out the beginning of a prompt that is too long.",
}
_MANY = ("prompt", "stop")


def explain() -> str:
    """The parameters of the command, for its `--help`."""
    defaults = {field.name: field.default for field in fields(Sampling)}
    lines = [f"  {name:<20}{text}" for name, text in _OWN.items()]
    lines += [f"  {name:<20}of the sampling; {default!r} by default" for name, default in defaults.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """`python -m tpu_kit generate`: completes prompts; returns the exit code."""
    own: dict[str, Any] = {name: [] for name in _MANY}
    rest, problems = [], []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and (name in _OWN or name in _SAMPLING):
            try:
                read = _read_value(name, value)
            except ValueError:
                problems.append(f"{name}: {value!r} is no {_kind(name).__name__}")
                continue
            own[name] = [*own[name], read] if name in _MANY else read
        elif argument != "--json":
            rest.append(argument)
    files = [argument for argument in rest if "=" not in argument]
    problems += [f"{', '.join(files)}: one configuration file at most"] if len(files) > 1 else []
    prompts, more = own.pop("prompt"), own.pop("prompts", None)
    try:
        prompts += _read_prompts(more) if more else []
        sampling = Sampling(**{name: own.pop(name) for name in list(own) if name in _SAMPLING})
    except ValueError as error:
        problems.append(str(error))
    problems += [f"{name}={own[name]}: must be 1 or more" for name in ("n", "rows") if own.get(name, 1) < 1]
    if not prompts and not problems:
        problems.append('prompt: there is none; give prompt="..." or prompts=FILE')
    if problems:
        raise ConfigError(problems)
    config = load_config(files[0] if files else None, [argument for argument in rest if argument not in files])
    if own.pop("chat", True):
        prompts = [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in prompts]
    options = {"adapter_dir": own.pop("adapter", None), "truncate": own.pop("truncate", False)}
    n, as_json = own.pop("n", 1), "--json" in arguments
    try:
        if len(prompts) == n == 1 and not as_json:
            stream(config, prompts[0], sampling, **options)
            return 0
        found = generate(config, prompts, sampling, n, batch_size=own.pop("rows", 8), **options)
    except ConfigError:
        raise
    except (LaunchError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if as_json:
        print(to_json(found))
    else:
        print("\n\n".join(f"[{row // n}.{row % n}] {reply.text.strip()}" for row, reply in enumerate(found)))
    return 0


_SAMPLING = {field.name: field for field in fields(Sampling)}


def _kind(name: str) -> type:
    if name in _SAMPLING and name != "stop":
        return type(_SAMPLING[name].default)
    return {"n": int, "rows": int, "chat": bool, "truncate": bool}.get(name, str)


def _read_value(name: str, value: str) -> Any:
    kind = _kind(name)
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(value)
        return value.lower() == "true"
    return kind(value)


def _read_prompts(file: str) -> list[Any]:
    try:
        lines = [line for line in Path(file).read_text().splitlines() if line.strip()]
        rows = [json.loads(line) for line in lines] if file.endswith(".jsonl") else lines
        return [row if isinstance(row, str) else row.get("messages") or row["prompt"] for row in rows]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"prompts={file} cannot be read ({type(error).__name__}: {error}); give a text file, or JSON lines with "
            "prompt or messages"
        ) from error
