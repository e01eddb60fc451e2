"""Decoders on TRL's `SFTTrainer`, without the parts that would prepare, log or send what this project does itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer
from trl import SFTConfig, SFTTrainer

from tripletune.train.run_trainer import shared_arguments
from tripletune.train.text_batches import TextCollator
from tripletune.train.text_config import TextRunConfig
from tripletune.train.text_engine import TextMixin
from tripletune.train.text_evaluation import Scorer


def sft_arguments(config: TextRunConfig, evaluates: bool = True) -> SFTConfig:
    """Translate a run configuration into TRL's arguments; see `train.run_trainer.shared_arguments`."""
    return SFTConfig(
        **shared_arguments(config, evaluates),
        # Rows come tokenised and, where asked for, packed (`train.text_rows`): a run that is started again must find
        # the very same rows, in a file it can open at once.
        dataset_kwargs={"skip_prepare_dataset": True},
        packing=False,
        max_length=None,
    )


class TextTrainer(TextMixin, SFTTrainer):
    """Trains a decoder on rows or packs.

    Args:
        model: The model, with or without PEFT adapter, prepared by `models.label_loss.learn_labels_only`.
        config: The run.
        tokenizer: Saved into every checkpoint.
        train_dataset: Rows of `train.text_rows.cached_rows`, or packs of `train.text_rows.pack_rows`.
        eval_dataset: Likewise, or None.
        scorer: See `TextMixin.begin_text_run`.
        files: See `TextMixin.begin_text_run`.
    """

    def __init__(
        self,
        model: Any,
        config: TextRunConfig,
        tokenizer: Any,
        train_dataset: Any,
        eval_dataset: Any = None,
        scorer: Scorer | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        attention = str(getattr(model.config, "_attn_implementation", ""))
        super().__init__(
            model=model,
            args=sft_arguments(config, eval_dataset is not None),
            data_collator=TextCollator(tokenizer.pad_token_id, flatten="flash" in attention),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
        )
        self.begin_text_run(config, scorer, files or {})

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The model's own loss, which is taken at label positions alone.

        TRL's way runs the output layer at every position where there is no GPU, and reads entropy and accuracy off it.
        """
        # With a cache a packed row would be taken for one sequence, and the loss would be wrong.
        inputs = {**inputs, "use_cache": False}
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: `tripletune checkpoints export` writes the card."""

    def _send_telemetry(self) -> None:
        """Nothing is sent anywhere that was not asked for."""
