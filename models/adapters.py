"""LoRA on a plain language model, decoder or encoder-decoder, and which of its layers can be adapted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers.pytorch_utils import Conv1D

ALL_LINEAR = "all-linear"


@contextmanager
def no_weights_missing() -> Iterator[None]:
    """PEFT only warns of an adapter file without some of its layers, which then do nothing; here that is an error.

    Raises:
        UserWarning: with the names of the weights that are missing.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys", category=UserWarning)
        yield


def chosen_layers(model: Any, targets: Sequence[str], name: str) -> set[str]:
    """The linear layers that LoRA adapts, by the last part of their names.

    Args:
        model: A language model.
        targets: Names, or "all-linear" for every linear layer but the output layer.
        name: The model's name, for the message.

    Raises:
        ValueError: a target does not exist.
    """
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
    """Freeze a language model and put LoRA on some of its layers.

    Args:
        model: The model.
        rank: LoRA rank r.
        alpha: LoRA alpha.
        dropout: LoRA dropout.
        targets: See `chosen_layers`.
        base: What the model is loaded by; the adapter names it (`models.sources.adapter_base`).
        revision: Its hub revision.

    Raises:
        ValueError: a target does not exist.
    """
    config = LoraConfig(
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=sorted(chosen_layers(model, targets, base)),
    )
    adapted = get_peft_model(model, config)
    # PEFT takes the folder it was loaded from, which is a cache where the model came from a package.
    for settings in adapted.peft_config.values():
        settings.base_model_name_or_path = base
        settings.revision = revision
    return adapted
