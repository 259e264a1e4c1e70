"""Trains the input and output embeddings of a model with PEFT: rows of some tokens, whole matrices, or LoRA.

The chunked loss reads the output embedding through `base_model.output_embedding`. This module makes PEFT's settings for
these adapters. It computes trained rows without PEFT's copy of the whole matrix in every forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from tpu_kit.config.schema import EMBEDDINGS
from tpu_kit.model.base_model import base_model, is_tied, matrix_of, rows_as_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tpu_kit.config.loader import LoraConfig


def ends_of(model: PreTrainedModel) -> tuple[str, str]:
    """Returns the paths of a model's input and output embedding, before PEFT wraps them; "" if it is absent."""
    start, end = model.get_input_embeddings(), model.get_output_embeddings()
    paths = {id(part): path for path, part in model.named_modules()}
    return paths.get(id(start), ""), paths.get(id(end), "")


def peft_settings(model: PreTrainedModel, lora: LoraConfig, numbers: Sequence[int]) -> dict[str, Any]:
    """Returns arguments of PEFT's `LoraConfig` for trained rows and trained matrices; {} for neither.

    The keys are trainable_token_indices, {path of an embedding: ids}, and for `lora.full` modules_to_save and
    ensure_weight_tying. The tokens' rows in an untied output embedding are trained too. Tied embeddings stay tied;
    PEFT's default would train a copy of one matrix.

    Args:
        model: the base model.
        lora: the adapters.
        numbers: the ids of `lora.tokens`; empty for no rows.
    """
    start, end = ends_of(model)
    tied = is_tied(model)
    found: dict[str, Any] = {}
    if numbers:
        found["trainable_token_indices"] = {path: [*numbers] for path in ([start] if tied else [start, end])}
    if lora.full:
        found |= {"modules_to_save": [*lora.full], "ensure_weight_tying": tied}
    return found


def connect(adapted: torch.nn.Module) -> None:
    """Makes trained rows of a `PeftModel` run the kit's code, and casts the output of a trained input matrix, in place.

    This output has the dtype of the frozen matrix, which the residual stream needs, even if the copy is trained in
    fp32.
    """
    base = base_model(adapted)
    for part in (base.get_input_embeddings(), base.get_output_embeddings()):
        inner: dict[str, Any] = part._modules if part is not None else {}
        if (rows := inner.get("token_adapter")) is not None:
            (numbers,) = rows.token_indices.values()
            device = matrix_of(rows).weight.device
            rows.register_buffer("numbers", torch.tensor(numbers, device=device), persistent=False)
            rows.__class__ = _token_rows()
    if "modules_to_save" in (part := base.get_input_embeddings())._modules:
        part.register_forward_hook(lambda part, _, output: output.to(part.original_module.weight.dtype))


@cache
def _token_rows() -> type:
    """Returns the class `TokenRows`, which needs PEFT."""
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

    class TokenRows(TrainableTokensLayer):
        """Looks up the rows of trained tokens separately from the frozen matrix.

        PEFT copies the matrix in every forward pass, and the copy's gradient has the same size.
        """

        def forward_adapters(self, x: torch.Tensor, active_adapters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            """Returns embeddings (..., H) of token ids, or for an output layer the outputs (..., V) of states."""
            if self.disable_adapters or self.merged:
                result: torch.Tensor = super().forward_adapters(x, active_adapters, *args, **kwargs)
                return result
            frozen: torch.Tensor = self.base_layer(x)
            if isinstance(self.base_layer, torch.nn.Linear):
                for factor in rows_as_adapter(self, self.base_layer.weight):
                    x = torch.nn.functional.linear(x, factor.to(x.dtype))
                return frozen + x
            scale = self._get_embed_scale()
            rows = self.trainable_tokens_delta[active_adapters[0]].to(frozen.dtype)
            rows = rows if scale is None else rows * scale.to(rows.dtype)
            chosen = x[..., None] == self.numbers
            # A one-hot product is exact, and its gradient is a product too, not a scatter.
            return torch.where(chosen.any(-1, keepdim=True), chosen.to(rows.dtype) @ rows, frozen)

    return TokenRows


def described(settings: Mapping[str, Any]) -> list[str]:
    """Returns texts that describe the adapters of embeddings in a parsed adapter_config.json; [] if there are none.

    These are "trained rows of tokens", "trained copies of NAMES" and "LoRA on NAMES", in this order.
    """
    targets = settings.get("target_modules") or ()
    names = [one for one in ([] if isinstance(targets, str) else sorted(targets)) if one.split(".")[-1] in EMBEDDINGS]
    found = ["trained rows of tokens"] if settings.get("trainable_token_indices") else []
    copied = sorted({one.split(".")[-1] for one in settings.get("modules_to_save") or ()})
    found += [f"trained copies of {', '.join(copied)}"] if copied else []
    return found + ([f"LoRA on {', '.join(names)}"] if names else [])


def untie(adapted: torch.nn.Module) -> None:
    """Gives a tied output embedding its own frozen copy of the weight, in place, if either embedding has LoRA.

    Otherwise, merging would add the LoRA to the shared weight. PEFT then notes in the merged model's configuration that
    its embeddings are not tied.
    """
    base = base_model(adapted)
    parts = base.get_input_embeddings(), base.get_output_embeddings()
    if is_tied(adapted) and any("lora_A" in part._modules for part in parts):
        head = matrix_of(parts[1])
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def names_in_files(params: Iterable[str]) -> dict[str, str]:
    """Maps names of trained parameters in the model to their names in adapter_model.safetensors.

    PEFT's `get_peft_model_state_dict` gives the same names, but drops names that are not in the model, and a model with
    stacks has no names of single layers.
    """
    found = {}
    for name in params:
        told = name.replace(".modules_to_save.default", "").replace(".default", "")
        found[name] = told.removesuffix(".weight") if "lora_magnitude_vector" in told else told
    return found


def tied_names(adapted: Any) -> dict[str, str]:
    """Returns {input embedding's name: output embedding's name} in files, if both are one trained matrix; else {}."""
    base = base_model(adapted)
    parts = base.get_input_embeddings(), base.get_output_embeddings()
    if not is_tied(adapted) or not all("modules_to_save" in part._modules for part in parts):
        return {}
    paths = {id(part): path for path, part in adapted.named_modules()}
    start, end = (f"{paths[id(part)]}.weight" for part in parts)
    return {start: end}
