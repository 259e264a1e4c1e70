"""Distillation equals a plain computation: two transformers models, whole logits, no chunks, fp32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.training_functions import rows
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.model import causal_lm as models
from tpu_kit.model import trainable
from tpu_kit.model.loop.layer_scan import scan_layers
from tpu_kit.training.losses.distillation import DistillationObjective, divergence
from tpu_kit.training.losses.policy_gradient import Sampled, pack

WIDTH = 16


def llama(seed: int, hidden: int, layers: int, vocabulary: int = 61) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            parameter.data *= 4  # far from uniform distributions
    return model


def run_of(**settings: Any) -> TrainConfig:
    given = {"lora.r": 0, "model.base_dtype": "fp32", "loss_chunk": 24, "distill.teacher_dtype": "fp32"}
    return load_config(None, given | {"distill.teacher": "teacher"} | settings)


def distilled(config: TrainConfig, student: Any, teacher: Any, batch: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """Returns the sums of the kit's objective, and the model with its gradients."""
    model = trainable.adapt(student, config.lora, "fp32").train()
    objective = DistillationObjective(config)
    objective.attach(model, lambda _: teacher)
    for one in (model, getattr(model, "teacher", None)):
        if one is not None and config.distill.layers:
            assert scan_layers(one.get_decoder(), config.optim, "cpu") is not None
    found = objective(model, batch)
    found.loss.backward()
    assert len(found.extra) == len(objective.extra)
    return dict(zip(("loss", "weight", *objective.extra), (found.loss, found.weight, *found.extra), strict=True)), model


def log_softmax(logits: torch.Tensor, temperature: float, size: int) -> torch.Tensor:
    return torch.log_softmax(logits[..., :size].double() / temperature, dim=-1)


