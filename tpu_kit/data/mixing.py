"""Joins the tokenised sources of a mix, and chooses the rows of an epoch: how many of each source, in which order.

Questions are held out over all sources together, before weights and shares choose rows: another mix of the same sources
is evaluated on the same questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from tpu_kit.config import text_tables
from tpu_kit.config.sections.data import DataConfig
from tpu_kit.data.batching import Documents, Grouping, PackedDataset, best_fill, permutation
from tpu_kit.data.rows.columns import Layout
from tpu_kit.data.rows.field_values import plain_value
from tpu_kit.data.rows.records import LOCATION, PROBLEM
from tpu_kit.data.tokenizing import Joined, Opened, RawRows, Tokenized, opened_source, tokenized

_STAGE_ROWS = 16  # packed rows per stage of a curriculum; documents are packed and shuffled within a stage

MOST_TIMES = 4
"""Repetitions of rows in an epoch above which the report warns (Muennighoff et al., arXiv:2305.16264)."""

_NONE = Documents(*(np.zeros(0, dtype=kind) for kind in (np.int32, bool, np.int64, np.int64)))

Packed = tuple[np.ndarray, np.ndarray]
"""The document numbers in the order of the rows, and the number of documents per row."""


class Mix(NamedTuple):
    """The sources of a mix; their rows are numbered consecutively.

    Attributes:
        names: names of the sources.
        starts: int64 (sources,), number of the first row of a source.
    """

    names: tuple[str, ...]
    starts: np.ndarray

    def of(self, rows: Any) -> np.ndarray:
        """Returns the source of a row number, or of every number in an array, as an index in `names`."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def place(self, row: int) -> str:
        """Describes a row by its number in its source, from 0, as in "12 of gsm8k"."""
        source = int(self.of(row))
        return f"{row - self.starts[source]} of {self.names[source]}"


@dataclass(frozen=True)
class Mixed(Tokenized):
    """The documents of several sources in order, with the row numbers of `mix`.

    Attributes:
        parts: the sources, without their documents.
        mix: names and row numbers of the sources.
    """

    parts: tuple[Tokenized, ...]
    mix: Mix

    @classmethod
    def of(cls, parts: Sequence[Tokenized], names: tuple[str, ...]) -> Mixed:
        """Joins the sources `parts`, whose names are `names`; numbers their rows consecutively.

        `rows` and `encoder` are taken from the first source that the chat template renders, or else from `parts[0]`.
        """
        starts = np.cumsum([0, *(len(part.rows) for part in parts)])[:-1]
        firsts = np.cumsum([0, *(len(part.documents) for part in parts)])[:-1]
        names_of_arrays = ("full_lengths", "whole_lengths", "questions", "users", "special", "earlier", "reasoning")
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names_of_arrays}
        earlier = np.concatenate([part.earlier_documents + first for part, first in zip(parts, firsts, strict=True)])
        emptied: dict[str, Any] = dict.fromkeys((*names_of_arrays, "earlier_documents"), _NONE.lengths)
        shown = [f"{name}, {text}" for part, name in zip(parts, names, strict=True) for text in part.skipped_rows]
        chat = next((part for part in parts if part.encoder.layout.turns_by == "template"), parts[0])
        return cls(
            source=", ".join(names), rows=chat.rows, encoder=chat.encoder,
            documents=_joined([part.documents for part in parts], starts), earlier_documents=earlier, **joined,
            skipped=sum(part.skipped for part in parts), skipped_rows=tuple(shown),
            parts=tuple(replace(part, documents=_NONE, **emptied) for part in parts), mix=Mix(names, starts),
        )  # fmt: skip

    @property
    def rows_read(self) -> int:
        """Number of rows of all sources."""
        return sum(part.rows_read for part in self.parts)

    def place(self, row: int) -> str:
        """Describes a row by its number in its source, for an error text."""
        return f"row {self.mix.place(row)}"

    def raw_rows(self, numbers: np.ndarray) -> RawRows:
        """Returns usable rows by their numbers in the mix, at least one, in the given order, with their prompts."""
        sources, made = self.mix.of(numbers), dict[int, Any]()
        for source, (part, start) in enumerate(zip(self.parts, self.mix.starts, strict=True)):
            places = np.flatnonzero(sources == source)
            if len(places):
                values = zip(*part.raw_rows(numbers[places] - start), strict=True)
                made |= dict(zip(places.tolist(), values, strict=True))
        return RawRows(*map(list, zip(*(made[place] for place in range(len(numbers))), strict=True)))

    def sources(self) -> Iterator[tuple[Tokenized, int]]:
        """Yields the sources, without their documents, with the numbers of their first rows in the mix."""
        return zip(self.parts, self.mix.starts.tolist(), strict=True)


