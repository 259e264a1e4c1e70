"""Integer bases: storage, computation, loading and refusals."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from tests.benchmarks import headline
from tests.support import quantize_functions
from tests.support.child_processes import REPOSITORY, run_python
from tests.support.compiler_models import TINY, write_config
from tests.support.quantize_functions import MEMORY, SHARDED_MEMORY, dense_of, dequantized, fingerprint, write_model
from tests.support.training_functions import OPTIM, control
from tpu_kit.config.loader import ConfigError, LoraConfig, ModelConfig, TrainConfig, load_config
from tpu_kit.config.mesh import Mesh
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.distributed.replica.mesh import use_mesh
from tpu_kit.machine import capacity
from tpu_kit.machine.checks import Machine
from tpu_kit.model import causal_lm as models
from tpu_kit.model import trainable
from tpu_kit.model.loop import layer_calls, layer_scan
from tpu_kit.model.meta_model import empty_model
from tpu_kit.model.weights import loading
from tpu_kit.model.weights.loading import load_base, load_frozen
from tpu_kit.model.weights.quantization import QuantizedLinear, Scheme, layers_of, quantize_model
from tpu_kit.planning.compiler.compile_check import compile_step
from tpu_kit.recipes.sft import train
from tpu_kit.training.objectives import SupervisedObjective
from tpu_kit.training.state import TrainState
from tpu_kit.training.step import train_step

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
CPU = torch.device("cpu")
ALONE = CpuRuntime(0, 1, CPU)
INT8, INT4 = Scheme(8), Scheme(4, 32)
LORA = LoraConfig(r=4, alpha=8.0)
GIB = 2**30


def weight(outputs: int = 40, inputs: int = 256) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)) * 0.05


def layer_of(scheme: Scheme, of: torch.Tensor) -> QuantizedLinear:
    layer = QuantizedLinear(of.shape[1], of.shape[0], scheme)
    layer.weight, layer.scale = scheme.quantize(of)
    return layer


# ------------------------------------------------------------------------------------------------------- what is stored


def test_int8_is_within_half_a_step_of_each_output() -> None:
    integers, scale = INT8.quantize(weight())
    assert (integers.dtype, scale.dtype, scale.shape) == (torch.int8, torch.bfloat16, (40,))
    assert set(integers.abs().amax(1).tolist()) <= {126, 127}
    error = (dense_of(INT8, integers, scale, torch.float32) - weight()).abs()
    assert bool((error <= scale.float()[:, None] * 0.501).all())


def test_int4_is_the_same_on_a_mesh() -> None:
    """There, steps and offsets are spread by a product; the TPU compiler would write broadcasts to memory."""
    stored = INT4.quantize(weight())
    for dtype in (torch.float32, torch.bfloat16):
        with use_mesh(Mesh(fsdp=2)), FlopCounterMode(display=False) as counter:
            found = dense_of(INT4, *stored, dtype)
        assert counter.get_total_flops() > 0
        assert torch.equal(found, dense_of(INT4, *stored, dtype))


def test_int4_is_stored_as_the_module_says_and_better_than_by_its_largest_value() -> None:
    integers, scale = INT4.quantize(weight())
    assert (integers.dtype, integers.shape) == (torch.uint8, (128, 40))
    assert (scale.dtype, scale.shape) == (torch.bfloat16, (2, 8, 40))
    packed = integers.T.numpy()
    values = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    step, offset = np.repeat(scale.mT.float().numpy(), 32, axis=2)
    dense = torch.from_numpy(values * step + offset)
    assert torch.equal(dense_of(INT4, integers, scale, torch.float32), dense)
    groups = weight().view(40, 8, 32)
    plain = groups.abs().amax(-1, keepdim=True) / 7
    rounded = (torch.round(groups / plain) * plain).view(40, 256)
    assert (dense - weight()).norm() < 0.86 * (rounded - weight()).norm()


def test_int4_cuts_off_what_lies_far_out_where_that_costs_less() -> None:
    """Compared with steps from a group's minimum to its maximum, which have 3.7 % more squared error here."""
    groups = weight().view(40, 8, 32)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step, low = ((high - low) / 15).bfloat16().float(), low.bfloat16().float()
    whole = (torch.round((groups - low) / step).clamp(0, 15) * step + low - groups).square().sum(-1)
    dense = dense_of(INT4, *INT4.quantize(weight()), torch.float32).view(40, 8, 32)
    found = (dense - groups).square().sum(-1)
    assert bool((found <= whole * 1.0001).all())
    assert float(found.sum()) < 0.97 * float(whole.sum())


