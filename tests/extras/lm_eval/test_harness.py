"""lm-evaluation-harness runs its tasks on the kit's generator; without the package, its three kinds of requests are
made by hand."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tpu_kit.assets.embedded import cot_rows
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.extras.lm_eval.harness import Requests, harness_model, windows
from tpu_kit.machine.storage.object_store import upload
from tpu_kit.model.weights.loading import load_base
from tpu_kit.model.weights.source import load_tokenizer


class Request(NamedTuple):
    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    return load_config(None, {"base_dtype": "fp32", "device_type": "cpu"})


@pytest.fixture(scope="module")
def model(config: TrainConfig) -> Requests:
    return Requests(config, None, 8, False)


@pytest.fixture(scope="module")
def stock(config: TrainConfig) -> Any:
    """Log-probabilities of a row's tokens by transformers' own forward pass, and which were the likeliest."""
    plain = load_base(config.model, torch.float32).eval()

    def rate(row: list[int]) -> tuple[list[float], list[bool]]:
        with torch.no_grad():
            logits = plain(torch.tensor([row])).logits[0, :-1].float()
        new = torch.tensor(row[1:])
        logprobs = torch.log_softmax(logits, -1).gather(1, new[:, None])[:, 0]
        return logprobs.tolist(), (logits.argmax(-1) == new).tolist()

    return rate


def test_how_likely_continuations_are(model: Requests, config: TrainConfig, stock: Any) -> None:
    tokenizer = load_tokenizer(config.model)
    # The context, the continuation, and the number of tokens that hold a part of it.
    pairs = [("Tom has 3 pens. How many", " pens", 1), ("Tom has 3 pens. ", "How many", 3), ("", "Tom", 1),
             ("2 + 3 =", " 5 pens", 3)]  # fmt: skip
    found = model.loglikelihood([Request(pair[:2]) for pair in pairs])
    for (context, continuation, new), (logprob, greedy) in zip(pairs, found, strict=True):
        whole = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
        begin = [] if context else [tokenizer.eos_token_id]  # it has no begin-of-text token
        logprobs, likeliest = stock([*begin, *whole])
        assert logprob == pytest.approx(sum(logprobs[-new:]), abs=1e-3)
        assert greedy is all(likeliest[-new:])
    with pytest.raises(ValueError, match="request 0: the continuation '' is empty"):
        model.loglikelihood([Request(("a", ""))])
    with pytest.raises(
        ValueError, match=r"request 1: its \d+ tokens are more than the \d+ positions of the model; cut"
    ):
        model.loglikelihood([Request(("a", " b")), Request(("a " * 9000, " b"))])
    with pytest.raises(ValueError, match=r"request 0: its continuation has \d+ tokens, but at most \d+ fit the mo"):
        Requests(config, None, 8, True).loglikelihood([Request(("a", " b" * 9000))])


@pytest.mark.parametrize(("length", "width"), [(2, 5), (5, 5), (6, 5), (9, 5), (10, 5), (23, 5), (1, 5)])
def test_windows_take_each_token_once(length: int, width: int) -> None:
    row, said = list(range(length)), []
    for part, new in windows(row, width):
        assert 1 <= new < len(part) <= width
        assert part == row[part[0] : part[-1] + 1]
        said += part[-new:]
    assert said == row[1:]
    if length > width:
        assert len(part) == width  # the last window has as much context as fits


def test_whole_texts(model: Requests, config: TrainConfig, stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(config.model)
    text = "Tom has 3 pens. Tom buys 4 more and then loses 2 of them. How many pens does Tom have now?"
    row = [tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert model.loglikelihood_rolling([Request((text,))]) == pytest.approx([sum(stock(row)[0])], abs=1e-3)
    monkeypatch.setattr(model, "_positions", 8)
    wanted = sum(sum(stock(part)[0][-new:]) for part, new in windows(row, 8))
    assert model.loglikelihood_rolling([Request((text,)), Request(("Tom",))])[0] == pytest.approx(wanted, abs=1e-3)


def test_texts_up_to_their_stop_strings(model: Requests) -> None:
    context = model.apply_chat_template([{"role": "user", "content": "What is 2 + 3?"}])
    options: list[dict[str, Any]] = [
        {"until": ["\n\n"], "max_gen_toks": 6},
        {"until": "5", "max_gen_toks": 6, "do_sample": False, "temperature": 0.7},
        {"until": ["\n\n"], "max_gen_toks": 6},
        {"until": [], "max_gen_toks": 6, "do_sample": True, "temperature": 1.0, "top_k": 5, "seed": 1},
    ]
    first, cut, again, drawn = model.generate_until([Request((context, given)) for given in options])
    assert first == again and "5" not in cut and isinstance(drawn, str)
    assert first.startswith(cut)
    with pytest.raises(ValueError, match="generation options num_beams: the generator does not have them"):
        model.generate_until([Request((context, {"num_beams": 4}))])


def test_the_answer_follows_the_reasoning(config: TrainConfig, model: Requests) -> None:
    """As with `think_end_token` of lm-eval's own models; here the tags are words that the model writes."""
    context = "Tom has 3 pens. Tom buys"

    def answers(tags: tuple[str, str], *requests: tuple[str, list[str], int]) -> list[str]:
        data = replace(config.data, think_open=tags[0], think_close=tags[1])
        tagged = Requests(replace(config, data=data), None, 8, False)
        return tagged.generate_until(
            [Request((text, {"until": until, "max_gen_toks": length})) for text, until, length in requests]
        )

    (text,) = model.generate_until([Request((context, {"until": [], "max_gen_toks": 40}))])
    assert text == " 2. Tom buys 2 so 3 + 2 = 5."
    cases = [(context, ["buys"], 40), (context, [" ="], 40), (context, ["\n", "3"], 40), (context, [" "], 40)]
    found = answers(("2.", "so"), *cases, (context, [" "], 6), (f"{context} 2.", ["buys"], 40))
    assert found == ["3 + 2 = 5.", "3 + 2", "", "3", "", "3 + 1 = 4."]  # the fifth has not closed its reasoning
    assert answers(("<think>", "</think>"), (context, ["buys"], 40)) == [" 2. Tom "]  # there is no reasoning
    utils = pytest.importorskip("lm_eval.models.utils")
    theirs = [utils.postprocess_generated_text(text, until, "so") for _, until, _ in cases]
    assert found[:4] == theirs


