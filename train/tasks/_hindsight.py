"""What the tasks have in common whose model can be its own teacher, with hindsight (`train.self_distillation`)."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from tripletune.train.tasks import TrainingTask

if TYPE_CHECKING:
    from datasets import Dataset

    from tripletune.train.engine import EngineMixin
    from tripletune.train.rows.hindsight import HindsightCollator, TaughtQuery
    from tripletune.train.rows.hindsight_prompts import HindsightPrompt


class HindsightTask(TrainingTask):
    """A task with the settings of `train.settings.HindsightSection`, and with `data.hindsight_prompt`."""

    @cached_property
    def hindsight(self) -> Any:
        """The teacher's prompt, or None without self-distillation."""
        if not self.config.train.hindsight_weight:
            return None
        return self.hindsight_kind().read(self.config.data.hindsight_prompt)

    def hindsight_kind(self) -> type[HindsightPrompt]:
        """The class that makes the teacher's prompts of this task's data."""
        raise NotImplementedError

    def hindsight_collator(self) -> HindsightCollator:
        """The collator of rows with a teacher."""
        raise NotImplementedError

    def query_ends(self) -> list[int]:
        """The tokens that end a sub-query that the student samples."""
        raise NotImplementedError

    def query_limit(self, query: TaughtQuery) -> int:
        """Maximum tokens of a sub-query that the student samples instead of this one."""
        raise NotImplementedError

    def refuse_sharding(self) -> None:
        """Raise `ValueError` if each process would hold only a part of the model that is its own teacher."""
        from tripletune.train.resume import sharding

        if self.hindsight is not None and sharding() in ("ZeRO-3", "FSDP2"):
            raise ValueError(
                f"train.hindsight_weight with {sharding()}: the teacher reads other batches on each device, so each "
                "needs the whole model: use ddp.yaml or zero2.yaml"
            )

    def open_rows(self) -> tuple[Dataset, Dataset | None]:
        """Make the rows; without a single sub-query to teach, the run would learn labels alone."""
        from tripletune.train.rows.cache import rows_meta

        rows = super().open_rows()
        if self.hindsight is not None:
            self.hindsight.refuse_nothing_taught(rows_meta(self.train))
        return rows

    def trainer(self) -> EngineMixin | None:
        """The trainer with a teacher that sees later facts, on request."""
        if self.hindsight is None:
            return super().trainer()
        from tripletune.train.self_distillation import SelfDistillationTrainer

        return SelfDistillationTrainer(self)

    def notes(self) -> list[str]:
        """Say how much sub-queries are learned from the teacher."""
        lines = super().notes()
        if self.hindsight is not None:
            train = self.config.train
            lines.append(
                f"sub-queries: {train.hindsight_weight:.0%} of their loss is the divergence {train.divergence} from "
                f"the model with hindsight, at {train.hindsight_queries} sub-queries"
            )
        return lines

    def examples(self) -> dict[str, tuple[list[int], list[int]]]:
        """The first row, and what the teacher reads for the first sub-query that is taught."""
        examples = super().examples()
        if self.hindsight is not None:
            from tripletune.train.rows.hindsight import teacher_example

            examples |= teacher_example(self.train, self.hindsight_collator().graph_token_id)
        return examples
