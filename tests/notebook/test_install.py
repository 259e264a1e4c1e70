"""Decisions of the installation on each kind of machine, and its work in fresh environments."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.metadata import distribution, requires
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nbformat
import pytest

from tests.support.child_processes import REPOSITORY, run_python
from tpu_kit.config.fields import ConfigError
from tpu_kit.machine import torch_tpu
from tpu_kit.machine.checks import Check, Machine
from tpu_kit.machine.compatibility import PAIRINGS, installed_version, requirements
from tpu_kit.machine.compatibility import REPOSITORY as ADDRESS
from tpu_kit.notebook import install
from tpu_kit.notebook.install import Decision, Site, decide, look, pairings

PAIR = {"torch": "2.9.0+cpu", "torch-xla": "2.9.0", "libtpu": "0.0.21", "jax": "0.7.1", "jaxlib": "0.7.1"}
KAGGLE = {"torch": "2.8.0+cpu", "torch-xla": "2.8.0", "libtpu": "0.0.17", "jax": "0.7.2", "jaxlib": "0.7.2"}
RIGHT = PAIR | {
    "transformers": "5.23.0", "peft": "0.21.2", "pyyaml": "6.0.4", "datasets": "5.2.0", "math-verify": "0.9.0",
    "matplotlib": "3.11.2", "cloudpickle": "3.1.2",
}  # fmt: skip
LAPTOP = Site("computer without an accelerator", "", "Linux x86_64", (3, 12), RIGHT, "", True)
COLAB = replace(LAPTOP, platform="Colab", accelerator="1 x v5e")
WITHOUT: dict[str, str] = {}


def test_where_all_is_right_nothing_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    decision = decide(LAPTOP)
    assert (decision.kind, decision.command) == ("tpu", ())
    pair = "torch 2.9.0+cpu, torch_xla 2.9.0, libtpu 0.0.21, jax 0.7.1, jaxlib 0.7.1 pair"
    assert str(decision) == f"Nothing to do: all packages are installed, and {pair}"
    install.carry_out(decision)
    assert capsys.readouterr().out == "There was nothing to install.\n"


def test_one_line_installs_all() -> None:
    decision = decide(replace(LAPTOP, versions=WITHOUT))
    others = "cloudpickle, datasets, math-verify, matplotlib, peft, pyyaml, transformers"
    assert decision.why == (f"not installed: torch, torch_xla, libtpu, jax, jaxlib, {others}",)
    wanted = (
        "torch==2.9.0", "torch_xla==2.9.0", "libtpu==0.0.21", "jax==0.7.1", "jaxlib==0.7.1", "cloudpickle==3.1.2",
        "datasets==5.2.0",
        "math-verify==0.9.0", "matplotlib==3.11.2", "peft==0.21.2", "pyyaml==6.0.4", "transformers==5.23.0",
    )  # fmt: skip
    assert decision.command == (sys.executable, "-m", "pip", "install", "--quiet", *wanted)
    with_uv = decide(replace(LAPTOP, versions=WITHOUT, uv="/bin/uv", pip=False), torch_index="https://a.b/cpu")
    assert with_uv.command == (
        "/bin/uv", "pip", "install", "--python", sys.executable, "--quiet",
        "--extra-index-url", "https://a.b/cpu", "--index-strategy", "unsafe-best-match", *wanted,
    )  # fmt: skip


def test_what_pairs_is_left_alone_and_what_is_missing_is_added() -> None:
    """Colab has other versions of libtpu and jax than the pins: neither is replaced."""
    image = RIGHT | {"libtpu": "0.0.21.1", "jax": "0.7.2", "jaxlib": "0.7.2", "transformers": "5.15.0"}
    there = {name: version for name, version in image.items() if name not in ("peft", "pyyaml")}
    decision = decide(replace(COLAB, python=(3, 13), versions=there))
    assert decision.add == ("peft==0.21.2", "pyyaml==6.0.4")
    assert decision.command == (sys.executable, "-m", "pip", "install", "--quiet", *decision.add)
    assert set(decision.keep) == {f"{name}=={version}" for name, version in there.items()}
    assert "Unchanged: 10 packages" in str(decision)


def test_a_kit_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "requires", lambda name: requires(f"no-{name}"))
    with pytest.raises(ValueError, match=r"tpu_kit is in .*, but not installed, .*: run `pip install --no-deps -e /"):
        install.ensure()


def test_extras_are_installed_when_asked_for() -> None:
    added = decide(LAPTOP, extras=["notebooks"]).add
    assert added == ("ipykernel==7.4.0", "nbconvert==7.17.2", "papermill==2.7.0")
    assert decide(replace(LAPTOP, versions=RIGHT | {"gcsfs": "2026.1"}), extras=["gcs"]).command == ()


def test_a_folder_of_wheels_is_the_only_place_to_look(tmp_path: Path) -> None:
    (tmp_path / "tpu_kit-0.1.0-py3-none-any.whl").touch()
    decision = decide(replace(LAPTOP, versions=PAIR), source=str(tmp_path))
    assert decision.command[5:8] == ("--no-index", "--find-links", str(tmp_path))


def test_a_torch_that_is_used_alone_is_left_alone() -> None:
    there = {name: version for name, version in RIGHT.items() if name not in PAIR} | {"torch": "2.13.0+cpu"}
    decision = decide(replace(LAPTOP, versions=there))
    assert (decision.command, decision.kind) == ((), "gpu")
    assert decide(replace(COLAB, versions=there)).add[:2] == ("torch==2.9.0", "torch_xla==2.9.0")


@pytest.mark.parametrize(
    ("name", "version", "why"),
    [
        ("torch-xla", "2.8.0", "torch_xla is 2.8.0, and must be 2.9.0"),
        ("torch", "2.9.1", "torch is 2.9.1, and must be 2.9.0"),
        ("libtpu", "0.0.20", "libtpu is 0.0.20, and must be 0.0.21 or 0.0.21.1"),
        ("transformers", "4.57.0", "transformers is 4.57.0, and must be >=5.15"),
        ("torchvision", "0.20.0", "torchvision is 0.20.0, and must be 0.24.0"),
    ],
)
def test_what_is_wrong_is_named_and_mended(name: str, version: str, why: str) -> None:
    decision = decide(replace(COLAB, versions={**RIGHT, name: version}))
    assert decision.why == (why,)
    assert ("torchvision==0.24.0" in decision.command) == (name == "torchvision")
    assert len(decision.add) == 1 and decision.keep == ()


def test_torch_tpu_of_the_users_own_environment_stays() -> None:
    with pytest.raises(ValueError, match=r"uv venv --python 3.12 ~/tpu_kit-env") as told:
        decide(replace(LAPTOP, versions={"torch": "2.13.0", "torch-tpu": "0.2.0"}), hardware="tpu")
    for text in (
        "torch_tpu 0.2.0 of 2026-10-19, without torch_xla (torch_xla 2.9.0 of 2025-11 is its last release): ",
        "torch_tpu needs torch 2.11 or later, and torch_xla 2.9.0 or 2.8.0 the same torch",
    ):
        assert text in str(told.value)


TORCH_TPU = {name.replace("_", "-"): pin for name, pin in torch_tpu.TESTED.items()}


def test_torch_tpu_is_installed_where_it_is_asked_for() -> None:
    decision = decide(replace(LAPTOP, versions=WITHOUT), "torch-tpu")
    assert decision.add[:5] == (
        "torch==2.13.0", "torch_tpu==0.2.0", "libtpu==0.0.52", "jax==0.10.2", "jaxlib==0.10.2",
    )  # fmt: skip
    others = {name: version for name, version in RIGHT.items() if name not in PAIR}
    right = replace(LAPTOP, versions=others | TORCH_TPU)
    assert decide(right, "torch-tpu").command == ()
    assert "torch_tpu 0.2.0, libtpu 0.0.52, jax 0.10.2, jaxlib 0.10.2 pair" in str(decide(right, "torch-tpu"))
    on_tpu = replace(right, platform="TPU VM", accelerator="1 x v5e")
    assert (decide(on_tpu).kind, decide(on_tpu).command) == ("torch-tpu", ())  # as the notebooks' first cells ask
    with pytest.raises(ValueError, match=r"Instead:\n.*hardware='torch-tpu' here, and launch.device_type=torch-tpu"):
        decide(replace(on_tpu, versions=on_tpu.versions | {"torch-tpu": "0.3.0"}))
    for other in ("0.1.0", "0.3.0"):  # older and newer than tested
        wrong = decide(replace(right, versions=right.versions | {"torch-tpu": other}), "torch-tpu")
        assert (wrong.why, wrong.add) == ((f"torch_tpu is {other}, and must be 0.2.0",), ("torch_tpu==0.2.0",))
    with pytest.raises(ValueError, match=r"torch_xla 2.9.0 and torch_tpu .* its own\nInstead:\n.*-torch-tpu.txt"):
        decide(replace(LAPTOP, versions=RIGHT | {"torch-tpu": "0.2.0"}), "torch-tpu")
    with pytest.raises(ValueError, match=r"hardware=torch-tpu, and here is torch_xla 2.9.0 \("):
        decide(LAPTOP, "torch-tpu")


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        (RIGHT, "torch_xla 2.9.0 (torch_xla 2.9.0 of 2025-11 is its last release; torch_tpu succeeds it)"),
        (TORCH_TPU, "torch_tpu 0.2.0 of 2026-10-19, without torch_xla (torch_xla 2.9.0 of 2025-11 is its last"),
        (TORCH_TPU | {"torch-tpu": "0.3.0"}, "torch_tpu 0.3.0, not the tested release, without torch_xla ("),
        (RIGHT | TORCH_TPU, "torch_xla 2.9.0 and torch_tpu 0.2.0: torch_tpu needs torch 2.11 or later, and"),
        (WITHOUT, "neither torch_xla nor torch_tpu"),
    ],
)
def test_the_backend_of_an_image_is_told(versions: dict[str, str], said: str) -> None:
    rows = {row["what"]: row["found"] for row in replace(LAPTOP, versions=versions).rows()}
    assert rows["backend for TPUs"].startswith(said)


@pytest.mark.parametrize(
    ("site", "hardware", "kind"),
    [
        (COLAB, "auto", "tpu"),
        (LAPTOP, "auto", "tpu"),
        (LAPTOP, "gpu", "gpu"),
        (replace(LAPTOP, platform="GPU machine", accelerator="NVIDIA GPU"), "auto", "gpu"),
        (replace(LAPTOP, python=(3, 13)), "auto", "tpu"),
        (replace(LAPTOP, system="Darwin arm64", python=(3, 13)), "auto", "gpu"),
        (replace(LAPTOP, system="Linux aarch64"), "auto", "gpu"),
    ],
)
def test_what_is_installed_for(site: Site, hardware: str, kind: str) -> None:
    decision = decide(replace(site, versions=WITHOUT), hardware)
    assert decision.command and decision.kind == kind
    assert ("torch_xla==2.9.0" in decision.add) == (kind == "tpu")
    assert ("libtpu==0.0.21.1" in decision.add) == (kind == "tpu" and site.python == (3, 13))


@pytest.mark.parametrize(
    ("site", "hardware", "why", "way"),
    [
        (replace(COLAB, python=(3, 14)), "auto", "Python 3.14: the kit needs 3.11 to 3.13", "Runtime version"),
        (replace(COLAB, platform="Kaggle", python=(3, 10)), "auto", "Python 3.10: the kit needs 3.11", "Environment"),
        (replace(LAPTOP, python=(3, 14)), "auto", "Python 3.14: the kit needs 3.11 to 3.13", "uv venv --python 3.12"),
        (replace(LAPTOP, system="Darwin arm64"), "tpu", "torch_xla has wheels only for Linux x86_64", "hardware='gpu'"),
        (replace(LAPTOP, versions=WITHOUT, pip=False), "auto", "no pip, and there is no uv", "ensurepip"),
    ],
)
def test_where_no_wheel_fits_the_ways_out_are_named(site: Site, hardware: str, why: str, way: str) -> None:
    with pytest.raises(ValueError, match=f"^It cannot be installed here:\n  - [^-]*{why}") as told:
        decide(site, hardware)
    assert way in str(told.value).partition("Instead:")[2]


@pytest.mark.parametrize(
    ("source", "kit"),
    [("git", f"git+{ADDRESS}"), ("index", "tpu_kit"), ("tpu_kit==0.1.0", "tpu_kit==0.1.0"), ("~", str(Path.home()))],
)
def test_a_way_out_installs_for_a_tpu_from_where_the_kit_came_from(source: str, kit: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"-r {requirements('tpu')} {kit} && ")):
        decide(replace(LAPTOP, versions=WITHOUT, python=(3, 10)), source=source)


def test_the_pairs_are_shown() -> None:
    backends = [*(f"torch_xla {one.torch}" for one in PAIRINGS), "torch_tpu 0.2.0"]
    assert [row["backend for TPUs"] for row in pairings()] == backends
    assert pairings()[0]["libtpu"] == "0.0.21 or 0.0.21.1"


def test_versions_that_were_tested_are_installed() -> None:
    assert requirements("tpu").read_text() == (REPOSITORY / "requirements-tpu.txt").read_text()
    versions = {name: version for name, version in RIGHT.items() if name not in (*PAIR, "transformers")}
    site = replace(LAPTOP, versions=versions | {"torch": "2.13.0"})
    assert decide(site, "gpu").add == ("transformers==5.23.0",)
    newer = decide(replace(site, versions=site.versions | {"torch": "3.0", "transformers": "5.23.0"}), "gpu")
    assert newer.why == ("torch is 3.0, and must be <3,>=2.8",)


def test_a_version_that_was_not_tested_stays_and_is_named() -> None:
    """Colab's image may bring a newer version, which is not replaced."""
    newer = replace(COLAB, versions=RIGHT | {"transformers": "5.99.0"})
    assert decide(newer).command == ()
    assert str(decide(newer)).endswith("; transformers 5.99.0, tested with 5.15 to 5.24")
    without = {name: version for name, version in newer.versions.items() if name != "pyyaml"}
    assert "Unchanged: transformers 5.99.0, tested with" in str(decide(replace(newer, versions=without)))


