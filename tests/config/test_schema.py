"""The parameters, and contradictions between them."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from tpu_kit.config.loader import ConfigError, DataConfig, LoraConfig, OptimConfig, TrainConfig, load_config
from tpu_kit.config.schema import USUAL, parameters


def problems(**values: Any) -> list[str]:
    """The problems of a configuration; `optim__eps=1` sets optim.eps."""
    try:
        load_config({name.replace("__", "."): value for name, value in values.items()})
    except ConfigError as error:
        return error.problems
    return []


def test_every_parameter_is_explained() -> None:
    for name, parameter in parameters().items():
        assert parameter.help.endswith("."), name
        assert parameter.read(parameter.default) == parameter.default, name


def test_defaults_are_a_valid_run() -> None:
    config = TrainConfig()
    assert config["optim.batch_size"] == config.optim.batch_size == 4
    assert config.sources == {"optim.learning_rate": USUAL}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"model__revision": "main"},
         "model.revision: 'main' has no effect on the embedded model; remove it or set model.name"),
        ({"model__gguf_file": "a.gguf"}, "model.gguf_file: 'a.gguf' has no effect on the embedded model; "),
        ({"lora__r": 0, "lora__dora": True},
         "lora.dora: true needs adapters, and lora.r=0 has none; remove it or set lora.r=16"),
        ({"lora__tokens": "added", "lora__full": ["lm_head"]},
         "lora.tokens: 'added' trains vectors of embeddings that lora.full trains in full; remove either"),
        ({"optim__embedding_learning_rate": 1e-5},
         "optim.embedding_learning_rate: 1e-05 has no effect: no embedding is trained; set lora.tokens or lora.ful"
         "l, or name one in lora.targets"),
        ({"lora__r": 0, "lora__plus": 4.0},
         "lora.plus: 4.0 needs adapters, and lora.r=0 has none; remove it or set lora.r=16"),
        ({"lora__r": 0, "lora__rslora": True}, "lora.rslora: true needs adapters, "),
        ({"lora__r": 0, "lora__dropout": 0.1}, "lora.dropout: 0.1 needs adapters, "),
        ({"lora__r": 0, "lora__init": "gaussian"}, "lora.init: 'gaussian' needs adapters, "),
        ({"lora__r": 0, "lora__targets": ["q_proj"]}, "lora.targets: ['q_proj'] needs adapters, "),
        ({"data__think_open": "<t>", "data__think_close": "<t>"},
         "data.think_close: '<t>' is data.think_open too; the two must differ"),
        ({"data__date": "20251231"},
         "data.date: '20251231' is no date such as 2025-12-31; write a date, or null for the day on which the run"),
        ({"data__think_open": ""}, "data.think_open: '' is empty; the default is '<think>'"),
        ({"data__eval_split": "train"},
         "data.eval_split: 'train' is the training split; name another split, or null to hold out eval_rows"),
        ({"data__eval_rows": 2.5}, "data.eval_rows: 2.5 is neither a whole number of rows nor a share below 1"),
        ({"data__eval_rows": 0, "optim__eval_steps": 5},
         "optim.eval_steps: 5 needs rows to evaluate on, but data.eval_rows=0; "
         "remove data.eval_rows=0, or set data.eval_source or data.eval_split"),
        ({"data__eval_rows": 0, "tracking__generate_rows": 5},
         "tracking.generate_rows: 5 needs rows to evaluate on, but data.eval_rows=0; "),
        ({"optim__early_stop_patience": 2},
         "optim.early_stop_patience: 2 counts evaluations during training, but optim.eval_steps is null; "
         "set optim.eval_steps"),
        ({"optim__epochs": None},
         "optim.max_steps: null and optim.epochs is null too, so training would never end; set either"),
        ({"optim__warmup_steps": 5, "optim__warmup_ratio": 0.1},
         "optim.warmup_steps: 5 and optim.warmup_ratio=0.1 both set the warm-up; set either to 0"),
        ({"optim__warmup_steps": 50, "optim__max_steps": 20},
         "optim.warmup_steps: 50 is more than optim.max_steps=20; lower it or raise optim.max_steps"),
        ({"optim__schedule": "constant", "optim__min_learning_rate_ratio": 0.1},
         "optim.min_learning_rate_ratio: 0.1 is the end of a decay, but optim.schedule=constant has none; "
         "set it to 0 or optim.schedule=cosine"),
        ({"optim__global_batch_size": 30, "optim__batch_size": 4},
         "optim.global_batch_size: 30 is no multiple of optim.batch_size=4 x optim.gradient_accumulation=1; "
         "use 28 or 32"),
        ({"optim__batch_growth_steps": 10},
         "optim.batch_growth_steps: 10 has no effect with optim.batch_growth_factor=1; "
         "remove it or set optim.batch_growth_factor=2"),
        ({"optim__batch_growth_max": 64}, "optim.batch_growth_max: 64 has no effect with "),
        ({"optim__batch_growth_lr": "sqrt"}, "optim.batch_growth_lr: 'sqrt' has no effect with "),
        ({"optim__batch_growth_factor": 2},
         "optim.batch_growth_steps: null but optim.batch_growth_factor=2 needs the updates between growths; set it"),
        ({"optim__batch_growth_factor": 2, "optim__batch_growth_steps": 9, "optim__batch_growth_max": 8,
          "optim__global_batch_size": 16},
         "optim.batch_growth_max: 8 is less than the optim.global_batch_size=16 that training starts with; raise it"),
        ({"run_name": "a/b"}, "run_name: 'a/b' cannot name a folder; use letters, digits, dots and dashes"),
        ({"run_name": ".."}, "run_name: '..' cannot name a folder; "),
        ({"output_dir": "s3://bucket/run"}, "output_dir: 's3://bucket/run' is neither a folder nor a gs:// address; "),
        ({"launch__device_type": "gpu"}, "launch.device_type: 'gpu' is not \"auto\", \"tpu\", \"torch-tpu\", "),
        ({"optim__learning_rate": 0}, "optim.learning_rate: 0 is out of range; give a number above 0 (the default is "),
        ({"optim__ema_decay": 1}, "optim.ema_decay: 1 is out of range; give a number at least 0 and below 1 "),
        ({"optim__batch_size": 0}, "optim.batch_size: 0 is out of range; give a number at least 1 "),
        ({"checkpoint__save_steps": 0}, "checkpoint.save_steps: 0 is out of range; give a number at least 1 "),
        ({"tracking__logging_steps": 0}, "tracking.logging_steps: 0 is out of range; give a number at least 1 "),
        ({"lora__dropout": 1}, "lora.dropout: 1 is out of range; give a number at least 0 and below 1 "),
    ],
)  # fmt: skip
def test_problem(values: dict[str, Any], text: str) -> None:
    (problem,) = problems(**values)
    assert problem.startswith(text)


@pytest.mark.parametrize(
    "values",
    [
        {"lora__r": 0},
        {"lora__r": 0, "lora__alpha": 8.0},
        {"data__eval_rows": 0},
        {"data__eval_rows": 0, "data__eval_source": "a.jsonl", "optim__eval_steps": 5, "tracking__generate_rows": 9},
        {"data__eval_source": "a/b", "data__eval_split": "train"},
        {"data__eval_rows": 0, "data__eval_split": "test", "optim__eval_steps": 5, "optim__early_stop_patience": 1},
        {"data__max_length": 1000},
        {"optim__max_steps": 5, "optim__epochs": None},
        {"optim__max_steps": 5, "optim__warmup_steps": 5},
        {"optim__batch_size": "auto", "optim__global_batch_size": 64},
        {"optim__batch_growth_factor": 1.5, "optim__batch_growth_steps": 10, "optim__batch_growth_lr": "sqrt"},
        {"launch__device_type": "xla-cpu", "launch__num_replicas": 8},
        {"model__name": "a/b", "model__revision": "main", "model__gguf_file": "a.gguf"},
    ],
)
def test_no_problem(values: dict[str, Any]) -> None:
    assert problems(**values) == []


def test_all_problems_at_once() -> None:
    found = problems(optim__epochs=None, optim__eps=-1, lora__r="many", launch__device_type="gpu", no_such_thing=1)
    assert [text.split(":")[0] for text in found] == [
        "no_such_thing",
        "lora.r",
        "optim.eps",
        "launch.device_type",
        "optim.max_steps",
    ]


def test_a_refused_value_does_not_contradict_others() -> None:
    # A warm-up of 0.1 and a misread warmup_steps: only the second is reported.
    (problem,) = problems(optim__warmup_ratio=0.1, optim__warmup_steps="few")
    assert problem.startswith("optim.warmup_steps: 'few' is not a whole number")


def test_construction_in_code_is_checked_and_converted() -> None:
    config = TrainConfig(lora=LoraConfig(alpha=8, targets=["q_proj"]), output_dir=Path("a"))
    assert (config.lora.alpha, config.lora.targets, config.output_dir) == (8.0, ("q_proj",), "a")
    assert isinstance(config.lora.alpha, float)
    with pytest.raises(ConfigError, match=r"data.max_length: -1 is out of range"):
        TrainConfig(data=DataConfig(max_length=-1))
    with pytest.raises(ConfigError, match=r"optim.warmup_ratio: 2 is out of range"):
        replace(config, optim=replace(config.optim, warmup_ratio=2))
    with pytest.raises(ConfigError, match=r"optim: \{'batch_size': 2\} is not a OptimConfig"):
        TrainConfig(optim={"batch_size": 2})
    with pytest.raises(FrozenInstanceError):
        config.run_name = "b"


def test_a_section_is_not_changed_by_what_it_is_put_in() -> None:
    section = OptimConfig(batch_size="four")
    with pytest.raises(ConfigError):
        TrainConfig(optim=section)
    assert section.batch_size == "four"


def test_values_set_in_code_say_so() -> None:
    config = replace(TrainConfig(), run_name="b")
    assert config.sources == {"run_name": "code", "optim.learning_rate": USUAL}
    assert replace(config, sources={}) == config


def test_it_reaches_other_processes() -> None:
    config = TrainConfig(data=DataConfig(columns={"question": "q"}), run_name="b")
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.sources == config.sources


def test_output_path() -> None:
    assert TrainConfig(run_name="b").output_path == Path("runs/b")
    assert TrainConfig(run_name="b", output_dir="/data/x").output_path == Path("/data/x")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"optim__objective": "mine"},
         "optim.objective: 'mine' must be supervised, error-correction, error-correction-alone, policy, preference or "
         "module:function"),
        ({"optim__objective": "error-correction", "tracking__eval_generate_rows": 4},
         "tracking.eval_generate_rows: 4 generates without the error-correction head; set it to 0"),
        ({"optim__objective": "error-correction-alone", "lora__r": 0},
         "optim.objective: 'error-correction-alone' does not train the model's weights, and lora.r=0 saves them all; "
         "set lora.r=1"),
        ({"optim__objective": "error-correction", "distill__teacher": "t"},
         "optim.objective: 'error-correction' excludes the loss of distill.teacher; remove either"),
        ({"optim__objective": "a:b", "distill__teacher": "t"},
         "optim.objective: 'a:b' excludes the loss of distill.teacher; remove either"),
        ({"distill__temperature": 2.0},
         "distill.temperature: 2.0 has no effect without a teacher; remove it or set distill.teacher"),
        ({"distill__teacher": "t", "distill__temperature": 0}, "distill.temperature: 0 is out of range"),
        ({"distill__teacher": "t", "distill__logits_weight": 0},
         "distill.logits_weight: 0.0 and all other weights of distill are 0 too, so nothing is learned; "
         "set one above 0"),
        ({"distill__teacher": "t", "distill__layers": "0:1", "distill__hidden_weight": 1},
         "distill.layers: '0:1' names no pairs of layers counted from 1; write model:teacher, as in "
         "12:14"),
        ({"distill__teacher": "t", "distill__hidden_weight": 1},
         "distill.hidden_weight: 1.0 and distill.layers=null belong together; set both, or remove both"),
        ({"distill__teacher": "t", "distill__layers": "1:2"},
         "distill.hidden_weight: 0.0 and distill.layers=1:2 belong together; set both, or remove both"),
        ({"distill__teacher": "t", "distill__layers": "1:2", "distill__hidden_weight": 1, "optim__remat": "blocks"},
         "optim.remat: 'blocks' stores no outputs of single layers, which distill.layers compares; set optim.remat="),
        ({"distill__teacher": "t", "distill__teacher_dtype": "int4", "launch__mesh": "model=2"},
         "launch.mesh: 'model=2' splits columns, but int4 packs two columns in a byte; use fsdp instead of model, or "
         "distill.teacher_dtype=int8"),
        ({"distill__teacher": "t", "distill__top_k": 8},
         "distill.top_k: 8 needs distill.files; remove it or set distill.files"),
        ({"distill__teacher": "t", "distill__files": "f", "distill__logits_weight": 0, "distill__labels_weight": 1},
         "distill.files: 'f' holds logits, but distill.logits_weight=0; remove either"),
        ({"distill__teacher": "t", "distill__files": "f", "distill__embeddings_weight": 1},
         "distill.files: 'f' holds only logits; set distill.hidden_weight=0 and distill.embeddings_weight=0, or "
         "remove it"),
    ],
)  # fmt: skip
def test_contradictions_of_an_objective(values: dict[str, Any], text: str) -> None:
    found = problems(**values)
    assert len(found) == 1, found
    assert found[0].startswith(text), found[0]


TWO = ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"data__source": []}, "data.source: [] is empty; the default is 'embedded'"),
        ({"data__source": 5}, "data.source: 5 is not text or a list of sources; write it in quotes: \"5\""),
        ({"data__source": ["a.jsonl", {"source": "b.jsonl", "weight": 0, "repeat": 1, "fromat": "cot"}, {"weight": 1}]},
         "data.source: source 2, b.jsonl: weight: 0 is out of range; give a number above 0 (the default is null); "
         "source 2, b.jsonl: fromat: no such key; did you mean format?; "
         "source 3: source: missing; name a file or a data set of the hub"),
        ({"data__source": ["a.jsonl", {"source": "b.jsonl", "weight": 2, "tokens": 0.1}]},
         "data.source: source 2, b.jsonl: weight and tokens say how much of it is trained; give only one"),
        ({"data__source": ["a.jsonl", "synthetic"]}, "data.source: source 2: random tokens cannot be part of a mix"),
        ({"data__source": [{"source": "a.jsonl", "tokens": 0.5}, {"source": "b.jsonl", "tokens": 0.4}]},
         "data.source: tokens of all sources add up to 0.9; make the sum 1, or give one source no share"),
        ({"data__source": [{"source": "a.jsonl", "tokens": 1}, "b.jsonl"]},
         "data.source: tokens add up to 1 and leave none for the other sources; lower them"),
        ({"data__source": [{"source": "a.jsonl", "name": "x"}, {"source": "b.jsonl", "name": "x"}]},
         "data.source: x is the name of 2 sources; rename them"),
        ({"data__source": [{"source": "a.jsonl", "name": "x/y"}, "b.jsonl"]},
         "data.source: source 1, x/y: name: 'x/y' cannot name a metric; use letters, digits, dots and dashes"),
        ({"data__source": ["a.jsonl", {"source": "b\nc"}]}, "data.source: ['a.jsonl', 'b\\nc'] cannot name a file"),
        ({"data__source": ["a.jsonl", {"source": "b", "columns": {"text": "t"}, "format": "cot"}]},
         "data.source: ['a.jsonl', {'source': 'b', 'columns': {'text': 't'}, 'format': 'cot'}] has b, whose columns="
         "{'text': 't'} names text; cot has "),
        ({"data__source": ["a.jsonl", {"source": "b", "split": "test"}], "data__eval_split": "test"},
         "data.eval_split: 'test' is the training split; name another split"),
        ({"data__order": "sequence"}, "data.order: 'sequence' is for several sources; remove it, or give data.source"),
        ({"data__pack_apart": True}, "data.pack_apart: true is for several sources; remove it, or give data.source"),
        ({"data__source": TWO, "data__order": "round_robin", "data__curriculum": "level"},
         "data.curriculum: 'level' and data.order=round_robin are two orders; remove either"),
        ({"data__source": TWO, "data__order": "sequence", "optim__objective": "policy"},
         "data.order: 'sequence' orders rows that are packed before the run, but this run samples; remove it"),
        ({"data__source": [{"source": "a", "tokens": 0.5}, "b"], "optim__objective": "policy"},
         "data.source: [{'source': 'a', 'tokens': 0.5}, 'b'] has shares of tokens, but this run samples its tokens"),
        ({"data__format": "mine"}, "data.format: 'mine' must be auto, cot, messages, prompt_completion, text, prompt"),
    ],
)  # fmt: skip
def test_problems_of_a_mix(values: dict[str, Any], text: str) -> None:
    (found,) = problems(**values)
    assert found.startswith(text), found


def test_a_source_has_what_it_sets_and_else_what_the_section_has() -> None:
    config = load_config({"data": {"split": "dev", "source": ["a.jsonl", {"source": "x/b.json", "loss_on": "all"}]}})
    assert [(one.source, one.split, one.loss_on) for one in config.data.by_source] == [
        ("a.jsonl", "dev", "completion"), ("x/b.json", "dev", "all")
    ]  # fmt: skip
    assert config.data.source_names == ("a", "b") and load_config(config.to_dict()) == config
    assert load_config({"data": {"source": [{"source": "a.jsonl"}]}}).data.source == "a.jsonl", "one name is no mix"


def test_all_contradictions_of_a_distillation_are_told_at_once() -> None:
    found = problems(distill__teacher="t", distill__top_k=8, distill__hidden_weight=1, optim__objective="a:b")
    assert [one.partition(":")[0] for one in found] == ["optim.objective", "distill.hidden_weight", "distill.top_k"]
