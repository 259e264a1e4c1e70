"""Renders chats with a tokenizer's chat template, and encodes prompts: the part of encoding that generation needs.

No code compares token ids with the padding id: in many tokenizers it is also the end-of-turn token.
"""

import contextlib
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import cached_property
from itertools import dropwhile, takewhile
from os.path import commonprefix
from typing import Any

from tpu_kit.config.schema import DataConfig
from tpu_kit.data.chat.special_text import SpecialText, special_names
from tpu_kit.data.rows.field_values import RowError

PROBE = "tpukitprobe"
"""A text that marks a position in a rendering, to find the template's text around it."""

DEFAULT_TEMPLATE = (
    "{{ BOS }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + STOP + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, for tokenizers without a template. BOS becomes the token that the tokenizer puts before a text, or nothing;
STOP becomes `<|im_end|>` if the vocabulary has it, else the eos token."""


def default_stop(tokenizer: Any) -> str | None:
    """Returns the token that ends a turn in `DEFAULT_TEMPLATE`; None if the tokenizer has no such token."""
    return "<|im_end|>" if "<|im_end|>" in tokenizer.get_vocab() else tokenizer.eos_token


def ensure_chat_template(tokenizer: Any) -> bool:
    """Sets `DEFAULT_TEMPLATE` in a tokenizer without a chat template, with a warning; returns whether it did.

    Raises:
        ValueError: the tokenizer lacks a chat template, the token `<|im_end|>` and an eos token.
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
        "If the model was trained with another template, set tokenizer.chat_template to it",
        stacklevel=2,
    )
    return True


def freeze_date(template: str, day: str | None) -> str:
    """Returns a chat template whose `strftime_now` writes `day`, a text such as "2025-12-31"; None means today.

    Adds a macro to the template, because transformers passes no functions of the caller to a template. Returns a
    template without `strftime_now` unchanged. In other templates, another form of `day` raises ValueError.
    """
    if "strftime_now" not in template:
        return template
    directives = {f"%{name}" for name in re.findall("%(-?[A-Za-z])", template)}
    moment = datetime.fromisoformat(day or date.today().isoformat())
    written = "".join(f".replace({each!r}, {moment.strftime(each)!r})" for each in sorted(directives))
    # transformers' environment removes the line break after a block, so the template still begins a line.
    return f"{{% macro strftime_now(format) %}}{{{{ format{written} }}}}{{% endmacro %}}\n{template}"


def plain_prompt(tokenizer: Any, text: str, special: SpecialText | None = None) -> list[int]:
    """Returns the token ids of plain text that the model continues, with the tokenizer's special tokens but no EOS.

    If the text itself begins with BOS and the tokenizer adds one too, BOS is there once.

    Args:
        tokenizer: the model's tokenizer.
        text: the text.
        special: `PromptEncoder.special`, to encode the text of special tokens as text; None lets it become tokens.
    """
    if special:
        ids, _ = special.encode(text, special.ranges(text), add_special_tokens=True)
    else:
        ids = list(tokenizer(text, verbose=False)["input_ids"])
    if ids[-1:] == [tokenizer.eos_token_id]:
        ids.pop()  # some tokenizers end every text with it, after which the model generates nothing
    return ids[has_two_bos(tokenizer, ids) :]


