"""Fills the templates of four engines, and makes their commands to launch, watch, log and end a job; writes no file.

All engines run the same start-up script on every host. Its exit codes 0, 1 (an error) and 2 (a bad configuration) end
the job. After any other code, such as 75 (preempted), the script runs again and resumes the run.
"""

from __future__ import annotations

import json
import math
import shlex
import string
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from textwrap import indent

from tpu_kit.config.fields import nest
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.extras.pods.slice_job import OFFERS, SliceJob
from tpu_kit.machine.capacity import loading_bytes, model_bytes
from tpu_kit.machine.chips import GIB
from tpu_kit.machine.compatibility import REPOSITORY
from tpu_kit.machine.host import PROCESS_BYTES

RESTARTS = 20  # at most
_GRACE_SECONDS = 120  # between SIGTERM and SIGKILL, if the engine has a setting for it
_CPUS = 8  # requested per host, to tokenize, compile and load; a host with one chip has 24
_SPARE_MEMORY, _ENVIRONMENT = 8 * GIB, 20 * GIB  # for the page cache; for packages, rows, caches and logs
_PACKAGE = Path(__file__).parents[2]

Written = tuple[dict[str, str], dict[str, str]]
"""The texts of files by name, and the commands by purpose."""


class _Template(string.Template):
    delimiter = "@@"  # $ is bash's


def _fill(name: str, job: SliceJob, **values: object) -> str:
    """Returns the text of the file `name` in templates/ with the job's values and `values` in its @@ placeholders."""
    template = _Template((Path(__file__).parent / "templates" / name).read_text().removesuffix("\n"))
    common = {"name": job.name, "slice": job.slice, "hosts": job.topology.hosts, "image": job.image}
    return template.substitute(common, restarts=RESTARTS, **values)


def start_script(job: SliceJob, report: str = "", train: str = "exec {}") -> str:
    """Returns the script that every host runs: it installs the tested packages and the kit, and trains.

    The configuration is part of the text. The kit is installed from its repository, at the commit of this installation.

    Args:
        job: the job.
        report: "", or a line break and shell lines that run before the installation; gcloud's lines store the
            script's exit code.
        train: shell text in which the training command replaces {}. The default `exec` replaces the shell, so that
            SIGTERM reaches the run.
    """
    pins = (_PACKAGE / "requirements-tpu.txt").read_text().splitlines()
    values = {
        "packages": "\n".join(pin for pin in pins if pin and not pin.startswith("#")),
        "config": _config_text(job.config), "kit": REPOSITORY, "revision": _revision(), "report": report,
        "train": train.replace("{}", f"env/bin/python -m tpu_kit {job.config.recipe} config.yaml"),
    }  # fmt: skip
    return f"{_fill('start.sh', job, **values)}\n"


def _config_text(config: TrainConfig) -> str:
    """Returns YAML that reads back as an equal configuration, if possible with only the non-default parameters."""
    from tpu_kit.config.files import strict_yaml  # PyYAML is not needed for --help

    defaults, values = TrainConfig().flat_values(), config.flat_values()
    text = strict_yaml.dump(nest({name: value for name, value in values.items() if value != defaults[name]}))
    same = load_config(strict_yaml.load(text, "config.yaml") or {}) == config
    return (text if same else config.to_yaml()).rstrip()  # some defaults depend on other parameters


