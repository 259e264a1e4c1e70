"""Writes the vision part of a GGUF export, llama.cpp's second file (mmproj), and compares it with the model.

A new process, `python -m tpu_kit.exporting.projector JOB.json RESULT`, reads the file with llama.cpp's gguf library, or
asks llama.cpp about pictures.
"""

from __future__ import annotations

import base64
import importlib
import json
import math
import os
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tpu_kit.exporting.converter import convert_model
from tpu_kit.exporting.equivalence import (
    GREEDY,
    NEW,
    SECONDS,
    Answer,
    LogitComparison,
    answer_of,
    compare_answers,
    in_child,
    llama_cpp,
)
from tpu_kit.exporting.formats import copy_processor
from tpu_kit.exporting.tuned_model import TunedModel, accept
from tpu_kit.model.base_model import base_model

_OF_IMAGES = re.compile(r"vision|connector")  # in the names of weights of the vision part
_OF_SOUND = re.compile(r"(mm\.)?a\.")  # prefix of the audio part's names in the file
ROUNDED = {"F32": 1e-7, "F16": 2.0**-11, "BF16": 2.0**-8}
"""The largest relative rounding error of a weight, by the type in the file."""
_SMALLEST = 2.0**-25  # absolute error of f16's subnormal numbers
_QUESTION = "What is it?"
PICTURES = "bf16"
"""The key in `equivalence.LIMITS` for comparisons with pictures: a vision tower amplifies rounding.

In f16, the largest difference was 0.13 standard deviations for a tiny Gemma 4 with a tower, and 0.02 for a SmolVLM."""
WRITTEN = ("gemma4", "gemma4_unified", "idefics3", "smolvlm")
"""The families whose vision part is exported."""
_SIDE = 512  # pixels of a picture's side, if the processor has no size
_PLACE = "<__media__>"  # marks a picture in a prompt of llama.cpp


class Projector(NamedTuple):
    """A written vision part.

    Attributes:
        file: the GGUF file.
        note: the result of the comparison, as a text.
    """

    file: Path
    note: str


def refuse(tuned: TunedModel, compares: bool) -> None:
    """Raises ValueError if the vision part of the run's model cannot be exported; returns nothing.

    It refuses families that are not in `WRITTEN`, and models of Gemma 4 unified without an audio part. `compares` is
    whether llama.cpp is installed; if False, it refuses all models of Gemma 4, because llama.cpp computed other
    log-probabilities for small random models, even for text.
    """
    settings = base_model(tuned.model).config
    if settings.model_type not in WRITTEN:
        raise ValueError(
            f"llama.cpp was not compared with vision models of {settings.model_type}: use format=merged "
            f"(transformers) or format=vllm; the vision part is exported for {', '.join(WRITTEN)}"
        )
    if settings.model_type == "gemma4_unified" and settings.audio_config is None:
        raise ValueError(
            f"llama.cpp's converter writes the vision part of Gemma 4 unified only together with an audio part, and "
            f"{Path(tuned.config.model.name).name} has none: use format=merged (transformers) or format=vllm"
        )
    if settings.model_type.startswith("gemma4") and not compares:
        raise ValueError(
            "llama.cpp has answered otherwise than models of Gemma 4, so such an export is written only if it can be "
            "compared: pip install xllamacpp, and export again; or use format=merged (transformers) or format=vllm"
        )


