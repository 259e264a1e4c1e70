r"""Finds the answer that a reply states: in <answer> tags, in \boxed{}, after "####" or after "answer is".

Replies are untrusted and may be long, so every pattern runs in time linear in their length.
"""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple


class Statement(NamedTuple):
    """The part of a reply that states its answer.

    Attributes:
        text: the part, with ASCII digits, minus signs and spaces, and with formulas between single dollar signs.
        marked: whether the reply marks the text as its answer; otherwise the text is the whole reply.
    """

    text: str
    marked: bool


_ASCII: dict[int, int | str] = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # full-width forms
_ASCII |= dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63"), "-")
_ASCII |= dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2009\u202f\u3000"), " ")
_ASCII |= dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), "")
_ASCII |= {ord("\u2018"): "'", ord("\u2019"): "'", ord("\u201c"): '"', ord("\u201d"): '"', ord("\u3002"): ". "}
_EMPHASIS = re.compile(r"(?<![\w)*])(?:\*\*|__)(?=\S)|(?<=\S)(?:\*\*|__)(?![\w(*])")  # not x**2
_DISPLAYED = re.compile(r"\$\$([^$]*)\$\$|(?<!\\)\\\[((?:[^\\]|\\[^\[\]])*)\\\]")
_DELIMITER = re.compile(r"(?<!\\)\\[()]")

_REASONING = re.compile(
    r"<(?P<close>/?)(?:think(?:ing)?|thoughts?|reasoning|scratchpad|analysis|reflection|start_working_out)>"
    r"|<\|begin_of_thought\|>|(?P<end></?end_working_out>|<\|end_of_thought\|>)",
    re.IGNORECASE,
)
_TAG = re.compile(
    r"<(?P<close>/?)(?P<name>(?:final[_ -]?)?(?:answer|solution|result)|final)>"
    r"|<\|(?P<side>begin|end)_of_(?P<part>solution|answer)\|>",
    re.IGNORECASE,
)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s{0,9}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"[\s$,;.]{0,9}(?:and|or)?[\s$]{0,9}(?:[A-Za-z]\s?=\s?)?")
_VALUE = re.compile(
    r"(?:\$[^$]{1,80}\$|\(?[A-Z]\)?"
    r"|[-+]?[$€£¥]? ?-?\d[\d.,/:]*(?: ?(?!(?:is|was|are|as|or|and|to)\b)[A-Za-z%°]{1,15}){0,2})\.?"
)
_MARKED_LINE = re.compile(r"^[ \t]*####[ \t]*(.*)$", re.MULTILINE)
_STATED = re.compile(
    r"\b(?:answer(?:[ \t]+(?!is\b|are\b|was\b|to be\b)[\w'-]+){0,5}?|(?:correct |right )?(?:option|choice|solution)"
    r"|final result)(?:[ \t]*[:=](?!=)|[ \t]+(?:is|are|was|(?:would|should|must|will|to) be|equals|becomes)\b[:,]?)"
    r"|^[^\w\n]{0,9}(?:the )?(?:final )?answer[^\w\n]{0,9}\n",
    re.IGNORECASE | re.MULTILINE,
)
_STATED_BEFORE = re.compile(
    r"(?<![\w.,])(?!(?:this|that|it|which|what|here)\b)(?P<said>[^\s.,!?:;\"]{1,40}(?: [^\s.,!?:;\"]{1,40}){0,2})"
    r" is (?:the|my|our) (?:final |correct |right |best )?(?:answer|option|choice)\b",
    re.IGNORECASE,
)
_FILLERS = re.compile(
    r"(?:\s|:|(?:indeed|simply|just|therefore|thus|then|clearly|actually|still|also|given by|equal to|found to be)\b)*",
    re.IGNORECASE,
)
_BULLET = re.compile(r"(?:[-*\u2022]|>)\s+")
_SENTENCE_END = re.compile(r"(?<!\bSt)(?<!\bDr)(?<!\bMr)(?<!\bMrs)(?<!\bvs)(?<!\s[A-Z])[.!?](?=[\"')]?(?:\s|$))")
_CORRECTION = re.compile(
    r"(?:^|[.!?\n])\W{0,9}(?:(?:no|wait|actually|sorry|correction|oops|hmm|hold on|scratch that)\b"
    r"|(?:(?:no|but)\W{1,3})?(?:that|this|it)(?:'s| is) (?:wrong|incorrect|not right|not correct)\b[.,;:]?)"
    r"[^.!?\n]{0,99}?\b(?:it is|it's|it should be|that is|should be|make that|i mean|it was)"
    r"[: ]+(?P<value>[^\n]{1,80})",
    re.IGNORECASE,
)
_CORRECTED = re.compile(r"\W{0,9}(?:no|wait|actually|sorry|correction|oops|but|hmm|hold on)\b", re.IGNORECASE)
_DENIAL = re.compile(
    r"[^\w\n?]{0,9}(?:\?\W{0,9}no\b|[?\s]{0,9}(?:(?:no|wait|hmm|but)\W{1,3}){0,2}(?:that|this|which|it(?! \w+ too\b))"
    r"(?:(?:'s| is| was)(?: clearly| obviously| also)? (?:wrong|incorrect|false|too \w+)"
    r"|(?:(?:'s| is| was) not|(?: is| was)n't| can(?:not|'t| not) be) (?:right|correct|true|the (?:\w{1,20} )?answer)))"
    r"(?=\s*(?:[.,;:!?\n]|$|because\b|since\b|as\b))",
    re.IGNORECASE,
)
"""Words after a statement that retract it."""
_FIRST_WORDS = re.compile(r"(?:(?:so|therefore|thus|hence|and|then|that)\s)+", re.IGNORECASE)
_ABOUT = re.compile(
    r"(?:not )?(?:correct|right|wrong|incorrect|reasonable|plausible|valid|consistent|verified|confirmed|found)\b",
    re.IGNORECASE,
)
_LONGEST = 2000  # limit of the sentence that states an answer, in characters
_SHORT = 8  # limit of an answer after "Answer:", in words
_MOST = 16  # limit of considered statements, from the end of the text, and of boxes that form a list


