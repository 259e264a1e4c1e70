"""The choice of a backend, without initialising it, and the runtime of real replicas."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support import replica_functions
from tests.support.child_processes import run_python
from tpu_kit.config.loader import LaunchConfig, load_config
from tpu_kit.config.mesh import Mesh
from tpu_kit.distributed import detection
from tpu_kit.distributed.detection import Backend, detect
from tpu_kit.distributed.hosts import Hosts
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.replica import runtime
from tpu_kit.machine import torch_tpu
from tpu_kit.machine.checks import Machine
from tpu_kit.notebook.doctor import diagnose
from tpu_kit.torch_tpu.environment import check_family

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")


def machine(
    root: Path, tpus: int = 0, environ: Mapping[str, str] | None = None, xla: bool = True, nodes: bool = True
) -> Machine:
    """A machine with this many v5e chips on its bus."""
    for number in range(tpus):
        folder = root / f"sys/bus/pci/devices/0000:00:{number:02x}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1ae0\n")
        (folder / "device").write_text("0x0063\n")
        if nodes:
            (root / "dev").mkdir(exist_ok=True)
            (root / f"dev/accel{number}").touch()
    packages = {"torch": "2.9.0"} | ({"torch_xla": "2.9.0"} if xla else {})
    return Machine(root=root, environ=environ or {}, version=packages.get)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(detection, "gpu_count", lambda: getattr(request, "param", 0))


@pytest.mark.parametrize(
    ("gpus", "tpus", "xla", "environ", "device_type", "replicas", "reason"),
    [
        (0, 0, True, {}, "cpu", 1, "no TPU was found, and no GPU; launch.device_type=xla-cpu rehearses"),
        (0, 8, True, {}, "tpu", None, "8 x TPU v5e found"),
        (2, 8, True, {}, "tpu", None, "8 x TPU v5e found"),
        (2, 0, True, {}, "cuda", 2, "no TPU was found; 2 GPU(s) found"),
        (2, 8, False, {}, "cuda", 2, "a TPU was found, but torch_xla is not installed; 2 GPU(s) found"),
        (2, 8, True, {"PJRT_DEVICE": "CPU"}, "xla-cpu", 4, "the environment says PJRT_DEVICE=CPU"),
        (0, 8, True, {"PJRT_DEVICE": "cpu"}, "xla-cpu", 4, "the environment says PJRT_DEVICE=CPU"),
        (2, 8, True, {"PJRT_DEVICE": "TPU"}, "tpu", None, "the environment says PJRT_DEVICE=TPU"),
        (0, 0, True, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}, "xla-cpu", 8, "PJRT_DEVICE=CPU"),
        (0, 0, True, {"CPU_NUM_DEVICES": "8"}, "cpu", 1, "no TPU was found"),
    ],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_auto(
    tmp_path: Path, tpus: int, xla: bool, environ: dict[str, str], device_type: str, replicas: int | None, reason: str
) -> None:
    found = detect(at=machine(tmp_path, tpus, environ, xla))
    assert (found.device_type, found.num_replicas) == (device_type, replicas)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("gpus", "launch_config", "tpus", "environ", "replicas"),
    [
        (0, LaunchConfig("xla-cpu"), 0, {}, 4),
        (0, LaunchConfig("xla-cpu", 2), 0, {"CPU_NUM_DEVICES": "8"}, 2),
        (0, LaunchConfig("xla-cpu"), 0, {"CPU_NUM_DEVICES": "3"}, 3),
        (0, LaunchConfig("cpu"), 0, {"PJRT_DEVICE": "CPU"}, 1),
        (0, LaunchConfig("cpu", 3), 8, {}, 3),
        (4, LaunchConfig("cuda"), 8, {}, 4),
        (4, LaunchConfig("cuda", 3), 0, {}, 3),
        (0, LaunchConfig("tpu"), 8, {"PJRT_DEVICE": "TPU"}, None),
        (0, LaunchConfig("tpu", 8), 8, {}, None),
        (0, LaunchConfig("tpu", 1), 8, {}, 1),
    ],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_explicit(
    tmp_path: Path, launch_config: LaunchConfig, tpus: int, environ: dict[str, str], replicas: int | None
) -> None:
    found = detect(launch_config, machine(tmp_path, tpus, environ))
    assert found.device_type == launch_config.device_type
    assert found.num_replicas == replicas
    assert found.reason == "as configured"


def test_a_slice_of_several_hosts_is_a_mesh(tmp_path: Path) -> None:
    at = machine(tmp_path, 4)
    four = Hosts(2, ("a", "b", "c", "d"), "a:29477", "the metadata")
    for text, mesh in ((None, Mesh(data=16)), ("fsdp=-1", Mesh(fsdp=16)), ("data=2,fsdp=-1", Mesh(2, 8))):
        found = detect(LaunchConfig("tpu", mesh=text), at, four)
        assert (found.mesh, found.num_replicas, found.first_rank, found.hosts) == (mesh, 1, 2, four)
    assert "a mesh of 16 devices on 4 hosts, data=2,fsdp=8" in str(found)
    with pytest.raises(ValueError, match=r"launch.mesh=fsdp=4 is a mesh of 4 devices, and there are 16; use fsdp=16"):
        detect(LaunchConfig("tpu", mesh="fsdp=4"), at, four)
    given = load_config(None, {"num_replicas": 16, "generate_rows": 8})
    first, second = detection.slice_problems(given)
    assert first.startswith("tracking.generate_rows: 8 on a TPU slice of several hosts: answers are generated on a")
    assert second.endswith("as a part of a mesh; remove it, or set launch.mesh=data=-1")
    assert detection.slice_problems(load_config(None, {})) == []


@pytest.mark.parametrize(
    ("gpus", "launch_config", "tpus", "xla", "environ", "message"),
    [
        (0, LaunchConfig("tpu"), 8, True, {"PJRT_DEVICE": "CPU"},
         r"device_type=tpu, but the environment says PJRT_DEVICE=CPU, which is xla-cpu\. Unset PJRT_DEVICE, or"),
        (0, LaunchConfig("xla-cpu"), 8, True, {"PJRT_DEVICE": "TPU"}, "says PJRT_DEVICE=TPU, which is tpu"),
        (2, LaunchConfig("cuda"), 0, True, {"PJRT_DEVICE": "CPU"}, "device_type=cuda, but .* which is xla-cpu"),
        (0, LaunchConfig("cpu"), 8, True, {"PJRT_DEVICE": "TPU"}, "device_type=cpu, but .* which is tpu"),
        (0, LaunchConfig("tpu"), 0, True, {}, "this machine has no TPU. On Colab: .*; on Kaggle: .*xla-cpu rehearses"),
        (0, LaunchConfig(), 0, True, {"PJRT_DEVICE": "TPU"}, "this machine has no TPU"),
        (0, LaunchConfig("tpu"), 8, False, {},
         r"(?s)device_type=tpu needs torch_xla, which is not .*pip install -r requirements-tpu.txt"),
        (0, LaunchConfig("tpu"), 8, False, {}, "or use launch.device_type=cpu$"),
        (0, LaunchConfig(), 8, False, {},
         r"(?s)device_type=auto: this machine has a TPU \(8 x v5e\), and torch_xla, .*pip install -r requirements-tpu"),
        (0, LaunchConfig(), 0, False, {"TPU_NAME": "mine"}, r"has a TPU \(TPU_NAME=mine\)"),
        (0, LaunchConfig("xla-cpu"), 0, False, {}, "device_type=xla-cpu needs torch_xla"),
        (0, LaunchConfig(), 0, False, {"PJRT_DEVICE": "CPU"}, "(?s)needs torch_xla.*with PJRT_DEVICE unset"),
        (0, LaunchConfig("cuda"), 8, True, {}, "device_type=cuda, but PyTorch sees no GPU here .*nvidia-smi"),
        (2, LaunchConfig("cuda", 3), 0, True, {}, r"num_replicas=3, with 2 GPU\(s\); use 2 or leave it out"),
        (0, LaunchConfig("tpu", 4), 8, True, {}, "num_replicas=4 with 8 TPU devices: .*; use num_replicas=8"),
        (0, LaunchConfig("xla-cpu"), 0, True, {"CPU_NUM_DEVICES": "four"}, "CPU_NUM_DEVICES='four'; it must be a numb"),
        (0, LaunchConfig("xla-cpu"), 0, True, {"CPU_NUM_DEVICES": "0"}, "CPU_NUM_DEVICES='0'"),
    ],
    indirect=["gpus"],
)  # fmt: skip
@pytest.mark.usefixtures("gpus")
def test_what_cannot_be_had(
    tmp_path: Path, launch_config: LaunchConfig, tpus: int, xla: bool, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        detect(launch_config, machine(tmp_path, tpus, environ, xla))


@pytest.mark.parametrize("packages", [{"torch": "2.13.0", "torch_tpu": "0.2.0"}, {"torch": "2.13.0"}])
@pytest.mark.parametrize(("node", "by_itself"), [("accel0", True), ("vfio/0", False)])
@pytest.mark.parametrize("wish", ["auto", "tpu"])
@pytest.mark.usefixtures("gpus")
def test_a_tpu_without_torch_xla_never_trains_on_the_cpu_unasked(
    tmp_path: Path, packages: dict[str, str], node: str, by_itself: bool, wish: Any
) -> None:
    """A chip unknown to the kit: only its device file is there."""
    (tmp_path / "dev" / node).parent.mkdir(parents=True)
    (tmp_path / "dev" / node).touch()
    at = Machine(root=tmp_path, environ={}, version=packages.get)
    assert detect(LaunchConfig("cpu"), at).device_type == "cpu"
    if wish == "auto" and "torch_tpu" not in packages and not by_itself:
        assert detect(LaunchConfig(wish), at).device_type == "cpu"  # another device's file
        return
    with pytest.raises(ValueError, match=f"device_type={wish}") as refusal:
        detect(LaunchConfig(wish), at)
    assert ("needs torch 2.11 or later" in str(refusal.value)) is ("torch_tpu" in packages)
    assert ("torch_tpu 0.2.0 of 2026-10-19, without torch_xla" in str(refusal.value)) is ("torch_tpu" in packages)
    assert ("uv venv" if "torch_tpu" in packages else "pip install -r requirements-tpu.txt") in str(refusal.value)
    rows = {row.name: row for row in diagnose(load_config(None, [f"device_type={wish}"]), at)}
    assert rows["Device type"].status == rows["Packages"].status == "failure"
    assert ("uv venv" in rows["Packages"].fix) is ("torch_tpu" in packages)


@pytest.mark.parametrize("wish", ["tpu", "xla-cpu"])
@pytest.mark.usefixtures("gpus")
def test_torch_tpu_beside_torch_xla_is_refused(tmp_path: Path, wish: Any) -> None:
    at = machine(tmp_path, 1)
    at = Machine(root=at.root, environ={}, version={"torch": "2.9.0", "torch_xla": "2.9.0", "torch_tpu": "0.2.0"}.get)
    with pytest.raises(ValueError, match=r"torch_xla 2.9.0 and torch_tpu 0.2.0: .*own. Uninstall torch_tpu and"):
        detect(LaunchConfig(wish), at)
    assert detect(LaunchConfig("cpu"), at).device_type == "cpu"


def with_torch_tpu(root: Path, tpus: int = 1, environ: Mapping[str, str] | None = None, **changes: Any) -> Machine:
    """A machine with these chips and the tested torch_tpu, except for changed versions."""
    packages = {**torch_tpu.TESTED, **changes}
    return Machine(root=machine(root, tpus).root, environ=environ or {}, version=packages.get)


@pytest.mark.usefixtures("gpus")
def test_torch_tpu_is_taken_where_it_is_asked_for_alone(tmp_path: Path) -> None:
    at = with_torch_tpu(tmp_path)
    found = detect(LaunchConfig("torch-tpu"), at)
    assert (found.device_type, found.num_replicas, found.reason) == ("torch-tpu", 1, "as configured")
    with pytest.raises(ValueError, match=r"device_type=cpu to train on the CPU, or torch-tpu, which is experimental$"):
        detect(LaunchConfig(), at)
    with pytest.raises(ValueError, match=r"device_type=cpu, or torch-tpu, which is experimental$"):
        detect(LaunchConfig("tpu"), at)
    assert detect(LaunchConfig("torch-tpu", 8), with_torch_tpu(tmp_path / "all", 8)).num_replicas == 8
    with pytest.raises(ValueError, match=r"num_replicas=3 with 8 chip\(s\): .* set launch.num_replicas=8, or 1$"):
        detect(LaunchConfig("torch-tpu", 3), with_torch_tpu(tmp_path / "some", 8))
    several = Backend("torch-tpu", 1, "", hosts=Hosts(0, ("a", "b"), "a:1"))
    (problem,) = detection.run_problems(load_config(None, ["device_type=torch-tpu"]), several)
    assert problem.startswith(
        "launch.hosts: 2 hosts train together, which launch.device_type=torch-tpu does not do yet"
    )
    plugin = with_torch_tpu(tmp_path / "none", 0, {"TPU_LIBRARY_PATH": "/a/plugin.so"})
    assert detect(LaunchConfig("torch-tpu"), plugin).device_type == "torch-tpu"
    room = detection.device_memory_budget(load_config(None, {"device_type": "torch-tpu"}), at)
    assert room is not None and room.chip.name == "v5e"
    room = detection.device_memory_budget(
        load_config(None, {"device_type": "torch-tpu"}), with_torch_tpu(tmp_path / "8", 8)
    )
    assert room is not None and (room.devices, room.mesh) == (1, None), "one chip, and no mesh over the others"
    rows = {row.name: row for row in diagnose(load_config(None, ["device_type=torch-tpu"]), at)}
    assert rows["Packages"].status == rows["Device type"].status == "ok"
    assert "torch_tpu 0.2.0 of 2026-10-19, without torch_xla" in rows["Packages"].found


@pytest.mark.parametrize(
    ("tpus", "changes", "environ", "message"),
    [
        (1, {"torch_tpu": "0.1.0"}, {}, "torch_tpu is 0.1.0, and must be 0.2.0, with which it was tested"),
        (
            1,
            {"torch_tpu": "0.3.0", "jax": None},
            {},
            "torch_tpu is 0.3.0, and must be 0.2.0, jax is not installed, and",
        ),
        (1, {"torch_tpu": None}, {}, "torch_tpu is not installed, and must be 0.2.0"),
        (1, {"torch_xla": "2.9.0"}, {}, "torch_xla 2.9.0 and torch_tpu 0.2.0: .* own. Uninstall torch_xla, or make"),
        (0, {}, {}, "but this machine has no TPU. On Colab: .*device_type=cpu trains on this CPU"),
        (0, {}, {"TPU_LIBRARY_PATH": "/site/libtpu/libtpu.so"}, "but this machine has no TPU"),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_torch_tpu_is_refused_before_anything_starts(
    tmp_path: Path, tpus: int, changes: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    at = with_torch_tpu(tmp_path, tpus, environ, **changes)
    with pytest.raises(ValueError, match=f"^launch.device_type=torch-tpu[:,].* {message}"):
        detect(LaunchConfig("torch-tpu"), at)
    rows = {row.name: row for row in diagnose(load_config(None, ["device_type=torch-tpu"]), at)}
    assert rows["Device type"].status == "failure"
    assert (rows["Packages"].status == "failure") is bool(changes)


@pytest.mark.usefixtures("gpus")
def test_a_chip_that_another_process_holds_is_refused(tmp_path: Path) -> None:
    at = with_torch_tpu(tmp_path)
    holder = tmp_path / "proc" / "4242"
    (holder / "fd").mkdir(parents=True)
    (holder / "fd" / "3").symlink_to(tmp_path / "dev/accel0")
    (holder / "cmdline").write_text("python\0other.py\0")
    with pytest.raises(ValueError, match=r"torch-tpu: the chip is held by PID 4242: python other.py. kill 4242$"):
        detect(LaunchConfig("torch-tpu"), at)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["objective=policy"], "the command: grpo is not supervised fine-tuning"),
        (["objective=preference"], "the command: dpo is not supervised fine-tuning"),
        (["distill.teacher=embedded"], "the command: distill is not supervised fine-tuning"),
        (["distill.teacher=embedded", "distill.on_policy=true"], "the command: distill is not supervised"),
        (["objective=my_losses:mine"], "optim.objective: my_losses:mine is not the supervised loss"),
        (["model.images=true"], "model.images: the model reads pictures"),
        (["remat=none", "lora.dropout=0.1"], "optim.remat lora.dropout: lora.dropout=0.1 outside of a loop"),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_what_torch_tpu_does_not_do_is_refused_by_name(tmp_path: Path, changes: list[str], message: str) -> None:
    config = load_config(None, ["device_type=torch-tpu", *changes])
    found = detect(config.launch, with_torch_tpu(tmp_path))
    (problem,) = detection.run_problems(config, found)
    assert problem.startswith(message) and "which launch.device_type=torch-tpu does not do yet; " in problem


def test_other_families_are_refused_by_name_on_torch_tpu_alone() -> None:
    for family in ("qwen3_moe", "gpt_oss", "qwen3_5_text", "gemma4"):
        check_family(family, "tpu")
        with pytest.raises(ValueError, match="torch-tpu trains only llama, qwen2, qwen3, gemma3_text, phi3: use"):
            check_family(family, "torch-tpu")
    check_family("qwen2", "torch-tpu")


def test_a_mesh_on_torch_tpu_is_refused_by_the_configuration() -> None:
    with pytest.raises(ValueError, match=r"launch.mesh: .*needs XLA, and launch.device_type=torch-tpu; use tpu or"):
        load_config(None, ["device_type=torch-tpu", "mesh=fsdp=4"])


@pytest.mark.usefixtures("gpus")
def test_a_mesh_is_of_the_devices_that_are_there(tmp_path: Path) -> None:
    tpus = machine(tmp_path / "tpu", tpus=8)
    found = detect(LaunchConfig(mesh="data=2,fsdp=-1"), tpus)
    assert (found.device_type, found.mesh) == ("tpu", Mesh(data=2, fsdp=4))
    assert str(found).startswith("device_type=tpu, a mesh of 8 devices, data=2,fsdp=4: ")
    with pytest.raises(ValueError, match="a mesh of 4 devices, and there are 8; use fsdp=8, or data=2,fsdp=4"):
        detect(LaunchConfig(mesh="fsdp=4"), tpus)
    rehearsal = detect(LaunchConfig(device_type="xla-cpu", mesh="fsdp=3"), machine(tmp_path / "none"))
    assert rehearsal.mesh == Mesh(fsdp=3)
    rest = detect(LaunchConfig(device_type="xla-cpu", mesh="fsdp=-1"), machine(tmp_path / "none"))
    assert rest.mesh == Mesh(fsdp=4)
    with pytest.raises(ValueError, match=r"launch\.mesh=fsdp=2 needs XLA, and the launch runs on cpu"):
        detect(LaunchConfig(mesh="fsdp=2"), machine(tmp_path / "none"))


def test_the_loud_line() -> None:
    assert str(detection.Backend("tpu", None, "8 x TPU v5e found")) == "device_type=tpu, all devices: 8 x TPU v5e found"
    assert str(detection.Backend("cpu", 1, "why")) == "device_type=cpu, 1 replica(s): why"


def test_detect_initialises_nothing() -> None:
    code = (
        "import sys\nfrom tpu_kit.config.loader import LaunchConfig\nfrom tpu_kit.distributed.detection import detect\n"
        "print(detect(), detect(LaunchConfig('cpu')))\n"
        "assert 'torch_xla' not in sys.modules and 'jax' not in sys.modules\n"
        "torch = sys.modules.get('torch')\nassert torch is None or not torch.cuda.is_initialized()"
    )
    assert "device_type=" in run_python(code, env={"PJRT_DEVICE": None}).stdout


def test_no_replica_here() -> None:
    with pytest.raises(
        RuntimeError, match=r"no replica here: run the function with tpu_kit.distributed.launch.launch\(fn, config"
    ):
        runtime.current()


@pytest.mark.parametrize(
    ("device_type", "replicas"), [pytest.param("xla-cpu", 4, marks=needs_xla), ("cpu", 2), ("cpu", 1)]
)
def test_collectives_on_real_replicas(
    device_type: str, replicas: int, tmp_path: Path, quick_xla: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = load_config(
        overrides=[f"launch.device_type={device_type}", f"launch.num_replicas={replicas}", f"output_dir={tmp_path}"]
    )
    result = launch(replica_functions.sums, config)
    ranks = range(replicas)
    expected = [[sum(r + 1.0 for r in ranks), sum(10.0 * r for r in ranks)], [[0.5 * replicas] * 3] * 2]
    assert result["values"] == expected
    if (device_type, replicas) == ("cpu", 2):
        assert result["threads"] == 1  # the default is two of four cores per process
    assert result["all"] == [repr(expected)] * replicas
    assert (result["rank"], result["world_size"], result["is_xla"]) == (0, replicas, device_type == "xla-cpu")
    assert result["device"] == ("xla:0" if device_type == "xla-cpu" else "cpu")
    limit = timedelta(seconds=3 * config.launch.hang_timeout)
    assert result["limit"] == (limit if device_type == "cpu" and replicas > 1 else None)
    assert result["loads"] == (1 if device_type == "xla-cpu" else replicas)
    if device_type == "xla-cpu":
        assert len(set(result["models"])) == replicas  # a copy for each rank
        # The process holds all four replicas: two programs, compiled once each and started by each replica.
        assert result["counters"] == {
            "compiles": 2, "executions": 8, "device_reads": 8, "host_syncs": 0, "fallbacks": 0,
        }  # fmt: skip
    else:
        assert result["counters"] == {}
    with pytest.raises(RuntimeError, match="no replica here"):
        runtime.current()
