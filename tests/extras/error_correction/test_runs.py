"""Runs with an error-correction head: equal on all devices, resumed bit for bit, evaluated without it too, exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.recipes.test_distill import assert_alike, assert_one_program, logged, weights
from tests.recipes.test_own_objective import trained
from tpu_kit.assets.embedded import cot_rows
from tpu_kit.config.loader import ModelConfig, TrainConfig, load_config
from tpu_kit.distributed.detection import Backend
from tpu_kit.exporting.export import export
from tpu_kit.generation.answers import generate
from tpu_kit.generation.evaluation.evaluate import evaluate_adapter
from tpu_kit.generation.model_loading import load_for_generation
from tpu_kit.generation.sampling import Sampling
from tpu_kit.machine.checks import Machine
from tpu_kit.model.states_head import file_names, without_head
from tpu_kit.recipes import sft
from tpu_kit.recipes.replica import read
from tpu_kit.recipes.run_plan import RunPlan
from tpu_kit.training.losses.objective_check import check_objective
from tpu_kit.training.objectives import objective_of

pytestmark = pytest.mark.usefixtures("quick_xla")
xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
CPU = {"device_type": "cpu", "num_replicas": 1}
# Below eps AdamW moves an element in proportion to its gradient. With the default of 1e-8, an element whose gradient is
# below its rounding error moves by up to a whole step in either direction, also with other micro-batches on one CPU.
ABOVE_ROUNDING = {"eps": 1e-4, "save_steps": 1, "checkpoint.keep": 4}
FILES = file_names("error_correction")
CLASS = {"tpu_kit_head": "tpu_kit.extras.error_correction.head:ErrorCorrection"}


@pytest.fixture(scope="module")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return trained(world, tmp_path_factory.mktemp("whole"), "error-correction", **CPU, **ABOVE_ROUNDING)


def assert_same_training(run: TrainConfig, whole: TrainConfig) -> None:
    """The gradients of the first update, the losses and the parameters are the same."""
    mine, wanted = weights(run, 1), weights(whole, 1)
    firsts = [name for name in wanted if name.startswith("moments/first/")]
    assert firsts
    for name in firsts:
        assert (mine[name] - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name
    assert_alike(run, whole)


def test_a_run_saves_its_head_and_resumes_bit_for_bit(world: Path, whole: TrainConfig, tmp_path: Path) -> None:
    first, *_, last = logged(whole)
    parts = [first[name] for name in ("nll", "nll_corrected", "nll_residual")]
    assert first["loss"] == pytest.approx(sum(parts), rel=1e-5) and parts[0] == parts[1]
    assert last["nll_residual"] < first["nll_residual"]
    ended = weights(whole)
    head = load_file(whole.output_path / "adapter" / FILES[1])
    assert sorted(head) == ["gate", "mixture.bias", "mixture.weight", "output.weight", "trunk.bias", "trunk.weight"]
    assert all(torch.equal(value, ended[f"parameters/objective.{name}"]) for name, value in head.items())
    assert abs(float(head["gate"])) > 1e-3
    settings = CLASS | {"hidden_size": 32, "width": 128, "components": 4, "size": 16}
    for folder in ("adapter", "checkpoints/step-00000004"):
        assert json.loads((whole.output_path / folder / FILES[0]).read_text()) == settings

    shutil.copytree(whole.output_path / "checkpoints", tmp_path / "checkpoints")
    for step in (3, 4):
        shutil.rmtree(tmp_path / f"checkpoints/step-{step:08}")
    resumed = weights(trained(world, tmp_path, "error-correction", **CPU, **ABOVE_ROUNDING))
    assert [name for name, value in ended.items() if not torch.equal(value, resumed[name])] == []


@xla
@pytest.mark.slow
def test_replicas_train_it_like_one_cpu_in_one_program(world: Path, whole: TrainConfig, tmp_path: Path) -> None:
    found = trained(world, tmp_path, "error-correction", num_replicas=2, **ABOVE_ROUNDING)
    assert_same_training(found, whole)
    assert_one_program(found)


@xla
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2", "data=2,model=2"])
def test_a_mesh_trains_it_like_one_cpu(world: Path, whole: TrainConfig, tmp_path: Path, mesh: str) -> None:
    found = trained(world, tmp_path, "error-correction", **{"launch.mesh": mesh}, **ABOVE_ROUNDING)
    assert_same_training(found, whole)
    assert all(line["host_syncs_per_step"] == line["fallbacks_per_step"] == 0 for line in logged(found))


@pytest.mark.slow
def test_all_weights_may_be_trained_beside_it(world: Path, tmp_path: Path) -> None:
    config = trained(
        world, tmp_path, "error-correction", **CPU, **{"lora.r": 0, "generate_rows": 2, "generate_tokens": 8}
    )
    assert (config.output_path / "adapter/model.safetensors").is_file()
    assert "without_head" in json.loads((config.output_path / "eval.json").read_text())


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of the embedded model with answered questions."""
    settings = {
        "max_steps": 4, "warmup_steps": 0, "global_batch_size": 2, "eval_rows": 3, "generate_rows": 3,
        "base_dtype": "fp32", "batch_size": 2, "max_length": 128,
        "generate_tokens": 8, "lora.r": 4, "learning_rate": 1e-2, "objective": "error-correction", **CPU,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("answered")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = load_config("embedded-cot", {"output_dir": str(folder / "run"), **settings})
        assert sft.train(config).status == "finished"
    return config


def test_an_evaluation_compares_with_and_without_the_head(answered: TrainConfig, tmp_path: Path) -> None:
    found = json.loads((answered.output_path / "eval.json").read_text())
    without = found["without_head"]
    assert without["base"]["perplexity"] != found["tuned"]["perplexity"] == without["tuned"]["perplexity"]
    assert without["base"]["accuracy"]["total"] == 3

    closed = shutil.copytree(answered.output_path, tmp_path / "run")  # with a closed gate, both are one model
    head = load_file(closed / "adapter" / FILES[1])
    save_file(head | {"gate": torch.zeros(1)}, closed / "adapter" / FILES[1])
    told = str(evaluate_adapter(answered, closed / "adapter"))
    assert "\nwithout its head: " in told
    assert "; 0 rows correct only with it, 0 only without; p = 1\n" in told
    found = json.loads((closed / "eval.json").read_text())
    assert found["without_head"]["base"] == found["tuned"]


def test_a_run_starts_from_an_adapter_with_its_head_or_is_refused(answered: TrainConfig, tmp_path: Path) -> None:
    folder = answered.output_path / "adapter"

    def start(folder: Path, objective: str = "error-correction") -> torch.nn.Module:
        changed = {"objective": objective, "lora.adapter": str(folder)}
        config = load_config(answered.output_path / "config.yaml", changed)
        plan = RunPlan(config, Backend("cpu", 1, ""))
        return read(plan, objective_of(config), None)[0]

    gate = load_file(folder / FILES[1])["gate"]
    assert gate and torch.equal(start(folder).get_parameter("objective.gate"), gate)
    with pytest.raises(
        ValueError, match=r"has an error-correction head, which this run would drop: set optim\.objective"
    ):
        start(folder, "supervised")
    plain = shutil.copytree(folder, tmp_path / "plain", ignore=shutil.ignore_patterns("error_correction.*"))
    assert not start(plain).get_parameter("objective.gate"), "a new head is closed"
    file = plain / "adapter_config.json"
    settings = json.loads(file.read_text())
    for name, value in (("alpha_pattern", {"q_proj": 256}), ("init_lora_weights", "pissa"), ("r", 8)):
        file.write_text(json.dumps(settings | {name: value}))
        with pytest.raises(ValueError, match=f"has other settings: {name}=.* there, .* now"):
            start(plain)
    file.write_text(file.read_text()[:99])
    with pytest.raises(ValueError, match="damaged or half-written"):
        start(plain)


@xla
@pytest.mark.slow
def test_replicas_answer_with_the_head(answered: TrainConfig, tmp_path: Path) -> None:
    adapter = shutil.copytree(answered.output_path / "adapter", tmp_path / "adapter")
    head = load_file(adapter / FILES[1])
    save_file(head | {"gate": torch.ones(1)}, adapter / FILES[1])
    prompts, sampling = [row["question"] for row in cot_rows("eval", 4)], Sampling(12)
    settings = {"model.base_dtype": "fp32", "output_dir": str(tmp_path)}
    found = []
    for where in ({"device_type": "cpu", "num_replicas": 1}, {"device_type": "xla-cpu", "num_replicas": 2}):
        config = load_config("embedded-cot", {**settings, **where})
        found.append([one.tokens for one in generate(config, prompts, sampling, adapter_dir=adapter)])
    with without_head(adapter) as plain:
        without = [one.tokens for one in generate(config, prompts, sampling, adapter_dir=plain)]
    assert found[0] == found[1] != without


@pytest.mark.parametrize("parameter", ["model.name", "distill.teacher"])
def test_a_model_with_a_head_is_no_base_and_no_teacher(world: Path, tmp_path: Path, parameter: str) -> None:
    model = shutil.copytree(world / "model", tmp_path / "model")
    (model / FILES[0]).write_text(json.dumps(CLASS))
    with pytest.raises(ValueError, match=f"{parameter}=.*/model: its error-correction head is for generate"):
        check_objective(load_config("embedded-cot", {parameter: str(model)}))
    with pytest.raises(ValueError, match=r"the error-correction head in .* cannot be read"):
        load_for_generation(ModelConfig(name=str(model)))


def test_an_export_without_a_place_for_the_head_is_refused(answered: TrainConfig, tmp_path: Path) -> None:
    for format in ("merged", "vllm"):
        with pytest.raises(ValueError, match="has an error-correction head, a function of hidden states that is not"):
            export(answered.output_path, format, tmp_path / "refused")


@pytest.mark.slow
def test_an_export_for_peft_keeps_the_head(answered: TrainConfig, tmp_path: Path) -> None:
    done = export(answered.output_path, "adapter", tmp_path / "adapter", base="owner/name")
    assert set(FILES) <= set(done.files)
    note = "PEFT loads the adapter without the error-correction head, tpu_kit's generate with it"
    assert note in done.notes and note in (tmp_path / "adapter/README.md").read_text()
