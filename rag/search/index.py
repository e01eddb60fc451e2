"""Indexes of a corpus on disk, each with a manifest of its sources.

When the sources change, the index is rebuilt, and unchanged rows are reused. Several programs may share one folder of
indexes: one program builds the missing indexes while the other programs wait.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from tripletune.core.data.jsonl import is_packed, json_value
from tripletune.core.data.passages import Passage, corpus_file, read_corpus
from tripletune.core.data.words import language_shares
from tripletune.core.files import LOCK, check_folder, file_digest, lock_folder, new_folder, read_json, write_json

logger = logging.getLogger(__name__)
T = TypeVar("T")
# What an index was built from, and the facts that its build noted, by name; JSON values.
Manifest = dict[str, Any]

MANIFEST = "manifest.json"
# The digest of each row of an index, for `rows_of`.
ROWS = "rows.npy"
# What an unfinished build is built from.
_BUILDING = "building.json"
_OFFSETS = "offsets.npy"
# Number of passages used to detect a corpus's language, and characters of each passage.
_SAMPLE, _READ = 100, 300
# Minimum share of a further language that is reported.
_NAMED_SHARE = 0.1
# Passages kept in memory.
_KEPT = 4096
# Files that a program of this module or bm25s makes in a folder.
_BM25 = ("*.index.json", "*.index.npy", "*.index.jsonl")
_MADE = (MANIFEST, _OFFSETS, ROWS, "vectors.f*", "*.faiss", "triples.jsonl", *_BM25)


def check_index_folder(folder: Path) -> None:
    """Raise an error if a folder of indexes holds other files, since a build replaces whole folders in it."""
    check_folder(folder, (LOCK, ".*", "triples*"), overwrite=True, continues="passages")


def manifest(folder: Path) -> Manifest:
    """The manifest of the index in a folder; empty if there is no index.

    It holds what the index was built from, the result of its build under "about", and the sizes of its "files".
    """
    path = folder / MANIFEST
    return read_json(path) if path.is_file() else {}


def check_same_source(folder: Path, key: str, value: str, name: str = "") -> None:
    """Raise an error if an index would be replaced whose manifest has another value for `key`.

    Args:
        name: What has the value, such as the file of a digest; the manifest has the name of its own value in "about".
    """
    stored = manifest(folder)
    if stored.get(key, value) == value:
        return
    stored_name = stored.get("about", {}).get(key, "")
    stored_of = f" of {stored_name}" if stored_name else ""
    value_of = f" of {name}" if name else ""
    # The name of an encoder is followed by the settings with which it embeds texts.
    is_same_model = key == "encoder" and str(stored[key]).split()[:1] == value.split()[:1]
    advice = "set encoder_dtype, query_prompt and text_prompt as when it was built, " if is_same_model else ""
    raise FileExistsError(
        f"index {folder} was built with {key} {stored[key]}{stored_of}, not with {value}{value_of}: "
        f"{advice}give another --index, or add --overwrite to replace the index"
    )


def ensure_index(
    folder: Path,
    wanted: Manifest,
    build: Callable[[Path], Manifest | None],
    made_from: Mapping[str, str] = {},
) -> Manifest:
    """Make sure that `folder` holds an index built from `wanted`; replace any other index.

    The index is looked for again under the lock, since another program may have built it in the meantime.

    Args:
        wanted: Corpus digest and settings of the index, as JSON values.
        build: Writes the index files into the given folder, which may hold an interrupted build with the same `wanted`.
            The manifest stores the result of `build`, which this and later calls return.
        made_from: Entries that the result of `build` must have, else the index is built again. Later calls may leave
            them out, and then take the index as it is.

    Returns:
        The facts that the build noted ("about" in the manifest).
    """
    wanted = json.loads(json.dumps(wanted))
    if not _is_complete(folder, wanted, made_from):
        with lock_folder(folder.parent, f"{folder.parent}: another program is building an index", wait=True):
            if not _is_complete(folder, wanted, made_from):
                _build_index(folder, wanted, build, made_from)
    return manifest(folder).get("about", {})


def digest_rows(rows: Iterable[str]) -> np.ndarray:
    """A digest of 16 bytes for each text, by which a later index finds the rows that it need not embed again."""
    return np.fromiter(map(_digest_of_text, rows), "S16")


def _digest_of_text(text: str) -> bytes:
    """A digest of a text, also of one with unpaired surrogates, which stand in corpora of the web."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class OldRows(NamedTuple):
    """How the rows of a new index relate to those of an earlier index in the same folder.

    Attributes:
        places: The position of each new row in the earlier index, or -1; of shape (rows,).
        is_dropped: Whether each earlier row is missing in the new index; of shape (earlier rows,).
        summary: How many rows are added and dropped.
    """

    places: np.ndarray
    is_dropped: np.ndarray
    summary: str


