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
from tpu_kit.exporting.equivalence import Check
from tpu_kit.exporting.hub import Pushed, check_repository
from tpu_kit.exporting.hub import push as push_folder
from tpu_kit.exporting.options import DTYPES, ExportOptions, format_named
from tpu_kit.exporting.tuned_model import HERE, Format, TunedModel, open_tuned
from tpu_kit.generation.evaluation.accuracy import Accuracy
from tpu_kit.generation.evaluation.comparison import read_comparison
from tpu_kit.machine.chips import GIB, MIB
from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.object_store import at_hand, is_url, join
from tpu_kit.machine.storage.run_folder import ADAPTER, find_run
from tpu_kit.model.states_head import file_names, find_head, title, without_head
from tpu_kit.training.metrics import best_evaluation, read_metrics
from tpu_kit.training.objectives import objective_of

_MARKER = "export.json"  # a folder that holds it may be replaced
_SPARE = 64 * MIB  # for the tokenizer, the card and the file system
_PLAIN = (
    "it was trained on plain text, so these files have no chat template: ask for completions, not for chats (vLLM: "
    "/v1/completions, llama.cpp: /completion)"
)
_BASES = "; that of the base model does not fit"


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
    kind = format_named(format)
    if head and not (kind.keeps_head and objective_of(config).trains_model):
        raise ValueError(
            f"format={format}: {folder / 'adapter'} has an {title(head)}, a function of hidden states that is not "
            f"linear, for which this format has no place. `generate adapter={folder / 'adapter'}` answers with it; to "
            f"export the rest, delete {' and '.join(file_names(head))} there"
        )
    kind.prepare()
    with atomic.replacing(target) as part, without_head(folder / "adapter") as adapter:
        tuned = open_tuned(config, folder, adapter, part, options.dtype, options.base or hub_id(config.model.name))
        _check_free_space(target, tuned, kind)
        part.mkdir(parents=True)
        written = kind.write(tuned)
        checks, notes = written.checks, written.notes
        if not tuned.tokenizer.chat_template:
            notes.append(_PLAIN + _BASES if kind.on_base else _PLAIN)
        if head:
            notes.append(f"PEFT loads the adapter without the {title(head)}, tpu_kit's generate with it")
        card = model_card(config, folder, written.kind, tuned.base_id, written.use, [*map(str, checks), *notes])
        (part / "README.md").write_text(card)
        files = sorted(path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file())
        done = {"format": format, "files": files, "checks": [asdict(check) for check in checks], "notes": notes}
        (part / _MARKER).write_text(json.dumps(done, indent=1))
    names = tuple(sorted(path.name for path in target.iterdir()))
    placed = tuple(note.replace(HERE, str(target)) for note in notes)
    return Exported(format, str(target), names, tuple(checks), placed)


def _check_free_space(folder: Path, tuned: TunedModel, kind: Format) -> None:
    each = getattr(torch, DTYPES[tuned.dtype]).itemsize if kind.weight_bytes is None else kind.weight_bytes
    need = each * sum(parameter.numel() for parameter in tuned.model.parameters())
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
