"""Export: a training run becomes an adapter folder that stands by itself and can be checked.

The folder holds the PEFT adapter (of a Graph-LLM with graph encoder and projector), settings, prompt and tokenizer, the
model card, and the reference outputs of `checkpoints.verify`. Nothing else of the run goes along: no optimiser state,
no pickle, no cache, and no path of this machine except where the base model or the encoder is a local folder.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tripletune.checkpoints.card import CARD, PROVENANCE, Provenance, collect_provenance, public, write_model_card
from tripletune.checkpoints.verify import REFERENCE, load, observe, weight_digests
from tripletune.models.files import check_folder, new_folder, read_json, write_json
from tripletune.models.run_folders import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    PROCESSOR,
    PROMPT_FILE,
    TASK_FILES,
    TOKENIZER_FILES,
    check_model_folder,
    is_adapter,
    is_text_model,
    trained_folder,
)

logger = logging.getLogger(__name__)
TEMPLATES = "additional_chat_templates"
# All that an exported or merged folder may hold: one with other files in it is never replaced.
MADE = (CARD, PROVENANCE, REFERENCE, CONFIG, "generation_config.json", ADAPTER_CONFIG, ADAPTER, PROCESSOR, PROMPT_FILE,
        *TASK_FILES, *TOKENIZER_FILES, TEMPLATES, "model*.safetensors", "model.safetensors.index.json")  # fmt: skip


def export_adapter(
    run: str | Path,
    output: str | Path,
    *,
    base_model: str | None = None,
    base_revision: str | None = None,
    encoder: str | None = None,
    licence: str | None = None,
    scores: Sequence[str | Path] = (),
    overwrite: bool = False,
) -> Path:
    """Write the adapter folder of a run.

    Args:
        run: Run folder (its `final/` is taken), or a checkpoint or `final/` folder.
        output: Folder to write; it appears when it is complete.
        base_model: Other name of the base model, for a run that was trained on a local copy of it.
        base_revision: Hub revision of the base model.
        encoder: Other name of the text encoder.
        licence: Licence identifier for the card.
        scores: Files of metrics for the card.
        overwrite: Replace a model folder in the output.

    Returns:
        The folder written.

    Raises:
        FileExistsError: the output is there already.
        FileNotFoundError: the run or something in it is missing.
        ValueError: the run is damaged, or holds no adapter.
    """
    source, output = trained_folder(run), Path(output)
    check_folder(output, MADE, overwrite, (run, source))
    check_model_folder(source)
    if not is_adapter(source):
        raise ValueError(f"{source} has no {ADAPTER_CONFIG}: it is a whole model and stands by itself already")
    provenance = collect_provenance(source, scores, licence)
    if base_model not in (None, provenance.base_model):
        # A revision belongs to the name it was recorded with.
        provenance.base_model, provenance.base_revision = str(base_model), None
    provenance.base_revision = base_revision or provenance.base_revision
    provenance.encoder = encoder or provenance.encoder
    if not provenance.base_model:
        raise ValueError("the run names no base model: say which one it was trained on with --base-model")
    for what, option in (("base_model", "--base-model"), ("encoder", "--encoder")):
        name = getattr(provenance, what)
        if Path(name).is_dir() and (what == "base_model" or provenance.use_graph):
            logger.warning("%s is the local folder %s, which others do not have: name it with %s", what, name, option)
    logger.info("computing reference outputs of %s in float32", source)
    reference = observe(load(source))
    with new_folder(output, MADE, overwrite, (run, source)) as folder:
        copy_files(source, folder, provenance, (ADAPTER, ADAPTER_CONFIG))
        write_model_card(folder, provenance, "adapter", output.name)
        write_json(folder / REFERENCE, {**reference, "weights": weight_digests(folder)})
    return output


def copy_files(source: Path, target: Path, provenance: Provenance, weights: Sequence[str] = ()) -> None:
    """Copy what stands beside the weights, with base model and encoder under the names of the provenance.

    Args:
        source: Trained folder.
        target: Folder that is written.
        provenance: Says what base model and encoder are called.
        weights: Names of weight files to copy too.
    """
    for name in (*weights, PROCESSOR, PROMPT_FILE, *TASK_FILES, *TOKENIZER_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    # Multi-template tokenizers keep their further templates in a folder of this name.
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, target / TEMPLATES)
    public_tokenizer_config(target)
    base, revision, keep = provenance.base_model, provenance.base_revision, (provenance.base_model, provenance.encoder)
    changes: dict[str, dict[str, Any]] = {name: {"base_model": base, "base_revision": revision} for name in TASK_FILES}
    changes[ADAPTER_CONFIG] = {"base_model_name_or_path": base, "revision": revision, "inference_mode": True}
    for name, change in changes.items():
        if (target / name).is_file():
            write_json(target / name, public({**read_json(target / name), **change}, keep))
    if is_adapter(target) and not is_text_model(source):
        config = read_json(source / CONFIG)
        config |= {"base_model": base, "base_revision": revision, "encoder": provenance.encoder}
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = {**config["text_config"], "_name_or_path": base}
        config.pop("_name_or_path", None)
        write_json(target / CONFIG, public(config, keep))


def public_tokenizer_config(folder: Path) -> None:
    """Take out of `tokenizer_config.json` where the tokenizer was loaded from."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    settings = read_json(path)
    hidden = [key for key, value in settings.items() if isinstance(value, str) and public(value) != value]
    for key in (*hidden, "is_local", "local_files_only"):
        settings.pop(key, None)
    write_json(path, settings)
