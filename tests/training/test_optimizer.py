from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import training_functions
from tests.support.child_processes import QUICK_XLA_FLAGS
from tpu_kit.config.loader import OptimConfig, load_config
from tpu_kit.distributed.launch import launch
from tpu_kit.machine.checks import Machine
from tpu_kit.training.optimizer import OPTIMIZERS

Tensors = dict[str, torch.Tensor]

# Parameters as in a model with stacked layers: `up` is narrow, `norm` is not a matrix.
STACKS = {name: [f"layers.{layer}.{name}" for layer in range(3)] for name in ("down", "up", "norm", "gate")}
STACKED = {"down": (3, 4, 300), "up": (3, 200, 5), "norm": (3, 7), "gate": (3,), "head": (6, 515), "bias": (9,)}
OPTIM = OptimConfig(beta1=0.9, beta2=0.99)


def parameters(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def unrolled(named: Mapping[str, torch.Tensor]) -> Tensors:
    """Splits stacks into their layers' parameters, layer by layer as in a model."""
    found = {layers[place]: named[name][place] for place in range(3) for name, layers in STACKS.items()}
    return found | {name: tensor for name, tensor in named.items() if name not in STACKS}


def noise(shapes: Mapping[str, tuple[int, ...]], count: int, spread: float = 3.0) -> Iterator[Tensors]:
    """Yields gradients of noise around a mean; both vary over several orders of magnitude between numbers."""
    generator = torch.Generator().manual_seed(0)
    sizes = {name: 10 ** (spread * (torch.rand(shape, generator=generator) - 1)) for name, shape in shapes.items()}
    means = {name: size * torch.randn(size.shape, generator=generator) for name, size in sizes.items()}
    for _ in range(count):
        yield {n: means[n] + size * torch.randn(size.shape, generator=generator) for n, size in sizes.items()}


class Run:
    """Applies an optimizer to parameters, update by update."""

    def __init__(
        self, name: str, like: Tensors, stacks: Mapping[str, list[str]] | None = None, optim: OptimConfig = OPTIM
    ) -> None:
        self.kind, self.optim, self.applied, self.stacks = OPTIMIZERS[name], optim, 0, stacks or {}
        self.moments = {name: self.kind.start(tensor.shape, name in self.stacks) for name, tensor in like.items()}

    def update(self, gradients: Tensors) -> Tensors:
        """Returns the directions by name."""
        self.applied += 1
        found: Tensors = {}
        direction_of = self.kind.direction(torch.tensor(float(self.applied)), self.optim)
        for name, gradient in gradients.items():
            before = self.moments[name]
            found[name], after = direction_of(gradient, before, name in self.stacks)
            assert {kind: one.shape for kind, one in after.items()} == {kind: one.shape for kind, one in before.items()}
            self.moments[name] = after
        return found


# ------------------------------------------------------------------------------------------------- against references


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_adamw_is_torchs(eps: float) -> None:
    """Also for gradients as small as eps, whose direction depends on eps."""
    optim = replace(OPTIM, eps=eps)
    shapes = {"small": (5, 7), "usual": (11,)}
    theirs = {name: torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    reference = torch.optim.AdamW(theirs.values(), lr=1.0, betas=(0.9, 0.99), eps=eps, weight_decay=0.0)
    mine = Run("adamw", parameters(shapes), optim=optim)
    for gradient in noise(shapes, 12):
        gradient["small"] = gradient["small"] * eps
        before = {name: parameter.detach().clone() for name, parameter in theirs.items()}
        for name, parameter in theirs.items():
            parameter.grad = gradient[name].double()
        reference.step()
        direction = mine.update(gradient)
        for name, parameter in theirs.items():
            torch.testing.assert_close(direction[name].double(), before[name] - parameter, rtol=1e-4, atol=1e-6)
    small = float(direction["small"].abs().max())
    assert small < 0.8, "eps has no effect"


def test_adafactor_is_torchs() -> None:
    """PyTorch scales its rate by the parameter's root mean square, which is 1 here; in float64 it stays 1."""
    shapes = {"matrix": (7, 5), "vector": (9,), "turned": (130, 6)}
    theirs = {name: torch.nn.Parameter(torch.ones(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    rate = 1e-9
    reference = torch.optim.Adafactor(theirs.values(), lr=rate, beta2_decay=-0.8, eps=(1e-30, 1e-3), weight_decay=0)
    mine = Run("adafactor", parameters(shapes))
    for step, gradient in enumerate(noise(shapes, 8), 1):
        gradient = {name: value * step for name, value in gradient.items()}
        before = {name: parameter.detach().clone() for name, parameter in theirs.items()}
        for name, parameter in theirs.items():
            parameter.grad = gradient[name].double()
        reference.step()
        direction = mine.update(gradient)
        for name, parameter in theirs.items():
            change = (before[name] - parameter.detach()) / rate
            torch.testing.assert_close(direction[name].double(), change, rtol=1e-3, atol=1e-5)


def test_adafactor_is_the_papers_over_many_updates() -> None:
    """Algorithms 4 and 5 in float64; PyTorch computes the same for a stack's matrices one by one."""
    shapes = {"stack": (3, 4, 6), "norm": (3, 7)}
    mine = Run("adafactor", parameters(shapes), {"stack": ["0", "1", "2"], "norm": ["3", "4", "5"]})
    rows, columns, vectors = torch.zeros(3, 4), torch.zeros(3, 6), torch.zeros(3, 7)
    rows, columns, vectors = rows.double(), columns.double(), vectors.double()
    for step, gradient in enumerate(noise(shapes, 40), 1):
        direction = mine.update(gradient)
        decay = 1 - step**-0.8
        for layer in range(3):
            square = gradient["stack"][layer].double() ** 2 + 1e-30
            rows[layer] = decay * rows[layer] + (1 - decay) * square.sum(1)
            columns[layer] = decay * columns[layer] + (1 - decay) * square.sum(0)
            second = torch.outer(rows[layer], columns[layer]) / rows[layer].sum()
            square = gradient["norm"][layer].double() ** 2 + 1e-30
            vectors[layer] = decay * vectors[layer] + (1 - decay) * square
            for name, estimate in (("stack", second), ("norm", vectors[layer])):
                wanted = gradient[name][layer].double() / estimate.sqrt()
                wanted = wanted / max(1.0, float(wanted.square().mean().sqrt()))
                torch.testing.assert_close(direction[name][layer].double(), wanted, rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------------------------------------- layers and shapes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_layers_are_updated_as_unrolled_ones(name: str) -> None:
    """The layers' gradients differ greatly; a slice of a stack's moments equals the layer's moments."""
    apart, together = Run(name, unrolled(parameters(STACKED))), Run(name, parameters(STACKED), STACKS)
    scale = torch.tensor([1.0, 30.0, 1000.0])
    for gradient in noise(STACKED, 6):
        for stack in STACKS:
            gradient[stack] = gradient[stack] * scale.view(3, *[1] * (gradient[stack].ndim - 1))
        one, other = unrolled(together.update(gradient)), apart.update(unrolled(gradient))
        for parameter, direction in other.items():
            torch.testing.assert_close(one[parameter], direction, rtol=1e-5, atol=1e-6, msg=parameter)
    for stack, names in STACKS.items():
        for place, layer in enumerate(names):
            assert together.moments[stack].keys() == apart.moments[layer].keys()
            for kind, value in apart.moments[layer].items():
                torch.testing.assert_close(together.moments[stack][kind][place], value, rtol=1e-5, atol=0)


def test_the_shapes_of_adafactors_moments() -> None:
    for parameter, moments in Run("adafactor", parameters(STACKED), STACKS).moments.items():
        shape, shapes = STACKED[parameter], {kind: tuple(value.shape) for kind, value in moments.items()}
        if parameter in ("down", "up", "head"):
            assert shapes == {"rows": shape[:-1], "columns": (*shape[:-2], shape[-1])}
        else:
            assert shapes == {"second": shape}


def test_adafactors_rows_are_means_over_the_last_axis() -> None:
    """Both for wide and for narrow matrices."""
    shapes = {"turned": (130, 6), "other": (6, 130)}
    run = Run("adafactor", parameters(shapes))
    (gradient,) = noise(shapes, 1)
    run.update(gradient)
    for name, stored in run.moments.items():
        torch.testing.assert_close(stored["rows"], gradient[name].square().mean(1))
        torch.testing.assert_close(stored["columns"], gradient[name].square().mean(0))


# ---------------------------------------------------------------------------------------------------------------- both


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains(name: str) -> None:
    """A separable least-squares problem: the loss falls by orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    wanted = {n: torch.randn(shape, generator=generator) for n, shape in STACKED.items()}
    values, run = parameters(STACKED), Run(name, parameters(STACKED), STACKS)
    for step in range(1, 401):
        direction = run.update({n: values[n] - wanted[n] for n in values})
        values = {n: value - 0.05 * (1 - step / 401) * direction[n] for n, value in values.items()}

    def mean(named: Tensors) -> float:
        return float(torch.cat([value.flatten() for value in named.values()]).square().mean())

    assert mean({n: values[n] - wanted[n] for n in values}) < 1e-4 * mean(wanted)


@pytest.fixture(scope="module")
def on_xla() -> dict[str, Any]:
    """The results of all optimizers, from one launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", QUICK_XLA_FLAGS)
        for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES"):
            patch.delenv(name, raising=False)
        settings = {"device_type": "xla-cpu", "num_replicas": 1}
        return launch(training_functions.late_steps, load_config(None, settings))


@pytest.mark.slow  # quick siblings: test_step.py, the_bias_correction_late_in_a_run; test_sft.py, one_program
@pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_program_however_late_the_step(name: str, on_xla: dict[str, Any]) -> None:
    ended = on_xla[name]
    assert ended["compiled"] == [1] + [0] * 10
    assert ended["applied"] == [1, 2, 325, 326, 16_601, 16_602, 19_999, 20_000, 20_001, 2_000_001, 2_000_002]
    assert all(map(math.isfinite, ended["parameters"])) and any(ended["parameters"])


def test_settings_of_another_optimizer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"optim.beta2: 0.99 has no effect with optim.optimizer=adafactor"):
        load_config(None, {"optimizer": "adafactor", "beta2": 0.99})