def statement_of(text: str) -> Statement | None:
    r"""Returns the answer that a reply states; None if the reply was cut off within it or within its reasoning.

    Blocks of reasoning are not searched. The answer is in the last block of `<answer>`, `<solution>` or a similar tag.
    Without a block it is the last box or line that begins with "####", or else the sentence after the last "answer is".
    These are marked. Otherwise it is the whole text, unmarked. A later correction replaces it ("Wait, it should be
    6."), and a retraction makes it "". A block or box that is opened but not closed was cut off.
    """
    outside = _without_reasoning(_formulas(_EMPHASIS.sub("", text.translate(_ASCII))))
    if outside is None:
        return None
    tags = list(_TAG.finditer(outside))
    if not tags:
        return _stated(outside.strip())
    block = _last_block(outside, tags)
    inner = None if block is None else _stated(block.strip())
    return None if inner is None else Statement(inner.text, True)


def _formulas(text: str) -> str:
    r"""Rewrites $$...$$, \[...\] and \(...\) as $...$ on one line."""
    text = _DISPLAYED.sub(lambda formula: f"${' '.join((formula[1] or formula[2] or '').split())}$", text)
    return _DELIMITER.sub("$", text)


def _without_reasoning(text: str) -> str | None:
    """Removes blocks of reasoning, opened in the text or before it; returns None if the last block is not closed."""
    kept: list[str] = []
    position, inside = 0, False
    for tag in _REASONING.finditer(text):
        if tag["close"] or tag["end"]:
            if not inside:  # the prompt opened it
                kept.clear()
            inside = False
        elif not inside:
            kept.append(text[position : tag.start()])
            inside = True
        position = tag.end()
    return None if inside else "".join([*kept, text[position:]])


