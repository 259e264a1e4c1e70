"""A resumed run equals the uninterrupted run, and a different run is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, PhiConfig, PhiForCausalLM

from tpu_kit.assets import embedded
from tpu_kit.config.loader import ConfigError, TrainConfig, load_config
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.distributed.replica.runtime import enter
from tpu_kit.generation.evaluation.evaluate import held_out
from tpu_kit.machine.checks import Machine
from tpu_kit.machine.storage.object_store import ObjectFolder, upload
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.recipes import replica, run_plan, sft
from tpu_kit.training import resume
from tpu_kit.training.checkpoint import manager
from tpu_kit.training.checkpoint.manager import list_checkpoints
from tpu_kit.training.metrics import read_metrics

# The checkpoint (4) falls between logs (3) and inside an epoch; dropout, averaging and warm-up are on.
SETTINGS = {
    "base_dtype": "fp32", "max_length": 128, "batch_size": 2, "max_steps": 8, "warmup_steps": 2, "save_steps": 4,
    "logging_steps": 3, "eval_steps": 4, "eval_rows": 8, "generate_rows": 0, "dropout": 0.1, "ema_decay": 0.9,
    "loss_chunk": 128, "keep": 5,
}  # fmt: skip


def run_config(folder: Path, **changes: Any) -> TrainConfig:
    values = {"device_type": "cpu", **SETTINGS, **changes, "output_dir": str(folder)}
    return load_config("embedded-cot", values)


def ended(folder: Path) -> tuple[str, list[tuple[Any, ...]]]:
    """The adapter's hash and the logged values, without times."""
    adapter = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    kept = ("kind", "step", "loss", "grad_norm", "lr", "tokens", "epoch")
    return hashlib.sha256(adapter).hexdigest(), [tuple(r.get(k) for k in kept) for r in read_metrics(folder)]


def interrupted(whole: Path, folder: Path) -> None:
    """Copies the files that remain of the run `whole` after a kill right after the checkpoint of step 4."""
    shutil.copytree(whole / "checkpoints" / "step-00000004", folder / "checkpoints" / "step-00000004")
    shutil.copy(whole / "metrics.jsonl", folder)  # including later lines, which must be cut


XLA = pytest.param(
    {"device_type": "xla-cpu", "num_replicas": 2},
    id="xla-cpu",
    marks=[  # quick sibling: tests/integration/test_interruption.py, where a process is killed
        pytest.mark.slow,
        pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed"),
    ],
)


@pytest.mark.parametrize("where", [pytest.param({}, id="cpu"), XLA])
def test_resumed_equals_uninterrupted(where: dict[str, Any], tmp_path: Path) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    first = sft.train(run_config(whole, **where))
    interrupted(whole, again)
    second = sft.train(run_config(again, **where))
    assert ended(again) == ended(whole)
    assert second.step == first.step == 8 and second.metrics["eval_loss"] == first.metrics["eval_loss"]
    assert second.metrics.get("compiles", 0) <= first.metrics.get("compiles", 0)
    # The first record after the checkpoint also counts only the tokens of its own seconds.
    trained = {record["step"]: record for record in read_metrics(again) if record["kind"] == "train"}
    tokens = {0: 0, 4: manager.list_checkpoints(again / "checkpoints")[0][0].document("state")["tokens"]}
    tokens |= {step: record["tokens"] for step, record in trained.items()}
    for start, end in ((0, 3), (4, 6), (6, 8)):
        seconds = trained[end]["step_seconds"] * (end - start)
        assert trained[end]["tokens_per_second"] * seconds == pytest.approx(tokens[end] - tokens[start])


