"""The model to train: a pretrained base with LoRA, its forward pass, and its output head.

Precision: with LoRA the frozen base is stored in `base_dtype` (int8 and int4: see `quantization`), and the adapters in
fp32. In full fine-tuning (lora.r = 0) all weights are stored in fp32, because a bf16 weight (8 bits of mantissa) loses
an update of relative size 1e-3 or less. Autocast runs matrix products in bf16 unless base_dtype=fp32. LoRA needs
autocast, too: without it PEFT converts the activations to fp32 before every adapter.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tpu_kit.config.conflicts import check_remat
from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.model import attention, base_identity
from tpu_kit.model.architecture import WITHOUT_ADAPTER, check_targets
from tpu_kit.model.families import experts, linear_attention
from tpu_kit.model.loading import load_base, load_frozen
from tpu_kit.model.loading import load_tokenizer as load_tokenizer  # re-exported beside load_model
from tpu_kit.model.loop import activation_checkpointing
from tpu_kit.model.loop.layer_calls import layers_of, stacked_prefixes
from tpu_kit.model.loop.layer_scan import ScannedLayers, scan_layers
from tpu_kit.model.quantization import QuantizedLinear
from tpu_kit.model.quantization import layers_of as linear_layers
from tpu_kit.model.sharding import partition

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tpu_kit.config.loader import LoraConfig, ModelConfig, TrainConfig

# PEFT uses a deprecated name of transformers; users cannot change that.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.bfloat16, "int4": torch.bfloat16}
COMPARED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_text", "phi", "phi3")
"""model_type of the families whose output head the tests compare with transformers' own logits."""


class OutputHead(NamedTuple):
    """The output layer of a model, whose logits are softcap(scale * (hidden @ weight.T + bias))."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes the logits (..., V), fp32, of last hidden states (..., H)."""
        return self.scaled(torch.nn.functional.linear(hidden, self.weight, self.bias))

    def scaled(self, outputs: torch.Tensor) -> torch.Tensor:
        """Computes the logits, fp32, of the outputs of the linear layer."""
        logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32)) * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class ParameterCount(NamedTuple):
    """Numbers of parameters, tied weights counted once, and a note about quantised ones."""

    trainable: int
    total: int
    quantized: str = ""

    def __str__(self) -> str:
        share = self.trainable / self.total
        return f"{self.trainable:,} of {self.total:,} parameters are trained ({share:.2%}){self.quantized}"


def load_model(config: ModelConfig, lora: LoraConfig, seed: int = 0) -> torch.nn.Module:
    """Loads the base model on the CPU and makes it trainable.

    Args:
        config: which model, in which dtype.
        lora: the adapters; r = 0 trains every weight instead.
        seed: of the adapters' initial values; the global random state is left as it was.

    Returns:
        A `PeftModel`, or the plain model if lora.r = 0, in training mode, with the segment-aware attention "tpu_kit".

    Raises:
        ValueError: if the model cannot be read, weights are missing from it, or the LoRA targets do not fit it.
    """
    # For a mesh trained weights stay as they are saved, mapped from the files, until their shards are made in fp32.
    base = load_frozen(config) if lora.r else load_base(config, torch.float32 if active_mesh().size == 1 else "auto")
    model = adapt(base, lora, config.base_dtype, seed)
    if base_model(model).config.model_type not in COMPARED:
        check_head(model)
    model._tpu_kit_base = base_identity.identify(config)  # type: ignore[assignment]  # mypy expects a tensor or a module
    return model.train()


def adapt(model: PreTrainedModel, lora: LoraConfig, base_dtype: str, seed: int = 0) -> torch.nn.Module:
    """Makes a causal language model trainable; it may come from anywhere and be on any device.

    Args:
        model: the base model, stored in the dtypes of the module's docstring.
        lora: the adapters, or r = 0.
        base_dtype: "fp32" runs matrix products in fp32, others in bf16.
        seed: of the adapters' initial values.

    Returns:
        The same weights, with adapters if lora.r > 0; `requires_grad` says which are trained.

    Raises:
        ValueError: if the LoRA targets or their initialisation do not fit the model.
    """
    _connect(model, base_dtype, frozen=lora.r > 0)
    adapted: torch.nn.Module = model.requires_grad_(True)
    others = _linears_outside_text(model)
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
        targets, parameters = _targets(model, lora), list[str]()
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
            target_parameters=own + parameters or None,
            rank_pattern=dict.fromkeys(own, lora.experts),
            alpha_pattern=dict.fromkeys(own, lora.alpha * lora.experts / lora.r),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapted = experts.with_adapters(model, settings)
    return adapted


