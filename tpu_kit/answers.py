"""Greedy answers of a model, base or tuned, by transformers' own `generate`.

It runs on a fresh copy of the model on the CPU or a GPU; on XLA every new length would compile a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tpu_kit.config import DataConfig, ModelConfig
from tpu_kit.encoder import Encoder
from tpu_kit.formats import Layout
from tpu_kit.pretrained import load_base

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

_FP32_UP_TO = 1_000_000_000  # parameters: 4 GB in fp32, which CPUs compute faster than bf16
_SHOWN_DIFFERENCES = 5


class Reply(NamedTuple):
    """One answer: its text, its tokens with the one that ends it, and whether it ended within the bound."""

    text: str
    tokens: int
    finished: bool


def load_for_generation(
    config: ModelConfig, adapter_dir: str | Path | None = None, device: torch.device | str = "cpu"
) -> torch.nn.Module:
    """Load a fresh copy of the model, in evaluation mode and with transformers' own attention, for `answer`.

    Args:
        config: the base model. Under an adapter its weights are rounded to `base_dtype`, as in training; on the CPU
            models of up to 1e9 parameters then compute in fp32, which is faster there.
        adapter_dir: what training wrote: a PEFT adapter, or a whole model where lora.r = 0, which is then loaded in
            place of the base. None for the base alone.
        device: the CPU or a CUDA device.

    Raises:
        ValueError: the model cannot be read, or the adapter is missing, half-written or of another model.
    """
    folder, on_cpu = None if adapter_dir is None else Path(adapter_dir), torch.device(device).type == "cpu"
    whole = folder is not None and (folder / "config.json").is_file() and not (folder / ADAPTER_FILES[0]).is_file()
    saved = None if folder is None or whole else _read_adapter(folder)  # first, as the base may take minutes to load
    if whole:
        config = replace(config, name=str(folder), revision=None, gguf_file=None)
    full = config.base_dtype == "fp32" or (whole and on_cpu)
    model: torch.nn.Module = load_base(config, torch.float32 if full else torch.bfloat16)
    if folder is not None and saved is not None:
        # Before any change of dtype: an initialisation that changed the base (PiSSA) is repeated here to the bit.
        model = _with_adapter(model, folder, *saved, config.name)
    if on_cpu and sum(p.numel() for p in model.parameters()) <= _FP32_UP_TO:
        model = model.float()
    return model.to(device).eval()


def _read_adapter(folder: Path) -> tuple[Any, dict[str, list[int]]]:
    """Return an adapter's settings, and name -> shape of its tensors from the head of their file."""
    from peft import PeftConfig
    from safetensors import SafetensorError, safe_open

    if not folder.is_dir():
        raise ValueError(f"there is no adapter folder {folder}; give the one that training wrote")
    if absent := [name for name in ADAPTER_FILES if not (folder / name).is_file()]:
        raise ValueError(
            f"the adapter folder {folder} has no {' and no '.join(absent)}: its writing was interrupted, or it is "
            "another folder. Give the one that training wrote, or train again"
        )
    try:
        settings = PeftConfig.from_pretrained(str(folder))
        if settings.peft_type is None:
            raise ValueError("it has no peft_type")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{folder / ADAPTER_FILES[0]} cannot be read ({_first_line(error)}); give an earlier or a complete folder"
        ) from error
    try:
        with safe_open(folder / ADAPTER_FILES[1], framework="pt") as file:
            return settings, {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"the adapter's file {folder / ADAPTER_FILES[1]} is damaged or half-written ({error}); give an earlier one"
        ) from error


