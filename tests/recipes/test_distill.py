"""`distill`: equal on all devices, resumed bit for bit, with or without files; wrong combinations are refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.support.child_processes import run_python
from tpu_kit.config.loader import ConfigError, TrainConfig, load_config
from tpu_kit.machine.checks import Machine
from tpu_kit.machine.storage import atomic
from tpu_kit.recipes.distillation import distill
from tpu_kit.recipes.run_plan import plan_run
from tpu_kit.training.losses import teacher_files

pytestmark = pytest.mark.usefixtures("quick_xla")
xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
HIDDEN = {"hidden_weight": 0.5, "distill.layers": "1:2,2:3", "embeddings_weight": 0.1, "labels_weight": 0.5}


def config_of(world: Path, teacher: Path, folder: Path, **settings: Any) -> TrainConfig:
    return load_config(
        None,
        {
            "model.name": str(world / "model"), "source": str(world / "rows.jsonl"), "base_dtype": "fp32",
            "max_length": 96, "eval_rows": 4, "max_steps": 4, "global_batch_size": 4, "batch_size": 2, "lora.r": 4,
            "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 2, "output_dir": str(folder), "loss_chunk": 48,
            "device_type": "cpu", "num_replicas": 1, "distill.teacher": str(teacher), "teacher_dtype": "fp32",
            "divergence": "js", **settings,
        },
    )  # fmt: skip


def run(*given: Any, **settings: Any) -> TrainConfig:
    config = config_of(*given, **settings)
    assert distill(config).status == "finished"
    return config


def logged(config: TrainConfig) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (config.output_path / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def weights(config: TrainConfig, step: int = 4) -> dict[str, torch.Tensor]:
    return load_file(config.output_path / f"checkpoints/step-{step:08}/training.safetensors")


def assert_alike(one: TrainConfig, other: TrainConfig) -> None:
    for mine, wanted in zip(logged(one), logged(other), strict=True):
        names = [name for name in wanted if name.startswith(("loss", "distill_", "nll"))]
        assert names[1:], wanted
        assert [mine[name] for name in names] == pytest.approx([wanted[name] for name in names], rel=1e-4)
    start, last = weights(other, 2), weights(other)
    for name, value in weights(one).items():
        if name.startswith("parameters/"):
            moved = (last[name] - start[name]).norm()
            assert (value - last[name]).norm() <= 1e-3 * moved + 1e-6, name


@pytest.fixture(scope="module")
def whole(world: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run on one CPU with every part of the distillation loss."""
    return run(world, teacher, tmp_path_factory.mktemp("whole"), **HIDDEN)


