"""The data section: where the rows come from and how they become tokens. A list as `source` mixes several sources."""

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
"""Sources whose rows the kit generates, with an evaluation split."""

_AMOUNTS = ("weight", "tokens", "repeat")
_OF_DATA = ("split", "columns", "format", "system_prompt", "loss_on")  # null = as in the data section
_ROWS = re.compile(r"\.(jsonl|json|ndjson|csv|tsv|parquet)(\.\w+)?$")
_ROUNDING = 1e-6  # tolerance of the sum of shares


@dataclass(frozen=True)
class DataSource:
    """One source of a mix. Null split, columns, format, system_prompt and loss_on have the data section's value."""

    source: str | None = knob(None, "As data.source.")
    split: str | None = knob(None, "The split to train on.")
    columns: dict[str, str] | None = knob(None, "Role -> column.")  # noqa: RUF009 - a dataclasses.field
    format: DataFormat | str | None = knob(None, "Format of the rows.", check=check_format)  # noqa: RUF009 - as above
    weight: float | None = knob(None, "How often an epoch has each row; below 1, a share of the rows.", above=0)
    tokens: float | None = knob(None, "The share of an epoch's tokens.", above=0, at_most=1)
    repeat: int | None = knob(None, "How often an epoch has each row.", at_least=1)
    name: str | None = knob(None, "Name in reports and metrics; null = the file's name.", check=check_source_name)
    system_prompt: str | None = knob(None, "The system prompt of conversations without one.")
    loss_on: Literal["completion", "all"] | None = knob(None, "The tokens that the loss covers.")

    @property
    def copies(self) -> float:
        """How often an epoch has each row if `tokens` is null: repeat, weight or 1."""
        return float(self.repeat or self.weight or 1)

    def plain(self) -> str | dict[str, Any]:
        """Returns the source as a file has it: `source` alone if nothing else is set, otherwise the set fields."""
        given = self.given(one.name for one in fields(self))
        return str(self.source) if given.keys() == {"source"} else given

    def given(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the fields among `names` that are not null, by name."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def __repr__(self) -> str:
        return repr(self.plain())


def read_sources(value: Any) -> Any:
    """Converts a list of names, mappings or `DataSource` to a tuple of `DataSource`, or for one name alone to the name.

    Other values, and an empty list, stay as they are.

    Raises:
        ValueError: with all problems of all sources: an unknown key, a bad value, no source, synthetic, several of
            weight, tokens and repeat, equal names, or shares of tokens with a wrong sum.
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
    """Reads an entry of the list, a name, mapping or `DataSource`; raises ValueError with a line for each problem."""
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
        problems.append(f"{' and '.join(given)} say how much of it is trained; give only one")
    if values.get("source") == "synthetic":
        problems.append("random tokens cannot be part of a mix; set data.source=synthetic alone")
    if problems:
        raise ValueError("\n".join(problems))
    return DataSource(**values)


def _problems(sources: Sequence[DataSource]) -> list[str]:
    """Returns a problem if shares of tokens do not add up (to 1, or less if sources have none), and for equal names."""
    shares = [one.tokens for one in sources if one.tokens is not None]
    total, found = sum(shares), []
    if len(shares) == len(sources) and abs(total - 1) > _ROUNDING:
        found.append(f"tokens of all sources add up to {total:g}; make the sum 1, or give one source no share")
    elif shares and len(shares) < len(sources) and total > 1 - _ROUNDING:
        found.append(f"tokens add up to {total:g} and leave none for the other sources; lower them")
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
        'Hub id (openai/gsm8k:main); path, glob or gs:// address of jsonl/json/csv/tsv/parquet; "embedded"; or '
        '"synthetic": random tokens for rehearsals, in as many rows as split=train[:N] says. A list mixes several: '
        "names, or {source, split, columns, format, weight or tokens or repeat, name, system_prompt, loss_on}.",
        convert=read_sources,
    )
    eval_source: str | None = knob(None, "A separate source of evaluation rows, in the same forms except a list.")
    split: str = knob("train", "The split of source to train on.")
    eval_split: str | None = knob(None, "The split to evaluate on: of eval_source if that is given, else of source.")
    eval_rows: int | float | None = knob(
        None,
        "Rows to hold out from source for evaluation if eval_source and eval_split are null; below 1, a share of the "
        "questions; 0 = none; null = a tenth, at most 64.",
        at_least=0,
        check=check_rows_held_out,
    )
    format: DataFormat | str = knob(  # noqa: RUF009 - a dataclasses.field
        "auto",
        "Format of the rows; auto detects it by the column names. prompt: rows without a reply, for runs that sample. "
        "module:function: a function from a row to messages, a text, or an object with prompt and completion.",
        check=check_format,
    )
    columns: dict[str, str] | None = knob(  # noqa: RUF009 - a dataclasses.field, not a shared dictionary
        None,
        "Role -> column, or column.field (reward_model.ground_truth), as in {question: problem, answer: target}; an "
        "empty value leaves out the role or column of that name.",
    )
    think_open: str = knob("<think>", "Text before the reasoning; Gemma 4's is <|channel>thought.")
    think_close: str = knob("</think>", "Text between the reasoning and the answer; Gemma 4's is <channel|>.")
    system_prompt: str | None = knob(None, "The system prompt of conversations without one.")
    date: str | None = knob(
        None, "Date that chat templates show as today, such as 2025-12-31; null = the day on which the run starts."
    )
    loss_on: Literal["completion", "all"] = knob("completion", "The tokens that the loss covers: replies, or all.")
    max_length: int = knob(1024, "Tokens per packed row; every batch has this width.", at_least=8)
    packing: bool = knob(True, "Put several examples in a row; they do not attend to each other.")
    too_long: Literal["truncate", "drop", "split", "error"] = knob(
        "truncate", "Treatment of examples over max_length; split cuts plain text into examples of max_length."
    )
    special_text: Literal["keep", "split"] = knob(
        "keep",
        "Treatment of a special token's text, such as <|im_end|>, in a row or a prompt. keep: it becomes that token, "
        "as in other trainers; split: it becomes plain text, which cannot end a turn.",
    )
    on_bad_row: Literal["stop", "skip"] = knob(
        "stop", "Treatment of unusable rows; skip leaves out up to half of all rows, and reports them."
    )
    images_per_row: int | None = knob(
        None, "Images, or tiles of images, that fit in a packed row; null = as many as fill the rows.", at_least=1
    )
    image_tokens: int | None = knob(
        None,
        "Maximum tokens of an image (LFM2-VL and SmolVLM: with its tiles), which set its resolution (Gemma 4: 70, 140, "
        "280, 560 or 1120); null = the model's default, for Qwen at most 1,280.",
        at_least=1,
    )
    num_proc: int | None = knob(None, "Processes that tokenize; null = by cores and rows.", at_least=1, at_most=1024)
    streaming: bool = knob(
        False,
        "Tokenize plain text shard by shard during training, for optim.max_steps updates. The first eval_rows rows "
        "(null: 64) are held out, and long texts are split.",
    )
    seed: int = knob(0, "Seed of the held-out split and of the order of rows.", at_least=0, at_most=2**32 - 1)
    shuffle: bool = knob(True, "Shuffle the training rows, differently in every epoch.")
    order: Literal["mix", "sequence", "round_robin"] = knob(
        "mix", "Order of the packed rows of several sources: random, one source after another, or in turns."
    )
    curriculum: str | None = knob(None, "Column of numbers that orders the training rows, smallest first.")
    pack_apart: bool = knob(False, "Put only examples of the same source into a row.")

    @property
    def mix(self) -> tuple[DataSource, ...]:
        """The sources if `source` is a list; () for one name."""
        return () if isinstance(self.source, str) else self.source

    @property
    def by_source(self) -> tuple[DataConfig, ...]:
        """This section once per source, with the source's name and its own settings; (self,) for one name."""
        if isinstance(self.source, str):
            return (self,)
        return tuple(replace(self, source=str(one.source), **one.given(_OF_DATA)) for one in self.source)

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources of a list, all different, in order; () for one name.

        A source without `name` has the last part of its path or hub id, without a data file's suffix; a glob has its
        folder's name. If another source has this name, "#2" or a larger number is added.
        """
        taken, names = [one.name for one in self.mix if one.name], list[str]()
        for one in self.mix:
            name = base = one.name or _name_of(str(one.source))
            count = 1
            while not one.name and name in (*taken, *names):
                name, count = f"{base}#{count + 1}", count + 1
            names.append(name)
        return tuple(names)
