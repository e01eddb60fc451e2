"""Export and merge: turn a training run into a self-contained model folder that can be verified.

An exported folder holds the PEFT adapter (with graph encoder and projector for a Graph-LLM), or the whole model if all
weights were trained; settings, prompt and tokenizer; the model card; and the reference outputs of `checkpoints.verify`.
It has no optimiser state, pickle or cache, and a path of this machine only if base model or encoder is a local folder.

Merging adds the LoRA weights to the language model, so that the result loads without PEFT. A Graph-LLM becomes one
folder for `load_graph_llm` and `GraphLLM.from_pretrained`, or, without its graph modules, a plain transformers folder.
A text model always becomes a plain transformers folder. A merged model is kept only if it agrees with the adapter.
"""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tripletune.checkpoints.card import CARD, PROVENANCE, Kind, Provenance, collect_provenance, write_model_card
from tripletune.checkpoints.standalone import MODELING, write_modeling
from tripletune.checkpoints.verify import (
    REFERENCE,
    Comparison,
    Loaded,
    cases_of,
    compare_observations,
    load,
    observe,
    prompt_of,
    weight_digests,
)
from tripletune.core.files import check_folder, new_folder, read_json, write_json
from tripletune.models.loading import (
    LANGUAGE_MODEL_LAYERS,
    PYPI,
    changes_base,
    check_base,
    resolve,
    split_revision,
    with_revision,
)
from tripletune.models.run_folders import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    PROCESSOR,
    PROMPT_FILE,
    TASK_FILES,
    TOKENIZER_FILES,
    check_model_folder,
    is_adapter,
    public,
    stored_weights,
    task_of,
    trained_folder,
)

if __name__ == "checkpoints":
    raise ImportError("import it as tripletune.checkpoints; under its short name it would be loaded twice")

logger = logging.getLogger(__name__)
TEMPLATES = "additional_chat_templates"
DTYPES = ("float32", "bfloat16", "float16")
# All files of exported and merged folders; a folder with any other file is never replaced.
MADE = (PROVENANCE, CARD, REFERENCE, CONFIG, "generation_config.json", ADAPTER_CONFIG, ADAPTER, PROCESSOR, PROMPT_FILE,
        MODELING, *TASK_FILES, *TOKENIZER_FILES, f"{TEMPLATES}*", "model*.safetensors", INDEX)  # fmt: skip


