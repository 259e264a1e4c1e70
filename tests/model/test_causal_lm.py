from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.initialization import no_tie_weights

from tests.support.child_processes import run_loaded
from tests.support.tpu_program import ENVIRONMENT
from tests.support.training_functions import OPTIM, control
from tests.training.test_loss import chunked_nll
from tpu_kit.config.loader import LoraConfig, ModelConfig
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.model import attention, splash_attention
from tpu_kit.model.base_model import output_embedding
from tpu_kit.model.causal_lm import compute_dtype, hidden_states, to_device, trainable_parameters
from tpu_kit.model.loop.layer_inputs import Visibility
from tpu_kit.model.preparation import enable_remat, use_attention
from tpu_kit.model.trainable import adapt, check_head, count_parameters, load_model
from tpu_kit.training.losses.loss import shift_labels
from tpu_kit.training.objectives import SupervisedObjective
from tpu_kit.training.state import TrainState
from tpu_kit.training.step import train_step

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 67, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
# Large weights make attention sharp; with usual weights a window or a soft cap hardly changes a logit.
SHARP = SMALL | {"num_hidden_layers": 4, "initializer_range": 0.4}
SHARP_WINDOWED = SHARP | {"sliding_window": 5}
HALF_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
FAMILIES = {
    "llama": LlamaConfig(**SHARP),
    "qwen2": Qwen2Config(tie_word_embeddings=True, use_sliding_window=True, max_window_layers=2, **SHARP_WINDOWED),
    "qwen3": Qwen3Config(head_dim=8, tie_word_embeddings=True, **SHARP),
    "gemma2": Gemma2Config(
        head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, **SHARP_WINDOWED
    ),
    "gemma3": Gemma3TextConfig(
        head_dim=8, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"] * 2, **SHARP_WINDOWED
    ),
    "mistral": MistralConfig(**SHARP_WINDOWED),
    "phi3": Phi3Config(**SHARP_WINDOWED),
    "phi4-mini": Phi3Config(tie_word_embeddings=True, **SHARP, **HALF_ROTARY),
    "phi": PhiConfig(**SHARP, **HALF_ROTARY),
}
TIED = {"qwen2", "qwen3", "gemma2", "gemma3", "phi4-mini"}
# A feature of each family beyond plain attention, and the setting that turns it off.
PECULIAR = [
    ("qwen2", "layer_types", ["full_attention"] * 4),
    ("gemma2", "attn_logit_softcapping", None),
    ("gemma2", "layer_types", ["sliding_attention"] * 4),
    ("gemma2", "sliding_window", 64),
    ("gemma3", "layer_types", ["full_attention"] * 4),
    ("gemma3", "sliding_window", 64),
    ("mistral", "sliding_window", 64),
    ("phi3", "sliding_window", 64),
    ("phi4-mini", "rope_parameters", {**HALF_ROTARY["rope_parameters"], "partial_rotary_factor": 1.0}),
    ("phi", "rope_parameters", {**HALF_ROTARY["rope_parameters"], "partial_rotary_factor": 1.0}),
]
PLAIN = {"llama": LlamaConfig(**SMALL), "qwen2": Qwen2Config(tie_word_embeddings=True, **SMALL),
         "gemma2": Gemma2Config(head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=3.0, **SMALL)}  # fmt: skip
SEGMENTS = torch.tensor([[1] * 7 + [2] * 11 + [0] * 2] * 2)
POSITIONS = torch.tensor([[*range(7), *range(11), 0, 0]] * 2)
IDS = torch.randint(3, 67, (2, 20), generator=torch.Generator().manual_seed(3))
BATCH = {"input_ids": IDS, "segment_ids": SEGMENTS, "position_ids": POSITIONS}
LORA = LoraConfig(r=4, alpha=8.0)


def fresh(config, implementation="eager", dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=implementation).to(dtype)


