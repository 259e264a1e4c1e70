from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4Config, Gemma4TextConfig, Gemma4VisionConfig, LlamaConfig

from tests.support.quantize_functions import dequantized
from tpu_kit.assets import embedded
from tpu_kit.config.loader import LoraConfig, ModelConfig
from tpu_kit.model import attention
from tpu_kit.model.base_model import check_vocabulary
from tpu_kit.model.causal_lm import compute_dtype, hidden_states, logits
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.model.trainable import load_model
from tpu_kit.model.weights.loading import load_base
from tpu_kit.model.weights.source import load_tokenizer, read_config, settings_of, shipped_shapes

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=67, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LORA = LoraConfig(r=4, alpha=8.0)
IDS = torch.randint(3, 67, (2, 20), generator=torch.Generator().manual_seed(3))


def original():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    original().save_pretrained(folder)
    return folder


def test_a_git_lfs_pointer_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ValueError, match=r"only a git-lfs pointer is there in place of model.safetensors: run `git"):
        load_base(ModelConfig(name=str(tmp_path)), torch.float32)


def test_the_embedded_model_loads_with_its_tokenizer():
    config = ModelConfig()
    model, tokenizer = load_model(config, LoraConfig()), load_tokenizer(config)
    assert len(tokenizer) == model.get_input_embeddings().weight.shape[0]
    assert model.training and compute_dtype(model) == torch.bfloat16
    row = embedded.cot_rows("train", 1)[0]
    messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
    ids = torch.tensor([tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)])
    loss = model(input_ids=ids, labels=ids).loss
    assert loss < 0.5 * math.log(len(tokenizer))  # it is better than chance


@pytest.mark.parametrize(("r", "dtype"), [(0, torch.float32), (4, torch.bfloat16)])
def test_a_folder_loads_in_the_dtype_that_training_needs(saved, r, dtype):
    model = load_model(ModelConfig(name=str(saved)), LoraConfig(r=r))
    base = model.get_base_model() if r else model
    assert base.get_input_embeddings().weight.dtype == dtype
    assert base.config._attn_implementation == attention.SDPA


def test_auto_is_the_dtype_of_the_files_whatever_the_configuration_says(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    model = load_base(ModelConfig(name=str(folder)), "auto")
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    expected = original().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_fp32_where_asked(saved):
    model = load_model(ModelConfig(name=str(saved), base_dtype="fp32"), LORA)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert hidden_states(model, {"input_ids": IDS}).dtype == torch.float32


def write_gguf(path, config, tensors, sixth_bits=()):
    """Writes a Llama's GGUF file in fp32; the matrices whose names end so in random blocks of Q6_K, which are returned.

    Returns:
        The meaning of these names.
    """
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    random, meant = np.random.default_rng(0), {}
    for full, tensor in tensors.items():
        name = full
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:  # llama.cpp stores the two elements of a rotary pair side by side
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        if full.endswith(tuple(sixth_bits)):
            blocks = random.integers(0, 256, (tensor.shape[0], tensor.shape[1] // 256, 210), dtype=np.uint8)
            blocks[..., -2:] = np.array([2e-5], np.float16).view(np.uint8)  # of each block the scale of its scales
            raw = blocks.reshape(tensor.shape[0], -1)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q6_K)
            meant[full] = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q6_K).copy())
        else:
            writer.add_tensor(name, tensor.detach().float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def test_a_gguf_file_loads_and_can_be_trained_and_saved(tmp_path):
    model = original()
    write_gguf(tmp_path / "small.gguf", CONFIG, model.state_dict())
    loaded = load_model(ModelConfig(name=str(tmp_path), gguf_file="small.gguf", base_dtype="fp32"), LORA)
    torch.testing.assert_close(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits, atol=1e-5, rtol=1e-4)
    hidden_states(loaded, {"input_ids": IDS}).sum().backward()
    loaded.get_base_model().save_pretrained(tmp_path / "again")  # transformers refuses this of a "quantised" model
    packed = read_shape(ModelConfig(name=str(tmp_path), gguf_file="small.gguf"))
    assert packed == read_shape(ModelConfig(name=str(tmp_path / "again")))
    with pytest.raises(ValueError, match=r"the folder has no other.gguf \(it holds: again, small.gguf\)"):
        load_model(ModelConfig(name=str(tmp_path), gguf_file="other.gguf"), LORA)


@pytest.mark.parametrize(("dtype", "near"), [("fp32", 1e-6), ("int8", 0.01), ("int4", 0.12)])
def test_a_gguf_file_of_k_quants_is_dequantised_and_rounded_anew(tmp_path, dtype, near):
    config = LlamaConfig(**CONFIG.to_dict() | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64})
    model = AutoModelForCausalLM.from_config(config)
    meant = write_gguf(tmp_path / "k.gguf", config, model.state_dict(), ["gate_proj.weight", "down_proj.weight"])
    loaded = load_model(ModelConfig(name=str(tmp_path), gguf_file="k.gguf", base_dtype=dtype), LORA)
    assert len(meant) == 4
    for name, expected in meant.items():
        layer = loaded.get_base_model().get_submodule(name.removesuffix(".weight")).base_layer
        found = layer.weight if dtype == "fp32" else dequantized(layer)
        assert (found - expected).norm() < near * expected.norm(), name


