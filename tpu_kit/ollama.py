"""An Ollama Modelfile: the chat template in Go's language, the stop tokens, the system prompt.

Chat templates are programs in Jinja and Ollama's are in Go, so a template is not translated but taken apart: a chat of
marked messages is rendered, and what stands around the marks becomes the Go template. That one is then tried on other
chats; where it would not give the same text it is left out, and Ollama chooses by the template in the GGUF file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Turns:
    """A chat template as what stands around the messages.

    Attributes:
        around: role -> the texts before and after a message.
        opening: what the assistant's answer goes on from.
        implied: what a chat without a system message begins with.
    """

    around: Mapping[str, tuple[str, str]]
    opening: str
    implied: str

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a chat, up to where the assistant answers."""
        text = "" if messages[0]["role"] == "system" else self.implied
        for message in messages:
            before, after = self.around[message["role"]]
            text += before + message["content"] + after
        return text + self.opening

    def go(self) -> str:
        """The same in Go's template language, as Ollama reads it."""
        parts = []
        if self.implied:
            parts.append(f'{{{{ if ne (index .Messages 0).Role "system" }}}}{_literal(self.implied)}{{{{ end }}}}')
        parts.append("{{ range .Messages }}")
        word = "if"
        for role, (before, after) in self.around.items():
            parts.append(f'{{{{ {word} eq .Role "{role}" }}}}{_literal(before)}{{{{ .Content }}}}{_literal(after)}')
            word = "else if"
        return "".join([*parts, "{{ end }}{{ end }}", _literal(self.opening)])


def _literal(text: str) -> str:
    return f"{{{{ {json.dumps(text)} }}}}" if "{{" in text or "}}" in text else text


def take_apart(tokenizer: Any) -> Turns | None:
    """The tokenizer's chat template as `Turns`; None if it has none, or does more than put texts around messages.

    A beginning-of-text token that the tokenizer puts before every text is left out: so does llama.cpp.
    """
    if not tokenizer.chat_template:
        return None
    bos = tokenizer.bos_token if tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id] else ""

    def render(roles: Sequence[str], opening: bool = True) -> str:
        text: str = tokenizer.apply_chat_template(_chat(roles), tokenize=False, add_generation_prompt=opening)
        return text.removeprefix(bos)

    try:
        roles = (*_ROLES, "user")
        marks = [message["content"] for message in _chat(roles)]
        first, second, third, fourth, last = re.split("|".join(map(re.escape, marks)), render(roles))
        # Between two marks stand one message's end and the next one's beginning: a chat that ends there shows the cut.
        end = render(roles, opening=False).rpartition(marks[-1])[2]
        ends = [end if text.startswith(end) else "" for text in (second, third, fourth)]
        begins = [first, second[len(ends[0]) :], third[len(ends[1]) :]]
        around = dict(zip(_ROLES, zip(begins, ends, strict=True), strict=True))
        bare = Turns(around, last.removeprefix(end), "")
        found = Turns(around, bare.opening, render(("user",)).removesuffix(bare.render(_chat(("user",)))))
        tried = (("user",), ("system", "user"), ("user", "assistant", "user"), (*roles, "assistant", "user"))
        same = all(render(chat) == found.render(_chat(chat)) for chat in tried)
    except Exception:  # a template may raise anything, of a system message for instance
        return None
    return found if same and '"""' not in found.go() else None


def _chat(roles: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": f"\u2045{place}\u2046"} for place, role in enumerate(roles)]


def modelfile(source: str, tokenizer: Any, stops: Sequence[str], system_prompt: str | None, adapter: str = "") -> str:
    """The text of the Modelfile.

    Args:
        source: the GGUF file beside it.
        tokenizer: with the chat template.
        stops: tokens that end an answer.
        system_prompt: what training put before each chat.
        adapter: the GGUF file of a LoRA adapter, if `source` is its base model.
    """
    turns = take_apart(tokenizer)
    lines = [f"FROM ./{source}", *([f"ADAPTER ./{adapter}"] if adapter else [])]
    if turns:
        lines.append(f'TEMPLATE """{turns.go()}"""')
    else:
        lines.append(
            "# The chat template does more than Go's can be shown to do: Ollama takes the one in the GGUF file."
        )
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    if system_prompt:
        lines.append(f'SYSTEM """{system_prompt}"""')
    return "\n".join(lines) + "\n"
