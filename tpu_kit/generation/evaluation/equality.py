r"""Compares a reply's answer with the expected answer: numbers, letters of a choice, formulas, times, dates, texts.

A marked statement (`statements.Statement`) must be the expected number with its unit. In an unmarked text, the last
number counts. A statement of several values matches none of them: "5 or 6" is not 6.
"""

from __future__ import annotations

import re
from itertools import pairwise

from tpu_kit.generation.evaluation.expressions import is_expression, same_expression
from tpu_kit.generation.evaluation.quantities import (
    Quantity,
    arithmetic,
    clean,
    is_bounded_or_changed,
    last_quantity,
    moment,
    moments,
    only_quantity,
    quantity,
    without_dollars,
)
from tpu_kit.generation.evaluation.statements import Statement

_SEARCHED = 4000
"""Number of characters at the end of a statement in which the answer is searched."""
_CLOSING = " \t\n.,;:!?`\"'*_"
_NEGATED = re.compile(
    r",?\s?(?:\b(?:rather than|instead of|(?:and |but )?(?:not|cannot)|(?:any(?:thing|one)?|every(?:thing|one)|all) but"
    r"|except|unlike|other than|apart from|excluding)|n't)"
    r"\s(?:(?:be|for|equal to|an?|the|option|choice|answer|letter|number|value)\s){0,3}\S+",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"(?<!\S)(?!(?:yes|no)\b)(?:\S{1,40}\s(?:and|or|nor)\s)?\S{1,40}(?:(?<=[.?!])\s(?:no\W{1,3})?(?:but\s)?(?:that|this|it(?!\s\w+\stoo)))?"
    r"(?P<predicate>(?:'s|\s(?:is|are|was|were|seems|looks))\s(?:(?:clearly|obviously|also|still|just|far|much)\s)?"
    r"(?:wrong|incorrect|false|too\s\w)|\sdo(?:es)?(?:\snot|n't)\swork"
    r"|\s(?:(?:is|are|was|were)(?:\snot|n't)|(?:can(?:\s?not|'t)|could(?:\snot|n't))\sbe)\s"
    r"(?:right|correct|true|possible|valid|(?:the|an?|my|our)\s(?:\w{1,20}\s)?(?:answer|option|choice|solution|result)\b))",
    re.IGNORECASE,
)
"""A value that its sentence, or the next sentence, calls wrong."""
_CLAUSE = re.compile(
    r",?\s(?:because|since|as|which|so|giving|hence|thus|therefore|for|on|in (?=\d|\$\d))\b|\s\((?=[A-Za-z]{3})(?!mod)"
    r"|:\s(?=[A-Za-z]{3})|\s-\s(?=[A-Za-z]{3})|,\s(?:and|but)\s(?:it|this|that|the|he|she|we|they|there)\b",
    re.IGNORECASE,
)
_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n+")
_RELATION = re.compile(r"[<>≤≥±≠]|\\(?:pm|mp|[lg]eq?|neq?|[lg]t)(?![A-Za-z])")
_FORMULA = re.compile(r"\$([^$]+)\$")
_BETWEEN = re.compile(r"\s*(?:,\s*)?(?:(?:and|or)\s*)?")
_LAST_UNIT = re.compile(
    r"(?:(?<=[\d)}\]\s])\s?(?=[A-Za-z]{2})|(?<=[\d)}\]])\s)"
    r"(?P<unit>[A-Za-z]{1,15}(?:\s?\^\s?\{?\s?\d\s?\}?)?(?:/[a-z]{1,6})?)$"
)
_LAST_IS = re.compile(
    r".*(?:\b(?:is|are|was|were|equals|but|say|choose|chose|pick|select|think|called|named|believe|guess|has|have)\b:?|[=:])\s",
    re.IGNORECASE | re.DOTALL,
)

_OPENING = re.compile(r"^(?:indeed|well|so|therefore|thus|hence|sure)\b\W*")

