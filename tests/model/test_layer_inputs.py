"""The kit's functions get their inputs in a forward pass without arguments of transformers."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch
import torch._dynamo  # the first model imports it, which takes seconds
from transformers import LlamaConfig, PreTrainedConfig

from tests.model.test_families import configuration
from tpu_kit.config.loader import LoraConfig
from tpu_kit.distributed.replica.backends import CpuRuntime
from tpu_kit.generation import reference_check
from tpu_kit.generation.decoder import Decoder
from tpu_kit.model import attention, causal_lm, preparation, trainable
from tpu_kit.model.families import linear_attention
from tpu_kit.model.loop import layer_scan
from tpu_kit.model.loop.layer_inputs import LayerInputs, Visibility, bound, current, kept

SEGMENTS = torch.tensor([[1] * 5 + [2] * 6 + [0] * 2, [1] * 13])
IDS = torch.randint(3, 61, (2, 13), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("config", [LlamaConfig(num_hidden_layers=2), configuration("lfm2")], ids=["llama", "lfm2"])
def test_models_get_the_arguments_that_they_declare_and_no_other(config: PreTrainedConfig) -> None:
    """transformers may take an unknown argument as its own, as `cache` in 5.24; a renamed argument would be ignored."""
    model = reference_check.narrow_model(config)
    linear_attention.connect(model)
    given: dict[str, set[str]] = {}

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        assert not args
        given.setdefault(type(module).__name__, set()).update(kwargs)

    for part in (model, model.get_decoder()):
        part.register_forward_pre_hook(note, with_kwargs=True)
    adapted = trainable.adapt(model, LoraConfig(r=2), "fp32")
    preparation.use_attention(adapted, "sdpa", "cpu")
    prefixes = torch.zeros_like(SEGMENTS)
    causal_lm.hidden_states(adapted, {"input_ids": IDS, "segment_ids": SEGMENTS, "prefix_ids": prefixes})
    layer_scan.stack(model.get_decoder())
    reference_check.replies(model, [[5, 6, 7], [8, 9]], steps=2)
    decoder = Decoder(model, CpuRuntime(0, 1, torch.device("cpu")), 2, 16)
    with decoder.ready():
        decoder.score(IDS)
    assert {"input_ids", "position_ids", "use_cache"} < given[type(model.get_decoder()).__name__]
    for part in (model, model.get_decoder()):
        declared = inspect.signature(type(part).forward).parameters
        assert given[type(part).__name__] <= {*declared} - {"kwargs"}, type(part)


def test_each_thread_has_its_own_inputs_and_a_kept_function_takes_them_along() -> None:
    """As autograd recomputes a layer, and as the replicas of XLA:CPU run."""
    outer, inner = LayerInputs(Visibility(SEGMENTS)), LayerInputs(device_type="tpu")
    seen: list[LayerInputs] = []
    with bound(outer):
        runs = kept(lambda: seen.append(current()))
        with bound(inner):
            runs()
            assert current() is inner
        for function in (runs, lambda: seen.append(current())):
            thread = threading.Thread(target=function)
            thread.start()
            thread.join()
    assert [one is outer for one in seen] == [True, True, False] and seen[2] == LayerInputs() == current()


def test_an_error_unbinds() -> None:
    with pytest.raises(KeyError), attention.bound(attention.SDPA, Visibility(SEGMENTS)):
        raise KeyError
    assert current() == LayerInputs()


@pytest.mark.slow
def test_a_compiled_layer_reads_them() -> None:
    """As on CUDA, recomputed or not: the second call has other documents than the trace."""
    for recomputes in (False, True):
        model = reference_check.narrow_model(configuration("lfm2")).eval()
        linear_attention.connect(model)
        preparation.use_attention(trainable.adapt(model, LoraConfig(r=2), "fp32"), "sdpa", "cpu")
        batches = [{"input_ids": IDS, "segment_ids": segments} for segments in (SEGMENTS, torch.ones_like(SEGMENTS))]
        if recomputes:
            preparation.enable_remat(model)
        expected = [causal_lm.hidden_states(model, batch) for batch in batches]
        for layer in model.get_decoder().layers:
            layer.compile(dynamic=False, backend="aot_eager")
        for batch, wanted in zip(batches, expected, strict=True):
            torch.testing.assert_close(causal_lm.hidden_states(model, batch), wanted, atol=1e-4, rtol=1e-4)
        torch._dynamo.reset()
