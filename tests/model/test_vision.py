"""Tiny models with vision towers, and packed rows, against transformers on each document alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PaliGemmaConfig

from tests.support import vision_functions
from tests.support.child_processes import run_python
from tests.support.vision_functions import ALSO, CONFIGS, TOKENS, build, document, documents, pack, picture, unified
from tests.test_imports import IMPORTS
from tpu_kit.config.loader import LoraConfig, ModelConfig, TrainConfig, load_config
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.machine.checks import Machine
from tpu_kit.model import causal_lm as models
from tpu_kit.model import preparation, trainable
from tpu_kit.model.families import vision
from tpu_kit.model.weights import loading

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
ALONE = CpuRuntime(0, 1, torch.device("cpu"))


def bars(own: tuple[float, float], logits: float = 1e-5, times: float = 2) -> tuple[float, float]:
    """The largest differences of logits and gradients, by transformers' own rounding."""
    return max(logits, times * own[0]), max(1e-4, times * own[1])


@pytest.mark.parametrize("family", [*CONFIGS, *ALSO])
def test_packed_rows_are_documents_alone(family: str) -> None:
    config = (CONFIGS | ALSO)[family]()
    model, rows = build(config), documents(config)
    wanted = vision_functions.of_transformers(model, rows)
    own = vision_functions.rounding(model, rows, wanted)
    found = vision_functions.of_kit(model, rows, ALONE)
    print(f"{family:16} logits and gradients {found.differs_from(wanted)}, transformers' own {own}")
    assert set(found.gradients) == set(wanted.gradients), "the text model's adapters alone are trained"
    assert all(a <= b for a, b in zip(found.differs_from(wanted), bars(own), strict=True))


@pytest.mark.parametrize("family", CONFIGS)
def test_the_projector_is_trained_as_by_transformers(family: str) -> None:
    config = CONFIGS[family]()
    model, rows = build(config), documents(config)
    wanted = vision_functions.of_transformers(model, rows, vision=True)
    # The largest of two draws, with and without the projector's gradients: fp32 differs from fp64 by 1.3e-5 or 5e-6.
    own, other = (
        vision_functions.rounding(model, rows, vision_functions.of_transformers(model, rows, vision=vision), vision)
        for vision in (True, False)
    )
    own = max(own[0], other[0]), max(own[1], other[1])
    found = vision_functions.of_kit(model, rows, ALONE, vision=True)
    print(f"{family:16} logits and gradients {found.differs_from(wanted)}, transformers' own {own}")
    assert set(found.gradients) == set(wanted.gradients)
    projectors, towers = ("embed_vision", "connector", "projector", "merger"), ("tower", "vision_model", "blocks")
    more = {name for name in found.gradients if any(part in name for part in projectors)}
    assert more and not any(part in name for name in found.gradients for part in towers)
    assert all(float(found.gradients[name].norm()) > 0 for name in more)
    assert all(a <= b for a, b in zip(found.differs_from(wanted), bars(own), strict=True))


def test_adapters_of_a_tower_are_refused_by_name() -> None:
    model = build(CONFIGS["gemma4"]())
    with pytest.raises(ValueError, match=r"lora\.targets: input_proj belongs to the vision modules, which are frozen"):
        trainable.adapt(model, LoraConfig(targets=("q_proj", "input_proj")), "fp32")


@pytest.mark.parametrize("family", ["gemma4_unified", "smolvlm"])
def test_neighbours_and_room_change_nothing(family: str) -> None:
    config = CONFIGS[family]()
    ours = vision_functions.adapted(build(config))
    preparation.use_attention(ours, "auto", "cpu")
    first, second = (document(config, [picture(seed, (64, 48))], seed) for seed in (0, 1))
    other = document(config, [picture(9, (64, 48))], 1)
    images = sum(len(one.slots) for one in (first, second))

    def logits(rows: list[Any], room: int) -> torch.Tensor:
        with torch.no_grad():
            return models.logits(ours, pack(config, rows, room, 192))

    end, whole = len(first.ids), len(first.ids) + len(second.ids)
    found = logits([[first, second]], images)
    neighbour = logits([[first, other]], images)
    assert torch.equal(found[:, :end], neighbour[:, :end])
    assert not torch.allclose(found[:, end:whole], neighbour[:, end:whole]), "the picture itself must matter"
    assert torch.equal(found[:, :whole], logits([[first, second]], images + 3)[:, :whole])


def test_text_beside_the_tower_is_text() -> None:
    """Rows of text give equal results with and without the image columns."""
    config = unified()
    ours = vision_functions.adapted(build(config))
    preparation.use_attention(ours, "auto", "cpu")
    batch = pack(config, [[document(config, [], 1, 20, 9)]], 2, 64)
    text = {name: one for name, one in batch.items() if name not in ("pixels", "patch_positions", "image_index")}
    with torch.no_grad():
        assert torch.equal(models.logits(ours, batch), models.logits(ours, text))


def test_transformers_own_forward_still_lets_images_see_ahead_everywhere() -> None:
    """In Google's code and vLLM only layers with a window have it, as in transformers with a static cache.

    If this fails, transformers has changed (huggingface/transformers issue 46711): `served` may be left out then.
    """
    config = unified()
    model = build(config)
    one = document(config, [picture(0, (90, 90))], 0)
    with torch.no_grad():
        served, own = (vision_functions.reference(model, one, served) for served in (True, False))
    assert float((served - own).abs().max() / served.abs().max()) > 0.05