def test_int4_keeps_what_has_sixteen_values_in_a_group_as_files_of_four_bits_have() -> None:
    values = torch.randint(0, 16, (6, 8, 32), generator=torch.Generator().manual_seed(0))
    values[..., :2] = torch.tensor([0, 15])
    dense = (values * 0.013 - 0.11).view(6, 256)
    again = dense_of(INT4, *INT4.quantize(dense), torch.float32)
    assert (again - dense).norm() < 0.005 * dense.norm()


@pytest.mark.parametrize("scheme", [INT8, INT4])
def test_rounding_again_and_zeros(scheme: Scheme) -> None:
    zeros = dense_of(scheme, *scheme.quantize(torch.zeros(4, 64)), torch.float32)
    assert torch.equal(zeros, torch.zeros(4, 64))
    dense = dense_of(scheme, *scheme.quantize(weight()), torch.float32)
    again = dense_of(scheme, *scheme.quantize(dense), torch.float32)
    torch.testing.assert_close(again, dense, rtol=0.01, atol=1e-5)


# ----------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("scheme", [INT8, INT4])
def test_a_layer_and_its_gradients_are_those_of_the_dequantised_weight(scheme: Scheme) -> None:
    layer, states = layer_of(scheme, weight()), torch.randn(2, 5, 256, requires_grad=True)
    other, upstream = states.detach().clone().requires_grad_(), torch.randn(2, 5, 40)
    output, expected = layer(states), torch.nn.functional.linear(other, dequantized(layer))
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    output.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(states.grad, other.grad, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = layer(states)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("scheme", [INT8, INT4])
def test_autograd_keeps_the_stored_tensors_alone(scheme: Scheme) -> None:
    layer, kept = layer_of(scheme, weight()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(5, 256, requires_grad=True))
    assert [tensor.data_ptr() for tensor in kept] == [layer.weight.data_ptr(), layer.scale.data_ptr()]


def packed() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(3))
    positions = torch.tensor([[*range(7), *range(11), 0, 0]] * 2)
    segments = torch.tensor([[1] * 7 + [2] * 11 + [0] * 2] * 2)
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "segment_ids": segments}


SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip


def made(
    scheme: Scheme,
    *,
    dense: bool = False,
    family: str = "llama",
    dtype: str = "fp32",
    tile: int | str | None = "unrolled",
) -> torch.nn.Module:
    """A model with adapters, its layers a loop unless `tile` says otherwise; `dense` multiplies plain weights."""
    torch.manual_seed(0)
    model: Any = (
        LlamaForCausalLM(LlamaConfig(attention_bias=True, **SIZES))
        if family == "llama"
        else Phi3ForCausalLM(Phi3Config(**SIZES))
    )
    quantize_model(model, scheme)
    if dense:
        for name, layer in layers_of(model).items():
            assert isinstance(layer, QuantizedLinear)
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            plain.weight.data, plain.bias = dequantized(layer), layer.bias
            model.set_submodule(name, plain)
    model = trainable.adapt(model, LoraConfig(r=4, init="gaussian"), dtype).train()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    if not isinstance(tile, str):
        layer_scan.stack(model.get_decoder(), tile)
    return model


