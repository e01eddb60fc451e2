"""The numbers of list items: of HTML as a browser writes them, of Word as the document's numbering defines them.

Word's numbers are written into its paragraphs before mammoth converts them. mammoth makes a list of HTML that begins
with 1 again after each paragraph without a number, and knows neither letters nor "2.1".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from xml.etree.ElementTree import Element

LISTS = frozenset({"ul", "ol", "dl", "menu", "dir"})
_INTEGER = re.compile(r"\s*([+-]?\d{1,9})", re.ASCII)
_LIST_STYLE = re.compile(
    r"(?:^|;)\s*list-style(?:-type)?\s*:[^;]*?\b(none|disc|circle|square|(?:lower|upper)-(?:alpha|latin|roman))\b",
    re.IGNORECASE,
)
# Styles of CSS and formats of Word by the attribute `type` of HTML; "" writes no number.
_KINDS = {
    "none": "",
    "disc": "",
    "circle": "",
    "square": "",
    "bullet": "",
    "lower-alpha": "a",
    "lower-latin": "a",
    "lowerLetter": "a",
    "upper-alpha": "A",
    "upper-latin": "A",
    "upperLetter": "A",
    "lower-roman": "i",
    "lowerRoman": "i",
    "upper-roman": "I",
    "upperRoman": "I",
}
# Names of lists of notes and of their items: the marks of notes are left out, so their numbers would lead nowhere. Then
# names of lists whose numbers a usual style sheet hides.
_UNNUMBERED = re.compile(
    r"\b(?:references|(?:foot|end)notes?|cite(?:_note)?|fn\d*|breadcrumbs?|list-unstyled|list-none)\b", re.IGNORECASE
)
_ROMAN = (
    (1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl"), (10, "x"),
    (9, "ix"), (5, "v"), (4, "iv"), (1, "i"),
)  # fmt: skip
_LARGEST_ROMAN = 3999
_LETTERS = 26


def number_text(number: int, kind: str) -> str:
    """A number in the form that the attribute `type` of a list names: a, A, i, I, else digits."""
    if number < 1 or kind not in ("a", "A", "i", "I") or (kind in "iI" and number > _LARGEST_ROMAN):
        return str(number)
    text = ""
    if kind in "aA":
        while number:
            number, letter = divmod(number - 1, _LETTERS)
            text = chr(ord("a") + letter) + text
    else:
        for value, sign in _ROMAN:
            while number >= value:
                number -= value
                text += sign
    return text.upper() if kind.isupper() else text


@dataclass
class ItemNumbers:
    """The numbers of an ordered list of HTML that is being read.

    Attributes:
        number: The number of the next item.
        step: What is added for the item after it.
        kind: The form of the numbers, as the attribute `type` names it.
    """

    number: int
    step: int
    kind: str

    def take(self, attributes: Mapping[str, str]) -> str:
        """The number of the next item, with a point and a space; "" if the item shows none."""
        number = _integer(attributes.get("value", ""), self.number)
        self.number = number + self.step
        if _is_unnumbered(attributes) or not _kind(attributes, "1"):
            return ""
        return f"{number_text(number, self.kind)}. "


def item_numbers(attributes: Mapping[str, str]) -> ItemNumbers | None:
    """The numbers of a list `ol` with these attributes; None if its items show none.

    A countdown without `start` begins with the number of its items, which is only known at its end: its numbers are
    left out.
    """
    kind = _kind(attributes, attributes.get("type", "1"))
    is_countdown = "reversed" in attributes
    if not kind or _is_unnumbered(attributes) or (is_countdown and not _INTEGER.match(attributes.get("start", ""))):
        return None
    return ItemNumbers(_integer(attributes.get("start", ""), 1), -1 if is_countdown else 1, kind)


def _integer(text: str, default: int) -> int:
    """The integer at the beginning of an attribute, or a default without one, as HTML reads it."""
    match = _INTEGER.match(text)
    return int(match[1]) if match else default


def _kind(attributes: Mapping[str, str], default: str) -> str:
    """The form of numbers that a style names; "" if it shows none."""
    style = _LIST_STYLE.search(attributes.get("style", ""))
    return _KINDS[style[1].lower()] if style else default


def _is_unnumbered(attributes: Mapping[str, str]) -> bool:
    """Whether a list or an item has a name of those without numbers."""
    return any(_UNNUMBERED.search(attributes.get(name, "")) for name in ("id", "class", "role", "epub:type"))


class WordNumbers:
    """The numbers of a Word document's paragraphs, taken in their order.

    Args:
        numbering: The root of `word/numbering.xml`.
        styles: The root of `word/styles.xml`.
    """

    def __init__(self, numbering: Element | None, styles: Element | None) -> None:
        self._styles: dict[str, Element] = {}
        for style in styles if styles is not None else ():
            self._styles[_attribute(style, "styleId")] = style
        # The definition of each list, and its levels.
        self._definitions: dict[str, str] = {}
        self._levels: dict[tuple[str, int], Element] = {}
        self._restarts: dict[str, dict[int, int]] = {}
        if numbering is not None:
            self._read_lists(numbering)
        # The last number of each level of a definition: several lists may continue one.
        self._numbers: dict[str, dict[int, int]] = {}

    def _read_lists(self, numbering: Element) -> None:
        """Read the levels of all lists, which may replace levels of their definitions."""
        definitions = {
            _attribute(element, "abstractNumId"): element for element in numbering.iterfind("{*}abstractNum")
        }
        for element in numbering.iterfind("{*}num"):
            name = _attribute(element, "numId")
            definition = _value(element, "abstractNumId")
            self._definitions[name] = definition
            if definition in definitions:
                for level in definitions[definition].iterfind("{*}lvl"):
                    self._levels[name, _integer(_attribute(level, "ilvl"), 0)] = level
            for override in element.iterfind("{*}lvlOverride"):
                place = _integer(_attribute(override, "ilvl"), 0)
                level_here = override.find("{*}lvl")
                if level_here is not None:
                    self._levels[name, place] = level_here
                start = _value(override, "startOverride")
                if start:
                    self._restarts.setdefault(name, {})[place] = _integer(start, 1)

    def take(self, paragraph: Element) -> str:
        """The number of the next paragraph, with a space behind it; "" if it has no number, or no text to be read."""
        mark = paragraph.find("{*}pPr/{*}rPr")
        if mark is not None and (mark.find("{*}del") is not None or mark.find("{*}vanish") is not None):
            # Word neither shows nor counts it.
            return ""
        name, place = self._list_of(paragraph)
        level = self._levels.get((name, place))
        if level is None:
            return ""
        numbers = self._numbers.setdefault(self._definitions[name], {})
        for restarted, start in self._restarts.pop(name, {}).items():
            numbers[restarted] = start - 1
        numbers[place] = numbers.get(place, self._start(name, place) - 1) + 1
        for deeper in [other for other in numbers if other > place]:
            del numbers[deeper]
        if _value(level, "numFmt") in ("bullet", "none") or not _has_text(paragraph):
            return ""
        text = re.sub(r"%([1-9])", lambda part: self._number_text(name, int(part[1]) - 1), _value(level, "lvlText"))
        return f"{text} " if text.strip() else ""

    def _number_text(self, name: str, place: int) -> str:
        """The last number of a level, in the level's form."""
        level = self._levels.get((name, place))
        kind = "1" if level is None else _KINDS.get(_value(level, "numFmt"), "1")
        return number_text(self._numbers[self._definitions[name]].get(place, self._start(name, place)), kind)

    def _start(self, name: str, place: int) -> int:
        """The first number of a level."""
        level = self._levels.get((name, place))
        return 1 if level is None else _integer(_value(level, "start"), 0)

    def _list_of(self, paragraph: Element) -> tuple[str, int]:
        """The list and the level of a paragraph: its own, or those of its style."""
        name = place = ""
        for properties in self._properties_of(paragraph):
            own = properties.find("{*}numPr")
            if own is not None:
                name = name or _value(own, "numId")
                place = place or _value(own, "ilvl")
        if not place:
            place = self._place_of_style(name, _value(paragraph.find("{*}pPr"), "pStyle"))
        return name, _integer(place, 0)

    def _place_of_style(self, name: str, style: str) -> str:
        """The level of a list that belongs to a style, as those of numbered headings do; "" if none does."""
        for (owner, place), level in self._levels.items():
            if owner == name and style and _value(level, "pStyle") == style:
                return str(place)
        return ""

    def _properties_of(self, paragraph: Element) -> Iterator[Element]:
        """The properties of a paragraph, of its style, and of the styles on which that is based."""
        element: Element | None = paragraph
        seen: set[str] = set()
        while element is not None:
            properties = element.find("{*}pPr")
            if properties is not None:
                yield properties
            style = _value(element, "basedOn") if element is not paragraph else _value(properties, "pStyle")
            element = self._styles.get(style) if style not in seen else None
            seen.add(style)


def _has_text(paragraph: Element) -> bool:
    """Whether a paragraph, whose runs have the formats of their styles, has a text that is neither deleted nor struck.

    The text of tracked deletions has a tag of its own.
    """
    for run in paragraph.iterfind(".//{*}r"):
        strike = run.find("{*}rPr/{*}strike")
        is_struck = strike is not None and _attribute(strike, "val") not in ("0", "false", "off")
        if not is_struck and any((text.text or "").strip() for text in run.iterfind("{*}t")):
            return True
    return False


def _attribute(element: Element, name: str) -> str:
    """An attribute in the namespace of Word's file, which is one of two."""
    for key, value in element.attrib.items():
        if key.rpartition("}")[2] == name:
            return value
    return ""


def _value(element: Element | None, name: str) -> str:
    """The attribute `val` of a child of this name; "" without it."""
    child = None if element is None else element.find(f"{{*}}{name}")
    return "" if child is None else _attribute(child, "val")
