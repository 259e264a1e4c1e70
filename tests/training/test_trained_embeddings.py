"""Trained embedding rows, whole embeddings and LoRA on embeddings match plain PEFT in computation and files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.training_functions import control
from tpu_kit.config.loader import OptimConfig, TrainConfig, load_config
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.generation.decoder import Decoder
from tpu_kit.generation.model_loading import load_for_generation
from tpu_kit.model.base_model import output_embedding
from tpu_kit.model.causal_lm import hidden_states, trainable_parameters
from tpu_kit.model.meta_model import shape_of
from tpu_kit.model.trainable import load_model
from tpu_kit.model.weights.source import load_tokenizer, token_numbers
from tpu_kit.model.weights.trained_embeddings import untie
from tpu_kit.planning.memory.argument_memory import model_tensors
from tpu_kit.training.adapter_files import adapter_tensors, save_adapter, start_from
from tpu_kit.training.losses.loss import shift_labels, token_logprobs
from tpu_kit.training.objectives import SupervisedObjective
from tpu_kit.training.optimizer import relative_rates
from tpu_kit.training.step import prepare_model, train_step

TOKENS = ("<tray>", "<box>", "<pen>")
LAYERS = ["q_proj", "down_proj"]
CPU = torch.device("cpu")
EPS = 1e-4  # AdamW's; with 1e-8 it would divide gradients that are rounding errors by themselves


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has added tokens."""
    path = tmp_path_factory.mktemp("base")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(TOKENS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                initializer_range=0.05,
                tie_word_embeddings=request.param,
            )
        )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


WAYS: dict[str, dict[str, Any]] = {
    "tokens": {"lora.tokens": [*TOKENS]},
    "one matrix": {"lora.full": ["embed_tokens"]},
    "both matrices": {"lora.full": ["embed_tokens", "lm_head"]},
    "LoRA+ with an embedding": {
        "lora.targets": [*LAYERS, "embed_tokens"],
        "lora.plus": 4.0,
        "embedding_learning_rate": 1e-3,
    },
    "LoRA on the head": {"lora.targets": [*LAYERS, "lm_head"]},
    "LoRA on both": {"lora.targets": [*LAYERS, "embed_tokens", "lm_head"]},
}
QUICK = ("tokens", "both matrices", "LoRA+ with an embedding")


def configure(folder: Path, **changes: Any) -> TrainConfig:
    given = {"model.name": str(folder), "base_dtype": "fp32", "lora.r": 4, "lora.alpha": 4, "lora.targets": LAYERS}
    # An update multiplies rounding errors of a gradient by at most its rate / eps, so that LoRA+ needs a larger eps.
    optim = {"learning_rate": 3e-3, "loss_chunk": 7, "max_grad_norm": 1.0, "eps": EPS * changes.get("lora.plus", 1.0)}
    return load_config(None, {**given, **optim, **changes})


def peft_of(config: TrainConfig, tied: bool, numbers: list[int]) -> PeftLoraConfig:
    """Returns the settings that a user of PEFT would write."""
    lora, settings = config.lora, dict[str, Any]()
    if lora.tokens:
        settings["trainable_token_indices"] = numbers if tied else {"embed_tokens": numbers, "lm_head": numbers}
    if lora.full:
        settings |= {"modules_to_save": [*lora.full], "ensure_weight_tying": tied}
    return PeftLoraConfig(
        r=lora.r, lora_alpha=int(lora.alpha), target_modules=[*lora.targets], task_type="CAUSAL_LM", **settings
    )


def rows(vocabulary: int, numbers: list[int]) -> torch.Tensor:
    ids = torch.randint(3, vocabulary, (3, 20), generator=torch.Generator().manual_seed(1))
    ids[0, 4], ids[1, 9], ids[2, 2] = numbers[0], numbers[1], numbers[0]  # one added token does not occur
    return ids


@pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|save_embedding_layers).*")
@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in QUICK else [pytest.mark.slow]) for way in WAYS])
def test_ten_updates_are_those_of_peft(way: str, folder: Path, tmp_path: Path) -> None:
    config = configure(folder, **WAYS[way])
    model: Any = load_model(config.model, config.lora, seed=3)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tied, plain = base.config.tie_word_embeddings, copy.deepcopy(base).to("meta")
    plain.tie_weights()
    numbers = [base.config.vocab_size - len(TOKENS) + place for place in range(len(TOKENS))]
    peft = get_peft_model(base, peft_of(config, tied, numbers))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    planned = {one.name: one.shape for one in model_tensors(shape_of(plain, "tiny"), config, scanned=False)}
    known = ("rotary", "numbers")
    assert planned == {n: tuple(t.shape) for n, t in tensors.items() if not any(one in n for one in known)}
    initial = adapter_tensors(model, {name: p.detach().clone() for name, p in trainable_parameters(model).items()})
    theirs = get_peft_model_state_dict(peft, save_embedding_layers=False)
    assert {name: value.shape for name, value in initial.items()} == {n: value.shape for n, value in theirs.items()}
    peft.load_state_dict({_full(name): value for name, value in initial.items()}, strict=False)
    rates = {"loraplus_lr_ratio": config.lora.plus, "loraplus_lr_embedding": config.optim.embedding_learning_rate}
    options = {"lr": 3e-3, "eps": config.optim.eps, "weight_decay": 0.0}
    if config.lora.plus == 1:
        optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], **options)
    else:
        optimizer = create_loraplus_optimizer(peft, torch.optim.AdamW, **options, **rates)

    runtime, objective = CpuRuntime(0, 1, CPU), SupervisedObjective(config.optim)
    state = prepare_model(model, config, runtime)
    ids = rows(base.config.vocab_size, numbers)
    batch = {"input_ids": ids, "labels": ids, "segment_ids": torch.ones_like(ids, dtype=torch.int32),
             "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}  # fmt: skip
    for step in range(1, 11):
        ours = objective(model, batch)
        gradients = torch.autograd.grad(ours.loss / ours.weight, list(trainable_parameters(model).values()))
        loss = peft(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.testing.assert_close(ours.loss / ours.weight, loss, atol=1e-6, rtol=1e-6)
        named = dict(peft.named_parameters())
        for name, gradient in zip(trainable_parameters(model), gradients, strict=True):
            torch.testing.assert_close(gradient, named[name].grad, atol=1e-6, rtol=0, msg=f"{step} {name}")
        torch.nn.utils.clip_grad_norm_([p for p in peft.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        train_step(model, state, [batch], control(3e-3, step, 0.0), objective, config.optim, runtime)

    values = {name.removeprefix("parameters/"): value for name, value in state.to_host(runtime).items()
              if name.startswith("parameters/")}  # fmt: skip
    save_adapter(tmp_path / "adapter", model, values, config, None)
    files = load_file(tmp_path / "adapter/adapter_model.safetensors")
    theirs = get_peft_model_state_dict(peft, save_embedding_layers=False)
    assert files.keys() == theirs.keys()
    for name, value in files.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-6, rtol=1e-6, msg=name)
        assert name.endswith("embed_tokens.lora_embedding_A") or (value - initial[name]).abs().max() > 1e-4
    with torch.no_grad():  # as grpo, dpo and distillation read the output layer
        labels = shift_labels(ids)
        logps, _ = token_logprobs(hidden_states(model, batch), output_embedding(model), labels, 7)
        whole = torch.log_softmax(peft(input_ids=ids).logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        torch.testing.assert_close(logps[:, :-1], whole[:, :-1], atol=2e-6, rtol=1e-6)
        decoder = Decoder(model, runtime, 3, 20)
        with decoder.ready():  # as evaluation scores answers
            scores = decoder.score(ids)[0]
        torch.testing.assert_close(scores, whole[:, :-1], atol=2e-6, rtol=1e-6)
        with model.disable_adapter(), peft.disable_adapter():
            off = output_embedding(model).logits(hidden_states(model, batch))
            torch.testing.assert_close(off, peft(input_ids=ids).logits, atol=2e-6, rtol=1e-6)
    assert trainable_parameters(model).keys() == values.keys()
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), str(tmp_path / "adapter")
    )
    with torch.no_grad():
        expected = peft(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    merged = load_for_generation(config.model, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
        untie(merged)
        merged = merged.merge_and_unload(safe_merge=True)
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
        merged.save_pretrained(tmp_path / "merged")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(again(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    started = load_model(config.model, config.lora)
    start_from(started, tmp_path / "adapter")
    assert all(torch.equal(values[name], value) for name, value in trainable_parameters(started).items())


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            ["<nowhere>", "<tray>"],
            r"lora.tokens: '<nowhere>' is not a token of model.name=.*Add it first, and name the fol",
        ),
        (
            "added",
            "lora.tokens=added: the new tokens of the rows are found when a run is planned; name the tokens here",
        ),
    ],
)
def test_tokens_that_are_not_there_are_refused(tokens: Any, message: str, folder: Path) -> None:
    config = configure(folder, **{"lora.tokens": tokens})
    with pytest.raises(ValueError, match=message):
        load_model(config.model, config.lora)


def test_tokens_are_named_by_their_text_or_their_number(folder: Path) -> None:
    numbers = load_tokenizer(configure(folder).model).convert_tokens_to_ids(list(TOKENS))
    config = configure(folder, **{"lora.tokens": [TOKENS[0], f"id:{numbers[2]}"]})
    assert token_numbers(config.model, config.lora) == [numbers[0], numbers[2]]


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_an_adapter_of_the_head_that_the_loss_does_not_compute_is_refused(changes: dict[str, bool]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, tie_word_embeddings=False))
    if "lora_bias" in changes:
        model.lm_head = torch.nn.Linear(32, 64)
    tuned = get_peft_model(model, PeftLoraConfig(r=2, target_modules=["lm_head"], **changes))
    with pytest.raises(ValueError, match=r"the adapter of the output head has DoRA or a bias, .*: merge it"):
        output_embedding(tuned)


def test_a_rate_for_embeddings_without_any_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"optim\.embedding_learning_rate=0.001: no embedding is trained; set lora.tokens"
    ):
        relative_rates(["a.lora_A.default.weight"], ["embed."], OptimConfig(embedding_learning_rate=1e-3))


def _full(name: str) -> str:
    """Returns the name in a `PeftModel` of a tensor in a file."""
    if name.endswith((".lora_A.weight", ".lora_B.weight")):
        return name.replace(".weight", ".default.weight")
    if name.endswith(".weight"):
        return f"{name.removesuffix('.weight')}.modules_to_save.default.weight"
    return f"{name}.default"
