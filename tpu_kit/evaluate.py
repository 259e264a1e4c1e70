"""How good are a model's answers on held-out rows, and how much better are they after training?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

from tpu_kit.config import DataConfig, TrainConfig
from tpu_kit.encoder import ensure_chat_template
from tpu_kit.generate import generate
from tpu_kit.generator import Generator
from tpu_kit.pretrained import load_tokenizer
from tpu_kit.runtime import Runtime
from tpu_kit.sampling import Sampling
from tpu_kit.verifiers import verify, well_formed

_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution, for intervals of 95 %
_BATCH = 32  # rows that a replica answers at a time
_SHOWN = 3  # samples in the table


@dataclass(frozen=True)
class Accuracy:
    """How many answers are correct, with the 95 % interval of Wilson's score.

    With p = correct / total, n = total and z = 1.96 the interval is

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    (E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22, 1927). It stays inside
    0 to 1 and is honest for few rows, where the usual p +- z sqrt(p (1 - p) / n) is not.

    Attributes:
        correct: rows answered correctly.
        total: rows that have an answer to compare with.
        low: lower end of the interval, a share; 0 without rows.
        high: upper end; 1 without rows.
    """

    correct: int
    total: int
    low: float
    high: float

    @classmethod
    def of(cls, correct: int, total: int) -> Accuracy:
        """Compute the interval."""
        assert 0 <= correct <= total, (correct, total)
        if not total:
            return cls(0, 0, 0.0, 1.0)
        share, z2 = correct / total, _Z * _Z / total
        middle = share + z2 / 2
        half = _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total))
        # The two ends are exact where every or no answer is correct; rounding may miss them by 1e-17.
        low = 0.0 if correct == 0 else (middle - half) / (1 + z2)
        high = 1.0 if correct == total else (middle + half) / (1 + z2)
        return cls(correct, total, low, high)

    @property
    def share(self) -> float:
        """Correct answers as a share of all; not a number without rows."""
        return self.correct / self.total if self.total else math.nan

    def __str__(self) -> str:
        if not self.total:
            return "no row has an answer to compare with"
        return f"{self.correct} of {self.total} = {self.share:.1%} ({self.low:.1%} to {self.high:.1%})"


@dataclass(frozen=True)
class Sample:
    """One answer.

    Attributes:
        question: the row's, or the prompt if the row has none.
        expected: the row's answer; None if it has none.
        answer: what the model wrote, with the reasoning's opening tag if the prompt ended in it.
        correct: the verifier's word; None without an expected answer.
    """

    question: str
    expected: str | None
    answer: str
    correct: bool | None


@dataclass(frozen=True)
class Evaluation:
    """How one model answered.

    Attributes:
        accuracy: of the rows that have an answer.
        format_adherence: share of answers that are one well-formed reasoning block and an answer after it.
        mean_tokens: mean length of an answer in tokens, with the token that ends it.
        unfinished: share of answers that were cut off at `max_new_tokens`.
        max_new_tokens: the most tokens of an answer.
        samples: every row.
    """

    accuracy: Accuracy
    format_adherence: float
    mean_tokens: float
    unfinished: float
    max_new_tokens: int
    samples: tuple[Sample, ...]

    def __str__(self) -> str:
        return "\n".join(f"{name:<25}{value}" for name, value in self.figures().items())

    def figures(self) -> dict[str, str]:
        """Name and value of each measure, for a table."""
        return {
            "correct (95 % interval)": str(self.accuracy),
            "well-formed reasoning": f"{self.format_adherence:.1%}",
            "tokens per answer": f"{self.mean_tokens:.1f}",
            f"cut off at {self.max_new_tokens}": f"{self.unfinished:.1%}",
        }


def evaluate(
    config: TrainConfig,
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[str],
    adapter_dir: str | Path | None = None,
) -> Evaluation:
    """Let the model answer held-out rows, and judge the answers.

    Args:
        config: the run; `tracking.generate_tokens` bounds an answer. The rows are dealt over the replicas of
            `config.launch`.
        rows: `Prepared.eval_rows`, or the first of them.
        prompts: for each row `Prepared.eval_prompts`.
        adapter_dir: folder of the trained adapter; None evaluates the base model.

    Raises:
        ValueError: no rows, or what `generate` raises.
        LaunchError: a replica failed.
    """
    if len(rows) != len(prompts):
        raise ValueError(f"{len(rows)} rows and {len(prompts)} prompts: there must be one prompt for each row")
    if not rows:
        raise ValueError(
            "there are no rows to evaluate on; hold some out with data.eval_rows, or give data.eval_source"
        )
    ids, data = _encoded(load_tokenizer(config.model), rows, prompts), config.data
    limit = config.tracking.generate_tokens
    given = generate(config, ids, Sampling(limit), adapter_dir=adapter_dir, batch_size=_BATCH)
    samples = []
    for row, prompt, reply in zip(rows, prompts, given, strict=True):
        text = _opened(prompt, data) + reply.text
        expected = row.get("answer")
        samples.append(
            Sample(
                question=str(row.get("question") or prompt),
                expected=None if expected is None else str(expected),
                answer=text,
                correct=verify(row, text, data),
            )
        )
    judged = [sample.correct for sample in samples if sample.correct is not None]
    return Evaluation(
        accuracy=Accuracy.of(sum(judged), len(judged)),
        format_adherence=sum(well_formed(sample.answer, data) for sample in samples) / len(samples),
        mean_tokens=sum(len(reply.tokens) for reply in given) / len(given),
        unfinished=sum(reply.finish_reason == "length" for reply in given) / len(given),
        max_new_tokens=limit,
        samples=tuple(samples),
    )


def count_correct(
    model: Any,
    tokenizer: Any,
    config: TrainConfig,
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[str],
    rt: Runtime,
) -> tuple[int, int]:
    """Let a model that is being trained answer held-out rows; every replica takes a part of them.

    Args:
        model: the replica's, in evaluation mode.
        tokenizer: its tokenizer.
        config: as in `evaluate`.
        rows: as in `evaluate`; one or more.
        prompts: as in `evaluate`.
        rt: the replica.

    Returns:
        Of this replica's part how many are correct, and how many have an answer to compare with.
    """
    ids, data, limit = _encoded(tokenizer, rows, prompts), config.data, config.tracking.generate_tokens
    generator = Generator(
        model, tokenizer, rt, max_prompt=max(map(len, ids)), max_new_tokens=limit,
        batch_size=min(_BATCH, -(-len(ids) // rt.world_size)), data=data,
    )  # fmt: skip
    given = generator.share(ids, Sampling(limit))
    verdicts = [verify(rows[row], _opened(prompts[row], data) + reply.text, data) for (row, _), reply in given.items()]
    return sum(filter(None, verdicts)), sum(verdict is not None for verdict in verdicts)


def _encoded(tokenizer: Any, rows: Sequence[Mapping[str, Any]], prompts: Sequence[str]) -> list[list[int]]:
    """The prompts' token ids; raises ValueError where there is nothing to answer."""
    # A prompt that is a cell of its row as it stands was rendered by no chat template: plain text, as in training.
    plain = [prompt in row.values() for row, prompt in zip(rows, prompts, strict=True)]
    if not all(plain):
        ensure_chat_template(tokenizer)
    ids = []
    for prompt, special in zip(prompts, plain, strict=True):
        ids.append(list(tokenizer(prompt, add_special_tokens=special)["input_ids"]))
        if special and ids[-1][-1:] == [tokenizer.eos_token_id]:
            ids[-1].pop()  # some tokenizers end every text, and after its end nothing would be added
    if empty := [row for row, prompt in enumerate(ids) if not prompt]:
        raise ValueError(
            f"row {empty[0]}: its prompt is empty, so there is nothing to answer; rows of plain text ask nothing, for "
            "them set tracking.generate_rows=0 and tracking.eval_generate_rows=0"
        )
    return ids


