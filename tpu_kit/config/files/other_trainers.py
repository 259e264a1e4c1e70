"""Translates files of TRL's scripts, axolotl, LLaMA-Factory and TrainingArguments to the kit's parameters.

other_trainers.toml has the other trainers' names ("theirs"). A key becomes a parameter of the kit ("ours"), a note that
it needs none, or a problem with the alternative; keys that are ours or unknown are left to the loader.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

from tpu_kit.config.fields import is_secret_name, show
from tpu_kit.config.files.mixtures import LISTS, factory_mix, is_mix, mixed
from tpu_kit.config.files.pair_losses import METHODS, is_pair_loss, name_losses

_TABLES = tomllib.loads(Path(__file__).with_name("other_trainers.toml").read_text(encoding="utf-8"))
NAMES: dict[str, str] = _TABLES["names"]
"""Their name -> ours, of the parameters whose values are the same."""
_OFF = ("false", "", "[]", "{}")  # default values of parameters without a counterpart
_ROW_FILES = ("json", "csv", "parquet", "text")  # with these data set names, `data_files` has the files

Rule = Mapping[str, Any]
"""An entry of `rules` in other_trainers.toml, which explains the form; empty for a key of `NAMES`."""


@dataclass
class Translation:
    """A file of another trainer, translated to the kit's names.

    Attributes:
        trainer: the trainer's name in other_trainers.toml; "" if no trainer's keys are in the file.
        values: by our names. Keys that are ours or unknown stay as they are.
        defaults: by our names: the trainer's defaults for absent keys, if the kit's defaults differ.
        notes: a text per value that was translated or ignored, per entry of `defaults`, and per default not taken over.
        problems: a text per value without a counterpart, and per parameter of ours that is set twice.
    """

    trainer: str
    values: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def value(self, name: str) -> Any:
        """Returns the value of our dotted `name`, however the file spells it, or the trainer's default, or None."""
        section, _, leaf = name.rpartition(".")
        nested = self.values.get(section)
        values = {**self.defaults, **(nested if isinstance(nested, Mapping) else {}), **self.values}
        return values.get(name, values.get(leaf))

    def add(self, key: str, value: Any, rule: Rule) -> None:
        """Adds a value of the file, named `key` there, to `values` by a rule, with a note; or only a note or problem.

        A rule may ignore the value (a note) or refuse it (a problem). A refused value that is false or empty is only
        noted, unless the rule has "off". An empty rule means the name in `NAMES`; for a key without a name there, the
        value is refused. If `values` has another value of the parameter, that is a problem, and the new value replaces
        it.
        """
        hidden = is_secret_name(key) and not re.search("(bos|eos|pad|unk)_token$", key)
        assignment = f"{key}={'(hidden)' if hidden else show(value)}"
        if not rule and key not in NAMES:
            choices = chain.from_iterable(each.get("choices", ()) for each in _rules_of(key))
            rule = {"refused": f"it may be {', '.join(choices)}"}
        if "ignored" in rule:
            self.notes.append(f"{assignment} is ignored: {rule['ignored']}")
        elif "refused" in rule and _text(value) in _OFF and not rule.get("off"):
            self.notes.append(f"{assignment} is ignored: it is the default")
        elif "refused" in rule:
            why = str(rule["refused"])
            lacks = ":" if "not supported" in why else " has no counterpart here;"
            self.problems.append(f"{assignment.replace('=', ': ', 1)}{lacks} {why}")
        for name, item in _made(key, value, rule).items():
            if name in self.values and self.values[name] != item:
                before = show(self.values[name])
                self.problems.append(f"{name}: given twice, as {before} and as {assignment}; remove either")
            self.values[name] = item
            why = f": {rule['because']}" if "because" in rule else ""
            self.notes.append(f"{assignment} -> {name}={show(item)}{why}")


