"""About a thousand malformed configurations, passed as users pass them: by notebooks, files and the command line.

None may be accepted silently, end the process or show a traceback. Either it is refused with its parameter and the
allowed values, or it is a valid way to write a value, and that value is in effect.
"""

from __future__ import annotations

import datetime
import json
import math
import random
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.child_processes import run_python
from tpu_kit.cli import main
from tpu_kit.config.fields import ConfigField
from tpu_kit.config.loader import _WITH_SECTION, ConfigError, TrainConfig, load_config
from tpu_kit.config.named_values import ROLES
from tpu_kit.config.schema import USUAL, parameters
from tpu_kit.data.rows.columns import NAMES

LONG = 4000  # characters; every error text is shorter
HALF = "\udc80"  # half a surrogate pair, which Python makes of an argument that is not UTF-8

# Values that no parameter accepts, or only some: all kinds of numbers, texts that look like numbers, other types.
VALUES: list[Any] = [
    None, "", "abc", "auto", True, False, math.nan, math.inf, -1, 0, -0.0, 1.5, 1e308, 10**30, [], [1], ["a", ""], {},
    {"a": 1}, {1: "a"}, "a\0b", HALF, b"bytes", 1j, object(), datetime.date(2024, 1, 1), "1e400", "nan", "4.0.0",
    np.float32(2), Path("a"), "${x}", "x" * 5000,
]  # fmt: skip
# Used as the text after `name=`, and as the value in a file.
TEXTS = [
    "", " ", "#", "010", "0x10", "0b11", "1:30", "1_0", "1e400", ".nan", "-.inf", "~", "Null", "yes", "2024-01-01",
    "[]", "{}", "[a, [b]]", "{a: [1]}", "'", "!!int abc", "!!timestamp x", "!!binary aGk=", "!!python/name:os.system",
    "*a", "${nowhere}", "${", "${oc.env:NOT_SET_ANYWHERE}", "${package:not_there}", "???", "- a", "|", "%", "@", "`",
    "{", "]", "[" * 300, "9" * 5000, "a\x07b", HALF,
]  # fmt: skip


def in_effect(given: Any, value: Any) -> bool:
    """Whether `value` is the meaning of `given`, by rules independent of the kit."""
    if isinstance(given, str) and not isinstance(value, str):
        text = given.partition("#")[0].strip()
        if value is None:
            return text in ("", "~", "null", "Null", "NULL")
        if isinstance(value, tuple):
            return (text,) == tuple(f"- {item}" for item in value)
        if isinstance(value, bool):
            return text.lower() in (("true", "yes", "on") if value else ("false", "no", "off"))
        return isinstance(value, int | float) and float(text) == value
    if value is None or isinstance(value, bool):
        return value is given
    if given is False:
        return bool(value == "off")
    if isinstance(value, str):
        return value == str(given)
    if isinstance(value, int | float):
        return float(given) == float(value)
    return value == (tuple(given) if isinstance(given, list) else given)


def refused_or_in_effect(load: Callable[[], TrainConfig], name: str, given: Any) -> bool:
    """Returns whether the value was refused; fails if the message is bad, or if another value is in effect."""
    try:
        config = load()
    except ConfigError as error:
        text = str(error)
        assert len(text) < LONG and "Traceback" not in text, text
        assert name.rpartition(".")[2] in text or "run.yaml" in text, text
        text.encode()  # otherwise it could not be printed
        return True
    usual = name == "optim.learning_rate" and config.sources.get(name) == USUAL  # null stands for it
    assert in_effect(given, None if usual else config[name]), f"{name}: {given!r} became {config[name]!r}"
    assert load_config(overrides=config.to_dict()) == config
    config.to_yaml().encode()
    return False


