"""Chooses the questions that a run holds out for evaluation, and stores all its questions for later evaluations.

A question is a hash of a prompt, with its system turn and tools (`Conversation.questions`). The choice depends only on
the hashes and the seed, not on the order of the rows.
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
"""Largest number of held-out questions if `data.eval_rows` is null."""

QUESTIONS = "questions.npz"
"""Name of the file with `Questions` in a run's folder."""

UNKNOWN = (
    f"The training data of the adapter are unknown (there is no {QUESTIONS} beside it): it may have been trained on "
    "these rows."
)
"""Warning of an evaluation without the run's questions."""


class Questions(NamedTuple):
    """The questions of a run, as hashes.

    Attributes:
        trained: int64, prompts of all replies that the run and its starting adapter were trained on; sorted, distinct.
        held_out: int64, questions of its evaluation rows; sorted, distinct.
    """

    trained: np.ndarray
    held_out: np.ndarray

    def write(self, folder: Path) -> None:
        """Writes the questions to the file `QUESTIONS` of a run's local folder; replaces it atomically."""
        with atomic.replacing(folder / QUESTIONS) as part, part.open("wb") as file:
            np.savez(file, **self._asdict(), version=QUESTIONS_VERSION)

    @classmethod
    def read(cls, run: Path | str) -> Questions | None:
        """Reads the file `QUESTIONS` of a run's folder or URL; returns None if there is no such file.

        Raises ValueError if it is damaged or of another version of the kit, or if the object store cannot be read.
        """
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
                advice = "give an earlier copy, or delete it to continue without the questions of that run"
                raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {advice}") from error
            raise ValueError(
                f"{path} was written by another version of the kit, and its questions cannot be compared; use that "
                "version, or delete the file to continue without the questions of that run"
            )


def held_out_rows(config: DataConfig, questions: int) -> int:
    """Returns the number of questions to hold out of `questions`: `data.eval_rows`, or if null a tenth, from 1 to 64.

    An `eval_rows` below 1 is a share of the questions, rounded up.
    """
    if config.eval_rows is None:
        return min(MOST_HELD_OUT, max(1, questions // 10))
    # A share is rounded up, as `datasets.Dataset.train_test_split` does.
    return math.ceil(config.eval_rows * questions) if config.eval_rows < 1 else int(config.eval_rows)


def drawn(rows: np.ndarray, seed: int) -> np.ndarray:
    """Returns a shuffled copy of row numbers, so that the first are a random sample even if the source is sorted."""
    return np.random.default_rng(seed).permutation(rows)


def choose_questions(
    questions: np.ndarray, earlier: np.ndarray, config: DataConfig, trained: np.ndarray = NONE
) -> np.ndarray:
    """Chooses the questions to hold out, by their hashes and the seed; `held_out_rows` says how many.

    Args:
        questions: questions of the rows, int64 hashes, which may repeat. If eval_rows is null or a fraction, the number
            to hold out depends on the number of different questions outside of `earlier`.
        earlier: prompts of earlier replies in chats. They are not chosen, because training on the chat trains on them.
        config: the data section.
        trained: prompts that the run's starting adapter was trained on. They are not chosen.

    Returns:
        int64, distinct questions. There are fewer, perhaps none, if `trained` leaves too few. Empty if eval_rows is 0.

    Raises:
        ValueError: eval_rows leaves no question outside of `earlier` to train on.
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
