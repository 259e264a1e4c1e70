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
from tpu_kit.hardware.machine import Machine
from tpu_kit.training import optimizer
from tpu_kit.training.optimizer import _CODES, OPTIMIZERS, Moments, group

Tensors = dict[str, torch.Tensor]

# As adapters and norms lie in a model whose layers are stacked: `up` lies turned in a vector, `norm` is no matrix.
STACKS = {name: [f"layers.{layer}.{name}" for layer in range(3)] for name in ("down", "up", "norm", "gate")}
STACKED = {"down": (3, 4, 300), "up": (3, 200, 5), "norm": (3, 7), "gate": (3,), "head": (6, 515), "bias": (9,)}
OPTIM = OptimConfig(beta1=0.9, beta2=0.99)


def parameters(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def unrolled(named: Mapping[str, torch.Tensor]) -> Tensors:
    """Each stack's slices by the names of their layers, layer by layer as in a model."""
    found = {layers[place]: named[name][place] for place in range(3) for name, layers in STACKS.items()}
    return found | {name: tensor for name, tensor in named.items() if name not in STACKS}


def noise(shapes: Mapping[str, tuple[int, ...]], count: int, spread: float = 3.0) -> Iterator[Tensors]:
    """Noise around a mean, both over several orders of magnitude from one number to the next."""
    generator = torch.Generator().manual_seed(0)
    sizes = {name: 10 ** (spread * (torch.rand(shape, generator=generator) - 1)) for name, shape in shapes.items()}
    means = {name: size * torch.randn(size.shape, generator=generator) for name, size in sizes.items()}
    for _ in range(count):
        yield {n: means[n] + size * torch.randn(size.shape, generator=generator) for n, size in sizes.items()}


class Run:
    """An optimizer's updates of parameters in groups."""

    def __init__(
        self, name: str, like: Tensors, stacks: Mapping[str, list[str]] | None = None, optim: OptimConfig = OPTIM
    ) -> None:
        self.kind, self.optim, self.applied = OPTIMIZERS[name], optim, 0
        self.groups = group(like, stacks or {}, self.kind.block)
        self.moments = [self.kind.start(one) for one in self.groups]
        self.seeds = [one.seeds() for one in self.groups]

    def update(self, gradient: Tensors) -> Tensors:
        """The direction by name."""
        self.applied += 1
        found: Tensors = {}
        applied = torch.tensor(float(self.applied))
        for number, one in enumerate(self.groups):
            before = self.moments[number]
            direction, after = self.kind.direction(
                one.join(gradient), before, applied, self.optim, one, self.seeds[number]
            )
            assert {k: (v.shape, v.dtype) for k, v in after.items()} == {
                k: (v.shape, v.dtype) for k, v in before.items()
            }
            self.moments[number] = after
            found |= one.split(direction)
        return found

    def stored(self) -> dict[str, Moments]:
        """The moments by name of the parameter."""
        pairs = zip(self.moments, self.groups, strict=True)
        return {name: part for moments, one in pairs for name, part in self.kind.split(moments, one).items()}


# ------------------------------------------------------------------------------------------------- against references


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_adamw_is_torchs(eps: float) -> None:
    """Also where gradients are as small as eps: without it the direction would be another one."""
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
    """PyTorch's scales its rate by the parameter's root mean square, which is 1 here; in float64 it stays so."""
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
    """Algorithms 4 and 5 in float64; PyTorch's is the same for a stack's matrices one by one."""
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


# ------------------------------------------------------------------------------------------- layers, groups and places


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_layers_are_updated_as_unrolled_ones(name: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of very different gradients; what is stored of a layer is a slice of what is stored of the stack."""
    apart = Run(name, unrolled(parameters(STACKED)))
    monkeypatch.setattr(optimizer, "ALONE", 2000 if alone else 10**9)
    together = Run(name, parameters(STACKED), STACKS)
    assert [one.alone for one in together.groups] == ([False, True, True, True] if alone else [False])
    scale = torch.tensor([1.0, 30.0, 1000.0])
    for gradient in noise(STACKED, 6):
        for stack in STACKS:
            gradient[stack] = gradient[stack] * scale.view(3, *[1] * (gradient[stack].ndim - 1))
        one, other = unrolled(together.update(gradient)), apart.update(unrolled(gradient))
        for parameter, direction in other.items():
            torch.testing.assert_close(one[parameter], direction, rtol=1e-5, atol=1e-6, msg=parameter)
    stored, layers = together.stored(), apart.stored()
    for stack, names in STACKS.items():
        for place, layer in enumerate(names):
            assert stored[stack].keys() == layers[layer].keys()
            for part, value in layers[layer].items():
                torch.testing.assert_close(stored[stack][part][place], value, rtol=1e-5, atol=0)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_stored_in_the_parameters_shapes(name: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "ALONE", 2000 if alone else 10**9)
    run = Run(name, parameters(STACKED), STACKS)
    for gradient in noise(STACKED, 2):
        run.update(gradient)
    stored = run.stored()
    for parameter, shape in STACKED.items():
        shapes = {part: tuple(value.shape) for part, value in stored[parameter].items()}
        if name == "adamw":
            assert shapes == {"first": shape, "second": shape}
        elif name == "adamw8bit":
            blocks = {"down": (3, 4, 2), "up": (3, 1, 5), "norm": (3, 1), "gate": (3, 1), "head": (6, 3), "bias": (1,)}
            scales = blocks[parameter]
            assert shapes == {
                "first_code": shape, "first_scale": scales, "second_code": shape, "second_scale": scales
            }  # fmt: skip
        elif parameter in ("down", "up", "head"):
            assert shapes == {"rows": shape[:-1], "columns": (*shape[:-2], shape[-1])}
        else:
            assert shapes == {"second": shape}
    for moments, one in zip(run.moments, run.groups, strict=True):
        again = run.kind.join(run.kind.split(moments, one), one)
        assert {n: v.dtype for n, v in again.items()} == {n: v.dtype for n, v in moments.items()}
        for moment, value in moments.items():
            assert torch.equal(again[moment], value), moment


def test_adafactors_rows_are_means_over_the_last_axis() -> None:
    """Whichever way a matrix lies in the vector."""
    shapes = {"turned": (130, 6), "other": (6, 130)}
    run = Run("adafactor", parameters(shapes))
    (gradient,) = noise(shapes, 1)
    run.update(gradient)
    for name, stored in run.stored().items():
        torch.testing.assert_close(stored["rows"], gradient[name].square().mean(1))
        torch.testing.assert_close(stored["columns"], gradient[name].square().mean(0))


def test_blocks_do_not_cross_parameters_or_rows() -> None:
    """What happens to a parameter, or to another row, changes no moment in 8 bits: those of a block share a scale."""
    quiet, loud = Run("adamw8bit", parameters(STACKED), STACKS), Run("adamw8bit", parameters(STACKED), STACKS)
    for gradient in noise(STACKED, 5):
        quiet.update(gradient)
        last_row = torch.cat([gradient["head"][:5], gradient["head"][5:] * 1e6])
        loud.update(gradient | {"norm": gradient["norm"] * 1e6, "head": last_row})
    before, after = quiet.stored(), loud.stored()
    for name in ("down", "up", "gate", "bias"):
        assert all(torch.equal(before[name][part], after[name][part]) for part in before[name]), name
    assert all(torch.equal(before["head"][part][:5], after["head"][part][:5]) for part in before["head"])
    assert not torch.equal(before["head"]["first_scale"], after["head"]["first_scale"])


# ------------------------------------------------------------------------------------------------------------- 8 bits

BLOCKS = {name: (2, 256) for name in ("even", "spread", "wide", "sparse", "jump", "dead")}


def kinds_of_gradients(count: int) -> Iterator[Tensors]:
    """By name: alike; over 2 and 4 orders of magnitude; 1 of 20; 30 times smaller, or half of them zero, at last."""
    generator = torch.Generator().manual_seed(0)
    exponents = {"even": 0.0, "wide": 4.0}
    sizes = {n: 10 ** (exponents.get(n, 2.0) * (torch.rand(s, generator=generator) - 1)) for n, s in BLOCKS.items()}
    means = {name: 0.2 * size * torch.randn(size.shape, generator=generator) for name, size in sizes.items()}
    for step in range(count):
        found = {n: means[n] + size * torch.randn(size.shape, generator=generator) for n, size in sizes.items()}
        found["sparse"] = found["sparse"] * (torch.rand(BLOCKS["sparse"], generator=generator) < 0.05)
        if step >= count // 2:
            found["jump"] = found["jump"] * 0.03
            found["dead"] = found["dead"] * (torch.arange(256) % 2)
        yield found


def compared(beta2: float, count: int = 2000) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """AdamW in 8 bits against AdamW, means over the last three quarters of the updates, by kind of gradient.

    Returns:
        The largest bias of a block's second moments, relative; the error of a direction, relative to AdamW's root mean
        square; and the largest direction, in AdamW's largest.
    """
    optim = replace(OPTIM, beta2=beta2)
    exact, coded = Run("adamw", parameters(BLOCKS), optim=optim), Run("adamw8bit", parameters(BLOCKS), optim=optim)
    biases: dict[str, list[torch.Tensor]] = {name: [] for name in BLOCKS}
    errors: dict[str, list[torch.Tensor]] = {name: [] for name in BLOCKS}
    largest = dict.fromkeys(BLOCKS, 0.0)
    code = _CODES["second"]
    for step, gradient in enumerate(kinds_of_gradients(count), 1):
        a, b = exact.update(gradient), coded.update(gradient)
        if step <= count // 4 or step % 20:
            continue
        seconds, stored = exact.stored(), coded.stored()
        for name in BLOCKS:
            own, second = stored[name], seconds[name]["second"]
            found = code.decode(own["second_code"], own["second_scale"])
            kept = second > 1e-12 * second.max()
            relative = torch.where(kept, found / second.clamp(min=1e-30), torch.ones_like(second))
            biases[name].append(relative.mean(1) - 1)
            errors[name].append((a[name] - b[name]).square().mean() / a[name].square().mean())
            largest[name] = max(largest[name], float(b[name].abs().max() / a[name].abs().max()))
    return (
        {name: float(torch.stack(found).mean(0).abs().max()) for name, found in biases.items()},
        {name: float(torch.stack(found).mean().sqrt()) for name, found in errors.items()},
        largest,
    )


@pytest.mark.parametrize("beta2", [0.999, pytest.param(0.95, marks=pytest.mark.slow)])
def test_8_bits_follow_adamw_over_2000_updates(beta2: float) -> None:
    """Measured: 0.03, 0.2 and 2.2. Of 127 levels, rounded to the nearest: a bias of 0.5, an error of 1.0."""
    bias, error, largest = compared(beta2)
    assert max(bias.values()) < 0.06
    assert max(error.values()) < 0.3
    assert max(largest.values()) < 3  # what rounds to zero would be divided by eps


def test_small_changes_of_a_second_moment_add_up() -> None:
    """Without gradients it decays by 0.1 % an update, also next to one that stays; to the nearest code it would not."""
    like = {"one": torch.zeros(256)}
    run = Run("adamw8bit", like, optim=replace(OPTIM, beta2=0.999))
    gradient = {"one": torch.ones(256)}
    for _ in range(100):
        run.update(gradient)
    gradient["one"][1:] = 0.0
    start = run.stored()["one"]
    for _ in range(1000):
        run.update(gradient)
    code, ended = _CODES["second"], run.stored()["one"]
    before = code.decode(start["second_code"], start["second_scale"])
    after = code.decode(ended["second_code"], ended["second_scale"])
    assert float((after / before)[1:].mean()) == pytest.approx(0.999**1000, rel=0.05)
    assert not ended["first_code"][1:].any()


@pytest.mark.parametrize("moment", ["first", "second"])
def test_rounding_keeps_the_expectation_and_the_codes(moment: str) -> None:
    code = _CODES[moment]
    generator = torch.Generator().manual_seed(0)
    values = 10 ** (-4 * torch.rand(1, 256, generator=generator))
    if moment == "first":
        values = values * torch.randn(1, 256, generator=generator).sign()
    total = torch.zeros(1, 256, dtype=torch.float64)
    for draw in range(1000):
        codes, scale = code.encode(values, torch.full((1, 256), (draw + 0.5) / 1000))
        total += code.decode(codes, scale).double()
    torch.testing.assert_close(total / 1000, values.double(), rtol=2e-3, atol=0)
    # What is decoded has the same code again, whatever is drawn: a moment that stays does not wander.
    for draw in (0.001, 0.999):
        again, scale_again = code.encode(code.decode(codes, scale), torch.full((1, 256), draw))
        assert torch.equal(again, codes) and torch.equal(scale_again, scale)


def test_what_is_drawn_depends_on_update_layer_place_and_moment() -> None:
    """A gradient alike everywhere, whose moments lie between codes: those that were rounded up tell what was drawn."""
    shapes = {"a": (4, 512), "b": (4, 512)}
    run = Run("adamw8bit", parameters(shapes), optim=replace(OPTIM, beta2=0.9))
    found = []
    for _ in range(3):
        # The largest sets the scale; of the others the share lies between two codes.
        value = torch.full((4, 512), 0.37)
        value[:, ::256] = 1.0
        run.moments = [run.kind.start(one) for one in run.groups]
        run.update({"a": value, "b": value})
        for part in ("first_code", "second_code"):
            for name in shapes:
                codes = run.stored()[name][part].to(torch.float32)
                up = (codes > codes.min()).float()[:, 1:256]
                assert 0.02 < float(up.mean()) < 0.98
                found.append((up - up.mean()).flatten() / up.std())
    draws = torch.stack(found)
    correlation = draws @ draws.T / draws.shape[1]
    assert float((correlation - torch.eye(len(draws))).abs().max()) < 0.15


# ----------------------------------------------------------------------------------------------------------- all three


def test_what_the_moments_take() -> None:
    def size(name: str) -> int:
        (one,) = group({"w": torch.zeros(1024, 1024)}, {}, OPTIMIZERS[name].block)
        return sum(value.numel() * value.element_size() for value in OPTIMIZERS[name].start(one).values())

    million = 1024 * 1024
    assert size("adamw") == 8 * million
    assert size("adamw8bit") == 2 * million + 2 * 4 * million // 256
    assert size("adafactor") == 4 * 2 * 1024


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains(name: str) -> None:
    """A least-squares problem that a step per number solves: the loss falls by orders of magnitude."""
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
    """What all optimizers do in one launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", QUICK_XLA_FLAGS)
        for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES"):
            patch.delenv(name, raising=False)
        settings = {"device_type": "xla-cpu", "num_replicas": 1, "optimizer": "adamw8bit"}
        return launch(training_functions.optimizers_on_xla, load_config(None, settings))


@pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_program_however_late_the_step(name: str, on_xla: dict[str, Any]) -> None:
    ended = on_xla["late"][name]
    assert ended["compiled"] == [1] + [0] * 10
    assert ended["applied"] == [1, 2, 325, 326, 16_601, 16_602, 19_999, 20_000, 20_001, 2_000_001, 2_000_002]
    assert all(map(math.isfinite, ended["parameters"])) and any(ended["parameters"])


@pytest.mark.parametrize("device_type", ["cpu", "xla-cpu"])
def test_8_bit_stacks_are_updated_layer_by_layer(device_type: str, request: pytest.FixtureRequest) -> None:
    """With the numbers of an update of all layers at once, and without its fp32 blocks of all layers."""
    if device_type == "xla-cpu" and Machine().version("torch_xla") is None:
        pytest.skip("torch_xla is not installed")
    if device_type == "cpu":
        settings = {"device_type": "cpu", "num_replicas": 1, "optimizer": "adamw8bit"}
        found = launch(training_functions.stacks_in_turn, load_config(None, settings))
    else:
        found = request.getfixturevalue("on_xla")["stacks"]
    assert found["in_turn"].keys() == found["at_once"].keys()
    for name, value in found["at_once"].items():
        torch.testing.assert_close(found["in_turn"][name], value, rtol=1e-5, atol=1e-7, msg=name)
    assert any(value.any() for name, value in found["in_turn"].items() if name.startswith("moments/second_code"))
    if device_type == "xla-cpu":
        assert found["compiled"] == [1, 0, 0]
        assert found["blocks"] == [4, 16, 32, 48]  # of stacks they are 8, 32, 64 and 96


def test_settings_of_another_optimizer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"optim.beta2: 0.99 is AdamW's, and optim.optimizer=adafactor has none"):
        load_config(None, {"optimizer": "adafactor", "beta2": 0.99})
