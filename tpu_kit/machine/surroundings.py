"""Puts right what surrounds a process before libraries read it: the user's home, and modules of the working folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Packages that the kit imports; a file of such a name is more likely in a folder of experiments than the others'.
_PACKAGES = (
    "accelerate", "datasets", "fsspec", "gcsfs", "huggingface_hub", "jax", "matplotlib", "numpy", "peft", "psutil",
    "safetensors", "tokenizers", "torch", "torch_xla", "tqdm", "transformers", "wandb", "yaml",
)  # fmt: skip


def ensure_home() -> None:
    """Sets HOME and LOGNAME to what can be used, where the user has no name or no folder for caches.

    As in a container that runs under a number without an entry in /etc/passwd. The libraries' caches, such as that of
    the hub, are then in a folder of the temporary one, which is told once.
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
    if made.stat().st_uid != os.getuid() or made.is_symlink():  # somebody else's trap
        made = Path(tempfile.mkdtemp(prefix="tpu_kit-home-"))
    print(
        f"note: the home folder {home or 'of this user'} cannot be written to: HOME={made} for caches", file=sys.stderr
    )
    os.environ.update(HOME=str(made))


def prefer_packages() -> None:
    """Moves the working folder, where it comes first, behind installed packages if a file there hides one of them.

    Raises:
        ImportError: such a file was imported before.
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
    print(f"note: {first} has modules named {named}; tpu_kit imports the packages of that name", file=sys.stderr)
