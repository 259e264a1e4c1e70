from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.machine.test_checks import server
from tests.support.child_processes import run_python
from tpu_kit.config.loader import load_config
from tpu_kit.machine import capacity, host
from tpu_kit.machine.checks import Check, Machine
from tpu_kit.machine.hub import _ASKED, ask_hub_once, head

SECRET = "s3cr3t-for-tests"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


Hub = Callable[..., Machine]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Sets variables of huggingface_hub, which reads them as it is imported; by default its folder is the test's."""
    from huggingface_hub import constants

    def set_up(**environ: str) -> Machine:
        for name in [name for name in os.environ if name.startswith(("HF_", "TRANSFORMERS_OFFLINE"))]:
            monkeypatch.delenv(name)
        for name, value in ({"HF_HOME": str(tmp_path)} | environ).items():
            monkeypatch.setenv(name, value)
        importlib.reload(constants)
        return Machine()

    yield set_up
    monkeypatch.undo()
    importlib.reload(constants)


def with_memory(root: Path, available: int, limit: str = "max", used: int = 0) -> Machine:
    """A machine with these bytes of memory, and a control group's limit and usage."""
    for path, text in (
        ("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {available // 1024} kB\n"),
        ("sys/fs/cgroup/memory.max", limit),
        ("sys/fs/cgroup/memory.current", str(used)),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return Machine(root=root, environ={})


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "bf16", 16e9),
        ("Qwen/Qwen2.5-0.5B", "fp32", 2e9),
        ("HuggingFaceTB/SmolLM2-135M", "bf16", 270e6),
        ("someone/phi-4", "bf16", None),
        ("someone/gemma3.2beta", "bf16", None),
    ],
)
def test_model_bytes_by_name(name: str, dtype: str, size: float | None) -> None:
    assert capacity.model_bytes(load_config(None, [f"model.name={name}", f"base_dtype={dtype}"])) == (size, False)


def test_model_bytes_of_a_folder(tmp_path: Path) -> None:
    for file, size in (("a-00001.safetensors", 30), ("a-00002.safetensors", 12), ("tokenizer.json", 99)):
        (tmp_path / file).write_bytes(b"x" * size)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 42)  # the same weights once more
    (tmp_path / "q4.gguf").write_bytes(b"x" * 10)
    assert capacity.model_bytes(load_config(None, [f"model.name={tmp_path}"])) == (42, True)
    assert capacity.model_bytes(load_config(None, [f"model.name={tmp_path}", "gguf_file=q4.gguf"])) == (40, True)


@pytest.mark.parametrize(
    ("settings", "free", "need"),
    [
        ({"base_dtype": "bf16"}, 17, 16.4),
        ({"base_dtype": "bf16"}, 12, None),
        ({"base_dtype": "int8"}, 14, 13.1),
        ({"base_dtype": "int8"}, 12, None),
        ({"base_dtype": "int4"}, 12, 9.1),
        ({"base_dtype": "int4", "quant_group": 32}, 12, 9.9),
        ({"base_dtype": "int4"}, 8, None),
        ({"base_dtype": "bf16", "lora.r": 0}, 17, None),  # trained weights are in fp32
        ({"base_dtype": "bf16", "lora.r": 0}, 32, 31.3),
        ({"base_dtype": "int8", "mesh": "fsdp=8", "device_type": "tpu"}, 8, 7.2),  # one stack, embedding and head
        ({"base_dtype": "int8", "mesh": "fsdp=8", "device_type": "tpu", "quant_cache": None}, 12, None),
    ],
)
def test_memory_is_that_of_the_weights_as_they_are_loaded(
    tmp_path: Path, settings: dict[str, Any], free: int, need: float | None
) -> None:
    """The last sizes are the bytes of 8e9 numbers; tests/model/test_quantization.py measures a real model."""
    config = load_config(None, {"model.name": "some/model-8B", **settings})
    check = capacity.check_memory(with_memory(tmp_path, free * 2**30), config, 1)
    assert check.status == ("failure" if need is None else "ok"), check
    if need is not None:
        assert f"{need} needed: 1 x" in check.found, check


