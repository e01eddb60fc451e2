"""LoRA on a language model: which layers, a fresh adapter, and one that starts from a trained one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.models.files import read_json
from tripletune.models.loading import resolve
from tripletune.models.run_folders import ADAPTER, ADAPTER_CONFIG, check_weights

if TYPE_CHECKING:
    from peft import PeftModel

ALL_LINEAR = "all-linear"


def chosen_layers(model: Any, targets: Sequence[str], name: str) -> set[str]:
    """The linear layers that LoRA adapts, by the last part of their names; "all-linear": all but the output layer."""
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
            f"LoRA targets {sorted(chosen - known)} do not exist in {name}; its linear layers are "
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
    revision: str | None = None,
) -> PeftModel:
    """Freeze a language model and put LoRA on `chosen_layers`; the adapter names `base` and its hub revision."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=sorted(chosen_layers(model, targets, base)),
    )
    adapted: PeftModel = get_peft_model(model, config)
    # PEFT takes the folder it was loaded from, which is a cache where the model came from a package.
    for settings in adapted.peft_config.values():
        settings.base_model_name_or_path = base
        settings.revision = revision
    return adapted


def take_over(model: PeftModel, folder: str | Path) -> None:
    """Give a fresh adapter the weights of a trained one, to train on from there."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    file = Path(resolve(folder)) / ADAPTER
    if not file.is_file():
        raise FileNotFoundError(f"model.adapter {folder}: there is no {ADAPTER}; name a run, a checkpoint or an export")
    check_weights(file)
    own, found = get_peft_model_state_dict(model), load_file(file)
    shapes = [{name: tuple(weight.shape) for name, weight in weights.items()} for weights in (own, found)]
    if other := sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()}):
        sides = [
            f"{name} is {shapes[1].get(name, 'missing')} there, {shapes[0].get(name, 'missing')} here" for name in other
        ]
        raise ValueError(f"model.adapter {folder} has other layers or sizes than the settings ask for: {sides[0]}")
    factors = [model.peft_config["default"].lora_alpha, read_json(file.with_name(ADAPTER_CONFIG)).get("lora_alpha")]
    if factors[0] != factors[1]:
        raise ValueError(
            f"model.lora_alpha {factors[0]}: model.adapter {folder} was trained with {factors[1]}, so set that"
        )
    set_peft_model_state_dict(model, found)
