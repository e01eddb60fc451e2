"""Open elements of HTML: what is kept of them while they are read, and which start tags end them."""

from __future__ import annotations

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
