"""Reads the configuration of one run from YAML, the command line and notebook parameters; shows and writes it.

    config = load_config("embedded-cot", ["batch_size=2", "optim.max_steps=20"])
    print(describe(config))

A parameter's name includes its section (`optim.batch_size`); a unique leaf name may stand alone (`batch_size`), and
`seed` sets both seeds. Later sources win: default, environment, file, notebook parameter, command line. schema.py
declares the parameters, fields.py converts their values.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpu_kit.config import text_tables
from tpu_kit.config.fields import SECRET_ADVICE, ConfigError, closest, is_secret_name, near_multiples, nest, show
from tpu_kit.config.files import other_trainers
from tpu_kit.config.mesh import environment_mesh, mesh_text
from tpu_kit.config.schema import (  # noqa: F401 - other modules import the sections from here
    SECTIONS,
    USUAL,
    CheckpointConfig,
    DataConfig,
    DistillConfig,
    LaunchConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    TrackingConfig,
    TrainConfig,
    flat_items,
    flatten,
    parameters,
)
from tpu_kit.config.schema import parameters as all_parameters

CONFIGS = Path(__file__).parents[1] / "configs"

# Leaf names that several sections share: `seed=1` sets them all, because notebook parameters cannot be dotted. Any
# other leaf name of several sections is an error.
_SHARED = {"seed"}
# Parameters whose leaf name alone means an older parameter: data.source, model.revision, data.format.
_WITH_SECTION = {"checkpoint.source", "hub.revision", "hub.format"}


def read_value(name: str, text: str) -> Any:
    """Reads `text` of `name=text` as YAML, and "None" as None; raises ConfigError, with `name`, if it is no YAML."""
    from tpu_kit.config.files import strict_yaml  # not needed for --help

    if text == "None":  # copied from the parameters of a notebook; as a text it would name a folder
        return None
    return strict_yaml.load(text, f"{name}: {show(text)}")


def load_config(
    path: str | Path | Mapping[str, Any] | None = None,
    overrides: str | Sequence[str] | Mapping[str, Any] = (),
    parameters: Mapping[str, Any] | None = None,
    *,
    command: str = "",
) -> TrainConfig:
    """Reads a configuration; its `sources` have the source of every given value.

    `overrides` win over `parameters`, these over `path`, and `path` over TPU_MESH_CONFIG, which sets launch.mesh. Names
    are dotted, or leaf names if these are unique. The sources are "command line" for `overrides`, "notebook parameter",
    "file" for `path`, "default of TRAINER" for another trainer's defaults, and "environment".

    Args:
        path: a YAML file, the name of a shipped file (`embedded-cot`), the values of a file (see `read_yaml`), or None
            for the defaults. A file of another trainer is translated, with notes on stderr.
        overrides: a `key=value` text or several (values in YAML; the last value of a key wins), or a mapping.
        parameters: a notebook's parameters by leaf or dotted name, such as `{"batch_size": 2}`.
        command: the command that reads the file, such as dpo; it decides between other trainers with equal keys.

    Raises:
        ConfigError: the file cannot be read; or all problems at once: unknown names, invalid or contradictory values.
    """
    reader = _Reader()
    try:
        reader.mapping({"launch.mesh": mesh} if (mesh := environment_mesh(os.environ)) else {}, "environment")
    except ValueError as error:
        reader.problems.append(str(error))
    values = path if isinstance(path, Mapping) else {}
    if isinstance(path, str | Path):
        leaves = {parameter.leaf for parameter in all_parameters().values()}
        translation = other_trainers.translate(_read_file(path), {*all_parameters(), *leaves}, command)
        for note in translation.notes:
            print(f"note: {path}: {note}", file=sys.stderr, flush=True)
        reader.problems += translation.problems
        reader.mapping(translation.defaults, f"default of {translation.trainer}")
        values = translation.values
    reader.mapping(values, "file")
    reader.mapping(parameters or {}, "notebook parameter")
    if isinstance(overrides, Mapping):
        reader.mapping(overrides, "command line")
    else:
        reader.assignments([overrides] if isinstance(overrides, str) else overrides)
    return reader.config()


class _Reader:
    """Collects values by dotted name, their sources and their problems; `config` raises the problems as ConfigError."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.problems: list[str] = []

    def config(self) -> TrainConfig:
        try:
            sections = {n: SECTIONS[n](**v) if n in SECTIONS else v for n, v in nest(self.values).items()}
            config = TrainConfig(**sections, sources=self.sources)
        except ConfigError as error:
            self.problems += error.problems
        if self.problems:
            raise ConfigError(self.problems)
        squared = config.distill.hidden_weight or config.distill.embeddings_weight
        if (squared or ":" in config.optim.objective) and "optim.max_loss_rise" not in self.sources:
            # The default is in nats per token; these losses have another unit.
            config = replace(config, optim=replace(config.optim, max_loss_rise=None))
        return config

    def mapping(self, values: Mapping[str, Any], source: str) -> None:
        seen: dict[str, Any] = {}
        for key, value in flat_items(values):
            for name in self._names(key, value):
                if name in seen and seen[name] != value:
                    self.problems.append(
                        f"{name}: given twice, as {show(seen[name])} and as {show(value)}; remove either"
                    )
                seen[name] = value
                known = parameters().get(name)
                if known and known.convert and isinstance(value, str) and not known.is_text(value):
                    try:  # papermill gives a list as its text
                        value = read_value(name, value)
                    except ConfigError as error:
                        self.problems += error.problems
                self._set(name, value, source)
        if "data.columns" in seen and (roles := [name for name in seen if name.startswith("data.columns.")]):
            self.problems.append(f"data.columns: given twice, as a whole and as {roles[0]}; remove either")

    def assignments(self, texts: Iterable[str]) -> None:
        for text in texts:
            key, equals, value = text.partition("=")
            if not equals:
                self.problems.append(f"{show(text)} is not key=value, such as optim.batch_size=4")
                continue
            for name in self._names(key, value):
                if name.startswith("data.columns.") or parameters()[name].is_text(value):
                    self._set(name, None if value in ("null", "None") else value, "command line")
                    continue
                try:
                    read = read_value(name, value)
                except ConfigError as error:
                    self.problems += error.problems
                    continue
                if read is None and parameters()[name].default is None and value not in ("null", "~", "None"):
                    self.problems.append(f"{name}: {show(value)} reads as null; write {name}=null for none")
                else:
                    self._set(name, read, "command line")

    def _set(self, name: str, value: Any, source: str) -> None:
        parameter, _, role = name.partition("columns.")
        if role:  # an entry of the mapping data.columns
            name = f"{parameter}columns"
            before = self.values.get(name) or {}
            if not isinstance(before, Mapping):
                self.problems.append(f"{name}: {show(before)} is not a mapping, so {role} cannot be added; remove it")
                return
            value = {**before, role: value}
        if name == "launch.mesh" and isinstance(value, Mapping):
            value = mesh_text(value)
        self.values[name] = value
        self.sources[name] = source

    def _names(self, key: str, value: object) -> list[str]:
        """Returns the dotted names of a key, two for `seed`; [] and a new problem if it is unknown or ambiguous."""
        known = parameters()
        if key in known:
            return [key]
        if re.fullmatch(r"(data\.)?columns\..+", key):
            return [f"data.{key.removeprefix('data.')}"]
        same = [name for name, parameter in known.items() if parameter.leaf == key and name not in _WITH_SECTION]
        if len(same) == 1 or key in _SHARED:
            return same
        self.problems.append(_unknown(key, value, same))
        return []


