"""Files with a teacher's top logits for all training rows, for distillation without the teacher in memory.

For every token of a packed row they have the ids of the k likeliest tokens, their log-probabilities at the run's
temperature, and the log-probability of all other tokens together. A file has a block of rows. The folder's name depends
on teacher, data and settings, so runs do not read each other's files by mistake.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tpu_kit.config.loader import ModelConfig, TrainConfig
from tpu_kit.data.prepare import MappedData, Prepared, on_disk
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.replica import runtime
from tpu_kit.machine.chips import GIB, MIB
from tpu_kit.machine.storage import atomic
from tpu_kit.model import causal_lm as models
from tpu_kit.model import preparation, trainable
from tpu_kit.model.loop.activation_checkpointing import tiles_of
from tpu_kit.model.weights.base_identity import Identity, fingerprint
from tpu_kit.model.weights.loading import load_frozen
from tpu_kit.model.weights.source import read_config
from tpu_kit.training.losses.distillation import top_log_probabilities
from tpu_kit.training.losses.loss import head_outputs
from tpu_kit.xla.scan import Tensors, scan

_FILE_BYTES = 64 * MIB


@dataclass(frozen=True)
class TeacherFiles:
    """The files of a run.

    Attributes:
        folder: their folder, below `distill.files`.
        rows: number of packed rows of the training data.
        length: tokens per row.
        k: logits per token.
    """

    folder: Path
    rows: int
    length: int
    k: int

    @classmethod
    def of(cls, config: TrainConfig, prepared: Prepared, teacher: Identity | None) -> TeacherFiles | None:
        """Returns the files of a run, whether they exist or not; None without `distill.files`.

        `teacher` is the identity of the teacher's weights, on which the folder's name depends.
        """
        distill = config.distill
        if distill.files is None:
            return None
        about = {
            "teacher": fingerprint(teacher), "teacher_dtype": distill.teacher_dtype,
            "data": prepared.train.fingerprint(), "top_k": distill.top_k, "temperature": distill.temperature,
        }  # fmt: skip
        key = hashlib.blake2b(json.dumps(about).encode(), digest_size=6).hexdigest()
        folder = Path(distill.files).expanduser() / key
        return cls(folder, len(prepared.train), config.data.max_length, distill.top_k)

    @property
    def row_bytes(self) -> int:
        """Bytes per row: per token an int32 and an fp32 for the top k, and an fp32 for the other tokens."""
        return self.length * (8 * self.k + 4)

    @cached_property
    def blocks(self) -> dict[Path, np.ndarray]:
        """Path of a file -> the numbers of its packed rows."""
        most = max(1, _FILE_BYTES // self.row_bytes)
        blocks = np.split(np.arange(self.rows), range(most, self.rows, most))
        names = (f"logits-{number:05d}-of-{len(blocks):05d}.safetensors" for number in range(len(blocks)))
        return dict(zip(map(self.folder.joinpath, names), blocks, strict=True))

    def missing(self) -> list[Path]:
        """Returns the paths of the files that are missing or incomplete; contents are not checked."""
        return [path for path in self.blocks if not _is_complete(path)]

    def columns(self) -> dict[str, Callable[[np.ndarray], torch.Tensor]]:
        """Returns readers of "top_ids" (S * k numbers per row) and "top_log_p" (S * (k + 1)).

        A reader takes numbers of packed rows and returns a CPU tensor with these rows, int32 or fp32; the number -1
        gives a row of 0. It reads the files, which must exist. A token's last number in "top_log_p" is for all others.
        """
        opened = cache(partial(safe_open, framework="pt"))
        places = {int(row): (path, index) for path, rows in self.blocks.items() for index, row in enumerate(rows)}

        def read(name: str, rows: np.ndarray) -> torch.Tensor:
            found = [places[max(0, row)] for row in rows.tolist()]
            column = torch.stack([opened(path).get_slice(name)[index] for path, index in found])
            return torch.where(torch.from_numpy(rows >= 0)[:, None], column, 0)

        return {name: partial(read, name) for name in ("top_ids", "top_log_p")}


def read_columns(config: TrainConfig, files: TeacherFiles) -> dict[str, Callable[[np.ndarray], torch.Tensor]]:
    """Returns `TeacherFiles.columns`, for a run's batches; raises ValueError if a file does not exist."""
    if absent := [path for path in files.blocks if not path.is_file()]:
        raise ValueError(
            f"distill.files={config.distill.files} lacks {len(absent)} of {len(files.blocks)} files, such as "
            f"{absent[0]}; run `distill`, which computes them"
        )
    return files.columns()


