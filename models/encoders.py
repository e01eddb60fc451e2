"""Load a sentence encoder, and check that all its weights were in its files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.core import libraries
from tripletune.core.files import (
    read_json,
)
from tripletune.models.completeness import complete, telling
from tripletune.models.control_tokens import read_text_alone
from tripletune.models.specs import ModelSource, model_file, options_without_code, source_of

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer

# Weights that a folder may lack: BERT's pooler, if an encoder pools its token vectors. (Of tied weights, such as output
# layer and embeddings, transformers needs only one.)
_MAY_BE_NEW = re.compile(r"(^|\.)pooler\.")


def load_encoder(
    spec: str | Path, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> SentenceTransformer:
    """Load a sentence encoder; the default of `dtype` is the type in its file."""
    from sentence_transformers import SentenceTransformer
    from transformers import PretrainedConfig

    libraries.check_use("sentence encoders")
    options: dict[str, Any] = {"use_safetensors": True, "ignore_mismatched_sizes": True}
    options |= {"dtype": dtype} if dtype else {}
    source = source_of(spec)
    options_without_code(source)
    with telling(spec, "encoder"):
        kinds = PretrainedConfig.get_config_dict(source.place, **source.options)[0].get("architectures") or [""]
        modules = model_file(source, "modules.json")
        if modules is None and kinds[0].endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
            raise ValueError(
                f"encoder {spec}: {kinds[0]} generates text and is no sentence encoder (it has no modules.json of "
                "sentence-transformers): use a sentence encoder, for example BAAI/bge-small-en-v1.5"
            )
        model = SentenceTransformer(
            source.place, revision=source.revision, trust_remote_code=trust_remote_code, model_kwargs=options
        )
        first_folder = json.loads(modules.read_text(encoding="utf-8"))[0].get("path") or "" if modules else ""
        pooled = any(type(module).__name__ == "Pooling" for module in model.modules())
        options |= {"output_loading_info": True, "device_map": "meta", **source.options}
        for core, subfolder in _transformers_in(model, source, first_folder):
            # Sentence-transformers does not report missing weights, so load the same class again, on "meta".
            info = type(core).from_pretrained(source.place, config=core.config, subfolder=subfolder, **options)[1]
            complete((core, info), spec, _MAY_BE_NEW if pooled else None)
    for module in input_modules(model).values():
        if "message" in getattr(module, "modality_config", ()):  # its texts go through a chat template
            sanitised = {"chat_template": {"sanitize_control_tokens": True}}
            module.processing_kwargs = {**module.processing_kwargs, **sanitised}
        else:
            read_text_alone(module.tokenizer)
    return model


def input_modules(encoder: SentenceTransformer) -> dict[str, Any]:
    """The modules that read texts, by route ("query", "document" for an encoder with two towers; "" for any other)."""
    routes = _routes(encoder)
    return {route: modules[0] for route, modules in routes.items()} if routes else {"": encoder[0]}


def _routes(encoder: SentenceTransformer) -> Mapping[str, Sequence[Any]]:
    """The modules of each route of a `Router`, which puts queries and texts through towers of their own."""
    return getattr(encoder[0], "sub_modules", {})


def _transformers_in(encoder: SentenceTransformer, source: ModelSource, folder: str) -> Iterator[tuple[Any, str]]:
    """Yield the transformers of an encoder, each once, with its sub-folder; `folder` is that of the first module."""
    from transformers import PreTrainedModel

    places = {id(encoder[0]): folder}
    if routes := _routes(encoder):
        settings = model_file(source, f"{folder}/router_config.json".lstrip("/"))
        names = read_json(settings)["structure"] if settings else {}
        for route, modules in routes.items():
            for module, name in zip(modules, names.get(route, ())):
                places[id(module)] = f"{folder}/{name}".lstrip("/")
    for module in encoder.modules():
        core = getattr(module, "model", None)
        if id(module) in places and isinstance(core, PreTrainedModel):
            yield core, places[id(module)]
