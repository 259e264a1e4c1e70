"""Evaluates a model's answers to held-out rows, before and after training."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np

from tpu_kit.config import tables
from tpu_kit.config.loader import ConfigError, DataConfig, TrainConfig, flatten, read_yaml
from tpu_kit.data.held_out import UNKNOWN, Questions, drawn
from tpu_kit.data.prepare import Prepared, prepare
from tpu_kit.data.rows.schemas import as_text
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.evaluation.accuracy import Accuracy as Accuracy
from tpu_kit.generation.evaluation.accuracy import mcnemar as mcnemar
from tpu_kit.generation.evaluation.judging import judge_all
from tpu_kit.generation.evaluation.verifiers import verifier_named, well_formed
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.prompts import plain_template
from tpu_kit.generation.sampling import Sampling
from tpu_kit.generation.service import GenerationRequest, answer
from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.object_store import ObjectFolder, at_hand
from tpu_kit.machine.storage.run_folder import adapter_of, find_run
from tpu_kit.model.base_identity import base_of_adapter
from tpu_kit.model.rotary import max_positions
from tpu_kit.model.source import load_tokenizer, read_config
from tpu_kit.model.states_head import without_head

_BATCH = 32  # rows that a replica answers at a time
_SHOWN = 3  # samples in the table
_ABOUT = (
    "adapter_config.json",
    "config.json",
    "base.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)  # of an adapter, without its weights


@dataclass(frozen=True)
class Sample:
    """One answer.

    Attributes:
        question: what the row asks, as text.
        expected: the row's answer; None without one.
        answer: the reply of the model, with the opening tag of its reasoning if the prompt ends in the tag.
        correct: the verdict of the verifier; None if it did not judge the row.
        error: the error of the verifier; empty without one.
    """

    question: str
    expected: str | None
    answer: str
    correct: bool | None
    error: str = ""

    @property
    def verdict(self) -> str:
        """The verdict for a table; empty without one."""
        if self.error:
            return f"not judged, the verifier raised {self.error}"
        return {True: "correct", False: "wrong", None: ""}[self.correct]

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer and its verdict as plain values."""
        return {"answer": self.answer, "correct": self.correct} | ({"error": self.error} if self.error else {})


