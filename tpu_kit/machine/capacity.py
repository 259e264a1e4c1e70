"""Checks that host memory and disk have room for a run's weights, whose size comes from files or the model's name."""

from __future__ import annotations

import glob
import math
import re
import shutil
from collections import Counter
from pathlib import Path

from tpu_kit.config.loader import TrainConfig
from tpu_kit.machine.checks import Check, Machine, Status
from tpu_kit.machine.chips import GIB
from tpu_kit.machine.host import PROCESS_BYTES, free_memory
from tpu_kit.machine.hub import settings

_OTHERS, _STACK = 0.2, 0.45
"""Assumed shares if only a model's name is known. `_OTHERS` is the share of the embedding, the head and other tensors
in all weights (13 % in Llama 3.1 8B, 28 in Qwen2.5 0.5B). `_STACK` is the share of the largest stack in the layers'
matrices (27 % in Llama 3.1 8B, 44 in Phi 3 mini)."""


def _folder(config: TrainConfig) -> Path:
    """Returns the folder that the model's name means on this machine; for a hub id it does not exist."""
    name = config.model.name
    return Path(__file__).parents[1] / "assets/embedded" if name == "embedded" else Path(name).expanduser()


def model_bytes(config: TrainConfig) -> tuple[float | None, bool]:
    """Returns the bytes of the base weights before they are quantized, and whether `model.name` is a folder here.

    A folder (also "embedded") counts its safetensors files, or else its .bin files; 0 without them. With
    `model.gguf_file`, it counts this file times four, from 4 bits to 16. A hub id, also in the cache, counts the number
    in its name ("8B") times 2 bytes, 4 in fp32; the bytes are None for a name without such a number.
    """
    name, gguf, folder = config.model.name, config.model.gguf_file, _folder(config)
    if folder.is_dir():
        files = [folder / gguf] if gguf else [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
        return sum(file.stat().st_size for file in files if file.is_file()) * (4 if gguf else 1), True
    match = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z\d])", name.lower())
    size = 4 if config.model.base_dtype == "fp32" else 2  # int8 and int4 are made of bf16
    return (float(match[1]) * {"b": 1e9, "m": 1e6}[match[2]] * size if match else None), False


def loading_bytes(config: TrainConfig, sharded: bool = False) -> float | None:
    """Returns the peak host memory of a replica while it loads the base weights, in bytes.

    None if `model_bytes` does not know their size. Trained weights are in fp32. int8 and int4 weights are rounded as
    they are read (`quantized`): the host holds the result and one stack (`layer_scan`). A GGUF file becomes bf16 first.

    Args:
        config: the run.
        sharded: whether the weights are sharded over devices with memory of their own. The host then holds one stack of
            the layers' matrices (`partition.to_mesh`), and the other weights. int8 and int4 need `model.quant_cache`
            for that; without it, and with a GGUF file, `sharded` changes nothing.
    """
    saved, local = model_bytes(config)
    model, dtype = config.model, config.model.base_dtype if config.lora.r else "fp32"
    if saved is None or model.gguf_file:
        return saved if saved is None or dtype != "fp32" else 2 * saved
    numbers = saved / (4 if model.base_dtype == "fp32" and not local else 2)
    matrices = (1 - _OTHERS) * numbers
    counted = _count(_folder(config)) if local else None
    matrices, others, stack, _ = counted or (matrices, numbers - matrices, _STACK * matrices, 0)
    each = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5 + 4 / model.quant_group}[dtype]
    if dtype in ("fp32", "bf16"):
        return ((stack if sharded else matrices) + others) * each
    mapped = sharded and model.quant_cache is not None
    return (stack if mapped else matrices + stack) * each + others * 2


def cast_bytes(config: TrainConfig) -> float:
    """Returns the bytes of bf16 weights that the host holds while it quantizes the fp8 files of a model folder.

    0 for other runs, and for a hub id, whose files are not known. Other weights are rounded one tensor at a time.
    Nothing is cast if `model.quant_cache` has the integers already.
    """
    model, folder = config.model, _folder(config)
    if not config.lora.r or model.base_dtype not in ("int8", "int4") or model.gguf_file or not folder.is_dir():
        return 0.0
    if model.quant_cache is not None:
        kind = "int8" if model.base_dtype == "int8" else f"int4-{model.quant_group}"  # as `weights.loading` does
        if any(Path(model.quant_cache).expanduser().glob(f"{glob.escape(folder.name)}-{kind}-*/config.json")):
            return 0.0
    counted = _count(folder)
    return 2.0 * counted[3] if counted else 0.0


