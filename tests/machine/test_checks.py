from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.support.child_processes import REPOSITORY, run_python
from tpu_kit.distributed import launch
from tpu_kit.distributed.detection import Backend
from tpu_kit.machine import checks as machine
from tpu_kit.machine import compatibility
from tpu_kit.machine.checks import Check, Machine
from tpu_kit.machine.compatibility import PAIRINGS

NEW = (  # run with uv 0.13; the doctor of that environment then found nothing wrong
    "pip install uv && uv venv --python 3.12 ~/tpu_kit-env && uv pip install --python ~/tpu_kit-env "
    f"-r {REPOSITORY}/tpu_kit/requirements-tpu.txt {REPOSITORY}"
)
PAIRED = PAIRINGS[0].versions((3, 11)) | {"torch": "2.9.0+cpu"}
KAGGLE = {"torch": "2.8.0+cpu", "torch_xla": "2.8.0", "libtpu": "0.0.17", "jax": "0.7.2", "jaxlib": "0.7.2"}


def fake(root: Path, *pci: tuple[str, str, str], environ: dict[str, str] | None = None) -> Machine:
    """A machine with these PCI devices: (vendor, device, subsystem)."""
    for number, (vendor, device, subsystem) in enumerate(pci):
        folder = root / f"sys/bus/pci/devices/0000:00:{number:02x}.0"
        folder.mkdir(parents=True)
        for name, value in (("vendor", vendor), ("device", device), ("subsystem_device", subsystem)):
            (folder / name).write_text(value + "\n")
    return Machine(root=root, environ=environ or {}, version=PAIRED.get, python=(3, 12))


V5E, V7X, GPU, GVNIC = [
    ("0x1ae0", "0x0063", "0x0000"),
    ("0x1ae0", "0x0076", "0x0000"),
    ("0x10de", "0x2330", "0x16c1"),
    ("0x1ae0", "0x0042", "0x0058"),  # Google's network card: their vendor id, no TPU
]


def add_nodes(root: Path, *names: str) -> None:
    for name in names:
        path = root / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@contextmanager
def child(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that has run `code` and waits until its standard input closes."""
    command = [sys.executable, "-c", f"{code}\nprint('ready', flush=True)\ninput()", *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.communicate("\n")


@contextmanager
def server(status: int, body: str = "", seen: list[tuple[str, str | None]] | None = None) -> Iterator[str]:
    """A web server that answers everything the same; yields host:port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if seen is not None:
                seen.append((self.path, self.headers["Authorization"]))
            self.send_response(status)
            self.send_header("Metadata-Flavor", "Google")
            if 300 <= status < 400:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body.encode())

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_the_newest_pairing_is_what_is_installed() -> None:
    """libtpu and jax as named by torch_xla's extras, to notice when they change."""
    newest = PAIRINGS[0]
    lines = (REPOSITORY / "requirements-tpu.txt").read_text().splitlines()
    pinned = {line.split(";")[0].strip() for line in lines}
    for python in ((3, 11), (3, 12), (3, 13)):
        assert {f"{name}=={pin}" for name, pin in newest.versions(python).items()} <= pinned
    from importlib.metadata import PackageNotFoundError, requires, version

    try:
        pairing = next(one for one in PAIRINGS if one.torch == version("torch_xla"))
    except PackageNotFoundError:
        pytest.skip("torch_xla is not installed")
    named = [line.split(";")[0].strip() for line in requires("torch_xla") or [] if "extra ==" in line]
    assert f"libtpu=={next(iter(pairing.libtpu))}" in named
    assert pairing is not newest or f"jax=={pairing.jax[0]}" in named


@pytest.mark.parametrize(
    ("python", "status", "text"),
    [
        ((3, 11), "ok", "Python 3.11"),
        ((3, 12), "ok", "Python 3.12"),
        ((3, 13), "ok", "Python 3.13"),
        ((3, 14), "failure", "Python 3.14: the kit and torch_xla need 3.11 to 3.13"),
        ((3, 10), "failure", "need 3.11 to 3.13"),
    ],
)
def test_python(python: tuple[int, int], status: str, text: str) -> None:
    check = machine.check_python(Machine(python=python))
    assert check.status == status
    assert text in check.found
    assert check.fix == ("" if status == "ok" else NEW)


