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
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from tripletune.core.data.jsonl import is_packed, json_value
from tripletune.core.data.passages import Passage, corpus_file, read_corpus
from tripletune.core.data.words import detect
from tripletune.core.files import LOCK, check_folder, file_digest, lock_folder, new_folder, read_json, write_json

logger = logging.getLogger(__name__)
T = TypeVar("T")

MANIFEST, ROWS = "manifest.json", "rows.npy"
_BUILDING, _OFFSETS = "building.json", "offsets.npy"
# Number of passages used to detect a corpus's language, and characters of each passage.
_SAMPLE, _READ = 100, 300
_KEPT = 4096
_BM25 = ("*.index.json", "*.index.npy", "*.index.jsonl")
_MADE = (MANIFEST, _OFFSETS, ROWS, "vectors.f*", "*.faiss", "triples.jsonl", *_BM25)


def check_index(folder: Path) -> None:
    """Raise an error if a folder of indexes holds other files."""
    check_folder(folder, (LOCK, ".*", "triples*"), True, continues="passages")


def manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the index in a folder; empty if there is no index."""
    return read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}


def check_same(folder: Path, key: str, value: str, name: str = "") -> None:
    """Raise an error if an index would be replaced whose manifest has another value for `key`."""
    found = manifest(folder)
    if found.get(key, value) != value:
        was, name = (text and f" of {text}" for text in (found.get("about", {}).get(key, ""), name))
        raise FileExistsError(
            f"index {folder} was built with {key} {found[key]}{was}, not with {value}{name}: give another --index, or "
            "add --overwrite to replace the index"
        )


def prepare(folder: Path, wanted: dict[str, Any], build: Callable[[Path], dict[str, Any] | None]) -> dict[str, Any]:
    """Make sure that `folder` holds an index built from `wanted`; replace any other index.

    Args:
        wanted: Corpus digest and settings of the index, as JSON values.
        build: Writes the index files into the given folder, which may hold an interrupted build with the same `wanted`.
            The manifest stores the result of `build`, which this and later calls return.
    """
    wanted = json.loads(json.dumps(wanted))
    if not _is_there(folder, wanted):
        with lock_folder(folder.parent, f"{folder.parent}: another program is building an index", wait=True):
            if not _is_there(folder, wanted):
                _build(folder, wanted, build)
    return manifest(folder).get("about", {})


def digest_rows(rows: Iterable[str]) -> np.ndarray:
    """A digest of 16 bytes for each text."""
    codes = (row.encode("utf-8", "surrogatepass") for row in rows)
    return np.fromiter((hashlib.blake2b(code, digest_size=16).digest() for code in codes), "S16")


def rows_of(folder: Path, digests: np.ndarray, **made_by: Any) -> tuple[np.ndarray, np.ndarray, str]:
    """Return each row's position in the index of a folder, or -1; which old rows are dropped; and a summary."""
    known = (folder / ROWS).is_file() and made_by.items() <= manifest(folder).items()
    old = np.load(folder / ROWS, mmap_mode="r") if known else digests[:0]
    order = np.argsort(old, kind="stable")
    found = np.append(order, -1)[np.searchsorted(old, digests, sorter=order)]
    places = np.where(np.append(old, b"")[found] == digests, found, -1)
    gone = np.isin(old, digests, invert=True)
    return places, gone, f"{(places < 0).sum():,} rows added, {gone.sum():,} dropped"


def _is_there(folder: Path, wanted: dict[str, Any] | None) -> bool:
    """Whether a folder holds an index built from `wanted` (None: any index); a damaged file is a `ValueError`."""
    found = manifest(folder)
    sizes, _ = found.pop("files", {}), found.pop("about", None)
    if wanted is not None and found != wanted:
        return False
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise ValueError(f"index file {path} is damaged: remove the folder {folder} to build the index again")
    return True


def _build(folder: Path, wanted: dict[str, Any], build: Callable[[Path], dict[str, Any] | None]) -> None:
    with new_folder(folder, _MADE, overwrite=True, resume=True) as scratch:
        building = scratch / _BUILDING
        if not building.is_file() or read_json(building) != wanted:
            for path in scratch.iterdir():
                if path.name != LOCK:
                    path.unlink()
            write_json(building, wanted)
        _is_there(folder, None)
        try:
            about = build(scratch) or {}
        except FileExistsError:
            shutil.rmtree(scratch)
            raise
        changes = about.pop("changes", "built again")
        if found := manifest(folder):
            changed = ", ".join(sorted(key for key in wanted if wanted[key] != found.get(key)))
            logger.info("index %s was built with another %s: %s", folder, changed, changes)
        building.unlink()
        sizes = {path.name: path.stat().st_size for path in sorted(scratch.iterdir()) if path.name != LOCK}
        write_json(scratch / MANIFEST, {**wanted, "about": about, "files": sizes})


