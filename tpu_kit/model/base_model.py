"""The transformers model beneath PEFT's wrapper: its text configuration and its output head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def base_model(model: torch.nn.Module) -> PreTrainedModel:
    """Returns the transformers model without PEFT's wrapper; it contains the LoRA layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # of PEFT


def text_config(model: torch.nn.Module) -> Any:
    """Returns the configuration of the language model, also of one within a larger model."""
    return base_model(model).config.get_text_config()


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


def check_vocabulary(ids: int, embeddings: int | None, whose: str = "the model") -> None:
    """Raises ValueError if a tokenizer has more ids than a model has embeddings: XLA silently clamps the others."""
    if embeddings is not None and ids > embeddings:
        raise ValueError(
            f"the tokenizer has {ids} ids and {whose} only {embeddings} embeddings: they do not belong together. Load "
            "both from one folder, or take the tokens that were added out again"
        )
