r"""Parses numbers with their units, times of day and dates in the text of an answer."""

from __future__ import annotations

import calendar
import contextlib
import re
import unicodedata
from datetime import date
from fractions import Fraction
from typing import NamedTuple

from tpu_kit.generation.evaluation.expressions import SUPERSCRIPTS

_FONT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|it|rm|sf|tt)|operatorname|mbox|emph|underline|bm|boldsymbol)"
    r"\s?\{([^{}]*)\}"
)
_SPACING = re.compile(r"(?<!\\)\\(?:(?:left|right|displaystyle|limits|[Bb]igg?[lr]?)(?![A-Za-z])|!)|~|`")
_SPACES = re.compile(r"(?<!\\)\\(?:q?quad(?![A-Za-z])|[,;: ])")
_THIN = re.compile(r"(?<=\d)(?:\\,|,?\\!\s?)(?=\d{3}(?!\d))")
_DEGREES = re.compile(r"\^\s?\{?\s?\\circ\s?\}?|\\degree(?![A-Za-z])|\u00ba")
_ESCAPED = re.compile(r"(?<!\\)\\([$%&#])")
_FRACTION_SIGN = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_FORMULA = re.compile(r"\$([^$]*)\$")
_ITALIC = re.compile(r"(?<![\w*])\*([^*\s]+)\*(?![\w*])")

