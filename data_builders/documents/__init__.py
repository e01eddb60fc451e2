"""Documents become passages: a reader of each format, and the cutting (`build.py`)."""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """A paragraph of a document.

    Attributes:
        heading: The headings above it, from the top down.
        page: Its page in a PDF, counted from 1.
        row: Its row in a table, counted from 1.
        is_heading: Whether the text is a heading below which there is no text.
    """

    text: str
    heading: tuple[str, ...] = ()
    page: int | None = None
    row: int | None = None
    is_heading: bool = False


class Unreadable(ValueError):
    """A document gives no text; the message is a general reason, a colon and details."""
