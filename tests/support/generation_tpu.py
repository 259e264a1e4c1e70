"""Compiles prefill and decode with the real TPU compiler: `python -m tests.support.generation_tpu JOB`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from transformers import AutoConfig

from tests.support.compiler_models import cache_bytes_per_token
from tpu_kit.config.loader import as_trained, load_config
from tpu_kit.machine.slices import find_topology
from tpu_kit.planning.compiler.trace import trace_generation
from tpu_kit.xla.compiler import compile_program


def compile_both(model: str, rows: int, width: int, slots: int, *changes: str) -> dict[str, Any]:
    """Compiles prefill and decode for one v5e, and decode as GRPO runs it; returns the figures and cache bytes."""
    config = load_config(None, [f"model.name={model}", "lora.r=0", *changes])
    limits = [f"rl.max_prompt_length={width}", f"rl.max_completion_length={slots - width}"]
    trained = as_trained(load_config(None, [f"model.name={model}", "max_steps=1", f"max_length={slots}", *limits]))
    _, topology = find_topology("v5e", 1)
    request = {"num_replicas": 1, "effort": "full", "topology": asdict(topology)}
    settings = AutoConfig.from_pretrained(model)
    found: dict[str, Any] = {"cache_bytes": rows * slots * cache_bytes_per_token(settings, 2)}
    for part, run in (("prefill", config), ("decode", config), ("decode in loops", trained)):
        program = trace_generation(run, 1, part.partition(" ")[0], rows=rows, width=width, slots=slots)
        stacks = [name for name in program.arguments if name.startswith("cache.")]
        found[part] = compile_program(program, request) | {"stacks": stacks}
    return found


if __name__ == "__main__":
    said = json.dumps(compile_both(*json.loads(sys.argv[1])))
    print(said, flush=True)
    os._exit(0)  # libtpu sometimes hangs at exit
