"""Choosing the next token, and seeing that a reply has ended, without leaving the device.

The numbers of `Sampling` are inputs of the program, not constants in it, so another temperature compiles nothing. The
random numbers come from the host, seeded for each sample by itself: what a prompt gets does not depend on the prompts
beside it, on the batch or on the number of replicas.

The stop test is one table look-up a token. An automaton over bytes (Aho and Corasick, CACM 18, 1975) follows all stop
strings at once; its table says, for each of its states and each token of the vocabulary, in which state the bytes of
that token leave it. So a stop string is found however the tokens cut it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

START, ENDED = 0, 1  # states of the automaton; from the second there is no way out

Kind = Literal["greedy", "plain", "filtered"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and where a reply ends.

    Attributes:
        max_new_tokens: the most tokens of a reply, the one that ends it included.
        temperature: 0 takes the likeliest token; above, the logits are divided by it and a token is drawn.
        top_k: draw among this many likeliest tokens; 0 = all.
        top_p: then among the fewest likeliest whose probabilities sum to it; 1 = all.
        min_p: then among those at least this share as likely as the likeliest; 0 = all.
        repetition_penalty: what a logit of a token that occurred already, in prompt or reply, is divided by where it is
            positive and multiplied with where not (Keskar et al., arXiv:1909.05858); 1 = none.
        seed: of the draws.
        stop: a reply ends before the first of these texts.
        stop_after_reasoning: end when the reasoning does.

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_after_reasoning: bool = False

    def __post_init__(self) -> None:
        bounds = {
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            "temperature": (0 <= self.temperature < 1e4, "0 (the likeliest token) or more"),
            "top_k": (self.top_k >= 0, "0 (all tokens) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0, and 1 (all tokens) at most"),
            "min_p": (0 <= self.min_p <= 1, "from 0 (all tokens) to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < 1e4, "above 0; 1 is none"),
            "seed": (0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
        }
        wrong = [f"{name}={getattr(self, name)} must be {text}" for name, (good, text) in bounds.items() if not good]
        stop: object = self.stop
        if not isinstance(stop, (tuple, list)) or not all(isinstance(text, str) and text for text in stop):
            wrong.append(f"stop={stop!r} must be a list of texts, none of them empty")
        else:
            object.__setattr__(self, "stop", tuple(stop))
        if wrong:
            raise ValueError("sampling: " + "; ".join(wrong))

    @property
    def kind(self) -> Kind:
        """Which of the programs for choosing is needed."""
        if self.temperature == 0:
            return "greedy"
        return "plain" if self.top_k == 0 and self.top_p == 1 and self.min_p == 0 else "filtered"

    def knobs(self, vocabulary: int) -> torch.Tensor:
        """(5,) fp32 for `choose`: temperature, top_k, top_p, min_p and repetition penalty."""
        top_k = self.top_k or vocabulary
        return torch.tensor([self.temperature or 1.0, top_k, self.top_p, self.min_p, self.repetition_penalty])

    def uniforms(self, steps: int, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Random numbers in [0, 1), (steps, rows) fp32; a row is (number of the prompt, number of its sample)."""
        if self.kind == "greedy":
            return torch.zeros(steps, len(rows))
        streams = (np.random.default_rng((self.seed, *row)) for row in rows)
        return torch.from_numpy(np.stack([stream.random(steps, dtype=np.float32) for stream in streams], axis=1))


class Choice(NamedTuple):
    """What was chosen: token ids (B,) int64, and their log-probabilities (B,) fp32 by the model's own logits."""

    token: torch.Tensor
    logprob: torch.Tensor


