"""The functions that notebooks call, in plain Python and in real kernels."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
from PIL import Image

from tests.support.child_processes import PYTHONPATH, REPOSITORY, run_python
from tests.support.kernels import run_cell
from tpu_kit.config.loader import ConfigError, TrainConfig, load_config
from tpu_kit.data.mixing import SourceCounts
from tpu_kit.distributed.preemption import RESULT_TYPE
from tpu_kit.machine.checks import Check, verdict
from tpu_kit.notebook import cells as cells_module
from tpu_kit.notebook.displays import runs as displays
from tpu_kit.notebook.kernel import check_names

OWN = "# Parameters: change them here\nmax_steps = 5\nlearning_rate = 1e-4"
CONFIG = "from tpu_kit.notebook import cells as notebook\nconfig = notebook.config(globals())\nprint(config.optim)"


def cells_ran(*cells: str) -> dict[str, Any]:
    """The namespace of a kernel that ran these cells."""
    namespace: dict[str, Any] = {"In": ["", *cells]}
    for cell in cells:
        exec(cell, namespace)
    return namespace


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["# Parameters: mine\na = 1\nb: int = 2"], {"a": 1, "b": 2}),
        (["\n#@title Parameters {run: 'auto'}\na = 1  #@param"], {"a": 1}),
        (["import os\nloose = 3", "# Parameters: mine\na = 1", "later = 2"], {"a": 1}),
        (["# Parameters: mine\na = 1", "# Parameters\na = 2\nmisspelt = 3\n"], {"a": 2, "misspelt": 3}),
        # Papermill's cell no longer counts if the notebook's own cell ran after it; older cells of either do not count.
        (["# Parameters: mine\na = 1", "# Parameters\na = 2\nmisspelt = 3", "# Parameters: mine\na = 4"], {"a": 4}),
        (["# Parameters: mine\nwrong = 1", "# Parameters: mine\nright = 2"], {"right": 2}),
        (["# Parameters: mine\na = 1", "# Parameters\nwrong = 2", "# Parameters\na = 3"], {"a": 3}),
        (["# Parameters\na = 1"], {"a": 1}),
        # A value set by hand after that is kept.
        (["# Parameters: mine\na = 1", "a = 2"], {"a": 2}),
        (["# Parameters: mine\na = 1\nb = 2", "del b"], {"a": 1}),
        (["# Parameters: mine\na, (b, *c) = 1, (2, 3, 4)\nd = e = 5"], {"a": 1, "b": 2, "c": [3, 4], "d": 5, "e": 5}),
        (["# Parameters: mine\nif True:\n    a = 1\nelse:\n    b = 2"], {"a": 1}),
        (["# Parameters: mine\ntry:\n    a = 1\nfinally:\n    a += 1\n(b := 3)"], {"a": 2, "b": 3}),
        (["# Parameters: mine\nimport os\na = [i for i in range(3)]\ndef f():\n    c = 1"], {"a": [0, 1, 2]}),
    ],
)
def test_parameters(cells: list[str], expected: dict[str, Any]) -> None:
    assert cells_module.parameters(cells_ran(*cells)) == expected


def test_parameters_of_a_script() -> None:
    assert cells_module.parameters({"a": 1, "_b": 2, "module": sys, "c": [1]}) == {"a": 1, "c": [1]}


def test_progress_bars_are_text_where_ipywidgets_is_installed(tmp_path: Path) -> None:
    """Replaces `ipywidgets` by a module whose bar cannot be made."""
    (tmp_path / "ipywidgets.py").write_text("FloatProgress = HBox = HTML = object\n")
    code = "import ipykernel.zmqshell, tqdm.auto, tpu_kit.notebook.cells; from tqdm.auto import tqdm; "
    code += "bar = tqdm(range(3), 'Loading', delay=0, mininterval=0); assert sum(bar) == 3; bar.reset(); bar.close()"
    done = run_python(["-W", "ignore", "-c", code], env={"PYTHONPATH": f"{PYTHONPATH}{os.pathsep}{tmp_path}"})
    assert "Loading: 100%|" in done.stderr


def test_no_parameters_cell() -> None:
    with pytest.raises(ConfigError, match="no parameters cell has run in this kernel"):
        cells_module.parameters({"In": ["", "a = 1"]})
    with pytest.raises(ConfigError, match="not valid Python"):
        cells_module.parameters({"In": ["", "# Parameters: mine\na = = 1"]})


@pytest.mark.parametrize(
    "cell",
    ["globals().update(max_steps=7)", "globals()['max_steps'] = 7", "if True:\n    exec('max_steps = 7')",
     "from string import *", "locals().update({'max_steps': 7})"],
)  # fmt: skip
def test_a_parameters_cell_whose_names_cannot_be_read_is_refused(cell: str) -> None:
    with pytest.raises(ConfigError, match=r"may set any name: write name = value instead"):
        cells_module.config(cells_ran(f"# Parameters: mine\n{cell}"))


def test_config_of_parameters() -> None:
    namespace = cells_ran("# Parameters: mine\nmax_steps = 5\nquestions = 3")
    config = cells_module.config(namespace, also=["questions"])
    assert config.optim.max_steps == 5
    assert config.sources["optim.max_steps"] == "notebook parameter"
    assert (config.output_dir, config.sources["output_dir"]) == ("runs/default", "this machine's disk")
    with pytest.raises(ConfigError, match="questions"):
        cells_module.config(namespace)
    with pytest.raises(ConfigError) as caught:
        cells_module.config(cells_ran("# Parameters: mine\nquestion = 3\nmax_step = 1"), also=["questions"])
    assert caught.value.problems[0].startswith("question: no such parameter")
    assert "did you mean optim.max_steps" in caught.value.problems[1]


def test_secrets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    colab: Any = types.ModuleType("google.colab.userdata")
    colab.get = {"IN_COLAB": "value-colab", "IN_ENV": "not this one"}.__getitem__
    kaggle: Any = types.ModuleType("kaggle_secrets")
    stored = {"IN_KAGGLE": "value-kaggle", "IN_COLAB": "not this one"}
    kaggle.UserSecretsClient = lambda: types.SimpleNamespace(get_secret=stored.__getitem__)
    monkeypatch.setitem(sys.modules, "google.colab.userdata", colab)
    monkeypatch.setitem(sys.modules, "kaggle_secrets", kaggle)
    monkeypatch.setattr(cells_module.os, "environ", {"IN_ENV": "value-env"})

    found = cells_module.secrets("IN_ENV", "IN_COLAB", "IN_KAGGLE", "NOWHERE")
    assert found == {
        "IN_ENV": "environment",
        "IN_COLAB": "Colab secrets",
        "IN_KAGGLE": "Kaggle secrets",
        "NOWHERE": "not found",
    }
    expected = {"IN_ENV": "value-env", "IN_COLAB": "value-colab", "IN_KAGGLE": "value-kaggle"}
    assert cells_module.os.environ == expected
    assert "value-" not in repr(found) + "".join(capsys.readouterr())


def test_displays_are_text_outside_ipython(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = '{"kind": "start", "step": 0, "loss": 2.5}\n'
    (tmp_path / "metrics.jsonl").write_text(start + METRICS)
    cells_module.show_example([("What is <b>?", False), ("42", True)])
    cells_module.show_table([{"question": "1+1", "share": 0.123456789}, {"question": "2\n+2", "share": None}])
    cells_module.show_lengths(types.SimpleNamespace(lengths=(10, 20, 30), fill=0.9, sources=()), max_length=25)
    with cells_module.live(tmp_path):
        pass
    cells_module.show_config(TrainConfig(), all_settings=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "What is <b>?[[42]]"
    assert "0.12346" in lines[2]
    packed = "rows 90% full, 73% with one example per row"  # the longest is cut
    assert f"3 examples, longest 30 tokens, 1 over 25; {packed}" in lines
    assert "train loss 2.0000 -> 1.0000 at step 3; eval loss 2.5000 -> 1.5000 at step 3" in lines
    assert any(re.fullmatch(r"optim\.batch_size +4 +default", line) for line in lines)


def test_example_shows_its_pictures_and_counts_their_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    pictures = [Image.new("RGB", (640, 480)), Image.new("RGB", (3, 2))]
    cells_module.show_example([("<|image|>" * 70 + "What?", False), ("red", True)], pictures)
    assert capsys.readouterr().out == "[640 x 480 pixels] [3 x 2 pixels] <|image|> x 70 What?[[red]]\n"


def test_answers_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tpu_kit.generation.evaluation.accuracy import Accuracy
    from tpu_kit.generation.evaluation.comparison import Evaluation, Sample, compare

    def evaluation(*correct: bool) -> Evaluation:
        samples = tuple(Sample(f"question {i}", "4", f"<think>\n{i}", right) for i, right in enumerate(correct))
        return Evaluation(Accuracy.of(sum(correct), len(correct)), 0.5, 7.0, 0.0, 64, samples)

    both = compare(evaluation(True, False, False), evaluation(True, False, True))
    (tmp_path / "eval.json").write_text(json.dumps(both.to_dict()))
    cells_module.show_answers(tmp_path, rows=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["base", "1", "of", "3", "6%", "to", "79%", "50%", "7"]
    assert lines[2].startswith("tuned  2 of 3")
    assert re.fullmatch(r"question 2  4 +<think> / 2 / \(wrong\) +<think> / 2 / \(correct\)", lines[4])
    assert lines[5].startswith("question 0")
    assert len(lines) == 6
    (tmp_path / "eval.json").write_text('{"base":')
    with pytest.raises(ValueError, match=r"eval.json is damaged \(.*delete it, or write it again with evaluate"):
        cells_module.show_answers(tmp_path)


def test_a_mix_is_shown_by_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [SourceCounts("a", "cot", 9, 9, 1.0, 60, 30), SourceCounts("b", "text", 9, 9, 1.0, 40, 10)]
    report: Any = types.SimpleNamespace(lengths=(10, 20, 30), fill=0.9, sources=sources)
    cells_module.show_lengths(report, max_length=25)
    assert "\nof the tokens with loss a 75%, b 25%" in capsys.readouterr().out
    assert len(cells_module._lengths(report, 25, "title").axes) == 2
    records = [{"kind": "eval", "step": step, "loss": 3.0 - step, "loss/a": 3.0 / step} for step in (1, 3)]
    evaluations = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(evaluations + METRICS)
    assert "eval loss/a 3.0000 -> 1.0000" in displays._curves(tmp_path)["text/plain"]


def test_nothing_to_show_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells_module.show(displays._curves(tmp_path))
    cells_module.show_table([])
    cells_module.show_answers(tmp_path)
    printed = capsys.readouterr().out
    assert "no metrics yet" in printed
    assert "if generate_rows is not 0" in printed
    assert "image/png" not in displays._curves(tmp_path)  # no axes without a point
    (tmp_path / "metrics.jsonl").write_text(METRICS.replace('"mfu": 0.25', '"mfu": null'))
    assert "MFU" not in displays._progress(tmp_path, 0.0)["text/plain"]  # a CPU has no known peak
    none = METRICS.replace('"tokens_per_second_per_chip": 6.5', '"tokens_per_second_per_chip": 0.0')
    (tmp_path / "metrics.jsonl").write_text(none.replace('"compiles": 3', '"compiles": 0'))
    shown = displays._progress(tmp_path, 0.0)["text/plain"]
    assert "tokens/s/chip" not in shown and "compiled programs" not in shown


def test_a_run_is_checked_by_its_loss_and_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tpu_kit.recipes.result import TrainResult

    config = TrainConfig(output_dir=str(tmp_path))
    ended = TrainResult("finished", "", 3, 6, {}, str(tmp_path / "adapter"), None, str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    with pytest.raises(ValueError, match=r"adapter has no adapter_model.safetensors: run the training cell again"):
        cells_module.check_run(config, ended)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").touch()
    cells_module.check_run(config, ended)
    assert capsys.readouterr().out.startswith("finished: 3 logs, ")
    (tmp_path / "metrics.jsonl").write_text(METRICS.replace('"loss": 1.0', '"loss": 2.5'))
    with pytest.raises(ValueError, match=r"the training loss did not fall: 2.0 in the first log, 2.5 in the last"):
        cells_module.check_run(config, ended)
    preempted = replace(ended, status="preempted", reason="SIGTERM received", adapter_dir="")
    cells_module.check_run(config, preempted)
    assert capsys.readouterr().out == "preempted (SIGTERM received): nothing to check; run the training cell again\n"
    kept = preempted._repr_mimebundle_()
    assert kept["text/plain"] == str(preempted)
    assert kept[RESULT_TYPE] == {
        "status": "preempted", "ended": "preempted", "reason": "SIGTERM received", "again": "run this again",
    }  # fmt: skip
    stopped = replace(preempted, reason="SIGINT received")
    cells_module.check_run(config, stopped)
    assert capsys.readouterr().out == "stopped (SIGINT received): nothing to check; run the training cell again\n"
    assert str(stopped).startswith("stopped at step 3 of 6 (SIGINT received)")
    with pytest.raises(ValueError, match="the held-out loss did not fall"):
        (tmp_path / "metrics.jsonl").write_text(METRICS)
        cells_module.check_run(config, replace(ended, warning="the held-out loss did not fall from 1 to 2"))


METRICS = """\
{"kind": "train", "step": 1, "loss": 2.0, "tokens_per_second": 5.0}
{"kind": "train", "step": 2, "loss": null, "tokens_per_second": 6.0}
{"kind": "train", "step": 3, "loss": 1.0, "tokens_per_second": 6.5, "tokens_per_second_per_chip": 6.5, \
"total_steps": 6, "eta_seconds": 61.2, "compiles": 3, "mfu": 0.25, "resumed_from": 2}
{"kind": "eval", "step": 3, "loss": 1.5}
{"kind": "tra"""


def write_notebook(path: Path, *cells: str) -> Path:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.cells[0].metadata.tags = ["parameters"]
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, path)
    return path


