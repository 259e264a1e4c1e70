"""From a conversation to token ids with a mask of the tokens that carry loss.

Which tokens carry loss is read off the rendering of the tokenizer's own chat template: from its `{% generation %}`
markers, or by rendering each conversation up to an assistant turn and checking that this is how the whole rendering
begins. Token ids are never compared with the padding id: in many tokenizers that is also the end-of-turn token.
"""

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from os.path import commonprefix
from typing import Any, NamedTuple

from tpu_kit.config import DataConfig
from tpu_kit.formats import Conversation, Layout, RowError, conversation, reasoning_of

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + STOP }}{% endgeneration %}"
    "{% else %}{{ message['content'] + STOP }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, for tokenizers without a template; STOP becomes `<|im_end|>` if the vocabulary has it, else the eos token."""

_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "tpukitprobe"


class Example(NamedTuple):
    """One document: token ids and, of the same length, which of them are predicted with loss."""

    input_ids: list[int]
    loss_mask: list[bool]


def default_stop(tokenizer: Any) -> str | None:
    """Return the token that ends a turn in `DEFAULT_TEMPLATE`; None if the tokenizer has none for it."""
    stop: str | None = "<|im_end|>" if "<|im_end|>" in tokenizer.get_vocab() else tokenizer.eos_token
    return stop


def ensure_chat_template(tokenizer: Any) -> bool:
    """Give a tokenizer without a chat template `DEFAULT_TEMPLATE`, with a warning; return whether that was needed.

    Raises:
        ValueError: it has no eos token to end a turn with either.
    """
    if tokenizer.chat_template:
        return False
    stop = default_stop(tokenizer)
    if not stop:
        raise ValueError("the tokenizer has neither a chat template nor an eos token; set tokenizer.chat_template")
    tokenizer.chat_template = DEFAULT_TEMPLATE.replace("STOP", repr(stop))
    warnings.warn(
        f"the tokenizer has no chat template; using ChatML with {stop!r} at the end of a turn. "
        "If the model was trained with another one, set tokenizer.chat_template to it",
        stacklevel=2,
    )
    return True


def decoded_example(tokenizer: Any, example: Example) -> list[tuple[str, bool]]:
    """Return the text of an example in stretches `(text, carries loss)` for display; joined they are the whole."""
    spans: list[tuple[list[int], bool]] = []
    for token, loss in zip(example.input_ids, example.loss_mask, strict=True):
        if not spans or spans[-1][1] != bool(loss):
            spans.append(([], bool(loss)))
        spans[-1][0].append(int(token))
    return [(tokenizer.decode(ids, clean_up_tokenization_spaces=False), loss) for ids, loss in spans]


