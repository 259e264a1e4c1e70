"""Builds the sdist and the wheel of a commit, checks them, and puts them into dist/: `make release [TAG=v0.1.0]`.

Each check prints a line; the first failure ends the release and leaves dist/ empty. Needs git, and the packages that
`make release` installs beside this interpreter: build and twine.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from json import loads
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://github.com/tpu-kit/tpu_kit"
MOST_BYTES = 5 << 20  # limit for each released file; the index accepts 100 MiB, but every session downloads the wheel


class Refused(Exception):
    """A failed check; the text has the problem and the next action."""


def main(root: Path, tag: str) -> int:
    """Builds and checks the commit that is checked out; returns the exit code.

    Args:
        root: The clone.
        tag: The tag to release, such as v0.1.0; empty to try a release before it is tagged.
    """
    shutil.rmtree(root / "dist", ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="tpu_kit-release-") as made:
        folder = Path(made)
        source, built = folder / "source", folder / "built"
        checks = {
            "commit": lambda: export(root, source),
            "version": lambda: check_version(source, tag),
            "build": lambda: build(source, built),
            "twine": lambda: check_metadata(built),
            "contents": lambda: check_contents(root, built),
            "without torch": lambda: check_bare(built, folder / "bare"),
            "README": lambda: install(source, built, folder / "clean"),
            "doctor": lambda: run_readme(source, folder / "clean"),
            "tpu_kit": lambda: check_command(read_version(source), folder / "clean"),
        }
        for name, check in checks.items():
            try:
                print(f"✓ {name:13} {check()}", flush=True)
            except Refused as problem:
                print(f"✗ {name:13} {problem}", flush=True)
                return 1
        shutil.copytree(built, root / "dist")
    print(f"dist/ has them: {', '.join(path.name for path in files(root / 'dist'))}")
    return 0


def run(command: Sequence[str | Path], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Runs a command; returns the last line it printed.

    Raises:
        Refused: The command failed; the text is one line with the command and the end of its output.
    """
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # PYTHONPATH may be the clone
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env={**clean, **(env or {})}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        told = next((line for line in reversed(lines) if re.search("error|failed|cannot", line, re.I)), "")
        text = told or " | ".join(lines[-3:]) or "no output"
        raise Refused(f"`{shlex.join(map(str, command))}` ended with {done.returncode}: {text}")
    return lines[-1] if lines else ""


def files(folder: Path) -> list[Path]:
    """Returns the sdist and the wheel in a folder."""
    return sorted([*folder.glob("*.tar.gz"), *folder.glob("*.whl")])


def export(root: Path, source: Path) -> str:
    """Writes the commit's files into an empty folder, and makes the links of README.md absolute.

    Relative links lead to files of the repository, which a package index does not show.
    """
    status = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True)
    if status.returncode:
        raise Refused(f"{root} is no clone: {status.stderr.strip()}; run make release in one")
    if changed := [line[3:] for line in status.stdout.splitlines()]:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise Refused(f"{', '.join(changed[:3])}{more} differ from the commit: commit, stash or remove them")
    archive = source.with_suffix(".tar")
    run(["git", "archive", "--output", archive, "HEAD"], cwd=root)
    with tarfile.open(archive) as tar:
        tar.extraction_filter = lambda member, path: member  # git's own archive; Python before 3.11.4 has no filters
        tar.extractall(source)
    readme = source / "README.md"
    readme.write_text(absolute_links(readme.read_text(), read_version(source)))
    return run(["git", "log", "-1", "--format=%h %s"], cwd=root)


def absolute_links(text: str, version: str) -> str:
    """Returns README.md with the released version's address before each relative link."""
    base = f"{ADDRESS}/blob/v{version}"
    text = re.sub(r"\]\((#[^)]+)\)", rf"]({base}/README.md\1)", text)
    return re.sub(r"\]\((?!\w+:)([^)]+)\)", rf"]({base}/\1)", text)


