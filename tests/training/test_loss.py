from __future__ import annotations

import importlib.util
import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.child_processes import run_loaded
from tpu_kit.config.mesh import Mesh
from tpu_kit.distributed.replica.mesh import use_mesh
from tpu_kit.model.base_model import OutputHead
from tpu_kit.training.losses import loss as loss_module
from tpu_kit.training.losses.loss import IGNORE, Likelihood, SourcedLikelihood, chunked, head_outputs, shift_labels

TOKENS, WIDTH, VOCABULARY = 37, 16, 50


def example(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[::5] = IGNORE
    return hidden, weight, bias, labels


def plain(hidden, weight, labels, softcap=None, label_smoothing=0.0, bias=None, logit_scale=1.0):
    logits = F.linear(hidden, weight, bias).float() * logit_scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=label_smoothing)


def chunked_nll(hidden, weight, labels, chunk, softcap=None, label_smoothing=0.0, bias=None, logit_scale=1.0):
    """Returns the summed loss, and the number of tokens that carry loss."""
    head = OutputHead(weight, bias, softcap, logit_scale)
    (loss,) = chunked(Likelihood(head, label_smoothing), hidden, head, [labels], chunk)
    return loss, (labels != IGNORE).sum().float()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize(
    ("softcap", "smoothing", "with_bias", "scale"),
    itertools.product((None, 5.0), (0.0, 0.1), (False, True), (1.0, 0.3)),
)
def test_equals_the_plain_loss_and_its_gradients(softcap, smoothing, with_bias, scale):
    hidden, weight, bias, labels = example()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    options = {"softcap": softcap, "label_smoothing": smoothing, "logit_scale": scale}
    options["bias"] = bias if with_bias else None
    expected = plain(hidden, weight, labels, **options)
    loss, count = chunked_nll(hidden, weight, labels, chunk=8, **options)

    assert loss.dtype == count.dtype == torch.float32
    assert count == (labels != IGNORE).sum()
    assert relative(loss, expected) < 1e-6
    # The gradients are scaled in the backward pass, as by a division by the token count.
    for ours, theirs in zip(
        torch.autograd.grad(loss / 3, inputs), torch.autograd.grad(expected / 3, inputs), strict=True
    ):
        assert relative(ours, theirs) < 1e-6


@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (5.0, 0.3)])
def test_losses_of_sources_are_those_of_their_tokens(softcap: float | None, scale: float) -> None:
    hidden, weight, _, labels = example()
    sources = torch.arange(TOKENS) % 4  # 0 is no source; the sources are 1 to 3
    head = OutputHead(weight, None, softcap, scale)
    loss, *by_source = chunked(SourcedLikelihood(head, sources=3), hidden, head, [labels, sources], 8, sums=4)
    (alone,) = chunked(Likelihood(head), hidden, head, [labels], 8)
    assert torch.equal(loss, alone), "bit for bit"
    ours, theirs = (torch.autograd.grad(one, [hidden, weight]) for one in (loss, alone))
    assert all(map(torch.equal, ours, theirs))
    for number, one in enumerate(by_source, start=1):
        mine = torch.where(sources == number, labels, IGNORE)
        assert relative(one, plain(hidden, weight, mine, softcap, logit_scale=scale)) < 1e-6


@pytest.mark.parametrize("chunk", [1, 37, 64])
def test_any_chunk_gives_the_same(chunk):
    hidden, weight, _, labels = example()
    loss, _ = chunked_nll(hidden, weight, labels, chunk)
    assert relative(loss, plain(hidden, weight, labels)) < 1e-6


def test_bf16_hidden_states_give_bf16_gradients_near_the_exact_ones():
    hidden, weight, _, labels = example(torch.bfloat16)
    exact = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    loss, _ = chunked_nll(hidden, weight, labels, chunk=8)
    expected = plain(*exact, labels)
    assert loss.dtype == torch.float32
    assert relative(loss, expected) < 1e-2
    for ours, theirs in zip(
        torch.autograd.grad(loss, [hidden, weight]), torch.autograd.grad(expected, exact), strict=True
    ):
        assert ours.dtype == torch.bfloat16
        assert relative(ours.float(), theirs) < 2e-2


