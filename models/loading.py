"""Load a language model from a hub id, a local folder, or `pypi:package` for models in Python packages.

A hub id may name a revision: `owner/name@revision`, where the revision is a branch, a tag, a commit or `refs/pr/N`.
`source_of` turns a spec into the arguments of `from_pretrained`. A GGUF file in a package is converted once to a
safetensors folder in the cache (`TRIPLETUNE_CACHE`, default `~/.cache/tripletune`). A folder with only a PEFT adapter
stands for the base model (`adapter_base`) plus the adapter.

Nothing in a model folder is executed: no Python code, no pickle, no regular expression of an adapter.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tripletune.core import libraries
from tripletune.core.files import (
    file_digest,
    files_fingerprint,
    lock_folder,
    new_folder,
    read_json,
    write_json,
)
from tripletune.core.hub import cached_commit, hub_file
from tripletune.core.options import nearest
from tripletune.models.control_tokens import read_text_alone
from tripletune.models.run_folders import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    PROCESSOR,
    PROMPT_FILE,
    TASK_FILES,
    TOKENIZER_FILES,
    TOKENIZERS,
    check_finite,
    check_weights,
    is_adapter,
    is_run,
    stored_weights,
    trained_folder,
    weight_files,
)

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
PYPI = "pypi:"
ALL_LINEAR = "all-linear"
DTYPES = ("auto", "bfloat16", "float16", "float32")
DTYPE_HELP = "type of the weights: float32, bfloat16, float16 or auto (default: bfloat16 on a GPU, else float32)"
# owner/name, optionally with a revision of the hub.
_HUB_SPEC = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+(?:/[\w.-]+)*))?")
# Files that only an adapter or an export of TripleTune has, and what is fetched of it: no pickles and no code.
_TRAINED = (ADAPTER_CONFIG, "provenance.json")
_FETCHED = ("*.safetensors", "*.json", "*.jinja", "*.md", "*.txt", "*.model")
_MODEL_FILES = (CONFIG, ADAPTER_CONFIG, PROCESSOR, PROMPT_FILE, "generation_config.json", *TOKENIZER_FILES)
SAY_WHAT_IS_MISSING: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
# The prefix of "(q_proj|v_proj)" in the adapter of a Graph-LLM, the only regular expression that is accepted.
LANGUAGE_MODEL_LAYERS = r"(?:.*\.)?language_model\..*\."
_NAMES = re.compile(r"[\w.-]*|\([\w|-]+\)")
# Weights that a folder may lack: BERT's pooler, if an encoder pools its token vectors. (Of tied weights, such as output
# layer and embeddings, transformers needs only one.)
_MAY_BE_NEW = re.compile(r"(^|\.)pooler\.")
# Fields that PEFT matches against the names of all modules.
_MATCHED = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern", "target_parameters")


def cache_dir() -> Path:
    """The folder for converted models."""
    return Path(os.environ.get("TRIPLETUNE_CACHE") or Path.home() / ".cache" / "tripletune")


class ModelSource(NamedTuple):
    """Where the files of a model are.

    Attributes:
        place: A folder, or a hub id (owner/name).
        revision: Branch, tag, commit or refs/pr/N of the hub; None: the main branch, or a folder.
    """

    place: str
    revision: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The revision as an argument of `from_pretrained`."""
        return {"revision": self.revision} if self.revision else {}


def resolve(spec: str | Path) -> str:
    """Turn a model spec into a folder, or into a hub id with its revision (`owner/name@revision`).

    A run becomes its result folder, `pypi:package` the model folder of the package. A hub id of a model that TripleTune
    trained, or of an adapter, becomes the folder of its snapshot.
    """
    spec = str(spec)
    if spec.startswith(PYPI):
        return str(_package_model(spec.removeprefix(PYPI)))
    if Path(spec).is_dir():
        return str(trained_folder(spec)) if is_run(spec) else spec
    hub = None if spec.startswith((".", "/", "~")) else _HUB_SPEC.fullmatch(spec)
    if hub is None:
        raise FileNotFoundError(
            f"model {spec!r}: there is no such folder, and it is neither a hub id (owner/name or owner/name@revision) "
            "nor pypi:package"
        )
    if Path(hub["name"]).is_dir():
        raise ValueError(f"model {spec!r}: {hub['name']} is a folder, and only hub ids have revisions: leave out @…")
    return _trained_on_hub(spec) or spec