def _renamed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat whose tool calls all have a name that is found again."""
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
    """Turns rows into examples. Deterministic, and picklable for several processes.

    Attributes:
        tokenizer: a fast Hugging Face tokenizer, with a chat template if the rows are chats (`ensure_chat_template`).
        layout: what `detect_layout` found.
        config: the data section of the configuration.

    Raises:
        ValueError: the tokenizer is not a fast one, or has no eos token.
    """

    tokenizer: Any
    layout: Layout
    config: DataConfig

    def __post_init__(self) -> None:
        if not self.tokenizer.is_fast:
            raise ValueError("the tokenizer is not a fast one, so it cannot say which characters a token stands for")
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos token, so the model could not learn to stop; set one")

    def conversation(self, row: Mapping[str, Any]) -> Conversation:
        """Read one row by this encoder's layout and settings."""
        return conversation(row, self.layout, self.config)

    def prompt(self, talk: Conversation) -> str:
        """Return the text after which the model is to generate: all before the last assistant turn."""
        if isinstance(talk.messages, str):
            return talk.messages[: talk.first]
        last = max(i for i, message in enumerate(talk.messages) if message["role"] == "assistant")
        return self._render(talk.messages[:last], talk.tools, prompt=True)

    def encode(self, talk: Conversation) -> Example:
        """Return the token ids of a conversation and which of them carry loss.

        The first token never carries loss: nothing stands before it to be predicted from.

        Raises:
            RowError: it cannot be rendered, its turns cannot be told apart with certainty, or no token carries loss.
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
        except Exception as error:  # a template may raise anything: its own text, or a key it did not find
            raise RowError(f"the chat template refuses the conversation: {type(error).__name__}: {error}") from error

    @cached_property
    def _tail(self) -> str:
        """What the template writes after the words of the last assistant turn."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        return self._render(turns, None).rpartition(_PROBE)[2]

    @cached_property
    def stop(self) -> str:
        """The special token with which the template ends an assistant turn; empty if it writes none."""
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        special |= set(self.tokenizer.all_special_ids)
        ids = self.tokenizer(self._tail, add_special_tokens=False)["input_ids"]
        return next((self.tokenizer.convert_ids_to_tokens(i) for i in ids if i in special), "")

    def _check_said(self, text: str, talk: Conversation) -> None:
        """Refuse a template that leaves out what is said or called (but for the reasoning, which many drop)."""
        assert not isinstance(talk.messages, str)
        for i, message in enumerate(talk.messages):
            said = message["content"] if isinstance(message.get("content"), str) else ""
            if message["role"] == "assistant":
                said = said.rpartition(self.config.think_close)[2] if i >= talk.first else ""
            said = said.strip()
            if said not in text and json.dumps(said)[1:-1] not in text:  # some write what tools return as JSON
                raise RowError(f"the chat template leaves out what message {i} says: {said[:60]!r}")
        calls = [len(message.get("tool_calls") or ()) for message in talk.messages]
        if any(calls) and self._render(_renamed(talk.messages), talk.tools).count(_PROBE) < sum(calls):
            raise RowError(f"the chat template leaves out the tool calls of message {calls.index(max(calls))}")

    def _spoils_reasoning(self, text: str, talk: Conversation) -> bool:
        """Say whether the template drops the reasoning of a row, or puts an empty one of its own before it."""
        if self.layout.format != "cot" or isinstance(talk.messages, str):
            return False
        reasoning = reasoning_of(talk.messages[-1]["content"], self.config)
        empty = rf"{re.escape(self.config.think_open)}\s*{re.escape(self.config.think_close)}"
        return bool(reasoning) and (reasoning not in text or re.search(empty, text) is not None)

    def _spans(self, talk: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered text and the character ranges of its assistant turns, each with its end-of-turn token."""
        messages, first, tools = talk
        assert not isinstance(messages, str)
        text, spans = self._render(messages, tools), []
        self._check_said(text, talk)
        for i in (i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"):
            head = self._render(messages[:i], tools, prompt=True)
            content = str(messages[i].get("content", ""))
            opened = head.rstrip().endswith(self.config.think_open)
            bare = head.rstrip().removesuffix(self.config.think_open)
            spoilt = self._spoils_reasoning(text, talk)
            if opened and not spoilt and not text.startswith(head) and text.startswith(bare):
                head = bare  # a finished turn is written without the opening of its reasoning
            if spoilt or not text.startswith(head):
                if i != first or i + 1 != len(messages) or "tool_calls" in messages[i]:
                    raise RowError(
                        f"the chat template renders what precedes message {i} in another way once more follows, so "
                        "which tokens the reply has is not certain. Split the chat into one row per reply "
                        "(prompt_completion), or give the template {% generation %} markers"
                    )
                # Templates of reasoning models drop the thinking of a finished turn: write the reply after the prompt.
                if opened:
                    content = content.removeprefix(self.config.think_open).lstrip("\n")
                return head + content + self.stop, [(len(head), len(head + content + self.stop))]
            spans.append((len(head), self._turn_end(text, len(head), talk, i)))
        return text, spans

    def _turn_end(self, text: str, start: int, talk: Conversation, index: int) -> int:
        """Return where assistant turn `index`, which starts at character `start`, ends: after its end-of-turn token."""
        assert not isinstance(talk.messages, str)
        last = index + 1 == len(talk.messages)
        upto = text if last else self._render(talk.messages[: index + 1], talk.tools)
        if text.startswith(upto):
            # What the template puts after the end-of-turn token is never generated.
            after = len(self._tail.partition(self.stop)[2]) if self.stop and upto.endswith(self._tail) else 0
            return len(upto) - after
        # The first end-of-turn token is this turn's if it comes before the words of the next message.
        following = [*talk.messages[: index + 1], {**talk.messages[index + 1], "content": _PROBE}]
        bound = len(commonprefix([text, self._render(following, talk.tools)]))  # noqa: RUF071 (of characters)
        end = text.find(self.stop, start, bound)
        if not self.stop or end < 0 or self.stop in str(talk.messages[index].get("content")):
            raise RowError(f"the end of message {index} is not certain: give the template {{% generation %}} markers")
        return end + len(self.stop)

    def _marked(self, talk: Conversation) -> tuple[list[int], list[bool]]:
        """Return ids and mask by the template's own generation markers."""
        messages, first, tools = talk
        assert not isinstance(messages, str)
        text = self._render(messages, tools)
        self._check_said(text, talk)
        if self._spoils_reasoning(text, talk):
            return self._tokenize(*self._spans(talk), special=False)
        out = self._template(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(out["input_ids"]), [bool(flag) for flag in out["assistant_masks"]]
        if any(message["role"] == "assistant" for message in messages[:first]):
            text = self._render(messages[:first], tools, prompt=True)
            head = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if ids[: len(head)] != head:
                raise RowError("the chat template renders the prompt in another way once the completion follows")
            mask = [flag and i >= len(head) for i, flag in enumerate(mask)]
        stop = self.tokenizer.convert_tokens_to_ids(self.stop) if self.stop else None
        for i in range(1, len(ids)):
            if mask[i - 1] and not mask[i] and ids[i] == stop and ids[i - 1] != stop:
                mask[i] = True  # markers that close before the end-of-turn token: the model must learn to stop
        return ids, mask

    def _tokenize(self, text: str, spans: list[tuple[int, int]], *, special: bool) -> tuple[list[int], list[bool]]:
        """Return the ids of text, and which of them lie in one of the character ranges."""
        out = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        ids, offsets = list(out["input_ids"]), [tuple(pair) for pair in out["offset_mapping"]]
        borders = {border for span in spans for border in span}
        if any(a < border < b for a, b in offsets for border in borders):
            # Generation starts from the prompt tokenised alone, so a token across its end would never be seen there.
            lead = next((i for i, (_, b) in enumerate(offsets) if b), 0)
            cut_ids, cut_offsets = ids[:lead], offsets[:lead]
            edges = sorted({0, len(text), *borders})
            for a, b in pairwise(edges):
                piece = self.tokenizer(text[a:b], add_special_tokens=False, return_offsets_mapping=True)
                cut_ids += piece["input_ids"]
                cut_offsets += [(a + x, a + y) for x, y in piece["offset_mapping"]]
            if self.tokenizer.decode(cut_ids) == self.tokenizer.decode(ids):
                ids, offsets = cut_ids, cut_offsets
        # Some tokenizers trim white space off: a token of nothing else is then an empty range at its end.
        return ids, [
            any(start < b <= end if a == b else a < end and start < b for start, end in spans) for a, b in offsets
        ]
