"""generate(config, prompts): load a model in every replica, and let it complete prompts.

    from tpu_kit.generate import Sampling, generate
    replies = generate(config, [[{"role": "user", "content": "What is 2 + 3?"}]], Sampling(max_new_tokens=64))

The prompts are dealt over the replicas, and what comes out does not depend on how many there are. Where a model is
loaded already, use `Generator`.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from tpu_kit import model as models
from tpu_kit import runtime
from tpu_kit.answers import load_for_generation
from tpu_kit.completions import Completion, Prompt, Texts, from_json, to_json
from tpu_kit.config import ConfigError, TrainConfig, load_config
from tpu_kit.generator import Generator
from tpu_kit.kvcache import causal
from tpu_kit.launch import LaunchError, launch
from tpu_kit.pretrained import load_tokenizer
from tpu_kit.runtime import Runtime
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
        adapter_dir: what training wrote; None for the base model.
        batch_size: the most rows of a batch in each replica.
        truncate: leave out the beginning of a prompt that is too long.

    Returns:
        n completions for each prompt, those of a prompt one after the other; the same for any number of replicas.

    Raises:
        ValueError: as in `Generator`; or the model cannot be read, or the adapter is missing, half-written or of
            another model.
        LaunchError: a replica failed.
    """
    if not prompts:
        raise ValueError("there are no prompts; give one or more")
    if batch_size < 1 or n < 1:
        raise ValueError(f"batch_size={batch_size} and n={n} must both be 1 or more")
    with tempfile.TemporaryDirectory(prefix="tpu_kit-") as folder:
        job = _Job(list(prompts), sampling or Sampling(), n, _absolute(adapter_dir), batch_size, truncate, folder)
        launch(job, config)
        found: dict[tuple[int, int], Completion] = {}
        for file in Path(folder).iterdir():
            keys, completions = file.read_text().split("\n", 1)
            found |= zip(map(tuple, json.loads(keys)), from_json(completions), strict=True)
    return [found[row, sample] for row in range(len(prompts)) for sample in range(n)]


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
    launch(_Job([prompt], sampling or Sampling(), 1, _absolute(adapter_dir), 1, truncate, None), one)


def _absolute(folder: str | Path | None) -> str | None:
    return None if folder is None else str(Path(folder).absolute())


class _Job:
    """What a replica does; sent to it, and called there. Without a folder for the completions it prints them."""

    def __init__(
        self,
        prompts: list[Prompt],
        sampling: Sampling,
        n: int,
        adapter: str | None,
        batch_size: int,
        truncate: bool,
        folder: str | None,
    ) -> None:
        self._prompts, self._sampling, self._n, self._adapter = prompts, sampling, n, adapter
        self._batch_size, self._truncate, self._folder = batch_size, truncate, folder
        self.__qualname__ = "generate"  # what launch calls it

    def __call__(self, config: TrainConfig) -> None:
        rt = runtime.current()
        model, tokenizer = _load(config, self._adapter, rt)
        texts = Texts(tokenizer, causal(model), config.data)
        longest = max(len(texts.encode(prompt)) for prompt in self._prompts)
        positions = getattr(models.text_config(model), "max_position_embeddings", None) or longest
        mine = -(-len(self._prompts) // rt.world_size) * self._n
        batches = -(-mine // self._batch_size)
        generator = Generator(
            model, tokenizer, rt, max_prompt=min(longest, positions), max_new_tokens=self._sampling.max_new_tokens,
            batch_size=-(-mine // batches), data=config.data,
        )  # fmt: skip
        if self._folder is None:
            for piece in generator.stream(self._prompts[0], self._sampling, self._truncate):
                print(piece, end="", flush=True)
            print(flush=True)
            return
        found = generator.share(self._prompts, self._sampling, self._n, self._truncate)
        text = f"{json.dumps(list(found))}\n{to_json(list(found.values()))}"
        (Path(self._folder) / f"rank-{rt.rank}.json").write_text(text)


_shared: list[tuple[torch.nn.Module, Any]] = []
_shared_lock = threading.Lock()


def _load(config: TrainConfig, adapter: str | None, rt: Runtime) -> tuple[torch.nn.Module, Any]:
    """The model on the replica's device, and its tokenizer; read once where replicas are threads of one process."""
    if rt.device_type != "xla-cpu":
        model, tokenizer = _read(config, adapter, rt)
    else:
        with _shared_lock:
            if not _shared:
                _shared.append(_read(config, adapter, rt))
            model, tokenizer = copy.deepcopy(_shared[0][0]), _shared[0][1]
    return models.to_device(model, rt.local_device), tokenizer


def _read(config: TrainConfig, adapter: str | None, rt: Runtime) -> tuple[torch.nn.Module, Any]:
    model = load_for_generation(config.model, adapter, "cuda" if rt.device_type == "cuda" else "cpu")
    if rt.device_type == "tpu" and config.model.base_dtype == "bf16":
        model = model.to(torch.bfloat16)  # the fp32 of small models is for CPUs
    return model, load_tokenizer(config.model, adapter)


# --------------------------------------------------------------------------------------------------- the command line

_OWN = {
    "prompt": "The question; may be given several times.",
    "prompts": "A file with more: a text in each line, or .jsonl with a prompt or messages.",
    "adapter": "The folder that training wrote; without it the base model answers.",
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
