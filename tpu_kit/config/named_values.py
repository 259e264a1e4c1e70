"""Allowed values that a type cannot express: verifiers, rewards, objectives, pairs of layers, roles of columns.

schema.py gives the `check_` functions to the parameters, so that a wrong value is refused when it is read.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from tpu_kit.config.registry import OBJECTIVES, absence, installed


class RowFormat(NamedTuple):
    """A format of rows.

    Attributes:
        read: "module:function", which makes a `Conversation` from a row, its layout and the data section.
        needed: roles that a row's columns must have.
        roles: all roles that its columns may have; `data.columns` maps them to names of columns.
    """

    read: str
    needed: tuple[str, ...]
    roles: tuple[str, ...]


DataFormat = Literal["auto", "cot", "messages", "prompt_completion", "text", "prompt", "preference", "unpaired"]
FORMATS = {
    "cot": RowFormat(
        "tpu_kit.data.rows.schemas:read_problem", ("question", "answer"),
        ("system", "history", "question", "context", "options", "tools", "images", "reasoning", "answer"),
    ),
    "messages": RowFormat(
        "tpu_kit.data.rows.schemas:read_chat", ("messages",),
        ("system", "messages", "tools", "images", "reasoning", "answer"),
    ),
    "prompt_completion": RowFormat(
        "tpu_kit.data.rows.schemas:read_completion", ("prompt", "completion"),
        ("system", "prompt", "completion", "tools", "images"),
    ),
    "text": RowFormat("tpu_kit.data.rows.schemas:read_text", ("text",), ("text",)),
    "prompt": RowFormat("tpu_kit.data.rows.schemas:read_prompt", ("prompt",), ("system", "prompt", "tools", "answer")),
    "preference": RowFormat(
        "tpu_kit.data.rows.preferences:read_pair", ("chosen", "rejected"),
        ("system", "history", "messages", "prompt", "question", "context", "tools", "chosen", "rejected"),
    ),
    "unpaired": RowFormat(
        "tpu_kit.data.rows.preferences:read_labelled", ("label",),
        ("system", "history", "messages", "prompt", "question", "context", "tools", "completion", "label"),
    ),
}  # fmt: skip
"""The row formats by name; messages have reasoning and answer if separate columns hold the last turn."""

_OF_DPO = ("preference", "unpaired")  # auto never picks these formats by column names alone

ROLES = {name: each.roles for name, each in FORMATS.items()}

VERIFIERS = {
    "auto": "tpu_kit.generation.evaluation.verifiers:auto",
    "exact": "tpu_kit.generation.evaluation.verifiers:exact",
    "numeric": "tpu_kit.generation.evaluation.verifiers:numeric",
    "choice": "tpu_kit.generation.evaluation.verifiers:choice",
    "math": "tpu_kit.generation.evaluation.verifiers:math",
    "reasoning_gym": "tpu_kit.generation.evaluation.verifiers:reasoning_gym",
}
"""The `Verifier` of every name; verifiers may also be regex:PATTERN or module:function."""

REWARDS = {
    "think_format": "tpu_kit.generation.evaluation.rewards:think_format",
    "length": "tpu_kit.generation.evaluation.rewards:length",
}
"""Rewards that are no verifiers: functions of all attempts and the run."""

EXPORT_FORMATS = {
    "adapter": "tpu_kit.exporting.formats:ADAPTER",
    "merged": "tpu_kit.exporting.formats:MERGED",
    "vllm": "tpu_kit.exporting.formats:VLLM",
    "gguf-f16": "tpu_kit.exporting.gguf:F16",
    "gguf-bf16": "tpu_kit.exporting.gguf:BF16",
    "gguf-q8_0": "tpu_kit.exporting.gguf:Q8_0",
    "gguf-lora": "tpu_kit.exporting.gguf:LORA",
}
"""The `tuned_model.Format` of every export format; a new format needs that object and a line here."""

_CODE = "the kit runs no code of a model; write module:function, which sends it to a sandbox"
_TRL = "write module:function, such as a function of trl.rewards"
_OPEN_R1_REWARDS = {
    "accuracy": "use math, or auto", "format": "use think_format; for <answer> tags too write module:function",
    "soft_overlong_punishment": "use length", "cosine": _TRL, "repetition_penalty": _TRL,
    "len": "use length, which is DAPO's",
    "tag_count": "use think_format, or write module:function", "reasoning_steps": "write module:function",
    "code": _CODE, "binary_code": _CODE, "ioi_code": _CODE, "cf_code": _CODE, "code_format": "use regex:PATTERN",
}  # fmt: skip
"""open-r1's rewards -> the alternative. open-r1's `length` differs from the kit's reward of this name."""

FUNCTION = re.compile(r"[\w.]+:\w+")