def loss_and_gradients(model: torch.nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    loss = SupervisedObjective(OPTIM)(model, packed()).loss
    loss.backward()
    found = {name: one.grad for name, one in models.trainable_parameters(model).items() if one.grad is not None}
    return float(loss.detach()), layer_calls.unstacked(layer_calls.stacked_names(model), found)


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("scheme", [INT8, INT4])
def test_gradients_are_those_of_the_dequantised_model_unrolled_and_as_a_loop(scheme: Scheme, family: str) -> None:
    loss, expected = loss_and_gradients(made(scheme, dense=True, family=family))
    for tile in ("unrolled", None, 7):
        ours, found = loss_and_gradients(made(scheme, family=family, tile=tile))
        assert ours == pytest.approx(loss, rel=1e-5)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            most = float(gradient.abs().max())
            assert most > 1e-4, name
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-3 * most, msg=name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_loop_of_integers_learns(dtype: str) -> None:
    model, losses = made(INT4, tile=None, dtype=dtype), []
    shapes = {name.rpartition("layers.0.")[2]: (tuple(b.shape), b.dtype) for name, b in model.named_buffers()}
    assert shapes["mlp.down_proj.base_layer.weight"] == ((3, 64, 64), torch.uint8)
    assert shapes["mlp.down_proj.base_layer.scale"] == ((3, 2, 4, 64), torch.bfloat16)
    state = TrainState(model, CPU, OPTIM)
    for number in (1, 2, 3, 4):
        losses.append(float(SupervisedObjective(OPTIM)(model, packed()).loss.detach()))
        train_step(
            model, state, [packed()], control(1e-2, number, float(number > 1)), SupervisedObjective(OPTIM), OPTIM, ALONE
        )
    assert losses[0] == pytest.approx(loss_and_gradients(made(INT4))[0], rel=0.02)
    assert losses[3] < 0.9 * losses[0]


def test_what_is_frozen_in_integers_is_counted_and_layers_without_an_adapter_are_named() -> None:
    def counted(targets: Any) -> trainable.ParameterCount:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        plain = trainable.count_parameters(
            trainable.adapt(copy.deepcopy(model), LoraConfig(r=4, targets=targets), "fp32")
        )
        quantize_model(model, INT4)
        count = trainable.count_parameters(trainable.adapt(model, LoraConfig(r=4, targets=targets), "int4"))
        assert count[:2] == plain[:2]
        return count

    weights = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert counted("all-linear").quantized == f"; {weights:,} are frozen in int4 in groups of 32"
    assert str(counted(("q_proj", "v_proj"))).endswith(
        "; no adapter can correct the rounding of down_proj, gate_proj, k_proj, o_proj, up_proj"
    )


# -------------------------------------------------------------------------------------------------------------- loading


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("saved"), shards="60KB", tie_word_embeddings=True)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_loading_rounds_the_saved_weights_and_nothing_else(saved: Path, dtype: Any) -> None:
    config = ModelConfig(name=str(saved), base_dtype=dtype, quant_group=32, quant_cache=None)
    assert len(list(saved.glob("*.safetensors"))) > 1
    loaded, plain = load_frozen(config), load_base(config, torch.bfloat16)
    scheme = Scheme.of(config)
    assert scheme is not None
    quantize_model(plain, scheme)
    expected = plain.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    assert fingerprint(loaded) == fingerprint(plain)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    assert not loaded.is_quantized and not hasattr(loaded.config, "quantization_config")


