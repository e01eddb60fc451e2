"""Corpora, triples and questions of other projects as files that this one reads (`tripletune data adapt`).

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

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tripletune.data_builders.readers._rows import Row, required_text, source_rows, whole_object
from tripletune.models.data.records import read_jsonl
from tripletune.models.files import check_new, new_file
from tripletune.models.options import setting
from tripletune.rag.extractor import split_passage

_NO_PHRASE = re.compile("[^A-Za-z0-9 ]")


@dataclass(frozen=True)
class AdaptOptions:
    """Options of `tripletune data adapt`."""

    input: str = field(metadata={"help": "the file: JSON lines, a JSON array or object, or Parquet; or a hub id"})
    output: str = field(metadata={"help": "the JSON lines to write; a file that is there is replaced"})
    aliases: str | None = setting(None, "2WikiMultiHopQA's id_aliases.json, for its questions")
    piece_limit: int = setting(
        4800, "characters; longer articles and books are cut between sentences (about 1,200 tokens)", at_least=1
    )
    piece_overlap: int = setting(
        400, "most characters that a piece repeats from the one before (about 100 tokens)", at_least=0
    )


def adapt_rows(options: AdaptOptions) -> Counter[str]:
    """Adapt a file; see the module.

    Returns:
        Counts of what was written; of triples the graph too, as HippoRAG counts it: names in lower case, of letters
        and digits alone, make its nodes, predicates its relations.
    """
    check_new(options.output, [options.input, *([options.aliases] if options.aliases else [])])
    counts, aliases = Counter[str](), None
    if options.aliases:
        # 2WikiMultiHopQA counts a country's demonyms among its names.
        aliases = {row["Q_id"]: [*row["aliases"], *row["demonyms"]] for _, row in read_jsonl(options.aliases)}
    seen: set[int] = set()
    graph: dict[str, set[Any]] = {"nodes": set(), "relations": set(), "distinct triples": set()}
    with new_file(options.output) as scratch, scratch.open("w", encoding="utf-8") as file:
        for where, row in _rows(options.input):
            for made in _made(row, where, aliases, options, seen):
                counts["rows" if "text" not in made else "passages"] += 1
                for fields in made.get("triples", ()):
                    counts["triples"] += 1
                    if isinstance(fields, list) and len(fields) == 3:
                        subject, predicate, last = (_NO_PHRASE.sub(" ", str(name).lower()).strip() for name in fields)
                        graph["nodes"] |= {subject, last}
                        graph["relations"].add(predicate)
                        graph["distinct triples"].add((subject, predicate, last))
                counts["questions with aliases"] += "answer_aliases" in made
                file.write(json.dumps(made, ensure_ascii=False) + "\n")
        if not counts:
            raise ValueError(f"{options.input}: the file holds no row")
    return +(counts + Counter({name: len(found) for name, found in graph.items()}))


def _rows(location: str) -> Iterator[tuple[str, Row]]:
    if (whole := whole_object(location)) is None:
        yield from source_rows(location)
    else:
        yield from ((f"{location}: {number}", row) for number, row in enumerate(whole.get("docs", [whole]), 1))


def _made(
    row: Row, where: str, aliases: Mapping[str, list[str]] | None, options: AdaptOptions, seen: set[int]
) -> Iterator[Row]:
    if aliases is not None:
        known = aliases.get(str(row.get("answer_id")), [])
        yield row | ({"answer_aliases": known} if known else {})
    elif "extracted_triples" in row:
        title, _, text = required_text(row, ("passage",), where).partition("\n")
        if "title" in row or not text:
            title, text = str(row.get("title") or ""), row["passage"]
        yield {"title": title, "text": text, "triples": row["extracted_triples"]}
    elif "contents" in row:
        title, _, text = required_text(row, ("contents",), where).partition("\n")
        title, text = (title.strip().strip('"'), text) if text.strip() else ("", title)
        yield {"id": str(row.get("id", "")), "title": title, "text": text.strip()}
    elif "body" in row or "context" in row:
        meta = row.get("meta") if isinstance(row.get("meta"), dict) else {}
        title = str(row.get("corpus_name") or row.get("title") or meta.get("title") or "")  # type: ignore[union-attr]
        text = required_text(row, ("body", "context"), where)
        if (key := hash((title, text))) not in seen:  # UltraDomain repeats a book with each question on it
            seen.add(key)
            pieces = split_passage(text, options.piece_limit, options.piece_overlap)
            yield from ({"title": title, "text": piece} for piece in pieces)
    elif "text" in row:
        yield {name: row[name] for name in ("id", "title", "text", "triples") if name in row}
    else:
        raise ValueError(f"{where}: the row has no layout that is known; it has {', '.join(row) or 'nothing'}")