def test_the_chat_template_is_the_adapters(config: TrainConfig, tmp_path: Path, bucket: str) -> None:
    tokenizer = load_tokenizer(config.model)
    tokenizer.chat_template = "Q: {{ messages[0].content }} A:"
    tokenizer.save_pretrained(tmp_path / "adapter")
    upload(tmp_path / "adapter", f"{bucket}/run/adapter")
    for adapter in (tmp_path / "adapter", f"{bucket}/run/adapter"):
        model = Requests(config, adapter, 8, False)
        assert model.apply_chat_template([{"role": "user", "content": "2 + 3?"}]) == "Q: 2 + 3? A:"
        assert model.chat_template() == tokenizer.chat_template


def test_without_the_package(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ValueError, match=r"lm-evaluation-harness cannot be imported .*: pip install lm-eval"):
        harness_model(config)


# The package's files alone, as `make train-real` installs them, are not enough to run tasks: it imports these.
NEEDED = [name for name in ("lm_eval", "sacrebleu", "evaluate") if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(NEEDED), reason=f"needs lm-eval with its dependencies ({', '.join(NEEDED)} missing)")
def test_a_local_task_of_each_kind(config: TrainConfig, tmp_path: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    rows = cot_rows("eval", 12, seed=5)
    choices = [{**row, "options": [row["answer"], "61"], "label": 0} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in choices))
    task = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
            "test_split": "test", "num_fewshot": 0}  # fmt: skip
    kinds: dict[str, dict[str, Any]] = {
        "said": {
            "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
        "chosen": {
            "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "label",
            "doc_to_choice": "{{options}}", "metric_list": [{"metric": "acc", "aggregation": "mean",
                                                            "higher_is_better": True}],
        },
        "read": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
            "metric_list": [{"metric": "word_perplexity", "aggregation": "weighted_perplexity",
                             "higher_is_better": False}],
        },
    }  # fmt: skip
    for name, settings in kinds.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **task, **settings}))
    mine = harness_model(config)
    options: dict[str, Any] = {"bootstrap_iters": 0, "log_samples": True}
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(mine, tasks=list(kinds), task_manager=manager, apply_chat_template=True, **options)
    said = [sample["resps"][0][0] for sample in found["samples"]["said"]]
    right = sum(text.strip() == row["answer"] for text, row in zip(said, rows, strict=True))
    assert found["results"]["said"]["exact_match,none"] == pytest.approx(right / len(rows))
    assert 0 <= found["results"]["chosen"]["acc,none"] <= 1
    words = sum(len(row["question"].split()) for row in rows)
    told = sum(mine.loglikelihood_rolling([Request((row["question"],)) for row in rows]))
    assert found["results"]["read"]["word_perplexity,none"] == pytest.approx(math.exp(-told / words), rel=0.1)