@pytest.mark.parametrize("file_bytes", [50_000, 2**30])
def test_what_is_kept_is_read_the_next_time(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], file_bytes: int
) -> None:
    config = ModelConfig(name=str(saved), base_dtype="int4", quant_group=32, quant_cache=str(tmp_path / "kept"))
    monkeypatch.setattr(loading, "_FILE_BYTES", file_bytes)
    first = load_frozen(config)
    (place,) = (path for path in (tmp_path / "kept").iterdir() if path.is_dir())
    assert f"cached for the next run: {place}" in capfd.readouterr().out
    assert len(list(place.glob("*.safetensors"))) > 1
    rounds: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(Scheme, "quantize", lambda *given: rounds.append(given))
        again = load_frozen(config)
    assert not rounds and again.config.name_or_path == str(saved)
    assert again.state_dict().keys() == first.state_dict().keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, first.state_dict()[name]), name
    wanted = fingerprint(first)
    del first, again  # which map the file
    damaged = next(place.glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert fingerprint(load_frozen(config)) == wanted
    assert f"again: {place} is damaged" in capfd.readouterr().out
    damaged.write_bytes(damaged.read_bytes()[:100])
    with monkeypatch.context() as patched:  # as for another user's file
        patched.setattr("shutil.rmtree", lambda *_, **__: None)
        assert fingerprint(load_frozen(config)) == wanted
    assert f"not cached: {place} cannot be deleted" in capfd.readouterr().out
    assert fingerprint(load_frozen(config)) == wanted
    # Other weights or another scheme have another place.
    other = ModelConfig(name=str(saved), base_dtype="int4", quant_group=16, quant_cache=str(tmp_path / "kept"))
    assert fingerprint(load_frozen(other)) != wanted
    (saved / "generation_config.json").touch()
    load_frozen(config)
    assert len([path for path in (tmp_path / "kept").iterdir() if path.is_dir()]) == 3


def test_a_cache_that_cannot_be_written_is_no_obstacle(saved: Path, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "file").touch()
    config = ModelConfig(name=str(saved), base_dtype="int8", quant_cache=str(tmp_path / "file" / "kept"))
    assert fingerprint(load_frozen(config))
    assert "not cached" in capfd.readouterr().out


@pytest.mark.slow
def test_loading_takes_the_memory_of_the_quantised_model_and_of_one_shard(tmp_path: Path) -> None:
    """An 8B model's proportions: an eighth in embedding and head, shards of a third. All of it in bf16 would not be
    accurate enough."""
    wide = {"hidden_size": 768, "intermediate_size": 2688, "num_hidden_layers": 4, "num_attention_heads": 8}
    folder = write_model(tmp_path / "model", shards="25MB", vocab_size=3072, tie_word_embeddings=False, **wide)
    shards = [path.stat().st_size for path in folder.glob("*.safetensors")]
    # Freed tensors go back to the system at once, so that gaps in the heap do not count.
    env = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = run_python(["-c", MEMORY, str(folder), "int4", str(tmp_path / "kept")], env=env)
    line = next(line for line in done.stdout.splitlines() if line.startswith("figures"))
    size, most = map(int, line.split()[1:])
    print(line, shards)
    assert size < 0.45 * sum(shards) and len(shards) > 2
    assert most < size + max(shards)
    expected = capacity.loading_bytes(
        load_config(None, {"model.name": str(folder), "base_dtype": "int4", "quant_group": 32})
    )
    mapped = 2 * 3072 * 768 * 2  # embedding and head, of the file
    assert expected is not None and 0.5 * expected < most + mapped and most < expected < 0.5 * sum(shards)


@pytest.mark.slow  # quick sibling: tests/distributed/test_mesh.py, where a stack is moved part by part
@needs_xla
def test_a_mesh_is_loaded_with_one_stack_beyond_what_the_devices_hold(tmp_path: Path) -> None:
    """int4 rounded and kept, int4 from the cache, bf16 with adapters, and all weights trained in fp32.

    The runtime may still copy the previous stack, and no call here can wait for that copy.
    """
    wide = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "num_attention_heads": 8}
    folder = write_model(tmp_path / "model", shards="25MB", vocab_size=1024, **wide)
    env = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    devices = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    done = run_python(["-c", SHARDED_MEMORY, str(folder), str(tmp_path / "kept")], env=env | devices)
    found = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("figures")]
    assert len(found) == 4 and done.stdout.count("cached for the next run") == 1
    for stacked, beyond, stacks, largest in found:
        assert beyond < 2 * largest + 2**22 < 0.7 * stacks, found
        assert stacked < largest, found


# ------------------------------------------------------------------------------------------------------------- training


def run_config(folder: Path, output: Path, **changes: Any) -> TrainConfig:
    rows = output.parent / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{n} + {n} = ", "completion": str(2 * n)}) + "\n" for n in range(80))
    )
    settings = {
        "model.name": str(folder), "base_dtype": "int8", "quant_cache": None, "lora.r": 4, "source": str(rows),
        "max_length": 32, "eval_rows": 8, "max_steps": 4, "warmup_steps": 1, "learning_rate": 1e-2, "loss_chunk": 64,
        "logging_steps": 2, "batch_size": 2, "output_dir": str(output), "device_type": "cpu", "num_replicas": 1,
        "save_steps": 2,
    }  # fmt: skip
    config = load_config(None, settings | changes)
    config.output_path.mkdir(parents=True, exist_ok=True)
    return config


