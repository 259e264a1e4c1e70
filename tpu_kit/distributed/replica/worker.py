"""Runs the launcher, `python -m tpu_kit.distributed.replica.worker`, and the replicas that it starts.

These processes report to the calling process (launch.py) with files in the launch's folder:

- started: the process id,
- done: the pickled result of this host's first replica; None of others,
- error: the traceback, or only the text of an error of files or the network that the kit itself raised,
- refused: the text of an error in the user's input,
- outdated: the text of `Outdated`,
- ended: the id and status of an ended process, from the launcher.

The calling process stops replicas with a flag in that folder (preemption.py).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from tpu_kit.config.fields import hide_secrets
from tpu_kit.distributed import preemption
from tpu_kit.distributed.child_process import end_with_parent
from tpu_kit.distributed.detection import Backend
from tpu_kit.distributed.hosts import Hosts
from tpu_kit.distributed.preemption import StopFlag
from tpu_kit.distributed.replica import cpu_simulation, main_thread, runtime
from tpu_kit.distributed.replica.exchange import ProcessGroup
from tpu_kit.distributed.replica.runtime import Outdated, Runtime, Shared
from tpu_kit.distributed.sending import refuse_devices, restored
from tpu_kit.machine.storage import atomic
from tpu_kit.torch_tpu.process_group import prepare_launch

REFUSALS: dict[str, type[ValueError]] = {"refused": ValueError, "outdated": Outdated}
"""Kinds of reports that the calling process raises as errors without a traceback."""
LAUNCHER = -1  # the launcher's rank
_LIMIT = timedelta(days=1)  # timeout of a collective: the calling process detects hangs
_LOOK = 0.2  # seconds between two checks of the replicas' processes
# transformers replaces its module in sys.modules during its import. A thread that imports it at the same time gets the
# replaced module, which has no classes. The lock makes replicas that are threads import transformers one by one.
_IMPORTING = threading.Lock()


class ReplicaMessage(NamedTuple):
    """A report of a process to the calling process; `kind` and `value` are as in this module's docstring."""

    at: int  # nanoseconds of the machine's monotonic clock
    rank: int
    kind: str
    value: Any

    @classmethod
    def read(cls, path: Path) -> ReplicaMessage:
        """Reads a report from `write`. Unpickling it is safe, because other users cannot write to the folder."""
        at, rank, kind = path.name.split(".")
        return cls(int(at), int(rank), kind, pickle.loads(path.read_bytes()))


def write(folder: str, rank: int, kind: str, value: Any) -> None:
    """Writes a report to the launch's folder atomically, errors without secrets; file names sort by time."""
    value = hide_secrets(value) if kind in (*REFUSALS, "error") else value
    with atomic.replacing(Path(folder, f"{time.monotonic_ns():020}.{rank}.{kind}")) as part:
        part.write_bytes(pickle.dumps(value))


class _ResultPickler(pickle.Pickler):
    """Refuses tensors on a device: unpickling them would open the device in the reading process."""

    def persistent_id(self, obj: Any) -> None:
        try:
            refuse_devices(obj)
        except pickle.PicklingError as error:
            raise pickle.PicklingError(f"{error}; read it with runtime.current().to_host([...])") from None


def _pickled(name: str, result: Any) -> bytes:
    """Pickles the result of the function `name`; raises TypeError if it cannot be sent (a tensor on a device)."""
    buffer = io.BytesIO()
    try:
        _ResultPickler(buffer).dump(result)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{name} returned a {type(result).__name__} that cannot be sent to the calling process ({error}); return "
            "plain values, or write it to a file and return its path"
        ) from error
    return buffer.getvalue()


