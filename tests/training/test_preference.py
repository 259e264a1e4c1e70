"""The losses of pairs equal TRL's: of `DPOTrainer`, `CPOTrainer` (simpo) and `ORPOTrainer`."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.support.training_functions import tiny
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.config.sections.preference import LOSSES
from tpu_kit.data.batching import Documents, PackedDataset
from tpu_kit.data.pairs import PairColumns, PairLayout, PairTokens, as_units
from tpu_kit.data.tokenizing import Tokenized
from tpu_kit.model import causal_lm as models
from tpu_kit.training.losses.preference import PreferenceObjective
from tpu_kit.training.losses.segment_sums import last_of_segments, sum_by_segment

# Lengths of prompts, chosen and rejected replies, including a single token.
SIZES = [(3, 5, 4), (3, 1, 6), (5, 7, 2), (2, 4, 4), (1, 6, 3)]
ROW = 28


class Pair(NamedTuple):
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def pairs_of(sizes: list[tuple[int, int, int]] = SIZES) -> list[Pair]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for lengths in sizes:
        prompt, chosen, rejected = (torch.randint(1, 61, (n,), generator=generator).tolist() for n in lengths)
        rejected[0] = chosen[0] % 60 + 1  # the replies differ from their first token on
        made.append(Pair(prompt, chosen, rejected))
    return made


def packed(pairs: list[Pair], layout: PairLayout, length: int = ROW, labels: list[int] | None = None) -> PackedDataset:
    """Packs the pairs into rows, as tokenisation makes them."""
    ids, mask, sizes, lengths = list[int](), list[bool](), list[PairTokens](), list[int]()
    for prompt, chosen, rejected in pairs:
        for reply in (chosen, rejected):
            ids += [*prompt, *reply]
            mask += [False] * len(prompt) + [True] * len(reply)
        sizes.append(PairTokens(len(prompt), len(prompt) + len(chosen), len(prompt), 0))
        lengths.append(2 * len(prompt) + len(chosen) + len(rejected))
    documents = Documents(
        np.array(ids, dtype=np.int32), np.array(mask), np.array(lengths), np.arange(len(pairs)),
        pairs=np.array(sizes, dtype=np.int32),
    )  # fmt: skip
    none = np.zeros(len(pairs), dtype=np.int64)
    encoder: Any = SimpleNamespace(
        config=SimpleNamespace(max_length=length), layout=SimpleNamespace(format="preference")
    )
    rows: Any = None
    tokens = Tokenized(
        "rows", rows, encoder, documents, none, none, none, none, none, none[:0], none[:0], none, 0, ()
    )  # fmt: skip
    made, _ = as_units(tokens, layout.shares)
    if labels is not None:
        made.documents.pairs[:, 2] = labels
    rows = PackedDataset(made.documents, length)
    rows.further = PairColumns(rows, layout)
    rows.further.scale = rows.further.share(rows, np.arange(len(rows)))
    return rows


def run_config(settings: dict[str, Any]) -> TrainConfig:
    return load_config(None, {"objective": "preference", "base_dtype": "fp32", "loss_chunk": 16} | settings)


def layout_of(config: TrainConfig, shares: bool) -> PairLayout:
    orpo, alpha = "orpo" in config.preference.losses, config.preference.ld_alpha
    return PairLayout(shares and not orpo, orpo, 1.0 if alpha is None else alpha)


def table(rows: list[list[int]], pad: int = 0) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [pad] * (width - len(row)) for row in rows])


def batch_of(pairs: list[Pair]) -> dict[str, torch.Tensor]:
    """The chosen, then the rejected replies, all after their prompts and padded at the end."""
    sides = [[pair.chosen for pair in pairs], [pair.rejected for pair in pairs]]
    whole = [pair.prompt + reply for side in sides for pair, reply in zip(pairs, side, strict=True)]
    learned = [
        [0] * len(pair.prompt) + [1] * len(reply) for side in sides for pair, reply in zip(pairs, side, strict=True)
    ]
    return {"input_ids": table(whole), "attention_mask": table([[1] * len(row) for row in whole]),
            "completion_mask": table(learned)}  # fmt: skip


def logits_of(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return models.base_model(model)(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
    ).logits  # fmt: skip


def token_logps(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    log_p = torch.log_softmax(logits_of(model, batch["input_ids"], batch["attention_mask"])[:, :-1], -1)
    return log_p.gather(-1, batch["input_ids"][:, 1:, None])[..., 0] * batch["completion_mask"][:, 1:]


ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"), gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor
)


def trl_dpo(
    model: Any, config: TrainConfig, batch: dict[str, torch.Tensor], reference: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """Computes TRL's loss, with a stand-in for its trainer's other parts; `reference`: log-probabilities of tokens."""
    from trl.trainer.dpo_trainer import DPOTrainer

    class Alone(DPOTrainer):
        def __init__(self) -> None:
            pass

    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        zeros = torch.zeros(len(input_ids), input_ids.shape[1] - 1)
        log_probs = token_logps(model, batch)
        return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    p, trainer = config.preference, Alone()
    trainer.model, trainer.accelerator, trainer.aux_loss_enabled = SimpleNamespace(training=True), ACCELERATOR, False
    trainer.ld_alpha, trainer.precompute_ref_logps, trainer.f_divergence_type = p.ld_alpha, True, p.f_divergence
    trainer.f_alpha_divergence_coef, trainer.beta, trainer.label_smoothing = p.f_alpha, p.pref_beta, p.pref_smoothing
    trainer.loss_types, trainer.loss_weights = list(p.weights), list(p.weights.values())
    trainer.use_weighting, trainer._total_train_tokens, trainer._tp_size = False, 0, 1
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer.args = SimpleNamespace(discopop_tau=p.discopop_tau)
    position, learned = batch["completion_mask"][:, 1:].cumsum(1), batch["completion_mask"][:, 1:].sum(1)
    shared = torch.minimum(*learned.chunk(2)).repeat(2)[:, None]
    weight = torch.where(position <= shared, 1.0, 1.0 if p.ld_alpha is None else p.ld_alpha)
    chosen, rejected = (reference * weight).sum(1).chunk(2)
    loss = trainer._compute_loss(forward, batch | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def trl_free(model: Any, config: TrainConfig, pairs: list[Pair]) -> tuple[torch.Tensor, dict[str, float]]:
    """Computes the loss of TRL's CPO trainer with loss_type=simpo, or of its ORPO trainer."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    orpo, p = "orpo" in config.preference.losses, config.preference

    class Alone(ORPOTrainer if orpo else CPOTrainer):  # type: ignore[misc]  # chosen at run time
        def __init__(self) -> None:
            pass

    trainer = Alone()
    trainer.accelerator, trainer.is_encoder_decoder, trainer.aux_loss_enabled = ACCELERATOR, False, False
    trainer.padding_value = trainer.pad_token_id = 0
    trainer.processing_class = SimpleNamespace(pad_token_id=0)
    trainer.beta, trainer.label_smoothing, trainer.simpo_gamma = p.pref_beta, p.pref_smoothing, p.simpo_gamma
    trainer.loss_type, trainer.cpo_alpha, trainer.alpha = "simpo", 0.0, 0.0

    def forward(ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=logits_of(model, ids, attention_mask))

    batch = {}
    for side in ("chosen", "rejected"):
        whole = [pair.prompt + getattr(pair, side) for pair in pairs]
        labels = [[-100] * len(pair.prompt) + getattr(pair, side) for pair in pairs]
        batch |= {f"{side}_input_ids": table(whole), f"{side}_labels": table(labels, -100),
                  f"{side}_attention_mask": table([[1] * len(row) for row in whole])}  # fmt: skip
    loss, metrics = trainer.get_batch_loss_metrics(forward, batch)
    return loss, {name: float(value) for name, value in metrics.items()}


