"""What a loaded model says to a prompt, written down so that another loading of it can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Of the layout of `verify.json`.
FORMAT = 1
LOGIT_SAMPLE = 64
MAX_NEW_TOKENS = 32


def observed_reply(model: Any, prompt: Sequence[int], ends: Sequence[int], pad: int, **extra: Any) -> dict[str, Any]:
    """A sample of the logits that follow a prompt, and the tokens of the greedy reply.

    Args:
        model: The model in float32.
        prompt: Its tokens.
        ends: Tokens that end a reply.
        pad: Padding token.
        **extra: Further arguments of `generate`.
    """
    import torch

    ids = torch.tensor([list(prompt)], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=list(ends),
            pad_token_id=pad,
            return_dict_in_generate=True,
            output_logits=True,
            **extra,
        )
    logits = output.logits[0][0].float().cpu()
    places = torch.linspace(0, logits.shape[0] - 1, min(LOGIT_SAMPLE, logits.shape[0])).round().long()
    # An encoder-decoder gives back its reply alone, behind the token its decoder starts with.
    start = 1 if model.config.is_encoder_decoder else ids.shape[1]
    return {
        "vocabulary": logits.shape[0],
        "logit_ids": places.tolist(),
        # Nine digits tell float32 values apart.
        "logits": [float(f"{value:.9g}") for value in logits[places].tolist()],
        "log_normaliser": float(f"{torch.logsumexp(logits, 0).item():.9g}"),
        "argmax": int(logits.argmax()),
        "reply_ids": output.sequences[0, start:].tolist(),
    }
