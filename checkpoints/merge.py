"""Merge: the LoRA weights go into the language model, and the result loads without PEFT.

A Graph-LLM becomes one folder (`load_graph_llm`, `GraphLLM.from_pretrained`), or its language model alone a plain
transformers folder; a model on plain text always becomes the latter. Nothing is written that was not loaded again and
compared with the adapter first.
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

from tripletune.checkpoints.card import collect_provenance, public, write_model_card
from tripletune.checkpoints.export import MADE, copy_files, public_tokenizer_config
from tripletune.checkpoints.verify import (
    REFERENCE,
    Case,
    Comparison,
    Loaded,
    compare_observations,
    load,
    load_plain,
    observe,
    weight_digests,
)
from tripletune.models.files import check_folder, new_folder, read_json, write_json
from tripletune.models.run_folders import CONFIG, check_model_folder, is_adapter, is_text_model, trained_folder

logger = logging.getLogger(__name__)
DTYPES = ("float32", "bfloat16", "float16")


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
        folder: Export, run or checkpoint folder with an adapter.
        output: Folder to write; it appears when it is complete and checked.
        dtype: Weight type of the language model that is written. float32 gives the adapter's replies; 16 bits halve
            the folder and round, so replies can differ (the report says how many). Graph modules stay float32.
        language_model_only: Write the language model of a Graph-LLM as a plain transformers folder. Sensible for a
            model trained without graph token.
        overwrite: Replace a model folder in the output.

    Returns:
        How the merged folder compares with the adapter.

    Raises:
        FileExistsError: the output is there already.
        FileNotFoundError: the folder or something in it is missing.
        ValueError: the folder is damaged or holds no adapter, or the merged model does not say the same.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    source, output = trained_folder(folder), Path(output)
    check_folder(output, MADE, overwrite, (folder, source))
    check_model_folder(source)
    if not is_adapter(source):
        raise ValueError(f"{source} holds no adapter (no adapter_config.json): there is nothing to merge")
    provenance = collect_provenance(source)
    alone = language_model_only and not is_text_model(source)
    with new_folder(output, MADE, overwrite, (folder, source)) as scratch:
        reference = _write_merged(load(source), dtype, alone, scratch)
        # Two copies of a large model need not fit into memory.
        gc.collect()
        if not alone:
            copy_files(source, scratch, provenance)
        for name in (CONFIG, "generation_config.json"):
            if (scratch / name).is_file():
                keep = (provenance.base_model, provenance.encoder) if provenance.use_graph and not alone else ()
                write_json(scratch / name, public(read_json(scratch / name), keep))
        public_tokenizer_config(scratch)
        observed = observe(load_plain(scratch) if alone else load(scratch), reference["cases"])
        comparison = compare_observations(reference, observed, against="the adapter")
        failed = [case.name for case in comparison.cases if not case.passed]
        if dtype == "float32" and failed:
            raise ValueError(
                f"the merged model does not say what the adapter says ({len(failed)} of {len(comparison.cases)} cases, "
                f"first {failed[0]!r}; logits differ by up to {comparison.logit_difference:.1e}); nothing was written"
            )
        if not alone:
            write_json(scratch / REFERENCE, {**observed, "weights": weight_digests(scratch)})
        write_model_card(scratch, provenance, "language_model" if alone else "merged", output.name)
    if alone and provenance.use_graph:
        logger.warning(
            "this model was trained with a graph token, which a plain language model does not read: its replies differ "
            "from those of the Graph-LLM"
        )
    return comparison


def _write_merged(loaded: Loaded, dtype: str, alone: bool, scratch: Path) -> dict[str, Any]:
    """Write the merged weights, and say what the adapter said before."""
    import torch

    from tripletune.models.loading import load_tokenizer

    processor = loaded.processor
    if alone:
        # Without placeholder, no graph takes part.
        plain = Loaded(loaded.model.get_base_model().language_model, loaded.tokenizer, None, loaded.folder)
        reference = observe(plain, [_without_graph(loaded, case) for case in loaded.cases()])
    else:
        reference = observe(loaded)
    merged = _merged(loaded.model)
    language_model = merged if processor is None else merged.language_model
    language_model.to(getattr(torch, dtype))
    (language_model if alone else merged).save_pretrained(scratch)
    if alone:
        # The run's tokenizer knows the graph placeholder, for which this model has no embedding.
        plain_tokenizer = load_tokenizer(merged.config.base_model, merged.config.base_revision)
        (plain_tokenizer if processor.settings.use_graph else loaded.tokenizer).save_pretrained(scratch)
    return reference


def _without_graph(loaded: Loaded, case: Case) -> Case:
    prompt, _ = loaded.prompt(case)
    kept = [token for token in prompt if token != loaded.processor.graph_token_id]
    return {"name": case["name"], "prompt_ids": kept}


def _merged(model: Any) -> Any:
    """The base model with LoRA merged and the trained graph modules in their places."""
    try:
        return model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise ValueError(f"the adapter can't be merged: {error}") from None
