"""Node and edge texts as vectors (RAS, eq. 5): each distinct string is embedded once, into a memory-mapped table.

The table is two NumPy files: `keys.npy`, the sorted 64-bit hashes of the strings, and `vectors.npy`, float16 rows in
the same order. Looking a string up is a binary search; nothing but the rows asked for is read from disk. (Two of n
strings share a hash with probability n^2 / 3.7e19, 1e-7 for two million strings, and would then share a vector.)
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from tripletune.models.files import read_json, write_json
from tripletune.models.loading import best_dtype, load_encoder, resolve

logger = logging.getLogger(__name__)
CHUNK = 4096
# Strings in a forward pass of the encoder.
_STRINGS_AT_ONCE = 256


class TextEncoder:
    """A sentence-transformers model that embeds short strings.

    Args:
        spec: Hub id, folder or `pypi:package`.
        dtype: Weight type; float32 by default, so that a vector does not depend on its neighbours in a batch.
    """

    def __init__(self, spec: str, dtype: torch.dtype = torch.float32) -> None:
        self._model = load_encoder(spec, dtype)
        dimension = self._model.get_embedding_dimension()
        if dimension is None:
            raise ValueError(f"encoder {spec!r} does not tell its embedding width; use a sentence-transformers model")
        self.dimension = int(dimension)

    def encode(self, strings: Sequence[str]) -> np.ndarray:
        """Embed strings.

        Returns:
            (n, D) float16 array; not normalised beyond what the model itself does.
        """
        vectors = self._model.encode(
            list(strings), batch_size=_STRINGS_AT_ONCE, convert_to_tensor=True, show_progress_bar=False
        )
        return vectors.float().cpu().numpy().astype(np.float16)


def encoder_dimension(spec: str) -> int:
    """Embedding width of an encoder without loading its weights where the folder tells it."""
    folder = Path(resolve(spec))
    pooling = folder / "1_Pooling" / "config.json"
    # A dense layer behind the pooling changes the width.
    if pooling.exists() and not list(folder.glob("*_Dense")):
        settings = read_json(pooling)
        for key in ("word_embedding_dimension", "embedding_dimension"):
            if key in settings:
                return int(settings[key])
    return TextEncoder(spec).dimension


def string_key(text: str) -> int:
    """The 64-bit hash a string is stored under."""
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little", signed=True
    )


class EmbeddingTable:
    """A read-only, memory-mapped table of string embeddings.

    Attributes:
        dimension: Width D of a vector.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        if not (folder / "table.json").exists():
            raise FileNotFoundError(f"{folder} holds no embedding table (table.json is missing); build it first")
        self._keys = np.load(folder / "keys.npy", mmap_mode="r", allow_pickle=False)
        self._vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
        self.dimension = int(self._vectors.shape[1])

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, keys: Sequence[int]) -> torch.Tensor:
        """(n, D) float32 tensor, one row per key (`string_key`) in the given order.

        Raises:
            KeyError: a string is not in the table.
        """
        wanted = np.asarray(keys, np.int64)
        found = np.searchsorted(self._keys, wanted)
        known = found < len(self._keys)
        known[known] = self._keys[found[known]] == wanted[known]
        if not known.all():
            raise KeyError(f"{np.sum(~known)} strings are not in the embedding table: it was built from other records")
        return torch.from_numpy(self._vectors[found].astype(np.float32))

    def vectors(self, strings: Sequence[str]) -> torch.Tensor:
        """(n, D) float32 tensor, one row per string in the given order, as `LiveEmbeddings` gives it."""
        return self[[string_key(text) for text in strings]]

    @classmethod
    def build(cls, strings: Iterable[str], encoder_spec: str, folder: str | Path) -> EmbeddingTable:
        """Embed every distinct string once and write the table; an existing folder is replaced whole.

        Args:
            strings: May repeat and may be a long stream; only 64-bit hashes are kept in memory.
            encoder_spec: The encoder.
            folder: Where the table goes.
        """
        from tqdm.auto import tqdm

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "table.json").unlink(missing_ok=True)
        encoder = TextEncoder(encoder_spec, dtype=best_dtype())
        keys: dict[int, None] = {}
        raw = folder / "vectors.raw"

        def distinct() -> Iterator[str]:
            for text in strings:
                key = string_key(text)
                if key not in keys:
                    keys[key] = None
                    yield text

        new = distinct()
        with raw.open("wb") as out, tqdm(desc="embedding strings", unit=" strings", disable=None) as bar:
            while chunk := list(islice(new, CHUNK)):
                out.write(encoder.encode(chunk).tobytes())
                bar.update(len(chunk))
        _sort_table(folder, raw, np.array([*keys], np.int64), encoder.dimension)
        about = {"encoder": encoder_spec, "dimension": encoder.dimension, "strings": len(keys)}
        write_json(folder / "table.json", about)
        logger.info("embedded %d distinct strings with %s", len(keys), encoder_spec)
        return cls(folder)


def _sort_table(folder: Path, raw: Path, keys: np.ndarray, dimension: int) -> None:
    order = np.argsort(keys)
    np.save(folder / "keys.npy", keys[order])
    target = np.lib.format.open_memmap(
        folder / "vectors.npy", mode="w+", dtype=np.float16, shape=(len(keys), dimension)
    )
    if len(keys):
        source = np.memmap(raw, np.float16, mode="r", shape=(len(keys), dimension))
        for start in range(0, len(keys), CHUNK):
            target[start : start + CHUNK] = source[order[start : start + CHUNK]]
        del source
    target.flush()
    raw.unlink()


class LiveEmbeddings:
    """Embeds strings as they come, each once, for inference; keeps the newest `capacity` of them.

    Args:
        encoder_spec: The encoder the model was trained with; loaded at the first string.
        dimension: Its width D.
        capacity: Vectors kept (1.5 KB each at D = 768).
    """

    def __init__(self, encoder_spec: str, dimension: int, capacity: int = 200_000) -> None:
        self.encoder_spec = encoder_spec
        self.dimension = dimension
        self.capacity = capacity
        self._encoder: TextEncoder | None = None
        self._known: dict[str, np.ndarray] = {}

    def vectors(self, strings: Sequence[str]) -> torch.Tensor:
        """(n, D) float32 tensor, one row per string in the given order."""
        missing = [text for text in dict.fromkeys(strings) if text not in self._known]
        if missing:
            if self._encoder is None:
                self._encoder = TextEncoder(self.encoder_spec)
            if len(self._known) + len(missing) > self.capacity:
                self._known.clear()
                missing = list(dict.fromkeys(strings))
            self._known.update(zip(missing, self._encoder.encode(missing)))
        if not strings:
            return torch.zeros(0, self.dimension)
        return torch.from_numpy(np.stack([self._known[text] for text in strings]).astype(np.float32))
