"""The tuned model that formats write, its outputs on prompts, and what a format is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tpu_kit.config.loader import TrainConfig
from tpu_kit.exporting.equivalence import LogitComparison, logits, mean_difference
from tpu_kit.exporting.streaming import StreamedModel, stream
from tpu_kit.generation.evaluation.comparison import read_comparison
from tpu_kit.generation.model_loading import load_for_generation
from tpu_kit.generation.prompts import PromptCodec
from tpu_kit.model.base_model import base_model
from tpu_kit.model.weights.base_identity import base_of_adapter
from tpu_kit.model.weights.loading import load_base
from tpu_kit.model.weights.saved_adapter import ADAPTER_FILES
from tpu_kit.model.weights.source import load_tokenizer

HERE = "path/of/this/folder"  # in the texts beside the files, which may move
_NOTHING = 1e-5  # least mean change of a logit by tuning, as a share of their spread
_PROMPTS = 6
_QUESTIONS = (
    "What is 17 + 25?",
    "Name the capital of France and one river that flows through it.",
    "Tom has 12 apples and gives 5 of them to Mia. How many apples does Tom have now?",
    "Explain in two sentences why the sky is blue.",
)


@dataclass
class TunedModel:
    """The tuned model in fp32, and its outputs, which all formats share.

    Attributes:
        config: the run.
        run_dir: its folder.
        part: the folder of the files.
        dtype: of merged weights, a key of `DTYPES`.
        base_id: the base model's name on the hub, if it has one.
        model: the tuned model, with its adapter until it is merged.
        streamed: what reads its weights from their files as it runs; None if it is in memory.
        tokenizer: of the run.
        prompts: token ids of chats up to the answer.
        whole: the same with the tuned model's answers, where the run kept them.
        texts: the questions alone.
        stops: ids of the tokens that end an answer.
        logits: the tuned model's, of `whole`.
        effect: mean difference between these and the base model's logits.
        vllm: as in `ExportOptions`.
    """

    config: TrainConfig
    run_dir: Path
    part: Path
    dtype: str
    base_id: str | None
    model: Any
    streamed: StreamedModel | None
    tokenizer: Any
    prompts: list[list[int]]
    whole: list[list[int]]
    texts: list[str]
    stops: list[int]
    logits: list[torch.Tensor]
    effect: float
    vllm: str | None = None


class Written(NamedTuple):
    """What a format has written.

    Attributes:
        kind: of export, such as "merged weights in bf16".
        checks: the comparisons, each within its limits.
        notes: missing checks, and how to use the export.
        use: how to load it, in Markdown.
    """

    kind: str
    checks: list[LogitComparison]
    notes: list[str]
    use: str


class Format(NamedTuple):
    """A format of export; `config.named_values.EXPORT_FORMATS` names each.

    Attributes:
        write: writes the files, reads them again and compares them; raises ValueError if they are not the tuned model.
        weight_bytes: of each weight on the disk while the files are written; None for those of `dtype`.
        on_base: whether it holds an adapter, which is loaded on the base model.
        keeps_head: whether the head of an objective may be left out beside it.
        relation: to the base model, as the hub names it: adapter, finetune or quantized.
        prepare: fetches what `write` needs, before minutes of loading.
    """

    write: Callable[[TunedModel], Written]
    weight_bytes: float | None = None
    on_base: bool = False
    keeps_head: bool = False
    relation: str = "finetune"
    prepare: Callable[[], object] = lambda: None


def accept(check: LogitComparison) -> LogitComparison:
    """Returns a comparison; raises ValueError if it is not within its limits."""
    if check.problems:
        raise ValueError(f"the export is not the tuned model ({check.by}): {'; '.join(check.problems)}. It was removed")
    return check


def adapter_of(tuned: TunedModel, instead: str) -> Path:
    """Returns the folder of the run's adapter; raises ValueError if it trained a whole model, for format `instead`."""
    source = tuned.run_dir / "adapter"
    if not (source / ADAPTER_FILES[0]).is_file():
        raise ValueError(f"{source} is a whole model, as lora.r=0 trains: format={instead} exports it")
    return source


def open_tuned(
    config: TrainConfig, folder: Path, adapter: Path, part: Path, dtype: str, base_id: str | None
) -> TunedModel:
    """Opens the tuned model in fp32, and compares its logits with those of the base.

    Args:
        config: the run.
        folder: of the run.
        adapter: its folder.
        part: the folder to write files to.
        dtype: of merged weights.
        base_id: the base model's name on the hub, if it has one.

    Raises:
        ValueError: the model cannot be read, runs code of its own, or says what its base says.
    """
    # The released base, not the base that training rounded (to int8, for instance).
    settings = replace(base_of_adapter(config.model, adapter), base_dtype="fp32", trust_remote_code=False)
    streamed = stream(settings, adapter)
    try:
        model: Any = streamed.model if streamed else load_for_generation(settings, adapter)
        tokenizer = load_tokenizer(settings, adapter)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"model.name={config.model.name} comes with Python code of its own, and an export runs no such code, even "
            f"with model.trust_remote_code=true: if you trust it, load {adapter} with PEFT"
        ) from error
    codec = PromptCodec(tokenizer, base_model(model), config.data)
    prompts, whole, texts = _prompts(codec, config, bool(tokenizer.chat_template), folder)
    tuned = logits(model, whole)
    if hasattr(model, "disable_adapter"):
        with model.disable_adapter():
            plain = logits(model, whole)
    else:
        base = stream(settings)
        plain = logits(base.model if base else load_base(settings, torch.float32).eval(), whole)
    effect = mean_difference(tuned, plain)
    if not effect > _NOTHING * torch.cat(tuned).std(dim=1).mean():
        raise ValueError(
            f"{adapter} changes nothing: with it the model says what the base model says (mean difference of logits "
            f"{effect:.2g}). Look at the loss in {folder / 'metrics.jsonl'}, and train again"
        )
    return TunedModel(
        config, folder, part, dtype, base_id, model, streamed, tokenizer, prompts, whole, texts,
        sorted(codec.stops), tuned, effect,
    )  # fmt: skip


def _prompts(
    codec: PromptCodec, config: TrainConfig, chat: bool, folder: Path
) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """Returns chats, chats with answers, and the questions: those of eval.json, or a few general ones.

    A model that was trained with pictures is asked about some that the kit draws.
    """
    pairs = [(question, "") for question in _QUESTIONS]
    if answers := read_comparison(folder):
        pairs = [(sample["question"], sample["tuned"]["answer"]) for sample in answers["samples"][:_PROMPTS]] or pairs
    texts = [question for question, _ in pairs]
    if config.model.images:
        from tpu_kit.assets.pictures import task
        from tpu_kit.data.images.chats import carried, encode

        texts = [text.replace("<image>", "").strip() for text in texts]
        chats = [[{"role": "user", "content": text}] for text in texts]
        asked = [{"messages": chat, "images": [task(number).image]} for number, chat in enumerate(chats)]
        prompts = encode(config, codec.tokenizer, [*map(carried, asked)])
    else:
        prompts = [codec.encode([{"role": "user", "content": text}] if chat else text) for text in texts]
    return prompts, [ids + codec.plain(answer) for ids, (_, answer) in zip(prompts, pairs, strict=True)], texts
