"""Cost of a model's image inputs in a training step, by formula: tensors of the batch, bytes and FLOPs.

A pass computes the features of all K images of its rows at once. The tower's weights count as weights of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from tpu_kit.config.loader import ModelConfig, TrainConfig
from tpu_kit.model.shape_cache import shape_of
from tpu_kit.model.weights.source import settings_of

if TYPE_CHECKING:
    import torch

TOWER_WORK = 1.3
"""Bytes in HBM for each byte of a tower's layer: its states, queries, keys, values and both inputs of its MLP."""


@dataclass(frozen=True)
class InputWork:
    """The inputs of a row besides its text: K images.

    Attributes:
        name: the inputs' name in plans.
        kind: a noun phrase for one input, such as "A picture".
        room: K, the number of image slots of a row.
        tokens: maximum of soft tokens of an image.
        patches: patches of an image, with padding.
        columns: name -> shape and dtype of each image tensor of a row.
        tower: rows and columns of the matrices that multiply each patch.
        projector: rows and columns of the matrices that multiply each soft token.
        layers: layers of the tower, 0 without a tower.
        size: hidden size of the tower.
        numbers: values of a patch.
        hidden: hidden size of the text model.
        length: tokens of a row.
        trains: whether adapters of the projector are trained.
    """

    name: str
    kind: str
    room: int
    tokens: int
    patches: int
    columns: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    tower: tuple[tuple[int, int], ...]
    projector: tuple[tuple[int, int], ...]
    layers: int
    size: int
    numbers: int
    hidden: int
    length: int
    trains: bool

    def work_bytes(self, rows: int, compute: int) -> float:
        """Returns the peak memory in bytes of the features of `rows` rows, with `compute` bytes per value.

        This is the most of three sums: values and output of a tower layer; fp32 pixels; features, one-hot rows,
        products.
        """
        patches = rows * self.room * self.patches
        widest = max((max(pair) for pair in self.tower), default=0)
        tower = TOWER_WORK * compute * patches * (4 * self.size + 2 * widest) if self.layers else 0.0
        pixels = 4.0 * patches * self.numbers
        soft = rows * self.room * self.tokens
        features = compute * (soft * self.hidden + soft * self.length + rows * self.length * self.hidden)
        return max(tower + compute * patches * self.size, pixels, features)

    def flops(self) -> float:
        """Returns the FLOPs of an image: the tower's forward pass, the projector and the one-hot product.

        If `trains`, the backward passes of the projector and the product are added. All patches of a tower attend to
        each other. The tower is not traced like text layers: its sizes depend on the run, so every plan would trace it.
        """
        times = 3 if self.trains else 1
        tower = self.patches * sum(map(math.prod, self.tower)) + 2 * self.layers * self.patches**2 * self.size
        projector = times * self.tokens * sum(map(math.prod, self.projector))
        return 2.0 * (tower + projector + (1 + self.trains) * self.length * self.tokens * self.hidden)

    def ends(self) -> int:
        """Returns the number of elements of an image in the inputs and outputs of the matrices."""
        return self.patches * sum(map(sum, self.tower)) + self.tokens * sum(map(sum, self.projector))

    @property
    def weights(self) -> int:
        """Number of elements of all matrices of the tower and the projector."""
        return sum(map(math.prod, (*self.tower, *self.projector)))


def inputs_of(config: TrainConfig) -> InputWork | None:
    """Returns the image inputs of a run's rows, None without images; raises ValueError for an unsupported family."""
    data = config.data
    if not config.model.images:
        return None
    return _inputs_of(config.model, data.max_length, data.images_per_row, data.image_tokens, config.lora.vision)


@lru_cache(32)
def _inputs_of(model: ModelConfig, length: int, room: int | None, tokens: int | None, trains: bool) -> InputWork:
    """Like `inputs_of`; `room` None: as many images as fit in `length` tokens; `tokens` None: the family's default."""
    from tpu_kit.model.families import vision  # loads torch

    settings, shape = settings_of(model), shape_of(model)
    sizes = vision.sizes_of(settings, tokens)
    room = room or max(1, length // sizes.tokens)
    columns = vision.columns(settings, room, length, tokens)
    tower, projector = (tuple((size[0], size[1]) for _, size in part) for part in (shape.tower, shape.projector))
    config, tiles = settings.vision_config, settings.model_type in ("smolvlm", "idefics3", "lfm2_vl")
    return InputWork(
        "images", "A tile of a picture" if tiles else "A picture", room, sizes.tokens, sizes.patches,
        columns, tower, projector,
        config.num_hidden_layers if tower else 0, getattr(config, "hidden_size", 0) if tower else 0,
        sizes.numbers, shape.hidden, length, trains,
    )  # fmt: skip