def read_plainly(text: str) -> Any:
    """Parses `text` as YAML; returns the result if it is a text or a collection, otherwise `text`."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, AttributeError):
        return text
    return value if isinstance(value, str | list | dict) else text


@pytest.mark.parametrize("name", parameters())
def test_a_value_is_refused_or_in_effect(name: str, tmp_path: Path) -> None:
    section, _, leaf = name.rpartition(".")
    file, refused = tmp_path / "run.yaml", 0
    # Each parameter tries a third of the values, so that all values reach all kinds of parameters.
    turn = list(parameters()).index(name)
    key = name if name in _WITH_SECTION else leaf
    for number, value in enumerate(VALUES):
        if number % 3 == turn % 3:
            refused += refused_or_in_effect(lambda value=value: load_config(parameters={key: value}), name, value)
    for number, text in enumerate(TEXTS):
        if number % 6 == turn % 6:
            said = [f"{name}={text}"]
            refused += refused_or_in_effect(lambda said=said: load_config(None, said), name, text)
        elif number % 6 == (turn + 3) % 6 and text != HALF:
            file.write_text(f"{section}:\n  {leaf}: {text}\n" if section else f"{leaf}: {text}\n")
            refused += refused_or_in_effect(lambda: load_config(file), name, read_plainly(text))
    assert refused >= 4


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{this}: &{this} [{', '.join([f'*{before}'] * 9)}]\n" for before, this in zip("abcdefgh", "bcdefghi", strict=True)
)

# A file's content, and a part of the message.
FILES: list[tuple[str | bytes, str]] = [
    ("- 1\n", "holds a list"),
    ("3\n", ""),
    ("abc\n", ""),
    ("batch_size=3\n", ""),
    ("<xml/>\n", ""),
    ("---\na: 1\n---\nb: 2\n", "not valid YAML"),
    ("batch_size: 1\nbatch_size: 1\n", "duplicate key batch_size"),
    ("optim:\n  batch_size: 1\n  batch_size: 2\n", "duplicate key batch_size"),
    ("batch_size: 1\noptim:\n  batch_size: 2\n", "given twice, as 1 and as 2"),
    ("seed: 1\ndata:\n  seed: 2\n", "data.seed: given twice"),
    ("data.columns.question: x\ndata:\n  columns: {answer: y}\n", "data.columns: given twice, as a whole and as"),
    ("columns: x\n", "data.columns: 'x' is not a mapping of texts to texts"),
    (LAUGHS, "aliases such as *a are not read; write the value again; correct it there"),
    ("a: &a\n  b: *a\n", "aliases such as *a are not read"),
    ("optim: &a\n  batch_size: *a\n", "aliases such as *a are not read"),
    ("x: " + "[" * 700 + "]" * 700 + "\n", ""),
    ("x: " + "{a: " * 700 + "}" * 700 + "\n", ""),
    ("".join(f"k{number}: 1\n" for number in range(300)), "and 250 more"),
    ("\tbatch_size: 3\n", "not valid YAML"),
    ("1: 2\n", "1: no such parameter"),
    ("null: 3\n", "null: no such parameter (given 3)"),
    ("[a]: b\n", ""),
    ("? - a\n: b\n", ""),
    ("optim: 3\n", "optim: 3 is given for a whole section"),
    ("optim: [1]\n", "is given for a whole section"),
    ("optim:\n- batch_size: 3\n", "is given for a whole section"),
    ("optim:\n  optim.batch_size: 3\n", "optim.optim.batch_size: no such parameter"),
    ("optim:\n  batch_size: {a: 1}\n", "is not a whole number"),
    ("optim:\n  bach_size: 3\n", "did you mean optim.batch_size?"),
    ("model:\n  batch_size: 3\n", "did you mean optim.batch_size?"),
    ("data:\n  columns: {question: {a: b}}\n", "is not a mapping of texts to texts"),
    (
        "data:\n  columns: {quest: a}\n",
        "data.columns: {'quest': 'a'} names the unknown role quest; the roles are answer",
    ),
    ("sources: {optim.eps: file}\n", "sources: no such parameter"),
    ("__class__: 1\n", "__class__: no such parameter"),
    ("optim:\n  __class__: 1\n", "no such parameter"),
    ("hf_token: abc\n", "secrets do not belong in a configuration"),
    ("run_name: !!python/object/apply:os.system [touch here]\n", "could not determine a constructor"),
    ("!!python/object/new:os.system [x]\n", ""),
    ("run_name: !foo bar\n", "could not determine a constructor"),
    ("batch_size: !!int abc\n", "YAML reads abc as another number"),
    ("run_name: !!timestamp x\n", "correct it there"),
    ("max_steps: 010\n", "line 1: not valid YAML: YAML reads 010 as another number; write it in decimal, or in quotes"),
    ("run_name: 12:30:45\n", "run_name: '12:30:45' cannot name a folder"),
    ("epochs: 1:30.5\n", "optim.epochs: '1:30.5' is not a number"),
    ("run_name: " + "9" * 6000 + "\n", "correct it there"),
    ("run_name: 7\n", 'write it in quotes: "7"'),
    ("learning_rate: .NaN\n", "is not a number"),
    ("learning_rate: 1e400\n", "is not a number"),
    ("run_name: ${run_name}\n", ""),
    ("run_name: ${a}\na: ${run_name}\n", ""),
    ("run_name: ${oc.env:NOT_SET_ANYWHERE}\n", "NOT_SET_ANYWHERE"),
    ("run_name: ${oc.create:{a:1}}\n", "references such as ${oc.create:{a:1}} are not read"),
    ("run_name: ${nope:x}\n", "references such as ${nope:x} are not read"),
    ("run_name: ${package:}\n", "correct it there"),
    ("run_name: ${package:os.path}\n", ""),
    ("optim: ${model}\n", "references such as ${model} are not read"),
    ("optim: ${optim}\n", ""),
    ("run_name: '${'\n", ""),
    ("run_name: ???\n", ""),
    ('run_name: "\\ud800"\n', ""),
    ('run_name: "\\0"\n', "holds a character that no file can"),
    ('run_name: "\\x07"\n', "cannot name a folder"),
    ("run_name: |\n  a\n  b\n", "cannot name a folder"),
    ("run_name: 'a\n", "not valid YAML"),
    ("run_name: a: b\n", "not valid YAML"),
    ("%YAML 9.9\n---\nrun_name: a\n", ""),
    ("targets: [a, 1]\n", "is not text or a list of texts"),
    ("targets: [a, null]\n", "is not text or a list of texts"),
    (b"\xff\xfeb\x00: \x00", "not UTF-8 text"),
    (b"PK\x03\x04\x00\x01", ""),
    (b"batch_size: 3\x00\n", ""),
    (b"\x1f\x8b\x08\x00\xff", "not UTF-8 text"),
]


@pytest.mark.parametrize(("content", "said"), FILES, ids=range(len(FILES)))
def test_a_malformed_file_is_refused(content: str | bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert said in str(caught.value) and len(str(caught.value)) < 2 * LONG
    assert not [problem for problem in caught.value.problems if "\n" in problem]


TOKEN = "hf_" + "Ab1" * 12
FOREIGN = [
    "fp16: true", "deepspeed: zero3.json", "rl: dpo",
    "optim: sgd", "lr_scheduler: rex", "eval_strategy: epoch", "datasets: [{path: a, type: alpaca}]", "hub_token: abc",
]  # fmt: skip
BROKEN = [
    "run_name: a\nrun_name: b\n", "optim: {eps: 1, eps: 2}\n", "run_name: [a\n", "max_steps: 0x1F\n",
    "seed: &a 1\nr: *a\n",
    "run_name: ${oc.env:HF_TOKEN}\n", f"{TOKEN}: 1\n{TOKEN}: 2\n", f"run_name: ${{{TOKEN}}}\n", f"a: !{TOKEN} b\n",
]  # fmt: skip


def wrong_value(rng: random.Random, parameter: ConfigField) -> Any:
    """Returns a random value that a parameter does not accept."""
    text = "'" + str(parameter.hint)
    wrong: list[Any] = [{"a": [1]}, [], [[1]], "a\0b", TOKEN, [TOKEN]]
    if "str" not in text:
        wrong += ["zzz", "1e400", "12:30"]
    if "str" in text and "Literal" not in text:
        wrong += [7, False, 1.5]
    if "bool" not in text:
        wrong.append(True)
    if "float" not in text and "str" not in text:
        wrong.append(1.5)
    return rng.choice([*wrong, -(10**40), 10**40] if parameter.bounds else wrong)


def malformed(rng: random.Random, file: Path) -> tuple[Callable[[], TrainConfig], list[str]]:
    """Returns a configuration with one to six problems, and the names with which the problems begin."""
    if rng.random() < 0.1:
        text = rng.choice(BROKEN)
        file.write_text(text)
        return lambda: load_config(file), [str(file)]
    named, values, texts, lines = [], {}, [], []
    for name in rng.sample(list(parameters()), rng.randint(1, 4)):
        value = wrong_value(rng, parameters()[name])
        named.append(name)
        way = rng.randrange(3)
        leaf = parameters()[name].leaf
        if way == 0 or leaf == "seed" or value == "a\0b":
            values[name] = value
        elif way == 1 and not parameters()[name].is_text(json.dumps(value)):
            texts.append(f"{name}={json.dumps(value)}")
        else:
            lines.append(f"{name}: {json.dumps(value)}")
    if rng.random() < 0.5:
        name = rng.choice(list(parameters()))
        typo = f"{name}x{rng.randrange(10)}"
        named.append(typo)
        values[typo] = rng.choice([1, TOKEN, None, [TOKEN]])
    if rng.random() < 0.3:
        lines.append(rng.choice(FOREIGN))
        named.append(lines[-1].partition(":")[0].replace("datasets", "datasets.type"))
    file.write_text("\n".join(lines))
    return lambda: load_config(file, texts, values), named


def refuse_all(seeds: range, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in seeds:
        load, named = malformed(random.Random(seed), folder / "run.yaml")
        with pytest.raises(ConfigError) as caught:
            load()
        problems, printed = caught.value.problems, str(caught.value) + capsys.readouterr().err
        assert TOKEN not in printed and "Traceback" not in printed, (seed, printed)
        assert not [problem for problem in problems if "\n" in problem or len(problem) > 700], (seed, printed)
        for name in named:
            assert [problem for problem in problems if problem.startswith(name)], (seed, name, printed)


def test_sixty_malformed_configurations_are_refused_in_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_all(range(60), tmp_path, capsys)


@pytest.mark.slow
def test_a_thousand_malformed_configurations_are_refused_in_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_all(range(1000), tmp_path, capsys)


@pytest.mark.parametrize("path", [".", "/", "/dev/zero", "no\0name", "x" * 5000, HALF, "", "run.yaml/below"])
def test_a_path_that_is_no_file_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="no such configuration file; ") as caught:
        load_config(path)
    assert len(str(caught.value)) < LONG


# Arguments of `train`, and a part of the message.
ARGUMENTS: list[tuple[list[str], str]] = [
    ([""], ": no such configuration file"),
    (["="], ": no such parameter"),
    (["=3"], ": no such parameter"),
    (["optim.=3"], "optim.: no such parameter"),
    ([".batch_size=3"], "did you mean optim.batch_size?"),
    (["optim..batch_size=3"], "did you mean optim.batch_size?"),
    ([" batch_size=3"], "did you mean optim.batch_size?"),
    (["BATCH_SIZE=3"], "did you mean optim.batch_size?"),
    (["optim.batch_size.x=3"], "optim.batch_size.x: no such parameter"),
    (["optim={batch_size: 3}"], "is given for a whole section"),
    (["model={}"], "is given for a whole section"),
    (["data=null"], "is given for a whole section"),
    (["columns.=a"], "columns.: no such parameter"),
    (["data.columns.=a"], "data.columns.: no such parameter"),
    (["columns.question.x=y"], "unknown role question.x"),
    (["columns=x", "columns.question=a"], "data.columns: 'x' is not a mapping, so question cannot be added"),
    (["columns=[]"], "is not a mapping"),
    (["columns={}"], "is not a mapping"),
    (["columns={question: null}"], "is not a mapping"),
    (["targets={}"], "is not text or a list of texts"),
    (["--exact=1"], "--exact: ignored explicit argument '1'; write python -m tpu_kit train"),
    (["-x"], "-x: no such option"),
    (["a.yaml", "b.yaml"], "one configuration file at most"),
    (["batch_size"], "batch_size: no such configuration file"),
    (["batch_size", "=", "3"], "one configuration file at most"),
    (["batch_size==3"], "is not a whole number"),
    (["batch_size=3=4"], "is not a whole number"),
    (["max_steps="], "optim.max_steps: '' reads as null; write optim.max_steps=null for none"),
    (["max_steps=#5"], "optim.max_steps: '#5' reads as null"),
    (["max_steps=nul"], "'nul' is not a whole number or null"),
    (["max_steps=010"], "YAML reads 010 as another number"),
    ([f"{HALF}=3"], "no such parameter"),
    ([f"run_name={HALF}"], "holds a character that no file can"),
    (["x" * 5000 + "=1"], "no such parameter"),
    (["x" * 5000], "no such configuration file"),
    (["run_name=hf_" + "a" * 40], "looks like a secret"),
    (["run_name="], "run_name: '' is empty"),
    (["run_name= "], "cannot name a folder"),
    (["run_name=.."], "cannot name a folder"),
    (["run_name=a/b"], "cannot name a folder"),
    (["run_name=a\nb"], "cannot name a folder"),
    (["run_name=" + "n" * 300], "cannot name a folder; use letters, digits, dots and dashes, 200 bytes at most"),
    (["output_dir= "], "cannot name a file or a folder"),
    (["output_dir=a/" + "n" * 300], "cannot name a file or a folder"),
    (["name=" + "n" * 300], "cannot name a file or a folder"),
    (["source=a\nb"], "cannot name a file or a folder"),
    (["output_dir=s3://bucket/run"], "is neither a folder nor a gs:// address"),
    (["output_dir=gs://"], "is neither a folder nor a gs:// address"),
    (["seed=-1"], "out of range"),
    (["seed=4294967296"], "out of range"),
    (["save_steps=4294967296"], "give a number below 2**32"),
    (["max_steps=10000001"], "give a number at least 1 and at most 10000000"),
    (["batch_size=1000001"], "give a number at least 1 and at most 1000000"),
    (["num_replicas=1025"], "give a number at least 1 and at most 1024"),
    (["num_proc=100000"], "give a number at least 1 and at most 1024"),
    (["hang_timeout=1e30"], "out of range"),
    (["learning_rate=1e300"], "give a number that float32 holds"),
    (["eps=1e-300"], "give a number that float32 holds"),
    (["packing=maybe"], "is not true or false"),
    (["packing=1"], "is not true or false"),
    (["wandb=true"], "is not "),
    (["optimizer=adamw_8bit"], "bitsandbytes runs only on CUDA"),
    (["attention=flash_attention_2"], "flash-attn package runs only on CUDA"),
    (["fp16=true"], "a TPU has no float16"),
    # Contradictions.
    (["eval_rows=0", "generate_rows=5"], "needs rows to evaluate on"),
    (["eval_rows=0", "eval_steps=5"], "needs rows to evaluate on"),
    (["early_stop_patience=3"], "counts evaluations during training"),
    (["eval_split=train"], "is the training split"),
    (["max_steps=null", "epochs=null"], "training would never end"),
    (["warmup_steps=5", "warmup_ratio=0.1"], "both set the warm-up"),
    (["warmup_steps=50", "max_steps=5"], "is more than optim.max_steps=5"),
    (["schedule=constant", "min_learning_rate_ratio=0.1"], "is the end of a decay"),
    (["r=0", "dora=true"], "needs adapters"),
    (["r=0", "base_dtype=int4"], "holds weights that cannot be trained"),
    (["base_dtype=int8", "dora=true"], "has rounded"),
    (["quant_group=64"], "needs model.base_dtype=int4"),
    (["revision=x"], "has no effect on the embedded model"),
    (["think_open=</think>"], "the two must differ"),
    (["optimizer=adafactor", "beta1=0.5"], "has no effect with optim.optimizer=adafactor"),
    (["global_batch_size=7"], "is no multiple of"),
    (["batch_growth_factor=2"], "needs the updates between growths"),
    (["batch_growth_steps=2"], "has no effect"),
    (["batch_growth_factor=2", "batch_growth_steps=2", "global_batch_size=8", "batch_growth_max=4"], "is less than"),
    (["verifier=nosuch"], "tracking.verifier: 'nosuch' names no rule; use auto, exact, numeric, choice, math, "),
    (["verifier=:"], "tracking.verifier: ':' names no rule; "),
    (["verifier=regex:("], "tracking.verifier: 'regex:(' has a pattern that cannot be read (missing ), "),
    (
        ["format=cot", "columns.text=body"],
        "data.columns: {'text': 'body'} names text; cot has ",
    ),
    (["columns={messages: chat, completion: reply}"], "names completion, messages; "),
]


@pytest.mark.parametrize(("arguments", "said"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_malformed_arguments_are_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (
        "tpu_kit.distributed.launch",
        "tpu_kit.recipes.sft",
    ):  # imports from them fail: nothing may get that far
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert main(["train", *arguments]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out and len(printed.err) < LONG
    assert printed.err.count("problem") >= 1 and "Traceback" not in printed.err


# Settings that are wrong only on a given machine, and a part of the message before the launch.
ON_THE_MACHINE: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 10**6}, "data set smaller than one global batch"),
    ({"gradient_accumulation": 10**6, "batch_size": 10**6}, "an update takes 1000000000000"),
    ({"max_length": 2**32 - 1}, "data.max_length=4294967295 is longer than the"),
    (
        {"global_batch_size": 10**8, "batch_size": "auto"},
        "optim.batch_size=auto: not one row of data.max_length=1024 in each of 100,000,000 passes",
    ),
    ({"source": "nowhere.jsonl"}, "data source nowhere.jsonl: there is no such file"),
    ({"name": "nowhere/at/all"}, "model.name=nowhere/at/all: there is no such folder"),
    ({"verifier": "no_such_module:f"}, "tracking.verifier=no_such_module:f: it cannot be imported"),
    ({"verifier": "os:name"}, "tracking.verifier=os:name: it is a str, not a function"),
    ({"output_dir": "/dev/null"}, "output_dir=/dev/null cannot be written to"),
    ({"output_dir": "/proc/run"}, "output_dir=/proc/run cannot be written to"),
    ({"wandb": "online"}, "no W&B key was found"),
    ({"device_type": "tpu"}, "tpu"),
    ({"num_replicas": 3, "global_batch_size": 4}, "optim.global_batch_size: 4 is no multiple of"),
    ({"name": "nowhere/at-all", "batch_size": "auto"}, "model.name=nowhere/at-all: it is not a folder here"),
]


@pytest.mark.parametrize(("given", "said"), ON_THE_MACHINE, ids=range(len(ON_THE_MACHINE)))
def test_what_the_machine_does_not_allow_is_refused_before_the_launch(
    given: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpu_kit.recipes import sft

    monkeypatch.setattr(sft, "launch", lambda *_: pytest.fail("it was launched"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for variable, value in (("HF_HUB_OFFLINE", "1"), ("WANDB_API_KEY", ""), ("NETRC", str(tmp_path / "netrc"))):
        monkeypatch.setenv(variable, value)
    config = load_config(overrides={"device_type": "cpu", "num_replicas": 1, **given})
    with pytest.raises(ValueError, match=re.escape(said)):
        sft.train(config)


@pytest.mark.parametrize(
    "arguments",
    [["train", "batch_size=!!int abc"], ["train", b"run_name=\xff"], ["plan", "max_steps=1:30"], ["plan", "epochs=-1"]],
)
def test_the_command_itself_shows_no_traceback(arguments: list[Any]) -> None:
    done = run_python(["-m", "tpu_kit", *arguments], expect=2)
    assert "problem in the configuration:" in done.stderr and "Traceback" not in done.stderr and not done.stdout


def test_the_roles_of_columns_are_those_of_the_formats() -> None:
    assert set(NAMES) == {role for roles in ROLES.values() for role in roles}
