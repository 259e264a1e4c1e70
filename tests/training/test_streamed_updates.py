"""A stream stopped anywhere and resumed, also by other replicas, trains the same rows as an uninterrupted stream."""

from __future__ import annotations

import json
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.support.tiny_tokenizer import tiny_tokenizer
from tpu_kit.config.loader import TrainConfig, batch_arithmetic, load_config
from tpu_kit.data.batching import Update
from tpu_kit.data.prepare import Prepared, prepare
from tpu_kit.data.stream import feeder, shards
from tpu_kit.data.stream.opening import prepare_stream
from tpu_kit.data.stream.packed_shards import Place, TextStream
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.training.streamed_updates import StreamUpdates
from tpu_kit.training.update_sources import NextUpdateError, Updates

ROWS = 8  # per update
AGREEMENT = cast(Any, SimpleNamespace(stopped_before=lambda step: False))


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes three files; the second has fewer packed rows than an update."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 90), ("b", 9), ("c", 60)):
        texts = [f"{name} {i}: " + "Two and three make five. " * (i * 7 % 11) for i in range(count)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def made(**settings: Any) -> tuple[TrainConfig, Prepared]:
    config = load_config(None, {"source": "*.jsonl", "streaming": True, "max_steps": 17, "max_length": 48,
                                "eval_rows": 5, "batch_size": 2, **settings})  # fmt: skip
    return config, prepare_stream(config.data, tiny_tokenizer())


def source(config: TrainConfig, prepared: Prepared, replicas: int = 1, rank: int = 0) -> StreamUpdates:
    config = replace(config, optim=replace(config.optim, gradient_accumulation=ROWS // 2 // replicas))
    rt = SimpleNamespace(rank=rank, local_rank=rank, world_size=replicas, num_hosts=1, data_shards=[rank])
    return StreamUpdates(config, prepared, batch_arithmetic(config, replicas), cast(Runtime, rt))


def rows_of(batches: list[dict[str, torch.Tensor]]) -> list[str]:
    return [str(row) for batch in batches for row in batch["input_ids"].tolist()]


def trained(updates: Updates, step: int = 0, last: int = 10**9) -> list[tuple[Update, int, list[str]]]:
    """Returns the updates after a step, with their tokens and rows."""
    found, made = [], updates.after(step, AGREEMENT)
    for update, tokens, batches in made:
        found.append((update, tokens, rows_of(batches)))
        if update.step == last:
            break
    made.close()  # type: ignore[attr-defined]  # a generator
    return found


def row_counts(prepared: Prepared) -> list[int]:
    """Returns the number of packed rows of each shard."""
    shards_of = feeder.shards_from(prepared.stream, Place(), 0, 1)
    return [len(next(shards_of)[1].order) for _ in range(prepared.stream.count)]


def test_an_epoch_has_each_row_once_and_loses_none() -> None:
    config, prepared = made(max_steps=40)
    updates = source(config, prepared)
    steps = trained(updates)
    rows = [row for _, _, found in steps for row in found]
    counts = row_counts(prepared)
    epoch = sum(counts)
    assert counts[1] < ROWS < counts[0] and 2 * epoch < len(rows) == 40 * ROWS
    assert len({*rows[:epoch]}) == epoch and {*rows[:epoch]} == {*rows[epoch : 2 * epoch]}
    assert rows[:epoch] != rows[epoch : 2 * epoch], "another order in each epoch"
    assert {*rows[: counts[0]]} & {*rows[counts[0] : epoch]} == set(), "shard after shard"
    assert [update.first_row for update, _, _ in steps] == [ROWS * i for i in range(40)]
    assert updates.epoch_after(steps[-1][0]) == pytest.approx(len(rows) / epoch, abs=0.3)
    metrics = updates.metrics([update for update, _, _ in steps])
    assert metrics == {"shard": float(updates._parts[40][-1].number % 3)}
    for place in updates.places(steps[-1][0]):
        assert place.partition(" of ")[2] in ("a.jsonl", "b.jsonl", "c.jsonl")
    assert not any(f"{row} of a.jsonl" in updates.places(update) for update, _, _ in steps for row in range(5))


def test_stopped_at_random_moments_it_trains_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, prepared = made()
    write, kept = TextStream.write, tmp_path / "kept"

    def copied(self: TextStream, number: int, target: Path) -> None:  # tokenises every shard only once
        if not (found := kept / str(number % self.count)).exists():
            write(self, number, found)
        shutil.copytree(found, target)

    monkeypatch.setattr(TextStream, "write", copied)
    whole = trained(source(config, prepared))
    draw, resumed = random.Random(0), 0
    for _ in range(14):
        step, document = 0, None
        while step < len(whole):
            replicas = draw.choice([1, 2, 4])
            last = min(len(whole), step + draw.randint(1, 6))
            parts = []
            for rank in range(replicas):
                updates = source(config, prepared, replicas, rank)
                if document is not None:
                    updates.restore(json.loads(document))
                parts.append(trained(updates, step, last))
            for number, (expected, *others) in enumerate(zip(whole[step:last], *parts, strict=True)):
                update, tokens, rows = expected
                assert {other[1] for other in others} == {tokens} and others[0][0].step == update.step
                passes = ROWS // 2 // replicas
                # In each pass, the rows of the replicas follow one another.
                joined = [row for i in range(passes) for _, _, mine in others for row in mine[2 * i : 2 * i + 2]]
                assert joined == rows, (step, number, replicas)
            step, document = last, json.dumps(updates.document(last))
            resumed += step < len(whole)
    assert resumed >= 50 and len([*kept.iterdir()]) == 3


def test_a_resume_reads_the_shard_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    config, prepared = made()
    counts = row_counts(prepared)
    updates = source(config, prepared)
    step = (counts[0] + counts[1]) // ROWS + 2  # in the third shard
    trained(updates, 0, step)
    read, write = list[int](), TextStream.write

    def noted(self: TextStream, number: int, target: Path) -> None:
        read.append(number)
        write(self, number, target)

    monkeypatch.setattr(TextStream, "write", noted)
    document = updates.document(step)
    again = source(config, prepared)
    again.restore(document)
    assert document == {"epoch": 0, "shard": 2, "row": step * ROWS - counts[0] - counts[1]}
    trained(again, step, step + 1)
    assert read[0] == 2 and {*read} <= {2, 3}


def test_an_update_that_ends_a_shard_goes_on_in_the_next() -> None:
    config, prepared = made()
    ends = len(next(feeder.shards_from(prepared.stream, Place(), 0, 1))[1].order)
    config = replace(config, optim=replace(config.optim, batch_size=1, max_steps=ends + 1))
    updates = StreamUpdates(config, prepared, batch_arithmetic(config, 1), source(config, prepared)._rt)
    trained(updates)
    assert updates.document(ends - 1) == {"epoch": 0, "shard": 0, "row": ends - 1}
    assert updates.document(ends) == {"epoch": 0, "shard": 1, "row": 0}


def test_a_batch_that_grows_takes_the_rows_in_order() -> None:
    settings = {"batch_growth_factor": 2, "batch_growth_steps": 2, "max_steps": 6}
    config, prepared = made(**settings)
    rows = [[row for _, _, found in trained(source(one, prepared)) for row in found] for one in (config, made()[0])]
    assert rows[0] == rows[1][: len(rows[0])] and len(rows[0]) == ROWS * (2 + 4 + 8)


@pytest.mark.parametrize("shuffle", [True, False])
def test_one_shard_is_the_first_epoch_of_the_rows_in_memory(shuffle: bool) -> None:
    settings = {"source": "a.jsonl", "eval_rows": 0, "shuffle": shuffle, "max_steps": 3}
    config, prepared = made(**settings)
    memory = replace(config, data=replace(config.data, streaming=False, format="text"))
    whole = prepare(memory.data, tiny_tokenizer())
    updates = source(config, prepared)
    other = Updates(memory, whole, updates._plan, updates._rt)
    assert [found[1:] for found in trained(updates)] == [found[1:] for found in trained(other)]


def fed(prepared: Prepared, folder: Path, place: Place) -> tuple[Prepared, threading.Thread]:
    """Feeds the stream like `feeder.feeding`, but from a thread."""
    folder.mkdir()
    thread = threading.Thread(target=feeder.feed, args=(prepared.stream, place, folder), daemon=True)
    thread.start()
    return replace(prepared, stream=replace(prepared.stream, folder=folder)), thread


def test_shards_are_made_ahead_for_all_replicas_and_then_removed(tmp_path: Path) -> None:
    config, prepared = made(max_steps=14)
    expected = [[found[1:] for found in trained(source(config, prepared, 2, rank))] for rank in (0, 1)]
    ahead, _ = fed(prepared, tmp_path / "fed", Place())
    streams = [source(config, ahead, 2, rank).after(0, AGREEMENT) for rank in (0, 1)]
    most, found = 0, [list[Any](), list[Any]()]
    for _ in range(14):
        for rank in (0, 1):
            _, tokens, batches = next(streams[rank])
            found[rank].append((tokens, rows_of(batches)))
        most = max(most, sum(path.is_dir() for path in (tmp_path / "fed").iterdir()))
    assert found == expected
    assert most <= 3, "those being read, and the next one or a part of it"


def test_a_run_that_is_to_stop_does_not_wait_for_a_shard(tmp_path: Path) -> None:
    config, prepared = made()
    updates = source(config, replace(prepared, stream=replace(prepared.stream, folder=tmp_path)))
    updates.restore({"epoch": 1, "shard": 2, "row": 0})
    asked = list[int]()
    stops = SimpleNamespace(stopped_before=lambda step: asked.append(step) or len(asked) > 3)
    ((update, tokens, batches),) = updates.after(6, cast(Any, stops))
    assert (update.step, tokens, batches) == (7, 0, []) and asked == [7] * 4


def test_a_shard_that_disappears_ends_the_run_before_the_update_that_needs_it(tmp_path: Path) -> None:
    config, prepared = made(max_steps=40)
    expected = trained(source(config, prepared))
    Path("c.jsonl").unlink()
    ahead, thread = fed(prepared, tmp_path / "fed", Place())
    updates, done = source(config, ahead), []
    with pytest.raises(NextUpdateError, match=r"data source \*.jsonl: c.jsonl has disappeared; put it back"):
        for update, tokens, batches in updates.after(0, AGREEMENT):
            done.append((update, tokens, rows_of(batches)))
    assert done == expected[: len(done)] and len(done) >= 5
    thread.join(5)
    assert not thread.is_alive()


def test_what_was_skipped_is_told_once_for_each_shard() -> None:
    Path("b.jsonl").write_text(Path("b.jsonl").read_text() + '{"text": null}\n')
    config, prepared = made(on_bad_row="skip", max_steps=40)
    updates = source(config, prepared)
    trained(updates)
    (said,) = updates.warnings({}, 40)
    assert said == "b.jsonl: 1 rows skipped (data.on_bad_row): b.jsonl, line 10: column 'text' is empty"
    assert updates.warnings({}, 40) == []


def test_a_process_that_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, prepared = made()
    monkeypatch.setattr(feeder.sys, "executable", "/bin/false")
    with feeder.feeding(prepared.stream, Place()) as stream:
        updates = source(config, replace(prepared, stream=stream))
        text = r"the process that tokenises data.source=\*.jsonl has ended with status 1; its output is printed above"
        with pytest.raises(NextUpdateError, match=text):
            trained(updates)
    assert stream.folder is not None and not stream.folder.exists()


@pytest.mark.slow
def test_the_process_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, prepared = made()
    expected = trained(source(config, prepared))
    with feeder.feeding(prepared.stream, Place()) as stream:
        assert trained(source(config, replace(prepared, stream=stream))) == expected
    monkeypatch.setattr(shards, "PART_BYTES", 1000)
    config, prepared = made()
    updates = source(config, prepared)
    expected = trained(updates)
    place = Place(**updates.document(9))
    with feeder.feeding(prepared.stream, place) as stream:
        again = source(config, replace(prepared, stream=stream))
        again.restore(place._asdict())
        assert trained(again, 9) == expected[9:]
