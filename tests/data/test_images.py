"""Rows with pictures: their forms, refusals, tokens, pixels, packing and batches."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image, ImageOps, PngImagePlugin
from transformers import Idefics3Processor, PaliGemmaConfig
from transformers.image_transforms import convert_to_rgb
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.support.vision_functions import (
    ALSO,
    CONFIGS,
    GRIDS,
    OF_LFM2,
    TOKENS,
    Lfm2Text,
    _processed,
    image_processor,
    lfm2_processor,
    picture,
)
from tests.support.vision_models import save_model, settings_of, tokenizer_of
from tpu_kit.config.loader import DataConfig, ModelConfig
from tpu_kit.config.sections.data import DataSource
from tpu_kit.data import tokenizing
from tpu_kit.data.batching import IGNORED, BatchError, best_fill
from tpu_kit.data.images import columns, processors
from tpu_kit.data.images.files import MOST_PIXELS, PictureFiles
from tpu_kit.data.images.packing import best_fill_of_images, fewest_images
from tpu_kit.data.prepare import Prepared, on_disk, prepare
from tpu_kit.data.rows.field_values import RowError

SIZES = [(90, 90), (140, 60), (40, 200), (64, 48), (30, 30), (300, 200), (77, 101)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module", params=["gemma4_unified", "smolvlm", "gemma3", "qwen3_5"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelConfig]:
    folder = tmp_path_factory.mktemp("models")

    def made(family: str) -> ModelConfig:
        if not (folder / family).exists():
            save_model(folder / family, family)
        return ModelConfig(name=str(folder / family), base_dtype="fp32", images=True)

    return made


def file_of(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with pictures 0.jpg, 1.jpg, ..."""
    for number, size in enumerate(SIZES):
        (tmp_path / f"{number}.jpg").write_bytes(file_of(picture(number, size)))
    return tmp_path


def asked(text: Any, answer: str = "red", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}], **more}


def prepared(model: ModelConfig, folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Prepared:
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"source": str(source), "eval_rows": 0, "max_length": 512, "think_open": "<t>", "think_close": "</t>"}
    return prepare_with(model, DataConfig(**(given | settings)))


def prepare_with(model: ModelConfig, config: DataConfig) -> Prepared:
    return prepare(config, tokenizer_of(Path(model.name).name), model=model)


# --------------------------------------------------------------------------------------------------------------- forms


