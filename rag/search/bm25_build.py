"""Build a BM25 index in parts on disk, with little memory (Robertson and Zaragoza, 2009; the Lucene variant).

The files are those of bm25s (its format with a score per term and row), which also opens them. bm25s itself builds an
index in memory: rows as lists of numbers, and several times the finished index. Here, blocks of rows become parts with
counts alone, since scores need the counts of all rows. The parts are then merged, one range of terms after another.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tripletune.core.data.words import WordRules
from tripletune.core.files import new_file, write_json, write_text
from tripletune.core.program import progress

logger = logging.getLogger(__name__)

# Rows per part; a row's place in its part fits in so many bits.
_ROW_BITS = 16
# (Term, row) pairs whose scores are computed at once, if no term alone has more.
_MERGED = 1 << 20
# Words between spaces whose terms are remembered.
_REMEMBERED = 300_000
# Fields of a part's head: rows, terms and pairs.
_HEAD = 3


class RowTerms:
    """The terms of rows as numbers, in the order in which the rows bring them.

    Attributes:
        vocabulary: The number of each term.
    """

    def __init__(self, rules: WordRules) -> None:
        self.vocabulary: dict[str, int] = {}
        self._rules = rules
        self._kept = _KeptNumbers(rules, self.vocabulary)

    def numbers(self, row: str) -> list[int]:
        """The terms of a row; a title of stop words alone ("It", "It (1990 film)") can be found by them."""
        numbers = self._kept.numbers_of(row)
        if not numbers:
            return self._all_numbers(row)
        title, line_break, _ = row.partition("\n")
        if line_break:
            name = title.partition(" (")[0]
            if not self._kept.numbers_of(name):
                present = set(numbers)
                numbers += [number for number in self._all_numbers(name) if number not in present]
        return numbers

    def _all_numbers(self, text: str) -> list[int]:
        """The terms of a text, stop words among them, by which a row of stop words alone is found."""
        return [self.vocabulary.setdefault(term, len(self.vocabulary)) for term in self._rules.all(text)]


class _KeptNumbers(dict[str, tuple[int, ...]]):
    """The terms, without stop words, of what stands between two spaces.

    Texts repeat their words, so each is analysed once. A dictionary that fills itself is read without a step of the
    interpreter per word.

    Args:
        rules: Split a word into terms, without stop words.
        vocabulary: The number of each term; it grows.
    """

    def __init__(self, rules: WordRules, vocabulary: dict[str, int]) -> None:
        super().__init__()
        self._rules, self._vocabulary = rules, vocabulary

    def __missing__(self, word: str) -> tuple[int, ...]:
        """The numbers of a word's terms; a word is split into terms once, and new terms get the next numbers."""
        vocabulary = self._vocabulary
        numbers = tuple(vocabulary.setdefault(term, len(vocabulary)) for term in self._rules.kept(word))
        self[word] = numbers
        return numbers

    def numbers_of(self, text: str) -> list[int]:
        """The numbers of the terms of a text, in its order; when too many words are kept, all are forgotten."""
        if len(self) > _REMEMBERED:
            self.clear()
        return list(chain.from_iterable(map(self.__getitem__, text.split())))


def build_bm25(rows: Iterable[str], rules: WordRules, folder: Path, k1: float, b: float) -> None:
    """Write the BM25 index of rows into a folder, in the format of bm25s.

    A killed build continues after its last complete part.

    Raises:
        ValueError: No row has a word.
    """
    terms = RowTerms(rules)
    _write_parts(rows, terms, folder)
    if not terms.vocabulary:
        raise ValueError(f"{folder}: no row has a word, so BM25 finds nothing")
    parts = list(_complete_parts(folder))
    _write_scores(parts, len(terms.vocabulary), folder, k1, b)
    write_text(folder / "vocab.index.json", json.dumps(terms.vocabulary, ensure_ascii=False))
    settings = {"k1": k1, "b": b, "delta": 0.5, "method": "lucene", "idf_method": "lucene"}
    types = {"dtype": "float32", "int_dtype": "int32", "backend": "numpy"}
    count = sum(part.rows for part in parts)
    write_json(folder / "params.index.json", {**settings, **types, "num_docs": count, "version": "0.3.16"})
    for part in parts:
        part.path.unlink()
        _file_of_new_terms(part.path).unlink()


class _Pairs(NamedTuple):
    """Pairs of term and row, without their terms, which the place of a pair tells.

    Attributes:
        rows: Numbers of rows (int32), of shape (pairs,).
        counts: How often the term stands in the row (int32), of shape (pairs,).
    """

    rows: np.ndarray
    counts: np.ndarray


