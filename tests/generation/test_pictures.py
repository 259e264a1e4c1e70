"""Answers about pictures, asked by a command, a file or held-out rows: tokens equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from tests.support.vision_functions import CONFIGS, GRIDS, Lfm2Text, image_processor, picture, types_of
from tests.support.vision_models import save_model
from tpu_kit.cli import main
from tpu_kit.config.loader import ModelConfig, TrainConfig, load_config
from tpu_kit.data.images import processors
from tpu_kit.data.images.chats import carried, encode
from tpu_kit.data.images.encoding import ImageEncoding
from tpu_kit.data.images.files import PictureFiles
from tpu_kit.data.rows.field_values import RowError
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.distributed.replica.runtime import enter
from tpu_kit.generation import answers, reference_check
from tpu_kit.generation.answers import Sampling, generate
from tpu_kit.generation.prompts import PromptCodec
from tpu_kit.generation.reference_check import check_generation, check_training
from tpu_kit.generation.requests import read_prompts
from tpu_kit.machine.checks import Machine
from tpu_kit.model.families import vision
from tpu_kit.model.weights.source import load_tokenizer, settings_of

pytestmark = pytest.mark.usefixtures("quick_xla")
needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
NEW = 6
NAMED = ("google/gemma-4-E2B-it", "google/gemma-4-12B-it")  # in their real sizes


def config_of(folder: Path, **settings: Any) -> TrainConfig:
    given = {
        "model.name": str(folder),
        "base_dtype": "fp32",
        "device_type": "cpu",
        "num_replicas": 1,
        "max_length": 256,
    }
    return load_config(None, given | settings)


def of_transformers(folder: Path, prompts: list[tuple[str, list[Image.Image]]]) -> list[list[int]]:
    """Greedy tokens of transformers, with its own processors and a static cache."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    smol, grids = model.config.model_type == "smolvlm", model.config.model_type in GRIDS
    token, found = PLACES[model.config.model_type], []
    for text, images in prompts:
        content = [{"type": "image"}] * len(images) + [{"type": "text", "text": text}]
        said = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        given: dict[str, Any] = {}
        if images:
            options: dict[str, Any] = {"return_row_col_info": True} if token == "<image>" else {}
            made = image_processor(model.config)(images=[images] if smol else images, return_tensors="pt", **options)
            own = SimpleNamespace(
                image_processor=image_processor(model.config), full_image_sequence=GEMMA3_SEQUENCE,
                boi_token="<|image>", eoi_token="<image|>", image_token=token, image_seq_len=4,
                fake_image_token="<fake_token_around_image>", global_image_token="<global-img>",
            )  # fmt: skip
            kind: Any = PROCESSORS.get(model.config.model_type, Gemma4Processor)
            parts = said.split(token)
            said = parts[0] + "".join(
                kind.replace_image_token(own, made, number) + rest for number, rest in enumerate(parts[1:])
            )
            names = ("pixel_values", "pixel_attention_mask", "image_position_ids", "image_grid_thw", "spatial_shapes")
            given = {name: made[name] for name in names if name in made}
        ids = tokenizer(said, return_tensors="pt", add_special_tokens=False)["input_ids"]
        if token != "<image>" and (images or not grids):
            given[types_of(model.config)] = (ids == model.config.image_token_id).long()
        with torch.no_grad():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
                pad_token_id=0, cache_implementation="static", disable_compile=True, **given,
            )  # fmt: skip
        found.append(out[0, ids.shape[1] :].tolist())
    return found


PLACES = {"gemma4": "<|image|>", "gemma4_unified": "<|image|>", "gemma3": "<start_of_image>", "smolvlm": "<image>",
          "lfm2_vl": "<image>", **dict.fromkeys(GRIDS, "<|image_pad|>")}  # fmt: skip
PROCESSORS: dict[str, Any] = {"smolvlm": SmolVLMProcessor, "gemma3": Gemma3Processor, "qwen2_5_vl": Qwen2_5_VLProcessor,
                              "qwen3_5": Qwen3VLProcessor, "qwen3_vl": Qwen3VLProcessor,
                              "lfm2_vl": Lfm2Text}  # fmt: skip
GEMMA3_SEQUENCE = "\n\n<start_of_image>" + "<image_soft_token>" * 36 + "<end_of_image>\n\n"
ASKED = [("What is it?", [(90, 64)]), ("Both?", [(48, 80), (120, 40)]), ("What is 2 + 3?", [])]


