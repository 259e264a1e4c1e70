"""Functions that the launch tests run in replicas; they are in a module so that other processes can import them."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import hashlib
import math
import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch

from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed.preemption import PreemptionGuard
from tpu_kit.distributed.replica import runtime
from tpu_kit.machine.storage.object_store import ObjectFolder


def marks(config: TrainConfig) -> Path:
    """Makes the folder in which replicas leave marks for the test."""
    folder = config.output_path
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def mark(config: TrainConfig, name: str) -> None:
    """Writes the time and the process id to this rank's mark `name`, atomically."""
    path = marks(config) / f"{name}-{runtime.current().rank}"
    path.with_suffix(".part").write_text(f"{time.time()} {os.getpid()}")
    path.with_suffix(".part").rename(path)


def sums(config: TrainConfig) -> dict[str, Any]:
    """Sums two tensors over the replicas in one collective; returns every rank's values and the number of loads."""
    rt = runtime.current()

    def load() -> tuple[torch.nn.Module, None]:
        (marks(config) / f"loaded-{rt.rank}").touch()
        return torch.nn.Linear(1, 1), None

    model, _ = runtime.load_once(rt, load)
    (marks(config) / f"model-{rt.rank}").write_text(str(id(model)))
    tensors = [
        torch.tensor([rt.rank + 1.0, 10.0 * rt.rank]).to(rt.local_device),
        torch.full((2, 3), 0.5).to(rt.local_device) + 0.0,
    ]
    rt.sync()
    rt.all_reduce(tensors)
    rt.sync()
    values = [tensor.tolist() for tensor in rt.to_host(tensors)]
    (marks(config) / f"values-{rt.rank}").write_text(repr(values))
    rt.barrier()
    return {
        "values": values, "all": [(marks(config) / f"values-{rank}").read_text() for rank in range(rt.world_size)],
        "rank": rt.rank, "world_size": rt.world_size, "device": str(rt.local_device), "is_xla": rt.is_xla,
        "counters": rt.counters(), "pid": os.getpid(), "limit": _limit(),
        "threads": torch.get_num_threads(), "loads": len(list(marks(config).glob("loaded-*"))),
        "models": [(marks(config) / f"model-{rank}").read_text() for rank in range(rt.world_size)],
    }  # fmt: skip


def _limit() -> timedelta | None:
    """Returns the time limit of collectives in this process's group."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    limit: timedelta = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    return limit


class Net(torch.nn.Module):
    """A residual network over an embedding, with a frozen base and low-rank updates like a LoRA run."""

    def __init__(self, width: int, layers: int, words: int = 500) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width).requires_grad_(False)
        self.base = torch.nn.ModuleList(torch.nn.Linear(width, width).requires_grad_(False) for _ in range(layers))
        self.down = torch.nn.ModuleList(torch.nn.Linear(width, 8, bias=False) for _ in range(layers))
        self.up = torch.nn.ModuleList(torch.nn.Linear(8, width, bias=False) for _ in range(layers))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps token ids (B, S) int64 to logits (B, S, words)."""
        x = self.embedding(ids)
        for base, down, up, norm in zip(self.base, self.down, self.up, self.norms, strict=True):
            y = norm(x)
            x = x + torch.nn.functional.gelu(base(y) + up(down(y)))
        return x @ self.embedding.weight.T / x.shape[-1]


_replicas_share_the_generator = threading.Lock()


def fifty_steps(config: TrainConfig) -> dict[str, Any]:
    """Fifty optimizer steps with one collective per step, updated in place; replicas must stay bit for bit equal."""
    rt = runtime.current()
    with _replicas_share_the_generator:
        torch.manual_seed(0)
        model = Net(width=64, layers=config.optim.batch_size)
    model.to(rt.local_device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    first = [torch.zeros(p.shape, device=rt.local_device) for p in parameters]
    second = [torch.zeros(p.shape, device=rt.local_device) for p in parameters]
    losses = torch.zeros(2, device=rt.local_device)
    rt.sync()
    generator = torch.Generator().manual_seed(rt.rank)
    for step in range(50):
        # As with a data loader and a schedule, values are made on the host and differ by step and replica.
        ids = torch.randint(0, 500, (2, 32), generator=generator).to(rt.local_device)
        rate = torch.tensor(1e-3 * (1 - step / 100)).to(rt.local_device)
        logits = model(ids)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        total = torch.stack([loss.detach(), torch.ones_like(loss)])
        rt.all_reduce([*gradients, total])
        with torch.no_grad():
            for p, gradient, m, v in zip(parameters, gradients, first, second, strict=True):
                gradient = gradient / total[1]
                m.mul_(0.9).add_(gradient, alpha=0.1)
                v.mul_(0.99).add_(gradient * gradient, alpha=0.01)
                p.sub_(rate * m / (v.sqrt() + 1e-6))
                p.grad = None
            losses.add_(total)
        rt.sync()
        if rt.rank == 0 and step % 10 == 0:
            print("step", step)
    rt.sync()
    host = rt.to_host([*parameters, losses])
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in host)).hexdigest()
    (marks(config) / f"hash-{rt.rank}").write_text(digest)
    rt.barrier()
    hashes = {(marks(config) / f"hash-{rank}").read_text() for rank in range(rt.world_size)}
    return {
        "hashes": sorted(hashes), "loss": float(host[-1][0] / host[-1][1]), "losses": float(host[-1][1]),
        **rt.counters(),
    }  # fmt: skip


