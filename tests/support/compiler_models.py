"""Models described only by a config.json, for the tests of the compiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
SMOLLM2_135M = TINY | {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100000.0,
}  # fmt: skip
QWEN2_500M = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
    "rope_theta": 1000000.0,
}  # fmt: skip
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_theta": 500000.0,
}  # fmt: skip


def cache_bytes_per_token(config: Any, element_bytes: int) -> int:
    """Returns the bytes of a token's keys and values in all layers, for one row of the KV cache."""
    size = config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * size * element_bytes)


def write_config(folder: Path, shape: dict[str, Any], **changes: Any) -> Path:
    """Writes a model's config.json and returns its folder; a change to None removes the field."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in (shape | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return folder
