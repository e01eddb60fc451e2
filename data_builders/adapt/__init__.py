"""`tripletune data adapt`: convert corpora, triples and questions of other projects.

| rows | where they come from | become |
|---|---|---|
| `{"docs": [{"passage", "extracted_triples"}]}` | HippoRAG's OpenIE files | triples of passages, for `--triples` |
| `{"title", "text"}`, an array | HippoRAG's corpora | passages |
| `{"id", "contents"}` | FlashRAG's wiki-18 | passages; the first line of `contents` is the title |
| `{"title", "body"}` | MultiHop-RAG's articles | passages, in pieces |
| `{"corpus_name", "context"}` | GraphRAG-Bench's texts | passages, in pieces |
| `{"input", "context", "meta"}` | UltraDomain's questions | the passages of their texts, in pieces |
| `{"ID": {"content"}}`, one object | TH-RAG's chunks (`*_kv_store.json`) | passages |
| the text of a `.txt` file | TH-RAG's `contexts.txt` | passages, in pieces or windows |
| `{"chunk_id", "content", "triples"}` | TH-RAG's `*_graph.json` | passages with `statements`, for `thrag` |
| `{"text", "generated_triple"}`, also in `results` | RAS's `text_triples.json` | passages with triples |
| `{"supporting_docs", "sub_queries"}` | RAS's `hotpot_filtered.json` | passages: its sentences, each once |
| `{"answer_id", …}` and `--aliases` | 2WikiMultiHopQA | the rows with `answer_aliases`, as its script v1.1 scores |

With `--from NAME`, files of a graph builder become passages with their triples; `builders/` has one module for each.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

from tripletune.core.data.fields import checked, given, name_field, name_list, shown, text_field
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.data.passages import read_corpus
from tripletune.core.data.pieces import about_tokens, split_passage, windows
from tripletune.core.data.triples import parse_triples
from tripletune.core.files import check_new, json_line, new_file, read_text, write_json
from tripletune.core.options import CheckedOptions, setting
from tripletune.core.plugins import load_from, names_in
from tripletune.core.rows import Row, required_text, source_rows, whole_object
from tripletune.data_builders.adapt.graphs import join
from tripletune.data_builders.datasets import token_counter
from tripletune.data_builders.readers.ras_labels import labelled_passages

BUILDERS = "tripletune.data_builders.adapt.builders"
_TEXTS = ("contents", "content", "body", "context", "text", "passage")
_NO_PHRASE = re.compile("[^A-Za-z0-9 ]")


class Adapted(StrEnum):
    """What `adapt_rows` counts, as the command prints it; `_Graph.sizes` adds those of the graph of the triples."""

    ROWS = "rows"
    WITH_ALIASES = "questions with aliases"
    PASSAGES = "passages"
    WINDOWS = "windows"
    WITHOUT_TEXT = "rows without text, left out"
    LEFT_WHOLE = "longer than --piece-limit, left whole"
    TRIPLES = "triples"
    FAILED = "chunks whose extraction failed, without triples"
    MALFORMED = "malformed triples, left out"
    NODES = "nodes"
    RELATIONS = "relations"
    DISTINCT_TRIPLES = "distinct triples"


@dataclass(frozen=True)
class AdaptOptions(CheckedOptions):
    """Options of `tripletune data adapt`."""

    output: str = field(metadata={"help": "JSON-lines file to write; an existing file is replaced"})
    input: str | None = setting(None, "file (JSON lines, a JSON array or object, or Parquet) or hub id")
    builder: str | None = setting(
        None,
        "graph builder whose FILES are read: passages with triples, and OUTPUT.counts.json with what was lost",
        also="from",
        choices=partial(names_in, BUILDERS),
    )
    corpus: str | None = setting(
        None,
        "with --from csv or rdf: the passages of the triples; a triple without a passage's id goes to those that name "
        "its subject and its object (default: one passage per subject)",
        needs="builder",
    )
    aliases: str | None = setting(None, "id_aliases.json of 2WikiMultiHopQA, for its questions")
    piece_limit: int = setting(
        4800,
        "maximum characters of a piece (1,200 tokens); articles and books (body, context) are cut between sentences",
        at_least=1,
    )
    piece_overlap: int = setting(400, "maximum characters repeated from the previous piece (100 tokens)", at_least=0)
    window: int | None = setting(
        None,
        "join all passages in the file's order, titles included, and cut windows of at most this many tokens between "
        "sentences (TH-RAG: 1200)",
        at_least=1,
    )
    window_overlap: int | None = setting(
        None,
        "maximum tokens repeated from the previous window (default: a twelfth of it, TH-RAG's 100 of 1200; 0: none)",
        at_least=0,
        needs="window",
    )
    tokenizer: str | None = setting(
        None, "model whose tokens --window counts (default: a token per four characters)", needs="window"
    )

    def check(self) -> list[str]:
        """Problems of options together."""
        problems = []
        if self.builder and (self.input or self.aliases or self.window):
            problems.append("builder: name the files without --input, and leave out --aliases and --window")
        if not self.builder and not self.input:
            problems.append("input: give the file to convert with --input, or files of a graph builder with --from")
        if self.corpus and self.builder not in (None, "csv", "rdf"):
            problems.append(f"corpus: the files of {self.builder} have passages of their own: leave out --corpus")
        if self.window and self.aliases:
            problems.append("window: questions have no windows: leave out --aliases or --window")
        if self.window and self.window <= (self.window_overlap or 0):
            problems.append(f"window_overlap: {self.window_overlap} tokens must be fewer than those of a window")
        return problems


def adapt_graph(files: Sequence[str], options: AdaptOptions) -> Counter[str]:
    """Write the passages of a graph builder's files with their triples; return what was written and what was lost.

    The counts are also kept beside the output, as `OUTPUT.counts.json`.
    """
    if not files:
        raise ValueError(f"--from {options.builder}: name the files or the folder that it wrote")
    sources = [*files]
    corpus = None
    if options.corpus:
        sources.append(options.corpus)
        corpus = read_corpus(options.corpus)
    for source in sources:
        check_new(options.output, [source])
    counts: Counter[str] = Counter()
    graph = _Graph()
    read = load_from(BUILDERS, str(options.builder), "graph builder").read(files, counts)
    with new_file(options.output) as scratch, scratch.open("w", encoding="utf-8", errors="replace") as file:
        for passage in join(read, corpus, counts):
            if not passage["text"].strip():
                counts[Adapted.WITHOUT_TEXT] += 1
                continue
            counts[Adapted.PASSAGES] += 1
            for triple in passage["triples"]:
                counts[Adapted.TRIPLES] += 1
                graph.add(triple)
            file.write(json_line(passage))
        if not counts[Adapted.TRIPLES]:
            lost = ", ".join(f"{name}: {count:,}" for name, count in (+counts).items())
            raise ValueError(f"{', '.join(files)}: no passage has a triple ({lost or 'the files are empty'})")
    counts += graph.sizes()
    made = {"from": options.builder, "files": [*files], "corpus": options.corpus, "counts": dict(+counts)}
    write_json(f"{options.output}.counts.json", made)
    return +counts


def adapt_rows(options: AdaptOptions) -> Counter[str]:
    """Adapt a file; return counts of what was written, and for triples the sizes of their graph (`_Graph`).

    The sizes can be compared with those that HippoRAG prints for the same file. Rows are made while they are written,
    so the counts are complete only after the loop, and an empty file is an error only then.
    """
    source = str(options.input)
    sources = [source]
    if options.aliases:
        sources.append(options.aliases)
    check_new(options.output, sources)
    counts: Counter[str] = Counter()
    graph = _Graph()
    if options.aliases:
        adapted = _with_aliases(source, _read_aliases(options.aliases), counts)
    elif options.window:
        # Articles and books are cut once, into windows.
        whole_texts = replace(options, piece_limit=sys.maxsize, piece_overlap=0)
        adapted = _windows(_passages(whole_texts, counts, graph), options, counts)
    else:
        adapted = _passages(options, counts, graph)
    with new_file(options.output) as scratch, scratch.open("w", encoding="utf-8") as file:
        for row in adapted:
            file.write(json_line(row))
        if not counts[Adapted.ROWS] + counts[Adapted.PASSAGES]:
            with_text = " with a text" if +counts else ""
            raise ValueError(f"{source}: the file holds no row{with_text}")
    return +(counts + graph.sizes())


def _read_aliases(path: str) -> dict[str, list[str]]:
    """The other names of each entity of 2WikiMultiHopQA, by its Wikidata id."""
    aliases = {}
    for where, row in read_jsonl(path):
        # 2WikiMultiHopQA counts demonyms among the names of a country.
        names = name_list(row, where, "aliases") + name_list(row, where, "demonyms")
        aliases[required_text(row, where, "Q_id")] = names
    if not aliases:
        raise ValueError(f"{path}: the file holds no row")
    return aliases


def _with_aliases(location: str, aliases: Mapping[str, list[str]], counts: Counter[str]) -> Iterator[Row]:
    """The questions of 2WikiMultiHopQA, those whose answer has other names with `answer_aliases`; see `Adapted`."""
    for where, row in _adaptable(location):
        counts[Adapted.ROWS] += 1
        names = aliases.get(name_field(row, where, "answer_id"))
        if names:
            counts[Adapted.WITH_ALIASES] += 1
            row = {**row, "answer_aliases": names}
        yield row


def _passages(options: AdaptOptions, counts: Counter[str], graph: _Graph) -> Iterator[Row]:
    """The passages of a file, each `{"title", "id"?, "text", "triples"?}`; `counts` counts by `Adapted`.

    The name of the field with the text says what the layout is, so files of several projects need no option. Only
    articles and books are cut, since others are already passages, whose ids and triples belong to the whole.
    """
    seen: set[int] = set()
    for where, row in _adaptable(str(options.input)):
        if "chunk_id" in row and row.get("error"):
            counts[Adapted.FAILED] += 1
        if "generated_triple" in row:
            # RAS: the reply of the extractor, as text.
            parsed = parse_triples(text_field(row, where, "generated_triple"))
            counts[Adapted.MALFORMED] += parsed.malformed
            row = {**row, "triples": [triple.as_list() for triple in parsed.triples]}
        for passage in _passages_of(row, where, options, seen):
            if not passage["text"].strip():
                counts[Adapted.WITHOUT_TEXT] += 1
                continue
            counts[Adapted.PASSAGES] += 1
            if len(passage["text"]) > options.piece_limit:
                counts[Adapted.LEFT_WHOLE] += 1
            for fields in passage.get("triples", ()):
                counts[Adapted.TRIPLES] += 1
                graph.add(fields)
            yield passage


def _windows(passages: Iterable[Row], options: AdaptOptions, counts: Counter[str]) -> Iterator[Row]:
    """The windows of all passages, each `{"title": "", "id", "text", "passages"}`; see `core.data.pieces.windows`.

    `passages` are the ids, titles or numbers of the passages that a window has sentences of.
    """
    names: list[str] = []

    def contents() -> Iterator[tuple[str, str]]:
        """Title and text of each passage; its name is kept, since a window lists the passages that it covers."""
        for passage in passages:
            if passage.get("triples"):
                raise ValueError(
                    f"{options.input}: the passages have triples, which a window would lose: extract them from the "
                    "windows, or leave out --window"
                )
            names.append(passage.get("id") or passage["title"] or str(len(names)))
            yield passage["title"], passage["text"]

    count = token_counter(options.tokenizer) if options.tokenizer else about_tokens
    size = options.window or 0
    overlap = size // 12 if options.window_overlap is None else options.window_overlap
    for number, window in enumerate(windows(contents(), size, overlap, count)):
        counts[Adapted.WINDOWS] += 1
        members = [names[passage] for passage in window.passages]
        yield {"title": "", "id": f"window-{number:05}", "text": window.text, "passages": members}


def _passages_of(row: Row, where: str, options: AdaptOptions, seen: set[int]) -> Iterable[Row]:
    """The passages of a row; `seen` has the digests of texts that several rows may repeat."""
    if "sub_queries" in row:
        return _labelled_sentences(row, where, seen)
    if isinstance(row.get("question"), list) and isinstance(row.get("output"), list):
        raise ValueError(
            f"{where}: this is the output of a run, which has no passages: score its answers with `tripletune eval run "
            "--system answers --answers FILE`"
        )
    present = [name for name in _TEXTS if name in row]
    if not present:
        raise ValueError(
            f"{where}: the layout of the row is unknown; it has {', '.join(row) or 'no fields'} (`tripletune build "
            "passages` reads rows with any text column)"
        )
    if present[0] in ("body", "context"):
        return _pieces(row, where, present[0], options, seen)
    return [_passage(row, where, present[0])]


def _labelled_sentences(row: Row, where: str, seen: set[int]) -> Iterator[Row]:
    """The sentences of a question that RAS's authors labelled, without those of earlier questions."""
    for passage in labelled_passages(row, where):
        content = hash(passage)
        if content not in seen:
            seen.add(content)
            yield {"title": passage.title, "text": passage.text}


