"""Judges answers of the embedded model more strictly than the verifiers do."""

from __future__ import annotations

import re

_ANSWER_END = re.compile(r"<\|(?:end|pad)\|>")


def is_correct(row: dict[str, str], text: str, think_open: str = "<think>", think_close: str = "</think>") -> bool:
    """Returns whether a model's reply ends in the row's answer.

    The final part is the text after the last `think_close`, or the whole text if it has no tags, up to the first
    end-of-turn or padding token. After white space and one closing full stop are stripped it must equal
    `row["answer"]`. A reply that ends within its reasoning is wrong. The rationale is not judged.

    Args:
        row: A row of `cot_rows`, or any dict with an "answer".
        text: The reply, decoded with or without special tokens.
        think_open: The tag that opens the rationale.
        think_close: The tag that closes it.
    """
    text = _ANSWER_END.split(text, maxsplit=1)[0]
    _, closed, answer = text.rpartition(think_close)
    if think_open in answer or (not closed and think_open in text):
        return False
    return answer.strip().removesuffix(".").rstrip() == row["answer"].strip()
