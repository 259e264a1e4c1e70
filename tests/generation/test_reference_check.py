"""Families with an architecture that the kit lacks are refused by name before weights are read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # the first model imports it, which takes seconds
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    MiniMaxConfig,
    MistralConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    StableLmConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tpu_kit.config.loader import DataConfig, LoraConfig, TrainConfig, load_config
from tpu_kit.data.batching import Documents, PackedDataset
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.generation import kv_cache, reference_check
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.model_loading import load_here
from tpu_kit.generation.reference_check import check_generation, check_training, narrow_model
from tpu_kit.machine.checks import Machine
from tpu_kit.machine.compatibility import other_transformers
from tpu_kit.model import attention, causal_lm, trainable
from tpu_kit.model.loop.layer_inputs import Visibility
from tpu_kit.model.rotary import max_positions
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.recipes import sft
from tpu_kit.training.losses.loss import shift_labels

xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")

# Real sizes except experts and depth, because narrow copies would take longer to check.
DEPTH = {"num_hidden_layers": 4}
ACCEPTED = {
    "llama": LlamaConfig(num_key_value_heads=8, **DEPTH),
    "mistral": MistralConfig(sliding_window=4096, **DEPTH),
    "qwen2": Qwen2Config(use_sliding_window=True, max_window_layers=2, vocab_size=100, **DEPTH),
    "qwen3": Qwen3Config(**DEPTH),
    "phi3": Phi3Config(sliding_window=2047, **DEPTH),
    "gemma2": Gemma2Config(num_hidden_layers=12),  # a shallower copy stays wide
    "gemma3_text": Gemma3TextConfig(num_hidden_layers=6),  # the sixth sees all
}
WRONG_ALONE = {
    "recurrent_gemma": (RecurrentGemmaConfig(**DEPTH), "logits differ by"),
    "falcon": (FalconConfig(**DEPTH), "FalconForCausalLM has its own attention code"),
    "bloom": (BloomConfig(n_layer=2), "these settings: BloomForCausalLM has its own attention code and ignores"),
    "llama4_text": (Llama4TextConfig(**DEPTH), "because its eager attention fails: AttributeError: 'tuple' object"),
    "gpt2": (GPT2Config(), "the model's config asks for attn_pdrop=0.1: set it to 0 in its config.json"),
    "opt": (OPTConfig(attention_dropout=0.0), "its code draws random numbers in training, and a recomputed layer"),
    "llama": (LlamaConfig(attention_dropout=0.2, **DEPTH), "the model's config asks for attention_dropout=0.2"),
}


class NearConfig(LlamaConfig):
    """A family that makes its own mask."""

    model_type = "tests_near"


class NearForCausalLM(LlamaForCausalLM):
    """Its tokens see the seven before them, by a mask that it adds itself."""

    config_class = NearConfig

    def __init__(self, config: NearConfig) -> None:
        super().__init__(config)
        self.model = NearModel(config)


class NearModel(LlamaModel):
    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        place = torch.arange(input_ids.shape[1])
        seen = (place[:, None] >= place) & (place[:, None] - place < 8)
        seen = seen & (True if attention_mask is None or attention_mask.dtype != torch.bool else attention_mask)
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min).expand(len(input_ids), 1, -1, -1)
        return super().forward(input_ids, mask, **kwargs)


AutoConfig.register("tests_near", NearConfig)
AutoModelForCausalLM.register(NearConfig, NearForCausalLM)
SEPARATED = {
    "lfm2": Lfm2Config(full_attn_idxs=[2], **DEPTH),
    "qwen3_5_text": Qwen3_5TextConfig(**DEPTH),
    "qwen3_next": Qwen3NextConfig(num_experts=16, **DEPTH),
    "granitemoehybrid": GraniteMoeHybridConfig(layer_types=["mamba", "mamba", "mamba", "attention"], **DEPTH),
    "bamba": BambaConfig(attn_layer_indices=[2], **DEPTH),
    "olmo_hybrid": OlmoHybridConfig(**DEPTH),
}
CARRIES_STATE = {"jamba": JambaConfig(num_hidden_layers=8), "minimax": MiniMaxConfig(**DEPTH)}


def quick(families: Iterable[str], *names: str) -> list[Any]:
    """All families; tests of families that are not named here are slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in families]


