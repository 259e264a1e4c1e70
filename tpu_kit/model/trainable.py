"""The model to train: a pretrained base with LoRA adapters or with all weights trained; precision: see `causal_lm`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.model import attention
from tpu_kit.model.base_model import base_model, output_embedding
from tpu_kit.model.causal_lm import autocast, compute_dtype, logits, trainable_parameters
from tpu_kit.model.families import experts
from tpu_kit.model.families import registry as families
from tpu_kit.model.loop.layer_inputs import Visibility
from tpu_kit.model.rotary import fix_rotary
from tpu_kit.model.shape import WITHOUT_ADAPTER, check_targets
from tpu_kit.model.weights import trained_embeddings as embeddings
from tpu_kit.model.weights.loading import load_base, load_frozen
from tpu_kit.model.weights.quantization import QuantizedLinear
from tpu_kit.model.weights.quantization import layers_of as linear_layers
from tpu_kit.model.weights.source import token_numbers as token_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from tpu_kit.config.loader import LoraConfig, ModelConfig

# PEFT uses a deprecated name of transformers, which users cannot change.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.bfloat16, "int4": torch.bfloat16}
COMPARED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_text", "phi", "phi3")
"""The families (model_type) whose output head the tests compare with transformers' own logits."""


class ParameterCount(NamedTuple):
    """Numbers of parameters, counting tied weights once, and a note about quantized weights."""

    trainable: int
    total: int
    quantized: str = ""

    def __str__(self) -> str:
        share = self.trainable / self.total
        return f"{self.trainable:,} of {self.total:,} parameters are trained ({share:.2%}){self.quantized}"


def load_model(
    config: ModelConfig, lora: LoraConfig, seed: int = 0, settings: PreTrainedConfig | None = None
) -> torch.nn.Module:
    """Loads the base model on the CPU and makes it trainable.

    Args:
        config: the model and its dtype.
        lora: the adapters; r = 0 trains all weights instead, in fp32.
        seed: seed of the adapters' initial values; the global random state does not change.
        settings: result of `source.read_config`, if the caller has it.

    Returns:
        A `PeftModel`, or the plain model if lora.r = 0, in training mode, with the segment-aware attention "tpu_kit".
        On a mesh, weights with lora.r = 0 still have the dtype of the files; `to_mesh` makes them fp32.

    Raises:
        ValueError: from `token_numbers`, `load_frozen` or `load_base`, `adapt`, or `check_head` for an unknown family.
    """
    # On a mesh, trained weights stay memory-mapped in their saved dtype until their shards are made in fp32.
    whole: Any = torch.float32 if active_mesh().size == 1 else "auto"
    numbers = token_numbers(config, lora)
    base = load_frozen(config, settings) if lora.r else load_base(config, whole, settings)
    model = adapt(base, lora, config.base_dtype, seed, numbers)
    if base_model(model).config.model_type not in COMPARED:
        check_head(model)
    return model.train()


