from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.training_functions import OPTIM, contents, control, dealt, report_of, rows, split, tiny
from tpu_kit.config.loader import LaunchConfig, LoraConfig, OptimConfig, TrainConfig
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.model import causal_lm as models
from tpu_kit.model import trainable
from tpu_kit.model.loop.layer_scan import stack
from tpu_kit.training.objectives import SupervisedObjective
from tpu_kit.training.state import TrainState, UpdateSums, restore, sections
from tpu_kit.training.step import SplitStep, _set_compiler, _update, eval_step, train_step

CPU = torch.device("cpu")
AVERAGED = replace(OPTIM, ema_decay=0.9)
ALONE = CpuRuntime(0, 1, CPU)


class Net(torch.nn.Module):
    """Matrices and vectors, with a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(5, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.frozen = torch.nn.Linear(7, 7).requires_grad_(False)
        self.last = torch.nn.Linear(7, 3, bias=False)


def gradients(net: torch.nn.Module, step: int, size: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [size * torch.randn(p.shape, generator=generator) for p in net.parameters() if p.requires_grad]


def update(
    state: TrainState, parts: Sequence[torch.Tensor], control: torch.Tensor, optim: OptimConfig, tokens: float = 1.0
) -> None:
    """Makes an update from gradients summed over `tokens` tokens, with a loss of 2 per token."""
    named = {name: part * tokens for name, part in zip(state.params, parts, strict=True)}
    with torch.no_grad():
        _update(state, named, torch.tensor([2.0 * tokens, tokens]), control, optim)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def torch_adamw(net: torch.nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    matrices = [p for p in net.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in net.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps)


def torch_step(net: torch.nn.Module, theirs: torch.optim.AdamW, parts: list[torch.Tensor], rate: float, most: float):
    trained = [p for p in net.parameters() if p.requires_grad]
    for parameter, part in zip(trained, parts, strict=True):
        parameter.grad = part.clone()
    norm = torch.nn.utils.clip_grad_norm_(trained, most or math.inf)
    for group in theirs.param_groups:
        group["lr"] = rate
    theirs.step()
    return norm


@pytest.mark.parametrize("most", [0.0, 1.0, 100.0])  # never, always and not clipped
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_torchs(most: float, decay: float) -> None:
    optim = replace(OPTIM, max_grad_norm=most, weight_decay=decay)
    mine, other = Net(), Net()
    state, theirs = TrainState(mine, CPU, OPTIM), torch_adamw(other, optim)
    for step in range(1, 11):
        rate = 1e-2 * step  # the rate changes, as in warm-up
        parts = gradients(mine, step)
        update(state, parts, control(rate, step), optim, tokens=13.0)
        norm = torch_step(other, theirs, parts, rate, most)
    for (name, a), b in zip(mine.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=name)
    assert float(state.applied) == 10
    assert norm > 1


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_state_made_of_a_checkpoint_goes_on_alike(optimizer: Any) -> None:
    optim = replace(AVERAGED, optimizer=optimizer, weight_decay=0.1)
    net = Net()
    states = [TrainState(Net(), CPU, optim)]
    for step in range(1, 9):
        for state in states:
            update(state, gradients(net, step), control(1e-2, step), optim)
        if step == 4:
            saved = states[0].to_host(ALONE)
            restore(net, saved)
            states.append(TrainState(net, CPU, optim, saved))
            assert_same(states[1].to_host(ALONE), saved)
    assert_same(contents(states[1]), contents(states[0]))


def test_what_a_checkpoint_holds() -> None:
    """A tensor for each parameter, in its own shape and under its own name, read in a single transfer."""
    reads = []

    class Counting(CpuRuntime):
        def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            reads.append(len(tensors))
            return super().to_host(tensors)

    net = Net()
    found = TrainState(net, CPU, AVERAGED).to_host(Counting(0, 1, CPU))
    assert len(reads) == 1
    shapes = {name: one.shape for name, one in net.named_parameters() if one.requires_grad}
    held = sections(found)
    assert held.keys() == {"", "parameters", "average", "moments/first", "moments/second"}
    assert held.pop("").keys() == {"applied", "report"}
    for named in held.values():
        assert {name: tensor.shape for name, tensor in named.items()} == shapes
    del found["parameters/last.weight"]
    with pytest.raises(
        ValueError, match=r"1 of 5 tensors differ, such as last.weight: none there, \(3, 7\) now. Use the model"
    ):
        restore(Net(), found)


def test_a_frozen_parameter_and_its_decay_are_left_alone() -> None:
    net = Net()
    before = net.frozen.weight.clone()
    state = TrainState(net, CPU, OPTIM)
    assert not any("frozen" in name for name in state.params)
    update(state, gradients(net, 1), control(0.1, 1), OPTIM)
    assert torch.equal(net.frozen.weight, before)


@pytest.mark.parametrize("applied", [325, 16_700, 20_000, 1_000_000])
def test_the_bias_correction_late_in_a_run(applied: int) -> None:
    optim = replace(OPTIM, beta2=0.999)
    mine, other = Net(), Net()
    state, theirs = TrainState(mine, CPU, OPTIM), torch_adamw(other, optim)
    for step in (1, 2):
        if step == 2:
            state.applied.fill_(float(applied - 1))
            for value in theirs.state.values():
                value["step"].fill_(float(applied - 1))
        parts = gradients(mine, step)
        update(state, parts, control(1e-2, step), optim)
        torch_step(other, theirs, parts, 1e-2, 1.0)
    for a, b in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert float(state.applied) == applied


def test_the_bias_correction_is_exact_at_the_first_step() -> None:
    """The step is then rate * sign(gradient), however close beta is to 1."""
    net = Net()
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    state = TrainState(net, CPU, OPTIM)
    optim = replace(OPTIM, beta1=0.9999, beta2=0.99999, weight_decay=0.0, max_grad_norm=0.0, eps=1e-12)
    parts = gradients(net, 1)
    update(state, parts, control(0.5, 1), optim)
    for (name, parameter), part in zip(state.params.items(), parts, strict=True):
        torch.testing.assert_close(parameter.detach(), before[name] - 0.5 * part.sign(), rtol=1e-3, atol=1e-3)


def test_the_average_follows_the_parameters() -> None:
    net, optim = Net(), replace(OPTIM, ema_decay=0.9)
    state = TrainState(net, CPU, AVERAGED)
    assert state.average is not None
    expected = {name: param.detach().double() for name, param in state.params.items()}
    for step in range(1, 11):
        update(state, gradients(net, step), control(0.1, step), optim)
        for name, param in state.params.items():
            expected[name] = 0.9 * expected[name] + 0.1 * param.detach().double()
    for name, average in state.average.items():
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(average, state.params[name])


def test_the_average_stands_in_for_the_parameters() -> None:
    net = Net()
    state = TrainState(net, CPU, AVERAGED)
    start = contents(state)
    update(state, gradients(net, 1), control(0.1, 1), replace(OPTIM, ema_decay=0.999))
    tuned = contents(state)
    with state.averaged():
        for name, parameter in state.params.items():
            torch.testing.assert_close(parameter.detach(), start[f"parameters/{name}"], rtol=0, atol=1e-3)
            assert not torch.equal(parameter, tuned[f"parameters/{name}"])
    assert_same(contents(state), tuned)


@pytest.mark.parametrize("poison", ["gradient", "infinite gradient", "loss", "huge gradient"])
def test_an_update_that_is_not_finite_changes_nothing_but_the_counters(poison: str) -> None:
    net, optim = Net(), replace(OPTIM, ema_decay=0.9)
    state = TrainState(net, CPU, AVERAGED)
    for step in (1, 2):
        update(state, gradients(net, step), control(0.1, step, window_open=float(step > 1)), optim, tokens=3.0)
    before, sums = contents(state), report_of(state)
    for step in (3, 4):
        parts = gradients(net, step)
        # The norm of the huge gradient overflows, although all its numbers are finite.
        bad = {"gradient": math.nan, "infinite gradient": math.inf, "huge gradient": 1e30}.get(poison, 1.0)
        parts[1][0] = bad
        totals = torch.tensor([math.nan if poison == "loss" else 6.0, 3.0])
        with torch.no_grad():
            _update(state, dict(zip(state.params, parts, strict=True)), totals, control(0.1, step), optim)
    assert_same(contents(state), before)
    assert report_of(state) == sums._replace(skipped=2, first_skipped=3, streak=2)

    update(state, gradients(net, 5), control(0.1, 5), optim, tokens=3.0)
    assert float(state.applied) == 3
    assert report_of(state).weight == 9 and report_of(state).streak == 0
    assert all(torch.isfinite(value).all() for value in contents(state).values())


def test_a_bad_first_step() -> None:
    """Before the first applied update the bias correction divides by 0."""
    net, clean = Net(), Net()
    state, other = TrainState(net, CPU, AVERAGED), TrainState(clean, CPU, AVERAGED)
    before = contents(state)
    parts = [torch.full_like(part, math.nan) for part in gradients(net, 1)]
    update(state, parts, control(0.1, 1, window_open=0.0), OPTIM)
    assert_same(contents(state), before)
    for each in (state, other):
        update(each, gradients(net, 2), control(0.1, 2), OPTIM)
    assert_same(contents(state), contents(other))


@pytest.mark.parametrize("most", [None, 3.0])
def test_a_loss_that_is_no_number_is_skipped_in_the_first_step_too(most: float | None) -> None:
    """Its gradients may be finite, and there is no usual loss yet."""
    net, optim = Net(), replace(OPTIM, max_loss_rise=most)
    state = TrainState(net, CPU, optim)
    before = contents(state)
    with torch.no_grad():
        named = dict(zip(state.params, gradients(net, 1), strict=True))
        _update(state, named, torch.tensor([math.nan, 3.0]), control(0.1, 1, window_open=0.0), optim)
    assert_same(contents(state), before)


def test_weights_decay_and_norms_do_not_also_where_layers_are_stacked() -> None:
    """In a fully trained model: a stack of norms has two axes, but is not a matrix."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
        llama = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes))
    model = trainable.adapt(llama, LoraConfig(r=0), "fp32")
    stack(llama.get_decoder())
    state = TrainState(model, CPU, OPTIM)
    before = {name: parameter.detach().clone() for name, parameter in state.params.items()}
    assert any(name in state.stacks and before[name].ndim == 2 for name in before), "no stack of norms"
    update(state, [torch.zeros_like(value) for value in before.values()], control(0.5, 1), OPTIM)
    for name, parameter in state.params.items():
        kept = 1.0 if "norm" in name else 1.0 - 0.5 * OPTIM.weight_decay
        torch.testing.assert_close(parameter.detach(), kept * before[name], msg=name)


