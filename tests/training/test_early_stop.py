"""The best checkpoint is kept, and a run that stopped early stays stopped when it is launched again."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.recipes.conftest import world
from tests.recipes.test_sft import Configure, configure, records
from tpu_kit.config.loader import TrainConfig
from tpu_kit.recipes import run_plan, sft
from tpu_kit.recipes.result import TrainResult
from tpu_kit.training import trainer
from tpu_kit.training.checkpoint import manager, manifest

__all__ = ["configure", "world"]  # fixtures


LOSSES = (5.0, 3.0, 3.0, 4.0, 2.5, 2.5, 6.0)  # held-out losses after each update, with two ties


def measure(monkeypatch: pytest.MonkeyPatch, losses: tuple[float, ...] = LOSSES) -> None:
    """Makes the evaluations of a real run return `losses`."""

    def held_out_loss(loop: trainer.Trainer) -> tuple[float, dict[str, float]]:
        return losses[int(loop.state.applied) - 1], {}

    monkeypatch.setattr(trainer.Trainer, "_held_out_loss", held_out_loss)


def kill(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Makes a run fail before it makes update `step`."""
    made = trainer.train_step

    def train_step(model: Any, state: Any, *rest: Any) -> None:
        if int(state.applied) + 1 == step:
            raise RuntimeError("killed")
        made(model, state, *rest)

    monkeypatch.setattr(trainer, "train_step", train_step)


def assert_best(config: TrainConfig, done: int) -> None:
    """Checks that the best evaluation's checkpoint is the best, and that checkpoints have only their own metrics."""
    every, total = config.optim.eval_steps, config.optim.max_steps
    assert every is not None
    evaluated = [step for step in range(1, done + 1) if step % every == 0 or step == total]
    best = min(evaluated, key=lambda step: LOSSES[step - 1])
    found, damaged = manager.list_checkpoints(config.checkpoints_place, verify=True)
    assert not damaged
    assert manifest.best_of(found) is next(one for one in found if one.step == best)
    for one in found:
        assert one.metrics.get("eval_loss") == (LOSSES[one.step - 1] if one.step in evaluated else None)
    newest = found[-config.checkpoint.keep :]
    assert [one.step for one in found] == sorted({best, *(one.step for one in newest)})


@pytest.mark.parametrize(("eval_steps", "save_steps", "keep"), [(2, 1, 1), (2, 3, 1), (3, 2, 2), (1, 5, 1), (3, 7, 1)])
def test_the_best_checkpoint_is_that_of_the_best_evaluation(
    configure: Configure,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    eval_steps: int,
    save_steps: int,
    keep: int,
) -> None:
    measure(monkeypatch)
    config = configure(max_steps=7, eval_steps=eval_steps, save_steps=save_steps, keep=keep, logging_steps=1)
    with monkeypatch.context() as killed:
        kill(killed, 5)
        with pytest.raises(RuntimeError, match="killed"):
            sft.train(config)
    assert_best(config, 4)
    result = sft.train(config)
    assert_best(config, 7)

    capsys.readouterr()
    manager.print_checkpoints(config.output_dir or "", as_json=True)
    (best,) = (one for one in json.loads(capsys.readouterr().out)["complete"] if one["best"])
    manager.print_checkpoints(config.output_dir or "")
    assert capsys.readouterr().out.count("best") == 1
    assert (result.metrics["eval_loss"], result.metrics["eval_step"]) == (LOSSES[best["step"] - 1], best["step"])
    assert best["metrics"]["eval_loss"] == result.metrics["eval_loss"]
    kept, exported = (
        load_file(Path(folder, "adapter_model.safetensors")) for folder in (best["path"], result.adapter_dir)
    )
    assert kept.keys() == exported.keys() and all(bool((kept[name] == exported[name]).all()) for name in kept)


def adapter_of(result: TrainResult) -> bytes:
    return Path(result.adapter_dir, "adapter_model.safetensors").read_bytes()


def test_a_run_that_starts_anew_each_time_is_continued_with_another_setting(configure: Configure) -> None:
    """The same command would start again at step 0 and move its checkpoints aside."""
    result = sft.train(configure(max_steps=50, eval_rows=0, budget_minutes=1e-6, resume="never"))
    assert result.status == "preempted"
    end = "To go on from there, run this again with checkpoint.resume=auto: the same cell, or the same command"
    assert str(result).endswith(end)