def logits_of(model, batch):
    head = output_embedding(model)
    logits = F.linear(hidden_states(model, batch), head.weight, head.bias) * head.scale
    return logits if head.softcap is None else torch.tanh(logits / head.softcap) * head.softcap


def loss_of(model, batch=BATCH):
    hidden, head = hidden_states(model, batch), output_embedding(model)
    labels = shift_labels(batch["input_ids"], batch["segment_ids"])
    total, count = chunked_nll(
        hidden.flatten(0, 1), head.weight, labels.flatten(), 16, head.softcap, bias=head.bias, logit_scale=head.scale
    )
    return total / count


def scramble_adapters(model):
    """Gives LoRA's B, which starts at zero, values, so that the adapters do something."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in trainable_parameters(model).items():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2, generator=generator)
    return model


def token_losses(model, batch):
    """(B, S) losses of the next token of the same document, 0 where there is none."""
    labels = shift_labels(batch["input_ids"], batch.get("segment_ids"))
    return F.cross_entropy(logits_of(model, batch).transpose(1, 2), labels, ignore_index=-100, reduction="none")


def splash_stand_in(query, key, value, segment_ids, settings):
    layer = torch.nn.Module()
    output, _ = attention.sdpa_attention(layer, query, key, value, None, 1.0, sliding_window=settings.window,
                                         softcap=settings.softcap, visibility=Visibility(segment_ids))  # fmt: skip
    return output.transpose(1, 2)


@pytest.mark.parametrize("implementation", ["sdpa", "splash"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, implementation, monkeypatch):
    """Only the interface of the kernels is tested here; model/test_attention.py runs them."""
    original = fresh(FAMILIES[family])
    whole = original(input_ids=IDS, use_cache=False).logits
    model = adapt(copy.deepcopy(original), LORA, "fp32").train()
    monkeypatch.setattr(splash_attention, "splash_kernel", splash_stand_in)
    use_attention(model, implementation, "tpu")

    # The adapters start at zero, so hidden states and head must give transformers' own logits ("eager"), for a document
    # longer than the window.
    torch.testing.assert_close(logits_of(model, {"input_ids": IDS}), whole, atol=5e-5, rtol=1e-4)

    # Each token of a packed document has the loss and the gradient that it has alone.
    scramble_adapters(model)
    parameters = list(trainable_parameters(model).values())
    packed = token_losses(model, BATCH)
    gradients = torch.autograd.grad(packed.sum(), parameters)
    assert int((packed != 0).sum()) == 2 * (6 + 10) and not packed[:, 18:].any()
    summed = [torch.zeros_like(gradient) for gradient in gradients]
    for start, end in ((0, 7), (7, 18)):
        alone = token_losses(model, {"input_ids": IDS[:, start:end]})
        torch.testing.assert_close(packed[:, start:end], alone, atol=1e-5, rtol=1e-5)
        for total, part in zip(summed, torch.autograd.grad(alone.sum(), parameters), strict=True):
            total.add_(part)
    for ours, expected in zip(gradients, summed, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)


@pytest.mark.parametrize(("family", "name", "value"), PECULIAR)
def test_what_is_peculiar_to_a_family_changes_its_logits(family, name, value):
    """So that the comparison above would notice if it were missing."""
    original, other = (copy.deepcopy(FAMILIES[family]) for _ in range(2))
    setattr(other, name, value)
    with_it, without = (fresh(config)(input_ids=IDS, use_cache=False).logits for config in (original, other))
    assert (with_it - without).abs().max() > 1


@pytest.mark.parametrize("r", [4, 0], ids=["LoRA", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains(family, r):
    optim = replace(OPTIM, learning_rate=1e-2, weight_decay=0.0)
    model = adapt(fresh(FAMILIES[family]), LoraConfig(r=r, alpha=8.0) if r else LoraConfig(r=0), "fp32").train()
    to_device(model, "cpu")
    enable_remat(model)
    base = model.get_base_model() if r else model
    assert (base.lm_head.weight is base.get_input_embeddings().weight) == (family in TIED)
    batch = {**BATCH, "labels": IDS}
    cpu = torch.device("cpu")
    state = TrainState(model, cpu, optim)
    losses = []
    for step in range(1, 9):
        train_step(
            model, state, [batch], control(1e-2, step, 0.0), SupervisedObjective(optim), optim, CpuRuntime(0, 1, cpu)
        )
        losses.append(float(state.report[0] / state.report[1]))
    assert losses[-1] < losses[0] - 0.5, losses
    assert (base.lm_head.weight is base.get_input_embeddings().weight) == (family in TIED)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_remat_gives_the_same_gradients(family, keeps):
    model = scramble_adapters(adapt(fresh(FAMILIES[family]), LORA, "fp32").train())
    loss_of(model).backward()
    kept = {name: parameter.grad.clone() for name, parameter in trainable_parameters(model).items()}
    model.zero_grad()
    enable_remat(model, keeps)
    loss_of(model).backward()
    for name, parameter in trainable_parameters(model).items():
        torch.testing.assert_close(parameter.grad, kept[name], msg=name)


def test_products_and_attention_that_are_kept_are_not_computed_again():
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            for kind in ("aten.mm.", "aten._scaled_dot_product_flash_attention_for_cpu.default"):
                counts[kind] += str(operation).startswith(kind)
            return operation(*args, **(kwargs or {}))

    found = {}
    for remat in ("none", "outputs", "full"):
        model = adapt(fresh(FAMILIES["llama"]), LoraConfig(r=0), "fp32").train()
        if remat != "none":
            enable_remat(model, remat == "outputs")
        counts = Counter()
        with Counting():
            loss_of(model).backward()
        found[remat] = list(counts.values())
    products, attention = found["none"]
    layers = FAMILIES["llama"].num_hidden_layers
    assert found["outputs"] == found["none"] and attention == layers
    assert found["full"] == [products + 6 * layers, 2 * layers]  # the last product's result is not needed


@pytest.fixture(scope="module")
def gemma3_with_images(tmp_path_factory):
    config = Gemma3Config(
        text_config=FAMILIES["gemma3"].to_dict(), mm_tokens_per_image=4,
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 28, "patch_size": 14},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("gemma3")
    fresh(config).save_pretrained(folder)
    return folder


def test_the_text_of_a_model_with_images_is_trained(gemma3_with_images):
    original = AutoModelForCausalLM.from_pretrained(gemma3_with_images, attn_implementation="eager")
    whole = original(input_ids=IDS, token_type_ids=torch.zeros_like(IDS), use_cache=False).logits
    model = load_model(ModelConfig(name=str(gemma3_with_images), base_dtype="fp32"), LORA)
    torch.testing.assert_close(logits_of(model, {"input_ids": IDS}), whole, atol=5e-5, rtol=1e-4)
    assert trainable_parameters(model)
    assert all(".language_model." in name for name in trainable_parameters(model))
    losses = []
    for targets in ("all-linear", ("q_proj", "k_proj")):
        lora = LoraConfig(r=4, targets=targets)
        model = load_model(ModelConfig(name=str(gemma3_with_images), base_dtype="fp32"), lora)
        loss = loss_of(model)
        loss.backward()
        assert all(parameter.grad is not None for parameter in trainable_parameters(model).values())
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1])


def test_all_weights_of_a_model_with_images_are_not(gemma3_with_images):
    with pytest.raises(ValueError, match=r"lora.r=0 trains all weights, and Gemma3ForConditionalGeneration has some "):
        load_model(ModelConfig(name=str(gemma3_with_images)), LoraConfig(r=0))


def test_lora_trains_fp32_adapters_on_a_frozen_bf16_base_in_bf16():
    model = adapt(fresh(PLAIN["qwen2"], dtype=torch.bfloat16), LORA, "bf16").train()
    trained = trainable_parameters(model)
    assert trained and all("lora_" in name and parameter.dtype == torch.float32 for name, parameter in trained.items())
    assert all(p.dtype == torch.bfloat16 for name, p in model.named_parameters() if name not in trained)
    assert compute_dtype(model) == torch.bfloat16
    seen = []
    for name, part in model.named_modules():
        if name.endswith(("lora_A.default", "lora_B.default")):
            part.register_forward_hook(lambda part, args, output: seen.append(output.dtype))
    loss = loss_of(model)
    loss.backward()
    assert set(seen) == {torch.bfloat16}  # PEFT alone would compute these in fp32
    assert all(parameter.grad.dtype == torch.float32 for parameter in trained.values())


def test_bf16_gradients_point_where_fp32_ones_do():
    config = PLAIN["llama"]
    exact = scramble_adapters(adapt(fresh(config, dtype=torch.bfloat16).float(), LORA, "fp32").train())
    rounded = scramble_adapters(adapt(fresh(config, dtype=torch.bfloat16), LORA, "bf16").train())
    for model in (exact, rounded):
        loss_of(model).backward()
    for (name, a), b in zip(trainable_parameters(exact).items(), trainable_parameters(rounded).values(), strict=True):
        assert F.cosine_similarity(a.grad.flatten(), b.grad.flatten(), dim=0) > 0.995, name


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_full_fine_tuning_trains_every_weight_in_fp32(family):
    model = adapt(fresh(PLAIN[family]), LoraConfig(r=0), "bf16").train()
    trained = trainable_parameters(model)
    assert len(trained) == len(dict(model.named_parameters()))
    loss = loss_of(model)
    loss.backward()
    assert hidden_states(model, BATCH).dtype == torch.bfloat16
    assert all(parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in trained.values())
    assert count_parameters(model).trainable == count_parameters(model).total


def test_count_parameters_counts_a_tied_weight_once():
    tied, untied = (count_parameters(adapt(fresh(PLAIN[name]), LORA, "fp32")) for name in ("gemma2", "llama"))
    assert untied.total - untied.trainable == sum(p.numel() for p in fresh(PLAIN["llama"]).parameters())
    assert tied.total - tied.trainable == sum(p.numel() for p in fresh(PLAIN["gemma2"]).parameters())
    assert re.fullmatch(r"[\d,]+ of [\d,]+ parameters are trained \(\d+\.\d\d%\)", str(tied))


@pytest.mark.parametrize(
    "change",
    [
        {"rslora": True}, {"dora": True}, {"dropout": 0.1}, {"init": "gaussian"},
        {"targets": ("q_proj", "down_proj")}, {"targets": "v_proj"},
    ],
)  # fmt: skip
def test_lora_choices_train(change):
    model = adapt(fresh(PLAIN["llama"], dtype=torch.bfloat16), LoraConfig(**{"r": 4, **change}), "bf16").train()
    enable_remat(model)
    loss = loss_of(model)
    loss.backward()
    gradients = [parameter.grad for parameter in trainable_parameters(model).values()]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
    assert any(gradient.any() for gradient in gradients)
    names = " ".join(trainable_parameters(model))
    assert ("lora_magnitude_vector" in names) == bool(change.get("dora"))
    if "targets" in change:
        wanted = [change["targets"]] if isinstance(change["targets"], str) else change["targets"]
        assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in names.split()} == set(wanted)


def test_the_seed_alone_decides_the_adapters():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, again, other = (
        trainable_parameters(adapt(fresh(PLAIN["llama"]), LORA, "fp32", seed=seed)) for seed in (7, 7, 8)
    )
    torch.manual_seed(1)
    built = fresh(PLAIN["llama"])
    before = torch.get_rng_state()
    adapt(built, LORA, "fp32", seed=7)
    assert torch.equal(before, torch.get_rng_state()) and not torch.equal(state, before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "nothing"), r"lora.targets: nothing matched nothing in LlamaForCausalLM; its linear layers are "
                                r"down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, "
                                r"and its embeddings embed_tokens and lm_head. Name some"),
        ((), "lora.targets: an empty list matched nothing"),
    ],
)  # fmt: skip
def test_targets_are_checked_against_the_model(targets, message):
    with pytest.raises(ValueError, match=message):
        adapt(fresh(PLAIN["llama"]), LoraConfig(r=4, targets=targets), "fp32")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"full": ("norm",)}, "lora.full: norm is not an embedding of LlamaForCausalLM: name embed_tokens and lm"),
        ({"full": ("lm_head",), "targets": ("q_proj", "embed_tokens")},
         "lora.full and lora.targets=embed_tokens both train the embeddings of LlamaForCausalLM: keep one"),
        ({"tokens": ("a",), "targets": ("lm_head",)}, "lora.tokens and lora.targets=lm_head both train the embeddings"),
        ({"dora": True, "targets": ("embed_tokens",)}, "lora.dora does not support the embeddings embed_tokens in lo"),
        ({"dropout": 0.1, "targets": ("q_proj", "lm_head")},
         "lora.dropout=0.1: the chunked loss has no dropout for an adapter of the output embedding: set it to 0, or "
         "take lm_head out of lora.targets"),
    ],
)  # fmt: skip
def test_what_embeddings_do_not_train_with_is_refused(lora, message):
    with pytest.raises(ValueError, match=message):
        adapt(fresh(PLAIN["llama"]), LoraConfig(r=4, **lora), "fp32")


@pytest.mark.parametrize(
    "config", [CohereConfig(logit_scale=0.25, **SMALL), GraniteConfig(logits_scaling=4.0, **SMALL), PLAIN["gemma2"]]
)
def test_check_head_accepts_what_the_chunked_loss_can_do(config):
    check_head(adapt(fresh(config), LORA, "fp32"))


def test_check_head_refuses_logits_it_does_not_know():
    model = adapt(fresh(PLAIN["llama"]), LORA, "fp32").train()
    base = model.get_base_model()
    own = type(base).forward

    def forward(*args, **kwargs):
        output = own(base, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    base.forward = forward
    with pytest.raises(ValueError, match="LlamaForCausalLM changes its logits in a way that the chunked loss"):
        check_head(model)
    assert model.training


def test_use_attention_names_the_implementation():
    model = adapt(fresh(PLAIN["llama"]), LORA, "fp32")
    assert use_attention(model, "auto", "tpu") == attention.SPLASH
    assert model.get_base_model().config._attn_implementation == attention.SPLASH
    assert use_attention(model, "auto", "cpu") == attention.SDPA


def test_to_device_ties_again():
    model = adapt(fresh(PLAIN["gemma2"]), LORA, "fp32")
    base = model.get_base_model()
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())  # as a move to XLA does
    with no_tie_weights():  # as while another replica, a thread, loads a model
        to_device(model, "cpu")
    assert base.lm_head.weight is base.get_input_embeddings().weight


ON_XLA = """
import json, re
import torch, torch_xla, torch_xla.core.xla_model as xm, torch_xla.debug.metrics as metrics
from transformers import AutoModelForCausalLM, Qwen2Config
from tpu_kit.config.loader import LoraConfig, ModelConfig, OptimConfig
from tpu_kit.model.loop.layer_scan import scan_layers
from tpu_kit.training.losses.loss import Likelihood, chunked, shift_labels
from tpu_kit.model.trainable import adapt
from tpu_kit.model.causal_lm import hidden_states, to_device, trainable_parameters
from tpu_kit.model.base_model import output_embedding

