"""Prefill, decode steps and scores of a batch of token ids on one device.

On XLA these are programs of fixed shape. Batches are padded to a few widths; each width has a prefill and a score
program. One program runs `block` decode steps and changes the cache in place. On other devices the same functions run
eagerly, with a cache as long as the batch needs.

If the layers run as a loop over stacked weights (`model.loop.layer_scan`), the loop carries the cache.

The prefill leaves out the last token of a prompt, which the first decode step processes. So only the decode program
has an output head and sampling.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation import kv_cache
from tpu_kit.generation.decode_sharding import weights_in_place
from tpu_kit.generation.generation_rules import NO_RULES, GenerationRules
from tpu_kit.generation.kv_cache import Buffer, Cache, Prompts, Step, stack_spec
from tpu_kit.generation.sampling import Kind, Sampling
from tpu_kit.machine.chips import GIB
from tpu_kit.model.base_model import base_model, matrix_of, output_embedding
from tpu_kit.model.families import registry as families
from tpu_kit.model.loop import layer_inputs
from tpu_kit.model.loop.layer_calls import kept_states, stacked_prefixes
from tpu_kit.model.loop.layer_inputs import LayerInputs, Visibility
from tpu_kit.model.rotary import fix_rotary
from tpu_kit.torch_tpu.program import ModelProgram, trace_with
from tpu_kit.xla.scan import Tensors, Traced, replace_contents, scan
from tpu_kit.xla.sharding import constrain

BLOCK = 16
"""Default number of steps in a decode program; see `Generator`."""
_NARROWEST = 64  # the smallest width; each next width is twice as large
_SCORE_CHUNK = 64  # positions of a row whose logits are computed at a time
_COMPUTE = "_tpu_kit_compute_dtype"


@dataclass(frozen=True)
class Batch:
    """The prompts of a batch, on the host.

    Attributes:
        ids: (B, P) int64, the prompts without their last token, padded at the end.
        lengths: (B,) int64, lengths without the last token.
        last: (B,) int64, the last tokens.
        images: image inputs of the prompts by their names in `families.INPUTS`, tensors (B, ...); empty for text.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    last: torch.Tensor
    images: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def ends(self) -> torch.Tensor:
        """(B,) int64, positions of the last tokens; with positions in axes, an image has fewer of them than tokens."""
        if (axes := self.images.get("axis_positions")) is None:
            return self.lengths
        present = torch.arange(axes.shape[2]) < self.lengths[:, None]
        return torch.where(present, axes.amax(1), -1).amax(1).long() + 1


