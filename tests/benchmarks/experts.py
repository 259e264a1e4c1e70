"""Compares the kernel for a mixture's experts with megablox, JAX's own kernel: `python -m tests.benchmarks.experts`.

It compiles one product of a block of Qwen3-30B-A3B for a v5e: 65,536 pairs of a token and an expert, forwards and with
the transposed weights, as the gradient needs it. The kit's kernel gets rows in whole tiles. Megablox gets them without
padding, at the best of the tried tilings; it has no integer weights, so these are converted to bf16 first. Bytes are
counted by the compiler and include the kernels' own estimates. Compiling at low effort may leave conversions unfused.

With --families it compares the experts of each family that transformers registers, on XLA:CPU against transformers'
eager code, in fresh processes. It prints the largest relative error of output and gradients in fp32.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import transformers

from tests.support import expert_functions
from tests.support.child_processes import QUICK_XLA_FLAGS, run_python
from tests.support.tpu_program import ENVIRONMENT, compile_graph

EXPERTS, HIDDEN, INNER, PAIRS, GROUP = 128, 2048, 768, 65_536, 128
TILINGS = ((128, 2048, 768), (256, 2048, 512), (256, 1024, 768), (512, 2048, 768), (512, 768, 2048), (128, 128, 128))


def weights(bits: int) -> list[tuple[tuple[int, ...], Any]]:
    """Returns the shapes and dtypes of the weights (O, I) of gates and ups, and of their scales."""
    import torch

    outer, inner = 2 * INNER, HIDDEN
    if bits == 16:
        return [((EXPERTS, outer, inner), torch.bfloat16)]
    if bits == 8:
        return [((EXPERTS, outer, inner), torch.int8), ((EXPERTS, outer), torch.float32)]
    scale = (EXPERTS, 2, inner // GROUP, outer)
    return [((EXPERTS, inner // 2, outer), torch.uint8), (scale, torch.bfloat16)]


def floats(bits: int, weight: Any, *scale: Any) -> Any:
    """Converts stored integers, in the layout of `model.weights.quantization`, to bf16 (E, O, I)."""
    import jax.numpy as jnp

    if bits == 16:
        return weight
    if bits == 8:
        return (weight.astype(jnp.float32) * scale[0][..., None]).astype(jnp.bfloat16)
    codes = jnp.concatenate([weight & 15, weight >> 4], axis=1).astype(jnp.float32)
    step, offset = (jnp.repeat(scale[0][:, kind].astype(jnp.float32), GROUP, axis=1) for kind in (0, 1))
    return (codes * step + offset).astype(jnp.bfloat16).swapaxes(1, 2)


def ours(bits: int, back: bool) -> functools.partial[Any]:
    """Returns the kit's kernel for the product."""
    from tpu_kit.model.shape import tile_rows
    from tpu_kit.xla import grouped

    tiles = grouped.Tiles(EXPERTS, tile_rows(PAIRS, EXPERTS), bits=bits, group=GROUP if bits == 4 else 0, back=back)
    return functools.partial(grouped._product, tiles)