def _joined(documents: Sequence[Documents], starts: np.ndarray) -> Documents:
    """Concatenates the documents of sources; `starts` is added to their row numbers."""
    ids, masks = (Joined(getattr(one, name) for one in documents) for name in ("input_ids", "loss_mask"))
    firsts = np.cumsum([0, *(len(one.input_ids) for one in documents)])[:-1]
    lengths = np.concatenate([one.lengths for one in documents])
    rows = np.concatenate([one.source_rows + start for one, start in zip(documents, starts, strict=True)])
    places = np.concatenate([one.starts + first for one, first in zip(documents, firsts, strict=True)])
    images = documents[0].images
    joined = None if images is None else images.joined([one.images for one in documents])
    pairs = [one.pairs for one in documents if one.pairs is not None]
    return Documents(ids, masks, lengths, rows, joined, np.concatenate(pairs) if pairs else None, places)


def tokenize_sources(
    data: DataConfig,
    tokenizer: Any,
    split: str | None = None,
    like: Sequence[Layout | None] | None = None,
    processor: Any = None,
) -> Tokenized:
    """Tokenises the source of a data section, or every source of a mix by itself; returns `Mixed` for a mix.

    Args:
        data: the section.
        tokenizer: the tokenizer; its chat template may change, as in `opened_source`.
        split: split of all sources for evaluation, overriding theirs; only the first of sources with the same rows is
            kept then. None means their own splits; sources with the same rows are then an error.
        like: for evaluation, the layouts of the training rows, one per source, also for a single source; else None.
        processor: as in `opened_source`.

    Raises:
        ValueError: as `opened_source` and `tokenized`, or two sources of a mix have the same rows and `split` is None.
            The text has the problems of all sources.
    """
    parts, problems = list[tuple[str, Opened]](), list[str]()
    names = data.source_names or (str(data.source),)
    for name, one, layout in zip(names, data.by_source, like or [None] * len(names), strict=True):
        try:
            parts.append((name, opened_source(one, tokenizer, split, layout, processor)))
        except ValueError as error:
            problems.append(_named(name, error, data))
    keys, made = dict[str, str](), dict[str, Tokenized]()
    # All sources are opened before any is tokenised: rows with reasoning switch it on in the template for all sources.
    for name, part in parts:
        if other := keys.get(part.key):
            if split is None:  # otherwise they are the same evaluation rows, which are evaluated once
                problems.append(f"{name} and {other} have the same rows: keep one, with repeat: 2 to train it twice")
            continue
        keys[part.key] = name
        try:
            made[name] = tokenized(part)
        except ValueError as error:
            problems.append(_named(name, error, data))
    raise_all(problems)
    return Mixed.of([*made.values()], tuple(made)) if data.mix else made[names[0]]


def _named(name: str, error: ValueError, data: DataConfig) -> str:
    """Returns the text of an error, in a mix after the name of its source."""
    return f"{name}: {error}" if data.mix else str(error)


def raise_all(problems: Sequence[str]) -> None:
    """Raises a single ValueError with all problems, if there are any."""
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        raise ValueError("\n  - ".join([f"{len(problems)} problems of the sources:", *problems]))


# ------------------------------------------------------------------------------------------------------------ an epoch


