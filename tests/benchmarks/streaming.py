"""Streams text at constant memory: `python -m tests.benchmarks.streaming [--tokens 1e8] [--files 8]`.

Synthetic texts are written into a temporary folder and streamed as in a run: a process tokenises and packs shards, and
this process reads their rows in the order of training. It prints both processes' anonymous memory (RssAnon; the kernel
can reclaim mapped files) over time, and the tokens per second of the first one's processor time.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from datasets import config as datasets_config

from tpu_kit.assets import embedded
from tpu_kit.config.loader import load_config
from tpu_kit.data.stream.feeder import feeding, shards_from
from tpu_kit.data.stream.opening import prepare_stream
from tpu_kit.data.stream.packed_shards import Place
from tpu_kit.model.weights.source import load_tokenizer

_BYTES_PER_TOKEN = 2.9  # for these texts and the embedded tokenizer
_ROWS = 16  # per update


def write_texts(folder: Path, size: int, files: int) -> None:
    """Writes JSON lines of `size` bytes in total, with texts of very different lengths."""
    draw, rows = random.Random(0), embedded.cot_rows("train", 2000)
    texts = [f"{row['question']} {row['reasoning']}" for row in rows]
    for number in range(files):
        written = 0
        with open(folder / f"{number:03}.jsonl", "w") as file:
            while written < size / files:
                text = "\n".join(draw.choices(texts, k=draw.choice([1, 2, 4, 8, 16, 40])))
                written += file.write(json.dumps({"text": text, "id": written}) + "\n")


def anonymous(process: psutil.Process) -> float:
    """Returns the anonymous memory of a process and its children, in MiB."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        with open(f"/proc/{one.pid}/status") as status:
            total += sum(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
    return total / 1024


def stream(folder: Path, tokens: float) -> list[dict[str, float]]:
    """Streams `tokens` tokens; returns the printed figures."""
    values: dict[str, Any] = {"source": str(folder / "*.jsonl"), "streaming": True, "max_steps": 1, "max_length": 1024}
    config = load_config(None, values)
    prepared = prepare_stream(config.data, load_tokenizer(config.model))
    print(prepared.report, flush=True)
    found, done, shown, begun = list[dict[str, float]](), 0, 0.0, time.monotonic()
    with feeding(prepared.stream, Place()) as fed:
        (child,) = psutil.Process().children()
        for number, shard in shards_from(fed, Place(), 0, 1):
            for first in range(0, len(shard.order), _ROWS):
                rows = shard.order[first : first + _ROWS]
                shard.data.tensors(rows)
                done += int(shard.data.row_tokens[rows].sum())
            if done >= shown:
                shown += tokens / 20
                times = sum(sum(one.cpu_times()[:2]) for one in [child, *child.children(recursive=True)])
                found.append({
                    "tokens": done, "shard": number, "seconds": time.monotonic() - begun, "process seconds": times,
                    "RssAnon of the process, MiB": anonymous(child),
                    "RssAnon of the reader, MiB": anonymous(psutil.Process()) - anonymous(child),
                    "files, MiB": sum(file.stat().st_size for file in fed.folder.rglob("*") if file.is_file()) / 2**20,
                })  # fmt: skip
                print(", ".join(f"{name} {value:,.0f}" for name, value in found[-1].items()), flush=True)
            if done >= tokens:
                break
    print(f"{done / found[-1]['process seconds']:,.0f} tokens in a second of processor time")
    return found


def main() -> None:
    """Parses the arguments and runs the stream."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=float, default=1e8)
    parser.add_argument("--files", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        datasets_config.HF_DATASETS_CACHE = Path(name, "cache")
        write_texts(Path(name), int(given.tokens * _BYTES_PER_TOKEN), given.files)
        stream(Path(name), given.tokens)


if __name__ == "__main__":
    main()