def test_an_exploding_loss_is_skipped_and_counted() -> None:
    net, optim = Net(), replace(OPTIM, max_loss_rise=3.0)
    state = TrainState(net, CPU, optim)

    def step(number: int, loss: float, optim: OptimConfig = optim) -> None:
        named = dict(zip(state.params, gradients(net, number, 4.0), strict=True))
        with torch.no_grad():
            _update(state, named, torch.tensor([4.0 * loss, 4.0]), control(0.1, number), optim)

    step(1, 9.0)  # there is no usual loss yet
    for number in range(2, 60):
        step(number, 2.0)
    assert report_of(state).usual == pytest.approx(2.0, abs=0.05)
    before = contents(state)
    for number in (60, 61):
        step(number, 5.2)
        assert_same(contents(state), before)
        assert report_of(state).streak == number - 59
    assert report_of(state).first_skipped == 60
    step(62, 4.8)  # a jump, but not an explosion
    assert report_of(state).streak == 0 and not torch.equal(
        contents(state)["moments/first/first.weight"], before["moments/first/first.weight"]
    )
    step(63, 50.0, replace(optim, max_loss_rise=None))
    assert report_of(state).streak == 0


def test_the_report_outlives_the_next_step() -> None:
    net = Net()
    state = TrainState(net, CPU, OPTIM)
    update(state, gradients(net, 1), control(0.1, 1, window_open=0.0), OPTIM, tokens=3.0)
    report, before = state.report, report_of(state)
    update(state, gradients(net, 2), control(0.1, 2, window_open=0.0), OPTIM, tokens=5.0)
    assert UpdateSums.unpack(report.tolist()) == before != report_of(state)
    assert (before.usual, before.streak) == (2.0, 0.0)