@pytest.mark.parametrize(
    ("name", "version"), [("notes", "6.0-unknown"), ("-orch", "2.9.0"), ("my tool", "1.0"), ("tool", "1.0 (local)")]
)
def test_a_line_that_pip_would_refuse_is_no_constraint(name: str, version: str, tmp_path: Path) -> None:
    there = {name: version for name, version in RIGHT.items() if name != "peft"} | {"gcsfs": "2026.10.1", name: version}
    decision = decide(replace(COLAB, versions=there))
    assert not [line for line in decision.keep if line.startswith(f"{name}==")]
    assert {"gcsfs==2026.10.1", "datasets==5.2.0"} <= {*decision.keep}


@pytest.mark.parametrize(
    ("version", "fits"), [("5.15", True), ("5.15.0rc1", False), ("5.16.0.dev0", True), ("5.9", False)]
)
def test_versions_are_compared_as_pip_compares_them(version: str, fits: bool) -> None:
    decision = decide(replace(COLAB, versions=RIGHT | {"transformers": version}))
    assert (decision.command == ()) is fits


def machine(tmp_path: Path, **environ: str) -> Machine:
    return Machine(root=tmp_path, environ=environ)


def test_look(tmp_path: Path) -> None:
    assert look(machine(tmp_path)).platform == "computer without an accelerator"
    assert look(machine(tmp_path, COLAB_RELEASE_TAG="release-2026")).platform == "Colab"
    assert look(machine(tmp_path, KAGGLE_KERNEL_RUN_TYPE="Batch")).platform == "Kaggle"
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version")
    found = look(machine(tmp_path))
    assert (found.platform, found.accelerator) == ("GPU machine", "NVIDIA GPU")
    assert {"what": "accelerator", "found": "NVIDIA GPU"} in found.rows()
    (tmp_path / "proc/driver/nvidia/gpus/0000:00:05.0").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/gpus/0000:00:05.0/information").write_text("Model: \t\t NVIDIA L4\nIRQ: 30\n")
    assert {"what": "accelerator", "found": "NVIDIA L4"} in look(machine(tmp_path)).rows()
    for number in range(4):
        folder = tmp_path / f"sys/bus/pci/devices/0000:00:0{number}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1ae0\n")
        (folder / "device").write_text("0x0063\n")
    found = look(machine(tmp_path))
    assert (found.platform, found.accelerator) == ("TPU VM", "4 x v5e")
    assert found.versions["pytest"] and found.python == sys.version_info[:2]