def execute(path: Path, **parameters: Any) -> Any:
    out = path.with_name("out.ipynb")
    return papermill.execute_notebook(
        path, out, parameters, kernel_name="python3", cwd=path.parent, progress_bar=False, log_output=False
    )


def text_of(done: Any, cell: int) -> str:
    return "".join(output.get("text", "") for output in done.cells[cell].outputs)


@pytest.mark.usefixtures("kernel_env")
def test_papermill_parameters(tmp_path: Path) -> None:
    path = write_notebook(tmp_path / "in.ipynb", OWN, CONFIG)
    printed = text_of(execute(path, max_steps=7, weight_decay=0.5), -1)
    assert "max_steps=7" in printed
    assert "learning_rate=0.0001" in printed
    assert "weight_decay=0.5" in printed

    with pytest.raises(papermill.PapermillExecutionError) as caught:
        execute(path, max_step=7, learning_rate="fast")
    assert caught.value.ename == "ConfigError"
    assert "max_step" in caught.value.evalue
    assert "did you mean optim.max_steps" in caught.value.evalue
    assert "learning_rate" in caught.value.evalue  # all at once
    assert "fast" in caught.value.evalue


def test_a_cell_that_runs_too_early_says_which_comes_first(kernel: Any) -> None:
    assert not run_cell(kernel, "from tpu_kit.notebook import cells as notebook")[1]
    error = run_cell(kernel, "print(settings.r)")[1]
    assert error.startswith("name 'settings' is not defined yet: the cell above that sets it (look for `settings =`")
    assert "not defined" in run_cell(kernel, "[print(unheard_of) for _ in '1']")[1]
    assert run_cell(kernel, "settings = notebook")[1] == ""


