"""Reading, refusing and showing a single value."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tpu_kit.config.fields import (
    ConfigError,
    ConfigField,
    closest,
    hide_secrets,
    is_secret_name,
    knob,
    knobs_of,
    near_multiples,
    show,
)

TOKEN = "hf_" + "abcdefghij" * 4


def parameter(hint: Any, default: Any = None, **bounds: float) -> ConfigField:
    return ConfigField("part.leaf", hint, default, "", bounds)


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (int, 3, 3),
        (int, 3.0, 3),
        (int, "3", 3),
        (int, "1e3", 1000),
        (int, 2**32 - 1, 2**32 - 1),
        (int, np.int64(3), 3),
        (float, 3, 3.0),
        (float, "1e-4", 1e-4),
        (float, np.float32(0.5), 0.5),
        (bool, True, True),
        (str, "x", "x"),
        (str, Path("a/b"), "a/b"),
        (str | None, None, None),
        (int | None, None, None),
        (int | Literal["auto"], "auto", "auto"),
        (int | Literal["auto"], "2", 2),
        (str | tuple[str, ...], "all", "all"),
        (str | tuple[str, ...], ["a", "b"], ("a", "b")),
        (dict[str, str] | None, {"a": "b"}, {"a": "b"}),
    ],
)
def test_read(hint: Any, value: object, expected: object) -> None:
    result = parameter(hint).read(value)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("hint", "value", "text"),
    [
        (int, "four", "part.leaf: 'four' is not a whole number; the default is null"),
        (int, 1.5, "part.leaf: 1.5 is not a whole number; "),
        (int, True, "part.leaf: true is not a whole number; "),
        (int, math.inf, "part.leaf: inf is not a whole number; "),
        (int, None, "part.leaf: null is not a whole number; "),
        (int, [1], "part.leaf: [1] is not a whole number; "),
        (float, "nan", "part.leaf: 'nan' is not a number; "),
        (float, math.inf, "part.leaf: inf is not a number; "),
        (float | None, "x", "part.leaf: 'x' is not a number or null; "),
        (bool, 1, "part.leaf: 1 is not true or false; "),
        (bool, "yes", "part.leaf: 'yes' is not true or false; "),
        (str, "", "part.leaf: '' is empty; "),
        (str, 7, "part.leaf: 7 is not text; write it in quotes: \"7\""),
        (Literal["cosine", "linear"], "cosin",
         "part.leaf: 'cosin' is not \"cosine\" or \"linear\"; did you mean \"cosine\"?"),
        (Literal["off", "on"], False, "part.leaf: false is not \"off\" or \"on\"; "),
        (Literal["off", "on"], True, "part.leaf: true is not \"off\" or \"on\"; "),
        (Literal["off", "on"], None, "part.leaf: null is not \"off\" or \"on\"; "),
        (int | Literal["auto"], "audo", "part.leaf: 'audo' is not a whole number or \"auto\"; did you mean \"auto\"?"),
        (str | tuple[str, ...], [], "part.leaf: [] is empty; "),
        (tuple[str, ...], ["a", ""], "part.leaf: ['a', ''] is empty; "),
        (tuple[str, ...], "a", "part.leaf: 'a' is not a list of texts; write ['a']"),
        (str | tuple[str, ...], {}, "part.leaf: {} is not text or a list of texts; "),
        (str | tuple[str, ...], ["a", 1], "part.leaf: ['a', 1] is not text or a list of texts; "),
        (dict[str, str] | None, {"a": 1}, "part.leaf: {'a': 1} is not a mapping of texts to texts or null; "),
        (dict[str, str] | None, {}, "part.leaf: {} is not a mapping of texts to texts or null; "),
    ],
)  # fmt: skip
def test_read_refuses_another_type(hint: Any, value: object, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parameter(hint).read(value)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "text"),
    [
        ({"at_least": 0, "below": 1}, [0, 0.5], [-1, 1, 7], "at least 0 and below 1"),
        ({"above": 0}, [1e-9, 5], [0, -1], "above 0"),
        ({"at_least": 0, "at_most": 1}, [0, 1], [1.1], "at least 0 and at most 1"),
    ],
)
def test_bounds(bounds: dict[str, float], inside: list[float], outside: list[float], text: str) -> None:
    for value in inside:
        assert parameter(float, **bounds).read(value) == value
    for value in outside:
        with pytest.raises(ValueError) as caught:
            parameter(float, 0.5, **bounds).read(value)
        assert str(caught.value) == f"part.leaf: {value!r} is out of range; give a number {text} (the default is 0.5)"


def test_bounds_let_text_and_none_pass() -> None:
    assert parameter(int | Literal["auto"] | None, at_least=1).read(None) is None
    assert parameter(int | Literal["auto"] | None, at_least=1).read("auto") == "auto"


@pytest.mark.parametrize(
    "secret", [TOKEN, "ghp_" + "a1" * 18, "sk-" + "a1" * 12, "AKIA" + "A1" * 8, "https://me:pass@example.org/x"]
)
def test_secrets_are_neither_taken_nor_shown(secret: str) -> None:
    for hint, value in ((str, secret), (int, secret), (tuple[str, ...], [secret]), (dict[str, str], {"a": secret})):
        with pytest.raises(ValueError, match=r"part.leaf: the value looks like a secret; .* environment") as caught:
            parameter(hint).read(value)
        assert secret not in str(caught.value)
    assert secret not in show({"a": secret}) and secret not in hide_secrets(f"it is {secret} here")


@pytest.mark.parametrize(
    "name", ["hf_token", "token", "HF_TOKEN", "wandb_api_key", "api-key", "apikey", "password", "client_secret"]
)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        "0123456789abcdef0123456789abcdef01234567",  # a commit
        "hf-internal-testing/tiny-random-LlamaForCausalLM",
        "data/hf_checkpoints_of_the_second_model_and_more",
        "https://example.org/data.jsonl",
        "gs://bucket/rows/*.jsonl",
    ],
)
def test_what_is_no_secret(text: str) -> None:
    assert parameter(str).read(text) == text
    assert not is_secret_name("generate_tokens")


def test_show() -> None:
    assert [show(v) for v in (None, True, 1e-4, "a", ("a", "b"))] == ["null", "true", "0.0001", "'a'", "['a', 'b']"]
    assert len(show("x" * 500)) == 80


def test_closest() -> None:
    assert closest("batchsize", ["batch_size", "seed"]) == ["batch_size"]
    assert closest("zzz", ["batch_size", "seed"]) == []


def test_near_multiples() -> None:
    assert [near_multiples(n, 8) for n in (3, 20)] == ["8", "16 or 24"]


@dataclass(frozen=True)
class Inner:
    a: int | None = knob(1, "The a.", at_least=1)


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    b: str = knob("x", "The b.")
    private: int = 0


def test_knobs_of() -> None:
    found = knobs_of(Outer)
    assert list(found) == ["inner.a", "b"]  # without a help text a field is no parameter
    a = found["inner.a"]
    assert (a.leaf, a.default, a.help, a.bounds, a.is_text("1")) == ("a", 1, "The a.", {"at_least": 1}, False)
    assert found["b"].is_text("1")
    assert Outer().b == "x"


def test_config_error_lists_all_problems_and_survives_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(ConfigError(["a: wrong", "b: wrong"])))
    assert error.problems == ["a: wrong", "b: wrong"]
    assert str(error) == "2 problems in the configuration:\n  - a: wrong\n  - b: wrong"
    assert isinstance(error, ValueError)
    assert str(ConfigError(["a: wrong"])).startswith("1 problem in")
