"""Writes rows with rationales from two Python packages, for `make train-real`.

    python -m tests.support.real_rows FOLDER

- `lm-eval` ships the worked examples of its few-shot tasks (MMLU with FLAN's rationales, BIG-Bench Hard, GSM8K): 371
  rows of question, rationale and answer, written by people. Only its task files are read; it is not imported.
- `reasoning-gym` generates school arithmetic problems with rationales from 85 templates (`gsm_symbolic`).

The licences of MMLU, FLAN and BIG-Bench Hard apply to the rows of the first package; see their projects.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

GENERATED_ROWS = 1500
TASK_FILES = ("mmlu/flan_cot_fewshot/mmlu_*.yaml", "bbh/cot_fewshot/[a-z]*.yaml", "gsm8k/gsm8k-cot.yaml")
_HELD_OUT_SHARE = 8  # one question in eight is held out
_ANSWER = re.compile(r"(?:Therefore,? |So |Thus,? )?the answer is:?\s*(\S.{0,60}?)\.?\s*$", re.IGNORECASE | re.DOTALL)
_OPENING = re.compile(r"^Let's think step by step\.\s*")


def task_rows() -> list[dict[str, str]]:
    """Returns the worked examples of lm-eval's tasks as rows (question, reasoning, answer), in a fixed order."""
    (folder,) = importlib.util.find_spec("lm_eval").submodule_search_locations
    rows = []
    for file in (file for pattern in TASK_FILES for file in sorted(Path(folder, "tasks").glob(pattern))):
        samples = (yaml.safe_load(file.read_text(encoding="utf-8")).get("fewshot_config") or {}).get("samples") or []
        for sample in samples:
            match = _ANSWER.search(sample["target"])
            reasoning = _OPENING.sub("", sample["target"][: match.start()]).strip()
            question = str(sample.get("question", sample.get("input"))).strip()
            rows.append({"question": question, "reasoning": reasoning, "answer": match[1].strip()})
    return rows


def generated_rows(n: int) -> list[dict[str, str]]:
    """Returns `n` rows (question, reasoning, answer) of reasoning-gym's `gsm_symbolic`."""
    import reasoning_gym

    made: Any = reasoning_gym.create_dataset("gsm_symbolic", size=n, seed=0)
    return [
        {
            "question": made[i]["question"],
            "reasoning": made[i]["metadata"]["answer_cot"].rpartition("####")[0].strip(),
            "answer": made[i]["answer"],
        }
        for i in range(n)
    ]


def split_rows() -> dict[str, list[dict[str, str]]]:
    """Returns the shuffled rows of both packages as "train" and "eval"; no question is in both."""
    splits: dict[str, list[dict[str, str]]] = {"train": [], "eval": []}
    every = task_rows() + generated_rows(GENERATED_ROWS)
    for row in sorted(every, key=lambda row: hashlib.sha256(f"order {row['question']}".encode()).digest()):
        held_out = hashlib.sha256(row["question"].encode()).digest()[0] % _HELD_OUT_SHARE == 0
        splits["eval" if held_out else "train"].append(row)
    return splits


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for name, rows in split_rows().items():
        (target / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
