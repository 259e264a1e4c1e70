"""The files and commands of four engines, checked by the tools themselves: SkyPilot, JobSet, xpk, gcloud, kubectl.

The Python packages are installed into an environment of their own. gcloud and kubectl are asked if they are installed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.child_processes import run_python
from tests.support.slice_jobs import SLICES, host, make_job, programs
from tpu_kit.extras.pods.engines import ENGINES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the installation may take minutes

PACKAGES = ("skypilot==0.14.1", "xpk==1.16.0", "kubeflow-trainer-api==2.3.0")
CRD = os.environ.get(  # JOBSET_CRD=file:///... where there is no network
    "JOBSET_CRD",
    "https://raw.githubusercontent.com/kubernetes-sigs/jobset/v0.9.1/config/components/crd/bases/"
    "jobset.x-k8s.io_jobsets.yaml",
)
ALL = [(name, spot) for name in SLICES for spot in (False, True)]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with SkyPilot, xpk and the models of JobSet's API."""
    folder = tmp_path_factory.mktemp("tools")
    run_python(["-m", "venv", str(folder / "env")])
    python = folder / "env" / "bin" / "python"
    for package in PACKAGES:  # one by one: they pin different versions of shared packages
        run_python(["-m", "pip", "install", "--quiet", package], executable=python, timeout=1500)
    return folder / "env" / "bin"


def written(engine: str, folder: Path) -> dict[tuple[str, bool], dict[str, str]]:
    """Writes the files for every slice, with and without Spot; returns the commands."""
    found = {}
    for name, spot in ALL:
        place = folder / f"{name}-{spot}"
        place.mkdir()
        files, commands = ENGINES[engine](make_job(engine, name, spot), place)
        for file, text in files.items():
            (place / file).write_text(text)
        found[name, spot] = commands
    return found


SKY = """
import json, sys
import click, sky, yaml
from sky.client.cli import command
for file in sys.argv[2:]:
    task = sky.Task.from_yaml(file)
    (one,) = task.resources
    given = sky.Task.from_yaml_config(yaml.safe_load(open(file)), secrets_overrides=[("HF_TOKEN", "x")])
    print(json.dumps([one.accelerators, one.accelerator_args, one.use_spot, one.zone, one.job_recovery, task.num_nodes,
                      [*given.secrets]]))
for words in json.loads(sys.argv[1]):
    group = command.cli.get_command(click.Context(command.cli), words[1])
    group.get_command(click.Context(group), words[2]).make_context(words[2], words[3:])
"""


