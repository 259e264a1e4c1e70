"""Encodes a conversation as token ids with a mask of the tokens that carry loss.

A reply with loss follows the prompt that the tokenizer's chat template makes at inference, contains its reasoning, and
ends with the end-of-turn token (`chat_documents.py`). If a template drops the reasoning of a reply, the reply is
rendered in another form (reasoning as tags in its content, or as `reasoning_content`), or appended to the prompt. A
reply without reasoning closes the reasoning that the prompt opens.

No code compares token ids with the padding id: in many tokenizers it is also the end-of-turn token.
"""

import json
import re
import unicodedata
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from tpu_kit.data.chat.chat_documents import ChatDocuments, Document, with_calls
from tpu_kit.data.chat.chat_template import PROBE, PromptEncoder, has_two_bos, plain_prompt
from tpu_kit.data.rows.columns import Layout, in_message, reasoning_of
from tpu_kit.data.rows.field_values import RowError
from tpu_kit.data.rows.messages import learns
from tpu_kit.data.rows.schemas import Conversation, conversation


class Example(NamedTuple):
    """A document: token ids, and a mask of the same length, true if a token is predicted with loss."""

    input_ids: list[int]
    loss_mask: list[bool]


class ReasoningCounts(NamedTuple):
    """Counts of the reasoning in a document, or sums over documents.

    Attributes:
        replies: assistant turns with loss.
        held: replies with loss that have reasoning in the row.
        trained: replies whose whole reasoning is in the tokens with loss.
        empty: replies with loss on an empty reasoning block.
    """

    replies: int = 0
    held: int = 0
    trained: int = 0
    empty: int = 0


def decoded_example(tokenizer: Any, example: Example) -> list[tuple[str, bool]]:
    """Decodes an example to parts `(text, carries loss)` for display; neighbouring parts differ in their loss."""
    spans: list[tuple[list[int], bool]] = []
    for token, loss in zip(example.input_ids, example.loss_mask, strict=True):
        if not spans or spans[-1][1] != bool(loss):
            spans.append(([], bool(loss)))
        spans[-1][0].append(int(token))
    return [(tokenizer.decode(ids, clean_up_tokenization_spaces=False), loss) for ids, loss in spans]


def _squeezed(text: str) -> str:
    """Returns a text in NFC without white space, because some tokenizers change both."""
    return "".join(unicodedata.normalize("NFC", text).split())