def run(folder: Any, config: Any, *settings: str) -> TrainConfig:
    """A run of a model that consists of a configuration only."""
    config.save_pretrained(folder)
    return load_config(None, [f"model.name={folder}", *settings])


@pytest.mark.parametrize("family", quick(ACCEPTED, "llama", "qwen2", "gemma3_text"))
def test_families_that_the_kit_computes_pass_in_seconds(tmp_path, family):
    start = time.process_time()
    check_training(run(tmp_path, ACCEPTED[family], "tracking.generate_rows=8"), "tpu")
    assert time.process_time() - start < 5


@pytest.mark.parametrize("rank", [1, 2, 64])
def test_adapters_of_any_rank_leave_the_comparison_to_rounding(monkeypatch, rank):
    """With alpha=32 and rank 2 attention was so sharp that logits of one document differed by 0.13 %."""
    monkeypatch.setattr(reference_check, "_TOLERANCE", 2e-5)
    check_training(load_config(None, ["model.name=embedded", f"lora.r={rank}", "max_length=32"]), "cpu")


@pytest.mark.parametrize("family", quick(WRONG_ALONE, "gpt2", "opt", "llama", "bloom"))
def test_a_family_that_the_kit_computes_wrongly_is_refused_by_name(tmp_path, family):
    config, reason = WRONG_ALONE[family]
    with pytest.raises(ValueError) as refusal:
        check_training(run(tmp_path, config, "packing=false"), "cpu")
    text = str(refusal.value)
    assert text.startswith(f"{family} (model.name={tmp_path}) cannot be trained with these settings: ")
    assert reason in text
    assert "Or use a model of another family, such as llama, mistral, " in text and "\n" not in text


def test_a_run_is_refused_before_its_launch_and_without_weights(tmp_path):
    config = run(tmp_path / "model", LlamaConfig(attention_dropout=0.2, **DEPTH), "data.source=synthetic",
                 f"output_dir={tmp_path / 'run'}", "max_length=64", "device_type=cpu", "num_replicas=2")  # fmt: skip
    with pytest.raises(ValueError, match="these settings: the model's config asks for attention_dropout=0"):
        sft.train(config)


@pytest.mark.parametrize("family", quick(SEPARATED, "lfm2"))
def test_a_family_whose_state_along_the_row_the_kit_separates_by_document_passes(tmp_path, family):
    check_training(run(tmp_path, SEPARATED[family], "remat=full"), "cpu")


@pytest.mark.parametrize("family", quick(CARRIES_STATE, "jamba"))
def test_a_family_that_carries_a_state_along_the_row_is_refused_only_for_packed_documents(tmp_path, family):
    with pytest.raises(ValueError) as refusal:
        check_training(run(tmp_path, CARRIES_STATE[family]), "cpu")
    text = str(refusal.value).removesuffix(other_transformers())
    assert text.startswith(f"{family} (model.name={tmp_path}) cannot be trained with these settings: logits differ by ")
    assert text.endswith("Set data.packing=false, which puts one document in each row")
    check_training(run(tmp_path, CARRIES_STATE[family], "packing=false"), "cpu")
    refused = f"the kit cannot generate with {family}: its layers do not work with the kit"
    for answers in ("tracking.generate_rows=8", "tracking.eval_generate_rows=8", "optim.objective=policy"):
        with pytest.raises(ValueError, match=refused):
            check_training(run(tmp_path, CARRIES_STATE[family], "packing=false", answers), "cpu")


