"""Self-distillation with hindsight: a model learns its sub-queries from itself, when it reads what they will find.

The model is a planner that is a Graph-LLM, or CIRAG's integrator (`train.tasks._hindsight.HindsightTask`). The teacher
has the weights of the student in training, without gradient and dropout (SDFT, Shenfeld et al., 2026; SDPO, Hübotter et
al., 2026), and is compared with it at the tokens of sub-queries alone (SD-Search, Ma et al., 2026). So no second model
is in memory. The divergence stands beside the loss of labels, where SD-Search has GRPO. The teacher's prompt is made in
`train.rows.hindsight_prompts`.

Shapes: B rows, T tokens of the longest row, N label tokens, V vocabulary.

Tested in `tests/train/test_self_distillation.py` and `tests/train/test_cirag_hindsight.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tripletune.core.calls import Sampling
from tripletune.core.data.records import IGNORED
from tripletune.models.local import decode
from tripletune.models.local.continuous_batch import make_decoder
from tripletune.models.local.requests import Draw, Request
from tripletune.models.losses import evaluating, token_divergences
from tripletune.train.engine import Engine
from tripletune.train.evaluation import Batch
from tripletune.train.rows.hindsight import TaughtQuery, taught_queries
from tripletune.train.rows.records import graphs_of_row

if TYPE_CHECKING:
    from tripletune.train.rows.cache import Row
    from tripletune.train.rows.hindsight import HindsightCollator
    from tripletune.train.tasks._hindsight import HindsightTask

# Steps between the seeds of two training runs with neighbouring seeds: more than any run has.
_STEPS_PER_SEED = 1_000_003
# What a batch has for the teacher, and the student's model does not take.
_OF_TEACHER = ("taught_weights", "teacher", "batch_rows")


class SelfDistillationTrainer(Engine):
    """Trains a model on labels, and on its own distributions with hindsight."""

    task: HindsightTask
    # A `RunConfig` whose section `train` has the fields of `HindsightSection`.
    config: Any

    def __init__(self, task: HindsightTask) -> None:
        """Make the trainer of a task whose model and rows are loaded."""
        collator: HindsightCollator = task.hindsight_collator()
        super().__init__(task.model, task.train, collator, task.config, validation=task.validation, task=task)
        self._collator = collator

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> torch.Tensor | int | None:
        """The divisor of the step's loss: the weights of labels and of taught tokens, so that it is that of labels.

        Sub-queries of the student's own are not known yet; those of the records stand for them.
        """
        of_labels = super()._get_num_items_in_batch(batch_samples, device)
        if of_labels is None:
            return None  # at the end of the data
        taught = [batch["taught_weights"][:, 1:].sum() for batch in batch_samples]
        return of_labels + self.accelerator.reduce(torch.stack(taught).sum().to(device))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of labels, plus the weighted divergences from the teacher with the same divisor.

        An evaluation has the loss of labels alone, and no `num_items_in_batch`, the divisor of `Trainer.compute_loss`.
        """
        if "taught_weights" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        if self.config.train.hindsight_queries == "own":
            inputs = self._with_own_queries(inputs)
        student = {name: value for name, value in inputs.items() if name not in _OF_TEACHER}
        loss, outputs = super().compute_loss(model, student, True, num_items_in_batch=num_items_in_batch)
        if "teacher" in inputs:
            # transformers has scaled the other loss likewise: gradients are averaged over the processes.
            scale = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            divergences = self._weighted_divergences(outputs.logits, inputs)
            loss = loss + scale * divergences.sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss

    def _weighted_divergences(self, logits: torch.Tensor, inputs: Batch) -> torch.Tensor:
        """The divergence at each taught token times its weight, (taught tokens,).

        Args:
            logits: (N, V) of the student at label tokens.
            inputs: A batch of `HindsightCollator` with a teacher.
        """
        is_label = inputs["labels"][:, 1:] != IGNORED
        weights = inputs["taught_weights"][:, 1:][is_label]
        is_taught = weights > 0
        # The model itself and not what a launcher wrapped around it: processes have different numbers of sub-queries.
        model = self.accelerator.unwrap_model(self.model)
        with torch.no_grad(), evaluating(model):
            teacher_logits = model(**inputs["teacher"]).logits
        divergences = token_divergences(logits[is_taught], teacher_logits, self.config.train.divergence)
        return divergences * weights[is_taught]

    def _with_own_queries(self, inputs: Batch) -> Batch:
        """The batch with rows of sub-queries that the student samples, taught instead of those of the records.

        The sub-query is sampled after the tokens that are not taught, at temperature 1 (SDFT). Its seed depends on run,
        step and prompt, so a resumed run samples the same.
        """
        rows = inputs["batch_rows"].rows
        queries = list(taught_queries(rows, self._collator.graph_token_id))
        if not queries:
            return inputs
        seed = self.config.seed * _STEPS_PER_SEED + self.state.global_step
        sampling = Sampling(temperature=1.0, seed=seed)
        requests = [self._request(query, rows[query.row], sampling) for query in queries]
        model = self.accelerator.unwrap_model(self.model)
        pad_token_id = self.task.tokenizer.pad_token_id
        decoder = make_decoder(model, self.task.query_ends(), pad_token_id, inputs=self._collator.graph_arguments)
        compiled = self.config.train.torch_compile
        # As in an evaluation, compiled layers run uncompiled.
        with evaluating(model), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            decode(decoder, requests)
        own_rows = []
        for query, request in zip(queries, requests, strict=True):
            end = [] if request.end is None else [request.end]
            own_rows.append(query.own_row(request.prompt, request.tokens + end))
        return self._prepare_inputs(self._collator(rows, own_rows))

    def _request(self, query: TaughtQuery, row: Row, sampling: Sampling) -> Request:
        """The request to sample a sub-query after its prompt in a row."""
        prompt = list(row["input_ids"][: query.query])
        placeholders = [place for place, token in enumerate(prompt) if token == self._collator.graph_token_id]
        inputs = dict(zip(placeholders, graphs_of_row(query.graphs), strict=True))
        return Request(prompt, self.task.query_limit(query), draw=Draw.of(sampling, prompt), inputs=inputs)
