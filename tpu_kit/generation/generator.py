"""Generates text with one model on one device, with programs of a few fixed shapes.

    generator = Generator(model, tokenizer, runtime, data=config.data, max_prompt=512, max_new_tokens=256)
    replies = generator.generate(["2 + 3 = "], Sampling(temperature=0.7, top_p=0.9), n=4)

Prompts are sorted by length and divided into batches of equal size; on XLA, batches are padded to a few widths. The
host reads the device once per block of `block` tokens.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tpu_kit.config.schema import DataConfig
from tpu_kit.distributed.replica import cpu_simulation
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.decoder import BLOCK, Batch, Decoder, cache_slots, filled, fitting, widths_to
from tpu_kit.generation.generation_rules import NO_RULES, ModelDefaults
from tpu_kit.generation.prompts import Completion, Prompt, PromptCodec, Row
from tpu_kit.generation.sampling import Sampling
from tpu_kit.model.base_model import base_model, check_vocabulary, matrix_of, text_config
from tpu_kit.model.rotary import max_positions

if TYPE_CHECKING:
    from tpu_kit.data.images.prompts import PromptImages

_RATED_TOKENS = 4096  # limit of the tokens in a batch of `Generator.rate`


class Rating(NamedTuple):
    """The likelihood of the tokens of a row, from the second token on, so both lists are a token shorter than the row.

    Attributes:
        logprobs: log-probabilities given the earlier tokens, in nats.
        likeliest: for each token, whether it has the largest logit.
    """

    logprobs: list[float]
    likeliest: list[bool]


class Generator:
    """Generates text with one model on one device.

    It does not check the model against transformers; `reference_check.check_generation` does, and a run and `answers`
    call it first.

    Args:
        model: a causal language model of transformers or PEFT, on the runtime's device.
        tokenizer: the model's tokenizer.
        rt: the replica's runtime; in a launched function, `distributed.replica.runtime.current()`.
        data: the reasoning tags, the system prompt, and the date for the chat template.
        max_prompt: limit of a prompt, in tokens.
        max_new_tokens: limit of `Sampling.max_new_tokens`; with max_prompt it sets the length of the cache on XLA.
        batch_size: rows in a batch, samples included, but at least all n samples of a prompt.
        block: tokens of a row between two reads of the device.
        prefill_rows: prompts in one prefill on XLA; None, or no divisor of a batch's prompts: the whole batch.

    Attributes:
        codec: encodes prompts and decodes replies.
        defaults: settings of the model's generation config, applied if `Sampling.model_defaults` is true.

    Raises:
        ValueError: a size is below 1, the tokenizer has more ids than the model has embeddings, or the kit cannot use
            the model's layers or its generation config.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        rt: Runtime,
        *,
        data: DataConfig,
        max_prompt: int = 512,
        max_new_tokens: int = 256,
        batch_size: int = 8,
        block: int = BLOCK,
        prefill_rows: int | None = None,
    ) -> None:
        sizes = {"max_prompt": max_prompt, "max_new_tokens": max_new_tokens, "batch_size": batch_size, "block": block}
        if wrong := [f"{name}={value}" for name, value in sizes.items() if value < 1]:
            raise ValueError(f"{', '.join(wrong)}: must be 1 or more")
        check_vocabulary(len(tokenizer), matrix_of(base_model(model).get_input_embeddings()).weight.shape[0])
        self._rt, self._config = rt, text_config(model)
        self._limits, self._batch_size = (max_prompt, max_new_tokens), batch_size
        self._prefill_rows = prefill_rows
        self._positions = max_positions(self._config) or math.inf
        self.codec = PromptCodec(tokenizer, base_model(model), data)
        self.defaults = ModelDefaults.of(base_model(model).generation_config)
        self._told: set[str] = set()
        self._widths = widths_to(max_prompt)
        self._steps = -(-max_new_tokens // block) * block
        slots = cache_slots(max_prompt, max_new_tokens, block)
        self._decoder = Decoder(model, self._rt, block, slots, self.codec.stops)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        n: int = 1,
        truncate: bool = False,
    ) -> list[Completion]:
        """Completes every prompt in this replica.

        Args:
            prompts: texts, chats (lists of messages) or lists of token ids, which may carry pictures.
            sampling: greedy by default, with the Generator's max_new_tokens.
            n: samples per prompt; they share one prefill.
            truncate: whether to cut off the beginning of a prompt that is too long, unless it carries pictures.

        Returns:
            n consecutive completions per prompt, in the order of the prompts.

        Raises:
            ValueError: there are no prompts, n is below 1, `sampling.max_new_tokens` exceeds the Generator's, a prompt
                is empty or too long, or a chat has pictures or needs a missing template.
        """
        completions = self.share(prompts, sampling or Sampling(self._limits[1]), n, truncate, replica=(0, 1))
        return [completions[row, sample] for row in range(len(prompts)) for sample in range(n)]

    def share(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        n: int = 1,
        truncate: bool = False,
        progress: Callable[[int], object] | None = None,
        replica: tuple[int, int] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> dict[tuple[int, int], Completion]:
        """Completes this replica's share of the prompts; all replicas must call it with the same arguments.

        Rank 0 tells on stderr, once, which settings of the model's generation config apply.

        Args:
            prompts: texts, chats (lists of messages) or lists of token ids, which may carry pictures.
            sampling: how tokens are chosen.
            n: samples per prompt.
            truncate: whether to cut off the beginning of a prompt that is too long. Without it, or if the prompt
                carries pictures, a prompt that is too long is an error.
            progress: called after each block with the number of completions that this replica has finished.
            replica: (rank, number of replicas), (0, 1) for all prompts; None is the runtime's.
            stop: called before each batch and after each block. If it returns True, the current batch and the rest are
                abandoned; on XLA:CPU they are abandoned if it returns True in any replica.

        Returns:
            Completions of this replica by (number of the prompt, number of the sample), from 0; abandoned completions
            are missing. Errors are as in `generate`.
        """
        if n < 1:
            raise ValueError(f"n={n}: must be 1 or more samples")
        sampling = self._filled(sampling)
        encoded = self._encode(prompts, sampling, truncate)
        images = _images_of(encoded)
        rank, world = replica or (self._rt.rank, self._rt.world_size)
        size = 1 if len(encoded) == 1 else max(1, self._batch_size // n)
        # Longest first, so that a shortage of memory shows at once, and the replicas' batches of a round are alike.
        order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]), reverse=True)
        completions: dict[tuple[int, int], Completion] = {}
        for start in range(0, len(order), size * world):
            together = order[start : start + size * world]
            mine = together[rank::world]
            if (not mine and not self._in_step(world)) or (stop and self._any(stop(), world)):
                break
            width = self._width(len(encoded[together[0]]) - 1)
            ids = [encoded[row] for row in mine]
            rows: list[Row] = []
            for rows in self._batch(ids, mine, n, size, sampling, width, world, images):
                if stop and self._any(stop(), world):
                    return completions
                if progress:
                    most = sampling.max_new_tokens
                    progress(len(completions) + sum(row.ended or len(row.tokens) == most for row in rows))
            for index, row in enumerate(rows):
                completions[mine[index // n], index % n] = self.codec.completion(row, sampling)
        return completions

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, truncate: bool = False) -> Iterator[str]:
        """Completes one prompt and yields its text in pieces, at most one per block; joined they are `Completion.text`.

        To print them: `for piece in generator.stream(...): print(piece, end="", flush=True)`. Arguments are as in
        `generate`: a `sampling` of None is greedy, and `truncate` cuts off the beginning of a prompt that is too long.
        The errors of `generate` are raised at the first piece.
        """
        sampling = self._filled(sampling or Sampling(self._limits[1]))
        (ids,) = self._encode([prompt], sampling, truncate)
        sent = ""
        width = self._width(len(ids) - 1)
        for (row,) in self._batch([ids], [0], 1, 1, sampling, width, images=_images_of([ids])):
            text = self.codec.text(row, sampling)
            if not row.ended and len(row.tokens) < sampling.max_new_tokens:
                text = self.codec.settled(text, sampling)
            if len(text) > len(sent):
                yield text[len(sent) :]
                sent = text

    def rate(self, rows: Sequence[Sequence[int]], share: bool = False) -> dict[int, Rating]:
        """Computes the likelihood of the tokens of each row; returns ratings by row number, from 0.

        Args:
            rows: token ids, which may carry pictures.
            share: True: rates only this replica's share, and all replicas must call it with the same rows. False: rates
                all rows here.

        Raises:
            ValueError: a row has fewer than two tokens, or more than the model has positions; or as in `Decoder.score`.
        """
        for number, length in enumerate(map(len, rows)):
            if not 2 <= length <= self._positions:
                raise ValueError(f"row {number} has {length} tokens; it must have 2 to {self._positions:g}")
        rank, world = (self._rt.rank, self._rt.world_size) if share else (0, 1)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]), reverse=True)
        ratings: dict[int, Rating] = {}
        start, images = 0, _images_of(rows)
        with self._decoder.ready():
            while start < len(order):
                width = self._width(len(rows[order[start]]))
                size = 1 if len(rows) == 1 else max(1, min(self._batch_size, _RATED_TOKENS // width))
                # On XLA every replica takes part in every round, even with an empty batch: see cpu_simulation.py.
                mine = order[start : start + size * world][rank::world]
                start += size * world
                if not mine and not self._rt.has_programs:
                    break
                given, count = [rows[row] for row in mine], size if self._rt.has_programs else len(mine)
                ids, _ = filled(given, width, count)
                logprobs, likeliest = self._decoder.score(ids, images.tensors(given, width, count) if images else {})
                for index, row in enumerate(mine):
                    end = len(rows[row]) - 1
                    ratings[row] = Rating(logprobs[index, :end].tolist(), likeliest[index, :end].bool().tolist())
        return ratings

    # -------------------------------------------------------------------------------------------------------- batches

    def _filled(self, sampling: Sampling) -> Sampling:
        """Returns `sampling` with the options of the generation config; rank 0 tells on stderr, once per text."""
        line = self.defaults.describe(sampling)
        if line and self._rt.rank == 0 and line not in self._told:
            self._told.add(line)
            print(line, file=sys.stderr, flush=True)
        return self.defaults.fill(sampling)

    def _encode(self, prompts: Sequence[Prompt], sampling: Sampling, truncate: bool) -> list[list[int]]:
        """Returns the token ids of the prompts; raises as `generate`.

        `truncate` cuts off the beginning of a prompt that is too long; with pictures or without `truncate`, ValueError.
        """
        if not prompts:
            raise ValueError("there are no prompts; give one or more")
        most, room = self._limits
        if sampling.max_new_tokens > room:
            raise ValueError(
                f"max_new_tokens={sampling.max_new_tokens} exceeds the {room} that this Generator was made for; "
                "make it with a larger max_new_tokens"
            )
        encoded = []
        for number, prompt in enumerate(prompts):
            try:
                ids = self.codec.encode(prompt)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from error
            limit = min(most, self._positions - sampling.max_new_tokens)
            if limit < 1:
                raise ValueError(
                    f"max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in the model's "
                    f"{self._positions:g} positions; lower it"
                )
            pictured = hasattr(ids, "pictures")
            if len(ids) > limit and (pictured or not truncate):
                advice = "shorten it, or cut off its beginning with truncate=true"
                raise ValueError(
                    f"prompt {number}: its {len(ids)} tokens exceed the limit of {limit:g}: this Generator's "
                    f"max_prompt, or the model's {self._positions:g} positions minus {sampling.max_new_tokens} for the "
                    f"reply; {'use fewer or smaller pictures' if pictured else advice}"
                )
            encoded.append(ids[-int(limit) :] if len(ids) > limit else ids)
        return encoded

    def _in_step(self, world: int) -> bool:
        """Whether all replicas must run the same number of steps: see cpu_simulation.py."""
        return world > 1 and self._rt.device_type == "xla-cpu"

    def _width(self, longest: int) -> int:
        """Returns the width of a batch for rows of `longest` tokens: on XLA the next fixed width, else `longest`."""
        return fitting(longest, self._widths) if self._rt.has_programs else max(1, longest)

    def _batch(
        self,
        prompts: list[list[int]],
        numbers: Sequence[int],
        n: int,
        size: int,
        sampling: Sampling,
        width: int,
        world: int = 1,
        images: PromptImages | None = None,
    ) -> Iterator[list[Row]]:
        """Generates one batch; after each block yields its rows, n adjacent rows per prompt, the same growing objects.

        `numbers` are the prompts' numbers for the random draws, and `size` is the number of prompts to pad to on XLA.
        `width` is the length of a padded prompt without its last token, `world` the number of replicas in step.
        """
        size = size if self._rt.has_programs else len(prompts)
        ids, lengths = filled([prompt[:-1] for prompt in prompts], width, size)
        last = torch.tensor([prompt[-1] for prompt in prompts] + [0] * (size - len(prompts)))
        batch = Batch(ids, lengths, last, images.tensors(prompts, width, size) if images else {})
        rows = [Row(self.codec.opens_reasoning(prompt)) for prompt in prompts for _ in range(n)]
        fillers = size * n - len(rows)
        block = self._decoder.block
        steps = -(-sampling.max_new_tokens // block) * block
        streams = [(numbers[index // n], index % n) for index in range(len(rows))] + [(0, 0)] * fillers
        with self._decoder.ready():
            at_once = self._prefill_rows if self._prefill_rows and size % self._prefill_rows == 0 else size
            cache = self._decoder.prefill(batch, n, steps, at_once if self._rt.has_programs else size)
            rules = self.defaults.rules if sampling.model_defaults else NO_RULES
            ended = [False] * len(rows) + [True] * fillers
            state = self._decoder.begin(batch, n, ended, sampling.uniforms(self._steps, streams), sampling, rules)
            going, most = True, sampling.max_new_tokens
            while going and state.done < steps:
                tokens, logprobs = self._decoder.decode(state, cache, min(block, most - state.done))
                for row, new, chances in zip(rows, tokens.T.long().tolist(), logprobs.T.tolist(), strict=False):
                    self.codec.extend(row, new, chances, sampling)
                going = any(not row.ended and len(row.tokens) < most for row in rows)
                going = self._any(going, world)
                yield rows

    def _any(self, mine: bool, world: int) -> bool:
        """Returns `mine`; if the replicas run in step (XLA:CPU), whether it is true in any replica."""
        return cpu_simulation.any_replica(self._rt.rank, mine) if self._in_step(world) else mine


def _images_of(prompts: Sequence[Sequence[int]]) -> PromptImages | None:
    """Returns the images that token ids carry, from which batches take their tensors; None for text."""
    pictured: Any = next((ids for ids in prompts if hasattr(ids, "pictures")), None)
    return pictured and pictured.images_among(prompts)
