"""Options of the commands that answer prompts; the import loads no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_kit.config.fields import knob, show
from tpu_kit.machine.storage.run_config import AUTO

if TYPE_CHECKING:
    from tpu_kit.generation.prompts import Prompt


@dataclass
class AnsweringModel:
    """Options that select the model and how it is asked."""

    adapter: str | None = knob(
        AUTO,
        "A run, its config.yaml, its adapter or a checkpoint, also in gs://; auto = the adapter of the run given as "
        "configuration, null = the base model.",
    )
    chat: bool | None = knob(
        None,
        "Render prompts with the chat template; false = use them as plain text; null = as the model was trained (an "
        "adapter trained on plain text has no chat template).",
    )


@dataclass
class JudgedModel(AnsweringModel):
    """Options of `evaluate`: the model or the server whose answers are judged."""

    server: str | None = knob(
        None, "URL of a server with OpenAI's API, such as http://localhost:8000 of vLLM; its answers are judged "
        "instead of a local model's. The environment variable OPENAI_API_KEY is its key.",
    )  # fmt: skip
    served_model: str | None = knob(None, "The model's name there; null = the name with which `export` serves the run.")

    def __post_init__(self) -> None:
        if self.server is None and self.served_model:
            raise ValueError(f"served_model={self.served_model}: it has no effect without server=http://...")
        if self.server is not None and not self.server.startswith(("http://", "https://")):
            raise ValueError(f"server={self.server}: give a URL, such as http://localhost:8000")


@dataclass
class Prompts(AnsweringModel):
    """Options of `generate`: the prompts, their pictures and the number of samples; `asked` has the prompts to ask."""

    prompt: tuple[str, ...] = knob((), "The question; may be given several times.")
    image: tuple[str, ...] = knob((), "A picture for every prompt, a file or gs://; may be given several times.")
    prompts: str | None = knob(
        None, "A file with a prompt per line; in .jsonl, a line has a prompt, or messages and tools, and images."
    )
    n: int = knob(1, "Samples per prompt.", at_least=1)
    rows: int = knob(8, "Maximum number of rows in a batch of one replica.", at_least=1)
    truncate: bool = knob(False, "Cut off the beginning of a prompt that is too long.")

    def __post_init__(self) -> None:
        prompts = [*self.prompt, *(read_prompts(self.prompts) if self.prompts else [])]
        chats = [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in prompts]
        self.asked = prompts if self.chat is False else chats
        if self.image:
            self.asked = [about(each, list(self.image)) for each in chats]
        if self.image and not prompts:
            raise ValueError('image: nothing is asked about it; give prompt="..." or prompts=FILE')
        if not prompts and not sys.stdin.isatty():
            raise ValueError('prompt: there is none; give prompt="..." or prompts=FILE')


def read_prompts(file: str) -> list[Prompt]:
    """Reads a file of prompts: a text per line, or in a file named *.jsonl, a JSON text or object per line.

    An object has "prompt", a text or a list of messages, or "messages" and perhaps "tools". Texts stay texts, messages
    are a list, and messages with tools are a mapping. An object may have "images" or an "image": paths below the file's
    folder, data URLs, or bucket addresses. Its prompt is then a chat with the pictures' bytes. Blank lines are skipped.

    Raises:
        ValueError: the file or a picture cannot be read; or a line has no prompt, "system", "tools" without messages,
            or a chat that ends with a reply and so has no question. The text names the line.
    """
    try:
        lines = Path(file).read_text("utf-8-sig").split("\n")  # str.splitlines would split at U+2028 within a text
    except (OSError, ValueError) as error:
        raise ValueError(f"prompts={file} cannot be read ({error}); give a text file, or JSON lines") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    return [_prompt(f"prompts={file}: line {number}", line, file) if file.endswith(".jsonl") else line
            for number, line in numbered]  # fmt: skip


def _prompt(place: str, line: str, file: str) -> Prompt:
    """Returns the prompt of a JSON line, with the bytes of its pictures, which are below the folder of `file`.

    Raises ValueError, whose text begins with `place`, if the line is no prompt or a picture cannot be read.
    """
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    row = row if isinstance(row, dict) else {"prompt": row}
    prompt, tools = row.get("messages") or row.get("prompt"), row.get("tools")
    chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if not prompt or not (chat or isinstance(prompt, str)):
        raise ValueError(f'{place}: {show(line)} is not a prompt; write {{"prompt": "..."}} or {{"messages": [...]}}')
    if row.get("system") or (tools and not chat):
        raise ValueError(
            f'{place}: "system", or "tools" without messages, is not read; write {{"messages": [{{"role": "system", '
            '"content": "..."}, ...], "tools": [...]}'
        )
    if chat and prompt[-1].get("role") == "assistant" and (len(prompt) == 1 or not prompt[-1].get("content")):
        raise ValueError(f"{place}: the chat ends with a reply, so there is no question; remove its last message")
    made = {"messages": prompt, "tools": tools} if tools else prompt
    from tpu_kit.generation.prompts import has_pictures

    try:
        if images := row.get("images") or row.get("image"):
            made = made if chat else [{"role": "user", "content": made}]
            made = about(made, images if isinstance(images, list) else [images])
        if not has_pictures(made):
            return made
        from tpu_kit.data.images.chats import carried
        from tpu_kit.data.images.files import PictureFiles

        return carried(made, PictureFiles.beside(file))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def about(prompt: Prompt, images: Sequence[Any]) -> Prompt:
    """Returns a chat as a new mapping, {"messages": ..., "images": `images`}, with the other keys of a given mapping.

    Args:
        prompt: the messages of a chat, or a mapping with "messages"; not a text. Its parts may mark places of pictures.
        images: the pictures of the chat.

    Raises:
        ValueError: the chat already has pictures of its own.
    """
    from tpu_kit.generation.prompts import image_parts

    whole: Any = prompt if isinstance(prompt, Mapping) else {"messages": prompt}
    named = [part for part in image_parts(whole["messages"]) if any(part[key] for key in part if key != "type")]
    if whole.get("images") or named:
        raise ValueError("image: a prompt already has its own pictures; leave image out")
    return {**whole, "images": images}
