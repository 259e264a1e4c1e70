"""What a sweep runs: sweep.yaml and a notebook's parameters cell -> parameter sets, all checked before the first run.

What the file may hold is told by `python -m tpu_kit sweep --help`.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_kit.config import ConfigError, TrainConfig, load_config
from tpu_kit.config import read_yaml as read
from tpu_kit.fields import closest, show
from tpu_kit.persistence import find_place

KEYS = ("fixed", "grid", "runs", "dollars_per_hour", "output_dir")
_EACH_ITS_OWN = ("output_dir", "run_name")  # the sweep sets them
_NAME_LENGTH = 60


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        name: of its folder: what sets it apart, and a digest of all its parameters.
        swept: the parameters that are not the same in every run.
        parameters: all that the notebook is given, without those that the sweep sets itself.
    """

    name: str
    swept: Mapping[str, Any]
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Sweep:
    """A checked sweep.

    Attributes:
        notebook: the notebook.
        folder: of the tables, and of a folder per run.
        warning: what ends that folder early, and what to do; empty where nothing does.
        trials: the runs, in order.
        dollars_per_hour: price of the machine; None where the file names none.
    """

    notebook: Path
    folder: Path
    warning: str
    trials: Sequence[Trial]
    dollars_per_hour: float | None


def read_sweep(notebook: Path, path: Path) -> Sweep:
    """Reads and checks a sweep; nothing is run or written.

    Raises:
        ConfigError: all that is wrong with the file and with the parameters of any run.
    """
    for file in (notebook, path):
        if not file.is_file():
            raise ConfigError([f"{file}: no such file; give the notebook and the sweep's YAML file"])
    values = read(path)
    problems = list(_wrong_keys(values))
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    fixed, grid, listed = values.get("fixed") or {}, values.get("grid") or {}, values.get("runs") or []
    combinations = [dict(zip(grid, chosen, strict=True)) for chosen in itertools.product(*grid.values())]
    sets = [{**fixed, **one} for one in [*(combinations if grid else []), *listed]]
    accepts = Accepts.of(notebook)
    # One problem that all runs share is told once.
    problems = list(dict.fromkeys(problem for one in sets for problem in accepts.problems(one)))
    if again := [show(one) for number, one in enumerate(sets) if one in sets[:number]]:
        problems.append(f"{path}: {again[0]} is asked for twice; remove one of them")
    if problems:
        raise ConfigError(problems)
    place = find_place(TrainConfig(run_name=path.stem, output_dir=values.get("output_dir")))
    if "://" in place.output_dir:
        raise ConfigError([f"{path}: output_dir={place.output_dir}: notebooks and tables need a folder; name one"])
    same = {name for name in sets[0] if all(name in one and one[name] == sets[0][name] for one in sets)}
    trials = [_trial({name: value for name, value in one.items() if name not in same}, one) for one in sets]
    return Sweep(notebook, Path(place.output_dir), place.warning, trials, values.get("dollars_per_hour"))


def _wrong_keys(values: Mapping[str, Any]) -> Iterator[str]:
    for key in values:
        if key not in KEYS:
            near = closest(key, KEYS)
            yield f"{key}: no such key; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(KEYS)}")
    fixed, grid, listed = values.get("fixed") or {}, values.get("grid") or {}, values.get("runs") or []
    if not isinstance(fixed, Mapping):
        yield f"fixed: {show(fixed)} is no mapping; write name: value lines"
    if not isinstance(grid, Mapping) or not all(isinstance(choices, list) and choices for choices in grid.values()):
        yield f"grid: {show(grid)} is not names with a list each; write name: [first, second] lines"
    elif isinstance(fixed, Mapping) and (both := sorted(set(fixed) & set(grid))):
        yield f"grid: {both[0]} is in fixed too; remove one of them"
    if not isinstance(listed, list) or not all(isinstance(one, Mapping) for one in listed):
        yield f"runs: {show(listed)} is no list of mappings; write - {{name: value}} lines"
    if not grid and not listed:
        yield "nothing to run; give grid: {learning_rate: [1e-4, 3e-4]}, or a list of runs:"
    price = values.get("dollars_per_hour")
    if price is not None and (isinstance(price, bool) or not isinstance(price, int | float) or price < 0):
        yield f"dollars_per_hour: {show(price)} is no price; give a number, or leave it out"


