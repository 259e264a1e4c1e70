"""Whole models for images in folders: random weights, a tokenizer with image tokens, and a processor's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.vision_functions import ALSO, CONFIGS, TOKENS, build

GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<|turn>' + m['role'] + '\n' }}{% if m['content'] is string %}"
    "{{ m['content'] | trim }}{% else %}{% for p in m['content'] %}"
    "{{ '<|image|>' if p['type'] == 'image' else p['text'] | trim }}{% endfor %}{% endif %}{{ '<turn|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
SMOL = (  # SmolVLM's own, which takes parts alone
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == "
    "'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
GEMMA_TOKENS = ["<pad>", "<eos>", "<bos>", "<|image|>", "<|image>", "<image|>", "<|turn>", "<turn|>"]
_IN_TILES = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}
SMOL_TOKENS = [
    "<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]  # fmt: skip


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """Makes a tokenizer with the image tokens and the chat template of a family."""
    if family in _IN_TILES:
        return tiny_tokenizer(SMOL, special=SMOL_TOKENS, eos="<end_of_utterance>")
    return tiny_tokenizer(GEMMA, special=GEMMA_TOKENS, eos="<turn|>")


def settings_of(family: str) -> dict[str, Any]:
    """Returns the settings of the family's image processor."""
    if family in _IN_TILES:
        return {
            "image_processor_type": f"{_IN_TILES[family]}ImageProcessor", "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32}, "do_image_splitting": True, "resample": 1,
        }  # fmt: skip
    name = "Gemma4UnifiedImageProcessor" if family == "gemma4_unified" else "Gemma4ImageProcessor"
    return {"image_processor_type": name, "patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": TOKENS}


def save_model(folder: Path, family: str, **text: Any) -> Path:
    """Saves a tiny model of a family with all that training reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, config = tokenizer_of(family), (CONFIGS | ALSO)[family]()
    vocabulary = len(tokenizer)
    part = config.get_text_config()
    for name, value in {"vocab_size": vocabulary, **text}.items():
        setattr(part, name, value)
    if hasattr(part, "vocab_size_per_layer_input"):
        part.vocab_size_per_layer_input = vocabulary
    ids = tokenizer.convert_tokens_to_ids
    config.image_token_id = ids("<image>" if family in _IN_TILES else "<|image|>")
    if family not in _IN_TILES:
        config.boi_token_id, config.eoi_token_id = ids("<|image>"), ids("<image|>")
    part.eos_token_id, part.bos_token_id, part.pad_token_id = tokenizer.eos_token_id, 0, 0
    build(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings_of(family)))
    return folder
