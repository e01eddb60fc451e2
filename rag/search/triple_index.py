"""An index of all triples of a corpus: each distinct triple is a row, with its passages and its neighbours.

T2RAG searches the rows as sentences (section 4.2); GEAR walks between rows that share an entity. Triples stay in a
file; memory holds only numbers.
"""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import merge
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tripletune.core.data.answers import normalize_name
from tripletune.core.data.triples import Triple
from tripletune.core.data.words import AUTO
from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.index import Lines, PassageStore, ensure_index
from tripletune.rag.search.options import RetrieverKind, VectorSearch
from tripletune.rag.search.retrievers import verbalise
from tripletune.rag.search.text_index import open_text_index, with_shares
from tripletune.rag.triple_store import StoredTriples

logger = logging.getLogger(__name__)

# Triples and normalised names kept in memory.
_KEPT = 1 << 16
# Rows among which `about` looks for a name: a search ranks those first that hold its words and few others.
_NAMED = 1000
_WORDS = {ord("."): "point", ord("+"): "plus", ord("#"): "sharp"}
_MARKS = re.compile(r"(?<=\d)\.(?=\d)|(?<=\w)[+#]+(?!\w)")  # 1.5 is not 15, and C++ is not C
# The letter, not the article: "A. Penhale", "Hepatitis A"; in "U.S.A." and "A.B. Smith" it is part of a word.
_LETTER_A = re.compile(r"(?<![.\w])A(?=\.(?!\w)|$)")
_TRIPLES, _OFFSETS = "triples.jsonl", "offsets.npy"
# Raise it when `entity_key` or the numbers of the names change: stored indexes with another number are built again.
_NAMES_VERSION = 4
# Rows and positions of passages, two rows of equal length; subjects and objects, one number for each name.
_PAIRS, _ENTITIES = "pairs.index.npy", "entities.index.npy"


class GatheredRows(NamedTuple):
    """The best rows of several queries, best first, and by passage position the score of the passage's best row."""

    rows: list[int]
    passages: dict[int, float]


class TripleIndex(Lines[Triple]):
    """The distinct triples of a corpus, in the order in which its passages state them.

    The index is in `index_dir/triples`; missing or outdated parts are built. For the arguments see `open_text_index`.

    Attributes:
        entities: Numbers of the subjects and of the objects, of shape (2, rows); names of one entity have one number.
        search: `await search(queries, k)` gives the at most `k` best rows for each query, with scores.
        comparable: Whether scores of different queries are comparable, like cosines.
    """

    comparable = True

    def __init__(
        self,
        kind: RetrieverKind,
        passages: PassageStore,
        triples: StoredTriples,
        index_dir: str | Path,
        embedder: Embedder | None = None,
        vectors: VectorSearch = "flat",
        language: str = AUTO,
        overwrite: bool = False,
    ) -> None:
        """Open the index, and build what is missing or outdated."""
        root = Path(index_dir) / "triples"
        wanted = {"corpus_sha256": passages.sha256, "triples": triples.identity}
        folder = root / "rows"
        ensure_index(
            folder,
            {"kind": "triples", "names": _NAMES_VERSION, **wanted},
            lambda out: _write_index(passages, triples, out),
        )
        self.passages = passages
        self._path = folder / _TRIPLES
        # Only now do the files exist.
        super().__init__(self._path, folder / _OFFSETS, _triple_of_line, _KEPT)
        rows, positions = np.load(folder / _PAIRS)
        self._passages = _ValuesByKey(rows, positions)
        self._rows = _ValuesByKey(positions, rows)
        self.entities = np.load(folder / _ENTITIES)
        numbers = np.arange(len(self))
        self._of_entity = _ValuesByKey(self.entities.ravel(), np.concatenate([numbers, numbers]))
        self.comparable = kind == "dense"
        if language == AUTO:
            language = passages.language
        self.search = open_text_index(
            kind, root, wanted, self._row_texts, len(self), embedder, vectors, language, overwrite
        ).rank

    def _row_texts(self) -> Iterator[str]:
        """Yield the text of each row, by which it is searched (`verbalise`)."""
        for triple in self:
            yield verbalise(triple)

    def __iter__(self) -> Iterator[Triple]:
        """Read all rows from the start, without keeping them."""
        with self._path.open("rb") as file:
            yield from map(_triple_of_line, file)

    def passages_of(self, row: int) -> np.ndarray:
        """The positions of all passages that state a triple, in the order of the corpus."""
        return self._passages[row]

    def rows_of(self, position: int) -> np.ndarray:
        """The rows that a passage states, by its position in the corpus; none for a passage without triples."""
        return self._rows[position]

    def neighbours(self, row: int) -> np.ndarray:
        """The rows that share an entity with a row, in order."""
        sharing = np.concatenate([self._of_entity[entity] for entity in self.entities[:, row]])
        return np.setdiff1d(sharing, [row])

    async def about(self, name: str) -> np.ndarray:
        """The rows whose subject or object is the entity of a name, in order; empty if no row names it.

        A search finds a first row that names the entity, since the file has no list of names; its number leads to the
        others.
        """
        key = entity_key(name)
        (ranking,) = await self.search([name], _NAMED)
        for row, _ in ranking:
            triple = self[row]
            for side, other in enumerate((triple.subject, triple.object)):
                if entity_key(other) == key:
                    return np.unique(self._of_entity[self.entities[side, row]])
        return np.array([], dtype=int)

    async def gather(self, queries: Sequence[str], k: int, candidates: int, all_passages: bool = False) -> GatheredRows:
        """Take the best rows of all queries, until they come from `k` passages (T2RAG, algorithm 2).

        Each query finds `candidates` rows. A proposition, the text of a row, is taken once, also if two triples are cut
        from it. If several passages state it, it takes one of the `k` places, by the first of them that has none; its
        other passages follow if places are left. With
        `all_passages` they take places at once, the first in the corpus first. Scores that differ in scale between
        queries (BM25) are divided by the best one before they are merged, since one query would otherwise take all
        places.
        """
        rows: dict[int, None] = {}
        propositions: set[str] = set()
        passages: dict[int, float] = {}
        spare: list[tuple[int, float]] = []
        rankings = await self.search(queries, candidates)
        if not self.comparable:
            rankings = [with_shares(ranking) for ranking in rankings]
        for row, score in merge(*rankings, key=lambda pair: (-pair[1], pair[0])):
            if len(passages) == k:
                break
            stating = self.passages_of(row).tolist()
            # Another query may find it again, and two triples may be one proposition, cut in two ways:
            # "Kelm | is | a town in Sarn" and "Kelm | is a town in | Sarn".
            proposition = verbalise(self[row])
            if all_passages:
                taken = stating
            elif proposition in propositions:
                taken = []
            else:
                without_place = [position for position in stating if position not in passages]
                taken = without_place[:1]
            if proposition not in propositions:
                rows[row] = None
            propositions.add(proposition)
            for position in taken:
                if len(passages) < k:
                    passages.setdefault(position, score)
            spare += [(position, score) for position in stating]
        for position, score in spare:
            if len(passages) < k:
                passages.setdefault(position, score)
        return GatheredRows([*rows], passages)