@pytest.mark.parametrize(
    ("changes", "on_tpu", "status", "text", "fix"),
    [
        ({}, True, "ok", "torch 2.9.0+cpu torch_xla 2.9.0 libtpu 0.0.21 jax 0.7.1 jaxlib 0.7.1", ""),
        ({"torch": None}, True, "failure", "torch_xla 2.9.0", "pip install -r requirements-gpu.txt"),
        ({"torch": "2.11.0"}, False, "failure", "torch must be 2.9.0", 'pip install "torch==2.9.0", then restart'),
        ({"torch_xla": "2.8.1"}, False, "failure", "torch_xla must be 2.9.0", 'pip install "torch_xla==2.9.0", then'),
        ({"libtpu": None}, True, "failure", "libtpu must be 0.0.21 or 0.0.21.1", 'pip install "libtpu==0.0.21'),
        ({"libtpu": None}, False, "ok", "torch_xla 2.9.0", ""),
        ({"libtpu": "0.0.21.1"}, True, "ok", "libtpu 0.0.21.1", ""),
        ({"jax": "0.7.2", "jaxlib": "0.7.2", "libtpu": "0.0.21.1"}, True, "ok", "jax 0.7.2", ""),
        (KAGGLE, True, "ok", "torch 2.8.0+cpu torch_xla 2.8.0 libtpu 0.0.17", ""),
        (KAGGLE | {"libtpu": "0.0.23"}, True, "failure", "libtpu must be 0.0.17", 'pip install "libtpu==0.0.17"'),
        ({"jaxlib": "0.8.0"}, False, "failure", "jaxlib must be 0.7.1 or 0.7.2", 'pip install "jax==0.7.1" "jaxlib'),
        ({"jaxlib": "0.7.2"}, False, "failure", "jax must be", 'pip install "jax==0.7.1" "jaxlib==0.7.1"'),
        ({"torch_xla": None}, False, "skipped", "no TPU and no rehearsal of one", "only for TPU and its rehearsal"),
        ({"torch_xla": None}, True, "failure", "torch_xla is not installed", 'pip install "torch_xla==2.9.0"'),
        (
            {"torch_tpu": "0.2.0"},
            False,
            "failure",
            "torch_xla 2.9.0 and torch_tpu 0.2.0: torch_tpu needs torch 2.11 or later, and "
            "torch_xla 2.9.0 or 2.8.0 the same torch, so each needs an environment of its own",
            NEW,
        ),
        ({"torch_tpu": "0.2.0", "torch": "2.13.0", "torch_xla": None}, False, "warning", "trains on CPU and GPU", NEW),
        ({"torch_tpu": "0.2.0", "torch": "2.13.0", "torch_xla": None}, True, "failure", "without torch_xla (", NEW),
        ({"transformers": "5.15.0"}, True, "ok", "jaxlib", ""),
        ({"transformers": "5.14.0"}, True, "warning", "tested with 5.15 to 5.24", 'pip install "transformers==5.24.*"'),
        ({"transformers": "5.25.1"}, True, "warning", "5.25.1, tested with 5.15 to 5.24", "transformers==5.24.*"),
        ({"torch_xla": None, "transformers": "6.0"}, False, "warning", "6.0, tested with 5.15", "transformers==5.24.*"),
        ({"transformers": "from source"}, True, "warning", "from source, tested with 5.15", "transformers==5.24.*"),
        ({"transformers": "5.24.0.dev0"}, True, "ok", "jaxlib", ""),
        ({"torchvision": "0.24.0+cpu", "torchaudio": "2.9.0"}, True, "ok", "jaxlib 0.7.1", ""),
        (
            {"torchvision": "0.26.0"},
            True,
            "failure",
            "torchvision must be 0.24.0",
            'pip install "torchvision==0.24.0", then restart the kernel',
        ),
        ({"tensorflow": "2.20.0"}, True, "warning", "may take the chip", "pip uninstall -y tensorflow"),
    ],
)
def test_packages(changes: dict[str, str | None], on_tpu: bool, status: str, text: str, fix: str) -> None:
    check = machine.check_packages(Machine(version=(PAIRED | changes).get), on_tpu)
    assert check.status == status, check
    assert text in check.found
    assert check.fix.startswith(fix) or fix in check.fix
    assert bool(check.fix) == bool(fix)


