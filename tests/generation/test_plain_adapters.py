"""An adapter is prompted as its training rows were: by the command, from the rows' file to the answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpu_kit.assets.embedded import cot_rows
from tpu_kit.cli import main
from tpu_kit.config.loader import ModelConfig
from tpu_kit.exporting import equivalence
from tpu_kit.exporting.export import export
from tpu_kit.generation.answers import as_asked, generate
from tpu_kit.generation.sampling import Sampling
from tpu_kit.machine.storage.run_config import run_config
from tpu_kit.machine.storage.run_folder import find_run
from tpu_kit.model.weights.source import load_tokenizer

ROWS = cot_rows("train", 40, seed=1)
QUESTION = "Question: Tom has 3 pens and buys 4. How many pens does Tom have now?\nAnswer: "
CHAT = [{"role": "user", "content": QUESTION}]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, list[dict[str, Any]]], Path]:
    """Trains on rows by command, once for each name; returns the folder of the run."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str, rows: list[dict[str, Any]]) -> Path:
        if not (folder / name).is_dir():
            source = write(folder / f"{name}.jsonl", rows)
            settings = ["base_dtype=fp32", "device_type=cpu", "max_steps=4", "learning_rate=1e-2", "max_length=128"]
            settings += [f"source={source}", f"output_dir={folder / name}", "eval_rows=4", "generate_tokens=6"]
            assert main(["train", *settings]) == 0
        return folder / name

    return run


PLAIN = [{"prompt": f"Question: {row['question']}\nAnswer: ", "completion": row["answer"]} for row in ROWS]


def tokens(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[int], str]:
    """Returns the answer of `generate` to the question, and its messages."""
    capsys.readouterr()
    assert main(["generate", *arguments, f"prompt={QUESTION}", "max_new_tokens=6", "--json"]) == 0
    printed = capsys.readouterr()
    (reply,) = json.loads(printed.out)
    return reply["tokens"], printed.err


def test_an_adapter_of_plain_rows_is_asked_without_a_template(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("plain", PLAIN)
    assert "chat template    none: the rows are plain text." in capsys.readouterr().out
    wanted, _ = tokens(capsys, str(run), "chat=false")
    by_template, told = tokens(capsys, str(run), "chat=true")
    assert wanted != by_template and "asked    " not in told
    for named in (run, run / "config.yaml", run / "adapter"):
        found, told = tokens(capsys, *([str(named)] if named != run / "adapter" else [f"adapter={named}"]))
        assert found == wanted and "asked            as plain text: the tokenizer of the adapter" in told
    copied = shutil.copytree(run / "adapter", tmp_path / "copied")
    same = ["base_dtype=fp32", "device_type=cpu"]
    assert tokens(capsys, *same, f"adapter={copied}")[0] == wanted
    assert tokens(capsys, *same, f"adapter={copied}", "chat=true")[0] == by_template
    (checkpoint,) = run.glob("checkpoints/step-*")
    assert tokens(capsys, f"adapter={checkpoint}")[0] == wanted
    config = run_config(find_run(run))
    (reply,) = generate(config, [CHAT], Sampling(6), adapter_dir=run)  # as notebook 5 asks
    assert list(reply.tokens) == wanted
    with pytest.raises(ValueError, match=r"prompt 0: a chat with more than one user turn.* or set chat=true"):
        generate(config, [[*CHAT, {"role": "assistant", "content": "7"}, *CHAT]], adapter_dir=run, chat=False)


def test_held_out_questions_are_asked_as_the_adapter_was_trained(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("plain", PLAIN)
    rows = [{"question": row["prompt"], "answer": row["completion"]} for row in PLAIN[::-1]]
    asked = ["evaluate", str(run), f"source={write(tmp_path / 'questions.jsonl', rows)}", "eval_rows=4", "--json"]
    capsys.readouterr()
    answers = {}
    for chat in ("null", "false", "true"):
        assert main([*asked, f"chat={chat}"]) == 0
        printed = capsys.readouterr()
        found = json.loads(printed.out)
        answers[chat] = [sample["tuned"]["answer"] for sample in found["samples"]]
        assert ("asked            as plain text, because the adapter was trained" in printed.err) == (chat == "null")
    assert answers["null"] == answers["false"] != answers["true"]
    chats = [{"messages": [*CHAT, {"role": "assistant", "content": "7"}] * 2} for _ in range(2)]
    refused = [*asked[:2], f"source={write(tmp_path / 'chats.jsonl', chats)}", "eval_rows=1"]
    assert main(refused) == 1
    assert "the model was trained on plain text, so the prompt must be one user turn" in capsys.readouterr().err
    assert main([*asked[:2], "chat=true"]) == 1
    assert "chat=true: the rows are plain text, which a chat template cannot render" in capsys.readouterr().err


def test_text_in_the_turns_of_the_template_is_asked_by_the_template(
    trained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in Unsloth's notebooks, which render chats into a column."""
    tokenizer = load_tokenizer(ModelConfig())
    pairs = [(("user", row["question"]), ("assistant", row["answer"])) for row in ROWS]
    turns = [[{"role": role, "content": text} for role, text in pair] for pair in pairs]
    texts: Any = [{"text": tokenizer.apply_chat_template(chat, tokenize=False)} for chat in turns]
    run = trained("rendered", texts)
    assert "chat template    not applied: most rows contain its turns already" in capsys.readouterr().out
    assert tokens(capsys, str(run))[0] == tokens(capsys, str(run), "chat=true")[0]


def test_exports_of_plain_text_have_no_chat_template(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained("plain", PLAIN)
    here = lambda job: equivalence.logits(equivalence._stock(job), job["prompts"])  # noqa: E731  a process takes seconds
    monkeypatch.setattr(equivalence, "in_child", here)
    done = export(run / "adapter", "merged", tmp_path / "merged", dtype="fp32")
    assert not list((tmp_path / "merged").glob("chat_template*"))
    assert not json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text()).get("chat_template")
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    shutil.copytree(run / "adapter", tmp_path / "copied")
    with pytest.raises(ValueError, match=r"copied has no config\.yaml: give the folder that a run wrote"):
        export(tmp_path / "copied", "merged")
    assert "it was trained on plain text, so these files have no chat template: ask for completions" in str(done)


def test_texts_and_chats_as_asked() -> None:
    assert as_asked([QUESTION, CHAT, [1, 2]], None) == [QUESTION, CHAT, [1, 2]]
    assert as_asked([QUESTION, CHAT, [1, 2]], True) == [CHAT, CHAT, [1, 2]]
    assert as_asked([QUESTION, CHAT, {"messages": CHAT}, [1, 2]], False) == [QUESTION, QUESTION, QUESTION, [1, 2]]


def test_training_starts_from_a_run_and_goes_on_with_it(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("plain", PLAIN)
    assert main(["train", str(run), f"output_dir={tmp_path / 'new'}", f"adapter={run}", "max_steps=1"]) == 0
    (held,) = {tuple(np.load(folder / "questions.npz")["held_out"]) for folder in (run, tmp_path / "new")}
    assert len(held) == 4
    moved = shutil.copytree(run, tmp_path / "moved")
    assert main(["train", str(moved), "max_steps=5", "resume=must"]) == 0
    assert f"finished at step 5; adapter in {moved}/adapter" in capsys.readouterr().out
    assert main(["train", str(tmp_path)]) == 2
    assert f"{tmp_path} holds the runs moved, new" in capsys.readouterr().err
