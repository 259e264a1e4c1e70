"""`distill` with `on_policy`: the update equals a plain computation on the same samples, and resumes bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tpu_kit.config.loader import ConfigError, TrainConfig, load_config
from tpu_kit.distributed.hosts import Hosts
from tpu_kit.machine.checks import Machine
from tpu_kit.recipes.distillation import distill
from tpu_kit.training.losses import sampled_updates
from tpu_kit.training.metrics import read_metrics

xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
EACH = {"sampling_temperature": 0.8, "prompts_per_update": 6, "max_completion_length": 16}


def config_of(world: Path, teacher: Path, folder: Path, **settings: Any) -> TrainConfig:
    return load_config(
        None,
        {
            "model.name": str(world / "model"), "source": str(world / "rows.jsonl"), "base_dtype": "fp32",
            "max_length": 96, "eval_rows": 4, "max_steps": 4, "batch_size": 2, "lora.r": 0, "learning_rate": 1e-2,
            "schedule": "constant",
            "logging_steps": 1, "save_steps": 1, "output_dir": str(folder), "loss_chunk": 48, "device_type": "cpu",
            "num_replicas": 1, "distill.teacher": str(teacher), "teacher_dtype": "fp32", "divergence": "reverse",
            "on_policy": True, **EACH, **settings,
        },
    )  # fmt: skip


def logged(config: TrainConfig, name: str) -> list[float]:
    return [record[name] for record in read_metrics(config.output_path) if record["kind"] == "train"]


def weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    return load_file(config.output_path / "adapter/model.safetensors")


def test_an_update_is_that_of_a_plain_computation(
    world: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows have prompts without replies, and other columns."""
    taken: list[sampled_updates.Sampled] = []
    right = sampled_updates.pack

    def pack(sampled: Any, *given: Any) -> Any:
        taken.extend(sampled)
        return right(sampled, *given)

    monkeypatch.setattr(sampled_updates, "pack", pack)
    rows = Dataset.from_list([{"prompt": f"Say {number}.", "level": number} for number in range(12)])
    config = config_of(world, teacher, tmp_path, max_steps=1, format="prompt", eval_rows=0, source="embedded")
    assert distill(config, rows).step == 1
    assert "rollout          6 prompts x 1 completions of up to 16 tokens; 1 updates" in capsys.readouterr().out
    assert len(taken) == len({one.row for one in taken}) == 6 and len({len(one.tokens) for one in taken}) > 1

    model, other = LlamaForCausalLM.from_pretrained(world / "model"), LlamaForCausalLM.from_pretrained(teacher)
    total, tokens, gap = torch.zeros((), dtype=torch.float64), 0, 0.0
    for one in taken:
        ids, begin = torch.tensor([[*one.prompt, *one.tokens]]), len(one.prompt) - 1
        own = model(input_ids=ids).logits[0, begin:-1].double()
        with torch.no_grad():
            theirs = other(input_ids=ids).logits[0, begin:-1, : own.shape[-1]].double()
        log_q, log_p = own.log_softmax(-1), theirs.log_softmax(-1)
        total = total + (log_q.exp() * (log_q - log_p)).sum()
        tokens += len(one.tokens)
        drawn = (own / 0.8).log_softmax(-1).gather(-1, ids[0, begin + 1 :, None])[:, 0]
        gap = max(gap, float((drawn - torch.tensor(one.logprobs)).abs().max()))
    assert gap < 1e-4, "the samples are not the student's"
    (total / tokens).backward()
    norm = torch.stack([one.grad.square().sum() for one in model.parameters()]).sum().sqrt()
    assert logged(config, "loss") == pytest.approx([float(total / tokens)], rel=1e-5)
    assert logged(config, "distill_logits") == logged(config, "loss")
    assert logged(config, "grad_norm") == pytest.approx([float(norm)], rel=1e-4)
    assert logged(config, "completions/mean_length") == pytest.approx([tokens / 6])
    assert not [name for name in read_metrics(tmp_path)[0] if name.startswith(("reward", "frac_"))]


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_run_that_is_interrupted_ends_as_the_undisturbed_one(
    world: Path, teacher: Path, tmp_path: Path, iterations: int
) -> None:
    """Also between two updates of a rollout."""
    whole, parts = (
        config_of(world, teacher, tmp_path / name, num_iterations=iterations) for name in ("whole", "parts")
    )
    distill(whole)
    distill(config_of(world, teacher, tmp_path / "parts", num_iterations=iterations, max_steps=3))
    assert distill(parts).step == 4
    resumed = weights(parts)
    assert [name for name, value in weights(whole).items() if not torch.equal(value, resumed[name])] == []
    assert logged(parts, "loss") == logged(whole, "loss")