def test_a_run_that_was_stopped_early_stays_stopped(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(monkeypatch, (5.0, 3.0, 4.0, 3.5, 3.4, 2.0, 3.0, 2.1))
    config = configure(max_steps=8, eval_steps=1, early_stop_patience=2, save_steps=3)
    first = sft.train(config)
    adapter, logged = adapter_of(first), records(config, "train")
    assert (first.status, first.step, first.metrics["eval_step"]) == ("stopped", 4, 2)
    assert str(first).splitlines()[:2] == [
        "stopped early at step 4 of 8: none of the last 2 evaluations was better than step 2 (3); adapter in "
        f"{config.output_path}/adapter",
        "  To train on from there, raise optim.early_stop_patience or set it to null, and run this again",
    ]
    capsys.readouterr()
    for _ in range(2):
        again = sft.train(config)
        names = ("loss", "eval_loss", "eval_step", "train_seconds", "skipped_updates")
        assert [again.metrics[name] for name in names] == [first.metrics[name] for name in names]
        assert (again.status, again.step, again.reason) == ("stopped", 4, first.reason)
        assert adapter_of(again) == adapter
        assert records(config, "train") == logged and len(records(config, "eval")) == 4
    assert "stopped          at step 4 before; nothing is trained: none of the last 2" in capsys.readouterr().out

    longer = sft.train(replace(config, optim=replace(config.optim, early_stop_patience=3)))
    assert (longer.status, longer.step, longer.metrics["eval_step"]) == ("stopped", 5, 2)
    assert adapter_of(longer) == adapter
    never = sft.train(replace(config, optim=replace(config.optim, early_stop_patience=None)))
    assert (never.status, never.step, never.metrics["eval_step"]) == ("finished", 8, 6)
    assert adapter_of(never) != adapter


def test_a_run_is_not_cut_short_after_the_fact(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(max_steps=6, save_steps=2, keep=2, logging_steps=1)
    first = sft.train(config)
    before = adapter_of(first)
    with monkeypatch.context() as early:  # raises before the data is read
        early.setattr(run_plan, "prepare_run", None)
        with pytest.raises(ValueError, match=r"step-00000006 has 6 updates, and optim.max_steps=4 asks") as caught:
            sft.train(replace(config, optim=replace(config.optim, max_steps=4)))
    text = str(caught.value)
    assert "Raise optim.max_steps to 6 updates or more" in text and "checkpoint.resume=never" in text
    assert adapter_of(first) == before
    by_epochs = replace(config.optim, max_steps=None, epochs=0.05)
    with pytest.raises(ValueError, match=r"optim.epochs=0.05 asks for 1: the run is past its end"):
        sft.train(replace(config, optim=by_epochs))


def test_the_seconds_of_a_run_are_those_of_all_its_launches(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer.train_step

    def train_step(*given: Any) -> None:
        time.sleep(0.1)
        made(*given)

    monkeypatch.setattr(trainer, "train_step", train_step)
    config = configure(max_steps=6, save_steps=3)
    with monkeypatch.context() as killed:
        kill(killed, 5)
        with pytest.raises(RuntimeError, match="killed"):
            sft.train(config)
    (found,), _ = manager.list_checkpoints(config.checkpoints_place)
    before = found.document("state")["train_seconds"]
    result = sft.train(config)
    assert before > 0.3 and result.metrics["train_seconds"] > before + 0.3


def test_the_best_weights_of_a_run_that_evaluated_at_its_end_alone(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is extended with evaluations in between, all of them worse."""
    measure(monkeypatch, (9.0, 9.0, 1.0, 2.0, 2.0, 3.0))
    config = configure(max_steps=3)
    first = sft.train(config)
    adapter = adapter_of(first)
    longer = sft.train(replace(config, optim=replace(config.optim, max_steps=6, eval_steps=2)))
    assert (longer.step, longer.metrics["eval_loss"], longer.metrics["eval_step"]) == (6, 1.0, 3)
    assert adapter_of(longer) == adapter
    found, _ = manager.list_checkpoints(config.checkpoints_place)
    assert [(one.step, one is manifest.best_of(found)) for one in found] == [(3, True), (6, False)]