def raise_in_rank_1(config: TrainConfig) -> None:
    """Rank 1 fails while the others wait for it."""
    rt = runtime.current()
    total = torch.ones(1, device=rt.local_device)
    rt.sync()
    if rt.rank == 1:
        mark(config, "failing")
        raise KeyError("no such column: rationale")
    rt.all_reduce([total])
    rt.sync()


def raise_in_all(config: TrainConfig) -> None:
    """Every rank fails with the same error."""
    raise OSError("the disk is full")


def leave_rank_1(config: TrainConfig) -> None:
    """Rank 1 returns before a step that the others take."""
    if runtime.current().rank != 1:
        torch.ones(1, device=runtime.current().local_device).add_(1)
        runtime.current().sync()


def print_and_wait(config: TrainConfig) -> str:
    """Reports that it has started, then waits until the test ends it."""
    rank = runtime.current().rank
    print(f"rank {rank} is here")
    mark(config, "here")
    time.sleep(600)
    return "nobody came"


def wait_in_all_reduce(config: TrainConfig) -> None:
    """Rank 1 never joins a collective for which all others wait."""
    rt = runtime.current()
    mark(config, "here")
    if rt.rank == 1:
        time.sleep(600)
    rt.all_reduce([torch.ones(1, device=rt.local_device)])
    rt.sync()
    rt.barrier()


def hold_the_gil(config: TrainConfig) -> None:
    """Sleeps in C while holding the GIL."""
    mark(config, "here")
    ctypes.PyDLL(None).sleep(600)


def exit_rank_1(config: TrainConfig) -> None:
    """Rank 1's process exits with status 3 after a last line on stderr."""
    if runtime.current().rank == 1:
        mark(config, "failing")
        print("rank 1 has no room left", file=sys.stderr, flush=True)
        os._exit(3)
    runtime.current().all_reduce([torch.ones(1)])


def finish_when_asked(config: TrainConfig) -> None:
    """Writes a file when it receives SIGTERM, as a run writes its checkpoint."""

    def save(*_: object) -> None:
        mark(config, "saved")
        os._exit(0)

    with contextlib.suppress(ValueError):  # replicas that are threads cannot set handlers
        signal.signal(signal.SIGTERM, save)
    print_and_wait(config)


def return_rank(config: TrainConfig) -> tuple[int, int]:
    """Returns the rank and the number of replicas, to tell whose result the caller gets."""
    return runtime.current().rank, runtime.current().world_size


def import_transformers(config: TrainConfig) -> str:
    """Imports a class of transformers in all replicas at once, as a user's function may."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.__name__


def return_lock(config: TrainConfig) -> threading.Lock:
    """Returns an object that cannot be pickled."""
    return threading.Lock()  # type: ignore[return-value]


def return_tensor(config: TrainConfig) -> torch.Tensor:
    """Returns a tensor on the replica's device."""
    rt = runtime.current()
    tensor = torch.ones(2, device=rt.local_device)
    rt.sync()
    return tensor


def print_slowly(config: TrainConfig) -> tuple[int, int]:
    """Prints lines with pauses between them; returns the rank and the number of replicas."""
    for number in range(3):
        print(f"line {number} of rank {runtime.current().rank}")
        time.sleep(0.3)
    return runtime.current().rank, runtime.current().world_size


def agreed_steps(config: TrainConfig) -> list[tuple[int, str | None]]:
    """Steps with one all-reduce each and random delays; returns each rank's last step and its reason to stop."""
    rt = runtime.current()
    pauses = random.Random(rt.rank)
    total = torch.zeros(1, device=rt.local_device)
    with PreemptionGuard(rt) as agreement:
        for step in count(1):
            if not agreement.should_run(step):
                break
            time.sleep(pauses.random() * 0.02)
            total = total + 1
            rt.all_reduce([total])
            total = total / rt.world_size
            rt.sync()
            if step == 3:
                mark(config, "stepping")
        assert rt.to_host([total])[0].tolist() == [step - 1.0]
        mark(config, "saving")
        time.sleep(0.3)
        return _all_last(config, step - 1, agreement.reason)


