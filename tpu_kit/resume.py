"""Which checkpoint a run goes on from, and whether it may."""

from __future__ import annotations

import importlib.metadata
import sys

from tpu_kit.checkpoint import Checkpoints
from tpu_kit.config import TrainConfig, from_dict
from tpu_kit.manifest import Checkpoint, scan
from tpu_kit.parameters import parameters

# What may differ: how long to train, when to look, where to run. How rows are split over replicas and passes is
# compared by the global batch, and the data by its hash.
_FREE = {
    "optim.max_steps", "optim.epochs", "optim.eval_steps", "optim.early_stop_patience", "optim.batch_size",
    "optim.gradient_accumulation", "optim.global_batch_size", "optim.on_nan", "optim.loss_chunk", "optim.remat",
    "optim.max_loss_rise", "optim.mlp_tile", "model.attention", "model.quant_cache",
    "data.num_proc", "output_dir", "run_name",
}  # fmt: skip
_FREE_SECTIONS = ("checkpoint", "launch", "tracking")


def find_checkpoint(config: TrainConfig, owned: Checkpoints | None) -> Checkpoint | None:
    """The checkpoint to go on from, or None to start anew.

    Args:
        config: its `checkpoint.resume` says whether.
        owned: the folder, for the process that writes there: it reads all, and sets what is damaged, or not wanted,
            aside. The others come after it.

    Raises:
        ValueError: resume=must, and there is none.
    """
    if config.checkpoint.resume == "never":
        if owned is not None:
            owned.restart()
        return None
    place = config.checkpoints_place
    found = owned.newest() if owned is not None else next(reversed(scan(place)[0]), None)
    if found is None and config.checkpoint.resume == "must":
        raise ValueError(
            f"checkpoint.resume=must, but {place} has no complete checkpoint: check output_dir, or set "
            "checkpoint.resume=auto to start anew where there is none"
        )
    return found


def check_resume(found: Checkpoint, config: TrainConfig, global_batch: int, fingerprint: str, quiet: bool) -> None:
    """Makes sure that the run is the one that wrote the checkpoint; prints what differs and does no harm.

    Args:
        found: the checkpoint.
        config: the run that wants to go on.
        global_batch: its rows per update.
        fingerprint: of its data.
        quiet: print nothing.

    Raises:
        ValueError: something differs that makes it another run; all of it is named.
    """
    state, before = found.document("state"), from_dict(found.document("config"), source="checkpoint")
    changed = [name for name in parameters() if before[name] != config[name]]
    free = [name for name in changed if name in _FREE or name.split(".")[0] in _FREE_SECTIONS]
    problems = [f"{name}: {before[name]!r} there, {config[name]!r} now" for name in changed if name not in free]
    if state["global_batch_size"] != global_batch:
        problems.append(f"rows per update: {state['global_batch_size']} there, {global_batch} now")
    if state["fingerprint"] != fingerprint and not any(problem.startswith("data.") for problem in problems):
        problems.append("the data: other rows, tokens or packing than there, though its parameters are the same")
    if problems:
        raise ValueError(
            f"{found.path} is of another run:\n  " + "\n  ".join(problems) + "\nSet these back, or start anew: another "
            "output_dir, or checkpoint.resume=never (which moves the old checkpoints aside)"
        )
    if not quiet:
        differ = "".join(f"; {name} is {config[name]!r}, was {before[name]!r}" for name in free)
        print(f"resumed          from step {found.step}, {found.path}{differ}", file=sys.stdout, flush=True)


def versions() -> dict[str, str]:
    """Versions of what trains, for the checkpoint."""
    found = {}
    for name in ("tpu_kit", "torch", "torch_xla", "transformers", "peft"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
