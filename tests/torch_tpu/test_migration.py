"""The table of torch_xla's and TorchTPU's calls in tpu_kit/xla/README.md; run by `make test-torch-tpu`."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.child_processes import REPOSITORY, run_python
from tests.support.torch_tpu_environment import environment, needs_torch_tpu

PAGE = (REPOSITORY / "tpu_kit/xla/README.md").read_text()
FOUND = (
    "device", "synchronize", "transfers", "seed", "autocast", "eager_operations_are_programs", "compile_counter",
    "traced_backward", "donation", "scan", "barrier", "jax_function", "splash", "script",
    "private_names",
)  # fmt: skip


def test_each_row_has_a_test_or_says_that_it_was_not_run() -> None:
    rows = [row for row in PAGE.split("## Calls")[1].split("## A script")[0].splitlines() if row.startswith("| ")][1:]
    last = [row.rstrip(" |").rpartition("| ")[2] for row in rows]
    named = {text.strip("`") for text in last if text.startswith("`")}
    assert len(rows) >= 19 and named <= set(FOUND)
    assert all(text.startswith(("`", "not run")) for text in last), last


@pytest.fixture(scope="module")
def found() -> Any:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = run_python(["-m", "tests.support.torch_tpu_calls"], env={**environment(), "SCRIPT": script}, cwd=REPOSITORY,
                      timeout=900)  # fmt: skip
    print(done.stdout)
    return json.loads(done.stdout.rpartition("found ")[2])


@needs_torch_tpu
@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_call(name: str, found: Any) -> None:
    """The private interfaces among them: this fails if they have moved."""
    assert found[name] is True
