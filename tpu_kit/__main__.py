"""`tpu_kit COMMAND ...` and `python -m tpu_kit COMMAND ...`: the commands are in cli.py."""

import gc
import sys
from typing import Any, NoReturn

from tpu_kit.cli import main
from tpu_kit.distributed.output import SafeStream
from tpu_kit.distributed.replica.runtime import GC_THRESHOLD


def run() -> NoReturn:
    """Runs the command of the process's arguments, and ends the process with its exit code."""
    gc.set_threshold(GC_THRESHOLD)
    streams: list[Any] = [SafeStream(stream) for stream in (sys.stdout, sys.stderr)]
    sys.stdout, sys.stderr = streams  # to the end: Python prints the traceback of an error that no command knows
    status = main()
    gc.freeze()  # or they would be looked through once more at the end
    sys.exit(status)


if __name__ == "__main__":
    run()
