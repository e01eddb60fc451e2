"""Merge: the LoRA weights go into the language model, and the result loads without PEFT.

Either the whole Graph-LLM in one folder (`load_graph_llm`, `GraphLLM.from_pretrained`), or its language model alone as
a plain transformers folder. Nothing is written that was not loaded again and compared with the adapter first.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.checkpoints.card import CARD, PROVENANCE, Provenance, collect, render_card
from tripletune.checkpoints.text_export import merge_text_model
from tripletune.checkpoints.verify import (
    CASES,
    REFERENCE,
    TOLERANCE,
    Comparison,
    compare,
    insist,
    observe,
    observe_model,
    weight_digests,
)
from tripletune.models.run_folders import (
    CONFIG,
    check_model_folder,
    check_output,
    is_adapter,
    is_text_model,
    load_model,
    public,
    public_tokenizer_config,
    read_json,
    replaced_folder,
    trained_folder,
    write_json,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What came out of a merge.

    Attributes:
        folder: The folder written.
        logit_difference: Largest absolute difference of a compared logit between adapter and merged folder.
        same_replies: Greedy replies that are equal, or most likely next tokens for a language model alone.
        replies: How many were compared.
        uses_graph: Whether the adapter was trained with a graph token.
    """

    folder: Path
    logit_difference: float
    same_replies: int
    replies: int
    uses_graph: bool


def merge(
    folder: str | Path,
    output: str | Path,
    *,
    dtype: str = "float32",
    language_model_only: bool = False,
    overwrite: bool = False,
) -> MergeReport:
    """Merge an adapter into its base model.

    Args:
        folder: Export, run or checkpoint folder with an adapter.
        output: Folder to write; it appears when it is complete and checked.
        dtype: Weight type of the language model that is written. float32 gives the adapter's replies; 16 bits halve
            the folder and round, so replies can differ (the report says how many). Graph modules stay float32.
        language_model_only: Write the language model as a plain transformers folder. Sensible for a model trained
            without graph token.
        overwrite: Replace a model folder in the output.

    Returns:
        How the merged folder compares with the adapter.

    Raises:
        FileExistsError: the output is there already.
        FileNotFoundError: the folder or something in it is missing.
        ValueError: the folder is damaged or holds no adapter, or the merged model does not say the same.
    """
    import torch

    from tripletune.models.loading import parse_dtype

    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    source, output = trained_folder(folder), Path(output)
    check_output(output, overwrite, (Path(folder), source))
    check_model_folder(source)
    if not is_adapter(source):
        raise ValueError(f"{source} holds no adapter (no adapter_config.json): there is nothing to merge")
    if is_text_model(source):
        # It is a language model alone, so `language_model_only` changes nothing.
        comparison = merge_text_model(source, output, dtype, overwrite)
        return _report(output, comparison, uses_graph=False)
    provenance = collect(source)
    model, processor = load_model(source, torch.float32)
    target = parse_dtype(dtype)
    with replaced_folder(output, overwrite) as scratch:
        if language_model_only:
            report = _write_language_model(model, processor, target, scratch)
        else:
            report = _write_graph_llm(model, processor, target, scratch)
        _write_card(scratch, provenance, "language_model" if language_model_only else "merged", output.name)
    return replace(report, folder=output)


def _write_graph_llm(model: Any, processor: Any, dtype: torch.dtype, scratch: Path) -> MergeReport:
    import torch

    reference = observe_model(model, processor)
    merged = _merged(model)
    uses_graph = bool(merged.config.use_graph)
    merged.language_model.to(dtype)
    merged.save_pretrained(scratch)
    processor.save_pretrained(scratch)
    _clean(scratch, keep=(merged.config.base_model, merged.config.encoder))
    del model, merged
    # Two copies of a large model need not fit into memory.
    gc.collect()
    observed = observe(scratch)
    comparison = compare(reference, observed, against="the adapter")
    report = _report(scratch, comparison, uses_graph)
    if dtype is torch.float32:
        insist(comparison)
    write_json(scratch / REFERENCE, {**observed, "weights": weight_digests(scratch)})
    return report


def _report(folder: Path, comparison: Comparison, uses_graph: bool) -> MergeReport:
    cases = comparison.cases
    difference = max(case.logit_difference for case in cases)
    return MergeReport(folder, difference, sum(case.same_reply for case in cases), len(cases), uses_graph)


def _write_language_model(model: Any, processor: Any, dtype: torch.dtype, scratch: Path) -> MergeReport:
    """Write the language model and check it on prompts without placeholder, where no graph takes part."""
    import torch
    from transformers import AutoModelForCausalLM

    from tripletune.models.loading import load_tokenizer

    prompts = [
        [token for token in processor.encode_input(sample).input_ids if token != processor.graph_token_id]
        for sample in CASES.values()
    ]
    language_model = model.get_base_model().language_model
    wanted = [_last_logits(language_model, prompt) for prompt in prompts]
    merged = _merged(model)
    base, uses_graph = merged.config.base_model, bool(merged.config.use_graph)
    language_model = merged.language_model.to(dtype)
    language_model.save_pretrained(scratch)
    # The run's tokenizer knows the graph placeholder, for which this model has no embedding.
    (load_tokenizer(base) if uses_graph else processor.tokenizer).save_pretrained(scratch)
    _clean(scratch, keep=())
    del model, merged, language_model
    gc.collect()
    again = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()
    if torch.cuda.is_available():
        again = again.to("cuda")
    found = [_last_logits(again, prompt) for prompt in prompts]
    difference = max(float((one - other).abs().max()) for one, other in zip(wanted, found))
    same = sum(int(one.argmax() == other.argmax()) for one, other in zip(wanted, found))
    if dtype is torch.float32 and not difference <= TOLERANCE:
        raise ValueError(
            f"the merged language model differs from the adapter by {difference:.1e} in a logit, more than "
            f"{TOLERANCE:g}; nothing was written"
        )
    return MergeReport(scratch, difference, same, len(prompts), uses_graph)


def _last_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt], device=model.device), logits_to_keep=1).logits
    return logits[0, -1].float().cpu()


def _merged(model: Any) -> Any:
    """The base model with LoRA merged and the trained graph modules in their places."""
    try:
        return model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise ValueError(f"the adapter can't be merged: {error}") from None


def _clean(folder: Path, keep: tuple[str, ...]) -> None:
    """Take paths of this machine out of the files that transformers wrote."""
    for name in (CONFIG, "generation_config.json"):
        if (folder / name).is_file():
            write_json(folder / name, public(read_json(folder / name), keep))
    public_tokenizer_config(folder)


def _write_card(folder: Path, provenance: Provenance, kind: Any, name: str) -> None:
    (folder / CARD).write_text(render_card(provenance, kind, name), encoding="utf-8")
    write_json(folder / PROVENANCE, public(provenance.to_json(), (provenance.base_model, provenance.encoder)))
