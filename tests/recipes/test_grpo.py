"""Reinforcement learning, from the configuration to the weights, on the embedded model without a start.

These tests exclude failures that went unnoticed in other trainers:

- Samples of the base model, or of weights that a compiled program took for constants, and queries that attend to
  padding: `sampler_gap` is checked, after updates too.
- Groups of equal rewards that explode.
- An evaluation or a last batch that compiles again: the programs are counted.
- Completions of one token or of all tokens, whose importance weights have other sizes: training/test_policy_gradient.
- An importance level of null, which gave no gradient: refused.

Two more cannot occur. Weights are not converted for the sampler, which runs the trained model itself. An evaluation
opens no device, because it uses the run's own generator.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models

from tests.support import reward_functions
from tpu_kit.assets.embedded import cot_rows
from tpu_kit.cli import main
from tpu_kit.config.loader import ConfigError, TrainConfig, load_config, of_rewards
from tpu_kit.distributed.preemption import StopFlag
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.generation.decoder import Decoder
from tpu_kit.generation.evaluation import held_out_answers, judging
from tpu_kit.generation.evaluation.rewards import Judgement, Rewards
from tpu_kit.generation.prompts import Completion, texts_of
from tpu_kit.generation.sampling import Sampling
from tpu_kit.machine.checks import Machine
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.notebook import cells
from tpu_kit.recipes import replica, sft
from tpu_kit.recipes.grpo import grpo
from tpu_kit.recipes.run_data import prepare_run
from tpu_kit.recipes.run_plan import plan_run
from tpu_kit.recipes.sft import train
from tpu_kit.training.losses import sampled_updates
from tpu_kit.training.losses.policy_gradient import PolicyObjective
from tpu_kit.training.losses.rollout import Rollout, documents, exchange
from tpu_kit.training.losses.sampled_updates import GROUP_FILE
from tpu_kit.training.metrics import read_metrics
from tpu_kit.training.step import SplitStep

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
TINY = {
    "device_type": "cpu", "num_replicas": 1, "split": "train[:40]", "eval_rows": 0, "prompts_per_update": 2,
    "num_generations": 4, "max_completion_length": 24, "max_length": 128, "batch_size": 2, "learning_rate": 1e-2,
    "schedule": "constant", "max_steps": 4, "save_steps": 1, "logging_steps": 1, "base_dtype": "fp32", "r": 4,
    "reward_funcs": ["tests.support.reward_functions:even"], "sampling_temperature": 2.0,
}  # fmt: skip


def run_of(folder: Path, **settings: Any) -> TrainConfig:
    return load_config(None, TINY | {"output_dir": str(folder)} | settings)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def logged(folder: Path, name: str) -> list[float]:
    return [
        record[name] for record in read_metrics(folder) if record["kind"] == "train" and record.get(name) is not None
    ]


def same(one: Path, other: Path) -> bool:
    ours, theirs = weights(one), weights(other)
    return all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize(("iterations", "parts"), [(2, 1), (1, 2), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_a_run_that_is_interrupted_ends_as_the_undisturbed_one(
    iterations: int, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between two updates of a rollout, whose completions are in the checkpoint."""
    packed, pack = list[list[int]](), sampled_updates.pack
    monkeypatch.setattr(
        sampled_updates, "pack", lambda *given: packed.append([each.row for each in given[0]]) or pack(*given)
    )
    settings = {"num_iterations": iterations, "steps_per_generation": parts, "epsilon": 0.1}
    rows, after = list[list[int]](), sampled_updates.Rollouts.after

    def watched(updates: sampled_updates.Rollouts, *given: Any) -> Any:
        for update, tokens, batches in after(updates, *given):
            ids = {int(batch["input_ids"].sum()) for batch in batches}
            rows.append([*updates.source_rows(update), *ids])
            yield update, tokens, batches

    with monkeypatch.context() as patch:
        patch.setattr(sampled_updates.Rollouts, "after", watched)
        grpo(run_of(tmp_path / "whole", **settings))
    assert (rows[0] != rows[1]) is (iterations == 1) and rows[1] != rows[2]
    assert rows[0][:2] == sorted(set(packed[0])) and rows[-1][:2] == sorted(set(packed[-1]))
    assert [len(set(rows)) for rows in packed] == [2] * (4 // iterations)  # prompts of an update
    assert len({row for rows in packed for row in rows}) == 2 * len(packed), "updates learn from different prompts"
    grpo(run_of(tmp_path / "parts", max_steps=3, **settings))
    assert grpo(run_of(tmp_path / "parts", **settings)).step == 4
    assert same(tmp_path / "parts", tmp_path / "whole") and min(logged(tmp_path / "whole", "grad_norm")) > 0
    for name in ("loss", "reward", "completions/mean_length", "sampler_gap"):
        assert logged(tmp_path / "parts", name) == logged(tmp_path / "whole", name), name
    # The samples come from the weights before a rollout's first update.
    assert max(logged(tmp_path / "whole", "sampler_gap")[:: iterations * parts]) < 1e-4
    assert len(logged(tmp_path / "whole", "reward")) == 4 // (iterations * parts)


LONGER = {"save_steps": 100, "max_completion_length": 60, "max_length": 160, "sampling_temperature": 4.0}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    grpo(run_of(folder, **LONGER))
    return folder


@pytest.mark.parametrize(
    ("phase", "done"),
    [("judging", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("sampling", 2), ("updating", 3)))],
)
def test_a_run_that_is_preempted_ends_as_the_undisturbed_one(
    phase: str, done: int, undisturbed: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """The rollout is abandoned after the current block, and sampled again when the run continues; exit code 75."""
    owner, name = {
        "sampling": (Decoder, "decode"), "judging": (Rewards, "__call__"), "updating": (SplitStep, "apply"),
    }[phase]  # fmt: skip
    calls, late, decided = Counter[str](), [], threading.Event()

    def watch(patch: Any, owner: Any, name: str, disturb: bool) -> None:
        right = getattr(owner, name)

        def watched(*given: Any) -> Any:
            late.append(decided.is_set() and name != "apply")
            if disturb and calls["apply"] == 2 and not decided.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
                assert decided.wait(60)
            calls[name] += 1
            return right(*given)

        patch.setattr(owner, name, watched)

    def release(flag: StopFlag, last: int) -> None:
        decide(flag, last)
        decided.set()

    file, decide = tmp_path / "my.yaml", StopFlag.release
    file.write_text(run_of(tmp_path / "parts", **LONGER).to_yaml())
    with monkeypatch.context() as patch:
        patch.setattr(StopFlag, "release", release)
        for each in ((Decoder, "decode"), (Rewards, "__call__"), (SplitStep, "apply")):
            watch(patch, *each, disturb=each == (owner, name))
        assert main(["grpo", str(file)]) == 75
    assert decided.is_set() and not any(late), "it went on with the rollout"
    checkpoints = (tmp_path / "parts" / "checkpoints").iterdir()
    assert [int(path.name.removeprefix("step-")) for path in checkpoints if path.name.startswith("step-")] == [done]
    assert main(["grpo", str(file)]) == 0
    assert same(tmp_path / "parts", undisturbed)
    assert logged(tmp_path / "parts", "reward") == logged(undisturbed, "reward")


XLA_CPU = {"device_type": "xla-cpu", "num_replicas": 2}
EVERYWHERE = [
    pytest.param({}, id="cpu"),
    pytest.param({"num_replicas": 2}, marks=pytest.mark.slow, id="cpu-2"),
    pytest.param(XLA_CPU, marks=[pytest.mark.slow, needs_xla], id="xla-cpu-2"),
]


@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("end", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow), "hang_timeout"])
def test_a_run_that_waits_for_a_reward_ends_and_goes_on(
    end: str, where: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier updates are saved; on XLA:CPU the replicas' functions wait in one main thread, one after the other."""
    hang_timeout = (12 if where else 4) if end == "hang_timeout" else 300
    config = run_of(
        tmp_path, reward_funcs=["tests.support.reward_functions:waits_once"], max_steps=3, save_steps=100, **where,
        hang_timeout=hang_timeout,
    )  # fmt: skip
    monkeypatch.setenv("TPU_KIT_TEST_STOP", str(tmp_path / "waits"))

    def give() -> None:
        while not (tmp_path / "waits").exists():
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getpid(), getattr(signal, end))

    if end == "hang_timeout":
        told = (
            r"waits_once has returned nothing and used no processor time for \d+ s \(reward_functions.py, line \d+\); "
            rf"a call may wait for 80% of launch.hang_timeout={hang_timeout}: .*The 1 updates before are saved"
        )
        with pytest.raises(ValueError, match=told):
            grpo(config)
    else:
        threading.Thread(target=give).start()
        result = grpo(config)
        assert (result.status, result.step) == ("preempted", 1) and end in result.reason
    monkeypatch.delenv("TPU_KIT_TEST_STOP")
    assert grpo(config).status == "finished" and set(logged(tmp_path, "resumed_from")) == {1}


