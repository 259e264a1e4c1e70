"""GGUF exports of runs on pictures: the vision part in its own file, and refusals."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.exporting.test_export import make_run
from tests.support.vision_functions import CONFIGS
from tests.support.vision_models import save_for_llama_cpp, save_model
from tpu_kit.exporting import converter, equivalence, gguf, projector
from tpu_kit.exporting.export import export
from tpu_kit.exporting.gguf import modelfile

# In place of llama.cpp's converter: records its arguments, and writes the vision weights transposed, in f16.
SCRIPT = """
import json, os, sys
import numpy as np
from safetensors.numpy import load_file

folder, out = sys.argv[1], sys.argv[sys.argv.index("--outfile") + 1]
if "--no-mtp" in sys.argv:
    sys.exit("--no-nextn are not supported for it")
settings = {name: json.load(open(f"{folder}/{name}.json")) for name in ("config", "preprocessor_config")
            if os.path.isfile(f"{folder}/{name}.json")}
with open(os.environ["ASKED"], "a") as asked:
    asked.write(json.dumps([sys.argv[2:], settings]) + chr(10))
weights = {"v." + name: value.T for name, value in load_file(f"{folder}/model.safetensors").items()
           if "vision_model" in name or "connector" in name}
if "--mmproj" in sys.argv and os.environ.get("SPOILT"):
    weights[next(iter(weights))] *= 1.01
np.savez(open(out, "wb"), **{name: value.astype(np.float16) for name, value in weights.items()})
"""
LIBRARY = """
from types import SimpleNamespace
import numpy as np

quants = SimpleNamespace(dequantize=lambda data, kind: data.astype(np.float32))

class GGUFReader:
    def __init__(self, path):
        kind = SimpleNamespace(name="F16")
        self.tensors = [SimpleNamespace(name=name, data=data, tensor_type=kind) for name, data in np.load(path).items()]
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A converter that writes its arguments into the returned file; no llama.cpp."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setitem(sys.modules, "sentencepiece", ModuleType("sentencepiece"))
    sys.modules["sentencepiece"].__spec__ = ModuleSpec("sentencepiece", None)
    monkeypatch.setattr(gguf, "_has_llama_cpp", lambda: False)
    path = tmp_path / "cache" / "tpu_kit" / converter.ARCHIVE
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:gz") as file:
        for name, text in (("convert_hf_to_gguf.py", SCRIPT), ("gguf-py/gguf/__init__.py", LIBRARY)):
            member = tarfile.TarInfo(f"llama/vendor/llama.cpp/{name}")
            member.size = len(text)
            file.addfile(member, io.BytesIO(text.encode()))
    with path.open("rb") as archive:
        monkeypatch.setattr(converter, "ARCHIVE_SHA256", converter.hashlib.file_digest(archive, "sha256").hexdigest())

    def here(job: dict[str, object], module: str, variables: dict[str, str]) -> object:  # a process takes seconds
        monkeypatch.delitem(sys.modules, "gguf", raising=False)
        monkeypatch.syspath_prepend(variables["PYTHONPATH"].split(os.pathsep)[0])
        return projector._compared(json.loads(json.dumps(job)))

    monkeypatch.setattr(projector, "in_child", here)
    yield tmp_path / "asked"
    sys.modules.pop("gguf", None)  # the converter above


def run_on_pictures(folder: Path, family: str, **changes: object) -> Path:
    base = save_model(folder / "base", family)
    make_run(folder / "run", str(base), **{"lora.r": 4, "model.images": True, "data.max_length": 256, **changes})
    return folder / "run"


