"""Counts how often a run computes every fact of `FACTS`, in the calling process and in every replica.

    python -m tests.support.counted_facts RECIPE FOLDER UPDATES,... NAME SETTING ...

Trains to each number of UPDATES. FOLDER/UPDATES then holds a JSON file per process, fact -> number of calls:
caller-HOST.json for calling processes, replica-RANK.json for replicas.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.distributed.hosts import find_hosts
from tpu_kit.distributed.replica import runtime
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.recipes import distillation, grpo, replica, sft

FACTS = {
    "the device": ("tpu_kit.distributed.detection", "detect"),
    "the listing of checkpoints": ("tpu_kit.training.checkpoint.manager", "list_checkpoints"),
    "the confirmation of rank 0": ("tpu_kit.training.checkpoint.manager", "CheckpointManager.newest"),
    "identity of the weights": ("tpu_kit.model.weights.base_identity", "identify"),
    "the model's configuration": ("tpu_kit.model.weights.source", "read_config"),
    "the objective": ("tpu_kit.training.objectives", "objective_of"),
    "the estimate of memory": ("tpu_kit.planning.memory.memory_estimate", "estimate"),
    "the number of updates": ("tpu_kit.training.losses.sampled_updates", "planned_updates"),
}
"""Fact -> the module and function that compute it."""

_calls: dict[int, Counter[str]] = {}  # by thread: replicas of XLA:CPU are threads
_installing, _installed = threading.Lock(), list[bool]()


def _count() -> Counter[str]:
    return _calls.setdefault(threading.get_ident(), Counter())


def _counted(fact: str, found: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(found)
    def call(*arguments: Any, **options: Any) -> Any:
        _count()[fact] += 1
        return found(*arguments, **options)

    return call


def install() -> None:
    """Wraps every function of `FACTS` by a counter, wherever it was imported; once per process."""
    with _installing:
        if not _installed:
            _installed.append(True)
            _install()


def _install() -> None:
    for fact, (module, name) in FACTS.items():
        holder: Any = importlib.import_module(module)
        if "." in name:
            holder, name = getattr(holder, name.partition(".")[0]), name.rpartition(".")[2]
            setattr(holder, name, _counted(fact, getattr(holder, name)))
            continue
        found = getattr(holder, name)
        call = _counted(fact, found)
        for holder in [held for name, held in [*sys.modules.items()] if name.startswith("tpu_kit")]:
            for held in [held for held, value in vars(holder).items() if value is found]:
                setattr(holder, held, call)


def fine_tune(config: TrainConfig, folder: Path, **given: Any) -> Any:
    """`replica.fine_tune`, with its calls counted."""
    install()
    before = Counter(_count())
    result = replica.fine_tune(config, **given)
    found = _count() - before
    (folder / f"replica-{runtime.current().rank}.json").write_text(json.dumps(found))
    _count().subtract(found)  # a replica may run in the calling process, whose counts must not include it
    return result


def main(recipe: str, folder: str, updates: str, name: str, *settings: str) -> None:
    read_shape(load_config(name, settings).model)  # downloads the model's configuration before counting starts
    install()
    for steps in updates.split(","):
        to = Path(folder, steps)
        to.mkdir(exist_ok=True)
        sft.fine_tune = functools.partial(fine_tune, folder=to)
        config = load_config(name, [*settings, f"output_dir={folder}/run", f"max_steps={steps}"])
        before = Counter(_count())
        {"train": sft.train, "grpo": grpo.grpo, "distill": distillation.distill}[recipe](config)
        (to / f"caller-{find_hosts().index}.json").write_text(json.dumps(_count() - before))


if __name__ == "__main__":
    from tests.support import counted_facts  # functions of __main__ would be pickled by value

    counted_facts.main(*sys.argv[1:])
