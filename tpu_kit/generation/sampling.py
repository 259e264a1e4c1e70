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
from typing import Any, NamedTuple

import numpy as np
import torch

from tpu_kit.generation.options import Kind, Sampling

__all__ = ["ENDED", "START", "Choice", "Sampling", "choose", "stop_table", "token_bytes"]

START, ENDED = 0, 1  # states of the automaton; from the second there is no way out


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
    """(states, 256) int32: the next state for each byte. A state is the longest end of a text that begins a stop."""
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
    """The bytes that each token of a fast tokenizer adds to a text; special ones none, but for those in `kept`."""
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