def test_a_run_that_is_moved_goes_on_bit_for_bit(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From a folder to a bucket, to another folder, to another mount; its rows and its model move too."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(embedded.model_dir(), tmp_path / "model")
    lines = [json.dumps(row) + "\n" for row in embedded.cot_rows("train", 60)]
    Path("rows.jsonl").write_text("".join(lines))
    common = {"source": "rows.jsonl", "model.name": "./model", "schedule": "constant", "eval_steps": None}
    whole = tmp_path / "whole"
    sft.train(run_config(whole, **common))
    interrupted(whole, tmp_path / "first")
    upload(tmp_path / "first", f"{bucket}/run")
    moved = common | {"source": str(tmp_path / "rows.jsonl"), "model.name": str(tmp_path / "model")}
    there = {**SETTINGS, **moved, "max_steps": 6, "output_dir": f"{bucket}/run"}
    assert sft.train(load_config("embedded-cot", {"device_type": "cpu", **there})).step == 6
    (tmp_path / "second").mkdir()
    for name in (store := ObjectFolder(f"{bucket}/run")).list():
        (tmp_path / "second" / name).parent.mkdir(parents=True, exist_ok=True)
        store.get(name, tmp_path / "second" / name)
    shutil.move(tmp_path / "second", tmp_path / "mount")
    Path("data").mkdir()
    Path("rows.jsonl").rename("data/others.jsonl")
    Path("model").rename("data/model")
    capfd.readouterr()
    moved |= {"source": "data/*.jsonl", "model.name": "data/model"}
    assert sft.train(run_config(tmp_path / "mount", **moved)).step == 8
    said = capfd.readouterr().out
    assert "resumed          from step 6" in said
    for name, before, now in (("data.source", "rows.jsonl", "data/*.jsonl"), ("model.name", "model", "data/model")):
        assert f"moved            {name}: {tmp_path}/{before} -> {now}, same content" in said
    assert ended(tmp_path / "mount")[0] == ended(whole)[0]
    assert ended(tmp_path / "mount")[1][-2:] == ended(whole)[1][-2:]

    Path("data/others.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(ValueError, match=r"data.source: 'data/\*.jsonl' there, 'data/./others.jsonl' now"):
        sft.train(run_config(tmp_path / "mount", **moved | {"source": "data/./others.jsonl"}))
    weights = bytearray(Path("data/model/model.safetensors").read_bytes())
    weights[-1] ^= 1
    shutil.copytree("data/model", "other")
    Path("other/model.safetensors").write_bytes(weights)
    with pytest.raises(
        ValueError, match=r"model.name: 'data/model' there, 'other' now, whose weights are not known to be"
    ):
        sft.train(run_config(tmp_path / "mount", **moved | {"model.name": "other"}))


@pytest.mark.parametrize(
    ("move", "told"),
    [
        ("nested", "run/mine is a run: to continue it, set output_dir="),
        ("results", "run/adapter is the result of a run whose checkpoints are not there"),
        ("inside", "run/step-00000004 is a checkpoint: set output_dir to the folder that holds its folder"),
        ("cut", "step-00000004/manifest.json is missing"),
        ("trainer", "run/checkpoint-500 is a checkpoint of transformers' Trainer"),
        ("zip", "run/checkpoints.zip is an archive: unpack it"),
    ],
)
@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_what_tells_of_a_run_is_never_taken_for_none(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, where: str, move: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_plan, "prepare_run", None)  # refused before data is prepared
    folder = tmp_path / "run"
    step = folder / {"nested": "mine/checkpoints", "inside": "."}.get(move, "checkpoints") / "step-00000004"
    step.mkdir(parents=True)
    (step / "state.json").write_text("{}")
    if move in ("nested", "inside"):
        (step / "manifest.json").write_text("{}")
    if move in ("results", "trainer", "zip"):
        shutil.rmtree(folder / "checkpoints")
        other = {"results": "adapter/adapter_config.json", "trainer": "checkpoint-500/trainer_state.json"}
        (file := folder / other.get(move, "checkpoints.zip")).parent.mkdir(exist_ok=True)
        file.write_text("{}")
    output_dir = str(folder)
    if where == "bucket":
        output_dir = f"{request.getfixturevalue('bucket')}/run"
        upload(folder, output_dir)
    before = everything(folder)
    for resumes in ("auto", "must"):
        with pytest.raises(ValueError, match=told):
            sft.train(load_config("embedded-cot", {"device_type": "cpu", "output_dir": output_dir, "resume": resumes}))
    assert everything(folder) == before


def test_a_misspelt_file_of_an_old_run_is_no_other_data(tmp_path: Path) -> None:
    config = run_config(tmp_path / "run", max_steps=1, warmup_steps=0, save_steps=1, eval_steps=None)
    sft.train(config)
    misspelt = replace(config, data=replace(config.data, source=str(tmp_path / "rowz.jsonl")))
    with pytest.raises(ValueError, match=r"rowz.jsonl: there is no such file; check data.source"):
        sft.train(misspelt)


def test_dropout_of_the_model_itself_is_resumed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(embedded.model_dir())
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = PhiConfig(vocab_size=len(tokenizer), resid_pdrop=0.1, embd_pdrop=0.1, attention_dropout=0.0, **sizes)
    PhiForCausalLM(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    whole, again = tmp_path / "whole", tmp_path / "again"
    changes = {"model.name": str(model), "dropout": 0.0, "max_steps": 6}
    sft.train(run_config(whole, **changes))
    interrupted(whole, again)
    sft.train(run_config(again, **changes))
    assert ended(again) == ended(whole)


def test_a_finished_run_stays_finished(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = run_config(tmp_path / "run")
    first = sft.train(config)
    before = ended(tmp_path / "run")
    again = sft.train(config)
    assert (again.status, again.step, ended(tmp_path / "run")) == ("finished", 8, before)
    assert again.metrics["eval_loss"] == first.metrics["eval_loss"]
    assert "resumed          from step 8" in capfd.readouterr().out


def test_other_packages_and_another_objective_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_loss.py").write_text("def loss(model, batch): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = run_config(tmp_path / "run", objective="own_loss:loss")
    before = resume.versions(config)
    (tmp_path / "own_loss.py").write_text("def loss(model, batch): return 2\n")
    now = resume.versions(config)
    assert before.pop("own_loss:loss") != now.pop("own_loss:loss") and before == now and "torch" in now
    config = run_config(tmp_path / "run", max_steps=1, warmup_steps=0, date="2026-11-26")
    sft.train(config)
    (saved,) = list_checkpoints(config.checkpoints_place)[0]
    monkeypatch.setattr(resume, "installed_version", lambda name: "1.0" if name == "torch" else None)
    point = resume.ResumePoint.read(saved)
    (told,) = point.described(config, resume.Record({}, resume.versions(config)))
    assert f"; torch is '1.0', was {point.state['versions']['torch']!r}" in told


def test_another_run_is_refused_with_what_differs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    sft.train(run_config(folder, max_steps=4))
    before = ended(folder)
    launch = sft.launch
    monkeypatch.setattr(sft, "launch", None)
    with pytest.raises(ValueError, match="is of another run:") as caught:
        sft.train(run_config(folder, r=8, learning_rate=1e-3))
    text = str(caught.value)
    for part in ("lora.r: 16 there, 8 now", "optim.learning_rate: 0.005 there, 0.001 now", "checkpoint.resume=never"):
        assert part in text
    with pytest.raises(ValueError, match=r"rows per update \(optim.batch_size, passes, replicas\): 2 there, 4 now"):
        sft.train(run_config(folder, batch_size=4))
    monkeypatch.setattr(sft, "launch", launch)
    assert ended(folder) == before  # nothing is lost
    capfd.readouterr()
    assert sft.train(run_config(folder, max_steps=6)).step == 6  # longer is no other run
    assert "optim.max_steps is 6, was 4" in capfd.readouterr().out
    weights = (folder / "adapter/adapter_model.safetensors").read_bytes()
    (folder / "eval.json").touch()
    enter(CpuRuntime(0, 1, torch.device("cpu")))
    with replica.trainer(run_config(folder, max_steps=4, r=8, resume="never")):
        pass  # as if killed in its first update
    enter(None)
    assert not (folder / "adapter").exists() and not (folder / "eval.json").exists(), "they are of another run"
    assert (folder / "results.previous/adapter/adapter_model.safetensors").read_bytes() == weights
    anew = sft.train(run_config(folder, max_steps=4, r=8, resume="never"))
    assert anew.step == 4 and (folder / "checkpoints.previous" / "step-00000006").is_dir()


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_refused_run_leaves_the_folder_as_it_is(tmp_path: Path) -> None:
    """config.yaml too, because export and notebook 5 read the run from it."""
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"{row['question']}\n", "completion": row["answer"]})
             for row in embedded.cot_rows("train", 24)]  # fmt: skip
    rows.write_text("\n".join(lines[:20]))
    folder = tmp_path / "run"
    common = {"source": str(rows), "max_steps": 2, "warmup_steps": 0, "ema_decay": 0, "eval_steps": None}
    config = run_config(folder, **common)
    sft.train(config)
    before = everything(folder)
    assert {"config.yaml", "metrics.jsonl"} < before.keys()

    with pytest.raises(ValueError, match=r"lora.r: 16 there, 8 now"):  # by its configuration
        sft.train(run_config(folder, **common, r=8))
    assert everything(folder) == before
    with pytest.raises(ValueError, match=r"data.source: .*rows.jsonl' there, .*run/data/"):  # by rows in memory
        sft.train(config, Dataset.from_list([json.loads(line) for line in lines]))
    assert everything(folder) == before and not (folder / "data").exists()
    with pytest.raises(ConfigError, match=r"optim.global_batch_size"):  # before anything is looked at
        sft.train(run_config(folder, **common, global_batch_size=5))
    assert everything(folder) == before
    rows.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="the data: other rows, tokens or packing than there"):  # by the rows' contents
        sft.train(run_config(folder, **{**common, "max_steps": 3}))
    assert everything(folder) == before
    rows.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        sft.train(run_config(folder, **{**common, "max_steps": 3}))
    assert everything(folder) == before

    rows.write_text("\n".join(lines[:20]))
    assert sft.train(run_config(folder, **{**common, "max_steps": 3})).step == 3  # nothing was in the way
    assert load_config(folder / "config.yaml").optim.max_steps == 3


