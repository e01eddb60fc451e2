"""`tripletune data adapt`: convert corpora, triples and questions of other projects.

| rows | where they come from | become |
|---|---|---|
| `{"docs": [{"passage", "extracted_triples"}]}` | HippoRAG's OpenIE files | triples of passages, for `--triples` |
| `{"title", "text"}`, an array | HippoRAG's corpora | passages |
| `id`, `text`, `title` in a `.tsv` | DPR's `psgs_w100.tsv` (gzip too) | passages |
| `{"id", "title", "section", "text"}` | Atlas's dumps | passages; the section follows the title, as in Atlas |
| `{"id", "contents"}` | wiki-18 of FlashRAG and Search-R1 | passages; the first line of `contents` is the title |
| `{"wikipedia_title", "text": […]}` | KILT's knowledge source | passages: its paragraphs |
| `{"question", "context"}`, `paragraphs`, `contexts` | HotpotQA, 2Wiki, MuSiQue, IRCoT | the passages, each once |
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
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from tripletune.core.data.fields import name_field, name_list, text_field
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.data.passages import Passage, read_corpus
from tripletune.core.data.pieces import about_tokens, windows
from tripletune.core.data.triples import parse_triples
from tripletune.core.files import check_new, json_line, new_file, write_json
from tripletune.core.options import CheckedOptions, setting
from tripletune.core.plugins import load_from, names_in
from tripletune.core.rows import Row, required_text
from tripletune.data_builders.adapt.graphs import passages_with_triples
from tripletune.data_builders.adapt.layouts import Adapted, adaptable_rows, layout_of
from tripletune.data_builders.datasets import token_counter
from tripletune.data_builders.datasets.lookup import SeenTable

BUILDERS = "tripletune.data_builders.adapt.builders"
_NO_PHRASE = re.compile("[^A-Za-z0-9 ]")


@dataclass(frozen=True)
class AdaptOptions(CheckedOptions):
    """Options of `tripletune data adapt`."""

    output: str = field(metadata={"help": "JSON-lines file to write; an existing file is replaced"})
    input: tuple[str, ...] = setting(
        (),
        "files (JSON lines, a JSON array or object, CSV, TSV, Parquet, text) or hub ids; several become one corpus: "
        "repeat the option",
    )
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
    repeated_ids: Literal["refuse", "rename"] = setting(
        "refuse",
        "an id that one file has for a passage and a later file for another: refuse the files, or write FILE:ID",
    )
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
            problems.append("input: name the file to convert, or files of a graph builder with --from")
        if self.corpus and self.builder not in (None, "csv", "rdf"):
            problems.append(f"corpus: the files of {self.builder} have passages of their own: leave out --corpus")
        if self.aliases and len(self.input) > 1:
            problems.append("input: --aliases takes the questions of one file")
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
    graph = _GraphSizes()
    read = load_from(BUILDERS, str(options.builder), "graph builder").read(files, counts)
    with new_file(options.output) as scratch, scratch.open("w", encoding="utf-8", errors="replace") as file:
        for passage in passages_with_triples(read, corpus, counts):
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
    """Adapt files; return counts of what was written, and for triples the sizes of their graph (`_GraphSizes`).

    The sizes can be compared with those that HippoRAG prints for the same file. Rows are made while they are written,
    so the counts are complete only after the loop, and an empty file is an error only then.
    """
    sources = list(options.input)
    if options.aliases:
        sources.append(options.aliases)
    check_new(options.output, sources)
    counts: Counter[str] = Counter()
    graph = _GraphSizes()
    if options.aliases:
        adapted = _questions_with_aliases(options.input[0], _read_aliases(options.aliases), counts)
    elif options.window:
        # Articles and books are cut once, into windows.
        whole_texts = replace(options, piece_limit=sys.maxsize, piece_overlap=0)
        adapted = _cut_windows(_adapted_passages(whole_texts, counts, graph), options, counts)
    else:
        adapted = _adapted_passages(options, counts, graph)
    with new_file(options.output) as scratch, scratch.open("w", encoding="utf-8") as file:
        for row in adapted:
            file.write(json_line(row))
        if not counts[Adapted.ROWS] + counts[Adapted.PASSAGES]:
            with_text = " with a text" if +counts else ""
            raise ValueError(f"{', '.join(options.input)}: the file holds no row{with_text}")
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


def _questions_with_aliases(location: str, aliases: Mapping[str, list[str]], counts: Counter[str]) -> Iterator[Row]:
    """The questions of 2WikiMultiHopQA, with `answer_aliases` where the answer has other names.

    Args:
        aliases: The names of each entity by its Wikidata id, which a row has as `answer_id`.
        counts: Counts the rows, and those with aliases, by `Adapted`.
    """
    for where, row in adaptable_rows(location):
        counts[Adapted.ROWS] += 1
        names = aliases.get(name_field(row, where, "answer_id"))
        if names:
            counts[Adapted.WITH_ALIASES] += 1
            row = {**row, "answer_aliases": names}
        yield row


class _Reading(AbstractContextManager["_Reading"]):
    """What a run remembers of the rows before: the passages that may come again, and ids of several files.

    It is on disk, so that a corpus of millions of passages needs no more memory than a small one.
    """

    def __init__(self, options: AdaptOptions, counts: Counter[str]) -> None:
        self.piece_limit = options.piece_limit
        self.piece_overlap = options.piece_overlap
        self._renames = options.repeated_ids == "rename"
        self._unites = len(options.input) > 1
        self.counts = counts
        self._seen = SeenTable()

    def __exit__(self, *_: object) -> None:
        self._seen.__exit__()

    def add_content(self, content: str) -> bool:
        """Remember the content of a row; return whether no row before had it. A copy is counted."""
        is_new = self._seen.add_if_new("content", content)
        if not is_new:
            self.counts[Adapted.COPIES] += 1
        return is_new

    def add_passage(self, passage: Row, where: str, location: str) -> Row | None:
        """Remember a passage and its id; return it as it stands in the corpus, or None if an earlier file has it.

        Only a corpus of several files can have one passage twice under its own id, or one id for two passages.

        Raises:
            ValueError: An earlier passage has the same id, and other content.
        """
        if not self._unites:
            return passage
        identity = passage.get("id")
        key = Passage(passage["title"], passage["text"]).key
        earlier = self._seen.get_or_add("passage", key, f"{location}\n{where}")
        if earlier is not None and not earlier.startswith(f"{location}\n"):
            self.counts[Adapted.COPIES] += 1
            return None
        if identity is None:
            return passage
        if self._seen.get_or_add("id", identity, where) is None:
            return passage
        renamed = f"{Path(location).name.partition('.')[0]}:{identity}"
        if not self._renames or not self._seen.add_if_new("id", renamed):
            raise ValueError(
                f"{where}: the id {identity!r} is that of another passage ({self._seen.get('id', identity)}): set "
                f"--repeated-ids rename, which writes such ids as {renamed!r}, or give files whose ids differ"
            )
        self.counts[Adapted.RENAMED] += 1
        return {**passage, "id": renamed}


def _adapted_passages(options: AdaptOptions, counts: Counter[str], graph: _GraphSizes) -> Iterator[Row]:
    """The passages of all files, each `{"title", "id"?, "text", "triples"?}`; `counts` counts by `Adapted`.

    Only articles and books are cut, since others are already passages, whose ids and triples belong to the whole.
    """
    with _Reading(options, counts) as reading:
        for location in options.input:
            for where, row in adaptable_rows(location):
                for passage in _passages_of(row, where, reading):
                    united = reading.add_passage(passage, where, location)
                    if united is None:
                        continue
                    counts[Adapted.PASSAGES] += 1
                    for fields in united.get("triples", ()):
                        counts[Adapted.TRIPLES] += 1
                        graph.add(fields)
                    yield united


def _passages_of(row: Row, where: str, reading: _Reading) -> Iterator[Row]:
    """The passages of a row that have a text; `reading` counts what is special about the row or left out."""
    counts = reading.counts
    if "chunk_id" in row and row.get("error"):
        counts[Adapted.FAILED] += 1
    if "generated_triple" in row:
        # RAS: the reply of the extractor, as text.
        parsed = parse_triples(text_field(row, where, "generated_triple"))
        counts[Adapted.MALFORMED] += parsed.malformed
        row = {**row, "triples": [triple.as_list() for triple in parsed.triples]}
    for passage in layout_of(row, where)(row, where, reading):
        if not passage["text"].strip():
            counts[Adapted.WITHOUT_TEXT] += 1
            continue
        if len(passage["text"]) > reading.piece_limit:
            counts[Adapted.LEFT_WHOLE] += 1
        yield passage


def _cut_windows(passages: Iterable[Row], options: AdaptOptions, counts: Counter[str]) -> Iterator[Row]:
    """The windows of all passages, each `{"title": "", "id", "text", "passages"}`; see `core.data.pieces.windows`.

    `passages` are the ids, titles or numbers of the passages that a window has sentences of.
    """
    names: list[str] = []

    def contents() -> Iterator[tuple[str, str]]:
        """Title and text of each passage; its name is added to `names` before a window can have its sentences."""
        for passage in passages:
            if passage.get("triples"):
                raise ValueError(
                    f"{', '.join(options.input)}: the passages have triples, which a window would lose: extract them "
                    "from the windows, or leave out --window"
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


class _GraphSizes:
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
