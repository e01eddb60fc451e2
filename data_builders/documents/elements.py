"""Elements of HTML: what is kept of open ones, which start tags end them, and which a reader sees as text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tripletune.data_builders.documents.tables import TableRows

# Elements whose end tag may be missing: the tags that end them, and the elements beyond which nothing is ended.
_LISTS = frozenset({"ul", "ol", "dl"})
_TABLES = frozenset({"table"})
ROWS = frozenset({"thead", "tbody", "tfoot"})
ENDED_BY = {
    "li": (frozenset({"li"}), _LISTS),
    "dt": (frozenset({"dt", "dd"}), _LISTS),
    "dd": (frozenset({"dt", "dd"}), _LISTS),
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
_SECTIONS = frozenset({"article", "main", "section", "blockquote"})


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