def _unknown(key: str, value: object, same: Sequence[str]) -> str:
    known, key = parameters(), _shortened(key)
    leaf = key.lstrip("-").rpartition(".")[2].replace("-", "_")  # --batch-size, as in other programs
    leaves = {parameter.leaf for parameter in known.values()}
    if is_secret_name(key) and (leaf == "token" or not closest(leaf, leaves, similarity=0.9)):  # lora.tokens is near
        return f"{key}: {SECRET_ADVICE}"
    if advice := other_trainers.advice(leaf, value):
        return f"{key}: no such parameter (given {show(value)}); {advice}"
    if same:
        return f"{key}: {show(value)} could be for {' or '.join(same)}; write the full name"
    if key in SECTIONS:
        first = next(name for name in known if name.startswith(f"{key}."))
        return f"{key}: {show(value)} is given for a whole section; set its parameters, such as {first}"
    guesses = (
        [name for name, parameter in known.items() if parameter.leaf == leaf]
        or [name for name in (other_trainers.NAMES.get(leaf.lower()),) if name in known]
        or closest(key, known)
        or [name for guess in closest(leaf, leaves) for name in known if known[name].leaf == guess]
    )
    advice = "`python -m tpu_kit train --help` lists them all"
    if guesses:
        advice = f"did you mean {' or '.join(dict.fromkeys(guesses))}?"
    return f"{key}: no such parameter (given {'a value' if is_secret_name(key) else show(value)}); {advice}"


