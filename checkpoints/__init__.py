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
from typing import TYPE_CHECKING, Any, Literal, get_args

from tripletune.checkpoints.card import CARD, PROVENANCE, Kind, Provenance, collect_provenance, write_model_card
from tripletune.checkpoints.observation import (
    LoadedModel,
    Observation,
    VerifyCase,
    cases_of,
    load_for_observation,
    observe,
    prompt_of,
)
from tripletune.checkpoints.publication import GENERATION_CONFIG, make_public
from tripletune.checkpoints.standalone import MODELING, write_modeling
from tripletune.checkpoints.verify import REFERENCE, Comparison, compare_observations, recorded_files
from tripletune.core.files import check_folder, new_folder, read_json, write_json
from tripletune.models.adapters import LANGUAGE_MODEL_LAYERS, check_base
from tripletune.models.loading import load_tokenizer
from tripletune.models.lora import changes_base
from tripletune.models.merging import merge_into_base
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
    stored_weights,
    task_of,
    trained_folder,
)
from tripletune.models.specs import PYPI, resolve, split_revision, with_revision

if TYPE_CHECKING:
    import torch

if __name__ == "checkpoints":
    raise ImportError("import it as tripletune.checkpoints; under its short name it would be loaded twice")

logger = logging.getLogger(__name__)
TEMPLATES = "additional_chat_templates"
# Types of written weights.
WrittenDtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[WrittenDtype, ...] = get_args(WrittenDtype)
# All files of exported and merged folders; a folder with any other file is never replaced.
MADE = (PROVENANCE, CARD, REFERENCE, CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG, ADAPTER, PROCESSOR, PROMPT_FILE,
        MODELING, *TASK_FILES, *TOKENIZER_FILES, f"{TEMPLATES}*", "model*.safetensors", INDEX)  # fmt: skip