class Lines(Generic[T]):
    """The lines of a file by number; recently read lines are kept in memory."""

    def __init__(self, path: Path, offsets: Path, read: Callable[[bytes], T], kept: int) -> None:
        self._offsets = np.load(offsets, mmap_mode="r", allow_pickle=False)
        file, reading = path.open("rb"), threading.Lock()

        def line(number: int) -> T:
            with reading:
                file.seek(int(self._offsets[number]))
                found = file.readline()
            return read(found)

        self._line = lru_cache(maxsize=kept)(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, number: int) -> T:
        return self._line(number)


class PassageStore(Lines[Passage]):
    """The passages of one JSON-lines corpus by position, which is the order of their lines.

    Memory holds 8 bytes per passage (also stored in `index_dir`) and recently read passages; texts stay in the file.
    """

    def __init__(self, corpus: str | Path, index_dir: str | Path, overwrite: bool = False) -> None:
        self.corpus = corpus = corpus_file(corpus)
        if is_packed(corpus):
            raise ValueError(f"corpus {corpus} is a gzip file, and its lines are not read in order: unpack it first")
        self.sha256, folder = file_digest(corpus), Path(index_dir) / "passages"
        wanted = {"kind": "passages", "corpus_sha256": self.sha256}
        if copies := prepare(folder, wanted, lambda out: self._write(out, folder, overwrite)).get("copies"):
            problem = "passages are copies, which take places in search results: remove the copies"
            logger.warning("%s: %s %s", corpus, f"{copies:,}", problem)
        read = lambda line: Passage.from_json(json_value(line), str(corpus))  # noqa: E731
        super().__init__(corpus, folder / _OFFSETS, read, _KEPT)

    def _write(self, out: Path, folder: Path, overwrite: bool) -> dict[str, Any]:
        offsets, digests = _check(self.corpus)
        for name, values in ((_OFFSETS, offsets), (ROWS, digests)):
            np.save(out / name, values, allow_pickle=False)
        _, gone, changes = rows_of(folder, digests)
        # A corpus that has grown or changed still has most of its old passages.
        if not overwrite and (not gone.size or gone.mean() > 0.5):
            check_same(folder, "corpus_sha256", self.sha256, str(self.corpus))
        copies = len(digests) - np.unique(digests).size
        return {"corpus_sha256": str(self.corpus.resolve()), "copies": copies, "changes": changes}

    @cached_property
    def language(self) -> str:
        """The language of the corpus, detected from a sample."""
        step = max(1, len(self) // _SAMPLE)
        found = detect("\n".join(self[place].content[:_READ] for place in range(0, len(self), step)))
        logger.info("%s: BM25 stems by the detected language %s (--set language=NAME sets another)", self.corpus, found)
        return found

    def __iter__(self) -> Iterator[Passage]:
        return read_corpus(self.corpus)


def _check(corpus: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets and digests of the lines, after a check that passage ids are distinct, since loops compare ids."""
    ids, offsets = array("q"), array("q")

    def contents() -> Iterator[str]:
        for passage in read_corpus(corpus):
            ids.append(hash(passage.id))
            yield passage.content

    digests = digest_rows(contents())
    order = np.argsort(ids, kind="stable")
    keys, texts = np.asarray(ids)[order], digests[order]
    twice = np.flatnonzero((keys[1:] == keys[:-1]) & (texts[1:] != texts[:-1]))
    if twice.size:
        first, second = sorted(int(order[place]) for place in (twice[0], twice[0] + 1))
        raise ValueError(
            f"{corpus}: {twice.size} passages have the id of another passage, for example on lines {first + 1} and "
            f'{second + 1} (without blank lines): give each passage its own "id", or leave out all ids'
        )
    position = 0
    with corpus.open("rb") as lines:
        for line in lines:
            if line.strip():
                offsets.append(position)
            position += len(line)
    return np.asarray(offsets), digests
