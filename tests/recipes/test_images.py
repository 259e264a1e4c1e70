"""Runs on rows with pictures: resumed bit for bit, adapters that PEFT loads, and refused settings."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.support.child_processes import fork_loaded
from tests.support.vision_functions import picture
from tests.support.vision_models import save_model
from tpu_kit.cli import main
from tpu_kit.config.fields import ConfigError
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.data.images.files import PictureFiles
from tpu_kit.data.images.prompts import PicturedIds
from tpu_kit.generation.model_loading import load_for_generation
from tpu_kit.machine.checks import Machine
from tpu_kit.model import attention
from tpu_kit.model import causal_lm as models
from tpu_kit.model.families import registry as families
from tpu_kit.notebook import cells
from tpu_kit.recipes.result import TrainResult
from tpu_kit.recipes.run_data import prepare_run
from tpu_kit.recipes.sft import train
from tpu_kit.training.checkpoint.manager import list_checkpoints

pytestmark = pytest.mark.usefixtures("quick_xla")
needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for images, and rows with pictures of many sizes."""
    return written(tmp_path_factory.mktemp("images"), "gemma4_unified")


def written(folder: Path, family: str) -> Path:
    save_model(folder / "model", family)
    rows = []
    for number in range(24):
        picture(number, (40 + 3 * number, 90 - 2 * number)).save(folder / f"{number}.png")
        row = {"question": f"What is {number}?", "answer": f"It is {7 * number}.", "images": [f"{number}.png"]}
        rows.append(row if number % 6 else row | {"images": []})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(images: Path, output: Path, **settings: Any) -> TrainConfig:
    given = {
        "model.name": str(images / "model"), "model.images": True, "base_dtype": "fp32", "max_length": 256,
        "source": str(images / "rows.jsonl"), "device_type": "cpu", "num_replicas": 1, "batch_size": 2, "max_steps": 4,
        "lora.r": 4, "save_steps": 2, "eval_rows": 2, "output_dir": str(output), "learning_rate": 1e-3, "eps": 1e-3,
    }  # fmt: skip
    return load_config(None, given | settings)


