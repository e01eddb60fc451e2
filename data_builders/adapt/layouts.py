"""The layouts of other projects' files: from a row to the passages that it holds.

The names of a row's fields say which layout it is, so files of several projects need no option. Titles and ids stay as
they were published; passages without an id get one from their content where they are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from tripletune.core.data.contexts import own_passages
from tripletune.core.data.fields import checked, given, name_field, shown, text_field
from tripletune.core.data.pieces import split_passage
from tripletune.core.files import read_text
from tripletune.core.rows import Row, required_name, source_rows, whole_object
from tripletune.data_builders.readers.musique import marked_paragraphs
from tripletune.data_builders.readers.ras_labels import labelled_passages

# The fields that may hold the text of a row that is a passage, an article or a book.
_TEXTS = ("contents", "content", "body", "context", "text", "passage")
# The fields that hold the passages of a question: MuSiQue, IRCoT, HotpotQA and 2WikiMultiHopQA, Self-RAG, ALCE.
PASSAGE_COLUMNS = ("paragraphs", "contexts", "context", "ctxs", "top_contexts", "docs")
_QUESTION = ("question", "question_text", "query", "claim")
_SECTION = "Section::::"
# The other fields of a row that is a passage; all fields beside these are counted as not read.
_OF_PASSAGES = frozenset(
    (*_TEXTS, "title", "section", "id", "_id", "chunk_id", "triples", "extracted_triples", "generated_triple", "error")
)


class Adapted(StrEnum):
    """What `adapt_rows` counts, as the command prints it; the sizes of the graph of the triples are the last three."""

    ROWS = "rows"
    WITH_ALIASES = "questions with aliases"
    PASSAGES = "passages"
    WINDOWS = "windows"
    COPIES = "copies of passages, left out"
    RENAMED = "repeated ids, renamed"
    SECTIONS = "titles with their section"
    HEADINGS = "titles and headings among the paragraphs, no passages"
    WITHOUT_TEXT = "rows without text, left out"
    LEFT_WHOLE = "longer than --piece-limit, left whole"
    TRIPLES = "triples"
    FAILED = "chunks whose extraction failed, without triples"
    MALFORMED = "malformed triples, left out"
    NODES = "nodes"
    RELATIONS = "relations"
    DISTINCT_TRIPLES = "distinct triples"


class Reading(Protocol):
    """How the rows of a run are read.

    Attributes:
        piece_limit, piece_overlap: The most characters of a piece of an article or book, and of its overlap.
        counts: Counts by `Adapted`, and fields that are not read.
    """

    counts: Counter[str]

    piece_limit: int
    piece_overlap: int

    def add_content(self, content: str) -> bool:
        """Remember the content of a row; return whether no row before had it. A copy is counted."""


# The passages of a row, given its place; blank ones are counted by the caller.
Layout = Callable[[Row, str, Reading], Iterable[Row]]


def layout_of(row: Row, where: str) -> Layout:
    """The layout of a row.

    Raises:
        ValueError: The row has no passages, or is of no known layout; the message says what to do with it.
    """
    if "sub_queries" in row:
        return _labelled_sentences
    if "wikipedia_title" in row and isinstance(row.get("text"), list):
        return _kilt_paragraphs
    if _holds_question_passages(row):
        return _question_passages
    if isinstance(row.get("question"), list) and isinstance(row.get("output"), list):
        raise ValueError(
            f"{where}: this is the output of a run, which has no passages: score its answers with `tripletune eval run "
            "--system answers --answers FILE`"
        )
    present = [name for name in _TEXTS if name in row]
    if present and present[0] in ("body", "context"):
        return _article_pieces
    if present:
        return _row_as_passage
    if given(row, *_QUESTION, "input") is not None:
        raise ValueError(
            f"{where}: this is a question without passages, and `data adapt` makes corpora: give the file to "
            "`tripletune eval run --data`, and adapt the corpus that its paper searched"
        )
    advice = (
        'write the corpus as lines {"id", "title", "text"}, or make passages of documents, and of rows with other '
        "columns, with `tripletune build passages --documents FILE --output DIR`; files of a graph builder need --from"
    )
    if ".tsv:" in where or ".tsv.gz:" in where:
        advice = "the first line of a table names its columns: write DPR's above the first row (id, text, title)"
    raise ValueError(f"{where}: the layout of the row is unknown; it has {', '.join(row) or 'no fields'}: {advice}")


def adaptable_rows(location: str) -> Iterator[tuple[str, Row]]:
    """The rows of a file, of the list `docs` or `results` of a JSON object, or the object itself, after their places.

    A text file is one row. An object with `data` is a benchmark's file, which `source_rows` reads. In an object whose
    values all have a `content`, the names are ids.
    """
    if Path(location).suffix == ".txt" and Path(location).is_file():
        text = read_text(location).strip()
        if text[:1] not in ("{", "["):  # these begin JSON
            yield location, {"context": text}
            return
    whole = whole_object(location)
    if whole is None or "data" in whole:
        yield from source_rows(location)
        return
    if whole and all(isinstance(value, dict) and "content" in value for value in whole.values()):
        for name, row in whole.items():
            yield f"{location}: {name}", {"id": name, **row}
        return
    rows = None
    if given(whole, *_QUESTION) is None:
        rows = given(checked(whole, location, {"docs?": [{}], "results?": [{}]}), "docs", "results")
    if rows is None:
        rows = [whole]
    for number, row in enumerate(rows, 1):
        yield f"{location}: {number}", row


def _holds_question_passages(row: Row) -> bool:
    """Whether a row is a question with a list of passages; the context of UltraDomain's rows is the text of a book."""
    for name in PASSAGE_COLUMNS:
        value = row.get(name)
        is_text = isinstance(value, str) and value.strip()[:1] not in ("[", "{")
        if value and not is_text and given(row, *_QUESTION) is not None:
            return True
    return False


