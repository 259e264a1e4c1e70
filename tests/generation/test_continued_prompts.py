"""A prompt that ends with the assistant's own words is continued in generate, evaluate and grpo, as in TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.given_rows import examples_of, prepare_rows
from tpu_kit.cli import main
from tpu_kit.config.loader import DataConfig, ModelConfig, load_config
from tpu_kit.data.prepare import prepare
from tpu_kit.generation.answers import Answers, GenerationRequest
from tpu_kit.generation.evaluation import evaluate as evaluate_module
from tpu_kit.generation.evaluation.evaluate import evaluate
from tpu_kit.generation.generator import Rating
from tpu_kit.generation.prompts import Completion, opened
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.recipes.run_data import prepare_run

BEGUN = "<think>\nTom adds"


def chat(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"What is {number} + 3?"}, {"role": "assistant", "content": BEGUN}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ModelConfig())


def continued(tokenizer: Any, messages: Any) -> list[int]:
    """As TRL's GRPOTrainer renders a prompt."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert text.endswith(BEGUN)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_generate(tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "prompts.jsonl", [{"messages": chat(2)}, {"prompt": chat(3)}])
    asked = ["generate", "base_dtype=fp32", "device_type=cpu", "max_new_tokens=8", "--json"]
    assert main([*asked, f"prompts={file}"]) == 0
    replies = json.loads(capsys.readouterr().out)
    for number, reply in zip((2, 3), replies, strict=True):
        text = tokenizer.decode(continued(tokenizer, chat(number)))
        assert main([*asked, f"prompt={text}", "chat=false"]) == 0
        (wanted,) = json.loads(capsys.readouterr().out)
        assert reply["tokens"] == wanted["tokens"]


def test_grpo(tokenizer: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": chat(n), "answer": str(n + 3)} for n in range(8)]
    rows += [{"prompt": chat(n)[:1], "answer": str(n + 3)} for n in range(8, 12)]
    source = write(tmp_path / "rows.jsonl", rows)
    config = load_config(None, {"source": str(source), "format": "prompt", "eval_rows": 2, "objective": "policy",
                                "max_length": 256, "max_completion_length": 64})  # fmt: skip
    prepared = prepare_run(config)
    assert prepared.tasks
    tasks = prepared.tasks.rows
    for row, ids, prompt, asked in zip(tasks.rows, tasks.prompt_ids, tasks.prompts, tasks.asked, strict=True):
        assert asked == row["prompt"]
        if len(asked) == 2:
            assert ids == continued(tokenizer, asked) and opened(prompt, config.data, asked) == BEGUN
        else:
            assert ids == tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
            assert opened(prompt, config.data, asked) == ""
    assert all("..." not in row["answer"] for row in prepared.eval_rows)


def test_evaluate_asks_and_judges_as_it_was_trained(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": chat(n), "completion": [{"role": "assistant", "content": f" them.\n</think>\n{n + 3}"}]}
            for n in range(6)]  # fmt: skip
    prepared = prepare_rows(DataConfig(eval_rows=2, max_length=128), tokenizer, rows)
    seen: list[Any] = []

    def answer(config: Any, asks: list[GenerationRequest], ids: Any, **_: Any) -> Answers:
        seen.extend(asks[0].prompts)
        texts = [row["completion"][0]["content"] for row in prepared.eval_rows]
        replies = [Completion(text, None, text, (1,), "stop", 0.0) for text in texts]
        return Answers([replies], [Rating([0.0] * (len(row) - 1), [True] * (len(row) - 1)) for row in ids])

    monkeypatch.setattr(evaluate_module, "answer", answer)
    found = evaluate(load_config(None, {"verifier": "numeric"}), prepared)
    assert seen == [continued(tokenizer, row["prompt"]) for row in prepared.eval_rows]
    assert found.accuracy.correct == 2 and found.format_adherence == 1
    for row in prepared.eval_rows:
        ((ids, mask),) = examples_of(prepared.encoder, row)
        learnt = tokenizer.decode([token for token, loss in zip(ids, mask, strict=True) if loss])
        assert learnt == f"{row['completion'][0]['content']}<|end|>"
        assert ids[: mask.index(True)] == continued(tokenizer, row["prompt"])


def test_other_words_are_another_question(tokenizer: Any) -> None:
    rows = [{"prompt": [chat(1)[0], {"role": "assistant", "content": words}], "answer": "4"} for words in "abcdef"]
    prepared = prepare_rows(DataConfig(eval_rows=2, max_length=64, format="prompt"), tokenizer, rows, max_prompt=64)
    assert len(prepared.eval_rows) == 2 and prepared.tasks and len(prepared.tasks.numbers) == 4


def test_what_cannot_be_continued(tokenizer: Any, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    rows = [{"prompt": [chat(1)[0], {"role": "assistant", "content": "", "tool_calls": [call]}], "answer": "4"}] * 2
    source = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        ValueError, match="the prompt ends in a reply, which only a single message of text can continue"
    ):
        prepare(DataConfig(source=str(source), format="prompt", eval_rows=0), tokenizer, max_prompt=64)
