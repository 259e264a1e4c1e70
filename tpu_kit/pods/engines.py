"""Writes the files of four engines, and the commands to launch a job, to watch it, to fetch its logs and to end it.

All engines run the same start-up script on each host, and treat its exit code alike: 0, 1 (an error) and 2 (a bad
configuration) end the job, and every other code, such as 75 (preempted), runs the script again, which resumes the run.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from textwrap import indent

from tpu_kit.pods.slice_job import OFFERS, SliceJob

KIT = "https://github.com/tpu-kit/tpu_kit"
RESTARTS = 20
"""The most restarts of a job whose hosts end with neither 0, 1 nor 2."""
_GRACE_SECONDS = 120  # until a host that is told to stop is killed, where the engine lets one choose
_QUEUE = "multislice-queue"  # the LocalQueue of Kueue, as xpk and Google's tutorials name it
_KILLED = (134, 137, 139, 143)  # SIGABRT, of XLA; SIGKILL, as of a lost node; SIGSEGV; SIGTERM
_PREEMPTED = 75

Written = tuple[dict[str, str], dict[str, str]]
"""Name to text of the files; and what a command does to the command."""


def start_script(job: SliceJob) -> str:
    """The script that each host runs: it installs the tested packages and the kit, and becomes the training process.

    A second run finds the installed packages. Since the script becomes that process, a SIGTERM reaches it.
    """
    pins = (Path(__file__).parents[1] / "requirements-tpu.txt").read_text().splitlines()
    packages = "\n".join(pin for pin in pins if pin and not pin.startswith("#"))
    command = "distill" if job.config.distill.teacher else "train"
    return f"""\
#!/bin/bash
# Trains {job.name} on {job.slice}: each of {job.topology.hosts} hosts runs this. Written by `python -m tpu_kit pod`.
set -euo pipefail
export HOME="${{HOME:-/root}}"
mkdir -p "$HOME/tpu_kit"
cd "$HOME/tpu_kit"
cat > requirements.txt <<'END_OF_REQUIREMENTS'
{packages}
END_OF_REQUIREMENTS
cat > config.yaml <<'END_OF_CONFIG'
{job.config.to_yaml().rstrip()}
END_OF_CONFIG
[ -x uv/bin/uv ] || python3 -m pip install --quiet --target uv uv
[ -x env/bin/python ] || uv/bin/uv venv --quiet --seed --python 3.12 env
uv/bin/uv pip install --quiet --python env/bin/python -r requirements.txt
uv/bin/uv pip install --quiet --python env/bin/python --no-deps 'tpu_kit @ {KIT}/archive/{_revision()}.tar.gz'
exec env/bin/python -m tpu_kit {command} config.yaml
"""


def _revision() -> str:
    """The commit that this installation of the kit has, so that a restarted host runs the same code; else "main"."""
    clone = Path(__file__).parents[2]
    with suppress(OSError, subprocess.CalledProcessError, PackageNotFoundError):
        if (clone / ".git").exists():
            command = ["git", "-C", str(clone), "rev-parse", "HEAD"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        origin = json.loads(distribution("tpu_kit").read_text("direct_url.json") or "{}")
        return origin.get("vcs_info", {}).get("commit_id", "main")
    return "main"


def skypilot(job: SliceJob, folder: Path) -> Written:
    """A task for `sky jobs launch`: SkyPilot replaces a Spot slice that it lost, and restarts by exit code."""
    where = f"gcp/{job.zone.rpartition('-')[0]}/{job.zone}" if job.zone else "gcp"
    secrets = f"secrets: {{{', '.join(f'{name}: null' for name in job.secrets)}}}\n" if job.secrets else ""
    task = f"""\
