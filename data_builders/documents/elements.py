"""Elements of HTML: what is kept of open ones, which start tags end them, and which a reader sees as text.

The style of an element is its own, and that of simple rules in the page's `<style>` elements: a page may hide or strike
text by a class. Rules for a tag, a class or an id are read, such as `.draft { display: none }` and `p.old`. Rules in
`@media` and other blocks, which hold only sometimes, selectors of several parts, and style sheets in files of their own
are not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tripletune.data_builders.documents.lists import LISTS, ItemNumbers
from tripletune.data_builders.documents.tables import TableRows

# Elements whose end tag may be missing: the tags that end them, and the elements beyond which nothing is ended.
_TABLES = frozenset({"table"})
ROWS = frozenset({"thead", "tbody", "tfoot"})
ENDED_BY = {
    "li": (frozenset({"li"}), LISTS),
    "dt": (frozenset({"dt", "dd"}), LISTS),
    "dd": (frozenset({"dt", "dd"}), LISTS),
    "td": (frozenset({"td", "th"}), _TABLES),
    "th": (frozenset({"td", "th"}), _TABLES),
    "tr": (frozenset({"td", "th", "tr"}), _TABLES),
    **dict.fromkeys(ROWS, (ROWS | {"td", "th", "tr"}, _TABLES)),
    "option": (frozenset({"option"}), frozenset({"select"})),
    # Old pages have anchors without ends.
    "a": (
        frozenset({"a"}),
        frozenset({"p", "div", "li", "td", "th", "dd", "section", "article", "blockquote", "table"}),
    ),
}
# A paragraph also ends at each block, but not beyond these elements.
PARAGRAPH = frozenset({"p"})
AROUND_PARAGRAPHS = frozenset({"td", "th", "li", "dd", "div", "section", "article", "button", "blockquote", "table"})


class Snapshot(NamedTuple):
    """What was read before an element whose text is left out."""

    blocks: int
    pieces: list[str]
    headings: dict[str, str]
    bare_tag: str
    in_cell: bool
    tables: list[TableRows]
    item_number: str


@dataclass(slots=True)
class OpenElement:
    """An open element.

    Attributes:
        first_piece: The number of its first piece in the paragraph.
        left_out: Why its text is left out: "skipped", "menu", "hidden", "deleted", or "".
        before: What was read before it, if its text is left out.
        links_to_note: Whether it is a link within a page.
        level: "sup" or "sub" if its text is raised or lowered.
        is_note: Whether it says that it is the mark of a note.
        has_link: Whether it holds a link within a page.
        formulas: How many formulas were read before it.
        numbers: The numbers of its items, if it is an ordered list.
    """

    tag: str
    first_piece: int
    left_out: str = ""
    before: Snapshot | None = None
    level: str = ""
    links_to_note: bool = False
    is_note: bool = False
    has_link: bool = False
    formulas: int = 0
    numbers: ItemNumbers | None = None


BLOCKS = re.compile(
    "address|article|aside|blockquote|body|caption|d[dlt]|details|div|fig(caption|ure)|footer|form|header|hr|html|li|main|"
    "ol|p|pre|section|summary|table|t(body|foot|head|r)|ul|h[1-6]"
)
# Elements whose text a browser does not show, or shows as a control.
SKIPPED_TAGS = re.compile(
    "script|style|template|svg|nav|title|noscript|select|button|textarea|iframe|datalist|noframes|noembed|canvas|audio|"
    "video|annotation|annotation-xml"
)
# Of these, elements whose text is left out also without an end tag; what others hold may be the rest of the page.
_NEVER_TEXT = re.compile("script|style|template")
# What programs hide until the page is ready.
_WHOLE_PAGE = re.compile("html|body|main")
_DELETED = re.compile("del|s|strike")
_HIDING_STYLE = re.compile(
    r"(?:^|;)\s*(?:display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse)|(?:opacity|font-size)\s*:\s*0(?![.\d]*[1-9])|"
    r"(?:left|top|text-indent)\s*:\s*-\d{3,}|clip(?:-path)?\s*:\s*(?:rect\(\s*0|inset\(\s*50))",
    re.IGNORECASE,
)
_STRIKING_STYLE = re.compile(r"(?:^|;)\s*text-decoration(?:-line)?\s*:[^;]*line-through", re.IGNORECASE)
_VOID = re.compile("area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr")
# Elements that change nothing but the look of their text. Old pages leave thousands of them open.
_PLAIN = re.compile("abbr|b|bdi|big|center|cite|code|em|font|i|ins|kbd|mark|nobr|q|samp|small|span|strong|tt|u|var")
_SECTIONS = frozenset({"article", "main", "section", "blockquote"})
# What style sheets are made of.
_COMMENT = re.compile(r"/\*.*?\*/|<!--|-->", re.DOTALL)
# A rule that begins with @, with the rules inside it.
_AT_RULE = re.compile(r"@[^{};]*(?:;|\{(?:[^{}]|\{[^{}]*\})*\})")
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_SELECTOR = re.compile(r"(?P<tag>[\w-]*)(?:\.(?P<class>[\w-]+)|#(?P<id>[\w-]+))?")


def why_left_out(tag: str, attributes: Mapping[str, str], around: Collection[str]) -> str:
    """Why the text of an element is left out: "skipped", "menu", "hidden" or "deleted"; "" if it is read.

    Args:
        attributes: Its attributes, such as {"class": "note"}.
        around: The tags of the elements around it.
    """
    style = attributes.get("style", "")
    if _NEVER_TEXT.fullmatch(tag):
        return "skipped"
    is_page_footer = tag == "footer" and _SECTIONS.isdisjoint(around)
    has_menu_role = attributes.get("role") in ("navigation", "contentinfo")
    if is_page_footer or has_menu_role or SKIPPED_TAGS.fullmatch(tag) or tag == "rp":
        return "menu"
    if _WHOLE_PAGE.fullmatch(tag):
        return ""
    if _DELETED.fullmatch(tag) or _STRIKING_STYLE.search(style):
        return "deleted"
    is_hidden = "hidden" in attributes and attributes["hidden"] != "until-found"
    # Icons and the drawn form of a formula are hidden from screen readers; a block is, while a dialog covers it.
    is_drawing = attributes.get("aria-hidden") == "true" and not BLOCKS.fullmatch(tag)
    is_closed = tag == "dialog" and "open" not in attributes
    in_formula = tag == "math" or "math" in around
    if is_hidden or is_drawing or is_closed or (_HIDING_STYLE.search(style) and not in_formula):
        return "hidden"
    return ""


def must_end(element: OpenElement, around: Collection[OpenElement]) -> bool:
    """Whether the end of an element changes what is read.

    Other elements are not put on the stack, which old pages with thousands of open `<font>` would fill: each start tag
    searches it.
    """
    if _VOID.fullmatch(element.tag):
        return False
    is_plain = not (element.left_out or element.level or element.is_note) and _PLAIN.fullmatch(element.tag)
    # An end tag belongs to the last open element of its name.
    return not is_plain or any(outer.tag == element.tag for outer in around)


def place_of_outermost(
    open_elements: Sequence[OpenElement], ended: frozenset[str], around: frozenset[str]
) -> int | None:
    """The place of the outermost element of some tags that is inside all those around it; None if there is none.

    The search goes from the inside out and stops at an element around, such as the table in which a nested `<td>`
    stands, or at one that is left out, whose end alone says that reading goes on.
    """
    first = None
    for place in range(len(open_elements) - 1, -1, -1):
        element = open_elements[place]
        if element.tag in ended:
            first = place
        elif element.tag in around or element.left_out:
            break
    return first


class StyleSheets:
    """The declarations of the rules that were read so far, by their selectors."""

    def __init__(self) -> None:
        self._rules: dict[str, dict[str, str]] = {}

    def add_rules(self, text: str) -> None:
        """Add the rules of a `<style>` element."""
        text = _AT_RULE.sub("", _COMMENT.sub("", text))
        for selectors, declarations in _RULE.findall(text):
            for selector in map(str.strip, selectors.split(",")):
                if selector and _SELECTOR.fullmatch(selector):
                    self._rules.setdefault(selector, {}).update(_read_declarations(declarations))

    def style_of(self, tag: str, attributes: Mapping[str, str]) -> str:
        """The style of an element: its own declarations win, then those of rules for its id, classes and tag."""
        own = attributes.get("style", "")
        if not self._rules:
            return own
        declared: dict[str, str] = {}
        for selector in _matching_selectors(tag, attributes):
            declared |= self._rules.get(selector, {})
        declared |= _read_declarations(own)
        return ";".join(f"{name}:{value}" for name, value in declared.items())


def _matching_selectors(tag: str, attributes: Mapping[str, str]) -> Iterator[str]:
    """The selectors that fit an element, from the weakest to the strongest."""
    yield tag
    for name in attributes.get("class", "").split():
        yield f".{name}"
        yield f"{tag}.{name}"
    if attributes.get("id"):
        yield f"#{attributes['id']}"
        yield f"{tag}#{attributes['id']}"


def _read_declarations(declarations: str) -> dict[str, str]:
    """Declarations by their property; `!important` is dropped."""
    declared = {}
    for declaration in declarations.split(";"):
        name, colon, value = declaration.partition(":")
        if colon:
            declared[name.strip().lower()] = value.replace("!important", "").strip()
    return declared
