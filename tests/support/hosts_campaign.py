"""Injects faults at random moments of a run on several hosts; for tests/integration/test_several_hosts.py.

    python -m tests.support.hosts_campaign FOLDER HOSTS COUNT SEED

Starts an object store and a run on HOSTS hosts, which share a home and a working folder and save by the clock of host
0. COUNT times a fault is injected. A host is killed, stopped for some seconds, cut off from the others or told to end,
or its disk is full; or connections to the object store are cut, or the store is down. After each fault every host must
end as expected, each error must name its cause within its time limit, and all checkpoints must be complete. The run
then continues to its end, and its result must equal an undisturbed run's bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.host_processes import Host, Rehearsal, steps
from tests.support.object_store import Proxy, environment, make_bucket, run_server

KINDS = ("kill", "delay", "partition", "end", "full", "cut", "gone")
STEPS = 12  # the most steps between the last checkpoint and a fault
SETTINGS: dict[str, Any] = {
    "save_steps": 10**6, "save_minutes": 0.01, "schedule": "constant", "warmup_ratio": 0, "checkpoint.keep": 2,
    "hang_timeout": 300,  # gcsfs retries for about a minute, during which no host computes
}  # fmt: skip
SLACK = 20.0  # seconds that a busy machine may need to detect, report and end


def adapter(hosts: list[Host]) -> dict[str, torch.Tensor]:
    return load_file(hosts[0].folder / "runs" / "default" / "adapter" / "adapter_model.safetensors")


def disturb(run: Rehearsal, url: str, store: Proxy, kind: str, which: int, at: int, total: int) -> float:
    """Starts the run and disturbs host `which` after step `at`; returns the seconds until all hosts have ended."""
    full = {"TPU_KIT_TEST_FULL": str(which)} if kind == "full" else {}
    log = run.folder / "shared" / "runs" / "default" / "metrics.jsonl"
    log.unlink(missing_ok=True)  # of the previous start; the resumed run writes it again
    hosts = run.start(url, env=full, max_steps=total, **SETTINGS)
    name, others = f"host {which} of {run.count}, machine-{which}", [i for i in range(run.count) if i != which]
    if kind != "full":
        hosts[0].wait_for_step(at, 240)
        time.sleep(random.random())
    began = time.monotonic()
    if kind == "kill":
        hosts[which].signal(signal.SIGKILL)
    elif kind == "partition":
        run.proxies[which].silent = True
    elif kind == "end":
        os.kill(hosts[which].process.pid, signal.SIGTERM)
    elif kind == "gone":
        store.down = True
    elif kind in ("delay", "cut"):
        if kind == "delay":
            hosts[which].signal(signal.SIGSTOP)
            time.sleep(run.lost / 3)
            hosts[which].signal(signal.SIGCONT)
        else:
            store.cut(random.randrange(100_000), times=2)
        hosts[0].wait_for_step(at + 4, 240)
        os.kill(hosts[which].process.pid, signal.SIGTERM)
    codes = run.wait(240)
    took = time.monotonic() - began
    store.down = False
    told = "\n".join(f"--- {host.output}: {codes[i]}\n{host.text[-2500:]}" for i, host in enumerate(hosts))
    if kind in ("delay", "end", "cut"):
        assert codes == [75] * run.count, told
        stops = {host.text.partition("preempted at step ")[2].partition(" (")[0] for host in hosts}
        assert len(stops) == 1 and f"SIGTERM received on {name}" in hosts[0].text, told
    elif kind == "gone":  # host 0's gcsfs logs its retries with tracebacks
        assert codes == [1] * run.count and all(f"could not be written to {url}" in one.text for one in hosts), told
        assert all(f"host 0 of {run.count}, machine-0, failed: " in one.text for one in hosts[1:]), told
        assert not any("Traceback" in one.text for one in hosts[1:]), told
    elif kind == "full":  # host 0 cannot stage a checkpoint or, after some hundred steps, write its log
        assert codes == [1] * run.count and all(f"{name}, failed: " in hosts[i].text for i in others), told
        causes = ("set TMPDIR to another folder", "metrics.jsonl could not be written. Make room there")
        assert all(any(cause in one.text for cause in causes) for one in hosts), told
        assert not any("Traceback" in one.text for one in hosts), told
    else:
        assert all(codes[i] == 75 for i in others), told
        limit = {"kill": "no sign of life|is gone|has not answered", "partition": "no sign of life|has not answered"}
        for i in others:
            assert f"{name}, " in hosts[i].text and any(one in hosts[i].text for one in limit[kind].split("|")), told
        assert took < run.lost + SLACK, (took, told)
    return took


def main(folder: str, hosts: str, count: str, seed: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    random.seed(seed)
    done: dict[str, int] = dict.fromkeys(KINDS, 0)
    slowest, last, number = 0.0, 0, int(hosts)
    store = Proxy()
    with run_server(store.url) as server, environment(store.url):
        store.target = server
        url = f"{make_bucket(server)}/run"
        run = Rehearsal(Path(folder, "disturbed"), number, shared=True)
        try:
            for turn in range(int(count)):
                kind = KINDS[turn % len(KINDS)]
                # The others reach host 0 through their proxies; if all of these are silent, nobody reaches it.
                which = random.randrange(kind == "partition", 1 if kind == "full" else number)
                took = disturb(run, url, store, kind, which, last + random.randint(1, STEPS), 10**4)
                found = steps(url)
                newest = found[-1] if found else 0
                assert newest >= last, (found, last)
                done[kind], slowest, last = done[kind] + 1, max(slowest, took), newest
                print(f"{turn + 1}: {kind} of host {which}, {took:.0f} s, checkpoints {found}", flush=True)
            ended = run.start(url, max_steps=last + 3, **SETTINGS)
            assert run.wait(240) == [0] * number, ended[0].text[-3000:]
            disturbed = adapter(ended)
        finally:
            run.close()
        whole = Rehearsal(Path(folder, "whole"), number, shared=True)
        try:
            settings = {name: value for name, value in SETTINGS.items() if name != "save_minutes"}  # saves at the end
            hosts_of_whole = whole.start(f"{make_bucket(server)}/run", max_steps=last + 3, **settings)
            assert whole.wait(600 + 6 * last) == [0] * number, hosts_of_whole[0].text[-3000:]
            for name, tensor in adapter(hosts_of_whole).items():
                assert torch.equal(tensor, disturbed[name]), name
        finally:
            whole.close()
    return {"faults": done, "steps": last + 3, "slowest": slowest}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
