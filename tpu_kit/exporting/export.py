"""Exports a tuned model as a folder or a file that other programs read: export(run_dir, format).

    from tpu_kit.exporting.export import export
    print(export("runs/my-run", "merged"))

Every export is written to a temporary place, read again in a new process, compared with the tuned model on real
prompts, and moved to its folder only if it is the same model. Weights are merged in fp32 and rounded last: merging in
bf16 loses differences that are small compared with the weights, such as those of LoRA.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tpu_kit.config.loader import TrainConfig, load_config, read_yaml
from tpu_kit.data.held_out import UNKNOWN
from tpu_kit.exporting import formats
from tpu_kit.exporting.equivalence import Check, logits, mean_difference
from tpu_kit.exporting.hub import Pushed, check_repository
from tpu_kit.exporting.hub import push as push_folder
from tpu_kit.exporting.options import ExportOptions
from tpu_kit.exporting.streaming import stream
from tpu_kit.generation.evaluation.accuracy import Accuracy
from tpu_kit.generation.evaluation.comparison import read_comparison
from tpu_kit.generation.model_loading import load_for_generation
from tpu_kit.generation.prompts import PromptCodec
from tpu_kit.machine.chips import GIB, MIB
from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.object_store import at_hand, is_url, join
from tpu_kit.machine.storage.run_folder import ADAPTER, find_run
from tpu_kit.model.base_identity import base_of_adapter
from tpu_kit.model.base_model import base_model
from tpu_kit.model.loading import load_base
from tpu_kit.model.source import load_tokenizer
from tpu_kit.model.states_head import file_names, find_head, title, without_head
from tpu_kit.training.metrics import best_evaluation, read_metrics
from tpu_kit.training.objectives import objective_of

_MARKER = "export.json"  # a folder that holds it may be replaced
_SPARE = 64 * MIB  # for the tokenizer, the card and the file system
_NOTHING = 1e-5  # least mean change of a logit by tuning, as a share of their spread
_PROMPTS = 6
_PLAIN = (
    "it was trained on plain text, so these files have no chat template: ask for completions, not for chats (vLLM: "
    "/v1/completions, llama.cpp: /completion)"
)
_BASES = "; that of the base model does not fit"
_QUESTIONS = (
    "What is 17 + 25?",
    "Name the capital of France and one river that flows through it.",
    "Tom has 12 apples and gives 5 of them to Mia. How many apples does Tom have now?",
    "Explain in two sentences why the sky is blue.",
)


@dataclass(frozen=True)
class Exported:
    """A finished export.

    Attributes:
        format: one of `options.FORMATS`.
        folder: its folder.
        files: names of its files.
        checks: the comparisons, each within its limits.
        notes: missing checks, and how to use the export.
        pushed: the commit on the hub; None if it was not pushed.
    """

    format: str
    folder: str
    files: tuple[str, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    pushed: Pushed | None = None

    def __str__(self) -> str:
        lines = [f"checked, {check}" for check in self.checks] + list(self.notes)
        lines += [str(self.pushed)] if self.pushed else []
        return "\n  ".join([f"{self.format} in {self.folder}: {', '.join(self.files)}", *lines])


def export(
    run_dir: str | Path,
    format: str = "merged",
    out: str | Path | None = None,
    *,
    dtype: str = "bf16",
    base: str | None = None,
    push: str | None = None,
    private: bool = True,
) -> Exported:
    """Writes a run's model for another program, checks it, and pushes it to the hub if `push` names a repository.

    Args:
        run_dir: the output of training, with config.yaml and adapter/: a folder, or gs://bucket/run; or its
            config.yaml or adapter.
        format: "adapter" for PEFT; "merged" for transformers; "vllm"; "gguf-f16", "gguf-bf16", "gguf-q8_0" for
            llama.cpp and Ollama; "gguf-lora" for an adapter in llama.cpp.
        out: as in `ExportOptions`; for gs://bucket/run `runs/<run_name>/export/<format>` by default.
        dtype: as in `ExportOptions`.
        base: as in `ExportOptions`.
        push: as in `ExportOptions`.
        private: as in `ExportOptions`.

    Raises:
        ValueError: the hub refuses the repository or the upload, the run is incomplete, the adapter is missing, damaged
            or of another model, the disk is full, a tool is missing, the object store cannot be read, or the export
            differs from the tuned model.
    """
    options = ExportOptions(format, None if out is None else str(out), dtype, base, push, private)
    if push:
        print(f"to be pushed to {check_repository(push)}", flush=True)  # before minutes of work
    with contextlib.suppress(ValueError):  # what is missing is told below
        folder, adapter = find_run(run_dir)
        run_dir = folder if adapter in (None, join(folder, ADAPTER)) else run_dir  # not of a copied adapter
    if not is_url(run_dir):
        done = _export(Path(run_dir), False, options)
    else:
        with at_hand(run_dir, "adapter", "config.yaml", "eval.json", "metrics.jsonl") as folder:
            done = _export(folder, True, options)
    return replace(done, pushed=push_folder(Path(done.folder), push, private=private)) if push else done


def _export(folder: Path, copied: bool, options: ExportOptions) -> Exported:
    """Exports a run in a folder, which may be a temporary copy."""
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} has no config.yaml: give the folder that a run wrote (its output_dir)")
    config, format = load_config(read_yaml(folder / "config.yaml")), options.format
    run = replace(config, output_dir=None).output_path if copied else folder  # output_dir may be of another machine
    target = Path(options.out) if options.out else run / "export" / format
    if target.exists() and not (target / _MARKER).is_file() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"out={target} exists and is no earlier export: give a folder that does not exist yet")
    head = find_head(folder / "adapter")
    if head and (format != "adapter" or not objective_of(config).trains_model):
        raise ValueError(
            f"format={format}: {folder / 'adapter'} has an {title(head)}, a function of hidden states that is not "
            f"linear, for which this format has no place. `generate adapter={folder / 'adapter'}` answers with it; to "
            f"export the rest, delete {' and '.join(file_names(head))} there"
        )
    # The converter is fetched before minutes of loading.
    converter = formats.converter() if format.startswith("gguf") else contextlib.nullcontext()
    with converter as tools, atomic.replacing(target) as part, without_head(folder / "adapter") as adapter:
        work = _load(config, folder, adapter, part, options)
        _check_free_space(target, work, format)
        part.mkdir(parents=True)
        if format == "adapter":
            kind, checks, notes, use = formats.adapter(work)
        elif tools is None:
            kind, checks, notes, use = formats.merged(work, format)
        elif format == "gguf-lora":
            kind, checks, notes, use = formats.gguf_adapter(work, tools)
        else:
            kind, checks, notes, use = formats.gguf_model(work, format.removeprefix("gguf-"), tools)
        if not work.tokenizer.chat_template:
            notes.append(_PLAIN + _BASES if format in ("adapter", "gguf-lora") else _PLAIN)
        if head:
            notes.append(f"PEFT loads the adapter without the {title(head)}, tpu_kit's generate with it")
        card = model_card(config, folder, kind, work.base_id, use, [*map(str, checks), *notes])
        (part / "README.md").write_text(card)
        written = sorted(path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file())
        done = {"format": format, "files": written, "checks": [asdict(check) for check in checks], "notes": notes}
        (part / _MARKER).write_text(json.dumps(done, indent=1))
    files = tuple(sorted(path.name for path in target.iterdir()))
    placed = tuple(note.replace(formats.HERE, str(target)) for note in notes)
    return Exported(format, str(target), files, tuple(checks), placed)


def _load(config: TrainConfig, folder: Path, adapter: Path, part: Path, options: ExportOptions) -> formats.Work:
    """Opens the tuned model in fp32, and compares its logits with those of the base."""
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
    prompts, whole, texts = _prompts(codec, bool(tokenizer.chat_template), folder)
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
    base_id = options.base or hub_id(config.model.name)
    return formats.Work(
        config, folder, part, options.dtype, base_id, model, streamed, tokenizer, prompts, whole, texts,
        sorted(codec.stops), tuned, effect,
    )  # fmt: skip


def _prompts(codec: PromptCodec, chat: bool, folder: Path) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """Returns chats, chats with answers, and the questions: those of eval.json, or a few general ones."""
    pairs = [(question, "") for question in _QUESTIONS]
    if answers := read_comparison(folder):
        pairs = [(sample["question"], sample["tuned"]["answer"]) for sample in answers["samples"][:_PROMPTS]] or pairs
    texts = [question for question, _ in pairs]
    prompts = [codec.encode([{"role": "user", "content": text}] if chat else text) for text in texts]
    return prompts, [ids + codec.plain(answer) for ids, (_, answer) in zip(prompts, pairs, strict=True)], texts


def _check_free_space(folder: Path, work: formats.Work, format: str) -> None:
    # The converter reads fp32 weights from a second folder; an adapter is tried on its base in f16.
    gguf = 4 + formats.BYTES.get(format.removeprefix("gguf-"), 2.0)
    each = gguf if format.startswith("gguf") else 0.0 if format == "adapter" else formats.BYTES[work.dtype]
    need = each * sum(parameter.numel() for parameter in work.model.parameters())
    above = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.is_dir())
    free = shutil.disk_usage(above).free
    if free < need + _SPARE:
        raise ValueError(
            f"no room for the export in {folder}: it needs {(need + _SPARE) / GIB:.2f} GiB and {free / GIB:.2f} are "
            "free. Give out= a folder on a larger disk, or delete files"
        )


# ---------------------------------------------------------------------------------------------------- model card


def hub_id(name: str) -> str | None:
    """Returns the base model's name on the hub; None for a folder or the embedded model."""
    local = name == "embedded" or name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name).is_dir()
    return None if local else name