def data_url(content: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(content).decode()


def forms(content: bytes) -> dict[str, dict[str, Any]]:
    """The same row in the forms of other trainers."""
    part, text = {"type": "image", "image": "0.jpg"}, {"type": "text", "text": "What colour?"}
    url = {"type": "image_url", "image_url": {"url": data_url(content)}}
    reply = {"role": "assistant", "content": "red"}
    return {
        "parts with paths": {"messages": [{"role": "user", "content": [part, text]}, reply]},
        "TRL": {"messages": [{"role": "user", "content": [{"type": "image"}, text]}, reply], "images": ["0.jpg"]},
        "TRL without places": asked("What colour?", images=["0.jpg"]),
        "TRL prompt and completion": {
            "prompt": [{"role": "user", "content": [{"type": "image"}, text]}], "completion": [reply],
            "images": ["0.jpg"],
        },
        "Unsloth": {
            "messages": [
                {"role": "user", "content": [part, text]},
                {"role": "assistant", "content": [{"type": "text", "text": "red"}]},
            ]
        },
        "base64": asked([{"type": "image", "base64": base64.b64encode(content).decode()}, text]),
        "axolotl path": {"messages": [{"role": "user", "content": [{"type": "image", "path": "0.jpg"}, text]}, reply]},
        "OpenAI": {
            "messages": [
                {"role": "user", "content": [url, text]}, reply,
            ]
        },
        "LLaMA-Factory": {
            "conversations": [{"from": "human", "value": "<image>What colour?"}, {"from": "gpt", "value": "red"}],
            "images": ["0.jpg"],
        },
        "LLaVA": {
            "image": "0.jpg",
            "conversations": [{"from": "human", "value": "<image>What colour?"}, {"from": "gpt", "value": "red"}],
        },
        "question and answer": {"image": "0.jpg", "question": "What colour?", "answer": "red"},
    }  # fmt: skip


@pytest.mark.parametrize("family", ["gemma4_unified", "smolvlm"])
def test_forms_of_rows_give_one_document(models: Callable[[str], ModelConfig], family: str, folder: Path) -> None:
    found = {}
    for name, row in forms((folder / "0.jpg").read_bytes()).items():
        data = prepared(models(family), folder, [row]).train
        found[name] = data.document(0)[0].tolist(), data.tensors(np.array([0]))["pixels"]
    ids, pixels = found["TRL"]
    for name, (own, numbers) in found.items():
        assert own == ids, name
        assert torch.equal(numbers, pixels), name
    assert pixels.any()


def test_bytes_in_parquet_and_images_of_the_hub(models: Callable[[str], ModelConfig], folder: Path) -> None:
    model, content = models("gemma4_unified"), (folder / "0.jpg").read_bytes()
    expected = prepared(model, folder, [asked("What?", images=["0.jpg"])]).train.tensors(np.array([0]))
    cells = {"question": ["What?"], "answer": ["red"], "images": [[{"bytes": content, "path": None}]]}
    text = {"question": Value("string"), "answer": Value("string")}
    for feature in (List(ImageFeature()), List({"bytes": Value("binary"), "path": Value("string")})):
        path = folder / "rows.parquet"
        Dataset.from_dict(cells, features=Features({**text, "images": feature})).to_parquet(str(path))
        found = prepare_with(model, DataConfig(source=str(path), eval_rows=0, max_length=512)).train.tensors(
            np.array([0])
        )
        assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_rows_without_pictures_among_others(models: Callable[[str], ModelConfig], folder: Path) -> None:
    rows = [asked("What?", images=["0.jpg"]), asked("And two?", images=[]), asked("Three?", images=None)]
    made = prepared(models("gemma4_unified"), folder, rows, packing=False)
    assert made.train.documents.images.pictures.tolist() == [1, 0, 0]
    index = made.train.tensors(np.arange(3))["image_index"]
    assert (index >= 0).sum(1).tolist() == [made.train.documents.images.tokens[0], 0, 0]


# --------------------------------------------------------------------------------------------------------- bad pictures


def broken(folder: Path, name: str) -> Any:
    """Writes a bad picture; returns its name in the row."""
    path = folder / "bad.png"
    good = picture(0, (80, 60))
    contents: dict[str, Callable[[], bytes]] = {
        "text": lambda: b"no picture",
        "16 bits": lambda: file_of(Image.fromarray(np.full((9, 9), 40_000, dtype=np.uint16)), "PNG"),
        "animated": lambda: file_of(good, "GIF", save_all=True, append_images=[picture(1, (80, 60))]),
        "bomb": lambda: file_of(Image.new("L", (MOST_PIXELS // 100 + 1, 100)), "PNG"),
        "header": lambda: file_of(good)[:12],
    }
    if name in contents:
        path.write_bytes(contents[name]())
        return "bad.png"
    if name == "pipe":
        os.mkfifo(path)
        return "bad.png"
    if name == "base64 alone":
        return base64.b64encode(bytes(6_000)).decode()
    return {
        "missing": "nowhere.jpg", "above": "../0.jpg", "elsewhere": "/etc/hostname", "web": "https://a.b/c.png",
        "address": "file:///etc/hostname", "chain": "gs://a/b::file:///etc/hostname", "number": 7,
    }[name]  # fmt: skip


REFUSED = {
    "missing": "image nowhere.jpg: no such file",
    "above": r"image \.\./0.jpg: it is outside of .*; copy it below the rows",
    "elsewhere": "image /etc/hostname: it is outside of",
    "address": "image file:///etc/hostname: an address is gs:// or hf://; give other files below the rows",
    "chain": "image gs://a/b::file:///etc/hostname: an address is gs:// or hf://",
    "pipe": "image bad.png: this is not a regular file; name another",
    "base64 alone": r"image A{57}\.\.\.: a text of 8,000 characters is no path; if it is base64, give it as data:i",
    "web": "image https://a.b/c.png: images are not fetched from the web; download them first",
    "text": "image bad.png: not a picture in the format JPEG, PNG",
    "16 bits": "image bad.png: its mode is I;16, with more than 8 bits a channel; convert it to RGB",
    "animated": "image bad.png: it is animated; give the pictures one by one",
    "bomb": r"image bad.png: 500001 x 100 pixels, more than 50,000,000; make it smaller",
    "header": "image bad.png: ",
    "number": "an image is a path, bytes or a data URL, not int",
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_pictures_are_named_with_their_row(models: Callable[[str], ModelConfig], folder: Path, name: str) -> None:
    rows = [{"question": "What?", "answer": "red", "image": "0.jpg"} for _ in range(3)]
    rows[1]["image"] = broken(folder, name)
    if name == "number":
        rows = [{**row, "image": [row["image"]] if row["image"] == 7 else ["0.jpg"]} for row in rows]
    with pytest.raises(ValueError, match=rf"(?s)1 of 3 rows cannot be used: .*line 2: {REFUSED[name]}"):
        prepared(models("gemma4_unified"), folder, rows)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (asked("<image> and <image>", images=["0.jpg"]), "messages have 2 places of images, and column 'images' has 1"),
        (asked("<image>", images=["0.jpg", "1.jpg"]), "messages have 1 places of images, and column 'images' has 2"),
        (asked("<image>"), "messages have 1 places of images, and the row has no column of images"),
        (
            asked("<|image|>", images=["0.jpg"]),
            r"its chat has more <\|image\|> than images, 1; is the text",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "video", "video": "a.mp4"}]},
                    asked("")["messages"][1],
                ]
            },
            "part of type video; only text and images can be trained on",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "audio", "audio": "a.mp3"}]},
                    asked("")["messages"][1],
                ]
            },
            "part of type audio; only text and images can be trained on",
        ),
        ({"prompt": "What is it?", "completion": "A cat", "images": ["0.jpg"]}, "this row is plain text"),
    ],
)
def test_rows_that_do_not_fit_their_pictures(
    models: Callable[[str], ModelConfig], folder: Path, row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        prepared(models("gemma4_unified"), folder, [row])


def test_without_the_part_for_images_rows_with_pictures_are_refused(folder: Path) -> None:
    source = folder / "rows.jsonl"
    for row, problem in (
        (asked("What?", images=["0.jpg"]), "'images' .* may hold images, which model.images=true trains on"),
        (forms(b"")["Unsloth"], "part of type image; only text can be trained on: images with model.images=true"),
    ):
        source.write_text(json.dumps(row) + "\n")
        with pytest.raises(ValueError, match=problem):
            prepare(DataConfig(source=str(source), eval_rows=0), tokenizer_of("gemma4"))


@pytest.mark.parametrize("mode", ["CMYK", "RGBA", "L", "1", "P", "LA", "one pixel", "wide", "turned"])
def test_pictures_of_all_kinds_are_used(models: Callable[[str], ModelConfig], folder: Path, mode: str) -> None:
    image, options = picture(0, (90, 60)), dict[str, Any]()
    if mode == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        options["exif"] = exif
    sizes = {"one pixel": (1, 1), "wide": (20_000, 3)}
    image = image.resize(sizes[mode]) if mode in sizes else image
    image = image.convert(mode) if mode in ("CMYK", "RGBA", "L", "1", "P", "LA") else image
    kind = {"CMYK": "JPEG", "turned": "JPEG"}.get(mode, "PNG")
    (folder / "0.jpg").write_bytes(file_of(image, kind, **options))
    made = prepared(models("gemma4_unified"), folder, [asked("What?", images=["0.jpg"])])
    found = PictureFiles(str(folder)).picture("0.jpg")
    assert (found.width, found.height) == ((60, 90) if mode == "turned" else image.size)
    batch = made.train.tensors(np.array([0]))
    assert (batch["image_index"] >= 0).sum() == made.train.documents.images.tokens.sum() > 0


def orientation(number: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


def transparent(kind: str) -> bytes:
    """A picture with an alpha channel, a transparent colour, or a palette with transparent entries."""
    image = picture(0, (90, 60))
    alpha = picture(1, (90, 60)).convert("L")
    if kind in ("RGBA", "LA", "WEBP"):
        image = image.convert("RGB" if kind == "WEBP" else kind)
        image.putalpha(alpha)
        return file_of(image, "WEBP" if kind == "WEBP" else "PNG", **({"lossless": True} if kind == "WEBP" else {}))
    if kind == "PA":  # a palette with an alpha per entry
        return file_of(image.convert("P"), "PNG", transparency=bytes(range(0, 256, 2)))
    if kind in ("L", "RGB"):
        image = image.convert(kind)
        return file_of(image, "PNG", transparency=image.getpixel((3, 3)))
    return file_of(image.convert("P"), "GIF", transparency=image.convert("P").getpixel((3, 3)))


@pytest.mark.parametrize("kind", ["RGBA", "LA", "WEBP", "PA", "L", "RGB", "GIF"])
def test_transparent_pictures_are_on_white_as_those_of_transformers(kind: str) -> None:
    content = transparent(kind)
    expected = convert_to_rgb(Image.open(io.BytesIO(content)), return_numpy=True)
    found = np.asarray(PictureFiles("").decoded(content))
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_the_size_of_the_header_is_that_of_the_turned_picture(kind: str, turn: int) -> None:
    content = file_of(picture(0, (90, 60)), kind, exif=orientation(turn))
    header, found = PictureFiles("").picture(content), PictureFiles("").decoded(content)
    assert (header.width, header.height) == found.size == ((60, 90) if turn > 4 else (90, 60))
    opened = Image.open(io.BytesIO(content))
    opened.load()
    assert np.array_equal(np.asarray(found), np.asarray(ImageOps.exif_transpose(opened).convert("RGB")))


def test_the_header_of_a_png_is_read_without_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    files, plain = PictureFiles(""), file_of(picture(0, (90, 60)), "PNG")
    start = plain.rindex(b"IDAT") + 4 + int.from_bytes(plain[plain.rindex(b"IDAT") - 4 :][:4]) + 4
    chunk = io.BytesIO()
    PngImagePlugin.putchunk(chunk, b"eXIf", orientation(6).tobytes()[6:])
    behind = plain[:start] + chunk.getvalue() + plain[start:]  # behind the pixels
    assert files.decoded(behind).size == (90, 60)
    assert np.array_equal(np.asarray(files.decoded(behind)), np.asarray(files.decoded(plain)))
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda _: pytest.fail("its pixels are decoded"))
    for content in (plain, behind):
        assert files.picture(content)[:2] == (60, 90)
    assert files.picture(file_of(picture(0, (90, 60)), "PNG", exif=orientation(6)))[:2] == (90, 60)


def test_a_jpeg_of_several_pictures_is_its_first() -> None:
    image = picture(0, (90, 60))
    content = file_of(image, "MPO", save_all=True, append_images=[picture(1, (40, 30))])
    assert PictureFiles("").picture(content)[:2] == (60, 90)
    assert np.array_equal(
        np.asarray(PictureFiles("").decoded(content)), np.asarray(PictureFiles("").decoded(file_of(image)))
    )


def test_pictures_in_rows_differ_by_any_byte() -> None:
    content = file_of(picture(0, (300, 200)), "BMP")
    other = content[:90_000] + bytes([content[90_000] ^ 1]) + content[90_001:]
    files = PictureFiles("")
    assert files.picture(content).digest != files.picture(other).digest
    assert files.picture(content).digest == files.picture(data_url(content)).digest


# ---------------------------------------------------------------------------------------------- where pictures may be


@pytest.mark.parametrize("start", ["file://", "local://", ""])
def test_pictures_beside_rows_of_an_address_of_this_machine(folder: Path, start: str) -> None:
    (folder / "rows.jsonl").touch()
    (folder / "row").mkdir()
    for source in ("rows.jsonl", "*.jsonl", "row[s].jsonl"):
        files = PictureFiles.beside(f"{start}{folder}/{source}")
        assert files == PictureFiles(str(folder)) and files.picture("0.jpg").width == 90
        for outside in ("file:///etc/hostname", "local:///etc/hostname", "/etc/hostname", "../rows.jsonl"):
            with pytest.raises(RowError, match=r"an address is gs:// or hf://|it is outside of"):
                files.picture(outside)


@pytest.mark.parametrize(
    ("source", "name", "problem"),
    [
        ("https://a.b/c/rows.jsonl", "0.jpg", "images are not fetched from https://a.b/c, where the rows are; copy"),
        ("s3://a/rows.jsonl", "0.jpg", "images are not fetched from s3://a, where the rows are; copy rows and images"),
        ("zip://rows.jsonl::gs://a/b.zip", "0.jpg", "images are not fetched from zip://rows.jsonl::gs://a, where"),
        ("gs://a/b/*.jsonl", "../0.jpg", "it is not in gs://a/b, where the rows are"),
        ("gs://a/b/rows.jsonl", "c::file:/etc/hostname", "it is not in gs://a/b, where the rows are"),
    ],
)
def test_pictures_beside_other_rows_are_refused(source: str, name: str, problem: str) -> None:
    with pytest.raises(RowError, match=f"image .*: {problem}"):
        PictureFiles.beside(source).picture(name)


def test_pictures_below_a_folder_with_a_configuration(models: Callable[[str], ModelConfig], folder: Path) -> None:
    (folder / "train.jsonl").write_text(json.dumps(asked("What?", images=["0.jpg"])) + "\n")
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n")
    made = prepare_with(models("gemma4_unified"), DataConfig(source=f"{folder}:main", eval_rows=0, max_length=512))
    assert made.train.documents.images.pictures.tolist() == [1]


def cut(folder: Path, name: str) -> None:
    """Truncates a picture behind its header."""
    path = folder / name
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) * 2 // 3])


