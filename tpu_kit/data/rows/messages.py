"""Reads the turns of a chat, in the forms of many data sets, as messages of chat templates.

A message has a role, a content (text) unless it calls tools, optionally `reasoning_content`, `tool_calls`, `images`
(see `picture_of`), and `train: false` if it is a reply without loss. Places in errors (`name`) are such as "message 0".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tpu_kit.config.loader import DataConfig
from tpu_kit.data.rows.columns import (
    MESSAGE_KEYS,
    TABLES,
    Layout,
    in_message,
    is_wanted,
    reasoning_of,
    role_of,
    with_own_tags,
)
from tpu_kit.data.rows.field_values import RowError, is_empty, is_filled, json_of, parsed, switch, text_of, without_none

_KEYS: Mapping[str, list[str]] = TABLES["message_keys"]
_SWITCHES, _DETAILS, _REASONING = _KEYS["switches"], _KEYS["details"], (*MESSAGE_KEYS, *_KEYS["reasoning"])
_WANTED = re.compile("{names}|{reversed}|{ratings}".format(**TABLES["switches"]))
_REFUSED = re.compile(_KEYS["refused"][0])
_THOUGHT, _TEXTS = (
    ("thinking", "reasoning", "redacted_thinking"),
    ("text", "thinking", "reasoning", "summary", "content"),
)
_FLAGS, _NONE, _SETTINGS = (frozenset(TABLES["flags"][key]) for key in ("words", "none", "settings"))
_ROLES = ("system", "user", "assistant", "tool")
_ARGUMENTS = ("arguments", "args", "kwargs", "input", "parameters")
_CALL = (
    "name",
    "id",
    "type",
    "index",
    "function",
    "description",
    "call_id",
    "tool_call_id",
    "status",
    "strict",
    "extra_content",
)
_PLACE = re.compile(
    r"\A\s*(?:<image>|<(?:video|audio)>\s*(?:\n|\Z))|\n\s*<(?:image|video|audio)>\s*\Z|<\|(?:image|audio)_\d+\|>"
)


IMAGE = "\ufdd0"
"""Marks the place of an image in the text of a message: a code point that no text contains."""
IMAGE_TAG = "<image>"
IMAGE_PARTS = ("image", "image_url", "input_image")
_IMAGE_KEYS = ("image", "image_url", "path", "url", "base64", "bytes")


def learns(message: Mapping[str, Any]) -> bool:
    """Whether a message of `read_messages` is a reply that carries loss."""
    return message["role"] == "assistant" and message.get("train") is not False


def read_messages(
    value: Any, column: str, first: int, system: str | None, config: DataConfig, layout: Layout
) -> list[dict[str, Any]]:
    """Reads a list of messages, or its JSON text, as new messages; replies before any other turn get `train: false`.

    Args:
        value: the cell.
        column: name of its column.
        first: index in `value` of the first message after the prompt. Replies before it are not marked; an empty reply
            with loss from there on is an error.
        system: text of a system turn, added as the first message if there is none; None or empty: none is added.
        config: the data section; its reasoning tags replace other models' tags.
        layout: layout of the rows; has the keys to leave out, and whether messages may have images.

    Returns:
        Messages with "role" and, as far as they have them, "content", "tool_calls", a key of `MESSAGE_KEYS`, "images"
        (None for an image of a column), "train" (always False) and unknown keys.

    Raises:
        RowError: there is no list of messages; `system` of a column and a system turn differ; or no reply from `first`
            on carries loss. A message has no role or content, is marked as unwanted, or has keys, parts or calls that
            the kit cannot train on.
    """
    value = parsed(value, column)
    if not isinstance(value, list) or not value or not all(isinstance(message, Mapping) for message in value):
        raise RowError(f"column {column!r} must be a list of messages, got {str(value)[:60]!r}")
    messages: list[dict[str, Any]] = []
    for i, turn in enumerate(value):
        keys = {key for key in turn if f"{column}.{key}" in layout.left_out}
        kept = {key: item for key, item in turn.items() if key not in keys}
        name = f"message {i} of column {column!r}"
        messages.append(_message(without_none(kept, layout.filled), name, config, layout.images))
    for i, message in enumerate(messages):
        said = message.get("content") or message.get("tool_calls") or in_message(message, config)
        name = f"message {i} of column {column!r}"
        if i >= first and learns(message) and not (said.strip() if isinstance(said, str) else said):
            raise RowError(f"{name}, the completion, is empty")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
        first += 1
    elif system and layout.columns.get("system") and messages[0]["content"].strip() != system.strip():
        name = layout.columns["system"]
        raise RowError(
            f"column {name!r} and the system turn in column {column!r} differ; set data.columns={{{name}: ''}} to use "
            "the turn, or join the two"
        )
    _skip_greeting(messages)
    if not any(map(learns, messages[first:])):
        roles = ", ".join(sorted({message["role"] for message in messages}))
        text = f"column {column!r} has no assistant turn that carries loss, so there is nothing to learn"
        raise RowError(f"{text}; its turns are from {roles}")
    return messages


def _skip_greeting(messages: list[dict[str, Any]]) -> None:
    """Sets `train: false` in replies at the start of a chat, because no turn asks for them."""
    for message in messages:
        if message["role"] != "assistant":
            break
        message["train"] = False


def _message(turn: Mapping[str, Any], name: str, config: DataConfig, has_images: bool = False) -> dict[str, Any]:
    """Returns a turn of any known form as a new message; raises RowError, with `name`, if it cannot be read.

    If `has_images`, its pictures go to the key "images", and `IMAGE` marks their places; if not, they are refused.
    """
    message, images = dict(turn), list[Any]() if has_images else None
    if "from" in message and "role" not in message:  # ShareGPT
        message["role"] = message.pop("from")
        if "value" in message:
            message["content"] = message.pop("value")
    if not isinstance(message.get("role"), str) or not message["role"].strip():
        raise RowError(f"{name} has no role")
    message["role"] = role_of(message)
    for key in [key for key in message if _REFUSED.search(str(key)) and key not in (*_SWITCHES, *_DETAILS)]:
        if is_filled(message.pop(key)):
            moved = " (tools are a column of their own)" if key in ("tools", "functions") else ""
            raise RowError(
                f"{name} has {key!r}: {str(turn[key])[:40]!r}, which cannot be trained on{moved}; delete it, or set "
                f"data.columns={{{_column(name)}.{key}: ''}} to leave it out"
            )
    _read_switches(message, name)
    _check_wanted(message, name)
    _read_calls(message, name)
    content = message.pop("content", None)
    thoughts = _thoughts_of_keys(message, name)
    if is_parts(content := _as_parts(content)):
        content, thought = _read_parts(content, name, images)
        thoughts |= {"content": thought} if thought else {}
    elif images is not None and isinstance(content, str):
        content = _with_places(content, images)
    if message["role"] == "tool" and isinstance(content, Mapping | list):  # {} and [] are valid results
        message["content"] = json_of(content, name)
    elif isinstance(content, str) or not is_empty(content):
        message["content"] = content if isinstance(content, str) else text_of(content, name)
    elif thoughts:
        message["content"] = ""
    elif not message.get("tool_calls"):
        raise RowError(f"{name}, from {message['role']}, has no content")
    if isinstance(message.get("content"), str) and message["role"] in ("assistant", "system"):
        message["content"] = with_own_tags(message["content"], config, is_reply=message["role"] == "assistant")
    if images is None and message["role"] == "user" and _PLACE.search(message.get("content", "")):
        raise RowError(f"{name} has the place of an image: model.images=true trains on images")
    if images:
        message["images"] = images  # `schemas.conversation` removes them
    return _with_thoughts(message, thoughts, name, config)


def _check_wanted(message: Mapping[str, Any], name: str) -> None:
    """Raises RowError if a key marks a message as unwanted or as reasoning, or has the content under another name."""

    def advice(key: str) -> str:
        return f"data.columns={{{_column(name)}.{key}: ''}} to leave that key out"

    for key, value in message.items():
        if (
            message.get("train") is not False
            and _WANTED.fullmatch(str(key).lower())
            and is_wanted(str(key), value) is False
        ):
            raise RowError(
                f"{name} has {key}={str(value).lower()}, so it is not wanted; delete it, give the reply train: false, "
                f"or set {advice(key)}"
            )
        if key == "channel" and value == "analysis":
            raise RowError(
                f"{name} is reasoning, by its channel; put it into the next reply as reasoning_content, or set "
                f"{advice(key)} to train it as a reply"
            )
    if not is_filled(message.get("content")) and not is_filled(message.get("tool_calls")):
        for key in _KEYS["contents"]:
            if is_filled(message.get(key)):
                raise RowError(f"{name} has no content, but {key}; rename it content, or set {advice(key)}")


def _column(name: str) -> str:
    """Returns the name of the column at the end of a place in an error, such as "message 0 of column 'chat'"."""
    return name.rpartition("column ")[2].strip("'")


# -------------------------------------------------------------------------------------------------- switches of loss


def _read_switches(message: dict[str, Any], name: str) -> None:
    """Replaces keys of `message` that switch its loss on or off by `train: false` if it is off, else by no key.

    Raises RowError if a switch is neither true nor false, if switches differ, or if `train` is on but not in a reply.
    """
    found: dict[str, bool] = {}
    for key in _SWITCHES:
        if key not in message:
            continue
        value = message.pop(key)
        on = switch(value)
        if on is None:
            advice = "it must be true or false (0 or 1)"
            raise RowError(f"{name} has the {key} {value!r}; {advice}")
        found[key] = on != (key == "masked")
    for key in _DETAILS:
        if is_filled(details := message.pop(key, None)):
            found[key] = _of_whole_text(details, key, message.get("content"), name)
    if len(set(found.values())) > 1:
        raise RowError(f"{name} has switches of its loss that differ: {', '.join(found)}; keep one of them")
    if False in found.values():
        message["train"] = False
    elif message["role"] != "assistant" and any(on and key.startswith("train") for key, on in found.items()):
        raise RowError(f"{name}, from {message['role']}, is marked to be learned; only replies carry loss")


def _of_whole_text(details: Any, key: str, content: Any, name: str) -> bool:
    """Returns the switch of character ranges `details`; RowError if they differ or do not cover the text `content`."""
    refused = RowError(
        f"{name} has {key}, loss on parts of a text, which is not supported; split the turn, or delete it"
    )
    if not isinstance(details, list) or not isinstance(content, str):
        raise refused
    try:
        ranges = sorted((int(part["begin_offset"]), int(part["end_offset"])) for part in details)
        switches = {switch(part["train"]) for part in details}
    except (KeyError, TypeError, ValueError):
        raise refused from None
    end = 0
    for start, stop in ranges:
        if start > end:
            raise refused
        end = max(end, stop + 1)
    if len(switches) > 1 or None in switches or end < len(content):
        raise refused
    return True in switches


# --------------------------------------------------------------------------------------------- contents and reasoning


def is_parts(content: Any) -> bool:
    """Whether a content is a list with at least one typed part, as in chats with images."""
    types = TABLES["parts"]["types"]
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type") in types for part in content
    )


def _as_parts(content: Any) -> Any:
    """Converts text parts in other APIs' forms, such as Bedrock's, to typed parts; returns other contents unchanged."""
    if isinstance(content, Mapping) and content.get("content_type") == "text":
        content = content.get("parts")
        texts = content if isinstance(content, list) else [content]
    elif isinstance(content, list) and content and all(isinstance(x, Mapping) and [*x] == ["text"] for x in content):
        texts = [part["text"] for part in content]
    else:
        return [content] if is_parts([content]) else content
    return [{"type": "text", "text": text} for text in texts]


def becomes_json(content: Any) -> bool:
    """Whether a content of a message is an object or a list that is trained as JSON."""
    return isinstance(content, Mapping | list) and not is_empty(content) and not is_parts(_as_parts(content))


def content_text(value: Any, place: str) -> str:
    """Returns the joined text of a list of text parts, or another content by `text_of`; `place` is for errors.

    Raises RowError as `text_of`, for a whole message (an object with a role and a content), and for parts of other
    types, such as images and reasoning.
    """
    if isinstance(value, Mapping) and role_of(value) in _ROLES and "content" in value:
        column = _column(place)
        raise RowError(
            f"{place} holds a message, not text; write only its text, or name it, as in data.columns={{{column}: "
            f"{column}.content}}, with the role of the column"
        )
    if not is_parts(value):
        return text_of(value, place)
    text, thought = _read_parts(value, place)
    if thought:
        raise RowError(f"{place} has a part of type thinking; only messages have reasoning")
    return text_of(text, place)


def _with_places(text: str, images: list[Any]) -> str:
    """Returns a text with `IMAGE` for its image tags; appends None per tag to `images`: its picture is in a column."""
    images += [None] * text.count(IMAGE_TAG)
    return text.replace(IMAGE_TAG, IMAGE)


def picture_of(part: Mapping[str, Any]) -> Any:
    """Returns a picture in a part of a type in `IMAGE_PARTS`, base64 as a data URL; None if a column has it."""
    key = next((key for key in _IMAGE_KEYS if is_filled(part.get(key))), None)
    bare = key == "base64" and not str(part["base64"]).startswith("data:")
    return None if key is None else f"data:;base64,{part[key]}" if bare else part[key]


def _read_parts(parts: list[Any], name: str, images: list[Any] | None = None) -> tuple[str, str]:
    """Returns text (joined) and reasoning (joined by line breaks) of parts; raises RowError for parts of other types.

    Appends the pictures, by `picture_of`, to `images`, and marks their places by `IMAGE`; None: pictures are refused.
    """
    texts, thoughts = [], []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind in _THOUGHT and (thought := _thought(part, name, "delete the part")):
            thoughts.append(thought)
        elif kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"] if images is None else _with_places(part["text"], images))
        elif kind in IMAGE_PARTS and images is not None:
            texts.append(IMAGE)
            images.append(picture_of(part))
        else:
            only = "only text can be trained on" if images is None else "only text and images can be trained on"
            only += ": images with model.images=true" * (images is None and kind in IMAGE_PARTS)
            raise RowError(f"{name} has a part of type {kind}; {only}")
    return "".join(texts), "\n".join(thoughts)


def _thoughts_of_keys(message: dict[str, Any], name: str) -> dict[str, str]:
    """Removes the keys with reasoning from a message; returns the reasoning that is not empty by key."""
    found = {}
    for key in _REASONING:
        if is_filled(value := message.pop(key, None)):
            advice = f"set data.columns={{{_column(name)}.{key}: ''}} to leave it out"
            found[key] = _thought(value, f"{name}, {key},", advice)
    return {key: thought for key, thought in found.items() if thought}


def _thought(value: Any, name: str, advice: str) -> str:
    """Converts reasoning to text, from text, a list of texts, or objects with a text; empty for a word such as N/A.

    `name` begins the text of an error, and `advice` ends it.

    Raises:
        RowError: the value has another form (encrypted, a setting, a flag such as "true"), or texts that differ.
    """
    try:
        texts = _texts(value)
    except RowError as error:
        raise RowError(f"{name} holds {error}: {str(value)[:60]}; {advice}") from error
    words = {text.strip().lower() for text in texts}
    if not words <= _NONE and words <= _FLAGS:
        raise RowError(f"{name} holds {', '.join(map(repr, sorted(words)))}, a flag, not reasoning; {advice}")
    return "" if words <= _NONE else "\n".join(texts)


def _texts(value: Any) -> list[str]:
    """Returns the texts of a reasoning; raises RowError for a setting, texts that differ, or a value without text."""
    if isinstance(value, bool):
        return [str(value).lower()]
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping) and any(is_filled(value.get(key)) for key in _SETTINGS):
        raise RowError("a setting, not reasoning")
    if isinstance(value, Mapping):
        found = {key: _texts(value[key]) for key in _TEXTS if is_filled(value.get(key))}
        if len({" ".join(" ".join(texts).split()) for texts in found.values()}) > 1:
            raise RowError(f"reasonings that differ in {', '.join(found)}")
        if found:
            return next(iter(found.values()))
    if isinstance(value, list) and value:
        return [text for part in value if is_filled(part) for text in _texts(part)]
    raise RowError("reasoning that is not text")


def thought_of_column(value: Any, column: str) -> str:
    """Returns the reasoning of a cell as text; "" for an empty cell, or a word such as N/A.

    A cell is a text, a number, a list of texts, which line breaks join, or an object with a text. Raises RowError for
    other values, a flag such as "true" or "on", a setting, and texts of an object that differ.
    """
    if not is_filled(value):
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return text_of(value, f"column {column!r}")
    return _thought(value, f"column {column!r}", "empty such cells, or set data.columns={reasoning: ''}")


def _with_thoughts(message: dict[str, Any], thoughts: dict[str, str], name: str, config: DataConfig) -> dict[str, Any]:
    """Returns a message with its reasoning `thoughts`, by key, under one key of `MESSAGE_KEYS`; unchanged without any.

    Raises RowError if the reasonings, also in tags in its content, differ, or if the message is no reply.
    """
    if not thoughts:
        return message
    if message["role"] != "assistant":
        raise RowError(f"{name}, from {message['role']}, has {next(iter(thoughts))}; only replies have reasoning")
    tagged = reasoning_of(message.get("content", ""), config)
    texts = {" ".join(text.split()): text for text in [*thoughts.values(), *([tagged] if tagged else [])]}
    if len(texts) > 1:
        keys = ", ".join([*thoughts, *(["tags in its content"] if tagged else [])])
        raise RowError(f"{name} holds several reasonings that differ: {keys}; keep one of them")
    key = next((key for key in thoughts if key in MESSAGE_KEYS), "reasoning_content")
    return message | {key: next(iter(texts.values()))}


# ------------------------------------------------------------------------------------------------------- tool calls


def _read_calls(message: dict[str, Any], name: str) -> None:
    """Moves a message's calls, under any known key or role, to its `tool_calls`; raises RowError as `read_calls`.

    A message with a role for calls gets the role assistant and an empty content.
    """
    calls: list[Any] = []
    if is_filled(given := message.pop("tool_calls", None)):
        calls = read_calls(given, name)
    if is_filled(given := message.pop("function_call", None)):
        calls += read_calls(given, name)
    if message["role"] in ("function_call", "tool_call"):  # ShareGPT, ms-swift: the content has the calls
        calls = read_calls(message.get("content"), name)
        message |= {"role": "assistant", "content": ""}
    if calls:
        message["tool_calls"] = calls


def are_calls(value: Any) -> bool:
    """Whether a value is a tool call, a list of tool calls, or the JSON text of either."""
    calls = _decoded_list(value)
    return bool(calls) and all(_function_of(call) for call in calls)


def read_calls(value: Any, name: str) -> list[dict[str, Any]]:
    """Returns a list of {"type": "function", "function": {"name": ..., "arguments": {...}}}.

    `value` is a call, a list of calls, or the JSON text of either. Arguments may be JSON text, and have keys such as
    args or input; a call without arguments gets {}. Other keys, such as an id, are kept.

    Raises:
        RowError: a call has no function name, several keys or an unknown key of arguments, or arguments that are no
            JSON object; `name` tells where the calls are.
    """
    calls = []
    for call in _decoded_list(value):
        if not (function := _function_of(call)):
            raise RowError(f"{name} does not hold a function call as JSON: {str(value)[:60]!r}")
        about = {key: item for key, item in call.items() if key != "function"} if "function" in call else {}
        arguments = _arguments({**about, **function}, name)
        made = {key: item for key, item in function.items() if key not in _ARGUMENTS}
        about = {key: item for key, item in about.items() if key not in _ARGUMENTS}
        calls.append({"type": "function", **about, "function": {**made, "arguments": arguments}})
    return calls


def _function_of(call: Any) -> Mapping[str, Any] | None:
    """Returns the function of a call, with its name; None if the value is not a call."""
    function = _decoded(call.get("function", call)) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return function if isinstance(name, str) and name else None


def _arguments(call: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a call's arguments, an object or its JSON text under any known key; {} without arguments.

    Raises RowError for several such keys, for an unknown key in their place, and for no JSON object.
    """
    name = f"{name} calls {call['name']!r}"
    given = {key: call[key] for key in _ARGUMENTS if call.get(key) is not None}
    if len(given) > 1:
        raise RowError(f"{name} with {' and '.join(given)}; keep one of them, as arguments")
    unknown = {key: item for key, item in call.items() if key not in (*_ARGUMENTS, *_CALL) and is_filled(item)}
    if unknown and not any(key in call for key in _ARGUMENTS):
        raise RowError(f"{name} with {', '.join(unknown)}, but without the key arguments; add it, even if it is {{}}")
    arguments: Any = next(iter(given.values()), {})
    arguments = {} if arguments == "" else arguments  # OpenAI's form of no arguments
    while isinstance(arguments, str) and (inner := _decoded(arguments)) != arguments:  # some files encode them twice
        arguments = inner
    if not isinstance(arguments, Mapping):
        raise RowError(f"{name} with arguments that are not a JSON object: {str(arguments)[:60]!r}")
    json_of(arguments, f"{name} with arguments, which")  # refuses NaN
    return arguments