name: {job.name}
num_nodes: 1  # a slice is one node, and each of its hosts runs the script
resources:
  infra: {where}
  accelerators: tpu-{job.slice}:1
  accelerator_args: {{runtime_version: {job.image}}}
  use_spot: {"true" if job.spot else "false"}
  job_recovery: {{max_restarts_on_errors: 0, recover_on_exit_codes: {[_PREEMPTED, *_KILLED]}}}
{secrets}run: |
{indent(start_script(job), "  ")}"""
    given = "".join(f" --secret {name}" for name in job.secrets)
    return {"task.yaml": task}, {
        "launch": f"sky jobs launch --name {job.name}{given} {_quoted(folder, 'task.yaml')}",
        "watch": "sky jobs queue",
        "logs": f"sky jobs logs --name {job.name}",
        "end": f"sky jobs cancel --name {job.name}",
    }


def jobset(job: SliceJob, folder: Path) -> Written:
    """A JobSet for a GKE cluster whose node pool has the slice; Kueue may queue it."""
    selector = tolerations = ""
    if job.spot:
        selector += '\n              cloud.google.com/gke-spot: "true"'
        tolerations = "\n            - {key: cloud.google.com/gke-spot, operator: Exists, effect: NoSchedule}"
    if job.zone:
        selector += f"\n              topology.kubernetes.io/zone: {job.zone}"
    values = f"""\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job.name}
  labels: {{kueue.x-k8s.io/queue-name: {_QUEUE}}}
  annotations: {{alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool}}
spec:
  failurePolicy:
    maxRestarts: {RESTARTS}
    rules:
    - {{name: error, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}}
  replicatedJobs:
  - name: hosts
    replicas: 1
    template:
      spec:
        parallelism: {job.topology.hosts}
        completions: {job.topology.hosts}
        backoffLimit: 0  # the loss of a host ends the Job, and the JobSet restarts all hosts
        podFailurePolicy:
          rules:
          - {{action: FailJob, onExitCodes: {{containerName: train, operator: In, values: [1, 2]}}}}
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: {_GRACE_SECONDS}
            hostNetwork: true
            dnsPolicy: ClusterFirstWithHostNet
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: {OFFERS[job.chip.name].label}
              cloud.google.com/gke-tpu-topology: {job.shape}{selector}
            tolerations:
            - {{key: google.com/tpu, operator: Exists, effect: NoSchedule}}{tolerations}
            containers:
            - name: train
              image: {job.image}
              securityContext: {{privileged: true}}  # to lock the memory that the TPU's driver maps
              resources:
                requests: {{google.com/tpu: {job.topology.chips_per_host}}}
                limits: {{google.com/tpu: {job.topology.chips_per_host}}}
              envFrom:
              - secretRef: {{name: {job.name}, optional: true}}
              command:
              - bash
              - -c
              - |  # in which Kubernetes makes one $ of $$
{indent(start_script(job).replace("$", "$$"), " " * 16)}"""
    files, commands = {"jobset.yaml": values}, {}
    if job.secrets:
        files |= _secret_names(job)
        names = _quoted(folder, "secrets.env")
        commands["secrets"] = f"kubectl create secret generic {job.name} --from-env-file={names}"
    pods = f"jobset.sigs.k8s.io/jobset-name={job.name}"
    return files, commands | {
        "launch": f"kubectl apply -f {_quoted(folder, 'jobset.yaml')}",
        "watch": f"kubectl get pods -l {pods} --watch",
        "logs": _pod_logs(job, pods),
        "end": f"kubectl delete jobset {job.name}",
    }


def xpk(job: SliceJob, folder: Path) -> Written:
    """A start-up script, which xpk's own JobSet runs as a single line."""
    files = {"start.sh": start_script(job)}
    of_cluster = f'--cluster "$CLUSTER" --zone {job.zone}'
    lines = [
        f"xpk workload create --workload {job.name} {of_cluster}",
        f"--tpu-type={job.slice} --docker-image={shlex.quote(job.image)}{' --spot' if job.spot else ''}",
        f"--max-restarts={RESTARTS} --restart-on-exit-codes={_PREEMPTED}",  # also on 42 and 127 to 255, its default
        f"--termination-grace-period-seconds={_GRACE_SECONDS}",
    ]
    if job.secrets:
        files |= _secret_names(job)
        lines.append(f"--env-file {_quoted(folder, 'secrets.env')}")
    script = f"$(base64 < {_quoted(folder, 'start.sh')} | tr -d '\\n')"
    lines.append(f"""--command "exec bash -c \\"\\$(echo {script} | base64 -d)\\"\"""")
    return files, {
        "cluster": "export CLUSTER=...",
        "launch": " \\\n  ".join(lines),
        "watch": f"xpk workload list {of_cluster} --filter-by-job {job.name}",
        "logs": _pod_logs(job, f"xpk.google.com/workload={job.name}"),
        "end": f"xpk workload delete --workload {job.name} {of_cluster}",
    }


