"""The training engine of plain language models, decoders and encoder-decoders.

Rows are tokenised before (`train.text_rows`): columns `input_ids`, `labels` and `length`. The loss is summed over label
tokens and divided by their number in the whole optimiser step, across devices and micro-batches; decoders compute
logits at label positions alone (`models.label_loss`). Decoders are trained by `train.text_sft.TextTrainer` on TRL's
`SFTTrainer`, encoder-decoders by `TextSeq2SeqTrainer` on transformers' `Seq2SeqTrainer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from tripletune.models.label_loss import IGNORED, label_loss
from tripletune.train.compiled import as_written
from tripletune.train.run_trainer import RunMixin, shared_arguments
from tripletune.train.sampling import EpochSampler
from tripletune.train.text_batches import Seq2SeqCollator
from tripletune.train.text_config import TextRunConfig
from tripletune.train.text_evaluation import EVALUATIONS, EvaluationLog, Scorer


class TextMixin(RunMixin):
    """What both trainers share. Put in front of a trainer class; call `begin_text_run` at the end of `__init__`."""

    evaluations: EvaluationLog
    scorer: Scorer | None
    files: Mapping[str, str]
    # Optimiser steps done, and the metrics.
    last_evaluation: tuple[int, dict[str, float]] | None = None

    def begin_text_run(self, config: TextRunConfig, scorer: Scorer | None, files: Mapping[str, str]) -> None:
        """Set the logs up.

        Args:
            config: The run.
            scorer: Scores the model at every evaluation, besides its loss.
            files: Small files that go into every checkpoint, text by name, such as the prompt.
        """
        self.begin_run(config)
        self.scorer, self.files = scorer, files
        self.evaluations = EvaluationLog(Path(config.output_dir) / EVALUATIONS)
        self.add_callback(self.evaluations)

    def make_sampler(self, dataset: Any, batch_size: int) -> EpochSampler:
        """The order of the rows; packs are all of a length and come shuffled."""
        if "seq_lengths" in dataset.column_names:
            return EpochSampler([1] * len(dataset), batch_size, self.config.seed, group_by_length=False)
        return super().make_sampler(dataset, batch_size)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Loss on the validation rows and the scorer's scores; both go to `evaluations.jsonl`."""
        with as_written(self.config.train.torch_compile):
            metrics = super().evaluate(*args, **kwargs)
            model = self.accelerator.unwrap_model(self.model)
            scores = self.scorer(model, self.args.process_index, self.args.world_size) if self.scorer else {}
        if self.scorer is not None:
            named = {f"eval_{name}": value for name, value in scores.items()}
            self.log(dict(named))
            metrics |= named
        if self.is_world_process_zero():
            row = {"step": self.state.global_step, "epoch": self.state.epoch or 0.0, "loss": metrics["eval_loss"]}
            self.evaluations.add(row | scores)
        self.last_evaluation = self.state.global_step, metrics
        return metrics

    def save_beside(self, folder: Path) -> None:
        """The prompt and what else the model is to be used with; the trainer has saved the tokenizer."""
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")


class TextSeq2SeqTrainer(TextMixin, Seq2SeqTrainer):
    """Trains an encoder-decoder on sources and targets.

    Args:
        model: The model, with or without PEFT adapter.
        config: The run.
        tokenizer: Saved into every checkpoint.
        train_dataset: Rows of `train.text_rows.cached_rows`; `labels` is the whole target.
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
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        super().__init__(
            model=model,
            args=Seq2SeqTrainingArguments(**shared_arguments(config, eval_dataset is not None)),
            data_collator=Seq2SeqCollator(tokenizer.pad_token_id, base.prepare_decoder_input_ids_from_labels),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            # Models of this kind take the mean over a micro-batch, which weighs short ones too much.
            compute_loss_func=target_loss,
        )
        self.begin_text_run(config, scorer, files or {})


def target_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Loss of an encoder-decoder, whose logits stand at the tokens they predict.

    Args:
        outputs: With `logits` (B, T, V).
        labels: (B, T), -100 where nothing is learned.
        num_items_in_batch: Label tokens of the whole optimiser step.
    """
    keep = labels != IGNORED
    return label_loss(outputs.logits[keep], labels[keep], None, num_items_in_batch)


def make_trainer(model: Any, *args: Any, **kwargs: Any) -> TextMixin:
    """The trainer of a model: `train.text_sft.TextTrainer` or `TextSeq2SeqTrainer`, which take the same arguments.

    Raises:
        ModuleNotFoundError: the model is a decoder and TRL is not installed.
    """
    if model.config.is_encoder_decoder:
        return TextSeq2SeqTrainer(model, *args, **kwargs)
    from tripletune.train.text_rows import trl_pack_dataset

    trl_pack_dataset()  # says in a sentence what is missing
    from tripletune.train.text_sft import TextTrainer

    return TextTrainer(model, *args, **kwargs)