class _Graph:
    """Counts the graph of the triples as HippoRAG does.

    Nodes and relations are names and predicates in lower case, with letters and digits only.
    """

    def __init__(self) -> None:
        self._nodes: set[str] = set()
        self._relations: set[str] = set()
        self._triples: set[tuple[str, str, str]] = set()

    def add(self, fields: object) -> None:
        """Add a triple; anything else than three fields is no part of the graph."""
        if not isinstance(fields, list) or len(fields) != 3:
            return
        subject, predicate, object_ = (_NO_PHRASE.sub(" ", str(name).lower()).strip() for name in fields)
        self._nodes.update((subject, object_))
        self._relations.add(predicate)
        self._triples.add((subject, predicate, object_))

    def sizes(self) -> Counter[str]:
        """The sizes of the graph."""
        return Counter(
            {
                Adapted.NODES: len(self._nodes),
                Adapted.RELATIONS: len(self._relations),
                Adapted.DISTINCT_TRIPLES: len(self._triples),
            }
        )


def _adaptable(location: str) -> Iterator[tuple[str, Row]]:
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
    rows = given(checked(whole, location, {"docs?": [{}], "results?": [{}]}), "docs", "results")
    if rows is None:
        rows = [whole]
    for number, row in enumerate(rows, 1):
        yield f"{location}: {number}", row