def megablox(settings: tuple[Any, ...], rows: Any, sizes: Any, *stored: Any) -> tuple[Any]:
    """Computes the product by megablox; settings: bits of the weights, whether they are transposed, the tiling."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    bits, back, tiling = settings
    return (gmm(rows, floats(bits, *stored), sizes, jnp.bfloat16, tiling, transpose_rhs=not back),)


def compiled(product: functools.partial[Any], bits: int, back: bool) -> tuple[float, float, float]:
    """Returns the GB moved, the GiB of temporaries, and the compile seconds."""
    import torch

    from tpu_kit.model.shape import tile_rows
    from tpu_kit.xla.pallas import call
    from tpu_kit.xla.traced_program import placeholder

    rows, groups = PAIRS, [((EXPERTS,), torch.int32)]
    if product.func is not megablox:
        size = tile_rows(PAIRS, EXPERTS)
        count = (PAIRS + EXPERTS * (size - 1)) // size
        rows, groups = count * size, [((count,), torch.int32), ((1,), torch.int32)]
    given = [((rows, 2 * INNER if back else HIDDEN), torch.bfloat16), *groups, *weights(bits)]
    tensors = [placeholder(shape, dtype) for shape, dtype in given]
    start = time.monotonic()
    done = compile_graph(call(product, tensors, (), (), "tpu"))
    cost, memory = done.cost_analysis(), done.get_compiled_memory_stats()
    cost = cost[0] if isinstance(cost, list) else cost
    return cost["bytes accessed"] / 1e9, memory.temp_size_in_bytes / 2**30, time.monotonic() - start


def family(name: str) -> None:
    """Prints a line for each experts module of a family."""
    import torch
    import torch_xla

    device = torch_xla.device()
    code = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    source = inspect.getsource(code)
    for kind in re.findall(r"@use_experts_implementation.*\nclass (\w+)", source):
        try:
            experts = vars(code)[kind]
            parameters = inspect.signature(experts.__init__, eval_str=True).parameters
            settings = parameters["config"].annotation
            missing = settings is inspect.Parameter.empty
            config = (transformers.CONFIG_MAPPING[name] if missing else settings)().get_text_config()
            for key, value in expert_functions.SIZES.items():
                setattr(config, key, [value, value] if isinstance(getattr(config, key, None), list) else value)
            config._experts_implementation = "eager"
            torch.manual_seed(0)
            plain = experts(config, **{key: size for key, size in expert_functions.SIZES.items() if key in parameters})
            for parameter in plain.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
            ours = expert_functions.ours_of(plain.requires_grad_(False))
            weights, index = expert_functions.routing(40, False)
            hidden, upstream = torch.randn(2, 40, plain.down_proj.shape[1 + plain.is_transposed])
            given = hidden, weights, index, upstream
            expected = expert_functions.computed(copy.deepcopy(plain), "cpu", given)
            found = map(expert_functions.error, expert_functions.computed(ours, device, given), expected)
            print(f"| {name} | {kind} | {max(found):.1e} |", flush=True)
        except Exception as error:
            print(f"| {name} | {kind} | refused: {' '.join(str(error).split())} |", flush=True)


def families() -> None:
    """Prints the lines of all families."""
    folder = Path(transformers.__file__).parent / "models"
    files = sorted(folder.glob("*/modeling_*.py"))
    for file in files:
        if "@use_experts_implementation" in file.read_text():
            script = f"from tests.benchmarks.experts import family\nfamily({file.parent.name!r})"
            done = run_python(script, env={"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK_XLA_FLAGS})
            print("".join(line + "\n" for line in done.stdout.splitlines() if line.startswith("|")), end="", flush=True)


def main() -> None:
    """Prints the table."""
    if sys.argv[1:] == ["--families"]:
        families()
        return
    os.environ |= ENVIRONMENT
    print(
        "| weights | product | kernel | GB moved | GiB of temporaries | compile seconds |\n|---|---|---|---:|---:|---:|"
    )
    for bits in (16, 8, 4):
        for back in (False, True):
            rows = [("tpu_kit", compiled(ours(bits, back), bits, back))]
            tried = []
            for tiling in TILINGS:
                product = functools.partial(megablox, (bits, back, tiling))
                try:
                    tried.append((f"megablox {tiling}", compiled(product, bits, back)))
                except Exception as error:  # a tiling that needs more vector memory than the chip has
                    if "vmem" not in str(error).lower():
                        raise
            rows.append(min(tried, key=lambda row: row[1][0]))
            for name, (moved, temporary, seconds) in rows:
                kind, way = {16: "bf16", 8: "int8", 4: "int4"}[bits], "transposed" if back else "forwards"
                print(f"| {kind} | {way} | {name} | {moved:.2f} | {temporary:.2f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