def choose(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    knobs: torch.Tensor,
    kind: Kind,
    occurred: torch.Tensor | None = None,
) -> Choice:
    """Chooses a token for each row, on the device.

    Args:
        logits: (B, V) fp32.
        uniform: (B,) fp32 random numbers in [0, 1).
        knobs: (5,) as `Sampling.knobs` returns them.
        kind: of `Sampling.kind`; it decides which program this is.
        occurred: (B, V) fp32, 1 where a token occurred already; None if there is no penalty.
    """
    temperature, top_k, top_p, min_p, penalty = knobs.unbind()
    scores = logits
    if occurred is not None:
        scores = torch.where(occurred > 0, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if kind == "greedy":
        token = scores.argmax(-1)
    elif kind == "plain":
        token = _draw(torch.softmax(scores / temperature, -1), uniform)
    else:
        ordered, ids = torch.sort(scores / temperature, dim=-1, descending=True)
        rank = torch.arange(ordered.shape[-1], device=logits.device)
        least = torch.finfo(torch.float32).min
        chances = torch.softmax(torch.where(rank < top_k, ordered, torch.full_like(ordered, least)), -1)
        before = chances.cumsum(-1) - chances
        kept = (before < top_p) & (chances >= min_p * chances.amax(-1, keepdim=True)) & (rank < top_k)
        token = ids.gather(-1, _draw(chances * kept, uniform).unsqueeze(-1)).squeeze(-1)
    chosen = logits.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return Choice(token, chosen - torch.logsumexp(logits, -1))


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index in which a share `uniform` of the sum of `weights` (B, V) lies."""
    sums = weights.cumsum(-1)
    index = (sums <= uniform.unsqueeze(-1) * sums[:, -1:]).sum(-1)
    # Rounding may put the last one past the end of what has any weight.
    last = torch.where(weights > 0, torch.arange(weights.shape[-1], device=weights.device), 0).amax(-1)
    return torch.minimum(index, last)


def stop_table(pieces: Sequence[bytes], ids: Iterable[int], texts: Iterable[str], rows: int) -> torch.Tensor:
    """Builds the table of the stop test.

    Args:
        pieces: the bytes of every token.
        ids: tokens that end a reply by themselves.
        texts: stop strings.
        rows: of the model's output, of which those without a token end nothing.

    Returns:
        (states, rows) int32: the next state. States are padded to a power of two, 8 or more, so that most sets of stop
        strings share a program.
    """
    follow = _automaton([text.encode() for text in texts])
    states = follow.shape[0]
    padded = max(8, 1 << (states - 1).bit_length())
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    order = np.argsort(-lengths, kind="stable")  # tokens that still have bytes come first
    longest = int(lengths.max(initial=0))
    text = np.zeros((len(pieces), longest), dtype=np.uint8)
    for row, token in enumerate(order):
        text[row, : lengths[token]] = np.frombuffer(pieces[token], dtype=np.uint8)
    now = np.repeat(np.arange(states, dtype=np.int32)[:, None], len(pieces), axis=1)
    if states > 2:
        for place in range(longest):
            active = int(np.searchsorted(-lengths[order], -place))  # those longer than `place`
            now[:, :active] = follow[now[:, :active], text[:active, place]]
    table = np.full((padded, rows), START, dtype=np.int32)
    table[:states, order] = now
    table[:, list(ids)] = ENDED
    table[ENDED] = ENDED
    return torch.from_numpy(table)


def _automaton(texts: list[bytes]) -> np.ndarray:
    """(states, 256) int32: the next state for each byte."""
    children: list[dict[int, int]] = [{}, {}]
    ends: list[bool] = [False, True]
    for text in texts:
        node = START
        for byte in text:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                ends.append(False)
            node = children[node][byte]
        ends[node] = True
    follow = np.zeros((len(children), 256), dtype=np.int32)
    fallback = dict.fromkeys(children[START].values(), START)
    queue = [START, *children[START].values()]
    for node in queue:  # breadth first: a fallback is shorter, and done
        if node != START:
            follow[node] = follow[fallback[node]]
            ends[node] = ends[node] or ends[fallback[node]]
        for byte, child in children[node].items():
            if node != START:
                fallback[child] = int(follow[node, byte])
                queue.append(child)
            follow[node, byte] = child
    ended = np.array(ends)
    follow[ended[follow]] = ENDED
    follow[ENDED] = ENDED
    return follow


def token_bytes(tokenizer: Any, kept: Iterable[str] = ()) -> list[bytes]:
    """The bytes that each token of a fast tokenizer adds to a text; special ones none, but for those in `kept`."""
    alphabet = {character: byte for byte, character in _byte_characters().items()}
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


def _byte_characters() -> dict[int, str]:
    """The character that byte-level tokenizers write for each byte: itself if printable, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
