"""The triples of stores as JSON lines, for the option `--triples` and for other programs (`tripletune rag export`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tripletune.core.data.passages import Passage, corpus_file, read_corpus
from tripletune.core.data.triples import Triple
from tripletune.core.files import check_new, json_line, new_file
from tripletune.rag.triple_store import StoredTriples, TripleStore


class Exported(NamedTuple):
    """How many passages were written, and how many were left out, since no store has them."""

    written: int
    missing: int


def export_triples(
    corpus: str | Path,
    stores: list[TripleStore],
    output: str | Path,
    extractor: str | None = None,
    allow_missing: bool = False,
) -> Exported:
    """Write `{"title", "text", "triples"}` for the passages of a corpus; the file appears when it is complete.

    Args:
        stores: Triples come from the first store that has the passage.
        extractor: Model or number of the extractor in each store; None: its only one.
        allow_missing: Whether passages that no store has are left out, and not an error.
    """
    corpus = corpus_file(corpus)
    chosen = [StoredTriples(store, store.choose(extractor).id) for store in stores]
    check_new(output, [corpus, *(store.path for store in stores)])
    written, missing = 0, 0
    with new_file(output) as scratch, scratch.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        for passage in read_corpus(corpus, blank_texts=True):
            if not passage.content.strip():
                continue
            triples = _first_stored(chosen, passage)
            if triples is None:
                missing += 1
                continue
            row = {"title": passage.title, "text": passage.text, "triples": [triple.as_list() for triple in triples]}
            file.write(json_line(row))
            written += 1
        if missing and not allow_missing:
            raise ValueError(
                f"{missing:,} of {written + missing:,} passages of {corpus} are in no store: extract these passages "
                "first, or add --allow-missing to leave them out"
            )
    return Exported(written, missing)


def _first_stored(stores: Sequence[StoredTriples], passage: Passage) -> tuple[Triple, ...] | None:
    """The triples of the first store that has a passage; the user names stores in the order of preference."""
    for store in stores:
        triples = store.get(passage)
        if triples is not None:
            return triples
    return None
