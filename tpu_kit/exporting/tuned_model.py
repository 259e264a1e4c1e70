"""The tuned model that formats write, its outputs on prompts, and the type of a format."""

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

HERE = "path/of/this/folder"  # stands for the export's folder in texts, because the folder may move
_NOTHING = 1e-5  # smallest mean change of a logit by tuning, as a share of the logits' standard deviation
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
        run_dir: the run's folder.
        part: the folder to write to.
        dtype: type of merged weights, a key of `DTYPES`.
        base_id: the base model's name on the hub, or None.
        model: the tuned model, with its adapter until `formats.merge`.
        streamed: reads the model's weights from their files while it runs; None if they are in memory.
        tokenizer: of the run.
        prompts: token ids of chats up to the answer, with pictures if the run has images.
        whole: `prompts` with the tuned model's answers from eval.json; without this file, equal to `prompts`.
        texts: the questions alone, one per prompt.
        stops: ids of the tokens that end an answer.
        logits: the tuned model's logits on `whole`, as `equivalence.logits` returns them.
        effect: mean absolute difference between `logits` and the base model's logits.
        vllm: interpreter of an environment with vLLM, "off", or None for this environment.
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
    """The result of a format's `write`.

    Attributes:
        kind: the kind of export, such as "merged weights in bf16".
        checks: the comparisons, all within their limits.
        notes: missing checks, and how to use the export.
        use: how to load the export, in Markdown.
    """

    kind: str
    checks: list[LogitComparison]
    notes: list[str]
    use: str


class Format(NamedTuple):
    """An export format; `config.named_values.EXPORT_FORMATS` lists all formats.

    Attributes:
        write: writes the files, reads them again and compares them; raises ValueError if they are not the tuned model.
        weight_bytes: bytes per weight on the disk while the files are written; None for the size of `dtype`.
        on_base: whether it holds an adapter, which is loaded on the base model.
        keeps_head: whether a run with an objective's head can be exported; the head stays beside the exported files.
        relation: to the base model, in the hub's terms: adapter, finetune or quantized.
        prepare: fetches the tools of `write` before minutes of loading; may raise ValueError.
    """

    write: Callable[[TunedModel], Written]
    weight_bytes: float | None = None
    on_base: bool = False
    keeps_head: bool = False
    relation: str = "finetune"
    prepare: Callable[[], object] = lambda: None


def accept(check: LogitComparison) -> LogitComparison:
    """Returns the comparison; raises ValueError if it is not within its limits."""
    if check.problems:
        raise ValueError(f"the export is not the tuned model ({check.by}): {'; '.join(check.problems)}. It was removed")
    return check


def adapter_of(tuned: TunedModel, instead: str) -> Path:
    """Returns the folder of the run's adapter; for whole models raises ValueError, which advises format `instead`."""
    source = tuned.run_dir / "adapter"
    if not (source / ADAPTER_FILES[0]).is_file():
        raise ValueError(f"{source} is a whole model, as lora.r=0 trains: format={instead} exports it")
    return source


def open_tuned(
    config: TrainConfig, folder: Path, adapter: Path, part: Path, dtype: str, base_id: str | None
) -> TunedModel:
    """Opens the tuned model in fp32, and computes its logits and their difference from the base model's.

    Args:
        config: the run.
        folder: the run's folder, whose eval.json may give the prompts.
        adapter: the folder of the adapter, or of a whole model.
        part: the folder to write to.
        dtype: type of merged weights, a key of `DTYPES`; the model is opened in fp32.
        base_id: the base model's name on the hub, or None.

    Raises:
        ValueError: the model cannot be read, needs its own code, or has the same logits as its base.
    """
    # The released base, not the base as training rounded it (to int8, for instance).
    settings = replace(base_of_adapter(config.model, adapter), base_dtype="fp32", trust_remote_code=False)
    streamed = stream(settings, adapter)
    try:
        model: Any = streamed.model if streamed else load_for_generation(settings, adapter)
        tokenizer = load_tokenizer(settings, adapter)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"model.name={config.model.name} comes with its own Python code, which an export never runs, even with "
            f"model.trust_remote_code=true: if you trust it, load {adapter} with PEFT"
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
            f"{adapter} changes nothing: the model's logits are the base model's (mean difference {effect:.2g}). Look "
            f"at the loss in {folder / 'metrics.jsonl'}, and train again"
        )
    return TunedModel(
        config, folder, part, dtype, base_id, model, streamed, tokenizer, prompts, whole, texts,
        sorted(codec.stops), tuned, effect,
    )  # fmt: skip


def _prompts(
    codec: PromptCodec, config: TrainConfig, chat: bool, folder: Path
) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """Returns the token ids of chats and of chats with answers, and the questions, from eval.json or general questions.

    It takes the first `_PROMPTS` samples of eval.json; general questions have no answers. If `chat` is false, prompts
    are plain text. If the run has images, the kit draws a picture for every question.
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
