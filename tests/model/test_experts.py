"""Experts of a mixture: numbers and gradients of transformers' families, and which layers get adapters."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.exporting.test_export import make_run
from tests.support.child_processes import QUICK_XLA_FLAGS, run_loaded, run_python
from tests.support.expert_functions import LOADING_MEMORY, SIZES, adapted_errors, write_mixture
from tpu_kit.config.loader import load_config
from tpu_kit.config.schema import LoraConfig, ModelConfig
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.generation import model_loading
from tpu_kit.machine import capacity
from tpu_kit.model import causal_lm as models
from tpu_kit.model import trainable
from tpu_kit.model.meta_model import shape_of
from tpu_kit.model.weights.loading import load_base, load_frozen
from tpu_kit.model.weights.quantization import Scheme, quantize_model, replace_layers
from tpu_kit.planning.memory.argument_memory import model_tensors

needs_xla = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch_xla", "jax")), reason="needs torch_xla[pallas]"
)
FAMILIES = (
    "qwen3_moe", "gpt_oss", "gemma4_text", "glm4_moe", "ernie4_5_moe", "mixtral", "granitemoe", "olmoe", "lfm2_moe",
    "qwen3_5_moe_text", "nemotron_h", "deepseek_v3",
)  # fmt: skip
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
QUICK = {"PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_XLA_FLAGS}


def printed(call: str, before: str = "") -> list[str]:
    """The lines of a process that calls `expert_functions.main`, after other code."""
    script = f"{before}\nfrom tests.support.expert_functions import main\nmain({call})"
    return run_loaded(script, env=QUICK).stdout.splitlines()


def errors(call: str) -> dict[str, float]:
    """The relative errors that `expert_functions.main` prints."""
    found: dict[str, float] = json.loads(printed(call)[-1])
    return found


@needs_xla
@pytest.mark.slow
@pytest.mark.parametrize("interpret", [False, True])
def test_all_families_with_and_without_the_kernel(interpret: bool) -> None:
    found = errors(f"{FAMILIES}, {interpret}, 16")
    assert len(found) == 4 * len(FAMILIES) and max(found.values()) < 1e-6, found


LOWERED_AT_ONCE = """
import threading
from concurrent.futures import ThreadPoolExecutor
import torch, torch_xla
from tpu_kit.xla import grouped
from tpu_kit.xla.traced_program import placeholder

meeting, computations, add = threading.Barrier(4), [], torch_xla._XLAC._xla_user_computation

def record(name, tensors, computation):
    computations.append(computation)
    return add(name, tensors, computation)

def trace(index):
    meeting.wait()
    grouped.layout(grouped.Tiles(8, 16, kernel=False), index)

torch_xla._XLAC._xla_user_computation = record
with ThreadPoolExecutor(4) as pool:
    list(pool.map(trace, [placeholder((64, 2), torch.int64) for _ in range(4)]))
torch_xla._XLAC._xla_user_computation = add
print(len(computations), len(set(map(id, computations))))
"""


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """A process that lowers a program first, and then computes the experts of gpt-oss."""
    return printed('["gpt_oss"], True, 16, ("skewed", "int4")', before=LOWERED_AT_ONCE)


@needs_xla
def test_output_and_gradients_are_those_of_transformers_with_random_and_skewed_routing(lines: list[str]) -> None:
    """The kernel runs in Pallas' interpreter; the reference for integers is their dequantised values."""
    found = json.loads(lines[-1])
    assert len(found) == 2 and max(found.values()) < 1e-6, found


@needs_xla
def test_replicas_that_trace_at_once_get_the_same_computation(lines: list[str]) -> None:
    """The ids in two lowerings differ, and with them the replicas' programs, which then wait for each other."""
    assert lines[-2].split() == ["4", "1"]


