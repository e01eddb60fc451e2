"""Index folders on disk: built once, kept with a manifest of what they were built from, rebuilt when that changes.

An index is built in `<folder>.partial` and renamed when it is complete, so a folder with a manifest is a whole index.
A build that was killed leaves its `.partial` folder, and a builder that can (the dense one) goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_BUILDING = "building.json"


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file, read in blocks.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_fingerprint(folder: str | Path) -> str:
    """Name the weights in a local model folder by name, size and time of the weight files.

    Returns:
        Sixteen hexadecimal digits, or nothing when there are no weight files, as for a hub id.
    """
    files = sorted(file for ending in ("safetensors", "bin") for file in Path(folder).rglob(f"*.{ending}"))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.blake2b(repr(stats).encode(), digest_size=8).hexdigest() if stats else ""


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader sees the old file or the new one, never a part of it."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def prepare(folder: Path, wanted: dict[str, Any], build: Callable[[Path], None]) -> dict[str, Any]:
    """Make sure that `folder` holds an index built from `wanted`.

    Args:
        folder: The index folder. One with another manifest is replaced.
        wanted: What the index depends on: corpus hash, settings. Stored as the manifest; JSON values only.
        build: Writes the index files into the folder it is given, which may hold files of an interrupted build with
            the same `wanted`.

    Returns:
        The manifest.

    Raises:
        ValueError: the folder holds something that is not an index of ours.
    """
    wanted = json.loads(json.dumps(wanted))
    found = _read(folder / MANIFEST)
    if found == wanted:
        return wanted
    if found is None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"index folder {folder} exists and holds no {MANIFEST}: choose another folder or empty it")
    partial = folder.with_name(folder.name + ".partial")
    if partial.exists() and _read(partial / _BUILDING) != wanted:
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    write_json(partial / _BUILDING, wanted)
    if found is not None:
        changed = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
        logger.warning("index %s was built with another %s: building it again", folder, ", ".join(changed))
    build(partial)
    write_json(partial / MANIFEST, wanted)
    (partial / _BUILDING).unlink()
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)
    return wanted


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
