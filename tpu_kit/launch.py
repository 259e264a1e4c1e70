"""launch(fn, config): run a function on every device, from a notebook, a script or a test.

    calling process              launcher (replica.py)            replicas (replica.py)
    (a kernel; touches      -->  a session of its own; gets  -->  TPU: processes of xmp.spawn
    no device) supervisor.py     fn and config through stdin      xla-cpu: threads of the launcher (rehearsal.py)
         ^                                                        CUDA, several CPUs: processes of torch.distributed
         |                                                             |
         +-- text of rank 0 (stdout, stderr), a socket of messages ----+

Any end of the caller ends the launcher and all replicas. One CPU replica runs inline: there is no device to keep free.
What ends a launch early, and how a training loop then saves first, is in preemption.py.
"""

from __future__ import annotations

import builtins
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from tpu_kit import preemption, runtime
from tpu_kit.config import TrainConfig
from tpu_kit.host import check_memory
from tpu_kit.machine import Machine, check_holder, check_process
from tpu_kit.preemption import Board, Notices
from tpu_kit.runtime import Backend, Runtime
from tpu_kit.supervisor import LaunchError, Supervisor

__all__ = ["LaunchError", "launch"]

T = TypeVar("T")
# A cell that calls the device, not one that only imports the library.
_TOUCHES = r"xla_device\(|torch_xla\.(device|devices|real_devices|sync|launch)\(|\b(xm|xr|xmp)\.\w+\(|\.to\(.xla"


def launch(fn: Callable[[TrainConfig], T], config: TrainConfig) -> T:
    """Runs `fn(config)` in every replica and returns rank 0's result.

    Args:
        fn: a function of a module (one of a notebook's cell cannot reach another process). In it,
            `runtime.current()` is the replica's runtime.
        config: the run; its `launch` section says where.

    Returns:
        What rank 0 returned; it must be picklable.

    Raises:
        ValueError: what was asked for cannot be had: the device, its memory, or `fn` itself.
        LaunchError: a replica failed; the message has the rank and the traceback.
        KeyboardInterrupt, SystemExit: a signal, once all replicas have ended. A function that heeds notices
            (`preemption.Agreement`) returns its result at the first signal, and is ended at the second.
    """
    backend = runtime.detect(config.launch)
    # A notebook shows stderr as if it were an error; a command's stdout may be JSON.
    print(f"tpu_kit: {backend}", file=sys.stdout if hasattr(builtins, "__IPYTHON__") else sys.stderr, flush=True)
    if backend.device_type == "cpu" and backend.num_replicas == 1:
        with Notices(_budget(config)) as notices:
            return _inline(fn, config, notices.board)
    payload = _payload(fn, config)
    _check_host(backend, config)
    with Notices(_budget(config)) as notices:
        return Supervisor(backend, config.launch.hang_timeout).run(payload, notices)


def _budget(config: TrainConfig) -> float | None:
    minutes = config.checkpoint.budget_minutes
    return None if minutes is None else minutes * 60


def _inline(fn: Callable[[TrainConfig], T], config: TrainConfig, board: Board) -> T:
    import torch

    board.hide()
    preemption.join(board)
    runtime.enter(Runtime("cpu", 0, 1, torch.device("cpu")))
    try:
        return fn(config)
    finally:
        runtime.enter(None)
        preemption.join(None)


def _payload(fn: Callable[..., Any], config: TrainConfig) -> bytes:
    name = getattr(fn, "__qualname__", repr(fn))
    if getattr(fn, "__module__", None) == "__main__":
        raise ValueError(
            f"{name} is defined in a notebook cell or in the script itself, and replicas are other processes, which "
            f"cannot find it there. Put it into a file, say steps.py, and use: from steps import {name}"
        )
    try:
        return pickle.dumps((fn, config))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{name} cannot be sent to the replicas ({error}): use a plain function of a module"
        ) from error


def _check_host(backend: Backend, config: TrainConfig) -> None:
    """What would only fail, or be killed, in the replicas: memory for all models, and a TPU that another one holds."""
    at = Machine()
    processes = backend.num_replicas or max(len(at.tpus()), 1)
    memory = check_memory(at, config, processes)
    if memory.status == "failure":
        raise ValueError(f"not enough host memory to start {processes} replicas: {memory.found}. Use {memory.fix}")
    if backend.device_type == "tpu":
        for check in (check_process(at), check_holder(at)):
            if check.status == "failure":
                raise ValueError(f"the TPU cannot be used: {check.found}{_culprit()}. {check.fix}")


def _culprit() -> str:
    """The notebook cell that likely initialised the device."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    cells = shell.user_ns.get("In", []) if shell else []
    for number, source in enumerate(cells):
        if line := next((line for line in source.splitlines() if re.search(_TOUCHES, line)), None):
            return f" (likely by cell [{number}]: {line.strip()})"
    return ""
