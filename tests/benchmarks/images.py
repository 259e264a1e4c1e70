"""Measures the time to prepare rows with pictures, and the pictures decoded per second.

`python -m tests.benchmarks.images [--images 100000] [--decoded 2000] [--json]`. Each row asks about one JPEG, with the
settings of Gemma 4 12B's processor (280 tokens at most). The files have 200 different contents of 640 x 480 pixels,
which stay in the page cache, so disk time is not measured. Rows are prepared twice: the second time their tokens are
cached, and only the files are compared. Decoding makes batches of eight packed rows with a run's thread pool.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import datasets
import numpy as np
from PIL import Image

from tests.support.peak_memory import PeakMemory
from tests.support.vision_models import save_model, tokenizer_of
from tpu_kit.config.loader import DataConfig, ModelConfig
from tpu_kit.data.prepare import Prepared, prepare
from tpu_kit.machine.chips import GIB, MIB

CONTENTS, SIZE, LENGTH, ROWS = 200, (640, 480), 2048, 8
FAMILY = "gemma4_unified"


@dataclass(frozen=True)
class Report:
    """All measurements.

    Attributes:
        images: Pictures prepared.
        cores: Cores available to this process.
        file_bytes: Mean size of a picture.
        first: Seconds of the first preparation.
        again: Seconds of the second preparation.
        memory: Bytes that the first preparation allocated in this process.
        workers: Resident bytes of the largest tokenising process, libraries included; 0 without processes.
        decoded: Pictures in the batches.
        seconds: Seconds to make the batches.
    """

    images: int
    cores: int
    file_bytes: int
    first: float
    again: float
    memory: int
    workers: int
    decoded: int
    seconds: float

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.images:,} pictures of {self.file_bytes / 1024:.0f} KiB, {self.cores} cores",
                f"prepared         {self.first:.1f} s, {self.images / self.first:,.0f} pictures a second",
                f"prepared again   {self.again:.1f} s",
                f"memory           {self.memory / GIB:.2f} GiB more, {self.workers / MIB:,.0f} MiB in a worker",
                f"decoded          {self.decoded / self.seconds:,.0f} pictures a second, of {self.decoded:,}",
            ]
        )


def write_model(folder: Path) -> ModelConfig:
    """Writes the files that preparation reads from a model, with Gemma 4's picture sizes."""
    save_model(folder, FAMILY)
    for name, changes in (
        ("preprocessor_config.json", {"patch_size": 16, "max_soft_tokens": 280}),
        ("config.json", {"patch_size": 16, "num_soft_tokens": 280}),
    ):
        settings = json.loads((folder / name).read_text())
        settings.get("vision_config", settings).update(changes | {"model_patch_size": 48})
        (folder / name).write_text(json.dumps(settings))
    return ModelConfig(name=str(folder), base_dtype="fp32", images=True)


def write_rows(folder: Path, images: int) -> int:
    """Writes rows and their pictures; returns the mean bytes of a picture."""
    generator, sizes = np.random.default_rng(0), list[int]()
    for number in range(images):
        path, first = folder / f"{number}.jpg", folder / f"{number % CONTENTS}.jpg"
        if number >= CONTENTS:
            os.link(first, path)
            continue
        coarse = generator.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        path.write_bytes(buffer.getvalue())
        sizes.append(path.stat().st_size)
    rows = ({"question": f"What is {n}?", "answer": f"It is {n}.", "image": f"{n}.jpg"} for n in range(images))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sum(sizes) // len(sizes)


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Appends the seconds of a block."""
    begun = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - begun)


def measure(folder: Path, images: int, decoded: int) -> Report:
    """Prepares rows twice and decodes some of them."""
    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    model, size = write_model(folder / "model"), write_rows(folder, images)
    config, seconds = DataConfig(source=str(folder / "rows.jsonl"), eval_rows=0, max_length=LENGTH), list[float]()

    def prepared() -> Prepared:
        with timed(seconds):
            return prepare(config, tokenizer_of(FAMILY), model=model)

    with PeakMemory() as memory:
        prepared()
    workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    data = prepared().train
    used, count = np.arange(0), 0
    while count < min(decoded, images) and len(used) < len(data):
        used = np.arange(len(used) + ROWS)[: len(data)]
        count = sum(len(data.documents_of(int(row))) for row in used)
    with timed(seconds):
        for start in range(0, len(used), ROWS):
            data.tensors(used[start : start + ROWS])
    first, again, decoding = seconds
    cores = len(os.sched_getaffinity(0))
    return Report(images, cores, size, first, again, memory.most - memory.before, workers, count, decoding)


def main() -> None:
    """Measures and prints a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--decoded", type=int, default=2_000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), given.images, given.decoded)
    print(json.dumps(asdict(report)) if given.json else report)


if __name__ == "__main__":
    main()
