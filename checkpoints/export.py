"""Export: a training run becomes an adapter folder that stands by itself and can be checked.

The folder holds the PEFT adapter with graph encoder and projector, configuration, processor and tokenizer, the model
card, and the reference outputs of `checkpoints.verify`. Nothing else of the run goes along: no optimiser state, no
pickle, no cache, and no path of this machine except where the base model or the encoder is a local folder.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tripletune.checkpoints.card import CARD, PROVENANCE, Provenance, collect, render_card
from tripletune.checkpoints.text_export import export_text_model
from tripletune.checkpoints.verify import REFERENCE, observe, weight_digests
from tripletune.models.run_folders import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    PROCESSOR,
    TOKENIZER_FILES,
    check_model_folder,
    check_output,
    is_adapter,
    is_text_model,
    public,
    public_tokenizer_config,
    read_json,
    replaced_folder,
    trained_folder,
    write_json,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What an export may change.

    Attributes:
        base_model: Names the base model anew, for a run that was trained on a local copy of it.
        base_revision: Hub revision of the base model.
        encoder: Names the text encoder anew.
        licence: Licence identifier for the card.
        scores: Files of metrics for the card.
        overwrite: Replace a model folder in the output.
    """

    base_model: str | None = None
    base_revision: str | None = None
    encoder: str | None = None
    licence: str | None = None
    scores: Sequence[str | Path] = ()
    overwrite: bool = False


def export(run: str | Path, output: str | Path, options: ExportOptions | None = None) -> Path:
    """Write the adapter folder of a run.

    Args:
        run: Run folder (its `final/` is taken), or a checkpoint or `final/` folder.
        output: Folder to write; it appears when it is complete.
        options: What to change on the way.

    Returns:
        The folder written.

    Raises:
        FileExistsError: the output is there already.
        FileNotFoundError: the run or something in it is missing.
        ValueError: the run is damaged, or holds no adapter.
    """
    options = options or ExportOptions()
    source, output = trained_folder(run), Path(output)
    check_output(output, options.overwrite, (Path(run), source))
    check_model_folder(source)
    if not is_adapter(source):
        raise ValueError(f"{source} has no {ADAPTER_CONFIG}: it is a whole model and stands by itself already")
    if is_text_model(source):
        return export_text_model(source, output, options)
    config = _renamed_config(read_json(source / CONFIG), options)
    provenance = replace(
        collect(source, options.scores, options.licence),
        base_model=config["base_model"],
        base_revision=config["base_revision"],
        encoder=config["encoder"],
    )
    for what, option in (("base_model", "--base-model"), ("encoder", "--encoder")):
        if Path(str(config[what])).is_dir() and (what == "base_model" or config.get("use_graph")):
            logger.warning(
                "%s is the local folder %s, which others do not have: name it with %s", what, config[what], option
            )
    logger.info("computing reference outputs of %s in float32", source)
    reference = observe(source)
    with replaced_folder(output, options.overwrite) as folder:
        _copy(source, folder)
        write_json(folder / CONFIG, config)
        write_json(folder / ADAPTER_CONFIG, _renamed_adapter_config(read_json(source / ADAPTER_CONFIG), config))
        write_card(folder, provenance, output.name)
        write_json(folder / REFERENCE, {**reference, "weights": weight_digests(folder)})
    return output


def write_card(folder: Path, provenance: Provenance, name: str) -> None:
    """Write `README.md` and `provenance.json` of an adapter folder."""
    (folder / CARD).write_text(render_card(provenance, "adapter", name), encoding="utf-8")
    content: dict[str, Any] = provenance.to_json()
    write_json(folder / PROVENANCE, public(content, (provenance.base_model, provenance.encoder)))


def _copy(source: Path, target: Path) -> None:
    for name in (ADAPTER, PROCESSOR, *TOKENIZER_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    # Multi-template tokenizers keep their further templates in a folder of this name.
    if (source / "additional_chat_templates").is_dir():
        shutil.copytree(source / "additional_chat_templates", target / "additional_chat_templates")
    public_tokenizer_config(target)


def _renamed_config(config: dict[str, Any], options: ExportOptions) -> dict[str, Any]:
    base = options.base_model or config.get("base_model")
    if not base:
        raise ValueError("config.json names no base_model: say which one the run was trained on with --base-model")
    renamed = base != config.get("base_model")
    encoder = options.encoder or config.get("encoder") or ""
    changed = {
        **config,
        "base_model": base,
        # A revision belongs to the name it was recorded with.
        "base_revision": options.base_revision or (None if renamed else config.get("base_revision")),
        "encoder": encoder,
    }
    if isinstance(changed.get("text_config"), dict):
        changed["text_config"] = {**changed["text_config"], "_name_or_path": base}
    changed.pop("_name_or_path", None)
    return public(changed, (base, encoder))


def _renamed_adapter_config(adapter: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    changed = {
        **adapter,
        "base_model_name_or_path": config["base_model"],
        "revision": config["base_revision"],
        "inference_mode": True,
    }
    return public(changed, (config["base_model"],))
