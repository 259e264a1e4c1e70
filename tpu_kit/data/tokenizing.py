"""Loads the rows of a source and tokenises them; caches the tokens by content in the cache of `datasets`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value
from datasets import config as datasets_config

from tpu_kit.config.loader import DataConfig
from tpu_kit.data.batching import Documents
from tpu_kit.data.chat.chat_documents import Document
from tpu_kit.data.chat.chat_encoding import Encoder, Example, ReasoningCounts
from tpu_kit.data.chat.chat_template import ensure_chat_template, freeze_date
from tpu_kit.data.pairs import columns_of_label, columns_of_pair
from tpu_kit.data.rows.column_values import read_layout
from tpu_kit.data.rows.columns import Layout
from tpu_kit.data.rows.field_values import RowError, alternatives, decoded, without_decoding, without_none
from tpu_kit.data.rows.own_format import own_function, own_rows
from tpu_kit.data.rows.records import LOCATION, PROBLEM
from tpu_kit.data.rows.schemas import NO_REPLY, Conversation, conversation, expected_answer, final_answer, problem
from tpu_kit.data.rows.sources import check_rows, load_rows

_LOOKED_AT = 1000  # rows of plain text that are searched for turns
_ROWS_PER_PROCESS = 10_000  # with fewer rows, a second process costs more time than it saves
_CACHE_VERSION = 15  # increase it if the code below gives other tokens, or another error, for the same row
_DOCUMENT = Features(
    {
        "row": Value("int64"), "input_ids": List(Value("int32")), "loss_mask": List(Value("bool")),
        "full_length": Value("int64"), "whole_length": Value("int64"), "question": Value("int64"),
        "users": Value("int64"), "earlier": List(Value("int64")), "reasoning": List(Value("int64")),
        "special": Value("string"), "error": Value("string"),
    }
)  # fmt: skip


_IMAGES = Features(  # more columns of documents with images
    {
        "slots": List(Value("int32")), "pictures": Value("int64"), "digest": Value("int64"),
        "files": List(Value("string")), "stamps": List(Value("string")),
    }
)  # fmt: skip


_PAIRS = Features({"pair": List(Value("int32"))})  # another column of preference rows: `PairTokens`


@dataclass(frozen=True)
class Bits:
    """Booleans packed into bits, as Arrow stores them; a slice, with start and stop, is a new array of bool.

    Attributes:
        packed: uint8, lowest bit first.
        first: bit number of the first boolean.
        count: number of booleans.
    """

    packed: np.ndarray
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop = self.first + part.start, self.first + part.stop
        bits = np.unpackbits(self.packed[start // 8 : -(-stop // 8)], bitorder="little")
        return bits[start % 8 :][: stop - start].view(bool)


class Joined:
    """Arrays that are read like their concatenation, in slices with start and stop; within an array they are views.

    Attributes:
        parts: flat arrays or `Bits`, in order.
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts: tuple[Any, ...] = tuple(
            part for each in parts for part in (each.parts if isinstance(each, Joined) else (each,))
        )
        self._ends = list(accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, found = int(part.start), int(part.stop), list[np.ndarray]()
        number = bisect_right(self._ends, start)
        while start < stop:
            array, end = self.parts[number], min(stop, self._ends[number])
            first = self._ends[number] - len(array)
            found.append(array[start - first : end - first])
            start, number = end, number + 1
        return found[0] if len(found) == 1 else np.concatenate(found)


class RawRows(NamedTuple):
    """Rows of a source and their prompts.

    Attributes:
        rows: the rows as read, with the texts of `schemas.problem`, or else an "answer" (`schemas.final_answer`).
        prompts: texts that the model continues, per row (empty for rows of only a text).
        prompt_ids: token ids of these texts.
        asked: prompts as lists of messages, or texts, per row.
    """

    rows: list[dict[str, Any]]
    prompts: list[str]
    prompt_ids: list[list[int]]
    asked: list[Any]


@dataclass(frozen=True)
class Opened:
    """The rows of a source and their encoder.

    Attributes:
        source: the source.
        rows: all its rows.
        encoder: encoder of the rows.
    """

    source: str
    rows: Dataset
    encoder: Encoder

    @cached_property
    def key(self) -> str:
        """Hash of the rows and of all settings of their tokens; read it only after all sources are opened."""
        return _fingerprint(self.rows, self.encoder)


@dataclass(frozen=True)
class Tokenized:
    """The documents of all usable rows of a source; the arrays are int64, except `special`.

    Attributes:
        source: source of the rows.
        rows: all rows of the source.
        encoder: encoder of the rows.
        documents: documents, truncated to max_length (pairs are not, before `as_units`).
        full_lengths: (documents,), tokens before truncation.
        whole_lengths: (documents,), in the first document of a row, the tokens of the row as a single document; 0 in
            its other documents.
        questions: (documents,), the last hash of `Conversation.questions` of the document's row.
        users: (documents,), the same hash without system turns and tools.
        special: (documents,), text of a special token in the document's row; empty if it has none.
        earlier: (prompts,), the other hashes of `Conversation.questions`: prompts of earlier replies in chats.
        earlier_documents: (prompts,), document number of an element of `earlier`.
        reasoning: (documents, 4), the counts of `ReasoningCounts`.
        skipped: number of unusable rows.
        skipped_rows: the first unusable rows with their problems.
    """

    source: str
    rows: Dataset
    encoder: Encoder
    documents: Documents
    full_lengths: np.ndarray
    whole_lengths: np.ndarray
    questions: np.ndarray
    users: np.ndarray
    special: np.ndarray
    earlier: np.ndarray
    earlier_documents: np.ndarray
    reasoning: np.ndarray
    skipped: int
    skipped_rows: tuple[str, ...]

    @property
    def rows_read(self) -> int:
        """Number of rows of the source, with unusable rows."""
        return len(self.rows)

    def place(self, row: int) -> str:
        """Describes a row for an error text."""
        return f"row {row} of {self.source}"

    def sources(self) -> Iterator[tuple[Tokenized, int]]:
        """Yields every source with the number of its first row: here only this source, with 0."""
        yield self, 0

    def selected(self, keep: np.ndarray, documents: Documents, full_lengths: np.ndarray) -> Self:
        """Returns a copy with the documents of the mask `keep`, replaced by `documents` with these `full_lengths`."""
        names = ("questions", "users", "special", "reasoning")
        kept = {name: getattr(self, name)[keep] for name in names}
        return replace(self, documents=documents, full_lengths=full_lengths, whole_lengths=full_lengths, **kept)

    def prompts(self, chosen: np.ndarray) -> np.ndarray:
        """Returns the prompts (hashes) of all trained replies in the rows of the documents of the mask `chosen`."""
        return np.concatenate([self.questions[chosen], self.earlier[chosen[self.earlier_documents]]])

    def one_of_each(self, questions: np.ndarray) -> np.ndarray:
        """Returns the mask of the documents of rows that are the first to ask a question in `questions`."""
        unique, first = np.unique(self.questions, return_index=True)
        source_rows = self.documents.source_rows
        return np.isin(source_rows, source_rows[first[np.isin(unique, questions)]])

    def same_users(self) -> int:
        """Returns the number of rows that differ from another row's question only in system turns or tools."""
        order = np.lexsort((self.questions, self.users))
        users, questions = self.users[order], self.questions[order]
        several = users[1:][(users[1:] == users[:-1]) & (questions[1:] != questions[:-1])]
        return self.count(np.isin(self.users, several))

    def count(self, chosen: np.ndarray) -> int:
        """Returns the number of different rows of the documents of the mask `chosen`."""
        return len(np.unique(self.documents.source_rows[chosen]))

    def raw_rows(self, numbers: np.ndarray) -> RawRows:
        """Returns usable rows by their numbers in the source, from 0, in the given order, with their prompts."""
        encoder, layout = self.encoder, self.encoder.layout
        names = [name for name in self.rows.column_names if name not in (LOCATION, PROBLEM)]
        stored = list(self.rows.select(numbers).select_columns(names))
        talks = [encoder.conversation(row) for row in stored]
        rows = [{name: decoded(cell, self.rows.features[name]) for name, cell in row.items()} for row in stored]
        rows = [without_none(row) for row in rows] if layout.filled else rows
        for row, cells, talk in zip(rows, map(layout.plain, stored), talks, strict=True):
            if layout.format == "cot":
                row |= problem(cells, layout, encoder.config)
                if texts := alternatives(cells[layout.columns["answer"]]):  # a supervised run trains on the list itself
                    row["answer"] = [*texts, row["answer"]]
            elif "answer" in layout.columns and layout.format == "prompt":
                row["answer"] = expected_answer(cells, layout)
            elif row.get("answer") is None and (said := final_answer(talk, encoder.config)) != NO_REPLY and said:
                row["answer"] = said
        prompts, ids = [encoder.prompt(talk) for talk in talks], [encoder.prompt_ids(talk) for talk in talks]
        return RawRows(rows, prompts, ids, [talk.asked for talk in talks])


def opened_source(
    config: DataConfig, tokenizer: Any, split: str | None = None, like: Layout | None = None, processor: Any = None
) -> Opened:
    """Loads the rows of a source and makes their encoder; may change the tokenizer's chat template (`encoder_of`).

    Args:
        config: the data section, with a single source.
        tokenizer: the tokenizer.
        split: overrides the section's split; None keeps it.
        like: for evaluation rows, layout of the training rows: its `closings` and `first_option` apply to these rows
            too. None for training rows.
        processor: processor of a model for images (`data.images.processors.ImageProcessor`); None for text.

    Raises:
        ValueError: as `load_rows`, `own_rows`, `check_rows` and `encoder_of`.
    """
    source, split = str(config.source), split or config.split
    skip = config.on_bad_row == "skip"
    rows = without_decoding(load_rows(source, split, config.seed, skip=skip))
    if function := own_function(config.format):
        rows = own_rows(rows, config.format, function, source, _processes(len(rows), config.num_proc))
        check_rows(rows, rows[PROBLEM][:], source, skip=skip)
        asks_alone = "prompt" in rows.column_names and not {"completion", "answer"} & {*rows.column_names}
        made = "preference" if {"chosen", "rejected"} <= {*rows.column_names} else "prompt" if asks_alone else "auto"
        rows, config = without_decoding(rows), replace(config, format=made)
    return Opened(source, rows, encoder_of(rows, tokenizer, config, source, like, processor))


def tokenized(opened: Opened) -> Tokenized:
    """Tokenises a source into the cache of `datasets`, or reads it from there; raises ValueError as `check_rows`."""
    source, rows, encoder = opened.source, opened.rows, opened.encoder
    config, processor = encoder.config, encoder.images and encoder.images.processor
    skip = config.on_bad_row == "skip"
    name, folder = opened.key, Path(datasets_config.HF_DATASETS_CACHE) / "tpu_kit"
    folder.mkdir(parents=True, exist_ok=True)
    used = [*encoder.layout.needed(rows.column_names), *({PROBLEM} & {*rows.column_names})]
    cached = any(folder.glob(f"{name}*.arrow"))
    made = partial(
        rows.select_columns(used).map,
        partial(_tokenize_rows, encoder=encoder),
        batched=True,
        with_indices=True,
        remove_columns=used,
        features=_features(encoder),
        num_proc=_processes(len(rows), config.num_proc),
        cache_file_name=str(folder / f"{name}.arrow"),
        new_fingerprint=name,
        desc=f"Tokenising {source}",
    )
    columns = made().with_format("arrow")[:]
    if cached and processor is not None and _is_stale(columns, encoder):
        columns = made(load_from_cache_file=False).with_format("arrow")[:]
    good = pc.equal(columns["error"], "")
    bad = columns.select(["row", "error"]).filter(pc.invert(good))
    problems = dict(zip(bad["row"].to_pylist(), bad["error"].to_pylist(), strict=True))
    shown = check_rows(rows, [problems.get(i) for i in range(len(rows))], source, skip=skip)
    usable, names = good.to_numpy(zero_copy_only=False), ("row", "full_length", "whole_length", "question", "users")
    numbers = {name: pc.fill_null(columns[name], 0).to_numpy()[usable] for name in names}
    ids, lengths = _flat(columns["input_ids"])
    masks, _ = _flat(columns["loss_mask"])
    arrays = Joined(values.to_numpy() for values in ids), Joined(map(_bits, masks))
    documents = Documents(*arrays, lengths, np.arange(len(lengths))).select(usable)
    documents = replace(documents, source_rows=numbers["row"])
    if processor is not None:
        from tpu_kit.data.images.encoding import DocumentImages

        documents = replace(documents, images=DocumentImages.read(columns.filter(good)))
    if encoder.layout.format in ("preference", "unpaired"):
        sizes = columns.filter(good)["pair"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        documents = replace(documents, pairs=sizes.reshape(len(documents), -1))
    earlier, counts = _flat(columns["earlier"])
    reasoning, _ = _flat(columns["reasoning"])
    return Tokenized(
        source, rows, encoder, documents, numbers["full_length"], numbers["whole_length"], numbers["question"],
        numbers["users"], columns["special"].to_numpy(zero_copy_only=False)[usable],
        pa.chunked_array(earlier, pa.int64()).to_numpy(), np.repeat(np.arange(len(documents)), counts[usable]),
        pa.chunked_array(reasoning, pa.int64()).to_numpy().reshape(-1, len(ReasoningCounts._fields)), len(bad), shown,
    )  # fmt: skip


def _features(encoder: Encoder) -> Features:
    """Returns the names and types of the columns of tokenised documents."""
    pairs = _PAIRS if encoder.layout.format in ("preference", "unpaired") else {}
    return Features({**_DOCUMENT, **(_IMAGES if encoder.images is not None else {}), **pairs})


def _flat(lists: pa.ChunkedArray) -> tuple[list[pa.Array], np.ndarray]:
    """Returns the values of a column of lists, as views of the mapped files, and the lengths of the lists."""
    values, counts = list[pa.Array](), list[np.ndarray]()
    for chunk in lists.chunks:
        ends = chunk.offsets.to_numpy()
        counts.append(np.diff(ends).astype(np.int64))
        if ends[0] < ends[-1]:
            values.append(chunk.values.slice(ends[0], ends[-1] - ends[0]))
    return values, np.concatenate(counts)


def _bits(values: pa.BooleanArray) -> Bits:
    """Returns booleans as a view of the mapped file."""
    first, count = values.offset % 8, len(values)
    packed = np.frombuffer(values.buffers()[1], dtype=np.uint8)[values.offset // 8 :]
    return Bits(packed[: -(-(first + count) // 8)], first, count)


def _is_stale(columns: Any, encoder: Encoder) -> bool:
    """Whether cached documents may be out of date: a picture has changed, or a row had an error."""
    if pc.any(pc.not_equal(columns["error"], "")).as_py():  # for example a missing file
        return True
    files, stamps = (columns[name].combine_chunks().flatten().to_pylist() for name in ("files", "stamps"))
    return bool(encoder.images.files.stamps(files) != stamps)


def encoder_of(
    rows: Dataset, tokenizer: Any, config: DataConfig, source: str, like: Layout | None, processor: Any
) -> Encoder:
    """Makes the encoder of rows by their columns and values; `like` and `processor` as in `opened_source`.

    `source` is named in errors; image paths of the rows are relative to its folder. For chats, may set the tokenizer's
    chat template (`ensure_chat_template`) or change it (`open_reasoning`). Raises ValueError if the columns fit no
    format, or the tokenizer is not fast or lacks an eos token. It is also raised for `data.too_long=split` with another
    format than text, and for `data.system_prompt` with plain text.
    """
    columns = [column for column in rows.column_names if column not in (LOCATION, PROBLEM)]
    try:
        layout = read_layout(rows, columns, config, processor is not None)
    except ValueError as error:
        headed = Path(source).suffix in (".csv", ".tsv")
        header = ". The first line of CSV names the columns, separated by commas: question,answer" if headed else ""
        raise ValueError(f"{source}: {error}{header}") from error
    if like:
        layout = replace(layout, closings=like.closings, first_option=like.first_option)
    plain = layout.format == "text"
    if layout.format == "prompt_completion":
        prompts = (layout.plain(row).get(layout.columns["prompt"]) for row in rows)
        plain = isinstance(next((prompt for prompt in prompts if isinstance(prompt, str | list)), None), str)
        plain &= layout.columns["prompt"] not in layout.chats
    if layout.format in ("preference", "unpaired"):
        plain = _is_plain(rows, layout, config)
    if config.too_long == "split" and layout.format != "text":
        raise ValueError(
            f"data.too_long=split cuts plain text (format text), and {source} has the format {layout.format}: the rest "
            "of a reply would be trained without its question. Set truncate, drop or error, or raise data.max_length"
        )
    if plain and config.system_prompt:
        raise ValueError(
            "data.system_prompt needs chats; these rows are plain text, without a chat template: remove it, or set it "
            "only for the sources of a mix that are chats"
        )
    images = None
    if processor is not None:
        from tpu_kit.data.images.encoding import ImageEncoding
        from tpu_kit.data.images.files import PictureFiles

        images = ImageEncoding(processor, PictureFiles.beside(source))
    encoder = Encoder(tokenizer, config, layout, images=images)
    if not plain:
        ensure_chat_template(tokenizer)
        encoder.open_reasoning(rows)
        return encoder
    first = rows.select_columns(layout.needed(columns)).select(range(min(len(rows), _LOOKED_AT)))
    texts = [text for row in first if (text := _plain_text(row, encoder))]
    with_turns = sum(encoder.header in text for text in texts) if encoder.header else 0
    turns: Literal["text", "none"] = "text" if 2 * with_turns > len(texts) else "none"
    return replace(encoder, layout=replace(encoder.layout, turns_by=turns))


def _is_plain(rows: Dataset, layout: Layout, config: DataConfig) -> bool:
    """Whether the first readable row is plain text; False if no row can be read."""
    for row in rows:
        with contextlib.suppress(AttributeError, KeyError, RecursionError, TypeError, ValueError):
            return isinstance(conversation(row, layout, config).messages, str)
    return False


def _plain_text(row: Mapping[str, Any], encoder: Encoder) -> str:
    """Returns the text of a row; empty if it cannot be read: tokenising raises the error."""
    try:
        return str(encoder.conversation(row).messages)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return ""


def _tokenize_rows(batch: Mapping[str, list[Any]], numbers: list[int], encoder: Encoder) -> dict[str, list[Any]]:
    """Tokenises a batch of rows; returns the columns of `_features`, by document. A bad row has one entry, its error.

    All rows take a step before the next step begins: row by row, the same steps take half as long again (measured).
    """
    states: list[Any] = [dict(zip(batch, cells, strict=True)) for cells in zip(*batch.values(), strict=True)]
    errors = [""] * len(states)
    for step in (_read, _rendered, _encoded, _entries):
        for i, state in enumerate(states):
            if errors[i]:
                continue
            try:
                states[i] = step(state, encoder)
            except RowError as problem_of_row:
                errors[i] = str(problem_of_row)
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as exception:  # an unexpected form
                layout = encoder.layout.format
                errors[i] = f"it cannot be read as {layout}: {type(exception).__name__}: {exception}"
    entries = [
        entry | {"row": number, "error": error}
        for number, state, error in zip(numbers, states, errors, strict=True)
        for entry in ([{}] if error else state)
    ]
    return {name: [entry.get(name) for entry in entries] for name in _features(encoder)}


class _Row(NamedTuple):
    """A row between two steps: its conversation, the common cells of its documents, and its documents so far."""

    talk: Conversation
    cells: dict[str, Any]
    documents: Sequence[Document] = ()
    encoded: Sequence[tuple[Example, dict[str, Any]]] = ()


def _read(row: Mapping[str, Any], encoder: Encoder) -> _Row:
    """Reads a row's conversation, and the cells that its documents share; raises RowError for a bad row."""
    if row.get(PROBLEM):
        raise RowError(row[PROBLEM])
    talk, config = encoder.conversation(row), encoder.config
    *earlier, question = talk.questions(config)
    cells = {"question": question, "users": talk.questions(config, users_alone=True)[-1], "earlier": earlier,
             "special": encoder.special_text(talk)}  # fmt: skip
    return _Row(talk, cells)


def _rendered(row: _Row, encoder: Encoder) -> _Row:
    """Adds the rendered documents; raises RowError as `Encoder.documents`."""
    return row._replace(documents=encoder.documents(row.talk))


def _encoded(row: _Row, encoder: Encoder) -> _Row:
    """Adds the documents' tokens, with the tokens of their images, and the images' columns; may raise RowError."""
    encoded = list[tuple[Example, dict[str, Any]]]()
    for document in row.documents:
        example, pictures = encoder.encode(document), dict[str, Any]()
        if encoder.images is not None:
            ids, mask, slots = encoder.images.expanded(*example, row.talk.images)
            example, pictures = Example(ids, mask), encoder.images.columns(row.talk.images[: len(slots)], slots)
        encoded.append((example, pictures))
    return row._replace(encoded=encoded)


def _entries(row: _Row, encoder: Encoder) -> list[dict[str, Any]]:
    """Returns the cells of every document, split or truncated; raises RowError if turns or images are lost."""
    talk, config, entries = row.talk, encoder.config, list[dict[str, Any]]()
    if talk.label is not None and len(row.documents) == 1:
        return [row.cells | columns_of_label(talk, row.documents[0], row.encoded[0][0], encoder)]
    if talk.label is not None:
        raise RowError("the reply has several turns, which the chat template renders differently in one chat; give one")
    if talk.rejected is not None:
        return [row.cells | columns_of_pair(talk, row.documents, row.encoded[0][0], encoder)]
    for document, (example, pictures) in zip(row.documents, row.encoded, strict=True):
        for part in split_text(example, config) if config.too_long == "split" else [example]:
            cut = Example(part.input_ids[: config.max_length], part.loss_mask[: config.max_length])
            entries.append(
                {"input_ids": cut.input_ids, "loss_mask": cut.loss_mask, "full_length": len(part.input_ids),
                 "whole_length": 0, "reasoning": encoder.count_reasoning(document, cut), **row.cells, **pictures}
            )  # fmt: skip
    if talk.images and entries[-1]["pictures"] < len(talk.images):
        raise RowError(f"the chat template leaves out images: it has {entries[-1]['pictures']} of {len(talk.images)}")
    entries[0]["whole_length"] = sum(entry["full_length"] for entry in entries)
    if len(row.documents) > 1 and not isinstance(talk.messages, str):
        entries[0]["whole_length"] = len(encoder.chat_ids(talk.messages, talk.tools))
    return entries


def split_text(example: Example, config: DataConfig) -> list[Example]:
    """Cuts a text into examples of up to `data.max_length` tokens, whose first token has no loss.

    If the last example would have a single token, the last token of the example before it moves to it.
    """
    count, length = len(example.input_ids), config.max_length
    cuts = list(range(0, count, length))
    if len(cuts) > 1 and count - cuts[-1] == 1:
        cuts[-1] -= 1
    ids, mask = example
    return [Example(ids[a:b], [False, *mask[a + 1 : b]]) for a, b in pairwise([*cuts, count])]


def _fingerprint(rows: Dataset, encoder: Encoder) -> str:
    """Returns a hash (hex digits) of the rows, the tokenizer, the layout and all settings that change tokens."""
    tokenizer, config = encoder.tokenizer, asdict(encoder.config)
    for setting in ("source", "eval_source", "split", "eval_split", "date", "eval_rows", "seed", "shuffle", "num_proc",
                    "packing", "on_bad_row", "images_per_row", "image_tokens", "order", "curriculum",
                    "pack_apart", "streaming"):  # fmt: skip
        del config[setting]  # represented by the rows or the template, or applied after tokenising
    config["too_long"] = config["too_long"] == "split"  # other values apply after tokenising
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    parts = [_CACHE_VERSION, rows._fingerprint, tokenizer.backend_tokenizer.to_str(), special, config]
    parts += [encoder.images.processor.identity, encoder.images.files.folder] if encoder.images else []
    parts += [freeze_date(str(tokenizer.chat_template), encoder.config.date), repr(encoder.layout)]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _processes(rows: int, wanted: int | None) -> int | None:
    """Returns the number of processes that tokenise: `wanted`, or by rows and cores; None for only this process."""
    if wanted is None:
        wanted = min(len(os.sched_getaffinity(0)), rows // _ROWS_PER_PROCESS)
    return wanted if 1 < wanted <= rows else None
