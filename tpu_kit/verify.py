"""A minute's rehearsal of all that a run does: train, save, go on from the checkpoint, answer with the adapter.

    from tpu_kit.verify import rehearse
    for check in rehearse(config):
        print(check)

It is the real thing, on the devices that the configuration names, with the model and the problems that come with the
kit. The doctor asks whether a run can start; this shows that one also ends well.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from tpu_kit.config import TrainConfig, load_config
from tpu_kit.machine import Check

T = TypeVar("T")

_FIRST, _THEN = 4, 8  # updates before and after the checkpoint
_QUESTION = "Tom has 12 apples and gives 5 of them to Mia. How many apples does Tom have now?"
_RUN = {
    "split": "train[:1000]", "max_length": 128, "batch_size": 2, "warmup_steps": 1, "logging_steps": 1,
    "save_steps": _FIRST, "eval_rows": 0, "eval_steps": None, "generate_rows": 0, "r": 8,
}  # fmt: skip


def rehearse(config: TrainConfig) -> Iterator[Check]:
    """Run it, and say of each part how it went; the first that fails is the last.

    Args:
        config: its `launch` section says where.
    """
    from tpu_kit import manifest
    from tpu_kit.generate import Sampling, generate
    from tpu_kit.sft import train
    from tpu_kit.tracking import read_metrics

    with tempfile.TemporaryDirectory(prefix="tpu_kit-") as folder:
        small = load_config("embedded-cot", {**_RUN, "output_dir": folder, "max_steps": _FIRST})
        small = replace(small, launch=config.launch)
        longer = replace(small, optim=replace(small.optim, max_steps=_THEN))
        try:
            seconds, said, result = _quietly(lambda: train(small))
            losses = [record["loss"] for record in read_metrics(folder)]
            programs = f", {result.metrics['compiles']:.0f} compiled programs" if "compiles" in result.metrics else ""
            text = f"{result.step} updates in {seconds:.0f} s, loss {losses[0]:.2f} -> {losses[-1]:.2f}{programs}"
            yield Check("Training", "ok" if losses[-1] < losses[0] else "warning", text)

            found, damaged = manifest.scan(small.checkpoints_place, verify=True)
            if damaged or not found or found[-1].step != _FIRST:
                yield Check(
                    "Checkpoint", "failure", f"of step {_FIRST} there is none that is whole", "look at the disk"
                )
                return
            text = f"step {found[-1].step}, {found[-1].size / 1e6:.1f} MB, every file as its manifest says"
            yield Check("Checkpoint", "ok", text)

            seconds, said, result = _quietly(lambda: train(longer))
            resumed = read_metrics(folder)[-1]["resumed_from"]
            text = f"went on from step {resumed} to {result.step} in {seconds:.0f} s"
            yield Check("Resume", "ok" if resumed == _FIRST else "failure", text, "" if resumed else said[-300:])

            prompt = [{"role": "user", "content": _QUESTION}]
            sampling = Sampling(max_new_tokens=32)
            seconds, said, (reply,) = _quietly(
                lambda: generate(longer, [prompt], sampling, adapter_dir=result.adapter_dir)
            )
            yield Check("Generation", "ok", f"{len(reply.tokens)} tokens with the adapter, in {seconds:.0f} s in all")
        except (RuntimeError, ValueError, OSError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            text = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
            where = f"device_type={config.launch.device_type}"
            fix = f"python -m tpu_kit train embedded-cot max_steps={_FIRST} {where} shows all of it"
            yield Check("Rehearsal", "failure", text[:400], fix)


def _quietly(run: Callable[[], T]) -> tuple[float, str, T]:
    """Seconds, what it printed, and the result."""
    said, start = io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        result = run()
    return time.monotonic() - start, said.getvalue(), result
