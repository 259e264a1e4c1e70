"""The way from a source of rows to packed batches: load, hold out, tokenise, check, pack, report.

`prepare` is the whole way. What it does is determined by its arguments, and its `fingerprint` says in a checkpoint
which data a run was trained on.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from datasets import config as datasets_config

from tpu_kit.columns import detect_layout, first_values
from tpu_kit.config import DataConfig
from tpu_kit.encoder import Encoder, Example, Kept, ensure_chat_template
from tpu_kit.formats import Layout, RowError, final_answer, normalised, problem
from tpu_kit.packing import Documents, PackedDataset
from tpu_kit.records import PROBLEM
from tpu_kit.sources import GENERATED, SHOWN, load_rows, pick_split, places

_ROWS_PER_PROCESS = 10_000  # below this a second process takes longer to start than it saves
_CACHE_VERSION = 4  # raise it when the code below gives other tokens for the same row


@dataclass(frozen=True)
class DataReport:
    """What became of the rows.

    A row is one document, except a chat of which the chat template drops the reasoning of earlier turns: it is one for
    each reply (`Encoder.parts`). What is said of rows below `seen_in_training` is counted in documents.

    Attributes:
        source: where they came from.
        layout: the format and the columns used.
        rows_read: rows of the source.
        held_out: rows kept back for evaluation, with all that ask the same.
        seen_in_training: rows of the held-out split dropped because the train split asks the same.
        dropped_too_long: rows over max_length that were dropped.
        truncated: rows cut to max_length and kept.
        dropped_no_loss: rows cut to max_length of which no token with loss was left; dropped.
        rows_used: rows of which a document is left.
        documents: those that are left.
        tokens: their tokens.
        loss_tokens: those of them that carry loss.
        packed_rows: rows of max_length tokens they were packed into.
        fill: share of the slots of packed rows that hold real tokens, the emptiest row left out.
        lengths: tokens of each document before truncation.
        reasoning: the replies that carry loss, those for which the rows hold reasoning, and those with all of it among
            the tokens that carry loss.
        skipped: bad rows left out as `data.on_bad_row=skip` asks; not among the other counts, but for rows_read.
        skipped_rows: the first of them, each with what is wrong with it.
    """

    source: str
    layout: str
    rows_read: int
    held_out: int
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
            f"with reasoning   {self.reasoning.found:,} of {self.reasoning.replies:,} replies{self._lost()}",
            f"held out         {self.held_out:,}; dropped as seen in training {self.seen_in_training:,}",
            f"too long         {self.dropped_too_long:,} dropped, {self.truncated:,} truncated, "
            f"{self.dropped_no_loss:,} dropped because truncation left no loss",
            f"tokens           {self.tokens:,}, with loss {self.loss_tokens:,} ({self.loss_tokens / self.tokens:.0%})",
            f"tokens of a row  median {middle}, 95 % up to {tail}, longest {max(self.lengths)}",
            f"packed           {self.packed_rows:,} rows, {self.fill:.1%} full",
        ]
        return "\n".join(lines + ([f"bad rows         {self.skipped_text}"] if self.skipped else []))

    @property
    def skipped_text(self) -> str:
        """How many bad rows were left out, and what is wrong with the first of them."""
        more = f"; and {self.skipped - len(self.skipped_rows):,} more" if self.skipped > len(self.skipped_rows) else ""
        return f"{self.skipped:,} skipped (data.on_bad_row): {'; '.join(self.skipped_rows)}{more}"

    def _split(self) -> str:
        if self.documents == self.rows_used:
            return ""
        return (
            f" as {self.documents:,} documents: the chat template drops the reasoning of earlier turns, so each reply "
            "is trained after the prompt of its own"
        )

    def _lost(self) -> str:
        _, held, found = self.reasoning
        if found == held:
            return ""
        return f"; WARNING: the rows hold reasoning for {held:,}, and {held - found:,} lose some of it: " + (
            "raise data.max_length" if self.truncated else "the tokenizer changes its text"
        )


@dataclass(frozen=True)
class Prepared:
    """Data ready for training.

    Attributes:
        train: packed rows.
        eval: packed held-out rows; None without evaluation.
        eval_rows: the held-out rows as read; chain-of-thought rows also have the texts of `formats.problem`: question,
            reasoning and answer; others an "answer" (`formats.final_answer`), where they have none of their own.
        eval_prompts: for each of them the text after which the model is to answer (empty for plain text). Chats
            have their special tokens already: tokenise them with `add_special_tokens=False`.
        report: of the train rows.
        eval_report: of the held-out rows.
        encoder: turns another row of the same kind into tokens.
        fingerprint: hash of all tokens, loss masks, packing and order; equal exactly if training sees the same.
    """

    train: PackedDataset
    eval: PackedDataset | None
    eval_rows: list[dict[str, Any]]
    eval_prompts: list[str]
    report: DataReport
    eval_report: DataReport | None
    encoder: Encoder
    fingerprint: str

    def example(self, number: int = 0) -> Example:
        """Return one training document, for `decoded_example`."""
        ids, mask = self.train.document(number)
        return Example(ids.tolist(), mask.tolist())


@dataclass(frozen=True)
class _Tokenized:
    """All rows of one source.

    Attributes:
        documents: of the rows, in their order; of a bad row one placeholder.
        full_lengths: the tokens of each before truncation.
        questions: the hash of the question of each document's row.
        kept: the numbers of `Kept` of each, (documents, 3).
        good: of each, whether its row is not a bad one, which is to be left out; bool.
        skipped_rows: the first bad rows, each with what is wrong with it.
    """

    documents: Documents
    full_lengths: np.ndarray
    questions: np.ndarray
    kept: np.ndarray
    good: np.ndarray
    skipped_rows: tuple[str, ...]


def prepare(
    config: DataConfig,
    tokenizer: Any,
    *,
    model_positions: int | None = None,
    vocab_size: int | None = None,
    dataset: Dataset | DatasetDict | None = None,
) -> Prepared:
    """Load, hold out, tokenise, check and pack.

    Args:
        config: the data section.
        tokenizer: a fast Hugging Face tokenizer; one without a chat template is given `encoder.DEFAULT_TEMPLATE` if the
            rows are chats.
        model_positions: `max_position_embeddings` of the model; None skips the check.
        vocab_size: rows of the model's embedding; None skips the check.
        dataset: rows to use in place of `config.source`.

    Raises:
        ValueError: bad rows, columns, files or settings; the text names them.
    """
    if model_positions is not None and config.max_length > model_positions:
        raise ValueError(
            f"data.max_length={config.max_length} is longer than the {model_positions} positions of the model; "
            f"set it to {model_positions} or less"
        )
    source = "the data set given" if dataset is not None else config.source
    skip = config.on_bad_row == "skip"
    rows = (
        load_rows(source, config.split, config.seed, skip=skip)
        if dataset is None
        else pick_split(dataset, config.split)
    )
    if not len(rows):
        raise ValueError(f"{source} has no rows")
    encoder = _encoder(rows, tokenizer, config, source)
    everything = _tokenize(rows, encoder, source, config.split, vocab_size)
    train = everything.good
    eval_source, eval_split = _eval_source(config, dataset)
    eval_data: PackedDataset | None = None
    eval_report: DataReport | None = None
    eval_rows: list[dict[str, Any]] = []
    prompts: list[str] = []
    if eval_source or config.eval_rows:
        if eval_source:
            own = isinstance(dataset, DatasetDict) and not config.eval_source
            held = (
                pick_split(dataset, eval_split) if own else load_rows(eval_source, eval_split, config.seed, skip=skip)
            )
            eval_encoder = _encoder(held, tokenizer, config, eval_source)
            held_tokens = _tokenize(held, eval_encoder, eval_source, eval_split, vocab_size)
            chosen = held_tokens.good & ~np.isin(held_tokens.questions, everything.questions[everything.good])
            seen = _count(held_tokens, held_tokens.good & ~chosen)
            if not chosen.any():
                raise ValueError(f"every question of the evaluation rows ({eval_source}) is in the train rows too")
        else:
            held, eval_encoder, held_tokens, seen = rows, encoder, everything, 0
            chosen, train = _hold_out(everything, config)
        eval_data, eval_report = _pack(held_tokens, chosen, eval_encoder, eval_source or source)
        eval_report = replace(eval_report, rows_read=len(held), seen_in_training=seen)
        eval_rows, prompts = _raw_rows(held, np.unique(held_tokens.documents.source_rows[chosen]), eval_encoder)
    packed, report = _pack(everything, train, encoder, source)
    report = replace(report, rows_read=len(rows), held_out=_count(everything, everything.good & ~train))
    order = f"{packed.fingerprint()} {config.seed} {config.shuffle}"
    fingerprint = hashlib.blake2b(order.encode(), digest_size=16).hexdigest()
    return Prepared(packed, eval_data, eval_rows, prompts, report, eval_report, encoder, fingerprint)


def _encoder(rows: Dataset, tokenizer: Any, config: DataConfig, source: str) -> Encoder:
    columns = [column for column in rows.column_names if column != PROBLEM]
    try:
        layout = detect_layout(columns, config, first_values(rows))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    for role, column in layout.columns.items():
        alike = [other for other in columns if other.lower() == column.lower()]
        if len(alike) > 1 and role not in (config.columns or {}):
            raise ValueError(
                f"{source}: the columns {' and '.join(alike)} differ in case alone; say which of them is the {role}, "
                f"as in data.columns={{{role}: {column}}}"
            )
    plain = layout.format == "text" or (
        layout.format == "prompt_completion"
        and isinstance(next((row[layout.columns["prompt"]] for row in rows if _is_usable(row, layout)), None), str)
    )
    if plain and config.system_prompt:
        raise ValueError("data.system_prompt needs chats; these rows are plain text, which no chat template is put on")
    if not plain:
        ensure_chat_template(tokenizer)
    return Encoder(tokenizer, layout, config)


def _is_usable(row: Mapping[str, Any], layout: Layout) -> bool:
    return isinstance(row[layout.columns["prompt"]], str | list)


def _eval_source(config: DataConfig, dataset: Dataset | DatasetDict | None) -> tuple[str | None, str]:
    """Return where evaluation rows come from, and their split; None if they are held out of the train rows."""
    if config.eval_source:
        name = "eval" if config.eval_source in GENERATED else "train"
        return config.eval_source, config.eval_split or name
    if config.eval_split and (dataset is None or isinstance(dataset, DatasetDict)):
        return config.source if dataset is None else "the data set given", config.eval_split
    if dataset is None and config.source in GENERATED and config.eval_rows:
        return config.source, f"eval[:{config.eval_rows}]"
    return None, ""


def _count(tokens: _Tokenized, chosen: np.ndarray) -> int:
    """Return how many rows the chosen documents are of."""
    return len(np.unique(tokens.documents.source_rows[chosen]))


def _hold_out(tokens: _Tokenized, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Choose questions by a hash of their text: return which documents evaluate and which train.

    Those of one row of each chosen question evaluate; those of the others that ask the same do neither.
    """
    questions, source_rows, good = tokens.questions, tokens.documents.source_rows, np.flatnonzero(tokens.good)
    unique, first = np.unique(questions[good], return_index=True)
    if len(unique) <= config.eval_rows:
        raise ValueError(
            f"data.eval_rows={config.eval_rows} leaves nothing to train on: there are {len(unique)} different "
            "questions. Set it lower, or to 0 for no evaluation"
        )
    salted = [hashlib.blake2b(f"{config.seed} {key}".encode()).digest() for key in unique]
    picked = sorted(range(len(unique)), key=salted.__getitem__)[: config.eval_rows]
    evaluates = np.isin(source_rows, source_rows[good[first[picked]]])
    return evaluates, tokens.good & ~np.isin(questions, unique[picked])