def _replica(rank: int, first: bool, make: Callable[[], Runtime], folder: str, payload: bytes) -> None:
    """Runs the function of `payload` with the runtime of `make`; reports its start and end; SystemExit(1) for an error.

    The report of the end has the result if this is the host's `first` replica, else None.
    """
    write(folder, rank, "started", os.getpid())
    try:
        runtime.enter(make())
        fn, config = restored(payload)
        result = fn(config)
        write(folder, rank, "done", _pickled(getattr(fn, "__qualname__", repr(fn)), result) if first else None)
    except BaseException as error:
        if _is_from_the_kit(error, ValueError):
            write(folder, rank, "outdated" if isinstance(error, Outdated) else "refused", str(error))
        else:
            known = _is_from_the_kit(error, OSError)
            write(folder, rank, "error", f"{error}\n" if known else traceback.format_exc())
        raise SystemExit(1) from None  # prints nothing: the caller prints the error


def _is_from_the_kit(error: BaseException, kind: type[Exception]) -> bool:
    """Whether the error is a `kind` that the kit itself raised, so that its text has advice and needs no traceback.

    An error with only the system's text, such as "No such file or directory", is not.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_in = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    number = getattr(error, "errno", None)
    plain = number is not None and error.args[1:] == (os.strerror(number),)  # the system's text has no advice
    return isinstance(error, kind) and raised_in.startswith("tpu_kit.") and not plain


def _xla_replica(
    _index: int, folder: str, payload: bytes, backend: Backend, shared: Shared | ProcessGroup | None = None
) -> None:
    """Runs a replica of torch_xla: on a TPU if `shared` is a ProcessGroup, else in a thread of the rehearsal."""
    import torch_xla
    import torch_xla.runtime as xr

    from tpu_kit.distributed.replica.backends import SimulatedRuntime, TpuRuntime

    with _IMPORTING:
        import transformers  # noqa: F401  # see `_IMPORTING`

    rank = xr.global_ordinal()

    def make() -> Runtime:
        if isinstance(shared, ProcessGroup):
            return TpuRuntime(rank, xr.world_size(), torch_xla.device(), shared)
        return SimulatedRuntime(rank, xr.world_size(), torch_xla.device(), shared)

    if backend.device_type == "tpu":
        _prepare(folder)
        _quiet(threads=xr.process_index() == 0)
    _replica(rank, rank % xr.local_device_count() == 0, make, folder, payload)
    # All replicas take the same steps: a replica that still waits for this replica would wait forever.
    cpu_simulation.end(f"rank {rank} has returned, and will not come to another step")


def _rehearsal(folder: str, payload: bytes, backend: Backend, hang_timeout: float) -> None:
    """Runs the process of the XLA:CPU replicas, which are its threads, and exits from it."""
    _prepare(folder)
    preemption.catch_stops()
    main_thread.serve()
    _quiet(threads=True)
    write(folder, 0, "started", os.getpid())  # before torch_xla is loaded, which may fail
    with _exit_at_once(folder, 0), ThreadPoolExecutor(1) as thread:
        count = backend.num_replicas or 1
        shared = Shared() if count > 1 else None
        replica = functools.partial(_xla_replica, 0, folder, payload, backend, shared)
        work = thread.submit(cpu_simulation.run, replica, count, hang_timeout)
        while not work.done():  # Python runs signal handlers only in this thread; a signal to another does not wake it
            wait([work], _LOOK)
        work.result()


def _mesh_process(folder: str, payload: bytes, backend: Backend) -> None:
    """Runs a payload of `payload_of` on this host's mesh, reports in `folder`, and ends this process with 0 or 1."""
    _prepare(folder)
    assert backend.mesh is not None
    mesh = backend.mesh

    def make() -> Runtime:
        import torch_xla

        from tpu_kit.distributed.replica.backends import MeshRuntime
        from tpu_kit.distributed.replica.mesh import start

        start(mesh)
        if backend.hosts.count > 1:
            _connect("gloo", backend.hosts, folder, backend.hosts.index, backend.hosts.count)
        return MeshRuntime(backend.device_type, mesh, torch_xla.device(), backend.hosts)

    with _exit_at_once(folder, backend.first_rank):
        _replica(backend.first_rank, True, make, folder, payload)


