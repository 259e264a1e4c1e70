"""Layers as loops over stacked weights equal unrolled layers, on every path of the step."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from tests.support import layer_functions
from tests.support.training_functions import OPTIM, control, rows, tiny
from tpu_kit.config.loader import LoraConfig, OptimConfig, TrainConfig, load_config
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.machine.checks import Machine
from tpu_kit.model import causal_lm as models
from tpu_kit.model import trainable
from tpu_kit.model.loop import layer_calls, layer_scan, loop_structure
from tpu_kit.model.loop.activation_checkpointing import SeededDropout, chunk_mlp, keep_mask, tiles_of
from tpu_kit.model.loop.layer_calls import CannotScanError
from tpu_kit.training import adapter_files
from tpu_kit.training.objectives import SupervisedObjective
from tpu_kit.training.state import TrainState, restore
from tpu_kit.training.step import train_step
from tpu_kit.xla.scan import scan

pytestmark = pytest.mark.usefixtures("quick_xla")
needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
CPU = torch.device("cpu")
ALONE = CpuRuntime(0, 1, CPU)
SHARP: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
LOCAL, GLOBAL = "sliding_attention", "full_attention"
# With the runs that their layers make: (layers of a block, turns).
FAMILIES = {
    "llama": (LlamaConfig(**SHARP), [(1, 4)]),
    "qwen2": (Qwen2Config(**SHARP), [(1, 4)]),
    "qwen2-windows": (
        Qwen2Config(use_sliding_window=True, max_window_layers=2, sliding_window=5, **SHARP), [(1, 2), (1, 2)],
    ),
    "qwen3": (Qwen3Config(head_dim=8, **SHARP), [(1, 4)]),
    "mistral": (MistralConfig(sliding_window=5, **SHARP), [(1, 4)]),
    "phi3": (Phi3Config(sliding_window=5, **SHARP), [(1, 4)]),
    "gemma2": (
        Gemma2Config(head_dim=8, query_pre_attn_scalar=8, sliding_window=5, final_logit_softcapping=3.0, **SHARP),
        [(2, 2)],
    ),
    "gemma3": (
        Gemma3TextConfig(
            head_dim=8, query_pre_attn_scalar=8, sliding_window=5,
            **SHARP | {"num_hidden_layers": 8}, layer_types=[LOCAL, LOCAL, GLOBAL] * 2 + [LOCAL] * 2,
        ),
        [(3, 2), (1, 2)],
    ),
    "phi": (PhiConfig(**SHARP), [(1, 4)]),
    "gpt2": (GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=61, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0,
                        embd_pdrop=0.0, initializer_range=0.2), [(1, 3)]),
    "granite": (GraniteConfig(residual_multiplier=0.5, attention_multiplier=0.2, **SHARP), [(1, 4)]),
    "smollm3": (SmolLM3Config(**SHARP | {"num_hidden_layers": 8}), [(4, 2)]),
    "olmo3": (Olmo3Config(sliding_window=5, **SHARP | {"num_hidden_layers": 9}), [(4, 2), (1, 1)]),
    # Layers 8 and 9 store keys and values in a mapping for layers 10 to 13; each layer has its own input.
    "gemma4": (
        Gemma4TextConfig(
            head_dim=8, global_head_dim=16, sliding_window=5, num_kv_shared_layers=4, use_double_wide_mlp=True,
            hidden_size_per_layer_input=8, vocab_size_per_layer_input=61, final_logit_softcapping=3.0,
            **SHARP | {"num_hidden_layers": 14, "num_key_value_heads": 1},
            layer_types=[LOCAL, LOCAL, LOCAL, GLOBAL] * 2 + [LOCAL, GLOBAL] * 3,
        ),
        [(4, 2), (1, 1), (1, 1), (2, 2)],
    ),
}  # fmt: skip
QUICK = ("qwen2", "gemma3", "gemma4")
SEGMENTS = torch.tensor([[1] * 7 + [2] * 11 + [0] * 2] * 2)


def packed() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(3))
    positions = torch.tensor([[*range(7), *range(11), 0, 0]] * 2)
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "segment_ids": SEGMENTS}


def built(name: str, lora: LoraConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    model = trainable.adapt(AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[name][0])), lora, "fp32").train()
    for own, parameter in model.named_parameters():
        if "lora_B" in own:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def decoder_of(model: torch.nn.Module) -> torch.nn.Module:
    decoder: torch.nn.Module = models.base_model(model).get_decoder()
    return decoder


def loss_and_gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    loss = SupervisedObjective(OPTIM)(model, batch).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in models.trainable_parameters(model).items()}
    return float(loss.detach()), {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize(
    ("rank", "tile", "keeps"),
    [(4, None, False), (0, None, False), (4, 7, False), (4, None, True), (0, None, True)],
)
@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_loss_and_gradients_are_those_of_the_unrolled_layers(
    family: str, rank: int, tile: int | None, keeps: bool
) -> None:
    # Tiles sum in another order; the gradients of gemma4, with 14 layers, then differ by up to 7e-5, of others by 3e-6.
    error = 1e-6 if tile is None else 1e-4 if family == "gemma4" else 1e-5
    unrolled = built(family, LoraConfig(r=rank))
    looped = copy.deepcopy(unrolled)
    runs = layer_scan.stack(decoder_of(looped), tile, keeps).runs
    assert [(run.period, run.turns) for run in runs] == FAMILIES[family][1]
    loss, expected = loss_and_gradients(unrolled, packed())
    ours, found = loss_and_gradients(looped, packed())
    found = layer_calls.unstacked(layer_calls.stacked_names(looped), found)
    assert ours == pytest.approx(loss, rel=1e-6)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-4, name
        atol = error * float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=error, atol=atol, msg=name)


STATES = {"llama": [2], "gemma3": [2, 2], "gemma2": [2], "smollm3": [2], "gemma4": [2, 1, 1, 2]}  # that loops keep
QUICK_BLOCKS = (("llama", 4), ("gemma3", 0))


@pytest.mark.parametrize(
    ("family", "rank"),
    [pytest.param(*one, marks=[] if one in QUICK_BLOCKS else pytest.mark.slow)
     for one in itertools.product(STATES, (4, 0))],
)  # fmt: skip
def test_blocks_compute_what_single_layers_compute_and_keep_fewer_states(family: str, rank: int) -> None:
    lora = {"r": rank, "dropout": 0.5} if rank else {"r": 0}
    single, results, states = built(family, LoraConfig(**lora)), [], []
    for blocks in (False, True):
        model, kept = copy.deepcopy(single), list[int]()
        layer_scan.stack(decoder_of(model), 7, blocks=blocks)

        def saved(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            if tensor.dim() > 3 and tensor.shape[-3:] == (*SEGMENTS.shape, 32):
                kept.append(tensor.shape[:-3].numel())
            return tensor

        torch.manual_seed(7)  # of dropout
        with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
            results.append(loss_and_gradients(model, packed()))
        states.append(kept)
    (loss, expected), (found_loss, found) = results
    assert found_loss == loss and found.keys() == expected.keys()
    for name, gradient in expected.items():
        atol = 1e-6 * float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=atol, msg=name)
    assert states[1] == STATES[family] and sum(states[0]) == FAMILIES[family][0].num_hidden_layers


@pytest.mark.parametrize(
    ("layers", "blocks"),
    [(32, (8, 4)), (36, (6, 6)), (28, (7, 4)), (26, (13, 2)), (80, (10, 8)), (4, (2, 2)), (13, (13, 1)), (1, (1, 1))],
)
def test_a_block_has_the_layers_that_leave_the_fewest_states(layers: int, blocks: tuple[int, int]) -> None:
    (found,) = loop_structure.in_blocks(loop_structure.loops("a" * layers))
    assert (found.turns, found.period) == blocks
    counts = [layers // size + size - 1 for size in range(1, layers + 1) if layers % size == 0]
    assert found.turns + found.period - 1 == min(counts)


def test_blocks_that_save_nothing_are_refused() -> None:
    decoder = decoder_of(built("qwen2-windows", LoraConfig(r=4)))
    with pytest.raises(ValueError, match=r"optim\.remat=blocks .* in a row, 2, 2, have .*: set optim\.remat=full"):
        layer_scan.scan_layers(decoder, OptimConfig(remat="blocks"), "cpu")


def test_updates_are_those_of_the_unrolled_layers() -> None:
    """With accumulation, the average, and weight decay, which a stack of norms must not get."""
    optim = OptimConfig(learning_rate=1e-2, weight_decay=0.3, beta2=0.99, loss_chunk=16, ema_decay=0.9)
    ended = []
    for loop in (False, True):
        model = built("qwen2", LoraConfig(r=0))
        if loop:
            layer_scan.stack(decoder_of(model), 7)
        state = TrainState(model, CPU, optim)
        for number in (1, 2, 3):
            halves = [{name: value[i : i + 1] for name, value in packed().items()} for i in (0, 1)]
            train_step(
                model, state, halves, control(1e-3, number, float(number > 1)), SupervisedObjective(optim), optim, ALONE
            )
        assert state.average is not None
        with state.averaged():
            mean = loss_and_gradients(model.eval(), packed())[0]
        parameters = {name: value.detach() for name, value in state.params.items()}
        ended.append(
            (
                layer_calls.unstacked(layer_calls.stacked_names(model), parameters),
                layer_calls.unstacked(layer_calls.stacked_names(model), state.average),
                mean,
            )
        )
    (unrolled, average, loss), (looped, looped_average, looped_loss) = ended
    assert looped_loss == pytest.approx(loss, rel=1e-5)
    for name, value in unrolled.items():
        torch.testing.assert_close(looped[name], value, rtol=1e-5, atol=1e-5, msg=name)
        torch.testing.assert_close(looped_average[name], average[name], rtol=1e-5, atol=1e-5, msg=name)


def test_in_bf16_it_computes_what_the_unrolled_layers_do() -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["qwen2"][0])).to(torch.bfloat16)
    unrolled = trainable.adapt(base, LoraConfig(r=4, init="gaussian"), "bf16").train()
    looped = copy.deepcopy(unrolled)
    layer_scan.stack(decoder_of(looped), 7)
    loss, expected = loss_and_gradients(unrolled, packed())
    ours, found = loss_and_gradients(looped, packed())
    found = layer_calls.unstacked(layer_calls.stacked_names(looped), found)
    assert ours == pytest.approx(loss, rel=1e-3)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0.1, atol=0.05 * float(gradient.abs().max()), msg=name)


@pytest.mark.parametrize("lora", [{}, {"dropout": 0.5}, {"dora": True}])
@pytest.mark.parametrize("tile", [None, 7])
def test_gradients_of_adapters_are_kept_as_they_are_computed_without_a_difference(
    monkeypatch: pytest.MonkeyPatch, tile: int | None, lora: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["qwen2"][0])).to(torch.bfloat16)
    model = trainable.adapt(base, LoraConfig(r=4, init="gaussian", **lora), "bf16").train()
    layer_scan.stack(decoder_of(model), tile)
    plain, kinds = copy.deepcopy(model), []
    backward = layer_scan._Block.backward

    def noted(self: Any, carry: Any, slices: Any) -> Any:
        carry, found = backward(self, carry, slices)
        kinds.extend(part.dtype for part in tree_leaves(found))
        return carry, found

    monkeypatch.setattr(layer_scan._Block, "backward", noted)
    torch.manual_seed(7)
    _, found = loss_and_gradients(model, packed())
    assert (torch.bfloat16 in kinds) == ("dora" not in lora)
    monkeypatch.setattr(layer_scan, "cast_once", lambda layer: set())
    torch.manual_seed(7)
    _, expected = loss_and_gradients(plain, packed())
    for name, gradient in expected.items():
        assert gradient.dtype == torch.float32 and torch.equal(found[name], gradient), name


# ------------------------------------------------------------------------------------------------------------- dropout


def test_masks_are_even_and_unlike_one_another() -> None:
    shape, rate = torch.Size((64, 512)), 0.3
    seeds = [torch.tensor(number, dtype=torch.int32) for number in (0, 1, -7, 2**31 - 1)]
    masks = [keep_mask(shape, seed, rate, site, CPU) for seed in seeds for site in (0, 1)]
    count = shape.numel()
    for mask in masks:
        assert abs(float(mask.float().mean()) - 0.7) < 4 * (0.21 / count) ** 0.5
        # Neighbours in both directions agree as often as independent draws.
        for near in (mask[:, 1:] == mask[:, :-1], mask[1:] == mask[:-1]):
            assert abs(float(near.float().mean()) - 0.58) < 0.02
    agreement = [float((a == b).float().mean()) for i, a in enumerate(masks) for b in masks[:i]]
    assert all(abs(share - 0.58) < 0.02 for share in agreement)
    assert torch.equal(masks[0], keep_mask(shape, seeds[0], rate, 0, CPU))


def test_dropout_scales_what_it_keeps_and_rests_in_evaluation() -> None:
    dropout = SeededDropout(0.25, 3)
    values = torch.ones(40, 50, requires_grad=True)
    output = dropout(values)
    output.sum().backward()
    assert output.detach().unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert torch.equal(values.grad, output.detach())  # the same mask
    assert dropout.eval()(values) is values


@pytest.mark.parametrize(("tile", "keeps"), [(None, False), (7, False), (None, True)])
def test_recomputed_layers_draw_what_they_drew_before(
    monkeypatch: pytest.MonkeyPatch, tile: int | None, keeps: bool
) -> None:
    """Against autograd through the same loop without recomputation."""
    model = built("gemma2", LoraConfig(r=4, dropout=0.5))
    layer_scan.stack(decoder_of(model), tile, keeps)
    torch.manual_seed(7)
    loss, found = loss_and_gradients(model, packed())
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.grad = None

    def kept(block: Any, hidden: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
        constants, named = tree_unflatten(tensors, block.given)
        block.written = tree_flatten({})[1]
        return (scan(block.forward, (hidden, constants, []), (named,))[0][0],)

    monkeypatch.setattr(layer_scan._Scanned, "apply", kept)
    torch.manual_seed(7)
    expected_loss, expected = loss_and_gradients(plain, packed())
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    torch.manual_seed(8)
    assert loss_and_gradients(plain, packed())[0] != pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 4), ("gemma3", 8)])
def test_layers_sites_and_tiles_draw_apart(monkeypatch: pytest.MonkeyPatch, family: str, layers: int) -> None:
    model = built(family, LoraConfig(r=4, dropout=0.5))
    layer_scan.stack(decoder_of(model), 7)
    seen: list[tuple[int, int]] = []
    masked = SeededDropout.forward

    def watched(self: SeededDropout, values: torch.Tensor) -> torch.Tensor:
        seen.append((int(self.seed), self.site))
        return masked(self, values)

    monkeypatch.setattr(SeededDropout, "forward", watched)
    with torch.no_grad():
        SupervisedObjective(OPTIM)(model, packed())
    tiles = tiles_of(40, 7)
    assert len(seen) == layers * (4 + 3 * tiles)  # four projections of attention and three of each tile
    assert len(set(seen)) == len(seen)


# --------------------------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize(("tokens", "most", "count"), [(4096, 1024, 4), (4096, 5000, 1), (40, 7, 8), (7, 2, 7)])
def test_tiles_are_equal_and_no_larger_than_asked(tokens: int, most: int, count: int) -> None:
    assert tiles_of(tokens, most) == count


def test_a_tiled_mlp_keeps_its_names_and_its_numbers() -> None:
    mlp = decoder_of(built("llama", LoraConfig(r=0))).layers[0].mlp
    tiled = copy.deepcopy(mlp)
    chunk_mlp(tiled, 7)
    assert [name for name, _ in tiled.named_parameters()] == [name for name, _ in mlp.named_parameters()]
    hidden = torch.randn(2, 20, 32, requires_grad=True)
    other = hidden.detach().clone().requires_grad_()
    expected, output = mlp(hidden), tiled(other)
    torch.testing.assert_close(output, expected)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    output.backward(upstream)
    torch.testing.assert_close(other.grad, hidden.grad)
    for a, b in zip(tiled.parameters(), mlp.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# --------------------------------------------------------------------------------------------- names, files, refusals


def test_an_adapter_is_saved_as_ever() -> None:
    unrolled = tiny()
    looped = layer_functions.scanned()
    files = []
    for model in (unrolled, looped):
        named = {name: value.detach() for name, value in models.trainable_parameters(model).items()}
        files.append(
            adapter_files.adapter_tensors(model, layer_calls.unstacked(layer_calls.stacked_names(model), named))
        )
    assert files[0].keys() == files[1].keys()
    assert any(".layers.1.mlp.down_proj.lora_B.weight" in name for name in files[1])
    for name, value in files[0].items():
        assert torch.equal(files[1][name], value)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("now", [layer_functions.scanned, tiny], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("before", [layer_functions.scanned, tiny], ids=["was-scanned", "was-unrolled"])
def test_going_on_from_a_checkpoint(
    before: Callable[[], torch.nn.Module], now: Callable[[], torch.nn.Module], optimizer: Any
) -> None:
    """Scanned or not, saved tensors are equal bit for bit after loading; later ones up to rounding."""
    optim, batch = replace(OPTIM, optimizer=optimizer, ema_decay=0.9), rows(2)
    model = before()
    state = TrainState(model, CPU, optim)
    train_step(model, state, [batch], control(1e-2, 1, 0.0), SupervisedObjective(optim), optim, ALONE)
    saved = {name: tensor.clone() for name, tensor in state.to_host(ALONE).items()}
    assert not any(".runs." in name for name in saved)
    train_step(model, state, [batch], control(1e-2, 2), SupervisedObjective(optim), optim, ALONE)
    again = now()
    restore(again, saved)
    other = TrainState(again, CPU, optim, saved)
    read = other.to_host(ALONE)
    assert read.keys() == saved.keys()
    for name, value in saved.items():
        assert value.shape == read[name].shape and torch.equal(value, read[name]), name
    train_step(again, other, [batch], control(1e-2, 2), SupervisedObjective(optim), optim, ALONE)
    ended = other.to_host(ALONE)
    for name, value in state.to_host(ALONE).items():
        if before is now:
            assert torch.equal(value, ended[name]), name
        else:
            torch.testing.assert_close(ended[name], value, rtol=1e-4, atol=1e-6)


def test_layers_are_loops_on_xla_and_where_they_are_asked_for() -> None:
    on, auto, off = (OptimConfig(scan_layers=choice) for choice in ("on", "auto", "off"))
    whole, blocks = OptimConfig(remat="none"), OptimConfig(remat="blocks")
    for optim, device_type, text in (
        (auto, "cpu", None), (off, "cuda", None), (on, "cpu", "2 x 1 in a loop"), (auto, "tpu", "2 x 1 in a loop"),
        (auto, "xla-cpu", "2 x 1 in a loop"), (off, "xla-cpu", "2 one by one"),
        (whole, "tpu", None), (blocks, "cpu", "2 x (2) in a loop"), (blocks, "tpu", "2 x (2) in a loop"),
    ):  # fmt: skip
        decoder = decoder_of(tiny(layers=4 if optim is blocks else 2))
        found = layer_scan.scan_layers(decoder, optim, device_type)
        assert (found is not None) == isinstance(decoder.layers, layer_scan.ScannedLayers) == (text is not None)
        assert text is None or str(found) == text
    decoder = decoder_of(built("gemma4", LoraConfig(r=4)))
    assert str(layer_scan.stack(decoder)) == "2 x (3 + 1) and 2 x 2 in loops, 2 one by one"


def test_a_setting_that_holds_the_place_of_a_layer_makes_no_layer_different() -> None:
    decoder: Any = decoder_of(built("gemma3", LoraConfig(r=0)))
    for place, layer in enumerate(decoder.layers):
        layer.mlp.place = place
        layer.mlp.even = int(place % 3 == 2)
    assert [(run.period, run.turns) for run in layer_scan.stack(decoder).runs] == FAMILIES["gemma3"][1]
    decoder = decoder_of(built("llama", LoraConfig(r=0)))
    decoder.layers[3].mlp.flag = True
    assert [(run.period, run.turns) for run in layer_scan.stack(decoder).runs] == [(1, 3), (1, 1)]


@pytest.mark.parametrize(
    ("layers", "runs"),
    [
        ("aaaa", [(1, 4)]), ("abcd", [(1, 1)] * 4), ("aabaabaa", [(3, 2), (1, 2)]), ("abababc", [(2, 3), (1, 1)]),
        ("ccaccaccacacacac", [(3, 3), (2, 3), (1, 1)]), ("x" + "abcdefghijklmnop" * 2, [(1, 1), (16, 2)]), ("", []),
    ],
)  # fmt: skip
def test_blocks_are_chosen_for_the_fewest_layers_in_the_program(layers: str, runs: list[tuple[int, int]]) -> None:
    found = loop_structure.spans(layers)
    assert sum(period * turns for period, turns in found) == len(layers)
    assert sum(period + 1 for period, _ in found) == sum(period + 1 for period, _ in runs)


def test_what_cannot_be_a_loop_stays_as_it_is() -> None:
    encoder: Any = torch.nn.Module()
    with pytest.raises(ValueError) as refusal:
        layer_scan.scan_layers(encoder, OptimConfig(), "tpu")
    assert str(refusal.value) == (
        "Module cannot run its layers as a loop, which XLA needs: Module has no list of layers; train it with "
        "launch.device_type=cuda or cpu"
    )
    decoder: Any = decoder_of(tiny())
    decoder.layers[1] = decoder.layers[0]
    with pytest.raises(CannotScanError, match="its layers share weights"):
        layer_scan.stack(decoder)
    decoder = decoder_of(tiny())
    forward = type(decoder).forward

    def meddling(**kwargs: Any) -> Any:
        kept = decoder.layers

        class Meddler(torch.nn.Module):
            def __getitem__(self, index: slice) -> Any:
                return [functools.partial(lambda visit, h, *a, **k: visit(h * 1, *a, **k), v) for v in kept[index]]

        decoder._modules["layers"] = Meddler()
        try:
            return forward(decoder, **kwargs)
        finally:
            decoder._modules["layers"] = kept

    decoder.forward = meddling
    with pytest.raises(CannotScanError, match="its decoder changes the hidden states between two layers"):
        layer_scan.stack(decoder)
    assert isinstance(decoder.layers, torch.nn.ModuleList)


def test_layers_of_other_adapters_make_runs_of_their_own() -> None:
    decoder: Any = decoder_of(built("llama", LoraConfig(r=0)))
    decoder.layers[1].requires_grad_(False)
    runs = layer_scan.stack(decoder).runs
    assert [(run.period, run.turns) for run in runs] == [(1, 1), (1, 1), (1, 2)]


# ------------------------------------------------------------------------------------------------------------- on XLA


def at(folder: Path, scan_layers: str, device_type: str, replicas: int = 1, remat: str = "full") -> TrainConfig:
    config = load_config({
        "output_dir": str(folder / f"{scan_layers}-{device_type}-{replicas}"), "optim.scan_layers": scan_layers,
        "launch.device_type": device_type, "launch.num_replicas": replicas, "optim.remat": remat,
    })  # fmt: skip
    config.output_path.mkdir(parents=True)
    return config


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, Any]]:
    """Results of one replica on XLA, launched when first needed."""
    folder = tmp_path_factory.mktemp("alone")
    return functools.cache(lambda: launch(layer_functions.on_one_device, at(folder, "on", "xla-cpu")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, Any]]:
    """The same on the CPU."""
    folder = tmp_path_factory.mktemp("plain")
    return functools.cache(lambda: launch(layer_functions.on_one_device, at(folder, "off", "cpu")))


@needs_xla
@pytest.mark.parametrize(
    ("replicas", "remat"),
    [
        (1, "full"),
        (1, "none"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, "full"), (2, "outputs"))),
    ],
)
def test_on_xla_it_is_one_program_with_the_same_numbers(
    tmp_path: Path, replicas: int, remat: str, alone: Callable[[], dict[str, Any]], plain: Callable[[], dict[str, Any]]
) -> None:
    expected = plain()["updates"]
    if replicas == 1:
        found = alone()["updates" if remat == "full" else "one by one"]
    else:
        found = launch(layer_functions.updates, at(tmp_path, "on", "xla-cpu", replicas, remat))
    assert found["alike"]
    counts = found["counts"]
    assert counts["compiles"] == 1
    assert counts["executions"] == 3 * replicas
    assert counts["host_syncs"] == counts["fallbacks"] == counts["device_reads"] == 0
    for part in ("report", "eval"):
        scale = replicas if part == "eval" else 1  # every replica evaluates the same rows
        torch.testing.assert_close(
            torch.tensor(found[part]), torch.tensor(expected[part]) * scale, rtol=1e-5, atol=1e-4
        )
    for name, value in expected["parameters"].items():
        ours = torch.tensor(found["parameters"][name])
        torch.testing.assert_close(ours, torch.tensor(value), rtol=1e-5, atol=1e-5, msg=name)


@needs_xla
def test_on_xla_dropout_is_that_of_the_cpu_and_follows_the_seed(
    alone: Callable[[], dict[str, Any]], plain: Callable[[], dict[str, Any]]
) -> None:
    expected = plain()["dropout"]
    found = dict(alone()["dropout"])
    own = found.pop("own")
    assert len(found) == 4
    for case, gradient in found.items():
        torch.testing.assert_close(torch.tensor(gradient), torch.tensor(expected[case]), rtol=1e-3, atol=1e-3)
    first, other, again = map(torch.tensor, own)
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, rtol=1e-2)


@needs_xla
def test_a_loop_is_built_anew_only_for_another_trace(alone: Callable[[], dict[str, Any]]) -> None:
    rounds = alone()["alike"]
    for found, expected, _ in rounds:
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values, msg=name)
    # A loop that differs only in a constant or an outer tensor is the same loop.
    assert [built for *_, built in rounds] == [11, 0]
    assert alone()["counted"] == [3.0, 3.0], "it passes a tensor on and stacks nothing"


@needs_xla
def test_the_program_of_a_step_has_the_layers_as_loops(alone: Callable[[], dict[str, Any]]) -> None:
    two, three = alone()["loops"]
    assert two == three, "another layer makes the program longer"
    assert two[0] >= 2, "no loop forward and backward"


@needs_xla
def test_a_decoder_that_the_kit_does_not_know_is_trained_sharded_and_generates_in_the_loop(
    tmp_path: Path, alone: Callable[[], dict[str, Any]], plain: Callable[[], dict[str, Any]]
) -> None:
    config = layer_functions.own_config(tmp_path, "xla-cpu", "fsdp=2")
    sharded = launch(layer_functions.own_decoder, config, sharded=True)
    found, expected = alone()["own"], plain()["own"]
    refused = found["refused"]
    assert refused.startswith("XLA has no aten::histc, which ") and "layer_functions.py:" in refused
    for one in (found, sharded):
        assert one["layers"] == "3 x 1 in a loop"
        assert one["table"] == [[1, 1], [0, 0]], "a write into a view of a new tensor is lost below the mode"
        assert one["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert one["replies"] == expected["replies"] and all(len(reply) == 8 for reply in one["replies"])
