"""Refuses YAML that says another thing than its reader thinks, or that has no end."""

import re
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

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
