"""Compiles Tunix's training step or decode loop for a TPU, for `tpu_peer`: `python tpu_peer_child.py FOLDER`.

It runs in Tunix's environment and imports nothing from the kit. It reads the request `FOLDER/request.json`, and writes
the compiler's program, `program.txt`, and its figures, `figures.json`. The step and the loop are Tunix's `PeftTrainer`
and `Sampler`, called as Tunix's command does, but traced with shapes in place of weights.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from jax._src import tpu_custom_call
from jax.experimental import topologies
from tunix.generate import sampler
from tunix.sft import peft_trainer
from tunix.sft import utils as sft_utils

LINEARS = ".*q_proj|.*k_proj|.*v_proj|.*o_proj|.*gate_proj|.*up_proj|.*down_proj"
PAD = 0


def connect_versions() -> None:
    """Adds to flax 0.12.0 the methods that qwix 0.1.8 needs, and sets the kernel format that libtpu 0.0.21 reads.

    On a TPU, jax 0.7.1 selects that format itself.
    """
    set_metadata = nnx.Variable.set_metadata

    def set_one(self: Any, *given: Any, **named: Any) -> None:
        set_metadata(self, **{given[0]: given[1]}) if len(given) == 2 else set_metadata(self, *given, **named)

    nnx.Variable.get_raw_value = lambda self: self.raw_value
    nnx.Variable.set_metadata = set_one
    tpu_custom_call.get_ir_version = lambda _: 7


class Model:
    """A Tunix model with LoRA, without weights.

    Attributes:
        graph: The module; its arrays are shapes on the TPU.
        config: Tunix's configuration.
        optimizer: AdamW for the adapters.
    """

    def __init__(self, request: dict[str, Any], place: Any) -> None:
        library = importlib.import_module(f"tunix.models.{request['library']}.model")
        preset = getattr(library.ModelConfig, request["preset"])()
        known = {field.name for field in dataclasses.fields(preset)}
        wanted = {
            "dtype": jnp.bfloat16,
            "param_dtype": jnp.bfloat16,
            "remat_config": library.RematConfig[request["remat"]],
        }
        self.config = dataclasses.replace(preset, **{name: value for name, value in wanted.items() if name in known})
        options = {"weight_qtype": "int8"} if request["int8"] else {}
        provider = qwix.LoraProvider(module_path=LINEARS, rank=request["rank"], alpha=32.0, **options)

        def build() -> Any:
            model = getattr(library, request["kind"])(self.config, rngs=nnx.Rngs(0))
            nnx.update(model, jax.tree.map(as_bf16, nnx.state(model)))  # for models without that setting
            model = qwix.apply_lora_to_model(model, provider, **model.get_model_input())
            return model, nnx.Optimizer(model, optax.adamw(1e-5), wrt=nnx.LoRAParam)

        self.graph, self.optimizer = nnx.eval_shape(build)
        for part in (self.graph, self.optimizer):
            nnx.update(part, shapes(nnx.state(part), place))
        if "use_flash_attention" in known:  # in Tunix 0.1.7, Qwen2 has the kernel and Llama 3 does not
            self.config.use_flash_attention = request["part"] == "step"  # not for the short row that `build` traces


def as_bf16(array: Any) -> Any:
    """Casts floating-point arrays to bf16, and keeps the keys of random generators."""
    return array.astype(jnp.bfloat16) if jnp.issubdtype(array.dtype, jnp.floating) else array


def shapes(tree: Any, place: Any) -> Any:
    """Replaces a tree's arrays by shapes on a device."""
    return jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place), tree)


