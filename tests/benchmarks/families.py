"""Trains a narrow random copy of every decoder in transformers: `python -m tests.benchmarks.families [MODEL_TYPE ...]`.

For each model type of AutoModelForCausalLM it trains LoRA on packed documents on the CPU, and compares with
transformers' eager attention on separate documents. It tries a loop over layers first, then layer by layer, then
without packing. Attention uses a mask, and then the segment ids that a TPU's kernels get. It also compares greedy
tokens. Every model type runs in a fresh process with a time limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support import layer_functions
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.generation import reference_check

LIMIT, LAYERS, ROUNDING = 180, 8, 1e-4  # seconds; of a narrow copy; relative error in fp32
MISSING: dict[str, dict[str, Any]] = {  # settings that default configurations lack
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
}
WAYS: dict[str, dict[str, Any]] = {
    "loop": {"scan_layers": "on"},
    "layer by layer": {"scan_layers": "off"},
    "without packing": {"scan_layers": "off", "packing": False},
}


def configuration(family: str) -> PreTrainedConfig:
    """The text model's default configuration with few layers, if their number is a setting, and without dropout."""
    kind = type(CONFIG_MAPPING[family]().get_text_config())
    try:
        model: PreTrainedConfig = kind(**(changes := {"num_hidden_layers": LAYERS} | MISSING.get(family, {})))
    except Exception:  # a list with an entry per layer may have another length
        model = kind(**(changes := MISSING.get(family, {})))
    dropout = {name: 0.0 for name, value in model.to_dict().items() if "drop" in name and isinstance(value, float)}
    return kind(**changes, **dropout)


def is_decoder(model: PreTrainedConfig) -> bool:
    """Whether no token changes the logits of earlier tokens."""
    narrow = reference_check.narrow_model(model)
    (ids,) = reference_check._random_ids(12)
    with torch.no_grad():
        whole, part = reference_check._eager(narrow, ids), reference_check._eager(narrow, ids[:5])
    return torch.allclose(whole[:5], part, atol=1e-3 * float(whole.abs().max()))


def trained(model: PreTrainedConfig, device_type: str) -> str:
    """Returns the first way in which a copy trains and its largest difference, or the reason why none works."""
    problem = ""
    for way, settings in WAYS.items():
        config: TrainConfig = load_config(None, {"model.name": "embedded", "lora.r": 4, "remat": "full", **settings})
        try:
            found = reference_check.differences(config, model, device_type, torch.device("cpu"))
        except Exception as error:
            problem = problem or reference_check._text(error)
            continue
        most = max(found.values())
        own = max(layer_functions.rounding(config, model).values()) if most > ROUNDING else 0.0
        if most <= max(ROUNDING, 2 * own):
            text = f"{way}, {most:.1e}" + (f" (transformers {own:.1e})" if own else "")
            return f"{text}; else {problem}" if problem else text
        worst = max(found, key=found.__getitem__)
        problem = problem or f"DIFFERS by {most:.1e} (transformers {own:.1e}), {worst}"
    return f"refused: {problem}"


def outcome(family: str, answer: Connection) -> None:
    """Sends the table row of a model type."""
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    try:
        model = configuration(family)
        if not is_decoder(model):
            answer.send("no decoder")
            return
        mask, kernels = (trained(model, device_type) for device_type in ("cpu", "tpu"))
        copy = reference_check.narrow_model(model)
        compare = reference_check._Comparison(family, lambda: reference_check._compare_replies(copy))
        tokens = reference_check._problem(compare)
        answer.send(f"{mask} | {'the same' if kernels == mask else kernels} | {tokens or 'equal'}")
    except Exception as error:
        answer.send(f"refused: {reference_check._text(error)}")


def main() -> None:
    """Prints a row for each model type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    for family in parser.parse_args().families:
        context = multiprocessing.get_context("fork")
        mine, theirs = context.Pipe()
        process = context.Process(target=outcome, args=(family, theirs))
        begun = time.monotonic()
        process.start()
        theirs.close()
        text = f"no answer in {LIMIT} s"
        if mine.poll(LIMIT):
            try:
                text = mine.recv()
            except EOFError:
                process.join()
                text = f"CRASHED with {process.exitcode}"
        else:
            assert process.pid is not None  # the process has started
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        print(f"| `{family}` | {text} | {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