def test_skypilot(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_the_secret")
    commands = written("skypilot", tmp_path)
    words = [one for texts in commands.values() for one in programs("\n".join(texts.values()))]
    files = [str(tmp_path / f"{name}-{spot}" / "task.yaml") for name, spot in ALL]
    environment = {"HOME": str(tmp_path), "HF_TOKEN": "hf_the_secret", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}

    def ask(files: list[str], expect: int = 0) -> subprocess.CompletedProcess[str]:
        arguments = ["-c", SKY, json.dumps(words), *files]
        return run_python(arguments, executable=tools / "python", env=environment, expect=expect)

    found = [json.loads(line) for line in ask(files).stdout.splitlines() if line.startswith("[{")]
    assert len(found) == len(ALL)
    for (name, spot), answer in zip(ALL, found, strict=True):
        accelerators, arguments, use_spot, zone, recovery, nodes, secrets = answer
        job = make_job("skypilot", name, spot)
        assert accelerators == {f"tpu-{name}": 1} and arguments["runtime_version"] == job.image
        assert (use_spot, zone, nodes, secrets) == (spot, job.zone, 1, ["HF_TOKEN"])
        assert 75 in recovery["recover_on_exit_codes"] and not {1, 2} & {*recovery["recover_on_exit_codes"]}
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(Path(files[0]).read_text().replace("job_recovery", "job_recovry"))
    assert "job_recovry" in ask([str(wrong)], expect=1).stderr
    words.append(["sky", "jobs", "launch", "--nmae", "x"])
    assert "No such option" in ask([], expect=1).stderr


ROUND_TRIP = """
import sys, yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet as JobSet
for file in sys.argv[1:]:
    given = yaml.safe_load(open(file))
    assert JobSet.from_dict(given).to_dict() == given, JobSet.from_dict(given).to_dict()
"""


def test_jobset_by_the_models_of_its_api(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are generated from JobSet's and Kubernetes' API; they drop unknown fields, and check types."""
    monkeypatch.setenv("HF_TOKEN", "hf_the_secret")
    written("jobset", tmp_path)
    files = [str(tmp_path / f"{name}-{spot}" / "jobset.yaml") for name, spot in ALL]
    run_python(["-c", ROUND_TRIP, *files], executable=tools / "python")
    wrong = tmp_path / "wrong.yaml"
    for right, misspelt in (("backoffLimit", "backofLimit"), ("maxRestarts: 20", "maxRestarts: twenty")):
        wrong.write_text(Path(files[0]).read_text().replace(right, misspelt))
        run_python(["-c", ROUND_TRIP, str(wrong)], executable=tools / "python", expect=1)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with no other keys than its own, as the API server refuses by `kubectl --validate=strict`."""
    for name in ("properties", "items"):
        inner = schema.get(name)
        for one in inner.values() if name == "properties" and inner else [inner] if inner else []:
            closed(one)
    if "properties" in schema:
        schema["additionalProperties"] = False
    if schema.pop("x-kubernetes-int-or-string", None):
        schema["type"] = ["integer", "string"]
    return schema


def test_jobset_by_its_resource_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_the_secret")
    try:
        with urllib.request.urlopen(CRD) as file:
            definition = yaml.load(file.read(), Loader=yaml.CSafeLoader)
    except urllib.error.URLError as error:
        pytest.skip(f"{CRD}: {error}; name a copy by JOBSET_CRD=file:///...")
    (version,) = [one for one in definition["spec"]["versions"] if one["name"] == "v1alpha2"]
    schema = version["schema"]["openAPIV3Schema"]
    del schema["properties"]["metadata"]  # the server checks its own result
    check = jsonschema.Draft202012Validator(closed(schema))
    written("jobset", tmp_path)
    for name, spot in ALL:
        values = yaml.safe_load((tmp_path / f"{name}-{spot}" / "jobset.yaml").read_text())
        del values["metadata"]
        check.validate(values)
    values["spec"]["failurePolicy"]["rules"][0]["action"] = "FailJobset"
    values["spec"]["replicatedJobs"][0]["template"]["spec"]["completion"] = 4
    assert len([*check.iter_errors(values)]) == 2


def test_xpk(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """xpk's dry run accepts the commands, and its JobSet asks for the same hosts as ours."""
    monkeypatch.setenv("HF_TOKEN", "hf_the_secret")
    (tmp_path / "host").mkdir()
    environment = host(tmp_path / "host") | {"HF_TOKEN": "hf_the_secret", "CLUSTER": "mine", "MANIFEST": ""}
    (tmp_path / "host" / "code").write_text("75")
    more = '--dry-run --skip-validation --project=p ${MANIFEST:+--output-manifest-file="$MANIFEST"}'
    dry = f'xpk() {{ "$XPK" "$@" {more}; }}\n'
    for (name, spot), commands in written("xpk", tmp_path).items():
        environment |= {"XPK": str(tools / "xpk"), "MANIFEST": str(tmp_path / f"{name}-{spot}.yaml")}
        for what in ("launch", "watch", "end") if name == "v4-32" else ["launch"]:
            done = subprocess.run(
                ["bash", "-c", dry + commands[what]], env=environment, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, (what, done.stdout, done.stderr)
            environment["MANIFEST"] = ""
        theirs = yaml.safe_load((tmp_path / f"{name}-{spot}.yaml").read_text())
        ours = yaml.safe_load(ENGINES["jobset"](make_job("jobset", name, spot), tmp_path)[0]["jobset.yaml"])
        jobs = [one["spec"]["replicatedJobs"][0]["template"]["spec"] for one in (ours, theirs)]
        pods = [one["template"]["spec"] for one in jobs]
        for key in ("parallelism", "completions", "backoffLimit"):
            assert jobs[0][key] == jobs[1][key]
        for label in ("cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"):
            assert pods[0]["nodeSelector"][label] == pods[1]["nodeSelector"][label]
        assert pods[0]["containers"][0]["resources"]["limits"] == pods[1]["containers"][0]["resources"]["limits"]
        (values,) = [one["onExitCodes"]["values"] for one in jobs[1]["podFailurePolicy"]["rules"]]
        assert {75, 134, 137, 139, 143} <= {*values} and not {0, 1, 2} & {*values}
        assert {"name": "HF_TOKEN", "value": "hf_the_secret"} in pods[1]["containers"][0]["env"]
    run = pods[1]["containers"][0]["command"]
    assert subprocess.run(run, env=environment, stdout=subprocess.DEVNULL, timeout=100).returncode == 75
    assert (tmp_path / "host" / "calls").read_text() == "-m tpu_kit train config.yaml\n"
    wrong = dry + commands["launch"].replace("v5p-64", "v5p-63")
    done = subprocess.run(["bash", "-c", wrong], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode and "v5p-63" in done.stdout + done.stderr


def test_gcloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed")
    monkeypatch.setenv("HF_TOKEN", "hf_the_secret")
    found = set()
    for place, commands in written("gcloud", tmp_path).items():
        scripts = [(tmp_path / "{}-{}".format(*place) / file).read_text() for file in ("launch.sh", "start.sh")]
        calls = programs("\n".join([*commands.values(), *scripts]))
        found |= {shlex.join(words) for words in calls if words[0] == "gcloud"}
    assert len(found) > 10 * 3
    wrong = "gcloud compute tpus queued-resources create x --zone=a --sopt --node-id=x --runtime-version=r"
    (tmp_path / "commands.json").write_text(json.dumps([{"command_string": one} for one in (*sorted(found), wrong)]))
    lint = ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={tmp_path / 'commands.json'}"]
    answers = json.loads(subprocess.run(lint, capture_output=True, text=True, check=True, timeout=300).stdout)
    *good, bad = [(one["success"], one["error_message"], one["command_string"]) for one in answers]
    assert len(good) == len(found) and all(success for success, _, _ in good), [one for one in good if not one[0]]
    assert not bad[0] and "--sopt" in bad[1]


def test_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    monkeypatch.setenv("HF_TOKEN", "hf_the_secret")
    commands = written("jobset", tmp_path)["v4-32", True]
    secret = shlex.split(commands["secrets"])
    done = subprocess.run([*secret, "--dry-run=client", "-o", "yaml"], capture_output=True, text=True, check=True)
    assert yaml.safe_load(done.stdout)["data"] == {"HF_TOKEN": "aGZfdGhlX3NlY3JldA=="}
    for words in programs("\n".join(commands[what] for what in ("launch", "watch", "logs", "end"))):
        text = subprocess.run([*words[:2], "--help"], capture_output=True, text=True, check=True).stdout
        for flag in (word.partition("=")[0] for word in words if word.startswith("-")):
            assert f"{flag}=" in text or f"{flag} " in text or f"{flag}, " in text, (words, flag)
