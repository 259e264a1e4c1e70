"""`python -m tpu_kit COMMAND ...`: the commands are in cli.py."""

import gc
import sys

from tpu_kit.cli import main
from tpu_kit.distributed.runtime import GC_THRESHOLD

if __name__ == "__main__":
    gc.set_threshold(GC_THRESHOLD)
    status = main()
    gc.freeze()  # or they would be looked through once more at the end
    sys.exit(status)
