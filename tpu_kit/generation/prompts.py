"""Encodes prompts as token ids, finds the end of a reply, and decodes replies into text, reasoning and answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from tpu_kit.config.loader import DataConfig
from tpu_kit.data.chat_encoding import Encoder, default_stop, plain_prompt
from tpu_kit.data.columns import Layout
from tpu_kit.generation.sampling import Sampling

START, ENDED = 0, 1  # states of the stop test (`stop_table`); no transition leaves ENDED

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""A plain text, the messages of a chat, or token ids."""


@dataclass(frozen=True)
class Completion:
    """One reply.

    Attributes:
        text: the reply without special tokens and without the stop string.
        reasoning: the text between the tags; None if there is none.
        answer: the text after the reasoning; empty if the reply ended within the reasoning.
        tokens: the ids, including those that ended the reply.
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
    """An unfinished reply.

    Attributes:
        opened: whether the prompt ended with the opening tag of the reasoning.
        tokens: generated so far.
        state: of the stop test.
        logprob: sum of the tokens' log-probabilities.
    """

    opened: bool
    tokens: list[int] = field(default_factory=list)
    state: int = START
    logprob: float = 0.0


class PromptCodec:
    """Encodes prompts and decodes replies with a tokenizer.

    Args:
        tokenizer: a fast tokenizer.
        causal: its model of transformers.
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
        """Returns the table of the stop test, (states, V) int32; made once for each set of stop strings."""
        texts = (*sampling.stop, *([self._data.think_close] if sampling.stop_after_reasoning else []))
        if texts not in self._tables:
            ids = [id_ for id_ in self.stops if id_ < self._rows]
            self._tables[texts] = stop_table(self._pieces if texts else [], ids, texts, self._rows)
        return self._tables[texts]

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt; the tokenizer's template renders a chat.

        Raises:
            ValueError: the prompt is empty, there is no chat template, or the template refuses the chat.
        """
        if isinstance(prompt, str):
            ids = plain_prompt(self._tokenizer, prompt)  # the Generator checks lengths
        elif prompt and isinstance(prompt[0], Mapping):
            ids = self._chat([dict(message) for message in prompt if isinstance(message, Mapping)])
        else:
            ids = [token for token in prompt if isinstance(token, int)]
        if not ids:
            raise ValueError("the prompt is empty, so there is nothing to answer")
        return ids

    def plain(self, text: str) -> list[int]:
        """Returns the token ids of a text that continues another, without special tokens."""
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
        """Decodes tokens without special ones, up to the first stop string."""
        said = [token for token in tokens if token not in self._dropped]
        text: str = self._tokenizer.decode(said, clean_up_tokenization_spaces=False)
        found = [place for stop in sampling.stop if (place := text.find(stop)) >= 0]
        close = self._data.think_close
        if sampling.stop_after_reasoning and close in text:
            found.append(text.find(close) + len(close))
        return text[: min(found)] if found else text

    def settled(self, text: str, sampling: Sampling) -> str:
        """Returns the beginning of an unfinished text that later tokens cannot change."""
        text = text.rstrip("\ufffd")  # an incomplete character
        held = max(
            (n for stop in sampling.stop for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
            default=0,
        )
        return text[: len(text) - held]

    def completion(self, row: Row, ended: bool, sampling: Sampling) -> Completion:
        """Makes the completion of a finished reply."""
        text = self.text(row.tokens, sampling)
        reasoning, answer = split_reasoning(text, self._data, row.opened)
        return Completion(text, reasoning, answer, tuple(row.tokens), "stop" if ended else "length", row.logprob)


def split_reasoning(text: str, data: DataConfig, opened: bool = False) -> tuple[str | None, str]:
    """Splits a reply into its reasoning, None if it has none, and its answer.

    Args:
        text: the reply.
        data: the tags.
        opened: whether the prompt ended with the opening tag.
    """
    head, close, answer = text.rpartition(data.think_close)
    if not close and not opened and data.think_open not in text:
        return None, text.strip()
    reasoning = head if close else text
    before, _, after = reasoning.partition(data.think_open)
    reasoning = after if data.think_open in reasoning and (not opened or not before.strip()) else reasoning
    return reasoning.strip(), answer.strip() if close else ""


def to_json(completions: Sequence[Completion]) -> str:
    """Writes completions as a JSON list."""
    return json.dumps([vars(completion) for completion in completions])


def from_json(text: str) -> list[Completion]:
    """Reads the completions that `to_json` wrote."""
    return [Completion(**{**found, "tokens": tuple(found["tokens"])}) for found in json.loads(text)]


def stop_ids(causal: Any, tokenizer: Any) -> set[int]:
    """Returns the ids that end an answer.

    They include the end-of-turn token of the chat template: many base models come with an instruct model's template,
    whose token neither the generation config nor the tokenizer has as the end. A tokenizer without a template gets the
    template of training, also for the base model.
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


