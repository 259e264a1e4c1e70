"""Stores the measurements of `verify` on this machine: a JSON file per kind of device in the user's cache.

`plan` and `train` multiply their predictions by the measured ratios, and avoid kernels and loops that failed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from tpu_kit.config.loader import TrainConfig
from tpu_kit.machine.compatibility import PACKAGES, installed_version

_AGAIN = "`python -m tpu_kit verify` again"


@dataclass(frozen=True)
class Calibration:
    """Measurements of a kind of device.

    Attributes:
        device: a chip's name, such as "v5e", or "xla-cpu".
        memory: ratio of a step's measured peak memory to the compiler's figure; None if not measured.
        time: ratio of a step's measured time to its estimate; None if not measured.
        splash: error of the splash kernel; empty if it passed or was not checked.
        scan: error of the loop over layers; empty if it passed or was not checked.
        report: path of the report with the details.
        made: date of the measurement.
        versions: versions of the packages, and a hash of the kit's code.
        ignored: why the file is not used; all other fields but `device` are then empty.
    """

    device: str
    memory: float | None = None
    time: float | None = None
    splash: str = ""
    scan: str = ""
    report: str = ""
    made: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    ignored: str = ""

    def __str__(self) -> str:
        """Describes the ratios; empty if nothing was measured."""
        parts = [] if self.memory is None else [f"memory {self.memory:.2f} of the compiler's figure"]
        parts += [] if self.time is None else [f"step time {self.time:.2f} of the estimate"]
        return f"measured on this machine, {self.made}: {', '.join(parts)}" if parts else ""

    @property
    def notes(self) -> list[str]:
        """Lines with the ratios and with the reason why the file is ignored."""
        return [text for text in (str(self), self.ignored) if text]

    def apply(self, config: TrainConfig) -> tuple[TrainConfig, list[str]]:
        """Returns `config`, or a copy in which `auto` avoids a kernel or loop that failed, and a warning per change.

        If the splash kernel failed, `model.attention=auto` becomes "sdpa". If the loop failed, `optim.scan_layers=auto`
        becomes "off". Other values stay. Prints nothing.
        """
        warnings = []
        if config.model.attention == "auto" and self.splash:
            config = replace(config, model=replace(config.model, attention="sdpa"))
            warnings.append(f"WARNING: attention=auto is sdpa: splash failed on this machine ({self.splash})")
        if config.optim.scan_layers == "auto" and self.scan:
            config = replace(config, optim=replace(config.optim, scan_layers="off"))
            warnings.append(f"WARNING: layers are unrolled: their loop failed on this machine ({self.scan})")
        return config, [f"{warning}; see {self.report}, and run {_AGAIN}" for warning in warnings]

    def save(self) -> None:
        """Writes or replaces the device's file in the user's cache; prints a note if the cache is not writable."""
        path = _path(self.device)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps(asdict(self), indent=1))
            part.replace(path)
        except OSError as error:
            print(f"{path}: {error.strerror}; only the report has the measurements", flush=True)


def begin(device: str, report: Path) -> Calibration:
    """Makes an empty calibration with the path of its report, today's date (UTC) and the installed versions."""
    return Calibration(device, report=str(report), made=f"{datetime.now(UTC):%Y-%m-%d}", versions=_versions())


def load(device: str) -> Calibration:
    """Loads the calibration of a kind of device from its file in the user's cache.

    Returns an empty calibration if there is no file. If the file cannot be read, or was made with other packages or
    another version of the kit's code, the result is empty too, and its `ignored` says why.
    """
    path = _path(device)
    try:
        saved = Calibration(**json.loads(path.read_text()))
        differ = {name: now for name, now in _versions().items() if saved.versions.get(name) != now}
    except FileNotFoundError:
        return Calibration(device)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return Calibration(device, ignored=f"{path} is ignored, because it cannot be read ({error}): run {_AGAIN}")
    if differ:
        old = ", ".join(f"{name} {saved.versions.get(name)} (now {now})" for name, now in differ.items())
        text = f"measurements of {saved.made} are ignored, because they were made with {old}: run {_AGAIN}"
        return Calibration(device, ignored=text)
    return saved


def _path(device: str) -> Path:
    """Returns the path of a device's calibration in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "tpu_kit" / "calibration" / f"{device}.json"


def _versions() -> dict[str, str | None]:
    """Returns the installed versions of `PACKAGES`, None if absent, and a hash of the kit's code."""
    return {name: installed_version(name) for name in PACKAGES} | {"tpu_kit's code": _code()}


@cache
def _code() -> str:
    """Returns a hash of all Python files of the kit, as 12 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
