"""Read documents as paragraphs under headings: text, Markdown, HTML, DOCX, PDF, and rows with a text column.

`markdown-it-py` converts Markdown to HTML, `mammoth` converts DOCX, and PDFium reads PDF. Text, HTML and rows are
streamed, PDF is read page by page, Markdown is converted a few MiB at a time, and DOCX as a whole.
"""

from __future__ import annotations

import codecs
import csv
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from html.parser import HTMLParser
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import regex

from tripletune.core.data.fields import name_field, text_field
from tripletune.core.rows import Row, source_rows

TEXTS = ("text", "contents", "content", "body", "passage", "context", "page_content")
TITLES = ("title", "name", "heading", "subject")
_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe\0\0": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
# Encodings of a text whose non-ASCII words have few, or mostly, bytes that are not ASCII.
_LATIN = ["cp1252", "cp1250", "cp1254", "cp1257"]
_OTHERS = ["cp1251", "koi8_r", "cp1253", "cp1255", "cp1256", "cp932", "euc_jp", "gb18030", "big5", "euc_kr"]
# Bytes that decide the encoding; characters after which a paragraph is cut; characters that are converted at once.
_SAMPLE, _PARAGRAPH, _PART = 1 << 16, 1 << 16, 1 << 20
# A longer heading is a paragraph in a large font.
_LONGEST_HEADING = 200
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n[\"']?\w[\w.-]*[\"']?:\s.*?\n(?:---|\.\.\.)[ \t]*\n", re.DOTALL)
# Start of a page that may end a sentence of the previous page.
_SENTENCE_END = regex.compile(r"\p{Ll}.{0,600}?[.!?…](?=\s|$)", regex.DOTALL)
# HTML tags without text, tags that begin and end a paragraph, and headings.
_SKIPPED = re.compile("script|style|template|svg|nav|title|noscript|select|button")
_HIDING = re.compile(rf"<(?=(/?)(?:{_SKIPPED.pattern})[\s/>])", re.IGNORECASE)
_BLOCKS = re.compile(
    "address|article|aside|blockquote|body|caption|d[dlt]|details|div|fig(caption|ure)|footer|form|header|hr|html|li|main|"
    "ol|p|pre|section|summary|table|t(body|foot|head|r)|ul|h[1-6]"
)
_HEADING = re.compile("h[1-6]")
_IN_CELL = re.compile("blockquote|d[dlt]|div|li|ol|p|pre|ul")
# The encoding that HTML declares; UTF-16 would have a byte-order mark.
_DECLARED = re.compile(rb"<(?:meta|\?xml)\s[^<>]*?(?:charset|encoding)\s*=\s*[\"']?(?!utf)([\w-]+)", re.IGNORECASE)


class Block(NamedTuple):
    """A paragraph: its text, the headings above it, and its page in a PDF or row in a table."""

    text: str
    heading: tuple[str, ...] = ()
    page: int | None = None
    row: int | None = None


class Unreadable(ValueError):
    """A document gives no text; the message is a general reason, a colon and details."""


def read_blocks(path: Path, texts: Iterable[str], titles: Iterable[str], notes: Counter[str]) -> Iterator[Block]:
    """Yield the paragraphs of a document; `notes` counts oddities.

    For files with rows, `texts` and `titles` are the possible names of the columns. A file that can't be read to its
    end raises `Unreadable`.
    """
    found, ending = False, path.suffix.lower()
    if not path.stat().st_size:
        raise Unreadable("empty")
    try:
        table = _TABLES[ending](path, notes) if ending in _TABLES else None
        for block in _READERS[ending](path, notes) if table is None else _rows(table, texts, titles, notes):
            # Soft hyphens would hide words from a search.
            text, *heading = (re.sub("\xad\n?", "", part) for part in (block.text, *block.heading))
            if text.strip():
                found = True
                yield block._replace(text=text, heading=tuple(heading))
    except (Unreadable, ImportError):
        raise
    except Exception as error:  # the parsers of foreign formats raise all kinds
        said = str(error).removeprefix(f"{path}:").strip()
        raise Unreadable(f"damaged: {said or type(error).__name__}") from None
    if not found:
        raise Unreadable("without text" + (": scanned pages?" if notes["pages without text"] else ""))


def _text(path: Path, notes: Counter[str]) -> Iterator[Block]:
    with _open(path, notes) as file:
        yield from map(Block, _paragraphs(file))


def _paragraphs(file: IO[str]) -> Iterator[str]:
    """Yield the lines up to each blank line; an overlong paragraph is cut."""
    text = ""
    while line := file.readline(_PARAGRAPH):
        text += line
        if not line.strip() or len(text) > _PARAGRAPH:
            yield text
            text = ""
    yield text