def translate(values: Mapping[str, Any], ours: Collection[str], command: str = "") -> Translation:
    """Translates the values of a file; values of the kit stay as they are. `problems` of the result are not raised.

    A list of data sets (dataset_info.json) or a file of accelerate gives only a problem. See `factory_mix` for a file
    that is read.

    Args:
        values: the file's values, nested as in the file; not changed.
        ours: the kit's names, with and without their sections.
        command: the command that reads the file; it decides between trainers whose files have the same keys.

    Returns:
        A new Translation. If the file is of no known trainer, it has no `defaults`, but known names are translated.
    """
    registry = _TABLES["registry"]
    if values and all(isinstance(item, Mapping) and item.keys() & {*registry["keys"]} for item in values.values()):
        return Translation("", problems=[f"{next(iter(values))}: {registry['text']}"])
    trainers: dict[str, dict[str, Any]] = _TABLES["trainers"]
    lists = {key: values[key] for key in LISTS if key in values and is_mix(key, values[key])}
    flat = dict(_flat({key: value for key, value in values.items() if key not in lists}))
    _name_sources(flat)
    present = {key: value for key, value in flat.items() if value is not None} | lists
    if lists:
        present["data.source"] = "given"
    signs = {*present, *(f"{key}={_text(present.get(key))}" for key in ("loss_type", "rl", "stage"))}
    signs |= {"pair_loss"} if is_pair_loss(present.get("loss_type")) else set()
    for sign, why in _TABLES["not_trainers"].items():
        if sign in signs:
            return Translation("", problems=[f"{sign}: {why}"])
    fitting = [name for name, table in trainers.items() if all(signs & {*keys.split()} for keys in table["keys"])]
    trainer = next(iter(fitting), "")
    trainer = trainers[trainer].get("commands", {}).get(command, trainer) if trainer else ""
    usual = trainers[trainers[trainer].get("like", trainer)] if trainer else {"absent": {}, "differs": {}}
    absent = usual["absent"]
    absent = {names.split()[0]: value for names, value in absent.items() if present.keys().isdisjoint(names.split())}
    case = _case({**absent, **present}, trainer)

    result = Translation(trainer)
    if trainer == "LLaMA-Factory":
        factory_mix(flat, result)
    if "pairs" in case:
        name_losses(flat, case, result)
    for key, value in lists.items():
        mixed(key, value, result, partial(_of_entry, case=case))
    if "no evaluation" not in case:
        _share_evaluations(flat, result)
    for key, value in flat.items():
        rule = _rule(key, value, case)
        if (key in ("optim", "rl") and not isinstance(value, str | None)) or not (
            rule or _is_known(key, ours, case, value)
        ):
            result.values[key] = value
        elif value is not None or rule:
            for item in value if key == "report_to" and isinstance(value, list) else [value]:
                result.add(key, item, _rule(key, item, case))
    for key, value in absent.items():
        for name, default in _made(key, value, _rule(key, value, case)).items():
            if result.value(name) is None:
                result.defaults[name] = default
    result.notes += [f"{name}={show(value)} is the default of {trainer}" for name, value in result.defaults.items()]
    for names, difference in usual["differs"].items():
        unused = _rule(names.split()[0], "", case).get("case")  # such as the targets of adapters if there are none
        if not unused and present.keys().isdisjoint(names.split()):
            result.notes.append(f"{names.split()[0]} is absent: {difference}")
    return result


def _of_entry(entry: Mapping[str, Any], case: Collection[str]) -> Translation:
    """Translates the keys of a data set in a list, such as "datasets.path"; skips nulls."""
    result, flat = Translation(""), dict(_flat(entry))
    _name_sources(flat)
    for key, value in flat.items():
        if value is not None:
            result.add(key, value, _rule(key, value, case))
    return result


def advice(name: str, value: object) -> str:
    """Returns the alternative to another trainer's setting; "" if it is none that the kit refuses or ignores."""
    rules = _rules(name.rpartition(".")[2].lower(), value, ("",))
    return next((str(why) for rule in rules if (why := rule.get("refused") or rule.get("ignored"))), "")


def _case(values: Mapping[str, Any], trainer: str) -> frozenset[str]:
    """Returns the words of a trainer's name, "" for none, and the cases of other_trainers.toml that `values` fulfil."""
    section = values.get("lora")
    ranks = [values.get("lora.r"), values.get("r"), section.get("r") if isinstance(section, Mapping) else None]
    rules = [_rule(key, value, frozenset([trainer])) for key, value in values.items()]
    full = 0 in ranks or (ranks == [None] * 3 and any(rule.get("to") == "lora.r" for rule in rules))
    cases = {*(trainer.split() or [""]), "all weights" if full else "adapters"}
    if "constant" in (values.get("lr_scheduler"), values.get("lr_scheduler_type")):
        cases.add("constant")
    evaluates = {
        "TRL": values.get("eval_strategy") not in (None, "no", False),
        "axolotl": bool(values.get("val_set_size")) or "test_datasets.path" in values,
    }
    if not all(evaluates.get(name, True) for name in cases):
        cases.add("no evaluation")
    elif "eval_steps" in values:
        cases.add("eval_steps")
    named = bool(values.get("hub_model_id"))
    cases |= {"repository"} if named else set()
    cases |= set() if named and (trainer == "axolotl" or values.get("push_to_hub")) else {"no push"}
    bits = (values.get("load_in_4bit"), values.get("load_in_8bit"), values.get("adapter") == "qlora" or None)
    if True in bits:
        cases.add("few bits")
    if values.get("lora_target_linear") is True:
        cases.add("all linear")
    targets = [values.get(name) for name in ("lora_target_modules", "target_modules", "lora_target", "lora.targets")]
    if any(isinstance(one, list | str) and "embed_tokens" in one for one in targets):
        cases.add("adapted embedding")
    stage = values.get("stage")
    of_pairs = values.get("rl") in METHODS or stage in ("dpo", "kto") or is_pair_loss(values.get("loss_type"))
    if of_pairs or {"DPO", "CPO", "KTO"} & cases:
        cases |= {"pairs"} if values.get("disable_dropout") is False else {"pairs", "no dropout"}
        cases |= {"labels"} if "KTO" in cases or "kto" in (values.get("rl"), stage) else set()
    return frozenset(cases)


