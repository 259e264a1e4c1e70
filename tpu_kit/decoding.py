"""Prefill, decode steps and scores of a batch on one device: the part of generation that never sees a text.

On XLA each is one program of fixed shape: a prefill for each width of prompts, and one program for `block` decode
steps, whose cache is changed in place. Elsewhere the same functions run eagerly, and the cache is as long as the batch
needs.

On XLA the prefill takes all of a prompt but its last token, and the first decode step takes that one: so a prefill
needs no output head and no sampling, and all that chooses tokens is in the one decode program. Elsewhere a step costs
more than a program, so the prefill is the first step as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpu_kit import kvcache, rope
from tpu_kit import model as models
from tpu_kit.kvcache import Buffers, Held, Recorder, Slots
from tpu_kit.padding import Batch
from tpu_kit.programs import Traced, replace_contents, write_slot
from tpu_kit.runtime import Runtime
from tpu_kit.sampling import ENDED, START, Kind, choose
from tpu_kit.scoring import token_scores

_COMPUTE = "_tpu_kit_compute_dtype"


@dataclass
class State:
    """What goes from block to block, on the device: see `Decoder._step`."""

    width: int
    done: int  # steps
    carried: list[torch.Tensor]
    constant: list[torch.Tensor]
    full: bool
    logits: torch.Tensor | None = None  # of the first step, if the prefill took it


class Decoder:
    """A model on its device, made ready to generate; used as a context manager, after which the model is as before.

    Args:
        model: a causal language model of transformers, or PEFT's around one, on the runtime's device.
        rt: the replica.
        block: decode steps between two reads of the device.
        slots: the length of the cache on XLA.
    """

    def __init__(self, model: torch.nn.Module, rt: Runtime, block: int, slots: int) -> None:
        self._model, self._rt, self.block, self._slots = model, rt, block, slots
        self._causal = kvcache.causal(model)
        # Of a model that the kit trains the matrix products run in another dtype than its weights have: see model.py.
        self._dtype: torch.dtype = getattr(model, _COMPUTE, None) or self._causal.dtype
        self._programs: dict[Any, Traced] = {}
        self._prompt_cache: Buffers | None = None  # of the last shape: only one is kept
        self._sample_cache: Buffers | None = None
        self._first_logits: torch.Tensor | None = None
        self.element_bytes = self._dtype.itemsize
        self.vocabulary = int(self._causal.get_output_embeddings().weight.shape[0])
        kvcache.register()

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Lets the model attend over our cache, in evaluation mode and without gradients."""
        own, training = self._causal.config._attn_implementation, self._model.training
        self._causal.set_attn_implementation(kvcache.CACHED)
        self._model.eval()
        kind, mixed = self._rt.local_device.type, self._dtype == torch.bfloat16 and hasattr(self._model, _COMPUTE)
        compute = torch.autocast(kind, self._dtype, cache_enabled=False) if mixed else contextlib.nullcontext()
        try:
            with torch.no_grad(), compute, rope.fixed(self._causal):
                yield
        finally:
            self._causal.set_attn_implementation(own)
            self._model.train(training)

    # ------------------------------------------------------------------------------------------------------- prefill

    def prefill(self, batch: Batch, samples: int, steps: int) -> Buffers:
        """Fills a cache with room for `steps` more with the prompts; each one in as many rows as it has samples."""
        width = batch.ids.shape[1]
        if self._rt.is_xla:
            assert width + steps <= self._slots, (width, steps, self._slots)
            return self._prefill_program(batch, samples)
        return self._prefill_and_step(batch, samples, steps)

    def _prefill_and_step(self, batch: Batch, samples: int, steps: int) -> Buffers:
        rows, width = batch.ids.shape
        device = self._rt.local_device
        ids, lengths = torch.cat([batch.ids, batch.last[:, None]], 1).to(device), batch.lengths.to(device)
        columns = torch.arange(width, device=device)[None].expand(rows, width)
        recorder = Recorder(None if batch.full else lengths, width)
        output = self._causal(
            input_ids=ids,
            position_ids=torch.cat([columns, lengths[:, None]], 1),
            logits_to_keep=1,
            **self._with(recorder),
        )
        self._first_logits = output.logits[:, -1].float().repeat_interleave(samples, 0)
        return self._copied([*recorder.found.keys, *recorder.found.values], samples, width + steps)

    def _copied(self, found: list[torch.Tensor], samples: int, slots: int) -> Buffers:
        """Keys and values, each row as often as it has samples, with room behind them; not on XLA."""
        shape, new = self._shape(len(found[0]) * samples, slots), []
        for have in found:
            new.append(torch.empty(shape, dtype=self._dtype, device=have.device))
            new[-1][:, :, : have.shape[2]] = have.repeat_interleave(samples, 0) if samples > 1 else have
        return Buffers(new[: len(self._layers)], new[len(self._layers) :])

    def _keys_and_values(self, ids: torch.Tensor) -> Buffers:
        recorder, positions = Recorder(), torch.arange(ids.shape[1], device=ids.device)
        self._causal.get_decoder()(
            input_ids=ids,
            position_ids=positions[None].expand_as(ids),
            **self._with(recorder),
        )
        return recorder.found

    def _prefill_program(self, batch: Batch, samples: int) -> Buffers:
        rows, width = batch.ids.shape
        cache = self._prompt_cache = self._buffers(self._prompt_cache, rows)

        def fill(ids: torch.Tensor, *buffers: torch.Tensor) -> list[torch.Tensor]:
            keys, values = self._keys_and_values(ids)
            start = torch.zeros(1, dtype=torch.int64, device=ids.device)
            return [write_slot(old, new.to(old.dtype), start) for old, new in zip(buffers, keys + values, strict=True)]

        (ids,) = self.send([batch.ids])
        inputs = [ids, *cache.keys, *cache.values]
        program = self._program(("prefill", rows, width), fill, inputs)
        replace_contents(inputs[1:], program(*inputs))
        self._rt.sync()
        return self._in_samples(cache, samples)

    def _in_samples(self, cache: Buffers, samples: int) -> Buffers:
        if samples == 1:
            return cache
        both, rows = [*cache.keys, *cache.values], len(cache.keys[0])
        (index,) = self.send([torch.arange(rows).repeat_interleave(samples)])
        copies = self._sample_cache = self._buffers(self._sample_cache, rows * samples)
        replace_contents([*copies.keys, *copies.values], [theirs.index_select(0, index) for theirs in both])
        self._rt.sync()
        return copies

    def go_on(self, held: Held, places: Sequence[int], width: int, count: int, samples: int, steps: int) -> Buffers:
        """Fills a cache from what another batch left, in the place of a prefill.

        Args:
            held: what it left.
            places: its rows that are gone on from.
            width: P of the new batch.
            count: its prompts, those that fill it up included.
            samples: of each.
            steps: room for so many tokens more.
        """
        rows, source = self.send(list(held.source(places, count, self._slots if self._rt.is_xla else width)))
        if not self._rt.is_xla:
            return self._copied(kvcache.gathered(held.cache, rows, source), samples, width + steps)
        cache = self._prompt_cache = self._buffers(self._prompt_cache, count)
        replace_contents([*cache.keys, *cache.values], kvcache.gathered(held.cache, rows, source))
        self._rt.sync()
        return self._in_samples(cache, samples)

    # -------------------------------------------------------------------------------------------------------- decode

    def begin(
        self,
        batch: Batch,
        samples: int,
        ended: Sequence[bool],
        uniforms: torch.Tensor,
        knobs: torch.Tensor,
        table: torch.Tensor,
        occurred: torch.Tensor | None,
    ) -> State:
        """Sends what decoding begins with.

        Args:
            batch: the prompts.
            samples: of each.
            ended: rows that are there to fill the batch up.
            uniforms: (steps, rows) as `Sampling.uniforms` gives them.
            knobs: as `Sampling.knobs` gives them.
            table: as `sampling.stop_table` gives it, flat; on the device.
            occurred: (rows, V) fp32 for the repetition penalty.
        """
        width = batch.ids.shape[1]
        lengths, last = (tensor.repeat_interleave(samples) for tensor in (batch.lengths, batch.last))
        state = torch.tensor([ENDED if one else START for one in ended])
        carried = [last, state, torch.zeros(1, dtype=torch.int64)] + ([] if occurred is None else [occurred])
        sent = self.send([*carried, lengths, torch.tensor([width]), uniforms, knobs])
        logits, self._first_logits = self._first_logits, None
        return State(width, 0, sent[: len(carried)], [*sent[len(carried) :], table], batch.full, logits)

    def decode(self, kind: Kind, state: State, cache: Buffers, steps: int) -> torch.Tensor:
        """Runs a block of steps.

        Returns:
            (2, steps, B) fp32 on the host: token ids, -1 after the end of a row; and their log-probabilities. On XLA
            the steps are always `block`. Elsewhere fewer come back once all rows have ended, seen on the CPU at once.
        """
        if self._rt.is_xla:
            return self._decode_program(kind, state, cache)
        found = []
        for _ in range(steps):
            *state.carried, output = self._step(kind, state.carried, state.constant, cache, state)
            state.done += 1
            found.append(output)
            if self._rt.device_type == "cpu" and bool((state.carried[1] == ENDED).all()):
                break
        return torch.stack(found, 1).cpu()

    def _decode_program(self, kind: Kind, state: State, cache: Buffers) -> torch.Tensor:
        layers, count = len(self._layers), len(state.carried)
        buffers = [*cache.keys, *cache.values]
        inputs = [*state.carried, *buffers, *state.constant]
        carried = count + len(buffers)

        def step(*tensors: torch.Tensor) -> list[torch.Tensor]:
            mine = Buffers(list(tensors[count : count + layers]), list(tensors[count + layers : carried]))
            *changed, output = self._step(kind, tensors[:count], tensors[carried:], mine, None)
            return [*changed, *mine.keys, *mine.values, output]

        shapes = (kind, count, len(state.carried[0]), *(tuple(tensor.shape) for tensor in state.constant))
        program = self._program(("decode", *shapes), step, inputs, self.block, carried)
        found = program(*inputs)
        output, state.carried = found[-1], found[:count]
        replace_contents(buffers, found[count:carried])
        del found
        state.done += self.block
        self._rt.sync()
        # (block, 2, B) from the device: the one read of the block.
        return self._rt.to_host([output])[0].transpose(0, 1)

    def _step(
        self,
        kind: Kind,
        carried: Sequence[torch.Tensor],
        constant: Sequence[torch.Tensor],
        cache: Buffers,
        at: State | None,
    ) -> list[torch.Tensor]:
        """One token for every row: the carried tensors, changed, and (2, B) fp32 for the host.

        Args:
            kind: how to choose.
            carried: the last tokens (B,) int64, states of the stop test (B,) int64, the number of this step (1,) int64
                and, with a repetition penalty, what occurred (B, V) fp32.
            constant: lengths (B,), width (1,), uniforms (T, B), knobs (5,), stop table (states * V,).
            cache: changed, unless the host has the logits of this step.
            at: the `State` where the host may use its numbers; None in a program for all lengths.
        """
        token, state, step, *occurred = carried
        lengths, width, uniforms, knobs, table = constant
        seen = [occurred[0].scatter(1, token[:, None], 1.0)] if occurred else []
        if at is None:
            slots = Slots(cache, lengths, width, step, lambda buffer, new: write_slot(buffer, new, width + step))
            logits = self._logits(token, lengths + step, slots)
        elif at.logits is not None:
            logits, at.logits = at.logits, None
        else:
            slot = at.width + at.done

            def write(buffer: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
                buffer[:, :, slot : slot + 1] = new
                return buffer

            slots = Slots(cache, lengths, at.width, at.done, write, slot + 1, at.full)
            logits = self._logits(token, lengths + step, slots)
        uniform = uniforms.index_select(0, step)[0]
        choice = choose(logits, uniform, knobs, kind, *seen)
        alive = state != ENDED
        after = table.index_select(0, state * self.vocabulary + choice.token).to(torch.int64)
        told = torch.where(alive, choice.token, torch.full_like(token, -1))
        return [choice.token, after, step + 1, *seen, torch.stack([told.float(), choice.logprob * alive])]

    def _logits(self, token: torch.Tensor, position: torch.Tensor, slots: Slots) -> torch.Tensor:
        output = self._causal(
            input_ids=token[:, None],
            position_ids=position[:, None],
            **self._with(slots),
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    # --------------------------------------------------------------------------------------------------------- score

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        """How likely each token of rows was.

        Args:
            ids: (B, W) int64, filled up behind.

        Returns:
            (2, B, W - 1) fp32 on the host: the log-probability of tokens 1 to W - 1 after those before them, and 1
            where it was the likeliest.
        """
        (sent,) = self.send([ids])
        if not self._rt.is_xla:
            found = token_scores(self._model, self._causal, sent, self._rt.device_type)
        else:

            def scores(ids: torch.Tensor) -> list[torch.Tensor]:
                return [token_scores(self._model, self._causal, ids, self._rt.device_type)]

            (found,) = self._program(("score", *ids.shape), scores, [sent])(sent)
            self._rt.sync()
        return self._rt.to_host([found])[0][:, :, :-1]

    # ---------------------------------------------------------------------------------------------------- the device

    def _with(self, cache: Recorder | Slots) -> dict[str, Any]:
        """What makes transformers' layers use our cache, and `kvcache.cached_attention` know of it."""
        return {"past_key_values": cache, "use_cache": True, "cache": cache, "device_type": self._rt.device_type}

    @property
    def _layers(self) -> range:
        return range(models.text_config(self._model).num_hidden_layers)

    def _shape(self, rows: int, slots: int) -> tuple[int, int, int, int]:
        return (rows, *kvcache.cache_shape(models.text_config(self._model), slots))

    def _buffers(self, have: Buffers | None, rows: int) -> Buffers:
        if have is not None and have.keys[0].shape[0] == rows:
            return have
        shape = self._shape(rows, self._slots)
        # A tensor for each: one that is sent several times would be one buffer for all layers.
        return Buffers(*(self.send([torch.zeros(shape, dtype=self._dtype) for _ in self._layers]) for _ in "kv"))

    def send(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies CPU tensors to the device."""
        named = {str(index): tensor for index, tensor in enumerate(tensors)}
        return list(self._rt.send([named])[0].values())

    def _program(
        self, key: Any, fn: Any, example: Sequence[torch.Tensor], steps: int | None = None, carried: int = 0
    ) -> Traced:
        if key not in self._programs:
            weights = [*self._model.parameters(), *self._model.buffers()]
            self._programs[key] = Traced(str(key[0]), fn, example, weights, steps, carried)
        return self._programs[key]