def _markdown(path: Path, notes: Counter[str]) -> Iterator[Block]:
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark").enable("table")
    for kind in ("html_block", "html_inline"):
        reader.add_render_rule(kind, _raw_html)

    def parts(file: IO[str]) -> Iterator[str]:
        text = _FRONT_MATTER.sub("", file.read(_SAMPLE))
        for paragraph in _paragraphs(file):
            text += paragraph
            if len(text) > _PART:
                yield reader.render(text)
                text = ""
        yield reader.render(text)

    with _open(path, notes) as file:
        yield from _Html().blocks(parts(file))


def _raw_html(_: Any, tokens: Any, place: int, *_more: Any) -> str:
    """HTML inside Markdown; a tag that would hide the text after it is text, such as the placeholder `<title>`."""
    raw, ends = tokens[place].content, _HIDING.findall(tokens[place].content)
    closed = tokens[place].type == "html_block" and ends.count("/") == ends.count("")
    return raw if closed else _HIDING.sub("&lt;", raw)


def _html(path: Path, notes: Counter[str]) -> Iterator[Block]:
    with _open(path, notes) as file:
        yield from _Html().blocks(iter(lambda: file.read(_SAMPLE), ""))


def _docx(path: Path, notes: Counter[str]) -> Iterator[Block]:
    import mammoth

    no_image = mammoth.images.img_element(lambda image: {})
    with path.open("rb") as file:
        made = mammoth.convert_to_html(file, convert_image=no_image, style_map="p[style-name='Title'] => h1:fresh")
    yield from _Html().blocks([made.value])


class _Html(HTMLParser):
    """Reads the paragraphs of HTML; the cells of a table row become one paragraph, separated by bars."""

    def __init__(self) -> None:
        super().__init__()
        self._ready, self._parts, self._path, self._skipped = list[Block](), list[str](), dict[str, str](), 0
        self._bare, self._cell = "", False  # the level of a heading that has no text yet; inside a cell

    def blocks(self, texts: Iterable[str]) -> Iterator[Block]:
        for text in texts:
            self.feed(text)
            yield from self._ready
            self._ready.clear()
        self.close()
        self._end()
        self._close_heading()
        yield from self._ready

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._skipped = 0 if tag == "main" else self._skipped + (_SKIPPED.fullmatch(tag) is not None)
        if tag in ("td", "th"):
            self._cell = True
            self._parts.append(" | " if "".join(self._parts).strip() else "")
        elif tag == "br" or (self._cell and _IN_CELL.fullmatch(tag)):
            self._parts.append(" ")
        elif _BLOCKS.fullmatch(tag):
            self._end()

    def handle_endtag(self, tag: str) -> None:
        self._skipped = max(self._skipped - (_SKIPPED.fullmatch(tag) is not None), 0)
        if self._cell and _IN_CELL.fullmatch(tag):
            self._parts.append(" ")
        elif _BLOCKS.fullmatch(tag):
            self._end(tag)

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._parts.append(data)

    def _end(self, tag: str = "") -> None:
        """Store the text read so far as a heading or a paragraph."""
        text = " ".join("".join(self._parts).split())
        self._parts.clear()
        self._cell = False
        if _HEADING.fullmatch(tag) and 0 < len(text) <= _LONGEST_HEADING:
            self._close_heading(tag)
            above = {level: name for level, name in self._path.items() if level < tag}
            self._path, self._bare = above | {tag: text.rstrip("¶ ")}, tag  # Sphinx and others link a heading to itself
        elif text:
            self._ready.append(Block(text, tuple(self._path.values())))
            self._bare = ""

    def _close_heading(self, tag: str = "h1") -> None:
        """Store a heading without text and sub-headings as a paragraph."""
        if self._bare >= tag:
            *above, name = self._path.values()
            self._ready.append(Block(name, tuple(above)))


def _pdf(path: Path, notes: Counter[str]) -> Iterator[Block]:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        raise Unreadable("needs a password" if "assword" in str(error) else f"damaged: {error}") from None
    with closing(document):
        marks: dict[int | None, list[tuple[int, str]]] = {}
        for mark in document.get_toc():
            place = mark.get_dest()
            marks.setdefault(place and place.get_index(), []).append((mark.level, " ".join(mark.get_title().split())))
        heading, before = list[str](), Block("")
        for number in range(len(document)):
            text = _page_text(document, number, notes)
            # The end of a sentence that began on the previous page.
            if before.text and before.text[-1] not in ".!?:;…" and (end := _SENTENCE_END.match(text)):
                before, text = before._replace(text=f"{before.text} {end[0]}"), text[end.end() :].strip()
            for level, title in marks.get(number, ()):
                # The text above the heading on this page belongs to the previous heading.
                words = r"\s+".join(map(re.escape, title.split()))
                if title and (found := re.search(rf"^[\W\d]*{words}\s*$", text, re.MULTILINE)):
                    yield before
                    before = Block(text[: found.start()].strip(), tuple(heading), number + 1)
                    text = text[found.end() :].strip()
                heading = [*heading[:level], title]
            yield before
            before = Block(text, tuple(heading), number + 1)
        yield before