def weights(result: TrainResult) -> dict[str, torch.Tensor]:
    return load_file(Path(result.adapter_dir) / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("family", "vision"),
    [
        pytest.param("gemma4_unified", False, marks=pytest.mark.slow), ("gemma4_unified", True), ("qwen2_5_vl", True),
        *(pytest.param(one, True, marks=pytest.mark.slow) for one in ("gemma3", "lfm2_vl", "qwen3_5", "qwen3_vl")),
    ],
)  # fmt: skip
def test_a_run_on_pictures_goes_on_bit_for_bit_and_peft_loads_its_adapter(
    family: str, vision: bool, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    images = images if family == "gemma4_unified" else written(tmp_path, family)
    more = {"lora.vision": vision}
    whole = train(config_of(images, tmp_path / "whole", **more))
    said = capfd.readouterr().out
    assert "images           " in said and "images of a row  " in said
    first = train(config_of(images, tmp_path / "parts", max_steps=2, schedule="constant", **more))
    parts = train(config_of(images, tmp_path / "parts", schedule="constant", **more))
    constant = train(config_of(images, tmp_path / "constant", schedule="constant", **more))
    assert (first.step, parts.step, whole.step) == (2, 4, 4)
    own, other = weights(parts), weights(constant)
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)

    projector = re.compile("embed_vision|projector|merger")
    assert any(projector.search(name) and tensor.any() for name, tensor in own.items()) == vision
    config = config_of(images, tmp_path / "whole", **more)
    batch = prepare_run(config).train.tensors(torch.arange(1).numpy())
    ours = load_for_generation(config.model, whole.adapter_dir)
    families.set_attention(models.base_model(ours), attention.SDPA)
    ours._tpu_kit_compute_dtype = torch.float32  # type: ignore[assignment]  # mypy expects a tensor or a module
    full = AutoModelForImageTextToText.from_pretrained(images / "model", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(full, whole.adapter_dir).eval()
    families.connect(models.base_model(theirs), frozen=False)
    families.set_attention(models.base_model(theirs), attention.SDPA)
    theirs._tpu_kit_compute_dtype = torch.float32
    with torch.no_grad():
        assert torch.equal(models.logits(ours, batch), models.logits(theirs, batch))


def cut(file: Path) -> None:
    """Truncates a picture, but keeps its header whole."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, so that sums have the same order here and in `dies_while_decoding`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def dies_while_decoding(config: TrainConfig, after: int) -> None:
    """Trains; after this process's first checkpoint, it is killed at picture number `after`."""
    torch.set_num_threads(1)
    folder, decoded, left = Path(config.output_dir, "checkpoints"), PictureFiles.decoded, [after]
    before = [found.step for found in list_checkpoints(folder)[0]]

    def dying(files: PictureFiles, source: Any) -> Any:
        picture = decoded(files, source)
        if left[0] < after or [found.step for found in list_checkpoints(folder)[0]] != before:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return picture

    PictureFiles.decoded = dying  # type: ignore[method-assign]  # only in this process, which is killed
    train(config)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("kills", "steps"), [(1, 8), pytest.param(8, 60, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_while_decoding_goes_on_bit_for_bit(
    images: Path, tmp_path: Path, kills: int, steps: int
) -> None:
    whole = train(config_of(images, tmp_path / "whole", max_steps=steps))
    config, chance = config_of(images, tmp_path / "killed", max_steps=steps), random.Random(steps)
    for _ in range(kills):
        life = fork_loaded(dies_while_decoding, config, chance.randrange(3))
        life.join(120)
        assert life.exitcode == -signal.SIGKILL
    parts = train(config)
    assert whole.step == parts.step == steps
    own, other = weights(parts), weights(whole)
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)


@needs_xla
@pytest.mark.slow
def test_replicas_and_a_mesh_train_the_same(images: Path, tmp_path: Path) -> None:
    one = weights(train(config_of(images, tmp_path / "one")))
    for name, settings in {
        "replicas": {"device_type": "xla-cpu", "num_replicas": 2, "batch_size": 1},
        "mesh": {"device_type": "xla-cpu", "num_replicas": None, "mesh": "fsdp=2", "batch_size": 1},
    }.items():
        other = weights(train(config_of(images, tmp_path / name, **settings)))
        for tensor, value in one.items():
            assert torch.allclose(other[tensor], value, rtol=1e-4, atol=1e-5), (name, tensor)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"optim.objective": "policy"},
            r"optim\.objective: .* is for text alone, but model\.images",
        ),
        ({"distill.teacher": "a/b"}, r"distill\.teacher: .* is for text alone"),
        ({"lora.r": 0}, r"lora\.r: 0 trains all weights, but the vision part stays frozen; set lora\.r=16"),
        ({"data.source": "synthetic"}, r"has random tokens but no images"),
        ({"model.images": False, "data.image_tokens": 70}, r"data\.image_tokens: 70 has no effect without images"),
        ({"data.too_long": "split"}, r"data\.too_long: .*split.* cuts documents, which may hold images"),
    ],
)
def test_what_is_not_trained_with_images(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(None, {"model.name": "a/b", "model.images": True} | settings)


def test_too_many_pictures_that_cannot_be_decoded_end_the_run_and_keep_its_checkpoint(
    images: Path, tmp_path: Path
) -> None:
    """Their headers are whole, so the error appears only in decoding; the first rows are good."""
    rows = []
    for number in range(36):
        file = tmp_path / f"{number}.jpg"
        picture(number, (120, 90)).save(file)
        if number >= 6:
            cut(file)
        rows.append({"question": f"What is {number}?", "answer": "red", "image": file.name})
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"source": str(source), "eval_rows": 0, "packing": False, "shuffle": False, "max_steps": 18, "save_steps": 2}
    with pytest.raises(ValueError, match=r"11 rows have pictures that cannot be decoded.*updates before are saved"):
        train(config_of(images, tmp_path / "run", **more))
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_rows_without_any_picture_are_refused(images: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"question": "What?", "answer": "red", "images": []}) + "\n")
    with pytest.raises(ValueError, match=r"no row has an image; set model\.images=false, or name their column"):
        prepare_run(config_of(images, tmp_path, source=str(source), eval_rows=0))


def test_held_out_questions_are_answered_with_their_pictures(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"generate_rows": 3, "eval_generate_rows": 2, "eval_steps": 2, "generate_tokens": 4, "eval_rows": 3}
    config = config_of(images, tmp_path / "run", **asked)
    result = train(config)
    assert 0 <= result.metrics["accuracy_after"] <= 1 and result.metrics["eval_accuracy"] >= 0
    written = json.loads((tmp_path / "run" / "eval.json").read_text())
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == written["samples"]

    prepared = prepare_run(config)
    assert prepared.eval is not None
    model = load_for_generation(config.model)
    families.set_attention(models.base_model(model), attention.SDPA)
    model._tpu_kit_compute_dtype = torch.float32  # type: ignore[assignment]  # mypy expects a tensor or a module
    batch = prepared.eval.tensors(np.arange(len(prepared.eval)))
    with torch.no_grad():
        logits = models.logits(model, batch)[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())
    assert written["base"]["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-4), "rows are rated with pictures"

    seen = prepared.eval_prompt_ids
    blind = [ids.blackened() if isinstance(ids, PicturedIds) else ids for ids in seen]
    assert seen == blind and any(isinstance(ids, PicturedIds) for ids in seen)
    first = next(ids for ids in seen if isinstance(ids, PicturedIds))
    shown, dark = (first.images_among(given).tensors(given, 200, 3) for given in (seen, blind))
    assert shown["pixels"].any() and not dark["pixels"].any()
    assert torch.equal(shown["image_index"], dark["image_index"])
    assert 0 <= cells.show_blind_answers(config, prepared) <= 1
