"""Jobs on slices, and stand-ins for their hosts, for the tests of `tpu_kit.extras.pods`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tpu_kit.config.loader import load_config
from tpu_kit.extras.pods.slice_job import SliceJob, check_job

SLICES = {  # hosts, chips per host, shape, zone
    "v5litepod-16": (4, 4, "4x4", "us-west4-a"),
    "v5litepod-64": (16, 4, "8x8", "us-west4-a"),
    "v6e-32": (8, 4, "4x8", "us-east5-b"),
    "v4-32": (4, 4, "2x2x4", "us-central2-b"),
    "v5p-64": (8, 4, "2x4x4", "us-east5-a"),
}
VALUES = {
    "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct"},
    "data": {
        "source": "gs://bucket/rows.jsonl",
        "system_prompt": 'It\'s $5:\n"`date`" \\ $(date)\n$$ $$(x) $(HF_TOKEN)\nEOF',
    },
    "output_dir": "gs://bucket/my-run",
    "run_name": "my-run",
    "optim": {"max_steps": 1000},
}


def make_job(engine: str, name: str = "v5litepod-64", spot: bool = False, **changes: Any) -> SliceJob:
    config = load_config(VALUES, changes)
    return check_job(config, name, engine, SLICES[name][3], None, spot)


def programs(text: str) -> Iterator[list[str]]:
    """Yields the words of each call of sky, xpk, gcloud and kubectl in a bash text."""
    text = text.replace("\\\n", " ")
    for found in re.finditer(
        r"(?:^|(?<=[|(;])|(?<=! )|(?<=if ))\s*((?:sky|xpk|gcloud|kubectl) .*)", text, re.MULTILINE
    ):
        lexer = shlex.shlex(found[1], posix=True, punctuation_chars="|;&<>()")
        lexer.whitespace_split = True
        words = []
        for word in lexer:
            if set(word) <= set("|;&<>()"):
                break
            words.append(word)
        yield [word for word in words if word not in ("2", "1")]


def kubernetes_expands(text: str, environment: Mapping[str, str]) -> str:
    """Expands a container's command as Kubernetes does: `$$` becomes `$`, and `$(NAME)` a variable's value."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda at: "$" if at[1] is None else environment.get(at[1], at[0]), text)


TRAIN = """#!/bin/bash
# Stands in for the environment's Python: records its arguments, then waits or exits as a test asks.
echo "$@" >> "$CALLS"
[ -z "${SIGNAL-}" ] || { trap 'exit 75' TERM; touch "$CALLS.ready"; for i in $(seq 200); do sleep 0.05; done; }
exit "$(head -c 3 "$CODE" 2> /dev/null || echo 0)"
"""


def host(tmp_path: Path, **environment: str) -> dict[str, str]:
    """The environment of a host with installed packages; its Python appends its arguments to the file `CALLS`."""
    folder = tmp_path / "tpu_kit"
    for name, text in {"uv/bin/uv": "#!/bin/bash\n", "env/bin/python": TRAIN}.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    own = {"HOME": str(tmp_path), "CALLS": str(tmp_path / "calls"), "CODE": str(tmp_path / "code")}
    return {"PATH": os.environ["PATH"]} | own | environment


def stand_in(tmp_path: Path, name: str, text: str) -> str:
    """Puts a program of this name first on the path; returns that PATH."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