AGAINST_MEGABLOX = """
import json
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
from tpu_kit.xla import grouped

draw, found = np.random.default_rng(0), []
sizes = jnp.array([48, 0, 16, 64], jnp.int32)
expert, used = jnp.array([0, 0, 0, 2, 3, 3, 3, 3, 3, 3], jnp.int32), jnp.array([8], jnp.int32)
for back in (False, True):
    rows = jnp.asarray(draw.normal(size=(160, 384 if back else 256)), jnp.float32)
    weight = jnp.asarray(draw.normal(size=(4, 384, 256)), jnp.float32)
    tiles = grouped.Tiles(4, 16, back=back, interpret=True)
    (ours,) = grouped._product(tiles, rows, expert, used, weight)
    theirs = gmm(rows[:128], weight, sizes, tiling=(16, 128, 128), transpose_rhs=not back, interpret=True)
    assert not ours[128:].any()
    found.append(float(jnp.linalg.norm(ours[:128] - theirs) / jnp.linalg.norm(theirs)))
print(json.dumps(found))
"""


@needs_xla
@pytest.mark.slow
def test_the_kernel_gives_the_numbers_of_megablox() -> None:
    found = json.loads(run_loaded(AGAINST_MEGABLOX, env=QUICK).stdout.splitlines()[-1])
    assert len(found) == 2 and max(found) < 1e-6, found


@needs_xla
@pytest.mark.slow
def test_widths_that_are_no_multiples_of_128_are_padded() -> None:
    found = errors('["gpt_oss", "mixtral"], True, 16, ("random", "int"), hidden_size=288, intermediate_size=160')
    assert max(found.values()) < 2e-6, found
    # 72 groups of 16 inputs become 80 in the scales.
    found = errors('["gpt_oss"], True, 16, ("int4",), hidden_size=1152')
    assert len(found) == 1 and max(found.values()) < 1e-6, found


def build(kind: str, **changes: object) -> AutoModelForCausalLM:
    sizes = SIZES | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    with torch.device("meta"):
        config = CONFIG_MAPPING[kind](
            **sizes | {"head_dim": 16, "pad_token_id": 0, "first_k_dense_replace": 1} | changes
        )
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("qwen3_moe", ()), ("mixtral", ()), ("gpt_oss", ()), ("glm4_moe", ("mlp", "shared_experts")),
     ("ernie4_5_moe", ("mlp", "shared_experts")), ("qwen2_moe", ("shared_expert",)),
     ("qwen3_5_moe_text", ("shared_expert",))],
)  # fmt: skip
def test_all_linear_means_neither_experts_nor_routers(kind: str, wanted: tuple[str, ...]) -> None:
    """In the families of Qwen2-MoE, PEFT takes the names of shared experts and dense MLPs for experts."""
    adapted = trainable.adapt(build(kind), LoraConfig(r=2), "fp32")
    names = {name.rpartition(".lora_A")[0] for name in models.trainable_parameters(adapted) if "lora_A" in name}
    assert not any(".experts" in name or name.endswith("gate") or "router" in name for name in names)
    assert len(names) >= (8 if kind != "qwen3_5_moe_text" else 4)
    found = {name.split(".")[-2] for name in names if name.endswith(("gate_proj", "up_proj", "down_proj"))}
    assert found == set(wanted)


def test_targets_of_dense_layers_are_not_those_of_experts_and_noise_in_a_router_is_refused() -> None:
    adapted = trainable.adapt(build("glm4_moe"), LoraConfig(r=2, targets=["q_proj", "up_proj"]), "fp32")
    assert adapted.peft_config["default"].target_modules == {"q_proj"}
    assert adapted.peft_config["default"].target_parameters == ["mlp.up_proj.weight", "shared_experts.up_proj.weight"]
    with pytest.raises(ValueError, match=r"router_jitter_noise=0\.1: .* set it to 0"):
        trainable.adapt(build("mixtral", router_jitter_noise=0.1), LoraConfig(r=2), "fp32")


def test_adapters_of_experts_are_those_of_peft() -> None:
    found = adapted_errors(["gpt_oss", "qwen2_moe"], "cpu")
    assert len(found) == 7 and max(found.values()) < 1e-5, found


