"""The trainer of on-policy distillation: TRL's `DistillationTrainer` with this engine's data order, logs and resume.

Shapes: B rows, P tokens of the longest prompt, C tokens of the longest reply.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from trl import DistillationConfig, DistillationTrainer

from tripletune.train.engine import EngineMixin, shared_arguments


class TrlMixin(EngineMixin):
    """What trainers of TRL that write replies have in common, in front of the trainer's class."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        self._batch = super()._prepare_inputs(inputs)
        return self._batch

    def _as_cast(self, model: Any) -> AbstractContextManager[None]:
        # TRL writes replies, and computes hidden states, around the forward that accelerate has put autocast on.
        return nullcontext()

    def tokens_of(self, inputs: Any) -> int:
        """Tokens of prompts and replies; the batch was there before the replies were."""
        return int(self._batch["prompt_ids"].numel() + self._batch["completion_ids"].numel())

    def label_tokens(self, inputs: Any) -> torch.Tensor:
        """Tokens of the replies."""
        return inputs["completion_mask"].sum()

    def _send_telemetry(self) -> None:
        """Nothing is sent anywhere that was not asked for."""


class OnPolicyTrainer(TrlMixin, DistillationTrainer):
    """Trains a student on its own replies."""

    def __init__(self, task: Any) -> None:
        train = task.config.train
        # TRL reads the column `prompt`; everything else in a row would be taken for pictures and the like.
        prompts = [
            None if one is None else one.select_columns(["input_ids", "length"]).rename_column("input_ids", "prompt")
            for one in (task.train, task.validation)
        ]
        super().__init__(
            model=task.model,
            teacher_model=task.teacher,
            args=DistillationConfig(
                **shared_arguments(task.config, task.validation is not None),
                beta=train.divergence,
                temperature=train.temperature,
                max_completion_length=train.max_reply_tokens,
            ),
            train_dataset=prompts[0],
            eval_dataset=prompts[1],
            processing_class=task.processor,
        )
        self.begin_run(task)

    def _tokenize_prompts(self, prompts: list[list[int]]) -> tuple[list[list[int]], None, dict[str, Any]]:
        # They are tokens already, made as the loop makes them.
        return prompts, None, {}