@pytest.mark.parametrize(
    ("family", "device_type"),
    [
        *((one, "cpu") for one in ("gemma4_unified", "smolvlm", "gemma3", "lfm2_vl", *GRIDS)),
        pytest.param("gemma4", "cpu", marks=pytest.mark.slow),
        *(pytest.param(one, "xla-cpu", marks=[needs_xla, pytest.mark.slow]) for one in CONFIGS),
    ],
)  # fmt: skip
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, family: str, device_type: str) -> None:
    folder = save_model(tmp_path / "model", family)
    images = [[picture(10 * row + i, size) for i, size in enumerate(sizes)] for row, (_, sizes) in enumerate(ASKED)]
    images[0][0].save(tmp_path / "photo.png")
    prompts: list[Any] = [
        [{"role": "user", "content": [{"type": "image", "image": str(tmp_path / "photo.png")},
                                      {"type": "text", "text": ASKED[0][0]}]}],
        {"messages": [{"role": "user", "content": ASKED[1][0]}], "images": images[1]},
        [{"role": "user", "content": ASKED[2][0]}],
    ]  # fmt: skip
    replies = generate(config_of(folder, device_type=device_type), prompts, Sampling(NEW))
    wanted = of_transformers(folder, [(text, given) for (text, _), given in zip(ASKED, images, strict=True)])
    assert [list(reply.tokens) for reply in replies] == wanted
    most = 2 if family == "gemma3" else len(wanted)  # random weights answer all pictures alike
    assert len({tuple(tokens) for tokens in wanted}) == most, "random weights must answer differently"


def test_commands_and_files_ask_about_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path / "model", "gemma4_unified")
    image = picture(0, (90, 64))
    (tmp_path / "pictures").mkdir()
    image.save(tmp_path / "pictures" / "photo.png")
    rows = [
        {"prompt": "What is it?", "image": "photo.png"},
        {"messages": [{"role": "user", "content": "<image>What is it?"}], "images": ["photo.png"]},
        {"prompt": "What is 2 + 3?"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
            ],
            "images": ["photo.png"],
        },
    ]
    bare = save_model(tmp_path / "bare", "gemma4_unified")
    (bare / "chat_template.jinja").unlink()
    file = tmp_path / "pictures" / "asked.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    wanted = of_transformers(folder, [("What is it?", [image]), ("What is 2 + 3?", [])])
    here = [
        f"model.name={folder}",
        "base_dtype=fp32",
        "device_type=cpu",
        "num_replicas=1",
        "max_new_tokens=6",
        "--json",
    ]
    asked = ["image=pictures/photo.png", "prompt=What is it?"]
    for arguments, expected in (
        (asked, wanted[:1]),
        ([f"prompts={file}"], [wanted[0], wanted[0], wanted[1], wanted[0]]),
    ):
        capsys.readouterr()
        assert main(["generate", *here, *arguments]) == 0
        assert [reply["tokens"] for reply in json.loads(capsys.readouterr().out)] == expected
    assert main(["generate", *here[:-1], *asked]) == 0, "a single prompt is streamed"
    for arguments, problem in (
        (["image=missing.png", "prompt=a"], ": no such file"),
        (["image=https://a.b/c.png", "prompt=a"], "images are not fetched from the web"),
        (["image=pictures/asked.jsonl", "prompt=a"], "not a picture in the format"),
        ([*asked, "chat=false"], "chat=false, but pictures need a chat template"),
        ([*asked, "model.name=embedded"], "embedded has no vision part: name a model that has, such as google/"),
        (
            ["image=pictures/photo.png", "prompt=<image> <image> a"],
            "(<image>): 2; pictures: 1; give image=FILE",
        ),
        (
            ["prompt=<image> a", "model.images=true"],
            "(<image>): 1; pictures: 0; give image=FILE for each place",
        ),
        ([*asked, f"model.name={bare}"], "has no chat template to place it in the text"),
    ):
        assert main(["generate", *here, *arguments]) in (1, 2), arguments
        assert problem in capsys.readouterr().err, arguments
    file.write_text(json.dumps({"prompt": "a", "image": "../../photo.png"}))
    with pytest.raises(ValueError, match=r"asked\.jsonl: line 1: image .*: it is outside of"):
        read_prompts(str(file))
    part = {"type": "image", "image": "photo.png"}
    file.write_text(json.dumps({"messages": [{"role": "user", "content": [part]}], "image": "photo.png"}))
    with pytest.raises(ValueError, match=r"asked\.jsonl: line 1: image: a prompt already has its own pictures"):
        read_prompts(str(file))


