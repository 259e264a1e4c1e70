"""After an out-of-memory error a run continues with the advised settings, unless the advice says it is another run."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.compiler_models import LLAMA_8B, QWEN2_500M, write_config
from tests.support.tiny_tokenizer import tiny_tokenizer
from tpu_kit.assets import embedded
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.machine.checks import Machine
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.planning.ladder import differences, is_another, of_another_training, of_same_training, same_training
from tpu_kit.planning.planner import plan
from tpu_kit.recipes import sft
from tpu_kit.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("quick_xla")
needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")

# For each parameter that `rescue` may change: a run's setting before and after. The settings of a line are changed
# together. "scan" is the loop that XLA makes of the layers by itself; other devices have none.
SCAN = {"scan_layers": "on"}
ADVISED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"batch_size": 4, "gradient_accumulation": 2, "remat": "none"},
        {"batch_size": 2, "global_batch_size": 8, "gradient_accumulation": 1, "remat": "outputs", **SCAN},
    ),
    ({"remat": "outputs", **SCAN}, {"remat": "full", "loss_chunk": 16, "mlp_tile": 8}),
    ({"remat": "none", "attention": "sdpa"}, {"remat": "full", "mlp_tile": 8, "attention": "auto", **SCAN}),
    # Also: from a TPU to a device without a loop, and with generation at evaluations.
    ({"remat": "full", **SCAN}, {"scan_layers": "off"}),
    ({"remat": "full", **SCAN, "eval_rows": 4}, {"scan_layers": "auto", "eval_generate_rows": 2, "generate_tokens": 2}),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    tokenizer = tiny_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
            )
        )  # fmt: skip
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [{"prompt": f"{row['question'][:24]}\n", "completion": row["answer"]}
             for row in embedded.cot_rows("train", 60)]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run(world: Path, folder: Path, **changes: Any) -> TrainConfig:
    settings = {
        "model.name": str(world / "model"), "base_dtype": "fp32", "lora.r": 4, "source": str(world / "rows.jsonl"),
        "max_length": 32, "eval_rows": 0, "learning_rate": 1e-2, "schedule": "constant", "loss_chunk": 32,
        "logging_steps": 1, "device_type": "cpu", "num_replicas": 1, "save_steps": 2, "max_steps": 4,
        "output_dir": str(folder),
    }  # fmt: skip
    return load_config(None, settings | changes)


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder) if record["kind"] == "train"]


def test_every_parameter_that_may_be_advised_is_tried_here() -> None:
    besides = {"scan_layers", "eval_generate_rows", "generate_tokens"}
    advised = {rung.name.rpartition(".")[2] for rung in of_same_training(load_config(), 1)}
    advised |= {"global_batch_size", "gradient_accumulation"}  # follow from more passes
    assert advised == {name for _, after in ADVISED for name in after} - besides


@pytest.mark.parametrize(("before", "after"), ADVISED)
def test_a_run_goes_on_with_what_is_advised(
    before: dict[str, Any], after: dict[str, Any], world: Path, tmp_path: Path
) -> None:
    sft.train(run(world, tmp_path / "whole", **before))
    sft.train(run(world, tmp_path / "run", **before, max_steps=2))
    assert sft.train(run(world, tmp_path / "run", **{**before, **after})).step == 4
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@needs_xla
@pytest.mark.slow
def test_a_run_on_xla_goes_on_as_a_loop_and_then_elsewhere(
    world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """From a loop over layers to a device that has no loop."""
    sft.train(run(world, tmp_path / "whole", max_steps=6))
    folder = tmp_path / "run"
    xla = {"device_type": "xla-cpu", "max_steps": 2}
    for change in (
        {},
        {"remat": "outputs", "max_steps": 4},
        {"remat": "none", "max_steps": 6, "device_type": "cpu"},
    ):
        sft.train(run(world, folder, **{**xla, **change}))
    assert losses(folder) == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    assert capfd.readouterr().out.count("resumed          from step ") == 2


def test_rows_that_a_growing_batch_would_take_otherwise_are_refused(world: Path, tmp_path: Path) -> None:
    growing = {"batch_growth_factor": 1.5, "batch_growth_steps": 1, "global_batch_size": 4, "max_steps": 3}
    folder = tmp_path / "run"
    sft.train(run(world, folder, **growing, batch_size=4))  # 4 rows, 4, 8
    written = (folder / "config.yaml").read_text()
    changed = run(world, folder, **{**growing, "max_steps": 4}, batch_size=2)  # 4 rows, 6, 8
    with pytest.raises(ValueError, match=r"its 3 updates took 16 rows, and with this configuration they take 18\."):
        sft.train(changed)
    assert (folder / "config.yaml").read_text() == written
    # It is not advised either.
    advised = same_training(run(world, folder, **growing, batch_size=4, remat="none"), 1)
    assert {one.optim.batch_size for one in advised} == {4}


@pytest.mark.parametrize(
    "settings",
    [
        {"remat": "none", "batch_size": 12},
        {"remat": "outputs", "batch_size": 6, "gradient_accumulation": 4},
        {"remat": "full", "batch_size": 8, "global_batch_size": 64, "mlp_tile": None},
        {"remat": "none", "batch_size": 8, "batch_growth_factor": 2, "batch_growth_steps": 3},
    ],
)
def test_all_that_is_offered_after_an_error_is_the_same_run(settings: dict[str, Any]) -> None:
    config = load_config(None, {**settings, "max_steps": 9})
    found = list(same_training(config, 4))
    assert len(found) > 2 and all(differences(config, one) for one in found)
    assert not any(is_another(config, one, 4) for one in found)


def test_a_plan_says_which_changes_are_another_training(tmp_path: Path) -> None:
    model = write_config(tmp_path / "llama", LLAMA_8B)
    settings = [f"model.name={model}", "max_steps=10", "device_type=tpu", "batch_size=8", "remat=outputs"]
    (found,) = plan(load_config(None, [*settings, "max_length=2048", "ema_decay=0.9"]))
    assert found.advice is not None and not found.fits
    said = {knob.change.partition("=")[0]: knob for knob in found.advice.knobs}
    for name in ("optim.batch_size", "optim.remat"):
        assert not said[name].anew and said[name].harm.startswith("the same training, "), name
    assert re.fullmatch(r"optim.batch_size=[1-4] optim.global_batch_size=8", said["optim.batch_size"].change)
    assert said["model.base_dtype"].anew and said["model.base_dtype"].harm.endswith(", a new training")
    text = str(found.advice)
    assert text.count("a new training") == 1 + sum(knob.anew for knob in found.advice.knobs)
    assert "a new training cannot resume from the checkpoints of this run: give it another run_name (or output" in text
    assert asdict(found.advice)["knobs"][0]["anew"] is False


def test_every_change_of_a_plan_is_judged_by_what_resume_refuses(tmp_path: Path) -> None:
    shape = read_shape(load_config(None, [f"model.name={write_config(tmp_path / 'qwen', QWEN2_500M)}"]).model)
    tried = set()
    for values in ({"remat": "outputs", "base_dtype": "fp32", "ema_decay": 0.9, "attention": "sdpa", "mlp_tile": None},
                   {"lora.r": 0}, {"base_dtype": "bf16", "lora.r": 64}):  # fmt: skip
        config = load_config(None, {**values, "batch_size": 8, "max_length": 4096, "loss_chunk": 512})
        for rungs, anew in ((of_same_training(config, 2), False), (of_another_training(config, shape, 2), True)):
            for rung in (one for one in rungs if one.values):
                assert "training" not in rung.harm  # the table does not judge it
                tried.add(rung.name)
                for value in rung.values[:2]:
                    assert is_another(config, rung.changed(config, value, 2), 2) == anew, rung
    assert {"optim.batch_size", "optim.optimizer", "lora.r", "data.max_length", "model.base_dtype"} < tried
    same = load_config(None, {"batch_size": 8})
    assert not is_another(same, replace(same, optim=replace(same.optim, batch_size=4, gradient_accumulation=2)), 2)
