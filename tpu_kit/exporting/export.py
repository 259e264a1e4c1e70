"""Exports a tuned model for other programs, as a folder or a file.

    from tpu_kit.exporting.export import export
    print(export("runs/my-run", "merged"))

Every export is written to a temporary folder, read again in a new process, compared with the tuned model on real
prompts, and moved to its folder only if it is the same model. Weights are merged in fp32 and rounded last: merging in
bf16 would lose small differences, such as LoRA's.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from tpu_kit.config.loader import load_config, read_yaml
from tpu_kit.exporting.card import base_licence, hub_id, model_card
from tpu_kit.exporting.equivalence import LogitComparison
from tpu_kit.exporting.hub.repository import HubRepository, Pushed
from tpu_kit.exporting.options import DTYPES, ExportOptions, format_named
from tpu_kit.exporting.tuned_model import HERE, Format, TunedModel, open_tuned
from tpu_kit.machine.chips import GIB, MIB
from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.object_store import at_hand, is_url, join
from tpu_kit.machine.storage.run_folder import ADAPTER, find_run
from tpu_kit.model.states_head import file_names, find_head, title, without_head
from tpu_kit.training.objectives import objective_of

_MARKER = "export.json"  # a folder that holds it may be replaced
_SPARE = 64 * MIB  # for the tokenizer, the card and the file system
_PLAIN = (
    "it was trained on plain text, so these files have no chat template: ask for completions, not for chats (vLLM: "
    "/v1/completions, llama.cpp: /completion)"
)
_BASES = "; the base model's template does not fit"


@dataclass(frozen=True)
class Exported:
    """A finished export.

    Attributes:
        format: a name in `EXPORT_FORMATS`.
        folder: the folder of the export.
        files: sorted names of the files and folders in it.
        checks: the comparisons, all within their limits.
        notes: missing checks, and how to use the export.
        pushed: the commit on the hub, or None. If several formats are pushed, only the last export has it.
    """

    format: str
    folder: str
    files: tuple[str, ...]
    checks: tuple[LogitComparison, ...]
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
    vllm: str | None = None,
    push: str | None = None,
    private: bool = True,
    revision: str | None = None,
) -> Exported:
    """Writes a run's model for another program, checks it, and pushes it to the hub if `push` names a repository.

    Args:
        run_dir: the output of training, with config.yaml and adapter/: a folder, or gs://bucket/run; or its config.yaml
            or adapter.
        format: "adapter" for PEFT; "merged" for transformers; "vllm"; "gguf-f16", "gguf-bf16", "gguf-q8_0" for
            llama.cpp and Ollama, with a second file for images; "gguf-lora" for an adapter in llama.cpp.
        out: local folder to write; None: `RUN_DIR/export/FORMAT`, for gs://bucket/run
            `runs/<run_name>/export/<format>`. An earlier export there is replaced once the new export is checked; other
            content is an error.
        dtype: type of merged weights: "bf16", "f16" or "fp32". GGUF formats ignore it.
        base: the base model's name on the hub, if training read it from a folder.
        vllm: interpreter of an environment with vLLM for comparisons; None: this environment's, "off": none. Only for
            the formats "vllm" and "adapter".
        push: "owner/name" of a repository on the hub; None: nothing is pushed.
        private: whether a repository that is created is private; False needs `push`.
        revision: the branch to push to; None: main. Other branches need `push`.

    Raises:
        ValueError: as `ExportOptions`. The run is incomplete. The adapter is missing, damaged or of another model. The
            format cannot hold the model. The disk is full, a tool is missing, or the object store cannot be read. The
            hub refuses the repository or the upload. Or the export differs from the tuned model.
    """
    place = None if out is None else str(out)
    (done,) = export_all(
        run_dir, ExportOptions((format,), place, dtype, base, vllm, push=push, private=private, revision=revision)
    )
    return done


def export_all(run_dir: str | Path, options: ExportOptions, option: str = "push") -> list[Exported]:
    """Exports a run in all formats of `options`, and pushes them as one commit if `options.push` is set.

    Raises as `export`. After an error nothing is pushed, and the formats that were finished stay on the disk.

    Args:
        run_dir: as in `export`.
        options: how to export. If several formats are pushed, the first goes to the repository's root, all others to
            folders with the formats' names.
        option: name of the option that names the repository, for errors.

    Returns:
        An export per format, in order. After a push, the last has `pushed`; otherwise it is None in all.
    """
    repository = None
    if options.push:
        repository = HubRepository(options.push, options.private, options.revision, option)
        repository.check()
        print(f"to be pushed to {repository.url}", flush=True)  # before minutes of work
    with contextlib.suppress(ValueError):  # missing files are reported below
        folder, adapter = find_run(run_dir)
        run_dir = folder if adapter in (None, join(folder, ADAPTER)) else run_dir  # not if the adapter was copied
    if not is_url(run_dir):
        done = [_export(Path(run_dir), False, options, format) for format in options.format]
    else:
        with at_hand(run_dir, "adapter", "config.yaml", "eval.json", "metrics.jsonl") as folder:
            done = [_export(folder, True, options, format) for format in options.format]
    if repository:
        places = ["", *options.format[1:]]
        folders = {place: Path(exported.folder) for place, exported in zip(places, done, strict=True)}
        done[-1] = replace(done[-1], pushed=repository.push(folders))
    return done


def _export(folder: Path, copied: bool, options: ExportOptions, format: str) -> Exported:
    """Exports a run in one format without a push; `folder` has the run's files, and is temporary if `copied`.

    Without `options.out` it writes to `folder` or, if `copied`, to the run's default folder. Raises as `export`.
    """
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} has no config.yaml: give the folder that a run wrote (its output_dir)")
    config = load_config(read_yaml(folder / "config.yaml"))
    run = replace(config, output_dir=None).output_path if copied else folder  # output_dir may be of another machine
    target = Path(options.out) if options.out else run / "export" / format
    if target.exists() and not (target / _MARKER).is_file() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"out={target} exists and is no earlier export: give a folder that does not exist yet")
    head = find_head(folder / "adapter")
    kind = format_named(format)
    if head and not (kind.keeps_head and objective_of(config).trains_model):
        raise ValueError(
            f"format={format}: {folder / 'adapter'} has an {title(head)}, a function of hidden states that is not "
            f"linear, which this format cannot hold. `generate adapter={folder / 'adapter'}` answers with it; to "
            f"export the rest, delete {' and '.join(file_names(head))} there"
        )
    kind.prepare()
    with atomic.replacing(target) as part, without_head(folder / "adapter") as adapter:
        tuned = open_tuned(config, folder, adapter, part, options.dtype, options.base or hub_id(config.model.name))
        tuned.vllm = options.vllm
        _check_free_space(target, tuned, kind)
        part.mkdir(parents=True)
        written = kind.write(tuned)
        named = config.model.name
        checks, notes = written.checks, [_placed(note, options, format, named) for note in written.notes]
        if options.push and not tuned.base_id:
            _name_base_alone(part / "adapter_config.json")
        if not tuned.tokenizer.chat_template:
            notes.append(_PLAIN + _BASES if kind.on_base else _PLAIN)
        if head:
            notes.append(f"PEFT loads the adapter without the {title(head)}, tpu_kit's generate with it")
        licence = base_licence(tuned.base_id, config.model.revision) if options.push and tuned.base_id else {}
        card = model_card(
            config, folder, written.kind, tuned.base_id, _placed(written.use, options, format, named),
            [*map(str, checks), *notes], relation=kind.relation, licence=licence,
        )  # fmt: skip
        (part / "README.md").write_text(card)
        files = sorted(path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file())
        done = {"format": format, "files": files, "checks": [asdict(check) for check in checks], "notes": notes}
        (part / _MARKER).write_text(json.dumps(done, indent=1))
    names = tuple(sorted(path.name for path in target.iterdir()))
    placed = tuple(note.replace(HERE, str(target)) for note in notes)
    return Exported(format, str(target), names, tuple(checks), placed)


def _name_base_alone(settings: Path) -> None:
    """Removes the path of a local base model from an adapter_config.json, if that exists; keeps the folder's name."""
    if settings.is_file():
        named = json.loads(settings.read_text())
        named["base_model_name_or_path"] = Path(named["base_model_name_or_path"]).name
        settings.write_text(json.dumps(named, indent=2, sort_keys=True))