# A decimal number, 1,234.5, 1.5e3, 1/2 or 1 1/2, but not a part of 12:30, 2x, 2^10, 10_2 or 1.2.3.
_NUMBER = re.compile(
    r"(?<![\w.,^:/])(?P<sign>(?:(?<![\d)] )[-+])?)(?P<currency>[$€£¥]?) ?(?P<minus>-?)(?:(?P<whole>\d+) (?=\d+/))?"
    r"(?P<above>(?=\.?\d)(?:\d{1,3}(?:,\d{3})+(?!\d)|\d*)(?:\.\d*)?(?:e[-+]?\d{1,3})?)(?:/(?P<under>\d+))?"
    r"(?![\d/^_⁰¹²³⁴-⁹⁻]|[:.,]\d|e[-+]?\d|[xyzn]\b)",
    re.IGNORECASE,
)
_FRACTION = re.compile(r"(?:(\d{1,15})\s?)?\\frac\s?(?:\{\s?(-?\d+)\s?\}|(\d))\s?(?:\{\s?(\d+)\s?\}|(\d))")
_VULGAR_FRACTION = re.compile(r"\s?([¼-¾⅐-⅞])")
_POWER_OF_TEN = re.compile(
    r"(?<=\d)\s?(?:\\times|\\cdot|[\u00d7\u00b7*]|(?<= )x)\s?10\s?"
    r"(?:\^\s?\{?\s?([-+]?\d{1,3})\b\s?\}?|([\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]{1,4}))"
)
_REPEATING = re.compile(
    r"(?P<sign>-?)(?P<whole>\d{0,9})\.(?P<once>\d{0,9})"
    r"(?:\\overline\s?\{(?P<a>\d{1,9})\}|\\dot\s?\{(?P<b>\d)\}|\((?P<c>\d{1,9})\)|(?P<d>\d)(?P=d)(?P=d)(?:\.\.\.|…|\\l?dots))"
)
_VARIABLE = re.compile(r"([A-Za-z](?:_\{?\w{1,9}\}?|\([a-z]\))?|[A-Za-z]{2,12})\s?(?:=|\\approx|\u2248)(?!=)\s?")
_LEADING = re.compile(
    r"(?:(?:it|that|this|there|they|he|she|we|you|i)\s(?:is|are|has|have|had|gets?|was|were|will be|would be)\b|about"
    r"|around|approximately|approx\.?|roughly|exactly|precisely|only|just|equal to|equals|a total of|\\approx|\u2248"
    r"|but|=|USD|EUR|GBP)\s*",
    re.IGNORECASE,
)
_NEGATIVE = re.compile(r"(?:negative|minus)\s(?=\d)", re.IGNORECASE)
_SCALE = re.compile(r"\s(dozen|hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Words that make a number beside them something else than the value of a statement.
_OPERATOR = re.compile(
    r"(?:or|and|not|between|than|minus|plus|times|over|squared|cubed|root|factorial|either|neither|nor|half|except|to"
    r"|through|double|triple|divided|multiplied|mod|modulo|log|sin|cos|tan|sqrt|no|remainder)",
    re.IGNORECASE,
)
_THAN = r"\b(?:more|less|greater|fewer|larger|smaller|higher|lower) than"
_RANGE_BEFORE = re.compile(
    r"(?:\d\W{0,4}(?:or|to|and|-)\s?|[<>≤≥±]=?\s?|\\(?:pm|[lg]eq?|[lg]t)\s?"
    rf"|{_THAN}\s)[$€£¥]?$",
    re.IGNORECASE,
)
_BOUND_BEFORE = re.compile(
    r"\b(?:at (?:the )?(?:very )?(?:least|most)|under|below|above|over|beyond|up to|(?:max|min)(?:imum)? of"
    rf"|(?:upper|lower) (?:bound|limit) of|{_THAN})\s*[$€£¥]?$",
    re.IGNORECASE,
)
_CHANGED_BEFORE = re.compile(
    r"(?:\b(?:twice|thrice|double|triple|half)(?: of)?|(?:/\d{1,9}|%|\b(?:percent|third|quarter|square|cube|root)) of)"
    r"\s*[$€£¥]?$",
    re.IGNORECASE,
)
_RANGE_AFTER = re.compile(
    r"\s?(?:(?:or|and) (?:more|less|fewer|greater|above|below|higher|lower|up)\b"
    r"|(?:[^.,;\d\n]{1,30}\s)?at (?:the )?(?:least|most)\b|\+(?=\s|$))",
    re.IGNORECASE,
)

_REMARK = re.compile(r"\s\((?=[^()]{0,200}[A-Za-z]{3})[^()]{1,200}\)[\s.]{0,9}$")

_UNIT_NAMES = {
    "$": "$ dollar usd buck", "€": "€ euro eur", "£": "£ gbp", "¥": "¥ yen jpy", "¢": "¢ cent",
    "%": "% percent percentage pct", "°": "° degree deg", "rad": "rad radian",
    "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre",
    "m": "m meter metre", "km": "km kilometer kilometre", "mile": "mi mile", "ft": "ft foot feet", "inch": "inch inche",
    "yd": "yd yard", "mg": "mg milligram", "g": "g gram", "kg": "kg kilogram kilo", "lb": "lb", "oz": "oz ounce",
    "ml": "ml milliliter millilitre", "l": "l liter litre", "ms": "ms millisecond", "s": "s sec second",
    "min": "min minute", "h": "h hr hour", "day": "day", "week": "week", "month": "month", "year": "year yr",
    "mile/h": "mph", "km/h": "kmh kph kmph", "newton": "newton", "joule": "joule", "watt": "watt", "volt": "volt",
}  # fmt: skip
_UNITS = {name + plural: unit for unit, names in _UNIT_NAMES.items() for name in names.split() for plural in ("", "s")}
_LETTER_UNITS = {*"msghlLNJWVKCFA"}
_UNIT_WORD = re.compile(
    r"(?P<word>[$€£¥¢%°]|[A-Za-zµ']{1,30})(?P<power>\s?\^\s?\{?\s?-?\d\s?\}?|[²³])?"
    r"|(?P<other>[/·\-,.()\s]|\\cdot(?![A-Za-z]))"
)
_LONGEST_UNIT = 80

_TIME = re.compile(r"(?<![\d:.])(\d{1,2}):([0-5]\d)(?::[0-5]\d)?(?![\d:])(?:\s?([ap])\.?m\b\.?)?", re.IGNORECASE)
_MONTHS = {
    name.lower(): number
    for names in (calendar.month_name, calendar.month_abbr)
    for number, name in enumerate(names)
    if name
}
_DATE = re.compile(
    r"(?<![\d-])(\d{4})-(\d{1,2})-(\d{1,2})(?![\d-])"
    r"|\b(\d{1,2})(?:st|nd|rd|th)?(?: of)? ([A-Za-z]{3,9})\.?,? (\d{4})\b"
    r"|\b([A-Za-z]{3,9})\.? (\d{1,2})(?:st|nd|rd|th)?,? (\d{4})\b"
)


class Quantity(NamedTuple):
    """A number with its unit.

    Attributes:
        value: the number as written, so 50 for 50%.
        unit: the unit's canonical name; empty if there is none or it is unknown ("apples").
        variable: the variable to which the number is assigned ("x = 5"), or "".
    """

    value: Fraction
    unit: str = ""
    variable: str = ""

    def equals(self, other: Quantity, *, shares: bool) -> bool:
        """Whether values are equal, and units and variables if both have them.

        A part of a unit after "/" counts only if both have such a part. 50% equals 50, and if `shares` is true, also
        0.5.
        """
        if self.variable and other.variable and self.variable != other.variable:
            return False
        if self.unit and other.unit and not _same_unit(self.unit, other.unit):
            return False
        if self.value == other.value:
            return True
        percent = [each.unit == "%" for each in (self, other)]
        if not shares or percent[0] == percent[1]:
            return False
        return self.value == other.value * (100 if percent[0] else Fraction(1, 100))


def clean(text: str) -> str:
    r"""Removes LaTeX fonts and spacing, backticks and single asterisks around words, and superfluous spaces.

    Writes a LaTeX degree sign as °, \$ and \% without backslash, and \dfrac as \frac. Double asterisks stay.
    """
    for _ in range(3):  # nested fonts
        text, count = _FONT.subn(r" \1", text)
        if not count:
            break
    text = _SPACES.sub(" ", _SPACING.sub("", _THIN.sub("", text.replace("{,}", ","))))
    text = _FRACTION_SIGN.sub(r"\\frac", _DEGREES.sub("°", _ESCAPED.sub(r"\1", text)))
    return re.sub(r"[ \t]+", " ", _ITALIC.sub(r"\1", text)).strip()


def without_dollars(text: str) -> str:
    """Removes the pairs of dollar signs around formulas; a single dollar sign means money and stays."""
    return _FORMULA.sub(r"\1", text)


def arithmetic(text: str) -> str:
    r"""Rewrites \frac{1}{2} and ½ as 1/2, and powers of ten after a number: 2 \times 10^3 as 2e3."""

    def fraction(match: re.Match[str]) -> str:
        whole, above, under = match[1], match[2] or match[3], match[4] or match[5]
        return f"{whole} {above}/{under}" if whole else f"{above}/{under}"

    text = _FRACTION.sub(fraction, text)
    text = _VULGAR_FRACTION.sub(lambda sign: f" {unicodedata.normalize('NFKC', sign[1])}".replace("\u2044", "/"), text)
    return _POWER_OF_TEN.sub(lambda power: f"e{power[1] or power[2].translate(SUPERSCRIPTS)}", text)


def quantity(text: str) -> Quantity | None:
    """Parses a text from `clean` that is a number, alone or with a unit or counted things ("5 apples"); else None.

    Words such as "it is" or "about" or "x =" may precede the number; "thousand" may follow. "5 or more" gives None.
    """
    text = arithmetic(without_dollars(text)).strip(" \n\t,;:\"'")
    text = text if text.endswith("..") else text.removesuffix(".")
    while leading := _LEADING.match(text):
        text = text[leading.end() :]
    variable = _VARIABLE.match(text)
    if variable:
        text = text[variable.end() :]
    text = _NEGATIVE.sub("-", text, count=1)
    name = variable[1] if variable and not variable[1][1:].isalpha() else ""
    if (repeating := _REPEATING.match(text)) and (unit := _unit(text[repeating.end() :])) is not None:
        return Quantity(_repeating(repeating), unit, name)
    number = _NUMBER.match(text)
    if number is None or (value := _value(number)) is None:
        return None
    value, rest = _scaled(value, text[number.end() :])
    unit = None if _RANGE_AFTER.match(rest) else _unit(rest)
    return None if unit is None else Quantity(value, _UNITS.get(number["currency"], "") or unit, name)


def only_quantity(text: str) -> Quantity | None:
    """Returns the number in a cleaned text of words; None if it is not the only one, or words or symbols change it."""
    text = arithmetic(without_dollars(text))
    numbers = list(_NUMBER.finditer(text))
    if len(numbers) != 1 or len(text) > 1000:
        return None
    words = f"{text[: numbers[0].start()]} {text[numbers[0].end() :]}"
    following = text[numbers[0].end() :][:1]
    if is_bounded_or_changed(text[: numbers[0].start()]) or re.search(r"-\s?\($", text[: numbers[0].start()]):
        return None
    if re.search(r"[\d\\+*/^=<>≤≥±√|\[\]{}]", words) or following == "!" or following.isalpha():
        return None
    if any(map(_OPERATOR.fullmatch, re.findall(r"[A-Za-z]+", words))):
        return None
    return last_quantity(text)


def last_quantity(text: str) -> Quantity | None:
    """Returns the last number after the last "=" of a text from `clean`, or of the whole text if it has no "=".

    None if there is no such number, if it ends a range or is a bound ("3 to 5", "< 5"), or if words change it ("twice
    5"). It has no `variable`.
    """
    text = arithmetic(without_dollars(text)).rpartition("=")[2]
    if (remark := _REMARK.search(text)) and _NUMBER.search(text[: remark.start()].rpartition("\n")[2]):
        text = text[: remark.start()] if len(_NUMBER.findall(remark[0])) > 1 else text
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    after = text[last.end() :]
    before = text[max(0, last.start() - 40) : last.start()]
    if _RANGE_BEFORE.search(before) or _CHANGED_BEFORE.search(before) or _RANGE_AFTER.match(after):
        return None
    value = _value(last)
    if value is None:
        return None
    value, after = _scaled(value, after)
    word = _UNIT_WORD.match(after.lstrip())
    return Quantity(value, _UNITS.get(last["currency"], "") or (_canonical(after[:_LONGEST_UNIT]) if word else ""))


def is_bounded_or_changed(before: str) -> bool:
    """Whether the words before a number or a formula make it a bound or change its value: "at least 7", "twice 7"."""
    return bool(_BOUND_BEFORE.search(before[-40:]) or _CHANGED_BEFORE.search(before[-40:]))


def _scaled(value: Fraction, after: str) -> tuple[Fraction, str]:
    """Multiplies a number by the word after it, such as "thousand"; returns it and the text after the word."""
    scale = _SCALE.match(after)
    return (value * _SCALES[scale[1].lower()], after[scale.end() :]) if scale else (value, after)


def _value(number: re.Match[str]) -> Fraction | None:
    """Returns the value of a match of `_NUMBER`; None for a division by 0 or too many digits."""
    try:
        above = Fraction(number["above"].replace(",", ""))
        value = Fraction(number["whole"] or 0) + above / Fraction(number["under"] or 1)
    except (ValueError, ZeroDivisionError):  # thousands of digits, or x/0
        return None
    return -value if "-" in (number["sign"], number["minus"]) else value


def _repeating(match: re.Match[str]) -> Fraction:
    r"""Returns the value of 0.1\overline{6}, 0.(3) or 0.333..."""
    period = match["a"] or match["b"] or match["c"] or match["d"]
    once = Fraction(int((match["whole"] or "0") + match["once"]), 10 ** len(match["once"]))
    value = once + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(match["once"]))
    return -value if match["sign"] else value