def test_bf16_gradients_are_scaled_in_fp32():
    """1.3711 lies between two bf16 numbers; rounded to either of them, all gradients would be wrong by 0.28 %."""
    hidden, weight, _, labels = example(torch.bfloat16)
    loss, _ = chunked_nll(hidden, weight, labels, 8)
    (plain,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * 1.3711, hidden)
    ratio = (scaled.float() * plain.float()).sum() / plain.float().square().sum()
    assert float(ratio) == pytest.approx(1.3711, rel=1e-3)


def test_a_tied_weight_gets_both_gradients():
    _, weight, _, labels = example()
    ids = torch.arange(TOKENS) % VOCABULARY
    loss, _ = chunked_nll(weight[ids], weight, labels, chunk=8)
    expected = plain(weight[ids], weight, labels)
    (ours,), (theirs,) = torch.autograd.grad(loss, weight), torch.autograd.grad(expected, weight)
    assert relative(ours, theirs) < 1e-6


def test_nothing_to_learn_is_zero_and_not_nan():
    hidden, weight, _, labels = example()
    loss, count = chunked_nll(hidden, weight, torch.full_like(labels, IGNORE), chunk=8)
    loss.backward()
    assert loss == 0 and count == 0
    assert hidden.grad is not None and not hidden.grad.any()


@pytest.mark.parametrize("highest", [40.0, 1e4])
def test_the_loss_of_tokens_that_are_almost_certain_is_as_exact_as_pytorchs(highest: float):
    """Each token's loss is 1.7e-5, which near 40 in fp32 could be wrong by a tenth: the highest logit is subtracted."""
    weight = torch.eye(VOCABULARY)
    labels = torch.arange(VOCABULARY)
    hidden = (highest * torch.eye(VOCABULARY) + (highest - 11.0) * torch.eye(VOCABULARY).roll(1, 0)).requires_grad_()
    loss, _ = chunked_nll(hidden, weight, labels, chunk=8)
    exact = F.cross_entropy(hidden.double() @ weight.double().t(), labels, reduction="sum")
    assert relative(loss, exact) < 5e-3


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor made in the forward and backward passes."""

    def __init__(self):
        super().__init__()
        self.elements, self.operations = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return output


def test_no_tensor_is_larger_than_one_chunk_of_logits_or_the_weight():
    hidden, weight, _, labels = example()
    weight.requires_grad_(False)
    with LargestTensor() as seen:
        loss, _ = chunked_nll(hidden, weight, labels, chunk=4)
        loss.backward()
    assert seen.elements <= max(4 * VOCABULARY, weight.numel())
    with LargestTensor() as seen:
        plain(hidden, weight, labels)
    assert seen.elements == TOKENS * VOCABULARY  # the measurement works


def test_evaluation_makes_no_gradients():
    hidden, weight, _, labels = example()
    with LargestTensor() as training:
        chunked_nll(hidden, weight, labels, chunk=8)
    with torch.no_grad(), LargestTensor() as evaluation:
        loss, _ = chunked_nll(hidden, weight, labels, chunk=8)
    assert not loss.requires_grad
    assert evaluation.operations < 0.8 * training.operations


def test_shift_labels_stops_at_the_end_of_each_document():
    labels = torch.tensor([[10, 11, 12, 20, 21, 7, 7]])
    segments = torch.tensor([[1, 1, 1, 2, 2, 0, 0]])
    assert shift_labels(labels, segments).tolist() == [[11, 12, IGNORE, 21, IGNORE, IGNORE, IGNORE]]
    assert shift_labels(labels).tolist() == [[11, 12, 20, 21, 7, 7, IGNORE]]


def test_shift_labels_keeps_what_carries_no_loss_out():
    labels = torch.tensor([[IGNORE, 11, IGNORE, 13]])
    assert shift_labels(labels, torch.ones_like(labels)).tolist() == [[11, IGNORE, 13, IGNORE]]


@pytest.mark.parametrize(("words", "resharded"), [(640, []), (643, [(643, WIDTH)])])
def test_on_a_mesh_an_odd_vocabulary_is_in_parts_too(
    monkeypatch: pytest.MonkeyPatch, words: int, resharded: list[tuple[int, ...]]
):
    uneven: dict[tuple[int, ...], object] = {}

    def constrain(tensor: torch.Tensor, spec: object, **given: bool) -> torch.Tensor:
        uneven.update({tuple(tensor.shape): spec} if given else {})
        return tensor

    monkeypatch.setattr(loss_module, "constrain", constrain)
    with use_mesh(Mesh(fsdp=4)):
        head_outputs(torch.zeros(TOKENS, WIDTH), torch.zeros(words, WIDTH))
    wanted = {shape: (("model", "fsdp"), None) for shape in resharded}
    assert uneven == wanted | {(TOKENS, words): ("data", ("model", "fsdp"))}


ON_XLA = """
import json, re
import torch, torch_xla, torch_xla.debug.metrics as metrics
import torch_xla.core.xla_model as xm
from tests.training.test_loss import chunked_nll

