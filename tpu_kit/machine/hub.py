"""Whether the Hugging Face hub answers: asked once, in three seconds at most."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any

from tpu_kit.config.fields import hide_secrets


def settings() -> Any:
    """The settings of huggingface_hub, as it reads them from the environment; None if it is not installed."""
    with contextlib.suppress(ImportError):
        from huggingface_hub import constants

        return constants
    return None


_ASKING = 3.0  # seconds in which the hub must answer
_ASKED_AGAIN = 300.0  # seconds after which it is tried again
_ASKED = "TPU_KIT_HUB_ASKED"  # environment variable, inherited by child processes: the time of the last try (time.time)


def head(url: str, token: str | None = None, seconds: float = _ASKING) -> tuple[int | None, str]:
    """Requests a page's headers as huggingface_hub does, with its proxies and certificates; follows no redirect.

    Returns:
        The status, or None and the reason.
    """
    outcome: list[tuple[int | None, str]] = [(None, f"no answer in {seconds:g} s")]
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    def ask() -> None:
        try:
            from huggingface_hub.utils import get_session

            answer = get_session().head(url, headers=headers, timeout=seconds, follow_redirects=False)
            outcome[0] = (answer.status_code, "")
        except Exception as error:  # of the HTTP library that this version of huggingface_hub has
            outcome[0] = (None, " ".join(hide_secrets(str(error)).split()) or type(error).__name__)

    # In a thread, because the lookup of a name has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0]


def endpoint() -> str:
    """The address of the hub."""
    return str(settings().ENDPOINT) if settings() else "the Hugging Face hub"


def ask_hub_once() -> None:
    """Lets Hugging Face's libraries use only their caches if the hub does not answer one request within 3 seconds.

    Otherwise each file costs six tries: 24 s if connections are refused, and 66 s without any answer. Child processes
    inherit the result, and the hub is tried again after five minutes. Nothing is requested if HF_HUB_OFFLINE is set,
    also to 0.
    """
    before = os.environ.get(_ASKED)
    if before is None and {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} & os.environ.keys():
        return
    if before is not None and time.time() - float(before) < _ASKED_AGAIN:
        return
    _set_offline(False)
    status, problem = head(endpoint())
    os.environ.update({_ASKED: str(time.time())})
    if status is None:
        _set_offline(True)
        advice = "only what is in its cache on this machine is used (HF_HUB_OFFLINE=0 tries longer)"
        print(f"{endpoint()}: {problem}; {advice}", file=sys.stderr, flush=True)


def _set_offline(offline: bool) -> None:
    os.environ.pop("HF_HUB_OFFLINE", None)
    if offline:
        os.environ.update(HF_HUB_OFFLINE="1")
    for name in ("huggingface_hub.constants", "datasets.config"):  # have read the variable, if they are loaded
        if module := sys.modules.get(name):
            module.HF_HUB_OFFLINE = offline  # type: ignore[attr-defined]  # of a module by name
