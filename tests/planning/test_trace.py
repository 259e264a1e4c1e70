"""The traced step equals the program that torch_xla would compile on a TPU, and has no weights in it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.child_processes import QUICK_XLA_FLAGS, run_loaded
from tests.support.compiler_models import TINY, write_config
from tpu_kit.planning.compiler.compile_check import _ENVIRONMENT

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch_xla", "jax")), reason="needs torch_xla and jax"
)

TRACED = """
import dataclasses, gc, json, os, re, sys
import torch_xla
from jaxlib import xla_client
from tpu_kit.xla.compiler import fingerprint
from tpu_kit.config.loader import load_config
from tpu_kit.planning.compiler import trace as tracing

outputs, lower = [], tracing.lower
tracing.lower = lambda tensors, *rest: outputs.append(len(tensors)) or lower(tensors, *rest)

def shapes(program):
    module = xla_client._xla.HloModule.from_serialized_hlo_module_proto(program.hlo)
    return module.to_string()

found = []
for model, replicas, *changes in json.loads(sys.argv[1]):
    config = load_config(None, [f"model.name={model}", "max_length=256", "loss_chunk=256", *changes])
    program = tracing.trace_step(config, replicas)
    gc.collect()
    torch_xla.sync()  # otherwise the next step's all-reduce would wait for this step's
    text = shapes(program)
    found.append({
        "hash": fingerprint(program),
        "sharded": fingerprint(dataclasses.replace(program, shardings=("{replicated}",))),
        "all_reduces": len(re.findall(r" all-reduce\\(", text)),
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "unfilled": text.count('custom_call_target="AllocateBuffer"'),
        "products": text.count(" dot("),
        "barriers": text.count(" opt-barrier("),
        "held": max([line.count("[") for line in text.splitlines() if " opt-barrier(" in line], default=0),
        "logits": len(re.findall(r"\\[(?:1024,2048|4,256,2048)\\]", text)),
        "donated": sorted(program.arguments[place] for place in program.donated),
        "arguments": program.arguments,
        "outputs": outputs.pop(),
    })
print(json.dumps(found), flush=True)
os._exit(0)
"""


CASES: list[list[Any]] = [
    [8], [1], [2, "batch_size=4"], [1, "learning_rate=1e-5"], [1, "ema_decay=0.9"],
    [1, "gradient_accumulation=2"], [1, "lora.r=0"], [1, "attention=sdpa"],
    [1, "remat=outputs"], [1, "remat=outputs", "attention=sdpa"], [1, "mlp_tile=null"], [1, "mlp_tile=512"],
]  # fmt: skip
IN_BLOCKS: list[list[Any]] = [[1, "mlp_tile=null"], [1, "mlp_tile=null", "remat=outputs"]]
SMALL: list[Any] = [1, "max_length=128", "batch_size=2", "attention=sdpa"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"), TINY)


@pytest.fixture(scope="module")
def traced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The programs of `CASES`, `SMALL` and `IN_BLOCKS`, from a single process."""
    gemma = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4}
    blocks = write_config(tmp_path_factory.mktemp("blocks"), TINY, **gemma)
    cases = [[str(model), *case] for case in (*CASES, SMALL)] + [[str(blocks), *case] for case in IN_BLOCKS]
    done = run_loaded(["-c", TRACED, json.dumps(cases)], env=_ENVIRONMENT)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_in_a_block_no_layer_goes_back_before_the_one_after_it_has(traced: list[dict[str, Any]]) -> None:
    # Alternating kinds of layers make blocks of two; XLA would recompute a layer while it is at the other.
    full, outputs = traced[-len(IN_BLOCKS) :]
    alone = traced[CASES.index([1, "mlp_tile=null"])]
    assert full["barriers"] == alone["barriers"] + 1
    assert full["held"] == 1 + 2 * 7 + 1  # the gradient, the gradients of seven layers' adapters, and the layer's input
    assert outputs["held"] > full["held"] + 7  # and all its saved results


