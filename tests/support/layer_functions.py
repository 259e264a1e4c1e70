"""Functions that the tests of scanned layers run in replicas: updates of a tiny model whose layers are loops."""

from __future__ import annotations

import gc
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from tests.support import training_functions
from tests.support.training_functions import OPTIM, control, dealt, rows, tiny
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.distributed.replica import runtime
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.reference_check import _adapted_copy, _of_transformers, _shares, _texts, differences
from tpu_kit.model import causal_lm as models
from tpu_kit.model import trainable
from tpu_kit.model.loop import layer_calls, layer_scan
from tpu_kit.model.loop.activation_checkpointing import fuse_lora
from tpu_kit.model.loop.layer_calls import decoder_layers
from tpu_kit.model.weights.source import load_tokenizer, read_config
from tpu_kit.training.objectives import SupervisedObjective
from tpu_kit.training.state import TrainState
from tpu_kit.training.step import eval_step, prepare_model, train_step
from tpu_kit.xla import scan as scan_module
from tpu_kit.xla.scan import Tensors, scan
from tpu_kit.xla.traced_program import refusing

TILE = 8  # tokens of an MLP's tile; the passes have 16 tokens


def scanned(
    dropout: float = 0.0, tile: int | None = TILE, keeps: bool = False, blocks: bool = False
) -> torch.nn.Module:
    """Builds `tiny` with its two layers as a loop; `blocks`: four layers in two blocks of two."""
    model = tiny(dropout, layers=4 if blocks else 2)
    layer_scan.stack(models.base_model(model).get_decoder(), tile, keeps, blocks=blocks)
    return model


def rounding(config: TrainConfig, model: PreTrainedConfig) -> dict[str, float]:
    """How transformers in fp32 differs from transformers in fp64, in the units of `differences`."""
    held = _texts(config, model)
    adapted = _adapted_copy(config, held)
    models.base_model(adapted).set_experts_implementation("eager")  # grouped matrix products have no fp64
    return _shares(_of_transformers(adapted, held), _of_transformers(adapted.double(), held))


def updates(config: TrainConfig) -> dict[str, Any]:
    """Three updates of eight rows, split among the replicas, and an evaluation; returns rank 0's state and counters."""
    rt = runtime.current()
    keeps = config.optim.remat == "outputs"
    model = scanned(tile=None if keeps else TILE, keeps=keeps) if config.optim.scan_layers == "on" else tiny()
    if config.optim.remat == "none":
        fuse_lora(model, rt.device_type)
    model = models.to_device(model, rt.local_device)
    optim = replace(OPTIM, ema_decay=0.9, remat=config.optim.remat)
    state = TrainState(model, rt.local_device, optim)
    sums = torch.zeros(2).to(rt.local_device)
    rt.sync()
    _finish(rt)
    before = rt.counters()
    rt.barrier()
    for number in (1, 2, 3):
        mine = [training_functions._sent(rt, batch) for batch in dealt(rt.rank, rt.world_size, number)]
        train_step(
            model,
            state,
            mine,
            control(1e-2, number, float(number > 1)).to(rt.local_device),
            SupervisedObjective(optim),
            optim,
            rt,
        )
        rt.sync()
    _finish(rt)
    counts = {name: value - before[name] for name, value in rt.counters().items()}
    rt.barrier()
    model.eval()
    with state.averaged():
        eval_step(model, training_functions._sent(rt, rows(2)), sums, SupervisedObjective(optim), rt)
    rt.sync()
    own = rt.to_host([*state.params.values(), state.report, sums])
    named = layer_calls.unstacked(state.stacks, dict(zip(state.params, own, strict=False)))
    ended = {name: value.tolist() for name, value in named.items()}
    (config.output_path / f"{rt.rank}.json").write_text(json.dumps(ended))
    rt.barrier()
    everyone = [json.loads((config.output_path / f"{rank}.json").read_text()) for rank in range(rt.world_size)]
    alike = all(each == everyone[0] for each in everyone)
    return {"parameters": ended, "report": own[-2].tolist(), "eval": own[-1].tolist(), "alike": alike, "counts": counts}


