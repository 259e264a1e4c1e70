"""Prepares the data of a run: loads rows, holds out rows, tokenises, checks, packs and reports.

The result of `prepare` depends only on its arguments, and a checkpoint stores its `fingerprint`. The process that
launches a run prepares its data; the replicas map the arrays of `on_disk`, so a host holds them once.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import tempfile
from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import config as datasets_config

from tpu_kit.config.loader import DataConfig, ModelConfig, TrainConfig
from tpu_kit.config.sections.data import GENERATED
from tpu_kit.data.batching import Documents, PackedDataset
from tpu_kit.data.chat.chat_encoding import Encoder, Example, ReasoningCounts
from tpu_kit.data.held_out import NONE, Questions, choose_questions, drawn, held_out_rows
from tpu_kit.data.mixing import (
    Epoch,
    Mix,
    apart,
    count_sources,
    epoch_of,
    fill_of,
    mix_of,
    rows_of_epoch,
    source_column,
    tokenize_sources,
)
from tpu_kit.data.pairs import PairColumns, PairLayout, with_pairs, with_reply
from tpu_kit.data.report import SAME_USERS, DataReport
from tpu_kit.data.rows.sources import EMBEDDED_ROWS, SYNTHETIC, synthetic_rows
from tpu_kit.data.tokenizing import RawRows, Tokenized

if TYPE_CHECKING:
    import torch

_ARRAYS = "arrays"  # the file of `MappedData`


@dataclass(frozen=True)
class Tasks:
    """Training rows whose prompts a model answers in reinforcement learning.

    Attributes:
        rows: the rows with their prompts.
        numbers: row numbers in the source, or over all sources of a mix; in a mix, a row may repeat.
        too_long: number of rows that were left out because their prompts are too long or empty.
    """

    rows: RawRows
    numbers: list[int]
    too_long: int


@dataclass(frozen=True)
class Prepared:
    """Data ready for training.

    Attributes:
        train: packed training rows.
        eval: packed held-out rows; None without evaluation.
        eval_rows: the held-out rows of `eval` as read, in the order of `drawn`, with the texts of `schemas.problem`,
            or else an "answer" (`schemas.final_answer`); empty for a stream, as are the other fields per held-out row.
        eval_prompts: texts that the model continues, per held-out row (empty for rows of only a text).
        eval_prompt_ids: token ids of these texts.
        report: report about the training rows.
        eval_report: report about the held-out rows.
        encoder: encodes other rows of the same kind; None for random tokens.
        questions: questions of the training rows and of the held-out rows; None for random tokens and streams.
        fingerprint: hash of the training rows: tokens, loss masks, packing, seed and order.
        tasks: training rows to answer in reinforcement learning; None otherwise.
        eval_asked: prompts as messages or text, per held-out row.
        new_tokens: result of `new_tokens.new_tokens`, which `recipes.run_data` adds; empty without adapters.
        learned_tokens: the new tokens whose embeddings the run trains.
        mix: sources of the training rows; None without a mix.
        eval_mix: sources of the held-out rows; None without a mix.
        eval_numbers: row numbers of the held-out rows in `eval_mix`.
        stream: a text stream (`data.stream.packed_shards.TextStream`), whose first rows are `train`; else None.
    """

    train: PackedDataset
    eval: PackedDataset | None
    eval_rows: list[dict[str, Any]]
    eval_prompts: list[str]
    eval_prompt_ids: list[list[int]]
    report: DataReport
    eval_report: DataReport | None
    encoder: Encoder | None
    questions: Questions | None
    fingerprint: str
    tasks: Tasks | None = None
    eval_asked: list[Any] = field(default_factory=list)
    new_tokens: tuple[str, ...] = ()
    learned_tokens: tuple[str, ...] = ()
    mix: Mix | None = None
    eval_mix: Mix | None = None
    eval_numbers: np.ndarray = field(default_factory=lambda: NONE)
    stream: Any = None

    @property
    def images_per_row(self) -> int | None:
        """Number of images or tiles that fit into a packed training row; None for text."""
        return self.train.further.room if self.train.documents.images is not None else None

    def __str__(self) -> str:
        lines = str(self.report).splitlines()
        if self.tasks:  # no row is trained on
            lines = [line for line in lines if not line.startswith(("with reasoning", "too long", "tokens", "packed"))]
        if held := self.eval_report:
            cut = f"; too long: {held.dropped_too_long:,} dropped, {held.truncated:,} truncated"
            loss = "" if self.tasks else f", {held.loss_tokens:,} tokens with loss{cut}"
            seen = f"; {held.seen_in_training:,} more left out, because training has their questions"
            seen = seen if held.seen_in_training else ""
            same = f"; {held.same_users:,} with {SAME_USERS}" if held.same_users else ""
            lines += [f"held-out rows    {held.rows_used:,}{loss}{seen}{same}"]
            lines += [f"held-out rows    {held.skipped_text}"] if held.skipped else []
        if self.new_tokens:
            lines += [f"new tokens       {self._new_tokens_text()}"]
        if self.tasks:
            lines += [f"prompts          {len(self.tasks.numbers):,}; too long and left out: {self.tasks.too_long:,}"]
        return "\n".join(lines)

    def _new_tokens_text(self) -> str:
        """Describes `new_tokens` for the report: a warning about tokens that the run does not train, if any."""
        left = [token for token in self.new_tokens if token not in self.learned_tokens]
        shown = left or self.new_tokens
        names, count = ", ".join(shown[:5]), len(shown)
        more = f" and {count - 5} more" if count > 5 else ""
        found = f"{count} token id{'s' if count > 1 else ''} of the rows had no text in pre-training ({names}{more})"
        if not left:
            return f"{found}; the run trains their embeddings"
        return (
            f"WARNING: {found}, so their embeddings are untrained, and LoRA does not train them; lora.tokens=added does"
        )

    def place(self, row: int) -> str:
        """Describes a training row by its number, in a mix by its number in its source."""
        return str(row) if self.mix is None else self.mix.place(row)

    def columns(self, wanted: Collection[str]) -> dict[str, Callable[[np.ndarray], torch.Tensor]]:
        """Returns the entry "sources" of `PackedDataset.columns` (`source_column`) if wanted, in a mix; else {}."""
        return {"sources": source_column(self.train, self.mix)} if self.mix and "sources" in wanted else {}

    def eval_source(self, row: int) -> str:
        """Returns the name of the source of `eval_rows[row]` in a mix; empty without a mix."""
        return "" if self.eval_mix is None else self.eval_mix.names[int(self.eval_mix.of(self.eval_numbers[row]))]

    def eval_parts(self) -> dict[str, np.ndarray]:
        """Returns the numbers of the packed rows of `eval`, which is not None, by the name of their source in a mix.

        Leaves out sources without rows. Without a mix, all numbers are under the name "".
        """
        assert self.eval is not None
        rows = np.arange(len(self.eval))
        if self.eval_mix is None:
            return {"": rows}
        firsts = np.array([self.eval.documents_of(row)[0] for row in rows.tolist()])  # a row has a single source
        sources = self.eval_mix.of(self.eval.documents.source_rows[firsts])
        return {name: rows[sources == i] for i, name in enumerate(self.eval_mix.names) if (sources == i).any()}

    def example(self, number: int = 0) -> Example:
        """Returns training document `number` for `decoded_example`; for a pair, the prompt with the chosen reply."""
        ids, mask = with_reply(self.train, number)
        return Example(ids.tolist(), mask.tolist())

    def eval_document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns token ids and loss mask of a held-out document; for a pair, the prompt with the chosen reply."""
        assert self.eval is not None
        return with_reply(self.eval, number)

    def pictures(self, number: int = 0) -> list[Any]:
        """Returns the PIL images of training document `number`; empty for text. Raises RowError for a damaged image."""
        documents = self.train.documents
        if documents.images is None:
            return []
        found: list[Any] = self.train.further.pictures(
            documents.source_rows[number], int(documents.images.pictures[number])
        )
        return found


