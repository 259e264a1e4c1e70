"""Traces a step and compiles it for a TPU that is not there: `python -m tpu_kit.planning.compile_worker`, a process.

libtpu has a compile-only client, reached through jaxlib. It is made here, in a process that ends with the compile: the
caller's must stay free of torch_xla, and a compile can be stopped by no other means than ending its process. The
settings it runs under are in `compile_check`; it opens no chip and takes no lock.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    """Does what the JSON on stdin asks for and writes `result.json` beside it; says on stdout what it is about."""
    request = json.loads(sys.stdin.readline())
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the libraries print goes where their warnings go
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan compiles on if the caller is killed
    if os.getppid() != request["parent"]:
        sys.exit(1)
    try:
        answer = _answer(request, lambda what: print(what, file=told))
    except ValueError as error:
        answer = {"error": str(error)}
    Path(request["folder"], "result.json").write_text(json.dumps(answer))
    os._exit(0)  # libtpu hangs at times on its way out


def _answer(request: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    from tpu_kit.config.loader import from_dict
    from tpu_kit.planning.trace import trace_step
    from tpu_kit.xla.tpu_compiler import compile_program, fingerprint

    say("tracing")
    start = time.monotonic()
    program = trace_step(from_dict(request["config"]), request["num_replicas"])
    traced = {
        "program": fingerprint(program),
        "trace_seconds": time.monotonic() - start,
        "trace_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    known = Path(request["known"], f"{traced['program']}-{request['suffix']}.json") if request["known"] else None
    if known and known.is_file():
        return traced | {"known": str(known)}
    say(f"compiling for {request['topology']['name']}")
    return traced | compile_program(program, request)


if __name__ == "__main__":
    main()
