"""The embedded default: a tiny pre-trained model and chain-of-thought word problems, without a download.

`model.name=embedded data.source=embedded` runs the whole pipeline on any machine. `tests/support/make_embedded.py`
trained the model. It knows number facts, the vocabulary and one-step sums; it answers longer problems directly and
mostly wrongly. Fine-tuning on `cot_rows` teaches it to write down the steps first.

Code generates the problems from a seed. A hash of a question's text selects its split, so held-out questions are never
in the training split, for any seeds and numbers of rows.
"""

import hashlib
import itertools
import operator
import random
import re
from collections.abc import Callable
from pathlib import Path

ASSETS = Path(__file__).parent / "embedded"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
LIMIT = 60  # largest number in a problem and its steps; the model knows number facts up to it
NAMES = (
    "Tom", "Mia", "Ben", "Ana", "Leo", "Eva", "Sam", "Zoe", "Max", "Ida", "Kim", "Roy",
    "Amy", "Dan", "Lea", "Ian", "Joy", "Ned", "Uma", "Ray",
)  # fmt: skip
ITEMS = (
    "apples", "books", "cards", "coins", "cups", "eggs", "keys", "pens", "shells", "stones",
    "stamps", "toys", "nuts", "balls", "rings", "caps",
)  # fmt: skip
SINGLES = ("hat", "bell", "lamp", "kite")
HOLDERS = ("boxes", "bags", "jars", "rows", "packs", "trays")
GAINS = ("buys", "finds", "wins", "gets", "makes")
LOSSES = ("sells", "loses", "breaks", "uses", "gives away")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
ACTIVITIES = (("reads", "pages"), ("runs", "laps"), ("paints", "tiles"), ("writes", "lines"), ("bakes", "cakes"))
TIMES = {2: "twice", 3: "three times"}

_HELD_OUT_SHARE = 5  # a fifth of the questions are held out
_MAX_ATTEMPTS = 200  # draws per row until no new question is found


class _OutOfRange(Exception):
    """A number in a draw is not in 1..LIMIT; the caller draws again."""


def _step(a: int, sign: str, b: int) -> tuple[str, int]:
    """Returns the text of a step and its result, such as `("12 + 7 = 19", 19)`; `sign` is "+", "-", "*" or "/".

    Raises:
        _OutOfRange: the result is not a whole number of 1..LIMIT.
    """
    if sign == "/":
        if a % b:
            raise _OutOfRange
        result = a // b
    else:
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    if not 1 <= result <= LIMIT:
        raise _OutOfRange
    return f"{a} {sign} {b} = {result}", result


Problem = tuple[str, list[str], int]


def _ledger(rng: random.Random) -> Problem:
    """Draws (question, steps, answer) of two or three gains and losses; raises _OutOfRange for an unfit draw."""
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    start = total = rng.randint(3, 30)
    events, lines = [], []
    verbs = rng.sample(GAINS + LOSSES, rng.choice((2, 3, 3)))
    for verb in verbs:
        amount = rng.randint(2, 20)
        written, total = _step(total, "+" if verb in GAINS else "-", amount)
        events.append(f"{verb} {amount}")
        lines.append(f"{name} {verb} {amount} so {written}.")
    story = f"{', '.join(events[:-1])} and then {events[-1]}"
    return f"{name} has {start} {item}. {name} {story}. How many {item} does {name} have now?", lines, total


def _groups(rng: random.Random) -> Problem:
    """Draws (question, steps, answer): equal groups, a gain in half of the draws, then a loss. Raises _OutOfRange."""
    name, item, holder = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(HOLDERS)
    groups, each, more, lost = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 20), rng.randint(2, 20)
    verb = rng.choice(LOSSES)
    product, total = _step(groups, "*", each)
    lines = [f"{groups} {holder} of {each} so {product}."]
    text = f"{name} has {groups} {holder} of {each} {item}"
    if rng.random() < 0.5:
        written, total = _step(total, "+", more)
        text += f" and {more} more {item}"
        lines.append(f"{more} more so {written}.")
    written, total = _step(total, "-", lost)
    lines.append(f"{name} {verb} {lost} so {written}.")
    return f"{text}. {name} {verb} {lost}. How many {item} are left?", lines, total