def test_pictures_of_pil_are_read_as_their_files_are(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    picture(3, (90, 64)).save(tmp_path / "turned.jpg", exif=turned)
    picture(4, (90, 64)).convert("CMYK").save(tmp_path / "cmyk.jpg")
    for name, size in (("turned.jpg", (64, 90)), ("cmyk.jpg", (90, 64))):
        asked = {"messages": [{"role": "user", "content": "What is it?"}], "images": [Image.open(tmp_path / name)]}
        (carries,) = carried(asked)["images"]
        own, wanted = PictureFiles("").decoded(carries), PictureFiles(str(tmp_path)).decoded(name)
        assert own.size == size
        assert own.tobytes() == wanted.tobytes()
    with pytest.raises(RowError, match="a picture has the mode F, which PNG does not support; convert it to RGB"):
        carried({"messages": [{"role": "user", "content": "What is it?"}], "images": [Image.new("F", (4, 4))]})


def test_a_picture_that_changed_is_never_taken_for_the_one_before(tmp_path: Path) -> None:
    config = config_of(save_model(tmp_path / "model", "gemma4_unified"), **{"model.images": True})
    picture(0, (90, 64)).save(tmp_path / "photo.png")
    files = PictureFiles(str(tmp_path))
    encoding = ImageEncoding(processors.image_processor(config.model, load_tokenizer(config.model), config.data), files)
    ids: Any = encoding.prompt([encoding.processor.token_id, 1], [files.picture("photo.png")])
    images = ids.images_among([ids])
    assert images.tensors([ids], len(ids), 1)["pixels"].any()
    picture(0, (300, 20)).save(tmp_path / "photo.png")
    with pytest.raises(ValueError, match=r"image photo\.png: it has 300 x 20 pixels, other than when the rows were"):
        images.tensors([ids], len(ids), 1)


def test_a_picture_whose_file_ends_early_is_asked_in_black_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(save_model(tmp_path / "model", "gemma4_unified"), **{"model.images": True})
    picture(0, (90, 64)).save(tmp_path / "photo.png")
    whole = (tmp_path / "photo.png").read_bytes()
    (tmp_path / "photo.png").write_bytes(whole[: len(whole) // 2])
    asked = [{"role": "user", "content": [{"type": "image", "image": str(tmp_path / "photo.png")}]}]
    (reply,) = generate(config, [asked], Sampling(NEW))
    assert "its prompt is asked with black pictures" in capsys.readouterr().err
    black = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (90, 64))}]}]
    assert reply.tokens == generate(config, [black], Sampling(NEW))[0].tokens


def test_a_chat_without_pictures_has_the_tokens_of_a_model_that_reads_text_alone(tmp_path: Path) -> None:
    config = config_of(save_model(tmp_path / "model", "gemma4_unified"), **{"model.images": True})
    tokenizer = load_tokenizer(config.model)
    codec = PromptCodec(tokenizer, AutoModelForImageTextToText.from_pretrained(tmp_path / "model"), config.data)
    said = [("system", "Be brief."), ("user", "  a "), ("assistant", "b"), ("user", "c")]
    chat = [{"role": role, "content": content} for role, content in said]
    assert encode(config, tokenizer, [chat, chat[1:2]]) == [codec.encode(chat), codec.encode(chat[1:2])]


def test_a_mapping_without_messages_is_told() -> None:
    with pytest.raises(ValueError, match=r'^prompt 1: it has no messages; write \{"messages": '):
        generate(load_config(None, ["device_type=cpu"]), ["a", {"question": "What?"}])


def test_a_chat_goes_on_after_a_line_that_cannot_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(save_model(tmp_path / "model", "gemma4_unified"), **{"model.images": True})
    (tmp_path / "typed").write_text("What does <image> mean?\nWhat is 2 + 3?\n")
    enter(CpuRuntime(0, 1, torch.device("cpu")))
    try:
        answers._chat_here(config, None, Sampling(NEW), str(tmp_path / "typed"), None)
    finally:
        enter(None)
    said = capsys.readouterr().out.split("\n> ")
    assert "places for pictures (<image>): 1; pictures: 0; give image=FILE for each" in said[1]
    (reply,) = generate(config, [[{"role": "user", "content": "What is 2 + 3?"}]], Sampling(NEW))
    assert said[2].strip() == reply.text.strip()


@pytest.mark.parametrize(
    "family",
    [
        "gemma4_unified", "smolvlm",
        *(pytest.param(one, marks=pytest.mark.slow)
          for one in ("gemma4", "gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "lfm2_vl", *NAMED)),
    ],
)  # fmt: skip
def test_a_launch_compares_images_with_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CONFIGS[family]() if family in CONFIGS else settings_of(ModelConfig(name=family, images=True))
    settings.save_pretrained(tmp_path / "model")
    config = config_of(tmp_path / "model", **{"model.images": True, "lora.vision": True})
    compared = reference_check._pictured(settings, trust_remote_code=False)
    shares = reference_check.differences(config, settings, "tpu", torch.device("cpu"), compared)
    worst = max(shares, key=shares.__getitem__)
    print(f"{family}: logits {shares['logits']:.1e}, {worst} {shares[worst]:.1e}")
    check_training(config, "tpu", settings)
    check_generation(settings, images=True)

    def shifted(found: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return taken(found.roll(1, 1), index)

    taken = vision._taken
    monkeypatch.setattr(vision, "_taken", shifted)
    reference_check._problem.cache_clear()
    with pytest.raises(ValueError, match=r"cannot be trained with these settings: with images, logits differ by"):
        check_training(config, "tpu", settings)
    with pytest.raises(ValueError, match=r"the kit cannot generate with .*: log-probabilities of its replies differ"):
        check_generation(settings, images=True)
    reference_check._problem.cache_clear()
