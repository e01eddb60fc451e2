"""LoRA adapters: their base model, the layers they change, loading and continued training.

A folder with only a PEFT adapter stands for the base model (`adapter_base`) plus the adapter.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tripletune.core.files import read_json, write_json
from tripletune.core.options import nearest
from tripletune.models.completeness import explained
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
from tripletune.models.specs import check_specs, pinned, resolve, split_revision, with_revision

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
# What is trained: an adapter (of a Graph-LLM, with its graph modules), only graph modules, or all weights.
Tune = Literal["lora", "graph_token", "all"]
# The prefix of "(q_proj|v_proj)" in the adapter of a Graph-LLM, the only regular expression that is accepted.
LANGUAGE_MODEL_LAYERS = r"(?:.*\.)?language_model\..*\."
# Why adapters that are active after certain tokens (activated LoRA) are refused.
NO_ALORA = "only PEFT's own generate applies: this project would compute replies without the adapter"
# Types of PEFT whose wrapper takes part in the reply: it chooses or mixes adapters, or runs a network beside the model.
_OF_WRAPPER = ("POLY", "SHADOW", "XLORA")
_NAMES = re.compile(r"[\w.-]*|\([\w|-]+\)")
# Fields that PEFT matches against the names of all modules.
_MATCHED = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern", "target_parameters")


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
    _check_usable(settings, folder)
    _check_names(settings, str(Path(folder) / ADAPTER_CONFIG))
    check_weights(Path(folder) / ADAPTER)
    check_finite(stored_weights(folder), f"model {folder}")
    _fit_vocabulary(model, Path(folder) / ADAPTER)
    with explained(folder, "adapter"), warnings.catch_warnings():
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


def _check_usable(settings: Mapping[str, Any], folder: str | Path) -> None:
    """Raise an error if an adapter is more than changed layers, because replies are computed without PEFT's wrapper.

    The wrapper puts learned vectors before the prompt, or looks for the tokens from which an adapter is active.
    """
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PromptLearningConfig

    kind: Any = settings.get("peft_type")
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING.get(kind)
    reason = ""
    if config_class is not None and issubclass(config_class, PromptLearningConfig):
        reason = "changes prompts"
    elif kind in _OF_WRAPPER:
        reason = "PEFT's wrapper computes"
    if reason:
        raise ValueError(f"adapter {folder} is of the type {kind}, which {reason}: only changed layers work here")
    if settings.get("alora_invocation_tokens"):
        raise ValueError(f"adapter {folder} has alora_invocation_tokens, which {NO_ALORA}")


def _check_names(settings: Mapping[str, Any], owner: str) -> None:
    """Raise an error if a field that PEFT matches against module names is a regular expression; see `_MATCHED`.

    The adapter may come from anybody, and some expressions take time that grows exponentially with the length of a
    name.
    """
    for key in _MATCHED:
        names = settings.get(key) or ()
        if isinstance(names, str):
            names = [names]
        for name in names:
            if not _NAMES.fullmatch(str(name).removeprefix(LANGUAGE_MODEL_LAYERS)):
                raise ValueError(
                    f"{owner}: {key} holds the regular expression {str(name)[:80]!r}, but matching one can "
                    "take forever; write a list of layer names"
                )


def chosen_layers(model: PreTrainedModel, targets: Sequence[str], name: str) -> set[str]:
    """The names of the linear layers for LoRA; "all-linear": all except the output layer.

    They are the last parts of the names. Of a multimodal model they are whole names of layers that read text, because a
    vision tower has layers of the same names, which would never learn.

    PEFT reports a name that the model lacks only if none of the names fits, so every name is checked here.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    text_model = _text_model(model)
    # Whole names by their last parts.
    linear_layers: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        is_linear = isinstance(module, (torch.nn.Linear, Conv1D))
        if is_linear and module is not output and path.startswith(text_model):
            linear_layers.setdefault(path.rsplit(".", 1)[-1], []).append(path)
    chosen = set(linear_layers) if tuple(targets) == (ALL_LINEAR,) else set(targets)
    missing = chosen - set(linear_layers)
    if missing:
        raise ValueError(
            f"LoRA targets {sorted(missing)} do not exist in {name}; the model's linear layers are "
            f"{', '.join(sorted(linear_layers))}; {ALL_LINEAR} takes them all"
        )
    if not text_model:
        return chosen
    whole_names: set[str] = set()
    for last_part in chosen:
        whole_names.update(linear_layers[last_part])
    return whole_names