def _unit(text: str) -> str | None:
    """Returns the unit in the words after a number, empty if unknown; None if the words are more than a unit."""
    stripped = text.strip(" .,;:")
    if len(stripped) > _LONGEST_UNIT:
        return None
    position, words = 0, 0
    while position < len(stripped):
        token = _UNIT_WORD.match(stripped, position)
        if token is None:
            return None
        if word := token["word"]:
            words += 1
            if words == 1 and not _begins_unit(word, attached=not text.startswith((" ", "(", "-"))):
                return None
            if _OPERATOR.fullmatch(word) and word.lower() not in ("squared", "cubed"):
                return None
        position = token.end()
    return _canonical(stripped) if words <= 8 else None


def _begins_unit(word: str, *, attached: bool) -> bool:
    """Whether a word after a number, or `attached` to it, is not a variable: "5 m", "5cm", "5th", not "5k" or "5xy"."""
    if word.lower() in ("squared", "cubed"):
        return False
    if word.lower() in _UNITS or word in ("st", "nd", "rd", "th"):
        return True
    return len(word) > 3 if attached else len(word) > 1 or word in _LETTER_UNITS


def _canonical(text: str) -> str:
    """Returns the canonical name of the unit at the beginning of a text, such as "cm^2" or "km/h"; empty if unknown."""
    tokens = _UNIT_WORD.finditer(text.replace("/", " per "))
    words = [(token["word"].lower(), token["power"] or "") for token in tokens if token["word"]]
    power = ""
    if words and words[0][0] in ("square", "sq", "cubic", "cu"):
        power = "^3" if words[0][0].startswith("cu") else "^2"
        words = words[1:]
    if not words or words[0][0] not in _UNITS:
        return ""
    power = power or "".join(re.findall(r"-?\d", words[0][1].translate(SUPERSCRIPTS)))
    if words[1:] and words[1][0] in ("squared", "cubed"):
        power = {"squared": "2", "cubed": "3"}[words[1][0]]
    unit = _UNITS[words[0][0]] + (f"^{power.strip('^')}" if power else "")
    per = len(words) > 2 and words[1][0] == "per" and _UNITS.get(words[2][0])
    return f"{unit}/{per}" if per else unit