def test_a_family_that_the_kit_cannot_generate_with_is_refused_by_name(monkeypatch, tmp_path):
    config = NearConfig(**DEPTH)
    with pytest.raises(ValueError) as refusal:
        check_generation(config)
    text = str(refusal.value).removesuffix(other_transformers())
    monkeypatch.setattr(reference_check, "other_transformers", lambda: ". Install a newer one")
    with pytest.raises(ValueError, match=r"eval_generate_rows=0\. Install a newer one$"):
        check_generation(config)
    # Results on XLA for the test below.
    reference_check._problem.cache_clear()
    monkeypatch.setattr(reference_check, "_on_xla", lambda *given: "")
    with pytest.raises(ValueError, match=r"Set model\.attention=sdpa\. Install a newer one$"):
        check_training(run(tmp_path, config), "tpu")
    reason = "the model makes its own attention mask, which the key/value cache does not apply"
    assert text.startswith(f"the kit cannot generate with {config.model_type}: ") and reason in text
    assert text.endswith("to train it set tracking.generate_rows=0 and tracking.eval_generate_rows=0")


def test_a_family_that_passes_no_keyword_arguments_on_to_its_layers_trains_and_generates(tmp_path):
    """The kit's functions get their inputs another way, which does not depend on layers or their names."""
    config = StableLmConfig(**DEPTH)
    check_generation(config)
    assert reference_check._compare_training(run(tmp_path, config), config, "tpu", torch.device("cpu")) == ""


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "vocab_size": 128}  # fmt: skip
SHARED = Gemma4TextConfig(num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3,
                          num_kv_shared_layers=4, global_head_dim=16, hidden_size_per_layer_input=8,
                          vocab_size_per_layer_input=128, **SIZES)  # fmt: skip


@pytest.mark.parametrize("config", [DeepseekV3Config(**DEPTH), SHARED], ids=["deepseek_v3", "gemma4"])
def test_the_sizes_of_keys_and_values_may_differ_between_them_and_between_layers(config):
    check_generation(config)


def test_a_decoder_that_tells_its_layers_apart_runs_in_a_loop_and_its_decode_steps_keep_the_limits_of_time_steps():
    """Nemotron-H reads a setting per layer; transformers' own decode steps ignore the smallest time step."""
    config = NemotronHConfig(layers_block_type=["mamba", "attention"] * 2)
    check_generation(config)
    loop = load_config(None, {"model.name": "embedded", "lora.r": 4, "remat": "full", "scan_layers": "on"})
    found = reference_check.differences(loop, config, "cpu", torch.device("cpu"))
    assert max(found.values()) < 1e-4, found


@pytest.mark.slow  # quick siblings: families that are refused by the comparison on the CPU
@xla
def test_an_unknown_family_is_trained_on_xla_before_it_is_downloaded(monkeypatch, tmp_path):
    found, on_xla = [], reference_check._on_xla
    monkeypatch.setattr(reference_check, "_on_xla", lambda *given: found.append(on_xla(*given)) or found[-1])
    check_training(run(tmp_path, SHARED), "xla-cpu")
    assert found == [""]


def test_a_whole_model_of_another_family_than_its_base_is_refused_when_it_is_loaded_to_generate(tmp_path):
    config = MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=640, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the kit cannot generate with mamba: "):
        load_here(load_config(None, []), tmp_path, CpuRuntime(0, 1, torch.device("cpu")))


def _a_layer_without_gradient(model, batch, whole=causal_lm.hidden_states):
    layer = causal_lm.base_model(model).get_decoder().layers[0]
    with layer.mlp.register_forward_hook(lambda module, given, output: output.detach()):
        return whole(model, batch)


def _one_token_wrong(model, batch, whole=causal_lm.hidden_states):
    """By less than 0.1 % of the norm of all logits."""
    states = whole(model, batch)
    change = torch.zeros_like(states)
    change[0, 5] = 0.004 * states[0, 5].detach()
    return states + change


def _first_head_alone(states, heads):
    return states[:, :1].expand(-1, heads, -1, -1)


