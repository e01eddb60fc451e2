"""Passages and the corpora they come from: one JSON object per line, `{"title", "text"}` and optionally `"id"`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tripletune.models.data.records import read_jsonl


@dataclass(frozen=True, slots=True)
class Passage:
    """A unit of retrieval. `id` is stable: it depends on title and text alone unless the corpus names one."""

    title: str
    text: str
    id: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", passage_id(self.title, self.text))

    @property
    def content(self) -> str:
        """Title and text as one string, the form that is indexed and shown to readers."""
        return f"{self.title}\n{self.text}" if self.title else self.text


def passage_id(title: str, text: str) -> str:
    """Sixteen hexadecimal digits that name a passage by its content."""
    return hashlib.blake2b(f"{title}\n{text}".encode(), digest_size=8).hexdigest()


def read_corpus(path: str | Path) -> Iterator[Passage]:
    """Stream a JSON-lines corpus.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line lacks a text, or the file holds no passage at all.
    """
    empty = True
    for where, row in read_jsonl(path):
        text = row.get("text")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f'{where}: a passage needs a non-empty "text"; the line has {", ".join(row) or "nothing"}')
        empty = False
        yield Passage(str(row.get("title") or ""), text, str(row.get("id") or ""))
    if empty:
        raise ValueError(f'{path}: the corpus is empty; it needs at least one line {{"title": …, "text": …}}')