def model_card(config: TrainConfig, run_dir: Path, kind: str, base: str | None, use: str, checks: Sequence[str]) -> str:
    """Returns the text of README.md by model_card.jinja, with the front matter that the hub reads.

    Args:
        config: the run.
        run_dir: its folder, with eval.json and metrics.jsonl if it wrote them.
        kind: the kind of export, such as "merged weights in bf16".
        base: the base model's name on the hub, if it has one.
        use: how to load it, in Markdown.
        checks: a line for each.
    """
    from huggingface_hub import ModelCard, ModelCardData

    dtype, records, answers = config.model.base_dtype, read_metrics(run_dir), read_comparison(run_dir) or {}
    method = f"LoRA, r = {config.lora.r}, alpha = {config.lora.alpha}" if config.lora.r else "all weights trained"
    method += f", over base weights in {dtype}" if config.lora.r else f", computed in {dtype}"
    sides = [answers["base"], answers["tuned"]] if answers else []
    newest = [record for record in records if record["kind"] == "eval"][-1:]
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base, pipeline_tag="text-generation", tags=["tpu_kit", *(["lora"] if config.lora.r else [])]
        ),
        str(Path(__file__).with_name("model_card.jinja")),
        config=config, settings=_settings(config), kind=kind, use=use, checks=checks, method=method,
        named=base or Path(config.model.name).name,
        source=config.data.source if hub_id(config.data.source) else Path(config.data.source).name,
        answers=answers, sides=sides, unknown=UNKNOWN,
        shares=[Accuracy.of(side["accuracy"]["correct"], side["accuracy"]["total"]) for side in sides],
        last=next((record for record in reversed(records) if record["kind"] == "train"), None),
        # As `trainer.Trainer.weights`.
        best=best_evaluation(records if config.optim.eval_steps is not None else newest),
    )  # fmt: skip
    return str(card)


def _settings(config: TrainConfig) -> str:
    """Returns the configuration as YAML, with only the last part of local paths."""

    def portable(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: portable(inner) for name, inner in value.items()}
        return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value

    return load_config(portable(config.to_dict())).to_yaml().rstrip()