def units_of(config: TrainConfig) -> dict[str, Any]:
    """Returns the options `max_prompt` and `pairs` of `prepare` for a run; both are None if it trains on plain rows."""
    most = config.rl.longest_prompt(config.data.max_length) if config.on_policy else None
    return {"max_prompt": most, "pairs": PairLayout.of(config)}


def prepare(
    config: DataConfig,
    tokenizer: Any,
    *,
    vocab_size: int | None = None,
    run: Questions | None = None,
    learned: np.ndarray = NONE,
    max_prompt: int | None = None,
    model: ModelConfig | None = None,
    pairs: PairLayout | None = None,
) -> Prepared:
    """Loads rows, chooses held-out rows, tokenises, checks and packs them; not for streams (`prepare_stream`).

    Args:
        config: the data section. Held-out rows come from its eval_source or eval_split, or else from the training rows.
        tokenizer: a fast Hugging Face tokenizer (None for the synthetic source); its chat template may change, as in
            `tokenizing.encoder_of`.
        vocab_size: rows of the model's embedding, required for the synthetic source, else unused.
        run: the questions of a finished run, to evaluate it: its held-out questions are held out too; rows with a
            question of its training are left out of the evaluation and counted.
        learned: hashes of prompts that the run's starting adapter was trained on, `Questions.trained` of the adapter's
            run. They are never held out, and `questions.trained` of the result has them too.
        max_prompt: for reinforcement learning, largest prompt in tokens; fills `Prepared.tasks`. None for other runs.
        model: the model section; if its `images` is true, at least one row must have images. None for text.
        pairs: `PairLayout.of` the configuration, for runs on pairs of replies or on labelled replies. None for other
            runs: they use the chosen or good replies of such rows.

    Raises:
        ValueError: as `tokenize_sources`, `as_units`, `choose_questions` and `epoch_of`. Also raised if no row is left
            to train or to evaluate, no prompt fits `max_prompt`, or a row is too long with `data.too_long=error`.
            Finally, if no row has an image or `vocab_size` is missing, although required.
    """
    if config.source == SYNTHETIC:
        return _synthetic(config, vocab_size)
    processor = None
    if model is not None and model.images:
        from tpu_kit.data.images.processors import image_processor

        processor = image_processor(model, tokenizer, config)
    data = tokenize_sources(config, tokenizer, processor=processor)
    if processor is not None and not data.documents.images.pictures.any():
        raise ValueError(f"{data.source}: no row has an image; set model.images=false, or name their column in "
                         "data.columns={images: COLUMN}")  # fmt: skip
    data, pair_counts = with_pairs(data, pairs)
    held, train, counts = None, np.ones(len(data.documents), dtype=bool), dict[str, Any](pairs=pair_counts)
    if eval_split := _eval_split(config):
        section, split = eval_split
        like = [part.encoder.layout for part, _ in data.sources()] if section.mix else [data.encoder.layout]
        held, _ = with_pairs(tokenize_sources(section, tokenizer, split, like, processor), pairs)
        wanted = np.ones(len(held.documents), dtype=bool)
    elif config.eval_rows != 0 or run:
        picked = choose_questions(data.questions, data.earlier, config, learned)
        held, train, wanted = data, ~np.isin(data.questions, picked), data.one_of_each(picked)
        counts |= {"held_out": data.count(~train), "repeated": data.count(~train & ~wanted)}
        counts["held_out_of"] = _held_out_of(data, len(picked), config)
    slots = max((_most_slots(one) for one in (data, held) if one), default=0)
    arrange = partial(epoch_of, data=config)
    packed, report, epoch = _pack(data, train, arrange, slots, same_users=data.same_users(), **counts)
    packed.further = packed.further if pairs is None else PairColumns(packed, pairs)
    fingerprint = _fingerprint_of(packed, config)
    tasks = None if max_prompt is None else _tasks(data, rows_of_epoch(data, train, epoch), max_prompt)
    trained = np.union1d(data.prompts(train), learned)
    if held is None:
        questions = Questions(trained, NONE)
        return Prepared(
            packed, None, [], [], [], report, None, data.encoder, questions, fingerprint, tasks, mix=mix_of(data)
        )
    if run:
        wanted |= held.one_of_each(run.held_out)
    chosen = wanted & ~np.isin(held.questions, run.trained if run else trained)
    if not chosen.any():
        others = ", or in the rows of lora.adapter (data.eval_rows=0 holds none out)" if len(learned) else ""
        text = f"every question of the evaluation rows ({held.source}) is in the training rows too{others}"
        raise ValueError(f"{text}; name other rows in data.eval_source")
    counts = {"seen_in_training": held.count(wanted & ~chosen)}
    same_users = {"same_users": held.count(chosen & np.isin(held.users, data.users[train]))}
    counts |= {"skipped": 0, "skipped_rows": ()} if held is data else same_users  # the training report has them
    room = packed.further.room if packed.documents.images is not None else None
    eval_data, eval_report, _ = _pack(held, chosen, apart, slots, room, **counts)
    if pairs is not None:
        eval_data.further = PairColumns(eval_data, pairs)
        eval_data.further.scale = eval_data.further.share(eval_data, np.arange(len(eval_data)))
    numbers = drawn(np.unique(eval_data.documents.source_rows), config.seed)
    raw = held.raw_rows(numbers)
    questions = Questions(trained, np.unique(held.questions[chosen]))
    return Prepared(
        packed, eval_data, *raw[:3], report, eval_report, data.encoder, questions, fingerprint, tasks, raw.asked,
        mix=mix_of(data), eval_mix=mix_of(held), eval_numbers=numbers,
    )  # fmt: skip