def test_a_parameter_that_a_notebook_does_not_know() -> None:
    check_names({"source": 1}, ("source", "hardware"))
    with pytest.raises(ConfigError) as caught:
        check_names({"sorce": 1, "zzz": 2}, ("source", "hardware"))
    assert caught.value.problems == [
        "sorce: this notebook has no such parameter; did you mean source?",
        "zzz: this notebook has no such parameter; there are hardware, source",
    ]


def test_a_run_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("run_name: mine\nlora: {r: 3}\n")
    with pytest.raises(ConfigError, match="the run in runs/mine has not ended, so it has no adapter: continue its"):
        cells_module.run_config(cells_ran("# Parameters: mine\nrun_name = 'mine'"))
    (tmp_path / "runs" / "mine" / "adapter").mkdir()
    with pytest.raises(ConfigError, match=r"run 4-train-cot-sft.ipynb first, .*\(Kaggle\), .* Runs beside it: mine"):
        cells_module.run_config(cells_ran("# Parameters: mine\nrun_name = 'other'"))
    found = cells_module.run_config(cells_ran("# Parameters: mine\nrun_name = 'mine'\nrows = 3"), also=["rows"])
    assert (found.lora.r, str(found.output_path)) == (3, "runs/mine")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("ok", "Ready to rehearse on this CPU; no TPU attached."),
        ("warning", "Ready to rehearse on this CPU; no TPU attached.\n! TPU: held"),
        ("failure", "Not ready. Fix this first: TPU: held\n→ kill 7"),
    ],
)
def test_verdict(status: Any, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check("Python", "ok", "3.12"), Check("TPU", status, "held", "kill 7")]
    assert cells_module.show_checks(iter(checks)) == checks
    capsys.readouterr()
    cells_module.show_verdict(checks, load_config(None, {"device_type": "cpu"}))
    assert capsys.readouterr().out.strip() == expected
    if status == "ok":
        assert verdict(checks, "torch-tpu").startswith("Ready to train on this TPU")


