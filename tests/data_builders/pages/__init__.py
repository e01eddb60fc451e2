"""Thirty documents in the manner of real ones, with their text by hand: what a reader of the page would say it states.

`facts` are statements that must be in an extracted text, `wrong` are texts that would make another statement of the
page. `tests/data_builders/test_pages.py` reads them, `benchmarks/pages.py` compares extractors on them.
"""

from typing import NamedTuple


class Page(NamedTuple):
    """A document, and what it says.

    Attributes:
        name: The name of its file.
        content: Its bytes, or its text.
        text: Its paragraphs, headings, table rows and notes in reading order.
        facts: Statements, with white space folded.
        wrong: Wrong statements, and those that are hidden or deleted; menus and the like are not among them.
    """

    name: str
    content: bytes | str
    text: str
    facts: tuple[str, ...]
    wrong: tuple[str, ...] = ()