def _placed(text: str, options: ExportOptions, format: str, base: str) -> str:
    """Replaces `HERE` in a text about loading an export by the repository; nothing changes without `options.push`.

    Where a folder is needed, it adds a download. If `format` is not the first of the options, only the folder `format`
    of the repository is used. An absolute path `base` (`model.name`) is replaced by its last part.
    """
    if not options.push or HERE not in text:
        return text
    if Path(base).is_absolute():
        text = text.replace(base, Path(base).name)
    first = format == options.format[0]
    if f'"{HERE}"' not in text:  # a command
        branch = f" --revision {options.revision}" if options.revision else ""
        if first and text.count(HERE) == 1 and f"{HERE}/" not in text:
            return text.replace(HERE, options.push + branch)
        here = Path(options.push).name
        part = "" if first else f' --include "{format}/*"'
        get = f"hf download {options.push}{part}{branch} --local-dir {here}"
        text = text.replace("```sh\n", f"```sh\n{get}\n") if "```" in text else f"{text}, after {get}"
        return text.replace(HERE, here if first else f"{here}/{format}")
    branch = f', revision="{options.revision}"' if options.revision else ""
    if first:
        return text.replace(f'"{HERE}"', f'"{options.push}"{branch}')
    folder = f'folder = snapshot_download("{options.push}"{branch}, allow_patterns="{format}/*") + "/{format}"\n'
    text = text.replace("```python\n", f"```python\nfrom huggingface_hub import snapshot_download\n{folder}")
    return text.replace(f'"{HERE}"', "folder")


def _check_free_space(folder: Path, tuned: TunedModel, kind: Format) -> None:
    """Raises ValueError if the disk of `folder`, which need not exist, has no room for the export."""
    each = getattr(torch, DTYPES[tuned.dtype]).itemsize if kind.weight_bytes is None else kind.weight_bytes
    need = each * sum(parameter.numel() for parameter in tuned.model.parameters())
    above = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.is_dir())
    free = shutil.disk_usage(above).free
    if free < need + _SPARE:
        raise ValueError(
            f"no room for the export in {folder}: it needs {(need + _SPARE) / GIB:.2f} GiB and {free / GIB:.2f} are "
            "free. Give out= a folder on a larger disk, or delete files"
        )
