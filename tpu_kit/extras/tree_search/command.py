"""The command `search`."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from tpu_kit.config.commands import CONFIG, JSON, OK, command
from tpu_kit.config.fields import knob
from tpu_kit.extras.tree_search.options import SearchOptions
from tpu_kit.generation.requests import AnsweringModel


@dataclass
class Question(AnsweringModel):
    """The question of `search`, and the file for its tree."""

    prompt: str | None = knob(None, "The question.")
    out: str | None = knob(None, "A file for the tree as HTML.")

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError('prompt: missing; give prompt="..."')
        if self.out and not Path(self.out).absolute().parent.is_dir():
            raise ValueError(f"out={self.out}: there is no folder {Path(self.out).parent}; make it, or name another")


@command("Exit codes: 0 done, 1 error, 2 bad arguments.", CONFIG | JSON, (Question, SearchOptions))
def search(args: argparse.Namespace) -> int:
    """Answer a question by a tree of thoughts, and print the tree."""
    from tpu_kit.extras.tree_search.search import think

    question, options = args.options
    tree = think(args.config, question.prompt, options, adapter_dir=args.adapter, chat=question.chat)
    if question.out:
        Path(question.out).write_text(tree._repr_html_())
    print(json.dumps(tree.to_dict(), indent=2) if args.json else tree)
    return OK