def _held_out_of(data: Tokenized, picked: int, config: DataConfig) -> str:
    """Describes the questions that `picked` were chosen from, as in ", a tenth of the 500 different questions"."""
    different = len(np.setdiff1d(data.questions, data.earlier))
    tenth = "a tenth of " if config.eval_rows is None and picked == different // 10 else ""
    return f", {tenth}the {different:,} different questions"


def _tasks(data: Tokenized, numbers: np.ndarray, max_prompt: int) -> Tasks:
    """Selects the rows in `numbers` with prompts of 1 to `max_prompt` tokens; raises ValueError if there are none."""
    raw = data.raw_rows(numbers)
    fits = [0 < len(ids) <= max_prompt for ids in raw.prompt_ids]
    if not any(fits):
        shortest = min(map(len, raw.prompt_ids))
        raise ValueError(
            f"{data.source}: no prompt has from 1 to {max_prompt} tokens, the shortest has {shortest}. Raise "
            "data.max_length or rl.max_prompt_length, or lower rl.max_completion_length"
        )
    chosen = RawRows(*([value for value, fit in zip(values, fits, strict=True) if fit] for values in raw))
    return Tasks(chosen, numbers[fits].tolist(), len(fits) - sum(fits))


def _fingerprint_of(packed: PackedDataset, config: DataConfig) -> str:
    """Returns a hash (hex digits) of the packed rows, their grouping, and the seed and setting of their order."""
    order = f"{packed.fingerprint()} {config.seed} {config.shuffle}"
    order += f" {packed.grouping.fingerprint()}" if packed.grouping else ""
    return hashlib.blake2b(order.encode(), digest_size=16).hexdigest()


