"""Export and merge of models trained on plain text; `checkpoints.export` and `checkpoints.merge` call it for them.

An export is a PEFT adapter folder, a merged one a transformers folder: plain PEFT and transformers load them, and so do
servers such as vLLM. Prompt and task file lie beside the weights.
"""

from __future__ import annotations

import gc
import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.checkpoints.card import CARD, PROVENANCE, Provenance, TextKind, collect
from tripletune.checkpoints.text_card import render_text_card
from tripletune.checkpoints.text_models import (
    PROMPT_FILE,
    TextModel,
    load_text_model,
    observe_text_model,
    task_of,
    text_cases,
)
from tripletune.checkpoints.verify import REFERENCE, Comparison, compare, insist, observe, weight_digests
from tripletune.models.run_folders import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    TASK_FILES,
    TOKENIZER_FILES,
    public,
    public_tokenizer_config,
    read_json,
    replaced_folder,
    write_json,
)

if TYPE_CHECKING:
    from tripletune.checkpoints.export import ExportOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Base:
    """The base model as the folder names it."""

    name: str
    revision: str | None


def export_text_model(source: Path, output: Path, options: ExportOptions) -> Path:
    """Write the adapter folder of a run; see `checkpoints.export.export`, which has checked both folders."""
    adapter = read_json(source / ADAPTER_CONFIG)
    base = _base(adapter, options)
    provenance = _provenance(source, base, options)
    if Path(base.name).is_dir():
        logger.warning(
            "base_model is the local folder %s, which others do not have: name it with --base-model", base.name
        )
    logger.info("computing reference outputs of %s in float32", source)
    reference = observe(source)
    with replaced_folder(output, options.overwrite) as folder:
        _copy(source, folder, (ADAPTER,), base)
        changed = {
            **adapter,
            "base_model_name_or_path": base.name,
            "revision": base.revision,
            "inference_mode": True,
        }
        write_json(folder / ADAPTER_CONFIG, public(changed, (base.name,)))
        write_text_card(folder, provenance, "text_adapter", output.name)
        write_json(folder / REFERENCE, {**reference, "weights": weight_digests(folder)})
    return output


def merge_text_model(source: Path, output: Path, dtype: str, overwrite: bool) -> Comparison:
    """Write base model and adapter as one transformers folder; see `checkpoints.merge.merge`.

    Returns:
        The merged folder, loaded again, against the adapter.

    Raises:
        ValueError: the adapter can't be merged.
    """
    from tripletune.models.loading import parse_dtype

    adapter = read_json(source / ADAPTER_CONFIG)
    base = _Base(str(adapter["base_model_name_or_path"]), adapter.get("revision"))
    provenance = _provenance(source, base, None)
    loaded = load_text_model(source)
    cases = text_cases(source)
    reference = observe_text_model(loaded, cases)
    with replaced_folder(output, overwrite) as scratch:
        _write_merged(loaded, parse_dtype(dtype), scratch)
        del loaded
        # Two copies of a large model need not fit into memory.
        gc.collect()
        _copy(source, scratch, (), base)
        observed = observe(scratch, cases)
        comparison = compare(reference, observed, against="the adapter")
        write_text_card(scratch, provenance, "text_merged", output.name)
        write_json(scratch / REFERENCE, {**observed, "weights": weight_digests(scratch)})
        if dtype == "float32":
            insist(comparison)
    return comparison


def write_text_card(folder: Path, provenance: Provenance, kind: TextKind, name: str) -> None:
    """Write `README.md` and `provenance.json`."""
    about = task_of(folder)
    (folder / CARD).write_text(render_text_card(provenance, kind, name, about), encoding="utf-8")
    content: dict[str, Any] = provenance.to_json()
    write_json(folder / PROVENANCE, public(content, (provenance.base_model,)))


def _write_merged(loaded: TextModel, dtype: Any, scratch: Path) -> None:
    try:
        merged = loaded.model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise ValueError(f"the adapter can't be merged: {error}") from None
    merged.to(dtype).save_pretrained(scratch)
    for name in (CONFIG, "generation_config.json"):
        if (scratch / name).is_file():
            write_json(scratch / name, public(read_json(scratch / name)))


def _copy(source: Path, target: Path, weights: tuple[str, ...], base: _Base) -> None:
    for name in (*weights, PROMPT_FILE, *TOKENIZER_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if (source / "additional_chat_templates").is_dir():
        shutil.copytree(source / "additional_chat_templates", target / "additional_chat_templates")
    public_tokenizer_config(target)
    for name in TASK_FILES:
        if (source / name).is_file():
            about = {**read_json(source / name), "base_model": base.name, "base_revision": base.revision}
            write_json(target / name, public(about, (base.name,)))


def _base(adapter: dict[str, Any], options: ExportOptions) -> _Base:
    recorded = adapter.get("base_model_name_or_path")
    name = options.base_model or recorded
    if not name:
        raise ValueError(
            f"{ADAPTER_CONFIG} names no base model: say which one the run was trained on with --base-model"
        )
    # A revision belongs to the name it was recorded with.
    return _Base(str(name), options.base_revision or (adapter.get("revision") if name == recorded else None))


def _provenance(source: Path, base: _Base, options: ExportOptions | None) -> Provenance:
    found = collect(source, options.scores if options else (), options.licence if options else None)
    return replace(found, base_model=base.name, base_revision=base.revision, encoder="", use_graph=False)
