"""What every test gets: no network, no display, and a process that never initialises torch_xla."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.object_store import bucket, object_store  # noqa: F401  fixtures

# Before any test module imports the libraries that read them.
os.environ |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline"}
os.environ["GCE_METADATA_HOST"] = "127.0.0.1:9"  # nobody is there: no test asks a cloud what becomes of the machine


@pytest.fixture(autouse=True)
def xla_stays_out_of_this_process(request: pytest.FixtureRequest) -> Iterator[None]:
    # An initialised runtime makes every later launch in this process fail, far from the test that did it: stop here.
    yield
    torch_xla = sys.modules.get("torch_xla")
    if torch_xla is not None and torch_xla._XLAC._xla_runtime_is_initialized():
        pytest.exit(f"{request.node.nodeid} initialised torch_xla in the tests' own process: use run_python", 1)