@needs_xla
@pytest.mark.slow
def test_replicas_on_xla_one_program_no_reading_and_bit_for_bit_the_same(
    saved: Path, tmp_path: Path, quick_xla: None
) -> None:
    config = run_config(
        saved, tmp_path / "run", device_type="xla-cpu", num_replicas=2, scan_layers="on", save_steps=1000, eval_rows=0
    )
    ended = launch(quantize_functions.noted, config)
    counters = ended["counters"]
    assert counters["compiles"] == ended["set_up"] + 1
    syncs = 1 + 4  # set-up, updates
    assert [note["syncs"] for note in ended["ranks"]] == [syncs] * 2
    assert counters["executions"] == syncs * 2
    assert counters["host_syncs"] == counters["fallbacks"] == 0
    assert len({note["hash"] for note in ended["ranks"]}) == 1
    bases = {(config.output_path / f"base-{rank}.json").read_text() for rank in (0, 1)}
    frozen = load_frozen(config.model)
    adapted = trainable.adapt(frozen, config.lora, "int8")
    assert bases == {json.dumps(fingerprint(adapted))}
    # The same numbers as on the CPU, without a loop, in one replica.
    plain = train(run_config(saved, tmp_path / "plain", batch_size=4, eval_rows=0))
    assert ended["result"]["metrics"]["loss"] == pytest.approx(plain.metrics["loss"], rel=0.02)
    # torch_xla's own quantised layer gives its input no gradient.
    assert all(error < 1e-4 for errors in ended["errors"].values() for error in errors), ended["errors"]


