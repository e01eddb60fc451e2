"""Random access to the passages of a JSON-lines corpus: 8 bytes a passage in memory, the texts stay in the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tripletune.models.data.passages import Passage, read_corpus
from tripletune.models.data.records import json_value
from tripletune.rag.retrieval.index_folder import prepare, sha256_of

_OFFSETS = "offsets.npy"


class PassageStore:
    """The passages of one corpus by position, the order of their lines."""

    def __init__(self, corpus: Path, sha256: str, offsets: np.ndarray) -> None:
        self.corpus = corpus
        self.sha256 = sha256
        self._offsets = offsets
        self._file = corpus.open("rb")

    @classmethod
    def open(cls, corpus: str | Path, index_dir: str | Path) -> PassageStore:
        """Open a corpus, writing its offsets into `index_dir/passages` when they are not there yet.

        Args:
            corpus: A JSON-lines corpus, see `rag.corpus.read_corpus`.
            index_dir: The folder that holds all indexes of this corpus.

        Raises:
            FileNotFoundError: there is no such corpus.
            ValueError: a line of the corpus is malformed, or it holds no passage.
        """
        corpus, folder = Path(corpus), Path(index_dir) / "passages"
        sha256 = sha256_of(corpus)
        prepare(folder, {"kind": "passages", "corpus_sha256": sha256}, lambda out: _write_offsets(corpus, out))
        return cls(corpus, sha256, np.load(folder / _OFFSETS, mmap_mode="r", allow_pickle=False))

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, position: int) -> Passage:
        self._file.seek(int(self._offsets[position]))
        row = json_value(self._file.readline())
        return Passage(str(row.get("title") or ""), row["text"], str(row.get("id") or ""))

    def __iter__(self) -> Iterator[Passage]:
        return read_corpus(self.corpus)

    def close(self) -> None:
        """Close the corpus file."""
        self._file.close()


def _write_offsets(corpus: Path, folder: Path) -> None:
    passages = sum(1 for _ in read_corpus(corpus))
    offsets = np.empty(passages, dtype=np.int64)
    found = position = 0
    with corpus.open("rb") as lines:
        for line in lines:
            if line.strip():
                if found < passages:
                    offsets[found] = position
                found += 1
            position += len(line)
    if found != passages:
        raise ValueError(
            f"{corpus}: {passages} passages on {found} lines: the file has unusual line ends; "
            "write one JSON object a line, ended by a line feed"
        )
    np.save(folder / _OFFSETS, offsets, allow_pickle=False)
