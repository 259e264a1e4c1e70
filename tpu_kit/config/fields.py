"""Declares dataclass fields with help and bounds, and converts values from YAML, a shell or a notebook to their types.

This module knows nothing about training; schema.py declares the parameters.
"""

import difflib
import functools
import math
import numbers
import operator
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import quote, unquote

from tpu_kit.config.named_values import FUNCTION

T = TypeVar("T")

_SHOWN = 50  # maximum problems in the text of an error
_BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}

_SECRET_NAME = re.compile(r"(token|secret|passw(or)?d|credentials?|(api|access|private)[_-]?keys?)$", re.IGNORECASE)
# Only unmistakable forms: a W&B key of 40 hexadecimal digits looks like a commit, which model.revision may be.
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|sk-[\w-]{20,}|AIza[\w-]{30,}|AKIA[A-Z0-9]{16})"
    r"|://[^/\s:@]*:[^/\s@]+@"
)
_SECRET_VARIABLE = re.compile(
    r"(token|secret|pass(word|wd|phrase)?|credential|key|connection_string|(^|_)(pat|auth))s?(_id|_json)?$",
    re.IGNORECASE,
)
SECRET_ADVICE = (
    "secrets do not belong in a configuration, which is printed and saved: set it in the environment "
    "(HF_TOKEN, WANDB_API_KEY) instead"
)