def test_a_model_that_fails_is_told_of_the_transformers_that_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = "5.24 may do it: pip install -U 'transformers~=5.24.0', then start anew"
    for version, text in {
        "5.24.3": "",
        "5.15.0": f". This is transformers 5.15.0; {advice}",
        "5.25.0": f". This is transformers 5.25.0; the newest tested version is 5.24, and {advice}",
    }.items():
        monkeypatch.setattr(compatibility, "installed_version", {"transformers": version}.get)
        assert compatibility.other_transformers() == text


def test_versions_are_read_without_an_import() -> None:
    code = """
        import sys
        from tpu_kit.machine.checks import Machine, check_packages, check_process
        check_packages(Machine(), False), check_process(Machine())
        assert not {"torch", "torch_xla", "jax", "libtpu"} & set(sys.modules)
    """
    run_python("\n".join(line.strip() for line in code.splitlines()))


def test_process_that_touched_the_device_or_was_overtaken_by_pip() -> None:
    if Machine().version("torch_xla") is None:
        pytest.skip("torch_xla is not installed")
    code = """
        import dataclasses, json, torch, torch_xla
        from tpu_kit.machine.checks import Machine, check_process
        checks = [check_process(Machine()), check_process(Machine(version={"torch": "2.11.0+cpu"}.get))]
        torch_xla.device()
        checks.append(check_process(Machine()))
        print(json.dumps([dataclasses.asdict(check) for check in checks]))
    """
    done = run_python("\n".join(line.strip() for line in code.splitlines()))
    imported, replaced, touched = [Check(**row) for row in json.loads(done.stdout.splitlines()[-1])]
    assert imported.status == "ok"
    assert "is loaded, 2.11.0+cpu is installed: pip replaced it under this process" in replaced.found
    assert replaced.status == touched.status == "failure"
    assert 'a launch would fail with "Runtime is already initialized"' in touched.found
    assert "start again; do not call torch_xla.device() in a cell" in touched.fix


def test_kernel_is_told_to_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "in_kernel", lambda: True)
    assert machine.restart() == "restart the kernel (Kernel > Restart)"
    assert machine.unset(["PJRT_DEVICE"]).startswith(
        "import os; [os.environ.pop(name, None) for name in ['PJRT_DEVICE']]"
    )


def test_tpu_kinds(tmp_path: Path) -> None:
    at = fake(tmp_path, GPU, V5E, GVNIC, V7X)
    assert at.tpus() == ["v5e", "v7x"]
    assert Machine(root=tmp_path / "nothing").tpus() == []


def add_gpu(root: Path) -> None:
    """The output of NVIDIA's driver for an H100."""
    information = root / "proc/driver/nvidia/gpus/0000:00:05.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 30\n")
    version = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@a)\nGCC version:  12"
    )
    (root / "proc/driver/nvidia/version").write_text(version)


def test_gpu(tmp_path: Path) -> None:
    at = fake(tmp_path)
    assert at.gpus() == []
    add_gpu(tmp_path)
    found = "1 x NVIDIA H100 80GB HBM3, driver 580.159.04"
    assert machine.check_gpu(at, wanted=True, seen=1) == Check("GPU", "ok", found)
    assert machine.check_gpu(at, wanted=False, seen=0).status == "skipped"
    blind = machine.check_gpu(at, wanted=True, seen=0)
    assert blind.status == "warning" and blind.found.startswith(f"{found}; torch 2.9.0+cpu does not see it: ")
    assert "requirements-gpu.txt" in blind.fix
    hidden = machine.check_gpu(replace(at, environ={"CUDA_VISIBLE_DEVICES": ""}), wanted=True, seen=0)
    assert (hidden.found, hidden.fix) == (f"{found}; CUDA_VISIBLE_DEVICES= hides it", "unset CUDA_VISIBLE_DEVICES")


def test_for_a_gpu_no_package_of_a_tpu_is_missing(tmp_path: Path) -> None:
    at = replace(fake(tmp_path), version={"torch": "2.11.0"}.get)
    add_gpu(tmp_path)
    assert machine.check_packages(at, on_tpu=False).status == "ok" and not machine.check_packages(at, on_tpu=False).fix
    assert machine.check_packages(at, on_tpu=True).status == "failure"


