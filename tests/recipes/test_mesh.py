"""Training over a mesh of virtual devices equals training on one device, and resumes bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, Phi3Config, Phi3ForCausalLM

from tests.support import training_functions
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.config.mesh import Mesh, parse_mesh
from tpu_kit.distributed.launch import launch
from tpu_kit.extras.tree_search.options import SearchOptions
from tpu_kit.extras.tree_search.search import think
from tpu_kit.machine.checks import Machine
from tpu_kit.recipes import sft

pytestmark = [
    pytest.mark.usefixtures("quick_xla"),
    pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed"),
]
STEPS = 6
MESHES = (
    "data=8", "fsdp=8", "model=2,fsdp=4", "context=2", "fsdp=2,context=4", "context=8", "context=2,model=2",
    "data=2,fsdp=2,model=2",
)  # fmt: skip


def configuration(world: Path, folder: Path, mesh: str | None, **changes: Any) -> TrainConfig:
    """Eight rows per update in two passes, with every feature of a step: clipping, average, packing, decay, tiles."""
    shards = Mesh(**parse_mesh(mesh)).batch_shards if mesh else 1
    settings = {
        "model.name": str(world / "model"), "base_dtype": "fp32", "lora.r": 4, "source": str(world / "rows.jsonl"),
        "max_length": 96, "eval_rows": 8, "max_steps": STEPS, "learning_rate": 1e-2, "loss_chunk": 48, "mlp_tile": 96,
        "global_batch_size": 16, "batch_size": 8 // shards, "ema_decay": 0.9, "weight_decay": 0.01, "remat": "full",
        "scan_layers": "auto" if mesh else "on", "save_steps": 1, "checkpoint.keep": STEPS, "logging_steps": 1,
        "max_grad_norm": 0.5, "output_dir": str(folder), "device_type": "xla-cpu", "mesh": mesh,
        **({"num_replicas": 1} if mesh is None else {}), **changes,
    }  # fmt: skip
    return load_config(None, settings)


def run(world: Path, folder: Path, mesh: str | None, **changes: Any) -> TrainConfig:
    """A finished run of `configuration`."""
    config = configuration(world, folder, mesh, **changes)
    assert sft.train(config).status == "finished"
    return config


def losses(config: TrainConfig) -> torch.Tensor:
    lines = map(json.loads, (config.output_path / "metrics.jsonl").read_text().splitlines())
    return torch.tensor([line["loss"] for line in lines if line["kind"] == "train"])


def saved(config: TrainConfig, step: int) -> dict[str, torch.Tensor]:
    """Returns a checkpoint's tensors for resuming."""
    (folder,) = (config.output_path / "checkpoints").glob(f"*{step:08}*")
    return {name: tensor for file in folder.glob("training.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def single(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], TrainConfig]:
    made: list[TrainConfig] = []

    def get() -> TrainConfig:
        if not made:
            made.append(run(world, tmp_path_factory.mktemp("single"), None, device_type="cpu", scan_layers="auto"))
        return made[0]

    return get


def check_equal(mine: TrainConfig, reference: TrainConfig) -> None:
    torch.testing.assert_close(losses(mine), losses(reference), rtol=0, atol=1e-5)
    first, wanted = saved(mine, 1), saved(reference, 1)
    moments = [name for name in wanted if name.startswith("moments/first/")]
    assert moments, sorted(wanted)
    for name in moments:  # a tenth of the clipped gradient
        torch.testing.assert_close(first[name], wanted[name], rtol=0, atol=1e-5 * float(wanted[name].abs().max()))
    last, wanted = saved(mine, STEPS), saved(reference, STEPS)
    assert last.keys() == wanted.keys()
    for name in [name for name in wanted if name.startswith(("parameters/", "average/"))]:
        start = saved(reference, 1)[name]
        apart, moved = (last[name] - wanted[name]).norm(), (wanted[name] - start).norm()
        assert apart <= 1e-3 * moved + 1e-7, (name, float(apart), float(moved))


@pytest.mark.parametrize(
    "mesh",
    ["fsdp=2,context=2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("fsdp=2,model=2", MESHES[-1]))],
)
def test_a_mesh_trains_like_one_device_and_resumes_bit_for_bit(
    world: Path, tmp_path: Path, single: Callable[[], TrainConfig], capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, mesh: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_dump_to={tmp_path}/hlo --xla_dump_hlo_as_text")
    whole = configuration(world, tmp_path / "whole", mesh)
    whole.output_path.mkdir()
    launch(training_functions.resumed, whole, sharded=True)
    check_equal(whole, single())
    said = capfd.readouterr().err
    assert f" devices, {mesh}" in said
    assert "GSPMD" not in said and "leaked" not in said
    lines = [json.loads(line) for line in (whole.output_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert len({line["compiles"] for line in steps[1:]}) == 1, "a step after the second compiled"
    assert all(line["host_syncs_per_step"] == 0 for line in steps)

    if "context" in mesh:  # queries, keys, values and outputs, forward, recomputed and backward, in both passes
        step = max((path.read_text() for path in (tmp_path / "hlo").glob("*after_optimizations.txt")), key=len)
        assert (step.count(" all-to-all("), step.count(" collective-permute(")) == (2 * 3 * 4, 0)

    before, after = saved(whole, STEPS), saved(replace(whole, output_dir=f"{whole.output_path}-again"), STEPS)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.slow
def test_twenty_updates_are_those_of_one_device(world: Path, tmp_path: Path) -> None:
    found = [losses(run(world, tmp_path / str(mesh), mesh, max_steps=20)) for mesh in (None, "fsdp=8", MESHES[-1])]
    assert len(found[0]) == 20
    for mine in found[1:]:
        torch.testing.assert_close(mine, found[0], rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[:-1])
def test_other_meshes_train_like_one_device(
    world: Path, tmp_path: Path, single: Callable[[], TrainConfig], mesh: str
) -> None:
    check_equal(run(world, tmp_path / "mesh", mesh), single())


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"remat": "outputs", "mlp_tile": None},
        {"remat": "blocks", "model.name": "embedded"},  # four layers
        {"lora.dropout": 0.1, "mlp_tile": None},
        {"lora.dora": True},
        {"lora.r": 0, "optimizer": "adafactor", "learning_rate": 1e-3},
        {"lora.r": 0, "optimizer": "adamw", "learning_rate": 1e-3},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()),
)
@pytest.mark.parametrize("axes", ["fsdp=4", "context=4"])
def test_other_ways_to_train_give_what_one_device_gives(
    world: Path, tmp_path: Path, changes: dict[str, Any], axes: str
) -> None:
    mesh = run(world, tmp_path / "mesh", axes, **changes)
    single = run(world, tmp_path / "single", None, **changes)
    if "optimizer" in changes:
        torch.testing.assert_close(losses(mesh), losses(single), rtol=0, atol=1e-5)
    else:
        check_equal(mesh, single)


@pytest.mark.slow
def test_fused_products_whose_parts_cross_the_shards_train_like_one_device(world: Path, tmp_path: Path) -> None:
    """With model=2 one shard of `qkv_proj` has the queries, the other the keys and values; likewise `gate_up_proj`."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vocabulary = LlamaConfig.from_pretrained(world / "model").vocab_size
    torch.manual_seed(0)
    Phi3ForCausalLM(
        Phi3Config(vocab_size=vocabulary, num_key_value_heads=2, pad_token_id=0, max_position_embeddings=128, **sizes)
    ).save_pretrained(tmp_path / "model")
    for path in (world / "model").glob("token*"):
        shutil.copy(path, tmp_path / "model")
    changes = {
        "model.name": str(tmp_path / "model"),
        "lora.targets": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    }
    check_equal(*(run(world, tmp_path / str(name), name, **changes) for name in (MESHES[2], None)))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=4", "fsdp=2,context=2"])
def test_a_checkpoint_of_one_device_is_gone_on_from_on_a_mesh(
    world: Path, tmp_path: Path, single: Callable[[], TrainConfig], mesh: str
) -> None:
    reference = single()
    shutil.copytree(reference.output_path / "checkpoints", tmp_path / "checkpoints")
    for folder in (tmp_path / "checkpoints").iterdir():
        if folder.is_dir() and not folder.name.endswith(f"{3:08}"):
            shutil.rmtree(folder)
    resumed = run(world, tmp_path, mesh)
    last, wanted = saved(resumed, STEPS), saved(reference, STEPS)
    for name in [name for name in wanted if name.startswith("parameters/")]:
        torch.testing.assert_close(last[name], wanted[name], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_answers_while_and_after_training_are_those_of_one_device(tmp_path: Path) -> None:
    settings = {
        "model.name": "embedded", "source": "embedded", "base_dtype": "fp32", "lora.r": 4, "max_length": 192,
        "max_steps": 8, "eval_steps": 4, "learning_rate": 5e-3, "global_batch_size": 8, "logging_steps": 4,
        "tracking.generate_rows": 12, "tracking.eval_generate_rows": 12, "tracking.generate_tokens": 48,
        "device_type": "xla-cpu", "optim.ema_decay": 0.5,
    }  # fmt: skip
    question = "Ann has 6 apples and eats 3. How many are left?"
    options = SearchOptions(max_thoughts=2, thought_tokens=16, thoughts_per_step=2, max_tokens=128)
    answers, accuracies, replies = [], [], []
    for name, changes in (
        ("single", {"num_replicas": 1, "batch_size": 8}),
        ("mesh", {"mesh": "fsdp=4", "batch_size": 2}),
        ("context", {"mesh": "fsdp=2,context=2", "batch_size": 4}),
    ):
        config = load_config(None, {**settings, **changes, "output_dir": str(tmp_path / name)})
        result = sft.train(config)
        said = json.loads((config.output_path / "eval.json").read_text())
        answers.append([(one["base"]["answer"], one["tuned"]["answer"]) for one in said["samples"]])
        perplexities = torch.tensor([said[which]["perplexity"] for which in ("base", "tuned")])
        accuracies.append((result.metrics["eval_accuracy"], perplexities))
        replies.append(think(config, question, options, adapter_dir=result.adapter_dir).answer)
    for answer, (accuracy, perplexities), reply in zip(answers[1:], accuracies[1:], replies[1:], strict=True):
        assert answer == answers[0]
        assert accuracy == accuracies[0][0]
        torch.testing.assert_close(accuracies[0][1], perplexities, rtol=1e-4, atol=0)
        assert reply == replies[0]
