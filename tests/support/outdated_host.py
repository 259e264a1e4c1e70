"""A host of a run whose newest checkpoint changes between plan and launch.

    python -m tests.support.outdated_host CHECKPOINT CHECKPOINTS NAME SETTING ...

Trains; before the first launch host 0 copies a checkpoint of another job into the folder of checkpoints.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from tpu_kit.config.loader import load_config
from tpu_kit.distributed.hosts import find_hosts
from tpu_kit.recipes import sft


def main(checkpoint: str, checkpoints: str, name: str, *settings: str) -> None:
    launch, todo = sft.launch, [find_hosts().index == 0]

    def after_the_change(*given: Any, **options: Any) -> Any:
        if todo and todo.pop():
            shutil.copytree(checkpoint, Path(checkpoints, Path(checkpoint).name))
        return launch(*given, **options)

    sft.launch = after_the_change
    print(f"ended at step {sft.train(load_config(name, settings)).step}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
