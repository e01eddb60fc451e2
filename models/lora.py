"""LoRA adapters: their base model, the layers they change, loading, merging and continued training.

A folder with only a PEFT adapter stands for the base model (`adapter_base`) plus the adapter.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.core.files import (
    read_json,
    write_json,
)
from tripletune.core.options import nearest
from tripletune.models.completeness import telling
from tripletune.models.fingerprints import content_fingerprint
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

ALL_LINEAR = "all-linear"
# The prefix of "(q_proj|v_proj)" in the adapter of a Graph-LLM, the only regular expression that is accepted.
LANGUAGE_MODEL_LAYERS = r"(?:.*\.)?language_model\..*\."
_NAMES = re.compile(r"[\w.-]*|\([\w|-]+\)")
# Fields that PEFT matches against the names of all modules.
_MATCHED = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern", "target_parameters")


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