def test_loading_a_folder_is_counted_by_its_tensors(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    def loading(**settings: Any) -> float | None:
        return capacity.loading_bytes(load_config(None, {"model.name": str(tmp_path), **settings}))

    layers = {f"model.layers.{n}.{name}.weight": (64, 96) for n in range(3) for name in ("q_proj", "up_proj")}
    norms = {f"model.layers.{n}.norm.weight": (64,) for n in range(3)}
    shapes = {**layers, **norms, "model.embed_tokens.weight": (100, 64)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    matrices, others, stack = 6 * 64 * 96, 3 * 64 + 6400, 3 * 64 * 96
    assert loading(base_dtype="bf16") == 2 * (matrices + others)  # saved in fp32
    assert loading(base_dtype="fp32") == loading(**{"lora.r": 0}) == 4 * (matrices + others)
    assert loading(base_dtype="int8") == matrices + stack + 2 * others
    assert loading(base_dtype="int4", quant_group=16) == 0.75 * (matrices + stack) + 2 * others


def test_weights_saved_in_fp8_are_held_in_bf16_before_they_are_quantised(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    model, kept = tmp_path / "some", tmp_path / "kept"
    model.mkdir()
    save_file({"layers.0.q.weight": torch.zeros(4096, 4096, dtype=torch.float8_e4m3fn)}, model / "model.safetensors")

    def found(**settings: Any) -> str:
        config = load_config(
            None, {"model.name": str(model), "base_dtype": "int4", "quant_cache": str(kept), **settings}
        )
        return capacity.check_memory(with_memory(tmp_path, 8 * 2**30), config, 1).found

    assert "1.5 needed: 0.03 of weights in bf16 before they are quantized + 1 x 1.5" in found()
    assert "1 x 0.06 of weights + " in found(base_dtype="fp32")
    (kept / "some-int4-128-0123").mkdir(parents=True)
    (kept / "some-int4-128-0123" / "config.json").touch()
    assert "1 x 0.02 of weights + " in found()
    assert "in bf16 before" in found(quant_cache=None)


def test_memory(tmp_path: Path) -> None:
    config = load_config(None, ["model.name=some/model-8B"])
    gib = 2**30
    check = capacity.check_memory(with_memory(tmp_path, 200 * gib), config, 8)
    assert check.status == "ok" and "200.0 GiB free, 131.2 needed: 8 x 14.90 of weights + 8 x 1.5" in check.found
    check = capacity.check_memory(with_memory(tmp_path, 100 * gib), config, 8)
    assert check.status == "failure" and check.fix == "num_replicas=1, or a host with 131 GiB"
    check = capacity.check_memory(with_memory(tmp_path, 12 * gib), config, 8)
    assert check.fix == "a smaller model.name, or a host with 131 GiB"
    check = capacity.check_memory(with_memory(tmp_path, 200 * gib, limit=str(60 * gib), used=10 * gib), config, 8)
    assert check.found.startswith("50.0 GiB free")


def test_memory_of_a_rehearsal_is_that_of_one_process(tmp_path: Path) -> None:
    at = with_memory(tmp_path, 8 * 2**30)
    asked = load_config(None, ["model.name=some/model-100M", "device_type=xla-cpu"])
    assert capacity.check_memory(at, asked, 8).found == "8.0 GiB free, 3.0 needed: 8 x 0.19 of weights + 1 x 1.5"
    by_environment = Machine(root=tmp_path, environ={"PJRT_DEVICE": "CPU"})
    assert capacity.check_memory(by_environment, load_config(None, ["model.name=some/model-100M"]), 8).status == "ok"
    assert capacity.check_memory(at, load_config(None, ["model.name=some/model-100M"]), 8).status == "failure"


V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"sys/fs/cgroup/memory.max": "10", "sys/fs/cgroup/memory.current": "8"}, 2),
        ({"sys/fs/cgroup/memory.max": "10", "sys/fs/cgroup/memory.current": "8",
          "sys/fs/cgroup/memory.stat": "file 7\nactive_file 2\ninactive_file 5\n"}, 7),
        # This process's group is in a group with a lower limit, which is in a group without a limit.
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/memory.max": "90", "sys/fs/cgroup/a/b/memory.current": "1",
          "sys/fs/cgroup/a/memory.max": "10", "sys/fs/cgroup/a/memory.current": "4"}, 6),
        ({f"{V1}/memory.limit_in_bytes": "10", f"{V1}/memory.usage_in_bytes": "9",
          f"{V1}/memory.stat": "inactive_file 1\ntotal_inactive_file 3\n"}, 4),
        ({"proc/self/cgroup": "5:cpu,memory:/docker/x\n1:name=systemd:/", f"{V1}/docker/x/memory.limit_in_bytes": "10",
          f"{V1}/docker/x/memory.usage_in_bytes": "7", f"{V1}/memory.limit_in_bytes": str(2**63 - 4096)}, 3),
        # A container does not see the path that it has outside.
        ({"proc/self/cgroup": "5:memory:/docker/x", f"{V1}/memory.limit_in_bytes": "10",
          f"{V1}/memory.usage_in_bytes": "7"}, 3),
        ({"sys/fs/cgroup/memory.max": "10", "sys/fs/cgroup/memory.current": "12"}, 0),
        ({"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "12"}, 100),
    ],
)  # fmt: skip
def test_memory_within_the_limits_of_groups(tmp_path: Path, files: dict[str, str], free: int) -> None:
    for path, text in {"proc/meminfo": f"MemAvailable: {100 * 2**20} kB", **files}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(re.sub(r"\b\d{1,2}$", lambda n: str(int(n[0]) * 2**30), text, flags=re.MULTILINE))
    assert host.free_memory(Machine(root=tmp_path, environ={})) == free * 2**30


