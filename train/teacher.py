"""What on-policy distillation needs besides TRL: a teacher with the student's vocabulary, and the order of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from tripletune.train.distill_config import DistillConfig
from tripletune.train.sampling import EpochSampler


class RepeatedSteps(Sampler[int]):
    """An order of rows in which the rows of each optimiser step come once for each of its micro-batches.

    TRL replies to all prompts of a step at its first micro-batch, and splits the replies among the others. Rows that do
    not fill a step are left out of the epoch.

    Args:
        order: The order of the rows.
        rows: Rows of a step.
        times: Micro-batches of a step.
    """

    def __init__(self, order: EpochSampler, rows: int, times: int) -> None:
        self.order, self.rows, self.times = order, rows, times

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.order) // self.rows * self.rows * self.times

    def __iter__(self) -> Iterator[int]:
        order = list(self.order)
        for start in range(0, len(order) - self.rows + 1, self.rows):
            for _ in range(self.times):
                yield from order[start : start + self.rows]


def load_teacher(config: DistillConfig, tokenizer: Any) -> Any:
    """The teacher, frozen, after making sure that it shares the student's vocabulary.

    Args:
        config: The run.
        tokenizer: The student's.

    Raises:
        FileNotFoundError: no such model.
        ValueError: teacher and student do not share a vocabulary.
    """
    from tripletune.models.loading import load_tokenizer, load_weights

    spec, revision = str(config.train.teacher), config.train.teacher_revision
    theirs, ours = load_tokenizer(spec, revision).get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        different = sum(ours.get(token) != number for token, number in theirs.items())
        raise ValueError(
            f"train.teacher {spec} and model.base {config.model.base} do not share a vocabulary ({len(theirs)} and "
            f"{len(ours)} tokens, {different} of the teacher's stand elsewhere): on_policy compares probabilities "
            "token by token; take a teacher of the student's family, or train.method sft on its trajectories"
        )
    model = load_weights(spec, revision=revision)
    return model.requires_grad_(False)


def check_same_width(model: Any, teacher: Any) -> None:
    """Make sure that both models have as many logits, which can be more than the vocabulary has tokens.

    Raises:
        ValueError: they have not.
    """
    ours, theirs = (one.config.get_text_config().vocab_size for one in (model, teacher))
    if ours != theirs:
        raise ValueError(
            f"the student has {ours} logits and the teacher {theirs}, though their tokens are the same: their output "
            "layers are padded differently; take a teacher of the student's size of vocabulary"
        )