def _read_file(path: str | Path) -> Mapping[str, Any]:
    file = Path(path)
    if not os.path.isfile(file):  # False also for a name that is too long
        shipped = {p.stem: p for p in sorted(CONFIGS.glob("*.yaml"))}
        if str(path) not in shipped:
            here = [near.name for near in Path().glob("*.y*ml")]
            near = closest(file.name, here) or closest(file.stem, shipped)
            hint = f"did you mean {near[0]}?" if near else f"the shipped ones are {', '.join(shipped)}"
            raise ConfigError([f"{_shortened(path)}: no such configuration file; {hint}"])
        file = shipped[str(path)]
    return read_yaml(file)


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Returns a YAML file's values as they are, {} if it is empty; ConfigError if it is unreadable or no mapping."""
    from tpu_kit.config.files import strict_yaml

    try:
        values = strict_yaml.load(path.read_text(encoding="utf-8"), path)
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        raise ConfigError([f"{path}: {problem}"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror}); check the file's permissions"]) from None
    if not isinstance(values, dict | None):
        raise ConfigError([f"{path}: holds a {type(values).__name__}; write `section:` and `key: value` lines"])
    return values or {}


def _shortened(text: str | Path) -> str:
    """Returns `text` cut to 300 characters, with escapes for characters that UTF-8 cannot encode."""
    text = str(text).encode(errors="backslashreplace").decode()
    return text if len(text) <= 300 else f"{text[:297]}..."


def describe(config: TrainConfig) -> str:
    """Returns text: a table of the parameters in `config.sources` (name, value, source), and how many are not there."""
    given = [name for name in parameters() if name in config.sources]
    rows = [{"parameter": name, "value": show(config[name]), "source": config.sources[name]} for name in given]
    others = f"{len(parameters()) - len(given)} parameters have their defaults; the run's config.yaml lists all"
    return f"{text_tables.to_text(rows)}\n{others}" if rows else others


def explain() -> str:
    """Returns a text for `--help` with every parameter by section: its default, type, bounds and meaning."""
    lines, section = [], ""
    for name, parameter in parameters().items():
        if (now := name.rpartition(".")[0]) != section:
            section = now
            lines.append(f"\n{section}: {SECTIONS[section].__doc__}" if section else "")
        lines.append(str(parameter))
    return "\n".join(lines)


@dataclass(frozen=True)
class BatchPlan:
    """An update: rows per replica and pass, passes, replicas, rows and tokens over all of these, including padding."""

    batch_size: int
    gradient_accumulation: int
    num_replicas: int
    global_batch_size: int
    tokens_per_update: int

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_update // self.global_batch_size:,} tokens x {self.batch_size} rows x "
            f"{self.num_replicas} replicas x {self.gradient_accumulation} accumulation = "
            f"{self.global_batch_size:,} rows = {self.tokens_per_update:,} tokens per update"
        )


