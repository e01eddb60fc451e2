"""Build the Graph-LLM of RAS (section 3.4) from a base model, add an adapter, and load it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from tripletune.core import libraries
from tripletune.core.config import load_config
from tripletune.core.data.graph_settings import GraphSettings, values_of
from tripletune.core.files import read_json
from tripletune.core.options import ConfigError
from tripletune.models.adapters import LANGUAGE_MODEL_LAYERS, load_adapter
from tripletune.models.attention import set_attention
from tripletune.models.completeness import SAY_WHAT_IS_MISSING, checked_model, loading_errors_explained
from tripletune.models.fingerprints import content_fingerprint, has_content
from tripletune.models.graph_llm.embeddings import encoder_dimension
from tripletune.models.graph_llm.model import GraphLLM, GraphLLMConfig
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.models.loading import load_causal_lm
from tripletune.models.local.fitting import has_attention
from tripletune.models.lora import Tune, chosen_layers, modules_of_chosen_layers, put_adapter
from tripletune.models.losses import scales_logits_alike
from tripletune.models.run_folders import CONFIG, is_adapter
from tripletune.models.specs import check_specs, pinned_source, resolve, with_revision

GRAPH_MODULES = ("graph_encoder", "projector")
libraries.check_use("the Graph-LLM")
# PEFT's own name for "an adapter without adapter layers": graph-token tuning trains the saved modules alone.
_NO_ADAPTER_LAYERS = libraries.take("peft.utils.constants:DUMMY_TARGET_MODULES")


def build_graph_llm(
    base_model: str,
    *,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
    nf4: bool = False,
    processor_settings: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[GraphLLM, GraphLLMProcessor]:
    """Put new graph modules in front of a pretrained language model, and create the processor.

    Args:
        dtype: Weight type of the language model; graph modules stay float32.
        attention: See `models.attention.set_attention`; None: the default of transformers.
        nf4: Keep the language model's linear layers in 4 bits; see `models.loading.load_language_model`.
        processor_settings: Fields of `ProcessorSettings`.
        settings: Fields of `GraphSettings`; a wrong name is a `TypeError` of that dataclass.

    Raises:
        ValueError: The base model has no attention layer.
    """
    language_model, tokenizer = load_causal_lm(base_model, dtype, nf4=nf4)
    if not has_attention(language_model):
        raise ValueError(
            f"model {base_model}: {type(language_model).__name__} has no attention layer, but a Graph-LLM needs one "
            "to generate replies; choose a base model in which at least some layers have attention"
            + libraries.untested("transformers")
        )
    graph = GraphSettings(**settings)
    # Model and processor must agree on these two.
    shared_settings = {"use_graph": graph.use_graph, "graph_pooling": graph.graph_pooling}
    processor = GraphLLMProcessor.create(tokenizer, **(processor_settings or {}) | shared_settings)
    name, commit = pinned_source(str(base_model))
    config_fields: dict[str, Any] = asdict(graph)
    config_fields["text_config"] = language_model.config
    config_fields["base_model"] = name
    config_fields["base_revision"] = commit
    config_fields["base_weights"] = content_fingerprint(base_model)
    config_fields["graph_token_id"] = processor.graph_token_id
    config_fields["encoder_weights"] = ""
    config_fields["text_embedding_width"] = 0
    if graph.use_graph:
        config_fields["encoder_weights"] = content_fingerprint(graph.encoder)
        config_fields["text_embedding_width"] = encoder_dimension(graph.encoder)
    if graph.graph_token == "normalised":
        config_fields["graph_token_norm"] = _embedding_norm(language_model)
    model = GraphLLM(GraphLLMConfig(**config_fields), language_model)
    model.is_loaded_in_4bit = nf4  # PEFT reads it
    # After the composite model is made, which sets a kernel itself.
    if attention is not None:
        set_attention(model.language_model, attention)
    model.config.name_or_path = name
    return model.eval(), processor


@torch.no_grad()
def _embedding_norm(language_model: PreTrainedModel) -> float:
    """The mean norm of about a thousand token embeddings, after the scaling that some model families apply.

    The tokens are spread over the vocabulary, because rare and frequent tokens, which differ in norm, lie apart in it.
    """
    embed: nn.Embedding = language_model.get_input_embeddings()
    count = embed.weight.shape[0]
    spread_ids = torch.arange(0, count, max(1, count // 1000), device=embed.weight.device)
    return float(embed(spread_ids).float().norm(dim=-1).mean())


def add_adapter(
    model: GraphLLM,
    *,
    tune: Tune = "lora",
    rank: int = 8,
    alpha: int = 16,
    dropout: float = 0.05,
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
    options: Mapping[str, Any] | None = None,
) -> GraphLLM | PeftModel:
    """Freeze the language model, add LoRA to it in place, and make graph encoder and projector fully trainable.

    One PEFT adapter holds all trained weights. Defaults are from the paper's table 8 and the authors' target modules.

    Args:
        tune: "graph_token" adds no LoRA (ablation "No LoRA"); "all" trains the model itself, without an adapter.
        targets: Linear layers of the language model to adapt; "all-linear": all of them except the output layer.
        options: More fields of PEFT's `LoraConfig`.
    """
    model.labels_only = scales_logits_alike(model.language_model)
    # The trainer then updates every weight of the model, and the folder holds them all.
    if tune == "all":
        return model
    options = dict(options or {})
    layers: Any = _NO_ADAPTER_LAYERS
    if tune == "lora":
        layers = _lora_layers(model, targets, options)
        # The numbers are in the names.
        options.pop("layers_to_transform", None)
    saved: list[str] = []
    if model.config.use_graph:
        saved += GRAPH_MODULES
    saved += options.pop("modules_to_save", None) or ()
    return put_adapter(
        model,
        options,
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=layers,
        modules_to_save=saved or None,
    )


def _lora_layers(model: GraphLLM, targets: tuple[str, ...], options: Mapping[str, Any]) -> str | list[str]:
    """PEFT's `target_modules`, without the graph encoder's linear layers, which are fully trained and need no LoRA.

    One pattern for the layers of all blocks, or a list of names where a pattern will not do: for whole names, which
    `chosen_layers` gives for multimodal models, and for chosen blocks.
    """
    chosen = chosen_layers(model.language_model, targets, model.config.base_model)
    numbers = modules_of_chosen_layers(model, options)
    if any("." in name for name in chosen):
        names = [f"language_model.{name}" for name in sorted(chosen)]
        return [name for name in names if not numbers or name in numbers]
    pattern = f"{LANGUAGE_MODEL_LAYERS}({'|'.join(sorted(chosen))})"
    if not numbers:
        return pattern
    # PEFT does not accept numbers together with a pattern.
    return [name for name in numbers if re.fullmatch(pattern, name)]


def is_graph_llm_folder(folder: str | Path) -> bool:
    """Whether a folder holds a trained Graph-LLM: run, checkpoint, export or merged model."""
    try:
        return bool(read_json(Path(folder) / CONFIG).get("model_type") == GraphLLMConfig.model_type)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def load_graph_llm(
    folder: str | Path, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel | PeftModel, GraphLLMProcessor]:
    """Load a trained Graph-LLM and its processor; any other causal LM becomes an untrained Graph-LLM without graph.

    So a plain language model gets the same prompts and the same decoding as a trained one.
    """
    path = Path(resolve(folder))
    if not is_graph_llm_folder(path):
        if path.is_dir() and not (path / CONFIG).exists():
            raise FileNotFoundError(f"model folder {path} has no {CONFIG}: it is not a model or checkpoint")
        return build_graph_llm(str(folder), dtype=dtype, use_graph=False)
    with loading_errors_explained(path, "Graph-LLM"):
        processor = GraphLLMProcessor.from_pretrained(path)
        config = GraphLLMConfig.from_pretrained(path)
        base = with_revision(str(config.base_model), config.base_revision)
        # Before the weights, which take minutes to load.
        _check_settings_and_models(config, base, path)
        model: PreTrainedModel | PeftModel
        if is_adapter(path):
            language_model, _ = load_causal_lm(base, dtype)
            # The base model is frozen and known by name; the folder holds only the adapter.
            model = load_adapter(GraphLLM(config, language_model), path, base)
        else:
            options = dict(SAY_WHAT_IS_MISSING)
            if dtype:
                options["dtype"] = dtype
            model = checked_model(GraphLLM.from_pretrained(path, use_safetensors=True, **options), folder)
    return model.eval(), processor


def _check_settings_and_models(config: GraphLLMConfig, base: str, path: Path) -> None:
    """Raise an error if the settings in a model folder are not valid, or name models that are missing or others.

    Another text encoder of the same width would load without complaint, and the graph tokens would mean nothing.
    """
    try:
        load_config(GraphSettings, None, values_of(GraphSettings, config))
    except ConfigError as error:
        raise ValueError(f"{path / CONFIG}: {str(error).partition('  - ')[2]}") from None
    if config.use_graph:
        check_specs(path / CONFIG, config.encoder)
    if is_adapter(path):
        check_specs(path / CONFIG, base)
    trained_with = config.encoder_weights
    # The fingerprint is "" for an encoder whose weights are not at hand.
    if trained_with and content_fingerprint(config.encoder) and not has_content(config.encoder, trained_with):
        raise ValueError(
            f"model {path} was trained with a text encoder other than {config.encoder}: name that of its training in "
            f"{path / CONFIG} (if you know that it is the same, remove encoder_weights)"
        )