@dataclass(frozen=True)
class Encoder(PromptEncoder):
    """Encodes rows as examples; deterministic, and picklable for several processes.

    Attributes:
        layout: result of `read_layout`.
    """

    layout: Layout

    def conversation(self, row: Mapping[str, Any]) -> Conversation:
        """Reads a row with `schemas.conversation`, and the headers of its pictures: `images` has `Picture` objects.

        Arguments of tool calls are objects, or JSON texts if the chat template needs that. Raises RowError if the row
        or a picture cannot be used; a row of unexpected form may also raise AttributeError, KeyError or TypeError.
        """
        talk = conversation(row, self.layout, self.config)
        if talk.images:
            talk = talk._replace(images=tuple(map(self.images.files.picture, talk.images)))
        if isinstance(talk.messages, str) or not any(message.get("tool_calls") for message in talk.messages):
            return talk
        arguments = []

        def as_json(call: Mapping[str, Any]) -> dict[str, Any]:
            value = call.get("arguments")
            arguments.append(value)
            return {"arguments": json.dumps(value, ensure_ascii=False)} if isinstance(value, Mapping) else {}

        texts: list[str | None] = []
        as_text = with_calls(talk.messages, as_json)
        for messages in (talk.messages, as_text):
            try:
                texts.append(self.render(messages, talk.tools))
            except RowError:
                texts.append(None)
        decoded, encoded = texts
        wrong = decoded is None or any(str(value) in decoded for value in arguments if value)  # Python's repr
        return talk._replace(messages=as_text) if wrong and encoded is not None else talk

    def open_reasoning(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Changes the tokenizer's chat template so that its prompt leaves reasoning open, with a warning.

        Does so only if the prompt ends in the closing tag of the reasoning, and a reply with loss in `rows` has
        reasoning. Sets the template's switches `enable_thinking` and `thinking` to true. If the prompt still ends in
        that tag, the template stays as it is, without a warning; `documents` then raises RowError.
        """
        plain, close = self.tokenizer.chat_template, self.config.think_close
        if not self._closes_reasoning() or not any(map(self._has_reasoning, rows)):
            return
        self.tokenizer.chat_template = "{%- set enable_thinking = true %}{%- set thinking = true %}" + plain
        if self._closes_reasoning():  # `documents` refuses the rows
            self.tokenizer.chat_template = plain
            return
        warnings.warn(
            f"the prompt of the chat template ends in {close!r}, and the rows have reasoning: its switches "
            "enable_thinking and thinking are set, also in the tokenizer that is saved with the adapter",
            stacklevel=2,
        )

    def _closes_reasoning(self) -> bool:
        """Whether the chat template's prompt ends in the closing tag of the reasoning."""
        prompt = self.render([{"role": "user", "content": "a"}], None, prompt=True)
        return prompt.rstrip().endswith(self.config.think_close)

    def _has_reasoning(self, row: Mapping[str, Any]) -> bool:
        """Whether a reply with loss in a row has reasoning; False for a row that cannot be read."""
        try:
            messages = conversation(row, self.layout, self.config).messages
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):  # raised again by tokenising
            return False
        return any(isinstance(turn, dict) and learns(turn) and in_message(turn, self.config) for turn in messages)

    def prompt(self, talk: Conversation) -> str:
        """Returns the text that the model continues with the last reply; may be empty for plain text."""
        asked = talk.asked
        return asked if isinstance(asked, str) else self.render(asked, talk.tools, prompt=True, begun=bool(talk.begun))

    def prompt_ids(self, talk: Conversation) -> list[int]:
        """Returns the token ids of `prompt`, empty for an empty prompt; `PicturedIds` if it has pictures.

        Only plain text gets the special tokens that the tokenizer adds, without EOS; chats have the template's. Raises
        RowError if the template refuses the chat, if a picture takes too many tokens, or if the chat has fewer pictures
        than places for them.
        """
        asked = talk.asked
        if isinstance(asked, str):
            return plain_prompt(self.tokenizer, asked, self.special if self.splits else None) if asked else []
        ids = self.chat_ids(asked, talk.tools, prompt=True, begun=bool(talk.begun))
        return ids if self.images is None else self.images.prompt(ids, talk.images)

    def documents(self, talk: Conversation) -> list[Document]:
        """Renders a conversation as texts for `encode`; every reply with loss has loss in exactly one document.

        Plain text is one document. The rejected reply of a pair is not rendered. Raises RowError if the chat template
        refuses the chat, leaves a part of it out, closes the reasoning of a reply in the prompt, or renders a reply
        differently from its beginning in the prompt.
        """
        if isinstance(talk.messages, str):
            text, reasoning = talk.messages, reasoning_of(talk.messages[talk.first :], self.config)
            literal = self.special.ranges(text) if self.splits else ()
            return [Document(text, [(talk.first, len(text))], [reasoning], plain=True, literal=literal)]
        if not self.splits or not self.special.find([talk.messages, talk.tools]):
            return self._of_chat(talk)
        hide = self.special.hide
        hidden = talk._replace(messages=hide(talk.messages), tools=hide(talk.tools), begun=hide(talk.begun))
        try:
            return [self._shown(document) for document in self._of_chat(hidden)]
        except RowError as error:
            raise RowError(self.special.shown(str(error))[0]) from error

    def _of_chat(self, talk: Conversation) -> list[Document]:
        """Renders a chat as documents, without splitting the text of special tokens."""
        return [self._continuation(talk)] if talk.begun else ChatDocuments(self, talk).documents()

    def _continuation(self, talk: Conversation) -> Document:
        """Renders a chat whose last reply begins in the prompt; only the rest has loss. RowError if it does not fit."""
        assert not isinstance(talk.messages, str)
        prompt, text = self.prompt(talk), self.render(talk.messages, talk.tools)
        if not text.startswith(prompt):
            raise RowError("the chat template renders the reply differently from its beginning in the prompt")
        return Document(text, [(len(prompt), len(text) - len(self.rest))], [""])

    def _shown(self, document: Document) -> Document:
        """Replaces the placeholders in a document by the texts of their special tokens."""
        places = [place for span in document.spans for place in span]
        text, literal, moved = self.special.shown(document.text, places)
        spans = list(zip(moved[::2], moved[1::2], strict=True))
        return Document(text, spans, [self.special.shown(each)[0] for each in document.reasoning], literal=literal)

    def special_text(self, talk: Conversation) -> str:
        """Returns the first text of a special token in a row's messages or tools; empty if there is none."""
        return self.special.find([talk.messages, talk.tools])

    def encode(self, document: Document) -> Example:
        """Returns the token ids of a document, not truncated, and its loss mask.

        Plain text ends with the eos token, which has loss. So does a chat that ends in a reply with loss, if the chat
        template has no `stop`. The first token never carries loss: no token before it predicts it. With
        `data.loss_on=all`, all others do. An image stays the single token of the chat template.

        Raises:
            RowError: no token carries loss.
        """
        ids, mask = self._tokenize(document)
        if document.plain or (not self.stop and document.spans[-1][1] == len(document.text)):
            if ids[-1] != self.tokenizer.eos_token_id:
                ids.append(self.tokenizer.eos_token_id)
                mask.append(True)
            mask[-1] = True
        if self.config.loss_on == "all":
            mask = [True] * len(ids)
        mask[0] = False
        if not any(mask):
            raise RowError("no token carries loss")
        return Example(ids, mask)

    @cached_property
    def header(self) -> str:
        """The chat template's text between a question and its reply or reasoning tag, without white space at its ends.

        Empty without a template, or if it refuses the test chat.
        """
        if not self.tokenizer.chat_template:
            return ""
        turns = [{"role": "user", "content": f"{PROBE}1"}, {"role": "assistant", "content": f"{PROBE}2"}]
        try:
            between = self.render(turns, None).partition(f"{PROBE}1")[2].partition(f"{PROBE}2")[0]
        except RowError:  # the template refuses this chat
            return ""
        return between.partition(self.config.think_open)[0].strip()

    def count_reasoning(self, document: Document, example: Example) -> ReasoningCounts:
        """Counts the replies of a document, and the reasoning in the tokens with loss of its (truncated) example."""
        replies = list(zip(document.spans, document.reasoning, strict=True))
        held = [_squeezed(reasoning) for _, reasoning in replies if reasoning]
        closed = re.compile(rf"\s*(?:{re.escape(self.config.think_open)}\s*)?{re.escape(self.config.think_close)}")
        empty = sum(1 for (start, _), reasoning in replies if not reasoning and closed.match(document.text, start))
        if not held:
            return ReasoningCounts(len(replies), 0, 0, empty)
        ids = [i for i, loss in zip(example.input_ids, example.loss_mask, strict=True) if loss]
        text, position, trained = _squeezed(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)), 0, 0
        for reasoning in held:
            at = text.find(reasoning, position)
            if at >= 0:
                position, trained = at + len(reasoning), trained + 1
        return ReasoningCounts(len(replies), len(held), trained, empty)

    def _tokenize(self, document: Document) -> tuple[list[int], list[bool]]:
        """Returns the token ids of a document, cut at the borders of its spans if possible, and a mask of the spans."""
        text, spans = document.text, document.spans
        ids, offsets = self.encode_text(text, document.literal, document.plain)
        # With `splits`, a BOS in the text of a row is text.
        extra = has_two_bos(self.tokenizer, ids) and not document.literal
        ids, offsets = ids[extra:], offsets[extra:]
        borders = sorted({border for span in spans for border in span})
        starts, ends = _columns(offsets)
        if (np.searchsorted(borders, starts, side="right") < np.searchsorted(borders, ends)).any():
            # A token crosses the end of the prompt, which cannot happen at inference: encode the parts separately.
            lead = next((i for i, (_, b) in enumerate(offsets) if b), 0)
            cut_ids, cut_offsets = ids[:lead], offsets[:lead]
            for a, b in pairwise(sorted({0, len(text), *borders})):
                literal = [(max(x, a) - a, min(y, b) - a) for x, y in document.literal if x < b and y > a]
                piece_ids, piece_offsets = self.encode_text(text[a:b], literal, False)
                cut_ids += piece_ids
                cut_offsets += [(a + x, a + y) for x, y in piece_offsets]
            if self.tokenizer.decode(cut_ids) == self.tokenizer.decode(ids):
                ids, (starts, ends) = cut_ids, _columns(cut_offsets)
        firsts, lasts = _columns(spans)
        numbers = np.searchsorted(firsts, ends) - 1  # the last span that begins before the token ends
        # Some tokenizers trim white space: a token of white space then has an empty range at its end.
        mask = (numbers >= 0) & np.where(starts == ends, ends <= lasts[numbers], starts < lasts[numbers])
        return ids, mask.tolist()


def _columns(ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns the starts and the ends of ranges as rows of a (2, ranges) array."""
    return np.fromiter(chain.from_iterable(ranges), dtype=np.int64, count=2 * len(ranges)).reshape(-1, 2).T