def test_no_token_with_loss_at_all() -> None:
    net = Net()
    state = TrainState(net, CPU, OPTIM)
    optim = replace(OPTIM, weight_decay=0.0)
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    with torch.no_grad():
        _update(
            state,
            {name: torch.zeros_like(p) for name, p in state.params.items()},
            torch.zeros(2),
            control(0.1, 1),
            optim,
        )
    assert_same(dict(net.named_parameters()), before)


def test_the_mean_is_over_the_sum_of_weights_also_below_one() -> None:
    ended = []
    for tokens in (13.0, 0.25):
        net = Net()
        state = TrainState(net, CPU, OPTIM)
        update(state, gradients(net, 1), control(1e-2, 1), OPTIM, tokens)
        ended.append(torch.tensor([report_of(state).usual, report_of(state).grad_norm]))
    torch.testing.assert_close(ended[1], ended[0])
    assert float(ended[0][0]) == 2.0


def test_a_window_sums_until_it_begins_anew() -> None:
    net = Net()
    state = TrainState(net, CPU, OPTIM)
    norms = []
    for step, window_open in ((1, 0.0), (2, 1.0), (3, 1.0)):
        parts = gradients(net, step)
        norms.append(float(torch.cat([p.reshape(-1) for p in parts]).norm()))
        update(state, parts, control(0.1, step, window_open), OPTIM, tokens=float(step))
    assert report_of(state)[:5] == pytest.approx([12.0, 6.0, sum(norms), 0.0, 0.0])  # a loss of 2 per token
    update(state, [torch.full_like(part, math.nan) for part in parts], control(0.1, 4), OPTIM)
    assert report_of(state)[3:5] == (1.0, 4.0)
    update(state, parts, control(0.1, 5, window_open=0.0), OPTIM, tokens=7.0)
    assert report_of(state)[:5] == pytest.approx([14.0, 7.0, norms[-1], 0.0, 0.0])


