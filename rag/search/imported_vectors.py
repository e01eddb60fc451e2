"""Import the vectors of a corpus that another program computed, instead of embedding it (`rag index --vectors`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tripletune.core.files import file_digest
from tripletune.core.program import progress
from tripletune.rag.search.embedding import Embedder, to_length_one
from tripletune.rag.search.index import ROWS, Manifest, check_same_source, digest_rows, ensure_index, manifest
from tripletune.rag.search.text_index import CHUNK, IMPORTED, VECTORS, Rows, manifest_of_encoder

logger = logging.getLogger(__name__)
# How many rows are compared with the encoder's own vectors, and the least cosine without a warning.
_CHECKED, _ALIKE = 32, 0.9


def import_vectors(
    file: str | Path,
    folder: str | Path,
    wanted: Manifest,
    rows: Rows,
    count: int,
    embedder: Embedder,
    overwrite: bool = False,
) -> None:
    """Build the vectors of `open_text_index` from a NumPy file, shape (count, width), with one row per row of text.

    The file is read a block at a time. The encoder embeds queries, and a few rows to compare them with the file.
    Vectors of another file are only replaced with `overwrite`, as they may have cost hours elsewhere.
    """
    folder = Path(folder) / "dense"
    vectors = _open_vectors(Path(file), count, embedder)
    source = {IMPORTED: file_digest(file)}
    if not overwrite:
        check_same_source(folder, "encoder", embedder.name)
        held = manifest(folder).get("about", source)
        if held.get(IMPORTED) != source[IMPORTED]:
            raise FileExistsError(
                f"index {folder} holds other vectors of encoder {embedder.name}: give another --index, or add "
                "--overwrite to replace them"
            )

    def build(out: Path) -> dict[str, str]:
        """Check and write all vectors, in blocks, so that a file that is larger than memory can be imported."""
        _check_order(vectors, rows(), embedder, Path(file))
        with progress(name="importing", unit="row", total=count) as bar, (out / VECTORS).open("wb") as written:
            for start in range(0, count, CHUNK):
                block = _as_stored(vectors[start : start + CHUNK], embedder)
                wrong = np.flatnonzero(~np.isfinite(block).all(axis=1))
                if wrong.size:
                    row = start + wrong[0] + 1
                    raise ValueError(f"--vectors {file}: row {row} has numbers that are NaN or too large for float16")
                written.write(block.tobytes())
                bar.update(len(block))
        np.save(out / ROWS, digest_rows(rows()), allow_pickle=False)
        return {"changes": f"{count:,} rows imported from {file}", **source}

    ensure_index(folder, {"kind": "dense", **wanted, **manifest_of_encoder(embedder)}, build, source)


def _as_stored(vectors: np.ndarray, embedder: Embedder) -> np.ndarray:
    """Vectors as `embed_rows` writes them: scaled, in float16; numbers that are too large become infinite."""
    with np.errstate(all="ignore"):
        return embedder.scale(vectors.astype(np.float32)).astype(np.float16)


def _open_vectors(file: Path, count: int, embedder: Embedder) -> np.ndarray:
    """Map a NumPy file of vectors into memory; its type, count and width must fit corpus and encoder.

    Pickled arrays are refused, because reading them may run code.
    """
    if not file.is_file():
        raise FileNotFoundError(f"--vectors {file}: no such file")
    try:
        vectors = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"--vectors {file} can't be read ({error}): write it with numpy.save") from None
    if not isinstance(vectors, np.ndarray) or vectors.ndim != 2 or vectors.dtype not in (np.float16, np.float32):
        held = f"{vectors.dtype} {vectors.shape}" if isinstance(vectors, np.ndarray) else "several arrays"
        raise ValueError(
            f"--vectors {file} holds {held}: write one array of float16 or float32, shape (passages, width), with "
            "numpy.save"
        )
    if len(vectors) != count:
        raise ValueError(
            f"--vectors {file} has {len(vectors):,} rows, but the corpus has {count:,} passages: write one row for "
            "each line that is not blank, in the order of the corpus"
        )
    if vectors.shape[1] != embedder.width:
        raise ValueError(
            f"--vectors {file} has {vectors.shape[1]} numbers in a row, but vectors of encoder {embedder.name} have "
            f"{embedder.width}: name the encoder that made them"
        )
    return vectors


def _check_order(vectors: np.ndarray, rows: Iterable[str], embedder: Embedder, file: Path) -> None:
    """Compare some rows with the encoder's own vectors: most must be nearest to the vector of their own text.

    Rows in another order would give every query wrong passages, and nothing else would show it. Vectors that are only a
    bit different get a warning, since programs differ in number types and line breaks.
    """
    chosen = set(np.linspace(0, len(vectors) - 1, _CHECKED, dtype=int).tolist())
    texts = {text: place for place, text in enumerate(rows) if place in chosen}
    own_vectors = to_length_one(embedder.encode(list(texts)))
    with np.errstate(all="ignore"):
        in_file = to_length_one(vectors[list(texts.values())].astype(np.float32))
        cosines = own_vectors @ in_file.T
    to_own_text = cosines.diagonal()
    # Texts that differ little may be as near; with NaN, which the next step reports, nothing is compared.
    out_of_place = int((to_own_text < cosines.max(axis=1) - 1e-3).sum())
    if 2 * out_of_place > len(texts):
        raise ValueError(
            f"--vectors {file}: {out_of_place} of {len(texts)} rows that were compared are nearer to another passage's "
            f"text than to their own, by encoder {embedder.name}: write them in the order of the corpus, or name the "
            "encoder that made them"
        )
    if to_own_text.min() < _ALIKE:
        logger.warning(
            "%s: vectors differ from those of encoder %s (smallest cosine %.2f): make sure that both have the same "
            "text (title, line break, text), prompts, pooling and end token", file, embedder.name, to_own_text.min(),
        )  # fmt: skip
