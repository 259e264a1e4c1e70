"""Generates and judges answers to held-out rows, also during training."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tpu_kit.config.loader import ConfigError, TrainConfig
from tpu_kit.data.prepare import Prepared
from tpu_kit.data.rows.schemas import as_text
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.evaluation.accuracy import Accuracy
from tpu_kit.generation.evaluation.comparison import Evaluation, Sample
from tpu_kit.generation.evaluation.judging import judge_all
from tpu_kit.generation.evaluation.verifiers import Verifier, verifier_named, well_formed
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.prompts import Completion, opened
from tpu_kit.generation.sampling import Sampling
from tpu_kit.model.rotary import max_positions
from tpu_kit.model.weights.loading import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ANSWERED_AT_ONCE = 32
"""Number of rows that a replica answers at a time."""


class Reply(NamedTuple):
    """An answer to judge.

    Attributes:
        text: the text without special tokens, and without a beginning that is part of the prompt.
        tokens: number of tokens, the last token included.
        cut_off: whether it reached the token limit without ending.
    """

    text: str
    tokens: int
    cut_off: bool

    @classmethod
    def of(cls, completion: Completion) -> Reply:
        """Converts a generator's completion."""
        return cls(completion.text, len(completion.tokens), completion.finish_reason == "length")


def check_answers(config: TrainConfig, prepared: Prepared, model: PreTrainedConfig | None = None) -> None:
    """Checks before training that the model can answer the held-out rows and the verifier can judge the answers.

    Does nothing if `tracking.generate_rows` and `tracking.eval_generate_rows` are 0; otherwise the larger number is
    asked for. Prints a line if there are fewer rows. The verifier judges the rows' own answers. `model` is the model's
    configuration; None reads it.

    Raises:
        ConfigError: there are no held-out rows, a prompt is empty, the longest prompt and `generate_tokens` exceed the
            model's positions, the verifier does not exist, or it can judge none of the rows.
    """
    tracking = config.tracking
    name = "generate_rows" if tracking.generate_rows >= tracking.eval_generate_rows else "eval_generate_rows"
    wanted = getattr(tracking, name)
    if not wanted:
        return
    asked, off = f"tracking.{name}={wanted}", f"tracking.{name}=0"
    rows = prepared.eval_rows[:wanted]
    if not rows:
        raise ConfigError([f"{asked} needs held-out rows, but there are none; remove data.eval_rows"])
    try:
        lengths = [len(ids) for ids in prompt_ids(prepared, wanted)]
    except ValueError as error:
        raise ConfigError([f"{asked}: {error}"]) from error
    if len(rows) < wanted:
        print(f"plan             {asked}: there are only {len(rows)} held-out rows, and all are answered", flush=True)
    model = model or read_config(config.model)  # None if unreadable; loading the model explains the error
    longest, positions = max(lengths), (model and max_positions(model.get_text_config())) or math.inf
    if longest + tracking.generate_tokens > positions:
        advice = f"use at most {positions - longest:g}" if positions > longest else "remove longer rows"
        raise ConfigError(
            [
                f"tracking.generate_tokens={tracking.generate_tokens} plus the {longest} tokens of held-out row "
                f"{lengths.index(longest)} exceed the model's {positions:g} positions; {advice}, or set "
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


def count_correct(
    model: Any, config: TrainConfig, prepared: Prepared, rt: Runtime, generator: Generator | None = None
) -> tuple[int, ...]:
    """Lets a model in training answer the first `tracking.eval_generate_rows` held-out rows, greedily.

    The rows are divided among the replicas, which must all call this. Prints a warning on stderr for answers on which
    the verifier raised an error; these count as not judged.

    If `generator` is given, it answers with its compiled programs, and `rl.max_completion_length` limits an answer
    instead of `tracking.generate_tokens`. None makes a generator for `model`.

    Returns:
        Counts of this replica's share, to be added over replicas: correct answers and judged answers. For a mix, this
        pair follows for each source, in the order of `prepared.eval_mix.names`, all in one flat tuple.
    """
    assert prepared.encoder is not None, "there are held-out rows"
    ids = prompt_ids(prepared, config.tracking.eval_generate_rows)
    data, limit, rule = config.data, config.tracking.generate_tokens, verifier_named(config.tracking.verifier)
    # At a temperature this low, the compiled sampling program draws the likeliest token.
    nearly = Sampling(config.rl.max_completion_length, temperature=1e-8, top_k=0, top_p=1.0, min_p=0.0)
    sampling = nearly if generator else Sampling(limit)
    generator = generator or Generator(
        model, prepared.encoder.tokenizer, rt, max_prompt=max(map(len, ids)), max_new_tokens=limit,
        batch_size=min(ANSWERED_AT_ONCE, -(-len(ids) // rt.world_size)), data=data,
    )  # fmt: skip
    answers, sources = [], list[str]()
    for (row, _), reply in generator.share(ids, sampling).items():
        begun = prepared.eval_asked[row] if prepared.eval_asked else None
        text = opened(prepared.eval_prompts[row], data, begun) + reply.text
        answers.append((prepared.eval_rows[row], text))
        sources.append(prepared.eval_source(row))
    verdicts = judge_all(answers, data, rule)
    if errors := [verdict.error for verdict in verdicts if verdict.error]:
        text = f"{len(errors)} of {len(verdicts)} answers of replica {rt.rank} were not judged"
        print(f"warning: {text}: the verifier raised {errors[0]}", file=sys.stderr, flush=True)
    judged = [
        (verdict.correct, source)
        for verdict, source in zip(verdicts, sources, strict=True)
        if verdict.correct is not None
    ]
    every = [[correct for correct, _ in judged]]
    for name in prepared.eval_mix.names if prepared.eval_mix else ():
        every.append([correct for correct, source in judged if source == name])
    return tuple(count for each in every for count in (sum(each), len(each)))


def prompt_ids(prepared: Prepared, count: int | None) -> list[list[int]]:
    """Returns the ids of the first `count` held-out prompts (None: all); raises ValueError for an empty prompt."""
    ids = prepared.eval_prompt_ids[:count]
    if [] in ids:
        raise ValueError(
            f"row {ids.index([])}: its prompt is empty, so there is nothing to answer; for rows of plain text set "
            "tracking.generate_rows=0 and tracking.eval_generate_rows=0"
        )
    return ids


def judged_answers(
    config: TrainConfig, prepared: Prepared, replies: Sequence[Reply], rule: str | Verifier
) -> Evaluation:
    """Judges the replies to the first held-out rows, at least one; the result has no perplexity.

    Args:
        config: the run.
        prepared: the data.
        replies: replies to the first rows, in order; their number is the number of judged rows.
        rule: from `verifier_named`.
    """
    count, samples = len(replies), []
    rows, prompts = prepared.eval_rows[:count], prepared.eval_prompts[:count]
    asked = prepared.eval_asked[:count] if prepared.eval_asked else [None] * count
    texts = [
        opened(prompt, config.data, begun) + reply.text
        for prompt, begun, reply in zip(prompts, asked, replies, strict=True)
    ]
    verdicts = judge_all([*zip(rows, texts, strict=True)], config.data, rule)
    each = zip(rows, prompts, asked, texts, verdicts, strict=True)
    for number, (row, prompt, messages, text, verdict) in enumerate(each):
        expected = row.get("answer")
        question = str(row.get("question") or (as_text(messages) if messages else prompt))
        said = None if expected is None else str(expected)
        samples.append(Sample(question, said, text, verdict.correct, verdict.error, prepared.eval_source(number)))
    judged = [sample.correct for sample in samples if sample.correct is not None]
    return Evaluation(
        accuracy=Accuracy.of(sum(judged), len(judged)),
        format_adherence=sum(well_formed(sample.answer, config.data) for sample in samples) / len(samples),
        mean_tokens=sum(reply.tokens for reply in replies) / len(replies),
        unfinished=sum(reply.cut_off for reply in replies) / len(replies),
        max_new_tokens=config.tracking.generate_tokens,
        samples=tuple(samples),
        rows_reason=bool(prepared.eval_report and prepared.eval_report.reasoning.held),
    )