def test_traced_programs(traced: list[dict[str, Any]]) -> None:
    found = traced[: len(CASES)]
    eight, one, two, slow, average, twice, full, sdpa, kept, kept_sdpa, untiled, tiled = found

    assert [case["all_reduces"] for case in (eight, two, one)] == [1, 1, 0]
    assert not any(case["logits"] for case in (eight, one, two, twice, full)), "full logits exist"
    assert one["kernels"] > 0 and kept["kernels"] > 0 and sdpa["kernels"] == 0
    # Stacks that loops write: inputs of layers, gradients of seven adapters and of the loss's chunks, saved results.
    assert (one["unfilled"], kept["unfilled"]) == (1 + 2 * 7 + 1, 16 + 7 + 2)
    assert twice["kernels"] == 2 * one["kernels"]
    assert twice["barriers"] > 2 * one["barriers"], "one pass may begin before the other has ended"
    assert set(twice["donated"]) == set(one["donated"])
    assert one["hash"] != one["sharded"], "shardings belong to the program"
    assert one["hash"] == slow["hash"] and eight["hash"] == two["hash"], "a number of the run is a constant"
    assert len({case["hash"] for case in (eight, one, average, twice, full, sdpa, kept)}) == 7

    # The second tile waits for all of the first: forward for its output, backward for its input gradient and the sums
    # of six adapter matrices.
    assert tiled["barriers"] == untiled["barriers"] + 2
    assert tiled["held"] == 1 + 6 + 2, "the second tile may begin before the first has ended"

    # remat=full repeats attention, six of seven products (the last result is not needed), and the second products of as
    # many adapters; sdpa also repeats its product of weights and values.
    assert (one["kernels"], kept["kernels"]) == (3, 2)
    assert one["products"] - kept["products"] == 6 + 6
    assert sdpa["products"] - kept_sdpa["products"] == 6 + 6 + 1

    adapters = {name for name in one["donated"] if "lora_" in name and not name.startswith("moments.")}
    state = {f"moments.{name}.{kind}" for name in adapters for kind in ("first", "second")} | {"applied"}
    assert len({tuple(name.split(".")[-4:-2]) for name in adapters}) == 7 * 2  # A and B of each linear layer
    assert set(one["donated"]) - adapters >= state
    assert set(average["donated"]) - set(one["donated"]) == {f"average.{name}" for name in adapters}
    names = set(one["arguments"])
    assert {"batch.input_ids", "batch.labels", "batch.position_ids", "batch.segment_ids", "control"} <= names
    assert not any("base_layer" in name for name in one["donated"]), "a frozen weight is given away"
    tables = [name for name in full["donated"] if "embed_tokens" in name or "lm_head" in name]
    assert len(tables) == 3, "tied weights came apart"  # with both moments


REAL = """
import json, os, sys
import torch, torch_xla
import torch_xla.debug.metrics as metrics
from transformers import AutoConfig, AutoModelForCausalLM
from tpu_kit.model import trainable as models
from tpu_kit.config.loader import load_config
from tpu_kit.distributed.replica.backends import TpuRuntime
from tpu_kit.training.step import prepare_model
from tpu_kit.training.objectives import SupervisedObjective
from tpu_kit.training.step import train_step

config = load_config(None, [f"model.name={sys.argv[1]}", "max_length=128", "batch_size=2", "attention=sdpa"])
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]), dtype=torch.bfloat16)
model = models.adapt(model, config.lora, "bf16").train()
replica = TpuRuntime(0, 1, torch_xla.device())  # the graph for a TPU, on the CPU
state = prepare_model(model, config, replica)
replica.sync()
whole = {name: torch.ones(2, 128, dtype=torch.int64) for name in ("input_ids", "labels", "position_ids")}
whole["segment_ids"] = torch.ones(2, 128, dtype=torch.int32)
batch, control = replica.to_device([whole, {"control": torch.tensor([1e-3, 1.0, 1.0])}])
train_step(model, state, [batch], control["control"], SupervisedObjective(config.optim), config.optim, replica)
alive = torch_xla._XLAC._xla_tensors_report(1, str(replica.local_device)).count("Tensor: id=")
replica.sync()
torch_xla.sync(wait=True)
_, _, samples = metrics.metric_data("InputOutputAliasCount")
print(json.dumps([alive, int(samples[-1][1])]), flush=True)
os._exit(0)
"""


def test_the_outputs_and_the_donated_buffers_are_those_of_a_real_cut(model: Path, traced: list[dict[str, Any]]) -> None:
    trained = run_loaded(["-c", REAL, str(model)], env={"XLA_FLAGS": QUICK_XLA_FLAGS}).stdout
    small = traced[len(CASES)]
    assert [small["outputs"], len(small["donated"])] == json.loads(trained.splitlines()[-1])