def _last_block(text: str, tags: list[re.Match[str]]) -> str | None:
    """Returns the text from the last opening tag, or the beginning, to the next tag; None if it is not closed."""
    opened = [index for index, tag in enumerate(tags) if not (tag["close"] or (tag["side"] or "").lower() == "end")]
    if not opened:  # the prompt opened it
        return text[: tags[-1].start()]
    begin, *ends = tags[opened[-1] :]
    return text[begin.end() : ends[0].start()] if ends else None


def _stated(text: str) -> Statement | None:
    """Returns the answer that a text without tags and reasoning states; None if its last box is not closed."""
    found = _boxed_or_marked(text)
    if found is None:
        return None
    statement, end = found
    said = []
    for match in deque(_STATED.finditer(text, end), maxlen=_MOST):
        rest = text[match.end() : match.end() + _LONGEST].strip()
        sentence = _sentence(rest)
        heads = match[0].rstrip(" \t")[-1:] in {*":=\n"} and len(sentence.split()) > _SHORT
        if not (heads and len(rest) > len(sentence) + _SHORT):  # else it is an explanation under a heading "Answer"
            said.append((sentence, match.end()))
    if end:  # a value corrects a box; "The answer is plausible" does not
        said = [each for each in said if _VALUE.fullmatch(each[0])]
    if said:
        statement, end = next((each for each in reversed(said) if not _ABOUT.match(each[0])), said[-1])
    elif not end and (before := list(_STATED_BEFORE.finditer(text))):
        statement, end = _FIRST_WORDS.sub("", before[-1]["said"]), before[-1].end()
    stated = text.find(statement, end) + len(statement) if said else end
    if end and _DENIAL.match(text, stated):
        statement = ""
    for correction in _CORRECTION.finditer(text, end) if end else ():
        if _VALUE.fullmatch(value := _sentence(correction["value"])):
            statement = value
    return Statement(statement, True) if end else Statement(text, False)


def _boxed_or_marked(text: str) -> tuple[str, int] | None:
    """Returns (text, end) of the last box or "####" line; ("", 0) without, None if the last box is cut off.

    Adjacent boxes are a list with commas. The end is the index of the character after the box or line.
    """
    lines = list(_MARKED_LINE.finditer(text))
    last_line = text.rfind("\n") + 1
    if "####" in text[last_line:]:
        return text[last_line:].rpartition("####")[2].strip(), len(text)
    line = next(
        (each for each in reversed(lines)
         if _VALUE.fullmatch(each[1].strip()) and not _CORRECTED.match(text, each.end())), None
    )  # fmt: skip
    boxes = deque(_BOX.finditer(text), maxlen=_MOST)
    if not boxes or (line is not None and line.start() > boxes[-1].start()):
        return ("", 0) if line is None else (line[1].strip(), line.end())
    contents: list[str] = []
    end = following = len(text)
    for box in reversed(boxes):
        closed = _closed_box(text, box.end())
        if closed is None:
            return None if not contents else (", ".join(contents), end)
        content, after = closed
        if not contents:
            end = after
        elif not contents[0] or after > following or not _BETWEEN_BOXES.fullmatch(text[after:following][:40]):
            break
        if content not in contents:
            contents.insert(0, content)
        following = box.start()
    return ", ".join(contents), end


def _closed_box(text: str, start: int) -> tuple[str, int] | None:
    r"""Returns (content, index after it) of a box whose command ends at `start`; None if it is not closed."""
    if text[start : start + 1] != "{":  # \boxed 12
        word = re.compile(r"[^\s$}]*").match(text, start)
        assert word is not None
        return word[0].rstrip(".,;"), word.end()
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[start + 1 : brace.start()].strip(), brace.end()
    return None


def _sentence(text: str) -> str:
    """Returns the first sentence of the text after "answer is", without filler words and list bullets."""
    filler = _FILLERS.match(text)
    text = text[filler.end() if filler else 0 :].split("\n", 1)[0].strip()
    if (bullet := _BULLET.match(text)) and not text[bullet.end() :][:1].isdigit():
        text = text[bullet.end() :]
    end = _SENTENCE_END.search(text)
    return (text[: end.start()] if end else text).strip()
