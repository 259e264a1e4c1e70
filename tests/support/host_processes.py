"""Runs several hosts on one machine: `python -m tpu_kit` processes, in their own folders or in a shared folder.

    python -m tests.support.host_processes LOST COMMAND ...

Runs a command of the kit that counts a silent host as lost after LOST seconds.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.child_processes import PYTHONPATH, child_environment
from tests.support.object_store import Proxy, free_port
from tpu_kit.training.checkpoint.manager import list_checkpoints

TINY: Mapping[str, Any] = {
    "model.name": "embedded", "base_dtype": "fp32", "lora.r": 4, "source": "synthetic", "data.split": "train[:64]",
    "max_length": 32, "eval_rows": 0, "batch_size": 2, "learning_rate": 1e-2, "device_type": "cpu", "num_replicas": 1,
    "loss_chunk": 32, "logging_steps": 1, "optim.seed": 0, "hang_timeout": 60, "meeting_timeout": 60,
}  # fmt: skip


@dataclass
class Host:
    """A host: its process, its folder and its output."""

    process: subprocess.Popen[str]
    folder: Path
    output: Path

    @property
    def text(self) -> str:
        """Everything it has written to stdout and stderr."""
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 90) -> None:
        until = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < until and self.process.poll() is None, f"no {text!r}:\n{self.text}"
            time.sleep(0.02)

    def wait_for_step(self, step: int, seconds: float = 90) -> None:
        """Waits until the run's log, which host 0 writes, contains an update."""
        log, until = self.folder / "runs" / "default" / "metrics.jsonl", time.monotonic() + seconds
        while not log.is_file() or f'"step": {step},' not in log.read_text():
            assert time.monotonic() < until and self.process.poll() is None, f"no step {step}:\n{self.text[-5000:]}"
            time.sleep(0.02)

    def processes(self) -> list[int]:
        """Returns the ids of all its processes, replicas last."""
        found, parents = [self.process.pid], {self.process.pid}
        for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) in parents:
                parents.add(int(folder.name))
                found.append(int(folder.name))
        return found

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all its processes, as if the machine ended or was suspended."""
        for pid in self.processes():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


@dataclass
class Rehearsal:
    """Starts the hosts of a run; every other host reaches host 0 through its own proxy.

    Attributes:
        folder: The parent of all hosts' folders.
        count: The number of hosts.
        lost: Seconds after which a silent host counts as lost.
        shared: Whether the hosts share a home and a working folder.
        proxies: Host index -> its proxy to the store of host 0.
    """

    folder: Path
    count: int
    lost: float = 8.0
    shared: bool = False
    proxies: dict[int, Proxy] = field(default_factory=dict)
    hosts: list[Host] = field(default_factory=list)

    def start(self, output_dir: str, env: Mapping[str, str] | None = None, **settings: Any) -> list[Host]:
        """Starts all hosts; `settings` override `TINY`. Host 0's time zone is 26 hours ahead, a different day."""
        self.close()
        port = free_port()
        self.proxies = {index: Proxy(f"http://127.0.0.1:{port}") for index in range(1, self.count)}
        self.hosts = []
        for index in range(self.count):
            at = f"127.0.0.1:{port}" if index == 0 else self.proxies[index].url.removeprefix("http://")
            names = ",".join(f"machine-{number}" for number in range(self.count))
            several = {"TPU_KIT_HOSTS": names, "TPU_KIT_HOST_INDEX": str(index), "TPU_KIT_COORDINATOR": at}
            several["TZ"] = "UTC+12" if index else "UTC-14"
            self.hosts.append(
                self.host(index, output_dir, (several if self.count > 1 else {}) | dict(env or {}), settings)
            )
        return self.hosts

    def host(self, index: int, output_dir: str, env: Mapping[str, str], settings: Mapping[str, Any]) -> Host:
        folder = self.folder / ("shared" if self.shared else f"machine-{index}")
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / f"output-{index}"
        values = {**TINY, "output_dir": output_dir, **settings}
        command = [sys.executable, "-m", "tests.support.host_processes", str(self.lost), "train"]
        own = {
            "PYTHONPATH": PYTHONPATH, "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "PJRT_DEVICE": None,
            "GCE_METADATA_HOST": "127.0.0.1:9",
        }  # fmt: skip
        with written.open("w") as output:
            process = subprocess.Popen(
                [*command, *(f"{name}={value}" for name, value in values.items())], cwd=folder, text=True,
                env=child_environment(own) | dict(env), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return Host(process, folder, written)

    def wait(self, seconds: float = 180) -> list[int]:
        """Waits for all hosts; returns their exit codes."""
        until = time.monotonic() + seconds
        for host in self.hosts:
            try:
                host.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                told = "\n".join(f"--- {one.output}\n{one.text[-3000:]}" for one in self.hosts)
                raise AssertionError(f"{host.output} does not end\n{told}") from None
        return [host.process.returncode for host in self.hosts]

    def close(self) -> None:
        for proxy in self.proxies.values():
            proxy.close()
        for host in self.hosts:
            host.signal(signal.SIGKILL)
            host.process.wait()


def steps(output_dir: str) -> list[int]:
    """Returns the steps of a run's checkpoints, after verifying all their bytes."""
    good, damaged = list_checkpoints(f"{output_dir}/checkpoints", verify=True)
    assert not damaged, damaged
    return [found.step for found in good]


def main(lost: str, *arguments: str) -> int:
    from tpu_kit.cli import main as run
    from tpu_kit.distributed import meeting

    meeting.LOST = float(lost)
    if os.environ.get("TPU_KIT_TEST_FULL", "none") == os.environ.get("TPU_KIT_HOST_INDEX"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))  # larger than a log, smaller than a checkpoint
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
