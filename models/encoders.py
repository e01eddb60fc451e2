"""Load a sentence encoder, and check that all its weights were in its files.

Tested in `tests/models/test_loading.py` and `tests/rag/search/test_embedding.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tripletune.core import libraries
from tripletune.core.files import read_json
from tripletune.models.completeness import checked_model, loading_errors_explained
from tripletune.models.control_tokens import read_control_as_text
from tripletune.models.specs import ModelSource, check_shard_indexes, model_file, source_of

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    class InputModule(Protocol):
        """A module of sentence-transformers that reads texts."""

        tokenizer: PreTrainedTokenizerBase
        processing_kwargs: dict[str, Any]
        max_seq_length: int | None

        def modules(self) -> Iterator[torch.nn.Module]:
            """The module and all modules inside of it."""


# Weights that a folder may lack: BERT's pooler, if an encoder pools its token vectors. (Of tied weights, such as output
# layer and embeddings, transformers needs only one.)
_MAY_BE_NEW = re.compile(r"(^|\.)pooler\.")


def load_encoder(
    spec: str | Path, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> SentenceTransformer:
    """Load a sentence encoder, and check that all its weights are in its files.

    Without `modules.json`, sentence-transformers would put a mean pooling on any model; so a language model, whose
    vectors would mean nothing, is refused before it is loaded.

    Args:
        dtype: Weight type; by default the type in the encoder's files.
        trust_remote_code: Run Python code that the model brings.
    """
    from sentence_transformers import SentenceTransformer

    libraries.check_use("sentence encoders")
    # With weights of another size, loading continues, and `_check_all_weights_stored` lists them all.
    options: dict[str, Any] = {"use_safetensors": True, "ignore_mismatched_sizes": True}
    if dtype:
        options["dtype"] = dtype
    source = source_of(spec)
    check_shard_indexes(source)
    with loading_errors_explained(spec, "encoder"):
        modules_file = model_file(source, "modules.json")
        if modules_file is None:
            _check_generates_no_text(spec, source)
        encoder = SentenceTransformer(
            source.place, revision=source.revision, trust_remote_code=trust_remote_code, model_kwargs=options
        )
        first_folder = ""
        if modules_file is not None:
            # In older layouts the first module, the transformer, lies in a folder of its own.
            first_folder = json.loads(modules_file.read_text(encoding="utf-8"))[0].get("path") or ""
        _check_all_weights_stored(encoder, spec, source, first_folder, options)
    _make_texts_literal(encoder)
    return encoder


def _make_texts_literal(encoder: SentenceTransformer) -> None:
    """Change an encoder to read control tokens in texts as plain text, since a passage must not end or forge a turn."""
    for module in input_modules(encoder).values():
        if "message" in getattr(module, "modality_config", ()):  # its texts go through a chat template
            sanitised = {"chat_template": {"sanitize_control_tokens": True}}
            module.processing_kwargs = {**module.processing_kwargs, **sanitised}
        else:
            read_control_as_text(module.tokenizer)


def _check_generates_no_text(spec: str | Path, source: ModelSource) -> None:
    """Raise an error if a model without modules.json is a language model, whose vectors would mean nothing."""
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(source.place, **source.options)
    architectures = config.get("architectures") or [""]
    if architectures[0].endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        raise ValueError(
            f"encoder {spec}: {architectures[0]} generates text and is no sentence encoder (it has no modules.json of "
            "sentence-transformers): use a sentence encoder, for example BAAI/bge-small-en-v1.5"
        )


def _check_all_weights_stored(
    encoder: SentenceTransformer, spec: str | Path, source: ModelSource, first_folder: str, options: Mapping[str, Any]
) -> None:
    """Raise a `ValueError` if a weight of an encoder was missing in its files.

    Sentence-transformers does not report missing weights, so each transformer is loaded again, on the device "meta",
    which takes no memory.

    Args:
        first_folder: Sub-folder of the first module; "" for the encoder's own folder.
        options: Arguments with which the encoder's transformers were loaded.
    """
    is_pooled = any(type(module).__name__ == "Pooling" for module in encoder.modules())
    may_be_new = _MAY_BE_NEW if is_pooled else None
    for core, subfolder in _transformers_with_folders(encoder, source, first_folder):
        _, info = type(core).from_pretrained(
            source.place,
            config=core.config,
            subfolder=subfolder,
            output_loading_info=True,
            device_map="meta",
            **options,
            **source.options,
        )
        checked_model((core, info), spec, may_be_new)


def input_modules(encoder: SentenceTransformer) -> dict[str, InputModule]:
    """The modules that read texts, by route ("query", "document" for an encoder with two towers; "" for any other)."""
    routes = _modules_by_route(encoder)
    if not routes:
        return {"": encoder[0]}
    return {route: modules[0] for route, modules in routes.items()}


def _modules_by_route(encoder: SentenceTransformer) -> Mapping[str, Sequence[InputModule]]:
    """The modules of each route of a `Router`, which puts queries and texts through separate towers; else empty."""
    return getattr(encoder[0], "sub_modules", {})


def _transformers_with_folders(
    encoder: SentenceTransformer, source: ModelSource, folder: str
) -> Iterator[tuple[PreTrainedModel, str]]:
    """Yield the transformers of an encoder, each once, with its sub-folder; `folder` is that of the first module.

    An encoder with routes has a transformer for queries and another for texts, which may be the same. The sub-folders
    say which file holds the weights of each, so that missing weights are found.
    """
    from transformers import PreTrainedModel

    # Both routes may share a module, which is then listed once.
    subfolders: dict[InputModule, str] = {}
    routes = _modules_by_route(encoder)
    if routes:
        settings = model_file(source, f"{folder}/router_config.json".lstrip("/"))
        structure = read_json(settings)["structure"] if settings else {}
        for route, modules in routes.items():
            # Without the settings file, the sub-folders are unknown, and nothing is checked.
            for module, name in zip(modules, structure.get(route, ()), strict=False):
                subfolders[module] = f"{folder}/{name}".lstrip("/")
    else:
        subfolders[encoder[0]] = folder
    for module, subfolder in subfolders.items():
        # Its attribute has another name in each version of sentence-transformers.
        core = next((inner for inner in module.modules() if isinstance(inner, PreTrainedModel)), None)
        if core is not None:
            yield core, subfolder
