"""The identity of a base model's weights, from the hub, its cache or a folder."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.support.cached_model import put_in_cache, use_cache
from tests.support.hub import run_hub
from tpu_kit.config.loader import ModelConfig
from tpu_kit.model.weights import base_identity
from tpu_kit.model.weights.base_identity import differences, identify, other_place, pin

NAME, COMMIT = "owner/tiny", "c" * 40
WEIGHTS = os.urandom(3_000_000)
FILES = {
    "config.json": b"{}", "model-00001-of-00002.safetensors": (10).to_bytes(8, "little") + b'{"a":  {}}' + WEIGHTS,
    "model-00002-of-00002.safetensors": b"tiny", "consolidated.safetensors": b"others'", "pytorch_model.bin": b"old",
}  # fmt: skip
SHARDS = sorted(name for name in FILES if name.startswith("model-"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_cache(tmp_path / "cache", monkeypatch)
    (tmp_path / "model").mkdir()
    for name, content in FILES.items():
        (tmp_path / "model" / name).write_bytes(content)
    return tmp_path / "model"


def known(config: ModelConfig) -> dict[str, Any]:
    found = identify(config)
    assert found is not None and json.loads(json.dumps(found)) == found
    return dict(found)


def test_hub_cache_and_folder_tell_of_the_same_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, there = known(ModelConfig(name=str(folder))), ModelConfig(name=NAME)
    assert sorted(ours["files"]) == SHARDS and identify(there) is None and pin(there) == (there, None)
    with run_hub() as hub:
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
        siblings = [
            {"rfilename": name, "size": len(FILES[name]), "blobId": "0" * 40,
             "lfs": {"sha256": hashes[name], "size": len(FILES[name]), "pointerSize": 134}}
            for name in FILES
        ]  # fmt: skip
        hub.models[NAME] = {"id": NAME, "sha": COMMIT, "siblings": siblings}
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        online, (pinned, _) = known(there), pin(there)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pinned.revision == online["commit"] == COMMIT and sorted(online["files"]) == SHARDS
    assert hub.paths == [f"/api/models/{NAME}"] * 2
    put_in_cache(tmp_path / "cache", NAME, folder, COMMIT)
    cached = known(there)
    assert cached == known(pinned) and cached["commit"] == COMMIT
    for name in SHARDS:
        assert cached["files"][name] == ours["files"][name] | online["files"][name]
    # The same files have one identity on the hub, in its cache, in a folder, and at another commit.
    for began in (ours, online, cached):
        for now in (ours, online, {**cached, "commit": "d" * 40}):
            assert differences(began, now) == []
    # A folder and the cache share sampled bytes; a folder and the hub alone share nothing.
    assert (
        other_place(ours, cached)
        == other_place(cached, ours)
        == other_place(online, {**cached, "commit": "d" * 40})
        == []
    )
    assert other_place(ours, online) == [f"{name} cannot be compared: download the model first" for name in SHARDS]
    assert other_place(ours, None) == other_place(None, ours) == ["their files cannot be compared"]


def test_another_configuration_of_the_same_weights_is_another_model(folder: Path, tmp_path: Path) -> None:
    began = known(ModelConfig(name=str(folder)))
    moved = folder.rename(tmp_path / "moved")
    for settings, told in (
        ({"_name_or_path": "x", "transformers_version": "6"}, []),
        ({"rope_theta": 1}, ["config.json has other content"]),
    ):
        (moved / "config.json").write_text(json.dumps(settings))
        assert other_place(began, known(ModelConfig(name=str(moved)))) == told
        assert differences(began, known(ModelConfig(name=str(moved)))) == []


def test_an_adapter_is_not_used_with_other_rotary_positions(folder: Path) -> None:
    yarn = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1e6}
    newer = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "truncate": True}}
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    by_kind = {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}}
    found = []
    for settings in (yarn, newer, plain, by_kind, {}):
        (folder / "config.json").write_text(json.dumps(settings))
        found.append(known(ModelConfig(name=str(folder))))
    began, same, other, kinds, none = found
    assert differences(began, same) == differences(same, began) == differences(began, kinds) == []
    told = ["config.json has rope_type=default for its rotary positions, and had yarn"]
    assert differences(began, other) == differences(began, none) == told


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (SHARDS[0], FILES[SHARDS[0]][:-1] + bytes([FILES[SHARDS[0]][-1] ^ 1]), ["has other content"]),
        (SHARDS[0], FILES[SHARDS[0]].replace(b'"a": ', b'"b": '), ["has other content"]),
        (SHARDS[1], b"tinu", ["has other content"]),
        (SHARDS[1], b"tin", ["has 3 bytes, and had 4"]),
        (SHARDS[1], None, ["is missing"]),
        ("model-00003-of-00003.safetensors", b"more", ["is new"]),
        ("config.json", b"{ }", []),
    ],
)  # fmt: skip
def test_what_is_another_file_of_weights(folder: Path, name: str, content: bytes | None, told: list[str]) -> None:
    began = known(ModelConfig(name=str(folder)))
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    now = known(ModelConfig(name=str(folder)))
    assert differences(began, now) == [f"{name} {one}" for one in told]
    assert (base_identity.fingerprint(began) == base_identity.fingerprint(now)) == (not told)
    assert differences(None, now) == differences(began, None) == []
