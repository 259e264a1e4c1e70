"""Asks a server with an OpenAI-compatible interface, such as vLLM, for answers to held-out rows, and judges them."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tpu_kit.config.fields import hide_secrets
from tpu_kit.config.loader import TrainConfig
from tpu_kit.config.schema import DataConfig
from tpu_kit.data.prepare import Prepared
from tpu_kit.distributed.progress import open_bar
from tpu_kit.generation.evaluation.comparison import Evaluation
from tpu_kit.generation.evaluation.held_out_answers import Reply, judged_answers
from tpu_kit.generation.evaluation.verifiers import verifier_named
from tpu_kit.generation.prompts import opened

KEY = "OPENAI_API_KEY"
"""The environment variable with the server's API key, if it needs a key."""
_AT_ONCE = 16  # concurrent requests, which the server batches
_SECONDS = 600.0  # timeout of an answer, while the server works on others
_TRIES = 3  # of a request, if the server is busy or the connection breaks


class Server(NamedTuple):
    """A server and a model that it serves.

    Attributes:
        address: such as http://localhost:8000, with or without /v1.
        model: the model's name on the server.
    """

    address: str
    model: str

    @property
    def root(self) -> str:
        """The base URL of its interface, ending in /v1."""
        return self.address.rstrip("/").removesuffix("/v1") + "/v1"


def evaluate_server(config: TrainConfig, prepared: Prepared, server: Server, plain: bool = False) -> Evaluation:
    """Judges a server's greedy answers to the held-out rows; the result has no perplexity.

    Chats use the server's chat template. Plain text is sent as token ids, which the server continues. The API key, if
    any, is read from the environment variable `KEY`.

    Args:
        config: the run; `tracking.generate_rows` limits the rows (0: all), `tracking.generate_tokens` the length of an
            answer, and `tracking.verifier` names the judge.
        prepared: the data.
        server: the server and the name of its model.
        plain: whether chats are also sent as token ids, with the run's own template.

    Raises:
        ValueError: there are no held-out rows; model.images is set; the verifier does not exist; or the server cannot
            be reached, needs a key, has no such model, or refuses a row.
    """
    if not prepared.eval_rows:
        raise ValueError(
            "there are no rows to evaluate on; hold out rows with data.eval_rows, or give data.eval_source"
        )
    if config.model.images:
        raise ValueError(f"server={server.address}: rows with pictures are not supported; evaluate the model itself")
    rule, count = verifier_named(config.tracking.verifier), config.tracking.generate_rows or None
    _check_model(server)
    rows, replies = range(len(prepared.eval_rows[:count])), list[Reply]()
    with ThreadPoolExecutor(_AT_ONCE) as pool, open_bar(server.model, len(rows), unit="answer") as bar:
        try:
            for reply in pool.map(lambda row: _answer(server, config, prepared, row, plain), rows):
                replies.append(reply)
                bar.update()
        except ValueError:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return judged_answers(config, prepared, replies, rule)


def _check_model(server: Server) -> None:
    """Raises ValueError if the server does not list the model, or as `_request`."""
    listed = _request(server, "models")
    names = [str(model.get("id")) for model in listed.get("data") or [] if isinstance(model, Mapping)]
    if server.model not in names:
        raise ValueError(
            f"server={server.address} serves {', '.join(names) or 'no model'}, not {server.model}: give "
            "served_model=NAME, or start it with the command that `export` prints"
        )


def _answer(server: Server, config: TrainConfig, prepared: Prepared, row: int, plain: bool) -> Reply:
    """Returns the answer to the held-out row with this index; `plain` sends its prompt as token ids."""
    asked = prepared.eval_asked[row]
    request = {"model": server.model, "temperature": 0, "max_tokens": config.tracking.generate_tokens}
    if plain or isinstance(asked, str):
        request["prompt"] = prepared.eval_prompt_ids[row]
        made = _request(server, "completions", request)
        choice = _choice(server, made)
        text = str(choice.get("text") or "")
    else:
        chat = asked if isinstance(asked, Mapping) else {"messages": asked}
        made = _request(server, "chat/completions", request | _chat(chat))
        choice = _choice(server, made)
        text = _text(choice.get("message") or {}, config.data, prepared.eval_prompts[row])
    tokens = int((made.get("usage") or {}).get("completion_tokens") or 0)
    return Reply(text, tokens, choice.get("finish_reason") == "length")


def _chat(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the request's fields for a chat with its messages; vLLM continues a last message of the assistant."""
    begun = {"add_generation_prompt": False, "continue_final_message": True}  # vLLM continues the message with these
    more = begun if chat["messages"][-1].get("role") == "assistant" else {}
    return {name: value for name, value in chat.items() if value} | more


def _choice(server: Server, made: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the first choice of a response; raises ValueError if it has none."""
    choices = made.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], Mapping)):
        raise ValueError(f"server={server.address} gave no answer: {str(made)[:200]}")
    found: Mapping[str, Any] = choices[0]
    return found


def _text(message: Mapping[str, Any], data: DataConfig, prompt: str) -> str:
    """Joins the reasoning, which a server may return separately, and the answer in a response's `message`.

    The markers of `data` enclose the reasoning; the opening marker is left out if `prompt` already has it.
    """
    content = str(message.get("content") or "")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not reasoning:
        return content
    begin = "" if opened(prompt, data) else f"{data.think_open}\n"
    return f"{begin}{reasoning}\n{data.think_close}\n{content}"


def _request(server: Server, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the JSON object of the server's response to a GET or, with a `body`, a POST of `path` below `/v1`.

    Tries `_TRIES` times if the server has an error or, in a POST, the connection breaks.

    Raises:
        ValueError: the server cannot be reached, refuses the request, or returns no JSON object.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request, text = urllib.request.Request(f"{server.root}/{path}", data, headers), ""
    for left in reversed(range(_TRIES)):
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as response:
                text = response.read().decode(errors="replace")
            break
        except urllib.error.HTTPError as error:
            if error.code >= 500 and left:
                continue
            if error.code == 401:
                raise ValueError(f"server={server.address} needs a key: set {KEY} in the environment") from None
            said = _brief(error.read().decode(errors="replace"))
            raise ValueError(f"server={server.address} refuses {path} (status {error.code}): {said}") from None
        except OSError as error:
            if body is not None and left:
                continue
            raise ValueError(
                f"server={server.address} cannot be reached ({getattr(error, 'reason', error)}): start one with the "
                "command that `export` prints"
            ) from None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"server={server.address} is not OpenAI-compatible: {path} returned {_brief(text)!r}")
    return found


def _brief(text: str) -> str:
    """Returns the first 300 characters on one line, with secrets hidden."""
    return hide_secrets(" ".join(text.split())[:300])