def test_tpu(tmp_path: Path) -> None:
    at = fake(tmp_path, V5E, V5E, environ={"TPU_ACCELERATOR_TYPE": "v5litepod-8"})
    check = machine.check_tpu(at, False)
    assert check.status == "failure" and "the container has no access to the devices" in check.found
    assert check.fix.startswith("docker run --privileged")
    add_nodes(tmp_path, "vfio/0", "vfio/1", "vfio/vfio")
    assert machine.check_tpu(at, False) == Check("TPU", "ok", "2 x v5e (v5litepod-8), 2 device files")


def test_no_tpu(tmp_path: Path) -> None:
    at = fake(tmp_path)
    assert machine.check_tpu(at, asked=False) == Check("TPU", "skipped", "none attached")
    assert machine.check_tpu(at, asked=True).status == "failure"
    named = machine.check_tpu(replace(at, environ={"TPU_NAME": "node-1"}), asked=False)
    assert named.status == "warning" and named.found == "none attached, though the environment names node-1"
    assert "Runtime > Change runtime type" in named.fix


def as_another_user(code: str, folder: Path) -> str:
    """Runs code with `root` as a user that owns nothing; the test's user must be root."""
    if os.geteuid():
        pytest.skip("needs root, to become another user")
    prelude = (
        "import os, sys\nfrom pathlib import Path\nfrom tpu_kit.machine.checks import *\nroot = Path(sys.argv[1])\n"
    )
    return run_python(["-c", f"{prelude}os.seteuid(65534)\n{code}", str(folder)]).stdout


@pytest.fixture
def open_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # pytest's own is closed to other users
        yield Path(folder)


def test_device_of_another_user(open_folder: Path) -> None:
    fake(open_folder, V5E)
    add_nodes(open_folder, "accel0")
    os.chmod(open_folder / "dev/accel0", 0o600)
    # access() checks the real user, so the real user is changed too.
    printed = as_another_user(
        "os.setresuid(65534, 65534, 65534)\nprint(check_tpu(Machine(root=root), False))", open_folder
    )
    assert "no permission" in printed
    assert f"sudo chmod a+rw {open_folder}/dev/accel0" in printed


def test_metadata_from_the_server(tmp_path: Path) -> None:
    at = fake(tmp_path, V5E)
    with server(200, "ACCELERATOR_TYPE: 'v5litepod-1'\nZONE: 'z'\n") as address:
        check = machine.check_metadata(replace(at, metadata_server=address))
    assert check == Check("TPU metadata", "ok", "the metadata server says v5litepod-1")


def test_metadata_absent(tmp_path: Path) -> None:
    at = fake(tmp_path, *[V5E] * 8)
    with server(404) as address:
        refused = machine.check_metadata(replace(at, metadata_server=address))
    gone = machine.check_metadata(replace(at, metadata_server=address))
    assert refused.status == gone.status == "failure"
    assert "does not know the TPU's type: importing torch_xla would fail or hang" in refused.found
    assert "no metadata server" in gone.found
    exports = "TPU_ACCELERATOR_TYPE=v5litepod-8 TPU_HOST_BOUNDS=1,1,1 TPU_CHIPS_PER_HOST_BOUNDS=2,4,1 TPU_WORKER_ID=0"
    assert refused.fix == gone.fix == f"export TPU_SKIP_MDS_QUERY=1 {exports} TPU_WORKER_HOSTNAMES=localhost"


