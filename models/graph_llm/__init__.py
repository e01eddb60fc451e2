"""The Graph-LLM of RAS (section 3.4): building it from a base model, adding what is trained, loading what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tripletune.models.files import read_json
from tripletune.models.graph_llm.embeddings import encoder_dimension
from tripletune.models.graph_llm.model import GraphLLM, GraphLLMConfig
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.models.loading import (
    LANGUAGE_MODEL_LAYERS,
    chosen_layers,
    load_adapter,
    load_causal_lm,
    resolve,
    telling,
)
from tripletune.models.run_folders import CONFIG, is_adapter

__all__ = ["GraphLLM", "GraphLLMConfig", "GraphLLMProcessor", "add_adapter", "build_graph_llm", "load_graph_llm"]
GRAPH_MODULES = ("graph_encoder", "projector")
# PEFT's own name for "an adapter without adapter layers": graph-token tuning trains the saved modules alone.
_NO_ADAPTER_LAYERS = "dummy-target-modules"


def build_graph_llm(
    base_model: str,
    *,
    encoder: str = "sentence-transformers/all-roberta-large-v1",
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    attention: str | None = None,
    processor_settings: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[GraphLLM, GraphLLMProcessor]:
    """Put fresh graph modules in front of a pretrained language model.

    Args:
        base_model: Hub id, folder or `pypi:package`.
        encoder: Sentence encoder for node and edge texts.
        dtype: Weight type of the language model; graph modules stay float32.
        revision: Hub revision of the base model.
        attention: Attention kernel of transformers ("sdpa", "eager", "flash_attention_2", …); None takes its choice.
        processor_settings: Fields of `ProcessorSettings`.
        **config: Fields of `GraphLLMConfig`.

    Returns:
        The model in eval mode, and its processor.
    """
    language_model, tokenizer = load_causal_lm(base_model, dtype, revision)
    use_graph = config.setdefault("use_graph", True)
    settings = dict(processor_settings or {})
    settings["use_graph"] = use_graph
    settings["graph_pooling"] = config.get("graph_pooling", "subgraphs")
    processor = GraphLLMProcessor.create(tokenizer, **settings)
    model_config = GraphLLMConfig(
        text_config=language_model.config,
        base_model=str(base_model),
        base_revision=getattr(language_model.config, "_commit_hash", None) or revision,
        encoder=encoder,
        text_embedding_width=encoder_dimension(encoder) if use_graph else 0,
        graph_token_id=processor.graph_token_id,
        **config,
    )
    model = GraphLLM(model_config, language_model)
    if attention is not None:
        model.language_model.set_attn_implementation(attention)
    model.config._name_or_path = str(base_model)
    return model.eval(), processor


def add_adapter(
    model: GraphLLM,
    *,
    lora: bool = True,
    rank: int = 8,
    alpha: int = 16,
    dropout: float = 0.05,
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
) -> PeftModel:
    """Freeze the language model, add LoRA to it and train graph encoder and projector in full.

    All that is trained lies in one PEFT adapter. Defaults are the paper's table 8 and the authors' target modules.

    Args:
        model: The base.
        lora: False tunes the graph token alone (ablation "No LoRA").
        targets: Linear layers of the language model to adapt; "all-linear" adapts every one but the output layer.

    Raises:
        ValueError: nothing would be trained, or a target does not exist.
    """
    use_graph = model.config.use_graph
    if not lora and not use_graph:
        raise ValueError("lora is off and use_graph is off: nothing is left to train")
    chosen = chosen_layers(model.language_model, targets, model.config.base_model) if lora else set()
    # A pattern, because the graph encoder's own linear layers must not be adapted on top of being trained.
    pattern = f"{LANGUAGE_MODEL_LAYERS}({'|'.join(sorted(chosen))})"
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=pattern if lora else _NO_ADAPTER_LAYERS,
        modules_to_save=list(GRAPH_MODULES) if use_graph else None,
    )
    return get_peft_model(model, config)


def is_graph_llm_folder(folder: str | Path) -> bool:
    """Whether a folder holds a trained Graph-LLM: run, checkpoint, export or merged model."""
    try:
        return bool(read_json(Path(folder) / CONFIG).get("model_type") == GraphLLMConfig.model_type)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def load_graph_llm(
    folder: str | Path, dtype: torch.dtype | None = None, trainable: bool = False
) -> tuple[PreTrainedModel | PeftModel, GraphLLMProcessor]:
    """Load a trained Graph-LLM, or any causal language model as an untrained one without graph.

    Args:
        folder: Adapter folder (a run's `final`, checkpoint, export), merged folder, or a plain base-model spec.
        dtype: Weight type of the language model.
        trainable: Load the adapter so that training can go on.

    Returns:
        The model in eval mode and its processor.

    Raises:
        FileNotFoundError: no such folder, or files are missing in it.
        ValueError: weights cannot be read, for example because a file was cut off, or do not fit the base model.
    """
    path = Path(resolve(folder))
    if not is_graph_llm_folder(path):
        if path.is_dir() and not (path / CONFIG).exists():
            raise FileNotFoundError(f"model folder {path} has no {CONFIG}: it is not a model or checkpoint")
        return build_graph_llm(str(folder), dtype=dtype, use_graph=False)
    with telling(path, "Graph-LLM"):
        processor = GraphLLMProcessor.from_pretrained(path)
        config = GraphLLMConfig.from_pretrained(path)
        model: Any
        if is_adapter(path):
            language_model, _ = load_causal_lm(config.base_model, dtype, config.base_revision)
            # The base is frozen and known by name; what the folder holds is the adapter.
            model = load_adapter(GraphLLM(config, language_model), path, trainable)
        else:
            options = {"dtype": dtype} if dtype else {}
            model = GraphLLM.from_pretrained(path, use_safetensors=True, **options)
    return model.eval(), processor