def read_version(source: Path) -> str:
    """Reads the kit's version without importing it."""
    for node in ast.parse((source / "tpu_kit" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise Refused("tpu_kit/__init__.py sets no __version__")


def check_version(source: Path, tag: str) -> str:
    """Compares the version with the tag and CHANGELOG.md, whose section must have a date if there is a tag."""
    version = read_version(source)
    if tag and tag != f"v{version}":
        advice = f"delete the tag {tag}, then tag v{version}, or set __version__ first"
        raise Refused(f"the tag is {tag}, and tpu_kit.__version__ is {version}: {advice}")
    heading = re.search(rf"^## \[{re.escape(version)}\] - (\S+)$", (source / "CHANGELOG.md").read_text(), re.MULTILINE)
    if heading is None:
        raise Refused(f"CHANGELOG.md has no section `## [{version}] - DATE`: write the changes that a user sees")
    if tag and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", heading[1]):
        raise Refused(f"CHANGELOG.md dates {version} {heading[1]}: write the day of the release, such as 2026-12-01")
    return f"{version}, {heading[1]} in CHANGELOG.md" + (f", tag {tag}" if tag else ", not tagged")


def build(source: Path, built: Path) -> str:
    """Builds the sdist, and the wheel from the sdist, in isolated environments."""
    run([sys.executable, "-m", "build", "--outdir", built, source])
    return ", ".join(f"{path.name} ({path.stat().st_size / 1e6:.1f} MB)" for path in files(built))


def check_metadata(built: Path) -> str:
    """Checks the metadata, and that a package index can render README.md."""
    run([sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files(built)])
    return "the metadata is valid, and README.md renders"


def check_contents(root: Path, built: Path) -> str:
    """Checks that the wheel has every file of the package, clean notebooks, and nothing else."""
    (sdist,), (path,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as tar:
        packed = [name.partition("/")[2] for name in tar.getnames()]
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        notebooks = {name: loads(wheel.read(name)) for name in names if name.endswith(".ipynb")}
    # A room's README.md is left out: its links point to files of the repository.
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "tpu_kit", "notebooks"]
    listed = subprocess.run(git, cwd=root, capture_output=True, text=True).stdout.splitlines()
    ours = {re.sub("^notebooks/", "tpu_kit/assets/notebooks/", name) for name in listed}
    expected = {name for name in ours if not name.endswith(("README.md", "assets/notebooks"))}
    problems = [f"{name} is missing" for name in sorted(expected - {*names})]
    problems += [f"{name} is not of the package" for name in sorted({*names} - expected)]
    problems += [f"the sdist has {name}" for name in packed if name.startswith("tests/")]
    for name, notebook in notebooks.items():
        if any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"]):
            problems.append(f"{name} has outputs")
    for file in (sdist, path):
        if file.stat().st_size > MOST_BYTES:
            problems.append(f"{file.name} has {file.stat().st_size} bytes, more than {MOST_BYTES}")
    if problems:
        raise Refused("; ".join(problems[:3]) + (f"; {len(problems) - 3} more" if len(problems) > 3 else ""))
    return f"{len(names)} files, {len(notebooks)} notebooks without outputs; no tests in the wheel or the sdist"


def make_environment(folder: Path) -> Path:
    """Makes an empty environment; returns its interpreter."""
    run([sys.executable, "-m", "venv", folder])
    return folder / "bin" / "python"


_BARE = """
import sys
import tpu_kit
from tpu_kit.notebook import install
print(tpu_kit.__version__, *sorted({"torch", "numpy", "transformers"} & set(sys.modules)))
"""


def check_bare(built: Path, folder: Path) -> str:
    """Imports the kit, and the modules of the notebooks' installing cell, with nothing but the kit installed."""
    python, (wheel,) = make_environment(folder), built.glob("*.whl")
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel])
    said = run([python, "-c", _BARE], cwd=folder)
    if said != wheel.name.split("-")[1]:
        raise Refused(f"importing tpu_kit without its dependencies said {said!r}, not its version")
    return f"tpu_kit {said} is imported where nothing but the wheel is installed"


def readme_lines(source: Path) -> list[str]:
    """Returns the commands in the first code block of README.md, without comments."""
    (block, *_) = re.findall(r"^```bash\n(.*?)^```", (source / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [line.partition("  #")[0].strip() for line in block.splitlines()]


def install(source: Path, built: Path, folder: Path) -> str:
    """Runs the first command of README.md in an empty environment, with the wheel in place of its address."""
    python, (wheel,) = make_environment(folder), built.glob("*.whl")
    command = readme_lines(source)[0]
    match = re.fullmatch(r'pip install "?tpu_kit\[([\w,]+)\](?: @ git\+[^"]+)?"?', command)
    if match is None:
        raise Refused(f"the first command of README.md is `{command}`, not `pip install tpu_kit[...]`")
    run([python, "-m", "pip", "install", "--quiet", f"{wheel}[{match[1]}]"])
    return f'pip install "{wheel.name}[{match[1]}]"; {run([python, "-m", "pip", "check"])}'


def run_readme(source: Path, folder: Path) -> str:
    """Runs the second command of README.md, which checks the machine, in that environment."""
    command = readme_lines(source)[1].split()
    if command[0] != "python":
        raise Refused(f"the second command of README.md is {shlex.join(command)}, not a python command")
    run([folder / "bin" / "python", *command[1:]], cwd=folder)
    return f"{shlex.join(command)} found nothing that keeps a run from starting"


def check_command(version: str, folder: Path) -> str:
    """Runs the console script: its version, the notebooks, and two updates of the embedded model."""
    script = folder / "bin" / "tpu_kit"
    if (said := run([script, "--version"], cwd=folder)) != f"tpu_kit {version}":
        raise Refused(f"tpu_kit --version said {said!r}, not tpu_kit {version}")
    run([script, "notebooks", "--copy", "notebooks"], cwd=folder)
    environment = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    options = ["embedded-cot", "device_type=cpu", "max_steps=2", "warmup_steps=0", "generate_rows=0"]
    run([script, "train", *options], cwd=folder, env=environment)
    copied = sorted((folder / "notebooks").glob("*.ipynb"))
    return f"{said}; copied {len(copied)} notebooks; trained 2 updates of the embedded model"


if __name__ == "__main__":
    raise SystemExit(main(ROOT, sys.argv[1] if len(sys.argv) > 1 else ""))
