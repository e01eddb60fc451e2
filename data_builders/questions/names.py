"""Names in texts: whether a text contains a name, whether a name means one entity, and what a quantity says.

All comparisons are between normalised texts (`normalize_name`): lower case, without articles and punctuation.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import NamedTuple

from tripletune.core.data.answers import ends_in_article, normalize_name, with_articles
from tripletune.data_builders.subq.searches import BRACKETED

# By unit: a month is not the first of its days, so the two are not compared.
_DATE_FORMATS = {"date": ("%d %B %Y", "%B %d, %Y", "%Y-%m-%d"), "month": ("%B %Y",)}
# A comma between digits that are no groups of three is a decimal comma: "1,5 km".
_DECIMAL_COMMA = re.compile(r"[-−–]?\d+,(?:\d{1,2}|\d{4,})")
# A word of approximation or a currency sign, a number, and a unit.
_QUANTITY = re.compile(r"((?:about|around|nearly|over|some)?\W*?)([-−–]?\d[\d,.]*)(\D*)")
_ARTICLE = re.compile("^(the|an?) ", re.IGNORECASE)
_POSSESSIVE = re.compile(r"[’']s\b")

# Names with the same key mean the same entity. The names of a corpus are compared again and again.
name_key = cache(normalize_name)


class SearchableText(NamedTuple):
    """A text in which names are looked for.

    Attributes:
        text: The text without possessive endings.
        normal: The same, normalised.
    """

    text: str
    normal: str


def searchable(text: str) -> SearchableText:
    """A text as `contains_name` needs it."""
    without_endings = _POSSESSIVE.sub("", text)
    return SearchableText(without_endings, normalize_name(without_endings))


def contains_name(searchable_text: SearchableText, name: str) -> bool:
    """Whether a text contains a name as whole words; the part of the name in brackets is ignored."""
    key = name_key(BRACKETED.sub("", name) or name)
    # Names like "Hepatitis A" are few, so the text with articles is made when one comes.
    normal_text = with_articles(searchable_text.text) if ends_in_article(key) else searchable_text.normal
    return f" {key} " in f" {normal_text} "


@cache
def is_name(text: str) -> bool:
    """Whether a text names one entity, unlike a year, or "the capital", which differs by document."""
    if _ARTICLE.sub("", text).islower():
        return False
    return read_quantity(text) is None


class Quantity(NamedTuple):
    """A date, a year or a measure; two quantities of one unit can be compared.

    Attributes:
        unit: The normalised words around the number; "date" for a day, "month" for a month, "" for a year.
        number: The number; of a day or the first day of a month, the days since 1 January of the year 1.
    """

    unit: str
    number: float


def read_quantity(text: str) -> Quantity | None:
    """Read a quantity; None for any other text.

    Words of approximation are part of the unit, so that "about 300 km" is not compared with "300 km".
    """
    for unit, date_formats in _DATE_FORMATS.items():
        for date_format in date_formats:
            with suppress(ValueError):
                return Quantity(unit, datetime.strptime(text, date_format).toordinal())
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    before, digits, after = match.groups()
    unit = name_key(f"{before} {after}")
    plain_digits = digits.strip(",.")
    if _DECIMAL_COMMA.fullmatch(plain_digits):
        plain_digits = plain_digits.replace(",", ".")
    with_ascii_minus = re.sub("[−–]", "-", plain_digits.replace(",", ""))
    try:
        number = float(with_ascii_minus)
    except ValueError:
        # For example "1.2.3".
        return None
    if unit in ("bc", "bce"):
        number = -number
    return Quantity(unit, number)
