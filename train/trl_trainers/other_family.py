"""On-policy distillation from a teacher with another vocabulary or on a server.

The teacher reads the prompt in its own chat template, and the student's reply in its own tokens (`alignment.py`). The
loss of a reply is the sum over its spans of the reverse Kullback-Leibler divergence from the teacher to the student
given the text before the span:

- For a span of one token on both sides and a teacher on this machine, over the outcomes that both can predict
  (`alignment.SharedClasses`).
- Else, estimated by the span that the student wrote: log p - log q, where the probabilities p and q of student and
  teacher are the products over their tokens. Its gradient is (log p - log q) times that of log p, which has the
  divergence's gradient as its mean (REINFORCE). It needs the probabilities of written tokens alone, which a server
  gives; other divergences can't be estimated from them.

The sum is divided by the number of all tokens that the student wrote, as in distillation from the same vocabulary.

TRL's GOLD trainer (1.16) is not used: it aligns byte-level tokenizers alone, not Gemma's; its teacher reads the
student's template; by default it leaves out the end of a reply, which a small student has to learn; and in a span of
several tokens it compares the expectations of two models that have read different text.

Shapes: T tokens of prompt and reply, N tokens of the reply, S spans, V vocabulary, C classes.

Tested in `tests/train/test_other_family.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tripletune.core.data.records import IGNORED
from tripletune.train.trl_trainers import OnPolicyTrainer, RewardLog, logits_at_labels
from tripletune.train.trl_trainers.alignment import (
    NO_CLASS,
    AlignedReply,
    AlignedSpan,
    SharedClasses,
    Unscored,
    align_reply,
)
from tripletune.train.trl_trainers.served_teacher import ServedTeacher

if TYPE_CHECKING:
    from tripletune.train.evaluation import Batch
    from tripletune.train.tasks.cirag_on_policy import OnPolicyTask

logger = logging.getLogger(__name__)
# A share of unscored tokens of a rollout that is worth a warning.
_MANY = 0.1
# Our names in `rewards.jsonl`: shares of the student's tokens that were not scored, by reason, the share of spans of
# several tokens, the mean tokens of a reply, and the student's entropy. With TRL's names.
_LOGGED = {name: f"teacher/{name}" for name in ("unscored", *Unscored._fields, "merged")} | {
    "tokens": "completions/mean_length", "entropy": "entropy",
}  # fmt: skip


class ScoredReply(NamedTuple):
    """A reply of the student for the teacher.

    Attributes:
        prompt: The prompt in the teacher's tokens.
        log_probs: Of a teacher on a server, the log-probability of each of its tokens of the reply.
    """

    prompt: list[int]
    aligned: AlignedReply
    log_probs: list[float] | None


class ReplyLoss(NamedTuple):
    """The sums over a reply's tokens of the loss and of the student's entropy in nats."""

    loss: torch.Tensor
    entropy: torch.Tensor


class OtherFamilyTrainer(OnPolicyTrainer):
    """Trains a student on its own replies, scored by a teacher with another vocabulary or on a server."""

    def __init__(self, task: OnPolicyTask) -> None:
        """Make the trainer; TRL gets no teacher, since its own loss needs one vocabulary."""
        if task.other_family is None:
            raise ValueError("the teacher has the student's vocabulary: use OnPolicyTrainer")
        self.family = task.other_family
        super().__init__(task)
        self.add_callback(RewardLog(task, _LOGGED))
        self._server: ServedTeacher | None = None
        self._context: int | None = None
        # Whether the warning about many unscored tokens was logged.
        self._warned = False
        served = task.config.train.served
        if task.teacher is not None:
            self._context = getattr(task.teacher.config.get_text_config(), "max_position_embeddings", None)
            self.teacher_model = self.accelerator.prepare_model(task.teacher, evaluation_mode=True)
        elif served is not None:
            folder = Path(task.config.output_dir)
            self._server = ServedTeacher(served.model, served.url, folder, self.family.teacher.tokenizer)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        """Make a rollout, and align its replies with the teacher's tokens; a server scores them now."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        replies = []
        for row, ids, mask in zip(inputs, output["completion_ids"], output["completion_mask"], strict=True):
            aligned = align_reply(ids[mask.bool()].tolist(), self.family.student, self.family.teacher)
            prompt = list(row["teacher_prompt"])
            if self._context is not None and len(prompt) + len(aligned.teacher_ids) > self._context:
                aligned = _too_long(aligned)
            replies.append(ScoredReply(prompt, aligned, None))
        if self._server is not None:
            replies = self._scored_by_server(self._server, replies)
        self._count([reply.aligned for reply in replies], int(output["completion_mask"].sum()))
        return output | {"teacher": replies}

    @staticmethod
    def _scored_by_server(server: ServedTeacher, replies: Sequence[ScoredReply]) -> list[ScoredReply]:
        """The replies with the server's log-probabilities."""
        scores = server.score([reply.prompt for reply in replies], [reply.aligned.teacher_ids for reply in replies])
        scored = []
        for reply, log_probs in zip(replies, scores, strict=True):
            aligned = _too_long(reply.aligned) if log_probs is None else reply.aligned
            scored.append(ScoredReply(reply.prompt, aligned, log_probs))
        return scored

    def _count(self, replies: Sequence[AlignedReply], tokens: int) -> None:
        """Note the shares of tokens that are not scored and of spans of several tokens, on all processes together.

        Raises:
            ValueError: No reply of the rollout fits into the teacher's context, so nothing would be learned.
        """
        unscored = [reply.unscored for reply in replies]
        counts = [sum(tokens_of_replies) for tokens_of_replies in zip(*unscored, strict=True)]
        merged = 0
        spans = 0
        for reply in replies:
            spans += len(reply.spans)
            merged += sum(span.is_merged for span in reply.spans)
        local = torch.tensor([*counts, merged, spans, tokens], device=self.accelerator.device)
        *counts, merged, spans, tokens = self.accelerator.reduce(local).tolist()
        total = Unscored(*counts)
        if total.too_long == tokens:
            raise ValueError(
                "no prompt with its reply fits into the teacher's context: lower data.max_prompt_tokens and "
                "train.max_reply_tokens, or use another teacher"
            )
        values = {"unscored": sum(total) / tokens, "merged": merged / max(spans, 1)}
        for name, count in total._asdict().items():
            values[name] = count / tokens
        mode = "train" if self.model.training else "eval"
        for name, value in values.items():
            self._metrics[mode][f"teacher/{name}"].append(value)
        if values["unscored"] > _MANY and not self._warned:
            self._warned = True
            logger.warning(
                "the teacher can't score %d of %d tokens of a rollout (%d after the last common border of both "
                "tokenizers, %d at the end of replies that were cut off, %d too long); rewards.jsonl has the shares of "
                "later rollouts", sum(total), tokens, *total,
            )  # fmt: skip

    def _compute_loss(
        self, unwrapped_student: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The loss of a micro-batch, the sum of the student's entropies, and the number of its tokens.

        Row by row: the two models pad differently, and a row needs no padding.
        """
        tokens = inputs["completion_mask"].sum()
        rows = zip(
            inputs["prompt_ids"], inputs["prompt_mask"], inputs["completion_ids"], inputs["completion_mask"],
            inputs["teacher"], strict=True,
        )  # fmt: skip
        losses = []
        entropies = []
        for prompt, prompt_mask, ids, mask, reply in rows:
            written = ids[mask.bool()]
            logits = reply_logits(unwrapped_student, prompt[prompt_mask.bool()], written) / self.temperature
            row = self._loss_of_reply(logits, written, reply)
            losses.append(row.loss)
            entropies.append(row.entropy)
        divisor = tokens.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return torch.stack(losses).sum() / divisor, torch.stack(entropies).sum(), tokens

    def _loss_of_reply(self, logits: torch.Tensor, written: torch.Tensor, reply: ScoredReply) -> ReplyLoss:
        """The loss of a reply.

        Args:
            logits: The student's, (N, V_student).
            written: The student's tokens, (N,).
        """
        log_probs = logits.log_softmax(-1)
        fixed = log_probs.detach()
        entropy = -(fixed.exp() * fixed).sum()
        chosen = log_probs.gather(1, written[:, None])[:, 0]
        # A reply without spans has a loss, too, since every process must compute gradients.
        loss = 0.0 * chosen.sum()
        spans = reply.aligned.spans
        if not spans:
            return ReplyLoss(loss, entropy)
        ids = torch.tensor(reply.aligned.teacher_ids, device=logits.device)
        if reply.log_probs is not None:
            teacher_chosen = torch.tensor(reply.log_probs, device=logits.device)
            sampled = spans
        else:
            teacher_logits = self._teacher_logits(reply.prompt, ids)
            teacher_chosen = teacher_logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
            sampled = [span for span in spans if span.is_merged]
            single = [span for span in spans if not span.is_merged]
            at_student = [span.student.start for span in single]
            at_teacher = [span.teacher.start for span in single]
            if self.family.classes is not None and single:
                loss = loss + class_divergence(logits[at_student], teacher_logits[at_teacher], self.family.classes)
        if sampled:
            loss = loss + sampled_divergence(chosen, teacher_chosen, sampled)
        return ReplyLoss(loss, entropy)

    @torch.no_grad()
    def _teacher_logits(self, prompt: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
        """The logits (N, V_teacher) of a teacher on this machine at its tokens of a reply."""
        self.teacher_model.eval()
        return reply_logits(self.teacher_model, torch.tensor(prompt, device=ids.device), ids) / self.temperature


def reply_logits(model: nn.Module, prompt: torch.Tensor, reply: torch.Tensor) -> torch.Tensor:
    """A model's logits at the tokens of a reply, (N, V), in float32.

    Args:
        prompt: (T - N,) tokens without padding.
        reply: (N,) tokens.
    """
    row = torch.cat([prompt, reply])[None]
    labels = row.clone()
    labels[:, : len(prompt)] = IGNORED
    # With labels, the model computes only the logits of label tokens (`models.losses.learn_labels_only`).
    logits = model(input_ids=row, labels=labels).logits
    return logits_at_labels(logits, labels[:, 1:] != IGNORED).float()


def class_divergence(student: torch.Tensor, teacher: torch.Tensor, classes: SharedClasses) -> torch.Tensor:
    """The sum of the reverse divergences at S spans, over the classes of tokens that both models can predict.

    Args:
        student: The student's logits at the spans, (S, V_student).
        teacher: The teacher's logits there, (S, V_teacher).
    """
    log_p = class_log_probs(student, classes.student, classes.size)
    log_q = class_log_probs(teacher, classes.teacher, classes.size)
    return (log_p.exp() * (log_p - log_q)).sum()


def class_log_probs(logits: torch.Tensor, classes: torch.Tensor, count: int) -> torch.Tensor:
    """The log-probability of each class, (S, C), given that the next token has a class.

    Args:
        logits: (S, V).
        classes: The class of each token, (V,), or `NO_CLASS`.
        count: The number of classes C.
    """
    classes = classes.to(logits.device)
    has_class = classes != NO_CLASS
    probs = logits[:, has_class].softmax(-1)
    sums = probs.new_zeros(len(logits), count).index_add(1, classes[has_class], probs)
    return sums.clamp_min(torch.finfo(sums.dtype).tiny).log()


def sampled_divergence(student: torch.Tensor, teacher: torch.Tensor, spans: Sequence[AlignedSpan]) -> torch.Tensor:
    """The sum of the estimates of the reverse divergence by the written text of spans; see the module's docstring.

    Args:
        student: The student's log-probabilities of its tokens, (N,).
        teacher: The teacher's log-probabilities of its tokens.
    """
    log_p = torch.stack([student[span.student.start : span.student.stop].sum() for span in spans])
    log_q = torch.stack([teacher[span.teacher.start : span.teacher.stop].sum() for span in spans])
    ratio = (log_p - log_q).detach()
    # The value is the ratio; the gradient is the ratio times that of log p.
    return (ratio * (1 + log_p - log_p.detach())).sum()


def _too_long(aligned: AlignedReply) -> AlignedReply:
    """A reply that the teacher can't read, in which nothing is scored."""
    tokens = sum(len(span.student) for span in aligned.spans) + sum(aligned.unscored)
    return AlignedReply(aligned.teacher_ids, [], Unscored(too_long=tokens))
