"""Rows of random tokens, and rows of an update that do not depend on the number of hosts."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from tpu_kit.config.loader import ConfigError, batch_arithmetic, load_config
from tpu_kit.data.batching import rows_of, shard_rows, updates
from tpu_kit.data.prepare import prepare

SETTINGS = {"source": "synthetic", "data.split": "train[:50]", "max_length": 16, "global_batch_size": 8, "epochs": 2}


def test_rows_are_full_and_depend_on_the_seed_alone() -> None:
    config = load_config(None, SETTINGS)
    made = prepare(config.data, None, vocab_size=300)
    assert len(made.train) == 50 and made.eval is None and made.encoder is None
    rows = made.train.tensors(np.arange(50))
    assert rows["input_ids"].shape == (50, 16) and (rows["labels"] == rows["input_ids"]).all()
    assert rows["input_ids"].min() >= 0 and 250 < rows["input_ids"].max() < 300
    assert "random tokens below 300" in str(made) and "50 read, 50 used" in str(made)
    assert prepare(config.data, None, vocab_size=300).fingerprint == made.fingerprint
    assert prepare(replace(config.data, seed=5), None, vocab_size=300).fingerprint != made.fingerprint


def test_what_random_tokens_cannot_do_is_told() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.eval_rows: 4 needs text, but data.source=synthetic has random tokens"
    ):
        load_config(None, {**SETTINGS, "eval_rows": 4})
    with pytest.raises(ConfigError, match="generate_rows: 4 needs text"):
        load_config(None, {**SETTINGS, "generate_rows": 4})
    with pytest.raises(ValueError, match=r'data source synthetic has the split "train", as in "train\[:100\]", not'):
        prepare(load_config(None, {**SETTINGS, "data.split": "test"}).data, None, vocab_size=300)
    with pytest.raises(ValueError, match="needs the size of the model's vocabulary"):
        prepare(load_config(None, SETTINGS).data, None)


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("replicas", [1, 2])
def test_hosts_share_the_rows_of_each_update(hosts: int, replicas: int) -> None:
    """By the hash of each row: no row is lost or taken twice, and the order equals one host with one replica."""

    def taken(world: int) -> list[list[str]]:
        config = load_config(None, {**SETTINGS, "batch_size": 1})
        train, plan = prepare(config.data, None, vocab_size=300).train, batch_arithmetic(config, world)
        found = []
        for update in updates(len(train), plan, config.optim):
            rows = rows_of(update, len(train), config.data)
            parts = [shard_rows(rows, update, plan, slice(rank, rank + 1)) for rank in range(world)]  # of each replica
            order = np.concatenate(parts, axis=1).reshape(-1)  # pass by pass, as one replica takes them
            ids = train.tensors(order)["input_ids"].numpy()
            found.append([hashlib.sha256(row.tobytes()).hexdigest() for row in ids])
        return found

    alone = taken(1)
    assert taken(hosts * replicas) == alone
    assert len({row for update in alone[:6] for row in update}) == 48, "an epoch of 6 updates takes no row twice"
