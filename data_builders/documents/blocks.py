"""Read documents as paragraphs under headings: text, Markdown, HTML, DOCX, PDF, and rows with a text column.

`markdown-it-py` converts Markdown to HTML, `mammoth` converts DOCX, and PDFium reads PDF. Text, HTML and rows are
streamed, Markdown is converted a few MiB at a time, DOCX as a whole. Of a PDF, the lines of all pages are in memory,
since headers and footers are known by their repetition.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tripletune.core.data.fields import given, name_field, text_field
from tripletune.core.rows import Row, source_rows
from tripletune.data_builders.documents import Block, Unreadable
from tripletune.data_builders.documents.elements import SKIPPED_TAGS
from tripletune.data_builders.documents.encodings import open_text
from tripletune.data_builders.documents.front_matter import without_front_matter
from tripletune.data_builders.documents.html import html_blocks
from tripletune.data_builders.documents.line_breaks import join_cut_words, word_counts
from tripletune.data_builders.documents.pdf import pdf_blocks
from tripletune.data_builders.documents.word import readable_docx

if TYPE_CHECKING:
    from markdown_it.token import Token

TEXTS = ("text", "contents", "content", "body", "passage", "context", "page_content")
TITLES = ("title", "name", "heading", "subject")
# Characters that are read at once; after which a paragraph is cut; of Markdown that are converted at once.
_READ = 1 << 16
_LONGEST_PARAGRAPH = 1 << 16
_CONVERTED = 1 << 20
# A note of Markdown, with its label, and its mark in the text.
_NOTE = re.compile(r"^ {0,3}\[\^([^\]\s]+)\]:[ \t]*", re.MULTILINE)
_NOTE_MARK = re.compile(r"\[\^([^\]\s]+)\]")
# What Obsidian adds: comments on a line or on lines between two marks, and links by the name of a page.
_VAULT_COMMENT = re.compile(r"(?<!\S)%%(?!%)[^%\n]+%%(?!\S)|^%%[ \t]*\n.*?\n%%[ \t]*$", re.MULTILINE | re.DOTALL)
_VAULT_LINK = re.compile(
    r"(?P<embeds>!?)\[\[(?P<page>[^\W\d_][^\[\]|#\n]*)(?:#[^\[\]|\n]*)?(?:\\?\|(?P<text>[^\[\]\n]+))?\]\](?!\()"
)
# A Word document's title is above its headings, which are therefore one level lower than mammoth has them.
_WORD_STYLES = ("p.Heading{0}", "p[style-name='Heading {0}']", "p[style-name='heading {0}']")
_WORD_HEADINGS = ["p[style-name='Title'] => h1:fresh"]
for _level in range(1, 7):
    _WORD_HEADINGS += [f"{style.format(_level)} => h{min(_level + 1, 6)}:fresh" for style in _WORD_STYLES]
# A tag that would hide the text after it; the group is "/" if it is an end tag.
_HIDING = re.compile(rf"<(?=(/?)(?:{SKIPPED_TAGS.pattern})[\s/>])", re.IGNORECASE)


def read_blocks(path: Path, texts: Iterable[str], titles: Iterable[str], notes: Counter[str]) -> Iterator[Block]:
    """Yield the paragraphs of a document.

    Args:
        texts: The names of text columns, for files with rows: of `TEXTS`, the first with a value is read; of other
            names, all are.
        titles: The possible names of the title column.
        notes: Counts oddities.

    Raises:
        Unreadable: The file can't be read to its end, or has no text.
    """
    if not path.stat().st_size:
        raise Unreadable("empty")
    ending = path.suffix.lower()
    has_text = False
    try:
        if ending in TABLE_FORMATS:
            blocks = _table_blocks(TABLE_FORMATS[ending](path, notes), texts, titles, notes)
        else:
            blocks = FORMATS[ending](path, notes)
        for block in blocks:
            text = _without_soft_hyphens(block.text)
            if text.strip():
                has_text = True
                yield block._replace(text=text, heading=tuple(map(_without_soft_hyphens, block.heading)))
    except (Unreadable, ImportError):
        raise
    except Exception as error:  # the parsers of foreign formats raise all kinds
        problem = str(error).removeprefix(f"{path}:").strip()
        raise Unreadable(f"damaged: {problem or type(error).__name__}") from None
    if not has_text and notes["pages without text"]:
        raise Unreadable("without text: scanned pages?")
    if not has_text:
        raise Unreadable("without text")


def _without_soft_hyphens(text: str) -> str:
    """A text without soft hyphens, which would hide words from a search."""
    return re.sub("\xad\n?", "", text)


def _blocks_of_text(path: Path, notes: Counter[str]) -> Iterator[Block]:
    """The paragraphs of plain text, between blank lines, with words put together that a line break cuts."""
    with open_text(path, notes) as file:
        for paragraph in _split_at_blank_lines(file):
            yield Block(join_cut_words(paragraph, word_counts([paragraph])))


def _split_at_blank_lines(file: IO[str]) -> Iterator[str]:
    """Yield the lines up to each blank line; a paragraph of more than `_LONGEST_PARAGRAPH` characters is cut."""
    text = ""
    while line := file.readline(_LONGEST_PARAGRAPH):
        text += line
        if not line.strip() or len(text) > _LONGEST_PARAGRAPH:
            yield text
            text = ""
    yield text


def _blocks_of_markdown(path: Path, notes: Counter[str]) -> Iterator[Block]:
    """The paragraphs of Markdown, by way of HTML, so that both have one reader."""
    with open_text(path, notes) as file:
        yield from html_blocks(_markdown_as_html(file), notes)


def _markdown_as_html(file: IO[str]) -> Iterator[str]:
    """Convert Markdown without its front matter, a few paragraphs at a time.

    So a large file is never in memory as a whole, with the converter's tokens. It is cut at blank lines only, so that
    no paragraph is cut in two.
    """
    from markdown_it import MarkdownIt

    converter = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    converter.add_render_rule("html_block", _render_html_in_markdown)
    converter.add_render_rule("html_inline", _render_html_in_markdown)
    text = without_front_matter(file.read(_READ))
    for paragraph in _split_at_blank_lines(file):
        text += paragraph
        if len(text) > _CONVERTED:
            yield converter.render(_as_commonmark(text))
            text = ""
    yield converter.render(_as_commonmark(text))


def _as_commonmark(text: str) -> str:
    """Markdown without what CommonMark does not know: Obsidian's comments and links, and the marks of notes, `[^1]`.

    A link reads as its own text, or as the title of the page that it names. The notes themselves are paragraphs.
    """
    text = _VAULT_COMMENT.sub("", text)
    text = _VAULT_LINK.sub(lambda link: "" if link["embeds"] else link["text"] or link["page"], text)
    labels = set(_NOTE.findall(text))
    if not labels:
        return text
    text = _NOTE.sub("", text)
    return _NOTE_MARK.sub(lambda mark: "" if mark[1] in labels else mark[0], text)


def _render_html_in_markdown(_renderer: object, tokens: Sequence[Token], place: int, *_: object) -> str:
    """The HTML at a place of the tokens of Markdown, as markdown-it's render rules are called.

    A tag that would hide the text after it is text, such as the placeholder `<title>`.
    """
    token = tokens[place]
    slashes = _HIDING.findall(token.content)
    hides_no_more = token.type == "html_block" and slashes.count("/") == slashes.count("")
    if hides_no_more:
        return token.content
    return _HIDING.sub("&lt;", token.content)


def _blocks_of_html(path: Path, notes: Counter[str]) -> Iterator[Block]:
    """The paragraphs of HTML, read a piece at a time."""
    with open_text(path, notes, may_declare=True) as file:
        yield from html_blocks(iter(partial(file.read, _READ), ""), notes)


def _blocks_of_docx(path: Path, notes: Counter[str]) -> Iterator[Block]:
    """The paragraphs of a Word document, by way of HTML; images are not read."""
    import mammoth

    no_image = mammoth.images.img_element(lambda image: {})
    with readable_docx(path, notes) as file:
        converted = mammoth.convert_to_html(file, convert_image=no_image, style_map="\n".join(_WORD_HEADINGS))
    yield from html_blocks([converted.value], notes)


def _rows_of_csv(path: Path, notes: Counter[str]) -> Iterator[tuple[str, Row]]:
    """The rows of a table of text, separated by what its first line has most of: tab, semicolon, comma or bar."""
    csv.field_size_limit(sys.maxsize)
    with open_text(path, notes, newline="") as file:
        head = file.readline(_LONGEST_PARAGRAPH)
        file.seek(0)
        separator = max("\t;,|", key=head.count)
        for number, row in enumerate(csv.DictReader(file, delimiter=separator, skipinitialspace=True), 1):
            if None in row:
                # `DictReader` puts fields beyond the header under None.
                notes["rows with more fields than the header"] += 1
            if separator == "\t" and any(_joins_rows(value) for value in row.values()):
                notes["rows that a quote without end seems to join"] += 1
            yield f"row {number}", {name: value for name, value in row.items() if name is not None}


def _joins_rows(value: object) -> bool:
    """Whether the value of a tab-separated row holds several rows."""
    text = str(value)
    return "\n" in text and "\t" in text


def _rows_of_json(path: Path, notes: Counter[str]) -> Iterator[tuple[str, Row]]:
    """The rows of JSON and Parquet files, each with its place."""
    return source_rows(str(path))


def _table_blocks(
    rows: Iterable[tuple[str, Row]], texts: Iterable[str], titles: Iterable[str], notes: Counter[str]
) -> Iterator[Block]:
    """The paragraphs of each row's text, under its title.

    A file may lack the text column in some rows, so it is refused only at its end, when no row has had one.
    """
    columns: list[str] = []
    unread_columns: dict[str, None] = {}
    rows_with_more = 0
    has_text_column = False
    for number, (where, row) in enumerate(rows, 1):
        columns = columns or list(row)
        text_columns = _text_columns(row, texts)
        read_columns = [*text_columns, _first_given(row, titles)]
        unread = [name for name in row if name not in read_columns and given(row, name) is not None]
        unread_columns |= dict.fromkeys(unread)
        rows_with_more += bool(unread)
        has_text_column = has_text_column or not row.keys().isdisjoint(texts)
        if len(row.keys() & set(texts)) > 1 and not _are_alternatives(texts):
            text = _labelled_text(row, where, text_columns)
        else:
            text = text_field(row, where, *texts)
        if not text.strip():
            notes["rows without text"] += 1
        title = " ".join(name_field(row, where, *titles).split())
        heading = (title,) if title else ()
        for paragraph in re.split(r"\n\s*\n", text):
            yield Block(paragraph, heading, row=number)
    if not has_text_column:
        raise Unreadable(f"no text column: the columns are {', '.join(columns) or 'none'}; name one with --text-column")
    if rows_with_more:
        notes[f"rows with columns that are not read ({', '.join(unread_columns)})"] = rows_with_more


def _are_alternatives(texts: Iterable[str]) -> bool:
    """Whether one of the columns is read, as of the usual names; columns that a user names are all read."""
    return tuple(texts) == TEXTS


def _text_columns(row: Row, texts: Iterable[str]) -> list[str]:
    """The columns with a value that are a row's text."""
    filled = [name for name in texts if given(row, name) is not None]
    return filled[:1] if _are_alternatives(texts) else filled


