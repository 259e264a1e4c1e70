"""Encodes prompts as token ids, finds the end of replies, and decodes replies to text, reasoning and answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

from tpu_kit.config.schema import DataConfig
from tpu_kit.data.chat.chat_template import PromptEncoder, default_stop, plain_prompt
from tpu_kit.generation.sampling import Sampling

Prompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any] | Sequence[int]
"""A text, the messages of a chat, {"messages": ..., "tools": ..., "images": ...}, or token ids."""


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt is a chat, not a text or token ids."""
    return isinstance(prompt, Mapping) or (not isinstance(prompt, str) and isinstance(next(iter(prompt), 0), Mapping))


def has_pictures(prompt: Prompt) -> bool:
    """Whether a prompt is a chat that has pictures or marks places for them."""
    if not is_chat(prompt):
        return False
    whole: Any = prompt if isinstance(prompt, Mapping) else {"messages": prompt}
    return bool(whole.get("images") or image_parts(whole["messages"]))


def image_parts(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the content parts of messages whose type contains "image": pictures, or marks of their places."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if isinstance(part, Mapping) and "image" in str(part.get("type"))]


@dataclass(frozen=True)
class Completion:
    """A finished reply.

    Attributes:
        text: the reply with its reasoning, without special tokens other than tags, up to the stop string.
        reasoning: the text between the reasoning tags; None if there is none. See `split_reasoning`.
        answer: the text after the reasoning; empty if the reply ended within the reasoning.
        tokens: token ids, including the tokens that ended the reply.
        finish_reason: "stop" (an end-of-turn token or a stop string) or "length".
        logprob: sum of `logprobs`.
        logprobs: log-probability of each token, in nats; see `Sampling.tempered_logprobs`.
    """

    text: str
    reasoning: str | None
    answer: str
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    logprob: float
    logprobs: tuple[float, ...] = ()


@dataclass
class Row:
    """An unfinished reply.

    Attributes:
        opened: whether the prompt ended with the opening reasoning tag.
        tokens: token ids generated so far.
        logprobs: their log-probabilities, in nats.
        ended: whether the last token ended the reply.
    """

    opened: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False


class PromptCodec:
    """Encodes prompts and decodes replies.

    Attributes:
        tokenizer: the model's tokenizer.
        data: the reasoning tags, the system prompt, and the date for the chat template.
        stops: ids that end a reply, from `stop_ids` with the model `causal`.
    """

    def __init__(self, tokenizer: Any, causal: Any, data: DataConfig) -> None:
        self.tokenizer, self.data = tokenizer, data
        self._tags = (data.think_open, data.think_close)
        self.stops = stop_ids(causal, tokenizer, data)
        added = tokenizer.added_tokens_decoder
        # A tag may be or contain a special token, for example `<|channel>thought` of Gemma 4.
        tags = " ".join(self._tags)
        special = {id_ for id_, token in added.items() if token.special and token.content not in tags}
        self._dropped = special | self.stops

    def extend(self, row: Row, tokens: Iterable[int], logprobs: Iterable[float], sampling: Sampling) -> None:
        """Adds tokens to a reply up to its end: an end token, the completion of a stop string, or `max_new_tokens`.

        It sets `row.ended` for an end token or a stop string, and drops the tokens after the end. A row that has ended
        does not change. `tokens` and `logprobs` have the same length.
        """
        if row.ended:
            return
        before = len(row.tokens)
        for token, logprob in zip(tokens, logprobs, strict=True):
            if row.ended or len(row.tokens) == sampling.max_new_tokens:
                break
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.ended = token in self.stops
        if not sampling.stop or self._stop_in(self._decode(row.tokens), sampling, row.opened) is None:
            return
        lengths = range(before + 1, len(row.tokens) + 1)
        end = next(n for n in lengths if self._stop_in(self._decode(row.tokens[:n]), sampling, row.opened) is not None)
        del row.tokens[end:], row.logprobs[end:]
        row.ended = True

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt; token ids are returned as they are.

        A text is encoded without a template, with the tokenizer's BOS. The tokenizer's chat template renders chats,
        with the system prompt of `data` if they have none. If the last message is the assistant's, the model continues
        it. If the tokenizer has no template, a chat of one user turn is its text.

        Raises:
            ValueError: the prompt is empty or has pictures, the template refuses the chat, or a longer chat has
                no template.
        """
        if isinstance(prompt, str):
            special = self._encoder.special if self.data.special_text == "split" else None
            ids = plain_prompt(self.tokenizer, prompt, special)  # the Generator checks the length
        elif has_pictures(prompt):
            raise ValueError("it has pictures: call `generate`, or give the Generator token ids that carry them")
        elif isinstance(prompt, Mapping):
            ids = self._chat(prompt["messages"], prompt.get("tools"))
        elif prompt and isinstance(prompt[0], Mapping):
            ids = self._chat([message for message in prompt if isinstance(message, Mapping)])
        else:
            ids = cast("list[int]", prompt)  # may carry pictures
        if not ids:
            raise ValueError("the prompt is empty, so there is nothing to answer")
        return ids

    def plain(self, text: str) -> list[int]:
        """Returns the token ids of a text that continues another, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _chat(self, chat: Sequence[Mapping[str, Any]], tools: list[Any] | None = None) -> list[int]:
        """Returns the token ids of a chat, which the template renders with `tools`; ValueError as in `encode`."""
        messages = [dict(message) for message in chat]
        if not self.tokenizer.chat_template:  # for example, after training on plain text
            return plain_prompt(self.tokenizer, text_of(messages, tools))
        if self.data.system_prompt and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.data.system_prompt}, *messages]
        begun = messages[-1].get("role") == "assistant"  # the model continues it, as in TRL
        return self._encoder.chat_ids(messages, tools, prompt=True, begun=begun)

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self.tokenizer, self.data)

    def opens_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether the token ids of a prompt end with the opening reasoning tag; white space after it is ignored."""
        tail = self.tokenizer.decode(list(ids[-16:]), clean_up_tokenization_spaces=False)
        return bool(tail.rstrip().endswith(self.data.think_open))

    def text(self, row: Row, sampling: Sampling) -> str:
        """Decodes a reply without special tokens, up to the first stop string."""
        text = self._decode(row.tokens)
        return text[: self._stop_in(text, sampling, row.opened)]

    def _decode(self, tokens: Iterable[int]) -> str:
        """Decodes tokens without special tokens and end tokens."""
        ids = [token for token in tokens if token not in self._dropped]
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def _stop_in(self, text: str, sampling: Sampling, opened: bool) -> int | None:
        """Returns the index of the first stop string, None without one.

        Without `Sampling.stop_in_reasoning`, only stop strings after the reasoning count, so the result is None while
        reasoning may be open. `opened`: whether the prompt ended with the opening reasoning tag.
        """
        begin = 0
        if not sampling.stop_in_reasoning:
            reasoning, closed, answer = text.partition(self.data.think_close)
            if closed:
                begin = len(text) - len(answer.lstrip())
            elif opened or (said := reasoning.lstrip()).startswith(tag := self.data.think_open) or tag.startswith(said):
                return None
        return min((start for stop in sampling.stop if (start := text.find(stop, begin)) >= 0), default=None)

    def settled(self, text: str, sampling: Sampling) -> str:
        """Returns `text`, an unfinished reply, without a partial character and a partial stop string at its end."""
        text = text.rstrip("\ufffd")  # an incomplete character
        pending = max(
            (n for stop in sampling.stop for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
            default=0,
        )
        return text[: len(text) - pending]

    def completion(self, row: Row, sampling: Sampling) -> Completion:
        """Makes the completion of a finished reply; its `finish_reason` is "stop" if `row.ended`, else "length"."""
        text = self.text(row, sampling)
        reasoning, answer = split_reasoning(text, self.data, row.opened)
        return Completion(
            text, reasoning, answer, tuple(row.tokens), "stop" if row.ended else "length", sum(row.logprobs),
            tuple(row.logprobs),
        )  # fmt: skip


def text_of(messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
    """Returns the text of a chat of one user turn without tools; raises ValueError for others: they need a template."""
    content = messages[0].get("content") if len(messages) == 1 else None
    if tools or not isinstance(content, str) or messages[0].get("role") != "user":
        raise ValueError(
            "a chat with more than one user turn, or with tools, needs a chat template, but none is used. The model "
            "was trained on plain text, or chat=false is set: give one text, or set chat=true"
        )
    return content


def plain_template(tokenizer: Any) -> str:
    """Returns a chat template, Jinja text, that renders a question and its reply as plain text.

    It writes BOS if the tokenizer begins texts with it, the contents of the messages, and EOS after a reply. To ask
    (`add_generation_prompt`), it raises an error for tools, and for other messages than one user turn.
    """
    begin = tokenizer.bos_token if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else ""
    refused = "the model was trained on plain text, so the prompt must be one user turn; or set chat=true"
    return (
        "{% if add_generation_prompt and (tools or messages | length != 1 or messages[0].role != 'user') %}"
        f"{{{{ raise_exception({refused!r}) }}}}{{% endif %}}{{{{ {begin or ''!r} }}}}{{% for message in messages %}}"
        f"{{{{ message.content }}}}{{% if message.role == 'assistant' %}}{{{{ {tokenizer.eos_token!r} }}}}{{% endif %}}"
        "{% endfor %}"
    )


def split_reasoning(text: str, data: DataConfig, opened: bool = False) -> tuple[str | None, str]:
    """Splits a reply into (reasoning, answer), without white space around them.

    The last closing tag counts. The reasoning is None if the reply has no tag and the prompt did not open one; the
    answer is "" if the reasoning is not closed.

    Args:
        text: the reply.
        data: the reasoning tags.
        opened: whether the prompt ended with the opening tag.
    """
    head, close, answer = text.rpartition(data.think_close)
    if not close and not opened and data.think_open not in text:
        return None, text.strip()
    reasoning = head if close else text
    before, _, after = reasoning.partition(data.think_open)
    reasoning = after if data.think_open in reasoning and (not opened or not before.strip()) else reasoning
    return reasoning.strip(), answer.strip() if close else ""


def opened(prompt: str, data: DataConfig, asked: Any = None) -> str:
    """Returns the beginning of the answer that the prompt already contains, or "".

    It is the assistant's last message if the prompt ends with one, else the opening reasoning tag and a line break, if
    the prompt ends with that tag.

    Args:
        prompt: the rendered prompt.
        data: the reasoning tags.
        asked: the prompt as messages; a text or None has no assistant's message.
    """
    words = str(asked[-1].get("content") or "") if isinstance(asked, list) and asked[-1]["role"] == "assistant" else ""
    if words and prompt.endswith(words.rstrip()):
        return words
    return f"{data.think_open}\n" if prompt.rstrip().endswith(data.think_open) else ""


def stop_ids(causal: Any, tokenizer: Any, data: DataConfig) -> set[int]:
    """Returns the ids of tokens that end a reply, for the transformers model `causal`.

    They are the eos_token_id of its generation config and of the tokenizer, and the end-of-turn token of the chat
    template, rendered as `data` says. Many base models come with an instruct model's template whose end-of-turn token
    is neither of the first two. A tokenizer without a template gets the end-of-turn token of the training template.
    """
    named = causal.generation_config.eos_token_id
    ids = {*named} if isinstance(named, list) else {named}
    ids.add(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        stop: str | None = PromptEncoder(tokenizer, data).stop
    else:
        stop = default_stop(tokenizer)
    if stop:
        ids.add(tokenizer.convert_tokens_to_ids(stop))
    return ids - {None}


def texts_of(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Returns the text of each token, decoded after the four before it, as a tokenizer may strip a leading space.

    A character of several tokens belongs to its last token; the others have "".
    """
    texts = []
    for end in range(1, len(tokens) + 1):
        whole, before = (tokenizer.decode(tokens[max(0, end - 5) : stop]).rstrip("\ufffd") for stop in (end, end - 1))
        texts.append(whole[len(before) :])
    return texts
