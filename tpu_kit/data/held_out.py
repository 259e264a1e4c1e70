"""Chooses the questions that a run holds out for evaluation, and stores its questions for later evaluations.

A question is a hash of a prompt, with its system turn and tools (`Conversation.questions`). The choice depends on the
hashes and the seed alone, not on the order of the rows.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tpu_kit.config.fields import show
from tpu_kit.config.loader import DataConfig
from tpu_kit.data.rows.schemas import QUESTIONS_VERSION
from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.object_store import at_hand

NONE = np.zeros(0, dtype=np.int64)
"""No questions."""

MOST_HELD_OUT = 64
"""The most rows held out where `data.eval_rows` is null."""

QUESTIONS = "questions.npz"
"""The file of `Questions` in the folder of a run."""

UNKNOWN = (
    f"The training data of the adapter are unknown (no run's {QUESTIONS} lies beside it): it may have been trained on "
    "these rows."
)
"""The warning of an evaluation of such an adapter."""


class Questions(NamedTuple):
    """The questions of a run.

    Attributes:
        trained: prompts of all replies that it trains on, int64.
        held_out: questions of its evaluation rows, int64.
    """

    trained: np.ndarray
    held_out: np.ndarray

    def write(self, folder: Path) -> None:
        """Writes them into the folder of the run."""
        with atomic.replacing(folder / QUESTIONS) as part, part.open("wb") as file:
            np.savez(file, **self._asdict(), version=QUESTIONS_VERSION)

    @classmethod
    def read(cls, run: Path | str) -> Questions | None:
        """Returns the questions of a run by its folder or URL; None without the file, ValueError if it is damaged."""
        with at_hand(run, QUESTIONS) as folder:
            path = folder / QUESTIONS
            if not path.is_file():
                return None
            try:
                with np.load(path) as file:
                    arrays = dict(file)
                if arrays.pop("version", None) == QUESTIONS_VERSION:
                    return cls(**arrays)
            except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile) as error:
                advice = "give an earlier copy, or delete it to go on without the questions of that run"
                raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {advice}") from error
            raise ValueError(
                f"{path} was written by another version of the kit, and its questions cannot be compared; use that "
                "version, or delete the file to go on without the questions of that run"
            )


def held_out_rows(config: DataConfig, questions: int) -> int:
    """Returns the number of held-out questions: `data.eval_rows`, or a tenth of all questions, from 1 to 64."""
    if config.eval_rows is None:
        return min(MOST_HELD_OUT, max(1, questions // 10))
    # A share is rounded up, as `datasets.Dataset.train_test_split` does.
    return math.ceil(config.eval_rows * questions) if config.eval_rows < 1 else int(config.eval_rows)


def drawn(rows: np.ndarray, seed: int) -> np.ndarray:
    """Returns rows in a random order, so that the first of them are a sample: a source may be sorted."""
    return np.random.default_rng(seed).permutation(rows)


def choose_questions(
    questions: np.ndarray, earlier: np.ndarray, config: DataConfig, trained: np.ndarray = NONE
) -> np.ndarray:
    """Returns the questions to hold out, fewer than `config` asks for where a model was trained on the others.

    Args:
        questions: of the rows.
        earlier: prompts of earlier replies in chats. They are not chosen: training on the chat trains on such a reply.
        config: the data section.
        trained: prompts that the model was trained on before the run, by the adapter it starts from.

    Raises:
        ValueError: no question is left to train on.
    """
    unique = np.setdiff1d(questions, earlier)
    count = held_out_rows(config, len(unique))
    if len(unique) <= count:
        problem = f"there are {len(unique)} different questions. Set it lower, or to null for a tenth of them,"
        if len(unique) == 1:
            problem = "all rows ask the same question. Give others, or name the right column in data.columns,"
        asked = f"data.eval_rows={show(config.eval_rows)}"
        raise ValueError(f"{asked} leaves nothing to train on: {problem} or set it to 0 for no evaluation")
    unique = np.setdiff1d(unique, trained)

    def salted(number: int) -> bytes:
        return hashlib.blake2b(f"{config.seed} {unique[number]}".encode()).digest()

    return unique[heapq.nsmallest(count, range(len(unique)), key=salted)]
