"""`tripletune data adapt`: convert corpora, triples and questions of other projects.

| rows | where they come from | become |
|---|---|---|
| `{"docs": [{"passage", "extracted_triples"}]}` | HippoRAG's OpenIE files | triples of passages, for `--triples` |
| `{"title", "text"}`, an array | HippoRAG's corpora | passages |
| `{"id", "contents"}` | FlashRAG's wiki-18 | passages; the first line of `contents` is the title |
| `{"title", "body"}` | MultiHop-RAG's articles | passages, in pieces |
| `{"corpus_name", "context"}` | GraphRAG-Bench's texts | passages, in pieces |
| `{"input", "context", "meta"}` | UltraDomain's questions | the passages of their texts, in pieces |
| `{"answer_id", …}` and `--aliases` | 2WikiMultiHopQA | the rows with `answer_aliases`, as its script v1.1 scores |
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tripletune.core.data.fields import checked, given, name_field, name_list, shown, text_field
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.data.pieces import split_passage
from tripletune.core.files import check_new, json_line, new_file
from tripletune.core.options import setting
from tripletune.core.rows import Row, required_text, source_rows, whole_object

_ALIASES = ("aliases", "demonyms")
_TEXTS = ("contents", "body", "context", "text", "passage")
_NO_PHRASE = re.compile("[^A-Za-z0-9 ]")


@dataclass(frozen=True)
class AdaptOptions:
    """Options of `tripletune data adapt`."""

    input: str = field(metadata={"help": "file (JSON lines, a JSON array or object, or Parquet) or hub id"})
    output: str = field(metadata={"help": "JSON-lines file to write; an existing file is replaced"})
    aliases: str | None = setting(None, "id_aliases.json of 2WikiMultiHopQA, for its questions")
    piece_limit: int = setting(
        4800,
        "maximum characters of a piece (1,200 tokens); articles and books (body, context) are cut between sentences",
        at_least=1,
    )
    piece_overlap: int = setting(400, "maximum characters repeated from the previous piece (100 tokens)", at_least=0)


def adapt_rows(options: AdaptOptions) -> Counter[str]:
    """Adapt a file and return counts of what was written; for triples, also the graph's nodes, relations and triples.

    As in HippoRAG, nodes and relations are names and predicates in lower case, with letters and digits only.
    """
    check_new(options.output, [options.input, *([options.aliases] if options.aliases else [])])
    counts, aliases = Counter[str](), None
    if options.aliases:
        # 2WikiMultiHopQA counts demonyms among the names of a country.
        aliases = {
            required_text(row, ("Q_id",), where): [name for key in _ALIASES for name in name_list(row, where, key)]
            for where, row in read_jsonl(options.aliases)
        }
        if not aliases:
            raise ValueError(f"{options.aliases}: the file holds no row")
    seen: set[int] = set()
    graph: dict[str, set[Any]] = {"nodes": set(), "relations": set(), "distinct triples": set()}
    with new_file(options.output) as scratch, scratch.open("w", encoding="utf-8") as file:
        for where, row in _adaptable(options.input):
            for made in _adapted(row, where, aliases, options, seen):
                if aliases is None and not made["text"].strip():
                    counts["rows without text, left out"] += 1
                    continue
                counts["passages" if aliases is None else "rows"] += 1
                counts["longer than --piece-limit, left whole"] += len(made.get("text", "")) > options.piece_limit
                for fields in made.get("triples", ()):
                    counts["triples"] += 1
                    if isinstance(fields, list) and len(fields) == 3:
                        subject, predicate, last = (_NO_PHRASE.sub(" ", str(name).lower()).strip() for name in fields)
                        graph["nodes"] |= {subject, last}
                        graph["relations"].add(predicate)
                        graph["distinct triples"].add((subject, predicate, last))
                counts["questions with aliases"] += "answer_aliases" in made
                file.write(json_line(made))
        if not counts["rows"] + counts["passages"]:
            raise ValueError(f"{options.input}: the file holds no row{' with a text' if counts else ''}")
    return +(counts + Counter({name: len(found) for name, found in graph.items()}))


def _adaptable(location: str) -> Iterator[tuple[str, Row]]:
    whole = whole_object(location)
    if whole is None or "data" in whole:
        return source_rows(location)
    rows = checked(whole, location, {"docs?": [{}]}).get("docs", [whole])
    return ((f"{location}: {number}", row) for number, row in enumerate(rows, 1))


def _adapted(
    row: Row, where: str, aliases: Mapping[str, list[str]] | None, options: AdaptOptions, seen: set[int]
) -> Iterator[Row]:
    if aliases is not None:
        known = aliases.get(name_field(row, where, "answer_id"), [])
        yield row | ({"answer_aliases": known} if known else {})
        return
    made: Row = {"title": name_field(row, where, "title")}
    if identity := name_field(row, where, "id", "_id"):
        made["id"] = identity
    key = next((key for key in _TEXTS if key in row), "")
    text = text_field(row, where, key).strip()
    if key in ("body", "context"):
        meta = row.get("meta") if isinstance(row.get("meta"), dict) else {}
        title = name_field(row, where, "corpus_name", "title") or name_field(meta or {}, where, "title")
        # UltraDomain repeats a book with each question on it.
        if (known_text := hash((title, text))) not in seen or not text:
            seen.add(known_text)
            pieces = split_passage(text, options.piece_limit, options.piece_overlap) or [""]
            yield from ({"title": title, "text": piece} for piece in pieces)
        return
    if key == "contents" or (key == "passage" and "title" not in row):
        head, _, rest = text.partition("\n")
        if rest:
            made["title"], text = head.strip() if key == "passage" else head.strip().strip('"'), rest.strip()
    if not key:
        raise ValueError(
            f"{where}: the layout of the row is unknown; it has {', '.join(row) or 'no fields'} (`tripletune build "
            "passages` reads rows with any text column)"
        )
    made["text"] = text
    if "extracted_triples" in row or "triples" in row:
        made["triples"] = given(row, "extracted_triples", "triples") or []
        if not isinstance(made["triples"], list):
            raise ValueError(f"{where}: the triples must be a list, found {shown(made['triples'])}")
    yield made
