"""The transformers model inside PEFT's wrapper: its text configuration, embeddings and output head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def base_model(model: torch.nn.Module) -> PreTrainedModel:
    """Returns the transformers model without PEFT's wrapper; it contains the LoRA layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # of PEFT


def text_config(model: torch.nn.Module) -> Any:
    """Returns the configuration of the language model, even if it is part of a larger model."""
    return base_model(model).config.get_text_config()


class OutputHead(NamedTuple):
    """The output layer of a model: logits = softcap(scale * (hidden @ W.T + bias)), W = weight + up @ down.

    Attributes:
        weight: (V, H).
        bias: (V,), or None.
        softcap: bound c of the logits, c tanh(logits / c), or None.
        scale: factor on the logits.
        down: (R, H), the first factor of an adapter; None without an adapter.
        up: (V, R), the second factor of an adapter, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    down: torch.Tensor | None = None
    up: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the linear layer that are not None, by name."""
        named = {"weight": self.weight, "bias": self.bias, "down": self.down, "up": self.up}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def detached(self) -> OutputHead:
        """Returns a copy with detached tensors."""
        made: dict[str, Any] = {name: tensor.detach() for name, tensor in self.tensors.items()}
        return self._replace(**made)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes the logits (..., V), fp32 (fp64 from fp64), of last hidden states (..., H), with any adapter."""
        outputs = torch.nn.functional.linear(hidden, self.weight, self.bias)
        if self.down is not None and self.up is not None:
            low = torch.nn.functional.linear(hidden, self.down.to(hidden.dtype))
            outputs = outputs + torch.nn.functional.linear(low, self.up.to(hidden.dtype))
        return self.scaled(outputs)

    def scaled(self, outputs: torch.Tensor) -> torch.Tensor:
        """Computes fp32 logits (fp64 from fp64) from the outputs of the linear layer: scale, then softcap."""
        logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32)) * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def matrix_of(part: Any) -> Any:
    """Returns the layer that holds the weight of an input or output embedding, without PEFT's wrappers.

    `part` is the embedding as the model holds it. If the whole layer is trained (`modules_to_save`), the result is the
    trained copy, or the frozen original while adapters are disabled. With trained rows or LoRA, it is the frozen layer.
    """
    inner = part._modules
    if "token_adapter" in inner:
        return matrix_of(part.token_adapter)
    if "modules_to_save" in inner:
        return part.original_module if part.disable_adapters else part.modules_to_save[part.active_adapters[0]]
    return part.base_layer if "base_layer" in inner else part


def is_tied(model: torch.nn.Module) -> bool:
    """Returns whether a model's output embedding uses the weight of its input embedding; False without an output."""
    base = base_model(model)
    head = base.get_output_embeddings()
    return head is not None and matrix_of(head).weight is matrix_of(base.get_input_embeddings()).weight


def tied_layers(base: PreTrainedModel) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Returns the (input, output) pairs of embedding layers that must share a weight; [] if there are none.

    `base` has no PEFT wrapper. The first pair has the frozen layers, if `config.tie_word_embeddings` is set; at present
    they may not share a weight. The next pair has PEFT's trained copies (`modules_to_save`), if they share a weight.
    """
    parts: list[Any] = [base.get_input_embeddings(), base.get_output_embeddings()]
    pairs: list[tuple[torch.nn.Module, torch.nn.Module]] = []
    if parts[1] is None:
        return pairs
    if base.config.tie_word_embeddings:  # transformers reads it; the text model's config may lack it
        start, end = (part.original_module if "modules_to_save" in part._modules else matrix_of(part) for part in parts)
        pairs.append((start, end))
    if all("modules_to_save" in part._modules for part in parts):
        start, end = (next(iter(part.modules_to_save.values())) for part in parts)
        pairs += [(start, end)] if start.weight is end.weight else []
    return pairs


def embedding_paths(model: torch.nn.Module) -> list[str]:
    """Returns the prefixes, with a final dot, of both embeddings' parameter names, in a `PeftModel` or plain model."""
    base = base_model(model)
    parts = {id(part) for part in (base.get_input_embeddings(), base.get_output_embeddings()) if part is not None}
    return [f"{path}." for path, part in model.named_modules() if id(part) in parts]


def output_embedding(model: torch.nn.Module) -> OutputHead:
    """Returns the output head of a model, with or without PEFT's wrapper, for `loss.chunked`.

    Gradients of its tensors reach the model. `down` and `up`, with the adapter's scaling, are LoRA or trained rows;
    they are None if the adapter is disabled or merged. `scale` and `softcap` come from the text model's configuration.

    Raises:
        ValueError: if the head is not a plain linear layer, or has a PEFT adapter with DoRA or a bias.
    """
    base = base_model(model)
    part: Any = base.get_output_embeddings()
    head: Any = matrix_of(part)
    if type(head) is not torch.nn.Linear:
        raise ValueError(
            f"the output head is a {type(head).__name__}, and the chunked loss needs a plain linear layer: use "
            "another model"
        )
    config = text_config(base)
    # Cohere multiplies its logits, Granite divides them; Gemma caps them.
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return OutputHead(head.weight, head.bias, softcap, float(scale), *_adapter_of_head(part, head.weight))


def _adapter_of_head(part: Any, weight: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns `OutputHead.down` and scaled `up` of an output layer with the matrix `weight` (V, H).

    (None, None) without an adapter, or if it is disabled or merged. Raises ValueError for DoRA or a bias.
    """
    if "token_adapter" in part._modules:
        rows = part.token_adapter
        return (None, None) if rows.disable_adapters or rows.merged else rows_as_adapter(rows, weight)
    if "lora_A" not in part._modules or part.disable_adapters or part.merged:
        return None, None
    name = part.active_adapters[0]
    if name in part.lora_variant or part.lora_bias.get(name):
        raise ValueError("the adapter of the output head has DoRA or a bias, which the loss does not compute: merge it")
    return part.lora_A[name].weight, part.lora_B[name].weight * part.scaling[name]


def rows_as_adapter(rows: Any, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns trained rows of a matrix (V, H) as an adapter: their changes (R, H), and one-hot columns (V, R).

    `rows` is PEFT's `TrainableTokensLayer` after `trained_embeddings.connect`.
    """
    delta, numbers = rows.trainable_tokens_delta[rows.active_adapters[0]], rows.numbers
    tokens = torch.arange(weight.shape[0], device=numbers.device)
    return delta - weight.index_select(0, numbers), (tokens[:, None] == numbers).to(delta.dtype)


def check_vocabulary(ids: int, embeddings: int | None, whose: str = "the model") -> None:
    """Raises ValueError if a tokenizer has more ids than a model has embeddings: XLA silently clamps larger ids.

    `ids` and `embeddings` are their numbers. `embeddings` None raises nothing; `whose` names the model in the text.
    """
    if embeddings is not None and ids > embeddings:
        raise ValueError(
            f"the tokenizer has {ids} ids and {whose} only {embeddings} embeddings: they do not belong together. Load "
            "both from one folder, or remove the added tokens"
        )