_LETTER = re.compile(r"\(?([A-Z])[.):]*")
_LETTER_AND_TEXT = re.compile(r"\(?([A-Z])[.):]+\s+(\S.*)", re.DOTALL)
_ALONE = re.compile(r"\(?([A-Za-z])(?:[.):]*|(?:[.):]+\s|\s?\(|\s-\s|,\s(?!or\b|and\b|[A-Za-z]\b)).*)", re.DOTALL)
_ROUGHLY = re.compile(r"(?<=\w)\sor (?:so|thereabouts)(?=\W*$)", re.IGNORECASE)
_PUNCTUATION = re.compile(r"[,;:.!?](?=\s|$)")
_ARTICLE = re.compile(r"(?:the|an?) (?=\w)")
_YES_OR_NO = re.compile(r"(?:^|[,;.!]\s)(yes|no|maybe|perhaps)(?=[,;.!]|$)")
_CHOSEN = re.compile(
    r"(?:(?<=\s)|^)\(?[A-Z][.):]+(?=\s|$)"
    r"|\b[A-Z](?=$|[,;?!\"')]| or | and | is (?:the |correct|right)| because | since |\s-\s)"
    r"|(?i:\b(?:option|choice|answer|letter|choose|pick|select|chose|say))\s\(?[A-Z]\b"
    r"|(?i:\b(?:option|choice|letter|choose|chose|pick|select))\s\(?(?:[b-hj-z]\b|a(?=\W*$))"
)
_NAME_BEFORE = re.compile(
    r"(?<![\w'])(?!(?:(?:Answer|Option|Choice|Letter|Statement|Alternative|Solution|Response)s?|Final|Correct|Right|Best|So|Then|Thus"
    r"|Therefore|Hence|Because|Since|If|When|While|Although|But|And|Or|Not|Nor|Yes|No|Ok|Okay|Now|Here|Also|Only|Just"
    r"|Both|Either|Neither|Between|Maybe|Perhaps|With|Without|From|For|To|Of|In|By|As|At|On|The|Is|Are|Was|Be|It"
    r"|This|That|I|We|You|My|Your|Our|Guess|Mark|Circle|Choose|Chose|Pick|Select|Say|Try|Use|Take|Like|Unlike|Except|Even|Still|Again|Indeed|[A-Z][a-z]+ly)\s)"
    r"[A-Z][a-z]+\s$"
)
"""A word that forms a name with the letter after it, as in "Plan B"."""
_MARK = re.compile(r"[(\[{]|[)\]}]|;|,(?!\d{3}(?!\d))|,(?=\s)|\s(?:and|or)(?=\s)|\\cup(?![A-Za-z])")
_LONGEST_LIST = 500
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])|±")
_ASSIGNED = re.compile(r"\s*[A-Za-z](?:_\{?\w{1,9}\}?)?\s*(?:=|\\in(?![A-Za-z])|∈)\s*")


def same(expected: str, statement: Statement) -> bool:
    """Whether a statement equals the expected text, apart from white space, case, and punctuation around the text.

    Case counts in LaTeX. Unless the texts are equal so, the kind of the expected text decides: a number, a letter of a
    choice or a moment. Another kind is compared as a text, then as a list, or if `same_list` is None, as a formula.

    Raises:
        ValueError: the expected formula cannot be parsed.
    """
    if _bare(expected) == _bare(statement.text):
        return True
    for comparison in (same_number, same_letter, same_moment):
        if (result := comparison(expected, statement)) is not None:
            return result
    if same_text(expected, statement):
        return True
    listed = same_list(expected, statement)
    return bool(same_formula(expected, statement)) if listed is None else listed


def same_number(expected: str, statement: Statement) -> bool | None:
    """Whether the numbers are equal, and the units if both have one; None if the expected text is not a number.

    In an unmarked statement, its last number or formula counts. A percentage equals its fraction (50% and 0.5) only in
    a marked statement. Raises ValueError as `same_expression`, if the statement is a formula.
    """
    wanted = quantity(clean(expected))
    if wanted is None:
        return None
    text = _searched(statement)
    line = text.rpartition("\n")[2]
    if whole := quantity(text):
        return wanted.equals(whole, shares=statement.marked)
    if statement.marked or is_expression(without_dollars(text)):
        if reading := next(filter(None, _read_in_parts(text)), None):
            return wanted.equals(reading, shares=statement.marked)
    elif "\\" not in arithmetic(line):
        last = last_quantity(text)
        return last is not None and wanted.equals(last, shares=False)
    formula = _formula(line, marked=statement.marked)
    return formula is not None and same_expression(without_dollars(clean(expected)), formula)


def same_letter(expected: str, statement: Statement) -> bool | None:
    """Whether letters of a choice are equal; None if the expected text is not like "B", "(B)" or "B. Paris".

    The last sentence of the statement that names a letter counts. The result is False if it names two letters, or if no
    sentence names a letter. For an expected "B. Paris", "Paris" is also correct; it is compared, with errors, as in
    `same`.
    """
    cleaned = clean(expected)
    wanted = _LETTER.fullmatch(cleaned)
    if wanted is None:
        choice = _LETTER_AND_TEXT.fullmatch(cleaned)
        return None if choice is None else same_letter(choice[1], statement) or same(choice[2], statement)
    text = _searched(statement).strip(" `\"'*$")
    first, *others = _SENTENCES.split(text)
    for sentence in (*reversed(others), first):
        if sentence is first and (alone := _ALONE.fullmatch(sentence)):
            return alone[1].upper() == wanted[1]
        named = {
            letter[0].strip("().:?!;, ")[-1:].upper()
            for letter in _CHOSEN.finditer(sentence)
            if letter[0][1:2].isalpha() or not _NAME_BEFORE.search(sentence[: letter.start()][-20:])
        }
        if named - {"I"}:
            return named - {"I"} == {wanted[1]}
    return False