def _synthetic(config: DataConfig, vocab_size: int | None) -> Prepared:
    """Makes `synthetic_rows` rows of `max_length` random tokens with loss from the seed.

    Raises ValueError if `vocab_size` is None.
    """
    if vocab_size is None:
        raise ValueError("data.source=synthetic needs the size of the model's vocabulary, which is not known here")
    count, length = synthetic_rows(config.split), config.max_length
    random = np.random.PCG64(np.random.SeedSequence([config.seed, vocab_size])).random_raw(count * length)
    ids, lengths = (random % np.uint64(vocab_size)).astype(np.int32), np.full(count, length)
    documents = Documents(ids, np.ones(len(ids), dtype=bool), lengths, np.arange(count))
    packed = PackedDataset(documents, length, packing=False)
    layout = f"random tokens below {vocab_size:,}"
    counts = (count, count, count, len(ids), len(ids), count)
    report = DataReport(
        SYNTHETIC, layout, *counts, fill=1.0, lengths=array("q", lengths.tobytes()), all_tokens=len(ids)
    )
    return Prepared(packed, None, [], [], [], report, None, None, None, _fingerprint_of(packed, config))


def _eval_split(config: DataConfig) -> tuple[DataConfig, str] | None:
    """Returns data section and split of separate evaluation rows; None if the training rows, or no rows, are used."""
    if config.eval_source:
        elsewhere = replace(config, source=config.eval_source)
        return elsewhere, config.eval_split or ("eval" if config.eval_source == "embedded" else "train")
    if config.eval_split:
        return config, config.eval_split
    if config.source in GENERATED and config.eval_rows != 0:
        return config, f"eval[:{held_out_rows(config, EMBEDDED_ROWS['train'])}]"
    return None


def _most_slots(tokens: Tokenized) -> int:
    """Returns the largest number of image slots of a document that is not too long; 0 for text."""
    images, short = tokens.documents.images, tokens.full_lengths <= tokens.encoder.config.max_length
    return int(images.slots[short].max(initial=0)) if images is not None else 0