class ConfigError(ValueError):
    """All problems of a configuration at once; the error's text lists the first 50.

    Attributes:
        problems: a text per problem, usually with the parameter, its value and the fix; secrets are replaced by ***.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = [hide_secrets(problem) for problem in problems]  # also in names and YAML's errors
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        more = [f"and {len(self.problems) - _SHOWN} more"] if len(self.problems) > _SHOWN else []
        super().__init__("\n  - ".join([f"{count} in the configuration:", *self.problems[:_SHOWN], *more]))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        return type(self), (self.problems,)  # the default would rebuild it from the joined text


def knob(
    default: T,
    help: str,
    *,
    check: Callable[[Any], object] | None = None,
    convert: Callable[[Any], Any] | None = None,
    **bounds: float,
) -> T:
    """Returns a `dataclasses.field` that declares a parameter; only `ConfigField.read` checks values.

    Args:
        default: its default.
        help: its meaning; --help prints it.
        check: raises ValueError for a bad value, with the problem and the fix; not called for None.
        convert: converts any given value, also None, to the declared type if that is not plain; raises as `check`.
        bounds: limits of numbers: at_least, above, at_most, below. They do not apply to texts and None.
    """
    assert bounds.keys() <= _BOUNDS.keys(), bounds
    return field(default=default, metadata={"help": help, "bounds": bounds, "check": check, "convert": convert})


@dataclass(frozen=True)
class ConfigField:
    """A declared parameter: dotted `name` (`optim.batch_size`), type annotation `hint`, and the arguments of `knob`."""

    name: str
    hint: Any
    default: Any
    help: str
    bounds: Mapping[str, float]
    check: Callable[[Any], object] | None = None
    convert: Callable[[Any], Any] | None = None

    @property
    def leaf(self) -> str:
        """The name without its section."""
        return self.name.rpartition(".")[2]

    def is_text(self, text: str) -> bool:
        """Returns whether a value from the shell is text to take as it is, not YAML to parse.

        True if the type has only texts, choices and null. With `convert`, True unless the text is in brackets.
        """
        if self.convert is not None:
            return not (text.startswith("[") and text.endswith("]"))
        return all(m in (str, types.NoneType) or get_origin(m) is Literal for m in _members(self.hint))

    def __str__(self) -> str:
        kind = ", ".join(filter(None, (wanted(self.hint), self._limits())))
        return f"  {self.name}={show(self.default)}  ({kind})\n      {self.help}"

    def read(self, value: object) -> Any:
        """Returns `value` in the declared type, after `convert` if the parameter has it; a path may stand for a text.

        Numbers may be text, also of a form field; a list becomes a tuple. `check` is not called for None.

        Raises:
            ValueError: `convert` or `check` refuses the value, or it has another type, is an empty text, list or
                mapping, is out of bounds, or looks like a secret. Or it is an integer of 2**32 or more in size, a
                number that float32 does not hold, or has NUL or half a surrogate pair. The text names the parameter.
        """
        if is_secret_value(value):
            raise ValueError(f"{self.name}: the value looks like a secret; {SECRET_ADVICE}")
        if self.convert is not None:
            try:
                value = self.convert(value)
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}") from error
        for member in _members(self.hint):
            with suppress(TypeError, ValueError, OverflowError):
                result = _as(value, member)
                break
        else:
            listed = any(get_origin(member) is tuple for member in _members(self.hint))
            empty = value == "" or (listed and isinstance(value, list | tuple) and (not value or "" in value))
            wrong = "empty" if empty else f"not {wanted(self.hint)}"
            raise ValueError(f"{self.name}: {show(value)} is {wrong}{self._fix(value)}")
        if re.search("[\0\ud800-\udfff]", "".join(_texts(result))):
            text = "holds a character that no file can hold (NUL, or half a surrogate pair)"
            raise ValueError(f"{self.name}: {show(value)} {text}; remove it")
        if isinstance(result, int | float) and not isinstance(result, bool):
            limits = ""
            if not all(_BOUNDS[name](result, limit) for name, limit in self.bounds.items()):
                limits = f"{self._limits()} (the default is {show(self.default)})"
            elif isinstance(result, int) and abs(result) >= 2**32:  # devices count in 32 bits
                limits = "below 2**32"
            elif isinstance(result, float) and result != 0 and not 1.2e-38 <= abs(result) <= 3.4e38:
                limits = "that float32 holds: 0, or 1.2e-38 to 3.4e38 in size"
            if limits:
                raise ValueError(f"{self.name}: {show(value)} is out of range; give a number {limits}")
        if self.check is not None and result is not None:
            try:
                self.check(result)
            except ValueError as error:
                raise ValueError(f"{self.name}: {show(value)} {error}{self._near(value)}") from error
        return result

    def _limits(self) -> str:
        return " and ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in self.bounds.items())

    def _near(self, value: object) -> str:
        choices = [c for m in _members(self.hint) if get_origin(m) is Literal for c in get_args(m)]
        near = closest(str(value), choices)
        return f'; did you mean "{near[0]}"?' if near else ""

    def _fix(self, value: object) -> str:
        if near := self._near(value):
            return near
        if str in _members(self.hint) and isinstance(value, bool | int | float):
            return f'; write it in quotes: "{value}"'
        if value and isinstance(value, str) and tuple[str, ...] in _members(self.hint):
            return f"; write [{show(value)}]"
        return f"; the default is {show(self.default)}"


def check_knobs(values: Any) -> list[str]:
    """Converts the non-default `knob` fields of a dataclass instance, even if frozen, to their types, in place.

    Args:
        values: the instance; its class must not have dataclasses as fields.

    Returns:
        A list with the error's text for each value that `ConfigField.read` refuses; such values stay as they are.
    """
    problems = []
    for name, parameter in knobs_of(type(values)).items():
        if (value := getattr(values, name)) != parameter.default:
            try:
                object.__setattr__(values, name, parameter.read(value))
            except ValueError as error:
                problems.append(str(error))
    return problems


def knobs_of(cls: type, prefix: str = "") -> dict[str, ConfigField]:
    """Returns the `knob` fields of a dataclass and its nested dataclasses, in order, by dotted name.

    `prefix`, such as "optim.", precedes all names. A field whose type is a dataclass needs no `knob`: its own fields
    are entered, and it has no entry itself. All other fields without `knob` are left out.
    """
    parameters: dict[str, ConfigField] = {}
    hints = get_type_hints(cls)
    for f in fields(cls):
        name = prefix + f.name
        if is_dataclass(hints[f.name]):
            parameters |= knobs_of(hints[f.name], f"{name}.")
        elif "help" in f.metadata:
            assert f.default is not MISSING, name
            parameters[name] = ConfigField(name, hints[f.name], f.default, **f.metadata)
    return parameters


def show(value: object) -> str:
    """Returns a value as text for messages: null, true, false, or its repr, which has a tuple as list.

    Over 80 characters, it is the first 77 and "...". A secret (`is_secret_value` of the repr) becomes a note.
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = repr(list(value) if isinstance(value, tuple) else value)
    if is_secret_value(text):
        return "(hidden: it looks like a secret)"
    return text if len(text) <= 80 else text[:77] + "..."