def same_moment(expected: str, statement: Statement) -> bool | None:
    """Whether times of day or dates are equal; None if the expected text is neither.

    In a marked statement, the first clause with a moment counts, in an unmarked statement the last. All its moments
    must be equal to the expected moment. Without a moment in the statement, the result is False.
    """
    wanted = moment(clean(expected))
    if wanted is None:
        return None
    clauses = [found for clause in _CLAUSE.split(_searched(statement)) if (found := moments(clause))]
    return bool(clauses) and all(wanted & found for found in clauses[0 if statement.marked else -1])


def same_text(expected: str, statement: Statement) -> bool:
    """Whether a text equals the whole statement, its first words, or its end after "is" or a similar word.

    Case, spaces, single asterisks, an article before the text and punctuation around it do not count. If the expected
    text has no digit and no backslash, punctuation after words does not count either. A statement with both yes and no
    equals neither.
    """
    negated = _NEGATED.search(expected) or _DENIED.search(expected)
    whole = _words(clean(statement.text)[-_SEARCHED:] if negated else _searched(statement))
    whole = _OPENING.sub("", whole)
    wanted = _ARTICLE.sub("", _words(clean(expected)), count=1)
    if _YES_OR_NO.fullmatch(wanted) and len(set(_YES_OR_NO.findall(whole))) > 1:
        return False
    parts = (whole, re.split(r"[,.;:]\s|\s(?:because|since|-)\s|\s\(", whole, maxsplit=1)[0])
    texts = [_ARTICLE.sub("", text, count=1) for text in (*parts, *map(_after_last_is, parts))]
    if not re.search(r"[\d\\]", wanted):
        wanted, *texts = (_PUNCTUATION.sub("", text) for text in (wanted, *texts))
    return wanted.replace(" ", "") in {text.replace(" ", "").strip(_CLOSING) for text in texts}


def same_list(expected: str, statement: Statement) -> bool | None:
    r"""Whether lists of two or more values are equal in any order; None if the numbers of values differ.

    Also None for a single value, and for values within brackets, such as tuples and intervals. But \{1, 2\} is a list.
    Lists are compared in order if only one list has square brackets and the other has none. 1 \pm 2 is a list of two
    values. Values are compared, and errors raised, as in `same`.
    """
    texts = [without_dollars(clean(text)).strip(" .") for text in (expected, statement.text)]
    kinds = [_bracket(text) for text in texts]
    ordered = sorted(kinds) == ["", "["]  # a list as a program prints it
    wanted, found = (_items(text[1:-1] if ordered and kind else text) for text, kind in zip(texts, kinds, strict=True))
    if len(wanted) < 2 or len(wanted) != len(found):
        return None
    if ordered:
        return all(same(item, Statement(other, True)) for item, other in zip(wanted, found, strict=True))
    for item in wanted:
        equal = next((other for other in found if same(item, Statement(other, True))), None)
        if equal is None:
            return False
        found.remove(equal)
    return True


def same_formula(expected: str, statement: Statement, *, required: bool = False) -> bool | None:
    """Whether formulas are equal by `same_expression`; None if the expected text is not a formula.

    With `required`, an expected text that does not look like a formula is compared, too, and the result is never None.
    False if the statement has no formula or another unit, or if a set is compared with a tuple or an interval. If the
    statement is more than a formula, the formula at its beginning (only if marked) or its last $...$ counts.

    Raises:
        ValueError: the expected formula cannot be parsed.
    """
    wanted, unit = _without_unit(without_dollars(clean(expected)).rstrip("."))
    if not required and "\\" not in wanted and not is_expression(wanted):
        return None
    text = _searched(statement)
    formula = _formula(text, marked=statement.marked)
    if formula is None and not statement.marked:
        sentences = [sentence for sentence in _SENTENCES.split(text) if sentence.strip()]
        formula = _formula(_after_last_is(sentences[-1]), marked=False) if sentences else None
    if formula is None:
        return False
    formula, other = _without_unit(formula)
    if (unit and other and unit != other) or {_bracket(wanted), _bracket(formula)} in ({"{", "("}, {"{", "["}):
        return False
    return same_expression(wanted, formula)