def _trial(swept: Mapping[str, Any], parameters: Mapping[str, Any]) -> Trial:
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:6]
    told = re.sub(r"[^\w.=,+-]+", "_", ",".join(f"{name}={value}" for name, value in swept.items()))
    return Trial("-".join(filter(None, [told[:_NAME_LENGTH], digest])), swept, parameters)


@dataclass(frozen=True)
class Accepts:
    """What a notebook can be given, by its source alone.

    Attributes:
        notebook: its path, for errors.
        own: names and literals of its parameters cell.
        configures: whether it hands them to `notebook.config`, which takes every parameter of a run.
        file: the configuration file it starts from, or the name in `own` that holds it; None where it has none.
        also: those of `own` that it keeps from the configuration.
    """

    notebook: Path
    own: Mapping[str, Any]
    configures: bool
    file: str | None
    also: Sequence[str]

    @classmethod
    def of(cls, notebook: Path) -> Accepts:
        """Reads a notebook.

        Raises:
            ConfigError: it is no notebook, has no parameters cell, or nothing that says where it writes.
        """
        try:
            cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
            sources = ["".join(cell["source"]) for cell in cells]
            tagged = [s for s, c in zip(sources, cells, strict=True) if "parameters" in c["metadata"].get("tags", [])]
        except (ValueError, KeyError, TypeError):
            raise ConfigError([f"{notebook}: not a notebook; give an .ipynb file of format 4"]) from None
        if len(tagged) != 1:
            raise ConfigError([f"{notebook}: {len(tagged)} cells are tagged parameters, and one must be; tag that one"])
        own = {}
        try:
            for statement in ast.parse(tagged[0]).body:
                if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                    own[statement.targets[0].id] = ast.literal_eval(statement.value)
        except (SyntaxError, ValueError):
            raise ConfigError([f"{notebook}: its parameters cell may hold name = literal lines alone"]) from None
        calls = [call for source in sources for call in _calls(source)]
        if not calls and "output_dir" not in own:
            advice = "give it an output_dir parameter and write there"
            raise ConfigError([f"{notebook}: takes no output_dir, so that its runs would overwrite another; {advice}"])
        return cls(notebook, own, bool(calls), *(_arguments(calls[0], own) if calls else (None, ())))

    def problems(self, parameters: Mapping[str, Any]) -> list[str]:
        """What is wrong with a set of parameters; an empty list if the notebook would take it."""
        found = [f"{name}: each run has its own; remove it" for name in _EACH_ITS_OWN if name in parameters]
        given = {name: value for name, value in {**self.own, **parameters}.items() if name not in _EACH_ITS_OWN}
        kept = self.also if self.configures else self.own
        for name in kept:
            if name in parameters and not _alike(parameters[name], self.own[name]):
                found.append(f"{name}: {show(parameters[name])} is not of the type of {show(self.own[name])}; mend it")
        rest = {name: value for name, value in given.items() if name not in kept}
        for name in list(rest):
            if near := closest(name, kept, similarity=0.8 if self.configures else 0.6):
                found.append(f"{name}: no such parameter of {self.notebook}; did you mean {near[0]}?")
                del rest[name]
            elif not self.configures:
                found.append(f"{name}: no such parameter of {self.notebook}; it has {', '.join(self.own)}")
        if self.configures:
            try:
                load_config(None if self.file is None else given.get(self.file, self.file), parameters=rest)
            except ConfigError as error:
                found += error.problems
        return found


def _calls(source: str) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a cell of magics, which configures nothing
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "notebook.config":
            yield node


def _arguments(call: ast.Call, own: Mapping[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    given = dict(zip(("namespace", "path"), call.args, strict=False))
    given |= {word.arg: word.value for word in call.keywords if word.arg}
    path, also = given.get("path"), given.get("also")
    file = None  # none, or one that the notebook computes
    if isinstance(path, ast.Name) and path.id in own:
        file = path.id
    elif isinstance(path, ast.Constant) and isinstance(path.value, str):
        file = path.value
    elements = also.elts if isinstance(also, ast.List | ast.Tuple | ast.Set) else []
    names = [element.value for element in elements if isinstance(element, ast.Constant)]
    return file, tuple(name for name in own if name in names)


def _alike(value: Any, default: Any) -> bool:
    if default is None or value is None:
        return True
    if isinstance(default, float) and isinstance(value, int):
        return not isinstance(value, bool)
    return type(value) is type(default) or (isinstance(value, list) and isinstance(default, tuple))
