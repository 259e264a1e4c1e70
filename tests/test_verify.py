"""The rehearsal of a run where it cannot start. That it ends well elsewhere is seen in tests/test_notebooks.py."""

from __future__ import annotations

import json

from tpu_kit.testing import run_python

CODE = """
import json
from dataclasses import asdict
from tpu_kit.config import load_config
from tpu_kit.verify import rehearse
rows = list(rehearse(load_config(None, ["device_type={}"])))
print(json.dumps([[row.name, row.status, row.found, row.fix] for row in rows]))
"""


def test_a_run_that_cannot_start_is_one_failure() -> None:
    done = run_python(CODE.format("tpu"))
    ((name, status, found, fix),) = json.loads(done.stdout.splitlines()[-1])
    assert (name, status) == ("Rehearsal", "failure")
    assert "TPU" in found or "tpu" in found
    assert fix == "python -m tpu_kit train embedded-cot max_steps=4 device_type=tpu shows all of it"
    assert len(done.stdout.splitlines()) == 1, "what a part of it prints stays out of the table"
