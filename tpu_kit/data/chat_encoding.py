"""Encodes a conversation as token ids with a mask of the tokens that carry loss.

The mask comes from the tokenizer's own chat template: from its `{% generation %}` markers, or from the rendering of the
conversation up to each assistant turn, which must be the beginning of the whole rendering. Token ids are never compared
with the padding id: in many tokenizers it is also the end-of-turn token.

Many templates drop reasoning: all of it, that of earlier turns, or all keys of a message except its content. Reasoning
that carries loss is kept in one of three ways: the message gets another form (tags in its content, or
`reasoning_content`); each reply whose reasoning the next turn removes becomes a document; or the reply is appended to
the template's prompt. In each way it follows the same prompt as at inference.
"""

import json
import re
import unicodedata
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from os.path import commonprefix
from typing import Any, NamedTuple

from tpu_kit.config.loader import DataConfig
from tpu_kit.data.columns import MESSAGE_KEYS, Layout, answer_of, in_message, reasoning_of, reply
from tpu_kit.data.schemas import Conversation, RowError, conversation

DEFAULT_TEMPLATE = (
    "{{ BOS }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + STOP }}{% endgeneration %}"
    "{% else %}{{ message['content'] + STOP }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, for tokenizers without a template. BOS becomes the token with which the tokenizer begins a text, or nothing;
STOP becomes `<|im_end|>` if the vocabulary has it, else the eos token."""

_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "tpukitprobe"


class Example(NamedTuple):
    """One document: token ids and a mask of the same length, true where a token is predicted with loss."""

    input_ids: list[int]
    loss_mask: list[bool]


class Kept(NamedTuple):
    """Counts of the reasoning in the documents of a row.

    Attributes:
        replies: assistant turns that carry loss.
        held: replies with reasoning in the row.
        found: replies whose whole reasoning is in the tokens that carry loss.
    """

    replies: int
    held: int
    found: int


def default_stop(tokenizer: Any) -> str | None:
    """Returns the token that ends a turn in `DEFAULT_TEMPLATE`; None if the tokenizer has no such token."""
    stop: str | None = "<|im_end|>" if "<|im_end|>" in tokenizer.get_vocab() else tokenizer.eos_token
    return stop


def ensure_chat_template(tokenizer: Any) -> bool:
    """Sets `DEFAULT_TEMPLATE` in a tokenizer without a chat template, with a warning; returns whether it did.

    Raises:
        ValueError: it has no eos token that could end a turn either.
    """
    if tokenizer.chat_template:
        return False
    stop = default_stop(tokenizer)
    if not stop:
        raise ValueError("the tokenizer has neither a chat template nor an eos token; set tokenizer.chat_template")
    bos = tokenizer.bos_token if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else ""
    tokenizer.chat_template = DEFAULT_TEMPLATE.replace("STOP", repr(stop)).replace("BOS", repr(bos))
    warnings.warn(
        f"the tokenizer has no chat template; using ChatML with {stop!r} at the end of a turn. "
        "If the model was trained with another one, set tokenizer.chat_template to it",
        stacklevel=2,
    )
    return True


def decoded_example(tokenizer: Any, example: Example) -> list[tuple[str, bool]]:
    """Returns the text of an example in parts `(text, carries loss)` for display."""
    spans: list[tuple[list[int], bool]] = []
    for token, loss in zip(example.input_ids, example.loss_mask, strict=True):
        if not spans or spans[-1][1] != bool(loss):
            spans.append(([], bool(loss)))
        spans[-1][0].append(int(token))
    return [(tokenizer.decode(ids, clean_up_tokenization_spaces=False), loss) for ids, loss in spans]


def _squeezed(text: str) -> str:
    """Returns a text in NFC without white space; some tokenizers change both."""
    return "".join(unicodedata.normalize("NFC", text).split())


def _renamed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a chat with `_PROBE` as the name of all tool calls."""
    made = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "name": _PROBE}}
            if "function" in call
            else {**call, "name": _PROBE}
            for call in message.get("tool_calls") or ()
        ]
        made.append({**message, "tool_calls": calls} if calls else message)
    return made