def complete_settings(folder: Path) -> None:
    """Adds settings to text_config of config.json in `folder` that the converter expects and transformers may not save.

    They are architectures for SmolVLM and Idefics3, and moe_intermediate_size for Gemma 4 unified. Set values stay, and
    other families get none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    settings = json.loads((folder / "config.json").read_text())
    text = settings["text_config"]
    if settings["model_type"] in ("smolvlm", "idefics3"):  # the converter needs the language model's class
        text.setdefault("architectures", [CLASSES[text["model_type"]]])
    elif settings["model_type"] == "gemma4_unified":
        text.setdefault("moe_intermediate_size", None)
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True))


def write(tuned: TunedModel, folder: Path, outtype: str, tools: Path) -> Projector:
    """Writes the vision part as `mmproj-<served_name>-<type>.gguf` in `tuned.part`, and compares its weights.

    Args:
        tuned: the model, of a run with images.
        folder: folder of the merged model in fp32, whose weights are compared; receives the files of the processor.
        outtype: type of the language model and the vision part: f16, bf16 or q8_0; with q8_0, the vision part is in
            f16.
        tools: the folder of `converter`.

    Raises:
        ValueError: the processor's files are not at hand, the converter refuses the model, or the weights differ.
    """
    if unfetched := copy_processor(tuned.config.model, folder):
        raise ValueError(f"{unfetched[0].partition(':')[0]}: the export needs them; run this with a network")
    kind = "f16" if outtype == "q8_0" else outtype
    target = tuned.part / f"mmproj-{tuned.config.served_name}-{kind}.gguf"
    _keep_tiles(tuned, folder)
    convert_model(folder, target, kind, tools, projector=True)
    paths = os.pathsep.join([str(tools / "gguf-py"), *filter(None, [os.environ.get("PYTHONPATH")])])
    job = {"projector": str(target), "folder": str(folder)}
    found = in_child(job, __name__, {"PYTHONPATH": paths})
    if found["odd"] or found["missing"]:
        odd = ", ".join([*found["odd"], *found["missing"]][:5])
        raise ValueError(
            f"{target.name} does not have the weights of the model's vision part ({odd}): the export was removed; "
            "use format=merged" + (", or gguf-bf16 if a weight is too large for f16" if kind == "f16" else "")
        )
    return Projector(
        target,
        f"the {found['weights']} tensors of {target.name} have the values of the model's vision part, up to "
        f"{found['largest']:.1e} of a tensor's largest value",
    )


def _keep_tiles(tuned: TunedModel, folder: Path) -> None:
    """Writes the size to which training scaled pictures before tiling into the processor's files; not for Gemma 4."""
    if _most_tokens(tuned) or not (size := _processor(tuned).settings.get("size")):
        return
    for path in (folder / "preprocessor_config.json", folder / "processor_config.json"):
        if path.is_file():
            given = json.loads(path.read_text())
            given.get("image_processor", given)["size"] = dict(size)
            path.write_text(json.dumps(given))


def without_pictures(tuned: TunedModel) -> list[Any]:
    """Returns the token ids of the run's questions as chats without pictures."""
    from tpu_kit.data.images.chats import encode

    chats = [[{"role": "user", "content": text}] for text in tuned.texts]
    return encode(tuned.config, tuned.tokenizer, chats)


def server_options(tuned: TunedModel, file: str) -> str:
    """Returns the options of llama-server for the file of the vision part and the image tokens of training."""
    tokens = _most_tokens(tuned)
    return f" --mmproj {file}" + (f" --image-min-tokens {tokens} --image-max-tokens {tokens}" if tokens else "")


def _most_tokens(tuned: TunedModel) -> int | None:
    """Returns the maximum tokens of a picture if they depend on its size; None for models with tiles."""
    from tpu_kit.data.images.processors import Gemma4

    processor = _processor(tuned)
    return processor.sizes.tokens if isinstance(processor, Gemma4) else None


def _processor(tuned: TunedModel) -> Any:
    """Returns the `ImageProcessor` of the run."""
    from tpu_kit.data.images.processors import image_processor

    return image_processor(tuned.config.model, tuned.tokenizer, tuned.config.data)


def compare_pictures(tuned: TunedModel, model: Path, projector: Path) -> tuple[list[LogitComparison], list[str]]:
    """Compares llama.cpp's answers about drawn pictures with the tuned model's; needs xllamacpp.

    Args:
        tuned: the merged model.
        model: the language model's file.
        projector: the vision part's file.

    Returns:
        ([comparison], []); or ([], [note]) if llama.cpp and the run count different tokens in a prompt.

    Raises:
        ValueError: the answers differ by more than the limits for `PICTURES`, or as `in_child`.
    """
    from tpu_kit.data.images.chats import carried, encode
    from tpu_kit.data.images.prompts import png

    pictures = _pictures(tuned)
    asked = [{"messages": [{"role": "user", "content": _QUESTION}], "images": [picture]} for picture in pictures]
    prompts = encode(tuned.config, tuned.tokenizer, [*map(carried, asked)])
    said = _text(tuned, list(prompts[0]), pictures[0].size)
    job = {
        "gguf": str(model.absolute()), "projector": str(projector.absolute()), "image_tokens": _most_tokens(tuned),
        "texts": [said, said.removeprefix(tuned.tokenizer.bos_token or "")],  # llama.cpp adds bos for some families
        "pictures": [base64.b64encode(png(picture)).decode() for picture in pictures],
        "context": 2 * max(map(len, prompts)) + 2 * NEW,
    }  # fmt: skip
    variables = {"LLAMA_MEDIA_MARKER": _PLACE}  # random by default
    answers, counts = list[Answer](), set[int]()
    for ids, tried in zip(prompts, in_child(job, __name__, variables), strict=True):
        counts |= {count for _, count in tried}
        answers += [answer for answer, count in tried if count == len(ids)][:1]
    if len(answers) < len(prompts):
        made = " or ".join(map(str, sorted(counts)))
        return [], [
            f"not compared with pictures: llama.cpp makes {made} tokens of a prompt with {len(prompts[0])} tokens"
        ]
    by = "llama.cpp, with pictures"
    return [accept(compare_answers(tuned.model, prompts, answers, tuned.effect, PICTURES, by))], []


