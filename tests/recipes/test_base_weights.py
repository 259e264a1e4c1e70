"""Runs and adapters are refused if they would silently continue with other base weights."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.cached_model import put_in_cache, use_cache
from tests.support.host_processes import Rehearsal
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.exporting.export import export
from tpu_kit.generation.answers import generate
from tpu_kit.generation.evaluation.evaluate import evaluate_adapter
from tpu_kit.generation.sampling import Sampling
from tpu_kit.model.weights.base_identity import base_of_adapter, identify
from tpu_kit.recipes import replica, sft

NAME, OLD, NEW = "owner/tiny", "a" * 40, "b" * 40


def change_weights(folder: Path) -> None:
    """Writes other weights of the same shapes, in files of the same sizes."""
    path = folder / "model.safetensors"
    save_file({name: value * 1.01 for name, value in load_file(path).items()}, path, metadata={"format": "pt"})


def run_config(world: Path, folder: Path, name: str | Path, **changes: Any) -> TrainConfig:
    values = {
        "model.name": str(name), "base_dtype": "fp32", "lora.r": 2, "source": str(world / "rows.jsonl"), "eval_rows": 0,
        "data.max_length": 64, "batch_size": 2, "max_steps": 2, "loss_chunk": 64, "device_type": "cpu",
        "generate_rows": 0, "output_dir": str(folder), **changes,
    }  # fmt: skip
    return load_config(None, values)


@pytest.fixture
def cached(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one commit of a model; the returned folder holds the next commit."""
    put_in_cache(tmp_path / "cache", NAME, world / "model", OLD)
    use_cache(tmp_path / "cache", monkeypatch)
    shutil.copytree(world / "model", tmp_path / "next")
    change_weights(tmp_path / "next")
    return tmp_path / "next"


