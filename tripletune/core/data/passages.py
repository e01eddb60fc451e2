"""Passages, the units of retrieval, and corpora: one JSON object `{"title", "text"}` per line, maybe with "id"."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tripletune.core.data.fields import name_field, text_field
from tripletune.core.data.jsonl import read_jsonl

# The corpus file in a folder of passages.
CORPUS = "corpus.jsonl"
# The fields that cite a passage, and the length from which a field holds something else.
SOURCE = ("document", "page", "heading")
_LONGEST = 1000
# White space between two numbers, of which the second may have a sign.
_BETWEEN_NUMBERS = re.compile(r"(?<=\d)\s+(?=[+\-−]?\d)")
# Characters of a label that is made of the text.
_LABEL = 60


@dataclass(frozen=True, slots=True)
class Passage:
    """A unit of retrieval. `id` comes from the corpus, or else depends only on title and text.

    `source` holds document, page and heading for citations, if the corpus has them.
    """

    title: str
    text: str
    id: str = ""
    source: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", passage_id(self.title, self.text))

    @classmethod
    def from_json(cls, row: dict[str, Any], where: str) -> Passage:
        """Read a row of a corpus or of triples; `where` (file and line) opens every error message."""
        title, text = name_field(row, where, "title"), text_field(row, where, "text")
        source = {}
        for name in SOURCE:
            value = row.get(name)
            # In some corpora these fields hold something else, for example a whole document.
            if isinstance(value, (str, int)) and 0 < len(str(value)) < _LONGEST:
                source[name] = value
        return cls(title, text, name_field(row, where, "id", "_id"), source)

    @property
    def label(self) -> str:
        """A short name to show: the title, or the first words of the text, cut between words."""
        if self.title:
            return self.title
        words = " ".join(self.text[:_LABEL].split())
        if len(self.text) <= _LABEL:
            return words
        # The last word may be cut off.
        whole_words = words.rpartition(" ")[0] or words
        return f"{whole_words}…"

    @property
    def content(self) -> str:
        """Title and text as one string, which is indexed and shown to readers."""
        return f"{self.title}\n{self.text}" if self.title else self.text

    @property
    def key(self) -> str:
        """The passage's key in stores of triples: a digest of title and text after NFKC, without white space.

        Copies of a paragraph differ in spaces. Only those between two numbers are kept, since they tell "1 12" from
        "11 2".
        `id` can't be the key, because a corpus may set it.
        """
        title, text = [_without_spaces(unicodedata.normalize("NFKC", field)) for field in (self.title, self.text)]
        return passage_id(title, text)


def _without_spaces(text: str) -> str:
    """A text with no other white space than one space between two numbers."""
    return "".join(_BETWEEN_NUMBERS.sub("\0", text).split()).replace("\0", " ")


def passage_id(title: str, text: str) -> str:
    """A digest of a passage's content, as sixteen hexadecimal digits.

    Corpora without ids get these, and results, gold links and triple stores refer to them. Another digest would make
    every stored reference point to nothing.
    """
    return hashlib.blake2b(f"{title}\n{text}".encode(), digest_size=8).hexdigest()


def corpus_file(path: str | Path) -> Path:
    """The JSON-lines file of a corpus: the path itself, or the file in a folder of `tripletune build passages`."""
    path = Path(path)
    if not path.is_dir():
        return path
    if not (path / CORPUS).is_file():
        raise FileNotFoundError(
            f"{path} is a folder without {CORPUS}: give a file, or turn documents into passages with `tripletune build "
            f"passages --documents {path} --output DIR`"
        )
    return path / CORPUS


def passages_by_key(path: str | Path, keys: Collection[str]) -> dict[str, Passage]:
    """The first passage of a corpus with each of some `Passage.key`; the corpus is read only if keys are wanted."""
    passages: dict[str, Passage] = {}
    if not keys:
        return passages
    for passage in read_corpus(path):
        key = passage.key
        if key in keys:
            passages.setdefault(key, passage)
    return passages


def passages_by_name(path: str | Path, names: Collection[str]) -> dict[str, Passage]:
    """The passage of each name that names exactly one passage of a corpus: by its id, or else by its title.

    The corpus is read once, only if names are wanted, and only the named passages stay in memory. Titles may repeat,
    and then name no passage.
    """
    if not names:
        return {}
    by_id: dict[str, Passage] = {}
    by_title: dict[str, list[Passage]] = {}
    for passage in read_corpus(path):
        if passage.id in names:
            by_id[passage.id] = passage
        if passage.title in names:
            by_title.setdefault(passage.title, []).append(passage)
    passages = {}
    for title, with_title in by_title.items():
        if len(with_title) == 1:
            passages[title] = with_title[0]
    # What is an id of one passage and the title of another is read as the id.
    return passages | by_id


def read_corpus(path: str | Path, blank_texts: bool = False) -> Iterator[Passage]:
    """Stream a corpus; a line without "text" is an error, and so is an empty or null text unless `blank_texts`.

    A line without the field is of another layout, whose text would be lost without a word.
    """
    path = corpus_file(path)
    empty = True
    for where, row in read_jsonl(path):
        passage = Passage.from_json(row, where)
        may_be_blank = blank_texts and "text" in row
        if not passage.text and not may_be_blank:
            raise ValueError(
                f'{where}: a passage needs a non-empty "text"; the line has {", ".join(row) or "nothing"} (`tripletune '
                f"build passages --documents {path} --output DIR` reads texts of other columns, `tripletune data "
                "adapt` rewrites files of other projects)"
            )
        empty = False
        yield passage
    if empty:
        raise ValueError(f'{path}: the corpus is empty; it needs at least one line {{"title": …, "text": …}}')
