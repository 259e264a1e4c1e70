"""Checks a run's objective and layers before the launch: whether the teacher fits, and the user's own loss.

The user's loss runs twice on PyTorch's "meta" device, where an operation fails if it reads a value or its shape depends
on values. Both calls must do the same, because XLA compiles a program for every sequence of operations and shapes.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpu_kit.config.fields import hide_secrets
from tpu_kit.config.loader import ConfigError, TrainConfig
from tpu_kit.config.named_values import imported
from tpu_kit.config.sections.preference import PreferenceConfig
from tpu_kit.model import causal_lm as models
from tpu_kit.model import trainable
from tpu_kit.model.states_head import StatesHead, file_names, find_head, title
from tpu_kit.torch_tpu.limits import tracer
from tpu_kit.training.losses.rollout_programs import check_sampling
from tpu_kit.training.objectives import Objective, Sums, objective_of

_READS = ("meta tensor", "register_meta function", "data-dependent")


def check_objective(config: TrainConfig, objective: Objective | None = None) -> None:
    """Checks that the teacher fits the model, and the user's loss by two calls without values.

    Args:
        config: the run.
        objective: the run's objective; None makes it, and raises the errors of `objective_of`.

    Raises:
        ValueError: the folder in model.name or distill.teacher has a `StatesHead`. `Objective.check` fails, as for a
            teacher that does not fit. The user's loss fails, calls the model itself, reads tensors, differs between two
            calls, or does not return scalar `Sums` with a gradient. Or the user's loss attaches a `StatesHead`, and
            tracking.eval_generate_rows is not 0.
        ConfigError: from `check_sampling` and `check_pairs`.
    """
    for parameter, name in (("model.name", config.model.name), ("distill.teacher", config.distill.teacher)):
        if name is not None and (head := find_head(Path(name))):
            raise ValueError(
                f"{parameter}={name}: its {title(head)} is for generate and evaluate only; copy the folder without "
                f"{' and '.join(file_names(head))}, and name the copy"
            )
    check_sampling(config)
    check_pairs(config)
    objective = objective or objective_of(config)
    objective.check()
    if ":" in config.optim.objective:
        _check_own(config, objective)


def check_pairs(config: TrainConfig) -> None:
    """Raises ConfigError if a run without optim.objective=preference changes defaults of `preference`."""
    known = PreferenceConfig()
    if not config.on_pairs and config.preference != known:
        changed = [
            one.name for one in fields(known) if getattr(config.preference, one.name) != getattr(known, one.name)
        ]
        raise ConfigError([f"preference.{name}: has no effect here; train with dpo, or remove it" for name in changed])


def _check_own(config: TrainConfig, objective: Objective) -> None:
    """Calls the user's loss twice on an empty model; raises the ValueErrors of `check_objective` about it."""
    from tpu_kit.model.meta_model import empty_model  # loads torch's compiler, which takes a second

    name, target = f"optim.objective={config.optim.objective}", imported(config.optim.objective)
    # For a class defined in a notebook's cell, Python knows the file of its methods, not of the class.
    methods = filter(inspect.isfunction, vars(target).values())
    file = inspect.getsourcefile(next(methods, target) if isinstance(target, type) else target)
    whole = replace(config, model=replace(config.model, base_dtype="fp32"))  # "meta" has no autocast
    with torch.device("meta"):
        model = trainable.adapt(empty_model(whole), config.lora, "fp32").train()
        objective.attach(model, lambda one: empty_model(replace(whole, model=one)))
        models.base_model(model).get_decoder().register_forward_pre_hook(_refuse_own_call, with_kwargs=True)
        if config.tracking.eval_generate_rows and isinstance(getattr(model, "objective", None), StatesHead):
            raise ValueError(f"tracking.eval_generate_rows would answer without the head of {name}; set it to 0")
        rows = config.optim.batch_size if isinstance(config.optim.batch_size, int) else 1
        length = config.data.max_length
        columns = objective.batch_columns(False).items()
        batch = {column: torch.zeros((rows, length * width), dtype=dtype) for column, (width, dtype) in columns}
        seen = []
        for _ in range(2):
            with _Operations(file) as operations:
                try:
                    found = objective(model, batch)
                except Exception as error:
                    raise ValueError(_explained(name, file, error)) from error
            seen.append(operations.done)
    _check_sums(name, objective, found)
    pairs = zip([*seen[0], None], [*seen[1], None], strict=False)
    if other := next((two or one for one, two in pairs if (one and one[:2]) != (two and two[:2])), None):
        place = _at(file, other[2])
        raise ValueError(
            f"{name} does something else each time it is called, from {place} on: {other[0]} with the shapes "
            f"{other[1]}. XLA would compile every step anew, for minutes. Pass values that change as tensors of fixed "
            "shape, and use a mask in place of a slice"
        )


