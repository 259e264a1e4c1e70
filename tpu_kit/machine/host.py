"""Checks what a run needs besides its accelerator: host memory, disk, the hub and the tracker.

One `Check` per question, as in `machine`. Requests to the network take three seconds at most; secrets are never shown.
"""

from __future__ import annotations

import contextlib
import glob
import math
import netrc
import os
import re
import shutil
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tpu_kit.config.fields import closest, hide_secrets
from tpu_kit.config.loader import TrainConfig
from tpu_kit.machine import chips
from tpu_kit.machine.checks import Check, Machine, Status
from tpu_kit.machine.chips import GIB

# A replica's process without weights: imports and runtime took 0.93 GiB on XLA:CPU; the rest is a guess for the driver.
PROCESS_BYTES = 1.5 * GIB
_OTHERS, _STACK = 0.2, 0.45
"""Shares, where only a model's name is known: of the weights those outside of the layers' matrices, such as embedding
and head (13 % in Llama 3.1 8B, 28 in Qwen2.5 0.5B); of the matrices their largest stack (27 % in Llama 3.1 8B, 44 in
Phi 3 mini)."""


def _folder(config: TrainConfig) -> Path:
    """The model's folder, if it is on this machine."""
    name = config.model.name
    return Path(__file__).parents[1] / "assets/embedded" if name == "embedded" else Path(name).expanduser()


def model_bytes(config: TrainConfig) -> tuple[float | None, bool]:
    """Bytes of the saved base weights, and whether they are on this machine already.

    For a folder, the size of its safetensors or else .bin files; four times a GGUF file, whose 4 bits become 16. For a
    hub id, the parameters in its name ("8B") times the bytes of `base_dtype`; None if the name has none.
    """
    name, gguf, folder = config.model.name, config.model.gguf_file, _folder(config)
    if folder.is_dir():
        files = [folder / gguf] if gguf else [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
        return sum(file.stat().st_size for file in files if file.is_file()) * (4 if gguf else 1), True
    match = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z\d])", name.lower())
    size = 4 if config.model.base_dtype == "fp32" else 2  # int8 and int4 are made of bf16
    return (float(match[1]) * {"b": 1e9, "m": 1e6}[match[2]] * size if match else None), False


def loading_bytes(config: TrainConfig, sharded: bool = False) -> float | None:
    """Peak bytes of host memory of a replica's base weights while they are loaded; None if not known.

    Trained weights are in fp32. int8 and int4 weights are rounded as they are read (`quantized`): the host holds the
    result and one stack (`layer_scan`). A GGUF file becomes bf16 first.

    Args:
        config: the run.
        sharded: over the devices of a mesh, whose memory is not the host's: the weights stay mapped from files, and the
            host holds the shards of one stack (`partition.to_mesh`).
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
    """Bytes of bf16 that the host holds before it quantises a base whose files have fp8; 0 if not known.

    Other weights are rounded one by one. Nothing is cast where `model.quant_cache` has the integers already.
    """
    model, folder = config.model, _folder(config)
    if not config.lora.r or model.base_dtype not in ("int8", "int4") or model.gguf_file or not folder.is_dir():
        return 0.0
    if model.quant_cache is not None:
        kind = "int8" if model.base_dtype == "int8" else f"int4-{model.quant_group}"  # as `model.loading` names it
        if any(Path(model.quant_cache).expanduser().glob(f"{glob.escape(folder.name)}-{kind}-*/config.json")):
            return 0.0
    counted = _count(folder)
    return 2.0 * counted[3] if counted else 0.0


def _count(folder: Path) -> tuple[float, float, float, float] | None:
    """Counts the weights: of the layers' matrices, of other tensors, of the largest stack, and those in fp8.

    None if the folder's files are not readable safetensors; loading them raises the error.
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