def _add_up(amounts: list[int], lines: list[str]) -> int:
    """Returns the sum of `amounts`; appends "Together A + B = C." per addition to `lines`; _OutOfRange over LIMIT."""
    total = amounts[0]
    for amount in amounts[1:]:
        written, total = _step(total, "+", amount)
        lines.append(f"Together {written}.")
    return total


def _compare(rng: random.Random) -> Problem:
    """Draws (question, steps, answer): compares and sums two or three people's amounts; raises _OutOfRange."""
    people, item = rng.sample(NAMES, rng.choice((2, 3, 3))), rng.choice(ITEMS)
    amounts = [rng.randint(2, 20)]
    text, lines = [f"{people[0]} has {amounts[0]} {item}."], []
    for before, name in itertools.pairwise(people):
        kind = rng.choice(("more", "fewer", "times"))
        if kind == "times":
            factor = rng.choice(tuple(TIMES))
            written, amount = _step(factor, "*", amounts[-1])
            comparison = f"{TIMES[factor]} as many {item} as {before}"
        else:
            difference = rng.randint(2, 12)
            written, amount = _step(amounts[-1], "+" if kind == "more" else "-", difference)
            comparison = f"{difference} {kind} {item} than {before}"
        text.append(f"{name} has {comparison}.")
        lines.append(f"{name} has {written}.")
        amounts.append(amount)
    total = _add_up(amounts, lines)
    return f"{' '.join(text)} How many {item} do they have together?", lines, total


def _money(rng: random.Random) -> Problem:
    """Draws (question, steps, answer) about a purchase and its change; raises _OutOfRange for an unfit draw."""
    name, many, single = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(SINGLES)
    count, price, other = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 20)
    product, cost = _step(count, "*", price)
    lines = [f"{count} {many} for {price} so {product}."]
    written, cost = _step(cost, "+", other)
    lines.append(f"A {single} for {other} so {written}.")
    paid = cost + rng.randint(1, 20)
    written, change = _step(paid, "-", cost)
    if paid > LIMIT:
        raise _OutOfRange
    lines.append(f"{name} pays {paid} so {written}.")
    question = (
        f"{name} buys {count} {many} for {price} dollars each and a {single} for {other} dollars. "
        f"{name} pays {paid} dollars. How many dollars does {name} get back?"
    )
    return question, lines, change


def _share(rng: random.Random) -> Problem:
    """Draws (question, steps, answer) about two amounts that are shared equally; raises _OutOfRange."""
    (first, second), item, holder = rng.sample(NAMES, 2), rng.choice(ITEMS), rng.choice(HOLDERS)
    holders, each = rng.randint(2, 9), rng.randint(2, 15)
    a = rng.randint(2, max(2, holders * each - 2))
    b = holders * each - a
    if b < 1:
        raise _OutOfRange
    added, total = _step(a, "+", b)
    divided, result = _step(total, "/", holders)
    question = (
        f"{first} has {a} {item} and {second} has {b} {item}. They put all the {item} into {holders} {holder} equally. "
        f"How many {item} are in each of the {holder}?"
    )
    return question, [f"Together {added}.", f"{holders} {holder} so {divided}."], result


def _days(rng: random.Random) -> Problem:
    """Draws (question, steps, answer): sums amounts of two or three days, given by differences; raises _OutOfRange."""
    name, (verb, item), start = rng.choice(NAMES), rng.choice(ACTIVITIES), rng.randint(0, 2)
    days = DAYS[start : start + rng.choice((2, 3, 3))]
    amounts = [rng.randint(2, 20)]
    text, lines = [f"{name} {verb} {amounts[0]} {item} on {days[0]}"], []
    for day in days[1:]:
        kind = rng.choice(("more", "fewer"))
        difference = rng.randint(2, 12)
        written, amount = _step(amounts[-1], "+" if kind == "more" else "-", difference)
        text.append(f"{difference} {kind} on {day}")
        lines.append(f"On {day} {written}.")
        amounts.append(amount)
    total = _add_up(amounts, lines)
    story = f"{', '.join(text[:-1])} and {text[-1]}"
    return f"{story}. How many {item} is that in all?", lines, total


FAMILIES: dict[str, Callable[[random.Random], Problem]] = {
    "ledger": _ledger,
    "groups": _groups,
    "compare": _compare,
    "money": _money,
    "share": _share,
    "days": _days,
}


