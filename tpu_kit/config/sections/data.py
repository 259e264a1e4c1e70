"""The data section: where the rows come from and how they become tokens; its source may be a list, a mix of several."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from tpu_kit.config.fields import closest, knob, knobs_of
from tpu_kit.config.named_values import DataFormat, check_format, check_rows_held_out, check_source_name

GENERATED = ("embedded", "embedded-images", "embedded-pairs")
"""The sources whose rows code makes, with a split for evaluation."""

_AMOUNTS = ("weight", "tokens", "repeat")
_OF_DATA = ("split", "columns", "format", "system_prompt", "loss_on")  # null is the value of the data section
_ROWS = re.compile(r"\.(jsonl|json|ndjson|csv|tsv|parquet)(\.\w+)?$")
_ROUNDING = 1e-6  # of shares that add up to 1


@dataclass(frozen=True)
class DataSource:
    """One source of a mix. What is null is as the data section says."""

    source: str | None = knob(None, "As data.source.")
    split: str | None = knob(None, "The split to train on.")
    columns: dict[str, str] | None = knob(None, "Role -> column.")  # noqa: RUF009 - a dataclasses.field
    format: DataFormat | str | None = knob(None, "What a row holds.", check=check_format)  # noqa: RUF009 - as above
    weight: float | None = knob(None, "How often an epoch has each row; below 1 a share of the rows.", above=0)
    tokens: float | None = knob(None, "The share of an epoch's tokens.", above=0, at_most=1)
    repeat: int | None = knob(None, "How often an epoch has each row.", at_least=1)
    name: str | None = knob(None, "In reports and metrics; null = that of the file.", check=check_source_name)
    system_prompt: str | None = knob(None, "The system prompt of conversations without one.")
    loss_on: Literal["completion", "all"] | None = knob(None, "The tokens that carry loss.")

    @property
    def copies(self) -> float:
        """How often an epoch has each row, where `tokens` does not say it."""
        return float(self.repeat or self.weight or 1)

    def plain(self) -> str | dict[str, Any]:
        """Returns the source as a file has it: its name alone if nothing else is set."""
        given = self.given(one.name for one in fields(self))
        return str(self.source) if given.keys() == {"source"} else given

    def given(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns those of some values that are set."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def __repr__(self) -> str:
        return repr(self.plain())


def read_sources(value: Any) -> Any:
    """Returns a list as sources; one name alone, also in a list, stays a name.

    Raises:
        ValueError: with all problems of all sources.
    """
    if not isinstance(value, list | tuple) or not value:
        return value
    problems, sources = list[str](), list[DataSource]()
    for number, item in enumerate(value, start=1):
        try:
            sources.append(_read(item))
        except ValueError as error:
            named = item.get("name") or item.get("source") if isinstance(item, Mapping) else None
            problems += [f"source {number}{f', {named}' if named else ''}: {text}" for text in str(error).split("\n")]
    if not problems:
        problems = _problems(sources)
    if problems:
        raise ValueError("; ".join(problems))
    alone = sources[0].plain() if len(sources) == 1 else None
    return alone if isinstance(alone, str) else tuple(sources)


def _read(item: Any) -> DataSource:
    """Reads one entry of the list; raises ValueError with a line for each problem."""
    if isinstance(item, DataSource):
        item = item.plain()
    if not isinstance(item, Mapping):
        item = {"source": item}
    known, values, problems = knobs_of(DataSource), dict[str, Any](), list[str]()
    for key, value in item.items():
        if key not in known:
            near = closest(str(key), known)
            problems.append(f"{key}: no such key; {f'did you mean {near[0]}?' if near else 'use ' + ', '.join(known)}")
            continue
        try:
            values[key] = known[key].read(value)
        except ValueError as error:
            problems.append(str(error))
    if not problems and not values.get("source"):
        problems.append("source: missing; name a file or a data set of the hub")
    if len(given := [name for name in _AMOUNTS if values.get(name) is not None]) > 1:
        problems.append(f"{' and '.join(given)} say how much of it is trained; give one of them")
    if values.get("source") == "synthetic":
        problems.append("random tokens are no part of a mix; set data.source=synthetic alone")
    if problems:
        raise ValueError("\n".join(problems))
    return DataSource(**values)


def _problems(sources: Sequence[DataSource]) -> list[str]:
    """Returns the problems between sources."""
    shares = [one.tokens for one in sources if one.tokens is not None]
    total, found = sum(shares), []
    if len(shares) == len(sources) and abs(total - 1) > _ROUNDING:
        found.append(f"the shares tokens of all sources add up to {total:g}; make it 1, or give one of them no share")
    elif shares and len(shares) < len(sources) and total > 1 - _ROUNDING:
        found.append(f"the shares tokens add up to {total:g} and leave none for the other sources; lower them")
    names = Counter(one.name for one in sources if one.name)
    return found + [f"{name} is the name of {count} sources; rename them" for name, count in names.items() if count > 1]


def _name_of(source: str) -> str:
    path = Path(source)
    name = _ROWS.sub("", path.name)
    return name if re.search(r"\w", name) else path.parent.name or path.name


@dataclass(frozen=True)
class DataConfig:
    """Where the rows come from and how they become tokens."""

    source: str | tuple[DataSource, ...] = knob(
        "embedded",
        'Hub id (openai/gsm8k:main), path, glob or gs:// of jsonl/json/csv/tsv/parquet, "embedded", or "synthetic": '
        "rows of random tokens, for rehearsals; split=train[:N] sets their number. A list mixes several: of names, or "
        "of {source, split, columns, format, weight or tokens or repeat, name, system_prompt, loss_on}.",
        convert=read_sources,
    )
    eval_source: str | None = knob(None, "Another source of evaluation rows, in the same forms as source.")
    split: str = knob("train", "The split of source to train on.")
    eval_split: str | None = knob(None, "The split to evaluate on, of eval_source if that is given, else of source.")
    eval_rows: int | float | None = knob(
        None,
        "Rows held out from source for evaluation if eval_source and eval_split are null, or below 1 their share of "
        "the questions; 0 = none, null = a tenth, 64 at most.",
        at_least=0,
        check=check_rows_held_out,
    )
    format: DataFormat | str = knob(  # noqa: RUF009 - a dataclasses.field
        "auto",
        "What a row holds; auto looks at the column names. prompt has no reply, for models that sample them. "
        "module:function makes messages, a text, or an object with prompt and completion, of each row.",
        check=check_format,
    )
    columns: dict[str, str] | None = knob(  # noqa: RUF009 - a dataclasses.field, not a shared dictionary
        None,
        "Role -> column, or a field of one (reward_model.ground_truth), as in {question: problem, answer: target}; an "
        "empty name leaves out the role or the column.",
    )
    think_open: str = knob("<think>", "Text before the reasoning; Gemma 4's is <|channel>thought.")
    think_close: str = knob("</think>", "Text between the reasoning and the answer; Gemma 4's is <channel|>.")
    system_prompt: str | None = knob(None, "The system prompt of conversations without one.")
    date: str | None = knob(
        None, "The day that chat templates take for today, such as 2025-12-31; null = the day on which the run starts."
    )
    loss_on: Literal["completion", "all"] = knob("completion", "The tokens that carry loss: the answers, or all.")
    max_length: int = knob(1024, "Tokens per packed row; every batch has this width.", at_least=8)
    packing: bool = knob(True, "Put several examples in a row; none attends to another.")
    too_long: Literal["truncate", "drop", "split", "error"] = knob(
        "truncate", "What to do with an example over max_length; split cuts plain text into examples of max_length."
    )
    special_text: Literal["keep", "split"] = knob(
        "keep",
        "What a special token's text, such as <|im_end|>, in a row or a prompt becomes: keep = that token, as in other "
        "trainers; split = plain text, so that it ends no turn.",
    )
    on_bad_row: Literal["stop", "skip"] = knob(
        "stop", "What to do with a row that cannot be used; skip leaves out up to half of them, counted and shown."
    )
    images_per_row: int | None = knob(
        None, "Images, or tiles of images, that a packed row has room for; null = what fills the rows.", at_least=1
    )
    image_tokens: int | None = knob(
        None,
        "Tokens of an image at most, which is its resolution (Gemma 4: 70, 140, 280, 560 or 1120); "
        "null = the model's, of Qwen at most 1,280. LFM2-VL and SmolVLM: of a picture with its tiles.",
        at_least=1,
    )
    num_proc: int | None = knob(None, "Processes that tokenize; null = by cores and rows.", at_least=1, at_most=1024)
    streaming: bool = knob(
        False,
        "Tokenise plain text shard by shard while it is trained, for optim.max_steps updates. Its first eval_rows rows "
        "(null: 64) are held out, and long texts are split.",
    )
    seed: int = knob(0, "Seed of the held-out split and of the order of rows.", at_least=0, at_most=2**32 - 1)
    shuffle: bool = knob(True, "Shuffle the training rows, anew each epoch.")
    order: Literal["mix", "sequence", "round_robin"] = knob(
        "mix", "The packed rows of several sources: in random order, one source after another, or in turns."
    )
    curriculum: str | None = knob(None, "Column of numbers by which rows are trained, the smallest first.")
    pack_apart: bool = knob(False, "Put no examples of different sources into one row.")

    @property
    def mix(self) -> tuple[DataSource, ...]:
        """The sources of a list; empty for one name."""
        return () if isinstance(self.source, str) else self.source

    @property
    def by_source(self) -> tuple[DataConfig, ...]:
        """This section with each source alone."""
        if isinstance(self.source, str):
            return (self,)
        return tuple(replace(self, source=str(one.source), **one.given(_OF_DATA)) for one in self.source)

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources of a list, by default those of their files, all different; empty for one name."""
        taken, names = [one.name for one in self.mix if one.name], list[str]()
        for one in self.mix:
            name = base = one.name or _name_of(str(one.source))
            count = 1
            while not one.name and name in (*taken, *names):
                name, count = f"{base}#{count + 1}", count + 1
            names.append(name)
        return tuple(names)
