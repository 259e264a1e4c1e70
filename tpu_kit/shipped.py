"""The shapes of some models of the hub, so that they are planned without a network, and before access is granted.

assets/shapes.json has of each what its config.json says of sizes; no weights.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tpu_kit.config import ModelConfig


@cache
def shipped_shapes() -> dict[str, dict[str, Any]]:
    """The config.json of every model that is known here, by its name on the hub."""
    found: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "assets/shapes.json").read_text())
    return found


def shipped_shape(model: ModelConfig) -> dict[str, Any] | None:
    """The config.json of a model; None where it is not known here, a folder has that name, or a revision is wanted."""
    if model.revision is not None or Path(model.name).is_dir():
        return None
    return shipped_shapes().get(model.name)
