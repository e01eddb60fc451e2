"""The training engine of the Graph-LLM: transformers' Trainer with what this model needs and nothing else.

`train.run_trainer` holds what every run needs. What is added here: graphs in the batches and evaluation
by generation. The loss is summed over label tokens and divided by their number in the
whole optimiser step, across devices and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from tripletune.models.data.records import Record
from tripletune.models.graph_llm.embeddings import EmbeddingTable
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.train.collate import IGNORED
from tripletune.train.compiled import as_written
from tripletune.train.config import RunConfig
from tripletune.train.evaluation import generate_and_score
from tripletune.train.run import make_collator
from tripletune.train.run_trainer import (
    LOSS_FILE,
    LossLog,
    PlainProgress,
    RunMixin,
    newest_checkpoint,
    shared_arguments,
    use_bf16,
)
from tripletune.train.sampling import EpochSampler, QuestionSampler

__all__ = [
    "LOSS_FILE",
    "GraphLLMTrainer",
    "LossLog",
    "PlainProgress",
    "newest_checkpoint",
    "training_arguments",
    "use_bf16",
]


def training_arguments(config: RunConfig) -> TrainingArguments:
    """Translate a run configuration into transformers' arguments."""
    return TrainingArguments(**shared_arguments(config))


class GraphLLMTrainer(RunMixin, Trainer):
    """Trains a (PEFT-wrapped) `GraphLLM` on tokenised records.

    Args:
        model: The model.
        config: The run.
        processor: Saved into every checkpoint, so that a checkpoint loads by itself.
        table: Embedding table; None without graph.
        train_dataset: Rows of `train.dataset.tokenize`.
        eval_dataset: Likewise, or None.
        eval_records: The records behind `eval_dataset`, for evaluation by generation.
    """

    def __init__(
        self,
        model: Any,
        config: RunConfig,
        processor: GraphLLMProcessor,
        table: EmbeddingTable | None,
        train_dataset: Any,
        eval_dataset: Any = None,
        eval_records: Sequence[Record] = (),
    ) -> None:
        super().__init__(
            model=model,
            args=training_arguments(config),
            data_collator=make_collator(config, processor, table),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
        )
        self.processor = processor
        self.table = table
        self.eval_records = eval_records
        self._eval_sums = torch.zeros(2, dtype=torch.double)
        self.begin_run(config)

    def make_sampler(self, dataset: Any, batch_size: int) -> EpochSampler:
        """As for every run, or with the records of a question together where their prefixes are shared."""
        if not self.config.train.shared_prefixes:
            return super().make_sampler(dataset, batch_size)
        # Together in a micro-batch: what is in another one can't be shared.
        columns = dataset.with_format("numpy")
        return QuestionSampler(
            columns["length"][:], columns["question"][:], self.args.train_batch_size, self.config.seed
        )

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Loss on the validation records and, unless switched off, scores of generated replies."""
        with as_written(self.config.train.torch_compile):
            metrics = super().evaluate(*args, **kwargs)
            if self.config.train.eval_generate and self.eval_records:
                scores = generate_and_score(
                    self.accelerator.unwrap_model(self.model),
                    self.processor,
                    self.table,
                    self.eval_records,
                    self.config.train.eval_batch_size,
                    self.config.train.eval_max_new_tokens,
                    self.args.process_index,
                    self.args.world_size,
                )
                scores = {f"eval_{name}": value for name, value in scores.items()}
                self.log(scores)
                metrics |= scores
        return metrics

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """One batch of an evaluation, whose loss counts as often as it has label tokens."""
        found = super().prediction_step(model, inputs, *args, **kwargs)
        tokens = (inputs["labels"] != IGNORED).sum().double()
        self._eval_sums += torch.stack([found[0].double() * tokens, tokens]).cpu()
        return found

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """transformers' loop; its loss is the mean over label tokens, as in training, and not over batches."""
        self._eval_sums = torch.zeros(2, dtype=torch.double)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        sums = self._eval_sums.to(self.args.device)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(sums)
        output.metrics[f"{metric_key_prefix}_loss"] = (sums[0] / sums[1]).item()
        return output

    def save_beside(self, folder: Path) -> None:
        """The base's configuration and the processor, so that a checkpoint loads by itself."""
        model = self.accelerator.unwrap_model(self.model)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.config.save_pretrained(folder)
        self.processor.save_pretrained(folder)