def _same_unit(one: str, other: str) -> bool:
    """Whether two units are equal, apart from a part after "/" that only one unit has."""
    return one == other or (("/" in one) != ("/" in other) and one.partition("/")[0] == other.partition("/")[0])


def moments(text: str) -> list[frozenset[int]]:
    """Returns the times of day and the dates in a text, in their order, as sets of numbers; [] without them.

    The set of a time has the minutes of the day that it may mean: 2:30 also means 14:30. The set of a date has a number
    for its day. Moments whose sets share a number may be equal.
    """
    found = [(match.start(), _minutes(match)) for match in _TIME.finditer(text)]
    for match in _DATE.finditer(text):
        year, month, day = (
            (match[1], match[2], match[3]) if match[1] else
            (match[6], _MONTHS.get(match[5].lower(), 0), match[4]) if match[4] else
            (match[9], _MONTHS.get(match[7].lower(), 0), match[8])
        )  # fmt: skip
        with contextlib.suppress(ValueError):  # no such day
            found.append((match.start(), frozenset({date(int(year), int(month), int(day)).toordinal() + 24 * 60})))
    return [moment for _, moment in sorted(found, key=lambda each: each[0])]


def moment(text: str) -> frozenset[int] | None:
    """Returns the set of `moments` for a cleaned text that is a time of day or a date; None for other texts."""
    text = without_dollars(text).strip(" \n\t.,;:\"'")
    match = _TIME.fullmatch(text) or _DATE.fullmatch(text)
    found = moments(text) if match else []
    return found[0] if found else None


def _minutes(time: re.Match[str]) -> frozenset[int]:
    """Returns the minutes of the day that a match of `_TIME` may mean."""
    hour, minute, half = int(time[1]), int(time[2]), (time[3] or "").lower()
    if half:
        hours = {hour % 12 + 12 * (half == "p")}
    elif 1 <= hour < 12:
        hours = {hour, hour + 12}
    else:
        hours = {0 if hour == 24 else hour}  # more than 24: a duration
    return frozenset(each * 60 + minute for each in hours)
