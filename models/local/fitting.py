"""Which models `models.local.continuous_batch` can run.

Tested in `tests/models/local/test_decoders.py`.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from tripletune.core import libraries
from tripletune.models.losses import evaluating


def can_batch_continuously(model: PreTrainedModel) -> bool:
    """Whether `ContinuousBatch` can run a model: a decoder whose layers keep the keys and values of all tokens.

    It can't run a sharded model, because processes that share weights must take every step together. The kinds of
    layers are read from the cache that transformers makes for the model: a name of a family would not tell, since
    families mix layers with windows, states and full attention.
    """
    if model.config.is_encoder_decoder or is_sharded(model):
        return False
    # The cache of GPT-Neo does not show that its layers have windows.
    if "local" in getattr(model.config.get_text_config(), "attention_layers", ()):
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


@torch.no_grad()
def has_attention(model: PreTrainedModel) -> bool:
    """Whether a causal language model keeps keys and values of tokens in the cache that `generate` gives it.

    State-space models take a cache, too, so a tiny input shows whether the model writes keys and values.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if all(cache.is_linear):
        return False
    ids = torch.arange(1, 4, device=model.device)[None] % model.config.get_text_config().vocab_size
    inputs = {libraries.cache_argument(): cache}
    try:
        with evaluating(model):
            model(input_ids=ids, use_cache=True, **inputs)
    except (AttributeError, TypeError, ValueError):
        # A model with its own kind of cache.
        return False
    return bool(cache.get_seq_length() == ids.shape[1])


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether several processes share the weights of a model (ZeRO-3, FSDP2), so that all must call it together."""
    return any(hasattr(weight, "ds_id") or isinstance(weight, DTensor) for weight in model.parameters())