def test_a_checkpoint_with_missing_weights_is_refused(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved)
    weights = {name: tensor for name, tensor in model.state_dict().items() if "q_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match=r"2 weights of LlamaForCausalLM are not in the checkpoint \(model.layers.0"):
        load_model(ModelConfig(name=str(tmp_path)), LORA)


def test_what_cannot_be_found_is_named_with_the_next_action(saved, tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"the folder has no config.json \(it holds: notes.txt\)$"):
        load_model(ModelConfig(name=str(tmp_path)), LORA)
    (tmp_path / "adapter").mkdir()
    with pytest.raises(
        ValueError, match=r"; to use a tuned model, run `python -m tpu_kit export RUN format=merged` and"
    ):
        load_model(ModelConfig(name=str(tmp_path)), LORA)
    with pytest.raises(ValueError, match=r"there is no such folder\. Give a folder, a hub id or embedded"):
        load_model(ModelConfig(name=str(tmp_path / "nowhere")), LORA)
    for load in (lambda config: load_model(config, LORA), load_tokenizer):
        with pytest.raises(ValueError, match=r"some-model: it is not a folder here and cannot be fetched"):
            load(ModelConfig(name="someone/some-model"))
    with pytest.raises(ValueError, match=r"the folder has no tokenizer .* Copy the original model.s tokenizer files"):
        load_tokenizer(ModelConfig(name=str(saved)))


def test_code_from_the_repository_runs_only_where_it_is_asked_for(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}'
    )
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    for read in (lambda config: load_model(config, LORA), read_config):
        with pytest.raises(ValueError, match=r"if you trust it, set model\.trust_remote_code=true"):
            read(ModelConfig(name=str(tmp_path)))
    with pytest.raises(SystemExit, match="it ran"):
        load_model(ModelConfig(name=str(tmp_path), trust_remote_code=True), LORA)


def test_a_tokenizer_of_another_model_is_refused(saved):
    with pytest.raises(ValueError, match=r"the tokenizer has \d+ ids and the model only 67 embeddings"):
        check_vocabulary(len(load_tokenizer(ModelConfig())), read_config(ModelConfig(name=str(saved))).vocab_size)


def test_of_a_model_of_images_the_part_for_text_is_loaded_where_the_rest_may_be_missing(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2,
             "head_dim": 16, "global_head_dim": 16, "num_hidden_layers": 2}  # fmt: skip
    text = Gemma4TextConfig(vocab_size=67, vocab_size_per_layer_input=67, hidden_size_per_layer_input=8, **sizes)
    stock = AutoModelForCausalLM.from_config(
        Gemma4Config(text_config=text, vision_config=Gemma4VisionConfig(**sizes))
    ).eval()
    stock.save_pretrained(tmp_path)
    config = ModelConfig(name=str(tmp_path), base_dtype="fp32")
    model = load_model(config, LoraConfig(r=0)).eval()
    names = {name for name, _ in stock.named_parameters() if "vision" not in name}
    assert {name for name, _ in model.named_parameters()} == names < {name for name, _ in stock.named_parameters()}
    assert read_shape(config).parameters == model.num_parameters()
    with torch.no_grad():
        torch.testing.assert_close(logits(model, {"input_ids": IDS}), stock(input_ids=IDS, use_cache=False).logits)


def test_a_family_that_transformers_lacks_is_told_with_the_version_that_has_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma9", "transformers_version": "9.1.0"}')
    with pytest.raises(
        ValueError, match=r"has no family gemma9; 9\.1\.0 wrote .*: pip install 'transformers>=9\.1\.0'"
    ):
        read_config(ModelConfig(name=str(tmp_path)))


def test_a_shipped_shape_of_a_family_that_transformers_lacks(monkeypatch):
    name = next(iter(shipped_shapes()))
    monkeypatch.setattr("transformers.CONFIG_MAPPING", {})
    with pytest.raises(ValueError, match=rf"model.name={name}: transformers .* has no family \w+; install a newer one"):
        settings_of(ModelConfig(name=name))
