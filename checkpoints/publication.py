"""Prepare the files of a model folder for other machines: names of models instead of local paths.

Tested in `tests/checkpoints/test_export.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tripletune.checkpoints.card import Provenance
from tripletune.core.files import read_json, write_json
from tripletune.models.run_folders import (
    ADAPTER_CONFIG,
    CONFIG,
    PROCESSOR,
    TASK_FILES,
    is_adapter,
    without_private_data,
)

GENERATION_CONFIG = "generation_config.json"


def make_public(folder: Path, provenance: Provenance) -> None:
    """Write the provenance's names of base model and encoder into a folder's files, and remove other local paths.

    A path in a published folder tells the names of people and machines, and leads nowhere for anybody else. Only a
    whole model without graph can do without any name: others are loaded with their base model or encoder.
    """
    base = provenance.base_model
    names = {"base_model": base, "base_revision": provenance.base_revision}
    changes: dict[str, dict[str, Any]] = {CONFIG: {}, GENERATION_CONFIG: {}}
    for file in TASK_FILES:
        changes[file] = names
    changes[ADAPTER_CONFIG] = {
        "base_model_name_or_path": base,
        "revision": provenance.base_revision,
        "inference_mode": True,
    }
    is_graph_llm = (folder / PROCESSOR).is_file()
    if is_graph_llm:
        text_config = read_json(folder / CONFIG)["text_config"] | {"_name_or_path": base}
        changes[CONFIG] = {**names, "encoder": provenance.encoder, "text_config": text_config}
    needs_nothing_else = not is_adapter(folder) and not (is_graph_llm and provenance.use_graph)
    for file, change in changes.items():
        if not (folder / file).is_file():
            continue
        # A folder that needs its base model or encoder must name them, even if they are local folders.
        kept_names: tuple[str, ...] = (base, provenance.encoder)
        if needs_nothing_else and file in (CONFIG, GENERATION_CONFIG):
            kept_names = ()
        write_json(folder / file, without_private_data(read_json(folder / file) | change, kept_names))
    _make_tokenizer_public(folder / "tokenizer_config.json")


def _make_tokenizer_public(file: Path) -> None:
    """Remove local paths, and settings for the loading of local files, from a tokenizer's configuration.

    transformers writes the arguments there with which the tokenizer was loaded.
    """
    settings = {}
    for name, value in read_json(file).items():
        is_path = isinstance(value, str) and without_private_data(value) != value
        if not is_path and name not in ("is_local", "local_files_only"):
            settings[name] = value
    write_json(file, settings)