def widths_to(most: int) -> list[int]:
    """Returns the widths 64, 128, 256, ...; the last width is `most` rounded up to a multiple of 64."""
    widths = [_NARROWEST]
    while widths[-1] < most:
        widths.append(min(2 * widths[-1], -(-most // _NARROWEST) * _NARROWEST))
    return widths


def fitting(length: int, widths: Sequence[int]) -> int:
    """Returns the first width of at least `length`; if there is none, doubles the last width until it fits."""
    width = next((width for width in widths if width >= length), widths[-1])
    while width < length:
        width *= 2
    return width


def cache_slots(longest_prompt: int, max_new_tokens: int, block: int = BLOCK) -> int:
    """Returns the number of cache slots on XLA: the largest width plus replies rounded up to whole blocks."""
    return widths_to(longest_prompt)[-1] + -(-max_new_tokens // block) * block


def filled(rows: Sequence[Sequence[int]], width: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads rows of at most `width` ids with 0 at the end, and adds rows of zeros up to `count` rows.

    Returns, on the host, ids (count, width) int64 and lengths without padding (count,) int64, 0 for an added row.
    """
    ids, lengths = torch.zeros(count, width, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
        lengths[place] = len(row)
    return ids, lengths


class Choice(NamedTuple):
    """Token ids (B,) int64; log-probabilities (B,) fp32 without rules and penalty, see `Sampling.tempered_logprobs`."""

    token: torch.Tensor
    logprob: torch.Tensor


def choose(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    knobs: torch.Tensor,
    kind: Kind,
    occurred: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
) -> Choice:
    """Chooses a token for each row; all tensors are on the device.

    The options are inputs of the program, not constants, so a new temperature does not recompile it. Log-probabilities
    are from `logits`, not from `scores`.

    Args:
        logits: (B, V) fp32.
        uniform: (B,) fp32 random numbers in [0, 1); "greedy" does not read them.
        knobs: (6,) fp32 from `Sampling.knobs`.
        kind: `Sampling.kind`: "greedy" takes the likeliest token, "plain" draws from all tokens, "filtered" draws after
            top_k, top_p and min_p. Every kind compiles its own program.
        occurred: (B, V) fp32, 1 for tokens that have already occurred; None without a repetition penalty.
        scores: (B, V) fp32, the logits after `GenerationRules.apply`; None without rules, to choose by `logits`.
    """
    temperature, top_k, top_p, min_p, penalty, own = knobs.unbind()
    scores = logits if scores is None else scores
    if occurred is not None:
        scores = torch.where(occurred > 0, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
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
        allowed = (before < top_p) & (chances >= min_p * chances.amax(-1, keepdim=True)) & (rank < top_k)
        token = ids.gather(-1, _draw(chances * allowed, uniform).unsqueeze(-1)).squeeze(-1)
    logits = logits / own
    chosen = logits.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return Choice(token, chosen - torch.logsumexp(logits, -1))


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draws an index (B,) with probabilities proportional to `weights` (B, V), by inverting their cumulative sum."""
    sums = weights.cumsum(-1)
    index = (sums <= uniform.unsqueeze(-1) * sums[:, -1:]).sum(-1)
    # Rounding may give an index after the last positive weight.
    last = torch.where(weights > 0, torch.arange(weights.shape[-1], device=weights.device), 0).amax(-1)
    return torch.minimum(index, last)


class Plan(NamedTuple):
    """Options that select the decode program of a batch, besides the shapes of its inputs.

    Attributes:
        kind: see `Sampling.kind`.
        penalises: whether there is a repetition penalty.
        rules: from the model's generation config.
    """

    kind: Kind
    penalises: bool = False
    rules: GenerationRules = NO_RULES


@dataclass
class State:
    """The state of a batch between blocks of decode steps, on the device; see `Decoder._step`."""

    carried: list[torch.Tensor]
    constant: list[torch.Tensor]
    plan: Plan
    done: int = 0  # number of steps


class Decoder:
    """The prefill, decode and score programs of a model on its device; call its methods within `ready()`.

    Args:
        model: a causal language model of transformers or PEFT, on the runtime's device; changed to call the kit's code.
        rt: the runtime of this replica.
        block: decode steps between two reads of the device.
        slots: the length of the cache on XLA, in tokens; see `cache_slots`.
        stops: ids of tokens that end a row; ids outside of the vocabulary are ignored.

    Raises:
        ValueError: the kit cannot compute the model's layers.
    """

    def __init__(self, model: torch.nn.Module, rt: Runtime, block: int, slots: int, stops: Iterable[int] = ()) -> None:
        from transformers import AttentionInterface

        families.connect(base_model(model), frozen=False)
        self._model, self._rt, self.block, self._slots = model, rt, block, slots
        self._causal = base_model(model)
        limits = (getattr(part, "time_step_limit", None) for part in self._causal.modules())
        self._time_limits = next((one for one in limits if one is not None), None)
        # A trained model may compute matrix products in another dtype than its weights; see causal_lm.py.
        self._dtype: torch.dtype = getattr(model, _COMPUTE, None) or self._causal.dtype
        self._programs: dict[Any, Traced | ModelProgram] = {}
        self._prompt_cache: Cache | None = None  # from the last call of `prompt_cache`
        self._buffers: dict[tuple[int, str], Buffer] = {}  # see `Cache.buffers`
        self.vocabulary = int(matrix_of(self._causal.get_output_embeddings()).weight.shape[0])
        ends = torch.zeros(self.vocabulary, dtype=torch.int64)
        ends[[token for token in stops if token < self.vocabulary]] = 1
        self._end_flags = ends
        (self._ends,) = self._rt.put([ends])
        AttentionInterface.register(kv_cache.CACHED, kv_cache.cached_attention)  # so transformers makes no mask

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Context manager in which the model uses the cache, in evaluation mode and without gradients; then undone."""
        implementation, training = self._causal.config._attn_implementation, self._model.training
        families.set_attention(self._causal, kv_cache.CACHED)
        self._model.eval()
        kind, mixed = self._rt.local_device.type, self._dtype == torch.bfloat16 and hasattr(self._model, _COMPUTE)
        compute = torch.autocast(kind, self._dtype, cache_enabled=False) if mixed else contextlib.nullcontext()
        undo = fix_rotary(self._causal)
        try:
            with torch.no_grad(), compute, weights_in_place(self._model, stacked_prefixes(self._model)):
                yield
        finally:
            undo()
            families.set_attention(self._causal, implementation)
            self._model.train(training)

    # ------------------------------------------------------------------------------------------------------- prefill

    def prefill(self, batch: Batch, samples: int, steps: int, rows: int | None = None) -> Cache:
        """Returns a cache on the device with the prompts, except their last tokens, and room for `steps` more tokens.

        It has B * samples rows; the `samples` rows of a prompt are adjacent. The next `prefill` may overwrite it.

        Args:
            batch: the B prompts, on the host.
            samples: samples per prompt.
            steps: tokens that follow; on XLA, the prompts' width P + steps must be at most the Decoder's `slots`.
            rows: prompts in one prefill, a divisor of B; None means all.
        """
        count, width = batch.ids.shape
        rows = rows or count
        if self._rt.has_programs:
            assert width + steps <= self._slots, (width, steps, self._slots)
        cache = self.prompt_cache(rows, width + steps)

        names = list(batch.images)

        def fill(ids: torch.Tensor, lengths: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
            images, stacks = dict(zip(names, tensors, strict=False)), tensors[len(names) :]
            mine, positions = cache.of(stacks, Prompts(lengths)), torch.arange(ids.shape[1], device=ids.device)
            self._run(self._causal.get_decoder(), ids, positions[None].expand_as(ids), mine, images=images)
            mine.store_states()
            return mine.tensors

        copies, prompts = None, torch.arange(count).repeat_interleave(samples)
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            sent = [batch.ids[part], batch.lengths[part], *(one[part] for one in batch.images.values())]
            inputs = [*self._rt.put(sent), *cache.tensors]
            key = "prefill", rows, width, *(tuple(one.shape[1:]) for one in batch.images.values())
            self._replace(cache, self._program(key, fill, inputs)(*inputs))
            if rows == len(prompts):
                return cache
            index = (prompts - start).clamp(0, rows - 1)  # the rows of other parts are arbitrary
            if copies is None:
                copies = self.copy_prompts(cache, index)
            else:
                self._add_prompts(copies, cache, index, prompts >= start)
        assert copies is not None
        return copies

    def copy_prompts(self, cache: Cache, index: torch.Tensor) -> Cache:
        """Returns a new cache with copies of the rows `index` of `cache`; `index` is (B,) int64 on the host."""
        (index,) = self._rt.put([index])
        copies = cache.of([_sharded(tensor.index_select(1, index)) for tensor in cache.tensors])
        self._rt.sync()
        return copies

    def _add_prompts(self, copies: Cache, cache: Cache, index: torch.Tensor, chosen: torch.Tensor) -> None:
        """Copies the rows `index` (B,) of `cache` into `copies`, in place, for rows whose `chosen` (B,) is true."""
        index, flags = self._rt.put([index, chosen.to(self._dtype).view(1, -1, 1, 1, 1)])
        pairs = zip(cache.tensors, copies.tensors, strict=True)
        found = [torch.where(flags > 0, tensor.index_select(1, index), old) for tensor, old in pairs]
        del pairs  # it holds a pair
        self._replace(copies, found)

    def _replace(self, cache: Cache, contents: list[torch.Tensor]) -> None:
        """Replaces the contents of a cache, sharded like its stacks, and clears the list `contents`."""
        contents[:] = map(_sharded, contents)
        replace_contents(cache.tensors, contents)
        self._rt.sync()

    # -------------------------------------------------------------------------------------------------------- decode

    def begin(
        self,
        batch: Batch,
        samples: int,
        ended: Sequence[bool],
        uniforms: torch.Tensor,
        sampling: Sampling,
        rules: GenerationRules = NO_RULES,
    ) -> State:
        """Sends the inputs of the decode steps to the device; returns the state for `decode`.

        Args:
            batch: the B prompts, on the host, as given to `prefill`.
            samples: samples per prompt.
            ended: B * samples booleans; True for a row that is padding, for which `decode` returns only -1 and 0.
            uniforms: (steps, rows) fp32 on the host, from `Sampling.uniforms`, for all steps of the reply.
            sampling: the options; None in an option has no effect. `max_new_tokens` and `stop` are not read.
            rules: from the model's generation config; ValueError if a bias is for a token outside of the vocabulary.
        """
        width = batch.ids.shape[1]
        every = batch.lengths, batch.ends, batch.last
        lengths, starts, last = (tensor.repeat_interleave(samples) for tensor in every)
        flags = torch.tensor(ended, dtype=torch.int64)
        plan = Plan(sampling.kind, sampling.penalises, rules)
        carried = [last, flags, torch.zeros(1, dtype=torch.int64)]
        carried += [self._occurred(batch, samples)] if plan.penalises else []
        if rules.reads_tokens:
            slots = self._slots if self._rt.has_programs else width + len(uniforms)
            said = F.pad(batch.ids, (0, slots - width)).repeat_interleave(samples, 0)
            carried.append(said)
        constant = [lengths, starts, torch.tensor([width]), uniforms, sampling.knobs(self.vocabulary)]
        constant += rules.tensors(self.vocabulary, self._end_flags) if rules != NO_RULES else []
        sent = self._rt.put([*carried, *constant])
        return State(sent[: len(carried)], [self._ends, *sent[len(carried) :]], plan)

    def _occurred(self, batch: Batch, samples: int) -> torch.Tensor:
        """Returns (rows, V) fp32: 1 for tokens of the prompt, except its last token, which the first step adds."""
        present = torch.arange(batch.ids.shape[1]) < batch.lengths[:, None]
        occurred = torch.zeros(len(batch.ids), self.vocabulary + 1)
        occurred.scatter_(1, torch.where(present, batch.ids, self.vocabulary), 1.0)
        return occurred[:, :-1].repeat_interleave(samples, 0)

    def decode(self, state: State, cache: Cache, steps: int) -> torch.Tensor:
        """Runs a block of decode steps, and changes `state` (of `begin`) and `cache` (of `prefill`).

        `steps` is the number of steps. On XLA it has no effect: there are always `block` steps. On the CPU there are
        fewer steps if all rows end.

        Returns:
            (2, steps, rows) fp32 on the host: first the token ids, then their log-probabilities in nats. After the
            token that ends a row, its ids are -1 and its log-probabilities 0.
        """
        if self._rt.has_programs:
            return self._decode_program(state, cache)
        reports = []
        for _ in range(steps):
            *state.carried, report = self._step(state.plan, state.carried, state.constant, cache)
            state.done += 1
            reports.append(report)
            if self._rt.device_type == "cpu" and bool(state.carried[1].all()):
                break
        return torch.stack(reports, 1).cpu()

    def _decode_program(self, state: State, cache: Cache) -> torch.Tensor:
        """Does the work of `decode` with a program of `block` steps."""
        plan, count = state.plan, len(state.carried)
        # The stacks are passed in reverse, so that XLA writes each stack over itself. torch_xla numbers a program's
        # inputs from the last argument and its results by the age of their tensors. XLA writes a result over the first
        # unused input of the same size. In the other order, stacks would change places and be copied.
        inputs = [*state.carried, *reversed(cache.tensors), *state.constant]
        carried = count + len(cache.tensors)

        def step(*tensors: torch.Tensor) -> list[torch.Tensor]:
            mine = cache.of(tensors[count:carried][::-1])
            *changed, output = self._step(plan, tensors[:count], tensors[carried:], mine)
            return [*changed, *reversed(mine.tensors), output]

        shapes = (plan, count, len(state.carried[0]), *(tuple(tensor.shape) for tensor in state.constant))
        program = self._program(("decode", *shapes), step, inputs, self.block, carried)
        results = program(*inputs)
        report, state.carried = results.pop(), results[:count]
        del results[:count]
        results.reverse()
        state.done += self.block
        self._replace(cache, results)
        # (block, 2, B): the only read of the device in a block.
        return self._rt.to_host([report])[0].transpose(0, 1)

    def _step(
        self, plan: Plan, carried: Sequence[torch.Tensor], constant: Sequence[torch.Tensor], cache: Cache
    ) -> list[torch.Tensor]:
        """Generates one token for every row; returns the new carried tensors, then (2, B) fp32 as in `decode`.

        Args:
            plan: of the batch.
            carried: the last tokens (B,) int64, whether rows have ended (B,) int64 and the number of this step (1,)
                int64. With a repetition penalty, also the tokens that occurred (B, V) fp32. With rules that read
                tokens, also the tokens so far (B, T) int64.
            constant: whether each token ends a row (V,) int64, lengths (B,), positions of the last tokens (B,),
                width (1,), uniforms (T, B), knobs (6,), and `GenerationRules.tensors`.
            cache: gets the new keys and values.
        """
        token, ended, step, *more = carried
        ends, lengths, starts, width, uniforms, knobs, *tensors = constant
        occurred = more.pop(0).scatter(1, token[:, None], 1.0) if plan.penalises else None
        said = more[0].scatter(1, (lengths + step)[:, None], token[:, None]) if plan.rules.reads_tokens else None
        slots = Cache(cache.stacks, Step(lengths, width, step))
        slots.time_limits = self._time_limits
        position = (starts + step)[:, None]
        output = self._run(self._causal, token[:, None], position, slots)
        slots.store_states()
        uniform = uniforms.index_select(0, step)[0]
        logits = output.logits[:, -1].float()
        scores = plan.rules.apply(logits, step, lengths + step, said, tensors) if tensors else None
        choice = choose(logits, uniform, knobs, plan.kind, occurred, scores)
        open_ = ended == 0
        report = torch.stack([torch.where(open_, choice.token, -1).float(), choice.logprob * open_])
        kept = [tensor for tensor in (occurred, said) if tensor is not None]
        return [choice.token, torch.maximum(ended, ends.index_select(0, choice.token)), step + 1, *kept, report]

    # --------------------------------------------------------------------------------------------------------- score

    def score(self, ids: torch.Tensor, images: Mapping[str, torch.Tensor] = MappingProxyType({})) -> torch.Tensor:
        """Computes log-probabilities of given tokens; only the logits of one chunk of positions exist at a time.

        Args:
            ids: (B, W) int64 on the host, padded at the end.
            images: image inputs of the rows on the host, as in `Batch`.

        Returns:
            (2, B, W - 1) fp32 on the host: the log-probabilities of tokens 1 to W - 1, in nats, and 1 if the token has
            the largest logit, else 0. Values at padding are meaningless.

        Raises:
            ValueError: the output head is not a plain linear layer.
        """

        def scores(ids: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
            return [self._scores({"input_ids": ids} | dict(zip(images, tensors, strict=True)))]

        sent = self._rt.put([ids, *images.values()])
        (found,) = self._program(("score", *(tuple(one.shape) for one in sent)), scores, sent)(*sent)
        self._rt.sync()
        return self._rt.to_host([found])[0][:, :, :-1]

    def _scores(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the result of `score` on the device, (2, B, W); the last position is meaningless."""
        head, ids = output_embedding(self._model), batch["input_ids"]
        positions = torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)
        given, seen, additions = families.decoder_inputs(self._causal, batch)
        with layer_inputs.bound(LayerInputs(Visibility(**seen), None, self._rt.device_type, additions)):
            output = self._causal.get_decoder()(**{"position_ids": positions, **given}, use_cache=False)
        kept_states(self._causal.get_decoder())  # takes states of a trace, which no program computes
        wanted = torch.cat([ids[:, 1:], ids[:, :1]], 1)
        count = -(-ids.shape[1] // _SCORE_CHUNK)
        padding = count * _SCORE_CHUNK - ids.shape[1]
        states = F.pad(output.last_hidden_state, (0, 0, 0, padding)).unflatten(1, (count, -1)).transpose(0, 1)
        targets = F.pad(wanted, (0, padding)).unflatten(1, (count, -1)).transpose(0, 1)

        def body(weights: Tensors, chunk: Tensors) -> tuple[Tensors, torch.Tensor]:
            named: dict[str, Any] = dict(zip(head.tensors, weights, strict=True))
            logits = head._replace(**named).logits(chunk[0])
            chosen = logits.gather(-1, chunk[1].unsqueeze(-1)).squeeze(-1)
            likeliest = (logits.argmax(-1) == chunk[1]).float()
            return weights, torch.stack([chosen - torch.logsumexp(logits, -1), likeliest])

        _, found = scan(body, [*head.tensors.values()], [states, targets])  # a loop: a long row has hundreds of chunks
        return found.movedim(0, 2).flatten(2)[:, :, : ids.shape[1]]

    # ---------------------------------------------------------------------------------------------------- the device

    def _run(
        self,
        module: Any,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        device_type: str | None = None,
        images: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> Any:
        """Runs `module`, the model or its decoder, on ids (B, S) at positions (B, S); fills the cache.

        Returns the output of `module`. `device_type` selects kernels (None: the runtime's); `images` as in `Batch`.
        """
        named = {_cache_name(module.__class__): cache}
        given, seen, additions = families.decoder_inputs(self._causal, {"input_ids": ids, **images})
        inputs = LayerInputs(Visibility(**seen), cache, device_type or self._rt.device_type, additions)
        with layer_inputs.bound(inputs):
            return module(**{"position_ids": positions, **given}, use_cache=True, **named)

    def prompt_cache(self, rows: int, slots: int = 0) -> Cache:
        """Returns the cache of the last call, as it is, if it has these rows and slots; else a new cache of zeros.

        The cache is on the device. On XLA, the argument `slots` has no effect: the Decoder's `slots` replaces it. On a
        mesh, a line about a new cache is printed.
        """
        slots = self._slots if self._rt.has_programs else slots
        if self._prompt_cache is not None and self._prompt_cache.rows_and_slots == (rows, slots):
            return self._prompt_cache
        if not self._buffers:  # runs one token through the layers; on XLA it is only traced
            one = torch.zeros(1, 1, dtype=torch.int64, device=self._rt.local_device)
            empty = Cache({})

            def fill(one: torch.Tensor) -> list[torch.Tensor]:
                self._run(self._causal.get_decoder(), one, one, empty, "cpu")
                empty.store_states()
                return []

            if self._rt.traces_steps:
                trace_with(self._model, fill, [one])
            else:
                fill(one)
            self._buffers = empty.buffers
        mesh, size, stacks = active_mesh(), 0, {}
        for name, need in self._buffers.items():
            shape = need.turns, rows, need.heads, slots if need.slots is None else need.slots, need.width
            # Every stack needs its own tensor: a tensor that is sent several times would be one shared buffer.
            (stacks[name],) = self._rt.put([torch.zeros(shape, dtype=need.dtype or self._dtype)], stack_spec(shape))
            size += math.prod(mesh.shard_shape(stack_spec(shape), shape)) * stacks[name].dtype.itemsize
        if mesh.size > 1:
            used = f"{size / GIB:.2f} GiB a device"
            print(f"cache            {used}; in the last layer {shape[1:]}, {stack_spec(shape)[1:]}", flush=True)
        self._prompt_cache = Cache(stacks)
        return self._prompt_cache

    def _program(
        self, key: Any, fn: Any, example: Sequence[torch.Tensor], steps: int | None = None, carried: int = 0
    ) -> Any:
        """Returns `fn` as a program for tensors like `example`, built once per key; without XLA, `fn` itself.

        `key` is a tuple of the program's name and all that differs between programs, such as shapes. With `steps`, the
        program calls `fn` that many times: the first `carried` tensors pass from step to step, the others are constant.
        It returns the carried tensors, then the other results of `fn`, stacked by step.
        """
        if not self._rt.has_programs:
            return fn
        name = str(key[0])
        if key not in self._programs and self._rt.traces_steps:
            self._programs[key] = ModelProgram(name, fn, example, self._model, steps, carried)
        elif key not in self._programs:
            weights = [*self._model.parameters(), *self._model.buffers()]
            self._programs[key] = Traced(name, fn, example, weights, steps, carried)
        return self._programs[key]


@functools.cache
def _cache_name(kind: Any) -> str:
    """Returns the name of a model's cache argument: `cache` in transformers 5.24 and later."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


def _sharded(stack: torch.Tensor) -> torch.Tensor:
    """Returns a stack of a cache, sharded by `stack_spec` on a mesh."""
    return constrain(stack, stack_spec(stack.shape))
