"""Where a model comes from: a hub id, a local folder, or `pypi:package` for models that ship inside a Python package.

`resolve` turns such a spec into what `from_pretrained` takes. Packages that carry a GGUF file are converted once to
a safetensors folder in the cache (`TRIPLETUNE_CACHE`, default `~/.cache/tripletune`). A folder may also hold a PEFT
adapter alone (`adapter_base` says of which model): wherever a model is named, it means base model and adapter in one.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
PYPI = "pypi:"
RESULT = "final"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def cache_dir() -> Path:
    """The folder for converted models and embedding tables."""
    return Path(os.environ.get("TRIPLETUNE_CACHE") or Path.home() / ".cache" / "tripletune")


def resolve(spec: str | Path) -> str:
    """Turn a model spec into a folder or hub id.

    Args:
        spec: A hub id (`meta-llama/Meta-Llama-3-8B`), a folder, or `pypi:package`. The folder of a training run
            means its result.

    Returns:
        A folder path, or the hub id unchanged.

    Raises:
        FileNotFoundError: the spec looks like a path and there is nothing, or the package is not installed or
            carries no model.
    """
    spec = str(spec)
    if spec.startswith(PYPI):
        return str(_package_model(spec.removeprefix(PYPI)))
    if Path(spec).is_dir():
        result = Path(spec) / RESULT
        return str(result) if _holds_model(result) and not _holds_model(Path(spec)) else spec
    if spec.startswith((".", "/", "~")) or spec.count("/") != 1:
        raise FileNotFoundError(
            f"model {spec!r}: there is no such folder, and it is not a hub id (owner/name) or pypi:package either"
        )
    return spec


def best_dtype() -> torch.dtype:
    """bfloat16 where the hardware multiplies it natively (GPU, CPU with AMX or AVX512-BF16), else float32."""
    import torch

    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    cpu = torch.backends.cpu.get_cpu_capability()
    native = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    return torch.bfloat16 if cpu.startswith("AVX512") and native() else torch.float32


def parse_dtype(name: str) -> torch.dtype:
    """Read "auto", "bfloat16", "float16" or "float32"."""
    import torch

    if name == "auto":
        return best_dtype()
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in known:
        raise ValueError(f"dtype {name!r} is not one of auto, {', '.join(known)}")
    return known[name]


def load_tokenizer(spec: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer and make sure it can pad.

    Args:
        spec: Hub id, folder or `pypi:package`.
        revision: Hub revision; ignored for folders and packages.

    Raises:
        FileNotFoundError: the folder holds no tokenizer, or the hub can't be reached or has no such model.
    """
    from transformers import AutoTokenizer

    source = resolve(spec)
    folder = Path(source)
    if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZERS):
        if (base := adapter_base(folder)) is not None:
            return load_tokenizer(*base)
        raise FileNotFoundError(
            f"model folder {source} has no tokenizer (tokenizer.json or tokenizer.model): "
            "copy the tokenizer files of the base model into it"
        )
    options = {"revision": revision} if revision and not folder.is_dir() else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except OSError as error:
        # transformers does not say in every case which model it was looking for.
        reason = " ".join(str(error).split())
        raise FileNotFoundError(f"model {spec}: its tokenizer can't be loaded: {reason}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(
    spec: str | Path, dtype: torch.dtype | None = None, revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model in eval mode and its tokenizer.

    Args:
        spec: Hub id, folder or `pypi:package`. A PEFT adapter is merged into its base model.
        dtype: Weight type; `None` means `best_dtype()`.
        revision: Hub revision; ignored for folders and packages.

    Raises:
        FileNotFoundError: no such model, or it has no tokenizer.
        ValueError: the weights can't be read, or an adapter does not fit its base model.
    """
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(spec, revision)
    return load_weights(AutoModelForCausalLM, spec, dtype, revision), tokenizer


def load_weights(
    kind: Any, spec: str | Path, dtype: torch.dtype | None = None, revision: str | None = None
) -> PreTrainedModel:
    """Load a model of one of transformers' Auto classes in eval mode; an adapter is merged into its base model.

    Args:
        kind: `AutoModelForCausalLM`, `AutoModelForSeq2SeqLM` or the like.
        spec: Hub id, folder or `pypi:package`.
        dtype: Weight type; `None` means `best_dtype()`.
        revision: Hub revision; ignored for folders and packages.

    Raises:
        FileNotFoundError: no such model, or an adapter without weights.
        ValueError: the weights can't be read, or an adapter does not fit its base model.
    """
    source = resolve(spec)
    base = adapter_base(source)
    if base is not None:
        return _merged(load_weights(kind, base[0], dtype, base[1]), source)
    options: dict[str, Any] = {"dtype": dtype or best_dtype()}
    if revision and not Path(source).is_dir():
        options["revision"] = revision
    try:
        model: PreTrainedModel = kind.from_pretrained(source, **options)
    except Exception as error:
        _tell_damage(error, spec, source)
        raise
    return model.eval()


def adapter_base(folder: str | Path) -> tuple[str, str | None] | None:
    """The base model of a folder with a PEFT adapter of a language model.

    Returns:
        Spec and hub revision of the base model; None where the folder holds no adapter.

    Raises:
        FileNotFoundError: the adapter has no weights.
        ValueError: its configuration can't be read or names no base model, or it is a Graph-LLM's.
    """
    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        return None
    settings = _json_object(path)
    kind = Path(folder) / "config.json"
    # Its adapter holds graph modules too, and its prompts are none of a chat.
    if kind.is_file() and _json_object(kind).get("model_type") == "graph_llm":
        raise ValueError(f"model {folder} is a Graph-LLM, and a plain language model is needed here")
    base = settings.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{path} names no base model: write the model it was trained on as base_model_name_or_path")
    if not (Path(folder) / ADAPTER_WEIGHTS).is_file():
        raise FileNotFoundError(f"adapter folder {folder} has no weights ({ADAPTER_WEIGHTS}): copy it again")
    return str(base), settings.get("revision")


def _merged(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    """The model with an adapter's weights added to its own."""
    from peft import PeftModel

    from tripletune.models.adapters import no_weights_missing

    try:
        with no_weights_missing():
            adapted = PeftModel.from_pretrained(model, adapter)
        merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    except (RuntimeError, KeyError, ValueError, UserWarning) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"the adapter in {adapter} does not fit its base model ({reason})") from error
    except Exception as error:
        _tell_damage(error, adapter, adapter)
        raise
    return merged.eval()


