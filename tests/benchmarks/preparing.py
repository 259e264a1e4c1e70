"""Measures the time and memory to prepare rows: `python -m tests.benchmarks.preparing`.

`--rows 1000000` adds that many rows to the 10,000 and 100,000 rows. Each row is a chat with one question and one reply
in made-up words, about 90 tokens of a BPE tokenizer with 8,000 tokens. Each measurement is a fresh process with an
empty cache, and one or two tokenising processes. `prepare` reads the file, tokenises and packs its rows. TRL's
`SFTTrainer` does the same in its constructor: it loads the file, masks by the same chat template
(`assistant_only_loss`) and packs. Nothing is trained.

Memory is anonymous memory beyond the loaded libraries. It is sampled every 10 ms for the preparing process, and every
200 ms for all processes together, with pages shared by forks counted once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.child_processes import REPOSITORY, child_environment
from tests.support.peak_memory import held

ROWS, LENGTH, WORDS, VOCABULARY = (10_000, 100_000), 1024, 5_000, 8_000
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Measured:
    """A preparation.

    Attributes:
        by: "tpu_kit" or "trl".
        rows: Rows prepared.
        tokens: Tokens in the rows.
        processes: Tokenising processes.
        seconds: Wall time until all rows are packed.
        processor: Processor seconds of all processes.
        alone: Peak bytes of the preparing process, beyond the libraries.
        all: Peak bytes of all processes, beyond the libraries.
        left: Bytes that the process holds at the end, beyond the libraries.
    """

    by: str
    rows: int
    tokens: int
    processes: int
    seconds: float
    processor: float
    alone: int
    all: int
    left: int

    def __str__(self) -> str:
        return (
            f"| {self.rows:,} | {self.tokens / 1e6:.1f} M | {self.by}, {self.processes} | {self.seconds:.1f} | "
            f"{self.processor:.1f} | {self.rows / self.seconds:,.0f} | {self.alone / 1e9:.2f} | "
            f"{self.alone / self.tokens:.1f} | {self.all / 1e9:.2f} | {self.left / self.tokens:.1f} |"
        )


HEADER = (
    "| rows | tokens | by, processes | seconds | processor seconds | rows a second | GB | bytes a token | "
    "GB, all processes | bytes a token in the end |\n|" + "---:|" * 10
)


def write_rows(path: Path, count: int) -> None:
    """Writes chats of made-up words, all different."""
    generator = np.random.default_rng(0)
    parts = ["ba", "ke", "ri", "to", "lun", "mer", "sta", "vi", "no", "pra", "del", "su", "gor", "hin", "ta", "wel"]
    lengths = generator.integers(1, 4, WORDS)
    words = np.array(["".join(generator.choice(parts, length)) for length in lengths.tolist()])
    with path.open("w") as file:
        for number in range(count):
            asked, told = generator.integers(8, 24), int(generator.lognormal(3.5, 0.5)) + 4
            text = " ".join(words[np.minimum(generator.zipf(1.3, asked + told), WORDS) - 1])
            place = text.index(" ", len(text) // 3)
            turns = [("user", f"{number} {text[:place]}?"), ("assistant", f"{text[place + 1 :]}.")]
            file.write(json.dumps({"messages": [{"role": role, "content": said} for role, said in turns]}) + "\n")


def write_tokenizer(rows: Path, folder: Path) -> None:
    """Trains a byte-level BPE tokenizer on some of the rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    with rows.open() as file:
        chats = [json.loads(line)["messages"] for line in islice(file, 5_000)]
    texts = [turn["content"] for chat in chats for turn in chat]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=special)
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


# ------------------------------------------------------------------------------------------------------ in the children


def _ours(rows: str, tokenizer: Any, processes: int) -> Callable[[], int]:
    from tpu_kit.config.loader import DataConfig
    from tpu_kit.data.prepare import prepare

    data = DataConfig(source=rows, max_length=LENGTH, num_proc=processes)
    kept = []

    def run() -> int:
        prepared = prepare(data, tokenizer)
        kept.append(prepared)
        return prepared.report.tokens

    return run