@contextlib.contextmanager
def _exit_at_once(folder: str, rank: int) -> Iterator[None]:
    """Reports an error of the block, then ends this process (1 after an error, else 0) without waiting for threads."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

    # tqdm's default lock has a semaphore, which Python reports as leaked after `os._exit`.
    tqdm.set_lock(threading.RLock())
    status = 0
    try:
        yield
    except SystemExit:
        status = 1
    except Exception:  # any error: the calling process raises it with this traceback
        write(folder, rank, "error", traceback.format_exc())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _torch_replica(local_rank: int, folder: str, payload: bytes, backend: Backend, hang_timeout: float) -> None:
    """Runs the process of a replica on a GPU, on a TPU with TorchTPU, or on the CPU, and exits from it."""
    _prepare(folder)
    import torch
    import torch.distributed as dist

    from tpu_kit.distributed.replica.backends import CpuRuntime, CudaRuntime, TorchTpuRuntime
    from tpu_kit.torch_tpu import process_group
    from tpu_kit.torch_tpu.device import open_device

    device_type, replicas, hosts = backend.device_type, backend.num_replicas or 1, backend.hosts
    rank, world_size = backend.first_rank + local_rank, replicas * hosts.count

    def make() -> Runtime:
        if device_type == "torch-tpu":
            if world_size > 1:
                process_group.take_chip(rank, world_size)
            opened = open_device()
            if world_size > 1:
                _connect(process_group.GROUP, hosts, folder, rank, world_size)
            return TorchTpuRuntime(rank, world_size, opened, hosts.count)
        device = torch.device("cuda", local_rank) if device_type == "cuda" else torch.device("cpu")
        if device_type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(max(1, torch.get_num_threads() // replicas))  # as OMP_NUM_THREADS says, or all
        if world_size > 1:
            # A process that waits for NCCL uses processor time, so the calling process cannot see that it hangs.
            kind, limit = "nccl" if device_type == "cuda" else "gloo", timedelta(seconds=3 * hang_timeout)
            _connect(kind, hosts, folder, rank, world_size, min(limit, _LIMIT))
        return (CudaRuntime if device_type == "cuda" else CpuRuntime)(rank, world_size, device, hosts.count)

    _quiet(threads=local_rank == 0)
    with _exit_at_once(folder, rank):
        _replica(rank, local_rank == 0, make, folder, payload)
        if dist.is_initialized():
            dist.destroy_process_group()


def _connect(kind: str, hosts: Hosts, folder: str, rank: int, world_size: int, limit: timedelta = _LIMIT) -> None:
    """Joins a process group `kind`, such as "gloo", through the hosts' store or, on one host, a file of the launch.

    `rank` and `world_size` count the processes of all hosts; `limit` is the timeout of a collective.
    """
    import torch.distributed as dist

    if hosts.count == 1:
        store: dist.Store = dist.FileStore(str(Path(folder, "replicas")), world_size)
    else:
        meeting = dist.TCPStore(*hosts.address, is_master=False)
        launch = meeting.add(f"launches of rank {rank}", 1)  # several launches share the store
        store = dist.PrefixStore(f"replicas {launch}", meeting)
    store.set_timeout(_LIMIT)
    with _no_stdout():
        dist.init_process_group(kind, store=store, timeout=limit, rank=rank, world_size=world_size)


class _FromRankZero:
    """The stdout of a process whose threads are replicas: drops the text of all ranks but 0."""

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
    """Drops this process's text on stdout: all of it, or if its `threads` are replicas, only of ranks other than 0."""
    if threads:
        if not isinstance(sys.stdout, _FromRankZero):
            sys.stdout = _FromRankZero(sys.stdout)
    else:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextlib.contextmanager
def _no_stdout() -> Iterator[None]:
    """Drops the text that the block writes to stdout: gloo's messages about connections, which it cannot turn off."""
    sys.stdout.flush()
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)