def gcloud(job: SliceJob, folder: Path) -> Written:
    """A start-up script of TPU VMs, and a script that asks for the slice again whenever it is lost."""
    at = f"{job.name} --zone={job.zone}"
    resource = "gcloud compute tpus queued-resources"
    codes = f"{job.config.remote}/exit-codes"
    objects = shlex.quote(f"{codes}/*")
    setup, _, train = start_script(job).rstrip().rpartition("exec ")
    # Whatever ends the script, launch.sh must learn of it, as the slice costs until then. After a reboot it runs again.
    report = f"""
report() {{ local code=$?; [ $code -gt 128 ] || echo $code | gcloud storage cp - {shlex.quote(codes)}/"$(hostname)"; }}
trap report EXIT
trap 'exit 143' TERM"""
    setup = setup.replace("\ncd ", f"{report}\ncd ", 1)
    for name in job.secrets:
        setup += f"{name}=$(gcloud secrets versions access latest --secret={name})\nexport {name}\n"
    start = f"""\
{setup}\
for restart in $(seq 0 {RESTARTS}); do
  code=0
  {train} || code=$?
  case $code in 0|1|2) break;; *) code={_PREEMPTED};; esac
done
exit $code
"""
    launch = f"""\
#!/bin/bash
# Keeps {job.slice} until the run has ended, asks for it again when it is lost, and deletes it at the end.
# Until then the slice costs. If this was stopped, run it again.
set -uo pipefail
cd "$(dirname "$0")"
ended() {{ [ "$(wc -w <<< "$codes")" -eq {job.topology.hosts} ] || [[ $codes =~ [1-9] ]]; }}
for restart in $(seq 0 {RESTARTS}); do
  if ! {resource} describe {at} > /dev/null 2>&1; then
    gcloud storage rm {objects} > /dev/null 2>&1
    {resource} create {at} --node-id={job.name} \\
      --accelerator-type={job.slice} --runtime-version={job.image}{" --spot" if job.spot else ""} \\
      --metadata-from-file=startup-script=start.sh || exit 1
  fi
  while sleep "${{POLL_SECONDS:-60}}"; do
    state=$({resource} describe {at} --format='value(state.state)')
    codes=$(gcloud storage cat {objects} 2> /dev/null | xargs)
    echo "$(date) restart $restart: ${{state:-unknown}}${{codes:+; exit codes of hosts: $codes}}"
    if ended || [ "$state" = SUSPENDED ] || [ "$state" = FAILED ]; then break; fi
  done
  {resource} delete {at} --force --quiet || exit 1
  if [[ " $codes " =~ " "[12]" " ]]; then exit 1; fi
  if ended && ! [[ $codes =~ [1-9] ]]; then exit 0; fi
done
exit {_PREEMPTED}
"""
    commands = {
        f"store {name}": f'printenv {name} | tr -d "\\n" | gcloud secrets create {name} --data-file=-'
        for name in job.secrets
    }
    logs = shlex.quote("sudo journalctl --unit google-startup-scripts --no-pager")
    return {"start.sh": start, "launch.sh": launch}, commands | {
        "launch": f"bash {_quoted(folder, 'launch.sh')}",
        "watch": f"{resource} describe {at}",
        "logs": f"gcloud compute tpus tpu-vm ssh {at} --worker=all --command={logs}",
        "end": f"{resource} delete {at} --force --quiet",
    }


ENGINES: Mapping[str, Callable[[SliceJob, Path], Written]] = {
    "skypilot": skypilot,
    "jobset": jobset,
    "xpk": xpk,
    "gcloud": gcloud,
}
"""The writers, by the name that `--with` takes. Each takes the job and the folder of its files."""


def _quoted(folder: Path, name: str) -> str:
    return shlex.quote(str(folder / name))


def _pod_logs(job: SliceJob, label: str) -> str:
    return f"kubectl logs -l {label} --prefix --tail=-1 --max-log-requests={job.topology.hosts}"


def _secret_names(job: SliceJob) -> dict[str, str]:
    """A file of names: kubectl and xpk read the values from the environment in which they run."""
    return {"secrets.env": "".join(f"{name}\n" for name in job.secrets)}