def _all_last(config: TrainConfig, step: int, reason: str | None) -> list[tuple[int, str | None]]:
    rt = runtime.current()
    (marks(config) / f"last-{rt.rank}").write_text(repr((step, reason)))
    rt.barrier()
    return [ast.literal_eval((marks(config) / f"last-{rank}").read_text()) for rank in range(rt.world_size)]


def uneven_steps(config: TrainConfig) -> list[tuple[int, str | None]]:
    """Steps without collectives, so that rank 0 gets far ahead of the others."""
    rt = runtime.current()
    with PreemptionGuard(rt) as agreement:
        for step in count(1):
            if not agreement.should_run(step):
                break
            time.sleep(0.002 * (1 + 9 * rt.rank))
            if step == 40:
                mark(config, "stepping")
        return _all_last(config, step - 1, agreement.reason)


def steps_after_loading(config: TrainConfig) -> list[tuple[int, str | None]]:
    """Takes 1.5 s before it can react to a notice."""
    mark(config, "stepping")
    time.sleep(1.5)
    return agreed_steps(config)


def die_in_rank_1_when_told(config: TrainConfig) -> list[tuple[int, str | None]]:
    """Rank 1's process ends at a notice, while the others still take the last step."""
    rt = runtime.current()
    with PreemptionGuard(rt) as agreement:
        for step in count(1):
            if rt.rank == 1 and not agreement.should_run(step):
                os._exit(3)
            if rt.rank == 0 and not agreement.should_run(step):
                rt.barrier()
                return _all_last(config, step, agreement.reason)
            if step == 3:
                mark(config, "stepping")
            time.sleep(0.01)
    raise AssertionError


def never_saves(config: TrainConfig) -> None:
    """Reacts to notices, then never finishes saving."""
    rt = runtime.current()
    with PreemptionGuard(rt) as agreement:
        for step in count(1):
            if not agreement.should_run(step):
                mark(config, "told")
                time.sleep(600)
            if step == 3:
                mark(config, "stepping")
            time.sleep(0.01)


def cost_of_asking(config: TrainConfig) -> float:
    """Seconds per call of `should_run` while all ranks call it; the mean of the slowest rank."""
    rt = runtime.current()
    calls = 100_000
    with PreemptionGuard(rt) as agreement:
        rt.barrier()
        start = time.perf_counter()
        for step in range(1, calls + 1):
            agreement.should_run(step)
        (marks(config) / f"cost-{rt.rank}").write_text(str((time.perf_counter() - start) / calls))
        rt.barrier()
    return max(float((marks(config) / f"cost-{rank}").read_text()) for rank in range(rt.world_size))


def end_well_in_rank_1(config: TrainConfig) -> None:
    """Rank 1 returns at once; the others wait until the test ends them."""
    mark(config, "here")
    if runtime.current().rank != 1:
        time.sleep(600)


def vanish_in_rank_1(config: TrainConfig) -> None:
    """Rank 1's process exits with status 0 in the middle of its work."""
    if runtime.current().rank == 1:
        os._exit(0)
    time.sleep(600)


def die_together(config: TrainConfig) -> None:
    """Ranks 1 and 2 end at the same time, by SIGKILL after a last line on stderr and with status 3; the others wait."""
    rt = runtime.current()
    (marks(config) / f"ready-{rt.rank}").touch()
    rt.barrier()
    if rt.rank == 1:
        print("rank 1 has no room left", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if rt.rank == 2:
        os._exit(3)
    time.sleep(600)


def compute_for_ever(config: TrainConfig) -> None:
    """Rank 1 computes and never reaches the next collective, for which the others wait."""
    rt = runtime.current()
    with PreemptionGuard(rt) as agreement:
        for step in count(1):
            assert agreement.should_run(step)
            if step == 5 and rt.rank == 1:
                mark(config, "computing")
                while True:
                    pass
            time.sleep(0.1)
            rt.all_reduce([torch.ones(1)])


def miss_a_bucket(config: Any) -> None:
    with ObjectFolder("memory://mine/run")._explained():
        raise FileNotFoundError


def exchanged(config: TrainConfig) -> Any:
    """Returns the results of two exchanges."""
    rt = runtime.current()
    rank = rt.rank
    values = {"rank": rank, "ids": [*range(1 + 1000 * rank)], "numbers": [0.1 + rank, 1 / 3], "none": math.nan}
    return rt.exchange({**values, "text": "\u00e9" * rank}), rt.exchange(rank)
