"""Adapter folders: the base model of an adapter, the checks before it is loaded, and loading.

A folder with only a PEFT adapter stands for the base model (`adapter_base`) plus the adapter. New adapters are made in
`models.lora`.

Tested in `tests/models/test_lora.py` and `tests/models/test_merging.py`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.core.files import read_json
from tripletune.models.completeness import loading_errors_explained
from tripletune.models.fingerprints import content_fingerprint, has_content
from tripletune.models.run_folders import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    TASK_FILES,
    check_finite,
    check_weights,
    stored_weights,
)
from tripletune.models.specs import check_specs, split_revision, with_revision

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

# The prefix of "(q_proj|v_proj)" in the adapter of a Graph-LLM, the only regular expression that is accepted.
LANGUAGE_MODEL_LAYERS = r"(?:.*\.)?language_model\..*\."
# Why adapters that are active after certain tokens (activated LoRA) are refused.
NO_ALORA = "only PEFT's own generate applies: this project would compute replies without the adapter"
# Types of PEFT whose wrapper takes part in the reply: it chooses or mixes adapters, or runs a network beside the model.
_WRAPPER_TYPES = ("POLY", "SHADOW", "XLORA")
# A layer's name, or names between brackets; nothing that a regular expression could repeat.
_LAYER_NAMES = re.compile(r"[\w.-]*|\([\w|-]+\)")
# Fields that PEFT matches against the names of all modules.
_MATCHED_FIELDS = (
    "target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern", "target_parameters",
)  # fmt: skip


def adapter_base(folder: str | Path) -> str | None:
    """The spec of the base model of a folder with a PEFT adapter; None if the folder has no adapter.

    What loading would report late is checked here: a Graph-LLM, a missing name, pickled weights, an unknown base model.
    """
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


def check_base(folder: str | Path, base: str) -> None:
    """Raise an error if an adapter is put on a model (spec `base`) other than its base model, which may be renamed.

    On another model of the same shape an adapter loads without complaint, and its replies are wrong. Runs store the
    base model's `content_fingerprint` beside the adapter. For other adapters, the names are compared first, then the
    contents.
    """
    stored: dict[str, Any] = {}
    for file_name in (*TASK_FILES, CONFIG, ADAPTER_CONFIG):
        file = Path(folder) / file_name
        if file.is_file():
            stored |= read_json(file)
    trained_name = str(stored.get("base_model_name_or_path") or stored.get("base_model"))
    trained_revision = stored.get("revision") or stored.get("base_revision")
    trained_weights = stored.get("base_weights")
    given = split_revision(base)
    if not trained_weights:
        if trained_name == given.place and trained_revision in (None, given.revision):
            return
        # The base model of the training may not be at hand; its weights stay unknown, and the error below is raised.
        with suppress(ValueError):
            trained_weights = content_fingerprint(with_revision(trained_name, trained_revision))
    if trained_weights and has_content(base, trained_weights):
        return
    trained_on = f"{trained_name} ({trained_revision})" if trained_revision else trained_name
    if trained_name == given.place:
        difference = "holds other weights now"
    else:
        difference = "is not known to be the same model"
    if stored.get("base_weights"):
        override = "remove base_weights"
    else:
        override = f"write its new name into {ADAPTER_CONFIG}"
    raise ValueError(
        f"adapter {folder} was trained on {trained_on}, but {base} {difference}: give the "
        f"model that the adapter was trained on (if you know that the model is the same, {override})"
    )


def load_adapter(model: PreTrainedModel, folder: str | Path, base: str) -> PeftModel:
    """Put the adapter of a folder on its base model, which was loaded from the spec `base`.

    All checks come before PEFT reads the folder: it would compile the folder's regular expressions, and report damaged
    weights without the file's name.
    """
    from peft import PeftModel

    check_base(folder, base)
    settings = read_json(Path(folder) / ADAPTER_CONFIG)
    _check_needs_no_wrapper(settings, folder)
    check_layer_names(settings, str(Path(folder) / ADAPTER_CONFIG))
    check_weights(Path(folder) / ADAPTER)
    check_finite(stored_weights(folder), f"model {folder}")
    _fit_vocabulary(model, Path(folder) / ADAPTER)
    with loading_errors_explained(folder, "adapter"), warnings.catch_warnings():
        # PEFT only warns if an adapter file lacks layers; these layers would have no effect.
        warnings.filterwarnings("error", message="Found missing adapter keys", category=UserWarning)
        # In inference the adapter has the model's type, because with float32 each layer would cast its input.
        return PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)


def _fit_vocabulary(model: PreTrainedModel, file: Path) -> None:
    """Resize the base model's embeddings to the rows that an adapter stores, if it stores all of them.

    Trainers that add tokens to a tokenizer resize the embeddings, and PEFT stores them whole beside the adapter. They
    replace the new rows when the adapter is loaded. An adapter with other rows of one layer alone does not fit, and
    PEFT reports the sizes.
    """
    from safetensors import safe_open

    embeddings = model.get_input_embeddings()
    layers = [embeddings]
    output = model.get_output_embeddings()
    if output is not None and output.weight is not embeddings.weight:
        layers.append(output)
    sizes = []
    with safe_open(file, framework="pt") as weights:
        for layer in layers:
            path = next(path for path, module in model.named_modules() if module is layer)
            # With LoRA or trained tokens on the layer, its own weight is that of a layer inside.
            of_layer = re.compile(rf"base_model\.model\.{re.escape(path)}\.((token_adapter\.)?base_layer\.)?weight")
            stored = [name for name in weights.keys() if of_layer.fullmatch(name)]  # noqa: SIM118 (it is no dictionary)
            sizes += [weights.get_slice(name).get_shape()[0] for name in stored]
    is_whole = len(sizes) == len(layers) and len(set(sizes)) == 1
    if is_whole and sizes[0] != embeddings.weight.shape[0]:
        model.resize_token_embeddings(sizes[0], mean_resizing=False)


def _check_needs_no_wrapper(settings: Mapping[str, Any], folder: str | Path) -> None:
    """Raise an error if an adapter is more than changed layers, because replies are computed without PEFT's wrapper.

    The wrapper puts learned vectors before the prompt, or looks for the tokens from which an adapter is active.

    Args:
        settings: The content of `adapter_config.json`.
        folder: The adapter's folder, for messages.
    """
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PromptLearningConfig

    kind: Any = settings.get("peft_type")
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING.get(kind)
    reason = ""
    if config_class is not None and issubclass(config_class, PromptLearningConfig):
        reason = "changes prompts"
    elif kind in _WRAPPER_TYPES:
        reason = "PEFT's wrapper computes"
    if reason:
        raise ValueError(f"adapter {folder} is of the type {kind}, which {reason}: only changed layers work here")
    if settings.get("alora_invocation_tokens"):
        raise ValueError(f"adapter {folder} has alora_invocation_tokens, which {NO_ALORA}")


def check_layer_names(settings: Mapping[str, Any], owner: str) -> None:
    """Raise an error if a field that PEFT matches against module names is a regular expression; see `_MATCHED_FIELDS`.

    The adapter may come from anybody, and some expressions take time that grows exponentially with the length of a
    name.

    Args:
        settings: The content of `adapter_config.json`, or fields of PEFT's `LoraConfig`.
        owner: The file or setting that holds them, for messages.
    """
    for key in _MATCHED_FIELDS:
        names = settings.get(key) or ()
        if isinstance(names, str):
            names = [names]
        for name in names:
            if not _LAYER_NAMES.fullmatch(str(name).removeprefix(LANGUAGE_MODEL_LAYERS)):
                raise ValueError(
                    f"{owner}: {key} holds the regular expression {str(name)[:80]!r}, but matching one can "
                    "take forever; write a list of layer names"
                )