# ------------------------------------------------------------------------------- with a model, and rows dealt to ranks


class Together:
    """An all-reduce between threads; it sums in the order of the ranks, so that all results are equal."""

    def __init__(self, replicas: int) -> None:
        self.barrier = threading.Barrier(replicas, timeout=60)
        self.given: list[list[torch.Tensor]] = [[] for _ in range(replicas)]


class ThreadRuntime(CpuRuntime):
    def __init__(self, rank: int, together: Together) -> None:
        super().__init__(rank, len(together.given), CPU)
        self.together = together

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        self.together.given[self.rank] = [tensor.clone() for tensor in tensors]
        self.together.barrier.wait()
        for number, tensor in enumerate(tensors):
            tensor.copy_(sum(given[number] for given in self.together.given))
        self.together.barrier.wait()


def train_split(replicas: int, steps: int = 3, optim: OptimConfig = OPTIM) -> list[dict[str, torch.Tensor]]:
    """Makes updates of 8 rows, one row per pass, split among replicas; returns each replica's final tensors."""
    together = Together(replicas)
    built = [tiny() for _ in range(replicas)]
    states = [TrainState(model, CPU, AVERAGED) for model in built]
    failed: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            for step in range(1, steps + 1):
                mine, runtime = dealt(rank, replicas, step), ThreadRuntime(rank, together)
                train_step(
                    built[rank],
                    states[rank],
                    mine,
                    control(1e-2, step, float(step > 1)),
                    SupervisedObjective(optim),
                    optim,
                    runtime,
                )
        except BaseException as error:
            failed.append(error)
            together.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    return [{**contents(state), "report": state.report} for state in states]


def test_the_update_is_the_same_for_any_split() -> None:
    optim = replace(OPTIM, ema_decay=0.9)
    one = train_split(1, optim=optim)[0]
    start = contents(TrainState(tiny(), CPU, AVERAGED))
    assert any((one[name] - start[name]).abs().max() > 1e-2 for name in start if "lora" in name)
    for replicas in (2, 4, 8):
        ended = train_split(replicas, optim=optim)
        for name, value in one.items():
            torch.testing.assert_close(ended[0][name], value, rtol=1e-5, atol=1e-5, msg=f"{replicas} {name}")
        for other in ended[1:]:
            assert_same(other, ended[0])


def test_accumulated_passes_are_one_large_batch() -> None:
    whole, parts = tiny(), tiny()
    batch = rows()
    a, b = TrainState(whole, CPU, OPTIM), TrainState(parts, CPU, OPTIM)
    train_step(whole, a, [batch], control(1e-2, 1, 0.0), SupervisedObjective(OPTIM), OPTIM, ALONE)
    halves = [{name: value[i : i + 4] for name, value in batch.items()} for i in (0, 4)]
    train_step(parts, b, halves, control(1e-2, 1, 0.0), SupervisedObjective(OPTIM), OPTIM, ALONE)
    for name, value in contents(a).items():
        torch.testing.assert_close(contents(b)[name], value, rtol=1e-5, atol=1e-5)