@dataclass(frozen=True)
class Encoder:
    """Encodes rows as examples; deterministic, and picklable for several processes.

    Attributes:
        tokenizer: a fast Hugging Face tokenizer, with a chat template if the rows are chats (`ensure_chat_template`).
        layout: of `detect_layout`.
        config: the data section of the configuration.

    Raises:
        ValueError: the tokenizer is not fast, or has no eos token.
    """

    tokenizer: Any
    layout: Layout
    config: DataConfig

    def __post_init__(self) -> None:
        if not self.tokenizer.is_fast:
            raise ValueError("the tokenizer is not a fast one, so the characters of a token are unknown; use one")
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos token, so the model could not learn to stop; set one")

    def conversation(self, row: Mapping[str, Any]) -> Conversation:
        """Reads one row with this encoder's layout and configuration."""
        return conversation(row, self.layout, self.config)

    def prompt(self, talk: Conversation) -> str:
        """Returns the prompt of the last assistant turn: all text before it."""
        if isinstance(talk.messages, str):
            return talk.messages[: talk.first]
        last = max(i for i, message in enumerate(talk.messages) if message["role"] == "assistant")
        return self._render(talk.messages[:last], talk.tools, prompt=True)

    def parts(self, talk: Conversation) -> list[Conversation]:
        """Splits a conversation where the chat template would drop reasoning; returns the conversations to encode.

        A template that removes the reasoning of earlier turns leads to several conversations: each ends in a reply,
        after the prompt of inference. Each trained reply carries loss in one of them.

        Raises:
            RowError: it cannot be rendered.
        """
        if not any(self._trained(talk).values()):
            return [talk]
        turns, made = list(self._trained(talk)), []
        while turns:
            for count in range(len(turns), 0, -1):
                end = len(talk.messages) if count == len(turns) else turns[count - 1] + 1
                part = Conversation(talk.messages[:end], turns[0], talk.tools)
                if self._keeps(part):
                    break
            else:  # one reply whose reasoning the template drops; later turns carry no loss
                part = part._replace(messages=talk.messages[: turns[0] + 1])
                part = next(filter(self._keeps, (part, *self._told(part))), part)
            made.append(part)
            turns = turns[count:]
        return made

    def encode(self, talk: Conversation) -> Example:
        """Returns the token ids of a conversation and its loss mask.

        The first token never carries loss: no token before it predicts it.

        Args:
            talk: one of `parts`.

        Raises:
            RowError: it cannot be rendered, the borders of its turns are uncertain, the chat template drops reasoning
                that cannot be added without it, or no token carries loss.
        """
        messages, eos = talk.messages, self.tokenizer.eos_token_id
        if isinstance(messages, str):
            ids, mask = self._tokenize(messages, [(talk.first, len(messages))], special=True)
            if ids[-1] != eos:
                ids.append(eos)
                mask.append(True)
            mask[-1] = True
        else:
            if _MARKERS.search(str(self.tokenizer.chat_template)):
                ids, mask = self._marked(talk)
            else:
                ids, mask = self._tokenize(*self._spans(talk), special=False)
            if messages[-1]["role"] == "assistant" and not self.stop:
                ids.append(eos)
                mask.append(True)
        if self.config.loss_on == "all":
            mask = [True] * len(ids)
        mask[0] = False
        if not any(mask):
            raise RowError("no token carries loss")
        return Example(ids, mask)

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False) -> str:
        return self._template(messages, tools, tokenize=False, add_generation_prompt=prompt)

    def _template(self, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, **options)
        except Exception as error:  # a template may raise anything
            raise RowError(f"the chat template refuses the conversation: {type(error).__name__}: {error}") from error

    @cached_property
    def _tail(self) -> str:
        """The text that the template adds after the content of the last assistant turn."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        return self._render(turns, None).rpartition(_PROBE)[2]

    @cached_property
    def stop(self) -> str:
        """The special token that ends an assistant turn in the template; empty without one."""
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        special |= set(self.tokenizer.all_special_ids)
        ids = self.tokenizer(self._tail, add_special_tokens=False)["input_ids"]
        return next((self.tokenizer.convert_ids_to_tokens(i) for i in ids if i in special), "")

    def _check_said(self, text: str, talk: Conversation) -> None:
        """Raises RowError if the rendering lacks the content (apart from reasoning) or the tool calls of a message."""
        assert not isinstance(talk.messages, str)
        for i, message in enumerate(talk.messages):
            said = message["content"] if isinstance(message.get("content"), str) else ""
            if message["role"] == "assistant":
                said = answer_of(said, self.config) if i >= talk.first else ""
            said = said.strip()
            if said not in text and json.dumps(said)[1:-1] not in text:  # some write the results of tools as JSON
                raise RowError(f"the chat template leaves out what message {i} says: {said[:60]!r}")
        calls = [len(message.get("tool_calls") or ()) for message in talk.messages]
        if any(calls) and self._render(_renamed(talk.messages), talk.tools).count(_PROBE) < sum(calls):
            raise RowError(f"the chat template leaves out the tool calls of message {calls.index(max(calls))}")

    def kept(self, talk: Conversation, example: Example) -> Kept:
        """Counts the replies of a document whose reasoning is in the decoded tokens that carry loss.

        Args:
            talk: one of `parts`.
            example: its encoding, or the first tokens of it.
        """
        told = list(self._trained(talk).values())
        if isinstance(talk.messages, str):
            told = [reasoning_of(talk.messages[talk.first :], self.config)]
        held = [_squeezed(reasoning) for reasoning in told if reasoning]
        if not held:
            return Kept(len(told), 0, 0)
        ids = [i for i, loss in zip(example.input_ids, example.loss_mask, strict=True) if loss]
        text, place, found = _squeezed(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)), 0, 0
        for reasoning in held:
            at = text.find(reasoning, place)
            if at >= 0:
                place, found = at + len(reasoning), found + 1
        return Kept(len(told), len(held), found)

    def _trained(self, talk: Conversation) -> dict[int, str]:
        """Returns the reasoning (or an empty text) of each message that carries loss; nothing for plain text."""
        if isinstance(talk.messages, str):
            return {}
        chosen = list(enumerate(talk.messages))[talk.first :]
        return {i: in_message(message, self.config) for i, message in chosen if message["role"] == "assistant"}

    def _told(self, talk: Conversation) -> list[Conversation]:
        """Returns a chat with the reasoning of trained turns as tags in the content, and as a separate key."""
        assert not isinstance(talk.messages, str)
        told: list[Conversation] = []
        for key in (False, True):
            messages = [dict(message) for message in talk.messages]
            for i, reasoning in self._trained(talk).items():
                said = answer_of(str(messages[i].get("content") or ""), self.config).strip()
                bare = {name: value for name, value in messages[i].items() if name not in MESSAGE_KEYS}
                if reasoning and key:
                    messages[i] = bare | {"content": said, "reasoning_content": reasoning}
                elif reasoning:
                    messages[i] = bare | {"content": reply(reasoning, said, self.config)}
            told.append(talk._replace(messages=messages))
        return told

    def _keeps(self, talk: Conversation) -> bool:
        assert not isinstance(talk.messages, str)
        return self._lost(self._render(talk.messages, talk.tools), talk) is None

    def _lost(self, text: str, talk: Conversation) -> int | None:
        """Returns the first message whose reasoning is missing in the rendering, or follows an empty reasoning block.

        The search goes in the order of the chat, so that words of another turn do not count.
        """
        assert not isinstance(talk.messages, str)
        empty = re.compile(rf"{re.escape(self.config.think_open)}\s*{re.escape(self.config.think_close)}")
        trained, place = self._trained(talk), 0
        for i, message in enumerate(talk.messages):
            words = message["content"] if isinstance(message.get("content"), str) else ""
            said, reasoning = answer_of(words, self.config).strip(), trained.get(i, "")
            if reasoning:
                at = text.find(reasoning, place)
                if at < 0 or empty.search(text, place, at):
                    return i
                place = at + len(reasoning)
            at = text.find(said, place) if message["role"] != "system" else -1  # some templates move it
            if reasoning and at < 0:
                return i
            place = at + len(said) if at >= 0 else place
        return None

    def _spans(self, talk: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Returns the rendered text and the character ranges of its assistant turns, with their end-of-turn tokens."""
        messages, first, tools = talk
        assert not isinstance(messages, str)
        text, spans = self._render(messages, tools), []
        self._check_said(text, talk)
        lost = self._lost(text, talk)
        for i in (i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"):
            head = self._render(messages[:i], tools, prompt=True)
            opened = head.rstrip().endswith(self.config.think_open)
            bare = head.rstrip().removesuffix(self.config.think_open)
            if opened and lost is None and not text.startswith(head) and text.startswith(bare):
                head = bare  # a finished turn lacks the opening tag of its reasoning
            if lost is not None or not text.startswith(head):
                if lost is not None and "tool_calls" in messages[lost]:
                    raise RowError(
                        f"the chat template leaves out the reasoning of message {lost}, and a reply that calls tools "
                        "needs the template: set tokenizer.chat_template to one that keeps it"
                    )
                if i != first or i + 1 != len(messages) or "tool_calls" in messages[i]:
                    raise RowError(
                        f"the chat template renders the text before message {i} differently when more follows, so the "
                        "tokens of the reply are uncertain. Split the chat into one row per reply (prompt_completion), "
                        "or give the template {% generation %} markers"
                    )
                # Templates of reasoning models drop the reasoning of a finished turn: append the reply to the prompt.
                content = str(messages[i].get("content") or "")
                if (reasoning := self._trained(talk)[i]) != reasoning_of(content, self.config):
                    content = reply(reasoning, answer_of(content, self.config).strip(), self.config)
                if opened:
                    content = content.removeprefix(self.config.think_open).lstrip("\n")
                return head + content + self.stop, [(len(head), len(head + content + self.stop))]
            spans.append((len(head), self._turn_end(text, len(head), talk, i)))
        return text, spans

    def _turn_end(self, text: str, start: int, talk: Conversation, index: int) -> int:
        """Returns the end of assistant turn `index`, which starts at character `start`: after its end-of-turn token."""
        assert not isinstance(talk.messages, str)
        last = index + 1 == len(talk.messages)
        upto = text if last else self._render(talk.messages[: index + 1], talk.tools)
        if text.startswith(upto):
            # The model never generates the text of the template after the end-of-turn token.
            after = len(self._tail.partition(self.stop)[2]) if self.stop and upto.endswith(self._tail) else 0
            return len(upto) - after
        # The first end-of-turn token is this turn's if it comes before the words of the next message.
        following = [*talk.messages[: index + 1], {**talk.messages[index + 1], "content": _PROBE}]
        bound = len(commonprefix([text, self._render(following, talk.tools)]))  # noqa: RUF071 - a prefix of characters, not of paths
        end = text.find(self.stop, start, bound)
        if not self.stop or end < 0 or self.stop in str(talk.messages[index].get("content")):
            raise RowError(f"the end of message {index} is uncertain: give the template {{% generation %}} markers")
        return end + len(self.stop)

    def _marked(self, talk: Conversation) -> tuple[list[int], list[bool]]:
        """Returns ids and mask from the template's own generation markers."""
        messages, first, tools = talk
        assert not isinstance(messages, str)
        text = self._render(messages, tools)
        self._check_said(text, talk)
        if self._lost(text, talk) is not None:
            return self._tokenize(*self._spans(talk), special=False)
        out = self._template(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(out["input_ids"]), [bool(flag) for flag in out["assistant_masks"]]
        if any(message["role"] == "assistant" for message in messages[:first]):
            text = self._render(messages[:first], tools, prompt=True)
            head = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if ids[: len(head)] != head:
                raise RowError("the chat template renders the prompt differently when the completion follows")
            mask = [flag and i >= len(head) for i, flag in enumerate(mask)]
        stop = self.tokenizer.convert_tokens_to_ids(self.stop) if self.stop else None
        for i in range(1, len(ids)):
            if mask[i - 1] and not mask[i] and ids[i] == stop and ids[i - 1] != stop:
                mask[i] = True  # some markers close before the end-of-turn token, which the model must learn
        return ids, mask

    def _tokenize(self, text: str, spans: list[tuple[int, int]], *, special: bool) -> tuple[list[int], list[bool]]:
        """Returns the ids of a text, and the mask of those in one of the character ranges."""
        out = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        ids, offsets = list(out["input_ids"]), [tuple(pair) for pair in out["offset_mapping"]]
        borders = {border for span in spans for border in span}
        if any(a < border < b for a, b in offsets for border in borders):
            # Generation starts from the tokens of the prompt alone, which has no token across its end.
            lead = next((i for i, (_, b) in enumerate(offsets) if b), 0)
            cut_ids, cut_offsets = ids[:lead], offsets[:lead]
            edges = sorted({0, len(text), *borders})
            for a, b in pairwise(edges):
                piece = self.tokenizer(text[a:b], add_special_tokens=False, return_offsets_mapping=True)
                cut_ids += piece["input_ids"]
                cut_offsets += [(a + x, a + y) for x, y in piece["offset_mapping"]]
            if self.tokenizer.decode(cut_ids) == self.tokenizer.decode(ids):
                ids, offsets = cut_ids, cut_offsets
        # Some tokenizers trim white space: a token of white space is then an empty range at its end.
        return ids, [
            any(start < b <= end if a == b else a < end and start < b for start, end in spans) for a, b in offsets
        ]