def has_two_bos(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether token ids begin with two BOS tokens, one from the tokenizer and one from the chat template."""
    return ids[:2] == [tokenizer.bos_token_id] * 2


@dataclass(frozen=True)
class PromptEncoder:
    """Renders chats and encodes prompts; deterministic.

    Attributes:
        tokenizer: a fast Hugging Face tokenizer, with a chat template if there are chats (`ensure_chat_template`).
        config: the data section.
        images: encoding of images (`data.images.encoding`); None for text.

    Raises:
        ValueError: the tokenizer is not fast, or has no eos token.
    """

    tokenizer: Any
    config: DataConfig
    images: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not self.tokenizer.is_fast:
            raise ValueError("the tokenizer is not fast, so a token's characters are unknown; use a fast tokenizer")
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos token, so the model could not learn to stop; set an eos token")

    def chat_ids(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False, begun: bool = False
    ) -> list[int]:
        """Returns the token ids of the text of `render`, which has the same arguments and errors.

        Adds no special tokens of the tokenizer, such as a second BOS. With `splits`, the text of special tokens in
        messages and tools is encoded as text. An image is the single token of the chat template.
        """
        literal: tuple[tuple[int, int], ...] = ()
        if self.splits:
            hidden = self.render(self.special.hide(messages), self.special.hide(tools), prompt, begun)
            text, literal, _ = self.special.shown(hidden)
        else:
            text = self.render(messages, tools, prompt, begun)
        return self.encode_text(text, literal, False)[0]

    def render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False, begun: bool = False
    ) -> str:
        """Returns the text of a chat in the tokenizer's chat template, with the date `data.date`.

        Args:
            messages: the turns; no message is changed.
            tools: definitions of tools; None without tools.
            prompt: whether the text ends with the template's beginning of a reply, for the model to continue.
            begun: whether the last message is the beginning of a reply: the text then ends with its content, and
                `prompt` has no effect.

        Raises:
            RowError: the template refuses the chat.
        """
        if self.images is not None:
            messages = self.images.in_parts(messages, self.tokenizer)
        try:
            template = freeze_date(self.tokenizer.get_chat_template(tools=tools), self.config.date)
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False,
                add_generation_prompt=prompt and not begun, continue_final_message=begun,
            )  # fmt: skip
        except Exception as error:  # a template may raise anything
            raise RowError(f"the chat template refuses the conversation: {type(error).__name__}: {error}") from error
        return text if self.images is None else str(self.images.processor.shown(text))

    @cached_property
    def _tails(self) -> tuple[str, str]:
        """The template's text after the content of a last assistant turn, and of an earlier assistant turn."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]
        last, earlier = (self.render([*turns, *more], None) for more in ([], turns[:1]))
        return last.partition(PROBE)[2], earlier.partition(PROBE)[2]

    @cached_property
    def stop(self) -> str:
        """The text of the special token that ends an assistant turn in the template; empty if there is none.

        If several tokens end it, `stop` is the eos token if that is among them, else the first.
        """
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        special |= set(self.tokenizer.all_special_ids)
        runs = []
        for tail in self._tails:
            ids = self.tokenizer(tail, add_special_tokens=False)["input_ids"]
            runs.append(list(takewhile(special.__contains__, dropwhile(lambda i: i not in special, ids))))
        ends = commonprefix(runs) or runs[0]  # noqa: RUF071 - of tokens, not of paths
        if self.tokenizer.eos_token_id in ends:  # Command-A has a token for the end of the response, then eos
            return str(self.tokenizer.eos_token)
        return str(self.tokenizer.convert_ids_to_tokens(ends[0])) if ends else ""

    @property
    def end(self) -> str:
        """The text after the content of an assistant turn up to and with its `stop`; empty without a `stop`."""
        return self._tails[0].partition(self.stop)[0] + self.stop if self.stop else ""

    @property
    def rest(self) -> str:
        """The text after the `end` of the last assistant turn, which the model never generates."""
        return self._tails[0][len(self.end) :]

    @property
    def splits(self) -> bool:
        """Whether the text of special tokens in rows is encoded as text."""
        return self.config.special_text == "split"

    @cached_property
    def special(self) -> SpecialText:
        """The `SpecialText` of special tokens, and of added tokens that the chat template writes around turns.

        The reasoning tags are not among them.
        """
        written = ""
        if self.tokenizer.chat_template:
            turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
            for messages in ([{"role": "system", "content": "a"}, *turns], turns):
                with contextlib.suppress(RowError):  # the template may refuse a system turn
                    written += self.render(messages, None, prompt=True)
        tags = (self.config.think_open, self.config.think_close)
        return SpecialText(self.tokenizer, special_names(self.tokenizer, written, tags))

    def encode_text(
        self, text: str, literal: Sequence[tuple[int, int]], add_special_tokens: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the token ids of a text and, per token, its character range (start, end) in the text.

        Nothing is truncated or padded: without `literal` ranges, switches that off in the tokenizer's backend for good.

        Args:
            text: the text.
            literal: character ranges, in order, in which the text of special tokens is encoded as text.
            add_special_tokens: whether the tokenizer adds its own, such as BOS; their range is (0, 0).
        """
        if literal:
            return self.special.encode(text, literal, add_special_tokens)
        # The same calls as in transformers, but a third faster for a chat of 80 tokens. A row may be longer than the
        # tokenizer's own limit, because `max_length` is applied later.
        backend, splits = self.tokenizer.backend_tokenizer, self.tokenizer.split_special_tokens
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens != splits:
            backend.encode_special_tokens = splits
        made = backend.encode(text, add_special_tokens=add_special_tokens)
        return made.ids, made.offsets