@needs_xla
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("qwen2_moe", 4), ("gpt_oss", 3)])
def test_adapters_of_experts_are_those_of_peft_on_xla(kind: str, count: int) -> None:
    script = f"from tests.support.expert_functions import adapted_errors\nadapted_errors(['{kind}'])"
    found = json.loads(run_loaded(script, env=QUICK, timeout=900).stdout.splitlines()[-1])
    assert len(found) == count and max(found.values()) < 1e-5, found


def added_by_vllm(folder: Path, count: int, interleaved: bool) -> dict[str, list[torch.Tensor]]:
    """Returns by module of `count` experts the sums that vLLM adds to the weights of gates, ups and downs, (E, O, I).

    The rule is that of vLLM 0.33.0 with enable_mixed_moe_lora_format and is_3d_lora_weight, in its lora/lora_model.py,
    lora/peft_helper.py (`get_rank_and_scaling`) and lora/model_manager.py (`_convert_3d_to_2d_moe_lora`): A is (E r, I)
    and B (O, r E); "experts.base_layer" is gates and ups, which are the even and the odd outputs of gpt-oss, and halves
    of others'; "experts" is downs; a pattern with the last parts of the parameter's name gives rank and alpha.
    """
    settings, added = json.loads((folder / "adapter_config.json").read_text()), {}
    tensors = {name.removeprefix("base_model.model."): one
               for name, one in load_file(folder / "adapter_model.safetensors").items()}  # fmt: skip

    def product(module: str, parameter: str) -> torch.Tensor:
        down, up = (tensors[f"{module}.lora_{part}.weight"] for part in "AB")
        (rank, alpha) = (
            next((value for end, value in settings[f"{kind}_pattern"].items() if f".{parameter}".endswith(f".{end}")))
            for kind in ("rank", "alpha")
        )
        scale = alpha / (rank**0.5 if settings["use_rslora"] else rank)
        return scale * up.reshape(len(up), -1, count).permute(2, 0, 1) @ down.reshape(count, -1, down.shape[-1])

    for module in {name.partition(".lora_A")[0] for name in tensors if name.endswith("experts.lora_A.weight")}:
        both = product(f"{module}.base_layer", f"{module}.gate_up_proj")
        halves = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, 1)
        added[module] = [*halves, product(module, f"{module}.down_proj")]
    return added