def _with_adapter(
    model: torch.nn.Module, folder: Path, settings: Any, saved: dict[str, list[int]], name: str
) -> torch.nn.Module:
    from peft import PeftModel, get_peft_model_state_dict

    refusal = f"the adapter in {folder} was trained on another base model than {name}"
    advice = f"set model.name to its own base (it says {settings.base_model_name_or_path})"
    try:
        # What does not fit is passed over here and told below, by name and in full.
        adapted = PeftModel.from_pretrained(
            model, str(folder), config=settings, torch_device="cpu", ignore_mismatched_sizes=True
        )
    except (ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"{refusal}: {_first_line(error)}; {advice}") from error
    wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    has = {key: list(value.shape) for key, value in (adapted.state_dict() | wanted).items()}
    differences = [f"{key} is not in the file" for key in wanted if key not in saved]
    differences += [f"{key} is not in the model" for key in saved if key not in has]
    differences += [
        f"{key} is {shape} in the file and {has[key]} in the model"
        for key, shape in saved.items()
        if key in has and has[key] != shape
    ]
    if differences:
        more = len(differences) - _SHOWN_DIFFERENCES
        shown = "; ".join(differences[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(f"{refusal}: {shown}; {advice}")
    return adapted


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def answer(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int,
    batch_size: int = 32,
    keep: Sequence[str] = ("<think>", "</think>"),
) -> list[str]:
    """Answer every prompt by the likeliest token at each step.

    The model's own settings for sampling and its penalties do not apply. An answer ends with the eos token of the
    model's generation config or of the tokenizer, or with the one that ends a turn in the chat template.

    Args:
        model: on the CPU or a CUDA device, as `load_for_generation` returns it.
        tokenizer: the model's, a fast one.
        prompts: rendered chats that end where the answer begins; no special tokens are added.
        max_new_tokens: the most tokens of an answer.
        batch_size: prompts at a time, those of like length together.
        keep: special tokens that stay in the text, such as the tags of the reasoning.

    Returns:
        For each prompt the new text, without special tokens.

    Raises:
        ValueError: no prompts, an empty one, one too long for the model's positions, or a model that is not for
            generation.
    """
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    return [reply.text for reply in replies(model, tokenizer, ids, max_new_tokens, batch_size, keep)]


def replies(
    model: torch.nn.Module,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    batch_size: int,
    keep: Sequence[str],
) -> list[Reply]:
    """Answer prompts that are token ids already; the rest is as in `answer`."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]
    from transformers import GenerationConfig

    causal: Any = model
    if hasattr(model, "get_base_model"):
        causal = causal.get_base_model()  # the adapters are layers inside it
    device = next(causal.parameters()).device
    if device.type not in ("cpu", "cuda") or str(causal.config._attn_implementation).startswith("tpu_kit"):
        raise ValueError("the model is on XLA or set up for training; load_for_generation gives one that can generate")
    if max_new_tokens < 1 or batch_size < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} and batch_size={batch_size} must both be 1 or more")
    _check_prompts(prompts, causal, max_new_tokens)
    stops = stop_ids(causal, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(stops), 0)
    special = {
        id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special and token.content not in keep
    }
    dropped = special | stops
    found: dict[int, Reply] = {}
    own, training = causal.generation_config, model.training
    # Not passed to generate(), which would fill in a penalty or a temperature from the model's own.
    causal.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(stops) or None, pad_token_id=pad
    )
    model.eval()
    try:
        # The longest first: if memory runs out it does so at once.
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]), reverse=True)
        with tqdm(total=len(order), desc="Answering", unit="row", leave=False) as bar:
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                ids, mask = _left_padded([prompts[row] for row in rows], pad)
                with torch.no_grad():
                    out = causal.generate(input_ids=ids.to(device), attention_mask=mask.to(device))
                for row, new in zip(rows, out[:, ids.shape[1] :].tolist(), strict=True):
                    length = next((i + 1 for i, id_ in enumerate(new) if id_ in stops), 0)
                    said = [id_ for id_ in new[: length or None] if id_ not in dropped]
                    text = tokenizer.decode(said, clean_up_tokenization_spaces=False)
                    found[row] = Reply(text, length or len(new), bool(length))
                bar.update(len(rows))
    finally:
        causal.generation_config = own
        model.train(training)
    return [found[row] for row in range(len(prompts))]


def _left_padded(prompts: Sequence[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask, (B, S) int64: every prompt ends in the last column."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def _check_prompts(prompts: Sequence[list[int]], causal: Any, max_new_tokens: int) -> None:
    if not prompts:
        raise ValueError("there are no prompts to answer; hold rows out with data.eval_rows, or give data.eval_source")
    if empty := [row for row, ids in enumerate(prompts) if not ids]:
        raise ValueError(
            f"row {empty[0]}: its prompt is empty, so there is nothing to answer; rows of plain text ask nothing, for "
            "them set tracking.generate_rows=0"
        )
    positions = getattr(causal.config.get_text_config(), "max_position_embeddings", None)
    row = max(range(len(prompts)), key=lambda row: len(prompts[row]))
    length = len(prompts[row])
    if positions and length + max_new_tokens > positions:
        room = positions - length
        advice = f"set tracking.generate_tokens to {room} or less" if room > 0 else "leave the row out"
        raise ValueError(
            f"row {row}: its prompt of {length} tokens and an answer of up to {max_new_tokens} are more than the "
            f"{positions} positions of the model; {advice}"
        )


def stop_ids(causal: Any, tokenizer: Any) -> set[int]:
    """Return the ids that end an answer.

    The chat template counts because many base models come with an instruct model's template: the training then teaches
    an end-of-turn token that neither the generation config nor the tokenizer knows as the end.
    """
    named = causal.generation_config.eos_token_id
    ids = {*named} if isinstance(named, list) else {named}
    ids.add(tokenizer.eos_token_id)
    if tokenizer.chat_template and (stop := Encoder(tokenizer, Layout("messages", {}, ()), DataConfig()).stop):
        ids.add(tokenizer.convert_tokens_to_ids(stop))
    return ids - {None}
