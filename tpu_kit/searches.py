"""The search command: a question, answered by a tree of thoughts that is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from tpu_kit.config import ConfigError, load_config
from tpu_kit.launch import LaunchError
from tpu_kit.search import SearchOptions, think
from tpu_kit.verifiers import imported

_OWN = {
    "prompt": "The question.",
    "adapter": "The folder that training wrote; without it the base model answers.",
    "out": "A file for the tree as HTML.",
}
_OPTIONS = {field.name: field for field in fields(SearchOptions)}


def explain() -> str:
    """The parameters of the command, for its `--help`."""
    lines = [f"  {name:<20}{text}" for name, text in _OWN.items()]
    lines += [f"  {name:<20}{field.default!r} by default" for name, field in _OPTIONS.items()]
    return "\n".join([*lines, "score is logprob, self-evaluation, or a function as module:function."])


def main(arguments: Sequence[str]) -> int:
    """`python -m tpu_kit search`: prints the tree and the answer; returns the exit code."""
    given: dict[str, str] = {}
    rest, problems = [], []
    options: dict[str, Any] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name in _OWN:
            given[name] = value
        elif equals and name in _OPTIONS:
            try:
                options[name] = _read(name, value)
            except ValueError as error:
                problems.append(f"{name}={value}: {error}")
        elif argument != "--json":
            rest.append(argument)
    files = [argument for argument in rest if "=" not in argument]
    problems += [f"{', '.join(files)}: one configuration file at most"] if len(files) > 1 else []
    try:
        chosen = SearchOptions(**options)
    except ValueError as error:
        problems.append(str(error))
    problems += [] if given.get("prompt") else ['prompt: there is none; give prompt="..."']
    if problems:
        raise ConfigError(problems)
    config = load_config(files[0] if files else None, [argument for argument in rest if argument not in files])
    try:
        found = think(config, given["prompt"], chosen, adapter_dir=given.get("adapter"))
    except ConfigError:
        raise
    except (LaunchError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if out := given.get("out"):
        Path(out).write_text(found._repr_html_())
    print(json.dumps(found.to_dict(), indent=2) if "--json" in arguments else found)
    return 0


def _read(name: str, value: str) -> Any:
    """An option's value out of its text.

    Raises:
        ValueError: it is none.
    """
    default = _OPTIONS[name].default
    assert default is not MISSING
    if name == "score" and ":" in value:
        return imported(value)
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise ValueError("true or false is needed")
        return value.lower() == "true"
    return (float if default is None else type(default))(value)
