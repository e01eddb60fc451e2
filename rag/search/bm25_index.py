"""Search by BM25 in an index of `bm25_build.py` or of bm25s: a score for each pair of term and row, in mapped files."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tripletune.core import libraries
from tripletune.core.data.words import analyzer, word_rules
from tripletune.rag.search.bm25_build import build_bm25
from tripletune.rag.search.index import ensure_index
from tripletune.rag.search.ranking import Ranking, best_rows
from tripletune.rag.search.together import Together

# BM25 searches so few rows in less time than starting a thread. A thread would also make it random which calls of a
# model share a batch, and in 16 bits replies depend on the batch.
_FEW = 10_000
# Increase this number when texts become other terms, so that old indexes are built again.
_TERMS = 2
# Sums in float32 depend on the order of the terms, by less than this share.
_ROUNDING = 1e-5
# Looking up a row among those of a term takes so many times longer than adding up one of the term's rows.
_LOOKED_UP = 16


class Bm25Index:
    """BM25 (Robertson and Zaragoza, 2009; the Lucene variant of bm25s) over the terms of `analyzer`.

    Args:
        folder: Where the index is, or is built.
        wanted: What the index must be of; another index in the folder is replaced.
        rows: Returns the texts of all rows from the start; called only to build.
        language: Decides stop words and how texts are split.
        k1: How fast the weight of a repeated term saturates.
        b: How much the length of a row counts, from 0 to 1.
    """

    def __init__(
        self,
        folder: Path,
        wanted: dict[str, Any],
        rows: Callable[[], Iterable[str]],
        language: str,
        k1: float = 1.5,
        b: float = 0.75,
    ) -> None:
        """Open the index, and build it if it is missing or outdated."""
        # If JAX is installed, bm25s imports it, and JAX would reserve three quarters of a GPU's memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import bm25s

        libraries.check_use("BM25")
        # bm25s sets its own logger to DEBUG when it is imported.
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        self._terms = analyzer(language)

        def build(out: Path) -> None:
            """Write the index of all rows, with the terms of the language."""
            build_bm25(rows(), word_rules(language), out, k1, b)

        ensure_index(folder, {"kind": "bm25", **wanted, "terms": _TERMS, "k1": k1, "b": b, "language": language}, build)
        self._index = bm25s.BM25.load(folder, mmap=True, allow_pickle=False, show_progress=False)
        stored = self._index.scores
        self._term_scores = ScoredTerms(stored["indptr"], stored["indices"], stored["data"], stored["num_docs"])
        self._together: Together[tuple[str, int], Ranking] | None = None
        if self._term_scores.count > _FEW:
            self._together = Together(self._rankings_of)

    async def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """The at most `k` best rows for each query; rows that share no word with the query are left out."""
        keys = [(query, k) for query in queries]
        if self._together is None:
            return self._rankings_of(keys)
        return await self._together(keys)

    def _rankings_of(self, keys: list[tuple[str, int]]) -> list[Ranking]:
        """The rankings for some (query, k), as `Together` asks for them: in a thread if the index is large."""
        rankings = []
        for query, k in keys:
            numbers = self._index.get_tokens_ids(self._terms(query))
            rankings.append(self._term_scores.rank(numbers, k) if numbers else [])
        return rankings


class ScoredTerms:
    """The scores of the rows with each term, in arrays that may lie in files.

    Args:
        starts: Where the rows of each term begin, of shape (terms + 1,).
        rows: The rows with each term, ascending, one term after another.
        scores: Their scores.
        count: Number of rows of the index.
    """

    def __init__(self, starts: np.ndarray, rows: np.ndarray, scores: np.ndarray, count: int) -> None:
        self._starts, self._rows, self._scores = starts, rows, scores
        self.count = count
        self._highest: dict[int, float] = {}

    def rank(self, numbers: list[int], k: int) -> Ranking:
        """The best rows for terms, which count as often as they stand in the query.

        MaxScore (Turtle and Flood, 1995): the terms with the highest scores come first. As soon as the others together
        can't lift a row to the k-th best one, it is left out.
        """
        terms = [self._rows_of_term(number, often) for number, often in Counter(numbers).items()]
        rows = self._rows_that_may_be_best(terms, k)
        # Summed in the query's order, so that equal rows tie, and scores are those of bm25s.
        scores = np.zeros(len(rows), np.float32)
        for number in numbers:
            scores += self._rows_of_term(number).scores_of(rows)
        return [(int(rows[place]), score) for place, score in best_rows(scores, k)]

    def _rows_that_may_be_best(self, terms: list[_ScoredRows], k: int) -> np.ndarray:
        """The rows that may be among the `k` best, in order.

        The terms are added from the one with the highest score down. `threshold` is the k-th best total so far, and
        `others` the most that all terms to come can add; a row whose total with these stays below the threshold is
        dropped. Totals are float32 sums in another order than `rank` makes them, so the threshold is lowered by
        `_ROUNDING`.

        Args:
            terms: The terms with their scores by row; sorted here.
            k: Number of rows that are searched.

        Returns:
            Row numbers, ascending; at least the `k` best rows of those with any term.
        """
        terms.sort(key=lambda term: -term.highest)
        totals = np.zeros(self.count, np.float32)
        threshold = 0.0
        others = sum(term.highest for term in terms)
        # The rows that may still be among the best; None: any row.
        rows: np.ndarray | None = None
        for term in terms:
            others = max(others - term.highest, 0.0)
            if rows is not None and _LOOKED_UP * len(rows) < len(term.rows):
                totals[rows] += term.often * term.scores_of(rows)
                reached = totals[rows]
            else:
                reached = totals[term.rows] + term.often * term.scores
                totals[term.rows] = reached
            above = reached[reached > threshold]
            if len(above) >= k:
                threshold = float(np.partition(above, -k)[-k])
            least = threshold * (1 - _ROUNDING) - others
            if least > 0:
                # A row without any of these terms can't reach the best ones.
                rows = np.flatnonzero(totals >= least) if rows is None else rows[totals[rows] >= least]
        return np.flatnonzero(totals > 0) if rows is None else rows

    def _rows_of_term(self, number: int, often: int = 1) -> _ScoredRows:
        """The rows of a term with their scores; the highest score of each term is computed once."""
        start, end = self._starts[number : number + 2].tolist()
        scores = self._scores[start:end]
        if number not in self._highest:
            self._highest[number] = float(scores.max())
        return _ScoredRows(self._rows[start:end], scores, often, often * self._highest[number])


class _ScoredRows(NamedTuple):
    """The rows of a term, ascending, and their scores; arrays of shape (rows with the term,).

    Attributes:
        often: How often the query has the term.
        highest: The highest score, times `often`.
    """

    rows: np.ndarray
    scores: np.ndarray
    often: int
    highest: float

    def scores_of(self, rows: np.ndarray) -> np.ndarray:
        """The scores of some rows, in their order; 0 for a row without the term."""
        # Of the same type, since all rows of the term would be converted otherwise.
        places = np.searchsorted(self.rows, rows.astype(self.rows.dtype))
        places[places == len(self.rows)] = 0
        return np.where(self.rows[places] == rows, self.scores[places], np.float32(0))
