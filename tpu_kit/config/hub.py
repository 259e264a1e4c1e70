"""The section `hub`: where a run pushes its result, with checks of the hub's names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tpu_kit.config.fields import knob, show
from tpu_kit.config.named_values import EXPORT_FORMATS

if TYPE_CHECKING:
    from tpu_kit.config.schema import TrainConfig

_BRANCH = re.compile(r"\w[\w./-]{0,190}\w|\w")
_REPOSITORY_PART = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")


def check_formats(names: str | tuple[str, ...]) -> None:
    """Raises ValueError if `names`, a name or a tuple of names, has a name not in `EXPORT_FORMATS`, or a name twice."""
    names = (names,) if isinstance(names, str) else names
    if unknown := [name for name in names if name not in EXPORT_FORMATS]:
        raise ValueError(f"has {', '.join(map(show, unknown))}; the formats are {', '.join(EXPORT_FORMATS)}")
    if len({*names}) < len(names):
        raise ValueError("names a format twice; remove one")


def check_repository_name(name: str) -> None:
    """Raises ValueError if `name` is not of the form owner/name that the hub allows; does not look for it there.

    Both parts have 1 to 96 letters, digits, _ and inner . or -; ".." and "--" are refused, and .git at the end.
    """
    owner, slash, rest = name.partition("/")
    if not slash:
        raise ValueError(f"has no owner; write owner/name, as in your-name/{name[:40]}")
    if not all(map(_REPOSITORY_PART.fullmatch, (owner, rest))) or ".." in name or "--" in name or rest.endswith(".git"):
        raise ValueError(
            "is no repository name; write owner/name, both of letters, digits and single - . _ between them, at most "
            "96 characters"
        )


def check_branch(name: str) -> None:
    """Raises ValueError unless `name` has only letters, digits, _ and inner . / -, no "..", and is no commit's hash."""
    if not _BRANCH.fullmatch(name) or ".." in name or re.fullmatch("[0-9a-f]{40}", name):
        raise ValueError("is no branch; name one, such as main")


def read_hub_address(text: str) -> tuple[str, str | None]:
    """Returns ("owner/name", revision or None) of hf://owner/name@revision; ValueError for other texts, bad names."""
    address, _, revision = text.removeprefix("hf://").rstrip("/").partition("@")
    if not text.startswith("hf://"):
        raise ValueError("is no address on the hub; write hf://owner/name or hf://owner/name@commit")
    check_repository_name(address)
    return address, revision or None


@dataclass(frozen=True)
class HubConfig:
    """Pushing the result to the Hugging Face hub; the token is never a parameter."""

    model_id: str | None = knob(
        None,
        "Repository to push to, such as ann/my-model; created if it does not exist. null = push nothing.",
        check=check_repository_name,
    )
    private: bool = knob(True, "Whether a repository that the run creates is private.")
    strategy: Literal["end", "checkpoint"] = knob(
        "end",
        "end: push the result; checkpoint: also push the newest checkpoint during training, at most every five "
        "minutes, so that another machine can continue the run (checkpoint.source).",
    )
    revision: str | None = knob(
        None, "Branch; null = main. Write hub.revision: revision alone is model.revision.", check=check_branch
    )
    format: str | tuple[str, ...] | None = knob(
        None,
        f"Export format, or a list of formats: {', '.join(EXPORT_FORMATS)}. In a list, the first goes to the root, and "
        "every other to a folder of its name. null = adapter, or merged with lora.r=0. Write hub.format: format alone "
        "is data.format.",
        check=check_formats,
    )


def hub_conflicts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yields (names, problem) as `conflicts.conflicts`, for `hub`, checkpoint.source and an hf:// output_dir.

    The contradictions are

    - the format adapter or gguf-lora with lora.r=0, and gguf-lora with lora.vision;
    - hub.model_id with optim.objective=error-correction-alone, or with error-correction unless the format is adapter;
    - an output_dir on the hub, after which it yields no more;
    - hub.strategy=checkpoint with an address as output_dir;
    - checkpoint.source with an address as output_dir, or with checkpoint.resume=never.
    """
    hub, checkpoint, objective = config.hub, config.checkpoint, config.optim.objective
    adapters = {"adapter", "gguf-lora"} & {*config.hub_formats}
    if adapters and not config.lora.r:
        text = f"has {' and '.join(sorted(adapters))}, but lora.r=0 trains the whole model; set hub.format=[merged]"
        yield "hub.format lora.r", text
    if config.lora.vision and "gguf-lora" in config.hub_formats:
        text = "has gguf-lora, which holds no weights of the vision part; set hub.format=[adapter] or [gguf-f16]"
        yield "hub.format lora.vision", text
    if hub.model_id and objective == "error-correction-alone":
        text = "is for exports, but no format holds the head that this objective trains; remove it"
        yield "hub.model_id optim.objective", text
    elif hub.model_id and objective.startswith("error-") and config.hub_formats != ("adapter",):
        text = "cannot hold the error-correction head; set hub.format=[adapter]"
        yield "hub.format optim.objective", text
    if config.remote and config.remote.startswith("hf://"):
        text = "is on the hub, whose file system cannot exclude a second writer; set a folder or gs://, and "
        yield "output_dir", f"{text}hub.model_id=owner/name with hub.strategy=checkpoint to push checkpoints"
        return
    if hub.strategy == "checkpoint" and config.remote:
        text = "is for checkpoints on a local disk, but output_dir outlives the machine; set hub.strategy=end"
        yield "hub.strategy output_dir", text
    if checkpoint.source and config.remote:
        text = "is fetched to a local folder; set output_dir to a folder, or remove checkpoint.source"
        yield "checkpoint.source output_dir", text
    if checkpoint.source and checkpoint.resume == "never":
        text = "continues an earlier run, but checkpoint.resume=never starts anew; remove either"
        yield "checkpoint.source checkpoint.resume", text