config = Qwen2Config(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=67, max_position_embeddings=64, tie_word_embeddings=True)
device = torch_xla.device()
metric = lambda name: (metrics.metric_data(name) or [0])[0]
found = {}
cases = {"kept": (4, False), "remat": (4, True), "full": (0, True)}
first = {}
for name, (rank, remat) in cases.items():
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config).to(torch.bfloat16 if rank else torch.float32)
    model = adapt(base, LoraConfig(r=rank), "bf16").train()
    causal = model.get_base_model() if rank else model
    if remat:
        scan_layers(causal.get_decoder(), OptimConfig(), "xla-cpu")
    to_device(model, device)
    parameters = trainable_parameters(model)
    torch_xla.sync()
    xm.wait_device_ops()
    xm.set_rng_state(7)
    before = [metrics.counter_value("UncachedCompile") or 0, metric("ExecuteTime"), metric("TransferFromDeviceTime")]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(3, 67, (2, 40), generator=generator).to(device)
        segments = torch.tensor([[1] * 15 + [2] * 20 + [0] * 5] * 2).to(device)
        positions = torch.tensor([[*range(15), *range(20), *[0] * 5]] * 2).to(device)
        hidden = hidden_states(model, {"input_ids": ids, "segment_ids": segments, "position_ids": positions})
        head, labels = output_embedding(model), shift_labels(ids, segments).flatten()
        (loss,) = chunked(Likelihood(head), hidden.flatten(0, 1), head, [labels], 16)
        loss.backward()
        if step == 2:
            hlo = torch_xla._XLAC._get_xla_tensors_hlo([loss, *(p.grad for p in parameters.values())])
        gradients = [parameter.grad for parameter in parameters.values()]  # alive at the sync in every step
        first.setdefault(name, gradients)
        for parameter in parameters.values():
            parameter.data.sub_(1e-3 * parameter.grad)
            parameter.grad = None
        torch_xla.sync()
        xm.wait_device_ops()
    after = [metrics.counter_value("UncachedCompile") or 0, metric("ExecuteTime"), metric("TransferFromDeviceTime")]
    dots = re.findall(r"= (\\w+\\[[\\d,]*\\])\\S* dot\\(", hlo)
    dots = [dot for dot in dots if dot != "f32[2,4,40]"]  # the rotary angles in transformers 5.15
    found[name] = {"dots": len(dots), "bf16": sum(dot.startswith("bf16") for dot in dots),
                   "barriers": hlo.count("opt-barrier("),
                   "tied": causal.lm_head.weight is causal.get_input_embeddings().weight,
                   "delta": [b - a for a, b in zip(before, after)], "loss": float(loss / (labels != -100).sum()),
                   "logits": len(re.findall(r"\\[(?:80,67|2,40,67|67,80)\\]", hlo))}
