"""On-policy distillation from a teacher on this machine, on TRL's `DistillationTrainer` (an option beyond the paper).

The student writes its own decision after each prompt of the trajectories, and learns to give each next token the
probability that the teacher gives it (generalised Jensen-Shannon divergence; Agarwal et al., 2024). The teacher's
trajectories give the prompts alone. A step costs a generation, so it is many times slower than learning from replies.

Shapes: B rows, P tokens of the longest prompt, C tokens of the longest reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from trl import DistillationConfig, DistillationTrainer

from tripletune.train.distill_config import DistillConfig
from tripletune.train.run_trainer import shared_arguments
from tripletune.train.sampling import EpochSampler
from tripletune.train.teacher import RepeatedSteps
from tripletune.train.text_engine import TextMixin
from tripletune.train.text_evaluation import Scorer


def distillation_arguments(config: DistillConfig) -> DistillationConfig:
    """Translate a run configuration into TRL's arguments."""
    return DistillationConfig(
        **shared_arguments(config),
        beta=config.train.divergence,
        temperature=config.train.temperature,
        max_completion_length=config.train.max_reply_tokens,
    )


class OnPolicyTrainer(TextMixin, DistillationTrainer):
    """Trains a student on its own replies.

    Args:
        model: The student, with or without PEFT adapter.
        teacher: From `train.teacher.load_teacher`.
        config: The run.
        tokenizer: The student's; saved into every checkpoint.
        train_dataset: Prompts of `train.distill_data.tokenize_trajectories`.
        eval_dataset: Likewise, or None.
        scorer: See `TextMixin.begin_text_run`.
        files: See `TextMixin.begin_text_run`.

    Raises:
        ValueError: there are fewer prompts than an optimiser step takes.
    """

    def __init__(
        self,
        model: Any,
        teacher: Any,
        config: DistillConfig,
        tokenizer: Any,
        train_dataset: Any,
        eval_dataset: Any = None,
        scorer: Scorer | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        # TRL reads the column `prompt`; everything else in a row would be taken for pictures and the like.
        prompts = [
            None if one is None else one.select_columns(["input_ids", "length"]).rename_column("input_ids", "prompt")
            for one in (train_dataset, eval_dataset)
        ]
        super().__init__(
            model=model,
            teacher_model=teacher,
            args=distillation_arguments(config),
            train_dataset=prompts[0],
            eval_dataset=prompts[1],
            processing_class=tokenizer,
        )
        self._tokens = 0
        self.begin_text_run(config, scorer, files or {})

    def make_sampler(self, dataset: Any, batch_size: int) -> RepeatedSteps:  # type: ignore[override]
        """The order of the prompts.

        Raises:
            ValueError: there are fewer prompts than an optimiser step takes.
        """
        if len(dataset) < batch_size:
            raise ValueError(
                f"there are {len(dataset)} prompts, and an optimiser step takes {batch_size}: lower train.batch_size "
                "or train.gradient_accumulation"
            )
        order = EpochSampler(
            dataset.with_format("numpy")["length"][:], batch_size, self.config.seed, self.config.train.group_by_length
        )
        return RepeatedSteps(order, batch_size, self.args.gradient_accumulation_steps)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One micro-batch; its share of the step's loss goes to the loss log."""
        # Not the mixin's, which counts the tokens of a batch that is there before the replies are.
        loss: torch.Tensor = DistillationTrainer.training_step(self, model, inputs, num_items_in_batch)
        self.losses.add(loss, self._tokens)
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        self._tokens = int(inputs["prompt_ids"].numel() + inputs["completion_ids"].numel())
        return inputs

    def _tokenize_prompts(self, prompts: list[list[int]]) -> tuple[list[list[int]], None, dict[str, Any]]:
        # They are tokens already, made as the loop makes them.
        return prompts, None, {}

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: `tripletune checkpoints export` writes the card."""

    def _send_telemetry(self) -> None:
        """Nothing is sent anywhere that was not asked for."""