def export_adapter(
    run: str | Path,
    output: str | Path,
    *,
    base_model: str | None = None,
    encoder: str | None = None,
    licence: str | None = None,
    scores: Sequence[str | Path] = (),
    language_model_only: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write the export folder of a run, with its adapter or its whole model.

    `language_model_only` turns the adapter of a Graph-LLM without graph into an adapter of the plain base model, which
    PEFT and servers can load.
    """
    source, output = _checked_source(run, output, overwrite), Path(output)
    provenance = collect_provenance(source, scores, licence)
    if base_model not in (None, provenance.base_model):
        if is_adapter(source) and (Path(base_model).is_dir() or base_model.startswith(PYPI)):
            check_base(source, base_model)
        provenance.base_model, provenance.base_revision = split_revision(base_model)
    adapter = is_adapter(source)
    if adapter and changes_base(read_json(source / ADAPTER_CONFIG)):
        raise ValueError(f"{source} is a checkpoint whose adapter needs changed base weights: export final/ instead")
    alone = language_model_only and not task_of(source)
    if alone and (provenance.use_graph or not adapter):
        what = "has a graph token" if provenance.use_graph else "is a whole model"
        raise ValueError(
            f"--language-model-only: {source} {what}, so there is no adapter for the plain base model: leave the "
            "option out, or run tripletune checkpoints merge"
        )
    provenance.encoder = encoder or provenance.encoder
    if not provenance.base_model:
        raise ValueError("the run names no base model: name the model that it was trained on with --base-model")
    if adapter and is_adapter(resolve(with_revision(provenance.base_model, provenance.base_revision))):
        raise ValueError(
            f"the base model {provenance.base_model} is an adapter, and PEFT loads no adapter on another: make one "
            f"model of both with tripletune checkpoints merge {run}"
        )
    for what, option in (("base_model", "--base-model"), ("encoder", "--encoder")):
        name = getattr(provenance, what)
        if Path(name).is_dir() and (what == "base_model" or provenance.use_graph):
            logger.warning("%s is a local folder (%s), which others lack: name it with %s", what, name, option)
    logger.info("computing reference outputs of %s in float32", source)
    loaded = load(source)
    whole = (CONFIG, "generation_config.json", *(path.name for path in source.glob("model*.safetensors*")))
    with new_folder(output, MADE, overwrite, (run, source)) as folder:
        if alone:
            _write_plain_adapter(loaded, folder)
        else:
            _copy_files(source, folder, (ADAPTER, ADAPTER_CONFIG) if adapter else whole)
        _make_public(folder, provenance)
        if not alone and loaded.processor:
            write_modeling(folder, loaded.tokenizer)
        kind: Kind = "plain_adapter" if alone else "adapter" if adapter else "merged"
        write_model_card(folder, provenance, kind, output.name)
        if not alone:
            write_json(folder / REFERENCE, {**observe(loaded, cases_of(loaded)), "weights": weight_digests(folder)})
    return output


def _write_plain_adapter(loaded: Loaded, folder: Path) -> None:
    """Write the adapter of a Graph-LLM without graph as an adapter of its base model; replies must stay the same."""
    from safetensors.torch import save_file

    settings, config = read_json(loaded.folder / ADAPTER_CONFIG), read_json(loaded.folder / CONFIG)
    layers = settings["target_modules"]
    if isinstance(layers, str):
        settings["target_modules"] = layers.removeprefix(LANGUAGE_MODEL_LAYERS).strip("()").split("|")
    else:
        settings["target_modules"] = [name.removeprefix("language_model.") for name in layers]
    settings |= {"task_type": "CAUSAL_LM", "auto_mapping": None, "revision": config.get("base_revision")}
    settings["base_model_name_or_path"] = config["base_model"]
    weights = {name.replace(".language_model.", ".", 1): weight for name, weight in stored_weights(loaded.folder)}
    save_file(weights, folder / ADAPTER, metadata={"format": "pt"})
    write_json(folder / ADAPTER_CONFIG, settings)
    loaded.tokenizer.save_pretrained(folder)
    reference = observe(*_without_graph(loaded))
    comparison = compare_observations(
        reference, observe(load(folder, True), reference["cases"]), against="the Graph-LLM"
    )
    if not comparison.passed:
        raise ValueError(f"outputs of plain adapter and Graph-LLM differ, so nothing was written ({comparison})")


def _without_graph(loaded: Loaded) -> tuple[Loaded, list[dict[str, Any]]]:
    """Return the language model of a Graph-LLM, and the cases without graph placeholders."""
    model = getattr(loaded.model, "get_base_model", lambda: loaded.model)()
    plain, cases = Loaded(model.language_model, loaded.tokenizer, None, loaded.folder), []
    for case in cases_of(loaded):
        kept = [one for one in prompt_of(loaded, case)[0] if one != loaded.processor.graph_token_id]
        cases.append({"name": case["name"], "prompt_ids": kept})
    return plain, cases


def merge_adapter(
    folder: str | Path,
    output: str | Path,
    *,
    dtype: str = "float32",
    language_model_only: bool = False,
    overwrite: bool = False,
) -> Comparison:
    """Merge an adapter into its base model.

    Args:
        dtype: Weight type to write. float32 keeps the adapter's replies; 16 bits halve the folder's size, but may
            change replies (the comparison counts them). Graph modules stay in float32.
    """
    source, output = _checked_source(folder, output, overwrite), Path(output)
    if not is_adapter(source):
        raise ValueError(f"{source} has no {ADAPTER_CONFIG}: it is a whole model, with nothing to merge; export it")
    provenance = collect_provenance(source)
    alone = language_model_only and not task_of(source)
    with new_folder(output, MADE, overwrite, (folder, source)) as scratch:
        reference = _write_merged(load(source), dtype, alone, scratch)
        # Two copies of a large model need not fit into memory.
        gc.collect()
        if not alone:
            _copy_files(source, scratch)
        _make_public(scratch, provenance)
        result = load(scratch, alone)
        if result.processor:
            write_modeling(scratch, result.tokenizer)
        observed = observe(result, reference["cases"])
        comparison = compare_observations(reference, observed, against="the adapter")
        if dtype == "float32" and not comparison.passed:
            raise ValueError(f"outputs of merged model and adapter differ, so nothing was written ({comparison})")
        if not alone:
            write_json(scratch / REFERENCE, {**observed, "weights": weight_digests(scratch)})
        write_model_card(scratch, provenance, "language_model" if alone else "merged", output.name)
    if alone and provenance.use_graph:
        logger.warning(
            "the model was trained with a graph token, which the merged plain language model does not read: replies "
            "of the merged model differ from the Graph-LLM's"
        )
    return comparison


def _checked_source(folder: str | Path, output: str | Path, overwrite: bool) -> Path:
    """Return the trained folder of `folder`; check it and the output folder before the slow part."""
    source = trained_folder(folder)
    check_folder(output, MADE, overwrite, (folder, source))
    check_model_folder(source)
    return source


def _write_merged(loaded: Loaded, dtype: str, alone: bool, scratch: Path) -> dict[str, Any]:
    """Write the merged weights, and return the adapter's outputs from before the merge."""
    import torch

    from tripletune.models.loading import load_tokenizer

    processor = loaded.processor
    reference = observe(*(_without_graph(loaded) if alone else (loaded, cases_of(loaded))))
    if dtype != "float32" and (lost := _rounded_away(loaded.model, getattr(torch, dtype))):
        logger.warning(
            "weights in %s lose %.3g %% of the adapter by rounding: merge in float32, or serve the adapter unmerged",
            dtype,
            100 * lost,
        )
    # This also replaces the graph modules with the trained ones.
    merged = loaded.model.merge_and_unload(safe_merge=True)
    language_model = merged if processor is None else merged.language_model
    language_model.to(getattr(torch, dtype))
    (language_model if alone else merged).save_pretrained(scratch)
    if alone:
        # The run's tokenizer has the graph placeholder, but the plain model has no embedding for it.
        plain_tokenizer = load_tokenizer(with_revision(merged.config.base_model, merged.config.base_revision))
        (plain_tokenizer if processor.settings.use_graph else loaded.tokenizer).save_pretrained(scratch)
    return reference


def _rounded_away(model: Any, dtype: Any) -> float:
    """Return the share of the LoRA update that rounding loses: norm of the error divided by norm of the update."""
    from peft.tuners.lora import LoraLayer

    error = update = 0.0
    for layer in model.modules():
        for adapter in layer.active_adapters if isinstance(layer, LoraLayer) else []:
            weight, delta = layer.get_base_layer().weight, layer.get_delta_weight(adapter)
            kept = (weight + delta).to(dtype).float() - weight.to(dtype).float()
            error += float((kept - delta).square().sum())
            update += float(delta.square().sum())
    return (error / update) ** 0.5 if update else 0.0


def _copy_files(source: Path, target: Path, weights: Sequence[str] = ()) -> None:
    """Copy the files besides the weights, and the configuration of a Graph-LLM."""
    config = () if task_of(source) else (CONFIG,)
    for name in (*weights, *config, PROCESSOR, PROMPT_FILE, *TASK_FILES, *TOKENIZER_FILES):
        if (source / name).is_file() and not (target / name).is_file():
            shutil.copyfile(source / name, target / name)
    # Tokenizers with several chat templates store the additional ones in this folder.
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, target / TEMPLATES)