def test_memory_unknown(tmp_path: Path) -> None:
    config = load_config(None, ["model.name=some/model"])
    assert capacity.check_memory(Machine(root=tmp_path), config, 1).status == "skipped"
    check = capacity.check_memory(with_memory(tmp_path, 2**30), config, 1)
    assert check == Check("Host memory", "ok", "1.0 GiB free; the size of some/model is not known from its name")


def test_disk(tmp_path: Path, hub: Hub) -> None:
    at = hub(HF_HOME=str(tmp_path / "hub"))
    small = load_config(None, ["model.name=some/model-1M", f"output_dir={tmp_path}/run"])
    check = capacity.check_disk(at, small)
    assert check.status == "ok" and f"free for {tmp_path}/run, 1.0 needed" in check.found
    settings = ["model.name=some/model-1B", f"output_dir={tmp_path}/run", "lora.r=0", "checkpoint.keep=2"]
    # 3 checkpoints of 10 bytes per parameter, and 1 GiB: the third is written before the first is deleted.
    assert f"{1 + 3 * 1e10 / 2**30:.1f} needed" in capacity.check_disk(at, load_config(None, settings)).found
    huge = load_config(None, ["model.name=some/model-9000000B", f"output_dir={tmp_path}/run", "lora.r=0"])
    check = capacity.check_disk(at, huge)
    assert check.status == "failure"
    assert check.fix == "output_dir=/larger/disk/run && export HF_HOME=/larger/disk/huggingface"
    # Checkpoints that are there already are written over.
    (tmp_path / "run/checkpoints/step_1").mkdir(parents=True)
    with open(tmp_path / "run/checkpoints/step_1/training.safetensors", "wb") as file:
        os.truncate(file.fileno(), 10**10)
    assert f"{1 + 2 * 1e10 / 2**30:.1f} needed" in capacity.check_disk(at, load_config(None, settings)).found


def test_disk_that_lacks_room_for_logs_alone_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    check = capacity.check_disk(Machine(environ={}), load_config(None, [f"output_dir={tmp_path}/run"]))
    assert check.status == "warning" and check.fix == "output_dir=/larger/disk/run"


def test_disk_of_a_model_in_the_cache(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "hub/models--some--model-9000000B/snapshots").mkdir(parents=True)
    config = load_config(None, ["model.name=some/model-9000000B", f"output_dir={tmp_path}/run"])
    assert capacity.check_disk(hub(), config).status == "ok"


def test_disk_of_an_embedded_run_downloads_nothing(tmp_path: Path) -> None:
    assert ";" not in capacity.check_disk(Machine(environ={}), load_config(None, [f"output_dir={tmp_path}"])).found


HUB_MODEL = load_config(None, ["model.name=some/model-1B"])


