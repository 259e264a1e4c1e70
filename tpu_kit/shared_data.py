"""Data that one process of a host prepares, and that the other replicas of the host read from its files.

The arrays are memory-mapped: the host holds them once, however many replicas it has.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from datasets import config as datasets_config

from tpu_kit.config import DataConfig, TrainConfig
from tpu_kit.data import DataReport, Prepared
from tpu_kit.encoder import Encoder, Kept
from tpu_kit.formats import Layout
from tpu_kit.packing import PackedDataset
from tpu_kit.runtime import Runtime


def prepare_once(config: TrainConfig, rt: Runtime, tokenizer: Any, make: Callable[[], Prepared]) -> Prepared:
    """Prepare the data in one replica of each host, and read it in all of them.

    Where preparing fails, its error ends the launch, and with it the replicas that wait.

    Args:
        config: the run.
        rt: the replica.
        tokenizer: this replica's; it gets the chat template that the data was prepared with.
        make: prepares the data.
    """
    run = json.dumps([str(config.output_path.absolute()), config.to_dict()["model"], config.to_dict()["data"]])
    name = hashlib.blake2b(run.encode(), digest_size=16).hexdigest()
    folder = Path(datasets_config.HF_DATASETS_CACHE) / "tpu_kit" / "prepared" / name
    if rt.local_rank == 0:
        write_prepared(make(), folder)
    rt.barrier()
    prepared = read_prepared(folder, tokenizer, config.data)
    rt.barrier()
    if rt.local_rank == 0:
        shutil.rmtree(folder)  # what is mapped stays until the replicas end
    return prepared


def write_prepared(prepared: Prepared, folder: Path) -> None:
    """Write what `prepare` returned; the folder replaces an earlier one once it is whole."""
    made = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    made.mkdir(parents=True)
    try:
        for part, packed in (("train", prepared.train), ("eval", prepared.eval)):
            for name, array in (packed.arrays() if packed else {}).items():
                np.save(made / f"{part}-{name}.npy", array, allow_pickle=False)
        document = {
            "pad_id": prepared.train.pad_id,
            "eval_rows": prepared.eval_rows,
            "eval_prompts": prepared.eval_prompts,
            "report": asdict(prepared.report),
            "eval_report": prepared.eval_report and asdict(prepared.eval_report),
            "layout": asdict(prepared.encoder.layout),
            "chat_template": prepared.encoder.tokenizer.chat_template,
            "fingerprint": prepared.fingerprint,
        }
        # Cells that JSON has not, such as dates of Parquet, are text in the held-out rows.
        (made / "prepared.json").write_text(json.dumps(document, default=str))
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def read_prepared(folder: Path, tokenizer: Any, config: DataConfig) -> Prepared:
    """Return what `write_prepared` wrote, its arrays memory-mapped."""
    document = json.loads((folder / "prepared.json").read_text())

    def packed(part: str) -> PackedDataset | None:
        arrays = {
            path.stem.removeprefix(f"{part}-"): np.load(path, mmap_mode="r", allow_pickle=False)
            for path in folder.glob(f"{part}-*.npy")
        }
        return PackedDataset.from_arrays(arrays, config.max_length, document["pad_id"]) if arrays else None

    train = packed("train")
    assert train is not None
    tokenizer.chat_template = document["chat_template"]
    layout = {name: _tuple(value) for name, value in document["layout"].items()}
    return Prepared(
        train=train,
        eval=packed("eval"),
        eval_rows=document["eval_rows"],
        eval_prompts=document["eval_prompts"],
        report=_report(document["report"]),
        eval_report=document["eval_report"] and _report(document["eval_report"]),
        encoder=Encoder(tokenizer, Layout(**layout), config),
        fingerprint=document["fingerprint"],
    )


def _report(values: dict[str, Any]) -> DataReport:
    plain = {name: _tuple(value) for name, value in values.items()}
    return DataReport(**{**plain, "reasoning": Kept(*values["reasoning"])})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
