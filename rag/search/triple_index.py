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

import numpy as np

from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.triples import Triple
from tripletune.core.data.words import AUTO
from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.index import Lines, PassageStore, prepare
from tripletune.rag.search.retrievers import verbalise
from tripletune.rag.search.text_index import RetrieverKind, VectorSearch, open_text_index, shares
from tripletune.rag.triple_store import StoredTriples

logger = logging.getLogger(__name__)

_KEPT = 1 << 16
_WORDS = {ord("."): "point", ord("+"): "plus", ord("#"): "sharp"}
_MARKS = re.compile(r"(?<=\d)\.(?=\d)|(?<=\w)[+#]+(?!\w)")  # 1.5 is not 15, and C++ is not C
_TRIPLES, _OFFSETS, _PAIRS, _ENTITIES = "triples.jsonl", "offsets.npy", "pairs.index.npy", "entities.index.npy"


class TripleIndex(Lines[Triple]):
    """The distinct triples of a corpus, in the order in which its passages state them.

    The index is in `index_dir/triples`; missing or outdated parts are built. For the arguments see `open_text_index`.
    """

    # Whether scores of different queries are comparable, like cosines.
    comparable = True

    def __init__(
        self,
        kind: RetrieverKind,
        passages: PassageStore,
        triples: StoredTriples,
        index_dir: str | Path,
        embedder: Embedder | None = None,
        search: VectorSearch = "flat",
        language: str = AUTO,
        overwrite: bool = False,
    ) -> None:
        root = Path(index_dir) / "triples"
        wanted = {"corpus_sha256": passages.sha256, "triples": triples.identity}
        folder = root / "rows"
        prepare(folder, {"kind": "triples", "names": 2, **wanted}, lambda out: _write(passages, triples, out))
        self.passages, self._path = passages, folder / _TRIPLES
        super().__init__(self._path, folder / _OFFSETS, _triple, _KEPT)
        rows, positions = np.load(folder / _PAIRS)
        self._passages, self._rows = _Groups(rows, positions), _Groups(positions, rows)
        self.entities = np.load(folder / _ENTITIES)
        numbers = np.arange(len(self))
        self._of_entity = _Groups(self.entities.ravel(), np.concatenate([numbers, numbers]))
        self.comparable = kind == "dense"
        texts = lambda: map(verbalise, self)  # noqa: E731
        how = (embedder, search, passages.language if language == AUTO else language, overwrite)
        # Returns the at most `k` best rows for each query, with scores.
        self.search = open_text_index(kind, root, wanted, texts, len(self), *how).rank

    def __iter__(self) -> Iterator[Triple]:
        with self._path.open("rb") as file:
            yield from map(_triple, file)

    def passages_of(self, row: int) -> np.ndarray:
        """The positions of all passages that state a triple, in the order of the corpus."""
        return self._passages[row]

    def rows_of(self, position: int) -> np.ndarray:
        """The rows that a passage states."""
        return self._rows[position]

    def neighbours(self, row: int) -> np.ndarray:
        """The rows that share an entity with a row, in order."""
        found = np.concatenate([self._of_entity[entity] for entity in self.entities[:, row]])
        return np.setdiff1d(found, [row])

    async def gather(self, queries: Sequence[str], k: int, candidates: int) -> tuple[list[int], dict[int, float]]:
        """Take the best rows of all queries, until they come from `k` passages (T2RAG, algorithm 2).

        Each query finds `candidates` rows. If a row has more passages than are still wanted, the first in the corpus
        count.

        Returns:
            The rows, best first, and by passage position the score of the passage's best row.
        """
        rows, passages = dict[int, None](), dict[int, float]()
        rankings = await self.search(queries, candidates)
        if not self.comparable:
            rankings = [[(row, one) for (row, _), one in zip(found, shares(s for _, s in found))] for found in rankings]
        for row, score in merge(*rankings, key=lambda pair: (-pair[1], pair[0])):
            if len(passages) == k:
                break
            rows[row] = None
            for position in self.passages_of(row).tolist():
                if len(passages) < k:
                    passages.setdefault(position, score)
        return [*rows], passages


@lru_cache(maxsize=_KEPT)
def entity_key(name: str) -> str:
    """Normalise case, punctuation, articles and Unicode form of a name, so that names of one entity are equal."""
    marked = _MARKS.sub(lambda mark: f" {mark[0].translate(_WORDS)}", unicodedata.normalize("NFKC", name))
    return normalize_answer(marked)


class _Groups:
    """The values of each numeric key, in order."""

    def __init__(self, keys: np.ndarray, values: np.ndarray) -> None:
        self._values = values[np.argsort(keys, kind="stable")]
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(keys))])

    def __getitem__(self, key: int) -> np.ndarray:
        return self._values[slice(*self._starts[key : key + 2])] if key < len(self._starts) - 1 else self._values[:0]


def _triple(line: bytes) -> Triple:
    return Triple(*json.loads(line))


def _write(passages: PassageStore, triples: StoredTriples, folder: Path) -> None:
    rows: dict[Triple, int] = {}
    names: dict[str, int] = {}
    offsets, subjects, objects = array("q"), array("i"), array("i")
    pairs: tuple[array[int], array[int]] = (array("i"), array("i"))
    unknown = 0
    with (folder / _TRIPLES).open("wb") as file:
        for position, passage in enumerate(passages):
            stated = triples.get(passage)
            unknown += stated is None
            for triple in dict.fromkeys(stated or ()):
                if triple not in rows:
                    rows[triple] = len(rows)
                    offsets.append(file.tell())
                    file.write(json.dumps(triple.as_list()).encode() + b"\n")
                    for ids, name in ((subjects, triple.subject), (objects, triple.object)):
                        ids.append(names.setdefault(entity_key(name), len(names)))
                pairs[0].append(rows[triple])
                pairs[1].append(position)
    if not rows:
        raise ValueError(f"{passages.corpus}: no passage has a triple: were the triples extracted from another corpus?")
    logger.log(
        logging.WARNING if unknown else logging.INFO,
        "%s: %s distinct triples of %s entities; %s of %s passages have no extraction",
        passages.corpus, f"{len(rows):,}", f"{len(names):,}", f"{unknown:,}", f"{len(passages):,}",
    )  # fmt: skip
    for name, values in ((_OFFSETS, offsets), (_PAIRS, pairs), (_ENTITIES, (subjects, objects))):
        np.save(folder / name, np.asarray(values), allow_pickle=False)
