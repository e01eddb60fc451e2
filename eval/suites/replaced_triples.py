"""Records whose triples were read out of the passages anew, for example by a trained extractor (RAS, section 3.2).

A record's step keeps the text its gold triples come from, one passage below the other, each behind its title. With the
triples that an extractor found in the same passages, `tripletune eval records` says what its mistakes cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tripletune.models.data.passages import Passage
from tripletune.models.data.records import Record, Step
from tripletune.models.data.triples import Triple
from tripletune.models.files import file_digest
from tripletune.rag.triples.store import TripleSource, TripleStore, is_store

PASSAGES, MISSES = "passages", "passages_without_triples"


def with_triples(records: Iterable[Record], store: TripleSource, counts: Counter[str]) -> Iterator[Record]:
    """The records with the store's triples in the place of their own.

    Args:
        records: Records, streamed.
        store: Triples by passage.
        counts: Counts `passages` and `passages_without_triples`, which the store does not know.

    Raises:
        ValueError: a step has no text to look up.
    """
    for record in records:
        yield replace(record, steps=tuple(_read_anew(step, record.id, store, counts) for step in record.steps))


def triples_settings(source: str, extractor: str | None = None) -> Any:
    """What results depend on of a file of triples, or of an extraction store, whose bytes change without its content.

    Args:
        source: The file or store.
        extractor: The extractor of a store that holds several; see `TripleStore.choose`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the store holds no or several extractors, or an extractor is named for a file.
    """
    if not is_store(source):
        if extractor is not None:
            raise ValueError(f"--extractor {extractor}: {source} is no extraction store, so it has no extractors")
        return file_digest(source)
    store = TripleStore(source, create=False)
    try:
        chosen = store.choose(extractor)
        return {"store": Path(source).name, "model": chosen.model, "prompt": chosen.prompt, PASSAGES: chosen.passages}
    finally:
        store.close()


def _read_anew(step: Step, record: str, store: TripleSource, counts: Counter[str]) -> Step:
    lines = step.text.split("\n") if step.text.strip() else []
    if not lines:
        raise ValueError(f"record {record!r}: the step {step.query!r} has no text, so its triples can't be looked up")
    found: dict[Triple, None] = {}
    start = 0
    while start < len(lines):
        end, triples = _first_known(lines, start, store)
        counts[PASSAGES] += 1
        counts[MISSES] += triples is None
        found |= dict.fromkeys(triples or ())
        start = end
    return Step(step.query, tuple(found), step.text)


def _first_known(lines: list[str], start: int, store: TripleSource) -> tuple[int, tuple[Triple, ...] | None]:
    """Where the passage that begins at a line ends, and its triples; a text may have line breaks of its own."""
    for end in range(start + 2, len(lines) + 1):
        triples = store.get(Passage(lines[start], "\n".join(lines[start + 1 : end])))
        if triples is not None:
            return end, triples
    # Without a title, the first line is the text.
    triples = store.get(Passage("", lines[start]))
    return (start + 1, triples) if triples is not None else (min(start + 2, len(lines)), None)
