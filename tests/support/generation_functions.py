"""Functions of the generation tests, for XLA:CPU in children: `python -m tests.support.generation_functions NAME`."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)  # fmt: skip

from tpu_kit.config.loader import DataConfig, LoraConfig, ModelConfig, load_config
from tpu_kit.config.mesh import resolve_mesh
from tpu_kit.distributed.replica.backends import CpuRuntime, MeshRuntime, SimulatedRuntime
from tpu_kit.distributed.replica.mesh import start
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.generator import Generator
from tpu_kit.generation.sampling import Sampling
from tpu_kit.model import attention, trainable
from tpu_kit.model import causal_lm as models
from tpu_kit.model.loop.layer_scan import stack
from tpu_kit.model.preparation import prepare_layers
from tpu_kit.model.shape import WITHOUT_ADAPTER
from tpu_kit.model.weights.quantization import Scheme, quantize_model
from tpu_kit.model.weights.source import load_tokenizer

EOS = 3
_COMMON: dict[str, Any] = {
    "vocab_size": 640, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": EOS, "bos_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip
_GEMMA = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
_DELTA = _COMMON | {
    "num_hidden_layers": 8, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_COMMON)),
    "llama, four key-value heads": lambda: LlamaForCausalLM(LlamaConfig(**{**_COMMON, "num_key_value_heads": 4})),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_COMMON)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_COMMON, head_dim=16)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**_COMMON, **_GEMMA)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**{**_COMMON, "num_hidden_layers": 4}, **_GEMMA, sliding_window_pattern=2)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_COMMON)),
    "mistral, sliding": lambda: MistralForCausalLM(MistralConfig(**_COMMON, sliding_window=8)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_COMMON, sliding_window=8)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**_COMMON)),
    # Two head sizes, and layers that share the keys and values of earlier layers.
    "gemma4": lambda: Gemma4ForCausalLM(
        Gemma4TextConfig(
            **_COMMON | {"num_hidden_layers": 10, "num_key_value_heads": 1},
            head_dim=8,
            global_head_dim=16,
            sliding_window=8,
            num_kv_shared_layers=4,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=640,
            layer_types=["sliding_attention", "full_attention"] * 5,
        )
    ),
    # Layers with a recurrent state.
    "qwen3_5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_DELTA)),
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**_DELTA, mlp_only_layers=list(range(8)))),
    "lfm2": lambda: Lfm2ForCausalLM(Lfm2Config(**_COMMON | {"num_hidden_layers": 6}, full_attn_idxs=[2, 5])),
    "granitemoehybrid": lambda: GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **_COMMON | {"num_hidden_layers": 6}, **_MAMBA, layer_types=["mamba", "mamba", "attention"] * 2,
            num_local_experts=0, shared_intermediate_size=48,
        )
    ),
    "bamba": lambda: BambaForCausalLM(
        BambaConfig(**_COMMON | {"num_hidden_layers": 6}, **_MAMBA, attn_layer_indices=[2, 5])
    ),
    "falcon_h1": lambda: FalconH1ForCausalLM(FalconH1Config(**_COMMON, **_MAMBA, mamba_d_ssm=64)),
}  # fmt: skip
NEW = 24  # tokens of a reply
_QUICK = ("llama", "gemma3", "phi")  # grouped heads; alternating windows, norms of heads; partial rotary, biases
QUICK_FAMILIES = [
    pytest.param(family, marks=[] if family in _QUICK else [pytest.mark.slow], id=family) for family in FAMILIES
]
"""The families for parametrised tests: the quick suite runs the three that differ most."""


def make(family: str) -> Any:
    """Builds a tiny random model in evaluation mode; the weights depend on the family only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[family]().eval()
    model.generation_config.eos_token_id = [1, EOS]  # 1 is the end token of the embedded tokenizer
    return model


def with_lora(model: Any) -> Any:
    """Adds LoRA adapters by PEFT, with weights large enough to change the replies."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    without = WITHOUT_ADAPTER.get(model.config.model_type)
    settings = PeftLoraConfig(r=4, target_modules="all-linear", exclude_modules=without, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted.eval()


def in_loops(model: Any) -> Any:
    """Stacks the model's equal layers into loops."""
    attention.register()
    stack(models.base_model(model).get_decoder())
    return model.eval()


def prompts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Draws random token ids, one prompt per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 640, (length,), generator=generator).tolist() for length in lengths]


MIXED = prompts_of(5, 40, 1, 12, 23, 2, 70)