def prepare_files(config: TrainConfig, prepared: Prepared, files: TeacherFiles, teacher: ModelConfig) -> None:
    """Computes the missing files of a run with its teacher, in a separate launch; prints their size first.

    `teacher` is the teacher's configuration. Without missing files it starts no launch, and prints "complete".

    Raises:
        ValueError: the files do not fit on the disk, or from `launch`.
    """
    files.folder.mkdir(parents=True, exist_ok=True)
    absent = files.missing()
    rows = sum(len(files.blocks[path]) for path in absent)
    size, free = rows * files.row_bytes, shutil.disk_usage(files.folder).free
    text = f"{rows:,} rows x {files.length} tokens x {files.k} logits = {size / GIB:.2f} GiB in {files.folder}"
    if size > free:
        raise ValueError(
            f"distill.files: {text}, which has {free / GIB:.2f} GiB free; lower distill.top_k, or name another folder"
        )
    print(f"teacher files    {text}" if absent else f"teacher files    complete in {files.folder}", flush=True)
    if absent:
        with on_disk(prepared) as data:
            launch(partial(_compute, data, files, teacher), config, sharded=True)


def _compute(data: MappedData, files: TeacherFiles, model: ModelConfig, config: TrainConfig) -> None:
    """Computes missing files with a teacher on the replica's device; a replica of N takes every N-th missing file."""
    rt, prepared = runtime.current(), data.read()
    teacher, _ = runtime.load_once(rt, lambda: (trainable.freeze(load_frozen(model), model.base_dtype), None))
    preparation.prepare_frozen(teacher, config, rt.device_type)
    models.to_device(teacher, rt.local_device)
    rt.sync()
    assert isinstance(config.optim.batch_size, int)
    at_once = config.optim.batch_size * rt.data_size // rt.world_size
    for path in files.missing()[rt.rank :: rt.world_size]:
        batches: list[list[torch.Tensor]] = []
        rows = files.blocks[path]
        for start in range(0, len(rows), at_once):
            taken = rows[start : start + at_once]
            padded = np.r_[taken, np.full(at_once - len(taken), -1)]
            (batch,) = rt.to_device([prepared.train.tensors(padded)])
            with torch.no_grad():
                top = _top(teacher, batch, config)
            rt.sync()
            batches.append([column[: len(taken)] for column in rt.to_host(top)])
        ids, log_p = (torch.cat(parts).contiguous() for parts in zip(*batches, strict=True))
        with atomic.replacing(path, shared=True) as part:
            save_file({"top_ids": ids, "top_log_p": log_p}, part)
        print(f"teacher files    {path.name} written", flush=True)
    rt.barrier()


def _top(teacher: Any, batch: dict[str, torch.Tensor], config: TrainConfig) -> list[torch.Tensor]:
    """Returns top_ids (B, S * k) and top_log_p (B, S * (k + 1)) of a batch, computed chunk by chunk."""
    states, head, k = models.hidden_states(teacher, batch), models.output_embedding(teacher), config.distill.top_k
    configs = filter(None, (read_config(side) for side in (config.model, config.teacher) if side is not None))
    size = min((whole.get_text_config().vocab_size for whole in configs), default=None)  # of the shorter vocabulary
    shape = states.shape[:2]
    parts = tiles_of(shape[1], max(1, config.optim.loss_chunk // shape[0]))
    chunks = states.unflatten(1, (parts, -1)).transpose(0, 1).flatten(1, 2)

    def body(carry: Tensors, inputs: Tensors) -> tuple[Tensors, Tensors]:
        logits = head.scaled(head_outputs(inputs[0], **dict(zip(head.tensors, carry, strict=True))))[:, :size]
        ids = torch.topk(logits, k, dim=-1).indices
        return carry, [ids.to(torch.int32), top_log_probabilities(logits, ids, config.distill.temperature)]

    _, columns = scan(body, [tensor.to(states.dtype) for tensor in head.tensors.values()], [chunks])
    return [column.unflatten(1, (shape[0], -1)).transpose(0, 1).flatten(1) for column in columns]


def _is_complete(path: Path) -> bool:
    """Whether a file exists with the length in its header; files are written atomically."""
    try:
        with safe_open(path, "pt"):
            return True
    except (SafetensorError, OSError):
        return False