@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("where", EVERYWHERE)
def test_functions_run_in_the_main_thread_and_are_sent_by_value(where: dict[str, Any], tmp_path: Path) -> None:
    """Functions of a notebook's cell, which replicas cannot import, with values they use; also async, and an object."""
    weight = 3.0

    def alarmed(completions: list[Any], **kwargs: Any) -> list[float]:
        signal.alarm(0)  # raises off the main thread, as math-verify's `parse` does
        return [weight * (1 + len(each[0]["content"])) for each in completions]

    async def later(completions: list[Any]) -> list[float]:
        return [weight] * len(completions)

    class Judge:
        def __call__(self, completions: list[Any]) -> list[float]:
            return [weight] * len(completions)

    grpo(run_of(tmp_path, max_steps=1, **where), reward_funcs=[alarmed, later, Judge(), "think_format"])
    assert logged(tmp_path, "rewards/later") == logged(tmp_path, "rewards/Judge") == [3]
    assert logged(tmp_path, "rewards/alarmed")[0] > 3


@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("where", EVERYWHERE)
def test_judgements_without_end_are_told_and_not_counted(
    where: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Applies to held-out answers too, before and during training."""
    monkeypatch.setattr(judging, "SECONDS", 0.1)
    endless = r"regex:(?:|){64}\x00"
    settings = {"eval_rows": 2, "eval_generate_rows": 2, "eval_steps": 1, "generate_tokens": 24, "max_steps": 1}
    config = run_of(tmp_path, reward_funcs=[endless, "length"], prompts_per_update=2, num_generations=2, **settings,
                    **where)  # fmt: skip
    assert grpo(config).status == "finished"
    said = capsys.readouterr().err
    seconds = 5 if where else 0.1  # other processes have the default limit
    told = rf" \(the judgement takes more than {seconds} s of processor time\), such as '.*' for the answer '\d+'"
    assert re.search(f"warning: 4 completions of step 1 were not judged by {re.escape(endless)}{told}", said), said
    assert logged(tmp_path, "rewards/length") and not logged(tmp_path, f"rewards/{endless}")
    with pytest.raises(ValueError, match=r"judged any of the 4 completions of step 1: .*; regex.*takes more than"):
        grpo(run_of(tmp_path / "alone", reward_funcs=[endless], num_generations=2, max_steps=1, **where))
    with pytest.raises(ValueError, match=r"can judge none of the 2 held-out rows .*takes more than 0.1 s of processor"):
        grpo(run_of(tmp_path / "held-out", verifier=r"regex:(?:\d+)+x\x00", **settings, **where),
             Dataset.from_list([{"question": f"{n}?", "answer": str(n) * 60} for n in range(1, 9)]))  # fmt: skip


@pytest.mark.slow
@needs_xla
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("where", [{}, {"device_type": "xla-cpu"}], ids=["cpu", "xla-cpu"])
def test_replicas_abandon_a_rollout_together(where: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    """The first replica judges when the signal comes; the other may still be sampling."""
    settings = {"reward_funcs": ["tests.support.reward_functions:even_then_stop"], "num_replicas": 2, **where}
    grpo(run_of(tmp_path / "whole", **settings))
    monkeypatch.setenv("TPU_KIT_TEST_STOP", "1")
    result = grpo(run_of(tmp_path / "parts", **settings))
    assert result.status == "preempted" and result.step < 4
    monkeypatch.delenv("TPU_KIT_TEST_STOP")
    assert grpo(run_of(tmp_path / "parts", **settings)).status == "finished"
    assert same(tmp_path / "parts", tmp_path / "whole")


def test_rewards_rise_and_are_logged(tmp_path: Path) -> None:
    grpo(
        run_of(
            tmp_path,
            max_steps=12,
            prompts_per_update=4,
            num_generations=8,
            learning_rate=3e-3,
            sampling_temperature=0.9,
        ),
        reward_funcs=[reward_functions.even],
    )
    rewards = logged(tmp_path, "reward")
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.4, rewards
    record = read_metrics(tmp_path)[0]
    assert record["rewards/even"] == record["reward"] and 0 < record["reward_std"] < 1
    assert 0 <= record["completions/truncated"] <= 1 and record["completions/max_length"] <= 24
    assert record["entropy"] > 0 and record["clip_low"] == record["clip_high"] == record["kl"] == 0
    assert max(logged(tmp_path, "sampler_gap")) < 1e-4 and max(logged(tmp_path, "sampler_gap_outside")) == 0


def test_a_sampler_that_differs_from_the_trainer_is_told(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    right = Sampling.knobs

    def wrong(self: Sampling, size: int) -> torch.Tensor:
        return right(self, size) * torch.tensor([1, 1, 1, 1, 1, 0.7 if self.tempered_logprobs else 1])

    monkeypatch.setattr(Sampling, "knobs", wrong)
    grpo(run_of(tmp_path, max_steps=2))
    said = capsys.readouterr().err
    assert len(re.findall(r"differ by [\d.]+ nats between sampler and trainer", said)) == 1
    assert min(logged(tmp_path, "sampler_gap")) > 0.1 and max(logged(tmp_path, "sampler_gap_outside")) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_rounded_base_has_a_small_gap(dtype: str, tmp_path: Path, capsys: Any) -> None:
    settings = {"num_generations": 8, "prompts_per_update": 4, "max_completion_length": 60, "max_length": 160}
    grpo(run_of(tmp_path, base_dtype=dtype, learning_rate=1e-3, **settings))
    assert (
        0 < max(logged(tmp_path, "sampler_gap")) < 0.01 and "between sampler and trainer" not in capsys.readouterr().err
    )


def test_replicas_exchange_completions_and_what_functions_log() -> None:
    """Also if functions log different names; two replicas exchange without their processes."""
    shares, logged = list[Any](), [{"depth": [1.0, 2.0]}, {"depth": [6.0], "tools": [1.0]}]

    class Replicas(CpuRuntime):
        def exchange(self, mine: Any) -> list[Any]:
            shares.append(json.loads(json.dumps(mine)))
            return shares

    replies = [Completion(text, None, text, (1,), "stop", -1.0, (-1.0,)) for text in "ab"]
    for number, each in enumerate(logged):
        judgement = Judgement([float(number)], {"one": [2.0 * number]}, each)
        part = Rollout(1, [5, 6], 1, {(1 - number, 0): replies[number]}, judgement)
        whole = exchange(part, rt := Replicas(0, 2, torch.device("cpu")))
    assert whole.judgement.logged == {"depth": [1.0, 2.0, 6.0], "tools": [1.0]}
    assert [*whole.completions.items()] == [((0, 0), replies[1]), ((1, 0), replies[0])], "in the order of the prompts"
    assert (whole.judgement.total, whole.judgement.parts) == ([1.0, 0.0], {"one": [2.0, 0.0]})
    empty = Rollout(1, [5, 6], 1, {}, Judgement([], {"one": []}), "the reward failed")
    assert exchange(empty, rt).failure == "the reward failed"
    assert exchange(replace(empty, failure=""), rt).failure == "the reward failed", "of another replica"


def test_completions_that_are_cut_off_are_learned_from_or_not() -> None:
    reasons: list[Literal["stop", "length"]] = ["stop", "length"]
    replies = {(0, n): Completion("a", None, "a", (1,), reason, -1.0, (-1.0,)) for n, reason in enumerate(reasons)}
    made = Rollout(1, [0], 2, replies, advantages=torch.tensor([[1.0, -1.0]]))
    tasks = cast(Any, SimpleNamespace(numbers=[7], rows=SimpleNamespace(prompt_ids=[[3, 4]])))
    assert [one.learns for one in documents(made, tasks, mask_truncated=True)] == [True, False]
    assert [one.learns for one in documents(made, tasks, mask_truncated=False)] == [True, True]


@pytest.mark.slow
@needs_xla
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize(
    "where",
    [
        {"num_replicas": 2},
        {"device_type": "xla-cpu", "num_replicas": 1},
        {"device_type": "xla-cpu", "num_replicas": 1, "remat": "none"},  # passes and tokens through separate layers
        {"device_type": "xla-cpu", "num_replicas": 4},
        {"device_type": "xla-cpu", "num_replicas": None, "mesh": "fsdp=2"},
        {"device_type": "xla-cpu", "num_replicas": None, "mesh": "context=2"},
    ],
    ids=lambda each: "-".join(map(str, each.values())),
)
def test_replicas_and_a_mesh_train_as_one_replica(where: dict[str, Any], tmp_path: Path) -> None:
    """On XLA nothing is compiled after the first two rollouts, with an evaluation between; the host reads no value.

    The first update of a rollout always has a loss of about 0, so each rollout has two updates. A rounding error that
    changed a token would change all later samples; with these seeds no token changes.
    """
    settings = {"prompts_per_update": 4, "num_generations": 8, "num_iterations": 2, "max_steps": 6}
    settings |= {"learning_rate": 3e-3, "eval_rows": 6, "eval_generate_rows": 6, "eval_steps": 2}
    settings |= {"reward_funcs": ["tests.support.reward_functions:even_and_logged"]}
    grpo(run_of(tmp_path / "one", **settings))
    grpo(run_of(tmp_path / "other", **settings | where))
    for name, bound in (("reward", 1e-6), ("seen", 1e-6), ("loss", 1e-5), ("completions/mean_length", 0)):
        ours, theirs = logged(tmp_path / "other", name), logged(tmp_path / "one", name)
        assert ours == pytest.approx(theirs, rel=0, abs=bound), name
    assert logged(tmp_path / "other", "grad_norm") == pytest.approx(logged(tmp_path / "one", "grad_norm"), rel=1e-4)
    assert max(logged(tmp_path / "one", "loss")) > 0.1 and max(logged(tmp_path / "other", "sampler_gap")[::2]) < 1e-4
    if "device_type" in where:
        # The programs of `test_the_programs_of_a_run` for one width; replicas also sum the evaluation's results.
        compiles = logged(tmp_path / "other", "compiles")
        assert compiles[4] == compiles[5] == 8 + ((where["num_replicas"] or 1) > 1), compiles
        assert not any(
            logged(tmp_path / "other", "fallbacks_per_step") + logged(tmp_path / "other", "host_syncs_per_step")
        )


@pytest.mark.slow
@needs_xla
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("iterations", [1, 2])
def test_the_programs_of_a_run(iterations: int, tmp_path: Path) -> None:
    """Counts the programs of a run.

    There is one at the start. The generator has five: prefill for each width, a copy for samples, a copy for held-out
    prompts, and decode. The update has accumulate and apply, and with several updates per rollout the log-probabilities
    before it.
    """
    long = "First there were twelve apples in each of the boxes that he had bought. " * 3
    prompts = [f"{long if n // 2 % 2 else ''}What is {n} + {n}?" for n in range(48)]
    rows = [{"prompt": prompt, "answer": str(2 * n)} for n, prompt in enumerate(prompts)]
    settings = {"device_type": "xla-cpu", "format": "prompt", "split": "train", "shuffle": False, "max_length": 256}
    settings |= {"eval_rows": 20, "eval_generate_rows": 20, "eval_steps": 2, "max_steps": 6 * iterations}
    settings |= {"num_iterations": iterations, "eval_steps": 2 * iterations}
    grpo(run_of(tmp_path, **settings), Dataset.from_list(rows))
    compiles = logged(tmp_path, "compiles")
    assert compiles[2 * iterations :] == [7 + iterations] * 4 * iterations, compiles
    assert not any(logged(tmp_path, "fallbacks_per_step") + logged(tmp_path, "host_syncs_per_step"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.yaml").write_text(run_of(tmp_path / "run", max_steps=1).to_yaml())
    assert main(["grpo", str(tmp_path / "my.yaml"), "prompts_per_update=3"]) == 0
    said = capsys.readouterr().out
    assert "rollout          3 prompts x 4 completions of up to 24 tokens; 1 updates" in said
    group = json.loads((tmp_path / "run" / GROUP_FILE).read_text())
    assert group["step"] == 1 and len(group["completions"]) == 4
    assert all(1 <= len(each["tokens"]) <= 24 for each in group["completions"])


def test_the_cell_that_shows_the_data_counts_the_updates_of_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"split": "train[:7]", "eval_rows": 4, "epochs": 1, "max_steps": None, "batch_size": 8}
    cells.show_data(of_rewards(run_of(tmp_path, **settings, prompts_per_update=1, num_iterations=2)))
    said = capsys.readouterr().out
    assert "; 14 updates\n" in said and "14 updates are too few to learn much: raise optim.max_s" in said
    assert "or lower rl.prompts_per_update" in said


def test_the_texts_of_tokens_make_up_the_text() -> None:
    """Also if a first token loses its space, or a character has several tokens, as in SentencePiece."""
    vocabulary = {"\u2581one": 0, "\u2581two": 1, "<0xC3>": 2, "<0xA9>": 3, "s": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokens = [0, 1, 4, 2, 3, 1, 0, 1]
    assert texts_of(tokenizer, tokens) == ["one", " two", "s", "", "\u00e9", " two", " one", " two"]
    assert "".join(texts_of(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_groups_of_equal_rewards_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Completions share their prompt."""
    shared, pack = list[bool](), sampled_updates.pack
    monkeypatch.setattr(sampled_updates, "pack", lambda *given: shared.append(given[-1]) or pack(*given))
    settings = {"split": "train[:2]", "shuffle": False}
    grpo(run_of(tmp_path / "start", max_steps=2, **settings))
    grpo(run_of(tmp_path / "end", max_steps=2, **settings))
    before = weights(tmp_path / "end")
    again = run_of(tmp_path / "end", max_steps=4, **settings)
    capsys.readouterr()
    result = grpo(again, reward_funcs=[reward_functions.equal])
    assert capsys.readouterr().err.count("Nothing was learned. Start from an adapter") == 1
    zero = run_of(tmp_path / "zero", max_steps=2)
    grpo(zero, reward_funcs=[reward_functions.silent, reward_functions.equal])
    del shared[-2:]
    told = capsys.readouterr().err
    assert told.count("learned. silent: 0 everywhere, the function may fail silently. Start from an adapter") == 1
    assert re.search(r"problems or rewards. An example: prompt '.*\?.*', completion '.*', reward 0.5\n", told)
    assert result.metrics["reward"] == logged(tmp_path / "end", "reward")[-1]
    assert all(torch.equal(value, before[name]) for name, value in weights(tmp_path / "end").items())
    assert logged(tmp_path / "end", "frac_reward_zero_std")[2:] == [1, 1]
    assert shared == [True] * 6


def test_rollouts_without_a_reward_and_answers_that_are_cut_off_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, max_steps=3, max_completion_length=1, mask_truncated_completions=True)
    assert grpo(run, reward_funcs=[reward_functions.only_at_first]).step == 3
    said = capsys.readouterr().err
    assert said.count("no reward function judged a completion since the last log, so nothing was learned") == 1
    assert said.count("were cut off at rl.max_completion_length=1, and have no loss (rl.mask_truncated") == 1
    assert logged(tmp_path, "completions/not_judged") == [0, 1, 1] and not any(logged(tmp_path, "perplexity"))
    with pytest.raises(ValueError, match="judged any of the"):
        grpo(run_of(tmp_path / "none", max_steps=3), reward_funcs=[lambda completions: [None] * len(completions)])


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_completions_without_advantage_may_be_left_out(loss_type: str, tmp_path: Path) -> None:
    """They still count in the divisor."""

    def some(completions: list[Any]) -> list[float]:
        return [0.0] * 4 + [float(number % 2) for number in range(len(completions) - 4)]

    for drop in (True, False):
        config = run_of(tmp_path / str(drop), max_steps=1, drop_zero_advantage=drop, loss_type=loss_type)
        grpo(config, reward_funcs=[some])
    norms = [logged(tmp_path / str(drop), "grad_norm") for drop in (True, False)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0][0] > 0.01
    for name, value in weights(tmp_path / "True").items():
        torch.testing.assert_close(value, weights(tmp_path / "False")[name], rtol=0, atol=2e-4)


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_reward_that_fails_is_named_and_the_updates_before_are_saved(
    replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails in one replica; the other must not wait for it, and must end only after the checkpoint is written."""
    functions = ["tests.support.reward_functions:fails_later"]
    config = run_of(tmp_path, reward_funcs=functions, save_steps=100, num_replicas=replicas)
    monkeypatch.setenv("TPU_KIT_TEST_STOP", str(tmp_path / "failed"))
    monkeypatch.setenv("TPU_KIT_TEST_WRITE", str(3.0 * (replicas - 1)))  # a launch waits a second after an error
    told = (
        r"the reward .*fails_later failed \(.*py, line \d+\) for .*question.*KeyError: 'no such judge'.*\. The 2 "
        "updates before are saved: the run started again goes on there"
    )
    with pytest.raises(Exception, match=told):
        grpo(config)
    monkeypatch.delenv("TPU_KIT_TEST_STOP")
    assert grpo(config).status == "finished" and logged(tmp_path, "resumed_from")[-1] == 2


def test_training_goes_on_from_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*list(TINY)[:4], "max_length", "batch_size", "learning_rate", "base_dtype", "r")
    start_run = {name: TINY[name] for name in names if name != "prompts_per_update"}
    train(load_config(None, start_run | {"output_dir": str(tmp_path / "sft"), "max_steps": 3}))
    start = {"lora.adapter": str(tmp_path / "sft" / "adapter")}
    grpo(run_of(tmp_path / "rl", max_steps=1, **start), reward_funcs=[reward_functions.equal])
    assert same(tmp_path / "rl", tmp_path / "sft")
    monkeypatch.setattr(sft, "launch", lambda *given, **named: pytest.fail("it was launched"))
    with pytest.raises(ValueError, match=r"has other settings: r=4 there, 8 now"):
        grpo(run_of(tmp_path / "other", r=8, **start))
    told = r"^lora\.adapter=.*/adapter does not fit this model: \d+ of \d+ tensors differ, such as .* Set lora\.targets"
    with pytest.raises(ValueError, match=told):
        grpo(run_of(tmp_path / "other", targets=["q_proj"], **start))
    with pytest.raises(ValueError, match="has no adapter"):
        grpo(run_of(tmp_path / "other", **{"lora.adapter": str(tmp_path)}))


def test_rows_of_prompts_alone_and_prompts_that_are_too_long(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"{n} + {n}?"}], "target": str(2 * n), "level": n} for n in range(12)
    ]
    rows.append({"prompt": [{"role": "user", "content": "1 + " * 60 + "1?"}], "target": "61", "level": 0})
    seen = []

    def levels(prompts: Any, completions: Any, level: list[int], target: list[str], answer: list[str]) -> list[float]:
        assert target == answer == [str(2 * each) for each in level]
        seen.extend(prompts)
        return reward_functions.even(completions)

    settings = {"format": "prompt", "data.columns": {"answer": "target"}, "split": "train", "source": str(tmp_path)}
    config = run_of(tmp_path / "run", max_steps=1, **settings)
    grpo(config, Dataset.from_list(rows), [levels, "auto"])
    assert seen[0][0]["role"] == "user" and len(seen) == 8
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = of_rewards(run_of(tmp_path, **settings | {"source": str(tmp_path / "rows.jsonl")}))
    prepared = prepare_run(config)
    assert prepared.tasks is not None and (len(prepared.tasks.numbers), prepared.tasks.too_long) == (12, 1)
    assert "prompts          12; too long and left out: 1" in str(prepared)
    assert "packed" not in str(prepared) and "with loss" not in str(prepared), "no row is trained on"
    with pytest.raises(ConfigError, match=r"data.format: 'prompt' has no replies to train on"):
        train(load_config(None, {"format": "prompt", "source": str(tmp_path / "rows.jsonl"), "device_type": "cpu"}))


def test_rows_as_those_of_gsm8k_have_their_final_answer(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + {n}?", "answer": f"Twice {n}.\n#### {2 * n}", "level": n} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepared = prepare_run(of_rewards(run_of(tmp_path, source=str(tmp_path / "rows.jsonl"), split="train")))
    assert prepared.tasks is not None
    kept = [(row["question"], row["answer"], row["level"]) for row in prepared.tasks.rows.rows]
    assert kept == [(f"{n} + {n}?", str(2 * n), n) for n in range(6)]


def test_prompts_are_those_that_a_model_is_asked_with() -> None:
    config = of_rewards(run_of(Path("unused"), eval_rows=3, split="train[:10]"))
    prepared, tokenizer = prepare_run(config), load_tokenizer(config.model)
    assert prepared.tasks is not None
    for row, ids, asked in zip(*prepared.tasks.rows[::2], prepared.tasks.rows.asked, strict=True):
        assert asked == [{"role": "user", "content": row["question"]}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert row["answer"] in {each["answer"] for each in cot_rows("train", 10, seed=config.data.seed)}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"importance_sampling_level": "sequence"},
            "rl.epsilon_high: 0.28 suits ratios of tokens; with rl.importance_sampling_level=sequence a ratio is",
        ),
        ({"loss_type": "cispo"}, "rl.epsilon_high: 0.28 limits the ratio itself with rl.loss_type=cispo"),
        ({"importance_sampling_level": None}, "rl.importance_sampling_level"),
        ({"epsilon_high": 0.1}, "rl.epsilon_high: 0.1 is below rl.epsilon=0.2; raise it"),
        ({"beta": 0.1, "drop_zero_advantage": True}, "rl.drop_zero_advantage: true leaves out groups that rl.beta=0.1"),
        ({"beta": 0.1, "lora.adapter": "a"}, "lora.adapter: 'a' is the start of training, but rl.beta compares with"),
        ({"beta": 0.1, "r": 0}, "rl.beta: 0.1 compares with the model without its adapter, and lora.r=0"),
        (
            {"max_completion_length": 128},
            "rl.max_completion_length: 128 and a prompt must fit a row of data.max_length=128; raise data.max_length",
        ),
        ({"gradient_accumulation": 2}, "optim.gradient_accumulation: 2 is not for grpo"),
        ({"eval_steps": 2, "eval_rows": 4}, "optim.eval_steps: 2 evaluates only answers in grpo"),
        ({"source": "synthetic"}, "data.source: 'synthetic' has random tokens but no prompts"),
        (
            {"prompts_per_update": 41},
            "rl.prompts_per_update=41 x rl.steps_per_generation=1 is more than the 40 ",
        ),
        ({"max_prompt_length": 3}, "no prompt has from 1 to 3 tokens"),
    ],
)
def test_refusals(settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        grpo(run_of(tmp_path, **settings))


def test_parameters_of_grpo_are_for_grpo(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rl.reward_funcs: has no effect here; train with grpo"):
        plan_run(run_of(tmp_path))
    rows = Dataset.from_list([{"prompt": f"Say {n}."} for n in range(8)])
    with pytest.raises(ConfigError, match="no row has an answer to compare with"):
        grpo(run_of(tmp_path, format="prompt", split="train"), rows, "auto")
    with pytest.raises(
        ValueError, match=r"they fit no format.*for grpo, rows with only prompts are data.format=prompt"
    ):
        grpo(run_of(tmp_path, split="train"), rows, reward_functions.even)


def test_auto_weights_the_sampler_where_it_is_rounded() -> None:
    for dtype, mode in (("fp32", "off"), ("bf16", "sequence_mask"), ("int8", "sequence_mask")):
        assert PolicyObjective(run_of(Path("unused"), base_dtype=dtype)).correction == mode


def test_held_out_answers_are_greedy_and_choose_the_weights(tmp_path: Path, monkeypatch: Any) -> None:
    """The sampling programs answer like greedy decoding."""
    texts: list[str] = []
    right, shares = held_out_answers.judge_all, iter([(1, 4), (3, 4), (2, 4)])

    def judge_all(replies: Any, *others: Any) -> Any:
        texts.extend(text for _, text in replies)
        return right(replies, *others)

    def count_correct(*given: Any) -> tuple[int, int]:
        held_out_answers.count_correct(*given)
        held_out_answers.count_correct(*given[:4])
        return next(shares)

    monkeypatch.setattr(held_out_answers, "judge_all", judge_all)
    monkeypatch.setattr(replica, "count_correct", count_correct)
    settings = {"eval_rows": 4, "eval_steps": 1, "eval_generate_rows": 4, "generate_tokens": 24, "max_steps": 3}
    result = grpo(run_of(tmp_path, **settings))
    del texts[:-24]  # the rows' own answers, judged before the launch
    assert all(texts[n : n + 4] == texts[n + 4 : n + 8] for n in (0, 8, 16)), texts
    evaluations = [record for record in read_metrics(tmp_path) if record["kind"] == "eval"]
    assert [record["accuracy"] for record in evaluations] == [0.25, 0.75, 0.5]
    assert all(record["loss"] is None for record in evaluations)
    assert all(record["accuracy_low"] < record["accuracy"] < record["accuracy_high"] for record in evaluations)
    assert (result.metrics["eval_accuracy"], result.metrics["eval_step"]) == (0.75, 2)
