"""Runs on TorchTPU against the CPU: XLA:CPU executes the programs, through the plugin of tests/support/pjrt_shim.c.

Run by `make test-torch-tpu`, in an environment of its own; skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.child_processes import PYTHONPATH, REPOSITORY, child_environment, run_python
from tests.support.torch_tpu_environment import environment, needs_torch_tpu

pytestmark = [needs_torch_tpu, pytest.mark.slow, pytest.mark.timeout(1200)]

SHORT = ["max_steps=20", "warmup_steps=3", "learning_rate=2e-3", "logging_steps=1", "save_steps=1000"]
TORCH_XLA = os.environ.get("TESTS_TORCH_XLA_PYTHON", "")  # an interpreter of an environment with torch_xla


def ask(
    name: str, device: str, *changes: str, upto: int = 20, executable: str = sys.executable,
    more: dict[str, str] | None = None,
) -> Any:  # fmt: skip
    """Returns the result of a function of tests/support/torch_tpu_functions.py on a device."""
    on_torch_tpu = environment() if device == "torch-tpu" else {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    arguments = ["-m", "tests.support.torch_tpu_functions", name, f"device_type={device}", "num_replicas=1", *changes]
    around = {"PJRT_DEVICE": None, "UPTO": str(upto), **on_torch_tpu, **(more or {})}
    done = run_python(arguments, env=around, cwd=REPOSITORY, timeout=900, executable=executable)
    return json.loads(done.stdout.rpartition("found ")[2])


def largest_difference(one: Any, other: Any, key: str = "loss") -> float:
    pairs = list(zip(one["updates"], other["updates"], strict=True))
    assert pairs and all(a["step"] == b["step"] and a["tokens"] == b["tokens"] for a, b in pairs)
    return max(abs(a[key] - b[key]) for a, b in pairs)


CHANGES = {
    "LoRA": [],
    "all weights": ["lora.r=0", "learning_rate=2e-4"],
    "two passes": ["gradient_accumulation=2"],
    "an average": ["ema_decay=0.9", "weight_decay=0.1"],
    "remat=outputs": ["remat=outputs"],
    "remat=blocks": ["remat=blocks"],
    "remat=none": ["remat=none"],
    "bf16": ["base_dtype=bf16"],
    "int8": ["base_dtype=int8"],
}


@pytest.mark.parametrize("kind", CHANGES)
def test_updates_are_those_of_the_cpu(kind: str, tmp_path: Path) -> None:
    """Losses, norms of gradients, moments and parameters; one program an update, and none compiled after the first."""
    changes, upto = [*SHORT, *CHANGES[kind]], 20 if kind in ("LoRA", "all weights") else 6
    cpu, tpu = (ask("make_updates", device, *changes, f"output_dir={tmp_path / device}", upto=upto)
                for device in ("cpu", "torch-tpu"))  # fmt: skip
    loss, norm = largest_difference(cpu, tpu), largest_difference(cpu, tpu, "norm")
    low = kind in ("bf16", "int8")  # products in bf16 round differently
    print(f"{kind}: losses differ by {loss:.2g}, norms by {norm:.2g} over {upto} updates")
    assert loss < (2e-2 if low else 1e-5) and norm < (1e-1 if low else 2e-4)
    assert tpu["saved"] == pytest.approx(cpu["saved"], rel=1e-1 if low else 1e-3, abs=1e-6)
    first, *later = tpu["updates"]
    assert {one["executed"] for one in later} == {1}, "one program an update"
    assert sum(one["compiled"] for one in later) == 0
    # The average starts with one product per shape; iteration numbers of an outer loop are made before it.
    assert first["compiled"] <= {"an average": 8, "remat=blocks": 6}.get(kind, 4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Narrow models of the tested families, with the tokenizer of the embedded one."""
    folder = tmp_path_factory.mktemp("models")
    source = f"""
import json, shutil, torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM
embedded = Path({str(REPOSITORY / "tpu_kit/assets/embedded")!r})
base = dict(vocab_size=json.loads((embedded / "config.json").read_text())["vocab_size"], hidden_size=64,
    intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=512, pad_token_id=0)
more = {{"gemma3_text": dict(sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2)}}
for family in ("llama", "qwen3", "gemma3_text", "phi3"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **base, **more.get(family, {{}})))
    out = Path({str(folder)!r}, family)
    model.save_pretrained(out)
    for file in embedded.iterdir():
        if "token" in file.name or "chat" in file.name:
            shutil.copy(file, out)
"""
    run_python(source, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_families_train_as_on_the_cpu(family: str, models: Path, tmp_path: Path) -> None:
    """The embedded model, of the tests above, is a Qwen2."""
    changes = [*SHORT, f"model.name={models / family}"]
    cpu, tpu = (ask("make_updates", device, *changes, f"output_dir={tmp_path / device}", upto=4)
                for device in ("cpu", "torch-tpu"))  # fmt: skip
    difference = largest_difference(cpu, tpu)
    print(f"{family}: losses differ by {difference:.2g}")
    assert difference < 1e-5 and {one["executed"] for one in tpu["updates"][1:]} == {1}


def test_dropout_draws_other_masks_in_each_update(tmp_path: Path) -> None:
    first, again, second, third = ask("draw_dropout", "torch-tpu", *SHORT, "lora.dropout=0.5",
                                      f"output_dir={tmp_path}")  # fmt: skip
    assert first == again and len({first, second, third}) == 3


@pytest.mark.skipif(not TORCH_XLA, reason="TESTS_TORCH_XLA_PYTHON names no interpreter with torch_xla")
def test_a_run_goes_through_three_backends(tmp_path: Path) -> None:
    """On torch_xla's CPU, TorchTPU, the CPU and torch_xla again, against one uninterrupted run."""
    undisturbed = ask("make_updates", "xla-cpu", *SHORT, f"output_dir={tmp_path / 'one'}", executable=TORCH_XLA)
    chain = [("xla-cpu", 5, TORCH_XLA), ("torch-tpu", 10, sys.executable), ("cpu", 15, sys.executable),
             ("xla-cpu", 20, TORCH_XLA)]  # fmt: skip
    made: dict[str, Any] = {"updates": []}
    for device, upto, executable in chain:
        part = ask("make_updates", device, *SHORT, f"output_dir={tmp_path / 'many'}", upto=upto, executable=executable)
        assert part["first"] == len(made["updates"]) and part["fingerprint"] == undisturbed["fingerprint"]
        made["updates"] += part["updates"]
    difference = largest_difference(undisturbed, made)
    print(f"three backends: losses differ by {difference:.2g}")
    assert difference < 1e-5


def train(folder: Path, *changes: str) -> list[str]:
    return [sys.executable, "-m", "tpu_kit", "train", "embedded-cot", "device_type=torch-tpu", "base_dtype=fp32",
            "generate_rows=0", "eval_steps=null", *SHORT, "save_steps=5", f"output_dir={folder}", *changes]  # fmt: skip


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def test_a_killed_run_resumes_bit_for_bit_and_is_exported(tmp_path: Path) -> None:
    around = {"PYTHONPATH": PYTHONPATH} | child_environment(environment())
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(train(whole), env=around, check=True, capture_output=True, timeout=600)
    process = subprocess.Popen(train(killed), env=around, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)  # fmt: skip
    deadline = time.monotonic() + 300
    while not list((killed / "checkpoints").glob("*/manifest.json")) and process.poll() is None:
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.05)
    assert process.poll() is None, "it ended before it was killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run(train(killed), env=around, check=True, capture_output=True, text=True, timeout=600)
    assert "resum" in done.stdout and losses(killed) == losses(whole)
    export = [sys.executable, "-m", "tpu_kit", "export", str(whole), "format=merged"]
    subprocess.run(export, env=around | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, check=True, timeout=600)


