"""Memory and time of images by formula and by the TPU compiler, and their lines in the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import SmolVLMConfig

from tpu_kit.cli import main
from tpu_kit.config.loader import TrainConfig, batch_arithmetic, load_config
from tpu_kit.config.mesh import resolve_mesh
from tpu_kit.model.families.input_work import inputs_of
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.planning.compiler.compile_check import compile_step
from tpu_kit.planning.cost import work
from tpu_kit.planning.memory.memory_estimate import Memory, estimate


class Answer(NamedTuple):
    """The compiler's figures of a step: total bytes, argument bytes, and FLOPs."""

    total: int
    arguments: int
    flops: float


SIZES: dict[str, Any] = {"vocab_size": 49280, "max_position_embeddings": 8192, "tie_word_embeddings": False}
SMOLVLM = {
    "smolvlm2-500m": {
        "text_config": {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
                        "num_attention_heads": 15, "num_key_value_heads": 5},
        "vision_config": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                          "num_attention_heads": 12, "image_size": 512, "patch_size": 16},
        "scale_factor": 4,
    },
    "smolvlm2-2.2b": {
        "text_config": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
                        "num_attention_heads": 32, "num_key_value_heads": 32},
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                          "num_attention_heads": 16, "image_size": 384, "patch_size": 14},
        "scale_factor": 3,
    },
}  # fmt: skip
IMAGES = "model.images=true"
E2B = ("model.name=google/gemma-4-E2B-it", IMAGES, "max_length=2048", "batch_size=1", "images_per_row=4",
       "image_tokens=280", "mlp_tile=null")  # fmt: skip
QWEN = ("model.name=Qwen/Qwen3.5-4B", IMAGES, "max_length=2048", "batch_size=1", "images_per_row=4", "image_tokens=256")
ANSWERS: dict[tuple[str, int, tuple[str, ...]], Answer] = {
    ("v5e:1x1", 1, QWEN): Answer(11_099_239_424, 9_472_284_672, 52.77e12),
    ("v5e:1x1", 1, E2B): Answer(11_328_625_664, 9_918_194_176, 34.73e12),
    (
        "v5e:1x1",
        1,
        ("model.name=smolvlm2-500m", IMAGES, "max_length=2048", "batch_size=2", "images_per_row=16"),
    ): Answer(1_982_310_912, 1_159_376_896, 18.60e12),
    (
        "v5e:1x1",
        1,
        ("model.name=smolvlm2-500m", IMAGES, "max_length=2048", "batch_size=2", "images_per_row=4"),
    ): Answer(1_726_624_256, 1_140_502_528, 13.41e12),
    (
        "v5e:1x1",
        1,
        ("model.name=smolvlm2-2.2b", IMAGES, "max_length=2048", "batch_size=1", "images_per_row=8"),
    ): Answer(5_504_249_856, 4_714_680_832, 28.00e12),
    (
        "v5e:1x1",
        1,
        (
            "model.name=google/gemma-4-E2B-it",
            IMAGES,
            "max_length=1024",
            "batch_size=2",
            "images_per_row=2",
            "image_tokens=140",
            "mlp_tile=null",
        ),
    ): Answer(11_247_083_008, 9_914_294_784, 31.27e12),
    (
        "v5e:2x4",
        8,
        (
            "model.name=google/gemma-4-12B-it",
            IMAGES,
            "max_length=2048",
            "batch_size=1",
            "images_per_row=4",
            "image_tokens=280",
            "mesh=fsdp=8",
        ),
    ): Answer(6_075_067_904, 3_114_087_424, 154.22e12),
}


def configuration(settings: tuple[str, ...], folder: Path) -> TrainConfig:
    name = settings[0].partition("=")[2]
    if name in SMOLVLM:
        text = SIZES | {"model_type": "llama"} | SMOLVLM[name]["text_config"]
        sizes = SMOLVLM[name] | {"text_config": text, "image_token_id": 49190, "pad_token_id": 2}
        SmolVLMConfig(**sizes).save_pretrained(folder / name)
        settings = (f"model.name={folder / name}", *settings[1:])
    return load_config(None, [*settings, "device_type=tpu", "max_steps=10"])


def estimated(place: tuple[str, int, tuple[str, ...]], folder: Path) -> Memory:
    _, devices, settings = place
    config = configuration(settings, folder)
    mesh = resolve_mesh(config.launch.mesh, devices) if config.launch.mesh else None
    return estimate(config, num_replicas=devices, mesh=mesh)


@pytest.mark.parametrize("place", ANSWERS, ids=lambda place: " ".join((place[0], *place[2])))
def test_the_formula_is_the_compilers_answer_with_images(
    place: tuple[str, int, tuple[str, ...]], tmp_path: Path
) -> None:
    found, answer = estimated(place, tmp_path), ANSWERS[place]
    print(f"{found.total_bytes / answer.total - 1:+.1%} of {answer.total / 2**30:.2f} GiB; {found.moment}")
    assert found.argument_bytes == pytest.approx(answer.arguments, rel=5e-3)
    assert -0.075 <= found.total_bytes / answer.total - 1 <= 0.15
    config = configuration(place[2], tmp_path)
    done = work(config, read_shape(config.model), batch_arithmetic(config, place[1]))
    # The attention kernel computes whole blocks: 3/4 of the square of 2,048 tokens; the formula counts 1/2.
    assert done.flops == pytest.approx(answer.flops, rel=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("place", ANSWERS, ids=lambda place: " ".join((place[0], *place[2])))
def test_the_compiler_still_says_so_with_images(place: tuple[str, int, tuple[str, ...]], tmp_path: Path) -> None:
    topology, devices, settings = place
    compiled = compile_step(configuration(settings, tmp_path), topology, num_replicas=devices, progress=False)
    assert compiled.total_bytes == pytest.approx(ANSWERS[place].total, rel=0.02)


def test_more_images_of_a_row_take_more_of_the_batch_and_of_the_time(tmp_path: Path) -> None:
    few, more = (configuration((*E2B, f"images_per_row={count}"), tmp_path) for count in (1, 4))
    held = [estimate(config).parts["batch"] for config in (few, more)]
    patches = 2520  # per image: its bytes and positions; the batch's text comes on top
    assert held[1] - held[0] == pytest.approx(3 * patches * (768 + 2 * 4), rel=0.3)
    costs = [work(config, read_shape(config.model), batch_arithmetic(config, 1)).flops for config in (few, more)]
    inputs = inputs_of(more)
    assert inputs is not None and costs[1] - costs[0] == pytest.approx(3 * inputs.flops(), rel=0.01)
    trained = configuration((*E2B, "lora.vision=true"), tmp_path)
    assert estimate(trained).trained - estimate(more).trained == 16 * (1536 + 768)


def test_a_plan_says_what_a_picture_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *E2B, "--chip", "v5e"]) == 0
    assert "A picture takes 280 tokens at most, " in (said := capsys.readouterr().out)
    assert " ms in addition to its tokens; a row has room for 4" in said