# --------------------------------------------------------------------------------------------------------- stop test


def stop_table(pieces: Sequence[bytes], ids: Iterable[int], texts: Iterable[str], rows: int) -> torch.Tensor:
    """Builds the table of the stop test, with which one look-up for each token finds the end of a reply.

    The states are those of an automaton over bytes (Aho and Corasick, CACM 18, 1975) that searches for all stop strings
    at once. For each state and token the table has the state after the bytes of the token, so that it finds a stop
    string however the tokens divide it.

    Args:
        pieces: the bytes of every token.
        ids: tokens that end a reply.
        texts: stop strings.
        rows: of the model's output embedding; rows without a token end nothing.

    Returns:
        (states, rows) int32: the next state. The number of states is a power of two, 8 or more, so that most sets of
        stop strings share a program.
    """
    follow = _automaton([text.encode() for text in texts])
    states = follow.shape[0]
    padded = max(8, 1 << (states - 1).bit_length())
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    order = np.argsort(-lengths, kind="stable").tolist()  # the longest first
    longest = max(map(len, pieces), default=0)
    text = np.zeros((len(pieces), longest), dtype=np.uint8)
    for row, token in enumerate(order):
        text[row, : lengths[token]] = np.frombuffer(pieces[token], dtype=np.uint8)
    now = np.repeat(np.arange(states, dtype=np.int32)[:, None], len(pieces), axis=1)
    if states > 2:
        for place in range(longest):
            active = int(np.searchsorted(-lengths[order], -place))  # tokens longer than `place`
            now[:, :active] = follow[now[:, :active], text[:active, place]]
    table = np.full((padded, rows), START, dtype=np.int32)
    table[:states, order] = now
    table[:, list(ids)] = ENDED
    table[ENDED] = ENDED
    return torch.from_numpy(table)


def _automaton(texts: list[bytes]) -> np.ndarray:
    """Returns (states, 256) int32: the next state for each byte. A state is the longest suffix that begins a stop."""
    prefixes = dict.fromkeys(text[:end] for text in texts for end in range(1, len(text) + 1))
    states = {b"": START} | {prefix: number for number, prefix in enumerate(prefixes, ENDED + 1)}
    follow = np.full((len(states) + 1, 256), START, dtype=np.int32)
    follow[ENDED] = ENDED
    for prefix, state in states.items():
        for byte in set(b"".join(texts)):
            read = prefix + bytes([byte])
            longest = next(states[read[start:]] for start in range(len(read) + 1) if read[start:] in states)
            follow[state, byte] = ENDED if read.endswith(tuple(texts)) else longest
    return follow


def token_bytes(tokenizer: Any, kept: Iterable[str] = ()) -> list[bytes]:
    """Returns the bytes that each token of a fast tokenizer adds to a text: none for special tokens not in `kept`."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
    decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
    by_bytes, kept = '"ByteLevel"' in decoder, set(kept)
    added = tokenizer.added_tokens_decoder
    pieces = []
    for id_, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        if token is None:
            piece = b""
        elif id_ in added:
            piece = b"" if added[id_].special and token not in kept else token.encode()
        elif by_bytes:
            piece = bytes(alphabet[character] for character in token if character in alphabet)
        elif len(token) == 6 and token.startswith("<0x"):
            piece = bytes.fromhex(token[3:5])
        else:
            piece = token.replace("\u2581", " ").encode()
        pieces.append(piece)
    return pieces