def test_what_only_decoding_shows_carries_no_loss_up_to_a_bound(
    models: Callable[[str], ModelConfig],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cut(folder, "5.jpg")
    rows = [asked("What?", images=[name]) for name in ("0.jpg", "5.jpg")]
    data = prepared(models("gemma4_unified"), folder, rows, packing=False).train
    batch = data.tensors(np.arange(2))
    assert (batch["labels"][0] != IGNORED).any() and (batch["labels"][1] == IGNORED).all()
    assert batch["pixels"][0].any() and not batch["pixels"][1].any()
    said = capsys.readouterr().err
    assert "warning: row 1 of" in said and "image 5.jpg: it cannot be read" in said and "carries no loss" in said
    monkeypatch.setattr(columns, "MOST_BROKEN", 1)
    for _ in range(20):  # epochs
        assert (data.tensors(np.arange(2))["labels"][1] == IGNORED).all()
    assert not capsys.readouterr().err
    cut(folder, "0.jpg")
    with pytest.raises(BatchError, match="2 rows have pictures that cannot be decoded, the last is row 0"):
        data.tensors(np.arange(2))


def test_damaged_pictures_of_held_out_rows_name_their_source(
    models: Callable[[str], ModelConfig], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut(folder, "5.jpg")
    held = folder / "held.jsonl"
    held.write_text(json.dumps(asked("And?", images=["5.jpg"])) + "\n")
    made = prepared(models("gemma4_unified"), folder, [asked("What?", images=["0.jpg"])], eval_source=str(held))
    assert made.eval is not None
    made.eval.tensors(np.array([0]))
    assert f"warning: row 0 of {held}, counted from 0: image 5.jpg" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ files that change


def same_rows(model: ModelConfig, folder: Path) -> Callable[[], Prepared]:
    """Returns a function that prepares the rows of `prepared` again from the same file."""
    config = DataConfig(source=str(folder / "rows.jsonl"), eval_rows=0, max_length=512, think_open="<t>",
                        think_close="</t>")  # fmt: skip
    return lambda: prepare_with(model, config)


def test_tokens_of_pictures_that_changed_are_made_anew(models: Callable[[str], ModelConfig], folder: Path) -> None:
    rows = [asked("What?", images=["0.jpg"]), asked("And?", images=["1.jpg"])]
    before, again = prepared(models("gemma4_unified"), folder, rows), same_rows(models("gemma4_unified"), folder)
    (folder / "0.jpg").write_bytes(file_of(picture(3, (30, 300))))
    after = again()
    assert before.train.documents.images.tokens[0] != after.train.documents.images.tokens[0]
    assert before.fingerprint != after.fingerprint
    (folder / "0.jpg").unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"line 1: image 0\.jpg: no such file"):
            again()
    (folder / "0.jpg").write_bytes(file_of(picture(0, SIZES[0])))
    assert again().fingerprint == before.fingerprint


def test_tokens_of_pictures_that_are_the_same_are_made_once(
    models: Callable[[str], ModelConfig], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [asked("What?", images=["0.jpg"]), asked("And?")]
    first = prepared(models("gemma4_unified"), folder, rows)
    monkeypatch.setattr(tokenizing, "_tokenize_rows", lambda *_, **__: pytest.fail("rows are tokenised again"))
    assert same_rows(models("gemma4_unified"), folder)().fingerprint == first.fingerprint


def test_pictures_of_a_bucket_that_changed_are_seen(bucket: str) -> None:
    files, names = PictureFiles.beside(f"{bucket}/rows.jsonl"), ["a.jpg", "inner/b.jpg"]
    system = fsspec.filesystem("gs")
    for number, name in enumerate(names):
        system.pipe(f"{bucket}/{name}", file_of(picture(number, SIZES[number])))
    found = [files.picture(name) for name in names]
    assert [one.file for one in found] == [f"{bucket}/{name}" for name in names]
    places = [one.file for one in found]
    assert files.stamps(places) == [one.stamp for one in found] and "None" not in found[0].stamp
    system.pipe(places[1], file_of(picture(3, SIZES[1])))
    assert [now == one.stamp for now, one in zip(files.stamps(places), found, strict=True)] == [True, False]
    system.rm(places[0])
    assert files.stamps(places)[0] == ""


def test_pictures_of_other_sizes_than_planned_are_refused_by_name(
    models: Callable[[str], ModelConfig], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = prepared(models("gemma4_unified"), folder, [asked("What?", images=["0.jpg", "1.jpg"])]).train
    (folder / "1.jpg").write_bytes(file_of(picture(3, (60, 30))))
    assert (data.tensors(np.array([0]))["labels"] == IGNORED).all()
    assert "image 1.jpg: it has 60 x 30 pixels, other than when the rows were prepared" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- tokens and pixels


@pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family", ["gemma4", "gemma4_unified", "smolvlm", "idefics3", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "lfm2_vl"]
)
def test_tokens_of_images_of_random_sizes_are_those_of_transformers(
    models: Callable[[str], ModelConfig], family: str, count: int
) -> None:
    tokenizer, config, draw = tokenizer_of(family), (CONFIGS | ALSO)[family](), random.Random(count)
    made, own = processors.image_processor(models(family), tokenizer, DataConfig()), image_processor(config)
    shown = Idefics3Processor(own, tokenizer, made.sizes.tokens) if family in ALSO or family == "smolvlm" else None
    for _ in range(count):
        width, height = (int(math.exp(draw.uniform(0, 6.5))) for _ in range(2))
        image = Image.new("RGB", (width, height))
        if family in GRIDS:
            if max(width, height) / min(width, height) > 200:
                with pytest.raises(RowError, match="cannot be used: absolute aspect ratio must be smaller than 200"):
                    made.tokens(height, width)
                continue
            wanted = int(own(images=[image])["image_grid_thw"].prod()) // 4
            if wanted > made.sizes.tokens:
                with pytest.raises(RowError, match=f"takes {wanted} tokens, more than {made.sizes.tokens}: its sides"):
                    made.tokens(height, width)
                continue
            assert made.tokens(height, width) == ([made.token_id] * wanted, [wanted])
            continue
        if family == "lfm2_vl":
            found = own(images=[image], return_row_col_info=True)
            whole = math.prod(found["image_sizes"][0]) // 64
            if whole > made.sizes.tokens:
                with pytest.raises(RowError, match=f"takes {whole} tokens, more than {made.sizes.tokens}: its sides"):
                    made.tokens(height, width)
                continue
            text = Lfm2Text.replace_image_token(SimpleNamespace(image_processor=own), found, 0)
            ids, counts = made.tokens(height, width)
            assert ids == tokenizer(text, add_special_tokens=False)["input_ids"], (width, height)
            assert counts == [int(one.prod()) // 4 for one in found["spatial_shapes"]]
            continue
        ids, counts = made.tokens(height, width)
        if shown is None:
            (wanted,) = own(images=[image])["num_soft_tokens_per_image"]
            around = tokenizer.convert_tokens_to_ids(["<|image>", "<image|>"])
            assert (ids, counts) == ([around[0], *[made.token_id] * wanted, around[1]], [wanted]), (width, height)
            continue
        found = shown(text=["a\n<image>b"], images=[[image]])
        (text,), (tiles,) = found["input_ids"], found["pixel_values"]
        start = text.index(ids[0])
        assert text[start : start + len(ids)] == ids, (width, height)
        assert len(text) - len(ids) == len(tokenizer("a\nb", add_special_tokens=False)["input_ids"])
        assert counts == [made.sizes.tokens] * len(tiles)


@pytest.mark.parametrize("family", ["gemma4_unified", "smolvlm", "gemma3", "qwen3_5", "lfm2_vl"])
def test_tokens_and_pixels_are_those_of_transformers(models: Callable[[str], ModelConfig], family: str) -> None:
    model, tokenizer = models(family), tokenizer_of(family)
    made, config = processors.image_processor(model, tokenizer, DataConfig()), CONFIGS[family]()
    own = image_processor(config)
    for number, size in enumerate(SIZES):
        image = picture(number, size)
        ids, counts = made.tokens(size[1], size[0])
        pixels, positions = made.pixels(image)
        _, slots = _processed(config, image)
        assert counts == [tokens for *_, tokens in slots]
        assert np.array_equal(pixels, np.stack([one.numpy() for one, *_ in slots]))
        if positions is not None:
            assert np.array_equal(positions, np.stack([one.numpy() for _, one, _ in slots]))
        if family == "smolvlm":
            _, rows, tiles = own.get_number_of_image_patches(size[1], size[0])
            parts = "<fake_token_around_image>", "<image>", "<global-img>"
            text = get_image_prompt_string(rows, tiles, made.sizes.tokens, *parts)
            wanted = tokenizer(f"a\n{text}b", add_special_tokens=False)["input_ids"]
            around = tokenizer("a\n<image>b", add_special_tokens=False)["input_ids"]
            place = around.index(made.token_id)
            assert [*around[:place], *ids, *around[place + 1 :]] == wanted


def test_pixels_of_lfm2_differ_little_from_those_by_torchvision(models: Callable[[str], ModelConfig]) -> None:
    pytest.importorskip("torchvision")
    made = processors.image_processor(models("lfm2_vl"), tokenizer_of("lfm2_vl"), DataConfig())
    images = [picture(number, size) for number, size in enumerate([*SIZES, (300, 200), (640, 480)])]
    ours = made.for_transformers(images, [])
    theirs = lfm2_processor().__bases__[0](**OF_LFM2)(images=images, return_tensors="pt")
    assert all(torch.equal(ours[name], theirs[name]) for name in ("spatial_shapes", "pixel_attention_mask"))
    valid = theirs["pixel_attention_mask"].bool()
    away = (127.5 * (ours["pixel_values"] - theirs["pixel_values"])[valid]).round().abs()
    print(f"{float((away > 0).float().mean()):.2%} of the numbers differ, by {int(away.max())} of 255 at most")
    assert away.max() <= 2 and (away > 0).float().mean() < 0.02


def test_chats_of_gemma3_are_those_of_its_processor(models: Callable[[str], ModelConfig], folder: Path) -> None:
    """Its processor writes line breaks around a picture before tokenisation; tokens may merge them with text."""
    tokenizer = tokenizer_of("gemma3")
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    for name, token in names.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    own = Gemma3Processor(image_processor(CONFIGS["gemma3"]()), tokenizer, image_seq_length=36)
    content = [{"type": "text", "text": "What?"}, {"type": "image"}, {"type": "text", "text": "And here?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}, {"role": "assistant", "content": "red"}], tokenize=False
    )
    wanted = own(text=[text], images=[[Image.open(folder / "0.jpg")]], add_special_tokens=False)["input_ids"][0]
    made = prepared(models("gemma3"), folder, [asked("What?<image>And here?", images=["0.jpg"])]).train
    ids, _ = made.document(0)
    assert ids.tolist() == list(wanted)[: len(ids)] and len(wanted) - len(ids) <= 1  # the break after the last turn
    with pytest.raises(ValueError, match="image_tokens=64: a picture of Gemma 3 takes 36 tokens, whatever its size"):
        processors.image_processor(models("gemma3"), tokenizer, DataConfig(image_tokens=64))


def test_settings_of_processors_that_are_not_computed(models: Callable[[str], ModelConfig], tmp_path: Path) -> None:
    def made(family: str, **settings: Any) -> Any:
        folder = tmp_path / family
        shutil.copytree(models(family).name, folder, dirs_exist_ok=True)
        (folder / "preprocessor_config.json").write_text(json.dumps(settings_of(family) | settings))
        model = ModelConfig(name=str(folder), base_dtype="fp32", images=True)
        return processors.image_processor(model, tokenizer_of(family), DataConfig(image_tokens=settings.get("tokens")))

    with pytest.raises(ValueError, match=r"image_mean=\[0, 0, 0\], but images of qwen3_5 are computed with \[0.5, 0.5"):
        made("qwen3_5", image_mean=[0, 0, 0])
    with pytest.raises(ValueError, match=r"makes images of 1024 tokens, but memory is planned for 256; lower max"):
        made("lfm2_vl", max_image_tokens=1024)
    with pytest.raises(ValueError, match=r"image_mean=\[0, 0, 0\], but images of smolvlm are computed with \[0.5, 0.5"):
        made("smolvlm", image_mean=[0, 0, 0])
    with pytest.raises(ValueError, match=r"cuts pictures \(do_pan_and_scan\), which is not trained; set it to false"):
        made("gemma3", do_pan_and_scan=True)
    with pytest.raises(ValueError, match=r"image_tokens=8: a picture of .* takes 16 to 70 tokens at most"):
        made("qwen3_5", tokens=8)


def test_patches_that_do_not_fill_a_tile(models: Callable[[str], ModelConfig]) -> None:
    """transformers' convolution leaves out the last pixels of sizes such as SmolVLM2-2.2B's."""
    made = processors.image_processor(models("smolvlm"), tokenizer_of("smolvlm"), DataConfig())
    assert isinstance(made, processors.Idefics3)
    odd = replace(made, patch=9, sizes=processors.Sizes(9, 243, 1, False))
    image = picture(0, (32, 32))
    settings = {**made.settings, "do_image_splitting": False}
    (pixels,), _ = replace(odd, settings=settings).pixels(image)
    whole, _ = replace(made, patch=1, sizes=processors.Sizes(32 * 32, 3, 1, False), settings=settings).pixels(image)
    expected = whole.reshape(32, 32, 3)[:27, :27].reshape(3, 9, 3, 9, 3).transpose(0, 2, 1, 3, 4).reshape(9, 243)
    assert np.array_equal(pixels, expected)


def test_the_resolution_of_images(models: Callable[[str], ModelConfig]) -> None:
    def of(family: str, tokens: int) -> processors.ImageProcessor:
        return processors.image_processor(models(family), tokenizer_of(family), DataConfig(image_tokens=tokens))

    assert of("gemma4_unified", 280).sizes.tokens == 280
    with pytest.raises(ValueError, match="image_tokens=100: Gemma 4 takes 70, 140, 280, 560, 1120; set one of these"):
        of("gemma4_unified", 100)
    tile = settings_of("smolvlm")["max_image_size"]["longest_edge"]
    assert of("smolvlm", 4).tokens(5 * tile, 3 * tile)[1] == [4]
    assert sum(of("smolvlm", 4 * 10).tokens(5 * tile, 5 * tile)[1]) == 4 * 10
    whole, cut = of("lfm2_vl", 32), of("lfm2_vl", TOKENS + 3 * 64)
    assert whole.sizes.tokens == 32 and all(len(whole.tokens(*size)[1]) == 1 for size in ((60, 140), (400, 300)))
    assert 16 <= whole.tokens(60, 140)[1][0] <= 32 and cut.tokens(100, 300)[1][:-1] == [64] * 3
    with pytest.raises(ValueError, match="image_tokens=3: a tile has 4 tokens; set at least that, or null"):
        of("smolvlm", 3)


def test_other_families_are_refused_before_the_files_of_their_processors_are_read(tmp_path: Path) -> None:
    PaliGemmaConfig().save_pretrained(tmp_path)
    model = ModelConfig(name=str(tmp_path), images=True)
    with pytest.raises(ValueError, match="images of paligemma are not trained; these families are: gemma3, gemma4"):
        processors.image_processor(model, tokenizer_of("gemma4"), DataConfig())


def test_a_model_without_images_is_refused(models: Callable[[str], ModelConfig]) -> None:
    with pytest.raises(ValueError, match=r"model\.images=true: embedded has no vision part; set it to false"):
        processors.image_processor(ModelConfig(images=True), tokenizer_of("gemma4"), DataConfig())
    name = models("gemma4_unified").name
    settings = Path(name, "preprocessor_config.json")
    kept = settings.read_text()
    settings.unlink()
    try:
        with pytest.raises(ValueError, match=r"the settings of its image processor .* cannot be read; add the file"):
            processors.image_processor(ModelConfig(name=name, images=True), tokenizer_of("gemma4"), DataConfig())
    finally:
        settings.write_text(kept)


# ------------------------------------------------------------------------------------------------- packing and batches


def test_packing_with_images() -> None:
    generator = np.random.default_rng(0)
    images = generator.choice([0, 1, 2, 3], 3_000, p=[0.2, 0.6, 0.15, 0.05])
    lengths = np.minimum(
        generator.integers(30, 400, len(images)) + images * generator.integers(200, 283, len(images)), 2048
    )
    most = fewest_images(lengths, images, 2048, 3)
    whole = len(best_fill(lengths, 2048)[1])
    for room, enough in ((most, True), (most - 1, False)):
        order, counts = best_fill_of_images(lengths, images, 2048, room)
        starts = np.r_[0, np.cumsum(counts)[:-1]]
        assert np.add.reduceat(lengths[order], starts).max() <= 2048
        assert np.add.reduceat(images[order], starts).max() <= room
        assert (0.98 * len(counts) <= whole) == enough


def test_batches_hold_what_documents_hold_alone(
    models: Callable[[str], ModelConfig], family: str, folder: Path
) -> None:
    rows = [asked(f"What {number}?", images=[f"{number % 7}.jpg"] * (number % 3)) for number in range(12)]
    packed = prepared(models(family), folder, rows, max_length=700)
    alone = prepared(models(family), folder, rows, max_length=700, packing=False).train
    data, most = packed.train, alone.further._processor.sizes.tokens
    single = {int(row): alone.tensors(np.array([number])) for number, row in enumerate(alone.documents.source_rows)}
    assert packed.report.images.room == data.further.room
    batch = data.tensors(np.arange(len(data)))
    seen = 0
    for row in range(len(data)):
        end = slot = 0
        for number in data.documents_of(row):
            own = single[int(data.documents.source_rows[number])]
            length, slots = int(data.documents.lengths[number]), int(data.documents.images.slots[number])
            index = batch["image_index"][row, end : end + length]
            assert torch.equal(torch.where(index >= 0, index - slot * most, -1), own["image_index"][0, :length])
            assert torch.equal(batch["pixels"][row, slot : slot + slots], own["pixels"][0, :slots])
            end, slot, seen = end + length, slot + slots, seen + 1
        assert not batch["pixels"][row, slot:].any() and (batch["image_index"][row, end:] == -1).all()
    assert seen == 12


def test_a_mix_has_the_pictures_of_each_source(models: Callable[[str], ModelConfig], folder: Path) -> None:
    """Each source finds pictures in its own folder; one source has no pictures."""
    rows = [asked(f"What {number}?", images=[f"{number % 7}.jpg"] * (number % 3)) for number in range(12)]
    whole = prepared(models("smolvlm"), folder, rows, max_length=700, eval_rows=3)
    (folder / "other").mkdir()
    for number in range(7):
        (folder / "other" / f"{number}.jpg").write_bytes((folder / f"{number}.jpg").read_bytes())
    parts = [folder / "first.jsonl", folder / "other" / "second.jsonl"]
    for path, part in zip(parts, (rows[:5], rows[5:]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    section = DataConfig(eval_rows=3, max_length=700, think_open="<t>", think_close="</t>",
                         source=tuple(DataSource(source=str(path)) for path in parts))  # fmt: skip
    mix = prepare_with(models("smolvlm"), section)
    assert mix.fingerprint == whole.fingerprint and len(whole.train) == len(mix.train)
    batches = [one.train.tensors(np.arange(len(one.train))) for one in (whole, pickle.loads(pickle.dumps(mix)))]
    assert batches[0].keys() == batches[1].keys()
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])
    assert [image.size for image in mix.pictures(2)] == [image.size for image in whole.pictures(2)]
    assert mix.eval_prompt_ids == whole.eval_prompt_ids


def test_data_for_other_processes_is_the_same(models: Callable[[str], ModelConfig], folder: Path) -> None:
    made = prepared(models("gemma4_unified"), folder, [asked("What?", images=["0.jpg"])] * 3)
    with on_disk(made) as data:
        other = pickle.loads(pickle.dumps(data)).read()
        for name, one in made.train.tensors(np.array([0])).items():
            assert torch.equal(one, other.train.tensors(np.array([0]))[name])


def test_another_picture_is_another_question_and_another_fingerprint(
    models: Callable[[str], ModelConfig], folder: Path
) -> None:
    model = models("gemma4_unified")
    rows = [asked("What?", images=[f"{number}.jpg"]) for number in range(4)]
    made = prepared(model, folder, rows, eval_rows=1)
    assert made.report.rows_used == 3 and made.eval_report and made.eval_report.rows_used == 1
    with pytest.raises(ValueError, match=r"1 different questions|all rows ask the same question"):
        prepared(model, folder, [rows[0]] * 3, eval_rows=1)
    first, other = (prepared(model, folder, [asked("What?", images=[name])]) for name in ("0.jpg", "4.jpg"))
    assert first.fingerprint != other.fingerprint
    assert first.fingerprint == prepared(model, folder, [asked("What?", images=["0.jpg"])]).fingerprint


def test_too_long_documents_with_images_are_dropped_whole(models: Callable[[str], ModelConfig], folder: Path) -> None:
    rows = [asked("What?", images=["0.jpg"]), asked("And? " * 20, images=["1.jpg"]), asked("Text?", "word " * 90)]
    made = prepared(models("gemma4_unified"), folder, rows, max_length=110)
    assert made.report.dropped_too_long == 1 and made.report.truncated == 1 and made.report.images.dropped == 1
    with pytest.raises(ValueError, match=r"2 rows have more than data.max_length=110 tokens"):
        prepared(models("gemma4_unified"), folder, rows, max_length=110, too_long="error")


def test_the_report_and_the_limit_of_images(models: Callable[[str], ModelConfig], folder: Path) -> None:
    model = models("smolvlm")
    rows = [asked("What?", images=["5.jpg", "0.jpg"]), asked("And?", images=["3.jpg"]), asked("Text?")]
    made = prepared(model, folder, rows)
    lines = str(made.report).splitlines()
    images = made.report.images
    assert f"images           3 in {images.slots} tiles in 2 documents, {images.tokens} tokens" in lines[-2]
    assert lines[-1].startswith(f"images of a row  {images.room} at most (images_per_row), ")
    with pytest.raises(ValueError, match=r"images_per_row=4: row 0 of .* has \d+ images or tiles; raise it"):
        prepared(model, folder, rows, images_per_row=4)
    assert prepared(model, folder, rows, images_per_row=30).report.images.room == 30


def test_1000_images_have_the_tokens_and_nearly_the_numbers_of_the_processor_of_torchvision(
    models: Callable[[str], ModelConfig],
) -> None:
    """The unified model's own processor needs torchvision, which rounds differently from PIL when it resizes."""
    pytest.importorskip("torchvision")
    from transformers import Gemma4UnifiedImageProcessor

    made = processors.image_processor(models("gemma4_unified"), tokenizer_of("gemma4_unified"), DataConfig())
    own = Gemma4UnifiedImageProcessor(patch_size=4, pooling_kernel_size=3, max_soft_tokens=TOKENS)
    generator, others, largest = np.random.default_rng(0), list[float](), 0.0
    for number in range(1_000):
        image = picture(number, tuple(generator.integers(1, 400, 2).tolist()))
        found = own(images=[image], return_tensors="pt")
        (count,) = made.tokens(image.height, image.width)[1]
        assert count == int(found["num_soft_tokens_per_image"][0])
        if number % 20 == 0:
            pixels, positions = made.pixels(image)
            assert positions is not None and np.array_equal(positions[0], found["image_position_ids"][0])
            difference = np.abs(pixels[0].astype(float) - 255 * found["pixel_values"][0].numpy())
            others.append(float((difference > 0.5).mean()))
            largest = max(largest, float(difference.max()))
    print(f"{np.mean(others):.2%} of the numbers differ, by {largest:.1f} of 255 at most")
    assert np.mean(others) < 0.03 and largest < 2.5