def freeze(model: PreTrainedModel, base_dtype: str) -> PreTrainedModel:
    """Prepares a loaded base model as a frozen one beside the trained model; `base_dtype` as in `adapt`."""
    _connect(model, base_dtype, frozen=True)
    if model.config.model_type not in COMPARED and model.device.type != "meta":
        check_head(model)
    return model.requires_grad_(False).eval()


def _connect(model: PreTrainedModel, base_dtype: str, frozen: bool) -> None:
    """Lets a model of transformers call the kit's functions."""
    attention.register()
    linear_attention.register(model)
    model.set_attn_implementation(attention.SDPA)
    if model.config.get_text_config()._attn_implementation != attention.SDPA:
        raise ValueError(
            f"the attention of {type(model).__name__} is code of its own, not one of the functions that transformers "
            "lets others replace (AttentionInterface), so the documents of a row cannot be kept apart in it"
        )
    experts.use(model, frozen)
    fix_rotary(model)
    model._tpu_kit_compute_dtype = _DTYPES[base_dtype]


def _linears_outside_text(model: PreTrainedModel) -> list[str]:
    """Returns the names of linear layers outside of the language model, such as those for images."""
    text = {*model.get_decoder().modules(), model.get_output_embeddings()}
    return [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part not in text]


def _targets(model: PreTrainedModel, lora: LoraConfig) -> str | list[str]:
    """Checks that the LoRA targets match linear layers of the model, and none of its embeddings."""
    from transformers.pytorch_utils import Conv1D

    if lora.targets == "all-linear":
        return _beside_experts(model) or lora.targets
    wanted = [lora.targets] if isinstance(lora.targets, str) else list(lora.targets)
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    modules = {f".{name}": part for name, part in model.named_modules()}
    embeddings = [name for name, part in modules.items() if part in ends]
    if refused := [target for target in wanted if any(name.endswith(f".{target}") for name in embeddings)]:
        raise ValueError(
            f"lora.targets: {', '.join(refused)} is the model's input or output embedding. The loss reads the output "
            "embedding in chunks, without its layer, and it may share its weight with the input: leave both out"
        )
    linear = [name for name, part in modules.items() if isinstance(part, torch.nn.Linear | Conv1D) and part not in ends]
    check_targets(lora, linear, type(model).__name__)
    return wanted


def _beside_experts(model: PreTrainedModel) -> list[str]:
    """Lists what all-linear means in a mixture of experts: attention, dense and shared MLPs; empty for other models.

    PEFT's own all-linear adds experts and routers.
    """
    if not any(True for _ in experts.modules_of(model)):
        return []
    return sorted({name.rpartition(".")[2] for name in linear_layers(model)})


def base_model(model: torch.nn.Module) -> PreTrainedModel:
    """Returns the transformers model without PEFT's wrapper; it contains the LoRA layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # of PEFT


def text_config(model: torch.nn.Module) -> Any:
    """Returns the configuration of the language model, also of one within a larger model."""
    return base_model(model).config.get_text_config()


def use_attention(model: torch.nn.Module, choice: str, device_type: str) -> str:
    """Sets the attention for the device on which the model will run, and returns its registered name."""
    implementation = attention.choose(choice, device_type)
    base_model(model).set_attn_implementation(implementation)
    return implementation


def to_device(model: torch.nn.Module, device: torch.device | str) -> torch.nn.Module:
    """Moves the model, in place, and ties its embeddings again.

    A move to XLA makes a new parameter for each module, so tied embeddings silently become two parameters. It does not
    call `tie_weights`, which transformers replaces in the whole process while another replica loads a model.
    """
    if active_mesh().size > 1 and torch.device(device).type == "xla":
        return partition.to_mesh(model, stacked_prefixes(model))
    model.to(device)
    for base in filter(None, (base_model(model), getattr(model, "teacher", None))):
        if text_config(base).tie_word_embeddings:
            base.get_output_embeddings().weight = base.get_input_embeddings().weight
    return model


def cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Casts a model in place, but not the buffers of its files, such as the fp32 biases of routers."""
    saved = model.state_dict().keys()
    kept = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    model.to(dtype)
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)