def read_tools(value: Any, column: str) -> list[dict[str, Any]] | None:
    """Returns tools as a list of {"type": "function", "function": {...}}; None if there are no tools.

    A function has its name and, if the tool has any, its parameters as JSON Schema; other keys are kept. `value` is a
    tool, a list of tools, or the JSON text of either.

    Raises:
        RowError: a tool has no name or holds a value that is not JSON, such as NaN; or the cell is text but not JSON.
    """
    value = without_none(parsed(value, column))
    if not is_filled(value):
        return None
    tools = []
    for tool in _decoded_list(value):
        function = _decoded(tool.get("function", tool)) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError(f"column {column!r} holds a tool without a name: {str(tool)[:60]!r}")
        function = {key: item for key, item in function.items() if key != "type" or function is not tool}
        if "parameters" not in function and "input_schema" in function:  # Anthropic's form
            function["parameters"] = function.pop("input_schema")
        parameters = _decoded(function.get("parameters"))
        # xLAM's data sets have the parameters directly, JSON Schema has them in "properties".
        listed = isinstance(parameters, Mapping) and parameters and "properties" not in parameters
        if listed and all(isinstance(about, Mapping) for about in parameters.values()):
            parameters = {"type": "object", "properties": dict(parameters)}
        function |= {"parameters": parameters} if parameters is not None else {}
        about = {key: item for key, item in tool.items() if key != "function"} if "function" in tool else {}
        tools.append({"type": "function", **about, "function": function})
        json_of(tools[-1], f"column {column!r}")  # refuses NaN
    return tools


def _decoded_list(value: Any) -> list[Any]:
    """Returns a list, or its JSON text, with its JSON texts decoded; another value as a list with only that value."""
    value = _decoded(value)
    return [_decoded(item) for item in value] if isinstance(value, list) else [value]


def _decoded(value: Any) -> Any:
    """Returns the value of a JSON text; texts that are not JSON, and other values, unchanged."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
