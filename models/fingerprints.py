"""Fingerprints that tell models apart: of the files of a folder, and of the numbers of the weights in it."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.core.files import file_digest, files_fingerprint, read_json
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
    from transformers import PreTrainedTokenizerBase

_MODEL_FILES = (CONFIG, ADAPTER_CONFIG, PROCESSOR, PROMPT_FILE, "generation_config.json", *TOKENIZER_FILES)
# Buffers, and an output layer that may be tied to the embeddings, are missing in some files of the same model.
_LEFT_OUT = ("inv_freq", "position_ids", "lm_head.weight")
# Numbers of each row, and rows of each weight, in a `content_fingerprint`. Adapters keep such fingerprints together
# with this mark, so a change of these numbers needs another mark. Without one, they are of the first row alone.
_NUMBERS, _ROWS = 32, 9
_MARK = "rows9:"


def model_fingerprint(spec: str | Path) -> str:
    """A fingerprint of everything in a local model that its replies depend on; "" for a model of the hub.

    A model of the hub is identified by its spec, which holds the revision. The fingerprint covers weights, adapter,
    base model, quantisation, tokenizer, chat template, prompts, generation settings and text encoder.
    """
    folder = Path(resolve(spec))
    if not folder.is_dir():
        return ""
    digests = [files_fingerprint(folder)]
    for name in _MODEL_FILES:
        file = folder / name
        digests.append(file_digest(file) if file.is_file() else "")
    settings: dict[str, Any] = {}
    for name in (CONFIG, ADAPTER_CONFIG):
        file = folder / name
        if file.is_file():
            settings |= read_json(file)
    base = ""
    if is_adapter(folder):
        base = str(settings.get("base_model_name_or_path") or settings.get("base_model") or "")
    encoder = ""
    if settings.get("model_type") == "graph_llm":
        encoder = str(settings.get("encoder") or "")
    # One digest or none for each of these two, in this order: stored fingerprints were made so.
    for named_model, fingerprint_of in ((base, model_fingerprint), (encoder, encoder_fingerprint)):
        # This function must not stop a run for a missing model: loading reports it, and says what to do.
        with suppress(OSError):
            # A folder that names itself as its base would be read without end.
            is_other = named_model and Path(named_model) != folder
            digests.append(fingerprint_of(named_model) if is_other else "")
    return hashlib.blake2b(repr(digests).encode(), digest_size=8).hexdigest()


def teacher_fingerprint(spec: str) -> str:
    """The `model_fingerprint` of a teacher; "" for one on a server (`openai:MODEL@URL`), whose name is a setting."""
    return "" if "@http" in spec else model_fingerprint(spec)


def encoder_fingerprint(spec: str) -> str:
    """A fingerprint of a local sentence encoder: weights, tokenizer and settings; "" for other specs."""
    # `openai:MODEL` is no folder.
    with suppress(FileNotFoundError):
        return files_fingerprint(resolve(spec), ("safetensors", "bin", "json", "txt"))
    return ""


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A fingerprint of everything in a loaded tokenizer that its tokens depend on, and of its chat template.

    A sample of texts would not show every change: templates treat earlier replies, long chats or thoughts in their own
    way, and a new token changes only the texts that hold it.
    """
    contents: list[Any] = [tokenizer.chat_template, tokenizer.special_tokens_map, type(tokenizer).__name__]
    if tokenizer.is_fast:
        core = json.loads(tokenizer.backend_tokenizer.to_str())
        # Left by earlier calls.
        core.pop("truncation")
        core.pop("padding")
        contents.append(core)
    else:
        contents += [sorted(tokenizer.get_vocab().items()), tokenizer.init_kwargs]
    written = json.dumps(contents, sort_keys=True, default=str)
    return hashlib.blake2b(written.encode(errors="replace"), digest_size=16).hexdigest()


def content_fingerprint(spec: str | Path) -> str:
    """A digest of some numbers of each weight, independent of files and shards; "" if no weights can be read.

    Adapters keep it of their base model, which may be renamed, split into other shards, or stored in bfloat16 meanwhile
    and still be the same model. A few numbers of nine rows of every weight, from the first to the last, tell models
    apart without reading gigabytes; the last rows of the embeddings are those of tokens that were added and trained.
    """
    digest = _digest_of_rows(spec, _ROWS)
    return _MARK + digest if digest else ""


def has_content(spec: str | Path, fingerprint: str) -> bool:
    """Whether the weights of `spec` have this `content_fingerprint`, or one of the first rows as older runs stored."""
    if fingerprint.startswith(_MARK):
        return content_fingerprint(spec) == fingerprint
    return fingerprint != "" and _digest_of_rows(spec, rows=1) == fingerprint


def _digest_of_rows(spec: str | Path, rows: int) -> str:
    """A digest of `_NUMBERS` numbers of each of `rows` rows of each weight; "" if no weights can be read."""
    from safetensors import safe_open

    try:
        source = source_of(spec)
    except OSError:
        return ""
    folder = Path(source.place)
    if not folder.is_dir():
        config = model_file(source, CONFIG)
        if config is None:
            return ""
        folder = config.parent
    sampled: dict[str, list[float]] = {}
    for file in weight_files(folder):
        if not file.is_file():
            continue
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (it is no dictionary)
                if name.endswith(_LEFT_OUT):
                    continue
                stored = weights.get_slice(name)
                shape = stored.get_shape()
                if len(shape) > 1:
                    # Slices, so that only these rows of a matrix are read from the file.
                    beginnings = [stored[row : row + 1] for row in _spread(shape[0], rows)]
                else:
                    beginnings = [weights.get_tensor(name)]
                sampled[name] = []
                for beginning in beginnings:
                    # In bfloat16, whatever the type in the file.
                    sampled[name] += beginning.flatten()[:_NUMBERS].bfloat16().tolist()
    if not sampled:
        return ""
    return hashlib.blake2b(repr(sorted(sampled.items())).encode(), digest_size=8).hexdigest()


def _spread(length: int, count: int) -> list[int]:
    """Up to `count` different row numbers from 0 to `length` - 1, evenly spread; the first row alone for one."""
    last = max(length - 1, 0)
    return sorted({step * last // max(count - 1, 1) for step in range(count)})
