"""Prepares the data of a run: loads rows, splits off held-out rows, tokenises, checks, packs and reports.

The result of `prepare` depends on its arguments alone, and a checkpoint keeps its `fingerprint`. `prepare_once` runs it
in one process of a host. The other replicas memory-map the arrays that it writes, so the host holds them once.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from datasets import config as datasets_config

from tpu_kit.config.loader import DataConfig
from tpu_kit.data.batching import Documents, PackedDataset
from tpu_kit.data.chat_encoding import Encoder, Example, Kept, ensure_chat_template, freeze_date
from tpu_kit.data.columns import detect_layout, empty_columns, stores_arguments
from tpu_kit.data.held_out import Questions, choose_questions, held_out_rows
from tpu_kit.data.records import PROBLEM
from tpu_kit.data.schemas import Layout, RowError, final_answer, problem, without_none
from tpu_kit.data.sources import (
    EMBEDDED_ROWS,
    GENERATED,
    SHOWN,
    SYNTHETIC,
    load_rows,
    pick_split,
    places,
    synthetic_rows,
)
from tpu_kit.distributed.runtime import Runtime
from tpu_kit.storage import atomic

_ROWS_PER_PROCESS = 10_000  # below this, a second process costs more time than it saves
_CACHE_VERSION = 8  # increase it when the code below gives other tokens for the same row


@dataclass(frozen=True)
class DataReport:
    """Counts of rows, documents and tokens that were read, dropped and used.

    A row gives one document, or several (`Encoder.documents`).

    Attributes:
        source: the source of the rows.
        layout: the format and the columns used.
        rows_read: rows of the source.
        held_out: rows held out for evaluation, with all rows of the same questions.
        repeated: those of them that are not evaluated either, because another row asks the same question.
        seen_in_training: rows of the held-out split dropped because the training split has their questions.
        dropped_too_long: documents over max_length that were dropped.
        truncated: documents cut to max_length and kept.
        dropped_no_loss: documents dropped because max_length tokens of them have no token with loss.
        rows_used: rows with a used document.
        documents: documents used.
        tokens: tokens of these documents.
        loss_tokens: tokens that carry loss.
        packed_rows: rows of max_length tokens after packing.
        fill: share of the slots of packed rows that hold tokens, without the emptiest row.
        lengths: tokens of each document before truncation.
        reasoning: see `Kept`, summed over the documents.
        skipped: bad rows that `data.on_bad_row=skip` skips; of the other counts, only rows_read includes them.
        skipped_rows: the first bad rows, each with its problem.
    """

    source: str
    layout: str
    rows_read: int
    held_out: int
    repeated: int
    seen_in_training: int
    dropped_too_long: int
    truncated: int
    dropped_no_loss: int
    rows_used: int
    documents: int
    tokens: int
    loss_tokens: int
    packed_rows: int
    fill: float
    lengths: tuple[int, ...]
    reasoning: Kept
    skipped: int = 0
    skipped_rows: tuple[str, ...] = ()

    def __str__(self) -> str:
        middle, tail = np.percentile(self.lengths, [50, 95]).astype(int)
        lines = [
            f"source           {self.source}: {self.layout}",
            f"rows             {self.rows_read:,} read, {self.rows_used:,} used{self._split()}",
            f"with reasoning   {self.reasoning.found:,} of {self.reasoning.replies:,} replies{self._reasoning_text()}",
            f"held out         {self.held_out - self.repeated:,}; neither trained nor evaluated, because they ask the "
            f"same: {self.repeated:,}",
            f"too long         {self.dropped_too_long:,} dropped, {self.truncated:,} truncated, "
            f"{self.dropped_no_loss:,} dropped because truncation left no loss",
            f"tokens           {self.tokens:,}, with loss {self.loss_tokens:,} ({self.loss_tokens / self.tokens:.0%})",
            f"tokens of a row  median {middle}, 95 % up to {tail}, longest {max(self.lengths)}",
            f"packed           {self.packed_rows:,} rows, {self.fill:.1%} full",
        ]
        return "\n".join(lines + ([f"bad rows         {self.skipped_text}"] if self.skipped else []))

    @property
    def skipped_text(self) -> str:
        """The number of skipped bad rows, and the problems of the first of them."""
        more = f"; and {self.skipped - len(self.skipped_rows):,} more" if self.skipped > len(self.skipped_rows) else ""
        return f"{self.skipped:,} skipped (data.on_bad_row): {'; '.join(self.skipped_rows)}{more}"

    def _split(self) -> str:
        if self.documents == self.rows_used:
            return ""
        return (
            f" as {self.documents:,} documents: the chat template renders earlier turns differently, so each reply "
            "is trained after its own prompt"
        )

    def _reasoning_text(self) -> str:
        _, held, found, empty = self.reasoning
        text = f"; {empty:,} of the others with an empty reasoning block" if empty else ""
        if found == held:
            return text
        return f"{text}; WARNING: the rows hold reasoning for {held:,}, and {held - found:,} lose some of it: " + (
            "raise data.max_length" if self.truncated else "the tokenizer changes its text"
        )


@dataclass(frozen=True)
class Prepared:
    """Data ready for training.

    Attributes:
        train: packed rows.
        eval: packed held-out rows; None without evaluation.
        eval_rows: the held-out rows as read; chain-of-thought rows also have the texts of `schemas.problem`: question,
            reasoning and answer; other rows have an "answer" (`schemas.final_answer`) if they had none.
        eval_prompts: for each held-out row the text that the model continues (empty for plain text). Prompts of chats
            include their special tokens: tokenise them with `add_special_tokens=False`.
        report: of the training rows.
        eval_report: of the held-out rows.
        encoder: encodes other rows of the same kind; None for random tokens.
        questions: of the training rows and of the held-out rows; None for random tokens.
        fingerprint: hash of all tokens, loss masks, packing and order.
    """

    train: PackedDataset
    eval: PackedDataset | None
    eval_rows: list[dict[str, Any]]
    eval_prompts: list[str]
    report: DataReport
    eval_report: DataReport | None
    encoder: Encoder | None
    questions: Questions | None
    fingerprint: str

    def __str__(self) -> str:
        lines = [str(self.report)]
        if held := self.eval_report:
            cut = f"{held.dropped_too_long:,} dropped, {held.truncated:,} truncated"
            lines += [f"held-out rows    {held.documents:,}, {held.loss_tokens:,} tokens with loss; too long: {cut}"]
            lines += [f"held-out rows    {held.seen_in_training:,} left out, because training has their questions"]
            lines += [f"held-out rows    {held.skipped_text}"] if held.skipped else []
        return "\n".join(lines)

    def example(self, number: int = 0) -> Example:
        """Returns one training document, for `decoded_example`."""
        ids, mask = self.train.document(number)
        return Example(ids.tolist(), mask.tolist())


@dataclass(frozen=True)
class _Tokenized:
    """The tokens of all rows of one source; the arrays have one entry per document.

    Attributes:
        documents: of all rows, in order; a bad row has one placeholder.
        full_lengths: tokens before truncation, int64 (documents,).
        questions: the question of the document's row, int64 (documents,); see `Conversation.questions`.
        earlier: the prompts of earlier replies in chats, int64 (prompts,).
        earlier_rows: the row of each of them, int64 (prompts,).
        kept: the counts of `Kept`, int64 (documents, 3).
        good: whether the document's row can be used, bool (documents,).
        skipped_rows: the first bad rows, each with its problem.
    """

    documents: Documents
    full_lengths: np.ndarray
    questions: np.ndarray
    earlier: np.ndarray
    earlier_rows: np.ndarray
    kept: np.ndarray
    good: np.ndarray
    skipped_rows: tuple[str, ...]

    def prompts(self, chosen: np.ndarray) -> np.ndarray:
        """Returns the prompts of all trained replies in the rows of the chosen documents."""
        earlier = self.earlier[np.isin(self.earlier_rows, self.documents.source_rows[chosen])]
        return np.concatenate([self.questions[chosen], earlier])

    def one_of_each(self, questions: np.ndarray) -> np.ndarray:
        """Returns the mask of the documents of one row for each question, the first that is good."""
        good, source_rows = np.flatnonzero(self.good), self.documents.source_rows
        unique, first = np.unique(self.questions[good], return_index=True)
        return np.isin(source_rows, source_rows[good[first[np.isin(unique, questions)]]])


def prepare(
    config: DataConfig,
    tokenizer: Any,
    *,
    model_positions: int | None = None,
    vocab_size: int | None = None,
    dataset: Dataset | DatasetDict | None = None,
    run: Questions | None = None,
) -> Prepared:
    """Loads, holds out, tokenises, checks and packs.

    Args:
        config: the data section.
        tokenizer: a fast Hugging Face tokenizer (None for the synthetic source); without a chat template it gets
            `chat_encoding.DEFAULT_TEMPLATE` if the rows are chats.
        model_positions: `max_position_embeddings` of the model; None skips the check.
        vocab_size: rows of the model's embedding; None skips the check.
        dataset: rows in place of `config.source`.
        run: the questions of a finished run, to evaluate it: its held-out questions are held out too, and rows with a
            question that it was trained on are left out and counted.

    Raises:
        ValueError: rows, columns, files or settings are wrong; the text names them.
    """
    if model_positions is not None and config.max_length > model_positions:
        raise ValueError(
            f"data.max_length={config.max_length} is longer than the {model_positions} positions of the model; "
            f"set it to {model_positions} or less"
        )
    if dataset is None and config.source == SYNTHETIC:
        return _synthetic(config, vocab_size)
    source = "the data set given" if dataset is not None else config.source
    load = partial(load_rows, seed=config.seed, skip=config.on_bad_row == "skip")
    rows = load(source, config.split) if dataset is None else pick_split(dataset, config.split)
    if not len(rows):
        raise ValueError(f"{source} has no rows")
    encoder = _encoder(rows, tokenizer, config, source)
    everything = _tokenize(rows, encoder, source, config.split, vocab_size)
    train = everything.good
    eval_source, eval_split = _eval_source(config, dataset)
    eval_data, eval_report, eval_rows, prompts = None, None, list[dict[str, Any]](), list[str]()
    repeated, evaluated = 0, np.zeros(0, dtype=np.int64)
    if eval_source or config.eval_rows != 0 or run:
        if eval_source:
            own = isinstance(dataset, DatasetDict) and not config.eval_source
            held = pick_split(dataset, eval_split) if own else load(eval_source, eval_split)
            eval_encoder = _encoder(held, tokenizer, config, eval_source)
            held_tokens = _tokenize(held, eval_encoder, eval_source, eval_split, vocab_size)
            wanted = held_tokens.good
        else:
            held, eval_encoder, held_tokens = rows, encoder, everything
            picked = choose_questions(everything.questions[train], everything.earlier, config)
            wanted, train = everything.one_of_each(picked), train & ~np.isin(everything.questions, picked)
            repeated = _count(everything, everything.good & ~train) - _count(everything, wanted)
        if run:
            wanted = wanted | held_tokens.one_of_each(run.held_out)
        trained = run.trained if run else everything.prompts(train)
        chosen = wanted & ~np.isin(held_tokens.questions, trained)
        seen, evaluated = _count(held_tokens, wanted & ~chosen), np.unique(held_tokens.questions[chosen])
        if not chosen.any():
            text = f"every question of the evaluation rows ({eval_source or source}) is in the training rows too"
            raise ValueError(f"{text}; name other rows in data.eval_source")
        eval_data, eval_report = _pack(held_tokens, chosen, eval_encoder, eval_source or source, seen_in_training=seen)
        eval_rows, prompts = _raw_rows(held, np.unique(held_tokens.documents.source_rows[chosen]), eval_encoder)
    held_out = _count(everything, everything.good & ~train)
    packed, report = _pack(everything, train, encoder, source, held_out=held_out, repeated=repeated)
    questions = Questions(np.unique(everything.prompts(train)), evaluated)
    fingerprint = _fingerprint_of(packed, config)
    return Prepared(packed, eval_data, eval_rows, prompts, report, eval_report, encoder, questions, fingerprint)


def _fingerprint_of(packed: PackedDataset, config: DataConfig) -> str:
    order = f"{packed.fingerprint()} {config.seed} {config.shuffle}"
    return hashlib.blake2b(order.encode(), digest_size=16).hexdigest()


def _synthetic(config: DataConfig, vocab_size: int | None) -> Prepared:
    """Makes rows of `max_length` random tokens that all carry loss; they depend on the seed and the sizes alone."""
    if vocab_size is None:
        raise ValueError("data.source=synthetic needs the size of the model's vocabulary, which is not known here")
    count, length = synthetic_rows(config.split), config.max_length
    random = np.random.PCG64(np.random.SeedSequence([config.seed, vocab_size])).random_raw(count * length)
    ids, lengths = (random % np.uint64(vocab_size)).astype(np.int32), np.full(count, length)
    documents = Documents(ids, np.ones(len(ids), dtype=bool), lengths, np.arange(count))
    packed = PackedDataset(documents, length, packing=False)
    report = DataReport(
        source=SYNTHETIC, layout=f"random tokens below {vocab_size:,}", rows_read=count, held_out=0, repeated=0,
        seen_in_training=0, dropped_too_long=0, truncated=0, dropped_no_loss=0, rows_used=count, documents=count,
        tokens=len(ids), loss_tokens=len(ids), packed_rows=count, fill=1.0, lengths=tuple(lengths.tolist()),
        reasoning=Kept(0, 0, 0, 0),
    )  # fmt: skip
    return Prepared(packed, None, [], [], report, None, None, None, _fingerprint_of(packed, config))


def _encoder(rows: Dataset, tokenizer: Any, config: DataConfig, source: str) -> Encoder:
    columns = [column for column in rows.column_names if column != PROBLEM]
    try:
        layout = detect_layout(columns, config, [name for name in empty_columns(rows) if name in columns])
    except ValueError as error:
        headed = ".csv" in source.lower() or ".tsv" in source.lower()
        header = ". The first line of CSV names the columns, such as question,answer" if headed else ""
        raise ValueError(f"{source}: {error}{header}") from error
    for role, column in layout.columns.items():
        alike = [other for other in columns if other.lower() == column.lower()]
        if len(alike) > 1 and role not in (config.columns or {}):
            raise ValueError(
                f"{source}: the columns {' and '.join(alike)} differ in case alone; name the {role}, "
                f"as in data.columns={{{role}: {column}}}"
            )
    plain = layout.format == "text"
    if layout.format == "prompt_completion":
        prompts = (row[layout.columns["prompt"]] for row in rows)
        plain = isinstance(next((prompt for prompt in prompts if isinstance(prompt, str | list)), None), str)
    if plain and config.system_prompt:
        raise ValueError("data.system_prompt needs chats; these rows are plain text, without a chat template")
    encoder = Encoder(tokenizer, replace(layout, filled=stores_arguments(rows.features)), config)
    if not plain:
        ensure_chat_template(tokenizer)
        encoder.open_reasoning(rows)
    return encoder


def _eval_source(config: DataConfig, dataset: Dataset | DatasetDict | None) -> tuple[str | None, str]:
    """Returns the source of the evaluation rows (None: the training rows) and their split."""
    if config.eval_source:
        name = "eval" if config.eval_source in GENERATED else "train"
        return config.eval_source, config.eval_split or name
    if config.eval_split and (dataset is None or isinstance(dataset, DatasetDict)):
        return config.source if dataset is None else "the data set given", config.eval_split
    if dataset is None and config.source in GENERATED and config.eval_rows != 0:
        return config.source, f"eval[:{held_out_rows(config, EMBEDDED_ROWS['train'])}]"
    return None, ""


def _count(tokens: _Tokenized, chosen: np.ndarray) -> int:
    """Returns the number of rows of the chosen documents."""
    return len(np.unique(tokens.documents.source_rows[chosen]))


def _raw_rows(rows: Dataset, chosen: np.ndarray, encoder: Encoder) -> tuple[list[dict[str, Any]], list[str]]:
    picked = [without_none(dict(rows[int(i)])) if encoder.layout.filled else dict(rows[int(i)]) for i in chosen]
    talks = [encoder.conversation(row) for row in picked]
    prompts = [encoder.prompt(talk) for talk in talks]
    if encoder.layout.format == "cot":
        return [row | problem(row, encoder.layout, encoder.config) for row in picked], prompts
    for row, talk in zip(picked, talks, strict=True):
        if row.get("answer") is None and (said := final_answer(talk, encoder.config)):
            row["answer"] = said
    return picked, prompts


def _pack(
    tokens: _Tokenized, chosen: np.ndarray, encoder: Encoder, source: str, **split: int
) -> tuple[PackedDataset, DataReport]:
    """Applies `too_long` to the chosen documents and packs them; `split` has counts for the report."""
    config, documents = encoder.config, tokens.documents
    long = (tokens.full_lengths > config.max_length) & chosen
    if config.too_long == "error" and long.any():
        worst = int(np.argmax(np.where(long, tokens.full_lengths, 0)))
        raise ValueError(
            f"{source}: {long.sum()} rows have more than data.max_length={config.max_length} tokens, the longest is "
            f"row {worst} with {tokens.full_lengths[worst]}. Raise it, or set data.too_long=truncate or drop"
        )
    starts = np.cumsum(documents.lengths) - documents.lengths
    loss_tokens = np.add.reduceat(documents.loss_mask.astype(np.int64), starts)
    keep = chosen & ~long if config.too_long == "drop" else chosen & (loss_tokens > 0)
    dropped_long = int(long.sum()) if config.too_long == "drop" else 0
    if not keep.any():
        raise ValueError(
            f"{source}: no loss tokens left: data.max_length={config.max_length} is too short for all {chosen.sum()} "
            f"rows; the shortest has {tokens.full_lengths[chosen].min()} tokens; raise it"
        )
    kept = documents.select(keep)
    pad_id = encoder.tokenizer.pad_token_id or 0
    packed = PackedDataset(kept, config.max_length, packing=config.packing, pad_id=pad_id)
    report = DataReport(
        source=source,
        layout=str(encoder.layout),
        rows_read=len(np.unique(documents.source_rows)),
        **{"held_out": 0, "repeated": 0, "seen_in_training": 0, **split},
        dropped_too_long=dropped_long,
        truncated=int((long & keep).sum()),
        dropped_no_loss=int((chosen & ~keep).sum()) - dropped_long,
        rows_used=len(np.unique(kept.source_rows)),
        documents=len(kept),
        tokens=int(kept.lengths.sum()),
        loss_tokens=int(kept.loss_mask.sum()),
        packed_rows=len(packed),
        fill=packed.fill(),
        lengths=tuple(tokens.full_lengths[keep].tolist()),
        reasoning=Kept(*tokens.kept[keep].sum(axis=0).tolist()),
        skipped=int((~tokens.good).sum()),
        skipped_rows=tokens.skipped_rows,
    )
    return packed, report


def _tokenize(rows: Dataset, encoder: Encoder, source: str, split: str, vocab_size: int | None) -> _Tokenized:
    """Tokenises all rows, or reads them from the cache of `datasets`.

    Raises:
        ValueError: rows cannot be used, and `data.on_bad_row` is stop or they are more than half; or ids are outside
            the vocabulary.
    """
    name, folder = _fingerprint(rows, encoder), Path(datasets_config.HF_DATASETS_CACHE) / "tpu_kit"
    folder.mkdir(parents=True, exist_ok=True)
    table = rows.map(
        partial(_tokenize_row, encoder=encoder),
        remove_columns=rows.column_names,
        num_proc=_processes(len(rows), encoder.config.num_proc),
        cache_file_name=str(folder / f"{name}.arrow"),
        new_fingerprint=name,
        desc=f"Tokenising {source}",
    ).with_format("numpy")
    errors = table["error"][:]
    bad = [i for i, error in enumerate(errors) if error]
    places_of_bad = places(source, split, bad[:SHOWN])
    shown = tuple(
        f"row {i}: {errors[i]}{place and f' ({place})'}" for i, place in zip(bad[:SHOWN], places_of_bad, strict=True)
    )
    skip, most = encoder.config.on_bad_row == "skip", 2 * len(bad) > len(errors)
    if bad and (most or not skip):
        more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        advice = "Correct or delete them"
        if skip:
            advice += "; data.on_bad_row=skip skips at most half of the rows, and these are more than half"
        elif not most:
            advice += ", or skip them with data.on_bad_row=skip"
        rows_text = f"{len(bad)} of {len(errors)} rows cannot be used: {'; '.join(shown)}{more}"
        raise ValueError(f"{source}: {rows_text}. {advice}")
    columns = table.with_format("arrow")[:]
    parts = columns["lengths"].combine_chunks()
    counts, lengths = np.diff(parts.offsets.to_numpy()), parts.flatten().to_numpy().astype(np.int64)
    source_rows = np.repeat(np.arange(len(counts)), counts)
    input_ids = columns["input_ids"].combine_chunks().flatten().to_numpy().astype(np.int32)
    highest = int(input_ids.max())
    if vocab_size is not None and highest >= vocab_size:
        row = source_rows[np.searchsorted(np.cumsum(lengths), int(input_ids.argmax()), side="right")]
        raise ValueError(
            f"the tokenizer and the model do not belong together: {source}, row {row} has token "
            f"{encoder.tokenizer.convert_ids_to_tokens(highest)!r} with id {highest}, and the model's vocabulary ends "
            f"at {vocab_size - 1}"
        )
    loss_mask = columns["loss_mask"].combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(bool)
    documents = Documents(input_ids, loss_mask, lengths, source_rows)
    full_lengths = columns["full_lengths"].combine_chunks().flatten().to_numpy()
    asked = columns["questions"].combine_chunks()
    prompts, each = asked.flatten().to_numpy(), np.diff(asked.offsets.to_numpy())
    last = np.cumsum(each) - 1
    questions = np.repeat(prompts[last], counts)
    earlier, earlier_rows = np.delete(prompts, last), np.repeat(np.arange(len(each)), each - 1)
    kept = columns["kept"].combine_chunks().flatten().to_numpy().reshape(-1, len(Kept._fields))
    good = ~np.isin(source_rows, bad)
    return _Tokenized(documents, full_lengths, questions, earlier, earlier_rows, kept, good, shown)


_PLACEHOLDER = {
    "input_ids": [0], "loss_mask": [False], "lengths": [1], "full_lengths": [0], "kept": [0] * 4, "questions": [0],
}  # fmt: skip


def _tokenize_row(row: Mapping[str, Any], encoder: Encoder) -> dict[str, Any]:
    """Returns the documents of a row, concatenated, or a placeholder with the error of a bad row."""
    try:
        if unread := row.get(PROBLEM):
            raise RowError(unread)
        talk = encoder.conversation(row)
        documents = encoder.documents(talk)
        whole = [encoder.encode(document) for document in documents]
    except RowError as error:
        return _PLACEHOLDER | {"error": str(error)}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:  # an unexpected form
        unread = f"it cannot be read as {encoder.layout.format}: {type(error).__name__}: {error}"
        return _PLACEHOLDER | {"error": unread}
    end = encoder.config.max_length
    cut = [Example(ids[:end], mask[:end]) for ids, mask in whole]
    return {
        "input_ids": [i for example in cut for i in example.input_ids],
        "loss_mask": [loss for example in cut for loss in example.loss_mask],
        "lengths": [len(example.input_ids) for example in cut],
        "full_lengths": [len(example.input_ids) for example in whole],
        "kept": [n for pair in zip(documents, cut, strict=True) for n in encoder.kept(*pair)],
        "questions": talk.questions,
        "error": "",
    }


def _fingerprint(rows: Dataset, encoder: Encoder) -> str:
    """Returns a hash of the rows, the tokenizer, the template and the settings that the tokens depend on."""
    tokenizer, config = encoder.tokenizer, asdict(encoder.config)
    for setting in ("source", "eval_source", "split", "eval_split", "date", "eval_rows", "seed", "shuffle", "num_proc",
                    "packing", "too_long", "on_bad_row"):  # fmt: skip
        del config[setting]  # represented by the rows or the template, or applied after tokenising
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    parts = [_CACHE_VERSION, rows._fingerprint, tokenizer.backend_tokenizer.to_str(), special, config]
    parts += [freeze_date(str(tokenizer.chat_template), encoder.config.date), str(encoder.layout)]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _processes(rows: int, wanted: int | None) -> int | None:
    """Returns the number of processes that tokenise, by default by rows and cores; None is this process alone."""
    if wanted is None:
        wanted = min(len(os.sched_getaffinity(0)), rows // _ROWS_PER_PROCESS)
    return wanted if 1 < wanted <= rows else None


def prepare_once(config: DataConfig, rt: Runtime, tokenizer: Any, make: Callable[[], Prepared]) -> Prepared:
    """Prepares the data in one replica of each host, and reads it in all replicas.

    Where `local_rank` is 0, `make` prepares the data; an error of it ends the launch. The tokenizer of each replica
    gets the chat template of the prepared data.
    """
    # A launch's processes on one host have one random key. Hosts and launches may share the cache, but not the folder.
    name = hashlib.blake2b(multiprocessing.current_process().authkey, digest_size=16).hexdigest()
    folder = Path(datasets_config.HF_DATASETS_CACHE) / "tpu_kit" / "prepared" / name
    if rt.local_rank == 0:
        write_prepared(make(), folder)
    rt.barrier()
    prepared = read_prepared(folder, tokenizer, config)
    rt.barrier()
    if rt.local_rank == 0:
        shutil.rmtree(folder)  # mapped files stay until the replicas end
    return prepared


def write_prepared(prepared: Prepared, folder: Path) -> None:
    """Writes the result of `prepare`; the complete folder replaces an earlier one."""
    with atomic.replacing(folder) as made:
        made.mkdir(parents=True)
        for part, packed in (("train", prepared.train), ("eval", prepared.eval)):
            for name, array in (packed.arrays() if packed else {}).items():
                np.save(made / f"{part}-{name}.npy", array, allow_pickle=False)
        if prepared.questions:
            prepared.questions.write(made)
        document = {
            "pad_id": prepared.train.pad_id,
            "eval_rows": prepared.eval_rows,
            "eval_prompts": prepared.eval_prompts,
            "report": asdict(prepared.report),
            "eval_report": prepared.eval_report and asdict(prepared.eval_report),
            "layout": prepared.encoder and asdict(prepared.encoder.layout),
            "chat_template": prepared.encoder and prepared.encoder.tokenizer.chat_template,
            "fingerprint": prepared.fingerprint,
        }
        # Cells without a form in JSON, such as dates of Parquet, are text in the held-out rows.
        (made / "prepared.json").write_text(json.dumps(document, default=str))


def read_prepared(folder: Path, tokenizer: Any, config: DataConfig) -> Prepared:
    """Returns the data of `write_prepared`, with memory-mapped arrays."""
    document = json.loads((folder / "prepared.json").read_text())

    def packed(part: str) -> PackedDataset | None:
        arrays = {
            path.stem.removeprefix(f"{part}-"): np.load(path, mmap_mode="r", allow_pickle=False)
            for path in folder.glob(f"{part}-*.npy")
        }
        return PackedDataset.from_arrays(arrays, config.max_length, document["pad_id"]) if arrays else None

    train = packed("train")
    assert train is not None
    encoder = None
    if document["layout"]:
        tokenizer.chat_template = document["chat_template"]
        layout = {name: _tuple(value) for name, value in document["layout"].items()}
        encoder = Encoder(tokenizer, Layout(**layout), config)
    return Prepared(
        train=train,
        eval=packed("eval"),
        eval_rows=document["eval_rows"],
        eval_prompts=document["eval_prompts"],
        report=_report(document["report"]),
        eval_report=document["eval_report"] and _report(document["eval_report"]),
        encoder=encoder,
        questions=Questions.read(folder),
        fingerprint=document["fingerprint"],
    )


def _report(values: dict[str, Any]) -> DataReport:
    plain = {name: _tuple(value) for name, value in values.items()}
    return DataReport(**{**plain, "reasoning": Kept(*values["reasoning"])})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