def split_of(question: str) -> str:
    """Returns the split of a question, "train" or, for a fifth of all, "eval", by a hash of its text."""
    return "train" if hashlib.sha256(question.encode()).digest()[0] % _HELD_OUT_SHARE else "eval"


def cot_rows(split: str, n: int, seed: int = 0) -> list[dict[str, str]]:
    """Generates `n` word problems of two to four steps, with rationale and answer.

    The same arguments give the same rows on every machine. No question occurs twice in a call, or in both splits. The
    six families of problems in `FAMILIES` take turns.

    Args:
        split: "train" or "eval", which is also held out from the pre-training corpus.
        n: number of rows.
        seed: seed of the rows. Other seeds give other rows of the split, and some questions may be the same.

    Returns:
        Rows `dict(question, reasoning, answer)` of texts; `reasoning` has a step per line, `answer` is in "1".."60".

    Raises:
        ValueError: `split` is unknown, `n` is negative, or `n` is so large that 200 draws give no new question.
    """
    if split not in ("train", "eval"):
        raise ValueError(f'split must be "train" or "eval", got {split!r}')
    if n < 0:
        raise ValueError(f"n must be 0 or more, got {n}")
    rng = random.Random(f"tpu_kit {split} {seed}")
    makers = list(FAMILIES.values())
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    while len(rows) < n:
        maker = makers[len(rows) % len(makers)]
        for _ in range(_MAX_ATTEMPTS):
            try:
                question, lines, answer = maker(rng)
            except _OutOfRange:
                continue
            if split_of(question) == split and question not in seen:
                break
        else:
            raise ValueError(f"found no new problem after {len(rows)} rows; ask for fewer than n={n}")
        seen.add(question)
        rows.append({"question": question, "reasoning": "\n".join(lines), "answer": str(answer)})
    return rows


_STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
_SIGNS: dict[str, Callable[[int, int], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
}  # fmt: skip


def preference_rows(split: str, n: int, seed: int = 0) -> list[dict[str, str]]:
    """Generates the problems of `cot_rows` with a right reply and a wrong reply; the arguments are as there.

    In the wrong reply, a random step has a wrong result, later steps go on with it, and the answer is wrong.

    Returns:
        Rows `dict(question, chosen, rejected)` of texts. A reply is "<think>", its steps, "</think>" and the answer,
        all on lines of their own; `chosen` is the right reply.

    Raises:
        ValueError: as `cot_rows`.
    """
    rng, rows = random.Random(f"tpu_kit wrong {split} {seed}"), list[dict[str, str]]()
    for row in cot_rows(split, n, seed):
        reasoning, answer = row["reasoning"], row["answer"]
        while (wrong := _with_error(reasoning, rng)) is None or wrong[1] == answer:
            pass
        chosen, rejected = (f"<think>\n{steps}\n</think>\n{said}" for steps, said in ((reasoning, answer), wrong))
        rows.append({"question": row["question"], "chosen": chosen, "rejected": rejected})
    return rows


def _with_error(reasoning: str, rng: random.Random) -> tuple[str, str] | None:
    """Returns (the steps with a wrong result in a random step, which later steps use; the answer that follows).

    The answer may be right. Returns None if a result is not a whole number in 1..LIMIT; then the caller calls again.
    """
    lines = reasoning.split("\n")
    changed, wrong = dict[str, str](), rng.randrange(len(lines))
    for number in range(wrong, len(lines)):
        step = _STEP.search(lines[number])
        assert step is not None, "each line is a step"
        first, sign, second, result = step.groups()
        a, b = changed.get(first, first), changed.get(second, second)
        value = _SIGNS[sign](int(a), int(b))
        value += rng.choice((-3, -2, -1, 1, 2, 3)) * (number == wrong)
        if not float(value).is_integer() or not 1 <= value <= LIMIT:
            return None
        changed[result] = str(int(value))
        lines[number] = _STEP.sub(f"{a} {sign} {b} = {changed[result]}", lines[number])
    return "\n".join(lines), changed[result]


def model_dir() -> Path:
    """Returns the folder of the embedded model: weights, config, tokenizer and chat template.

    Raises:
        ValueError: a file is missing because the package was installed without its data.
    """
    missing = [name for name in FILES if not (ASSETS / name).is_file()]
    if missing:
        raise ValueError(
            f"the embedded model lacks {', '.join(missing)}: tpu_kit was installed without its data files. "
            "Install it again"
        )
    return ASSETS
