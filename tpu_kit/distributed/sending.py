"""Sends a function and a configuration to the replicas, with the objects of a notebook or script that they use.

Replicas are other processes: they import functions of modules but cannot import functions of `__main__`. cloudpickle
sends these by value, with the variables that they read. Replicas change only their copies. Objects that the
configuration names, such as "__main__:my_reward", are sent too.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import FunctionType, ModuleType
from typing import Any

from tpu_kit.config.loader import TrainConfig

_MAIN = "__main__:"
_ERRORS = (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError, NotImplementedError)


def payload_of(fn: Callable[..., Any], config: TrainConfig) -> bytes:
    """Pickles a function and its configuration for `restored`, with the objects of `__main__` that they name.

    Texts "__main__:NAME" in the configuration, or in the keywords if `fn` is a partial, name objects. A NAME that
    `__main__` lacks is left out.

    Raises:
        ValueError: an object cannot be sent, such as an open file, a lock or a tensor on a device; the text names it.
    """
    main, arguments = sys.modules["__main__"], getattr(fn, "keywords", {})  # of a partial
    named = _named([config.flat_values(), arguments])
    mine = {name: getattr(main, name) for name in dict.fromkeys(named) if hasattr(main, name)}
    try:
        return _dumped((fn, config, mine))
    except _ERRORS as error:
        name = getattr(fn, "__qualname__", repr(fn))
        cause = next(filter(None, (_culprit(value, label) for label, value in ((name, fn), *mine.items()))), None)
        where, why = cause or (name, str(error))
        raise ValueError(
            f"{where} cannot be sent to the replicas, which are other processes ({why}): make it within the function, "
            "or put the function into a file, say rewards.py, which replicas import"
        ) from error


def restored(payload: bytes) -> tuple[Callable[..., Any], TrainConfig]:
    """Unpickles function and configuration from `payload_of`, and adds the objects sent with them to `__main__`."""
    fn, config, mine = pickle.loads(payload)
    vars(sys.modules["__main__"]).update(mine)
    return fn, config


def refuse_devices(value: Any) -> None:
    """Raises PicklingError if `value` is a tensor not on the CPU: unpickling it would open the device in the reader."""
    device = getattr(value, "device", None) if type(value).__module__.startswith("torch") else None
    if device is not None and device.type != "cpu":
        raise pickle.PicklingError(f"it holds a tensor on {device}")


def _dumped(value: Any) -> bytes:
    """Pickles with cloudpickle; raises one of `_ERRORS` if a part cannot be sent, such as a tensor on a device."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> None:
            refuse_devices(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _named(values: Iterable[Any]) -> Iterator[str]:
    """Yields NAME of all texts "__main__:NAME" in the values, their lists and dictionaries."""
    for value in values:
        if isinstance(value, str):
            if value.startswith(_MAIN):
                yield value.removeprefix(_MAIN)
        elif isinstance(value, Mapping | list | tuple):
            yield from _named(value.values() if isinstance(value, Mapping) else value)


def _culprit(value: Any, label: str, seen: frozenset[int] = frozenset()) -> tuple[str, str] | None:
    """Returns the place of the innermost part that cannot be pickled, and the error's text; None if all can be.

    `label` is the place of `value` itself; `seen` has the ids of values around it, to end at a cycle.
    """
    if id(value) in seen:
        return None
    try:
        _dumped(value)
        return None
    except _ERRORS as error:
        text = str(error)
    for inner, part in _parts(value):
        where = f"{inner} of {label}" if isinstance(value, FunctionType) else inner or label
        if found := _culprit(part, where, seen | {id(value)}):
            return found
    return label, text


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, part) for the parts that are pickled with a value; the name is "" for a part without a name."""
    if isinstance(value, functools.partial):
        yield "", value.func
        yield from (("", each) for each in value.args)
        yield from value.keywords.items()
    elif isinstance(value, FunctionType):
        read = inspect.getclosurevars(value)
        variables = {**read.globals, **read.nonlocals}
        yield from ((f"the variable {name}", each) for name, each in variables.items() if not _is_module(each))
    elif isinstance(value, Mapping):
        yield from ((str(name), each) for name, each in value.items())
    elif isinstance(value, list | tuple | set):
        yield from ((getattr(each, "__qualname__", ""), each) for each in value)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((each.name, getattr(value, each.name)) for each in fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
        yield from ((f"the attribute {name}", each) for name, each in vars(value).items())


def _is_module(value: Any) -> bool:
    return isinstance(value, ModuleType)
