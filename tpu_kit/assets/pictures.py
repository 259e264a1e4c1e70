"""The embedded task for vision models: coloured shapes to name and to count, and a tiny model, made in seconds.

`model.name=embedded-images data.source=embedded-images` trains on pictures without a download. Code draws the pictures
and makes the model from a seed: a Gemma 4 unified model with 0.4 million random weights, so that it learns only in its
adapters. The two splits have no picture in common.
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

NAME = "embedded-images"
ROWS = {"train": 1200, "eval": 200}
"""Split -> number of rows."""
COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 220), "yellow": (220, 210, 50)}
SHAPES = ("circle", "square")
MOST = 3
"""Largest number of shapes in a picture."""
KINDS = ("colour", "shape", "count")

_SPECIAL = ("<pad>", "<eos>", "<bos>", "<|image|>", "<|image>", "<image|>", "<|turn>", "<turn|>")
_TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<|turn>' + m['role'] + '\n' }}{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{{ '<|image|>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endif %}{{ '<turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>assistant\n' }}{% endif %}"
)
_TOKENS = 70  # most tokens of a picture; Gemma 4 allows no smaller limit


class Task(NamedTuple):
    """A picture with a question about it.

    Attributes:
        image: an RGB image of PIL.
        question: a question about it.
        answer: a colour, a shape, or a count from "1" to "3".
        kind: an item of `KINDS`.
    """

    image: Image
    question: str
    answer: str
    kind: str


def task(number: int, split: str = "train", seed: int = 0) -> Task:
    """Draws row `number` (from 0) of a split, "train", "eval" or any other text; the same arguments give the same task.

    The picture shows a circle or a square, and the question is about its colour or shape; or it shows one to three
    equal shapes to count. `ROWS` does not limit `number`, and another `seed` gives other tasks.
    """
    draw = random.Random(f"{split} {seed} {number}")
    kind = draw.choice(KINDS)
    count = draw.randint(1, MOST) if kind == "count" else 1
    shape, colour = draw.choice(SHAPES), draw.choice(tuple(COLOURS))
    image = _picture(draw, shape, colour, count)
    questions = {
        "colour": (f"What colour is the {shape}?", colour), "shape": (f"What shape is {colour}?", shape),
        "count": ("How many shapes?", str(count)),
    }  # fmt: skip
    return Task(image, *questions[kind], kind)


def _picture(draw: random.Random, shape: str, colour: str, count: int) -> Image:
    """Draws `count` shapes of a colour side by side on grey noise, 48 to 96 pixels high and 48 to 144 wide.

    `shape` is in `SHAPES`, `colour` in `COLOURS`, `count` is 1 to `MOST`; `draw` sets size, places and tints.
    """
    import numpy as np
    from PIL import Image, ImageDraw

    height, width = draw.randint(48, 96), draw.randint(48, 96) + 24 * (count - 1)
    noise = np.random.default_rng(draw.getrandbits(32)).normal(128, 12, (height, width, 3))
    image = Image.fromarray(noise.clip(0, 255).astype(np.uint8))
    pen, room = ImageDraw.Draw(image), width // count
    for place in range(count):
        side = int(min(room, height) * draw.uniform(0.5, 0.8))
        x = place * room + draw.randint(0, room - side)
        y = draw.randint(0, height - side)
        tint = tuple(max(0, min(255, value + draw.randint(-25, 25))) for value in COLOURS[colour])
        (pen.ellipse if shape == "circle" else pen.rectangle)([x, y, x + side - 1, y + side - 1], fill=tint)
    return image


def rows(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Returns tasks 0 to `count` - 1 as rows: "image" ({"bytes": PNG, "path": None}), "question", "answer", "kind"."""
    made = []
    for number in range(count):
        one = task(number, split, seed)
        buffer = io.BytesIO()
        one.image.save(buffer, "PNG")
        image = {"bytes": buffer.getvalue(), "path": None}
        made.append({"image": image, "question": one.question, "answer": one.answer, "kind": one.kind})
    return made


def make_model(folder: Path) -> None:
    """Writes the fp32 model, tokenizer and preprocessor_config.json, always the same, to a folder, made if absent."""
    import torch
    from transformers import AutoModelForImageTextToText, Gemma4UnifiedConfig

    tokenizer = _tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in _SPECIAL}
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma4UnifiedConfig(
        text_config={
            "num_hidden_layers": len(kinds), "layer_types": kinds, "hidden_size": 64, "head_dim": 16,
            "global_head_dim": 32, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": len(tokenizer), "sliding_window": 128, "final_logit_softcapping": 30.0,
            "max_position_embeddings": 4096, "use_bidirectional_attention": "vision", "pad_token_id": ids["<pad>"],
            "eos_token_id": ids["<turn|>"], "bos_token_id": ids["<bos>"],
        },
        vision_config={
            "patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 48, "mm_posemb_size": 80, "output_proj_dims": 48,
        },
        audio_config=None, image_token_id=ids["<|image|>"], boi_token_id=ids["<|image>"],
        eoi_token_id=ids["<image|>"], tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("pos_embedding"):
                parameter.normal_(std=0.02)  # transformers' initial ones would dominate the pixels
            elif name.endswith(("embed_tokens.weight", "embedding_projection.weight")):
                parameter.normal_(std=0.2)  # a tied head of width 64 must separate tokens
            elif parameter.dim() == 2 and "language_model.layers" in name:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {
        "image_processor_type": "Gemma4UnifiedImageProcessor", "patch_size": 4, "pooling_kernel_size": 3,
        "max_soft_tokens": _TOKENS,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = [*COLOURS, *SHAPES, *map(str, range(1, MOST + 1)), "user", "assistant", "shapes"]
    corpus = [f"What colour is the {shape}? What shape is {colour}? How many shapes?" for shape in SHAPES
              for colour in COLOURS] + words  # fmt: skip
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=list(_SPECIAL))
    backend.train_from_iterator(corpus * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<turn|>", bos_token="<bos>"
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def model_dir(cache: Path = Path("~/.cache/tpu_kit")) -> Path:
    """Returns the model's folder in `cache`, embedded-images-HASH, which `make_model` writes if it is absent.

    HASH is of this module's source and the versions of transformers and tokenizers. `cache` is made if absent; a ~ at
    its beginning is the home.
    """
    import hashlib
    import shutil
    import tempfile
    from importlib.metadata import version

    parts = [Path(__file__).read_text(), version("transformers"), version("tokenizers")]
    name = hashlib.blake2b("".join(parts).encode(), digest_size=8).hexdigest()
    folder = cache.expanduser() / f"{NAME}-{name}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as part:
            make_model(Path(part))
            try:
                Path(part).rename(folder)
            except OSError:  # another process made it first
                shutil.rmtree(part, ignore_errors=True)
            Path(part).mkdir(exist_ok=True)  # the context manager removes it
    return folder