@pytest.mark.slow
@xla
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize(
    "where",
    [
        {"num_replicas": 2},
        {"device_type": "xla-cpu", "num_replicas": 2},
        {"device_type": "xla-cpu", "num_replicas": None, "mesh": "fsdp=2"},
        {"device_type": "xla-cpu", "num_replicas": None, "mesh": "context=2"},
    ],
    ids=lambda each: "-".join(map(str, each.values())),
)
def test_replicas_and_a_mesh_train_as_one_replica(
    world: Path, teacher: Path, tmp_path: Path, where: dict[str, Any]
) -> None:
    one, other = (config_of(world, teacher, tmp_path / name, **more) for name, more in (("1", {}), ("2", where)))
    distill(one)
    distill(other)
    # A rounding error that changes a token changes all later samples.
    assert logged(other, "loss")[:2] == pytest.approx(logged(one, "loss")[:2], rel=1e-4)
    assert logged(other, "grad_norm")[:2] == pytest.approx(logged(one, "grad_norm")[:2], rel=1e-3)
    if "device_type" in where:
        compiles = logged(other, "compiles")
        assert compiles[3] == compiles[1], compiles
        assert not any(logged(other, "fallbacks_per_step") + logged(other, "host_syncs_per_step"))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"distill.teacher": None}, "distill.on_policy: true has no effect without a teacher"),
        ({"files": "f"}, "distill.files: 'f' holds logits of the rows, but distill.on_policy samples new completions"),
        ({"labels_weight": 0.5}, "distill.labels_weight: 0.5 weights the likelihood of labels, but the model samples"),
        ({"num_generations": 4}, "rl.num_generations: has no effect with distill.on_policy, which samples each prompt"),
        ({"reward_funcs": ["math"]}, "rl.reward_funcs: has no effect with distill.on_policy"),
        ({"objective": "policy"}, "optim.objective: 'policy' excludes the loss of distill.teacher"),
        ({"objective": "tests.support.own_objectives:squared"}, "excludes the loss of distill.teacher"),
        ({"max_completion_length": 96}, "rl.max_completion_length: 96 and a prompt must fit a row of data.max_length"),
        ({"global_batch_size": 8}, "optim.global_batch_size: 8 is not for distill.on_policy: an update has as many"),
        ({"eval_steps": 2}, "optim.eval_steps: 2 evaluates only answers in distill.on_policy"),
        ({"source": "synthetic", "eval_rows": 0}, "has random tokens but no prompts, which distill.on_policy needs"),
        ({"prompts_per_update": 100}, "rl.prompts_per_update=100 x rl.steps_per_generation=1 is more than the "),
    ],
    ids=str,
)
def test_refusals(world: Path, teacher: Path, tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        distill(config_of(world, teacher, tmp_path, **settings))


def test_several_hosts_are_refused(world: Path, teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^distill\.on_policy on 2 hosts: sampling is for one host"):
        sampled_updates.check_rollouts(config_of(world, teacher, tmp_path), [], None, Hosts(0, ("a", "b")))


def test_without_it_rows_need_replies(world: Path, teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rl\.prompts_per_update: has no effect here; train with grpo, or remove it"):
        distill(config_of(world, teacher, tmp_path, on_policy=False))