def _finish(rt: Runtime) -> None:
    """Waits for all executions, which are counted when they end."""
    if rt.is_xla:
        import torch_xla.core.xla_model as xm

        xm.wait_device_ops()
    rt.barrier()


def gradients_with_dropout(config: TrainConfig) -> dict[str, Any]:
    """Gradients of a pass whose layers draw fixed numbers, and of passes that draw the device's random numbers."""
    rt = runtime.current()
    drawn, layer_scan._draw = layer_scan._draw, _given
    found = {}
    for tile, keeps, blocks in ((TILE, False, True), (None, False, False), (TILE, False, False), (None, True, False)):
        model = models.to_device(scanned(0.5, tile, keeps, blocks), rt.local_device)
        rt.sync()
        found[f"{tile} {keeps} {blocks}"] = _gradient(rt, model, 1)
    layer_scan._draw = drawn
    found["own"] = [_gradient(rt, model, seed) for seed in (1, 2, 1)]
    return found


def on_one_device(config: TrainConfig) -> dict[str, Any]:
    """Runs `updates`, `gradients_with_dropout`, `own_decoder`; on XLA also `alike_loops` and `loops_of_step`.

    On XLA it also runs `counted_loop`, and `updates` with separate layers that keep all activations. There the loops'
    output stacks start with NaN or 77, because on a TPU they may start with any values.
    """
    if runtime.current().is_xla:
        scan_module._unfilled = lambda shape, dtype, given: torch.full(
            shape, math.nan if dtype.is_floating_point else 77, dtype=dtype, device=given.device
        )
    found: dict[str, Any] = {"updates": updates(config), "dropout": gradients_with_dropout(config)}
    if runtime.current().is_xla:
        found["one by one"] = updates(replace(config, optim=replace(config.optim, scan_layers="auto", remat="none")))
        found |= {"alike": alike_loops(config), "loops": loops_of_step(config), "counted": counted_loop()}
    return {**found, "own": own_decoder(own_config(config.output_path, config.launch.device_type))}


def counted_loop() -> list[float]:
    """Results of a traced loop of three turns that passes a tensor on and stacks nothing."""
    rt = runtime.current()
    start = torch.zeros(2).to(rt.local_device)
    (found,) = scan_module.Traced("counted", lambda count: [count + 1], [start], [], steps=3, carried=1)(start)
    return found.tolist()


def alike_loops(config: TrainConfig) -> list[tuple[dict[str, Any], dict[str, Any], int]]:
    """Scans almost equal bodies, in two rounds: the device's results, the CPU's, and the number of loops built."""
    rt, found = runtime.current(), []
    for number in (1, 2):
        before, results = len(scan_module._loops), []
        for device in (rt.local_device, torch.device("cpu")):
            numbers = torch.arange(24.0).reshape(3, 2, 4).to(device)
            outer, other = (torch.full((4,), float(value)).to(device) for value in (number, number + 5))
            bodies: dict[str, Any] = {
                "one": lambda c, x: ([c[0] + x[0], c[1]], [c[0], x[1] * c[0]]),
                "of the other slice": lambda c, x: ([c[0] + x[1], c[1]], [c[0], x[0] * c[0]]),
                "of the other carry": lambda c, x: ([c[1] + x[0], c[0]], [c[1], x[1] * c[1]]),
                "the first output twice": lambda c, x: _repeated(c, x[0] + 1, x[1] + 2, 0),
                "the second output twice": lambda c, x: _repeated(c, x[0] + 1, x[1] + 2, 1),
                "half": lambda c, x: ([c[0] * 0.5, c[1]], [x[0]]),
                "a third": lambda c, x: ([c[0] * 0.3, c[1]], [x[0]]),
                "an outer tensor": lambda c, x, outer=outer: ([c[0] + outer, c[1]], [x[0]]),
                "another outer tensor": lambda c, x, other=other: ([c[0] + other, c[1]], [x[0]]),
            }
            each = {name: scan(body, [numbers[0, 0], numbers[1, 0]], [numbers[:, 0], numbers[:, 1]])
                    for name, body in bodies.items()}  # fmt: skip
            one, carry, stacks = bodies["one"], [numbers[0, 0], numbers[1, 0]], [numbers[:, 0], numbers[:, 1]]
            each["in reverse"] = scan(one, carry, stacks, reverse=True)
            each["of two turns"] = scan(one, carry, [stack[1:] for stack in stacks])
            each["with an unused stack"] = scan(one, carry, [*stacks, numbers])
            each["of integers"] = scan(one, [tensor.int() for tensor in carry], [stack.int() for stack in stacks])
            _, (drawn,) = scan(lambda c, x: (c, [torch.rand_like(x[0])]), carry, stacks)
            each["of random numbers"] = [], [drawn[0] != drawn[1]]
            rt.sync()
            results.append({name: [tensor.tolist() for part in each[name] for tensor in part] for name in each})
        found.append((results[0], results[1], len(scan_module._loops) - before))
    return found