@lru_cache(maxsize=_KEPT)
def entity_key(name: str) -> str:
    """Normalise case, punctuation, articles and Unicode form of a name, so that names of one entity are equal."""
    with_letter = _LETTER_A.sub("letter-a", unicodedata.normalize("NFKC", name))
    marked = _MARKS.sub(lambda mark: f" {mark[0].translate(_WORDS)}", with_letter)
    return normalize_name(marked)


class _ValuesByKey:
    """The values of each numeric key, in order; keys and values are arrays of equal length."""

    def __init__(self, keys: np.ndarray, values: np.ndarray) -> None:
        self._values = values[np.argsort(keys, kind="stable")]
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(keys))])

    def __getitem__(self, key: int) -> np.ndarray:
        """The values of a key; none for a key larger than all that have values."""
        if key >= len(self._starts) - 1:
            return self._values[:0]
        return self._values[self._starts[key] : self._starts[key + 1]]


def _triple_of_line(line: bytes) -> Triple:
    """A triple from a line of `triples.jsonl`, as `_write_index` writes it."""
    return Triple(*json.loads(line))


def _write_index(passages: PassageStore, triples: StoredTriples, folder: Path) -> None:
    """Write the files of an index into `folder`, in one pass over the passages.

    Without any triple the index would find nothing, and no question would say why, so that is an error.
    """
    rows: dict[Triple, int] = {}
    entities: dict[str, int] = {}
    offsets, subjects, objects = array("q"), array("i"), array("i")
    pair_rows, pair_positions = array("i"), array("i")
    without_triples = 0
    with (folder / _TRIPLES).open("wb") as file:
        for position, passage in enumerate(passages):
            stated = triples.get(passage)
            if stated is None:
                without_triples += 1
                continue
            for triple in dict.fromkeys(stated):
                if triple not in rows:
                    rows[triple] = len(rows)
                    offsets.append(file.tell())
                    file.write(json.dumps(triple.as_list()).encode() + b"\n")
                    subjects.append(entities.setdefault(entity_key(triple.subject), len(entities)))
                    objects.append(entities.setdefault(entity_key(triple.object), len(entities)))
                pair_rows.append(rows[triple])
                pair_positions.append(position)
    if not rows:
        raise ValueError(f"{passages.corpus}: no passage has a triple: were the triples extracted from another corpus?")
    logger.log(
        logging.WARNING if without_triples else logging.INFO,
        "%s: %s distinct triples of %s entities; %s of %s passages have no extraction",
        passages.corpus, f"{len(rows):,}", f"{len(entities):,}", f"{without_triples:,}", f"{len(passages):,}",
    )  # fmt: skip
    np.save(folder / _OFFSETS, np.asarray(offsets), allow_pickle=False)
    np.save(folder / _PAIRS, np.asarray((pair_rows, pair_positions)), allow_pickle=False)
    np.save(folder / _ENTITIES, np.asarray((subjects, objects)), allow_pickle=False)
