"""Reasoning within a text: the tags around it, and the closing words that state an answer after it."""

import re
from collections.abc import Mapping
from typing import Any

from tpu_kit.config import DataConfig

MESSAGE_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which the messages of a chat hold reasoning beside their content; the first that holds text counts."""

_TAGS = (("<think>", "</think>"), ("<|begin_of_thought|>", "<|end_of_thought|>"))
_ANSWER_TAGS = ("<|begin_of_solution|>", "<|end_of_solution|>")
_STATED = re.compile(r"\n[ \t]*The answer is:[ \t]*(\S.*?)\s*\Z", re.IGNORECASE)
_MARKED = re.compile(r"####[ \t]*(.*?)\s*\Z")  # on the last line: elsewhere it is a heading of Markdown


def reply(reasoning: str, answer: str, config: DataConfig) -> str:
    """Returns a reply: the reasoning in its tags, then the answer."""
    return f"{config.think_open}\n{reasoning}\n{config.think_close}\n{answer}"


def reasoning_of(text: str, config: DataConfig) -> str:
    """Returns the reasoning of a reply, without white space around it; empty if there is none."""
    before, closed, _ = text.partition(config.think_close)
    return before.lstrip().removeprefix(config.think_open).strip() if closed else ""


def answer_of(text: str, config: DataConfig) -> str:
    """Returns what a reply says after its reasoning."""
    return text.rpartition(config.think_close)[2]


def in_message(message: Mapping[str, Any], config: DataConfig) -> str:
    """Returns the reasoning of a message, from its own key or from the tags in its content; empty if there is none."""
    for key in MESSAGE_KEYS:
        if isinstance(message.get(key), str) and message[key].strip():
            return str(message[key]).strip()
    content = message.get("content")
    return reasoning_of(content, config) if isinstance(content, str) else ""


def with_own_tags(text: str, config: DataConfig) -> str:
    """Writes the tags that data sets use, such as `<|begin_of_thought|>`, as those of the configuration.

    A reply becomes `reply` of its reasoning and its answer. In another text, such as a system prompt that asks for the
    tags, each tag is replaced.
    """
    for opening, closing in _TAGS:
        if closing == config.think_close or (opening not in text and closing not in text):
            continue
        for tag in _ANSWER_TAGS:
            text = text.replace(tag, "")
        before, closed, after = text.partition(closing)
        if closed and before.lstrip().startswith(opening):
            return reply(before.lstrip().removeprefix(opening).strip(), after.strip(), config)
        text = text.replace(opening, config.think_open).replace(closing, config.think_close)
    return text


def split_solution(text: str, config: DataConfig, *, boxed: bool) -> tuple[str, str]:
    r"""Takes a text that holds both apart into reasoning and answer; the reasoning is empty if there is none.

    Recognised are the tags, a last line "The answer is: ..." (MetaMathQA), "####" on the last line (GSM8K) and, where
    `boxed`, the last \boxed{} (MATH), which stays in the reasoning too.

    Raises:
        ValueError: nothing follows the tags or the "####".
    """
    if config.think_close in text:
        answer = answer_of(text, config).strip()
        if not answer:
            raise ValueError(f"nothing after {config.think_close}")
        return reasoning_of(text, config), answer
    if stated := _STATED.search(text):
        return _MARKED.sub("", text[: stated.start()]).strip(), stated[1]
    if marked := _MARKED.search(text):
        if not marked[1]:
            raise ValueError("nothing after ####")
        return text[: marked.start()].strip(), marked[1]
    if boxed and (answer := last_boxed(text)):
        return text.strip(), answer
    return "", text


def last_boxed(text: str) -> str:
    r"""Returns what the last \boxed{} of a text holds, nested braces included; empty if there is none."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return ""
    start, depth = start + len(r"\boxed{"), 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip()
    return ""
