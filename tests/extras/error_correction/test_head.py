"""The error-correction objective equals a plain computation: whole logits, torch.distributions, no chunks, fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from tests.support.training_functions import rows
from tests.training.test_distillation import WIDTH, carries, llama
from tpu_kit.config.loader import load_config
from tpu_kit.extras.error_correction.head import ErrorCorrection, ErrorCorrectionObjective
from tpu_kit.model import causal_lm as models
from tpu_kit.model import states_head, trainable
from tpu_kit.model.states_head import file_names
from tpu_kit.training import adapter_files
from tpu_kit.training.objectives import SupervisedObjective

FILES = file_names("error_correction")


def made(objective: str = "error-correction", **settings: Any) -> tuple[Any, Any, Any]:
    """The objective, the model with its head, and the configuration."""
    given = {"lora.r": 2, "model.base_dtype": "fp32", "loss_chunk": 24, "optim.objective": objective}
    config = load_config(None, given | settings)
    model = trainable.adapt(llama(0, 32, 2), config.lora, "fp32").train()
    found = ErrorCorrectionObjective(config)
    found.attach(model, lambda _: None)
    return found, model, config


def opened(model: Any) -> Any:
    """The same model with a head that is no longer closed."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model.objective.gate.fill_(0.7)
        for parameter in model.objective.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_losses_and_gradients_are_those_of_whole_logits() -> None:
    objective, model, _ = made()
    batch, mask, head = rows(4, WIDTH), carries(rows(4, WIDTH)), opened(model).objective
    found = objective(model, batch)
    found.loss.backward()
    got = {name: one.grad.clone() for name, one in models.trainable_parameters(model).items()}
    model.zero_grad()

    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    states = model.get_base_model().model(input_ids=batch["input_ids"]).last_hidden_state
    weight = model.get_base_model().lm_head.weight.detach()
    nll = torch.nn.functional.cross_entropy((states @ weight.T)[mask], labels[mask], reduction="sum")
    h = states.detach()[mask]
    # The residual: the label's embedding minus the expected embedding.
    residual = (weight[labels[mask]] - torch.softmax(h @ weight.T, -1) @ weight) @ head.projection.T
    scale = (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    f = torch.nn.functional.silu(head.trunk(h / scale))
    k, d = head.settings["components"], head.settings["size"]
    weights, rest = head.mixture(f).split([k, 2 * k * d], -1)
    means, raw = rest.reshape(-1, k, 2 * d).split(d, -1)
    mixture = MixtureSameFamily(
        Categorical(logits=weights), Independent(Normal(means, torch.nn.functional.softplus(raw) + 0.01), 1)
    )
    corrected = h + torch.tanh(head.gate) * scale * head.output(torch.cat([f, mixture.mean], -1))
    better = torch.nn.functional.cross_entropy(corrected @ weight.T, labels[mask], reduction="sum")
    density = -mixture.log_prob(residual).sum() / d
    (nll + better + density).backward()

    assert float(found.weight) == int(mask.sum())
    for mine, wanted in zip((found.loss, *found.extra), (nll + better + density, nll, better, density), strict=True):
        assert float(mine) == pytest.approx(float(wanted), rel=1e-5)
    assert float(better) != pytest.approx(float(nll), rel=1e-3)
    for name, one in models.trainable_parameters(model).items():
        torch.testing.assert_close(got[name], one.grad, rtol=1e-5, atol=1e-5 * float(one.grad.abs().max()), msg=name)


def test_an_untrained_head_changes_nothing_and_the_adapters_learn_as_without_it() -> None:
    objective, model, config = made()
    batch = rows(4, WIDTH)
    for dtype in (torch.float32, torch.bfloat16):
        states = torch.randn(3, 5, 32, dtype=dtype)
        assert torch.equal(model.objective(states)[0], states)
    objective(model, batch).loss.backward()
    got = {name: one.grad for name, one in models.trainable_parameters(model).items()}
    assert float(got["objective.gate"].abs()) > 0, "it would never open"
    plain = trainable.adapt(llama(0, 32, 2), config.lora, "fp32").train()
    SupervisedObjective(config.optim)(plain, batch).loss.backward()
    for name, one in models.trainable_parameters(plain).items():
        torch.testing.assert_close(got[name], one.grad, rtol=1e-6, atol=1e-9, msg=name)
    model.eval()
    with torch.no_grad():
        assert torch.equal(objective(model, batch).loss, SupervisedObjective(config.optim)(plain.eval(), batch).loss)


def test_alone_it_leaves_the_adapters_as_they_are() -> None:
    objective, model, _ = made("error-correction-alone")
    beside, other, _ = made()
    batch = rows(2, WIDTH)
    found, wanted = objective(model, batch), beside(other, batch)
    found.loss.backward()
    wanted.loss.backward()
    assert [float(one) for one in found.extra] == [float(one) for one in wanted.extra]
    for (name, mine), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        if name.startswith("objective."):
            assert torch.equal(mine.grad, theirs.grad), name
        else:
            assert mine.grad is None, name


def test_a_model_with_the_head_of_a_folder_returns_corrected_states(tmp_path: Path) -> None:
    _, model, config = made()
    opened(model)
    weights = {name: one.detach() for name, one in models.trainable_parameters(model).items()}
    files, documents = adapter_files.result_files(model, weights, config)
    assert sorted(files) == ["adapter_model", "error_correction"]
    assert not any("objective" in name for name in files["adapter_model"])
    write(tmp_path, files["error_correction"], documents["error_correction"])
    base, ids = llama(0, 32, 2), rows(2, WIDTH)["input_ids"]
    before = base.model(input_ids=ids).last_hidden_state
    states_head.attach(base.get_decoder(), tmp_path, 32, "supervised")
    wanted = model.objective(before)[0]
    assert torch.equal(base.model(input_ids=ids).last_hidden_state, wanted) and not torch.equal(before, wanted)
    torch.testing.assert_close(base(input_ids=ids).logits, base.lm_head(wanted))


def write(folder: Path, tensors: dict[str, torch.Tensor], document: dict[str, Any]) -> None:
    (folder / FILES[0]).write_text(json.dumps(document))
    save_file(tensors, folder / FILES[1])


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("short", "cannot be read (SafetensorError: "),
        ("gone", "cannot be read (FileNotFoundError: "),
        ("settings", "cannot be read (TypeError: "),
        ("nested", "cannot be read (KeyError: 'tpu_kit_head')"),
        (
            "extra",
            "(ImportError: its code is not in this installation, which lacks tpu_kit.extras.none; install ",
        ),
        ("tensor", "cannot be read (RuntimeError: "),
        ("model", "is for a hidden size of 32, and the model has 64: set model.name to the base model"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, damage: str, text: str) -> None:
    head = ErrorCorrection(32)
    weights = {f"objective.{name}": value for name, value in head.state_dict().items()}
    tensors, document = head.files(weights)
    changed = {"settings": {"depth": 2}, "extra": {"tpu_kit_head": "tpu_kit.extras.none.head:ErrorCorrection"}}
    write(tmp_path, tensors, document | changed.get(damage, {}))
    path = tmp_path / FILES[1]
    if damage == "nested":
        (tmp_path / FILES[0]).write_text(json.dumps({"x": {"tpu_kit_head": 1}}))
    if damage == "short":
        path.write_bytes(path.read_bytes()[:-9])
    if damage == "gone":
        path.unlink()
    if damage == "tensor":
        save_file({name: value for name, value in load_file(path).items() if name != "gate"}, path)
    with pytest.raises(ValueError, match="the error-correction head in ") as error:
        states_head.attach(torch.nn.Module(), tmp_path, 64 if damage == "model" else 32, "supervised")
    assert text in str(error.value)
    if damage != "model":
        assert "delete error_correction.json and error_correction.safetensors to use the adapter" in str(error.value)