def plain_divergence(kind: str, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The divergence by torch's kl_div, from log-probabilities of the teacher and the model."""

    def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.kl_div(other, one, reduction="none", log_target=True).sum(-1)

    if kind == "js":
        middle = ((p.exp() + q.exp()) / 2).log()
        return (kl(p, middle) + kl(q, middle)) / 2
    return kl(p, q) if kind == "forward" else kl(q, p)


def carries(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100) != -100


def plain(config: TrainConfig, student: Any, teacher: Any, batch: dict[str, torch.Tensor], projections: Any) -> Any:
    """Computes the same sums from whole logits; the student gets the gradients."""
    distill, mask = config.distill, carries(batch)
    own = student(input_ids=batch["input_ids"], output_hidden_states=True)
    with torch.no_grad():
        other = teacher(input_ids=batch["input_ids"], output_hidden_states=True)
    size = min(own.logits.shape[-1], other.logits.shape[-1])
    p, q = (log_softmax(one.logits, distill.temperature, size) for one in (other, own))
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    found = {
        "logits": plain_divergence(distill.divergence, p, q)[mask].sum(),
        "labels": torch.nn.functional.cross_entropy(own.logits[mask].double(), labels[mask], reduction="sum"),
    }
    pairs = {f"layers_{a}_{b}": (own.hidden_states[a], other.hidden_states[b]) for a, b in distill.pairs}
    for name, (ours, theirs) in {**pairs, "embeddings": (own.hidden_states[0], other.hidden_states[0])}.items():
        if projections is not None and name in projections:
            ours = projections[name](ours)
        if ours.shape == theirs.shape:
            kind = "embeddings" if name == "embeddings" else "hidden"
            found[kind] = found.get(kind, 0.0) + (ours - theirs).double().square().mean(-1)[mask].sum()
    weights = {name: getattr(distill, f"{name}_weight") for name in found}
    found = {name: value for name, value in found.items() if weights[name]}
    loss = sum(weights[name] * value for name, value in found.items())
    loss.backward()
    return {"loss": loss, "weight": mask.sum()} | {f"distill_{name}": value for name, value in found.items()}


CASES = [
    {"distill.divergence": "forward"},
    {"distill.divergence": "reverse", "distill.temperature": 2.0},
    {"distill.divergence": "js", "distill.temperature": 0.5, "labels_weight": 0.3},
    {"logits_weight": 0.0, "labels_weight": 1.0},
    {"hidden_weight": 0.5, "distill.layers": "1:2", "embeddings_weight": 0.25},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("sizes", [(32, 61), (64, 67)], ids=str)  # the teacher's: equal to the student's, larger
def test_losses_and_gradients_are_those_of_whole_logits(settings: dict[str, Any], sizes: tuple[int, int]) -> None:
    config, batch = run_of(**settings), rows(4, WIDTH)
    found, model = distilled(config, llama(0, 32, 2), llama(1, sizes[0], 3, sizes[1]), batch)
    student, teacher = llama(0, 32, 2), llama(1, sizes[0], 3, sizes[1])
    projections = None
    if hasattr(model, "objective"):
        projections = torch.nn.ModuleDict({n: torch.nn.Linear(32, sizes[0], bias=False) for n in model.objective})
        projections.load_state_dict(model.objective.state_dict())
    wanted = plain(config, student, teacher, batch, projections)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert float(found[name]) == pytest.approx(float(value), rel=1e-5), name
    got = {name: one.grad for name, one in models.trainable_parameters(model).items()}
    assert not any(name.startswith("teacher") for name in got)
    for name, one in student.named_parameters():
        gradient = got[name] if name in got else stacked(got, name)
        assert gradient is not None, name
        torch.testing.assert_close(gradient, one.grad, rtol=1e-5, atol=1e-5 * float(one.grad.abs().max()), msg=name)
    for name, one in projections.named_parameters() if projections is not None else ():
        torch.testing.assert_close(got[f"objective.{name}"], one.grad, rtol=1e-5, atol=1e-6)


def stacked(gradients: dict[str, Any], name: str) -> torch.Tensor:
    """The gradient of a layer's parameter, for runs of a single layer."""
    head, _, tail = name.partition("layers.")
    number, _, rest = tail.partition(".")
    return gradients[f"{head}layers.runs.{number}.layers.0.{rest}"][0]


@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_top_logits_of_the_whole_vocabulary_are_the_teacher_in_memory(kind: str) -> None:
    batch = rows(4, WIDTH)
    memory, model = distilled(
        run_of(**{"distill.divergence": kind, "distill.temperature": 1.5}), llama(0, 32, 2), llama(1, 32, 3), batch
    )
    config = run_of(**{"distill.divergence": kind, "distill.temperature": 1.5, "files": "unused", "top_k": 61})
    with torch.no_grad():
        p = torch.log_softmax(llama(1, 32, 3)(input_ids=batch["input_ids"]).logits / 1.5, dim=-1)
    top, ids = p.topk(61, dim=-1)
    others = torch.full_like(top[..., :1], -1e30)
    columns = {"top_ids": ids.to(torch.int32).flatten(1), "top_log_p": torch.cat([top, others], -1).flatten(1)}
    files, other = distilled(config, llama(0, 32, 2), None, batch | columns)
    assert float(files["loss"]) == pytest.approx(float(memory["loss"]), rel=1e-5)
    for one, two in zip(model.parameters(), other.parameters(), strict=False):
        if one.grad is not None:
            torch.testing.assert_close(two.grad, one.grad, rtol=1e-5, atol=1e-5 * float(one.grad.abs().max()))


@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_a_few_top_logits_are_the_divergence_between_coarser_distributions(kind: str) -> None:
    batch = rows(2, WIDTH)
    config = run_of(**{"distill.divergence": kind, "files": "unused", "top_k": 5})
    with torch.no_grad():
        both = (one(input_ids=batch["input_ids"]).logits for one in (llama(1, 32, 3), llama(0, 32, 2)))
        p, q = (torch.softmax(logits.double(), -1) for logits in both)
    top, ids = p.topk(5, dim=-1)
    coarse = [
        torch.cat([one.gather(-1, ids), 1 - one.gather(-1, ids).sum(-1, keepdim=True)], -1).log() for one in (p, q)
    ]
    columns = {"top_ids": ids.to(torch.int32).flatten(1), "top_log_p": coarse[0].float().flatten(1)}
    found, _ = distilled(config, llama(0, 32, 2), None, batch | columns)
    wanted = plain_divergence(kind, *coarse)[carries(batch)].sum()
    assert float(found["loss"]) == pytest.approx(float(wanted), rel=1e-5)
    assert not torch.equal(top, top.flip(-1))


def test_the_divergences_are_trls() -> None:
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer", reason="TRL's GKD is not installed")
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 2, 5, 11).unbind()
    for kind, beta in (("forward", 0), ("reverse", 1), ("js", 0.5)):
        theirs = gkd.GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, temperature=0.7, reduction="sum")
        p, q = (torch.log_softmax(one / 0.7, dim=-1) for one in (teacher, student))
        assert float(divergence(p, q, kind).sum()) == pytest.approx(float(theirs), rel=1e-5), kind