def _raw_rows(rows: Dataset, chosen: np.ndarray, encoder: Encoder) -> tuple[list[dict[str, Any]], list[str]]:
    picked = [dict(rows[int(i)]) for i in chosen]
    talks = [encoder.conversation(row) for row in picked]
    prompts = [encoder.prompt(talk) for talk in talks]
    if encoder.layout.format == "cot":
        return [row | problem(row, encoder.layout, encoder.config) for row in picked], prompts
    for row, talk in zip(picked, talks, strict=True):
        if row.get("answer") is None and (said := final_answer(talk, encoder.config)):
            row["answer"] = said
    return picked, prompts


def _pack(tokens: _Tokenized, chosen: np.ndarray, encoder: Encoder, source: str) -> tuple[PackedDataset, DataReport]:
    """Apply `too_long` to the chosen rows and pack them; the caller fills in the counts that it alone knows."""
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
            f"rows; the shortest has {tokens.full_lengths[chosen].min()} tokens"
        )
    kept = documents.select(keep)
    pad_id = encoder.tokenizer.pad_token_id or 0
    packed = PackedDataset(kept, config.max_length, packing=config.packing, pad_id=pad_id)
    report = DataReport(
        source=source,
        layout=str(encoder.layout),
        rows_read=0,
        held_out=0,
        seen_in_training=0,
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
    """Tokenise all rows, or read them from the cache of `datasets`.

    Raises:
        ValueError: rows that cannot be used, all counted and the first of them named, where `data.on_bad_row` says
            stop or they are most rows; or ids outside the vocabulary.
    """
    name = _fingerprint(rows, encoder)
    table = rows.map(
        partial(_tokenize_row, encoder=encoder),
        remove_columns=rows.column_names,
        num_proc=_processes(len(rows), encoder.config.num_proc),
        cache_file_name=_cache_file(name),
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
        advice = "Mend or drop them"
        if skip:
            advice += "; data.on_bad_row=skip leaves out no more than half of the rows, and these are more than half"
        elif not most:
            advice += ", or leave them out with data.on_bad_row=skip"
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
    questions = np.repeat(columns["question"].to_numpy().astype(str), counts)
    kept = columns["kept"].combine_chunks().flatten().to_numpy().reshape(-1, len(Kept._fields))
    return _Tokenized(documents, full_lengths, questions, kept, ~np.isin(source_rows, bad), shown)


def _tokenize_row(row: Mapping[str, Any], encoder: Encoder) -> dict[str, Any]:
    """Return the documents of a row one after another, with the numbers of `Kept` of each."""
    try:
        if unread := row.get(PROBLEM):
            raise RowError(unread)
        talk = encoder.conversation(row)
        parts = encoder.parts(talk)
        whole = [encoder.encode(part) for part in parts]
    except RowError as error:
        return _bad(str(error))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:  # of a form nobody thought of
        return _bad(f"it cannot be read as {encoder.layout.format}: {type(error).__name__}: {error}")
    end = encoder.config.max_length
    cut = [Example(ids[:end], mask[:end]) for ids, mask in whole]
    return {
        "input_ids": [i for example in cut for i in example.input_ids],
        "loss_mask": [loss for example in cut for loss in example.loss_mask],
        "lengths": [len(example.input_ids) for example in cut],
        "full_lengths": [len(example.input_ids) for example in whole],
        "kept": [n for part, example in zip(parts, cut, strict=True) for n in encoder.kept(part, example)],
        "question": hashlib.blake2b(normalised(talk.question).encode(), digest_size=16).hexdigest(),
        "error": "",
    }


def _bad(error: str) -> dict[str, Any]:
    return {
        "input_ids": [0], "loss_mask": [False], "lengths": [1], "full_lengths": [0], "kept": [0, 0, 0], "question": "",
        "error": error,
    }  # fmt: skip


def _fingerprint(rows: Dataset, encoder: Encoder) -> str:
    """Return a hash of all that tokens depend on: rows, tokenizer, template and settings (not how they are packed)."""
    tokenizer, config = encoder.tokenizer, asdict(encoder.config)
    for setting in ("source", "eval_source", "split", "eval_split", "eval_rows", "seed", "shuffle", "num_proc"):
        del config[setting]  # the rows stand for these, or they come later
    for setting in ("packing", "too_long", "on_bad_row"):
        del config[setting]
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    parts = [_CACHE_VERSION, rows._fingerprint, tokenizer.backend_tokenizer.to_str(), special, tokenizer.chat_template]
    parts += [config, str(encoder.layout)]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _cache_file(name: str) -> str:
    folder = Path(datasets_config.HF_DATASETS_CACHE) / "tpu_kit"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / f"{name}.arrow")


def _processes(rows: int, wanted: int | None) -> int | None:
    """Return how many processes tokenise: as asked, else by the rows and the cores; None is this process alone."""
    if wanted is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wanted = min(cores, rows // _ROWS_PER_PROCESS)
    return wanted if 1 < wanted <= rows else None
