"""Generation with one model on one device, in programs of a few fixed shapes.

    generator = Generator(model, tokenizer, runtime, max_prompt=512, max_new_tokens=256)
    replies = generator.generate(["2 + 3 = "], Sampling(temperature=0.7, top_p=0.9), n=4)

The prompts are sorted by length and go in batches of one size, each as wide as the nearest of a few widths. On XLA
that makes one prefill program for each width and one decode program, whatever the lengths are; the host reads the
device once in `block` tokens of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tpu_kit.config.loader import DataConfig
from tpu_kit.distributed import runtime
from tpu_kit.distributed.runtime import Runtime
from tpu_kit.generation.decoder import Batch, Decoder, filled, fitting, widths_to
from tpu_kit.generation.kv_cache import Held, cache_bytes_per_token, causal
from tpu_kit.generation.prompts import Completion, Prompt, PromptCodec, Row
from tpu_kit.generation.reference_check import check_generation
from tpu_kit.generation.sampling import ENDED, START, Sampling
from tpu_kit.models import causal_lm as models
from tpu_kit.models import rotary

_RATED = 4096  # tokens of a batch whose likelihoods are asked for, at most

_votes: dict[int, bool] = {}  # of the replicas of XLA:CPU, which are threads of one process


class Rating(NamedTuple):
    """How likely the tokens of a row are, from the second on.

    Attributes:
        logprobs: their log-probabilities after those before them, in nats.
        likeliest: whether each was the likeliest.
    """

    logprobs: list[float]
    likeliest: list[bool]


class Generator:
    """Generates with one model on one device.

    Args:
        model: a causal language model, PEFT's around one included, on the runtime's device.
        tokenizer: its tokenizer, a fast one.
        rt: the replica; the calling one's by default.
        max_prompt: the most tokens of a prompt.
        max_new_tokens: the most that `Sampling.max_new_tokens` may ask for. With max_prompt it sets the length of the
            cache on XLA.
        batch_size: rows of a batch; a single prompt goes by itself.
        block: tokens of a row between two reads of the device.
        data: the tags of the reasoning, and the system prompt.
        widths: the widths that prompts are padded to on XLA; by default 64, 128 and so on.

    Attributes:
        read: tokens of prompts that were read so far; those whose keys and values were in the cache do not count.

    Raises:
        ValueError: a size makes no sense, the tokenizer is not a fast one, or the model's architecture does not work
            with the key/value cache.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        rt: Runtime | None = None,
        *,
        max_prompt: int = 512,
        max_new_tokens: int = 256,
        batch_size: int = 8,
        block: int = 16,
        data: DataConfig | None = None,
        widths: Sequence[int] | None = None,
    ) -> None:
        sizes = {"max_prompt": max_prompt, "max_new_tokens": max_new_tokens, "batch_size": batch_size, "block": block}
        if wrong := [f"{name}={value}" for name, value in sizes.items() if value < 1]:
            raise ValueError(f"{', '.join(wrong)}: must be 1 or more")
        models.check_vocabulary(model, tokenizer)
        settings = causal(model).config
        check_generation(settings, trust_remote_code=hasattr(settings, "auto_map"))  # its code runs already
        self._rt, self._config = rt or runtime.current(), models.text_config(model)
        self._limits, self._batch_size = (max_prompt, max_new_tokens), batch_size
        self._positions = rotary.positions(self._config) or math.inf
        self._texts = PromptCodec(tokenizer, causal(model), data or DataConfig())
        self._widths = sorted(widths) if widths else widths_to(max_prompt)
        if self._widths[-1] < max_prompt - 1:
            raise ValueError(f"widths={self._widths}: the last must be max_prompt={max_prompt} or more")
        self._steps = -(-max_new_tokens // block) * block
        self._decoder = Decoder(model, self._rt, block, self._widths[-1] + self._steps)
        self.read = 0
        self._held: Held | None = None
        self._tables: dict[int, torch.Tensor] = {}

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        n: int = 1,
        truncate: bool = False,
        hold: bool = False,
    ) -> list[Completion]:
        """Completes every prompt.

        Args:
            prompts: texts, chats (lists of messages) or lists of token ids.
            sampling: greedy by default, with the Generator's max_new_tokens.
            n: samples of each prompt, from one prefill.
            truncate: leave out the beginning of a prompt that is too long.
            hold: keep the keys and values of the last batch until the next call. If the next call holds too, is one
                batch, and each of its prompts is a prompt with its reply of this batch, it reads none of them again.

        Returns:
            n completions for each prompt, those of a prompt one after the other.

        Raises:
            ValueError: there are no prompts, one is empty or too long, or it is a chat and there is no template.
        """
        found = self._run(prompts, sampling or Sampling(self._limits[1]), n, truncate, hold)
        return [found[row, sample] for row in range(len(prompts)) for sample in range(n)]

    def cache_bytes(self, prompts: int, n: int = 1) -> int:
        """Bytes of keys and values, at most, of a call of `generate` with so many prompts and samples that holds."""
        size = 1 if prompts == 1 else max(1, self._batch_size // n)
        rows, slots = size if self._rt.is_xla else min(size, prompts), self._widths[-1] + self._steps
        # On XLA the prompts' cache and the samples' are buffers of their own; elsewhere there is the last batch's too.
        rows = rows * (n + (n > 1)) if self._rt.is_xla else 2 * rows * n
        return rows * slots * cache_bytes_per_token(self._config, self._decoder.element_bytes)

    def share(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        n: int = 1,
        truncate: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> dict[tuple[int, int], Completion]:
        """Completes this replica's share of the prompts: (number of the prompt, number of the sample) -> completion.

        Every replica must call it with the same arguments. After each block `progress` gets the number of the
        completions that this replica has finished. The rest is as in `generate`.
        """
        return self._run(prompts, sampling, n, truncate, share=True, progress=progress)

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, truncate: bool = False) -> Iterator[str]:
        """Completes one prompt; gives its text in pieces as they come, one for each block.

        To show it in a notebook or a terminal: `for piece in generator.stream(...): print(piece, end="", flush=True)`.
        """
        sampling = sampling or Sampling(self._limits[1])
        (ids,) = self._encode([prompt], sampling, truncate)
        told = ""
        for (row,) in self._batch([ids], [0], 1, 1, sampling, self._width(len(ids) - 1)):
            text = self._texts.text(row.tokens, sampling)
            if row.state != ENDED and len(row.tokens) < sampling.max_new_tokens:
                text = self._texts.settled(text, sampling)
            if len(text) > len(told):
                yield text[len(told) :]
                told = text

    def score(
        self, prompts: Sequence[Prompt], continuations: Sequence[str | Sequence[int]]
    ) -> list[tuple[float, bool]]:
        """How likely each continuation is after its prompt.

        Args:
            prompts: one for each continuation; an empty list of ids is refused.
            continuations: texts, or token ids.

        Returns:
            For each the log-probability in nats, and whether greedy decoding would give it.

        Raises:
            ValueError: the numbers differ, a continuation is empty, or both together are too long.
        """
        if len(prompts) != len(continuations):
            raise ValueError(f"{len(prompts)} prompts and {len(continuations)} continuations: there must be as many")
        pairs = []
        for number, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
            head = self._texts.encode(prompt)
            tail = self._texts.plain(continuation) if isinstance(continuation, str) else list(continuation)
            if not tail:
                raise ValueError(f"continuation {number} is empty, so there is nothing to score")
            limit = min(self._positions, sum(self._limits))
            if len(head) + len(tail) > limit:
                raise ValueError(
                    f"prompt {number} of {len(head)} tokens and its continuation of {len(tail)} are more than the "
                    f"{limit:g} that fit; shorten them, or make the Generator with a larger max_prompt"
                )
            pairs.append((head, tail))
        ratings = self.rate([[*head, *tail] for head, tail in pairs])
        found = []
        for row, (_, tail) in enumerate(pairs):
            logprobs, likeliest = (part[-len(tail) :] for part in ratings[row])
            found.append((sum(logprobs), all(likeliest)))
        return found

    def rate(self, rows: Sequence[Sequence[int]], share: bool = False) -> dict[int, Rating]:
        """How likely the tokens of each row are, by number of the row.

        Args:
            rows: token ids.
            share: rate this replica's share alone; every replica must call it with the same rows.

        Raises:
            ValueError: a row has fewer than two tokens, or more than the model has positions.
        """
        for number, length in enumerate(map(len, rows)):
            if not 2 <= length <= self._positions:
                raise ValueError(f"row {number} has {length} tokens; it must have 2 to {self._positions:g}")
        rank, world = self._replica(share)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]), reverse=True)
        found: dict[int, Rating] = {}
        start = 0
        with self._decoder.ready():
            while start < len(order):
                width = self._width(len(rows[order[start]]))
                size = 1 if len(rows) == 1 else max(1, min(self._batch_size, _RATED // width))
                # Every replica takes part in every round, if only with a batch of nothing: see cpu_simulation.py.
                mine = order[start : start + size * world][rank::world]
                start += size * world
                if not mine and not self._rt.is_xla:
                    break
                ids, _ = filled([rows[row] for row in mine], width, size if self._rt.is_xla else len(mine))
                logprobs, likeliest = self._decoder.score(ids)
                for place, row in enumerate(mine):
                    end = len(rows[row]) - 1
                    found[row] = Rating(logprobs[place, :end].tolist(), likeliest[place, :end].bool().tolist())
        return found

    # -------------------------------------------------------------------------------------------------------- batches

    def _encode(self, prompts: Sequence[Prompt], sampling: Sampling, truncate: bool) -> list[list[int]]:
        if not prompts:
            raise ValueError("there are no prompts; give one or more")
        most, room = self._limits
        if sampling.max_new_tokens > room:
            raise ValueError(
                f"max_new_tokens={sampling.max_new_tokens} is more than the {room} that this Generator was made for; "
                "make it with a larger max_new_tokens"
            )
        found = []
        for number, prompt in enumerate(prompts):
            try:
                ids = self._texts.encode(prompt)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from error
            limit = min(most, self._positions - sampling.max_new_tokens)
            if len(ids) > limit and truncate and limit > 0:
                ids = ids[-int(limit) :]
            elif len(ids) > self._positions - sampling.max_new_tokens:
                raise ValueError(
                    f"prompt {number}: its {len(ids)} tokens and a reply of up to {sampling.max_new_tokens} are more "
                    f"than the {self._positions} positions of the model; lower max_new_tokens, shorten the prompt, or "
                    "leave out its beginning with truncate=true"
                )
            elif len(ids) > most:
                raise ValueError(
                    f"prompt {number}: it has {len(ids)} tokens, and this Generator was made for {most}; make it with "
                    f"max_prompt={len(ids)}, or leave out the prompt's beginning with truncate=true"
                )
            found.append(ids)
        return found

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        n: int,
        truncate: bool,
        hold: bool = False,
        share: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> dict[tuple[int, int], Completion]:
        if n < 1:
            raise ValueError(f"n={n}: must be 1 or more samples")
        encoded = self._encode(prompts, sampling, truncate)
        rank, world = self._replica(share)
        size = 1 if len(encoded) == 1 else max(1, self._batch_size // n)
        # The longest first: if memory runs out it does so at once. The replicas' batches of a round are alike.
        order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]), reverse=True)
        found: dict[tuple[int, int], Completion] = {}
        for start in range(0, len(order), size * world):
            together = order[start : start + size * world]
            mine = together[rank::world]
            if not mine and not self._in_step(world):
                break
            width = self._width(len(encoded[together[0]]) - 1)
            ids = [encoded[row] for row in mine]
            rows: list[Row] = []
            for rows in self._batch(ids, mine, n, size, sampling, width, world, hold):
                if progress:
                    most = sampling.max_new_tokens
                    progress(len(found) + sum(row.state == ENDED or len(row.tokens) == most for row in rows))
            for place, row in enumerate(rows):
                ended = row.state == ENDED
                found[mine[place // n], place % n] = self._texts.completion(row, ended, sampling)
        return found

    def _replica(self, share: bool) -> tuple[int, int]:
        """The rank and the number of the replicas that share the work."""
        return (self._rt.rank, self._rt.world_size) if share else (0, 1)

    def _in_step(self, world: int) -> bool:
        """Whether the replicas must take the same number of steps: see cpu_simulation.py."""
        return world > 1 and self._rt.device_type == "xla-cpu"

    def _width(self, longest: int) -> int:
        return fitting(longest, self._widths) if self._rt.is_xla else longest

    def _batch(
        self,
        prompts: list[list[int]],
        numbers: Sequence[int],
        n: int,
        size: int,
        sampling: Sampling,
        width: int,
        world: int = 1,
        hold: bool = False,
    ) -> Iterator[list[Row]]:
        """Generates for one batch; gives its rows, prompts x samples, as they are after each block."""
        size = size if self._rt.is_xla else len(prompts)
        ids, lengths = filled([prompt[:-1] for prompt in prompts], width, size)
        last = torch.tensor([prompt[-1] for prompt in prompts] + [0] * (size - len(prompts)))
        batch = Batch(ids, lengths, last)
        table = self._texts.table(sampling)
        if id(table) not in self._tables:  # `PromptCodec` keeps the tables themselves
            (self._tables[id(table)],) = self._decoder.send([table.flatten()])
        rows = [Row(self._texts.opens_reasoning(prompt), state=START) for prompt in prompts for _ in range(n)]
        fillers = size * n - len(rows)
        block = self._decoder.block
        steps = -(-sampling.max_new_tokens // block) * block
        streams = [(numbers[place // n], place % n) for place in range(len(rows))] + [(0, 0)] * fillers
        with self._decoder.ready():
            held, self._held = self._held, None
            places = held.find(prompts) if hold and held else None
            if held and places:
                cache = self._decoder.go_on(held, places, width, size, n, steps)
            else:
                cache = self._decoder.prefill(batch, n, steps)
                self.read += sum(map(len, prompts))
            held = None
            state = self._decoder.begin(
                batch, n, [False] * len(rows) + [True] * fillers, sampling.uniforms(self._steps, streams),
                sampling.knobs(self._decoder.vocabulary), self._tables[id(table)],
                self._occurred(prompts, n, fillers) if sampling.repetition_penalty != 1 else None,
            )  # fmt: skip
            look_up, going, most = table.numpy(), True, sampling.max_new_tokens
            while going and state.done < steps:
                output = self._decoder.decode(sampling.kind, state, cache, min(block, most - state.done))
                for place, row in enumerate(rows):
                    _extend(row, output[:, :, place], look_up, most)
                going = any(row.state != ENDED and len(row.tokens) < most for row in rows)
                if self._in_step(world):
                    going = self._any(going)
                yield rows
        if hold:
            whole = [[*prompts[place // n], *row.tokens] for place, row in enumerate(rows)]
            self._held = Held(cache, whole, [len(prompts[place // n]) - 1 for place in range(len(rows))], width)

    def _any(self, mine: bool) -> bool:
        """Whether it is so in any replica of XLA:CPU."""
        _votes[self._rt.rank] = mine
        self._rt.barrier()
        found = any(_votes.values())
        self._rt.barrier()
        return found

    def _occurred(self, prompts: list[list[int]], n: int, fillers: int) -> torch.Tensor:
        found = torch.zeros(len(prompts), self._decoder.vocabulary)
        for place, prompt in enumerate(prompts):
            found[place, prompt] = 1.0
        return torch.cat([found.repeat_interleave(n, 0), torch.zeros(fillers, self._decoder.vocabulary)])


def _extend(row: Row, output: torch.Tensor, table: Any, most: int) -> None:
    """Adds a block's tokens to a row, up to its end; the device goes on to the end of the block."""
    tokens, logprobs = output.tolist()
    for token, logprob in zip(tokens, logprobs, strict=True):
        if row.state == ENDED or len(row.tokens) == most:
            return
        row.tokens.append(int(token))
        row.logprob += logprob
        row.state = int(table[row.state, int(token)])