def test_hub_offline_by_choice(tmp_path: Path, hub: Hub) -> None:
    check = host.check_hub(hub(HF_HUB_OFFLINE="1"), HUB_MODEL)
    assert check == Check("Hugging Face hub", "skipped", "offline by HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE; no token")


@pytest.mark.parametrize(
    ("answer", "status", "text", "fix"),
    [
        (200, "ok", "answers; token in HF_TOKEN", ""),
        (307, "ok", "answers", ""),
        (401, "failure", "some/model-1B is gated, private or missing, and refused to this user", "then: hf auth login"),
        (403, "failure", "some/model-1B is gated", "ask for access at http://"),
        (404, "warning", "answers 404 for some/model-1B", "model.name, model.revision"),
    ],
)
def test_hub_answers(hub: Hub, answer: int, status: str, text: str, fix: str) -> None:
    seen: list[tuple[str, str | None]] = []
    with server(answer, seen=seen) as address:
        check = host.check_hub(hub(HF_ENDPOINT=f"http://{address}/", HF_TOKEN=f"{SECRET}\n"), HUB_MODEL)
    assert (check.status, text in check.found, fix in check.fix) == (status, True, True), check
    assert seen == [("/some/model-1B/resolve/main/config.json", f"Bearer {SECRET}")]  # no redirect was followed
    assert SECRET not in str(check)


def test_hub_token_file_is_named_and_not_shown(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "token").write_text(SECRET)
    seen: list[tuple[str, str | None]] = []
    with server(200, seen=seen) as address:
        check = host.check_hub(hub(HF_ENDPOINT=f"http://{address}"), load_config())
    assert check == Check("Hugging Face hub", "ok", f"http://{address} answers; token in {tmp_path}/token")
    assert seen == [("", None)] or seen == [("/", None)]  # functions that need no token do not get one


def test_hub_away(tmp_path: Path, hub: Hub) -> None:
    with server(200) as address:
        pass
    at = hub(HF_ENDPOINT=f"http://{address}")
    check = host.check_hub(at, HUB_MODEL)
    assert check.status == "warning" and "Connection refused; needed for some/model-1B" in check.found
    assert check.fix.startswith("export HF_HUB_OFFLINE=1")
    check = host.check_hub(at, load_config(None, ["source=openai/gsm8k:main"]))
    assert check.status == "warning" and "needed for openai/gsm8k:main" in check.found
    check = host.check_hub(at, load_config())
    assert check.status == "skipped" and check.fix == "" and "this config needs nothing from it" in check.found


@pytest.mark.parametrize(
    ("setting", "name", "near"),
    [
        ("data.source={}/rows.jsonl", "data.source", "{}/row.jsonl"),
        ("data.source=nowhere.csv.gz", "data.source", ""),
        ("data.source={}/no_rows.jsonl", "data.source", ""),  # equal names are not equal hosts
        ("data.eval_source={}/*.parquet", "data.eval_source", ""),
        ("model.name=./checkpoints/nowhere", "model.name", ""),
        ("model.name=a/folder/nowhere", "model.name", ""),
        ("lora.adapter=runs/nowhere", "lora.adapter", ""),
        ("distill.teacher=./nowhere", "distill.teacher", ""),
    ],
)
def test_a_path_that_does_not_exist(tmp_path: Path, hub: Hub, setting: str, name: str, near: str) -> None:
    (tmp_path / "row.jsonl").touch()
    config = load_config(None, [setting.format(tmp_path)])
    check = host.check_files(config)
    assert check.status == "failure" and check.found == f"{name}={config[name]}: there is no such file or folder"
    assert check.fix.startswith(f"{name}=" + (near.format(tmp_path) or f"its path, absolute or from {Path.cwd()}"))
    at = hub(HF_ENDPOINT="http://127.0.0.1:9")
    assert "needs nothing from it" in host.check_hub(at, config).found