def source_of(spec: str | Path) -> ModelSource:
    """The folder, or the hub id and its revision, that a model spec names; see `resolve`."""
    place = resolve(spec)
    if Path(place).is_dir():
        return ModelSource(place)
    name, _, revision = place.partition("@")
    return ModelSource(name, revision or None)


def with_revision(name: str, revision: str | None) -> str:
    """The spec of a model whose name and hub revision a file records apart; folders and packages have no revision."""
    on_hub = "@" not in name and not name.startswith(PYPI) and not Path(name).is_dir()
    return f"{name}@{revision}" if revision and on_hub else name


def split_revision(spec: str) -> ModelSource:
    """The name of a model and its hub revision, for files that record them apart; the opposite of `with_revision`."""
    hub = None if spec.startswith(PYPI) or Path(spec).is_dir() else _HUB_SPEC.fullmatch(spec)
    return ModelSource(spec) if hub is None else ModelSource(hub["name"], hub["revision"])


def pinned(spec: str) -> ModelSource:
    """The name of a loaded model, and the commit of the hub that was loaded; what a trained model keeps of its base."""
    source = split_revision(spec)
    if Path(source.place).is_dir() or not _HUB_SPEC.fullmatch(source.place):
        return source
    return ModelSource(source.place, cached_commit(*source, CONFIG) or source.revision)


def model_file(source: ModelSource, name: str) -> Path | None:
    """A file of a model; None if the model has no such file, or the hub is not reached and the cache lacks the file."""
    if not Path(source.place).is_dir():
        return hub_file(source.place, source.revision, name)
    file = Path(source.place, name)
    return file if file.is_file() else None


@cache
def _trained_on_hub(spec: str) -> str | None:
    """The folder of the snapshot, if a hub id holds an adapter or an export of TripleTune; else None.

    Such a model is more than its weights (base model, prompt, settings), so its whole folder is read.
    """
    from huggingface_hub import snapshot_download

    name, revision = split_revision(spec)
    trained = any(cached_commit(name, revision, file) for file in _TRAINED)
    # Of a model whose configuration is in the cache, the hub was asked before.
    if not trained and not cached_commit(name, revision, CONFIG):
        trained = any(hub_file(name, revision, file) for file in _TRAINED)
    if not trained:
        return None
    return str(snapshot_download(name, revision=revision, allow_patterns=list(_FETCHED)))


def best_dtype() -> torch.dtype:
    """bfloat16 if the hardware multiplies it natively (GPU, CPU with AMX or AVX512-BF16), else float32."""
    import torch

    if torch.cuda.is_available():
        # A GPU without it (T4, V100) emulates it, slower than float32.
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512") or not torch.backends.mkldnn.is_available():
        return torch.float32
    multiplies_bfloat16 = libraries.take("torch:ops.mkldnn._is_mkldnn_bf16_supported")
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def parse_dtype(name: str) -> torch.dtype:
    """Read "auto", "bfloat16", "float16" or "float32"."""
    import torch

    if name == "auto":
        return best_dtype()
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return getattr(torch, name)


def usual_dtype(name: str | None = None) -> str:
    """The resolved name of a weight type; by default bfloat16 on a GPU, float32 on a CPU."""
    import torch

    name = name or ("auto" if torch.cuda.is_available() else "float32")
    return str(parse_dtype(name)).removeprefix("torch.")


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


