"""Evaluates a model's answers to held-out rows, before and after training."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tpu_kit.config.loader import TrainConfig, flatten, read_yaml
from tpu_kit.data.held_out import Questions, drawn
from tpu_kit.data.prepare import Prepared, prepare
from tpu_kit.generation.answers import GenerationRequest, answer
from tpu_kit.generation.evaluation.comparison import Comparison, Evaluation, compare
from tpu_kit.generation.evaluation.held_out_answers import ANSWERED_AT_ONCE, Reply, judged_answers, prompt_ids
from tpu_kit.generation.evaluation.verifiers import verifier_named
from tpu_kit.generation.prompts import plain_template
from tpu_kit.generation.sampling import Sampling
from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.object_store import ObjectFolder, at_hand
from tpu_kit.machine.storage.run_folder import adapter_of, find_run
from tpu_kit.model.states_head import without_head
from tpu_kit.model.weights.base_identity import base_of_adapter
from tpu_kit.model.weights.source import load_tokenizer

_ABOUT = (
    "adapter_config.json",
    "config.json",
    "base.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)  # files of an adapter except its weights


class AdapterRows(NamedTuple):
    """The rows on which an adapter is evaluated.

    Attributes:
        config: the run, with the base of the adapter and, if `data.date` is null, the date of the adapter's run.
        prepared: the rows.
        questions: the questions of the adapter's run; None if unknown.
        plain: whether the rows are asked without a chat template.
    """

    config: TrainConfig
    prepared: Prepared
    questions: Questions | None
    plain: bool


def rows_of_adapter(
    config: TrainConfig, adapter_dir: str | Path, prepared: Prepared | None = None, *, chat: bool | None = None
) -> AdapterRows:
    """Prepares the held-out rows on which an adapter is evaluated.

    Tells on stderr if questions are asked as plain text because the adapter was trained so, and if the rows are plain
    text but the adapter was trained with a chat template.

    Args:
        config: the run.
        adapter_dir: a run or its adapter, a folder or gs://bucket/run.
        prepared: the data of the adapter's run, returned as they are; None prepares them with `held_out`, from `config`
            and the questions beside the adapter.
        chat: True: the chat template renders questions. False: they are plain text. None: False if the adapter was
            trained on plain text, else True. It has no effect on `prepared`.

    Raises:
        ValueError: there is no adapter, it was trained on other base weights, `chat` is true but the rows are plain
            text, or as in `held_out`.
    """
    run, adapter_dir = find_run(adapter_dir).folder, adapter_of(adapter_dir)
    with at_hand(adapter_dir, *_ABOUT) as folder:  # both models have the same base
        config = dataclasses.replace(config, model=base_of_adapter(config.model, folder))
        plain = chat is False or (chat is None and not load_tokenizer(config.model, folder).chat_template)
    questions = prepared.questions if prepared else Questions.read(run)
    if questions and not config.data.date:  # so the folder belongs to a run
        with at_hand(run, "config.yaml") as folder:
            trained = flatten(read_yaml(folder / "config.yaml")) if (folder / "config.yaml").is_file() else {}
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, date=trained.get("data.date")))
    if prepared is None:
        prepared = held_out(config, questions, plain)
        _tell_form(prepared, plain, chat)
    return AdapterRows(config, prepared, questions, plain)


def evaluate_adapter(
    config: TrainConfig, adapter_dir: str | Path, prepared: Prepared | None = None, *, chat: bool | None = None
) -> Comparison:
    """Compares the base and the tuned model on the held-out rows, and writes eval.json to the adapter's run.

    The file has `Comparison.to_dict`. A local folder without a config.yaml is no run and gets no file. If writing
    fails, a warning on stderr replaces the file. The rows are the rows of `config` that `config` or the adapter's run
    holds out, except questions that the run was trained on. Questions are compared without case, white space and
    closing punctuation. If the run's questions are not beside the adapter, `config` alone splits the rows. Otherwise,
    if `data.date` is null, the date of the run is used.

    Args:
        config: the run; `tracking.generate_rows` limits the rows (0 = all held-out rows).
        adapter_dir: a run or its adapter, a folder or gs://bucket/run.
        prepared: the data of the adapter's run; None prepares the rows of `config`.
        chat: whether the chat template renders questions; None: unless the adapter was trained on plain text. It has no
            effect on `prepared`.

    Raises:
        ValueError: the adapter was trained on other base weights, `chat` is true but the rows are plain text, or as in
            `evaluate` and `held_out`.
        LaunchError: a replica failed.
    """
    run, adapter_dir = find_run(adapter_dir).folder, adapter_of(adapter_dir)
    rows = rows_of_adapter(config, adapter_dir, prepared, chat=chat)
    config, prepared = rows.config, rows.prepared
    with at_hand(adapter_dir) as folder, without_head(folder) as headless:
        base, tuned = evaluate(config, prepared), evaluate(config, prepared, folder)
        seen = prepared.eval_report.seen_in_training if prepared.eval_report else 0
        comparison = compare(base, tuned, seen, training_data_known=rows.questions is not None)
        if headless != folder:
            comparison = dataclasses.replace(comparison, head=compare(evaluate(config, prepared, headless), tuned))
    written = json.dumps(comparison.to_dict(), indent=2)
    try:
        if isinstance(run, str):
            ObjectFolder(run).write("eval.json", written.encode())
        elif (run / "config.yaml").is_file():
            atomic.write_text(run / "eval.json", written)
    except OSError as error:  # for example, a read-only folder; the result is printed nevertheless
        print(f"warning: {run}/eval.json could not be written ({error.strerror or error})", file=sys.stderr)
    return comparison


def _tell_form(prepared: Prepared, plain: bool, chat: bool | None) -> None:
    """Tells on stderr if rows and adapter differ in form: only the rows have a chat template, or only the adapter.

    `plain`: whether the adapter is asked without a chat template, which is told only if `chat` is None. Raises
    ValueError if `chat` is true and the rows are plain text.
    """
    if prepared.encoder is None or prepared.encoder.layout.turns_by == "template":
        if plain and chat is None:
            text = "as plain text, because the adapter was trained without a chat template (chat=true uses one)"
            print(f"asked            {text}", file=sys.stderr, flush=True)
    elif chat:
        raise ValueError(
            "chat=true: the rows are plain text, which a chat template cannot render; give questions or messages"
        )
    elif not plain:
        print("note: the rows are plain text and are asked without a chat template, but the adapter was trained with "
              "one", file=sys.stderr, flush=True)  # fmt: skip


def held_out(config: TrainConfig, run: Questions | None = None, plain: bool = False) -> Prepared:
    """Prepares the rows that a configuration holds out, to evaluate a model on them.

    Prints a note on stderr if their questions differ from the questions that `run` held out.

    Args:
        config: the run.
        run: the questions of the adapter's run, from `Questions.read`. Its held-out questions are held out, too, and
            its training questions are left out. None: `config` alone holds out rows.
        plain: whether to ask questions as plain text, without a chat template and a system prompt.

    Raises:
        ValueError: as in `prepare`; the data are a stream; or `plain` is true and a question has several turns.
    """
    if config.data.streaming:
        raise ValueError(
            "data.streaming=true: a stream has no questions; set it to false, and data.source to rows with questions"
        )
    tokenizer, data = load_tokenizer(config.model), config.data
    if plain:
        tokenizer.chat_template, data = plain_template(tokenizer), dataclasses.replace(data, system_prompt=None)
    prepared = prepare(data, tokenizer, run=run, model=config.model)
    if run and prepared.questions:
        now, before = prepared.questions.held_out, run.held_out
        new, gone = len(np.setdiff1d(now, before)), len(np.setdiff1d(before, now))
        if new or gone:
            text = f"{new} of these {len(now)} questions are new to the adapter's run, and {gone} of the {len(before)} "
            text += "that it held out are missing: data.eval_rows or the source differs"
            print(f"note: {text}", file=sys.stderr, flush=True)
    return prepared


def evaluate(config: TrainConfig, prepared: Prepared, adapter_dir: str | Path | None = None) -> Evaluation:
    """Lets the model answer held-out rows greedily, judges the answers, and measures the rows' own perplexity.

    Args:
        config: the run; `tracking.generate_rows` limits the rows (0 = all), `tracking.generate_tokens` limits an
            answer, and `tracking.verifier` judges it. Rows on which the verifier raises an error do not count in the
            accuracy. The rows are divided among the replicas of `config.launch`.
        prepared: the data, from `data.prepare.prepare`.
        adapter_dir: a run or its adapter, as in `answer`; None evaluates the base model.

    Raises:
        ValueError: there are no held-out rows, a prompt is empty, the verifier does not exist, or as in `answer`.
        LaunchError: a replica failed.
    """
    if prepared.eval is None:
        raise ValueError(
            "there are no rows to evaluate on; hold out rows with data.eval_rows, or give data.eval_source"
        )
    count, rule = config.tracking.generate_rows or None, verifier_named(config.tracking.verifier)
    source_rows = prepared.eval.documents.source_rows
    documents = np.flatnonzero(np.isin(source_rows, drawn(np.unique(source_rows), config.data.seed)[:count]))
    ids, masks = zip(*map(prepared.eval_document, documents.tolist()), strict=True)
    ask = GenerationRequest(prompt_ids(prepared, count), Sampling(config.tracking.generate_tokens))
    rows, images = [each.tolist() for each in ids], prepared.eval.further
    if prepared.eval.documents.images is not None:
        numbered = zip(rows, documents.tolist(), strict=True)
        rows = [images.with_pictures(row, prepared.eval.documents, number) for row, number in numbered]
    answers = answer(config, [ask], rows, adapter_dir=adapter_dir, batch_size=ANSWERED_AT_ONCE)
    judged = judged_answers(config, prepared, [*map(Reply.of, answers.completions[0])], rule)
    logprobs = np.concatenate([np.array(rating.logprobs) for rating in answers.ratings])
    logprobs = logprobs[np.concatenate([mask[1:] for mask in masks])]
    return dataclasses.replace(judged, perplexity=math.exp(-logprobs.mean()), perplexity_tokens=len(logprobs))
