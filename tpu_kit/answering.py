"""One launch in which every replica loads a model, completes its part of the prompts and rates its part of the texts.

What comes out does not depend on how many replicas there are. Where a model is loaded already, use `Generator`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tpu_kit import model as models
from tpu_kit import rope, runtime
from tpu_kit.answers import arrange_for_few_rows, load_for_generation
from tpu_kit.architecture import check_generation
from tpu_kit.completions import Completion, Prompt, Texts, from_json, to_json
from tpu_kit.config import TrainConfig
from tpu_kit.generator import Generator
from tpu_kit.kvcache import causal
from tpu_kit.launch import launch
from tpu_kit.pretrained import load_tokenizer, read_config
from tpu_kit.runtime import Runtime
from tpu_kit.sampling import Sampling
from tpu_kit.scoring import Rating
from tpu_kit.storage import at_hand


@dataclass(frozen=True)
class Ask:
    """Prompts that are completed in one way.

    Attributes:
        prompts: texts, chats (lists of messages) or lists of token ids.
        sampling: how.
        n: samples of each.
        truncate: leave out the beginning of a prompt that is too long.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    n: int = 1
    truncate: bool = False


@dataclass
class Answers:
    """What a model said.

    Attributes:
        completions: for each `Ask` n completions of each prompt, those of a prompt one after the other.
        ratings: of the rows.
    """

    completions: list[list[Completion]] = field(default_factory=list)
    ratings: list[Rating] = field(default_factory=list)


def answer(
    config: TrainConfig,
    asks: Sequence[Ask],
    rows: Sequence[Sequence[int]] = (),
    *,
    adapter_dir: str | Path | None = None,
    batch_size: int = 8,
) -> Answers:
    """Loads the model in every replica of `config.launch`, and deals the work over them.

    Args:
        config: the model, the tags of the reasoning, the system prompt and where it runs.
        asks: what to complete.
        rows: of token ids, to be rated.
        adapter_dir: what training wrote, a folder or gs://bucket/run/adapter; None for the base model.
        batch_size: the most rows of a batch in each replica.

    Raises:
        ValueError: as in `Generator` and `Rater`; or the model cannot be read, or the adapter is missing, half-written
            or of another model.
        LaunchError: a replica failed.
    """
    for ask in asks:
        if not ask.prompts:
            raise ValueError("there are no prompts; give one or more")
        if batch_size < 1 or ask.n < 1:
            raise ValueError(f"batch_size={batch_size} and n={ask.n} must both be 1 or more")
    if max([len(rows), *(len(ask.prompts) for ask in asks)]) == 1:  # a prompt's samples come from one prefill
        config = replace(config, launch=replace(config.launch, num_replicas=1))
    with tempfile.TemporaryDirectory(prefix="tpu_kit-") as folder, adapter_at_hand(adapter_dir) as adapter:
        launch(_Job(list(asks), list(rows), adapter, batch_size, folder), config)
        parts = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    found = Answers()
    for number, ask in enumerate(asks):
        completions: dict[tuple[int, int], Completion] = {}
        for part in parts:
            keys, text = part["asks"][number]
            completions |= zip(map(tuple, keys), from_json(text), strict=True)
        found.completions.append([completions[row, n] for row in range(len(ask.prompts)) for n in range(ask.n)])
    ratings = {int(row): Rating(*rating) for part in parts for row, rating in part["ratings"].items()}
    found.ratings += [ratings[row] for row in range(len(rows))]
    return found


@contextlib.contextmanager
def adapter_at_hand(adapter_dir: str | Path | None) -> Iterator[str | None]:
    """The adapter's folder as a process finds it that has another working directory; copied from an object store."""
    if adapter_dir is None:
        yield None
        return
    with at_hand(adapter_dir) as folder:
        yield str(folder)


@dataclass
class _Job:
    """What a replica does; sent to it, and called there."""

    asks: list[Ask]
    rows: list[Sequence[int]]
    adapter: str | None
    batch_size: int
    folder: str

    def __post_init__(self) -> None:
        self.__qualname__ = "answer"  # what launch calls it

    def __call__(self, config: TrainConfig) -> None:
        rt = runtime.current()
        model, tokenizer = load_here(config, self.adapter, rt)
        mine = max((-(-len(ask.prompts) // rt.world_size) * ask.n for ask in self.asks), default=1)
        batches = -(-mine // self.batch_size)
        prompts = [prompt for ask in self.asks for prompt in ask.prompts]
        generator = generator_for(
            model, tokenizer, config, prompts, max((ask.sampling.max_new_tokens for ask in self.asks), default=1),
            -(-mine // batches) if self.asks else self.batch_size,
        )  # fmt: skip
        said = []
        for ask in self.asks:
            found = generator.share(ask.prompts, ask.sampling, ask.n, ask.truncate)
            said.append((list(found), to_json(list(found.values()))))
        text = json.dumps({"asks": said, "ratings": generator.rater.share(self.rows)})
        (Path(self.folder) / f"rank-{rt.rank}.json").write_text(text)


def generator_for(
    model: torch.nn.Module,
    tokenizer: Any,
    config: TrainConfig,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    batch_size: int,
    room: int = 0,
) -> Generator:
    """A generator with room for the longest of the prompts, and `room` tokens more."""
    texts = Texts(tokenizer, causal(model), config.data)
    longest = max((len(texts.encode(prompt)) for prompt in prompts), default=1) + room
    positions = rope.positions(models.text_config(model)) or longest
    return Generator(
        model, tokenizer, max_prompt=min(longest, positions), max_new_tokens=max_new_tokens, batch_size=batch_size,
        data=config.data,
    )  # fmt: skip


_shared: list[tuple[torch.nn.Module, Any]] = []
_shared_lock = threading.Lock()


def load_here(config: TrainConfig, adapter: str | None, rt: Runtime) -> tuple[torch.nn.Module, Any]:
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
    if given := read_config(config.model):  # before the weights are read
        check_generation(given, config.model.trust_remote_code)
    model = load_for_generation(config.model, adapter, "cuda" if rt.device_type == "cuda" else "cpu")
    if rt.device_type == "tpu" and config.model.base_dtype != "fp32":
        model = model.to(torch.bfloat16)  # the fp32 of small models is for CPUs
    if rt.device_type == "cpu":
        arrange_for_few_rows(model)
    return model, load_tokenizer(config.model, adapter)
