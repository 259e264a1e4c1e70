"""Prepares a run's data for its model, and describes the rows and batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tpu_kit.config.loader import BatchPlan, TrainConfig
from tpu_kit.config.schema import LEAST_UPDATES
from tpu_kit.data.chat.new_tokens import new_tokens, occurrences
from tpu_kit.data.held_out import NONE, Questions
from tpu_kit.data.prepare import MappedData, Prepared, on_disk, prepare, units_of
from tpu_kit.data.rows.sources import SYNTHETIC
from tpu_kit.machine.storage.run_folder import find_run
from tpu_kit.model.base_model import check_vocabulary
from tpu_kit.model.weights.loading import read_config
from tpu_kit.model.weights.source import check_positions, load_tokenizer
from tpu_kit.training.outcome import MORE_UPDATES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from tpu_kit.recipes.run_plan import RunPlan

SHOWN_REPORT = "TPU_KIT_SHOWN_REPORT"
"""Environment variable with the data report that a notebook has shown; the run does not print it again."""


def prepare_run(config: TrainConfig, model: PreTrainedConfig | None = None) -> Prepared:
    """Prepares the data of a run for its model's tokenizer and, with LoRA, finds its new tokens.

    `model` is the model's configuration; None reads it. Prompts on which the initial adapter lora.adapter was trained
    are not held out. Raises ValueError as `prepare`, or if the tokenizer has more tokens than the model, or
    data.max_length is more than its positions.
    """
    model = model or read_config(config.model)
    start = Questions.read(find_run(config.lora.adapter).folder) if config.lora.adapter else None
    text = model.get_text_config() if model else None  # if it is None, loading the model says why
    tokenizer = None if config.data.source == SYNTHETIC else load_tokenizer(config.model)
    check_positions(config.data.max_length, getattr(text, "max_position_embeddings", None))
    check_vocabulary(len(tokenizer or ()), getattr(text, "vocab_size", None))
    if config.data.streaming:
        from tpu_kit.data.stream.opening import prepare_stream

        prepared = prepare_stream(config.data, tokenizer)
    else:
        prepared = prepare(
            config.data,
            tokenizer,
            vocab_size=getattr(text, "vocab_size", None),
            learned=start.trained if start else NONE,
            model=config.model,
            **units_of(config),
        )
    if tokenizer is None or not config.lora.r:  # full fine-tuning trains the embeddings
        return prepared
    used, lora = np.flatnonzero(occurrences(prepared.train.documents)), config.lora
    new = new_tokens(config.model, text, tokenizer, used)
    every = lora.full or lora.finds_tokens or lora.adapts_embeddings
    learned = new if every else tuple(token for token in new if token in lora.token_names)
    return replace(prepared, new_tokens=new, learned_tokens=learned)


def with_tokens(config: TrainConfig, prepared: Prepared) -> TrainConfig:
    """Returns the run with lora.tokens=added replaced by the rows' new tokens; other runs are returned unchanged.

    Raises ValueError if lora.tokens is added and `prepared.new_tokens` is empty.
    """
    if not config.lora.finds_tokens:
        return config
    if not prepared.new_tokens:
        raise ValueError(
            "lora.tokens=added: the rows have no added token with an untrained embedding, or the weights are not "
            "safetensors files on this machine: name the tokens, or set it to null"
        )
    return replace(config, lora=replace(config.lora, tokens=prepared.new_tokens))


@contextlib.contextmanager
def for_replicas(plan: RunPlan, prepared: Prepared) -> Iterator[MappedData]:
    """Yields the data on disk, which stays until the block ends.

    For a stream, a process then prepares shards ahead of training, from the place of the plan's checkpoint, if any.
    """
    with contextlib.ExitStack() as stack:
        if prepared.stream is not None:
            from tpu_kit.data.stream.feeder import feeding
            from tpu_kit.data.stream.packed_shards import Place

            point = plan.resume_point
            place = Place(**point.checkpoint.document("updates")) if point else Place()
            prepared = replace(prepared, stream=stack.enter_context(feeding(prepared.stream, place)))
        yield stack.enter_context(on_disk(prepared))


TEMPLATES = {
    "none": [
        "chat template    none: the rows are plain text. The adapter is saved without a template, so generate, search "
        "and evaluate use plain text"
    ],
    "text": ["chat template    not applied: most rows contain its turns already; prompts of `generate` use it"],
}
"""`Layout.turns_by` -> lines of the report; "template" has none."""


def data_report(prepared: Prepared, plan: BatchPlan, total: int, config: TrainConfig) -> str:
    """Returns a text with lines on the rows and batches of a run of `total` updates, and warnings about few updates.

    Warnings are for fewer than `LEAST_UPDATES` updates, and for more warmup steps than updates.
    """
    warmup, rl = config.optim.warmup_steps, config.rl
    long = f"warning          optim.warmup_steps={warmup} is more than the {total:,} updates; lower it or raise epochs"
    turns = TEMPLATES.get(prepared.encoder.layout.turns_by, []) if prepared.encoder else []
    if prepared.tasks:
        each = f"{config.num_generations} completions of up to {rl.max_completion_length} tokens"
        batch = f"rollout          {rl.prompts_per_rollout} prompts x {each}; {total:,} updates"
    elif prepared.stream:
        batch = (
            f"batch            {plan}; {total:,} updates (optim.max_steps), {total * plan.tokens_per_update:,} tokens"
        )
    else:
        left = len(prepared.train) % plan.global_batch_size
        batch = f"batch            {plan}; {total:,} updates; {left} packed rows of each epoch fill no update"
    few = f"warning          {total:,} updates are too few to learn much: {MORE_UPDATES}"
    if prepared.tasks:
        few = few.replace("optim.batch_size or data.max_length", "rl.prompts_per_update")
    return "\n".join([str(prepared), *turns, batch, *[long] * (warmup > total), *[few] * (total < LEAST_UPDATES)])