def _count(folder: Path) -> tuple[float, float, float, float] | None:
    """Counts weights: in the layers' matrices, in other tensors, in the largest stack, and in fp8.

    Returns None if the folder has no readable safetensors files with layers; loading them raises the error.
    """
    from safetensors import SafetensorError, safe_open

    stacks, others, cast = Counter[str](), 0, 0
    try:
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118  the file is not a mapping
                    shape, dtype = file.get_slice(name).get_shape(), file.get_slice(name).get_dtype()
                    count = math.prod(shape) * (2 if name.endswith("_blocks") and dtype == "U8" else 1)  # MXFP4
                    cast += count if dtype.startswith("F8") else 0
                    stack, layers = re.subn(r"\.\d+\.", ".", name)
                    if layers and len(shape) > 1 and "vision" not in name:
                        stacks[stack] += count
                    else:
                        others += count
    except (OSError, SafetensorError):
        return None
    return (stacks.total(), others, max(stacks.values()), cast) if stacks else None


def check_memory(at: Machine, config: TrainConfig, replicas: int) -> Check:
    """Checks that free host memory holds the replicas while they load the model: else the kernel kills one (SIGKILL).

    `replicas` is their number on this host. Every process counts `PROCESS_BYTES` too. Returns "failure" if the memory
    is too small, and "ok" if it suffices or the model's size is not known. "skipped" if the free memory is not known.
    """
    free = free_memory(at)
    if free is None:
        return Check("Host memory", "skipped", "/proc/meminfo does not say")
    # Replicas of XLA:CPU are threads of one process, all others are processes.
    threads = config.launch.device_type == "xla-cpu" or at.environ.get("PJRT_DEVICE") == "CPU"
    size = loading_bytes(config, sharded=config.launch.mesh is not None and not threads)
    text = f"{free / GIB:.1f} GiB free"
    if size is None:
        return Check("Host memory", "ok", f"{text}; the size of {config.model.name} is not known from its name")
    processes = 1 if threads else replicas
    parts, weights = f"{replicas} x {size / GIB:.2f} of weights", replicas * size
    # With a cache, one process quantizes and the others wait.
    if (cast := cast_bytes(config) * (1 if config.model.quant_cache else replicas)) > weights:
        parts, weights = f"{cast / GIB:.2f} of weights in bf16 before they are quantized", cast
    need = weights + processes * PROCESS_BYTES
    parts += f" + {processes} x {PROCESS_BYTES / GIB:.1f}"
    text += f", {need / GIB:.1f} needed: {parts}"
    if need <= free:
        return Check("Host memory", "ok", text)
    fix = "num_replicas=1" if replicas > 1 and size + PROCESS_BYTES <= free else "a smaller model.name"
    return Check("Host memory", "failure", text, f"{fix}, or a host with {need / GIB:.0f} GiB")


def check_disk(at: Machine, config: TrainConfig) -> Check:
    """Checks the free disk space for the weights to download and for the checkpoints: "ok", "warning" or "failure".

    A checkpoint of full fine-tuning counts 5 times the bf16 weights (2 bytes a parameter, and 8 for AdamW's moments).
    While a checkpoint is written, the disk holds `keep + 1`, with an object store 1. Existing checkpoints need no more
    space. The weights count unless they are in a folder or the hub's cache. Adapters and logs together count 1 GiB, and
    so does a download of unknown size. "warning" means that only this 1 GiB is missing.
    """
    size, local = model_bytes(config)
    kept = 0 if config.remote else config.checkpoint.keep  # an object store has them
    trained = 0 if config.lora.r else (kept + 1) * 5 * (size or 0)
    held = sum(file.stat().st_size for file in (config.output_path / "checkpoints").rglob("*") if file.is_file())
    trained -= min(trained, held)
    wanted = [(config.output_path, trained, GIB, "output_dir=/larger/disk/run")]
    if (hub := settings()) and not local:
        cache = Path(hub.HF_HUB_CACHE)
        if not (cache / f"models--{config.model.name.replace('/', '--')}" / "snapshots").is_dir():
            wanted.append((cache, size or 0, 0 if size else GIB, "export HF_HOME=/larger/disk/huggingface"))
    status: Status = "ok"
    texts, fixes = [], []
    for path, need, more, fix in wanted:
        free = shutil.disk_usage(next(p for p in [path.absolute(), *path.absolute().parents] if p.is_dir())).free
        texts.append(f"{free / GIB:.0f} GiB free for {path}, {(need + more) / GIB:.1f} needed")
        if free < need + more:
            fixes.append(fix)
            status = "failure" if free < need or status == "failure" else "warning"
    return Check("Disk", status, "; ".join(texts), " && ".join(fixes))
