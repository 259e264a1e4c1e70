"""What images add to a training step by formula: the tensors of their batch, a tower's tensors, and its work.

A pass computes the features of all K images of its rows at once. `activation_memory` and `cost` add the figures to
theirs; the weights of a tower are among those of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from tpu_kit.config.loader import ModelConfig, TrainConfig
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.planning.memory.argument_memory import padded

TOWER_WORK = 1.3
"""Bytes in HBM for each byte of a tower's layer: its states, queries, keys, values and both inputs of its MLP."""


@dataclass(frozen=True)
class ImageShape:
    """The images of a row.

    Attributes:
        room: K.
        tokens: of an image at most.
        patches: of an image, with padding.
        columns: shape and bytes of an element of each further tensor of a row.
        tower: rows and columns of the matrices that each patch is multiplied with.
        projector: of those that each soft token is multiplied with.
        layers: of the tower, 0 without one.
        size: of the tower's states.
        numbers: of a patch.
        hidden: size of the text model's states.
        tiles: whether they are tiles of pictures.
    """

    room: int
    tokens: int
    patches: int
    columns: tuple[tuple[tuple[int, ...], int], ...]
    tower: tuple[tuple[int, int], ...]
    projector: tuple[tuple[int, int], ...]
    layers: int
    size: int
    numbers: int
    hidden: int
    tiles: bool

    def batch_bytes(self, rows: int) -> int:
        """The tensors of images in the batch of a pass."""
        return sum(padded((rows, *shape), size, free=True) for shape, size in self.columns)

    def work_bytes(self, rows: int, length: int, compute: int) -> float:
        """Bytes alive while the features of a pass are computed: in a layer of the tower, or as features."""
        patches = rows * self.room * self.patches
        widest = max((max(pair) for pair in self.tower), default=0)
        tower = TOWER_WORK * compute * patches * (4 * self.size + 2 * widest) if self.layers else 0.0
        pixels = 4.0 * patches * self.numbers
        soft = rows * self.room * self.tokens
        features = compute * (soft * self.hidden + soft * length + rows * length * self.hidden)
        return max(tower + compute * patches * self.size, pixels, features)

    def flops(self, length: int, trained: bool) -> float:
        """Of an image: its tower forward, the projector, also backward where it is `trained`, and the one-hot product.

        A tower's patches all see each other.
        """
        times = 3 if trained else 1
        tower = self.patches * sum(map(math.prod, self.tower)) + 2 * self.layers * self.patches**2 * self.size
        projector = times * self.tokens * sum(map(math.prod, self.projector))
        return 2.0 * (tower + projector + (1 + trained) * length * self.tokens * self.hidden)

    def ends(self) -> int:
        """Elements of an image in the inputs and outputs of the matrices."""
        return self.patches * sum(map(sum, self.tower)) + self.tokens * sum(map(sum, self.projector))

    @property
    def weights(self) -> int:
        """Elements of the matrices."""
        return sum(map(math.prod, (*self.tower, *self.projector)))


def images_of(config: TrainConfig) -> ImageShape | None:
    """Returns the images of a run's rows; None for text."""
    data = config.data
    if not config.model.images:
        return None
    return _images_of(config.model, data.max_length, data.images_per_row, data.image_tokens)


@lru_cache(32)
def _images_of(model: ModelConfig, length: int, room: int | None, tokens: int | None) -> ImageShape:
    from tpu_kit.model.families import vision
    from tpu_kit.model.weights.source import settings_of

    settings, shape = settings_of(model), read_shape(model)
    sizes = vision.sizes_of(settings, tokens)
    room = room or max(1, length // sizes.tokens)
    columns = vision.columns(settings, room, length, tokens).values()
    tower, projector = (tuple((size[0], size[1]) for _, size in part) for part in (shape.tower, shape.projector))
    config = settings.vision_config
    return ImageShape(
        room, sizes.tokens, sizes.patches, tuple((size, dtype.itemsize) for size, dtype in columns),
        tower, projector, config.num_hidden_layers if tower else 0, getattr(config, "hidden_size", 0) if tower else 0,
        sizes.numbers, shape.hidden, settings.model_type in ("smolvlm", "idefics3"),
    )  # fmt: skip
