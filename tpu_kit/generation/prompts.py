"""The text side of generation: prompts to token ids, and tokens back to a text, its reasoning and its answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from tpu_kit.config.loader import DataConfig
from tpu_kit.data.chat_encoding import Encoder, default_stop
from tpu_kit.data.columns import Layout
from tpu_kit.generation.sampling import Sampling, stop_table, token_bytes

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""A text, taken as it stands; the messages of a chat; or token ids."""


@dataclass(frozen=True)
class Completion:
    """One reply.

    Attributes:
        text: what the model wrote, without special tokens and without the stop string.
        reasoning: the part between the tags; None if there is none.
        answer: what follows the reasoning; empty if the reply ended within it.
        tokens: the ids, with those that ended the reply.
        finish_reason: "stop" (an end-of-turn token, a stop string) or "length".
        logprob: sum of the tokens' log-probabilities, in nats, by the model's own distribution.
    """

    text: str
    reasoning: str | None
    answer: str
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    logprob: float


@dataclass
class Row:
    """One reply while it grows.

    Attributes:
        opened: the prompt ended with the opening tag of the reasoning.
        tokens: so far.
        state: of the stop test.
        logprob: the sum so far.
    """

    opened: bool
    tokens: list[int] = field(default_factory=list)
    state: int = 0
    logprob: float = 0.0


class PromptCodec:
    """A tokenizer, and what is known of it.

    Args:
        tokenizer: a fast one.
        causal: the model of transformers that it belongs to.
        data: the tags of the reasoning, and the system prompt.
    """

    def __init__(self, tokenizer: Any, causal: Any, data: DataConfig) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("the tokenizer is not a fast one, so the bytes of its tokens are not known")
        self._tokenizer, self._data = tokenizer, data
        self._tags = (data.think_open, data.think_close)
        self.stops = stop_ids(causal, tokenizer)
        added = tokenizer.added_tokens_decoder
        special = {id_ for id_, token in added.items() if token.special and token.content not in self._tags}
        self._dropped = special | self.stops
        self._rows = int(causal.get_output_embeddings().weight.shape[0])
        self._tables: dict[tuple[str, ...], torch.Tensor] = {}

    @cached_property
    def _pieces(self) -> list[bytes]:
        return token_bytes(self._tokenizer, self._tags)[: self._rows]

    def table(self, sampling: Sampling) -> torch.Tensor:
        """The table of the stop test, (states, V) int32; made once for each set of stop strings."""
        texts = (*sampling.stop, *([self._data.think_close] if sampling.stop_after_reasoning else []))
        if texts not in self._tables:
            ids = [id_ for id_ in self.stops if id_ < self._rows]
            self._tables[texts] = stop_table(self._pieces if texts else [], ids, texts, self._rows)
        return self._tables[texts]

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; a chat goes through the tokenizer's template.

        Raises:
            ValueError: there is nothing in it, there is no chat template, or it refuses the chat.
        """
        if isinstance(prompt, str):
            ids = list(self._tokenizer(prompt, verbose=False)["input_ids"])  # lengths are checked by the Generator
            if ids[-1:] == [self._tokenizer.eos_token_id]:
                ids.pop()  # some tokenizers end every text
        elif prompt and isinstance(prompt[0], Mapping):
            ids = self._chat([dict(message) for message in prompt if isinstance(message, Mapping)])
        else:
            ids = [token for token in prompt if isinstance(token, int)]
        if not ids:
            raise ValueError("the prompt is empty, so there is nothing to answer")
        return ids

    def plain(self, text: str) -> list[int]:
        """The token ids of a text that goes on from another."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _chat(self, messages: list[dict[str, Any]]) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, so a chat cannot be rendered: give the tokenizer that the model "
                "was tuned with, set tokenizer.chat_template, or give the prompt as plain text (chat=false)"
            )
        if self._data.system_prompt and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self._data.system_prompt}, *messages]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template refuses the chat: {type(error).__name__}: {error}") from error
        return self.plain(text)

    def opens_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the opening tag of the reasoning."""
        tail = self._tokenizer.decode(list(ids[-16:]), clean_up_tokenization_spaces=False)
        return bool(tail.rstrip().endswith(self._data.think_open))

    def text(self, tokens: Iterable[int], sampling: Sampling) -> str:
        """The text of tokens, without special ones, up to the first stop string."""
        said = [token for token in tokens if token not in self._dropped]
        text: str = self._tokenizer.decode(said, clean_up_tokenization_spaces=False)
        found = [place for stop in sampling.stop if (place := text.find(stop)) >= 0]
        close = self._data.think_close
        if sampling.stop_after_reasoning and close in text:
            found.append(text.find(close) + len(close))
        return text[: min(found)] if found else text

    def settled(self, text: str, sampling: Sampling) -> str:
        """The beginning of a growing text that no later token changes or takes back."""
        text = text.rstrip("\ufffd")  # the first bytes of a character
        held = max(
            (n for stop in sampling.stop for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
            default=0,
        )
        return text[: len(text) - held]

    def completion(self, row: Row, ended: bool, sampling: Sampling) -> Completion:
        """A finished reply."""
        text = self.text(row.tokens, sampling)
        reasoning, answer = split_reasoning(text, self._data, row.opened)
        return Completion(text, reasoning, answer, tuple(row.tokens), "stop" if ended else "length", row.logprob)


def split_reasoning(text: str, data: DataConfig, opened: bool = False) -> tuple[str | None, str]:
    """Takes a reply apart into its reasoning, None if it has none, and its answer.

    Args:
        text: the reply.
        data: the tags.
        opened: the prompt ended with the opening tag.
    """
    head, close, answer = text.rpartition(data.think_close)
    if not close and not opened and data.think_open not in text:
        return None, text.strip()
    reasoning = head if close else text
    before, _, after = reasoning.partition(data.think_open)
    reasoning = after if data.think_open in reasoning and (not opened or not before.strip()) else reasoning
    return reasoning.strip(), answer.strip() if close else ""


def to_json(completions: Sequence[Completion]) -> str:
    """Completions as a JSON list."""
    return json.dumps([vars(completion) for completion in completions])


def from_json(text: str) -> list[Completion]:
    """What `to_json` wrote."""
    return [Completion(**{**found, "tokens": tuple(found["tokens"])}) for found in json.loads(text)]


def stop_ids(causal: Any, tokenizer: Any) -> set[int]:
    """Return the ids that end an answer.

    The chat template counts because many base models come with an instruct model's template: the training then teaches
    an end-of-turn token that neither the generation config nor the tokenizer knows as the end. A tokenizer without one
    counts as if it had the template that training gives it: the base model is asked in it, too.
    """
    named = causal.generation_config.eos_token_id
    ids = {*named} if isinstance(named, list) else {named}
    ids.add(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        stop: str | None = Encoder(tokenizer, Layout("messages", {}, ()), DataConfig()).stop
    else:
        stop = default_stop(tokenizer)
    if stop:
        ids.add(tokenizer.convert_tokens_to_ids(stop))
    return ids - {None}
