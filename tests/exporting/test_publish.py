"""A run's result on the hub: checked before the launch, compared, and pushed as one commit by one process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants, lfs
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.recipes.conftest import world
from tests.recipes.test_sft import Configure, configure
from tests.support.hub import NAME, READER, TOKEN, Hub, Repository
from tpu_kit.cli import main
from tpu_kit.config.loader import ConfigError, load_config
from tpu_kit.exporting import equivalence
from tpu_kit.exporting.hub import publish
from tpu_kit.exporting.hub.publish import hub_problems
from tpu_kit.exporting.hub.repository import HubRepository
from tpu_kit.exporting.tuned_model import HERE
from tpu_kit.notebook import cells
from tpu_kit.recipes import sft

__all__ = ["configure", "world"]  # fixtures


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are read again in this process, as a new one takes seconds to start."""

    def run(job: dict[str, Any]) -> Any:
        job = json.loads(json.dumps(job))
        return equivalence.logits(equivalence._stock(job), job["prompts"])

    monkeypatch.setattr(equivalence, "in_child", run)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_pushes_its_result_once_it_is_compared(
    hub: Hub, configure: Configure, world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)  # a pushed adapter names its base's folder without the path
    config = configure(max_steps=2, **{"model_id": NAME, "hub.format": ["adapter", "merged"]})
    result = sft.train(config)
    said = capsys.readouterr().out
    repository = hub.repositories[NAME]
    address = f"pushes to        {hub.url}/{NAME} (private if it is new): adapter, merged, once compared with the model"
    assert said.index(address) < said.index("data") < said.index(f"pushed to {hub.url}/{NAME}/commit/{repository.head}")
    assert result.pushed == f"{hub.url}/{NAME}/commit/{repository.head}"
    assert repository.private and len(repository.messages) == 1
    local = config.output_path / "export"
    merged = {f"merged/{name}": content for name, content in contents(local / "merged").items()}
    assert repository.files == contents(local / "adapter") | merged
    assert not any(TOKEN.encode() in content for content in contents(config.output_path).values()) and TOKEN not in said

    card = ModelCard(repository.files["README.md"].decode())
    assert "/api/validate-yaml" in hub.paths  # the commit's request
    assert "base_model" not in card.data.to_dict() and "The base model has no name on the hub" in card.text
    assert "- rehearsed on a CPU, not trained on a TPU or GPU: " in card.text and " hours on 1 x cpu" in card.text
    block = card.text.partition("```yaml")[2].partition("```")[0]
    assert yaml.safe_load(block)["hub"]["model_id"] == NAME
    assert str(world) not in repository.files["adapter_config.json"].decode()
    ids = torch.arange(5, 37)[None]
    answers = [loaded(repository.files[name].decode(), ids) for name in ("README.md", "merged/README.md")]
    assert torch.allclose(*answers, atol=0.05)  # the merged weights are bf16
    exported = (AutoPeftModelForCausalLM.from_pretrained(local / "adapter"),
                AutoModelForCausalLM.from_pretrained(local / "merged"))  # fmt: skip
    with torch.no_grad():
        assert all(torch.equal(model.eval()(input_ids=ids).logits.float(), answer)
                   for model, answer in zip(exported, answers, strict=True))  # fmt: skip


def test_the_card_of_a_named_base_and_of_a_command(hub: Hub, configure: Configure) -> None:
    hub.models["google/base"] = {"id": "google/base", "cardData": {"license": "gemma"}}
    config = configure(max_steps=1)
    sft.train(config)
    command = ["export", str(config.output_path), "base=google/base", f"push={NAME}"]
    assert main([*command, "format=vllm", "revision=dev"]) == 0
    card = ModelCard(hub.repositories[NAME].branches["dev"]["README.md"].decode())
    values = card.data.to_dict()
    assert (values["license"], values["base_model_relation"]) == ("gemma", "finetune")
    assert f"```sh\nvllm serve {NAME} --revision dev --served-model-name" in card.text
    assert main([*command, "format=adapter", "format=vllm"]) == 0
    files = hub.repositories[NAME].files
    assert ModelCard(files["README.md"].decode()).data.to_dict()["base_model_relation"] == "adapter"
    text = files["vllm/README.md"].decode()
    assert f'hf download {NAME} --include "vllm/*" --local-dir tuned\nvllm serve tuned/vllm --served' in text
    assert all(HERE not in content.decode() for name, content in files.items() if name.endswith("README.md"))


