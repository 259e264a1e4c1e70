"""Checks a run's files, the Hugging Face hub and Weights & Biases before a launch; reads the host's free memory.

Network requests take three seconds at most; secrets are never shown.
"""

from __future__ import annotations

import contextlib
import glob
import netrc
import re
from pathlib import Path

from tpu_kit.config.fields import closest
from tpu_kit.config.loader import TrainConfig
from tpu_kit.config.sections.data import GENERATED
from tpu_kit.machine import chips, hub
from tpu_kit.machine.checks import Check, Machine
from tpu_kit.machine.chips import GIB

# Host memory of a replica's process without weights: 0.93 GiB on XLA:CPU (imports, runtime); the driver's is a guess.
PROCESS_BYTES = 1.5 * GIB


_CGROUPS = {  # version: folder, limit, usage, and the part of the usage that is reclaimable page cache
    2: ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_memory(at: Machine) -> float | None:
    """Returns the free host memory in bytes, within the limits of this process's cgroups; None if /proc has no figure.

    Every parent of a cgroup may have a limit. A container may see its own cgroup as the root.
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


_SOURCES = ("model.name", "data.eval_source", "lora.adapter", "distill.teacher")
_FOLDERS = ("lora.adapter", "distill.files")  # never a hub id
_DATA_FILE = re.compile(r"\.(jsonl|json|ndjson|csv|tsv|parquet)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)


def is_path(name: str, source: str) -> bool:
    """Whether `source`, the value of the setting `name`, is a path of this machine (existing or not), not a hub id."""
    local = name in _FOLDERS or (name != "model.name" and bool(_DATA_FILE.search(source)))
    return "://" not in source and (source.startswith((".", "/", "~")) or source.count("/") > 1 or local)


def check_files(config: TrainConfig) -> Check:
    """Checks that local paths in data.source, data.eval_source, model.name, lora.adapter and distill.teacher exist.

    Else it is a "failure"; its fix has a similar name in the same folder, if there is any. Ignores hub ids and URLs.
    """
    texts, fixes = [], []
    read = [("data.source", str(one.source)) for one in config.data.by_source]
    for name, source in [*((name, config[name]) for name in _SOURCES), *read]:
        if not source or not is_path(name, source):
            continue
        path = Path(source).expanduser()
        if path.exists() or glob.glob(str(path)):
            continue
        texts.append(f"{name}={source}: there is no such file or folder")
        near = closest(path.name, [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else [], 0.85)
        fixes.append(f"{name}={path.parent / near[0] if near else f'its path, absolute or from {Path.cwd()}'}")
    if texts:
        return Check("Files", "failure", "; ".join(texts), " ".join(fixes))
    return Check("Files", "ok", "all paths of the run exist")


def check_hub(at: Machine, config: TrainConfig) -> Check:
    """Checks that the Hugging Face hub answers, if the run needs it, and that this user may download the model.

    A hub id in model.name, data.source, data.eval_source, lora.adapter or distill.teacher needs the hub.
    "failure" if the hub refuses the model (status 401 or 403). "warning" if the hub is needed and does not answer, or
    answers for the model with another error. "skipped" if the environment sets it offline, its package is absent, or
    it neither answers nor is needed.
    """
    name, model, settings = "Hugging Face hub", config.model.name, hub.settings()
    if settings is None:
        return Check(name, "skipped", "huggingface_hub is not installed")
    from huggingface_hub import get_token

    token = get_token()
    in_file = Path(settings.HF_TOKEN_PATH).is_file() and not at.environ.get("HF_TOKEN")
    text = f"token in {settings.HF_TOKEN_PATH if in_file else 'HF_TOKEN'}" if token else "no token"
    read = [("data.source", str(one.source)) for one in config.data.by_source]
    read += [(name, config[name]) for name in _SOURCES if config[name]]
    sources = [source for name, source in read if not is_path(name, source)]
    away = [s for s in sources if s not in GENERATED and "://" not in s and "*" not in s and not Path(s).exists()]
    if settings.HF_HUB_OFFLINE:
        return Check(name, "skipped", f"offline by HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE; {text}")
    endpoint = hub.endpoint()
    page = f"/{model}/resolve/{config.model.revision or 'main'}/config.json" if model in away else ""
    status, problem = hub.head(endpoint + page, token if page else None)
    if status is None and away:
        fix = "export HF_HUB_OFFLINE=1 if they are in the hub's cache; else copy them here and give their folders"
        return Check(name, "warning", f"{endpoint}: {problem}; needed for {', '.join(away)}", fix)
    if status is None:
        return Check(name, "skipped", f"{endpoint}: {problem}; this config needs nothing from it")
    if status in (401, 403):
        fix = f"ask for access at {endpoint}/{model}, then: hf auth login"
        return Check(name, "failure", f"{model} is gated, private or missing, and refused to this user; {text}", fix)
    if status >= 400 and page:
        return Check(name, "warning", f"{endpoint} answers {status} for {model}", "model.name, model.revision")
    return Check(name, "ok", f"{endpoint} answers; {text}")


def check_wandb(at: Machine, config: TrainConfig) -> Check:
    """Checks that Weights & Biases finds an API key (never shown), else a "failure"; "skipped" if off or offline.

    Looks in WANDB_API_KEY and in the netrc file. WANDB_MODE may set it offline.
    """
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
    """Returns the name of this machine's chip in `chips.CHIPS`, and the number of chips that `replicas` replicas use.

    Looks up "tpu", "torch-tpu" and "cuda" devices. The name is None for other types and for an unknown chip; a replica
    then counts as a chip.
    """
    name: str | None = None
    if device_type in ("tpu", "torch-tpu"):
        name = next(iter(Machine().tpus()), None)
    elif device_type == "cuda":
        import torch

        with contextlib.suppress(ValueError):
            name = chips.chip(torch.cuda.get_device_name()).name
    return name, max(1, replicas // chips.chip(name).devices_per_chip) if name else replicas