device = torch_xla.device()
generator = torch.Generator().manual_seed(0)
hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((64, 16), (50, 16)))
results = {}
for place in ("xla", "cpu"):
    at = device if place == "xla" else "cpu"
    h, w = hidden.to(at).requires_grad_(), weight.to(at).requires_grad_()
    values = []
    for step in range(3):
        labels = torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(step)).to(at)
        loss, count = chunked_nll(h, w, labels, chunk=16, softcap=5.0, label_smoothing=0.1)
        h.grad = w.grad = None
        loss.backward()
        if place == "xla":
            hlo = torch_xla._XLAC._get_xla_tensors_hlo([loss, h.grad, w.grad])
            torch_xla.sync()
            xm.wait_device_ops()
        values.append([loss, h.grad, w.grad])
    if place == "xla":
        counters = {name: metrics.counter_value(name) or 0 for name in ("UncachedCompile", "aten::_local_scalar_dense")}
        fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
    results[place] = [[tensor.detach().cpu() for tensor in step] for step in values]
error = max(float((a - b).abs().max() / b.abs().max())
            for ours, theirs in zip(results["xla"], results["cpu"]) for a, b in zip(ours, theirs))
found = {"loops": r" while\\(", "full": r"\\[(?:64,50|50,64)\\]", "chunk": r"\\[16,50\\]"}
found = {name: len(re.findall(pattern, hlo)) for name, pattern in found.items()}
print(json.dumps({"error": error, "fallbacks": fallbacks, **counters, **found}))
"""


@pytest.mark.slow  # quick sibling: test_sft.py, where XLA and the plain CPU agree
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
def test_on_xla_it_is_one_loop_without_full_logits():
    found = json.loads(run_loaded(ON_XLA).stdout.splitlines()[-1])
    assert found["error"] < 1e-6
    assert found["loops"] == 1 and found["chunk"] > 0 and found["full"] == 0
    assert found["UncachedCompile"] <= 2  # three steps, and the copies to the host
    assert found["aten::_local_scalar_dense"] == 0 and found["fallbacks"] == []


ON_A_MESH = """
import torch, torch_xla
from tests.training.test_loss import chunked_nll
from tpu_kit.config.mesh import Mesh
from tpu_kit.distributed.replica.mesh import put, read, start, use_mesh

def loss_and_gradients(hidden, weight, labels):
    loss, _ = chunked_nll(hidden.requires_grad_(), weight.requires_grad_(), labels, chunk=16)
    loss.backward()
    return [loss.detach(), hidden.grad, weight.grad]

hidden, weight, labels = torch.randn(64, 16), torch.randn(51, 16), torch.randint(0, 51, (64,))
start(Mesh(fsdp=4, model=2))
found = loss_and_gradients(put(hidden, ("fsdp", None)), put(weight, (None, ("model", "fsdp"))), put(labels, (None,)))
torch_xla.sync()
found = read(found)
with use_mesh(Mesh()):
    wanted = loss_and_gradients(hidden, weight, labels)
print(max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted)))
"""


@pytest.mark.slow  # quick sibling: test_on_a_mesh_an_odd_vocabulary_is_in_parts_too
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
def test_uneven_parts_of_a_vocabulary_give_the_loss_and_gradients_of_one_device():
    done = run_loaded(["-c", ON_A_MESH], env={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"})
    assert float(done.stdout.splitlines()[-1]) < 1e-6
