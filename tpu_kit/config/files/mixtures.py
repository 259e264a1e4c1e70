"""Translates lists of data sets of axolotl, TRL and LLaMA-Factory to `data.source` as a list.

The entries have the keys of `datasets` in other_trainers.toml; `mixed` makes every entry a source.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_kit.config.fields import show

if TYPE_CHECKING:
    from tpu_kit.config.files.other_trainers import Translation

LISTS = ("datasets", "pretraining_dataset")
"""The keys whose values are lists of data sets."""
_SHARED_ROWS = "it is the share of the rows there, and of the tokens here"
_UNTIL = "an epoch ends when the first source is used up, as there"
_ROLES = {
    "prompt": "question",
    "query": "context",
    "response": "answer",
}  # theirs -> ours; others are the same
_ROLES_OF = {"pt": {"prompt": "text"}, "kto": {"response": "completion", "kto_tag": "label"}}
_TAGS = {"role": ("role", "from"), "content": ("content", "value"), "user": ("user", "human"),
         "assistant": ("assistant", "gpt"), "observation": ("observation", "tool"), "function": ("function_call",),
         "system": ("system",)}  # fmt: skip


def is_mix(key: str, value: Any) -> bool:
    """Returns whether the value of `key`, in `LISTS`, is for `mixed`, not for the rules of single keys.

    True for any pretraining_dataset that is not empty. For datasets, True if all entries are mappings, and there are
    several or the only entry has weight or fraction. An entry without a list counts as a list of it.
    """
    if key == "pretraining_dataset":
        return bool(value)
    entries = value if isinstance(value, list) else [value]
    named = [entry for entry in entries if isinstance(entry, Mapping)]
    return len(named) == len(entries) and (len(entries) > 1 or any({"weight", "fraction"} & {*one} for one in named))


def mixed(key: str, value: Any, result: Translation, translated: Callable[[Mapping[str, Any]], Translation]) -> None:
    """Adds a list of data sets to a translation.

    A single pretraining_dataset without a problem becomes a stream: data.source is its name, its other keys become
    settings of the data section, and data.streaming and data.packing are true.

    Args:
        key: a key in `LISTS`.
        value: the value of the key: a mapping or a path, or a list of these.
        result: receives `data.source`, the name of a single source without other keys, else a list of mappings. It is
            not set if an entry has no translated key. For pretraining_dataset, `result` also receives data.format=text
            and data.too_long=split. Notes and problems of entries get the prefix "KEY[NUMBER]: ", from 1.
        translated: translates the keys of an entry, such as "datasets.path", to values by our names.
    """
    entries = value if isinstance(value, list) else [value]
    sources, fractions = list[dict[str, Any]](), list[Any]()
    for number, entry in enumerate(entries, start=1):
        entry = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
        fractions.append(entry.pop("fraction", None))
        if not entry.get("path"):
            result.problems.append(f"{key}[{number}]: it names no data set; give its path")
        if key == "pretraining_dataset":
            entry.setdefault("text_column", "text")
        of_entry = translated({f"{key}.{name}": item for name, item in entry.items()})
        result.notes += [f"{key}[{number}]: {note}" for note in of_entry.notes]
        result.problems += [f"{key}[{number}]: {problem}" for problem in of_entry.problems]
        sources.append(_source(of_entry.values))
    if key == "pretraining_dataset":
        result.values |= {"data.format": "text", "data.too_long": "split"}
        result.notes.append(f"{key} -> data.format='text', data.too_long='split': whole texts are trained")
        if len(sources) == 1 and not result.problems:
            name = sources[0].pop("source")
            result.values |= {f"data.{leaf}": item for leaf, item in sources[0].items()}
            result.values |= {"data.source": name, "data.streaming": True, "data.packing": True}
            result.notes.append(
                f"{key}=... -> data.source={show(name)}, data.streaming=true, data.packing=true, as there"
            )
            return
    if any(fraction is not None for fraction in fractions):
        _share(sources, fractions, "fraction", result)
    _add(f"{key}=...", sources, result)


def _source(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the translated values of an entry, such as data.columns.text, as an entry of `data.source`."""
    source: dict[str, Any] = {}
    for name, value in values.items():
        leaf = name.removeprefix("data.")
        if leaf.startswith("columns."):
            source.setdefault("columns", {})[leaf.removeprefix("columns.")] = value
        else:
            source[leaf] = value
    return source


def _share(sources: Sequence[dict[str, Any]], shares: Sequence[Any], name: str, result: Translation) -> None:
    """Sets `tokens` of the sources to shares / their sum, and adds a note, which names the key `name`, to `result`.

    If there are not as many shares as sources, or a share is not a number above 0, only adds a problem.
    """
    numbers = [share for share in shares if type(share) in (int, float) and share > 0]
    if len(numbers) < len(sources) or len(shares) != len(sources):
        few = f"lacks a share above 0 for some of the {len(sources)} data sets; give a share to all, or to none"
        result.problems.append(f"{name}: {show(list(shares))} {few}")
        return
    for source, share in zip(sources, numbers, strict=True):
        source["tokens"] = share / sum(numbers)
    result.notes.append(f"{name}={show(list(shares))} -> tokens of each source: {_SHARED_ROWS}; {_UNTIL}")