def adapt(
    model: PreTrainedModel, lora: LoraConfig, base_dtype: str, seed: int = 0, tokens: Sequence[int] | None = None
) -> torch.nn.Module:
    """Makes a causal language model trainable, in place, on any device.

    Args:
        model: the base model, in the dtypes that `causal_lm` describes.
        lora: the adapters; r = 0 trains all weights.
        base_dtype: "fp32" runs matrix products in fp32, others in bf16.
        seed: seed of the adapters' initial values; the global random state does not change.
        tokens: the ids of `lora.tokens`; None: the first ids, for a model on "meta".

    Returns:
        A `PeftModel` with fp32 adapters if lora.r > 0, otherwise `model`; `requires_grad` marks trained parameters.

    Raises:
        ValueError: from `shape.check_targets`, or a target is only in vision modules. With lora.r=0, the model has
            weights that text does not use. With `lora.experts`, it has no experts. The kit cannot compute its layers or
            attention.
    """
    _connect(model, base_dtype, frozen=lora.r > 0)
    adapted: torch.nn.Module = model.requires_grad_(True)
    others = _linears_outside_text(model)
    projector = _projector(model) if lora.vision else []
    if not lora.r and others:
        raise ValueError(
            f"lora.r=0 trains all weights, and {type(model).__name__} has some that text does not use, such as "
            f"{others[0]}: train adapters (lora.r=16) of its language model instead"
        )
    if lora.r:
        from peft import LoraConfig as PeftLoraConfig

        own = experts.parameters_of(model) if lora.experts else []
        if lora.experts and not own:
            raise ValueError(f"lora.experts={lora.experts}: {type(model).__name__} has no experts; set it to 0")
        others = [name for name in others if name not in projector]
        targets, parameters = _targets(model, lora, others, projector), list[str]()
        if isinstance(targets, list):
            targets, parameters = experts.targets_for_peft(model, targets)
        excluded = others, experts.routers_of(model), WITHOUT_ADAPTER.get(model.config.model_type, ())
        settings = PeftLoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=targets,
            exclude_modules=[name for names in excluded for name in names] or None,
            use_rslora=lora.rslora,
            use_dora=lora.dora,
            init_lora_weights=True if lora.init == "default" else lora.init,
            target_parameters=own + parameters + (_projector_parameters(model) if lora.vision else []) or None,
            rank_pattern=dict.fromkeys(own, lora.experts),
            alpha_pattern=dict.fromkeys(own, lora.alpha * lora.experts / lora.r),
            task_type="CAUSAL_LM",
            **embeddings.peft_settings(model, lora, range(len(lora.token_names)) if tokens is None else tokens),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapted = experts.with_adapters(model, settings)
        for param in trainable_parameters(adapted).values():  # a trained copy has the dtype of its matrix
            param.data = param.data.float()
    return adapted


def freeze(model: PreTrainedModel, base_dtype: str) -> PreTrainedModel:
    """Prepares a loaded base model, in place, as a frozen model in evaluation mode beside the trained model.

    `base_dtype`: see `adapt`. Raises ValueError if the kit cannot compute its layers, attention or output head.
    """
    _connect(model, base_dtype, frozen=True)
    if model.config.model_type not in COMPARED and model.device.type != "meta":
        check_head(model)
    return model.requires_grad_(False).eval()


def _connect(model: PreTrainedModel, base_dtype: str, frozen: bool) -> None:
    """Makes a transformers model call the kit's functions, and sets its compute dtype; ValueError if it cannot."""
    families.connect(model, frozen)
    families.set_attention(model, attention.SDPA)
    if model.config.get_text_config()._attn_implementation != attention.SDPA:
        raise ValueError(
            f"{type(model).__name__} has its own attention code and ignores transformers' AttentionInterface, so the "
            "kit cannot separate the documents of a row: use another model"
        )
    fix_rotary(model)
    model._tpu_kit_compute_dtype = _DTYPES[base_dtype]


def _linears_outside_text(model: PreTrainedModel) -> list[str]:
    """Returns the names of linear layers outside of the language model, such as in a vision tower."""
    text = {*model.get_decoder().modules(), model.get_output_embeddings()}
    return [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part not in text]


def _projector(model: PreTrainedModel) -> list[str]:
    """Returns the names of the projectors' linear layers, which map image features into the text model."""
    from tpu_kit.model.families import vision

    inside = {one for part in vision.projectors_of(model) for one in part.modules()}
    return [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part in inside]


