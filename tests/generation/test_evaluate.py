"""Answers, adapters, intervals and the comparison: on the embedded model, and by known values."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.given_rows import examples_of, prepare_rows
from tests.support.tiny_tokenizer import tiny_tokenizer
from tpu_kit.assets.embedded import cot_rows
from tpu_kit.cli import main
from tpu_kit.config.loader import DataConfig, LoraConfig, ModelConfig, TrainConfig, load_config
from tpu_kit.data.prepare import Prepared
from tpu_kit.distributed import progress
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.generation.answers import Answers
from tpu_kit.generation.evaluation import evaluate as evaluate_module
from tpu_kit.generation.evaluation.accuracy import Accuracy, mcnemar
from tpu_kit.generation.evaluation.comparison import Evaluation, Sample, compare
from tpu_kit.generation.evaluation.evaluate import evaluate, evaluate_adapter
from tpu_kit.generation.evaluation.held_out_answers import count_correct
from tpu_kit.generation.generator import Rating
from tpu_kit.generation.model_loading import load_for_generation
from tpu_kit.generation.prompts import Completion, stop_ids
from tpu_kit.model.base_model import output_embedding
from tpu_kit.model.causal_lm import hidden_states
from tpu_kit.model.trainable import load_model
from tpu_kit.model.weights.source import load_tokenizer

EXACT = ModelConfig(base_dtype="fp32")


# -------------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_the_interval_is_wilsons(correct: int, total: int, low: float, high: float) -> None:
    found = Accuracy.of(correct, total)
    assert (found.correct, found.total) == (correct, total)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)
    assert 0 <= found.low <= found.share <= found.high <= 1


def test_no_rows_to_judge() -> None:
    nothing = Accuracy.of(0, 0)
    assert (nothing.low, nothing.high) == (0, 1) and nothing.share != nothing.share
    assert str(nothing) == "no row has an answer to compare with"
    assert str(Accuracy.of(1, 29)) == "1 of 29 = 3.4% (0.6% to 17.2%)"


@pytest.mark.parametrize(
    ("first", "second", "p"),
    # By hand: 2 x (1 + 5) / 32, 2 / 2**6, 2 x (1 + 10) / 2**10
    [(0, 0, 1.0), (1, 4, 0.375), (4, 1, 0.375), (0, 6, 0.03125), (1, 9, 22 / 1024), (5, 5, 1.0), (3, 4, 1.0)],
)
def test_mcnemar(first: int, second: int, p: float) -> None:
    assert mcnemar(first, second) == pytest.approx(p, rel=1e-12)


def test_mcnemar_of_many_rows() -> None:
    assert 0 < mcnemar(500, 1500) < 1e-100
    assert mcnemar(1000, 1000) == 1.0


def evaluation(*correct: bool | None, limit: int = 64) -> Evaluation:
    samples = tuple(Sample(f"question {i}", "1", f"<think>it is {c}", c) for i, c in enumerate(correct))
    judged = [c for c in correct if c is not None]
    return Evaluation(Accuracy.of(sum(judged), len(judged)), 0.5, 12.0, 0.25, limit, samples)


def test_compare_pairs_the_rows() -> None:
    base = evaluation(True, False, False, False, False, False, False, None)
    tuned = evaluation(True, True, True, True, True, True, True, None)
    found = compare(base, tuned)
    assert (found.gained, found.lost, found.p_value) == (6, 0, 0.03125)
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["base"]["accuracy"] | {"low": 0, "high": 0} == {
        "correct": 1, "total": 7, "share": 1 / 7, "low": 0, "high": 0,
    }  # fmt: skip
    assert plain["tuned"]["format_adherence"] == 0.5 and "samples" not in plain["tuned"]
    assert plain["samples"][1] == {
        "question": "question 1",
        "expected": "1",
        "base": {"answer": "<think>it is False", "correct": False},
        "tuned": {"answer": "<think>it is True", "correct": True},
    }
    assert len(plain["samples"]) == 8


def test_the_table_shows_the_figures_and_some_answers() -> None:
    text = str(compare(evaluation(False, False, True, False), evaluation(True, False, False, True)))
    first, *rest = text.splitlines()
    assert first.split() == ["base", "tuned"]
    assert rest[0].startswith("correct (95 % interval)  1 of 4 = 25.0% (4.6% to 69.9%)  2 of 4 = 50.0%")
    assert "2 rows are correct only with the tuned model, 1 only with the base; p = 1 (McNemar, exact)" in rest
    assert "  base, wrong:\n    <think>it is False\n  tuned, correct:\n    <think>it is True" in text
    assert "question 2" in text and "question 3" not in text


def test_compare_without_answers_to_judge() -> None:
    found = compare(evaluation(None), evaluation(None))
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["base"]["accuracy"]["share"] is None
    assert "McNemar" not in str(found) and "  base:\n" in str(found)


def test_compare_wants_the_same_rows_and_bounds() -> None:
    with pytest.raises(ValueError, match="have different rows; evaluate both on the same rows"):
        compare(evaluation(True, True), evaluation(True))
    with pytest.raises(ValueError, match="answers of 64 tokens, the other 32; evaluate both with the same"):
        compare(evaluation(True), evaluation(True, limit=32))


# -------------------------------------------------------------------------------------------------------- generation


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(EXACT)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_for_generation(EXACT)


@pytest.fixture(scope="module")
def prepared(tokenizer: Any) -> Prepared:
    return prepare_rows(DataConfig(eval_rows=6), tokenizer, cot_rows("eval", 24, seed=3))


def test_the_end_of_turn_of_the_template_ends_an_answer(model: Any) -> None:
    # As in Qwen2.5's base models: eos is the end of a text, and the template ends a turn with another token.
    tokenizer = tiny_tokenizer(special=("<|im_start|>", "<|im_end|>", "<|endoftext|>"), eos="<|endoftext|>")
    names = ("<|im_end|>", "<|endoftext|>")
    assert stop_ids(model, tokenizer, DataConfig()) == {1, *tokenizer.convert_tokens_to_ids(list(names))}
    tokenizer.chat_template = None
    assert stop_ids(model, tokenizer, DataConfig()) == {1, tokenizer.convert_tokens_to_ids("<|endoftext|>")}


# ---------------------------------------------------------------------------------------------------------- adapters


def logits_in_training(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.nn.functional.linear(hidden_states(model, {"input_ids": ids}), output_embedding(model).weight)


def trained(folder: Path, config: ModelConfig = EXACT, lora: LoraConfig | None = None) -> torch.nn.Module:
    """An adapter that changes the answers."""
    model: Any = load_model(config, lora or LoraConfig(r=4)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def test_an_adapter_is_loaded_as_it_was_trained(tmp_path: Path) -> None:
    ids = torch.arange(2, 34)[None]
    wanted = logits_in_training(trained(tmp_path, lora=LoraConfig(r=4, rslora=True)), ids)
    with torch.no_grad():
        found = load_for_generation(EXACT, tmp_path)(ids).logits
        base = load_for_generation(EXACT)(ids).logits
    assert torch.allclose(found, wanted, atol=1e-4 * float(wanted.abs().max()))
    assert (base - wanted).abs().max() > 0.1


def test_small_models_compute_in_fp32_on_a_cpu(tmp_path: Path) -> None:
    trained(tmp_path)
    for folder in (None, tmp_path):
        model = load_for_generation(ModelConfig(), folder)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32} and not model.training


def test_a_whole_model_takes_the_place_of_the_base(tmp_path: Path) -> None:
    model: Any = load_model(ModelConfig(), LoraConfig(r=0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-4)  # less than bf16 tells apart
    model.save_pretrained(tmp_path)
    found = load_for_generation(ModelConfig(), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))


def test_a_missing_or_half_written_adapter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no adapter folder .*gone; give the folder that training wrote"):
        load_for_generation(EXACT, tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no adapter_config\.json and no adapter_model\.safetensors: its writing was"):
        load_for_generation(EXACT, tmp_path / "empty")
    (tmp_path / "run/checkpoints/step-00000002").mkdir(parents=True)
    for given in ("run", "run/adapter"):
        with pytest.raises(ValueError, match=r"has not ended: .*, or give its newest checkpoint, .*step-00000002$"):
            load_for_generation(EXACT, tmp_path / given)
    (tmp_path / "run/adapter").mkdir()
    with pytest.raises(ValueError, match=r"or it is not an adapter; give .*run/adapter$"):
        load_for_generation(EXACT, tmp_path / "run")
    trained(tmp_path / "a")
    weights, settings = tmp_path / "a/adapter_model.safetensors", tmp_path / "a/adapter_config.json"
    shutil.copytree(tmp_path / "a", tmp_path / "pickled")
    (tmp_path / "pickled/adapter_model.safetensors").rename(tmp_path / "pickled/adapter_model.bin")
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors: its writing was interrupted"):
        load_for_generation(EXACT, tmp_path / "pickled")
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"is damaged or half-written .*; give an earlier or a"):
        load_for_generation(EXACT, tmp_path / "a")
    weights.write_bytes(whole)
    settings.write_text(settings.read_text()[:100])
    with pytest.raises(
        ValueError, match=r"is damaged or half-written \(JSONDecodeError: .*; give an earlier or a complete"
    ):
        load_for_generation(EXACT, tmp_path / "a")
    settings.write_text("{}")
    with pytest.raises(ValueError, match=r"is damaged or half-written \(ValueError: it has no peft_type\)"):
        load_for_generation(EXACT, tmp_path / "a")


def test_an_adapter_of_another_base_says_what_differs(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    trained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    names = [name for name in tensors if "layers.0.self_attn.q_proj" in name or "layers.1.mlp.up_proj" in name]
    short = names[0].replace("layers.0", "layers.9")

    changed = {name: value for name, value in tensors.items() if name != names[1]}
    changed[short] = changed[names[0]].clone()
    save_file(changed, file)
    with pytest.raises(ValueError) as error:
        load_for_generation(EXACT, tmp_path)
    text = str(error.value)
    assert f"the adapter in {tmp_path} was trained on another base model than embedded: " in text
    assert f"{names[1]} is not in the file; {short} is not in the model; " in text
    assert "set model.name to its own base" in text
    assert not [warning for warning in recwarn if "peft" in warning.filename]  # it repeats itself, over pages

    save_file({name: value[:, 1:].contiguous() for name, value in tensors.items()}, file)
    with pytest.raises(ValueError, match=r"than embedded: RuntimeError: .*size mismatch.*; set model"):
        load_for_generation(EXACT, tmp_path)


def test_an_adapter_for_layers_that_are_not_there(tmp_path: Path) -> None:
    trained(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    settings |= {"target_modules": ["c_attn"], "base_model_name_or_path": "openai-community/gpt2"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        ValueError, match=r"another base model than embedded: .*c_attn.*\(it names openai-community/gpt2"
    ):
        load_for_generation(EXACT, tmp_path)


# --------------------------------------------------------------------------------------------------------- the whole


def config(**settings: Any) -> TrainConfig:
    given = {"base_dtype": "fp32", "device_type": "cpu", "generate_tokens": 16, "lora.r": 4}
    return load_config(None, given | {"generate_rows": 0} | settings)


def test_evaluate_base_and_tuned(tmp_path: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)
    rows = prepared.eval_rows
    base = evaluate(config(), prepared)
    (tmp_path / "run").mkdir()
    said: list[dict[str, Any]] = []
    write = progress.atomic.write_text

    def keep(path: Path, text: str) -> None:
        said.append(json.loads(text))
        write(path, text)

    monkeypatch.setattr(progress.atomic, "write_text", keep)
    tuned = evaluate(replace(config(), output_dir=str(tmp_path / "run")), prepared, tmp_path)
    assert said[0] == {"model": "/".join(tmp_path.parts[-2:]), "answered": 0, "asked": 6} and said[-1]["answered"] == 6
    assert list((tmp_path / "run").iterdir()) == []  # no process answers any more
    assert [sample.question for sample in base.samples] == [row["question"] for row in rows]
    assert base.accuracy.total == tuned.accuracy.total == len(rows) == 6
    assert base.accuracy.correct == sum(bool(sample.correct) for sample in base.samples)
    # The base model answers at once: a number and the end-of-turn token.
    assert (base.mean_tokens, base.unfinished, base.format_adherence) == (2.0, 0.0, 0.0)
    assert [s.answer for s in base.samples] != [s.answer for s in tuned.samples]
    assert evaluate(config(), prepared) == base
    found = compare(base, tuned)
    assert found.to_dict()["samples"][3]["expected"] == rows[3]["answer"]
    json.dumps(found.to_dict(), allow_nan=False)


def test_reasoning_that_the_prompt_opens_belongs_to_the_answer(prepared: Prepared) -> None:
    opened = replace(prepared, eval_prompts=[prompt + "<think>\n" for prompt in prepared.eval_prompts])
    found = evaluate(config(generate_rows=2), opened)
    assert len(found.samples) == 2 and all(sample.answer.startswith("<think>\n") for sample in found.samples)


def test_rows_without_answers_are_answered_and_not_judged(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = "{% for m in messages %}{{ m.content or m.tool_calls | tojson }}{% endfor %}"
    plain = tiny_tokenizer(template)
    data = [{"messages": turns}, {"messages": [{"role": "user", "content": "p"}, turns[1]]}]
    prepared = prepare_rows(DataConfig(eval_rows=1), plain, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate_module, "answer", of_nothing)
        found = evaluate(config(), prepared)
    assert found.accuracy.total == 0 and found.samples[0].question == prepared.eval_rows[0]["messages"][0]["content"]
    assert "well-formed" not in str(found)  # no row has reasoning, and no answer
    assert (found.samples[0].expected, found.samples[0].correct) == (None, None)


def test_plain_text_begins_with_the_special_tokens_it_was_trained_with() -> None:
    tokenizer = tiny_tokenizer(special=("<|im_start|>", "<|im_end|>", "<s>"), bos="<s>")
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": "5"}] for q in ("an", "answer")]
    plain, messages = (
        prepare_rows(DataConfig(eval_rows=1), tokenizer, rows).eval_prompt_ids
        for rows in (
            [{"prompt": text, "completion": "5"} for text in ("an answer", "answer")],
            [{"messages": chat} for chat in chats],
        )
    )
    assert plain[0][0] == tokenizer.bos_token_id and len(plain[0]) > 1
    assert messages[0][0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_perplexity_is_that_of_the_tokens_with_loss(prepared: Prepared, model: Any) -> None:
    """The loss of held-out rows as in training, here by transformers' own forward pass."""
    found = evaluate(config(generate_rows=4), prepared)
    losses = []
    for row in prepared.eval_rows[:4]:
        ((ids, mask),) = examples_of(prepared.encoder, row)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        losses += each[torch.tensor(mask[1:])].tolist()
    assert found.perplexity_tokens == len(losses)
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert f"perplexity               {found.perplexity:.4g}" in str(found)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
def test_replicas_share_the_work_and_find_the_same(tmp_path: Path, prepared: Prepared) -> None:
    """Three replicas on XLA:CPU for five rows, so that their shares differ."""
    trained(tmp_path)
    asked = config(generate_rows=5)
    alone = evaluate(asked, prepared, tmp_path)
    together = replace(asked, launch=replace(asked.launch, device_type="xla-cpu", num_replicas=3))
    found = evaluate(together, prepared, tmp_path)
    assert [sample.answer for sample in found.samples] == [sample.answer for sample in alone.samples]
    assert found.perplexity == pytest.approx(alone.perplexity, rel=1e-4)