def test_an_error_of_the_kit_is_its_text_alone(kernel: Any) -> None:
    """Errors of a cell, and of libraries below the kit, keep their traceback."""
    shown: list[str] = []

    def run(source: str) -> str:
        shown.clear()
        keep = lambda message: shown.extend(message["content"].get("traceback", []))  # noqa: E731
        kernel.execute_interactive(source, timeout=60, output_hook=keep)
        return "\n".join(shown)

    run("from tpu_kit.notebook import cells as notebook")
    text = run("notebook.config({'learning_rat': 1})")
    assert "did you mean optim.learning_rate?" in text and "Traceback" not in text and "-->" not in text
    assert "-->" in run("int('x')")
    assert "-->" in run("notebook.json.loads('{')")


def test_cells_run_again_by_hand(kernel: Any) -> None:
    cells = [OWN, CONFIG, "seed_of_my_own = 3\nlearning_rat = 2\nimport os"]
    for cell in cells:
        run_cell(kernel, cell)
    printed, error = run_cell(kernel, CONFIG)  # variables of later cells now exist
    assert (error, "max_steps=5" in printed) == ("", True)

    run_cell(kernel, OWN.replace("max_steps", "max_step"))
    assert "max_step" in run_cell(kernel, CONFIG)[1]
    run_cell(kernel, OWN.replace("max_steps = 5", "max_steps = 9"))  # the typo mended, in the same kernel
    printed, error = run_cell(kernel, CONFIG)
    assert (error, "max_steps=9" in printed) == ("", True)