def _text(tuned: TunedModel, ids: list[int], size: tuple[int, int]) -> str:
    """Returns the text of `ids` with `_PLACE` instead of the picture's tokens, which llama.cpp makes itself.

    `size` is the picture's (width, height) in pixels.
    """
    width, height = size
    tokens, _ = _processor(tuned).tokens(height, width)
    start = next(at for at in range(len(ids)) if ids[at : at + len(tokens)] == tokens)
    parts = ids[:start], ids[start + len(tokens) :]
    return _PLACE.join(tuned.tokenizer.decode(part, clean_up_tokenization_spaces=False) for part in parts)


def _pictures(tuned: TunedModel) -> list[Any]:
    """Draws three PIL pictures, smooth and of a size that needs little scaling, as the programs' filters differ."""
    from PIL import Image

    processor, tokens = _processor(tuned), _most_tokens(tuned)
    if tokens:
        side = processor.patch * processor.pool * math.isqrt(tokens)
    else:
        side = processor.settings.get("size", {}).get("longest_edge") or _SIDE
    rise = np.linspace(20, 235, side)
    across, down = np.broadcast_to(rise, (side, side)), np.broadcast_to(rise[::-1, None], (side, side))
    channels = [across, down, (across + down) / 2]
    return [
        Image.fromarray(np.stack([*channels[turned:], *channels[:turned]], -1).astype(np.uint8)) for turned in range(3)
    ]


# ---------------------------------------------------------------------------------------------------- in the child


def _compared(job: dict[str, Any]) -> dict[str, Any]:
    """Matches the tensors of the GGUF file "projector" with the weights in "folder" by their sorted values.

    Names do not match, because the converter renames tensors and transposes some. Rounding keeps the sorted order.
    Returns the unmatched names of the file ("odd") and the model ("missing"), the largest relative difference
    ("largest"), and the number of the file's tensors without audio ("weights").
    """
    from safetensors import safe_open

    gguf = importlib.import_module("gguf")  # llama.cpp's own
    left: dict[str, np.ndarray] = {}
    for path in sorted(Path(job["folder"]).glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            names = filter(_OF_IMAGES.search, file.keys())
            left |= {name: np.sort(file.get_tensor(name), axis=None) for name in names}
    odd, largest, count = list[str](), 0.0, 0
    for tensor in gguf.GGUFReader(job["projector"]).tensors:
        if _OF_SOUND.match(tensor.name):
            continue
        count += 1
        values = np.sort(gguf.quants.dequantize(tensor.data, tensor.tensor_type), axis=None)
        bound = ROUNDED[tensor.tensor_type.name]
        for name, own in left.items():
            if own.size == values.size and (np.abs(values - own) <= bound * np.abs(own) + _SMALLEST).all():
                largest = max(largest, float(np.abs(values - own).max() / max(np.abs(own).max(), _SMALLEST)))
                del left[name]
                break
        else:
            odd.append(tensor.name)
    return {"odd": odd, "missing": [*left], "largest": largest, "weights": count}


def _asked(job: dict[str, Any]) -> list[list[tuple[Answer, int]]]:
    """Returns, by picture and distinct text, llama.cpp's greedy answer and the number of prompt tokens.

    A job has the entries for `llama_cpp`, its "context", "texts" with `_PLACE`, and "pictures" as PNG in base64. Only
    llama.cpp's own HTTP interface takes pictures beside the text of a prompt.
    """
    server = llama_cpp(job, job["context"])
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy: the server is on this computer

    def answer(text: str, picture: str) -> tuple[Answer, int]:
        order = json.dumps({"prompt": {"prompt_string": text, "multimodal_data": [picture]}, **GREEDY}).encode()
        place, kind = f"{server.listening_address}/completion", {"Content-Type": "application/json"}
        with opener.open(urllib.request.Request(place, order, kind), timeout=SECONDS) as reply:
            said = json.load(reply)
        return answer_of(said["completion_probabilities"]), said["tokens_evaluated"]

    return [[answer(text, picture) for text in dict.fromkeys(job["texts"])] for picture in job["pictures"]]


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.save(_compared(job) if "folder" in job else _asked(job), sys.argv[2])