@pytest.mark.parametrize(("kind", "rslora"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_vllm_reads_adapters_of_experts_as_peft_does(kind: str, rslora: bool, tmp_path: Path) -> None:
    folder, lora = write_mixture(kind, tmp_path / "base", intermediate_size=32), {"lora.r": 4, "lora.rslora": rslora}
    config = make_run(tmp_path, str(folder), **lora, **{"lora.experts": 2})
    base = load_base(config.model, torch.float32)
    plain = {name: weight.clone() for name, weight in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    added = added_by_vllm(tmp_path / "adapter", 8, kind == "gpt_oss")
    assert len(added) == 2
    for module, (gates, ups, downs) in added.items():
        both, down = (merged[f"{module}.{name}_proj"] - plain[f"{module}.{name}_proj"] for name in ("gate_up", "down"))
        both, down = (both.mT, down.mT) if kind == "gpt_oss" else (both, down)
        halves = (both[:, ::2], both[:, 1::2]) if kind == "gpt_oss" else both.chunk(2, 1)
        for ours, theirs in zip((*halves, down), (gates, ups, downs), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_adapters_of_experts_need_experts() -> None:
    with pytest.raises(ValueError, match=r"lora\.experts=2: Qwen3ForCausalLM has no experts; set it to 0"):
        trainable.adapt(build("qwen3"), LoraConfig(r=2, experts=2), "fp32")
    with pytest.raises(ValueError, match=r"lora\.dropout: 0\.1 is not supported for adapters of experts"):
        load_config(None, {"lora.experts": 2, "lora.dropout": 0.1})


@pytest.mark.parametrize(("dtype", "rank"), [("bf16", 0), ("int8", 2), ("int4", 2)])
def test_a_plan_has_the_tensors_of_the_model(dtype: str, rank: int) -> None:
    model = build("qwen3_moe")
    shape = shape_of(model, "tiny")
    (mixture,) = shape.kinds[0].experts
    assert (mixture.count, mixture.chosen, shape.parameters) == (8, 3, model.num_parameters())
    assert shape.flops(0, 0, 1) > 2 * (shape.linear_weights - 2 * 5 * mixture.weights)  # with routers
    group = {"quant_group": 16} if dtype == "int4" else {}
    config = load_config(None, {"base_dtype": dtype, "lora.r": 2, "lora.experts": rank, **group})
    if scheme := Scheme.of(config.model):
        replace_layers(model, scheme)
    adapted = trainable.adapt(model, config.lora, dtype)
    ours = {**dict(adapted.named_parameters()), **dict(adapted.named_buffers())}
    planned = {one.name: one.shape for one in model_tensors(shape, config, scanned=False)}
    assert planned == {name: tuple(tensor.shape) for name, tensor in ours.items() if "rotary" not in name}


# -------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_mxfp4_is_rounded_from_what_transformers_makes_of_it(dtype: Any, tmp_path: Path, capfd: Any) -> None:
    folder = write_mixture("gpt_oss", tmp_path / "model", hidden_size=64, intermediate_size=96)
    config = ModelConfig(name=str(folder), base_dtype=dtype, quant_group=16, quant_cache=str(tmp_path / "kept"))
    plain = load_base(config, torch.bfloat16)
    blocks = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    expected = convert_moe_packed_tensors(blocks[f"{name}_blocks"], blocks[f"{name}_scales"])
    assert torch.equal(plain.get_parameter(name), expected)
    scheme = Scheme.of(config)
    assert scheme is not None
    quantize_model(plain, scheme)
    loaded = load_frozen(config)
    told = f"mxfp4 is rounded again to {scheme}: relative error at most {'0.7' if dtype == 'int8' else '6.7'}%, "
    assert told in capfd.readouterr().out
    for ours in (loaded, load_frozen(config)):  # the second time from the cache
        assert not capfd.readouterr().out
        assert ours.state_dict().keys() == plain.state_dict().keys()
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, plain.state_dict()[name]), name


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = write_mixture("gpt_oss", tmp_path, hidden_size=64, intermediate_size=96)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"intermediate_size": 64}))
    with pytest.raises(ValueError, match="transformers cannot load it"):
        load_frozen(ModelConfig(name=str(folder), base_dtype="int8", quant_cache=None))


@pytest.mark.slow  # quick sibling: the first test of loading
@pytest.mark.parametrize(("device_type", "same"), [("cpu", False), ("xla-cpu", True), ("tpu", True)])
def test_generation_on_xla_has_experts_in_the_form_of_training(tmp_path: Path, device_type: Any, same: bool) -> None:
    base = write_mixture("qwen3_moe", tmp_path, intermediate_size=32, vocab_size=512)
    rt = CpuRuntime(0, 1, torch.device("cpu"))
    rt.device_type = device_type
    model, _ = model_loading._read(load_config(None, {"model.name": str(base), "base_dtype": "fp32"}), None, rt)
    layer = models.base_model(model).get_decoder().layers[0].mlp.experts
    assert hasattr(layer, "form") == same


@pytest.mark.slow
def test_loading_takes_the_memory_of_the_integers_and_two_layers(tmp_path: Path) -> None:
    """Files of Qwen3-MoE have matrices per expert; files of gpt-oss have MXFP4."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 8}
    folders = [str(write_mixture(kind, tmp_path / kind, **sizes)) for kind in ("qwen3_moe", "gpt_oss")]
    env = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    printed = run_python(["-c", LOADING_MEMORY, *folders], env=env).stdout
    print(printed)
    layer = 8 * 3 * 512 * 512 * 2
    lines = [line.split()[1:] for line in printed.splitlines() if line.startswith("figures")]
    for folder, (size, most) in zip(folders, [map(int, line) for line in lines], strict=True):
        assert size < most < size + 2 * layer < 8 * layer
        config = load_config(None, {"model.name": folder, "base_dtype": "int8", "quant_cache": None})
        expected = capacity.loading_bytes(config)
        assert expected is not None and most < expected and capacity.cast_bytes(config) == 0