class _Part(NamedTuple):
    """A part on disk: a file of int32 with a head, the rows' lengths, its terms, their ends, and (row, count) pairs.

    Attributes:
        terms: Numbers of the terms that occur, ascending, of shape (terms,).
        ends: Where the pairs of each term end, of shape (terms + 1,); the first is 0.
        lengths: Terms of each row, of shape (rows,).
        pairs: Place of the first pair in the file, in numbers.
    """

    path: Path
    terms: np.ndarray
    ends: np.ndarray
    lengths: np.ndarray
    pairs: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def read_pairs(self, start: int, end: int) -> _Pairs:
        """The pairs from `start` to before `end`, read from the file and not kept.

        The file has the rows of all pairs, then their counts (`_write_part`).
        """
        first_count = self.pairs + int(self.ends[-1])
        rows = np.fromfile(self.path, np.int32, end - start, offset=4 * (self.pairs + start))
        counts = np.fromfile(self.path, np.int32, end - start, offset=4 * (first_count + start))
        return _Pairs(rows, counts)


def _part_path(folder: Path, number: int) -> Path:
    """The file of a part; it has this name only when the part is complete (`new_file` renames it)."""
    return folder / f"part-{number:05d}.i32"


def _file_of_new_terms(path: Path) -> Path:
    """The file with the terms that a part brings first."""
    return path.with_suffix(".json")


def _complete_parts(folder: Path) -> Iterator[_Part]:
    """Open the complete parts in a folder, in order; a part has its name only when it is complete."""
    number = 0
    while (path := _part_path(folder, number)).is_file():
        rows, terms, _ = np.fromfile(path, np.int32, _HEAD).tolist()
        numbers = np.fromfile(path, np.int32, rows + 2 * terms + 1, offset=4 * _HEAD)
        lengths, own_terms, ends = np.split(numbers, [rows, rows + terms])
        yield _Part(path, own_terms, ends, lengths, _HEAD + len(numbers))
        number += 1


def _write_parts(rows: Iterable[str], terms: RowTerms, folder: Path) -> None:
    """Write the parts that are missing; one thread reads rows while another sorts and writes.

    A killed build continues after its last whole part. The vocabulary is therefore read from the parts before new rows
    are numbered. At most two parts are in memory.

    Args:
        rows: The texts of all rows, from the first one, also after a kill.
        terms: Splits texts into terms, and numbers these in order of appearance; its vocabulary grows.
        folder: Where the parts are.
    """
    number = done = 0
    for part in _complete_parts(folder):
        for term in json.loads(_file_of_new_terms(part.path).read_text(encoding="utf-8")):
            terms.vocabulary[term] = len(terms.vocabulary)
        number += 1
        done += part.rows
    remaining = islice(rows, done, None)
    writing: Future[None] | None = None
    with ThreadPoolExecutor(1) as writer, progress(name="BM25 terms", unit="row", initial=done) as bar:
        while True:
            first_new = len(terms.vocabulary)
            numbers, lengths = array("i"), array("i")
            for row in islice(remaining, 1 << _ROW_BITS):
                row_numbers = terms.numbers(row)
                numbers.extend(row_numbers)
                lengths.append(len(row_numbers))
            if writing is not None:
                writing.result()
            if not lengths:
                return
            new_terms = list(islice(terms.vocabulary, first_new, None))
            path = _part_path(folder, number)
            writing = writer.submit(_write_part, path, np.asarray(numbers), np.asarray(lengths), done, new_terms)
            bar.update(len(lengths))
            number += 1
            done += len(lengths)


def _write_part(path: Path, numbers: np.ndarray, lengths: np.ndarray, first_row: int, new_terms: list[str]) -> None:
    """Count the terms of the rows of a part, and write them.

    Args:
        numbers: The terms of all rows, one row after another.
        lengths: Terms of each row.
        first_row: Number of the part's first row.
        new_terms: Terms that no earlier part has.
    """
    # One number for each pair of term and row, so that sorting is fast.
    keys = numbers.astype(np.int64) << _ROW_BITS
    keys |= np.repeat(np.arange(len(lengths)), lengths)
    keys.sort()
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    counts = np.diff(starts, append=len(keys))
    keys = keys[starts]
    pair_rows = (keys & ((1 << _ROW_BITS) - 1)) + first_row
    pair_terms = keys >> _ROW_BITS
    term_starts = np.flatnonzero(np.diff(pair_terms, prepend=-1))
    ends = np.append(term_starts, len(keys))
    head = np.array([len(lengths), len(term_starts), len(keys)])
    with new_file(_file_of_new_terms(path)) as scratch:
        scratch.write_text(json.dumps(new_terms), encoding="utf-8")
    with new_file(path) as scratch, scratch.open("wb") as file:
        for field in (head, lengths, pair_terms[term_starts], ends, pair_rows, counts):
            file.write(field.astype(np.int32).tobytes())