def _trl(rows: str, tokenizer: Any, processes: int) -> Callable[[], int]:
    from datasets import load_dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes))
    args = SFTConfig(
        output_dir=str(Path(rows).parent / "trl"), max_length=LENGTH, packing=True, assistant_only_loss=True,
        dataset_num_proc=processes if processes > 1 else None, report_to=[], use_cpu=True, bf16=False,
    )  # fmt: skip
    kept = []

    def run() -> int:
        loaded = load_dataset("json", data_files=rows, split="train")
        trainer = SFTTrainer(model=model, args=args, train_dataset=loaded, processing_class=tokenizer)
        kept.append(trainer)
        lengths = trainer.train_dataset.data.column("seq_lengths")
        return sum(int(np.asarray(chunk.flatten()).sum()) for chunk in lengths.chunks)

    return run


def child(by: str, rows: str, tokenizer: str, processes: int) -> None:
    """Prepares rows when the parent says so, and prints the measurements."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    run = {"tpu_kit": _ours, "trl": _trl}[by](rows, AutoTokenizer.from_pretrained(tokenizer), processes)
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.perf_counter(), _processor()
    before = held()
    tokens = run()
    took = {"seconds": time.perf_counter() - begun[0], "processor": _processor() - begun[1]}
    print(json.dumps({"tokens": tokens, "left": held() - before, **took}), flush=True)


def _processor() -> float:
    each = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in each)


# ------------------------------------------------------------------------------------------------------- in the parent


class Memory:
    """Records the peak memory of a process, and of the process with all its descendants."""

    def __init__(self, process: int) -> None:
        self._process, self._ended = process, threading.Event()
        self._first = held(process), self._all()
        self.most = [0, 0]
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        count = 0
        while not self._ended.wait(0.01):
            try:
                self.most[0] = max(self.most[0], held(self._process) - self._first[0])
                if count % 20 == 0:
                    self.most[1] = max(self.most[1], self._all() - self._first[1])
            except (OSError, StopIteration):  # the process has ended
                return
            count += 1

    def _all(self) -> int:
        return sum(map(_shared_once, _with_children(self._process)))

    def end(self) -> tuple[int, int]:
        """Stops and returns both peaks, in bytes."""
        self._ended.set()
        self._thread.join()
        return self.most[0], max(self.most)


def _with_children(process: int) -> Iterator[int]:
    yield process
    try:
        for task in Path(f"/proc/{process}/task").iterdir():
            for started in (task / "children").read_text().split():
                yield from _with_children(int(started))
    except OSError:  # the process has ended
        return


def _shared_once(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon"))


def measure(by: str, rows: Path, count: int, tokenizer: Path, processes: int) -> Measured:
    """Prepares the rows of a file in a new process."""
    with tempfile.TemporaryDirectory(dir=rows.parent) as cache:
        caches = {"HF_HOME": cache, "HF_DATASETS_CACHE": f"{cache}/datasets", "PYTHONPATH": str(REPOSITORY)}
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.preparing",
            "--child",
            by,
            str(rows),
            str(tokenizer),
            str(processes),
        ]
        started = subprocess.Popen(
            command, env=child_environment(caches), cwd=REPOSITORY, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert started.stdin and started.stdout
        while started.stdout.readline() not in ("ready\n", ""):
            pass
        memory = Memory(started.pid)
        started.stdin.write("go\n")
        started.stdin.flush()
        lines = [line for line in started.stdout if line.startswith("{")]
        alone, all_of_them = memory.end()
        assert started.wait() == 0, by
    return Measured(by=by, rows=count, processes=processes, alone=alone, all=all_of_them, **json.loads(lines[-1]))


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.preparing", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="further numbers of rows")
    parser.add_argument("--only", type=int, nargs="*", default=ROWS, help="in place of 10,000 and 100,000")
    parser.add_argument("--by", nargs="*", default=["tpu_kit", "trl"])
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        by, rows, tokenizer, processes = given.child
        child(by, rows, tokenizer, int(processes))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        versions = [f"{package} {version(package)}" for package in ("trl", "datasets", "tokenizers")]
        print(f"{os.cpu_count()} processors; {', '.join(versions)}")
        print(HEADER)
        for count in (*given.only, *given.rows):
            write_rows(folder / "rows.jsonl", count)
            write_tokenizer(folder / "rows.jsonl", folder / "tokenizer")
            for processes in given.processes:
                pair = [measure(by, folder / "rows.jsonl", count, folder / "tokenizer", processes) for by in given.by]
                for one in pair:
                    print(json.dumps(asdict(one)) if given.json else one, flush=True)
                if len(pair) == 2:
                    ratios = pair[1].seconds / pair[0].seconds, pair[1].processor / pair[0].processor
                    print("rows a second: {:.2f} times TRL's; a processor second: {:.2f}".format(*ratios), flush=True)


if __name__ == "__main__":
    main()