class Epoch(NamedTuple):
    """The documents of an epoch.

    Attributes:
        documents: int64, document numbers; a number may occur several times.
        groups: int64, group of each entry of `documents`, or None; a packed row has documents of a single group.
        order: order of the groups' rows ("sequence", "round_robin" or "curriculum"); None shuffles all rows together.
        of_stage: number of consecutive groups that are shuffled together.
    """

    documents: np.ndarray
    groups: np.ndarray | None = None
    order: str | None = None
    of_stage: int = 1

    def packed(self, fill: Callable[[np.ndarray], Packed]) -> tuple[Packed, Grouping | None]:
        """Packs the documents; a packed row has documents of a single group.

        `fill` (`fill_of`) takes document numbers, and returns `Packed` with indices in its argument in place of them.
        Returns the packing, as `Packed` with document numbers, and the argument `grouping` of `permutation`. The
        grouping is None without `order`.
        """
        if self.groups is None:
            order, counts = fill(self.documents)
            return (self.documents[order], counts), None
        by_group = np.argsort(self.groups, kind="stable")
        groups, firsts = np.unique(self.groups[by_group], return_index=True)
        packed = list[Packed]()
        for members in np.split(self.documents[by_group], firsts[1:]):
            order, counts = fill(members)
            packed.append((members[order], counts))
        orders, of_rows = (np.concatenate(each) for each in zip(*packed, strict=True))
        rows = np.repeat(groups // self.of_stage, [len(counts) for _, counts in packed])
        return (orders, of_rows), Grouping(rows, self.order == "round_robin") if self.order else None


def apart(tokens: Tokenized, used: np.ndarray) -> Epoch:
    """Makes an epoch with every document of the mask `used` once; a packed row of a mix has a single source."""
    documents = np.flatnonzero(used)
    if not isinstance(tokens, Mixed):
        return Epoch(documents)
    return Epoch(documents, tokens.mix.of(tokens.documents.source_rows[documents]))


def epoch_of(tokens: Tokenized, used: np.ndarray, data: DataConfig) -> Epoch:
    """Chooses the documents of an epoch: in a mix by the weights and shares of the sources, else every used document.

    Groups them for packing and order by `pack_apart`, `order` and `curriculum` of the section.

    Args:
        tokens: the documents.
        used: bool (documents,), whether a document may be trained.
        data: the data section.

    Raises:
        ValueError: in a mix, a source has no used row, or its weight or share leaves it none. Or a curriculum's column
            is missing or holds a value that is not a number. The text has the problems of all sources.
    """
    documents = np.flatnonzero(used)
    if isinstance(tokens, Mixed):
        documents = np.concatenate(_chosen(tokens, documents, data))
    groups: np.ndarray | None = None
    order: str | None = None
    of_stage = 1
    if isinstance(tokens, Mixed) and (data.pack_apart or data.order != "mix"):
        groups = tokens.mix.of(tokens.documents.source_rows[documents])
        order = None if data.order == "mix" else data.order
    if data.curriculum is not None:
        values = _column(tokens, data.curriculum, tokens.documents.source_rows[documents])
        by_value = np.argsort(values, kind="stable")
        documents, values = documents[by_value], values[by_value]
        stages = _stages(values, tokens.documents.lengths[documents], _STAGE_ROWS * data.max_length * data.packing)
        sources = np.zeros_like(stages) if groups is None else groups[by_value]
        order, of_stage = "curriculum", int(1 + sources.max())
        groups = stages * of_stage + sources
    return Epoch(documents, groups, order, of_stage)


def _chosen(tokens: Mixed, documents: np.ndarray, data: DataConfig) -> list[np.ndarray]:
    """Returns the documents of an epoch by source, repeated by weights and shares; ValueError if a source has none."""
    rows, lengths = tokens.documents.source_rows, tokens.documents.lengths
    sources = tokens.mix.of(rows[documents])
    of_source = [documents[sources == source] for source in range(len(data.mix))]
    found = [np.zeros(0, dtype=np.int64)] * len(data.mix)
    problems = list[str]()
    for number, (one, mine, name) in enumerate(zip(data.mix, of_source, tokens.mix.names, strict=True)):
        different = len(np.unique(rows[mine]))
        if not different:
            problems.append(
                f"{name}: none of its {tokens.parts[number].rows_read:,} rows is left: they are held out or too "
                "long; raise data.max_length, lower data.eval_rows, or remove it"
            )
        elif one.tokens is None:
            whole, part = divmod(one.copies, 1)
            found[number] = _copies(mine, rows, int(whole), round(part * different), data.seed)
            if not len(found[number]):
                few = f"leaves none of its {different:,} rows; set {1 / different:.1g} or more, or remove it"
                problems.append(f"{name}: weight={one.weight:g} {few}")
    raise_all(problems)
    shares = [(number, one.tokens) for number, one in enumerate(data.mix) if one.tokens is not None]
    if not shares:
        return found
    have = [int(lengths[mine].sum()) for mine in of_source]
    others = sum(int(lengths[mine].sum()) for mine in found)
    # If all sources have shares, the first that runs out is trained once, and the others by their shares.
    left = 1 - sum(share for _, share in shares)
    total = others / left if others else min(have[number] / share for number, share in shares)
    for number, share in shares:
        mine, target = of_source[number], round(share * total)
        whole, rest = divmod(target, have[number])
        order = _drawn(rows[mine], data.seed)
        ends = np.cumsum([0, *_tokens_of(order, rows[mine], lengths[mine])])
        found[number] = _copies(mine, rows, whole, int(np.abs(ends - rest).argmin()), data.seed)
        if not len(found[number]):
            least = int(np.diff(ends).min())
            problems.append(
                f"{tokens.mix.names[number]}: tokens={share:g} of {round(total):,} tokens are {target:,}, and its "
                f"shortest row has {least:,}, so no row meets that; raise it to {least / total:.1g} or more"
            )
    raise_all(problems)
    return found


def _copies(documents: np.ndarray, rows: np.ndarray, whole: int, more: int, seed: int) -> np.ndarray:
    """Repeats `documents` `whole` times, and the documents of `more` random rows once more; `rows` is by document."""
    again = documents[np.isin(rows[documents], _drawn(rows[documents], seed)[:more])]
    return np.concatenate([np.tile(documents, whole), again])


def _drawn(rows: np.ndarray, seed: int) -> np.ndarray:
    """Returns the distinct rows in random order, which is the same with all versions of NumPy."""
    different = np.unique(rows)
    return different[permutation(len(different), seed, 0)]


def _tokens_of(order: np.ndarray, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the tokens of every row in `order`, int64, given the row and the length of every document."""
    different, places = np.unique(rows, return_inverse=True)
    return np.bincount(places, weights=lengths).astype(np.int64)[np.searchsorted(different, order)]


def _column(tokens: Tokenized, name: str, rows: np.ndarray) -> np.ndarray:
    """Returns the numbers in a column, float64, for every entry of `rows` (row numbers, over all sources of a mix).

    Raises ValueError with all sources that lack the column or a number in it.
    """
    different, places = np.unique(rows, return_inverse=True)
    values, problems = list[float](), list[str]()
    for part, start in tokens.sources():
        mine = different[(different >= start) & (different < start + part.rows_read)] - start
        if name not in part.rows.column_names:
            listed = ", ".join(column for column in part.rows.column_names if column not in (LOCATION, PROBLEM))
            problems.append(f"{part.source}: data.curriculum={name}: no such column; the data has {listed}")
            continue
        feature = part.rows.features[name]
        for row, value in zip(mine.tolist(), part.rows.select(mine)[name], strict=True):
            try:
                values.append(float(plain_value(value, feature)))
            except (TypeError, ValueError):
                problems.append(f"{part.source}: data.curriculum={name}: row {row} holds {value!r}, not a number")
                break
    raise_all(problems)
    return np.array(values)[places]


def _stages(values: np.ndarray, lengths: np.ndarray, tokens: int) -> np.ndarray:
    """Returns the stage, from 0, of sorted values with `lengths` tokens; equal values are in the same stage.

    A stage has at least `tokens` tokens, except for the last stage.
    """
    begins, before = np.zeros(len(values), dtype=np.int64), np.cumsum(lengths) - lengths
    first = 0
    for start in (np.flatnonzero(np.diff(values)) + 1).tolist():
        if before[start] - before[first] >= tokens:
            begins[first := start] = 1
    return np.cumsum(begins)


def rows_of_epoch(tokens: Tokenized, chosen: np.ndarray, epoch: Epoch) -> np.ndarray:
    """Returns the sorted numbers of the rows that a run samples from.

    Without a mix they are the distinct rows of the documents that the bool mask `chosen` marks; `epoch` is ignored. In
    a mix, a row occurs as often as its first document in `epoch`; `chosen` is ignored.
    """
    rows = tokens.documents.source_rows
    if not isinstance(tokens, Mixed):
        return np.unique(rows[chosen])
    different = np.unique(epoch.documents)
    first = different[np.unique(rows[different], return_index=True)[1]]  # the first of a row's documents
    return np.sort(rows[epoch.documents[np.isin(epoch.documents, first)]])


def mix_of(tokens: Tokenized) -> Mix | None:
    """Returns the sources of a mix; None for a single source."""
    return tokens.mix if isinstance(tokens, Mixed) else None


def fill_of(lengths: np.ndarray, data: DataConfig) -> Callable[[np.ndarray], Packed]:
    """Makes the argument `fill` of `Epoch.packed`; `lengths` has the tokens of every document, by its number.

    With `data.packing`, `fill` packs by `best_fill` into rows of `max_length`; no document may be longer. Otherwise
    every document is a row, in order. The result has indices in the argument of `fill`.
    """

    def fill(documents: np.ndarray) -> Packed:
        every = np.arange(len(documents))
        return best_fill(lengths[documents], data.max_length) if data.packing else (every, np.ones_like(every))

    return fill


def source_column(dataset: PackedDataset, mix: Mix) -> Callable[[np.ndarray], torch.Tensor]:
    """Makes an entry of `PackedDataset.columns`: int32 (rows, length), number of a token's source in the mix.

    The number is the index in `mix.names` plus 1, and 0 in empty slots.
    """
    sources = mix.of(dataset.documents.source_rows).astype(np.int32) + 1

    def read(rows: np.ndarray) -> torch.Tensor:
        column = np.zeros((len(rows), dataset.length), dtype=np.int32)
        for i, row in enumerate(rows):
            documents = dataset.documents_of(row) if row >= 0 else np.zeros(0, dtype=np.int64)
            tokens = np.repeat(sources[documents], dataset.documents.lengths[documents])
            column[i, : len(tokens)] = tokens
        return torch.from_numpy(column)

    return read


# ----------------------------------------------------------------------------------------------------------- the report


class SourceCounts(NamedTuple):
    """Counts of a source of a mix for the report.

    Attributes:
        name: name of the source.
        layout: format and columns of its rows.
        rows_read: rows of the source.
        rows_used: rows with a document in the epoch.
        times: how often the epoch repeats a trainable row, on average.
        tokens: tokens of the epoch.
        loss_tokens: tokens of the epoch that carry loss.
    """

    name: str
    layout: str
    rows_read: int
    rows_used: int
    times: float
    tokens: int
    loss_tokens: int


def count_sources(tokens: Tokenized, used: np.ndarray, documents: np.ndarray) -> tuple[SourceCounts, ...]:
    """Returns the counts of an epoch's `documents` (numbers, with repeats) for every source of a mix, in its order.

    `used` is the mask of the trainable documents, for `SourceCounts.times`. Without a mix, returns an empty tuple.
    """
    if not isinstance(tokens, Mixed):
        return ()
    rows, lengths, loss = tokens.documents.source_rows, tokens.documents.lengths, tokens.documents.loss_tokens
    of_used, of_epoch = tokens.mix.of(rows[used]), tokens.mix.of(rows[documents])
    found = []
    for source, part in enumerate(tokens.parts):
        here = documents[of_epoch == source]
        found.append(SourceCounts(
            tokens.mix.names[source], str(part.encoder.layout), part.rows_read, len(np.unique(rows[here])),
            len(here) / max(1, int((of_used == source).sum())), int(lengths[here].sum()), int(loss[here].sum()),
        ))  # fmt: skip
    return tuple(found)


def sources_table(sources: Sequence[SourceCounts]) -> list[str]:
    """Returns the report's lines about one or more sources of a mix.

    First comes a line per source with its layout, then a table with a row per source. A last line warns of sources
    whose rows are repeated more than `MOST_TIMES`, if there are any.
    """
    tokens, loss = (sum(counts) for counts in zip(*((one.tokens, one.loss_tokens) for one in sources), strict=True))
    rows: list[dict[str, object]] = [
        {
            "source": one.name, "rows": f"{one.rows_used:,} of {one.rows_read:,}", "times": f"{one.times:.3g}",
            "tokens": f"{one.tokens:,}", "of all": f"{one.tokens / tokens:.1%}",
            "with loss": f"{one.loss_tokens:,}", "of all loss": f"{one.loss_tokens / loss:.1%}",
        }
        for one in sources
    ]  # fmt: skip
    layouts = [f"{'source':<16} {one.name}: {one.layout}" for one in sources]
    often = [f"{one.name} {one.times:.0f} times" for one in sources if one.times > MOST_TIMES]
    told = f"{'':<16} WARNING: an epoch repeats rows of {', '.join(often)}; more than {MOST_TIMES} times teaches little"
    table = [f"{'mix' if not i else '':<16} {line}" for i, line in enumerate(text_tables.to_text(rows).splitlines())]
    return [*layouts, *table, *[told] * bool(often)]