def _question_passages(row: Row, where: str, reading: Reading) -> Iterator[Row]:
    """The passages that a benchmark prints beside a question: IRCoT makes its corpora of them."""
    # IRCoT's contexts have MuSiQue's layout, RAGAS's are texts.
    name = "contexts" if "answers_objects" in row else "paragraphs"
    if given(row, name) is not None:
        passages = marked_paragraphs(row, where, name).passages
    else:
        passages = own_passages(row, where, blank_texts=True)
    for passage in passages:
        if reading.add_content(passage.key):
            yield {"title": passage.title, "id": passage.id, "text": passage.text}


def _kilt_paragraphs(row: Row, where: str, reading: Reading) -> Iterator[Row]:
    """The paragraphs of a page of KILT's knowledge source (Petroni et al., 2021), `{"wikipedia_title", "text": […]}`.

    The id is PAGE_PARAGRAPH, as the questions' provenance counts them. The first paragraph is the page's title, and a
    line `Section::::NAME` is the heading of the paragraphs after it, so both are no passages.
    """
    title = required_name(row, where, "wikipedia_title")
    page = required_name(row, where, "wikipedia_id", "_id")
    heading = ""
    for number, text in enumerate(checked(row, where, {"text": [str]})["text"]):
        stripped = text.strip()
        if stripped.startswith(_SECTION):
            heading = stripped.removeprefix(_SECTION).rstrip(".")
            reading.counts[Adapted.HEADINGS] += 1
        elif not number and stripped == title:
            reading.counts[Adapted.HEADINGS] += 1
        else:
            passage = {"title": title, "id": f"{page}_{number}", "text": stripped}
            if heading:
                passage["heading"] = heading
            yield passage


def _labelled_sentences(row: Row, where: str, reading: Reading) -> Iterator[Row]:
    """The sentences of a question that RAS's authors labelled; `reading.add_content` counts copies, which are left out.

    Questions share sentences, and a corpus has each passage once.
    """
    for passage in labelled_passages(row, where):
        if reading.add_content(passage.content):
            yield {"title": passage.title, "text": passage.text}


def _article_pieces(row: Row, where: str, reading: Reading) -> Iterator[Row]:
    """The pieces of an article or book, each book once: UltraDomain repeats it with each question on it.

    A blank text gives one blank piece.
    """
    text = text_field(row, where, *(name for name in ("body", "context") if name in row)).strip()
    meta = row.get("meta")
    own_title = name_field(row, where, "title")
    title = name_field(row, where, "corpus_name") or own_title
    if not title and isinstance(meta, dict):
        title = name_field(meta, where, "title")
    if text and not reading.add_content(f"{title}\n{text}"):
        return
    for piece in split_passage(text, reading.piece_limit, reading.piece_overlap) or [""]:
        yield {"title": title, "text": piece}


def _row_as_passage(row: Row, where: str, reading: Reading) -> Iterator[Row]:
    """A row as a passage, with its triples if it has a list of them.

    FlashRAG, Search-R1 and HippoRAG's OpenIE files write the title as the first line of the text. A section is part
    of the title, as Atlas itself reads its files: its name is what tells the passages of an article apart.
    """
    text_name = next(name for name in _TEXTS if name in row)
    title = name_field(row, where, "title")
    text = text_field(row, where, text_name).strip()
    holds_title = text_name == "contents" or (text_name == "passage" and "title" not in row)
    if holds_title and "\n" in text:
        first_line, _, body = text.partition("\n")
        title = first_line.strip()
        text = body.strip()
        if text_name == "contents" and len(title) > 1 and title[0] == title[-1] == '"':
            # wiki-18 has titles in quotation marks: of `""Weird Al" Yankovic"` the outer ones are not the title's.
            title = title[1:-1]
    section = name_field(row, where, "section").strip()
    if section:
        reading.counts[Adapted.SECTIONS] += 1
        title = f"{title}: {section}" if title.strip() else section
    for name in row.keys() - _OF_PASSAGES:
        reading.counts[f"rows with {name}, which is not read"] += 1
    passage: Row = {"title": title}
    identity = name_field(row, where, "id", "_id", "chunk_id")
    if identity:
        passage["id"] = identity
    passage["text"] = text
    if "extracted_triples" in row or "triples" in row:
        triples = given(row, "extracted_triples", "triples") or []
        if not isinstance(triples, list):
            raise ValueError(f"{where}: the triples must be a list, found {shown(triples)}")
        if "chunk_id" in row or any(isinstance(entry, dict) and "triple" in entry for entry in triples):
            # TH-RAG: triples with sentences and labels, which its graph is made of.
            passage["statements"] = triples
            triples = [entry["triple"] for entry in triples if isinstance(entry, dict) and "triple" in entry]
        passage["triples"] = triples
    yield passage