def prepare_layers(model: torch.nn.Module, config: TrainConfig, device_type: str) -> ScannedLayers | None:
    """Sets the attention of a model, and makes its layers loops, or recompute their activations, as a run asks.

    Args:
        model: as `load_model` returns it; changed in place, before its move to the device.
        config: the run.
        device_type: "tpu", "xla-cpu", "cuda" or "cpu".

    Returns:
        As `scan_layers`.

    Raises:
        ValueError: as `scan_layers` and `check_remat`.
    """
    check_remat(config, device_type)
    if device_type in ("tpu", "xla-cpu") and any(
        weight.requires_grad for _, part in experts.modules_of(model) for weight in part.parameters()
    ):
        raise ValueError(
            "lora.r=0 trains all weights, and on XLA those of experts are frozen: set lora.r=16, or train on "
            "launch.device_type=cuda or cpu"
        )
    use_attention(model, config.model.attention, device_type)
    optim, decoder = config.optim, base_model(model).get_decoder()
    scanned = scan_layers(decoder, optim, device_type)
    if scanned is None and optim.remat != "none":
        enable_remat(model, optim.remat == "outputs")
    elif scanned is None and device_type == "cpu":  # in a checkpoint, hooks of its parameters would not be called
        activation_checkpointing.fuse_lora(model)
    return scanned


def prepare_frozen(model: torch.nn.Module, config: TrainConfig, device_type: str) -> None:
    """Sets the attention of a model that is not trained, and makes its layers loops, which save no activations."""
    use_attention(model, config.model.attention, device_type)
    scan_layers(base_model(model).get_decoder(), replace(config.optim, remat="full"), device_type)


def enable_remat(model: torch.nn.Module, keeps: bool = False) -> None:
    """Makes every layer of a model on the CPU or a GPU recompute its activations in the backward pass, without a loop.

    With `keeps` it keeps the results of products and of attention; see `activation_checkpointing`.
    """
    base = base_model(model)
    activation_checkpointing.recompute(layers_of(base.get_decoder())[1], keeps)
    base.enable_input_require_grads()  # so that the first layer compiles to the code of the others