def loaded(card: str, ids: torch.Tensor) -> torch.Tensor:
    """The logits of the model that the lines of a card load."""
    names: dict[str, Any] = {}
    exec(card.partition("```python\n")[2].partition("\n```")[0], names)
    assert names["tokenizer"]("How many pens?")["input_ids"]
    with torch.no_grad():
        found: torch.Tensor = names["model"].eval()(input_ids=ids).logits.float()
    return found


def test_a_push_that_fails_leaves_the_run_finished(
    hub: Hub, configure: Configure, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(max_steps=1, model_id=NAME, private=False, **{"hub.revision": "dev"})
    hub.fault = lambda method, path: (402, {}) if path.endswith("/commit/dev") else None
    result = sft.train(config)
    assert (result.status, result.pushed) == ("finished", "")
    folder = config.output_path
    command = f"export {folder} format=adapter push={NAME} private=false revision=dev"
    assert capsys.readouterr().err.endswith(
        f"warning: hub.model_id={NAME}: the quota of the account is used up: make room, push to another account, or to "
        "a public repository. "
        f"Unless {hub.url}/{NAME}/tree/dev has it, nothing was pushed; the result is complete in {folder}. "
        f"To push it: python -m tpu_kit {command}\n"
    )
    hub.fault = lambda method, path: None
    assert main(command.split()) == 0
    assert hub.repositories[NAME].branches["dev"] == contents(folder / "export" / "adapter")

    weights = folder / "adapter" / "adapter_model.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(weights).items()}, weights)
    before = len(hub.paths)
    assert publish.push_result(config, folder) is None
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"warning: {folder / 'adapter'} changes nothing: the model's logits are the base model")
    assert "nothing was pushed; the result is complete" in said

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tpu_kit.exporting.export._export", stopped)
    assert publish.push_result(config, folder) is None
    assert "SIGINT was received. Unless " in capsys.readouterr().err
    assert {path.rpartition("/")[2] for path in hub.paths[before:]} <= {"whoami-v2", "tuned", "dev", "export.json"}


