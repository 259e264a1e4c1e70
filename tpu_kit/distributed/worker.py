"""The other processes of a launch: `python -m tpu_kit.distributed.worker` is the launcher, which starts the replicas.

Each of them sends the calling process (launch.py) messages `(rank, kind, value)`:

- started: its process id, and how many replicas this host has,
- done: of the first replica of this host, the pickled result,
- error: the traceback; of an error of files or the network that the kit itself raised, the text,
- refused: the text of an error in the user's input,
- ended: of the launcher, the id and the status of a process that has ended.

Notices go the other way, through a flag (preemption.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from tpu_kit.distributed import cpu_simulation, preemption, runtime
from tpu_kit.distributed.preemption import StopFlag
from tpu_kit.distributed.runtime import Backend, Runtime

LAUNCHER = -1  # the launcher's number among the ranks
_PR_SET_PDEATHSIG = 1
_LIMIT = timedelta(days=1)  # of a collective: the calling process judges what hangs


class _Reporter:
    """The connection of a replica, or of the launcher, to the calling process."""

    def __init__(self, rank: int, address: str, key: bytes, replicas: int | None = None) -> None:
        self._rank, self._lock = rank, threading.Lock()
        self._connection = Client(address, family="AF_UNIX", authkey=key)
        self.send("started", (os.getpid(), replicas))

    def send(self, kind: str, value: Any) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send((self._rank, kind, value))


class _ResultPickler(pickle.Pickler):
    """Refuses tensors that would touch a device in the process that reads them."""

    def persistent_id(self, obj: Any) -> None:
        device = getattr(obj, "device", None) if type(obj).__module__.startswith("torch") else None
        if device is not None and device.type != "cpu":
            raise pickle.PicklingError(f"it holds a tensor on {device}; read it with runtime.current().to_host([...])")


def _pickled(name: str, result: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        _ResultPickler(buffer).dump(result)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{name} returned a {type(result).__name__} that cannot be sent to the calling process ({error}); return "
            "plain values, or write it to a file and return its path"
        ) from error
    return buffer.getvalue()


def _replica(rank: int, replicas: int, make: Callable[[], Runtime], address: str, key: bytes, payload: bytes) -> None:
    """Runs fn in one of this host's replicas and reports how it ended."""
    reporter = _Reporter(rank, address, key, replicas)
    try:
        runtime.enter(make())
        fn, config = pickle.loads(payload)
        result = fn(config)
        reporter.send("done", _pickled(getattr(fn, "__qualname__", repr(fn)), result) if rank % replicas == 0 else None)
    except BaseException as error:
        if _is_from_the_kit(error, ValueError):
            reporter.send("refused", str(error))
        else:
            known = _is_from_the_kit(error, OSError)
            reporter.send("error", f"{error}\n" if known else traceback.format_exc())
        raise SystemExit(1) from None  # prints nothing: the caller prints the error


def _is_from_the_kit(error: BaseException, kind: type[Exception]) -> bool:
    """Whether the kit itself raised the error: its text says what to do, and needs no traceback."""
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_in = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    number = getattr(error, "errno", None)
    plain = number is not None and error.args[1:] == (os.strerror(number),)  # the system's, which knows no remedy
    return isinstance(error, kind) and raised_in.startswith("tpu_kit.") and not plain


def _xla_replica(_index: int, address: str, key: bytes, flag: str, payload: bytes, backend: Backend) -> None:
    """Runs a replica in a TPU's process (or a thread of it), or in a thread of the rehearsal."""
    import torch_xla
    import torch_xla.runtime as xr

    from tpu_kit.distributed.backends import SimulatedRuntime, TpuRuntime

    rank = xr.global_ordinal()

    def make() -> Runtime:
        kind = TpuRuntime if backend.device_type == "tpu" else SimulatedRuntime
        return kind(rank, xr.world_size(), torch_xla.device())

    if backend.device_type == "tpu":
        _prepare(flag)
        _quiet(threads=xr.process_index() == 0)
    _replica(rank, xr.local_device_count(), make, address, key, payload)
    # All replicas take the same steps: a replica that still waits for this one would wait for ever.
    cpu_simulation.end(f"rank {rank} has returned, and will not come to another step")