def _tell_damage(error: Exception, spec: str | Path, source: str) -> None:
    # safetensors raises its own class for a truncated file; name the folder either way.
    if type(error).__name__ == "SafetensorError":
        raise ValueError(f"model {spec}: the weights in {source} can't be read ({error}): copy them again") from error


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG, "modules.json"))


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); copy the file again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _package_files(package: str) -> tuple[importlib.metadata.Distribution, list[Path]]:
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"model {PYPI}{package}: the package is not installed; run: pip install --no-deps {package}"
        ) from None
    return distribution, [Path(str(file.locate())) for file in distribution.files or []]


def _package_model(package: str) -> Path:
    distribution, files = _package_files(package)
    for marker in ("modules.json", "config.json"):
        for file in files:
            if file.name == marker:
                return file.parent
    gguf = next((file for file in files if file.suffix == ".gguf"), None)
    if gguf is None:
        raise FileNotFoundError(f"model {PYPI}{package}: the package holds neither config.json nor a .gguf file")
    target = cache_dir() / "models" / f"{package}-{distribution.version}"
    if not (target / "config.json").exists():
        _convert_gguf(gguf, target)
    return target


def _convert_gguf(gguf: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("converting %s once to %s (about half a minute)", gguf.name, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        # Without dequantize=True the model stays flagged as quantised: neither trainable nor serialisable.
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(scratch)
        try:
            scratch.rename(target)
        except OSError:
            # Another process was faster; its result is the same.
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
