"""Encodes the text of special tokens in rows as plain text, apart from the special tokens of the chat template.

A tokenizer turns the text of a special token into that token anywhere, so a question with the text `<|im_end|>` ends
its turn. With `data.special_text=split`, placeholders stand for such texts while the chat template is applied (`hide`,
`shown`), and the texts are encoded by a copy of the tokenizer whose special tokens have other texts.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from tokenizers import Tokenizer


def special_names(tokenizer: Any, written: str, kept: Collection[str]) -> list[str]:
    """Returns the texts of special tokens that a row should not imitate, longest first.

    Leaves out texts of only letters and digits, or only white space.

    Args:
        tokenizer: the tokenizer.
        written: a rendering of its chat template: added tokens in it count even if they are not special (DeepSeek).
        kept: texts that rows may contain as tokens: the reasoning tags. Tokens that are a part of them are left out.
    """
    added = tokenizer.added_tokens_decoder.values()
    names = {token.content for token in added if token.special or token.content in written}
    names |= set(tokenizer.all_special_tokens)
    names = {name for name in names if name.strip() and not name.isalnum() and not any(name in tag for tag in kept)}
    return sorted(names, key=lambda name: (-len(name), name))


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a copy of a JSON value with `change` applied to all its texts, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _changed(item, change) for key, item in value.items()}
    return [_changed(item, change) for item in value] if isinstance(value, list) else value


class _Edit(NamedTuple):
    """A range of a text, and the range of its replacement in the new text."""

    start: int
    end: int
    new_start: int
    new_end: int


def _replaced(text: str, changes: Iterable[tuple[int, int, str]]) -> tuple[str, list[_Edit]]:
    """Replaces ranges of a text, which are in order, by other texts; returns the new text and the edits."""
    parts, edits, position, length = [], list[_Edit](), 0, 0
    for start, end, new in changes:
        length += start - position
        edits.append(_Edit(start, end, length, length + len(new)))
        parts += [text[position:start], new]
        position, length = end, length + len(new)
    return "".join([*parts, text[position:]]), edits


def _moved(position: int, edits: list[_Edit]) -> int:
    """Maps a position to the text after the edits; a position inside a range maps to the end of the new range."""
    number = bisect_right(edits, position, key=itemgetter(0)) - 1
    if number < 0:
        return position
    edit = edits[number]
    return edit.new_start if position == edit.start else edit.new_end + max(position - edit.end, 0)


class SpecialText:
    """Finds, hides and encodes the texts of a tokenizer's special tokens.

    Args:
        tokenizer: a fast tokenizer.
        names: result of `special_names`.
    """

    def __init__(self, tokenizer: Any, names: Sequence[str]) -> None:
        self._tokenizer, self._names = tokenizer, names
        self._pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._mark = f"tpukit{secrets.token_hex(8)}n"  # random, so that no row contains it
        self._placeholder = re.compile(rf"{self._mark}(\d+)z")
        self._placeholders = {name: f"{self._mark}{number}z" for number, name in enumerate(names)}

    def find(self, value: Any) -> str:
        """Returns the text of the first special token in the texts and keys of a JSON value; empty if there is none."""
        found: list[str] = []

        def look(text: str) -> str:
            if not found and (match := self._pattern.search(text)):
                found.append(match[0])
            return text

        _changed(value, look)
        return found[0] if found else ""

    def ranges(self, text: str) -> tuple[tuple[int, int], ...]:
        """Returns the character ranges of the texts of special tokens in a text, in order."""
        return tuple(match.span() for match in self._pattern.finditer(text))

    def hide(self, value: Any) -> Any:
        """Returns a JSON value with placeholders of letters and digits for the texts of special tokens."""
        return _changed(value, lambda text: self._pattern.sub(lambda match: self._placeholders[match[0]], text))

    def shown(self, text: str, places: Iterable[int] = ()) -> tuple[str, tuple[tuple[int, int], ...], list[int]]:
        """Replaces placeholders by the texts of their special tokens.

        Args:
            text: a text made from values of `hide`.
            places: positions in it.

        Returns:
            The new text, the ranges of the special tokens' texts in it, and the `places` moved to it.
        """
        found = self._placeholder.finditer(text)
        text, edits = _replaced(text, [(*match.span(), self._names[int(match[1])]) for match in found])
        return text, tuple(edit[2:] for edit in edits), [_moved(place, edits) for place in places]

    def encode(
        self, text: str, literal: Sequence[tuple[int, int]], add_special_tokens: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the token ids of a text and, per token, its character range (start, end) in the text.

        In the `literal` ranges, which are in order, the texts `names` are encoded as text. Elsewhere they become
        special tokens. `add_special_tokens` is whether the tokenizer adds its own, such as BOS, with the range (0, 0).
        """
        edges = [(0, 0), *literal, (len(text), len(text))]
        special = [
            (*match.span(), self._placeholders[match[0]])
            for (_, start), (end, _) in pairwise(edges)
            for match in self._pattern.finditer(text, start, end)
        ]
        renamed, edits = _replaced(text, special)
        back = [_Edit(*edit[2:], *edit[:2]) for edit in edits]
        out = self._renamed.encode(renamed, add_special_tokens=add_special_tokens)
        return out.ids, [(_moved(a, back), _moved(b, back)) for a, b in out.offsets]

    @cached_property
    def _renamed(self) -> Tokenizer:
        """A copy of the tokenizer whose special tokens have the placeholders as texts."""
        parts = json.loads(self._tokenizer.backend_tokenizer.to_str())
        names, model = self._placeholders, parts["model"]
        for token in parts["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(name, name): number for name, number in model["vocab"].items()}
        else:  # Unigram
            model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
        if model.get("unk_token"):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        made = Tokenizer.from_str(json.dumps(parts))
        made.no_truncation()
        made.no_padding()
        return made