def export_run(
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

    Args:
        run: Run or checkpoint folder, or an export.
        base_model: Name to write for the base model, if others know it by another name than the run.
        encoder: Name to write for the text encoder.
        licence: Licence of the folder, for the card.
        scores: Files `metrics.json` of evaluations, for the card.
        language_model_only: Turn the adapter of a Graph-LLM without graph into an adapter of the plain base model,
            which PEFT and servers can load.

    Raises:
        ValueError: Nobody could load the export, or a plain adapter has other outputs than the Graph-LLM.
    """
    source = _checked_source(run, output, overwrite)
    output = Path(output)
    provenance = collect_provenance(source, scores, licence)
    _name_base_model(provenance, source, base_model)
    provenance.encoder = encoder or provenance.encoder
    # A text model has nothing else than its language model.
    plain = language_model_only and not task_of(source)
    _check_exportable(source, provenance, plain, run)
    _warn_of_local_folders(provenance)
    logger.info("computing reference outputs of %s in float32", source)
    loaded = load_for_observation(source)
    with new_folder(output, MADE, overwrite, (run, source)) as folder:
        if plain:
            _write_plain_adapter(loaded, folder)
        else:
            _copy_files(source, folder, _weight_files(source))
        make_public(folder, provenance)
        if not plain and loaded.processor:
            write_modeling(folder, loaded.tokenizer)
        write_model_card(folder, provenance, _kind_of(source, plain), output.name)
        # A plain adapter has no reference: it was compared with the Graph-LLM, and `verify` can't load it.
        if not plain:
            # Last, since it holds digests of the files above.
            reference = observe(loaded, cases_of(loaded))
            write_json(folder / REFERENCE, {**reference, **recorded_files(folder)})
    return output


def _name_base_model(provenance: Provenance, source: Path, base_model: str | None) -> None:
    """Write another name of the base model, and its revision, into the provenance.

    The model of a training is often a local folder, while others know the same weights by a hub id.
    """
    if base_model is None or base_model == provenance.base_model:
        return
    # What is on this machine can be compared with the weights that the adapter was trained on.
    is_at_hand = Path(base_model).is_dir() or base_model.startswith(PYPI)
    if is_adapter(source) and is_at_hand:
        check_base(source, base_model)
    # The recorded revision is one of the recorded base model.
    provenance.base_model, provenance.base_revision = split_revision(base_model)


def _check_exportable(source: Path, provenance: Provenance, plain: bool, run: str | Path) -> None:
    """Raise an error if nobody could load the export.

    This is checked before the reference outputs are computed, which loads the model and takes minutes.

    Args:
        plain: Whether an adapter of the plain base model is wanted.
    """
    has_adapter = is_adapter(source)
    if has_adapter and changes_base(read_json(source / ADAPTER_CONFIG)):
        raise ValueError(f"{source} is a checkpoint whose adapter needs changed base weights: export final/ instead")
    if plain and (provenance.use_graph or not has_adapter):
        reason = "has a graph token" if provenance.use_graph else "is a whole model"
        raise ValueError(
            f"--language-model-only: {source} {reason}, so there is no adapter for the plain base model: leave the "
            "option out, or run tripletune checkpoints merge"
        )
    if not provenance.base_model:
        raise ValueError("the run names no base model: name the model that it was trained on with --base-model")
    # A whole model needs no base model, which may not be at hand.
    if has_adapter and is_adapter(resolve(with_revision(provenance.base_model, provenance.base_revision))):
        raise ValueError(
            f"the base model {provenance.base_model} is an adapter, and PEFT loads no adapter on another: make one "
            f"model of both with tripletune checkpoints merge {run}"
        )


def _warn_of_local_folders(provenance: Provenance) -> None:
    """Warn if base model or encoder is a local folder; on this machine such an export still works, so it is written."""
    names = [("base_model", provenance.base_model, "--base-model")]
    if provenance.use_graph:
        names.append(("encoder", provenance.encoder, "--encoder"))
    for part, name, option in names:
        if Path(name).is_dir():
            logger.warning("%s is a local folder (%s), which others lack: name it with %s", part, name, option)


def _weight_files(source: Path) -> tuple[str, ...]:
    """Names of the files with an adapter, or with a whole model."""
    if is_adapter(source):
        return (ADAPTER, ADAPTER_CONFIG)
    return (CONFIG, GENERATION_CONFIG, *(path.name for path in source.glob("model*.safetensors*")))


def _kind_of(source: Path, plain: bool) -> Kind:
    """What an export of a trained folder holds, which its card says and its loader reads."""
    if plain:
        return "plain_adapter"
    if is_adapter(source):
        return "adapter"
    return "merged"


def _write_plain_adapter(loaded: LoadedModel, folder: Path) -> None:
    """Write the adapter of a Graph-LLM without graph as an adapter of its base model; replies must stay the same.

    Only names differ: in a Graph-LLM, those of the layers and weights contain `language_model`, and PEFT's task type
    and base model are those of a custom class, which servers do not know.
    """
    from safetensors.torch import save_file

    config = read_json(loaded.folder / CONFIG)
    settings = read_json(loaded.folder / ADAPTER_CONFIG)
    layers = settings["target_modules"]
    # PEFT stores a pattern of layer names, or a list of names.
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
    reference = observe(_language_model_of(loaded), _cases_without_graph(loaded))
    written = observe(load_for_observation(folder, plain=True), reference["cases"])
    comparison = compare_observations(reference, written, against="the Graph-LLM")
    if not comparison.passed:
        raise ValueError(f"outputs of plain adapter and Graph-LLM differ, so nothing was written ({comparison})")


def _language_model_of(loaded: LoadedModel) -> LoadedModel:
    """The language model of a Graph-LLM, with its adapter layers, for an export that has no graph modules."""
    model = loaded.model
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return LoadedModel(model.language_model, loaded.tokenizer, None, loaded.folder)


def _cases_without_graph(loaded: LoadedModel) -> list[VerifyCase]:
    """The cases of a Graph-LLM as prompt tokens without graph placeholders, which its language model alone lacks."""
    placeholder = None if loaded.processor is None else loaded.processor.graph_token_id
    cases: list[VerifyCase] = []
    for case in cases_of(loaded):
        kept = [token for token in prompt_of(loaded, case).ids if token != placeholder]
        cases.append({"name": case["name"], "prompt_ids": kept})
    return cases


def merge_adapter(
    folder: str | Path,
    output: str | Path,
    *,
    dtype: WrittenDtype = "float32",
    language_model_only: bool = False,
    overwrite: bool = False,
) -> Comparison:
    """Merge an adapter into its base model.

    Args:
        dtype: Weight type to write. float32 keeps the adapter's replies; 16 bits halve the folder's size, but may
            change replies (the comparison counts them). Graph modules stay in float32.
        language_model_only: Write a plain transformers model, without the graph modules of a Graph-LLM.

    Returns:
        How far the merged model agrees with the adapter.
    """
    source = _checked_source(folder, output, overwrite)
    output = Path(output)
    if not is_adapter(source):
        raise ValueError(f"{source} has no {ADAPTER_CONFIG}: it is a whole model, with nothing to merge; export it")
    provenance = collect_provenance(source)
    # A text model has nothing else than its language model.
    plain = language_model_only and not task_of(source)
    with new_folder(output, MADE, overwrite, (folder, source)) as scratch:
        # Each phase takes minutes for a large model.
        logger.info("loading the adapter %s and its base model", source)
        reference = _write_merged(load_for_observation(source), dtype, plain, scratch)
        # Two copies of a large model need not fit into memory.
        gc.collect()
        if not plain:
            _copy_files(source, scratch)
        make_public(scratch, provenance)
        # What was written is loaded and compared, as others will load it.
        logger.info("loading the merged model, and comparing its replies with the adapter's")
        merged = load_for_observation(scratch, plain)
        if merged.processor:
            write_modeling(scratch, merged.tokenizer)
        observed = observe(merged, reference["cases"])
        comparison = compare_observations(reference, observed, against="the adapter")
        # In 16 bits, replies may change by rounding; the caller reports how many do.
        if dtype == "float32" and not comparison.passed:
            raise ValueError(f"outputs of merged model and adapter differ, so nothing was written ({comparison})")
        if not plain:
            write_json(scratch / REFERENCE, {**observed, **recorded_files(scratch)})
        write_model_card(scratch, provenance, "language_model" if plain else "merged", output.name)
    if plain and provenance.use_graph:
        logger.warning(
            "the model was trained with a graph token, which the merged plain language model does not read: replies "
            "of the merged model differ from the Graph-LLM's"
        )
    return comparison


def _checked_source(folder: str | Path, output: str | Path, overwrite: bool) -> Path:
    """Return the trained folder of `folder`, after checks of it and of the output folder, before the slow part.

    Raises:
        ValueError: The model folder is damaged, or the output folder may not be replaced.
    """
    source = trained_folder(folder)
    check_folder(output, MADE, overwrite, (folder, source))
    check_model_folder(source)
    return source


def _write_merged(loaded: LoadedModel, dtype: WrittenDtype, plain: bool, scratch: Path) -> Observation:
    """Write the merged weights, and return the adapter's outputs from before the merge, which changes the model.

    Weights are merged in float32 and rounded once, to the written type.

    Args:
        plain: Write only the language model of a Graph-LLM, which needs another tokenizer.
    """
    import torch

    written_dtype = getattr(torch, dtype)
    logger.info("generating replies with the adapter, for the comparison")
    if plain:
        reference = observe(_language_model_of(loaded), _cases_without_graph(loaded))
    else:
        reference = observe(loaded, cases_of(loaded))
    if dtype != "float32":
        lost = _share_lost_by_rounding(loaded.model, written_dtype)
        if lost:
            logger.warning(
                "weights in %s lose %.3g %% of the adapter by rounding: merge in float32, or serve the adapter "
                "unmerged",
                dtype,
                100 * lost,
            )
    logger.info("merging the adapter into its base model")
    # This also replaces the graph modules with the trained ones.
    merged = merge_into_base(loaded.model)
    language_model = merged if loaded.processor is None else merged.language_model
    language_model.to(written_dtype)
    logger.info("writing the merged model in %s", dtype)
    if not plain:
        merged.save_pretrained(scratch)
        return reference
    language_model.save_pretrained(scratch)
    tokenizer = loaded.tokenizer
    if loaded.processor is not None and loaded.processor.settings.use_graph:
        # The run's tokenizer has the graph placeholder, but the plain model has no embedding for it.
        tokenizer = load_tokenizer(with_revision(merged.config.base_model, merged.config.base_revision))
    tokenizer.save_pretrained(scratch)
    return reference


def _share_lost_by_rounding(model: torch.nn.Module, dtype: torch.dtype) -> float:
    """Return the share of the LoRA update that rounding loses: norm of the error divided by norm of the update.

    A merged model in `dtype` differs from the trained one by this much. Updates are small beside the weights, so
    bfloat16 may lose much of them, of which a warning tells.
    """
    from peft.tuners.lora import LoraLayer

    # Sums of squares.
    error = 0.0
    update = 0.0
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        # PEFT declares `get_delta_weight` only in the kinds of LoRA layers.
        layer: Any = module
        weight = layer.get_base_layer().weight
        for adapter in layer.active_adapters:
            delta = layer.get_delta_weight(adapter)
            kept = (weight + delta).to(dtype).float() - weight.to(dtype).float()
            error += float((kept - delta).square().sum())
            update += float(delta.square().sum())
    if update == 0:
        return 0.0
    return (error / update) ** 0.5


def _copy_files(source: Path, target: Path, weights: Sequence[str] = ()) -> None:
    """Copy tokenizer, prompts, settings and the configuration of a Graph-LLM to a folder; files that it has stay.

    Args:
        weights: Names of more files to copy.
    """
    names = [*weights, PROCESSOR, PROMPT_FILE, *TASK_FILES, *TOKENIZER_FILES]
    if not task_of(source):
        names.append(CONFIG)
    for name in names:
        if (source / name).is_file() and not (target / name).is_file():
            shutil.copyfile(source / name, target / name)
    # Tokenizers with several chat templates store the additional ones in this folder.
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, target / TEMPLATES)
