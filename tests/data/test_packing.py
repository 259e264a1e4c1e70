"""Packing keeps every token, and the order of rows does not depend on the number of replicas."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tpu_kit.data.batching import Documents, PackedDataset, best_fill, eval_batches, permutation, prefetch


def make_documents(lengths: list[int], seed: int = 0) -> Documents:
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    ids = rng.integers(1, 1000, total).astype(np.int32)
    return Documents(ids, rng.random(total) < 0.5, np.array(lengths), np.arange(len(lengths)) * 10)


def random_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, longest + 1, count).tolist()


def unpack(tensors: dict[str, torch.Tensor]) -> list[tuple[list[int], list[bool]]]:
    """Read documents back from a batch by segments alone, checking positions on the way."""
    found = []
    for i, row in enumerate(tensors["segment_ids"]):
        count = int(row.max())
        assert row.tolist() == sorted(row[row > 0].tolist()) + [0] * int((row == 0).sum())
        for segment in range(1, count + 1):
            here = row == segment
            ids, labels = tensors["input_ids"][i][here], tensors["labels"][i][here]
            assert tensors["position_ids"][i][here].tolist() == list(range(len(ids)))
            assert ((labels == ids) | (labels == -100)).all()
            found.append((ids.tolist(), (labels != -100).tolist()))
        assert (tensors["labels"][i][row == 0] == -100).all()
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_unpacking_gives_back_every_document(packing: bool) -> None:
    documents = make_documents(random_lengths(200, 64))
    data = PackedDataset(documents, 64, packing=packing, pad_id=7)
    assert packing or len(data) == 200
    tensors = data.tensors(np.arange(len(data)))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "input_ids": (torch.int64, (len(data), 64)),
        "labels": (torch.int64, (len(data), 64)),
        "position_ids": (torch.int64, (len(data), 64)),
        "segment_ids": (torch.int32, (len(data), 64)),
    }
    order = [number for row in range(len(data)) for number in data.documents_of(row)]
    assert sorted(order) == list(range(200))
    expected = [data.document(number) for number in order]
    assert unpack(tensors) == [(ids.tolist(), mask.tolist()) for ids, mask in expected]
    assert [row for i in range(len(data)) for row in data.source_rows(i)] == [number * 10 for number in order]


def test_padding_equal_to_a_real_token_hides_nothing() -> None:
    documents = Documents(np.array([5, 5, 2, 2], np.int32), np.ones(4, bool), np.array([3, 1]), np.arange(2))
    (row,) = PackedDataset(documents, 6, pad_id=2).tensors(np.array([0]))["labels"].tolist()
    assert row == [5, 5, 2, 2, -100, -100]


@pytest.mark.parametrize(
    ("lengths", "row_length"),
    [
        ([1], 8),
        ([8] * 5, 8),
        ([5] * 5, 8),
        ([7, 1, 7, 1, 4, 4], 8),
        (random_lengths(1000, 100), 100),
        (np.random.default_rng(0).normal(67, 9, 4000).clip(44, 83).astype(int).tolist(), 1024),
    ],
)
def test_best_fill_is_a_valid_deal(lengths: list[int], row_length: int) -> None:
    order, counts = best_fill(np.array(lengths), row_length)
    assert sorted(order) == list(range(len(lengths)))
    ends = np.cumsum(counts)
    used = [sum(lengths[i] for i in order[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    assert max(used) <= row_length
    again = best_fill(np.array(lengths), row_length)
    assert np.array_equal(order, again[0]) and np.array_equal(counts, again[1])


def test_best_fill_finds_the_perfect_deal() -> None:
    _, counts = best_fill(np.array([7, 1, 7, 1, 4, 4]), 8)
    assert len(counts) == 3


def test_lengths_much_alike_fill_more_than_98_percent() -> None:
    """Best-fit decreasing leaves about 2 % here: twelve documents of 80 tokens, and no short one for the gap."""
    lengths = np.random.default_rng(0).normal(67, 9, 4000).clip(44, 83).astype(int)
    order, counts = best_fill(lengths, 1024)
    used = np.add.reduceat(lengths[order], np.r_[0, np.cumsum(counts)[:-1]])
    assert np.sort(used)[1:].mean() / 1024 > 0.995


def test_packing_time_depends_on_lengths_not_on_documents() -> None:
    start = time.process_time()
    best_fill(np.random.default_rng(0).lognormal(5.5, 0.8, 100_000).clip(5, 1024).astype(int), 1024)
    assert time.process_time() - start < 10


def test_fill_leaves_out_the_emptiest_row() -> None:
    data = PackedDataset(make_documents([8, 8, 1]), 8)
    assert data.fill() == 1.0
    assert PackedDataset(make_documents([6]), 8).fill() == 0.75


@pytest.mark.parametrize("packing", [True, False])
def test_tokens_of_rows_are_those_without_padding(packing: bool) -> None:
    data = PackedDataset(make_documents(random_lengths(50, 30)), 32, packing=packing)
    segments = data.tensors(np.arange(len(data)))["segment_ids"]
    assert data.row_tokens.tolist() == (segments > 0).sum(1).tolist()


def test_fingerprint_sees_tokens_masks_and_packing() -> None:
    documents = make_documents([3, 4, 5])
    base = PackedDataset(documents, 8).fingerprint()
    assert PackedDataset(make_documents([3, 4, 5]), 8).fingerprint() == base
    ids, mask = documents.input_ids.copy(), documents.loss_mask.copy()
    ids[0] += 1
    mask[0] ^= True
    rest = (documents.lengths, documents.source_rows)
    others = [
        PackedDataset(Documents(ids, documents.loss_mask, *rest), 8),
        PackedDataset(Documents(documents.input_ids, mask, *rest), 8),
        PackedDataset(documents, 9),
        PackedDataset(documents, 8, packing=False),
    ]
    assert len({base, *(other.fingerprint() for other in others)}) == 5


def test_permutation_is_the_same_everywhere() -> None:
    assert permutation(10, 0, 0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    assert sorted(permutation(1000, 3, 1)) == list(range(1000))
    assert permutation(1000, 3, 1).tolist() != permutation(1000, 3, 2).tolist()
    assert permutation(1000, 3, 1).tolist() != permutation(1000, 4, 1).tolist()
    assert permutation(5, 0, 0, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@pytest.fixture(scope="module")
def data() -> PackedDataset:
    return PackedDataset(make_documents([8] * 37), 8)


@pytest.mark.parametrize(("world", "batch"), [(1, 1), (1, 8), (2, 4), (3, 5), (8, 8)])
def test_evaluation_sees_every_row_once(data: PackedDataset, world: int, batch: int) -> None:
    per_rank = [list(eval_batches(data, rank, world, batch)) for rank in range(world)]
    assert len({len(found) for found in per_rank}) == 1
    assert all(b["input_ids"].shape == (batch, 8) for found in per_rank for b in found)
    whole = {name: torch.cat([b[name] for found in per_rank for b in found]) for name in per_rank[0][0]}
    filled = whole["segment_ids"].any(dim=1)
    rows = whole["input_ids"][filled]
    wanted = data.tensors(np.arange(37))["input_ids"]
    assert sorted(rows.tolist()) == sorted(wanted.tolist())
    assert (whole["segment_ids"][~filled] == 0).all() and (whole["labels"][~filled] == -100).all()


def running() -> int:
    return sum(thread.name.startswith("prefetch") for thread in threading.enumerate())


def test_prefetch_yields_the_same_and_ends() -> None:
    assert list(prefetch(iter(range(100)))) == list(range(100))
    assert running() == 0


def test_prefetch_raises_where_the_item_would_have_been() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("row 7")

    items = prefetch(broken())
    assert next(items) == 1
    with pytest.raises(KeyError, match="row 7"):
        next(items)
    assert running() == 0


def test_prefetch_stops_when_closed_and_runs_ahead_no_further_than_its_depth() -> None:
    made = []

    def endless() -> Iterator[int]:
        while True:
            made.append(len(made))
            yield made[-1]

    items = prefetch(endless(), depth=2)
    assert next(items) == 0
    time.sleep(0.3)
    assert len(made) <= 5
    items.close()
    assert running() == 0
