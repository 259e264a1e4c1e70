"""Reasoning written by people and by templates, from two packages of the Python package index: data without a hub.

- `lm-eval` ships the worked examples of its few-shot tasks (MMLU with FLAN's rationales, BIG-Bench Hard, GSM8K): 371
  rows of question, rationale and answer. Only its task files are read; nothing of it is imported.
- `reasoning-gym` makes school arithmetic from 85 templates (`gsm_symbolic`) with a rationale each, as much as wanted.

The licences of MMLU, FLAN and BIG-Bench Hard apply to the first kind; see their projects.
"""

import hashlib
import importlib.util
import re
from pathlib import Path
from typing import Any

INSTALL = 'pip install --no-deps "lm-eval==0.4.13" && pip install "reasoning-gym==0.1.25"'
"""What brings both packages; lm-eval's own dependencies are not needed."""

TASK_FILES = ("mmlu/flan_cot_fewshot/mmlu_*.yaml", "bbh/cot_fewshot/[a-z]*.yaml", "gsm8k/gsm8k-cot.yaml")
GENERATED_ROWS = 1500

_HELD_OUT_SHARE = 8  # one question in eight belongs to the held-out split
_ANSWER = re.compile(r"(?:Therefore,? |So |Thus,? )?the answer is:?\s*(\S.{0,60}?)\.?\s*$", re.IGNORECASE | re.DOTALL)
_OPENING = re.compile(r"^Let's think step by step\.\s*")


def split_of(question: str) -> str:
    """Return the one split, "train" or "eval", that a question belongs to, by a hash of its text."""
    return "train" if hashlib.sha256(question.encode()).digest()[0] % _HELD_OUT_SHARE else "eval"


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"data.source=rationales needs the package {name.replace('_', '-')}: {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


def task_rows() -> list[dict[str, str]]:
    """Return the worked examples of lm-eval's tasks as rows (question, reasoning, answer), always in the same order.

    Raises:
        ValueError: the package is missing, or an example does not end in "the answer is ..." (another version of it).
    """
    import yaml

    tasks = _package_folder("lm_eval") / "tasks"
    rows = []
    for file in (file for pattern in TASK_FILES for file in sorted(tasks.glob(pattern))):
        samples = (yaml.safe_load(file.read_text(encoding="utf-8")).get("fewshot_config") or {}).get("samples") or []
        for number, sample in enumerate(samples):
            match = _ANSWER.search(sample["target"])
            if not match:
                raise ValueError(f'{file.name}, example {number}, does not end in "the answer is ...": {INSTALL}')
            reasoning = _OPENING.sub("", sample["target"][: match.start()]).strip()
            question = str(sample.get("question", sample.get("input"))).strip()
            rows.append({"question": question, "reasoning": reasoning, "answer": match[1].strip()})
    return rows


def generated_rows(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Return `n` rows (question, reasoning, answer) of reasoning-gym's `gsm_symbolic`.

    Its row i is made from seed + i, so neighbouring seeds give nearly the same rows: the seed is spaced out here.

    Raises:
        ValueError: the package, or one that it needs, is missing.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(f"data.source=rationales needs the package reasoning-gym ({error}): {INSTALL}") from error
    made: Any = reasoning_gym.create_dataset("gsm_symbolic", size=n, seed=1_000_003 * seed)
    rows = []
    for i in range(n):
        reasoning = made[i]["metadata"]["answer_cot"].rpartition("####")[0].strip()
        rows.append({"question": made[i]["question"], "reasoning": reasoning, "answer": made[i]["answer"]})
    return rows


def rationale_rows(split: str, seed: int = 0) -> list[dict[str, str]]:
    """Return the rows of both packages that belong to a split, mixed; no question of one split occurs in the other.

    Args:
        split: "train" or "eval".
        seed: of the generated rows.

    Raises:
        ValueError: an unknown split, or a package is missing.
    """
    if split not in ("train", "eval"):
        raise ValueError(f'data.source=rationales has the splits "train" and "eval", not {split!r}')
    rows = [row for row in task_rows() + generated_rows(GENERATED_ROWS, seed) if split_of(row["question"]) == split]
    return sorted(rows, key=lambda row: hashlib.sha256(f"order {row['question']}".encode()).digest())
