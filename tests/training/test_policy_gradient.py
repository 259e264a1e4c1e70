"""The policy objective equals TRL's own `GRPOTrainer._compute_loss`; advantages equal TRL's."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.training_functions import tiny
from tests.training.test_loss import LargestTensor
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.model import causal_lm as models
from tpu_kit.model.loop.layer_scan import scan_layers
from tpu_kit.training.losses.policy_gradient import PolicyObjective, Sampled, pack
from tpu_kit.training.losses.rollout import advantages_of
from tpu_kit.xla import splash_blocks

# Prompts and completions of several lengths, including a single token (trl#4205); each group's last is truncated.
SIZES = [(3, 5), (3, 1), (3, 7), (3, 4), (5, 6), (5, 2), (5, 8), (5, 8)]
ROW = 24
LONG = [(64, 950), (64, 1), (64, 1100), (64, 940), (100, 970), (100, 1050), (100, 1000), (100, 1020)]  # rows of 8,192


def samples(masked: bool, sizes: Sequence[tuple[int, int]] = SIZES) -> list[Sampled]:
    generator = torch.Generator().manual_seed(0)
    advantages = advantages_of(torch.tensor([[0.0, 1.0, 0.5, 1.0], [1.0, 0.0, 0.0, 0.0]]), "group").flatten()
    noise = iter(torch.randn(2, sum(size for _, size in sizes), generator=generator).unbind())
    made, sampler, prompt = list[Sampled](), next(noise) * 0.1, ()
    for number, (length, size) in enumerate(sizes):
        ids = torch.randint(1, 61, (length + size,), generator=generator).tolist()
        prompt = prompt if number % 4 else tuple(ids[:length])
        sampler_logps, sampler = sampler[:size] - 4.0, sampler[size:]
        made.append(
            Sampled(number, prompt, tuple(ids[length:]), tuple(sampler_logps.tolist()), float(advantages[number]),
                    not (masked and number % 4 == 3))
        )  # fmt: skip
    return made


def trl_loss(
    model: Any, config: TrainConfig, inputs: dict[str, Any], logps: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Computes TRL's loss, with a stand-in for the other parts of its trainer."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    class Alone(GRPOTrainer):
        def __init__(self) -> None:
            pass

        def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, keep: int, **_: Any) -> Any:
            return *logps(ids, mask, keep), None

    rl, trainer = config.rl, Alone()
    trainer.accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=True, device=torch.device("cpu"), gather=lambda tensor: tensor,
        reduce=lambda tensor, reduction="sum": tensor, autocast=contextlib.nullcontext,
    )  # fmt: skip
    trainer.aux_loss_enabled, trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = False, 1.0, None
    trainer.importance_sampling_level, trainer.beta, trainer.loss_type = (
        rl.importance_sampling_level,
        rl.beta,
        rl.loss_type,
    )
    trainer.epsilon_low, trainer.epsilon_high = rl.epsilon, rl.epsilon_high
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = "importance_sampling_ratio" in inputs
    trainer.max_completion_length, trainer.current_gradient_accumulation_steps = rl.max_completion_length, 1
    trainer._entropy_bonus_enabled, trainer.entropy_coef, trainer.use_adaptive_entropy = (
        rl.entropy_coef > 0,
        rl.entropy_coef,
        False,
    )
    trainer._metrics, trainer.model = defaultdict(lambda: defaultdict(list)), model
    trainer.args = SimpleNamespace(
        delta=rl.delta, use_bias_correction_kl=rl.use_bias_correction_kl, steps_per_generation=1, report_to=[]
    )
    loss = trainer._compute_loss(model, inputs)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def table(values: Any, left: bool = False) -> torch.Tensor:
    """Pads rows on the left or on the right."""
    width = max(map(len, values))
    rows = [
        [*([0] * (width - len(row)) if left else []), *row, *([] if left else [0] * (width - len(row)))]
        for row in values
    ]
    return torch.tensor(rows)


def logps_of(model: Any, temperature: float) -> Any:
    def logps(ids: torch.Tensor, mask: torch.Tensor, keep: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = models.base_model(model)(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        log_p = torch.log_softmax(output.logits[:, -keep - 1 : -1] / temperature, -1)
        return log_p.gather(-1, ids[:, -keep:, None])[..., 0], -(log_p.exp() * log_p).sum(-1)

    return logps


def correction(mode: str, difference: torch.Tensor, mask: torch.Tensor, cap: float) -> torch.Tensor:
    """TRL's ratio of trainer and sampler, from `_generate_and_score_completions`."""
    difference = difference * mask
    ratio = (difference.sum(-1, keepdim=True) if "sequence" in mode else difference).exp()
    return ratio.clamp(max=cap) if "truncate" in mode else ratio.masked_fill(ratio > cap, 0.0)


