"""Compiles Tunix's programs with our TPU compiler and reads them by the same estimate; for `tests.benchmarks.tpu_step`.

Tunix runs in its own environment, which is made once, with the kit's versions of jax and libtpu. A process there
(`tpu_peer_child`) compiles and writes the program's text; this process reads it. Texts and answers are cached on disk.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.support.child_processes import run_python
from tests.support.image import find_python
from tpu_kit.config.loader import TrainConfig
from tpu_kit.machine.slices import find_topology
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.planning.compiler import compile_check
from tpu_kit.planning.compiler.compile_check import Compiled
from tpu_kit.planning.compiler.step_estimate import Sizes, estimated_seconds
from tpu_kit.xla import hlo
from tpu_kit.xla.compiler import compiled_figures

REQUIREMENTS = (
    "google-tunix==0.1.7", "qwix==0.1.8", "flax==0.12.0", "optax==0.2.8", "jax==0.7.1", "jaxlib==0.7.1",
    "libtpu==0.0.21",
)  # fmt: skip
CHILD = Path(__file__).with_name("tpu_peer_child.py")
FOLDER = compile_check.CACHE.expanduser().with_name("tunix")


class Preset(NamedTuple):
    """A Tunix model: its module, its class, and the method of its configuration's class."""

    library: str
    kind: str
    name: str


PRESETS = {
    "qwen2.5-0.5b": Preset("qwen2", "Qwen2", "qwen2p5_0p5b"),
    "llama-3.2-1b": Preset("llama3", "Llama3", "llama3p2_1b"),
    "llama-3.1-8b": Preset("llama3", "Llama3", "llama3p1_8b"),
}
"""By the names of `tpu_step.MODELS`."""


def interpreter() -> Path:
    """Returns the Python of Tunix's environment, which is made if it is missing."""
    folder = FOLDER / f"environment-{_hash(REQUIREMENTS)}"
    python, made = folder / "bin" / "python", folder / "made"
    if not made.exists():
        own = find_python(f"3.{min(sys.version_info.minor, 12)}")  # libtpu 0.0.21 has no wheel for 3.13
        subprocess.run([own, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", *REQUIREMENTS], check=True)
        made.touch()
    return python


def compile_peer(model: str, config: TrainConfig, chip: str, part: str, sizes: tuple[int, ...], remat: str) -> Compiled:
    """Compiles a Tunix program for one chip, as `compile_check.compile_step` compiles ours.

    Args:
        model: A key of `PRESETS`.
        config: Our run: the same model, rank and dtype of base weights.
        chip: A topology of one chip.
        part: "step", or "decode": one iteration of the loop over tokens; its number of iterations is unknown.
        sizes: For a "step", its rows and tokens; for "decode", its rows, prompt tokens and cache slots.
        remat: Tunix's setting: "NONE", or "DECODER", which recomputes each layer in the backward pass.
    """
    kind, topology = find_topology(chip, 1)
    preset = PRESETS[model]
    request = {
        "library": preset.library, "kind": preset.kind, "preset": preset.name, "part": part, "sizes": sizes,
        "remat": remat, "rank": config.lora.r, "int8": config.model.base_dtype == "int8", "topology": topology.name,
        "chips_per_host_bounds": topology.chips_per_host_bounds,
    }  # fmt: skip
    program = FOLDER / _hash(request, REQUIREMENTS, CHILD.read_text())
    figures, text = program.with_suffix(".json"), program.with_suffix(".txt.gz")
    if not figures.exists():
        _compile(request, figures, text)
    readers = compile_check._source(*compile_check._READERS)
    answer = program.with_name(f"{program.name}-{readers[:16]}.json")
    if not answer.exists():
        found = json.loads(figures.read_text())
        if (error := found.get("out_of_memory")) is not None:
            memory = hlo.parse_out_of_memory(error)
            assert memory is not None, error
            found["total_bytes"] = memory["used_bytes"]
        else:
            sizes_of = Sizes.of(read_shape(config.model), config.lora.r)
            stats = SimpleNamespace(**found.pop("stats"))
            found |= compiled_figures(
                gzip.decompress(text.read_bytes()).decode(), stats, found.pop("accessed_once"),
                lambda made, costs: {"estimated": estimated_seconds(made, costs, sizes_of, kind)},
            )  # fmt: skip
            found.pop("loop_trips")
            kept = sum(found[f"{name}_bytes"] for name in ("argument", "output", "temporary", "code"))
            found["total_bytes"] = kept - found["aliased_bytes"]
        limit = kind.usable_hbm_bytes
        assert limit is not None
        version = REQUIREMENTS[-1].partition("==")[2]
        found |= {"topology": topology.name, "libtpu": version, "program": program.name, "limit_bytes": limit,
                  "fits": error is None and found["total_bytes"] <= limit}  # fmt: skip
        answer.write_text(json.dumps(asdict(Compiled.from_dict(found))))
    return Compiled.from_dict(json.loads(answer.read_text()))


def _compile(request: dict[str, Any], figures: Path, text: Path) -> None:
    python, environment = interpreter(), {**compile_check._ENVIRONMENT, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": None}
    environment |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": None, "PYTHONPATH": ""}
    with tempfile.TemporaryDirectory(prefix="tpu_kit-tunix-") as made:
        (Path(made) / "request.json").write_text(json.dumps(request))
        environment["TMPDIR"] = made
        run_python([str(CHILD), made], executable=python, env=environment, cwd=made, timeout=7200)
        if (program := Path(made, "program.txt")).exists():
            text.write_bytes(gzip.compress(program.read_bytes(), 6))
        figures.write_text(Path(made, "figures.json").read_text())  # written last, so that the text exists if this does


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
