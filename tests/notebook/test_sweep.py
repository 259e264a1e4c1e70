"""Sweeps: what is refused before the first run, and papermill kernels that finish, fail, are stopped and killed."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support.child_processes import PYTHONPATH, REPOSITORY, child_environment, run_python
from tpu_kit.checkpointing import manager
from tpu_kit.config.loader import ConfigError
from tpu_kit.hardware.machine import Machine
from tpu_kit.notebook.sweep import Record, read_sweep, sweep
from tpu_kit.training.metrics import read_metrics

TRAIN = REPOSITORY / "notebooks" / "4-train-cot-sft.ipynb"
needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")

# A notebook that trains nothing, but notes its attempts and goes on as training does, from what it finds in its folder.
OWN = "# Parameters: mine\nrate = 0.1\nmode = 'good'\noutput_dir = None\nrun_name = ''"
WORK = """\
import json, pathlib, time
folder = pathlib.Path(output_dir)
attempts = int((folder / "attempts").read_text()) + 1 if (folder / "attempts").exists() else 1
(folder / "attempts").write_text(str(attempts))
print("at work on", rate)
while mode == "slow" and attempts < 3:
    time.sleep(0.05)
if mode == "bad":
    raise ValueError("no such rows\\nin <here>")
lines = [{"kind": "train", "step": s, "loss": 2.0, "tokens_per_second": t} for s, t in ((1, 1.0), (2, 90.0), (3, 70.0))]
lines.append({"kind": "eval", "step": 2, "loss": abs(rate - 0.3), "accuracy": None})
lines.append({"kind": "eval", "step": 3, "loss": 1 - abs(rate - 0.3), "accuracy": None})
(folder / "metrics.jsonl").write_text("\\n".join(map(json.dumps, lines)))
(folder / "eval.json").write_text(json.dumps({"tuned": {"accuracy": {"share": 0.5}}}))
"""


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    return write_notebook(tmp_path / "small.ipynb", OWN, WORK)


def write_notebook(path: Path, *cells: str) -> Path:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.cells[0].metadata.tags = ["parameters"]
    nbformat.write(made, path)
    return path


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def run(folder: Path, notebook: Path, file: str = "rates.yaml", expect: int = 0) -> str:
    return run_python(["-m", "tpu_kit", "sweep", str(notebook), file], cwd=folder, expect=expect, timeout=500).stdout


def start(folder: Path, notebook: Path, **environment: str | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tpu_kit", "sweep", str(notebook), "rates.yaml"]
    surroundings = {**child_environment(environment), "PYTHONPATH": PYTHONPATH}
    return subprocess.Popen(
        command, cwd=folder, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)


def read_table(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_that_fails_does_not_stop_the_others_and_finished_ones_are_skipped(
    tmp_path: Path, notebook: Path
) -> None:
    sweep_file = write(
        tmp_path / "rates.yaml",
        "grid: {rate: [0.5, 0.31]}\nruns: [{rate: 0.3, mode: bad}]\ndollars_per_hour: 3600",
    )
    printed = run(tmp_path, notebook, expect=1)
    folder = tmp_path / "runs" / "rates"
    rows = read_table(folder)
    assert [(row["rate"], row["status"]) for row in rows] == [
        ("0.31", "finished"),
        ("0.5", "finished"),
        ("0.3", "failed"),
    ]
    best, _, failed = rows
    assert float(best["eval_loss"]) == pytest.approx(0.01)
    assert best["eval_step"] == "2"  # of the weights that are kept; the last evaluations are the other way round
    assert (best["accuracy"], best["tokens_per_second"]) == ("0.5", "80.0")  # without the window that compiles
    assert float(best["dollars"]) == pytest.approx(float(best["hours"]) * 3600)
    assert failed["error"] == "cell [3], ValueError: no such rows in <here>"
    assert "3 of 3: rate=0.3, mode=bad" in printed and failed["error"] in printed
    page = (folder / "results.html").read_text()
    page_kind = "html" if Machine().version("nbconvert") else "ipynb"
    assert f'href="{best["folder"].replace("=", "%3D")}/notebook.{page_kind}"' in page
    assert "no such rows in &lt;here&gt;" in page
    # Not at the end: jupyter_client interrupts a kernel before it shuts it down, and the kernel may log that.
    assert "\nat work on 0.31\n" in (folder / best["folder"] / "log.txt").read_text()
    assert nbformat.read(folder / failed["folder"] / "notebook.ipynb", as_version=4).cells

    # Again: one value mended and one more; what is finished is not touched.
    write(sweep_file, "grid: {rate: [0.5, 0.31]}\nruns: [{rate: 0.3}]")
    printed = run(tmp_path, notebook)
    assert printed.count("finished before") == 2
    rows = read_table(folder)
    assert [row["rate"] for row in rows] == ["0.3", "0.31", "0.5"]
    assert rows[0]["dollars"] == ""  # no TPU here, whose price could be looked up
    assert [(folder / row["folder"] / "attempts").read_text() for row in rows] == ["1", "1", "1"]


def test_what_was_under_way_goes_on(tmp_path: Path, notebook: Path) -> None:
    write(tmp_path / "rates.yaml", "runs: [{rate: 0.1, mode: slow}, {rate: 0.2}]")
    folder = tmp_path / "runs" / "rates"
    process = start(tmp_path, notebook)
    wait_for(lambda: "1" in attempts(folder), process)
    refused = run_python(["-m", "tpu_kit", "sweep", str(notebook), "rates.yaml"], cwd=tmp_path, expect=2)
    assert f"another sweep is running there, PID {process.pid}; wait for it" in refused.stderr
    process.kill()
    process.communicate(timeout=60)
    (begun,) = folder.glob("rate=0.1,*")
    assert Record.read(begun).status == "under way"

    process = start(tmp_path, notebook)
    wait_for(lambda: "2" in attempts(folder), process)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "was under way; resumes" in printed
    assert "told to stop: the run saves and ends; a second signal ends it at once" in printed
    assert "under way after" in printed and "the same command continues" in printed
    assert not list(folder.glob("rate=0.2-*"))
    assert [row["status"] for row in read_table(folder)] == ["under way", "waiting"]

    run(tmp_path, notebook)
    assert attempts(folder) == ["1", "3"]
    assert [row["status"] for row in read_table(folder)] == ["finished", "finished"]


def attempts(folder: Path) -> list[str]:
    """How often each run was begun."""
    return sorted(path.read_text() for path in folder.glob("*/attempts"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("grid: {rat: [1]}", "rat: no such parameter of {notebook}; did you mean rate?"),
        ("grid: {zebra: [1]}", "zebra: no such parameter of {notebook}; it has rate, mode, output_dir, run_name"),
        ("grid: {rate: [0.5, fast]}", "rate: 'fast' is not of the type of 0.1; correct it"),
        ("grid: {rate: [1], mode: [3]}", "mode: 3 is not of the type of 'good'; correct it"),
        ("fixed: {run_name: mine}\ngrid: {rate: [1]}", "run_name: each run has its own; remove it"),
        ("grid: {rate: [1, 1]}", "'rate': 1}} is given twice; remove one of them"),
        ("grid: {rate: 1}", "grid: {{'rate': 1}} is not a mapping of names to lists"),
        ("fixed: {rate: 1}", "nothing to run; give grid:"),
        ("gird: {rate: [1]}", "gird: no such key; did you mean grid?"),
        ("fixed: {rate: 1}\ngrid: {rate: [1]}", "grid: rate is in fixed too; remove one of them"),
        ("runs: {rate: 1}", "runs: {{'rate': 1}} is not a list of mappings"),
        ("grid: {rate: [1]}\ndollars_per_hour: free", "dollars_per_hour: 'free' is not a price"),
        ("grid: {rate: [1]}\noutput_dir: gs://bucket/x", "notebooks and tables need a folder"),
        ("- rate: 1", "holds a list"),
        ("grid: [", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_told_before_the_first_run(tmp_path: Path, notebook: Path, text: str, problem: str) -> None:
    path = write(tmp_path / "rates.yaml", text)
    with pytest.raises(ConfigError) as caught:
        sweep(notebook, path)
    assert problem.format(notebook=notebook) in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_the_training_notebook_takes_every_parameter_of_a_run_and_no_other(tmp_path: Path) -> None:
    text = "fixed: {max_steps: 20, config_file: embedded-cot}\ngrid: {learning_rate: [1e-4, 1e-3], r: [4, 8]}"
    plan = read_sweep(TRAIN, write(tmp_path / "rates.yaml", text))
    assert [dict(trial.swept) for trial in plan.trials] == [
        {"learning_rate": rate, "r": r} for rate in (1e-4, 1e-3) for r in (4, 8)
    ]
    assert plan.trials[0].parameters["max_steps"] == 20
    assert plan.folder == Path("runs/rates")
    wrong = "fixed: {max_step: 2, confg_file: x}\ngrid: {learning_rate: [fast], batch_size: [0, 4]}"
    with pytest.raises(ConfigError) as caught:
        read_sweep(TRAIN, write(tmp_path / "rates.yaml", wrong))
    assert len(caught.value.problems) == 4, caught.value.problems  # each once, though every run has them
    told = str(caught.value)
    assert "max_step: no such parameter (given 2); did you mean optim.max_steps?" in told
    assert f"confg_file: no such parameter of {TRAIN}; did you mean config_file?" in told
    assert "learning_rate: 'fast' is not a number" in told
    assert "batch_size: 0 is out of range" in told


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ([], "not a notebook"),
        (["x = 1", "y = 2"], "takes no output_dir, so its runs would overwrite each other"),
        (["x = [", "y = 2"], "its parameters cell may hold name = literal lines alone"),
    ],
)
def test_notebooks_that_cannot_be_swept(tmp_path: Path, cells: list[str], problem: str) -> None:
    path = tmp_path / "small.ipynb"
    if cells:
        write_notebook(path, *cells)
    else:
        path.write_text("{}")
    with pytest.raises(ConfigError, match=problem):
        read_sweep(path, write(tmp_path / "rates.yaml", "grid: {x: [1]}"))


def test_arguments_and_missing_packages(
    tmp_path: Path, notebook: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml: no such file; give the notebook and the sweep's YAML file"):
        sweep(notebook, Path("nowhere.yaml"))
    path = write(tmp_path / "rates.yaml", f"grid: {{rate: [1]}}\noutput_dir: {tmp_path}/small.ipynb/x")
    assert sweep(notebook, path) == 1
    assert "Not a directory; make room there, or set output_dir" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "papermill", None)
    with pytest.raises(ConfigError, match="is not installed: pip install papermill ipykernel"):
        sweep(notebook, path)


@pytest.mark.slow
@needs_xla
def test_two_trainings_of_the_notebook_with_a_kill_between(tmp_path: Path) -> None:
    write(
        tmp_path / "rates.yaml",
        "fixed: {num_replicas: 2, max_steps: 12, warmup_steps: 1, max_length: 96, batch_size: 2, eval_rows: 8,\n"
        "        generate_rows: 4, logging_steps: 2, save_steps: 4, eval_steps: 6}\n"
        "grid: {learning_rate: [1e-4, 5e-3]}",
    )
    process = start(tmp_path, TRAIN, PJRT_DEVICE="CPU")
    folder = tmp_path / "runs" / "rates"
    plan_folder = [folder / trial.name for trial in read_sweep(TRAIN, tmp_path / "rates.yaml").trials]
    wait_for(lambda: manager.scan(plan_folder[1] / "checkpoints")[0], process, 500)
    process.kill()
    process.communicate()
    assert [Record.read(one).status for one in plan_folder] == ["finished", "under way"]
    before = (plan_folder[0] / "run.json").read_text()

    printed = run(tmp_path, TRAIN)
    assert "finished before" in printed and "was under way; resumes" in printed
    assert "from step 4," in (plan_folder[1] / "log.txt").read_text()
    assert (plan_folder[0] / "run.json").read_text() == before
    best, other = read_table(folder)
    assert (best["learning_rate"], other["learning_rate"]) == ("0.005", "0.0001")
    assert float(best["eval_loss"]) < float(other["eval_loss"])
    assert float(best["tokens_per_second"]) > 0 and 0 <= float(best["accuracy"]) <= 1
    steps = [one["step"] for one in read_metrics(plan_folder[1]) if one["kind"] == "train"]
    assert steps == [2, 4, 6, 8, 10, 12]