def _projector_parameters(model: PreTrainedModel) -> list[str]:
    """Returns the names of the projector's matrices outside of linear layers (Gemma 3), which PEFT can adapt too."""
    from tpu_kit.model.families import vision

    paths = [name for name, one in model.named_modules() if one in vision.projectors_of(model)]
    inside = {name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    matrices = (name for name, one in model.named_parameters() if one.ndim == 2)
    return [name for name in matrices if name.rpartition(".")[0] in paths and name.rpartition(".")[0] not in inside]


def _targets(model: PreTrainedModel, lora: LoraConfig, others: list[str], projector: list[str]) -> str | list[str]:
    """Checks that the LoRA targets are linear layers of the text model or embeddings; returns PEFT's `target_modules`.

    This is "all-linear" or, for other targets and in a mixture of experts, names that include `projector`.

    Args:
        model: the base model.
        lora: the adapters.
        others: linear layers that get no adapters, such as in a tower.
        projector: the projector's linear layers if it is trained, otherwise empty.

    Raises:
        ValueError: a target matches no layer or only frozen vision layers, or from `check_targets`.
    """
    from transformers.pytorch_utils import Conv1D

    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    modules = {f".{name}": part for name, part in model.named_modules()}
    linear = [name for name, part in modules.items() if isinstance(part, torch.nn.Linear | Conv1D) and part not in ends]
    check_targets(lora, linear, type(model).__name__, embeddings.ends_of(model))
    if lora.targets == "all-linear":
        beside = _beside_experts(model)
        return [*beside, *projector] if beside else lora.targets
    wanted = [lora.targets] if isinstance(lora.targets, str) else list(lora.targets)
    for target in wanted:
        if any(f".{path}".endswith(f".{target}") for path in embeddings.ends_of(model)):
            continue
        if all(name.removeprefix(".") in others for name in linear if name.endswith(f".{target}")):
            raise ValueError(
                f"lora.targets: {target} belongs to the vision modules, which are frozen: name layers of the text "
                "model; lora.vision=true trains the projector"
            )
    return wanted + projector


def _beside_experts(model: PreTrainedModel) -> list[str]:
    """Returns the layer names of all-linear in a mixture of experts: attention, dense and shared MLPs; otherwise [].

    PEFT's own all-linear would add experts and routers.
    """
    if not any(True for _ in experts.modules_of(model)):
        return []
    return sorted({name.rpartition(".")[2] for name in linear_layers(model)})


def check_head(model: torch.nn.Module) -> None:
    """Compares logits from `hidden_states` and `output_embedding` with the model's own logits, on a few text tokens.

    The model, from `adapt` or `freeze`, is in evaluation mode meanwhile.

    Raises:
        ValueError: the logits differ by more than about 2 %, because the family changes its logits in an unknown way.
    """
    base = base_model(model)
    training = model.training
    model.eval()
    own = {getattr(base.config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")}  # not text
    text = [token for token in range(1, 9 + len(own)) if token not in own][:8]
    ids = torch.tensor([text], device=output_embedding(model).weight.device)
    with torch.no_grad(), autocast(ids.device.type, compute_dtype(model)):
        ours = logits(model, {"input_ids": ids})
        # Uses the same attention function as `hidden_states`: in bf16, others round differently.
        with attention.bound(base.config._attn_implementation, Visibility(torch.ones_like(ids))) as mask:
            own = base(input_ids=ids, use_cache=False, attention_mask=mask).logits
    model.train(training)
    if not torch.allclose(ours.float(), own.float(), rtol=0.02, atol=0.02 * float(own.abs().max())):
        raise ValueError(
            f"{type(base).__name__} changes its logits in a way that the chunked loss does not know, so the loss "
            f"would be wrong. Known families: {', '.join(COMPARED)}"
        )


def count_parameters(model: torch.nn.Module) -> ParameterCount:
    """Counts the parameters, with quantized weights and without a teacher's.

    `quantized` tells the number and dtype of quantized weights, and layers without an adapter; "" without such layers.
    """
    quantized = ((name, part) for name, part in model.named_modules() if isinstance(part, QuantizedLinear))
    parts = {name: part for name, part in quantized if not name.startswith("teacher.")}
    count, about = sum(part.count for part in parts.values()) + experts.count_integers(model), ""
    if parts:
        about = f"; {count:,} are frozen in {next(iter(parts.values())).scheme}"
        alone = {name.rpartition(".")[2] for name in parts} - {"base_layer"}
        about += f"; no adapter can correct the rounding of {', '.join(sorted(alone))}" if alone else ""
    return ParameterCount(
        trainable=sum(parameter.numel() for parameter in trainable_parameters(model).values()),
        total=count + sum(one.numel() for name, one in model.named_parameters() if not name.startswith("teacher.")),
        quantized=about,
    )