@dataclass(frozen=True)
class Evaluation:
    """The answers of one model and their measures.

    Attributes:
        accuracy: of the judged rows.
        format_adherence: share of answers with one well-formed reasoning block and an answer after it.
        mean_tokens: mean length of an answer in tokens, with its last token.
        unfinished: share of answers that were cut off at `max_new_tokens`.
        max_new_tokens: the most tokens of an answer.
        samples: every row.
        perplexity: e to the mean loss, in nats, of the rows' own tokens that carry loss in training.
        perplexity_tokens: the number of these tokens.
        rows_reason: whether the rows have reasoning.
    """

    accuracy: Accuracy
    format_adherence: float
    mean_tokens: float
    unfinished: float
    max_new_tokens: int
    samples: tuple[Sample, ...]
    perplexity: float | None = None
    perplexity_tokens: int = 0
    rows_reason: bool = True

    @property
    def failed(self) -> int:
        """The number of answers on which the verifier failed; the accuracy leaves them out."""
        return sum(bool(sample.error) for sample in self.samples)

    @property
    def reasons(self) -> bool:
        """Whether the form of reasoning says something: rows or answers have some."""
        return self.rows_reason or self.format_adherence > 0

    def __str__(self) -> str:
        return "\n".join(f"{name:<25}{value}" for name, value in self.figures().items())

    def figures(self) -> dict[str, str]:
        """Returns name and value of each measure, for a table."""
        return {
            "correct (95 % interval)": str(self.accuracy),
            **({"well-formed reasoning": f"{self.format_adherence:.1%}"} if self.reasons else {}),
            "tokens per answer": f"{self.mean_tokens:.1f}",
            f"cut off at {self.max_new_tokens}": f"{self.unfinished:.1%}",
            "perplexity": "none" if self.perplexity is None else f"{self.perplexity:.4g}",
            **({"not judged (error)": str(self.failed)} if self.failed else {}),
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns everything except the samples as plain values."""
        plain = asdict(self)
        del plain["samples"]
        plain["accuracy"]["share"] = self.accuracy.share if self.accuracy.total else None
        return {**plain, "failed": self.failed, "reasons": self.reasons}


@dataclass(frozen=True)
class Comparison:
    """Base and tuned model on the same rows.

    Attributes:
        base: the base model's answers.
        tuned: the tuned model's answers.
        gained: rows that only the tuned model answers correctly.
        lost: rows that only the base model answers correctly.
        p_value: of `mcnemar`: the probability of such a difference if tuning changed nothing.
        seen_in_training: held-out rows left out because the training data have their questions.
        training_data_known: whether the questions of the adapter's run are known. If not, `seen_in_training` is of the
            training data of the configuration.
        head: the tuned model without the head of its objective, as base, and with it; None if it has none.
    """

    base: Evaluation
    tuned: Evaluation
    gained: int
    lost: int
    p_value: float
    seen_in_training: int = 0
    training_data_known: bool = True
    head: Comparison | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        samples = [
            {"question": base.question, "expected": base.expected, "base": base.to_dict(), "tuned": tuned.to_dict()}
            for base, tuned in zip(self.base.samples, self.tuned.samples, strict=True)
        ]
        counts = {name: value for name, value in vars(self).items() if name not in ("base", "tuned", "head")}
        models = {"base": self.base.to_dict(), "tuned": self.tuned.to_dict()}
        head = {"without_head": self.head.to_dict()} if self.head else {}
        return {**models, **counts, "samples": samples, **head}

    def __str__(self) -> str:
        before, after = self.base.figures(), self.tuned.figures()
        figures = before | after
        rows = [{"": name, "base": before.get(name, "0"), "tuned": after.get(name, "0")} for name in figures]
        lines = [tables.to_text(rows)]
        if self.base.accuracy.total:
            lines.append(
                f"{self.gained} rows only the tuned model answers correctly, {self.lost} only the base; "
                f"p = {self.p_value:.2g} (McNemar, exact)"
            )
        if self.head:
            without = self.head.base
            lines.append(
                f"without its head: {without.accuracy}, perplexity {without.figures()['perplexity']}; "
                f"{self.head.gained} rows correct only with it, {self.head.lost} only without; "
                f"p = {self.head.p_value:.2g}"
            )
        lines.append(f"{self.seen_in_training} rows left out, because the training data have their questions")
        lines += [] if self.training_data_known else [UNKNOWN]
        pairs = list(zip(self.base.samples, self.tuned.samples, strict=True))
        raised = [pair for pair in pairs[_SHOWN:] if pair[0].error or pair[1].error][:_SHOWN]
        for base, tuned in [*pairs[:_SHOWN], *raised]:
            lines += ["", base.question.strip(), f"  expected: {base.expected}"]
            for name, sample in (("base", base), ("tuned", tuned)):
                verdict = f", {sample.verdict}" if sample.verdict else ""
                lines += [f"  {name}{verdict}:", indent(sample.answer.strip(), "    ")]
        return "\n".join(lines)


def compare(
    base: Evaluation, tuned: Evaluation, seen_in_training: int = 0, training_data_known: bool = True
) -> Comparison:
    """Compares two evaluations row by row; a row that one of them did not judge counts for neither.

    Raises:
        ValueError: their rows, or the order of the rows, differ, or one allowed longer answers.
    """
    if [(s.question, s.expected) for s in base.samples] != [(s.question, s.expected) for s in tuned.samples]:
        raise ValueError("the two evaluations have different rows; evaluate both on the same rows and prompts")
    if base.max_new_tokens != tuned.max_new_tokens:
        raise ValueError(
            f"one evaluation allowed answers of {base.max_new_tokens} tokens and the other of {tuned.max_new_tokens}; "
            "evaluate both with one tracking.generate_tokens"
        )
    pairs = [(b.correct, t.correct) for b, t in zip(base.samples, tuned.samples, strict=True)]
    gained, lost = pairs.count((False, True)), pairs.count((True, False))
    return Comparison(base, tuned, gained, lost, mcnemar(lost, gained), seen_in_training, training_data_known)


def evaluate_adapter(
    config: TrainConfig, adapter_dir: str | Path, prepared: Prepared | None = None, *, chat: bool | None = None
) -> Comparison:
    """Compares the base and the tuned model on the held-out rows, and writes eval.json into the adapter's run.

    The rows are those that the adapter's run held out and those that `config` holds out, without questions that the run
    was trained on; texts are compared without case, white space and closing punctuation. Where the adapter lies without
    the questions of its run, `config` alone splits the rows. Where `data.date` is null, it is that of the run.

    Args:
        config: the run; `tracking.generate_rows` limits the rows (0 = all held-out rows).
        adapter_dir: a run or its adapter, a folder or gs://bucket/run.
        prepared: the data of the adapter's run; None prepares the rows of `config`.
        chat: whether the chat template renders the questions of rows that are no plain text; None does so unless the
            adapter was trained on plain text.

    Raises:
        ValueError: the adapter was trained on other base weights; or as in `evaluate` and `prepare`.
        LaunchError: a replica failed.
    """
    run, adapter_dir = find_run(adapter_dir).folder, adapter_of(adapter_dir)
    with at_hand(adapter_dir, *_ABOUT) as folder:  # both models have one base
        config = dataclasses.replace(config, model=base_of_adapter(config.model, folder))
        plain = chat is False or (chat is None and not load_tokenizer(config.model, folder).chat_template)
    questions = prepared.questions if prepared else Questions.read(run)
    if questions and not config.data.date:  # so the folder is that of a run
        with at_hand(run, "config.yaml") as folder:
            trained = flatten(read_yaml(folder / "config.yaml")) if (folder / "config.yaml").is_file() else {}
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, date=trained.get("data.date")))
    if prepared is None:
        prepared = held_out(config, questions, plain)
        _tell_form(prepared, plain, chat)
    with at_hand(adapter_dir) as folder, without_head(folder) as headless:
        base, tuned = evaluate(config, prepared), evaluate(config, prepared, folder)
        seen = prepared.eval_report.seen_in_training if prepared.eval_report else 0
        comparison = compare(base, tuned, seen, training_data_known=questions is not None)
        if headless != folder:
            comparison = dataclasses.replace(comparison, head=compare(evaluate(config, prepared, headless), tuned))
    written = json.dumps(comparison.to_dict(), indent=2)
    try:
        if isinstance(run, str):
            ObjectFolder(run).write("eval.json", written.encode())
        elif (run / "config.yaml").is_file():
            atomic.write_text(run / "eval.json", written)
    except OSError as error:  # such as of a folder that can only be read: the result is printed all the same
        print(f"warning: {run}/eval.json could not be written ({error.strerror or error})", file=sys.stderr)
    return comparison


def _tell_form(prepared: Prepared, plain: bool, chat: bool | None) -> None:
    """Says on stderr where rows and model have not the same form; raises ValueError for chat=True of plain text."""
    if prepared.encoder is None or prepared.encoder.layout.turns_by == "template":
        if plain and chat is None:
            text = "as plain text, without a chat template, as the adapter was trained (chat=true: with it)"
            print(f"asked            {text}", file=sys.stderr, flush=True)
    elif chat:
        raise ValueError(
            "chat=true: the rows are plain text, which no chat template renders; give questions or messages"
        )
    elif not plain:
        print("note: the rows are plain text and are asked as they are, and the adapter was trained through the chat "
              "template", file=sys.stderr, flush=True)  # fmt: skip


def read_comparison(run: Path) -> dict[str, Any] | None:
    """Returns the contents of a run's eval.json; None without the file, ValueError if it is damaged."""
    path = run / "eval.json"
    try:
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    except ValueError as error:
        advice = f"delete it, or write it anew by evaluate adapter={run / 'adapter'}"
        raise ValueError(f"{path} is damaged ({error}): {advice}") from error
    return found


def check_answers(config: TrainConfig, prepared: Prepared) -> None:
    """Checks before training that the model can answer the held-out rows and the verifier can judge the answers.

    Raises:
        ConfigError: the rows have no prompts, prompts and answers are longer than the model's positions, or the
            verifier can judge none of the rows.
    """
    tracking = config.tracking
    name = "generate_rows" if tracking.generate_rows >= tracking.eval_generate_rows else "eval_generate_rows"
    wanted = getattr(tracking, name)
    if not wanted:
        return
    asked, off = f"tracking.{name}={wanted}", f"tracking.{name}=0"
    rows = prepared.eval_rows[:wanted]
    if not rows:
        raise ConfigError([f"{asked} needs held-out rows, and there are none; remove data.eval_rows"])
    try:
        lengths = [len(ids) for ids in _prompt_ids(prepared, wanted)]
    except ValueError as error:
        raise ConfigError([f"{asked}: {error}"]) from error
    if len(rows) < wanted:
        print(f"plan             {asked}: there are {len(rows)} held-out rows, and all are answered", flush=True)
    model = read_config(config.model)  # loading a model explains why its configuration cannot be read
    longest, positions = max(lengths), (model and max_positions(model.get_text_config())) or math.inf
    if longest + tracking.generate_tokens > positions:
        advice = f"use at most {positions - longest:g}" if positions > longest else "remove longer rows"
        raise ConfigError(
            [
                f"tracking.generate_tokens={tracking.generate_tokens} and the {longest} tokens of held-out row "
                f"{lengths.index(longest)} are more than the {positions:g} positions of the model; {advice}, or set "
                f"{off}"
            ]
        )
    rule = verifier_named(tracking.verifier)
    verdicts = judge_all([(row, str(row.get("answer") or "")) for row in rows], config.data, rule)
    if all(verdict.correct is None for verdict in verdicts):
        reason = verdicts[0].error or "the row has no answer to compare with"
        raise ConfigError(
            [
                f"tracking.verifier={tracking.verifier} can judge none of the {len(rows)} held-out rows that {asked} "
                f"asks for ({reason}); use another verifier, or set {off}"
            ]
        )


def held_out(config: TrainConfig, run: Questions | None = None, plain: bool = False) -> Prepared:
    """Prepares the data of a configuration to evaluate a model on its held-out rows; `run` as in `prepare`.

    A note on stderr tells whether the run held other questions out.

    Args:
        config: the run.
        run: as in `prepare`.
        plain: ask the questions as plain text, without a chat template and a system prompt.

    Raises:
        ValueError: as in `prepare`; or `plain` and a question is a chat of several turns.
    """
    tokenizer, data = load_tokenizer(config.model), config.data
    if plain:
        tokenizer.chat_template, data = plain_template(tokenizer), dataclasses.replace(data, system_prompt=None)
    prepared = prepare(data, tokenizer, run=run)
    if run and prepared.questions:
        now, before = prepared.questions.held_out, run.held_out
        new, gone = len(np.setdiff1d(now, before)), len(np.setdiff1d(before, now))
        if new or gone:
            text = f"the run of the adapter did not know {new} of these {len(now)} questions, and {gone} of the "
            text += f"{len(before)} that it held out are not among them: data.eval_rows or the source is another"
            print(f"note: {text}", file=sys.stderr, flush=True)
    return prepared


def evaluate(config: TrainConfig, prepared: Prepared, adapter_dir: str | Path | None = None) -> Evaluation:
    """Lets the model answer held-out rows, judges the answers, and measures the perplexity of the rows themselves.

    Args:
        config: the run; `tracking.generate_rows` limits the rows (0 = all), `tracking.generate_tokens` an answer, and
            `tracking.verifier` judges it. The accuracy leaves out rows on which a verifier fails. The replicas of
            `config.launch` share the rows.
        prepared: the data, of `data.prepare.prepare`.
        adapter_dir: folder of the trained adapter; None evaluates the base model.

    Raises:
        ValueError: there are no held-out rows, there is no such verifier, or as in `answer`.
        LaunchError: a replica failed.
    """
    if prepared.eval is None:
        raise ValueError(
            "there are no rows to evaluate on; hold out rows with data.eval_rows, or give data.eval_source"
        )
    count, limit = config.tracking.generate_rows or None, config.tracking.generate_tokens
    rule = verifier_named(config.tracking.verifier)
    source_rows = prepared.eval.documents.source_rows
    documents = np.flatnonzero(np.isin(source_rows, drawn(np.unique(source_rows), config.data.seed)[:count]))
    ids, masks = zip(*map(prepared.eval.document, documents.tolist()), strict=True)
    ask = GenerationRequest(_prompt_ids(prepared, count), Sampling(limit))
    answers = answer(config, [ask], [each.tolist() for each in ids], adapter_dir=adapter_dir, batch_size=_BATCH)
    replies, samples, rows, prompts = answers.completions[0], [], prepared.eval_rows[:count], prepared.eval_prompts
    asked = prepared.eval_asked or [None] * len(prepared.eval_rows)
    texts = [
        opened(prompt, config.data, begun) + reply.text
        for prompt, begun, reply in zip(prompts[:count], asked[:count], replies, strict=True)
    ]
    verdicts = judge_all([*zip(rows, texts, strict=True)], config.data, rule)
    for row, prompt, messages, text, verdict in zip(rows, prompts[:count], asked[:count], texts, verdicts, strict=True):
        expected = row.get("answer")
        question = str(row.get("question") or (as_text(messages) if messages else prompt))
        samples.append(
            Sample(question, None if expected is None else str(expected), text, verdict.correct, verdict.error)
        )
    judged = [sample.correct for sample in samples if sample.correct is not None]
    logprobs = np.concatenate([np.array(rating.logprobs) for rating in answers.ratings])
    logprobs = logprobs[np.concatenate([mask[1:] for mask in masks])]
    return Evaluation(
        accuracy=Accuracy.of(sum(judged), len(judged)),
        format_adherence=sum(well_formed(sample.answer, config.data) for sample in samples) / len(samples),
        mean_tokens=sum(len(reply.tokens) for reply in replies) / len(replies),
        unfinished=sum(reply.finish_reason == "length" for reply in replies) / len(replies),
        max_new_tokens=limit,
        samples=tuple(samples),
        perplexity=math.exp(-logprobs.mean()),
        perplexity_tokens=len(logprobs),
        rows_reason=bool(prepared.eval_report and prepared.eval_report.reasoning.held),
    )


def count_correct(
    model: Any, config: TrainConfig, prepared: Prepared, rt: Runtime, generator: Generator | None = None
) -> tuple[int, int]:
    """Lets a model in training answer `tracking.eval_generate_rows` rows; every replica takes a part of them.

    It warns of answers whose verifier failed, which count as not judged.

    A `generator` that has sampled answers with the programs that it has, up to its own limit of tokens.

    Returns:
        The correct answers in this replica's part, and the rows with an answer to compare with.
    """
    assert prepared.encoder is not None, "there are held-out rows"
    ids = _prompt_ids(prepared, config.tracking.eval_generate_rows)
    data, limit, rule = config.data, config.tracking.generate_tokens, verifier_named(config.tracking.verifier)
    # The program of samples takes the likeliest token, too, at a temperature at which no other one is drawn.
    nearly = Sampling(config.rl.max_completion_length, temperature=1e-8, top_k=0, top_p=1.0, min_p=0.0)
    sampling = nearly if generator else Sampling(limit)
    generator = generator or Generator(
        model, prepared.encoder.tokenizer, rt, max_prompt=max(map(len, ids)), max_new_tokens=limit,
        batch_size=min(_BATCH, -(-len(ids) // rt.world_size)), data=data,
    )  # fmt: skip
    answers = []
    for (row, _), reply in generator.share(ids, sampling).items():
        begun = prepared.eval_asked[row] if prepared.eval_asked else None
        text = opened(prepared.eval_prompts[row], data, begun) + reply.text
        answers.append((prepared.eval_rows[row], text))
    verdicts = judge_all(answers, data, rule)
    if errors := [verdict.error for verdict in verdicts if verdict.error]:
        text = f"{len(errors)} of {len(verdicts)} answers of replica {rt.rank} were not judged"
        print(f"warning: {text}, the verifier raised {errors[0]}", file=sys.stderr, flush=True)
    judged = [verdict.correct for verdict in verdicts if verdict.correct is not None]
    return sum(judged), len(judged)


def _prompt_ids(prepared: Prepared, count: int | None) -> list[list[int]]:
    """Returns the token ids of the first prompts; raises ValueError for an empty prompt."""
    ids = prepared.eval_prompt_ids[:count]
    if [] in ids:
        raise ValueError(
            f"row {ids.index([])}: its prompt is empty, so there is nothing to answer; for rows of plain text set "
            "tracking.generate_rows=0 and tracking.eval_generate_rows=0"
        )
    return ids


def opened(prompt: str, data: DataConfig, asked: Any = None) -> str:
    """Returns the first part of the answer that the prompt has.

    Args:
        prompt: its text.
        data: the tags.
        asked: the prompt as messages, or text. Where it ends in the assistant's own words, these are continued; else
            the prompt may end with the opening tag of the reasoning.
    """
    words = str(asked[-1].get("content") or "") if isinstance(asked, list) and asked[-1]["role"] == "assistant" else ""
    if words and prompt.endswith(words.rstrip()):
        return words
    return f"{data.think_open}\n" if prompt.rstrip().endswith(data.think_open) else ""