def _write_scores(parts: list[_Part], terms: int, folder: Path, k1: float, b: float) -> None:
    """Write the scores of all (term, row) pairs, ordered by term and row, and where those of each term begin.

    Numbers and their types are those of bm25s, so that scores are the same to the last bit.
    """
    lengths = np.concatenate([part.lengths for part in parts])
    rows_with = np.zeros(terms, np.int64)
    for part in parts:
        rows_with[part.terms] += np.diff(part.ends)
    starts = np.concatenate([[0], np.cumsum(rows_with)])
    np.save(folder / "indptr.csc.index.npy", starts, allow_pickle=False)
    idf = np.log(1 + (len(lengths) - rows_with + 0.5) / (rows_with + 0.5)).astype(np.float32)
    # A longer row needs a term more often for the same score.
    scale = k1 * ((1 - b) + b * lengths / lengths.mean())
    rows_file = _NumbersFile(folder / "indices.csc.index.npy", np.int32, int(starts[-1]))
    scores_file = _NumbersFile(folder / "data.csc.index.npy", np.float32, int(starts[-1]))

    def merge_range(first: int, end: int) -> None:
        """Score the pairs of the terms from `first` to before `end`, and write them at their places in both files.

        Ranges bound the memory: each has about as many pairs as one part.
        """
        rows, counts = _pairs_of_terms(parts, starts, first, end)
        idf_of_pairs = np.repeat(idf[first:end], rows_with[first:end])
        scores = idf_of_pairs * (counts / (scale[rows] + counts))
        rows_file.write(rows, int(starts[first]))
        scores_file.write(scores, int(starts[first]))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for merged in [pool.submit(merge_range, *limits) for limits in pairwise(_term_limits(starts))]:
            merged.result()


def _term_limits(starts: np.ndarray) -> list[int]:
    """The first terms of the ranges merged at once, and the number of terms; `starts` has shape (terms + 1,)."""
    limits = [0]
    while limits[-1] < len(starts) - 1:
        full = int(np.searchsorted(starts, starts[limits[-1]] + _MERGED, side="right")) - 1
        limits.append(max(full, limits[-1] + 1))
    return limits


def _pairs_of_terms(parts: list[_Part], starts: np.ndarray, first: int, end: int) -> _Pairs:
    """The pairs of a range of terms in all parts, ordered by term and row.

    Args:
        parts: The parts, in order of their rows.
        starts: Where the pairs of each term begin in the whole index, of shape (terms + 1,).
        first: Number of the first term.
        end: Number after the last term.
    """
    size = int(starts[end] - starts[first])
    rows, counts = np.empty(size, np.int32), np.empty(size, np.int32)
    # Where the next part's pairs of each term belong.
    free = starts[first:end] - starts[first]
    for part in parts:
        low, high = np.searchsorted(part.terms, [first, end]).tolist()
        if low == high:
            continue
        own_terms = part.terms[low:high] - first
        ends = part.ends[low : high + 1]
        own_counts = np.diff(ends)
        places = np.repeat(free[own_terms] - (ends[:-1] - ends[0]), own_counts) + np.arange(ends[-1] - ends[0])
        rows[places], counts[places] = part.read_pairs(int(ends[0]), int(ends[-1]))
        free[own_terms] += own_counts
    return _Pairs(rows, counts)


class _NumbersFile:
    """A NumPy file of known length, whose ranges several threads write.

    Args:
        path: The file to write.
        dtype: The type of its numbers.
        size: How many numbers it will hold.
    """

    def __init__(self, path: Path, dtype: type[np.number], size: int) -> None:
        mapped = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(size,))
        self._path, self._dtype, self._offset = path, mapped.dtype, mapped.offset

    def write(self, values: np.ndarray, start: int) -> None:
        """Write values from a position; each call opens the file, so that threads do not share a place in it."""
        with self._path.open("r+b") as file:
            file.seek(self._offset + start * self._dtype.itemsize)
            file.write(values.astype(self._dtype).tobytes())