def test_each_cell_works_or_says_which_comes_first(kernel: Any) -> None:
    """Only the imports have run; then the cells run from the last to the first."""
    told = []
    for path in sorted((REPOSITORY / "notebooks").glob("[45]-*.ipynb")):
        cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        (imports,) = [cell for cell in cells if re.search(r"^from tpu_kit[. ]", cell, re.MULTILINE)]
        run_cell(kernel, "%reset -f")
        run_cell(kernel, imports)  # some notebooks continue this line with the parameters
        for cell in reversed(cells[1:]):
            error = run_cell(kernel, cell)[1]
            told.append(error)
            says = "is not defined yet: the cell above that sets it", "run the cell that begins with '# Parameters'"
            assert not error or any(text in error for text in says), (path.name, cell, error)
    assert sum(bool(error) for error in told) > 12


LIVE = """\
import os, subprocess, sys
from tpu_kit.notebook import cells as notebook
write = "import sys, time\\nfor line in open('all.jsonl'):\\n    time.sleep(0.3)\\n"
write += "    print(line, end='', file=open('run/metrics.jsonl', 'a'), flush=True)\\n"
write += "json.dump({'model': 'base model', 'answered': 5, 'asked': 20}, open('run/answering.json', 'w'))\\n"
write = "import json, os\\n" + write + "time.sleep(1.5)\\nos.remove('run/answering.json')"
notebook.picture(notebook.new_figure(9, 3, columns=2)[0], "")  # the first one loads matplotlib and its fonts
with notebook.live("run", every=0.1):
    subprocess.run([sys.executable, "-c", write], check=True)
    assert os.environ["TPU_KIT_NO_BAR"] == "1"
assert "TPU_KIT_NO_BAR" not in os.environ
"""
SHOW = """\
from tpu_kit.notebook.displays.runs import _curves
notebook.show(_curves("run"))
notebook.show_example([("<script>", False), ("a & b", True)])
notebook.show_table([{"answer": "<b>\\n2"}])
"""