def find_earlier_rows(folder: Path, digests: np.ndarray, made_by: Mapping[str, Any] = {}) -> OldRows:
    """Find rows in the earlier index of a folder, so that they are not embedded again.

    Args:
        digests: The digests of the new rows, of shape (rows,).
        made_by: What the earlier index's manifest must say, so that its rows can be used again.
    """
    old = digests[:0]
    if (folder / ROWS).is_file() and made_by.items() <= manifest(folder).items():
        old = np.load(folder / ROWS, mmap_mode="r")
    order = np.argsort(old, kind="stable")
    # The first earlier row, in sorted order, that is not smaller; -1 (which compares with b"") if all are smaller.
    candidates = np.append(order, -1)[np.searchsorted(old, digests, sorter=order)]
    places = np.where(np.append(old, b"")[candidates] == digests, candidates, -1)
    is_dropped = np.isin(old, digests, invert=True)
    return OldRows(places, is_dropped, f"{(places < 0).sum():,} rows added, {is_dropped.sum():,} dropped")


def _is_complete(folder: Path, wanted: Manifest | None, made_from: Mapping[str, str] = {}) -> bool:
    """Whether a folder holds an index built from `wanted` (None: any index); a damaged file is a `ValueError`.

    Files are checked by their sizes: digests of many gigabytes would take longer than opening the index.
    """
    built_from = manifest(folder)
    sizes = built_from.pop("files", {})
    about = built_from.pop("about", {})
    if wanted is not None and (built_from != wanted or not made_from.items() <= about.items()):
        return False
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise ValueError(f"index file {path} is damaged: remove the folder {folder} to build the index again")
    return True


def _build_index(
    folder: Path,
    wanted: Manifest,
    build: Callable[[Path], Manifest | None],
    made_from: Mapping[str, str],
) -> None:
    """Build an index in a scratch folder, which replaces `folder` when it is complete; see `prepare`.

    The scratch folder survives a kill, and the next build continues in it if it is of the same sources. A folder with a
    manifest is therefore always complete.

    Args:
        folder: The folder of the index.
        wanted: What the index must be of; stored in the manifest, and compared the next time.
        build: Writes the files into the scratch folder; returns facts for the manifest.
        made_from: Further sources, which only an unfinished build is compared with.
    """
    with new_folder(folder, _MADE, overwrite=True, resume=True) as scratch:
        # An unfinished build of other sources is of no use.
        building = scratch / _BUILDING
        sources = {**wanted, **made_from}
        if not building.is_file() or read_json(building) != sources:
            for path in scratch.iterdir():
                if path.name != LOCK:
                    path.unlink()
            write_json(building, sources)
        _is_complete(folder, None)  # rows of a damaged index must not be used again
        try:
            about = build(scratch) or {}
        except FileExistsError:
            shutil.rmtree(scratch)
            raise
        changes = about.pop("changes", "built again")
        replaced = manifest(folder)
        if replaced:
            changed = sorted(key for key in wanted if wanted[key] != replaced.get(key))
            # A file's name says more than that of its digest.
            names = [key.removesuffix("_sha256") for key in changed or made_from]
            logger.info("index %s was built with another %s: %s", folder, ", ".join(names), changes)
        building.unlink()
        sizes = {path.name: path.stat().st_size for path in sorted(scratch.iterdir()) if path.name != LOCK}
        write_json(scratch / MANIFEST, {**wanted, "about": about, "files": sizes})


class Lines(Generic[T]):
    """The lines of a file by number; recently read lines are kept in memory.

    Args:
        offsets: The file with the position of each line in bytes.
        read: Makes an item of a line.
        kept: Number of items to keep in memory.
    """

    def __init__(self, path: Path, offsets: Path, read: Callable[[bytes], T], kept: int) -> None:
        """Open both files, which stay open as long as the object lives."""
        self._offsets = np.load(offsets, mmap_mode="r", allow_pickle=False)
        file = path.open("rb")
        reading = threading.Lock()

        def read_line(number: int) -> T:
            """Read a line of the file."""
            with reading:  # another thread must not move the position between the two calls
                file.seek(int(self._offsets[number]))
                line = file.readline()
            return read(line)

        self._line = lru_cache(maxsize=kept)(read_line)

    def __len__(self) -> int:
        """Number of lines."""
        return len(self._offsets)

    def __getitem__(self, number: int) -> T:
        """The item of a line, read from the file unless it was read recently."""
        return self._line(number)