def _git(*arguments: str) -> str:
    """Returns the output of git in the folder of the kit; raises CalledProcessError if it fails."""
    command = ["git", "-C", str(_PACKAGE.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _revision() -> str:
    """Returns the commit of this installation, so that a restarted host runs the same code; "main" if unknown."""
    with suppress(OSError, subprocess.CalledProcessError, PackageNotFoundError):
        if (_PACKAGE.parent / ".git").exists():
            return _git("rev-parse", "HEAD")
        origin = json.loads(distribution("tpu_kit").read_text("direct_url.json") or "{}")
        return origin.get("vcs_info", {}).get("commit_id", "main")
    return "main"


def published() -> str:
    """Returns a text on the commit of the kit that the hosts install, and on local changes that are not in it.

    In a git checkout it says whether the commit is pushed, and how many tracked files of tpu_kit/ differ from it.
    Otherwise it is "COMMIT of REPOSITORY", with "main" for an unknown commit.
    """
    revision = _revision()
    if not (_PACKAGE.parent / ".git").exists() or revision == "main":
        return f"{revision} of {REPOSITORY}"
    with suppress(OSError, subprocess.CalledProcessError):
        branches = _git("branch", "--remotes", "--contains", revision).split()
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "tpu_kit").splitlines()
        where = f"pushed ({branches[0]})" if branches else "NOT PUSHED: push it, or the hosts cannot install it"
        edits = f"; {len(changed)} changed files are not in it: commit and push them" if changed else ""
        return f"commit {revision[:12]}, {where}{edits}"
    return f"commit {revision[:12]}"


def _requests(job: SliceJob) -> str:
    """Returns "cpu: N, memory: NGi, ephemeral-storage: NGi", which a container requests besides chips.

    A full node first evicts pods without requests. Memory holds the weights while they are loaded, and the libraries of
    every process; the disk holds the downloads.
    """
    processes = 1 if job.topology.hosts > 1 or job.config.launch.mesh else job.topology.chips_per_host
    size, saved = loading_bytes(job.config, sharded=processes == 1) or 0.0, model_bytes(job.config)[0] or 0.0
    memory = 1.25 * processes * (size + PROCESS_BYTES) + _SPARE_MEMORY
    disk = saved * (1 if job.config.lora.r else 6) + _ENVIRONMENT  # a checkpoint of all weights is staged: 5 times bf16
    return f"cpu: {_CPUS}, memory: {math.ceil(memory / GIB)}Gi, ephemeral-storage: {math.ceil(disk / GIB)}Gi"


def skypilot(job: SliceJob, folder: Path) -> Written:
    """Returns a task for `sky jobs launch` and commands; SkyPilot replaces a lost slice, and restarts preempted jobs.

    Other exit codes than 75, 134, 137, 139 and 143 end the job. The result is ({"task.yaml": text}, commands), with
    shell texts under "launch", "watch", "logs" and "end". The launch command expects task.yaml in `folder`.
    """
    names = ", ".join(f"{name}: null" for name in job.secrets)
    task = _fill(
        "task.yaml", job, script=indent(start_script(job), "  "), spot=str(job.spot).lower(),
        infra=f"gcp/{job.zone.rpartition('-')[0]}/{job.zone}" if job.zone else "gcp",
        secrets=f"secrets: {{{names}}}\n" if names else "",
    )  # fmt: skip
    options = "".join(f" --secret {name}" for name in job.secrets)
    return {"task.yaml": task}, {
        "launch": f"sky jobs launch --name {job.name}{options} {_quoted(folder, 'task.yaml')}",
        "watch": "sky jobs queue",
        "logs": f"sky jobs logs --name {job.name}",
        "end": f"sky jobs cancel --name {job.name}",
    }


def jobset(job: SliceJob, folder: Path) -> Written:
    """Returns a JobSet for a GKE cluster with a node pool of the slice, and commands; Kueue may queue it.

    The result is (texts by file name, shell texts by purpose). The files are "jobset.yaml" and, if the job has secrets,
    "secrets.env" with their names. The purposes are "secrets" (only with secrets; run it first), "launch", "watch",
    "logs" and "end". The commands expect the files in `folder`.
    """
    selector = '\n              cloud.google.com/gke-spot: "true"' if job.spot else ""
    selector += f"\n              topology.kubernetes.io/zone: {job.zone}" if job.zone else ""
    toleration = "\n            - {key: cloud.google.com/gke-spot, operator: Exists, effect: NoSchedule}"
    values = _fill(
        "jobset.yaml", job, grace=_GRACE_SECONDS, label=OFFERS[job.chip.name].label, shape=job.shape, selector=selector,
        tolerations=toleration if job.spot else "", chips=job.topology.chips_per_host, requests=_requests(job),
        script=indent(start_script(job).replace("$", "$$"), " " * 16),
    )  # fmt: skip
    create = f"kubectl create secret generic {job.name} --from-env-file={_quoted(folder, 'secrets.env')}"
    label = f"jobset.sigs.k8s.io/jobset-name={job.name}"
    return {"jobset.yaml": values, **_secret_names(job)}, {
        **({"secrets": create} if job.secrets else {}),
        "launch": f"kubectl apply -f {_quoted(folder, 'jobset.yaml')}",
        "watch": f"kubectl get pods -l {label} --watch",
        "logs": _pod_logs(job, label),
        "end": f"kubectl delete jobset {job.name}",
    }


def xpk(job: SliceJob, folder: Path) -> Written:
    """Returns a start-up script, which xpk's own JobSet runs as a single line, and commands.

    The result is (texts by file name, shell texts by purpose). The files are "start.sh" and, if the job has secrets,
    "secrets.env" with their names. The purposes are "cluster" (in which the user writes the cluster's name), "launch",
    "watch", "logs" and "end". The commands expect the files in `folder`.
    """
    of_cluster = f'--cluster "$CLUSTER" --zone {job.zone}'
    script = f"$(base64 < {_quoted(folder, 'start.sh')} | tr -d '\\n')"
    lines = [
        f"xpk workload create --workload {job.name} {of_cluster}",
        f"--tpu-type={job.slice} --docker-image={shlex.quote(job.image)}{' --spot' if job.spot else ''}",
        f"--max-restarts={RESTARTS} --restart-on-exit-codes=75",  # also on 42 and 127 to 255, its default
        f"--termination-grace-period-seconds={_GRACE_SECONDS}",
        *([f"--env-file {_quoted(folder, 'secrets.env')}"] if job.secrets else []),
        f"""--command "exec bash -c \\"\\$(echo {script} | base64 -d)\\"\"""",
    ]
    return {"start.sh": start_script(job), **_secret_names(job)}, {
        "cluster": "export CLUSTER=...",
        "launch": " \\\n  ".join(lines),
        "watch": f"xpk workload list {of_cluster} --filter-by-job {job.name}",
        "logs": _pod_logs(job, f"xpk.google.com/workload={job.name}"),
        "end": f"xpk workload delete --workload {job.name} {of_cluster}",
    }


def gcloud(job: SliceJob, folder: Path) -> Written:
    """Returns start.sh for TPU VMs, which reports exit codes, launch.sh, which replaces a lost slice, and commands.

    The result is (texts by file name, shell texts by purpose). The purposes are "store NAME" for every secret, which
    stores its value in Google's Secret Manager, "launch", "watch", "logs" and "end". The launch command expects both
    files in `folder`. Exit codes of hosts are written to exit-codes/ in the run's bucket folder.
    """
    at, resource = f"{job.name} --zone={job.zone}", "gcloud compute tpus queued-resources"
    codes = f"{job.config.remote}/exit-codes"
    report = _fill("gcloud-report.sh", job, codes=shlex.quote(codes))
    secrets = "".join(
        f"{name}=$(gcloud secrets versions access latest --secret={name})\nexport {name}\n" for name in job.secrets
    )
    start = start_script(job, report, _fill("gcloud-train.sh", job, secrets=secrets, train="{}"))
    launch = _fill(
        "launch.sh", job, resource=resource, at=at, objects=shlex.quote(f"{codes}/*"),
        spot=" --spot" if job.spot else "",
    )  # fmt: skip
    logs = shlex.quote("sudo journalctl --unit google-startup-scripts --no-pager")
    return {"start.sh": start, "launch.sh": f"{launch}\n"}, {
        **{
            f"store {name}": f'printenv {name} | tr -d "\\n" | gcloud secrets create {name} --data-file=-'
            for name in job.secrets
        },
        "launch": f"bash {_quoted(folder, 'launch.sh')}",
        "watch": f"{resource} describe {at}",
        "logs": f"gcloud compute tpus tpu-vm ssh {at} --worker=all --command={logs}",
        "end": f"{resource} delete {at} --force --quiet",
    }


ENGINES: Mapping[str, Callable[[SliceJob, Path], Written]] = {
    "skypilot": skypilot, "jobset": jobset, "xpk": xpk, "gcloud": gcloud,
}  # fmt: skip
"""The function of every engine, by its name in `--with`; arguments are the job and the folder in its commands."""


def _quoted(folder: Path, name: str) -> str:
    """Returns the path of a file, quoted for a shell."""
    return shlex.quote(str(folder / name))


def _pod_logs(job: SliceJob, label: str) -> str:
    """Returns kubectl's command for the logs of the pods with a label."""
    return f"kubectl logs -l {label} --prefix --tail=-1 --max-log-requests={job.topology.hosts}"


def _secret_names(job: SliceJob) -> dict[str, str]:
    """Returns secrets.env with the names of secrets, or {}; kubectl and xpk read the values from their environment."""
    return {"secrets.env": "".join(f"{name}\n" for name in job.secrets)} if job.secrets else {}