def _read_in_parts(text: str) -> list[Quantity | None]:
    """Returns candidate numbers from the parts of a marked statement that is more than a number."""
    beginning = quantity(_CLAUSE.split(text, maxsplit=1)[0])
    if beginning or _RELATION.search(text) or sum(any(map(str.isdigit, item)) for item in _items(text)) > 1:
        return [beginning]
    return [quantity(text.rpartition("=")[2]) if "=" in text else None, only_quantity(text)]


def _formula(text: str, *, marked: bool) -> str | None:
    """Returns the text if it is a formula; else, if `marked`, its beginning; else its last $...$ without the signs.

    Adjacent $...$ are joined with commas. None if there is no formula, or if words before the last bound or change it.
    """
    for part in (text, _CLAUSE.split(text, maxsplit=1)[0]) if marked else (text,):
        bare = without_dollars(part).strip(" \n.,;:\"'")
        if is_expression(_without_unit(bare)[0]) or quantity(bare):
            return bare
    formulas = list(_FORMULA.finditer(text))
    if not formulas:
        return None
    first = len(formulas) - 1
    for previous, following in reversed(list(pairwise(formulas))):
        if not _BETWEEN.fullmatch(text[previous.end() : following.start()][:20]):
            break
        first -= 1
    if is_bounded_or_changed(text[: formulas[first].start()]):
        return None
    return ", ".join(formula[1] for formula in formulas[first:])


def _without_unit(formula: str) -> tuple[str, str]:
    """Splits a formula into (formula, unit's canonical name); the name is empty without a known unit."""
    unit = _LAST_UNIT.search(formula)
    reading = quantity(f"1 {unit[1]}") if unit else None
    if unit is None or reading is None or not (reading.unit or len(unit[1]) > 3):
        return formula, ""
    return formula[: unit.start()].strip(), reading.unit


def _bracket(text: str) -> str:
    """Returns the opening bracket "{", "(" or "[" around a set, a tuple or an interval; "" without brackets."""
    match = re.match(r"\s*\\?([{(\[])", text) if text.rstrip().endswith((")", "]", "}")) else None
    return match[1] if match else ""


def _items(text: str) -> list[str]:
    r"""Splits a list at commas, "and", "or", \cup and plus-minus signs outside of brackets, without "x =" before it.

    A text of one value, and a text of more than 500 characters, is one item.
    """
    text = text.strip(" .$")
    if len(text) > _LONGEST_LIST:
        return [text]
    if text.count("=") + len(re.findall(r"\\in(?![A-Za-z])|∈", text)) == 1 and (assigned := _ASSIGNED.match(text)):
        text = text[assigned.end() :]
    if text.startswith(r"\{") and text.endswith(r"\}"):
        text = text[2:-2]
    items, depth, begin = [], 0, 0
    for mark in _MARK.finditer(text):
        if mark[0] in "([{":
            depth += 1
        elif mark[0] in ")]}":
            depth -= 1
        elif depth == 0:
            items.append(text[begin : mark.start()])
            begin = mark.end()
    items = [stripped for item in (*items, text[begin:]) if (stripped := re.sub(r"^\s*(?:and|or)\s", "", item).strip())]
    if len(items) == 1 and len(signs := list(_PLUS_MINUS.finditer(items[0]))) == 1:
        before, after = items[0][: signs[0].start()].strip(), items[0][signs[0].end() :].strip()
        items = [f"{before} + {after}" if before else after, f"{before} - {after}" if before else f"-{after}"]
    return items


def _searched(statement: Statement) -> str:
    """Returns the end of a statement, cleaned, without values that it negates or calls wrong."""
    text = _DENIED.sub(r"\g<predicate>", clean(statement.text[-_SEARCHED:]))
    text = _ROUGHLY.sub("", _NEGATED.sub("", text))
    return text if statement.marked else text.rstrip("! ")  # no factorial


def _after_last_is(text: str) -> str:
    """Returns the text after its last "is", "=", ":" or similar word; the whole text without such a word."""
    before = _LAST_IS.match(text)
    return text[before.end() :] if before else text


def _bare(text: str) -> str:
    """Returns a text without white space and punctuation around it, in lower case unless it has LaTeX."""
    text = re.sub(r"(?<=\d)\s+(?=\d)", "&", without_dollars(clean(text)))  # 1 2 is not 12
    text = re.sub(r"_\{(\w+)\}", r"_\1", text)
    text = "".join(text.split()).strip("$.,;:`\"'*")
    return text if "\\" in text else text.casefold()


def _words(text: str) -> str:
    """Returns a text in lower case with single spaces, without punctuation around it."""
    return " ".join(without_dollars(text).casefold().split()).strip(_CLOSING)
