"""`python -m tpu_kit COMMAND ...`: the commands are in cli.py."""

import sys

from tpu_kit.cli import main

if __name__ == "__main__":
    sys.exit(main())
