"""Prepares users' chats about pictures: reads the bytes of the pictures, and encodes chats as token ids."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpu_kit.config.loader import TrainConfig
from tpu_kit.data.chat.chat_encoding import Encoder
from tpu_kit.data.images.encoding import ImageEncoding
from tpu_kit.data.images.files import PictureFiles
from tpu_kit.data.images.processors import image_processor
from tpu_kit.data.images.prompts import png
from tpu_kit.data.rows.columns import Layout
from tpu_kit.data.rows.messages import IMAGE_PARTS, IMAGE_TAG, picture_of
from tpu_kit.model.weights.source import read_config


def seeing(config: TrainConfig) -> TrainConfig:
    """Returns a copy of the run with model.images=true; ValueError for a model without vision, or as `read_config`."""
    if getattr(read_config(config.model, needed=True), "vision_config", None) is None:
        raise ValueError(
            f"a prompt has a picture, and model.name={config.model.name} has no vision part: name a model that has, "
            "such as google/gemma-4-E2B-it, or an adapter of such a model that was trained with model.images=true"
        )
    return replace(config, model=replace(config.model, images=True))


def carried(prompt: Any, files: PictureFiles | None = None) -> Any:
    """Returns a copy of a chat in which every picture is the undecoded bytes of its file.

    Pictures may be as in `PictureFiles`, or PIL pictures, which become bytes of PNG files. A part of a message with a
    picture becomes {"type": its type, "bytes": ...}; other parts and texts stay.

    Args:
        prompt: a list of messages, or a mapping with "messages" and optionally "images", a picture or a list.
        files: opens the pictures; None: any file of this computer may be opened, relative to the working directory.

    Returns:
        A list of messages, or a mapping with the keys of `prompt` and a list "images", empty without pictures.

    Raises:
        RowError: as `PictureFiles.picture` and, for PIL pictures, `png`.
    """

    def read(source: Any) -> Any:
        if hasattr(source, "save"):
            return png(source)
        if isinstance(source, Mapping):  # from `datasets`, or an address in OpenAI's format
            source = next((source[name] for name in ("bytes", "path", "url") if source.get(name)), None)
        if files is None and isinstance(source, str) and "://" not in source and not source.startswith("data:"):
            source = os.path.abspath(os.path.expanduser(source))
        opened = files or PictureFiles(os.sep)
        opened.picture(source)
        return opened.read(source)

    def part(given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("type") not in IMAGE_PARTS:
            return given
        picture = picture_of(given)
        return given if picture is None else {"type": given["type"], "bytes": read(picture)}

    def message(given: Mapping[str, Any]) -> dict[str, Any]:
        content = given.get("content")
        return {**given, "content": list(map(part, content)) if isinstance(content, list) else content}

    if not isinstance(prompt, Mapping):
        return list(map(message, prompt))
    images = prompt.get("images") or []
    images = images if isinstance(images, list | tuple) else [images]
    return {**prompt, "messages": list(map(message, prompt["messages"])), "images": list(map(read, images))}


def _check_places(number: int, asked: Mapping[str, Any]) -> None:
    """Raises ValueError if prompt `number` marks places for pictures, and its "images" are not as many."""
    contents = [message.get("content") for message in asked["messages"]]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [{"text": content}])]
    told = [part for part in parts if isinstance(part, Mapping)]
    places = sum(str(part.get("text") or "").count(IMAGE_TAG) for part in told)
    places += sum(part.get("type") in IMAGE_PARTS and picture_of(part) is None for part in told)
    if places and places != (given := len(asked.get("images") or ())):
        raise ValueError(
            f"prompt {number}: places for pictures ({IMAGE_TAG}): {places}; pictures: {given}; give image=FILE for "
            f"each place (in Python, images=[...]), or leave {IMAGE_TAG} out"
        )


def encode(config: TrainConfig, tokenizer: Any, prompts: Sequence[Any]) -> list[Any]:
    """Returns the prompts in order: chats as token ids up to the start of a reply; with pictures, as `PicturedIds`.

    Places of pictures are `<image>` in a text, and parts for a picture without a picture. The "images" of a mapping
    fill them in order. If no message has a place or a picture, "images" stand before the first user turn's text.

    Args:
        config: a run with `model.images`.
        tokenizer: tokenizer of the model or of its adapter.
        prompts: texts, chats from `carried` (mappings may have "tools"), or token ids; only chats are changed.

    Raises:
        ValueError: as `image_processor`; or with a prompt's number, from 0: "images" and places are not as many, a
            picture cannot be used or takes too many tokens, or the chat template refuses the chat.
    """
    processor = image_processor(config.model, tokenizer, config.data)
    columns = {"prompt": "messages", "images": "images", "tools": "tools"}
    layout = Layout("prompt", columns, (), chats=frozenset({"messages"}), images=True)
    encoder = Encoder(tokenizer, config.data, layout, images=ImageEncoding(processor, PictureFiles("")))
    made = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not prompt or isinstance(next(iter(prompt)), int):
            made.append(prompt)
            continue
        row = prompt if isinstance(prompt, Mapping) else {"messages": prompt}
        _check_places(number, row)
        try:
            talk = encoder.conversation({"messages": None, "images": None, "tools": None} | {**row})
            made.append(encoder.prompt_ids(talk))
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from error
    return made