def test_options_of_the_notebook() -> None:
    def given(cell: str) -> dict[str, Any]:
        return install.options({"In": ["", f"# Parameters: mine\n{cell}"], **eval(f"dict({cell})")})

    assert given("kit_source='git'") == {"kit_source": "git"}
    with pytest.raises(ConfigError, match="did you mean torch_index"):
        given("torch_inde='x'")
    with pytest.raises(ConfigError, match="hardware='cpu': choose auto, tpu, torch-tpu or gpu"):
        given("hardware='cpu'")


def test_a_failing_line_ends_with_what_it_said(capsys: pytest.CaptureFixture[str]) -> None:
    code = "print('Collecting torch'); print('OSError: No space left on device'); raise SystemExit(1)"
    with pytest.raises(ValueError, match=r"failed:\n") as caught:
        install.carry_out(Decision("tpu", ("a",), command=(sys.executable, "-c", code)))
    assert str(caught.value).endswith("Collecting torch\nOSError: No space left on device")
    assert "Collecting torch" in capsys.readouterr().out


def test_the_address_of_the_repository_stands_in_one_place() -> None:
    """Notebooks and README.md repeat it, because they are read without the kit; all copies are compared."""
    texts = [path.read_text() for path in (REPOSITORY / "notebooks").glob("*.ipynb")]
    texts += [(REPOSITORY / name).read_text() for name in ("README.md", "notebooks/README.md", "pyproject.toml")]
    for text in texts:
        found = {f"https://github.com/{name}" for name in re.findall(r"github(?:\.com)?/(tpu-kit/\w+)", text)}
        assert found == {ADDRESS}


