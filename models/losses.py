"""The loss of a batch, at label positions alone.

Prompts have hundreds of tokens and labels some tens, and the output layer is the widest of a small model.

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
from transformers.modeling_outputs import CausalLMOutput

from tripletune.models.data.records import IGNORED

logger = logging.getLogger(__name__)
_NOT_FOR_THE_DECODER = ("logits_to_keep", "return_dict", "use_cache")


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """A model in eval mode; afterwards its training mode is restored."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def label_logits(model: Any, keep: torch.Tensor, *args: Any, **inputs: Any) -> torch.Tensor:
    """Logits (N, V) of a causal language model where `keep` (B, at most T) says so, and nowhere else.

    Families change them before the loss: Gemma caps, Granite divides, Cohere multiplies.
    """
    # With a cache a packed row would be taken for one sequence.
    hidden = model.get_decoder()(*args, **inputs, use_cache=False).last_hidden_state
    logits, config = model.get_output_embeddings()(hidden[:, : keep.shape[1]][keep]), model.config.get_text_config()
    if (softcap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits * (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)


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
        weights: (N,) weights of the tokens; all 1 when left out.
        num_items_in_batch: Divisor of the sum instead of the weights' sum: the weights of the whole optimiser step.
    """
    losses = nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    total = (losses if weights is None else losses * weights).sum()
    if num_items_in_batch is None:
        num_items_in_batch = max(targets.numel(), 1) if weights is None else weights.sum()
    return total / num_items_in_batch


def target_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """`label_loss` of `labels` (B, T) and an encoder-decoder's logits (B, T, V), at the tokens that they predict."""
    keep = labels != IGNORED
    return label_loss(outputs.logits[keep], labels[keep], None, num_items_in_batch)


def learn_labels_only(model: Any) -> bool:
    """Make a causal language model compute logits at label positions alone when it is called with labels.

    It replaces `forward`, not the trainer's loss, because DDP, FSDP and PEFT act on calls of `forward`. Without labels,
    as in generation, and with `full_logits=True` it does what it did before. Call it before PEFT wraps the model.

    Returns:
        Whether it does so now. A mixture of experts keeps its own loss, which has a term for the balance of experts;
        so does a family that does something unknown between output layer and loss, which a tiny input shows.
    """
    text_config = model.config.get_text_config()
    if hasattr(text_config, "output_router_logits"):
        logger.info(
            "%s has its own loss to balance experts: logits are computed at all positions", type(model).__name__
        )
        return False
    if not scales_alike(model):
        return False
    original = model.forward

    # PEFT and `generate` look at the signature of the class.
    @functools.wraps(type(model).forward)
    def forward(
        *args: Any,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        full_logits: bool = False,
        **kwargs: Any,
    ) -> Any:
        if labels is None:
            return original(*args, **kwargs)
        if full_logits:
            return original(*args, labels=labels, num_items_in_batch=num_items_in_batch, **kwargs)
        inputs = {name: value for name, value in kwargs.items() if name not in _NOT_FOR_THE_DECODER}
        keep = labels[:, 1:] != IGNORED
        logits = label_logits(model, keep, *args, **inputs)
        loss = label_loss(logits, labels[:, 1:][keep], None, num_items_in_batch)
        return CausalLMOutput(loss=loss, logits=logits)

    model.forward = forward
    # The trainer asks for it before it passes the number of label tokens.
    model.accepts_loss_kwargs = True
    return True


@torch.no_grad()
def scales_alike(model: Any) -> bool:
    """Whether a causal language model changes its logits as `label_logits` does, tested by a tiny input."""
    text_config = model.config.get_text_config()
    ids = torch.arange(1, 5, device=model.device)[None] % text_config.vocab_size
    try:
        with evaluating(model):
            expected = model(input_ids=ids, use_cache=False).logits[0].float()
            found = label_logits(model, torch.ones_like(ids, dtype=torch.bool), input_ids=ids).float()
        alike = expected.shape == found.shape and torch.allclose(found, expected, rtol=1e-2, atol=1e-3)
    except (AttributeError, TypeError):
        alike = False
    if not alike:
        logger.warning("%s scales its logits in its own way: they are computed at all positions", type(model).__name__)
    return alike