def difference(
    settings: dict[str, Any], off_policy: bool, double: bool, share_prompts: bool, masked: bool = False,
    sizes: Sequence[tuple[int, int]] = SIZES, made: LargestTensor | None = None,
) -> float:  # fmt: skip
    """Returns the largest difference of gradients over the largest gradient; also checks loss and metrics."""
    fixed = {"objective": "policy", "base_dtype": "fp32", "max_completion_length": 12, "max_length": ROW}
    config = load_config(None, fixed | {"loss_chunk": 16} | settings)
    rl, model, sampled = config.rl, tiny(), samples(masked, sizes)
    if double:
        model.double()
        model._tpu_kit_compute_dtype = torch.float64
    prompts, replies = ([getattr(one, name) for one in sampled] for name in ("prompt", "tokens"))
    ids = torch.cat([table(prompts, left=True), table(replies)], 1)
    whole = torch.cat(
        [table([[1] * len(one) for one in prompts], left=True), table([[1] * len(one) for one in replies])], 1
    )
    loss_mask = table([[int(one.learns)] * len(one.tokens) for one in sampled])
    keep, logps = loss_mask.shape[1], logps_of(model, rl.sampling_temperature)
    with torch.no_grad():
        now = logps(ids, whole, keep)[0]
        noise = 0.25 * torch.randn(now.shape, generator=torch.Generator().manual_seed(1))
        old = (now - noise).float() if off_policy else now
        reference = None
        if rl.beta:
            with model.disable_adapter():
                reference = logps(ids, whole, keep)[0]
    inputs = {
        "prompt_ids": table(prompts, left=True), "prompt_mask": whole[:, : -keep], "completion_ids": table(replies),
        "completion_mask": loss_mask, "advantages": torch.tensor([one.advantage for one in sampled]),
        "num_items_in_batch": loss_mask.sum(), "ref_per_token_logps": reference,
    }  # fmt: skip
    inputs |= {"old_per_token_logps": old} if off_policy else {}
    if rl.importance_sampling_correction != "auto":
        apart = old - table([one.logprobs for one in sampled])
        inputs["importance_sampling_ratio"] = correction(
            rl.importance_sampling_correction, apart, loss_mask, rl.importance_sampling_cap
        )
    theirs, metrics = trl_loss(model, config, inputs, lambda ids, mask, keep: logps(ids, whole, keep))
    trained = models.trainable_parameters(model)
    wanted = dict(zip(trained, torch.autograd.grad(theirs, list(trained.values())), strict=True))

    rows = pack(sampled, config, share_prompts=share_prompts)
    assert ("prefix_ids" in rows.columns) is share_prompts
    if off_policy:
        before = [replace(one, logprobs=tuple(old[n, : len(one.tokens)].tolist())) for n, one in enumerate(sampled)]
        at_tokens = pack(before, config, share_prompts=share_prompts).columns["sampler_logps"]
        rows.columns = {**rows.columns, "old_logps": at_tokens}
    with made or contextlib.nullcontext():
        sums = PolicyObjective(config)(model, rows.tensors(np.arange(len(rows))))
        ours = sums.loss / sums.weight
        found = dict(zip(trained, torch.autograd.grad(ours, list(trained.values())), strict=True))
    assert float((ours - theirs).abs()) <= 1e-5 * max(0.01, float(theirs.abs()))
    extra = dict(zip(PolicyObjective.extra, sums.extra, strict=True))
    assert extra["tokens"] == loss_mask.sum()
    assert float(extra["entropy"] / extra["tokens"]) == pytest.approx(metrics["entropy"], rel=1e-4)
    if rl.beta:
        assert float(extra["kl"] / extra["tokens"]) == pytest.approx(metrics["kl"], rel=1e-3)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / largest


SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.1}
KINDS = [
    {"loss_type": kind, **level, **({"epsilon_high": 5.0} if kind == "cispo" else {})}
    for kind in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo")
    for level in ({"importance_sampling_level": "token"}, SEQUENCE)
]
OTHERS = [
    {"loss_type": "grpo", "beta": 0.04, "epsilon_high": 0.3},
    {"loss_type": "dapo", "beta": 0.04, **SEQUENCE, "use_bias_correction_kl": False},
    {"loss_type": "dr_grpo", "delta": 1.5, "sampling_temperature": 0.7},
    {"loss_type": "dapo", "importance_sampling_correction": "sequence_mask", "importance_sampling_cap": 1.2},
    {"loss_type": "grpo", "importance_sampling_correction": "token_truncate", "importance_sampling_cap": 1.05},
    {"loss_type": "cispo", "epsilon_high": 1.1, "sampling_temperature": 1.5},
    {"loss_type": "dapo", "entropy_coef": 0.05},
    {"loss_type": "grpo", "entropy_coef": 0.3, "sampling_temperature": 0.7},
]


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("settings", KINDS + OTHERS, ids=lambda each: "-".join(map(str, each.values())))
def test_loss_and_gradients_are_those_of_trl_off_policy(settings, share_prompts):
    settings = settings | {"num_iterations": 2}
    assert difference(settings, True, False, share_prompts, masked="beta" not in settings) < 1e-5


@pytest.mark.parametrize("settings", KINDS, ids=lambda each: "-".join(map(str, each.values())))
def test_loss_and_gradients_are_those_of_trl_on_policy(settings):
    assert difference(settings, False, True, share_prompts=True) < 1e-6


@pytest.mark.parametrize(
    ("row", "whole", "block"), [(512, 128, 256), pytest.param(8192, 4096, 512, marks=pytest.mark.slow)]
)
def test_of_long_rows_the_loss_is_that_of_trl_and_memory_is_linear_in_the_row(row, whole, block, monkeypatch):
    monkeypatch.setattr(splash_blocks, "WHOLE", whole)
    settings = {
        "max_completion_length": row // 7,
        "max_length": row,
        "num_iterations": 2,
        **SEQUENCE,
        "loss_type": "dapo",
    }
    settings |= {"importance_sampling_correction": "sequence_mask", "importance_sampling_cap": 50.0}
    sizes = [(size * row // 8192 or 1, length * row // 8192 or 1) for size, length in LONG]
    made = LargestTensor()
    assert difference(settings, True, True, True, sizes=sizes, made=made) < 1e-6
    assert made.elements == row * block  # the mask of a block of queries


def test_advantages_are_those_of_trl():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.5], [1.0, 1.0, 1.0, 1.0], [0.2, 0.9, 0.4, 0.1]])
    mean = rewards.mean(1, keepdim=True)
    assert torch.allclose(advantages_of(rewards, "group"), (rewards - mean) / (rewards.std(1, keepdim=True) + 1e-4))
    assert torch.allclose(advantages_of(rewards, "batch"), (rewards - mean) / (rewards.std() + 1e-4))
    assert torch.allclose(advantages_of(rewards, "none"), rewards - mean)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_and_completions_that_are_not_judged_have_no_advantage(scale):
    nan = math.nan
    rewards = torch.tensor([[0.3, 0.3, 0.3], [nan, 1.0, 0.0], [nan, nan, 1.0], [nan, nan, nan]])
    advantages = advantages_of(rewards, scale)
    assert not advantages[[0, 2, 3]].any() and advantages[1, 0] == 0
    assert advantages[1, 1] > 0 > advantages[1, 2]
    assert not advantages_of(torch.ones(2, 2), scale).any()
    for size in (0.1, 999.9):
        assert not advantages_of(torch.full((1, 7), size), scale).any()
    assert advantages_of(torch.tensor([[1e-7, 2e-7]]), scale).any(), "rewards of any scale"


def test_layers_that_run_as_a_loop_have_the_same_reference():
    """With beta, the adapter is also disabled in the loop over the layers."""
    config = load_config(None, {"objective": "policy", "beta": 0.1, "max_completion_length": 12, "base_dtype": "fp32"})
    rows = pack(samples(False), config)
    losses = []
    for looped in (False, True):
        model = tiny()
        if looped:
            assert scan_layers(models.base_model(model).get_decoder(), replace(config.optim, scan_layers="on"), "cpu")
        sums = PolicyObjective(config)(model, rows.tensors(np.arange(len(rows))))
        losses.append((float(sums.loss), float(sums.extra[4])))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][1] > 0