first = {name: torch.cat([gradient.cpu().flatten() for gradient in gradients]) for name, gradients in first.items()}
apart = lambda a, b: float((first[a] - first[b]).norm() / first[a].norm())
fallbacks = [c for c in metrics.counter_names() if c.startswith("aten::") and c != "aten::_local_scalar_dense"]
print(json.dumps({"runs": found, "remat": apart("kept", "remat"), "fallbacks": fallbacks}))
"""


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
def test_on_xla_a_step_is_one_graph_and_remat_computes_again():
    found = json.loads(run_loaded(ON_XLA).stdout.splitlines()[-1])
    assert found["fallbacks"] == []
    runs = found["runs"]
    for name, run in runs.items():
        assert run["tied"], name
        assert run["dots"] == run["bf16"], name  # nothing is multiplied in fp32
        assert run["logits"] == 0, name
        compiles, executions, reads = run["delta"]
        assert (compiles, executions, reads) == (1, 3, 0), name
    # The layer is recomputed: 7 linear layers, each with two adapter products, and two products of attention.
    assert runs["remat"]["dots"] >= runs["kept"]["dots"] + (7 * 3 + 2) - 2
    assert runs["kept"]["barriers"] == 0 and runs["remat"]["barriers"] >= 1
    assert found["remat"] < 0.02
    assert runs["remat"]["loss"] == pytest.approx(runs["kept"]["loss"], rel=1e-3)


SHARED_ON_XLA = """
import copy, json
import torch, torch_xla
from transformers import AutoModelForCausalLM, Gemma4TextConfig
from tpu_kit.config.loader import LoraConfig, OptimConfig
from tpu_kit.model.trainable import adapt
from tpu_kit.model.causal_lm import logits, to_device
from tpu_kit.model.loop.layer_calls import stacked_names, unstacked
from tpu_kit.model.loop.layer_scan import scan_layers