def trl_kto(
    model: Any, config: TrainConfig, pairs: list[Pair], labels: list[int], reference: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """Computes TRL's loss; the rejected replies of `pairs` stand for other rows' replies, for the divergence."""
    from trl.trainer.kto_trainer import KTOTrainer

    class Alone(KTOTrainer):
        def __init__(self) -> None:
            pass

        def _compute_kl_logps(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return whole.sum(1).detach().chunk(2)[1]

    both = batch_of(pairs)
    own = {name: tensor.chunk(2)[0] for name, tensor in both.items()}
    whole = token_logps(model, both)
    zeros = torch.zeros_like(whole.chunk(2)[0])

    def forward(**_: Any) -> Any:
        return SimpleNamespace(log_probs=whole.chunk(2)[0], entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    p, trainer = config.preference, Alone()
    trainer.model, trainer.accelerator, trainer.aux_loss_enabled = SimpleNamespace(training=True), ACCELERATOR, False
    trainer.precompute_ref_logps = trainer.calculate_KL = True
    trainer.beta, trainer.loss_type = p.pref_beta, "kto"
    trainer.desirable_weight, trainer.undesirable_weight = p.desirable_weight, p.undesirable_weight
    trainer._total_train_tokens, trainer._tp_size = 0, 1
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    ref, ref_kl = reference.sum(1).chunk(2)
    inputs = own | {"label": torch.tensor(labels).bool(), "ref_logps": ref, "ref_KL_logps": ref_kl}
    loss = trainer._compute_loss(forward, inputs, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("away", [-0.3, 0.3])
def test_loss_of_labelled_replies_is_that_of_trl(shares: bool, away: float) -> None:
    """With a positive divergence, and with a divergence clamped at 0."""
    config = run_config({"losses": ["kto"], "desirable_weight": 1.3, "undesirable_weight": 0.7})
    model, pairs, labels, batch = tiny(), pairs_of(), [1, 0, 1, 1, 0], batch_of(pairs_of())
    with torch.no_grad():
        start = token_logps(model, batch)
        noise = torch.randn(start.shape, generator=torch.Generator().manual_seed(1))
        reference = (start + away + 0.1 * noise) * batch["completion_mask"][:, 1:]
    theirs, metrics = trl_kto(model, config, pairs, labels, reference)
    assert (metrics["kl"] > 0) is (away < 0)
    trained = models.trainable_parameters(model)
    wanted = dict(zip(trained, torch.autograd.grad(theirs, list(trained.values())), strict=True))

    rows = packed(pairs, PairLayout(shares, label_weights=(1.3, 0.7)), labels=labels)
    rows.further.reference = torch.stack(reference.sum(1).chunk(2), 1).numpy()
    rows.further.kl = metrics["kl"]
    objective = PreferenceObjective(config)
    tensors = rows.tensors(np.arange(len(rows)))
    planned = {name: dtype for name, (_, dtype) in objective.batch_columns(shares).items()}
    assert {name: tensor.dtype for name, tensor in tensors.items()} == planned
    sums = objective(model, tensors)
    ours = sums.loss / sums.weight
    assert float((ours - theirs).abs()) <= 1e-5
    means = objective.means(dict(zip(objective.extra, map(float, sums.extra), strict=True)), float(sums.weight))
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl"):
        assert means[name] == pytest.approx(metrics[name], abs=1e-5, rel=1e-5), name
    found = dict(zip(trained, torch.autograd.grad(ours, list(trained.values())), strict=True))
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) <= 1e-5 * max(largest, 1e-3)


SETTINGS = [
    *({"losses": [name], **({"pref_smoothing": 0.1} if name in ("robust", "exo_pair") else {})} for name in LOSSES
      if name not in ("simpo", "orpo", "kto")),
    {"losses": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
    {"losses": ["ipo"], "f_divergence": "js_divergence"},
    {"losses": ["sigmoid"], "f_divergence": "forward_kl"},
    {"losses": ["hinge"], "f_divergence": "alpha_divergence", "f_alpha": 0.7},
    {"losses": ["sigmoid"], "ld_alpha": 0.4},
    {"losses": ["apo_zero"], "ld_alpha": 0.0},
    {"losses": ["sigmoid"], "reference": "step"},
    {"losses": ["simpo"], "pref_beta": 2.0, "simpo_gamma": 1.0},
    {"losses": ["simpo"], "pref_beta": 2.0, "pref_smoothing": 0.1},
    {"losses": ["orpo"]},
]  # fmt: skip


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: "-".join(map(str, each.values())))
def test_loss_rewards_and_gradients_are_those_of_trl(settings: dict[str, Any], shares: bool) -> None:
    config, model, pairs = run_config(settings), tiny(), pairs_of()
    free = not config.preference.compares and "sft" not in config.preference.losses
    batch = batch_of(pairs)
    with torch.no_grad():
        start = token_logps(model, batch)
        if config.preference.reference == "step":
            with model.disable_adapter():  # type: ignore[operator]  # PEFT's method; mypy takes it for a tensor
                reference = token_logps(model, batch)
        else:
            reference = start + 0.3 * torch.randn(start.shape, generator=torch.Generator().manual_seed(1))
            reference = reference * batch["completion_mask"][:, 1:]
    theirs, metrics = trl_free(model, config, pairs) if free else trl_dpo(model, config, batch, reference)
    trained = models.trainable_parameters(model)
    wanted = dict(zip(trained, torch.autograd.grad(theirs, list(trained.values())), strict=True))

    layout = layout_of(config, shares)
    rows = packed(pairs, layout)
    learned = batch["completion_mask"][:, 1:]
    tail = torch.where(
        learned.cumsum(1) <= torch.minimum(*learned.sum(1).chunk(2)).repeat(2)[:, None], 1.0, layout.ld_alpha
    )
    rows.further.reference = torch.stack((reference * tail).sum(1).chunk(2), 1).numpy()
    objective = PreferenceObjective(config)
    tensors = rows.tensors(np.arange(len(rows)))
    planned = {name: dtype for name, (_, dtype) in objective.batch_columns(shares).items()}
    assert {name: tensor.dtype for name, tensor in tensors.items()} == planned
    sums = objective(model, tensors)
    assert float(sums.weight) == len(pairs)
    ours = sums.loss / sums.weight
    assert float((ours - theirs).abs()) <= 1e-5 * max(1.0, float(theirs.abs()))
    means = objective.means(dict(zip(objective.extra, sums.extra, strict=True)), float(sums.weight))
    if "sft" not in config.preference.losses or config.preference.compares:
        for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen"):
            scale = 1.0
            if free and name.startswith("logps"):
                continue  # TRL's are means over tokens
            assert float(means[name]) * scale == pytest.approx(metrics[name], abs=1e-5, rel=1e-5), name
    found = dict(zip(trained, torch.autograd.grad(ours, list(trained.values())), strict=True))
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) <= 1e-5 * max(largest, 1e-3)


def test_passes_of_fewer_rows_add_up_to_one_pass() -> None:
    config, model = run_config({"losses": ["sigmoid", "sft"]}), tiny()
    rows = packed(pairs_of(), layout_of(config, True))
    rows.further.reference[:] = -20.0
    objective = PreferenceObjective(config)
    whole = objective(model, rows.tensors(np.arange(len(rows))))
    parts = [objective(model, rows.tensors(np.array([row, -1]))) for row in range(len(rows))]
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(whole.loss), rel=1e-6)
    for place, total in enumerate(whole.extra):
        assert float(sum(part.extra[place] for part in parts)) == pytest.approx(float(total), rel=1e-5, abs=1e-6)


def test_log_probabilities_of_the_reference_are_those_of_the_update() -> None:
    """The first loss of DPO is ln 2, because the reference is the model itself, in the same shapes."""
    config, model = run_config({}), tiny()
    rows, objective = packed(pairs_of(), layout_of(config, True)), PreferenceObjective(config)
    batch = rows.tensors(np.arange(len(rows)))
    both = objective.logprobs(model, batch)[:2]
    order = np.concatenate([rows.documents_of(row) for row in range(len(rows))])
    rows.further.reference[order] = both[:, last_of_segments(batch["pairs"])].T.numpy()
    sums = objective(model, rows.tensors(np.arange(len(rows))))
    assert float(sums.loss / sums.weight) == pytest.approx(np.log(2), abs=1e-6)
    assert float(sums.extra[-1]) < 1e-5


def test_sums_of_segments_are_exact_and_have_gradients() -> None:
    segments = torch.tensor([[1, 1, 1, 2, 3, 3, 3, 3, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]])
    values = torch.randn(3, 2, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    same = segments[:, :, None] == segments[:, None, :]
    wanted = torch.where(same, values[:, :, None, :], 0.0).sum(-1)
    assert torch.allclose(sum_by_segment(values, segments), wanted, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda each: sum_by_segment(each, segments), values)
    spoilt = values.detach().clone()
    spoilt[:, 0, 3] = torch.nan  # a separate segment
    assert not sum_by_segment(spoilt, segments)[:, 0, [0, 1, 2, 4, 5]].isnan().any()
