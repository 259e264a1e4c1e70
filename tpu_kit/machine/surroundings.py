"""Repairs a process's environment before libraries read it: an unusable HOME, and modules that hide packages."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Packages that the kit imports and whose names files in a folder of experiments are likely to have.
_PACKAGES = (
    "accelerate", "datasets", "fsspec", "gcsfs", "huggingface_hub", "jax", "matplotlib", "numpy", "peft", "psutil",
    "safetensors", "tokenizers", "torch", "torch_xla", "tqdm", "transformers", "wandb", "yaml",
)  # fmt: skip


def ensure_home() -> None:
    """Sets LOGNAME if the user has no name, and HOME to a temporary folder if the home folder is not usable.

    A container may run under a user id that /etc/passwd lacks. A home folder is usable if it is writable or has a
    folder `.cache`. Otherwise caches of the libraries, such as the Hugging Face hub's, lie in the temporary folder; a
    note on stderr has its path. Does nothing on Windows.
    """
    if sys.platform == "win32":
        return
    import pwd

    try:
        name, home = pwd.getpwuid(os.getuid())[:6:5]
    except KeyError:
        name, home = f"user-{os.getuid()}", ""
        os.environ.setdefault("LOGNAME", name)  # getpass.getuser() raises without it
    home = os.environ.get("HOME") or home
    if home and (os.access(home, os.W_OK | os.X_OK) or os.path.isdir(Path(home, ".cache"))):
        return
    import tempfile

    made = Path(tempfile.gettempdir(), f"tpu_kit-home-{os.getuid()}")
    made.mkdir(mode=0o700, exist_ok=True)
    if made.stat().st_uid != os.getuid() or made.is_symlink():  # another user made it
        made = Path(tempfile.mkdtemp(prefix="tpu_kit-home-"))
    print(
        f"note: the home folder {home or 'of this user'} cannot be written to: HOME={made} for caches", file=sys.stderr
    )
    os.environ.update(HOME=str(made))


def prefer_packages() -> None:
    """Moves the first folder of `sys.path` to the end if a module in it has the name of a package that the kit imports.

    Prints a note about it on stderr. A folder named site-packages or dist-packages stays first.

    Raises:
        ImportError: such a module is already imported.
    """
    first = Path(sys.path[0] or os.getcwd()) if sys.path else Path()
    hidden = [
        name for name in _PACKAGES if (first / f"{name}.py").is_file() or (first / name / "__init__.py").is_file()
    ]
    if not hidden or first.name in ("site-packages", "dist-packages"):
        return
    imported = [getattr(sys.modules.get(name), "__file__", None) for name in hidden]
    if taken := [file for file in imported if file and first.resolve() in Path(file).resolve().parents]:
        raise ImportError(f"{taken[0]} hides the package of this name, which tpu_kit needs: rename that file")
    sys.path.append(sys.path.pop(0))
    named = " and ".join(hidden)
    print(f"note: {first} has modules named {named}; tpu_kit imports the packages instead", file=sys.stderr)
