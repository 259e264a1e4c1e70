"""Renders a chat as documents in which every reply with loss follows its prompt at inference.

At inference, a reply follows the prompt that the chat template makes for it, and nothing follows the reply. So a reply
is trained as the template renders it as the last turn. If the rendering of the whole chat contains all replies in this
form, the chat is a single document. Many templates drop reasoning or render earlier turns differently: then replies
become separate documents.
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
        spans: character ranges of the replies with loss, in order.
        reasoning: reasoning of these replies; empty for a reply without reasoning.
        plain: whether it is plain text.
        literal: character ranges with the text of special tokens to encode as text, in order.
    """

    text: str
    spans: list[tuple[int, int]]
    reasoning: list[str]
    plain: bool = False
    literal: tuple[tuple[int, int], ...] = ()


def with_calls(
    messages: list[dict[str, Any]], change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns messages in which the function of every tool call is updated by the result of `change`.

    `change` takes the function, with its name and arguments, and returns the entries to add or replace. A call without
    the key "function" is itself the function. No message is changed in place; messages without calls are returned as
    they are.
    """
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
    """Renders the replies of a chat that carry loss, with their prompts at inference."""

    def __init__(self, encoder: PromptEncoder, talk: Conversation) -> None:
        assert not isinstance(talk.messages, str)
        self._encoder, self._config, self._messages, self._tools = encoder, encoder.config, talk.messages, talk.tools
        turns = [i for i in range(talk.first, len(talk.messages)) if learns(talk.messages[i])]
        self._reasoning = {i: in_message(talk.messages[i], encoder.config) for i in turns}
        self._prompts: dict[int, str] = {}
        self._texts: dict[int, str] = {}

    def documents(self) -> list[Document]:
        """Returns the whole chat as a single document if possible, else as few documents as possible.

        Raises RowError if the template refuses the chat or leaves a part of it out, or its prompt closes the reasoning.
        """
        if (whole := self._whole()) is None:
            return self._parted()
        self._check_said(whole.text, self._messages, next(iter(self._reasoning)))
        return [whole]

    def _prompt(self, i: int) -> str:
        """Returns the prompt of the reply at message `i`; raises RowError if it closes the reasoning that `i` has."""
        if i not in self._prompts:
            self._prompts[i] = self._encoder.render(self._messages[:i], self._tools, prompt=True)
        if self._is_closed(self._prompts[i], i):
            close = self._config.think_close
            raise RowError(
                f"the prompt of the chat template ends in {close!r}, so the reasoning of message {i} cannot follow "
                "it: set tokenizer.chat_template to a template whose prompt leaves the reasoning open"
            )
        return self._prompts[i]

    def _text(self, i: int) -> str:
        """Returns the rendering of the messages up to and with message `i`."""
        if i not in self._texts:
            self._texts[i] = self._encoder.render(self._messages[: i + 1], self._tools)
        return self._texts[i]

    def _whole(self) -> Document | None:
        """Renders the whole chat as a document; None if a reply in it differs from its rendering as the last turn.

        None also for a template without a stop token, unless the last message is the only reply with loss.

        Renders the chat up to a reply only for replies 0, 1, 2, 4, 8, ... and the last reply. Other replies are
        compared in a chat of a few turns with the previous reply, so that the time is linear in the chat's length.
        """
        turns, stop = list(self._reasoning), self._encoder.stop
        if not stop and turns != [len(self._messages) - 1]:  # without a stop token, a reply must end its document
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
        """Finds the characters of reply `i` in the whole chat by rendering only the system turn and the last turns.

        Args:
            text: rendering of the whole chat.
            before: message index of the previous reply with loss.
            i: message index of the reply.
            last: range of the reply `before`.

        Returns:
            Start and end; None if the template refuses the short chat or renders it differently.
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
        """Returns a document per reply as the last turn; joins documents if the later begins with the earlier."""
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
            if i == next(iter(self._reasoning)):  # checked first, because a later reply may raise another error
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
        """Renders the chat up to reply `i` with `message` as this reply; None if prompt or reply are not kept whole."""
        prompt = self._prompt(i)
        text = self._text(i)
        if message is not self._messages[i]:
            text = self._encoder.render([*self._messages[:i], message], self._tools)
        return self._document(text, prompt, i, message)

    def _document(self, text: str, prompt: str, i: int, message: Mapping[str, Any]) -> Document | None:
        """Makes a document of the rendering `text`, whose span is the reply after the prompt, up to its stop token.

        None if the text does not begin with the prompt, or the reply lacks its reasoning or answer (`_is_kept`).
        """
        stop, start = self._encoder.stop, len(prompt)
        at = text.rfind(stop, start, len(text) - len(self._encoder.rest)) if stop else -1
        end = at + len(stop) if at >= 0 else len(text)
        if not text.startswith(prompt) or not self._is_kept(text[start:end], prompt, i, message):
            return None
        return Document(text, [(start, end)], [self._reasoning[i]])

    def _is_kept(self, text: str, prompt: str, i: int, message: Mapping[str, Any]) -> bool:
        """Whether the rendered reply `text` has the reasoning of reply `i`, then the answer in `message`.

        For a reply without reasoning: whether it begins with the closing tag, or the prompt does not end in the opening
        tag.
        """
        reasoning, close = self._reasoning[i], self._config.think_close
        if not reasoning:
            return not self._is_opened(prompt) or text.lstrip().startswith(close)
        at = text.find(reasoning)
        said = answer_of(str(message.get("content") or ""), self._config).strip()
        return at >= 0 and close not in text[:at] and said in text[at + len(reasoning) :]

    def _is_closed(self, prompt: str, i: int) -> bool:
        """Whether a prompt closes the reasoning although reply `i` has reasoning."""
        return bool(self._reasoning[i]) and prompt.rstrip().endswith(self._config.think_close)

    def _is_opened(self, prompt: str) -> bool:
        """Whether a prompt ends in the opening tag of the reasoning."""
        return prompt.rstrip().endswith(self._config.think_open)

    def _alone(self, i: int) -> Document:
        """Returns the chat up to reply `i` as a document: in the first form that keeps the reasoning, or else appended.

        Raises RowError if the reply calls tools, and in all forms the template renders it after another prompt.
        """
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
                    "inference: set tokenizer.chat_template to a template that begins the turn like the prompt"
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
        """Raises RowError if `text`, a rendering of `messages`, lacks a tool, a call or a content.

        Reasoning may be absent, and replies before message `first` too.
        """
        for i, message in enumerate(messages):
            said = message["content"] if isinstance(message.get("content"), str) else ""
            if message["role"] == "assistant":
                said = answer_of(said, self._config) if i >= first else ""
            for part in map(str.strip, said.split(IMAGE)):
                if part not in text and json.dumps(part)[1:-1] not in text:  # some templates write tool results as JSON
                    raise RowError(f"the chat template leaves out the content of message {i}: {part[:60]!r}")
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
                    "a template that has it, or data.columns={tools: ''} to train without definitions"
                )