def _pack(
    tokens: Tokenized,
    chosen: np.ndarray,
    arrange: Callable[[Tokenized, np.ndarray], Epoch],
    slots: int = 0,
    room: int | None = None,
    **counts: Any,
) -> tuple[PackedDataset, DataReport, Epoch]:
    """Applies `data.too_long` to the chosen documents, arranges them in an epoch, and packs the epoch.

    Returns the packed rows, the report, and the epoch, whose document numbers are indices in `tokens`.

    Args:
        tokens: the documents.
        chosen: bool (documents,), whether a document is chosen.
        arrange: makes the epoch from `tokens` and the bool mask of the usable documents.
        slots: largest number of image slots of any document.
        room: image slots of a row; None chooses the number.
        **counts: further counts of the report.

    Raises:
        ValueError: no chosen document is left with loss, or `data.too_long` is "error" and a document is too long.
    """
    config, documents = tokens.encoder.config, tokens.documents
    long = (tokens.full_lengths > config.max_length) & chosen
    if config.too_long == "error" and long.any():
        worst = int(np.argmax(np.where(long, tokens.full_lengths, 0)))
        raise ValueError(
            f"{tokens.source}: {long.sum()} rows have more than data.max_length={config.max_length} tokens, the "
            f"longest is {tokens.place(documents.source_rows[worst])} with {tokens.full_lengths[worst]}. Raise it, or "
            "set data.too_long=truncate, drop, or split for plain text"
        )
    dropped = long if config.too_long == "drop" else np.zeros_like(long)
    if documents.images is not None:  # a document with images is never truncated
        dropped = dropped | (long & (documents.images.pictures > 0))
    learns = documents.loss_tokens > 0
    used = chosen & ~dropped & learns
    if not used.any():
        raise ValueError(
            f"{tokens.source}: no loss tokens left: data.max_length={config.max_length} is too short for all "
            f"{chosen.sum()} rows; the shortest has {tokens.full_lengths[chosen].min()} tokens; raise it"
        )
    epoch = arrange(tokens, used)
    kept = np.zeros_like(used)
    kept[epoch.documents] = True
    selected, own = documents.select(kept), epoch._replace(documents=(np.cumsum(kept) - 1)[epoch.documents])
    pad_id = tokens.encoder.tokenizer.pad_token_id or 0  # any id: padding has segment 0 and no label
    if selected.images is None:
        order, grouping = own.packed(fill_of(selected.lengths, config))
        packed = PackedDataset(selected, config.max_length, pad_id=pad_id, order=order, grouping=grouping)
    else:
        from tpu_kit.data.images.columns import packed_with_images

        packed, images = packed_with_images(selected, tokens, own, pad_id, slots, room)
        counts["images"] = images._replace(dropped=int(documents.images.pictures[dropped & chosen].sum()))
    special, left = kept & (tokens.special != ""), chosen & (kept | ~used)
    counts = {"skipped": tokens.skipped, "skipped_rows": tokens.skipped_rows, **counts}
    report = DataReport(
        source=tokens.source,
        layout=str(tokens.encoder.layout),
        rows_read=tokens.rows_read,
        rows_used=tokens.count(kept),
        documents=len(selected),
        tokens=int(selected.lengths.sum()),
        loss_tokens=int(documents.loss_tokens[kept].sum()),
        packed_rows=len(packed),
        fill=packed.fill(),
        lengths=array("q", tokens.full_lengths[kept].tobytes()),
        reasoning=ReasoningCounts(*tokens.reasoning[kept].sum(axis=0).tolist()),
        dropped_too_long=int(dropped.sum()),
        truncated=int((long & kept).sum()),
        dropped_no_loss=int((chosen & ~dropped & ~learns).sum()),
        all_tokens=int(tokens.full_lengths[left].sum()),
        whole_tokens=int(tokens.whole_lengths[left].sum()),
        special_rows=tokens.count(special),
        special_names=tuple(sorted({*tokens.special[special]})[:3]),
        special_split=config.special_text == "split",
        sources=count_sources(tokens, used, epoch.documents),
        **counts,
    )
    return packed, report, epoch


# ------------------------------------------------------------------------------------------------ for other processes


@dataclass(frozen=True)
class MappedData:
    """Prepared data whose arrays other processes of this host map from a file.

    Attributes:
        folder: folder of the file.
        pickled: everything but the arrays. It is sent with the launch's arguments: nothing on a disk is unpickled.
        places: begin and end of the arrays in the file, in bytes.
    """

    folder: Path
    pickled: bytes
    places: tuple[tuple[int, int], ...]

    def read(self) -> Prepared:
        """Returns the data, with read-only arrays mapped from the file, which must still exist."""
        mapped = np.memmap(self.folder / _ARRAYS, mode="r")
        return pickle.loads(self.pickled, buffers=[mapped[first:last] for first, last in self.places])


@contextlib.contextmanager
def on_disk(prepared: Prepared) -> Iterator[MappedData]:
    """Writes the arrays to a temporary folder, and yields the data for the processes of this host.

    The folder is in the cache of `datasets`, and is deleted when the block ends.
    """
    cache = Path(datasets_config.HF_DATASETS_CACHE) / "tpu_kit"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="prepared-", dir=cache) as name:
        places = list[tuple[int, int]]()
        with Path(name, _ARRAYS).open("wb") as file:

            def write(array: pickle.PickleBuffer) -> None:
                first = file.tell()
                places.append((first, first + file.write(array.raw())))
                file.write(bytes(-file.tell() % 64))  # arrays are aligned

            pickled = pickle.dumps(prepared, protocol=5, buffer_callback=write)
        yield MappedData(Path(name), pickled, tuple(places))
