"""A user's loss is checked before the launch, and each mistake is reported with its line."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

from tests.support import own_objectives
from tpu_kit.config.loader import load_config
from tpu_kit.training.losses.objective_check import _Operations, check_objective

OWN = "tests.support.own_objectives"


def checked(name: str) -> None:
    settings = {"objective": f"{OWN}:{name}", "max_length": 32, "batch_size": 2, "model.name": "embedded"}
    check_objective(load_config(None, settings))


def line_of(text: str) -> int:
    (found,) = [n for n, line in enumerate(Path(own_objectives.__file__).read_text().splitlines(), 1) if text in line]
    return found


def test_a_loss_that_keeps_to_tensors_passes() -> None:
    checked("squared")
    checked("WithScale")


@pytest.mark.parametrize(
    ("name", "line", "text"),
    [
        ("reads", "if logits.mean() > 0:", "reads values of tensors at "),
        ("picks", "chosen = logits[labels != -100]", "reads values of tensors at "),
        ("grows", "part = logits[:, : 4 + _calls]", "does something else each time it is called, from "),
        ("fails", 'raise KeyError("weights")', "fails at "),
        ("calls", 'return model(input_ids=batch["input_ids"]', "fails at "),
    ],
)
def test_what_a_tpu_cannot_run_is_told_with_its_line(name: str, line: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"optim.objective={OWN}:{name} {text}")) as error:
        checked(name)
    assert f"own_objectives.py:{line_of(line)} (`{line}" in str(error.value)
    assert name != "calls" or "the documents of a packed row; call hidden_states(model, batch)" in str(error.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "missing",
            "it cannot be imported (AttributeError: module 'tests.support.own_objectives' has no attribute 'missing')",
        ),
        ("alone", "must take the arguments (model, batch); change it"),
        ("a_tensor", "returned a Tensor; return Sums(loss, weight) of tpu_kit.training.objectives"),
        ("detached", "returned a loss without a gradient to the model; do not detach it"),
        ("by_token", "returned values that are not scalar tensors; sum loss and weight over all tokens"),
        ("in_fp64", "returned sums of torch.float64, which a TPU lacks; compute them in torch.float32"),
        ("NoObjective", "is a class, but not a subclass of Objective; derive it from that"),
    ],
)
def test_a_loss_of_another_form_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        checked(name)


def test_an_operation_has_the_line_that_called_it_whatever_calls_it() -> None:
    with _Operations(__file__) as operations:
        torch.zeros(2) + 1
    assert [line for *_, line in operations.done] == [inspect.currentframe().f_lineno - 1] * 2  # type: ignore[union-attr]
