"""What became of the rows: counts of what was read, dropped and used, and their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpu_kit.data.chat.chat_encoding import ReasoningCounts
from tpu_kit.data.mixing import SourceCounts, sources_table
from tpu_kit.data.pairs import PairCounts

SAME_USERS = "the user turns of other rows under another system turn or other tools"
DIFFERENT = f"rows have {SAME_USERS} and are different questions"
MOST_TIMES = 1.5
"""How many times the tokens of whole chats their parts may have without a warning."""
MOST_LOST = 0.05
"""The share of tokens that may be dropped without a warning."""


@dataclass(frozen=True)
class DataReport:
    """Counts of rows, documents and tokens that were read, dropped and used.

    Attributes:
        source: the source of the rows.
        layout: the format and the columns used.
        rows_read: rows of the source.
        rows_used: rows with a used document; a row gives one document, or several (`Encoder.documents`).
        documents: documents used.
        tokens: tokens of these documents.
        loss_tokens: tokens that carry loss.
        packed_rows: rows of max_length tokens after packing.
        fill: `PackedDataset.fill`.
        lengths: tokens of each document before truncation.
        reasoning: summed over the documents.
        all_tokens: tokens of all documents before truncation and dropping.
        whole_tokens: the same if each chat were one document.
        held_out: rows held out for evaluation, with all rows of the same questions.
        held_out_of: the number and the kind of questions that they are chosen from, as text.
        repeated: held-out rows that are not evaluated, because another held-out row asks the same question.
        same_users: rows with the user turns of other rows (of training rows, for evaluation rows) under another system
            turn or other tools. They are different questions.
        special_rows: rows with the text of special tokens.
        special_names: some of these texts.
        special_split: whether they are encoded as text.
        seen_in_training: rows of the held-out split dropped because the training split has their questions.
        dropped_too_long: documents over max_length that were dropped.
        truncated: documents cut to max_length.
        dropped_no_loss: documents whose first max_length tokens carry no loss, dropped.
        skipped: bad rows that `data.on_bad_row=skip` skips; of the other counts, only rows_read includes them.
        skipped_rows: the first bad rows, each with its problem.
        images: counts of images (`data.images.columns.ImageCounts`); None for text.
        sources: an epoch by source, of a mix; the other counts have each document once.
        pairs: counts of all pairs, held-out ones included; None without pairs.
    """

    source: str
    layout: str
    rows_read: int
    rows_used: int
    documents: int
    tokens: int
    loss_tokens: int
    packed_rows: int
    fill: float
    lengths: Sequence[int]
    reasoning: ReasoningCounts = field(default_factory=ReasoningCounts)
    all_tokens: int = 0
    whole_tokens: int = 0
    held_out: int = 0
    held_out_of: str = ""
    repeated: int = 0
    same_users: int = 0
    special_rows: int = 0
    special_names: tuple[str, ...] = ()
    special_split: bool = False
    seen_in_training: int = 0
    dropped_too_long: int = 0
    truncated: int = 0
    dropped_no_loss: int = 0
    skipped: int = 0
    skipped_rows: tuple[str, ...] = ()
    images: Any = None
    sources: tuple[SourceCounts, ...] = ()
    pairs: PairCounts | None = None

    def __str__(self) -> str:
        middle, tail = np.percentile(self.lengths, [50, 95]).astype(int)
        replies, held, trained, empty = self.reasoning
        lost = ""
        if trained != held:
            lost = f"; WARNING: the rows hold reasoning for {held:,}, and {held - trained:,} lose some of it: "
            lost += "raise data.max_length" if self.truncated else "the tokenizer changes its text"
        blocks = f"; {empty:,} of the others with an empty reasoning block" if empty else ""
        tokens, loss, of = self.tokens, self.loss_tokens, ""
        if self.sources:
            tokens, loss = (sum(counts) for counts in zip(*(one[-2:] for one in self.sources), strict=True))
            of = " of an epoch"
        lines = [
            *(self.mixed or [f"source           {self.source}: {self.layout}"]),
            f"rows             {self.rows_read:,} read, {self.rows_used:,} used{self._split_text()}",
            *([f"held out         {self._held_out_text()}"] if self.held_out else []),
            *([f"same user turns  {self.same_users:,} {DIFFERENT}"] if self.same_users else []),
            f"with reasoning   {trained:,} of {replies:,} replies{blocks}{lost}",
            f"too long         {self.dropped_too_long:,} dropped, {self.truncated:,} truncated, "
            f"{self.dropped_no_loss:,} dropped because truncation left no loss{self._lost_text()}",
            *([f"special tokens   {self._special_text()}"] if self.special_rows else []),
            f"tokens           {tokens:,}{of}, with loss {loss:,} ({loss / tokens:.0%})",
            f"tokens of a row  median {middle}, 95 % up to {tail}, longest {max(self.lengths)}",
            f"packed           {self.packed_rows:,} rows, {self.fill:.1%} full",
            *(self.images.lines(self.tokens) if self.images else []),
            *(self.pairs.lines() if self.pairs else []),
        ]
        return "\n".join(lines + ([f"bad rows         {self.skipped_text}"] if self.skipped else []))

    @property
    def mixed(self) -> list[str]:
        """The lines of the sources of a mix; empty without a mix."""
        return sources_table(self.sources) if self.sources else []

    def _split_text(self) -> str:
        if self.documents == self.rows_used:
            return ""
        if self.all_tokens == self.whole_tokens:
            return f" as {self.documents:,} documents of data.max_length tokens at most"
        times = self.all_tokens / self.whole_tokens
        text = f" as {self.documents:,} documents: the chat template renders earlier turns differently, so each "
        text += f"reply is trained after its own prompt, with {self.all_tokens:,} tokens, {times:.1f} times the "
        text += f"{self.whole_tokens:,} of one document a chat"
        if times > MOST_TIMES:
            text += ". WARNING: training takes as many times longer; a chat template that renders every reply as it "
            text += "renders the last one (tokenizer.chat_template) keeps chats whole"
        return text

    def _held_out_text(self) -> str:
        text = f"{self.held_out - self.repeated:,}{self.held_out_of}"
        if self.repeated:
            text += f"; {self.repeated:,} more {'is' if self.repeated == 1 else 'are'} neither trained nor evaluated, "
            text += "because another held-out row asks the same"
        return text

    def _lost_text(self) -> str:
        if not (lost := self.all_tokens - self.tokens):
            return ""
        text = f": {lost:,} of {self.all_tokens:,} tokens lost ({lost / self.all_tokens:.1%})"
        if lost > MOST_LOST * self.all_tokens:
            text += ". WARNING: raise data.max_length"
            text += ", or set data.too_long=split, which trains all of it" if self.layout.startswith("text ") else ""
        return text

    def _special_text(self) -> str:
        rows = f"{self.special_rows:,} row{'s hold' if self.special_rows > 1 else ' holds'}"
        what = "encoded as text"
        if not self.special_split:
            what = "trained as that token, which may begin or end a turn; data.special_text=split encodes it as text"
        return f"{rows} the text of one, such as {' or '.join(self.special_names)}: {what}"

    @property
    def skipped_text(self) -> str:
        """The number of skipped bad rows, and the problems of the first of them."""
        more = f"; and {self.skipped - len(self.skipped_rows):,} more" if self.skipped > len(self.skipped_rows) else ""
        return f"{self.skipped:,} skipped (data.on_bad_row): {'; '.join(self.skipped_rows)}{more}"