def _check_sums(name: str, objective: Objective, found: Any) -> None:
    """Raises ValueError unless a loss returned `Sums` of scalars, not fp64, with all extra sums and a gradient."""
    if not isinstance(found, Sums):
        raise ValueError(
            f"{name} returned a {type(found).__name__}; return Sums(loss, weight) of tpu_kit.training.objectives"
        )
    if any(not isinstance(one, torch.Tensor) or one.ndim for one in (found.loss, found.weight, *found.extra)):
        raise ValueError(f"{name} returned values that are not scalar tensors; sum loss and weight over all tokens")
    if wide := [one.dtype for one in (found.loss, found.weight, *found.extra) if one.dtype == torch.float64]:
        raise ValueError(f"{name} returned sums of {wide[0]}, which a TPU lacks; compute them in torch.float32")
    if len(found.extra) != len(objective.extra):
        raise ValueError(f"{name} returned {len(found.extra)} extra sums, but its `extra` names {len(objective.extra)}")
    if not found.loss.requires_grad:
        raise ValueError(f"{name} returned a loss without a gradient to the model; do not detach it")


def _explained(name: str, file: str | None, error: Exception) -> str:
    """Returns the text for an error of the user's loss: its last line in `file`, and whether it reads values."""
    frames = traceback.walk_tb(error.__traceback__)
    place = _at(file, [0, *(line for frame, line in frames if frame.f_code.co_filename == file)][-1])
    text = hide_secrets(str(error)).strip().split("\n")[0][:200]
    if not any(part in str(error) for part in _READS):
        return f"{name} fails at {place}: {type(error).__name__}: {text}"
    return (
        f"{name} reads values of tensors at {place}: {text}. The device would wait for the host in every step. "
        "Compute with tensors: torch.where in place of a condition, a mask in place of a boolean index or nonzero"
    )


def _refuse_own_call(decoder: Any, args: Any, kwargs: Any) -> None:
    """Raises ValueError, as a pre-hook, if a loss calls the model itself: the kit's calls have use_cache=False."""
    if kwargs.get("use_cache") is not False:
        raise ValueError(
            "it calls the model itself, which ignores the documents of a packed row; call hidden_states(model, batch) "
            "or logits(model, batch) of tpu_kit.model.causal_lm"
        )


def _at(file: str | None, line: int) -> str:
    """Describes a line by file, number and source text; for line 0, the file only."""
    return f"{file}:{line} (`{linecache.getline(file, line).strip()}`)" if file and line else str(file)


class _Operations(TorchDispatchMode):
    """Records operations: name, shapes of the results, and the line of `file` that called it, or 0."""

    def __init__(self, file: str | None) -> None:
        super().__init__()
        self.file = file
        self.done: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        shapes = str([tuple(one.shape) for one in tree_leaves(found) if isinstance(one, torch.Tensor)])
        frames = traceback.walk_stack(sys._getframe())
        line = next((line for frame, line in frames if frame.f_code.co_filename == self.file), 0)
        self.done.append((str(func), shapes, line))
        return found


def check_layers(config: TrainConfig, device_type: str) -> None:
    """Raises ValueError if `device_type` is "torch-tpu" and TorchTPU cannot train the model's layers.

    The errors are from `prepare_layers` and `check_dropouts`. Other device types are not checked.
    """
    from tpu_kit.model.meta_model import empty_model  # loads torch's compiler, which takes a second
    from tpu_kit.model.preparation import prepare_layers
    from tpu_kit.training.step import check_dropouts

    if tracer(device_type) == "torch_xla":
        return
    with torch.device("meta"):
        model = trainable.adapt(empty_model(config), config.lora, config.model.base_dtype).train()
        prepare_layers(model, config, device_type)
    check_dropouts(model)
