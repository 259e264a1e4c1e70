"""How many updates a run makes, known before it starts: where its data is at hand and small enough to be counted."""

from __future__ import annotations

import glob
from dataclasses import dataclass, replace
from pathlib import Path

from tpu_kit.config import TrainConfig, batch_arithmetic

MOST_BYTES = 32 * 2**20
"""Larger files are not counted: tokenising them takes more than some ten seconds."""


@dataclass(frozen=True)
class Rows:
    """Packed rows of the training data; None where they are not known, and the reason."""

    count: int | None
    reason: str = ""


def count_rows(config: TrainConfig) -> Rows:
    """Counts the packed rows of a run, by `data.prepare` as the run itself does, where that is cheap."""
    if reason := _costly(config):
        return Rows(None, reason)
    # Only now: these load torch, transformers and datasets.
    from tpu_kit.data import prepare
    from tpu_kit.model import load_tokenizer
    from tpu_kit.sources import GENERATED

    data = config.data
    elsewhere = data.eval_source or data.eval_split or data.source in GENERATED
    data = replace(data, eval_source=None, eval_split=None, eval_rows=0 if elsewhere else data.eval_rows)
    try:
        return Rows(len(prepare(data, load_tokenizer(config.model)).train))
    except ValueError as error:  # the run will say so too
        return Rows(None, str(error))


def count_updates(config: TrainConfig, replicas: int, rows: Rows) -> tuple[int | None, str]:
    """The updates of a run, and why they are not known where they are None.

    Args:
        config: the run, its batch size a number.
        replicas: of the model.
        rows: of `count_rows`; not looked at where `optim.max_steps` says it.
    """
    if config.optim.max_steps is not None:
        return config.optim.max_steps, ""
    if rows.count is None:
        return None, rows.reason
    from tpu_kit.schedule import updates

    try:
        return sum(1 for _ in updates(rows.count, batch_arithmetic(config, replicas), config.optim)), ""
    except ValueError as error:
        return None, str(error)


def _costly(config: TrainConfig) -> str:
    """Why the rows are not counted; empty where they can be."""
    source, known = config.data.source, "; optim.max_steps says it"
    if source not in ("embedded", "rationales"):  # `sources.GENERATED`, without its imports
        if "://" in source:
            return f"data.source={source} is in an object store, and is not read to plan{known}"
        files = [Path(name) for name in glob.glob(source)]
        files = [file for path in files for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
        if not files:
            return f"data.source={source} is not on this machine{known}"
        if (size := sum(file.stat().st_size for file in files)) > MOST_BYTES:
            return f"data.source={source} has {size / 2**20:.0f} MiB, too much to tokenise just to plan{known}"
    if not _has_tokenizer(config):
        return f"model.name={config.model.name} has no tokenizer here to count the rows with{known}"
    return ""


def _has_tokenizer(config: TrainConfig) -> bool:
    model = config.model
    if model.name == "embedded":
        return True
    if model.gguf_file:  # made anew at each reading, which takes long
        return False
    folder = Path(model.name).expanduser()
    if folder.is_dir():
        return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(model.name, "tokenizer.json", revision=model.revision), str)
    except HFValidationError:  # no folder, and no name that the hub could have
        return False
