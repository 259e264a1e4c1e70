"""Options of the commands that answer prompts; importing them loads no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tpu_kit.config.fields import knob
from tpu_kit.machine.storage.run_config import AUTO


@dataclass
class AnsweringModel:
    """Which model answers, and how it is asked."""

    adapter: str | None = knob(
        AUTO,
        "A run, its config.yaml, its adapter or a checkpoint, also in gs://; auto = that of the run that is given as "
        "the configuration, null = the base model.",
    )
    chat: bool | None = knob(
        None,
        "Put prompts through the chat template; false = use them as they are; null = as the model was trained: an "
        "adapter of plain text has no chat template.",
    )


@dataclass
class Prompts(AnsweringModel):
    """What `generate` answers, and how often."""

    prompt: tuple[str, ...] = knob((), "The question; may be given several times.")
    prompts: str | None = knob(None, "A file of texts, one a line, or .jsonl with a prompt, or messages and tools.")
    n: int = knob(1, "Samples of each prompt.", at_least=1)
    rows: int = knob(8, "The most rows of a batch in each replica.", at_least=1)
    truncate: bool = knob(False, "Cut off the beginning of a prompt that is too long.")

    def __post_init__(self) -> None:
        from tpu_kit.generation.prompts import read_prompts

        prompts = [*self.prompt, *(read_prompts(self.prompts) if self.prompts else [])]
        chats = [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in prompts]
        self.asked = prompts if self.chat is False else chats
        if not prompts and not sys.stdin.isatty():
            raise ValueError('prompt: there is none; give prompt="..." or prompts=FILE')