def _pieces(row: Row, where: str, text_name: str, options: AdaptOptions, seen: set[int]) -> Iterator[Row]:
    """The pieces of an article or book, or nothing if it is `seen`; a row without text gives one empty piece."""
    text = text_field(row, where, text_name).strip()
    meta = row.get("meta")
    own_title = name_field(row, where, "title")
    title = name_field(row, where, "corpus_name") or own_title
    if not title and isinstance(meta, dict):
        title = name_field(meta, where, "title")
    if not text:
        yield {"title": title, "text": ""}
        return
    # UltraDomain repeats a book with each question on it.
    book = hash((title, text))
    if book in seen:
        return
    seen.add(book)
    for piece in split_passage(text, options.piece_limit, options.piece_overlap):
        yield {"title": title, "text": piece}


def _passage(row: Row, where: str, text_name: str) -> Row:
    """A row as a passage, with its triples if it has a list of them.

    FlashRAG and HippoRAG's OpenIE files write the title as the first line of the text.
    """
    title = name_field(row, where, "title")
    text = text_field(row, where, text_name).strip()
    holds_title = text_name == "contents" or (text_name == "passage" and "title" not in row)
    if holds_title and "\n" in text:
        first_line, _, body = text.partition("\n")
        title = first_line.strip()
        text = body.strip()
        if text_name == "contents":
            # FlashRAG writes titles in quotation marks.
            title = title.strip('"')
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
    return passage
