"""Open a Graph-LLM from the options of a system: a run, an export, or its untrained base model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tripletune.core.calls import Sampling
from tripletune.core.files import read_json
from tripletune.models.run_folders import STUDENT, check_model_folder, trained_folder
from tripletune.models.specs import resolve, usual_dtype, with_revision

if TYPE_CHECKING:
    from tripletune.llm.graph_generator import LocalGenerator


def folder_or_base_model(spec: str, untrained: bool) -> str:
    """The folder or spec of a Graph-LLM; with `untrained`, the base model of a run folder.

    Only a trained Graph-LLM's config names a base model. Without this check, a base model would be loaded with a graph
    encoder of random weights.
    """
    try:
        resolved = resolve(spec)
    except FileNotFoundError as problem:
        if "/" in spec or ":" in spec:
            raise
        # The name of a hosted model has neither.
        raise FileNotFoundError(f"{problem}; for a chat model of a provider, give --llm openai:{spec}") from problem
    folder = trained_folder(resolved) if Path(resolved).is_dir() else Path(resolved)
    config = folder / "config.json"
    settings = read_json(config) if config.is_file() else {}
    base = settings.get("base_model")
    if untrained:
        return with_revision(str(base), settings.get("base_revision")) if base else spec
    if not base:
        if (folder / STUDENT).is_file():
            raise ValueError(f"model {spec} is a trained chat model, not a Graph-LLM: give it as --llm hf:{spec}")
        raise ValueError(
            f"model {spec} is not a trained Graph-LLM: give a run or export, or add --untrained to use an untrained "
            "base model"
        )
    return str(folder)


def open_generator(
    spec: str,
    untrained: bool = False,
    batch_size: int = 16,
    dtype: str | None = None,
    ledger: str | None = None,
    seed: int | None = None,
    graph: bool = True,
    prompt_embeds: str | None = None,
) -> LocalGenerator:
    """Load a Graph-LLM, which then decodes here, or at a server that runs its language model.

    Args:
        spec: Run, checkpoint or export folder; with `untrained`, also a base model.
        seed: Sample replies at temperature 1; None: greedy.
        graph: Whether prompts have the graph token.
        prompt_embeds: `NAME@URL` of a vLLM server that runs the language model.
    """
    spec = folder_or_base_model(spec, untrained)
    if not untrained:
        check_model_folder(spec)
    from tripletune.llm.graph_generator import load_generator

    # With a server, the ledger stores the server's calls instead.
    own_ledger = None if prompt_embeds else ledger
    generator = load_generator(spec, batch_size=batch_size, dtype=usual_dtype(dtype), ledger=own_ledger)
    if prompt_embeds:
        from tripletune.llm.prompt_embeds import PromptEmbedsGenerator

        generator = PromptEmbedsGenerator(generator, prompt_embeds, ledger)
    if seed is not None:
        generator.sampling = Sampling(1.0, seed=seed)
    if not graph:
        generator.processor = generator.processor.without_graph()
    return generator