def _text_model(model: PreTrainedModel) -> str:
    """The name, with a dot at its end, of the text model in a multimodal model; "" for any other model.

    A multimodal configuration holds that of its text model apart. The name differs between families.
    """
    if model.config.get_text_config() is model.config:
        return ""
    decoder = model.get_decoder()
    for path, module in model.named_modules():
        if module is decoder and path:
            return f"{path}."
    return ""


def add_lora(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: int,
    dropout: float,
    targets: Sequence[str],
    base: str,
    options: Mapping[str, Any] | None = None,
) -> PeftModel:
    """Freeze a language model and put LoRA on `chosen_layers`; the adapter names the spec `base`; see `put_adapter`."""
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


def put_adapter(model: PreTrainedModel, options: Mapping[str, Any], **settings: Any) -> PeftModel:
    """Put LoRA with these settings on a model; `options` are more fields of PEFT's `LoraConfig`, set by the user.

    What PEFT would ignore or accept and fail at later (layer numbers, names of modules, biases) is checked around it.
    """
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    _check_names(options, "model.lora_options")
    # Called for its check of the layer numbers.
    layer_numbers(model, options)
    fields = settings | dict(options)
    _check_saved_modules(model, fields.get("modules_to_save") or ())
    try:
        adapted: PeftModel = get_peft_model(model, LoraConfig(**fields))
    except Exception as error:
        # Without options of the user, the fault is ours, and its traceback is needed.
        if not options:
            raise
        raise ValueError(f"model.lora_options {dict(options)}: {' '.join(str(error).split())}") from error
    if options.get("lora_bias"):
        _check_biases(adapted)
    if changes_base(options):
        # `rewrite_for_unchanged_base` subtracts these weights when the engine saves the result. A resumed run makes
        # them again with its seed (`tests/train/test_variants.py:test_pissa_resumes_exactly`).
        start = {}
        for name, weight in get_peft_model_state_dict(adapted).items():
            if "lora_" in name:
                start[name] = weight.cpu().clone()
        adapted.start = start  # type: ignore[assignment]
    return adapted


def _check_saved_modules(model: torch.nn.Module, wanted: Sequence[str]) -> None:
    """Raise an error if `modules_to_save` names a module that the model lacks, since PEFT ignores such a name."""
    names = [name for name, _ in model.named_modules()]
    for module in wanted:
        if not any(f".{name}".endswith(f".{module}") for name in names):
            last_parts = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise ValueError(
                f"model.lora_options: modules_to_save: no module has the name {module}{nearest(module, last_parts)}"
            )


def _check_biases(adapted: PeftModel) -> None:
    """Raise an error if `lora_bias` adds a bias to a layer without one, because the adapter could never be merged."""
    from peft.tuners.lora import LoraLayer

    for name, module in adapted.named_modules():
        if isinstance(module, LoraLayer) and getattr(module.get_base_layer(), "bias", None) is None:
            raise ValueError(
                f"model.lora_options: lora_bias: {name.rpartition('.')[2]} has no bias, so the trained adapter could "
                "not be merged: leave lora_bias out, or name only layers with a bias in model.lora_targets"
            )


def layer_numbers(model: torch.nn.Module, options: Mapping[str, Any]) -> dict[str, int]:
    """The modules in the layers of `layers_to_transform`, with the layer number of each module, counted as in PEFT.

    Raises:
        ValueError: A wanted layer does not exist; PEFT would ignore its number.
    """
    wanted = options.get("layers_to_transform")
    wanted = {wanted} if isinstance(wanted, int) else set(wanted or ())
    numbers: dict[str, int] = {}
    for name, _ in model.named_modules():
        # For example 3 in "model.layers.3.self_attn".
        match = re.match(r".*?\.[^.]*\.(\d+)\.", name)
        if match:
            numbers[name] = int(match[1])
    if not wanted <= set(numbers.values()):
        raise ValueError(
            f"model.lora_options: layers_to_transform {sorted(wanted)}: the layers are 0 to {max(numbers.values())}"
        )
    return {name: number for name, number in numbers.items() if number in wanted}