def load_tokenizer(spec: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer and make sure that it can pad."""
    from transformers import AutoTokenizer

    source = source_of(spec)
    folder = Path(source.place)
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZERS):
        if (base := adapter_base(folder)) is not None:
            return load_tokenizer(base)
        raise FileNotFoundError(
            f"model folder {folder} has no tokenizer (tokenizer.json or tokenizer.model): "
            "copy the tokenizer files of the base model into it"
        )
    with telling(spec, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source.place, **_trust_nothing(source))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def is_encoder_decoder(spec: str | Path) -> bool:
    """Whether a model is an encoder-decoder (T5, BART), according to its configuration."""
    from transformers import AutoConfig

    source = source_of(spec)
    base = adapter_base(source.place)
    if base is not None:
        return is_encoder_decoder(base)
    with telling(spec, "configuration"):
        return bool(AutoConfig.from_pretrained(source.place, **_trust_nothing(source)).is_encoder_decoder)


def load_causal_lm(
    spec: str | Path, dtype: torch.dtype | None = None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a decoder in eval mode and its tokenizer; see `load_weights`."""
    tokenizer = load_tokenizer(spec)
    if is_encoder_decoder(spec):
        raise ValueError(f"model {spec} is an encoder-decoder, but a decoder is needed here")
    return load_weights(spec, dtype, **options), tokenizer


def load_weights(
    spec: str | Path,
    dtype: torch.dtype | None = None,
    merge: bool = True,
    nf4: bool = False,
) -> PreTrainedModel:
    """Load a language model, decoder or encoder-decoder, in eval mode.

    Args:
        dtype: None means `best_dtype()`.
        merge: Merge an adapter into its base model in any weight type, so that another adapter can be trained on top;
            False: `for_inference` decides whether to merge.
        nf4: Keep linear layers in 4 bits, to train an adapter (QLoRA; Dettmers et al., 2023).
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BitsAndBytesConfig
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()
    source = source_of(spec)
    base = adapter_base(source.place)
    if base is not None:
        if nf4:
            raise ValueError(
                f"model {spec} is an adapter: merge it first (tripletune checkpoints merge) to train on it in nf4"
            )
        adapted = load_adapter(load_weights(base, dtype), source.place, base)
        # PEFT has frozen the weights, but a run may train them all.
        return (adapted.merge_and_unload(safe_merge=True).requires_grad_() if merge else for_inference(adapted)).eval()
    kind = AutoModelForSeq2SeqLM if is_encoder_decoder(spec) else AutoModelForCausalLM
    dtype, options = dtype or best_dtype(), _trust_nothing(source)
    if nf4:
        import bitsandbytes  # noqa: F401 - its own error is clearer than that of transformers

        # The paper's settings: quantiles of the normal distribution, with quantised scales.
        double = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **double)
    with telling(spec, "weights"):
        options |= SAY_WHAT_IS_MISSING | {"dtype": dtype, "use_safetensors": True}
        loaded = kind.from_pretrained(source.place, **options)
    model: PreTrainedModel = complete(loaded, spec)
    if nf4:
        # Only the adapter is saved; its base model is later loaded in the type of its folder.
        del model.config.quantization_config
    return model.eval()


def complete(loaded: tuple[Any, Any], spec: str | Path, may_be_new: re.Pattern[str] | None = None) -> Any:
    """Check that `from_pretrained(…, **SAY_WHAT_IS_MISSING)` found all weights, all finite, and return the model.

    Transformers fills missing weights at random, and only warns.
    """
    model, info = loaded
    wrong = {name: "" for name in info["missing_keys"] if may_be_new is None or not may_be_new.search(name)}
    wrong |= {name: f" ({list(there)} instead of {list(here)})" for name, there, here in info["mismatched_keys"]}
    if wrong:
        shown = ", ".join(f"{name}{wrong[name]}" for name in sorted(wrong)[:3])
        others = sorted(info["unexpected_keys"])
        also = f"; {len(others)} weights are not used, such as {', '.join(others[:3])}" if others else ""
        raise ValueError(
            f"model {spec}: {len(wrong)} weights are missing or have another size: {shown}{also}. Copy the folder "
            "again, or use the weights that belong to its config.json"
        )
    check_finite(model.named_parameters(), f"model {spec}")
    return model


def check_specs(file: Path, *specs: str) -> None:
    """Raise an error if a file names a missing model."""
    try:
        for spec in specs:
            resolve(spec)
    except (ValueError, OSError) as error:
        raise ValueError(f"{file} names a model that can't be loaded: {str(error)[:1000]}") from None


_LEFT_OUT = ("inv_freq", "position_ids", "lm_head.weight")


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


def check_base(folder: str | Path, base: str) -> None:
    """Raise an error if an adapter is put on a model (spec `base`) other than its base model, which may be renamed.

    Runs store the base model's `content_fingerprint` beside the adapter. For other adapters, the names are compared
    first, then the contents.
    """
    own: dict[str, Any] = {}
    for file in (Path(folder) / name for name in (*TASK_FILES, CONFIG, ADAPTER_CONFIG)):
        own |= read_json(file) if file.is_file() else {}
    name = str(own.get("base_model_name_or_path") or own.get("base_model"))
    trained, noted = own.get("revision") or own.get("base_revision"), own.get("base_weights")
    given = split_revision(base)
    if not noted:
        if name == given.place and trained in (None, given.revision):
            return
        with suppress(ValueError):
            noted = content_fingerprint(with_revision(name, trained))
    if not noted or noted != content_fingerprint(base):
        what = "holds other weights now" if name == given.place else "is not known to be the same model"
        way = "remove base_weights" if own.get("base_weights") else f"write its new name into {ADAPTER_CONFIG}"
        cure = f" (if you know that the model is the same, {way})"
        raise ValueError(
            f"adapter {folder} was trained on {name}{f' ({trained})' if trained else ''}, but {base} {what}: give the "
            f"model that the adapter was trained on{cure}"
        )


def load_adapter(model: Any, folder: str | Path, base: str) -> PeftModel:
    """Put the adapter of a folder on its base model, which was loaded from the spec `base`."""
    from peft import PeftModel

    check_base(folder, base)
    _check_names(read_json(Path(folder) / ADAPTER_CONFIG), str(Path(folder) / ADAPTER_CONFIG))
    check_weights(Path(folder) / ADAPTER)
    check_finite(stored_weights(folder), f"model {folder}")
    with telling(folder, "adapter"), warnings.catch_warnings():
        # PEFT only warns if an adapter file lacks layers; these layers would have no effect.
        warnings.filterwarnings("error", message="Found missing adapter keys", category=UserWarning)
        # In inference the adapter has the model's type, because with float32 each layer would cast its input.
        return PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)


def _check_names(settings: Mapping[str, Any], owner: str) -> None:
    for key in _MATCHED:
        value = settings.get(key) or ()
        for name in [value] if isinstance(value, str) else value:
            if not _NAMES.fullmatch(str(name).removeprefix(LANGUAGE_MODEL_LAYERS)):
                raise ValueError(
                    f"{owner}: {key} holds the regular expression {str(name)[:80]!r}, but matching one can "
                    "take forever; write a list of layer names"
                )


def for_inference(adapted: PeftModel) -> Any:
    """Return a model with its adapter in eval mode, merged if its weights are float32.

    In 16 bits, merging would lose a third of an update with standard deviation 1e-4 by rounding.
    """
    import torch

    if adapted.dtype is torch.float32:
        return adapted.merge_and_unload(safe_merge=True).eval()
    # The adapter's layers are in the model itself; PEFT's wrapper is not needed.
    return adapted.get_base_model().eval()


def chosen_layers(model: Any, targets: Sequence[str], name: str) -> set[str]:
    """The last parts of the names of the linear layers for LoRA; "all-linear": all except the output layer."""
    import torch
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    known = {
        path.rsplit(".", 1)[-1]
        for path, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not output
    }
    chosen = known if tuple(targets) == (ALL_LINEAR,) else set(targets)
    if not chosen <= known:
        raise ValueError(
            f"LoRA targets {sorted(chosen - known)} do not exist in {name}; the model's linear layers are "
            f"{', '.join(sorted(known))}"
        )
    return chosen


def add_lora(
    model: Any,
    *,
    rank: int,
    alpha: int,
    dropout: float,
    targets: Sequence[str],
    base: str,
    options: Mapping[str, Any] | None = None,
) -> PeftModel:
    """Freeze a language model and put LoRA on `chosen_layers`; the adapter names the spec `base`."""
    adapted = put_adapter(
        model,
        options or {},
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=sorted(chosen_layers(model, targets, base)),
    )
    # PEFT names the folder from which the model was loaded, which for a package is a cache.
    for settings in adapted.peft_config.values():
        settings.base_model_name_or_path, settings.revision = pinned(base)
    return adapted


def put_adapter(model: Any, options: Mapping[str, Any], **settings: Any) -> PeftModel:
    """Put LoRA with these settings on a model; `options` are more fields of PEFT's `LoraConfig`, set by the user."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    _check_names(options, "model.lora_options")
    layer_numbers(model, options)
    names = [name for name, _ in model.named_modules()]
    for wanted in (settings | dict(options)).get("modules_to_save") or ():
        if not any(f".{name}".endswith(f".{wanted}") for name in names):
            last = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise ValueError(
                f"model.lora_options: modules_to_save: no module has the name {wanted}{nearest(wanted, last)}"
            )
    try:
        adapted: PeftModel = get_peft_model(model, LoraConfig(**settings | dict(options)))
    except Exception as error:
        if not options:
            raise
        raise ValueError(f"model.lora_options {dict(options)}: {' '.join(str(error).split())}") from error
    if changes_base(options):
        start = get_peft_model_state_dict(adapted).items()
        adapted.start = {name: weight.cpu().clone() for name, weight in start if "lora_" in name}  # type: ignore[assignment]
    return adapted


def layer_numbers(model: Any, options: Mapping[str, Any]) -> dict[str, int]:
    """The modules in the layers of `layers_to_transform`, with the layer number of each module, counted as in PEFT."""
    wanted = options.get("layers_to_transform")
    wanted = {wanted} if isinstance(wanted, int) else set(wanted or ())
    found = {name: re.match(r".*?\.[^.]*\.(\d+)\.", name) for name, _ in model.named_modules()}
    numbers = {name: int(match[1]) for name, match in found.items() if match}
    if not wanted <= set(numbers.values()):
        raise ValueError(
            f"model.lora_options: layers_to_transform {sorted(wanted)}: the layers are 0 to {max(numbers.values())}"
        )
    return {name: number for name, number in numbers.items() if number in wanted}


def changes_base(options: Mapping[str, Any]) -> bool:
    """Whether an adapter with these `LoraConfig` fields starts from the base's weights, as in PiSSA."""
    return str(options.get("init_lora_weights")).startswith(("pissa", "olora"))


def restore_base(folder: Path, start: Mapping[str, torch.Tensor]) -> None:
    """Rewrite a saved adapter that started from the base's weights, so that it fits the unchanged base.

    Training learned W - s B0 A0 + s B A. The rank is doubled; the added ranks subtract s B0 A0.
    """
    import torch
    from safetensors.torch import load_file, save_file

    settings, weights = read_json(folder / ADAPTER_CONFIG), load_file(folder / ADAPTER)
    for name, begun in start.items():
        if "lora_A" in name:
            weights[name] = torch.cat([weights[name], begun.to(weights[name])])
        elif "lora_B" in name:
            weights[name] = torch.cat([weights[name], -begun.to(weights[name])], 1)
    more = 2**0.5 if settings.get("use_rslora") else 2
    settings |= {"init_lora_weights": True, "r": 2 * settings["r"], "lora_alpha": more * settings["lora_alpha"]}
    for key, times in (("rank_pattern", 2), ("alpha_pattern", more)):
        settings[key] = {name: times * value for name, value in (settings.get(key) or {}).items()}
    save_file(weights, folder / ADAPTER, metadata={"format": "pt"})
    write_json(folder / ADAPTER_CONFIG, settings)


def take_over(model: PeftModel, folder: str | Path, base: str) -> None:
    """Copy a trained adapter's weights into a new adapter on the base model (a spec), to continue training."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    file = Path(resolve(folder)) / ADAPTER
    if not file.is_file():
        raise FileNotFoundError(f"model.adapter {folder}: there is no {ADAPTER}; give a run, a checkpoint or an export")
    check_weights(file)
    check_base(file.parent, base)
    learned = read_json(config).get("encoder_weights") if (config := file.with_name(CONFIG)).is_file() else ""
    if learned and getattr(model.config, "encoder_weights", "") not in ("", learned):
        raise ValueError(f"model.adapter {folder} was trained with another text encoder: set model.encoder to that one")
    own, found = get_peft_model_state_dict(model), load_file(file)
    check_finite(found.items(), f"model.adapter {folder}")
    here, there = ({name: tuple(weight.shape) for name, weight in weights.items()} for weights in (own, found))
    for name, _ in sorted(here.items() ^ there.items()):
        raise ValueError(
            f"model.adapter {folder} does not have the layers and sizes of the settings: {name} is "
            f"{there.get(name, 'missing')} in the adapter, {here.get(name, 'missing')} in the settings"
        )
    trained = read_json(file.with_name(ADAPTER_CONFIG))
    for name in ("lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern"):
        now, then = getattr(model.peft_config["default"], name), trained.get(name)
        if (now or None) != (then or None):
            where = f"model.{name}" if name == "lora_alpha" else f"model.lora_options: {name}"
            raise ValueError(f"{where} {now}: model.adapter {folder} was trained with {then}, so set {then}")
    set_peft_model_state_dict(model, found)


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
    _trust_nothing(source)
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
        first_folder = ""
        if modules is not None:
            first_folder = json.loads(modules.read_text(encoding="utf-8"))[0].get("path") or ""
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

    folders = {encoder[0]: folder}
    if routes := _routes(encoder):
        settings = model_file(source, f"{folder}/router_config.json".lstrip("/"))
        names = read_json(settings)["structure"] if settings else {}
        folders = {}
        for route, modules in routes.items():
            for module, name in zip(modules, names.get(route, ())):
                folders[module] = f"{folder}/{name}".lstrip("/")
    for module, subfolder in folders.items():
        core = next((inner for inner in module.modules() if isinstance(inner, PreTrainedModel)), None)
        if core is not None:
            yield core, subfolder


@contextmanager
def telling(spec: str | Path, part: str) -> Iterator[None]:
    """Turn errors of loading a part of a model ("weights", "tokenizer", "adapter", …) into one line."""
    try:
        yield
    except Exception as error:
        reason, name = " ".join(str(error).split()), type(error).__name__
        # torch and PEFT report wrong names and shapes with these errors; the last line names them.
        misfit = (RuntimeError, KeyError, UserWarning, *([ValueError] if part == "adapter" else []))
        if name == "SafetensorError":
            text = f"the weights cannot be read ({reason}): the file is cut off or damaged; copy the file again"
        elif "trust_remote_code" in reason:
            text = (
                "the model comes with Python code (auto_map in its configuration, or modules.json), which is never run "
                "here; use a model that transformers supports"
            )
            text += " (for a retrieval encoder, --set trust_remote_code=yes runs the code)" * (part == "encoder")
        elif part in ("weights", "encoder") and "model.safetensors" in reason:
            text = (
                "the model has no safetensors weights, and pickles (.bin, .pt) are not loaded, since they can run "
                f"code; convert them with `tripletune checkpoints convert {spec} --output FOLDER`, or name a revision "
                "that has model.safetensors (owner/name@revision)"
            )
        elif isinstance(error, OSError) and part != "Graph-LLM":
            raise FileNotFoundError(f"model {spec}: the {part} can't be loaded: {reason}") from None
        elif isinstance(error, (TypeError, AttributeError)):
            text = (
                f"the {part} can't be built from the JSON files ({reason}): a value is missing or has the wrong type; "
                f"copy the folder again{libraries.untested('transformers')}"
            )
        elif isinstance(error, misfit) and name not in ("OutOfMemoryError", "AcceleratorError"):
            last = str(error).strip().splitlines()[-1].strip()
            text = (
                f"the files of the {part} do not match ({last}): do they belong to another base model, or to another "
                f"version of this project?{libraries.untested('transformers')}"
            )
        else:
            raise
        raise ValueError(f"model {spec}: {text}") from error


def _trust_nothing(source: ModelSource) -> dict[str, Any]:
    for index in Path(source.place).rglob(INDEX):
        weight_files(index.parent)
    # Without this setting, transformers asks on the terminal whether to run the model's code.
    return {"trust_remote_code": False, **source.options}


def adapter_base(folder: str | Path) -> str | None:
    """The spec of the base model of a folder with a PEFT adapter; None if the folder has no adapter."""
    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        return None
    settings = read_json(path)
    kind = Path(folder) / CONFIG
    # A Graph-LLM's adapter also holds graph modules, and its prompts are not chats.
    if kind.is_file() and read_json(kind).get("model_type") == "graph_llm":
        raise ValueError(f"model {folder} is a Graph-LLM, but a plain language model is needed here")
    base = settings.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{path} names no base model: set base_model_name_or_path to the model that was trained")
    if not (Path(folder) / ADAPTER).is_file():
        raise FileNotFoundError(
            f"adapter folder {folder} has no weights ({ADAPTER}): copy the folder again, or if they are pickled, in "
            "adapter_model.bin, convert them with `tripletune checkpoints convert`"
        )
    base = with_revision(str(base), settings.get("revision"))
    check_specs(path, base)
    return base


def _package_model(package: str) -> Path:
    if "@" in package:
        raise ValueError(
            f"model {PYPI}{package}: only hub ids have revisions; leave out @…, and let pip choose a version"
        )
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"model {PYPI}{package}: the package is not installed; run: pip install --no-deps {package}"
        ) from None
    files = [Path(str(file.locate())) for file in distribution.files or []]
    for marker in ("modules.json", CONFIG):
        for file in files:
            if file.name == marker:
                return file.parent
    gguf = next((file for file in files if file.suffix == ".gguf"), None)
    if gguf is None:
        raise FileNotFoundError(f"model {PYPI}{package}: the package holds neither config.json nor a .gguf file")
    target = cache_dir() / "models" / f"{package}-{distribution.version}"
    if not (target / CONFIG).exists():
        with lock_folder(target.parent, "another process is converting a model", wait=True):
            if not (target / CONFIG).exists():
                _convert_gguf(gguf, target)
    return target


def _convert_gguf(gguf: Path, target: Path) -> None:
    # transformers' own error names neither the file nor the extra.
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"{gguf} needs the package gguf, which reads it: run pip install 'tripletune[gguf]'")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("converting %s to %s once (about half a minute)", gguf.name, target)
    with new_folder(target, ["*"], overwrite=True) as scratch:
        source: dict[str, Any] = {"gguf_file": gguf.name, "trust_remote_code": False}
        # Without dequantize=True the model stays flagged as quantised: neither trainable nor serialisable.
        plain = GgufConfig(dequantize=True)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(scratch)
        source |= {"quantization_config": plain, **SAY_WHAT_IS_MISSING}
        complete(AutoModelForCausalLM.from_pretrained(gguf.parent, **source), gguf).save_pretrained(scratch)