def imported(name: str) -> Callable[..., Any]:
    """Imports and returns the function or class that "module:function" names.

    Raises:
        ValueError: the module or the name does not exist, the module raises any error at import, or the object is not
            callable.
    """
    module, _, function = name.partition(":")
    try:
        target: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        text = f"{type(error).__name__}: {error}".strip(": ")
        raise ValueError(f"it cannot be imported ({text}); name a function as module:function") from error
    if not callable(target):
        raise ValueError(f"it is a {type(target).__name__}, not a function")
    return target


def check_verifier(name: str) -> None:
    """Raises ValueError unless `name` is in `VERIFIERS`, a valid regex:PATTERN or a module:function (not imported)."""
    if name.startswith("regex:"):
        try:
            re.compile(name.removeprefix("regex:"))
        except re.error as error:
            raise ValueError(f"has a pattern that cannot be read ({error}); correct it") from error
    elif name in _OPEN_R1_REWARDS:
        raise ValueError(f"is a reward of open-r1; {_OPEN_R1_REWARDS[name]}")
    elif name not in VERIFIERS and not FUNCTION.fullmatch(name):
        raise ValueError(f"names no rule; use {', '.join(VERIFIERS)}, regex:PATTERN or module:function")


def check_rewards(names: tuple[str, ...]) -> None:
    """Raises ValueError, with all problems, unless all names are in `REWARDS` or pass `check_verifier`."""
    problems, offered = [], ", ".join([*REWARDS, "auto"])
    for name in names:
        try:
            if name not in REWARDS:
                check_verifier(name)
        except ValueError as error:
            problems.append(f"{name!r} {str(error).replace('use auto', f'use {offered}')}")
    if problems:
        raise ValueError("; ".join(problems))


def check_objective(name: str) -> None:
    """Raises ValueError unless `name` is an installed one of `OBJECTIVES`, or a module:function (not imported)."""
    if absent := absence(OBJECTIVES.get(name, "")):
        raise ValueError(f"is {absent}")
    if name not in OBJECTIVES and not FUNCTION.fullmatch(name):
        raise ValueError(f"must be {', '.join(installed(OBJECTIVES))} or module:function")


def check_format(name: str) -> None:
    """Raises ValueError unless `name` is "auto", in `FORMATS`, or a module:function (not imported)."""
    if name != "auto" and name not in FORMATS and not FUNCTION.fullmatch(name):
        raise ValueError(f"must be auto, {', '.join(FORMATS)} or module:function")


def check_source_name(name: str) -> None:
    """Raises ValueError if `name` has a slash, unprintable character or outer space; metrics are eval_loss/NAME."""
    if name != name.strip() or not name.isprintable() or "/" in name:
        raise ValueError("cannot name a metric; use letters, digits, dots and dashes")


def check_rows_held_out(count: float) -> None:
    """Raises ValueError if `data.eval_rows` is above 1 and not whole; below 1 it is a share."""
    if count > 1 and count != int(count):
        raise ValueError("is neither a whole number of rows nor a share below 1")


def check_updates_between(count: float) -> None:
    """Raises ValueError if `optim.eval_steps` is above 1 and not whole; below 1 it is a share."""
    if count >= 1 and count != int(count):
        raise ValueError("is neither a whole number of updates nor a share below 1")


def check_roles(columns: Mapping[str, str], fmt: str) -> None:
    """Raises ValueError if a role of `columns` (role -> column) is unknown, or if the row format `fmt` lacks it.

    For "auto" and module:function, a single format in `FORMATS` must have all the roles. Then preference counts only if
    chosen or rejected is named, and unpaired only if label is. Names with an empty value are not checked: they may also
    be columns to leave out.
    """
    known = sorted({role for roles in ROLES.values() for role in roles})
    named = {role for role, column in columns.items() if column}
    if unknown := sorted(named - set(known)):
        raise ValueError(f"names the unknown role {', '.join(unknown)}; the roles are {', '.join(known)}")
    formats = (
        {fmt: ROLES[fmt]}
        if fmt in ROLES
        else {name: roles for name, roles in ROLES.items() if name not in _OF_DPO or named & {*FORMATS[name].needed}}
    )
    if not any(named <= set(roles) for roles in formats.values()):
        of_each = "; ".join(f"{name} has {', '.join(roles)}" for name, roles in formats.items())
        raise ValueError(f"names {', '.join(sorted(named))}; {of_each}: name roles of one format, or set data.format")


def layer_pairs(text: str | None) -> tuple[tuple[int, int], ...]:
    """Returns "12:14,24:28" as pairs (model layer, teacher layer) from 1, None as (); ValueError for other texts."""
    pairs = [re.fullmatch(r"\s*([1-9]\d*):([1-9]\d*)\s*", part) for part in (text or "").split(",")]
    if text is not None and not all(pairs):
        raise ValueError("names no pairs of layers counted from 1; write model:teacher, as in 12:14")
    return tuple((int(pair[1]), int(pair[2])) for pair in pairs if pair)