def _make_public(folder: Path, provenance: Provenance) -> None:
    """Write the provenance's names of base model and encoder into a folder's files, and remove other local paths."""
    base, revision, encoder = provenance.base_model, provenance.base_revision, provenance.encoder
    named, generation = {"base_model": base, "base_revision": revision}, "generation_config.json"
    changes: dict[str, dict[str, Any]] = {CONFIG: {}, generation: {}, **dict.fromkeys(TASK_FILES, named)}
    changes[ADAPTER_CONFIG] = {"base_model_name_or_path": base, "revision": revision, "inference_mode": True}
    if graph_llm := (folder / PROCESSOR).is_file():
        text = read_json(folder / CONFIG)["text_config"] | {"_name_or_path": base}
        changes[CONFIG] = named | {"encoder": encoder, "text_config": text}
    alone = not is_adapter(folder) and not (graph_llm and provenance.use_graph)
    for name, change in changes.items():
        if (folder / name).is_file():
            keep = () if alone and name in (CONFIG, generation) else (base, encoder)
            write_json(folder / name, public(read_json(folder / name) | change, keep))
    settings = read_json(folder / "tokenizer_config.json")
    hidden = [key for key, value in settings.items() if isinstance(value, str) and public(value) != value]
    for key in (*hidden, "is_local", "local_files_only"):
        settings.pop(key, None)
    write_json(folder / "tokenizer_config.json", settings)
