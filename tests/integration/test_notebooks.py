"""Runs the notebooks in fresh kernels, like a batch job: in order, separately, and with an interruption."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support.child_processes import PYTHONPATH, REPOSITORY, child_environment, run_python
from tpu_kit.assets.pictures import task
from tpu_kit.machine.checks import Machine
from tpu_kit.training.checkpoint import manager
from tpu_kit.training.metrics import read_metrics

pytestmark = pytest.mark.timeout(1800)  # all seven take two minutes on two idle cores; a busy machine must not fail
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
STEPS = 6
FEW = [f"max_steps={STEPS}", "logging_steps=1", "warmup_steps=1", "eval_rows=4", "generate_rows=2",
       "generate_tokens=8", "kit_source=git", "wandb=offline", "out=done"]  # fmt: skip
# For notebooks 5 to 7; the teacher is the export of notebook 5.
FEW_LATER = ["thoughts_per_step=2", "teacher=runs/notebook-4/export/merged", "start_steps=6", "prompts_per_update=2",
             "num_generations=4"]  # fmt: skip
# HF_TOKEN is in all three places, WANDB_API_KEY in two; a notebook must take the first.
CANARIES = {
    "environment": {"HF_TOKEN": "canary-hf-environment-5b1f"},
    "Colab": {"HF_TOKEN": "canary-hf-colab-77a0", "WANDB_API_KEY": "canary-wandb-colab-0c5e" + "0" * 17},
    "Kaggle": {"HF_TOKEN": "canary-hf-kaggle-9d42", "WANDB_API_KEY": "canary-wandb-kaggle-e1b8" + "0" * 16},
}
COLAB = "def get(name):\n    return {}[name]\n"
KAGGLE = "class UserSecretsClient:\n    def get_secret(self, name):\n        return {}[name]\n"


def write_services(folder: Path) -> None:
    """Writes stand-ins for the services' modules that give notebooks their secrets."""
    (folder / "google" / "colab").mkdir(parents=True)
    (folder / "google" / "colab" / "__init__.py").write_text("")
    (folder / "google" / "colab" / "userdata.py").write_text(COLAB.format(CANARIES["Colab"]))
    (folder / "kaggle_secrets.py").write_text(KAGGLE.format(CANARIES["Kaggle"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the notebooks ran, with one replica, few updates and rows, and a tracker that writes files.

    Notebook 2 checks only the CPU, as tests/notebook checks XLA. Notebook 4 trains on XLA. The later notebooks take
    twice as long on XLA and run there in `test_all_run_on_xla`.
    """
    if Machine().version("torch_xla") is None:
        pytest.skip("torch_xla is not installed")
    folder = tmp_path_factory.mktemp("all") / "work"
    said = run_notebooks(folder, "CPU", NOTEBOOKS[:4], *FEW, "num_replicas=1", "device_type=cpu")
    said += run_notebooks(folder, None, NOTEBOOKS[4:], *FEW, *FEW_LATER, "num_replicas=1")
    (folder / "said.txt").write_text(said)
    return folder


def run_notebooks(folder: Path, pjrt_device: str | None, notebooks: list[Path], *arguments: str) -> str:
    """Runs notebooks as `make notebooks` does; returns the command's output."""
    services = folder.with_name("services")
    if not services.exists():
        write_services(services)
    folder.mkdir(exist_ok=True)
    environment = {"PYTHONPATH": f"{PYTHONPATH}{os.pathsep}{services}", "HOME": str(folder / "home")}
    environment |= {"PJRT_DEVICE": pjrt_device, "CUDA_VISIBLE_DEVICES": "", **CANARIES["environment"]}
    command = ["-m", "tpu_kit", "notebooks", *map(str, notebooks), *arguments]
    done = run_python(command, env=environment, cwd=folder, timeout=1700)
    return done.stdout + done.stderr


def outputs_of(folder: Path, name: str) -> list[Any]:
    (path,) = (folder / "done").glob(f"{name}*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    return [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]


def shown(outputs: list[Any], kind: str = "text/plain") -> str:
    return "\n".join(
        output.get("text", "") if output.output_type == "stream" else output.get("data", {}).get(kind, "")
        for output in outputs
        if kind == "text/plain" or output.output_type != "stream"
    )


def test_all_run_in_order_and_leave_html(folder: Path) -> None:
    said = (folder / "said.txt").read_text()
    assert re.findall(r"\[\d/\d\] (\S+)", said) == [path.name for path in NOTEBOOKS]
    assert re.search(r"\d/\d+ kit_source = ", said), said
    for path in NOTEBOOKS:
        html = (folder / "done" / path.name).with_suffix(".html").read_text()
        assert "widget-view+json" not in html and "HBox(" not in html, "a widget is dead without its kernel"
        assert not [output for output in outputs_of(folder, path.stem) if output.output_type == "error"]


def test_install_finds_all_right_and_does_nothing(folder: Path) -> None:
    text = shown(outputs_of(folder, "1-"))
    assert "Nothing to do: all " in text and "There was nothing to install." in text
    assert "They work" in text and "The kernel need not be restarted." in text


def test_verify_ends_in_ready(folder: Path) -> None:
    text = shown(outputs_of(folder, "2-"))
    for row in ("Host memory", "Step, unrolled", "Small run"):
        assert f"✓ {row} " in text, row
    assert "went on from step 4 to 8" in text and "Ready to rehearse on this CPU; no TPU attached." in text


def test_plan_shows_what_fits_and_what_to_do(folder: Path) -> None:
    outputs = outputs_of(folder, "3-")
    text = shown(outputs)
    assert re.search(r"^v5litepod-1 +1 +yes +[\d.]+ of 15\.75 ", text, re.MULTILINE)
    assert re.search(r"settings fit v(5litepod|6e)-", text) and "The cheapest that fits: " in text
    assert "name = 'Qwen/Qwen2.5-0.5B-Instruct'\n" in text and "\nglobal_batch_size = 64\n" in text
    (bars,) = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert base64.b64decode(bars).startswith(b"\x89PNG")


def test_training_shows_what_it_did(folder: Path) -> None:
    outputs = outputs_of(folder, "4-")
    text, html = shown(outputs), shown(outputs, "text/html")
    assert f"{STEPS} of {STEPS} updates" in text and "tokens/s/chip" in text
    assert "compiled programs 3" in text, "a set-up, the evaluation, the update"
    assert f"newest checkpoint runs/notebook-4/checkpoints/step-{STEPS:08d}" in text
    assert re.search(r"<mark [^>]*>&lt;think&gt;", html)
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 2 and all(base64.b64decode(one).startswith(b"\x89PNG") for one in pictures)
    assert "step/s" not in text, "the notebook would keep every state of the progress bar"
    assert "Warning" not in text, "every warning here would be the kit's"
    streams = "".join(output.text for output in outputs if output.output_type == "stream")
    lines = Counter(line for line in streams.splitlines() if re.match(r"\w", line) and "wandb" not in line)
    assert not [line for line, count in lines.items() if count > 1], "told twice"
    assert json.loads((folder / "runs" / "notebook-4" / "eval.json").read_text())["tuned"]["accuracy"]["total"] == 2


def test_inference_compares_searches_and_exports(folder: Path) -> None:
    outputs = outputs_of(folder, "5-")
    text, html = shown(outputs), shown(outputs, "text/html")
    assert re.search(r"^tuned +\d+ of 2 +\d+% to \d+%", text, re.MULTILINE)
    assert "answer: " in text
    assert "<pre>Leo has 7 bags" in html, "the tree is drawn"
    assert "checked, " in text and (folder / "runs/notebook-4/export/merged/model.safetensors").is_file()


def test_a_student_learns_from_a_teacher(folder: Path) -> None:
    text = shown(outputs_of(folder, "6-"))
    assert f"{STEPS} of {STEPS} updates" in text
    records = [one for one in read_metrics(folder / "runs" / "notebook-6") if one["kind"] == "train"]
    assert records[-1]["distill_logits"] < records[0]["distill_logits"]
    student = json.loads((folder / "runs/notebook-6/adapter/config.json").read_text())
    assert student["num_hidden_layers"] == 2


def test_a_model_learns_from_rewards(folder: Path) -> None:
    outputs = outputs_of(folder, "7-")
    text = shown(outputs)
    assert f"{STEPS} of {STEPS} updates" in text and "groups of equal rewards" in text
    assert re.search(r"^step 6: ", text, re.MULTILINE) and "problems gained" in text
    assert "expected: " in text and "rollout          2 prompts x 4 completions of up to 80 tokens; 6 updates" in text


def test_a_model_learns_from_preferences(folder: Path) -> None:
    outputs = outputs_of(folder, "8-")
    text, html = shown(outputs), shown(outputs, "text/html")
    assert f"{STEPS} of {STEPS} updates" in text and "fewer than as two documents" in text
    assert "--- chosen:" in text and "--- rejected:" in text
    assert "reference        " in text and "held-out pairs with the larger reward for the chosen reply: " in text
    assert re.search(r"^rejected, reward [+-]\d", text, re.MULTILINE) and "<b>chosen, reward " in html
    assert "problems gained" in text


def test_questions_about_pictures_are_answered(folder: Path) -> None:
    outputs = outputs_of(folder, "9-")
    text = shown(outputs)
    assert f"{STEPS} of {STEPS} updates" in text
    for which in ("base +", "tuned +", "tuned, black pictures +"):
        assert re.search(rf"^{which}\d of 2 ", text, re.MULTILINE), which
    assert "data:image/png;base64," in shown(outputs, "text/html"), "the example is shown with its picture"


@pytest.mark.slow
def test_inference_takes_a_run_on_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    (ask,), (train,) = ([path for path in NOTEBOOKS if path.name.startswith(number)] for number in ("5-", "9-"))
    run_notebooks(folder, "CPU", [train], *FEW, "num_replicas=1", "device_type=cpu")
    task(0).image.save(folder / "photo.png")
    few = ["generate_rows=2", "num_replicas=1", "kit_source=git", "out=done"]
    run_notebooks(folder, "CPU", [ask], *few, "run_name=notebook-9", "picture=photo.png", "question=How many shapes?")
    text = shown(outputs_of(folder, "5-"))
    assert "A search asks about text alone." in text and "checked, " in text


@pytest.mark.slow
def test_all_run_on_xla(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    run_notebooks(folder, "CPU", NOTEBOOKS, *FEW, *FEW_LATER, "num_replicas=2")
    for name, programs in (("4-", 3), ("6-", 3), ("7-", 6)):
        assert f"compiled programs {programs}" in shown(outputs_of(folder, name)), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["4-train-cot-sft", "6-distill"])
def test_as_shipped_the_tuned_model_answers_better(tmp_path: Path, name: str) -> None:
    """Only notebook 6 makes its own teacher and student."""
    path = REPOSITORY / "notebooks" / f"{name}.ipynb"
    arguments = ["num_replicas=2", "generate_rows=40", "out=done"]
    run_python(["-m", "tpu_kit", "notebooks", str(path), *arguments], cwd=tmp_path, timeout=1700)
    text = shown(outputs_of(tmp_path, name[:2]))
    assert "80 of 80 updates" in text
    before, after = (re.search(rf"^{which} +(\d+) of 40 ", text, re.MULTILINE) for which in ("base", "tuned"))
    assert before and after and int(after[1]) > int(before[1])


def test_no_secret_is_written_anywhere(folder: Path) -> None:
    text = shown(outputs_of(folder, "4-"))
    assert re.search(r"^HF_TOKEN +environment$", text, re.MULTILINE)
    assert re.search(r"^WANDB_API_KEY +Colab secrets$", text, re.MULTILINE)
    assert list((folder / "runs" / "notebook-4" / "wandb").rglob("*.wandb")), "W&B wrote nothing, so nothing is shown"
    canaries = [value.encode() for place in CANARIES.values() for value in place.values()]
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [one for one in canaries if one in content], path


# ------------------------------------------------------------------------------------------------------- interruption

TRAIN = REPOSITORY / "notebooks" / "4-train-cot-sft.ipynb"
SMALL: dict[str, Any] = {"device_type": "cpu", "max_steps": 8, "generate_rows": 2, "eval_rows": 4, "max_length": 128,
                         "logging_steps": 1, "save_steps": 100, "batch_size": 2, "warmup_steps": 1}  # fmt: skip


def start(folder: Path, **changes: Any) -> subprocess.Popen[str]:
    """Starts papermill on notebook 4, in a given folder."""
    given = [part for name, value in {**SMALL, **changes}.items() for part in ("-p", name, str(value))]
    command = [sys.executable, "-m", "papermill", str(TRAIN), "out.ipynb", "--no-progress-bar", *given]
    environment = {**child_environment({"PJRT_DEVICE": None}), "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def text_of(folder: Path) -> str:
    """Returns all text that the executed notebook shows."""
    cells = nbformat.read(folder / "out.ipynb", as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(str(output.get("text", output.get("data", {}).get("text/plain", ""))) for output in outputs)


def kernel_of(run: subprocess.Popen[str]) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_child = int((path / "stat").read_text().rpartition(")")[2].split()[1]) == run.pid
            if is_child and "ipykernel_launcher" in (path / "cmdline").read_text():
                return int(path.name)
        except (OSError, IndexError):
            continue
    raise AssertionError("papermill has no kernel")


@pytest.mark.slow
def test_a_kernel_that_is_told_to_stop_saves_and_the_notebook_goes_on(tmp_path: Path) -> None:
    run = start(tmp_path, max_steps=5000)
    folder, deadline = tmp_path / "runs" / "notebook-4", time.monotonic() + 240
    while not [record for record in read_metrics(folder) if record["step"] >= 3]:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()[0]
        time.sleep(0.05)
    os.kill(kernel_of(run), signal.SIGTERM)
    out, _ = run.communicate(timeout=240)
    assert run.returncode == 0, out  # Kaggle keeps a version of the notebook, with its checkpoint
    shown = text_of(tmp_path)
    assert shown.rstrip().endswith("preempted (SIGTERM received): nothing to check; run the training cell again")
    assert re.search(r"^HF_TOKEN +not found\nWANDB_API_KEY +not found$", shown, re.MULTILINE)
    stopped = re.search(r"preempted at step (\d+) of 5000 \(SIGTERM received\)", shown)
    assert stopped and "run this again: the same cell" in shown
    assert manager.list_checkpoints(folder / "checkpoints", verify=True)[0][-1].step == int(stopped[1])

    # It continues from there, and ends after the two updates that are still asked for.
    again = start(tmp_path, max_steps=int(stopped[1]) + 2)
    out, _ = again.communicate(timeout=400)
    assert again.returncode == 0, out
    shown = text_of(tmp_path)
    assert "nothing to check" not in shown and "adapter_model.safetensors" in shown
    assert f"from step {stopped[1]}," in shown and f"finished at step {int(stopped[1]) + 2}" in shown


@pytest.mark.parametrize("told", ["SIGTERM", pytest.param("budget", marks=pytest.mark.slow)])
def test_a_batch_job_that_was_preempted_says_so_and_goes_no_further(tmp_path: Path, told: str) -> None:
    """SIGTERM to the job, whose kernel is another process, or a time budget."""
    given = {**SMALL, "max_steps": 5000, "out": "done"} | ({"budget_minutes": 0.05} if told == "budget" else {})
    command = [sys.executable, "-m", "tpu_kit", "notebooks", str(TRAIN), str(NOTEBOOKS[-1])]
    environment = {**child_environment({"PJRT_DEVICE": None}), "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        [*command, *(f"{name}={value}" for name, value in given.items())],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    folder, deadline = tmp_path / "runs" / "notebook-4", time.monotonic() + 240
    while told == "SIGTERM" and not [record for record in read_metrics(folder) if record["step"] >= 3]:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()[0]
        time.sleep(0.05)
    if told == "SIGTERM":
        for _ in range(2):  # like `timeout`: to its child, and to the child's process group
            run.send_signal(signal.SIGTERM)
            time.sleep(0.2)  # otherwise the system may deliver only one
    out, _ = run.communicate(timeout=240)
    assert run.returncode == 75, out
    reason = "SIGINT received" if told == "SIGTERM" else "the time budget of 0.05 min is used up"
    assert out.endswith(f"4-train-cot-sft.ipynb was preempted ({reason}); to resume, run this again\n")
    assert "[1/2]" in out and "[2/2]" not in out
    (checkpoint,) = manager.list_checkpoints(folder / "checkpoints", verify=True)[0]
    assert checkpoint.step >= (3 if told == "SIGTERM" else 0)