def _page_text(document: Any, number: int, notes: Counter[str]) -> str:
    from pypdfium2 import PdfiumError

    text = ""
    try:
        with closing(document[number]) as page, closing(page.get_textpage()) as found:
            # U+FFFE is a hyphen at the end of a line.
            text = found.get_text_range().replace("\ufffe", "").strip()
            notes["pages without text"] += not text
    except PdfiumError:
        notes["pages that can't be read"] += 1
    return text


def _csv(path: Path, notes: Counter[str]) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(sys.maxsize)
    with _open(path, notes, newline="") as file:
        head = file.readline(_PARAGRAPH)
        file.seek(0)
        mark = max("\t;,|", key=head.count)
        for number, row in enumerate(csv.DictReader(file, delimiter=mark, skipinitialspace=True), 1):
            notes["rows with more fields than the header"] += None in row
            joined = mark == "\t" and any("\n" in value and mark in value for value in map(str, row.values()))
            notes["rows that a quote without end seems to join"] += joined
            yield f"row {number}", {str(name): value for name, value in row.items()}


def _rows(
    rows: Iterable[tuple[str, Row]], texts: Iterable[str], titles: Iterable[str], notes: Counter[str]
) -> Iterator[Block]:
    known, names = False, dict[str, None]()
    for number, (where, row) in enumerate(rows, 1):
        known, names = known or not row.keys().isdisjoint(texts), names or dict.fromkeys(row)
        text, title = text_field(row, where, *texts), " ".join(name_field(row, where, *titles).split())
        notes["rows without text"] += not text.strip()
        for paragraph in re.split(r"\n\s*\n", text):
            yield Block(paragraph, (title,) if title else (), row=number)
    if not known:
        raise Unreadable(f"no text column: the columns are {', '.join(names) or 'none'}; name one with --text-column")


def _open(path: Path, notes: Counter[str], newline: str | None = None) -> IO[str]:
    encoding = _encoding(path, notes)
    notes[f"read as {encoding}"] += not encoding.startswith("utf-8")
    return path.open(encoding=encoding, errors="replace", newline=newline)


def _encoding(path: Path, notes: Counter[str]) -> str:
    """The encoding of a text file: from its byte-order mark, UTF-8 if most of it is valid, as declared, or a guess."""
    with path.open("rb") as file:
        sample = file.read(_SAMPLE)
        if marked := next((name for mark, name in _MARKS.items() if sample.startswith(mark)), None):
            return marked
        if sample.count(0) > len(sample) / 100:
            raise Unreadable("binary")
        valid = characters = 0
        for part in codecs.iterdecode(chain([sample], iter(lambda: file.read(_SAMPLE), b"")), "utf-8", "ignore"):
            valid, characters = valid + len(part.encode()), characters + len(part)
        # In UTF-8, a character that is not ASCII has one to three more bytes.
        if (broken := file.tell() - valid) <= valid - characters:
            notes["bytes that are not UTF-8"] += broken
            return "utf-8"
        if _READERS.get(path.suffix.lower()) is _html and (found := _DECLARED.search(sample)):
            with suppress(LookupError, UnicodeError), path.open(encoding=found[1].decode()) as text:
                # Windows pages declare ISO 8859, in which their punctuation would be control characters.
                if not any(map(re.compile("[\x80-\x9f]").search, iter(lambda: text.read(_SAMPLE), ""))):
                    return text.encoding
        file.seek(0)
        lines = (line for line in iter(lambda: file.readline(_SAMPLE), b"") if not line.isascii())
        return _guess(b"".join(islice(lines, 200)))


def _guess(sample: bytes) -> str:
    from charset_normalizer import from_bytes

    words = b"".join(word for word in sample.split() if not word.isascii())
    latin = sum(byte > 127 for byte in words) < len(words) / 2
    matches = from_bytes(sample, cp_isolation=_LATIN if latin else _OTHERS)
    if (best := matches.best()) is None:
        raise Unreadable("binary")
    # A short text does not tell the accents of Western languages from those of other languages.
    equal = [one for one in matches if (one.chaos, one.coherence) == (best.chaos, best.coherence)]
    return "cp1252" if any("cp1252" in one.could_be_from_charset for one in equal) else best.encoding


_Reader = Callable[[Path, Counter[str]], Iterator[Any]]
_READERS: dict[str, _Reader] = {
    **dict.fromkeys((".txt", ".text", ".rst"), _text),
    **dict.fromkeys((".md", ".markdown"), _markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _html),
    **{".docx": _docx, ".pdf": _pdf},
}
_TABLES: dict[str, _Reader] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json", ".parquet"), lambda path, notes: source_rows(str(path))),
    **dict.fromkeys((".csv", ".tsv"), _csv),
}
ENDINGS = {*_READERS, *_TABLES}