def test_a_resumed_run_is_the_uninterrupted_one(saved: Path, tmp_path: Path) -> None:
    changes = {"base_dtype": "int4", "quant_group": 32, "schedule": "constant", "max_steps": 4}
    train(run_config(saved, tmp_path / "whole", **changes))
    train(run_config(saved, tmp_path / "halves", **{**changes, "max_steps": 2}))
    train(run_config(saved, tmp_path / "halves", **changes))
    whole, halves = ((tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("whole", "halves"))
    assert whole.read_bytes() == halves.read_bytes()
    with pytest.raises(ValueError, match=r"model.base_dtype: 'int4' there, 'int8' now"):
        train(run_config(saved, tmp_path / "halves", max_steps=6, schedule="constant"))


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lora.r": 0}, r"model.base_dtype: 'int8' holds weights that cannot be trained, and lora.r=0 trains all"),
        ({"lora.dora": True}, r"lora.dora: true reads base weights that model.base_dtype=int8 has rounded"),
        ({"quant_group": 64}, r"model.quant_group: 64 needs model.base_dtype=int4; remove it or set that"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(None, {"base_dtype": "int8", **settings})


def test_a_group_that_does_not_divide_names_the_layers(saved: Path, tmp_path: Path) -> None:
    text = r"model.quant_group=64 does not divide half of the inputs of q_proj \(64\), .*, up_proj \(64\): set it to 32"
    with pytest.raises(ValueError, match=text):
        load_frozen(ModelConfig(name=str(saved), base_dtype="int4", quant_group=64, quant_cache=None))
    config = load_config(None, [f"model.name={saved}", "base_dtype=int4", "quant_group=64", "max_length=64"])
    with pytest.raises(ValueError, match=text), torch.device("meta"):
        empty_model(config)


def quantised_by(method: dict[str, Any], folder: Path) -> Path:
    write_model(folder, hidden_size=128, intermediate_size=128)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method}))
    return folder


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_what_another_tool_has_quantised_is_refused_with_advice(tmp_path: Path, method: str, dtype: Any) -> None:
    if importlib.util.find_spec({"gptq": "optimum", "awq": "gptqmodel", "bitsandbytes": "bitsandbytes"}[method]):
        pytest.skip("its tool is installed")
    folder = quantised_by({"quant_method": method, "bits": 4, "group_size": 128, "load_in_4bit": True}, tmp_path)
    text = f"its weights are quantized by {method} and cannot be dequantized here .*Use the original model"
    with pytest.raises(ValueError, match=text):
        load_frozen(ModelConfig(name=str(folder), base_dtype=dtype, quant_cache=None))


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_what_another_tool_has_saved_in_fp8_is_dequantised(tmp_path: Path, dtype: Any) -> None:
    folder = quantised_by({"quant_method": "fp8", "weight_block_size": [128, 128]}, tmp_path)
    model = LlamaForCausalLM.from_pretrained(write_model(tmp_path / "plain", hidden_size=128, intermediate_size=128))
    tensors, expected = {}, {}
    for name, tensor in model.state_dict().items():
        if "proj" in name:
            scale = tensor.float().abs().max() / 448
            tensors[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
            expected[name] = tensors[name].float() * scale
        else:
            tensors[name] = tensor.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load_frozen(ModelConfig(name=str(folder), base_dtype=dtype, quant_cache=None))
    for name, layer in layers_of(loaded).items():
        found = dequantized(layer) if isinstance(layer, QuantizedLinear) else layer.weight.float()
        wanted = expected[f"{name}.weight"]
        assert (found - wanted).norm() < 0.02 * wanted.norm(), name


# ----------------------------------------------------------------------------------------- compiled by the TPU compiler


@pytest.mark.slow  # quick sibling: autograd_keeps_the_stored_tensors_alone
@needs_libtpu
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_no_copy_of_the_weights_outlives_its_layer(tmp_path: Path, dtype: str) -> None:
    # Groups of 128 of half of 1280 inputs are 5, which do not fill the 8 rows of a tile.
    model = write_config(
        tmp_path / "model", TINY,
        hidden_size=1280, intermediate_size=4096, num_attention_heads=10, num_hidden_layers=32,
    )  # fmt: skip
    settings = [f"model.name={model}", f"base_dtype={dtype}", "batch_size=1", "max_length=128", "loss_chunk=128"]
    config = load_config(None, [*settings, "device_type=tpu"])
    result = compile_step(config, "v5e:1x1", effort="low", progress=False, cache_dir=tmp_path)
    # It is 163 MB. A copy of all layers' weights of a kind, except the small k and v, takes at least 26 MB more.
    assert result.temporary_bytes < 175e6


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "most"),
    [("", 10.0), (" max_length=2048", 10.8), (" max_length=8192", 15.75), (" base_dtype=int4", 7.3)],
)
def test_an_8b_model_on_one_v5e(settings: str, most: float) -> None:
    config = headline.configuration(f"llama-8b-v5e batch_size=1{settings}")
    result = compile_step(config, "v5e:1x1", progress=False)
    assert result.fits and result.total_bytes <= most * GIB


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("row", headline.ROWS)
def test_what_is_published_of_a_shipped_configuration_is_what_the_compiler_says(row: str) -> None:
    assert headline.line(row) in headline.PAGE.read_text(), "python -m tests.benchmarks.headline --readme"


def test_every_configuration_for_a_chip_is_published() -> None:
    shipped = {path.stem for path in (REPOSITORY / "tpu_kit" / "configs").glob("*-v[0-9]*.yaml")}
    runs = {name: load_config(name) for name in shipped}  # for a mesh and for images see tpu_kit/model/README.md
    shipped = {name for name, run in runs.items() if run.launch.mesh is None and not run.model.images}
    assert shipped == {row.split()[0] for row in headline.ROWS}
    table = headline.PAGE.read_text().partition(headline.HEADER)[2].partition("\n\n")[0].splitlines()
    assert len(table) == len(headline.ROWS)
    for row, line in zip(headline.ROWS, table, strict=True):
        assert line.startswith(headline.known(row)), "python -m tests.benchmarks.headline --readme"
        assert load_config(row.split()[0]).run_name == row.split()[0]