layers = ["sliding_attention", "full_attention"] * 5
config = Gemma4TextConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=10, layer_types=layers,
                          num_attention_heads=4, num_key_value_heads=1, head_dim=8, global_head_dim=8, sliding_window=8,
                          hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, num_kv_shared_layers=4)
torch.manual_seed(0)
first = adapt(AutoModelForCausalLM.from_config(config, dtype=torch.float32), LoraConfig(r=0), "fp32").train()
found, runs = {}, ""
for way in ("auto", "off", None):  # XLA first, before the engine of the backward pass starts
    device, model = torch_xla.device() if way else torch.device("cpu"), copy.deepcopy(first)
    if way:
        runs += f"{scan_layers(model.get_decoder(), OptimConfig(scan_layers=way), 'xla-cpu')}; "
    to_device(model, device)
    logits(model, {"input_ids": torch.arange(3, 23)[None].to(device)}).square().sum().backward()
    torch_xla.sync()
    gradients = {path: one.grad for path, one in model.named_parameters() if one.grad is not None}
    found[way] = {path: one.cpu() for path, one in unstacked(stacked_names(model), gradients).items()}
apart = lambda a, b: max(float((found[a][path] - one).norm() / (one.norm() + 1e-9)) for path, one in found[b].items())
print(json.dumps({"runs": runs, "units": apart("auto", "off"), "cpu": apart("auto", None)}))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
def test_keys_that_layers_hand_on_in_a_mapping_get_their_gradients_on_xla():
    found = json.loads(run_loaded(SHARED_ON_XLA).stdout.splitlines()[-1])
    assert found["runs"] == "2 x 2 and 2 x 2 in loops, 2 one by one; 10 one by one; "
    assert found["units"] < 1e-5 and found["cpu"] < 5e-3, found