def batch_arithmetic(config: TrainConfig, num_replicas: int) -> BatchPlan:
    """Returns a `BatchPlan`: rows per update = rows per replica x replicas x accumulation, and their tokens.

    If `optim.global_batch_size` is given, it is the rows per update and sets the accumulation;
    optim.gradient_accumulation may then be 1 or the same number.

    Raises:
        ConfigError: `optim.global_batch_size` is no multiple of rows per replica x replicas, or contradicts
            `optim.gradient_accumulation`, or `optim.batch_size` is "auto".
    """
    assert num_replicas >= 1, num_replicas
    rows, whole, passes = config.optim.batch_size, config.optim.global_batch_size, config.optim.gradient_accumulation
    if isinstance(rows, str):
        raise ConfigError(['optim.batch_size: "auto" is chosen by the planner; give a number here, optim.batch_size=4'])
    at_once = rows * num_replicas
    factors = f"optim.batch_size={rows} x {num_replicas} replicas"
    if whole is None:
        whole = at_once * passes
    elif whole % at_once:
        smaller = [n for n in range(rows - 1, 0, -1) if whole % (n * num_replicas) == 0]
        advice = near_multiples(whole, at_once) + (f", or optim.batch_size={smaller[0]}" if smaller else "")
        raise ConfigError([f"optim.global_batch_size: {whole} is no multiple of {factors} = {at_once}; use {advice}"])
    elif passes not in (1, whole // at_once):
        conflict = f"optim.global_batch_size={whole}, which needs {whole // at_once} with {factors}"
        raise ConfigError([f"optim.gradient_accumulation: {passes} contradicts {conflict}; remove either"])
    else:
        passes = whole // at_once
    return BatchPlan(rows, passes, num_replicas, whole, whole * config.data.max_length)


def of_rewards(config: TrainConfig) -> TrainConfig:
    """Returns a copy for `grpo`: always with optim.objective=policy and optim.max_loss_rise=None.

    A learning rate that was not given becomes the usual rate of such runs.
    """
    # The loss stays about 0, so its rise means nothing.
    optim = replace(config.optim, objective="policy", max_loss_rise=None)
    if config.sources.get("optim.learning_rate") == USUAL and optim.learning_rate == config.usual_rate:
        optim = replace(optim, learning_rate=None)
    return replace(config, optim=optim)


def of_preferences(config: TrainConfig) -> TrainConfig:
    """Returns a copy for `dpo`: always with optim.objective=preference and optim.max_loss_rise=None.

    data.format=auto becomes unpaired if `preference.losses` is kto, else preference. A learning rate that was not given
    becomes the usual rate of such runs.
    """
    # The loss is not in nats per token, the unit of its limit.
    optim = replace(config.optim, objective="preference", max_loss_rise=None)
    form: Any = "unpaired" if config.preference.labelled else "preference"
    data = config.data if config.data.format != "auto" else replace(config.data, format=form)
    if config.sources.get("optim.learning_rate") == USUAL and optim.learning_rate == config.usual_rate:
        optim = replace(optim, learning_rate=None)
    return replace(config, optim=optim, data=data)


def as_trained(config: TrainConfig) -> TrainConfig:
    """Returns the run as its command trains it, by the sections of `config.sources`, which has all given parameters.

    If a parameter of `rl` is given and distill.on_policy is false, it returns `of_rewards`. Otherwise, if a parameter
    of `preference` is given, it returns `of_preferences`. All other runs, and runs with a given optim.objective, such
    as the config.yaml of a run, are returned unchanged.
    """
    sections = {name.partition(".")[0] for name in config.sources}
    if "optim.objective" in config.sources:
        return config
    if "rl" in sections and not config.distill.on_policy:
        return of_rewards(config)
    return of_preferences(config) if "preference" in sections else config
