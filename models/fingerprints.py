"""Fingerprints that tell models apart: of the files of a folder, and of the numbers of the weights in it."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.core.files import (
    file_digest,
    files_fingerprint,
    read_json,
)
from tripletune.models.run_folders import (
    ADAPTER_CONFIG,
    CONFIG,
    PROCESSOR,
    PROMPT_FILE,
    TOKENIZER_FILES,
    is_adapter,
    weight_files,
)
from tripletune.models.specs import model_file, resolve, source_of

if TYPE_CHECKING:
    pass

_MODEL_FILES = (CONFIG, ADAPTER_CONFIG, PROCESSOR, PROMPT_FILE, "generation_config.json", *TOKENIZER_FILES)
_LEFT_OUT = ("inv_freq", "position_ids", "lm_head.weight")


def model_fingerprint(spec: str | Path) -> str:
    """A fingerprint of everything in a local model that its replies depend on; "" for a model of the hub.

    A model of the hub is identified by its spec, which holds the revision. The fingerprint covers weights, adapter,
    base model, quantisation, tokenizer, chat template, prompts, generation settings and text encoder.
    """
    folder = Path(resolve(spec))
    if not folder.is_dir():
        return ""
    parts = [files_fingerprint(folder)]
    parts += [file_digest(folder / name) if (folder / name).is_file() else "" for name in _MODEL_FILES]
    named: dict[str, Any] = {}
    for name in (CONFIG, ADAPTER_CONFIG):
        named |= read_json(folder / name) if (folder / name).is_file() else {}
    base = (named.get("base_model_name_or_path") or named.get("base_model")) if is_adapter(folder) else None
    encoder = named.get("encoder") if named.get("model_type") == "graph_llm" else None
    for other, read in ((base, model_fingerprint), (encoder, encoder_fingerprint)):
        with suppress(OSError):  # loading reports a missing model
            parts.append(read(str(other)) if other and Path(str(other)) != folder else "")
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def encoder_fingerprint(spec: str) -> str:
    """A fingerprint of a local sentence encoder: weights, tokenizer and settings; "" for other specs."""
    with suppress(FileNotFoundError):  # `openai:MODEL`
        return files_fingerprint(resolve(spec), ("safetensors", "bin", "json", "txt"))
    return ""


def content_fingerprint(spec: str | Path) -> str:
    """A digest of some numbers of each weight, independent of files and shards; "" if no weights can be read."""
    from safetensors import safe_open

    try:
        source = source_of(spec)
    except OSError:
        return ""
    folder = Path(source.place)
    if not folder.is_dir():
        if (config := model_file(source, CONFIG)) is None:
            return ""
        folder = config.parent
    found = {}
    for file in filter(Path.is_file, weight_files(folder)):
        with safe_open(file, framework="pt") as weights:
            # Buffers, and an output layer that may be tied to the embeddings, are missing in some files.
            for name in (one for one in weights.keys() if not one.endswith(_LEFT_OUT)):  # noqa: SIM118
                part = weights.get_slice(name)
                some = part[:1] if len(part.get_shape()) > 1 else weights.get_tensor(name)
                found[name] = some.flatten()[:32].bfloat16().tolist()
    return hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=8).hexdigest() if found else ""