def changes_base(options: Mapping[str, Any]) -> bool:
    """Whether an adapter with these `LoraConfig` fields starts from the base's weights, as in PiSSA."""
    return str(options.get("init_lora_weights")).startswith(("pissa", "olora"))


def rewrite_for_unchanged_base(folder: Path, start: Mapping[str, torch.Tensor]) -> None:
    """Rewrite a saved adapter that started from the base's weights, so that it fits the unchanged base.

    Training learned W - s B0 A0 + s B A. The rank is doubled; the added ranks subtract s B0 A0. Otherwise every program
    that loads the adapter would need the changed base weights, which are as large as the model and are not saved.

    Args:
        start: The adapter's weights before training, A0 (rank, in) and B0 (out, rank), by their names in the file.
    """
    import torch
    from safetensors.torch import load_file, save_file

    settings = read_json(folder / ADAPTER_CONFIG)
    weights = load_file(folder / ADAPTER)
    for name, weight_before in start.items():
        if "lora_A" in name:
            weights[name] = torch.cat([weights[name], weight_before.to(weights[name])])
        elif "lora_B" in name:
            weights[name] = torch.cat([weights[name], -weight_before.to(weights[name])], 1)
    # s is alpha / rank, or alpha / sqrt(rank) with rank-stabilised LoRA, and must stay the same.
    alpha_factor = 2**0.5 if settings.get("use_rslora") else 2
    settings["init_lora_weights"] = True
    settings["r"] = 2 * settings["r"]
    settings["lora_alpha"] = alpha_factor * settings["lora_alpha"]
    for key, factor in (("rank_pattern", 2), ("alpha_pattern", alpha_factor)):
        settings[key] = {name: factor * value for name, value in (settings.get(key) or {}).items()}
    save_file(weights, folder / ADAPTER, metadata={"format": "pt"})
    write_json(folder / ADAPTER_CONFIG, settings)


def take_over(model: PeftModel, folder: str | Path, base: str) -> None:
    """Copy a trained adapter's weights into a new adapter on the base model (a spec), to continue training.

    The new adapter has this run's settings. Those that are not part of the weights, such as `lora_alpha`, must equal
    the old ones, because the same weights would otherwise have another effect, without any error.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    file = Path(resolve(folder)) / ADAPTER
    if not file.is_file():
        raise FileNotFoundError(f"model.adapter {folder}: there is no {ADAPTER}; give a run, a checkpoint or an export")
    check_weights(file)
    check_base(file.parent, base)
    config = file.with_name(CONFIG)
    trained_encoder = read_json(config).get("encoder_weights") if config.is_file() else ""
    if trained_encoder and getattr(model.config, "encoder_weights", "") not in ("", trained_encoder):
        raise ValueError(f"model.adapter {folder} was trained with another text encoder: set model.encoder to that one")
    trained = load_file(file)
    check_finite(trained.items(), f"model.adapter {folder}")
    _check_same_sizes(get_peft_model_state_dict(model), trained, folder)
    trained_settings = read_json(file.with_name(ADAPTER_CONFIG))
    for name in ("lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern"):
        now = getattr(model.peft_config["default"], name)
        then = trained_settings.get(name)
        # Empty patterns are written as null or {}.
        if (now or None) != (then or None):
            where = f"model.{name}" if name == "lora_alpha" else f"model.lora_options: {name}"
            raise ValueError(f"{where} {now}: model.adapter {folder} was trained with {then}, so set {then}")
    set_peft_model_state_dict(model, trained)


def _check_same_sizes(
    expected: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor], folder: str | Path
) -> None:
    """Raise an error that names the first weight, by name, that only one adapter has or whose size differs.

    PEFT would ignore weights without a place, and leave layers without weights as they are.
    """
    for name in sorted({*expected, *trained}):
        in_settings = tuple(expected[name].shape) if name in expected else "missing"
        in_adapter = tuple(trained[name].shape) if name in trained else "missing"
        if in_settings != in_adapter:
            raise ValueError(
                f"model.adapter {folder} does not have the layers and sizes of the settings: {name} is "
                f"{in_adapter} in the adapter, {in_settings} in the settings"
            )
