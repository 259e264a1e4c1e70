"""The model to train: a pretrained base with LoRA, or with all weights trained. `causal_lm` has its precision."""

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

# PEFT uses a deprecated name of transformers; users cannot change that.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.bfloat16, "int4": torch.bfloat16}
COMPARED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_text", "phi", "phi3")
"""model_type of the families whose output head the tests compare with transformers' own logits."""


class ParameterCount(NamedTuple):
    """Numbers of parameters, tied weights counted once, and a note about quantised ones."""

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
        config: which model, in which dtype.
        lora: the adapters; r = 0 trains every weight instead.
        seed: of the adapters' initial values; the global random state is left as it was.
        settings: of `source.read_config`, if they were read before.

    Returns:
        A `PeftModel`, or the plain model if lora.r = 0, in training mode, with the segment-aware attention "tpu_kit".

    Raises:
        ValueError: if the model cannot be read, weights are missing from it, or the LoRA targets do not fit it.
    """
    # For a mesh trained weights stay as they are saved, mapped from the files, until their shards are made in fp32.
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
    """Makes a causal language model trainable; it may come from anywhere and be on any device.

    Args:
        model: the base model, stored in the dtypes of the module's docstring.
        lora: the adapters, or r = 0.
        base_dtype: "fp32" runs matrix products in fp32, others in bf16.
        seed: of the adapters' initial values.
        tokens: the ids of `lora.tokens`; by default the first ones, for a model without values.

    Returns:
        The same weights, with adapters if lora.r > 0; `requires_grad` says which are trained.

    Raises:
        ValueError: if the LoRA targets or their initialisation do not fit the model.
    """
    _connect(model, base_dtype, frozen=lora.r > 0)
    adapted: torch.nn.Module = model.requires_grad_(True)
    others = _linears_outside_text(model)
    projector = _projector(model) if lora.vision else []
    if not lora.r and others:
        raise ValueError(
            f"lora.r=0 trains all weights, and {type(model).__name__} has some that text does not use, such as "
            f"{others[0]}: train adapters (lora.r=16), which only its language model gets"
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
    """Prepares a loaded base model as a frozen one beside the trained model; `base_dtype` as in `adapt`."""
    _connect(model, base_dtype, frozen=True)
    if model.config.model_type not in COMPARED and model.device.type != "meta":
        check_head(model)
    return model.requires_grad_(False).eval()


def _connect(model: PreTrainedModel, base_dtype: str, frozen: bool) -> None:
    """Lets a model of transformers call the kit's functions."""
    families.connect(model, frozen)
    families.set_attention(model, attention.SDPA)
    if model.config.get_text_config()._attn_implementation != attention.SDPA:
        raise ValueError(
            f"the attention of {type(model).__name__} is code of its own, not one of the functions that transformers "
            "lets others replace (AttentionInterface), so the documents of a row cannot be kept apart in it"
        )
    fix_rotary(model)
    model._tpu_kit_compute_dtype = _DTYPES[base_dtype]


def _linears_outside_text(model: PreTrainedModel) -> list[str]:
    """Returns the names of linear layers outside of the language model, such as those for images."""
    text = {*model.get_decoder().modules(), model.get_output_embeddings()}
    return [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part not in text]


def _projector(model: PreTrainedModel) -> list[str]:
    """Returns the names of the linear layers that bring images into the text model."""
    from tpu_kit.model.families import vision

    inside = {one for part in vision.projectors_of(model) for one in part.modules()}
    return [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part in inside]


def _projector_parameters(model: PreTrainedModel) -> list[str]:
    """Returns the names of the projector's matrices that are in no linear layer (Gemma 3's), which PEFT takes, too."""
    from tpu_kit.model.families import vision

    paths = [name for name, one in model.named_modules() if one in vision.projectors_of(model)]
    inside = {name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    matrices = (name for name, one in model.named_parameters() if one.ndim == 2)
    return [name for name in matrices if name.rpartition(".")[0] in paths and name.rpartition(".")[0] not in inside]


def _targets(model: PreTrainedModel, lora: LoraConfig, others: list[str], projector: list[str]) -> str | list[str]:
    """Checks that the LoRA targets match linear layers of the text model, or its embeddings.

    Args:
        model: the base.
        lora: the adapters.
        others: linear layers that get none, such as those of a tower.
        projector: those of the projector, if it is trained.
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
                f"lora.targets: {target} is of the part for images, which is frozen: name layers of the text model; "
                "lora.vision=true trains the projector"
            )
    return wanted + projector


def _beside_experts(model: PreTrainedModel) -> list[str]:
    """Lists what all-linear means in a mixture of experts: attention, dense and shared MLPs; empty for other models.

    PEFT's own all-linear adds experts and routers.
    """
    if not any(True for _ in experts.modules_of(model)):
        return []
    return sorted({name.rpartition(".")[2] for name in linear_layers(model)})


def check_head(model: torch.nn.Module) -> None:
    """Compares the logits made from `hidden_states` and `output_embedding` with the model's own, on a few tokens.

    Raises:
        ValueError: they differ, because the family changes its logits in an unknown way.
    """
    base = base_model(model)
    training = model.training
    model.eval()
    own = {getattr(base.config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")}  # no text
    text = [token for token in range(1, 9 + len(own)) if token not in own][:8]
    ids = torch.tensor([text], device=output_embedding(model).weight.device)
    with torch.no_grad(), autocast(ids.device.type, compute_dtype(model)):
        ours = logits(model, {"input_ids": ids})
        # With the functions that `hidden_states` runs: in bf16, others round differently.
        with attention.bound(base.config._attn_implementation, Visibility(torch.ones_like(ids))) as mask:
            own = base(input_ids=ids, use_cache=False, attention_mask=mask).logits
    model.train(training)
    if not torch.allclose(ours.float(), own.float(), rtol=0.02, atol=0.02 * float(own.abs().max())):
        raise ValueError(
            f"{type(base).__name__} changes its logits in a way that the chunked loss does not know, so its loss "
            f"would be wrong. Known families: {', '.join(COMPARED)}"
        )


def count_parameters(model: torch.nn.Module) -> ParameterCount:
    """Counts the parameters, and notes quantised layers without an adapter."""
    quantized = ((name, part) for name, part in model.named_modules() if isinstance(part, QuantizedLinear))
    parts = {name: part for name, part in quantized if not name.startswith("teacher.")}
    count, about = sum(part.count for part in parts.values()) + experts.count_integers(model), ""
    if parts:
        about = f"; {count:,} are frozen in {next(iter(parts.values())).scheme}"
        alone = {name.rpartition(".")[2] for name in parts} - {"base_layer"}
        about += f"; no adapter makes up for the rounding of {', '.join(sorted(alone))}" if alone else ""
    return ParameterCount(
        trainable=sum(parameter.numel() for parameter in trainable_parameters(model).values()),
        total=count + sum(one.numel() for name, one in model.named_parameters() if not name.startswith("teacher.")),
        quantized=about,
    )