def stock(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Generates greedy replies by transformers, one prompt at a time."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        new = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)
        found.append(new[0, len(prompt) :].tolist())
    return found


def generator(model: Any, rt: Runtime | None = None, **options: Any) -> Generator:
    """Makes a generator for prompts of up to 70 tokens, with the embedded model's tokenizer."""
    rt = rt or CpuRuntime(0, 1, torch.device("cpu"))
    models.to_device(model, rt.local_device)
    options = {"max_prompt": 70, "max_new_tokens": 32, "batch_size": 4, **options}
    return Generator(model, load_tokenizer(ModelConfig()), rt, data=DataConfig(), **options)


def tokens(replies: list[Any]) -> list[list[int]]:
    """Returns the token ids of completions."""
    return [list(reply.tokens) for reply in replies]


def different_samples(mine: list[Any], theirs: list[Any]) -> int:
    """Counts the sampled replies that differ.

    A different order of summation rounds probabilities differently. Rarely, a random number then selects the next
    token, and the rest of that reply differs. A real error changes most replies.
    """
    return sum(a != b for a, b in zip(tokens(mine), tokens(theirs), strict=True))


# ------------------------------------------------------------------------------------------ on XLA:CPU, in a child


_GREEDY = ("gemma4 in loops", "llama with lora in loops", "llama with lora one by one")


def _xla() -> Runtime:
    import torch_xla

    return SimulatedRuntime(0, 1, torch_xla.device())


def _mesh(text: str) -> Runtime:
    """A runtime on a mesh of this process's virtual devices."""
    import torch_xla

    mesh = resolve_mesh(text, int(os.environ["CPU_NUM_DEVICES"]))
    start(mesh)
    return MeshRuntime("xla-cpu", mesh, torch_xla.device())


def families(rt: Runtime) -> dict[str, bool]:
    """Whether the greedy tokens equal transformers', for the families that `greedy` omits."""
    return _same(rt, *(name for family in FAMILIES for name in (family, f"{family} in loops") if name not in _GREEDY))


def _same(rt: Runtime, *names: str) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for family in names:
        model = make(family.removesuffix(" in loops").removesuffix(" one by one").removesuffix(" with lora"))
        model = with_lora(model) if "lora" in family else model
        wanted = stock(model, MIXED)
        model = in_loops(model) if "loops" in family else model
        if "one by one" in family:
            assert prepare_layers(model, load_config({"optim.remat": "none"}), rt.device_type) is None
        found[family] = tokens(generator(model, rt).generate(MIXED, Sampling(max_new_tokens=NEW))) == wanted
    return found


def scores(one: Generator, prompts: list[list[int]], replies: list[list[int]]) -> list[tuple[float, bool]]:
    """Returns each reply's log-probability given its prompt, and whether all its tokens are the most likely."""
    ratings = one.rate([[*prompt, *reply] for prompt, reply in zip(prompts, replies, strict=True)])
    parts = [[part[-len(reply) :] for part in ratings[row]] for row, reply in enumerate(replies)]
    return [(sum(logprobs), all(likeliest)) for logprobs, likeliest in parts]


RULES: dict[str, Any] = {
    "repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "min_new_tokens": 6, "suppress_tokens": [26],
    "bad_words_ids": [[28, 30], [33]], "sequence_bias": [[[31], 2.0]], "begin_suppress_tokens": [27],
}  # fmt: skip
"""Settings of a generation config."""


def _with_rules(rt: Runtime) -> bool:
    """Whether the tokens under a generation config equal transformers', with a single decode program."""
    model = make("llama")
    model.generation_config.update(**RULES)
    wanted, mine = stock(model, MIXED), generator(model, rt)
    before, same = rt.counters()["compiles"], tokens(mine.generate(MIXED, Sampling(NEW))) == wanted
    compiled = rt.counters()["compiles"] - before
    mine.generate(MIXED[::-1], Sampling(NEW))
    # Two prompt widths and one decode program.
    return same and compiled <= 3 and rt.counters()["compiles"] == before + compiled


def greedy(rt: Runtime) -> dict[str, Any]:
    """Greedy tokens and rules against transformers; samples and scores on XLA against the CPU."""
    found: dict[str, Any] = _same(rt, *_GREEDY) | {"rules": _with_rules(rt)}
    drawn = Sampling(max_new_tokens=20, temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.3)
    mine = generator(make("llama")).generate(MIXED[:3], drawn, n=3)
    theirs = generator(make("llama"), rt).generate(MIXED[:3], drawn, n=3)
    found["samples"] = different_samples(mine, theirs) <= 1
    scored = [scores(generator(make("gemma2"), device), MIXED[:4], prompts_of(3, 1, 6, 2)) for device in (None, rt)]
    found["scores"] = max(abs(a[0] - b[0]) for a, b in zip(*scored, strict=True))
    return found


def counts(rt: Runtime) -> dict[str, Any]:
    """Compiles, executions and reads for prompts of random lengths: batch size 1, and 8 with layers in a loop."""
    lengths = torch.randint(5, 101, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = prompts_of(*lengths)
    found: dict[str, Any] = {}
    for size, model in ((1, make("llama")), (8, in_loops(make("llama")))):
        model.config.max_position_embeddings = 512
        mine = generator(model, rt, max_prompt=100, batch_size=size)
        for turn in ("first", "again"):
            before = rt.counters()
            # Neither the order of prompts nor the temperature nor the length compiles another program.
            sampling = Sampling(max_new_tokens=32 if turn == "first" else 20, temperature=0.7 if size == 8 else 0.0)
            replies = mine.generate(prompts if turn == "first" else prompts[::-1], sampling)
            after = rt.counters()
            found[f"{size} {turn}"] = {name: after[name] - before[name] for name in after} | {
                "tokens": sum(len(reply.tokens) for reply in replies)
            }
    return found


def trained_between(rt: Runtime) -> dict[str, Any]:
    """Generates with a model in training, bf16 arithmetic, before and after an update of its weights in place."""
    model = trainable.adapt(make("llama"), LoraConfig(r=4), "fp32")
    mine = generator(model, rt)
    first = tokens(mine.generate(MIXED[:2], Sampling(max_new_tokens=16)))
    mode = (model.training, model.get_base_model().config._attn_implementation)  # type: ignore[operator]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    rt.sync()
    before = rt.counters()["compiles"]
    second = tokens(mine.generate(MIXED[:2], Sampling(max_new_tokens=16)))
    compiled = rt.counters()["compiles"] - before
    fresh = tokens(generator(model, rt).generate(MIXED[:2], Sampling(max_new_tokens=16)))
    return {"changed": first != second, "as it is": second == fresh, "compiled": compiled, "mode": mode}


def sharded(rt: Runtime) -> dict[str, Any]:
    """Tokens and scores of a model on a mesh against the CPU's, and the counters of two calls."""
    found: dict[str, Any] = {}
    drawn = Sampling(max_new_tokens=20, temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.3)
    model = with_lora(make("llama, four key-value heads"))
    mine, theirs = generator(copy.deepcopy(model)), generator(in_loops(model), rt)
    for name, sampling, n in (("greedy", Sampling(max_new_tokens=NEW), 1), ("samples", drawn, 2)):
        before = rt.counters()
        replies = mine.generate(MIXED, sampling, n), theirs.generate(MIXED, sampling, n)
        found[name] = different_samples(*replies) <= (name == "samples")
        after = rt.counters()
        found[f"{name} counts"] = {kind: after[kind] - before.get(kind, 0) for kind in after}
    scored = [scores(one, MIXED[:4], prompts_of(3, 1, 6, 2)) for one in (mine, theirs)]
    found["scores"] = max(abs(a[0] - b[0]) for a, b in zip(*scored, strict=True))
    return found


def sharded_families(rt: Runtime) -> dict[str, bool]:
    """Whether greedy tokens on a mesh are transformers'; most families have 2 key-value heads, not a multiple of 4."""
    return _same(rt, *FAMILIES, "qwen3 with lora in loops", "phi3 with lora", "gemma3 in loops")


def sharded_integers(rt: Runtime) -> dict[str, bool]:
    """Whether adapters over int8 and int4 generate the same tokens on a mesh and on the CPU."""
    found = {}
    for scheme in (Scheme(8), Scheme(4, 8)):
        model = make("llama, four key-value heads")
        quantize_model(model, scheme)
        model = with_lora(model)
        mine, theirs = generator(copy.deepcopy(model)), generator(in_loops(model), rt)
        sampling = Sampling(max_new_tokens=NEW)
        found[str(scheme)] = tokens(mine.generate(MIXED, sampling)) == tokens(theirs.generate(MIXED, sampling))
    return found


if __name__ == "__main__":
    replica = _mesh(os.environ["MESH"]) if "MESH" in os.environ else _xla()
    print(json.dumps({name: globals()[name](replica) for name in sys.argv[1:]}))
