"""Translates parameters of TRL's SFT scripts, axolotl and Unsloth, and names replacements for tools of CUDA."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tpu_kit.config.fields import show

_TABLES = tomllib.loads(Path(__file__).with_name("other_trainers.toml").read_text())
NAMES: dict[str, str] = _TABLES["names"]
"""Their name -> ours."""
_VALUES = {name: choices for names, choices in _TABLES["values"].items() for name in names.split()}
_DEFAULT = "(default)"
_SMALL_ADAMW = r"paged_adamw\w*|adamw(_bnb|_torch)?_?[48]bit"  # AdamW whose moments are paged or quantized


def translate(values: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Translates the parameters of another trainer.

    Args:
        values: of a file; our own and unknown parameters stay as they are.
        known: our names, with and without their sections.

    Returns:
        The values by our names; a note for each translated or ignored value; a problem for each value without a
        counterpart.
    """
    translated: dict[str, Any] = {}
    notes, problems, small_adamw = [], [], ""
    for key, value in values.items():
        name, text, choices = NAMES.get(key, ""), str(value).lower(), _VALUES.get(key, {})
        assignment, advice = f"{key}={show(value)}", "" if text in choices else _advice("missing", key, text)
        tool, why = "" if text in choices else instead(key, value), _advice("ignored", key, text)
        unset = value is None or text in ("false", "", "[]")
        if key in ("optim", "optimizer") and re.fullmatch(_SMALL_ADAMW, text):
            small_adamw = assignment
        elif (key in known and text not in choices) or (key == "optim" and not isinstance(value, str)):
            translated[key] = value
        elif choices.get(text) == _DEFAULT or (unset and (tool or advice)) or (value is None and (name or why)):
            notes.append(f"{assignment} is ignored: it is the default")
        elif why:
            notes.append(f"{assignment} is ignored: {why}")
        elif key == "datasets" and isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
            translated[name] = value[0].get("path")
            notes.append(f"datasets -> {name}={show(translated[name])}")
        elif key == "report_to" and text in ("tensorboard", "['tensorboard']"):
            translated["tracking.tensorboard"] = True
            notes.append(f"{assignment} -> tracking.tensorboard=true")
        elif advice:
            problems.append(f"{key}: {show(value)} has no counterpart here; {advice}")
        elif tool or not name:
            translated[key] = value  # `load_config` refuses it with advice
        else:
            ours = choices.get(text, value)
            if name in translated and translated[name] != ours:
                problems.append(
                    f"{name}: given twice, as {show(translated[name])} and as {assignment}; remove one of them"
                )
            translated[name] = ours
            notes.append(f"{assignment} -> {name}={show(ours)}")
    if small_adamw and _trains_all(translated):
        problems.append(f"{small_adamw} has no counterpart here with lora.r=0; {instead('optim', 'adamw_8bit')}")
    elif small_adamw:
        translated["optim.optimizer"] = "adamw"
        notes.append(f"{small_adamw} -> optim.optimizer='adamw': the moments of adapters are small")
    return translated, notes, problems


def _trains_all(values: Mapping[str, Any]) -> bool:
    section = values.get("lora")
    rank = section.get("r") if isinstance(section, Mapping) else None
    return 0 in (rank, values.get("lora.r"), values.get("r"))


def instead(name: str, value: object) -> str:
    """Returns the advice for a tool that exists only for CUDA; empty for other values."""
    return _advice("cuda", name.rpartition(".")[2].lower(), str(value).lower())


def _advice(table: str, name: str, text: str) -> str:
    for rule in _TABLES[table]:
        names = rule["names"] if isinstance(rule["names"], str) else "|".join(rule["names"])
        if re.fullmatch(names, name) and ("values" not in rule or re.fullmatch(rule["values"], text)):
            return str(rule["advice"])
    return ""
