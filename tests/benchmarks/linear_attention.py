"""Measures a step of a tiny Qwen3.5 on XLA:CPU, with the kit's and transformers' layers.

    python -m tests.benchmarks.linear_attention

transformers' gated delta rule has an operation that XLA lacks, so torch_xla reads its operands on the host in every
layer and pass. The third row has transformers' layers with the kit's functions, one by one, and shows the step without
these reads. Each row is a fresh process: 4 layers, hidden size 256, 2 x 512 tokens, all weights, fp32.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from tests.support.child_processes import run_python

ROWS = {
    "loop": "the kit, layers in a loop",
    "transformers": "transformers, layers one by one",
    "unrolled": "transformers with the kit's functions, layers one by one",
}
STEPS, WARM_UP = 5, 2
_SIZES = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip


def measure(row: str) -> dict[str, float]:
    """Returns a step's processor seconds, wall seconds and host reads, and the programs compiled while measuring."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.debug import metrics
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    from tpu_kit.config.loader import LoraConfig
    from tpu_kit.model import causal_lm as models
    from tpu_kit.model import trainable
    from tpu_kit.model.loop.layer_scan import stack

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**_SIZES), attn_implementation="sdpa").train()
    if row != "transformers":
        model = trainable.adapt(model, LoraConfig(r=0), "fp32")
    if row == "loop":
        stack(model.get_decoder())
    model = models.to_device(model, torch_xla.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 2048, (2, 512), generator=torch.Generator().manual_seed(1)).to(torch_xla.device())
    batch = {"input_ids": ids} if row == "transformers" else {"input_ids": ids, "segment_ids": torch.ones_like(ids)}

    def step() -> None:
        optimizer.zero_grad()
        states = model.model(use_cache=False, **batch).last_hidden_state if row == "transformers" else None
        states = models.hidden_states(model, batch) if states is None else states
        logits = model.lm_head(states[:, :-1]).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
        optimizer.step()
        torch_xla.sync()
        xm.wait_device_ops()

    def counters() -> tuple[int, int]:
        reads = sum(metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::"))
        return reads, (metrics.metric_data("CompileTime") or (0,))[0]

    for _ in range(WARM_UP):
        step()
    before, taken = counters(), []
    for _ in range(STEPS):
        start = time.process_time(), time.perf_counter()
        step()
        taken.append((time.process_time() - start[0], time.perf_counter() - start[1]))
    (reads, compiles) = (after - first for after, first in zip(counters(), before, strict=True))
    cpu, wall = (statistics.median(column) for column in zip(*taken, strict=True))
    return {"cpu": cpu, "wall": wall, "reads": reads / STEPS, "compiles": compiles}


def main() -> None:
    """Prints the table, or with a row's name its figures as JSON."""
    if sys.argv[1:]:
        print(json.dumps(measure(sys.argv[1])))
        return
    print("| step | processor s | wall s | reads of the host |\n|---|---:|---:|---:|")
    for row, text in ROWS.items():
        done = run_python(["-m", "tests.benchmarks.linear_attention", row], env={"PJRT_DEVICE": "CPU"})
        found = json.loads(done.stdout.splitlines()[-1])
        assert not found["compiles"], f"{row} compiled again"
        print(f"| {text} | {found['cpu']:.2f} | {found['wall']:.2f} | {found['reads']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