def _labelled_text(row: Row, where: str, columns: Iterable[str]) -> str:
    """The values of several columns, each after its name: "product: TG-40; price: 1200"."""
    text = ""
    for name in columns:
        if text:
            text += " " if text.endswith((".", "!", "?")) else "; "
        text += f"{name}: {name_field(row, where, name).strip()}"
    return text


def _first_given(row: Row, names: Iterable[str]) -> str | None:
    """The first of the names that a row has a value for, whose value is read."""
    for name in names:
        if given(row, name) is not None:
            return name
    return None


# Readers by ending: of documents, and of files whose rows are documents.
FORMATS: dict[str, Callable[[Path, Counter[str]], Iterator[Block]]] = {
    ".txt": _blocks_of_text,
    ".text": _blocks_of_text,
    ".rst": _blocks_of_text,
    ".md": _blocks_of_markdown,
    ".markdown": _blocks_of_markdown,
    ".html": _blocks_of_html,
    ".htm": _blocks_of_html,
    ".xhtml": _blocks_of_html,
    ".docx": _blocks_of_docx,
    ".pdf": pdf_blocks,
}
TABLE_FORMATS: dict[str, Callable[[Path, Counter[str]], Iterator[tuple[str, Row]]]] = {
    ".jsonl": _rows_of_json,
    ".ndjson": _rows_of_json,
    ".json": _rows_of_json,
    ".parquet": _rows_of_json,
    ".csv": _rows_of_csv,
    ".tsv": _rows_of_csv,
}
ENDINGS = {*FORMATS, *TABLE_FORMATS}