def wanted(hint: Any) -> str:
    """Returns a type annotation in words, such as "a whole number or null"; KeyError for types of no parameter."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
        tuple[str, ...]: "a list of texts",
        tuple[float, ...]: "a list of numbers",
        tuple: "a list of sources",
        dict: "a mapping of texts to texts",
        Callable: "a function",
    }
    texts = []
    for member in _members(hint):
        choices = get_args(member) if get_origin(member) is Literal else ()
        texts += [f'"{choice}"' for choice in choices] or [words.get(member) or words[get_origin(member)]]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def closest(word: str, known: Iterable[str], similarity: float = 0.6) -> list[str]:
    """Returns a list of the known name most similar to `word` in lower case; [] if no ratio reaches `similarity`."""
    return difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=similarity)


def is_secret_name(name: str) -> bool:
    """Returns whether a name ends in token, secret, password, credentials or api/access/private key, in any case."""
    return _SECRET_NAME.search(name) is not None


def is_secret_value(value: object) -> bool:
    """Returns whether a value's text contains a token or key of a known form, or a URL with a password."""
    return _SECRET_VALUE.search(str(value)) is not None


def hide_secrets(text: str) -> str:
    """Returns `text` with *** for tokens, keys, passwords in URLs and values of secret environment variables.

    Apply it to texts of other libraries before they are printed, written or shortened: a cut secret is not recognised.
    """
    return _secrets(tuple(os.environ.items())).sub("***", text)


@functools.lru_cache(maxsize=4)
def _secrets(environ: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    """Returns a pattern of known forms, and of an environment's secrets over 5 characters, plain and encoded.

    `environ` has (name, value) pairs. Its secrets are the passwords in URLs, and the values, except existing paths, of
    variables with a name such as X_TOKEN.
    """
    found = set()
    for name, value in environ:
        if _SECRET_VARIABLE.search(name) and not os.path.exists(value):  # a path tells where a key is, not the key
            found |= {value.strip(), *(line.strip() for line in value.splitlines())}
        for password in re.findall(r"://[^/\s:@]*:([^/\s@]+)@", value):  # such as a proxy's
            found |= {password, unquote(password)}
    forms = {form for one in found if len(one) > 5 for form in (one, quote(one, safe=""))}
    # repr and JSON escape quotes, backslashes and line breaks; nested, they add more and more backslashes.
    escaped = (
        r"[\\\"'nr\s]+".join(map(re.escape, re.split(r"[\\\"'\r\n]+", one)))
        for one in sorted(forms, key=len, reverse=True)
    )
    return re.compile("|".join([*escaped, _SECRET_VALUE.pattern]))


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by dotted name as a dictionary per section, the text before the first dot; others stay on top.

    {"optim.eps": 1, "run_name": "a"} becomes {"optim": {"eps": 1}, "run_name": "a"}, a new dictionary.
    """
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *section, leaf = name.split(".", 1)
        (nested.setdefault(section[0], {}) if section else nested)[leaf] = value
    return nested


def near_multiples(number: int, unit: int) -> str:
    """Returns the multiples of `unit` around `number` as text, "4 or 8"; only `unit` if `number` is smaller."""
    lower = number // unit * unit
    return f"{lower} or {lower + unit}" if lower else str(unit)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _as(value: Any, kind: Any) -> Any:
    """Returns `value` converted to the type `kind`, which is no union.

    Raises TypeError, ValueError or OverflowError if it has another type, or is an empty text, list or mapping.
    """
    origin = get_origin(kind)
    if is_dataclass(kind) and type(value) is kind:
        return value
    if origin is Literal and isinstance(value, str) and value in get_args(kind):
        return value
    if kind is types.NoneType and value is None:
        return None
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and (number := _number(value)) == int(number):
        return int(number)
    if kind is float and math.isfinite(number := _number(value)):
        return float(number)
    if kind is str and isinstance(text := os.fspath(value), str) and text:
        return text
    if origin is tuple and isinstance(value, list | tuple) and value:
        return tuple(_as(item, get_args(kind)[0]) for item in value)
    if origin is Callable and (callable(value) or (isinstance(value, str) and FUNCTION.fullmatch(value))):
        return value
    if origin is dict and isinstance(value, Mapping) and value:
        return {_as(key, str): "" if item == "" else _as(item, str) for key, item in value.items()}
    raise TypeError


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return [item for item in value if isinstance(item, str)] if isinstance(value, tuple) else []


def _number(value: Any) -> int | float:
    """Returns a number, also from numpy or text (form fields); raises TypeError or ValueError for others and bools."""
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, str):
        with suppress(ValueError):
            return int(value)
    elif not isinstance(value, numbers.Real):
        raise TypeError
    return float(value)