@pytest.mark.parametrize(
    ("place", "name", "broken", "family"),
    [
        (Visibility, "mask", lambda *_: torch.ones(1, 1, 37, 37).tril().bool(), "llama"),
        (attention, "_and_window", lambda mask, window: mask, "mistral"),
        (attention, "_and_window", lambda mask, window: mask, "gemma3_text"),
        (attention, "_repeat_heads", _first_head_alone, "llama"),
        (causal_lm, "hidden_states", _one_token_wrong, "llama"),
        (causal_lm, "hidden_states", _a_layer_without_gradient, "llama"),
    ],
    ids=["documents", "window", "alternating window", "heads", "one token", "gradients"],
)  # fmt: skip
def test_the_comparison_finds_a_fault_of_the_kit(monkeypatch, tmp_path, place, name, broken, family):
    monkeypatch.setattr(place, name, broken)
    reference_check._problem.cache_clear()
    what = "gradients" if broken is _a_layer_without_gradient else "logits"
    with pytest.raises(ValueError, match=f"{what} differ"):  # layers one by one, as on the CPU: no further comparison
        check_training(run(tmp_path, ACCEPTED[family], "scan_layers=off"), "cpu")


def test_the_comparison_finds_a_fault_of_the_cache(monkeypatch):
    right = kv_cache.Cache.mask
    monkeypatch.setattr(kv_cache.Cache, "mask", lambda self, window: torch.ones_like(right(self, window)))
    reference_check._problem.cache_clear()
    with pytest.raises(ValueError, match="its replies differ from transformers by"):
        check_generation(ACCEPTED["mistral"])


@pytest.mark.parametrize(
    "family", quick(["gemma3_text", "qwen2", "qwen3_next", "jamba", "bamba"], "gemma3_text", "bamba")
)
def test_a_narrow_copy_has_every_layer_and_leaves_the_random_state(family):
    config = {**ACCEPTED, **SEPARATED, **CARRIES_STATE}[family]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    copy = narrow_model(config)
    assert torch.equal(state, torch.get_rng_state())
    assert copy.config.num_hidden_layers == config.num_hidden_layers
    assert sum(parameter.numel() for parameter in copy.parameters()) < 60e6
    for name, parameter in copy.named_parameters():
        assert parameter.isfinite().all() and parameter.std() > 0, name


def test_a_model_that_cannot_be_compared_is_refused(tmp_path):
    config = LlamaConfig(hidden_act="nothing", **DEPTH)
    with pytest.raises(ValueError, match=r"cannot be compared with transformers, because no narrow copy .*KeyError: "):
        check_training(run(tmp_path, config), "cpu")


# --------------------------------------------------------------------------------------------------- rotary embeddings


def rotary(kind: str, positions: int = 64) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 640, "pad_token_id": 0, "max_position_embeddings": positions,
             "initializer_range": 0.3}  # fmt: skip
    if kind == "dynamic":
        return LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, **sizes)
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 4.0, 9.0, 16.0]}
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40, **factors}
    return Phi3Config(rope_parameters=rotary, original_max_position_embeddings=40, **sizes)


@pytest.mark.parametrize(("kind", "positions"), [("longrope", 64), ("dynamic", 40)])
def test_a_document_does_not_depend_on_a_longer_neighbour(kind, positions):
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(rotary(kind, positions)).eval()
    ids = torch.randint(3, 640, (2, 60))
    batch = {"input_ids": ids, "position_ids": torch.arange(60)[None].repeat(2, 1)}
    batch["segment_ids"] = torch.ones_like(ids)
    batch["segment_ids"][0, 30:] = 2
    batch["position_ids"][0] = torch.arange(30).repeat(2)
    with torch.no_grad():
        expected = stock(input_ids=ids[:1, :30], use_cache=False).logits[0]
        ours = causal_lm.logits(trainable.adapt(stock, LoraConfig(r=0), "fp32").eval(), batch)[0, :30]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_rows_past_the_constant_frequencies_are_refused(tmp_path):
    config = rotary("longrope")
    assert max_positions(config) == 40 and max_positions(rotary("dynamic")) == 64
    with pytest.raises(ValueError) as refusal:
        check_training(run(tmp_path, config, "max_length=64"), "cpu")
    assert str(refusal.value) == (
        "data.max_length=64: phi3 with longrope changes the rotary frequencies of a whole batch when one row has more "
        "than 40 tokens, so a document would depend on its neighbours; set data.max_length=40 or less"
    )
    check_training(run(tmp_path, config, "max_length=40"), "cpu")


