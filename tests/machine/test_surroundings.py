"""Home and working folders in which libraries would fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.child_processes import run_python

IMPORTS = "import getpass, os, pathlib; import tpu_kit; from tpu_kit.recipes import sft; "


@pytest.mark.parametrize("home", [pytest.param(None, marks=pytest.mark.slow), "/proc/none"])
def test_a_user_without_a_home_and_a_name_trains(home: str | None, tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-U", "--map-user=54321", "true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces")
    removed = dict.fromkeys(("LOGNAME", "USER", "LNAME", "USERNAME", "XDG_CACHE_HOME"))
    code = f"{IMPORTS}print(getpass.getuser(), pathlib.Path.home(), pathlib.Path('~').expanduser())"
    arguments = [unshare, "-U", "--map-user=54321", sys.executable, "-c", code]
    done = run_python(arguments[1:], executable=unshare, env=removed | {"HOME": home, "TMPDIR": str(tmp_path)})
    made = tmp_path / "tpu_kit-home-54321"
    assert done.stdout.split() == ["user-54321", str(made), str(made)]
    assert f"cannot be written to: HOME={made} for caches" in done.stderr and made.stat().st_mode & 0o77 == 0


def test_modules_of_the_working_folder_do_not_hide_packages(tmp_path: Path) -> None:
    (tmp_path / "datasets.py").write_text("raise RuntimeError('mine')")
    (tmp_path / "my_rewards.py").write_text("def score(): return 1")
    done = run_python(["-c", f"{IMPORTS}import my_rewards; print(sft.Dataset.__module__)"], cwd=tmp_path)
    assert done.stdout.split() == ["datasets.arrow_dataset"]
    assert f"note: {tmp_path} has modules named datasets; tpu_kit imports the packages instead\n" in done.stderr
    (tmp_path / "datasets.py").write_text("")
    told = run_python(["-c", "import datasets, tpu_kit"], cwd=tmp_path, expect=1).stderr.splitlines()[-1]
    assert told.startswith(f"ImportError: {tmp_path}/datasets.py hides the package of this name, which tpu_kit needs: ")
