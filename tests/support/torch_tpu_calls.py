"""Runs the replacements of torch_xla's calls on TorchTPU's device; prints which match tpu_kit/xla/README.md."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable

import torch

from tests.support.torch_tpu_functions import counts
from tpu_kit.model.splash_attention import splash_kernel
from tpu_kit.torch_tpu import kernels, loop, program, slices
from tpu_kit.torch_tpu.device import open_device
from tpu_kit.xla.pallas import SplashSettings

DEVICE = open_device()


def device() -> bool:
    return (torch.ones(2, device="tpu") + 1).device == torch.device("tpu", 0) == DEVICE


def synchronize() -> bool:
    """Operations run without `sync`, and their results can be read at once."""
    one = torch.ones(3, device="tpu") * 2
    torch.accelerator.synchronize()
    return one.cpu().tolist() == [2, 2, 2]


def transfers() -> bool:
    tensor = torch.arange(6).reshape(2, 3)
    return torch.equal(tensor.to("tpu", non_blocking=True).cpu(), tensor)


def seed() -> bool:
    drawn = []
    for number in (1, 1, 2):
        torch.manual_seed(number)
        drawn.append(torch.rand(4, device="tpu").cpu())
    return torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def autocast() -> bool:
    one = torch.ones(4, 4, device="tpu")
    with torch.autocast("tpu", dtype=torch.bfloat16):
        return (one @ one).dtype == torch.bfloat16


def eager_operations_are_programs() -> bool:
    """Eager operations are several programs; a compiled function is a single program."""

    def three(x: torch.Tensor) -> torch.Tensor:
        return ((x @ x) * 2 + 1).tanh()

    x = torch.rand(8, 8).to("tpu")
    three(x).cpu()
    before = counts()[1]
    eager = three(x).cpu()
    of_eager = counts()[1] - before
    compiled = torch.compile(three, backend="tpu", fullgraph=True)
    compiled(x).cpu()
    before = counts()[1]
    together = compiled(x).cpu()
    print("programs of four operations", of_eager, "compiled", counts()[1] - before)
    return of_eager > 1 and counts()[1] - before == 1 and torch.allclose(eager, together, atol=1e-5)


def compile_counter() -> bool:
    before = torch.tpu._get_cache_stats().num_compilations
    torch.full((7, 11), 3.0, device="tpu").tan().cpu()
    return torch.tpu._get_cache_stats().num_compilations > before


def traced_backward() -> bool:
    """A function with its backward pass is a single program."""
    weight, x = torch.rand(4, 4), torch.rand(3, 4)

    def step(weight: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        weight = weight.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((x @ weight).square().sum(), [weight])
        return [weight.detach() - 0.1 * gradient]

    (want,) = step(weight, x)
    given = [weight.to("tpu"), x.to("tpu")]
    one = program.Program("step", step, given)
    before = counts()[1]
    (found,) = (result.cpu() for result in one(*given))  # reading waits for a program that is still queued
    return counts()[1] - before == 1 and torch.allclose(found, want, atol=1e-5)


def donation() -> bool:
    """A donated buffer is overwritten or freed, so only the result may be read."""
    given = torch.rand(64, 64).to("tpu")
    want = given.cpu() + 1
    one = program.Program("add", lambda x: [x + 1], [given], donated=1)
    (found,) = one(given)
    with contextlib.suppress(Exception):  # the buffer may be deleted
        print("the donated one, read afterwards:", given.cpu()[0, 0].item() == want[0, 0].item() - 1)
    return torch.allclose(found.cpu(), want)


def scan() -> bool:
    """A loop with constants, forward and reversed, matches a Python loop."""
    carry, inputs, constant = torch.zeros(3), torch.rand(5, 3), torch.rand(3)

    def run(reverse: bool) -> bool:
        def whole(*flat: torch.Tensor) -> list[torch.Tensor]:
            def body(state: list[torch.Tensor], each: list[torch.Tensor], held: list[torch.Tensor]) -> tuple:
                new = state[0] * 0.5 + each[0] * held[0]
                return [new], [new * 2]

            end, out = loop.scan(body, [flat[0]], [flat[1]], reverse, [flat[2]])
            return [*end, *out]

        given = [one.to("tpu") for one in (carry, inputs, constant)]
        end, out = (one.cpu() for one in program.Program("scan", whole, given)(*given))
        state, outputs = carry, [torch.empty(3)] * 5
        for turn in reversed(range(5)) if reverse else range(5):
            state = state * 0.5 + inputs[turn] * constant
            outputs[turn] = state * 2
        return torch.allclose(end, state) and torch.allclose(out, torch.stack(outputs))

    return run(False) and run(True)


def barrier() -> bool:
    given = [torch.rand(3).to("tpu"), torch.rand(3).to("tpu")]
    (found,) = program.Program("order", lambda a, b: [loop.after([a + 1], [b])[0] * 2], given)(*given)
    return torch.allclose(found.cpu(), given[1].cpu() * 2)


def jax_function() -> bool:
    """A JAX function is an operation; here it reads and writes at an index that only the device has."""
    stack, new = torch.zeros(2, 1, 1, 4, 3).to("tpu"), torch.ones(1, 1, 1, 3).to("tpu")
    place, slot = torch.tensor(1).to("tpu"), torch.tensor([2]).to("tpu")
    found = slices.take(slices.write(stack, new, place, slot), place).cpu()
    return found.sum().item() == 3 and found[0, 0, 2].tolist() == [1, 1, 1]


def splash() -> bool:
    """The kernel in Pallas' interpreter: outputs and gradients of packed rows match plain attention."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 4, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64), (2, 4, 256, 64))
    query, key, value, upstream = (torch.randn(size, generator=generator) for size in sizes)
    segments = torch.tensor([[1] * 100 + [2] * 120 + [0] * 36, [1] * 256], dtype=torch.int32)

    def run(where: str, settings: SplashSettings) -> list[torch.Tensor]:
        inputs = [one.clone().to(where).requires_grad_() for one in (query / 8, key, value)]
        output = splash_kernel(*inputs, segments.to(where), settings)
        output.backward(upstream.to(where))
        return [one.detach().cpu() for one in (output, *(one.grad for one in inputs))]

    held = []
    for window in (None, 32):
        pairs = zip(run("cpu", SplashSettings(window)), run("tpu", SplashSettings(window, interpret=True)), strict=True)
        differ = [(one - other).abs().max().item() for one, other in pairs]
        print("splash, window", window, "differs by", differ)
        held.append(differ[0] < 1e-5 and max(differ) < 1e-4)
    return all(held)