def _opened(prompt: str, data: DataConfig) -> str:
    """What belongs to an answer and stands in the prompt: the reasoning's opening tag, if the prompt ends in it."""
    return f"{data.think_open}\n" if prompt.rstrip().endswith(data.think_open) else ""


def mcnemar(only_first: int, only_second: int) -> float:
    """Give the two-sided p-value of McNemar's exact test.

    The rows that both models get right, or both wrong, say nothing of which is better. If neither is, each of the
    others falls to either with probability 1/2, so p = min(1, 2 P(X <= min(a, b))) with X ~ Binomial(a + b, 1/2)
    (Q. McNemar, Psychometrika 12, 1947; the exact form as in Fagerland et al., BMC Med. Res. Methodol. 13, 2013).

    Args:
        only_first: a, the rows that only the first model answers correctly.
        only_second: b, those that only the second does.
    """
    n = only_first + only_second
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(only_first, only_second) + 1)) / 2**n)


@dataclass(frozen=True)
class Comparison:
    """Base and tuned model on the same rows.

    Attributes:
        base: the base model's answers.
        tuned: the tuned model's.
        gained: rows that only the tuned model answers correctly.
        lost: rows that only the base model does.
        p_value: of `mcnemar`: how likely a difference this large is if tuning changed nothing.
    """

    base: Evaluation
    tuned: Evaluation
    gained: int
    lost: int
    p_value: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, such as JSON has."""

        def summary(evaluation: Evaluation) -> dict[str, Any]:
            plain = asdict(evaluation)
            del plain["samples"]
            plain["accuracy"]["share"] = evaluation.accuracy.share if evaluation.accuracy.total else None
            return plain

        samples = [
            {
                "question": base.question,
                "expected": base.expected,
                "base": {"answer": base.answer, "correct": base.correct},
                "tuned": {"answer": tuned.answer, "correct": tuned.correct},
            }
            for base, tuned in zip(self.base.samples, self.tuned.samples, strict=True)
        ]
        return {
            "base": summary(self.base),
            "tuned": summary(self.tuned),
            "gained": self.gained,
            "lost": self.lost,
            "p_value": self.p_value,
            "samples": samples,
        }

    def __str__(self) -> str:
        rows = [("", "base", "tuned")]
        before, after = self.base.figures(), self.tuned.figures()
        rows += [(name, before[name], after[name]) for name in before]
        wide = [max(len(row[i]) for row in rows) + 2 for i in range(2)]
        lines = [f"{name:<{wide[0]}}{base:<{wide[1]}}{tuned}" for name, base, tuned in rows]
        if self.base.accuracy.total:
            lines.append(
                f"{self.gained} rows only the tuned model answers correctly, {self.lost} only the base; "
                f"p = {self.p_value:.2g} (McNemar, exact)"
            )
        for base, tuned in list(zip(self.base.samples, self.tuned.samples, strict=True))[:_SHOWN]:
            lines += ["", base.question.strip(), f"  expected: {base.expected}"]
            for name, sample in (("base", base), ("tuned", tuned)):
                verdict = {True: ", correct", False: ", wrong", None: ""}[sample.correct]
                lines += [f"  {name}{verdict}:", indent(sample.answer.strip(), "    ")]
        return "\n".join(lines)


def compare(base: Evaluation, tuned: Evaluation) -> Comparison:
    """Compare two evaluations row by row.

    Raises:
        ValueError: they are not of the same rows in the same order, or one was allowed longer answers.
    """
    if [(s.question, s.expected) for s in base.samples] != [(s.question, s.expected) for s in tuned.samples]:
        raise ValueError("the two evaluations are not of the same rows; evaluate both on the same rows and prompts")
    if base.max_new_tokens != tuned.max_new_tokens:
        raise ValueError(
            f"one evaluation allowed answers of {base.max_new_tokens} tokens and the other of {tuned.max_new_tokens}; "
            "evaluate both with one tracking.generate_tokens"
        )
    pairs = [(bool(b.correct), bool(t.correct)) for b, t in zip(base.samples, tuned.samples, strict=True)]
    gained, lost = pairs.count((False, True)), pairs.count((True, False))
    return Comparison(base, tuned, gained, lost, mcnemar(lost, gained))