def test_metadata_names_count_cores_where_the_chip_does(tmp_path: Path) -> None:
    check = machine.check_metadata(fake(tmp_path, *[V7X] * 4, environ={"TPU_SKIP_MDS_QUERY": "1"}))
    assert check.status == "failure" and "TPU_ACCELERATOR_TYPE is not" in check.found
    assert "TPU_ACCELERATOR_TYPE=tpu7x-8 " in check.fix
    named = Machine(root=tmp_path, environ={"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "tpu7x-8"})
    assert machine.check_metadata(named) == Check("TPU metadata", "ok", "from the environment: tpu7x-8")


def test_metadata_is_not_asked_for_without_chips(tmp_path: Path) -> None:
    seen: list[tuple[str, str | None]] = []
    with server(404, seen=seen) as address:
        check = machine.check_metadata(replace(fake(tmp_path), metadata_server=address))
    assert check.status == "skipped" and not seen


HOLD = "import sys; held = open(sys.argv[1])"


def test_chip_held_by_another_process(tmp_path: Path) -> None:
    (tmp_path / "proc").symlink_to("/proc")
    at = fake(tmp_path, V5E)
    assert machine.check_holder(at).status == "skipped"
    add_nodes(tmp_path, "vfio/0", "vfio/vfio")
    assert machine.check_holder(at) == Check("Chip in use", "ok", "by no process")
    with child(HOLD, tmp_path / "dev/vfio/vfio"):
        assert machine.check_holder(at).status == "ok"  # the driver's own file is no chip
    with child(HOLD, tmp_path / "dev/vfio/0") as holder:
        check = machine.check_holder(at)
    assert check.status == "failure" and check.fix == f"kill {holder.pid}"
    assert check.found.startswith(f"held by PID {holder.pid}: {sys.executable} -c {HOLD}"[:60])


def test_chip_held_by_this_process(tmp_path: Path) -> None:
    (tmp_path / "proc").symlink_to("/proc")
    add_nodes(tmp_path, "accel0")
    with open(tmp_path / "dev/accel0"):
        check = machine.check_holder(fake(tmp_path, V5E))
    assert check.found == f"held by this process, PID {os.getpid()}" and check.fix.startswith(f"kill {os.getpid()}")


def test_lock_left_by_another_user(open_folder: Path) -> None:
    (open_folder / "tmp").mkdir()
    add_nodes(open_folder, "vfio/0")
    (open_folder / "tmp/libtpu_lockfile").touch(mode=0o600)
    printed = as_another_user("print(repr(check_holder(Machine(root=root))))", open_folder)
    assert "holds the TPU: libtpu cannot open it" in printed and "status='failure'" in printed
    assert f"sudo rm {open_folder}/tmp/libtpu_lockfile" in printed


def test_replicas_do_not_inherit_what_kaggles_image_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TPU_PROCESS_ADDRESSES=local, eight processes would not find each other."""
    monkeypatch.setenv("TPU_PROCESS_ADDRESSES", "local")
    monkeypatch.setenv("ISTPUVM", "1")
    for chips, replicas, inherits in ((8, None, False), (8, 8, False), (8, 1, True), (1, None, True)):
        at = fake(tmp_path / f"{chips}-{replicas}", *[V5E] * chips, environ=dict(os.environ))
        monkeypatch.setattr(launch, "Machine", lambda at=at: at)
        environment = launch._environment(Backend("tpu", replicas, "a test"))
        assert ("TPU_PROCESS_ADDRESSES" in environment) == inherits and environment["ISTPUVM"] == "1"
    at = fake(tmp_path / "pod", *[V5E] * 4, environ={**os.environ, "TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"})
    assert machine.preset_per_process(at) == []


@pytest.mark.parametrize(
    ("environ", "text", "fix"),
    [
        ({"PJRT_DEVICE": "CPU"}, "PJRT_DEVICE=CPU leaves the TPU unused", "unset PJRT_DEVICE"),
        ({"XLA_USE_EAGER_DEBUG_MODE": "1"}, "compiles and runs each operation alone", "unset XLA_USE_EAGER_DEBUG_MODE"),
        ({"XLA_FLAGS": "--xla_backend_optimization_level=0"}, "the compiler's optimisation off", "unset XLA_FLAGS"),
        ({"PT_XLA_DEBUG": "1"}, "writes a report at each step", "unset PT_XLA_DEBUG"),
        ({"PJRT_DEVICE": "TPU", "PT_XLA_DEBUG": "0", "XLA_FLAGS": "--a=1"}, "none slows it", ""),
    ],
)  # fmt: skip
def test_settings(tmp_path: Path, environ: dict[str, str], text: str, fix: str) -> None:
    check = machine.check_settings(fake(tmp_path, V5E, environ=environ))
    assert text in check.found and check.fix == fix
    assert check.status == ("warning" if fix else "ok")


def test_cpu_by_choice_where_there_is_no_tpu(tmp_path: Path) -> None:
    assert machine.check_settings(fake(tmp_path, environ={"PJRT_DEVICE": "CPU"})).status == "ok"


def test_command_lines_are_shortened(tmp_path: Path) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cmdline").write_text("python\0train.py\n\0" + "x" * 200)
    command: Callable[[int], str] = fake(tmp_path).command
    assert command(7).startswith("python train.py xxx") and len(command(7)) == 90 and command(7).endswith("...")