def _name_sources(theirs: dict[str, Any]) -> None:
    """Appends, in `theirs`, data sets' configurations to their names, and replaces names such as "json" by the file."""
    for key in ("datasets", "test_datasets", "pretraining_dataset"):
        if theirs.get(f"{key}.path") in _ROW_FILES and isinstance(theirs.get(f"{key}.data_files"), str):
            theirs[f"{key}.path"] = theirs.pop(f"{key}.data_files")
    for configuration, name in _TABLES["configurations"].items():
        if theirs.get(name) is not None and theirs.get(configuration) is not None:
            theirs[name] = f"{theirs[name]}:{theirs.pop(configuration)}"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _share_evaluations(theirs: dict[str, Any], result: Translation) -> None:
    """Moves evals_per_epoch from `theirs` to optim.eval_steps in `result`: a share of all updates, None for 1 or more.

    Changes nothing if `theirs` has no evals_per_epoch above 0, or has max_steps or eval_steps.
    """
    count, key = theirs.get("evals_per_epoch"), "optim.eval_steps"
    epochs = theirs.get("num_epochs", theirs.get("num_train_epochs")) or 1
    if not (_is_number(count) and _is_number(epochs)) or count <= 0 or {"max_steps", "eval_steps"} & {*theirs}:
        return
    del theirs["evals_per_epoch"]
    share = 1 / (count * epochs)
    result.values[key] = round(share, 6) if share < 1 else None
    result.notes.append(f"evals_per_epoch={show(count)} -> {key}={show(result.values[key])}: the share of all updates")


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (name, value); mappings of `_sections`, also alone in a list, are flattened to dotted names."""
    for key, value in values.items():
        inner = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(inner, Mapping) and inner and any(fnmatchcase(str(key), pattern) for pattern in _sections()):
            yield from _flat({f"{key}.{name}": item for name, item in inner.items()})
        else:
            yield str(key), value


@cache
def _sections() -> frozenset[str]:
    """Returns patterns (fnmatch) of the other trainers' keys whose mappings are flattened, such as "datasets"."""
    keys = chain(NAMES, *(rule["keys"].split() for rule in _TABLES["rules"]))
    return frozenset(key.rpartition(".")[0] for key in keys if "." in key)


def _is_known(key: str, ours: Collection[str], case: Collection[str], value: Any) -> bool:
    """Returns whether a key that no rule fits is theirs: in `NAMES` or any rule; or ours, but null in their file."""
    if key in ours:
        return value is None and "" not in case
    return key in NAMES or bool(_rules_of(key))


def _made(key: str, value: Any, rule: Rule) -> dict[str, Any]:
    """Returns the values by our names that a rule (empty: by `NAMES`) makes; {} if it ignores or refuses `value`."""
    if "choices" in rule:
        return {rule["to"]: rule["choices"][_text(value)]}
    if "each" in rule:
        return {rule["to"]: [rule["each"].format(item) for item in value]}
    if "set" in rule:
        return {name: value if item == "=" else item for name, item in rule["set"].items()}
    return {} if rule else {NAMES.get(key, key): value}


def _rule(key: str, value: Any, case: Collection[str]) -> Rule:
    return next(_rules(key, value, case), {})


def _rules(key: str, value: Any, case: Collection[str]) -> Iterator[Rule]:
    text = _text(value)
    for rule in _rules_of(key):
        pattern = rule.get("values", ".*")
        of_value = text in rule["choices"] if "choices" in rule else re.fullmatch(pattern, text, re.DOTALL)
        if of_value and rule.get("case", "") in ("", *case) and (value is not None or pattern == "null"):
            yield rule


@cache
def _rules_of(key: str) -> tuple[Rule, ...]:
    """Returns the rules of a key of theirs, in order. Rules with patterns do not apply to the keys of `NAMES`."""

    def fits(pattern: str) -> bool:
        return pattern == key or ("*" in pattern and key not in NAMES and fnmatchcase(key, pattern))

    return tuple(rule for rule in _TABLES["rules"] if any(map(fits, rule["keys"].split())))


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower()
