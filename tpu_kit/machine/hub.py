"""Tests whether the Hugging Face hub answers: once per run, in three seconds at most."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any

from tpu_kit.config.fields import hide_secrets


def settings() -> Any:
    """Returns `huggingface_hub.constants`, its settings from the environment; None if it is not installed."""
    with contextlib.suppress(ImportError):
        from huggingface_hub import constants

        return constants
    return None


_ASKING = 3.0  # seconds in which the hub must answer
_ASKED_AGAIN = 300.0  # seconds until the next try
_ASKED = "TPU_KIT_HUB_ASKED"  # environment variable with the time of the last try (time.time), for child processes


def head(url: str, token: str | None = None, seconds: float = _ASKING) -> tuple[int | None, str]:
    """Sends a HEAD request with huggingface_hub's proxies and certificates, without following redirects.

    `token` is a bearer token; None sends none. Raises nothing.

    Returns:
        The HTTP status and "", or None and the reason if there is no answer within `seconds`.
    """
    outcome: list[tuple[int | None, str]] = [(None, f"no answer in {seconds:g} s")]
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    def ask() -> None:
        try:
            from huggingface_hub.utils import get_session

            answer = get_session().head(url, headers=headers, timeout=seconds, follow_redirects=False)
            outcome[0] = (answer.status_code, "")
        except Exception as error:  # the HTTP library, and so the class, depends on huggingface_hub's version
            outcome[0] = (None, " ".join(hide_secrets(str(error)).split()) or type(error).__name__)

    # A thread, because looking up a host name has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0]


def endpoint() -> str:
    """Returns the URL of the hub; a name for messages if huggingface_hub is not installed."""
    return str(settings().ENDPOINT) if settings() else "the Hugging Face hub"


def ask_hub_once() -> None:
    """Sets HF_HUB_OFFLINE if the hub does not answer a request within 3 seconds, also in libraries already loaded.

    Otherwise Hugging Face's libraries try six times per file: 24 s if connections are refused, 66 s without an answer.
    Child processes inherit the result. A call after five minutes tries the hub again, and unsets the variable if it
    answers. Sends no request if the user has set HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE, even to 0. Prints a note on
    stderr if the hub does not answer.
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
        advice = "only its cache on this machine is used (HF_HUB_OFFLINE=0 tries longer)"
        print(f"{endpoint()}: {problem}; {advice}", file=sys.stderr, flush=True)


def _set_offline(offline: bool) -> None:
    """Sets HF_HUB_OFFLINE to 1 or removes it, also in the loaded modules that have read it."""
    os.environ.pop("HF_HUB_OFFLINE", None)
    if offline:
        os.environ.update(HF_HUB_OFFLINE="1")
    for name in ("huggingface_hub.constants", "datasets.config"):  # they read the variable at import
        if module := sys.modules.get(name):
            module.HF_HUB_OFFLINE = offline  # type: ignore[attr-defined]  # a module looked up by name
