"""Functions from a notebook cell or a script reach the replicas: rewards, verifiers, objectives, scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest

from tests.support.child_processes import PYTHONPATH, QUICK_XLA_FLAGS, run_python
from tpu_kit.machine.checks import Machine

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")

DEFINED = """
import signal
from tpu_kit.training.objectives import Sums, SupervisedObjective

weight = 3.0

def longest(completions, **kwargs):
    signal.alarm(0)
    return [weight * len(each[0]["content"]) for each in completions]

def is_even(row, answer):
    return answer.strip()[-1:] in tuple("02468")

class Plain(SupervisedObjective):
    def __init__(self, config):
        super().__init__(config.optim)

    def __call__(self, model, batch):
        sums = super().__call__(model, batch)
        return Sums(sums.loss * weight, sums.weight * weight)

def depth(question, steps):
    return weight + len(steps)
"""
RUN = """
from tpu_kit import SearchOptions, grpo, load_config, think, train
common = dict(split="train[:40]", max_length=128, batch_size=2, max_steps=1, base_dtype="fp32", r=4) | {where!r}
rl = dict(prompts_per_update=2, num_generations=2, max_completion_length=24, reward_funcs=["__main__:longest"])
held = dict(eval_rows=2, eval_generate_rows=2, generate_tokens=24, verifier="__main__:is_even")
first = grpo(load_config(None, common | rl | held | dict(output_dir="{folder}/named")))
second = grpo(load_config(None, common | rl | held | dict(output_dir="{folder}/given")), reward_funcs=[longest])
third = train(load_config(None, common | dict(eval_rows=0, output_dir="{folder}/own", objective="__main__:Plain")))
one = load_config(None, {where!r} | dict(num_replicas=1))
found = think(one, "1 + 1?", SearchOptions(max_thoughts=1, thought_tokens=4, answer_tokens=4, score=depth))
print("FOUND", first.metrics["reward"] == second.metrics["reward"] > 3, third.status, found.best.score)
"""
WHERE = [
    pytest.param({"device_type": "cpu", "num_replicas": 2}, id="cpu"),
    pytest.param({"device_type": "xla-cpu", "num_replicas": 2}, marks=needs_xla, id="xla-cpu"),
]


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("place", ["cells", "script"])
def test_functions_of_main_reach_the_replicas(
    place: str, where: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("XLA_FLAGS", QUICK_XLA_FLAGS)
    run = RUN.format(where=where, folder=tmp_path)
    if place == "script":
        (tmp_path / "mine.py").write_text(DEFINED + run)
        said = run_python([str(tmp_path / "mine.py")], cwd=tmp_path, env={"PJRT_DEVICE": None}).stdout
    else:
        monkeypatch.delenv("PJRT_DEVICE", raising=False)
        cells = [nbformat.v4.new_code_cell(source) for source in (DEFINED, run)]
        spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": spec}), tmp_path / "in.ipynb")
        papermill.execute_notebook(tmp_path / "in.ipynb", tmp_path / "out.ipynb", progress_bar=False)
        outputs = json.loads((tmp_path / "out.ipynb").read_text())["cells"][1]["outputs"]
        said = "".join("".join(output.get("text", "")) for output in outputs)
    assert "FOUND True finished 4.0" in said