class PassageStore(Lines[Passage]):
    """The passages of one JSON-lines corpus by position, which is the order of their lines.

    Memory holds 8 bytes per passage (also stored in `index_dir`) and recently read passages; texts stay in the file.
    """

    def __init__(self, corpus: str | Path, index_dir: str | Path, overwrite: bool = False) -> None:
        """Open the corpus, and write the positions of its passages into `index_dir` if they are missing or outdated."""
        self.corpus = corpus = corpus_file(corpus)
        if is_packed(corpus):
            raise ValueError(f"corpus {corpus} is a gzip file, and its lines are not read in order: unpack it first")
        self.sha256 = file_digest(corpus)
        folder = self._folder = Path(index_dir) / "passages"
        wanted = {"kind": "passages", "corpus_sha256": self.sha256}
        about = ensure_index(folder, wanted, lambda out: self._write_positions(out, folder, overwrite))
        # Indexes of earlier revisions do not hold them.
        self._languages: dict[str, float] | None = about.get("languages")
        if about.get("copies"):
            problem = "passages are copies, which take places in search results: remove the copies"
            logger.warning("%s: %s %s", corpus, f"{about['copies']:,}", problem)

        def read(line: bytes) -> Passage:
            """The passage on a line of the corpus."""
            return Passage.from_json(json_value(line), str(corpus))

        # Only now does the file with the positions exist.
        super().__init__(corpus, folder / _OFFSETS, read, _KEPT)

    def _write_positions(self, out: Path, folder: Path, overwrite: bool) -> Manifest:
        """Write positions and digests of the passages into `out`; `folder` may hold those of an earlier corpus.

        A corpus that shares less than half of the old passages is probably another one, named by mistake; its index is
        only replaced with `overwrite`.
        """
        lines = _checked_lines(self.corpus)
        np.save(out / _OFFSETS, lines.offsets, allow_pickle=False)
        np.save(out / ROWS, lines.digests, allow_pickle=False)
        old = find_earlier_rows(folder, lines.digests)
        # A corpus that has grown or changed still has most of its old passages.
        is_other = not old.is_dropped.size or old.is_dropped.mean() > 0.5
        if is_other and not overwrite:
            check_same_source(folder, "corpus_sha256", self.sha256, str(self.corpus))
        copies = len(lines.digests) - np.unique(lines.digests).size
        about = {"corpus_sha256": str(self.corpus.resolve()), "copies": copies, "changes": old.summary}
        return {**about, "languages": _detected_languages(self.corpus, lines.offsets)}

    @cached_property
    def language(self) -> str:
        """The language of most of the text.

        The shares of languages were detected when the index was built: loading the detector takes 0.4 s.
        """
        shares = self._languages
        if shares is None:
            shares = _detected_languages(self.corpus, np.load(self._folder / _OFFSETS, mmap_mode="r"))
        logger.info("%s: %s", self.corpus, _language_in_words(shares))
        return next(iter(shares))

    def __iter__(self) -> Iterator[Passage]:
        """Read all passages from the start, without keeping them."""
        return read_corpus(self.corpus)

    def texts(self) -> Iterator[str]:
        """Yield the text of each passage that is searched: its title and its text."""
        for passage in self:
            yield passage.content


def _detected_languages(corpus: Path, offsets: np.ndarray) -> dict[str, float]:
    """The share of each language in a corpus, the largest first.

    They are detected from passages of all its parts, since a corpus may begin with odd ones.
    """
    sample = []
    with corpus.open("rb") as lines:
        for offset in offsets[:: max(1, len(offsets) // _SAMPLE)]:
            lines.seek(int(offset))
            content = Passage.from_json(json_value(lines.readline()), str(corpus)).content
            sample.append((content[:_READ], len(content)))
    return language_shares(sample)


def _language_in_words(shares: Mapping[str, float]) -> str:
    """Which language BM25 takes; for a mixed corpus also the shares, and what to do."""
    most, *others = shares
    named_others = [f"{code} {shares[code]:.0%}" for code in others if shares[code] >= _NAMED_SHARE]
    if not named_others:
        return f"BM25 stems by the detected language {most} (--set language=NAME sets another)"
    return (
        f"BM25 stems by {most}, the language of most text: {most} {shares[most]:.0%}, {', '.join(named_others)} "
        "(--set language=NAME sets another, language=none stems nothing)"
    )


class _CorpusLines(NamedTuple):
    """The position in bytes and the digest of each line of a corpus that is not blank; arrays of shape (passages,)."""

    offsets: np.ndarray
    digests: np.ndarray


def _checked_lines(corpus: Path) -> _CorpusLines:
    """The lines of a corpus, after a check that passage ids are distinct, since loops compare ids.

    Memory holds a hash of each id. Passages with equal hashes are compared by their digests: copies are no problem.
    """
    ids = array("q")
    offsets = array("q")

    def contents() -> Iterator[str]:
        """The texts of the passages; their ids are collected on the way, to be checked when all were read."""
        for passage in read_corpus(corpus):
            ids.append(hash(passage.id))
            yield passage.content

    digests = digest_rows(contents())
    order = np.argsort(ids, kind="stable")
    sorted_ids, sorted_digests = np.asarray(ids)[order], digests[order]
    has_same_id = sorted_ids[1:] == sorted_ids[:-1]
    has_other_text = sorted_digests[1:] != sorted_digests[:-1]
    problems = np.flatnonzero(has_same_id & has_other_text)
    if problems.size:
        place = problems[0]
        first, second = sorted([int(order[place]), int(order[place + 1])])
        raise ValueError(
            f"{corpus}: {problems.size} passages have the id of another passage, for example on lines {first + 1} and "
            f'{second + 1} (without blank lines): give each passage its own "id", or leave out all ids'
        )
    position = 0
    with corpus.open("rb") as lines:
        for line in lines:
            if line.strip():
                offsets.append(position)
            position += len(line)
    return _CorpusLines(np.asarray(offsets), digests)