def test_four_processes_have_a_chip_each() -> None:
    """The launcher with torch_tpu's process group, and sums on the host; the plugin cannot sum over chips."""
    around = {**environment(), "TORCH_TPU_TOPOLOGY": "2,2,1"}  # which torch_tpu otherwise finds among PCI devices
    arguments = ["-m", "tests.support.torch_tpu_functions", "meet", "device_type=torch-tpu", "num_replicas=4"]
    done = run_python(arguments, env=around, cwd=REPOSITORY, timeout=900)
    found = json.loads(done.stdout.rpartition("found ")[2])
    places = found["places"]
    assert found["total"] == 10 and [one["LOCAL_RANK"] for one in places] == [one["RANK"] for one in places]
    assert [(one["RANK"], one["WORLD_SIZE"]) for one in places] == [(str(rank), "4") for rank in range(4)]
    (addresses,) = {one["TORCH_TPU_SLICEBUILDER_ADDRESSES"] for one in places}
    assert len(set(addresses.split(","))) == 4


def test_updates_without_donation_are_those_with_it(tmp_path: Path) -> None:
    """If the private compiler has moved, `torch.compile` takes the graph."""
    found = [
        ask("make_updates", "torch-tpu", *SHORT, f"output_dir={tmp_path / name}", upto=3, more={"NO_DONATION": without})
        for name, without in (("with", ""), ("without", "1"))
    ]
    assert largest_difference(*found) < 1e-6
    assert {one["executed"] for one in found[1]["updates"][1:]} == {1}


def test_greedy_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    cpu, tpu = (ask("greedy_tokens", device, "attention=sdpa") for device in ("cpu", "torch-tpu"))
    assert cpu == tpu and sum(map(len, cpu)) > 50


def test_sampled_tokens_are_those_of_the_cpu() -> None:
    """The host draws the uniform numbers, so one seed gives one reply."""
    greedy = ask("greedy_tokens", "cpu", "attention=sdpa")
    cpu, tpu = (ask("sampled_tokens", device, "attention=sdpa") for device in ("cpu", "torch-tpu"))
    assert cpu == tpu and cpu != greedy and sum(map(len, cpu)) > 50


def test_evaluation_is_that_of_the_cpu(tmp_path: Path) -> None:
    """Answers of the base and the tuned model, with likelihoods."""
    around = {"PYTHONPATH": PYTHONPATH} | child_environment(environment())
    subprocess.run(train(tmp_path / "run"), env=around, check=True, capture_output=True, timeout=600)
    found = {}
    for device in ("cpu", "torch-tpu"):
        shutil.copytree(tmp_path / "run", tmp_path / device)
        command = [sys.executable, "-m", "tpu_kit", "evaluate", str(tmp_path / device), f"device_type={device}",
                   "generate_rows=12", "generate_tokens=48", "base_dtype=fp32"]  # fmt: skip
        subprocess.run(command, env=around, check=True, capture_output=True, timeout=600)
        found[device] = json.loads((tmp_path / device / "eval.json").read_text())
    cpu, tpu = found["cpu"], found["torch-tpu"]
    for side in ("base", "tuned"):
        assert tpu[side].pop("perplexity") == pytest.approx(cpu[side].pop("perplexity"), rel=1e-5)
        assert tpu[side] == cpu[side]
