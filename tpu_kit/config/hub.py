"""The section `hub`: where a run pushes its result, and the names that the hub takes."""

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
    """Raises ValueError if a name is no format of an export, or is given twice."""
    names = (names,) if isinstance(names, str) else names
    if unknown := [name for name in names if name not in EXPORT_FORMATS]:
        raise ValueError(f"has {', '.join(map(show, unknown))}, and there are {', '.join(EXPORT_FORMATS)}")
    if len({*names}) < len(names):
        raise ValueError("names a format twice; remove one of them")


def check_repository_name(name: str) -> None:
    """Raises ValueError if a text is no name of a repository of the hub, with its owner."""
    owner, slash, rest = name.partition("/")
    if not slash:
        raise ValueError(f"has no owner; give it too, as in your-name/{name[:40]}")
    if not all(map(_REPOSITORY_PART.fullmatch, (owner, rest))) or ".." in name or "--" in name or rest.endswith(".git"):
        raise ValueError(
            "is no name of a repository: owner/name, of letters, digits, and single - . _ between them, 96 characters "
            "at most"
        )


def check_branch(name: str) -> None:
    """Raises ValueError if a text is no name of a branch."""
    if not _BRANCH.fullmatch(name) or ".." in name or re.fullmatch("[0-9a-f]{40}", name):
        raise ValueError("is no branch; name one, such as main")


def read_hub_address(text: str) -> tuple[str, str | None]:
    """Returns the repository and the branch, tag or commit of hf://owner/name@revision; raises ValueError."""
    address, _, revision = text.removeprefix("hf://").rstrip("/").partition("@")
    if not text.startswith("hf://"):
        raise ValueError("is no address of the hub; write hf://owner/name or hf://owner/name@commit")
    check_repository_name(address)
    return address, revision or None


@dataclass(frozen=True)
class HubConfig:
    """Where the result is pushed to on the Hugging Face hub; the token is never a parameter."""

    model_id: str | None = knob(
        None,
        "The repository, such as ann/my-model; made if it does not exist. null = nothing is pushed.",
        check=check_repository_name,
    )
    private: bool = knob(True, "Whether a repository that the run makes is private.")
    strategy: Literal["end", "checkpoint"] = knob(
        "end",
        "checkpoint pushes the newest checkpoint too, during training, every five minutes at most, so that another "
        "machine can continue the run by checkpoint.source.",
    )
    revision: str | None = knob(
        None, "The branch; null = main. Write the section: revision alone is model.revision.", check=check_branch
    )
    format: str | tuple[str, ...] | None = knob(
        None,
        f"What the result is exported as, one or a list: {', '.join(EXPORT_FORMATS)}. Of several, the first is at the "
        "root and each other in a folder of its name; null = adapter, or merged with lora.r=0. Write the section: "
        "format alone is data.format.",
        check=check_formats,
    )


def hub_conflicts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yields the contradictions of the section with the rest of a run, as `conflicts.conflicts`."""
    hub, checkpoint, objective = config.hub, config.checkpoint, config.optim.objective
    adapters = {"adapter", "gguf-lora"} & {*config.hub_formats}
    if adapters and not config.lora.r:
        text = f"has {' and '.join(sorted(adapters))}, and lora.r=0 trains a whole model; set hub.format=[merged]"
        yield "hub.format lora.r", text
    if config.lora.vision and "gguf-lora" in config.hub_formats:
        text = "has gguf-lora, which holds no weights of the part for images; set hub.format=[adapter] or [gguf-f16]"
        yield "hub.format lora.vision", text
    if hub.model_id and objective == "error-correction-alone":
        text = "is where an export goes, and no format has a place for the head that this objective trains; remove it"
        yield "hub.model_id optim.objective", text
    elif hub.model_id and objective.startswith("error-") and config.hub_formats != ("adapter",):
        text = "has no place for the error-correction head; set hub.format=[adapter]"
        yield "hub.format optim.objective", text
    if config.remote and config.remote.startswith("hf://"):
        text = "is on the hub, which has no commit that only one of two writers can make; set a folder or gs://, and "
        yield "output_dir", f"{text}hub.model_id=owner/name with hub.strategy=checkpoint to push checkpoints"
        return
    if hub.strategy == "checkpoint" and config.remote:
        text = "is for checkpoints on a disk, and those in output_dir outlive the machine; set hub.strategy=end"
        yield "hub.strategy output_dir", text
    if checkpoint.source and config.remote:
        text = "is fetched to a folder; set output_dir to one, or remove it"
        yield "checkpoint.source output_dir", text
    if checkpoint.source and checkpoint.resume == "never":
        text = "is where a run continues from, and checkpoint.resume=never starts anew; remove one of the two"
        yield "checkpoint.source checkpoint.resume", text
