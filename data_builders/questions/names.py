"""Names in texts: whether a text contains a name, whether a name means one entity, and what a quantity says.

All comparisons are between normalised texts (`normalize_name`): lower case, without articles and punctuation.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import NamedTuple

from tripletune.core.data.answers import normalize_name
from tripletune.data_builders.subq.searches import BRACKETED

_DATE_FORMATS = ("%d %B %Y", "%B %d, %Y", "%Y-%m-%d", "%B %Y")
# A word of approximation or a currency sign, a number, and a unit.
_QUANTITY = re.compile(r"((?:about|around|nearly|over|some)?\W*?)([-−–]?\d[\d,.]*)(\D*)")
_ARTICLE = re.compile("^(the|an?) ", re.IGNORECASE)
_POSSESSIVE = re.compile(r"[’']s\b")

# Names with the same key mean the same entity. The names of a corpus are compared again and again.
key = cache(normalize_name)


def spoken(text: str) -> str:
    """Prepare a text for `contains_name`: normalised, without possessive endings, with a space at both ends."""
    return f" {normalize_name(_POSSESSIVE.sub('', text))} "


def contains_name(spoken_text: str, name: str) -> bool:
    """Whether a text from `spoken` contains a name as whole words; the part of the name in brackets is ignored."""
    name_alone = BRACKETED.sub("", name) or name
    return f" {key(name_alone)} " in spoken_text


@cache
def is_name(text: str) -> bool:
    """Whether a text names one entity, unlike a year, or "the capital", which differs by document."""
    if _ARTICLE.sub("", text).islower():
        return False
    return quantity(text) is None


class Quantity(NamedTuple):
    """A date, a year or a measure; two quantities of one unit can be compared.

    Attributes:
        unit: The normalised words around the number; "date" for a date, "" for a year.
        number: The number; of a date, the day counted from 1 January of the year 1.
    """

    unit: str
    number: float


def quantity(text: str) -> Quantity | None:
    """Read a quantity; None for any other text.

    Words of approximation are part of the unit, so that "about 300 km" is not compared with "300 km".
    """
    for date_format in _DATE_FORMATS:
        with suppress(ValueError):
            return Quantity("date", datetime.strptime(text, date_format).toordinal())
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    before, digits, after = match.groups()
    unit = key(f"{before} {after}")
    with_ascii_minus = re.sub("[−–]", "-", digits.strip(",.").replace(",", ""))
    try:
        number = float(with_ascii_minus)
    except ValueError:
        # For example "1.2.3".
        return None
    if unit in ("bc", "bce"):
        number = -number
    return Quantity(unit, number)