def _prepare(folder: str) -> None:
    """Prepares a replica's process: stacks on SIGQUIT, the end with the launcher, and the flag."""
    gc.set_threshold(runtime.GC_THRESHOLD)
    _show_stacks()
    end_with_parent()
    preemption.join(StopFlag(Path(folder)))


def _show_stacks() -> None:
    """Makes this process print its stacks at a crash and on SIGQUIT, which the calling process sends after a hang."""
    import faulthandler

    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, all_threads=True)


def _die_with_caller(folder: str) -> None:
    """Waits until stdin closes, as the calling process has ended; then deletes `folder` and kills this session."""
    while sys.stdin.buffer.read(4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _watch_children(folder: str, replicas: Sequence[BaseProcess], over: threading.Event) -> None:
    """Reports the ends (pid, status) of the replicas and other child processes, until `over` is set."""
    children, told = set(replicas), set[BaseProcess]()
    while True:
        last = over.wait(_LOOK)
        children |= set(multiprocessing.active_children())  # processes of xmp.spawn
        for child in [child for child in children - told if child.exitcode is not None]:
            told.add(child)
            write(folder, LAUNCHER, "ended", (child.pid, child.exitcode))
        if last:
            return


def main() -> None:
    """Runs the launcher: reads the launch from stdin, starts the replicas, waits until they end, and exits.

    stdin has the pickled (folder, backend, hang_timeout, payload) of `launch.Supervisor`. If it closes early, because
    the calling process has ended, this deletes the folder and kills all processes. The status is 1 if the start of a
    process or `xmp.spawn` fails, else 0; `folder` gets a report of every ended process.
    """
    folder, backend, hang_timeout, payload = pickle.load(sys.stdin.buffer)
    _show_stacks()
    # The replicas get the signal too, and decide how to end. (They inherit SIG_IGN, for example nohup's.)
    for number in [number for number in preemption.STOPS if signal.getsignal(number) is not signal.SIG_IGN]:
        signal.signal(number, StopFlag(Path(folder)).ask)
    threading.Thread(target=_die_with_caller, args=(folder,), daemon=True).start()
    replicas, over = _processes(folder, payload, backend, hang_timeout), threading.Event()
    watcher = threading.Thread(target=_watch_children, args=(folder, replicas, over))
    watcher.start()
    with _exit_at_once(folder, LAUNCHER):
        try:
            if not replicas:
                import torch_xla.distributed.xla_multiprocessing as xmp

                group = ProcessGroup(functools.partial(_connect, "gloo", backend.hosts, folder))
                xmp.spawn(_xla_replica, args=(folder, payload, backend, group), nprocs=backend.num_replicas)
            for replica in replicas:
                replica.start()
            for replica in replicas:  # their order does not matter: if one fails, the caller ends the others
                replica.join()
        finally:
            over.set()
            watcher.join()


def _processes(folder: str, payload: bytes, backend: Backend, hang_timeout: float) -> list[SpawnProcess]:
    """Makes the processes of this host's replicas, not started; none for replicas on a TPU, which xmp.spawn starts."""
    spawn, arguments = multiprocessing.get_context("spawn"), (folder, payload, backend)
    if backend.mesh is not None:
        return [spawn.Process(target=_mesh_process, args=arguments)]
    if backend.device_type == "tpu":
        return []
    if backend.device_type == "xla-cpu":
        return [spawn.Process(target=_rehearsal, args=(*arguments, hang_timeout))]
    ranks = range(backend.num_replicas or 1)
    if backend.device_type == "torch-tpu" and len(ranks) > 1:
        prepare_launch(len(ranks))
    return [spawn.Process(target=_torch_replica, args=(rank, *arguments, hang_timeout)) for rank in ranks]


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and os.environ.get("PJRT_DEVICE") == "TPU":
    # The main thread of a TPU's process only waits for its replicas, which are threads.
    preemption.catch_stops()
    main_thread.serve()