def test_the_step_is_the_gradient_of_the_mean_over_all_loss_tokens() -> None:
    """The reference is autograd through transformers' loss; a mean of means would weigh the rows differently."""
    model, other = tiny(), tiny()
    batch = rows()
    state = TrainState(model, CPU, OPTIM)
    passes = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(8)]
    optim = replace(OPTIM, beta1=0.0, max_grad_norm=0.0)
    # With beta1=0, `first` is the gradient.
    train_step(model, state, passes, control(1e-2, 1, 0.0), SupervisedObjective(optim), optim, ALONE)
    reference: Any = other
    loss = reference(input_ids=batch["input_ids"], labels=batch["labels"]).loss
    loss.backward()
    for name, parameter in models.trainable_parameters(other).items():
        torch.testing.assert_close(state.moments[name]["first"], parameter.grad, rtol=1e-4, atol=1e-6)
    assert report_of(state).loss / report_of(state).weight == pytest.approx(loss.item(), rel=1e-5)
    # For rows of one and of fifteen loss tokens, the mean of the rows' means differs.
    means = [float(torch.div(*SupervisedObjective(optim)(other, part)[:2])) for part in passes]
    assert abs(sum(means) / 8 - loss.item()) > 1e-3


def test_no_gradient_is_left_for_the_next_step() -> None:
    model = tiny()
    state = TrainState(model, CPU, OPTIM)
    train_step(model, state, [rows(2)], control(1e-2, 1, 0.0), SupervisedObjective(OPTIM), OPTIM, ALONE)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_parameter_without_a_gradient_is_left_as_it_is() -> None:
    model = tiny()
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    state = TrainState(model, CPU, OPTIM)
    train_step(model, state, [rows(2)], control(1e-2, 1, 0.0), SupervisedObjective(OPTIM), OPTIM, ALONE)
    assert torch.equal(state.params["unused"], torch.ones(3))


def test_trained_in_less_than_fp32_is_refused() -> None:
    with pytest.raises(AssertionError, match="other than fp32"):
        TrainState(torch.nn.Linear(2, 2).to(torch.bfloat16), CPU, OPTIM)


def test_evaluation_sums_losses_and_smooths_no_label() -> None:
    model = tiny().eval()
    optim = replace(OPTIM, label_smoothing=0.3)
    sums = torch.zeros(2)
    for seed in (1, 2):
        eval_step(model, rows(4, seed=seed), sums, SupervisedObjective(optim), ALONE)
    expected = [torch.stack(SupervisedObjective(OPTIM)(model, rows(4, seed=seed))[:2]) for seed in (1, 2)]
    torch.testing.assert_close(sums, torch.stack(expected).sum(0).detach())
    smoothed = SupervisedObjective(optim)(model.train(), rows(4, seed=1)).loss
    assert float(smoothed) > float(expected[0][0])


@pytest.mark.slow
@pytest.mark.parametrize(("device_type", "replicas"), [("cpu", 8), ("cpu", 4), ("xla-cpu", 8), ("xla-cpu", 2)])
def test_the_update_is_the_same_on_real_replicas(device_type: Any, replicas: int) -> None:
    one = launch(split, TrainConfig(launch=LaunchConfig(device_type="cpu", num_replicas=1)))
    many = launch(split, TrainConfig(launch=LaunchConfig(device_type=device_type, num_replicas=replicas)))
    assert one.keys() == many.keys()
    for name, value in one.items():
        torch.testing.assert_close(torch.tensor(many[name]), torch.tensor(value), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("passes", [1, 3])
def test_an_update_in_two_programs_is_that_of_one(passes: int) -> None:
    """With any number of passes, including empty passes."""
    optim, states = replace(OPTIM, ema_decay=0.9), []
    for split_up in (False, True):
        model = tiny()
        state = TrainState(model, CPU, optim)
        objective = SupervisedObjective(optim)
        halves = SplitStep(model, state, objective, optim, ALONE) if split_up else None
        for step in (1, 2, 3):
            taken = rows(seed=step)
            empty = taken | {"labels": torch.full_like(taken["labels"], -100)}
            parts = [{name: value[n::passes] for name, value in taken.items()} for n in range(passes)]
            scalars = control(1e-2, step, float(step > 1))
            if halves is None:
                train_step(model, state, parts, scalars, objective, optim, ALONE)
                continue
            for part in [*parts, *[empty] * (step - 1)]:
                halves.accumulate(part)
            halves.apply(scalars)
        states.append(state)
    for name, value in contents(states[0]).items():
        torch.testing.assert_close(contents(states[1])[name], value, rtol=1e-6, atol=1e-7, msg=name)
    torch.testing.assert_close(states[1].report, states[0].report, rtol=1e-5, atol=1e-6)


def test_a_gpu_compiles_each_of_a_runs_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    _set_compiler(compiles=True)
    counter = CompileCounter()
    function = torch.compile(torch.neg, backend=counter, dynamic=False)
    for length in range(1, 13):
        function(torch.ones(length))
    assert counter.frame_count == 12