def test_the_evaluation_is_the_likelihood_of_the_labels() -> None:
    batch = rows(2, WIDTH)
    _, model = distilled(run_of(), llama(0, 32, 2), llama(1, 32, 3), batch)
    student = llama(0, 32, 2)
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    with torch.no_grad():
        found = DistillationObjective(run_of())(model.eval(), batch)
        logits = student(input_ids=batch["input_ids"]).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert float(found.loss) == pytest.approx(float(wanted), rel=1e-5)


# ------------------------------------------------------------------------------------------------ sampled completions


def of_trl(config: TrainConfig, student: Any, teacher: Any, sampled: list[Sampled]) -> torch.Tensor:
    """The loss of TRL's trainer, with a stand-in for its other parts and prompts padded on the left."""
    from trl.trainer.distillation_trainer import DistillationTrainer

    class Alone(DistillationTrainer):
        def __init__(self) -> None:
            pass

    trainer = Alone()
    trainer.accelerator = SimpleNamespace(unwrap_model=lambda model: model, is_main_process=False)
    trainer._forward_redirection = lambda wrapped, model, method, *given, **named: method(*given, **named)
    trainer.teacher_model, trainer._is_vlm, trainer.model_kwarg_keys = teacher, False, ()
    trainer.temperature = config.distill.temperature
    trainer.beta = {"forward": 0.0, "js": 0.5, "reverse": 1.0}[config.distill.divergence]
    prompts, replies = (
        torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(getattr(one, name)) for one in sampled], True, padding_side=side, padding_value=-1
        )
        for name, side in (("prompt", "left"), ("tokens", "right"))
    )
    inputs = {
        "prompt_ids": prompts.clamp(min=0), "prompt_mask": (prompts >= 0).long(),
        "completion_ids": replies.clamp(min=0), "completion_mask": (replies >= 0).long(),
    }  # fmt: skip
    return trainer._compute_loss(student, inputs, inputs["completion_mask"].sum())[0]


@pytest.mark.parametrize("kind", ["forward", "js", "reverse"])
def test_loss_and_gradients_of_samples_are_those_of_trl(kind: str) -> None:
    settings = {"distill.on_policy": True, "distill.divergence": kind, "distill.temperature": 0.7, "max_length": WIDTH}
    config = run_of(**settings, max_completion_length=8)
    generator = torch.Generator().manual_seed(0)
    sampled = [
        Sampled(
            number,
            *(tuple(torch.randint(1, 61, (size,), generator=generator).tolist()) for size in sizes),
            (0.0,) * sizes[1],
            0.0,
        )
        for number, sizes in enumerate([(3, 5), (5, 1), (2, 7), (6, 8), (4, 3)])
    ]
    rows = pack(sampled, config)
    assert rows is not None and len(rows) < len(sampled) and not rows.columns
    found, model = distilled(config, llama(0, 32, 2), llama(1, 64, 3), rows.tensors(np.arange(len(rows))))
    assert found["weight"] == sum(len(one.tokens) for one in sampled)
    student = llama(0, 32, 2)
    wanted = of_trl(config, student, llama(1, 64, 3), sampled)
    wanted.backward()
    assert float(found["loss"] / found["weight"]) == pytest.approx(float(wanted), rel=1e-5)
    largest = max(float(one.grad.abs().max()) for one in student.parameters())
    for name, one in student.named_parameters():
        got = model.get_parameter(name).grad / found["weight"]
        assert float((got - one.grad).abs().max()) < 1e-5 * largest, name