def test_paths_that_exist(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    config = load_config(None, [f"data.source={tmp_path}/*.jsonl", f"data.eval_source={tmp_path}/rows.jsonl"])
    assert host.check_files(config) == Check("Files", "ok", "all paths of the run exist")
    away = ["model.name=some/Model-3.1", "data.source=openai/gsm8k:main", "data.eval_source=gs://bucket/rows.jsonl"]
    assert host.check_files(load_config(None, away)).status == "ok"  # the hub, and a bucket


def test_hub_with_a_wrong_address(tmp_path: Path, hub: Hub) -> None:
    assert "missing an 'http://' or 'https://' protocol" in host.check_hub(hub(HF_ENDPOINT="hf.co"), HUB_MODEL).found


def test_hub_that_does_not_answer_is_not_waited_for(hub: Hub) -> None:
    hub()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start = time.monotonic()
        status, problem = head(f"http://127.0.0.1:{silent.getsockname()[1]}", seconds=0.3)
    assert status is None and ("no answer in" in problem or "timed out" in problem)
    assert time.monotonic() - start < 2


@contextmanager
def silent_hub() -> Iterator[tuple[str, list[float]]]:
    """The address of a server that accepts connections and sends nothing, and the times of the connections."""
    came: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            kept = []
            with contextlib.suppress(OSError):  # closed
                while True:
                    kept.append(server.accept())
                    came.append(time.monotonic())

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", came


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan", "model.name=acme/unheard-of"], "model.name=acme/unheard-of: not a folder or a known model"),
        pytest.param(
            ["train", "model.name=acme/unheard-of", "max_steps=1"],
            "model.name=acme/unheard-of: it is not a folder here",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_hub_that_does_not_answer_is_tried_once(tmp_path: Path, arguments: list[str], text: str) -> None:
    with silent_hub() as (address, came):
        env = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": None, "HF_HOME": str(tmp_path), "no_proxy": "127.0.0.1"}
        command = ["-m", "tpu_kit", *arguments, "device_type=cpu", f"output_dir={tmp_path}/run"]
        done = run_python(command, env=env | {"PJRT_DEVICE": None}, cwd=tmp_path, expect=None)
    assert done.returncode in (1, 2) and text in done.stderr, done.stderr
    assert (
        f"{address}: no answer in 3 s; only its cache on this machine" in done.stderr
        or "timed out; only" in done.stderr
    )
    assert "Traceback" not in done.stderr and "Retrying" not in done.stderr
    assert len(came) == 1, came  # its child processes among them


def test_the_hub_is_asked_again_and_an_own_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv(_ASKED, raising=False)
    with server(200) as address:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://{address}")
        ask_hub_once()
        assert constants.HF_HUB_OFFLINE  # the user's own choice
        monkeypatch.setenv(_ASKED, str(time.time() - 10))
        ask_hub_once()
        assert constants.HF_HUB_OFFLINE  # asked a moment ago
        monkeypatch.setenv(_ASKED, str(time.time() - 1000))
        ask_hub_once()
    assert not constants.HF_HUB_OFFLINE and "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.parametrize(
    ("mode", "environ", "netrc", "status", "text"),
    [
        ("off", {}, "", "skipped", "off (tracking.wandb)"),
        ("offline", {}, "", "skipped", "offline: no key needed"),
        ("online", {"WANDB_MODE": "offline"}, "", "skipped", "offline: no key needed"),
        ("online", {"WANDB_API_KEY": SECRET}, "", "ok", "key in WANDB_API_KEY"),
        ("online", {}, f"machine api.wandb.ai login user password {SECRET}\n", "ok", "key in "),
        ("online", {"WANDB_BASE_URL": "https://wandb.example.org"}, f"machine api.wandb.ai login u password {SECRET}\n",
         "failure", "no key for wandb.example.org"),
        ("online", {}, "machine\n", "failure", "online, but no key for api.wandb.ai"),
        ("online", {}, "", "failure", "online, but no key for api.wandb.ai"),
    ],
)  # fmt: skip
def test_wandb(tmp_path: Path, mode: str, environ: dict[str, str], netrc: str, status: str, text: str) -> None:
    path = tmp_path / "netrc"
    if netrc:
        path.write_text(netrc)
        path.chmod(0o600)
    check = host.check_wandb(Machine(environ={"NETRC": str(path)} | environ), load_config(None, [f"wandb={mode}"]))
    assert check.status == status and text in check.found, check
    assert check.fix == ("wandb login, or tracking.wandb=offline" if status == "failure" else "")
    assert SECRET not in str(check)
