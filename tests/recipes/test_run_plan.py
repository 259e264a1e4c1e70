"""The run plan: its contents, the report of its problems, and changes between plan and launch."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file

from tests.distributed.test_hosts import together
from tests.machine.test_checks import V5E, fake
from tests.support.cached_model import put_in_cache, use_cache
from tests.support.child_processes import PYTHONPATH, child_environment
from tests.support.compiler_models import TINY, write_config
from tests.support.object_store import free_port
from tpu_kit.cli import main
from tpu_kit.config.loader import ConfigError, TrainConfig, load_config
from tpu_kit.distributed import detection
from tpu_kit.distributed.detection import Backend
from tpu_kit.distributed.hosts import Hosts
from tpu_kit.distributed.meeting import Meeting
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.distributed.replica.runtime import Outdated, enter
from tpu_kit.machine.checks import Machine
from tpu_kit.model.meta_model import empty_model
from tpu_kit.planning import planner, run_cost
from tpu_kit.recipes import problems, sft
from tpu_kit.recipes.replica import fine_tune
from tpu_kit.recipes.run_plan import RunPlan, plan_run
from tpu_kit.training.checkpoint.manager import list_checkpoints
from tpu_kit.training.objectives import objective_of
from tpu_kit.training.resume import START

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")


def run(world: Path, folder: Path, **changes: Any) -> TrainConfig:
    values = {
        "model.name": str(world / "model"), "base_dtype": "fp32", "lora.r": 2, "source": str(world / "rows.jsonl"),
        "eval_rows": 0, "data.max_length": 64, "batch_size": 2, "max_steps": 2, "warmup_steps": 0, "loss_chunk": 64,
        "save_steps": 1, "keep": 9, "device_type": "cpu", "num_replicas": 1, "output_dir": str(folder), **changes,
    }  # fmt: skip
    return load_config(None, values)


class _WithoutTensors(pickle.Pickler):
    def persistent_id(self, obj: Any) -> None:
        assert not isinstance(obj, torch.Tensor | torch.nn.Module), "the plan holds a tensor"


PHI3 = TINY | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0, "resid_pdrop": 0.1}
OLMO = TINY | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (PHI3, [], ""),
        (PHI3, ["remat=none"], r"resid_attn_dropout is dropout outside of a loop over layers: set optim.remat=full"),
        (OLMO, [], "launch.device_type=torch-tpu trains only llama, qwen2, qwen3, gemma3_text, phi3: use launch.dev"),
        (TINY, ["shared"], "cannot run its layers as a loop, which XLA needs: its layers share weights; train it with"),
    ],
)
def test_layers_that_torch_tpu_does_not_train_are_refused_by_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], changes: list[str], message: str
) -> None:
    """In the calling process, before anything starts, also without torch_tpu."""
    if "shared" in changes:

        def with_shared_layers(config: TrainConfig) -> Any:
            made = empty_model(config)
            made.model.layers[1] = made.model.layers[0]
            return made

        monkeypatch.setattr("tpu_kit.model.meta_model.empty_model", with_shared_layers)
    changes = [f"model.name={write_config(tmp_path, model)}", *(one for one in changes if one != "shared")]
    config = load_config(None, ["device_type=torch-tpu", *changes])
    found = problems.of_model(RunPlan(config, Backend("torch-tpu", 1, "")), objective_of(config))
    assert len(found) == bool(message) and all(re.search(message, str(one)) for one in found), found
    assert not problems.of_model(RunPlan(config, Backend("cpu", 1, "")), objective_of(config))


def test_a_plan_can_be_sent_and_holds_no_tensors(world: Path, tmp_path: Path) -> None:
    sft.train(run(world, tmp_path / "run"))
    plan, prepared = plan_run(run(world, tmp_path / "run", max_steps=4))
    _WithoutTensors(buffer := io.BytesIO()).dump(plan)
    again = pickle.loads(buffer.getvalue())
    assert str(again) == str(plan) and again.to_dict() == plan.to_dict() and again.facts() == plan.facts()
    assert (plan.updates, plan.left, plan.rows) == (4, 2, len(prepared.train)) and plan.resume_point.step == 2
    assert plan.resume_point.is_of(list_checkpoints(plan.config.checkpoints_place)[0][-1])
    assert buffer.tell() < 2**16


def test_the_problems_of_a_step_are_told_together(world: Path, tmp_path: Path) -> None:
    both = {"tracking.verifier": "os:name", "tensorboard": True, "device_type": "cuda"}
    with pytest.raises(ValueError, match=r"^2 problems:\n  - launch\.device_type=cuda") as caught:
        sft.train(run(world, tmp_path / "run", **both))
    assert "tracking.verifier=os:name: it is a str, not a function" in str(caught.value)
    sft.train(run(world, tmp_path / "run"))
    changed = {"lora.r": 4, "distill.teacher": str(world / "rows.jsonl")}
    with pytest.raises(ValueError, match=r"^2 problems:") as caught:
        sft.train(run(world, tmp_path / "run", **changed))
    assert "lora.r: 2 there, 4 now" in str(caught.value) and "distill.teacher" in str(caught.value)


def test_a_refused_run_on_rows_in_memory_leaves_no_files(world: Path, tmp_path: Path) -> None:
    rows = Dataset.from_json(str(world / "rows.jsonl"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"rl\.num_generations: has no effect here"):
        sft.train(run(world, tmp_path / "a", num_generations=4), rows)
    with pytest.raises(ValueError, match="rows"):
        sft.train(run(world, tmp_path / "b", batch_size=4096), rows)
    assert not [path for folder in ("a", "b") for path in (tmp_path / folder).rglob("*.arrow")]
    assert sft.train(run(world, tmp_path / "b"), rows).step == 2 and list((tmp_path / "b" / "data").iterdir())


def test_problems_become_one_error() -> None:
    first, second = ConfigError(["a: 1"]), ConfigError(["b: 2", "c: 3"])
    problems.tell([])
    with pytest.raises(ConfigError) as caught:
        problems.tell([first, second, ConfigError(["a: 1"])])
    assert caught.value.problems == ["a: 1", "b: 2", "c: 3"]
    for alone in (first, ValueError("alone")):
        with pytest.raises(type(alone)) as same:
            problems.tell([alone])
        assert same.value is alone
    with pytest.raises(ValueError, match=r"^2 problems:\n  - of\n    two lines\n  - 1 problem in the"):
        problems.tell([ValueError("of\ntwo lines"), first])


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[RunPlan]]:
    """Applies a change between the plan and its launch; returns the plans that were launched."""

    def install(*changes: Callable[[], object]) -> list[RunPlan]:
        plans, todo, right = [], list(changes), sft.launch

        def launch(function: Any, *given: Any, **options: Any) -> Any:
            plans.append(function.keywords["plan"])
            if todo:
                todo.pop(0)()
            return right(function, *given, **options)

        monkeypatch.setattr(sft, "launch", launch)
        return plans

    return install


def committed(world: Path, folder: Path, steps: int) -> Callable[[], object]:
    """Returns a function that continues the run in `folder` as another job, to its end."""
    train, launch = sft.train, sft.launch

    def job() -> None:
        now, sft.launch = sft.launch, launch
        try:
            train(run(world, folder, max_steps=steps))
        finally:
            sft.launch = now

    return job


def damage(folder: Path) -> None:
    path = folder / "training.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_a_checkpoint_that_another_job_commits_before_the_launch_is_continued(
    world: Path, tmp_path: Path, meanwhile: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    plans = meanwhile(committed(world, folder, 1))
    assert sft.train(run(world, folder, max_steps=3)).step == 3
    assert [plan.resume_point and plan.resume_point.step for plan in plans] == [None, 1]
    told = capfd.readouterr().out
    assert (
        "has changed since the run was planned: none was planned, and now the newest good checkpoint is step 1" in told
    )
    assert "resumed          from step 1" in told
    assert not load_file(folder / "checkpoints/step-00000003/training.safetensors")["applied"] - 3


def test_a_checkpoint_that_is_damaged_before_the_launch_is_set_aside_and_the_one_before_continued(
    world: Path, tmp_path: Path, meanwhile: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    sft.train(run(world, folder, max_steps=2))
    plans = meanwhile(lambda: damage(folder / "checkpoints/step-00000002"))
    assert sft.train(run(world, folder, max_steps=3)).step == 3
    assert [plan.resume_point and plan.resume_point.step for plan in plans] == [2, 1]
    told = capfd.readouterr()
    assert "step 2 was planned, and now the newest good checkpoint is step 1" in told.out
    assert "the checkpoint is set aside as step-00000002.corrupt" in told.err


def test_a_checkpoint_that_changes_each_time_is_told(world: Path, tmp_path: Path, meanwhile: Any) -> None:
    folder = tmp_path / "run"
    plans = meanwhile(committed(world, folder, 1), committed(world, folder, 2))
    with pytest.raises(Outdated, match="step 1 was planned, and now the newest good checkpoint is step 2"):
        sft.train(run(world, folder, max_steps=4))
    assert len(plans) == 2


def test_of_another_content_at_the_same_step_is_another_checkpoint(world: Path, tmp_path: Path, meanwhile: Any) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    sft.train(run(world, folder, max_steps=1))
    sft.train(run(world, other, max_steps=1, **{"optim.seed": 5}))

    def exchanged() -> None:
        shutil.rmtree(folder / "checkpoints/step-00000001")
        shutil.copytree(other / "checkpoints/step-00000001", folder / "checkpoints/step-00000001")

    meanwhile(exchanged)
    with pytest.raises(ValueError, match=r"is of another run:\n  optim.seed: 5 there, 0 now"):
        sft.train(run(world, folder, max_steps=2, **{"optim.seed": 0}))


@needs_xla
@pytest.mark.slow  # quick siblings: the tests above, with a replica in the calling process
def test_replicas_of_another_process_tell_that_the_plan_is_outdated(
    world: Path, tmp_path: Path, meanwhile: Any, quick_xla: None
) -> None:
    folder = tmp_path / "run"
    plans = meanwhile(committed(world, folder, 1))
    xla = {"device_type": "xla-cpu", "num_replicas": 2, "batch_size": 1}
    assert sft.train(run(world, folder, max_steps=3, **xla)).step == 3
    assert [plan.resume_point and plan.resume_point.step for plan in plans] == [None, 1]


@pytest.mark.slow  # quick siblings: the tests above, with one host
def test_all_hosts_plan_once_more(tmp_path: Path) -> None:
    """Host 0 confirms the checkpoint; the replicas of all hosts learn that it has changed."""
    settings = [
        "embedded-cot", "warmup_steps=0", "save_steps=1", "eval_rows=2", "generate_rows=0", "data.split=train[:40]",
        "device_type=cpu", "num_replicas=1", "batch_size=2",
    ]  # fmt: skip
    module, run, port = "tests.support.outdated_host", tmp_path / "run", free_port()
    before = tmp_path / "other/checkpoints/step-00000001"
    hosts, outputs = [], []
    for folder, checkpoint in ((tmp_path / "other", ""), (run, str(before))):
        for index in (0, 1):
            env = {"TPU_KIT_HOSTS": "a,b", "TPU_KIT_HOST_INDEX": str(index), "PYTHONPATH": PYTHONPATH,
                   "TPU_KIT_COORDINATOR": f"127.0.0.1:{port}", "PJRT_DEVICE": None}  # fmt: skip
            how = [module, checkpoint, str(run / "checkpoints")] if checkpoint else ["tpu_kit", "train"]
            command = [sys.executable, "-m", *how, *settings, f"output_dir={folder}"]
            command += ["max_steps=2" if checkpoint else "max_steps=1"]
            outputs.append(tmp_path / f"{folder.name}-{index}.log")
            with outputs[-1].open("w") as log:
                hosts.append(subprocess.Popen(command, env=child_environment(env), stdout=log, stderr=log))
        codes = [host.wait(300) for host in hosts]
        assert codes == [0] * len(hosts), "\n".join(path.read_text()[-3000:] for path in outputs)
    for path in (outputs[2], run / "logs" / "host-1.log"):  # host 1 shows no stdout
        assert "planned again" in path.read_text()
    assert all("ended at step 2" in path.read_text() for path in outputs[2:])
    assert "none was planned, and now the newest good checkpoint is step 1" in outputs[2].read_text()


def test_a_hub_that_moves_on_after_the_plan_changes_nothing(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Any
) -> None:
    name, old, new = "owner/tiny", "a" * 40, "b" * 40
    put_in_cache(tmp_path / "cache", name, world / "model", old)
    use_cache(tmp_path / "cache", monkeypatch)
    later = shutil.copytree(world / "model", tmp_path / "later")
    tensors = load_file(later / "model.safetensors")
    save_file({key: value * 2 for key, value in tensors.items()}, later / "model.safetensors", {"format": "pt"})
    settings = {"model.name": name, "distill.teacher": name}
    plans = meanwhile(lambda: put_in_cache(tmp_path / "cache", name, later, new))
    sft.train(run(world, tmp_path / "run", **settings))
    (plan,) = plans
    assert plan.config.model.revision == plan.teacher.revision == old
    (saved, *_) = list_checkpoints(tmp_path / "run/checkpoints")[0]
    assert saved.document("base")["commit"] == saved.document("teacher")["commit"] == old
    meanwhile()
    assert sft.train(run(world, tmp_path / "run", max_steps=3, **settings)).step == 3  # from the commits it began with


def test_hosts_whose_plans_differ_are_told_with_both_values(world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    new = plan_run(run(world, folder, max_steps=3))[0].facts()
    sft.train(run(world, folder, max_steps=1))
    resumed = plan_run(run(world, folder, max_steps=3))[0].facts()
    assert {name for name in new if new[name] != resumed[name]} == {"checkpoint"}
    rows = (world / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(rows[::-1]))
    other = plan_run(
        run(world, folder, max_steps=3, source=str(tmp_path / "rows.jsonl"), output_dir=str(tmp_path / "b"))
    )
    assert {name for name in new if new[name] != other[0].facts()[name]} == {"data (hash)"}

    def part(meeting: Meeting, facts: Any) -> None:
        meeting.agree({"number of hosts": 2})
        meeting.agree(facts)

    hosts = [Hosts(index, ("a", "b"), f"127.0.0.1:{free_port()}") for index in (0, 1)]
    hosts[1] = replace(hosts[1], coordinator=hosts[0].coordinator)
    ended = together(hosts, lambda meeting: part(meeting, new), lambda meeting: part(meeting, resumed))
    told = "\n".join(map(str, ended))
    assert re.search(
        r"the hosts differ in\n  checkpoint: None on host 0 of 2, a; \{'step': 1, 'files': '\w+'\} on", told
    )


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        (Backend("cuda", 1, ""), r"planned for device_type=cuda, 1 shards of a batch, and is on cpu with 1"),
        (Backend("cpu", 2, ""), r"planned for device_type=cpu, 2 shards of a batch, and is on cpu with 1"),
    ],
    ids=["device", "replicas"],
)
def test_a_plan_of_another_machine_is_refused(world: Path, tmp_path: Path, backend: Backend, told: str) -> None:
    plan, _ = plan_run(run(world, tmp_path / "run"))
    assert plan.batch is not None
    batch = replace(plan.batch, num_replicas=backend.num_replicas)
    enter(CpuRuntime(0, 1, torch.device("cpu")))
    try:
        with pytest.raises(ValueError, match=f"{told}: plan it on the machine that trains it"):
            fine_tune(plan.config, replace(plan, backend=backend, batch=batch))
    finally:
        enter(None)


def test_a_dry_run_prints_the_plan_and_leaves_nothing(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run(world, tmp_path / "runs/run")
    (tmp_path / "my.yaml").write_text(config.to_yaml())
    monkeypatch.setattr(sft, "launch", lambda *_: pytest.fail("it was launched"))
    command = ["train", str(tmp_path / "my.yaml"), "--dry-run"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    lines = dict(line.split(None, 1) for line in printed.splitlines())
    assert lines["machine"] == "device_type=cpu, 1 replica(s): as configured" and "2 updates" in lines["batch"]
    assert lines["batch"].endswith(" packed rows of each epoch fill no update")
    assert "resumed from     nothing: a new run" in printed and {"memory", "time", "packed", "objective"} < lines.keys()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["updates"], found["batch"]["global_batch_size"], found["resumed_from"]) == (2, 2, None)
    assert not (tmp_path / "runs").exists()
    monkeypatch.undo()
    sft.train(config)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    assert main([*command, "--json", "max_steps=3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["resumed_from"]["step"] == 2 and (found["updates"], found["updates_left"]) == (3, 1)
    assert main([*command, "lora.r=4"]) == 1 and "lora.r: 2 there, 4 now" in capsys.readouterr().err
    assert main([*command[:-1], "--json"]) == 2 and "--json: add --dry-run" in capsys.readouterr().err
    assert main(["distill", *command[1:]]) == 2 and "names no teacher" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_dry_run_on_a_tpu_chooses_remat(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = fake(tmp_path / "root", V5E)
    monkeypatch.setattr(detection, "Machine", lambda: at)
    # For so small a model all settings are nearly as fast, and a second of compiling outweighs all updates.
    monkeypatch.setattr(planner, "TIE", 1e-9)
    monkeypatch.setattr(run_cost, "LAYER_COMPILING", 1e-5)
    command = ["train", str(tmp_path / "my.yaml"), "--dry-run", "--json"]
    chosen = {}
    for updates in (2, 10**4):
        config = run(world, tmp_path / "runs/run", device_type="tpu", max_steps=updates)
        (tmp_path / "my.yaml").write_text(config.to_yaml())
        assert main(command) == 0
        found = json.loads(capsys.readouterr().out)
        (chosen[updates],) = (note for note in found["notes"] if note.startswith("optim.remat=auto is "))
        assert found["memory"]["fits"] and f"auto is {found['config']['optim']['remat']}: " in chosen[updates]
    assert [note.partition(":")[0].split()[-1] for note in chosen.values()] == ["full", "none"]


def test_a_dry_run_does_without_the_checkpoint_that_train_fetches(world: Path, tmp_path: Path) -> None:
    config = run(world, tmp_path / "run", resume="must", **{"checkpoint.source": "hf://ann/tuned"})
    assert "resumed from     hf://ann/tuned, fetched by `train`" in str(sft.dry_run(config))


def test_the_adapter_of_the_start_is_identified_by_any_of_its_paths(world: Path, tmp_path: Path) -> None:
    sft.train(run(world, tmp_path / "start"))
    places = [tmp_path / "start", tmp_path / "start/config.yaml", tmp_path / "start/adapter"]
    found = [plan_run(run(world, tmp_path / "run", **{"lora.adapter": str(place)}))[0] for place in places]
    first, *others = [plan.record.identities[START] for plan in found]
    assert [*first["files"]] == ["adapter_model.safetensors"] and all(other == first for other in others)
    (tmp_path / "a file").write_text("")
    with pytest.raises(ValueError, match=r"there is no adapter folder .*a file, and no run"):
        sft.dry_run(run(world, tmp_path / "run", **{"lora.adapter": str(tmp_path / "a file")}))