def script() -> bool:
    """Runs the page's script."""
    text = os.environ["SCRIPT"]
    found: dict = {}
    exec(text, found)  # trusted: the text is in the repository
    print("losses of the script", found["losses"])
    return len(found["losses"]) == 20 and found["losses"][-1] < 0.1 * found["losses"][0]


def private_names() -> bool:
    """The private interfaces of torch_tpu and torch that the kit calls still exist."""
    import inspect

    import torch_tpu._loader
    from torch.fx import traceback
    from torch.nn.utils.stateless import _reparametrize_module
    from torch_tpu._internal.compile import _backend
    from torch_tpu._internal.compile import scan as scans
    from torch_tpu._internal.compile.compiler import StaticCompiler

    given = inspect.signature(StaticCompiler._compile).parameters
    return all([
        callable(torch_tpu._loader._init_device), callable(torch_tpu._loader.load), callable(traceback.annotate),
        callable(_reparametrize_module), len(_backend._TPU_DECOMPOSITIONS) > 0,
        {"donated_inputs", "module_name"} <= set(given), scans.SCAN_REVERSE_ANNOTATION == "torch_tpu_scan_reverse",
        callable(torch.tpu.ops.optimization_barrier), callable(torch.tpu.pallas.jax_op), callable(kernels.call),
    ])  # fmt: skip


CALLS: list[Callable[[], bool]] = [
    device, synchronize, transfers, seed, autocast, eager_operations_are_programs, compile_counter, traced_backward,
    donation, scan, barrier, jax_function, splash, script, private_names,
]  # fmt: skip


def main() -> None:
    """Prints the result of each call: true, false or an error."""
    held = {}
    for call in CALLS:
        try:
            held[call.__name__] = call()
        except Exception as error:  # of any kind; the other calls still run
            held[call.__name__] = f"{type(error).__name__}: {error}"[:600]
    print("found", json.dumps(held), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
