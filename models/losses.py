"""Compute logits and loss of a batch at label positions only.

Prompts have hundreds of tokens but labels only tens, and the output layer is the widest layer of a small model.

Shapes: B rows, T tokens, N label tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput, Seq2SeqLMOutput
from transformers.utils import ModelOutput

from tripletune.core.data.records import IGNORED

logger = logging.getLogger(__name__)
# Arguments of the whole model that its decoder does not take, or that `label_logits` sets itself.
_NOT_FOR_THE_DECODER = ("logits_to_keep", "return_dict", "use_cache")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode; restore its training mode afterwards, also after an error."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def label_logits(model: PreTrainedModel, keep: torch.Tensor, *args: Any, **inputs: Any) -> torch.Tensor:
    """Logits (N, V) of a causal language model, only at positions where `keep` (B, at most T) is true.

    Some families scale their logits: Gemma caps them, Granite divides them, Cohere multiplies them.

    Args:
        keep: Boolean; columns after its last one are left out.
        args: Arguments of the model's decoder, like `inputs`; the decoder itself refuses others.
    """
    # With a cache, transformers would treat a packed row as one sequence.
    hidden = model.get_decoder()(*args, **inputs, use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden[:, : keep.shape[1]][keep])
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    factor = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return logits * factor / divisor


def label_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The mean cross-entropy of label tokens.

    Args:
        logits: (N, V).
        targets: (N,) token ids.
        weights: (N,) weights of the tokens; by default 1.
        num_items_in_batch: Sum of the weights in the whole optimiser step, as divisor of the sum of losses.
    """
    losses = nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    divisor = num_items_in_batch
    if weights is None:
        total = losses.sum()
        if divisor is None:
            # A batch without labels has loss 0, not NaN.
            divisor = max(targets.numel(), 1)
    else:
        total = (losses * weights).sum()
        if divisor is None:
            divisor = weights.sum()
    return total / divisor


def target_loss(
    outputs: Seq2SeqLMOutput, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """`label_loss` of an encoder-decoder's logits (B, T, V) for `labels` (B, T), at label positions only.

    Nothing is shifted: the decoder reads the labels moved by its start token.
    """
    keep = labels != IGNORED
    return label_loss(outputs.logits[keep], labels[keep], None, num_items_in_batch)


def token_divergences(student: torch.Tensor, teacher: torch.Tensor, divergence: float) -> torch.Tensor:
    """How far a student's next-token distributions are from a teacher's: (N,), with a gradient for the student.

    With 0 it is the forward KL divergence KL(teacher || student), with 1 the reverse KL(student || teacher). In between
    it is the generalised Jensen-Shannon divergence (Agarwal et al., 2024), b KL(teacher || M) +
    (1 - b) KL(student || M) with M = b teacher + (1 - b) student.

    Args:
        student: (N, V) logits.
        teacher: (N, V) logits of the same tokens.
        divergence: The number b, from 0 to 1.
    """
    of_student = student.float().log_softmax(-1)
    of_teacher = teacher.detach().float().log_softmax(-1)
    if divergence == 0:
        return _kl_divergences(of_teacher, of_student)
    if divergence == 1:
        return _kl_divergences(of_student, of_teacher)
    shares = torch.tensor([1 - divergence, divergence], device=of_student.device).log()
    mixed = torch.logaddexp(of_student + shares[0], of_teacher + shares[1])
    from_teacher = _kl_divergences(of_teacher, mixed)
    from_student = _kl_divergences(of_student, mixed)
    return divergence * from_teacher + (1 - divergence) * from_student


def _kl_divergences(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """KL(first || second), (N,), of distributions given as log-probabilities (N, V)."""
    return nn.functional.kl_div(second, first, reduction="none", log_target=True).sum(-1)


def learn_labels_only(model: PreTrainedModel) -> bool:
    """Make a causal language model compute logits only at label positions when it is called with labels.

    This replaces `forward`, not the trainer's loss, because DDP, FSDP and PEFT act on calls of `forward`. Calls without
    labels (as in generation) or with `full_logits=True` do not change. Call this function before PEFT wraps the model.

    Returns:
        Whether the model was changed. A mixture of experts keeps its own loss, which has a term to balance experts. A
        family that changes its logits in an unknown way also keeps its loss; a tiny input shows this.
    """
    if hasattr(model.config.get_text_config(), "output_router_logits") or not scales_logits_alike(model):
        return False
    original = model.forward

    # PEFT and `generate` inspect the signature of the class.
    @functools.wraps(type(model).forward)
    def forward(
        *args: Any,
        labels: torch.Tensor | None = None,
        label_weights: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        full_logits: bool = False,
        **kwargs: Any,
    ) -> ModelOutput:
        """With labels, loss and logits at label positions; else, or with `full_logits`, the model's own output.

        Most positions have no label, and their logits would be most of the memory. The logits are therefore of shape
        (labels, V), in the order of rows and positions. `label_weights` (B, T) are those of `label_loss`.
        """
        if labels is None:
            return original(*args, **kwargs)
        if full_logits:
            return original(*args, labels=labels, num_items_in_batch=num_items_in_batch, **kwargs)
        inputs = {name: value for name, value in kwargs.items() if name not in _NOT_FOR_THE_DECODER}
        keep = labels[:, 1:] != IGNORED
        logits = label_logits(model, keep, *args, **inputs)
        weights = None if label_weights is None else label_weights[:, 1:][keep]
        loss = label_loss(logits, labels[:, 1:][keep], weights, num_items_in_batch)
        return CausalLMOutput(loss=loss, logits=logits)

    model.forward = forward
    # The trainer passes the number of label tokens only if this is set.
    model.accepts_loss_kwargs = True
    return True


@torch.no_grad()
def scales_logits_alike(model: PreTrainedModel) -> bool:
    """Whether a causal language model scales its logits like `label_logits`, tested with a tiny input.

    Names of settings cannot tell, because a family may scale its logits by a setting that is not known here.
    """
    text_config = model.config.get_text_config()
    ids = torch.arange(1, 5, device=model.device)[None] % text_config.vocab_size
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    try:
        with evaluating(model):
            expected = model(input_ids=ids, use_cache=False).logits[0].float()
            logits = label_logits(model, everywhere, input_ids=ids).float()
        alike = expected.shape == logits.shape and torch.allclose(logits, expected, rtol=1e-2, atol=1e-3)
    except (AttributeError, TypeError):
        # A model whose decoder or output layer cannot be called apart.
        alike = False
    if not alike:
        logger.warning("%s scales its logits in an unknown way, so all logits are computed", type(model).__name__)
    return alike
