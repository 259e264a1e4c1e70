"""Copies the kit's notebooks to a folder: `python -m tpu_kit notebooks --copy FOLDER`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from tpu_kit.config.loader import ConfigError
from tpu_kit.machine.storage.atomic import replacing
from tpu_kit.machine.storage.object_store import is_url

# In a clone, this is a symbolic link to notebooks/.
NOTEBOOKS = Path(__file__).parents[1] / "assets" / "notebooks"
_TRAINING = "4-train-cot-sft.ipynb"


def print_copies(folder: str, others: Sequence[str] = ()) -> int:
    """Runs `notebooks --copy`: copies the notebooks and prints their names; returns 0, the exit code.

    Args:
        folder: folder to write to.
        others: the command's other arguments, which only apply if notebooks run.

    Raises:
        ConfigError: there are other arguments, or as `copy_notebooks`.
    """
    if others:
        raise ConfigError([f"--copy runs no notebook: leave out {', '.join(others)}"])
    print(copy_notebooks(folder))
    return 0


def copy_notebooks(folder: str) -> str:
    """Writes the kit's notebooks to a local folder, made if absent; overwrites no file.

    Returns:
        Text with the names of the written and of the existing files, and the next action.

    Raises:
        ConfigError: `folder` is an address, has files of these names with other content (nothing was written), or is
            not writable.
    """
    if is_url(folder):
        raise ConfigError([f"--copy {folder}: notebooks are opened from a disk; name a local folder"])
    target = Path(folder).expanduser()
    contents = {path.name: path.read_bytes() for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    assert contents, f"{NOTEBOOKS} has no notebooks"
    try:
        there = {name for name in contents if (target / name).exists()}
        differ = [name for name in sorted(there) if (target / name).read_bytes() != contents[name]]
        if differ:
            why = "is not the kit's notebook (edited, run, or of another version), so nothing was copied"
            raise ConfigError([f"{target / name} {why}; rename it, or name another folder" for name in differ])
        target.mkdir(parents=True, exist_ok=True)
        for name in contents.keys() - there:
            with replacing(target / name) as part:
                part.write_bytes(contents[name])
    except OSError as error:
        raise ConfigError([f"--copy {folder}: cannot be written to ({error.strerror}); name another folder"]) from None
    written = ", ".join(name for name in contents if name not in there)
    lines = [f"Copied into {target}: {written}"] if written else []
    lines += [f"Already there, and equal: {', '.join(sorted(there))}"] if there else []
    training = shlex.quote(str(target / _TRAINING))
    return "\n".join([*lines, f"Open {training} in Jupyter, or run `python -m tpu_kit notebooks {training}`"])
