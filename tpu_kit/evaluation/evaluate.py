"""Evaluates a model's answers to held-out rows, before and after training.

from tpu_kit.evaluation.evaluate import evaluate_adapter
print(evaluate_adapter(config, "runs/my-run/adapter"))
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np

from tpu_kit.config.loader import ConfigError, DataConfig, TrainConfig
from tpu_kit.data.chat_encoding import Encoder, Example, ensure_chat_template, plain_prompt
from tpu_kit.data.columns import Layout, detect_layout, is_filled
from tpu_kit.data.held_out import QUESTIONS, UNKNOWN, Questions
from tpu_kit.data.prepare import Prepared, prepare
from tpu_kit.data.schemas import RowError
from tpu_kit.distributed.runtime import Runtime
from tpu_kit.evaluation.verifiers import Verifier, judge, verifier_named, well_formed
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.sampling import Sampling
from tpu_kit.generation.service import GenerationRequest, answer
from tpu_kit.models.architecture import read_shape
from tpu_kit.models.base_identity import base_of_adapter
from tpu_kit.models.error_correction import without_head
from tpu_kit.models.loading import load_tokenizer
from tpu_kit.storage.object_store import ObjectFolder, at_hand, is_url

_PROBLEM = ("question", "reasoning", "answer")  # of `schemas.problem`
_ANSWERED = ("generate_rows", "eval_generate_rows")
_BATCH = 32  # rows that a replica answers at a time
_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution, for 95 % intervals
_SHOWN = 3  # samples in the table


@dataclass(frozen=True)
class Accuracy:
    """The number of correct answers, with the 95 % interval of Wilson's score.

    With p = correct / total, n = total and z = 1.96 the interval is

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    (E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22, 1927). It stays within
    0 to 1 and holds for few rows, unlike p +- z sqrt(p (1 - p) / n).

    Attributes:
        correct: correctly answered rows.
        total: rows with an answer to compare with.
        low: lower end of the interval, a share; 0 without rows.
        high: upper end; 1 without rows.
    """

    correct: int
    total: int
    low: float
    high: float

    @classmethod
    def of(cls, correct: int, total: int) -> Accuracy:
        """Computes the interval."""
        assert 0 <= correct <= total, (correct, total)
        if not total:
            return cls(0, 0, 0.0, 1.0)
        share, z2 = correct / total, _Z * _Z / total
        middle = share + z2 / 2
        half = _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total))
        # The ends are exactly 0 and 1 where no or every answer is correct; rounding would miss them by 1e-17.
        low = 0.0 if correct == 0 else (middle - half) / (1 + z2)
        high = 1.0 if correct == total else (middle + half) / (1 + z2)
        return cls(correct, total, low, high)

    @property
    def share(self) -> float:
        """The share of correct answers; not a number without rows."""
        return self.correct / self.total if self.total else math.nan

    def __str__(self) -> str:
        if not self.total:
            return "no row has an answer to compare with"
        return f"{self.correct} of {self.total} = {self.share:.1%} ({self.low:.1%} to {self.high:.1%})"


def mcnemar(only_first: int, only_second: int) -> float:
    """Returns the two-sided p-value of McNemar's exact test.

    Rows that both models answer correctly, or both wrongly, do not tell which model is better. If the models are equal,
    each other row falls to either with probability 1/2: p = min(1, 2 P(X <= min(a, b))) with X ~ Binomial(a + b, 1/2)
    (Q. McNemar, Psychometrika 12, 1947; the exact form as in Fagerland et al., BMC Med. Res. Methodol. 13, 2013).

    Args:
        only_first: a, the rows that only the first model answers correctly.
        only_second: b, the rows that only the second model answers correctly.
    """
    n = only_first + only_second
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(only_first, only_second) + 1)) / 2**n)


@dataclass(frozen=True)
class Sample:
    """One answer.

    Attributes:
        question: the row's question, or the prompt if the row has none.
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
        perplexity: e to the mean loss, in nats, of the rows' own tokens that carry loss in training; None without such
            tokens.
        perplexity_tokens: the number of these tokens.
    """

    accuracy: Accuracy
    format_adherence: float
    mean_tokens: float
    unfinished: float
    max_new_tokens: int
    samples: tuple[Sample, ...]
    perplexity: float | None = None
    perplexity_tokens: int = 0

    @property
    def failed(self) -> int:
        """The number of answers on which the verifier failed; the accuracy leaves them out."""
        return sum(bool(sample.error) for sample in self.samples)

    def __str__(self) -> str:
        return "\n".join(f"{name:<25}{value}" for name, value in self.figures().items())

    def figures(self) -> dict[str, str]:
        """Returns name and value of each measure, for a table."""
        return {
            "correct (95 % interval)": str(self.accuracy),
            "well-formed reasoning": f"{self.format_adherence:.1%}",
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
        return {**plain, "failed": self.failed}


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
        head: the tuned model without its error-correction head, as base, and with it; None without a head.
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
        return {
            "base": self.base.to_dict(),
            "tuned": self.tuned.to_dict(),
            "gained": self.gained,
            "lost": self.lost,
            "p_value": self.p_value,
            "seen_in_training": self.seen_in_training,
            "training_data_known": self.training_data_known,
            "samples": samples,
        } | ({"without_head": self.head.to_dict()} if self.head else {})

    def __str__(self) -> str:
        before, after = self.base.figures(), self.tuned.figures()
        rows = [("", "base", "tuned")]
        rows += [(name, before.get(name, "0"), after.get(name, "0")) for name in before | after]
        wide = [max(len(row[i]) for row in rows) + 2 for i in range(2)]
        lines = [f"{name:<{wide[0]}}{base:<{wide[1]}}{tuned}" for name, base, tuned in rows]
        if self.base.accuracy.total:
            lines.append(
                f"{self.gained} rows only the tuned model answers correctly, {self.lost} only the base; "
                f"p = {self.p_value:.2g} (McNemar, exact)"
            )
        if self.head:
            without = self.head.base
            lines.append(
                f"without its error-correction head: {without.accuracy}, perplexity {without.figures()['perplexity']}; "
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


def compare(base: Evaluation, tuned: Evaluation, seen_in_training: int = 0, known: bool = True) -> Comparison:
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
    return Comparison(base, tuned, gained, lost, mcnemar(lost, gained), seen_in_training, known)


def evaluate_adapter(
    config: TrainConfig,
    adapter_dir: str | Path,
    verifier: str | Verifier | None = None,
    replace: bool = False,
    prepared: Prepared | None = None,
) -> Comparison:
    """Compares the base and the tuned model on the held-out rows, and writes the comparison beside the adapter.

    The rows are those that the adapter's run held out and those that `config` holds out, without questions that the run
    was trained on; texts are compared without case, white space and closing punctuation. Where the adapter lies without
    the questions of its run, `config` alone splits the rows.

    Args:
        config: the run; `tracking.generate_rows` limits the rows (0 = all held-out rows).
        adapter_dir: the output of training, a folder or gs://bucket/run/adapter; eval.json goes beside it.
        verifier: as in `evaluate`.
        replace: replace an eval.json of more rows too, because the adapter is new.
        prepared: the data of the adapter's run; None prepares the rows of `config`.

    Raises:
        ValueError: the adapter was trained on other base weights; or as in `evaluate` and `prepare`.
        LaunchError: a replica failed.
    """
    with at_hand(adapter_dir, "adapter_config.json", "base.json") as folder:  # both models have one base
        config = dataclasses.replace(config, model=base_of_adapter(config.model, folder))
    url = str(adapter_dir).rstrip("/").rpartition("/")[0]
    run = url if is_url(adapter_dir) else Path(adapter_dir).absolute().parent
    if prepared is not None:
        questions, (rows, prompts, seen) = prepared.questions, _first_rows(config, prepared)
    else:
        with at_hand(run, QUESTIONS) as beside:
            questions = Questions.read(beside)
        rows, prompts, seen = held_out(config, questions)
    with at_hand(adapter_dir) as folder, without_head(folder) as plain:
        base = evaluate(config, rows, prompts, verifier=verifier)
        tuned = evaluate(config, rows, prompts, folder, verifier)
        found = compare(base, tuned, seen, known=questions is not None)
        if plain != folder:
            alone = evaluate(config, rows, prompts, plain, verifier)
            found = dataclasses.replace(found, head=compare(alone, tuned))
    if not replace and (before := _rows_of(run)) > len(rows):
        print(
            f"{run}/eval.json stays: it has {before} rows, and this evaluation {len(rows)}", file=sys.stderr, flush=True
        )
        return found
    written = json.dumps(found.to_dict(), indent=2)
    if isinstance(run, str):
        ObjectFolder(run).write("eval.json", written.encode())
    else:
        (run / "eval.json").write_text(written)
    return found


def _rows_of(run: str | Path) -> int:
    """Returns the number of rows in the eval.json of a run; 0 without a readable file."""
    with at_hand(run, "eval.json") as folder, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return len(json.loads((folder / "eval.json").read_text())["samples"])
    return 0


def check_answers(config: TrainConfig, prepared: Prepared) -> None:
    """Checks before training that the model can answer the held-out rows and the verifier can judge the answers.

    Args:
        config: `tracking.generate_rows` and `tracking.eval_generate_rows` are the numbers of rows.
        prepared: its data.

    Raises:
        ConfigError: the rows have no prompts, prompts and answers are longer than the model's positions, or the
            verifier can judge none of the rows.
    """
    tracking = config.tracking
    wanted = max(tracking.generate_rows, tracking.eval_generate_rows)
    if not wanted:
        return
    asked = next(
        f"tracking.{name}={getattr(tracking, name)}" for name in _ANSWERED if getattr(tracking, name) == wanted
    )
    rows, prompts = prepared.eval_rows[:wanted], prepared.eval_prompts[:wanted]
    if not rows or prepared.encoder is None:
        raise ConfigError([f"{asked} needs held-out rows, and there are none; remove data.eval_rows"])
    tokenizer = prepared.encoder.tokenizer
    try:
        ids = _encoded(tokenizer, rows, prompts)
    except ValueError as error:
        raise ConfigError([f"{asked}: {error}"]) from error
    if len(rows) < wanted:
        print(f"plan             {asked}: there are {len(rows)} held-out rows, and all are answered", flush=True)
    off, longest, positions = asked.partition("=")[0] + "=0", max(map(len, ids)), _positions(config)
    if longest + tracking.generate_tokens > positions:
        advice = f"use at most {positions - longest:g}" if positions > longest else "remove longer rows"
        raise ConfigError(
            [
                f"tracking.generate_tokens={tracking.generate_tokens} and the {longest} tokens of held-out row "
                f"{list(map(len, ids)).index(longest)} are more than the {positions:g} positions of the model; "
                f"{advice}, or set {off}"
            ]
        )
    rule = verifier_named(tracking.verifier)
    verdicts = (judge(row, str(row.get("answer") or ""), config.data, rule) for row in rows)
    errors = []
    for verdict in verdicts:
        if verdict.correct is not None:
            return
        errors.append(verdict.error or "the row has no answer to compare with")
    raise ConfigError(
        [
            f"tracking.verifier={tracking.verifier} can judge none of the {len(rows)} held-out rows that {asked} asks "
            f"for ({errors[0]}); use another verifier, or set {off}"
        ]
    )


def _positions(config: TrainConfig) -> float:
    """Returns the longest sequence of the model; infinity where its shape is unknown until it is loaded."""
    try:
        return read_shape(config.model).positions
    except ValueError:
        return math.inf


def held_out(config: TrainConfig, run: Questions | None = None) -> tuple[list[dict[str, Any]], list[str], int]:
    """Returns the held-out rows, their prompts, and the number of rows left out because of the training data.

    Args:
        config: the configuration.
        run: as in `prepare`; a note on stderr tells whether the run held other questions out.

    Raises:
        ValueError: as in `prepare`.
    """
    prepared = prepare(config.data, load_tokenizer(config.model), run=run)
    if run and prepared.questions:
        now, before = prepared.questions.held_out, run.held_out
        new, gone = len(np.setdiff1d(now, before)), len(np.setdiff1d(before, now))
        if new or gone:
            text = f"the run of the adapter did not know {new} of these {len(now)} questions, and {gone} of the "
            text += f"{len(before)} that it held out are not among them: the source has changed since, or is another"
            print(f"note: {text}", file=sys.stderr, flush=True)
    return _first_rows(config, prepared)


def _first_rows(config: TrainConfig, prepared: Prepared) -> tuple[list[dict[str, Any]], list[str], int]:
    count = config.tracking.generate_rows or None
    seen = prepared.eval_report.seen_in_training if prepared.eval_report else 0
    return prepared.eval_rows[:count], prepared.eval_prompts[:count], seen


def evaluate(
    config: TrainConfig,
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[str],
    adapter_dir: str | Path | None = None,
    verifier: str | Verifier | None = None,
) -> Evaluation:
    """Lets the model answer held-out rows, judges the answers, and measures the perplexity of the rows themselves.

    Args:
        config: the run; `tracking.generate_tokens` limits an answer. The replicas of `config.launch` share the rows.
        rows: `Prepared.eval_rows`, or the first of them.
        prompts: `Prepared.eval_prompts` of these rows.
        adapter_dir: folder of the trained adapter; None evaluates the base model.
        verifier: a function of a row and the answer after the reasoning, or a name as in `tracking.verifier`, the
            default. The accuracy leaves out rows on which it fails.

    Raises:
        ValueError: there are no rows, there is no such verifier, or as in `answer`.
        LaunchError: a replica failed.
    """
    if len(rows) != len(prompts):
        raise ValueError(f"{len(rows)} rows and {len(prompts)} prompts: there must be one prompt for each row")
    if not rows:
        raise ValueError(
            "there are no rows to evaluate on; hold out rows with data.eval_rows, or give data.eval_source"
        )
    rule = verifier_named(verifier or config.tracking.verifier)
    tokenizer, data, limit = load_tokenizer(config.model), config.data, config.tracking.generate_tokens
    ask = GenerationRequest(_encoded(tokenizer, rows, prompts), Sampling(limit))
    examples = _examples(tokenizer, rows, data)
    ids = [example.input_ids for example in examples]
    found = answer(config, [ask], ids, adapter_dir=adapter_dir, batch_size=_BATCH)
    given, samples = found.completions[0], []
    for row, prompt, reply in zip(rows, prompts, given, strict=True):
        text = _opened(prompt, data) + reply.text
        expected, verdict = row.get("answer"), judge(row, text, data, rule)
        samples.append(
            Sample(
                question=str(row.get("question") or prompt),
                expected=None if expected is None else str(expected),
                answer=text,
                correct=verdict.correct,
                error=verdict.error,
            )
        )
    judged = [sample.correct for sample in samples if sample.correct is not None]
    told = [
        logprob
        for example, rating in zip(examples, found.ratings, strict=True)
        for logprob, loss in zip(rating.logprobs, example.loss_mask[1:], strict=True)
        if loss
    ]
    return Evaluation(
        accuracy=Accuracy.of(sum(judged), len(judged)),
        format_adherence=sum(well_formed(sample.answer, data) for sample in samples) / len(samples),
        mean_tokens=sum(len(reply.tokens) for reply in given) / len(given),
        unfinished=sum(reply.finish_reason == "length" for reply in given) / len(given),
        max_new_tokens=limit,
        samples=tuple(samples),
        perplexity=math.exp(-sum(told) / len(told)) if told else None,
        perplexity_tokens=len(told),
    )


def _examples(tokenizer: Any, rows: Sequence[Mapping[str, Any]], data: DataConfig) -> list[Example]:
    """Encodes the rows as in training, cut to max_length; skips rows that training could not use."""
    found = []
    for row, layout in zip(rows, _layouts(rows, data), strict=False):
        try:
            made = Encoder(tokenizer, layout, data).examples(row)
        except RowError:
            continue
        cut = [Example(ids[: data.max_length], mask[: data.max_length]) for ids, mask in made]
        found += [example for example in cut if any(example.loss_mask)]
    return found


def _layouts(rows: Sequence[Mapping[str, Any]], data: DataConfig) -> list[Layout]:
    """Returns the layout of each row; nothing for rows that hold questions alone."""
    empty = [name for name in rows[0] if not any(is_filled(row.get(name)) for row in rows)]
    try:
        layout = detect_layout(list(rows[0]), data, empty)
        if layout.format != "cot":
            return [layout] * len(rows)
    except ValueError:
        layout = None
    if not all(isinstance(row.get(role), str) for row in rows for role in _PROBLEM):
        return [layout] * len(rows) if layout else []
    # In held-out rows the question includes context and options, and missing reasoning is empty.
    system = layout.columns.get("system") if layout else (data.columns or {}).get("system")
    shared = {"system": system} if system else {}
    return [Layout("cot", shared | {role: role for role in _PROBLEM if row[role]}, ()) for row in rows]


def count_correct(
    model: Any,
    tokenizer: Any,
    config: TrainConfig,
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[str],
    rt: Runtime,
) -> tuple[int, int]:
    """Lets a model in training answer one or more held-out rows; every replica takes a part of them.

    Returns:
        The correct answers in this replica's part, and the rows with an answer to compare with.
    """
    ids, data, limit = _encoded(tokenizer, rows, prompts), config.data, config.tracking.generate_tokens
    generator = Generator(
        model, tokenizer, rt, max_prompt=max(map(len, ids)), max_new_tokens=limit,
        batch_size=min(_BATCH, -(-len(ids) // rt.world_size)), data=data,
    )  # fmt: skip
    given = generator.share(ids, Sampling(limit))
    rule, verdicts = verifier_named(config.tracking.verifier), []
    for (row, _), reply in given.items():
        verdicts.append(judge(rows[row], _opened(prompts[row], data) + reply.text, data, rule).correct)
    return sum(filter(None, verdicts)), sum(verdict is not None for verdict in verdicts)


def _encoded(tokenizer: Any, rows: Sequence[Mapping[str, Any]], prompts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of the prompts; raises ValueError for an empty prompt."""
    # A prompt that equals a cell of its row is plain text without a chat template, as in training.
    plain = [prompt in row.values() for row, prompt in zip(rows, prompts, strict=True)]
    if not all(plain):
        ensure_chat_template(tokenizer)
    ids = []
    for prompt, special in zip(prompts, plain, strict=True):
        plain_ids = (
            plain_prompt(tokenizer, prompt) if special else tokenizer(prompt, add_special_tokens=False)["input_ids"]
        )
        ids.append(list(plain_ids))
    if empty := [row for row, prompt in enumerate(ids) if not prompt]:
        raise ValueError(
            f"row {empty[0]}: its prompt is empty, so there is nothing to answer; for rows of plain text set "
            "tracking.generate_rows=0 and tracking.eval_generate_rows=0"
        )
    return ids


def _opened(prompt: str, data: DataConfig) -> str:
    """Returns the opening tag of the reasoning if the prompt ends with it, as the first part of the answer."""
    return f"{data.think_open}\n" if prompt.rstrip().endswith(data.think_open) else ""