def test_a_replaced_package_needs_a_new_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy

    install.restart()
    assert capsys.readouterr().out == "The kernel need not be restarted.\n"
    monkeypatch.setattr(numpy, "__version__", "1.0.0")
    install.restart()
    out = capsys.readouterr().out
    assert f"must be restarted: numpy 1.0.0 is loaded, {installed_version('numpy')} is installed" in out
    assert "Kernel > Restart" in out


def write_index(folder: Path, version: str, built: str) -> str:
    """An index as pip and uv read it, with one wheel of a package of torch's name; returns its address."""
    (folder / "torch").mkdir(parents=True)
    file, about = f"torch-{version}-py3-none-any.whl", f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / "torch" / file, "w") as wheel:
        wheel.writestr("torch.py", f"built = {built!r}")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    (folder / "torch" / "index.html").write_text(f'<a href="{quote(file)}">{file}</a>')
    return folder.as_uri()


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_another_index_is_where_torch_comes_from(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As https://download.pytorch.org/whl/cpu beside the default: the same version, there with the label +cpu."""
    uv = shutil.which("uv") if tool == "uv" else ""
    if uv is None:
        pytest.skip("needs uv: pip install uv")
    default, cpu = write_index(tmp_path / "a", "2.9.0", "cuda"), write_index(tmp_path / "b", "2.9.0+cpu", "cpu")
    there = {name: version for name, version in RIGHT.items() if name not in PAIR}
    for name, value in {"INDEX_URL": default, "TARGET": str(tmp_path / "got"), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_DEFAULT_INDEX", default)
    site = replace(LAPTOP, versions=there, uv=uv)
    decision = decide(site, "gpu", cpu)
    if uv:  # which has no variable for it
        decision = replace(decision, command=(*decision.command, "--target", str(tmp_path / "got")))
    install.carry_out(decision)
    assert (tmp_path / "got" / "torch.py").read_text() == "built = 'cpu'"


def test_it_needs_nothing_but_python(tmp_path: Path) -> None:
    """For any Python that a service may bring: the message about an unsupported version must run on it."""
    about = tmp_path / "tpu_kit-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(distribution("tpu_kit").read_text("METADATA") or "")
    code = f"""
import sys
sys.path.append({str(tmp_path)!r})
from tpu_kit.notebook import install
try:
    install.decide(install.look())
except ValueError as error:  # neither pip nor uv
    print(error)
install.show_table([{{"a": 1}}])
outside = {{name.split(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names)
print(sorted(outside), *(module.__file__ for name, module in sys.modules.items() if name.startswith("tpu_kit")))
"""
    said = run_python(["-S", "-c", code]).stdout.splitlines()[-1]
    assert said.startswith("['__main__', 'tpu_kit'] ")
    files = said.partition("] ")[2].split()
    assert len(files) > 5
    for file in files:
        ast.parse(Path(file).read_text(), file, feature_version=(3, 10))


# ------------------------------------------------------------------------------------------------- fresh environments


def steps(python: Path) -> list[dict[str, Any]]:
    """Runs the steps of a notebook's cells in another environment with the kit: decide, install, check, decide
    again."""
    code = """
import json
from dataclasses import asdict
from tpu_kit.notebook import install
first = install.decide(install.look())
install.carry_out(first)
checks = install.check(first)
second = install.decide(install.look())
print(json.dumps([asdict(first), {"checks": [asdict(row) for row in checks]}, asdict(second)]))
"""
    done = run_python(code, executable=python, timeout=3000, env={"PYTHONPATH": ""})
    return json.loads(done.stdout.splitlines()[-1])


def fresh(folder: Path) -> Path:
    run_python(["-m", "venv", str(folder)])
    return folder / "bin" / "python"


@pytest.mark.slow
def test_where_all_is_right_the_second_time_too() -> None:
    first, checked, second = steps(Path(sys.executable))
    assert first["command"] == second["command"] == []
    assert [row["status"] for row in checked["checks"]] == ["ok"]


def bare_kernel(python: Path, folder: Path) -> dict[str, str]:
    """Gives an environment a kernel, as a service's runtime has; returns the variables by which papermill finds
    `bare`."""
    run_python(["-m", "pip", "install", "--quiet", "ipykernel"], executable=python, timeout=1000)
    about = folder / "kernels" / "bare" / "kernel.json"
    about.parent.mkdir(parents=True)
    command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    about.write_text(json.dumps({"argv": command, "display_name": "bare", "language": "python"}))
    return {"JUPYTER_PATH": str(folder), "PYTHONPATH": ""}  # nor this repository


def run_notebook(folder: Path, environment: dict[str, str], source: Path, expect: int = 0) -> str:
    """The output of notebook 1 with a clone as the kit's source, with its error."""
    notebook = REPOSITORY / "notebooks" / "1-install.ipynb"
    arguments = ["-m", "papermill", str(notebook), "out.ipynb", "-k", "bare", "-p", "kit_source", str(source)]
    run_python([*arguments, "--no-progress-bar"], cwd=folder, env=environment, timeout=3000, expect=expect)
    cells = [cell for cell in nbformat.read(folder / "out.ipynb", as_version=4).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    return "\n".join(
        str(output.get("text") or output.get("evalue") or output.get("data", {}).get("text/plain"))
        for output in outputs
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the kit's files in git, because a build leaves files in its folder."""
    folder = tmp_path / "a clone"
    shutil.copytree(REPOSITORY / "tpu_kit", folder / "tpu_kit", ignore=shutil.ignore_patterns("__pycache__"))
    for path in [REPOSITORY / name for name in ("pyproject.toml", "README.md", "LICENSE")]:
        shutil.copy(path, folder)
    for path in REPOSITORY.glob("requirements-*.txt"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_from_nothing_in_a_bare_kernel_as_a_service_has_it(tmp_path: Path, clone: Path) -> None:
    """Papermill and the kit are elsewhere; the kernel has neither, and the first cells fetch the kit."""
    python = fresh(tmp_path / "env")
    environment = bare_kernel(python, tmp_path / "jupyter")
    said = run_notebook(tmp_path, environment, clone)
    assert "not installed: torch, torch_xla, libtpu" in said and "Added: " in said
    assert f"They work torch {PAIRINGS[0].torch}" in " ".join(said.split()) and "✓ They work" in said
    assert "The kernel need not be restarted." in said
    again = run_notebook(tmp_path, environment, clone)
    assert "Nothing to do: all " in again and "There was nothing to install." in again and "✓ They work" in again
    assert "pip install" not in again
    found = run_python(
        "import tpu_kit; print(tpu_kit.__file__)", executable=python, env={"PYTHONPATH": ""}, cwd=tmp_path
    )
    assert Path(found.stdout.strip()).is_relative_to(tmp_path / "env")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_kernel_whose_python_does_not_fit_is_told_the_ways_out(tmp_path: Path, clone: Path) -> None:
    """pip refuses the kit there by default, and the kit could then print no message."""
    works = "import sys, ensurepip, venv; sys.exit((3, 11) <= sys.version_info < (3, 14))"
    found = [path for name in ("python3.10", "python3.14") if (path := shutil.which(name))]
    fit = [path for path in found if not subprocess.run([path, "-c", works], capture_output=True).returncode]
    if not fit:
        pytest.skip("needs Python 3.10 or 3.14 with venv, which the kit does not support")
    run_python(["-m", "venv", str(tmp_path / "env")], executable=fit[0])
    environment = bare_kernel(tmp_path / "env" / "bin" / "python", tmp_path / "jupyter")
    said = run_notebook(tmp_path, environment, clone, expect=1)
    assert "It cannot be installed here:" in said and ": the kit needs 3.11 to 3.13" in said
    assert "uv venv --python 3.12" in said and f"requirements-tpu.txt '{clone}'" in said


@pytest.mark.slow
def test_from_a_torch_xla_that_does_not_pair(tmp_path: Path, clone: Path) -> None:
    python = fresh(tmp_path / "env")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "torch_xla==2.8.0", str(clone)]
    run_python(install, executable=python, timeout=1000)
    first, checked, second = steps(python)
    assert "torch_xla is 2.8.0, and must be 2.9.0" in first["why"]
    assert second["command"] == []
    assert [row["status"] for row in checked["checks"]] == ["ok"]


def test_a_pair_that_does_not_load_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_xla.py").write_text("raise ImportError('_XLAC.so: undefined symbol: _ZN5torch4lazy13MetricFn')")
    (tmp_path / "torch.py").write_text("__version__ = '2.9.1'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = install.check(Decision("tpu", ()))
    assert isinstance(check, Check) and check.status == "failure"
    assert check.found.startswith("torch 2.9.1 loaded, then ImportError: _XLAC.so: undefined symbol")


def test_a_torch_that_does_not_see_the_gpu_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(
        "__version__ = '2.9.0+cpu'\nones = lambda *_, device: Number()\n"
        "class Number:\n    __add__ = lambda *_: Number()\n    sum = lambda _: Number()\n    item = lambda _: 6\n"
        "class cuda:\n    is_available = lambda: False\n    get_device_name = lambda: 'NVIDIA L4'\n"
    )
    for name in ("transformers", "peft", "datasets", "yaml", "tpu_kit"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert install.check(Decision("gpu", ()))[0].found == (
        "all packages load together (torch 2.9.0+cpu), and compute on the CPU"
    )
    monkeypatch.setattr(Machine, "gpus", lambda _: ["NVIDIA L4"])
    (check,) = install.check(Decision("gpu", ()))
    assert check.status == "failure" and "compute on the CPU, not on the NVIDIA L4: torch is built" in check.found
    assert "pip uninstall -y torch" in check.fix
    (tmp_path / "torch.py").write_text((tmp_path / "torch.py").read_text().replace("False", "True"))
    (check,) = install.check(Decision("gpu", ()))
    assert (check.status, check.found) == (
        "ok",
        "all packages load together (torch 2.9.0+cpu), and compute on NVIDIA L4",
    )
