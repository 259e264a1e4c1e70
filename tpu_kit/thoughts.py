"""The tree that a search leaves behind, drawn as text in a terminal and as HTML in a notebook."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any, Literal

Stopped = Literal["done", "tokens", "nodes"]


@dataclass(eq=False)  # a step is itself: its parent knows it, and it its parent
class Thought:
    """A step, or the root.

    Attributes:
        text: of the step; of the root the question.
        score: of the chain up to here.
        depth: steps up to here; 0 for the root.
        done: the reasoning ended with this step.
        answer: what the chain comes to, where it was asked.
        children: its proposals.
    """

    text: str
    score: float = 0.0
    depth: int = 0
    done: bool = False
    answer: str | None = None
    children: list[Thought] = field(default_factory=list)
    parent: Thought | None = field(default=None, repr=False)
    tokens: tuple[int, ...] = field(default=(), repr=False)
    logprob: float = field(default=0.0, repr=False)
    length: int = field(default=0, repr=False)

    @property
    def steps(self) -> list[str]:
        """The texts of the chain, the question left out."""
        above = self.parent.steps if self.parent else []
        return [*above, self.text] if self.parent else []


@dataclass(frozen=True)
class SearchResult:
    """What a search came to.

    Attributes:
        answer: of the best chain.
        best: its last step.
        root: the whole tree.
        tokens: generated, the answers and what self-evaluation says included.
        nodes: steps in the tree.
        stopped: "done" or the budget that ran out.
        read: tokens of prompts that were read for it; those whose keys and values were there are not.
    """

    answer: str
    best: Thought
    root: Thought
    tokens: int
    nodes: int
    stopped: Stopped
    read: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, such as JSON has; the tree as steps within steps."""
        path = {id(step) for step in _chain(self.best)}

        def plain(node: Thought) -> dict[str, Any]:
            about = {"text": node.text, "score": node.score, "chosen": id(node) in path, "answer": node.answer}
            return {**about, "steps": [plain(child) for child in node.children]}

        figures = {"tokens": self.tokens, "nodes": self.nodes, "stopped": self.stopped, "read": self.read}
        return {"answer": self.answer, **figures, "tree": plain(self.root)}

    def __str__(self) -> str:
        path = {id(step) for step in _chain(self.best)}
        lines = [self.root.text]

        def draw(node: Thought, indent: str) -> None:
            for child in node.children:
                last = child is node.children[-1]
                mark = "*" if id(child) in path else " "
                lines.append(f"{indent}{'└' if last else '├'}{mark}{child.score:8.3f}  {_line(child)}")
                draw(child, indent + ("  " if last else "│ "))

        draw(self.root, "")
        return "\n".join([*lines, f"answer: {self.answer} ({self.nodes} steps, {self.tokens} tokens, {self.stopped})"])

    def _repr_html_(self) -> str:
        path = {id(step) for step in _chain(self.best)}

        def draw(node: Thought) -> str:
            items = "".join(
                f"<li style='font-weight:{'bold' if id(child) in path else 'normal'}'>"
                f"<code>{child.score:.3f}</code> {html.escape(_line(child))}{draw(child)}</li>"
                for child in node.children
            )
            return f"<ul style='font-weight:normal'>{items}</ul>" if items else ""

        answer = f"<b>{html.escape(self.answer)}</b> ({self.nodes} steps, {self.tokens} tokens, {self.stopped})"
        return f"<div><b>{html.escape(self.root.text)}</b>{draw(self.root)}<p>answer: {answer}</p></div>"


def _line(node: Thought) -> str:
    return " ".join(node.text.split()) + (f"  = {node.answer}" if node.answer is not None else "")


def _chain(node: Thought) -> list[Thought]:
    return [*(_chain(node.parent) if node.parent else []), node]