def test_resume_must_have_something(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume=must, but .* has no complete checkpoint: check output_dir"):
        sft.train(run_config(tmp_path / "run", resume="must"))


@pytest.fixture
def fly_to(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the time zone of this process. The two `ZONES` are 26 hours apart, so their dates always differ."""

    def fly(zone: str) -> None:
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield fly
    monkeypatch.undo()
    time.tzset()


ZONES = ("UTC+12", "UTC-14")  # POSIX writes west of Greenwich as +


def test_the_next_day_a_run_goes_on_with_the_date_of_its_start(
    fly_to: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second machine's cache has no tokens from the day before."""
    model, folder, rows = tmp_path / "model", tmp_path / "run", tmp_path / "rows.jsonl"
    shutil.copytree(embedded.model_dir(), model)
    template = model / "chat_template.jinja"
    template.write_text("It is {{ strftime_now('%d %b %Y') }}." + template.read_text())
    rows.write_text("".join(json.dumps(row) + "\n" for row in embedded.cot_rows("train", 24)))
    common = {"model.name": str(model), "source": str(rows), "max_steps": 2, "warmup_steps": 0, "eval_steps": None}
    days = []
    for zone in ZONES:
        fly_to(zone)
        days.append(time.strftime("%Y-%m-%d"))
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / zone)
        sft.train(run_config(folder, **common))
        common["max_steps"] += 1
    assert days[0] < days[1] and load_config(folder / "config.yaml").data.date == days[0]
    text = time.strftime("It is %d %b %Y.", time.strptime(days[0], "%Y-%m-%d"))
    assert all(prompt.startswith(text) for prompt in held_out(load_config(folder / "config.yaml")).eval_prompts)
    config = run_config(folder, **common, date=days[1])
    assert load_tokenizer(config.model, folder / "adapter").chat_template == template.read_text()
    with pytest.raises(ValueError, match=f"data.date: '{days[0]}' there, '{days[1]}' now"):
        sft.train(config)


def test_the_code_of_an_own_function_is_that_of_every_file_that_it_imports_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run prints the changed files; code of a library is identified by the library's version."""
    files = {
        "loss_beside_parts.py": "import torch\nfrom loss_parts.scale import factor\n",
        "loss_parts/__init__.py": "",
        "loss_parts/scale.py": "from loss_parts import other\ndef factor(): return 1\n",
        "loss_parts/other.py": "",
        "loss_unused.py": "",
    }
    (tmp_path / "loss_parts").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    config = run_config(tmp_path / "run", **{"optim.objective": "loss_beside_parts:loss"})
    codes = [resume.versions(config)["loss_beside_parts:loss"]]
    for name in files:
        (tmp_path / name).write_text(files[name] + "# edited\n")
        codes.append(resume.versions(config)["loss_beside_parts:loss"])
    assert len(set(codes)) == 5 and codes[-1] == codes[-2], codes