def _mesh_process(address: str, key: bytes, flag: str, payload: bytes, backend: Backend) -> None:
    """Runs the process that drives the devices of a mesh, on several hosts those of this one."""
    _prepare(flag)
    assert backend.mesh is not None
    mesh = backend.mesh
    from tqdm.std import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

    # tqdm's own lock has a semaphore, which Python reports as leaked when this process ends by `os._exit`.
    tqdm.set_lock(threading.RLock())

    def make() -> Runtime:
        import torch_xla

        from tpu_kit.distributed.backends import MeshRuntime
        from tpu_kit.distributed.mesh import start

        start(mesh)
        if backend.hosts.count > 1:
            _connect("gloo", backend.hosts.address, backend.hosts.index, backend.hosts.count)
        return MeshRuntime(backend.device_type, mesh, torch_xla.device(), backend.hosts)

    status = 0
    try:
        _replica(backend.first_rank, 1, make, address, key, payload)
    except SystemExit:
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without waiting for threads of the XLA runtime


def _torch_replica(
    local_rank: int, address: str, key: bytes, flag: str, payload: bytes, backend: Backend, port: int
) -> None:
    """Runs a replica in a GPU's process, or in one of several CPU processes."""
    _prepare(flag)
    import torch
    import torch.distributed as dist

    from tpu_kit.distributed.backends import CpuRuntime, CudaRuntime

    device_type, replicas, hosts = backend.device_type, backend.num_replicas or 1, backend.hosts
    rank, world_size = backend.first_rank + local_rank, replicas * hosts.count

    def make() -> Runtime:
        device = torch.device("cuda", local_rank) if device_type == "cuda" else torch.device("cpu")
        if device_type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(max(1, torch.get_num_threads() // replicas))  # as OMP_NUM_THREADS says, or all
        if world_size > 1:
            alone = hosts.count == 1
            address = ("127.0.0.1", port) if alone else hosts.address
            kind = "nccl" if device_type == "cuda" else "gloo"
            _connect(kind, address, rank, world_size, makes_store=alone and rank == 0)
        return (CudaRuntime if device_type == "cuda" else CpuRuntime)(rank, world_size, device, hosts.count)

    _quiet(threads=local_rank == 0)
    _replica(rank, replicas, make, address, key, payload)
    if dist.is_initialized():
        dist.destroy_process_group()


def _connect(kind: str, address: tuple[str, int], rank: int, world_size: int, makes_store: bool = False) -> None:
    """Joins the process group of all replicas, which meet at a store; that of several hosts is there already."""
    import torch.distributed as dist

    store = dist.PrefixStore("replicas", dist.TCPStore(*address, is_master=makes_store, timeout=_LIMIT))
    with _no_stdout():
        dist.init_process_group(kind, store=store, timeout=_LIMIT, rank=rank, world_size=world_size)


class _FromRankZero:
    """The stdout of a process whose threads are replicas: writes the text of rank 0 and of other threads alone."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def write(self, text: str) -> int:
        try:
            rank = runtime.current().rank
        except RuntimeError:
            rank = 0
        if rank == 0:
            self._target.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def _quiet(threads: bool) -> None:
    """Lets only rank 0 write to stdout; the stderr of all replicas stays."""
    if threads:
        if not isinstance(sys.stdout, _FromRankZero):
            sys.stdout = _FromRankZero(sys.stdout)
    else:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextlib.contextmanager
def _no_stdout() -> Iterator[None]:
    """Hides what gloo writes to stdout, its connections, for which it has no switch."""
    sys.stdout.flush()
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)


def _prepare(flag: str) -> StopFlag:
    """Makes this process print its stacks on SIGUSR1 and at a crash, and end with its parent; opens the flag."""
    import faulthandler

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the caller sends it to processes that hang
    if sys.platform == "linux":
        # The kernel does it, also while a thread holds the GIL. `_die_with_caller` ends the grandchildren too.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    stop_flag = StopFlag(flag)
    preemption.join(stop_flag)
    return stop_flag


def _die_with_caller(flag: str) -> None:
    """Ends this session's processes when stdin closes, which the caller holds until it ends."""
    while sys.stdin.buffer.read(4096):
        pass
    Path(flag).unlink(missing_ok=True)  # left by a killed caller, if not all had opened it
    os.killpg(0, signal.SIGKILL)


def _watch_children(reporter: _Reporter) -> None:
    """Reports each child process that ends; a thread waits for each, so that their order does not matter."""
    watched: set[int] = set()
    pause = 0.2  # all replicas are started soon; later checks are rare, or they would count as a sign of life
    while True:
        for pid in {pid for pid, stat in processes() if int(stat[1]) == os.getpid()} - watched:
            watched.add(pid)
            threading.Thread(target=_report_end, args=(reporter, pid), daemon=True).start()
        time.sleep(pause)
        pause = min(1.2 * pause, 10.0)


def processes() -> Iterator[tuple[int, list[str]]]:
    """The id and the fields from the third on (proc_pid_stat(5)) of all processes, also of ended, unreaped ones."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            yield int(path.parent.name), path.read_text().rpartition(")")[2].split()


def _report_end(reporter: _Reporter, pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # leaves its status to the code that started it
        if ended is not None:
            signalled = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            reporter.send("ended", (pid, -ended.si_status if signalled else ended.si_status))


def main() -> None:
    """Starts the replicas and waits until they end: the launcher."""
    address, key, flag, backend, hang_timeout, payload = pickle.load(sys.stdin.buffer)
    stop_flag = _prepare(flag)
    threading.Thread(target=_die_with_caller, args=(flag,), daemon=True).start()
    reporter = _Reporter(LAUNCHER, address, key)
    arguments = (address, key, flag, payload, backend)
    rehearsal = backend.device_type == "xla-cpu" and backend.mesh is None
    if rehearsal:
        preemption.catch_sigterm()
    else:
        # The replicas get a SIGTERM too, and decide how to end. (They would inherit SIG_IGN.)
        signal.signal(signal.SIGTERM, stop_flag.ask)
        threading.Thread(target=_watch_children, args=(reporter,), daemon=True).start()
    status = 0
    try:
        if rehearsal:
            _quiet(threads=True)
            cpu_simulation.run(lambda: _xla_replica(0, *arguments), backend.num_replicas, hang_timeout)
        elif backend.device_type == "tpu" and backend.mesh is None:
            import torch_xla.distributed.xla_multiprocessing as xmp

            xmp.spawn(_xla_replica, args=arguments, nprocs=backend.num_replicas)
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            spawn = multiprocessing.get_context("spawn")
            if backend.mesh is not None:
                replicas = [spawn.Process(target=_mesh_process, args=arguments)]
            else:
                ranks = range(backend.num_replicas or 1)
                replicas = [spawn.Process(target=_torch_replica, args=(rank, *arguments, port)) for rank in ranks]
            for replica in replicas:
                replica.start()
            for replica in replicas:  # their order does not matter: if one fails, the caller ends the others
                replica.join()
            status = int(any(replica.exitcode for replica in replicas))
    except Exception:
        reporter.send("error", traceback.format_exc())
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without waiting for threads of the XLA runtime and the one that reads stdin


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and os.environ.get("PJRT_DEVICE") == "TPU":
    # The main thread of a TPU's process, which only waits for its replicas: they are threads.
    preemption.catch_sigterm()