def test_a_run_logs_each_part_and_resumes_bit_for_bit(
    world: Path, teacher: Path, whole: TrainConfig, tmp_path: Path
) -> None:
    first, *_, last = logged(whole)
    parts = {"logits": 1.0, "labels": 0.5, "hidden": 0.5, "embeddings": 0.1}
    assert first["loss"] == pytest.approx(sum(w * first[f"distill_{name}"] for name, w in parts.items()), rel=1e-4)
    assert last["loss"] < first["loss"]
    assert "parameters/objective.layers_1_2.weight" in weights(whole)
    assert not any("objective" in n for n in load_file(whole.output_path / "adapter/adapter_model.safetensors"))

    shutil.copytree(whole.output_path / "checkpoints", tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints/step-00000004")
    again = run(world, teacher, tmp_path, **HIDDEN)
    resumed = weights(again)
    assert [name for name, value in weights(whole).items() if not torch.equal(value, resumed[name])] == []
    tensors = load_file(teacher / "model.safetensors")
    other = shutil.copytree(teacher, tmp_path / "other") / "model.safetensors"
    save_file({name: tensor + 0.1 for name, tensor in tensors.items()}, other, metadata={"format": "pt"})
    name = {"distill.teacher": str(other.parent)}
    with pytest.raises(
        ValueError, match=r"distill.teacher: .*, whose weights are not known to be the same: .* has other content"
    ):
        distill(config_of(world, teacher, tmp_path, **HIDDEN, max_steps=6, **name))


def assert_one_program(config: TrainConfig) -> None:
    lines = logged(config)
    assert len({line["compiles"] for line in lines[1:]}) == 1
    assert all(line["host_syncs_per_step"] == line["fallbacks_per_step"] == 0 for line in lines)


@xla
@pytest.mark.slow  # quick sibling: test_own_objective.py, where replicas train another loss
def test_replicas_distil_like_one_cpu_in_one_program(
    world: Path, teacher: Path, whole: TrainConfig, tmp_path: Path
) -> None:
    found = run(world, teacher, tmp_path, **HIDDEN, device_type="xla-cpu", num_replicas=2)
    assert_alike(found, whole)
    assert_one_program(found)


@xla
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2", "data=2,model=2", "context=2"])
def test_a_mesh_distils_like_one_cpu(world: Path, teacher: Path, whole: TrainConfig, tmp_path: Path, mesh: str) -> None:
    where = {"device_type": "xla-cpu", "num_replicas": None, "launch.mesh": mesh}
    found = run(world, teacher, tmp_path, **HIDDEN, **where)
    assert_alike(found, whole)
    assert all(line["host_syncs_per_step"] == line["fallbacks_per_step"] == 0 for line in logged(found))


@xla
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_teacher_may_be_quantised(world: Path, teacher: Path, tmp_path: Path, dtype: str) -> None:
    settings = {"teacher_dtype": dtype, "base_dtype": "bf16", "device_type": "xla-cpu", "num_replicas": 2}
    group = {"quant_group": 16} if dtype == "int4" else {}
    first, *_, last = logged(run(world, teacher, tmp_path, **settings | group))
    assert last["loss"] < first["loss"]
    assert first["fallbacks_per_step"] == 0


# --------------------------------------------------------------------------------------------------------------- files


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/logits-*.safetensors"))


@xla
@pytest.mark.slow  # quick sibling: test_distillation.py, top_logits_of_the_whole_vocabulary_are_the_teacher_in_memory
def test_files_of_the_whole_vocabulary_train_like_the_teacher_in_memory(
    world: Path, teacher: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = len(AutoTokenizer.from_pretrained(world / "model"))
    memory = run(world, teacher, tmp_path / "memory", max_steps=2, **{"distill.temperature": 2.0})
    files = {"files": str(tmp_path / "files"), "top_k": vocabulary, "distill.temperature": 2.0, "max_steps": 2}
    found = run(world, teacher, tmp_path / "run", **files)
    for mine, wanted in zip(logged(found), logged(memory), strict=True):
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    last, wanted = weights(found, 2), weights(memory, 2)
    for name in [name for name in wanted if name.startswith("parameters/")]:
        torch.testing.assert_close(last[name], wanted[name], rtol=1e-4, atol=1e-5)
    told = capfd.readouterr().out
    assert re.search(r"teacher files    \d+ rows x 96 tokens x 640 logits = 0.\d\d GiB in ", told)

    (path,) = files_of(tmp_path / "files")
    before = path.stat().st_mtime_ns
    on_xla = run(world, teacher, tmp_path / "xla", **files, device_type="xla-cpu", num_replicas=2)
    assert path.stat().st_mtime_ns == before, "computed again"
    assert logged(on_xla)[-1]["loss"] == pytest.approx(logged(found)[-1]["loss"], rel=1e-4)
    assert logged(on_xla)[-1]["fallbacks_per_step"] == 0
    assert "teacher files    complete in " in capfd.readouterr().out


@pytest.fixture(scope="module")
def few(world: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files with 8 logits per token, in several blocks."""
    folder = tmp_path_factory.mktemp("few")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_files, "_FILE_BYTES", 4 * 96 * (8 * 8 + 4))
        run(world, teacher, folder / "run", files=str(folder / "files"), top_k=8, max_steps=1)
    return folder / "files"


def test_missing_and_cut_files_alone_are_computed(
    world: Path, teacher: Path, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_files, "_FILE_BYTES", 4 * 96 * (8 * 8 + 4))
    shutil.copytree(few, tmp_path / "files")
    first, second, third, *_ = files_of(tmp_path / "files")
    wanted, kept = load_file(second), first.stat().st_mtime_ns
    second.unlink()
    content = third.read_bytes()
    third.write_bytes(content[:-7])
    (half := second.with_name(f".{second.name}{atomic.PART}")).write_text("what another run is writing")
    run(world, teacher, tmp_path / "run", files=str(tmp_path / "files"), top_k=8, max_steps=1)
    found = load_file(second)  # the order of a file's metadata differs between processes
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)
    assert first.stat().st_mtime_ns == kept and third.read_bytes() == content
    assert half.read_text() == "what another run is writing"


@pytest.mark.parametrize("settings", [{"top_k": 4}, {"distill.temperature": 2.0}, {"data.seed": 5}], ids=str)
def test_files_of_another_run_are_not_taken(
    world: Path, teacher: Path, few: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = config_of(world, teacher, tmp_path, **{"files": str(few), "top_k": 8, **settings})
    ours, theirs = (
        plan_run(one)[0].teacher_files for one in (config, config_of(world, teacher, tmp_path, files=str(few), top_k=8))
    )
    assert theirs and theirs.folder.is_dir() and ours and not ours.folder.exists()


def test_files_of_another_teacher_are_not_taken(world: Path, teacher: Path, few: Path, tmp_path: Path) -> None:
    other = shutil.copytree(teacher, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    config = config_of(world, other, tmp_path, files=str(few), top_k=8)
    files = plan_run(config)[0].teacher_files
    assert files and not files.folder.exists()


# ----------------------------------------------------------------------------------------------------------- bad input


def test_without_a_teacher_it_is_refused(world: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"distill\.teacher: null names no teacher; set it to a hub id or a folder"):
        distill(load_config(None, {"output_dir": str(tmp_path)}))


def test_the_code_of_the_teacher_runs_only_where_it_is_asked_for(world: Path, teacher: Path, tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(teacher, folder)
    settings = json.loads((folder / "config.json").read_text())
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(settings | own))
    (folder / "code.py").write_text("raise SystemExit('it ran')")
    told = rf"distill\.teacher={folder}: .* if you trust it, set distill\.teacher_trust_remote_code=true"
    with pytest.raises(ValueError, match=told):
        distill(config_of(world, folder, tmp_path / "run", **{"model.trust_remote_code": True}))
    with pytest.raises(SystemExit, match="it ran"):
        distill(config_of(world, folder, tmp_path / "run", teacher_trust_remote_code=True))


def test_another_tokenizer_is_refused_with_what_differs(world: Path, teacher: Path, tmp_path: Path) -> None:
    other = shutil.copytree(teacher, tmp_path / "other")
    values = json.loads((other / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    one, two = [token for token in vocabulary if vocabulary[token] in (300, 301)]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"has another tokenizer than model\.name=") as error:
        distill(config_of(world, other, tmp_path / "run"))
    assert "2 of 640 and 640 tokens differ, such as " in str(error.value)
    assert not (tmp_path / "run/checkpoints").exists()
    settings = json.loads((teacher / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(settings | {"vocab_size": 600}))
    shutil.copy(teacher / "tokenizer.json", other)
    with pytest.raises(ValueError, match=r"tokenizer has 640 ids and distill.teacher=.*other only 600 embeddings"):
        distill(config_of(world, other, tmp_path / "run"))


@pytest.mark.parametrize(
    ("layers", "text"),
    [("3:2", "model has 2 layers, and no layer 3; name layers from 1 to 2"),
     ("1:4", "has 3 layers, and no layer 4; name layers from 1 to 3")],
)  # fmt: skip
def test_layers_that_do_not_exist_are_refused(
    world: Path, teacher: Path, tmp_path: Path, layers: str, text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"distill.layers={layers}: ")) as error:
        distill(config_of(world, teacher, tmp_path, **{"distill.layers": layers, "hidden_weight": 1}))
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"distill.files": "logits", "top_k": 700}, "distill.top_k=700: there are 640 logits; set it to that or less"),
        ({"max_length": 256}, "data.max_length=256 is longer than the 128 positions of distill.teacher="),
        ({"distill.teacher": "./nowhere"}, "distill.teacher=./nowhere: there is no such folder. Give a folder, a hub"),
    ],
    ids=str,
)
def test_a_teacher_that_does_not_fit_is_refused(
    world: Path, teacher: Path, tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        distill(config_of(world, teacher, tmp_path / "run", **settings))
    assert not (tmp_path / "run/checkpoints").exists()


def test_training_with_files_that_are_not_there_is_refused(
    world: Path, teacher: Path, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_files, "_FILE_BYTES", 4 * 96 * (8 * 8 + 4))
    files = shutil.copytree(few, tmp_path / "files")
    gone, *rest = files_of(files)
    gone.unlink()
    config = config_of(world, teacher, tmp_path / "run", files=str(files), top_k=8, max_steps=1)
    with pytest.raises(ValueError, match=r"run `distill`, which computes them") as error:
        teacher_files.read_columns(config, plan_run(config)[0].teacher_files)
    assert f"distill.files={files} lacks 1 of {1 + len(rest)} files, such as {gone}; " in str(error.value)


@pytest.mark.slow
def test_the_command(world: Path, teacher: Path, tmp_path: Path) -> None:
    config = config_of(world, teacher, tmp_path / "run", max_steps=2)
    (tmp_path / "my.yaml").write_text(config.to_yaml())
    done = run_python(["-m", "tpu_kit", "distill", str(tmp_path / "my.yaml")])
    assert "finished at step 2" in done.stdout
    failed = run_python(["-m", "tpu_kit", "distill", str(tmp_path / "my.yaml"), "teacher=null"], expect=2)
    assert "distill.divergence: 'js' has no effect without a teacher" in failed.stderr
