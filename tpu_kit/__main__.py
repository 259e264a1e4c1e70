"""`tpu_kit COMMAND ...` and `python -m tpu_kit COMMAND ...`: the commands are in cli.py."""

import gc
import sys
from typing import NoReturn

from tpu_kit.cli import main
from tpu_kit.config.fields import secrets_hidden
from tpu_kit.distributed.runtime import GC_THRESHOLD


def run() -> NoReturn:
    """Runs the command of the process's arguments, and ends the process with its exit code."""
    gc.set_threshold(GC_THRESHOLD)
    hidden = secrets_hidden()  # to the end: Python prints the traceback of an error that no command knows
    hidden.__enter__()
    status = main()
    gc.freeze()  # or they would be looked through once more at the end
    sys.exit(status)


if __name__ == "__main__":
    run()