def _add(said: str, sources: list[dict[str, Any]], result: Translation) -> None:
    if not all(sources):  # a problem was recorded
        return
    if len(sources) == 1 and sources[0].keys() == {"source"}:
        result.values["data.source"] = sources[0]["source"]
    else:
        result.values["data.source"] = sources
    result.notes.append(f"{said} -> data.source={show(result.values['data.source'])}")


# -------------------------------------------------------------------------------------------------- LLaMA-Factory


def factory_mix(values: dict[str, Any], result: Translation) -> None:
    """Moves dataset, mix_strategy and interleave_probs from `values` to `data.source`, notes and problems of `result`.

    Changes nothing unless dataset_info.json in `dataset_dir` (default: "data") has all data sets. With
    interleave_under, several sources get shares of the tokens. A strategy other than concat and interleave_under is a
    problem. An entry that cannot be read, or is not for the file's `stage`, is a problem too, and then `data.source` is
    not set.
    """
    folder = Path(str(values.get("dataset_dir") or "data"))
    named, listed = values.get("dataset"), _described(folder)
    names = [one.strip() for one in named.split(",")] if isinstance(named, str) else named
    if listed is None or not isinstance(names, list) or not all(str(name) in listed for name in names):
        return
    sources = list[dict[str, Any]]()
    for name in map(str, names):
        source, problem = _of_entry(folder, name, listed[name], str(values.get("stage")))
        sources.append(source)
        result.problems += [f"dataset: {name}, in {folder}/dataset_info.json: {problem}"] if problem else []
    strategy, probabilities = values.pop("mix_strategy", None) or "concat", values.pop("interleave_probs", None)
    if isinstance(probabilities, str):
        probabilities = [_number(one) for one in probabilities.split(",")]
    if strategy == "interleave_under":
        if len(sources) > 1:
            _share(sources, probabilities or [1] * len(sources), "interleave_probs", result)
    elif strategy != "concat":
        result.problems.append(
            f"mix_strategy: {strategy!r} has no counterpart here; it repeats the smaller data sets until all have "
            "ended: set mix_strategy=interleave_under, or give the sources of data.source a weight"
        )
    del values["dataset"]
    _add(f"dataset={show(named)}", sources, result)


def _number(text: str) -> float | str:
    """Returns the number in a text; the text if there is none, which `_share` reports."""
    try:
        return float(text)
    except ValueError:
        return text


def _described(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _of_entry(folder: Path, name: str, entry: Any, stage: str) -> tuple[dict[str, Any], str]:
    """Returns the entry `name` of dataset_info.json as (an item of `data.source`, ""), or as ({}, problem).

    It is a problem if the entry cannot be read, or is not for `stage`, LLaMA-Factory's: "dpo" needs pairs of replies,
    "kto" labels, and all others neither. `folder` has the entry's file.
    """
    if not isinstance(entry, Mapping) or not all(
        isinstance(entry.get(key, {}), Mapping) for key in ("columns", "tags")
    ):
        return {}, f"it is no object with a file_name and objects as columns and tags: {show(entry)}"
    place = entry.get("hf_hub_url") or (entry.get("file_name") and str(folder / entry["file_name"]))
    if not place:
        return {}, "it is neither a file nor a data set of the hub; download it, and give its file_name"
    named = {*entry.get("columns", {})}
    has_pairs = bool(entry.get("ranking") or {"chosen", "rejected"} & named)
    kinds = {"dpo": ("pairs", has_pairs), "kto": ("labels of replies", "kto_tag" in named)}
    for of_stage, (what, has) in kinds.items():
        if has and stage != of_stage:
            return {}, f"it has {what}, which are for stage={of_stage}"
    if stage in kinds and not kinds[stage][1]:
        return {}, f"it has no {kinds[stage][0]}, which stage={stage} needs"
    subset = entry.get("subset")
    source: dict[str, Any] = {"source": f"{place}:{subset}" if subset else place, "name": name.replace("/", "-")}
    split, count = entry.get("split"), entry.get("num_samples")
    if split or count:
        source["split"] = f"{split or 'train'}[:{count}]" if count else split
    columns = {
        _ROLES_OF.get(stage, {}).get(role) or _ROLES.get(role, role): column
        for role, column in entry.get("columns", {}).items()
        if column
    }
    if stage == "kto" and not {"completion", "messages"} & {*columns}:
        columns["completion"] = "output"  # LLaMA-Factory's default column for response
    if columns:
        source["columns"] = columns
    for tag, said in entry.get("tags", {}).items():
        if said not in _TAGS.get(tag.removesuffix("_tag"), ()):
            known = ", ".join(_TAGS.get(tag.removesuffix("_tag"), ())) or "none of this tag"
            return {}, f"its {tag}={said} is not read, and {known} is; rename it in the file"
    return source, ""