def _repeated(carry: Tensors, first: torch.Tensor, second: torch.Tensor, place: int) -> tuple[Tensors, Tensors]:
    return carry, [first, second, (first, second)[place]]


def loops_of_step(config: TrainConfig) -> list[tuple[int, int]]:
    """Counts the while loops and matrix products in the program of a training step with two layers, and with three."""
    import torch_xla

    rt = runtime.current()
    found = []
    for layers in (2, 3):
        state = prepare_model(model := tiny(layers=layers), replace(config, optim=OPTIM), rt)
        scalars = control(1e-2, 1).to(rt.local_device)
        rt.sync()
        train_step(
            model, state, [training_functions._sent(rt, rows(4))], scalars, SupervisedObjective(OPTIM), OPTIM, rt
        )
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([*state.params.values(), state.report])
        found.append((hlo.count(" while("), hlo.count(" dot(")))
        del model, state, scalars
        gc.collect()  # graph nodes without a reference are neither compiled nor run
    return found


class OwnConfig(LlamaConfig):
    """A model family that the kit has no entry for."""

    model_type = "tests_own"


class OwnModel(LlamaModel):
    """Its layers are in `blocks` instead of `layers`, and have an index `place`."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.blocks = self.layers
        del self.layers
        for place, block in enumerate(self.blocks):
            block.place = place

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, attention_mask: Any = None,
        past_key_values: Any = None, use_cache: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        hidden = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        mask = create_causal_mask(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask,
                                  past_key_values=past_key_values, position_ids=position_ids)  # fmt: skip
        angles = self.rotary_emb(hidden, position_ids=position_ids)
        for block in self.blocks:
            hidden = block(hidden, attention_mask=mask, position_embeddings=angles, past_key_values=past_key_values,
                           **kwargs)  # fmt: skip
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class OwnForCausalLM(LlamaForCausalLM):
    """The model with a head."""

    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.model = OwnModel(config)


AutoConfig.register("tests_own", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)


def own_config(folder: Path, device_type: str, mesh: str | None = None) -> TrainConfig:
    """The run of `own_decoder`, on a single device or on a mesh."""
    settings = {"output_dir": str(folder), "launch.device_type": device_type, "lora.r": 4, "model.base_dtype": "fp32",
                "optim.learning_rate": 1e-2}  # fmt: skip
    return load_config(settings | ({"launch.mesh": mesh} if mesh else {"launch.num_replicas": 1}))


def own_decoder(config: TrainConfig) -> dict[str, Any]:
    """Trains an `OwnForCausalLM` for three updates and generates replies, on a single device or on a mesh."""
    rt = runtime.current()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 640, "pad_token_id": 0, "initializer_range": 0.2}  # fmt: skip
    torch.manual_seed(0)
    model = trainable.adapt(OwnForCausalLM(OwnConfig(**sizes)), config.lora, "fp32", seed=1).train()
    state = prepare_model(model, config, rt)
    layers = str(decoder_layers(models.base_model(model).get_decoder())[1])
    for number in (1, 2, 3):
        scalars = rt.put([control(1e-2, number, float(number > 1))])[0]
        (batch,) = rt.to_device([rows(4, seed=number)])
        train_step(model, state, [batch], scalars, SupervisedObjective(OPTIM), OPTIM, rt)
        rt.sync()
    loss, tokens = rt.to_host([state.report])[0][:2].tolist()
    generator = Generator(model, load_tokenizer(config.model), rt, data=config.data, max_prompt=16, max_new_tokens=8)
    replies = [one.tokens for one in generator.generate([[5, 6, 7], [8, 9]])]
    refused = _refused(rt.local_device) if rt.is_xla and config.launch.mesh is None else ""
    with refusing():
        table = torch.zeros(2, 2, device=rt.local_device)
        table[0].add_(1)
    return {"layers": layers, "loss": loss / tokens, "replies": replies, "refused": refused, "table": table.tolist()}


def _refused(device: torch.device) -> str:
    """The error of a loop whose layers call an operation that XLA lacks."""
    model = tiny()
    decoder: Any = models.base_model(model).get_decoder()
    decoder.layers[0].input_layernorm.forward = lambda hidden: hidden * hidden.histc(2).sum()
    layer_scan.stack(decoder)
    try:
        with refusing():
            models.hidden_states(models.to_device(model, device), {"input_ids": torch.ones(2, 4).long().to(device)})
    except ValueError as error:
        return str(error)
    return ""


def with_and_without_loop(config: TrainConfig) -> dict[str, Any]:
    """The largest `differences` with separate layers (not on a mesh) and with loops, and the count of `recompiles`."""
    rt, found = runtime.current(), dict[str, Any]()
    model = read_config(config.model)
    assert model is not None
    for turn in range(rt.world_size):  # the replicas are threads and share torch's random state
        for scan_layers in ("off", "on") if config.launch.mesh is None else ("on",):
            if turn == rt.rank:
                optim = replace(config.optim, scan_layers=scan_layers)
                each = differences(replace(config, optim=optim), model, rt.device_type, rt.local_device)
                found[scan_layers] = max(each.items(), key=lambda item: item[1])
        rt.barrier()
    return {**found, "recompiles": recompiles(config, model, rt)}


def recompiles(config: TrainConfig, model: Any, rt: Runtime) -> int:
    """Counts the programs compiled after the second update of a narrow copy in loops, with new documents each time."""
    optim = replace(OPTIM, scan_layers="on")
    with training_functions._generator:
        copy = _adapted_copy(config, model)
        state = prepare_model(copy, replace(config, optim=optim), rt)
    rt.sync()
    counts = []
    for number in range(1, 5):
        batch = rows(2, 37, number)
        second = (torch.arange(37) >= 7 * number).long().expand(2, 37)
        batch["segment_ids"], batch["position_ids"] = 1 + second, batch["position_ids"] - 7 * number * second
        scalars = control(1e-3, number, float(number > 1)).to(rt.local_device)
        train_step(copy, state, [training_functions._sent(rt, batch)], scalars, SupervisedObjective(optim), optim, rt)
        rt.sync()
        _finish(rt)
        counts.append(rt.counters()["compiles"])
        rt.barrier()
    return counts[-1] - counts[1]


def _given(device: torch.device) -> torch.Tensor:
    return torch.tensor(12345, dtype=torch.int32).to(device)


def _gradient(rt: Runtime, model: torch.nn.Module, seed: int) -> list[float]:
    rt.seed(seed)
    loss = SupervisedObjective(OPTIM)(model, training_functions._sent(rt, rows(4))).loss
    loss.backward()
    parameters = models.trainable_parameters(model).values()
    flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
    for parameter in parameters:
        parameter.grad = None
    rt.sync()
    values: list[float] = rt.to_host([flat])[0].tolist()
    return values