def test_a_run_does_not_resume_on_other_weights(world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(world / "model", model)
    sft.train(run_config(world, run, model))
    (model / "README.md").write_text("not a weight")
    assert sft.train(run_config(world, run, model, max_steps=3)).step == 3
    change_weights(model)
    told = rf"the base weights, model.name={model}: model.safetensors has other content\nSet these back, or start anew"
    with pytest.raises(ValueError, match=told):
        sft.train(run_config(world, run, model, max_steps=4))
    assert sft.train(run_config(world, run, model, resume="never")).step == 2
    capfd.readouterr()


def test_a_teacher_and_a_start_may_move(
    world: Path, teacher: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, run = Path(sft.train(run_config(world, tmp_path / "first", world / "model")).adapter_dir), tmp_path / "run"
    shutil.copytree(teacher, tmp_path / "teacher")
    before = {"distill.teacher": str(tmp_path / "teacher"), "lora.adapter": str(first)}
    sft.train(run_config(world, run, world / "model", **before))
    (tmp_path / "teacher").rename(tmp_path / "moved")
    first.parent.rename(tmp_path / "start")
    now = {"distill.teacher": str(tmp_path / "moved"), "lora.adapter": str(tmp_path / "start/adapter")}
    capfd.readouterr()
    assert sft.train(run_config(world, run, world / "model", **now, max_steps=3)).step == 3
    said = capfd.readouterr().out
    assert all(f"moved            {name}: {before[name]} -> {now[name]}, same content" in said for name in now)
    shutil.copytree(tmp_path / "moved", tmp_path / "other")
    change_weights(tmp_path / "other")
    shutil.copytree(tmp_path / "start", tmp_path / "another")
    path = tmp_path / "another/adapter/adapter_model.safetensors"
    save_file({name: value + 1 for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
    others = {"distill.teacher": str(tmp_path / "other"), "lora.adapter": str(tmp_path / "another/adapter")}
    with pytest.raises(ValueError, match="is of another run") as caught:
        sft.train(run_config(world, run, world / "model", **others, max_steps=4))
    for name, file in (("distill.teacher", "model"), ("lora.adapter", "adapter_model")):
        told = f"{name}: {now[name]!r} there, {others[name]!r} now, whose weights are not known to be the same: "
        assert f"{told}{file}.safetensors has other content" in str(caught.value)


def test_a_run_goes_on_from_the_commit_with_which_it_began(world: Path, tmp_path: Path, cached: Path) -> None:
    run = tmp_path / "run"
    sft.train(run_config(world, run, NAME))
    assert load_config(run / "config.yaml").model.revision == OLD
    put_in_cache(tmp_path / "cache", NAME, cached, NEW)
    assert sft.train(run_config(world, run, NAME, max_steps=3)).step == 3
    assert load_config(run / "config.yaml").model.revision == OLD
    with pytest.raises(ValueError, match=f"model.revision: '{OLD}' there, '{NEW}' now") as caught:
        sft.train(run_config(world, run, NAME, max_steps=4, revision="main"))
    assert f"the base weights, model.name={NAME}: model.safetensors has other content" in str(caught.value)
    assert sft.train(run_config(world, run, NAME, max_steps=4, revision=OLD)).step == 4


def test_an_adapter_is_not_used_on_other_weights(
    world: Path, tmp_path: Path, cached: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """For a folder whose weights change, and for a hub model, of which the adapter's own commit is used."""
    model = tmp_path / "model"
    shutil.copytree(world / "model", model)
    runs = {name: run_config(world, tmp_path / f"run-{i}", name) for i, name in enumerate((str(model), NAME))}
    adapters = {name: Path(sft.train(config).adapter_dir) for name, config in runs.items()}
    with torch.random.fork_rng(devices=[]):
        for adapter in adapters.values():  # makes the export see a difference
            path = adapter / "adapter_model.safetensors"
            save_file({name: torch.randn_like(value) for name, value in load_file(path).items()}, path)
    prompts, short = ["2 + 3 ="], Sampling(max_new_tokens=4)
    before = {name: generate(config, prompts, short, adapter_dir=adapters[name]) for name, config in runs.items()}

    change_weights(model)
    put_in_cache(tmp_path / "cache", NAME, cached, NEW)
    told = f"other base weights than model.name={model}: model.safetensors has other content. Set model.name"
    rows = run_config(world, tmp_path / "other", model, eval_rows=4, **{"tracking.generate_tokens": 4})
    for use in (
        lambda: generate(runs[str(model)], prompts, short, adapter_dir=adapters[str(model)]),
        lambda: evaluate_adapter(rows, adapters[str(model)]),
        lambda: export(tmp_path / "run-0", "adapter"),
    ):
        with pytest.raises(ValueError, match=told):
            use()
    with pytest.raises(ValueError, match=rf"Set model.name={NAME} and model.revision={OLD}"):
        generate(run_config(world, tmp_path / "other", NAME, revision="main"), prompts, short,
                 adapter_dir=adapters[NAME])  # fmt: skip
    assert generate(runs[NAME], prompts, short, adapter_dir=adapters[NAME]) == before[NAME]
    with pytest.raises(ValueError, match="was trained on other base weights"):  # trusted code is not pinned
        base_of_adapter(replace(runs[NAME].model, trust_remote_code=True), adapters[NAME])
    exported = Path(export(tmp_path / "run-1", "adapter").folder)
    assert json.loads((exported / "base.json").read_text())["commit"] == OLD

    for damaged in ("{", "[]", '{"files": {"a": {}}}', '{"files": {}, "commit": "../.."}'):
        (adapters[NAME] / "base.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"base\.json is damaged: give an earlier or a complete folder"):
            base_of_adapter(runs[NAME].model, adapters[NAME])
    (adapters[NAME] / "base.json").unlink()  # as another tool writes it
    capfd.readouterr()
    generate(runs[str(model)], prompts, short, adapter_dir=adapters[NAME])
    named = f"warning: {adapters[NAME]} names the base {NAME} but does not identify its weights; they are not compared"
    assert f"{named} with model.name={model}\n" in capfd.readouterr().err


def test_a_whole_model_in_place_of_an_adapter_is_told(
    world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    embedded, own = load_config().model, replace(load_config().model, name=str(world / "model"))
    (tmp_path / "config.json").write_text("{}")
    assert base_of_adapter(embedded, tmp_path) == embedded
    assert f"warning: {tmp_path} is a whole model of unknown origin" in capfd.readouterr().err
    (tmp_path / "base.json").write_text(json.dumps(identify(own)))  # as a run with lora.r=0 writes it
    assert base_of_adapter(own, tmp_path) == own
    with pytest.raises(ValueError, match="was trained on other base weights than model"):
        base_of_adapter(embedded, tmp_path)


@pytest.mark.slow  # quick siblings: test_a_digest_of_weights, and test_hosts.py, where facts of hosts differ
@pytest.mark.parametrize(
    ("difference", "told"),
    [
        ("files", "the hosts differ in\n  base weights of ./model: "),
        ("memory", "the hosts do not start with the same weights of model.name=./model and checkpoint in "),
    ],
    ids=["files", "memory"],
)
def test_hosts_with_other_weights_do_not_train(world: Path, tmp_path: Path, difference: str, told: str) -> None:
    for index in range(2):
        shutil.copytree(world / "model", tmp_path / f"machine-{index}" / "model")
    settings: dict[str, Any] = {"model.name": "./model", "max_steps": 1}
    if difference == "files":
        change_weights(tmp_path / "machine-1" / "model")
    else:
        settings["objective"] = "tests.support.own_objectives:ChangesWeights"
    hosts = Rehearsal(tmp_path, 2)
    first, second = hosts.start(str(tmp_path / "run"), **settings)
    codes = hosts.wait()
    shown = first.text[-3000:] + second.text[-3000:]
    assert all(codes) and told in first.text and "step/s" not in first.text, shown
    hosts.close()


def test_a_digest_of_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.LayerNorm(50)).to(torch.bfloat16)
    before = replica._weights_digest(model)
    assert replica._weights_digest(copy.deepcopy(model)) == before
    with torch.no_grad():
        model[1].bias[7] += 1
    assert replica._weights_digest(model) != before
    assert all(float(torch.tensor(float(part))) == part for part in before)