def test_a_verifier_that_raises_costs_its_row_alone(
    model: Any, prepared: Prepared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = prepared.eval_rows
    asked = config(generate_rows=5, eval_generate_rows=5, verifier=f"{__name__}:judge")

    def judge(row: dict[str, Any], answer: str) -> bool:
        if row is rows[4]:
            raise KeyError("target")
        return row is rows[0]

    monkeypatch.setitem(globals(), "judge", judge)
    found = evaluate(asked, prepared)
    assert (found.accuracy.correct, found.accuracy.total, found.failed) == (1, 4, 1)
    assert [sample.correct for sample in found.samples] == [True, False, False, False, None]
    assert found.samples[4].error == "KeyError: 'target'"
    both = compare(found, found, seen_in_training=3)
    shown = str(both)
    assert rows[4]["question"] in shown and "base, not judged, the verifier raised KeyError: 'target':" in shown
    assert re.search(r"not judged \(error\) +1 +1\n", shown)
    assert "3 rows left out, because their questions are in the training data" in shown
    plain = json.loads(json.dumps(both.to_dict(), allow_nan=False))
    assert (plain["base"]["failed"], plain["seen_in_training"]) == (1, 3)
    assert plain["samples"][4]["tuned"]["error"] == "KeyError: 'target'" and "error" not in plain["samples"][0]["tuned"]
    capsys.readouterr()
    assert count_correct(model, asked, prepared, CpuRuntime(0, 1, torch.device("cpu"))) == (1, 4), "during training"
    told = "warning: 1 of 5 answers of replica 0 were not judged: the verifier raised KeyError: 'target'\n"
    assert capsys.readouterr().err == told


def test_rows_that_one_of_two_did_not_judge_count_for_neither() -> None:
    found = compare(evaluation(True, None, False), evaluation(None, True, True))
    assert (found.gained, found.lost) == (1, 0)


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[TrainConfig, Path]:
    """A run whose training rows ask two of the held-out questions in other words, and an adapter."""
    rows, held = cot_rows("train", 6, seed=1), cot_rows("eval", 5, seed=2)
    first, second = held[0]["question"], held[1]["question"]
    rows += [held[0] | {"question": f"  {first.upper().rstrip('?.')} "}, held[1] | {"question": second + "\n"}]
    for name, part in (("train", rows), ("eval", held)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
    trained(tmp_path / "run" / "adapter")
    given = {"base_dtype": "fp32", "device_type": "cpu", "generate_tokens": 8, "source": str(tmp_path / "train.jsonl"),
             "eval_source": str(tmp_path / "eval.jsonl")}  # fmt: skip
    return load_config(None, given), tmp_path / "run" / "adapter"


def test_questions_that_training_asks_too_are_left_out(
    mixed: tuple[TrainConfig, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, adapter = mixed
    (adapter.parent / "config.yaml").touch()
    (adapter.parent / "eval.json").mkdir()  # as in a read-only folder
    found = evaluate_adapter(run, adapter)
    assert (found.seen_in_training, len(found.base.samples)) == (2, 3)
    assert "run/eval.json could not be written (Is a directory)" in capsys.readouterr().err
    assert found.base.perplexity != found.tuned.perplexity
    assert "2 rows left out, because their questions are in the training data" in str(found)


def test_the_command(mixed: tuple[TrainConfig, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, adapter = mixed
    (tmp_path / "my.yaml").write_text(run.to_yaml())
    asked = ["evaluate", str(tmp_path / "my.yaml"), "generate_rows=2", f"adapter={adapter}"]
    assert main([*asked, "verifier=numeric"]) == 0
    printed = capsys.readouterr().out
    assert printed.split()[:2] == ["base", "tuned"] and "perplexity" in printed and "2 rows left out" in printed
    assert main([*asked, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["samples"]) == 2
    assert not (adapter.parent / "eval.json").exists(), "the folder is that of no run"
    assert main([*asked[:3], "--json"]) == 0  # the base model alone
    assert json.loads(capsys.readouterr().out)["base"]["accuracy"]["total"] == 2
    assert main([*asked[:3], f"adapter={tmp_path / 'gone'}"]) == 1
    assert "there is no adapter folder" in capsys.readouterr().err
    assert main([*asked[:3], "verifier=nearly"]) == 2
    assert "names no rule" in capsys.readouterr().err
    assert main(["evaluate", "a.yaml", "b.yaml"]) == 2
    assert main(["evaluate", "adaptor=x"]) == 2


def of_nothing(config: Any, asks: Any, rows: Any, **_: Any) -> Answers:
    """The answer of a model that generates nothing."""
    completions = [Completion("", None, "", (1,), "stop", 0.0) for _ in asks[0].prompts]
    return Answers([completions], [Rating([0.0] * (len(row) - 1), [True] * (len(row) - 1)) for row in rows])


def test_an_evaluation_needs_held_out_rows(prepared: Prepared) -> None:
    with pytest.raises(ValueError, match=r"no rows to evaluate on; hold out rows with data\.eval_rows"):
        evaluate(config(), replace(prepared, eval=None))
    with pytest.raises(ValueError, match=r"row 1: its prompt is empty, .*; for rows of plain text set"):
        evaluate(config(), replace(prepared, eval_prompt_ids=[[1], []]))
