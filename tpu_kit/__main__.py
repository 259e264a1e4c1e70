"""`tpu_kit COMMAND ...` and `python -m tpu_kit COMMAND ...`: the commands are in cli.py."""

import gc
import sys
from typing import Any, NoReturn

from tpu_kit.cli import main
from tpu_kit.distributed.output import SafeStream
from tpu_kit.distributed.replica.runtime import GC_THRESHOLD


def run() -> NoReturn:
    """Runs `cli.main` with `sys.argv`; raises SystemExit with its exit code. stdout and stderr stay `SafeStream`s."""
    gc.set_threshold(GC_THRESHOLD)
    streams: list[Any] = [SafeStream(stream) for stream in (sys.stdout, sys.stderr)]
    sys.stdout, sys.stderr = streams  # until the end: Python prints tracebacks of unhandled errors
    status = main()
    gc.freeze()  # skips a garbage collection at exit
    sys.exit(status)


if __name__ == "__main__":
    run()