def lower_step(model: Model, rows: int, length: int, place: Any) -> Any:
    """Lowers the step of `tunix/cli/peft_main.py`."""
    trainer = object.__new__(peft_trainer.PeftTrainer)
    trainer.loss_fn, trainer._lora_enabled, trainer._has_aux = peft_trainer._default_loss_fn, True, False

    def inputs(given: Any) -> dict[str, Any]:
        mask = given.input_tokens != PAD
        return {
            "input_tokens": given.input_tokens, "input_mask": given.input_mask,
            "positions": sft_utils.build_positions_from_mask(mask),
            "attention_mask": sft_utils.make_causal_attn_mask(mask),
        }  # fmt: skip

    trainer.gen_model_input_fn = inputs
    batch = peft_trainer.TrainingInput(
        input_tokens=jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=place),
        input_mask=jax.ShapeDtypeStruct((rows, length), jnp.bool_, sharding=place),
    )
    lowered = nnx.jit(trainer._train_step, donate_argnames=("optimizer",)).lower(model.graph, model.optimizer, batch)
    return getattr(lowered, "lowered", lowered)


class _Tokenizer:
    def pad_id(self) -> int:
        return PAD


def lower_decode(model: Model, rows: int, width: int, slots: int, place: Any) -> Any:
    """Lowers `Sampler`'s loop over tokens, with its state donated; a condition ends it, not a fixed count."""
    config, own = model.config, object.__new__(sampler.Sampler)
    own.tokenizer, own.image_processor = _Tokenizer(), None
    own.cache_config = sampler.CacheConfig(
        cache_size=slots, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
    )
    own._transformer_graphdef, own._transformer_state = nnx.graphdef(model.graph), nnx.variables(model.graph)
    variables = jax.tree.leaves(own._transformer_state, is_leaf=lambda one: isinstance(one, nnx.Variable))
    own._flattened_transformer_state, own._supports_decode_only_last_token = variables, False
    own.eos_ids = np.array([config.vocab_size - 1], np.int32)

    def begin(ids: Any, seed: Any) -> Any:
        state = own.init_sample_state(
            ids, total_sampling_steps=slots, include_logits=False, forbidden_token_ids=None, temperature=0.9,
            top_p=1.0, top_k=None, seed=seed, beam_size=None, include_logprobs=True,
        )  # fmt: skip
        return dataclasses.replace(state, num_input_tokens=width)

    given = jax.ShapeDtypeStruct((rows, width), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.uint32)
    state = shapes(jax.eval_shape(begin, *given), place)
    return jax.jit(own._decode_fn, donate_argnums=(1,)).lower(variables, state)


def main(folder: Path) -> None:
    """Answers the request in a folder."""
    request = json.loads((folder / "request.json").read_text())
    connect_versions()
    bounds = request["chips_per_host_bounds"]
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=request["topology"], chips_per_host_bounds=bounds
    )
    start, devices, of_computer = time.monotonic(), described.devices[:1], jax.devices
    mesh = jax.sharding.Mesh(np.array(devices).reshape(1, 1), ("fsdp", "tp"))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    model, sizes = Model(request, place), request["sizes"]
    jax.devices = lambda *given, **named: of_computer(*given, **named) if given or named else devices  # for Tunix
    with mesh:
        lowered = (lower_step if request["part"] == "step" else lower_decode)(model, *sizes, place)
    traced = time.monotonic()
    figures: dict[str, Any] = {"trace_seconds": traced - start}
    try:
        done = lowered.compile()
    except Exception as error:  # its type differs between versions; the reader parses the text
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text:
            raise
        figures["out_of_memory"] = text
    else:
        stats, once = done.memory_analysis(), done.cost_analysis()
        names = ("argument", "output", "alias", "temp", "generated_code")
        figures["stats"] = {f"{name}_size_in_bytes": getattr(stats, f"{name}_size_in_bytes") for name in names}
        figures["accessed_once"] = (once[0] if isinstance(once, list) else once)["bytes accessed"]
        (folder / "program.txt").write_text(done.runtime_executable().hlo_modules()[0].to_string())
    figures["compile_seconds"] = time.monotonic() - traced
    (folder / "figures.json").write_text(json.dumps(figures))
    sys.stdout.flush()
    os._exit(0)  # libtpu sometimes hangs at exit


if __name__ == "__main__":
    main(Path(sys.argv[1]))