_CGROUPS = {  # version: folder, limit, use, and what of the use is a cache of files that the kernel gives back
    2: ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_memory(at: Machine) -> float | None:
    """Free bytes of host memory, within the limits of this process's groups; None where the system does not tell.

    A group is within others, each of which may have a limit. A container may see its own group as the outermost one.
    """
    kib = re.search(r"MemAvailable:\s*(\d+) kB", at.read("proc/meminfo"))
    if kib is None:
        return None
    free = int(kib[1]) * 1024.0
    for version, (folder, most, used, cache) in _CGROUPS.items():
        line = r"^0::(.*)" if version == 2 else r"^\d+:[^:]*\bmemory\b[^:]*:(.*)"
        own = re.search(line, at.read("proc/self/cgroup"), re.MULTILINE)
        group = Path(folder) / (own[1].lstrip("/") if own else "")
        for place in [group, *group.parents][: len(group.parts) - len(Path(folder).parts) + 1]:
            limit, now = at.read(f"{place}/{most}"), at.read(f"{place}/{used}")
            if limit.isdigit() and now.isdigit():
                freed = re.search(rf"^{cache} (\d+)$", at.read(f"{place}/memory.stat"), re.MULTILINE)
                free = min(free, float(limit) - float(now) + (float(freed[1]) if freed else 0.0))
    return max(0.0, free)


def check_memory(at: Machine, config: TrainConfig, replicas: int) -> Check:
    """Checks that the host has memory for a model per replica at the start: else the kernel kills one (SIGKILL)."""
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
    # With a cache one process quantises, and the others wait.
    if (cast := cast_bytes(config) * (1 if config.model.quant_cache else replicas)) > weights:
        parts, weights = f"{cast / GIB:.2f} of weights in bf16 before they are quantised", cast
    need = weights + processes * PROCESS_BYTES
    parts += f" + {processes} x {PROCESS_BYTES / GIB:.1f}"
    text += f", {need / GIB:.1f} needed: {parts}"
    if need <= free:
        return Check("Host memory", "ok", text)
    fix = "num_replicas=1" if replicas > 1 and size + PROCESS_BYTES <= free else "a smaller model.name"
    return Check("Host memory", "failure", text, f"{fix}, or a host with {need / GIB:.0f} GiB")


def check_disk(at: Machine, config: TrainConfig) -> Check:
    """Checks the room for the weights to download and for the checkpoints.

    A checkpoint of full fine-tuning counts 5 times the bf16 weights (2 bytes a parameter, and 8 for AdamW's moments);
    while one is written there is one more than `keep`. Those that are there already need no more room. Adapters and
    logs count 1 GiB; a run that lacks only that gets a warning.
    """
    size, local = model_bytes(config)
    kept = 0 if config.remote else config.checkpoint.keep  # an object store has them
    trained = 0 if config.lora.r else (kept + 1) * 5 * (size or 0)
    held = sum(file.stat().st_size for file in (config.output_path / "checkpoints").rglob("*") if file.is_file())
    trained -= min(trained, held)
    wanted = [(config.output_path, trained, GIB, "output_dir=/larger/disk/run")]
    if (hub := _hub()) and not local:
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


def _hub() -> Any:
    """The settings of huggingface_hub, as it reads them from the environment; None if it is not installed."""
    with contextlib.suppress(ImportError):
        from huggingface_hub import constants

        return constants
    return None


_SOURCES = ("model.name", "data.source", "data.eval_source", "lora.adapter", "distill.teacher")
_FOLDERS = ("lora.adapter", "distill.files")  # never an id of the hub
_DATA_FILE = re.compile(r"\.(jsonl|json|ndjson|csv|tsv|parquet)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)


def is_path(name: str, source: str) -> bool:
    """Whether what a run reads is named by a path of this machine, existing or not, and not by a hub id."""
    local = name in _FOLDERS or (name != "model.name" and bool(_DATA_FILE.search(source)))
    return "://" not in source and (source.startswith((".", "/", "~")) or source.count("/") > 1 or local)


def check_files(config: TrainConfig) -> Check:
    """Checks that the files and folders of this machine that the run reads exist."""
    texts, fixes = [], []
    for name in _SOURCES:
        if not config[name] or not is_path(name, config[name]):
            continue
        path = Path(config[name]).expanduser()
        if path.exists() or glob.glob(str(path)):
            continue
        texts.append(f"{name}={config[name]}: there is no such file or folder")
        near = closest(path.name, [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else [], 0.85)
        fixes.append(f"{name}={path.parent / near[0] if near else f'its path, absolute or from {Path.cwd()}'}")
    if texts:
        return Check("Files", "failure", "; ".join(texts), " ".join(fixes))
    return Check("Files", "ok", "all paths that the run names are there")


_ASKING = 3.0  # seconds in which the hub must answer
_ASKED_AGAIN = 300.0  # seconds after which it is tried again
_ASKED = "TPU_KIT_HUB_ASKED"  # environment variable, inherited by child processes: the time of the last try (time.time)


def _head(url: str, token: str | None = None, seconds: float = _ASKING) -> tuple[int | None, str]:
    """Requests a page's headers as huggingface_hub does, with its proxies and certificates; follows no redirect.

    Returns:
        The status, or None and the reason.
    """
    outcome: list[tuple[int | None, str]] = [(None, f"no answer in {seconds:g} s")]
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    def ask() -> None:
        try:
            from huggingface_hub.utils import get_session

            answer = get_session().head(url, headers=headers, timeout=seconds, follow_redirects=False)
            outcome[0] = (answer.status_code, "")
        except Exception as error:  # of the HTTP library that this version of huggingface_hub has
            outcome[0] = (None, " ".join(hide_secrets(str(error)).split()) or type(error).__name__)

    # In a thread, because the lookup of a name has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0]


def _endpoint() -> str:
    return str(_hub().ENDPOINT) if _hub() else "the Hugging Face hub"


def ask_hub_once() -> None:
    """Lets Hugging Face's libraries use only their caches if the hub does not answer one request within 3 seconds.

    Otherwise each file costs six tries: 24 s if connections are refused, and 66 s without any answer. Child processes
    inherit the result, and the hub is tried again after five minutes. Nothing is requested if HF_HUB_OFFLINE is set,
    also to 0.
    """
    before = os.environ.get(_ASKED)
    if before is None and {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} & os.environ.keys():
        return
    if before is not None and time.time() - float(before) < _ASKED_AGAIN:
        return
    _set_offline(False)
    status, problem = _head(_endpoint())
    os.environ[_ASKED] = str(time.time())
    if status is None:
        _set_offline(True)
        advice = "only what is in its cache on this machine is used (HF_HUB_OFFLINE=0 tries longer)"
        print(f"{_endpoint()}: {problem}; {advice}", file=sys.stderr, flush=True)


def _set_offline(offline: bool) -> None:
    os.environ.pop("HF_HUB_OFFLINE", None)
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    for name in ("huggingface_hub.constants", "datasets.config"):  # have read the variable, if they are loaded
        if module := sys.modules.get(name):
            module.HF_HUB_OFFLINE = offline  # type: ignore[attr-defined]  # of a module by name


def check_hub(at: Machine, config: TrainConfig) -> Check:
    """Checks that the Hugging Face hub answers and gives this user the model; the token is never shown."""
    name, model, hub = "Hugging Face hub", config.model.name, _hub()
    if hub is None:
        return Check(name, "skipped", "huggingface_hub is not installed")
    from huggingface_hub import get_token

    token = get_token()
    in_file = Path(hub.HF_TOKEN_PATH).is_file() and not at.environ.get("HF_TOKEN")
    text = f"token in {hub.HF_TOKEN_PATH if in_file else 'HF_TOKEN'}" if token else "no token"
    sources = [config[name] for name in _SOURCES if config[name] and not is_path(name, config[name])]
    away = [s for s in sources if s != "embedded" and "://" not in s and "*" not in s and not Path(s).exists()]
    if hub.HF_HUB_OFFLINE:
        return Check(name, "skipped", f"offline by HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE; {text}")
    endpoint = _endpoint()
    page = f"/{model}/resolve/{config.model.revision or 'main'}/config.json" if model in away else ""
    status, problem = _head(endpoint + page, token if page else None)
    if status is None and away:
        fix = "export HF_HUB_OFFLINE=1 if they are in its cache; else copy them here and name the folders"
        return Check(name, "warning", f"{endpoint}: {problem}; needed for {', '.join(away)}", fix)
    if status is None:
        return Check(name, "skipped", f"{endpoint}: {problem}; this config needs nothing from it")
    if status in (401, 403):
        fix = f"ask for access at {endpoint}/{model}, then: hf auth login"
        return Check(name, "failure", f"{model} is gated, private or not there, and not for this user; {text}", fix)
    if status >= 400 and page:
        return Check(name, "warning", f"{endpoint} answers {status} for {model}", "model.name, model.revision")
    return Check(name, "ok", f"{endpoint} answers; {text}")


def check_wandb(at: Machine, config: TrainConfig) -> Check:
    """Checks that Weights & Biases, if it is on, finds a key (never shown) or is offline."""
    mode = config.tracking.wandb
    if mode == "online" and at.environ.get("WANDB_MODE") in ("offline", "disabled"):
        mode = "offline"
    if mode != "online":
        return Check("W&B", "skipped", "off (tracking.wandb)" if mode == "off" else "offline: no key needed")
    host = (at.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").split("//")[-1].split("/")[0]
    path = Path(at.environ.get("NETRC") or Path("~/.netrc").expanduser())
    try:
        known = netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        known = False
    if at.environ.get("WANDB_API_KEY") or known:
        return Check("W&B", "ok", "key in WANDB_API_KEY" if at.environ.get("WANDB_API_KEY") else f"key in {path}")
    return Check("W&B", "failure", f"online, but no key for {host}", "wandb login, or tracking.wandb=offline")


def chips_of(device_type: str, replicas: int) -> tuple[str | None, int]:
    """The name in `chips` of the device of the replicas here, and the number of chips on which so many run.

    The name is None for a CPU and for an unknown chip; then each replica counts as a chip.
    """
    name: str | None = None
    if device_type == "tpu":
        name = next(iter(Machine().tpus()), None)
    elif device_type == "cuda":
        import torch

        with contextlib.suppress(ValueError):
            name = chips.chip(torch.cuda.get_device_name()).name
    return name, max(1, replicas // chips.chip(name).devices_per_chip) if name else replicas
