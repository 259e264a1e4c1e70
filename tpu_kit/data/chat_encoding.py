"""Encodes a conversation as token ids with a mask of the tokens that carry loss.

Each reply that carries loss follows the prompt that the tokenizer's own chat template makes for inference, has its
reasoning, and ends with the token that ends a turn. A chat is one document if that holds for all its replies in the
rendering of the whole chat. Many templates drop reasoning, or render earlier turns differently: then replies become
documents of their own. Such a reply is rendered in another form (reasoning as tags in its content, or as
`reasoning_content`), or appended to the prompt. A reply without reasoning closes the reasoning that the prompt opens.

Token ids are never compared with the padding id: in many tokenizers it is also the end-of-turn token.
"""

import json
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property
from itertools import dropwhile, pairwise, takewhile
from os.path import commonprefix
from typing import Any, NamedTuple

from tpu_kit.config.loader import DataConfig
from tpu_kit.data.cells import RowError
from tpu_kit.data.columns import MESSAGE_KEYS, Layout, answer_of, in_message, reasoning_of, reply
from tpu_kit.data.messages import learns
from tpu_kit.data.schemas import Conversation, conversation

DEFAULT_TEMPLATE = (
    "{{ BOS }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + STOP + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, for tokenizers without a template. BOS becomes the token with which the tokenizer begins a text, or nothing;
STOP becomes `<|im_end|>` if the vocabulary has it, else the eos token."""

_PROBE = "tpukitprobe"
_HEADER = 24  # characters at the end of a prompt that show where the last turn begins if the turns before it differ


class Example(NamedTuple):
    """One document: token ids and a mask of the same length, true where a token is predicted with loss."""

    input_ids: list[int]
    loss_mask: list[bool]


class Document(NamedTuple):
    """A rendered chat to encode, or plain text, to which the tokenizer adds its special tokens.

    Attributes:
        text: the text.
        spans: the ranges of characters that carry loss, one for each reply.
        reasoning: of each of these replies; empty without one.
        plain: whether it is plain text.
    """

    text: str
    spans: list[tuple[int, int]]
    reasoning: list[str]
    plain: bool = False


class ReasoningCounts(NamedTuple):
    """Counts of the reasoning in the documents of a row.

    Attributes:
        replies: assistant turns that carry loss.
        held: replies with reasoning in the row.
        trained: replies whose whole reasoning is in the tokens that carry loss.
        empty: replies that carry loss on an empty reasoning block.
    """

    replies: int = 0
    held: int = 0
    trained: int = 0
    empty: int = 0


def default_stop(tokenizer: Any) -> str | None:
    """Returns the token that ends a turn in `DEFAULT_TEMPLATE`; None if the tokenizer has no such token."""
    return "<|im_end|>" if "<|im_end|>" in tokenizer.get_vocab() else tokenizer.eos_token


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


def freeze_date(template: str, day: str | None) -> str:
    """Returns a chat template in which `strftime_now` writes the day of `data.date`; None is today.

    It is a macro in the template: transformers passes no functions from the caller to a template.
    """
    if "strftime_now" not in template:
        return template
    directives = {f"%{name}" for name in re.findall("%(-?[A-Za-z])", template)}
    moment = datetime.fromisoformat(day or date.today().isoformat())
    written = "".join(f".replace({each!r}, {moment.strftime(each)!r})" for each in sorted(directives))
    # The environment of transformers removes the line break after a block, so the template begins a line as before.
    return f"{{% macro strftime_now(format) %}}{{{{ format{written} }}}}{{% endmacro %}}\n{template}"


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


def _with_calls(
    messages: list[dict[str, Any]], change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
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


def plain_prompt(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of plain text that the model continues: with one BOS, and without an EOS."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    if ids[-1:] == [tokenizer.eos_token_id]:
        ids.pop()  # some tokenizers end every text, and the model would add nothing
    return ids[_has_two_bos(tokenizer, ids) :]


def _has_two_bos(tokenizer: Any, ids: Sequence[int]) -> bool:
    return ids[:2] == [tokenizer.bos_token_id] * 2


@dataclass(frozen=True)
class Encoder:
    """Encodes rows as examples; deterministic, and picklable for several processes.

    Attributes:
        tokenizer: a fast Hugging Face tokenizer, with a chat template if the rows are chats (`ensure_chat_template`).
        layout: of `detect_layout`.
        config: the data section.

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
        """Reads one row; the arguments of tool calls are decoded, or JSON for a template that takes them so."""
        talk = conversation(row, self.layout, self.config)
        if isinstance(talk.messages, str) or not any(message.get("tool_calls") for message in talk.messages):
            return talk
        arguments = []

        def as_json(call: Mapping[str, Any]) -> dict[str, Any]:
            value = call.get("arguments")
            arguments.append(value)
            return {"arguments": json.dumps(value, ensure_ascii=False)} if isinstance(value, Mapping) else {}

        texts: list[str | None] = []
        as_text = _with_calls(talk.messages, as_json)
        for messages in (talk.messages, as_text):
            try:
                texts.append(self.render(messages, talk.tools))
            except RowError:
                texts.append(None)
        decoded, encoded = texts
        wrong = decoded is None or any(str(value) in decoded for value in arguments if value)  # as Python writes it
        return talk._replace(messages=as_text) if wrong and encoded is not None else talk

    def open_reasoning(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Switches reasoning on in a chat template whose prompt closes it, if rows have some; with a warning."""
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
        prompt = self.render([{"role": "user", "content": "a"}], None, prompt=True)
        return prompt.rstrip().endswith(self.config.think_close)

    def _has_reasoning(self, row: Mapping[str, Any]) -> bool:
        try:
            messages = conversation(row, self.layout, self.config).messages
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):  # told when the row is tokenised
            return False
        return any(isinstance(turn, dict) and learns(turn) and in_message(turn, self.config) for turn in messages)

    def prompt(self, talk: Conversation) -> str:
        """Returns the text before the last assistant turn."""
        asked = talk.asked
        return asked if isinstance(asked, str) else self.render(asked, talk.tools, prompt=True, begun=bool(talk.begun))

    def prompt_ids(self, talk: Conversation) -> list[int]:
        """Returns the token ids of `prompt`; only plain text gets the special tokens of the tokenizer."""
        text = self.prompt(talk)
        if isinstance(talk.messages, str):
            return plain_prompt(self.tokenizer, text) if text else []
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def documents(self, talk: Conversation) -> list[Document]:
        """Renders a conversation as documents; each reply that carries loss does so in one of them.

        Raises:
            RowError: it cannot be rendered, or the chat template leaves out something that it says.
        """
        if isinstance(talk.messages, str):
            reasoning = reasoning_of(talk.messages[talk.first :], self.config)
            return [Document(talk.messages, [(talk.first, len(talk.messages))], [reasoning], plain=True)]
        return [self._continuation(talk)] if talk.begun else _Chat(self, talk).documents()

    def _continuation(self, talk: Conversation) -> Document:
        """Renders a chat whose last reply continues words of the prompt; the rest of the reply carries loss."""
        assert not isinstance(talk.messages, str)
        prompt, text = self.prompt(talk), self.render(talk.messages, talk.tools)
        if not text.startswith(prompt):
            raise RowError(
                "the chat template renders the reply otherwise than the words of the prompt that it continues"
            )
        return Document(text, [(len(prompt), len(text) - len(self.rest))], [""])

    def encode(self, document: Document) -> Example:
        """Returns the token ids of a document and its loss mask.

        The first token never carries loss: no token before it predicts it.

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

    def render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False, begun: bool = False
    ) -> str:
        """Returns the text of a chat, or the prompt for the reply to it, which the last message has `begun`."""
        try:
            template = freeze_date(self.tokenizer.get_chat_template(tools=tools), self.config.date)
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False,
                add_generation_prompt=prompt and not begun, continue_final_message=begun,
            )  # fmt: skip
        except Exception as error:  # a template may raise anything
            raise RowError(f"the chat template refuses the conversation: {type(error).__name__}: {error}") from error
        return text

    @cached_property
    def header(self) -> str:
        """The text of the chat template between a question and its reply; empty without one."""
        if not self.tokenizer.chat_template:
            return ""
        turns = [{"role": "user", "content": f"{_PROBE}1"}, {"role": "assistant", "content": f"{_PROBE}2"}]
        try:
            between = self.render(turns, None).partition(f"{_PROBE}1")[2].partition(f"{_PROBE}2")[0]
        except RowError:  # a template for other chats
            return ""
        return between.partition(self.config.think_open)[0].strip()

    @cached_property
    def _tails(self) -> tuple[str, str]:
        """The text after the content of the last assistant turn, and after one before another turn."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        last, earlier = (self.render([*turns, *more], None) for more in ([], turns[:1]))
        return last.partition(_PROBE)[2], earlier.partition(_PROBE)[2]

    @cached_property
    def stop(self) -> str:
        """The special token that ends an assistant turn in the template; empty without one."""
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        special |= set(self.tokenizer.all_special_ids)
        runs = []
        for tail in self._tails:
            ids = self.tokenizer(tail, add_special_tokens=False)["input_ids"]
            runs.append(list(takewhile(special.__contains__, dropwhile(lambda i: i not in special, ids))))
        ends = commonprefix(runs) or runs[0]  # noqa: RUF071 - of tokens, not of paths
        if self.tokenizer.eos_token_id in ends:  # Command-A ends the response, then the turn
            return str(self.tokenizer.eos_token)
        return str(self.tokenizer.convert_ids_to_tokens(ends[0])) if ends else ""

    @property
    def end(self) -> str:
        """The text after the content of an assistant turn up to its `stop`."""
        return self._tails[0].partition(self.stop)[0] + self.stop if self.stop else ""

    @property
    def rest(self) -> str:
        """The text after the `end` of the last assistant turn, which the model never generates."""
        return self._tails[0][len(self.end) :]

    def count_reasoning(self, document: Document, example: Example) -> ReasoningCounts:
        """Counts the replies of a document whose reasoning is in the tokens of an example that carry loss."""
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
        """Returns the ids of a document, and the mask of those in one of its spans."""
        text, spans = document.text, document.spans
        # A row may be longer than the tokenizer's own limit: `max_length` cuts it, or leaves it out, later.
        out = self.tokenizer(text, add_special_tokens=document.plain, return_offsets_mapping=True, verbose=False)
        ids, offsets = list(out["input_ids"]), [tuple(pair) for pair in out["offset_mapping"]]
        extra = _has_two_bos(self.tokenizer, ids)
        ids, offsets = ids[extra:], offsets[extra:]
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


class _Chat:
    """The replies of one chat that carry loss, each with the prompt that the template makes for it at inference."""

    def __init__(self, encoder: Encoder, talk: Conversation) -> None:
        assert not isinstance(talk.messages, str)
        self._encoder, self._config, self._messages, self._tools = encoder, encoder.config, talk.messages, talk.tools
        turns = [i for i in range(talk.first, len(talk.messages)) if learns(talk.messages[i])]
        self._reasoning = {i: in_message(talk.messages[i], encoder.config) for i in turns}
        self._prompts = {i: encoder.render(talk.messages[:i], talk.tools, prompt=True) for i in turns}
        self._following = {
            i: encoder.render([*talk.messages[: i + 1], {**talk.messages[i + 1], "content": _PROBE}], talk.tools)
            for i in turns
            if i + 1 < len(talk.messages)
        }

    def documents(self) -> list[Document]:
        """Returns the whole chat as one document, or else as many replies together as one document can hold."""
        made, turns, close = [], list(self._reasoning), self._config.think_close
        for i in turns:
            if self._reasoning[i] and self._prompts[i].rstrip().endswith(close):
                raise RowError(
                    f"the prompt of the chat template ends in {close!r}, so the reasoning of message {i} cannot follow "
                    "it: set tokenizer.chat_template to one whose prompt leaves the reasoning open"
                )
        while turns:
            document, count, end = self._together(self._messages, turns), len(turns), len(self._messages)
            if document is None:
                document, count, end = self._alone(turns[0]), 1, turns[0] + 1
                for more in range(2, len(turns) + 1):
                    longer = self._together(self._messages[: turns[more - 1] + 1], turns[:more])
                    if longer is None:
                        break
                    document, count, end = longer, more, turns[more - 1] + 1
            self._check_said(document.text, self._messages[:end], turns[0])
            made.append(document)
            turns = turns[count:]
        return made

    def _together(self, messages: list[dict[str, Any]], turns: list[int]) -> Document | None:
        """Returns the rendering of messages as a document; None if a reply in it could not be trained."""
        text, spans, stop = self._encoder.render(messages, self._tools), [], self._encoder.stop
        for i in turns:
            start, bound, last = len(self._prompts[i]), len(text) - len(self._encoder.rest), i + 1 == len(messages)
            if not last:
                bound = len(commonprefix([text, self._following[i]]))  # noqa: RUF071 - of characters, not of paths
            at = text.rfind(stop, start, bound) if stop else -1
            end = at + len(stop) if at >= 0 else len(text)
            certain = text.startswith(self._prompts[i]) and (at >= 0 or last)
            if not certain or not self._is_kept(text[start:end], messages[i], i):
                return None
            spans.append((start, end))
        return Document(text, spans, [self._reasoning[i] for i in turns])

    def _is_kept(self, text: str, message: dict[str, Any], i: int) -> bool:
        """Returns whether the text of a reply has its reasoning, or an end of the reasoning that the prompt opens."""
        reasoning, close = self._reasoning[i], self._config.think_close
        if not reasoning:
            return not self._is_opened(i) or text.lstrip().startswith(close)
        at = text.find(reasoning)
        said = answer_of(str(message.get("content") or ""), self._config).strip()
        return at >= 0 and close not in text[:at] and said in text[at + len(reasoning) :]

    def _is_opened(self, i: int) -> bool:
        return self._prompts[i].rstrip().endswith(self._config.think_open)

    def _alone(self, i: int) -> Document:
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
            if document := self._together([*self._messages[:i], form], [i]):
                return document
        # Append the reply to the prompt, as the template renders it without reasoning.
        prompt, opening, closing = self._prompts[i], re.escape(config.think_open), re.escape(config.think_close)
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
        if self._is_opened(i):
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
            said = said.strip()
            if said not in text and json.dumps(said)[1:-1] not in text:  # some write the results of tools as JSON
                raise RowError(f"the chat template leaves out what message {i} says: {said[:60]!r}")
        calls = [len(message.get("tool_calls") or ()) for message in messages]
        named = _with_calls(messages, lambda call: {"name": _PROBE})
        if any(calls) and self._encoder.render(named, self._tools).count(_PROBE) < sum(calls):
            raise RowError(f"the chat template leaves out the tool calls of message {calls.index(max(calls))}")
        without = self._encoder.render(messages, None) if self._tools else ""
        for name in [str(tool.get("function", tool).get("name")) for tool in self._tools or ()]:
            if text.count(name) <= without.count(name):
                raise RowError(
                    f"the chat template leaves out the definition of the tool {name!r}: set tokenizer.chat_template to "
                    "one that has it, or data.columns={tools: ''} to train without definitions"
                )
