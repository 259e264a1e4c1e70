r"""Compares mathematical expressions with math-verify, which parses them with SymPy.

Powers that would fill the memory are refused before parsing. In the main thread, where signals can be set, there is
also a time limit. Neither is a guarantee, so judge untrusted texts in a process that can be killed.
"""

from __future__ import annotations

import math
import re
import threading
from dataclasses import replace
from functools import lru_cache
from typing import Any

_SECONDS = 5
_LONGEST = 1000  # characters of an expression
_LARGEST = 10**5  # the largest exponent
_SIGNS = {
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "\u00d7": r"\times ", "·": r"\cdot ",
    "∙": r"\cdot ", "÷": "/", "±": r"\pm ", "∓": r"\mp ", "\u222a": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∅": r"\emptyset ", "θ": r"\theta ", "\u03b1": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "φ": r"\phi ",
    "ω": r"\omega ", "\u211d": r"\mathbb{R}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "**": "^", "*": r"\cdot ", "<=": r"\le ", ">=": r"\ge ", "!=": r"\ne ",
    r"\varnothing": r"\emptyset ",
}  # fmt: skip
"""Symbols of Unicode and of programming languages -> LaTeX."""
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SIGN = re.compile("|".join(re.escape(text) for text in sorted(_SIGNS, key=len, reverse=True)))
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_ROOT = re.compile(
    r"√\s?(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))|(?<![\\A-Za-z])sqrt\s?[({]([^(){}]*)[)}]"
)
_SET_BUILDER = re.compile(r"^\\\{\s?[A-Za-z]\s?(?:\\mid|\||:)\s?([^{}]*)\\\}$")
_FUNCTIONS = ("pi", "infinity", "infty", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp")
_NAMES = re.compile(rf"(?<![\\A-Za-z])(?:{'|'.join(_FUNCTIONS)})(?![A-Za-z])")
_KNOWN = {*_FUNCTIONS, "sqrt", "inf", "arcsin", "arccos", "arctan", "det", "gcd", "lcm", "mod", "and", "or"}
_ENGLISH = re.compile(
    r"(?:is|it|to|of|in|at|on|by|we|so|as|if|an|be|no|he|us|me|my|do|go|up|the|are|was|has|you|can|not|for|yes)",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"[\s\d.,;:+\-^_()\[\]{}|'&√°%⁰¹²³⁴⁵⁶⁷⁸⁹⁻=<>/!*]+|\\(?:begin|end)\s?\{[a-z]+\*?\}|\\[A-Za-z]+|\\[{}\\|%]"
    rf"|(?P<word>[A-Za-z]+)|{_SIGN.pattern}"
)
_STRUCTURE = re.compile(
    r"[+*/^=<>√!²³]|\\[A-Za-z]|\d\s?[A-Za-z(]|[A-Za-z\d)}]\s?-\s?[A-Za-z\d(\\]|[(\[{|].*[)\]}|]|\d\s?[,;]\s?-?\d"
    rf"|\d(?: and | or )-?\d|\b(?:{'|'.join(_FUNCTIONS[3:])})\s?[\d(]|{_SIGN.pattern}"
)
_NOT_ONE = re.compile(r"\d\s+\d|^\d+(?:-\d+)+$")  # numbers without an operator between them, ranges, dates
_POWER = re.compile(r"(\d+(?:\.\d+)?|[)}])\s*\^\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\([^()]*\)|-?\d+)")
_TOWER = re.compile(r"\^\s*-?\d+\s*\^")
_FACTORIAL = re.compile(r"(\d+|[)}])\s*!")
_REMAINDER = re.compile(r"\\b?mod(?![A-Za-z])")
_DECIMAL = re.compile(r"(?<![\d.])0?\.(0+)[1-9]|(?:10\s*\^\s*\{?\s*|\de)-(\d+)")


def is_expression(text: str) -> bool:
    """Returns whether a text looks like a formula; its words are known functions or have at most three letters.

    A formula has LaTeX, a sign such as + or π, brackets, a comma between numbers, or a number before a letter. So
    1,000, 12/25/2020, 1 - 5 and 5 km are formulas; 5, -5, 50%, 1-5, 2020-12-25 and a word alone are not. An English
    word such as "is", numbers with only a space between them, and over 1,000 characters make a text no formula.
    """
    if len(text) > _LONGEST or not _STRUCTURE.search(text) or _NOT_ONE.search(text):
        return False
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            return False
        word = token["word"] or ""
        if word not in _KNOWN and (len(word) > 3 or _ENGLISH.fullmatch(word)):
            return False
        position = token.end()
    return True


def same_expression(expected: str, statement: str) -> bool:
    """Whether two formulas are equal: numerically, symbolically, or as sets, intervals, relations or matrices.

    Unless their texts are equal, formulas with huge numbers or more than 1,000 characters are unequal. A statement that
    cannot be parsed is unequal, too.

    Raises:
        ValueError: the expected text cannot be parsed.
    """
    expected, statement = _latex(expected), _latex(statement)
    if bool(_REMAINDER.search(expected)) != bool(_REMAINDER.search(statement)):  # math-verify ignores "mod"
        return False
    if expected.replace(" ", "") == statement.replace(" ", ""):
        return True
    if max(len(expected), len(statement)) > _LONGEST or _is_huge(expected) or _is_huge(statement):
        return False
    import math_verify

    wanted = _parsed(expected)
    if not wanted:
        raise ValueError(f"the row's answer {expected[:60]!r} cannot be read by math-verify")
    # Its two tolerances are absolute: with their defaults, all tiny numbers would be equal.
    tiny = _DECIMAL.finditer(f"{expected} {statement}")
    zeros = min(400, max((len(number[1] or "") or int(number[2]) for number in tiny), default=0))
    return bool(
        math_verify.verify(
            list(wanted), list(_parsed(statement)), float_rounding=6 + zeros, numeric_precision=100 + zeros,
            allow_set_relation_comp=True, timeout_seconds=_limit(),
        )
    )  # fmt: skip


@lru_cache(maxsize=1024)  # the completions of a group share an expected answer
def _parsed(text: str) -> tuple[Any, ...]:
    """Returns math-verify's readings of a LaTeX formula; empty if it cannot be read. Cached."""
    from math_verify import LatexExtractionConfig, parse

    # math-verify would remove letters such as "ab" as units. No fallback searches the text for its last number.
    boxes = LatexExtractionConfig(boxed_match_priority=0)
    boxes = replace(boxes, normalization_config=replace(boxes.normalization_config, units=False))
    found = parse(
        rf"\boxed{{{text}}}", extraction_config=(boxes,), fallback_mode="no_fallback", parsing_timeout=_limit()
    )
    return tuple(found)


def _limit() -> int | None:
    """Returns the time limit of math-verify in seconds; None outside of the main thread, which alone can set it."""
    return _SECONDS if threading.current_thread() is threading.main_thread() else None


def _latex(text: str) -> str:
    r"""Rewrites Unicode symbols, powers and roots as LaTeX, and \{x \mid x > 2\} as x > 2."""
    text = _SET_BUILDER.sub(r"\1", text)
    text = _RAISED.sub(lambda power: f"^{{{power[0].translate(SUPERSCRIPTS)}}}", text)
    text = _ROOT.sub(lambda root: rf"\sqrt{{{next(filter(None, root.groups()), '')}}}", text)
    text = _SIGN.sub(lambda sign: _SIGNS[sign[0]], text)
    return _NAMES.sub(lambda name: rf"\{name[0].replace('infinity', 'infty')}", text).strip()


def _is_huge(text: str) -> bool:
    """Whether numbers in a formula have too many digits to compute, such as 9^{9^9}, 10^{1000000} or (10^9)!."""
    if _TOWER.search(text):
        return True
    for power in _POWER.finditer(text):
        exponent = power[2].strip("{}() ")
        if not re.search(r"[A-Za-z]", exponent.replace("cdot", "").replace("times", "")) and _size(exponent) > _LARGEST:
            return True
    return any(
        len(match[1]) > 3 or (not match[1].isdigit() and re.search(r"[!^]|\d{4}", text[: match.start()]))
        for match in _FACTORIAL.finditer(text)
    )


def _size(text: str) -> float:
    """Returns an upper bound of the value of a formula without letters; infinity if it is not simple."""
    numbers = re.findall(r"\d+(?:\.\d+)?", text)
    if "!" in text or text.count("^") > 1 or any(len(number) > 9 for number in numbers):
        return math.inf
    if "^" not in text:
        return math.prod(max(2.0, float(number)) for number in numbers)
    base, _, exponent = text.partition("^")
    logarithm = math.log10(_size(base)) * _size(exponent)
    return math.inf if logarithm > 9 else 10**logarithm
