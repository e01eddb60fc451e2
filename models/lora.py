"""New LoRA adapters: the layers that they change, PEFT's settings, and training that continues an earlier adapter.

Adapters in folders are checked and loaded in `models.adapters`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tripletune.core.files import read_json, write_json
from tripletune.core.options import nearest
from tripletune.models.adapters import check_base, check_layer_names
from tripletune.models.run_folders import ADAPTER, ADAPTER_CONFIG, CONFIG, check_finite, check_weights
from tripletune.models.specs import pinned_source, resolve

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
# What is trained: an adapter (of a Graph-LLM, with its graph modules), only graph modules, or all weights.
Tune = Literal["lora", "graph_token", "all"]
# Our settings of fields of PEFT's `LoraConfig`; the others are in `model.lora_options`.
_SETTING_OF_FIELD = {"r": "model.lora_rank", "lora_alpha": "model.lora_alpha"}


def chosen_layers(model: PreTrainedModel, targets: Sequence[str], name: str) -> set[str]:
    """The names of the linear layers for LoRA; "all-linear": all except the output layer.

    They are the last parts of the names. Of a multimodal model they are whole names of layers that read text, because a
    vision tower has layers of the same names, which would never learn.

    PEFT reports a name that the model lacks only if none of the names fits, so every name is checked here.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    text_model = _text_model_prefix(model)
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


def _text_model_prefix(model: PreTrainedModel) -> str:
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
        settings.base_model_name_or_path, settings.revision = pinned_source(base)
    return adapted


def put_adapter(model: PreTrainedModel, options: Mapping[str, Any], **settings: Any) -> PeftModel:
    """Put LoRA on a model, in place, and return PEFT's wrapper of it.

    What PEFT would ignore or accept and fail at later (layer numbers, names of modules, biases) is checked around it.

    Args:
        options: Fields of PEFT's `LoraConfig` that the user set (`model.lora_options`); they replace `settings`.
        settings: Fields of `LoraConfig` from the caller, which PEFT checks.
    """
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    check_layer_names(options, "model.lora_options")
    # Called for its check of the layer numbers.
    modules_of_chosen_layers(model, options)
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


def modules_of_chosen_layers(model: torch.nn.Module, options: Mapping[str, Any]) -> dict[str, int]:
    """The layer number, counted as in PEFT, of each module in the layers of `layers_to_transform`, by module name.

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
    """Copy a trained adapter's weights into the new adapter of `model`, to continue its training; `base` is a spec.

    The new adapter has this run's settings, which must equal the old ones: the weights would not fit another rank or
    other layers, and with another `lora_alpha` they would have another effect, without any error of PEFT.
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
    expected = get_peft_model_state_dict(model)
    differing = _differing_settings(model.peft_config["default"], read_json(file.with_name(ADAPTER_CONFIG)))
    layers = _adapted_layers(expected)
    trained_layers = _adapted_layers(trained)
    if trained_layers and layers != trained_layers:
        differing.append(_DifferingSetting("model.lora_targets", sorted(layers), sorted(trained_layers)))
    if differing:
        raise ValueError(f"model.adapter {folder}: {'; '.join(str(setting) for setting in differing)}")
    _check_same_sizes(expected, trained, folder)
    set_peft_model_state_dict(model, trained)


class _DifferingSetting(NamedTuple):
    """A setting whose value is not that of the adapter's training, under the name that a user sets."""

    name: str
    now: Any
    then: Any

    def __str__(self) -> str:
        """The part of an error for this setting."""
        then = _as_typed(self.then)
        return f"{self.name} {_as_typed(self.now)}: it was trained with {then}, so set {then}"


def _as_typed(value: Any) -> str:
    """A value as the command line takes it: names with commas between them, and JSON."""
    return ",".join(value) if isinstance(value, list) else json.dumps(value)


def _differing_settings(now: LoraConfig, trained: Mapping[str, Any]) -> list[_DifferingSetting]:
    """The settings of a new adapter that differ from the trained one's `adapter_config.json`, except the layers."""
    differing = []
    for field in ("r", "lora_alpha", "use_rslora", "use_dora", "alpha_pattern", "rank_pattern"):
        value = getattr(now, field)
        then = trained.get(field)
        # Empty patterns are written as null or {}.
        if (value or None) != (then or None):
            name = _SETTING_OF_FIELD.get(field, f"model.lora_options: {field}")
            differing.append(_DifferingSetting(name, value, then))
    return differing


def _adapted_layers(weights: Iterable[str]) -> set[str]:
    """The last parts of the names of the layers with LoRA, from the names of an adapter's weights."""
    layers = set()
    for name in weights:
        layer, has_lora, _ = name.partition(".lora_")
        if has_lora:
            layers.add(layer.rpartition(".")[2])
    return layers


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
                f"{in_adapter} in the adapter, {in_settings} in the settings; set model.… as in the run that trained it"
            )