@pytest.mark.parametrize(("kind", "positions"), [("longrope", 64), ("dynamic", 40)])
def test_a_reply_does_not_depend_on_rows_that_the_model_saw_before_and_ends_with_the_constant_frequencies(
    kind, positions
):
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(rotary(kind, positions)).eval()
    generator = Generator(stock, load_tokenizer(load_config(None, []).model), CpuRuntime(0, 1, torch.device("cpu")),
                          data=DataConfig(), max_prompt=40, max_new_tokens=8)  # fmt: skip
    prompt = list(range(10, 18))
    expected = generator.rate([[*prompt, 20, 21]])
    with torch.no_grad():
        before = stock(input_ids=torch.arange(3, 53)[None], use_cache=False).logits  # 50 positions: other frequencies
    assert generator.rate([[*prompt, 20, 21]]) == expected
    with torch.no_grad():
        assert torch.equal(stock(input_ids=torch.arange(3, 53)[None], use_cache=False).logits, before)
    with pytest.raises(ValueError, match=r"exceed the limit of 32: .* the model's 40 positions minus"):
        generator.generate([list(range(10, 44))])


# ------------------------------------------------------------------------------------------------ every family (slow)


def _documents(copy: Any) -> tuple[float, float]:
    """Largest differences of logits and of the embedding's gradient between packed documents and each alone."""
    copy.set_attn_implementation("eager")
    weight = copy.get_input_embeddings().weight
    documents = [torch.randint(3, 128, (length,)) for length in (17, 9, 11)]  # the order in which packing fills a row
    logits = [copy(input_ids=ids[None], use_cache=False).logits[0] for ids in documents]
    loss = sum(torch.nn.functional.cross_entropy(one[:-1], ids[1:], reduction="sum")
               for one, ids in zip(logits, documents, strict=True))  # fmt: skip
    (expected,) = torch.autograd.grad(loss, weight)
    adapted = trainable.adapt(copy, LoraConfig(r=0), "fp32").eval()
    flat = Documents(torch.cat(documents).numpy(), np.ones(37, dtype=bool), np.array([17, 9, 11]), np.arange(3))
    batch = PackedDataset(flat, 37).tensors(np.arange(1))
    ours = causal_lm.logits(adapted, batch)
    labels = shift_labels(batch["input_ids"], batch["segment_ids"])
    total = torch.nn.functional.cross_entropy(ours.transpose(1, 2), labels, ignore_index=-100, reduction="sum")
    (gradient,) = torch.autograd.grad(total, weight)
    wanted = torch.cat(logits)
    return (
        float((ours[0, : len(wanted)] - wanted).abs().max() / wanted.abs().max()),
        float((gradient - expected).norm() / expected.norm()),
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_family_of_transformers_is_computed_as_transformers_does_or_refused(tmp_path, family):
    try:
        config = CONFIG_MAPPING[family]()
        copy = narrow_model(config)
    except Exception as error:
        pytest.skip(f"its default configuration is none that can be built: {error}")
    torch.manual_seed(7)
    with contextlib.suppress(ValueError):  # refused
        check_training(run(tmp_path, config), "cpu")
        logits, gradient = _documents(copy)
        assert logits < 2e-3 and gradient < 2e-2, (logits, gradient)
    with contextlib.suppress(ValueError):
        check_generation(config)
        copy.set_attn_implementation("eager")
        prompts = [torch.randint(3, 128, (length,)).tolist() for length in (14, 9)]
        tokens = reference_check.replies(copy, prompts)[0].long().T.tolist()
        for prompt, reply in zip(prompts, tokens, strict=True):
            ids = torch.tensor([prompt])
            stock = copy.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=False,
                                  max_new_tokens=len(reply), min_new_tokens=len(reply), eos_token_id=None)  # fmt: skip
            assert stock[0, len(prompt) :].tolist() == reply
