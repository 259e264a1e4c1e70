"""The files and commands of four engines, against recorded schemas; and their scripts, run by bash."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.child_processes import REPOSITORY
from tests.support.slice_jobs import SLICES, VALUES, host, kubernetes_expands, make_job, programs, stand_in
from tpu_kit.cli import main
from tpu_kit.config.files import strict_yaml
from tpu_kit.config.loader import ConfigError, load_config
from tpu_kit.extras.pods import engines, report
from tpu_kit.extras.pods.engines import ENGINES, RESTARTS, start_script
from tpu_kit.extras.pods.slice_job import OFFERS, check_job
from tpu_kit.machine.compatibility import REPOSITORY as KIT

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
PLACES = ["data.source", "data.eval_source", "lora.adapter", "model.name", "distill.teacher", "distill.files"]


@pytest.mark.parametrize("spot", [False, True])
@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("engine", ENGINES)
def test_files_and_commands_are_of_the_recorded_form(
    engine: str, name: str, spot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_the_secret")
    monkeypatch.setenv("WANDB_API_KEY", "wandb_the_secret")
    job = make_job(engine, name, spot)
    hosts, chips, shape, zone = SLICES[name]
    assert (job.topology.hosts, job.topology.chips_per_host, job.shape) == (hosts, chips, shape)
    files, commands = ENGINES[engine](job, Path("a folder"))
    everything = "\n".join([*files.values(), *commands.values()])
    assert "_the_secret" not in everything and "HF_TOKEN" in everything and "WANDB_API_KEY" in everything
    assert {"launch", "watch", "logs", "end"} <= commands.keys()
    calls = [*programs("\n".join(commands.values())), *programs(files.get("launch.sh", ""))]
    assert len(calls) >= (7 if engine == "gcloud" else 4)
    for words in calls:
        (known,) = [one for one in RECORDED["flags"] if f"{' '.join(words)} ".startswith(f"{one} ")]
        flags = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
        assert flags <= {*RECORDED["flags"][known]}, (words, flags)
    if engine in ("skypilot", "jobset"):
        (file,) = [file for file in files if file.endswith(".yaml")]
        jsonschema.validate(values := yaml.safe_load(files[file]), RECORDED[engine])
    if engine == "skypilot":
        resources = values["resources"]
        assert resources["accelerators"] == f"tpu-{name}:1" and resources["use_spot"] is spot
        assert resources["infra"] == f"gcp/{zone[:-2]}/{zone}" and values["run"] == start_script(job)
        assert values["secrets"] == {"HF_TOKEN": None, "WANDB_API_KEY": None}
    elif engine == "jobset":
        of_job = values["spec"]["replicatedJobs"][0]["template"]["spec"]
        pod = of_job["template"]["spec"]
        assert of_job["completions"] == of_job["parallelism"] == hosts
        assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == shape
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"google.com/tpu": chips}
        expanded = [kubernetes_expands(one, {"HF_TOKEN": "hf_the_secret"}) for one in container["command"]]
        assert expanded == ["bash", "-c", start_script(job)]
        assert container["envFrom"] == [{"secretRef": {"name": "my-run", "optional": True}}]
        assert ("cloud.google.com/gke-spot" in pod["nodeSelector"]) is spot
    elif engine == "xpk":
        assert RECORDED["xpk"][name] == [shape, hosts]
        assert (f"--tpu-type={name}" in commands["launch"], "--spot" in commands["launch"]) == (True, spot)
    else:
        assert (f"--accelerator-type={name}" in files["launch.sh"], "--spot" in files["launch.sh"]) == (True, spot)


def test_a_misspelt_key_is_not_of_the_recorded_form() -> None:
    for engine, key in (("skypilot", "resources"), ("jobset", "spec")):
        files, _ = ENGINES[engine](make_job(engine), Path())
        values = yaml.safe_load(next(iter(files.values())))
        values[key]["ressource"] = 1
        with pytest.raises(jsonschema.ValidationError, match="ressource"):
            jsonschema.validate(values, RECORDED[engine])


def test_errors_end_the_job_and_other_exit_codes_restart_it() -> None:
    files, _ = ENGINES["jobset"](make_job("jobset"), Path())
    spec = yaml.safe_load(files["jobset.yaml"])["spec"]
    of_job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = of_job["podFailurePolicy"]["rules"]
    container = of_job["template"]["spec"]["containers"][0]["name"]
    assert rule == {
        "action": "FailJob", "onExitCodes": {"containerName": container, "operator": "In", "values": [1, 2]},
    }  # fmt: skip
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet" and of_job["backoffLimit"] == 0
    assert spec["failurePolicy"]["maxRestarts"] == RESTARTS
    files, _ = ENGINES["skypilot"](make_job("skypilot"), Path())
    recovery = yaml.safe_load(files["task.yaml"])["resources"]["job_recovery"]
    assert recovery == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75, 134, 137, 139, 143]}


def test_the_hosts_install_this_kit_from_its_repository() -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    files, _ = ENGINES["xpk"](make_job("xpk"), Path())
    revision = head.stdout.strip() or "main"
    assert f"tpu_kit @ {KIT}/archive/{revision}.tar.gz" in files["start.sh"]


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--slice", "v5litepod-60"], ["--slice: there is no v5litepod-60: the number counts chips. Nearest: "
                                       "v5litepod-16, v5litepod-32, v5litepod-64."]),
        (["--slice", "v5litpod-64"], ["--slice: unknown chip 'v5litpod': did you mean v5e"]),
        (["--slice", "v4-31"], ["the number counts TensorCores, 2 a chip. Nearest: v4-8, v4-16, v4-32"]),
        (["--slice", "v7x-8"], ["--slice: v7x-8: files are written for v4, v5e, v5p, v6e"]),
        (["--slice", "v4-4096"], ["--slice: the topology of v4-4096 is not known; use v4-8, v4-16, v4-32"]),
        (["--zone", "us-west-4a"], ["--zone: us-west-4a has no v5e; did you mean us-west4-a? It is offered in us-"]),
        (["--zone", "us-central2-b"], ["--zone: us-central2-b has no v5e; did you mean us-central1-a? "]),
        (["--with", "gcloud"], ["--zone: gcloud needs a zone; v5e is offered in us-central1-a, us-east1-b"]),
        (["--with", "xpk", "--slice", "v4-8"], ["--with: xpk needs several hosts, but v4-8 has one; use skypilot"]),
        (["--image", "v2-alpha-tpuv5lite"], ["--image: v2-alpha-tpuv5lite: the hosts need the software version "
                                             "v2-alpha-tpuv5-lite of TPU VMs; leave --image out"]),
        (["--with", "gcloud", "--zone", "us-west4-a", "--image", "python:3.12"], ["--image: python:3.12: the hosts"]),
        (["--with", "jobset", "--image", "My Image"], ["--image: My Image is not the name of a container image; write "
                                                       "it with its tag, such as python:3.12"]),
        (["--with", "jobset", "--image", "us-docker.pkg.dev/p/r/kit"], ["is not the name of a container image"]),
        (["output_dir=runs/x", "run_name=My Run_3"],
         ["2 problems", "run_name: 'My Run_3': engines take at most 40 lowercase letters, digits and dashes, a letter "
          "first; set run_name=my-run-3", "output_dir: 'runs/x': the hosts' disks are lost with the hosts, so a "
          "restarted host could not resume; set output_dir=gs://BUCKET/my-run-3"]),
        (["resume=never"],
         ["checkpoint.resume: 'never': a restarted host would begin at step 0, and the second restart would delete the "
          "checkpoints; set resume=auto"]),
        (["device_type=xla-cpu"], ["launch.device_type: 'xla-cpu': the hosts have TPUs; set device_type=tpu"]),
        (["source=my_rows.jsonl", "name=./model"],
         ["data.source: 'my_rows.jsonl' is on this machine, but the hosts cannot read it; copy it (gcloud storage cp -r"
          " ... gs://bucket/my-run/) and give its gs:// address",
          "model.name: './model' is on this machine, but the hosts cannot read it; give its name on the Hugging Face"]),
        (["objective=mine:loss"], ["optim.objective: the hosts do not have the module of mine:loss; use --with job"]),
        (["generate_rows=4"], ["tracking.generate_rows: 4 on a TPU slice of several hosts: answers are generated on"]),
        (["num_generations=4"], ["rl: the files run `train` or `dpo`, but grpo runs only on one host; start it"]),
        (["teacher=Qwen/Qwen3-8B", "on_policy=true"],
         ["distill.on_policy: the files run `train` or `dpo`, but distill.on_policy runs only on one host"]),
        (["wandb=online"], ["tracking.wandb: online needs WANDB_API_KEY on the hosts; set it in this environment"]),
        (["--with", "skypilott"], ["argument --with: invalid choice: 'skypilott' (choose from"]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(
    arguments: list[str], texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    Path("my.yaml").write_text(json.dumps(VALUES))
    assert main(["pod", "my.yaml", "--slice", "v5litepod-64", "--with", "skypilot", *arguments]) == 2
    printed = capsys.readouterr()
    assert not printed.out and [*Path().iterdir()] == [Path("my.yaml")]
    for text in texts:
        assert text in printed.err, printed.err


@pytest.mark.parametrize("image", ["python:3.12", "europe-docker.pkg.dev/a/b/kit:1.2_3", f"a/b@sha256:{'0' * 64}"])
def test_images_with_the_users_own_modules(image: str) -> None:
    config = load_config(VALUES, ["objective=mine:loss"])
    assert check_job(config, "v4-32", "jobset", None, image, False).image == image


def test_zones_and_images_of_each_chip_are_accepted() -> None:
    for chip, name in {"v4": "v4-32", "v5e": "v5litepod-16", "v5p": "v5p-64", "v6e": "v6e-32"}.items():
        for zone in OFFERS[chip].zones:
            assert re.fullmatch(r"[a-z]+-[a-z]+\d-(ai\d)?[a-f]", zone)
            job = check_job(load_config(VALUES), name, "gcloud", zone, OFFERS[chip].runtime, True)
            assert (job.chip.name, job.zone) == (chip, zone)


# ------------------------------------------------------------------------------------------------ the scripts, executed


@pytest.mark.parametrize("code", [0, 75, 1])
def test_a_host_reads_this_configuration_and_ends_with_the_code_of_training(code: int, tmp_path: Path) -> None:
    files, _ = ENGINES["xpk"](make_job("xpk"), tmp_path)
    (tmp_path / "code").write_text(str(code))
    done = subprocess.run(["bash", "-c", files["start.sh"]], env=host(tmp_path), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    assert (tmp_path / "calls").read_text() == "-m tpu_kit train config.yaml\n"
    assert load_config(tmp_path / "tpu_kit" / "config.yaml") == load_config(VALUES)
    pins = (tmp_path / "tpu_kit" / "requirements.txt").read_text()
    assert "torch_xla==2.9.0\n" in pins and "gcsfs==" in pins and "#" not in pins


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_xpk_runs_the_script_and_hands_on_the_signal(tmp_path: Path) -> None:
    """As xpk's container does: the command in a subshell in the background, to which it sends SIGTERM."""
    files, commands = ENGINES["xpk"](make_job("xpk"), tmp_path / "a folder")
    (tmp_path / "a folder").mkdir()
    for name, text in files.items():
        (tmp_path / "a folder" / name).write_text(text)
    path = stand_in(tmp_path, "xpk", 'for one; do last="$one"; done; printf %s "$last" > "$GIVEN"; echo "$@"\n')
    environment = host(tmp_path, SIGNAL="1", CLUSTER="mine") | {"PATH": path, "GIVEN": str(tmp_path / "given")}
    printed = subprocess.run(["bash", "-c", commands["launch"]], env=environment, capture_output=True, text=True)
    assert "--cluster mine" in printed.stdout and not printed.stderr
    command = kubernetes_expands((tmp_path / "given").read_text(), {"HF_TOKEN": "hf_the_secret"})
    assert "\n" not in command
    outer = f"trap 'kill -TERM $!' TERM; ({command}) & PID=$!; wait $PID; wait $PID; exit $?"
    with subprocess.Popen(["bash", "-c", outer], env=environment) as process:
        wait_for(tmp_path / "calls.ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75


GCLOUD = """
echo "$@" >> "$CALLS"
case "$*" in
  *"queued-resources create"*) touch "$ROOT/slice"; cp /dev/null "$ROOT/polls";;
  *"queued-resources delete"*) rm "$ROOT/slice";;
  *"queued-resources describe"*)
    [ -e "$ROOT/slice" ] || exit 1
    case "$*" in *format*) echo ACTIVE; echo >> "$ROOT/polls";; esac;;
  *"storage cp -"*) cat > "$ROOT/code-${!#: -1}";;
  *"storage rm"*) rm -f "$ROOT"/code-*;;
  *"storage cat"*) bash -c "$HOSTS";;
esac
"""


@pytest.mark.parametrize(
    ("hosts", "code", "slices"),
    [
        ("yes 0 | head -4", 0, 1),  # all hosts have ended well
        ("yes 0 | head -$(wc -l < $ROOT/polls)", 0, 1),  # one after the other
        ("echo 0; echo 1", 1, 1),  # one host fails, while others may hang
        ("echo 2", 1, 1),
        ("[ $(grep -c create $CALLS) = 1 ] && echo 75 || yes 0 | head -4", 0, 2),  # one failed try, then ended
        ("echo 137", 75, RESTARTS + 1),
    ],
)  # fmt: skip
def test_gcloud_keeps_the_slice_until_all_hosts_have_ended(hosts: str, code: int, slices: int, tmp_path: Path) -> None:
    files, _ = ENGINES["gcloud"](make_job("gcloud", "v4-32"), tmp_path)
    (tmp_path / "launch.sh").write_text(files["launch.sh"])
    path = stand_in(tmp_path, "gcloud", GCLOUD)
    environment = {"PATH": path, "ROOT": str(tmp_path), "CALLS": str(tmp_path / "calls"), "HOSTS": hosts}
    command = ["bash", str(tmp_path / "launch.sh")]
    done = subprocess.run(command, env=environment | {"POLL_SECONDS": "0"}, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stdout + done.stderr
    calls = (tmp_path / "calls").read_text()
    assert calls.count("queued-resources create") == calls.count("queued-resources delete") == slices
    assert not (tmp_path / "slice").exists(), "the slice would cost on"


@pytest.mark.parametrize("lost", ["SUSPENDED", "FAILED"])
def test_gcloud_asks_again_for_a_slice_that_was_taken_away(lost: str, tmp_path: Path) -> None:
    files, _ = ENGINES["gcloud"](make_job("gcloud", "v4-32", spot=True), tmp_path)
    (tmp_path / "launch.sh").write_text(files["launch.sh"])
    text = GCLOUD.replace("echo ACTIVE;", f"[ $(grep -c create $CALLS) = 1 ] && echo {lost} || echo ACTIVE;")
    hosts = "[ $(grep -c create $CALLS) = 1 ] && yes 0 | head -2 || yes 0 | head -4"  # two had ended before the loss
    environment = {"PATH": stand_in(tmp_path, "gcloud", text), "ROOT": str(tmp_path), "CALLS": str(tmp_path / "calls")}
    done = subprocess.run(
        ["bash", str(tmp_path / "launch.sh")], env=environment | {"POLL_SECONDS": "0", "HOSTS": hosts}, timeout=100
    )
    assert done.returncode == 0
    assert (tmp_path / "calls").read_text().count("queued-resources create") == 2


@pytest.mark.parametrize(("codes", "runs"), [("0", 1), ("1", 1), ("137", RESTARTS + 1)])
def test_a_host_of_gcloud_tries_again_and_leaves_its_exit_code(
    codes: str, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_the_secret")
    files, _ = ENGINES["gcloud"](make_job("gcloud"), tmp_path)
    (tmp_path / "code").write_text(codes)
    environment = host(tmp_path)
    text = """case "$*" in *secrets*) echo the-token;; *"storage cp -"*) cat > "$HOME/uploaded"; echo "$@";; esac"""
    environment["PATH"] = stand_in(tmp_path, "gcloud", text)
    done = subprocess.run(["bash", "-c", files["start.sh"]], env=environment, capture_output=True, text=True)
    assert done.returncode == (75 if codes == "137" else int(codes)), done.stderr
    assert (
        tmp_path / "uploaded"
    ).read_text() == f"{done.returncode}\n" and "gs://bucket/my-run/exit-codes/" in done.stdout
    assert (tmp_path / "calls").read_text().count("tpu_kit train") == runs


def test_a_host_of_gcloud_that_is_shut_down_is_not_at_its_end(tmp_path: Path) -> None:
    files, _ = ENGINES["gcloud"](make_job("gcloud", run_name="abcd"), tmp_path)
    environment = host(tmp_path, SIGNAL="1")
    environment["PATH"] = stand_in(tmp_path, "gcloud", """cat > "$HOME/uploaded" """)
    with subprocess.Popen(["bash", "-c", files["start.sh"]], env=environment, start_new_session=True) as process:
        wait_for(tmp_path / "calls.ready")
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) in (143, -signal.SIGTERM)
    assert not (tmp_path / "uploaded").exists()


def test_a_host_of_gcloud_that_cannot_install_says_so(tmp_path: Path) -> None:
    files, _ = ENGINES["gcloud"](make_job("gcloud"), tmp_path)
    environment = host(tmp_path)
    (tmp_path / "tpu_kit" / "uv" / "bin" / "uv").write_text("#!/bin/bash\nexit 2\n")
    environment["PATH"] = stand_in(tmp_path, "gcloud", """cat > "$HOME/uploaded" """)
    done = subprocess.run(["bash", "-c", files["start.sh"]], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and (tmp_path / "uploaded").read_text() == "2\n"
    assert not (tmp_path / "calls").exists()


# ----------------------------------------------------------------------------------------------------- command and page


def transcripts() -> list[tuple[str, str]]:
    """The commands `$ ...` of the page, each with the output below it."""
    page = (REPOSITORY / "tpu_kit" / "extras" / "pods" / "README.md").read_text()
    blocks = re.findall(r"^```\n\$ (.*?)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [(command, printed) for command, printed in blocks]


def without_figures(text: str) -> str:
    """The text without the planner's and the price list's figures, which have their own tests."""
    return re.sub(r"^estimate: .*", lambda line: re.sub(r"[\d.]+", "#", line[0]), text.strip(), flags=re.MULTILINE)


@pytest.mark.parametrize(("command", "printed"), transcripts())
def test_the_page_shows_what_the_commands_print(
    command: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "tpu_kit" / "extras" / "pods" / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(report, "published", lambda: "commit 1a2b3c4d5e6f, pushed (origin/main)")
    (tmp_path / "my.yaml").write_text(re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0])
    status = main(shlex.split(command)[3:])
    found = capsys.readouterr()
    assert without_figures(f"{found.out}{found.err}") == without_figures(printed)
    assert status == (0 if found.out else 2)
    if found.out:
        folder = Path(re.search(r" to (pods/\S+);", found.out)[1])
        assert folder.name == re.search(r"--with (\w+)", command)[1]
        written = re.search(r"wrote (.*) to ", found.out)[1].split(", ")
        assert sorted(written) == sorted(path.name for path in folder.iterdir())
        assert (folder / "commands.txt").read_text() in found.out


def test_what_the_planner_says_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for changes, text in (
        (["name=Qwen/Qwen2.5-7B-Instruct", "lora.r=0", "mesh=data=16"], "estimate: DOES NOT FIT: it takes "),
        (["max_steps=null"], "not known for the run: data.source=gs://bucket/rows.jsonl is in an object store"),
        (["name=nobody/nothing"], "(list price of us-central); not known for the run: "),
    ):
        Path("my.yaml").write_text(json.dumps(VALUES))
        assert main(["pod", "my.yaml", "--slice", "v5litepod-16", "--with", "jobset", *changes]) == 0
        printed = capsys.readouterr().out
        assert text in printed and "estimate: $19.20 an hour (list price of us-central)" in printed, printed
    Path("file").write_text("")
    arguments = ["my.yaml", "--slice", "v5litepod-16", "--with", "jobset", "--out", "file/folder"]
    assert main(["pod", *arguments]) == 1
    assert "--out file/folder: cannot be written (Not a directory); name another folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", PLACES)
def test_each_name_of_a_place_is_checked(name: str) -> None:
    teacher = {"distill.teacher": "Qwen/Qwen2.5-7B-Instruct"} if name.startswith("distill.") else {}
    with pytest.raises(ConfigError, match=f"{name}: './here' is on this machine"):
        check_job(load_config(VALUES, teacher | {name: "./here"}), "v4-32", "skypilot", None, None, False)


def test_what_a_host_asks_for_and_installs(tmp_path: Path) -> None:
    def requests(*changes: str) -> dict[str, Any]:
        files, _ = ENGINES["jobset"](
            check_job(load_config(VALUES, changes), "v4-32", "jobset", None, None, False), tmp_path
        )
        of_job = yaml.safe_load(files["jobset.yaml"])["spec"]["replicatedJobs"][0]["template"]["spec"]
        resources = of_job["template"]["spec"]["containers"][0]["resources"]
        assert resources["limits"] == {"google.com/tpu": 4}
        return {name: int(str(value).removesuffix("Gi")) for name, value in resources["requests"].items()}

    small = requests("name=Qwen/Qwen2.5-0.5B-Instruct")
    large = requests("name=Qwen/Qwen2.5-7B-Instruct")
    whole = requests("name=Qwen/Qwen2.5-7B-Instruct", "lora.r=0")
    assert small["google.com/tpu"] == 4 and small["cpu"] == 8
    assert (
        10 <= small["memory"] <= large["memory"] < 64 and 20 < small["ephemeral-storage"] < large["ephemeral-storage"]
    )
    assert large["ephemeral-storage"] + 60 < whole["ephemeral-storage"] < 200
    script = start_script(make_job("xpk"))
    assert " --torch-backend cpu -r requirements.txt" in script
    text = re.search(r"^cat > config.yaml <<'END_OF_CONFIG'\n(.*?)^END_OF_CONFIG", script, re.MULTILINE | re.DOTALL)[1]
    assert len(text.splitlines()) < 20 and load_config(yaml.safe_load(text)) == load_config(VALUES)


@pytest.mark.parametrize(
    "changes",
    [
        ["objective=mine:loss"],
        ["objective=mine:loss", "max_loss_rise=5.0"],
        ["columns={question: q}"],
        ["layers=1:2", "teacher=a/b", "hidden_weight=1"],
    ],
)
def test_the_parameters_that_differ_are_the_run(changes: list[str]) -> None:
    config = load_config(VALUES, changes)
    assert load_config(strict_yaml.load(engines._config_text(config), "config.yaml")) == config


def test_prices_are_of_the_zone() -> None:
    def rate(zone: str | None, spot: bool) -> float | None:
        return check_job(load_config(VALUES), "v6e-32", "skypilot", zone, None, spot).rate

    assert (rate("us-east5-b", True), rate("us-central1-a", True), rate(None, True)) == (1.215, 0.54421, 0.54421)
    assert (rate("asia-south1-b", False), rate("southamerica-west1-a", True)) == (3.24, None)
    for offer in OFFERS.values():
        assert {zone.rpartition("-")[0] for zone in offer.zones} == offer.prices.keys()


def test_whether_the_commit_was_pushed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(clone), *identity, *arguments], check=True, capture_output=True)

    clone, remote = tmp_path / "clone", tmp_path / "remote"
    (clone / "tpu_kit").mkdir(parents=True)
    remote.mkdir()
    subprocess.run(["git", "init", "--quiet", "--bare", str(remote)], check=True)
    monkeypatch.setattr(engines, "_PACKAGE", clone / "tpu_kit")
    assert engines.published().startswith("main of http")
    git("init", "--quiet", "-b", "main")
    (clone / "tpu_kit/a.py").touch()
    git("add", "-A")
    git("commit", "--quiet", "-m", "first")
    git("remote", "add", "origin", str(remote))
    assert engines.published().endswith(", NOT PUSHED: push it, or the hosts cannot install it")
    git("push", "--quiet", "origin", "main")
    assert engines.published().endswith(", pushed (origin/main)")
    (clone / "tpu_kit/a.py").write_text("changed")
    assert engines.published().endswith("pushed (origin/main); 1 changed files are not in it: commit and push them")


def test_another_name_of_a_slice_is_written_as_the_provider_does() -> None:
    job = check_job(load_config(VALUES), "v5e-64", "skypilot", None, None, False)
    assert "accelerators: tpu-v5litepod-64:1\n" in ENGINES["skypilot"](job, Path())[0]["task.yaml"]


def test_a_file_of_pairs_is_trained_by_dpo() -> None:
    files, _ = ENGINES["xpk"](make_job("xpk", reference="step"), Path())
    assert files["start.sh"].endswith("exec env/bin/python -m tpu_kit dpo config.yaml\n")
    with pytest.raises(ConfigError, match=r"preference.reference: 'start' on a TPU slice of several hosts: .* step"):
        make_job("xpk", pref_beta=0.2)


def test_a_run_with_a_teacher_is_distilled() -> None:
    files, _ = ENGINES["xpk"](make_job("xpk", teacher="Qwen/Qwen2.5-7B-Instruct"), Path())
    assert files["start.sh"].endswith("exec env/bin/python -m tpu_kit distill config.yaml\n")