def hidden_states(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Runs the model up to its output head, so that the loss can compute the logits in chunks.

    Args:
        model: as `load_model` returns it, moved to the batch's device.
        batch: input_ids (B, S) and, optionally, position_ids, segment_ids and prefix_ids (B, S), as in
            `attention.documents`. Without segment_ids every row is one document.

    Returns:
        (B, S, H) last hidden states in the compute dtype, after the final norm.
    """
    base = base_model(model)
    ids = batch["input_ids"]
    segment_ids = batch.get("segment_ids")
    if segment_ids is None:
        segment_ids = torch.ones_like(ids)
    documents = attention.documents(base.config._attn_implementation, segment_ids, batch.get("prefix_ids"))
    dtype = compute_dtype(model)
    with documents as mask, _autocast(ids.device.type, dtype), partition.embedding_by_columns(base):
        output = base.get_decoder()(
            input_ids=ids, position_ids=batch.get("position_ids"), use_cache=False, attention_mask=mask
        )
    return partition.by_rows(output.last_hidden_state.to(dtype))


def compute_dtype(model: torch.nn.Module) -> torch.dtype:
    """Returns the dtype of matrix products of a model from `load_model` or `adapt`."""
    return model._tpu_kit_compute_dtype  # type: ignore[return-value]  # mypy expects a tensor or a module


def _autocast(device_type: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    if dtype.itemsize > 2:  # fp32, and the fp64 of tests, of which torch 2.11 would warn
        return contextlib.nullcontext()
    # All threads share the cache of cast weights. With replicas as threads a hit would depend on timing, and the graphs
    # of the replicas would differ.
    return torch.autocast(device_type, dtype=dtype, cache_enabled=False)


def output_embedding(model: torch.nn.Module) -> OutputHead:
    """Returns the output head, for `loss.chunked`.

    Raises:
        ValueError: if the head is not a plain linear layer (LoRA on it, for instance).
    """
    base = base_model(model)
    head = base.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        raise ValueError(
            f"the output head is a {type(head).__name__}, and the chunked loss needs a plain linear layer: take "
            "lm_head out of lora.targets"
        )
    config = text_config(base)
    # Cohere multiplies its logits, Granite divides them; Gemma caps them.
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return OutputHead(head.weight, head.bias, getattr(config, "final_logit_softcapping", None), float(scale))


def logits(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Computes all logits (B, S, V), fp32, as the chunked loss does; for the arguments see `hidden_states`."""
    return output_embedding(model).logits(hidden_states(model, batch))


def check_head(model: torch.nn.Module) -> None:
    """Compares the logits made from `hidden_states` and `output_embedding` with the model's own, on a few tokens.

    Raises:
        ValueError: they differ, because the family changes its logits in an unknown way.
    """
    base = base_model(model)
    training = model.training
    model.eval()
    ids = torch.arange(1, 9, device=output_embedding(model).weight.device)[None]
    with torch.no_grad(), _autocast(ids.device.type, compute_dtype(model)):
        ours = logits(model, {"input_ids": ids})
        # With the functions that `hidden_states` runs: in bf16, others round differently.
        with attention.documents(base.config._attn_implementation, torch.ones_like(ids)) as mask:
            own = base(input_ids=ids, use_cache=False, attention_mask=mask).logits
    model.train(training)
    if not torch.allclose(ours.float(), own.float(), rtol=0.02, atol=0.02 * float(own.abs().max())):
        raise ValueError(
            f"{type(base).__name__} changes its logits in a way that the chunked loss does not know, so its loss "
            f"would be wrong. Known families: {', '.join(COMPARED)}"
        )


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns the trained parameters by name, in the model's order; a tied weight appears once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


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


# ----------------------------------------------------------------------------------------------------- rotary embedding

# transformers changes the rotary frequencies of a whole batch with its longest position: beyond a certain length
# "longrope" (Phi-3) uses its long factors and "dynamic" another base. A document would depend on its neighbours, and
# the host would read the device in every step. Up to `max_positions` the frequencies are constant.


def max_positions(config: Any) -> int | None:
    """Returns the length up to which rotary frequencies of a text configuration are constant; None without a limit."""
    settings = getattr(config, "rope_parameters", None) or {}
    ropes = [one for one in (settings, *settings.values()) if isinstance(one, dict)]  # one, or one for each layer type
    limits = [
        rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for rope in ropes
        if rope.get("rope_type") == "longrope"
    ]
    limits.append(getattr(config, "max_position_embeddings", None))
    return min((limit for limit in limits if limit), default=None)


def check_length(config: Any, max_length: int) -> None:
    """Checks that the rotary frequencies are constant in rows of `max_length` tokens.

    Raises:
        ValueError: they are not.
    """
    most, limit = getattr(config, "max_position_embeddings", None), max_positions(config)
    if most is not None and limit is not None and limit < max_length <= most:
        raise ValueError(
            f"data.max_length={max_length}: {config.model_type} with longrope changes the rotary frequencies of a "
            f"whole batch when one row has more than {limit} tokens, so a document would depend on its neighbours; "
            f"set data.max_length={limit} or less"
        )


def fix_rotary(model: torch.nn.Module) -> Callable[[], None]:
    """Makes the rotary frequencies of a model constant, in place; returns a function that undoes it."""
    before: list[tuple[torch.nn.Module, dict[str, Any]]] = []
    for part in model.modules():
        kind: Any = getattr(part, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else [kind]
        if any(isinstance(one, str) and ("dynamic" in one or one == "longrope") for one in kinds):
            buffers = dict(part.named_buffers(recurse=False))
            before.append((part, {"rope_type": kind, **buffers}))
            part.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"  # type: ignore[assignment]  # no tensor
            for name, frequencies in buffers.items():
                if name.endswith("original_inv_freq"):
                    setattr(part, name.replace("original_", ""), frequencies.clone())

    def undo() -> None:
        for part, values in before:
            for name, value in values.items():
                setattr(part, name, value)

    return undo
