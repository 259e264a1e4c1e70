"""Renders a chat as documents: each reply that carries loss stands after its own prompt, as the last turn of its chat.

At inference a reply follows the prompt that the tokenizer's chat template makes for it, and nothing follows the reply.
So a reply is trained as the template renders that turn when it is the last one. A chat is one document if this holds
for all its replies in the rendering of the whole chat. Many templates drop reasoning, or render earlier turns
differently: then replies become documents of their own, and no prompt is trained with two targets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tpu_kit.data.chat.chat_template import PROBE, PromptEncoder
from tpu_kit.data.rows.columns import MESSAGE_KEYS, answer_of, in_message, reasoning_of, reply
from tpu_kit.data.rows.field_values import RowError
from tpu_kit.data.rows.messages import IMAGE, learns
from tpu_kit.data.rows.schemas import Conversation

_HEADER = 24  # characters at the end of a prompt that show where the last turn begins if the turns before it differ


class Document(NamedTuple):
    """A rendered chat to encode, or plain text, to which the tokenizer adds its special tokens.

    Attributes:
        text: the text.
        spans: the ranges of characters that carry loss, one for each reply, in order.
        reasoning: of each of these replies; empty without one.
        plain: whether it is plain text.
        literal: the ranges of characters with the text of special tokens that are encoded as text, in order.
    """

    text: str
    spans: list[tuple[int, int]]
    reasoning: list[str]
    plain: bool = False
    literal: tuple[tuple[int, int], ...] = ()


def with_calls(
    messages: list[dict[str, Any]], change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns messages in which `change` gives other values to keys of each function that is called."""
    made = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], **change(call["function"])}}
            if "function" in call
            else {**call, **change(call)}
            for call in message.get("tool_calls") or ()
        ]
        made.append({**message, "tool_calls": calls} if calls else message)
    return made