@pytest.mark.usefixtures("kernel_env")
def test_displays_in_a_kernel(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "all.jsonl").write_text(METRICS.rpartition("\n")[0] + "\n")
    path = write_notebook(tmp_path / "in.ipynb", OWN, LIVE, SHOW)
    (tmp_path / "run" / "answering.json").write_text('{"model": "old", "answered": 1, "asked": 2}')  # left by a kill
    shown = watched(path)
    done = nbformat.read(path.with_name("out.ipynb"), as_version=4)

    progress, plot = done.cells[1].outputs  # two displays, replaced in place
    assert plot.data["text/plain"] == "train loss 2.0000 -> 1.0000 at step 3; eval loss 1.5000 -> 1.5000 at step 3"
    assert base64.b64decode(plot.data["image/png"]).startswith(b"\x89PNG")
    assert len(shown) >= 4  # the thread, while the child ran, and the end
    assert not any("old" in text for text in shown)
    assert any(f"{'█' * 10}{'░' * 30} 5 of 20 answers, base model" in text for text in shown)
    assert progress.data["text/plain"] == (
        f"{'█' * 20}{'░' * 20} 3 of 6 updates, 0:01:01 left\nresumed from step 2; compiled programs 3; "
        "tokens/s/chip 6; MFU 25.0%"
    )

    curves, example, table = done.cells[2].outputs
    assert "image/png" in curves.data
    assert "<script>" not in example.data["text/html"]
    assert re.search(r"<mark [^>]*>a &amp; b</mark>", example.data["text/html"])
    assert "&lt;b&gt;\n2" in table.data["text/html"]
    assert done.cells[2].outputs[1].data["text/plain"] == "<script>[[a & b]]"


def watched(path: Path) -> list[str]:
    """Executes the notebook and returns the texts that displays were replaced with."""
    from nbclient import NotebookClient

    shown: list[str] = []

    class Client(NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] == "update_display_data":
                shown.append(msg["content"]["data"]["text/plain"])
            return super().process_message(msg, cell, cell_index)

    made = nbformat.read(path, as_version=4)
    client = Client(made, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    nbformat.write(made, path.with_name("out.ipynb"))
    return shown


def test_bars_are_of_long_work_alone_as_tqdm_is_imported_later() -> None:
    code = "import os, sys\nimport tpu_kit.notebook.install\nprint(os.environ['TQDM_DELAY'], 'tqdm' in sys.modules)"
    assert run_python(code, env={"TQDM_DELAY": None}).stdout == "5 False\n"
