"""Reports how many rows, documents and tokens were read, dropped and used."""

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
"""Ratio of tokens of split chats to tokens of whole chats above which the report warns."""
MOST_LOST = 0.05
"""Share of dropped tokens above which the report warns."""


@dataclass(frozen=True)
class DataReport:
    """Counts of rows, documents and tokens that were read, dropped and used.

    Attributes:
        source: source of the rows.
        layout: format and columns of the rows.
        rows_read: rows of the source.
        rows_used: rows with a used document; a row gives one or several documents (`Encoder.documents`).
        documents: used documents: chosen for training (or for evaluation), and not dropped.
        tokens: tokens of the used documents.
        loss_tokens: tokens that carry loss.
        packed_rows: rows of max_length tokens after packing.
        fill: `PackedDataset.fill`.
        lengths: tokens per document before truncation.
        reasoning: counts of reasoning, summed over the documents.
        all_tokens: tokens of used and dropped documents before truncation.
        whole_tokens: the same count if every chat were a single document.
        held_out: rows held out for evaluation, including all rows with the same questions.
        held_out_of: text with the number and kind of questions that held-out questions are chosen from.
        repeated: held-out rows that are not evaluated, because another held-out row asks the same question.
        same_users: rows with the same user turns as other rows but another system turn or other tools. They are
            different questions. For evaluation rows, the other rows are training rows.
        special_rows: rows that contain the text of special tokens.
        special_names: some of these texts.
        special_split: whether these texts are encoded as text.
        seen_in_training: rows of the held-out split dropped because the training split has their questions.
        dropped_too_long: documents over max_length that were dropped; with images they always are.
        truncated: documents cut to max_length.
        dropped_no_loss: other dropped documents, without loss in their first max_length tokens.
        skipped: bad rows that `data.on_bad_row=skip` skips; among the other counts, only rows_read includes them.
        skipped_rows: the first bad rows with their problems.
        images: counts of images (`data.images.columns.ImageCounts`); None for text.
        sources: counts per epoch and source of a mix; all other counts have every document once.
        pairs: counts of all pairs, including held-out pairs; None without pairs.
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
        """Lines about the sources of a mix; empty without a mix."""
        return sources_table(self.sources) if self.sources else []

    def _split_text(self) -> str:
        """Describes how rows became several documents, with a warning above `MOST_TIMES`; empty if none did."""
        if self.documents == self.rows_used:
            return ""
        if self.all_tokens == self.whole_tokens:
            return f" as {self.documents:,} documents of data.max_length tokens at most"
        times = self.all_tokens / self.whole_tokens
        text = f" as {self.documents:,} documents: the chat template renders earlier turns differently, so every "
        text += f"reply is trained after its own prompt, with {self.all_tokens:,} tokens, {times:.1f} times the "
        text += f"{self.whole_tokens:,} of one document a chat"
        if times > MOST_TIMES:
            text += f". WARNING: training takes {times:.1f} times as long; a chat template that renders every reply "
            text += "like the last reply (tokenizer.chat_template) keeps chats whole"
        return text

    def _held_out_text(self) -> str:
        """Describes the numbers of evaluated held-out rows, and of held-out rows that repeat their questions."""
        text = f"{self.held_out - self.repeated:,}{self.held_out_of}"
        if self.repeated:
            text += f"; {self.repeated:,} more {'is' if self.repeated == 1 else 'are'} neither trained nor evaluated, "
            text += "because another held-out row asks the same question"
        return text

    def _lost_text(self) -> str:
        """Describes the tokens lost to truncation and dropping, with a warning above `MOST_LOST`; empty if none are."""
        if not (lost := self.all_tokens - self.tokens):
            return ""
        text = f": {lost:,} of {self.all_tokens:,} tokens lost ({lost / self.all_tokens:.1%})"
        if lost > MOST_LOST * self.all_tokens:
            text += ". WARNING: raise data.max_length"
            text += ", or set data.too_long=split, which trains all tokens" if self.layout.startswith("text ") else ""
        return text

    def _special_text(self) -> str:
        """Describes the rows with the text of special tokens, and how that text is encoded."""
        rows = f"{self.special_rows:,} row{'s hold' if self.special_rows > 1 else ' holds'}"
        what = "encoded as text"
        if not self.special_split:
            what = "trained as that token, which may begin or end a turn; data.special_text=split encodes it as text"
        return f"{rows} the text of a special token, such as {' or '.join(self.special_names)}: {what}"

    @property
    def skipped_text(self) -> str:
        """Number of skipped rows, and the problems of the first skipped rows."""
        more = f"; and {self.skipped - len(self.skipped_rows):,} more" if self.skipped > len(self.skipped_rows) else ""
        return f"{self.skipped:,} skipped (data.on_bad_row): {'; '.join(self.skipped_rows)}{more}"
