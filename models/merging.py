"""Merge an adapter into its base model, and make sure that the merged model computes what the adapter does."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
# Largest accepted difference of a logit after a merge, as a share of the largest logit. In 16 bits, each merged weight
# is rounded.
_TOLERANCE = 1e-3
_TOLERANCE_16_BITS = 0.1


def merge_into_base(adapted: PeftModel) -> PreTrainedModel:
    """Merge an adapter into its base model, in place, and return the model in eval mode.

    Some models use one weight in several layers; mostly the output layer is tied to the embeddings. If the adapter
    changes one of these layers, each gets its own weight before the merge, because the others would change with it.

    The logits of a short input are compared before PEFT's layers are unloaded, while the merge can still be undone.

    Raises:
        ValueError: PEFT can't merge the adapter, or the merged model has other logits. `adapted` is unmerged again.
    """
    import torch

    if not hasattr(adapted.base_model, "merge_adapter"):
        raise _not_mergeable(adapted, f"PEFT can't merge the type {adapted.active_peft_config.peft_type.value}")
    adapted.eval()
    expected = _logits_of_short_input(adapted)
    _separate_shared_weights(adapted)
    with warnings.catch_warnings():
        # PEFT warns of tied embeddings.
        warnings.simplefilter("ignore", UserWarning)
        try:
            # `safe_merge` raises an error if the sum is not finite.
            adapted.merge_adapter(safe_merge=True)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            # What has no merge was not merged.
            with suppress(NotImplementedError):
                adapted.unmerge_adapter()
            raise _not_mergeable(adapted, " ".join(str(error).split()).rstrip(".")) from error
        difference = float((_logits_of_short_input(adapted) - expected).abs().max() / expected.abs().max())
        tolerance = _TOLERANCE if adapted.dtype is torch.float32 else _TOLERANCE_16_BITS
        if difference > tolerance:
            adapted.unmerge_adapter()
            raise _not_mergeable(
                adapted, f"the logits of the merged model differ by {difference:.2g} of the largest logit"
            )
        # `merge_and_unload` would merge again, and some kinds of layers do not notice that they are merged already.
        merged: PreTrainedModel = adapted.unload()
    _record_untied_output(merged)
    return merged.eval()


def for_inference(adapted: PeftModel) -> PreTrainedModel:
    """Return a model with its adapter in eval mode, merged if its weights are float32 and PEFT can merge it.

    In 16 bits, merging would lose a third of an update with standard deviation 1e-4 by rounding.
    """
    import torch

    if adapted.dtype is torch.float32:
        try:
            return merge_into_base(adapted)
        except ValueError as error:
            logger.warning("%s. It stays unmerged, which is slower.", error)
    # The adapter's layers are in the model itself; PEFT's wrapper is not needed.
    return adapted.get_base_model().eval()


def _not_mergeable(adapted: PeftModel, reason: str) -> ValueError:
    """The error of an adapter that can't be merged; evaluation and serving run it unmerged (`for_inference`)."""
    base = adapted.active_peft_config.base_model_name_or_path
    return ValueError(
        f"the adapter can't be merged into its base model {base}: {reason}; use the adapter's folder where it need not "
        "be merged, as in evaluation and serving"
    )


def _logits_of_short_input(model: PeftModel) -> torch.Tensor:
    """Logits (1, T, V) of a short input; the lowest token ids are in every vocabulary and never a graph placeholder."""
    import torch

    ids = torch.arange(1, 9, device=model.device)[None]
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs).logits
    return logits.float()


def _separate_shared_weights(model: PeftModel) -> None:
    """Give each adapted layer its own weight, where its base layer shares one with other layers.

    The last user of a weight keeps it. Users are counted over all modules, because a weight may be tied anywhere.
    """
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    users: Counter[int] = Counter()
    for module in model.modules():
        users.update(map(id, module.parameters(recurse=False)))
    for module in model.modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        layer: Any = module.get_base_layer()
        weight = getattr(layer, "weight", None)
        if weight is None or users[id(weight)] < 2:
            continue
        users[id(weight)] -= 1
        layer.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)


def _record_untied_output(model: PreTrainedModel) -> None:
    """Write into the configurations that the output layer is not tied to the embeddings, if each has its own weight.

    PEFT corrects only the model's own configuration, which in a Graph-LLM is not that of its language model.
    transformers would tie the layers again when the vocabulary grows, and other programs when they load the model.
    """
    from transformers import PreTrainedModel

    embeddings = model.get_input_embeddings()
    output = model.get_output_embeddings()
    if output is None or output.weight is embeddings.weight:
        return
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config.tie_word_embeddings = False
            module.config.get_text_config().tie_word_embeddings = False