FOR_THE_TPU_COMPILER = """
import json, os
import torch, torch_xla
from tests.support.tpu_program import compile_graph
from transformers import LlamaConfig, LlamaForCausalLM
from tpu_kit.config.loader import LoraConfig
from tpu_kit.config.loader import OptimConfig
from tpu_kit.model.trainable import adapt
from tpu_kit.model.causal_lm import hidden_states, to_device, trainable_parameters
from tpu_kit.model.loop.layer_scan import scan_layers

found = {}
for layers, way in ((4, "none"), (4, "full"), (8, "full")):
    config = LlamaConfig(hidden_size=128, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=67)
    torch.manual_seed(0)
    model = adapt(LlamaForCausalLM(config).to(torch.bfloat16), LoraConfig(r=4), "bf16").train()
    if way == "full":
        scan_layers(model.get_base_model().get_decoder(), OptimConfig(scan_layers="off", mlp_tile=None), "tpu")
    to_device(model, torch_xla.device())
    ids = torch.zeros(8, 256, dtype=torch.int64).to(torch_xla.device())
    torch_xla.sync()
    hidden_states(model, {"input_ids": ids}).float().square().sum().backward()
    program = compile_graph([p.grad for p in trainable_parameters(model).values()])
    found[f"{layers} {way}"] = program.get_compiled_memory_stats().temp_size_in_bytes
print(json.dumps(found), flush=True)
os._exit(0)  # libtpu hangs at times on its way out
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
def test_remat_saves_memory_by_the_tpu_compilers_own_account():
    child = run_loaded(FOR_THE_TPU_COMPILER, env=ENVIRONMENT, timeout=900)
    found = json.loads(child.stdout.splitlines()[-1])
    assert found["4 full"] < 0.6 * found["4 none"], found
    # Four more layers cost a few times their saved inputs, (8, 256, 128) in bf16, not all their activations.
    assert found["8 full"] - found["4 full"] < 3 * 4 * (8 * 256 * 128 * 2), found