def run(tmp_path: Path, family: str, **settings: Any) -> TrainConfig:
    given = {"run_name": family, "output_dir": str(tmp_path), "device_type": "xla-cpu", "max_steps": 3}
    return load_config(None, given | settings)


@needs_xla
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_on_xla_one_program_makes_each_update(tmp_path: Path, family: str) -> None:
    found = launch(vision_functions.compared, run(tmp_path, family, num_replicas=1))
    print(f"{family:16} logits and gradients {found['difference']}, transformers' own {found['own']}")
    # XLA's tanh and exp round differently from torch's.
    assert all(a <= b for a, b in zip(found["difference"], bars(found["own"], logits=3e-5, times=4), strict=True))
    assert [count["host_syncs"] for count in found["counts"]] == [0] * 3
    assert [count["compiles"] for count in found["counts"]][1:] == [0] * 2, "other pictures need no other program"


@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize(
    ("family", "device_type"),
    [
        ("gemma4_unified", "cpu"),
        *(pytest.param(family, "cpu", marks=pytest.mark.slow) for family in CONFIGS if family != "gemma4_unified"),
        *(pytest.param(family, "xla-cpu", marks=[needs_xla, pytest.mark.slow]) for family in CONFIGS),
    ],
)
def test_greedy_tokens_after_images_are_those_of_transformers(tmp_path: Path, family: str, device_type: str) -> None:
    ours, theirs = launch(vision_functions.greedy, run(tmp_path, family, device_type=device_type, num_replicas=1))
    assert ours == theirs


def updated(tmp_path: Path, family: str, **settings: Any) -> tuple[torch.Tensor, list[dict[str, int]]]:
    """Returns the weights after updates with different images, and each update's compilations and reads."""
    found, counts = launch(vision_functions.updated, run(tmp_path, family, **settings), sharded=True)
    return torch.cat([torch.tensor(found[name]) for name in sorted(found)]), counts


@needs_xla
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_replicas_and_a_mesh_make_the_same_updates(tmp_path: Path, family: str) -> None:
    trained = {"max_steps": 30, "lora.vision": True, "model.images": True}
    one, _ = updated(tmp_path, family, num_replicas=1, **trained)
    for settings in ({"num_replicas": 2}, {"mesh": "fsdp=2"}):
        other, _ = updated(tmp_path, family, **trained, **settings)
        difference = float((other - one).abs().max() / one.abs().max())
        print(f"{family:16} {settings} {difference:.1e}")
        assert difference <= 1e-5


@needs_xla
@pytest.mark.usefixtures("quick_xla")
def test_a_mesh_makes_the_same_updates_by_one_program(tmp_path: Path) -> None:
    one, _ = updated(tmp_path, "gemma4_unified", device_type="cpu", num_replicas=1)
    sharded, counts = updated(tmp_path, "gemma4_unified", mesh="fsdp=2")
    assert float((sharded - one).abs().max() / one.abs().max()) <= 1e-5
    assert [count["compiles"] for count in counts][1:] == [0, 0] and not any(count["host_syncs"] for count in counts)


def test_loading_with_and_without_the_part_for_images(tmp_path: Path) -> None:
    config = unified()
    build(config).save_pretrained(tmp_path)
    text, whole = (
        loading.load_frozen(ModelConfig(name=str(tmp_path), base_dtype="fp32", images=images))
        for images in (False, True)
    )
    assert not any("vision" in name for name, _ in text.named_parameters())
    assert any("embed_vision" in name for name, _ in whole.named_parameters())


def test_a_family_without_images_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="images of llama are not trained; these families are: gemma3, gemma4, gemma4_unified, idefics3, l",
    ):
        vision.sizes_of(LlamaConfig())
    with pytest.raises(ValueError, match="images of paligemma are not trained; these families are: gemma3, gemma4"):
        vision.sizes_of(PaliGemmaConfig())


def test_an_image_larger_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="max_length=64: an image takes up to 70 tokens; raise it, or lower"):
        vision.check_rows(unified(), TOKENS, 64)


def test_only_functions_import_what_images_need() -> None:
    """Modules that read pictures and run towers: runs on text load none of them."""
    owners = ("data.images.", "model.families.vision", "assets.pictures")
    for name, imports in IMPORTS.items():
        wrong = [one for one in imports if one.ours and one.ours.startswith(owners) and one.where == "module"]
        assert not wrong or name.startswith(owners), (name, wrong)


@pytest.mark.slow
def test_text_alone_imports_no_vision() -> None:
    run_python(
        "import sys, torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from tpu_kit.config.loader import LoraConfig\n"
        "from tpu_kit.model import causal_lm, trainable\n"
        "sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1)\n"
        "base = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes))\n"
        "model = trainable.adapt(base, LoraConfig(r=4), 'fp32')\n"
        "causal_lm.logits(model, {'input_ids': torch.ones(1, 8, dtype=torch.int64)})\n"
        "assert not [name for name in sys.modules if name.startswith('tpu_kit') and 'vision' in name]\n"
    )