class ChatDocuments:
    """The replies of one chat that carry loss, each with the prompt that the template makes for it at inference."""

    def __init__(self, encoder: PromptEncoder, talk: Conversation) -> None:
        assert not isinstance(talk.messages, str)
        self._encoder, self._config, self._messages, self._tools = encoder, encoder.config, talk.messages, talk.tools
        turns = [i for i in range(talk.first, len(talk.messages)) if learns(talk.messages[i])]
        self._reasoning = {i: in_message(talk.messages[i], encoder.config) for i in turns}
        self._prompts: dict[int, str] = {}
        self._texts: dict[int, str] = {}

    def documents(self) -> list[Document]:
        """Returns the whole chat as one document, or else as many replies together as one document can hold."""
        if (whole := self._whole()) is None:
            return self._parted()
        self._check_said(whole.text, self._messages, next(iter(self._reasoning)))
        return [whole]

    def _prompt(self, i: int) -> str:
        """The prompt of reply `i`.

        Raises:
            RowError: it closes the reasoning, and the reply has some.
        """
        if i not in self._prompts:
            self._prompts[i] = self._encoder.render(self._messages[:i], self._tools, prompt=True)
        if self._is_closed(self._prompts[i], i):
            close = self._config.think_close
            raise RowError(
                f"the prompt of the chat template ends in {close!r}, so the reasoning of message {i} cannot follow "
                "it: set tokenizer.chat_template to one whose prompt leaves the reasoning open"
            )
        return self._prompts[i]

    def _text(self, i: int) -> str:
        """The rendering of the messages up to message `i`."""
        if i not in self._texts:
            self._texts[i] = self._encoder.render(self._messages[: i + 1], self._tools)
        return self._texts[i]

    def _whole(self) -> Document | None:
        """Returns the rendering of the whole chat as a document; None if a reply in it differs from it as last turn.

        The chat up to a reply is rendered for the replies 0, 1, 2, 4, 8, ... and for the last one. The others are
        compared in a chat of a few turns, with the reply before: so the time is linear in the length of the chat.
        """
        turns, stop = list(self._reasoning), self._encoder.stop
        if not stop and turns != [len(self._messages) - 1]:  # the encoder ends each reply, and its document
            return None
        text, spans = self._text(len(self._messages) - 1), list[tuple[int, int]]()
        for number, i in enumerate(turns):
            span = None
            if number & (number - 1) and i != turns[-1]:
                span = self._span_in_few_turns(text, turns[number - 1], i, spans[-1])
            if span is None:
                document = self._as_last(i, self._messages[i])
                if document is None or not text.startswith(document.text[: document.spans[0][1]]):
                    return None
                (span,) = document.spans
            spans.append(span)
        return Document(text, spans, [self._reasoning[i] for i in turns])

    def _span_in_few_turns(self, text: str, before: int, i: int, last: tuple[int, int]) -> tuple[int, int] | None:
        """Returns the range of reply `i` in the rendering of the whole chat, found without the turns long before it.

        Args:
            text: the whole chat.
            before: the reply that carries loss before reply `i`.
            i: the reply.
            last: the range of the reply `before`.

        Returns:
            None if the template refuses the chat of a few turns, or writes something else for them.
        """
        messages, encoder = self._messages, self._encoder
        first = next(n for n, message in enumerate(messages) if message["role"] not in ("system", "developer"))
        asked = next((n for n in range(before - 1, first - 1, -1) if messages[n]["role"] == "user"), None)
        head = messages[:first] + ([] if asked is None else [messages[asked]])
        try:
            answered = encoder.render([*head, messages[before]], self._tools)
            prompt = encoder.render([*head, *messages[before:i]], self._tools, prompt=True)
            replied = encoder.render([*head, *messages[before : i + 1]], self._tools)
        except RowError:
            return None
        end = answered.rfind(encoder.stop, 0, len(answered) - len(encoder.rest)) + len(encoder.stop)
        document = self._document(replied, prompt, i, messages[i])
        if document is None or self._is_closed(prompt, i):
            return None
        if not prompt.startswith(answered[:end]) or not answered.endswith(text[slice(*last)], 0, end):
            return None
        between, said = prompt[end:], replied[slice(*document.spans[0])]
        start = last[1] + len(between)
        return (start, start + len(said)) if text.startswith(between + said, last[1]) else None

    def _parted(self) -> list[Document]:
        """Returns a document for each reply as the last turn, or for several if one document holds them all so."""
        made, ends = list[Document](), list[int]()
        for i in self._reasoning:
            document = self._alone(i)
            if made and self._encoder.stop and document.text.startswith(made[-1].text[: made[-1].spans[-1][1]]):
                before, ends[-1] = made.pop(), i
                document = document._replace(
                    spans=before.spans + document.spans, reasoning=before.reasoning + document.reasoning
                )
            else:
                ends.append(i)
            made.append(document)
            if i == next(iter(self._reasoning)):  # before a later reply is refused for another reason
                self._check_said(document.text, self._messages[: i + 1], i)
        last = len(self._messages) - 1
        if self._encoder.stop and self._text(last).startswith(made[-1].text[: made[-1].spans[-1][1]]):
            made[-1], ends[-1] = made[-1]._replace(text=self._text(last)), last
        turns = iter(self._reasoning)
        for document, end in zip(made, ends, strict=True):
            first, *_ = [next(turns) for _ in document.spans]
            self._check_said(document.text, self._messages[: end + 1], first)
        return made

    def _as_last(self, i: int, message: dict[str, Any]) -> Document | None:
        """Returns the chat up to reply `i`, rendered as `message`, as a document; None if it could not be trained."""
        prompt = self._prompt(i)
        text = self._text(i)
        if message is not self._messages[i]:
            text = self._encoder.render([*self._messages[:i], message], self._tools)
        return self._document(text, prompt, i, message)

    def _document(self, text: str, prompt: str, i: int, message: Mapping[str, Any]) -> Document | None:
        stop, start = self._encoder.stop, len(prompt)
        at = text.rfind(stop, start, len(text) - len(self._encoder.rest)) if stop else -1
        end = at + len(stop) if at >= 0 else len(text)
        if not text.startswith(prompt) or not self._is_kept(text[start:end], prompt, i, message):
            return None
        return Document(text, [(start, end)], [self._reasoning[i]])

    def _is_kept(self, text: str, prompt: str, i: int, message: Mapping[str, Any]) -> bool:
        """Returns whether the text of a reply has its reasoning, or an end of the reasoning that the prompt opens."""
        reasoning, close = self._reasoning[i], self._config.think_close
        if not reasoning:
            return not self._is_opened(prompt) or text.lstrip().startswith(close)
        at = text.find(reasoning)
        said = answer_of(str(message.get("content") or ""), self._config).strip()
        return at >= 0 and close not in text[:at] and said in text[at + len(reasoning) :]

    def _is_closed(self, prompt: str, i: int) -> bool:
        """Returns whether a prompt closes the reasoning that reply `i` has."""
        return bool(self._reasoning[i]) and prompt.rstrip().endswith(self._config.think_close)

    def _is_opened(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self._config.think_open)

    def _alone(self, i: int) -> Document:
        """Returns the chat up to reply `i` as a document."""
        message, reasoning, config = self._messages[i], self._reasoning[i], self._config
        content = str(message.get("content") or "")
        answer = answer_of(content, config).strip()
        block = reply(reasoning, "", config)
        if reasoning_of(content, config) == reasoning != "":
            block = content.rpartition(answer)[0] if answer else content
        bare = {name: value for name, value in message.items() if name not in MESSAGE_KEYS} | {"content": answer}
        forms = [message]
        if reasoning:
            forms += [bare | {"content": block + answer}, bare | {"reasoning_content": reasoning}]
        for form in forms:
            if document := self._as_last(i, form):
                return document
        # Append the reply to the prompt, as the template renders it without reasoning.
        prompt, opening, closing = self._prompt(i), re.escape(config.think_open), re.escape(config.think_close)
        turn = re.sub(rf"{opening}\s*({closing}\s*)?\Z", "", prompt)
        text = self._encoder.render([*self._messages[:i], bare], self._tools)
        start = len(turn) if text.startswith(turn) else text.rfind(turn[-_HEADER:]) + len(turn[-_HEADER:])
        said = re.sub(rf"\s*({opening}\s*)?({closing}\s*)?", "", text[start:], count=1)
        if not text[:start].endswith(turn[-_HEADER:]) or answer not in said:
            if "tool_calls" in message:
                raise RowError(
                    f"the chat template renders message {i}, which calls tools, after another prompt than at "
                    "inference: set tokenizer.chat_template to one that begins the turn as the prompt does"
                )
            said = answer + self._encoder.end
        before, stop, _ = said.rpartition(self._encoder.stop or "\0")
        if self._is_opened(prompt):
            block = block.removeprefix(config.think_open).removeprefix("\n")
        elif not reasoning:
            block = ""
        text = prompt + block + (before + stop or said)
        return Document(text, [(len(prompt), len(text))], [reasoning])

    def _check_said(self, text: str, messages: list[dict[str, Any]], first: int) -> None:
        """Raises RowError if a rendering lacks the content (apart from reasoning) or the tool calls of a message."""
        for i, message in enumerate(messages):
            said = message["content"] if isinstance(message.get("content"), str) else ""
            if message["role"] == "assistant":
                said = answer_of(said, self._config) if i >= first else ""
            for part in map(str.strip, said.split(IMAGE)):
                if part not in text and json.dumps(part)[1:-1] not in text:  # some write the results of tools as JSON
                    raise RowError(f"the chat template leaves out what message {i} says: {part[:60]!r}")
        calls = [len(message.get("tool_calls") or ()) for message in messages]
        if any(calls):
            named = with_calls(messages, lambda call: {"name": PROBE})
            if self._encoder.render(named, self._tools).count(PROBE) < sum(calls):
                raise RowError(f"the chat template leaves out the tool calls of message {calls.index(max(calls))}")
        without = self._encoder.render(messages, None) if self._tools else ""
        for name in [str(tool.get("function", tool).get("name")) for tool in self._tools or ()]:
            if text.count(name) <= without.count(name):
                raise RowError(
                    f"the chat template leaves out the definition of the tool {name!r}: set tokenizer.chat_template to "
                    "one that has it, or data.columns={tools: ''} to train without definitions"
                )
