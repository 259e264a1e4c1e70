"""The corpus that the embedded model is pre-trained on: number facts, the words of the problems, and sums of one step.

Left out on purpose is what fine-tuning teaches: no text here takes a second step with the result of the first, and
every dialogue answers at once. The thinking tags occur only in notes outside of dialogues, around a single step. Long
problems, of the train split alone, are read and told again clause by clause, never answered.
"""

import random
import re
from collections.abc import Iterator

from tpu_kit.assets.embedded import (
    ACTIVITIES,
    DAYS,
    GAINS,
    HOLDERS,
    ITEMS,
    LIMIT,
    LOSSES,
    NAMES,
    SINGLES,
    TIMES,
    cot_rows,
)

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def sum_of(rng: random.Random, signs: str = "+-*/") -> tuple[int, str, int, int]:
    """Draw `(a, sign, b, result)`, all whole numbers of 1..LIMIT, with the signs equally likely."""
    sign = rng.choice(signs)
    if sign == "+":
        result = rng.randint(2, LIMIT)
        a = rng.randint(1, result - 1)
        return a, sign, result - a, result
    if sign == "-":
        a = rng.randint(2, LIMIT)
        b = rng.randint(1, a - 1)
        return a, sign, b, a - b
    a = rng.randint(2, 9)
    b = rng.randint(1, LIMIT // a)
    if sign == "*":
        return (a, sign, b, a * b) if rng.random() < 0.5 else (b, sign, a, a * b)
    return a * b, sign, a, b


def facts(rng: random.Random) -> str:
    """Lines of number facts."""
    lines = []
    for _ in range(rng.randint(6, 18)):
        a, sign, b, result = sum_of(rng, rng.choice(("+-", "+-*/")))
        lines.append(f"{a} {sign} {b} = {result}")
    return rng.choice(("\n", ", ")).join(lines)


def one_step(rng: random.Random) -> tuple[str, str, str, int]:
    """Draw a story of one step: `(story, question, the step in words, result)`."""
    name, other = rng.sample(NAMES, 2)
    item, holder = rng.choice(ITEMS), rng.choice(HOLDERS)
    kind = rng.choice(("change", "change", "groups", "than", "times", "together", "pays", "share", "day"))
    if kind in ("change", "than", "day"):
        a, sign, b, result = sum_of(rng, "+-")
        if kind == "change":
            verb = rng.choice(GAINS if sign == "+" else LOSSES)
            return (
                f"{name} has {a} {item}. {name} {verb} {b}.",
                f"How many {item} does {name} have now?",
                f"{name} {verb} {b} so {a} {sign} {b} = {result}.",
                result,
            )
        word = "more" if sign == "+" else "fewer"
        if kind == "than":
            return (
                f"{name} has {a} {item}. {other} has {b} {word} {item} than {name}.",
                f"How many {item} does {other} have?",
                f"{other} has {a} {sign} {b} = {result}.",
                result,
            )
        verb, item = rng.choice(ACTIVITIES)
        first = rng.randint(0, 3)
        return (
            f"{name} {verb} {a} {item} on {DAYS[first]} and {b} {word} on {DAYS[first + 1]}.",
            f"How many {item} is that on {DAYS[first + 1]}?",
            f"On {DAYS[first + 1]} {a} {sign} {b} = {result}.",
            result,
        )
    if kind == "together":
        a, _, b, result = sum_of(rng, "+")
        return (
            f"{name} has {a} {item} and {other} has {b} {item}.",
            f"How many {item} do they have together?",
            f"Together {a} + {b} = {result}.",
            result,
        )
    if kind == "pays":
        a, _, b, result = sum_of(rng, "-")
        return (
            f"{name} buys a {rng.choice(SINGLES)} for {b} dollars. {name} pays {a} dollars.",
            f"How many dollars does {name} get back?",
            f"{name} pays {a} so {a} - {b} = {result}.",
            result,
        )
    if kind == "share":
        a, _, b, result = sum_of(rng, "/")
        return (
            f"{name} put {a} {item} into {b} {holder} equally.",
            f"How many {item} are in each of the {holder}?",
            f"{b} {holder} so {a} / {b} = {result}.",
            result,
        )
    a, _, b, result = sum_of(rng, "*")
    if kind == "times":
        a = rng.choice(tuple(TIMES))
        b = rng.randint(1, LIMIT // a)
        return (
            f"{name} has {b} {item}. {other} has {TIMES[a]} as many {item} as {name}.",
            f"How many {item} does {other} have?",
            f"{other} has {a} * {b} = {a * b}.",
            a * b,
        )
    if rng.random() < 0.5:
        return (
            f"{name} has {a} {holder} of {b} {item}.",
            f"How many {item} does {name} have?",
            f"{a} {holder} of {b} so {a} * {b} = {result}.",
            result,
        )
    return (
        f"{name} buys {a} {item} for {b} dollars each.",
        f"How many dollars does {name} pay?",
        f"{a} {item} for {b} so {a} * {b} = {result}.",
        result,
    )


def story(rng: random.Random) -> str:
    """One or two stories of one step, told in plain text."""
    parts = []
    for _ in range(rng.randint(1, 2)):
        told, _, step, _ = one_step(rng)
        parts.append(f"{told} {step}")
    return "\n".join(parts)


def note(rng: random.Random) -> str:
    """A one-step problem worked out in a note that uses the thinking tags, outside of any dialogue."""
    told, question, step, result = one_step(rng)
    return f"{told} {question}\n{THINK_OPEN}\n{step}\n{THINK_CLOSE}\n{result}"


def dialogue(question: str, answer: str) -> str:
    """A dialogue in the chat template's form that answers at once."""
    return f"{USER}{question}{END}{ASSISTANT}{answer}"


def direct(rng: random.Random) -> str:
    """A one-step question, or a bare sum, answered at once."""
    if rng.random() < 0.3:
        a, sign, b, result = sum_of(rng)
        return dialogue(f"What is {a} {sign} {b}?", str(result))
    told, question, _, result = one_step(rng)
    return dialogue(f"{told} {question}", str(result))


def reading(rng: random.Random, question: str) -> str:
    """A long problem and then what it told, clause by clause, in order or not: reading, without any reckoning."""
    name = question.split()[0]
    told = question[: question.rindex("How many")].rstrip(". ")
    clauses = re.split(r"\. |, | and then | and ", told)
    if rng.random() < 0.3:
        rng.shuffle(clauses)
    lines = [f"{name} {clause}." if clause.startswith(GAINS + LOSSES) else f"{clause}." for clause in clauses]
    return "\n".join([question, *lines])


def documents(rng: random.Random) -> Iterator[str]:
    """Yield the corpus without end, one document of 5 to 107 tokens at a time."""
    makers = {"facts": facts, "story": story, "note": note, "direct": direct}
    questions: list[str] = []
    while True:
        kind = rng.choices([*makers, "reading"], (31, 22, 10, 12, 25))[0]
        if kind in makers:
            yield makers[kind](rng)
            continue
        if not questions:
            questions = [row["question"] for row in cot_rows("train", 600, seed=rng.randrange(10**9))]
        yield reading(rng, questions.pop())