def test_the_part_for_images_is_written_beside_the_language_model(
    asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on_pictures(tmp_path, "smolvlm")
    done = export(run, "gguf-q8_0", tmp_path / "out")
    files = ["my-run-q8_0.gguf", "mmproj-my-run-f16.gguf"]
    assert {*files} < {*done.files}
    (_, text), (_, part) = orders = [json.loads(line) for line in asked.read_text().splitlines()]
    assert [order[0][order[0].index("--outtype") :] for order in orders] == [
        ["--outtype", "q8_0"], ["--outtype", "f16", "--mmproj"],
    ]  # fmt: skip
    assert text["config"]["text_config"]["architectures"] == ["LlamaForCausalLM"]
    assert part["preprocessor_config"]["size"] == {"longest_edge": 64}
    assert "tensors of mmproj-my-run-f16.gguf have the values of the model's vision part" in str(done)
    assert (tmp_path / "out" / "Modelfile").read_text().startswith("".join(f"FROM ./{file}\n" for file in files))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "llama-server -m path/of/this/folder/my-run-q8_0.gguf --mmproj path/of/this/folder/mmproj-my-run-f16" in card
    monkeypatch.setenv("SPOILT", "1")
    with pytest.raises(ValueError, match=r"mmproj-my-run-f16\.gguf does not have the weights .* \(v\.model\.vision_m"):
        export(run, "gguf-f16", tmp_path / "spoilt")
    assert not (tmp_path / "spoilt").exists()


@pytest.mark.usefixtures("asked")
def test_what_gguf_cannot_hold_of_a_run_on_pictures_is_refused_by_name(tmp_path: Path) -> None:
    run = run_on_pictures(tmp_path, "gemma4_unified", **{"lora.vision": True})
    with pytest.raises(ValueError, match=r"Gemma 4 unified only together with an audio part, and base has none: use"):
        export(run, "gguf-f16")
    seeing = run_on_pictures(tmp_path / "tower", "gemma4")
    with pytest.raises(ValueError, match=r"otherwise than models of Gemma 4, .* pip install xllamacpp.* format=merged"):
        export(seeing, "gguf-f16")
    with pytest.raises(ValueError, match=r"hold no weights of the vision part, .*lora\.vision=true .*gguf-f16"):
        export(run, "gguf-lora")


def test_a_modelfile_of_two_files() -> None:
    assert modelfile("m.gguf", [], None, projector="mmproj-m.gguf") == "FROM ./m.gguf\nFROM ./mmproj-m.gguf\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["smolvlm", "idefics3"])
def test_llama_cpp_says_of_pictures_what_the_tuned_model_says(family: str, tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    pytest.importorskip("xllamacpp")
    base = save_for_llama_cpp(tmp_path / "base", family)
    make_run(tmp_path / "run", str(base), **{"lora.r": 4, "model.images": True, "data.max_length": 512})
    done = export(tmp_path / "run", "gguf-f16", tmp_path / "whole")
    text, pictures = done.checks[1:]
    assert (text.by, pictures.by) == ("llama.cpp", "llama.cpp, with pictures")
    assert pictures.largest < pictures.limit and pictures.mean < equivalence.LOST * pictures.effect
    (check,) = export(tmp_path / "run", "gguf-lora", tmp_path / "adapter").checks
    assert check.by == "llama.cpp" and check.largest < check.limit


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_gemma_4_is_converted_with_the_weights_of_its_part_for_images(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp is left out: its answers of random weights differ, even to questions of text alone."""
    pytest.importorskip("sentencepiece")
    monkeypatch.setattr(gguf, "_has_llama_cpp", lambda: False)
    monkeypatch.setattr(projector, "refuse", lambda *_: None)
    base = save_for_llama_cpp(tmp_path / "base", family)
    changes = {"lora.r": 4, "model.images": True, "data.max_length": 512, "data.image_tokens": 70}
    make_run(tmp_path / "run", str(base), **changes)
    done = export(tmp_path / "run", "gguf-f16", tmp_path / "whole")
    assert "tensors of mmproj-my-run-f16.gguf have the values of the model's vision part" in str(done)
    card = (tmp_path / "whole" / "README.md").read_text()
    assert "mmproj-my-run-f16.gguf --image-min-tokens 70 --image-max-tokens 70" in card


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "lfm2_vl"])
def test_families_that_llama_cpp_was_not_compared_with_are_refused_by_name(family: str) -> None:
    tuned: Any = SimpleNamespace(model=SimpleNamespace(config=CONFIGS[family]()))
    with pytest.raises(ValueError, match=f"not compared with vision models of {family}: use format=merged .* gemma4"):
        projector.refuse(tuned, compares=True)
