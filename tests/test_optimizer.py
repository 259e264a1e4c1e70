from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import training_functions

from tpu_kit.config import OptimConfig, load_config
from tpu_kit.launch import launch
from tpu_kit.machine import Machine
from tpu_kit.optimizer import OPTIMIZERS

SHAPES = [torch.Size(shape) for shape in ((7, 5), (7,), (3, 4, 6), (3, 7))]
NUMBERS = sum(shape.numel() for shape in SHAPES)
OPTIM = OptimConfig(beta1=0.9, beta2=0.99)


def gradients(count: int, spread: float = 3.0) -> Iterator[torch.Tensor]:
    """Noise around a mean, both over several orders of magnitude from one number to the next."""
    generator = torch.Generator().manual_seed(0)
    size = 10 ** (spread * (torch.rand(NUMBERS, generator=generator) - 1))
    mean = size * torch.randn(NUMBERS, generator=generator)
    for _ in range(count):
        yield mean + size * torch.randn(NUMBERS, generator=generator)


def run(name: str, count: int, optim: OptimConfig = OPTIM) -> list[torch.Tensor]:
    moments, directions = OPTIMIZERS[name].start(torch.Size([NUMBERS]), SHAPES), []
    for step, gradient in enumerate(gradients(count), 1):
        direction, after = OPTIMIZERS[name].direction(gradient, moments, torch.tensor(float(step)), optim, SHAPES)
        assert {k: (v.shape, v.dtype) for k, v in after.items()} == {k: (v.shape, v.dtype) for k, v in moments.items()}
        moments = after
        directions.append(direction)
    return directions


def test_adafactor_is_torchs() -> None:
    """PyTorch's scales its rate by the parameter's root mean square, which is 1 here."""
    matrix = torch.nn.Parameter(torch.ones(7, 5))
    theirs = torch.optim.Adafactor([matrix], lr=1e-6, beta2_decay=-0.8, eps=(1e-30, 1e-3), d=1.0)
    moments = OPTIMIZERS["adafactor"].start(torch.Size([35]), [matrix.shape])
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 8):
        gradient = torch.randn(35, generator=generator) * step
        direction, moments = OPTIMIZERS["adafactor"].direction(
            gradient, moments, torch.tensor(float(step)), OPTIM, [matrix.shape]
        )
        before = matrix.detach().double().clone()
        matrix.grad = gradient.view(7, 5).clone()
        theirs.step()
        change = (before - matrix.detach().double()) / 1e-6
        torch.testing.assert_close(direction.view(7, 5).double(), change, rtol=0.1, atol=0.1)
        assert torch.equal(direction.view(7, 5) > 0, matrix.grad > 0)


def test_adafactor_takes_each_matrix_of_a_stack_for_itself() -> None:
    stack, single = torch.Size((3, 4, 6)), torch.Size((4, 6))
    gradient = torch.randn(3, 24, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [10.0], [100.0]])
    start = OPTIMIZERS["adafactor"].start
    whole, _ = OPTIMIZERS["adafactor"].direction(
        gradient.view(stack), start(stack, [stack]), torch.tensor(1.0), OPTIM, [stack]
    )
    assert whole.shape == stack
    for part, direction in zip(gradient, whole.view(3, 24), strict=True):
        alone, _ = OPTIMIZERS["adafactor"].direction(
            part, start(part.shape, [single]), torch.tensor(1.0), OPTIM, [single]
        )
        torch.testing.assert_close(direction, alone)


def test_8_bits_are_close_to_32() -> None:
    exact, coded = run("adamw", 300), run("adamw8bit", 300)
    for a, b in zip(exact[20:], coded[20:], strict=True):
        assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.93
        assert b.abs().max() < 3 * a.abs().max()  # what rounds to zero would be divided by eps


def test_what_the_moments_take() -> None:
    def size(name: str) -> int:
        shape = torch.Size((1024, 1024))
        return sum(value.numel() * value.element_size() for value in OPTIMIZERS[name].start(shape, [shape]).values())

    million = 1024 * 1024
    assert size("adamw") == 8 * million
    assert size("adamw8bit") == 2 * million + 2 * 4 * million // 256
    assert size("adafactor") == 4 * 2 * 1024


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains(name: str) -> None:
    """A least-squares problem that a step per number solves: the loss falls by orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    wanted, values = torch.randn(NUMBERS, generator=generator), torch.zeros(NUMBERS)
    moments = OPTIMIZERS[name].start(torch.Size([NUMBERS]), SHAPES)
    for step in range(1, 401):
        direction, moments = OPTIMIZERS[name].direction(
            values - wanted, moments, torch.tensor(float(step)), OPTIM, SHAPES
        )
        values = values - 0.05 * (1 - step / 401) * direction
    assert float((values - wanted).square().mean()) < 1e-4 * float(wanted.square().mean())


@pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_program_however_late_the_step(name: str, quick_xla: None) -> None:
    ended = launch(
        training_functions.late_steps,
        load_config(None, {"device_type": "xla-cpu", "num_replicas": 1, "optimizer": name}),
    )
    assert ended["compiled"] == [1] + [0] * 10
    assert ended["applied"] == [1, 2, 325, 326, 16_601, 16_602, 19_999, 20_000, 20_001, 2_000_001, 2_000_002]
    assert all(map(math.isfinite, ended["parameters"])) and any(ended["parameters"])


def test_settings_of_another_optimizer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"optim.beta2: 0.99 is AdamW's, and optim.optimizer=adafactor has none"):
        load_config(None, {"optimizer": "adafactor", "beta2": 0.99})