def test_a_run_of_an_object_store_pushes_its_result(
    hub: Hub, configure: Configure, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the working folder of such a run is in runs/
    config = configure(max_steps=1, model_id=NAME, output_dir=f"{bucket}/run")
    result = sft.train(config)
    assert result.pushed.endswith(hub.repositories[NAME].head)
    assert "adapter_model.safetensors" in hub.repositories[NAME].files


NOT_YET: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "a reader": ({"token": READER}, "the token can only read: log in with `hf auth login`"),
    "no token": ({"token": ""}, "there is no token of the Hugging Face hub"),
    "unknown": ({"token": "hf_" + "c" * 34}, "the token is invalid"),
    "somebody else": ({"name": "bob/tuned"}, "the token belongs to ann, club, not to bob"),
    "a reader of the organisation": ({"name": "club/tuned"}, "ann may only read in club: ask its administrator"),
    "offline": ({"offline": True}, "HF_HUB_OFFLINE is set, or the hub did not answer: unset it"),
    "away": ({"away": True}, "the hub cannot be reached: [Errno 111]"),
    "Kaggle": ({"away": True, "KAGGLE_KERNEL_RUN_TYPE": "Batch"}, "reached (turn on Internet in the"),
    "a broken hub": ({"status": 503}, "the hub answers 503: try again later"),
    "a card of its own": ({"there": "README.md"}, "the repository has README.md, which no export of tpu_kit wrote"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_YET)
def test_what_cannot_be_pushed_is_told_before_the_launch(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    given, text = NOT_YET[case]
    hub.organisations["club"] = "read"
    for name, value in given.items():
        if name == "token":
            monkeypatch.setenv("HF_TOKEN", value)
            monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        elif name == "there":
            hub.repositories[NAME] = Repository()
            hub.repositories[NAME].commit({value: b"# Mine"}, "by hand")
        elif name == "KAGGLE_KERNEL_RUN_TYPE":
            monkeypatch.setenv(name, value)
        elif name == "status":
            hub.fault = lambda method, path: (503, {})
        elif name == "offline":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        elif name == "away":
            monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    name = given.get("name", NAME)
    config = load_config(None, {"model_id": name, "output_dir": str(tmp_path / "run"), "device_type": "cpu"})
    with pytest.raises(ConfigError) as error:
        sft.train(config)
    (problem,) = error.value.problems
    assert f"hub.model_id={name}: " in problem and text in problem and "\n" not in problem
    assert not (tmp_path / "run").exists()


def test_the_cell_of_a_notebook_reads_the_token_and_checks_the_repository(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = SimpleNamespace(get_secret={"HF_TOKEN": TOKEN}.get)
    monkeypatch.setitem(sys.modules, "kaggle_secrets", SimpleNamespace(UserSecretsClient=lambda: client))
    monkeypatch.delenv("HF_TOKEN")
    file = {"hub": {"format": ["merged"], "model_id": "ann/of-the-file", "strategy": "checkpoint"}}
    cells.check_push(cells.config({"push_to": None}))
    assert 'push_to = "your-name/a-name" pushes it' in capsys.readouterr().out and hub.paths == []
    assert cells.config({"push_to": None}, file).hub.model_id == "ann/of-the-file"
    pushed = cells.config({"push_to": NAME, "strategy": "checkpoint"})
    assert (pushed.hub.model_id, pushed.sources["hub.model_id"]) == (NAME, "notebook parameter")
    cells.check_push(pushed)
    said = capsys.readouterr().out
    assert said.startswith(f"pushes to        {hub.url}/{NAME} (private if it is new): adapter, once compared with the")
    assert os.environ["HF_TOKEN"] == TOKEN and TOKEN not in said + str(pushed.to_dict())
    with pytest.raises(ConfigError, match="the token belongs to ann, not to bob"):
        cells.check_push(cells.config({"push_to": "bob/tuned"}, file))


def test_tokens_of_one_repository(hub: Hub) -> None:
    hub.roles[TOKEN] = {"ann/other": ["repo.write"], "ann": ["repo.content.read"]}
    (problem,) = hub_problems(load_config(None, {"model_id": NAME}))
    assert problem.endswith("the token may write only to ann/other: give it the permission repo.write for ann")
    hub.roles[TOKEN] = {NAME: ["repo.write"]}
    assert hub_problems(load_config(None, {"model_id": NAME})) == []


def test_no_file_is_hashed_twice(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    names = ("model.safetensors", "config.json", "export.json")
    for name in names:
        (tmp_path / "out" / name).write_text(f'{{"files": ["{name}"]}}')
    hashed, real = list[str](), lfs.sha_fileobj
    monkeypatch.setattr(lfs, "sha_fileobj", lambda file, *_: hashed.append(Path(file.name).name) or real(file))
    HubRepository(NAME).push({"": tmp_path / "out"})
    assert "model.safetensors" in hashed and len(hashed) == len({*hashed})


def test_a_limit_of_requests_is_waited_for(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "export.json").write_text('{"files": []}')
    left, waited = [2], list[float]()

    def limit(method: str, path: str) -> tuple[int, dict[str, str]] | None:
        left[0] -= path.endswith("/commit/main")
        return (429, {"Retry-After": "7"}) if path.endswith("/commit/main") and left[0] >= 0 else None

    hub.fault = limit
    HubRepository(NAME, sleep=waited.append).push({"": tmp_path / "out"})
    assert waited == [7.0, 7.0] and len(hub.repositories[NAME].messages) == 1
    left[0] = 9
    with pytest.raises(ValueError, match=f"push={NAME}: the hub limits the rate of requests: wait 7 s$"):
        HubRepository(NAME, sleep=waited.append).push({"": tmp_path / "out"})
